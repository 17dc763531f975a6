//! Idempotent requests: a request that is repeated with its id gets the first answer again, from every node of a shared
//! store.

use std::hash::Hash;
use std::time::Duration;

use threshold_core::command::{Answer, Command, RequestKey, RequestState};

use super::Limiter;
use crate::clock::Clock;
use crate::random_id;
use crate::store::{Store, StoreError};

impl<S: Store, C: Clock> Limiter<S, C> {
    /// Returns the key of a request with an id. `request` is everything that the request asks for: the same id with another
    /// request is [`RequestState::Reused`].
    ///
    /// Nodes of a shared store find each other's requests if they have the same secret, run the same release of your
    /// program, and hash the same values.
    pub fn request_key(&self, id: &impl Hash, request: &impl Hash) -> RequestKey {
        RequestKey { id: self.key.request(id), request: self.key.request(request), by: random_id() }
    }

    /// Begins a request that has an id, or returns the state of the earlier request with that id. After
    /// [`RequestState::Begun`], carry it out and [end](Self::end_request) it. If that does not happen within `life`, for
    /// instance because this process died, the next request with the id begins. `repeats` bounds how often an answer is
    /// returned again.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use threshold_limiter::{Limiter, Policy, store::RequestState};
    /// # tokio::runtime::Builder::new_current_thread().build()?.block_on(async {
    /// let limiter = Limiter::new(Policy::parse("", &|_| None)?);
    /// let (ten, minute) = (Duration::from_secs(10), Duration::from_secs(60));
    /// let first = limiter.request_key(&"order 7", &("POST", "/orders"));
    /// assert_eq!(limiter.begin_request(first, ten, None).await?, RequestState::Begun);
    /// let again = limiter.request_key(&"order 7", &("POST", "/orders"));
    /// assert_eq!(limiter.begin_request(again, ten, None).await?, RequestState::UnderWay);
    /// limiter.end_request(first, Some(b"created".as_slice().into()), minute).await?;
    /// let created = RequestState::Answered(b"created".as_slice().into());
    /// assert_eq!(limiter.begin_request(again, ten, None).await?, created);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`StoreError::Full`] if there is no room to remember another answer: then nothing has begun. Returns other
    /// errors if the store cannot answer.
    pub async fn begin_request(
        &self,
        key: RequestKey,
        life: Duration,
        repeats: Option<u32>,
    ) -> Result<RequestState, StoreError> {
        match self.execute(Command::BeginRequest { key, life: life.into(), repeats }).await? {
            Answer::Request(state) => Ok(state),
            other => Err(StoreError::unexpected(other)),
        }
    }

    /// Ends a request that was begun: for `life`, requests with its id get this answer. Without an answer the request is
    /// forgotten, and the next one with its id begins.
    ///
    /// # Errors
    /// Returns an error if the store cannot answer.
    pub async fn end_request(
        &self,
        key: RequestKey,
        answer: Option<Box<[u8]>>,
        life: Duration,
    ) -> Result<(), StoreError> {
        self.execute(Command::EndRequest { key, answer, life: life.into() }).await.map(drop)
    }
}
