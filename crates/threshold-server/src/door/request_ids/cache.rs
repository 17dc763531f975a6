//! The answers of this node, in shards and within one bound in bytes that the API and forward auth share.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use threshold_core::{Digest, Timestamp};
use tokio::sync::watch;

use super::{EncodedAnswer, RequestIdError, RequestKey};
use crate::desk::ANSWER_LIFETIME;

/// The number of shards, each with its own lock. `shard` selects one by four bits.
const SHARDS: usize = 16;
/// The bytes that are reserved for an answer before it is written: most are smaller, also under many rules.
pub(super) const EXPECTED_ANSWER: usize = 4_096;
/// The bytes of an entry besides its answer: its slots in the map and in the queue, which may be half empty, and what the
/// allocator adds.
pub(super) const OVERHEAD: usize = 384;
/// The bytes of a header field besides its text.
const FIELD_OVERHEAD: usize = 96;
/// One part in this many is left to proxies; the API may use the rest.
pub(super) const PROXY_SHARE: usize = 8;
/// How often a proxy gets the same answer again. nginx follows at most ten internal redirects.
pub(super) const MAX_REPEATS: u8 = 10;

/// The remembered answers.
#[derive(Debug)]
pub(super) struct AnswerCache {
    pub(super) shards: [Mutex<Shard>; SHARDS],
    max_bytes: usize,
    /// The bytes of the API's answers, remembered and reserved.
    pub(super) api_bytes: AtomicUsize,
    /// The bytes of the answers to proxies.
    pub(super) proxy_bytes: AtomicUsize,
    /// The shard that is evicted from next.
    next: AtomicUsize,
}

/// What is known about an id.
pub(super) enum Lookup<'c> {
    Answered(EncodedAnswer),
    /// It is being decided; the receiver is closed when that is done.
    InProgress(watch::Receiver<()>),
    /// It was used, or is being used, for a different request.
    Reused,
    /// It is new. The caller has to decide it, and holds the lock until then.
    Unknown(IdLock<'c>),
}

/// The right to decide an id. Dropping it wakes those who wait for it.
pub(super) struct IdLock<'c> {
    cache: &'c AnswerCache,
    key: RequestKey,
    _done: watch::Sender<()>,
}

/// Bytes of answers that are not written yet. What is left of them is released when this is dropped.
#[derive(Debug)]
pub(super) struct Reservation<'c> {
    cache: &'c AnswerCache,
    bytes: usize,
}

#[derive(Debug, Default)]
pub(super) struct Shard {
    pub(super) answers: HashMap<Digest, CachedAnswer>,
    /// When the API's answers were remembered, oldest first.
    api_order: VecDeque<(Timestamp, Digest)>,
    /// When the answers to proxies were remembered, oldest first.
    pub(super) proxy_order: VecDeque<(Timestamp, Digest)>,
    /// The ids that are being decided, with the digest of their content. Bounded by the number of connections.
    pub(super) in_progress: HashMap<Digest, (Digest, watch::Receiver<()>)>,
}

#[derive(Debug)]
pub(super) struct CachedAnswer {
    at: Timestamp,
    content: Digest,
    answer: Answer,
    /// The bytes of the whole entry.
    bytes: usize,
}

#[derive(Debug)]
enum Answer {
    Api(EncodedAnswer),
    Proxy { fields: Box<[(HeaderName, HeaderValue)]>, repeats: u8 },
}

/// Bytes by the door whose answers they are of.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct DoorBytes {
    pub(super) api: usize,
    pub(super) proxy: usize,
}

impl AnswerCache {
    pub(super) fn new(max_bytes: usize) -> Self {
        Self {
            shards: std::array::from_fn(|_| Mutex::default()),
            max_bytes,
            api_bytes: AtomicUsize::new(0),
            proxy_bytes: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
        }
    }

    /// Looks an id up, and locks it if it is unknown.
    pub(super) fn look_up(&self, key: RequestKey, now: Timestamp) -> Lookup<'_> {
        let mut shard = self.shard(key.id);
        // First of all: the answer to another request must never be returned.
        if shard.is_reused(key, now) {
            return Lookup::Reused;
        }
        if let Some(answer) = shard.answer(key.id, now) {
            return Lookup::Answered(answer.clone());
        }
        if let Some((_, done)) = shard.in_progress.get(&key.id) {
            return Lookup::InProgress(done.clone());
        }
        // Under the same lock as the lookup, or two repeats at once could both find the id unknown.
        let (sender, done) = watch::channel(());
        shard.in_progress.insert(key.id, (key.content, done));
        Lookup::Unknown(IdLock { cache: self, key, _done: sender })
    }

    /// Whether the API's answer to this id is remembered at `now`.
    pub(super) fn is_answered(&self, id: Digest, now: Timestamp) -> bool {
        self.shard(id).answer(id, now).is_some()
    }

    /// Whether this id was answered, or is being decided, for a different request.
    pub(super) fn is_reused(&self, key: RequestKey, now: Timestamp) -> bool {
        self.shard(key.id).is_reused(key, now)
    }

    /// Reserves bytes for this many answers of the API, at the cost of answers to proxies.
    pub(super) fn reserve(&self, answers: usize, now: Timestamp) -> Result<Reservation<'_>, RequestIdError> {
        let bytes = answers.saturating_mul(EXPECTED_ANSWER);
        if !self.try_reserve(bytes) {
            // A shard drops expired answers when another is inserted, which may be long ago.
            for shard in &self.shards {
                let freed = lock(shard).remove_expired(now);
                self.release(freed);
            }
            if !self.try_reserve(bytes) {
                return Err(RequestIdError::Full);
            }
        }
        // Reserved bytes count before they are used. Proxies' answers make room for them now, so that the sum of both
        // stays in its bound.
        self.evict();
        Ok(Reservation { cache: self, bytes })
    }

    /// Remembers an answer of the API in place of its reservation.
    pub(super) fn remember(
        &self,
        key: RequestKey,
        answer: &EncodedAnswer,
        mut reserved: Reservation<'_>,
        now: Timestamp,
    ) {
        // Copied, because the buffer that the answer was written to is larger than the answer.
        let answer = EncodedAnswer { body: Bytes::copy_from_slice(&answer.body), ..answer.clone() };
        let bytes = answer.body.len().saturating_add(OVERHEAD);
        // The few answers that are larger than their reservation are remembered too, since they were charged.
        self.api_bytes.fetch_add(bytes, Ordering::Relaxed);
        // In this order: if the reservation were released first, another request could take its space before the
        // answer is counted.
        self.release(DoorBytes { api: std::mem::take(&mut reserved.bytes), proxy: 0 });
        let RequestKey { id, content } = key;
        let mut shard = self.shard(id);
        // Each insert pays for the removal of what has expired in its shard, so that no task has to sweep.
        let mut freed = shard.remove_expired(now);
        freed.add(shard.insert(id, CachedAnswer { at: now, content, answer: Answer::Api(answer), bytes }));
        // `evict` locks shards one after the other, this one too.
        drop(shard);
        self.release(freed);
        self.evict();
    }

    /// Returns the header fields that a proxy's question was answered with, at most [`MAX_REPEATS`] times.
    pub(super) fn proxy_answer(&self, question: Digest, now: Timestamp) -> Option<HeaderMap> {
        let mut shard = self.shard(question);
        // Tested at the lookup too, because an expired answer stays in the map until its shard is used again.
        let cached = shard.answers.get_mut(&question).filter(|cached| now < cached.at.plus(ANSWER_LIFETIME))?;
        // Digests of both doors share the map. An answer of the other door has the same key only by a collision.
        let Answer::Proxy { fields, repeats } = &mut cached.answer else { return None };
        // Bounded, because each repeat is let through without a charge.
        *repeats = repeats.checked_add(1).filter(|repeats| *repeats <= MAX_REPEATS)?;
        Some(fields.iter().cloned().collect())
    }

    /// Remembers the header fields of an answer to a proxy, if there is space.
    pub(super) fn remember_proxy_answer(&self, question: Digest, now: Timestamp, headers: &HeaderMap) {
        let fields: Box<[_]> = headers.iter().map(|(name, value)| (name.clone(), value.clone())).collect();
        let size = |(name, value): &(HeaderName, HeaderValue)| {
            FIELD_OVERHEAD.saturating_add(name.as_str().len()).saturating_add(value.len())
        };
        let bytes = fields.iter().map(size).fold(OVERHEAD, usize::saturating_add);
        self.proxy_bytes.fetch_add(bytes, Ordering::Relaxed);
        // Evict before inserting, so that the new answer is not evicted itself.
        if !self.evict() {
            self.release(DoorBytes { api: 0, proxy: bytes });
            return;
        }
        let mut shard = self.shard(question);
        let mut freed = shard.remove_expired(now);
        let answer = Answer::Proxy { fields, repeats: 0 };
        freed.add(shard.insert(question, CachedAnswer { at: now, content: question, answer, bytes }));
        drop(shard);
        self.release(freed);
    }

    fn try_reserve(&self, bytes: usize) -> bool {
        // Callers may not take everything: forward auth would then forget every answer, and charge each internal
        // redirect again.
        let max = self.max_bytes.saturating_sub(self.max_bytes.checked_div(PROXY_SHARE).unwrap_or(0));
        // Test and addition in one atomic step. Two requests at once must not both take the last space.
        let fits = |used: usize| used.checked_add(bytes).filter(|used| *used <= max);
        self.api_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok()
    }

    fn release(&self, freed: DoorBytes) {
        self.api_bytes.fetch_sub(freed.api, Ordering::Relaxed);
        self.proxy_bytes.fetch_sub(freed.proxy, Ordering::Relaxed);
    }

    /// Returns the bytes above the bound.
    fn excess(&self) -> usize {
        let used = self.api_bytes.load(Ordering::Relaxed).saturating_add(self.proxy_bytes.load(Ordering::Relaxed));
        used.saturating_sub(self.max_bytes)
    }

    /// Evicts answers to proxies, the oldest of each shard first, until all fit. Returns whether they do.
    fn evict(&self) -> bool {
        // One round at most: if all shards are empty of proxies' answers, the API's fill the space, and those are
        // never evicted.
        for _ in 0..SHARDS {
            let excess = self.excess();
            if excess == 0 {
                return true;
            }
            // In turn, so that the load falls on all shards alike, and no shard loses its answers much earlier than
            // the others.
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            if let Some(shard) = number.checked_rem(SHARDS).and_then(|number| self.shards.get(number)) {
                let freed = lock(shard).evict(excess);
                self.release(freed);
            }
        }
        self.excess() == 0
    }

    fn shard(&self, id: Digest) -> MutexGuard<'_, Shard> {
        let [first, _] = id.halves();
        let number = usize::try_from(first >> 60).unwrap_or(0);
        lock(self.shards.get(number).expect("four bits number sixteen shards"))
    }
}

impl IdLock<'_> {
    pub(super) fn key(&self) -> RequestKey {
        self.key
    }
}

impl Drop for IdLock<'_> {
    fn drop(&mut self) {
        // This runs before the sender in the fields is dropped. A waiter that is woken by the sender finds the id
        // free.
        self.cache.shard(self.key.id).in_progress.remove(&self.key.id);
    }
}

impl Reservation<'_> {
    /// Splits off the bytes of one answer; `None` if there are not enough left.
    pub(super) fn split(&mut self) -> Option<Self> {
        // Split and not reserved again: the total does not change, so this cannot fail for lack of space halfway
        // through a list.
        self.bytes = self.bytes.checked_sub(EXPECTED_ANSWER)?;
        Some(Self { cache: self.cache, bytes: EXPECTED_ANSWER })
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.cache.release(DoorBytes { api: self.bytes, proxy: 0 });
    }
}

impl DoorBytes {
    pub(super) fn add(&mut self, other: Self) {
        self.api = self.api.saturating_add(other.api);
        self.proxy = self.proxy.saturating_add(other.proxy);
    }
}

impl CachedAnswer {
    pub(super) fn size(&self) -> DoorBytes {
        match self.answer {
            Answer::Api(_) => DoorBytes { api: self.bytes, proxy: 0 },
            Answer::Proxy { .. } => DoorBytes { api: 0, proxy: self.bytes },
        }
    }
}

impl Shard {
    fn answer(&self, id: Digest, now: Timestamp) -> Option<&EncodedAnswer> {
        match self.unexpired(id, now) {
            Some(CachedAnswer { answer: Answer::Api(answer), .. }) => Some(answer),
            _ => None,
        }
    }

    fn unexpired(&self, id: Digest, now: Timestamp) -> Option<&CachedAnswer> {
        self.answers.get(&id).filter(|cached| now < cached.at.plus(ANSWER_LIFETIME))
    }

    fn is_reused(&self, key: RequestKey, now: Timestamp) -> bool {
        let answered = self.unexpired(key.id, now).map(|cached| cached.content);
        let content = answered.or_else(|| self.in_progress.get(&key.id).map(|(content, _)| *content));
        content.is_some_and(|content| content != key.content)
    }

    /// Inserts an answer. Returns the bytes of the one that it replaces.
    fn insert(&mut self, id: Digest, cached: CachedAnswer) -> DoorBytes {
        let at = cached.at;
        let order = match cached.answer {
            Answer::Api(_) => &mut self.api_order,
            Answer::Proxy { .. } => &mut self.proxy_order,
        };
        // The API replaces an answer only after its minute: within it, `look_up` returns the first one.
        let before = self.answers.insert(id, cached);
        // An answer that is replaced at the same instant has its place in the queue already.
        if before.as_ref().is_none_or(|before| before.at != at) {
            order.push_back((at, id));
        }
        // A replaced answer leaves a stale place in the queue. They are removed before they outnumber the others, so that
        // replacing one answer again and again does not grow the queue.
        if order.len() > self.answers.len().saturating_mul(2).saturating_add(SHARDS) {
            order.retain(|(at, id)| self.answers.get(id).is_some_and(|cached| cached.at == *at));
        }
        before.map(|before| before.size()).unwrap_or_default()
    }

    /// Removes the answers whose minute is over. Returns their bytes.
    fn remove_expired(&mut self, now: Timestamp) -> DoorBytes {
        let mut freed = DoorBytes::default();
        for order in [&mut self.api_order, &mut self.proxy_order] {
            // If the clock steps back, an older place may be behind a newer one, and goes together with it.
            while let Some((at, id)) = order.pop_front_if(|(at, _)| now >= at.plus(ANSWER_LIFETIME)) {
                freed.add(remove(&mut self.answers, id, at));
            }
        }
        freed
    }

    /// Removes the oldest answers to proxies until at least `bytes` are free. Returns their bytes.
    fn evict(&mut self, bytes: usize) -> DoorBytes {
        let mut freed = DoorBytes::default();
        while freed.proxy < bytes {
            // An entry of the queue may be stale and free nothing, so the loop counts bytes and not entries.
            let Some((at, id)) = self.proxy_order.pop_front() else { break };
            freed.add(remove(&mut self.answers, id, at));
        }
        freed
    }
}

/// Removes the answer that was remembered at this time. The same id may have been remembered again since, and then stays.
fn remove(answers: &mut HashMap<Digest, CachedAnswer>, id: Digest, at: Timestamp) -> DoorBytes {
    match answers.entry(id) {
        Entry::Occupied(cached) if cached.get().at == at => cached.remove().size(),
        _ => DoorBytes::default(),
    }
}

fn lock(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}
