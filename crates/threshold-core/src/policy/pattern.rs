//! The patterns of `match`: `*` one segment, `**` anything, `{name}` a segment to keep.

use std::fmt;

use arrayvec::ArrayVec;

/// The most captures one pattern may hold.
const MAX_CAPTURES: usize = 4;

/// A pattern over the one spelling of a path, a host or a plain name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pattern {
    text: Box<str>,
    tokens: Vec<Token>,
    separator: Option<u8>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Token {
    /// These very characters.
    Literal(Box<str>),
    /// Any characters but the separator, at least so many.
    Segment { least: usize, capture: bool },
    /// Any characters at all.
    Any,
    /// Nothing, or a separator and anything: the `/**` at the end and in the middle of a path.
    Deeper,
}

/// What a pattern matches against: decides the separator and the case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Path,
    Host,
    Name,
}

/// The text of each capture, in the order of the pattern.
pub(crate) type Captures<'a> = ArrayVec<&'a str, MAX_CAPTURES>;

impl Pattern {
    pub(crate) fn parse(text: &str, kind: Kind) -> Result<Self, String> {
        let (separator, folded) = match kind {
            Kind::Path => (Some(b'/'), text.to_ascii_lowercase()),
            Kind::Host => (Some(b'.'), text.to_ascii_lowercase()),
            Kind::Name => (None, text.to_owned()),
        };
        if text.is_empty() {
            return Err("a pattern is not empty".to_owned());
        }
        if kind == Kind::Path {
            check_path(&folded)?;
        }
        // A trailing slash says nothing in a path that has one spelling.
        let trimmed = match folded.strip_suffix('/') {
            Some(rest) if kind == Kind::Path && !rest.is_empty() => rest,
            _ => &folded,
        };
        let tokens = tokenize(trimmed, separator)?;
        let captures = tokens.iter().filter(|token| matches!(token, Token::Segment { capture: true, .. })).count();
        if captures > MAX_CAPTURES {
            return Err(format!("a pattern keeps at most {MAX_CAPTURES} captures"));
        }
        Ok(Self { text: trimmed.into(), tokens, separator })
    }

    /// The pattern as written.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    pub(crate) fn matches(&self, text: &str) -> bool {
        match self.tokens.as_slice() {
            [Token::Literal(literal)] => literal.as_ref() == text,
            _ => Search::new(self, text).run(0, 0, &mut None),
        }
    }

    /// A text that this pattern matches.
    pub(crate) fn sample(&self) -> String {
        let part = |token: &Token| match token {
            Token::Literal(literal) => literal.to_string(),
            Token::Segment { .. } => "x".to_owned(),
            Token::Any | Token::Deeper => String::new(),
        };
        self.tokens.iter().map(part).collect()
    }

    pub(crate) fn captures<'a>(&self, text: &'a str) -> Option<Captures<'a>> {
        let mut captures = Some(Captures::new());
        Search::new(self, text).run(0, 0, &mut captures).then_some(captures).flatten()
    }
}

/// One attempt to match a pattern with a text.
struct Search<'p, 'a> {
    pattern: &'p Pattern,
    text: &'a str,
    /// Where which token is known not to match. Kept only for patterns that could otherwise try the same place over
    /// and over; it bounds the work by the product of the lengths.
    failed: Vec<bool>,
}

impl<'p, 'a> Search<'p, 'a> {
    fn new(pattern: &'p Pattern, text: &'a str) -> Self {
        let open = |token: &Token| matches!(token, Token::Any | Token::Deeper | Token::Segment { .. });
        let inner = pattern.tokens.split_last().map_or(&[][..], |(_, inner)| inner);
        let places = if inner.iter().filter(|token| open(token)).count() < 2 {
            0
        } else {
            pattern.tokens.len().saturating_mul(text.len().saturating_add(1))
        };
        Self { pattern, text, failed: vec![false; places] }
    }

    /// Whether the tokens from `index` on match the text from `at` on.
    fn run(&mut self, index: usize, at: usize, captures: &mut Option<Captures<'a>>) -> bool {
        let pattern = self.pattern;
        let text = self.text.get(at..).unwrap_or_default();
        let Some(token) = pattern.tokens.get(index) else { return text.is_empty() };
        let place = index.saturating_mul(self.text.len().saturating_add(1)).saturating_add(at);
        if self.failed.get(place).is_some_and(|failed| *failed) {
            return false;
        }
        let next = index.saturating_add(1);
        let is_last = next == pattern.tokens.len();
        let matched = match token {
            Token::Literal(literal) => {
                text.starts_with(literal.as_ref()) && self.run(next, at.saturating_add(literal.len()), captures)
            }
            Token::Any if is_last => true,
            Token::Any => {
                let following = pattern.tokens.get(next);
                splits(text).any(|(skipped, left)| {
                    could_start(following, left) && self.run(next, at.saturating_add(skipped.len()), captures)
                })
            }
            Token::Deeper if is_last => text.is_empty() || text.starts_with('/'),
            Token::Deeper => splits(text).any(|(skipped, left)| {
                (skipped.is_empty() || skipped.starts_with('/'))
                    && left.starts_with('/')
                    && self.run(next, at.saturating_add(skipped.len()), captures)
            }),
            Token::Segment { least, capture } => {
                let end = text.bytes().position(|byte| Some(byte) == pattern.separator).unwrap_or(text.len());
                let (segment, _) = text.split_at(end);
                // The longest first: a capture keeps all it can.
                splits(segment).rev().filter(|(kept, _)| kept.len() >= *least).any(|(kept, _)| {
                    let depth = captures.as_ref().map_or(0, ArrayVec::len);
                    if *capture && let Some(captures) = captures {
                        let _ = captures.try_push(kept);
                    }
                    let matched = self.run(next, at.saturating_add(kept.len()), captures);
                    if !matched && let Some(captures) = captures {
                        captures.truncate(depth);
                    }
                    matched
                })
            }
        };
        if !matched && let Some(failed) = self.failed.get_mut(place) {
            *failed = true;
        }
        matched
    }
}

/// Whether what follows a `**` could begin here; saves most of the search.
fn could_start(next: Option<&Token>, left: &str) -> bool {
    match next {
        Some(Token::Literal(literal)) => left.starts_with(literal.as_ref()),
        _ => true,
    }
}

/// Every way to cut a text in two, the shortest first part first.
fn splits(text: &str) -> impl DoubleEndedIterator<Item = (&str, &str)> {
    text.char_indices().map(|(at, _)| at).chain([text.len()]).map(|at| text.split_at(at))
}

fn check_path(text: &str) -> Result<(), String> {
    if !text.starts_with('/') && !text.starts_with("**") {
        return Err(format!("a path starts with / or **: write \"/{text}\""));
    }
    if text.contains(['?', '#']) {
        return Err("a path pattern has no query: rules match paths".to_owned());
    }
    let odd = text.split('/').any(|segment| segment == "." || segment == "..") || text.contains("//");
    if odd {
        return Err("this path is never met: requests are matched without //, /./ and /../".to_owned());
    }
    Ok(())
}

fn tokenize(text: &str, separator: Option<u8>) -> Result<Vec<Token>, String> {
    let mut tokens = Vec::new();
    let mut literal = String::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let at_start = match (literal.chars().last(), tokens.last()) {
            (Some(last), _) => separator.is_some_and(|separator| last == char::from(separator)),
            (None, None) => true,
            (None, Some(_)) => false,
        };
        if let Some(after) = rest.strip_prefix("**") {
            let after = after.trim_start_matches('*');
            let ends = after.is_empty() || after.starts_with('/');
            if separator == Some(b'/') && literal.ends_with('/') && ends {
                literal.pop();
                flush(&mut literal, &mut tokens);
                tokens.push(Token::Deeper);
            } else {
                flush(&mut literal, &mut tokens);
                tokens.push(Token::Any);
            }
            rest = after;
        } else if let Some(after) = rest.strip_prefix('*') {
            flush(&mut literal, &mut tokens);
            let whole = at_start && after.bytes().next().is_none_or(|next| Some(next) == separator);
            tokens.push(Token::Segment { least: usize::from(whole), capture: false });
            rest = after;
        } else if let Some(after) = rest.strip_prefix('{') {
            let Some((name, after)) = after.split_once('}') else {
                return Err("a capture that begins with { ends with }".to_owned());
            };
            if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
                return Err(format!("a capture is a name in braces, as in {{id}}, not {{{name}}}"));
            }
            flush(&mut literal, &mut tokens);
            tokens.push(Token::Segment { least: 1, capture: true });
            rest = after;
        } else {
            literal.push(first);
            rest = rest.get(first.len_utf8()..).unwrap_or_default();
        }
    }
    flush(&mut literal, &mut tokens);
    Ok(tokens)
}

fn flush(literal: &mut String, tokens: &mut Vec<Token>) {
    if !literal.is_empty() {
        tokens.push(Token::Literal(std::mem::take(literal).into()));
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(kind: Kind, pattern: &str, yes: &[&str], no: &[&str]) {
        let pattern = Pattern::parse(pattern, kind).unwrap();
        for text in yes {
            assert!(pattern.matches(text), "{pattern} should match {text}");
        }
        for text in no {
            assert!(!pattern.matches(text), "{pattern} should not match {text}");
        }
    }

    #[test]
    fn paths() {
        check(Kind::Path, "/api/posts", &["/api/posts"], &["/api/posts/1", "/api/post", "/api"]);
        check(Kind::Path, "/API/Posts/", &["/api/posts"], &["/"]);
        check(Kind::Path, "/api/posts/*", &["/api/posts/1"], &["/api/posts", "/api/posts/1/edit"]);
        check(Kind::Path, "/api/{kind}/edit", &["/api/posts/edit"], &["/api/edit", "/api/a/b/edit"]);
        check(Kind::Path, "/api/v*/posts", &["/api/v1/posts", "/api/v/posts"], &["/api/x1/posts"]);
        check(Kind::Path, "/api/**", &["/api", "/api/a", "/api/a/b"], &["/apis", "/"]);
        check(Kind::Path, "/a/**/b", &["/a/b", "/a/x/b", "/a/x/y/b"], &["/a/xb", "/ab", "/a/b/c"]);
        check(Kind::Path, "**/api/ai/**", &["/api/ai/x", "/v1/api/ai/x/y", "/api/ai"], &["/api/aix", "/api"]);
        check(Kind::Path, "**/api/upload**", &["/api/upload", "/x/api/uploads/1"], &["/api/up"]);
        check(Kind::Path, "**", &["/", "/a/b"], &[]);
        check(Kind::Path, "/**", &["/", "/a", "/a/b"], &[]);
        check(Kind::Path, "/*", &["/a"], &["/", "/a/b"]);
        check(Kind::Path, "/", &["/"], &["/a"]);
        check(Kind::Path, "/**/x/**/y", &["/x/y", "/a/x/b/c/y"], &["/x", "/xy"]);
    }

    #[test]
    fn hosts_and_names() {
        check(Kind::Host, "*.example.com", &["a.example.com"], &["a.b.example.com", "example.com"]);
        check(Kind::Host, "**grove.place**", &["grove.place", "a.grove.place"], &["grove.com"]);
        check(Kind::Name, "acme-*", &["acme-1", "acme-/x"], &["acme"]);
        check(Kind::Name, "Oak", &["Oak"], &["oak"]);
    }

    #[test]
    fn captures_keep_their_segment() {
        let capture = |kind, pattern: &str, text: &str| {
            let pattern = Pattern::parse(pattern, kind).unwrap();
            pattern.captures(text).map(|captures| captures.join("|"))
        };
        assert_eq!(capture(Kind::Path, "/t/{tenant}/**", "/t/acme/x/y").as_deref(), Some("acme"));
        assert_eq!(capture(Kind::Path, "/t/{tenant}/**", "/t/acme").as_deref(), Some("acme"));
        assert_eq!(capture(Kind::Path, "/t/{tenant}/**", "/x/acme"), None);
        assert_eq!(capture(Kind::Host, "{tenant}.example.com", "acme.example.com").as_deref(), Some("acme"));
        assert_eq!(capture(Kind::Host, "{tenant}.example.com", "a.b.example.com"), None);
        assert_eq!(capture(Kind::Path, "/{a}-{b}/**", "/x-y-z").as_deref(), Some("x-y|z"));
    }

    #[test]
    fn a_pattern_that_cannot_be_meant_is_refused() {
        for text in ["", "api/posts", "/a//b", "/a/../b", "/a?x=1", "/a/{", "/a/{}", "/a/{x y}", "/{a}{b}{c}{d}{e}"] {
            assert!(Pattern::parse(text, Kind::Path).is_err(), "{text}");
        }
    }

    #[test]
    fn many_stars_over_a_long_path_end_quickly() {
        let pattern = Pattern::parse("**a**a**a**a**b", Kind::Path).unwrap();
        let path = format!("/{}", "a".repeat(400));
        assert!(!pattern.matches(&path));
    }
}
