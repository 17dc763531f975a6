//! Requests that have an id: one that is sent again is answered as the first time, from every node of a shared store.

use std::hash::Hash;

use threshold_core::Span;
use threshold_core::command::{Answer, Command, RequestKey, RequestState};

use super::Limiter;
use crate::clock::Clock;
use crate::random_id;
use crate::store::{Store, StoreError};

impl<S: Store, C: Clock> Limiter<S, C> {
    /// What a request with an id is known by in the store. `request` is everything that is asked: the same id with something
    /// else is [`RequestState::Reused`].
    ///
    /// Nodes of a shared store find each other's requests where they have the same secret, run the same release of your
    /// program, and hash the same values.
    pub fn request_key(&self, id: &impl Hash, request: &impl Hash) -> RequestKey {
        RequestKey { id: self.key.request(id), request: self.key.request(request), by: random_id() }
    }

    /// Begins a request that has an id, or says what became of the one before. After [`RequestState::Begun`], carry it out
    /// and [end](Self::end_request) it. Where that has not happened after `life`, as when this process died, the next one
    /// with its id begins it. An answer is given again at most `repeats` times, if that is said.
    ///
    /// ```
    /// # use threshold_limiter::{Limiter, Policy, Span, store::RequestState};
    /// # tokio::runtime::Builder::new_current_thread().build()?.block_on(async {
    /// let limiter = Limiter::new(Policy::parse("", &|_| None)?);
    /// let (ten, minute) = (Span::from_secs(10), Span::MINUTE);
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
    /// [`StoreError::Full`] where there is no room to remember another answer: then nothing has begun. Any other where the
    /// store cannot answer.
    pub async fn begin_request(
        &self,
        key: RequestKey,
        life: Span,
        repeats: Option<u32>,
    ) -> Result<RequestState, StoreError> {
        match self.execute(Command::BeginRequest { key, life, repeats }).await? {
            Answer::Request(state) => Ok(state),
            other => Err(StoreError::unexpected(other)),
        }
    }

    /// Ends a request that was begun: for `life` its id gets this answer. Without an answer the request is forgotten, and the
    /// next one with its id begins it.
    ///
    /// # Errors
    /// Where the store cannot answer.
    pub async fn end_request(&self, key: RequestKey, answer: Option<Box<[u8]>>, life: Span) -> Result<(), StoreError> {
        self.execute(Command::EndRequest { key, answer, life }).await.map(drop)
    }
}
