//! The HTTP API for other Workers: `/v1/check` and `/v1/limit`, with the parsing and the answers of the server.

use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderMap, Method};
use subtle::ConstantTimeEq as _;
use threshold_core::TraceId;
use threshold_core::plan::Verb;
use threshold_limiter::api::{Answer, ApiError, LimitCall, Requests, read_requests, refuse_waiting};
use worker::{Headers, HttpRequest, Request, Response, Result};

use crate::config::Config;
use crate::guard::ObjectLimiter;

/// The largest body: 64 KiB, as on the server by default.
const MAX_BODY: usize = 64 * 1024;

/// A call of the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call {
    /// A decision under the policy.
    Check,
    /// A decision on one limit, without a policy.
    Limit,
    /// A call with a wrong method.
    WrongMethod,
}

impl Call {
    /// Returns the call that a request makes. Every path belongs to the upstream unless the request carries the token: a client of a
    /// guarded application must not reach the API.
    pub(crate) fn of(method: &Method, path: &str, headers: &HeaderMap, config: &Config) -> Option<Self> {
        let call = match path {
            "/v1/check" => Self::Check,
            "/v1/limit" | "/check" => Self::Limit,
            _ => return None,
        };
        let token = config.token.as_deref()?;
        let given = headers.get(AUTHORIZATION)?.as_bytes().strip_prefix(b"Bearer ")?;
        if !bool::from(given.ct_eq(token.as_bytes())) {
            return None;
        }
        Some(if method == Method::POST { call } else { Self::WrongMethod })
    }

    /// Answers the call.
    pub(crate) async fn answer(self, limiter: &ObjectLimiter, request: HttpRequest) -> Result<Response> {
        let query = request.uri().query().map(str::to_owned);
        let body = Request::try_from(request)?.bytes().await?;
        if body.len() > MAX_BODY {
            let error = ApiError::new(413, "body_too_large", format!("a body has at most {MAX_BODY} bytes"));
            return json(413, error.to_json().into_bytes());
        }
        let answered = match self {
            Self::Check => check(limiter, query.as_deref(), &body).await,
            Self::Limit => limit(limiter, &body).await,
            Self::WrongMethod => Err(ApiError::new(405, "method_not_allowed", "this path takes POST")),
        };
        match answered {
            Ok((status, body)) => json(status, body),
            Err(error) => json(error.status, error.to_json().into_bytes()),
        }
    }
}

async fn check(
    limiter: &ObjectLimiter,
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
    let (lists, policy) = (request.lists(), limiter.policy());
    let facts = request.facts(&lists, TraceId::default());
    let (decision, _) = limiter.decide_under(&policy, Verb::Check, &facts).await?;
    let status = if decision.unavailable() { 503 } else { 200 };
    Ok((status, Answer::new(&decision, &policy).to_json()))
}

async fn limit(limiter: &ObjectLimiter, body: &[u8]) -> core::result::Result<(u16, Vec<u8>), ApiError> {
    let call = LimitCall::read(body)?;
    let decision = limiter.check_limit(call.key(), call.limit(), call.cost()).await?;
    Ok((200, call.answer(&decision).to_json().into_bytes()))
}

fn json(status: u16, body: Vec<u8>) -> Result<Response> {
    let headers = Headers::new();
    headers.set(CONTENT_TYPE.as_str(), "application/json")?;
    headers.set("cache-control", "no-store")?;
    Ok(Response::from_bytes(body)?.with_status(status).with_headers(headers))
}
