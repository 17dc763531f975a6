//! The installation's secret: what is signed with it, and the keys derived from it.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

use crate::codec::BytesError;
use crate::key::DigestKey;

/// The bytes of a signature: half of SHA-256's, which is as strong as the digests it protects.
const TAG: usize = 16;
/// The longest token that is looked at: a receipt with every charge it can have is a third of this.
const MAX_TOKEN: usize = 8_192;

/// The secret of one installation. Shared by its nodes, known to nobody else.
#[derive(Clone)]
pub struct Secret {
    /// Keyed once: that is half of the work of a short signature.
    keyed: Hmac<Sha256>,
}

/// What a signature is for, so that a token of one kind is never taken for another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Receipts of charges.
    Receipt,
    /// Reservations.
    Reservation,
    /// Login attempts under way.
    Attempt,
    /// Devices that have logged in.
    Device,
}

impl Purpose {
    const fn label(self) -> &'static str {
        match self {
            Self::Receipt => "threshold receipt 1",
            Self::Reservation => "threshold reservation 1",
            Self::Attempt => "threshold attempt 1",
            Self::Device => "threshold device 1",
        }
    }
}

impl Secret {
    /// From the bytes of a secret; at least 16, and better 32, of them random.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Option<Self> {
        let keyed = <Hmac<Sha256>>::new_from_slice(bytes).ok()?;
        (bytes.len() >= 16).then_some(Self { keyed })
    }

    /// The key for digests that are stored.
    #[must_use]
    pub fn digest_key(&self) -> DigestKey {
        let derived = self.mac(b"threshold digest 1", &[]);
        DigestKey::new(derived.first_chunk().copied().unwrap_or_default())
    }

    /// Tells installations apart without telling the secret: a store holds it, and refuses a node with another.
    #[must_use]
    pub fn fingerprint(&self) -> u32 {
        let derived = self.mac(b"threshold fingerprint 1", &[]);
        u32::from_be_bytes(derived.first_chunk().copied().unwrap_or_default())
    }

    /// Bytes as a signed token that can travel anywhere.
    #[must_use]
    pub fn seal(&self, purpose: Purpose, bytes: &[u8]) -> String {
        let tag = self.mac(purpose.label().as_bytes(), bytes);
        let mut all = Vec::with_capacity(bytes.len().saturating_add(TAG));
        all.extend_from_slice(bytes);
        all.extend(tag.iter().take(TAG));
        URL_SAFE_NO_PAD.encode(all)
    }

    /// The bytes of a token, if this installation signed it for this purpose.
    ///
    /// # Errors
    /// Where the text is no token, or the signature does not match.
    pub fn open(&self, purpose: Purpose, token: &str) -> Result<Vec<u8>, BytesError> {
        if token.len() > MAX_TOKEN {
            return Err(BytesError::Malformed("token"));
        }
        let mut all = URL_SAFE_NO_PAD.decode(token).map_err(|_| BytesError::Malformed("token"))?;
        let at = all.len().checked_sub(TAG).ok_or(BytesError::Truncated)?;
        let tag = all.split_off(at);
        let mut mac = self.begin(purpose.label().as_bytes());
        mac.update(&all);
        // Compares in constant time.
        mac.verify_truncated_left(&tag).map_err(|_| BytesError::Unsigned)?;
        Ok(all)
    }

    fn begin(&self, label: &[u8]) -> Hmac<Sha256> {
        let mut mac = self.keyed.clone();
        mac.update(&[u8::try_from(label.len()).unwrap_or(u8::MAX)]);
        mac.update(label);
        mac
    }

    fn mac(&self, label: &[u8], bytes: &[u8]) -> [u8; 32] {
        let mut mac = self.begin(label);
        mac.update(bytes);
        mac.finalize().into_bytes().into()
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(byte: u8) -> Secret {
        Secret::new(&[byte; 32]).unwrap()
    }

    #[test]
    fn a_token_opens_for_its_purpose_and_its_secret_only() {
        let token = secret(1).seal(Purpose::Receipt, b"hello");
        assert_eq!(secret(1).open(Purpose::Receipt, &token), Ok(b"hello".to_vec()));
        assert_eq!(secret(1).open(Purpose::Device, &token), Err(BytesError::Unsigned));
        assert_eq!(secret(2).open(Purpose::Receipt, &token), Err(BytesError::Unsigned));
        assert!(secret(1).open(Purpose::Receipt, "").is_err());
        assert!(secret(1).open(Purpose::Receipt, "not base64!").is_err());
        assert!(secret(1).open(Purpose::Receipt, &"A".repeat(MAX_TOKEN + 1)).is_err());
    }

    #[test]
    fn every_changed_character_breaks_the_signature() {
        let token = secret(1).seal(Purpose::Receipt, b"ten units");
        for index in 0..token.len() {
            let mut forged = token.clone().into_bytes();
            forged[index] = if forged[index] == b'A' { b'B' } else { b'A' };
            let forged = String::from_utf8(forged).unwrap();
            // The last character carries unused bits, so another spelling of the same bytes is no forgery.
            let opened = secret(1).open(Purpose::Receipt, &forged);
            assert!(opened.is_err() || opened == Ok(b"ten units".to_vec()), "{index}");
        }
    }

    #[test]
    fn short_secrets_are_refused_and_none_is_shown() {
        assert!(Secret::new(b"hunter2").is_none());
        assert_eq!(format!("{:?}", secret(65)), "Secret(…)");
        assert_ne!(secret(1).fingerprint(), secret(2).fingerprint());
        assert_ne!(secret(1).digest_key(), secret(2).digest_key());
    }
}
