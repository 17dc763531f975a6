//! Waiting for capacity: first come, first served, bounded, and safe to cancel at any await.

pub(crate) mod queues;

use std::sync::Arc;
use std::time::Duration;

use threshold_core::plan::{Met, Verb};
use threshold_core::{Decision, Digest, Facts, Outcome, Plan, PlanError, Policy, Receipt, Timestamp, TraceId};
use tokio::time::{Instant, timeout_at};

use super::under::Settled;
use super::{Limiter, traced};
use crate::clock::Clock;
use crate::observer::Operation;
use crate::random_id;
use crate::store::Store;
use queues::{Place, Turn};

pub(crate) use queues::Waiters;

/// How many requests may wait at once in one limiter by default. A waiting request takes about a kilobyte, in its future and
/// in the queues, so ten thousand take some ten megabytes. A service with a longer queue does better to deny.
pub const MAX_WAITERS: usize = 10_000;
/// The first in a queue tries again this often, for capacity that nothing notifies it of: a reservation that has expired, or a
/// refund on another node.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// The resolution of tokio's timer. The limiter's clock and the timer are not read at the same moment: without this much
/// grace, a request that waits exactly as long as it was told could miss the moment.
pub(crate) const TICK: Duration = Duration::from_millis(1);
/// The queue of requests that no limit has denied: they wait for an operator's ban to end.
const END_OF_BAN: Digest = Digest::from_u128(0);
/// The longest wait: 30 years, which a timer can still represent.
pub(crate) const FOREVER: Duration = Duration::from_secs(30 * 365 * 86_400);

/// The result of waiting.
#[derive(Debug)]
pub struct Waited {
    /// The decision.
    pub decision: Decision,
    /// The receipt of what was charged. [`refund`](Limiter::refund) it to give back a place in a concurrency limit, which
    /// wakes the next in line.
    pub receipt: Option<Receipt>,
    /// The policy that decided. The policy in force may have changed while this waited, and since.
    pub policy: Arc<Policy>,
}

/// The result of one attempt.
struct Tried {
    decision: Decision,
    receipt: Option<Receipt>,
    in_store: Duration,
    next: Next,
}

/// What to do after an attempt.
enum Next {
    /// Return the decision.
    Return,
    /// Try again after this time: the request is the first in its queues.
    RetryIn(Duration),
    /// Wait for a notification: another request is ahead, and notifies the next when it leaves.
    WaitForTurn,
}

impl<S: Store, C: Clock> Limiter<S, C> {
    /// Returns how many requests are waiting.
    pub fn waiting(&self) -> usize {
        self.waiters.waiting()
    }

    /// Waits until the request fits and charges it, for `at_most` this long. Returns the denial at once if the request cannot
    /// fit by then, or if too many requests already wait, in all or for the same key; otherwise when the time is up.
    ///
    /// Requests that wait for the same key are served in the order of their arrival, so that small costs do not starve a
    /// large one. A plain `check` does not queue. A request that waits neither strikes nor begins a `block_for`. Cool-downs
    /// are waited for like limits.
    ///
    /// A future that is dropped has charged nothing and leaves its queues. On a store across a network, a future that is
    /// dropped while the store is being asked may have charged, as after a timeout. A future that is kept but not polled
    /// keeps its place and holds up those behind it.
    ///
    /// Decisions follow the limiter's clock, and the wait follows tokio's. A test that stops one must move both.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use threshold_limiter::{Facts, Limiter, Policy};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let policy = "[[rule]]\nname = \"provider\"\nlayer = \"global\"\nper = []\nlimit = \"100/s burst 1\"";
    /// let limiter = Limiter::new(Policy::parse(policy, &|_| None)?);
    /// for _ in 0..3 {
    ///     assert!(limiter.wait(&Facts::default(), Duration::from_secs(5)).await?.allowed());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for [`check`](Self::check): a cost that never fits is not waited for.
    ///
    /// # Panics
    /// Panics outside of a tokio runtime with a timer.
    pub async fn wait(&self, facts: &Facts<'_>, at_most: Duration) -> Result<Decision, PlanError> {
        Ok(self.wait_with_receipt(facts, at_most).await?.decision)
    }

    /// Waits as [`wait`](Self::wait) does, and returns a receipt of what was charged and the policy that decided too.
    ///
    /// # Errors
    /// As for [`wait`](Self::wait).
    ///
    /// # Panics
    /// As [`wait`](Self::wait) does.
    pub async fn wait_with_receipt(&self, facts: &Facts<'_>, at_most: Duration) -> Result<Waited, PlanError> {
        let arrived = Instant::now();
        let deadline = arrived.checked_add(at_most.min(FOREVER).saturating_add(TICK)).unwrap_or(arrived);
        let facts = traced(facts);
        // The ticket is drawn before the first attempt, so that the arrival decides the order and not the moment at
        // which the store answers.
        let mut place = self.waiters.arrive();
        let mut id = facts.trace;
        loop {
            // The policy in force now: a reload in the meantime may have given the request more room.
            let policy: Arc<Policy> = self.policy();
            let left = deadline.saturating_duration_since(Instant::now());
            let start = self.start();
            // Boxed, and dropped before this sleeps: a plan and its outcome are kilobytes, which thousands of waiting
            // futures would hold otherwise.
            let mut tried = Box::pin(self.try_in_turn(&policy, (&facts, id), &mut place, left)).await?;
            // An attempt that was denied may have been charged and given back, or charged too late. The next one is another charge.
            id = random_id();
            let now = Instant::now();
            let again = match tried.next {
                Next::Return => None,
                Next::RetryIn(wait) => now.checked_add(wait),
                Next::WaitForTurn => Some(deadline),
            };
            let Some(again) = again.filter(|_| now < deadline) else {
                // Observers see one decision for each request, not every attempt.
                tried.decision.trace = facts.trace;
                let measured = (start, tried.in_store);
                self.tell(Operation::Wait, &facts, &tried.decision, &policy, measured);
                return Ok(Waited { decision: tried.decision, receipt: tried.receipt, policy });
            };
            // A waiting request must not keep a replaced policy alive either.
            drop((tried, policy));
            // Notified or timed out: try again.
            let _ = timeout_at(again.min(deadline), place.notified()).await;
        }
    }

    /// Charges the request under this id if it is its turn, otherwise only peeks. `left` is the time that it would still wait.
    async fn try_in_turn(
        &self,
        policy: &Policy,
        (facts, id): (&Facts<'_>, TraceId),
        place: &mut Place<'_>,
        left: Duration,
    ) -> Result<Tried, PlanError> {
        let mut plan = policy.plan(facts)?;
        let turn = place.turn(plan.contested());
        if turn != Turn::Own {
            // What is free belongs to those ahead, so this attempt charges nothing.
            plan = policy.plan_for(Verb::Peek, facts)?;
        }
        plan.retry_as(id);
        let plan = plan.without_punishment();
        let (mut outcome, mut decision) = (Outcome::default(), Decision::default());
        let Settled { answered, in_store } = self.settle_of(facts, &plan, &mut outcome, &mut decision).await;
        if decision.allowed() && turn == Turn::Own {
            // Without an answer it is not known what the store has charged, so there is no receipt of it.
            let receipt = if answered { plan.receipt(&outcome) } else { None };
            return Ok(Tried { decision, receipt, in_store, next: Next::Return });
        }
        let now = decision.at;
        if decision.allowed() {
            // There is capacity, and it belongs to those ahead: deny as if they had used up the limit.
            let next = if turn == Turn::Behind { Next::WaitForTurn } else { Next::Return };
            return Ok(Tried { decision: plan.decide_as_full(&outcome), receipt: None, in_store, next });
        }
        let next = match turn {
            // It would be denied in the end anyway.
            _ if !could_fit(&plan, &decision, left) => Next::Return,
            Turn::NoRoom => Next::Return,
            Turn::Behind => Next::WaitForTurn,
            Turn::Own if enqueue(place, &plan, &outcome, now) => {
                // A concurrency limit cannot tell when it has room, so it is looked at again.
                let ready = decision.ready_at.map_or(LOOK_AGAIN, |ready| ready.since(now).into());
                // No longer than a second, because capacity may come back earlier than computed, and no shorter than
                // the timer can sleep.
                Next::RetryIn(ready.clamp(TICK, LOOK_AGAIN))
            }
            Turn::Own => Next::Return,
        };
        Ok(Tried { decision, receipt: None, in_store, next })
    }
}

/// Returns whether a denied request could fit while it waits. A concurrency limit may have room at any moment; all others know
/// when they will.
fn could_fit(plan: &Plan<'_>, decision: &Decision, left: Duration) -> bool {
    let in_time =
        |ready: Option<Timestamp>| ready.is_some_and(|ready| Duration::from(ready.since(decision.at)) <= left);
    let held = |met: &Met<'_>| met.limit().is_concurrency();
    let readings = plan.met().iter().zip(&decision.readings);
    let mut denying = readings.filter(|(_, reading)| reading.enforced && !reading.allowed).peekable();
    // A penalty denies whatever the limits say. An operator's ban denies without any reading.
    if decision.penalty.is_some() || denying.peek().is_none() {
        return in_time(decision.ready_at);
    }
    denying.all(|(charge, reading)| held(charge) || in_time(reading.ready_at()))
}

/// Queues the request for the keys that have denied it, now or in an earlier attempt. Returns whether there is room to wait.
///
/// It queues for a key only where others lose less than [`LOOK_AGAIN`] by it. A key that has capacity much sooner than the last
/// one would idle for its sake: a caller who has used up a limit of their own could stop everyone. For that short time a key
/// is kept, though: two keys that have capacity by turns could otherwise be taken from the request forever.
fn enqueue(place: &mut Place<'_>, plan: &Plan<'_>, outcome: &Outcome, now: Timestamp) -> bool {
    let last = plan.denied_by(outcome).map(|(_, ready)| ready).max().unwrap_or(now);
    let soon = |ready: Timestamp| Duration::from(last.since(ready)) <= LOOK_AGAIN;
    let keep = |key| soon(now) && plan.contested().any(|own| own == key);
    let mut denied_by = plan.denied_by(outcome).filter(|(_, ready)| soon(*ready)).map(|(key, _)| key).peekable();
    let ban = denied_by.peek().is_none().then_some(END_OF_BAN);
    place.enqueue(keep, denied_by.chain(ban))
}
