//! Text → policy: reads the file, and collects everything there is to say about it.

use std::ops::Range;
use std::sync::Arc;

use serde::Deserialize as _;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::expand::{Expander, Values};
use super::file::{MatchFile, PolicyFile, Text, Texts};
use super::finding::{Finding, Severity};
use super::rule::{Layer, Match, Measured, Rule, SubjectRule};
use super::tiers::{Categories, Own, Tiers, TiersInForce};
use super::{
    Category, Code, Kind, MAX_FILE, MAX_RULES, Pattern, Place, Policy, Review, UserScope, check, finding, reviewer,
};
use crate::key::{Anchors, DigestKey};
use crate::limit::{Limit, NotationError, Quota, parse_span};
use crate::path::{is_method, spell_method};
use crate::time::Span;

mod identity;
pub(super) mod rules;
mod tables;

/// The key rules are digested under until a host gives its own.
const REHEARSAL_KEY: DigestKey = DigestKey::new(*b"threshold/policy");

/// An estimate below this gives less than 90 % of what it says.
const SMALL_ESTIMATE: u64 = 10;

pub(super) fn review(source: &str, variable: &dyn Fn(&str) -> Option<String>) -> Review {
    let mut loader = Loader { source, findings: Vec::new(), values: Values::default() };
    let file = loader.read(variable);
    let policy = file.as_ref().map(|file| loader.policy(file));
    let rules = file.iter().flat_map(|file| &file.rule).map(|rule| &rule.value.name);
    let rule_names = rules.map(|name| (name.value.as_str().into(), name.span.clone())).collect();
    let mut findings = loader.without_values();
    findings.sort_by_key(|finding| finding.span.start);
    let usable = findings.iter().all(|finding| finding.severity != Severity::Error);
    Review { policy: policy.filter(|_| usable), findings, rule_names }
}

/// Reads one file; what it finds on the way is collected, so that a person sees everything at once.
pub(super) struct Loader<'s> {
    source: &'s str,
    findings: Vec<Finding>,
    /// What variables were filled in.
    values: Values,
}

impl Loader<'_> {
    /// The findings with variables as they are written: a value may be a secret that landed in the wrong place, and
    /// messages reach logs and terminals.
    fn without_values(self) -> Vec<Finding> {
        let Self { mut findings, values, .. } = self;
        // Findings about variables name them, and repeat no value.
        for finding in findings.iter_mut().filter(|finding| finding.code != "bad-variable") {
            let code = values.written_at(&finding.span).zip(Code::named(finding.code));
            (finding.message, finding.help) = match code {
                // A message about this very string may repeat any part of it.
                Some((written, code)) => (format!("{}: \"{written}\"", code.says), code.fix.to_owned()),
                None => (values.unexpanded(&finding.message), values.unexpanded(&finding.help)),
            };
        }
        findings
    }

    pub(super) fn error(&mut self, code: &'static str, span: Range<usize>, message: impl Into<String>, help: &str) {
        self.find(Severity::Error, code, span, message.into(), help);
    }

    pub(super) fn warning(&mut self, code: &'static str, span: Range<usize>, message: impl Into<String>, help: &str) {
        self.find(Severity::Warning, code, span, message.into(), help);
    }

    fn find(&mut self, severity: Severity, code: &'static str, span: Range<usize>, message: String, help: &str) {
        debug_assert!(Code::named(code).is_some(), "{code} is not in the table of codes");
        self.findings.push(Finding { severity, code, span, message, help: help.to_owned() });
    }

    /// An error inside a string: it points at the characters, unless the string was escaped or had variables filled in.
    pub(super) fn notation(&mut self, code: &'static str, text: &Text, error: &NotationError) {
        let raw = self.source.get(text.span.clone()).unwrap_or_default();
        let plain = raw.get(1..raw.len().saturating_sub(1)) == Some(text.value.as_str());
        let span = if plain {
            let start = text.span.start.saturating_add(1);
            start.saturating_add(error.at.start)..start.saturating_add(error.at.end)
        } else {
            text.span.clone()
        };
        self.error(code, span, error.message.clone(), &error.help);
    }

    fn read(&mut self, variable: &dyn Fn(&str) -> Option<String>) -> Option<PolicyFile> {
        if self.source.len() > MAX_FILE {
            self.error("too-large", 0..0, format!("a policy is at most {MAX_FILE} bytes"), "");
            return None;
        }
        let (mut table, errors) = DeTable::parse_recoverable(self.source);
        for error in errors {
            self.toml_error(&error);
        }
        if !self.findings.is_empty() {
            return None;
        }
        let mut expander = Expander::new(variable, MAX_FILE);
        self.expand_table(table.get_mut(), &mut expander, false, 0);
        self.values = expander.into_values();
        if !self.findings.is_empty() {
            return None;
        }
        match PolicyFile::deserialize(toml::de::Deserializer::from(table)) {
            Ok(file) => Some(file),
            Err(error) => {
                self.toml_error(&error);
                None
            }
        }
    }

    fn toml_error(&mut self, error: &toml::de::Error) {
        let span = error.span().unwrap_or(0..0);
        let message = error.message();
        let is_secret = finding::is_secret(self.source, span.start);
        let Some((name, known)) = unknown_name(message) else {
            let message = if is_secret { "this cannot be read" } else { message };
            return self.error("syntax", span, message.to_owned(), "");
        };
        let close = known
            .iter()
            .map(|known| (strsim::damerau_levenshtein(name, known), *known))
            .min()
            .filter(|(distance, _)| *distance <= name.len().div_ceil(2).min(3));
        let help = match close {
            Some((_, known)) => format!("did you mean \"{known}\"?"),
            None => format!("known here: {}", known.join(", ")),
        };
        let what = if message.starts_with("unknown variant") { "value" } else { "key" };
        let code = if what == "key" { "unknown-key" } else { "bad-value" };
        let message = if is_secret { format!("unknown {what}") } else { format!("unknown {what} \"{name}\"") };
        self.error(code, span, message, &help);
    }

    fn expand_table(&mut self, table: &mut DeTable<'_>, expander: &mut Expander<'_>, in_limits: bool, depth: usize) {
        for (key, value) in table.iter_mut() {
            let name = key.get_ref().as_ref();
            let limits = in_limits || matches!((depth, name), (0, "tiers" | "tenants" | "users"));
            let is_limit = limits && name != "tier" || matches!(name, "limit" | "account" | "ip");
            self.expand_value(value, expander, limits, is_limit, depth);
        }
    }

    fn expand_value(
        &mut self,
        value: &mut Spanned<DeValue<'_>>,
        expander: &mut Expander<'_>,
        in_limits: bool,
        is_limit: bool,
        depth: usize,
    ) {
        let span = value.span();
        match value.get_mut() {
            DeValue::String(text) => match expander.expand(text, span.clone(), is_limit) {
                Ok(Some(expanded)) => *text = expanded.into(),
                Ok(None) => {}
                Err(error) => self.error("bad-variable", span, error.message, &error.help),
            },
            DeValue::Array(items) => {
                for item in items.iter_mut() {
                    self.expand_value(item, expander, in_limits, is_limit, depth);
                }
            }
            DeValue::Table(table) => self.expand_table(table, expander, in_limits, depth.saturating_add(1)),
            _ => {}
        }
    }

    fn policy(&mut self, file: &PolicyFile) -> Policy {
        let identity = self.identity(&file.identity);
        let ladders = self.ladders(&file.ladders);
        let mut shapes = rules::Shapes::default();
        let mut subjects: Vec<SubjectRule> = Vec::new();
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
        // Doubts are for policies that can be used.
        if self.findings.iter().all(|finding| finding.severity != Severity::Error) {
            reviewer::review(self, file, &identity, &rules);
        }
        // Stable: within a layer the order of the file stays.
        rules.sort_by_key(|(rule, _)| rule.layer);
        let lists = self.lists(&file.lists, &identity);
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
            alerts: Arc::new(self.alerts(&file.alerts)),
            memory: self.memory(&file.memory),
            bans: None,
            tokens: None,
            identity: Arc::new(identity),
            key: REHEARSAL_KEY,
            anchors: Anchors::new(REHEARSAL_KEY),
            generation: 0,
        };
        self.drop_allowed(file, &policy);
        policy.digested_with(REHEARSAL_KEY)
    }

    pub(super) fn span(&mut self, text: &Text) -> Option<Span> {
        parse_span(&text.value).map_err(|error| self.notation("bad-time", text, &error)).ok()
    }

    pub(super) fn quota(&mut self, text: &Text) -> Option<Quota> {
        text.value.parse().map_err(|error| self.notation("bad-limit", text, &error)).ok()
    }

    /// Asks which is meant where a limit is written as 0. A variable may say 0: there is no other word for unlimited then.
    pub(super) fn doubt_zero(&mut self, text: &Text, quota: Quota) {
        let is_word = text.value.trim() == "unlimited";
        if quota == Quota::Unlimited && !is_word && self.values.written_at(&text.span).is_none() {
            let message = format!("\"{}\" is no limit at all", text.value);
            let help = "write \"unlimited\" if that is meant, or \"none\" to let nothing through";
            self.warning("zero-limit", text.span.clone(), message, help);
        }
    }

    /// Doubts an estimate that gives much less than it says.
    pub(super) fn doubt_estimate(&mut self, text: &Text, limit: Option<&Limit>) {
        if let Some(limit) = limit
            && let Some(share) = limit.steady_share()
            && limit.quota() < SMALL_ESTIMATE
        {
            let message = format!("somebody who always asks gets {share} % of this estimate");
            let help = "use sliding-log, which is exact, or sliding-window";
            self.warning("small-estimate", text.span.clone(), message, help);
        }
    }

    /// Drops the warnings that are said to be meant, each in its own place. A rule reaches from its header to the next
    /// one's; what stands in the tables between them is about no rule.
    fn drop_allowed(&mut self, file: &PolicyFile, policy: &Policy) {
        let mut starts: Vec<usize> = file.rule.iter().map(|rule| rule.span.start).collect();
        starts.push(usize::MAX);
        self.findings.retain(|finding| {
            let place = Code::named(finding.code).map(|code| code.place);
            let at = starts.partition_point(|start| *start <= finding.span.start).checked_sub(1);
            let rule = at.and_then(|at| file.rule.get(at)).map(|located| located.value.name.value.as_str());
            let of_rule = || rule.is_some_and(|rule| policy.allows(finding.code, Some(rule)));
            let meant = match place {
                Some(Place::Policy) => policy.allows(finding.code, None),
                // Found in a rule, or in a table that is none.
                Some(Place::Either) => of_rule() || policy.allows(finding.code, None),
                Some(Place::Rule) | None => of_rule(),
            };
            finding.severity == Severity::Error || !meant
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
                let message = format!("\"{}\" cannot be a method", text.value.escape_debug());
                let help = "a method is a word such as POST; write several as a list";
                self.error("bad-method", text.span.clone(), message, help);
            }
            methods.push(spell_method(&text.value).into());
        }
        methods
    }

    pub(super) fn patterns(&mut self, texts: Option<&Texts>, kind: Kind) -> Vec<Pattern> {
        let mut patterns = Vec::new();
        for text in texts.iter().flat_map(|texts| &texts.items) {
            match Pattern::parse(&text.value, kind) {
                Ok(pattern) => patterns.push(pattern),
                Err(message) => {
                    let help = "* is one segment, ** anything, {x} a segment that is kept";
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
        let tables = [(&file.tenants, &mut tiers.tenants, UserScope::Global), (&file.users, &mut tiers.users, scope)];
        for (table, owners, scope) in tables {
            for (name, table) in &table.0 {
                let spelled = match scope.spell(&name.value) {
                    Ok(spelled) => spelled,
                    Err(message) => {
                        self.error("bad-value", name.span.clone(), message, "");
                        continue;
                    }
                };
                let tier = table.0.iter().find(|(key, _)| key.value == "tier").map(|(_, text)| text);
                if let Some(tier) = tier
                    && !file.tiers.0.iter().any(|(name, _)| name.value == tier.value)
                {
                    let help = format!("add [tiers.{}]", tier.value);
                    self.error(
                        "unknown-tier",
                        tier.span.clone(),
                        format!("no tier is called \"{}\"", tier.value),
                        &help,
                    );
                }
                let limits = self.shaped(table.0.iter().filter(|(key, _)| key.value != "tier"), shapes);
                let tier = tier.map(|text| text.value.as_str().into());
                owners.insert(spelled.into(), Own { tier, limits, scaled: None });
            }
        }
        if let Some(tier) = &file.identity.default_tier
            && !tiers.tiers.contains_key(tier.value.as_str())
        {
            let help = format!("add [tiers.{}]", tier.value);
            self.error("unknown-tier", tier.span.clone(), format!("no tier is called \"{}\"", tier.value), &help);
        }
        tiers
    }

    /// Makes each limit of a table ready in every shape that rules count it in.
    fn shaped<'f>(&mut self, entries: impl Iterator<Item = &'f (Text, Text)>, shapes: &rules::Shapes) -> Categories {
        let mut categories = Categories::new();
        for (category, text) in entries {
            let Some(quota) = self.quota(text) else { continue };
            self.doubt_zero(text, quota);
            let mut refuse = |message| self.error("impossible-limit", text.span.clone(), message, "");
            let shaped = shapes.all().map(|shape| shape.measured(quota).map_err(&mut refuse).ok().flatten());
            let shaped: Vec<Option<Measured>> = shaped.collect();
            let estimate = shaped.iter().flatten().map(|own| &own.limit).find(|own| own.steady_share().is_some());
            self.doubt_estimate(text, estimate);
            categories.insert(category.value.as_str().into(), shaped);
        }
        categories
    }
}

/// The name and the known names in serde's message about an unknown one.
fn unknown_name(message: &str) -> Option<(&str, Vec<&str>)> {
    if !message.starts_with("unknown field") && !message.starts_with("unknown variant") {
        return None;
    }
    let mut quoted = message.split('`').skip(1).step_by(2);
    let name = quoted.next()?;
    Some((name, quoted.collect()))
}

/// Whether a text can be the name of a header or a cookie.
pub(super) fn is_token(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
}

/// The layer a rule stands in when it does not say: that of the narrowest thing it is counted by.
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
