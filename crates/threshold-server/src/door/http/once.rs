//! Requests that come with an id of their own are charged at most once in a minute: a repeat gets the first one's answer.
//!
//! The bytes of all answers have a bound. Room for an answer is taken before its request is decided, and where there is
//! none, the request is refused and charges nothing: forgetting another answer before its time would charge somebody twice
//! who was promised the opposite.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use http::StatusCode;
use threshold_core::{Span, Timestamp};
use tokio::sync::watch;

use super::Answered;
use crate::door::ApiError;

/// How long an answer is remembered.
const MEMORY: Span = Span::MINUTE;
/// So that ids seldom wait for each other.
const SHARDS: usize = 16;
/// The room that is taken for an answer while it is not there yet: most take less, also under many rules.
const EXPECTED: usize = 4_096;
/// What an answer takes beside its own bytes and those of its id: its places in the map and in the queue, and what the
/// allocator adds to four allocations.
const OVERHEAD: usize = 384;
/// An answer that is forgotten sooner than this may be gone before the list is decided that it is in.
const SOON: Span = Span::from_secs(10);

/// The answers of the last minute, by verb and id.
#[derive(Debug)]
pub(crate) struct Once {
    /// Random, so that nobody can prepare ids that meet in one shard.
    hasher: RandomState,
    shards: [Mutex<Shard>; SHARDS],
    /// The most bytes of answers, of those that are there and those under way.
    most: usize,
    used: AtomicUsize,
}

/// There is no room to remember another answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NoRoom;

/// Room for answers that are not there yet; what is left of it is given back.
#[derive(Debug)]
pub(super) struct Room<'o> {
    once: &'o Once,
    bytes: usize,
}

type Key = (&'static str, Arc<str>);

#[derive(Debug, Default)]
struct Shard {
    answers: HashMap<Key, Remembered>,
    /// Who was remembered when, oldest first.
    order: VecDeque<(Timestamp, Key)>,
    /// Who is being decided; whoever listens is told when that is over. Bounded by the requests under way.
    under_way: HashMap<Key, watch::Receiver<()>>,
}

#[derive(Debug)]
struct Remembered {
    at: Timestamp,
    answer: Answered,
    /// What it takes in all.
    bytes: usize,
}

/// What is known of an id.
enum Known<'o> {
    /// Its answer.
    Answer(Answered),
    /// It is being decided by another.
    UnderWay(watch::Receiver<()>),
    /// Nothing: it is this one's to decide.
    Nothing(Ticket<'o>),
}

/// The right to decide on an id. Dropped, whoever came after has it.
struct Ticket<'o> {
    once: &'o Once,
    key: Key,
    _over: watch::Sender<()>,
}

impl From<NoRoom> for ApiError {
    fn from(_: NoRoom) -> Self {
        let message = "there is no room to remember another requestId; nothing was charged: try again later, or send the \
                       request without an id";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "too_many_request_ids", message).about(Some("requestId".to_owned()))
    }
}

impl Once {
    pub(crate) fn new(most: usize) -> Self {
        let shards = std::array::from_fn(|_| Mutex::default());
        Self { hasher: RandomState::new(), shards, most, used: AtomicUsize::new(0) }
    }

    /// The answer that this id was given within the last minute, else what `decide` says. A repeat that comes while the
    /// first is being decided waits for it. `room` is used up first, where there is any.
    pub(super) async fn run<E: From<NoRoom>>(
        &self,
        verb: &'static str,
        id: &str,
        now: impl Fn() -> Timestamp,
        room: Option<&mut Room<'_>>,
        decide: impl Future<Output = Result<Answered, E>>,
    ) -> Result<Answered, E> {
        let ticket = loop {
            match self.look((verb, Arc::from(id)), now()) {
                Known::Answer(answer) => return Ok(answer),
                // It ends by an error: nothing is ever sent.
                Known::UnderWay(mut over) => drop(over.changed().await),
                Known::Nothing(ticket) => break ticket,
            }
        };
        let room = match room.and_then(Room::split) {
            Some(room) => room,
            None => self.room(1, now())?,
        };
        let answer = decide.await?;
        // Who was denied is to be decided anew.
        if answer.charged {
            self.remember(&ticket.key, &answer, room, now());
        }
        Ok(answer)
    }

    /// Room for the answers to those of a list whose ids are not known: it is decided as a whole, or not at all.
    pub(super) fn room_for<'i>(
        &self,
        verb: &'static str,
        ids: impl Iterator<Item = &'i str>,
        now: Timestamp,
    ) -> Result<Room<'_>, NoRoom> {
        let lasts = |id: &str| {
            let key = (verb, Arc::from(id));
            self.shard(&key).answer(&key, now.plus(SOON)).is_some()
        };
        self.room(ids.filter(|id| !lasts(id)).count(), now)
    }

    fn room(&self, answers: usize, now: Timestamp) -> Result<Room<'_>, NoRoom> {
        let bytes = answers.saturating_mul(EXPECTED);
        if !self.take(bytes) {
            // Those whose minute is over are mostly forgotten when another is remembered.
            let gone = self.shards.iter().map(|shard| lock(shard).sweep(now)).fold(0, usize::saturating_add);
            self.give_back(gone);
            if !self.take(bytes) {
                return Err(NoRoom);
            }
        }
        Ok(Room { once: self, bytes })
    }

    fn take(&self, bytes: usize) -> bool {
        let fits = |used: usize| used.checked_add(bytes).filter(|used| *used <= self.most);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok()
    }

    fn give_back(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn remember(&self, key: &Key, answer: &Answered, mut room: Room<'_>, now: Timestamp) {
        // A copy, since what was written has room for more than it holds.
        let answer = Answered { body: Bytes::copy_from_slice(&answer.body), ..answer.clone() };
        let bytes = answer.body.len().saturating_add(key.1.len()).saturating_add(OVERHEAD);
        // Few take more than they were expected to. Those are kept too: they were charged.
        self.used.fetch_add(bytes, Ordering::Relaxed);
        self.give_back(std::mem::take(&mut room.bytes));
        let mut shard = self.shard(key);
        let gone = shard.sweep(now);
        let before = shard.insert(key.clone(), Remembered { at: now, answer, bytes });
        drop(shard);
        self.give_back(gone.saturating_add(before));
    }

    fn look(&self, key: Key, now: Timestamp) -> Known<'_> {
        let mut shard = self.shard(&key);
        if let Some(answer) = shard.answer(&key, now) {
            return Known::Answer(answer.clone());
        }
        if let Some(over) = shard.under_way.get(&key) {
            return Known::UnderWay(over.clone());
        }
        let (sender, over) = watch::channel(());
        shard.under_way.insert(key.clone(), over);
        Known::Nothing(Ticket { once: self, key, _over: sender })
    }

    fn shard(&self, key: &Key) -> MutexGuard<'_, Shard> {
        // The four highest bits: there are sixteen of them.
        let number = usize::try_from(self.hasher.hash_one(key) >> 60).unwrap_or(0);
        lock(self.shards.get(number).expect("four bits number sixteen shards"))
    }
}

impl Room<'_> {
    /// Room for one answer out of this.
    fn split(&mut self) -> Option<Self> {
        self.bytes = self.bytes.checked_sub(EXPECTED)?;
        Some(Self { once: self.once, bytes: EXPECTED })
    }
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        self.once.give_back(self.bytes);
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.once.shard(&self.key).under_way.remove(&self.key);
    }
}

impl Shard {
    /// The answer that was given to this id, if it is remembered at `now`.
    fn answer(&self, key: &Key, now: Timestamp) -> Option<&Answered> {
        self.answers.get(key).filter(|known| now < known.at.plus(MEMORY)).map(|known| &known.answer)
    }

    /// Remembers an answer; says how many bytes another one took in its place.
    fn insert(&mut self, key: Key, remembered: Remembered) -> usize {
        self.order.push_back((remembered.at, key.clone()));
        self.answers.insert(key, remembered).map_or(0, |before| before.bytes)
    }

    /// Forgets those whose minute is over; says how many bytes they took.
    fn sweep(&mut self, now: Timestamp) -> usize {
        let mut gone = 0usize;
        while self.order.front().is_some_and(|(at, _)| now >= at.plus(MEMORY)) {
            let Some((at, old)) = self.order.pop_front() else { break };
            // The id may have been remembered again since.
            if self.answers.get(&old).is_some_and(|known| known.at == at) {
                gone = gone.saturating_add(self.answers.remove(&old).map_or(0, |old| old.bytes));
            }
        }
        gone
    }
}

fn lock(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    fn answered(body: &'static str, charged: bool) -> Answered {
        Answered { body: Bytes::from_static(body.as_bytes()), charged, closed: false, generation: 1 }
    }

    fn run(once: &Once, verb: &'static str, id: &str, second: u64, answer: Answered) -> Bytes {
        try_run(once, verb, id, second, answer).unwrap()
    }

    fn try_run(once: &Once, verb: &'static str, id: &str, second: u64, answer: Answered) -> Result<Bytes, NoRoom> {
        let now = || Timestamp::from_secs(second);
        let mut running = pin!(once.run::<NoRoom>(verb, id, now, None, async { Ok(answer) }));
        match running.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(answer) => answer.map(|answer| answer.body),
            Poll::Pending => panic!("nobody else is asking"),
        }
    }

    fn used(once: &Once) -> usize {
        once.used.load(Ordering::Relaxed)
    }

    /// What is remembered, counted by hand.
    fn counted(once: &Once) -> usize {
        let of = |shard: &Mutex<Shard>| shard.lock().unwrap().answers.values().map(|known| known.bytes).sum::<usize>();
        once.shards.iter().map(of).sum()
    }

    const MIB: usize = 1 << 20;

    fn ask(once: &Once, id: &str, second: u64, body: &'static str, charged: bool) -> Bytes {
        run(once, "check", id, second, answered(body, charged))
    }

    #[test]
    fn a_repeat_within_a_minute_gets_the_first_answer() {
        let once = Once::new(MIB);
        assert_eq!(ask(&once, "a", 0, "first", true), "first");
        assert_eq!(ask(&once, "a", 59, "second", true), "first");
        assert_eq!(ask(&once, "b", 59, "other", true), "other");
        assert_eq!(ask(&once, "a", 60, "third", true), "third");
        assert_eq!(ask(&once, "a", 119, "fourth", true), "third");
    }

    #[test]
    fn what_was_not_charged_is_decided_anew() {
        let once = Once::new(MIB);
        assert_eq!(ask(&once, "a", 0, "denied", false), "denied");
        assert_eq!(ask(&once, "a", 1, "allowed", true), "allowed");
        assert_eq!(ask(&once, "a", 2, "again", true), "allowed");
    }

    #[test]
    fn a_verb_is_not_another() {
        let once = Once::new(MIB);
        ask(&once, "a", 0, "checked", true);
        assert_eq!(run(&once, "record", "a", 1, answered("recorded", true)), "recorded");
    }

    /// The second waits for the first; the first is given up, and the second decides; the third waits for that.
    #[tokio::test]
    async fn a_repeat_waits_for_the_first_and_takes_over_where_it_leaves() {
        let once = Once::new(MIB);
        let now = || Timestamp::from_secs(1);
        let mut first = Box::pin(once.run::<NoRoom>("check", "a", now, None, std::future::pending()));
        let mut second = pin!(once.run::<NoRoom>("check", "a", now, None, async { Ok(answered("second", true)) }));
        let mut third = pin!(once.run::<NoRoom>("check", "a", now, None, async { Ok(answered("third", true)) }));
        let mut context = Context::from_waker(Waker::noop());
        assert!(first.as_mut().poll(&mut context).is_pending());
        assert!(second.as_mut().poll(&mut context).is_pending());
        assert!(third.as_mut().poll(&mut context).is_pending());
        drop(first);
        assert_eq!(second.await.unwrap().body, "second");
        assert_eq!(third.await.unwrap().body, "second");
        assert!(once.shards.iter().all(|shard| shard.lock().unwrap().under_way.is_empty()));
    }

    /// Large answers are fewer. None is forgotten before its minute is over: who comes when it is full is refused, decides
    /// nothing, and finds room again later.
    ///
    /// Woken by: leaving out `take` in `room`; `sweep` there; `give_back` of what was swept or replaced; and by copying
    /// nothing in `remember`, so that an answer keeps what it was written into.
    #[test]
    fn memory_has_a_bound_in_bytes_and_nothing_is_forgotten_before_its_time() {
        let mut remembered = [0, 0];
        for (size, remembered) in [100, 10_000].into_iter().zip(&mut remembered) {
            let once = Once::new(MIB);
            let large = || {
                let mut body = Vec::with_capacity(10 * size);
                body.resize(size, b'x');
                Answered { body: body.into(), ..answered("", true) }
            };
            for number in 0..100_000 {
                let id = number.to_string();
                if try_run(&once, "check", &id, 1, large()).is_err() {
                    *remembered = number;
                    break;
                }
                assert!(used(&once) <= MIB + size);
            }
            assert_eq!(used(&once), counted(&once));
            for number in 0..*remembered {
                assert_eq!(ask(&once, &number.to_string(), 60, "again", true).len(), size);
            }
            // The one that was refused was not decided, and is decided when there is room.
            let refused = remembered.to_string();
            assert_eq!(try_run(&once, "check", &refused, 60, large()), Err(NoRoom));
            assert_eq!(try_run(&once, "check", &refused, 61, answered("late", true)).unwrap(), "late");
            assert_eq!((counted(&once), used(&once)), (4 + refused.len() + OVERHEAD, counted(&once)));
        }
        let [small, large] = remembered;
        assert!(small > 15 * large && large > 90, "{small} small ones, {large} large ones");
    }

    /// Whatever becomes of a request, the room for its answer is given back or used.
    #[tokio::test]
    async fn room_is_given_back_where_nothing_is_remembered() {
        let once = Once::new(MIB);
        let now = || Timestamp::from_secs(1);
        ask(&once, "denied", 1, "denied", false);
        let failed = once.run::<NoRoom>("check", "failed", now, None, async { Err(NoRoom) }).await;
        assert_eq!((failed.err(), used(&once)), (Some(NoRoom), 0));
        let mut given_up = Box::pin(once.run::<NoRoom>("check", "left", now, None, std::future::pending()));
        assert!(given_up.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        assert_eq!(used(&once), EXPECTED);
        drop(given_up);
        assert_eq!(used(&once), 0);
    }

    /// A list has room for all of its answers before any of it is charged, and needs none for those that are known.
    ///
    /// Woken by: leaving out the `filter` or `SOON` in `room_for`; and by leaving out `split` in `run`.
    #[tokio::test]
    async fn a_list_has_room_for_all_of_its_answers_or_for_none() {
        let once = Once::new(3 * EXPECTED);
        let at = Timestamp::from_secs;
        assert_eq!(once.room_for("check", ["a", "b", "c", "d"].into_iter(), at(1)).err(), Some(NoRoom));
        let mut room = once.room_for("check", ["a", "b", "c"].into_iter(), at(1)).unwrap();
        assert_eq!(try_run(&once, "check", "other", 1, answered("x", true)), Err(NoRoom));
        for id in ["a", "b", "c"] {
            let decide = async { Ok(answered("x", true)) };
            once.run::<NoRoom>("check", id, || at(1), Some(&mut room), decide).await.unwrap();
        }
        drop(room);
        assert_eq!(used(&once), counted(&once));
        // A repeat of the list needs no room, unless its answers are about to be forgotten.
        let full = once.room_for("record", ["d", "e"].into_iter(), at(1)).unwrap();
        assert!(once.room_for("check", ["a", "b", "c"].into_iter(), at(50)).is_ok());
        assert!(once.room_for("check", ["a", "b", "c"].into_iter(), at(51)).is_err());
        drop(full);
    }
}
