//! Bearer tokens (JWT) for a host that has cryptography of its own, such as that of a browser. Everything but the signature is
//! checked here, as `[identity.jwt]` of a policy demands.

use std::collections::BTreeMap;
use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;
use threshold_core::Timestamp;
use threshold_core::policy::{Claims, Jwt, MAX_TOKEN, TokenError};

/// The tolerated difference between the clocks of the issuer and of this machine, in seconds.
const LEEWAY: f64 = 60.0;

/// A token that is taken apart.
pub struct Token<'t> {
    alg: String,
    kid: Option<String>,
    message: &'t str,
    payload: &'t str,
    signature: Vec<u8>,
}

impl<'t> Token<'t> {
    /// Takes a token apart.
    ///
    /// # Errors
    /// Fails if it is not a signed JWT, is too long, or has an extension that must be understood.
    pub fn parse(token: &'t str) -> Result<Self, TokenError> {
        #[derive(serde::Deserialize)]
        struct Header {
            alg: String,
            kid: Option<String>,
            crit: Option<IgnoredAny>,
        }
        // Before anything is decoded: a long token must not cost time.
        if token.len() > MAX_TOKEN {
            return Err(TokenError::TooLong);
        }
        // The signature covers everything before the last dot.
        let (message, signature) = token.rsplit_once('.').ok_or(TokenError::Malformed)?;
        let (header, payload) = message.split_once('.').ok_or(TokenError::Malformed)?;
        let decode = |part: &str| URL_SAFE_NO_PAD.decode(part).map_err(|_| TokenError::Malformed);
        let Header { alg, kid, crit } = serde_json::from_slice(&decode(header)?).map_err(|_| TokenError::Malformed)?;
        // RFC 7515, 4.1.11: critical extensions must be understood, and none is.
        if crit.is_some() {
            return Err(TokenError::Malformed);
        }
        Ok(Self { alg, kid, message, payload, signature: decode(signature)? })
    }

    /// Returns the algorithm that the token names. The policy chooses the algorithm: a token with another one must be refused.
    #[must_use]
    pub fn alg(&self) -> &str {
        &self.alg
    }

    /// Returns the id of the key that the token names.
    #[must_use]
    pub fn kid(&self) -> Option<&str> {
        self.kid.as_deref()
    }

    /// Returns what is signed.
    #[must_use]
    pub fn message(&self) -> &'t [u8] {
        self.message.as_bytes()
    }

    /// Returns the signature.
    #[must_use]
    pub fn signature(&self) -> &[u8] {
        &self.signature
    }

    /// Returns the claims, if the token is valid now. The host must have verified the signature.
    ///
    /// # Errors
    /// Fails if the token names another issuer or audience than these settings, has expired or is not valid yet.
    pub fn claims(&self, settings: &Jwt, now: Timestamp) -> Result<Claims, TokenError> {
        let payload = URL_SAFE_NO_PAD.decode(self.payload).map_err(|_| TokenError::Malformed)?;
        let payload: Payload = serde_json::from_slice(&payload).map_err(|_| TokenError::Malformed)?;
        payload.verified(settings.iss.as_deref(), settings.aud.as_deref(), now)
    }
}

/// Shows nothing of the token, which is a credential.
impl fmt::Debug for Token<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Token").field("alg", &self.alg).finish_non_exhaustive()
    }
}

/// The claims of a token as they are written, so that no number is rounded.
pub(crate) struct Payload(BTreeMap<String, Box<RawValue>>);

impl Payload {
    /// Returns the claims, if the token is valid now. Its signature must have been verified.
    pub(crate) fn verified(&self, iss: Option<&str>, aud: Option<&str>, now: Timestamp) -> Result<Claims, TokenError> {
        let now = seconds(now);
        // A token without an end would be valid for ever.
        let expires = self.date("exp")?.ok_or(TokenError::NoExpiry)?;
        if now >= expires + LEEWAY {
            return Err(TokenError::Expired);
        }
        if self.date("nbf")?.is_some_and(|begins| now + LEEWAY < begins) {
            return Err(TokenError::NotYetValid);
        }
        if iss.is_some_and(|iss| self.text("iss").as_deref() != Some(iss)) {
            return Err(TokenError::Issuer);
        }
        // RFC 7519, 4.1.3: a token that names audiences is for nobody else.
        match (aud, self.audiences()?) {
            (None, None) => Ok(self.claims()),
            (Some(aud), Some(audiences)) if audiences.iter().any(|own| own == aud) => Ok(self.claims()),
            _ => Err(TokenError::Audience),
        }
    }

    /// Returns a claim that is a string.
    fn text(&self, name: &str) -> Option<String> {
        serde_json::from_str(self.0.get(name)?.get()).ok()
    }

    /// Returns a claim that is a date: Unix seconds, perhaps with a fraction (RFC 7519, 2).
    fn date(&self, name: &str) -> Result<Option<f64>, TokenError> {
        let Some(raw) = self.0.get(name) else { return Ok(None) };
        serde_json::from_str(raw.get()).map(Some).map_err(|_| TokenError::Malformed)
    }

    /// Returns the audiences: a string, or a list of strings.
    fn audiences(&self) -> Result<Option<Vec<String>>, TokenError> {
        let Some(raw) = self.0.get("aud") else { return Ok(None) };
        // RFC 7519, 4.1.3: a single audience may be a text instead of a list.
        let one = || serde_json::from_str(raw.get()).map(|one| vec![one]);
        let several = || serde_json::from_str(raw.get());
        one().or_else(|_| several()).map(Some).map_err(|_| TokenError::Malformed)
    }

    /// Returns the claims that can be a name: strings, numbers and booleans.
    fn claims(&self) -> Claims {
        let usable = |raw: &RawValue| match raw.get().as_bytes().first()? {
            b'"' => serde_json::from_str(raw.get()).ok(),
            b't' | b'f' | b'-' | b'0'..=b'9' => Some(raw.get().to_owned()),
            // Objects, arrays and null identify nobody.
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
                    // Of two claims with one name, some parsers take the first and some the last.
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

fn seconds(at: Timestamp) -> f64 {
    // Whole microseconds are exact until the year 2255.
    at.micros() as f64 / 1e6
}
