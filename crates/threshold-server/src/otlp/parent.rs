//! The caller's span, which W3C's `traceparent` and `tracestate` name.

use std::collections::HashSet;
use std::sync::Arc;

use http::HeaderMap;

tokio::task_local! {
    /// The parent of the spans of the request that this task answers.
    static PARENT: Parent;
}

/// The longest `tracestate` that is carried on: what the specification requires at least.
const MAX_STATE: usize = 512;
/// The most members of it, and the longest key or value of one.
const MAX_MEMBERS: usize = 32;
const MAX_PART: usize = 256;

/// The span of a caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Parent {
    pub(super) trace: u128,
    pub(super) span: u64,
    pub(super) is_sampled: bool,
    /// The value of `tracestate`; empty if there is none.
    pub(super) state: Arc<str>,
}

impl Parent {
    /// Returns the parent that a request names; `None` if it names none, or if no spans are exported.
    pub(crate) fn of(headers: &HeaderMap) -> Option<Self> {
        super::SPANS.get()?;
        Self::read(headers)
    }

    /// Returns the parent of what this task does.
    pub(super) fn present() -> Option<Self> {
        PARENT.try_with(Self::clone).ok()
    }

    /// Calls a function whose spans have this parent.
    pub(crate) fn within<T>(&self, work: impl FnOnce() -> T) -> T {
        PARENT.sync_scope(self.clone(), work)
    }

    /// Returns a future whose spans have this parent.
    pub(crate) fn carried<F: Future>(self, work: F) -> impl Future<Output = F::Output> {
        PARENT.scope(self, work)
    }

    fn read(headers: &HeaderMap) -> Option<Self> {
        let mut fields = headers.get_all("traceparent").iter();
        // Two of them are as good as none: there is no telling which one is right.
        let (Some(field), None) = (fields.next(), fields.next()) else { return None };
        let (trace, span, is_sampled) = parse(field.to_str().ok()?)?;
        Some(Self { trace, span, is_sampled, state: state(headers) })
    }
}

/// Parses a `traceparent`. Of a later version only the part is read that the first version has, as the specification says.
fn parse(text: &str) -> Option<(u128, u64, bool)> {
    let mut parts = text.split('-');
    let mut hex = |digits: usize| {
        // In lower case only, and no sign: `from_str_radix` would accept both.
        let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        parts.next().filter(|part| part.len() == digits && part.bytes().all(is_digit))
    };
    let (version, trace, span, flags) = (hex(2)?, hex(32)?, hex(16)?, hex(2)?);
    let is_known = match version {
        "ff" => false,
        "00" => parts.next().is_none(),
        _ => true,
    };
    let trace = u128::from_str_radix(trace, 16).ok().filter(|trace| is_known && *trace != 0)?;
    let span = u64::from_str_radix(span, 16).ok().filter(|span| *span != 0)?;
    Some((trace, span, u8::from_str_radix(flags, 16).ok()? & 1 == 1))
}

/// Returns the value of `tracestate`, whose fields are one list; empty if it is invalid or too long.
fn state(headers: &HeaderMap) -> Arc<str> {
    let fields: Option<Vec<&str>> = headers.get_all("tracestate").iter().map(|field| field.to_str().ok()).collect();
    let state = fields.map(|fields| fields.join(",")).filter(|state| state.len() <= MAX_STATE && is_state(state));
    state.unwrap_or_default().into()
}

/// Whether a list has the form of W3C's Trace Context: members with keys and values, each key once.
fn is_state(list: &str) -> bool {
    let members = || list.split(',').map(|member| member.trim_matches([' ', '\t'])).filter(|member| !member.is_empty());
    let mut keys = HashSet::new();
    members().count() <= MAX_MEMBERS
        && members().all(|member| {
            member.split_once('=').is_some_and(|(key, value)| is_key(key) && is_value(value) && keys.insert(key))
        })
}

fn is_key(key: &str) -> bool {
    let is_first = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let is_other = |byte: u8| is_first(byte) || matches!(byte, b'_' | b'-' | b'*' | b'/' | b'@');
    key.len() <= MAX_PART && key.bytes().next().is_some_and(is_first) && key.bytes().all(is_other)
}

/// An empty one is invalid. Spaces at its end are not part of it.
fn is_value(value: &str) -> bool {
    let is_character = |byte: u8| matches!(byte, b' '..=b'~') && !matches!(byte, b',' | b'=');
    (1..=MAX_PART).contains(&value.len()) && value.bytes().all(is_character)
}

#[cfg(test)]
mod tests {
    use http::{HeaderName, HeaderValue};

    use super::*;

    fn read(fields: &[(&'static str, &str)]) -> Option<Parent> {
        let fields =
            fields.iter().map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap()));
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(name, value);
        }
        Parent::read(&headers)
    }

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

    #[test]
    fn a_parent_is_read_with_its_state() {
        let parent = format!("00-{TRACE}-00f067aa0ba902b7-01");
        let read_parent = read(&[("traceparent", &parent), ("tracestate", "a=1"), ("tracestate", "b=2")]).unwrap();
        assert_eq!(read_parent.trace, 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736);
        assert_eq!((read_parent.span, read_parent.is_sampled), (0x00f0_67aa_0ba9_02b7, true));
        assert_eq!(&*read_parent.state, "a=1,b=2");
        // Other flags than the first one are not known.
        assert!(!read(&[("traceparent", &parent.replace("-01", "-fe"))]).unwrap().is_sampled);
        // A later version may have more at the end.
        assert!(read(&[("traceparent", &format!("{}-what-the-future-has", parent.replacen("00", "cc", 1)))]).is_some());
        // A state that is too long is left out, the parent is not.
        let long = format!("a={}", "x".repeat(MAX_STATE));
        assert_eq!(&*read(&[("traceparent", &parent), ("tracestate", &long)]).unwrap().state, "");
    }

    /// Woken by leaving out any of the conditions.
    #[test]
    fn an_invalid_state_is_left_out_and_the_parent_is_not() {
        let parent = format!("00-{TRACE}-00f067aa0ba902b7-01");
        let state = |state: &str| read(&[("traceparent", &parent), ("tracestate", state)]).unwrap().state;
        let members = |count: usize| (0..count).map(|n| format!("k{n}=v")).collect::<Vec<_>>().join(",");
        for right in [
            "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE",
            "a=1, b=2 ,,c=3",
            "0tenant@system=x/y *",
            "a_-*/=!~",
            &members(32),
        ] {
            assert_eq!(&*state(right), right);
        }
        let long = format!("{}=1", "k".repeat(257));
        for wrong in
            ["a", "a=", "=1", "A=1", "_a=1", "a=1=2", "a b=1", "a=1,a=2", "a=1\tb", "a=1,b", &members(33), &long]
        {
            assert_eq!(&*state(wrong), "", "{wrong}");
        }
    }

    #[test]
    fn a_wrong_parent_is_ignored() {
        let upper = TRACE.to_uppercase();
        for wrong in [
            "",
            "00",
            TRACE,
            &format!("ff-{TRACE}-00f067aa0ba902b7-01"),
            &format!("00-{TRACE}-00f067aa0ba902b7-01-more"),
            &format!("00-{TRACE}-00f067aa0ba902b7"),
            &format!("00-{TRACE}-00f067aa0ba902b-01"),
            &format!("00-{TRACE}-+0f067aa0ba902b7-01"),
            &format!("00-{TRACE}-0000000000000000-01"),
            &format!("00-{upper}-00f067aa0ba902b7-01"),
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
        ] {
            assert_eq!(read(&[("traceparent", wrong)]), None, "{wrong}");
        }
        let right = format!("00-{TRACE}-00f067aa0ba902b7-01");
        assert_eq!(read(&[("traceparent", &right), ("traceparent", &right)]), None, "two of them");
        assert_eq!(read(&[("tracestate", "a=1")]), None);
    }
}
