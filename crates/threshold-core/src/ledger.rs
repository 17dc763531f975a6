//! The smallest host: plain maps around `settle`, for rehearsals, `explain`, tests, and as the oracle of every store.
//!
//! It grows with its keys; call [`Ledger::sweep`] in a long run.

use std::collections::BTreeMap;

use arrayvec::ArrayVec;

use crate::balance::Balance;
use crate::decision::Decision;
use crate::facts::Facts;
use crate::key::{Digest, DigestKey, TraceId};
use crate::ladder::Standing;
use crate::lockout::{Account, Attempt, AttemptOutcome, Login, Refusal, ResultOutcome, Try, UnknownAttempt};
use crate::plan::{MAX_CHARGES, MAX_SUBJECTS, Plan, PlanError, SubjectKeys, Verb};
use crate::policy::Policy;
use crate::receipt::{ActualCost, CommitError, OnExpire, Receipt, Reservation, UnknownReservation};
use crate::settle::{Outcome, settle};
use crate::time::{Span, Timestamp};

/// Everything that is stored, in maps.
#[derive(Debug, Default)]
pub struct Ledger {
    balances: BTreeMap<Digest, Balance>,
    standings: BTreeMap<Digest, Standing>,
    accounts: BTreeMap<Digest, Account>,
    reservations: BTreeMap<TraceId, Reservation>,
    /// Receipts that were refunded, until refunding them would do nothing anyway.
    refunded: BTreeMap<TraceId, Timestamp>,
}

/// A decision, and the receipt of what it charged.
#[derive(Debug)]
pub struct Checked {
    /// What the request is told.
    pub decision: Decision,
    /// What it was charged, if anything.
    pub receipt: Option<Receipt>,
    /// What a reservation of it holds, if it was allowed.
    pub holding: Option<Receipt>,
}

impl Checked {
    /// What a settled plan comes to.
    #[must_use]
    pub fn new(plan: &Plan<'_>, outcome: &Outcome, now: Timestamp) -> Self {
        let decision = plan.decide(outcome, now);
        let receipt = plan.receipt(outcome, now).filter(|_| plan.verb() != Verb::Peek);
        let holding = decision.allowed().then(|| plan.holding(outcome, now));
        Self { decision, receipt, holding }
    }
}

impl Ledger {
    /// Plans, settles and decides one request.
    ///
    /// # Errors
    /// Where the request cannot be planned.
    pub fn decide(
        &mut self,
        policy: &Policy,
        verb: Verb,
        facts: &Facts<'_>,
        now: Timestamp,
    ) -> Result<Checked, PlanError> {
        let plan = policy.plan_for(verb, facts)?;
        let outcome = self.settle(&plan, now);
        Ok(Checked::new(&plan, &outcome, now))
    }

    /// Loads what a plan touches, settles it, and saves what changed.
    pub fn settle(&mut self, plan: &Plan<'_>, now: Timestamp) -> Outcome {
        self.expire_reservations(now);
        let mut balances: ArrayVec<Balance, MAX_CHARGES> =
            plan.charges().iter().map(|charge| self.balances.get(&charge.key()).cloned().unwrap_or_default()).collect();
        let mut standings: ArrayVec<Standing, MAX_SUBJECTS> = plan
            .subjects()
            .iter()
            .map(|subject| self.standings.get(&subject.key()).cloned().unwrap_or_default())
            .collect();
        let outcome = settle(plan, &mut balances, &mut standings, now);
        for (index, (charge, balance)) in plan.charges().iter().zip(balances).enumerate() {
            if outcome.balance_changed(index) {
                self.balances.insert(charge.key(), balance);
            }
        }
        for (index, (subject, standing)) in plan.subjects().iter().zip(standings).enumerate() {
            if outcome.standing_changed(index) {
                self.standings.insert(subject.key(), standing);
            }
        }
        outcome
    }

    /// Gives a charge back, once. Says whether this was the first time.
    pub fn refund(&mut self, receipt: &Receipt, now: Timestamp) -> bool {
        self.expire_reservations(now);
        if self.refunded.contains_key(&receipt.id()) || self.reservations.contains_key(&receipt.id()) {
            return false;
        }
        self.refunded.insert(receipt.id(), receipt.void_from());
        self.with_balances(receipt.keys().collect(), |balances| receipt.refund(balances, now));
        true
    }

    /// Charges anew what a receipt says was charged, as of now.
    pub fn renew(&mut self, receipt: &mut Receipt, now: Timestamp) {
        self.with_balances(receipt.keys().collect(), |balances| receipt.renew(balances, now));
    }

    /// Holds what a receipt says was charged.
    pub fn reserve(&mut self, receipt: Receipt, ttl: Span, on_expire: OnExpire) -> TraceId {
        let id = receipt.id();
        self.reservations.insert(id, Reservation::new(receipt, ttl, on_expire));
        id
    }

    /// Ends a reservation with what it really cost.
    ///
    /// # Errors
    /// Where there is no such reservation, or no longer, or where it was committed with another cost.
    pub fn commit(
        &mut self,
        id: TraceId,
        actual: &ActualCost<'_>,
        key: DigestKey,
        now: Timestamp,
    ) -> Result<(), CommitError> {
        self.expire_reservations(now);
        let mut reservation = self.reservations.get(&id).cloned().ok_or(UnknownReservation)?;
        let keys = reservation.keys().collect();
        self.with_balances(keys, |balances| reservation.commit(actual, key, balances, now))?;
        self.reservations.insert(id, reservation);
        Ok(())
    }

    /// Ends a reservation without any cost.
    ///
    /// # Errors
    /// Where there is no such reservation, or no longer.
    pub fn release(&mut self, id: TraceId, now: Timestamp) -> Result<(), UnknownReservation> {
        self.expire_reservations(now);
        let mut reservation = self.reservations.get(&id).cloned().ok_or(UnknownReservation)?;
        let keys = reservation.keys().collect();
        self.with_balances(keys, |balances| reservation.release(balances, now))?;
        self.reservations.insert(id, reservation);
        Ok(())
    }

    /// Denies these keys until then.
    pub fn pause(&mut self, keys: &SubjectKeys, until: Timestamp) {
        for key in keys.balances.keys() {
            self.balances.entry(*key).or_default().block(until);
        }
    }

    /// Forgets what is known of these keys: used, strikes and penalties.
    pub fn forgive(&mut self, keys: &SubjectKeys) {
        self.balances.retain(|key, _| !keys.balances.contains_key(key));
        self.standings.retain(|key, _| !keys.standings.contains(key));
    }

    /// What bars a login, if anything does.
    pub fn login_barred(&mut self, bars: &[Plan<'_>], now: Timestamp) -> Option<Refusal> {
        bars.iter().find_map(|bar| Refusal::barring(&bar.decide(&self.settle(bar, now), now)))
    }

    /// Before a secret is checked.
    pub fn login_attempt(&mut self, login: &Login, tried: &Try, now: Timestamp) -> AttemptOutcome {
        let mut nobody = Balance::default();
        let address = match tried.address {
            Some(key) => self.balances.entry(key).or_default(),
            None => &mut nobody,
        };
        let account = tried.account.map(|key| self.accounts.entry(key).or_default());
        login.attempt(tried, account, address, now)
    }

    /// After a secret was checked.
    ///
    /// # Errors
    /// Where the attempt is not under way (any more).
    pub fn login_result(
        &mut self,
        login: &Login,
        attempt: &Attempt,
        success: bool,
        nonce: TraceId,
        now: Timestamp,
    ) -> Result<ResultOutcome, UnknownAttempt> {
        let mut nobody = Balance::default();
        let address = match attempt.address {
            Some(key) => self.balances.entry(key).or_default(),
            None => &mut nobody,
        };
        let account = attempt.account.and_then(|key| self.accounts.get_mut(&key));
        login.result(attempt, success, account, address, nonce, now)
    }

    /// The account under a digest.
    pub fn account(&mut self, key: Digest) -> &mut Account {
        self.accounts.entry(key).or_default()
    }

    /// Drops everything that says nothing at `now`.
    pub fn sweep(&mut self, now: Timestamp) {
        self.expire_reservations(now);
        self.balances.retain(|_, balance| balance.silent_from() > now);
        self.standings.retain(|_, standing| standing.silent_from() > now);
        self.refunded.retain(|_, void| *void > now);
    }

    /// How many keys are kept.
    #[must_use]
    pub fn len(&self) -> usize {
        self.balances.len().saturating_add(self.standings.len())
    }

    /// Whether nothing is kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn expire_reservations(&mut self, now: Timestamp) {
        let over = |reservation: &&Reservation| reservation.expires() <= now;
        let mut due: Vec<(Timestamp, TraceId)> =
            self.reservations.values().filter(over).map(|own| (own.expires(), own.id())).collect();
        due.sort_unstable();
        for (_, id) in due {
            let Some(mut reservation) = self.reservations.remove(&id) else { continue };
            if reservation.gives_back() {
                // What it has given back, its receipt does not give back again.
                self.refunded.insert(id, reservation.void_from());
            }
            let keys = reservation.keys().collect();
            self.with_balances(keys, |balances| reservation.expire(balances, now));
        }
    }

    fn with_balances<T>(&mut self, keys: ArrayVec<Digest, MAX_CHARGES>, change: impl FnOnce(&mut [Balance]) -> T) -> T {
        let mut balances: ArrayVec<Balance, MAX_CHARGES> =
            keys.iter().map(|key| self.balances.get(key).cloned().unwrap_or_default()).collect();
        let result = change(&mut balances);
        for (key, balance) in keys.into_iter().zip(balances) {
            self.balances.insert(key, balance);
        }
        result
    }
}
