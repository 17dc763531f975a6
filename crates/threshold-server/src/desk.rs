//! Where the doors have requests decided: under one policy each, by the limiter's store and clock.

use std::sync::Arc;

use threshold_core::decision::Degraded;
use threshold_core::plan::Verb;
use threshold_core::policy::Policy;
use threshold_core::receipt::{ActualCost, OnExpire, UnknownReservation};
use threshold_core::{Decision, Facts, Outcome, Plan, PlanError, Receipt, Span, Timestamp, TraceId};
use threshold_limiter::store::LocalStore as _;
use threshold_limiter::store::memory::MemoryStore;
use threshold_limiter::{Clock, Limiter};

use crate::log::Denials;

/// A limiter in memory, on whatever clock the server was given.
type ServerLimiter = Limiter<MemoryStore, Arc<dyn Clock>>;

/// A limiter, asked under a policy that the door holds: the answer then names that policy's rules, whatever policy is put
/// in force meanwhile, and the items of a list are all decided under the same one.
pub(crate) struct Desk {
    pub(crate) limiter: ServerLimiter,
    denials: Denials,
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
        Self { limiter: Limiter::with_clock(policy, clock), denials: Denials::default() }
    }

    /// Decides a request, and charges it unless it only looks.
    pub(crate) fn decide(&self, policy: &Policy, verb: Verb, facts: &Facts<'_>) -> Result<Decided, PlanError> {
        self.settle(policy, verb, facts, |plan, outcome, now| {
            let receipt = if verb == Verb::Peek { None } else { plan.receipt(outcome, now) };
            (receipt.map(|receipt| self.limiter.sign(&receipt)), None)
        })
    }

    /// Decides and charges a request whose true cost is not known yet.
    pub(crate) fn reserve(&self, policy: &Policy, facts: &Facts<'_>, held: Held) -> Result<Decided, PlanError> {
        self.settle(policy, Verb::Check, facts, |plan, outcome, now| {
            let holding: Receipt = plan.holding(outcome, now);
            let id = self.limiter.store().reserve(holding, held.ttl, held.on_expire, now);
            (None, id.ok())
        })
    }

    pub(crate) fn commit(&self, id: TraceId, actual: &ActualCost<'_>) -> Result<(), UnknownReservation> {
        self.limiter.commit(id, actual)
    }

    pub(crate) fn release(&self, id: TraceId) -> Result<(), UnknownReservation> {
        self.limiter.release(id)
    }

    /// Plans, settles and decides; `hand_out` says what an allowed request is given along.
    fn settle(
        &self,
        policy: &Policy,
        verb: Verb,
        facts: &Facts<'_>,
        hand_out: impl FnOnce(&Plan<'_>, &Outcome, Timestamp) -> (Option<String>, Option<TraceId>),
    ) -> Result<Decided, PlanError> {
        let mut plan = Plan::new(policy, verb);
        plan.fill(facts)?;
        let now = self.limiter.now();
        let mut outcome = Outcome::default();
        let (decision, settled) = match self.limiter.store().settle(&plan, now, &mut outcome) {
            Ok(()) => (plan.decide(&outcome, now), true),
            // Memory fails in one way only, and says itself that what is new is to be denied then.
            Err(_) => (plan.decide_blind(false, Degraded::StoreFull, now), false),
        };
        if !decision.allowed() && verb == Verb::Check {
            self.denials.log(policy, facts, &decision);
        }
        let (receipt, reservation) =
            if settled && decision.allowed() { hand_out(&plan, &outcome, now) } else { (None, None) };
        Ok(Decided { decision, receipt, reservation })
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
