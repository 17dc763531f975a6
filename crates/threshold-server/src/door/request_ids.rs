//! Remembers answers under the ids of their requests, so that a repeat within a minute is not charged again.
//!
//! A caller of the API that sends a `requestId` is promised that it is charged once: space for its answer is reserved before
//! the request is decided, and without space the request is refused and charges nothing. A proxy that sends
//! `X-Threshold-Request-Id` is promised nothing: its answers use the space that is left, and the oldest are evicted.
//!
//! On a store that other nodes share, the store is asked too ([`nodes`]). Repeats that arrive at the same node wait for each
//! other here, without asking the store.

mod cache;
mod encoding;
mod nodes;
#[cfg(test)]
mod shared_tests;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::Hash;
#[cfg(test)]
use std::hash::{BuildHasher as _, RandomState};
use std::pin::pin;

use http::{HeaderMap, StatusCode};
use threshold_core::{Digest, DigestKey, Span, Timestamp};
use threshold_limiter::store::StoreError;

use super::ApiError;
use super::http::EncodedAnswer;
use crate::desk::{BeginOutcome, BegunRequest, Desk, SharedRequests};
use cache::{AnswerCache, Lookup, Reservation};
pub(super) use nodes::ProxyClaim;
use nodes::Started;

/// An answer that expires sooner than this may be forgotten before its list is decided, and gets new space.
const EXPIRY_MARGIN: Span = Span::from_secs(10);

/// The answers of the last minute, by request id.
#[derive(Debug)]
pub(super) struct RequestIds {
    /// A secret, so that a client can neither forge ids or requests with equal digests nor fill a single shard.
    key: DigestKey,
    /// The requests of all nodes, if the store is shared.
    shared: Option<SharedRequests>,
    cache: AnswerCache,
}

/// The digests of a request's id and of its content.
#[derive(Debug, Clone, Copy)]
pub(super) struct RequestKey {
    pub(super) id: Digest,
    pub(super) content: Digest,
}

/// Why a request with an id is not decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RequestIdError {
    /// There is no space to remember another answer.
    Full,
    /// The id was used for a different request.
    Reused,
    /// Another node has remembered the answer in a version that this node cannot decode.
    Unreadable,
}

/// Space for the answers of a list that is being decided. What is left of it is released when this is dropped.
#[derive(Debug)]
pub(super) struct AnswerSpace<'r> {
    reserved: Reservation<'r>,
    /// The requests that were begun in the shared store.
    begun: HashMap<Digest, BegunRequest>,
}

/// Who decides a request.
enum Claim {
    /// This node, which has begun it in the shared store, if there is one.
    Own(Option<BegunRequest>),
    /// Another node has decided it.
    Answered(EncodedAnswer),
}

impl From<RequestIdError> for ApiError {
    fn from(error: RequestIdError) -> Self {
        let (status, code, message) = match error {
            RequestIdError::Full => (
                StatusCode::SERVICE_UNAVAILABLE,
                "too_many_request_ids",
                "there is no space to remember another requestId; nothing was charged: try again later, or send the request \
                 without an id",
            ),
            RequestIdError::Reused => (
                StatusCode::UNPROCESSABLE_ENTITY,
                "request_id_reused",
                "this requestId was used for a different request within the last minute; nothing was charged: send each \
                 request with an id of its own",
            ),
            RequestIdError::Unreadable => (
                StatusCode::SERVICE_UNAVAILABLE,
                "unavailable",
                "this request was charged before, and another node remembers its answer in a version that this node cannot \
                 read; nothing was charged again",
            ),
        };
        Self::new(status, code, message).about(Some("requestId".to_owned()))
    }
}

impl RequestIds {
    /// Remembers at most `max_bytes`, and asks the desk's store if other nodes share it.
    pub(super) fn of(desk: &Desk, max_bytes: usize) -> Self {
        Self { key: desk.digest_key(), shared: desk.shared_requests(), cache: AnswerCache::new(max_bytes) }
    }

    /// Remembers at most `max_bytes`, for this node only.
    #[cfg(test)]
    pub(super) fn new(max_bytes: usize) -> Self {
        let random = || RandomState::new().hash_one(()).to_be_bytes();
        let mut key = [0; 16];
        key[..8].copy_from_slice(&random());
        key[8..].copy_from_slice(&random());
        Self { key: DigestKey::new(key), shared: None, cache: AnswerCache::new(max_bytes) }
    }

    /// Returns the digest of an id or of a request's content.
    pub(super) fn digest(&self, value: &impl Hash) -> Digest {
        self.key.request(value)
    }

    /// Returns the answer that this id was given within the last minute, else what `decide` returns. A repeat that arrives
    /// while the first is being decided waits for it. `space` is used first, if there is any left.
    ///
    /// Cancel safe: if this future is dropped, its lock on the id is released and the next repeat decides.
    ///
    /// # Errors
    /// If the id belongs to a different request, if there is no space for the answer, and if `decide` fails.
    pub(super) async fn run<E: From<RequestIdError>>(
        &self,
        key: RequestKey,
        now: impl Fn() -> Timestamp,
        mut space: Option<&mut AnswerSpace<'_>>,
        decide: impl Future<Output = Result<EncodedAnswer, E>>,
    ) -> Result<EncodedAnswer, E> {
        // Taken out of the list: from here on this request ends it, also if this future is dropped.
        let mut begun = space.as_mut().and_then(|space| space.begun.remove(&key.id));
        // Looked up again after every wait: the owner may have been denied or dropped, and then one of the waiters
        // decides.
        let lock = loop {
            match self.cache.look_up(key, now()) {
                // A request that was begun for the list is dropped with `begun`, and ends in the background.
                Lookup::Answered(answer) => return Ok(answer),
                Lookup::InProgress(mut done) => {
                    // Its owner waits in turn until this request has ended in the store: end it first, or both wait forever.
                    if let Some(begun) = begun.take() {
                        begun.end(None).await;
                    }
                    // The sender is dropped without sending, so this returns an error when the owner is done.
                    drop(done.changed().await);
                }
                Lookup::Reused => return Err(RequestIdError::Reused.into()),
                Lookup::Unknown(lock) => break lock,
            }
        };
        // Asked only while the local lock is held, so that a burst of repeats costs the store one request.
        let mut begun = match self.start(key, begun).await? {
            Claim::Own(begun) => begun,
            Claim::Answered(answer) => return Ok(answer),
        };
        // Before the decision: an answer that was charged and cannot be remembered would break the promise to its
        // caller.
        let reserved = match space.and_then(|space| space.reserved.split()) {
            Some(reserved) => reserved,
            None => self.cache.reserve(1, now())?,
        };
        let mut decide = pin!(decide);
        let answer = loop {
            let Some(own) = &mut begun else { break decide.as_mut().await? };
            if let Some(decided) = own.while_renewing(decide.as_mut()).await {
                break decided?;
            }
            // Another node has it. If that one charges nothing, it is decided here after all.
            begun = match self.start(key, None).await? {
                Claim::Own(begun) => begun,
                Claim::Answered(answer) => return Ok(answer),
            };
        };
        // A denial charges nothing, so that a repeat is decided again and may be allowed.
        if answer.charged {
            self.cache.remember(lock.key(), &answer, reserved, now());
        }
        // Still under the local lock: a repeat that is woken earlier would find the id unanswered in the store.
        if let Some(begun) = begun {
            begun.end(answer.charged.then(|| encoding::encode_answer(&answer))).await;
        }
        Ok(answer)
    }

    /// Begins a request in the shared store, if there is one, or waits for the answer of the node that has it.
    async fn start(&self, key: RequestKey, begun: Option<BegunRequest>) -> Result<Claim, RequestIdError> {
        let Some(shared) = &self.shared else { return Ok(Claim::Own(None)) };
        Ok(match nodes::start(shared, key, begun).await? {
            Started::Begun(begun) => Claim::Own(Some(begun)),
            // It is not cached here: the store remembers it until its minute is over.
            Started::Answered(answer) => Claim::Answered(answer),
            // A store that does not answer must not stop requests. Repeats to this node are still charged once.
            Started::Unavailable => Claim::Own(None),
        })
    }

    /// Reserves space for the answers to a list, as [`reserve_list`](Self::reserve_list) does, and begins its requests in the
    /// shared store, if there is one.
    ///
    /// # Errors
    /// As for `reserve_list`.
    pub(super) async fn begin_list(
        &self,
        list: &[RequestKey],
        now: impl Fn() -> Timestamp,
    ) -> Result<AnswerSpace<'_>, (Option<usize>, RequestIdError)> {
        let mut space = self.reserve_list(list, now())?;
        let Some(shared) = &self.shared else { return Ok(space) };
        for (place, key) in list.iter().enumerate() {
            // `now` is read for each request, since the store may take a while for each of those before it.
            if self.cache.is_answered(key.id, now()) {
                continue;
            }
            match shared.begin((key.id, key.content), None).await {
                Ok(BeginOutcome::Begun(begun)) => {
                    space.begun.insert(key.id, begun);
                }
                Ok(BeginOutcome::Reused) => return Err((Some(place), RequestIdError::Reused)),
                // `run` fetches the answer, or waits for it, when this request is decided.
                Ok(BeginOutcome::Answered(_) | BeginOutcome::UnderWay) => {}
                Err(StoreError::Full) => return Err((None, RequestIdError::Full)),
                // The store does not answer: to ask for the others would take one timeout each.
                Err(_) => break,
            }
        }
        Ok(space)
    }

    /// Returns the requests of all nodes, if the store is shared.
    pub(super) fn shared(&self) -> Option<&SharedRequests> {
        self.shared.as_ref()
    }

    /// Reserves space for the answers to those requests of a list whose ids are not known: a list is decided as a whole.
    ///
    /// # Errors
    /// With the index in `list` of an id that belongs to a different request; with `None` if there is no space.
    fn reserve_list(
        &self,
        list: &[RequestKey],
        now: Timestamp,
    ) -> Result<AnswerSpace<'_>, (Option<usize>, RequestIdError)> {
        let mut seen: HashMap<Digest, Digest> = HashMap::with_capacity(list.len());
        let mut unknown = 0usize;
        for (place, key) in list.iter().enumerate() {
            match seen.entry(key.id) {
                // The whole list is refused before anything is charged. A conflict that is found halfway could not be
                // undone.
                Entry::Occupied(before) if *before.get() != key.content => {
                    return Err((Some(place), RequestIdError::Reused));
                }
                // The same request twice in one list: the second gets the first one's answer, and needs no space.
                Entry::Occupied(_) => {}
                Entry::Vacant(first) => {
                    first.insert(key.content);
                    if self.cache.is_reused(*key, now) {
                        return Err((Some(place), RequestIdError::Reused));
                    }
                    // Too much space is released after the list. Too little would fail in the middle of it.
                    if !self.cache.is_answered(key.id, now.plus(EXPIRY_MARGIN)) {
                        unknown = unknown.saturating_add(1);
                    }
                }
            }
        }
        let reserved = self.cache.reserve(unknown, now).map_err(|error| (None, error))?;
        Ok(AnswerSpace { reserved, begun: HashMap::new() })
    }

    /// Returns the header fields that a proxy's question was answered with within the last minute.
    pub(super) fn proxy_answer(&self, question: Digest, now: Timestamp) -> Option<HeaderMap> {
        self.cache.proxy_answer(question, now)
    }

    /// Remembers the header fields of an answer to a proxy, if there is space.
    pub(super) fn remember_proxy_answer(&self, question: Digest, now: Timestamp, headers: &HeaderMap) {
        self.cache.remember_proxy_answer(question, now, headers);
    }
}
