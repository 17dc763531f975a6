//! Threshold as a Cloudflare Worker: the same core and the same policy, on Cloudflare's runtime.
//!
//! `tools/build` builds it into a folder that `wrangler` deploys and miniflare runs. The Worker guards an upstream and serves the HTTP
//! API to other Workers; its limits are kept in Durable Objects.

mod api;
pub mod clock;
pub mod config;
pub mod guard;
pub mod object;
pub mod runtime;
pub mod store;
#[cfg(feature = "vectors")]
mod vectors;

use std::cell::RefCell;
use std::rc::Rc;

use worker::{Context, Env, HttpRequest, Response, Result, console_error, event};

use config::ConfigError;
use guard::Guard;

thread_local! {
    /// The guard of this isolate. An isolate has one thread.
    static GUARD: RefCell<Option<Rc<Guard>>> = const { RefCell::new(None) };
}

/// Answers an HTTP request.
///
/// # Errors
/// Returns an error if the upstream fails.
#[event(fetch)]
pub async fn fetch(request: HttpRequest, env: Env, context: Context) -> Result<Response> {
    #[cfg(feature = "vectors")]
    if request.uri().path() == "/vectors" {
        return vectors::play_all(request, env).await;
    }
    match guard(&env).await {
        Ok(guard) => guard.answer(request, &env, context).await,
        Err(error) => {
            // The client does not read which setting is missing.
            console_error!("{}", serde_json::json!({"event": "misconfigured", "reason": error.to_string()}));
            Response::error(r#"{"error":"misconfigured"}"#, 500)
        }
    }
}

/// Returns the guard of this isolate, and creates it for the first request. A failure is not remembered, so that a Worker recovers
/// when its policy is mended.
async fn guard(env: &Env) -> core::result::Result<Rc<Guard>, ConfigError> {
    if let Some(guard) = GUARD.with_borrow(Clone::clone) {
        return Ok(guard);
    }
    let guard = Rc::new(Guard::new(env).await?);
    // Another event may have been faster. Both must use one limiter, which remembers denials.
    Ok(GUARD.with_borrow_mut(|known| Rc::clone(known.get_or_insert(guard))))
}
