//! What tenants and users are given while the server runs, on top of the policy that its file says.

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
use super::{Desk, Refused};

/// The most limits of one setting.
const MAX_LIMITS: usize = 64;
/// The longest name, in bytes.
const MAX_NAME: usize = 1_024;

/// What somebody is to be given, as an operator writes it.
#[derive(Debug, Clone, Default)]
pub(crate) struct NewSetting {
    /// A tier of the policy.
    pub(crate) tier: Option<String>,
    /// Limits by category, as a policy writes them.
    pub(crate) limits: BTreeMap<String, String>,
    /// So many times as much as they would have; once unless said.
    pub(crate) times: Option<u64>,
    /// Until when, in Unix seconds; for good unless said.
    pub(crate) until: Option<u64>,
    pub(crate) reason: Option<String>,
}

impl NewSetting {
    /// The setting that this means, for somebody of this name.
    pub(super) fn meant(self, name: &str, by: &str, now: Timestamp) -> Result<Setting, Refused> {
        check_name(name)?;
        if self.limits.len() > MAX_LIMITS {
            return Err(Refused::invalid("limits", format!("at most {MAX_LIMITS} limits")));
        }
        let times = match self.times.unwrap_or(1) {
            0 => return Err(Refused::invalid("times", "times is at least 1")),
            times => u32::try_from(times).map_err(|_| Refused::invalid("times", "times is too large"))?,
        };
        let until = self.until.map_or(Timestamp::MAX, Timestamp::from_secs);
        if until <= now {
            return Err(Refused::invalid("until", "this moment has passed; it is in Unix seconds"));
        }
        let reason = self.reason.as_deref().map_or(Ok(""), reason_of)?.into();
        let limits = self.limits.into_iter().map(|(category, limit)| (category.into(), limit.into())).collect();
        Ok(Setting { tier: self.tier.map(Into::into), limits, times, until, from: now, by: by.into(), reason })
    }
}

impl Desk {
    /// Puts another policy in force, with what was given on top of it. Returns its generation.
    pub(crate) fn swap(&self, policy: Policy) -> u64 {
        let (generation, unfit) = self.limiter.reload(policy);
        warn_unfit(unfit);
        generation
    }

    /// What somebody was given, if their name can be one.
    pub(crate) fn given(&self, owner: Owner, name: &str) -> Result<Option<Setting>, Refused> {
        Ok(self.setting(owner, &self.owner_name(owner, name)?))
    }

    /// The one spelling of the name of somebody who is given something.
    pub(super) fn owner_name<'n>(&self, owner: Owner, name: &'n str) -> Result<Cow<'n, str>, Refused> {
        check_name(name)?;
        self.policy().owner_name(owner, name).map_err(|error| Refused::invalid("id", error.to_string()))
    }

    /// What somebody was given.
    pub(super) fn setting(&self, owner: Owner, name: &str) -> Option<Setting> {
        let (policy, now) = (self.limiter.policy(), self.limiter.now());
        policy.setting(owner, name).filter(|setting| setting.until > now).cloned()
    }

    /// Why somebody could not be given something, if they could not.
    pub(super) fn refuses(&self, owner: Owner, name: &str, setting: &Setting) -> Result<(), Refused> {
        self.limiter.policy().fits(owner, name, setting).map_err(unfit)
    }

    /// Gives somebody something instead of whatever they were given before; an empty setting takes it all back. The policy
    /// in force is copied for that, which costs as much with thousands of settings as with none.
    pub(super) async fn give(&self, owner: Owner, name: &str, setting: &Setting) -> Result<(), StoreError> {
        let setting = (!setting.is_empty()).then(|| Arc::new(setting.clone()));
        warn_unfit(self.limiter.change_control(ControlChange::Setting { owner, name: name.into(), setting }).await?);
        Ok(())
    }

    /// Takes back what was given until now.
    pub(crate) fn end_settings(&self, now: Timestamp) {
        self.limiter.end_settings(now);
    }

    /// Takes over the bans and settings that are in the store and not in force here yet.
    pub(crate) async fn follow(&self) -> Result<(), StoreError> {
        warn_unfit(self.limiter.follow_control().await?);
        Ok(())
    }

    /// Whether other processes may change bans and settings in the store.
    pub(crate) fn shares_store(&self) -> bool {
        !self.limiter.store().answers_at_once()
    }
}

fn warn_unfit(unfit: Vec<UnfitSetting>) {
    for (owner, _, error) in unfit {
        tracing::warn!(?owner, %error, "a setting does not fit the policy, and is not in force");
    }
}

fn unfit(SettingError { field, message, .. }: SettingError) -> Refused {
    Refused::Invalid { field, message }
}

fn check_name(name: &str) -> Result<(), Refused> {
    if name.trim().is_empty() || name.len() > MAX_NAME {
        return Err(Refused::invalid("id", format!("a name has between 1 and {MAX_NAME} bytes")));
    }
    Ok(())
}

/// What somebody was given, in words, for the audit.
pub(super) fn in_words(setting: Option<&Setting>) -> String {
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
        let read = |decided: &crate::desk::Decided| decided.decision.bound_by().unwrap().limit;
        at_once(desk.decide(&desk.limiter.policy(), Verb::Peek, &facts, read)).unwrap()
    }

    /// Most of a new policy's settings are applied before others have to wait; what is given meanwhile is not lost.
    ///
    /// Woken by: leaving out the lock of `Limiter::reload` or of `apply_own`, or the second `take_settings_of` in `reload`.
    #[test]
    fn nothing_is_lost_between_reloads_and_settings_at_once() {
        const EACH: usize = 300;
        let desk = desk(&Arc::default());
        let name = |writer: usize, number: usize| format!("tenant {writer} {number}");
        std::thread::scope(|scope| {
            for writer in 0..2 {
                let (desk, name) = (&desk, &name);
                scope.spawn(move || {
                    for number in 0..EACH {
                        at_once(desk.give(Owner::Tenant, &name(writer, number), &ten_times(Timestamp::MAX))).unwrap();
                        if number % 3 == 0 {
                            let nothing = Setting { times: 1, ..ten_times(Timestamp::MAX) };
                            at_once(desk.give(Owner::Tenant, &name(writer, number), &nothing)).unwrap();
                        }
                    }
                });
            }
            scope.spawn(|| {
                for _ in 0..EACH {
                    desk.swap(Policy::parse(POLICY, &|_| None).unwrap());
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
    fn what_is_over_is_taken_back_and_there_is_room_for_no_more() {
        let clock = Arc::new(ManualClock::default());
        let desk = desk(&clock);
        let now = desk.limiter.now();
        let later = now.plus(threshold_core::Span::MINUTE);
        at_once(desk.give(Owner::Tenant, "short", &ten_times(later))).unwrap();
        for number in 1..MAX_SETTINGS {
            at_once(desk.give(Owner::Tenant, &format!("long {number}"), &ten_times(Timestamp::MAX))).unwrap();
        }
        let new = || NewSetting { times: Some(10), ..NewSetting::default() };
        let give = |name: &str| at_once(desk.set("ops", Owner::Tenant, name, new()));
        assert_eq!(give("one more"), Err(Refused::TooManySettings));
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
