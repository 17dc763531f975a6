//! What tenants and users are given while the server runs, on top of the policy that its file says.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use threshold_core::Timestamp;
use threshold_core::policy::{Owner, Policy, Setting, SettingError};
use threshold_limiter::journal::{Journal, Kept, Kind, Row};

use super::Desk;

/// The most settings at once. Whoever has more customers than this with limits of their own gives them tiers.
pub(crate) const MOST_SETTINGS: usize = 10_000;

/// Everybody who was given something, and the policy before that.
#[derive(Debug)]
pub(super) struct Settings(Mutex<Given>);

#[derive(Debug)]
struct Given {
    base: Policy,
    all: BTreeMap<(Owner, String), Setting>,
}

/// Why a setting is not in force.
#[derive(Debug)]
pub(crate) enum Refused {
    /// It does not fit the policy.
    Wrong(SettingError),
    /// There is room for no more.
    TooMany,
}

impl Settings {
    pub(super) fn new(base: Policy) -> Self {
        Self(Mutex::new(Given { base, all: BTreeMap::new() }))
    }

    /// All of it, as the journal holds it.
    pub(super) fn rows(&self) -> Vec<Row> {
        let row = |((owner, name), setting): (&(Owner, String), &Setting)| Row {
            kind: kind(*owner),
            key: name.clone().into_bytes(),
            value: Some(setting.to_bytes()),
        };
        self.lock().all.iter().map(row).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Given> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Given {
    fn refuses(&self, key: &(Owner, String), setting: &Setting) -> Option<Refused> {
        if self.all.len() >= MOST_SETTINGS && !self.all.contains_key(key) {
            return Some(Refused::TooMany);
        }
        self.base.clone().give(key.0, &key.1, setting).err().map(Refused::Wrong)
    }

    /// The policy with everything that holds. What does not fit any more, after a change of the file, is said and left out.
    fn effective(&self) -> Policy {
        let mut policy = self.base.clone();
        for ((owner, name), setting) in &self.all {
            if let Err(error) = policy.give(*owner, name, setting) {
                tracing::warn!(?owner, %error, "a setting does not fit the policy, and is not in force");
            }
        }
        policy
    }
}

impl Desk {
    /// Puts another policy in force, with what was given on top of it. Returns its generation.
    pub(crate) fn swap(&self, policy: Policy) -> u64 {
        let mut given = self.settings.lock();
        given.base = policy;
        self.put_in_force(&given)
    }

    /// What somebody was given.
    pub(crate) fn setting(&self, owner: Owner, name: &str) -> Option<Setting> {
        let now = self.limiter.now();
        self.settings.lock().all.get(&(owner, name.to_owned())).filter(|setting| setting.until > now).cloned()
    }

    /// Why somebody could not be given something, if they could not.
    pub(crate) fn refuses(&self, owner: Owner, name: &str, setting: &Setting) -> Option<Refused> {
        self.settings.lock().refuses(&(owner, name.to_owned()), setting)
    }

    /// Gives somebody something instead of whatever they were given before; an empty setting takes it all back.
    pub(crate) fn give(&self, owner: Owner, name: &str, setting: &Setting) -> Result<(), Refused> {
        let mut given = self.settings.lock();
        let key = (owner, name.to_owned());
        if let Some(refused) = given.refuses(&key, setting) {
            return Err(refused);
        }
        if setting.is_empty() {
            given.all.remove(&key);
        } else {
            given.all.insert(key, setting.clone());
        }
        let bytes = (!setting.is_empty()).then(|| setting.to_bytes());
        if let Some(journal) = &self.journal {
            journal.note(kind(owner), name.as_bytes(), bytes);
        }
        self.put_in_force(&given);
        Ok(())
    }

    /// Takes back what was given until now.
    pub(crate) fn end_settings(&self, now: Timestamp) {
        let mut given = self.settings.lock();
        let over: Vec<(Owner, String)> =
            given.all.extract_if(.., |_, setting| setting.until <= now).map(|(key, _)| key).collect();
        if over.is_empty() {
            return;
        }
        for (owner, name) in over {
            if let Some(journal) = &self.journal {
                journal.note(kind(owner), name.as_bytes(), None);
            }
        }
        self.put_in_force(&given);
    }

    /// Goes on from what a journal holds.
    pub(super) fn restore_settings(&self, journal: &Journal, kept: &Kept, now: Timestamp) {
        let mut given = self.settings.lock();
        for row in &kept.rows {
            let owner = match row.kind {
                Kind::Tenant => Owner::Tenant,
                Kind::User => Owner::User,
                _ => continue,
            };
            let setting = row.value.as_deref().and_then(|bytes| Setting::from_bytes(bytes).ok());
            let name = std::str::from_utf8(&row.key).ok();
            match setting.filter(|setting| setting.until > now).zip(name) {
                Some((setting, name)) => drop(given.all.insert((owner, name.to_owned()), setting)),
                None => journal.note(row.kind, &row.key, None),
            }
        }
        if !given.all.is_empty() {
            self.put_in_force(&given);
        }
    }

    fn put_in_force(&self, given: &Given) -> u64 {
        self.limiter.swap(given.effective())
    }
}

fn kind(owner: Owner) -> Kind {
    match owner {
        Owner::Tenant => Kind::Tenant,
        Owner::User => Kind::User,
    }
}
