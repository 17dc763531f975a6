//! The patterns of `match`: `*` is one segment, `**` anything, `{name}` a captured segment.

mod search;

use std::fmt;

use arrayvec::ArrayVec;

use crate::path::normalize_characters;
use search::{Search, keep_captures};

/// The maximum number of captures in a pattern.
const MAX_CAPTURES: usize = 4;

/// A pattern over a normalized path, a normalized host or a plain name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pattern {
    text: Box<str>,
    tokens: Vec<Token>,
    separator: Option<u8>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Token {
    /// Exactly these characters.
    Literal(Box<str>),
    /// At least `least` characters, none of which is the separator.
    Segment { least: usize, capture: bool },
    /// Any characters at all.
    Any,
    /// Nothing, or a slash and anything: `/**` at the end or in the middle of a path.
    Deeper,
}

/// The kind of text that a pattern matches, which decides the separator and the case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Path,
    Host,
    Name,
}

/// The captured texts, in the order of the pattern.
pub(crate) type Captures<'a> = ArrayVec<&'a str, MAX_CAPTURES>;

impl Pattern {
    pub(crate) fn parse(text: &str, kind: Kind) -> Result<Self, String> {
        let (separator, folded) = match kind {
            Kind::Path => (Some(b'/'), text.to_ascii_lowercase()),
            Kind::Host => (Some(b'.'), text.to_ascii_lowercase()),
            Kind::Name => (None, text.to_owned()),
        };
        if text.is_empty() {
            return Err("a pattern must not be empty".to_owned());
        }
        match kind {
            Kind::Path => check_path(&normalize_characters(&folded))?,
            Kind::Host if !folded.is_ascii() => {
                return Err("hosts are ASCII in requests: write the xn-- form".to_owned());
            }
            Kind::Host | Kind::Name => {}
        }
        // A normalized path has no trailing slash.
        let trimmed = match folded.strip_suffix('/') {
            Some(rest) if kind == Kind::Path && !rest.is_empty() => rest,
            _ => &folded,
        };
        let mut tokens = tokenize(trimmed, separator)?;
        if kind == Kind::Path {
            // Literals are normalized like requests: with other escapes they would never match.
            for token in &mut tokens {
                if let Token::Literal(literal) = token {
                    *literal = normalize_characters(literal).into();
                }
            }
        }
        let captures = tokens.iter().filter(|token| matches!(token, Token::Segment { capture: true, .. })).count();
        if captures > MAX_CAPTURES {
            return Err(format!("a pattern has at most {MAX_CAPTURES} captures"));
        }
        Ok(Self { text: trimmed.into(), tokens, separator })
    }

    /// Returns the pattern as written, in lower case for paths and hosts.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    #[inline]
    pub(crate) fn matches(&self, text: &str) -> bool {
        match self.tokens.as_slice() {
            [Token::Literal(literal)] => literal.as_ref() == text,
            // Most patterns are ruled out by their first literal.
            [Token::Literal(literal), rest @ ..] => {
                let after = text.as_bytes().strip_prefix(literal.as_bytes());
                after.is_some_and(|after| self.matches_after(rest, after))
            }
            _ => Search::new(self, text.as_bytes()).run(|_, _| ()),
        }
    }

    /// Whether the text matches; adds the steps that this takes.
    pub(crate) fn matches_within(&self, text: &str, steps: &mut usize) -> bool {
        if let [Token::Literal(literal), ..] = self.tokens.as_slice()
            && !text.starts_with(literal.as_ref())
        {
            *steps = steps.saturating_add(1);
            return false;
        }
        // What a `**` skips is scanned once.
        *steps = steps.saturating_add(text.len());
        Search::new(self, text.as_bytes()).run(|_, _| *steps = steps.saturating_add(1))
    }

    /// Whether the tokens after the first one match the rest of the text.
    fn matches_after(&self, tokens: &[Token], after: &[u8]) -> bool {
        match tokens {
            [Token::Deeper] => after.first().is_none_or(|first| *first == b'/'),
            [Token::Segment { least, .. }] => {
                after.len() >= *least && !after.iter().any(|byte| Some(*byte) == self.separator)
            }
            _ => Search::after_first(self, after).run(|_, _| ()),
        }
    }

    /// Returns a text that this pattern matches.
    pub(crate) fn sample(&self) -> String {
        let part = |token: &Token| match token {
            Token::Literal(literal) => literal.to_string(),
            Token::Segment { .. } => "x".to_owned(),
            Token::Any | Token::Deeper => String::new(),
        };
        self.tokens.iter().map(part).collect()
    }

    /// Returns the captures, if the text matches. Each takes as much as it can, the first before the others.
    pub(crate) fn captures<'a>(&self, text: &'a str) -> Option<Captures<'a>> {
        let mut starts = vec![0; self.tokens.len()];
        let matched = Search::new(self, text.as_bytes()).run(|token, at| {
            if let Some(start) = starts.get_mut(token) {
                *start = at;
            }
        });
        if !matched {
            return None;
        }
        let mut captures = Captures::new();
        let mut first = 0usize;
        for run in self.tokens.split_inclusive(|token| matches!(token, Token::Any | Token::Deeper)) {
            let next = first.saturating_add(run.len());
            let (tokens, followed) = match run.split_last() {
                Some((last @ (Token::Any | Token::Deeper), tokens)) => (tokens, Some(last)),
                _ => (run, None),
            };
            let end = match followed {
                Some(_) => starts.get(next.saturating_sub(1)).copied().unwrap_or(text.len()),
                None => text.len(),
            };
            let limit = starts.get(next).copied().unwrap_or(text.len());
            // The search took as little as it could before the `**`. A capture right before it takes as much as it can.
            let end = if matches!(followed, Some(Token::Any)) { self.longest(tokens, text, end, limit) } else { end };
            // Between two `**` the tokens stand in one stretch of the text, which the search has found. Captures are
            // read from each stretch by itself.
            let start = starts.get(first).copied().unwrap_or_default();
            keep_captures(tokens, text.get(start..end)?, self.separator, &mut captures);
            first = next;
        }
        Some(captures)
    }

    /// Returns the text with each segment, or part of one, that a wildcard matches replaced by `by`; `None` if the text does not match.
    pub(crate) fn replaced(&self, text: &str, by: &str) -> Option<String> {
        let mut starts = vec![0; self.tokens.len()];
        let matched = Search::new(self, text.as_bytes()).run(|token, at| {
            if let Some(start) = starts.get_mut(token) {
                *start = at;
            }
        });
        let separator = self.separator.map(char::from);
        let mut out = String::new();
        // What is between two literals was matched by wildcards. Separators stay.
        let wild = |out: &mut String, between: &str| {
            for piece in between.split_inclusive(|c| Some(c) == separator) {
                let name = piece.trim_end_matches(|c| Some(c) == separator);
                out.push_str(if name.is_empty() { "" } else { by });
                out.push_str(piece.get(name.len()..).unwrap_or_default());
            }
        };
        let mut at = 0usize;
        for (token, start) in self.tokens.iter().zip(starts) {
            if let Token::Literal(literal) = token {
                wild(&mut out, text.get(at..start)?);
                out.push_str(literal);
                at = start.saturating_add(literal.len());
            }
        }
        wild(&mut out, text.get(at..)?);
        matched.then_some(out)
    }

    /// Returns how far the tokens before a `**` can reach, between `end` and `limit`.
    fn longest(&self, tokens: &[Token], text: &str, end: usize, limit: usize) -> usize {
        let ahead = text.get(end..limit).unwrap_or_default();
        let ahead = ahead.split(|c: char| self.separator.map(char::from) == Some(c)).next().unwrap_or_default();
        match tokens {
            // Up to the next separator: the last wildcard of the run can absorb all of that.
            [.., Token::Segment { .. }] => end.saturating_add(ahead.len()),
            [.., Token::Segment { .. }, Token::Literal(literal)] => {
                let found = ahead.rfind(literal.as_ref()).map(|at| at.saturating_add(literal.len()));
                end.saturating_add(found.unwrap_or(0))
            }
            _ => end,
        }
    }
}

fn check_path(text: &str) -> Result<(), String> {
    if !text.starts_with('/') && !text.starts_with("**") {
        return Err(format!("a path starts with / or **: write \"/{text}\""));
    }
    if text.contains(['?', '#']) {
        return Err("a path pattern must not have a query".to_owned());
    }
    let odd = text.split('/').any(|segment| segment == "." || segment == "..") || text.contains("//");
    if odd {
        return Err("this path never matches: requests are normalized, without //, /./ and /../".to_owned());
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
            // Further stars add nothing.
            let after = after.trim_start_matches('*');
            // Only a whole segment `**` also matches without its slash: `/api/**` matches `/api`, and `/api/x**` does
            // not match `/api`.
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
            // A `*` that is a whole segment needs a character: normalized paths have no empty segments. Within a name
            // it may be empty.
            let whole = at_start && after.bytes().next().is_none_or(|next| Some(next) == separator);
            tokens.push(Token::Segment { least: usize::from(whole), capture: false });
            rest = after;
        } else if let Some(after) = rest.strip_prefix('{') {
            let Some((name, after)) = after.split_once('}') else {
                return Err("a capture begins with { and ends with }".to_owned());
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
    use proptest::prelude::*;

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

    /// Requests are spelled before they are matched, and patterns were not: a rule for `/caf%C3%A9` written with an accent,
    /// or for `/%7Euser`, was never met, and lint was silent.
    #[test]
    fn a_pattern_is_spelled_as_requests_are() {
        let check = |pattern: &str, path: &str| {
            let spelled = crate::path::normalize_path(path);
            assert!(Pattern::parse(pattern, Kind::Path).unwrap().matches(&spelled), "{pattern} and {path}");
        };
        for path in ["/caf\u{e9}/x", "/caf%C3%A9/x", "/%63AF%c3%a9/x"] {
            check("/caf\u{e9}/**", path);
            check("/caf%C3%A9/*", path);
        }
        check("/admin panel/**", "/admin%20panel/x");
        check("/%7Euser/**", "/~user/x");
        check("/api/**/r%2Dx", "/api/a/r-x");
        check("/foo%2Ehtml", "/foo.html");
        check("/a%2Fb", "/a%2fb");
        check("/100%", "/100%25");
        check("/a%2Ab", "/a*b");
        assert!(!Pattern::parse("/a%2Ab", Kind::Path).unwrap().matches("/axb"));
        assert!(Pattern::parse("/a/%2e%2E/b", Kind::Path).is_err());
        assert!(Pattern::parse("b\u{fc}cher.example", Kind::Host).is_err());
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

    /// What a pattern means, tried in every way there is: the slow and plain matcher that the quick one is held against.
    /// Returns what each capture takes, as much as it can.
    fn by_definition<'a>(tokens: &[Token], separator: Option<u8>, text: &'a str) -> Option<Vec<&'a str>> {
        let Some((token, rest)) = tokens.split_first() else { return text.is_empty().then(Vec::new) };
        let cuts = || text.char_indices().map(|(at, _)| at).chain([text.len()]).map(|at| text.split_at(at));
        match token {
            Token::Literal(literal) => by_definition(rest, separator, text.strip_prefix(literal.as_ref())?),
            Token::Any => cuts().find_map(|(_, left)| by_definition(rest, separator, left)),
            Token::Deeper if rest.is_empty() => (text.is_empty() || text.starts_with('/')).then(Vec::new),
            Token::Deeper => cuts()
                .filter(|(skipped, left)| (skipped.is_empty() || skipped.starts_with('/')) && left.starts_with('/'))
                .find_map(|(_, left)| by_definition(rest, separator, left)),
            Token::Segment { least, capture } => cuts()
                .filter(|(kept, _)| kept.len() >= *least && !kept.bytes().any(|byte| Some(byte) == separator))
                .collect::<Vec<_>>()
                .into_iter()
                .rev()
                .find_map(|(kept, left)| {
                    let mut captures = by_definition(rest, separator, left)?;
                    if *capture {
                        captures.insert(0, kept);
                    }
                    Some(captures)
                }),
        }
    }

    proptest! {
        /// Woken by not extending the last `*`, and by forgetting a `**` where it is tried further on.
        #[test]
        fn a_pattern_matches_what_its_definition_matches(
            pattern in "/?(\\*\\*|\\*|\\{x\\}|[ab\u{e9}]|/){1,8}",
            text in "[ab/\u{e9}]{0,12}",
            kind in prop_oneof![Just(Kind::Path), Just(Kind::Host), Just(Kind::Name)],
        ) {
            let (pattern, text) = match kind {
                Kind::Path => (format!("/{pattern}"), format!("/{text}")),
                Kind::Host => (pattern.replace('/', "."), text.replace('/', ".")),
                Kind::Name => (pattern, text),
            };
            let Ok(pattern) = Pattern::parse(&pattern, kind) else { return Ok(()) };
            let expect = by_definition(&pattern.tokens, pattern.separator, &text);
            prop_assert_eq!(pattern.matches(&text), expect.is_some(), "{} {}", pattern, text);
            let captures = pattern.captures(&text);
            prop_assert_eq!(captures.is_some(), expect.is_some());
            // What a capture takes right before `**` or beside another wildcard is nobody's to say.
            let plain = pattern.tokens.windows(2).all(|two| {
                !matches!(two, [Token::Segment { .. }, Token::Segment { .. } | Token::Any])
            });
            if plain && !pattern.tokens.contains(&Token::Any) {
                prop_assert_eq!(captures.map(|captures| captures.to_vec()), expect, "{} {}", pattern, text);
            }
        }

        /// The steps of a search are bounded by the length of the text times that of the pattern, whatever both are. Woken
        /// by trying the same segment again after a `*` was of no help there, and by going on where what must follow a
        /// `**` does not stand in the rest of the text.
        #[test]
        fn a_search_is_linear_in_the_text(
            pattern in "/?(\\*\\*|\\*|[ab]|/|\\*a\\*b){1,12}",
            unit in "[ab/]{1,5}",
            tail in "[ab/]{0,2}",
        ) {
            let Ok(pattern) = Pattern::parse(&format!("/{pattern}"), Kind::Path) else { return Ok(()) };
            let text = format!("/{}{tail}", unit.repeat(400));
            let mut steps = 0usize;
            let mut search = Search::new(&pattern, text.as_bytes());
            search.run(|_, _| steps = steps.saturating_add(1));
            let steps = steps.saturating_add(search.scanned);
            let bound = (pattern.tokens.len().saturating_add(1)).saturating_mul(text.len().saturating_add(1)).saturating_mul(2);
            prop_assert!(steps <= bound, "{} took {} steps over {} bytes", pattern, steps, text.len());
        }
    }

    /// A path of 64 KiB kept `/**/users/**/posts/**/edit` busy for 2.3 seconds: each `/**` tried every place behind it
    /// again for every place of the one before.
    #[test]
    fn patterns_that_took_seconds_take_a_step_a_byte() {
        let check = |pattern: &str, unit: &str| {
            let pattern = Pattern::parse(pattern, Kind::Path).unwrap();
            let text = unit.repeat(65_536 / unit.len());
            let mut steps = 0usize;
            let mut search = Search::new(&pattern, text.as_bytes());
            assert!(!search.run(|_, _| steps = steps.saturating_add(1)));
            let steps = steps.saturating_add(search.scanned);
            assert!(steps <= text.len().saturating_mul(4), "{pattern} took {steps} steps");
        };
        check("/**/users/**/posts/**/edit", "/users/posts");
        check("/**/users/**/posts/**/edit", "/users");
        check("**a**a**a**a**b", "/a");
        check("**a*b", "/aaaaaaaaaaaaaaaa");
        check("**a*b", "a");
    }
}
