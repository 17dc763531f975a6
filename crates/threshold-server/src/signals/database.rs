//! The SQLite file of events, or a database in memory.
//!
//! No decision depends on an event. So nothing here fails a request, nor a start but for a planted file: what cannot be written is
//! lost and counted, and a damaged file is set aside.

mod alerts;
mod file;
mod fold;
mod query;

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use rusqlite::{Connection, params_from_iter};
use threshold_core::event::{Event, sql};
use threshold_core::{Span, Timestamp};
use tokio::sync::watch;

pub(crate) use alerts::SavedAlert;
use file::{Bounds, FileState, is_damage};
use fold::Folder;
pub(crate) use query::{EventQuery, Field, Filter, PAGE_BYTES, Page};
use query::{condition, newest, page};

/// The events of one transaction, which must fit into the log.
const CHUNK: usize = 100;
/// The rows that one transaction deletes, and the most transactions of one sweep: a sweep must not keep new events waiting.
const DELETED_AT_ONCE: usize = 200;
const MAX_DELETIONS: usize = 500;
/// How often an insertion makes room in a full file before it gives up.
const MAX_ROOM_MADE: usize = 20;
/// The fewest bytes of an event in the file.
const MIN_EVENT_BYTES: u64 = 256;
/// How long a file that cannot be opened is left alone.
const RETRY: Span = Span::from_secs(1);
/// How often a file is verified that somebody else writes to: that reads all of it.
const VERIFY: Span = Span::from_secs(10);

const DELETE_OLDEST: &str = "DELETE FROM rate_limit_events WHERE number IN
    (SELECT number FROM rate_limit_events ORDER BY number LIMIT ?1)";
const DELETE_AGED: &str = "DELETE FROM rate_limit_events WHERE number IN
    (SELECT number FROM rate_limit_events WHERE at < ?1 LIMIT ?2)";

// Each in a query of its own, which SQLite then answers from one end of the table.
const HELD: &str =
    "SELECT coalesce((SELECT max(number) FROM rate_limit_events) - (SELECT min(number) FROM rate_limit_events) + 1, 0)";

/// How long events are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Retention {
    /// Older ones are deleted.
    pub(crate) age: Span,
    /// The size of the file with its log, in bytes. The oldest are deleted when there is no room for new ones.
    pub(crate) bytes: u64,
}

impl Default for Retention {
    fn default() -> Self {
        Self { age: Span::from_secs(30 * 86_400), bytes: 256 << 20 }
    }
}

/// Why events cannot be read or erased.
#[derive(Debug)]
pub(crate) enum DatabaseError {
    /// There is no file, or it could not be opened.
    Closed,
    Sqlite(rusqlite::Error),
}

impl std::fmt::Display for DatabaseError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Closed => f.write_str("the file of events cannot be opened"),
            Self::Sqlite(error) => write!(f, "the file of events: {error}"),
        }
    }
}

impl std::error::Error for DatabaseError {}

impl From<rusqlite::Error> for DatabaseError {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sqlite(error)
    }
}

/// The database of events.
#[derive(Debug)]
pub(crate) struct EventDatabase {
    /// `None` for a database in memory.
    path: Option<PathBuf>,
    retention: Retention,
    writer: Mutex<Writer>,
    /// A connection for reading a file: readers and the writer do not wait for each other.
    reader: Mutex<Option<Connection>>,
    /// Set when a reader has found the file to be damaged.
    is_damaged: AtomicBool,
    newest: watch::Sender<u64>,
    lost: AtomicU64,
    unnamed: AtomicU64,
}

#[derive(Debug, Default)]
struct Writer {
    connection: Option<Connection>,
    /// The file that is open, as this process has left it. It is another one, or has another content, if somebody has removed,
    /// replaced or overwritten it.
    file: Option<FileState>,
    /// The number of events in it.
    events: u64,
    folder: Folder,
    /// When to try to open the file again.
    retry_at: Timestamp,
    /// When a file that somebody else has written to was last verified.
    verified_at: Timestamp,
    /// The last time that the database was told.
    now: Timestamp,
    /// Whether the last insertion failed.
    is_failing: bool,
}

impl EventDatabase {
    /// Fails if another user can have planted, or can change, the file.
    pub(crate) fn check(path: &Path) -> anyhow::Result<()> {
        file::check(path)
    }

    /// Opens or creates the file. If that is not possible now, it is tried again later.
    pub(crate) fn open(path: Option<&Path>, mut retention: Retention, now: Timestamp) -> Self {
        if path.is_none() {
            retention.bytes = retention.bytes.min(file::MAX_MEMORY);
        }
        let database = Self {
            path: path.map(Into::into),
            retention,
            writer: Mutex::default(),
            reader: Mutex::default(),
            is_damaged: AtomicBool::new(false),
            newest: watch::Sender::default(),
            lost: AtomicU64::new(0),
            unnamed: AtomicU64::new(0),
        };
        database.with_writer(now, |_| ());
        database
    }

    /// Inserts events. One that is known by its id is left as it is. Up to 1,000 a second are inserted each by itself; see
    /// [`Folder`].
    pub(crate) fn insert(&self, events: &[Event], now: Timestamp) {
        self.with_writer(now, |writer| self.insert_into(writer, events, now));
    }

    fn insert_into(&self, writer: &mut Writer, events: &[Event], now: Timestamp) {
        let (rows, unnamed) = writer.folder.fold(events, now);
        self.unnamed.fetch_add(unnamed, Ordering::Relaxed);
        let mut left = rows.as_slice();
        while let Some((chunk, rest)) = left.split_at_checked(CHUNK.min(left.len())).filter(|_| !left.is_empty()) {
            let mut inserted = self.insert_chunk(writer, chunk);
            let is_out_of_numbers = || writer.connection.as_ref().is_some_and(file::is_out_of_numbers);
            if inserted.as_ref().is_err_and(|error| is_damaged(error) || is_out_of_numbers()) {
                self.set_aside(writer, now);
                inserted = self.insert_chunk(writer, chunk);
            }
            match inserted {
                Ok(()) => self.report_success(writer),
                // Each further attempt would wait for a locked file again.
                Err(error) => {
                    self.report_loss(writer, left, &error);
                    break;
                }
            }
            left = rest;
        }
        self.announce_newest(writer);
    }

    /// Deletes events that are too old, and the oldest ones of a file that is too large.
    pub(crate) fn sweep(&self, now: Timestamp) {
        self.with_writer(now, |writer| {
            let Some(connection) = &writer.connection else { return };
            match self.delete_old(connection, now) {
                Ok(()) => self.announce_newest(writer),
                Err(error) if is_damage(&error) => self.set_aside(writer, now),
                Err(error) => tracing::warn!(reason = %error, "old events not deleted"),
            }
        });
    }

    /// Notices a file that somebody else has removed, replaced or overwritten. It does not wait for the writer, who looks by itself.
    pub(crate) fn look(&self, now: Option<Timestamp>) {
        let mut writer = match self.writer.try_lock() {
            Ok(writer) => writer,
            Err(TryLockError::Poisoned(writer)) => writer.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        let now = now.unwrap_or(writer.now);
        self.open_if_closed(&mut writer, now);
    }

    /// Returns a page of events.
    pub(crate) fn page(&self, query: &EventQuery) -> Result<Page, DatabaseError> {
        self.read(|connection| page(connection, query))
    }

    /// Deletes the events for which all filters hold, and every copy of them in the file. Returns how many there were.
    pub(crate) fn erase(&self, filters: &[Filter], now: Timestamp) -> Result<u64, DatabaseError> {
        self.with_writer(now, |writer| self.erase_from(writer, filters))
    }

    fn erase_from(&self, writer: &mut Writer, filters: &[Filter]) -> Result<u64, DatabaseError> {
        let connection = writer.connection.as_mut().ok_or(DatabaseError::Closed)?;
        let (condition, values) = condition(filters);
        let numbers: Vec<i64> = connection
            .prepare(&format!("SELECT number FROM rate_limit_events WHERE {condition}"))?
            .query_map(params_from_iter(values), |row| row.get(0))?
            .collect::<rusqlite::Result<_>>()?;
        for chunk in numbers.chunks(DELETED_AT_ONCE) {
            let transaction = connection.transaction()?;
            for number in chunk {
                transaction.prepare_cached("DELETE FROM rate_limit_events WHERE number = ?1")?.execute([number])?;
            }
            transaction.commit()?;
        }
        // `secure_delete` overwrites deleted rows, but not what SQLite left behind when it moved them between pages.
        connection.execute_batch("VACUUM")?;
        file::empty_log(connection)?;
        if let Some(path) = &self.path {
            // It cannot be searched.
            file::remove_set_aside(path);
        }
        Ok(u64::try_from(numbers.len()).unwrap_or(u64::MAX))
    }

    /// Returns the number of the newest event, as it changes.
    pub(crate) fn newest(&self) -> watch::Receiver<u64> {
        self.newest.subscribe()
    }

    /// Returns how many decisions were not recorded, because the file could not be written.
    pub(crate) fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Returns how many decisions were recorded without names, because there were too many.
    pub(crate) fn unnamed(&self) -> u64 {
        self.unnamed.load(Ordering::Relaxed)
    }

    fn writer(&self) -> MutexGuard<'_, Writer> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something with the file, which is opened first if it is closed or no longer the same.
    fn with_writer<T>(&self, now: Timestamp, work: impl FnOnce(&mut Writer) -> T) -> T {
        let writer = &mut *self.writer();
        writer.now = now;
        self.open_if_closed(writer, now);
        let result = work(writer);
        // Of a file that was removed meanwhile, the state before is kept, and so it is noticed.
        let after = self.path.as_deref().and_then(FileState::of);
        if let Some(after) = after.filter(|after| writer.file.is_some_and(|before| before.is_same_file(*after))) {
            writer.file = Some(after);
        }
        result
    }

    fn open_if_closed(&self, writer: &mut Writer, now: Timestamp) {
        if self.is_damaged.swap(false, Ordering::Relaxed) {
            self.set_aside(writer, now);
        }
        if writer.connection.is_some() {
            self.compare(writer, now);
        }
        // A clock that was set back must not keep the file closed.
        if writer.connection.is_some() || now < writer.retry_at && writer.retry_at < now.plus(RETRY).plus(RETRY) {
            return;
        }
        writer.retry_at = now.plus(RETRY);
        let bounds = Bounds::of(self.retention.bytes);
        let opened = match &self.path {
            None => file::in_memory(bounds),
            Some(path) => file::open(path, bounds),
        };
        match opened {
            Ok(connection) => {
                writer.connection = Some(connection);
                writer.file = self.path.as_deref().and_then(FileState::of);
                self.announce_newest(writer);
            }
            Err(error) if !writer.is_failing => {
                writer.is_failing = true;
                tracing::error!(reason = %error, "events are not recorded: the file cannot be opened");
            }
            Err(_) => {}
        }
    }

    /// Compares the file with what this process has left there, and closes it if somebody else has changed that.
    ///
    /// In SQLite's log mode the file is written by checkpoints only, and so by this process alone, if nobody uses a tool on it.
    fn compare(&self, writer: &mut Writer, now: Timestamp) {
        let Some(path) = self.path.as_deref() else { return };
        let found = FileState::of(path);
        if found == writer.file {
            return;
        }
        let Some(same) = found.filter(|found| writer.file.is_some_and(|before| before.is_same_file(*found))) else {
            tracing::error!(
                "the file of events was removed or replaced: a new one is begun, and the events in it are lost"
            );
            self.close(writer);
            if found.is_none() {
                file::remove_log(path);
            }
            return;
        };
        let is_due = now >= writer.verified_at.plus(VERIFY) || now < writer.verified_at;
        match file::is_whole(path, same, is_due) {
            Some(true) => (writer.file, writer.verified_at) = (Some(same), now),
            Some(false) => {
                tracing::error!("somebody has overwritten the file of events: the events in it are lost");
                self.set_aside(writer, now);
            }
            None => {}
        }
    }

    /// Closes the file, whose events are lost, so that another one is opened at once.
    fn close(&self, writer: &mut Writer) {
        // They are counted by their numbers, which somebody may have changed: there are not more than have room.
        let lost = std::mem::take(&mut writer.events).min(self.retention.bytes / MIN_EVENT_BYTES);
        self.lost.fetch_add(lost, Ordering::Relaxed);
        writer.connection = None;
        *self.reader.lock().unwrap_or_else(PoisonError::into_inner) = None;
        writer.retry_at = Timestamp::EPOCH;
    }

    /// Puts a damaged file aside and begins a new one.
    fn set_aside(&self, writer: &mut Writer, now: Timestamp) {
        self.close(writer);
        if let Some(path) = &self.path {
            file::set_aside(path);
        }
        self.open_if_closed(writer, now);
    }

    fn insert_chunk(&self, writer: &mut Writer, chunk: &[Cow<'_, Event>]) -> Result<(), DatabaseError> {
        let connection = writer.connection.as_ref().ok_or(DatabaseError::Closed)?;
        let batch = Event::batch_to_json(chunk.iter().map(AsRef::as_ref));
        let insert = || connection.prepare_cached(sql::INSERT)?.execute((&batch, None::<i64>)).map(drop);
        let mut inserted = insert();
        for _ in 0..MAX_ROOM_MADE {
            // The disk may be full as well, and then deleting events helps nobody.
            let is_full = inserted.as_ref().is_err_and(file::is_full) && self.is_at_bound(connection)?;
            if !is_full {
                break;
            }
            delete_oldest(connection)?;
            inserted = insert();
        }
        Ok(inserted?)
    }

    /// Counts what was lost. Only the first failure in a row is logged.
    fn report_loss(&self, writer: &mut Writer, rows: &[Cow<'_, Event>], error: &DatabaseError) {
        let lost = rows.iter().fold(0_u64, |sum, event| sum.saturating_add(event.count));
        self.lost.fetch_add(lost, Ordering::Relaxed);
        if !std::mem::replace(&mut writer.is_failing, true) {
            tracing::error!(reason = %error, "events are not recorded");
        }
    }

    fn report_success(&self, writer: &mut Writer) {
        if std::mem::take(&mut writer.is_failing) {
            tracing::info!(lost = self.lost(), "events are recorded again");
        }
    }

    fn announce_newest(&self, writer: &mut Writer) {
        let Some(connection) = &writer.connection else { return };
        let Ok((newest, events)) = newest(connection).and_then(|newest| Ok((newest, held(connection)?))) else {
            return;
        };
        writer.events = events;
        self.newest.send_if_modified(|own| std::mem::replace(own, newest) != newest);
    }

    fn is_at_bound(&self, connection: &Connection) -> rusqlite::Result<bool> {
        let pages = file::number(connection, "page_count")?;
        // A chunk is several pages.
        Ok(pages.saturating_add(pages / 8).saturating_add(64) >= Bounds::of(self.retention.bytes).pages)
    }

    fn delete_old(&self, connection: &Connection, now: Timestamp) -> rusqlite::Result<()> {
        let before = millis(now.minus(self.retention.age));
        for _ in 0..MAX_DELETIONS {
            let deleted = connection.prepare_cached(DELETE_AGED)?.execute((before, limit(DELETED_AT_ONCE)))?;
            if deleted < DELETED_AT_ONCE {
                break;
            }
        }
        // A start with a smaller bound finds a larger file.
        let bound = Bounds::of(self.retention.bytes).pages;
        if file::number(connection, "page_count")? <= bound {
            return Ok(());
        }
        for _ in 0..MAX_DELETIONS {
            let (pages, free) = (file::number(connection, "page_count")?, file::number(connection, "freelist_count")?);
            match (pages > bound, free > 0) {
                (false, _) => break,
                (true, true) => file::release_free_pages(connection)?,
                (true, false) => delete_oldest(connection)?,
            }
        }
        file::empty_log(connection)
    }

    fn read<T>(&self, read: impl FnOnce(&Connection) -> rusqlite::Result<T>) -> Result<T, DatabaseError> {
        let Some(path) = &self.path else {
            return Ok(read(self.writer().connection.as_ref().ok_or(DatabaseError::Closed)?)?);
        };
        self.look(None);
        let reader = &mut *self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        if reader.is_none() {
            *reader = Some(file::open_for_reading(path)?);
        }
        let result = read(reader.as_ref().ok_or(DatabaseError::Closed)?);
        if result.as_ref().is_err_and(is_damage) {
            *reader = None;
            // The next insertion sets it aside.
            self.is_damaged.store(true, Ordering::Relaxed);
        }
        Ok(result?)
    }
}

fn is_damaged(error: &DatabaseError) -> bool {
    matches!(error, DatabaseError::Sqlite(error) if is_damage(error))
}

/// Returns how many events there are, by their numbers: at most as many are lost with the file.
fn held(connection: &Connection) -> rusqlite::Result<u64> {
    let events: i64 = connection.prepare_cached(HELD)?.query_row([], |row| row.get(0))?;
    Ok(u64::try_from(events).unwrap_or(0))
}

/// Deletes a twentieth of the events, the oldest first.
fn delete_oldest(connection: &Connection) -> rusqlite::Result<()> {
    let mut left = usize::try_from(held(connection)? / 20).unwrap_or(0).max(20);
    while left > 0 {
        let step = left.min(DELETED_AT_ONCE);
        connection.prepare_cached(DELETE_OLDEST)?.execute([limit(step)])?;
        left = left.saturating_sub(step);
    }
    Ok(())
}

fn millis(at: Timestamp) -> i64 {
    integer(at.micros().checked_div(1_000).unwrap_or(0))
}

fn integer(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn limit(value: usize) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
