//! The layer: a limiter, and what an application tells it of its requests.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use arc_swap::ArcSwap;
use http::request::Parts;
use threshold_core::policy::{Claims, Policy};
use tower_layer::Layer;

use super::background::Background;
use super::pending_charges::{Answers, AnyLimiter};
use super::pool::Pool;
use super::request_facts::{Identified, Learned, Lines, PeerAddr};
use super::service::ThresholdService;
use crate::clock::Clock;
use crate::limiter::Limiter;
use crate::store::Store;

/// How many shadow-banned requests wait at once unless said: a thousand futures are a few megabytes.
const MAX_WAITING: usize = 1_000;

/// Puts a limiter in front of a service.
///
/// Layers of one limiter around one service count a request once: the outermost decides.
///
/// The service must take a request with a [`RequestBody`](super::RequestBody), as everything does that is generic over
/// bodies: axum's and tonic's routes, hyper's and tower's clients.
#[derive(Debug, Clone)]
pub struct ThresholdLayer {
    door: Arc<Door>,
}

impl ThresholdLayer {
    /// A layer in front of which everyone is who the policy says, from the address in [`PeerAddr`].
    ///
    /// # Errors
    /// Where the limiter's policy has an `[identity.jwt]` and nothing is attached to it that verifies tokens. (A policy that
    /// is put in force later and lacks it has every request answered with 503.)
    pub fn new<S, C>(limiter: Arc<Limiter<S, C>>) -> Result<Self, NoTokenVerifier>
    where
        S: Store + 'static,
        C: Clock + 'static,
    {
        let learned = Learned::new(limiter.policy());
        if learned.policy.lacks_token_verifier() {
            return Err(NoTokenVerifier);
        }
        let learned = Arc::new(ArcSwap::from_pointee(learned));
        let door = Door {
            tokens: Arc::<Limiter<S, C>>::clone(&limiter),
            limiter,
            learned,
            peer: Arc::new(|parts| parts.extensions.get::<PeerAddr>().map(|peer| peer.0)),
            identify: None,
            pool: Pool::new(MAX_WAITING),
            background: Background::new(),
            answers: Answers::Seen,
        };
        Ok(Self { door: Arc::new(door) })
    }

    /// Takes the address at the other end of the connection from elsewhere. It must not come from the request itself.
    ///
    /// With axum, for instance: `|parts| parts.extensions.get::<ConnectInfo<SocketAddr>>().map(|info| info.0)`.
    #[must_use]
    pub fn peer(mut self, peer: impl Fn(&Parts) -> Option<SocketAddr> + Send + Sync + 'static) -> Self {
        Arc::make_mut(&mut self.door).peer = Arc::new(peer);
        self
    }

    /// Says what the application knows of a request, after it has authenticated it for instance. What `identify` gives
    /// goes before what the policy finds.
    #[must_use]
    pub fn identify(mut self, identify: impl Fn(&Parts) -> Identified + Send + Sync + 'static) -> Self {
        Arc::make_mut(&mut self.door).identify = Some(Arc::new(identify));
        self
    }

    /// The services behind this layer only say that a request may cross: it is answered elsewhere, and how it ends is
    /// never seen here. Rules with `count` are then looked at and not charged, and concurrency is held until its `ttl`.
    #[must_use]
    pub fn decision_only(mut self) -> Self {
        Arc::make_mut(&mut self.door).answers = Answers::Unseen;
        self
    }

    /// Lets so many shadow-banned requests wait at once; 1,000 unless said. Those beyond are denied, as anyone might be.
    #[must_use]
    pub fn max_delayed(mut self, most: usize) -> Self {
        Arc::make_mut(&mut self.door).pool = Pool::new(most);
        self
    }
}

impl<S> Layer<S> for ThresholdLayer {
    type Service = ThresholdService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        ThresholdService::new(inner, Arc::clone(&self.door))
    }
}

/// Why a policy is not served.
pub(super) const NO_VERIFIER: &str = "the policy has [identity.jwt], and nothing verifies its tokens";

/// The policy has an `[identity.jwt]`, and nothing is attached to it that verifies tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoTokenVerifier;

impl fmt::Display for NoTokenVerifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{NO_VERIFIER}: pass the policy through threshold_limiter::jwt::attach (feature \"jwt\") first")
    }
}

impl std::error::Error for NoTokenVerifier {}

/// Who a request's token names, for a limiter of any store and clock.
pub(super) trait Tokens: Send + Sync {
    fn claims(&self, policy: &Policy, headers: &Lines<'_>) -> Option<Claims>;
}

impl<S: Store, C: Clock> Tokens for Limiter<S, C> {
    fn claims(&self, policy: &Policy, headers: &Lines<'_>) -> Option<Claims> {
        self.claims(policy, headers)
    }
}

type Peer = Arc<dyn Fn(&Parts) -> Option<SocketAddr> + Send + Sync>;
type Identify = Arc<dyn Fn(&Parts) -> Identified + Send + Sync>;

/// What every service of a layer shares.
#[derive(Clone)]
pub(super) struct Door {
    pub(super) limiter: Arc<dyn AnyLimiter>,
    pub(super) tokens: Arc<dyn Tokens>,
    learned: Arc<ArcSwap<Learned>>,
    peer: Peer,
    identify: Option<Identify>,
    pub(super) pool: Arc<Pool>,
    pub(super) background: Background,
    pub(super) answers: Answers,
}

impl Door {
    /// The policy in force, looked through once for each that comes.
    pub(super) fn learned(&self) -> Arc<Learned> {
        let policy = self.limiter.policy();
        let known = self.learned.load_full();
        if Arc::ptr_eq(&known.policy, &policy) {
            return known;
        }
        let learned = Arc::new(Learned::new(policy));
        self.learned.store(Arc::clone(&learned));
        learned
    }

    pub(super) fn peer(&self, parts: &Parts) -> Option<SocketAddr> {
        (self.peer)(parts)
    }

    pub(super) fn identify(&self, parts: &Parts) -> Identified {
        self.identify.as_ref().map(|identify| identify(parts)).unwrap_or_default()
    }

    /// Which limiter this is. Its address is its own for as long as any door to it stands.
    pub(super) fn id(&self) -> usize {
        Arc::as_ptr(&self.limiter).cast::<()>().addr()
    }
}

impl fmt::Debug for Door {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Door").field("pool", &self.pool).finish_non_exhaustive()
    }
}
