//! Writes the policy.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write as _;

use super::file::{Node, NodeLimit};
use super::select::{Exception, LAYERS, SelectedRule};
use super::{Imported, Values};
use threshold_wire::envoy::{DOMAIN, ENTRY_KEYS, join_keys};

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
    let paths = selections.flat_map(|own| own.rules.iter().flat_map(|rule| &rule.path));
    let keys: BTreeSet<&str> = paths.map(|node| node.key.as_str()).collect();
    let addresses: Vec<&str> = ADDRESSES.into_iter().filter(|address| keys.contains(address)).collect();
    if !addresses.is_empty() {
        text.push_str("\n[envoy.descriptors]\n");
        for address in addresses {
            line(&mut text, format_args!("{address} = \"fact:{address}\""));
        }
    }
    let (mut names, mut replaced, mut rules) = (Names::default(), String::new(), String::new());
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
    fn write(&self, place: &str, names: &mut Names, text: &mut String) -> Vec<String> {
        let (domain, selection) = (&self.domain.name, self.selection);
        let any_fallback = selection.rules.iter().any(|rule| rule.is_fallback);
        let mut written = Vec::new();
        for rule in &selection.rules {
            line(text, format_args!("\n# {place} {}: {}", rule.node().line, comment(&shown(&rule.path))));
            written.push(rule.write(domain, names, any_fallback, text));
        }
        for exception in &selection.exceptions {
            exception.write(domain, names, text);
        }
        for (own, star) in &self.domain.unselected {
            let why = format_args!("left out: no descriptor selects it after the value * of line {star}");
            line(text, format_args!("\n# {place} {own}: {why}"));
        }
        written
    }
}

impl SelectedRule<'_> {
    /// Writes the rule, and returns its name.
    fn write(&self, domain: &str, names: &mut Names, any_fallback: bool, text: &mut String) -> String {
        let node = self.node();
        let name = names.unique(&format!("{domain} {}", shown(&self.path)));
        let values: Vec<Vec<&Values>> = self.path.iter().map(|node| vec![&node.values]).collect();
        head(text, &name, self.layer, domain, &self.path, &values);
        let (limits, counts) = match &node.limit {
            Some(NodeLimit::Per(limit)) => (format!("limit = \"{limit}\""), true),
            Some(NodeLimit::Deny) => ("deny = true".to_owned(), false),
            _ => ("limit = \"unlimited\"".to_owned(), false),
        };
        if counts {
            line(text, format_args!("per = [{}]", self.per()));
            line(text, format_args!("{limits}\nalgorithm = \"fixed-window\""));
        } else {
            line(text, format_args!("per = [\"fact:{DOMAIN}\"]\n{limits}"));
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
        let several = self.path.iter().filter(|node| match &node.values {
            Values::One(_) => false,
            Values::Pattern(_) => !node.is_shared,
            Values::Any => true,
        });
        let parts: Vec<String> = several.map(|node| quoted(&format!("fact:{}", node.fact))).collect();
        // One counter, in the same layer as the others.
        if parts.is_empty() { format!("\"fact:{DOMAIN}\"") } else { parts.join(", ") }
    }
}

impl Exception<'_> {
    fn write(&self, domain: &str, names: &mut Names, text: &mut String) {
        line(text, format_args!("\n# For these values the file has another descriptor than that of a fallback."));
        let name = names.unique(&format!("except {domain} {}", shown(&self.path)));
        head(text, &name, self.layer, domain, &self.path, &self.values);
        line(text, format_args!("per = [\"fact:{DOMAIN}\"]\nlimit = \"unlimited\""));
    }
}

/// Writes which rules replace which in one request.
fn replaces(rules: &[SelectedRule<'_>], written: &[String]) -> String {
    let mut text = String::new();
    for (rule, name) in rules.iter().zip(written) {
        let replaced = rule.replaces.iter().filter_map(|other| written.get(*other));
        let replaced: Vec<String> = replaced.map(|name| quoted(name)).collect();
        if !replaced.is_empty() {
            line(&mut text, format_args!("{} = [{}]", bare_or_quoted(name), replaced.join(", ")));
        }
    }
    text
}

/// Begins a rule that matches descriptors with the keys of a path, and with some values.
fn head(text: &mut String, name: &str, layer: usize, domain: &str, path: &[&Node], values: &[Vec<&Values>]) {
    let layer = LAYERS.get(layer).unwrap_or(&"edge");
    let keys = quoted(&join_keys(path.iter().map(|node| node.key.as_str())));
    line(text, format_args!("[[rule]]\nname = \"{name}\"\nlayer = \"{layer}\""));
    let mut facts = format!("{DOMAIN} = {}, {ENTRY_KEYS} = {keys}", quoted(domain));
    for (node, values) in path.iter().zip(values) {
        let patterns: Vec<String> = values.iter().map(|values| quoted(&pattern(values))).collect();
        let list = if patterns.len() == 1 { patterns.concat() } else { format!("[{}]", patterns.join(", ")) };
        // Writing to a string does not fail.
        let _ = write!(facts, ", {} = {list}", bare_or_quoted(&node.fact));
    }
    line(text, format_args!("match = {{ fact = {{ {facts} }} }}"));
}

fn pattern(values: &Values) -> String {
    match values {
        Values::One(value) => value.clone(),
        Values::Pattern(beginning) => format!("{beginning}**"),
        Values::Any => "**".to_owned(),
    }
}

fn line(text: &mut String, arguments: std::fmt::Arguments<'_>) {
    // Writing to a string does not fail.
    let _ = writeln!(text, "{arguments}");
}

fn shown(path: &[&Node]) -> String {
    let entries = path.iter().map(|node| match &node.values {
        Values::One(value) => format!("{}={value}", node.key),
        Values::Pattern(beginning) => format!("{}={beginning}*", node.key),
        Values::Any => node.key.clone(),
    });
    entries.collect::<Vec<_>>().join(", ")
}

/// The names of rules, and the last number that made one of them unique.
#[derive(Default)]
struct Names {
    used: BTreeSet<String>,
    numbers: HashMap<String, usize>,
}

impl Names {
    /// Returns a name from the characters of a text that it may have, which no other rule has.
    fn unique(&mut self, text: &str) -> String {
        let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.')));
        let words = words.filter(|word| !word.is_empty()).flat_map(|word| ["-", word]).skip(1);
        let mut name: String = words.flat_map(str::chars).take(MAX_NAME).collect();
        if name.is_empty() {
            name.push_str("rule");
        }
        let number = self.numbers.entry(name.clone()).or_insert(0);
        loop {
            *number = number.saturating_add(1);
            let unique = if *number == 1 { name.clone() } else { format!("{name}-{number}") };
            if self.used.insert(unique.clone()) {
                return unique;
            }
        }
    }
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
