//! Forward auth: a proxy asks for each request whether it may cross, and hands the answer to its client.
//!
//! It is the tower layer around nothing: what the proxy tells of a request is put in the place of the proxy's own, and the
//! layer then finds the caller, decides, waits out shadow bans and words the answer as it does in an application.

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

use axum::body::Body;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use http_body::{Frame, SizeHint};
use http_body_util::{BodyExt as _, Empty};
use pin_project_lite::pin_project;
use threshold_core::{Digest, Timestamp};
use threshold_limiter::tower::{RequestBody, ResponseBody, ResponseFuture, ThresholdService};
use tower_service::Service;

use super::request_ids::{OwnedQuestion, RequestIds};
use super::{Answering, ApiError, App};
use crate::desk::Desk;
use crate::log::{Samples, shown_address};

/// Where proxies ask.
pub(super) const PATH: &str = "/auth";
/// Where a proxy shows its token. `Authorization` is its client's.
const TOKEN: HeaderName = HeaderName::from_static("x-threshold-token");
/// The status that a denial has where the proxy does not pass it on.
const STATUS: HeaderName = HeaderName::from_static("x-threshold-status");
/// The form of its body: `json`, `problem` or `text`.
const FORM: HeaderName = HeaderName::from_static("x-threshold-form");
/// Its body, in one line.
const BODY: HeaderName = HeaderName::from_static("x-threshold-body");
/// The longest body that travels in a header field. nginx reads a head of 16 KiB as configured in deploy/nginx, and the
/// other fields have to fit in as well.
const MAX_CARRIED: usize = 8 << 10;

/// What the door keeps between requests.
pub(super) struct ForwardAuth {
    gate: ThresholdService<Crosses>,
    /// Which proxies that were turned away become a line of the log.
    refusals: Samples,
}

impl ForwardAuth {
    pub(super) fn new(desk: &Desk) -> Self {
        use tower_layer::Layer as _;
        let layer = desk.layer().decision_only();
        Self { gate: layer.layer(Crosses), refusals: Samples::default() }
    }
}

impl fmt::Debug for ForwardAuth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ForwardAuth").finish_non_exhaustive()
    }
}

/// Whether a request here describes another one, as proxies do.
pub(super) fn describes_a_request(headers: &HeaderMap) -> bool {
    original::is_described(headers)
}

/// Answers a proxy. Any method will do: Traefik can be told to ask with its client's.
pub(super) fn answer(app: &Arc<App>, peer: SocketAddr, parts: Parts) -> Answering {
    let deny = Deny::asked(parts.uri.query());
    let token = parts.headers.get(TOKEN);
    if !app.tokens.admit_proxy(token) {
        let is_wrong = token.is_some();
        let app = Arc::clone(app);
        return Answering::Late {
            future: Box::pin(async move { deny.refuse(unauthorized(&app, peer, is_wrong).await) }),
        };
    }
    match ask(app, peer, parts, deny) {
        Ok(answering) => answering,
        Err(error) => {
            app.forward_auth.tell(&error, peer.ip(), &app.desk);
            Answering::now(deny.refuse(error))
        }
    }
}

/// Turns a proxy away that showed no token, or a wrong one, which is counted.
async fn unauthorized(app: &App, peer: SocketAddr, is_wrong: bool) -> ApiError {
    if is_wrong {
        // The proxy's client has guessed nothing: it never reads 429 for it.
        let _ = app.guesses.caller(Some(peer.ip()), app).await;
    }
    let message = "send X-Threshold-Token and a token of this server";
    let error = ApiError::new(StatusCode::UNAUTHORIZED, "unauthorized", message);
    app.forward_auth.tell(&error, peer.ip(), &app.desk);
    error
}

fn ask(app: &Arc<App>, peer: SocketAddr, mut parts: Parts, deny: Deny) -> Result<Answering, ApiError> {
    let mut question = None;
    let length = if is_trusted(app, peer.ip().to_canonical()) {
        let length = original::put_in_place(&mut parts)?;
        question = repeats::question(&app.request_ids, peer.ip().to_canonical(), &parts, length)?;
        length
    } else {
        app.forward_auth.warn(peer.ip(), &app.desk);
        0
    };
    // gRPC's refusals are 200 with a code, and to a proxy 200 means that the request may cross.
    parts.headers.remove(CONTENT_TYPE);
    let asked = http::Request::from_parts(parts, Announced(length));
    if let (Some(question), Some(_)) = (question, app.request_ids.shared()) {
        let future = Box::pin(ask_once(Arc::clone(app), peer, asked, question, deny));
        return Ok(Answering::Late { future });
    }
    let now = || app.desk.now();
    if let Some(fields) = question.and_then(|question| app.request_ids.repeat(question, now())) {
        return Ok(Answering::now(crosses_again(fields)));
    }
    let told = app.forward_auth.gate.clone().call_from(Some(peer), asked);
    let repeated = question.map(|question| Repeated { question, now: now(), ids: Arc::clone(&app.request_ids) });
    Ok(Answering::Proxied { future: Proxied { told, deny, repeated } })
}

/// Answers a question that the proxy may ask again, of any node that shares the store.
async fn ask_once(
    app: Arc<App>,
    peer: SocketAddr,
    asked: http::Request<Announced>,
    question: Digest,
    deny: Deny,
) -> Response {
    let mut first = None;
    if let Some(shared) = app.request_ids.shared() {
        match OwnedQuestion::begin(shared, question).await {
            Ok(fields) => return crosses_again(fields),
            Err(begun) => first = begun,
        }
    }
    let Ok(response) = app.forward_auth.gate.clone().call_from(Some(peer), asked).await;
    if let Some(first) = first {
        first.end((response.status() == StatusCode::OK).then(|| response.headers())).await;
    }
    deny.word(response)
}

/// The answer to a request that may cross, as it was given before.
fn crosses_again(fields: HeaderMap) -> Response {
    let mut response = Response::new(Body::empty());
    *response.headers_mut() = fields;
    response
}

/// A question that the proxy may ask again.
struct Repeated {
    question: Digest,
    now: Timestamp,
    ids: Arc<RequestIds>,
}

pin_project! {
    /// What the gate says, worded for the proxy. Only shadow bans and strikes make it wait.
    pub(super) struct Proxied {
        #[pin]
        told: ResponseFuture<Crosses, Announced>,
        deny: Deny,
        repeated: Option<Repeated>,
    }
}

impl Future for Proxied {
    type Output = Response;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Response> {
        let this = self.project();
        this.told.poll(cx).map(|Ok(response)| {
            if let Some(Repeated { question, now, ids }) = this.repeated.take()
                && response.status() == StatusCode::OK
            {
                ids.keep(question, now, response.headers());
            }
            this.deny.word(response)
        })
    }
}

/// Whoever is not trusted cannot ask for others: the request is then the peer's own, whatever it says of anybody.
fn is_trusted(app: &App, peer: IpAddr) -> bool {
    app.desk.policy().identity().address.trusts(peer)
}

impl ForwardAuth {
    /// A proxy's clients cannot mend what is wrong with it, and some proxies drop what they are told: so it is logged.
    fn tell(&self, error: &ApiError, peer: IpAddr, desk: &Desk) {
        let Some(left_out) = self.refusals.take(desk.now()) else { return };
        tracing::warn!(
            status = error.status.as_u16(),
            peer = shown_address(peer, &desk.policy()),
            message = error.body.message(),
            left_out,
            "turned away at /auth"
        );
    }

    /// All clients of a proxy that somebody forgot to list share one budget, and rules by path hold for none of them.
    fn warn(&self, peer: IpAddr, desk: &Desk) {
        let Some(left_out) = self.refusals.take(desk.now()) else { return };
        let message = "a peer that is not one of the policy's trusted_proxies is decided as its own client";
        let peer = shown_address(peer, &desk.policy());
        tracing::warn!(peer, message, left_out, "not believed at /auth");
    }
}

/// How a denial is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Deny {
    /// As it is: the proxy hands it on.
    Whole,
    /// As 403, with the answer in header fields: nginx hands on nothing else.
    Forbidden,
}

impl Deny {
    /// Other parameters are not the proxy's: Caddy's `forward_auth` passes on those of its client's request.
    fn asked(query: Option<&str>) -> Self {
        let forbidden = query.is_some_and(|query| query.split('&').any(|pair| pair == "deny=403"));
        if forbidden { Self::Forbidden } else { Self::Whole }
    }
}

impl Deny {
    fn word(self, response: GateResponse) -> Response {
        match (self, response.status()) {
            // Nobody reads what is not there.
            (_, StatusCode::OK) => Response::from_parts(response.into_parts().0, Body::empty()),
            (Self::Whole, _) => response.map(Body::new),
            (Self::Forbidden, _) => forbidden(response),
        }
    }

    /// What a proxy is told that asked for something impossible. Its client may be the one to blame, and shall then read
    /// why; but a token is the proxy's own, and nginx hands on 401 by itself.
    fn refuse(self, error: ApiError) -> Response {
        let response = error.into_response();
        match (self, response.status()) {
            (Self::Whole, _) | (_, StatusCode::UNAUTHORIZED) => response,
            (Self::Forbidden, _) => forbidden(response),
        }
    }
}

/// What the gate answers.
type GateResponse = http::Response<ResponseBody<Empty<Bytes>>>;

/// The same denial for a proxy that passes on 403 alone.
fn forbidden<B: http_body::Body<Data = Bytes>>(response: http::Response<B>) -> Response {
    let (mut parts, body) = response.into_parts();
    // A refusal is one frame, which is there.
    let text = match pin!(body.collect()).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(Ok(text)) => text.to_bytes(),
        Poll::Ready(Err(_)) | Poll::Pending => Bytes::new(),
    };
    let headers = &mut parts.headers;
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

/// A body as a field can carry it. Line breaks become blanks, which in JSON says the same.
fn one_line(text: &[u8]) -> Option<HeaderValue> {
    if text.len() > MAX_CARRIED {
        return None;
    }
    let line: Vec<u8> = text.iter().map(|byte| if byte.is_ascii_control() { b' ' } else { *byte }).collect();
    HeaderValue::from_bytes(&line).ok()
}

/// What is behind the gate: a request that comes here may cross.
#[derive(Debug, Clone, Copy)]
struct Crosses;

impl Service<http::Request<RequestBody<Announced>>> for Crosses {
    type Response = http::Response<Empty<Bytes>>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: http::Request<RequestBody<Announced>>) -> Self::Future {
        ready(Ok(http::Response::new(Empty::new())))
    }
}

/// A body of so many bytes that never comes here.
#[derive(Debug, Clone, Copy)]
struct Announced(u64);

impl http_body::Body for Announced {
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

    use threshold_core::{Policy, Span, Timestamp};
    use threshold_limiter::ManualClock;

    use super::*;
    use crate::door::Bounds;
    use crate::serve::Tokens;

    const SHADOWED: &str = r#"
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

    /// Asks for a user, and says how long the answer took.
    async fn ask(app: &Arc<App>, user: &str) -> (Response, Duration) {
        let peer = SocketAddr::from(([127, 0, 0, 1], 4711));
        let request = http::Request::get("/auth").header("x-original-method", "GET").header("x-original-uri", "/");
        let (parts, ()) = request.header("x-user", user).body(()).unwrap().into_parts();
        let before = tokio::time::Instant::now();
        let Ok(response) = answer(app, peer, parts).await;
        (response, before.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn a_shadow_ban_is_waited_out_and_never_told() {
        let start = Timestamp::from_secs(1_767_225_600);
        let clock = Arc::new(ManualClock::new(start));
        let policy = Policy::parse(SHADOWED, &|_| None).unwrap();
        let bounds = Bounds { patience: Duration::MAX, ..Bounds::default() };
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
        assert_eq!((shadowed.status(), shadowed.headers()), (clean.status(), clean.headers()));
    }

    #[test]
    fn a_body_travels_in_one_line_or_not_at_all() {
        let check = |text: &str, expect: Option<&[u8]>| {
            assert_eq!(one_line(text.as_bytes()).as_ref().map(HeaderValue::as_bytes), expect);
        };
        check("{\"error\":\"caf\u{e9}\"}", Some("{\"error\":\"caf\u{e9}\"}".as_bytes()));
        check("{\r\n\t\"a\": 1\n}", Some(b"{   \"a\": 1 }"));
        check("", Some(b""));
        check(&"x".repeat(MAX_CARRIED), Some("x".repeat(MAX_CARRIED).as_bytes()));
        check(&"x".repeat(MAX_CARRIED + 1), None);
    }

    #[test]
    fn a_denial_is_told_whole_unless_it_must_be_a_403() {
        for whole in [None, Some(""), Some("deny"), Some("deny=429"), Some("x=1&xdeny=403"), Some("Deny=403")] {
            assert_eq!(Deny::asked(whole), Deny::Whole, "{whole:?}");
        }
        for forbidden in ["deny=403", "deny=403&x=1", "x&deny=403"] {
            assert_eq!(Deny::asked(Some(forbidden)), Deny::Forbidden, "{forbidden}");
        }
    }
}
