//! What tenants and users are given while the server runs, on top of the policy that its file says.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use threshold_core::policy::{Owner, Policy, Setting, SettingError};
use threshold_core::{Format, Timestamp};
use threshold_limiter::journal::{Journal, Kept, Kind, Row};

use super::audit::moment;
use super::operations::reason_of;
use super::{Desk, Refused};

/// The most limits of one setting.
const MOST_LIMITS: usize = 64;
/// The longest name, in bytes.
const MOST_NAME: usize = 1_024;
/// The most settings at once. Whoever has more customers than this with limits of their own gives them tiers.
const MOST_SETTINGS: usize = 10_000;

/// Held by whoever puts another policy in force. The settings themselves are part of the policy in force: decisions read
/// them there, without this lock.
#[derive(Debug, Default)]
pub(super) struct Turn(Mutex<()>);

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
        if self.limits.len() > MOST_LIMITS {
            return Err(Refused::invalid("limits", format!("at most {MOST_LIMITS} limits")));
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

impl Turn {
    fn take(&self) -> MutexGuard<'_, ()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Desk {
    /// Puts another policy in force, with what was given on top of it. Returns its generation.
    pub(crate) fn swap(&self, mut policy: Policy) -> u64 {
        // Thousands of settings take a while, so most of the work is done before others have to wait. What changes meanwhile
        // is taken over below.
        let unfit = policy.take_settings_of(&self.limiter.policy());
        for (owner, _, error) in unfit {
            tracing::warn!(?owner, %error, "a setting does not fit the policy, and is not in force");
        }
        let _turn = self.settings.take();
        policy.take_settings_of(&self.limiter.policy());
        self.limiter.swap(policy)
    }

    /// What somebody was given, if their name can be one.
    pub(crate) fn given(&self, owner: Owner, name: &str) -> Result<Option<Setting>, Refused> {
        Ok(self.setting(owner, &self.owner_name(owner, name)?))
    }

    /// The one spelling of the name of somebody who is given something.
    pub(super) fn owner_name<'n>(&self, owner: Owner, name: &'n str) -> Result<Cow<'n, str>, Refused> {
        check_name(name)?;
        self.policy().owner_name(owner, name).map_err(|message| Refused::invalid("id", message))
    }

    /// What somebody was given.
    pub(super) fn setting(&self, owner: Owner, name: &str) -> Option<Setting> {
        let (policy, now) = (self.limiter.policy(), self.limiter.now());
        policy.setting(owner, name).filter(|setting| setting.until > now).cloned()
    }

    /// Why somebody could not be given something, if they could not.
    pub(super) fn refuses(&self, owner: Owner, name: &str, setting: &Setting) -> Result<(), Refused> {
        refuses(&self.limiter.policy(), owner, name, setting)
    }

    /// Gives somebody something instead of whatever they were given before; an empty setting takes it all back. The policy
    /// in force is copied for that, which costs as much with thousands of settings as with none.
    pub(super) fn give(&self, owner: Owner, name: &str, setting: &Setting) -> Result<(), Refused> {
        let _turn = self.settings.take();
        let mut policy = Policy::clone(&self.limiter.policy());
        refuses(&policy, owner, name, setting)?;
        if setting.is_empty() {
            policy.take_back(owner, name);
        } else {
            policy.give(owner, name, setting).map_err(unfit)?;
        }
        // In force before it is written down: a journal that is written again from memory meanwhile must not miss it.
        self.limiter.swap(policy);
        let bytes = (!setting.is_empty()).then(|| setting.to_bytes(Format::PRESENT));
        if let Some(journal) = &self.journal {
            journal.note(kind(owner), name.as_bytes(), bytes);
        }
        Ok(())
    }

    /// Takes back what was given until now.
    pub(crate) fn end_settings(&self, now: Timestamp) {
        let is_over = |(_, _, setting): &(Owner, &str, &Setting)| setting.until <= now;
        if !self.limiter.policy().settings().any(|given| is_over(&given)) {
            return;
        }
        let _turn = self.settings.take();
        let in_force = self.limiter.policy();
        let mut policy = Policy::clone(&in_force);
        let over = || in_force.settings().filter(is_over);
        for (owner, name, _) in over() {
            policy.take_back(owner, name);
        }
        self.limiter.swap(policy);
        if let Some(journal) = &self.journal {
            over().for_each(|(owner, name, _)| journal.note(kind(owner), name.as_bytes(), None));
        }
    }

    /// Goes on from what a journal holds.
    pub(super) fn restore_settings(&self, journal: &Journal, kept: &Kept, now: Timestamp) {
        let _turn = self.settings.take();
        let mut policy = Policy::clone(&self.limiter.policy());
        for row in &kept.rows {
            let owner = match row.kind {
                Kind::Tenant => Owner::Tenant,
                Kind::User => Owner::User,
                _ => continue,
            };
            let setting = row.value.as_deref().and_then(|bytes| Setting::from_bytes(bytes).ok());
            let name = std::str::from_utf8(&row.key).ok();
            let Some((setting, name)) = setting.filter(|setting| setting.until > now).zip(name) else {
                journal.note(row.kind, &row.key, None);
                continue;
            };
            if let Err(error) = policy.keep_setting(owner, name, &setting) {
                tracing::warn!(?owner, %error, "a setting does not fit the policy, and is not in force");
            }
        }
        if policy.settings_len() > 0 {
            self.limiter.swap(policy);
        }
    }
}

/// Everything that was given, as the journal holds it.
pub(super) fn rows(policy: &Policy) -> Vec<Row> {
    let row = |(owner, name, setting): (Owner, &str, &Setting)| Row {
        kind: kind(owner),
        key: name.as_bytes().to_vec(),
        value: Some(setting.to_bytes(Format::PRESENT)),
    };
    policy.settings().map(row).collect()
}

fn refuses(policy: &Policy, owner: Owner, name: &str, setting: &Setting) -> Result<(), Refused> {
    let is_new = !setting.is_empty() && policy.setting(owner, name).is_none();
    if is_new && policy.settings_len() >= MOST_SETTINGS {
        return Err(Refused::TooManySettings);
    }
    policy.fits(owner, name, setting).map_err(unfit)
}

fn unfit(SettingError { field, message }: SettingError) -> Refused {
    Refused::Invalid { field, message }
}

fn check_name(name: &str) -> Result<(), Refused> {
    if name.trim().is_empty() || name.len() > MOST_NAME {
        return Err(Refused::invalid("id", format!("a name has between 1 and {MOST_NAME} bytes")));
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

fn kind(owner: Owner) -> Kind {
    match owner {
        Owner::Tenant => Kind::Tenant,
        Owner::User => Kind::User,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

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
    /// Woken by: leaving out either `take` of the turn, or the second `take_settings_of` in `swap`.
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
                        desk.give(Owner::Tenant, &name(writer, number), &ten_times(Timestamp::MAX)).unwrap();
                        if number % 3 == 0 {
                            let nothing = Setting { times: 1, ..ten_times(Timestamp::MAX) };
                            desk.give(Owner::Tenant, &name(writer, number), &nothing).unwrap();
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
        desk.give(Owner::Tenant, "short", &ten_times(later)).unwrap();
        for number in 1..MOST_SETTINGS {
            desk.give(Owner::Tenant, &format!("long {number}"), &ten_times(Timestamp::MAX)).unwrap();
        }
        let give = |name: &str| desk.give(Owner::Tenant, name, &ten_times(Timestamp::MAX));
        assert!(matches!(give("one more"), Err(Refused::TooManySettings)));
        assert!(give("long 7").is_ok(), "another in place of the one before");
        let nothing = Setting { times: 1, ..ten_times(Timestamp::MAX) };
        assert!(desk.give(Owner::Tenant, "one more", &nothing).is_ok(), "to take back needs no room");
        desk.end_settings(now);
        assert_eq!((limit_of(&desk, "short"), limit_of(&desk, "long 9")), (10, 10));
        desk.end_settings(later);
        assert_eq!((limit_of(&desk, "short"), limit_of(&desk, "long 9")), (1, 10));
        assert!(give("one more").is_ok());
    }
}
