//! `threshold bans` and `threshold subject`: what operators do from a terminal, by the server's own API.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde_json::{Value, json};
use threshold_core::Standing;
use threshold_core::policy::Ban;
use threshold_limiter::journal::{Journal, Kind, Row};
use threshold_limiter::{Clock as _, SystemClock};

use crate::Report;
use crate::cli::{BansArgs, BansCommand, ServerArgs, SubjectArgs};

/// How long the server may take. A change waits for the disk for five seconds.
const PATIENCE: Duration = Duration::from_secs(10);
/// How many bans are asked for at once.
const PAGE: usize = 10_000;

pub(crate) fn bans(args: &BansArgs) -> anyhow::Result<Report> {
    let text = match &args.command {
        BansCommand::List { json, db } => {
            let bans = match all_bans(&args.server) {
                Err(error) if error.is::<Unreachable>() && db.exists() => {
                    eprintln!("threshold: {error}; this is what {} holds", db.display());
                    bans_in_file(db)?
                }
                other => other?,
            };
            if *json { format!("{:#}\n", Value::Array(bans)) } else { table(&bans) }
        }
        BansCommand::Add { layer, key, reason, length } => {
            let seconds = length.map(|length| length.secs_ceil());
            let body = json!({"layer": layer, "key": key, "reason": reason, "durationSec": seconds});
            let ban = Api::new(&args.server).call("POST", "/v1/bans", Some(&body))?;
            table(&[ban])
        }
        BansCommand::Lift { id, reason } => {
            let path = format!("/v1/bans/{}{}", encoded(id), because(reason.as_deref()));
            Api::new(&args.server).call("DELETE", &path, None)?;
            "lifted\n".to_owned()
        }
    };
    Ok(Report { text, code: 0 })
}

pub(crate) fn subject(args: &SubjectArgs) -> anyhow::Result<Report> {
    let path = format!("/v1/subjects/{}/{}", encoded(&args.layer), encoded(&args.key));
    let api = Api::new(&args.server);
    if args.forgive {
        api.call("DELETE", &format!("{path}{}", because(args.reason.as_deref())), None)?;
        return Ok(Report { text: "forgiven\n".to_owned(), code: 0 });
    }
    let subject = api.call("GET", &path, None)?;
    if args.json {
        return Ok(Report { text: format!("{subject:#}\n"), code: 0 });
    }
    let mut text = String::new();
    for (name, value) in subject.as_object().into_iter().flatten() {
        let value = if name.ends_with("Until") { moment(value) } else { shown(value) };
        let _ = writeln!(text, "{name:<14} {value}");
    }
    Ok(Report { text, code: 0 })
}

/// The server of these arguments, and the token to show it.
struct Api {
    agent: ureq::Agent,
    server: String,
    token: Option<String>,
}

/// Nobody answers at that address.
#[derive(Debug)]
struct Unreachable(String);

impl std::fmt::Display for Unreachable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "no server answers at {}", self.0)
    }
}

impl std::error::Error for Unreachable {}

impl Api {
    fn new(args: &ServerArgs) -> Self {
        let variable = |name: &str| std::env::var(name).ok().filter(|text| !text.trim().is_empty());
        let server = args.server.clone().or_else(|| variable("THRESHOLD_SERVER"));
        let tokens = variable("THRESHOLD_ADMIN_TOKEN").or_else(|| variable("THRESHOLD_READ_TOKEN"));
        let first = |tokens: String| tokens.split([',', ' ']).find(|token| !token.is_empty()).map(str::to_owned);
        let config = ureq::Agent::config_builder().http_status_as_error(false).timeout_global(Some(PATIENCE));
        Self {
            agent: config.build().into(),
            server: server.unwrap_or_else(|| "http://127.0.0.1:8080".to_owned()).trim_end_matches('/').to_owned(),
            token: tokens.and_then(first),
        }
    }

    fn call(&self, method: &str, path: &str, body: Option<&Value>) -> anyhow::Result<Value> {
        let mut request = http::Request::builder().method(method).uri(format!("{}{path}", self.server));
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let body = body.map(Value::to_string).unwrap_or_default();
        let request = request.header("content-type", "application/json").body(body)?;
        let mut response = self.agent.run(request).map_err(|error| match error {
            ureq::Error::ConnectionFailed | ureq::Error::Io(_) | ureq::Error::HostNotFound => {
                anyhow::Error::new(Unreachable(self.server.clone()))
            }
            other => anyhow::Error::new(other).context(format!("cannot ask {}", self.server)),
        })?;
        let text = response.body_mut().with_config().limit(64 << 20).read_to_string()?;
        let answer: Value = serde_json::from_str(&text).context("the server's answer is no JSON")?;
        if !response.status().is_success() {
            let message = answer.get("message").and_then(Value::as_str).unwrap_or("the server refused");
            bail!("{} ({})", message.escape_debug(), response.status());
        }
        Ok(answer)
    }
}

fn all_bans(args: &ServerArgs) -> anyhow::Result<Vec<Value>> {
    let api = Api::new(args);
    let mut bans = Vec::new();
    let mut after = String::new();
    loop {
        let page = api.call("GET", &format!("/v1/bans?limit={PAGE}{after}"), None)?;
        let Value::Array(page) = page else { bail!("the server's answer is no list") };
        let last = page.last().and_then(|ban| ban.get("id")?.as_str()).map(str::to_owned);
        let whole = page.len() == PAGE;
        bans.extend(page);
        match last {
            Some(last) if whole => after = format!("&after={last}"),
            _ => return Ok(bans),
        }
    }
}

/// The bans that a journal holds, where no server runs.
fn bans_in_file(path: &Path) -> anyhow::Result<Vec<Value>> {
    let kept = Journal::read(path)?;
    if let Some(damage) = &kept.damage {
        eprintln!("threshold: {damage}");
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

/// One line for each ban, under a headline.
fn table(bans: &[Value]) -> String {
    let mut text = format!("{:<32}  {:<6}  {:<20}  {:<24}  {:<20}  REASON\n", "ID", "LAYER", "UNTIL", "KEY", "BY");
    for ban in bans {
        let field = |name: &str| ban.get(name).unwrap_or(&Value::Null);
        let [id, layer, key, by, reason] = ["id", "layer", "key", "by", "reason"].map(|name| shown(field(name)));
        let until = field("until");
        let until = if until.is_null() { "for good".to_owned() } else { moment(until) };
        let _ = writeln!(text, "{id:<32}  {layer:<6}  {until:<20}  {key:<24}  {by:<20}  {reason}");
    }
    text
}

/// A value as one word: what somebody has called themselves must not move a terminal's cursor.
fn shown(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.escape_debug().to_string(),
        other => other.to_string(),
    }
}

fn moment(value: &Value) -> String {
    let at = value.as_i64().and_then(|seconds| jiff::Timestamp::from_second(seconds).ok());
    at.map_or_else(|| shown(value), |at| at.to_string())
}

fn encoded(text: &str) -> String {
    form_urlencoded::byte_serialize(text.as_bytes()).collect::<String>().replace('+', "%20")
}

fn because(reason: Option<&str>) -> String {
    reason.map(|reason| format!("?reason={}", encoded(reason))).unwrap_or_default()
}
