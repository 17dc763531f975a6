//! The routes of the HTTP API: each with its handler and its entry in the OpenAPI document.
//!
//! The router and `/openapi.json` are both built from this list. A [`Route`] cannot be made without a description, so neither
//! of them has a route that the other lacks.

use std::sync::Arc;

use axum::Router;
use axum::handler::Handler;
use axum::middleware::map_response;
use axum::response::Response;
use axum::routing::{self, MethodRouter};

use ::http::HeaderValue;
use ::http::header::CACHE_CONTROL;

use super::openapi::{Operation, Schemas};
use super::{
    App, Audience, admin, alerts, doctor, events, health, http, login, metrics, page, policy, series, session, stats,
    usage,
};

/// One method of one path.
pub(super) struct Route {
    pub(super) path: &'static str,
    /// The method as OpenAPI spells it, in lower case.
    pub(super) method: &'static str,
    /// Builds the entry in the OpenAPI document.
    pub(super) describe: Describe,
    handler: MethodRouter<Arc<App>>,
}

/// Builds the entry of one route in the OpenAPI document.
pub(super) type Describe = fn(&mut Schemas) -> Operation;

/// Returns every route.
pub(super) fn all() -> impl Iterator<Item = Route> {
    callers().chain([health::routes(), metrics::routes()].into_iter().flatten()).chain(operators())
}

/// Returns the routes that callers use.
fn callers() -> impl Iterator<Item = Route> {
    [http::routes(), login::routes(), usage::routes(), events::caller_routes()].into_iter().flatten()
}

/// Returns the routes that are for operators alone.
fn operators() -> impl Iterator<Item = Route> {
    let data = [admin::routes(), alerts::routes(), events::routes(), series::routes(), stats::routes()];
    let page = [session::routes(), policy::routes(), doctor::routes(), page::routes()];
    data.into_iter().chain(page).flatten()
}

/// Returns the routes of a listener. The health checks, the metrics and the OpenAPI document are for everyone; operators also
/// have `/v1/explain` and `/v1/usage`, which change nothing.
fn of(audience: Audience) -> impl Iterator<Item = Route> {
    // By path and method: callers report events at the path at which operators read them.
    let is_in = |mut routes: Box<dyn Iterator<Item = Route>>, own: &Route| {
        routes.any(|route| (route.path, route.method) == (own.path, own.method))
    };
    all().filter(move |route| match audience {
        Audience::Everyone => true,
        Audience::Grpc => false,
        Audience::Callers => !is_in(Box::new(operators()), route),
        Audience::Operators => {
            let is_shared = matches!(route.path, "/openapi.json" | "/v1/explain" | "/v1/usage");
            is_shared || !is_in(Box::new(callers()), route)
        }
    })
}

/// Builds the router of a listener.
pub(super) fn router(audience: Audience) -> Router<Arc<App>> {
    // `Router::route` adds a method to a path that it has already.
    of(audience).fold(Router::new(), |router, route| {
        let handler = if route.method == "get" { route.handler.layer(map_response(not_stored)) } else { route.handler };
        router.route(route.path, handler)
    })
}

/// Keeps a browser from showing what it has got to those who use it after the operator. Answers to other methods are never stored.
async fn not_stored(mut response: Response) -> Response {
    response.headers_mut().entry(CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    response
}

/// Declares constructors of routes, one for each method.
macro_rules! methods {
    ($($method:ident)+) => {$(
        pub(super) fn $method<H, T>(path: &'static str, handler: H, describe: Describe) -> Route
        where
            H: Handler<T, Arc<App>>,
            T: 'static,
        {
            Route { path, method: stringify!($method), describe, handler: routing::$method(handler) }
        }
    )+};
}

methods! { get post put delete }

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::super::openapi;
    use super::*;

    /// Fails if `document` leaves a route out, or if two routes have one path and method or one operation id: the later entry
    /// of the document would replace the earlier one.
    ///
    /// Woken by: leaving out the first route in `build`.
    #[test]
    fn the_openapi_document_has_every_route_once() {
        let document: Value = serde_json::from_slice(&openapi::document()).unwrap();
        let paths = document["paths"].as_object().unwrap();
        let described: Vec<(&str, &str)> = paths
            .iter()
            .flat_map(|(path, item)| item.as_object().unwrap().keys().map(|method| (path.as_str(), method.as_str())))
            .collect();
        let routed: Vec<(&str, &str)> = all().map(|route| (route.path, route.method)).collect();
        assert_eq!(routed.len(), described.len());
        assert_eq!(BTreeSet::from_iter(routed), BTreeSet::from_iter(described));
        let ids: Vec<String> = paths
            .values()
            .flat_map(|item| item.as_object().unwrap().values())
            .map(|one| one["operationId"].to_string())
            .collect();
        assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), ids.len(), "{ids:?}");
    }
}
