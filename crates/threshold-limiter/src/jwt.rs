//! Verifies bearer tokens as a policy's `[identity.jwt]` says, so that its `claim:` sources name somebody.
//!
//! ```
//! use threshold_limiter::{Limiter, Policy, jwt};
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
//! // Reads the key, or says why it cannot be used.
//! let (policy, _verifier) = jwt::attach(policy)?;
//! let limiter = Limiter::new(policy);
//! # drop(limiter);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The crate `jsonwebtoken` reads tokens and JWKS, and `ring` checks signatures. `jsonwebtoken`'s own provider of
//! cryptography belongs to the whole process, and its checks of times to the system's clock: neither is used here.

mod keys;

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
#[cfg(unix)]
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::str::FromStr as _;
use std::sync::Arc;

use arc_swap::ArcSwap;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jsonwebtoken::dangerous::insecure_decode_claims;
use jsonwebtoken::{Algorithm, decode_header};
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use threshold_core::Timestamp;
use threshold_core::policy::{Claims, Jwt, MAX_TOKEN, Policy, TokenError, TokenVerifier};

use keys::Keys;

/// How far the clocks of an issuer and of this machine may differ, in seconds.
const LEEWAY: f64 = 60.0;
/// The largest file of keys, in bytes. A JWKS is some kilobytes.
pub const MAX_KEY_FILE: usize = 1 << 20;

/// A policy whose tokens are verified, and what verifies them, if it has an `[identity.jwt]`.
///
/// # Errors
/// Where the key cannot be read, or does not fit the algorithm.
pub fn attach(policy: Policy) -> Result<(Policy, Option<Arc<Verifier>>), KeyError> {
    let Some(settings) = &policy.identity().jwt else { return Ok((policy, None)) };
    let verifier = Arc::new(Verifier::new(settings)?);
    Ok((policy.with_token_verifier(Arc::<Verifier>::clone(&verifier)), Some(verifier)))
}

/// Verifies tokens of one algorithm, with keys that may change while it does.
pub struct Verifier {
    alg: Algorithm,
    iss: Option<Box<str>>,
    aud: Option<Box<str>>,
    key_file: Option<PathBuf>,
    keys: ArcSwap<Keys>,
}

impl Verifier {
    /// A verifier with the key that is given, or that is in the file.
    ///
    /// # Errors
    /// Where the key cannot be read, or does not fit the algorithm.
    pub fn new(settings: &Jwt) -> Result<Self, KeyError> {
        match (&settings.key, &settings.key_file) {
            (Some(key), None) => Self::with_key(settings, key.as_bytes()),
            (None, Some(file)) => Self::with_key(settings, &read_key_file(Path::new(file.as_ref()))?),
            _ => Err(KeyError::new("a token is verified with one key: give either key or key_file")),
        }
    }

    /// A verifier with this key: what `key` says, or what `key_file` holds.
    ///
    /// # Errors
    /// Where the key does not fit the algorithm.
    pub fn with_key(settings: &Jwt, key: &[u8]) -> Result<Self, KeyError> {
        let alg = Algorithm::from_str(&settings.alg).map_err(|_| KeyError::new("the algorithm is not supported"))?;
        let key_file = settings.key_file.as_ref().map(|file| PathBuf::from(file.as_ref()));
        let keys = Keys::parse(alg, key).map_err(|error| error.of_file(key_file.is_some()))?;
        let keys = ArcSwap::from_pointee(keys);
        Ok(Self { alg, iss: settings.iss.clone(), aud: settings.aud.clone(), key_file, keys })
    }

    /// The file that holds the keys, if there is one.
    pub fn key_file(&self) -> Option<&Path> {
        self.key_file.as_deref()
    }

    /// Reads the file again and uses its keys from now on. Does nothing where the key is in the policy itself.
    ///
    /// # Errors
    /// Where they cannot be used. The keys in use stay.
    pub fn reload(&self) -> Result<(), KeyError> {
        match &self.key_file {
            Some(file) => self.load(&read_key_file(file)?),
            None => Ok(()),
        }
    }

    /// Uses these contents of the file from now on.
    ///
    /// # Errors
    /// Where they cannot be used. The keys in use stay.
    pub fn load(&self, contents: &[u8]) -> Result<(), KeyError> {
        let keys = Keys::parse(self.alg, contents).map_err(|error| error.of_file(self.key_file.is_some()))?;
        self.keys.store(Arc::new(keys));
        Ok(())
    }

    /// The ids that several keys of a JWKS share. Tokens that name one of them are refused.
    pub fn ambiguous_kids(&self) -> Vec<String> {
        self.keys.load().ambiguous_kids()
    }

    fn holds(&self, payload: &Payload, now: Timestamp) -> Result<(), TokenError> {
        let now = seconds(now);
        let expires = payload.date("exp")?.ok_or(TokenError::Expired)?;
        if now >= expires + LEEWAY {
            return Err(TokenError::Expired);
        }
        if payload.date("nbf")?.is_some_and(|begins| now + LEEWAY < begins) {
            return Err(TokenError::NotYetValid);
        }
        if let Some(iss) = &self.iss
            && payload.text("iss").as_deref() != Some(iss)
        {
            return Err(TokenError::Issuer);
        }
        // RFC 7519, 4.1.3: a token that names audiences is refused by everyone who is none of them.
        let audiences = payload.audiences()?;
        match (&self.aud, audiences) {
            (None, None) => Ok(()),
            (Some(aud), Some(audiences)) if audiences.iter().any(|own| **own == **aud) => Ok(()),
            _ => Err(TokenError::Audience),
        }
    }
}

impl TokenVerifier for Verifier {
    fn verify(&self, token: &str, now: Timestamp) -> Result<Claims, TokenError> {
        if token.len() > MAX_TOKEN {
            return Err(TokenError::TooLong);
        }
        let header = decode_header(token).map_err(|_| TokenError::Malformed)?;
        if header.alg != self.alg {
            return Err(TokenError::Algorithm);
        }
        // RFC 7515, 4.1.11: an extension that is marked as critical and not understood.
        if header.crit.is_some() {
            return Err(TokenError::Malformed);
        }
        let (message, signature) = token.rsplit_once('.').ok_or(TokenError::Malformed)?;
        let signature = URL_SAFE_NO_PAD.decode(signature).map_err(|_| TokenError::Malformed)?;
        let keys = self.keys.load();
        let key = keys.find(header.kid.as_deref()).ok_or(TokenError::Key)?;
        if !key.verifies(message.as_bytes(), &signature) {
            return Err(TokenError::Signature);
        }
        let payload: Payload = insecure_decode_claims(token).map_err(|_| TokenError::Malformed)?;
        self.holds(&payload, now)?;
        Ok(payload.claims())
    }
}

impl fmt::Debug for Verifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Verifier").field("alg", &self.alg).finish_non_exhaustive()
    }
}

/// What a token says: each claim as it is written, so that no number is rounded.
struct Payload(BTreeMap<String, Box<RawValue>>);

impl Payload {
    /// A string.
    fn text(&self, name: &str) -> Option<String> {
        serde_json::from_str(self.0.get(name)?.get()).ok()
    }

    /// A date in Unix seconds, perhaps with a fraction (RFC 7519, 2).
    fn date(&self, name: &str) -> Result<Option<f64>, TokenError> {
        let Some(raw) = self.0.get(name) else { return Ok(None) };
        serde_json::from_str(raw.get()).map(Some).map_err(|_| TokenError::Malformed)
    }

    /// One audience, or several.
    fn audiences(&self) -> Result<Option<Vec<String>>, TokenError> {
        let Some(raw) = self.0.get("aud") else { return Ok(None) };
        let one = || serde_json::from_str(raw.get()).map(|one| vec![one]);
        let several = || serde_json::from_str(raw.get());
        one().or_else(|_| several()).map(Some).map_err(|_| TokenError::Malformed)
    }

    /// Everything that can be a name.
    fn claims(&self) -> Claims {
        let usable = |raw: &RawValue| match raw.get().as_bytes().first()? {
            b'"' => serde_json::from_str(raw.get()).ok(),
            b't' | b'f' | b'-' | b'0'..=b'9' => Some(raw.get().to_owned()),
            _ => None,
        };
        self.0.iter().filter_map(|(name, raw)| Some((name.as_str(), usable(raw)?))).collect()
    }
}

impl<'de> Deserialize<'de> for Payload {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members;
        impl<'de> Visitor<'de> for Members {
            type Value = Payload;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Payload, A::Error> {
                let mut members = BTreeMap::new();
                while let Some((name, value)) = map.next_entry::<String, Box<RawValue>>()? {
                    // Of two claims with one name, readers take the first or the last.
                    if members.insert(name, value).is_some() {
                        return Err(serde::de::Error::custom("a claim comes twice"));
                    }
                }
                Ok(Payload(members))
            }
        }
        deserializer.deserialize_map(Members)
    }
}

/// Why a key cannot be used. It holds nothing of the key, and does not name its file: what stands in the place of the name may
/// be the key, by mistake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyError {
    setting: &'static str,
    message: String,
}

impl KeyError {
    fn new(message: impl Into<String>) -> Self {
        Self { setting: "key", message: message.into() }
    }

    fn of_file(self, is_file: bool) -> Self {
        Self { setting: if is_file { "key_file" } else { "key" }, ..self }
    }
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[identity.jwt] {}: {}", self.setting, self.message)
    }
}

impl std::error::Error for KeyError {}

/// What a file of keys holds, for [`Verifier::with_key`] and [`Verifier::load`].
///
/// # Errors
/// Where it cannot be read, or is larger than [`MAX_KEY_FILE`].
pub fn read_key_file(path: &Path) -> Result<Vec<u8>, KeyError> {
    let unusable = |message: String| KeyError::new(message).of_file(true);
    let limit = u64::try_from(MAX_KEY_FILE).unwrap_or(u64::MAX).saturating_add(1);
    let mut contents = Vec::new();
    let reading = open_file(path).and_then(|file| file.take(limit).read_to_end(&mut contents));
    reading.map_err(|error| unusable(format!("the file cannot be read: {error}")))?;
    if contents.len() > MAX_KEY_FILE {
        return Err(unusable(format!("the file is larger than {MAX_KEY_FILE} bytes")));
    }
    Ok(contents)
}

/// Opens a regular file. Anything else may keep its reader waiting for ever, as a named pipe does, and with it every reload.
fn open_file(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    options.custom_flags(rustix::fs::OFlags::NONBLOCK.bits().cast_signed());
    let file = options.open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    Ok(file)
}

fn seconds(at: Timestamp) -> f64 {
    // Whole microseconds are exact until the year 2255.
    at.micros() as f64 / 1e6
}
