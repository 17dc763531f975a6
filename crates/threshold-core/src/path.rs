//! Normal forms of paths, hosts and methods, so that no spelling of one bypasses a rule.
//!
//! Most requests arrive in normal form. Then nothing is allocated: the normal form is a slice of the text that came. A path on
//! which servers differ has several readings, at most [`MAX_READINGS`].

mod private;
mod readings;

use std::borrow::Cow;

pub use private::HIDDEN;
pub use readings::{MAX_PATH, MAX_READINGS, OddPaths, PathError};
pub(crate) use readings::{Readings, may_differ, read};

/// Returns the normal form of a path.
///
/// Scheme, authority, query and fragment are removed. Escapes of ordinary characters are decoded, and `\` becomes `/`.
/// `;parameters` are dropped, as are empty and `.` segments and a trailing slash, and `..` removes the segment before it. ASCII
/// letters are lower case. An escaped slash stays escaped and does not separate. A path in normal form stays as it is.
#[must_use]
pub fn normalize_path(path: &str) -> Cow<'_, str> {
    PATH.normalize(path)
}

#[inline(never)]
fn rewrite_path(path: &str) -> String {
    let decoded = normalize_characters(strip_origin(path));
    let mut segments: Vec<&str> = Vec::new();
    for segment in decoded.split('/') {
        match segment.split(';').next().unwrap_or_default() {
            "" | "." => {}
            // On an empty list nothing happens: `..` does not lead above the root.
            ".." => {
                segments.pop();
            }
            plain => segments.push(plain),
        }
    }
    joined(&segments)
}

/// Joins segments to a path.
fn joined(segments: &[&str]) -> String {
    let length = segments.iter().map(|segment| segment.len().saturating_add(1)).sum::<usize>();
    let mut path = String::with_capacity(length.max(1));
    for segment in segments {
        path.push('/');
        path.push_str(segment);
    }
    if path.is_empty() {
        path.push('/');
    }
    path
}

/// Returns a path that is in normal form already, without its query; `None` where it may not be.
#[inline]
fn plain_path(path: &str) -> Option<&str> {
    // Not plain, so that it is read in all its ways, where a path of this length is refused.
    if path.len() > MAX_PATH {
        return None;
    }
    // Two dividers in a row, or one at the end, make a segment that normalizing would change: `//`, `/.`, `..`, or a trailing
    // slash. A single `.` inside a name is left alone.
    let mut before = PLAIN;
    let mut length = path.len();
    for (at, &byte) in path.as_bytes().iter().enumerate() {
        let kind = KINDS.get(usize::from(byte)).copied().unwrap_or(OTHER);
        // Two dividers add up to `OTHER`. The sum is at most twice that and cannot overflow.
        if kind.wrapping_add(before) >= OTHER {
            if byte != b'?' {
                return None;
            }
            length = at;
            break;
        }
        before = kind;
    }
    let (plain, _) = path.split_at_checked(length)?;
    // A divider at the end is a trailing slash or dot, which the slow way resolves. The root is nothing but a slash.
    (plain == "/" || plain.starts_with('/') && before == PLAIN).then_some(plain)
}

/// The class of each byte for [`plain_path`]. Two dividers count as much as one byte that has to be rewritten, so that one
/// comparison finds both.
const KINDS: [u8; 256] = kinds();
const PLAIN: u8 = 0;
const DIVIDES: u8 = 1;
const OTHER: u8 = 2;

const fn kinds() -> [u8; 256] {
    // A byte that is not listed below takes the slow way: a gap in the list costs time and lets nothing pass.
    let mut kinds = [OTHER; 256];
    let mut byte = 0u8;
    while byte < u8::MAX {
        let kind = match byte {
            b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'~' | b'@' | b':' | b'!' | b',' => PLAIN,
            b'.' | b'/' => DIVIDES,
            _ => OTHER,
        };
        #[expect(clippy::indexing_slicing, reason = "evaluated at compile time, and a byte is never out of range")]
        {
            kinds[byte as usize] = kind;
        }
        byte = byte.saturating_add(1);
    }
    kinds
}

/// Removes `scheme://authority` from the front and a query or fragment from the end.
fn strip_origin(path: &str) -> &str {
    strip_authority(path).split(['?', '#']).next().unwrap_or_default()
}

fn strip_authority(path: &str) -> &str {
    match path.split_once("://") {
        // Only at the beginning: `/go/http://x` has a URL within its path, and that is not its origin.
        Some((scheme, rest)) if !scheme.contains(['/', '?', '#']) => {
            match rest.find(['/', '?', '#', '\\']) {
                // An empty host. Some parsers then take the first segment for the host, as they do behind `//`, so the slashes
                // are kept for the readings.
                Some(0) => path.get(scheme.len().saturating_add(1)..).unwrap_or_default(),
                Some(at) => rest.get(at..).unwrap_or_default(),
                None => "",
            }
        }
        _ => path,
    }
}

/// Returns a part of a path with its characters in normal form: escapes of printable ASCII are decoded, and all other bytes are
/// lower-case escapes.
pub(crate) fn normalize_characters(path: &str) -> String {
    let mut out = String::with_capacity(path.len());
    for (value, escaped) in decoded(path) {
        match value {
            // Escaped or not: URL parsers take `\` for a slash, and some servers decode `%5c` before they split.
            b'\\' => out.push('/'),
            // Decoding these would change the meaning of the path.
            b'/' | b'%' | b'?' | b'#' | b';' if escaped => push_escape(&mut out, value),
            0x21..=0x7e => out.push(char::from(value.to_ascii_lowercase())),
            _ => push_escape(&mut out, value),
        }
    }
    out
}

/// Returns the bytes of a path after percent-decoding, each with whether it was escaped. A `%` that begins no valid escape
/// counts as an escaped `%`.
fn decoded(path: &str) -> impl Iterator<Item = (u8, bool)> {
    decoded_bytes(path.as_bytes())
}

fn decoded_bytes(path: &[u8]) -> impl Iterator<Item = (u8, bool)> {
    let mut rest = path;
    std::iter::from_fn(move || {
        let (first, behind) = rest.split_first()?;
        rest = behind;
        if *first != b'%' {
            return Some((*first, false));
        }
        let Some(value) = escape(behind) else { return Some((b'%', true)) };
        rest = behind.get(2..).unwrap_or_default();
        Some((value, true))
    })
}

/// Returns the byte of an escape from the two hexadecimal digits behind its `%`.
fn escape(behind: &[u8]) -> Option<u8> {
    let (high, low) = (*behind.first()?, *behind.get(1)?);
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    Some(digit(high)? << 4 | digit(low)?)
}

fn push_escape(out: &mut String, value: u8) {
    const DIGITS: [char; 16] = ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9', 'a', 'b', 'c', 'd', 'e', 'f'];
    let digit = |nibble: u8| DIGITS.get(usize::from(nibble & 15)).copied().unwrap_or('0');
    out.push('%');
    out.push(digit(value >> 4));
    out.push(digit(value));
}

/// Returns the normal form of a host: lower case, without port and trailing dot.
#[must_use]
pub fn normalize_host(host: &str) -> Cow<'_, str> {
    HOST.normalize(host)
}

fn rewrite_host(host: &str) -> String {
    name_of(host).to_ascii_lowercase()
}

fn plain_host(host: &str) -> Option<&str> {
    let name = name_of(host);
    (!name.bytes().any(|byte| byte.is_ascii_uppercase())).then_some(name)
}

/// Returns a host without its port and trailing dot.
fn name_of(host: &str) -> &str {
    let host = host.trim();
    // An IPv6 literal has colons of its own, so its port is what follows the bracket.
    let name = if host.starts_with('[') {
        host.split_inclusive(']').next().unwrap_or(host)
    } else {
        host.split(':').next().unwrap_or(host)
    };
    name.trim_end_matches('.')
}

/// Returns whether a text can be a method: a token of RFC 9110, in upper or lower case.
#[must_use]
pub fn is_method(text: &str) -> bool {
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    !text.is_empty() && text.bytes().all(is_token)
}

/// Returns the normal form of a method: upper case, and `GET` for `HEAD`, which costs a server the same work.
#[must_use]
pub fn normalize_method(method: &str) -> Cow<'_, str> {
    METHOD.normalize(method)
}

fn rewrite_method(method: &str) -> String {
    method.trim().to_ascii_uppercase()
}

#[inline]
fn plain_method(method: &str) -> Option<&str> {
    if matches!(method, "GET" | "POST" | "PUT" | "PATCH" | "DELETE" | "OPTIONS") {
        return Some(method);
    }
    plain_other(method)
}

#[inline(never)]
fn plain_other(method: &str) -> Option<&str> {
    let method = method.trim();
    // A separate budget for HEAD would double what a client gets of the same resource.
    if method.eq_ignore_ascii_case("HEAD") {
        return Some("GET");
    }
    (!method.bytes().any(|byte| byte.is_ascii_lowercase())).then_some(method)
}

/// The normal form of one kind of text, computed in two steps.
#[derive(Clone, Copy)]
pub(crate) struct NormalForm {
    /// Returns the normal form if it is a slice of the text. It mostly is.
    plain: fn(&str) -> Option<&str>,
    /// Returns the normal form of any other text.
    rewrite: fn(&str) -> String,
}

pub(crate) const METHOD: NormalForm = NormalForm { plain: plain_method, rewrite: rewrite_method };
pub(crate) const PATH: NormalForm = NormalForm { plain: plain_path, rewrite: rewrite_path };
pub(crate) const HOST: NormalForm = NormalForm { plain: plain_host, rewrite: rewrite_host };

impl NormalForm {
    fn normalize(self, text: &str) -> Cow<'_, str> {
        (self.plain)(text).map_or_else(|| Cow::Owned((self.rewrite)(text)), Cow::Borrowed)
    }
}

/// A text in normal form; empty where a request has no such text.
// Two fields and not a `Cow`, which would be built in one place and then copied here, for every request.
#[derive(Debug, Default)]
pub(crate) struct Normalized<'a> {
    plain: Option<&'a str>,
    rewritten: Option<String>,
}

impl<'a> Normalized<'a> {
    /// Stores the normal form of a text.
    #[inline(always)]
    pub(crate) fn set(&mut self, text: Option<&'a str>, form: NormalForm) {
        let Some(text) = text else { return };
        self.plain = (form.plain)(text);
        if self.plain.is_none() {
            self.rewritten = Some((form.rewrite)(text));
        }
    }

    #[inline]
    pub(crate) fn get(&self) -> Option<&str> {
        self.plain.or(self.rewritten.as_deref())
    }

    /// Returns whether the text was not in normal form when it came.
    #[inline]
    pub(crate) fn was_rewritten(&self) -> bool {
        self.rewritten.is_some()
    }

    /// Takes a text that is in normal form already.
    pub(crate) fn of(text: String) -> Self {
        Self { plain: None, rewritten: Some(text) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_spelling_of_a_path_has_the_same_normal_form() {
        let spellings = [
            "/api/posts",
            "//api/./posts/",
            "/api//posts",
            "/API/Posts",
            "/api/%70osts",
            "/api/posts/",
            "/api/posts//",
            "/api/x/../posts",
            "/api/%2e/posts",
            "/api/x/%2E%2e/posts",
            "/api/x/.%2e/posts",
            "/../../api/posts",
            "/api/posts?limit=1",
            "/api/posts#top",
            "/api/posts;v=1",
            "/api;a=b/posts;",
            "/api/x/..;/posts",
            "\\api\\posts",
            "/api%5Cposts",
            "http://example.com/api/posts",
            "HTTPS://user@example.com:8443/api/posts?x",
            "api/posts",
            "/./api/posts/.",
        ];
        for spelling in spellings {
            assert_eq!(normalize_path(spelling), "/api/posts", "{spelling}");
        }
    }

    #[test]
    fn different_paths_stay_different() {
        let check = |path: &str, expect: &str| assert_eq!(normalize_path(path), expect, "{path}");
        check("", "/");
        check("/", "/");
        check("///", "/");
        check("/..", "/");
        check("http://example.com", "/");
        check("http://example.com?x=/a", "/");
        check("/?a=/b", "/");
        check("/a?b=/../c", "/a");
        check("/a/?b#c", "/a");
        check("/a/.?b", "/a");
        check("/a#b?c", "/a");
        check("?a", "/");
        check("/a%2Fb", "/a%2fb");
        check("/a%252Fb", "/a%252fb");
        check("/a%3Bb", "/a%3bb");
        check("/a%00b", "/a%00b");
        check("/a%zzb", "/a%25zzb");
        check("/a%2", "/a%252");
        check("/a%", "/a%25");
        check("/caf\u{e9}", "/caf%c3%a9");
        check("/caf%C3%A9", "/caf%c3%a9");
        check("/a b", "/a%20b");
        check("/a.b/c..d", "/a.b/c..d");
        check("/.well-known/x", "/.well-known/x");
        check("/go/http://x", "/go/http:/x");
        check("/%40me", "/@me");
    }

    proptest! {
        /// Fails if letters are lower-cased before escapes are decoded.
        #[test]
        fn normalizing_twice_changes_nothing(path in "[/a-cA-C%.;?\\\\0-2eEfF: \u{e9}]{0,24}") {
            let once = normalize_path(&path).into_owned();
            prop_assert!(once.starts_with('/'));
            prop_assert_eq!(normalize_path(&once), once.as_str());
        }

        /// The fast path and the slow path agree. Fails if the fast path cuts at the last `?`.
        #[test]
        fn a_plain_path_is_normalized_like_any_other(path in "/?[a-c/.?#]{0,12}") {
            // An escape of a plain letter makes it take the slow path.
            let long = path.replacen('a', "%61", 1);
            prop_assert_eq!(normalize_path(&long), normalize_path(&path));
        }

        #[test]
        fn no_path_panics(path: String) {
            let once = normalize_path(&path).into_owned();
            prop_assert_eq!(normalize_path(&once), once.as_str());
        }
    }

    #[test]
    fn a_method_is_a_token() {
        for fine in ["GET", "get", "M-SEARCH", "X!#$%&'*+.^_`|~9"] {
            assert!(is_method(fine), "{fine}");
        }
        for wrong in
            ["", " ", " GET", "GET ", "GET /", "GET:/", "GE\tT", "G\u{202e}T", "P\u{d6}ST", "\"GET\"", "G\0T", "a,b"]
        {
            assert!(!is_method(wrong), "{wrong:?}");
        }
    }

    #[test]
    fn hosts_and_methods_have_a_normal_form() {
        assert_eq!(normalize_host("API.Example.com:8443"), "api.example.com");
        assert_eq!(normalize_host("api.example.com."), "api.example.com");
        assert_eq!(normalize_host("[::1]:80"), "[::1]");
        assert_eq!(normalize_method("post"), "POST");
        assert_eq!(normalize_method("HEAD"), "GET");
        assert_eq!(normalize_method("head"), "GET");
    }
}
