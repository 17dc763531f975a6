//! A public API for browsers: CORS, logging, error handling, limit, authentication, in this order and on all routes.
//!
//! ```console
//! $ RATE_LIMIT_PER_IP=3 cargo run --example weather
//! $ curl -i 127.0.0.1:3000/forecast                                   # 401, and counted: guessing has its price
//! $ curl -i -H 'Authorization: Bearer sunny' 127.0.0.1:3000/forecast  # 200 twice, then 429 until a token is back
//! $ curl -i -X OPTIONS -H 'Origin: https://a.example' -H 'Access-Control-Request-Method: GET' 127.0.0.1:3000/forecast
//! ```
//!
//! The last is what a browser asks before it asks. It is answered as often as it comes, and never counted.
//! `RATE_LIMIT_GLOBAL` says how many requests a minute are allowed to all addresses together.

use std::error::Error;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::extract::Request;
use axum::http::{HeaderName, Method, StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse as _, Response};
use axum::{Router, routing::get};
use subtle::ConstantTimeEq as _;
use threshold_limiter::tower::ThresholdLayer;
use threshold_limiter::{Limiter, Policy};
use tower_http::{catch_panic::CatchPanicLayer, cors::CorsLayer, trace::TraceLayer};

/// Its `client_ip` is Cloudflare's header, else X-Forwarded-For, each believed from `trusted_proxies` only.
const POLICY: &str = include_str!("policies/weather-api.toml");
/// What a script on another site may read of an answer. The browser hides every other field from it.
const EXPOSED: [&str; 6] =
    ["ratelimit", "ratelimit-policy", "retry-after", "x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"];
const TOKEN: &[u8] = b"Bearer sunny";

async fn authenticate(request: Request, next: Next) -> Response {
    match request.headers().get(header::AUTHORIZATION) {
        Some(token) if token.as_bytes().ct_eq(TOKEN).into() => next.run(request).await,
        _ => (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, "Bearer")]).into_response(),
    }
}

async fn forecast() -> &'static str {
    "sunny, later rain\n"
}

/// A handler with a bug, to show that a page can read even that answer.
#[expect(clippy::panic, reason = "this is the bug")]
async fn storm() -> &'static str {
    panic!("nobody knows where it goes")
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(tracing::Level::DEBUG).init();
    let policy = Policy::parse(POLICY, &|name| std::env::var(name).ok())?;
    let limit = ThresholdLayer::new(Arc::new(Limiter::new(policy)))?;
    let cors = CorsLayer::new()
        .allow_origin(tower_http::cors::Any)
        .allow_methods([Method::GET])
        .allow_headers([header::AUTHORIZATION])
        .expose_headers(EXPOSED.map(HeaderName::from_static));
    // The last layer is the outermost: all answers of those inside CORS are readable, a panic is logged as a 500.
    let app = Router::new()
        .route("/forecast", get(forecast))
        .route("/storm", get(storm))
        .layer(from_fn(authenticate))
        .layer(limit)
        .layer(CatchPanicLayer::new())
        .layer(TraceLayer::new_for_http())
        .layer(cors);
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:3000".to_owned());
    let listener = tokio::net::TcpListener::bind(address).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
