//! Writes events as JSON, and parses them.

use serde_json::{Map, Value, json};

use super::limit::required;
use super::{Event, EventId, EventLimit, MAX_BATCH, MAX_LIMITS, MAX_TEXT, Strike, representable};
use crate::decision::{Cause, Degraded, Verdict};
use crate::key::TraceId;
use crate::policy::Layer;
use crate::text::printable;
use crate::time::Timestamp;

/// Why a text is no event.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {message}")]
#[non_exhaustive]
pub struct EventError {
    /// The field: `layer`, or `3.layer` in a batch. Empty for the whole text.
    pub field: Box<str>,
    /// What is wrong.
    pub message: Box<str>,
}

impl EventError {
    pub(super) fn new(field: &str, message: impl Into<Box<str>>) -> Self {
        Self { field: field.into(), message: message.into() }
    }

    /// Puts the place of the whole before the field.
    fn inside(self, place: &str) -> Self {
        let field = if self.field.is_empty() { place.into() } else { format!("{place}.{}", self.field).into() };
        Self { field, ..self }
    }
}

impl Event {
    /// Writes the event as JSON, on one line. Characters that terminals interpret are escaped.
    #[must_use]
    pub fn to_json(&self) -> String {
        let strike = self.strike.as_ref();
        let value = json!({
            "id": self.id.to_string(),
            "at": millis(self.at),
            "layer": self.layer.map(Layer::name),
            "blocked": self.blocked,
            "tenant": self.tenant,
            "userId": self.user_id,
            "endpoint": self.endpoint,
            "ip": self.ip,
            "rule": self.rule,
            "verdict": self.verdict.name(),
            "count": self.count,
            "subject": strike.map(|strike| &strike.subject),
            "strikes": strike.map(|strike| strike.strikes),
            "shadowUntil": strike.and_then(|strike| strike.shadow_until).map(millis),
            "bannedUntil": strike.and_then(|strike| strike.banned_until).map(millis),
            "cause": self.cause.map(Cause::name),
            "until": self.until.map(millis),
            "degraded": self.degraded.map(Degraded::name),
            "traceId": (self.trace != TraceId::default()).then(|| self.trace.to_string()),
            "limits": self.limits.iter().map(EventLimit::write).collect::<Vec<_>>(),
        });
        printable(&value.to_string()).into_owned()
    }

    /// Reads an event. All fields but `id`, `at` and `blocked` may be left out; a field without a meaning is an error.
    ///
    /// # Errors
    /// Fails with the first field that is missing, unknown or has a wrong value.
    pub fn from_json(text: &str) -> Result<Self, EventError> {
        Self::read(parse(text)?)
    }

    /// Writes a batch: a JSON array of events, as `POST /v1/events` takes it.
    #[must_use]
    pub fn batch_to_json<'e>(events: impl IntoIterator<Item = &'e Self>) -> String {
        let events: Vec<String> = events.into_iter().map(Self::to_json).collect();
        format!("[{}]", events.join(","))
    }

    /// Reads a batch of at most [`MAX_BATCH`] events.
    ///
    /// # Errors
    /// Fails with the first field that is missing, unknown or has a wrong value.
    pub fn batch_from_json(text: &str) -> Result<Vec<Self>, EventError> {
        let Value::Array(items) = parse(text)? else { return Err(EventError::new("", "must be an array")) };
        if items.len() > MAX_BATCH {
            return Err(EventError::new("", format!("has {} events, and {MAX_BATCH} are the most", items.len())));
        }
        let numbered = |(at, item): (usize, Value)| Self::read(item).map_err(|error| error.inside(&at.to_string()));
        items.into_iter().enumerate().map(numbered).collect()
    }

    fn read(value: Value) -> Result<Self, EventError> {
        let Value::Object(fields) = value else { return Err(EventError::new("", "must be an object")) };
        let mut fields = Fields(fields);
        let (id, at) = (fields.text("id")?, fields.time("at")?);
        let id = EventId::parse(&required("id", id)?).ok_or(EventError::new("id", "must be a UUID"))?;
        let blocked = required("blocked", fields.read("blocked", "true or false", Value::as_bool)?)?;
        let layer = fields.read("layer", "the name of a layer", |value| layer(value.as_str()?))?;
        let verdict = fields.read("verdict", "the name of a verdict", |value| verdict(value.as_str()?))?;
        let verdict = verdict.unwrap_or(if blocked { Verdict::Deny } else { Verdict::Allow });
        if verdict.allows() == blocked {
            return Err(EventError::new("verdict", "contradicts blocked"));
        }
        let cause = fields.read("cause", "the name of a cause", |value| Cause::named(value.as_str()?))?;
        if cause.is_some() && !blocked {
            return Err(EventError::new("cause", "contradicts blocked"));
        }
        let count =
            fields.read("count", "a whole number, at least 1", |value| value.as_u64().filter(|own| *own > 0))?;
        let trace = fields.read("traceId", "32 hexadecimal digits", |value| trace(value.as_str()?))?;
        let event = Self {
            id,
            at: required("at", at)?,
            layer,
            blocked,
            tenant: fields.text("tenant")?,
            user_id: fields.text("userId")?,
            endpoint: fields.text("endpoint")?,
            ip: fields.text("ip")?,
            rule: fields.text("rule")?,
            verdict,
            count: count.unwrap_or(1),
            strike: fields.strike()?,
            cause,
            until: fields.time("until")?,
            degraded: fields.read("degraded", "the name of a degradation", |value| Degraded::named(value.as_str()?))?,
            trace: trace.unwrap_or_default(),
            limits: fields.limits()?,
        };
        fields.end("is no field of an event")?;
        Ok(event)
    }
}

/// The fields of an event that were not read yet.
pub(super) struct Fields(pub(super) Map<String, Value>);

impl Fields {
    /// Reads a field. `null` counts as missing.
    pub(super) fn read<T>(
        &mut self,
        name: &str,
        kind: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, EventError> {
        match self.0.shift_remove(name).filter(|value| !value.is_null()) {
            None => Ok(None),
            Some(value) => read(&value).map(Some).ok_or_else(|| EventError::new(name, format!("must be {kind}"))),
        }
    }

    pub(super) fn text(&mut self, name: &str) -> Result<Option<Box<str>>, EventError> {
        let kind = format!("a text of 1 to {MAX_TEXT} bytes");
        self.read(name, &kind, |value| {
            value.as_str().filter(|text| (1..=MAX_TEXT).contains(&text.len())).map(Into::into)
        })
    }

    fn time(&mut self, name: &str) -> Result<Option<Timestamp>, EventError> {
        self.read(name, "a time in milliseconds", |value| {
            representable(Timestamp::from_micros(value.as_u64()?.checked_mul(1_000)?))
        })
    }

    fn strike(&mut self) -> Result<Option<Strike>, EventError> {
        let (subject, shadow_until, banned_until) =
            (self.text("subject")?, self.time("shadowUntil")?, self.time("bannedUntil")?);
        let strikes = self.read("strikes", "a number of strikes", |value| u32::try_from(value.as_u64()?).ok())?;
        match (subject, strikes) {
            (Some(subject), Some(strikes)) => Ok(Some(Strike { subject, strikes, shadow_until, banned_until })),
            (None, None) if shadow_until.is_none() && banned_until.is_none() => Ok(None),
            (None, _) => Err(EventError::new("subject", "is required with a strike")),
            (_, None) => Err(EventError::new("strikes", "is required with a subject")),
        }
    }

    fn limits(&mut self) -> Result<Box<[EventLimit]>, EventError> {
        let kind = format!("an array of at most {MAX_LIMITS} limits");
        let fits = |value: &Value| value.as_array().filter(|items| items.len() <= MAX_LIMITS).cloned();
        let items = self.read("limits", &kind, fits)?.unwrap_or_default();
        let numbered = |(at, item)| EventLimit::read(item).map_err(|error| error.inside(&format!("limits.{at}")));
        items.iter().enumerate().map(numbered).collect()
    }

    /// Fails if a field was not read.
    pub(super) fn end(&self, message: &str) -> Result<(), EventError> {
        match self.0.keys().next() {
            Some(unknown) => Err(EventError::new(&printable(unknown), message)),
            None => Ok(()),
        }
    }
}

/// Returns a time as whole milliseconds.
pub(super) fn millis(at: Timestamp) -> u64 {
    at.micros().checked_div(1_000).unwrap_or(0)
}

fn parse(text: &str) -> Result<Value, EventError> {
    serde_json::from_str(text).map_err(|error| EventError::new("", format!("is no JSON: {error}")))
}

pub(super) fn layer(name: &str) -> Option<Layer> {
    let all = [Layer::Global, Layer::Edge, Layer::Tenant, Layer::User, Layer::Endpoint];
    all.into_iter().find(|layer| layer.name() == name)
}

fn verdict(name: &str) -> Option<Verdict> {
    let all = [Verdict::Allow, Verdict::Warn, Verdict::Slow, Verdict::Deny, Verdict::Ban];
    all.into_iter().find(|verdict| verdict.name() == name)
}

fn trace(text: &str) -> Option<TraceId> {
    let is_hex = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    u128::from_str_radix(text, 16).ok().filter(|_| is_hex).map(TraceId::from_u128)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use proptest::sample::select;

    const ID: &str = "00112233-4455-4677-8899-aabbccddeeff";

    fn any_text() -> impl Strategy<Value = Option<Box<str>>> {
        proptest::option::of("[a-z\u{202e}\u{1b}\"\\\\é#=,]{1,20}".prop_map(Into::into))
    }

    fn any_time() -> impl Strategy<Value = Timestamp> {
        (0..9_007_199_254_740_u64).prop_map(|millis| Timestamp::from_micros(millis.saturating_mul(1_000)))
    }

    prop_compose! {
        fn any_strike()(
            subject in "[a-z=\u{202e}]{1,9}",
            strikes: u32,
            shadow_until in proptest::option::of(any_time()),
            banned_until in proptest::option::of(any_time()),
        ) -> Strike {
            Strike { subject: subject.into(), strikes, shadow_until, banned_until }
        }
    }

    prop_compose! {
        fn any_limit()(
            rule in "[a-z\u{202e}]{1,9}",
            layer in select(vec!["global", "edge", "tenant", "user", "endpoint"]),
            (enforced, allowed, limit, period) in any::<(bool, bool, u64, Option<u64>)>(),
            (remaining, cost, reset_at, retry_after) in any::<(u64, u64, Option<u64>, Option<u64>)>(),
        ) -> EventLimit {
            let (rule, layer) = (rule.into(), super::layer(layer).unwrap());
            EventLimit { rule, layer, enforced, allowed, limit, period, remaining, cost, reset_at, retry_after }
        }
    }

    prop_compose! {
        fn any_event()(
            (id, count, trace, at) in (any::<[u8; 16]>(), 1_u64.., any::<u128>(), any_time()),
            layer in proptest::option::of(select(vec!["global", "edge", "tenant", "user", "endpoint"])),
            verdict in select(vec!["allow", "warn", "slow", "deny", "ban"]),
            (tenant, user_id, endpoint, ip, rule) in (any_text(), any_text(), any_text(), any_text(), any_text()),
            strike in proptest::option::of(any_strike()),
            (cause, degraded) in (proptest::option::of(select(&Cause::ALL)), proptest::option::of(select(&Degraded::ALL))),
            until in proptest::option::of(any_time()),
            limits in proptest::collection::vec(any_limit(), 0..3),
        ) -> Event {
            let verdict = super::verdict(verdict).unwrap();
            let (id, trace, layer) = (EventId::new(id), TraceId::from_u128(trace), layer.and_then(super::layer));
            let blocked = !verdict.allows();
            let (cause, limits) = (cause.filter(|_| blocked), limits.into());
            Event { id, at, layer, blocked, tenant, user_id, endpoint, ip, rule, verdict, count, strike, cause, until, degraded, trace, limits }
        }
    }

    proptest! {
        #[test]
        fn an_event_reads_back_as_it_was_written(event in any_event()) {
            let json = event.to_json();
            prop_assert!(!json.contains(crate::text::is_hidden), "{}", json);
            prop_assert_eq!(Event::from_json(&json), Ok(event.clone()));
            let batch = [event.clone(), event];
            prop_assert_eq!(Event::batch_from_json(&Event::batch_to_json(&batch)), Ok(batch.to_vec()));
        }

        #[test]
        fn nothing_that_is_read_panics(text: String, at in 0..400_usize, byte: u8) {
            let _ = Event::batch_from_json(&text);
            let mut json = minimal("").into_bytes();
            if let Some(own) = json.get_mut(at) {
                *own = byte;
            }
            let _ = Event::from_json(&String::from_utf8_lossy(&json));
        }
    }

    fn minimal(more: &str) -> String {
        format!(r#"{{"id":"{ID}","at":1767225600000,"blocked":true{more}}}"#)
    }

    #[test]
    fn an_edge_reports_with_few_fields() {
        let event = Event::from_json(&minimal(r#","layer":"edge","ip":"203.0.113.7""#)).unwrap();
        assert_eq!((event.layer, event.count, event.verdict), (Some(Layer::Edge), 1, Verdict::Deny));
        assert_eq!((event.ip.as_deref(), event.strike), (Some("203.0.113.7"), None));
    }

    #[test]
    fn a_wrong_field_is_named() {
        let check = |json: &str, field: &str| {
            let error = Event::from_json(json).unwrap_err();
            assert_eq!(&*error.field, field, "{error}");
        };
        check("{", "");
        check("[]", "");
        check("{}", "id");
        check(&minimal("").replace(ID, "no-uuid"), "id");
        check(&minimal("").replace("1767225600000", "-1"), "at");
        check(&minimal("").replace("1767225600000", "18446744073709551615"), "at");
        check(&minimal("").replace(r#","at":1767225600000"#, ""), "at");
        check(&minimal("").replace(r#","blocked":true"#, ""), "blocked");
        check(&minimal("").replace("true", "1"), "blocked");
        check(&minimal(r#","count":0"#), "count");
        check(&minimal(r#","layer":"sky""#), "layer");
        check(&minimal(r#","verdict":"allow""#), "verdict");
        check(&minimal(r#","verdict":"maybe""#), "verdict");
        check(&minimal(r#","cause":"moon""#), "cause");
        check(&minimal(r#","cause":"limit""#).replace("true", "false"), "cause");
        check(&minimal(r#","degraded":"tired""#), "degraded");
        check(&minimal(r#","until":"soon""#), "until");
        check(&minimal(r#","traceId":"+0000000000000000000000000000000""#), "traceId");
        check(&minimal(r#","tenant":"""#), "tenant");
        check(&minimal(&format!(r#","userId":"{}""#, "x".repeat(257))), "userId");
        check(&minimal(r#","subject":"user=u1""#), "strikes");
        check(&minimal(r#","bannedUntil":1767225600000"#), "subject");
        check(&minimal(r#","more":1"#), "more");
        let limit = r#"{"rule":"a","layer":"user","mode":"enforce","allowed":true,"limit":1,"remaining":1,"cost":1}"#;
        let limits = |limits: &[String]| minimal(&format!(r#","limits":[{}]"#, limits.join(",")));
        assert_eq!(Event::from_json(&limits(&vec![limit.to_owned(); MAX_LIMITS])).unwrap().limits.len(), MAX_LIMITS);
        check(&limits(&vec![limit.to_owned(); MAX_LIMITS + 1]), "limits");
        check(&minimal(r#","limits":1"#), "limits");
        check(&limits(&[limit.to_owned(), "1".to_owned()]), "limits.1");
        check(&limits(&[limit.replace(r#""cost":1"#, r#""cost":-1"#)]), "limits.0.cost");
        check(&limits(&[limit.replace(r#""mode":"enforce","#, "")]), "limits.0.mode");
        check(&limits(&[limit.replace("cost", "price")]), "limits.0.price");
        let batch = format!("[{},{}]", minimal(""), minimal(r#","layer":1"#));
        assert_eq!(&*Event::batch_from_json(&batch).unwrap_err().field, "1.layer");
        let full = format!("[{}]", vec![minimal(""); MAX_BATCH].join(","));
        assert_eq!(Event::batch_from_json(&full).unwrap().len(), MAX_BATCH);
        let over = format!("[{}]", vec![minimal(""); MAX_BATCH + 1].join(","));
        assert!(Event::batch_from_json(&over).unwrap_err().to_string().contains("1001 events"));
    }
}
