//! The HTTP API: parses JSON, asks the desk, writes JSON.

#[cfg(test)]
mod conformance;
mod describe;
#[cfg(test)]
mod list_tests;
mod request;
#[cfg(test)]
mod without_store;

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{Request, State};
use axum::response::Response;
use bytes::Bytes;
use http::header::{AUTHORIZATION, RETRY_AFTER};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use threshold_core::TraceId;
use threshold_core::plan::Verb;
use threshold_core::policy::Policy;
use threshold_core::receipt::{ActualCost, CommitError};
use threshold_limiter::store::{EndError, StoreError};
use threshold_wire::{
    Answer, GENERATION_HEADER, LimitCall, MAX_ITEMS, Object, Pairs, RequestBody, Requests, Whole, read, read_requests,
    wait_time,
};
use tokio::task::yield_now;

use super::admin::memory_of;
use super::json_body::{Caller, CallerOrReader, JsonBody};
use super::query::Query;
use super::request_ids::{AnswerSpace, RequestKey};
use super::routes::{Route, get, post};
use super::{ApiError, App, json, json_bytes, openapi};
use crate::desk::{Decided, ReservationTerms, new_trace, strike_deadline};
use crate::explain::live_json;
use crate::serve::ConnectionWatch;
pub(super) use request::ForgiveBody;
use request::{CommitBody, PauseBody, RefundBody, ReleaseBody};

const GENERATION: HeaderName = HeaderName::from_static(GENERATION_HEADER);

/// An encoded answer.
#[derive(Debug, Clone)]
pub(super) struct EncodedAnswer {
    pub(super) body: Bytes,
    /// Whether anything was charged.
    pub(super) charged: bool,
    /// Whether the store failed and a rule that fails closed denied.
    pub(super) closed: bool,
    /// The generation of the policy that decided.
    pub(super) generation: u64,
}

/// The result of a call that is not a decision.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Done")]
struct DoneBody {
    /// Whether the call applied to anything.
    ok: bool,
    /// For a refund: whether this was the first one of its receipt.
    #[serde(skip_serializing_if = "Option::is_none")]
    first: Option<bool>,
}

pub(super) fn routes() -> Vec<Route> {
    vec![
        post("/v1/check", check, describe::check),
        post("/v1/peek", peek, describe::peek),
        post("/v1/record", record, describe::record),
        post("/v1/explain", explain, describe::explain),
        post("/v1/reserve", reserve, describe::reserve),
        post("/v1/commit", commit, describe::commit),
        post("/v1/release", release, describe::release),
        post("/v1/refund", refund, describe::refund),
        post("/v1/pause", pause, describe::pause),
        post("/v1/limit", limit, describe::limit),
        post("/check", limit, describe::limit_alias),
        get("/openapi.json", document, describe::openapi),
    ]
}

/// The query of a check.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct CheckQuery {
    wait_ms: Option<String>,
}

async fn check(
    State(app): State<Arc<App>>,
    watch: ConnectionWatch,
    Query(query): Query<CheckQuery>,
    JsonBody(body): JsonBody,
) -> Result<Response, ApiError> {
    match query.wait()? {
        None => decide(&app, &watch, Verb::Check, &body).await,
        Some(at_most) => watch.until_disconnect(check_waiting(&app, &watch, &body, at_most)).await,
    }
}

async fn peek(
    State(app): State<Arc<App>>,
    watch: ConnectionWatch,
    JsonBody(body): JsonBody,
) -> Result<Response, ApiError> {
    decide(&app, &watch, Verb::Peek, &body).await
}

async fn record(
    State(app): State<Arc<App>>,
    watch: ConnectionWatch,
    JsonBody(body): JsonBody,
) -> Result<Response, ApiError> {
    decide(&app, &watch, Verb::Record, &body).await
}

/// Changes nothing, so that a token that only reads suffices too.
async fn explain(reader: CallerOrReader, State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let authorization = request.headers().get(AUTHORIZATION).cloned();
    let JsonBody(body) = JsonBody::read_unchanging(reader, request, &app).await?;
    let request: RequestBody<'_> = read(&body)?;
    request.without_reservation()?;
    let memory = memory_of(authorization.as_ref(), &app).await?;
    let policy = app.desk.policy();
    let lists = request.lists();
    let facts = request.facts(&lists, new_trace());
    let (rules, causes, decided) = app.desk.explain(&policy, &facts).await?;
    let answer = encode(&decided, &policy);
    let explained = live_json((&policy, &facts), &rules, &causes, &decided.decision, &answer);
    Ok(with_generation(memory.json(&app, &explained)?, policy.generation()))
}

async fn reserve(
    State(app): State<Arc<App>>,
    watch: ConnectionWatch,
    JsonBody(body): JsonBody,
) -> Result<Response, ApiError> {
    let request: RequestBody<'_> = read(&body)?;
    // Checked before the id is looked up, so that an invalid request never takes an id.
    let (ttl, on_expire) = request.reservation_terms()?;
    let terms = ReservationTerms { ttl, on_expire };
    let policy = app.desk.policy();
    let answer = once((&app, &watch), "reserve", &request, None, async {
        let lists = request.lists();
        let facts = request.facts(&lists, new_trace());
        let decided = app.desk.reserve_and_save(&policy, &facts, terms).await?;
        Ok(EncodedAnswer::new(&decided, &policy, "reserve"))
    });
    Ok(answer.await?.into_response())
}

async fn commit(State(app): State<Arc<App>>, JsonBody(body): JsonBody) -> Result<Response, ApiError> {
    let CommitBody { reservation, cost, bytes, costs } = read(&body)?;
    let costs = Pairs::costs(costs.as_ref());
    let actual = ActualCost { cost: cost.map(Whole::number), bytes: bytes.map(Whole::number), costs: &costs };
    match trace_id(reservation.as_str()) {
        Some(id) => ended(app.desk.commit(id, &actual).await),
        // The same answer as for an unknown id: no well-formed id could have this text.
        None => ended(Err(EndError::Unknown)),
    }
}

async fn release(State(app): State<Arc<App>>, JsonBody(body): JsonBody) -> Result<Response, ApiError> {
    let ReleaseBody { reservation } = read(&body)?;
    match trace_id(reservation.as_str()) {
        Some(id) => ended(app.desk.release(id).await),
        None => ended(Err(EndError::Unknown)),
    }
}

async fn refund(State(app): State<Arc<App>>, JsonBody(body): JsonBody) -> Result<Response, ApiError> {
    let RefundBody { receipt } = read(&body)?;
    let receipt = app.desk.read_receipt(receipt.as_str());
    // A forged or changed receipt is refused before the store is asked. Without a signature, a caller could refund
    // charges of others.
    let receipt = receipt.map_err(|_| ApiError::bad("receipt", "this receipt was not issued by this server"))?;
    let first = app.desk.refund(&receipt).await.map_err(|error| {
        let message = match error {
            StoreError::Full => format!("nothing was refunded: {error}"),
            StoreError::Timeout => {
                format!("{error}; the refund may have been made all the same: repeat it, it counts once")
            }
            // Each part of a Cluster gives back by itself.
            _ => format!("the refund is not complete: {error}: repeat it, it counts once"),
        };
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", message)
    })?;
    Ok(json(StatusCode::OK, &DoneBody { ok: true, first: Some(first) }))
}

async fn pause(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    JsonBody(body): JsonBody,
) -> Result<Response, ApiError> {
    let PauseBody { layer, key, rule, request, seconds } = read(&body)?;
    let who = app.token_guesses.name_of(&headers, &app);
    let ok = match (layer, rule, request) {
        (Some(layer), None, None) => app.desk.pause(&who, layer.0, key.as_str(), seconds.number()).await?,
        (None, Some(rule), Some(Object(request))) if key.as_str().is_empty() => {
            request.without_reservation()?;
            let lists = request.lists();
            let facts = request.facts(&lists, TraceId::default());
            app.desk.pause_rule(&who, rule.as_str(), &facts, seconds.number()).await?;
            true
        }
        _ => return Err(ApiError::bad("layer", "a pause takes a layer and its key, or a rule and a request")),
    };
    Ok(json(StatusCode::OK, &DoneBody { ok, first: None }))
}

async fn limit(State(app): State<Arc<App>>, JsonBody(body): JsonBody) -> Result<Response, ApiError> {
    let call = LimitCall::read(&body)?;
    // These keys are in the policy's store, and count toward its `max_keys`.
    let decision = app.desk.check_limit(call.key(), call.limit(), call.cost()).await?;
    Ok(json(StatusCode::OK, &call.answer(&decision)))
}

async fn document(_: Caller) -> Response {
    json_bytes(StatusCode::OK, openapi::document())
}

/// Decides one request or a list of them, under one policy.
async fn decide(app: &App, watch: &ConnectionWatch, verb: Verb, body: &[u8]) -> Result<Response, ApiError> {
    // Memory for a list's answers is acquired before the list is parsed, because parsed it takes more memory than encoded.
    let permit = match list_bytes(body, &app.desk.policy()) {
        None => None,
        Some(bytes) => Some(watch.until_disconnect(app.answer_memory.acquire(bytes)).await?),
    };
    let requests = read_requests(body)?;
    let policy = app.desk.policy();
    match (&requests, permit) {
        (Requests::Many(requests), Some(permit)) => {
            // The permit is held across the decisions, and then by the body until the client has read it.
            let ListAnswer { body, closed } = answer_all((app, watch), verb, requests, &policy).await?;
            let response = json_bytes(status(closed), permit.body(body, app.bounds.client_timeout)?);
            Ok(with_generation(response, policy.generation()))
        }
        (Requests::One(request), _) => {
            request.without_reservation()?;
            Ok(answer((app, watch), verb, request, &policy, strike_deadline(), None).await?.into_response())
        }
        // `list_bytes` and the parser disagree about what a list is. No input is known for which they do.
        (Requests::Many(_), None) => Err(ApiError::new(StatusCode::BAD_REQUEST, "bad_request", "a list begins with [")),
    }
}

/// Returns the most bytes that a list's parsed requests and its answers take; `None` if the body is not a list.
///
/// Every request begins with a brace. Braces inside of requests are counted too, so that this is an upper bound.
fn list_bytes(body: &[u8], policy: &Policy) -> Option<usize> {
    // JSON allows white space before a list, and serde_json skips the same characters.
    body.iter().find(|byte| !byte.is_ascii_whitespace()).filter(|byte| **byte == b'[')?;
    let items = memchr::memchr_iter(b'{', body).count().min(MAX_ITEMS);
    let each = Answer::max_bytes(policy).saturating_add(size_of::<RequestBody<'_>>());
    Some(items.saturating_mul(each).saturating_add(2))
}

/// Decides a check that may wait until it fits.
async fn check_waiting(
    app: &App,
    watch: &ConnectionWatch,
    body: &[u8],
    at_most: Duration,
) -> Result<Response, ApiError> {
    // The items of a list would wait for each other, and hold the memory of all answers meanwhile.
    let Requests::One(request) = read_requests(body)? else {
        return Err(ApiError::bad("waitMs", "only a single request can wait, not a list"));
    };
    request.without_reservation()?;
    let answer = once((app, watch), "check", &request, None, async {
        let lists = request.lists();
        let facts = request.facts(&lists, new_trace());
        let (decided, policy) = app.desk.wait(&facts, at_most).await?;
        Ok(EncodedAnswer::new(&decided, &policy, "check"))
    });
    Ok(answer.await?.into_response())
}

async fn answer(
    (app, watch): (&App, &ConnectionWatch),
    verb: Verb,
    request: &RequestBody<'_>,
    policy: &Policy,
    strike_deadline: Instant,
    space: Option<&mut AnswerSpace<'_>>,
) -> Result<EncodedAnswer, ApiError> {
    let name = name_of(verb);
    let decide = async {
        let lists = request.lists();
        let facts = request.facts(&lists, new_trace());
        let decided = app.desk.decide_and_save(policy, verb, &facts, strike_deadline).await?;
        Ok(EncodedAnswer::new(&decided, policy, name))
    };
    // A peek charges nothing, so that repeating it needs no protection.
    if verb == Verb::Peek {
        return decide.await;
    }
    once((app, watch), name, request, space, decide).await
}

/// The encoded answers to a list.
struct ListAnswer {
    body: Vec<u8>,
    /// Whether the store failed for one of them and a rule that fails closed denied.
    closed: bool,
}

/// Decides the requests of a list in order.
///
/// All of them are planned before the first is charged, so that a list with an invalid item charges nothing. The task yields
/// after each item: a thousand in one go kept a worker thread busy for 53 ms, and its other connections waited.
async fn answer_all(
    (app, watch): (&App, &ConnectionWatch),
    verb: Verb,
    requests: &[RequestBody<'_>],
    policy: &Policy,
) -> Result<ListAnswer, ApiError> {
    for (index, request) in requests.iter().enumerate() {
        request.validate(verb, policy).map_err(|error| error.at(Some(index)))?;
        yield_now().await;
    }
    let (indexes, keys): (Vec<usize>, Vec<RequestKey>) = requests
        .iter()
        .enumerate()
        .filter(|_| verb != Verb::Peek)
        .filter_map(|(index, request)| Some((index, request_key(app, name_of(verb), request)?)))
        .unzip();
    // After all items are known to be valid: a list that is refused must leave no ids behind.
    let space = app.request_ids.begin_list(&keys, || app.desk.now()).await;
    let mut space = space
        .map_err(|(place, error)| ApiError::from(error).at(place.and_then(|place| indexes.get(place).copied())))?;
    let mut list = ListAnswer { body: Vec::new(), closed: false };
    // For typical answers, and not for the largest ones that memory was acquired for: most of that would never be
    // written.
    list.body.reserve_exact(requests.len().saturating_mul(Answer::TYPICAL_BYTES).saturating_add(2));
    // One deadline for the whole list: however many of its requests strike, it waits for the disk only once.
    let deadline = strike_deadline();
    list.body.push(b'[');
    for (index, request) in requests.iter().enumerate() {
        let answer = answer((app, watch), verb, request, policy, deadline, Some(&mut space)).await;
        // The items before this one stay charged. A caller that repeats the list with request ids is not charged for
        // them again.
        let answer = answer.map_err(|error| error.at(Some(index)))?;
        list.closed |= answer.closed;
        if index > 0 {
            list.body.push(b',');
        }
        list.body.extend_from_slice(&answer.body);
        yield_now().await;
    }
    list.body.push(b']');
    Ok(list)
}

/// Decides, or returns the answer that was given to this request's id before.
async fn once(
    (app, watch): (&App, &ConnectionWatch),
    verb: &'static str,
    request: &RequestBody<'_>,
    space: Option<&mut AnswerSpace<'_>>,
    decide: impl Future<Output = Result<EncodedAnswer, ApiError>>,
) -> Result<EncodedAnswer, ApiError> {
    match request_key(app, verb, request) {
        None => decide.await,
        // A request with the same id may be in progress, and this one then waits for it.
        Some(key) => watch.until_disconnect(app.request_ids.run(key, || app.desk.now(), space, decide)).await,
    }
}

/// Returns the digests of a request's id and content; `None` if it has no id.
fn request_key(app: &App, verb: &'static str, request: &RequestBody<'_>) -> Option<RequestKey> {
    let id = request.request_id()?;
    // The verb is a part of the id: a caller may use one id for the check and the record of the same request.
    Some(RequestKey { id: app.request_ids.digest(&(verb, id)), content: app.request_ids.digest(request) })
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

impl CheckQuery {
    /// Returns how long the check may wait; `None` if it must not.
    fn wait(&self) -> Result<Option<Duration>, ApiError> {
        let wait = self.wait_ms.as_deref().map_or(Ok(None), wait_time);
        wait.map_err(ApiError::from)
    }
}

impl EncodedAnswer {
    fn new(decided: &Decided, policy: &Policy, verb: &str) -> Self {
        Self {
            body: encode(decided, policy).into(),
            // Also if every charge was 0: the answer is then the same for a repeat, and costs little to remember.
            charged: verb != "peek" && decided.decision.allowed(),
            closed: decided.decision.unavailable(),
            generation: policy.generation(),
        }
    }

    fn into_response(self) -> Response {
        with_generation(json_bytes(status(self.closed), self.body), self.generation)
    }
}

fn encode(decided: &Decided, policy: &Policy) -> Vec<u8> {
    let answer = Answer::new(&decided.decision, policy);
    answer.with_receipt(decided.receipt.as_deref()).with_reservation(decided.reservation).to_json()
}

/// Parses an id of 32 hexadecimal digits.
pub(super) fn trace_id(text: &str) -> Option<TraceId> {
    // `from_str_radix` alone would accept a plus sign and fewer digits, and one id would have several spellings.
    let hex = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    hex.then(|| u128::from_str_radix(text, 16).ok()).flatten().map(TraceId::from_u128)
}

/// Answers a commit or a release.
fn ended(result: Result<(), EndError>) -> Result<Response, ApiError> {
    let Err(error) = result else { return Ok(json(StatusCode::OK, &DoneBody { ok: true, first: None })) };
    let (status, name, error) = match error {
        EndError::OtherCost => (StatusCode::CONFLICT, "already_committed", CommitError::OtherCost),
        EndError::Store(error) => return Err(error.into()),
        // Unknown and already ended ones get the same answer, which does not tell whether an id was ever issued.
        _ => (StatusCode::NOT_FOUND, "unknown_reservation", CommitError::Unknown),
    };
    Err(ApiError::new(status, name, error.to_string()).about(Some("reservation".to_owned())))
}

fn with_generation(mut response: Response, generation: u64) -> Response {
    response.headers_mut().insert(GENERATION, HeaderValue::from(generation));
    // A rule that fails closed has denied it. The store may answer the next time.
    if response.status() == StatusCode::SERVICE_UNAVAILABLE {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
    }
    response
}
