//! What operators may do: see and change who is banned, look subjects up, and forgive them. Every change is written down
//! with who made it and why, and is on disk before it is answered.

mod audit;
mod operator;
mod settings;
mod subjects;

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, State};
use axum::response::Response;
use axum::routing::{delete, get};
use http::StatusCode;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use threshold_core::plan::SubjectKeys;
use threshold_core::policy::{Ban, ListEntry, Policy};
use threshold_core::{Digest, Span, Timestamp};
use threshold_limiter::bans::TooManyBans;
use threshold_limiter::store::{Command, Kind, Listed, Store, StoreError};
use threshold_limiter::{Clock, Limiter};

use super::http::{LayerName, Text, Whole, read, trace_id};
use super::sent::Sent;
use super::{ApiError, App, json, json_bytes};
pub(super) use audit::audit_pause;
use audit::{Change, audit, moment};
pub(super) use operator::caller_name;
use operator::{Operator, Query, Reader};
pub(super) use settings::{NewSetting, SettingBody};
pub(super) use subjects::SubjectBody;

/// How long a change waits for the disk before it is refused.
const CHANGE_WAIT: Duration = Duration::from_secs(5);
/// The longest ban with an end: ten years.
const MAX_BAN: u64 = 10 * 365 * 86_400;
/// The longest reason, in characters.
const MAX_REASON: usize = 1_000;
/// How many bans one answer lists, unless said, and at most.
const BANS_LISTED: (usize, usize) = (1_000, 10_000);

/// Somebody who is banned.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Ban")]
pub(super) struct BanBody {
    id: String,
    /// `edge` for an address, `tenant`, or `user`; null where only the number is known.
    layer: Option<&'static str>,
    /// The address or block, the tenant, or the user.
    key: String,
    reason: String,
    /// Who has set it; `ladder` for those whom the policy's own ladders ban.
    by: String,
    /// Since when, in Unix seconds.
    from: u64,
    /// Until when; null is for good.
    until: Option<u64>,
}

/// Somebody to ban.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase", expecting = "an object")]
#[schemars(rename = "NewBan")]
pub(super) struct NewBan<'a> {
    layer: LayerName,
    /// An address or CIDR (edge), a tenant, or a user. An IPv6 address without a prefix stands for the policy's
    /// `ipv6_prefix`; `ADDR/128` is one address.
    #[serde(borrow)]
    #[schemars(length(min = 1))]
    key: Text<'a>,
    /// Why. Whoever is banned is never told.
    #[serde(borrow)]
    #[schemars(length(min = 1, max = 1_000))]
    reason: Text<'a>,
    /// For how long; for good unless said.
    #[schemars(range(min = 1, max = 315_360_000))]
    duration_sec: Option<Whole>,
}

/// Something was done.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Changed")]
pub(super) struct ChangedBody {
    ok: bool,
}

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/v1/bans", get(list).post(add))
        .route("/v1/bans/{id}", delete(lift))
        .route("/v1/subjects/{layer}/{key}", get(subjects::show).delete(subjects::forgive))
        .route("/v1/tenants/{id}", get(settings::tenant).put(settings::set_tenant))
        .route("/v1/users/{id}", get(settings::user).put(settings::set_user))
}

async fn list(_: Reader, State(app): State<Arc<App>>, query: Query) -> Result<Response, ApiError> {
    let mut query = query.only(&["limit", "after"])?;
    let limit = query.take("limit").map_or(Ok(BANS_LISTED.0), |text| {
        let limit = text.parse().ok().filter(|limit| (1..=BANS_LISTED.1).contains(limit));
        limit.ok_or_else(|| ApiError::bad("limit", format!("limit is between 1 and {}", BANS_LISTED.1)))
    })?;
    let after = query.take("after").map(|id| ban_id(&id)).transpose()?;
    let policy = app.desk.limiter.policy();
    let listed = page(&app.desk.limiter, after, limit).await?.into_iter();
    let listed: Vec<BanBody> = listed.map(|(id, ban, until)| BanBody::new(id, ban.as_ref(), until, &policy)).collect();
    let body = serde_json::to_vec(&listed).unwrap_or_default();
    let room = app.listed.room(body.len()).await?;
    Ok(json_bytes(StatusCode::OK, room.body(body, app.bounds.patience)))
}

/// The bans after a number, operators' and ladders' in one order, at most `limit` of them. A page is read from each of the
/// two, however many there are.
async fn page<S: Store, C: Clock>(
    limiter: &Limiter<S, C>,
    after: Option<Digest>,
    limit: usize,
) -> Result<Vec<(Digest, Option<Ban>, Timestamp)>, StoreError> {
    let now = limiter.now();
    let mut bans = Vec::new();
    let more = |read: usize| if read < limit { ControlFlow::Continue(()) } else { ControlFlow::Break(()) };
    limiter.bans().walk(after, now, |id, ban| {
        bans.push((id, Some(ban.clone()), ban.until));
        more(bans.len())
    });
    let by_ladders = limiter.list(Kind::Banned, after, limit).await?;
    bans.extend(by_ladders.into_iter().filter_map(|listed| match listed {
        Listed::Banned { key, until } => Some((key, None, until)),
        _ => None,
    }));
    bans.sort_unstable_by_key(|(id, ..)| *id);
    bans.truncate(limit);
    for (id, ban, _) in bans.iter_mut().filter(|(_, ban, _)| ban.is_none()) {
        *ban = limiter.bans().named(*id);
    }
    Ok(bans)
}

async fn add(operator: Operator, State(app): State<Arc<App>>, Sent(body): Sent) -> Result<Response, ApiError> {
    let NewBan { layer, key, reason, duration_sec } = read(&body)?;
    let reason = reason_of(reason.as_str())?;
    let limiter = &app.desk.limiter;
    let (policy, now) = (limiter.policy(), limiter.now());
    let whom = policy.ban_target(layer.0, key.as_str()).map_err(|message| ApiError::bad("key", message))?;
    if let Some(why) = policy.refuses_ban(&whom) {
        return Err(ApiError::bad("key", why));
    }
    let until = match duration_sec.map(Whole::number) {
        None => Timestamp::MAX,
        Some(seconds @ 1..=MAX_BAN) => now.plus(Span::from_secs(seconds)),
        Some(_) => return Err(ApiError::bad("durationSec", format!("a ban lasts between 1 and {MAX_BAN} seconds"))),
    };
    let id = whom.ban_id(limiter.key());
    let by = operator.0.as_str().into();
    let ban = Ban { whom, reason: reason.as_str().into(), by, from: now, until };
    let full = |error: TooManyBans| ApiError::new(StatusCode::INSUFFICIENT_STORAGE, "too_many_bans", error.to_string());
    limiter.bans().make_room(id, now).map_err(full)?;
    let before = limiter.bans().one(id, now).map(|before| format!("{} -> ", length(before.until)));
    let action = format!("ban: {}{}", before.unwrap_or_default(), length(until));
    audit(&app, &operator.0, &Change { action, layer: ban.whom.layer().name(), key: &ban.whom.key(), why: &reason })?;
    limiter.bans().set(id, ban.clone(), now).map_err(full)?;
    saved(&app).await?;
    Ok(json(StatusCode::OK, &BanBody::new(id, Some(&ban), until, &policy)))
}

async fn lift(
    operator: Operator,
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    query: Query,
) -> Result<Response, ApiError> {
    let reason = reason_in(query)?;
    let (id, limiter) = (ban_id(&id)?, &app.desk.limiter);
    let now = limiter.now();
    let by_operator = limiter.bans().one(id, now);
    let by_ladder = limiter.standing(id).await?.and_then(|standing| standing.banned_until());
    let by_ladder = by_ladder.filter(|until| *until > now);
    if by_operator.is_none() && by_ladder.is_none() {
        return Err(ApiError::new(StatusCode::NOT_FOUND, "unknown_ban", "there is no such ban, or no longer"));
    }
    let until = by_operator.as_ref().map(|ban| ban.until).max(by_ladder).unwrap_or(now);
    let named = by_operator.or_else(|| limiter.bans().named(id));
    let (by, because) = named.as_ref().map_or(("ladder", ""), |ban| (&*ban.by, &*ban.reason));
    let action = format!("lift: {}, by {by}: {because}", length(until));
    let (layer, key) = named.map_or_else(|| ("ban", hexadecimal(id)), |ban| (ban.whom.layer().name(), ban.whom.key()));
    audit(&app, &operator.0, &Change { action, layer, key: &key, why: &reason })?;
    limiter.bans().lift(id);
    if by_ladder.is_some() {
        let keys = SubjectKeys { standings: [id].into(), ..SubjectKeys::default() };
        limiter.execute(Command::Forgive { keys }).await?;
        limiter.bans().forget_name(id);
    }
    saved(&app).await?;
    Ok(json(StatusCode::OK, &ChangedBody { ok: true }))
}

impl BanBody {
    fn new(id: Digest, ban: Option<&Ban>, until: Timestamp, policy: &Policy) -> Self {
        let identity = policy.identity();
        let key = match ban.map(|ban| &ban.whom) {
            None => hexadecimal(id),
            Some(ListEntry::User(name)) if identity.secret_user && !name.starts_with('#') => policy.key().redact(name),
            Some(ListEntry::Tenant(name)) if identity.secret_tenant && !name.starts_with('#') => {
                policy.key().redact(name)
            }
            Some(whom) => whom.key(),
        };
        Self {
            id: hexadecimal(id),
            layer: ban.map(|ban| ban.whom.layer().name()),
            key,
            reason: ban.map(|ban| ban.reason.to_string()).unwrap_or_default(),
            by: ban.map_or_else(|| "ladder".to_owned(), |ban| ban.by.to_string()),
            from: ban.map_or(0, |ban| ban.from.micros().checked_div(1_000_000).unwrap_or(0)),
            until: until.unless_never().map(Timestamp::secs_ceil),
        }
    }
}

/// How long a ban lasts, in words.
fn length(until: Timestamp) -> String {
    until.unless_never().map_or_else(|| "for good".to_owned(), |until| format!("until {}", moment(until)))
}

async fn saved(app: &App) -> Result<(), ApiError> {
    app.desk.saved(CHANGE_WAIT).await.map_err(|_| ApiError::not_saved())
}

fn reason_of(text: &str) -> Result<String, ApiError> {
    // As it was sent: blanks that are dropped below have their length too.
    let is_long = text.chars().count() > MAX_REASON;
    let text = text.trim();
    if text.is_empty() || is_long {
        return Err(ApiError::bad("reason", format!("say why, in at most {MAX_REASON} characters")));
    }
    Ok(text.to_owned())
}

/// The reason of a call that has no body.
fn reason_in(query: Query) -> Result<String, ApiError> {
    let given = query.only(&["reason"])?.take("reason");
    given.map_or_else(|| Ok(String::new()), |text| reason_of(&text))
}

fn ban_id(text: &str) -> Result<Digest, ApiError> {
    let id = trace_id(text).map(|id| Digest::from_u128(id.to_u128()));
    id.ok_or_else(|| ApiError::bad("id", "the number of a ban is 32 hexadecimal digits"))
}

fn hexadecimal(id: Digest) -> String {
    format!("{:032x}", id.to_u128())
}

#[cfg(test)]
mod tests {
    use threshold_core::Facts;
    use threshold_core::policy::Layer;
    use threshold_limiter::ManualClock;
    use threshold_limiter::store::at_once;

    use super::*;

    const POLICY: &str = "
        [ladders.l]
        rungs = ['ban 1h']
        [[rule]]
        name = 'r'
        per = ['user']
        limit = '1/h'
        ladder = 'l'
        strike = 'request'
    ";

    /// Operators' bans and ladders' are one list, in pages of any length.
    ///
    /// Woken by: leaving out `truncate`, the sorting, or either `after` in `page`.
    #[test]
    fn pages_of_any_length_list_every_ban_once_and_in_order() {
        let policy = Policy::parse(POLICY, &|_| None).unwrap();
        let limiter = Limiter::with_clock(policy, Arc::new(ManualClock::default()));
        for number in 0..20 {
            let whom = ListEntry::named(Layer::User, &format!("by hand {number}")).unwrap();
            let id = whom.ban_id(limiter.key());
            let until = if number < 5 { limiter.now() } else { Timestamp::MAX };
            let ban = Ban { whom, reason: "r".into(), by: "b".into(), from: limiter.now(), until };
            limiter.bans().set(id, ban, limiter.now()).unwrap();
            for _ in 0..2 {
                let _ = limiter.check(&Facts { user: Some(&format!("u{number}")), ..Facts::default() }).unwrap();
            }
        }
        let page = |after, limit| at_once(page(&limiter, after, limit)).unwrap();
        let whole = page(None, 1_000);
        assert_eq!(whole.len(), 35);
        assert!(whole.is_sorted_by_key(|(id, ..)| *id));
        assert_eq!(whole.iter().filter(|(_, ban, _)| ban.is_none()).count(), 20);
        for limit in [1, 2, 7, 34, 35, 36] {
            let mut listed = Vec::new();
            for _ in 0..100 {
                let next = page(listed.last().map(|(id, ..): &(Digest, _, _)| *id), limit);
                let more = next.len() == limit;
                assert!(next.len() <= limit);
                listed.extend(next);
                if !more {
                    break;
                }
            }
            assert_eq!(listed, whole, "in pages of {limit}");
        }
    }
}
