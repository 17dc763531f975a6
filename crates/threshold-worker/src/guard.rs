//! The guard of an upstream: the tower layer of the limiter, on Durable Objects.

use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};

use http::header::HOST;
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Request, Response, Uri};
use threshold_core::address::AddressSource;
use threshold_limiter::Limiter;
use threshold_limiter::limiter::LimiterBuilder;
use threshold_limiter::tower::{RequestBody, Runtime, ThresholdLayer};
use tower_layer::Layer as _;
use tower_service::Service;
use worker::send::{SendFuture, SendWrapper};
use worker::{Body, Context, Env, Fetch, HttpRequest, console_error};

use crate::api;
use crate::clock::DateClock;
use crate::config::{Config, ConfigError, UPSTREAM};
use crate::runtime::{EventRuntime, NoEvent};
use crate::store::ObjectStore;

/// The header in which Cloudflare puts the address of the client, in place of what the client has sent under this name.
const CLIENT_ADDRESS: &str = "cf-connecting-ip";

/// The limiter of an isolate.
pub type ObjectLimiter = Limiter<Arc<ObjectStore>, DateClock>;

/// The guard of an upstream, once for each isolate.
#[derive(Debug)]
pub struct Guard {
    limiter: Arc<ObjectLimiter>,
    store: Arc<ObjectStore>,
    layer: ThresholdLayer,
    config: Config,
}

impl Guard {
    /// Creates the guard from the bindings of a Worker.
    ///
    /// # Errors
    /// Fails where a binding is missing or the policy is not valid.
    pub async fn new(env: &Env) -> Result<Self, ConfigError> {
        let config = Config::read(env).await?;
        let policy = config.policy(env)?;
        // The platform vouches for the address of the client and for nothing else, so no header names a tenant or a user.
        let forwarded = policy.identity().address.sources.contains(&AddressSource::XForwardedFor);
        let policy = policy.without_trusted_proxies();
        config.check_bindings(env, &policy)?;
        let store = Arc::new(ObjectStore::new(env.clone()));
        let builder = LimiterBuilder::new(policy, Arc::clone(&store), DateClock).secrets(config.secret.clone());
        let limiter = Arc::new(builder.build());
        let layer = ThresholdLayer::with_runtime(Arc::clone(&limiter), Arc::new(NoEvent))?;
        let layer = layer.peer(move |parts: &Parts| client(&parts.headers, forwarded));
        Ok(Self { limiter, store, layer, config })
    }

    /// Answers a request: a call of the API, or a request for the upstream.
    ///
    /// # Errors
    /// Fails where the upstream does.
    pub async fn answer(&self, request: HttpRequest, env: &Env, context: Context) -> worker::Result<worker::Response> {
        let runtime = Arc::new(EventRuntime::new(context));
        let answered = match api::Call::of(request.method(), request.uri().path(), request.headers(), &self.config) {
            Some(call) => call.answer(&self.limiter, request).await,
            None => self.guard(request, env, &runtime).await,
        };
        // What another object has denied is given back after the answer.
        let store = Arc::clone(&self.store);
        runtime.spawn(Box::pin(async move { store.send_later().await }));
        answered
    }

    async fn guard(
        &self,
        mut request: HttpRequest,
        env: &Env,
        runtime: &Arc<EventRuntime>,
    ) -> worker::Result<worker::Response> {
        // The platform takes the host of the URL from the request and routes by it, so the field says the same or was replaced.
        if let Some(authority) = request.uri().authority().and_then(|own| HeaderValue::from_str(own.as_str()).ok()) {
            request.headers_mut().insert(HOST, authority);
        }
        // JavaScript makes no GET or HEAD with a body, also not with an empty one that a client has announced.
        if matches!(*request.method(), Method::GET | Method::HEAD) {
            *request.body_mut() = Body::empty();
        }
        let upstream = Upstream { env: SendWrapper::new(env.clone()), url: self.config.upstream.clone() };
        let mut service = self.layer.clone().runtime(Arc::clone(runtime) as Arc<dyn Runtime>).layer(upstream);
        match service.call(request).await {
            Ok(response) => worker::Response::try_from(response),
            Err(error) => {
                console_error!("{}", serde_json::json!({"event": "upstream_failed", "reason": error.to_string()}));
                Ok(worker::Response::error(r#"{"error":"bad_gateway"}"#, 502)?)
            }
        }
    }
}

/// Returns the address of the client.
///
/// Cloudflare sets its header on every request from outside. Another Worker on the same account sends none; then the last address of
/// `X-Forwarded-For` counts, if the policy says so.
fn client(headers: &HeaderMap, forwarded: bool) -> Option<SocketAddr> {
    let only = |name: &str| {
        let mut lines = headers.get_all(name).iter();
        let (first, more) = (lines.next()?, lines.next());
        first.to_str().ok().filter(|_| more.is_none())
    };
    let address = match only(CLIENT_ADDRESS) {
        Some(address) => address.trim().parse::<IpAddr>().ok()?,
        None if forwarded && !headers.contains_key(CLIENT_ADDRESS) => {
            only("x-forwarded-for")?.rsplit(',').next()?.trim().parse().ok()?
        }
        None => return None,
    };
    Some(SocketAddr::new(address, 0))
}

/// The application behind the guard: a service binding, or the host of a URL.
#[derive(Clone)]
struct Upstream {
    env: SendWrapper<Env>,
    url: Option<Uri>,
}

impl Service<Request<RequestBody<Body>>> for Upstream {
    type Response = Response<Body>;
    type Error = worker::Error;
    type Future = Pin<Box<dyn Future<Output = worker::Result<Response<Body>>> + Send>>;

    fn poll_ready(&mut self, _: &mut TaskContext<'_>) -> Poll<worker::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<RequestBody<Body>>) -> Self::Future {
        let Self { env, url } = self.clone();
        Box::pin(SendFuture::new(async move {
            match url {
                None => env.service(UPSTREAM)?.fetch_request(request).await,
                Some(url) => {
                    let request = worker::Request::try_from(redirected(request, &url)?)?;
                    Response::<Body>::try_from(Fetch::Request(request).send().await?)
                }
            }
        }))
    }
}

/// Returns the request with the scheme and authority of the upstream.
fn redirected<B>(mut request: Request<B>, url: &Uri) -> worker::Result<Request<B>> {
    let mut parts = request.uri().clone().into_parts();
    parts.scheme = url.scheme().cloned();
    parts.authority = url.authority().cloned();
    *request.uri_mut() = Uri::from_parts(parts).map_err(|error| worker::Error::RustError(error.to_string()))?;
    Ok(request)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_is_cloudflares() {
        let client = |lines: &[(&'static str, &str)], forwarded| {
            let mut headers = HeaderMap::new();
            for (name, value) in lines {
                headers.append(*name, value.parse().unwrap());
            }
            client(&headers, forwarded).map(|address| address.ip().to_string())
        };
        let (cf, forwarded) = ("cf-connecting-ip", "x-forwarded-for");
        let own = Some("203.0.113.7".to_owned());
        assert_eq!(client(&[(cf, "203.0.113.7"), (forwarded, "198.51.100.1")], true), own);
        assert_eq!(client(&[(forwarded, "198.51.100.1, 203.0.113.7")], true), own);
        // Only where the policy says so, and never beside a header of Cloudflare that cannot be read.
        assert_eq!(client(&[(forwarded, "203.0.113.7")], false), None);
        assert_eq!(client(&[(cf, "no address"), (forwarded, "203.0.113.7")], true), None);
        assert_eq!(client(&[(cf, "203.0.113.7"), (cf, "203.0.113.8"), (forwarded, "203.0.113.7")], true), None);
    }
}
