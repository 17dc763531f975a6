//! Settings that operators give single tenants and users while a policy is in force: a tier, limits, or a multiplier.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use super::tiers::{Categories, Given, Own, Scaled};
use super::{Measure, Measured, Per, Policy, Shards, SubjectError};
use crate::caller::DEFAULT_CATEGORY;
use crate::codec::{BytesError, Format, Reader, Versions, Writer, from_bytes, to_bytes};
use crate::limit::{Limit, LimitError, Quota};
use crate::time::Timestamp;

/// The maximum length of a text, in bytes, and the maximum number of limits in one setting.
const MAX_TEXT: usize = 1 << 18;
const MAX_LIMITS: usize = 256;
/// The largest multiplier.
pub const MAX_TIMES: u32 = 1_000_000;

/// The kind of subject that a setting is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Owner {
    /// A tenant.
    Tenant,
    /// A user.
    User,
}

/// The overrides of a tenant or a user. Everything that is left out stays as the policy has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// The tier.
    pub tier: Option<Box<str>>,
    /// Limits by category, as a policy writes them.
    pub limits: BTreeMap<Box<str>, Box<str>>,
    /// The multiplier of every limit.
    pub times: u32,
    /// Until when; `Timestamp::MAX` is permanent.
    pub until: Timestamp,
    /// Since when.
    pub from: Timestamp,
    /// Who set it.
    pub by: Box<str>,
    /// Why.
    pub reason: Box<str>,
}

/// Why a setting does not fit a policy. [`field`](Self::field) names the field that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SettingError {
    /// The name is not that of a tenant or a user.
    #[error(transparent)]
    Name(#[from] SubjectError),
    /// The policy has no tier of this name.
    #[error("no tier is called \"{tier}\"; known: {known}")]
    #[non_exhaustive]
    UnknownTier {
        /// The name.
        tier: Box<str>,
        /// The names of the policy's tiers.
        known: Box<str>,
    },
    /// The policy has no category of this name.
    #[error("no category is called \"{0}\"")]
    UnknownCategory(Box<str>),
    /// No rule takes its limit from a tier, so that a limit for this category has no effect.
    #[error("no rule of the policy has limit = \"tier\", so this would change nothing")]
    NoTierRule(Box<str>),
    /// The limit of a category is not one that the policy's rules can have.
    #[error("{reason}")]
    #[non_exhaustive]
    Limit {
        /// The category.
        category: Box<str>,
        /// What is wrong with the limit.
        reason: Box<str>,
    },
    /// `times` is more than [`MAX_TIMES`].
    #[error("at most {MAX_TIMES} times")]
    TooManyTimes,
    /// No rule counts by tenants or users, so that `times` has no effect.
    #[error("no rule of the policy counts by {}, so this would change nothing", counted_by(*.0))]
    NotCounted(Owner),
    /// A limit becomes too large if it is multiplied.
    #[error(transparent)]
    TooLarge(LimitError),
}

impl SettingError {
    /// Returns the name of the field that is wrong, as in the API: `id`, `tier`, `limits.CATEGORY` or `times`.
    #[must_use]
    pub fn field(&self) -> String {
        match self {
            Self::Name(_) => "id".to_owned(),
            Self::UnknownTier { .. } => "tier".to_owned(),
            Self::UnknownCategory(category) | Self::NoTierRule(category) | Self::Limit { category, .. } => {
                format!("limits.{category}")
            }
            Self::TooManyTimes | Self::NotCounted(_) | Self::TooLarge(_) => "times".to_owned(),
        }
    }
}

fn counted_by(owner: Owner) -> &'static str {
    if owner == Owner::User { "user" } else { "tenant" }
}

impl Setting {
    /// Returns whether the setting changes nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tier.is_none() && self.limits.is_empty() && self.times <= 1
    }

    /// The versions that can be read.
    pub(crate) const VERSIONS: Versions = Versions::FIRST;

    /// Returns the stored form.
    #[must_use]
    pub fn to_bytes(&self, format: Format) -> Vec<u8> {
        to_bytes(Self::VERSIONS, format, |out| self.write(out))
    }

    pub(crate) fn write(&self, out: &mut Writer) {
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
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    /// If the version is unknown or the bytes are malformed.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, BytesError> {
        from_bytes(bytes, Self::VERSIONS, Self::read)
    }

    pub(crate) fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let times = u32::try_from(from.number()?).map_err(|_| BytesError::Malformed("setting"))?;
        let (since, until) = (Timestamp::from_micros(from.number()?), Timestamp::from_micros(from.number()?));
        let (tier, by, reason) = (from.text(MAX_TEXT)?, from.text(MAX_TEXT)?, from.text(MAX_TEXT)?);
        let mut limits = BTreeMap::new();
        for _ in 0..from.count(MAX_LIMITS)? {
            limits.insert(from.text(MAX_TEXT)?.into(), from.text(MAX_TEXT)?.into());
        }
        let tier = (!tier.is_empty()).then(|| tier.into());
        Ok(Self { tier, limits, times, until, from: since, by: by.into(), reason: reason.into() })
    }
}

impl Policy {
    /// Applies a setting to a tenant or a user, on top of the policy's file, and replaces the setting before. The cost does not
    /// depend on the number of settings.
    ///
    /// # Errors
    /// If the setting does not fit this policy, which then stays unchanged.
    pub fn give(&mut self, owner: Owner, name: &str, setting: &Setting) -> Result<(), SettingError> {
        let name = &*self.name_given(owner, name)?;
        let own = self.with_setting(owner, name, setting)?;
        self.tiers.give(owner, name, Some(Given { setting: Arc::new(setting.clone()), own: Some(own) }));
        Ok(())
    }

    /// Applies a setting like [`give`](Self::give), but stores one that does not fit too, without effect, for a later policy that
    /// it fits.
    ///
    /// # Errors
    /// If the setting does not fit.
    pub fn keep_setting(&mut self, owner: Owner, name: &str, setting: &Setting) -> Result<(), SettingError> {
        self.keep_shared(owner, name, &Arc::new(setting.clone()))
    }

    /// Applies a shared setting like [`keep_setting`](Self::keep_setting); `None` removes the present one.
    ///
    /// # Errors
    /// If the setting does not fit.
    pub fn apply_setting(
        &mut self,
        owner: Owner,
        name: &str,
        setting: Option<&Arc<Setting>>,
    ) -> Result<(), SettingError> {
        match setting {
            Some(setting) => self.keep_shared(owner, name, setting),
            None => {
                self.take_back(owner, name);
                Ok(())
            }
        }
    }

    /// Overrides limits of a tenant as its table in the policy's file does, below the settings of operators. A limit that is left
    /// out stays as the file has it. The first call on a policy that shares its tables with another copies them.
    ///
    /// # Errors
    /// If the name or a limit does not fit this policy, which then stays unchanged.
    pub fn override_tenant<'l>(
        &mut self,
        tenant: &str,
        limits: impl IntoIterator<Item = (&'l str, &'l str)>,
    ) -> Result<(), SettingError> {
        let name: Box<str> = self.name_given(Owner::Tenant, tenant)?.as_ref().into();
        let compiled = limits.into_iter().map(|(limit, text)| Ok((limit.into(), self.given_limit(limit, text)?)));
        let compiled: Categories = compiled.collect::<Result<_, SettingError>>()?;
        self.tiers.override_tenant(name, compiled);
        Ok(())
    }

    /// Removes a setting. Returns whether there was one.
    pub fn take_back(&mut self, owner: Owner, name: &str) -> bool {
        // A setting from an earlier `user_scope` is stored under a name that does not parse any more, and must still be
        // removable.
        let spelled = self.owner_name(owner, name).unwrap_or(Cow::Borrowed(name));
        self.tiers.give(owner, &spelled, None)
    }

    /// Returns the setting of a tenant or a user.
    #[must_use]
    pub fn setting(&self, owner: Owner, name: &str) -> Option<&Setting> {
        let spelled = self.owner_name(owner, name).unwrap_or(Cow::Borrowed(name));
        self.tiers.given(owner).get(&spelled).map(|given| &*given.setting)
    }

    /// Returns all settings, in no particular order.
    pub fn settings(&self) -> impl Iterator<Item = (Owner, &str, &Setting)> {
        [Owner::Tenant, Owner::User].into_iter().flat_map(|owner| {
            let given = self.tiers.given(owner).iter();
            given.map(move |(name, given)| (owner, &**name, &*given.setting))
        })
    }

    /// Returns the number of settings.
    #[must_use]
    pub fn settings_len(&self) -> usize {
        self.tiers.given(Owner::Tenant).len().saturating_add(self.tiers.given(Owner::User).len())
    }

    /// Replaces all settings by those of another policy. A setting that both already share costs one comparison. Returns the
    /// settings that do not fit; they are stored without effect.
    pub fn take_settings_of(&mut self, other: &Self) -> Vec<(Owner, Arc<str>, SettingError)> {
        let mut unfit = Vec::new();
        for owner in [Owner::Tenant, Owner::User] {
            let (own, others) = (self.tiers.given(owner), other.tiers.given(owner));
            // Collected first: removing changes the map that is iterated.
            let gone = own.iter().filter(|(name, _)| others.get(name).is_none());
            for name in gone.map(|(name, _)| Arc::clone(name)).collect::<Vec<_>>() {
                self.take_back(owner, &name);
            }
            for (name, given) in others.iter() {
                let known = self.tiers.given(owner).get(name);
                // Compiling a setting is the expensive part. The same allocation is the same setting, already compiled
                // for this policy.
                if known.is_some_and(|known| Arc::ptr_eq(&known.setting, &given.setting)) {
                    continue;
                }
                if let Err(error) = self.keep_shared(owner, name, &given.setting) {
                    unfit.push((owner, Arc::clone(name), error));
                }
            }
        }
        unfit
    }

    /// Checks that a setting fits this policy.
    ///
    /// # Errors
    /// If it does not fit.
    pub fn fits(&self, owner: Owner, name: &str, setting: &Setting) -> Result<(), SettingError> {
        let name = self.name_given(owner, name)?;
        self.with_setting(owner, &name, setting).map(drop)
    }

    /// Returns the canonical name of the owner of a setting.
    fn name_given<'n>(&self, owner: Owner, name: &'n str) -> Result<Cow<'n, str>, SettingError> {
        Ok(self.owner_name(owner, name)?)
    }

    fn keep_shared(&mut self, owner: Owner, name: &str, setting: &Arc<Setting>) -> Result<(), SettingError> {
        // A name that does not have the form of this policy's names is stored unchanged.
        let spelled = self.name_given(owner, name);
        let with_setting = spelled.as_ref().map_err(SettingError::clone);
        let (own, fits) = match with_setting.and_then(|name| self.with_setting(owner, name, setting)) {
            Ok(own) => (Some(own), Ok(())),
            Err(error) => (None, Err(error)),
        };
        // Stored also where it does not fit: the operator's setting must survive a reload with a mistake in the policy.
        self.tiers.give(owner, spelled.as_deref().unwrap_or(name), Some(Given { setting: Arc::clone(setting), own }));
        fits
    }

    /// Compiles what an owner has with a setting on top of the policy's file.
    fn with_setting(&self, owner: Owner, name: &str, setting: &Setting) -> Result<Own, SettingError> {
        let written = self.tiers.written();
        let owners = if owner == Owner::User { &written.users } else { &written.tenants };
        let mut own = owners.get(name).cloned().unwrap_or_default();
        if let Some(tier) = &setting.tier {
            if !written.tiers.contains_key(tier) {
                let known: Vec<&str> = written.tiers.keys().map(AsRef::as_ref).collect();
                return Err(SettingError::UnknownTier { tier: tier.clone(), known: known.join(", ").into() });
            }
            own.tier = Some(tier.clone());
        }
        for (category, text) in &setting.limits {
            own.limits.insert(category.clone(), self.given_limit(category, text)?);
        }
        // After the tier and the limits, so that the multiplier applies to those as well.
        if setting.times > 1 {
            own.scaled = Some(self.scaled(owner, &own, setting.times)?);
        }
        Ok(own)
    }

    fn given_limit(&self, category: &str, text: &str) -> Result<Vec<Option<Measured>>, SettingError> {
        let known = self.categories.iter().map(|own| own.name.as_ref()).chain([DEFAULT_CATEGORY]);
        let written = self.tiers.written();
        let mut known = known.chain(written.tiers.values().flat_map(Categories::keys).map(AsRef::as_ref));
        if !known.any(|own| own == category) && !written.is_named(category) {
            return Err(SettingError::UnknownCategory(category.into()));
        }
        if !written.takes(category) {
            return Err(SettingError::NoTierRule(category.into()));
        }
        let wrong = |reason: String| SettingError::Limit { category: category.into(), reason: reason.into() };
        let quota: Quota = text.parse().map_err(|error: crate::limit::NotationError| wrong(error.message))?;
        written.shapes.iter().map(|shape| shape.measured_given(category, quota).map_err(wrong)).collect()
    }

    /// Compiles every limit that applies to an owner, multiplied.
    fn scaled(&self, owner: Owner, own: &Own, times: u32) -> Result<Box<Scaled>, SettingError> {
        let part = if owner == Owner::User { Per::User } else { Per::Tenant };
        if times > MAX_TIMES {
            return Err(SettingError::TooManyTimes);
        }
        let mut counted = self.rules.iter().filter(|rule| rule.per.contains(&part)).peekable();
        if counted.peek().is_none() {
            return Err(SettingError::NotCounted(owner));
        }
        // Multiplied here and not for each request: a limit that becomes too large is an error to the operator, not to
        // a client.
        let more = |measured: &Measured| {
            let more = |limit: &Limit| limit.times(u64::from(times)).map_err(SettingError::TooLarge);
            let shards = measured.shards.as_ref();
            // The number of shards stays, so that what was used in each stays used.
            let shards =
                shards.map(|own| more(&own.limit).map(|limit| Shards { number: own.number, limit })).transpose()?;
            Ok::<_, SettingError>(Measured { limit: more(&measured.limit)?, cost: measured.cost.clone(), shards })
        };
        let shaped = |shaped: &Vec<Option<Measured>>| -> Result<Vec<Option<Measured>>, SettingError> {
            shaped.iter().map(|own| own.as_ref().map(more).transpose()).collect()
        };
        let all = |categories: &Categories| -> Result<Categories, SettingError> {
            categories.iter().map(|(name, own)| Ok((name.clone(), shaped(own)?))).collect()
        };
        let mut rules = BTreeMap::new();
        for rule in counted {
            if let Measure::Fixed(measured) = &rule.measure {
                rules.insert(rule.name.clone(), more(measured)?);
            }
        }
        let tiers = self.tiers.written().tiers.iter().map(|(name, own)| Ok((name.clone(), all(own)?)));
        Ok(Box::new(Scaled { rules, own: all(&own.limits)?, tiers: tiers.collect::<Result<_, SettingError>>()? }))
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
    fn a_setting_applies_to_its_owner_alone() {
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

    const NAMED: &str = r#"
        [identity]
        default_tier = "small"
        [tiers.small]
        requests = "100/min"
        ai = "50/min"
        [tenants.written]
        burst = "4/s"
        [[category]]
        name = "ai"
        path = ["/ai/**"]
        [[rule]]
        name = "minute"
        per = ["tenant"]
        limit = "tier"
        [[rule]]
        name = "burst"
        per = ["tenant"]
        limit = "tier:burst"
        algorithm = "sliding-log"
    "#;

    /// Counts how many requests of two categories in turn a tenant is admitted at one instant.
    fn admitted_in_turn(policy: &Policy, tenant: &str) -> usize {
        let mut ledger = Ledger::default();
        let now = Timestamp::from_secs(1_767_225_600);
        let mut check = |path| {
            let facts = Facts { tenant: Some(tenant), path: Some(path), ..Facts::default() };
            ledger.decide(policy, Verb::Check, &facts, now).unwrap().decision.allowed()
        };
        ["/", "/ai/chat"].into_iter().cycle().take(400).take_while(|path| check(path)).count()
    }

    /// A chat service had to copy its burst rule for each tenant with a figure of its own, and restart for each new one.
    ///
    /// Woken by: `caller.category` in place of `name` in `TiersInForce::limit`.
    #[test]
    fn a_named_limit_is_one_budget_for_all_categories_of_the_tenants_that_have_it() {
        let base = Policy::parse(NAMED, &|_| None).unwrap();
        assert_eq!((admitted_in_turn(&base, "written"), admitted_in_turn(&base, "other")), (4, 101));
        let mut policy = base.clone();
        policy.override_tenant("acme", [("requests", "10/min"), ("burst", "7/s")]).unwrap();
        policy.override_tenant("calm", [("requests", "10/min")]).unwrap();
        let admitted = |tenant| admitted_in_turn(&policy, tenant);
        assert_eq!((admitted("acme"), admitted("calm"), admitted("written"), admitted("other")), (7, 20, 4, 101));
        assert_eq!(admitted_in_turn(&base, "acme"), 101, "the policy that was copied is as before");
        // An operator's setting is above it, and what the setting leaves out stays.
        policy.give(Owner::Tenant, "acme", &setting(1, None, &[("burst", "9/s")])).unwrap();
        assert_eq!(admitted_in_turn(&policy, "acme"), 9);
        policy.give(Owner::Tenant, "acme", &setting(1, None, &[("ai", "60/min")])).unwrap();
        assert_eq!(admitted_in_turn(&policy, "acme"), 7);
    }

    /// A quota that is too large for the log of one rule was refused although only another rule, with another algorithm, takes it. Where
    /// the rule with the log takes it, it becomes a window.
    ///
    /// Woken by: `self.measured(quota)` for every name in `Shape::measured_as`, and `measured_as` in `given_limit`.
    #[test]
    fn a_limit_is_checked_against_the_rules_that_take_it() {
        let base = Policy::parse(NAMED, &|_| None).unwrap();
        let fits = |limits: &[(&'static str, &'static str)]| {
            base.clone().override_tenant("acme", limits.iter().copied()).map_err(|error| error.field())
        };
        assert_eq!(fits(&[("requests", "5000/min"), ("burst", "1024/s")]), Ok(()));
        assert_eq!(fits(&[("requests", "50/min burst 20"), ("burst", "1025/s")]), Ok(()));
        assert_eq!(fits(&[("burst", "5/s burst 2")]), Err("limits.burst".to_owned()));
        let mut large = base.clone();
        large.override_tenant("acme", [("requests", "9000/min"), ("ai", "9000/min"), ("burst", "2000/s")]).unwrap();
        let facts = Facts { tenant: Some("acme"), cost: Some(1_500), ..Facts::default() };
        let (mut ledger, now) = (Ledger::default(), Timestamp::from_secs(1_767_225_600));
        let mut check = || ledger.decide(&large, Verb::Check, &facts, now).unwrap().decision.allowed();
        assert_eq!((check(), check()), (true, false));
        assert_eq!(fits(&[("brust", "5/s")]), Err("limits.brust".to_owned()));
        let alone = "[[rule]]\nname = 'b'\nper = ['tenant']\nlimit = 'tier:burst'";
        let mut alone = Policy::parse(alone, &|_| None).unwrap();
        assert_eq!(
            alone.override_tenant("acme", [("requests", "5/min")]),
            Err(SettingError::NoTierRule("requests".into()))
        );
        for wrong in ["tier:", "tier:tier", "tier: burst"] {
            let text = format!("[[rule]]\nname = 'b'\nper = ['tenant']\nlimit = '{wrong}'");
            assert!(Policy::parse(&text, &|_| None).unwrap_err().to_string().contains("bad-limit"), "{wrong}");
        }
    }

    /// A `PUT` once copied the policy and applied every setting again: 173 ms at 5,000 tenants.
    #[test]
    fn a_setting_costs_the_same_however_many_others_there_are() {
        let base = Policy::parse(POLICY, &|_| None).unwrap();
        let mut policy = base.clone();
        let given = setting(3, Some("large"), &[("requests", "7/h")]);
        for number in 0..5_000u32 {
            let before = policy.clone();
            for owner in [Owner::Tenant, Owner::User] {
                policy.give(owner, &format!("name {number}"), &given).unwrap();
                if number < 20 || number.is_multiple_of(499) {
                    let made = policy.tiers.given(owner).parts_beside(before.tiers.given(owner));
                    assert!(made <= 9, "{made} parts at {number}");
                }
            }
        }
        assert_eq!(policy.settings_len(), 10_000);
        let shared = [
            Arc::ptr_eq(&policy.allow, &base.allow),
            Arc::ptr_eq(&policy.rules, &base.rules),
            Arc::ptr_eq(&policy.categories, &base.categories),
            Arc::ptr_eq(&policy.subjects, &base.subjects),
            Arc::ptr_eq(&policy.counted, &base.counted),
            Arc::ptr_eq(&policy.early, &base.early),
            Arc::ptr_eq(&policy.ladders, &base.ladders),
            Arc::ptr_eq(&policy.identity, &base.identity),
            Arc::ptr_eq(&policy.lists, &base.lists),
            Arc::ptr_eq(&policy.alerts, &base.alerts),
            std::ptr::eq(policy.tiers.written(), base.tiers.written()),
        ];
        assert_eq!(shared, [true; 11]);
        // The same key digests nothing again.
        let rules = Arc::clone(&policy.rules);
        let key = policy.key();
        assert!(Arc::ptr_eq(&policy.with_key(key).rules, &rules));
    }

    /// What is taken back leaves nothing behind: neither a limit nor what follows from it for everybody.
    #[test]
    fn a_setting_is_replaced_and_taken_back() {
        let base = Policy::parse(POLICY, &|_| None).unwrap();
        let mut policy = base.clone();
        policy.give(Owner::Tenant, "acme", &setting(3, Some("large"), &[])).unwrap();
        policy.give(Owner::Tenant, "acme", &setting(1, None, &[("requests", "7MB/h")])).unwrap();
        assert!(policy.counts_bytes() && !policy.tiers.any_scaled);
        policy.give(Owner::Tenant, "acme", &setting(2, None, &[])).unwrap();
        assert_eq!((admitted(&policy, Some("acme"), None), policy.counts_bytes()), (4, false));
        assert_eq!(policy.setting(Owner::Tenant, "acme").map(|setting| setting.times), Some(2));
        assert!(policy.take_back(Owner::Tenant, "acme") && !policy.take_back(Owner::Tenant, "acme"));
        assert_eq!((admitted(&policy, Some("acme"), None), policy.settings_len()), (2, 0));
        assert!(!policy.tiers.any_scaled);
        assert_eq!(admitted(&base, Some("acme"), None), 2);
    }

    /// What was given under one policy holds under the next, where it fits; the rest waits for a policy that it fits.
    #[test]
    fn another_policy_takes_over_what_was_given() {
        let mut old = Policy::parse(POLICY, &|_| None).unwrap();
        old.give(Owner::Tenant, "acme", &setting(1, Some("large"), &[])).unwrap();
        old.give(Owner::User, "u1", &setting(10, None, &[])).unwrap();
        let parse = |text: &str| Policy::parse(text, &|_| None).unwrap();
        let mut new = parse(&POLICY.replace("large", "huge").replace("3/h", "4/h"));
        let unfit: Vec<String> =
            new.take_settings_of(&old).into_iter().map(|(_, name, error)| format!("{name} {error}")).collect();
        assert_eq!(unfit, ["acme no tier is called \"large\"; known: huge, small"]);
        assert_eq!((admitted(&new, Some("acme"), None), admitted(&new, None, Some("u1"))), (2, 40));
        // Changed meanwhile: one is gone, one is new, one is another.
        old.take_back(Owner::User, "u1");
        old.give(Owner::User, "u2", &setting(2, None, &[])).unwrap();
        old.give(Owner::Tenant, "acme", &setting(5, None, &[])).unwrap();
        assert_eq!(new.take_settings_of(&old), []);
        assert_eq!((admitted(&new, None, Some("u1")), admitted(&new, None, Some("u2"))), (4, 8));
        assert_eq!(admitted(&new, Some("acme"), None), 10);
        // What fits again is in force again.
        old.give(Owner::Tenant, "acme", &setting(1, Some("large"), &[])).unwrap();
        assert_eq!(new.take_settings_of(&old).len(), 1);
        let mut newest = parse(POLICY);
        assert_eq!(newest.take_settings_of(&new), []);
        assert_eq!((admitted(&newest, Some("acme"), None), newest.settings().count()), (5, 2));
    }

    #[test]
    fn a_setting_that_does_not_fit_is_told_by_its_field() {
        let refused = |text: &str, owner, setting: Setting| {
            Policy::parse(text, &|_| None).unwrap().give(owner, "x", &setting).unwrap_err().field()
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
            let bytes = own.to_bytes(Format::PRESENT);
            assert_eq!(Setting::from_bytes(&bytes), Ok(own));
            for cut in 0..bytes.len() {
                assert!(Setting::from_bytes(&bytes[..cut]).is_err());
            }
        }
    }
}
