//! Threshold as a Cloudflare Worker: the same core and the same policy, on Cloudflare's runtime.
//!
//! `tools/build` builds it into a folder that `wrangler` deploys and miniflare runs. The Worker guards an upstream and serves the HTTP
//! API to other Workers; its limits are kept in Durable Objects. JavaScript of a Worker that imports the module calls [`guard()`] and
//! [`api`].

mod api;
pub mod clock;
pub mod config;
pub mod events;
pub mod guard;
mod identity;
mod jwt;
mod message;
pub mod object;
pub mod runtime;
mod socket;
mod stats;
pub mod store;
pub mod tenants;
#[cfg(feature = "vectors")]
mod vectors;
mod warnings;

use std::cell::RefCell;
use std::rc::Rc;

use threshold_wire::ApiError;
use worker::js_sys::{Error, Function, Reflect, TypeError};
use worker::wasm_bindgen::prelude::wasm_bindgen;
use worker::wasm_bindgen::{JsCast as _, JsValue};
use worker::wasm_bindgen_futures::JsFuture;
use worker::worker_sys::Context as JsContext;
use worker::{Context, Env, wasm_bindgen, wasm_bindgen_futures, web_sys};

use config::ConfigError;
use guard::{Entry, Guard};
use message::BadRequest;
use runtime::EventRuntime;

thread_local! {
    /// The guard of this isolate. An isolate has one thread.
    static GUARD: RefCell<Option<Rc<Guard>>> = const { RefCell::new(None) };
}

/// Answers an HTTP request: a call of the API with its token, or a request for the upstream.
///
/// # Errors
/// Fails where JavaScript refuses the request or the response.
#[wasm_bindgen]
pub async fn fetch(request: web_sys::Request, env: Env, context: JsContext) -> Result<web_sys::Response, JsValue> {
    #[cfg(feature = "vectors")]
    if request.url().ends_with("/vectors") {
        return Ok(vectors::play_all(worker::request_from_wasm(request)?, env).await?.into());
    }
    enter(Entry::Fetch, request, env, context).await
}

/// Guards a handler of the Worker that imports this module. `identity` is an object with the strings `tenant`, `user` and `tier`, each
/// of which may be missing.
///
/// # Errors
/// Fails with a `TypeError` where an argument is of another type.
#[wasm_bindgen]
pub async fn guard(
    request: web_sys::Request,
    env: Env,
    context: JsContext,
    handler: JsValue,
    identity: JsValue,
) -> Result<web_sys::Response, JsValue> {
    check_arguments("guard", &request, &env, &context)?;
    let handler: Function = handler.dyn_into().map_err(|_| TypeError::new("guard: the handler is not a function"))?;
    let identity = identity::read(&identity)?;
    enter(Entry::Guard { handler, identity }, request, env, context).await
}

/// Answers a call of the API by the Worker that imports this module. It needs no token.
///
/// # Errors
/// Fails with a `TypeError` where an argument is of another type.
#[wasm_bindgen]
pub async fn api(request: web_sys::Request, env: Env, context: JsContext) -> Result<web_sys::Response, JsValue> {
    check_arguments("api", &request, &env, &context)?;
    enter(Entry::Api, request, env, context).await
}

/// Does what is due every minute: moves events from KV to D1, and raises alerts.
///
/// # Errors
/// Fails where a setting is missing or invalid.
#[wasm_bindgen]
pub async fn scheduled(env: Env) -> Result<(), JsValue> {
    let guard = guard_of_isolate(&env).await.map_err(|error| Error::new(&error.to_string()))?;
    guard.scheduled(&env).await;
    Ok(())
}

/// Checks what the JavaScript of a Worker has passed. The platform passes the right types to the fetch event.
fn check_arguments(function: &str, request: &JsValue, env: &JsValue, context: &JsValue) -> Result<(), TypeError> {
    let wrong = if !request.is_instance_of::<web_sys::Request>() {
        "the request is not a Request"
    } else if !env.is_object() {
        "env is not an object"
    } else if !Reflect::get(context, &"waitUntil".into()).is_ok_and(|found| found.is_function()) {
        "ctx is not the context of an event"
    } else {
        return Ok(());
    };
    Err(TypeError::new(&format!("{function}: {wrong}")))
}

/// Answers a request that has come in by one of the entries.
async fn enter(
    entry: Entry,
    request: web_sys::Request,
    env: Env,
    context: JsContext,
) -> Result<web_sys::Response, JsValue> {
    let request = match message::read_request(request) {
        Ok(request) => request,
        Err(bad) => return Ok(api::refuse(&refused(bad))?.into()),
    };
    let runtime = EventRuntime::new(Context::new(context));
    let answering = runtime.clone();
    // A client that leaves does not end this, so that what its request holds is given back.
    let answered = runtime.keep(async move {
        match guard_of_isolate(&env).await {
            Ok(guard) => guard.answer(entry, request, &env, &answering).await,
            Err(error) => Ok(guard::misconfigured(&error)?.into()),
        }
    });
    Ok(JsFuture::from(answered).await?.unchecked_into())
}

fn refused(bad: BadRequest) -> ApiError {
    let (status, code, field, message) = match bad {
        BadRequest::TooLong => (414, "uri_too_long", "path", "the URL is too long"),
        BadRequest::Url => (400, "bad_request", "path", "the URL has a character that must be percent-encoded"),
        BadRequest::Method => (400, "bad_request", "method", "the method is not a token"),
        BadRequest::Header => (400, "bad_request", "header", "a field has a character that no header has"),
    };
    ApiError::new(status, code, message).about(Some(field.to_owned()))
}

/// Returns the guard of this isolate, and creates it for the first request. A failure is not remembered, so that a Worker recovers
/// when its policy is mended.
async fn guard_of_isolate(env: &Env) -> Result<Rc<Guard>, ConfigError> {
    if let Some(guard) = GUARD.with_borrow(Clone::clone) {
        return Ok(guard);
    }
    let guard = Rc::new(Guard::new(env).await?);
    // Another event may have been faster. Both must use one limiter, which remembers denials.
    Ok(GUARD.with_borrow_mut(|known| Rc::clone(known.get_or_insert(guard))))
}
