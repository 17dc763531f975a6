//! Compiles ladders, lists, login, alerts, memory and the settings for Envoy.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::ops::Range;

use super::{Loader, is_token};
use crate::address::canonical;
use crate::ladder::{Ladder, Rung};
use crate::limit::{Quota, SlidingLog, Unit};
use crate::lockout::Login;
use crate::plan::Verb;
use crate::policy::file::{
    AlertEntry, AlertsFile, EnvoyDomainFile, EnvoyFile, EnvoyVerbName, LadderFile, ListsFile, Located, LoginFile,
    MemoryFile, NamedEntries, Text,
};
use crate::policy::lists::{ListEntry, Listed, Lists};
use crate::policy::place::{LoginBudget, LoginPlaces};
use crate::policy::{
    Alert, AlertOn, Alerts, DescriptorTarget, EnvoyDomain, EnvoySettings, Identity, Memory, Rule, check,
};
use crate::time::Span;

impl Loader<'_> {
    pub(super) fn ladders(&mut self, table: &NamedEntries<LadderFile>) -> BTreeMap<String, Ladder> {
        let mut ladders: BTreeMap<String, Ladder> = ["graduated", "strict", "gentle"]
            .into_iter()
            .filter_map(|name| Some((name.to_owned(), Ladder::built_in(name)?)))
            .collect();
        for (name, file) in &table.0 {
            // A table with the name of a built-in ladder changes it, so a policy can set its decay alone.
            let base = ladders.get(&name.value).cloned();
            if base.is_none() && file.rungs.is_none() {
                let message = format!("the ladder \"{}\" has no rungs", name.value);
                self.error(
                    "bad-value",
                    name.span.clone(),
                    message,
                    "write rungs = [\"warn\", \"cooldown 1min\", \"ban 24h\"]",
                );
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
                    let message = format!("\"{}\" is not the name of a cookie", cookie.value);
                    self.error("bad-value", cookie.span.clone(), message, "use letters, digits, - and _");
                }
            }
            ladders.insert(name.value.clone(), ladder);
        }
        ladders
    }

    fn rung(&mut self, text: &Text) -> Option<Rung> {
        Rung::parse(&text.value).map_err(|error| self.notation("bad-rung", text, &error)).ok()
    }

    pub(super) fn lists(&mut self, file: &ListsFile, identity: &Identity) -> Lists {
        let mut lists = Lists::default();
        for (texts, listed) in [(&file.allow, Listed::Allow), (&file.deny, Listed::Deny)] {
            for text in texts.iter().flat_map(|texts| &texts.items) {
                let spell = |name: Box<str>| identity.user_scope.spell(&name).map(|name| ListEntry::User(name.into()));
                let entry = match ListEntry::parse(&text.value) {
                    Ok(ListEntry::User(name)) => spell(name),
                    other => other,
                };
                let entry = match entry {
                    Ok(entry) => entry,
                    Err(error) => {
                        self.error("bad-value", text.span.clone(), error.to_string(), "");
                        continue;
                    }
                };
                if !self.spend_on_error(identity.address.trusted.len()) {
                    return lists;
                }
                if let Some(why) = check::too_wide(&entry, listed, &identity.address) {
                    self.error("list-too-wide", text.span.clone(), why.to_string(), "list the addresses that you mean");
                }
                // Bans widen a bare IPv6 address, lists do not. An allow entry for one address is harmless, a deny
                // entry is useless.
                let is_bare = matches!(text.value.trim().parse().map(canonical), Ok(IpAddr::V6(_)));
                if is_bare && listed == Listed::Deny {
                    let message = format!("\"{}\" is only one of the addresses that a client has", text.value);
                    let help = "write its /64, or /128 for that one address";
                    self.warning("one-ipv6-address", text.span.clone(), message, help);
                }
                lists.insert(entry, listed);
            }
        }
        lists
    }

    pub(super) fn login(&mut self, Located { value: file, span }: &Located<LoginFile>) -> Login {
        self.require_feature("login", cfg!(feature = "login"), span);
        let mut login = Login::default();
        if let Some(account) = file.account.as_ref().and_then(|text| self.login_limit(text)) {
            login.account = account;
        }
        if let Some(ip) = file.ip.as_ref().and_then(|text| self.login_limit(text)) {
            login.ip = ip;
        }
        if let Some(locks) = &file.locks {
            login.locks = locks.0.iter().filter_map(|(count, length)| self.lock(count, length)).collect();
            // `Login::lock` searches from the end and relies on ascending numbers of failures.
            login.locks.sort_unstable();
        }
        if let Some(ceiling) = &file.ceiling {
            // Every account has at least 0 failures, so all would be at the ceiling.
            if ceiling.value == 0 {
                self.error(
                    "bad-value",
                    ceiling.span.clone(),
                    "a ceiling of 0 would refuse every login",
                    "NIST SP 800-63B allows 100",
                );
            } else if ceiling.value > 100 {
                let help = "NIST SP 800-63B allows at most 100 consecutive failures";
                self.warning("high-ceiling", ceiling.span.clone(), "the ceiling is above 100", help);
            }
            login.ceiling = ceiling.value;
        }
        if let Some(mode) = &file.on_store_error {
            login.on_store_error = mode.value.into();
        }
        login
    }

    pub(super) fn login_places(&mut self, file: &LoginFile) -> LoginPlaces {
        let mut places = LoginPlaces::default();
        let written = [(LoginBudget::Account, &file.account_place), (LoginBudget::Ip, &file.ip_place)];
        for (budget, text) in written.into_iter().filter_map(|(budget, text)| Some((budget, text.as_ref()?))) {
            let Some(place) = self.place(text) else { continue };
            if let Err(why) = places.set(budget, place) {
                self.error(
                    "bad-place",
                    text.span.clone(),
                    why,
                    "every attempt on one budget must find it in one place",
                );
            }
        }
        places
    }

    /// Reports a table whose feature is off.
    fn require_feature(&mut self, feature: &str, is_on: bool, span: &Range<usize>) {
        if !is_on {
            let message = format!("this program was built without the feature `{feature}`");
            let help = format!("enable the feature `{feature}` of threshold-core or threshold-limiter");
            self.error("not-built-in", span.clone(), message, &help);
        }
    }

    fn login_limit(&mut self, text: &Text) -> Option<SlidingLog> {
        let help = "a login budget is a sliding-log: \"5/15min\", at most 1,024 attempts";
        match self.quota(text)? {
            // Only an exact log will do: a bucket or an estimate would let more guesses through than the policy says.
            Quota::Per { amount, unit: Unit::Count, period, burst: None } => SlidingLog::new(amount, period)
                .map_err(|error| self.error("impossible-limit", text.span.clone(), error.to_string(), help))
                .ok(),
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

    pub(super) fn alerts(&mut self, file: &AlertsFile) -> Alerts {
        let named: [(AlertOn, &Option<AlertEntry>); 4] = [
            (AlertOn::EdgeBlocks, &file.edge_blocks),
            (AlertOn::TenantBlocks, &file.tenant_blocks),
            (AlertOn::UserBans, &file.user_bans),
            (AlertOn::IpBlocks, &file.ip_blocks),
        ];
        let mut alerts = Alerts::new();
        for (on, alert) in named {
            let alert = match alert {
                None => continue,
                Some(AlertEntry::Off(text)) => {
                    if text.value != "off" {
                        let message = format!("\"{}\" is not an alert", text.value);
                        let help = "write \"off\", or { per = \"min\", warning = 20, critical = 100 }";
                        self.error("bad-value", text.span.clone(), message, help);
                    }
                    alerts.insert(on, None);
                    continue;
                }
                Some(AlertEntry::Thresholds(alert)) => alert,
            };
            let Some(per) = self.span(&alert.per) else { continue };
            if alert.warning.value == 0 || alert.critical.value < alert.warning.value {
                let help = "warning is at least 1, and critical is not below warning";
                self.error("bad-value", alert.critical.span.clone(), "the thresholds are 0 or out of order", help);
            }
            alerts.insert(on, Some(Alert { per, warning: alert.warning.value, critical: alert.critical.value }));
        }
        alerts
    }

    pub(super) fn memory(&mut self, file: &MemoryFile) -> Memory {
        let mut memory = Memory::default();
        if let Some(Located { value, span }) = &file.max_keys {
            if !(1_000..=4_000_000_000).contains(value) {
                self.error("bad-value", span.clone(), "max_keys is between 1,000 and 4,000,000,000", "");
            }
            memory.max_keys = *value;
        }
        if let Some(when_full) = &file.when_full {
            memory.when_full = when_full.value.into();
        }
        memory
    }

    /// Returns the index of the rule with this name.
    fn rule_named(&mut self, name: &Text, rules: &[(Rule, Range<usize>)]) -> Option<usize> {
        let index = rules.iter().position(|(rule, _)| *rule.name == *name.value);
        if index.is_none() {
            let message = format!("there is no rule called \"{}\"", name.value);
            self.error("unknown-rule", name.span.clone(), message, "name rules of this policy");
        }
        index
    }

    pub(super) fn envoy(&mut self, file: &EnvoyFile, rules: &[(Rule, Range<usize>)]) -> EnvoySettings {
        let mut settings = EnvoySettings::default();
        for (key, text) in &file.descriptors.0 {
            let Some(target) = DescriptorTarget::named(&text.value) else {
                let message = format!("\"{}\" is nothing that an entry of a descriptor can be", text.value);
                let help = format!("one of {}", DescriptorTarget::NAMES);
                self.error("bad-value", text.span.clone(), message, &help);
                continue;
            };
            settings.descriptors.insert(key.value.as_str().into(), target);
        }
        for (name, domain) in &file.domains.0 {
            if name.value.is_empty() {
                let help = "Envoy's requests for an empty domain are refused";
                self.error("bad-value", name.span.clone(), "a domain has a name", help);
            }
            let EnvoyDomainFile { verb, negative_hits, overrides } = domain;
            let is_set = |flag: &Option<Located<bool>>| flag.as_ref().is_some_and(|flag| flag.value);
            let verb = match verb.as_ref().map(|verb| verb.value) {
                Some(EnvoyVerbName::Record) => Verb::Record,
                Some(EnvoyVerbName::Check) | None => Verb::Check,
            };
            let domain = EnvoyDomain { verb, negative_hits: is_set(negative_hits), overrides: is_set(overrides) };
            settings.domains.insert(name.value.as_str().into(), domain);
        }
        for (name, replaced) in &file.replaces.0 {
            let rule = self.rule_named(name, rules);
            let replaced: Box<[usize]> =
                replaced.items.iter().filter_map(|name| self.rule_named(name, rules)).collect();
            if rule.is_some_and(|rule| replaced.contains(&rule)) {
                let message = format!("rule \"{}\" would replace itself", name.value);
                self.error("bad-value", name.span.clone(), message, "it would never apply");
                continue;
            }
            settings.replaces.extend(rule.map(|rule| (rule, replaced)));
        }
        settings
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tests are built with every feature, so the feature is off by argument.
    #[test]
    fn a_table_without_its_feature_is_an_error() {
        let mut loader = Loader::new("[login]\n", crate::policy::ReviewWork::default());
        loader.require_feature("login", true, &(0..7));
        loader.require_feature("login", false, &(0..7));
        let findings = loader.finish(None, None).findings;
        assert_eq!(findings.len(), 1);
        assert_eq!((findings[0].code, findings[0].span.clone()), ("not-built-in", 0..7));
        assert_eq!(findings[0].message, "this program was built without the feature `login`");
    }
}
