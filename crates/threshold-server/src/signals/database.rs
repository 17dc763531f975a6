//! The SQLite file of events, or a database in memory.
//!
//! No decision depends on an event. So nothing here fails a request or a start: what cannot be written is lost and counted, and a
//! damaged file is set aside.

mod file;
mod fold;

use std::borrow::Cow;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rusqlite::{Connection, OptionalExtension as _, ToSql, params_from_iter};
use threshold_core::event::{Event, sql};
use threshold_core::{Span, Timestamp};
use tokio::sync::watch;

use file::{Bounds, FileIdentity, is_damage};
use fold::Folder;

/// The events of one transaction, which must fit into the log.
const CHUNK: usize = 100;
/// The rows that one transaction deletes, and the most transactions of one sweep: a sweep must not keep new events waiting.
const DELETED_AT_ONCE: usize = 200;
const MAX_DELETIONS: usize = 500;
/// How often an insertion makes room in a full file before it gives up.
const MAX_ROOM_MADE: usize = 20;
/// The most bytes of events in one page, above which it has fewer than were asked for.
const PAGE_BYTES: usize = 4 << 20;
/// How long a file that cannot be opened is left alone.
const RETRY: Span = Span::from_secs(1);

const DELETE_OLDEST: &str = "DELETE FROM rate_limit_events WHERE number IN
    (SELECT number FROM rate_limit_events ORDER BY number LIMIT ?1)";
const DELETE_AGED: &str = "DELETE FROM rate_limit_events WHERE number IN
    (SELECT number FROM rate_limit_events WHERE at < ?1 LIMIT ?2)";
const NEWEST: &str = "SELECT seq FROM sqlite_sequence WHERE name = 'rate_limit_events'";

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

/// A field of an event by which events are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Field {
    Layer,
    Blocked,
    Tenant,
    UserId,
    Endpoint,
    Ip,
    Rule,
    Verdict,
    Cause,
    Subject,
    TraceId,
}

impl Field {
    const fn column(self) -> &'static str {
        match self {
            Self::Layer => "layer",
            Self::Blocked => "blocked",
            Self::Tenant => "tenant",
            Self::UserId => "user_id",
            Self::Endpoint => "endpoint",
            Self::Ip => "ip",
            Self::Rule => "rule",
            Self::Verdict => "verdict",
            Self::Subject => "subject",
            // No column: a file from before has none.
            Self::Cause => "event ->> 'cause'",
            // As in the index.
            Self::TraceId => "event ->> 'traceId'",
        }
    }
}

/// The events whose field has one of these values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Filter {
    pub(crate) field: Field,
    pub(crate) values: Vec<String>,
}

/// The events that are asked for. All filters must hold.
#[derive(Debug, Clone, Default)]
pub(crate) struct EventQuery {
    /// Those that arrived after the one with this number, in order of arrival. Without it, the newest.
    pub(crate) after: Option<u64>,
    pub(crate) limit: usize,
    pub(crate) filters: Vec<Filter>,
    /// Those decided at this time or later.
    pub(crate) since: Option<Timestamp>,
}

/// Events in order of arrival.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Page {
    /// The number of each event, and its JSON.
    pub(crate) events: Vec<(u64, String)>,
    /// The number after which the next page begins.
    pub(crate) next: u64,
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
    /// The file that is open, which is no longer the one at its path if somebody has removed or replaced that.
    file: Option<FileIdentity>,
    folder: Folder,
    /// When to try to open the file again.
    retry_at: Timestamp,
    /// Whether the last insertion failed.
    is_failing: bool,
}

impl EventDatabase {
    /// Opens or creates the file. If that is not possible now, it is tried again later.
    pub(crate) fn open(path: Option<&Path>, retention: Retention, now: Timestamp) -> Self {
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
        database.open_if_closed(&mut database.writer(), now);
        database
    }

    /// Inserts events. One that is known by its id is left as it is. Up to 1,000 a second are inserted each by itself; see
    /// [`Folder`].
    pub(crate) fn insert(&self, events: &[Event], now: Timestamp) {
        let writer = &mut *self.writer();
        let (rows, unnamed) = writer.folder.fold(events, now);
        self.unnamed.fetch_add(unnamed, Ordering::Relaxed);
        self.open_if_closed(writer, now);
        let mut left = rows.as_slice();
        while let Some((chunk, rest)) = left.split_at_checked(CHUNK.min(left.len())).filter(|_| !left.is_empty()) {
            let mut inserted = self.insert_chunk(writer, chunk);
            if inserted.as_ref().is_err_and(is_damaged) {
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
        let writer = &mut *self.writer();
        self.open_if_closed(writer, now);
        let Some(connection) = &writer.connection else { return };
        if let Err(error) = self.delete_old(connection, now) {
            if is_damage(&error) {
                self.set_aside(writer, now);
            } else {
                tracing::warn!(reason = %error, "old events not deleted");
            }
        }
    }

    /// Returns a page of events.
    pub(crate) fn page(&self, query: &EventQuery) -> Result<Page, DatabaseError> {
        self.read(|connection| page(connection, query))
    }

    /// Deletes the events for which all filters hold, and every copy of them in the file. Returns how many there were.
    pub(crate) fn erase(&self, filters: &[Filter], now: Timestamp) -> Result<u64, DatabaseError> {
        let writer = &mut *self.writer();
        self.open_if_closed(writer, now);
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

    fn open_if_closed(&self, writer: &mut Writer, now: Timestamp) {
        if self.is_damaged.swap(false, Ordering::Relaxed) {
            self.set_aside(writer, now);
        }
        if writer.connection.is_some() && writer.file != self.path.as_deref().and_then(file::identity) {
            tracing::error!(
                "the file of events was removed or replaced: a new one is begun, and the events in it are lost"
            );
            self.close(writer);
            if let Some(path) = self.path.as_deref().filter(|path| file::identity(path).is_none()) {
                file::remove_log(path);
            }
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
                writer.file = self.path.as_deref().and_then(file::identity);
                self.announce_newest(writer);
            }
            Err(error) if !writer.is_failing => {
                writer.is_failing = true;
                tracing::error!(reason = %error, "events are not recorded: the file cannot be opened");
            }
            Err(_) => {}
        }
    }

    /// Closes the file, to be opened again at once.
    fn close(&self, writer: &mut Writer) {
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

    fn announce_newest(&self, writer: &Writer) {
        let newest = writer.connection.as_ref().and_then(|connection| newest(connection).ok());
        if let Some(newest) = newest {
            self.newest.send_if_modified(|own| std::mem::replace(own, newest) != newest);
        }
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

/// Deletes a twentieth of the events, the oldest first.
fn delete_oldest(connection: &Connection) -> rusqlite::Result<()> {
    let span = "SELECT coalesce(max(number) - min(number), 0) + 1 FROM rate_limit_events";
    let events: i64 = connection.query_row(span, [], |row| row.get(0))?;
    let mut left = usize::try_from(events / 20).unwrap_or(0).max(20);
    while left > 0 {
        let step = left.min(DELETED_AT_ONCE);
        connection.prepare_cached(DELETE_OLDEST)?.execute([limit(step)])?;
        left = left.saturating_sub(step);
    }
    Ok(())
}

fn newest(connection: &Connection) -> rusqlite::Result<u64> {
    let newest: Option<i64> = connection.prepare_cached(NEWEST)?.query_row([], |row| row.get(0)).optional()?;
    Ok(newest.and_then(|newest| u64::try_from(newest).ok()).unwrap_or(0))
}

fn page(connection: &Connection, query: &EventQuery) -> rusqlite::Result<Page> {
    // One transaction, so that the page and the newest number are of the same moment.
    let transaction = connection.unchecked_transaction()?;
    let newest = newest(&transaction)?;
    // The file was replaced since, and its numbers begin again.
    let after = query.after.map(|after| if after > newest { 0 } else { after });
    let (mut condition, mut values) = condition(&query.filters);
    if let Some(since) = query.since {
        condition.push_str(" AND at >= ?");
        values.push(Box::new(millis(since)));
    }
    if let Some(after) = after {
        condition.push_str(" AND number > ?");
        values.push(Box::new(integer(after)));
    }
    values.push(Box::new(limit(query.limit)));
    let order = if after.is_some() { "ASC" } else { "DESC" };
    let statement =
        format!("SELECT number, event FROM rate_limit_events WHERE {condition} ORDER BY number {order} LIMIT ?");
    let mut statement = transaction.prepare(&statement)?;
    let mut rows = statement.query(params_from_iter(values))?;
    let (mut events, mut bytes) = (Vec::new(), 0_usize);
    let mut is_cut = false;
    while let Some(row) = rows.next()? {
        let (number, event): (i64, String) = (row.get(0)?, row.get(1)?);
        bytes = bytes.saturating_add(event.len());
        events.push((u64::try_from(number).unwrap_or(0), event));
        if bytes > PAGE_BYTES {
            is_cut = true;
            break;
        }
    }
    let is_whole = !is_cut && events.len() < query.limit;
    let last = events.last().map(|(number, _)| *number);
    // The next page need not look again at what these filters have left out.
    let next = match last.filter(|_| after.is_some() && !is_whole) {
        Some(last) => last,
        None => newest,
    };
    if after.is_none() {
        events.reverse();
    }
    Ok(Page { events, next })
}

/// Returns the condition of filters, and its values.
fn condition(filters: &[Filter]) -> (String, Vec<Box<dyn ToSql>>) {
    let (mut condition, mut values) = ("true".to_owned(), Vec::<Box<dyn ToSql>>::new());
    for Filter { field, values: own } in filters {
        let marks = vec!["?"; own.len()].join(", ");
        let _ = write!(condition, " AND {} IN ({marks})", field.column());
        for value in own {
            match field {
                Field::Blocked => values.push(Box::new(i64::from(value == "true"))),
                _ => values.push(Box::new(value.clone())),
            }
        }
    }
    (condition, values)
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
