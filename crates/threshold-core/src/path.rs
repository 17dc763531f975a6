//! One spelling for each path, host and method, so that none of them can dodge a rule.

mod readings;

use std::borrow::Cow;

pub use readings::{MAX_PATH, MAX_READINGS, OddPaths, PathError};
pub(crate) use readings::{Readings, may_differ, read};

/// The one spelling of a path, whatever form it came in.
///
/// Absolute form, query and fragment are cut off; escapes of ordinary characters are undone; `\` is `/`;
/// `;parameters` are dropped; empty and `.` segments vanish and `..` takes one back; a trailing slash goes; ASCII
/// letters are lower case. An escaped slash stays escaped: it does not separate. Spelling twice changes nothing.
#[must_use]
pub fn spell_path(path: &str) -> Cow<'_, str> {
    PATH.spell(path)
}

#[inline(never)]
fn path_anew(path: &str) -> String {
    let decoded = spell_characters(strip_origin(path));
    let mut segments: Vec<&str> = Vec::new();
    for segment in decoded.split('/') {
        match segment.split(';').next().unwrap_or_default() {
            "" | "." => {}
            ".." => {
                segments.pop();
            }
            plain => segments.push(plain),
        }
    }
    joined(&segments)
}

/// Segments as one path.
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

/// A path that is plainly its own spelling already, without its query.
#[inline]
fn plain_path(path: &str) -> Option<&str> {
    if path.len() > MAX_PATH {
        return None;
    }
    // Two of these behind each other, or one at the end, make a segment that spelling would change.
    let mut before = PLAIN;
    let mut length = path.len();
    for (at, &byte) in path.as_bytes().iter().enumerate() {
        let kind = KINDS.get(usize::from(byte)).copied().unwrap_or(OTHER);
        // At most twice `OTHER`.
        if kind.wrapping_add(before) >= OTHER {
            if byte != b'?' {
                return None;
            }
            length = at;
            break;
        }
        before = kind;
    }
    let (spelled, _) = path.split_at_checked(length)?;
    (spelled == "/" || spelled.starts_with('/') && before == PLAIN).then_some(spelled)
}

/// What a byte is to [`plain_path`]: two that divide count as much as one that needs spelling.
const KINDS: [u8; 256] = kinds();
const PLAIN: u8 = 0;
const DIVIDES: u8 = 1;
const OTHER: u8 = 2;

const fn kinds() -> [u8; 256] {
    let mut kinds = [OTHER; 256];
    let mut byte = 0u8;
    while byte < u8::MAX {
        let kind = match byte {
            b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'~' | b'@' | b':' | b'!' | b',' => PLAIN,
            b'.' | b'/' => DIVIDES,
            _ => OTHER,
        };
        #[expect(clippy::indexing_slicing, reason = "evaluated when it is compiled, and a byte is never out of range")]
        {
            kinds[byte as usize] = kind;
        }
        byte = byte.saturating_add(1);
    }
    kinds
}

/// Cuts `scheme://authority` off the front and a query or fragment off the end.
fn strip_origin(path: &str) -> &str {
    strip_authority(path).split(['?', '#']).next().unwrap_or_default()
}

fn strip_authority(path: &str) -> &str {
    match path.split_once("://") {
        Some((scheme, rest)) if !scheme.contains(['/', '?', '#']) => {
            match rest.find(['/', '?', '#', '\\']) {
                // No host: some parsers take the first segment for one, as behind `//`.
                Some(0) => path.get(scheme.len().saturating_add(1)..).unwrap_or_default(),
                Some(at) => rest.get(at..).unwrap_or_default(),
                None => "",
            }
        }
        _ => path,
    }
}

/// A part of a path with its characters in their one spelling: escapes of printable ASCII are undone, the rest are
/// lower-case escapes.
pub(crate) fn spell_characters(path: &str) -> String {
    let mut out = String::with_capacity(path.len());
    for (value, escaped) in decoded(path) {
        match value {
            b'\\' => out.push('/'),
            // These mean something else when they are not escaped.
            b'/' | b'%' | b'?' | b'#' | b';' if escaped => push_escape(&mut out, value),
            0x21..=0x7e => out.push(char::from(value.to_ascii_lowercase())),
            _ => push_escape(&mut out, value),
        }
    }
    out
}

/// Each byte that a path stands for, and whether it is escaped. A `%` that begins no escape is an escaped one.
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

/// The byte that stands behind a `%`, if its two digits do.
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

/// The one spelling of a host: lower case, without port and trailing dot.
#[must_use]
pub fn spell_host(host: &str) -> Cow<'_, str> {
    HOST.spell(host)
}

fn host_anew(host: &str) -> String {
    name_of(host).to_ascii_lowercase()
}

fn plain_host(host: &str) -> Option<&str> {
    let name = name_of(host);
    (!name.bytes().any(|byte| byte.is_ascii_uppercase())).then_some(name)
}

/// A host without its port and trailing dot.
fn name_of(host: &str) -> &str {
    let host = host.trim();
    let name = if host.starts_with('[') {
        host.split_inclusive(']').next().unwrap_or(host)
    } else {
        host.split(':').next().unwrap_or(host)
    };
    name.trim_end_matches('.')
}

/// Whether a text can be a method: a token of RFC 9110, in any case.
#[must_use]
pub fn is_method(text: &str) -> bool {
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    !text.is_empty() && text.bytes().all(is_token)
}

/// The one spelling of a method: upper case, and `HEAD` is `GET`, since it asks for the same work.
#[must_use]
pub fn spell_method(method: &str) -> Cow<'_, str> {
    METHOD.spell(method)
}

fn method_anew(method: &str) -> String {
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
    if method.eq_ignore_ascii_case("HEAD") {
        return Some("GET");
    }
    (!method.bytes().any(|byte| byte.is_ascii_lowercase())).then_some(method)
}

/// How a kind of text is spelled.
#[derive(Clone, Copy)]
pub(crate) struct Spelling {
    /// The one spelling, if it is a part of the text as it came. Mostly it is, and costs no allocation.
    plain: fn(&str) -> Option<&str>,
    /// The one spelling of all others.
    anew: fn(&str) -> String,
}

pub(crate) const METHOD: Spelling = Spelling { plain: plain_method, anew: method_anew };
pub(crate) const PATH: Spelling = Spelling { plain: plain_path, anew: path_anew };
pub(crate) const HOST: Spelling = Spelling { plain: plain_host, anew: host_anew };

impl Spelling {
    fn spell(self, text: &str) -> Cow<'_, str> {
        (self.plain)(text).map_or_else(|| Cow::Owned((self.anew)(text)), Cow::Borrowed)
    }
}

/// A text in its one spelling, if there is one.
// No `Cow`: that is put together in one place and copied to another, which every request waits for.
#[derive(Debug, Default)]
pub(crate) struct Spelled<'a> {
    plain: Option<&'a str>,
    anew: Option<String>,
}

impl<'a> Spelled<'a> {
    /// Spells a text.
    #[inline(always)]
    pub(crate) fn set(&mut self, text: Option<&'a str>, spelling: Spelling) {
        let Some(text) = text else { return };
        self.plain = (spelling.plain)(text);
        if self.plain.is_none() {
            self.anew = Some((spelling.anew)(text));
        }
    }

    #[inline]
    pub(crate) fn get(&self) -> Option<&str> {
        self.plain.or(self.anew.as_deref())
    }

    /// Whether the text came in a form that had to be spelled.
    #[inline]
    pub(crate) fn was_spelled(&self) -> bool {
        self.anew.is_some()
    }

    /// A text that is in its one spelling already.
    pub(crate) fn of(text: String) -> Self {
        Self { plain: None, anew: Some(text) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_disguise_of_a_path_is_that_path() {
        let disguises = [
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
        for disguise in disguises {
            assert_eq!(spell_path(disguise), "/api/posts", "{disguise}");
        }
    }

    #[test]
    fn different_paths_stay_different() {
        let check = |path: &str, expect: &str| assert_eq!(spell_path(path), expect, "{path}");
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
        /// Lower-casing before undoing escapes, instead of after, wakes this.
        #[test]
        fn spelling_twice_changes_nothing(path in "[/a-cA-C%.;?\\\\0-2eEfF: \u{e9}]{0,24}") {
            let once = spell_path(&path).into_owned();
            prop_assert!(once.starts_with('/'));
            prop_assert_eq!(spell_path(&once), once.as_str());
        }

        /// The quick way and the long way must agree. A quick way that cuts at the last `?` wakes this.
        #[test]
        fn a_plain_path_is_spelled_as_any_other(path in "/?[a-c/.?#]{0,12}") {
            // An escape that is undone again makes it take the long way.
            let long = path.replacen('a', "%61", 1);
            prop_assert_eq!(spell_path(&long), spell_path(&path));
        }

        #[test]
        fn no_path_panics(path: String) {
            let once = spell_path(&path).into_owned();
            prop_assert_eq!(spell_path(&once), once.as_str());
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
    fn hosts_and_methods_have_one_spelling() {
        assert_eq!(spell_host("API.Example.com:8443"), "api.example.com");
        assert_eq!(spell_host("api.example.com."), "api.example.com");
        assert_eq!(spell_host("[::1]:80"), "[::1]");
        assert_eq!(spell_method("post"), "POST");
        assert_eq!(spell_method("HEAD"), "GET");
        assert_eq!(spell_method("head"), "GET");
    }
}
