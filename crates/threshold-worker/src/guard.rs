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
use threshold_core::policy::Seen;
use threshold_limiter::Limiter;
use threshold_limiter::limiter::LimiterBuilder;
use threshold_limiter::tower::{Identified, RequestBody, Runtime, ThresholdLayer};
use tower_layer::Layer as _;
use tower_service::Service;
use worker::js_sys::{Function, Promise};
use worker::send::{SendFuture, SendWrapper};
use worker::wasm_bindgen::{JsCast as _, JsValue};
use worker::wasm_bindgen_futures::JsFuture;
use worker::{Body, Context, Env, Fetch, Fetcher, HttpRequest, console_error, web_sys};

use crate::api;
use crate::clock::DateClock;
use crate::config::{Config, ConfigError, UPSTREAM};
use crate::events::{self, Events};
use crate::runtime::{EventRuntime, NoEvent};
use crate::store::ObjectStore;
use crate::tenants::Tenants;

/// The header in which Cloudflare puts the address of the client, in place of what the client has sent under this name.
const CLIENT_ADDRESS: &str = "cf-connecting-ip";

/// The limiter of an isolate.
pub type ObjectLimiter = Limiter<Arc<ObjectStore>, DateClock>;

/// How a request comes in.
#[derive(Debug)]
pub enum Entry {
    /// The fetch event: callers with the token use the API, everything else is for the upstream of the settings.
    Fetch,
    /// A Worker that imports the module guards a handler of its own, and has authenticated the caller.
    Guard {
        /// The function that answers allowed requests.
        handler: Function,
        /// The caller.
        identity: Identified,
    },
    /// A Worker that imports the module calls the API.
    Api,
}

/// The guard of an upstream, once for each isolate.
#[derive(Debug)]
pub struct Guard {
    limiter: Arc<ObjectLimiter>,
    store: Arc<ObjectStore>,
    events: Arc<Events>,
    layer: ThresholdLayer,
    tenants: Option<Tenants>,
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
        let events = Arc::new(Events::new(env));
        let builder = LimiterBuilder::new(policy, Arc::clone(&store), DateClock).secrets(config.secret.clone());
        let builder = builder.observer(Arc::<Events>::clone(&events));
        let limiter = Arc::new(builder.build());
        let layer = ThresholdLayer::with_runtime(Arc::clone(&limiter), Arc::new(NoEvent))?;
        let layer = layer.peer(move |parts: &Parts| client(&parts.headers, forwarded));
        // Only this Worker inserts extensions.
        let layer = layer.identify(|parts: &Parts| parts.extensions.get::<Identified>().cloned().unwrap_or_default());
        let tenants = Tenants::of(env, &limiter);
        Ok(Self { limiter, store, events, layer, tenants, config })
    }

    /// Answers a request: a call of the API, or a request for the upstream.
    ///
    /// # Errors
    /// Fails where JavaScript refuses the request or the response.
    pub async fn answer(
        &self,
        entry: Entry,
        request: HttpRequest,
        env: &Env,
        context: Context,
    ) -> worker::Result<worker::Response> {
        let runtime = Arc::new(EventRuntime::new(context));
        let answered = self.enter(entry, request, env, &runtime).await;
        // What another object has denied is given back after the answer.
        let store = Arc::clone(&self.store);
        runtime.spawn(Box::pin(async move { store.send_later().await }));
        let events = Arc::clone(&self.events);
        runtime.spawn(Box::pin(async move { events.write().await }));
        answered
    }

    /// Does what is due every minute: moves events and raises alerts.
    pub async fn scheduled(&self, env: &Env) {
        events::scheduled(env, &self.limiter.policy()).await;
    }

    async fn enter(
        &self,
        entry: Entry,
        mut request: HttpRequest,
        env: &Env,
        runtime: &Arc<EventRuntime>,
    ) -> worker::Result<worker::Response> {
        let upstream = match entry {
            Entry::Api => {
                return api::answer(&self.limiter, self.tenants.as_ref(), &self.config.secret, env, request).await;
            }
            Entry::Fetch if api::has_token(request.headers(), &self.config) => {
                return api::answer(&self.limiter, self.tenants.as_ref(), &self.config.secret, env, request).await;
            }
            Entry::Fetch => match Upstream::of(env, &self.config) {
                Some(upstream) => upstream,
                None if self.config.token.is_some() => return api::unauthorized(),
                None => return misconfigured(&ConfigError::NoUpstream),
            },
            Entry::Guard { handler, identity } => {
                request.extensions_mut().insert(identity);
                Upstream::Handler(SendWrapper::new(handler))
            }
        };
        self.guard(request, upstream, runtime).await
    }

    async fn guard(
        &self,
        mut request: HttpRequest,
        upstream: Upstream,
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
        if let Some(tenants) = &self.tenants
            && let Some(tenant) = self.tenant(&request)
        {
            tenants.load(&tenant).await;
        }
        let mut service = self.layer.clone().runtime(Arc::clone(runtime) as Arc<dyn Runtime>).layer(upstream);
        match service.call(request).await {
            Ok(response) => worker::Response::try_from(response),
            Err(error) => {
                console_error!("{}", serde_json::json!({"event": "upstream_failed", "reason": error.to_string()}));
                Ok(worker::Response::error(r#"{"error":"bad_gateway"}"#, 502)?)
            }
        }
    }

    /// Returns the tenant of a request, as the layer finds it.
    fn tenant(&self, request: &HttpRequest) -> Option<String> {
        let given = request.extensions().get::<Identified>().and_then(|identity| identity.tenant.clone());
        given.or_else(|| {
            let host = request.headers().get(HOST).and_then(|host| host.to_str().ok());
            let seen = Seen::<[(&str, &str)]> {
                trusted: false,
                headers: None,
                host,
                path: Some(request.uri().path()),
                claims: None,
            };
            self.limiter.policy().identity().tenant.as_ref()?.find(&seen)
        })
    }
}

/// Answers 500 and logs the reason. The client does not read which setting is missing.
pub(crate) fn misconfigured(error: &ConfigError) -> worker::Result<worker::Response> {
    console_error!("{}", serde_json::json!({"event": "misconfigured", "reason": error.to_string()}));
    worker::Response::error(r#"{"error":"misconfigured"}"#, 500)
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

/// The application behind the guard.
#[derive(Clone)]
enum Upstream {
    /// A service binding.
    Service(SendWrapper<Fetcher>),
    /// The host of a URL.
    Url(Uri),
    /// A function of the Worker's own JavaScript.
    Handler(SendWrapper<Function>),
}

impl Upstream {
    /// Returns the upstream of the settings.
    fn of(env: &Env, config: &Config) -> Option<Self> {
        match &config.upstream {
            Some(url) => Some(Self::Url(url.clone())),
            None => env.service(UPSTREAM).ok().map(|service| Self::Service(SendWrapper::new(service))),
        }
    }

    async fn fetch(self, request: Request<RequestBody<Body>>) -> worker::Result<Response<Body>> {
        match self {
            Self::Service(service) => service.fetch_request(request).await,
            Self::Url(url) => {
                let request = worker::Request::try_from(redirected(request, &url)?)?;
                Response::<Body>::try_from(Fetch::Request(request).send().await?)
            }
            Self::Handler(handler) => {
                let request = worker::Request::try_from(request)?;
                let returned = handler.call1(&JsValue::UNDEFINED, request.inner())?;
                let response = JsFuture::from(Promise::resolve(&returned)).await?;
                let response =
                    response.dyn_into::<web_sys::Response>().map_err(|_| "the handler returned no Response")?;
                Response::<Body>::try_from(worker::Response::from(response))
            }
        }
    }
}

impl Service<Request<RequestBody<Body>>> for Upstream {
    type Response = Response<Body>;
    type Error = worker::Error;
    type Future = Pin<Box<dyn Future<Output = worker::Result<Response<Body>>> + Send>>;

    fn poll_ready(&mut self, _: &mut TaskContext<'_>) -> Poll<worker::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<RequestBody<Body>>) -> Self::Future {
        Box::pin(SendFuture::new(self.clone().fetch(request)))
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
