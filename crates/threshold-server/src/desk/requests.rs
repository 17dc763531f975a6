//! Requests with an id on a store that other nodes share: one that was begun or answered elsewhere is known here.

use std::fmt;
use std::sync::Arc;
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
pub(crate) const MEMORY: Span = Span::MINUTE;
/// How long a request may be under way before another node may begin it, unless this one says that it still is. So long is
/// an id without an answer after its node died.
const LIFE: Duration = Duration::from_secs(10);
/// How often a node says that a request is still under way.
const RENEW: Duration = Duration::from_secs(3);
/// The most requests at once that are ended after they were given up. Others are ended by [`LIFE`].
const MAX_ENDING: usize = 10_000;

/// The requests with an id of all nodes.
#[derive(Clone)]
pub(crate) struct SharedRequests {
    limiter: Arc<ServerLimiter>,
    ending: Arc<Semaphore>,
}

/// A request that this node carries out. Dropped before it was ended, it ends in the background.
#[derive(Debug)]
pub(crate) struct Begun {
    requests: SharedRequests,
    key: RequestKey,
    /// When the store last heard of it.
    since: Instant,
    answer: Option<Box<[u8]>>,
    ended: bool,
}

/// What became of a request that is to begin.
#[derive(Debug)]
pub(crate) enum Beginning {
    Begun(Begun),
    UnderWay,
    Answered(Box<[u8]>),
    Reused,
}

impl Desk {
    /// The requests with an id of all nodes, where there may be others: a store that answers at once is in this process,
    /// and nobody else asks it.
    pub(crate) fn shared_requests(&self) -> Option<SharedRequests> {
        let limiter = Arc::clone(&self.limiter);
        let ending = Arc::new(Semaphore::new(MAX_ENDING));
        (!limiter.store().answers_at_once()).then_some(SharedRequests { limiter, ending })
    }

    /// What ids and requests are digested with.
    pub(crate) fn digest_key(&self) -> DigestKey {
        self.limiter.key()
    }
}

impl SharedRequests {
    /// Begins a request, unless it was begun before. Its answer is given at most `repeats` times again, if that is said.
    pub(crate) async fn begin(
        &self,
        (id, request): (Digest, Digest),
        repeats: Option<u32>,
    ) -> Result<Beginning, StoreError> {
        let key = RequestKey { id, request, by: new_trace() };
        // Made before it is asked for: given up meanwhile, it may have begun all the same.
        let begun = Begun { requests: self.clone(), key, since: Instant::now(), answer: None, ended: false };
        begun.confirm(repeats).await
    }
}

impl Begun {
    /// Whether so much time has passed that another node may soon take this one for dead.
    pub(crate) fn is_old(&self) -> bool {
        self.since.elapsed() >= RENEW
    }

    /// Says again that this node carries it out, unless another one does by now.
    pub(crate) async fn confirm(mut self, repeats: Option<u32>) -> Result<Beginning, StoreError> {
        let since = Instant::now();
        let state = self.requests.limiter.begin_request(self.key, LIFE, repeats).await?;
        self.since = since;
        // What did not begin has no end.
        self.ended = state != RequestState::Begun;
        Ok(match state {
            RequestState::Begun => Beginning::Begun(self),
            RequestState::UnderWay => Beginning::UnderWay,
            RequestState::Answered(answer) => Beginning::Answered(answer),
            RequestState::Reused => Beginning::Reused,
        })
    }

    /// Carries it out, and tells the other nodes as long as that takes.
    pub(crate) async fn during<T>(&self, work: impl Future<Output = T>) -> T {
        let renewing = async {
            loop {
                tokio::time::sleep(RENEW).await;
                // A store that cannot answer now is asked again.
                let _ = self.requests.limiter.begin_request(self.key, LIFE, None).await;
            }
        };
        tokio::select! {
            biased;
            done = work => done,
            () = renewing => unreachable!("it renews until the work is done"),
        }
    }

    /// Ends it with the answer that a repeat gets; without one, the next one with its id is carried out.
    pub(crate) async fn end(mut self, answer: Option<Box<[u8]>>) {
        self.answer = answer;
        // What cannot be said is said by the end of its life.
        let _ = self.requests.limiter.end_request(self.key, self.answer.clone(), MEMORY.into()).await;
        self.ended = true;
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        let (limiter, key, answer) = (Arc::clone(&self.requests.limiter), self.key, self.answer.take());
        let place = Arc::clone(&self.requests.ending).try_acquire_owned();
        if let (Ok(runtime), Ok(place)) = (Handle::try_current(), place) {
            runtime.spawn(async move {
                let _ = limiter.end_request(key, answer, MEMORY.into()).await;
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
