//! `/v1/subjects/LAYER/KEY`: the state of a subject or an account, and its forgiveness.

use std::borrow::Cow;
use std::sync::Arc;

use axum::extract::{Path, State};
use axum::response::Response;
use http::StatusCode;
use schemars::JsonSchema;
use serde::Serialize;
use threshold_core::ladder::Penalty;
use threshold_core::policy::{Layer, Listed, Mode, Policy};
use threshold_core::{Timestamp, TraceId};
use threshold_limiter::store::StoreError;
use threshold_wire::{Object, Text, layer_named, read, unknown_layer};

use super::operator::{Operator, Reader};
use super::{BanBody, ChangedBody, ReasonQuery, hexadecimal};
use crate::desk::{BudgetState, LadderState, OperationError, Subject, Target};
use crate::door::http::ForgiveBody;
use crate::door::json_body::JsonBody;
use crate::door::query::Query;
use crate::door::{ApiError, App, json};

/// The state of a subject or an account.
#[derive(Debug, Default, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "Subject")]
pub(super) struct SubjectBody {
    layer: String,
    key: String,
    /// The strikes that have not decayed, on the ladder with the most of them.
    strikes: u32,
    shadow_banned: bool,
    /// The end of a ladder's cool-down or ban, in Unix seconds.
    denied_until: Option<u64>,
    /// The end of a pause, or of a rule's `block_for`, under at least one of its limits, in Unix seconds.
    paused_until: Option<u64>,
    /// The end of a ladder's ban, in Unix seconds.
    banned_until: Option<u64>,
    /// The ban that an operator set, if any.
    ban: Option<BanBody>,
    /// The digest that the server's log lines have for it; null for an endpoint.
    digest: Option<String>,
    /// All bans that apply to it, also on wider blocks and of imported sets. The one that ends last is the first.
    bans: Vec<BanBody>,
    /// The entry of the policy's lists that decides about it.
    listed: Option<ListedBody>,
    /// Its standing on each ladder that counts its strikes.
    ladders: Vec<LadderBody>,
    /// Its use of each budget that is its alone.
    budgets: Vec<BudgetBody>,
    /// For an account, and for a user whose account of this name has failed: consecutive failures from unknown devices.
    #[serde(skip_serializing_if = "Option::is_none")]
    failures: Option<u32>,
    /// For an account: until when it is locked for unknown devices, in Unix seconds; null if it is not locked, or is locked
    /// permanently at the ceiling.
    #[serde(skip_serializing_if = "Option::is_none")]
    locked_until: Option<u64>,
    /// For an account: whether it has reached the ceiling.
    #[serde(skip_serializing_if = "Option::is_none")]
    at_ceiling: Option<bool>,
}

/// An entry of the policy's lists.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "ListEntry")]
struct ListedBody {
    /// `allow` or `deny`.
    list: &'static str,
    /// The address or block, the tenant, or the user.
    key: String,
}

/// The standing of a subject on one ladder.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "LadderState")]
struct LadderBody {
    ladder: String,
    /// The strikes that have not decayed.
    strikes: u32,
    /// When they are forgotten, in Unix seconds.
    forgotten_at: Option<u64>,
    /// The consequences of the next strike, as a policy writes them.
    next: String,
    /// `ban` or `cooldown`, if one is in force.
    penalty: Option<&'static str>,
    /// Its end, in Unix seconds.
    until: Option<u64>,
    /// The id of the ban, if it is one.
    id: Option<String>,
    /// The strike and the rule that the ban is for.
    reason: Option<String>,
}

/// The use of one budget.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "BudgetState")]
struct BudgetBody {
    /// The rule, or `[login] ip` for the login attempts of an address.
    rule: String,
    /// The category of requests that it is for, where the rule has a budget for each.
    category: Option<String>,
    /// Whether the rule denies: one that observes stops nobody, also if the budget is used up.
    #[schemars(extend("enum" = ["enforce", "observe"]))]
    mode: &'static str,
    /// The limit as the policy writes it.
    notation: String,
    used: u64,
    limit: u64,
    /// When it is free again, or more of it, in Unix seconds; null if nothing is used, and under `concurrency`.
    free_at: Option<u64>,
    /// Why the rule denies or skips requests of a subject that has no tier of the policy, unless they name one; null if it counts them.
    why: Option<String>,
}

impl From<LadderState> for LadderBody {
    fn from(state: LadderState) -> Self {
        let penalty = match state.penalty {
            Some(Penalty::Ban(until)) => Some(("ban", until)),
            Some(Penalty::CoolDown(until)) => Some(("cooldown", until)),
            None => None,
        };
        // A cool-down is not listed among bans, and its id could not be lifted.
        let is_ban = matches!(state.penalty, Some(Penalty::Ban(_)));
        Self {
            ladder: state.ladder,
            strikes: state.strikes,
            forgotten_at: state.forgotten_at.map(Timestamp::secs_ceil),
            next: state.next,
            penalty: penalty.map(|(name, _)| name),
            until: penalty.map(|(_, until)| until.secs_ceil()),
            id: is_ban.then(|| hexadecimal(state.id)),
            reason: state.reason.map(String::from),
        }
    }
}

impl BudgetBody {
    fn new(state: BudgetState, policy: &Policy) -> Self {
        let BudgetState { rule, category, notation, used, limit, free_at, why } = state;
        let observes = policy.rules().iter().any(|own| *own.name == rule && own.mode == Mode::Observe);
        let mode = if observes { "observe" } else { "enforce" };
        Self { rule, category, mode, notation, used, limit, free_at: free_at.map(Timestamp::secs_ceil), why }
    }
}

impl SubjectBody {
    fn new(subject: Subject, layer: String, key: String, policy: &Policy) -> Self {
        let seconds = |until: Option<Timestamp>| until.map(Timestamp::secs_ceil);
        let account = subject.account.as_ref();
        let locked = account.and_then(|account| account.locked_until);
        Self {
            layer,
            key,
            strikes: subject.strikes,
            shadow_banned: subject.shadow_banned,
            denied_until: seconds(subject.denied_until),
            paused_until: seconds(subject.paused_until),
            banned_until: seconds(subject.banned_until),
            ban: subject.ban.map(|(id, ban)| BanBody::new(id, Some(&ban), ban.until, policy)),
            digest: subject.digest,
            bans: subject.bans.iter().map(|(id, ban)| BanBody::new(*id, Some(ban), ban.until, policy)).collect(),
            listed: subject.listed.map(|(entry, listed)| ListedBody {
                list: if listed == Listed::Allow { "allow" } else { "deny" },
                key: policy.shown_key(&entry),
            }),
            ladders: subject.ladders.into_iter().map(LadderBody::from).collect(),
            budgets: subject.budgets.into_iter().map(|state| BudgetBody::new(state, policy)).collect(),
            failures: account.map(|account| account.failures),
            locked_until: seconds(locked.and_then(Timestamp::unless_never)),
            // `locked_until` is null both without a lock and at the ceiling, so this field distinguishes them.
            at_ceiling: account.map(|_| locked == Some(Timestamp::MAX)),
        }
    }
}

pub(super) async fn show(
    reader: Reader,
    State(app): State<Arc<App>>,
    Path((layer, key)): Path<(String, String)>,
) -> Result<Response, ApiError> {
    let target = target(&layer, &key)?;
    let memory = reader.memory(&app).await?;
    let name = named(target, &app)?;
    let shown = match target {
        Target::Subject(layer, _) if *name != key => app.desk.shown_name(layer, &name),
        _ => key.clone(),
    };
    let subject = app.desk.subject(target.with_key(&name)).await.map_err(|error| match (error, target) {
        (OperationError::Store(error), Target::Subject(..)) => with_name(error, &layer, &key, &shown),
        (OperationError::Store(error), Target::Account(_)) => {
            let name = app.desk.named(Layer::User, &key).map(|name| app.desk.shown_name(Layer::User, &name));
            with_name(error, &layer, &key, name.as_ref().unwrap_or(&key))
        }
        (other, _) => other.into(),
    })?;
    memory.json(&app, &SubjectBody::new(subject, layer, shown, &app.desk.policy()))
}

pub(super) async fn forgive(
    operator: Operator,
    State(app): State<Arc<App>>,
    Path((layer, key)): Path<(String, String)>,
    Query(ReasonQuery { reason }): Query<ReasonQuery>,
) -> Result<Response, ApiError> {
    let target = target(&layer, &key)?;
    let name = named(target, &app)?;
    app.desk.forgive(&operator.0, target.with_key(&name), reason.as_deref()).await?;
    Ok(json(StatusCode::OK, &ChangedBody { ok: true }))
}

/// Ends a pause of what a rule counts, which need not be a subject.
pub(super) async fn forgive_rule(
    operator: Operator,
    State(app): State<Arc<App>>,
    JsonBody(body): JsonBody,
) -> Result<Response, ApiError> {
    let ForgiveBody { rule, request: Object(request), reason } = read(&body)?;
    request.without_reservation()?;
    let lists = request.lists();
    let facts = request.facts(&lists, TraceId::default());
    let reason = reason.as_ref().map(Text::as_str);
    app.desk.forgive_rule(&operator.0, rule.as_str(), &facts, reason).await?;
    Ok(json(StatusCode::OK, &ChangedBody { ok: true }))
}

/// Adds to an error of the store whose digest the key is, which is known without the store.
fn with_name(error: StoreError, layer: &str, key: &str, shown: &str) -> ApiError {
    let error = ApiError::from(error);
    if shown == key {
        return error;
    }
    let message = format!("{}; {key} is {layer} {shown}", error.body.message());
    ApiError { body: ApiError::new(error.status, "unavailable", message).body, ..error }
}

/// Returns the name behind a digest, or the key as it is.
fn named<'a>(target: Target<'a>, app: &App) -> Result<Cow<'a, str>, ApiError> {
    match target {
        Target::Subject(layer, key) => Ok(app.desk.named(layer, key)?),
        Target::Account(name) => Ok(name.into()),
    }
}

fn target<'a>(layer: &str, key: &'a str) -> Result<Target<'a>, ApiError> {
    if layer == Target::ACCOUNT {
        return Ok(Target::Account(key));
    }
    let layer = layer_named(layer).ok_or_else(|| ApiError::bad("layer", unknown_layer(layer)))?;
    Ok(Target::Subject(layer, key))
}
