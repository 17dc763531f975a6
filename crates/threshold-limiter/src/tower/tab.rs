//! What a request was charged while it is under way, and what it gives back by ending, however it ends.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use threshold_core::command::{Answer, Command};
use threshold_core::plan::Verb;
use threshold_core::receipt::Pending;
use threshold_core::{Decision, Facts, Outcome, Plan, PlanError, Policy, Receipt, Span};

use crate::clock::Clock;
use crate::limiter::Limiter;
use crate::observer::Refused;
use crate::store::{ImmediateStore, Saving, at_once};

/// A limiter as the layer needs it, whatever its store and its clock.
pub(super) trait AnyLimiter: Send + Sync {
    fn policy(&self) -> Arc<Policy>;

    /// Decides and charges a request. The decision is written where it is read: it is some kilobytes, and moving it about
    /// takes as long as making it.
    fn admit(
        &self,
        policy: &Policy,
        facts: &Facts<'_>,
        answers: Answers,
        decision: &mut Decision,
    ) -> Result<Admitted, PlanError>;

    /// Charges anew what a request was charged when it came, and reads its figures anew: it has waited, and those of its
    /// arrival would tell how long.
    fn renew(&self, policy: &Policy, facts: &Facts<'_>, pending: &mut Pending, decision: &mut Decision);

    /// Charges after the fact.
    fn record(&self, facts: &Facts<'_>);

    fn give_back(&self, taken: Receipt);

    /// Whether what was changed is written down, where it is at all.
    fn saving(&self) -> Option<Saving>;

    /// Tells observers of a request that was refused undecided.
    fn tell_refused(&self, request: &Undecided<'_>, policy: &Policy);
}

/// A request that was refused undecided.
#[derive(Debug, Clone, Copy)]
pub(super) struct Undecided<'r> {
    pub(super) ip: Option<IpAddr>,
    pub(super) status: u16,
    pub(super) reason: &'r str,
}

/// Whether the answer to a request is seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answers {
    Seen,
    Unseen,
}

/// What a decision charged.
#[derive(Default)]
pub(super) struct Admitted {
    /// What may be given back yet.
    pub(super) pending: Option<Box<Pending>>,
    /// If the request is to be slowed: what it is told where no more can wait.
    pub(super) if_full: Option<Box<Decision>>,
}

impl Admitted {
    fn of(plan: &Plan<'_>, outcome: &Outcome, decision: &Decision, settled: bool) -> Self {
        let slowed = decision.delay > Span::ZERO;
        let ends_later = decision.allowed() && (slowed || plan.ends_later());
        if !settled || !ends_later {
            return Self::default();
        }
        let pending = Some(Box::new(plan.pending(outcome)));
        Self { pending, if_full: slowed.then(|| Box::new(plan.decide_as_full(outcome))) }
    }
}

impl<S: ImmediateStore, C: Clock> AnyLimiter for Limiter<S, C> {
    fn policy(&self) -> Arc<Policy> {
        self.policy()
    }

    fn admit(
        &self,
        policy: &Policy,
        facts: &Facts<'_>,
        answers: Answers,
        decision: &mut Decision,
    ) -> Result<Admitted, PlanError> {
        let mut plan = match answers {
            Answers::Seen => Plan::new(policy, Verb::Check).seeing_outcomes(),
            Answers::Unseen => Plan::new(policy, Verb::Check),
        };
        let mut outcome = Outcome::default();
        let settled = at_once(self.decide(&mut plan, facts, &mut outcome, decision))?;
        Ok(Admitted::of(&plan, &outcome, decision, settled))
    }

    fn renew(&self, policy: &Policy, facts: &Facts<'_>, pending: &mut Pending, decision: &mut Decision) {
        pending.renew(|charged| {
            let renewed = at_once(self.execute(Command::Renew(Box::new(charged.clone()))));
            if let Ok(Answer::Renewed(renewed)) = renewed {
                *charged = *renewed;
            }
        });
        // It was planned when it came, under the same policy.
        let Ok(plan) = policy.plan_for(Verb::Peek, facts) else { return };
        let mut look = Decision::default();
        if at_once(self.settle(&plan.only_limits(), &mut Outcome::default(), &mut look)) {
            decision.refresh(&look, policy);
        }
    }

    fn record(&self, facts: &Facts<'_>) {
        // The facts were decided on before, so that there is nothing in them to be refused, and nobody to be told.
        let _ = self.record(facts);
    }

    fn tell_refused(&self, request: &Undecided<'_>, policy: &Policy) {
        let Undecided { ip, status, reason } = *request;
        self.tell_refusal(Refused { at: self.now(), ip, status, reason }, policy);
    }

    fn saving(&self) -> Option<Saving> {
        self.store().saving()
    }

    fn give_back(&self, taken: Receipt) {
        let keys: Vec<_> = taken.keys().collect();
        // Memory gives back whatever it has charged.
        let _ = at_once(self.execute(Command::GiveBack(Box::new(taken))));
        self.made_room(keys);
    }
}

/// What a request was charged. Dropping it ends the request: what it holds is given back, and also what depends on an
/// answer that nobody was asked for.
pub(super) struct Tab {
    limiter: Arc<dyn AnyLimiter>,
    pending: Box<Pending>,
    /// Whether the service was called. From then on a charge that depends on the answer stays until there is one: who
    /// leaves early must not be better off.
    called: bool,
}

impl Tab {
    pub(super) fn new(limiter: Arc<dyn AnyLimiter>, pending: Box<Pending>) -> Self {
        Self { limiter, pending, called: false }
    }

    pub(super) fn call(&mut self) {
        self.called = true;
    }

    /// Whether anything may still be given back.
    pub(super) fn is_open(&self) -> bool {
        self.pending.is_open()
    }

    pub(super) fn has_holds(&self) -> bool {
        self.pending.has_holds()
    }

    pub(super) fn answer(&mut self, status: u16) {
        let taken = self.pending.take_uncounted(Some(status));
        self.give_back(taken);
    }

    fn release_holds(&mut self) {
        let taken = self.pending.take_holds();
        self.give_back(taken);
    }

    /// The request has waited: see [`AnyLimiter::renew`].
    pub(super) fn renew(&mut self, policy: &Policy, facts: &Facts<'_>, decision: &mut Decision) {
        self.limiter.renew(policy, facts, &mut self.pending, decision);
    }

    /// Nobody here will see how the request ends: what was charged stays, and what is held is held to the end of its time.
    pub(super) fn leave(mut self) {
        drop(self.pending.take_all());
    }

    /// The request is refused after all.
    pub(super) fn withdraw(mut self) {
        let taken = self.pending.take_all();
        self.give_back(taken);
    }

    fn give_back(&self, taken: Option<Receipt>) {
        if let Some(taken) = taken {
            self.limiter.give_back(taken);
        }
    }
}

impl Drop for Tab {
    fn drop(&mut self) {
        self.release_holds();
        if !self.called {
            let taken = self.pending.take_uncounted(None);
            self.give_back(taken);
        }
    }
}

impl fmt::Debug for Tab {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tab").field("pending", &self.pending).field("called", &self.called).finish_non_exhaustive()
    }
}
