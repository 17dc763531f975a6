//! How callers are identified: where tenant, user and tier are taken from in a request.

use std::borrow::Cow;

use super::{Claims, Pattern, UserScope};
use crate::address::{ClientAddress, Headers};
use crate::path::{OddPaths, PathError, normalize_host, normalize_path, read};

/// The headers that clients set and applications need, so that no proxy removes them; in lower case.
pub const CLIENT_HEADERS: [&str; 9] = [
    "accept",
    "accept-encoding",
    "accept-language",
    "authorization",
    "content-type",
    "cookie",
    "origin",
    "referer",
    "user-agent",
];

/// How callers are identified.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Identity {
    /// The trusted proxies, and where the client's address is taken from.
    pub address: ClientAddress,
    /// IPv6 addresses that share this many leading bits share a budget.
    pub ipv6_prefix: u8,
    /// Where the tenant's name is taken from.
    pub tenant: Option<IdentitySource>,
    /// Where the user's name is taken from.
    pub user: Option<IdentitySource>,
    /// Where user names are unique.
    pub user_scope: UserScope,
    /// Where the tier's name is taken from.
    pub tier: Option<IdentitySource>,
    /// The tier of requests that have no other.
    pub default_tier: Option<Box<str>>,
    /// Whether tenants' names are secrets.
    pub secret_tenant: bool,
    /// Whether users' names are secrets.
    pub secret_user: bool,
    /// Whether log lines show users and addresses unredacted.
    pub log_identifiers: bool,
    /// How the bearer tokens behind `claim:` sources are verified.
    pub jwt: Option<Jwt>,
    /// How client-facing doors treat paths that servers read differently.
    pub odd_paths: OddPaths,
    /// The patterns of paths whose wildcards match secrets; see [`Policy::recorded_path`](super::Policy::recorded_path).
    pub private_paths: Box<[Pattern]>,
}

impl Identity {
    /// Returns whether users' names are secrets, or contain the secret name of a tenant.
    #[must_use]
    pub fn hides_users(&self) -> bool {
        self.secret_user || self.user_scope == UserScope::Tenant && self.secret_tenant
    }
}

/// Where a name is taken from in a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IdentitySource {
    /// A header that a trusted peer sets, by its lower-case name.
    Header(Box<str>),
    /// A cookie that a trusted peer passes on.
    Cookie(Box<str>),
    /// The captured part of the host.
    Host(Pattern),
    /// The captured segment of the path.
    Path(Pattern),
    /// A claim of a verified bearer token.
    Claim(Box<str>),
}

impl IdentitySource {
    /// Returns the name in a request, if it has one. Headers and cookies count only from trusted peers; claims count from any
    /// peer, because their token was verified.
    #[must_use]
    pub fn find<H: Headers + ?Sized>(&self, seen: &Seen<'_, H>) -> Option<String> {
        let found = match self {
            Self::Header(name) => {
                // Of two lines, one may be the client's and one the proxy's, and nothing tells them apart.
                let mut lines = seen.headers.filter(|_| seen.trusted)?.lines(name);
                let only = lines.next()?;
                if lines.next().is_some() { None } else { text_of(only) }
            }
            Self::Cookie(name) => {
                let lines = seen.headers.filter(|_| seen.trusted)?.lines("cookie");
                let pairs = lines.flat_map(|line| line.split(|byte| *byte == b';'));
                let mut values = pairs.filter_map(|pair| cookie_value(pair, name));
                let first = values.next()?;
                // Of two different cookies some applications take the first and some the last.
                if values.all(|other| other == first) { text_of(first) } else { None }
            }
            Self::Host(pattern) => capture(pattern, &normalize_host(seen.host?)),
            Self::Path(pattern) => capture_from_path(pattern, seen.path?).ok()?,
            Self::Claim(name) => seen.claims?.get(name).map(str::to_owned),
        };
        found.filter(|name| !name.is_empty())
    }

    /// Returns why no name can be taken from the path of a request: servers may read different names from it, or it is invalid.
    #[must_use]
    pub fn path_error(&self, path: &str) -> Option<PathError> {
        match self {
            Self::Path(pattern) => capture_from_path(pattern, path).err(),
            Self::Header(_) | Self::Cookie(_) | Self::Host(_) | Self::Claim(_) => None,
        }
    }

    /// Whether names from this source are credentials.
    pub(crate) fn is_secret(&self) -> bool {
        match self {
            Self::Cookie(_) => true,
            Self::Header(name) => name.as_ref() == "authorization",
            Self::Host(_) | Self::Path(_) | Self::Claim(_) => false,
        }
    }

    /// Whether only its owner can claim a name from this source. A trusted proxy sets headers itself, except credentials and
    /// cookies, which it passes on as the client sent them.
    pub(crate) fn is_verified(&self) -> bool {
        match self {
            Self::Header(name) => !matches!(name.as_ref(), "authorization" | "cookie"),
            Self::Claim(_) => true,
            Self::Cookie(_) | Self::Host(_) | Self::Path(_) => false,
        }
    }
}

/// How `claim:` tokens are verified.
#[derive(Clone, PartialEq, Eq)]
pub struct Jwt {
    /// The only accepted algorithm.
    pub alg: Box<str>,
    /// The key itself.
    pub key: Option<Box<str>>,
    /// The path of the file that holds the key.
    pub key_file: Option<Box<str>>,
    /// The issuer that tokens must name.
    pub iss: Option<Box<str>>,
    /// The audience that tokens must name.
    pub aud: Option<Box<str>>,
}

impl std::fmt::Debug for Jwt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Jwt").field("alg", &self.alg).finish_non_exhaustive()
    }
}

/// The parts of a request that names are taken from.
#[derive(Debug)]
pub struct Seen<'r, H: ?Sized> {
    /// Whether the peer is trusted.
    pub trusted: bool,
    /// The header fields.
    pub headers: Option<&'r H>,
    /// The host the request is for.
    pub host: Option<&'r str>,
    /// The path, not normalized.
    pub path: Option<&'r str>,
    /// The claims of the verified token.
    pub claims: Option<&'r Claims>,
}

/// Returns a header's value as text; `None` if it is not UTF-8.
fn text_of(value: &[u8]) -> Option<String> {
    std::str::from_utf8(value).ok().map(|text| text.trim().to_owned())
}

/// Returns the value of a cookie if it has this name.
fn cookie_value<'l>(pair: &'l [u8], name: &str) -> Option<&'l [u8]> {
    let at = pair.iter().position(|byte| *byte == b'=')?;
    let (own, value) = pair.split_at(at);
    let value = value.strip_prefix(b"=")?.trim_ascii();
    // RFC 6265 allows quotes around a value, and applications differ in whether they belong to it. Both are one name
    // here.
    let bare = value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\"")).unwrap_or(value);
    (own.trim_ascii() == name.as_bytes()).then_some(bare)
}

/// Returns the name that all readings of a path agree on; readings without a name are ignored.
fn capture_from_path(pattern: &Pattern, path: &str) -> Result<Option<String>, PathError> {
    let spelled = normalize_path(path);
    // A path that is already in normal form has no character that servers read differently.
    let Cow::Owned(spelled) = spelled else { return Ok(capture(pattern, &spelled)) };
    let readings = read(path, &spelled, OddPaths::Match)?;
    // All readings, because the application may route by any of them. With two different names a client could have its
    // requests charged to another tenant.
    let mut names = readings.all().iter().filter_map(|reading| capture(pattern, reading));
    let first = names.next();
    if names.all(|name| Some(&name) == first.as_ref()) { Ok(first) } else { Err(PathError::AmbiguousIdentity) }
}

fn capture(pattern: &Pattern, text: &str) -> Option<String> {
    pattern.captures(text)?.first().map(|kept| (*kept).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Kind;

    #[test]
    fn names_are_found_where_the_policy_says_and_nowhere_else() {
        let headers = [("X-User", " u1 "), ("cookie", "a=1; sid=\"s3\"; b=2"), ("x-twice", "u1"), ("x-twice", "u2")];
        let claims: Claims = [("sub", "U 1 "), ("empty", "")].into_iter().collect();
        let seen = |trusted| Seen {
            trusted,
            headers: Some(&headers[..]),
            host: Some("Acme.example.com:443"),
            path: Some("//T//Acme/x/"),
            claims: Some(&claims),
        };
        let check = |source: IdentitySource, trusted, expect: Option<&str>| {
            assert_eq!(source.find(&seen(trusted)).as_deref(), expect, "{source:?}");
        };
        check(IdentitySource::Header("x-user".into()), true, Some("u1"));
        check(IdentitySource::Header("x-user".into()), false, None);
        check(IdentitySource::Header("x_user".into()), true, None);
        check(IdentitySource::Header("x-twice".into()), true, None);
        check(IdentitySource::Cookie("sid".into()), true, Some("s3"));
        check(IdentitySource::Cookie("sid".into()), false, None);
        let host = Pattern::parse("{tenant}.example.com", Kind::Host).unwrap();
        check(IdentitySource::Host(host), false, Some("acme"));
        let path = Pattern::parse("/t/{tenant}/**", Kind::Path).unwrap();
        check(IdentitySource::Path(path), false, Some("acme"));
        check(IdentitySource::Claim("sub".into()), false, Some("U 1 "));
        check(IdentitySource::Claim("Sub".into()), true, None);
        check(IdentitySource::Claim("empty".into()), true, None);
    }

    #[test]
    fn of_two_cookies_that_differ_neither_counts() {
        let find = |lines: &[&[u8]]| {
            let headers: Vec<(&str, &[u8])> = lines.iter().map(|line| ("cookie", *line)).collect();
            let seen = Seen { trusted: true, headers: Some(&headers[..]), host: None, path: None, claims: None };
            IdentitySource::Cookie("sid".into()).find(&seen)
        };
        let s3 = Some("s3".to_owned());
        assert_eq!(find(&[b"sid=s3"]), s3);
        assert_eq!(find(&[b"sid=s3; sid=\"s3\""]), s3);
        assert_eq!(find(&[b"sid=s3", b"a=1;sid=s3 "]), s3);
        assert_eq!(find(&[b"sid=s3; sid=s4"]), None);
        assert_eq!(find(&[b"sid=s3", b"sid=s4"]), None);
        assert_eq!(find(&[b"sid=s3; sid="]), None);
        assert_eq!(find(&[b"sid=s3; sid=\xff"]), None);
        // A byte elsewhere in the line spoils nothing, and a name is a name in this case only.
        assert_eq!(find(&[b"a=\xff; sid=s3"]), s3);
        assert_eq!(find(&[b"SID=s4; sid=s3"]), s3);
        assert_eq!(find(&[b"sid=\xff"]), None);
    }

    #[test]
    fn a_path_names_nobody_where_its_readings_disagree() {
        let source = IdentitySource::Path(Pattern::parse("/t/{tenant}/**", Kind::Path).unwrap());
        let check = |path: &str, expect: Result<Option<&str>, PathError>| {
            let headers: Option<&[(&str, &str)]> = None;
            let seen = Seen { trusted: false, headers, host: None, path: Some(path), claims: None };
            assert_eq!(source.find(&seen).as_deref(), expect.unwrap_or_default(), "{path}");
            assert_eq!(source.path_error(path), expect.err(), "{path}");
        };
        check("/t/acme/x", Ok(Some("acme")));
        check("/t%2facme/x", Ok(Some("acme")));
        check("/health/../t/acme/x", Ok(Some("acme")));
        check("/health", Ok(None));
        check("/t/acme/../../t/evil/x", Err(PathError::AmbiguousIdentity));
        check("/t/acme%2f..%2fevil/x", Err(PathError::AmbiguousIdentity));
        check("/t/acme%5cevil/x", Err(PathError::AmbiguousIdentity));
    }
}
