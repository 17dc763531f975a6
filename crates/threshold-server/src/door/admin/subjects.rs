//! One subject as operators look it up: by a layer and a key, or an account by its name.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::response::Response;
use http::StatusCode;
use schemars::JsonSchema;
use serde::Serialize;
use threshold_core::lockout::account_digest;
use threshold_core::policy::{Layer, ListEntry};
use threshold_core::{Standing, Timestamp};
use threshold_limiter::store::StoreError;

use super::audit::{Change, audit, moment};
use super::operator::{Operator, Query, Reader};
use super::{BanBody, ChangedBody, reason_in, saved};
use crate::door::http::layer_named;
use crate::door::{ApiError, App, json};

/// What a login's account is called among the layers.
const ACCOUNT: &str = "account";

/// How it stands with a subject.
#[derive(Debug, Default, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "Subject")]
pub(in crate::door) struct SubjectBody {
    layer: String,
    key: String,
    /// Strikes that still count, the most of any ladder.
    strikes: u32,
    shadow_banned: bool,
    /// Until when a ladder's cool-down or ban denies it, in Unix seconds.
    denied_until: Option<u64>,
    /// Until when a pause, or a rule's `block_for`, denies it under one of its limits at least.
    paused_until: Option<u64>,
    /// Until when a ladder has banned it.
    banned_until: Option<u64>,
    /// The operators' own ban on it, if there is one.
    ban: Option<BanBody>,
    /// Of an account: failures in a row of devices that are not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    failures: Option<u32>,
    /// Of an account: until when it is locked for them; null if it is not, or for good, at the ceiling.
    #[serde(skip_serializing_if = "Option::is_none")]
    locked_until: Option<u64>,
    /// Of an account: whether it has reached the ceiling.
    #[serde(skip_serializing_if = "Option::is_none")]
    at_ceiling: Option<bool>,
}

impl SubjectBody {
    /// What there is to forgive, for the audit.
    fn in_words(&self) -> String {
        let until = |what: &str, until: Option<u64>| {
            until.map(|until| format!("{what} until {}", moment(Timestamp::from_secs(until))))
        };
        let failures = self.failures.filter(|failures| *failures > 0).map(|failures| format!("{failures} failures"));
        let all = [
            (self.strikes > 0).then(|| format!("{} strikes", self.strikes)),
            self.shadow_banned.then(|| "shadow ban".to_owned()),
            until("denied", self.denied_until.filter(|_| self.denied_until != self.banned_until)),
            until("paused", self.paused_until),
            until("banned", self.banned_until),
            failures,
            until("locked", self.locked_until),
            self.at_ceiling.filter(|at_ceiling| *at_ceiling).map(|_| "at the ceiling".to_owned()),
        ];
        let all: Vec<String> = all.into_iter().flatten().collect();
        if all.is_empty() { "what it has used".to_owned() } else { all.join(", ") }
    }
}

/// A layer, or an account.
enum Named {
    Layer(Layer),
    Account,
}

pub(super) async fn show(
    _: Reader,
    State(app): State<Arc<App>>,
    Path((layer, key)): Path<(String, String)>,
) -> Result<Response, ApiError> {
    let body = match named(&layer, &key)? {
        Named::Layer(own) => subject(&app, own, layer, key).await?,
        Named::Account => account(&app, layer, key).await?,
    };
    Ok(json(StatusCode::OK, &body))
}

pub(super) async fn forgive(
    operator: Operator,
    State(app): State<Arc<App>>,
    Path((layer, key)): Path<(String, String)>,
    query: Query,
) -> Result<Response, ApiError> {
    let reason = reason_in(query)?;
    let named = named(&layer, &key)?;
    let before = match named {
        Named::Layer(own) => subject(&app, own, layer.clone(), key.clone()).await?,
        Named::Account => account(&app, layer.clone(), key.clone()).await?,
    };
    let action = format!("forgive: {}", before.in_words());
    audit(&app, &operator.0, &Change { action, layer: &layer, key: &key, why: &reason })?;
    let limiter = &app.desk.limiter;
    match named {
        Named::Layer(layer) => {
            for subject in limiter.policy().keys_of(layer, &key).standings {
                limiter.bans().forget_name(subject);
            }
            limiter.forgive_async(layer, &key).await?;
        }
        Named::Account => limiter.pardon_account_async(&key).await?,
    }
    saved(&app).await?;
    Ok(json(StatusCode::OK, &ChangedBody { ok: true }))
}

fn named(layer: &str, key: &str) -> Result<Named, ApiError> {
    if key.trim().is_empty() {
        return Err(ApiError::bad("key", "the key is empty"));
    }
    if layer == ACCOUNT {
        return Ok(Named::Account);
    }
    let layer = layer_named(layer).ok_or_else(|| ApiError::bad("layer", format!("no layer is called \"{layer}\"")))?;
    if layer == Layer::Edge && threshold_core::address::parse_address(key).is_none() {
        return Err(ApiError::bad("key", format!("\"{key}\" is not an address")));
    }
    Ok(Named::Layer(layer))
}

async fn subject(app: &App, own: Layer, layer: String, key: String) -> Result<SubjectBody, StoreError> {
    let limiter = &app.desk.limiter;
    let (policy, now) = (limiter.policy(), limiter.now());
    let keys = policy.keys_of(own, &key);
    let mut standings: Vec<Standing> = Vec::new();
    for key in &keys.standings {
        standings.extend(limiter.standing(*key).await?);
    }
    let blocked_until = limiter.blocked_until(keys).await?;
    let later = |until: Option<Timestamp>| until.filter(|until| *until > now).map(Timestamp::secs_ceil);
    // A single IPv6 address is meant by its prefix, and may be banned by itself too.
    let named = [policy.ban_target(own, &key), ListEntry::named(own, &key)];
    let ban = named.into_iter().flatten().find_map(|whom| {
        let id = whom.ban_id(limiter.key());
        let ban = limiter.bans().one(id, now)?;
        Some(BanBody::new(id, Some(&ban), ban.until, &policy))
    });
    Ok(SubjectBody {
        layer,
        key,
        strikes: standings.iter().map(|standing| standing.strikes(now)).max().unwrap_or(0),
        shadow_banned: standings.iter().any(|standing| standing.is_shadowed(now)),
        denied_until: later(standings.iter().map(Standing::denied_until).max()),
        paused_until: later(Some(blocked_until)),
        banned_until: later(standings.iter().filter_map(Standing::banned_until).max()),
        ban,
        ..SubjectBody::default()
    })
}

async fn account(app: &App, layer: String, key: String) -> Result<SubjectBody, StoreError> {
    let limiter = &app.desk.limiter;
    let (policy, now) = (limiter.policy(), limiter.now());
    let login = policy.login().cloned().unwrap_or_default();
    let known = match account_digest(limiter.key(), &key) {
        Some(digest) => limiter.account(digest).await?,
        None => None,
    };
    let account = known.unwrap_or_default();
    let locked = account.locked_until(&login, now);
    Ok(SubjectBody {
        layer,
        key,
        failures: Some(account.failures(now)),
        locked_until: locked.and_then(Timestamp::unless_never).map(Timestamp::secs_ceil),
        at_ceiling: Some(locked == Some(Timestamp::MAX)),
        ..SubjectBody::default()
    })
}
