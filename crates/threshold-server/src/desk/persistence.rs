//! Opens a desk with its journal, and saves the counters when it is closed.

use std::path::Path;
use std::sync::{Arc, PoisonError};

use threshold_core::Secrets;
use threshold_core::policy::Policy;
use threshold_limiter::journal::{
    Contents, Counters, CountersError, GivenSecrets, Journal, JournalError, KeyIds, Restored, installation_secrets,
    restore_memory, rows_in_memory, save_counters,
};
use threshold_limiter::store::{AnyStore, at_once};
use threshold_limiter::{BanList, Clock, Limiter};

use super::Desk;

/// Where a journal is, and how to open it.
pub(crate) struct JournalLocation<'a> {
    /// The journal's file.
    pub(crate) journal: &'a Path,
    /// The installation's secrets from the environment. Without them, they are read from files beside the journal.
    pub(crate) secrets: GivenSecrets<'a>,
    /// Whether to start with a new journal if the old one is missing.
    pub(crate) new_journal: bool,
}

/// A desk, and its journal if it has one.
#[derive(Debug)]
pub(crate) struct OpenDesk {
    pub(crate) desk: Desk,
    /// For the maintenance task. Doors reach the journal only by the desk's functions.
    pub(crate) journal: Option<Arc<Journal>>,
    /// The damage that was found when the journal was opened.
    pub(crate) damage: Option<String>,
}

impl Desk {
    /// Opens a desk on the store in memory, restores it from the journal, and has it write its changes there.
    pub(crate) fn with_journal(
        policy: Policy,
        clock: Arc<dyn Clock>,
        location: &JournalLocation<'_>,
    ) -> Result<OpenDesk, JournalError> {
        let path = location.journal;
        // First of all: the journal refuses to open with secrets of another installation, under which no row would be
        // found.
        let secrets = installation_secrets(path, location.secrets)?;
        let (key, key_ids) = (secrets.present().digest_key(), KeyIds::from(&secrets));
        let (journal, contents) = open_journal(location, key_ids)?;
        let journal = Arc::new(journal);
        // Before anything is restored: subjects are found again by digests under this key.
        let policy = policy.with_key(key);
        let bans = Arc::<BanList>::default();
        // Restored before the limiter exists, so that no request is decided while bans and strikes are missing.
        let memory = restore_memory(&journal, &contents, &bans, (&policy, &secrets), clock.now());
        let damage = report(path, &contents, memory.restored, memory.counters);
        let store = AnyStore::from(memory.store);
        let builder = Limiter::builder(policy).store(store).clock(clock).secrets(secrets).bans(bans);
        let desk = Self::from_builder(builder, Some(Arc::clone(&journal)));
        // Applies the settings that were restored into the store, which is in memory and cannot fail.
        let _ = at_once(desk.apply_remote_changes());
        desk.count_restored_penalties();
        // A weak reference, because the limiter's store holds the journal: a cycle would never be dropped.
        let limiter = Arc::downgrade(&desk.limiter);
        journal.with_rebuild_source(move || {
            let limiter = limiter.upgrade()?;
            Some(rows_in_memory(limiter.store().memory()?, &limiter.bans()))
        });
        Ok(OpenDesk { desk, journal: Some(journal), damage })
    }

    /// Opens a desk on a store that other nodes share. The store holds everything that counts, and the journal, if there is one,
    /// only the audit of this node's operators.
    pub(crate) fn on_shared_store(
        policy: Policy,
        clock: Arc<dyn Clock>,
        store: AnyStore,
        secrets: Secrets,
        location: Option<&JournalLocation<'_>>,
    ) -> Result<OpenDesk, JournalError> {
        let journal = match location {
            Some(location) => Some(open_journal(location, KeyIds::from(&secrets))?),
            None => None,
        };
        let damage = journal.as_ref().and_then(|(_, contents)| contents.damage.as_ref()).map(ToString::to_string);
        let journal = journal.map(|(journal, _)| Arc::new(journal));
        let builder = Limiter::builder(policy).store(store).clock(clock).secrets(secrets);
        Ok(OpenDesk { desk: Self::from_builder(builder, journal.clone()), journal, damage })
    }

    /// Counts the penalties that were restored from the journal.
    fn count_restored_penalties(&self) {
        let Some(store) = self.limiter.store().memory() else { return };
        let (now, login) = (self.now(), self.policy().login().cloned());
        store.each_standing(|key, standing| self.penalties.restore(key, standing, now));
        if let Some(login) = login {
            store.each_account(|key, account| self.penalties.lock(key, account.locked_until(&login, now)));
        }
    }

    /// Saves the counters, so that the next start continues with them.
    pub(crate) fn save_counters(&self) {
        let (Some(journal), Some(store)) = (&self.journal, self.limiter.store().memory()) else { return };
        // A server that stops saves them while the save of this second may be in progress. Both write to the same new file, and
        // the one that ends first would rename the other's unfinished one.
        let _one_at_a_time = self.saving.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.now();
        if let Err(error) = save_counters(store, journal.path(), self.limiter.key_id(), now) {
            tracing::error!(reason = %error, "counters not saved");
        }
    }

    /// Saves the counters and closes the journal, after all changes are written.
    pub(crate) fn close(&self) {
        // First, and also without a journal: closing the journal may wait for a slow disk until the supervisor kills
        // the process.
        self.report_left_out(None);
        let Some(journal) = &self.journal else { return };
        self.save_counters();
        if !journal.close() {
            tracing::error!(journal = %journal.path().display(), "journal closed with unsaved changes");
        }
    }
}

/// Opens the journal, or makes a new one.
fn open_journal(location: &JournalLocation<'_>, key_ids: KeyIds) -> Result<(Journal, Contents), JournalError> {
    // `open` refuses to create a journal beside files that show that there was one: a volume that is not mounted
    // would look like a first start, and all bans would be gone without a message.
    let open = if location.new_journal { Journal::open_new } else { Journal::open };
    let (journal, contents) = open(location.journal, key_ids)?;
    if location.new_journal && !contents.is_new {
        tracing::warn!("--new-journal ignored: the journal exists; remove the option, or it hides a later loss");
    }
    Ok((journal, contents))
}

/// Logs the result of a restore. Returns what is wrong with the journal, for `/readyz`.
fn report(
    path: &Path,
    contents: &Contents,
    restored: Restored,
    counters: Result<Counters, CountersError>,
) -> Option<String> {
    let journal = path.display();
    // Every field is named, so that a new count cannot be left out of the log by mistake.
    let Restored { subjects, accounts, bans, settings, unreadable, no_room, rekeyed, forgotten } = restored;
    let Counters { read: counters, skipped } = counters.unwrap_or_else(|error| {
        tracing::warn!(reason = format!("{:#}", anyhow::Error::from(error)), "counters not restored");
        Counters::default()
    });
    if skipped > 0 {
        tracing::warn!(skipped, counters, "damaged counters skipped");
    }
    if rekeyed > 0 {
        tracing::info!(rekeyed, "journal rows moved to the present secret");
    }
    if forgotten > 0 {
        tracing::warn!(forgotten, "journal rows under an unknown secret deleted");
    }
    let is_new = contents.is_new;
    tracing::info!(%journal, is_new, subjects, accounts, bans, settings, unreadable, counters, "journal restored");
    let damage = contents.damage.as_ref().map(ToString::to_string);
    let crowded = (no_room > 0)
        .then(|| format!("memory has no room for {no_room} of the subjects in the journal: raise [memory] max_keys"));
    let reason = match (damage, crowded) {
        // Damage comes first: raising the memory does not bring lost rows back, and `/readyz` shows one reason.
        (Some(reason), _) => {
            tracing::error!(%journal, reason, "journal damaged");
            reason
        }
        (None, Some(reason)) => {
            tracing::error!(%journal, reason, "journal larger than memory");
            reason
        }
        (None, None) => return None,
    };
    Some(reason)
}
