//! Waiting for room: fair, bounded, and safe to give up at any moment.

mod queues;

use std::sync::Arc;
use std::time::Duration;

use threshold_core::plan::{Met, Verb};
use threshold_core::{Decision, Digest, Facts, Outcome, Plan, PlanError, Policy, Receipt, Span, Timestamp};
use tokio::time::{Instant, timeout_at};

use super::{Limiter, traced};
use crate::clock::Clock;
use crate::store::Store;
use queues::{Place, Turn};

pub(super) use queues::Waiters;

/// How many wait at once in one limiter, unless said. One who waits takes about a kilobyte, in its future and in the
/// queues: ten thousand are some ten megabytes, and a service in which more than that wait is better off to say no.
pub const MAX_WAITERS: usize = 10_000;
/// Whoever is first looks again this often, for room that nobody rang for: a reservation that has expired, a refund on
/// another node.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// Timers count in milliseconds, and the limiter's clock and the timer's are not read at the same moment. Without this
/// grace, somebody who waits exactly as long as was told could miss the moment by a hair.
const TICK: Duration = Duration::from_millis(1);
/// What they wait for whom no budget has denied: the end of an operator's ban. They have their places together.
const END_OF_A_BAN: Digest = Digest::from_u128(0);
/// As good as forever, and a moment that a timer can still name.
const FOREVER: Duration = Duration::from_secs(30 * 365 * 86_400);

/// What somebody who has waited is told.
#[derive(Debug)]
pub struct Waited {
    /// What becomes of the request.
    pub decision: Decision,
    /// What was charged: [`refund`](Limiter::refund) it to give back a place in a concurrency limit, and the next in line
    /// looks at once.
    pub receipt: Option<Receipt>,
    /// The policy that decided in the end. It may have changed while this waited, and since.
    pub policy: Arc<Policy>,
}

/// What one try came to.
struct Tried {
    decision: Decision,
    receipt: Option<Receipt>,
    then: Then,
}

/// What becomes of somebody who has tried.
enum Then {
    /// That was the answer.
    Leave,
    /// It is first, and looks again when there may be room.
    LookIn(Duration),
    /// Somebody is ahead, and rings on leaving.
    WaitForTurn,
}

impl<S: Store, C: Clock> Limiter<S, C> {
    /// Lets so many wait at once; [`MAX_WAITERS`] unless said. Whoever comes beyond is denied at once.
    #[must_use]
    pub fn most_waiters(mut self, most: usize) -> Self {
        self.waiters.most = most;
        self
    }

    /// Lets so many wait for one budget; a quarter of [`most_waiters`](Self::most_waiters) unless said, so that those who
    /// wait for one budget leave places for those who wait for another. Whoever comes beyond is denied at once.
    #[must_use]
    pub fn most_waiters_per_key(mut self, most: usize) -> Self {
        self.waiters.most_per_key = Some(most);
        self
    }

    /// How many are waiting.
    pub fn waiting(&self) -> usize {
        self.waiters.waiting()
    }

    /// Waits until the request fits and charges it, for `at_most` so long. The denial comes at once where it is known
    /// that the request cannot fit by then, or where too many wait already, in all or for the same budget, and else when
    /// the time is up.
    ///
    /// Whoever waits for the same budget is served in the order in which they came, so that a large cost is not starved
    /// by small ones. A plain `check` does not queue. Going over a limit by waiting is no offence: it neither strikes nor
    /// blocks. Cool-downs are waited for like limits.
    ///
    /// A future that is dropped has charged nothing and waits nowhere; on a store across a network, one that is dropped
    /// while the store is being asked may have charged, as after a timeout. One that is kept but not polled keeps its
    /// place, and holds up those behind it.
    ///
    /// Decisions follow the limiter's clock, patience follows tokio's. A test that holds either still must move both.
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
    /// As for `check`: a cost that never fits is not waited for.
    ///
    /// # Panics
    /// Outside of a tokio runtime with a timer.
    pub async fn wait(&self, facts: &Facts<'_>, at_most: Duration) -> Result<Decision, PlanError> {
        Ok(self.wait_with_receipt(facts, at_most).await?.decision)
    }

    /// As [`wait`](Self::wait), with a receipt of what was charged, and the policy that says by which rules.
    ///
    /// # Errors
    /// As for `wait`.
    ///
    /// # Panics
    /// As `wait` does.
    pub async fn wait_with_receipt(&self, facts: &Facts<'_>, at_most: Duration) -> Result<Waited, PlanError> {
        let arrived = Instant::now();
        let deadline = arrived.checked_add(at_most.min(FOREVER).saturating_add(TICK)).unwrap_or(arrived);
        let facts = traced(facts);
        let mut place = self.waiters.arrive();
        loop {
            let policy: Arc<Policy> = self.policy();
            let left = deadline.saturating_duration_since(Instant::now());
            // In a box of its own, which is gone while this sleeps: a plan and its outcome are kilobytes.
            let tried = Box::pin(self.try_in_turn(&policy, &facts, &mut place, left)).await?;
            let now = Instant::now();
            let again = match tried.then {
                Then::Leave => None,
                Then::LookIn(wait) => now.checked_add(wait),
                Then::WaitForTurn => Some(deadline),
            };
            let Some(again) = again.filter(|_| now < deadline) else {
                self.tell(&facts, &tried.decision, &policy);
                return Ok(Waited { decision: tried.decision, receipt: tried.receipt, policy });
            };
            drop((tried, policy));
            // Rung or not: it looks again.
            let _ = timeout_at(again.min(deadline), place.rung()).await;
        }
    }

    /// Takes what there is if it is its turn, else only looks. `left` is how long it would still wait.
    async fn try_in_turn(
        &self,
        policy: &Policy,
        facts: &Facts<'_>,
        place: &mut Place<'_>,
        left: Duration,
    ) -> Result<Tried, PlanError> {
        let mut plan = policy.plan(facts)?;
        let turn = place.turn(plan.contested());
        if turn != Turn::Own {
            plan = policy.plan_for(Verb::Peek, facts)?;
        }
        let plan = plan.without_punishment();
        let (mut outcome, mut decision) = (Outcome::default(), Decision::default());
        let settled = self.settle_of(facts, &plan, &mut outcome, &mut decision).await;
        if decision.allowed() && turn == Turn::Own {
            let receipt = if settled { plan.receipt(&outcome) } else { None };
            return Ok(Tried { decision, receipt, then: Then::Leave });
        }
        let now = decision.at;
        if decision.allowed() {
            // There is room, and it is for those ahead: the denial is that of a limit that they have used up.
            let then = if turn == Turn::Behind { Then::WaitForTurn } else { Then::Leave };
            return Ok(Tried { decision: plan.decide_as_full(&outcome), receipt: None, then });
        }
        let then = match turn {
            _ if !could_fit(&plan, &decision, left) => Then::Leave,
            Turn::NoRoom => Then::Leave,
            Turn::Behind => Then::WaitForTurn,
            Turn::Own if stand(place, &plan, &outcome, now) => {
                let ready = decision.ready_at.map_or(LOOK_AGAIN, |ready| duration(ready.since(now)));
                Then::LookIn(ready.clamp(TICK, LOOK_AGAIN))
            }
            Turn::Own => Then::Leave,
        };
        Ok(Tried { decision, receipt: None, then })
    }
}

/// Whether a request that was denied could fit while it waits. What is held may be given back at any moment; everything
/// else says when there will be room.
fn could_fit(plan: &Plan<'_>, decision: &Decision, left: Duration) -> bool {
    let in_time = |ready: Option<Timestamp>| ready.is_some_and(|ready| duration(ready.since(decision.at)) <= left);
    let held = |met: &Met<'_>| met.limit().is_concurrency();
    let readings = plan.met().iter().zip(&decision.readings);
    let mut denying = readings.filter(|(_, reading)| reading.enforced && !reading.allowed).peekable();
    if decision.penalty.is_some() || denying.peek().is_none() {
        return in_time(decision.ready_at);
    }
    denying.all(|(charge, reading)| held(charge) || in_time(reading.ready_at()))
}

/// Takes its place for what has denied it, just now or before, but only where others lose less than [`LOOK_AGAIN`] by it.
/// A budget that has room again much sooner than the last one would lie idle for its sake: whoever has used up a budget of
/// their own could stop everyone. One that it waits for is not given away for a little while, else two that open by turns
/// could be taken from it for ever. Says whether there is room to wait.
fn stand(place: &mut Place<'_>, plan: &Plan<'_>, outcome: &Outcome, now: Timestamp) -> bool {
    let last = plan.denied_by(outcome).map(|(_, ready)| ready).max().unwrap_or(now);
    let soon = |ready: Timestamp| duration(last.since(ready)) <= LOOK_AGAIN;
    let keep = |key| soon(now) && plan.contested().any(|own| own == key);
    let mut denied_by = plan.denied_by(outcome).filter(|(_, ready)| soon(*ready)).map(|(key, _)| key).peekable();
    let ban = denied_by.peek().is_none().then_some(END_OF_A_BAN);
    place.stand(keep, denied_by.chain(ban))
}

fn duration(span: Span) -> Duration {
    Duration::from_micros(span.micros())
}
