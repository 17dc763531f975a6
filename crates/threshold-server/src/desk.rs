//! Where the doors have requests decided: under one policy each, by the limiter's store and clock.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use threshold_core::decision::Degraded;
use threshold_core::plan::Verb;
use threshold_core::policy::Policy;
use threshold_core::receipt::{ActualCost, OnExpire, UnknownReservation};
use threshold_core::{Decision, Facts, Outcome, Plan, PlanError, Span, Timestamp, TraceId};
use threshold_limiter::store::LocalStore as _;
use threshold_limiter::store::memory::MemoryStore;
use threshold_limiter::{Clock, Limiter, Observer as _};

use crate::log::Denials;

/// A limiter in memory, on whatever clock the server was given.
type ServerLimiter = Limiter<MemoryStore, Arc<dyn Clock>>;

/// A limiter, asked under a policy that the door holds: the answer then names that policy's rules, whatever policy is put
/// in force meanwhile, and the items of a list are all decided under the same one.
pub(crate) struct Desk {
    pub(crate) limiter: Arc<ServerLimiter>,
    /// The policy that was in force before this one.
    replaced: ArcSwapOption<Policy>,
    denials: Arc<Denials>,
}

/// A decision, and what its door may hand out with it.
#[derive(Debug)]
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
        let denials = Arc::new(Denials::default());
        let limiter = Limiter::with_clock(policy, clock).observed_by(Arc::clone(&denials) as _);
        Self { limiter: Arc::new(limiter), replaced: ArcSwapOption::empty(), denials }
    }

    /// Puts another policy in force. Returns its generation.
    pub(crate) fn swap(&self, policy: Policy) -> u64 {
        self.replaced.store(Some(self.limiter.policy()));
        self.limiter.swap(policy)
    }

    /// Decides a request, and charges it unless it only looks.
    pub(crate) fn decide<T>(
        &self,
        policy: &Policy,
        verb: Verb,
        facts: &Facts<'_>,
        read: impl FnOnce(&Decided) -> T,
    ) -> Result<T, PlanError> {
        let hand_out = |decided: &mut Decided, plan: &Plan<'_>, outcome: &Outcome, now: Timestamp| {
            if verb != Verb::Peek {
                decided.receipt = plan.receipt(outcome, now).map(|receipt| self.limiter.sign(&receipt));
            }
        };
        self.settle(policy, verb, facts, hand_out, read)
    }

    /// Decides and charges a request whose true cost is not known yet.
    pub(crate) fn reserve<T>(
        &self,
        policy: &Policy,
        facts: &Facts<'_>,
        held: Held,
        read: impl FnOnce(&Decided) -> T,
    ) -> Result<T, PlanError> {
        let hand_out = |decided: &mut Decided, plan: &Plan<'_>, outcome: &Outcome, now: Timestamp| {
            let holding = plan.holding(outcome, now);
            decided.reservation = self.limiter.store().reserve(holding, held.ttl, held.on_expire, now).ok();
        };
        self.settle(policy, Verb::Check, facts, hand_out, read)
    }

    /// Waits until the request fits and charges it, or says why not. Policies may change meanwhile: what is read beside the
    /// decision is the one that it was made under.
    pub(crate) async fn wait<T>(
        &self,
        facts: &Facts<'_>,
        at_most: Duration,
        read: impl FnOnce(&Decided, &Policy) -> T,
    ) -> Result<T, PlanError> {
        let (decision, receipt) = self.limiter.wait_with_receipt(facts, at_most).await?;
        let current = self.limiter.policy();
        // It was in force a moment ago: it is this one, or the one that has just been replaced.
        let policy = match self.replaced.load_full() {
            Some(replaced) if replaced.generation() == decision.generation => replaced,
            _ => current,
        };
        let receipt = receipt.map(|receipt| self.limiter.sign(&receipt));
        Ok(read(&Decided { decision, receipt, reservation: None }, &policy))
    }

    pub(crate) fn commit(&self, id: TraceId, actual: &ActualCost<'_>) -> Result<(), UnknownReservation> {
        self.limiter.commit(id, actual)
    }

    pub(crate) fn release(&self, id: TraceId) -> Result<(), UnknownReservation> {
        self.limiter.release(id)
    }

    /// Plans, settles and decides; `hand_out` says what an allowed request is given along. What comes of it is read where
    /// it is made: a decision is some kilobytes, and moving it about takes as long as writing it down.
    fn settle<T>(
        &self,
        policy: &Policy,
        verb: Verb,
        facts: &Facts<'_>,
        hand_out: impl FnOnce(&mut Decided, &Plan<'_>, &Outcome, Timestamp),
        read: impl FnOnce(&Decided) -> T,
    ) -> Result<T, PlanError> {
        let mut plan = Plan::new(policy, verb);
        plan.fill(facts)?;
        let now = self.limiter.now();
        let mut outcome = Outcome::default();
        let settled = self.limiter.store().settle(&plan, now, &mut outcome).is_ok();
        let mut decided = Decided { decision: Decision::default(), receipt: None, reservation: None };
        if settled {
            plan.decide_into(&outcome, now, &mut decided.decision);
        } else {
            // Memory fails in one way only: it is full, and then denies what is new.
            decided.decision = plan.decide_blind(false, Degraded::StoreFull, now);
        }
        if settled && decided.decision.allowed() {
            hand_out(&mut decided, &plan, &outcome, now);
        }
        if verb == Verb::Check {
            self.denials.decided(facts, &decided.decision, policy);
        }
        Ok(read(&decided))
    }
}

impl std::fmt::Debug for Desk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Desk").finish_non_exhaustive()
    }
}

/// An id nobody can guess.
pub(crate) fn new_trace() -> TraceId {
    TraceId::from_u128(rand::random())
}
