//! `/v1/login/attempt` and `/v1/login/result` of a Worker.
//!
//! The token of an attempt also names the objects that it was counted in: the result may reach another isolate, which has
//! never seen the account and cannot find its object by the digest alone.

use serde_json::Value;
use threshold_core::lockout::{Attempt, Refusal, RefusedBy};
use threshold_core::secret::Purpose;
use threshold_core::{Digest, Policy, Secrets};
use threshold_limiter::{Attempted, LoginError, LoginRequest};
use threshold_wire::{ApiError, AttemptAnswer, AttemptBody, ResultAnswer, ResultBody};
use worker::js_sys;

use super::Reply;
use crate::guard::ObjectLimiter;
use crate::store::ObjectStore;
use crate::warnings::Warnings;

/// Answers `/v1/login/attempt`.
pub(super) async fn attempt(limiter: &ObjectLimiter, secrets: &Secrets, body: &[u8]) -> Result<Reply, ApiError> {
    let body = AttemptBody::read(body)?;
    let request = body.request();
    let attempted = match limiter.login_attempt_async(&request).await? {
        Attempted::Allowed(token) => Attempted::Allowed(with_places(limiter.store(), secrets, &token)?),
        Attempted::Refused(refusal) => {
            log_refusal(&limiter.policy(), &request, &refusal);
            Attempted::Refused(refusal)
        }
    };
    let answer = AttemptAnswer::from(attempted);
    Ok(Reply { status: answer.status(), retry_after: answer.retry_after(), body: answer.to_json().into_bytes() })
}

/// Answers `/v1/login/result`.
pub(super) async fn result(limiter: &ObjectLimiter, secrets: &Secrets, body: &[u8]) -> Result<Reply, ApiError> {
    let body = ResultBody::read(body)?;
    let token = learn_places(limiter.store(), secrets, body.attempt()).ok_or(LoginError::NotOurs)?;
    let ended = limiter.login_result_async(&token, body.success()).await?;
    Ok(Reply::new(200, ResultAnswer::from(ended).to_json().into_bytes()))
}

thread_local! {
    // A guesser must not decide how long the log is.
    static ADDRESSES: Warnings = Warnings::default();
    static LOCKOUTS: Warnings = Warnings::default();
}

/// Logs that an address has attempted too many logins, or that an attempt met a locked account.
fn log_refusal(policy: &Policy, request: &LoginRequest<'_>, refusal: &Refusal) {
    let shown = |name: String| if policy.identity().log_identifiers { name } else { policy.key().redact(&name) };
    let ip = request.ip.map(|ip| shown(ip.to_canonical().to_string()));
    let timestamp = String::from(js_sys::Date::new_0().to_iso_string());
    match refusal.by {
        RefusedBy::Address => ADDRESSES.with(|warnings| {
            warnings.warn(|| serde_json::json!({"event": "auth_ip_rate_limit", "ip": ip, "timestamp": timestamp}));
        }),
        RefusedBy::Lock | RefusedBy::Ceiling => LOCKOUTS.with(|warnings| {
            let username = request.account.map(|name| shown(name.to_owned()));
            let event = "auth_user_lockout";
            warnings
                .warn(|| serde_json::json!({"event": event, "username": username, "ip": ip, "timestamp": timestamp}));
        }),
        // Penalties are logged when they begin.
        RefusedBy::CoolDown | RefusedBy::Ban => {}
    }
}

/// Returns a signed token of an attempt and of the objects with its account and its address.
fn with_places(store: &ObjectStore, secrets: &Secrets, token: &str) -> Result<String, LoginError> {
    let attempt = Attempt::from_token(token, secrets).map_err(|_| LoginError::NotOurs)?;
    let place = |key: Option<Digest>| key.and_then(|key| store.named(key));
    let (account, address) = (place(attempt.account), place(attempt.address));
    let bytes = serde_json::json!([token, account, address]).to_string();
    Ok(secrets.present().seal(Purpose::PlacedAttempt, bytes.as_bytes()))
}

/// Verifies a token of [`with_places`] and tells the store which objects it names. Returns the token of the attempt.
fn learn_places(store: &ObjectStore, secrets: &Secrets, token: &str) -> Option<String> {
    let bytes = secrets.open(Purpose::PlacedAttempt, token).ok()?;
    let (token, account, address): (String, Value, Value) = {
        let mut parts = serde_json::from_slice::<Vec<Value>>(&bytes).ok()?.into_iter();
        (parts.next()?.as_str()?.to_owned(), parts.next()?, parts.next()?)
    };
    let attempt = Attempt::from_token(&token, secrets).ok()?;
    for (key, place) in [(attempt.account, account), (attempt.address, address)] {
        if let (Some(key), Some(binding), Some(name)) = (key, text(&place, 0), text(&place, 1)) {
            store.learn(key, binding, name.to_owned());
        }
    }
    Some(token)
}

fn text(place: &Value, at: usize) -> Option<&str> {
    place.get(at)?.as_str()
}
