//! The smallest host: plain maps around `settle`, for rehearsals, `explain`, tests, and as the oracle of every store.
//!
//! It grows with its keys; call [`Ledger::sweep`] in a long run.

use std::collections::BTreeMap;
use std::convert::Infallible;

use arrayvec::ArrayVec;

use crate::balance::Balance;
use crate::command::{
    AccountChange, AccountKey, Answer, Command, MovedRecord, Records, RequestRecord, SaveReason, execute, expire,
};
use crate::control::{ControlChange, ControlFull, ControlLog, ControlPage};
use crate::decision::Decision;
use crate::facts::Facts;
use crate::key::{Digest, TraceId};
use crate::ladder::Standing;
use crate::limit::Limit;
use crate::lockout::{Account, Login, Refusal};
use crate::plan::{MAX_CHARGES, MAX_SUBJECTS, Plan, PlanError, Verb};
use crate::policy::Policy;
use crate::receipt::{ActualCost, CommitError, OnExpire, Receipt, Reservation};
use crate::settle::{Outcome, settle};
use crate::time::{Span, Timestamp};

/// An in-memory store of every kind of record, in plain maps.
#[derive(Debug)]
pub struct Ledger {
    balances: BTreeMap<Digest, Balance>,
    standings: BTreeMap<Digest, Standing>,
    accounts: BTreeMap<Digest, Account>,
    reservations: BTreeMap<TraceId, Reservation>,
    /// Refunded receipts, until refunding them would change nothing anyway.
    refunded: BTreeMap<TraceId, Timestamp>,
    requests: BTreeMap<Digest, RequestRecord>,
    control: ControlLog,
}

impl Default for Ledger {
    fn default() -> Self {
        Self {
            balances: BTreeMap::new(),
            standings: BTreeMap::new(),
            accounts: BTreeMap::new(),
            reservations: BTreeMap::new(),
            refunded: BTreeMap::new(),
            requests: BTreeMap::new(),
            control: ControlLog::bounded(usize::MAX, usize::MAX),
        }
    }
}

/// A decision, and the receipt of what it charged.
#[derive(Debug)]
pub struct Checked {
    /// The answer to the request.
    pub decision: Decision,
    /// The receipt of its charges, if anything was charged.
    pub receipt: Option<Receipt>,
    /// The receipt that a reservation holds, if the request was allowed.
    pub holding: Option<Receipt>,
}

impl Checked {
    /// The decision and receipts of a settled plan.
    #[must_use]
    pub fn new(plan: &Plan<'_>, outcome: &Outcome) -> Self {
        let decision = plan.decide(outcome);
        // A peek has marks too, because it is a check on copies. A receipt of them would refund what nobody was
        // charged.
        let receipt = plan.receipt(outcome).filter(|_| plan.verb() != Verb::Peek);
        let holding = decision.allowed().then(|| plan.holding(outcome));
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
        Ok(Checked::new(&plan, &outcome))
    }

    /// Loads the records of a plan, settles it, and saves the changes.
    pub fn settle(&mut self, plan: &Plan<'_>, now: Timestamp) -> Outcome {
        // As every command does. Stores are compared with this ledger, so it must not count a reservation for longer
        // than they do.
        self.expire_reservations(now);
        let mut balances: ArrayVec<Balance, MAX_CHARGES> =
            plan.charges().iter().map(|charge| self.balances.get(&charge.key()).cloned().unwrap_or_default()).collect();
        let mut standings: ArrayVec<Standing, MAX_SUBJECTS> = plan
            .subjects()
            .iter()
            .map(|subject| self.standings.get(&subject.key()).cloned().unwrap_or_default())
            .collect();
        let outcome = settle(plan.bill(), &mut balances, &mut standings, now);
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

    /// Executes a command. A ledger is never full, so this cannot fail.
    pub fn execute(&mut self, command: &Command, now: Timestamp) -> Answer {
        match execute(command, self, now) {
            Ok(answer) => answer,
            Err(never) => match never {},
        }
    }

    /// Gives a charge back, once. Returns whether this was the first time.
    pub fn refund(&mut self, receipt: &Receipt, now: Timestamp) -> bool {
        matches!(self.execute(&Command::Refund(Box::new(receipt.clone())), now), Answer::Refunded { first: true })
    }

    /// Gives back the charges of a receipt and makes them again, as of now.
    pub fn renew(&mut self, receipt: &mut Receipt, now: Timestamp) {
        if let Answer::Renewed(renewed) = self.execute(&Command::Renew(Box::new(receipt.clone())), now) {
            *receipt = *renewed;
        }
    }

    /// Reserves the charges of a receipt.
    pub fn reserve(&mut self, receipt: Receipt, ttl: Span, on_expire: OnExpire) -> TraceId {
        let (id, now) = (receipt.id(), receipt.at());
        self.execute(&Command::SaveReservation { receipt: Box::new(receipt), ttl, on_expire }, now);
        id
    }

    /// Ends a reservation with its actual cost.
    ///
    /// # Errors
    /// Where the reservation is unknown or has ended, or was committed with another cost.
    pub fn commit(&mut self, id: TraceId, actual: &ActualCost<'_>, now: Timestamp) -> Result<(), CommitError> {
        self.execute(&Command::Commit { id, cost: actual.owned() }, now).ended()
    }

    /// Ends a reservation without any cost.
    ///
    /// # Errors
    /// Where the reservation is unknown or has ended.
    pub fn release(&mut self, id: TraceId, now: Timestamp) -> Result<(), CommitError> {
        self.execute(&Command::Release { id }, now).ended()
    }

    /// The account of a digest, which is created if there is none.
    pub fn account(&mut self, key: Digest) -> &mut Account {
        self.accounts.entry(key).or_default()
    }

    /// The first refusal among the [`penalty_checks`](crate::lockout::LoginRequest::penalty_checks) of a login, if any.
    pub fn login_refusal(&mut self, checks: &[Plan<'_>], now: Timestamp) -> Option<Refusal> {
        checks.iter().find_map(|check| Refusal::from_decision(&check.decide(&self.settle(check, now))))
    }

    /// Drops every record that has no effect from `now` on.
    pub fn sweep(&mut self, now: Timestamp) {
        self.expire_reservations(now);
        self.balances.retain(|_, balance| balance.silent_from() > now);
        self.standings.retain(|_, standing| standing.silent_from() > now);
        self.refunded.retain(|_, void| *void > now);
        self.requests.retain(|_, request| request.until() > now);
    }

    /// The number of balances and standings.
    #[must_use]
    pub fn len(&self) -> usize {
        self.balances.len().saturating_add(self.standings.len())
    }

    /// Whether there are no balances and no standings.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn expire_reservations(&mut self, now: Timestamp) {
        match expire(self, now) {
            Ok(()) => {}
            Err(never) => match never {},
        }
    }
}

impl Records for Ledger {
    type Error = Infallible;

    fn balances<T>(
        &mut self,
        charges: &[(Digest, Limit)],
        _: Timestamp,
        change: impl FnOnce(&mut [Balance]) -> T,
    ) -> Result<T, Infallible> {
        let stored = charges.iter().map(|(key, _)| self.balances.get(key).cloned().unwrap_or_default());
        let mut balances: Vec<Balance> = stored.collect();
        let result = change(&mut balances);
        // Empty balances are saved as well, which no answer depends on. A sweep removes them.
        self.balances.extend(charges.iter().map(|(key, _)| *key).zip(balances));
        Ok(result)
    }

    fn forget_balance(&mut self, key: Digest) -> Result<(), Infallible> {
        self.balances.remove(&key);
        Ok(())
    }

    fn standing(&mut self, key: Digest) -> Result<Option<Standing>, Infallible> {
        Ok(self.standings.get(&key).cloned())
    }

    fn save_standing(&mut self, key: Digest, standing: Standing, _: Timestamp) -> Result<bool, Infallible> {
        self.standings.insert(key, standing);
        Ok(true)
    }

    fn forget_standing(&mut self, key: Digest) -> Result<(), Infallible> {
        self.standings.remove(&key);
        Ok(())
    }

    fn reservation(&mut self, id: TraceId) -> Result<Option<Reservation>, Infallible> {
        Ok(self.reservations.get(&id).cloned())
    }

    fn save_reservation(&mut self, reservation: Reservation, _: Timestamp) -> Result<(), Infallible> {
        self.reservations.insert(reservation.id(), reservation);
        Ok(())
    }

    fn forget_reservation(&mut self, id: TraceId, _: Timestamp) -> Result<(), Infallible> {
        self.reservations.remove(&id);
        Ok(())
    }

    fn take_expired(&mut self, now: Timestamp) -> Result<Option<Reservation>, Infallible> {
        let expired = self.reservations.values().filter(|reservation| reservation.expires() <= now);
        // Ties are broken by the id, so that every run of a test ends reservations in the same order.
        let first = expired.map(|reservation| (reservation.expires(), reservation.id())).min();
        Ok(first.and_then(|(_, id)| self.reservations.remove(&id)))
    }

    fn remember_refund(&mut self, id: TraceId, void_from: Timestamp, _: Timestamp) -> Result<bool, Infallible> {
        if self.refunded.contains_key(&id) {
            return Ok(false);
        }
        self.refunded.insert(id, void_from);
        Ok(true)
    }

    fn remember_end(&mut self, id: TraceId, void_from: Timestamp, _: Timestamp) -> Result<(), Infallible> {
        self.refunded.insert(id, void_from);
        Ok(())
    }

    fn account(&mut self, key: AccountKey) -> Result<Option<Account>, Infallible> {
        let (AccountKey::Own(key) | AccountKey::StandIn(key)) = key;
        Ok(self.accounts.get(&key).cloned())
    }

    fn save_account(
        &mut self,
        key: AccountKey,
        account: Account,
        _: SaveReason,
        _: &Login,
        _: Timestamp,
    ) -> Result<bool, Infallible> {
        let (AccountKey::Own(key) | AccountKey::StandIn(key)) = key;
        self.accounts.insert(key, account);
        Ok(true)
    }

    fn change_account(&mut self, account: Digest, change: AccountChange) -> Result<(), Infallible> {
        if let Some(account) = self.accounts.get_mut(&account) {
            change.apply(account);
        }
        Ok(())
    }

    fn rename(&mut self, what: MovedRecord, old: Digest, new: Digest, _: Timestamp) -> Result<(), Infallible> {
        match what {
            MovedRecord::Standing => rename(&mut self.standings, old, new),
            MovedRecord::Account => rename(&mut self.accounts, old, new),
        }
        Ok(())
    }

    fn save_control(&mut self, changes: &[ControlChange], now: Timestamp) -> Result<u64, Infallible> {
        // The log has no bound, so it is never full.
        Ok(self.control.add_all(changes, now).unwrap_or_else(|ControlFull| self.control.last()))
    }

    fn read_control(&mut self, after: u64, most: usize) -> Result<ControlPage, Infallible> {
        Ok(self.control.after(after, most))
    }

    fn request(&mut self, id: Digest) -> Result<Option<RequestRecord>, Infallible> {
        Ok(self.requests.get(&id).cloned())
    }

    fn save_request(&mut self, id: Digest, record: RequestRecord, _: Timestamp) -> Result<(), Infallible> {
        self.requests.insert(id, record);
        Ok(())
    }
}

fn rename<T>(records: &mut BTreeMap<Digest, T>, old: Digest, new: Digest) {
    if let Some(record) = records.remove(&old) {
        // A record under the new key is more recent. The old one is dropped all the same, or it would stay for ever
        // under a key that nothing asks for.
        records.entry(new).or_insert(record);
    }
}
