//! Requests with an id on a store that other nodes share, so that a repeat to another node is charged once.

use std::fmt;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use threshold_core::Span;
use threshold_core::command::{RequestKey, RequestState};
use threshold_core::{Digest, DigestKey};
use threshold_limiter::store::{Store as _, StoreError};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::{Desk, ServerLimiter, new_trace};

/// How long an answer is remembered.
pub(crate) const ANSWER_LIFETIME: Span = Span::MINUTE;
/// How long a node owns a request that it has begun, unless it renews. After a node has died, its ids are blocked so long.
const LEASE: Duration = Duration::from_secs(10);
/// How often a node renews a request that it is deciding: three times within the lease.
const RENEW_INTERVAL: Duration = Duration::from_secs(3);
/// The most cancelled requests that are ended in the background at once. Others end when their [`LEASE`] expires.
const MAX_ENDING: usize = 10_000;

/// The requests with an id of all nodes, in the shared store.
#[derive(Clone)]
pub(crate) struct SharedRequests {
    limiter: Arc<ServerLimiter>,
    ending: Arc<Semaphore>,
}

/// A request that this node owns. If it is dropped before it has ended, it is ended in the background.
#[derive(Debug)]
pub(crate) struct BegunRequest {
    requests: SharedRequests,
    key: RequestKey,
    /// When it was last begun or renewed.
    since: Instant,
    answer: Option<Box<[u8]>>,
    ended: bool,
}

/// The store's answer to a request that is to begin.
#[derive(Debug)]
pub(crate) enum BeginOutcome {
    Begun(BegunRequest),
    UnderWay,
    Answered(Box<[u8]>),
    Reused,
}

impl Desk {
    /// Returns the requests of all nodes, if the store is shared. A store that answers at once is in this process, and no
    /// other node uses it.
    pub(crate) fn shared_requests(&self) -> Option<SharedRequests> {
        let limiter = Arc::clone(&self.limiter);
        let ending = Arc::new(Semaphore::new(MAX_ENDING));
        (!limiter.store().answers_at_once()).then_some(SharedRequests { limiter, ending })
    }

    /// Returns the key that ids and requests are digested with.
    pub(crate) fn digest_key(&self) -> DigestKey {
        self.limiter.key()
    }
}

impl SharedRequests {
    /// Begins a request, unless it was begun before. With `repeats`, its answer is returned at most that many times.
    pub(crate) async fn begin(
        &self,
        (id, request): (Digest, Digest),
        repeats: Option<u32>,
    ) -> Result<BeginOutcome, StoreError> {
        // `by` is new for each attempt, also on the same node: the store tells a renewal from a second request by it.
        let key = RequestKey { id, request, by: new_trace() };
        // Created before the store is asked: if this future is dropped meanwhile, the store may have begun the request, and
        // the drop of `begun` ends it.
        let begun = BegunRequest { requests: self.clone(), key, since: Instant::now(), answer: None, ended: false };
        begun.renew(repeats).await
    }
}

impl BegunRequest {
    /// Whether the lease is old enough that it should be renewed before the request is decided.
    pub(crate) fn needs_renewal(&self) -> bool {
        self.since.elapsed() >= RENEW_INTERVAL
    }

    /// Renews the lease, unless another node has taken the request over.
    pub(crate) async fn renew(mut self, repeats: Option<u32>) -> Result<BeginOutcome, StoreError> {
        // Taken before the store is asked: the lease begins at some time after this, so the node believes it to be
        // shorter than it is.
        let since = Instant::now();
        let state = self.requests.limiter.begin_request(self.key, LEASE, repeats).await?;
        self.since = since;
        // A request that this node does not own must not be ended by its drop.
        self.ended = state != RequestState::Begun;
        Ok(match state {
            RequestState::Begun => BeginOutcome::Begun(self),
            RequestState::UnderWay => BeginOutcome::UnderWay,
            RequestState::Answered(answer) => BeginOutcome::Answered(answer),
            RequestState::Reused => BeginOutcome::Reused,
        })
    }

    /// Polls `work`, and renews the lease until it is done; `None` if another node has taken the request over. `work` is never polled
    /// after a lease that may be over: a node that was suspended would charge what another one has charged meanwhile. Only where the
    /// store does not answer the renewal it goes on, because such a store charges nothing either.
    pub(crate) async fn while_renewing<T>(&mut self, mut work: Pin<&mut impl Future<Output = T>>) -> Option<T> {
        loop {
            let mut due = pin!(tokio::time::sleep(RENEW_INTERVAL.saturating_sub(self.since.elapsed())));
            let done = poll_fn(|context| {
                // The clock and not the timer, which may be woken after `work`.
                if self.needs_renewal() || due.as_mut().poll(context).is_ready() {
                    return Poll::Ready(None);
                }
                work.as_mut().poll(context).map(Some)
            });
            if let Some(done) = done.await {
                return Some(done);
            }
            let since = Instant::now();
            let state = self.requests.limiter.begin_request(self.key, LEASE, None).await;
            // An error is ignored: the next renewal may succeed within the lease, and a store that is away is not charged.
            if state.is_ok_and(|state| state != RequestState::Begun) {
                self.ended = true;
                return None;
            }
            self.since = since;
        }
    }

    /// Ends the request with the answer for repeats. Without one, the next request with its id is decided.
    pub(crate) async fn end(mut self, answer: Option<Box<[u8]>>) {
        // Stored in `self` first: if this future is dropped while it waits, the drop of `self` still sends the
        // answer.
        self.answer = answer;
        // An error is ignored: the request ends when its lease expires.
        let _ = self.requests.limiter.end_request(self.key, self.answer.clone(), ANSWER_LIFETIME.into()).await;
        self.ended = true;
    }
}

impl Drop for BegunRequest {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        let (limiter, key, answer) = (Arc::clone(&self.requests.limiter), self.key, self.answer.take());
        // Never waits: `drop` cannot, and an unbounded number of tasks would grow while the store does not answer.
        let place = Arc::clone(&self.requests.ending).try_acquire_owned();
        // There is no runtime when the process ends. The lease expires by itself then.
        if let (Ok(runtime), Ok(place)) = (Handle::try_current(), place) {
            runtime.spawn(async move {
                let _ = limiter.end_request(key, answer, ANSWER_LIFETIME.into()).await;
                drop(place);
            });
        }
    }
}

impl fmt::Debug for SharedRequests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedRequests").field("ending", &self.ending.available_permits()).finish()
    }
}
