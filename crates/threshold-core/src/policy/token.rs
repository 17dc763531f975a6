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

/// The reasons why a token was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TokenError {
    /// The request has several `Authorization` fields.
    #[error("several Authorization fields")]
    Repeated,
    /// The token is longer than [`MAX_TOKEN`].
    #[error("the token is too long")]
    TooLong,
    /// The token is not a signed JWT, names a claim or a header parameter twice, or uses an unknown critical extension.
    #[error("not a signed JWT")]
    Malformed,
    /// The token names another algorithm than the policy.
    #[error("another algorithm")]
    Algorithm,
    /// The token names no key, or an unknown or ambiguous one.
    #[error("no such key")]
    Key,
    /// The signature does not match.
    #[error("the signature does not match")]
    Signature,
    /// The token has expired.
    #[error("expired")]
    Expired,
    /// The token has no expiry.
    #[error("no expiry")]
    NoExpiry,
    /// The token is not valid yet.
    #[error("not valid yet")]
    NotYetValid,
    /// The token comes from another issuer.
    #[error("another issuer")]
    Issuer,
    /// The token is meant for another audience.
    #[error("another audience")]
    Audience,
}

impl TokenError {
    /// Every variant.
    pub const ALL: [Self; 11] = [
        Self::Repeated,
        Self::TooLong,
        Self::Malformed,
        Self::Algorithm,
        Self::Key,
        Self::Signature,
        Self::Expired,
        Self::NoExpiry,
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
            Self::NoExpiry => "no_expiry",
            Self::NotYetValid => "not_yet_valid",
            Self::Issuer => "issuer",
            Self::Audience => "audience",
        }
    }
}

/// Returns the bearer token of a request (RFC 6750, 2.1). Credentials of other schemes are ignored.
pub(super) fn bearer<H: Headers + ?Sized>(headers: &H) -> Result<Option<&str>, TokenError> {
    let mut lines = headers.lines("authorization");
    let Some(only) = lines.next() else { return Ok(None) };
    // Of two lines, the application may read another one than this function.
    if lines.next().is_some() {
        return Err(TokenError::Repeated);
    }
    let only = only.trim_ascii();
    // A scheme ends at a space, and only there: `Bearerx` is another scheme.
    let end = only.iter().position(|byte| *byte == b' ').unwrap_or(only.len());
    let (scheme, token) = only.split_at(end);
    // Credentials of another scheme are for the application and say nothing about claims.
    if !scheme.eq_ignore_ascii_case(b"bearer") {
        return Ok(None);
    }
    let token = token.trim_ascii();
    // Before the verifier sees it: an unsigned text of any length must not cost a hash.
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
