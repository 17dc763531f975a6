//! Bounds the memory of clients: large answers that are being made or are not read yet, and large bodies that are being read.
//!
//! A client that requests much and reads nothing would otherwise hold its answer in memory for as long as it likes, and one that sends a
//! body without an end what it has sent.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http::StatusCode;
use http_body::{Frame, SizeHint};
use memmap2::MmapMut;
use serde::Serialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout};

use super::{ApiError, App, json_bytes};

/// The bytes of one semaphore permit: tokio acquires at most 2^32 - 1 permits at once, and a byte each would be too fine.
const UNIT: usize = 1_024;
/// The bytes of an answer that hyper is given at once.
const CHUNK: usize = 64 << 10;
/// How long a request waits for memory: longer than it takes to write as many answers as fit, shorter than clients wait.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(5);
/// The most requests that wait at once. Over HTTP/2 each holds as much of its body as a client may send unasked, 64 KiB.
const MAX_WAITERS: usize = 256;
/// The memory that is acquired before an answer to an operator is made, and the most bytes of a list in one answer: a thousand bans, or more.
pub(super) const PAGE_BYTES: usize = 256 << 10;

/// Memory for answers or bodies.
#[derive(Debug)]
pub(crate) struct ClientMemory {
    units: Arc<Semaphore>,
    max: u32,
    waiters: Semaphore,
    /// Why there is none.
    busy: &'static str,
}

/// The memory of one answer or body. It is released when its last byte is dropped.
#[derive(Debug)]
pub(super) struct MemoryPermit {
    units: OwnedSemaphorePermit,
    max: u32,
    busy: &'static str,
}

impl ClientMemory {
    /// Memory for answers of at most so many bytes in all.
    pub(super) fn for_answers(bytes: usize) -> Self {
        Self::new(bytes, "too many large answers wait to be read; nothing was decided, try again later")
    }

    /// Memory for bodies of at most so many bytes in all.
    pub(super) fn for_bodies(bytes: usize) -> Self {
        Self::new(bytes, "too many large bodies are being read; nothing was decided, try again later")
    }

    /// Memory of so many bytes in all. `busy` tells clients why there is none.
    pub(super) fn new(bytes: usize, busy: &'static str) -> Self {
        let max = units(bytes);
        let units = Arc::new(Semaphore::new(usize::try_from(max).unwrap_or(usize::MAX)));
        Self { units, max, waiters: Semaphore::new(MAX_WAITERS), busy }
    }

    /// Acquires memory for at most `bytes`, first come, first served. What is larger than the whole memory acquires all of it, and
    /// is then alone.
    ///
    /// # Errors
    /// 503 `busy` after [`ACQUIRE_TIMEOUT`], or at once if too many requests wait already.
    pub(super) async fn acquire(&self, bytes: usize) -> Result<MemoryPermit, ApiError> {
        if let Ok(permit) = self.try_acquire(bytes) {
            return Ok(permit);
        }
        let _place = self.waiters.try_acquire().map_err(|_| refusal(self.busy))?;
        let acquiring = Arc::clone(&self.units).acquire_many_owned(self.wanted(bytes));
        match timeout(ACQUIRE_TIMEOUT, acquiring).await {
            Ok(Ok(units)) => Ok(self.permit(units)),
            // The semaphore is never closed, so this is the timeout.
            Ok(Err(_)) | Err(_) => Err(refusal(self.busy)),
        }
    }

    /// Acquires memory as [`acquire`](Self::acquire) does, without waiting.
    pub(super) fn try_acquire(&self, bytes: usize) -> Result<MemoryPermit, ApiError> {
        let acquired = Arc::clone(&self.units).try_acquire_many_owned(self.wanted(bytes));
        acquired.map(|units| self.permit(units)).map_err(|_| refusal(self.busy))
    }

    fn wanted(&self, bytes: usize) -> u32 {
        // Without the bound, an answer above the whole memory would wait until its timeout every time.
        units(bytes).min(self.max)
    }

    fn permit(&self, units: OwnedSemaphorePermit) -> MemoryPermit {
        MemoryPermit { units, max: self.max, busy: self.busy }
    }

    /// Returns the bytes that are free.
    #[cfg(test)]
    pub(super) fn free(&self) -> usize {
        self.units.available_permits().saturating_mul(UNIT)
    }
}

fn refusal(busy: &'static str) -> ApiError {
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "busy", busy)
}

impl MemoryPermit {
    /// Builds the body of the answer. It holds its memory until the client has read it, or `client_timeout` is over.
    ///
    /// # Errors
    /// 503 `busy` if the answer is larger than the memory that was acquired for it, and there is no more.
    pub(super) fn body(self, answer: Vec<u8>, client_timeout: Duration) -> Result<Body, ApiError> {
        Ok(chunked(self.bytes(answer)?, client_timeout))
    }

    /// Answers with a page of JSON.
    pub(super) fn page(self, app: &App, page: AnswerPage) -> Result<Response, ApiError> {
        let body = chunked(self.owned(page.length, page)?, app.bounds.client_timeout);
        Ok(json_bytes(StatusCode::OK, body))
    }

    /// Answers with a value in JSON.
    pub(super) fn json<T: Serialize>(self, app: &App, body: &T) -> Result<Response, ApiError> {
        self.text(app, threshold_wire::to_json(body))
    }

    /// Answers with encoded JSON.
    pub(super) fn text(self, app: &App, body: String) -> Result<Response, ApiError> {
        Ok(json_bytes(StatusCode::OK, self.body(body.into_bytes(), app.bounds.client_timeout)?))
    }

    /// Keeps the memory for as long as any of these bytes is used.
    ///
    /// # Errors
    /// As [`body`](Self::body).
    pub(super) fn bytes(self, mut bytes: Vec<u8>) -> Result<Bytes, ApiError> {
        // Shrunk before the units are counted: a vector may hold twice what it contains, and the memory behind it is
        // what is bounded.
        bytes.shrink_to_fit();
        self.owned(bytes.len(), bytes)
    }

    /// Keeps `length` bytes of memory for as long as any of these bytes is used.
    fn owned(mut self, length: usize, bytes: impl AsRef<[u8]> + Send + 'static) -> Result<Bytes, ApiError> {
        let needed = usize::try_from(units(length).min(self.max)).unwrap_or(usize::MAX);
        // The permit was for the largest likely answer. What this one does not use is released; for more than that it never waits while
        // it holds some.
        drop(self.units.split(self.units.num_permits().saturating_sub(needed)));
        let more = u32::try_from(needed.saturating_sub(self.units.num_permits())).unwrap_or(u32::MAX);
        if more > 0 {
            let more = Arc::clone(self.units.semaphore()).try_acquire_many_owned(more);
            self.units.merge(more.map_err(|_| refusal(self.busy))?);
        }
        Ok(Bytes::from_owner(OwnedBytes { bytes, _permit: self }))
    }
}

fn chunked(rest: Bytes, client_timeout: Duration) -> Body {
    // One deadline for the whole answer, from when it is ready: the time to decide is not the client's.
    Body::new(ChunkedBody { rest, deadline: Instant::now().checked_add(client_timeout) })
}

/// JSON that is written into memory of its own, which goes back to the system when the answer is read. In the heap, what connections
/// allocate meanwhile lies between large answers, and the room of an answer that is gone is not used again.
#[derive(Debug)]
pub(super) struct AnswerPage {
    memory: MmapMut,
    length: usize,
}

impl AnswerPage {
    /// An empty page for so many bytes.
    ///
    /// # Errors
    /// 503 `busy` if the system has no memory.
    pub(super) fn new(bytes: usize) -> Result<Self, ApiError> {
        let memory = MmapMut::map_anon(bytes.max(1)).map_err(|_| refusal("there is no memory for the answer"))?;
        Ok(Self { memory, length: 0 })
    }

    /// Appends text.
    ///
    /// # Errors
    /// As [`new`](Self::new): a page grows if it must.
    pub(super) fn push(&mut self, text: &str) -> Result<(), ApiError> {
        let end = self.length.saturating_add(text.len());
        if end > self.memory.len() {
            let mut larger = Self::new(end.saturating_mul(2))?;
            larger.write(self.as_ref());
            *self = larger;
        }
        self.write(text.as_bytes());
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) {
        let end = self.length.saturating_add(bytes.len());
        if let Some(free) = self.memory.get_mut(self.length..end) {
            free.copy_from_slice(bytes);
            self.length = end;
        }
    }
}

impl AsRef<[u8]> for AnswerPage {
    fn as_ref(&self) -> &[u8] {
        self.memory.get(..self.length).unwrap_or_default()
    }
}

/// A JSON array that is as long as one answer may be.
#[derive(Debug)]
pub(super) struct ListPage(AnswerPage);

impl ListPage {
    /// # Errors
    /// As [`AnswerPage::new`].
    pub(super) fn new() -> Result<Self, ApiError> {
        let mut page = AnswerPage::new(PAGE_BYTES)?;
        page.push("[")?;
        Ok(Self(page))
    }

    /// Appends an item. Returns `false`, and leaves the page as it is, if there is no room for it; there is for a first one.
    ///
    /// # Errors
    /// As [`AnswerPage::push`].
    pub(super) fn push<T: Serialize>(&mut self, item: &T) -> Result<bool, ApiError> {
        let item = threshold_wire::to_json(item);
        let is_first = self.0.length == 1;
        // For the comma and the bracket.
        if !is_first && self.0.length.saturating_add(item.len()).saturating_add(2) > PAGE_BYTES {
            return Ok(false);
        }
        if !is_first {
            self.0.push(",")?;
        }
        self.0.push(&item)?;
        Ok(true)
    }

    /// Returns the array.
    ///
    /// # Errors
    /// As [`AnswerPage::push`].
    pub(super) fn end(mut self) -> Result<AnswerPage, ApiError> {
        self.0.push("]")?;
        Ok(self.0)
    }
}

fn units(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX)
}

/// Bytes and their permit. Every chunk is a `Bytes` that refers to them, so the permit lives as long as the last chunk.
struct OwnedBytes<B> {
    bytes: B,
    _permit: MemoryPermit,
}

impl<B: AsRef<[u8]>> AsRef<[u8]> for OwnedBytes<B> {
    fn as_ref(&self) -> &[u8] {
        self.bytes.as_ref()
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

    /// Woken by: a plain `Bytes::from(bytes)` in `bytes`, which releases the memory while a chunk still exists; and by leaving
    /// out the `split` there.
    #[tokio::test]
    async fn an_answer_holds_the_memory_it_uses_until_its_last_chunk_is_dropped() {
        let large = ClientMemory::for_answers(1_000 * KIB);
        let permit = large.acquire(900 * KIB).await.unwrap();
        assert_eq!(large.free(), 100 * KIB);
        let mut body = permit.body(vec![7; 200 * KIB - 1], Duration::MAX).unwrap();
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
        let large = ClientMemory::for_answers(10 * KIB);
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

    /// Woken by: leaving out `waiters`, or `merge`.
    #[tokio::test(start_paused = true)]
    async fn of_too_many_that_wait_the_last_is_refused_at_once_and_a_larger_answer_never_waits() {
        let memory = ClientMemory::for_answers(10 * KIB);
        let small = memory.acquire(KIB).await.unwrap();
        assert!(small.body(vec![7; 9 * KIB], Duration::MAX).is_ok());
        let (small, most) = (memory.acquire(KIB).await.unwrap(), memory.acquire(8 * KIB).await.unwrap());
        assert!(small.body(vec![7; 3 * KIB], Duration::MAX).is_err());
        let _rest = memory.acquire(2 * KIB).await.unwrap();
        let mut waiting: Vec<_> = (0..MAX_WAITERS).map(|_| Box::pin(memory.acquire(KIB))).collect();
        for one in &mut waiting {
            assert!(polled(one.as_mut()).is_none());
        }
        assert!(polled(std::pin::pin!(memory.acquire(KIB))).is_some_and(|refused| refused.is_err()));
        drop(most);
        assert!(polled(waiting[0].as_mut()).is_some_and(|acquired| acquired.is_ok()));
    }

    /// Returns what a future has already.
    fn polled<F: Future>(future: Pin<&mut F>) -> Option<F::Output> {
        match future.poll(&mut Context::from_waker(std::task::Waker::noop())) {
            Poll::Ready(output) => Some(output),
            Poll::Pending => None,
        }
    }

    /// Woken by: leaving out the check of `deadline` in `poll_frame`.
    #[tokio::test(start_paused = true)]
    async fn an_answer_that_is_read_too_slowly_is_aborted() {
        let large = ClientMemory::for_answers(1_000 * KIB);
        let mut body =
            large.acquire(1_000 * KIB).await.unwrap().body(vec![7; 1_000 * KIB], Duration::from_secs(30)).unwrap();
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
