//! Forward auth: a proxy asks for each request whether it may cross, and hands a denial to its client.
//!
//! The door rebuilds the client's request from the proxy's headers and passes it through the tower layer, with a service
//! inside that always answers 200. The layer finds the caller, decides, delays shadow bans and writes the answer as it does
//! in an application.

#[cfg(test)]
mod conformance;
mod original;
mod repeats;

use std::convert::Infallible;
use std::fmt;
use std::future::{Ready, ready};
use std::net::{IpAddr, SocketAddr};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use arc_swap::ArcSwapOption;
use axum::body::Body;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use http_body::{Frame, SizeHint};
use http_body_util::{BodyExt as _, Empty};
use pin_project_lite::pin_project;
use threshold_core::headers::{BodyForm, Refusal, refusal_body};
use threshold_core::{Digest, Policy, Span, Timestamp, TraceId};
use threshold_limiter::tower::{RequestBody, ResponseBody, ResponseFuture, ThresholdService};
use tower_service::Service;

use super::request_ids::{ProxyClaim, RequestIds};
use super::token_guesses::{Callers, Shown};
use super::{Answering, ApiError, App};
use crate::desk::{Desk, new_trace};
use crate::log::{LogSampler, shown_address};

/// The path that proxies call.
pub(super) const PATH: &str = "/auth";
/// What Envoy's external authorization over HTTP puts before the path of its client's request (`path_prefix`).
const PREFIX: &str = "/auth/";
/// The proxy's token. `Authorization` is its client's.
pub(super) const TOKEN: HeaderName = HeaderName::from_static("x-threshold-token");
/// The status of a denial, for a proxy that does not pass it on.
const STATUS: HeaderName = HeaderName::from_static("x-threshold-status");
/// The trace id of a request, as `threshold_core::headers::TRACE_ID` spells it.
const TRACE_ID: HeaderName = HeaderName::from_static("x-trace-id");
/// The format of a denial's body: `json`, `problem` or `text`.
const FORM: HeaderName = HeaderName::from_static("x-threshold-form");
/// The body of a denial, in one line.
const BODY: HeaderName = HeaderName::from_static("x-threshold-body");
/// The longest body in a header field. nginx reads a head of 16 KiB as configured in deploy/nginx, and the other fields have
/// to fit too.
const MAX_HEADER_BODY: usize = 8 << 10;

/// The state of the door.
pub(super) struct ForwardAuth {
    gate: ThresholdService<AllowedService>,
    /// The gate of Envoy, which delays requests itself.
    envoy_gate: ThresholdService<AllowedService>,
    /// Samples the refused proxies.
    refusals: LogSampler,
    /// The last peer that was taken for a client, and when.
    untrusted: ArcSwapOption<(IpAddr, Timestamp)>,
}

impl ForwardAuth {
    pub(super) fn new(desk: &Desk) -> Self {
        use tower_layer::Layer as _;
        // The 200 of the service inside is not the application's answer. A rule with `count` would take it for one.
        let layer = desk.layer().decision_only();
        let envoy = layer.clone().delay_field(super::ext_authz::DELAY);
        let (gate, envoy_gate) = (layer.layer(AllowedService), envoy.layer(AllowedService));
        Self { gate, envoy_gate, refusals: LogSampler::default(), untrusted: ArcSwapOption::empty() }
    }

    /// Returns the gate of Envoy. The field [`DELAY`](super::ext_authz::DELAY) of its answer says how long to delay a request.
    pub(super) fn envoy_gate(&self) -> ThresholdService<AllowedService> {
        self.envoy_gate.clone()
    }
}

impl fmt::Debug for ForwardAuth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ForwardAuth").finish_non_exhaustive()
    }
}

/// Parses the path and the query of a request as a proxy tells it, and the host of an absolute URI.
pub(super) fn original_uri(text: &[u8]) -> Result<(Option<&[u8]>, http::Uri), ApiError> {
    original::uri(text)
}

/// Whether a request describes another one, as a proxy's does.
pub(super) fn describes_a_request(headers: &HeaderMap) -> bool {
    original::is_described(headers)
}

/// Whether a request with this path is a proxy's.
pub(super) fn is_asked_at(path: &str) -> bool {
    path == PATH || path.starts_with(PREFIX)
}

/// Answers a proxy. Every method is accepted: Traefik can be configured to use its client's, and Envoy always does.
pub(super) fn answer(app: &Arc<App>, peer: SocketAddr, parts: Parts) -> Answering {
    // Read before the URI is replaced by the client's, whose query could contain the same words. Below the prefix it is the client's.
    let deny = match parts.uri.path() == PATH {
        true => DenialForm::from_query(parts.uri.query()),
        false => DenialForm::PassThrough,
    };
    let token = parts.headers.get(TOKEN);
    // Before anything of the request is parsed, and before its description is believed.
    if !app.token_guesses.admits(Shown::Token(token)) {
        let (app, token) = (Arc::clone(app), token.cloned());
        return Answering::Boxed { future: Box::pin(async move { unauthorized(&app, peer, token.as_ref()).await }) };
    }
    match ask(app, peer, parts, deny) {
        Ok(answering) => answering,
        Err(error) => {
            let trace = new_trace();
            app.forward_auth.log_refusal(&error, peer.ip(), trace, &app.desk);
            Answering::now(deny.refuse(&error, &app.desk.policy(), trace))
        }
    }
}

/// Refuses a proxy without a valid token, and counts a wrong one. The token is the proxy's own, so the answer is one of the API
/// whatever form the proxy wants for its clients; nginx passes on 401 by itself.
async fn unauthorized(app: &App, peer: SocketAddr, token: Option<&HeaderValue>) -> Response {
    // The reason is ignored: the token is the proxy's, and its client must not get a 429 for it.
    let _ = app.token_guesses.admit(Shown::Token(token), Callers::Only, Some(peer.ip()), app).await;
    let message = "send X-Threshold-Token with a token of this server";
    let error = ApiError::new(StatusCode::UNAUTHORIZED, "unauthorized", message);
    let trace = new_trace();
    app.forward_auth.log_refusal(&error, peer.ip(), trace, &app.desk);
    traced(error.into_response(), trace)
}

/// Adds the trace id of a request to its answer.
pub(super) fn traced(mut response: Response, trace: TraceId) -> Response {
    if let Ok(trace) = HeaderValue::try_from(trace.to_string()) {
        response.headers_mut().insert(TRACE_ID, trace);
    }
    response
}

fn ask(app: &Arc<App>, peer: SocketAddr, mut parts: Parts, deny: DenialForm) -> Result<Answering, ApiError> {
    let mut question = None;
    // A dual-stack listener sees IPv4 peers as IPv4-mapped addresses, and the policy lists them as IPv4.
    let length = if is_trusted(app, peer.ip().to_canonical()) {
        let length = match parts.uri.path() == PATH {
            true => original::restore_request(&mut parts)?,
            false => original::remove_prefix(&mut parts, PATH)?,
        };
        // After the request is restored: the digest covers what is decided, and not how the proxy happens to write
        // it.
        question = repeats::question(&app.request_ids, peer.ip().to_canonical(), &parts, length)?;
        length
    } else {
        // Not refused: a client that reaches the server directly is limited like any other, by its own address.
        app.forward_auth.warn_untrusted(peer.ip(), &app.desk);
        0
    };
    // A denial of a gRPC request is a 200 with a status in the trailers, and a 200 means to a proxy that it may cross.
    parts.headers.remove(CONTENT_TYPE);
    let asked = http::Request::from_parts(parts, DeclaredBody(length));
    // Only a question with an id on a shared store needs a boxed future. All others stay on the path without an
    // allocation.
    if let (Some(question), Some(_)) = (question, app.request_ids.shared()) {
        let future = Box::pin(ask_once(Arc::clone(app), peer, asked, question, deny));
        return Ok(Answering::Boxed { future });
    }
    let now = || app.desk.now();
    if let Some(fields) = question.and_then(|question| app.request_ids.proxy_answer(question, now())) {
        return Ok(Answering::now(repeated_answer(fields)));
    }
    let answer = app.forward_auth.gate.clone().call_from(Some(peer), asked);
    let repeated =
        question.map(|question| RepeatableQuestion { question, now: now(), ids: Arc::clone(&app.request_ids) });
    Ok(Answering::ForwardAuth { future: GateAnswer { answer, deny, repeated } })
}

/// Answers a question that the proxy may repeat to any node that shares the store.
async fn ask_once(
    app: Arc<App>,
    peer: SocketAddr,
    asked: http::Request<DeclaredBody>,
    question: Digest,
    deny: DenialForm,
) -> Response {
    let mut first = None;
    if let Some(shared) = app.request_ids.shared() {
        match ProxyClaim::begin(shared, question).await {
            Ok(fields) => return repeated_answer(fields),
            Err(begun) => first = begun,
        }
    }
    let Ok(response) = app.forward_auth.gate.clone().call_from(Some(peer), asked).await;
    if let Some(first) = first {
        // A denial charges nothing and is not remembered. The repeat may be allowed.
        first.end((response.status() == StatusCode::OK).then(|| response.headers())).await;
    }
    deny.apply(response)
}

/// Builds the answer to a repeated question, which was allowed before.
fn repeated_answer(fields: HeaderMap) -> Response {
    let mut response = Response::new(Body::empty());
    *response.headers_mut() = fields;
    response
}

/// A question that the proxy may repeat, and where to remember its answer.
struct RepeatableQuestion {
    question: Digest,
    now: Timestamp,
    ids: Arc<RequestIds>,
}

pin_project! {
    /// The gate's answer, in the form that the proxy wants. On a store in memory it is
    /// pending only for shadow bans and strikes.
    pub(super) struct GateAnswer {
        #[pin]
        answer: ResponseFuture<AllowedService, DeclaredBody>,
        deny: DenialForm,
        repeated: Option<RepeatableQuestion>,
    }
}

impl Future for GateAnswer {
    type Output = Response;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Response> {
        let this = self.project();
        this.answer.poll(cx).map(|Ok(response)| {
            if let Some(RepeatableQuestion { question, now, ids }) = this.repeated.take()
                && response.status() == StatusCode::OK
            {
                // Denials are not remembered: they charge nothing, and a repeat may be allowed.
                ids.remember_proxy_answer(question, now, response.headers());
            }
            this.deny.apply(response)
        })
    }
}

/// Whether a peer may describe the requests of others. An untrusted peer is decided as a client itself.
fn is_trusted(app: &App, peer: IpAddr) -> bool {
    app.desk.policy().identity().address.trusts(peer)
}

impl ForwardAuth {
    /// Logs why a proxy was refused. Its clients cannot correct it, and some proxies discard the answer.
    fn log_refusal(&self, error: &ApiError, peer: IpAddr, trace: TraceId, desk: &Desk) {
        let Some(left_out) = self.refusals.sample(desk.now()) else { return };
        tracing::warn!(
            status = error.status.as_u16(),
            peer = shown_address(peer, &desk.policy()),
            message = error.body.message(),
            trace_id = %trace,
            left_out,
            "refused at /auth"
        );
    }

    /// Warns of a proxy that is missing in `trusted_proxies`: its clients share one budget, and rules by path match none.
    fn warn_untrusted(&self, peer: IpAddr, desk: &Desk) {
        let Some(left_out) = self.refusals.sample(desk.now()) else { return };
        // In full: it is a machine of the operator, and what has to be listed.
        let peer = peer.to_canonical();
        self.untrusted.store(Some(Arc::new((peer, desk.now()))));
        tracing::warn!(%peer, left_out, "peer at /auth is not in trusted_proxies: it is decided as a client itself");
    }
}

impl ForwardAuth {
    /// Returns the peer that was last taken for a client, unless that was more than an hour ago or it is trusted by now.
    pub(super) fn untrusted(&self, desk: &Desk) -> Option<IpAddr> {
        let (peer, at) = *self.untrusted.load_full()?;
        let is_present = desk.now().since(at) < Span::HOUR;
        (is_present && !desk.policy().identity().address.trusts(peer)).then_some(peer)
    }
}

/// How a proxy wants its denials.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DenialForm {
    /// As the client shall get it: the proxy passes it on.
    PassThrough,
    /// As 403, with the answer in header fields: nginx's `auth_request` passes on no other status and no body.
    Forbidden,
}

impl DenialForm {
    /// Reads `?deny=403`, which is compared undecoded. Other parameters are ignored: Caddy's `forward_auth` adds those of its
    /// client's request.
    fn from_query(query: Option<&str>) -> Self {
        let forbidden = query.is_some_and(|query| query.split('&').any(|pair| pair == "deny=403"));
        if forbidden { Self::Forbidden } else { Self::PassThrough }
    }
}

impl DenialForm {
    fn apply(self, response: GateResponse) -> Response {
        match (self, response.status()) {
            // The body is empty. Replacing it avoids boxing the gate's body.
            (_, StatusCode::OK) => Response::from_parts(response.into_parts().0, Body::empty()),
            (Self::PassThrough, _) => response.map(Body::new),
            (Self::Forbidden, _) => forbidden(response),
        }
    }

    /// Answers a proxy's invalid question. The client may have caused it and shall then see why, in the form of all refusals.
    fn refuse(self, error: &ApiError, policy: &Policy, trace: TraceId) -> Response {
        let (status, body) = (error.status.as_u16(), &error.body);
        let refusal = Refusal { status, code: body.code(), message: body.message(), field: body.field() };
        let body = refusal_body(refusal, policy, trace, BodyForm::Json);
        let mut response = traced(Response::new(Body::from(body.text)), trace);
        *response.status_mut() = error.status;
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(body.content_type));
        match self {
            Self::PassThrough => response,
            Self::Forbidden => forbidden(response),
        }
    }
}

/// The gate's response.
type GateResponse = http::Response<ResponseBody<Empty<Bytes>>>;

/// Converts a denial for a proxy that only passes on 403.
fn forbidden<B: http_body::Body<Data = Bytes>>(response: http::Response<B>) -> Response {
    let (mut parts, body) = response.into_parts();
    // The body of a denial is one frame that is ready, so that one poll collects it.
    let text = match pin!(body.collect()).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(Ok(text)) => text.to_bytes(),
        Poll::Ready(Err(_)) | Poll::Pending => Bytes::new(),
    };
    let headers = &mut parts.headers;
    // Before the status is overwritten. nginx restores the answer from these fields in an `error_page`.
    headers.insert(STATUS, HeaderValue::from(parts.status.as_u16()));
    headers.insert(FORM, form(headers));
    if let Some(line) = one_line(&text) {
        headers.insert(BODY, line);
    }
    parts.status = StatusCode::FORBIDDEN;
    Response::from_parts(parts, Body::from(text))
}

fn form(headers: &HeaderMap) -> HeaderValue {
    HeaderValue::from_static(match headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes) {
        Some(b"application/json") => "json",
        Some(b"application/problem+json") => "problem",
        _ => "text",
    })
}

/// Returns a body as a header value, or `None` if it is too long. Control characters become spaces: in JSON, they occur only
/// between tokens, where a space means the same.
fn one_line(text: &[u8]) -> Option<HeaderValue> {
    if text.len() > MAX_HEADER_BODY {
        return None;
    }
    let line: Vec<u8> = text.iter().map(|byte| if byte.is_ascii_control() { b' ' } else { *byte }).collect();
    HeaderValue::from_bytes(&line).ok()
}

/// The service behind the gate, which answers 200: only allowed requests reach it.
#[derive(Debug, Clone, Copy)]
pub(super) struct AllowedService;

impl Service<http::Request<RequestBody<DeclaredBody>>> for AllowedService {
    type Response = http::Response<Empty<Bytes>>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: http::Request<RequestBody<DeclaredBody>>) -> Self::Future {
        ready(Ok(http::Response::new(Empty::new())))
    }
}

/// An empty body that declares the length of the client's body, which the proxy keeps.
#[derive(Debug, Clone, Copy)]
pub(super) struct DeclaredBody(pub(super) u64);

impl http_body::Body for DeclaredBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(None)
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.0)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use threshold_core::{Span, Timestamp};
    use threshold_limiter::ManualClock;

    use super::*;
    use crate::door::Bounds;
    use crate::serve::Tokens;

    const SHADOW_BAN: &str = r#"
        [identity]
        trusted_proxies = ["127.0.0.1/32"]
        user = "header:x-user"
        [ladders.mine]
        rungs = ["deny + shadow"]
        [[rule]]
        name = "posts"
        per = ["user"]
        limit = "1/min"
        algorithm = "sliding-log"
        ladder = "mine"
    "#;

    /// Asks for a user, and returns how long the answer took.
    async fn ask(app: &Arc<App>, user: &str) -> (Response, Duration) {
        let peer = SocketAddr::from(([127, 0, 0, 1], 4711));
        let request = http::Request::get("/auth").header("x-original-method", "GET").header("x-original-uri", "/");
        let (parts, ()) = request.header("x-user", user).body(()).unwrap().into_parts();
        let before = tokio::time::Instant::now();
        let Ok(response) = answer(app, peer, parts).await;
        (response, before.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn a_shadow_ban_is_delayed_and_not_disclosed() {
        let start = Timestamp::from_secs(1_767_225_600);
        let clock = Arc::new(ManualClock::new(start));
        let policy = Policy::parse(SHADOW_BAN, &|_| None).unwrap();
        let bounds = Bounds { client_timeout: Duration::MAX, ..Bounds::default() };
        let app = Arc::new(App::new(Desk::new(policy, Arc::clone(&clock) as _), Tokens::default(), bounds));
        for status in [200, 429] {
            let (response, waited) = ask(&app, "shadowed").await;
            assert_eq!((response.status().as_u16(), waited), (status, Duration::ZERO));
        }
        clock.set(start.plus(Span::from_secs(60)));
        let (clean, at_once) = ask(&app, "clean").await;
        let (shadowed, waited) = ask(&app, "shadowed").await;
        assert_eq!(at_once, Duration::ZERO);
        assert!((Duration::from_secs(1)..=Duration::from_secs(4)).contains(&waited), "{waited:?}");
        let fields = |response: &Response| {
            let mut headers = response.headers().clone();
            assert!(headers.remove(TRACE_ID).is_some());
            (response.status(), headers)
        };
        assert_eq!(fields(&shadowed), fields(&clean));
    }

    #[test]
    fn a_body_becomes_one_header_line_unless_it_is_too_long() {
        let check = |text: &str, expect: Option<&[u8]>| {
            assert_eq!(one_line(text.as_bytes()).as_ref().map(HeaderValue::as_bytes), expect);
        };
        check("{\"error\":\"caf\u{e9}\"}", Some("{\"error\":\"caf\u{e9}\"}".as_bytes()));
        check("{\r\n\t\"a\": 1\n}", Some(b"{   \"a\": 1 }"));
        check("", Some(b""));
        check(&"x".repeat(MAX_HEADER_BODY), Some("x".repeat(MAX_HEADER_BODY).as_bytes()));
        check(&"x".repeat(MAX_HEADER_BODY + 1), None);
    }

    #[test]
    fn a_denial_is_passed_through_unless_the_proxy_asks_for_403() {
        for whole in [None, Some(""), Some("deny"), Some("deny=429"), Some("x=1&xdeny=403"), Some("DenialForm=403")] {
            assert_eq!(DenialForm::from_query(whole), DenialForm::PassThrough, "{whole:?}");
        }
        for forbidden in ["deny=403", "deny=403&x=1", "x&deny=403"] {
            assert_eq!(DenialForm::from_query(Some(forbidden)), DenialForm::Forbidden, "{forbidden}");
        }
    }
}
