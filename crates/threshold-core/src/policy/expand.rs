//! Variables in strings: `${NAME}`, `${NAME:-default}`, and `$$` for a dollar sign.
//!
//! A value may be a secret, so this file also remembers which texts were expanded: messages show `${NAME}`, never the value.

use std::collections::BTreeMap;
use std::ops::Range;

/// The shortest value that messages hide wherever it occurs. A shorter one could be a part of any word, so it is hidden only
/// in quotes.
const LONG_VALUE: usize = 6;
/// The most characters of a text that a message quotes.
const MAX_SHOWN: usize = 80;

/// Why a variable cannot be expanded.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct VariableError {
    pub(crate) message: String,
    pub(crate) help: String,
}

/// Expands the variables in all strings of one policy.
pub(crate) struct Expander<'v> {
    variable: &'v dyn Fn(&str) -> Option<String>,
    /// The bytes that all expanded strings together may still take; `None` once that was exceeded, and nothing more is
    /// expanded.
    room: Option<usize>,
    values: Values,
}

/// The strings that had variables, and the values that no message may show.
#[derive(Debug, Default)]
pub(crate) struct Values {
    /// The span of each such string, and its text before the expansion.
    written: Vec<(Range<usize>, String)>,
    /// The variable that each value came from.
    hidden: BTreeMap<String, String>,
}

impl<'v> Expander<'v> {
    /// Creates an expander. `room` bounds the bytes of all expanded strings together.
    pub(crate) fn new(variable: &'v dyn Fn(&str) -> Option<String>, room: usize) -> Self {
        Self { variable, room: Some(room), values: Values::default() }
    }

    pub(crate) fn into_values(self) -> Values {
        self.values
    }

    /// Expands every variable of the text at `span`; returns `None` if there is none. With `digits_only` a value must be a plain
    /// number, so that a variable in a limit changes its figures and never its meaning.
    pub(crate) fn expand(
        &mut self,
        text: &str,
        span: Range<usize>,
        digits_only: bool,
    ) -> Result<Option<String>, VariableError> {
        // Most strings have no variable and cost nothing.
        let Some(room) = self.room.filter(|_| text.contains('$')) else { return Ok(None) };
        let mut out = String::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once('$') {
            out.push_str(before);
            if let Some(after) = after.strip_prefix('$') {
                out.push('$');
                rest = after;
            } else if let Some(after) = after.strip_prefix('{') {
                let Some((inside, after)) = after.split_once('}') else {
                    return Err(wrong(
                        "a variable begins with ${ and ends with }",
                        "write \"${NAME}\" or \"${NAME:-20}\"",
                    ));
                };
                let (name, value) = self.value(inside, digits_only)?;
                if out.len().saturating_add(value.len()) > room {
                    // This error refuses the policy. Expanding the other strings would only repeat it, at the cost of
                    // their memory.
                    self.room = None;
                    let message = format!("the variable {name} makes the policy too large");
                    let most = super::MAX_FILE;
                    let help =
                        format!("all strings with variables together are at most {most} bytes: use a shorter value");
                    return Err(wrong(&message, &help));
                }
                out.push_str(&value);
                rest = after;
            } else {
                return Err(wrong(
                    "a $ without a variable",
                    "write \"$$\" for a dollar sign, or \"${NAME}\" for a variable",
                ));
            }
        }
        out.push_str(rest);
        self.room = Some(room.saturating_sub(out.len()));
        // The whole text too: messages quote whole strings, and a short value is not recognised inside one.
        self.values.hide(&out, text);
        self.values.written.push((span, text.to_owned()));
        Ok(Some(out))
    }

    /// Returns the name and the value of a variable.
    fn value<'t>(&mut self, inside: &'t str, digits_only: bool) -> Result<(&'t str, String), VariableError> {
        let (name, default) = match inside.split_once(":-") {
            Some((name, default)) => (name, Some(default)),
            None => (inside, None),
        };
        let is_name = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
            && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        if !is_name {
            // The text may be a part of a password that has "${" in it, so the message does not quote it.
            let message = "the name of a variable consists of letters, digits and _, and does not start with a digit";
            return Err(wrong(message, "write \"${NAME}\" or \"${NAME:-20}\""));
        }
        // As in a shell, `:-` also replaces a variable that is set to nothing.
        let set = (self.variable)(name).filter(|value| !value.is_empty());
        if let Some(value) = &set {
            self.values.hide(value, &format!("${{{name}}}"));
        }
        let Some(value) = set.or_else(|| default.map(str::to_owned)) else {
            let help = format!("set {name}, or give it a default: \"${{{name}:-…}}\"");
            return Err(wrong(&format!("the variable {name} is not set"), &help));
        };
        if digits_only && (value.is_empty() || !value.bytes().all(|byte| byte.is_ascii_digit())) {
            // The value may be a secret that was put into the wrong variable, so the message does not quote it.
            let message = format!("the variable {name} is not a number, and a limit needs one");
            return Err(wrong(&message, &format!("set {name} to a whole number")));
        }
        Ok((name, value))
    }
}

impl Values {
    fn hide(&mut self, value: &str, written: &str) {
        if !value.is_empty() && value != written {
            self.hidden.entry(value.to_owned()).or_insert_with(|| shown(written));
        }
    }

    /// Returns the unexpanded text of the string at this place, if it had variables.
    pub(crate) fn written_at(&self, place: &Range<usize>) -> Option<String> {
        let inside = |span: &Range<usize>| span.start <= place.start && place.end <= span.end;
        self.written.iter().find(|(span, _)| inside(span)).map(|(_, written)| shown(written))
    }

    /// Returns the values with their variables. The longest are first, because a value may be a part of another.
    pub(crate) fn hidden(&self) -> Vec<(&String, &String)> {
        let mut hidden: Vec<(&String, &String)> = self.hidden.iter().collect();
        hidden.sort_by_key(|(value, _)| std::cmp::Reverse(value.len()));
        hidden
    }
}

/// Returns a message with values replaced by their variables.
pub(crate) fn unexpanded(hidden: &[(&String, &String)], message: &str) -> String {
    hidden.iter().fold(message.to_owned(), |text, (value, written)| {
        if value.len() >= LONG_VALUE {
            replaced(&text, value, written)
        } else {
            replaced(&text, &format!("\"{value}\""), &format!("\"{written}\""))
        }
    })
}

/// Replaces every occurrence, ignoring ASCII case: names of headers and paths are lower-cased before they are reported.
fn replaced(text: &str, value: &str, with: &str) -> String {
    // Lower-casing ASCII keeps every byte in its place, so a position in `lower` is one in `text`.
    let (lower, value) = (text.to_ascii_lowercase(), value.to_ascii_lowercase());
    let mut out = String::with_capacity(text.len());
    let mut from = 0;
    for (at, found) in lower.match_indices(&value) {
        out.push_str(text.get(from..at).unwrap_or_default());
        out.push_str(with);
        from = at.saturating_add(found.len());
    }
    out.push_str(text.get(from..).unwrap_or_default());
    out
}

/// Returns the beginning of a text, for messages.
fn shown(text: &str) -> String {
    match text.char_indices().nth(MAX_SHOWN) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
    }
}

fn wrong(message: &str, help: &str) -> VariableError {
    VariableError { message: message.to_owned(), help: help.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lookup(name: &str) -> Option<String> {
        match name {
            "MAX" => Some("30".to_owned()),
            "EMPTY" => Some(String::new()),
            "WORD" => Some("many".to_owned()),
            _ => None,
        }
    }

    #[test]
    fn variables_are_expanded() {
        let check = |text: &str, expect: &str| {
            let full = Expander::new(&lookup, 100).expand(text, 0..0, false).unwrap();
            let full = full.unwrap_or_else(|| text.to_owned());
            assert_eq!(full, expect);
        };
        check("plain", "plain");
        check("${MAX}/min", "30/min");
        check("${MAX:-20}/min", "30/min");
        check("${NONE:-20}/min", "20/min");
        check("${EMPTY:-20}/min", "20/min");
        check("${NONE:-}", "");
        check("a $$5 note for ${WORD}", "a $5 note for many");
        check("$${MAX}", "${MAX}");
    }

    #[test]
    fn a_variable_that_cannot_be_expanded_is_named() {
        let check = |text: &str, digits, expect: &str| {
            let error = Expander::new(&lookup, 100).expand(text, 0..0, digits).unwrap_err();
            assert!(error.message.contains(expect), "{text}: {}", error.message);
        };
        check("${NONE}", false, "NONE is not set");
        check("${EMPTY}", false, "EMPTY is not set");
        check("${MAX", false, "ends with }");
        check("costs $5", false, "a $ without");
        check("${a b}", false, "the name of a variable consists");
        check("${}", false, "the name of a variable consists");
        check("${WORD}/min", true, "WORD is not a number");
        check("${NONE:-x}/min", true, "NONE is not a number");
    }

    /// A file of 4 MiB with a long variable in each string would grow to gigabytes.
    #[test]
    fn all_strings_together_have_a_bound() {
        let lookup = |_: &str| Some("x".repeat(40));
        let mut expander = Expander::new(&lookup, 100);
        assert!(expander.expand("${A}", 0..0, false).is_ok_and(|full| full.is_some()));
        assert!(expander.expand("${A}${A}", 0..0, false).is_err_and(|error| error.message.contains("A makes")));
        // One error refuses the policy, so no further string is expanded.
        assert_eq!(expander.expand("${A}", 0..0, false), Ok(None));
        let mut exact = Expander::new(&lookup, 80);
        assert!(exact.expand("${A}", 0..0, false).is_ok_and(|full| full.is_some()));
        assert!(exact.expand("${A}", 0..0, false).is_ok_and(|full| full.is_some()));
        assert!(exact.expand("${A}", 0..0, false).is_err());
    }

    #[test]
    fn messages_show_variables_and_not_their_values() {
        let lookup = |name: &str| match name {
            "LONG" => Some("Hunter2-Hunter3".to_owned()),
            "PART" => Some("Hunter2".to_owned()),
            "SHORT" => Some("the".to_owned()),
            _ => None,
        };
        let mut expander = Expander::new(&lookup, 1_000);
        for (place, text) in ["${LONG}", "${PART}", "${SHORT}", "a-${SHORT}", "${NONE:-default}"].iter().enumerate() {
            expander.expand(text, place..place, false).unwrap();
        }
        let values = expander.into_values();
        let check = |message: &str, expect: &str| assert_eq!(unexpanded(&values.hidden(), message), expect);
        check("no tier is called \"Hunter2-Hunter3\"", "no tier is called \"${LONG}\"");
        check("the header hunter2 is not verified", "the header ${PART} is not verified");
        check("two rules are called \"a-the\", not \"the\"", "two rules are called \"a-${SHORT}\", not \"${SHORT}\"");
        check("unknown \"default\" in per", "unknown \"${NONE:-default}\" in per");
        check("nothing to hide", "nothing to hide");
    }
}
