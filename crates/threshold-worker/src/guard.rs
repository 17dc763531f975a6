//! The guard of an upstream: the tower layer of the limiter, on Durable Objects.

use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};

use http::header::HOST;
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Request, Response, Uri};
use threshold_core::address::AddressSource;
use threshold_core::policy::{Claims, Seen};
use threshold_limiter::Limiter;
use threshold_limiter::limiter::LimiterBuilder;
use threshold_limiter::tower::{Identified, RequestBody, Runtime as _, ThresholdLayer};
use tower_layer::Layer as _;
use tower_service::Service;
use worker::js_sys::{self, Function, Promise};
use worker::send::{SendFuture, SendWrapper};
use worker::wasm_bindgen::{JsCast as _, JsValue};
use worker::wasm_bindgen_futures::JsFuture;
use worker::web_sys::{self, WorkerGlobalScope};
use worker::worker_sys::Fetcher;
use worker::{Env, console_error};

use crate::api;
use crate::clock::DateClock;
use crate::config::{Config, ConfigError, SECRET, UPSTREAM};
use crate::events::{self, Events};
use crate::jwt::{Signed, Tokens};
use crate::message::{self, JsBody};
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
    tenants: Option<Arc<Tenants>>,
    tokens: Option<Arc<Tokens>>,
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
        let mut policy = policy.without_trusted_proxies();
        let tokens = match &policy.identity().jwt {
            Some(settings) => Some(Arc::new(Tokens::new(settings).await?)),
            None => None,
        };
        if let Some(tokens) = &tokens {
            policy = policy.with_token_verifier(Arc::<Tokens>::clone(tokens));
        }
        config.check_bindings(env, &policy)?;
        let store = Arc::new(ObjectStore::new(env.clone()));
        let events = Arc::new(Events::new(env));
        let builder = LimiterBuilder::new(policy, Arc::clone(&store), DateClock).secrets(config.secret.clone());
        let builder = builder.observer(Arc::<Events>::clone(&events));
        let limiter = Arc::new(builder.build().map_err(|error| ConfigError::Secret(SECRET, error.to_string()))?);
        let layer = ThresholdLayer::with_runtime(Arc::clone(&limiter), Arc::new(NoEvent))?;
        let layer = layer.peer(move |parts: &Parts| client(&parts.headers, forwarded));
        // Only this Worker inserts extensions.
        let layer = layer.identify(|parts: &Parts| parts.extensions.get::<Identified>().cloned().unwrap_or_default());
        let tenants = Tenants::of(env, &limiter, &events).map(Arc::new);
        Ok(Self { limiter, store, events, layer, tenants, tokens, config })
    }

    /// Answers a request: a call of the API, or a request for the upstream.
    ///
    /// # Errors
    /// Fails where JavaScript refuses the response.
    pub(crate) async fn answer(
        &self,
        entry: Entry,
        request: Request<JsBody>,
        env: &Env,
        runtime: &EventRuntime,
    ) -> worker::Result<web_sys::Response> {
        let answered = self.enter(entry, request, env, runtime).await;
        // What another object has denied is given back after the answer.
        let store = Arc::clone(&self.store);
        runtime.spawn(Box::pin(async move { store.send_later().await }));
        let events = Arc::clone(&self.events);
        runtime.spawn(Box::pin(async move { events.write().await }));
        if let Some(tenants) = self.tenants.clone() {
            runtime.spawn(Box::pin(async move { tenants.keep().await }));
        }
        answered
    }

    /// Does what is due every minute: moves events and raises alerts.
    pub async fn scheduled(&self, env: &Env) {
        events::scheduled(env, &self.limiter.policy()).await;
    }

    async fn enter(
        &self,
        entry: Entry,
        mut request: Request<JsBody>,
        env: &Env,
        runtime: &EventRuntime,
    ) -> worker::Result<web_sys::Response> {
        let target = match entry {
            Entry::Api => return Ok(Box::pin(self.call(env, request)).await?.into()),
            Entry::Fetch if api::has_token(request.headers(), &self.config) => {
                return Ok(Box::pin(self.call(env, request)).await?.into());
            }
            Entry::Fetch => match Target::of(env, &self.config) {
                Some(target) => target,
                None if self.config.token.is_some() => return Ok(api::unauthorized()?.into()),
                None => return Ok(misconfigured(&ConfigError::NoUpstream)?.into()),
            },
            Entry::Guard { handler, identity } => {
                request.extensions_mut().insert(identity);
                Target::Handler(SendWrapper::new(handler))
            }
        };
        let guarded = self.guard(request, Upstream { target, runtime: runtime.clone() }).await;
        guarded.or_else(|error| {
            console_error!("{}", serde_json::json!({"event": "upstream_failed", "reason": error.to_string()}));
            Ok(api::json(502, br#"{"error":"bad_gateway"}"#.to_vec())?.into())
        })
    }

    /// Answers a call of the API. Its future is large, and most requests make none.
    async fn call(&self, env: &Env, request: Request<JsBody>) -> worker::Result<worker::Response> {
        api::answer(&self.limiter, self.tenants.as_deref(), &self.config.secret, env, request).await
    }

    async fn guard(&self, mut request: Request<JsBody>, upstream: Upstream) -> worker::Result<web_sys::Response> {
        // The platform takes the host of the URL from the request and routes by it, so the field says the same or was replaced.
        if let Some(authority) = request.uri().authority().and_then(|own| HeaderValue::from_str(own.as_str()).ok()) {
            request.headers_mut().insert(HOST, authority);
        }
        let signed = match &self.tokens {
            Some(tokens) => tokens.signed(&self.limiter.policy(), request.headers()).await,
            None => None,
        };
        if let Some(tenants) = &self.tenants
            && let Some(tenant) = self.tenant(&request, signed.as_ref().and_then(Signed::claims))
        {
            tenants.load(&tenant).await;
        }
        let runtime = upstream.runtime.clone();
        let mut service = self.layer.clone().runtime(Arc::new(runtime.clone())).layer(upstream);
        let response = match &self.tokens {
            Some(tokens) => tokens.with_signed(signed, || service.call(request)).await?,
            None => service.call(request).await?,
        };
        message::write_response(response, &runtime)
    }

    /// Returns the tenant of a request, as the layer finds it.
    fn tenant(&self, request: &Request<JsBody>, claims: Option<&Claims>) -> Option<String> {
        let given = request.extensions().get::<Identified>().and_then(|identity| identity.tenant.clone());
        given.or_else(|| {
            let host = request.headers().get(HOST).and_then(|host| host.to_str().ok());
            let seen = Seen::<[(&str, &str)]> {
                trusted: false,
                headers: None,
                host,
                path: Some(request.uri().path()),
                claims,
            };
            self.limiter.policy().identity().tenant.as_ref()?.find(&seen)
        })
    }
}

/// Answers 500 and logs the reason. The client does not read which setting is missing.
pub(crate) fn misconfigured(error: &ConfigError) -> worker::Result<worker::Response> {
    console_error!("{}", serde_json::json!({"event": "misconfigured", "reason": error.to_string()}));
    api::json(500, br#"{"error":"misconfigured"}"#.to_vec())
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

/// The application behind the guard, for one event.
#[derive(Clone)]
struct Upstream {
    target: Target,
    runtime: EventRuntime,
}

/// Where allowed requests go.
#[derive(Clone)]
enum Target {
    /// A service binding.
    Service(SendWrapper<Fetcher>),
    /// The host of a URL.
    Url(Uri),
    /// A function of the Worker's own JavaScript.
    Handler(SendWrapper<Function>),
}

impl Target {
    /// Returns the upstream of the settings.
    fn of(env: &Env, config: &Config) -> Option<Self> {
        match &config.upstream {
            Some(url) => Some(Self::Url(url.clone())),
            None => Some(Self::Service(SendWrapper::new(JsValue::from(env.service(UPSTREAM).ok()?).unchecked_into()))),
        }
    }
}

impl Upstream {
    async fn fetch(self, request: Request<RequestBody<JsBody>>) -> worker::Result<Response<JsBody>> {
        let url = match &self.target {
            Target::Url(url) => Some(redirected(request.uri(), url)?),
            Target::Service(_) | Target::Handler(_) => None,
        };
        let request = message::write_request(request, url.as_deref(), &self.runtime)?;
        let returned = match &self.target {
            Target::Service(service) => service.fetch(&request)?,
            Target::Url(_) => js_sys::global().unchecked_into::<WorkerGlobalScope>().fetch_with_request(&request),
            // It may return a response or a promise of one.
            Target::Handler(handler) => Promise::resolve(&handler.call1(&JsValue::UNDEFINED, &request)?),
        };
        let response = JsFuture::from(returned).await?;
        message::read_response(response.dyn_into().map_err(|_| "the upstream returned no Response")?)
    }
}

impl Service<Request<RequestBody<JsBody>>> for Upstream {
    type Response = Response<JsBody>;
    type Error = worker::Error;
    type Future = Pin<Box<dyn Future<Output = worker::Result<Response<JsBody>>> + Send>>;

    fn poll_ready(&mut self, _: &mut TaskContext<'_>) -> Poll<worker::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<RequestBody<JsBody>>) -> Self::Future {
        Box::pin(SendFuture::new(self.clone().fetch(request)))
    }
}

/// Returns the URL of a request with the scheme and authority of the upstream.
fn redirected(uri: &Uri, upstream: &Uri) -> worker::Result<String> {
    let mut parts = uri.clone().into_parts();
    parts.scheme = upstream.scheme().cloned();
    parts.authority = upstream.authority().cloned();
    let uri = Uri::from_parts(parts).map_err(|error| worker::Error::RustError(error.to_string()))?;
    Ok(uri.to_string())
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
