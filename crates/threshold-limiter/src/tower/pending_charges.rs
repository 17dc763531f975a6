//! What a request was charged while it is under way, and what it gives back by ending, however it ends.

use std::fmt;
use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;

use threshold_core::command::{Answer, Command};
use threshold_core::plan::Verb;
use threshold_core::receipt::Pending;
use threshold_core::{Decision, Outcome, Plan, PlanError, Policy, Receipt, Span};

use crate::clock::Clock;
use crate::limiter::Limiter;
use crate::observer::Refused;
use crate::store::{Durability, Store, at_once};

use super::background::Background;
use super::request_facts::RequestFacts;

/// A limiter as the layer needs it, whatever its store and its clock.
pub(super) trait AnyLimiter: Send + Sync {
    fn policy(&self) -> Arc<Policy>;

    /// Whether its store answers at once: then every future of it is ready at the first poll.
    fn answers_at_once(&self) -> bool;

    /// Decides and charges a request on a store that answers at once. The decision is written where it is read: it is some
    /// kilobytes, and moving it about takes as long as making it.
    fn admit_at_once(
        &self,
        policy: &Policy,
        request_facts: &RequestFacts<'_>,
        answers: Answers,
        decision: &mut Decision,
    ) -> Result<Admitted, PlanError>;

    /// Decides and charges a request on any store.
    fn admit<'a>(
        &'a self,
        policy: &'a Policy,
        request_facts: &'a RequestFacts<'_>,
        answers: Answers,
        decision: &'a mut Decision,
    ) -> Boxed<'a, Result<Admitted, PlanError>>;

    /// Charges again what a request was charged when it came, and reads its figures again: it has waited, and those of its
    /// arrival would tell how long.
    fn renew<'a>(
        &'a self,
        policy: &'a Policy,
        request_facts: &'a RequestFacts<'_>,
        pending: &'a mut Pending,
        decision: &'a mut Decision,
    ) -> Boxed<'a, ()>;

    /// Charges after the fact.
    fn record<'a>(&'a self, request_facts: &'a RequestFacts<'_>) -> Boxed<'a, ()>;

    fn give_back(&self, taken: Receipt) -> Boxed<'_, ()>;

    /// Tells observers that what a request should have given back was lost.
    fn tell_lost(&self);

    /// Whether what was changed is written down, where it is at all.
    fn durability(&self) -> Option<Durability>;

    /// Tells observers of a request that was refused undecided.
    fn tell_refused(&self, request: &Undecided<'_>, policy: &Policy);
}

/// A future of a limiter whose type is not known.
pub(super) type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Carries out work that its request does not wait for: now, where the store answers at once, and else in the background.
/// Where there is no room for it there, it is lost, and observers are told: what was held is held to the end of its time.
pub(super) fn without_waiting<F>(limiter: &Arc<dyn AnyLimiter>, background: &Background, work: F)
where
    F: Future<Output = ()> + Send + 'static,
{
    if limiter.answers_at_once() {
        at_once(work);
    } else if background.start(work).is_err() {
        limiter.tell_lost();
    }
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

impl<S: Store, C: Clock> Limiter<S, C> {
    /// Settles a request that was planned, where the door sees its answer or not.
    async fn admit_planned(
        &self,
        plan: &mut Plan<'_>,
        request_facts: &RequestFacts<'_>,
        decision: &mut Decision,
    ) -> Result<Admitted, PlanError> {
        let mut outcome = Outcome::default();
        let moves = request_facts.facts(|facts| self.plan(plan, facts).map(|()| self.moves_of(facts, plan)))?;
        let settled = self.settle_moving(moves, plan, &mut outcome, decision).await;
        request_facts.facts(|facts| {
            self.name_banned(plan, facts, decision);
            self.tell(facts, decision, plan.policy());
        });
        Ok(Admitted::of(plan, &outcome, decision, settled))
    }
}

fn planned(policy: &Policy, answers: Answers) -> Plan<'_> {
    match answers {
        Answers::Seen => Plan::new(policy, Verb::Check).seeing_outcomes(),
        Answers::Unseen => Plan::new(policy, Verb::Check),
    }
}

impl<S: Store, C: Clock> AnyLimiter for Limiter<S, C> {
    fn policy(&self) -> Arc<Policy> {
        self.policy()
    }

    fn answers_at_once(&self) -> bool {
        self.store().answers_at_once()
    }

    fn admit_at_once(
        &self,
        policy: &Policy,
        request_facts: &RequestFacts<'_>,
        answers: Answers,
        decision: &mut Decision,
    ) -> Result<Admitted, PlanError> {
        at_once(self.admit_planned(&mut planned(policy, answers), request_facts, decision))
    }

    fn admit<'a>(
        &'a self,
        policy: &'a Policy,
        request_facts: &'a RequestFacts<'_>,
        answers: Answers,
        decision: &'a mut Decision,
    ) -> Boxed<'a, Result<Admitted, PlanError>> {
        Box::pin(async move { self.admit_planned(&mut planned(policy, answers), request_facts, decision).await })
    }

    fn renew<'a>(
        &'a self,
        policy: &'a Policy,
        request_facts: &'a RequestFacts<'_>,
        pending: &'a mut Pending,
        decision: &'a mut Decision,
    ) -> Boxed<'a, ()> {
        Box::pin(async move {
            let renew = Command::Renew(Box::new(pending.charged()));
            if let Ok(Answer::Renewed(renewed)) = self.execute(renew).await {
                pending.renewed(*renewed);
            }
            // It was planned when it came, under the same policy.
            let Ok(plan) = request_facts.facts(|facts| policy.plan_for(Verb::Peek, facts)) else { return };
            let mut look = Decision::default();
            if self.settle(&plan.only_limits(), &mut Outcome::default(), &mut look).await {
                decision.refresh(&look, policy);
            }
        })
    }

    fn record<'a>(&'a self, request_facts: &'a RequestFacts<'_>) -> Boxed<'a, ()> {
        Box::pin(async move {
            let policy = self.policy();
            let mut plan = Plan::new(&policy, Verb::Record);
            // The facts were decided on before, so that there is nothing in them to be refused, and nobody to be told.
            let _ = self.admit_planned(&mut plan, request_facts, &mut Decision::default()).await;
        })
    }

    fn give_back(&self, taken: Receipt) -> Boxed<'_, ()> {
        Box::pin(async move {
            let keys: Vec<_> = taken.keys().collect();
            if self.execute(Command::GiveBack(Box::new(taken))).await.is_err() {
                self.tell_lost();
            }
            self.made_room(keys);
        })
    }

    fn tell_lost(&self) {
        self.tell_lost_return();
    }

    fn tell_refused(&self, request: &Undecided<'_>, policy: &Policy) {
        let Undecided { ip, status, reason } = *request;
        self.tell_refusal(Refused { at: self.now(), ip, status, reason }, policy);
    }

    fn durability(&self) -> Option<Durability> {
        self.store().durability()
    }
}

/// What a request was charged. Dropping it ends the request: what it holds is given back, and also what depends on an
/// answer that nobody was asked for.
pub(super) struct PendingCharges {
    limiter: Arc<dyn AnyLimiter>,
    background: Background,
    pending: Box<Pending>,
    /// Whether the service was called. From then on a charge that depends on the answer stays until there is one: who
    /// leaves early must not be better off.
    called: bool,
}

impl PendingCharges {
    pub(super) fn new(limiter: Arc<dyn AnyLimiter>, background: Background, pending: Box<Pending>) -> Self {
        Self { limiter, background, pending, called: false }
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
    pub(super) async fn renew(&mut self, policy: &Policy, request_facts: &RequestFacts<'_>, decision: &mut Decision) {
        self.limiter.renew(policy, request_facts, &mut self.pending, decision).await;
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
            let limiter = Arc::clone(&self.limiter);
            without_waiting(&self.limiter, &self.background, async move { limiter.give_back(taken).await });
        }
    }
}

impl Drop for PendingCharges {
    fn drop(&mut self) {
        self.release_holds();
        if !self.called {
            let taken = self.pending.take_uncounted(None);
            self.give_back(taken);
        }
    }
}

impl fmt::Debug for PendingCharges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PendingCharges")
            .field("pending", &self.pending)
            .field("called", &self.called)
            .finish_non_exhaustive()
    }
}
