//! `/v1/policy`: the policy as it runs, rule by rule; checks and rehearses drafts, and saves one if the server allows that.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use http::StatusCode;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use threshold_core::policy::{Mode, Policy, Review, Severity};
use threshold_limiter::api::read;

use super::admin::{Operator, Reader, change, operator_call};
use super::json_body::JsonBody;
use super::openapi::{Operation, Schemas};
use super::routes::{Route, get, post, put};
use super::{ApiError, App, json};
use crate::policy_file::{PolicyFile, SaveError};
use crate::signals::draft::{Rehearsed, rehearse};
use crate::source::{Tenants, changes, joined};

/// The most findings in one answer.
const MAX_FINDINGS: usize = 100;
/// The most changes that the audit names.
const MAX_CHANGES: usize = 5;
const NEW_VARIABLE: &str = "refers to a variable where the policy in force does not: a draft could show its value";

/// The policy as it runs.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "RunningPolicy")]
struct PolicyBody {
    /// The text of the file. For read-only tokens it is without comments, and without a key of `[identity.jwt]`.
    text: String,
    generation: u64,
    /// Whether `PUT /v1/policy` saves: the server was started with `--allow-edit` and a policy file.
    editable: bool,
    /// The number of requests that the figures of the rules are about.
    recorded: usize,
    /// When the first of them was decided, in milliseconds; null without requests.
    since: Option<u64>,
    /// The share of all callers whose requests they are, from 0 to 1.
    share: f64,
    rules: Vec<RuleBody>,
}

/// A rule, and what it does with the requests of the last hour on empty counters.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "RunningRule")]
struct RuleBody {
    name: String,
    layer: &'static str,
    /// `enforce` or `observe`.
    mode: &'static str,
    /// The limit as the policy writes it; null if it depends on the tier.
    limit: Option<String>,
    per: String,
    /// The line of the rule's name in the text.
    line: Option<usize>,
    /// The requests that it counted.
    hits: u64,
    /// Those after which less than a fifth of the limit was left.
    near: u64,
    /// Those that it denied.
    blocked: u64,
    /// Those that it would have denied if it were not `observe`.
    observed: u64,
}

/// A draft of a policy.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object")]
struct Draft {
    text: String,
}

/// A policy to save.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase", expecting = "an object")]
struct NewPolicy {
    text: String,
    /// The text that the draft was made from. If the file is another one by now, nothing is saved.
    based_on: String,
    /// The reason, for the audit.
    reason: String,
}

/// What is wrong with a draft.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Findings")]
struct FindingsBody {
    findings: Vec<FindingBody>,
}

/// An error or a warning, as `threshold lint` prints it.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Finding")]
struct FindingBody {
    /// `error` or `warning`.
    level: &'static str,
    code: &'static str,
    line: usize,
    column: usize,
    message: String,
    help: String,
}

/// What a draft would have decided in the last hour, beside the policy in force. Both begin with empty counters.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "Rehearsal")]
struct RehearsalBody {
    requests: usize,
    /// When the first of them was decided, in milliseconds; null without requests.
    since: Option<u64>,
    /// The share of all callers whose requests they are, from 0 to 1.
    share: f64,
    present: SumsBody,
    draft: SumsBody,
    /// The requests that the draft denies and the policy in force allows.
    newly_denied: usize,
    /// The requests that the draft allows and the policy in force denies.
    newly_allowed: usize,
    /// The rules of both that denied requests.
    rules: Vec<ComparedRule>,
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "RehearsalSums")]
struct SumsBody {
    allowed: u64,
    denied: u64,
}

#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
struct ComparedRule {
    name: String,
    denied_now: u64,
    denied_by_draft: u64,
}

/// The result of a save.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Saved")]
struct SavedBody {
    ok: bool,
}

pub(super) fn routes() -> Vec<Route> {
    vec![
        get("/v1/policy", show, describe_show),
        put("/v1/policy", save, describe_save),
        post("/v1/policy/lint", lint, describe_lint),
        post("/v1/policy/rehearse", rehearse_draft, describe_rehearse),
    ]
}

fn describe_show(schemas: &mut Schemas) -> Operation {
    operator_call("policy", "Return the policy as it runs, with what each rule does", &schemas.of::<PolicyBody>())
}

fn describe_save(schemas: &mut Schemas) -> Operation {
    let body = schemas.of::<NewPolicy>();
    change("savePolicy", "Write the policy file, which is in force at once", &schemas.of::<SavedBody>())
        .body(body)
        .errors(&[
            (404, "The server saves no policies (`not_editable`)"),
            (409, "The file has changed since it was read (`policy_changed`)"),
            (422, "The policy has errors (`bad_policy`)"),
        ])
}

fn describe_lint(schemas: &mut Schemas) -> Operation {
    let body = schemas.of::<Draft>();
    operator_call("lintPolicy", "Check a draft of a policy", &schemas.of::<FindingsBody>()).body(body)
}

fn describe_rehearse(schemas: &mut Schemas) -> Operation {
    let body = schemas.of::<Draft>();
    operator_call("rehearsePolicy", "Decide the requests of the last hour by a draft", &schemas.of::<RehearsalBody>())
        .body(body)
        .errors(&[(422, "The draft has errors (`bad_policy`)"), (503, "Another rehearsal is going on (`busy`)")])
}

async fn show(reader: Reader, State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let file = app.policy_file.load();
    let policy = app.desk.policy();
    let text = if reader.may_change { file.text.clone() } else { file.text_for_readers() };
    // Waits: a page that shows the policy must not fail because another one does.
    let turn = Arc::clone(&app.rehearsals).acquire_owned().await.map_err(|_| busy())?;
    let (now, requests) = (app.desk.now(), Arc::clone(&app.desk.recent_requests));
    let decided = Arc::clone(&policy);
    let work = tokio::task::spawn_blocking(move || {
        let recording = requests.recording(now);
        let rehearsed = rehearse(&decided, &recording);
        drop(turn);
        (recording, rehearsed)
    });
    let (recording, rehearsed) = work.await.map_err(|_| busy())?;
    let lines = file.lines_of_rules();
    let rules = policy.rules().iter().zip(rehearsed.rules).map(|(rule, own)| RuleBody {
        name: rule.name.to_string(),
        layer: rule.layer.name(),
        mode: if rule.mode == Mode::Observe { "observe" } else { "enforce" },
        limit: rule.notation(),
        per: rule.per.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
        line: lines.iter().find(|(name, _)| *name == rule.name).map(|(_, line)| *line),
        hits: own.hits,
        near: own.near,
        blocked: own.blocked,
        observed: own.observed,
    });
    Ok(json(
        StatusCode::OK,
        &PolicyBody {
            text,
            generation: policy.generation(),
            editable: file.is_editable(),
            recorded: recording.requests.len(),
            since: since(&recording),
            share: recording.share,
            rules: rules.collect(),
        },
    ))
}

async fn lint(reader: Reader, State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let JsonBody(body) = JsonBody::read_for_reader(&reader, request, &app).await?;
    let Draft { text } = read(&body)?;
    // A draft may take as long as a rehearsal. The turn belongs to the work: a client that leaves does not end it.
    let turn = Arc::clone(&app.rehearsals).acquire_owned().await.map_err(|_| busy())?;
    let file = app.policy_file.load_full();
    let work = tokio::task::spawn_blocking(move || {
        let mut findings = file.review(&text).findings;
        // The first ones suffice: the position of each is counted from the beginning of the text.
        findings.truncate(MAX_FINDINGS);
        let findings = findings.into_iter().map(|finding| {
            let (line, column) = finding.place(&text);
            let level = if finding.severity == Severity::Error { "error" } else { "warning" };
            FindingBody { level, code: finding.code, line, column, message: finding.message, help: finding.help }
        });
        let findings = findings.chain(file.new_variable(&text).map(|key| FindingBody::variable(&key))).collect();
        drop(turn);
        findings
    });
    let findings = work.await.map_err(|_| busy())?;
    Ok(json(StatusCode::OK, &FindingsBody { findings }))
}

async fn rehearse_draft(reader: Reader, State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let JsonBody(body) = JsonBody::read_for_reader(&reader, request, &app).await?;
    let Draft { text } = read(&body)?;
    let turn = Arc::clone(&app.rehearsals).try_acquire_owned().map_err(|_| busy())?;
    let file = app.policy_file.load_full();
    let (now, requests, policy) = (app.desk.now(), Arc::clone(&app.desk.recent_requests), app.desk.policy());
    let work = tokio::task::spawn_blocking(move || {
        let _turn = turn;
        let draft = usable(&file, &text)?;
        let recording = requests.recording(now);
        let (present, new) = (rehearse(&policy, &recording), rehearse(&draft, &recording));
        let count = |is: fn(bool, bool) -> bool| {
            present.verdicts.iter().zip(&new.verdicts).filter(|(before, after)| is(**before, **after)).count()
        };
        Ok::<_, ApiError>(RehearsalBody {
            requests: recording.requests.len(),
            since: since(&recording),
            share: recording.share,
            newly_denied: count(|before, after| before && !after),
            newly_allowed: count(|before, after| !before && after),
            rules: compared(&present, &new),
            present: SumsBody { allowed: present.allowed, denied: present.denied },
            draft: SumsBody { allowed: new.allowed, denied: new.denied },
        })
    });
    let rehearsal = work.await.map_err(|_| busy())??;
    Ok(json(StatusCode::OK, &rehearsal))
}

async fn save(operator: Operator, State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    // The draft, and the text that it was made from.
    let JsonBody(body) = JsonBody::read(request, &app, app.bounds.body.saturating_mul(2)).await?;
    let NewPolicy { text, based_on, reason } = read(&body)?;
    if !app.policy_file.load().is_editable() {
        let message = "this server saves no policies: start it with a policy file and --allow-edit";
        return Err(ApiError::new(StatusCode::NOT_FOUND, "not_editable", message));
    }
    // Held until the file is replaced, so that of two drafts of one text only the first is saved.
    let turn = Arc::clone(&app.rehearsals).acquire_owned().await.map_err(|_| busy())?;
    let shared = Arc::clone(&app);
    let work = tokio::task::spawn_blocking(move || {
        let file = shared.policy_file.load_full();
        file.check_unchanged(&based_on)?;
        usable(&file, &text)?;
        // What a reload would refuse would be lost at the next start.
        shared.policy_file.load().check_loadable(&text, &shared.desk.policy()).map_err(bad_policy)?;
        Ok::<_, ApiError>((file, text, based_on))
    });
    let (file, text, based_on) = work.await.map_err(|_| busy())??;
    let changes = changes(&based_on, &text, Tenants::Unnamed);
    let changes = if changes.is_empty() { "no rule".to_owned() } else { joined(&changes, MAX_CHANGES, "; ") };
    app.desk.audit_policy(&operator.0, &changes, &reason).await?;
    let saved = tokio::task::spawn_blocking(move || {
        let _turn = turn;
        file.save(&text, &based_on)
    });
    let saved = saved.await;
    saved.map_err(|_| busy())??;
    Ok(json(StatusCode::OK, &SavedBody { ok: true }))
}

impl From<SaveError> for ApiError {
    fn from(error: SaveError) -> Self {
        match error {
            SaveError::Changed => {
                let message = "the policy file has changed since it was read: load it again";
                Self::new(StatusCode::CONFLICT, "policy_changed", message)
            }
            SaveError::Io(error) => {
                tracing::error!(%error, "policy not saved");
                let message = "the policy file could not be read or written; the server's log says why";
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", message)
            }
        }
    }
}

impl FindingBody {
    fn variable(key: &str) -> Self {
        Self {
            level: "error",
            code: "new-variable",
            line: 0,
            column: 0,
            message: format!("{key} {NEW_VARIABLE}"),
            help: "change the file on the server, and reload it".to_owned(),
        }
    }
}

/// Parses a draft, or says what its first error is.
fn usable(file: &PolicyFile, text: &str) -> Result<Policy, ApiError> {
    if let Some(key) = file.new_variable(text) {
        return Err(bad_policy(format!("{key} {NEW_VARIABLE}")));
    }
    let Review { policy, findings, .. } = file.review(text);
    policy.ok_or_else(|| {
        let first = findings.iter().find(|finding| finding.severity == Severity::Error);
        bad_policy(first.map_or_else(
            || "the policy cannot be used".to_owned(),
            |finding| format!("line {}: {}", finding.place(text).0, finding.message),
        ))
    })
}

fn bad_policy(message: String) -> ApiError {
    ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, "bad_policy", message).about(Some("text".to_owned()))
}

/// Returns the rules of both policies that denied requests, by name.
fn compared(present: &Rehearsed, draft: &Rehearsed) -> Vec<ComparedRule> {
    let mut rules: std::collections::BTreeMap<&str, (u64, u64)> = std::collections::BTreeMap::new();
    for rule in &present.rules {
        rules.entry(&rule.name).or_default().0 = rule.blocked;
    }
    for rule in &draft.rules {
        rules.entry(&rule.name).or_default().1 = rule.blocked;
    }
    let compared = rules.into_iter().filter(|(_, (now, then))| *now > 0 || *then > 0);
    let compared = compared.map(|(name, (denied_now, denied_by_draft))| ComparedRule {
        name: name.to_owned(),
        denied_now,
        denied_by_draft,
    });
    compared.collect()
}

fn since(recording: &crate::signals::recent_requests::Recording) -> Option<u64> {
    recording.requests.first().and_then(|request| request.at.micros().checked_div(1_000))
}

fn busy() -> ApiError {
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "busy", "another rehearsal is going on")
}
