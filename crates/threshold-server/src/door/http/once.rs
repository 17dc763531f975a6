//! Requests that come with an id of their own are charged at most once in a minute: a repeat gets the first one's answer.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Mutex, MutexGuard, PoisonError};

use threshold_core::{Span, Timestamp};
use tokio::sync::watch;

use super::Answered;

/// How long an answer is remembered.
const MEMORY: Span = Span::MINUTE;
/// So that ids seldom wait for each other.
const SHARDS: usize = 16;
/// The most answers that one shard remembers: 131,072 in all, over 2,000 a second, of less than a kilobyte each.
const MAX_ANSWERS: usize = 8_192;

/// The answers of the last minute, by verb and id.
#[derive(Debug)]
pub(crate) struct Once {
    /// Random, so that nobody can prepare ids that meet in one shard.
    hasher: RandomState,
    shards: [Mutex<Shard>; SHARDS],
}

type Key = (&'static str, Box<str>);

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

impl Default for Once {
    fn default() -> Self {
        Self { hasher: RandomState::new(), shards: std::array::from_fn(|_| Mutex::default()) }
    }
}

impl Once {
    /// The answer that this id was given within the last minute, else what `decide` says. A repeat that comes while the
    /// first is being decided waits for it.
    pub(super) async fn run<E>(
        &self,
        verb: &'static str,
        id: &str,
        now: impl Fn() -> Timestamp,
        decide: impl Future<Output = Result<Answered, E>>,
    ) -> Result<Answered, E> {
        let ticket = loop {
            match self.look((verb, Box::from(id)), now()) {
                Known::Answer(answer) => return Ok(answer),
                // It ends by an error: nothing is ever sent.
                Known::UnderWay(mut over) => drop(over.changed().await),
                Known::Nothing(ticket) => break ticket,
            }
        };
        let answer = decide.await?;
        // Who was denied is to be decided anew.
        if answer.charged {
            self.shard(&ticket.key).remember(ticket.key.clone(), answer.clone(), now());
        }
        Ok(answer)
    }

    fn look(&self, key: Key, now: Timestamp) -> Known<'_> {
        let mut shard = self.shard(&key);
        if let Some(known) = shard.answers.get(&key).filter(|known| now < known.at.plus(MEMORY)) {
            return Known::Answer(known.answer.clone());
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
        let shard = self.shards.get(number).expect("four bits number sixteen shards");
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.once.shard(&self.key).under_way.remove(&self.key);
    }
}

impl Shard {
    fn remember(&mut self, key: Key, answer: Answered, now: Timestamp) {
        let over = |at: &Timestamp| now >= at.plus(MEMORY);
        while self.order.len() >= MAX_ANSWERS || self.order.front().is_some_and(|(at, _)| over(at)) {
            let Some((at, old)) = self.order.pop_front() else { break };
            // The id may have been remembered again since.
            if self.answers.get(&old).is_some_and(|known| known.at == at) {
                self.answers.remove(&old);
            }
        }
        self.order.push_back((now, key.clone()));
        self.answers.insert(key, Remembered { at: now, answer });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    fn answered(body: &'static str, charged: bool) -> Answered {
        Answered { body: Bytes::from_static(body.as_bytes()), charged, closed: false, generation: 1 }
    }

    fn run(once: &Once, verb: &'static str, id: &str, second: u64, answer: Answered) -> Bytes {
        let now = || Timestamp::from_secs(second);
        let mut running = pin!(once.run::<()>(verb, id, now, async { Ok(answer) }));
        match running.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(answer) => answer.unwrap().body,
            Poll::Pending => panic!("nobody else is asking"),
        }
    }

    fn ask(once: &Once, id: &str, second: u64, body: &'static str, charged: bool) -> Bytes {
        run(once, "check", id, second, answered(body, charged))
    }

    #[test]
    fn a_repeat_within_a_minute_gets_the_first_answer() {
        let once = Once::default();
        assert_eq!(ask(&once, "a", 0, "first", true), "first");
        assert_eq!(ask(&once, "a", 59, "second", true), "first");
        assert_eq!(ask(&once, "b", 59, "other", true), "other");
        assert_eq!(ask(&once, "a", 60, "third", true), "third");
        assert_eq!(ask(&once, "a", 119, "fourth", true), "third");
    }

    #[test]
    fn what_was_not_charged_is_decided_anew() {
        let once = Once::default();
        assert_eq!(ask(&once, "a", 0, "denied", false), "denied");
        assert_eq!(ask(&once, "a", 1, "allowed", true), "allowed");
        assert_eq!(ask(&once, "a", 2, "again", true), "allowed");
    }

    #[test]
    fn a_verb_is_not_another() {
        let once = Once::default();
        ask(&once, "a", 0, "checked", true);
        assert_eq!(run(&once, "record", "a", 1, answered("recorded", true)), "recorded");
    }

    /// The second waits for the first; the first is given up, and the second decides; the third waits for that.
    #[tokio::test]
    async fn a_repeat_waits_for_the_first_and_takes_over_where_it_leaves() {
        let once = Once::default();
        let now = || Timestamp::from_secs(1);
        let mut first = Box::pin(once.run::<()>("check", "a", now, std::future::pending()));
        let mut second = pin!(once.run::<()>("check", "a", now, async { Ok(answered("second", true)) }));
        let mut third = pin!(once.run::<()>("check", "a", now, async { Ok(answered("third", true)) }));
        let mut context = Context::from_waker(Waker::noop());
        assert!(first.as_mut().poll(&mut context).is_pending());
        assert!(second.as_mut().poll(&mut context).is_pending());
        assert!(third.as_mut().poll(&mut context).is_pending());
        drop(first);
        assert_eq!(second.await.unwrap().body, "second");
        assert_eq!(third.await.unwrap().body, "second");
        assert!(once.shards.iter().all(|shard| shard.lock().unwrap().under_way.is_empty()));
    }

    #[test]
    fn memory_has_a_bound_and_the_oldest_go_first() {
        let once = Once::default();
        for number in 0..2 * SHARDS * MAX_ANSWERS {
            ask(&once, &number.to_string(), 1, "x", true);
        }
        for shard in &once.shards {
            let shard = shard.lock().unwrap();
            assert!(shard.answers.len() <= MAX_ANSWERS && shard.order.len() <= MAX_ANSWERS);
        }
        assert_eq!(ask(&once, "0", 2, "forgotten", true), "forgotten");
        let last = (2 * SHARDS * MAX_ANSWERS - 1).to_string();
        assert_eq!(ask(&once, &last, 2, "new", true), "x");
        // Whoever has outlived the minute is gone with the next that comes.
        ask(&once, "late", 100, "x", true);
        let kept: usize = once.shards.iter().map(|shard| shard.lock().unwrap().answers.len()).sum();
        assert!(kept <= SHARDS * MAX_ANSWERS - MAX_ANSWERS / 2, "{kept}");
    }
}
