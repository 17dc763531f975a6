//! The HTTP doors on one router, the RESP door, and the state that they share.

mod admin;
mod alerts;
mod client_memory;
mod doctor;
pub(crate) mod envoy;
pub(crate) mod error;
mod events;
mod ext_authz;
mod forward_auth;
mod grpc;
pub(crate) mod health;
mod hosts;
mod http;
mod json_body;
mod login;
mod metrics;
#[cfg(test)]
mod observers;
mod openapi;
mod page;
mod policy;
mod query;
mod request_ids;
pub(crate) mod resp;
mod routes;
mod series;
mod session;
#[cfg(test)]
mod slow_clients;
mod sse;
mod stats;
#[cfg(test)]
mod test_server;
mod token_guesses;
mod turns;
mod usage;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::task::{Context, Poll};
use std::time::Duration;

use ::http::header::{AUTHORIZATION, CONTENT_TYPE};
use ::http::{HeaderMap, HeaderValue, Request, StatusCode};
use arc_swap::{ArcSwap, ArcSwapOption};
use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use axum::routing::future::RouteFuture;
use hyper::body::Incoming;
use pin_project_lite::pin_project;
use serde::Serialize;
use threshold_limiter::tower::PeerAddr;
use threshold_redis::RedisStore;
use tower_service::Service as _;

use crate::desk::{Desk, new_trace};
use crate::log::LogSampler;
use crate::otlp::Parent;
use crate::policy_file::PolicyFile;
use crate::serve::{ConnectionWatch, Tokens};
#[cfg(test)]
use crate::signals::database::Retention;
use crate::signals::sinks::Sinks;
use crate::signals::{Signals, database::EventDatabase};
use client_memory::ClientMemory;
pub(crate) use error::ApiError;
pub(crate) use grpc::GrpcCode;
pub(crate) use health::{Health, Problem};
pub(crate) use hosts::{HostName, Hosts};
use request_ids::RequestIds;
#[cfg(test)]
pub(crate) use test_server::KeyValueStore;
use token_guesses::{Shown, TokenGuesses};

/// The state that all doors share.
#[derive(Debug)]
pub(crate) struct App {
    pub(crate) desk: Desk,
    pub(crate) health: Health,
    pub(crate) bounds: Bounds,
    /// Memory for the answers to lists of requests.
    answer_memory: ClientMemory,
    /// Memory for the answers to operators. It is separate, so that they can list bans while callers use up their own.
    operator_answer_memory: ClientMemory,
    /// Memory for the answers to read-only tokens, which must not keep those who have to act from theirs.
    reader_answer_memory: ClientMemory,
    /// Memory for the bodies of requests, and for the messages of gRPC: callers over HTTP use up none of Envoy's.
    body_memory: ClientMemory,
    /// Memory for bodies of callers that are small.
    small_body_memory: ClientMemory,
    /// Memory for bodies of operators, and of read-only tokens, which must not keep each other from theirs, nor callers.
    operator_body_memory: ClientMemory,
    reader_body_memory: ClientMemory,
    anyones_body_memory: ClientMemory,
    message_memory: ClientMemory,
    request_ids: Arc<RequestIds>,
    token_guesses: TokenGuesses,
    event_reports: events::EventReports,
    event_streams: sse::Streams,
    series_streams: sse::Streams,
    sessions: session::Sessions,
    /// The text of the policy in force.
    pub(crate) policy_file: ArcSwap<PolicyFile>,
    /// Whether the traffic is made up.
    pub(crate) is_demo: AtomicBool,
    policy_turns: policy::PolicyTurns,
    /// Samples the requests that are refused for their headers.
    pub(crate) refused: LogSampler,
    forward_auth: forward_auth::ForwardAuth,
    /// The store that other nodes share, for questions about its servers.
    pub(crate) shared_store: ArcSwapOption<RedisStore>,
    resp_clients: resp::Clients,
    pub(crate) signals: Arc<Signals>,
}

/// The most bytes of large answers to operators and to read-only tokens, as [`Bounds::answers`] is for callers.
const OPERATOR_ANSWERS: usize = 16 << 20;
const READER_ANSWERS: usize = 8 << 20;
/// The most bytes of large bodies that are being read, and of large messages of gRPC.
const BODIES: usize = 32 << 20;
/// The same of operators, and of read-only tokens. One may be as large as any.
const OPERATORS_BODIES: usize = 8 << 20;
const READERS_BODIES: usize = 8 << 20;
/// The same of requests that need no token: sign-ins of pages, of a hundred bytes each.
const ANYONES_BODIES: usize = 1 << 20;

/// How much memory and time clients may take.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    /// The most connections at once.
    pub(crate) connections: usize,
    /// The most connections of one peer, unless it is a trusted proxy.
    pub(crate) connections_per_peer: usize,
    /// The most requests at once on connections of HTTP/2, each of which has many.
    pub(crate) requests: usize,
    /// The most of them of one peer, unless it is a trusted proxy.
    pub(crate) requests_per_peer: usize,
    /// The largest body, in bytes.
    pub(crate) body: usize,
    /// How long the server waits for a client: the bound on slow clients (slowloris).
    pub(crate) client_timeout: Duration,
    /// The most bytes of large answers that are being written or not yet read by their clients.
    pub(crate) answers: usize,
    /// The most bytes of answers that are remembered under the ids of their requests.
    pub(crate) request_ids: usize,
    /// How long a decision for Envoy waits for the store.
    pub(crate) envoy_deadline: Duration,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            // 16,384 heads of at most 16 KiB are 256 MiB. With the bounds in bytes below, this limits the memory of
            // all clients.
            connections: 16_384,
            connections_per_peer: 4_096,
            requests: 16_384,
            requests_per_peer: 4_096,
            body: 1 << 20,
            client_timeout: Duration::from_secs(30),
            answers: 64 << 20,
            request_ids: 128 << 20,
            // Envoy's filter waits for 20 ms by default, for everything.
            envoy_deadline: Duration::from_millis(10),
        }
    }
}

impl App {
    /// Events are kept in memory.
    #[cfg(test)]
    pub(crate) fn new(desk: Desk, tokens: Tokens, bounds: Bounds) -> Self {
        let events = EventDatabase::open(None, Retention::default(), desk.now());
        Self::with_events(desk, tokens, bounds, (events, Sinks::default()))
    }

    pub(crate) fn with_events(
        desk: Desk,
        tokens: Tokens,
        bounds: Bounds,
        (events, sinks): (EventDatabase, Sinks),
    ) -> Self {
        let forward_auth = forward_auth::ForwardAuth::new(&desk);
        let answer_memory = ClientMemory::for_answers(bounds.answers);
        let request_ids = Arc::new(RequestIds::of(&desk, bounds.request_ids));
        let signals = Arc::new(Signals::new(Arc::clone(&desk.events), events, sinks));
        signals.restore(&desk.policy(), desk.now());
        Self {
            desk,
            health: Health::default(),
            bounds,
            answer_memory,
            operator_answer_memory: ClientMemory::for_answers(OPERATOR_ANSWERS),
            reader_answer_memory: ClientMemory::for_answers(READER_ANSWERS),
            body_memory: ClientMemory::for_bodies(BODIES),
            small_body_memory: ClientMemory::for_bodies(BODIES),
            operator_body_memory: ClientMemory::for_bodies(OPERATORS_BODIES),
            reader_body_memory: ClientMemory::for_bodies(READERS_BODIES),
            anyones_body_memory: ClientMemory::for_bodies(ANYONES_BODIES),
            message_memory: ClientMemory::for_bodies(BODIES),
            request_ids,
            token_guesses: TokenGuesses::new(tokens),
            event_reports: events::EventReports::default(),
            event_streams: events::streams(),
            series_streams: series::streams(),
            sessions: session::Sessions::default(),
            policy_file: ArcSwap::default(),
            is_demo: AtomicBool::new(false),
            policy_turns: policy::PolicyTurns::default(),
            refused: LogSampler::default(),
            forward_auth,
            shared_store: ArcSwapOption::empty(),
            resp_clients: resp::Clients::default(),
            signals,
        }
    }

    /// Sets what is known only once the server starts: the store that other nodes share, and the text of the policy.
    pub(crate) fn know(&self, shared: Option<Arc<RedisStore>>, policy: PolicyFile) {
        self.shared_store.store(shared);
        self.policy_file.store(Arc::new(policy));
    }

    /// Counts the events of all decisions so far; see [`Signals::collect`].
    pub(crate) fn collect_events(&self) {
        self.signals.collect(&self.desk.policy(), self.desk.now());
    }

    /// Counts the events of all decisions so far, on a thread that may wait for a disk.
    async fn collected(self: &Arc<Self>) {
        let app = Arc::clone(self);
        // It fails only if it panics, and what was counted before is shown then.
        let _ = tokio::task::spawn_blocking(move || app.collect_events()).await;
    }

    /// Adds the decisions since the last call to the charts' series.
    pub(crate) fn add_to_series(&self) {
        let totals = self.desk.metrics.limiter.totals();
        crate::signals::lock(&self.signals.series).add(&totals, self.desk.keys(), self.desk.now());
    }

    /// Returns all metrics as OpenMetrics text, with gauges as of now.
    pub(crate) fn metrics_text(&self) -> String {
        self.signals.update(&self.desk.metrics);
        self.health.update(&self.desk.metrics);
        self.desk.metrics.text()
    }
}

/// The users of a listener, by which its routes are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Audience {
    Everyone,
    /// Callers and proxies; operators have a listener of their own.
    Callers,
    Operators,
    /// Proxies that speak gRPC, which has no routes.
    Grpc,
}

/// The service that answers every HTTP request.
#[derive(Debug, Clone)]
pub(crate) struct Doors {
    app: Arc<App>,
    hosts: Hosts,
    audience: Audience,
    router: Router,
}

impl Doors {
    /// Builds the router. `hosts` are the names that requests may call the server by.
    pub(crate) fn new(app: Arc<App>, hosts: Hosts, audience: Audience) -> Self {
        Self { router: router(Arc::clone(&app), audience), hosts, audience, app }
    }

    /// Returns the state that all doors share.
    pub(crate) fn app(&self) -> &App {
        &self.app
    }

    /// Whether they are on a listener for operators alone.
    pub(crate) fn are_for_operators(&self) -> bool {
        self.audience == Audience::Operators
    }

    /// Whether a request shows that its client may use this listener: it has a right token, or needs none.
    pub(crate) fn shows_right(&self, peer: SocketAddr, headers: &HeaderMap) -> bool {
        let (tokens, authorization) = (&self.app.token_guesses, headers.get(AUTHORIZATION));
        let proxy = headers.get(forward_auth::TOKEN);
        let is_right = match self.audience {
            Audience::Operators => tokens.is_operators(authorization),
            Audience::Everyone | Audience::Callers | Audience::Grpc => {
                tokens.is_any(authorization) || tokens.admits(Shown::Token(proxy))
            }
        };
        let is_shown = authorization.is_some() || proxy.is_some();
        let is_proof = if is_shown { tokens.is_proof(is_right, peer.ip(), &self.app) } else { is_right };
        is_proof || session::is_signed_in(&self.app, headers)
    }

    /// Whether a request to the listener for operators, which has shown a right, shows that of a read-only token.
    pub(crate) fn only_reads(&self, headers: &HeaderMap) -> bool {
        self.are_for_operators() && {
            let session = session::authorization(&self.app, headers);
            self.app.token_guesses.only_reads(headers.get(AUTHORIZATION).or(session.as_ref()))
        }
    }

    /// Answers a request from `peer`.
    pub(crate) fn call(&self, peer: SocketAddr, watch: &ConnectionWatch, request: Request<Incoming>) -> Answering {
        if let Some(parent) = Parent::of(request.headers()) {
            let answering = parent.within(|| self.answer(peer, watch, request));
            let future = parent.carried(async move {
                let Ok(response) = answering.await;
                response
            });
            return Answering::Boxed { future: Box::pin(future) };
        }
        self.answer(peer, watch, request)
    }

    /// The check of `Host` comes first, so that no route can be reached by DNS rebinding. Forward auth does not go through the
    /// router: it is called for every request of a whole site, and routing took longer than deciding.
    fn answer(&self, peer: SocketAddr, watch: &ConnectionWatch, mut request: Request<Incoming>) -> Answering {
        // No page can reach it: browsers speak no gRPC, and its content type needs a CORS preflight, which is not answered.
        if self.audience == Audience::Grpc {
            return Answering::Boxed { future: Box::pin(grpc::answer(Arc::clone(&self.app), peer, request)) };
        }
        if let Err(refusal) = self.hosts.check(request.version(), request.uri(), request.headers()) {
            let trace = new_trace();
            if let Some(left_out) = self.app.refused.sample(self.app.desk.now()) {
                refusal.log(trace, left_out);
            }
            return Answering::now(forward_auth::traced(ApiError::from(refusal).into_response(), trace));
        }
        // The body is dropped unread: a proxy asks without one.
        if forward_auth::is_asked_at(request.uri().path()) && self.audience != Audience::Operators {
            return forward_auth::answer(&self.app, peer, request.into_parts().0);
        }
        let method = request.method().clone();
        session::authorize(&self.app, &method, request.headers_mut());
        // Set here and never read from a header, so that a client cannot choose the address that its wrong tokens are
        // counted by.
        request.extensions_mut().insert(PeerAddr(peer));
        request.extensions_mut().insert(watch.clone());
        // `Router::poll_ready` always returns ready, so it need not be polled first.
        Answering::Routed { future: self.router.clone().call(request) }
    }
}

pin_project! {
    /// An answer that is ready, or the future of one.
    #[project = AnsweringProjected]
    pub(crate) enum Answering {
        Now { response: Option<Response> },
        Boxed { future: Pin<Box<dyn Future<Output = Response> + Send>> },
        ForwardAuth { #[pin] future: forward_auth::GateAnswer },
        Routed { #[pin] future: RouteFuture<Infallible> },
    }
}

impl Answering {
    /// Answers with an error, without routing the request.
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
            AnsweringProjected::Now { response } => {
                Poll::Ready(Ok(response.take().expect("a future is not polled again once it is ready")))
            }
            AnsweringProjected::Boxed { future } => future.as_mut().poll(cx).map(Ok),
            AnsweringProjected::ForwardAuth { future } => future.poll(cx).map(Ok),
            AnsweringProjected::Routed { future } => future.poll(cx),
        }
    }
}

fn router(app: Arc<App>, audience: Audience) -> Router {
    // The addresses of listeners are no business of callers.
    let elsewhere = match audience {
        Audience::Everyone => "",
        Audience::Callers => "; operators' calls are served by their own listener (--admin)",
        Audience::Grpc => "",
        Audience::Operators => "; callers' and proxies' calls are served by their own listener (--http)",
    };
    routes::router(audience)
        .fallback(move |State(app): State<Arc<App>>, headers: HeaderMap| async move {
            // Before 404, of which a gRPC client shows only that the method is not implemented.
            if let Some(answer) = grpc::misdirected(&app, &headers) {
                return answer;
            }
            let message = format!("there is nothing at this path{elsewhere}");
            ApiError::new(StatusCode::NOT_FOUND, "not_found", message).into_response()
        })
        .method_not_allowed_fallback(move || async move {
            let message = format!("this path takes another method, see Allow{elsewhere}");
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
        })
        .with_state(app)
}

/// Builds an answer in JSON.
fn json<T: Serialize>(status: StatusCode, body: &T) -> Response {
    json_bytes(status, threshold_wire::to_json(body))
}

/// Builds an answer from encoded JSON.
fn json_bytes(status: StatusCode, body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
