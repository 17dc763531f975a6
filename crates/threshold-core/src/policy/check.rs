//! What can only be seen with the whole policy in view: names used twice, rules that are never met, gaps in tiers.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::Range;

use ipnet::IpNet;

use super::Pattern;
use super::file::PolicyFile;
use super::lists::{ListEntry, Listed};
use super::load::Loader;
use super::rule::{Match, Measure, Mode, Rule, SubjectRule};
use super::tiers::Tiers;
use crate::address::ClientAddress;
use crate::caller::DEFAULT_CATEGORY;
use crate::ladder::{Ladder, Rung};
use crate::plan::{MAX_CHARGES, MAX_SUBJECTS};

pub(super) fn names(loader: &mut Loader<'_>, rules: &[(Rule, Range<usize>)]) {
    let mut seen: BTreeSet<&str> = BTreeSet::new();
    for (rule, span) in rules {
        if !seen.insert(&rule.name) {
            let message = format!("two rules are called \"{}\"", rule.name);
            loader.error("duplicate-name", span.clone(), message, "what was used belongs to a rule by its name");
        }
    }
}

/// Two categories of one name, and categories that leave nothing for the others.
pub(super) fn categories(loader: &mut Loader<'_>, file: &PolicyFile) {
    let mut seen: BTreeSet<&str> = BTreeSet::new();
    for category in &file.category {
        let span = category.name.span.clone();
        if !seen.insert(&category.name.value) {
            let message = format!("two categories are called \"{}\"", category.name.value);
            loader.error("duplicate-name", span.clone(), message, "list both paths in one category");
        }
        if category.method.is_none() && category.path.is_none() && category.host.is_none() {
            let message = format!("the category \"{}\" matches every request", category.name.value);
            loader.warning("matches-all", span, message, "give it a path, a method or a host");
        }
    }
}

/// Tiers that rules rest on and that say nothing about some requests.
pub(super) fn tiers(loader: &mut Loader<'_>, file: &PolicyFile, tiers: &Tiers, rules: &[(Rule, Range<usize>)]) {
    let by_tier = || rules.iter().filter(|(rule, _)| rule.is_by_tier());
    if tiers.tiers.is_empty() && tiers.tenants.is_empty() && tiers.users.is_empty() {
        for (_, span) in by_tier() {
            let help = "add [tiers.NAME] with a limit for each category, and default_tier under [identity]";
            loader.error("no-tiers", span.clone(), "limit = \"tier\", and the policy has no tiers", help);
        }
    }
    for (name, table) in &file.tiers.0 {
        for (category, _) in table.0.iter().filter(|(category, _)| !is_category(file, &category.value)) {
            let message = format!("no category is called \"{}\"", category.value);
            loader.warning("unknown-category", category.span.clone(), message, "add it as [[category]]");
        }
        let all = file.category.iter().map(|own| own.name.value.as_str()).chain([DEFAULT_CATEGORY]);
        let missing: Vec<&str> = all.filter(|own| !table.0.iter().any(|(key, _)| key.value == *own)).collect();
        if by_tier().next().is_some() && !missing.is_empty() {
            let message = format!("the tier \"{}\" has no limit for {}", name.value, missing.join(", "));
            let help = "such requests are not limited; write \"unlimited\" if that is meant";
            loader.warning("tier-without-category", name.span.clone(), message, help);
        }
    }
}

/// A warning lets a request through uncharged, which is no answer to a limit that counts bytes.
pub(super) fn warnings_for_bytes(
    loader: &mut Loader<'_>,
    tiers: &Tiers,
    subjects: &[SubjectRule],
    ladders: &BTreeMap<String, Ladder>,
    rules: &[(Rule, Range<usize>)],
) {
    if !tiers.counts_bytes() {
        return;
    }
    for (rule, span) in rules.iter().filter(|(rule, _)| rule.is_by_tier()) {
        let subject = rule.subject.and_then(|subject| subjects.get(subject));
        let ladder = subject.and_then(|subject| ladders.get(subject.ladder_name.as_ref()));
        if ladder.is_some_and(|ladder| ladder.rungs.iter().any(Rung::allows)) {
            let message = "a rung that lets the request through is not for bytes, and a tier counts some";
            loader.error(
                "ladder-warns",
                span.clone(),
                message,
                "use a ladder whose rungs all deny, such as \"strict\"",
            );
        }
    }
}

/// Ladders whose strikes are forgotten before the next one can follow, so that nobody climbs them.
pub(super) fn strikes_outlast_waits(
    loader: &mut Loader<'_>,
    tiers: &Tiers,
    subjects: &[SubjectRule],
    ladders: &BTreeMap<String, Ladder>,
    rules: &[(Rule, Range<usize>)],
) {
    for (rule, span) in rules.iter().filter(|(rule, _)| rule.mode == Mode::Enforce) {
        let subject = rule.subject.and_then(|subject| subjects.get(subject));
        let ladder = subject.and_then(|subject| ladders.get(subject.ladder_name.as_ref()));
        let Some(ladder) = ladder.filter(|ladder| ladder.rungs.len() > 1) else { continue };
        let wait = match &rule.measure {
            Measure::Fixed(measured) => rule.strike_wait(&measured.limit),
            Measure::Tier(shape) => tiers.all_of_shape(*shape).filter_map(|limit| rule.strike_wait(limit)).max(),
            Measure::Unlimited => None,
        };
        if let Some(wait) = wait.filter(|wait| *wait >= ladder.decay) {
            let message = format!(
                "\"{}\" strikes once in {wait} at most, and its ladder forgets strikes after {}",
                rule.name, ladder.decay
            );
            let help = "nobody gets past the first rung: raise decay above the wait, or write strike = \"request\"";
            loader.warning("strikes-decay", span.clone(), message, help);
        }
    }
}

/// Rules that no request can meet.
pub(super) fn unmet(loader: &mut Loader<'_>, file: &PolicyFile, tiers: &Tiers, rules: &[(Rule, Range<usize>)]) {
    for file_rule in file.rule.iter().map(|located| &located.value) {
        let matches = &file_rule.matches;
        for category in matches.category.iter().flat_map(|texts| &texts.items) {
            if !is_category(file, &category.value) {
                let message = format!("this rule is never met: no category is called \"{}\"", category.value);
                loader.warning("never-matches", category.span.clone(), message, "add it as [[category]]");
            }
        }
        for tier in matches.tier.iter().flat_map(|texts| &texts.items) {
            if !tier.value.contains('*') && !tiers.tiers.contains_key(tier.value.as_str()) {
                let message = format!("this rule is never met: no tier is called \"{}\"", tier.value);
                loader.warning("never-matches", tier.span.clone(), message, "add [tiers.NAME]");
            }
        }
        let lists = [&matches.method, &matches.path, &matches.host, &matches.category, &matches.tenant, &matches.tier];
        if let Some(texts) = lists.into_iter().flatten().find(|texts| texts.items.is_empty()) {
            let help = "leave the key out to match everything";
            loader.error("never-matches", texts.span.clone(), "an empty list matches nothing", help);
        }
        let Some(flag) = file_rule.fallback.as_ref().filter(|flag| flag.value) else { continue };
        let own = rules.iter().find(|(rule, _)| rule.name.as_ref() == file_rule.name.value);
        let always = |other: &Rule| !other.fallback && other.matches.is_everything();
        if own.is_some_and(|(own, _)| rules.iter().any(|(other, _)| other.layer == own.layer && always(other))) {
            let message = "this fallback is never met: another rule of its layer meets every request";
            loader.warning("never-matches", flag.span.clone(), message, "leave fallback out, or narrow the other rule");
        }
    }
}

fn is_category(file: &PolicyFile, name: &str) -> bool {
    name == DEFAULT_CATEGORY || file.category.iter().any(|own| own.name.value == name)
}

/// A plan holds a bounded number of subjects.
pub(super) fn subjects(loader: &mut Loader<'_>, subjects: &[SubjectRule], file: &PolicyFile) {
    if subjects.len() > MAX_SUBJECTS {
        let span =
            file.rule.iter().rev().find_map(|rule| rule.value.ladder.as_ref()).map_or(0..0, |name| name.span.clone());
        let message =
            format!("ladders count strikes by more than {MAX_SUBJECTS} different combinations of per and ladder");
        loader.error("too-many-subjects", span, message, "let rules with the same per share one ladder");
    }
}

/// A plan holds a bounded number of charges, so no request may meet more rules. Tried with the requests that the rules
/// themselves describe; a stranger one is refused when it comes.
pub(super) fn meetings(loader: &mut Loader<'_>, rules: &[(Rule, Range<usize>)]) {
    let methods: BTreeSet<&str> = rules.iter().flat_map(|(rule, _)| &rule.matches.method).map(AsRef::as_ref).collect();
    for (rule, span) in rules {
        for method in methods.iter().copied().chain(["GET"]) {
            let sample = Sample::of(&rule.matches, method);
            let met = rules.iter().filter(|(other, _)| !other.fallback && sample.meets(&other.matches)).count();
            if met > MAX_CHARGES && sample.meets(&rule.matches) {
                let message = format!("a {method} request that meets \"{}\" meets {met} rules", rule.name);
                let help = format!("at most {MAX_CHARGES} rules may meet one request; narrow what they match");
                return loader.error("too-many-meet", span.clone(), message, &help);
            }
        }
    }
}

/// A request that a rule describes; where it says nothing, an ordinary one.
struct Sample<'r> {
    method: &'r str,
    path: String,
    host: String,
    category: Option<&'r str>,
}

impl<'r> Sample<'r> {
    fn of(matches: &'r Match, method: &'r str) -> Self {
        Self {
            method,
            path: matches.path.first().map_or_else(|| "/".to_owned(), Pattern::sample),
            host: matches.host.first().map_or_else(|| "example.com".to_owned(), Pattern::sample),
            category: matches.category.first().map(AsRef::as_ref),
        }
    }

    /// Whether a rule is met. Tenants, tiers and facts could be whatever it wants.
    fn meets(&self, other: &Match) -> bool {
        let name = |own: &str, names: &[Box<str>]| names.is_empty() || names.iter().any(|name| name.as_ref() == own);
        let pattern = |own: &str, patterns: &[Pattern]| {
            patterns.is_empty() || patterns.iter().any(|pattern| pattern.matches(own))
        };
        name(self.method, &other.method)
            && self.category.is_none_or(|category| name(category, &other.category))
            && pattern(&self.path, &other.path)
            && pattern(&self.host, &other.host)
    }
}

/// Why a list entry covers more than anyone can mean.
pub(super) fn too_wide(entry: &ListEntry, listed: Listed, address: &ClientAddress) -> Option<String> {
    let ListEntry::Address(net) = entry else { return None };
    if net.prefix_len() == 0 {
        return Some("this covers a whole address space".to_owned());
    }
    if listed == Listed::Allow {
        return None;
    }
    let loopback = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
    if loopback.iter().any(|own| net.contains(own)) {
        return Some("this covers this machine's own address".to_owned());
    }
    let overlaps = |proxy: &IpNet| net.contains(proxy) || proxy.contains(net);
    // Which one is not said: its address may be a variable's value, written in another way.
    let covers = address.trusted.iter().any(overlaps);
    covers.then(|| "this covers a trusted proxy, and with it everyone behind it".to_owned())
}
