//! The HTTP API for Workers: `/v1/check` and `/v1/limit`, with the parsing and the answers of the server.

mod login;

use futures_util::StreamExt as _;
use http::header::{ALLOW, AUTHORIZATION, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, Method, Request};
use subtle::ConstantTimeEq as _;
use threshold_core::plan::Verb;
use threshold_core::{Secrets, TraceId};
use threshold_wire::{Answer, ApiError, LimitCall, Requests, read_requests, refuse_waiting};
use worker::{Env, Headers, Response, Result};

use crate::config::Config;
use crate::guard::ObjectLimiter;
use crate::message::{JsBody, content_length};
use crate::stats;
use crate::store::DEFAULT_BINDING;
use crate::tenants::Tenants;

/// The largest body: 64 KiB, as on the server by default.
const MAX_BODY: usize = 64 * 1024;

/// A call of the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    /// A decision under the policy.
    Check,
    /// A decision on one limit, without a policy.
    Limit,
    /// A login before its secret is checked.
    LoginAttempt,
    /// A login after its secret was checked.
    LoginResult,
    /// What was blocked.
    Stats,
}

/// The answer to a call.
#[derive(Debug)]
struct Reply {
    status: u16,
    /// The seconds after which to call again.
    retry_after: Option<u64>,
    body: Vec<u8>,
}

impl Reply {
    fn new(status: u16, body: Vec<u8>) -> Self {
        Self { status, retry_after: None, body }
    }
}

impl Call {
    fn of(path: &str) -> Option<Self> {
        match path {
            "/v1/check" => Some(Self::Check),
            "/v1/limit" | "/check" => Some(Self::Limit),
            "/v1/login/attempt" => Some(Self::LoginAttempt),
            "/v1/login/result" => Some(Self::LoginResult),
            "/v1/stats" => Some(Self::Stats),
            _ => None,
        }
    }

    fn method(self) -> Method {
        match self {
            Self::Check | Self::Limit | Self::LoginAttempt | Self::LoginResult => Method::POST,
            Self::Stats => Method::GET,
        }
    }

    async fn answer(
        self,
        limiter: &ObjectLimiter,
        tenants: Option<&Tenants>,
        secrets: &Secrets,
        env: &Env,
        query: Option<&str>,
        body: &[u8],
    ) -> core::result::Result<Reply, ApiError> {
        match self {
            Self::Check => check(limiter, tenants, query, body).await.map(|(status, body)| Reply::new(status, body)),
            Self::Limit => limit(limiter, env, body).await.map(|(status, body)| Reply::new(status, body)),
            Self::LoginAttempt => login::attempt(limiter, secrets, body).await,
            Self::LoginResult => login::result(limiter, secrets, body).await,
            Self::Stats => stats::answer(env, query).await.map(|(status, body)| Reply::new(status, body)),
        }
    }
}

/// Returns whether a request carries the token. Every other request is a client's, which must not reach the API, whatever its path;
/// and a request with the token must not reach the upstream, which would learn it.
pub(crate) fn has_token(headers: &HeaderMap, config: &Config) -> bool {
    let Some(token) = config.token.as_deref() else { return false };
    // The platform joins several lines with commas. A scheme has no case, and spaces around the token are not part of it.
    let is_token = |credentials: &[u8]| {
        let (scheme, given) = credentials.trim_ascii().split_at_checked(6).unwrap_or_default();
        scheme.eq_ignore_ascii_case(b"bearer") & bool::from(given.trim_ascii().ct_eq(token.as_bytes()))
    };
    let has_it = |line: &[u8]| is_token(line) || line.split(|byte| *byte == b',').any(is_token);
    headers.get_all(AUTHORIZATION).iter().any(|line| has_it(line.as_bytes()))
}

/// Answers a call.
pub(crate) async fn answer(
    limiter: &ObjectLimiter,
    tenants: Option<&Tenants>,
    secrets: &Secrets,
    env: &Env,
    request: Request<JsBody>,
) -> Result<Response> {
    let Some(call) = Call::of(request.uri().path()) else {
        return refuse(&ApiError::new(404, "not_found", "there is nothing at this path"));
    };
    if *request.method() != call.method() {
        let error = ApiError::new(405, "method_not_allowed", "this path takes another method; see Allow");
        let refused = refuse(&error)?;
        refused.headers().set(ALLOW.as_str(), call.method().as_str())?;
        return Ok(refused);
    }
    let query = request.uri().query().map(str::to_owned);
    let Some(body) = read(request).await? else {
        return refuse(&ApiError::new(413, "body_too_large", format!("a body has at most {MAX_BODY} bytes")));
    };
    match call.answer(limiter, tenants, secrets, env, query.as_deref(), &body).await {
        Ok(Reply { status, retry_after, body }) => {
            let answer = json(status, body)?;
            if let Some(wait) = retry_after {
                answer.headers().set(RETRY_AFTER.as_str(), &wait.to_string())?;
            }
            Ok(answer)
        }
        Err(error) => refuse(&error),
    }
}

/// Refuses a request without the token, where nothing but the API is served.
pub(crate) fn unauthorized() -> Result<Response> {
    let refused = refuse(&ApiError::new(401, "unauthorized", "the token is missing or wrong"))?;
    refused.headers().set("www-authenticate", "Bearer")?;
    Ok(refused)
}

/// Reads a body; `None` if it is too large. Nothing is read of one that says so itself, and no more than the bound of any other.
async fn read(request: Request<JsBody>) -> Result<Option<Vec<u8>>> {
    if content_length(request.headers()).is_some_and(|length| length > MAX_BODY as u64) {
        return Ok(None);
    }
    let (mut stream, mut body) = (request.into_body(), Vec::new());
    while let Some(chunk) = stream.read().next().await {
        let chunk = chunk?;
        if body.len().saturating_add(chunk.len()) > MAX_BODY {
            return Ok(None);
        }
        body.extend_from_slice(&chunk);
    }
    Ok(Some(body))
}

async fn check(
    limiter: &ObjectLimiter,
    tenants: Option<&Tenants>,
    query: Option<&str>,
    body: &[u8],
) -> core::result::Result<(u16, Vec<u8>), ApiError> {
    if let Some(query) = query {
        let wait = query.strip_prefix("waitMs=").ok_or_else(|| ApiError::bad("query", "unknown parameter"))?;
        refuse_waiting(wait)?;
    }
    let Requests::One(request) = read_requests(body)? else {
        return Err(ApiError::not_served("requests", "a list of requests"));
    };
    request.without_reservation()?;
    request.without_request_id()?;
    let lists = request.lists();
    let facts = request.facts(&lists, TraceId::default());
    if let (Some(tenants), Some(tenant)) = (tenants, facts.tenant) {
        tenants.load(tenant).await;
    }
    let policy = limiter.policy();
    let (decision, _) = limiter.decide_under(&policy, Verb::Check, &facts).await?;
    let status = if decision.unavailable() { 503 } else { 200 };
    Ok((status, Answer::new(&decision, &policy).approximating_eventual().to_json()))
}

async fn limit(limiter: &ObjectLimiter, env: &Env, body: &[u8]) -> core::result::Result<(u16, Vec<u8>), ApiError> {
    let call = LimitCall::read(body)?;
    // A policy whose rules all have places of their own runs without this binding.
    if env.durable_object(DEFAULT_BINDING).is_err() {
        let message =
            format!("this call needs the binding {DEFAULT_BINDING} of a Durable Object, which the Worker lacks");
        return Err(ApiError::new(501, "not_served", message));
    }
    let decision = limiter.check_limit(call.key(), call.limit(), call.cost()).await?;
    Ok((200, call.answer(&decision).to_json().into_bytes()))
}

pub(crate) fn refuse(error: &ApiError) -> Result<Response> {
    let refused = json(error.status, error.to_json().into_bytes())?;
    if error.status == 503 {
        // An object that has failed is started again by the next call.
        refused.headers().set(RETRY_AFTER.as_str(), "1")?;
    }
    Ok(refused)
}

pub(crate) fn json(status: u16, body: Vec<u8>) -> Result<Response> {
    let headers = Headers::new();
    headers.set(CONTENT_TYPE.as_str(), "application/json")?;
    headers.set("cache-control", "no-store")?;
    Ok(Response::from_bytes(body)?.with_status(status).with_headers(headers))
}
