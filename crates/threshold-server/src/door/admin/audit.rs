//! The audit: every change with who made it, what was given and why, in the journal and in the log.

use threshold_core::Timestamp;
use threshold_core::policy::{Layer, Policy, Setting};
use threshold_limiter::journal::AuditLine;

use crate::door::{ApiError, App};

/// One change.
pub(super) struct Change<'a> {
    /// What is done: a word, and behind a colon what is given or taken, with what was there before.
    pub(super) action: String,
    /// Whom it is done to: by layer and key.
    pub(super) layer: &'a str,
    pub(super) key: &'a str,
    pub(super) why: &'a str,
}

/// Writes down a change before it is made: what cannot be written down is not done. Without a journal, the log has it all.
pub(super) fn audit(app: &App, who: &str, change: &Change<'_>) -> Result<(), ApiError> {
    let policy = app.desk.limiter.policy();
    let Change { action, layer, key, why } = change;
    let about = |hides: bool| format!("{layer} {}", shown(&policy, layer, key, hides));
    tracing::info!(
        who,
        action,
        about = about(!policy.identity().log_identifiers),
        why,
        "an operator has changed something"
    );
    let Some(journal) = &app.desk.journal else { return Ok(()) };
    let (at, who, action, why) = (app.desk.limiter.now(), who.to_owned(), action.clone(), (*why).to_owned());
    journal.audit(AuditLine { at, who, action, about: about(false), why }).map_err(|_| ApiError::not_saved())
}

/// Writes down that a subject is paused. Unlike other changes it is made by callers, as often as their providers ask for it:
/// at most ten a second are written down, and a pause holds whether or not it is.
pub(in crate::door) fn audit_pause(app: &App, who: &str, layer: Layer, key: &str, (seconds, until): (u64, Timestamp)) {
    let Some(left_out) = app.desk.pauses.take(app.desk.limiter.now()) else { return };
    let left_out = if left_out > 0 { format!(", {left_out} before it are left out") } else { String::new() };
    let action = format!("pause: {seconds} s, until {}{left_out}", moment(until));
    if audit(app, who, &Change { action, layer: layer.name(), key, why: "" }).is_err() {
        tracing::warn!("a pause could not be written to the journal");
    }
}

/// What somebody was given, in words.
pub(super) fn in_words(setting: Option<&Setting>) -> String {
    let Some(Setting { tier, limits, times, until, .. }) = setting.filter(|setting| !setting.is_empty()) else {
        return "nothing".to_owned();
    };
    let tier = tier.as_ref().map(|tier| format!("tier {tier}"));
    let limits = limits.iter().map(|(category, limit)| format!("{category} {limit}"));
    let times = (*times > 1).then(|| format!("times {times}"));
    let until = until.unless_never().map(|until| format!("until {}", moment(until)));
    tier.into_iter().chain(limits).chain(times).chain(until).collect::<Vec<_>>().join(", ")
}

/// A moment as operators read it, to the second.
pub(super) fn moment(at: Timestamp) -> String {
    let seconds = i64::try_from(at.secs_ceil()).ok();
    let read = seconds.and_then(|seconds| jiff::Timestamp::from_second(seconds).ok());
    read.map_or_else(|| at.secs_ceil().to_string(), |at| at.to_string())
}

/// A key as it may be shown: secret names never, and users, accounts and addresses not in a log that hides them.
fn shown(policy: &Policy, layer: &str, key: &str, hides: bool) -> String {
    let identity = policy.identity();
    let hidden = match layer {
        "user" => hides || identity.secret_user,
        "tenant" => identity.secret_tenant,
        "edge" | "account" => hides,
        _ => false,
    };
    if hidden && !key.starts_with('#') { policy.key().redact(key) } else { key.to_owned() }
}
