//! The body of a denial as a policy writes it: text with placeholders such as `{traceId}`.

use serde_json::Value;

use crate::key::TraceId;
use crate::limit::NotationError;

/// The body of a denial, with placeholders.
///
/// In a JSON body a placeholder within a string stands for the value's characters, escaped, and elsewhere for a whole JSON value,
/// so the filled body is always JSON. In any other body, which is sent as `text/plain`, values are inserted unchanged.
#[derive(Debug, Clone)]
pub struct BodyTemplate {
    parts: Box<[Part]>,
    is_json: bool,
}

#[derive(Debug, Clone)]
enum Part {
    Text(Box<str>),
    Placeholder {
        of: Placeholder,
        /// Whether it stands within a JSON string.
        quoted: bool,
    },
}

#[derive(Debug, Clone, Copy)]
enum Placeholder {
    Code,
    Message,
    TraceId,
    Status,
    Rule,
    Limit,
    RetryAfter,
}

/// The placeholders by name.
const NAMES: [(&str, Placeholder); 7] = [
    ("code", Placeholder::Code),
    ("message", Placeholder::Message),
    ("traceId", Placeholder::TraceId),
    ("status", Placeholder::Status),
    ("rule", Placeholder::Rule),
    ("limit", Placeholder::Limit),
    ("retryAfter", Placeholder::RetryAfter),
];

/// The values of the placeholders. A value that is unknown, or that the client may not learn, is `None`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BodyValues<'v> {
    pub(crate) code: &'v str,
    pub(crate) message: &'v str,
    pub(crate) trace: Option<TraceId>,
    pub(crate) status: u16,
    pub(crate) rule: Option<&'v str>,
    pub(crate) limit: Option<u64>,
    pub(crate) retry_after: Option<u64>,
}

impl BodyValues<'_> {
    fn value(&self, of: Placeholder) -> Value {
        match of {
            Placeholder::Code => self.code.into(),
            Placeholder::Message => self.message.into(),
            Placeholder::TraceId => self.trace.map(|trace| trace.to_string()).into(),
            Placeholder::Status => self.status.into(),
            Placeholder::Rule => self.rule.into(),
            Placeholder::Limit => self.limit.into(),
            Placeholder::RetryAfter => self.retry_after.into(),
        }
    }
}

impl BodyTemplate {
    /// Parses a body. Braces around anything but a single word are text, because JSON is full of them.
    pub(crate) fn parse(text: &str) -> Result<Self, NotationError> {
        let mut parts = Vec::new();
        // The text with `null` for each placeholder outside of a string: if that is JSON, every filled body is.
        let mut sample = String::with_capacity(text.len());
        let (mut at, mut literal) = (0, 0);
        let (mut quoted, mut escaped) = (false, false);
        while let Some(c) = text.get(at..).and_then(|rest| rest.chars().next()) {
            let next = at.saturating_add(c.len_utf8());
            // Whether a quote opens or closes a string matters for JSON only, but is tracked before anyone knows if
            // this is JSON.
            let Some((name, end)) = placeholder(text, at) else {
                if quoted && !escaped && c == '\\' {
                    escaped = true;
                } else {
                    quoted ^= c == '"' && !escaped;
                    escaped = false;
                }
                sample.push(c);
                at = next;
                continue;
            };
            let Some((_, of)) = NAMES.iter().find(|(known, _)| *known == name) else {
                let known: Vec<String> = NAMES.iter().map(|(known, _)| format!("{{{known}}}")).collect();
                let help = format!("known: {}", known.join(", "));
                return Err(NotationError { at: at..end, message: format!("unknown placeholder {{{name}}}"), help });
            };
            parts.extend(text.get(literal..at).filter(|text| !text.is_empty()).map(|text| Part::Text(text.into())));
            parts.push(Part::Placeholder { of: *of, quoted });
            // Within a string the value is escaped, so the sample needs nothing there.
            if !quoted {
                sample.push_str("null");
            }
            (at, literal) = (end, end);
        }
        parts.extend(text.get(literal..).filter(|text| !text.is_empty()).map(|text| Part::Text(text.into())));
        // Decided once, when the policy is loaded, so that a denial needs no parser.
        let is_json = serde_json::from_str::<Value>(&sample).is_ok();
        Ok(Self { parts: parts.into(), is_json })
    }

    /// Returns the media type.
    pub(crate) fn content_type(&self) -> &'static str {
        if self.is_json { "application/json" } else { "text/plain; charset=utf-8" }
    }

    /// Fills in the values.
    pub(crate) fn fill(&self, values: &BodyValues<'_>) -> String {
        let mut out = String::new();
        for part in &self.parts {
            match part {
                Part::Text(text) => out.push_str(text),
                Part::Placeholder { of, quoted: false } if self.is_json => {
                    out.push_str(&values.value(*of).to_string());
                }
                Part::Placeholder { of, .. } => match values.value(*of) {
                    // Within a text, a value that is unknown or must not be told is left out. The word `null` would be
                    // read as a value.
                    Value::Null => {}
                    Value::String(text) if !self.is_json => out.push_str(&text),
                    Value::String(text) => {
                        // The body has the quotes already.
                        let json = Value::String(text).to_string();
                        out.push_str(json.get(1..json.len().saturating_sub(1)).unwrap_or_default());
                    }
                    number => out.push_str(&number.to_string()),
                },
            }
        }
        out
    }
}

/// Returns the name of the placeholder that begins here, and where it ends: a single word in braces.
fn placeholder(text: &str, at: usize) -> Option<(&str, usize)> {
    let inner = text.get(at..)?.strip_prefix('{')?;
    let name = inner.get(..inner.find('}')?)?;
    let is_word = name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    is_word.then(|| (name, at.saturating_add(name.len()).saturating_add(2)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALUES: BodyValues<'_> = BodyValues {
        code: "rate_limited",
        message: "\\ \u{e9}\nsay \"please\"",
        trace: Some(TraceId::from_u128(7)),
        status: 429,
        rule: None,
        limit: Some(10),
        retry_after: None,
    };

    /// Values are escaped where JSON needs it: a message with a quote must not end its string. Outside of a string a
    /// placeholder is a whole value.
    #[test]
    fn a_filled_json_body_is_json() {
        let check = |template: &str, expect: &str| {
            let body = BodyTemplate::parse(template).unwrap();
            assert_eq!(body.content_type(), "application/json", "{template}");
            let filled = body.fill(&VALUES);
            assert_eq!(filled, expect);
            serde_json::from_str::<Value>(&filled).unwrap();
        };
        check(r#"{"a":"{message}"}"#, r#"{"a":"\\ é\nsay \"please\""}"#);
        check(r#"{"a":{message},"b":{limit},"c":{rule}}"#, r#"{"a":"\\ é\nsay \"please\"","b":10,"c":null}"#);
        check(r#"{"a":"{limit} in {retryAfter}.","b":"{rule}"}"#, r#"{"a":"10 in .","b":""}"#);
        check(
            r#"{"\"a":{status},"b":{"c":"\\"},"t":"{traceId}"}"#,
            &format!(r#"{{"\"a":429,"b":{{"c":"\\"}},"t":"{:032x}"}}"#, 7),
        );
        check("{code}", "\"rate_limited\"");
        check(r#"{"ok":false}"#, r#"{"ok":false}"#);
    }

    #[test]
    fn a_body_that_is_not_json_is_text_with_the_values_unchanged() {
        let check = |template: &str, expect: &str| {
            let body = BodyTemplate::parse(template).unwrap();
            assert_eq!(body.content_type(), "text/plain; charset=utf-8", "{template}");
            assert_eq!(body.fill(&VALUES), expect);
        };
        check("{message} ({code}, {limit}){retryAfter}", "\\ \u{e9}\nsay \"please\" (rate_limited, 10)");
        // Only a word in braces is a placeholder.
        check("{} {0} { code } {a b} {\"x\" { {code", "{} {0} { code } {a b} {\"x\" { {code");
        check("", "");
    }

    #[test]
    fn an_unknown_placeholder_is_an_error_at_its_place() {
        let error = BodyTemplate::parse("é {\"a\":\"{trace_id}\"}").unwrap_err();
        assert_eq!(error.message, "unknown placeholder {trace_id}");
        assert_eq!(error.at, 9..19);
        assert!(error.help.starts_with("known: {code}, {message}, {traceId}"), "{}", error.help);
    }
}
