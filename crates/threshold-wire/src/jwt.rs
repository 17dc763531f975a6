//! The verification of bearer tokens (JWT) as `[identity.jwt]` of a policy demands, for its `claim:` sources.
//!
//! ```
//! use threshold_limiter::{Limiter, Policy};
//! use threshold_wire::jwt;
//!
//! let policy = Policy::parse(
//!     r#"
//!     [identity]
//!     user = "claim:sub"
//!     [identity.jwt]
//!     alg = "HS256"
//!     key = "${JWT_KEY}"
//!     [[rule]]
//!     name = "user"
//!     per = ["user"]
//!     limit = "100/min"
//!     "#,
//!     &|name| (name == "JWT_KEY").then(|| "a secret of at least thirty-two bytes".to_owned()),
//! )?;
//! // Reads the key, or fails if it cannot be used.
//! let (policy, _verifier) = jwt::attach(policy)?;
//! let limiter = Limiter::new(policy);
//! # drop(limiter);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The crate `jsonwebtoken` decodes tokens and JWKS, and `ring` verifies signatures. The crypto provider of `jsonwebtoken` is
//! global to the process, and its checks of times read the system clock: neither is used here.

mod error;
mod keys;

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr as _;
use std::sync::Arc;

use arc_swap::ArcSwap;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jsonwebtoken::dangerous::insecure_decode_claims;
use jsonwebtoken::{Algorithm, decode_header};
use threshold_core::Timestamp;
use threshold_core::policy::{Claims, Jwt, MAX_TOKEN, Policy, TokenError, TokenVerifier};

pub use error::{KeyError, KeyFault};
use keys::Keys;

use crate::token::Payload;
use threshold_limiter::files::{self, Trust};

/// The largest file of keys, in bytes. A JWKS has some kilobytes.
pub const MAX_KEY_FILE: usize = 1 << 20;

/// Attaches a token verifier to a policy that has an `[identity.jwt]`. Returns both.
///
/// # Errors
/// Fails if the key cannot be read, or does not fit the algorithm.
pub fn attach(policy: Policy) -> Result<(Policy, Option<Arc<Verifier>>), KeyError> {
    let Some(settings) = &policy.identity().jwt else { return Ok((policy, None)) };
    let verifier = Arc::new(Verifier::new(settings)?);
    Ok((policy.with_token_verifier(Arc::<Verifier>::clone(&verifier)), Some(verifier)))
}

/// A verifier of tokens of one algorithm, whose keys can be replaced while it is in use.
pub struct Verifier {
    alg: Algorithm,
    iss: Option<Box<str>>,
    aud: Option<Box<str>>,
    key_file: Option<PathBuf>,
    keys: ArcSwap<Keys>,
}

impl Verifier {
    /// Creates a verifier with the key, or the file of keys, of these settings.
    ///
    /// # Errors
    /// Fails if the key cannot be read, or does not fit the algorithm.
    pub fn new(settings: &Jwt) -> Result<Self, KeyError> {
        match (&settings.key, &settings.key_file) {
            (Some(key), None) => Self::with_key(settings, key.as_bytes()),
            (None, Some(file)) => Self::with_key(settings, &read_key_file(Path::new(file.as_ref()))?),
            _ => Err(KeyFault::NotOneKey.of_key()),
        }
    }

    /// Creates a verifier with this key: the value of `key`, or the content of `key_file`.
    ///
    /// # Errors
    /// Fails if the key does not fit the algorithm.
    pub fn with_key(settings: &Jwt, key: &[u8]) -> Result<Self, KeyError> {
        let alg = Algorithm::from_str(&settings.alg).map_err(|_| KeyFault::Algorithm.of_key())?;
        let key_file = settings.key_file.as_ref().map(|file| PathBuf::from(file.as_ref()));
        let keys = Keys::parse(alg, key).map_err(|fault| fault.of(key_file.is_some()))?;
        let keys = ArcSwap::from_pointee(keys);
        Ok(Self { alg, iss: settings.iss.clone(), aud: settings.aud.clone(), key_file, keys })
    }

    /// Returns the path of the file of keys, if there is one.
    pub fn key_file(&self) -> Option<&Path> {
        self.key_file.as_deref()
    }

    /// Reads the file again and replaces the keys. Does nothing if the key is in the policy itself.
    ///
    /// # Errors
    /// Fails if the new keys cannot be used. The old keys stay.
    pub fn reload(&self) -> Result<(), KeyError> {
        match &self.key_file {
            Some(file) => self.load(&read_key_file(file)?),
            None => Ok(()),
        }
    }

    /// Replaces the keys by these contents of the file.
    ///
    /// # Errors
    /// Fails if the new keys cannot be used. The old keys stay.
    pub fn load(&self, contents: &[u8]) -> Result<(), KeyError> {
        let keys = Keys::parse(self.alg, contents).map_err(|fault| fault.of(self.key_file.is_some()))?;
        self.keys.store(Arc::new(keys));
        Ok(())
    }

    /// Returns the ids that several keys of a JWKS share. Tokens that name one of them are refused.
    pub fn ambiguous_kids(&self) -> Vec<String> {
        self.keys.load().ambiguous_kids()
    }

    /// Returns why keys of a JWKS are not used, one message for each. Its other keys are.
    pub fn skipped_keys(&self) -> Vec<String> {
        self.keys.load().skipped()
    }
}

/// Returns why the header of a token was not decoded. `jsonwebtoken` knows neither `none` nor other algorithms that no key is
/// for, and reports them as malformed.
fn header_fault(token: &str) -> TokenError {
    #[derive(serde::Deserialize)]
    struct Header {
        alg: String,
    }
    let header = token.split('.').next().and_then(|header| URL_SAFE_NO_PAD.decode(header).ok());
    match header.and_then(|header| serde_json::from_slice::<Header>(&header).ok()) {
        Some(Header { alg }) if Algorithm::from_str(&alg).is_err() => TokenError::Algorithm,
        _ => TokenError::Malformed,
    }
}

impl TokenVerifier for Verifier {
    fn verify(&self, token: &str, now: Timestamp) -> Result<Claims, TokenError> {
        // Before anything is decoded: a long token must not cost time.
        if token.len() > MAX_TOKEN {
            return Err(TokenError::TooLong);
        }
        let header = decode_header(token).map_err(|_| header_fault(token))?;
        // The policy chooses the algorithm. If the token could, a public key might be used as an HMAC secret.
        if header.alg != self.alg {
            return Err(TokenError::Algorithm);
        }
        // RFC 7515, 4.1.11: critical extensions must be understood, and none is.
        if header.crit.is_some() {
            return Err(TokenError::Malformed);
        }
        // The signature covers everything before the last dot.
        let (message, signature) = token.rsplit_once('.').ok_or(TokenError::Malformed)?;
        let signature = URL_SAFE_NO_PAD.decode(signature).map_err(|_| TokenError::Malformed)?;
        let keys = self.keys.load();
        let key = keys.find(header.kid.as_deref()).ok_or(TokenError::Key)?;
        if !key.verifies(message.as_bytes(), &signature) {
            return Err(TokenError::Signature);
        }
        // The signature was verified above, which is the check that this function leaves out.
        let payload: Payload = insecure_decode_claims(token).map_err(|_| TokenError::Malformed)?;
        payload.verified(self.iss.as_deref(), self.aud.as_deref(), now)
    }
}

impl fmt::Debug for Verifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Verifier").field("alg", &self.alg).finish_non_exhaustive()
    }
}

/// Reads a file of keys, for [`Verifier::with_key`] and [`Verifier::load`].
///
/// # Errors
/// Fails if the file cannot be read, is larger than [`MAX_KEY_FILE`], is no regular file, or, on Unix, if another user than root and
/// that of this process owns it or can write to it.
pub fn read_key_file(path: &Path) -> Result<Vec<u8>, KeyError> {
    let contents = files::read(path, Trust::Keys, MAX_KEY_FILE);
    let contents = contents.map_err(|error| KeyFault::Unreadable(error).of_file())?;
    if contents.len() > MAX_KEY_FILE { Err(KeyFault::TooLarge.of_file()) } else { Ok(contents) }
}
