//! The layer: a limiter, and how to find the identity of a request.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::request::Parts;
use http::{HeaderName, Response};
use threshold_core::policy::{Claims, Policy};
#[cfg(feature = "memory")]
use threshold_core::policy::{LimitText, Per, PolicyError, Rule, RuleBuilder};
use tower_layer::Layer;

use super::answer::NO_ADDRESS;
use super::gate::{Refused, Strike};
use super::pending_charges::{Answers, AnyLimiter};
use super::pool::Pool;
use super::refused_request::{self, RefusedRequest, Respond};
use super::request_facts::{Identified, Lines, Peer, PeerAddr, PolicyView};
use super::runtime::{Background, Runtime};
use super::service::ThresholdService;
use crate::clock::Clock;
use crate::limiter::Limiter;
use crate::store::Store;

/// How many requests are delayed at once by default: a thousand futures take a few megabytes.
const MAX_DELAYED: usize = 1_000;

/// A [`Layer`] that puts a limiter in front of a service.
///
/// If several layers of one limiter are around a service, the outermost decides, and a request is counted once.
///
/// The service must accept requests with a [`RequestBody`](super::RequestBody), as everything does that is generic over the
/// body: axum's and tonic's routes, hyper's and tower's clients.
#[derive(Debug, Clone)]
pub struct ThresholdLayer {
    door: Arc<Door>,
}

impl ThresholdLayer {
    /// Creates a layer for a limiter. Callers are identified as the policy's `[identity]` says, from the address in
    /// [`PeerAddr`]; with the feature `axum`, from axum's `ConnectInfo<SocketAddr>` too, or `MockConnectInfo` in a test.
    ///
    /// # Errors
    /// Returns an error if the policy has an `[identity.jwt]` and no token verifier is attached. (While a policy without a
    /// verifier is in force later, every request is answered with 503.)
    #[cfg(not(target_arch = "wasm32"))]
    pub fn new<S, C>(limiter: Arc<Limiter<S, C>>) -> Result<Self, NoTokenVerifier>
    where
        S: Store + 'static,
        C: Clock + 'static,
    {
        Self::verified(limiter, Background::tokio())
    }

    /// Creates a layer as [`new`](Self::new) does, on a runtime that is not tokio's.
    ///
    /// # Errors
    /// As for `new`.
    pub fn with_runtime<S, C>(limiter: Arc<Limiter<S, C>>, runtime: Arc<dyn Runtime>) -> Result<Self, NoTokenVerifier>
    where
        S: Store + 'static,
        C: Clock + 'static,
    {
        Self::verified(limiter, Background::on(runtime))
    }

    fn verified<S, C>(limiter: Arc<Limiter<S, C>>, background: Background) -> Result<Self, NoTokenVerifier>
    where
        S: Store + 'static,
        C: Clock + 'static,
    {
        let view = PolicyView::new(limiter.policy());
        if view.policy.lacks_token_verifier() {
            return Err(NoTokenVerifier);
        }
        Ok(Self::with_view(limiter, view, background))
    }

    /// Creates a layer that limits each client address, without a policy of your own. `limit` is text as in a policy
    /// (`"100/min burst 20"`) or a [`Limit`](crate::Limit).
    ///
    /// Addresses are counted as by a rule with `per = ["ip"]`: an IPv6 network of /64 is one client. Behind a reverse proxy
    /// every request has the proxy's address: use [`new`](Self::new) with a policy that has `trusted_proxies`.
    ///
    /// # Errors
    /// Returns an error if the text is not a limit, or is 0, which a policy reads as unlimited.
    #[cfg(all(feature = "memory", not(target_arch = "wasm32")))]
    pub fn per_ip(limit: impl Into<LimitText>) -> Result<Self, LayerError> {
        Self::of_rule(Rule::builder("per-ip").per([Per::Ip]).limit(limit))
    }

    /// Creates a layer that limits each key that a function finds in the request, without a policy of your own: the id of an
    /// API key that was verified before, for instance.
    ///
    /// A request for which it returns `None` is counted by its address, in a budget of its own. A client that can choose the
    /// key, as in a header field that nothing verifies, has a new budget with each key.
    ///
    /// ```
    /// use threshold_limiter::tower::ThresholdLayer;
    ///
    /// #[derive(Clone)]
    /// struct ApiKey(u64); // inserted by the layer that verifies it
    ///
    /// let layer = ThresholdLayer::per_key("100/min", |parts| Some(parts.extensions.get::<ApiKey>()?.0.to_string()))?;
    /// # let _ = layer;
    /// # Ok::<(), threshold_limiter::tower::LayerError>(())
    /// ```
    ///
    /// # Errors
    /// As for [`per_ip`](Self::per_ip).
    #[cfg(all(feature = "memory", not(target_arch = "wasm32")))]
    pub fn per_key(
        limit: impl Into<LimitText>,
        key: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static,
    ) -> Result<Self, LayerError> {
        let rule = Rule::builder("per-key").per([Per::Fact(KEY.into())]).limit(limit);
        let mut layer = Self::of_rule(rule)?;
        Arc::make_mut(&mut layer.door).key = Some(Arc::new(key));
        Ok(layer)
    }

    #[cfg(all(feature = "memory", not(target_arch = "wasm32")))]
    fn of_rule(rule: RuleBuilder) -> Result<Self, LayerError> {
        let builder = Policy::builder().rule(rule);
        // In a file 0 may come from a variable, whose value cannot be a word. In code it is a mistake, either way.
        if builder.review().findings.iter().any(|finding| finding.code == "zero-limit") {
            return Err(LayerError::Zero);
        }
        let limiter = Arc::new(Limiter::new(builder.build()?));
        let view = PolicyView::new(limiter.policy());
        Ok(Self::with_view(limiter, view, Background::tokio()))
    }

    fn with_view<S, C>(limiter: Arc<Limiter<S, C>>, view: PolicyView, background: Background) -> Self
    where
        S: Store + 'static,
        C: Clock + 'static,
    {
        let door = Door {
            tokens: Arc::<Limiter<S, C>>::clone(&limiter),
            limiter,
            view: Arc::new(ArcSwap::from_pointee(view)),
            peer: None,
            reported_no_address: Arc::default(),
            identify: None,
            key: None,
            skip: None,
            respond: None,
            pool: Pool::new(MAX_DELAYED),
            background,
            answers: Answers::Seen,
            delay_field: None,
        };
        Self { door: Arc::new(door) }
    }

    /// Finds the peer's address with this function. It must not take the address from what the client sent.
    ///
    /// Without it the address is that of [`PeerAddr`] or, with the feature `axum`, of axum's `ConnectInfo<SocketAddr>`. If a
    /// request has neither and a rule needs an address, the answer is a 500 that says what to add, and the first one is
    /// logged with `tracing`. A function that returns `None` is an answer: the request is denied with 429.
    ///
    /// Behind tonic's own server, for instance:
    /// `|parts| parts.extensions.get::<TcpConnectInfo>().and_then(|info| info.remote_addr())`.
    #[must_use]
    pub fn peer(mut self, peer: impl Fn(&Parts) -> Option<SocketAddr> + Send + Sync + 'static) -> Self {
        Arc::make_mut(&mut self.door).peer = Some(Arc::new(peer));
        self
    }

    /// Identifies callers with this function, for instance after the application has authenticated them. What it returns
    /// takes precedence over what the policy finds.
    #[must_use]
    pub fn identify(mut self, identify: impl Fn(&Parts) -> Identified + Send + Sync + 'static) -> Self {
        Arc::make_mut(&mut self.door).identify = Some(Arc::new(identify));
        self
    }

    /// Lets requests through for which this function returns `true`: they are neither decided nor counted, not even by bans and
    /// deny lists, and their responses have no rate-limit fields.
    ///
    /// ```
    /// # use threshold_limiter::tower::ThresholdLayer;
    /// let layer = ThresholdLayer::per_ip("100/min")?.skip(|parts| parts.uri.path() == "/healthz");
    /// # let _ = layer;
    /// # Ok::<(), threshold_limiter::tower::LayerError>(())
    /// ```
    #[must_use]
    pub fn skip(mut self, skip: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        Arc::make_mut(&mut self.door).skip = Some(Arc::new(skip));
        self
    }

    /// Answers refused requests with the response of this function: denials, and requests that cannot be decided. It may
    /// change the layer's own response or return another one; rate-limit fields that it lacks, such as `Retry-After`, are
    /// added to a denial. What it reveals of a decision is not subject to a rule's `disclosure`.
    ///
    /// ```
    /// # use threshold_limiter::tower::ThresholdLayer;
    /// let layer = ThresholdLayer::per_ip("100/min")?.on_refused(|refused| {
    ///     let wait = refused.response.headers().get("retry-after").and_then(|wait| wait.to_str().ok());
    ///     let text = format!("Slow down, and come back in {} s.\n", wait.unwrap_or("some"));
    ///     let mut response = refused.response.map(|_| text);
    ///     response.headers_mut().insert("content-type", "text/plain".parse().unwrap());
    ///     response
    /// });
    /// # let _ = layer;
    /// # Ok::<(), threshold_limiter::tower::LayerError>(())
    /// ```
    #[must_use]
    pub fn on_refused<B: Into<Bytes>>(
        mut self,
        respond: impl Fn(RefusedRequest<'_>) -> Response<B> + Send + Sync + 'static,
    ) -> Self {
        Arc::make_mut(&mut self.door).respond = Some(Arc::new(move |refused| respond(refused).map(Into::into)));
        self
    }

    /// Makes the layer decide only: requests are answered elsewhere, as with forward auth, and their end is not seen here.
    /// Rules with `count` are then checked but not charged, and concurrency is held until its `ttl`.
    #[must_use]
    pub fn decision_only(mut self) -> Self {
        Arc::make_mut(&mut self.door).answers = Answers::Unseen;
        self
    }

    /// Writes the delay of a shadow-banned caller's request into this field of the answer, in milliseconds, and does not wait: for a
    /// proxy that waits itself, and must not pass the field on to its client.
    #[must_use]
    pub fn delay_field(mut self, name: HeaderName) -> Self {
        Arc::make_mut(&mut self.door).delay_field = Some(name);
        self
    }

    /// Replaces the runtime. A host whose tasks belong to one event, such as a Cloudflare Worker, does this for each request on a
    /// clone of the layer.
    #[must_use]
    pub fn runtime(mut self, runtime: Arc<dyn Runtime>) -> Self {
        Arc::make_mut(&mut self.door).background.set_runtime(runtime);
        self
    }

    /// Delays at most this many requests of shadow-banned callers at once; 1,000 by default. Further ones get a denial that
    /// looks like any other.
    #[must_use]
    pub fn max_delayed(mut self, max: usize) -> Self {
        Arc::make_mut(&mut self.door).pool = Pool::new(max);
        self
    }

    /// Returns the permits of requests that are delayed.
    #[cfg(feature = "metrics")]
    pub(crate) fn pool(&self) -> Arc<Pool> {
        Arc::clone(&self.door.pool)
    }
}

impl<S> Layer<S> for ThresholdLayer {
    type Service = ThresholdService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        ThresholdService::new(inner, Arc::clone(&self.door))
    }
}

/// Returns the peer's address that the server has recorded in the request's extensions. [`PeerAddr`] comes first, because a
/// program that inserts it knows better than the framework, for instance behind the PROXY protocol.
fn recorded_peer(parts: &Parts) -> Peer {
    let recorded = parts.extensions.get::<PeerAddr>().map(|peer| peer.0);
    // What the program has inserted itself takes precedence.
    #[cfg(feature = "axum")]
    let recorded = recorded.or_else(|| {
        use axum::extract::connect_info::{ConnectInfo, MockConnectInfo};
        let connected = parts.extensions.get::<ConnectInfo<SocketAddr>>().map(|info| info.0);
        // A test of an app without a connection has this one, and axum's own extractor takes it in the same order.
        connected.or_else(|| parts.extensions.get::<MockConnectInfo<SocketAddr>>().map(|info| info.0))
    });
    recorded.map_or(Peer::NoSource, Peer::Known)
}

/// The reason why no request is served.
pub(super) const NO_VERIFIER: &str = "the policy has [identity.jwt], and nothing verifies its tokens";

/// The policy has an `[identity.jwt]`, and no token verifier is attached to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{NO_VERIFIER}: pass the policy through threshold_wire::jwt::attach first")]
pub struct NoTokenVerifier;

/// The reason why a layer cannot be made of a limit.
#[cfg(feature = "memory")]
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayerError {
    /// The limit is 0.
    #[error("the limit is 0: write \"unlimited\" to let everything through, or \"none\" to let nothing through")]
    Zero,
    /// The text is not a limit.
    #[error(transparent)]
    Policy(#[from] PolicyError),
}

/// The fact that holds the key of [`ThresholdLayer::per_key`].
const KEY: &str = "key";

/// Verifies bearer tokens; implemented by limiters of every store and clock.
pub(super) trait Tokens: Send + Sync {
    fn claims(&self, policy: &Policy, headers: &Lines<'_>) -> Option<Claims>;
}

impl<S: Store, C: Clock> Tokens for Limiter<S, C> {
    fn claims(&self, policy: &Policy, headers: &Lines<'_>) -> Option<Claims> {
        self.claims(policy, headers)
    }
}

type FindPeer = Arc<dyn Fn(&Parts) -> Option<SocketAddr> + Send + Sync>;
type Identify = Arc<dyn Fn(&Parts) -> Identified + Send + Sync>;
type FindKey = Arc<dyn Fn(&Parts) -> Option<String> + Send + Sync>;
type Skip = Arc<dyn Fn(&Parts) -> bool + Send + Sync>;

/// The state that all services of a layer share.
#[derive(Clone)]
pub(super) struct Door {
    pub(super) limiter: Arc<dyn AnyLimiter>,
    pub(super) tokens: Arc<dyn Tokens>,
    view: Arc<ArcSwap<PolicyView>>,
    /// The application's function; `None` for [`recorded_peer`].
    peer: Option<FindPeer>,
    /// Whether the log has the line about a missing address: it would be the same for every request.
    reported_no_address: Arc<AtomicBool>,
    identify: Option<Identify>,
    key: Option<FindKey>,
    skip: Option<Skip>,
    respond: Option<Respond>,
    pub(super) pool: Arc<Pool>,
    pub(super) background: Background,
    pub(super) answers: Answers,
    /// The field that has the delay of a request, if another program waits.
    pub(super) delay_field: Option<HeaderName>,
}

impl Door {
    /// Returns the policy in force with what the layer derives from it. It is derived once for each policy.
    pub(super) fn view(&self) -> Arc<PolicyView> {
        let policy = self.limiter.policy();
        let known = self.view.load_full();
        // `known` keeps its policy alive, so no other policy can have the same address.
        if Arc::ptr_eq(&known.policy, &policy) {
            return known;
        }
        let view = Arc::new(PolicyView::new(policy));
        // Two threads may store different views here. The next request compares again.
        self.view.store(Arc::clone(&view));
        view
    }

    pub(super) fn peer(&self, parts: &Parts) -> Peer {
        match &self.peer {
            Some(find) => Peer::asked(find(parts)),
            None => recorded_peer(parts),
        }
    }

    /// Logs, once for each layer, that requests are answered with 500 because the layer has no source of addresses.
    #[cold]
    pub(super) fn report_no_address(&self) {
        if !self.reported_no_address.swap(true, Ordering::Relaxed) {
            tracing::error!(status = 500, add = NO_ADDRESS, "no client address");
        }
    }

    pub(super) fn identify(&self, parts: &Parts) -> Identified {
        let mut identified = self.identify.as_ref().map(|identify| identify(parts)).unwrap_or_default();
        let key = self.key.as_ref().and_then(|find| find(parts));
        identified.facts.extend(key.map(|key| (KEY.to_owned(), key)));
        identified
    }

    /// Returns whether a request passes undecided.
    pub(super) fn skips(&self, parts: &Parts) -> bool {
        self.skip.as_ref().is_some_and(|skip| skip(parts))
    }

    /// Returns whether the application makes the responses to refused requests.
    pub(super) fn makes_responses(&self) -> bool {
        self.respond.is_some()
    }

    /// Returns the response to a refused request, and the strike that it waits for.
    pub(super) fn respond(&self, parts: &Parts, refused: Refused) -> (Response<Bytes>, Strike) {
        refused_request::respond(self.respond.as_ref(), parts, refused)
    }

    /// Returns an id of the limiter: its address, which is unique as long as this door holds it.
    pub(super) fn id(&self) -> usize {
        Arc::as_ptr(&self.limiter).cast::<()>().addr()
    }
}

impl fmt::Debug for Door {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Door").field("pool", &self.pool).finish_non_exhaustive()
    }
}
