//! The service: decides on each request before the inner service sees it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response};
use http_body::Body;
use tower_service::Service;

use super::body::{RequestBody, ResponseBody};
use super::future::{Arrived, ResponseFuture};
use super::gate::{self, Admission, Gate};
use super::layer::Door;
use super::request_facts::Peer;

/// A service behind a limiter; made by a [`ThresholdLayer`](super::ThresholdLayer).
#[derive(Debug, Clone)]
pub struct ThresholdService<S> {
    inner: S,
    door: Arc<Door>,
}

impl<S> ThresholdService<S> {
    pub(super) fn new(inner: S, door: Arc<Door>) -> Self {
        Self { inner, door }
    }

    /// Calls the service with the peer's address as an argument. This saves the extension in the request, which costs an
    /// allocation each.
    pub fn call_from<ReqBody>(
        &mut self,
        peer: Option<SocketAddr>,
        request: Request<ReqBody>,
    ) -> ResponseFuture<S, ReqBody>
    where
        S: Service<Request<RequestBody<ReqBody>>> + Clone,
        ReqBody: Body,
    {
        let (parts, body) = request.into_parts();
        self.decided(Peer::asked(peer), parts, body)
    }

    /// Calls the service with a request that a proxy describes: its own address, and the one that it says the request came from. That
    /// address is believed, and resolved as the address of any peer; header fields that name the caller are believed if either of them
    /// is a trusted proxy.
    pub fn call_through<ReqBody>(
        &mut self,
        proxy: SocketAddr,
        peer: SocketAddr,
        request: Request<ReqBody>,
    ) -> ResponseFuture<S, ReqBody>
    where
        S: Service<Request<RequestBody<ReqBody>>> + Clone,
        ReqBody: Body,
    {
        let (parts, body) = request.into_parts();
        self.decided(Peer::Through { proxy, peer }, parts, body)
    }

    fn decided<ReqBody>(&mut self, peer: Peer, mut parts: Parts, body: ReqBody) -> ResponseFuture<S, ReqBody>
    where
        S: Service<Request<RequestBody<ReqBody>>> + Clone,
        ReqBody: Body,
    {
        let gate = gate::decide(&self.door, &mut parts, peer, &body.size_hint());
        let wrapped = |parts, body, count| Request::from_parts(parts, RequestBody::new(body, count));
        let admission = match gate {
            Gate::Passed => return ResponseFuture::passing(self.inner.call(wrapped(parts, body, None))),
            Gate::Deciding(deciding) => {
                let (service, door) = (self.inner.clone(), Arc::clone(&self.door));
                return ResponseFuture::deciding(deciding, Arrived { service, door, parts, body });
            }
            Gate::Decided(admission) => admission,
        };
        match admission {
            Admission::Allowed(mut allowed, count) => {
                if let Some(pending) = &mut allowed.pending {
                    pending.call();
                }
                ResponseFuture::allowed(self.inner.call(wrapped(parts, body, count)), allowed)
            }
            // A clone is made ready after the delay: this one's readiness must not be held for seconds.
            Admission::Delayed(delayed, count) => {
                ResponseFuture::waiting(self.inner.clone(), wrapped(parts, body, count), delayed)
            }
            Admission::Refused(refused) => {
                let (response, strike) = self.door.respond(&parts, refused);
                ResponseFuture::refused(response, strike)
            }
        }
    }
}

impl<S, ReqBody, ResBody> Service<Request<ReqBody>> for ThresholdService<S>
where
    S: Service<Request<RequestBody<ReqBody>>, Response = Response<ResBody>> + Clone,
    ReqBody: Body,
    ResBody: Body<Data = Bytes>,
{
    type Response = Response<ResponseBody<ResBody>>;
    type Error = S::Error;
    type Future = ResponseFuture<S, ReqBody>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        let (parts, body) = request.into_parts();
        let peer = self.door.peer(&parts);
        self.decided(peer, parts, body)
    }
}
