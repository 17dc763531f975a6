//! The secret of an installation: signs tokens, and derives the key of stored digests.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

use crate::codec::BytesError;
use crate::key::DigestKey;

/// The length of a key id in bytes.
const KEY_ID: usize = 4;
/// The length of a signature in bytes: half of SHA-256, as strong as the 128-bit digests inside of a token.
const TAG: usize = 16;
/// The longest token that is decoded. A receipt with the most charges has a third of this.
const MAX_TOKEN: usize = 8_192;

/// The secret of one installation, shared by its nodes.
#[derive(Clone)]
pub struct Secret {
    /// The keyed state. Keying is half of the work of a short signature, so it is done once.
    keyed: Hmac<Sha256>,
    key_id: KeyId,
}

/// The id of a secret, which reveals nothing else of it. Tokens and stored records under a secret begin with it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyId(u32);

/// The id as [`Display`](fmt::Display) writes it, so that an error in the log of a host names it as the operator knows it.
impl fmt::Debug for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl KeyId {
    /// Creates an id from its number.
    #[must_use]
    pub const fn from_u32(number: u32) -> Self {
        Self(number)
    }

    /// Returns the number.
    #[must_use]
    pub const fn to_u32(self) -> u32 {
        self.0
    }
}

/// Formats the id as 8 hexadecimal digits.
impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0)
    }
}

/// The secrets in force. The present one signs; tokens of the old one are accepted too during a rotation.
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
    /// Creates a set of one secret, which signs and is accepted.
    #[must_use]
    pub const fn new(present: Secret) -> Self {
        Self { present, old: None }
    }

    /// Adds the old secret, whose tokens are accepted too.
    ///
    /// # Errors
    /// Fails if the two have the same key id.
    pub fn with_old(self, old: Secret) -> Result<Self, SameKeyId> {
        let same = old.key_id() == self.present.key_id();
        if same { Err(SameKeyId(old.key_id())) } else { Ok(Self { old: Some(old), ..self }) }
    }

    /// Returns the secret that signs.
    #[must_use]
    pub const fn present(&self) -> &Secret {
        &self.present
    }

    /// Returns the old secret, if it is still accepted.
    #[must_use]
    pub const fn old(&self) -> Option<&Secret> {
        self.old.as_ref()
    }

    /// Verifies a token and returns its bytes. Key id and signature are checked before anything else is decoded.
    ///
    /// # Errors
    /// Fails if the text is not a token, if its key id is unknown, or if the signature does not match for this purpose.
    pub fn open(&self, purpose: Purpose, token: &str) -> Result<Vec<u8>, BytesError> {
        // Before decoding, so that a long text costs a client more to send than it costs here.
        if token.len() > MAX_TOKEN {
            return Err(BytesError::Malformed("token"));
        }
        let all = URL_SAFE_NO_PAD.decode(token).map_err(|_| BytesError::Malformed("token"))?;
        // The key id selects one secret. Trying both would double the work for forged tokens, and would hide which
        // secret is missing.
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

/// The purpose of a signature. A token of one purpose is never accepted for another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Receipts of charges.
    Receipt,
    /// Reservations.
    Reservation,
    /// Login attempts in progress.
    Attempt,
    /// Devices that have logged in.
    Device,
    /// Login attempts in progress, with the names of the objects that they are counted in.
    PlacedAttempt,
}

impl Purpose {
    const fn label(self) -> &'static str {
        match self {
            // Part of every signature. A changed label invalidates all tokens of its purpose.
            Self::Receipt => "threshold receipt 1",
            Self::Reservation => "threshold reservation 1",
            Self::Attempt => "threshold attempt 1",
            Self::Device => "threshold device 1",
            Self::PlacedAttempt => "threshold placed attempt 1",
        }
    }
}

impl Secret {
    /// Creates a secret from at least 16, and better 32, random bytes. Returns `None` for fewer.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Option<Self> {
        // HMAC takes keys of any length, also empty ones. A secret shorter than the digest key that is derived from it
        // would be easier to guess than that key.
        let keyed = <Hmac<Sha256>>::new_from_slice(bytes).ok().filter(|_| bytes.len() >= 16)?;
        // Derived under a label of its own, so the id, which every token shows, reveals nothing of signatures or of the
        // digest key.
        let derived = mac(begin(&keyed, b"threshold key id 1"), &[]);
        let key_id = KeyId(u32::from_be_bytes(derived.first_chunk().copied().unwrap_or_default()));
        Some(Self { keyed, key_id })
    }

    /// Derives the key of stored digests.
    #[must_use]
    pub fn digest_key(&self) -> DigestKey {
        let derived = self.mac(b"threshold digest 1", &[]);
        DigestKey::new(derived.first_chunk().copied().unwrap_or_default())
    }

    /// Returns the key id. A store keeps it, and refuses a node with another secret.
    #[must_use]
    pub const fn key_id(&self) -> KeyId {
        self.key_id
    }

    /// Signs bytes. Returns a token of the key id, the bytes, and a signature of both, in base64url.
    #[must_use]
    pub fn seal(&self, purpose: Purpose, bytes: &[u8]) -> String {
        let mut all = Vec::with_capacity(bytes.len().saturating_add(KEY_ID + TAG));
        // Inside of what is signed: a token cannot be moved to another secret's id.
        all.extend_from_slice(&self.key_id.0.to_be_bytes());
        all.extend_from_slice(bytes);
        let tag = self.mac(purpose.label().as_bytes(), &all);
        all.extend(tag.iter().take(TAG));
        URL_SAFE_NO_PAD.encode(all)
    }

    /// Verifies a decoded token of [`seal`](Self::seal) and returns its bytes.
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

/// Starts a MAC with a label and its length, so that inputs under two labels never collide.
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
        // A secret must not reach a log through a struct that holds it.
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

    /// `main` prints the `Debug` of an error, and that had a key id in decimal: nothing else shows it so.
    #[test]
    fn a_key_id_is_written_in_hexadecimal_everywhere() {
        let id = KeyId::from_u32(3_353_353_317);
        assert_eq!((format!("{id}"), format!("{id:?}")), ("c7e01c65".to_owned(), "c7e01c65".to_owned()));
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
