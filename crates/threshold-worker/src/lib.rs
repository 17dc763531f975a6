//! Threshold as a Cloudflare Worker: the same core and the same policy, on Cloudflare's runtime.
//!
//! `tools/build` builds it into a folder that `wrangler` deploys and miniflare runs.

pub mod clock;
pub mod runtime;
#[cfg(feature = "vectors")]
mod vectors;

use http::StatusCode;
use worker::{Body, Context, Env, HttpRequest, Result, event};

/// Answers an HTTP request.
///
/// # Errors
/// Returns an error if JavaScript refuses the answer.
#[event(fetch)]
pub async fn fetch(request: HttpRequest, env: Env, context: Context) -> Result<http::Response<Body>> {
    let _ = (&env, &context);
    match request.uri().path() {
        "/healthz" => answer(StatusCode::OK, "ok\n"),
        #[cfg(feature = "vectors")]
        "/vectors" => vectors::play_all(request).await,
        _ => answer(StatusCode::NOT_FOUND, "not found\n"),
    }
}

fn answer(status: StatusCode, text: &'static str) -> Result<http::Response<Body>> {
    worker::Response::ok(text)?.with_status(status.as_u16()).try_into()
}
