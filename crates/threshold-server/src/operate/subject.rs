//! `threshold subject`: says why a subject is stopped, and what lifts it.

use std::fmt::Write as _;

use serde_json::Value;

use super::{moment, shown};

/// The digits of a ban's id that commands are suggested with: short enough to type, and unique among half a million.
const ID_DIGITS: usize = 12;

/// Describes the state of a subject or an account.
pub(super) fn describe(subject: &Value) -> String {
    let field = |name: &str| subject.get(name).unwrap_or(&Value::Null);
    let (layer, key) = (shown(field("layer")), shown(field("key")));
    let mut text = format!("{layer} {key}\n");
    if !field("digest").is_null() {
        let digest = shown(field("digest"));
        let place = if layer == "account" { "threshold locks list" } else { "the server's log" };
        let _ = writeln!(text, "digest {digest} (in {place})");
    }
    let reasons = reasons(subject);
    if reasons.is_empty() {
        text.push_str("\nNothing stops it now.\n");
    } else {
        text.push_str("\nStopped by:\n");
    }
    for (reason, lift) in &reasons {
        let _ = writeln!(text, "  {reason}");
        let _ = writeln!(text, "      to lift: {lift}");
    }
    // Neither the subject nor a log of its answers shows it, so an operator finds out here or nowhere.
    if field("shadowBanned") == &Value::Bool(true) {
        let _ = writeln!(text, "\nShadow banned: requests that are allowed are delayed");
        let _ = writeln!(text, "      to lift: {}", forgive(subject));
    }
    text.push_str(&ladder_lines(field("ladders")));
    text.push_str(&budget_lines(field("budgets")));
    text
}

/// Returns why a subject is stopped, each with what lifts it.
fn reasons(subject: &Value) -> Vec<(String, String)> {
    let field = |name: &str| subject.get(name).unwrap_or(&Value::Null);
    let forgive = forgive(subject);
    let mut reasons = Vec::new();
    if let Some(listed) = field("listed").as_object().filter(|listed| listed.get("list") == Some(&"deny".into())) {
        let entry = shown(listed.get("key").unwrap_or(&Value::Null));
        reasons.push((format!("the policy's deny list: {entry}"), "remove the entry from the policy".to_owned()));
    }
    for ban in items(field("bans")) {
        let own = |name: &str| ban.get(name).unwrap_or(&Value::Null);
        let from =
            // The API writes a start that is not known as 0.
            if own("from").as_u64() == Some(0) { String::new() } else { format!(" since {}", moment(own("from"))) };
        let reason = format!(
            "ban {} on {} {}: {} (by {}{from}, {})",
            prefix(own("id")),
            shown(own("layer")),
            shown(own("key")),
            shown(own("reason")),
            shown(own("by")),
            end(own("until")),
        );
        let lift = format!("threshold bans lift {}", prefix(own("id")));
        // Lifting such a ban works until the list is imported again. An operator must know that before.
        let again = own("by").as_str().is_some_and(|by| by.starts_with("origin "));
        reasons.push((reason, if again { format!("{lift} (its next import sets it again)") } else { lift }));
    }
    for ladder in items(field("ladders")) {
        let own = |name: &str| ladder.get(name).unwrap_or(&Value::Null);
        let (name, until) = (shown(own("ladder")), end(own("until")));
        match own("penalty").as_str() {
            Some("ban") => {
                let reason = own("reason");
                let reason = if reason.is_null() { String::new() } else { format!(": {}", shown(reason)) };
                let id = prefix(own("id"));
                reasons.push((
                    format!("ban {id} by the ladder {name}{reason} ({until})"),
                    format!("threshold bans lift {id}"),
                ));
            }
            Some(_) => reasons.push((format!("a cool-down of the ladder {name} ({until})"), forgive.clone())),
            None => {}
        }
    }
    if !field("pausedUntil").is_null() {
        let until = end(field("pausedUntil"));
        reasons.push((format!("a pause, or a rule's block_for ({until})"), forgive.clone()));
    }
    for budget in items(field("budgets")).filter(|budget| is_full(budget) && !observes(budget)) {
        let (rule, figures) = (budget_name(budget), figures(budget));
        if !own_why(budget).is_null() {
            // Where something is used, requests bring a tier.
            if budget.get("used").and_then(Value::as_u64) == Some(0) {
                let lift = "give it a tier, send one with its requests, or write default_tier in the policy".to_owned();
                reasons.push((format!("the rule {rule}: {figures}"), lift));
            }
            continue;
        }
        if denies(budget) {
            let lift = "change the policy, or raise the limits of its tier".to_owned();
            reasons.push((format!("the rule {rule}: {figures}"), lift));
            continue;
        }
        // That of an address for logins is in no rule.
        let place = if rule.starts_with("[login]") { "" } else { "the rule " };
        reasons.push((format!("the budget of {place}{rule}: {figures}"), forgive.clone()));
    }
    reasons.extend(account_reason(subject).map(|reason| (reason, forgive_as("account", subject))));
    reasons
}

/// Returns the command that forgives a subject.
fn forgive(subject: &Value) -> String {
    forgive_as(&shell_word(subject.get("layer").unwrap_or(&Value::Null)), subject)
}

fn forgive_as(layer: &str, subject: &Value) -> String {
    let key = operand(subject.get("key").unwrap_or(&Value::Null));
    // What follows `--` is no option.
    if key.starts_with("-- ") {
        return format!("threshold subject {layer} --forgive {key}");
    }
    format!("threshold subject {layer} {key} --forgive")
}

fn account_reason(subject: &Value) -> Option<String> {
    let field = |name: &str| subject.get(name).unwrap_or(&Value::Null);
    let failures = shown(field("failures"));
    if field("atCeiling") == &Value::Bool(true) {
        return Some(format!("the ceiling of failed logins: {failures} failures (until it is lifted or reset)"));
    }
    let until = field("lockedUntil");
    (!until.is_null()).then(|| format!("a lock after {failures} failed logins ({})", end(until)))
}

fn ladder_lines(ladders: &Value) -> String {
    let mut text = String::new();
    for ladder in items(ladders) {
        let own = |name: &str| ladder.get(name).unwrap_or(&Value::Null);
        let forgotten = own("forgottenAt");
        let until = if forgotten.is_null() { String::new() } else { format!(", forgotten at {}", moment(forgotten)) };
        let _ = writeln!(
            text,
            "  {}: {} strikes{until}; the next one: {}",
            shown(own("ladder")),
            shown(own("strikes")),
            shown(own("next")),
        );
    }
    if text.is_empty() { text } else { format!("\nStrikes:\n{text}") }
}

fn budget_lines(budgets: &Value) -> String {
    let rows: Vec<(String, String)> = items(budgets).map(|budget| (budget_name(budget), figures(budget))).collect();
    let width = rows.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    let lines: String = rows.iter().map(|(name, figures)| format!("  {name:<width$}  {figures}\n")).collect();
    if lines.is_empty() { lines } else { format!("\nBudgets, used / limit:\n{lines}") }
}

fn budget_name(budget: &Value) -> String {
    let rule = shown(budget.get("rule").unwrap_or(&Value::Null));
    let category = budget.get("category").filter(|category| !category.is_null());
    category.map_or(rule.clone(), |category| format!("{rule} ({})", shown(category)))
}

/// Returns the use of a budget: `3 / 10 (10/h), frees at 2026-11-16T12:00:00Z`.
fn figures(budget: &Value) -> String {
    let own = |name: &str| budget.get(name).unwrap_or(&Value::Null);
    if !own_why(budget).is_null() {
        let used = own("used").as_u64().filter(|used| *used > 0);
        let used = used.map_or_else(String::new, |used| format!("; {used} used by requests that named a tier"));
        let observes = if observes(budget) { "; observes, and stops nobody" } else { "" };
        return format!("{}{used}{observes}", shown(own_why(budget)));
    }
    if denies(budget) {
        let stops = if observes(budget) { "would deny all; observes, and stops nobody" } else { "denies all" };
        return format!("{stops} ({})", shown(own("notation")));
    }
    let free = own("freeAt");
    let free = if free.is_null() { String::new() } else { format!(", frees at {}", moment(free)) };
    let observes = if observes(budget) { "; observes, and stops nobody" } else { "" };
    format!("{} / {} ({}){free}{observes}", shown(own("used")), shown(own("limit")), shown(own("notation")))
}

/// Returns why a rule does not count a subject without a tier.
fn own_why(budget: &Value) -> &Value {
    budget.get("why").unwrap_or(&Value::Null)
}

fn observes(budget: &Value) -> bool {
    budget.get("mode").and_then(Value::as_str) == Some("observe")
}

/// Whether the limit is `none`, or the rule has `deny = true`: nothing of it can be used, and nothing is given back.
fn denies(budget: &Value) -> bool {
    budget.get("limit").and_then(Value::as_u64) == Some(0)
}

fn is_full(budget: &Value) -> bool {
    let number = |name: &str| budget.get(name).and_then(Value::as_u64);
    number("used").zip(number("limit")).is_some_and(|(used, limit)| used >= limit)
}

fn items(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().into_iter().flatten()
}

fn end(until: &Value) -> String {
    if until.is_null() { "for good".to_owned() } else { format!("until {}", moment(until)) }
}

fn prefix(id: &Value) -> String {
    shown(id).chars().take(ID_DIGITS).collect()
}

/// Writes a name for the end of a command: after `--`, if it begins with a dash and would be an option.
///
/// It is quoted for a shell, because an operator copies it: a client may have chosen the name so that it runs a command.
pub(super) fn operand(name: &Value) -> String {
    let word = shell_word(name);
    if word.trim_start_matches('\'').starts_with('-') { format!("-- {word}") } else { word }
}

/// Quotes a word for a shell, if it has to be.
fn shell_word(value: &Value) -> String {
    let text = shown(value);
    let is_plain =
        |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | ':' | '/' | '@' | '%' | '+' | ',');
    if !text.is_empty() && text.chars().all(is_plain) { text } else { format!("'{}'", text.replace('\'', "'\\''")) }
}
