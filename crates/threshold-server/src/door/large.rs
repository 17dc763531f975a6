//! Answers that may be large: the bytes of all that are being made or not yet read have a bound, and so has the time that a
//! client may take to read one.

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

/// What is counted: a semaphore hands out at most 2^32 of it at once.
const UNIT: usize = 1_024;
/// How much of an answer a connection is handed at once.
const PIECE: usize = 64 << 10;
/// How long a request waits for room: longer than it takes to make as many answers as there is room for, shorter than any
/// caller waits.
const WAIT: Duration = Duration::from_secs(5);

/// The room for large answers.
#[derive(Debug)]
pub(crate) struct LargeAnswers {
    units: Arc<Semaphore>,
    most: u32,
}

/// Room for one answer, for as long as any byte of it is there.
#[derive(Debug)]
pub(super) struct Room(OwnedSemaphorePermit);

impl LargeAnswers {
    pub(super) fn new(bytes: usize) -> Self {
        let most = units(bytes);
        Self { units: Arc::new(Semaphore::new(usize::try_from(most).unwrap_or(usize::MAX))), most }
    }

    /// Room for an answer of at most so many bytes; whoever asked first is served first.
    ///
    /// # Errors
    /// Where there is none for too long.
    pub(super) async fn room(&self, bytes: usize) -> Result<Room, ApiError> {
        let wanted = units(bytes).min(self.most);
        match timeout(WAIT, Arc::clone(&self.units).acquire_many_owned(wanted)).await {
            Ok(Ok(permit)) => Ok(Room(permit)),
            Ok(Err(_)) | Err(_) => {
                let message = "too many large answers are waiting to be read; nothing was decided, try again later";
                Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "busy", message))
            }
        }
    }

    /// The bytes that there is still room for.
    #[cfg(test)]
    pub(super) fn free(&self) -> usize {
        self.units.available_permits().saturating_mul(UNIT)
    }
}

impl Room {
    /// The body of the answer. It keeps the room that it takes until it was read, or has not been within `patience`.
    pub(super) fn body(mut self, mut answer: Vec<u8>, patience: Duration) -> Body {
        answer.shrink_to_fit();
        let needed = usize::try_from(units(answer.len())).unwrap_or(usize::MAX);
        drop(self.0.split(self.0.num_permits().saturating_sub(needed)));
        let by = Instant::now().checked_add(patience);
        Body::new(Pieces { rest: Bytes::from_owner(Held { answer, _room: self }), by })
    }
}

fn units(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX)
}

/// An answer and its room. Every piece of the answer refers to it.
struct Held {
    answer: Vec<u8>,
    _room: Room,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.answer
    }
}

/// An answer, piece by piece: the next one is asked for when the client has read most of the one before.
struct Pieces {
    rest: Bytes,
    by: Option<Instant>,
}

impl http_body::Body for Pieces {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        if self.rest.is_empty() {
            return Poll::Ready(None);
        }
        // Each write has a time of its own. Without this one, a byte now and then would keep the room for ever.
        if self.by.is_some_and(|by| Instant::now() >= by) {
            return Poll::Ready(Some(Err(io::Error::new(io::ErrorKind::TimedOut, "the answer was read too slowly"))));
        }
        let piece = PIECE.min(self.rest.len());
        Poll::Ready(Some(Ok(Frame::data(self.rest.split_to(piece)))))
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

    /// Woken by: a plain `Bytes::from(answer)` in `body`, which gives the room back while a piece is still there; and by
    /// leaving out the `split` there.
    #[tokio::test]
    async fn an_answer_keeps_the_room_it_takes_until_its_last_piece_is_gone() {
        let large = LargeAnswers::new(1_000 * KIB);
        let room = large.room(900 * KIB).await.unwrap();
        assert_eq!(large.free(), 100 * KIB);
        let mut body = room.body(vec![7; 200 * KIB - 1], Duration::MAX);
        assert_eq!(large.free(), 800 * KIB);
        assert_eq!(http_body::Body::size_hint(&body).exact(), Some(200 * 1_024 - 1));
        let mut pieces = Vec::new();
        while let Some(frame) = body.frame().await {
            pieces.push(frame.unwrap().into_data().unwrap());
        }
        assert_eq!(pieces.iter().map(Bytes::len).collect::<Vec<_>>(), [PIECE, PIECE, PIECE, 8 * KIB - 1]);
        drop(body);
        let last = pieces.pop().unwrap();
        drop(pieces);
        assert_eq!(large.free(), 800 * KIB, "the last piece is not read yet");
        drop(last);
        assert_eq!(large.free(), 1_000 * KIB);
    }

    #[tokio::test(start_paused = true)]
    async fn who_finds_no_room_waits_for_a_while_and_nothing_is_larger_than_all_there_is() {
        let large = LargeAnswers::new(10 * KIB);
        let all = large.room(usize::MAX).await.unwrap();
        assert_eq!(large.free(), 0);
        let refused = large.room(1).await.unwrap_err();
        assert_eq!((refused.status.as_u16(), refused.body.name()), (503, "busy"));
        let (waited, ()) = tokio::join!(large.room(10 * KIB), async {
            tokio::time::sleep(WAIT / 2).await;
            drop(all);
        });
        assert!(waited.is_ok());
    }

    /// Woken by: leaving out the look at `by` in `poll_frame`.
    #[tokio::test(start_paused = true)]
    async fn an_answer_that_is_read_too_slowly_is_given_up() {
        let large = LargeAnswers::new(1_000 * KIB);
        let mut body = large.room(1_000 * KIB).await.unwrap().body(vec![7; 1_000 * KIB], Duration::from_secs(30));
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
