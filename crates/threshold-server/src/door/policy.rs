//! `/v1/policy`: the policy as it runs, rule by rule; checks and rehearses drafts, and saves one if the server allows that.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use http::StatusCode;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use threshold_core::policy::{Mode, Policy, Review, ReviewWork, Severity};
use threshold_wire::read;

use super::admin::{Operator, Reader, change, operator_call};
use super::client_memory::PAGE_BYTES;
use super::json_body::JsonBody;
use super::openapi::{Operation, Schemas};
use super::routes::{Route, get, post, put};
use super::turns::Turns;
use super::{ApiError, App, json};
use crate::policy_file::{PolicyFile, SaveError};
use crate::serve::ConnectionWatch;
use crate::signals::draft::{Rehearsed, rehearse};
use threshold_rehearsal::source::{Tenants, changes, joined};

/// The most findings in one answer.
const MAX_FINDINGS: usize = 100;
/// The most changes that the audit names.
const MAX_CHANGES: usize = 5;
const NEW_VARIABLE: &str = "refers to a variable where the policy in force does not: a draft could show its value";

/// The longest draft, in bytes. A larger policy is reviewed on the command line.
const MAX_DRAFT: usize = 256 << 10;
/// The steps of a review of a draft: a fraction of a second. Five hundred rules take half of them.
const DRAFT_STEPS: u64 = 20_000_000;
/// The most clients that wait for one kind of work.
const WAITERS: usize = 8;

/// The turns of the work for the policy's view. Drafts of read-only tokens keep no operator waiting, and no draft delays a save.
#[derive(Debug)]
pub(super) struct PolicyTurns {
    /// Rehearsals of the policy in force.
    pub(super) shown: Turns,
    drafts: Turns,
    readers_drafts: Turns,
    /// Held until a file is replaced, so that of two drafts of one text only the first is saved.
    saves: Turns,
}

impl Default for PolicyTurns {
    fn default() -> Self {
        let turns = || Turns::new(WAITERS);
        Self { shown: turns(), drafts: turns(), readers_drafts: turns(), saves: turns() }
    }
}

const DRAFT_TOO_LARGE: (u16, &str) = (413, "The draft is larger than 256 KiB (`too_large`)");
const OTHERS_WAIT: (u16, &str) = (503, "Others wait for the same work already (`busy`)");

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
    operator_call("lintPolicy", "Check a draft of a policy", &schemas.of::<FindingsBody>())
        .body(body)
        .errors(&[DRAFT_TOO_LARGE, OTHERS_WAIT])
}

fn describe_rehearse(schemas: &mut Schemas) -> Operation {
    let body = schemas.of::<Draft>();
    change("rehearsePolicy", "Decide the requests of the last hour by a draft", &schemas.of::<RehearsalBody>())
        .body(body)
        .errors(&[DRAFT_TOO_LARGE, (422, "The draft has errors (`bad_policy`)"), OTHERS_WAIT])
}

async fn show(reader: Reader, watch: ConnectionWatch, State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let text = app.policy_file.load_full();
    // Each rule is told beside the text, in some more bytes than it has there.
    let memory = reader.memory_for(&app, text.text.len().saturating_mul(4).saturating_add(PAGE_BYTES)).await?;
    let place = app.policy_turns.shown.place()?;
    let shared = Arc::clone(&app);
    let work = place.work(move |is_wanted| {
        let (file, policy) = (shared.policy_file.load(), shared.desk.policy());
        let mut recording = shared.desk.recent_requests.recording(shared.desk.now()).newest_for(&[&policy]);
        let [rehearsed] = rehearse([&*policy], &mut recording, is_wanted);
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
        PolicyBody {
            text: if reader.may_change { file.text.clone() } else { file.text_for_readers() },
            generation: policy.generation(),
            editable: file.is_editable(),
            recorded: recording.requests.len(),
            since: since(&recording),
            share: recording.share,
            rules: rules.collect(),
        }
    });
    memory.json(&app, &watch.until_disconnect(work).await?)
}

async fn lint(
    reader: Reader,
    watch: ConnectionWatch,
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let turns = if reader.may_change { &app.policy_turns.drafts } else { &app.policy_turns.readers_drafts };
    let place = turns.place()?;
    let JsonBody(body) = JsonBody::read_for_reader(&reader, request, &app).await?;
    let text = draft(&body)?;
    let memory = reader.memory(&app).await?;
    let file = app.policy_file.load_full();
    let work = place.work(move |is_wanted| {
        let mut findings = file.review_draft(&text, ReviewWork::of_draft(DRAFT_STEPS, is_wanted)).findings;
        // The first ones suffice: the position of each is counted from the beginning of the text.
        findings.truncate(MAX_FINDINGS);
        let findings = findings.into_iter().map(|finding| {
            let (line, column) = finding.place(&text);
            let level = if finding.severity == Severity::Error { "error" } else { "warning" };
            FindingBody { level, code: finding.code, line, column, message: finding.message, help: finding.help }
        });
        findings.chain(file.new_variable(&text).map(|key| FindingBody::variable(&key))).collect()
    });
    let findings = watch.until_disconnect(work).await?;
    memory.json(&app, &FindingsBody { findings })
}

/// Only operators rehearse: which requests a draft denies tells what is in them, and a read-only token shows no more than the page.
async fn rehearse_draft(
    _: Operator,
    watch: ConnectionWatch,
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let place = app.policy_turns.drafts.place()?;
    let JsonBody(body) = JsonBody::read(request, &app, app.bounds.body).await?;
    let text = draft(&body)?;
    let memory = app.operator_answer_memory.acquire(PAGE_BYTES).await?;
    let shared = Arc::clone(&app);
    let work = place.work(move |is_wanted| {
        let (file, policy) = (shared.policy_file.load(), shared.desk.policy());
        let draft = usable(&file, &text, is_wanted)?;
        let mut recording = shared.desk.recent_requests.recording(shared.desk.now()).newest_for(&[&policy, &draft]);
        let [present, new] = rehearse([&*policy, &draft], &mut recording, is_wanted);
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
    let rehearsal = watch.until_disconnect(work).await??;
    memory.json(&app, &rehearsal)
}

/// Reads a draft.
fn draft(body: &[u8]) -> Result<String, ApiError> {
    let Draft { text } = read(body)?;
    if text.len() > MAX_DRAFT {
        let message =
            format!("a draft has at most {MAX_DRAFT} bytes: review it with threshold lint on the command line");
        return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message));
    }
    Ok(text)
}

async fn save(operator: Operator, State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let place = app.policy_turns.saves.place()?;
    // The draft, and the text that it was made from.
    let JsonBody(body) = JsonBody::read(request, &app, app.bounds.body.saturating_mul(2)).await?;
    let NewPolicy { text, based_on, reason } = read(&body)?;
    if !app.policy_file.load().is_editable() {
        let message = "this server saves no policies: start it with a policy file and --allow-edit";
        return Err(ApiError::new(StatusCode::NOT_FOUND, "not_editable", message));
    }
    let (shared, runtime) = (Arc::clone(&app), tokio::runtime::Handle::current());
    let work = place.work(move |_| {
        let file = shared.policy_file.load_full();
        file.check_unchanged(&based_on)?;
        usable(&file, &text, &|| true)?;
        // What a reload would refuse would be lost at the next start.
        file.check_loadable(&text, &shared.desk.policy()).map_err(bad_policy)?;
        let changes = changes(&based_on, &text, Tenants::Unnamed);
        let changes = if changes.is_empty() { "no rule".to_owned() } else { joined(&changes, MAX_CHANGES, "; ") };
        runtime.block_on(shared.desk.audit_policy(&operator.0, &changes, &reason))?;
        Ok::<_, ApiError>(file.save(&text, &based_on)?)
    });
    work.await??;
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
fn usable(file: &PolicyFile, text: &str, is_wanted: &dyn Fn() -> bool) -> Result<Policy, ApiError> {
    if let Some(key) = file.new_variable(text) {
        return Err(bad_policy(format!("{key} {NEW_VARIABLE}")));
    }
    let Review { policy, findings, .. } = file.review_draft(text, ReviewWork::of_draft(DRAFT_STEPS, is_wanted));
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
