//! The list of bans that operators set while the limiter runs: read for every request, changed rarely.

use std::collections::BTreeMap;
use std::ops::{Bound, ControlFlow};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use threshold_core::lockout::Spellings;
use threshold_core::policy::{Ban, BanSource, Banned, Bans, ListEntry, Rank, Who};
use threshold_core::{Digest, Timestamp};

use crate::store::ChangeSink;

pub use threshold_core::control::MAX_BANS;

/// The bans that operators have set, and the names of subjects that ladders have banned.
#[derive(Debug, Default)]
pub struct BanList {
    /// Whether there is any ban. While there is none, a request pays for one atomic load.
    any: AtomicBool,
    entries: RwLock<Entries>,
    sink: OnceLock<Arc<dyn ChangeSink>>,
    /// How many bans have ended by time.
    expired: AtomicU64,
}

#[derive(Debug)]
struct Entries {
    /// The maximum number of bans, and of names.
    max: usize,
    /// No ban and no name ends before this. It saves a search for ended ones when the list is full.
    first_end: Timestamp,
    by_id: BTreeMap<Digest, Arc<Ban>>,
    bans: Bans,
    /// The subjects that ladders have banned, by the digest of the subject. The store's standings decide; these hold names.
    named: BTreeMap<Digest, Ban>,
    /// The spellings of users that ladders have banned.
    spellings: Spellings,
}

impl Default for Entries {
    fn default() -> Self {
        Self {
            max: MAX_BANS,
            first_end: Timestamp::MAX,
            by_id: BTreeMap::new(),
            bans: Bans::default(),
            named: BTreeMap::new(),
            spellings: Spellings::default(),
        }
    }
}

impl Entries {
    fn insert(&mut self, id: Digest, ban: Arc<Ban>) {
        self.first_end = self.first_end.min(ban.until);
        self.bans.insert(id, &ban.whom, ban.until);
        self.by_id.insert(id, ban);
    }

    /// Returns the bans with these ids that are in force at `now`.
    fn with_ids(&self, ids: Vec<Digest>, now: Timestamp) -> Vec<(Digest, Arc<Ban>)> {
        let bans = ids.into_iter().filter_map(|id| Some((id, Arc::clone(self.by_id.get(&id)?))));
        bans.filter(|(_, ban)| ban.until > now).collect()
    }

    fn insert_named(&mut self, subject: Digest, ban: Ban) {
        // The spelling of the name before goes with it.
        self.remove_named(subject);
        self.first_end = self.first_end.min(ban.until);
        if let ListEntry::User(user) = &ban.whom {
            self.spellings.insert(user);
        }
        self.named.insert(subject, ban);
    }

    /// Removes the name of a subject. Returns whether there was one.
    fn remove_named(&mut self, subject: Digest) -> bool {
        let Some(ban) = self.named.remove(&subject) else { return false };
        if let ListEntry::User(user) = &ban.whom {
            self.spellings.remove(user);
        }
        true
    }
}

/// The list already holds the maximum number of bans.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("there are {MAX_BANS} bans already")]
pub struct TooManyBans;

impl BanList {
    /// Reports every change from now on to this sink, unless there is one already.
    // By reference, because several limiters may share a list. The first journal is enough: it has every change of the list.
    pub(crate) fn report_to(&self, sink: Arc<dyn ChangeSink>) {
        let _ = self.sink.set(sink);
    }

    /// Reports every change from now on to this sink.
    #[must_use]
    pub fn with_change_sink(self, sink: Arc<dyn ChangeSink>) -> Self {
        self.report_to(sink);
        self
    }

    /// Sets a ban in this process alone, and replaces the one with the same id. Ended bans are removed first if the list is
    /// full. [`Limiter::change_control`](crate::Limiter::change_control) sets a ban on every node.
    ///
    /// # Errors
    /// Returns an error if the list is full.
    pub fn set(&self, id: Digest, ban: impl Into<Arc<Ban>>, now: Timestamp) -> Result<(), TooManyBans> {
        let mut entries = self.write();
        self.make_room_in(&mut entries, id, now)?;
        self.put_in(&mut entries, id, ban.into());
        Ok(())
    }

    /// Sets a ban that the store has accepted. A ban that is already set is not reported again.
    pub(crate) fn put(&self, id: Digest, ban: Arc<Ban>) {
        let mut entries = self.write();
        // The log may repeat a ban that is in force already. It need not go to the journal again.
        if entries.by_id.get(&id) != Some(&ban) {
            self.put_in(&mut entries, id, ban);
        }
    }

    fn put_in(&self, entries: &mut Entries, id: Digest, ban: Arc<Ban>) {
        // Under the write lock, so that the sink sees the changes of one ban in their order.
        if let Some(sink) = self.sink.get() {
            sink.ban(id, Some(&ban));
        }
        entries.insert(id, ban);
        self.any.store(true, Ordering::Release);
    }

    /// Returns the change sink.
    pub(crate) fn sink(&self) -> Option<&Arc<dyn ChangeSink>> {
        self.sink.get()
    }

    /// Checks whether a ban with this id could be set, and removes ended bans if the list is full.
    ///
    /// # Errors
    /// Returns an error if the list is full.
    pub fn make_room(&self, id: Digest, now: Timestamp) -> Result<(), TooManyBans> {
        self.make_room_in(&mut self.write(), id, now)
    }

    /// Lifts a ban in this process alone, and returns it.
    pub fn lift(&self, id: Digest) -> Option<Arc<Ban>> {
        let mut entries = self.write();
        let ban = entries.by_id.remove(&id)?;
        self.forget(&mut entries, id, &ban);
        self.any.store(!entries.by_id.is_empty(), Ordering::Release);
        Some(ban)
    }

    /// Records the name of a subject that a ladder has banned. If the list is full, the subject stays without a name.
    pub fn name(&self, subject: Digest, ban: Ban, now: Timestamp) {
        let mut entries = self.write();
        let is_known = entries.named.contains_key(&subject);
        // A known name is only replaced, so it needs no room.
        if entries.named.len() >= entries.max && !is_known {
            self.sweep_entries(&mut entries, now);
        }
        // Without room the ban is in force all the same. Only its name stays unknown.
        if entries.named.len() < entries.max || is_known {
            if let Some(sink) = self.sink.get() {
                sink.named(subject, Some(&ban));
            }
            entries.insert_named(subject, ban);
        }
    }

    /// Returns the ban with the name of a subject that a ladder has banned.
    #[must_use]
    pub fn named(&self, subject: Digest) -> Option<Ban> {
        self.read().named.get(&subject).cloned()
    }

    /// Removes the name of a subject.
    pub fn forget_name(&self, subject: Digest) {
        if self.write().remove_named(subject)
            && let Some(sink) = self.sink.get()
        {
            sink.named(subject, None);
        }
    }

    /// Returns the bans in force at `now`, with their ids.
    #[must_use]
    pub fn all(&self, now: Timestamp) -> Vec<(Digest, Ban)> {
        let mut all = Vec::new();
        self.walk(None, now, |id, ban| {
            all.push((id, Ban::clone(ban)));
            ControlFlow::Continue(())
        });
        all
    }

    /// Calls `show` for the bans in force at `now` in the order of their ids, from the first after `after`, until it breaks. The
    /// list is locked for reading meanwhile.
    pub fn walk(&self, after: Option<Digest>, now: Timestamp, mut show: impl FnMut(Digest, &Ban) -> ControlFlow<()>) {
        let entries = self.read();
        let mut bans = entries.by_id.range(beyond(after)).filter(|(_, ban)| ban.until > now);
        let _ = bans.try_for_each(|(id, ban)| show(*id, ban));
    }

    /// Calls `show` for every ban, ended ones too. The list is locked for reading meanwhile.
    pub fn each(&self, mut show: impl FnMut(Digest, &Ban)) {
        self.read().by_id.iter().for_each(|(id, ban)| show(*id, ban));
    }

    /// Calls `show` for every subject that a ladder has banned. The list is locked for reading meanwhile.
    pub fn each_named(&self, mut show: impl FnMut(Digest, &Ban)) {
        self.read().named.iter().for_each(|(subject, ban)| show(*subject, ban));
    }

    /// Returns the ban with this id, if it is in force at `now`.
    #[must_use]
    pub fn one(&self, id: Digest, now: Timestamp) -> Option<Ban> {
        self.read().by_id.get(&id).filter(|ban| ban.until > now).map(|ban| Ban::clone(ban))
    }

    /// Returns the bans in force at `now` that apply to a caller, also those on wider blocks, with their ids. The one that ends
    /// last is the first.
    #[must_use]
    pub fn covering(&self, who: Who<'_>, now: Timestamp) -> Vec<(Digest, Arc<Ban>)> {
        let entries = self.read();
        let mut bans = entries.with_ids(entries.bans.covering(who), now);
        bans.sort_by_key(|(id, ban)| std::cmp::Reverse((ban.until, *id)));
        bans
    }

    /// Returns the bans in force at `now` on exactly this subject, with their ids.
    #[must_use]
    pub fn on(&self, whom: &ListEntry, now: Timestamp) -> Vec<(Digest, Arc<Ban>)> {
        let entries = self.read();
        entries.with_ids(entries.bans.on(whom), now)
    }

    /// Returns whether there is a ban with this id, also one that has ended since the last [`sweep`](Self::sweep).
    pub(crate) fn contains(&self, id: Digest) -> bool {
        self.read().by_id.contains_key(&id)
    }

    /// Returns the number of bans, with those that have ended since the last [`sweep`](Self::sweep).
    #[must_use]
    pub fn count(&self) -> usize {
        self.read().by_id.len()
    }

    /// Returns how many bans, of operators and of ladders, were removed because they had ended.
    #[must_use]
    pub fn expired(&self) -> u64 {
        self.expired.load(Ordering::Relaxed)
    }

    /// Returns the bans of an imported set, with their ids.
    #[must_use]
    pub fn of_origin(&self, origin: &str) -> Vec<(Digest, Arc<Ban>)> {
        let entries = self.read();
        let own = entries.by_id.iter().filter(|(_, ban)| ban.origin() == Some(origin));
        own.map(|(id, ban)| (*id, Arc::clone(ban))).collect()
    }

    /// Removes ended bans, and shortens those that were set by a clock which has since gone back.
    pub fn sweep(&self, now: Timestamp) {
        let concerns = |ban: &Ban| ban.until <= now || ban.is_ahead(now);
        // The read lock first, which does not stop requests: nearly always nothing has ended.
        let entries = self.read();
        let any = entries.by_id.values().map(AsRef::as_ref).chain(entries.named.values()).any(concerns);
        drop(entries);
        if any {
            let mut entries = self.write();
            self.bring_back(&mut entries, now);
            self.sweep_entries(&mut entries, now);
            self.any.store(!entries.by_id.is_empty(), Ordering::Release);
        }
    }

    fn bring_back(&self, entries: &mut Entries, now: Timestamp) {
        let ahead: Vec<(Digest, Arc<Ban>)> = entries.by_id.extract_if(.., |_, ban| ban.is_ahead(now)).collect();
        for (id, ban) in ahead {
            let ban = Arc::new(Arc::unwrap_or_clone(ban).brought_back(now));
            // The index holds the end of the ban too, so the old entry goes first.
            entries.bans.remove(id, &ban.whom);
            if let Some(sink) = self.sink.get() {
                sink.ban(id, Some(&ban));
            }
            entries.insert(id, ban);
        }
        let ahead: Vec<(Digest, Ban)> = entries.named.extract_if(.., |_, ban| ban.is_ahead(now)).collect();
        for (subject, ban) in ahead {
            let ban = ban.brought_back(now);
            if let Some(sink) = self.sink.get() {
                sink.named(subject, Some(&ban));
            }
            entries.first_end = entries.first_end.min(ban.until);
            // The name stays the same, and so does its spelling.
            entries.named.insert(subject, ban);
        }
    }

    fn make_room_in(&self, entries: &mut Entries, id: Digest, now: Timestamp) -> Result<(), TooManyBans> {
        if entries.by_id.len() >= entries.max && !entries.by_id.contains_key(&id) {
            self.sweep_entries(entries, now);
            if entries.by_id.len() >= entries.max {
                return Err(TooManyBans);
            }
        }
        Ok(())
    }

    fn sweep_entries(&self, entries: &mut Entries, now: Timestamp) {
        // No ban ends before this, so a full list is not scanned for every further ban.
        if entries.first_end > now {
            return;
        }
        let over: Vec<(Digest, Arc<Ban>)> = entries.by_id.extract_if(.., |_, ban| ban.until <= now).collect();
        let ended = over.len();
        for (id, ban) in over {
            self.forget(entries, id, &ban);
        }
        let over = entries.named.iter().filter(|(_, ban)| ban.until <= now);
        let over: Vec<_> = over.map(|(subject, _)| *subject).collect();
        self.expired.fetch_add(u64::try_from(ended.saturating_add(over.len())).unwrap_or(0), Ordering::Relaxed);
        for subject in over {
            entries.remove_named(subject);
            if let Some(sink) = self.sink.get() {
                sink.named(subject, None);
            }
        }
        let ends = entries.by_id.values().map(AsRef::as_ref).chain(entries.named.values()).map(|ban| ban.until);
        entries.first_end = ends.min().unwrap_or(Timestamp::MAX);
    }

    fn forget(&self, entries: &mut Entries, id: Digest, ban: &Ban) {
        entries.bans.remove(id, &ban.whom);
        if let Some(sink) = self.sink.get() {
            sink.ban(id, None);
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, Entries> {
        self.entries.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Entries> {
        self.entries.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the range of all ids after `after`; of all ids without one.
pub(crate) fn beyond(after: Option<Digest>) -> (Bound<Digest>, Bound<Digest>) {
    (after.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded)
}

impl BanSource for BanList {
    fn is_empty(&self) -> bool {
        // Pairs with the release in `put_in`: a request that comes after a ban was set sees it.
        !self.any.load(Ordering::Acquire)
    }

    fn find(&self, who: Who<'_>, allowed: Option<Rank>) -> Option<Banned> {
        self.read().bans.find(who, allowed)
    }

    fn spellings(&self, folded: &str) -> Vec<Box<str>> {
        let entries = self.read();
        entries.bans.spellings(folded).chain(entries.spellings.of(folded)).map(Box::from).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use threshold_core::DigestKey;
    use threshold_core::policy::Layer;

    const KEY: DigestKey = DigestKey::new([7; 16]);

    fn ban(key: &str, until: u64) -> (Digest, Ban) {
        let whom = ListEntry::named(Layer::Edge, key).unwrap();
        let until = Timestamp::from_secs(until);
        (whom.ban_id(KEY), Ban { whom, reason: "r".into(), by: "b".into(), from: Timestamp::EPOCH, until })
    }

    #[test]
    fn a_ban_that_was_set_again_is_one_ban_and_what_is_over_is_swept() {
        let list = BanList::default();
        let who = Who { ip: "203.0.113.7".parse().ok(), ..Who::default() };
        let now = Timestamp::from_secs(10);
        assert_eq!(list.find(who, None), None);
        for (key, until) in [("203.0.113.7", 20), ("203.0.113.7/32", 30), ("203.0.113.0/24", 5)] {
            let (id, ban) = ban(key, until);
            list.set(id, ban, now).unwrap();
        }
        assert_eq!(list.all(now).len(), 1);
        assert_eq!(list.find(who, None).unwrap().until, Timestamp::from_secs(30));
        list.sweep(now);
        assert_eq!(list.all(Timestamp::EPOCH).len(), 1);
        let (id, _) = ban("203.0.113.7", 0);
        assert!(list.lift(id).is_some() && list.lift(id).is_none());
        assert_eq!(list.find(who, None), None);
    }

    /// Woken by: `forget` leaving whom it was on among those who are looked up.
    #[test]
    fn one_ban_is_lifted_and_another_stays() {
        let list = BanList::default();
        for key in ["203.0.113.7", "198.51.100.7"] {
            let (id, ban) = ban(key, 20);
            list.set(id, ban, Timestamp::EPOCH).unwrap();
        }
        list.lift(ban("203.0.113.7", 0).0).unwrap();
        let found = |ip: &str| list.find(Who { ip: ip.parse().ok(), ..Who::default() }, None).is_some();
        assert_eq!((found("203.0.113.7"), found("198.51.100.7")), (false, true));
    }

    /// A page is as long as it is read, however many bans there are, and begins where the one before it ended.
    ///
    /// Woken by: `Bound::Included` in `beyond`.
    #[test]
    fn a_page_is_walked_and_no_more() {
        let list = BanList::default();
        let now = Timestamp::from_secs(10);
        for number in 0..1_000u32 {
            let until = if number % 10 == 0 { 10 } else { 20 };
            let (id, ban) = ban(&std::net::Ipv4Addr::from_bits(0x0b00_0000 + number).to_string(), until);
            list.set(id, ban, Timestamp::EPOCH).unwrap();
        }
        let (mut listed, mut shown, mut after) = (Vec::new(), 0, None);
        for _ in 0..1_000 {
            let mut page = Vec::new();
            list.walk(after, now, |id, _| {
                page.push(id);
                shown += 1;
                if page.len() == 7 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            after = page.last().copied();
            listed.extend_from_slice(&page);
            if page.len() < 7 {
                break;
            }
        }
        assert_eq!((listed.len(), shown), (900, 900));
        assert_eq!(listed, list.all(now).into_iter().map(|(id, _)| id).collect::<Vec<_>>());
    }

    /// There are at most so many: one more is refused, one in place of another is not, and what is over makes room. A ladder's
    /// ban for whose name there is no room holds, and has none.
    ///
    /// Fails without the bound in `make_room_in`, or in `name`.
    #[test]
    fn a_full_book_refuses_what_is_new_until_something_is_over() {
        const MOST: usize = 1_000;
        let list = BanList::default();
        assert_eq!(std::mem::replace(&mut list.write().max, MOST), MAX_BANS);
        let whom = |number: usize| ListEntry::User(format!("u{number}").into());
        let ban = |number: usize, until| {
            let until = Timestamp::from_secs(until);
            Ban { whom: whom(number), reason: "".into(), by: "".into(), from: Timestamp::EPOCH, until }
        };
        let id = |number: usize| Digest::from_u128(u128::try_from(number).unwrap());
        for number in 0..MOST {
            let until = if number == 7 { 20 } else { 100 };
            list.set(id(number), ban(number, until), Timestamp::EPOCH).unwrap();
            list.name(id(number), ban(number, until), Timestamp::EPOCH);
        }
        let (more, now) = (MOST, Timestamp::from_secs(10));
        assert_eq!(list.set(id(more), ban(more, 100), now), Err(TooManyBans));
        assert_eq!(list.set(id(3), ban(3, 200), now), Ok(()));
        list.name(id(more), ban(more, 100), now);
        assert_eq!((list.named(id(more)), list.all(now).len()), (None, MOST));
        // One name in place of another needs no room.
        list.name(id(3), ban(3, 200), now);
        assert_eq!(list.named(id(3)).map(|ban| ban.until), Some(Timestamp::from_secs(200)));
        let later = Timestamp::from_secs(20);
        assert_eq!(list.set(id(more), ban(more, 100), later), Ok(()));
        list.name(id(more), ban(more, 100), later);
        assert!(list.named(id(more)).is_some() && list.named(id(7)).is_none());
        assert_eq!(list.all(later).len(), MOST);
    }

    /// A scan of as many would take a million comparisons for each of these; a walk down the prefixes takes at most 32.
    #[test]
    fn among_a_hundred_thousand_blocks_the_right_one_is_found() {
        let list = BanList::default();
        for number in 0..100_000u32 {
            let net = std::net::Ipv4Addr::from_bits(0x0b00_0000 + (number << 8));
            let (id, ban) = ban(&format!("{net}/24"), 100);
            list.set(id, ban, Timestamp::EPOCH).unwrap();
        }
        for number in (0..100_000u32).step_by(997) {
            let inside = std::net::Ipv4Addr::from_bits(0x0b00_0000 + (number << 8) + 7);
            assert!(list.find(Who { ip: Some(inside.into()), ..Who::default() }, None).is_some());
        }
        let outside = Who { ip: "10.255.255.255".parse().ok(), ..Who::default() };
        assert_eq!(list.find(outside, None), None);
    }
}
