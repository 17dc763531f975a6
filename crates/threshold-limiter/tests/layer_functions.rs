//! What users of other rate-limit middleware ask for first: skipped requests, a key of their own, a response of their own.

#![cfg(feature = "tower")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::routing::get;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::BodyExt as _;
use key_value::KeyValueStore;
use threshold_limiter::tower::{Identified, LayerError, PeerAddr, RefusedRequest, ThresholdLayer};
use threshold_limiter::{Limit, Limiter, Policy, Secret};
use tower::ServiceExt as _;

#[path = "stores/key_value.rs"]
mod key_value;

const CLIENT: ([u8; 4], u16) = ([203, 0, 113, 7], 4711);

fn app(layer: ThresholdLayer) -> Router {
    Router::new().route("/", get(|| async { "hello" })).route("/healthz", get(|| async { "ok" })).layer(layer)
}

/// Sends a request with this API key.
async fn ask(app: &Router, path: &str, key: Option<&'static str>) -> Response<Body> {
    let mut request = Request::builder().uri(path).body(Body::empty()).unwrap();
    request.extensions_mut().insert(PeerAddr(SocketAddr::from(CLIENT)));
    if let Some(key) = key {
        request.headers_mut().insert("x-api-key", HeaderValue::from_static(key));
    }
    app.clone().oneshot(request).await.unwrap()
}

async fn statuses(app: &Router, path: &str, key: Option<&'static str>, times: usize) -> Vec<u16> {
    let mut statuses = Vec::new();
    for _ in 0..times {
        statuses.push(ask(app, path, key).await.status().as_u16());
    }
    statuses
}

async fn text(response: Response<Body>) -> String {
    String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
}

/// A load balancer's health checks used up the limit of the address that everyone behind it shares.
#[tokio::test]
async fn a_skipped_request_is_neither_decided_nor_counted() {
    let app = app(ThresholdLayer::per_ip("2/min").unwrap().skip(|parts| parts.uri.path() == "/healthz"));
    assert_eq!(statuses(&app, "/healthz", None, 5).await, [200; 5]);
    assert_eq!(statuses(&app, "/", None, 3).await, [200, 200, 429]);
    let checked = ask(&app, "/healthz", None).await;
    assert_eq!(checked.status(), 200);
    assert!(!checked.headers().contains_key("x-ratelimit-limit"), "{checked:?}");
}

/// A developer with API keys had to write a policy with `fact:` and an `identify` function for one limit.
#[tokio::test]
async fn a_key_of_the_application_has_a_budget_of_its_own() {
    let layer =
        ThresholdLayer::per_key("2/min", |parts| Some(parts.headers.get("x-api-key")?.to_str().ok()?.to_owned()));
    // A function that identifies callers for other reasons does not lose the key.
    let app = app(layer.unwrap().identify(|_| Identified { user: Some("ada".to_owned()), ..Identified::default() }));
    assert_eq!(statuses(&app, "/", Some("k1"), 3).await, [200, 200, 429]);
    assert_eq!(statuses(&app, "/", Some("k2"), 3).await, [200, 200, 429]);
    // Without a key, the address is counted.
    assert_eq!(statuses(&app, "/", None, 3).await, [200, 200, 429]);
}

/// Makes a page of the application's own.
#[expect(clippy::needless_pass_by_value, reason = "the layer hands over the response that it would send")]
fn page(refused: RefusedRequest<'_>) -> Response<String> {
    let rule = refused.denied.and_then(|(decision, policy)| Some(decision.rule(policy)?.name.to_string()));
    let text = format!("{} {} {}", refused.request.uri, rule.as_deref().unwrap_or("-"), refused.response.status());
    let mut response = Response::new(text);
    *response.status_mut() = StatusCode::IM_A_TEAPOT;
    response
}

/// A front end reads errors in one shape, and the limiter's JSON was another.
#[tokio::test]
async fn a_denial_has_the_response_of_the_application_and_the_fields_of_the_layer() {
    let app = app(ThresholdLayer::per_ip("1/min").unwrap().on_refused(page));
    assert_eq!(text(ask(&app, "/", None).await).await, "hello");
    let denied = ask(&app, "/", None).await;
    assert_eq!(denied.status(), StatusCode::IM_A_TEAPOT);
    assert_eq!(denied.headers()["retry-after"], "60");
    assert_eq!(denied.headers()["cache-control"], "no-store");
    assert_eq!(text(denied).await, "/ per-ip 429 Too Many Requests");
}

/// The same where the decision comes later, from a store across a network.
#[tokio::test]
async fn a_store_that_answers_later_changes_nothing_in_the_response() {
    let policy: Policy = "[[rule]]\nname = 'slow'\nper = ['ip']\nlimit = '1/min'".parse().unwrap();
    let secret = Secret::new(&[9; 32]).unwrap();
    let limiter = Limiter::builder(policy).store(KeyValueStore::default()).secrets(secret).build().unwrap();
    let app = app(ThresholdLayer::new(Arc::new(limiter)).unwrap().on_refused(page));
    assert_eq!(text(ask(&app, "/", None).await).await, "hello");
    assert_eq!(text(ask(&app, "/", None).await).await, "/ slow 429 Too Many Requests");
}

/// A request that cannot be decided has no decision to read; its response is the application's too.
#[tokio::test]
async fn an_undecided_request_has_the_response_of_the_application_too() {
    let layer = ThresholdLayer::per_ip("5/min").unwrap().on_refused(page);
    let app = app(layer.identify(|_| Identified { cost: Some(6), ..Identified::default() }));
    assert_eq!(text(ask(&app, "/", None).await).await, "/ - 400 Bad Request");
}

/// A developer wrote "0/min" to close an endpoint for a while, and it was open to everyone without a limit: in a policy file 0
/// means unlimited, since a variable cannot be a word. `lint` warns of it there; in code nothing did.
#[tokio::test]
async fn a_limit_of_zero_is_an_error_that_asks_which_is_meant() {
    for zero in ["0", "0/min", " 0/h"] {
        let error = ThresholdLayer::per_ip(zero).unwrap_err();
        assert_eq!(error, LayerError::Zero, "{zero}");
        let message = error.to_string();
        assert!(message.contains("\"unlimited\"") && message.contains("\"none\""), "{message}");
        assert_eq!(ThresholdLayer::per_key(zero, |_| None).unwrap_err(), LayerError::Zero);
    }
    assert_eq!(statuses(&app(ThresholdLayer::per_ip("unlimited").unwrap()), "/", None, 3).await, [200; 3]);
    assert_eq!(statuses(&app(ThresholdLayer::per_ip("none").unwrap()), "/", None, 1).await, [429]);
    assert_eq!(statuses(&app(ThresholdLayer::per_ip(Limit::per_minute(0)).unwrap()), "/", None, 1).await, [429]);
}
