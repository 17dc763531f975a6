//! Decision → response: header fields for an allowed request, a whole response for a refused one.

use bytes::Bytes;
use http::header::{ACCEPT, CACHE_CONTROL, CONTENT_TYPE, SET_COOKIE};
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use threshold_core::headers::{BodyForm, Refusal, denial_body, error_name, header_fields, refusal_body};
use threshold_core::path::PathError;
use threshold_core::policy::CostOf;
use threshold_core::{Decision, Facts, PlanError, Policy, TraceId};

use super::request_facts::BadRequest;

/// The field with the trace id, as `threshold_core::headers::TRACE_ID` spells it.
const TRACE_ID: HeaderName = HeaderName::from_static("x-trace-id");

/// The gRPC status codes of refusals.
const INVALID_ARGUMENT: u8 = 3;
const RESOURCE_EXHAUSTED: u8 = 8;
const INTERNAL: u8 = 13;
const UNAVAILABLE: u8 = 14;

/// The format of a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// An HTTP status and a body.
    Http(BodyForm),
    /// A gRPC status and message.
    Grpc,
}

impl Form {
    /// Returns the format that a request asks for.
    pub(super) fn of(headers: &HeaderMap) -> Self {
        let text = |value: &HeaderValue| value.to_str().unwrap_or_default().to_ascii_lowercase();
        // With any suffix, such as `+proto`.
        if headers.get(CONTENT_TYPE).is_some_and(|value| text(value).starts_with("application/grpc")) {
            return Self::Grpc;
        }
        let mut accepted = headers.get_all(ACCEPT).iter().map(|value| BodyForm::accepted(&text(value)));
        Self::Http(accepted.find(|form| *form == BodyForm::Problem).unwrap_or_default())
    }
}

/// Returns the header fields of a decision.
pub(super) fn fields(decision: &Decision, policy: &Policy) -> HeaderMap {
    let fields = header_fields(decision, policy);
    let mut headers = HeaderMap::with_capacity(fields.len());
    for (name, value) in fields {
        // A value that cannot be in a header is left out: the response matters more.
        if let (Some(name), Ok(value)) = (field_name(name), HeaderValue::try_from(value)) {
            headers.append(name, value);
        }
    }
    headers
}

/// Returns the name of a field. The usual names are constants, so that they are not parsed for each response.
fn field_name(name: &'static str) -> Option<HeaderName> {
    Some(match name {
        "X-RateLimit-Limit" => HeaderName::from_static("x-ratelimit-limit"),
        "X-RateLimit-Remaining" => HeaderName::from_static("x-ratelimit-remaining"),
        "X-RateLimit-Reset" => HeaderName::from_static("x-ratelimit-reset"),
        "RateLimit" => HeaderName::from_static("ratelimit"),
        "RateLimit-Policy" => HeaderName::from_static("ratelimit-policy"),
        threshold_core::headers::TRACE_ID => TRACE_ID,
        other => return HeaderName::from_bytes(other.as_bytes()).ok(),
    })
}

/// Adds fields that the response does not have yet. Those that it has were set closer to the service, for instance by a second
/// limiter, and stay.
pub(super) fn add_fields(headers: &mut HeaderMap, mut fields: HeaderMap) {
    if headers.is_empty() {
        *headers = fields;
        return;
    }
    headers.reserve(fields.len());
    for (name, value) in fields.drain() {
        // `drain` yields no name for the second value of a field; of ours, no field has two.
        let Some(name) = name else { continue };
        // Each cookie is a field of its own. One of the service must not displace another.
        if name == SET_COOKIE {
            headers.append(name, value);
        } else {
            headers.entry(name).or_insert(value);
        }
    }
}

/// Returns the response to a denied request.
pub(super) fn denial(decision: &Decision, policy: &Policy, facts: &Facts<'_>, form: Form) -> Response<Bytes> {
    let mut response = match form {
        Form::Grpc => {
            let code = if decision.unavailable() { UNAVAILABLE } else { RESOURCE_EXHAUSTED };
            let own = decision.rule(policy).and_then(|rule| rule.message.as_deref());
            grpc(code, own.unwrap_or_else(|| error_name(decision, policy)))
        }
        Form::Http(form) => match denial_body(decision, policy, facts, form) {
            Some(body) => http(body.status, body.content_type, body.text),
            None => http(429, "application/json", String::new()),
        },
    };
    add_fields(response.headers_mut(), fields(decision, policy));
    if decision.unavailable() {
        response.extensions_mut().insert(Unavailable);
    }
    response
}

/// Marks a response, as an extension of it, as that to a request which could not be decided: the store failed, and a rule denies then,
/// or the policy cannot be served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Unavailable;

/// What to add to a program whose layer never learns a client's address.
#[cfg(feature = "axum")]
pub(super) const NO_ADDRESS: &str = "the rate limiter has no client address: serve the app with \
    into_make_service_with_connect_info::<SocketAddr>(), insert the request extension PeerAddr, or call ThresholdLayer::peer";
#[cfg(not(feature = "axum"))]
pub(super) const NO_ADDRESS: &str = "the rate limiter has no client address: call ThresholdLayer::peer, insert the request \
    extension PeerAddr, or enable the feature axum of threshold-limiter, which reads ConnectInfo<SocketAddr>";

/// A refusal without a decision, and its gRPC status.
#[derive(Debug, Clone, Copy)]
pub(super) struct Undecided<'r> {
    refusal: Refusal<'r>,
    grpc: u8,
}

impl<'r> Undecided<'r> {
    const fn new(status: u16, grpc: u8, code: &'r str, message: &'r str) -> Self {
        Self { refusal: Refusal { status, code, message, field: None }, grpc }
    }

    /// The refusal of a request that cannot be decided. `path_error` is the text of a [`PlanError::Path`].
    pub(super) fn impossible(error: &PlanError, path_error: &'r str) -> Self {
        match error {
            PlanError::CostExceedsLimit { cost_of: CostOf::Bytes, .. } => Self::new(
                413,
                RESOURCE_EXHAUSTED,
                "cost_exceeds_limit",
                "The content is more than its limit ever allows",
            ),
            PlanError::CostExceedsLimit { .. } => {
                Self::new(400, INVALID_ARGUMENT, "cost_exceeds_limit", "The cost is more than its limit ever allows")
            }
            PlanError::Missing { .. } => Self::new(429, RESOURCE_EXHAUSTED, "rate_limited", "Too many requests"),
            PlanError::TooManyRules => Self::unavailable(),
            PlanError::Path(PathError::TooLong) => Self::wrong("path", 414, "uri_too_long", path_error),
            PlanError::Path(_) => Self::wrong("path", 400, "bad_request", path_error),
        }
    }

    /// The refusal while the policy in force cannot be served.
    pub(super) const fn unavailable() -> Self {
        Self::new(503, UNAVAILABLE, "unavailable", "Temporarily unavailable")
    }

    /// The refusal by a layer that needs a client's address and has no source of addresses. It tells the developer, who sees it
    /// with the first request.
    pub(super) const fn no_address() -> Self {
        Self::new(500, INTERNAL, "no_client_address", NO_ADDRESS)
    }

    /// The refusal of an ambiguous request.
    pub(super) const fn bad_request(bad: BadRequest) -> Self {
        Self::wrong(bad.field, 400, "bad_request", bad.message)
    }

    /// The refusal of a request for one of its fields. The message repeats nothing of the request.
    const fn wrong(field: &'r str, status: u16, code: &'r str, message: &'r str) -> Self {
        Self { refusal: Refusal { status, code, message, field: Some(field) }, grpc: INVALID_ARGUMENT }
    }

    /// Returns the response.
    pub(super) fn response(self, policy: &Policy, trace: TraceId, form: Form) -> Response<Bytes> {
        let mut response = match form {
            Form::Grpc => grpc(self.grpc, self.refusal.message),
            Form::Http(form) => {
                let body = refusal_body(self.refusal, policy, trace, form);
                http(body.status, body.content_type, body.text)
            }
        };
        if self.grpc == UNAVAILABLE {
            response.extensions_mut().insert(Unavailable);
        }
        // A cache must not send the refusal of one client to others.
        response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if let Ok(trace) = HeaderValue::try_from(trace.to_string()) {
            response.headers_mut().insert(TRACE_ID, trace);
        }
        response
    }
}

fn http(status: u16, content_type: &'static str, text: String) -> Response<Bytes> {
    let mut response = Response::new(Bytes::from(text));
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::TOO_MANY_REQUESTS);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// Returns a gRPC response of trailers only: the status is 200, the trailers are in the header, and there is no body.
fn grpc(code: u8, message: &str) -> Response<Bytes> {
    let mut response = Response::new(Bytes::new());
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert("grpc-status", HeaderValue::from(u16::from(code)));
    if let Ok(message) = HeaderValue::try_from(percent_encoded(message)) {
        headers.insert("grpc-message", message);
    }
    response
}

/// Percent-encodes a message as gRPC does: everything but printable ASCII, and the percent sign itself.
fn percent_encoded(message: &str) -> String {
    let mut encoded = String::with_capacity(message.len());
    for byte in message.bytes() {
        match byte {
            b'%' | 0..=0x1f | 0x7f.. => encoded.push_str(&format!("%{byte:02X}")),
            plain => encoded.push(char::from(plain)),
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grpc_message_is_printable_ascii() {
        assert_eq!(percent_encoded("100 % of 5\n€"), "100 %25 of 5%0A%E2%82%AC");
    }

    #[test]
    fn the_form_is_what_the_client_accepts() {
        let check = |name: &'static str, value: &'static str, expect: Form| {
            let headers = [(HeaderName::from_static(name), HeaderValue::from_static(value))].into_iter().collect();
            assert_eq!(Form::of(&headers), expect, "{name}: {value}");
        };
        check("accept", "text/html, */*", Form::Http(BodyForm::Json));
        check("accept", "application/problem+json", Form::Http(BodyForm::Problem));
        check("accept", "text/html, Application/Problem+JSON; Q=0.9", Form::Http(BodyForm::Problem));
        check("accept", "application/problem+json; Q=0", Form::Http(BodyForm::Json));
        check("content-type", "application/grpc+proto", Form::Grpc);
        check("content-type", "application/json", Form::Http(BodyForm::Json));
    }

    #[test]
    fn a_request_with_too_many_rules_is_refused() {
        let policy = Policy::builder().build().unwrap();
        let refused =
            |form| Undecided::impossible(&PlanError::TooManyRules, "").response(&policy, TraceId::from_u128(7), form);
        assert_eq!(refused(Form::Http(BodyForm::Json)).status(), 503);
        assert_eq!(refused(Form::Http(BodyForm::Problem)).status(), 503);
        assert_eq!(refused(Form::Grpc).headers()["grpc-status"], "14");
        assert_eq!(refused(Form::Grpc).headers()[TRACE_ID], format!("{:032x}", 7));
    }

    #[test]
    fn fields_of_the_service_stay() {
        let mut headers: HeaderMap = [(HeaderName::from_static("ratelimit"), HeaderValue::from_static("own"))]
            .into_iter()
            .chain([(SET_COOKIE, HeaderValue::from_static("a=1"))])
            .collect();
        let more = [
            (HeaderName::from_static("ratelimit"), HeaderValue::from_static("ours")),
            (SET_COOKIE, HeaderValue::from_static("b=2")),
        ];
        add_fields(&mut headers, more.into_iter().collect());
        assert_eq!(headers["ratelimit"], "own");
        assert_eq!(headers.get_all(SET_COOKIE).iter().count(), 2);
    }
}
