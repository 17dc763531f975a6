//! `threshold why`: explains a past decision from its event.

use std::fmt::Write as _;

use serde_json::Value;
use threshold_core::Span;
use threshold_core::policy::UserScope;

use super::subject::operand;
use super::{columns, millis, moment, shown};

/// What a trace id without an event may mean.
pub(super) const NOT_FOUND: &str = "\
no event has this trace id
The request was allowed (denials, warnings and strikes are recorded, others with --events-sample), or is counted in an event of equal ones (above 1,000 in a \
second), or its event was deleted (--events-keep, --events-size) or is on another server. \
A request that could not be counted, such as one whose cost is above its limit, is in the log only.
If the request was allowed and took seconds, its caller may be shadow banned: threshold subject user NAME shows that.
";

/// Describes an event, as it looks at `now`. `scope` is the server's: commands name users by it.
pub(super) fn describe(event: &Value, scope: UserScope, now: jiff::Timestamp) -> String {
    let field = |name: &str| event.get(name).unwrap_or(&Value::Null);
    let mut text = format!("{}\n{}, trace {}\n\n", caller(event), millis(field("at")), shown(field("traceId")));
    let count = field("count").as_u64().unwrap_or(1);
    if count > 1 {
        let _ = writeln!(text, "The first of {count} equal decisions, which are recorded together.");
    }
    let _ = writeln!(text, "{}", decided(event, now));
    if let Some(degraded) = degraded(event) {
        let _ = writeln!(text, "{degraded}");
    }
    let limits = items(field("limits"));
    if !limits.is_empty() {
        text.push_str("\nIts limits at that moment:\n\n");
        text.push_str(&columns(
            &["RULE", "LAYER", "MODE", "FITS", "REMAINING", "COST", "RESET", "LIMIT"],
            limits,
            limit_row,
        ));
    }
    if let Some(strikes) = field("strikes").as_u64() {
        let _ = write!(text, "\nStrike {strikes} of {}.", shown(field("subject")));
        if field("bannedUntil").is_null() {
            text.push_str(
                " It may have brought a cool-down, which lasts longer than the limit: threshold subject shows it.",
            );
        }
        for (name, state) in [("shadowUntil", "shadow banned"), ("bannedUntil", "banned")] {
            if !field(name).is_null() {
                let is = if is_ahead(field(name), now) { "is" } else { "was" };
                let _ = write!(text, " It {is} {state} until {}.", millis(field(name)));
            }
        }
        text.push('\n');
    }
    let _ = writeln!(text, "\n{}", remedy(event, scope, now));
    text
}

/// Returns who called what.
fn caller(event: &Value) -> String {
    let names = [("endpoint", ""), ("userId", "user "), ("tenant", "tenant "), ("ip", "address ")];
    let known = names.iter().filter_map(|(name, word)| {
        let value = event.get(*name).filter(|value| !value.is_null())?;
        Some(format!("{word}{}", shown(value)))
    });
    let known: Vec<String> = known.collect();
    if known.is_empty() { "a caller without a name".to_owned() } else { known.join(", ") }
}

fn decided(event: &Value, now: jiff::Timestamp) -> String {
    let field = |name: &str| event.get(name).unwrap_or(&Value::Null);
    let (rule, layer, verdict) = (field("rule"), shown(field("layer")), field("verdict").as_str().unwrap_or_default());
    if field("blocked") != &Value::Bool(true) {
        let by = if rule.is_null() { String::new() } else { format!(" by the rule {}", shown(rule)) };
        return match verdict {
            "warn" => format!("It was let through with a warning{by}."),
            "slow" => "It was allowed and delayed, because its caller was shadow banned.".to_owned(),
            _ if field("strikes").is_null() => "It was allowed.".to_owned(),
            _ => format!("It was let through, and struck{by}."),
        };
    }
    let end = end(field("until"), now);
    match (field("cause").as_str(), verdict) {
        (Some("missing"), _) => format!(
            "It was denied by the rule {} (layer {layer}): it lacks an identity that the rule counts by, or a tier of the policy.",
            shown(rule)
        ),
        (Some("ban"), _) => format!("It was denied by an operator's ban (layer {layer}), {end}."),
        (Some("ladder"), "ban") => {
            format!("It was denied by a ladder's ban (layer {layer}), which earlier strikes had brought, {end}.")
        }
        (Some("ladder"), _) => {
            format!("It was denied by a ladder's cool-down (layer {layer}), which earlier strikes had brought, {end}.")
        }
        (Some("pause"), _) => {
            format!("It was denied by a pause of the layer {layer}, under the rule {}, {end}.", shown(rule))
        }
        (Some("list"), _) => "It was denied by a deny list of the policy.".to_owned(),
        (Some("outage"), _) => outage(event),
        (Some("login"), _) if layer == "edge" => {
            format!("The login was refused: its address had made too many attempts, {end}.")
        }
        (Some("login"), _) if field("until").is_null() => {
            "The login was refused: its account was locked by too many failures, without an end.".to_owned()
        }
        (Some("login"), _) => format!("The login was refused: its account was locked, {end}."),
        _ if rule.is_null() => "It was denied. Its event does not say by what.".to_owned(),
        (_, "ban") => format!("It was denied, and its subject banned, by the rule {} (layer {layer}).", shown(rule)),
        _ => format!("It was denied by the rule {} (layer {layer}).", shown(rule)),
    }
}

/// Returns why an outage denied a request.
fn outage(event: &Value) -> String {
    let field = |name: &str| event.get(name).unwrap_or(&Value::Null);
    let what = match field("degraded").as_str() {
        Some("store_full") => "The store had no room for another key, and then a request is denied".to_owned(),
        reason => {
            let rule = field("rule");
            let rule = if rule.is_null() { "its policy".to_owned() } else { format!("the rule {}", shown(rule)) };
            let failed = if reason == Some("store_timeout") { "did not answer in time" } else { "could not answer" };
            format!("The store {failed}, and {rule} denies then (on_store_error)")
        }
    };
    format!("{what}. The caller did nothing wrong.")
}

/// Returns how a decision that was not denied by an outage was degraded.
fn degraded(event: &Value) -> Option<&'static str> {
    let field = |name: &str| event.get(name).unwrap_or(&Value::Null);
    match (field("cause").as_str(), field("degraded").as_str()?) {
        (Some("outage"), _) => None,
        (_, "shared_budget") => {
            Some("The store had no room for a new key, so it was counted by a budget that many callers share.")
        }
        (Some("limit") | None, "store_timeout" | "store_error") if !items(field("limits")).is_empty() => {
            Some("The store did not answer: this node decided by its own share of each limit.")
        }
        (None, "store_timeout" | "store_error") => Some("The store did not answer, and its rules allow requests then."),
        _ => None,
    }
}

/// Returns when something ends, or has ended.
fn end(until: &Value, now: jiff::Timestamp) -> String {
    match until {
        Value::Null => "without an end".to_owned(),
        until if is_ahead(until, now) => format!("until {}", millis(until)),
        until => format!("which ended at {}", millis(until)),
    }
}

/// Returns what the caller, or an operator for it, can do.
fn remedy(event: &Value, scope: UserScope, now: jiff::Timestamp) -> String {
    let field = |name: &str| event.get(name).unwrap_or(&Value::Null);
    if field("verdict") == "slow" {
        return shadow_remedy(event, scope);
    }
    if field("blocked") != &Value::Bool(true) {
        return "Nothing has to be done.".to_owned();
    }
    let layer = field("layer").as_str();
    let look = lookups(event, layer, scope);
    match field("cause").as_str() {
        Some("ban") => return format!("{look}    shows the ban's id and reason, and how to lift it."),
        Some("missing") => {
            return "Its caller must send what it lacks, or the policy needs default_tier, or another on_missing in this rule.\n\
                    Compare the tier that it sends with the names of the policy's [tiers]: they are compared exactly, with their case. \
                    The event does not have it.\n\
                    threshold explain --server URL    with what the request says, says which it lacks."
                .to_owned();
        }
        // The event does not say whether the entry names its user, its tenant or its address.
        Some("list") => return format!("{}    shows the entry.", lookups(event, None, scope)),
        Some("outage") => return "threshold health --ready\n    shows whether the store answers now.".to_owned(),
        Some("login") if layer == Some("user") => {
            let account = field("userId").as_str().map(|name| user_key(event, name, scope));
            let look = format!("threshold subject account {}", account.map_or("NAME".to_owned(), |key| operand(&key)));
            return format!("{look}\n    shows its failures and its lock; --forgive unlocks it.");
        }
        Some("login") => return "Other addresses can log in to the same account.".to_owned(),
        _ => {}
    }
    if field("cause") == "pause" {
        // What a rule counts need not be a subject.
        return format!(
            "{look}    shows its bans and penalties, and how to lift them. Where the rule counts by something else, POST /v1/forgive with \
             {{rule, request}} ends the pause."
        );
    }
    if field("cause") == "ladder" || !field("bannedUntil").is_null() || field("rule").is_null() {
        return format!("{look}    shows its bans and penalties, and how to lift them.");
    }
    let own = items(field("limits")).iter().find(|limit| limit.get("rule") == Some(field("rule")));
    let figure = |name: &str| own.and_then(|limit| limit.get(name)).filter(|value| !value.is_null());
    let wait = match (figure("retryAfter"), figure("resetAt")) {
        (Some(wait), Some(at)) => {
            let is_ahead = at.as_i64().is_some_and(|at| at > now.as_second());
            let fits = if is_ahead { "fits" } else { "fitted" };
            // Its own limit is all that the event knows: others may have been charged since, or a penalty begun.
            let wait = shown(wait);
            format!(
                "Unless more was charged or a penalty began since, the same request {fits} after {wait} s, at {}.",
                moment(at)
            )
        }
        _ if own.is_some_and(denies_all) => {
            // Nothing is used up, and nothing can be given back.
            return "The rule denies every request that it matches: only a change of the policy, or of the caller's tier, allows the same \
                    request."
                .to_owned();
        }
        _ if own.is_some() => "The same request never fits: its cost is more than the limit.".to_owned(),
        _ => "Its event has no figures.".to_owned(),
    };
    if layer == Some("global") {
        return format!("{wait}\nAll callers share the budget of this rule.");
    }
    format!("{wait}\n{look}    shows its state now; --forgive gives back what it has used.")
}

/// Returns how to end a shadow ban. An event without a strike does not say whose it is.
fn shadow_remedy(event: &Value, scope: UserScope) -> String {
    format!(
        "{}    shows whether it is shadow banned now, and its strikes; --forgive ends that.",
        lookups(event, None, scope)
    )
}

/// Returns the commands that look up the subject of a layer, each on a line: the caller by every name that it has, where the layer does
/// not say which one is counted.
fn lookups(event: &Value, layer: Option<&str>, scope: UserScope) -> String {
    let names = [("user", "userId"), ("tenant", "tenant"), ("edge", "ip")];
    let known: Vec<_> =
        names.iter().filter_map(|(own, field)| Some((*own, event.get(*field).and_then(Value::as_str)?))).collect();
    // A request without a user is counted by its address under the rules of users.
    let of_layer = known.iter().filter(|(own, _)| Some(*own) == layer).collect::<Vec<_>>();
    let all = if of_layer.is_empty() { known.iter().collect() } else { of_layer };
    if all.is_empty() {
        return "threshold subject LAYER NAME\n".to_owned();
    }
    let lookup = |(layer, name): &(&str, &str)| {
        let key = if *layer == "user" { user_key(event, name, scope) } else { (*name).into() };
        format!("threshold subject {layer} {}\n", operand(&key))
    };
    all.into_iter().map(lookup).collect()
}

/// Returns the key of an event's user or account. An event has its tenant apart.
fn user_key(event: &Value, name: &str, scope: UserScope) -> Value {
    scope.write(event.get("tenant").and_then(Value::as_str), name).into()
}

/// Returns whether a time in milliseconds is still to come.
fn is_ahead(at: &Value, now: jiff::Timestamp) -> bool {
    at.as_i64().is_some_and(|at| at > now.as_millisecond())
}

/// Whether a limit is `none`, or its rule has `deny = true`.
fn denies_all(limit: &Value) -> bool {
    limit.get("limit").and_then(Value::as_u64) == Some(0)
}

fn limit_row(limit: &Value) -> Vec<String> {
    let field = |name: &str| limit.get(name).unwrap_or(&Value::Null);
    let fits = if field("allowed") == &Value::Bool(true) { "yes" } else { "no" };
    let reset = if field("resetAt").is_null() { "never".to_owned() } else { moment(field("resetAt")) };
    let per = match field("periodMs").as_u64() {
        _ if denies_all(limit) => "denies all".to_owned(),
        Some(period) => format!("{} per {}", shown(field("limit")), Span::from_millis(period)),
        None => format!("{} at once", shown(field("limit"))),
    };
    let [rule, layer, mode, remaining, cost] =
        ["rule", "layer", "mode", "remaining", "cost"].map(|name| shown(field(name)));
    vec![rule, layer, mode, fits.to_owned(), remaining, cost, reset, per]
}

fn items(list: &Value) -> &[Value] {
    list.as_array().map_or(&[], Vec::as_slice)
}
