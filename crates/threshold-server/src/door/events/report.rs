//! Reads events that other systems report: core's JSON, or lines of Cloudflare's `firewall_events`, which Logpush uploads.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fmt;
use std::hash::Hash as _;
use std::io::{BufRead as _, BufReader, Read};

use flate2::read::MultiGzDecoder;
use http::StatusCode;
use serde::Deserialize;
use serde::de::{Deserializer, SeqAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use siphasher::sip128::{Hasher128 as _, SipHasher13};
use threshold_core::event::{Event, EventId, MAX_BATCH};
use threshold_core::key::{is_redacted, read_name};
use threshold_core::path::normalize_method;
use threshold_core::policy::{Layer, Policy};
use threshold_core::text::printable;
use threshold_core::{Facts, Timestamp};

use crate::door::ApiError;
use crate::door::client_memory::{ClientMemory, MemoryPermit};
use crate::log::LogSampler;
use crate::signals::MAX_REPORT;

/// The largest body, whatever `--max-body` is: Logpush uploads up to 5 MB by default, before compression.
pub(super) const MAX_BODY: usize = 8 << 20;
/// The most bytes of lines.
const MAX_LINES: u64 = 64 << 20;
/// The most lines. Logpush uploads up to 100,000 by default. The ids of as many are known.
const MAX_LINE_COUNT: usize = MAX_REPORT;
/// The most bytes of a batch. An event has about a kilobyte, and at most some more.
const MAX_BATCH_BYTES: u64 = 8 << 20;
const MAX_LINE: usize = 64 << 10;
/// The most bytes of lines whose events wait to be taken: a whole report would take hundreds of megabytes.
const MAX_TAKEN: usize = 1 << 20;
/// The most lines whose faults are told.
const MAX_FAULTS: usize = 10;
/// The most decisions that one event may stand for.
const MAX_COUNT: u64 = 1_000_000_000;
/// The most bodies that are read at once, and how long others wait.
const TURNS: usize = 2;
const BUSY: &str = "too many events are being reported; try again";

/// What a report has told.
#[derive(Debug, Default)]
pub(super) struct Reported {
    /// Those that were not taken before.
    pub(super) events: Vec<Event>,
    /// The number of lines that stopped nobody.
    pub(super) ignored: usize,
    /// The number of lines that cannot be read, and what is wrong with the first of them.
    pub(super) refused: usize,
    pub(super) faults: Vec<ApiError>,
}

/// A line of `firewall_events`. A job chooses which fields it sends.
#[derive(Debug)]
struct FirewallEvent<'a> {
    action: &'a str,
    /// In milliseconds.
    at: u64,
    client_ip: Option<&'a str>,
    method: Option<&'a str>,
    path: Option<&'a str>,
    host: Option<&'a str>,
    description: Option<&'a str>,
    rule_id: Option<&'a str>,
}

/// A field, and what is wrong with it.
type FieldError = (String, String);

/// Reads a body. `named` gets each event before its names are hidden, and `take` takes events from the list before it grows large.
/// Nothing is taken of a body that is refused.
pub(super) fn read(
    body: &[u8],
    policy: &Policy,
    now: Timestamp,
    named: impl Fn(&Event),
    mut take: impl FnMut(&mut Vec<Event>),
) -> Result<Reported, ApiError> {
    let mut text = decoded(body);
    let first = loop {
        let buffer = text.fill_buf().map_err(|error| unreadable(&error))?;
        let blank = buffer.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        let (is_end, first) = (buffer.is_empty(), buffer.get(blank).copied());
        text.consume(blank);
        if is_end || first.is_some() {
            break first;
        }
    };
    let finish = |event: &mut Event| {
        // A clock that goes ahead must not keep an event for longer than others.
        event.at = event.at.min(now);
        named(event);
        hide_names(event, policy);
    };
    match first {
        None => Err(ApiError::new(StatusCode::BAD_REQUEST, "bad_request", "the body has no events")),
        Some(b'[') => {
            let mut reported = read_batch(text, policy)?;
            reported.events.iter_mut().for_each(finish);
            Ok(reported)
        }
        Some(_) => {
            check_lines(decoded(body))?;
            read_lines(text, policy, &finish, &mut take)
        }
    }
}

fn decoded(body: &[u8]) -> BufReader<std::io::Take<Box<dyn Read + '_>>> {
    // By its first bytes: Logpush compresses its test upload too.
    let is_compressed = body.starts_with(&[0x1f, 0x8b]);
    let text: Box<dyn Read + '_> = if is_compressed { Box::new(MultiGzDecoder::new(body)) } else { Box::new(body) };
    BufReader::new(text.take(MAX_LINES))
}

/// Fails if there are too many lines, or a damaged one, before the first of them is counted.
fn check_lines(mut text: impl std::io::BufRead) -> Result<(), ApiError> {
    let mut lines = 0_usize;
    loop {
        let buffer = text.fill_buf().map_err(|error| unreadable(&error))?;
        if buffer.is_empty() {
            return Ok(());
        }
        for byte in buffer {
            lines = lines.saturating_add(usize::from(*byte == b'\n'));
            if lines >= MAX_LINE_COUNT && !byte.is_ascii_whitespace() {
                return Err(too_large(format!("a report has at most {MAX_LINE_COUNT} lines")));
            }
        }
        let length = buffer.len();
        text.consume(length);
    }
}

fn read_batch(text: impl Read, policy: &Policy) -> Result<Reported, ApiError> {
    let mut batch = String::new();
    text.take(MAX_BATCH_BYTES.saturating_add(1)).read_to_string(&mut batch).map_err(|error| unreadable(&error))?;
    if batch.len() as u64 > MAX_BATCH_BYTES {
        return Err(too_large(format!("a batch has at most {MAX_BATCH_BYTES} bytes")));
    }
    // Each item stays text until it is read: a small body of many numbers would take many times its size as JSON values.
    let Items(items) =
        serde_json::from_str(&batch).map_err(|error| wrong("", format!("is no batch of events: {error}")))?;
    let read = |(place, item): (usize, &RawValue)| {
        read_item(item.get(), policy).map_err(|(field, message)| wrong(&field, message).at(Some(place)))
    };
    let events = items.into_iter().enumerate().map(read).collect::<Result<_, _>>()?;
    Ok(Reported { events, ..Reported::default() })
}

fn read_item(text: &str, policy: &Policy) -> Result<Event, FieldError> {
    if text.len() >= MAX_LINE {
        return Err((String::new(), format!("an event has fewer than {MAX_LINE} bytes")));
    }
    let mut event = Event::from_json(text).map_err(|error| (error.field.into_string(), error.message.into_string()))?;
    if event.count > MAX_COUNT {
        return Err(("count".to_owned(), too_many()));
    }
    // As own events have it, or nobody would find it by its address.
    if let Some(ip) = event.ip.as_deref().filter(|ip| !is_redacted(ip)) {
        let address = policy.ban_target(Layer::Edge, ip).map_err(|_| {
            ("ip".to_owned(), format!("\"{}\" is not an address, a block of addresses or a digest", printable(ip)))
        })?;
        event.ip = Some(address.key().into());
    }
    // These are texts and not names, by which callers are found.
    event.endpoint = event.endpoint.map(|endpoint| policy.recorded_endpoint(&endpoint).into());
    for text in [&mut event.rule, &mut event.endpoint] {
        *text = text.take().map(|text| bounded(&printable(&text), policy));
    }
    Ok(event)
}

/// The items of a batch, as text.
struct Items<'a>(Vec<&'a RawValue>);

impl<'de> Deserialize<'de> for Items<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(ItemsVisitor)
    }
}

struct ItemsVisitor;

impl<'de> Visitor<'de> for ItemsVisitor {
    type Value = Items<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of events")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Items<'de>, A::Error> {
        let mut read = Vec::new();
        while let Some(item) = items.next_element()? {
            if read.len() >= MAX_BATCH {
                return Err(serde::de::Error::custom(format_args!("{MAX_BATCH} events are the most")));
            }
            read.push(item);
        }
        Ok(Items(read))
    }
}

fn read_lines(
    mut text: impl std::io::BufRead,
    policy: &Policy,
    finish: &impl Fn(&mut Event),
    take: &mut impl FnMut(&mut Vec<Event>),
) -> Result<Reported, ApiError> {
    let mut reported = Reported::default();
    let (mut is_any_good, mut bytes) = (false, 0_usize);
    let mut seen = HashMap::new();
    let mut line = Vec::new();
    for number in 1_usize.. {
        line.clear();
        let length = text.by_ref().take(MAX_LINE as u64).read_until(b'\n', &mut line);
        if length.map_err(|error| unreadable(&error))? == 0 {
            break;
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        let read = if line.len() >= MAX_LINE {
            skip_line(&mut text).map_err(|error| unreadable(&error))?;
            Err((String::new(), format!("it has {MAX_LINE} bytes or more")))
        } else {
            let read = std::str::from_utf8(&line).map_err(|_| (String::new(), "it is not UTF-8".to_owned()));
            read.map(str::trim).and_then(|line| Ok((line, read_line(line, policy)?)))
        };
        match read {
            Ok((line, Some(mut event))) => {
                if event.id == EventId::new([0; 16]) {
                    event.id = line_id(line, &mut seen);
                }
                finish(&mut event);
                reported.events.push(event);
                (is_any_good, bytes) = (true, bytes.saturating_add(line.len()));
                if bytes >= MAX_TAKEN {
                    take(&mut reported.events);
                    bytes = 0;
                }
            }
            Ok((_, None)) => {
                is_any_good = true;
                reported.ignored = reported.ignored.saturating_add(1);
            }
            Err((field, message)) => {
                reported.refused = reported.refused.saturating_add(1);
                if reported.faults.len() < MAX_FAULTS {
                    reported.faults.push(wrong(&field, format!("line {number}: {message}")));
                }
            }
        }
    }
    // Logpush sends an upload that is refused again and again, with its good lines. So it is refused only if it has none.
    match reported.faults.first() {
        Some(fault) if !is_any_good => Err(fault.clone()),
        _ => Ok(reported),
    }
}

/// Reads the rest of a line that is too long, in parts.
fn skip_line(text: &mut impl std::io::BufRead) -> std::io::Result<()> {
    let mut rest = Vec::new();
    loop {
        rest.clear();
        let length = text.by_ref().take(MAX_LINE as u64).read_until(b'\n', &mut rest)?;
        if length == 0 || rest.ends_with(b"\n") {
            return Ok(());
        }
    }
}

/// Reads one line. `None` if it stopped nobody.
fn read_line(line: &str, policy: &Policy) -> Result<Option<Event>, FieldError> {
    let invalid = |error: serde_json::Error| (String::new(), format!("no JSON: {}", without_place(&error)));
    let value: Value = serde_json::from_str(line).map_err(invalid)?;
    let Some(fields) = value.as_object() else { return read_item(line, policy).map(Some) };
    // What Logpush uploads when a job is created, to see whether its destination answers.
    if fields.keys().eq(["content"]) {
        return Ok(None);
    }
    // Of a job that lacks one of the two, the other one says whose line it is.
    if fields.contains_key("Action") || fields.contains_key("Datetime") {
        return FirewallEvent::read(fields)?.to_event(policy);
    }
    read_item(line, policy).map(Some)
}

/// Returns what is wrong with the JSON of a line. serde counts each line as the first, because it is read by itself.
fn without_place(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let what = text.split(" at line ").next().unwrap_or_default();
    format!("{what} at column {}", error.column())
}

/// Returns the id of a line that has none. A repeated upload has the same ids; equal lines of one upload are told apart.
fn line_id(line: &str, seen: &mut HashMap<u128, u32>) -> EventId {
    let digest = |repeat: u32| {
        let mut hasher = SipHasher13::new();
        (line, repeat).hash(&mut hasher);
        hasher.finish128().as_u128()
    };
    let repeat = seen.entry(digest(0)).or_insert(0);
    let id = EventId::new(digest(*repeat).to_be_bytes());
    *repeat = repeat.saturating_add(1);
    id
}

impl<'a> FirewallEvent<'a> {
    fn read(fields: &'a Map<String, Value>) -> Result<Self, FieldError> {
        let text = |name: &str| match fields.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.as_str())),
            Some(_) => Err((name.to_owned(), format!("{name} must be a string"))),
        };
        let missing =
            |name: &str| (name.to_owned(), format!("{name} is missing: add it to the field_names of the job"));
        let datetime = fields.get("Datetime").ok_or_else(|| missing("Datetime"))?;
        let wrong = || {
            let message =
                "Datetime must be a time in RFC 3339, or in whole seconds, milliseconds or nanoseconds since 1970";
            ("Datetime".to_owned(), message.to_owned())
        };
        Ok(Self {
            action: text("Action")?.ok_or_else(|| missing("Action"))?,
            at: millis(datetime).ok_or_else(wrong)?,
            client_ip: text("ClientIP")?,
            method: text("ClientRequestMethod")?,
            path: text("ClientRequestPath")?,
            host: text("ClientRequestHost")?,
            description: text("Description")?,
            rule_id: text("RuleID")?,
        })
    }

    /// Returns the event of a request that was stopped. Its id is all zeros.
    fn to_event(&self, policy: &Policy) -> Result<Option<Event>, FieldError> {
        // A challenge stops a request until it is solved, which is another event.
        let actions = ["block", "drop", "connectionclose", "challenge", "jschallenge", "managedchallenge"];
        if !actions.iter().any(|action| self.action.eq_ignore_ascii_case(action)) {
            return Ok(None);
        }
        let (id, at) = (EventId::new([0; 16]), self.at);
        let minimal = format!(r#"{{"id":"{id}","at":{at},"blocked":true,"layer":"edge"}}"#);
        let mut event =
            Event::from_json(&minimal).map_err(|error| ("Datetime".to_owned(), error.message.into_string()))?;
        let address = self.client_ip.and_then(|ip| policy.ban_target(Layer::Edge, ip).ok());
        event.ip = address.map(|address| address.key().into());
        let rule = self.description.filter(|text| !text.is_empty()).or(self.rule_id);
        event.rule = rule.filter(|rule| !rule.is_empty()).map(|rule| bounded(&printable(rule), policy));
        let facts = Facts { path: self.path, host: self.host, ..Facts::default() };
        // Never the path itself, which may hold secrets.
        event.endpoint = policy.path_pattern(None, &facts).map(|pattern| {
            let method = self.method.map_or("*".into(), normalize_method);
            bounded(&format!("{method}:{pattern}"), policy)
        });
        Ok(Some(event))
    }
}

/// Reads a time as `timestamp_format` of a job writes it: in RFC 3339, or as a number since 1970. The unit is known by the number
/// of digits, which is the same from 2001 to 2286; any other number is no time at which a request was blocked.
fn millis(datetime: &Value) -> Option<u64> {
    let number = match datetime {
        Value::String(text) => match text.parse() {
            Ok(number) => number,
            Err(_) => return u64::try_from(text.parse::<jiff::Timestamp>().ok()?.as_millisecond()).ok(),
        },
        other => other.as_u64()?,
    };
    match number.checked_ilog10()? {
        9 => number.checked_mul(1_000),
        12 => Some(number),
        15 => number.checked_div(1_000),
        18 => number.checked_div(1_000_000),
        _ => None,
    }
}

/// Hides the names of an event as the policy hides those of its own.
fn hide_names(event: &mut Event, policy: &Policy) {
    let identity = policy.identity();
    let hides = !identity.log_identifiers;
    hide(&mut event.ip, hides, policy);
    // A name with characters that a terminal interprets is told by its digest, by which it is found.
    let is_plain = |name: &Option<Box<str>>| name.as_deref().is_none_or(|name| printable(name) == name);
    let (hides_user, hides_tenant) = (!is_plain(&event.user_id), !is_plain(&event.tenant));
    hide(&mut event.user_id, hides || identity.secret_user || hides_user, policy);
    hide(&mut event.tenant, identity.secret_tenant || hides_tenant, policy);
    if let Some(strike) = event.strike.as_mut() {
        strike.subject = bounded(&printable(&strike.subject), policy);
    }
    if let Some(strike) = event.strike.as_mut().filter(|_| hides || identity.hides_users()) {
        let parts = strike.subject.split(',').map(|part| match part.split_once('=') {
            Some((per, value)) if !is_redacted(value) && (per != "tenant" || identity.secret_tenant) => {
                format!("{per}={}", policy.key().redact(read_name(value)))
            }
            _ => part.to_owned(),
        });
        strike.subject = bounded(&parts.collect::<Vec<_>>().join(","), policy);
    }
}

fn hide(name: &mut Option<Box<str>>, hides: bool, policy: &Policy) {
    if let Some(shown) = name.as_deref().filter(|name| hides && !is_redacted(name)) {
        *name = Some(policy.key().redact(read_name(shown)).into());
    }
}

fn bounded(text: &str, policy: &Policy) -> Box<str> {
    if text.len() <= threshold_core::event::MAX_TEXT { text.into() } else { policy.key().redact(text).into() }
}

/// 400, about a field if one is named.
fn wrong(field: &str, message: String) -> ApiError {
    let field = Some(field.to_owned()).filter(|field| !field.is_empty());
    ApiError::new(StatusCode::BAD_REQUEST, "bad_request", message).about(field)
}

fn too_many() -> String {
    format!("an event stands for at most {MAX_COUNT} decisions")
}

fn too_large(message: String) -> ApiError {
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message)
}

fn unreadable(error: &std::io::Error) -> ApiError {
    ApiError::new(StatusCode::BAD_REQUEST, "bad_request", format!("the body cannot be read: {error}"))
}

/// The turns of reports, and the log of lines that were refused.
#[derive(Debug)]
pub(in crate::door) struct EventReports {
    turns: ClientMemory,
    refusals: LogSampler,
}

impl Default for EventReports {
    fn default() -> Self {
        Self { turns: ClientMemory::new(TURNS * MAX_BODY, BUSY), refusals: LogSampler::default() }
    }
}

impl EventReports {
    /// Waits until a body may be read.
    pub(super) async fn turn(&self) -> Result<MemoryPermit, ApiError> {
        self.turns.acquire(MAX_BODY).await
    }

    /// Logs that lines of a report were refused while others were counted: Logpush tells nobody what it is answered with 200.
    pub(super) fn log_refusals(&self, reported: &Reported, now: Timestamp) {
        let Some(first) = reported.faults.first() else { return };
        if let Some(left_out) = self.refusals.sample(now) {
            let (lines, reason) = (reported.refused, first.body.message());
            tracing::warn!(lines, reason, left_out, "lines of a report refused");
        }
    }
}
