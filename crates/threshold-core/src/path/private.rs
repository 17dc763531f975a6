//! Hides what may be a secret in a path, before the path is recorded or shown.
//!
//! A path may hold the token of a reset of a password, an invitation or a share. So no host records a path as it came.

use std::borrow::Cow;

use percent_encoding::percent_decode_str;

use super::{may_differ, normalize_path, read};
use crate::path::OddPaths;
use crate::policy::{Pattern, Policy};

/// What stands for a hidden part of a path. It is one segment, or a part of one, as what it stands for.
pub const HIDDEN: &str = "{hidden}";
/// The fewest characters of a token: 16 hexadecimal digits are 64 bits, as many as those of the server's own tokens.
const MIN_TOKEN: usize = 16;
/// The longest part of a name that may mix letters and digits without looking random: `v2`, `q3`, `2nd`.
const MAX_MIXED: usize = 3;
/// How often a segment is decoded, as servers behind several proxies do.
const MAX_DECODED: usize = 3;

impl Policy {
    /// Returns a path as it may be recorded and shown: without its query, and with [`HIDDEN`] for what looks like a secret, and for
    /// what the wildcards of `private_paths` match.
    ///
    /// What looks like a secret: a UUID, an e-mail address, and 16 or more letters, digits, `-` and `_` in a row with both letters and
    /// digits, unless they are words and numbers joined by `-` or `_`.
    #[must_use]
    pub fn recorded_path<'p>(&self, path: &'p str) -> Cow<'p, str> {
        let path = path.split('?').next().unwrap_or_default();
        match self.private_reading(path) {
            Some(hidden) => Cow::Owned(without_secrets(&hidden).into_owned()),
            None => without_secrets(path),
        }
    }

    /// Returns the endpoint that a caller has named as it may be recorded. A path in it, `METHOD:/path`, is one as in
    /// [`recorded_path`](Self::recorded_path).
    #[must_use]
    pub fn recorded_endpoint<'e>(&self, endpoint: &'e str) -> Cow<'e, str> {
        let Some((name, path)) = endpoint.find('/').and_then(|at| endpoint.split_at_checked(at)) else {
            return endpoint.into();
        };
        match self.recorded_path(path) {
            Cow::Borrowed(same) if same.len() == path.len() => endpoint.into(),
            hidden => format!("{name}{hidden}").into(),
        }
    }

    /// Returns the first reading of a path that `private_paths` matches, with what it hides replaced.
    fn private_reading(&self, path: &str) -> Option<String> {
        let private = &self.identity().private_paths;
        if private.is_empty() {
            return None;
        }
        let hidden = |reading: &str| private.iter().find_map(|pattern: &Pattern| pattern.replaced(reading, HIDDEN));
        let normal = normalize_path(path);
        hidden(&normal).or_else(|| {
            let others = may_differ(path).then(|| read(path, &normal, OddPaths::Match).ok()).flatten();
            others?.into_others().find_map(|reading| hidden(&reading))
        })
    }
}

/// Returns a path with everything replaced that looks like a secret.
fn without_secrets(path: &str) -> Cow<'_, str> {
    if !may_have_secret(path) {
        return path.into();
    }
    let segments = path.split('/').map(hide_in_segment);
    segments.collect::<Vec<_>>().join("/").into()
}

/// Whether a path has a character or a length that every secret has. Most paths have none.
fn may_have_secret(path: &str) -> bool {
    let mut run = 0usize;
    path.bytes().any(|byte| {
        run = if is_token_byte(byte) { run.saturating_add(1) } else { 0 };
        run >= MIN_TOKEN || matches!(byte, b'@' | b'%')
    })
}

fn hide_in_segment(segment: &str) -> Cow<'_, str> {
    if is_email(segment) || (segment.contains('%') && has_encoded_secret(segment)) {
        return HIDDEN.into();
    }
    let mut out = String::new();
    for piece in segment.split_inclusive(|c: char| !is_token(c)) {
        let run = piece.trim_end_matches(|c: char| !is_token(c));
        let is_hidden = looks_random(run);
        out.push_str(if is_hidden { HIDDEN } else { run });
        out.push_str(piece.get(run.len()..).unwrap_or_default());
    }
    out.into()
}

/// Whether a segment with escapes has a secret once it is decoded. The whole of it is hidden then.
fn has_encoded_secret(segment: &str) -> bool {
    let mut text = segment.to_owned();
    for _ in 0..MAX_DECODED {
        let decoded = percent_decode_str(&text).decode_utf8_lossy().into_owned();
        if is_email(&decoded) || decoded.split(|c| !is_token(c)).any(looks_random) {
            return true;
        }
        if decoded == text {
            return false;
        }
        text = decoded;
    }
    // Nobody encodes a segment so often but to hide something.
    true
}

/// Whether text without separators looks like a token or a UUID, and not like words.
fn looks_random(run: &str) -> bool {
    if run.len() < MIN_TOKEN {
        return false;
    }
    let has = |is: fn(&u8) -> bool| run.as_bytes().iter().any(is);
    let is_mixed = |part: &str| {
        let digits = part.bytes().filter(u8::is_ascii_digit).count();
        digits > 0 && digits < part.len() && part.len() > MAX_MIXED
    };
    let has_both = has(u8::is_ascii_digit) && has(u8::is_ascii_alphabetic);
    is_uuid(run) || has_both && run.split(['-', '_']).any(is_mixed)
}

/// Whether text is a UUID with its hyphens. Without them it looks like any token.
fn is_uuid(text: &str) -> bool {
    let lengths = [8, 4, 4, 4, 12];
    let mut parts = text.split('-');
    let is_part = |(part, length): (&str, usize)| part.len() == length && part.bytes().all(|b| b.is_ascii_hexdigit());
    lengths.into_iter().all(|length| parts.next().is_some_and(|part| is_part((part, length)))) && parts.next().is_none()
}

fn is_email(segment: &str) -> bool {
    // `@name` is a handle, or the scope of a package.
    segment.split_once('@').is_some_and(|(name, host)| !name.is_empty() && !host.is_empty())
}

fn is_token(c: char) -> bool {
    u8::try_from(c).is_ok_and(is_token_byte)
}

const fn is_token_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn policy(private: &str) -> Policy {
        Policy::builder()
            .identity(crate::policy::IdentityBuilder::new().private_paths(private.split_whitespace()))
            .build()
            .unwrap()
    }

    #[track_caller]
    fn check(private: &str, path: &str, expect: &str) {
        assert_eq!(policy(private).recorded_path(path), expect, "{path}");
    }

    /// A rehearsal of drafts read the token of a reset from a recorded path, digit by digit.
    #[test]
    fn what_looks_like_a_secret_is_hidden() {
        check("", "/reset/9f86d081884c7d659a2feaa0c55ad015", "/reset/{hidden}");
        check("", "/reset/9f86d081884c7d65/done", "/reset/{hidden}/done");
        check("", "/invite/kJ3-x_9aQ0zLm4Tt", "/invite/{hidden}");
        check("", "/orgs/550e8400-e29b-41d4-a716-446655440000/x", "/orgs/{hidden}/x");
        check("", "/o/55008400-1290-4104-4716-446655440000", "/o/{hidden}");
        check("", "/users/ada@example.com/posts", "/users/{hidden}/posts");
        check("", "/users/ada%40example.com", "/users/{hidden}");
        check("", "/users/ada%2540example.com", "/users/{hidden}");
        check("", "/reset/%39f86d081884c7d65", "/reset/{hidden}");
        check("", "/login;jsessionid=0A1B2C3D4E5F6071", "/login;jsessionid={hidden}");
        check("", "/t/eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.x", "/t/{hidden}.{hidden}.x");
        check("", "/a?token=secret", "/a");
    }

    #[test]
    fn words_and_numbers_stay() {
        for path in [
            "/",
            "/api/v1/posts/1234567890123456789",
            "/blog/2026-01-15-ten-things-about-rate-limits",
            "/docs/getting_started_with_v2_of_the_api",
            "/a/verylongwordwithoutanydigits",
            "/@ada/posts",
            "/caf%C3%A9/x",
            "/%zz",
            "/9f86d081884c7d6",
        ] {
            check("", path, path);
        }
    }

    #[test]
    fn private_paths_hide_what_their_wildcards_match() {
        check("/reset/*", "/reset/abc", "/reset/{hidden}");
        check("/reset/*", "/Reset//ABC/?x", "/reset/{hidden}");
        check("/reset/*", "/reset/abc/more", "/reset/abc/more");
        check("/s/{key}/view", "/s/abc/view", "/s/{hidden}/view");
        check("/files/**", "/files/a/b", "/files/{hidden}/{hidden}");
        check("/files/**", "/files", "/files");
        check("/f/report-*.pdf", "/f/report-ada.pdf", "/f/report-{hidden}.pdf");
        check("/**/reset/*", "/a/reset/reset/b", "/{hidden}/{hidden}/reset/{hidden}");
        check("/x/* /reset/*", "/reset/../reset/abc", "/reset/{hidden}");
        check("/reset/*", "/x%2f..%2freset/abc", "/reset/{hidden}");
    }

    #[test]
    fn an_endpoint_that_is_a_path_is_hidden_and_a_name_is_not() {
        let policy = policy("/reset/*");
        let shown = |endpoint| policy.recorded_endpoint(endpoint).into_owned();
        assert_eq!(shown("POST:/reset/abc"), "POST:/reset/{hidden}");
        assert_eq!(shown("GET:/x/9f86d081884c7d65"), "GET:/x/{hidden}");
        assert_eq!(shown("GET:/x"), "GET:/x");
        assert_eq!(shown("createSession2026Handler"), "createSession2026Handler");
    }

    proptest! {
        /// A rule that matches any text in place of a secret matches what is recorded. Woken by leaving an empty segment.
        #[test]
        fn patterns_with_wildcards_match_what_is_recorded(token in "[0-9][a-zA-Z0-9]{18}[a-z]", before in "[a-z]{0,8}") {
            let policy = policy("");
            let path = format!("/{before}/{token}/x");
            for pattern in ["/**", "/*/*/x", "/**/x", "**"] {
                let pattern = Pattern::parse(pattern, crate::policy::Kind::Path).unwrap();
                let matches = |path: &str| pattern.matches(&normalize_path(path));
                prop_assert_eq!(matches(&path), matches(&policy.recorded_path(&path)), "{}", pattern);
            }
            prop_assert!(!policy.recorded_path(&path).contains(&token));
        }

        /// What was hidden stays as it is, and nothing panics.
        #[test]
        fn what_is_recorded_is_recorded_as_it_is(path in "/([a-z0-9%@/._~é-]|%40|[0-9a-f]{16}){0,20}") {
            let policy = policy("/s/* /t/**");
            let recorded = policy.recorded_path(&path).into_owned();
            prop_assert_eq!(policy.recorded_path(&recorded), recorded.as_str());
        }
    }
}
