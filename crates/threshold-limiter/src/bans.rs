//! Bans that operators set while the limiter runs: looked up for every request, changed for a few.

use std::collections::BTreeMap;
use std::ops::{Bound, ControlFlow};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use threshold_core::lockout::Spellings;
use threshold_core::policy::{Ban, BanSource, Banned, Bans, ListEntry, Rank, Who};
use threshold_core::{Digest, Timestamp};

use crate::store::ChangeSink;

pub use threshold_core::control::MAX_BANS;

/// Every ban, by its number and by whom it is on.
#[derive(Debug, Default)]
pub struct BanList {
    /// Whether there is anybody to look for: a request that meets no ban pays for one load.
    any: AtomicBool,
    pages: RwLock<Pages>,
    sink: Option<Arc<dyn ChangeSink>>,
}

#[derive(Debug)]
struct Pages {
    /// The most bans, and the most names.
    most: usize,
    /// No ban and no name here ends before this: a full book is not searched in vain for one that has.
    first_end: Timestamp,
    by_id: BTreeMap<Digest, Arc<Ban>>,
    bans: Bans,
    /// Whom ladders have banned, by the subject. Their standings say until when; these say who it is.
    named: BTreeMap<Digest, Ban>,
    /// Of users whom ladders have banned.
    spellings: Spellings,
}

impl Default for Pages {
    fn default() -> Self {
        Self {
            most: MAX_BANS,
            first_end: Timestamp::MAX,
            by_id: BTreeMap::new(),
            bans: Bans::default(),
            named: BTreeMap::new(),
            spellings: Spellings::default(),
        }
    }
}

impl Pages {
    fn insert(&mut self, id: Digest, ban: Arc<Ban>) {
        self.first_end = self.first_end.min(ban.until);
        self.bans.insert(&ban.whom, ban.until);
        self.by_id.insert(id, ban);
    }

    fn insert_named(&mut self, subject: Digest, ban: Ban) {
        self.remove_named(subject);
        self.first_end = self.first_end.min(ban.until);
        if let ListEntry::User(user) = &ban.whom {
            self.spellings.insert(user);
        }
        self.named.insert(subject, ban);
    }

    /// Says whether there was one.
    fn remove_named(&mut self, subject: Digest) -> bool {
        let Some(ban) = self.named.remove(&subject) else { return false };
        if let ListEntry::User(user) = &ban.whom {
            self.spellings.remove(user);
        }
        true
    }
}

/// There is room for no more bans.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooManyBans;

impl std::fmt::Display for TooManyBans {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "there are {MAX_BANS} bans already")
    }
}

impl std::error::Error for TooManyBans {}

impl BanList {
    /// The same book, which tells this sink of every change from now on.
    #[must_use]
    pub fn with_change_sink(mut self, sink: Arc<dyn ChangeSink>) -> Self {
        self.sink = Some(sink);
        self
    }

    /// Sets a ban in this process alone, in place of the one on the same client. What is over goes first, so that a book
    /// never fills with it. [`Limiter::change_control`](crate::Limiter::change_control) sets one on every node.
    ///
    /// # Errors
    /// Where there is room for no more.
    pub fn set(&self, id: Digest, ban: impl Into<Arc<Ban>>, now: Timestamp) -> Result<(), TooManyBans> {
        let mut pages = self.write();
        self.make_room_in(&mut pages, id, now)?;
        self.put_in(&mut pages, id, ban.into());
        Ok(())
    }

    /// Sets a ban that the store has found room for. One that is there already is not told again.
    pub(crate) fn put(&self, id: Digest, ban: Arc<Ban>) {
        let mut pages = self.write();
        if pages.by_id.get(&id) != Some(&ban) {
            self.put_in(&mut pages, id, ban);
        }
    }

    fn put_in(&self, pages: &mut Pages, id: Digest, ban: Arc<Ban>) {
        if let Some(sink) = &self.sink {
            sink.ban(id, Some(&ban));
        }
        pages.insert(id, ban);
        self.any.store(true, Ordering::Release);
    }

    /// Who is told of every change.
    pub(crate) fn sink(&self) -> Option<&Arc<dyn ChangeSink>> {
        self.sink.as_ref()
    }

    /// Finds out whether a ban of this number could be set; what is over goes for it.
    ///
    /// # Errors
    /// Where there is room for no more.
    pub fn make_room(&self, id: Digest, now: Timestamp) -> Result<(), TooManyBans> {
        self.make_room_in(&mut self.write(), id, now)
    }

    /// Ends a ban in this process alone. Returns it, if there was one.
    pub fn lift(&self, id: Digest) -> Option<Arc<Ban>> {
        let mut pages = self.write();
        let ban = pages.by_id.remove(&id)?;
        self.forget(&mut pages, id, &ban);
        self.any.store(!pages.by_id.is_empty(), Ordering::Release);
        Some(ban)
    }

    /// Writes down whom a ladder has banned: a standing alone has no name. Where there is no room, it stays nameless.
    pub fn name(&self, subject: Digest, ban: Ban, now: Timestamp) {
        let mut pages = self.write();
        let is_known = pages.named.contains_key(&subject);
        if pages.named.len() >= pages.most && !is_known {
            self.sweep_pages(&mut pages, now);
        }
        if pages.named.len() < pages.most || is_known {
            if let Some(sink) = &self.sink {
                sink.named(subject, Some(&ban));
            }
            pages.insert_named(subject, ban);
        }
    }

    /// Whom a ladder has banned under this subject.
    #[must_use]
    pub fn named(&self, subject: Digest) -> Option<Ban> {
        self.read().named.get(&subject).cloned()
    }

    /// Forgets the name of a subject.
    pub fn forget_name(&self, subject: Digest) {
        if self.write().remove_named(subject)
            && let Some(sink) = &self.sink
        {
            sink.named(subject, None);
        }
    }

    /// The bans that hold at `now`, by their numbers.
    #[must_use]
    pub fn all(&self, now: Timestamp) -> Vec<(Digest, Ban)> {
        let mut all = Vec::new();
        self.walk(None, now, |id, ban| {
            all.push((id, Ban::clone(ban)));
            ControlFlow::Continue(())
        });
        all
    }

    /// Shows the bans that hold at `now` in the order of their numbers, from the first after `after`, until `show` stops:
    /// a page costs no more than what it shows. No ban is changed meanwhile.
    pub fn walk(&self, after: Option<Digest>, now: Timestamp, mut show: impl FnMut(Digest, &Ban) -> ControlFlow<()>) {
        let pages = self.read();
        let mut bans = pages.by_id.range(beyond(after)).filter(|(_, ban)| ban.until > now);
        let _ = bans.try_for_each(|(id, ban)| show(*id, ban));
    }

    /// Shows every ban, by its number. Nothing else is looked up or changed meanwhile.
    pub fn each(&self, mut show: impl FnMut(Digest, &Ban)) {
        self.read().by_id.iter().for_each(|(id, ban)| show(*id, ban));
    }

    /// Shows whom ladders have banned, by their subjects, in the same way.
    pub fn each_named(&self, mut show: impl FnMut(Digest, &Ban)) {
        self.read().named.iter().for_each(|(subject, ban)| show(*subject, ban));
    }

    /// One ban that holds at `now`.
    #[must_use]
    pub fn one(&self, id: Digest, now: Timestamp) -> Option<Ban> {
        self.read().by_id.get(&id).filter(|ban| ban.until > now).map(|ban| Ban::clone(ban))
    }

    /// Forgets bans that are over, and brings back those that were set by a clock which has since gone back.
    pub fn sweep(&self, now: Timestamp) {
        let concerns = |ban: &Ban| ban.until <= now || ban.is_ahead(now);
        let pages = self.read();
        let any = pages.by_id.values().map(AsRef::as_ref).chain(pages.named.values()).any(concerns);
        drop(pages);
        if any {
            let mut pages = self.write();
            self.bring_back(&mut pages, now);
            self.sweep_pages(&mut pages, now);
            self.any.store(!pages.by_id.is_empty(), Ordering::Release);
        }
    }

    fn bring_back(&self, pages: &mut Pages, now: Timestamp) {
        let ahead: Vec<(Digest, Arc<Ban>)> = pages.by_id.extract_if(.., |_, ban| ban.is_ahead(now)).collect();
        for (id, ban) in ahead {
            let ban = Arc::new(Arc::unwrap_or_clone(ban).brought_back(now));
            pages.bans.remove(&ban.whom);
            if let Some(sink) = &self.sink {
                sink.ban(id, Some(&ban));
            }
            pages.insert(id, ban);
        }
        let ahead: Vec<(Digest, Ban)> = pages.named.extract_if(.., |_, ban| ban.is_ahead(now)).collect();
        for (subject, ban) in ahead {
            let ban = ban.brought_back(now);
            if let Some(sink) = &self.sink {
                sink.named(subject, Some(&ban));
            }
            pages.first_end = pages.first_end.min(ban.until);
            pages.named.insert(subject, ban);
        }
    }

    fn make_room_in(&self, pages: &mut Pages, id: Digest, now: Timestamp) -> Result<(), TooManyBans> {
        if pages.by_id.len() >= pages.most && !pages.by_id.contains_key(&id) {
            self.sweep_pages(pages, now);
            if pages.by_id.len() >= pages.most {
                return Err(TooManyBans);
            }
        }
        Ok(())
    }

    fn sweep_pages(&self, pages: &mut Pages, now: Timestamp) {
        if pages.first_end > now {
            return;
        }
        let over: Vec<(Digest, Arc<Ban>)> = pages.by_id.extract_if(.., |_, ban| ban.until <= now).collect();
        for (id, ban) in over {
            self.forget(pages, id, &ban);
        }
        let over = pages.named.iter().filter(|(_, ban)| ban.until <= now);
        for subject in over.map(|(subject, _)| *subject).collect::<Vec<_>>() {
            pages.remove_named(subject);
            if let Some(sink) = &self.sink {
                sink.named(subject, None);
            }
        }
        let ends = pages.by_id.values().map(AsRef::as_ref).chain(pages.named.values()).map(|ban| ban.until);
        pages.first_end = ends.min().unwrap_or(Timestamp::MAX);
    }

    fn forget(&self, pages: &mut Pages, id: Digest, ban: &Ban) {
        pages.bans.remove(&ban.whom);
        if let Some(sink) = &self.sink {
            sink.ban(id, None);
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, Pages> {
        self.pages.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Pages> {
        self.pages.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Everything after a number; everything without one.
pub(crate) fn beyond(after: Option<Digest>) -> (Bound<Digest>, Bound<Digest>) {
    (after.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded)
}

impl BanSource for BanList {
    fn is_empty(&self) -> bool {
        !self.any.load(Ordering::Acquire)
    }

    fn find(&self, who: Who<'_>, allowed: Option<Rank>) -> Option<Banned> {
        self.read().bans.find(who, allowed)
    }

    fn spellings(&self, folded: &str) -> Vec<Box<str>> {
        let pages = self.read();
        pages.bans.spellings(folded).chain(pages.spellings.of(folded)).map(Box::from).collect()
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
        let book = BanList::default();
        let who = Who { ip: "203.0.113.7".parse().ok(), ..Who::default() };
        let now = Timestamp::from_secs(10);
        assert_eq!(book.find(who, None), None);
        for (key, until) in [("203.0.113.7", 20), ("203.0.113.7/32", 30), ("203.0.113.0/24", 5)] {
            let (id, ban) = ban(key, until);
            book.set(id, ban, now).unwrap();
        }
        assert_eq!(book.all(now).len(), 1);
        assert_eq!(book.find(who, None).unwrap().until, Timestamp::from_secs(30));
        book.sweep(now);
        assert_eq!(book.all(Timestamp::EPOCH).len(), 1);
        let (id, _) = ban("203.0.113.7", 0);
        assert!(book.lift(id).is_some() && book.lift(id).is_none());
        assert_eq!(book.find(who, None), None);
    }

    /// Woken by: `forget` leaving whom it was on among those who are looked up.
    #[test]
    fn one_ban_is_lifted_and_another_stays() {
        let book = BanList::default();
        for key in ["203.0.113.7", "198.51.100.7"] {
            let (id, ban) = ban(key, 20);
            book.set(id, ban, Timestamp::EPOCH).unwrap();
        }
        book.lift(ban("203.0.113.7", 0).0).unwrap();
        let found = |ip: &str| book.find(Who { ip: ip.parse().ok(), ..Who::default() }, None).is_some();
        assert_eq!((found("203.0.113.7"), found("198.51.100.7")), (false, true));
    }

    /// A page is as long as it is read, however many bans there are, and begins where the one before it ended.
    ///
    /// Woken by: `Bound::Included` in `beyond`.
    #[test]
    fn a_page_is_walked_and_no_more() {
        let book = BanList::default();
        let now = Timestamp::from_secs(10);
        for number in 0..1_000u32 {
            let until = if number % 10 == 0 { 10 } else { 20 };
            let (id, ban) = ban(&std::net::Ipv4Addr::from_bits(0x0b00_0000 + number).to_string(), until);
            book.set(id, ban, Timestamp::EPOCH).unwrap();
        }
        let (mut listed, mut shown, mut after) = (Vec::new(), 0, None);
        for _ in 0..1_000 {
            let mut page = Vec::new();
            book.walk(after, now, |id, _| {
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
        assert_eq!(listed, book.all(now).into_iter().map(|(id, _)| id).collect::<Vec<_>>());
    }

    /// There are at most so many: one more is refused, one in place of another is not, and what is over makes room. A ladder's
    /// ban for whose name there is no room holds, and has none.
    ///
    /// Fails without the bound in `make_room_in`, or in `name`.
    #[test]
    fn a_full_book_refuses_what_is_new_until_something_is_over() {
        const MOST: usize = 1_000;
        let book = BanList::default();
        assert_eq!(std::mem::replace(&mut book.write().most, MOST), MAX_BANS);
        let whom = |number: usize| ListEntry::User(format!("u{number}").into());
        let ban = |number: usize, until| {
            let until = Timestamp::from_secs(until);
            Ban { whom: whom(number), reason: "".into(), by: "".into(), from: Timestamp::EPOCH, until }
        };
        let id = |number: usize| Digest::from_u128(u128::try_from(number).unwrap());
        for number in 0..MOST {
            let until = if number == 7 { 20 } else { 100 };
            book.set(id(number), ban(number, until), Timestamp::EPOCH).unwrap();
            book.name(id(number), ban(number, until), Timestamp::EPOCH);
        }
        let (more, now) = (MOST, Timestamp::from_secs(10));
        assert_eq!(book.set(id(more), ban(more, 100), now), Err(TooManyBans));
        assert_eq!(book.set(id(3), ban(3, 200), now), Ok(()));
        book.name(id(more), ban(more, 100), now);
        assert_eq!((book.named(id(more)), book.all(now).len()), (None, MOST));
        // One name in place of another needs no room.
        book.name(id(3), ban(3, 200), now);
        assert_eq!(book.named(id(3)).map(|ban| ban.until), Some(Timestamp::from_secs(200)));
        let later = Timestamp::from_secs(20);
        assert_eq!(book.set(id(more), ban(more, 100), later), Ok(()));
        book.name(id(more), ban(more, 100), later);
        assert!(book.named(id(more)).is_some() && book.named(id(7)).is_none());
        assert_eq!(book.all(later).len(), MOST);
    }

    /// A scan of as many would take a million comparisons for each of these; a walk down the prefixes takes at most 32.
    #[test]
    fn among_a_hundred_thousand_blocks_the_right_one_is_found() {
        let book = BanList::default();
        for number in 0..100_000u32 {
            let net = std::net::Ipv4Addr::from_bits(0x0b00_0000 + (number << 8));
            let (id, ban) = ban(&format!("{net}/24"), 100);
            book.set(id, ban, Timestamp::EPOCH).unwrap();
        }
        for number in (0..100_000u32).step_by(997) {
            let inside = std::net::Ipv4Addr::from_bits(0x0b00_0000 + (number << 8) + 7);
            assert!(book.find(Who { ip: Some(inside.into()), ..Who::default() }, None).is_some());
        }
        let outside = Who { ip: "10.255.255.255".parse().ok(), ..Who::default() };
        assert_eq!(book.find(outside, None), None);
    }
}
