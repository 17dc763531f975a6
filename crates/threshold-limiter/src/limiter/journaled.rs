//! A limiter in memory with a journal beside it: opens, restores and connects both.

use std::path::Path;
use std::sync::Arc;

use threshold_core::Secrets;

use super::builder::{InMemory, LimiterBuilder};
use super::{Limiter, UnfitSetting};
use crate::clock::{Clock, SystemClock};
use crate::journal::{
    Counters, CountersError, Damage, GivenSecrets, Journal, JournalError, KeyIds, Restored, RestoredMemory,
    installation_secrets, restore_memory, rows_in_memory,
};
use crate::store::at_once;
use crate::store::memory::MemoryStore;

/// A limiter whose bans, settings, strikes and locks are written to a journal; built by
/// [`LimiterBuilder::build_with_journal`].
#[derive(Debug)]
pub struct Journaled<C = SystemClock> {
    /// The limiter.
    pub limiter: Arc<Limiter<MemoryStore, C>>,
    /// The journal. Call [`close`](Journal::close) before the process ends.
    pub journal: Arc<Journal>,
    /// What was restored from the journal.
    pub restored: Restored,
    /// What was restored of the counters that [`save_counters`](crate::journal::save_counters) wrote.
    pub counters: Result<Counters, CountersError>,
    /// What was wrong with the journal's file: report it to an operator, then call [`Journal::acknowledge_damage`].
    pub damage: Option<Damage>,
    /// Settings in the journal that do not fit the policy. They are kept, and not in force.
    pub unfit: Vec<UnfitSetting>,
}

impl<C: Clock + 'static> LimiterBuilder<InMemory, C> {
    /// Opens or creates the journal at `path`, and builds a limiter in memory that restores from it and writes to it.
    ///
    /// Without [`secrets`](Self::secrets) the installation's secret is read from the file beside the journal, which is
    /// created with the journal. A list that was given to [`bans`](Self::bans) gets the journal's bans too, and is written to
    /// it, unless it is written to another limiter's journal already.
    ///
    /// ```
    /// # use threshold_limiter::{Limiter, Policy};
    /// # let folder = std::env::temp_dir().join(format!("threshold-builder-{}", std::process::id()));
    /// # std::fs::create_dir_all(&folder)?;
    /// # let path = folder.join("threshold.db");
    /// let policy = Policy::parse("[[rule]]\nname = 'user'\nper = ['user']\nlimit = '2/min'", &|_| None)?;
    /// let opened = Limiter::builder(policy).build_with_journal(&path)?;
    /// if let Some(damage) = &opened.damage {
    ///     eprintln!("{damage}");
    /// }
    /// let limiter = opened.limiter;
    /// # opened.journal.close();
    /// # drop(limiter);
    /// # std::fs::remove_dir_all(folder)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the journal or its secret cannot be used; see [`JournalError`].
    pub fn build_with_journal(self, path: impl AsRef<Path>) -> Result<Journaled<C>, JournalError> {
        let path = path.as_ref();
        let secrets: Secrets = match self.secrets.clone() {
            Some(secrets) => secrets,
            None => installation_secrets(path, GivenSecrets::default())?,
        };
        let (key, key_ids) = (self.digest_key.unwrap_or(secrets.present().digest_key()), KeyIds::from(&secrets));
        let (journal, contents) = Journal::open(path, key_ids)?;
        let journal = Arc::new(journal);
        let policy = self.policy.clone().with_key(key);
        let memory = restore_memory(&journal, &contents, &self.bans, (&policy, &secrets), self.clock.now());
        let RestoredMemory { store, restored, counters } = memory;
        let limiter = Arc::new(self.store(store).assemble(Some(secrets)));
        // The store has the restored settings now, and the limiter takes them over. It is in memory, and cannot fail.
        let unfit = at_once(limiter.follow_control()).unwrap_or_default();
        // The store holds the journal. If the journal held the limiter, neither would ever be dropped.
        let memory = Arc::downgrade(&limiter);
        journal.with_rebuild_source(move || memory.upgrade().map(|own| rows_in_memory(own.store(), &own.bans())));
        Ok(Journaled { limiter, journal, restored, counters, damage: contents.damage, unfit })
    }
}
