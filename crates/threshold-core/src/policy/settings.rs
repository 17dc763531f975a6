//! What a tenant or a user is given while a policy is in force: a tier, limits of their own, or so many times as much.

use std::collections::BTreeMap;
use std::fmt;

use super::tiers::{Categories, Own, Scaled};
use super::{Measure, Measured, Per, Policy};
use crate::caller::DEFAULT_CATEGORY;
use crate::codec::{BytesError, Reader, Writer};
use crate::limit::Quota;
use crate::time::Timestamp;

/// The version of a setting's bytes.
const VERSION: u8 = 1;
/// The longest text, in bytes, and the most limits of one setting.
const MAX_TEXT: usize = 1 << 14;
const MAX_LIMITS: usize = 256;
/// The most that a limit is multiplied by.
pub const MAX_TIMES: u32 = 1_000_000;

/// Who is given something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Owner {
    /// A tenant.
    Tenant,
    /// A user.
    User,
}

/// What somebody is given. What is left out stays as the policy says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// A tier.
    pub tier: Option<Box<str>>,
    /// Limits by category, as a policy writes them.
    pub limits: BTreeMap<Box<str>, Box<str>>,
    /// So many times as much as any limit would else be.
    pub times: u32,
    /// Until when; `Timestamp::MAX` is for good.
    pub until: Timestamp,
    /// Since when.
    pub from: Timestamp,
    /// Who has set it.
    pub by: Box<str>,
    /// Why.
    pub reason: Box<str>,
}

/// Why a setting does not fit a policy: which field, and what is wrong with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SettingError {
    /// The field.
    pub field: String,
    /// What is wrong.
    pub message: String,
}

impl fmt::Display for SettingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.message)
    }
}

impl std::error::Error for SettingError {}

impl Setting {
    /// Whether it changes nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tier.is_none() && self.limits.is_empty() && self.times <= 1
    }

    /// The bytes that are kept.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Writer::new(VERSION);
        out.number(u64::from(self.times));
        out.number(self.from.micros());
        out.number(self.until.micros());
        // No tier has an empty name.
        for text in [self.tier.as_deref().unwrap_or(""), &self.by, &self.reason] {
            out.text(text);
        }
        out.number(self.limits.len() as u64);
        for (category, limit) in &self.limits {
            out.text(category);
            out.text(limit);
        }
        out.finish()
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    /// On another version, and on bytes no setting has.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, BytesError> {
        let mut from = Reader::new(bytes, VERSION)?;
        let times = u32::try_from(from.number()?).map_err(|_| BytesError::Malformed("setting"))?;
        let (since, until) = (Timestamp::from_micros(from.number()?), Timestamp::from_micros(from.number()?));
        let (tier, by, reason) = (from.text(MAX_TEXT)?, from.text(MAX_TEXT)?, from.text(MAX_TEXT)?);
        let mut limits = BTreeMap::new();
        for _ in 0..from.count(MAX_LIMITS)? {
            limits.insert(from.text(MAX_TEXT)?.into(), from.text(MAX_TEXT)?.into());
        }
        from.finish()?;
        let tier = (!tier.is_empty()).then(|| tier.into());
        Ok(Self { tier, limits, times, until, from: since, by: by.into(), reason: reason.into() })
    }
}

impl Policy {
    /// Gives somebody what a setting says, on top of what the policy gives them.
    ///
    /// # Errors
    /// Where the setting does not fit this policy; it then changes nothing.
    pub fn give(&mut self, owner: Owner, name: &str, setting: &Setting) -> Result<(), SettingError> {
        let wrong = |field: String, message: String| Err(SettingError { field, message });
        let owners = if owner == Owner::User { &self.tiers.users } else { &self.tiers.tenants };
        let mut own = owners.get(name).cloned().unwrap_or_default();
        if let Some(tier) = &setting.tier {
            if !self.tiers.tiers.contains_key(tier) {
                return wrong("tier".to_owned(), format!("no tier is called \"{tier}\""));
            }
            own.tier = Some(tier.clone());
        }
        for (category, text) in &setting.limits {
            let limit = self.given_limit(category, text);
            let shaped = limit.map_err(|message| SettingError { field: format!("limits.{category}"), message })?;
            own.limits.insert(category.clone(), shaped);
        }
        if setting.times > 1 {
            let scaled = self.scaled(owner, &own, setting.times);
            own.scaled = Some(scaled.map_err(|message| SettingError { field: "times".to_owned(), message })?);
            self.tiers.any_scaled = true;
        }
        let owners = if owner == Owner::User { &mut self.tiers.users } else { &mut self.tiers.tenants };
        owners.insert(name.into(), own);
        Ok(())
    }

    fn given_limit(&self, category: &str, text: &str) -> Result<Vec<Option<Measured>>, String> {
        let known = self.categories.iter().map(|own| own.name.as_ref()).chain([DEFAULT_CATEGORY]);
        let mut known = known.chain(self.tiers.tiers.values().flat_map(Categories::keys).map(AsRef::as_ref));
        if !known.any(|own| own == category) {
            return Err(format!("no category is called \"{category}\""));
        }
        if self.tiers.shapes.is_empty() {
            return Err("no rule of the policy has limit = \"tier\", so this would change nothing".to_owned());
        }
        let quota: Quota = text.parse().map_err(|error: crate::limit::NotationError| error.message)?;
        self.tiers.shapes.iter().map(|shape| shape.measured(quota)).collect()
    }

    /// Everything that somebody could have, so many times over.
    fn scaled(&self, owner: Owner, own: &Own, times: u32) -> Result<Box<Scaled>, String> {
        let part = if owner == Owner::User { Per::User } else { Per::Tenant };
        if times > MAX_TIMES {
            return Err(format!("at most {MAX_TIMES} times"));
        }
        let mut counted = self.rules.iter().filter(|rule| rule.per.contains(&part)).peekable();
        if counted.peek().is_none() {
            let name = if owner == Owner::User { "user" } else { "tenant" };
            return Err(format!("no rule of the policy counts by {name}, so this would change nothing"));
        }
        let more = |measured: &Measured| {
            let limit = measured.limit.times(u64::from(times)).map_err(|error| error.0)?;
            Ok::<_, String>(Measured { limit, cost: measured.cost.clone() })
        };
        let shaped = |shaped: &Vec<Option<Measured>>| -> Result<Vec<Option<Measured>>, String> {
            shaped.iter().map(|own| own.as_ref().map(more).transpose()).collect()
        };
        let all = |categories: &Categories| -> Result<Categories, String> {
            categories.iter().map(|(name, own)| Ok((name.clone(), shaped(own)?))).collect()
        };
        let mut rules = BTreeMap::new();
        for rule in counted {
            if let Measure::Fixed(measured) = &rule.measure {
                rules.insert(rule.name.clone(), more(measured)?);
            }
        }
        let tiers = self.tiers.tiers.iter().map(|(name, own)| Ok((name.clone(), all(own)?)));
        Ok(Box::new(Scaled { rules, own: all(&own.limits)?, tiers: tiers.collect::<Result<_, String>>()? }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Facts, Ledger, plan::Verb};

    const POLICY: &str = r#"
        [identity]
        default_tier = "small"
        [tiers.small]
        requests = "2/h"
        [tiers.large]
        requests = "5/h"
        [[rule]]
        name = "tier"
        per = ["tenant"]
        limit = "tier"
        on_missing = "skip"
        [[rule]]
        name = "posts"
        per = ["user"]
        limit = "3/h"
        algorithm = "sliding-log"
        on_missing = "skip"
        [[rule]]
        name = "all"
        per = []
        limit = "1000/h"
    "#;

    fn setting(times: u32, tier: Option<&str>, limits: &[(&str, &str)]) -> Setting {
        let limits = limits.iter().map(|(category, limit)| ((*category).into(), (*limit).into())).collect();
        let (from, until) = (Timestamp::EPOCH, Timestamp::MAX);
        Setting { tier: tier.map(Into::into), limits, times, until, from, by: "ops".into(), reason: "r".into() }
    }

    fn admitted(policy: &Policy, tenant: Option<&str>, user: Option<&str>) -> usize {
        let mut ledger = Ledger::default();
        let facts = Facts { tenant, user, ip: "203.0.113.7".parse().ok(), ..Facts::default() };
        let now = Timestamp::from_secs(1_767_225_600);
        let mut check = || ledger.decide(policy, Verb::Check, &facts, now).unwrap().decision.allowed();
        (0..200).take_while(|_| check()).count()
    }

    #[test]
    fn what_somebody_is_given_is_theirs_alone() {
        let base = Policy::parse(POLICY, &|_| None).unwrap();
        let given = |owner, name: &str, setting: &Setting| {
            let mut policy = base.clone();
            policy.give(owner, name, setting).unwrap();
            policy
        };
        assert_eq!((admitted(&base, Some("acme"), None), admitted(&base, None, Some("u1"))), (2, 3));
        let ten = given(Owner::User, "u1", &setting(10, None, &[]));
        assert_eq!((admitted(&ten, None, Some("u1")), admitted(&ten, None, Some("u2"))), (30, 3));
        let large = given(Owner::Tenant, "acme", &setting(1, Some("large"), &[]));
        assert_eq!((admitted(&large, Some("acme"), None), admitted(&large, Some("other"), None)), (5, 2));
        let own = given(Owner::Tenant, "acme", &setting(1, None, &[("requests", "7/h")]));
        assert_eq!((admitted(&own, Some("acme"), None), admitted(&own, Some("other"), None)), (7, 2));
        let both = given(Owner::Tenant, "acme", &setting(3, Some("large"), &[("requests", "7/h")]));
        assert_eq!(admitted(&both, Some("acme"), None), 21);
        let scaled_tier = given(Owner::Tenant, "acme", &setting(3, Some("large"), &[]));
        assert_eq!((admitted(&scaled_tier, Some("acme"), None), admitted(&scaled_tier, Some("other"), None)), (15, 2));
        // A log that becomes too large to be exact is one in sub-windows.
        let huge = given(Owner::User, "u1", &setting(1_000, None, &[]));
        assert_eq!(admitted(&huge, None, Some("u1")), 200);
    }

    #[test]
    fn a_setting_that_does_not_fit_is_told_by_its_field() {
        let refused = |text: &str, owner, setting: Setting| {
            Policy::parse(text, &|_| None).unwrap().give(owner, "x", &setting).unwrap_err().field
        };
        assert_eq!(refused(POLICY, Owner::User, setting(1, Some("none"), &[])), "tier");
        assert_eq!(refused(POLICY, Owner::User, setting(1, None, &[("ai", "5/h")])), "limits.ai");
        assert_eq!(refused(POLICY, Owner::User, setting(1, None, &[("requests", "5 an hour")])), "limits.requests");
        assert_eq!(refused(POLICY, Owner::User, setting(MAX_TIMES + 1, None, &[])), "times");
        let by_address = "[[rule]]\nname = \"a\"\nper = [\"ip\"]\nlimit = \"5/h\"";
        assert_eq!(refused(by_address, Owner::User, setting(2, None, &[])), "times");
        assert_eq!(refused(by_address, Owner::User, setting(1, None, &[("requests", "5/h")])), "limits.requests");
    }

    #[test]
    fn a_setting_reads_back_as_it_was_written() {
        for own in [setting(1, None, &[]), setting(10, Some("large"), &[("requests", "5/h"), ("ai", "1/day")])] {
            let bytes = own.to_bytes();
            assert_eq!(Setting::from_bytes(&bytes), Ok(own));
            for cut in 0..bytes.len() {
                assert!(Setting::from_bytes(&bytes[..cut]).is_err());
            }
        }
    }
}
