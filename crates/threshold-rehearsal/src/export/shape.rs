//! Classifies a policy's patterns for languages without them: equals, contains, begins, ends; else a regular expression.

/// A pattern as the simplest test that means the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Shape {
    Equals(String),
    /// `**x**`.
    Contains(String),
    /// `x**`.
    Begins(String),
    /// `/x/**`: itself, and everything below it.
    Below(String),
    /// `**x`.
    Ends(String),
    /// `**`.
    Anything,
    /// Anything else, as a regular expression over the whole text.
    Expression(String),
}

impl Shape {
    /// Classifies a pattern whose segments are separated by `between`.
    pub(super) fn of(pattern: &str, between: char) -> Self {
        let inner = pattern.trim_start_matches("**").trim_end_matches("**");
        if pattern == "**" || pattern == "/**" {
            return Self::Anything;
        }
        // A star or a name inside, after the ends are trimmed: no simple test of text can express it.
        if inner.contains(['*', '{']) {
            return Self::Expression(expression(pattern, between));
        }
        let (open, shut) = (pattern.starts_with("**"), pattern.ends_with("**"));
        match (open, shut, inner.strip_suffix(between)) {
            (true, true, _) => Self::Contains(inner.to_owned()),
            (true, false, _) => Self::Ends(inner.to_owned()),
            (false, true, Some(base)) => Self::Below(base.to_owned()),
            (false, true, None) => Self::Begins(inner.to_owned()),
            (false, false, _) => Self::Equals(inner.to_owned()),
        }
    }

    /// Returns a regular expression over the whole text.
    pub(super) fn regex(&self) -> String {
        match self {
            Self::Equals(text) => format!("^{}$", quoted(text)),
            Self::Contains(text) => quoted(text),
            Self::Begins(text) => format!("^{}", quoted(text)),
            Self::Below(text) => format!("^{}(/|$)", quoted(text)),
            Self::Ends(text) => format!("{}$", quoted(text)),
            Self::Anything => ".*".to_owned(),
            Self::Expression(text) => text.clone(),
        }
    }
}

/// Escapes text for a regular expression.
fn quoted(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        if !(c.is_ascii_alphanumeric() || matches!(c, '/' | '-' | '_' | '~' | '%')) && c.is_ascii() {
            out.push('\\');
        }
        out.push(c);
    }
    out
}

fn expression(pattern: &str, between: char) -> String {
    let one = if between == '/' { "[^/]*" } else { "[^.]*" };
    let mut out = String::from("^");
    let mut rest = pattern;
    while !rest.is_empty() {
        if let Some(after) = rest.strip_prefix("**") {
            out.push_str(".*");
            rest = after;
        } else if let Some(after) = rest.strip_prefix('*') {
            out.push_str(one);
            rest = after;
        } else if let Some((_, after)) = rest.strip_prefix('{').and_then(|inner| inner.split_once('}')) {
            out.push_str(one);
            rest = after;
        } else {
            let end = rest.find(['*', '{']).unwrap_or(rest.len());
            // At least one character: an opening brace without its end is plain text, and would be found at 0
            // forever.
            let (plain, after) = rest.split_at_checked(end.max(1)).unwrap_or((rest, ""));
            out.push_str(&quoted(plain));
            rest = after;
        }
    }
    out.push('$');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_becomes_the_simplest_test() {
        let check = |pattern: &str, expect: Shape| assert_eq!(Shape::of(pattern, '/'), expect, "{pattern}");
        check("**/api/upload**", Shape::Contains("/api/upload".to_owned()));
        check("**/api/ai/**", Shape::Contains("/api/ai/".to_owned()));
        check("/login", Shape::Equals("/login".to_owned()));
        check("/api/**", Shape::Below("/api".to_owned()));
        check("/api**", Shape::Begins("/api".to_owned()));
        check("**.php", Shape::Ends(".php".to_owned()));
        check("**", Shape::Anything);
        check("/a/*/c.d/{x}", Shape::Expression("^/a/[^/]*/c\\.d/[^/]*$".to_owned()));
    }
}
