//! Ladders, lists, login, alerts and memory as written → as meant.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::{Loader, is_token};
use crate::address::canonical;
use crate::ladder::{Ladder, Rung};
use crate::limit::{Quota, SlidingLog, Unit};
use crate::lockout::Login;
use crate::policy::file::{
    AlertFile, AlertsFile, LadderFile, ListsFile, Located, LoginFile, MemoryFile, NamedEntries, Text, WhenFullName,
};
use crate::policy::lists::{ListEntry, Listed, Lists};
use crate::policy::{Alert, Alerts, Identity, Memory, WhenFull, check};
use crate::time::Span;

impl Loader<'_> {
    pub(super) fn ladders(&mut self, table: &NamedEntries<LadderFile>) -> BTreeMap<String, Ladder> {
        let mut ladders: BTreeMap<String, Ladder> = ["graduated", "strict", "gentle"]
            .into_iter()
            .filter_map(|name| Some((name.to_owned(), Ladder::built_in(name)?)))
            .collect();
        for (name, file) in &table.0 {
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
                    Err(message) => {
                        self.error("bad-value", text.span.clone(), message, "");
                        continue;
                    }
                };
                if let Some(why) = check::too_wide(&entry, listed, &identity.address) {
                    self.error("list-too-wide", text.span.clone(), why, "name the addresses you mean");
                }
                let is_bare = matches!(text.value.trim().parse().map(canonical), Ok(IpAddr::V6(_)));
                if is_bare && listed == Listed::Deny {
                    let message = format!("\"{}\" is one address of the many that a client has", text.value);
                    let help = "write its /64, or /128 if that one is meant";
                    self.warning("one-ipv6-address", text.span.clone(), message, help);
                }
                lists.insert(entry, listed);
            }
        }
        lists
    }

    pub(super) fn login(&mut self, file: &LoginFile) -> Login {
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
                self.error(
                    "bad-value",
                    ceiling.span.clone(),
                    "a ceiling of 0 refuses everyone",
                    "100 is what NIST allows",
                );
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

    fn login_limit(&mut self, text: &Text) -> Option<SlidingLog> {
        let help = "a login budget is a sliding-log: \"5/15min\", at most 1,024 attempts";
        match self.quota(text)? {
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

    pub(super) fn memory(&mut self, file: &MemoryFile) -> Memory {
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
