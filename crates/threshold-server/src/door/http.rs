//! The HTTP API: JSON in, decisions out. It decides nothing itself.

mod answer;
#[cfg(test)]
mod conformance;
mod limit;
#[cfg(test)]
mod lists;
mod openapi;
mod request;
mod schema;
mod text;
mod write;

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{FromRequestParts, State};
use axum::response::Response;
use axum::routing::{get, post};
use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use schemars::JsonSchema;
use serde::Serialize;
use threshold_core::plan::Verb;
use threshold_core::policy::Policy;
use threshold_core::receipt::{ActualCost, CommitError, MAX_RESERVATION};
use threshold_core::{Span, TraceId};
use threshold_limiter::store::EndError;
use tokio::task::yield_now;

use super::admin::caller_name;
use super::request_ids::{Named, Room};
use super::sent::{Caller, Sent};
use super::{ApiError, App, json, json_bytes};
use crate::desk::{Decided, Held, new_trace, strikes_wait};
use crate::explain::live_json;
use crate::serve::Line;
use answer::{Answer, USUAL_ANSWER, largest_answer};
pub(super) use request::{Address, LayerName, layer_named, read};
use request::{CommitBody, MAX_ITEMS, OneOrMany, PauseBody, RefundBody, ReleaseBody, RequestBody, read_requests};
use text::Pairs;
pub(super) use text::{Text, Whole};

/// Which of the policies that this process has used decided.
const GENERATION: HeaderName = HeaderName::from_static("x-threshold-generation");
/// How long a reservation lasts unless said, in seconds.
const RESERVATION: u64 = 60;
/// The longest that a check waits, in milliseconds.
const MAX_WAIT: u64 = 60_000;

/// An answer as it is sent.
#[derive(Debug, Clone)]
pub(super) struct Answered {
    pub(super) body: Bytes,
    /// Whether anything was charged.
    pub(super) charged: bool,
    /// Whether the store failed and the rules are closed then.
    pub(super) closed: bool,
    /// The policy it was decided under.
    pub(super) generation: u64,
}

/// Whether something was done.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Done")]
struct DoneBody {
    /// Whether there was anything to do it to.
    ok: bool,
    /// Of a refund: whether this was the first time.
    #[serde(skip_serializing_if = "Option::is_none")]
    first: Option<bool>,
}

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/v1/check", post(check))
        .route("/v1/peek", post(peek))
        .route("/v1/record", post(record))
        .route("/v1/explain", post(explain))
        .route("/v1/reserve", post(reserve))
        .route("/v1/commit", post(commit))
        .route("/v1/release", post(release))
        .route("/v1/refund", post(refund))
        .route("/v1/pause", post(pause))
        .route("/v1/limit", post(limit))
        .route("/check", post(limit))
        .route("/openapi.json", get(openapi))
}

async fn check(State(app): State<Arc<App>>, line: Line, wait: Wait, Sent(body): Sent) -> Result<Response, ApiError> {
    match wait.0 {
        None => decide(&app, &line, Verb::Check, &body).await,
        Some(at_most) => line.watch(wait_for_room(&app, &line, &body, at_most)).await,
    }
}

async fn peek(State(app): State<Arc<App>>, line: Line, Sent(body): Sent) -> Result<Response, ApiError> {
    decide(&app, &line, Verb::Peek, &body).await
}

async fn record(State(app): State<Arc<App>>, line: Line, Sent(body): Sent) -> Result<Response, ApiError> {
    decide(&app, &line, Verb::Record, &body).await
}

async fn explain(State(app): State<Arc<App>>, Sent(body): Sent) -> Result<Response, ApiError> {
    let request: RequestBody<'_> = read(&body)?;
    request.without_reservation()?;
    let policy = app.desk.policy();
    let lists = request.lists();
    let facts = request.facts(&lists, new_trace());
    let explained = app.desk.explain(&policy, &facts, |rules, decided| {
        live_json(&policy, &facts, rules, &decided.decision, &Answer::new(decided, &policy).to_json())
    });
    Ok(of_generation(json(StatusCode::OK, &explained.await?), policy.generation()))
}

async fn reserve(State(app): State<Arc<App>>, line: Line, Sent(body): Sent) -> Result<Response, ApiError> {
    let request: RequestBody<'_> = read(&body)?;
    let held = held(&request)?;
    let policy = app.desk.policy();
    let answered = once((&app, &line), "reserve", &request, None, async {
        let lists = request.lists();
        let facts = request.facts(&lists, new_trace());
        let read = |decided: &Decided| Answered::new(decided, &policy, "reserve");
        Ok(app.desk.reserve_saved(&policy, &facts, held, read).await?)
    });
    Ok(answered.await?.into_response())
}

async fn commit(State(app): State<Arc<App>>, Sent(body): Sent) -> Result<Response, ApiError> {
    let CommitBody { reservation, cost, bytes, costs } = read(&body)?;
    let costs = Pairs::costs(costs.as_ref());
    let actual = ActualCost { cost: cost.map(Whole::number), bytes: bytes.map(Whole::number), costs: &costs };
    match trace_id(reservation.as_str()) {
        Some(id) => ended(app.desk.commit(id, &actual).await),
        None => ended(Err(EndError::Unknown)),
    }
}

async fn release(State(app): State<Arc<App>>, Sent(body): Sent) -> Result<Response, ApiError> {
    let ReleaseBody { reservation } = read(&body)?;
    match trace_id(reservation.as_str()) {
        Some(id) => ended(app.desk.release(id).await),
        None => ended(Err(EndError::Unknown)),
    }
}

async fn refund(State(app): State<Arc<App>>, Sent(body): Sent) -> Result<Response, ApiError> {
    let RefundBody { receipt } = read(&body)?;
    let receipt = app.desk.read_receipt(receipt.as_str());
    let receipt = receipt.map_err(|_| ApiError::bad("receipt", "this is no receipt of this server"))?;
    let first = app.desk.refund(&receipt).await.map_err(|error| {
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", format!("nothing was given back: {error}"))
    })?;
    Ok(json(StatusCode::OK, &DoneBody { ok: true, first: Some(first) }))
}

async fn pause(State(app): State<Arc<App>>, headers: HeaderMap, Sent(body): Sent) -> Result<Response, ApiError> {
    let PauseBody { layer, key, seconds } = read(&body)?;
    let who = caller_name(&headers, &app);
    let ok = app.desk.pause(&who, layer.0, key.as_str(), seconds.number()).await?;
    Ok(json(StatusCode::OK, &DoneBody { ok, first: None }))
}

async fn limit(State(app): State<Arc<App>>, Sent(body): Sent) -> Result<Response, ApiError> {
    limit::answer(&app, &body).await
}

async fn openapi(_: Caller) -> Response {
    json_bytes(StatusCode::OK, openapi::document())
}

/// One request or a list of them, under one policy.
async fn decide(app: &App, line: &Line, verb: Verb, body: &[u8]) -> Result<Response, ApiError> {
    // Room for a list's answers is there before the list is read: it takes more memory read than sent.
    let room = match list_bytes(body, &app.desk.policy()) {
        None => None,
        Some(bytes) => Some(line.watch(app.large.room(bytes)).await?),
    };
    let asked = read_requests(body)?;
    let policy = app.desk.policy();
    match (&asked, room) {
        (OneOrMany::Many(requests), Some(room)) => {
            let Listed { body, closed } = answer_all((app, line), verb, requests, &policy).await?;
            let response = json_bytes(status(closed), room.body(body, app.bounds.patience));
            Ok(of_generation(response, policy.generation()))
        }
        (OneOrMany::One(request), _) => {
            request.without_reservation()?;
            Ok(answer((app, line), verb, request, &policy, strikes_wait(), None).await?.into_response())
        }
        (OneOrMany::Many(_), None) => {
            Err(ApiError::new(StatusCode::BAD_REQUEST, "bad_request", "a list begins with ["))
        }
    }
}

/// The most bytes that the answers to a list take, with its requests as they are read; nothing if this is no list. Every
/// request begins with a brace, and so does whatever else is counted along.
fn list_bytes(body: &[u8], policy: &Policy) -> Option<usize> {
    body.iter().find(|byte| !byte.is_ascii_whitespace()).filter(|byte| **byte == b'[')?;
    let items = memchr::memchr_iter(b'{', body).count().min(MAX_ITEMS);
    let each = largest_answer(policy).saturating_add(size_of::<RequestBody<'_>>());
    Some(items.saturating_mul(each).saturating_add(2))
}

/// A check that waits for room.
async fn wait_for_room(app: &App, line: &Line, body: &[u8], at_most: Duration) -> Result<Response, ApiError> {
    let OneOrMany::One(request) = read_requests(body)? else {
        return Err(ApiError::bad("waitMs", "one request can wait, a list cannot"));
    };
    request.without_reservation()?;
    let answered = once((app, line), "check", &request, None, async {
        let lists = request.lists();
        let facts = request.facts(&lists, new_trace());
        let read = |decided: &Decided, policy: &Policy| Answered::new(decided, policy, "check");
        Ok(app.desk.wait(&facts, at_most, read).await?)
    });
    Ok(answered.await?.into_response())
}

async fn answer(
    (app, line): (&App, &Line),
    verb: Verb,
    request: &RequestBody<'_>,
    policy: &Policy,
    by: Instant,
    room: Option<&mut Room<'_>>,
) -> Result<Answered, ApiError> {
    let name = name_of(verb);
    let decide = async {
        let lists = request.lists();
        let facts = request.facts(&lists, new_trace());
        let read = |decided: &Decided| Answered::new(decided, policy, name);
        Ok(app.desk.decide_saved(policy, verb, &facts, by, read).await?)
    };
    // What charges nothing is not remembered.
    if verb == Verb::Peek {
        return decide.await;
    }
    once((app, line), name, request, room, decide).await
}

/// The answers to a list.
struct Listed {
    body: Vec<u8>,
    /// Whether the store failed one of them and the rules are closed then.
    closed: bool,
}

/// A list is refused as a whole before anything of it is charged. Others have their turn after each item: a thousand of
/// them would keep a thread busy for as long as any other request may take.
async fn answer_all(
    (app, line): (&App, &Line),
    verb: Verb,
    requests: &[RequestBody<'_>],
    policy: &Policy,
) -> Result<Listed, ApiError> {
    for (index, request) in requests.iter().enumerate() {
        let planned = {
            let lists = request.lists();
            policy.plan_for(verb, &request.facts(&lists, TraceId::default())).map(|_| ())
        };
        let fine = request.without_reservation().and(planned.map_err(ApiError::from));
        fine.map_err(|error| error.at(Some(index)))?;
        yield_now().await;
    }
    let (places, ids): (Vec<usize>, Vec<Named>) = requests
        .iter()
        .enumerate()
        .filter(|_| verb != Verb::Peek)
        .filter_map(|(index, request)| Some((index, named(app, name_of(verb), request)?)))
        .unzip();
    let room = app.request_ids.open(&ids, || app.desk.now()).await;
    let mut room = room
        .map_err(|(place, refused)| ApiError::from(refused).at(place.and_then(|place| places.get(place).copied())))?;
    let mut listed = Listed { body: Vec::new(), closed: false };
    listed.body.reserve_exact(requests.len().saturating_mul(USUAL_ANSWER).saturating_add(2));
    // However many of them strike, the list waits no longer than one.
    let by = strikes_wait();
    listed.body.push(b'[');
    for (index, request) in requests.iter().enumerate() {
        let answered = answer((app, line), verb, request, policy, by, Some(&mut room)).await;
        let answered = answered.map_err(|error| error.at(Some(index)))?;
        listed.closed |= answered.closed;
        if index > 0 {
            listed.body.push(b',');
        }
        listed.body.extend_from_slice(&answered.body);
        yield_now().await;
    }
    listed.body.push(b']');
    Ok(listed)
}

/// Decides, or gives the answer that this request's own id was given before.
async fn once(
    (app, line): (&App, &Line),
    verb: &'static str,
    request: &RequestBody<'_>,
    room: Option<&mut Room<'_>>,
    decide: impl Future<Output = Result<Answered, ApiError>>,
) -> Result<Answered, ApiError> {
    match named(app, verb, request) {
        None => decide.await,
        // It may be under way elsewhere, and wait there.
        Some(named) => line.watch(app.request_ids.run(named, || app.desk.now(), room, decide)).await,
    }
}

/// The id that a request has, if any, and what it asks.
fn named(app: &App, verb: &'static str, request: &RequestBody<'_>) -> Option<Named> {
    let id = request.request_id.as_ref()?;
    Some(Named { id: app.request_ids.digest(&(verb, id.0.as_ref())), question: app.request_ids.digest(request) })
}

fn name_of(verb: Verb) -> &'static str {
    match verb {
        Verb::Check => "check",
        Verb::Peek => "peek",
        Verb::Record => "record",
    }
}

fn status(closed: bool) -> StatusCode {
    if closed { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK }
}

/// How long a check may wait, from `?waitMs=`.
#[derive(Debug, Clone, Copy)]
struct Wait(Option<Duration>);

impl FromRequestParts<Arc<App>> for Wait {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<App>) -> Result<Self, ApiError> {
        let mut wait = None;
        for pair in parts.uri.query().unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            if name != "waitMs" {
                return Err(ApiError::bad(name, format!("unknown parameter `{name}`, expected `waitMs`")));
            }
            let millis = value.parse().ok().filter(|millis| *millis <= MAX_WAIT && wait.is_none());
            let message = || format!("waitMs is given once, as a whole number from 0 to {MAX_WAIT}");
            wait = Some(millis.ok_or_else(|| ApiError::bad("waitMs", message()))?);
        }
        Ok(Self(wait.filter(|millis| *millis > 0).map(Duration::from_millis)))
    }
}

impl Answered {
    fn new(decided: &Decided, policy: &Policy, verb: &str) -> Self {
        Self {
            body: Answer::new(decided, policy).to_json().into(),
            charged: verb != "peek" && decided.decision.allowed(),
            closed: decided.decision.unavailable(),
            generation: policy.generation(),
        }
    }

    fn into_response(self) -> Response {
        of_generation(json_bytes(status(self.closed), self.body), self.generation)
    }
}

fn held(request: &RequestBody<'_>) -> Result<Held, ApiError> {
    let ttl = Span::from_secs(request.ttl_sec.map_or(RESERVATION, Whole::number));
    if ttl == Span::ZERO || ttl > MAX_RESERVATION {
        let most = MAX_RESERVATION.secs_ceil();
        return Err(ApiError::bad("ttlSec", format!("ttlSec is between 1 and {most}")));
    }
    Ok(Held { ttl, on_expire: request.on_expire.map(Into::into).unwrap_or_default() })
}

pub(super) fn trace_id(text: &str) -> Option<TraceId> {
    let hex = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    hex.then(|| u128::from_str_radix(text, 16).ok()).flatten().map(TraceId::from_u128)
}

fn ended(ended: Result<(), EndError>) -> Result<Response, ApiError> {
    let Err(error) = ended else { return Ok(json(StatusCode::OK, &DoneBody { ok: true, first: None })) };
    let (status, name, error) = match error {
        EndError::OtherCost => (StatusCode::CONFLICT, "already_committed", CommitError::OtherCost),
        EndError::Store(error) => return Err(error.into()),
        _ => (StatusCode::NOT_FOUND, "unknown_reservation", CommitError::Unknown),
    };
    Err(ApiError::new(status, name, error.to_string()).about(Some("reservation".to_owned())))
}

fn of_generation(mut response: Response, generation: u64) -> Response {
    response.headers_mut().insert(GENERATION, HeaderValue::from(generation));
    response
}
