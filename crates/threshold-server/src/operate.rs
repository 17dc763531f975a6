//! `threshold bans`, `threshold subject` and `threshold health`: operators' commands, which call the server's API.

mod api;

use std::fmt::Write as _;
use std::path::Path;

use anyhow::bail;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, PercentEncode, utf8_percent_encode};
use serde_json::{Value, json};
use threshold_core::policy::Ban;
use threshold_core::text::printable;
use threshold_core::{Span, Standing};
use threshold_limiter::journal::{Journal, Kind, Row};
use threshold_limiter::{Clock as _, SystemClock};

use crate::Report;
use crate::cli::{BansArgs, BansCommand, HealthArgs, ServerArgs, SubjectArgs};
use api::{Api, Unreachable};

/// The number of bans in one request: the most that the server answers.
const PAGE: usize = 10_000;
/// Every character but the unreserved ones of RFC 3986.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

pub(crate) fn bans(args: &BansArgs) -> anyhow::Result<Report> {
    let text = match &args.command {
        BansCommand::List { json, db } => {
            let bans = match all_bans(&args.server) {
                Err(error) if error.is::<Unreachable>() && db.exists() => {
                    crate::print_error(&format!("{error}; these are the bans in {}", db.display()));
                    bans_in_file(db)?
                }
                other => other?,
            };
            match bans.as_slice() {
                bans if *json => format!("{:#}\n", Value::from(bans)),
                [] => "there are no bans\n".to_owned(),
                bans => table(bans),
            }
        }
        BansCommand::Add { layer, key, reason, length, json } => {
            let seconds = length.map(Span::secs_ceil);
            let body = json!({"layer": layer, "key": key, "reason": reason, "durationSec": seconds});
            let ban = Api::new(&args.server)?.call("POST", "/v1/bans", Some(&body))?;
            if *json { format!("{ban:#}\n") } else { table(&[ban]) }
        }
        BansCommand::Lift { id, reason } => {
            let path = format!("/v1/bans/{}{}", encoded(id), reason_query(reason.as_deref()));
            Api::new(&args.server)?.call("DELETE", &path, None)?;
            "lifted\n".to_owned()
        }
    };
    Ok(Report { text, code: 0 })
}

/// Asks a server for its health. The exit code is 0 or 1: Docker reserves 2.
pub(crate) fn health(args: &HealthArgs) -> anyhow::Result<Report> {
    let path = if args.ready { "/readyz" } else { "/healthz" };
    let (text, code) = match Api::new(&args.server)?.call("GET", path, None) {
        Ok(answer) => (answer.get("status").and_then(Value::as_str).unwrap_or("ok").to_owned(), 0),
        Err(error) => (format!("{error:#}"), 1),
    };
    Ok(Report { text: format!("{text}\n"), code })
}

pub(crate) fn subject(args: &SubjectArgs) -> anyhow::Result<Report> {
    let path = format!("/v1/subjects/{}/{}", encoded(&args.layer), encoded(&args.key));
    let api = Api::new(&args.server)?;
    if args.forgive {
        api.call("DELETE", &format!("{path}{}", reason_query(args.reason.as_deref())), None)?;
        return Ok(Report { text: "forgiven\n".to_owned(), code: 0 });
    }
    let subject = api.call("GET", &path, None)?;
    if args.json {
        return Ok(Report { text: format!("{subject:#}\n"), code: 0 });
    }
    let mut text = String::new();
    for (name, value) in subject.as_object().into_iter().flatten() {
        let value = match value {
            Value::Object(_) => ban_in_words(value),
            value if name.ends_with("Until") => moment(value),
            value => shown(value),
        };
        let _ = writeln!(text, "{name:<14} {value}");
    }
    Ok(Report { text, code: 0 })
}

fn ban_in_words(ban: &Value) -> String {
    let field = |name: &str| ban.get(name).unwrap_or(&Value::Null);
    let until = field("until");
    let until = if until.is_null() { "for good".to_owned() } else { format!("until {}", moment(until)) };
    format!("{until}, by {}: {} ({})", shown(field("by")), shown(field("reason")), shown(field("id")))
}

fn all_bans(args: &ServerArgs) -> anyhow::Result<Vec<Value>> {
    let api = Api::new(args)?;
    let mut bans = Vec::new();
    let mut after = String::new();
    loop {
        let page = api.call("GET", &format!("/v1/bans?limit={PAGE}{after}"), None)?;
        let Value::Array(page) = page else { bail!("the server's answer is not a list") };
        let last = page.last().and_then(|ban| ban.get("id")?.as_str()).map(str::to_owned);
        let whole = page.len() == PAGE;
        bans.extend(page);
        match last {
            Some(last) if whole => after = format!("&after={last}"),
            _ => return Ok(bans),
        }
    }
}

/// Reads the bans from a journal, for when no server runs.
fn bans_in_file(path: &Path) -> anyhow::Result<Vec<Value>> {
    let kept = Journal::read(path)?;
    if let Some(damage) = &kept.damage {
        crate::print_error(&damage.to_string());
    }
    let now = SystemClock::new().now();
    let read = |row: &Row| Ban::from_bytes(row.value.as_deref()?).ok();
    let mut bans = Vec::new();
    for row in &kept.rows {
        let ban = match row.kind {
            Kind::Ban => read(row),
            Kind::Standing => {
                let standing = row.value.as_deref().and_then(|bytes| Standing::from_bytes(bytes).ok());
                let banned = standing.and_then(|standing| standing.banned_until()).filter(|until| *until > now);
                let named = kept.rows.iter().find(|other| other.kind == Kind::Named && other.key == row.key);
                banned.and_then(|until| Some(Ban { until, ..read(named?)? }))
            }
            _ => None,
        };
        if let Some((ban, id)) = ban.filter(|ban| ban.until > now).zip(row.digest()) {
            let until = (ban.until < threshold_core::Timestamp::MAX).then(|| ban.until.secs_ceil());
            bans.push(json!({
                "id": format!("{:032x}", id.to_u128()), "layer": ban.whom.layer().name(), "key": ban.whom.key(),
                "reason": ban.reason, "by": ban.by, "from": ban.from.secs_ceil(), "until": until,
            }));
        }
    }
    Ok(bans)
}

/// Formats bans as a table. The reason is the last column, because it may be long.
fn table(bans: &[Value]) -> String {
    const HEADLINE: [&str; 6] = ["ID", "LAYER", "UNTIL", "KEY", "BY", "REASON"];
    let line = |ban: &Value| {
        let field = |name: &str| ban.get(name).unwrap_or(&Value::Null);
        let until = field("until");
        let until = if until.is_null() { "for good".to_owned() } else { moment(until) };
        let [id, layer, key, by, reason] = ["id", "layer", "key", "by", "reason"].map(|name| shown(field(name)));
        [id, layer, until, key, by, reason]
    };
    let lines: Vec<[String; 6]> = std::iter::once(HEADLINE.map(str::to_owned)).chain(bans.iter().map(line)).collect();
    let mut text = String::new();
    for line in &lines {
        for (column, cell) in line.iter().take(5).enumerate() {
            let lengths = lines.iter().filter_map(|other| other.get(column)).map(|other| other.chars().count());
            // A single long key must not push the other columns off the screen.
            let width = lengths.max().unwrap_or(0).min(40);
            let _ = write!(text, "{cell:<width$}  ");
        }
        let [.., reason] = line;
        let _ = writeln!(text, "{reason}");
    }
    text
}

/// Formats a value. Control characters are escaped: a client chooses its name, and could send terminal escape sequences.
fn shown(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => printable(text).into_owned(),
        other => other.to_string(),
    }
}

fn moment(value: &Value) -> String {
    let at = value.as_i64().and_then(|seconds| jiff::Timestamp::from_second(seconds).ok());
    at.map_or_else(|| shown(value), |at| at.to_string())
}

/// Percent-encodes a segment of a path, or a value of a query.
fn encoded(text: &str) -> PercentEncode<'_> {
    utf8_percent_encode(text, RESERVED)
}

fn reason_query(reason: Option<&str>) -> String {
    reason.map(|reason| format!("?reason={}", encoded(reason))).unwrap_or_default()
}
