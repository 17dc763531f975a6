//! Requests that come with an id of their own are charged at most once in a minute: a repeat gets the first one's answer.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Mutex, MutexGuard, PoisonError};

use threshold_core::{Span, Timestamp};

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

#[derive(Debug, Default)]
struct Shard {
    answers: HashMap<(&'static str, Box<str>), Remembered>,
    /// Who was remembered when, oldest first.
    order: VecDeque<(Timestamp, (&'static str, Box<str>))>,
}

#[derive(Debug)]
struct Remembered {
    at: Timestamp,
    answer: Answered,
}

impl Default for Once {
    fn default() -> Self {
        Self { hasher: RandomState::new(), shards: std::array::from_fn(|_| Mutex::default()) }
    }
}

impl Once {
    /// The answer that this id was given within the last minute, else what `decide` says now.
    ///
    /// A repeat that comes while the first is being decided waits for it: deciding happens under the shard's lock.
    pub(super) fn run<E>(
        &self,
        verb: &'static str,
        id: &str,
        now: Timestamp,
        decide: impl FnOnce() -> Result<Answered, E>,
    ) -> Result<Answered, E> {
        let mut shard = self.shard(id);
        let key = (verb, Box::from(id));
        if let Some(known) = shard.answers.get(&key).filter(|known| now < known.at.plus(MEMORY)) {
            return Ok(known.answer.clone());
        }
        let answer = decide()?;
        // Who was denied is to be decided anew.
        if answer.charged {
            shard.remember(key, answer.clone(), now);
        }
        Ok(answer)
    }

    #[expect(clippy::indexing_slicing, reason = "the remainder of the number of shards is a shard")]
    #[expect(clippy::cast_possible_truncation, reason = "the remainder is below the number of shards")]
    fn shard(&self, id: &str) -> MutexGuard<'_, Shard> {
        let number = self.hasher.hash_one(id) % SHARDS as u64;
        self.shards[number as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shard {
    fn remember(&mut self, key: (&'static str, Box<str>), answer: Answered, now: Timestamp) {
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

    fn answered(body: &'static str, charged: bool) -> Answered {
        Answered { body: Bytes::from_static(body.as_bytes()), charged, closed: false, generation: 1 }
    }

    fn ask(once: &Once, id: &str, second: u64, body: &'static str, charged: bool) -> Bytes {
        once.run::<()>("check", id, Timestamp::from_secs(second), || Ok(answered(body, charged))).unwrap().body
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
        let recorded = once.run::<()>("record", "a", Timestamp::from_secs(1), || Ok(answered("recorded", true)));
        assert_eq!(recorded.unwrap().body, "recorded");
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
