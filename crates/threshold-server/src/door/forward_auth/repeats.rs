//! Questions that a proxy repeats for one request are answered as the first time, and charged once.
//!
//! nginx asks again after each internal redirect (`index`, `try_files`, `error_page`). It names the request by an id that
//! stays the same. What is repeated must be the same question word for word, so that an id that a client got past its proxy
//! opens nothing else, and only as often as nginx redirects.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher as _, Hash, Hasher as _, RandomState};
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue};
use threshold_core::{Span, Timestamp};

use super::original::single;
use crate::door::ApiError;

/// Where a proxy names the request it asks for.
const ID: HeaderName = HeaderName::from_static("x-threshold-request-id");
/// The longest id. nginx's `$request_id` has 32 characters.
const MAX_ID: usize = 64;
/// How long an answer is remembered, as with the API's `requestId`.
const MEMORY: Span = Span::MINUTE;
/// How often an answer is given again. nginx follows ten internal redirects and answers 500 to the next.
const MAX_REPEATS: u8 = 10;
/// So that requests seldom wait for each other.
const SHARDS: usize = 16;
/// The most memory of one shard, in bytes: 16 MiB in all, some 16,000 answers. Redirects follow within milliseconds.
const MAX_BYTES: usize = 1 << 20;
/// What an answer takes besides the text of its fields: its place in the map and in the order.
const OVERHEAD: usize = 192;
/// The most places in the order of one shard: a question that is answered again has several.
const MAX_ORDER: usize = MAX_BYTES / OVERHEAD;
/// What a field takes besides its text.
const FIELD: usize = 96;

/// The answers of the last minute to requests that may cross.
#[derive(Debug)]
pub(super) struct Repeats {
    /// Two random keys: nobody can prepare questions that are taken for each other.
    hashers: [RandomState; 2],
    shards: [Mutex<Shard>; SHARDS],
}

/// A keyed digest of everything that a proxy has asked under one id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Question([u64; 2]);

#[derive(Debug, Default)]
struct Shard {
    answers: HashMap<Question, Answer>,
    /// Who was remembered when, oldest first.
    order: VecDeque<(Timestamp, Question)>,
    bytes: usize,
}

#[derive(Debug)]
struct Answer {
    at: Timestamp,
    repeats: u8,
    fields: Box<[(HeaderName, HeaderValue)]>,
}

impl Default for Repeats {
    fn default() -> Self {
        let hashers = [RandomState::new(), RandomState::new()];
        Self { hashers, shards: std::array::from_fn(|_| Mutex::default()) }
    }
}

impl Repeats {
    /// The question that a trusted proxy asks, if it names the request.
    pub(super) fn question(&self, peer: IpAddr, parts: &Parts, length: u64) -> Result<Option<Question>, ApiError> {
        let Some(id) = single(&parts.headers, &ID)? else { return Ok(None) };
        if id.len() > MAX_ID || !id.as_bytes().iter().all(u8::is_ascii_graphic) {
            return Err(ApiError::bad(ID.as_str(), "an id has at most 64 visible characters"));
        }
        let digest = |hasher: &RandomState| {
            let mut state = hasher.build_hasher();
            (peer, parts.method.as_str(), parts.uri.path(), parts.uri.query(), length).hash(&mut state);
            // The id is one of them.
            for (name, value) in &parts.headers {
                (name.as_str(), value.as_bytes()).hash(&mut state);
            }
            state.finish()
        };
        Ok(Some(Question(self.hashers.each_ref().map(digest))))
    }

    /// The fields that this question was answered with within the last minute.
    pub(super) fn find(&self, question: Question, now: Timestamp) -> Option<HeaderMap> {
        let mut shard = self.shard(question);
        let answer = shard.answers.get_mut(&question).filter(|answer| now < answer.at.plus(MEMORY))?;
        answer.repeats = answer.repeats.checked_add(1).filter(|repeats| *repeats <= MAX_REPEATS)?;
        Some(answer.fields.iter().cloned().collect())
    }

    /// Remembers the fields of an answer to a request that may cross.
    pub(super) fn remember(&self, question: Question, now: Timestamp, headers: &HeaderMap) {
        let fields = headers.iter().map(|(name, value)| (name.clone(), value.clone())).collect();
        self.shard(question).remember(question, Answer { at: now, repeats: 0, fields });
    }

    fn shard(&self, question: Question) -> MutexGuard<'_, Shard> {
        let Question([first, _]) = question;
        // The four highest bits: there are sixteen of them.
        let number = usize::try_from(first >> 60).unwrap_or(0);
        let shard = self.shards.get(number).expect("four bits number sixteen shards");
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shard {
    fn remember(&mut self, question: Question, answer: Answer) {
        let now = answer.at;
        self.bytes = self.bytes.saturating_add(answer.bytes());
        self.order.push_back((now, question));
        if let Some(old) = self.answers.insert(question, answer) {
            self.bytes = self.bytes.saturating_sub(old.bytes());
        }
        let over = |at: Timestamp| now >= at.plus(MEMORY);
        while self.bytes > MAX_BYTES
            || self.order.len() > MAX_ORDER
            || self.order.front().is_some_and(|(at, _)| over(*at))
        {
            let Some((at, old)) = self.order.pop_front() else { break };
            // The question may have been answered again since.
            if self.answers.get(&old).is_some_and(|answer| answer.at == at)
                && let Some(old) = self.answers.remove(&old)
            {
                self.bytes = self.bytes.saturating_sub(old.bytes());
            }
        }
    }
}

impl Answer {
    fn bytes(&self) -> usize {
        let text = |(name, value): &(HeaderName, HeaderValue)| {
            FIELD.saturating_add(name.as_str().len()).saturating_add(value.len())
        };
        self.fields.iter().map(text).fold(OVERHEAD, usize::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(id: &str, uri: &str, more: &[(&'static str, &str)]) -> Parts {
        let mut request = http::Request::get(uri).header(ID, id).header("x-forwarded-for", "203.0.113.7");
        for (name, value) in more {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    fn peer() -> IpAddr {
        IpAddr::from([127, 0, 0, 1])
    }

    fn question(repeats: &Repeats, id: &str, uri: &str) -> Question {
        repeats.question(peer(), &parts(id, uri, &[]), 0).unwrap().unwrap()
    }

    fn fields(remaining: &'static str) -> HeaderMap {
        [(HeaderName::from_static("x-ratelimit-remaining"), HeaderValue::from_static(remaining))].into_iter().collect()
    }

    #[test]
    fn the_same_question_gets_the_same_answer_for_a_minute() {
        let repeats = Repeats::default();
        let at = Timestamp::from_secs;
        let asked = question(&repeats, "a", "/x");
        assert_eq!(repeats.find(asked, at(0)), None);
        repeats.remember(asked, at(0), &fields("2"));
        assert_eq!(repeats.find(question(&repeats, "a", "/x"), at(59)), Some(fields("2")));
        assert_eq!(repeats.find(question(&repeats, "a", "/x"), at(60)), None);
    }

    #[test]
    fn a_question_is_the_same_only_word_for_word() {
        let repeats = Repeats::default();
        let asked = |peer: [u8; 4], parts: Parts, length| repeats.question(IpAddr::from(peer), &parts, length).unwrap();
        let first = asked([127, 0, 0, 1], parts("a", "/x", &[]), 0);
        assert_eq!(asked([127, 0, 0, 1], parts("a", "/x", &[]), 0), first);
        let mut post = parts("a", "/x", &[]);
        post.method = http::Method::POST;
        let others = [
            asked([127, 0, 0, 2], parts("a", "/x", &[]), 0),
            asked([127, 0, 0, 1], parts("b", "/x", &[]), 0),
            asked([127, 0, 0, 1], parts("a", "/y", &[]), 0),
            asked([127, 0, 0, 1], parts("a", "/x?y", &[]), 0),
            asked([127, 0, 0, 1], parts("a", "/x", &[("x-user", "u1")]), 0),
            asked([127, 0, 0, 1], parts("a", "/x", &[]), 1),
            asked([127, 0, 0, 1], post, 0),
        ];
        for (number, other) in others.into_iter().enumerate() {
            assert!(other.is_some() && other != first, "{number}");
        }
    }

    #[test]
    fn an_id_is_one_short_line_or_none() {
        let repeats = Repeats::default();
        let asked = |parts: Parts| repeats.question(peer(), &parts, 0).map_err(|error| error.status.as_u16());
        assert_eq!(asked(parts("", "/", &[])), Ok(None));
        assert!(matches!(asked(parts(&"x".repeat(64), "/", &[])), Ok(Some(_))));
        assert_eq!(asked(parts(&"x".repeat(65), "/", &[])), Err(400));
        assert_eq!(asked(parts("a b", "/", &[])), Err(400));
        assert_eq!(asked(parts("a", "/", &[("x-threshold-request-id", "b")])), Err(400));
    }

    /// As often as nginx redirects one request, and no oftener: an id that a client chose would else be free for a minute.
    #[test]
    fn an_answer_is_given_again_ten_times() {
        let repeats = Repeats::default();
        let now = Timestamp::from_secs(1);
        let asked = question(&repeats, "a", "/x");
        repeats.remember(asked, now, &fields("2"));
        for _ in 0..MAX_REPEATS {
            assert_eq!(repeats.find(asked, now), Some(fields("2")));
        }
        assert_eq!((repeats.find(asked, now), repeats.find(asked, now)), (None, None));
        repeats.remember(asked, now, &fields("1"));
        assert_eq!(repeats.find(asked, now), Some(fields("1")));
    }

    #[test]
    fn memory_has_a_bound_in_bytes_and_the_oldest_go_first() {
        let repeats = Repeats::default();
        let asked: Vec<Question> = (0..40_000).map(|id| question(&repeats, &id.to_string(), "/")).collect();
        for question in &asked {
            // Again, as after an answer that was given too often: it must not count twice.
            repeats.remember(*question, Timestamp::from_secs(1), &fields("2"));
            repeats.remember(*question, Timestamp::from_secs(1), &fields("2"));
        }
        let mut kept = 0;
        for shard in &repeats.shards {
            let shard = shard.lock().unwrap();
            assert!(shard.bytes <= MAX_BYTES && shard.order.len() <= MAX_ORDER);
            assert_eq!(shard.bytes, shard.answers.values().map(Answer::bytes).sum::<usize>());
            kept += shard.answers.len();
        }
        assert!(kept > 20_000, "{kept}");
        // Whoever has outlived the minute is gone with the next that comes.
        for question in &asked {
            repeats.remember(*question, Timestamp::from_secs(100), &fields("2"));
        }
        let late = repeats.shards.iter().flat_map(|shard| {
            let shard = shard.lock().unwrap();
            shard.order.iter().map(|(at, _)| *at).collect::<Vec<_>>()
        });
        assert!(late.into_iter().all(|at| at == Timestamp::from_secs(100)));
    }
}
