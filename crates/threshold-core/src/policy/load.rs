//! The policy file → a policy: gives every key its meaning, and collects all findings on the way.

mod identity;
#[cfg(feature = "toml")]
mod read;
pub(super) mod rules;
mod tables;

use std::ops::Range;
use std::sync::Arc;

#[cfg(feature = "toml")]
use super::expand::{Values, unexpanded};
use super::file::{Located, MatchFile, PolicyFile, Text, Texts};
use super::finding::{Finding, Severity};
use super::rule::{Layer, Match, Measured, Rule, SubjectRule};
use super::tiers::{Categories, MAX_SPREAD, Own, Tiers, TiersInForce};
use super::{
    BodyTemplate, Category, Code, Kind, MAX_FILE, MAX_RULES, Pattern, Place, Policy, Review, ReviewWork, UserScope,
    check, reviewer,
};
use crate::key::{Anchors, DigestKey};
use crate::limit::{Limit, NotationError, Quota, parse_span};
use crate::path::{is_method, normalize_method};
use crate::time::Span;

#[cfg(feature = "toml")]
pub(super) use read::{read_file, review};

/// The key that digests are made with until the host sets its own.
const DEFAULT_KEY: DigestKey = DigestKey::new(*b"threshold/policy");

/// The most findings of each severity. A policy with more is fixed step by step.
const MAX_FINDINGS: usize = 1_000;
/// The most names that a message lists.
const MAX_LISTED: usize = 20;
/// What one limit by tier counts for, in steps: it is compiled for each rule that counts it in another way, and kept.
const STEPS_OF_LIMIT: usize = 500;
/// A smaller estimate allows less than 90 % of its limit to a client that sends continuously.
const SMALL_ESTIMATE: u64 = 10;

/// Checks and compiles a policy that was built in code. `source` is the file as [printed](PolicyFile::print).
pub(super) fn review_file(file: &PolicyFile, source: &str) -> Review {
    let mut loader = Loader::new(source, ReviewWork::default());
    if source.len() > MAX_FILE {
        loader.error("too-large", 0..0, format!("a policy is at most {MAX_FILE} bytes"), "");
    }
    check::repeated_keys(&mut loader, file);
    let policy = loader.policy(file);
    loader.finish(Some(file), Some(policy))
}

/// Gives one file its meaning. Findings are collected instead of returned, so that one run shows them all.
pub(super) struct Loader<'s> {
    source: &'s str,
    findings: Vec<Finding>,
    errors: usize,
    work: ReviewWork<'s>,
    /// Whether a check that finds errors was not made.
    is_unchecked: bool,
    /// The variables that were filled in: no message may show their values.
    #[cfg(feature = "toml")]
    values: Values,
}

impl<'s> Loader<'s> {
    fn new(source: &'s str, work: ReviewWork<'s>) -> Self {
        Self {
            source,
            findings: Vec::new(),
            errors: 0,
            work,
            is_unchecked: false,
            #[cfg(feature = "toml")]
            values: Values::default(),
        }
    }

    fn finish(self, file: Option<&PolicyFile>, policy: Option<Policy>) -> Review {
        let rules = file.into_iter().flat_map(|file| &file.rule).map(|rule| &rule.value.name);
        let rule_names = rules.map(|name| (name.value.as_str().into(), name.span.clone())).collect();
        let mut findings = self.into_findings();
        findings.sort_by_key(|finding| finding.span.start);
        // One error makes the whole policy unusable. Leaving a broken rule out would lift its limit silently.
        let usable = findings.iter().all(|finding| finding.severity != Severity::Error);
        let jwt = file.and_then(|file| file.identity.jwt.as_ref());
        let key_span = jwt.and_then(|jwt| jwt.key_file.as_ref().or(jwt.key.as_ref())).map(|key| key.span.clone());
        Review { policy: policy.filter(|_| usable), findings, rule_names, key_span }
    }

    /// Returns the findings, with variables in place of their values: a value may be a secret that landed in the wrong place,
    /// and messages reach logs and terminals.
    #[cfg(feature = "toml")]
    fn into_findings(self) -> Vec<Finding> {
        let Self { mut findings, values, mut work, .. } = self;
        let hidden = values.hidden();
        // Findings about variables name them, and repeat no value.
        for finding in findings.iter_mut().filter(|finding| finding.code != "bad-variable") {
            let Some(code) = Code::named(finding.code) else { continue };
            let written = values.written_at(&finding.span);
            let length = finding.message.len().saturating_add(finding.help.len());
            (finding.message, finding.help) = match written {
                // A message about this very string may repeat any part of it.
                Some(written) => (format!("{}: \"{written}\"", code.says), code.fix.to_owned()),
                None if hidden.is_empty() || work.spend_on_error(hidden.len().saturating_mul(length)) => {
                    (unexpanded(&hidden, &finding.message), unexpanded(&hidden, &finding.help))
                }
                None => (code.says.to_owned(), code.fix.to_owned()),
            };
        }
        findings
    }

    #[cfg(not(feature = "toml"))]
    fn into_findings(self) -> Vec<Finding> {
        self.findings
    }

    pub(super) fn error(&mut self, code: &'static str, span: Range<usize>, message: impl Into<String>, help: &str) {
        self.find(Severity::Error, code, span, message.into(), help);
    }

    pub(super) fn warning(&mut self, code: &'static str, span: Range<usize>, message: impl Into<String>, help: &str) {
        self.find(Severity::Warning, code, span, message.into(), help);
    }

    fn find(&mut self, severity: Severity, code: &'static str, span: Range<usize>, message: String, help: &str) {
        debug_assert!(Code::named(code).is_some(), "{code} is not in the table of codes");
        let warnings = self.findings.len().saturating_sub(self.errors);
        let (count, is_error) =
            (if severity == Severity::Error { self.errors } else { warnings }, severity == Severity::Error);
        if count >= MAX_FINDINGS {
            return;
        }
        self.errors = self.errors.saturating_add(usize::from(is_error));
        self.findings.push(Finding { severity, code, span, message, help: help.to_owned() });
    }

    /// Adds an error inside a string. It points at the characters, unless the string has escapes or variables.
    pub(super) fn notation(&mut self, code: &'static str, text: &Text, error: &NotationError) {
        let raw = self.source.get(text.span.clone()).unwrap_or_default();
        // With escapes or variables a position in the value is another one in the file.
        let plain = raw.get(1..raw.len().saturating_sub(1)) == Some(text.value.as_str());
        let span = if plain {
            let start = text.span.start.saturating_add(1);
            start.saturating_add(error.at.start)..start.saturating_add(error.at.end)
        } else {
            text.span.clone()
        };
        self.error(code, span, error.message.clone(), &error.help);
    }

    /// Takes steps of a check that finds warnings, and returns whether it may go on.
    pub(super) fn spend(&mut self, steps: usize) -> bool {
        self.work.spend(steps)
    }

    /// Takes steps of a check that finds errors, and returns whether it may go on. A draft for which it may not is not used.
    pub(super) fn spend_on_error(&mut self, steps: usize) -> bool {
        let goes_on = self.work.spend_on_error(steps);
        self.is_unchecked |= !goes_on;
        goes_on
    }

    /// Reports what was not reviewed.
    fn incomplete(&mut self, severity: Severity, reviewed: &str) {
        let message = format!("the policy is too large to be reviewed completely: {reviewed}");
        self.find(severity, "review-incomplete", 0..0, message, "review it with threshold lint, or split it");
    }

    /// Compiles the file. The policy is of use only if no error was found.
    fn policy(&mut self, file: &PolicyFile) -> Policy {
        // First: rules, lists and users are checked against who is trusted and how users are named.
        let identity = self.identity(&file.identity);
        let envelope = file.answers.body.as_ref().and_then(|text| self.body(text)).map(Arc::new);
        let ladders = self.ladders(&file.ladders);
        let mut shapes = rules::Shapes::default();
        let mut subjects: Vec<SubjectRule> = Vec::new();
        // Reported once, and the rules beyond are not compiled: their own findings would bury this one.
        if file.rule.len() > MAX_RULES {
            let span = file.rule.get(MAX_RULES).map_or(0..0, |rule| rule.span.clone());
            self.error("too-many-rules", span, format!("a policy holds at most {MAX_RULES} rules"), "");
        }
        let mut rules: Vec<(Rule, Range<usize>)> = Vec::new();
        for located in file.rule.iter().take(MAX_RULES) {
            let mut context =
                rules::Context { identity: &identity, ladders: &ladders, shapes: &mut shapes, subjects: &mut subjects };
            if let Some(rule) = self.rule(&located.value, &located.span, &mut context) {
                rules.push((rule, located.value.name.span.clone()));
            }
        }
        let categories = self.categories(file);
        let tiers = self.tiers(file, &shapes, identity.user_scope);
        check::names(self, &rules);
        check::categories(self, file);
        check::tiers(self, file, &tiers, &rules);
        check::warnings_for_bytes(self, &tiers, &subjects, &ladders, &rules);
        check::strikes_outlast_waits(self, &tiers, &subjects, &ladders, &rules);
        check::unmet(self, file, &tiers, &rules);
        check::subjects(self, &subjects, file);
        check::meetings(self, &rules);
        // Warnings about the design of a policy would only distract from its errors.
        if self.errors == 0 && !self.is_unchecked {
            let reviewed = reviewer::review(self, file, &identity, &tiers, &rules);
            if self.work.is_spent() {
                let message =
                    format!("errors were looked for in all of it, and warnings in {reviewed} of {} rules", rules.len());
                self.incomplete(Severity::Warning, &message);
            }
        }
        // A stable sort: within a layer the order of the file is kept.
        rules.sort_by_key(|(rule, _)| rule.layer);
        let lists = self.lists(&file.lists, &identity);
        if self.is_unchecked {
            self.incomplete(Severity::Error, "not all errors were looked for, and no warnings");
        }
        // After sorting: it refers to rules by their index.
        let envoy = Arc::new(self.envoy(&file.envoy, &rules));
        let policy = Policy {
            allow: self.allowances(file.allow.as_ref()).into(),
            rules: rules.into_iter().map(|(rule, _)| rule).collect(),
            categories: categories.into(),
            tiers: TiersInForce::new(tiers),
            subjects: subjects.into(),
            counted: Arc::default(),
            early: Arc::default(),
            ladders: ladders.into_values().collect(),
            any_listed: !lists.is_empty(),
            lists: Arc::new(lists),
            login: file.login.as_ref().map(|login| Arc::new(self.login(login))),
            login_places: Arc::new(
                file.login.as_ref().map(|login| self.login_places(&login.value)).unwrap_or_default(),
            ),
            alerts: Arc::new(self.alerts(&file.alerts)),
            memory: self.memory(&file.memory),
            envoy,
            envelope,
            bans: None,
            tokens: None,
            identity: Arc::new(identity),
            key: DEFAULT_KEY,
            anchors: Anchors::new(DEFAULT_KEY),
            generation: 0,
        };
        // Last, when all findings are known.
        self.drop_allowed(file, &policy);
        policy.digested_with(DEFAULT_KEY)
    }

    pub(super) fn span(&mut self, text: &Text) -> Option<Span> {
        parse_span(&text.value).map_err(|error| self.notation("bad-time", text, &error)).ok()
    }

    pub(super) fn quota(&mut self, text: &Text) -> Option<Quota> {
        text.value.parse().map_err(|error| self.notation("bad-limit", text, &error)).ok()
    }

    /// Parses the body of a denial.
    fn body(&mut self, text: &Text) -> Option<BodyTemplate> {
        BodyTemplate::parse(&text.value).map_err(|error| self.notation("unknown-placeholder", text, &error)).ok()
    }

    /// Warns about a limit of 0, which reads as if it denied everything. A variable is no exception: its value must be a number,
    /// so a policy in which 0 is meant says so in `allow`.
    pub(super) fn warn_of_zero(&mut self, text: &Text, quota: Quota) {
        if quota == Quota::Unlimited && text.value.trim() != "unlimited" {
            let message = format!("\"{}\" means unlimited", text.value);
            let help = "write \"unlimited\" if that is intended, or \"none\" to deny everything";
            self.warning("zero-limit", text.span.clone(), message, help);
        }
    }

    /// Warns about an estimate that allows much less than its limit.
    pub(super) fn warn_of_small_estimate(&mut self, text: &Text, limit: Option<&Limit>) {
        if let Some(limit) = limit
            && let Some(share) = limit.steady_share()
            && limit.quota() < SMALL_ESTIMATE
        {
            let message = format!("a client that sends continuously gets {share} % of this estimate");
            let help = "use sliding-log, which is exact, or sliding-window";
            self.warning("small-estimate", text.span.clone(), message, help);
        }
    }

    /// Drops the warnings that an `allow` silences. A finding belongs to the last rule whose header precedes it; in tables
    /// between rules only warnings that belong to the policy are found.
    fn drop_allowed(&mut self, file: &PolicyFile, policy: &Policy) {
        let mut starts: Vec<usize> = file.rule.iter().map(|rule| rule.span.start).collect();
        starts.push(usize::MAX);
        self.findings.retain(|finding| {
            let place = Code::named(finding.code).map(|code| code.place);
            let at = starts.partition_point(|start| *start <= finding.span.start).checked_sub(1);
            let rule = at.and_then(|at| file.rule.get(at)).map(|located| located.value.name.value.as_str());
            let of_rule = || rule.is_some_and(|rule| policy.allows(finding.code, Some(rule)));
            let silenced = match place {
                Some(Place::Policy) => policy.allows(finding.code, None),
                // Found in a rule, or in a table.
                Some(Place::Either) => of_rule() || policy.allows(finding.code, None),
                Some(Place::Rule) | None => of_rule(),
            };
            // An `allow` never silences an error.
            finding.severity == Severity::Error || !silenced
        });
    }

    fn categories(&mut self, file: &PolicyFile) -> Vec<Category> {
        file.category
            .iter()
            .map(|category| Category {
                name: category.name.value.as_str().into(),
                matches: Match {
                    method: self.methods(category.method.as_ref()),
                    path: self.patterns(category.path.as_ref(), Kind::Path),
                    host: self.patterns(category.host.as_ref(), Kind::Host),
                    ..Match::default()
                },
            })
            .collect()
    }

    fn methods(&mut self, texts: Option<&Texts>) -> Vec<Box<str>> {
        let mut methods = Vec::new();
        for text in texts.iter().flat_map(|texts| &texts.items) {
            if !is_method(&text.value) {
                let message = format!("\"{}\" is not a method", text.value.escape_debug());
                let help = "a method is a word such as POST; write several as a list";
                self.error("bad-method", text.span.clone(), message, help);
            } else if text.value.contains('*') {
                // RFC 9110 allows it, and no request has it: it was meant as a pattern.
                let message = format!("no request has the method \"{}\"", text.value);
                let help = "methods have no patterns: leave the key out to match every method";
                self.error("bad-method", text.span.clone(), message, help);
            }
            // Kept in spite of an error, so that the rule is not checked as one that matches every method.
            methods.push(normalize_method(&text.value).into());
        }
        methods
    }

    pub(super) fn patterns(&mut self, texts: Option<&Texts>, kind: Kind) -> Vec<Pattern> {
        let mut patterns = Vec::new();
        for text in texts.iter().flat_map(|texts| &texts.items) {
            match Pattern::parse(&text.value, kind) {
                Ok(pattern) => patterns.push(pattern),
                Err(message) => {
                    let help = "* is one segment, ** anything, {x} a captured segment";
                    self.error("bad-pattern", text.span.clone(), message, help);
                }
            }
        }
        patterns
    }

    pub(super) fn matches(&mut self, file: &MatchFile) -> Match {
        let names = |texts: &Option<Texts>| {
            texts.iter().flat_map(|texts| &texts.items).map(|text| text.value.as_str().into()).collect()
        };
        Match {
            method: self.methods(file.method.as_ref()),
            path: self.patterns(file.path.as_ref(), Kind::Path),
            host: self.patterns(file.host.as_ref(), Kind::Host),
            category: names(&file.category),
            tenant: self.patterns(file.tenant.as_ref(), Kind::Name),
            tier: self.patterns(file.tier.as_ref(), Kind::Name),
            fact: file
                .fact
                .0
                .iter()
                .map(|(name, values)| (name.value.as_str().into(), self.patterns(Some(values), Kind::Name)))
                .collect(),
        }
    }

    fn tiers(&mut self, file: &PolicyFile, shapes: &rules::Shapes, scope: UserScope) -> Tiers {
        let mut tiers = Tiers { shapes: shapes.all().cloned().collect(), ..Tiers::default() };
        for (name, table) in &file.tiers.0 {
            let limits = self.shaped(table.0.iter(), shapes);
            tiers.tiers.insert(name.value.as_str().into(), limits);
        }
        self.spreads(file, scope, &mut tiers);
        let tenants: Vec<_> = file.tenants.0.iter().map(|(name, tenant)| (name, &tenant.overrides)).collect();
        let users: Vec<_> = file.users.0.iter().map(|(name, overrides)| (name, overrides)).collect();
        let tables = [(tenants, &mut tiers.tenants, UserScope::Global), (users, &mut tiers.users, scope)];
        for (table, owners, scope) in tables {
            // A tenant that is only spread has no limits of its own.
            for (name, table) in table.into_iter().filter(|(_, table)| !table.0.is_empty()) {
                // In the canonical form, because requests look their user up by it.
                let spelled = match scope.spell(&name.value) {
                    Ok(spelled) => spelled,
                    Err(error) => {
                        self.error("bad-value", name.span.clone(), error.to_string(), "");
                        continue;
                    }
                };
                let tier = table.0.iter().find(|(key, _)| key.value == "tier").map(|(_, text)| text);
                if let Some(tier) = tier
                    && !file.tiers.0.iter().any(|(name, _)| name.value == tier.value)
                {
                    self.unknown_tier(file, tier);
                }
                let limits = self.shaped(table.0.iter().filter(|(key, _)| key.value != "tier"), shapes);
                let tier = tier.map(|text| text.value.as_str().into());
                owners.insert(spelled.into(), Own { tier, limits, scaled: None });
            }
        }
        if let Some(tier) = &file.identity.default_tier
            && !tiers.tiers.contains_key(tier.value.as_str())
        {
            self.unknown_tier(file, tier);
        }
        tiers
    }

    /// Reads over how many partitions the users of each tenant are spread.
    fn spreads(&mut self, file: &PolicyFile, scope: UserScope, tiers: &mut Tiers) {
        for (name, tenant) in &file.tenants.0 {
            let Some(Located { value: spread, span }) = &tenant.spread else { continue };
            if !(1..=MAX_SPREAD).contains(spread) {
                let message = format!("spread = {spread} is not between 1 and {MAX_SPREAD}");
                self.error("bad-value", span.clone(), message, "");
            } else if scope != UserScope::Tenant {
                let message = "spread has no effect, because users do not belong to tenants".to_owned();
                let help =
                    "each user is in a partition of its own already; or write user_scope = \"tenant\" under [identity]";
                self.error("bad-value", span.clone(), message, help);
            } else if *spread > 1 {
                tiers.spreads.insert(name.value.as_str().into(), *spread);
            }
        }
    }

    fn unknown_tier(&mut self, file: &PolicyFile, tier: &Text) {
        let message = format!("no tier is called \"{}\"", tier.value);
        let help = known_or(file.tiers.0.iter().map(|(name, _)| name), &format!("add [tiers.{}]", tier.value));
        self.error("unknown-tier", tier.span.clone(), message, &help);
    }

    /// Compiles each limit of a table for every shape in which rules count it.
    fn shaped<'f>(&mut self, entries: impl Iterator<Item = &'f (Text, Text)>, shapes: &rules::Shapes) -> Categories {
        let mut categories = Categories::new();
        for (category, text) in entries {
            let Some(quota) = self.quota(text) else { continue };
            self.warn_of_zero(text, quota);
            if !self.spend_on_error(shapes.all().count().saturating_mul(STEPS_OF_LIMIT)) {
                break;
            }
            let mut refuse = |message| self.error("impossible-limit", text.span.clone(), message, "");
            let shaped =
                shapes.all().map(|shape| shape.measured_as(&category.value, quota).map_err(&mut refuse).ok().flatten());
            let shaped: Vec<Option<Measured>> = shaped.collect();
            let estimate = shaped.iter().flatten().map(|own| &own.limit).find(|own| own.steady_share().is_some());
            self.warn_of_small_estimate(text, estimate);
            categories.insert(category.value.as_str().into(), shaped);
        }
        categories
    }
}

/// Returns the known names, as help for an unknown one, and what else can be done.
pub(super) fn known_or<'t>(names: impl Iterator<Item = &'t Text>, otherwise: &str) -> String {
    let mut names = names.map(|name| name.value.as_str()).peekable();
    if names.peek().is_none() { otherwise.to_owned() } else { format!("known: {}; or {otherwise}", listed(names)) }
}

/// Returns names for a message. Of very many only the first ones: each of many findings would repeat them all.
pub(super) fn listed<'n>(mut names: impl Iterator<Item = &'n str>) -> String {
    let first: Vec<&str> = names.by_ref().take(MAX_LISTED).collect();
    let rest = names.count();
    if rest == 0 { first.join(", ") } else { format!("{} and {rest} more", first.join(", ")) }
}

/// Whether a text is a valid name of a header or of a warning cookie.
pub(super) fn is_token(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
}

/// Returns the default layer of a rule: that of the narrowest part of `per`.
pub(super) fn layer_of(per: &[super::Per]) -> Layer {
    use super::Per;
    if per.iter().any(|per| matches!(per, Per::Endpoint)) {
        Layer::Endpoint
    } else if per.iter().any(|per| matches!(per, Per::User)) {
        Layer::User
    } else if per.iter().any(|per| matches!(per, Per::Tenant)) {
        Layer::Tenant
    } else if per.is_empty() {
        Layer::Global
    } else {
        Layer::Edge
    }
}
