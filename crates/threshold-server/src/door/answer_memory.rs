//! Bounds the memory of large answers: those being written, and those that their clients have not read yet.
//!
//! A client that requests much and reads nothing would otherwise hold its answer in memory for as long as it likes.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::StatusCode;
use http_body::{Frame, SizeHint};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout};

use super::ApiError;

/// The bytes of one semaphore permit: tokio acquires at most 2^32 - 1 permits at once, and a byte each would be too fine.
const UNIT: usize = 1_024;
/// The bytes of an answer that hyper is given at once.
const CHUNK: usize = 64 << 10;
/// How long a request waits for memory: longer than it takes to write as many answers as fit, shorter than clients wait.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(5);

/// The memory for large answers.
#[derive(Debug)]
pub(crate) struct AnswerMemory {
    units: Arc<Semaphore>,
    max: u32,
}

/// The memory of one answer. It is released when the last byte of the answer is dropped.
#[derive(Debug)]
pub(super) struct AnswerPermit(OwnedSemaphorePermit);

impl AnswerMemory {
    pub(super) fn new(bytes: usize) -> Self {
        let max = units(bytes);
        Self { units: Arc::new(Semaphore::new(usize::try_from(max).unwrap_or(usize::MAX))), max }
    }

    /// Acquires memory for an answer of at most `bytes`, first come, first served. An answer that is larger than the whole
    /// memory acquires all of it, and is then written alone.
    ///
    /// # Errors
    /// 503 `busy` after [`ACQUIRE_TIMEOUT`].
    pub(super) async fn acquire(&self, bytes: usize) -> Result<AnswerPermit, ApiError> {
        // Without the bound, an answer above the whole memory would wait until its timeout every time.
        let wanted = units(bytes).min(self.max);
        match timeout(ACQUIRE_TIMEOUT, Arc::clone(&self.units).acquire_many_owned(wanted)).await {
            Ok(Ok(permit)) => Ok(AnswerPermit(permit)),
            // The semaphore is never closed, so this is the timeout.
            Ok(Err(_)) | Err(_) => {
                let message = "too many large answers wait to be read; nothing was decided, try again later";
                Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "busy", message))
            }
        }
    }

    /// Returns the bytes that are free.
    #[cfg(test)]
    pub(super) fn free(&self) -> usize {
        self.units.available_permits().saturating_mul(UNIT)
    }
}

impl AnswerPermit {
    /// Builds the body of the answer. It holds its memory until the client has read it, or `client_timeout` is over.
    pub(super) fn body(mut self, mut answer: Vec<u8>, client_timeout: Duration) -> Body {
        // The permit was for the largest possible answer; what this one does not use is released now.
        // Shrunk before the units are counted: a vector may hold twice what it contains, and the memory behind it is
        // what is bounded.
        answer.shrink_to_fit();
        let needed = usize::try_from(units(answer.len())).unwrap_or(usize::MAX);
        drop(self.0.split(self.0.num_permits().saturating_sub(needed)));
        // One deadline for the whole answer, from when it is ready: the time to decide is not the client's.
        let deadline = Instant::now().checked_add(client_timeout);
        Body::new(ChunkedBody { rest: Bytes::from_owner(OwnedAnswer { answer, _permit: self }), deadline })
    }
}

fn units(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX)
}

/// An answer and its permit. Every chunk is a `Bytes` that refers to it, so the permit lives as long as the last chunk.
struct OwnedAnswer {
    answer: Vec<u8>,
    _permit: AnswerPermit,
}

impl AsRef<[u8]> for OwnedAnswer {
    fn as_ref(&self) -> &[u8] {
        &self.answer
    }
}

/// An answer in chunks. hyper polls for the next one when its write buffer has room, which is when the client reads.
struct ChunkedBody {
    rest: Bytes,
    deadline: Option<Instant>,
}

impl http_body::Body for ChunkedBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        if self.rest.is_empty() {
            return Poll::Ready(None);
        }
        // The connection's write timeout starts again with each write. A client that reads a byte now and then (a slow read
        // attack) would never reach it.
        if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Poll::Ready(Some(Err(io::Error::new(io::ErrorKind::TimedOut, "the answer was read too slowly"))));
        }
        // hyper polls again only after a frame is written. With one frame for the whole answer, the deadline would
        // never be tested.
        let length = CHUNK.min(self.rest.len());
        Poll::Ready(Some(Ok(Frame::data(self.rest.split_to(length)))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(u64::try_from(self.rest.len()).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt as _;

    const KIB: usize = 1_024;

    /// Woken by: a plain `Bytes::from(answer)` in `body`, which releases the memory while a chunk still exists; and by leaving
    /// out the `split` there.
    #[tokio::test]
    async fn an_answer_holds_the_memory_it_uses_until_its_last_chunk_is_dropped() {
        let large = AnswerMemory::new(1_000 * KIB);
        let permit = large.acquire(900 * KIB).await.unwrap();
        assert_eq!(large.free(), 100 * KIB);
        let mut body = permit.body(vec![7; 200 * KIB - 1], Duration::MAX);
        assert_eq!(large.free(), 800 * KIB);
        assert_eq!(http_body::Body::size_hint(&body).exact(), Some(200 * 1_024 - 1));
        let mut chunks = Vec::new();
        while let Some(frame) = body.frame().await {
            chunks.push(frame.unwrap().into_data().unwrap());
        }
        assert_eq!(chunks.iter().map(Bytes::len).collect::<Vec<_>>(), [CHUNK, CHUNK, CHUNK, 8 * KIB - 1]);
        drop(body);
        let last = chunks.pop().unwrap();
        drop(chunks);
        assert_eq!(large.free(), 800 * KIB, "the last chunk is not read yet");
        drop(last);
        assert_eq!(large.free(), 1_000 * KIB);
    }

    #[tokio::test(start_paused = true)]
    async fn acquiring_waits_until_memory_is_released_or_a_timeout_and_takes_at_most_all_of_it() {
        let large = AnswerMemory::new(10 * KIB);
        let all = large.acquire(usize::MAX).await.unwrap();
        assert_eq!(large.free(), 0);
        let refused = large.acquire(1).await.unwrap_err();
        assert_eq!((refused.status.as_u16(), refused.body.code()), (503, "busy"));
        let (waited, ()) = tokio::join!(large.acquire(10 * KIB), async {
            tokio::time::sleep(ACQUIRE_TIMEOUT / 2).await;
            drop(all);
        });
        assert!(waited.is_ok());
    }

    /// Woken by: leaving out the check of `deadline` in `poll_frame`.
    #[tokio::test(start_paused = true)]
    async fn an_answer_that_is_read_too_slowly_is_aborted() {
        let large = AnswerMemory::new(1_000 * KIB);
        let mut body = large.acquire(1_000 * KIB).await.unwrap().body(vec![7; 1_000 * KIB], Duration::from_secs(30));
        for _ in 0..2 {
            assert!(body.frame().await.unwrap().is_ok());
            tokio::time::advance(Duration::from_secs(14)).await;
        }
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(body.frame().await.unwrap().is_err());
        drop(body);
        assert_eq!(large.free(), 1_000 * KIB);
    }
}
