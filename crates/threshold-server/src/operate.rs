//! `threshold bans`, `subject`, `locks`, `alerts`, `audit`, `why` and `health`: operators' commands, which call the server's API.

mod alerts;
mod api;
mod args;
pub(crate) mod doctor;
mod export;
mod import;
mod subject;
pub(crate) mod tail;
pub(crate) mod top;
mod why;

use std::fmt::Write as _;
use std::io::Read as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, PercentEncode, utf8_percent_encode};
use serde_json::{Value, json};
use threshold_core::key::write_name;
use threshold_core::policy::{Ban, UserScope};
use threshold_core::text::printable;
use threshold_core::{Span, Standing};
use threshold_limiter::journal::{Journal, Kind, Row};
use threshold_limiter::{Clock as _, SystemClock};

use crate::cli::{BansArgs, BansCommand, HealthArgs, ServerArgs, SubjectArgs};
pub(crate) use alerts::alerts;
use api::Unreachable;
#[cfg(feature = "otlp")]
pub(crate) use api::agent as api_agent;
pub(crate) use api::{Api, system_tls};
pub(crate) use args::{
    AlertsArgs, AlertsCommand, AuditArgs, DoctorArgs, ExportBansArgs, ImportArgs, LocksArgs, LocksCommand, TailArgs,
    TopArgs, WhyArgs,
};
use import::BanFile;
use threshold_rehearsal::Report;

/// The number of bans in one request: the most that the server answers.
const PAGE: usize = 10_000;
/// How long an import may take: the server waits a minute for the disk.
const IMPORT_TIMEOUT: Duration = Duration::from_secs(90);
/// The largest list that is read: more than half a million bans take.
const MAX_LIST: u64 = 256 << 20;
/// Every character but the unreserved ones of RFC 3986.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

pub(crate) fn bans(args: &BansArgs) -> anyhow::Result<Report> {
    let text = match &args.command {
        BansCommand::List { json, db } => {
            let bans = bans_of(&args.server, db)?;
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
        BansCommand::Import(import) => import_bans(&args.server, import)?,
        BansCommand::Export(export) => {
            let bans = bans_of(&args.server, &export.db)?;
            let now = SystemClock::new().now().secs_ceil();
            let (text, others) = export::write(&bans, export.format, now);
            if others > 0 {
                crate::print_error(&format!(
                    "{others} bans on users and tenants are left out: a firewall knows addresses"
                ));
            }
            text
        }
        BansCommand::Lift { id: layer, key: Some(key), reason } => {
            let reason = reason.as_ref().map(|reason| format!("&reason={}", encoded(reason))).unwrap_or_default();
            let path = format!("/v1/bans?layer={}&key={}{reason}", encoded(layer), encoded(key));
            let lifted = Api::new(&args.server)?.call("DELETE", &path, None)?;
            match lifted.get("lifted").and_then(Value::as_u64) {
                // One subject may have a ban by an operator, by a ladder and of several sets.
                Some(lifted @ 2..) => format!("lifted {lifted} bans\n"),
                _ => "lifted\n".to_owned(),
            }
        }
        BansCommand::Lift { id, key: None, reason } => {
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
        Ok(answer) => {
            let status = answer.get("status").map_or_else(|| "ok".to_owned(), shown);
            let reason =
                answer.get("reason").filter(|reason| !reason.is_null()).map(|reason| format!(": {}", shown(reason)));
            (format!("{status}{}", reason.unwrap_or_default()), 0)
        }
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
    Ok(Report { text: subject::describe(&subject), code: 0 })
}

/// Explains a past decision. The exit code is 1 if there is no event of it.
pub(crate) fn why(args: &WhyArgs) -> anyhow::Result<Report> {
    let api = Api::new(&args.server)?;
    let answer = api.call("GET", &format!("/v1/events?traceId={}", encoded(&args.trace)), None)?;
    let events = answer.get("events").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let code = u8::from(events.is_empty());
    let text = match events {
        events if args.json => format!("{:#}\n", Value::from(events)),
        [] => why::NOT_FOUND.to_owned(),
        events => {
            let session = api.call("GET", "/v1/session", None)?;
            let is_scoped = session.get("usersOfTenants") == Some(&Value::Bool(true));
            let scope = if is_scoped { UserScope::Tenant } else { UserScope::Global };
            let now = jiff::Timestamp::now();
            events.iter().map(|event| why::describe(event, scope, now)).collect::<Vec<_>>().join("\n")
        }
    };
    Ok(Report { text, code })
}

/// Lists the locked accounts.
pub(crate) fn locks(args: &LocksArgs) -> anyhow::Result<Report> {
    let LocksCommand::List { json } = args.command;
    let locks = all_pages(&Api::new(&args.server)?, "/v1/locks")?;
    let text = match locks.as_slice() {
        locks if json => format!("{:#}\n", Value::from(locks)),
        [] => "no account is locked\n".to_owned(),
        locks => columns(&["DIGEST", "FAILURES", "LOCKED UNTIL"], locks, |lock| {
            let field = |name: &str| lock.get(name).unwrap_or(&Value::Null);
            let until = field("lockedUntil");
            let until = if until.is_null() { "it is lifted or reset".to_owned() } else { moment(until) };
            vec![shown(field("digest")), shown(field("failures")), until]
        }),
    };
    Ok(Report { text, code: 0 })
}

/// Shows the last operators' changes, the newest last.
pub(crate) fn audit(args: &AuditArgs) -> anyhow::Result<Report> {
    let mut lines = match audit_lines(&Api::new(&args.server)?, args) {
        // Only if no server answers. An error of a running server must not be hidden by an old file.
        Err(error) if error.is::<Unreachable>() && args.db.exists() => {
            crate::print_error(&format!("{error}; this is the audit in {}", args.db.display()));
            audit_in_file(args)?
        }
        other => other?,
    };
    // The server sends the newest first. On a terminal the last line is the one that is seen.
    lines.reverse();
    let text = match lines.as_slice() {
        lines if args.json => format!("{:#}\n", Value::from(lines)),
        [] => "there are no changes\n".to_owned(),
        lines => columns(&["ID", "AT", "WHO", "ABOUT", "ACTION", "WHY"], lines, |line| {
            let field = |name: &str| line.get(name).unwrap_or(&Value::Null);
            let [id, who, about, action, why] = ["id", "who", "about", "action", "why"].map(|name| shown(field(name)));
            vec![id, moment(field("at")), who, about, action, why]
        }),
    };
    Ok(Report { text, code: 0 })
}

/// Reads as many lines from a server as are wanted: an answer has room for some of them.
fn audit_lines(api: &Api, args: &AuditArgs) -> anyhow::Result<Vec<Value>> {
    let (mut lines, mut before) = (Vec::new(), args.before);
    let limit = usize::try_from(args.limit)?;
    loop {
        let from = before.map(|before| format!("&before={before}")).unwrap_or_default();
        let path = format!("/v1/audit?limit={}{from}", limit.saturating_sub(lines.len()));
        let Value::Array(page) = api.call("GET", &path, None)? else { bail!("the server's answer is not a list") };
        let last = page.last().and_then(|line| line.get("id")?.as_u64());
        lines.extend(page);
        match last {
            Some(last) if lines.len() < limit && before.is_none_or(|before| last < before) => before = Some(last),
            _ => return Ok(lines),
        }
    }
}

fn audit_in_file(args: &AuditArgs) -> anyhow::Result<Vec<Value>> {
    let limit = usize::try_from(args.limit).unwrap_or(usize::MAX);
    let lines = Journal::read_audit(&args.db, args.before, limit)?;
    let lines = lines.into_iter().map(|(id, line)| {
        let at = line.at.micros().checked_div(1_000_000).unwrap_or(0);
        json!({"id": id, "at": at, "who": line.who, "action": line.action, "about": line.about, "why": line.why})
    });
    Ok(lines.collect())
}

/// Sends a list to the server, as the set of its origin.
fn import_bans(server: &ServerArgs, args: &ImportArgs) -> anyhow::Result<String> {
    let file = BanFile::read(&read_list(&args.file)?)?;
    for (why, count) in &file.left_out {
        crate::print_error(&format!("{count} entries are left out: {why} is not a ban of an address"));
    }
    let bans: Vec<Value> = file.bans.iter().map(import::ListedBan::to_json).collect();
    let mut body = json!({"reason": args.reason.as_ref().unwrap_or(&args.origin), "bans": bans});
    if let Some(fields) = body.as_object_mut() {
        fields.extend(args.length.map(|length| ("durationSec".to_owned(), json!(length.secs_ceil()))));
        fields.extend(args.until.map(|until| ("until".to_owned(), json!(until.as_second()))));
    }
    let path = format!("/v1/bans/sets/{}", encoded(&args.origin));
    let mut set = Api::with_timeout(server, IMPORT_TIMEOUT)?.call("PUT", &path, Some(&body))?;
    if args.json {
        // The server does not know what was left out before.
        let before: usize = file.left_out.values().sum();
        if let Some(left_out) = set.get_mut("leftOut") {
            *left_out = json!(left_out.as_u64().unwrap_or(0).saturating_add(u64::try_from(before)?));
        }
        return Ok(format!("{set:#}\n"));
    }
    let [bans, added, lifted, left_out] =
        ["bans", "added", "lifted", "leftOut"].map(|name| shown(set.get(name).unwrap_or(&Value::Null)));
    let repeated =
        if left_out == "0" { String::new() } else { format!("; {left_out} repeated or ended ones are left out") };
    Ok(format!("{} has {bans} bans: {added} new, {lifted} lifted{repeated}\n", args.origin))
}

fn read_list(path: &Path) -> anyhow::Result<String> {
    let mut text = String::new();
    let read = if path == Path::new("-") {
        std::io::stdin().lock().take(MAX_LIST).read_to_string(&mut text)
    } else {
        let file = std::fs::File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
        file.take(MAX_LIST).read_to_string(&mut text)
    };
    let length = read.with_context(|| format!("cannot read {}", path.display()))?;
    // A list that was cut off would lift the bans of its rest.
    anyhow::ensure!(u64::try_from(length)? < MAX_LIST, "{} is larger than {MAX_LIST} bytes", path.display());
    Ok(text)
}

/// Returns the bans of the server, or those in a journal if no server answers.
fn bans_of(server: &ServerArgs, db: &Path) -> anyhow::Result<Vec<Value>> {
    match all_pages(&Api::new(server)?, "/v1/bans") {
        Err(error) if error.is::<Unreachable>() && db.exists() => {
            let bans = bans_in_file(db)?;
            // With a shared store the journal has none. An empty list would unban everyone at a firewall that imports it.
            let db = db.display();
            ensure!(!bans.is_empty(), "{error}, and {db} has no bans: a server with --store keeps them in the store");
            crate::print_error(&format!("{error}; these are the bans in {db}"));
            Ok(bans)
        }
        other => other,
    }
}

/// Reads all pages of a list that is ordered by ids.
fn all_pages(api: &Api, path: &str) -> anyhow::Result<Vec<Value>> {
    let mut items = Vec::new();
    let mut after: Option<String> = None;
    loop {
        let from = after.as_ref().map(|after| format!("&after={}", encoded(after))).unwrap_or_default();
        let page = api.call("GET", &format!("{path}?limit={PAGE}{from}"), None)?;
        let Value::Array(page) = page else { bail!("the server's answer is not a list") };
        let last = page.last().and_then(|item| item.get("id")?.as_str()).map(str::to_owned);
        items.extend(page);
        // An answer has room for some of them, so only an empty page is the end. One that goes back would never end.
        match last {
            Some(last) if after.as_ref().is_none_or(|after| last > *after) => after = Some(last),
            _ => return Ok(items),
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
                // A ladder's ban is stored as a standing, which has no name. A row of its own has the name under the
                // same key.
                let named = kept.rows.iter().find(|other| other.kind == Kind::Named && other.key == row.key);
                banned.and_then(|until| Some(Ban { until, ..read(named?)? }))
            }
            _ => None,
        };
        // The file keeps ended bans until a running server sweeps them.
        if let Some((ban, id)) = ban.filter(|ban| ban.until > now).zip(row.digest()) {
            let until = (ban.until < threshold_core::Timestamp::MAX).then(|| ban.until.secs_ceil());
            let key = ban.whom.key();
            // A ladder's ban of a secret name has its digest, and a ban by an operator the name itself.
            let key = if &*ban.by == "ladder" { key } else { write_name(&key).into_owned() };
            bans.push(json!({
                "id": format!("{:032x}", id.to_u128()), "layer": ban.whom.layer().name(), "key": key,
                "reason": ban.reason, "by": ban.by, "from": ban.from.secs_ceil(), "until": until,
            }));
        }
    }
    Ok(bans)
}

/// Formats bans as a table. The reason is the last column, because it may be long.
fn table(bans: &[Value]) -> String {
    columns(&["ID", "LAYER", "UNTIL", "KEY", "BY", "REASON"], bans, |ban| {
        let field = |name: &str| ban.get(name).unwrap_or(&Value::Null);
        let until = field("until");
        let until = if until.is_null() { "for good".to_owned() } else { moment(until) };
        let [id, layer, key, by, reason] = ["id", "layer", "key", "by", "reason"].map(|name| shown(field(name)));
        vec![id, layer, until, key, by, reason]
    })
}

/// Formats items as a table, with a column for each name. The last column may be long, and is not padded.
fn columns(names: &[&str], items: &[Value], row: impl Fn(&Value) -> Vec<String>) -> String {
    let head: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(items.iter().map(row)).collect();
    let length = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    // A single long key must not push the other columns off the screen.
    let widths: Vec<usize> = (0..names.len()).map(|column| length(column).unwrap_or(0).min(40)).collect();
    let mut text = String::new();
    for row in &rows {
        let Some((last, cells)) = row.split_last() else { continue };
        for (cell, width) in cells.iter().zip(&widths) {
            let _ = write!(text, "{cell:<width$}  ");
        }
        let _ = writeln!(text, "{last}");
    }
    text
}

/// Formats a value on one line. Every text of a server or a journal is printed through this: a client chooses its name, and could
/// send terminal escape sequences, or end a line and begin one that looks like ours.
pub(crate) fn shown(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => printable(text).into_owned(),
        other => other.to_string(),
    }
}

/// Formats a time in Unix seconds.
pub(crate) fn moment(value: &Value) -> String {
    let at = value.as_i64().and_then(|seconds| jiff::Timestamp::from_second(seconds).ok());
    at.map_or_else(|| shown(value), |at| at.to_string())
}

/// Formats a time in Unix milliseconds.
fn millis(value: &Value) -> String {
    let at = value.as_i64().and_then(|millis| jiff::Timestamp::from_millisecond(millis).ok());
    at.map_or_else(|| shown(value), |at| at.to_string())
}

/// Percent-encodes a segment of a path, or a value of a query.
fn encoded(text: &str) -> PercentEncode<'_> {
    utf8_percent_encode(text, RESERVED)
}

fn reason_query(reason: Option<&str>) -> String {
    reason.map(|reason| format!("?reason={}", encoded(reason))).unwrap_or_default()
}
