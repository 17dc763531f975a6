//! `/v1/doctor`: what an operator should change about a server that runs.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::Response;
use schemars::JsonSchema;
use serde::Serialize;
use sha2::{Digest as _, Sha256};
use threshold_core::Policy;
use threshold_core::path::normalize_method;
use threshold_core::policy::Layer;
use threshold_limiter::{Clock as _, SystemClock};

use super::admin::{Reader, operator_call};
use super::openapi::{Operation, Schemas};
use super::routes::{Route, get};
use super::{ApiError, App};
use crate::signals::recent_requests::Recording;

/// A table counts as nearly full from this share on.
const NEARLY_FULL_PERCENT: usize = 80;
/// Free space on the journal's disk below which it counts as nearly full, in bytes.
const LITTLE_SPACE: u64 = 256 << 20;
/// Parts of a site with fewer requests are not listed.
const FEWEST_REQUESTS: u64 = 10;
/// The most endpoints without a rule that are listed.
const MAX_ENDPOINTS: usize = 5;

/// What was found.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "Diagnosis")]
struct DiagnosisBody {
    /// The time of the server, in milliseconds: a client compares it with its own.
    now: u64,
    /// The version of the server.
    version: &'static str,
    /// The id of the secret that keys are made with. Nodes on one store have the same.
    secret: String,
    /// Whether the store is one that other nodes share.
    is_shared: bool,
    /// A digest of the policy's text.
    policy: String,
    /// The names of all checks, in order. Those without a finding have passed.
    checks: Vec<&'static str>,
    findings: Vec<Finding>,
}

/// Something to change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(rename = "DoctorFinding")]
pub(super) struct Finding {
    check: &'static str,
    /// `error` if requests are decided wrongly or state is lost, `warning` if that is near, `note` if it is long over.
    level: &'static str,
    /// What is wrong.
    message: String,
    /// What to do.
    advice: String,
}

impl Finding {
    fn error(check: &'static str, message: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { check, level: "error", message: message.into(), advice: advice.into() }
    }

    fn warning(check: &'static str, message: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { check, level: "warning", message: message.into(), advice: advice.into() }
    }
}

/// An error of the store's calls is a finding for so long, and a note after that.
const ERROR_SHOWN: Duration = Duration::from_secs(3_600);

pub(super) fn routes() -> Vec<Route> {
    vec![get("/v1/doctor", show, describe)]
}

fn describe(schemas: &mut Schemas) -> Operation {
    let summary = "Say what should be changed about this server: proxies, store, disk, tables, routes without rules";
    operator_call("doctor", summary, &schemas.of::<DiagnosisBody>())
}

/// The names of all checks, in order. The first three compare servers, which only their client can do.
const CHECKS: [&str; 10] =
    ["clock", "secret", "versions", "health", "proxies", "store", "disk", "tables", "signals", "routes"];

async fn show(reader: Reader, State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let memory = reader.memory(&app).await?;
    // Not the desk's time, which is that of a shared store: it would be compared with itself.
    let now = SystemClock::new().now();
    let mut findings = Vec::new();
    if let Some(store) = &*app.shared_store.load() {
        let of_servers = store.examine(now).await.into_iter();
        findings.extend(
            of_servers.map(|text| Finding::error("store", text, "docs/scale.md lists what a shared store needs")),
        );
        let advice = "docs/rotate-secret.md describes a rotation, and docs/scale.md the names of nodes";
        findings.extend(store.node_problems().into_iter().map(|text| Finding::error("store", text, advice)));
        findings.extend(
            store.retired_secret().map(|text| Finding { level: "note", ..Finding::warning("store", text, advice) }),
        );
    }
    let body = DiagnosisBody {
        now: now.micros().checked_div(1_000).unwrap_or(0),
        version: env!("CARGO_PKG_VERSION"),
        secret: app.desk.key_id().to_string(),
        is_shared: app.shared_store.load().is_some(),
        policy: hex(&Sha256::digest(app.policy_file.load().text.as_bytes())),
        checks: CHECKS.to_vec(),
        findings: Vec::new(),
    };
    let place = app.policy_turns.shown.place()?;
    // The requests of an hour are gone through, and a file system is asked.
    let shared = Arc::clone(&app);
    let found = place.work(move |_| -> Vec<Finding> {
        [health, proxies, store_errors, disk, tables, signals, routes_without_rules]
            .iter()
            .flat_map(|check| check(&shared))
            .collect()
    });
    findings.extend(found.await?);
    memory.json(&app, &DiagnosisBody { findings, ..body })
}

/// The first eight bytes are enough to tell two policies apart.
fn hex(digest: &[u8]) -> String {
    digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

/// What `/readyz` reports.
fn health(app: &App) -> Vec<Finding> {
    let advice = "docs/runbooks has a page for each problem";
    app.health.problems().into_iter().map(|problem| Finding::error("health", problem.details.clone(), advice)).collect()
}

fn proxies(app: &App) -> Vec<Finding> {
    let untrusted = app.forward_auth.untrusted(&app.desk).map(|peer| {
        let message = format!("{peer} asks /auth and is not in trusted_proxies: all of its clients share one budget");
        let length = if peer.is_ipv4() { 32 } else { 128 };
        Finding::error(
            "proxies",
            message,
            format!("if it is your proxy, add \"{peer}/{length}\" to trusted_proxies in [identity]"),
        )
    });
    untrusted.into_iter().collect()
}

/// The errors that calls of the store have ended with since the server started.
fn store_errors(app: &App) -> Vec<Finding> {
    let advice = "docs/scale.md (errors by kind) says what each kind means, and what to do";
    let shown = app.desk.store_errors().into_iter().map(|error| {
        let (kind, count, ago) = (error.kind.name(), error.count, error.age.as_secs());
        let calls = if count == 1 { "call" } else { "calls" };
        let message = format!("{count} {calls} failed with {kind}, the last one {ago} s ago: {}", error.last);
        match () {
            () if error.is_recent() => Finding::error("store", message, advice),
            () if error.age < ERROR_SHOWN => Finding::warning("store", message, advice),
            () => Finding { check: "store", level: "note", message, advice: advice.to_owned() },
        }
    });
    shown.collect()
}

fn disk(app: &App) -> Vec<Finding> {
    let Some(path) = app.desk.journal_path() else {
        let advice = "start it with --db FILE, unless it is a test";
        return vec![Finding::warning("disk", "there is no journal: bans and strikes are lost at a restart", advice)];
    };
    let free = free_bytes(path.parent().unwrap_or(Path::new(".")));
    let little = free.filter(|free| *free < LITTLE_SPACE).map(|free| {
        let message = format!("the disk of the journal has {} MiB left", free >> 20);
        Finding::warning("disk", message, "make room: a full disk keeps bans and strikes from being saved")
    });
    little.into_iter().collect()
}

fn free_bytes(folder: &Path) -> Option<u64> {
    // The parent of a bare name is "".
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let statistics = rustix::fs::statvfs(folder).ok()?;
    Some(statistics.f_bavail.saturating_mul(statistics.f_frsize))
}

fn tables(app: &App) -> Vec<Finding> {
    let full = app.desk.key_usage().filter(|keys| is_nearly_full(keys.used, keys.max)).map(|keys| {
        let message = format!(
            "{} of {} keys are used, {} were evicted and {} counted together with others",
            keys.used, keys.max, keys.evicted, keys.folded
        );
        Finding::warning("tables", message, "docs/runbooks/memory-full.md: raise max_keys in [memory]")
    });
    full.into_iter().collect()
}

fn is_nearly_full(used: usize, most: usize) -> bool {
    used.saturating_mul(100) >= most.saturating_mul(NEARLY_FULL_PERCENT)
}

fn signals(app: &App) -> Vec<Finding> {
    let lost = app.signals.database.lost();
    let events = (lost > 0).then(|| {
        let message = format!("{lost} events were not recorded");
        Finding::warning("signals", message, "docs/runbooks/events-lost.md")
    });
    events.into_iter().collect()
}

/// Endpoints of the last hour that no rule but those by address covers.
fn routes_without_rules(app: &App) -> Vec<Finding> {
    let recording = app.desk.recent_requests.recording(app.desk.now());
    let open = open_endpoints(&app.desk.policy(), &recording);
    let shown = open.into_iter().take(MAX_ENDPOINTS).map(|(endpoint, count)| {
        let message = format!("{count} requests to {endpoint} in the last hour met no rule but those of their address");
        Finding::warning("routes", message, "add a rule for them, or a fallback for the layer user or endpoint")
    });
    shown.collect()
}

/// Whether a segment of a path looks like a word or a version. Others may be names of people or secrets.
fn is_word(segment: &str) -> bool {
    let is_version =
        segment.strip_prefix('v').is_some_and(|rest| rest.len() <= 2 && rest.bytes().all(|byte| byte.is_ascii_digit()));
    let is_letters = segment.bytes().all(|byte| byte.is_ascii_alphabetic() || matches!(byte, b'-' | b'_'));
    is_version || (is_letters && segment.len() <= 24)
}

/// Returns the beginnings of paths that only rules of the layers `edge` and `global` cover, the most frequent first.
fn open_endpoints(policy: &Policy, recording: &Recording) -> Vec<(String, u64)> {
    let mut open = BTreeMap::<String, u64>::new();
    for request in &recording.requests {
        request.with_facts(|facts| {
            let (Some(method), Some(path)) = (facts.method, facts.path) else { return };
            let is_covered = policy
                .explain(facts)
                .iter()
                .any(|rule| rule.limit.is_some() && !matches!(rule.rule.layer, Layer::Edge | Layer::Global));
            if !is_covered {
                // The first segment names a part of a site. What follows may be a secret, such as that of an invitation.
                let path = path.split(['?', '#']).next().unwrap_or(path);
                let mut segments = path.split('/').skip(1);
                let first = segments.next().map_or("", |segment| if is_word(segment) { segment } else { "…" });
                let more = if segments.next().is_some() { "/…" } else { "" };
                let shown = format!("{}:/{first}{more}", normalize_method(method));
                let count = open.entry(shown).or_default();
                *count = count.saturating_add(1);
            }
        });
    }
    // What few have asked for is no part of the site, but may be a name or a secret.
    let mut open: Vec<(String, u64)> = open.into_iter().filter(|(_, count)| *count >= FEWEST_REQUESTS).collect();
    open.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    open
}
