//! `threshold why`: explains a past decision from its event.

use std::fmt::Write as _;

use serde_json::Value;
use threshold_core::Span;

use super::subject::shell_word;
use super::{columns, moment, shown};

/// What a trace id without an event may mean.
pub(super) const NOT_FOUND: &str = "\
no event has this trace id
The request was allowed (denials, warnings and strikes are recorded, others with --events-sample), or is counted in an event of equal ones (above 1,000 in a \
second), or its event was deleted (--events-keep, --events-size) or is on another server.
";

/// Describes an event.
pub(super) fn describe(event: &Value) -> String {
    let field = |name: &str| event.get(name).unwrap_or(&Value::Null);
    let mut text = format!("{}\n{}, trace {}\n\n", caller(event), millis(field("at")), shown(field("traceId")));
    let count = field("count").as_u64().unwrap_or(1);
    if count > 1 {
        let _ = writeln!(text, "The first of {count} equal decisions, which are recorded together.");
    }
    let _ = writeln!(text, "{}", decided(event));
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
        for (name, state) in [("shadowUntil", "shadow banned"), ("bannedUntil", "banned")] {
            if !field(name).is_null() {
                let _ = write!(text, " It is {state} until {}.", millis(field(name)));
            }
        }
        text.push('\n');
    }
    let _ = writeln!(text, "\n{}", remedy(event));
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

fn decided(event: &Value) -> String {
    let field = |name: &str| event.get(name).unwrap_or(&Value::Null);
    let (rule, layer, verdict) = (field("rule"), shown(field("layer")), field("verdict").as_str().unwrap_or_default());
    if field("blocked") != &Value::Bool(true) {
        let by = if rule.is_null() { String::new() } else { format!(" by the rule {}", shown(rule)) };
        return match verdict {
            "warn" => format!("It was let through with a warning{by}."),
            _ if field("strikes").is_null() => "It was allowed.".to_owned(),
            _ => format!("It was let through, and struck{by}."),
        };
    }
    match (rule.is_null(), field("layer").is_null()) {
        (false, _) if verdict == "ban" => {
            format!("It was denied, and its subject banned, by the rule {} (layer {layer}).", shown(rule))
        }
        (false, _) => format!("It was denied by the rule {} (layer {layer}).", shown(rule)),
        (true, false) => {
            format!("It was denied by a ban, a pause or a cool-down on the layer {layer}, whatever its limits were.")
        }
        (true, true) => "It was denied by a list of the policy, or by a ban.".to_owned(),
    }
}

/// Returns what the caller, or an operator for it, can do.
fn remedy(event: &Value) -> String {
    let field = |name: &str| event.get(name).unwrap_or(&Value::Null);
    if field("blocked") != &Value::Bool(true) {
        return "It had to do nothing.".to_owned();
    }
    let (layer, name) = match field("layer").as_str() {
        Some("user") => ("user", field("userId")),
        Some("tenant") => ("tenant", field("tenant")),
        _ => ("edge", field("ip")),
    };
    // Quoted for a shell, because an operator copies it. A digest cannot be looked up.
    let name = match name.as_str().filter(|name| !name.starts_with('#')) {
        Some(_) => shell_word(name),
        None => "NAME".to_owned(),
    };
    let look = format!("threshold subject {layer} {name}");
    if !field("bannedUntil").is_null() || field("rule").is_null() {
        return format!("{look}\n    shows its bans and penalties, and how to lift them.");
    }
    let own = items(field("limits")).iter().find(|limit| limit.get("rule") == Some(field("rule")));
    let figure = |name: &str| own.and_then(|limit| limit.get(name)).filter(|value| !value.is_null());
    let wait = match (figure("retryAfter"), figure("resetAt")) {
        (Some(wait), Some(at)) => format!("The same request fitted after {} s, at {}.", shown(wait), moment(at)),
        _ if own.is_some() => "The same request never fits: its cost is more than the limit.".to_owned(),
        _ => "Its event has no figures.".to_owned(),
    };
    format!("{wait}\n{look}\n    shows its state now; --forgive gives back what it has used.")
}

fn limit_row(limit: &Value) -> Vec<String> {
    let field = |name: &str| limit.get(name).unwrap_or(&Value::Null);
    let fits = if field("allowed") == &Value::Bool(true) { "yes" } else { "no" };
    let reset = if field("resetAt").is_null() { "never".to_owned() } else { moment(field("resetAt")) };
    let per = match field("periodMs").as_u64() {
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

/// Formats a time in milliseconds.
fn millis(value: &Value) -> String {
    let at = value.as_i64().and_then(|millis| jiff::Timestamp::from_millisecond(millis).ok());
    at.map_or_else(|| shown(value), |at| at.to_string())
}
