//! A journal beside the store in memory: bans, strikes, locks and settings that outlive the process, in one SQLite file.
//!
//! Memory decides; the journal records. A change is queued as the latest bytes of its key, so that a hundred strikes of one
//! subject are one row. One thread commits everything that is queued as one transaction (a group commit) and syncs it to
//! disk. A caller whose answer must not be forgotten waits for that commit; no other request waits for the disk.

mod commit_mark;
mod counters;
mod damage_record;
mod error;
mod events;
mod file;
mod fs;
mod identify;
mod inspect;
mod lookup;
mod pages;
mod queue;
mod rebuild;
mod restore;
mod rows;
mod salvage;
mod schema;
mod secret;
mod writer;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use threshold_core::lockout::Account;
use threshold_core::policy::{Ban, Owner, Setting};
use threshold_core::{Digest, Format, KeyId, Secret, Secrets, Standing};

use crate::histogram::HistogramReading;
use crate::store::{ChangeSink, Durability};
pub use counters::{Counters, load_counters, save_counters};
pub use error::{CountersError, JournalError, SaveError};
pub use events::{JournalEvent, JournalEvents};
use file::{JournalFile, Missing};
use fs::resolve;
use queue::Queue;
pub use rebuild::Repair;
pub use restore::{Restored, RestoredMemory, restore, restore_memory, rows_in_memory};
use rows::OldDigests;
pub use rows::{AuditLine, Kind, Row};
pub use salvage::Damage;
pub use secret::{GivenSecrets, check_installation, installation_secrets, old_secret_path, secret_path};
use writer::RebuildSource;

/// The longest time that a request with a strike waits for the disk: enough for one group commit on a healthy disk, and too
/// short for a client to notice on a failing one.
pub const STRIKE_WAIT: Duration = Duration::from_millis(10);

/// The format of written records.
const FORMAT: Format = Format::PRESENT;

/// An open journal and its writer thread.
pub struct Journal {
    queue: Arc<Queue>,
    path: PathBuf,
    source: RebuildSource,
    writer: Mutex<Option<JoinHandle<()>>>,
    old: Arc<OldDigests>,
}

/// The key ids of the secrets that a journal may have been written under. New rows are written under the present one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyIds {
    /// The key id of the present secret.
    pub present: KeyId,
    /// The key id of the old secret, during a rotation.
    pub old: Option<KeyId>,
}

impl From<KeyId> for KeyIds {
    fn from(present: KeyId) -> Self {
        Self { present, old: None }
    }
}

impl From<&Secrets> for KeyIds {
    fn from(secrets: &Secrets) -> Self {
        Self { present: secrets.present().key_id(), old: secrets.old().map(Secret::key_id) }
    }
}

/// The contents of a journal when it was opened or read.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Contents {
    /// The rows. Their values are not decoded.
    pub rows: Vec<Row>,
    /// Damage that was found now, or earlier and not [acknowledged](Journal::acknowledge_damage) yet.
    pub damage: Option<Damage>,
    /// Whether the journal was created.
    pub is_new: bool,
}

impl Journal {
    /// Opens or creates a journal, and reads its rows.
    ///
    /// A damaged file is quarantined, and its readable rows go into a new one. [`Contents::damage`] reports that now and at
    /// every later open, until [`acknowledge_damage`](Self::acknowledge_damage) is called.
    ///
    /// # Errors
    /// Fails if the file cannot be used, is in use, is another program's, belongs to another installation, or is missing or empty
    /// beside files that show that there was a journal.
    pub fn open(path: &Path, keys: impl Into<KeyIds>) -> Result<(Self, Contents), JournalError> {
        Self::open_as(path, keys.into(), Missing::Refuse)
    }

    /// Opens a journal as [`open`](Self::open) does, but creates one also where other files show that there was one.
    ///
    /// # Errors
    /// As `open`, except for [`JournalError::Missing`].
    pub fn open_new(path: &Path, keys: impl Into<KeyIds>) -> Result<(Self, Contents), JournalError> {
        Self::open_as(path, keys.into(), Missing::StartNew)
    }

    fn open_as(path: &Path, keys: KeyIds, missing: Missing) -> Result<(Self, Contents), JournalError> {
        let path = &*resolve(path);
        let (file, contents) = JournalFile::open(path, keys, missing)?;
        // Only now: a generated secret becomes the installation's once there is a journal under it.
        secret::publish(path, keys.present)?;
        let old = Arc::new(OldDigests::of(&contents.rows));
        let (queue, source) = (Arc::new(Queue::default()), RebuildSource::default());
        let writer = writer::start(file, Arc::clone(&queue), Arc::clone(&source));
        let writer = Mutex::new(Some(writer.map_err(JournalError::io(path))?));
        Ok((Self { queue, path: path.into(), source, writer, old }, contents))
    }

    /// Reads the rows of a journal and changes nothing, for use while no server runs.
    ///
    /// # Errors
    /// Fails if the file cannot be read.
    pub fn read(path: &Path) -> Result<Contents, JournalError> {
        file::read_only(&resolve(path))
    }

    /// Copies the journal as it is on disk to a new file.
    ///
    /// # Errors
    /// Fails if the new file exists, or if one of the two cannot be used.
    pub fn copy(from: &Path, to: &Path) -> Result<(), JournalError> {
        file::copy(&resolve(from), to)
    }

    /// Replaces a journal by a copy. Returns the path of the quarantined old journal.
    ///
    /// # Errors
    /// Fails if the journal is in use, if the copy is damaged, or if one of the two cannot be used.
    pub fn replace(from: &Path, journal: &Path) -> Result<Option<PathBuf>, JournalError> {
        let journal = &*resolve(journal);
        identify::check(journal)?;
        let lock = fs::lock(journal)?;
        // First: a copy is older than the mark, and would be reported as one that has lost commits.
        commit_mark::clear(&lock).map_err(JournalError::io(journal))?;
        salvage::replace(from, journal)
    }

    /// Sets the callback that lists every row the journal should hold, for the rebuild of a damaged file.
    ///
    /// It returns [`rows_in_memory`] and the rows of other tables, or `None` once those are gone. The writer thread calls it.
    /// Only the first call of this function has an effect.
    pub fn with_rebuild_source(&self, rows: impl Fn() -> Option<Vec<Row>> + Send + Sync + 'static) {
        let old = Arc::clone(&self.old);
        // Rows that have not moved to the present secret keep the key id of the old one.
        let stored = move || rows().map(|rows| rows.into_iter().map(|row| old.stored(row)).collect());
        let _ = self.source.set(Box::new(stored));
    }

    /// Returns the path of the database, with symbolic links resolved.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Queues the latest value of a key; `None` deletes the row.
    pub fn put(&self, kind: Kind, key: &[u8], value: Option<Vec<u8>>) {
        let row = self.old.stored(Row { kind, key: key.to_vec(), value });
        self.queue.put(kind, &row.key, row.value);
    }

    /// Queues a line of the audit log.
    ///
    /// # Errors
    /// Fails with [`SaveError::AuditFull`] if too many lines wait for the disk. The change that the line is about must not be
    /// made then.
    pub fn audit(&self, line: AuditLine) -> Result<(), SaveError> {
        self.queue.audit(line)
    }

    /// Begins a change that is recorded in the audit log.
    ///
    /// Everything that is queued from here on is written in one transaction with the line that [`AuditedChange::confirm`]
    /// adds: after a crash there are both or neither. Nothing at all is written meanwhile, so do not hold it for longer than
    /// the change takes.
    ///
    /// # Errors
    /// Fails as [`audit`](Self::audit) does. Nothing must be changed then.
    pub fn begin_change(&self) -> Result<AuditedChange, SaveError> {
        self.queue.begin_change()?;
        Ok(AuditedChange { queue: Arc::clone(&self.queue), line: None })
    }

    /// Removes the record of damage from the file.
    ///
    /// Call it once [`Contents::damage`] was reported to an operator, and after [`restore`]. It is on disk when
    /// [`saved`](Self::saved) returns.
    pub fn acknowledge_damage(&self) {
        self.queue.acknowledge_damage();
    }

    /// Waits until every change so far is on disk. Short waits end at once while the disk is failing.
    ///
    /// # Errors
    /// Fails with [`SaveError::NotOnDisk`] after the timeout.
    pub async fn saved(&self, timeout: Duration) -> Result<(), SaveError> {
        self.queue.saved(timeout).await
    }

    /// Waits as [`saved`](Self::saved) does, outside of async code.
    fn wait_until_saved(&self, timeout: Duration) {
        let begun = Instant::now();
        // The queue wakes async callers only, and this is called once, at the start.
        while !self.queue.is_saved() && begun.elapsed() < timeout {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Subscribes to failed writes and repairs.
    #[must_use]
    pub fn events(&self) -> JournalEvents {
        self.queue.events()
    }

    /// Returns why changes cannot be written; `None` while they can.
    #[must_use]
    pub fn failure(&self) -> Option<Arc<str>> {
        self.queue.failure()
    }

    /// Returns the last repair of a file that was damaged while it was in use.
    #[must_use]
    pub fn last_repair(&self) -> Option<Arc<Repair>> {
        self.queue.last_repair()
    }

    /// Returns the age of the oldest change that is not on disk; `None` if every change is.
    #[must_use]
    pub fn write_lag(&self) -> Option<Duration> {
        self.queue.write_lag()
    }

    /// Returns how long commits took, each with its sync to disk.
    #[must_use]
    pub fn commit_times(&self) -> HistogramReading {
        self.queue.commit_times.read()
    }

    /// Writes what is queued and ends the writer. Returns whether every change is on disk.
    pub fn close(&self) -> bool {
        self.queue.close();
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner).take();
        // The rebuild source may hold the last reference to the journal, which is then closed by the writer itself.
        if let Some(writer) = writer.filter(|writer| writer.thread().id() != std::thread::current().id()) {
            let _ = writer.join();
        }
        self.queue.is_saved()
    }
}

/// A change that has begun and whose audit line is still to come. Dropped without a line, it counts as not made.
#[derive(Debug)]
#[must_use = "nothing is written to the journal while a change is open"]
pub struct AuditedChange {
    queue: Arc<Queue>,
    line: Option<AuditLine>,
}

impl AuditedChange {
    /// Ends the change, and writes the line in the same transaction.
    pub fn confirm(mut self, line: AuditLine) {
        self.line = Some(line);
    }
}

impl Drop for AuditedChange {
    fn drop(&mut self) {
        self.queue.end_change(self.line.take());
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for Journal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Journal").field("path", &self.path).finish_non_exhaustive()
    }
}

impl ChangeSink for Journal {
    fn standing(&self, key: Digest, standing: Option<&Standing>) {
        self.put(Kind::Standing, &key.to_u128().to_be_bytes(), standing.map(|standing| standing.to_bytes(FORMAT)));
    }

    fn account(&self, key: Digest, account: Option<&Account>) {
        self.put(Kind::Account, &key.to_u128().to_be_bytes(), account.map(|account| account.to_bytes(FORMAT)));
    }

    fn ban(&self, id: Digest, ban: Option<&Ban>) {
        self.put(Kind::Ban, &id.to_u128().to_be_bytes(), ban.map(|ban| ban.to_bytes(FORMAT)));
    }

    fn setting(&self, owner: Owner, name: &str, setting: Option<&Setting>) {
        let kind = if owner == Owner::User { Kind::User } else { Kind::Tenant };
        self.put(kind, name.as_bytes(), setting.map(|setting| setting.to_bytes(FORMAT)));
    }

    fn durability(&self) -> Durability {
        let queue = Arc::clone(&self.queue);
        Box::pin(async move { queue.saved(STRIKE_WAIT).await.is_ok() })
    }

    fn named(&self, subject: Digest, ban: Option<&Ban>) {
        self.put(Kind::Named, &subject.to_u128().to_be_bytes(), ban.map(|ban| ban.to_bytes(FORMAT)));
    }
}
