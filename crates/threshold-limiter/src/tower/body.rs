//! The bodies of requests and responses: one counts the bytes that stream in, the other ends the request when it ends.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, Bytes};
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use super::pending_charges::{AnyLimiter, PendingCharges, without_waiting};
use super::request_facts::RequestFacts;
use super::runtime::Background;

pin_project! {
    /// The body of a request. If a limit counts bytes and the length is not known, it counts the bytes that stream, and
    /// records them when it ends or is dropped.
    #[derive(Debug)]
    pub struct RequestBody<B> {
        #[pin]
        inner: B,
        count: Option<Box<Count>>,
    }
}

impl<B> RequestBody<B> {
    pub(super) fn new(inner: B, count: Option<Box<Count>>) -> Self {
        Self { inner, count }
    }
}

impl<B> RequestBody<B> {
    /// Returns the body itself, for a host that can pass it on without reading it.
    ///
    /// # Errors
    /// Returns `self` if its bytes are counted: then it must be read here.
    pub fn into_uncounted(self) -> Result<B, Self> {
        match self.count {
            None => Ok(self.inner),
            Some(_) => Err(self),
        }
    }
}

impl<B: Body> Body for RequestBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let this = self.project();
        let frame = ready!(this.inner.poll_frame(cx));
        match &frame {
            Some(Ok(frame)) => {
                if let (Some(count), Some(data)) = (this.count.as_mut(), frame.data_ref()) {
                    count.seen = count.seen.saturating_add(data.remaining() as u64);
                }
            }
            // Dropping the count records it. After an error too: the bytes before it have streamed.
            Some(Err(_)) | None => *this.count = None,
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// Counts the bytes of one request, and records them when it is dropped.
pub(super) struct Count {
    pub(super) limiter: Arc<dyn AnyLimiter>,
    pub(super) background: Background,
    pub(super) request_facts: RequestFacts<'static>,
    pub(super) seen: u64,
}

impl Drop for Count {
    fn drop(&mut self) {
        // The announced length was charged when the request came. Charge only what streamed beyond it.
        let more = self.seen.saturating_sub(self.request_facts.bytes.unwrap_or(0));
        if more > 0 {
            let (limiter, request_facts) =
                (Arc::clone(&self.limiter), self.request_facts.clone().for_bytes_alone(more));
            without_waiting(&self.limiter, &self.background, async move { limiter.record(&request_facts).await });
        }
    }
}

impl fmt::Debug for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Count").field("seen", &self.seen).finish_non_exhaustive()
    }
}

pin_project! {
    /// The body of a response: that of the service or, for a refusal, a text. Concurrency is held until it ends or is dropped.
    #[derive(Debug)]
    pub struct ResponseBody<B> {
        #[pin]
        kind: Kind<B>,
    }
}

pin_project! {
    #[project = KindProjected]
    #[derive(Debug)]
    enum Kind<B> {
        Inner { #[pin] body: B, pending: Option<Box<PendingCharges>> },
        Refusal { text: Option<Bytes> },
    }
}

impl<B> ResponseBody<B> {
    pub(super) fn inner(body: B, pending: Option<Box<PendingCharges>>) -> Self {
        Self { kind: Kind::Inner { body, pending } }
    }

    pub(super) fn refusal(text: Bytes) -> Self {
        // An empty text is no frame at all, so that `is_end_stream` is true from the start.
        Self { kind: Kind::Refusal { text: Some(text).filter(|text| !text.is_empty()) } }
    }
}

impl<B> ResponseBody<B> {
    /// Takes the body apart, for a host that can pass a body on without reading it.
    pub fn into_parts(self) -> BodyParts<B> {
        match self.kind {
            Kind::Inner { body, pending } => BodyParts::Service(body, pending.map(Hold)),
            Kind::Refusal { text } => BodyParts::Refusal(text.unwrap_or_default()),
        }
    }
}

/// What [`ResponseBody::into_parts`] returns.
#[derive(Debug)]
pub enum BodyParts<B> {
    /// The body of the service, and the concurrency that is held until it ends, if any.
    Service(B, Option<Hold>),
    /// The text of a refusal.
    Refusal(Bytes),
}

/// Concurrency that a request holds. It is given back when this is dropped.
#[derive(Debug)]
#[must_use = "dropping it ends the request"]
pub struct Hold(#[expect(dead_code, reason = "it is only dropped")] Box<PendingCharges>);

/// An empty body, for middleware around this one that answers by itself.
impl<B> Default for ResponseBody<B> {
    fn default() -> Self {
        Self { kind: Kind::Refusal { text: None } }
    }
}

impl<B: Body<Data = Bytes>> Body for ResponseBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match self.project().kind.project() {
            KindProjected::Inner { body, pending } => {
                let frame = ready!(body.poll_frame(cx));
                // The end, or an error. The request is over, even if the connection keeps the body for longer.
                if !matches!(frame, Some(Ok(_))) {
                    *pending = None;
                }
                Poll::Ready(frame)
            }
            KindProjected::Refusal { text } => Poll::Ready(text.take().map(|text| Ok(Frame::data(text)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Inner { body, .. } => body.is_end_stream(),
            Kind::Refusal { text } => text.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Inner { body, .. } => body.size_hint(),
            Kind::Refusal { text } => SizeHint::with_exact(text.as_ref().map_or(0, |text| text.len() as u64)),
        }
    }
}
