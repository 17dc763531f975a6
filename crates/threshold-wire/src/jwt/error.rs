//! The errors of keys that tokens are verified with.

use std::error::Error;
use std::{fmt, io};

use super::MAX_KEY_FILE;

/// A key of `[identity.jwt]` that cannot be used.
///
/// It holds nothing of the key, and names the file of the key only if there is one: a key may stand in place of that name by
/// mistake. The message does not repeat the cause: print the chain of [`source`](Error::source)s.
#[derive(Debug)]
pub struct KeyError {
    setting: &'static str,
    fault: KeyFault,
}

impl KeyError {
    /// Returns what is wrong with the key.
    #[must_use]
    pub fn fault(&self) -> &KeyFault {
        &self.fault
    }
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[identity.jwt] {}: {}", self.setting, self.fault)
    }
}

impl Error for KeyError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.fault.source()
    }
}

/// The reasons why a key cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeyFault {
    /// There is neither `key` nor `key_file`, or there are both.
    #[error("a token is verified with one key: give either key or key_file")]
    NotOneKey,
    /// The algorithm is unknown or not supported.
    #[error("the algorithm is not supported")]
    Algorithm,
    /// The file cannot be read.
    #[error("the file cannot be read")]
    Unreadable(#[source] io::Error),
    /// The file is larger than [`MAX_KEY_FILE`].
    #[error("the file is larger than {MAX_KEY_FILE} bytes")]
    TooLarge,
    /// The key is in PEM, and this algorithm takes a shared secret.
    #[error(
        "this is a key in PEM, and {0} takes a shared secret: everybody who has a public key could sign tokens with it"
    )]
    PemAsSecret(String),
    /// The key is a public key or a document, and the algorithm takes a shared secret.
    #[error(
        "this is a public key or a document, not a shared secret: everybody who can read it could sign tokens with it"
    )]
    PublicAsSecret,
    /// The key is JSON and not a JWKS.
    #[error("this is JSON, but no JWKS: it has no list \"keys\"")]
    OtherJson,
    /// The key is neither a public key in PEM nor a JWKS.
    #[error("this is neither a public key in PEM nor a JWKS")]
    NoPublicKey,
    /// The secret is shorter than the hash of the algorithm (RFC 7518, 3.2).
    #[error("the secret is too short: {alg} takes at least {least} bytes")]
    TooShort {
        /// The algorithm.
        alg: String,
        /// The least number of bytes.
        least: usize,
    },
    /// The RSA key has this many bits.
    #[error("this RSA key has {0} bits, and 2048 to 8192 are accepted")]
    RsaBits(usize),
    /// The public key is compressed, or of another length than the points of its curve.
    #[error("the public key is not a whole point of its curve")]
    NotAPoint,
    /// The PEM, or the key in it, cannot be decoded.
    #[error("the key in PEM is damaged")]
    DamagedPem,
    /// The PEM holds several blocks.
    #[error("there is more than one key in PEM: put them into a JWKS")]
    SeveralPems,
    /// The key is a private key.
    #[error("this is a private key, and a verifier needs the public one")]
    PrivateKey,
    /// The PEM holds something else than a public key.
    #[error("the PEM holds no public key")]
    OtherPem,
    /// The key is of another kind than this algorithm takes.
    #[error("this is a key of another kind, and tokens of {0} are not checked with it")]
    OtherKind(String),
    /// The JWKS holds no key for this algorithm.
    #[error("the JWKS holds no key for {0}")]
    NoneInSet(String),
    /// The JWK cannot be decoded.
    #[error("the JWK cannot be decoded")]
    DamagedJwk,
    /// A key of a JWKS cannot be used.
    #[error("{} of the JWKS: {fault}", Named(.kid.as_deref()))]
    InSet {
        /// The id of the key.
        kid: Option<String>,
        /// What is wrong with it.
        fault: Box<Self>,
    },
}

impl KeyFault {
    /// Adds the setting that the key comes from.
    pub(super) fn of(self, is_file: bool) -> KeyError {
        KeyError { setting: if is_file { "key_file" } else { "key" }, fault: self }
    }

    pub(super) fn of_key(self) -> KeyError {
        self.of(false)
    }

    pub(super) fn of_file(self) -> KeyError {
        self.of(true)
    }
}

/// A key of a JWKS as a message names it.
struct Named<'a>(Option<&'a str>);

impl fmt::Display for Named<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(kid) => write!(f, "the key {kid:?}"),
            None => f.write_str("a key without kid"),
        }
    }
}
