//! The desk between the doors and the limiter: decides requests, signs receipts, waits for the journal, and makes the
//! operators' changes.

mod audit;
mod ban_sets;
mod explained;
mod logins;
mod lookups;
mod names;
mod operations;
mod outside_changes;
#[cfg(test)]
mod penalty_tests;
mod persistence;
mod requests;
mod settings;
mod subjects;
#[cfg(test)]
pub(crate) mod tests;
mod usage;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use threshold_core::decision::Degraded;
use threshold_core::explain::Explained;
use threshold_core::plan::Verb;
use threshold_core::policy::Policy;
use threshold_core::receipt::{ActualCost, OnExpire};
use threshold_core::{BytesError, Decision, Facts, KeyId, Limit, PlanError, Receipt, Span, Timestamp, TraceId};
use threshold_limiter::journal::{Journal, STRIKE_WAIT, SaveError};
use threshold_limiter::limiter::{CreditError, JointDecision, JointError, JointRequest, LimiterBuilder, Waited};
use threshold_limiter::store::memory::MemoryStore;
use threshold_limiter::store::{AnyStore, EndError, KeyUsage, Store as _, StoreError, StoreErrorCount};
use threshold_limiter::tower::ThresholdLayer;
use threshold_limiter::{ActivePenalties, ActiveShadowBan, Clock, LimitDecision, Limiter, PenaltyCounts, Reserved};
use threshold_redis::within;

use crate::log::{self, DenialLog, LogSampler};
use crate::metrics::Metrics;
use crate::otlp;
use crate::signals::EventQueue;
use crate::signals::recent_requests::RecentRequests;
pub(crate) use ban_sets::{ImportedSet, NewBanSet, NewEnd, NewSetBan};
pub(crate) use explained::PenaltyCause;
use logins::LoginLog;
pub(crate) use lookups::Lock;
pub(crate) use names::RecentNames;
use names::StopObserver;
pub(crate) use operations::{NewBan, OperationError};
pub(crate) use persistence::{JournalLocation, OpenDesk};
pub(crate) use requests::{ANSWER_LIFETIME, BeginOutcome, BegunRequest, SharedRequests};
pub(crate) use settings::NewSetting;
pub(crate) use subjects::{BudgetState, LadderState, Subject, Target};
pub(crate) use usage::LimitUsage;

/// The server's limiter, on any store and clock.
type ServerLimiter = Limiter<AnyStore, Arc<dyn Clock>>;
type ServerLimiterBuilder = LimiterBuilder<AnyStore, Arc<dyn Clock>>;

/// The limiter with its journal, metrics and log.
///
/// A door holds a policy and passes it with each request: the answer then names that policy's rules, even if another is
/// loaded meanwhile, and all items of a list are decided under the same policy.
///
/// The limiter, its bans and the journal are private, so that doors make changes only by the desk's functions.
pub(crate) struct Desk {
    limiter: Arc<ServerLimiter>,
    /// Logs denials, and counts those that it leaves out.
    denials: Arc<DenialLog>,
    /// The names behind digests.
    pub(crate) names: Arc<RecentNames>,
    /// Logs logins that were refused, and accounts that were locked.
    logins: LoginLog,
    /// Samples the pauses in the audit.
    pauses: LogSampler,
    /// Held during an operator's change, so that the audit has changes in the order in which they were made.
    operations: tokio::sync::Mutex<()>,
    /// Held while a set of bans is imported: its body is large, and one at a time bounds their memory.
    pub(crate) import_turn: tokio::sync::Mutex<()>,
    /// Held while counters are saved.
    saving: std::sync::Mutex<()>,
    /// Held while changes of other nodes are read, so that a server that stops waits for what the last reading has found to give back.
    following: tokio::sync::Mutex<()>,
    pub(crate) metrics: Metrics,
    /// The events of all decisions, until they are counted.
    pub(crate) events: Arc<EventQueue>,
    /// The requests of the last hour, for rehearsals.
    pub(crate) recent_requests: Arc<RecentRequests>,
    /// Counts the penalties in force.
    penalties: Arc<ActivePenalties>,
    /// `None` with `--no-db`.
    journal: Option<Arc<Journal>>,
}

/// A decision, with its receipt or reservation.
#[derive(Debug, Clone, Default)]
pub(crate) struct Decided {
    pub(crate) decision: Decision,
    /// The signed receipt of the charges.
    pub(crate) receipt: Option<String>,
    /// The id of a reservation.
    pub(crate) reservation: Option<TraceId>,
}

/// How long a reservation lasts, and whether it stays charged when it expires.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReservationTerms {
    pub(crate) ttl: Span,
    pub(crate) on_expire: OnExpire,
}

impl Desk {
    pub(crate) fn new(policy: Policy, clock: Arc<dyn Clock>) -> Self {
        let store = MemoryStore::new(policy.memory()).into();
        Self::with_store(policy, store, clock)
    }

    /// A desk on this store, with digest keys of its own and without a journal.
    pub(crate) fn with_store(policy: Policy, store: AnyStore, clock: Arc<dyn Clock>) -> Self {
        Self::from_builder(Limiter::builder(policy).store(store).clock(clock), None)
    }

    fn from_builder(builder: ServerLimiterBuilder, journal: Option<Arc<Journal>>) -> Self {
        let metrics = Metrics::new();
        // The desk keeps a reference of its own: the limiter owns its observers, and the lines that a burst left out
        // are reported from outside of any decision.
        let denials = Arc::<DenialLog>::default();
        let names = Arc::<RecentNames>::default();
        let observer = Arc::new(StopObserver { denials: Arc::clone(&denials), names: Arc::clone(&names) });
        let events = Arc::<EventQueue>::default();
        let penalties = Arc::<ActivePenalties>::default();
        let counted = Arc::<ActivePenalties>::clone(&penalties);
        let recent_requests = Arc::<RecentRequests>::default();
        let recorded = Arc::<RecentRequests>::clone(&recent_requests);
        let builder = builder.observer(observer).observer(metrics.observer()).observer(counted).observer(recorded);
        let builder = match otlp::observer() {
            Some(spans) => builder.observer(spans),
            None => builder,
        };
        let limiter = builder.observer(Arc::new(events.sender.clone())).build();
        let limiter = Arc::new(limiter.expect("a desk is given no other secrets than its store was opened with"));
        metrics.limiter.watch(&limiter);
        metrics.set_policy_loaded(limiter.now());
        metrics.limiter.watch_penalties(&penalties, &limiter);
        if let Some(journal) = &journal {
            metrics.limiter.watch_journal(journal);
        }
        Self {
            limiter,
            denials,
            names,
            logins: LoginLog::default(),
            pauses: LogSampler::default(),
            operations: tokio::sync::Mutex::default(),
            import_turn: tokio::sync::Mutex::default(),
            saving: std::sync::Mutex::default(),
            following: tokio::sync::Mutex::default(),
            metrics,
            events,
            recent_requests,
            penalties,
            journal,
        }
    }

    /// A desk on a store that others share, which have the same digest key.
    #[cfg(test)]
    pub(crate) fn sharing(policy: Policy, store: AnyStore, clock: Arc<dyn Clock>, key: [u8; 16]) -> Self {
        let secret = threshold_core::Secret::new(&[7; 32]).expect("32 bytes are enough");
        let key = threshold_core::DigestKey::new(key);
        Self::from_builder(Limiter::builder(policy).store(store).clock(clock).digest_key(key).secrets(secret), None)
    }

    /// A desk on this store with one more observer.
    #[cfg(test)]
    pub(crate) fn observed(
        policy: Policy,
        store: AnyStore,
        clock: Arc<dyn Clock>,
        observer: Arc<dyn threshold_limiter::Observer>,
    ) -> Self {
        Self::from_builder(Limiter::builder(policy).store(store).clock(clock).observer(observer), None)
    }

    /// Returns the policy in force.
    pub(crate) fn policy(&self) -> Arc<Policy> {
        self.limiter.policy()
    }

    /// Returns the reason of the store's last failure.
    pub(crate) fn store_error(&self) -> Option<String> {
        self.limiter.store().last_error()
    }

    /// Returns what is wrong with the store at this moment.
    pub(crate) fn store_problem(&self) -> Option<String> {
        self.limiter.store().present_problem()
    }

    /// Returns whether every part of the store can be reached at this moment.
    pub(crate) fn store_is_reachable(&self) -> bool {
        self.limiter.store().is_reachable()
    }

    /// Returns among how many nodes limits are divided while the store is away; 0 if this node has no share.
    pub(crate) fn share_nodes(&self) -> u64 {
        self.limiter.store().share().map_or(0, |share| share.nodes)
    }

    /// Returns the kinds of errors that calls of the store have ended with.
    pub(crate) fn store_errors(&self) -> Vec<StoreErrorCount> {
        self.limiter.store().errors()
    }

    /// Returns how many compared writes of the store were wrong.
    pub(crate) fn store_differences(&self) -> u64 {
        self.limiter.store().differences()
    }

    /// Returns how often the store had lost bans and settings that this node had read.
    pub(crate) fn control_losses(&self) -> u64 {
        self.limiter.control_losses()
    }

    /// Returns how many charges of requests that were admitted without the store it will not hear of.
    pub(crate) fn charges_lost(&self) -> u64 {
        self.limiter.lost_charges()
    }

    /// Returns how many charges of requests that were admitted without the store it may have recorded or not.
    pub(crate) fn charges_unanswered(&self) -> u64 {
        self.limiter.unanswered_charges()
    }

    /// Returns whether charges of requests that were admitted without the store wait for it.
    pub(crate) fn has_waiting_charges(&self) -> bool {
        self.limiter.waiting_charges() > 0
    }

    /// Gives up the charges that wait for the store, because the server ends.
    pub(crate) fn abandon_charges(&self) {
        self.limiter.abandon_charges();
        self.count_charges();
    }

    /// Brings the metrics of charges up to date.
    pub(crate) fn count_charges(&self) {
        self.metrics.set_charges_lost(self.charges_lost());
        self.metrics.set_charges_unanswered(self.charges_unanswered());
    }

    /// Returns the shadow bans that this server has brought, those that end last first.
    pub(crate) fn shadow_bans(&self, most: usize) -> Vec<ActiveShadowBan> {
        self.penalties.shadow_bans(self.now(), most)
    }

    /// Returns how many keys have a balance in this process's memory.
    pub(crate) fn keys(&self) -> u64 {
        self.key_usage().map_or(0, |keys| u64::try_from(keys.used).unwrap_or(u64::MAX))
    }

    /// Returns how full the table of keys in memory is.
    pub(crate) fn key_usage(&self) -> Option<KeyUsage> {
        self.limiter.store().numbers().keys
    }

    /// Returns the id of the secret that digests are made with, which nodes on one store share.
    pub(crate) fn key_id(&self) -> KeyId {
        self.limiter.key_id()
    }

    /// Returns the file of the journal.
    pub(crate) fn journal_path(&self) -> Option<&Path> {
        self.journal.as_ref().map(|journal| journal.path())
    }

    /// Returns how many bans are in force, by operators and by ladders, and how many shadow bans and locks. Bans of operators that have
    /// ended are counted for a minute at most, until they are removed.
    pub(crate) fn active_penalties(&self) -> PenaltyCounts {
        let mut counts = self.penalties.count(self.now());
        counts.bans = counts.bans.saturating_add(self.limiter.bans().count() as u64);
        counts
    }

    /// Returns the time of the limiter's clock.
    pub(crate) fn now(&self) -> Timestamp {
        self.limiter.now().into()
    }

    /// Returns a keyed digest of a secret, which may be shown in place of it.
    pub(crate) fn redact(&self, secret: &str) -> String {
        self.limiter.key().redact(secret)
    }

    /// Returns a tower layer on the same limiter.
    pub(crate) fn layer(&self) -> ThresholdLayer {
        let layer =
            ThresholdLayer::new(Arc::clone(&self.limiter)).expect("a policy gets its verifier when it is loaded");
        self.metrics.limiter.watch_layer(&layer);
        layer
    }

    /// Returns the number of requests that wait until they fit.
    #[cfg(test)]
    pub(crate) fn waiting(&self) -> usize {
        self.limiter.waiting()
    }

    /// Decides a request, and charges it unless `verb` is a peek.
    pub(crate) async fn decide(&self, policy: &Policy, verb: Verb, facts: &Facts<'_>) -> Result<Decided, PlanError> {
        let (decision, receipt) = self.limiter.decide_under(policy, verb, facts).await?;
        match verb {
            Verb::Check => log::charges("check", facts, &decision, policy),
            Verb::Record => log::charges("record", facts, &decision, policy),
            // A peek charges nothing, so there is no charge to log.
            Verb::Peek => {}
        }
        let receipt = receipt.map(|receipt| self.limiter.sign(&receipt));
        Ok(Decided { decision, receipt, reservation: None })
    }

    /// Decides several requests in one step, on a store that may take at most this long, and waits for strikes as
    /// [`decide_and_save`](Self::decide_and_save) does.
    pub(crate) async fn decide_jointly(
        &self,
        policy: &Policy,
        verb: Verb,
        requests: &[JointRequest<'_>],
        store_deadline: Duration,
    ) -> Result<Box<JointDecision>, JointError> {
        let mut joint = within(store_deadline, self.limiter.decide_jointly(policy, verb, requests)).await?;
        if let Some(JointRequest { facts, .. }) = requests.first() {
            let name = if verb == Verb::Record { "record" } else { "check" };
            log::charges(name, facts, &joint.decision, policy);
        }
        self.save_strikes(&mut joint.decision, strike_deadline()).await;
        Ok(joint)
    }

    /// Counts and logs a request that is denied without a decision, because no plan can hold it.
    pub(crate) fn refuse(&self, policy: &Policy, reason: &str, trace: TraceId) {
        self.limiter.refuse(policy, reason, trace);
    }

    /// Gives back the cost of a request without a receipt, on a store that may take at most this long for each limit.
    pub(crate) async fn credit(
        &self,
        policy: &Policy,
        request: &JointRequest<'_>,
        replaced: &[usize],
        store_deadline: Duration,
    ) -> Result<(), CreditError> {
        within(store_deadline, self.limiter.credit(policy, request, replaced)).await
    }

    /// Returns what a check would answer, and why.
    pub(crate) async fn explain<'p>(
        &self,
        policy: &'p Policy,
        facts: &Facts<'_>,
    ) -> Result<(Vec<Explained<'p>>, Vec<PenaltyCause>, Decided), PlanError> {
        let (rules, decision) = self.limiter.explain_under(policy, facts).await?;
        let causes = self.penalty_causes(policy, facts, &decision).await;
        Ok((rules, causes, Decided { decision, ..Decided::default() }))
    }

    /// Decides as [`decide`](Self::decide) does. A request that strikes is answered once the strike is on disk; after
    /// `deadline`, it is answered all the same and marked as degraded.
    pub(crate) async fn decide_and_save(
        &self,
        policy: &Policy,
        verb: Verb,
        facts: &Facts<'_>,
        deadline: Instant,
    ) -> Result<Decided, PlanError> {
        let mut decided = self.decide(policy, verb, facts).await?;
        self.save_strikes(&mut decided.decision, deadline).await;
        Ok(decided)
    }

    /// Decides and charges a request whose actual cost is not known yet, and waits for strikes as
    /// [`decide_and_save`](Self::decide_and_save) does.
    pub(crate) async fn reserve_and_save(
        &self,
        policy: &Policy,
        facts: &Facts<'_>,
        ReservationTerms { ttl, on_expire }: ReservationTerms,
    ) -> Result<Decided, PlanError> {
        let Reserved { mut decision, reservation } =
            self.limiter.reserve_under(policy, facts, ttl.into(), on_expire).await?;
        log::charges("reserve", facts, &decision, policy);
        self.save_strikes(&mut decision, strike_deadline()).await;
        Ok(Decided { decision, receipt: None, reservation })
    }

    /// Ends a reservation with its actual cost.
    pub(crate) async fn commit(&self, reservation: TraceId, actual: &ActualCost<'_>) -> Result<(), EndError> {
        self.limiter.commit_async(reservation, actual).await
    }

    /// Ends a reservation without any cost.
    pub(crate) async fn release(&self, reservation: TraceId) -> Result<(), EndError> {
        self.limiter.release_async(reservation).await
    }

    /// Verifies and decodes a receipt that this server has signed.
    pub(crate) fn read_receipt(&self, token: &str) -> Result<Receipt, BytesError> {
        self.limiter.read_receipt(token)
    }

    /// Gives back what a receipt was charged, once. Returns whether this was the first time.
    pub(crate) async fn refund(&self, receipt: &Receipt) -> Result<bool, StoreError> {
        self.limiter.refund_async(receipt).await
    }

    /// Checks and charges one limit by a key, without a policy.
    pub(crate) async fn check_limit(&self, key: &str, limit: &Limit, cost: u64) -> Result<LimitDecision, StoreError> {
        self.limiter.check_limit(key, limit, cost).await
    }

    /// Removes bans that have ended.
    pub(crate) fn sweep_bans(&self) {
        self.limiter.bans().sweep(self.now());
    }

    /// Logs how many lines were left out of bursts that are over: the next line of the kind, which would report them, may not
    /// come for hours. Without a time it does so for the present second too, before the process ends.
    pub(crate) fn report_left_out(&self, now: Option<Timestamp>) {
        self.denials.report_left_out(now);
        self.logins.report_left_out(now);
    }

    /// Waits until all changes so far are on disk. Without a journal it returns at once.
    async fn wait_until_saved(&self, at_most: Duration) -> Result<(), SaveError> {
        match &self.journal {
            Some(journal) => journal.saved(at_most).await,
            None => Ok(()),
        }
    }

    /// Returns whether the journal has the strikes and accounts. A store over a network has them itself.
    fn journal_has_records(&self) -> bool {
        self.journal.is_some() && self.limiter.store().answers_at_once()
    }

    /// Waits until the strikes of a decision are on disk, at most until `deadline`; marks the decision as degraded after that.
    async fn save_strikes(&self, decision: &mut Decision, deadline: Instant) {
        // Counters may be lost in a crash, strikes may not. So only a decision with a strike pays for a wait on the
        // disk.
        if decision.escalations.is_empty() || !self.journal_has_records() {
            return;
        }
        // What is left of one deadline, because the requests of a list share it.
        let left = deadline.saturating_duration_since(Instant::now());
        // An earlier reason stays: a store that did not answer says more about the decision than a slow disk.
        if self.wait_until_saved(left).await.is_err() && decision.degraded.is_none() {
            decision.degraded = Some(Degraded::Journal);
            self.metrics.limiter.count_degraded(Degraded::Journal);
        }
    }

    /// Waits until the request fits and charges it, or returns why it is denied. The policy may be reloaded meanwhile, so the
    /// one that the request was decided under is returned too.
    pub(crate) async fn wait(&self, facts: &Facts<'_>, at_most: Duration) -> Result<(Decided, Arc<Policy>), PlanError> {
        let Waited { decision, receipt, policy } = self.limiter.wait_with_receipt(facts, at_most).await?;
        log::charges("check", facts, &decision, &policy);
        let receipt = receipt.map(|receipt| self.limiter.sign(&receipt));
        Ok((Decided { decision, receipt, reservation: None }, policy))
    }
}

impl std::fmt::Debug for Desk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Desk").finish_non_exhaustive()
    }
}

/// Returns the time until which a strike that begins now waits for the disk.
pub(crate) fn strike_deadline() -> Instant {
    let now = Instant::now();
    now.checked_add(STRIKE_WAIT).unwrap_or(now)
}

/// Returns a random id. It is also the id of a reservation, so it must not be guessable.
pub(crate) fn new_trace() -> TraceId {
    TraceId::from_u128(rand::random())
}
