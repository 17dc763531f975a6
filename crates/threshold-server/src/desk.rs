//! Where the doors have requests decided: by the limiter, under one policy each, and what they hand out with it.

mod audit;
mod operations;
mod persistence;
mod requests;
mod settings;
mod subjects;
#[cfg(test)]
pub(crate) mod tests;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use threshold_core::balance::Checked;
use threshold_core::decision::Degraded;
use threshold_core::explain::Explained;
use threshold_core::plan::Verb;
use threshold_core::policy::Policy;
use threshold_core::receipt::{ActualCost, OnExpire};
use threshold_core::{BytesError, Decision, Facts, Limit, PlanError, Receipt, Span, Timestamp, TraceId};
use threshold_limiter::journal::{Journal, STRIKE_WAIT, SaveError};
use threshold_limiter::limiter::{LimiterBuilder, Waited};
use threshold_limiter::store::memory::MemoryStore;
use threshold_limiter::store::{AnyStore, EndError, StoreError};
use threshold_limiter::tower::ThresholdLayer;
use threshold_limiter::{Attempted, Clock, Limiter, LoginError, LoginRequest, LoginResult, RefusedBy, Reserved};

use crate::log::{self, Denials, Samples};
use crate::metrics::Metrics;
pub(crate) use operations::{NewBan, Refused};
pub(crate) use persistence::{Opened, Place};
pub(crate) use requests::{Beginning, Begun, MEMORY, SharedRequests};
pub(crate) use settings::NewSetting;
pub(crate) use subjects::{Subject, Target};

/// How long a login's result waits for the disk before it is refused.
const RESULT_WAIT: Duration = Duration::from_secs(2);

/// A limiter on whatever store and clock the server was given.
type ServerLimiter = Limiter<AnyStore, Arc<dyn Clock>>;
type ServerLimiterBuilder = LimiterBuilder<AnyStore, Arc<dyn Clock>>;

/// A limiter, asked under a policy that the door holds: the answer then names that policy's rules, whatever policy is put
/// in force meanwhile, and the items of a list are all decided under the same one.
///
/// The limiter, its bans and the journal are private: a door changes nothing but by a function of the desk.
pub(crate) struct Desk {
    limiter: Arc<ServerLimiter>,
    logins: Samples,
    /// Which pauses are recorded in the audit.
    pauses: Samples,
    /// Held by the operation that is under way: the audit has changes in the order in which they were made.
    operations: tokio::sync::Mutex<()>,
    pub(crate) metrics: Metrics,
    /// Where what must not be forgotten is written down, if anywhere.
    journal: Option<Arc<Journal>>,
}

/// A decision, and what its door may hand out with it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Decided {
    pub(crate) decision: Decision,
    /// What was charged, signed.
    pub(crate) receipt: Option<String>,
    /// What to end a reservation by.
    pub(crate) reservation: Option<TraceId>,
}

/// How long a reservation lasts, and what becomes of it then.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Held {
    pub(crate) ttl: Span,
    pub(crate) on_expire: OnExpire,
}

impl Desk {
    pub(crate) fn new(policy: Policy, clock: Arc<dyn Clock>) -> Self {
        let store = MemoryStore::new(policy.memory()).into();
        Self::on(policy, store, clock)
    }

    /// A desk on this store, whose records nobody else knows.
    pub(crate) fn on(policy: Policy, store: AnyStore, clock: Arc<dyn Clock>) -> Self {
        Self::around(Limiter::builder(policy).store(store).clock(clock), None)
    }

    fn around(builder: ServerLimiterBuilder, journal: Option<Arc<Journal>>) -> Self {
        let metrics = Metrics::new();
        let limiter = builder.observer(Arc::new(Denials::default())).observer(metrics.observer()).build();
        Self {
            limiter: Arc::new(limiter),
            logins: Samples::default(),
            pauses: Samples::default(),
            operations: tokio::sync::Mutex::default(),
            metrics,
            journal,
        }
    }

    /// A desk on a store that others share, who have the same key.
    #[cfg(test)]
    pub(crate) fn sharing(policy: Policy, store: AnyStore, clock: Arc<dyn Clock>, key: [u8; 16]) -> Self {
        let secret = threshold_core::Secret::new(&[7; 32]).expect("32 bytes are enough");
        let key = threshold_core::DigestKey::new(key);
        Self::around(Limiter::builder(policy).store(store).clock(clock).digest_key(key).secrets(secret), None)
    }

    /// Creates a desk on this store with one more observer.
    #[cfg(test)]
    pub(crate) fn observed(
        policy: Policy,
        store: AnyStore,
        clock: Arc<dyn Clock>,
        observer: Arc<dyn threshold_limiter::Observer>,
    ) -> Self {
        Self::around(Limiter::builder(policy).store(store).clock(clock).observer(observer), None)
    }

    /// The policy in force.
    pub(crate) fn policy(&self) -> Arc<Policy> {
        self.limiter.policy()
    }

    /// What the limiter's clock says.
    pub(crate) fn now(&self) -> Timestamp {
        self.limiter.now()
    }

    /// A secret as it may be shown: nobody can tell from it what it was.
    pub(crate) fn redact(&self, secret: &str) -> String {
        self.limiter.key().redact(secret)
    }

    /// The tower layer of the same limiter, for requests that come as HTTP.
    pub(crate) fn layer(&self) -> ThresholdLayer {
        ThresholdLayer::new(Arc::clone(&self.limiter)).expect("the keys are attached when a policy is read")
    }

    /// How many requests wait for room.
    #[cfg(test)]
    pub(crate) fn waiting(&self) -> usize {
        self.limiter.waiting()
    }

    /// Decides a request, and charges it unless it only looks. What comes of it is read where it is made: a decision is
    /// some kilobytes, and moving it about takes as long as writing it down.
    pub(crate) async fn decide<T>(
        &self,
        policy: &Policy,
        verb: Verb,
        facts: &Facts<'_>,
        read: impl FnOnce(&Decided) -> T,
    ) -> Result<T, PlanError> {
        let (decision, receipt) = self.limiter.decide_under(policy, verb, facts).await?;
        let receipt = receipt.map(|receipt| self.limiter.sign(&receipt));
        let decided = Decided { decision, receipt, reservation: None };
        match verb {
            Verb::Check => log::counted("check", facts, &decided.decision, policy),
            Verb::Record => log::counted("record", facts, &decided.decision, policy),
            Verb::Peek => {}
        }
        Ok(read(&decided))
    }

    /// Decides and charges a request whose true cost is not known yet.
    pub(crate) async fn reserve<T>(
        &self,
        policy: &Policy,
        facts: &Facts<'_>,
        Held { ttl, on_expire }: Held,
        read: impl FnOnce(&Decided) -> T,
    ) -> Result<T, PlanError> {
        let Reserved { decision, reservation } =
            self.limiter.reserve_under(policy, facts, ttl.into(), on_expire).await?;
        let decided = Decided { decision, receipt: None, reservation };
        log::counted("reserve", facts, &decided.decision, policy);
        Ok(read(&decided))
    }

    /// What a check would answer, and why.
    pub(crate) async fn explain<T>(
        &self,
        policy: &Policy,
        facts: &Facts<'_>,
        read: impl FnOnce(&[Explained<'_>], &Decided) -> T,
    ) -> Result<T, PlanError> {
        let (rules, decision) = self.limiter.explain_under(policy, facts).await?;
        Ok(read(&rules, &Decided { decision, ..Decided::default() }))
    }

    /// As [`decide`](Self::decide). A request that strikes is answered once that is on disk, or by then, marked as degraded.
    pub(crate) async fn decide_saved<T>(
        &self,
        policy: &Policy,
        verb: Verb,
        facts: &Facts<'_>,
        by: Instant,
        read: impl Fn(&Decided) -> T,
    ) -> Result<T, PlanError> {
        let made = self.decide(policy, verb, facts, |decided| self.made(decided, &read)).await?;
        Ok(self.when_saved(made, by, read).await)
    }

    /// As [`reserve`](Self::reserve), and the same as [`decide_saved`](Self::decide_saved).
    pub(crate) async fn reserve_saved<T>(
        &self,
        policy: &Policy,
        facts: &Facts<'_>,
        held: Held,
        read: impl Fn(&Decided) -> T,
    ) -> Result<T, PlanError> {
        let made = self.reserve(policy, facts, held, |decided| self.made(decided, &read)).await?;
        Ok(self.when_saved(made, strikes_wait(), read).await)
    }

    /// Ends a reservation with what it really cost.
    pub(crate) async fn commit(&self, reservation: TraceId, actual: &ActualCost<'_>) -> Result<(), EndError> {
        self.limiter.commit_async(reservation, actual).await
    }

    /// Ends a reservation without any cost.
    pub(crate) async fn release(&self, reservation: TraceId) -> Result<(), EndError> {
        self.limiter.release_async(reservation).await
    }

    /// A receipt that this server signed.
    pub(crate) fn read_receipt(&self, token: &str) -> Result<Receipt, BytesError> {
        self.limiter.read_receipt(token)
    }

    /// Gives back what a receipt says was charged, once. Says whether this was the first time.
    pub(crate) async fn refund(&self, receipt: &Receipt) -> Result<bool, StoreError> {
        self.limiter.refund_async(receipt).await
    }

    /// Decides one cost on one key under one limit, without a policy.
    pub(crate) async fn check_limit(
        &self,
        key: &str,
        limit: &Limit,
        cost: u64,
    ) -> Result<(Checked, Timestamp), StoreError> {
        self.limiter.check_limit(key, limit, cost).await
    }

    /// Whether to check the secret of a login.
    pub(crate) async fn login_attempt(&self, request: &LoginRequest<'_>) -> Result<Attempted, LoginError> {
        let attempted = self.limiter.login_attempt_async(request).await?;
        if let (Attempted::Refused(refusal), Some(ip)) = (&attempted, request.ip)
            && refusal.by == RefusedBy::Address
        {
            self.tell_crowded_login(ip);
        }
        Ok(attempted)
    }

    /// How a login went. What that changes is on disk before it is told; `None` where it is not there in time.
    pub(crate) async fn login_result(&self, attempt: &str, success: bool) -> Result<Option<LoginResult>, LoginError> {
        let ended = self.limiter.login_result_async(attempt, success).await?;
        if self.saved(RESULT_WAIT).await.is_err() {
            return Ok(None);
        }
        if ended.lockout_remaining.is_some() {
            self.tell_lockout();
        }
        Ok(Some(ended))
    }

    /// Forgets bans that are over.
    pub(crate) fn sweep_bans(&self) {
        self.limiter.bans().sweep(self.now());
    }

    /// Says that an address has tried too many logins.
    fn tell_crowded_login(&self, ip: IpAddr) {
        let policy = self.limiter.policy();
        if self.logins.take(self.limiter.now()).is_some() {
            tracing::warn!(ip = log::shown_address(ip, &policy), "auth_ip_rate_limit");
        }
    }

    /// Says that failures have locked an account.
    fn tell_lockout(&self) {
        if self.logins.take(self.limiter.now()).is_some() {
            tracing::warn!("auth_user_lockout");
        }
    }

    /// Waits until everything that was changed is on disk. Without a journal, nothing ever is.
    async fn saved(&self, at_most: Duration) -> Result<(), SaveError> {
        match &self.journal {
            Some(journal) => journal.saved(at_most).await,
            None => Ok(()),
        }
    }

    fn made<T>(&self, decided: &Decided, read: impl Fn(&Decided) -> T) -> Made<T> {
        if self.journal.is_some() && !decided.decision.escalations.is_empty() {
            Made::Strike(Box::new(decided.clone()))
        } else {
            Made::Ready(read(decided))
        }
    }

    async fn when_saved<T>(&self, made: Made<T>, by: Instant, read: impl Fn(&Decided) -> T) -> T {
        match made {
            Made::Ready(read) => read,
            Made::Strike(mut decided) => {
                let left = by.saturating_duration_since(Instant::now());
                if self.saved(left).await.is_err() {
                    decided.decision.degraded.get_or_insert(Degraded::Journal);
                }
                read(&decided)
            }
        }
    }

    /// Waits until the request fits and charges it, or says why not. Policies may change meanwhile: what is read beside the
    /// decision is the one that it was made under.
    pub(crate) async fn wait<T>(
        &self,
        facts: &Facts<'_>,
        at_most: Duration,
        read: impl FnOnce(&Decided, &Policy) -> T,
    ) -> Result<T, PlanError> {
        let Waited { decision, receipt, policy } = self.limiter.wait_with_receipt(facts, at_most).await?;
        log::counted("check", facts, &decision, &policy);
        let receipt = receipt.map(|receipt| self.limiter.sign(&receipt));
        Ok(read(&Decided { decision, receipt, reservation: None }, &policy))
    }
}

impl std::fmt::Debug for Desk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Desk").finish_non_exhaustive()
    }
}

/// An answer, or what becomes one once it is on disk.
enum Made<T> {
    Ready(T),
    Strike(Box<Decided>),
}

/// Until when a strike that begins now may wait for the disk.
pub(crate) fn strikes_wait() -> Instant {
    let now = Instant::now();
    now.checked_add(STRIKE_WAIT).unwrap_or(now)
}

/// An id nobody can guess.
pub(crate) fn new_trace() -> TraceId {
    TraceId::from_u128(rand::random())
}
