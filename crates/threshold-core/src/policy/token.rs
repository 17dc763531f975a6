//! Bearer tokens: finding one in a request, and the interface of the host's verifier.

use std::collections::BTreeMap;
use std::fmt;

use crate::address::Headers;
use crate::time::Timestamp;

/// The maximum length of a token, in bytes. Servers usually accept 8 KiB for a whole header field.
pub const MAX_TOKEN: usize = 8 << 10;

/// Verifies tokens as `[identity.jwt]` requires. Core has no cryptography and reads no files; a host attaches its verifier with [`Policy::with_token_verifier`](super::Policy::with_token_verifier).
pub trait TokenVerifier: fmt::Debug + Send + Sync {
    /// Verifies a token at this time and returns its claims.
    ///
    /// # Errors
    /// If the token is invalid. It then identifies nobody.
    fn verify(&self, token: &str, now: Timestamp) -> Result<Claims, TokenError>;
}

/// The claims of a verified token that can be names: strings, and the text of numbers and booleans.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Claims(BTreeMap<Box<str>, Box<str>>);

impl Claims {
    /// Returns the claim of this name, unchanged.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(AsRef::as_ref)
    }
}

impl<N: Into<Box<str>>, V: Into<Box<str>>> FromIterator<(N, V)> for Claims {
    fn from_iter<I: IntoIterator<Item = (N, V)>>(claims: I) -> Self {
        Self(claims.into_iter().map(|(name, value)| (name.into(), value.into())).collect())
    }
}

/// Why a token is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TokenError {
    /// The request has several `Authorization` fields.
    Repeated,
    /// It is longer than [`MAX_TOKEN`].
    TooLong,
    /// It is not a signed JWT, has a claim or a header parameter twice, or uses an unsupported extension.
    Malformed,
    /// Its algorithm is not that of the policy.
    Algorithm,
    /// It names no key, or an unknown or ambiguous one.
    Key,
    /// The signature does not match.
    Signature,
    /// It has expired, or has no expiry.
    Expired,
    /// It is not valid yet.
    NotYetValid,
    /// Its issuer is not that of the policy.
    Issuer,
    /// Its audience is not that of the policy.
    Audience,
}

impl TokenError {
    /// Every variant.
    pub const ALL: [Self; 10] = [
        Self::Repeated,
        Self::TooLong,
        Self::Malformed,
        Self::Algorithm,
        Self::Key,
        Self::Signature,
        Self::Expired,
        Self::NotYetValid,
        Self::Issuer,
        Self::Audience,
    ];

    /// Returns the name for logs and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Repeated => "repeated",
            Self::TooLong => "too_long",
            Self::Malformed => "malformed",
            Self::Algorithm => "algorithm",
            Self::Key => "key",
            Self::Signature => "signature",
            Self::Expired => "expired",
            Self::NotYetValid => "not_yet_valid",
            Self::Issuer => "issuer",
            Self::Audience => "audience",
        }
    }
}

impl fmt::Display for TokenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Repeated => "several Authorization fields",
            Self::TooLong => "the token is too long",
            Self::Malformed => "not a signed JWT",
            Self::Algorithm => "another algorithm",
            Self::Key => "no such key",
            Self::Signature => "the signature does not match",
            Self::Expired => "expired, or without an expiry",
            Self::NotYetValid => "not valid yet",
            Self::Issuer => "another issuer",
            Self::Audience => "another audience",
        })
    }
}

impl std::error::Error for TokenError {}

/// Returns the bearer token of a request (RFC 6750, 2.1). Credentials of other schemes are ignored.
pub(super) fn bearer<H: Headers + ?Sized>(headers: &H) -> Result<Option<&str>, TokenError> {
    let mut lines = headers.lines("authorization");
    let Some(only) = lines.next() else { return Ok(None) };
    // Of two lines, the application may read another one than this function.
    if lines.next().is_some() {
        return Err(TokenError::Repeated);
    }
    let only = only.trim_ascii();
    let end = only.iter().position(|byte| *byte == b' ').unwrap_or(only.len());
    let (scheme, token) = only.split_at(end);
    if !scheme.eq_ignore_ascii_case(b"bearer") {
        return Ok(None);
    }
    let token = token.trim_ascii();
    if token.len() > MAX_TOKEN {
        return Err(TokenError::TooLong);
    }
    match std::str::from_utf8(token) {
        Ok(token) if !token.is_empty() => Ok(Some(token)),
        _ => Err(TokenError::Malformed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bearer_token_is_found_in_the_one_authorization_field() {
        let check = |lines: &[&[u8]], expect: Result<Option<&str>, TokenError>| {
            let headers: Vec<(&str, &[u8])> = lines.iter().map(|line| ("Authorization", *line)).collect();
            assert_eq!(bearer(&headers[..]), expect, "{lines:?}");
        };
        check(&[], Ok(None));
        check(&[b"Bearer a.b.c"], Ok(Some("a.b.c")));
        check(&[b" bEARER   a.b.c "], Ok(Some("a.b.c")));
        check(&[b"Basic dTpw"], Ok(None));
        check(&[b"Bearerx a.b.c"], Ok(None));
        check(&[b""], Ok(None));
        check(&[b"Bearer"], Err(TokenError::Malformed));
        check(&[b"Bearer  "], Err(TokenError::Malformed));
        check(&[b"Bearer a\xff.b.c"], Err(TokenError::Malformed));
        check(&[b"Bearer a.b.c", b"Bearer a.b.c"], Err(TokenError::Repeated));
        check(&[b"Basic dTpw", b"Bearer a.b.c"], Err(TokenError::Repeated));
        let long = |length: usize| [b"Bearer ".as_slice(), &vec![b'a'; length]].concat();
        check(&[&long(MAX_TOKEN)], Ok(Some(&"a".repeat(MAX_TOKEN))));
        check(&[&long(MAX_TOKEN + 1)], Err(TokenError::TooLong));
    }

    #[test]
    fn each_reason_has_a_name_of_its_own() {
        let names: std::collections::BTreeSet<&str> = TokenError::ALL.iter().map(|reason| reason.name()).collect();
        assert_eq!(names.len(), TokenError::ALL.len());
    }
}
