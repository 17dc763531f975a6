//! Settings that operators give to tenants and users while the server runs, on top of the policy file.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use threshold_core::Timestamp;
use threshold_core::control::ControlChange;
use threshold_core::policy::{Owner, Policy, Setting, SettingError};
use threshold_limiter::limiter::UnfitSetting;
use threshold_limiter::store::{Store as _, StoreError};

use super::audit::moment;
use super::operations::reason_of;
use super::{Desk, OperationError};

/// The most limits of one setting.
const MAX_LIMITS: usize = 64;
/// The longest name of a tenant or user, in bytes.
const MAX_NAME: usize = 1_024;

/// A setting as an operator writes it.
#[derive(Debug, Clone, Default)]
pub(crate) struct NewSetting {
    /// A tier of the policy.
    pub(crate) tier: Option<String>,
    /// Limits by category, as a policy writes them.
    pub(crate) limits: BTreeMap<String, String>,
    /// The factor by which every limit is multiplied; 1 by default.
    pub(crate) times: Option<u64>,
    /// The end, in Unix seconds; permanent by default.
    pub(crate) until: Option<u64>,
    pub(crate) reason: Option<String>,
}

impl NewSetting {
    /// Validates the setting of the tenant or user with this name.
    pub(super) fn into_setting(self, name: &str, by: &str, now: Timestamp) -> Result<Setting, OperationError> {
        check_name(name)?;
        if self.limits.len() > MAX_LIMITS {
            return Err(OperationError::invalid("limits", format!("at most {MAX_LIMITS} limits")));
        }
        // Zero would deny every request. That is a ban, which has its own operation and its own audit line.
        let times = match self.times.unwrap_or(1) {
            0 => return Err(OperationError::invalid("times", "times is at least 1")),
            times => u32::try_from(times).map_err(|_| OperationError::invalid("times", "times is too large"))?,
        };
        let until = self.until.map_or(Timestamp::MAX, Timestamp::from_secs);
        if until <= now {
            return Err(OperationError::invalid("until", "until is in the past; it is in Unix seconds"));
        }
        let reason = self.reason.as_deref().map_or(Ok(""), reason_of)?.into();
        let limits = self.limits.into_iter().map(|(category, limit)| (category.into(), limit.into())).collect();
        Ok(Setting { tier: self.tier.map(Into::into), limits, times, until, from: now, by: by.into(), reason })
    }
}

impl Desk {
    /// Puts another policy in force, with the settings on top of it. Returns its generation.
    pub(crate) fn reload_policy(&self, policy: Policy) -> u64 {
        let (generation, unfit) = self.limiter.reload(policy);
        self.metrics.set_policy_loaded(self.limiter.now());
        warn_unfit(unfit);
        generation
    }

    /// Returns the setting of a tenant or user, or an error if the name is invalid.
    pub(crate) fn setting_of(&self, owner: Owner, name: &str) -> Result<Option<Setting>, OperationError> {
        Ok(self.setting(owner, &self.owner_name(owner, name)?))
    }

    /// Normalises the name of a tenant or user.
    pub(super) fn owner_name<'n>(&self, owner: Owner, name: &'n str) -> Result<Cow<'n, str>, OperationError> {
        check_name(name)?;
        self.policy().owner_name(owner, name).map_err(|error| OperationError::invalid("id", error.to_string()))
    }

    /// Returns the setting of a normalised name.
    pub(super) fn setting(&self, owner: Owner, name: &str) -> Option<Setting> {
        // An ended setting stays in the policy until the next sweep, and must not be shown until then.
        let (policy, now) = (self.limiter.policy(), self.now());
        policy.setting(owner, name).filter(|setting| setting.until > now).cloned()
    }

    /// Checks that a setting fits the policy.
    pub(super) fn check_setting(&self, owner: Owner, name: &str, setting: &Setting) -> Result<(), OperationError> {
        self.limiter.policy().fits(owner, name, setting).map_err(|error| unfit(&error))
    }

    /// Stores a setting and puts it in force; an empty one removes it. The policy in force is copied for that, with its parts
    /// shared, which costs the same with thousands of settings.
    pub(super) async fn store_setting(&self, owner: Owner, name: &str, setting: &Setting) -> Result<(), StoreError> {
        // An empty setting is stored as a removal, so that it takes no place among the settings that the store may
        // hold.
        let setting = (!setting.is_empty()).then(|| Arc::new(setting.clone()));
        warn_unfit(self.limiter.change_control(ControlChange::Setting { owner, name: name.into(), setting }).await?);
        Ok(())
    }

    /// Removes settings that have ended.
    pub(crate) fn end_settings(&self, now: Timestamp) {
        self.limiter.end_settings(now.into());
    }

    /// Puts the bans and settings in force that other nodes have stored.
    pub(crate) async fn apply_remote_changes(&self) -> Result<(), StoreError> {
        let _turn = self.following.lock().await;
        warn_unfit(self.limiter.follow_control().await?);
        Ok(())
    }

    /// Whether other processes use the same store.
    pub(crate) fn shares_store(&self) -> bool {
        !self.limiter.store().answers_at_once()
    }
}

fn warn_unfit(unfit: Vec<UnfitSetting>) {
    // The name is left out: it may be a user's, which the log shows only as a digest. The setting stays stored,
    // because the next policy may have the missing tier or category again.
    for (owner, _, error) in unfit {
        tracing::warn!(?owner, field = error.field(), %error, "setting not in force: it does not fit the policy");
    }
}

fn unfit(error: &SettingError) -> OperationError {
    OperationError::Invalid { field: error.field(), message: error.to_string() }
}

fn check_name(name: &str) -> Result<(), OperationError> {
    if name.is_empty() || name.len() > MAX_NAME {
        return Err(OperationError::invalid("id", format!("a name has from 1 to {MAX_NAME} bytes")));
    }
    Ok(())
}

/// Describes a setting, for the audit.
pub(super) fn describe(setting: Option<&Setting>) -> String {
    let Some(Setting { tier, limits, times, until, .. }) = setting.filter(|setting| !setting.is_empty()) else {
        return "nothing".to_owned();
    };
    let tier = tier.as_ref().map(|tier| format!("tier {tier}"));
    let limits = limits.iter().map(|(category, limit)| format!("{category} {limit}"));
    let times = (*times > 1).then(|| format!("times {times}"));
    let until = until.unless_never().map(|until| format!("until {}", moment(until)));
    tier.into_iter().chain(limits).chain(times).chain(until).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use threshold_core::control::MAX_SETTINGS;
    use threshold_core::{Facts, plan::Verb};
    use threshold_limiter::ManualClock;
    use threshold_limiter::store::at_once;

    use super::*;

    const POLICY: &str = "[[rule]]\nname = 'r'\nper = ['tenant']\nlimit = '1/h'\non_missing = 'skip'";

    fn ten_times(until: Timestamp) -> Setting {
        let (from, by, reason) = (Timestamp::EPOCH, "test".into(), "".into());
        Setting { tier: None, limits: BTreeMap::new(), times: 10, until, from, by, reason }
    }

    fn desk(clock: &Arc<ManualClock>) -> Desk {
        let clock: Arc<dyn threshold_limiter::Clock> = Arc::<ManualClock>::clone(clock);
        Desk::new(Policy::parse(POLICY, &|_| None).unwrap(), clock)
    }

    fn limit_of(desk: &Desk, tenant: &str) -> u64 {
        let facts = Facts { tenant: Some(tenant), ..Facts::default() };
        let decided = at_once(desk.decide(&desk.limiter.policy(), Verb::Peek, &facts)).unwrap();
        decided.decision.bound_by().unwrap().limit
    }

    /// A reload applies most settings to the new policy before it takes the lock. Settings that are stored meanwhile must not
    /// be lost.
    ///
    /// Woken by: leaving out the lock of `Limiter::reload` or of `apply_own`, or the second `take_settings_of` in `reload`.
    #[test]
    fn concurrent_reloads_and_settings_lose_nothing() {
        const EACH: usize = 300;
        let desk = desk(&Arc::default());
        let name = |writer: usize, number: usize| format!("tenant {writer} {number}");
        std::thread::scope(|scope| {
            for writer in 0..2 {
                let (desk, name) = (&desk, &name);
                scope.spawn(move || {
                    for number in 0..EACH {
                        at_once(desk.store_setting(Owner::Tenant, &name(writer, number), &ten_times(Timestamp::MAX)))
                            .unwrap();
                        if number % 3 == 0 {
                            let nothing = Setting { times: 1, ..ten_times(Timestamp::MAX) };
                            at_once(desk.store_setting(Owner::Tenant, &name(writer, number), &nothing)).unwrap();
                        }
                    }
                });
            }
            scope.spawn(|| {
                for _ in 0..EACH {
                    desk.reload_policy(Policy::parse(POLICY, &|_| None).unwrap());
                }
            });
        });
        for writer in 0..2 {
            for number in 0..EACH {
                let expected = if number % 3 == 0 { 1 } else { 10 };
                assert_eq!(limit_of(&desk, &name(writer, number)), expected, "{writer} {number}");
            }
        }
        assert_eq!(desk.limiter.policy().settings_len(), 2 * EACH / 3 * 2);
    }

    #[test]
    fn settings_end_at_their_time_and_their_number_is_bounded() {
        let clock = Arc::new(ManualClock::default());
        let desk = desk(&clock);
        let now = desk.now();
        let later = now.plus(threshold_core::Span::MINUTE);
        at_once(desk.store_setting(Owner::Tenant, "short", &ten_times(later))).unwrap();
        for number in 1..MAX_SETTINGS {
            at_once(desk.store_setting(Owner::Tenant, &format!("long {number}"), &ten_times(Timestamp::MAX))).unwrap();
        }
        let new = || NewSetting { times: Some(10), ..NewSetting::default() };
        let give = |name: &str| at_once(desk.set("ops", Owner::Tenant, name, new()));
        assert_eq!(give("one more"), Err(OperationError::TooManySettings));
        assert!(give("long 7").is_ok(), "another in place of the one before");
        assert_eq!(
            at_once(desk.set("ops", Owner::Tenant, "one more", NewSetting::default())),
            Ok(None),
            "needs no room"
        );
        desk.end_settings(now);
        assert_eq!((limit_of(&desk, "short"), limit_of(&desk, "long 9")), (10, 10));
        clock.set(later);
        desk.end_settings(later);
        assert_eq!((limit_of(&desk, "short"), limit_of(&desk, "long 9")), (1, 10));
        assert!(give("one more").is_ok());
    }
}
