//! The doors on one router, and what they share.

mod admin;
#[cfg(test)]
mod crowd;
pub(crate) mod error;
mod forward_auth;
mod guesses;
pub(crate) mod health;
mod hosts;
mod http;
mod large;
mod login;
mod metrics;
#[cfg(test)]
mod observed;
mod request_ids;
mod sent;
#[cfg(test)]
mod serving;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use ::http::header::CONTENT_TYPE;
use ::http::{HeaderValue, Request, StatusCode};
use axum::Router;
use axum::body::Body;
use axum::response::{IntoResponse as _, Response};
use axum::routing::future::RouteFuture;
use hyper::body::Incoming;
use pin_project_lite::pin_project;
use serde::Serialize;
use threshold_core::text::printable;
use threshold_limiter::tower::PeerAddr;
use tower_service::Service as _;

use crate::desk::Desk;
use crate::log::Samples;
use crate::serve::{Line, Tokens};
pub(crate) use error::ApiError;
pub(crate) use health::{Health, Trouble};
pub(crate) use hosts::{HostName, Hosts};
use large::LargeAnswers;
use request_ids::RequestIds;
#[cfg(test)]
pub(crate) use serving::KeyValueStore;

/// What every door is given.
#[derive(Debug)]
pub(crate) struct App {
    pub(crate) desk: Desk,
    pub(crate) tokens: Tokens,
    pub(crate) health: Health,
    pub(crate) bounds: Bounds,
    large: LargeAnswers,
    /// What operators list has room of its own: they must see whom to ban while callers use up theirs.
    listed: LargeAnswers,
    request_ids: Arc<RequestIds>,
    guesses: guesses::Guesses,
    /// Which requests that were refused for their headers become a line of the log.
    pub(crate) refused: Samples,
    forward_auth: forward_auth::ForwardAuth,
}

/// The most bytes of what operators list, as [`Bounds::answers`] for callers.
const LISTED: usize = 16 << 20;

/// What a client may ask of the server's memory and patience.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    /// The most connections at once.
    pub(crate) connections: usize,
    /// The most connections of one peer that is no trusted proxy.
    pub(crate) connections_per_peer: usize,
    /// The largest body, in bytes.
    pub(crate) body: usize,
    /// How long a client may keep the server waiting.
    pub(crate) patience: Duration,
    /// The most bytes of large answers that are made or not yet read.
    pub(crate) answers: usize,
    /// The most bytes of answers that are remembered by the ids of their requests.
    pub(crate) request_ids: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            connections: 16_384,
            connections_per_peer: 4_096,
            body: 1 << 20,
            patience: Duration::from_secs(30),
            answers: 64 << 20,
            request_ids: 128 << 20,
        }
    }
}

impl App {
    pub(crate) fn new(desk: Desk, tokens: Tokens, bounds: Bounds) -> Self {
        let forward_auth = forward_auth::ForwardAuth::new(&desk);
        let (large, listed) = (LargeAnswers::new(bounds.answers), LargeAnswers::new(LISTED));
        let request_ids = Arc::new(RequestIds::of(&desk, bounds.request_ids));
        let (health, guesses, refused) = (Health::default(), guesses::Guesses::default(), Samples::default());
        Self { desk, tokens, health, bounds, large, listed, request_ids, guesses, refused, forward_auth }
    }
}

/// All doors that speak HTTP.
#[derive(Debug, Clone)]
pub(crate) struct Doors {
    app: Arc<App>,
    hosts: Hosts,
    router: Router,
}

impl Doors {
    /// `hosts` are the names by which requests may call.
    pub(crate) fn new(app: Arc<App>, hosts: Hosts) -> Self {
        Self { router: router(Arc::clone(&app)), hosts, app }
    }

    /// What all doors share.
    pub(crate) fn app(&self) -> &App {
        &self.app
    }

    /// Answers a request from `peer`. Forward auth does not go through the router: it is asked for every request of a whole
    /// site, and finding the way took longer than deciding.
    pub(crate) fn call(&self, peer: SocketAddr, line: &Line, mut request: Request<Incoming>) -> Answering {
        if let Err(refusal) = self.hosts.check(request.version(), request.uri(), request.headers()) {
            if let Some(left_out) = self.app.refused.take(self.app.desk.now()) {
                refusal.tell(left_out);
            }
            return Answering::now(ApiError::from(refusal).into_response());
        }
        if request.uri().path() == forward_auth::PATH {
            return forward_auth::answer(&self.app, peer, request.into_parts().0);
        }
        request.extensions_mut().insert(PeerAddr(peer));
        request.extensions_mut().insert(line.clone());
        // A router is always ready.
        Answering::Routed { future: self.router.clone().call(request) }
    }
}

pin_project! {
    /// An answer that is there, or is waited for.
    #[project = AnsweringProjected]
    pub(crate) enum Answering {
        Now { response: Option<Response> },
        Late { future: Pin<Box<dyn Future<Output = Response> + Send>> },
        Proxied { #[pin] future: forward_auth::Proxied },
        Routed { #[pin] future: RouteFuture<Infallible> },
    }
}

impl Answering {
    /// A request that is not even looked at.
    pub(crate) fn refusing(error: ApiError) -> Self {
        Self::now(error.into_response())
    }

    fn now(response: Response) -> Self {
        Self::Now { response: Some(response) }
    }
}

impl Future for Answering {
    type Output = Result<Response, Infallible>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project() {
            AnsweringProjected::Now { response } => Poll::Ready(Ok(response.take().expect("it is polled once"))),
            AnsweringProjected::Late { future } => future.as_mut().poll(cx).map(Ok),
            AnsweringProjected::Proxied { future } => future.poll(cx).map(Ok),
            AnsweringProjected::Routed { future } => future.poll(cx),
        }
    }
}

fn router(app: Arc<App>) -> Router {
    Router::new()
        .merge(health::routes())
        .merge(metrics::routes())
        .merge(http::routes())
        .merge(login::routes())
        .merge(admin::routes())
        .fallback(|| async { ApiError::new(StatusCode::NOT_FOUND, "not_found", "there is nothing at this path") })
        .method_not_allowed_fallback(|| async {
            let message = "this path takes another method; see Allow";
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
        })
        .with_state(app)
}

/// An answer in JSON. It may quote what others have written, and somebody may read it at a terminal: what a terminal would
/// obey is escaped, which in JSON says the same.
fn json<T: Serialize>(status: StatusCode, body: &T) -> Response {
    let text = serde_json::to_string(body).unwrap_or_default();
    json_bytes(status, printable(&text).into_owned())
}

/// An answer that is JSON already.
fn json_bytes(status: StatusCode, body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
