//! Text → policy: reads the file, and collects everything there is to say about it.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::Deserialize as _;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::expand::expand;
use super::file::{
    AlertFile, AlertsFile, IdentityFile, JwtFile, LadderFile, ListsFile, Located, LoginFile, MatchFile, MemoryFile,
    PolicyFile, Table, Text, Texts, WhenFullName,
};
use super::finding::{Finding, Severity};
use super::lists::{ListEntry, Listed, Lists, parse_net};
use super::rule::{Layer, Match, Rule, SubjectRule};
use super::tiers::{Categories, Own, Tiers};
use super::{
    Alert, Alerts, Category, Identity, IdentitySource, Jwt, Kind, MAX_FILE, MAX_RULES, Memory, Pattern, Policy, Review,
    WhenFull, check,
};
use crate::address::{AddressSource, ClientAddress};
use crate::key::DigestKey;
use crate::ladder::{Ladder, Rung};
use crate::limit::{Log, NotationError, Quota, parse_span};
use crate::lockout::Login;
use crate::time::Span;

mod rules;

/// The key rules are digested under until a host gives its own.
const REHEARSAL_KEY: DigestKey = DigestKey::new(*b"threshold/policy");

pub(super) fn review(source: &str, variable: &dyn Fn(&str) -> Option<String>) -> Review {
    let mut loader = Loader { source, findings: Vec::new() };
    let policy = loader.read(variable).map(|file| loader.policy(file));
    let mut findings = loader.findings;
    findings.sort_by_key(|finding| finding.span.start);
    let usable = findings.iter().all(|finding| finding.severity != Severity::Error);
    Review { policy: policy.filter(|_| usable), findings }
}

/// Reads one file; what it finds on the way is collected, so that a person sees everything at once.
pub(super) struct Loader<'s> {
    source: &'s str,
    findings: Vec<Finding>,
}

impl Loader<'_> {
    pub(super) fn error(&mut self, code: &'static str, span: Range<usize>, message: impl Into<String>, help: &str) {
        self.find(Severity::Error, code, span, message.into(), help);
    }

    pub(super) fn warning(&mut self, code: &'static str, span: Range<usize>, message: impl Into<String>, help: &str) {
        self.find(Severity::Warning, code, span, message.into(), help);
    }

    fn find(&mut self, severity: Severity, code: &'static str, span: Range<usize>, message: String, help: &str) {
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
        self.expand_table(table.get_mut(), variable, false, 0);
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
        let Some((name, known)) = unknown_name(message) else {
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
        self.error(code, span, format!("unknown {what} \"{name}\""), &help);
    }

    fn expand_table(
        &mut self,
        table: &mut DeTable<'_>,
        variable: &dyn Fn(&str) -> Option<String>,
        in_limits: bool,
        depth: usize,
    ) {
        for (key, value) in table.iter_mut() {
            let name = key.get_ref().as_ref();
            let limits = in_limits || matches!((depth, name), (0, "tiers" | "tenants" | "users"));
            let is_limit = limits && name != "tier" || matches!(name, "limit" | "account" | "ip");
            self.expand_value(value, variable, limits, is_limit, depth);
        }
    }

    fn expand_value(
        &mut self,
        value: &mut Spanned<DeValue<'_>>,
        variable: &dyn Fn(&str) -> Option<String>,
        in_limits: bool,
        is_limit: bool,
        depth: usize,
    ) {
        let span = value.span();
        match value.get_mut() {
            DeValue::String(text) => match expand(text, variable, is_limit) {
                Ok(Some(expanded)) => *text = expanded.into(),
                Ok(None) => {}
                Err(error) => self.error("bad-variable", span, error.message, &error.help),
            },
            DeValue::Array(items) => {
                for item in items.iter_mut() {
                    self.expand_value(item, variable, in_limits, is_limit, depth);
                }
            }
            DeValue::Table(table) => self.expand_table(table, variable, in_limits, depth.saturating_add(1)),
            _ => {}
        }
    }

    fn policy(&mut self, file: PolicyFile) -> Policy {
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
            let mut context = rules::Context { identity: &identity, ladders: &ladders, shapes: &mut shapes, subjects: &mut subjects };
            if let Some(rule) = self.rule(&located.value, &located.span, &mut context) {
                rules.push((rule, located.value.name.span.clone()));
            }
        }
        let categories = self.categories(&file);
        let tiers = self.tiers(&file, &shapes);
        check::names(self, &rules);
        check::categories(self, &file, &categories, &tiers, &rules);
        check::subjects(self, &subjects, &file);
        check::meetings(self, &rules);
        // Stable: within a layer the order of the file stays.
        rules.sort_by_key(|(rule, _)| rule.layer);
        Policy {
            rules: rules.into_iter().map(|(rule, _)| rule).collect(),
            categories,
            tiers,
            subjects,
            ladders: ladders.into_values().collect(),
            lists: self.lists(&file.lists, &identity.address),
            login: file.login.as_ref().map(|login| self.login(login)),
            alerts: self.alerts(&file.alerts),
            memory: self.memory(&file.memory),
            identity,
            key: REHEARSAL_KEY,
            generation: 0,
        }
        .with_key(REHEARSAL_KEY)
    }

    fn identity(&mut self, file: &IdentityFile) -> Identity {
        let trusted = file.trusted_proxies.iter().flat_map(|texts| &texts.items);
        let trusted = trusted
            .filter_map(|text| {
                let net = parse_net(&text.value);
                if net.is_none() {
                    self.error(
                        "bad-value",
                        text.span.clone(),
                        format!("\"{}\" is not a CIDR", text.value),
                        "write \"10.0.0.0/8\" or a single address",
                    );
                } else if net.is_some_and(|net| net.prefix_len() == 0) {
                    self.warning(
                        "trusts-everyone",
                        text.span.clone(),
                        "every peer is trusted, so every client can claim any address",
                        "name the addresses of your proxies",
                    );
                }
                net
            })
            .collect();
        let sources = match &file.client_ip {
            None => vec![AddressSource::Peer],
            Some(texts) => texts.items.iter().map(|text| address_source(&text.value)).collect(),
        };
        if let Some(prefix) = &file.ipv6_prefix
            && !(32..=128).contains(&prefix.value)
        {
            self.error("bad-value", prefix.span.clone(), "ipv6_prefix is between 32 and 128", "64 suits most");
        }
        let mut secret = (false, false);
        for text in file.secret.iter().flat_map(|texts| &texts.items) {
            match text.value.as_str() {
                "tenant" => secret.0 = true,
                "user" => secret.1 = true,
                _ => self.error("bad-value", text.span.clone(), "only \"tenant\" and \"user\" can be secret", ""),
            }
        }
        let mut source = |text: &Option<Text>| text.as_ref().and_then(|text| self.identity_source(text));
        let (tenant, user, tier) = (source(&file.tenant), source(&file.user), source(&file.tier));
        let claims = [&tenant, &user, &tier].into_iter().flatten().any(|source| matches!(source, IdentitySource::Claim(_)));
        if claims && file.jwt.is_none() {
            let span = file.user.as_ref().or(file.tenant.as_ref()).or(file.tier.as_ref()).map_or(0..0, |text| text.span.clone());
            self.error("no-jwt", span, "a claim needs [identity.jwt]", "say how tokens are verified: alg, and key or key_file");
        }
        let is_cookie = |source: &Option<IdentitySource>| {
            matches!(source, Some(IdentitySource::Cookie(_)))
                || matches!(source, Some(IdentitySource::Header(name)) if name.as_ref() == "authorization")
        };
        Identity {
            address: ClientAddress { trusted, sources },
            ipv6_prefix: file.ipv6_prefix.as_ref().map_or(64, |prefix| prefix.value),
            secret_tenant: secret.0 || is_cookie(&tenant),
            secret_user: secret.1 || is_cookie(&user),
            tenant,
            user,
            tier,
            default_tier: file.default_tier.as_ref().map(|text| text.value.as_str().into()),
            log_identifiers: file.log_identifiers,
            jwt: file.jwt.as_ref().and_then(|jwt| self.jwt(jwt)),
        }
    }

    fn identity_source(&mut self, text: &Text) -> Option<IdentitySource> {
        let help = "write \"header:NAME\", \"cookie:NAME\", \"host:{tenant}.example.com\", \"path:/t/{tenant}/**\" or \
                    \"claim:NAME\"";
        let Some((kind, name)) = text.value.split_once(':').filter(|(_, name)| !name.is_empty()) else {
            self.error("bad-value", text.span.clone(), format!("\"{}\" is no source of a name", text.value), help);
            return None;
        };
        let kind = match kind {
            "header" => return Some(IdentitySource::Header(name.to_ascii_lowercase().into())),
            "cookie" => return Some(IdentitySource::Cookie(name.into())),
            "claim" => return Some(IdentitySource::Claim(name.into())),
            "host" => Kind::Host,
            "path" => Kind::Path,
            _ => {
                self.error("bad-value", text.span.clone(), format!("unknown source \"{kind}\""), help);
                return None;
            }
        };
        match Pattern::parse(name, kind) {
            Ok(pattern) if !name.contains('{') => {
                let message = format!("\"{pattern}\" keeps nothing");
                self.error("bad-value", text.span.clone(), message, "put the name in braces, as in {tenant}");
                None
            }
            Ok(pattern) if kind == Kind::Host => Some(IdentitySource::Host(pattern)),
            Ok(pattern) => Some(IdentitySource::Path(pattern)),
            Err(message) => {
                self.error("bad-pattern", text.span.clone(), message, help);
                None
            }
        }
    }

    fn jwt(&mut self, file: &JwtFile) -> Option<Jwt> {
        const ALGS: [&str; 9] = ["HS256", "HS384", "HS512", "RS256", "RS384", "RS512", "ES256", "ES384", "EdDSA"];
        if !ALGS.contains(&file.alg.value.as_str()) {
            let help = format!("known: {}", ALGS.join(", "));
            self.error("bad-value", file.alg.span.clone(), format!("unknown algorithm \"{}\"", file.alg.value), &help);
            return None;
        }
        if file.key.is_some() == file.key_file.is_some() {
            self.error("bad-value", file.alg.span.clone(), "a token is verified with one key", "give either key or key_file");
            return None;
        }
        let text = |text: &Option<Text>| text.as_ref().map(|text| text.value.as_str().into());
        Some(Jwt {
            alg: file.alg.value.as_str().into(),
            key: text(&file.key),
            key_file: text(&file.key_file),
            iss: text(&file.iss),
            aud: text(&file.aud),
        })
    }

    fn ladders(&mut self, table: &Table<LadderFile>) -> BTreeMap<String, Ladder> {
        let mut ladders: BTreeMap<String, Ladder> = ["graduated", "strict", "gentle"]
            .into_iter()
            .filter_map(|name| Some((name.to_owned(), Ladder::built_in(name)?)))
            .collect();
        for (name, file) in &table.0 {
            let base = ladders.get(&name.value).cloned();
            if base.is_none() && file.rungs.is_none() {
                let message = format!("the ladder \"{}\" has no rungs", name.value);
                self.error("bad-value", name.span.clone(), message, "write rungs = [\"warn\", \"cooldown 1min\", \"ban 24h\"]");
                continue;
            }
            let mut ladder = base.unwrap_or(Ladder { decay: Span::DAY, rungs: Vec::new(), warning_cookie: None });
            if let Some(decay) = file.decay.as_ref().and_then(|text| self.span(text)) {
                ladder.decay = decay;
            }
            if let Some(rungs) = &file.rungs {
                if rungs.items.is_empty() {
                    self.error("bad-value", rungs.span.clone(), "a ladder has at least one rung", "");
                    continue;
                }
                ladder.rungs = rungs.items.iter().filter_map(|text| self.rung(text)).collect();
            }
            if let Some(cookie) = &file.warning_cookie {
                if is_token(&cookie.value) {
                    ladder.warning_cookie = Some(cookie.value.as_str().into());
                } else {
                    let message = format!("\"{}\" cannot be the name of a cookie", cookie.value);
                    self.error("bad-value", cookie.span.clone(), message, "letters, digits, - and _");
                }
            }
            ladders.insert(name.value.clone(), ladder);
        }
        ladders
    }

    fn rung(&mut self, text: &Text) -> Option<Rung> {
        Rung::parse(&text.value).map_err(|error| self.notation("bad-rung", text, &error)).ok()
    }

    pub(super) fn span(&mut self, text: &Text) -> Option<Span> {
        parse_span(&text.value).map_err(|error| self.notation("bad-time", text, &error)).ok()
    }

    pub(super) fn quota(&mut self, text: &Text) -> Option<Quota> {
        text.value.parse().map_err(|error| self.notation("bad-limit", text, &error)).ok()
    }

    fn categories(&mut self, file: &PolicyFile) -> Vec<Category> {
        file.category
            .iter()
            .map(|category| Category {
                name: category.name.value.as_str().into(),
                matches: Match {
                    method: methods(category.method.as_ref()),
                    path: self.patterns(category.path.as_ref(), Kind::Path),
                    host: self.patterns(category.host.as_ref(), Kind::Host),
                    ..Match::default()
                },
            })
            .collect()
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
            method: methods(file.method.as_ref()),
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

    fn tiers(&mut self, file: &PolicyFile, shapes: &rules::Shapes) -> Tiers {
        let mut tiers = Tiers::default();
        for (name, table) in &file.tiers.0 {
            let limits = self.shaped(table.0.iter(), shapes);
            tiers.tiers.insert(name.value.as_str().into(), limits);
        }
        for (table, owners) in [(&file.tenants, &mut tiers.tenants), (&file.users, &mut tiers.users)] {
            for (name, table) in &table.0 {
                let tier = table.0.iter().find(|(key, _)| key.value == "tier").map(|(_, text)| text);
                if let Some(tier) = tier
                    && !file.tiers.0.iter().any(|(name, _)| name.value == tier.value)
                {
                    let help = format!("add [tiers.{}]", tier.value);
                    self.error("unknown-tier", tier.span.clone(), format!("no tier is called \"{}\"", tier.value), &help);
                }
                let limits = self.shaped(table.0.iter().filter(|(key, _)| key.value != "tier"), shapes);
                let tier = tier.map(|text| text.value.as_str().into());
                owners.insert(name.value.as_str().into(), Own { tier, limits });
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
            let shaped = shapes.all().map(|shape| match shape.limit(quota) {
                Ok(limit) => limit,
                Err(message) => {
                    self.error("impossible-limit", text.span.clone(), message, "");
                    None
                }
            });
            categories.insert(category.value.as_str().into(), shaped.collect());
        }
        categories
    }

    fn lists(&mut self, file: &ListsFile, address: &ClientAddress) -> Lists {
        let mut lists = Lists::default();
        for (texts, listed) in [(&file.allow, Listed::Allow), (&file.deny, Listed::Deny)] {
            for text in texts.iter().flat_map(|texts| &texts.items) {
                match ListEntry::parse(&text.value) {
                    Err(message) => self.error("bad-value", text.span.clone(), message, ""),
                    Ok(entry) => {
                        if let Some(why) = check::too_wide(&entry, listed, address) {
                            self.error("list-too-wide", text.span.clone(), why, "name the addresses you mean");
                        }
                        lists.insert(entry, listed);
                    }
                }
            }
        }
        lists
    }

    fn login(&mut self, file: &LoginFile) -> Login {
        let mut login = Login::default();
        if let Some(account) = file.account.as_ref().and_then(|text| self.login_limit(text)) {
            login.account = account;
        }
        if let Some(ip) = file.ip.as_ref().and_then(|text| self.login_limit(text)) {
            login.ip = ip;
        }
        if let Some(locks) = &file.locks {
            login.locks = locks.0.iter().filter_map(|(count, length)| self.lock(count, length)).collect();
            login.locks.sort_unstable();
        }
        if let Some(ceiling) = &file.ceiling {
            if ceiling.value == 0 {
                self.error("bad-value", ceiling.span.clone(), "a ceiling of 0 refuses everyone", "100 is what NIST allows");
            } else if ceiling.value > 100 {
                let help = "NIST SP 800-63B allows at most 100 failures in a row";
                self.warning("high-ceiling", ceiling.span.clone(), "a ceiling above 100", help);
            }
            login.ceiling = ceiling.value;
        }
        if let Some(mode) = &file.on_store_error {
            login.on_store_error = mode.value.into();
        }
        login
    }

    fn login_limit(&mut self, text: &Text) -> Option<Log> {
        let help = "a login budget is a sliding-log: \"5/15min\", at most 1,024 attempts";
        match self.quota(text)? {
            Quota::Per { amount, unit: crate::limit::Unit::Count, period, burst: None } => {
                Log::exact(amount, period)
                    .map_err(|error| self.error("impossible-limit", text.span.clone(), error.0, help))
                    .ok()
            }
            _ => {
                self.error("impossible-limit", text.span.clone(), "a login budget counts attempts over a period", help);
                None
            }
        }
    }

    fn lock(&mut self, count: &Text, length: &Text) -> Option<(u32, Span)> {
        let Ok(failures @ 1..) = count.value.parse::<u32>() else {
            let message = format!("\"{}\" is not a number of failures", count.value);
            self.error("bad-value", count.span.clone(), message, "write locks = { 3 = \"1min\", 5 = \"5min\" }");
            return None;
        };
        Some((failures, self.span(length)?))
    }

    fn alerts(&mut self, file: &AlertsFile) -> Alerts {
        let named: [(&'static str, &Option<AlertFile>); 4] = [
            ("edge_blocks", &file.edge_blocks),
            ("tenant_blocks", &file.tenant_blocks),
            ("user_bans", &file.user_bans),
            ("ip_blocks", &file.ip_blocks),
        ];
        let mut alerts = Alerts::new();
        for (name, alert) in named {
            let Some(alert) = alert else { continue };
            let Some(per) = self.span(&alert.per) else { continue };
            if alert.warning.value == 0 || alert.critical.value < alert.warning.value {
                let help = "warning is at least 1, and critical no lower";
                self.error("bad-value", alert.critical.span.clone(), "these thresholds cannot be met in order", help);
            }
            alerts.insert(name, Alert { per, warning: alert.warning.value, critical: alert.critical.value });
        }
        alerts
    }

    fn memory(&mut self, file: &MemoryFile) -> Memory {
        let mut memory = Memory::default();
        if let Some(Located { value, span }) = &file.max_keys {
            if !(1_000..=4_000_000_000).contains(value) {
                self.error("bad-value", span.clone(), "max_keys is between 1,000 and 4,000,000,000", "");
            }
            memory.max_keys = *value;
        }
        if let Some(when_full) = &file.when_full {
            memory.when_full = match when_full.value {
                WhenFullName::Fold => WhenFull::Fold,
                WhenFullName::Shared => WhenFull::Shared,
                WhenFullName::Deny => WhenFull::Deny,
            };
        }
        memory
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

fn address_source(text: &str) -> AddressSource {
    match text.to_ascii_lowercase().as_str() {
        "peer" => AddressSource::Peer,
        "x-forwarded-for" => AddressSource::XForwardedFor,
        "forwarded" => AddressSource::Forwarded,
        header => AddressSource::Header(header.into()),
    }
}

fn methods(texts: Option<&Texts>) -> Vec<Box<str>> {
    let texts = texts.iter().flat_map(|texts| &texts.items);
    texts.map(|text| crate::path::spell_method(&text.value).into()).collect()
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

