//! Writes the policy.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::file::NodeLimit;
use super::select::SelectedRule;
use super::{Entry, Imported, Values};

/// Keys whose values are addresses. As facts their values can be matched, and two addresses of one network are two.
const ADDRESSES: [&str; 2] = ["remote_address", "masked_remote_address"];
/// The longest name of a rule, without a number that makes it unique. A policy accepts 64 characters.
const MAX_NAME: usize = 56;

pub(super) fn policy(imported: &[Imported<'_>]) -> String {
    let mut text = String::new();
    for Imported { file, domain, .. } in imported {
        let (domain, file) = (comment(&domain.name), comment(file));
        line(
            &mut text,
            format_args!("# The domain {domain} of {file}, imported from a configuration of envoyproxy/ratelimit."),
        );
    }
    text.push_str("# docs/envoy-import.md of Threshold lists where the answers differ.\n");
    let selections = imported.iter().map(|imported| imported.selection);
    let paths = selections.flat_map(|own| own.rules.iter().map(|rule| &rule.limited.path).chain(&own.passes));
    let keys: BTreeSet<&str> = paths.flatten().map(|(key, _)| key.as_str()).collect();
    let addresses: Vec<&str> = ADDRESSES.into_iter().filter(|address| keys.contains(address)).collect();
    if !addresses.is_empty() {
        text.push_str("\n[envoy.descriptors]\n");
        for address in addresses {
            line(&mut text, format_args!("{address} = \"fact:{address}\""));
        }
    }
    let (mut names, mut replaced, mut rules) = (BTreeSet::new(), String::new(), String::new());
    for one in imported {
        // With several files, a line by itself says nothing.
        let place = if imported.len() > 1 { format!("{}, line", comment(one.file)) } else { "Line".to_owned() };
        let written = one.write(&place, &mut names, &mut rules);
        replaced.push_str(&replaces(&one.selection.rules, &written));
    }
    if !replaced.is_empty() {
        text.push_str("\n[envoy.replaces]\n");
    }
    text + &replaced + &rules
}

impl Imported<'_> {
    /// Writes the rules, and returns the names of those with a limit.
    fn write(&self, place: &str, names: &mut BTreeSet<String>, text: &mut String) -> Vec<String> {
        let (domain, selection) = (&self.domain.name, self.selection);
        let any_fallback = selection.rules.iter().any(|rule| rule.is_fallback);
        let mut written = Vec::new();
        for rule in &selection.rules {
            let (number, path) = (rule.limited.node.line, comment(&shown(&rule.limited.path)));
            line(text, format_args!("\n# {place} {number}: {path}"));
            written.push(rule.write(domain, names, any_fallback, text));
        }
        for pass in &selection.passes {
            line(text, format_args!("\n# No limit in the file, and no other rule applies."));
            let _ = head(domain, pass, names, text);
            text.push_str("per = [\"fact:domain\"]\nlimit = \"unlimited\"\n");
        }
        written
    }
}

impl SelectedRule<'_> {
    /// Writes the rule, and returns its name.
    fn write(&self, domain: &str, names: &mut BTreeSet<String>, any_fallback: bool, text: &mut String) -> String {
        let (path, node) = (&self.limited.path, self.limited.node);
        let name = head(domain, path, names, text);
        let (limits, counts) = match &node.limit {
            Some(NodeLimit::Per(limit)) => (format!("limit = \"{limit}\""), true),
            Some(NodeLimit::Deny) => ("deny = true".to_owned(), false),
            _ => ("limit = \"unlimited\"".to_owned(), false),
        };
        if counts {
            line(text, format_args!("per = [{}]", self.per()));
            line(text, format_args!("{limits}\nalgorithm = \"fixed-window\""));
        } else {
            line(text, format_args!("per = [\"fact:domain\"]\n{limits}"));
        }
        if self.is_fallback {
            text.push_str("fallback = true\n");
        }
        if node.is_shadow && node.limit != Some(NodeLimit::Unlimited) {
            text.push_str("mode = \"observe\"\n");
            if any_fallback && !self.is_fallback {
                text.push_str(
                    "allow = [\"fallback-off: shadow_mode limits nothing, and other limits do not apply either\"]\n",
                );
            }
        }
        name
    }

    /// What is counted apart: the values of all keys that may have several.
    fn per(&self) -> String {
        let several = self.limited.path.iter().filter(|(key, values)| match values {
            Values::One(_) => false,
            Values::Pattern(_) => !self.limited.shared.contains(&key.as_str()),
            Values::Any => true,
        });
        let parts: Vec<String> = several.map(|(key, _)| quoted(&format!("fact:{key}"))).collect();
        // One counter, in the same layer as the others.
        if parts.is_empty() { "\"fact:domain\"".to_owned() } else { parts.join(", ") }
    }
}

/// Writes which rules replace which in one request. A name that no limit has replaces nothing, there and here.
fn replaces(rules: &[SelectedRule<'_>], written: &[String]) -> String {
    let mut text = String::new();
    for (rule, name) in rules.iter().zip(written) {
        let is_replaced = |other: &SelectedRule<'_>| rule.limited.node.replaces.contains(&other.limited.node.name);
        let replaced = rules.iter().zip(written).filter(|(other, _)| is_replaced(other));
        let replaced: Vec<String> = replaced.map(|(_, name)| quoted(name)).collect();
        if !replaced.is_empty() {
            line(&mut text, format_args!("{} = [{}]", bare_or_quoted(name), replaced.join(", ")));
        }
    }
    text
}

/// Begins a rule that matches a path, and returns its name.
fn head(domain: &str, path: &[Entry], names: &mut BTreeSet<String>, text: &mut String) -> String {
    let facts = path.iter().map(|(key, values)| {
        let pattern = match values {
            Values::One(value) => value.clone(),
            Values::Pattern(parts) => parts.join("**"),
            Values::Any => "**".to_owned(),
        };
        format!(", {} = {}", bare_or_quoted(key), quoted(&pattern))
    });
    let facts: String = facts.collect();
    let name = unique(&name(domain, path), names);
    line(text, format_args!("[[rule]]\nname = \"{name}\"\nlayer = \"edge\""));
    line(text, format_args!("match = {{ fact = {{ domain = {}{facts} }} }}", quoted(domain)));
    name
}

fn line(text: &mut String, arguments: std::fmt::Arguments<'_>) {
    // Writing to a string does not fail.
    let _ = writeln!(text, "{arguments}");
}

fn shown(path: &[Entry]) -> String {
    let entries = path.iter().map(|(key, values)| match values {
        Values::One(value) => format!("{key}={value}"),
        Values::Pattern(parts) => format!("{key}={}", parts.join("*")),
        Values::Any => key.clone(),
    });
    entries.collect::<Vec<_>>().join(", ")
}

/// A readable name: the characters of the path that a name may have.
fn name(domain: &str, path: &[Entry]) -> String {
    let text = format!("{domain} {}", shown(path));
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.')));
    let name = words.filter(|word| !word.is_empty()).collect::<Vec<_>>().join("-");
    name.chars().take(MAX_NAME).collect()
}

fn unique(name: &str, names: &mut BTreeSet<String>) -> String {
    let numbered = (2_usize..).map(|number| format!("{name}-{number}"));
    let free = std::iter::once(name.to_owned()).chain(numbered).find(|name| !names.contains(name));
    let free = free.unwrap_or_default();
    names.insert(free.clone());
    free
}

/// A text of TOML. Variables of a policy (`${NAME}`) are no part of the file's values.
fn quoted(text: &str) -> String {
    let mut quoted = String::from('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            '$' => quoted.push_str("$$"),
            c if c.is_control() => quoted.push_str(&format!("\\u{:04X}", u32::from(c))),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

fn bare_or_quoted(key: &str) -> String {
    let is_bare = key.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'));
    if is_bare { key.to_owned() } else { quoted(key) }
}

/// A text in a comment, which a control character would end.
fn comment(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}
