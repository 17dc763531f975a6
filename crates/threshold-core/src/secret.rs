//! The installation's secret: what is signed with it, and the keys derived from it.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

use crate::codec::BytesError;
use crate::key::DigestKey;

/// The bytes of a key id.
const KEY_ID: usize = 4;
/// The bytes of a signature: half of SHA-256's, which is as strong as the digests it protects.
const TAG: usize = 16;
/// The longest token that is looked at: a receipt with every charge it can have is a third of this.
const MAX_TOKEN: usize = 8_192;

/// The secret of one installation. Shared by its nodes, known to nobody else.
#[derive(Clone)]
pub struct Secret {
    /// Keyed once: that is half of the work of a short signature.
    keyed: Hmac<Sha256>,
    key_id: KeyId,
}

/// Tells secrets apart and reveals nothing else of them. Whatever is stored or handed out under a secret begins with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyId(u32);

impl KeyId {
    /// From the number it is.
    #[must_use]
    pub const fn from_u32(number: u32) -> Self {
        Self(number)
    }

    /// As a number.
    #[must_use]
    pub const fn to_u32(self) -> u32 {
        self.0
    }
}

/// 8 hexadecimal digits.
impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0)
    }
}

/// The secrets in force: the present one signs, and what an old one signed is accepted too while a rotation is under way.
#[derive(Debug, Clone)]
pub struct Secrets {
    present: Secret,
    old: Option<Secret>,
}

/// The present and the old secret have the same key id: they are equal, or collide, which happens once in four billion pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the present and the old secret have the same key id, {0}: give another one, or no old one")]
pub struct SameKeyId(pub KeyId);

impl Secrets {
    /// One secret, which signs and is accepted.
    #[must_use]
    pub const fn new(present: Secret) -> Self {
        Self { present, old: None }
    }

    /// The same, and what `old` signed is accepted too.
    ///
    /// # Errors
    /// Where the two have the same key id.
    pub fn with_old(self, old: Secret) -> Result<Self, SameKeyId> {
        let same = old.key_id() == self.present.key_id();
        if same { Err(SameKeyId(old.key_id())) } else { Ok(Self { old: Some(old), ..self }) }
    }

    /// The secret that signs.
    #[must_use]
    pub const fn present(&self) -> &Secret {
        &self.present
    }

    /// The secret before it, if that is still accepted.
    #[must_use]
    pub const fn old(&self) -> Option<&Secret> {
        self.old.as_ref()
    }

    /// The bytes of a token, if a secret in force signed it for this purpose. Its key id and its signature are checked
    /// before anything else in it is read.
    ///
    /// # Errors
    /// Where the text is no token, where its key id is that of no secret in force, and where the signature does not match.
    pub fn open(&self, purpose: Purpose, token: &str) -> Result<Vec<u8>, BytesError> {
        if token.len() > MAX_TOKEN {
            return Err(BytesError::Malformed("token"));
        }
        let all = URL_SAFE_NO_PAD.decode(token).map_err(|_| BytesError::Malformed("token"))?;
        let (id, _) = all.split_first_chunk::<KEY_ID>().ok_or(BytesError::Truncated)?;
        let id = KeyId(u32::from_be_bytes(*id));
        let mut known = [Some(&self.present), self.old.as_ref()].into_iter().flatten();
        let secret = known.find(|secret| secret.key_id == id).ok_or(BytesError::UnknownKey(id))?;
        secret.verify(purpose, &all).map(<[u8]>::to_vec)
    }
}

impl From<Secret> for Secrets {
    fn from(secret: Secret) -> Self {
        Self::new(secret)
    }
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
        let keyed = <Hmac<Sha256>>::new_from_slice(bytes).ok().filter(|_| bytes.len() >= 16)?;
        let derived = mac(begin(&keyed, b"threshold key id 1"), &[]);
        let key_id = KeyId(u32::from_be_bytes(derived.first_chunk().copied().unwrap_or_default()));
        Some(Self { keyed, key_id })
    }

    /// The key for digests that are stored.
    #[must_use]
    pub fn digest_key(&self) -> DigestKey {
        let derived = self.mac(b"threshold digest 1", &[]);
        DigestKey::new(derived.first_chunk().copied().unwrap_or_default())
    }

    /// Its name: a store holds it, and refuses a node with another secret.
    #[must_use]
    pub const fn key_id(&self) -> KeyId {
        self.key_id
    }

    /// Bytes as a signed token that can travel anywhere: the key id, the bytes, and a signature of both.
    #[must_use]
    pub fn seal(&self, purpose: Purpose, bytes: &[u8]) -> String {
        let mut all = Vec::with_capacity(bytes.len().saturating_add(KEY_ID + TAG));
        all.extend_from_slice(&self.key_id.0.to_be_bytes());
        all.extend_from_slice(bytes);
        let tag = self.mac(purpose.label().as_bytes(), &all);
        all.extend(tag.iter().take(TAG));
        URL_SAFE_NO_PAD.encode(all)
    }

    /// What [`seal`](Self::seal) was given, if this secret signed it for this purpose.
    fn verify<'a>(&self, purpose: Purpose, all: &'a [u8]) -> Result<&'a [u8], BytesError> {
        let (signed, tag) = all.split_last_chunk::<TAG>().ok_or(BytesError::Truncated)?;
        let mut mac = begin(&self.keyed, purpose.label().as_bytes());
        mac.update(signed);
        // Compares in constant time.
        mac.verify_truncated_left(tag).map_err(|_| BytesError::Unsigned)?;
        signed.get(KEY_ID..).ok_or(BytesError::Truncated)
    }

    fn mac(&self, label: &[u8], bytes: &[u8]) -> [u8; 32] {
        mac(begin(&self.keyed, label), bytes)
    }
}

/// What is signed begins with a label and its length.
fn begin(keyed: &Hmac<Sha256>, label: &[u8]) -> Hmac<Sha256> {
    let mut mac = keyed.clone();
    mac.update(&[u8::try_from(label.len()).unwrap_or(u8::MAX)]);
    mac.update(label);
    mac
}

fn mac(mut mac: Hmac<Sha256>, bytes: &[u8]) -> [u8; 32] {
    mac.update(bytes);
    mac.finalize().into_bytes().into()
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(byte: u8) -> Secret {
        Secret::new(&[byte; 32]).unwrap()
    }

    fn only(byte: u8) -> Secrets {
        Secrets::new(secret(byte))
    }

    /// A token that somebody else made: any key id, any bytes, and any signature.
    fn token(id: KeyId, bytes: &[u8], tag: &[u8]) -> String {
        URL_SAFE_NO_PAD.encode([&id.to_u32().to_be_bytes(), bytes, tag].concat())
    }

    #[test]
    fn a_token_opens_for_its_purpose_and_its_secret_only() {
        let token = secret(1).seal(Purpose::Receipt, b"hello");
        assert_eq!(only(1).open(Purpose::Receipt, &token), Ok(b"hello".to_vec()));
        assert_eq!(only(1).open(Purpose::Device, &token), Err(BytesError::Unsigned));
        assert_eq!(only(2).open(Purpose::Receipt, &token), Err(BytesError::UnknownKey(secret(1).key_id())));
        assert!(only(1).open(Purpose::Receipt, "").is_err());
        assert!(only(1).open(Purpose::Receipt, "not base64!").is_err());
        assert!(only(1).open(Purpose::Receipt, &"A".repeat(MAX_TOKEN + 1)).is_err());
    }

    #[test]
    fn every_changed_character_breaks_the_signature() {
        let token = secret(1).seal(Purpose::Receipt, b"ten units");
        for index in 0..token.len() {
            let mut forged = token.clone().into_bytes();
            forged[index] = if forged[index] == b'A' { b'B' } else { b'A' };
            let forged = String::from_utf8(forged).unwrap();
            // The last character carries unused bits, so another spelling of the same bytes is no forgery.
            let opened = only(1).open(Purpose::Receipt, &forged);
            assert!(opened.is_err() || opened == Ok(b"ten units".to_vec()), "{index}");
        }
    }

    /// Woken by opening with the present secret alone, and by trying both secrets on every token.
    #[test]
    fn the_old_secret_is_accepted_while_it_is_given_and_signs_nothing() {
        let both = only(2).with_old(secret(1)).unwrap();
        for purpose in [Purpose::Receipt, Purpose::Reservation, Purpose::Attempt, Purpose::Device] {
            let (old, new) = (secret(1).seal(purpose, b"old"), both.present().seal(purpose, b"new"));
            assert_eq!(both.open(purpose, &old), Ok(b"old".to_vec()));
            assert_eq!(both.open(purpose, &new), Ok(b"new".to_vec()));
            assert_eq!(only(2).open(purpose, &new), Ok(b"new".to_vec()));
            assert_eq!(only(2).open(purpose, &old), Err(BytesError::UnknownKey(secret(1).key_id())));
            assert!(only(1).open(purpose, &new).is_err());
        }
        // The key id chooses the secret, and the signature covers it.
        let tag = |by: &Secret, id: KeyId, bytes: &[u8]| {
            by.mac(Purpose::Receipt.label().as_bytes(), &[&id.to_u32().to_be_bytes(), bytes].concat())[..TAG].to_vec()
        };
        let (first, second) = (secret(1).key_id(), secret(2).key_id());
        let own = tag(&secret(1), first, b"x");
        assert_eq!(both.open(Purpose::Receipt, &token(first, b"x", &own)), Ok(b"x".to_vec()));
        assert_eq!(both.open(Purpose::Receipt, &token(second, b"x", &own)), Err(BytesError::Unsigned));
        let other = tag(&secret(1), second, b"x");
        assert_eq!(both.open(Purpose::Receipt, &token(second, b"x", &other)), Err(BytesError::Unsigned));
        assert_eq!(both.open(Purpose::Receipt, &token(first, b"x", &other)), Err(BytesError::Unsigned));
        // Too short for a key id, or for a signature.
        assert_eq!(both.open(Purpose::Receipt, "AAA"), Err(BytesError::Truncated));
        assert_eq!(both.open(Purpose::Receipt, &token(first, b"", &[0; 11])), Err(BytesError::Truncated));
        assert_eq!(both.open(Purpose::Receipt, &token(first, b"", &[0; 15])), Err(BytesError::Unsigned));
    }

    #[test]
    fn two_secrets_with_one_key_id_are_refused() {
        assert_eq!(only(1).with_old(secret(1)).unwrap_err(), SameKeyId(secret(1).key_id()));
        assert!(only(1).with_old(secret(2)).is_ok());
    }

    #[test]
    fn short_secrets_are_refused_and_none_is_shown() {
        assert!(Secret::new(b"hunter2").is_none());
        assert_eq!(format!("{:?}", secret(65)), "Secret(…)");
        assert_ne!(secret(1).key_id(), secret(2).key_id());
        assert_ne!(secret(1).digest_key(), secret(2).digest_key());
        assert_eq!(KeyId::from_u32(0x2a).to_string(), "0000002a");
    }
}
