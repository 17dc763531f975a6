//! What differs between two policies, rule by rule, in the words of their files.

use std::collections::{BTreeMap, BTreeSet};

use toml::{Table, Value};

/// A longer value, or a longer name, is not quoted.
const MAX_QUOTED: usize = 64;

/// Whether names of tenants are told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tenants {
    /// They are.
    Named,
    /// A policy may declare them secret.
    Unnamed,
}

/// Lists what differs between the texts of two valid policies, such as `rule plan: limit 600/h -> 60/h`.
///
/// Only figures and settings of rules, tiers, ladders, logins, alerts and memory are quoted: identities, lists and users contain secrets
/// and names of people.
#[must_use]
pub fn changes(old: &str, new: &str, tenants: Tenants) -> Vec<String> {
    let (Ok(old), Ok(new)) = (old.parse::<Table>(), new.parse::<Table>()) else { return Vec::new() };
    let mut changes = entries("rule ", &rules(&old), &rules(&new));
    for section in names(&old, &new).into_iter().filter(|section| *section != "rule") {
        let (was, now) = (old.get(section), new.get(section));
        if was == now {
            continue;
        }
        match section {
            "tiers" | "ladders" => changes.extend(entries(&format!("{section}."), &tables(was), &tables(now))),
            "tenants" if tenants == Tenants::Named => {
                changes.extend(entries("tenants.", &tables(was), &tables(now)));
            }
            "login" | "alerts" | "memory" => {
                let empty = Table::new();
                let [was, now] = [was, now].map(|table| table.and_then(Value::as_table).unwrap_or(&empty));
                changes.push(format!("[{section}]: {}", fields(was, now)));
            }
            _ => changes.push(format!("{} changed", quoted(section))),
        }
    }
    changes
}

/// Joins the first changes, and says how many there are beside them.
#[must_use]
pub fn joined(changes: &[String], most: usize, separator: &str) -> String {
    let more = changes.len().saturating_sub(most);
    let more = (more > 0).then(|| format!("{more} more"));
    changes.iter().take(most).cloned().chain(more).collect::<Vec<_>>().join(separator)
}

/// Returns the tables of rules by their names.
fn rules(policy: &Table) -> BTreeMap<&str, &Table> {
    let rules = policy.get("rule").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_table);
    rules.filter_map(|rule| Some((rule.get("name")?.as_str()?, rule))).collect()
}

/// Returns the tables inside of a table by their names.
fn tables(table: Option<&Value>) -> BTreeMap<&str, &Table> {
    let entries = table.and_then(Value::as_table).into_iter().flatten();
    entries.filter_map(|(name, entry)| Some((name.as_str(), entry.as_table()?))).collect()
}

fn entries(kind: &str, old: &BTreeMap<&str, &Table>, new: &BTreeMap<&str, &Table>) -> Vec<String> {
    let names: BTreeSet<&str> = old.keys().chain(new.keys()).copied().collect();
    let change = |name: &str| match (old.get(name), new.get(name)) {
        (Some(was), Some(now)) if was == now => None,
        (Some(was), Some(now)) => Some(format!("{kind}{}: {}", quoted(name), fields(was, now))),
        (None, _) => Some(format!("{kind}{} added", quoted(name))),
        (_, None) => Some(format!("{kind}{} removed", quoted(name))),
    };
    names.into_iter().filter_map(change).collect()
}

/// Lists the keys that differ, with their values where these are short.
fn fields(was: &Table, now: &Table) -> String {
    let change = |key: &str| {
        let (was, now) = (was.get(key), now.get(key));
        let values = (|| Some(format!("{} {} -> {}", quoted(key), value(was)?, value(now)?)))();
        (was != now).then(|| values.unwrap_or_else(|| format!("{} changed", quoted(key))))
    };
    names(was, now).into_iter().filter_map(change).collect::<Vec<_>>().join(", ")
}

fn names<'t>(one: &'t Table, other: &'t Table) -> BTreeSet<&'t str> {
    one.keys().chain(other.keys()).map(String::as_str).collect()
}

/// Returns a value that fits on a line.
fn value(value: Option<&Value>) -> Option<String> {
    match value {
        None => Some("unset".to_owned()),
        Some(Value::String(text)) => is_plain(text).then(|| text.clone()),
        Some(Value::Integer(number)) => Some(number.to_string()),
        Some(Value::Boolean(is)) => Some(is.to_string()),
        Some(Value::Array(items)) => {
            let items = items.iter().map(|item| item.as_str().filter(|text| is_plain(text)));
            let text = format!("[{}]", items.collect::<Option<Vec<_>>>()?.join(", "));
            is_plain(&text).then_some(text)
        }
        Some(_) => None,
    }
}

/// Returns a name as it is, or escaped and cut.
fn quoted(name: &str) -> String {
    if is_plain(name) {
        return name.to_owned();
    }
    format!("{:?}", name.chars().take(MAX_QUOTED).collect::<String>())
}

fn is_plain(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= MAX_QUOTED
        && text.chars().all(|letter| letter == ' ' || letter.is_ascii_graphic())
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: &str = r#"
        [identity]
        jwt = { alg = "HS256", key = "a-canary-secret" }
        [lists]
        deny = ["user:canary"]
        [tiers.oak]
        writes = "500/h"
        [tenants.acme]
        writes = "20/h"
        [login]
        ip = "10/min"
        [[rule]]
        name = "plan"
        per = ["tenant"]
        limit = "600/h"
        [[rule]]
        name = "old"
        limit = "1/s"
        [[rule]]
        name = "same"
        limit = "1/s"
    "#;

    #[test]
    fn every_kind_of_change_is_told_without_names_and_secrets() {
        let mut new = OLD.to_owned();
        for (from, to) in [
            ("a-canary-secret", "another-canary"),
            ("user:canary", "user:canary2"),
            ("500/h", "50/h"),
            ("20/h", "2/h"),
            ("10/min", "5/min"),
            ("600/h\"", "60/h\"\nmode = \"observe\"\nmessage = \"a line\\nand another\"\nmatch = { path = \"/\" }"),
            ("[\"tenant\"]", "[\"tenant\", \"user\"]"),
            ("\"old\"", "\"new\""),
        ] {
            assert!(new.contains(from), "{from}");
            new = new.replace(from, to);
        }
        let tiers = ["tiers.oak: writes 500/h -> 50/h"];
        let rules = [
            "rule new added",
            "rule old removed",
            "rule plan: limit 600/h -> 60/h, match changed, message changed, mode unset -> observe, per [tenant] -> [tenant, user]",
        ];
        let common = ["identity changed", "lists changed", "[login]: ip 10/min -> 5/min"];
        let public = changes(OLD, &new, Tenants::Unnamed);
        assert_eq!(public, [&rules[..], &common[..], &["tenants changed"], &tiers].concat());
        let named = changes(OLD, &new, Tenants::Named);
        assert_eq!(named, [&rules[..], &common[..], &["tenants.acme: writes 20/h -> 2/h"], &tiers].concat());
        assert_eq!(changes(OLD, &format!("# a comment\n{OLD}"), Tenants::Named), [""; 0]);
        assert_eq!(changes(OLD, "no policy", Tenants::Named), [""; 0]);
    }

    /// Woken by quoting a name as it is, or whole.
    #[test]
    fn names_are_escaped_and_what_is_told_is_bounded() {
        let rule = |name: String| format!("[[rule]]\nname = \"{name}\"\n");
        let rules: String = (0..20).map(|number| rule(format!("r{number:02}"))).collect();
        let all = changes("", &rules, Tenants::Unnamed);
        assert_eq!(all.len(), 20);
        assert_eq!(joined(&all, 2, "; "), "rule r00 added; rule r01 added; 18 more");
        assert_eq!(joined(&all[..2], 2, "; "), "rule r00 added; rule r01 added");
        let odd = changes("", &format!("[ladders.\"\\u001b[2J{}\"]", "x".repeat(1_000)), Tenants::Unnamed);
        assert_eq!(odd, [format!("ladders.\"\\u{{1b}}[2J{}\" added", "x".repeat(60))]);
    }
}
