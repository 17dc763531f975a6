//! Bans and settings that operators change for every node, as a log with sequence numbers.
//!
//! A store keeps the newest change of each ban and each setting. A node reads the changes after the last number that it has
//! read, in order, and so holds the same set as every other node. A removal has to be in the log too, or a node would never
//! notice that something is gone. Removals are dropped after an hour, and a page tells up to which number that was done.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::codec::{BytesError, Format, Reader, Versions, Writer, from_bytes, to_bytes};
use crate::key::Digest;
use crate::policy::{Ban, Owner, Setting};
use crate::time::{Span, Timestamp};

/// The largest number of bans at once. A longer list belongs into a firewall.
pub const MAX_BANS: usize = 500_000;
/// The largest number of settings at once. More customers than this with limits of their own need tiers instead.
pub const MAX_SETTINGS: usize = 10_000;
/// The largest number of changes on one page. A node that is further behind reads several pages.
pub const MAX_CHANGES_READ: usize = 500;
/// How long a removal is kept for nodes that have not read it. A node that was away for longer reads the whole set again.
pub const REMOVAL_KEPT: Span = Span::HOUR;
/// The largest number of removals that are kept. With more, the oldest is dropped before its hour is over.
pub const MAX_REMOVALS: usize = 10_000;
/// The longest name of a tenant or user, in bytes.
const MAX_NAME: usize = 1 << 18;
/// The largest number of changes in the bytes of a log or a page.
const MAX_CHANGES: usize = MAX_BANS + MAX_SETTINGS + MAX_REMOVALS;

/// A change of a ban or a setting, for every node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ControlChange {
    /// A change of a ban.
    Ban {
        /// The id of the ban; see [`ListEntry::ban_id`](crate::policy::ListEntry::ban_id).
        id: Digest,
        /// The new ban; `None` lifts it.
        ban: Option<Arc<Ban>>,
    },
    /// A change of the tier or limits that an operator has set for one tenant or user.
    Setting {
        /// Whether it is a tenant or a user.
        owner: Owner,
        /// The name of the tenant or user, in normal form.
        name: Arc<str>,
        /// The new setting; `None` removes it.
        setting: Option<Arc<Setting>>,
    },
}

/// The identity of a ban or setting. Of two changes with the same key, the later one is in force.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum ControlKey {
    /// The ban with this id.
    Ban(Digest),
    /// The setting of the tenant or user with this name.
    Setting(Owner, Arc<str>),
}

impl ControlChange {
    /// The versions of its bytes that are read.
    pub(crate) const VERSIONS: Versions = Versions::FIRST.containing(Ban::VERSIONS).containing(Setting::VERSIONS);

    /// Returns the identity of the ban or setting.
    #[must_use]
    pub fn key(&self) -> ControlKey {
        match self {
            Self::Ban { id, .. } => ControlKey::Ban(*id),
            Self::Setting { owner, name, .. } => ControlKey::Setting(*owner, Arc::clone(name)),
        }
    }

    /// Returns when the ban or setting ends by itself; `None` for a removal.
    #[must_use]
    pub fn until(&self) -> Option<Timestamp> {
        match self {
            Self::Ban { ban, .. } => ban.as_ref().map(|ban| ban.until),
            Self::Setting { setting, .. } => setting.as_ref().map(|setting| setting.until),
        }
    }

    /// Returns the stored bytes.
    #[must_use]
    pub fn to_bytes(&self, format: Format) -> Vec<u8> {
        to_bytes(Self::VERSIONS, format, |out| self.write(out))
    }

    /// Parses what [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    /// Fails on an unknown version and on malformed bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, BytesError> {
        from_bytes(bytes, Self::VERSIONS, Self::read)
    }

    pub(crate) fn write(&self, out: &mut Writer) {
        match self {
            Self::Ban { id, ban } => {
                out.byte(if ban.is_some() { 1 } else { 2 });
                out.wide(id.to_u128());
                if let Some(ban) = ban {
                    ban.write(out);
                }
            }
            Self::Setting { owner, name, setting } => {
                out.byte(if setting.is_some() { 3 } else { 4 });
                out.byte(if *owner == Owner::User { 1 } else { 0 });
                out.text(name);
                if let Some(setting) = setting {
                    setting.write(out);
                }
            }
        }
    }

    pub(crate) fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        const WRONG: BytesError = BytesError::Malformed("control change");
        let kind = from.byte()?;
        match kind {
            1 | 2 => {
                let id = Digest::from_u128(from.wide()?);
                let ban = if kind == 1 { Some(Arc::new(Ban::read(from)?)) } else { None };
                Ok(Self::Ban { id, ban })
            }
            3 | 4 => {
                let owner = match from.byte()? {
                    0 => Owner::Tenant,
                    1 => Owner::User,
                    _ => return Err(WRONG),
                };
                let name = from.text(MAX_NAME)?.into();
                let setting = if kind == 3 { Some(Arc::new(Setting::read(from)?)) } else { None };
                Ok(Self::Setting { owner, name, setting })
            }
            _ => Err(WRONG),
        }
    }
}

/// The changes after a sequence number, and whether removals are missing among them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ControlPage {
    /// Changes with their numbers, in ascending order. A change that a later one has replaced is left out.
    pub changes: Vec<(u64, ControlChange)>,
    /// The number of the latest change in the log.
    pub last: u64,
    /// Removals up to this number may be missing.
    pub forgotten: u64,
    /// When the log began; [`Timestamp::EPOCH`] before its first change. Another time than before tells a node that the store has
    /// lost the log, also if the new one has as many changes.
    pub began: Timestamp,
}

impl ControlPage {
    /// Returns whether a node that has read up to `after` cannot continue from there, because removals may be missing, or because
    /// the log was lost and began again. The node then reads the whole set from the beginning and drops what is not in it.
    #[must_use]
    pub const fn misses(&self, after: u64) -> bool {
        after < self.forgotten || self.last < after
    }

    /// Returns the number after which the next page begins.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.changes.last().map_or(self.last, |(number, _)| *number)
    }

    /// Returns whether this is the last page.
    #[must_use]
    pub fn is_last(&self) -> bool {
        self.end() >= self.last
    }

    pub(crate) fn write(&self, out: &mut Writer) {
        out.number(self.last);
        out.number(self.forgotten);
        out.number(self.began.micros());
        out.number(self.changes.len() as u64);
        for (number, change) in &self.changes {
            out.number(*number);
            change.write(out);
        }
    }

    pub(crate) fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let (last, forgotten) = (from.number()?, from.number()?);
        let began = Timestamp::from_micros(from.number()?);
        let count = from.count(MAX_CHANGES)?;
        let changes: Vec<(u64, ControlChange)> =
            (0..count).map(|_| Ok((from.number()?, ControlChange::read(from)?))).collect::<Result<_, BytesError>>()?;
        // A node continues after the number of the last change. In another order, or beyond `last`, it would skip
        // changes for good.
        let in_order = changes.is_sorted_by(|(one, _), (next, _)| one < next);
        if !in_order || changes.last().is_some_and(|(number, _)| *number > last) {
            return Err(BytesError::Malformed("control page"));
        }
        Ok(Self { changes, last, forgotten, began })
    }
}

/// The log already holds the maximum number of bans or of settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("there are {MAX_BANS} bans or {MAX_SETTINGS} settings already")]
pub struct ControlFull;

/// The newest change under each key, for stores that keep the log in memory or as one record.
#[derive(Debug, Clone)]
pub struct ControlLog {
    max_bans: usize,
    max_settings: usize,
    last: u64,
    forgotten: u64,
    began: Timestamp,
    changes: BTreeMap<u64, ControlChange>,
    numbers: BTreeMap<ControlKey, u64>,
    /// The number of bans in `changes`, without removals; `settings` likewise.
    bans: usize,
    settings: usize,
    /// The time of each removal, by its number.
    removals: BTreeMap<u64, Timestamp>,
    /// No ban or setting ends before this, so that a full log is searched only where something can have ended.
    first_end: Timestamp,
}

impl Default for ControlLog {
    fn default() -> Self {
        Self::bounded(MAX_BANS, MAX_SETTINGS)
    }
}

impl ControlLog {
    /// The versions of its bytes that are read.
    const VERSIONS: Versions = Versions::FIRST.containing(ControlChange::VERSIONS);

    /// Makes an empty log with room for so many bans and settings.
    #[must_use]
    pub const fn bounded(max_bans: usize, max_settings: usize) -> Self {
        Self {
            max_bans,
            max_settings,
            last: 0,
            forgotten: 0,
            began: Timestamp::EPOCH,
            changes: BTreeMap::new(),
            numbers: BTreeMap::new(),
            bans: 0,
            settings: 0,
            removals: BTreeMap::new(),
            first_end: Timestamp::MAX,
        }
    }

    /// Adds a change in place of the one with the same key, and returns its number. A full log first drops what has ended.
    ///
    /// # Errors
    /// Fails where there is no room. A removal always finds room.
    pub fn add(&mut self, change: ControlChange, now: Timestamp) -> Result<u64, ControlFull> {
        let key = change.key();
        // A removal, and a change of what is there already, need no room. Operators can always lift a ban in a full
        // log.
        if change.until().is_some() && !self.is_set(&key) && !self.has_room(&key) {
            self.drop_ended(now);
            if !self.has_room(&key) {
                return Err(ControlFull);
            }
        }
        self.begin(now);
        // Numbered only now: a refused change takes no number, so that a node never waits for one that does not exist.
        let number = self.last.saturating_add(1);
        self.last = number;
        self.put(number, change, now);
        self.drop_old_removals(now);
        Ok(number)
    }

    /// Notes when the log began, at its first change.
    fn begin(&mut self, now: Timestamp) {
        // Not at creation: a log that was lost while it was empty has told no node anything.
        if self.last == 0 {
            self.began = now;
        }
    }

    fn drop_old_removals(&mut self, now: Timestamp) {
        while let Some((number, at)) = self.removals.first_key_value().map(|(number, at)| (*number, *at)) {
            // Removals are in the order of their numbers, so the first one is the oldest.
            if at.plus(REMOVAL_KEPT) > now && self.removals.len() <= MAX_REMOVALS {
                break;
            }
            // A node that has not read this removal would keep the ban for ever. By `forgotten` it learns to read everything.
            self.forgotten = self.forgotten.max(number);
            self.take(number);
        }
    }

    /// Adds changes in their order, all or none, and returns the number of the last one. Only the result has to have room: a set
    /// of bans can be replaced by another one in a full log, however its changes are ordered.
    ///
    /// # Errors
    /// Fails where there is no room.
    pub fn add_all(&mut self, changes: &[ControlChange], now: Timestamp) -> Result<u64, ControlFull> {
        // Checked for all of them before the first one is made, so that nothing has to be undone.
        if !self.has_room_for_all(changes) {
            self.drop_ended(now);
            if !self.has_room_for_all(changes) {
                return Err(ControlFull);
            }
        }
        self.begin(now);
        for change in changes {
            self.last = self.last.saturating_add(1);
            self.put(self.last, change.clone(), now);
        }
        self.drop_old_removals(now);
        Ok(self.last)
    }

    /// Returns up to `most` changes after a number.
    #[must_use]
    pub fn after(&self, after: u64, most: usize) -> ControlPage {
        // A node may send any number. After the largest one there is nothing.
        let later = after.checked_add(1).map(|first| self.changes.range(first..).take(most));
        let changes = later.into_iter().flatten().map(|(number, change)| (*number, change.clone())).collect();
        ControlPage { changes, last: self.last, forgotten: self.forgotten, began: self.began }
    }

    /// Returns the number of the latest change; 0 before the first.
    #[must_use]
    pub const fn last(&self) -> u64 {
        self.last
    }

    /// Returns all bans and settings, in the order of their numbers.
    pub fn set(&self) -> impl Iterator<Item = &ControlChange> {
        self.changes.values().filter(|change| change.until().is_some())
    }

    /// Returns the stored bytes.
    #[must_use]
    pub fn to_bytes(&self, format: Format) -> Vec<u8> {
        to_bytes(Self::VERSIONS, format, |out| {
            self.after(0, usize::MAX).write(out);
            // Only the times: their numbers are those of the removals on the page, in the same order.
            self.removals.values().for_each(|at| out.number(at.micros()));
        })
    }

    /// Parses what [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    /// Fails on an unknown version and on malformed bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, BytesError> {
        from_bytes(bytes, Self::VERSIONS, |from| {
            let ControlPage { changes, last, forgotten, began } = ControlPage::read(from)?;
            let mut log = Self { last, forgotten, began, ..Self::default() };
            for (number, change) in changes {
                let is_removal = change.until().is_none();
                // A log holds one change for each key. A second one would be counted twice and never dropped.
                if log.numbers.contains_key(&change.key()) {
                    return Err(BytesError::Malformed("control log"));
                }
                log.put(number, change, Timestamp::EPOCH);
                if is_removal {
                    log.removals.insert(number, Timestamp::EPOCH);
                }
            }
            for at in log.removals.values_mut() {
                *at = Timestamp::from_micros(from.number()?);
            }
            Ok(log)
        })
    }

    fn put(&mut self, number: u64, change: ControlChange, now: Timestamp) {
        let key = change.key();
        // The change before is superseded for every node, so the log holds one for each key and its size is bounded.
        if let Some(before) = self.numbers.get(&key).copied() {
            self.take(before);
        }
        match change.until() {
            // Only a lower bound: when the first to end is replaced or removed, it stays too early, which costs one search.
            Some(until) => {
                *self.count(&key) = self.count(&key).saturating_add(1);
                self.first_end = self.first_end.min(until);
            }
            None => drop(self.removals.insert(number, now)),
        }
        self.numbers.insert(key, number);
        self.changes.insert(number, change);
    }

    /// Removes the change with this number.
    fn take(&mut self, number: u64) {
        let is_removal = self.removals.remove(&number).is_some();
        let Some(change) = self.changes.remove(&number) else { return };
        let key = change.key();
        self.numbers.remove(&key);
        if !is_removal {
            *self.count(&key) = self.count(&key).saturating_sub(1);
        }
    }

    fn count(&mut self, key: &ControlKey) -> &mut usize {
        match key {
            ControlKey::Ban(_) => &mut self.bans,
            ControlKey::Setting(..) => &mut self.settings,
        }
    }

    /// Returns whether there is a ban or setting under a key, and not only its removal.
    fn is_set(&self, key: &ControlKey) -> bool {
        self.numbers.get(key).is_some_and(|number| !self.removals.contains_key(number))
    }

    /// Returns whether the bounds hold once all changes are made.
    fn has_room_for_all(&self, changes: &[ControlChange]) -> bool {
        // Of several changes under one key the last one wins, as it does when they are made.
        let last: BTreeMap<ControlKey, bool> =
            changes.iter().map(|change| (change.key(), change.until().is_some())).collect();
        let (mut bans, mut settings) = (self.bans, self.settings);
        for (key, is_set) in last {
            let count = if matches!(key, ControlKey::Ban(_)) { &mut bans } else { &mut settings };
            match (self.is_set(&key), is_set) {
                (false, true) => *count = count.saturating_add(1),
                (true, false) => *count = count.saturating_sub(1),
                _ => {}
            }
        }
        // A log that is over its bound, because the bound was lowered, may shrink.
        (bans <= self.max_bans.max(self.bans)) && settings <= self.max_settings.max(self.settings)
    }

    const fn has_room(&self, key: &ControlKey) -> bool {
        match key {
            ControlKey::Ban(_) => self.bans < self.max_bans,
            ControlKey::Setting(..) => self.settings < self.max_settings,
        }
    }

    /// Drops bans and settings that have ended by themselves. Every node knows their end, so the log needs no removal for them.
    fn drop_ended(&mut self, now: Timestamp) {
        if self.first_end > now {
            return;
        }
        let ended = self.changes.iter().filter(|(_, change)| change.until().is_some_and(|until| until <= now));
        // Collected, because `take` changes the map that is searched.
        for number in ended.map(|(number, _)| *number).collect::<Vec<_>>() {
            self.take(number);
        }
        self.first_end = self.changes.values().filter_map(ControlChange::until).min().unwrap_or(Timestamp::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::ListEntry;

    const START: Timestamp = Timestamp::from_secs(1_767_225_600);

    fn ban(id: u128, until: Timestamp) -> ControlChange {
        let whom = ListEntry::User(format!("u{id}").into());
        let ban = Ban { whom, reason: "r".into(), by: "ops".into(), from: START, until };
        ControlChange::Ban { id: Digest::from_u128(id), ban: Some(Arc::new(ban)) }
    }

    fn lifted(id: u128) -> ControlChange {
        ControlChange::Ban { id: Digest::from_u128(id), ban: None }
    }

    fn setting(name: &str, until: Timestamp) -> ControlChange {
        let (limits, by, reason) = (BTreeMap::from([("ai".into(), "5/h".into())]), "ops".into(), "".into());
        let setting = Setting { tier: Some("pro".into()), limits, times: 3, until, from: START, by, reason };
        ControlChange::Setting { owner: Owner::User, name: name.into(), setting: Some(Arc::new(setting)) }
    }

    #[test]
    fn changes_and_logs_read_back_and_truncated_bytes_are_refused() {
        let taken = ControlChange::Setting { owner: Owner::Tenant, name: "acme".into(), setting: None };
        let mut log = ControlLog::default();
        for change in [ban(7, Timestamp::MAX), lifted(8), setting("u1", START.plus(Span::HOUR)), taken] {
            let bytes = change.to_bytes(Format::PRESENT);
            for cut in 0..bytes.len() {
                assert!(ControlChange::from_bytes(&bytes[..cut]).is_err());
            }
            assert_eq!(ControlChange::from_bytes(&bytes), Ok(change.clone()));
            log.add(change, START).unwrap();
        }
        let bytes = log.to_bytes(Format::PRESENT);
        for cut in 0..bytes.len() {
            assert!(ControlLog::from_bytes(&bytes[..cut]).is_err(), "{cut}");
        }
        let read = ControlLog::from_bytes(&bytes).unwrap();
        assert_eq!((read.to_bytes(Format::PRESENT), read.after(0, 9)), (bytes, log.after(0, 9)));
        assert_eq!((read.bans, read.settings, read.removals, read.numbers), (1, 1, log.removals, log.numbers));
    }

    /// Fails if `add` does not check for room, or if ended bans or removals take up room.
    #[test]
    fn a_full_log_refuses_new_bans_and_settings_until_one_is_removed_or_has_ended() {
        let mut log = ControlLog::bounded(2, 1);
        let later = START.plus(Span::HOUR);
        assert_eq!(log.add(ban(1, later), START), Ok(1));
        assert_eq!(log.add(ban(2, Timestamp::MAX), START), Ok(2));
        assert_eq!(log.add(ban(3, Timestamp::MAX), START), Err(ControlFull));
        // A refused change takes no number.
        assert_eq!(log.add(ban(2, later), START), Ok(3), "another in place of the one before");
        assert_eq!(log.add(setting("u1", Timestamp::MAX), START), Ok(4), "settings have room of their own");
        assert_eq!(log.add(setting("u2", Timestamp::MAX), START), Err(ControlFull));
        assert_eq!(log.add(lifted(1), START), Ok(5));
        assert_eq!(log.add(ban(3, Timestamp::MAX), START), Ok(6));
        assert_eq!(log.add(lifted(9), START), Ok(7), "a removal needs no room");
        assert_eq!(log.add(ban(4, Timestamp::MAX), START), Err(ControlFull));
        assert_eq!(log.add(ban(4, Timestamp::MAX), later), Ok(8), "the second has ended");
        assert_eq!((log.bans, log.settings, log.set().count()), (2, 1, 3));
    }

    #[test]
    fn a_log_has_room_for_as_many_bans_and_settings_as_its_bounds_say() {
        let mut log = ControlLog::default();
        assert_eq!((log.max_bans, log.max_settings), (MAX_BANS, MAX_SETTINGS));
        for number in 0..MAX_SETTINGS {
            log.add(setting(&format!("u{number}"), Timestamp::MAX), START).unwrap();
        }
        assert_eq!(log.add(setting("one more", Timestamp::MAX), START), Err(ControlFull));
        assert_eq!(log.settings, MAX_SETTINGS);
    }

    #[test]
    fn a_name_longer_than_its_bound_is_not_read_back() {
        let removal = |length| {
            let name = "n".repeat(length).into();
            ControlChange::Setting { owner: Owner::Tenant, name, setting: None }
        };
        let read = |change: &ControlChange| ControlChange::from_bytes(&change.to_bytes(Format::PRESENT));
        assert_eq!(read(&removal(MAX_NAME)), Ok(removal(MAX_NAME)));
        assert!(read(&removal(MAX_NAME + 1)).is_err());
    }

    /// A set of bans was to be replaced in a full list: each new ban was refused although as many old ones were to go.
    ///
    /// Fails if the room is checked before each change, or if a refused set leaves changes behind.
    #[test]
    fn many_changes_are_made_all_or_none_and_only_their_result_needs_room() {
        let mut log = ControlLog::bounded(3, 1);
        let forever = Timestamp::MAX;
        assert_eq!(log.add_all(&[ban(1, forever), ban(2, forever), ban(1, forever)], START), Ok(3));
        let before = log.to_bytes(Format::PRESENT);
        assert_eq!(log.add_all(&[ban(3, forever), ban(4, forever), lifted(9)], START), Err(ControlFull));
        let settings = [setting("u1", forever), setting("u2", forever)];
        assert_eq!(log.add_all(&settings, START), Err(ControlFull));
        assert_eq!(log.to_bytes(Format::PRESENT), before);
        let swap = [ban(3, forever), ban(4, START.plus(Span::HOUR)), ban(5, forever), lifted(1), lifted(2)];
        assert_eq!(log.add_all(&swap, START), Ok(8));
        let held: Vec<ControlKey> = log.set().map(ControlChange::key).collect();
        assert_eq!(held, [3, 4, 5].map(|id| ControlKey::Ban(Digest::from_u128(id))));
        assert_eq!((log.bans, log.after(3, 99).changes.len()), (3, 5));
        // The fourth has ended by then.
        assert_eq!(log.add_all(&[ban(6, forever)], START), Err(ControlFull));
        assert_eq!(log.add_all(&[ban(6, forever)], START.plus(Span::HOUR)), Ok(9));
    }

    /// Fails if a removal is dropped early, or if `forgotten` does not tell that it was dropped.
    #[test]
    fn a_removal_is_kept_for_an_hour_and_a_node_that_was_away_for_longer_reads_everything() {
        let mut log = ControlLog::default();
        log.add(ban(1, Timestamp::MAX), START).unwrap();
        log.add(lifted(1), START).unwrap();
        let almost = Timestamp::from_micros(START.plus(Span::HOUR).micros() - 1);
        log.add(ban(2, Timestamp::MAX), almost).unwrap();
        let page = log.after(1, 10);
        assert_eq!(page.changes.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [2, 3]);
        assert!(!page.misses(1));
        log.add(ban(3, Timestamp::MAX), START.plus(Span::HOUR)).unwrap();
        let page = log.after(1, 10);
        assert_eq!(page.changes.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [3, 4]);
        assert!(page.misses(1) && page.misses(0) && !page.misses(2));
        // A log that was lost begins again at 1.
        assert!(ControlLog::default().after(4, 10).misses(4));
        for id in 10..=10 + MAX_REMOVALS as u128 {
            log.add(lifted(id), START.plus(Span::HOUR)).unwrap();
        }
        assert_eq!((log.removals.len(), log.after(0, 1).forgotten), (MAX_REMOVALS, 5));
    }
}
