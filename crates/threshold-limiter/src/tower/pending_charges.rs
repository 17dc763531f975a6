//! Pending charges: what a request in flight was charged, and gives back when it ends.

use std::fmt;
use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;

use threshold_core::command::{Answer, Command};
use threshold_core::decision::Degraded;
use threshold_core::plan::Verb;
use threshold_core::receipt::Pending;
use threshold_core::{Decision, Outcome, Plan, PlanError, Policy, Receipt, TraceId};

use crate::clock::Clock;
use crate::limiter::Limiter;
use crate::observer::Refused;
use crate::random_id;
use crate::store::{Durability, Store, at_once};

use super::request_facts::RequestFacts;
use super::runtime::Background;

/// A limiter of any store and clock, as the layer needs it.
pub(super) trait AnyLimiter: Send + Sync {
    fn policy(&self) -> Arc<Policy>;

    /// Returns whether the store is immediate: then all of the limiter's futures are ready at the first poll.
    fn answers_at_once(&self) -> bool;

    /// Decides and charges a request on an immediate store, without a boxed future. The decision is an out-parameter so that
    /// it is not copied through the call by vtable.
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

    /// Moves the charges of a delayed request to the present, and replaces the figures of its decision by the present ones.
    fn renew<'a>(
        &'a self,
        policy: &'a Policy,
        request_facts: &'a RequestFacts<'_>,
        pending: &'a mut Pending,
        decision: &'a mut Decision,
    ) -> Boxed<'a, ()>;

    /// Charges bytes that have already streamed.
    fn record<'a>(&'a self, request_facts: &'a RequestFacts<'_>) -> Boxed<'a, ()>;

    fn give_back(&self, taken: Receipt) -> Boxed<'_, ()>;

    /// Notifies observers that a request could not give back its charges.
    fn tell_lost(&self);

    /// Returns a future that resolves when all changes are on disk; `None` without a journal.
    fn durability(&self) -> Option<Durability>;

    /// Notifies observers of a request that was refused without a decision.
    fn tell_refused(&self, request: &Undecided<'_>, policy: &Policy);
}

/// A boxed future.
pub(super) type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Runs work that no request waits for: now if the store is immediate, otherwise in the background. If there are too many
/// background tasks the work is dropped, and observers are notified: concurrency is then held until its `ttl`.
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

/// A request that was refused without a decision.
#[derive(Debug, Clone, Copy)]
pub(super) struct Undecided<'r> {
    pub(super) ip: Option<IpAddr>,
    pub(super) status: u16,
    pub(super) reason: &'r str,
    pub(super) trace: TraceId,
}

/// Whether the layer sees the response to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answers {
    Seen,
    Unseen,
}

/// What a decision has charged.
#[derive(Default)]
pub(super) struct Admitted {
    /// The charges that may be given back.
    pub(super) pending: Option<Box<Pending>>,
    /// For a request that is to be delayed: the decision if no more can be delayed.
    pub(super) if_full: Option<Box<Decision>>,
}

impl Admitted {
    fn of(plan: &Plan<'_>, outcome: &Outcome, decision: &Decision, settled: bool) -> Self {
        let delayed = !decision.delay().is_zero();
        let ends_later = decision.allowed() && (delayed || plan.ends_later());
        // Without an answer of the store there are no marks by which charges could be given back, and no figures of limits that
        // could be shown as full. A delayed request is then refused like others that need the store.
        if !settled {
            let reason = decision.degraded.unwrap_or(Degraded::StoreError);
            let if_full = delayed.then(|| Box::new(plan.decide_blind(false, reason, decision.at)));
            return Self { pending: None, if_full };
        }
        if !ends_later {
            return Self::default();
        }
        let pending = Some(Box::new(plan.pending(outcome)));
        Self { pending, if_full: delayed.then(|| Box::new(plan.decide_as_full(outcome))) }
    }
}

impl<S: Store, C: Clock> Limiter<S, C> {
    /// Plans and settles a request, and notifies observers.
    async fn admit_planned(
        &self,
        plan: &mut Plan<'_>,
        request_facts: &RequestFacts<'_>,
        decision: &mut Decision,
    ) -> Result<Admitted, PlanError> {
        let start = self.start();
        let mut outcome = Outcome::default();
        // Facts point into vectors that last for one call, so they are built once before the await and once after it.
        let moves = request_facts.facts(|facts| self.plan(plan, facts).map(|()| self.moves_of(facts, plan)))?;
        let settled = self.settle_moving(moves, plan, &mut outcome, decision).await;
        request_facts.facts(|facts| {
            self.name_banned(plan, facts, decision);
            self.tell(plan.verb().into(), facts, decision, plan.policy(), (start, settled.in_store));
        });
        Ok(Admitted::of(plan, &outcome, decision, settled.answered))
    }
}

fn planned(policy: &Policy, answers: Answers) -> Plan<'_> {
    match answers {
        // Only a layer that sees the response can give back what depends on it.
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
            // If the store fails, the charges stay at the time of the arrival.
            if let Ok(Answer::Renewed(renewed)) = self.execute(renew).await {
                pending.renewed(*renewed);
            }
            // It could be planned when it came, so it can be planned again under the same policy.
            let Ok(plan) = request_facts.facts(|facts| policy.plan_for(Verb::Peek, facts)) else { return };
            let mut look = Decision::default();
            if self.settle(&plan.only_limits(), &mut Outcome::default(), &mut look).await.answered {
                decision.refresh(&look, policy);
            }
        })
    }

    fn record<'a>(&'a self, request_facts: &'a RequestFacts<'_>) -> Boxed<'a, ()> {
        Box::pin(async move {
            let policy = self.policy();
            let mut plan = Plan::new(&policy, Verb::Record);
            // A request with these facts was decided before, so planning cannot fail; and there is nobody to answer.
            let _ = self.admit_planned(&mut plan, request_facts, &mut Decision::default()).await;
        })
    }

    fn give_back(&self, taken: Receipt) -> Boxed<'_, ()> {
        Box::pin(async move {
            let keys: Vec<_> = taken.keys().collect();
            // An id of its own: one request may give back several times. A store in this process is never asked twice.
            let credit = (!self.store().answers_at_once()).then(random_id);
            if self.execute(Command::GiveBack { receipt: Box::new(taken), credit }).await.is_err() {
                self.tell_lost();
            }
            // Also after an error: the store may have given the charges back all the same, and a waiter that is woken
            // in vain only looks again.
            self.made_room(keys);
        })
    }

    fn tell_lost(&self) {
        self.tell_lost_return();
    }

    fn tell_refused(&self, request: &Undecided<'_>, policy: &Policy) {
        let Undecided { ip, status, reason, trace } = *request;
        self.tell_refusal(Refused { at: self.now().into(), ip, status, reason, trace }, policy);
    }

    fn durability(&self) -> Option<Durability> {
        self.store().durability()
    }
}

/// The charges of a request in flight. Dropping it ends the request, however it ended: concurrency is given back, and so are
/// charges that depend on the response if the service was never called.
pub(super) struct PendingCharges {
    limiter: Arc<dyn AnyLimiter>,
    background: Background,
    pending: Box<Pending>,
    /// Whether the service was called. From then on a charge that depends on the response stays until there is one: a client
    /// must not avoid it by leaving early.
    called: bool,
}

impl PendingCharges {
    pub(super) fn new(limiter: Arc<dyn AnyLimiter>, background: Background, pending: Box<Pending>) -> Self {
        Self { limiter, background, pending, called: false }
    }

    pub(super) fn call(&mut self) {
        self.called = true;
    }

    /// Returns whether anything may still be given back.
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

    /// Moves the charges to the present after a delay; see [`AnyLimiter::renew`].
    pub(super) async fn renew(&mut self, policy: &Policy, request_facts: &RequestFacts<'_>, decision: &mut Decision) {
        self.limiter.renew(policy, request_facts, &mut self.pending, decision).await;
    }

    /// Drops the charges without giving anything back: the end of the request is not seen here, so concurrency is held until
    /// its `ttl`.
    pub(super) fn leave(mut self) {
        // Taken out, so that `drop` finds nothing to give back.
        drop(self.pending.take_all());
    }

    /// Gives back all charges: the request is refused after all.
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
        // Reached after a response, an error, a panic, or a client that has left.
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
