//! Checks that need the whole policy: duplicate names, rules that never match, gaps in tiers.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::Range;

use super::file::{NamedEntries, PolicyFile};
use super::lists::{ListEntry, Listed};
use super::load::{Loader, known_or, listed};
use super::rule::{Match, Measure, Mode, Rule, SubjectRule};
use super::tiers::Tiers;
use super::{Pattern, TooBroad};
use crate::address::ClientAddress;
use crate::caller::DEFAULT_CATEGORY;
use crate::ladder::{Ladder, Rung};
use crate::plan::{MAX_CHARGES, MAX_SUBJECTS};

/// Reports rules with the same name.
pub(super) fn names(loader: &mut Loader<'_>, rules: &[(Rule, Range<usize>)]) {
    let mut seen: BTreeSet<&str> = BTreeSet::new();
    for (rule, span) in rules {
        if !seen.insert(&rule.name) {
            let message = format!("two rules are called \"{}\"", rule.name);
            loader.error("duplicate-name", span.clone(), message, "stored balances belong to a rule by its name");
        }
    }
}

/// Reports keys that a table has twice. TOML itself forbids that, but a builder's method can be called twice.
pub(super) fn repeated_keys(loader: &mut Loader<'_>, file: &PolicyFile) {
    fn check<V>(loader: &mut Loader<'_>, kind: &str, entries: &NamedEntries<V>) {
        let mut seen: BTreeSet<&str> = BTreeSet::new();
        for (name, _) in &entries.0 {
            if !seen.insert(&name.value) {
                let message = format!("two {kind} are called \"{}\"", name.value);
                loader.error("duplicate-name", name.span.clone(), message, "remove one of them");
            }
        }
    }
    check(loader, "tiers", &file.tiers);
    check(loader, "tenants", &file.tenants);
    check(loader, "users", &file.users);
    let limits = file.tiers.0.iter().chain(&file.users.0).map(|(_, limits)| limits);
    for limits in limits.chain(file.tenants.0.iter().map(|(_, tenant)| &tenant.overrides)) {
        check(loader, "limits of one table", limits);
    }
    check(loader, "ladders", &file.ladders);
    check(loader, "descriptors", &file.envoy.descriptors);
    check(loader, "domains", &file.envoy.domains);
    check(loader, "rules that replace others", &file.envoy.replaces);
    for locks in file.login.iter().filter_map(|login| login.value.locks.as_ref()) {
        check(loader, "locks", locks);
    }
}

/// Reports categories with the same name, and categories that match every request.
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

/// Reports tiers that are missing or have no limit for a category.
pub(super) fn tiers(loader: &mut Loader<'_>, file: &PolicyFile, tiers: &Tiers, rules: &[(Rule, Range<usize>)]) {
    // Not those with `"tier:NAME"`: without that name they limit nothing, and only some tenants may have it.
    let by_category = || rules.iter().filter(|(rule, _)| rule.is_limited_by_category());
    // An unknown tier has no limit, so rules by tier would let everything through.
    if tiers.tiers.is_empty() && tiers.tenants.is_empty() && tiers.users.is_empty() {
        for (_, span) in by_category() {
            let help = "add [tiers.NAME] with a limit for each category, and default_tier under [identity]";
            loader.error("no-tiers", span.clone(), "limit = \"tier\" needs tiers, and the policy has none", help);
        }
    }
    let known = categories_of(file);
    for (name, table) in &file.tiers.0 {
        for (category, _) in
            table.0.iter().filter(|(name, _)| !known.contains(name.value.as_str()) && !tiers.is_named(&name.value))
        {
            let message = format!("no category is called \"{}\"", category.value);
            loader.warning("unknown-category", category.span.clone(), message, &known_categories(file));
        }
        if by_category().next().is_none() || !loader.spend(file.category.len()) {
            continue;
        }
        let own: BTreeSet<&str> = table.0.iter().map(|(key, _)| key.value.as_str()).collect();
        let all = file.category.iter().map(|own| own.name.value.as_str()).chain([DEFAULT_CATEGORY]);
        let mut missing = all.filter(|category| !own.contains(category)).peekable();
        if missing.peek().is_some() {
            let message = format!("the tier \"{}\" has no limit for {}", name.value, listed(missing));
            let help = "such requests are not limited; write \"unlimited\" if that is meant";
            loader.warning("tier-without-category", name.span.clone(), message, help);
        }
    }
}

/// Reports ladders that warn on limits in bytes: a warned request is allowed without being charged, however large it is.
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
            let message = "a rung that allows the request cannot be used with a limit in bytes, and a tier has one";
            loader.error(
                "ladder-warns",
                span.clone(),
                message,
                "use a ladder whose rungs all deny, such as \"strict\"",
            );
        }
    }
}

/// Reports ladders that forget a strike before the next one can follow.
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
        // With a single rung there is nothing to climb.
        let Some(ladder) = ladder.filter(|ladder| ladder.rungs.len() > 1) else { continue };
        let wait = match &rule.measure {
            Measure::Fixed(measured) => rule.strike_wait(&measured.limit),
            Measure::Tier(shape) | Measure::NamedByTier(shape) => {
                tiers.all_of_shape(*shape).filter_map(|limit| rule.strike_wait(limit)).max()
            }
            Measure::Unlimited => None,
        };
        if let Some(wait) = wait.filter(|wait| *wait >= ladder.decay) {
            let message = format!(
                "\"{}\" adds a strike at most once in {wait}, and its ladder forgets strikes after {}",
                rule.name, ladder.decay
            );
            let help = "no subject gets past the first rung: raise decay above the wait, or write strike = \"request\"";
            loader.warning("strikes-decay", span.clone(), message, help);
        }
    }
}

/// Reports rules that no request can match.
pub(super) fn unmet(loader: &mut Loader<'_>, file: &PolicyFile, tiers: &Tiers, rules: &[(Rule, Range<usize>)]) {
    let known = categories_of(file);
    for file_rule in file.rule.iter().map(|located| &located.value) {
        let matches = &file_rule.matches;
        for category in matches.category.iter().flat_map(|texts| &texts.items) {
            if !known.contains(category.value.as_str()) {
                let message = format!("this rule never matches: no category is called \"{}\"", category.value);
                loader.warning("never-matches", category.span.clone(), message, &known_categories(file));
            }
        }
        for tier in matches.tier.iter().flat_map(|texts| &texts.items) {
            if !tier.value.contains('*') && !tiers.tiers.contains_key(tier.value.as_str()) {
                let message = format!("this rule never matches: no tier is called \"{}\"", tier.value);
                let help = known_or(file.tiers.0.iter().map(|(name, _)| name), "add [tiers.NAME]");
                loader.warning("never-matches", tier.span.clone(), message, &help);
            }
        }
        // An empty list is an error and not a warning: compiled it would match everything, the opposite of what it
        // says.
        let lists = [&matches.method, &matches.path, &matches.host, &matches.category, &matches.tenant, &matches.tier];
        if let Some(texts) = lists.into_iter().flatten().find(|texts| texts.items.is_empty()) {
            let help = "leave the key out to match everything";
            loader.error("never-matches", texts.span.clone(), "an empty list matches nothing", help);
        }
        let Some(flag) = file_rule.fallback.as_ref().filter(|flag| flag.value) else { continue };
        let own = rules.iter().find(|(rule, _)| rule.name.as_ref() == file_rule.name.value);
        // A fallback is switched off by any other match in its layer, so a rule for everything switches it off for
        // good.
        let always = |other: &Rule| !other.fallback && other.matches.is_everything();
        if own.is_some_and(|(own, _)| rules.iter().any(|(other, _)| other.layer == own.layer && always(other))) {
            let message = "this fallback never applies: another rule of its layer matches every request";
            loader.warning("never-matches", flag.span.clone(), message, "leave fallback out, or narrow the other rule");
        }
    }
}

/// Returns the help for an unknown category.
fn known_categories(file: &PolicyFile) -> String {
    let own = file.category.iter().map(|own| own.name.value.as_str());
    format!("known: {}; or add it as [[category]]", listed(own.chain([DEFAULT_CATEGORY])))
}

/// Returns the names of all categories.
fn categories_of(file: &PolicyFile) -> BTreeSet<&str> {
    file.category.iter().map(|own| own.name.value.as_str()).chain([DEFAULT_CATEGORY]).collect()
}

/// Reports too many subjects: a plan has room for a fixed number.
pub(super) fn subjects(loader: &mut Loader<'_>, subjects: &[SubjectRule], file: &PolicyFile) {
    if subjects.len() > MAX_SUBJECTS {
        let span =
            file.rule.iter().rev().find_map(|rule| rule.value.ladder.as_ref()).map_or(0..0, |name| name.span.clone());
        let message =
            format!("ladders count strikes by more than {MAX_SUBJECTS} different combinations of per and ladder");
        loader.error("too-many-subjects", span, message, "let rules with the same per share one ladder");
    }
}

/// Reports requests that too many rules match: a plan has room for a fixed number of charges. Only the requests that the rules
/// themselves describe are tried; any other one with too many matches is refused when it arrives.
pub(super) fn meetings(loader: &mut Loader<'_>, rules: &[(Rule, Range<usize>)]) {
    for (rule, span) in rules {
        let sample = Sample::of(&rule.matches);
        let (mut met, mut meets_itself) = (Methods::default(), false);
        for (other, _) in rules {
            // Patterns are matched once for each pair of rules, and not for each method, of which there may be thousands.
            let mut steps = 1;
            let matches = sample.may_match(&other.matches, &mut steps);
            meets_itself |= matches && std::ptr::eq(other, rule);
            if matches && !other.fallback {
                steps = steps.saturating_add(other.matches.method.len());
                met.add(&other.matches.method);
            }
            if !loader.spend_on_error(steps) {
                return;
            }
        }
        let own =
            |method: &str| rule.matches.method.is_empty() || rule.matches.method.iter().any(|own| **own == *method);
        let found = met.counts().find(|(method, count)| *count > MAX_CHARGES && own(method)).filter(|_| meets_itself);
        if let Some((method, count)) = found {
            let message = format!("a {method} request that matches \"{}\" matches {count} rules", rule.name);
            let help = format!("at most {MAX_CHARGES} rules may match one request; narrow what they match");
            return loader.error("too-many-meet", span.clone(), message, &help);
        }
    }
}

/// How many rules a request meets, by its method.
#[derive(Default)]
struct Methods<'r> {
    /// The rules for every method.
    every: usize,
    named: BTreeMap<&'r str, usize>,
}

impl<'r> Methods<'r> {
    fn add(&mut self, methods: &'r [Box<str>]) {
        if methods.is_empty() {
            self.every = self.every.saturating_add(1);
        }
        let distinct: BTreeSet<&str> = methods.iter().map(AsRef::as_ref).collect();
        for method in distinct {
            let count = self.named.entry(method).or_default();
            *count = count.saturating_add(1);
        }
    }

    /// Returns the number of rules for each method. GET stands for all that no rule names.
    fn counts(&self) -> impl Iterator<Item = (&'r str, usize)> {
        let rest = (!self.named.contains_key("GET")).then_some(("GET", &0));
        let named = self.named.iter().map(|(method, count)| (*method, count)).chain(rest);
        named.map(|(method, count)| (method, count.saturating_add(self.every)))
    }
}

/// A request that a rule describes, with ordinary values where the rule accepts any.
struct Sample<'r> {
    path: String,
    host: String,
    category: Option<&'r str>,
    facts: Vec<(&'r str, String)>,
}

impl<'r> Sample<'r> {
    fn of(matches: &'r Match) -> Self {
        Self {
            path: matches.path.first().map_or_else(|| "/".to_owned(), Pattern::sample),
            host: matches.host.first().map_or_else(|| "example.com".to_owned(), Pattern::sample),
            category: matches.category.first().map(AsRef::as_ref),
            facts: matches.fact.iter().filter_map(|(name, own)| Some((&**name, own.first()?.sample()))).collect(),
        }
    }

    /// Whether a rule matches, whatever the method is. Tenants and tiers are assumed to. Facts that this rule does not name are not: the
    /// descriptors of Envoy have one each.
    fn may_match(&self, other: &Match, steps: &mut usize) -> bool {
        let mut pattern = |own: &str, patterns: &[Pattern]| {
            patterns.is_empty() || patterns.iter().any(|pattern| pattern.matches_within(own, steps))
        };
        let name = |own: &str, names: &[Box<str>]| names.is_empty() || names.iter().any(|name| name.as_ref() == own);
        self.category.is_none_or(|category| name(category, &other.category))
            && pattern(&self.path, &other.path)
            && pattern(&self.host, &other.host)
            && other.fact.iter().all(|(name, patterns)| {
                let own = self.facts.iter().find(|(own, _)| **own == **name);
                own.is_some_and(|(_, own)| pattern(own, patterns))
            })
    }
}

/// Returns why a list entry covers too much to be intended.
pub(super) fn too_wide(entry: &ListEntry, listed: Listed, address: &ClientAddress) -> Option<TooBroad> {
    let ListEntry::Address(network) = entry else { return None };
    if network.prefix_len() == 0 {
        return Some(TooBroad::AddressSpace);
    }
    // Allowing a proxy or this machine locks nobody out.
    if listed == Listed::Allow {
        return None;
    }
    // Health checks and local proxies come from there. A denial of it can lock operators out of their own server.
    let loopback = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
    if loopback.iter().any(|own| network.contains(*own)) {
        return Some(TooBroad::OwnAddress);
    }
    let covers = address.trusted.iter().any(|proxy| network.overlaps(proxy));
    covers.then_some(TooBroad::TrustedProxy)
}
