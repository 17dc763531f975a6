//! What was admitted without the store, so that the store counts it when it returns; and what a store charged too late.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Bound::{Excluded, Unbounded};
use std::sync::PoisonError;

use threshold_core::command::{Answer, Command};
use threshold_core::key::Partition;
use threshold_core::lockout::AttemptOutcome;
use threshold_core::{Balance, Bill, Digest, Limit, Outcome, OwnedBill, Receipt, Span, Timestamp, TraceId, settle};

use super::Limiter;
use crate::clock::Clock;
use crate::random_id;
use crate::store::{LateAnswer, Store, StoreError};
use crate::sync::{Mutex, MutexGuard};

/// The largest number of keys with blind charges.
const MAX_KEYS: usize = 1 << 16;
/// The largest number of requests whose answer is awaited although they were decided without it.
const MAX_AWAITED: usize = 10_000;
/// How long an answer is awaited. A store has given up its call by then.
const AWAITED_FOR: Span = Span::from_secs(10);
/// The number of keys that are recorded in one call of `catch_up`, so that bans of other nodes are not kept waiting.
const MAX_RECORDED: usize = 2_000;
/// The number of timeouts after which `catch_up` ends. Each of them takes as long as the deadline of the store.
const MAX_TIMEOUTS: usize = 4;
/// The number of charges on one bill.
const ON_A_BILL: usize = 16;

/// The charges and requests of this node that the store does not know.
#[derive(Debug, Default)]
pub(super) struct BlindCharges(Mutex<Blind>);

#[derive(Debug, Default)]
struct Blind {
    /// By partition, because a bill within one is settled in one step by every store.
    charges: BTreeMap<Place, BlindCharge>,
    /// The last charge that was taken out. The next ones follow it, so that a partition which is away does not keep the others waiting.
    taken: Option<Place>,
    /// The number of charges that are being recorded.
    recording: u64,
    /// Requests that the store did not answer in time.
    awaited: HashMap<TraceId, Awaited>,
    /// Commands that withdraw what was charged too late.
    withdrawals: Vec<Command>,
    lost: u64,
    unanswered: u64,
}

/// A request that was decided without the answer that it waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Awaited {
    is_admitted: bool,
    /// How many charges it has made if it was admitted.
    charges: u64,
    since: Timestamp,
}

impl Awaited {
    fn is_over(&self, now: Timestamp) -> bool {
        now.since(self.since) >= AWAITED_FOR
    }
}

type Place = (Partition, Digest);

/// The cost that this node has admitted on one key without the store, as a balance under the whole limit: it knows how much of the cost
/// still counts, and many requests are recorded by one charge.
#[derive(Debug)]
struct BlindCharge {
    limit: Limit,
    balance: Balance,
    /// The number of requests.
    charges: u64,
}

impl BlindCharge {
    fn new(limit: Limit) -> Self {
        Self { limit, balance: Balance::default(), charges: 0 }
    }

    fn add(&mut self, limit: Limit, cost: u64, now: Timestamp) {
        self.limit = limit;
        // A balance contains neither its key nor, under a limit over time, the ids of its charges.
        let bill = OwnedBill::record(TraceId::default(), [(Digest::from_u128(0), limit, cost)]);
        let _ = settle(&bill.as_bill(), std::slice::from_mut(&mut self.balance), &mut [], now);
    }

    /// Returns how much of the cost still counts.
    fn used(&mut self, now: Timestamp) -> u64 {
        self.limit.capacity().saturating_sub(self.balance.look(&self.limit, 0, now).0.available)
    }
}

impl BlindCharges {
    /// Counts a request that was admitted and that the store has not executed.
    pub(super) fn add(&self, bill: &Bill<'_>, now: Timestamp) {
        let mut blind = self.lock();
        for (key, limit, cost) in bill.recorded_charges() {
            let place = (key.partition(), key);
            if blind.charges.len() >= MAX_KEYS && !blind.charges.contains_key(&place) {
                blind.charges.retain(|_, charge| charge.balance.silent_from() > now);
            }
            if blind.charges.len() >= MAX_KEYS && !blind.charges.contains_key(&place) {
                blind.lost = blind.lost.saturating_add(1);
                continue;
            }
            let charge = blind.charges.entry(place).or_insert_with(|| BlindCharge::new(limit));
            charge.add(limit, cost, now);
            charge.charges = charge.charges.saturating_add(1);
        }
    }

    /// Counts the charges of an admitted request that the store will not hear of.
    pub(super) fn lose(&self, bill: &Bill<'_>) {
        let mut blind = self.lock();
        blind.lost = blind.lost.saturating_add(count(bill));
    }

    /// Notes how a request was decided that the store has not answered in time.
    pub(super) fn awaits(&self, bill: &Bill<'_>, is_admitted: bool, now: Timestamp) {
        let charges = if is_admitted { count(bill) } else { 0 };
        let mut blind = self.lock();
        if blind.awaited.len() >= MAX_AWAITED {
            blind.forget_awaited(now);
        }
        // Without room the charge of a refused request stays: that denies too much, never too little.
        if blind.awaited.len() < MAX_AWAITED {
            blind.awaited.insert(bill.trace(), Awaited { is_admitted, charges, since: now });
        } else {
            blind.unanswered = blind.unanswered.saturating_add(charges);
        }
    }

    /// Keeps a command that withdraws a late charge. Without room the charge stays until it no longer counts.
    fn add_withdrawal(&self, withdrawal: Command) {
        let mut blind = self.lock();
        if blind.withdrawals.len() < MAX_AWAITED {
            blind.withdrawals.push(withdrawal);
        }
    }

    fn take_withdrawals(&self) -> Vec<Command> {
        std::mem::take(&mut self.lock().withdrawals)
    }

    fn take_awaited(&self, request: TraceId) -> Option<Awaited> {
        self.lock().awaited.remove(&request)
    }

    /// Takes out charges of at most `most` keys, from the one after the last that was taken. Charges that no longer count are dropped.
    fn take(&self, most: usize, now: Timestamp) -> Recording<'_> {
        let mut blind = self.lock();
        let places: Vec<Place> = match blind.taken {
            None => blind.charges.keys().copied().take(most).collect(),
            Some(last) => {
                let after = blind.charges.range((Excluded(last), Unbounded));
                after.chain(blind.charges.range(..=last)).map(|(place, _)| *place).take(most).collect()
            }
        };
        blind.taken = places.last().copied();
        let taken = places.into_iter().filter_map(|place| {
            let mut charge = blind.charges.remove(&place)?;
            (charge.used(now) > 0).then_some((place, charge))
        });
        let left: VecDeque<_> = taken.collect();
        blind.recording = blind.recording.saturating_add(total(&left));
        Recording { blind: self, left, now, under_way: 0 }
    }

    /// Puts charges back that were not recorded. They keep the times at which they were made: what has refilled or left the window
    /// until they are recorded is not recorded.
    fn put_back(&self, charges: impl IntoIterator<Item = (Place, BlindCharge)>, now: Timestamp) {
        let mut blind = self.lock();
        for (place, mut charge) in charges {
            blind.recording = blind.recording.saturating_sub(charge.charges);
            // Requests may have been admitted without the store in the meantime.
            if let Some(mut newer) = blind.charges.remove(&place) {
                let cost = newer.used(now);
                charge.add(newer.limit, cost, now);
                charge.charges = charge.charges.saturating_add(newer.charges);
            }
            blind.charges.insert(place, charge);
        }
    }

    /// Counts charges of which it is not known whether they were recorded.
    fn unanswered(&self, charges: u64) {
        let mut blind = self.lock();
        blind.unanswered = blind.unanswered.saturating_add(charges);
    }

    fn lock(&self) -> MutexGuard<'_, Blind> {
        // A poisoned lock is safe to use: a charge that is half counted is one that is lost.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Blind {
    /// Forgets requests whose answers will not come.
    fn forget_awaited(&mut self, now: Timestamp) {
        let over = self.awaited.values().filter(|awaited| awaited.is_over(now)).map(|awaited| awaited.charges);
        self.unanswered = over.fold(self.unanswered, u64::saturating_add);
        self.awaited.retain(|_, awaited| !awaited.is_over(now));
    }
}

/// Charges that were taken out to be recorded. Those that were not sent go back when this is dropped.
struct Recording<'b> {
    blind: &'b BlindCharges,
    left: VecDeque<(Place, BlindCharge)>,
    now: Timestamp,
    /// The number of charges that were sent and not answered yet.
    under_way: u64,
}

impl Recording<'_> {
    /// Takes out the next charges of one partition, as many as go on a bill.
    fn next(&mut self) -> Option<(Partition, Vec<(Place, BlindCharge)>)> {
        let partition = self.left.front()?.0.0;
        let is_next = |(place, _): &(Place, BlindCharge)| place.0 == partition;
        let length = self.left.iter().take(ON_A_BILL).take_while(|charge| is_next(charge)).count();
        Some((partition, self.left.drain(..length).collect()))
    }

    /// Notes that so many charges are sent.
    fn sends(&mut self, charges: u64) {
        self.under_way = charges;
    }

    /// Notes that what was sent is recorded, or not, or perhaps.
    fn ended(&mut self, sent: Result<(), StoreError>, part: Vec<(Place, BlindCharge)>, now: Timestamp) {
        self.now = now;
        let charges = std::mem::take(&mut self.under_way);
        match sent {
            Err(StoreError::Unavailable | StoreError::Full) => return self.blind.put_back(part, now),
            // Recorded twice, it would deny requests that have room.
            Err(StoreError::Timeout) => self.blind.unanswered(charges),
            Ok(()) => {}
        }
        let mut blind = self.blind.lock();
        blind.recording = blind.recording.saturating_sub(charges);
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        self.blind.put_back(self.left.drain(..), self.now);
        let mut blind = self.blind.lock();
        blind.recording = blind.recording.saturating_sub(self.under_way);
        blind.unanswered = blind.unanswered.saturating_add(self.under_way);
    }
}

/// Returns how many charges of a bill are recorded.
fn count(bill: &Bill<'_>) -> u64 {
    u64::try_from(bill.recorded_charges().count()).unwrap_or(u64::MAX)
}

fn total<'c>(charges: impl IntoIterator<Item = &'c (Place, BlindCharge)>) -> u64 {
    charges.into_iter().fold(0, |sum, (_, charge)| sum.saturating_add(charge.charges))
}

impl<S: Store, C: Clock> Limiter<S, C> {
    /// Returns how many charges of requests that were admitted without the store it will not hear of: too many keys waited for its
    /// return, or [`abandon_charges`](Self::abandon_charges) was called.
    pub fn lost_charges(&self) -> u64 {
        self.blind.lock().lost
    }

    /// Returns how many charges of requests that were admitted without the store it may have recorded or not: its answer has not come,
    /// and so they are not recorded again.
    pub fn unanswered_charges(&self) -> u64 {
        self.blind.lock().unanswered
    }

    /// Returns how many charges of requests that were admitted without the store wait for its return or for its answer.
    pub fn waiting_charges(&self) -> u64 {
        let now = self.time();
        let mut blind = self.blind.lock();
        blind.charges.retain(|_, charge| charge.used(now) > 0);
        let kept = blind.charges.values().map(|charge| charge.charges);
        let awaited = blind.awaited.values().map(|awaited| awaited.charges);
        kept.chain(awaited).fold(blind.recording, u64::saturating_add)
    }

    /// Counts what [waits](Self::waiting_charges) as lost, and what is under way as unanswered: for a node that ends.
    pub fn abandon_charges(&self) {
        let now = self.time();
        let mut blind = self.blind.lock();
        let kept = std::mem::take(&mut blind.charges);
        let counting = kept.into_values().filter_map(|mut charge| (charge.used(now) > 0).then_some(charge.charges));
        blind.lost = counting.fold(blind.lost, u64::saturating_add);
        let awaited = std::mem::take(&mut blind.awaited);
        let recording = std::mem::take(&mut blind.recording);
        let under_way = awaited.values().map(|awaited| awaited.charges).fold(recording, u64::saturating_add);
        blind.unanswered = blind.unanswered.saturating_add(under_way);
    }

    /// Tells a store that has returned what this node has done without it: records what was admitted, and gives back what was
    /// charged too late for requests that were refused.
    pub(super) async fn catch_up(&self) {
        for late in self.store.take_late() {
            self.hear_late(late);
        }
        self.blind.lock().forget_awaited(self.time());
        self.withdraw_late().await;
        let (mut timeouts, mut failed) = (0, None);
        let mut recording = self.blind.take(MAX_RECORDED, self.time());
        while let Some((partition, mut part)) = recording.next() {
            recording.sends(total(&part));
            // The rest of a partition that has failed, and all others after several timeouts, are kept for the next call.
            let sent = if failed == Some(partition) || timeouts >= MAX_TIMEOUTS {
                Err(StoreError::Unavailable)
            } else {
                self.record_blind(&mut part).await
            };
            recording.ended(sent, part, self.time());
            if sent.is_err() {
                failed = Some(partition);
            }
            timeouts = timeouts.saturating_add(usize::from(sent == Err(StoreError::Timeout)));
        }
    }

    async fn record_blind(&self, charges: &mut [(Place, BlindCharge)]) -> Result<(), StoreError> {
        let now = self.time();
        let charges = charges.iter_mut().map(|((_, key), charge)| (*key, charge.limit, charge.used(now)));
        let bill = OwnedBill::record(random_id(), charges);
        self.execute(Command::Settle(Box::new(bill))).await.map(drop)
    }

    /// Withdraws what was charged too late, and keeps what the store has refused for the next call.
    async fn withdraw_late(&self) {
        let (mut timeouts, mut kept) = (0, Vec::new());
        for withdrawal in self.blind.take_withdrawals() {
            // Each timeout takes as long as the deadline of the store.
            if timeouts >= MAX_TIMEOUTS {
                kept.push(withdrawal);
                continue;
            }
            let keys: Vec<Digest> = match &withdrawal {
                Command::GiveBack { receipt, .. } => receipt.keys().collect(),
                _ => Vec::new(),
            };
            match self.execute(withdrawal.clone()).await {
                // Certainly not executed. A store that was slow is left alone for a moment after it has answered again.
                Err(StoreError::Unavailable) => kept.push(withdrawal),
                Err(StoreError::Timeout) => timeouts = timeouts.saturating_add(1),
                Ok(_) | Err(StoreError::Full) => {}
            }
            self.made_room(keys);
        }
        kept.into_iter().for_each(|withdrawal| self.blind.add_withdrawal(withdrawal));
    }

    /// Acts on an answer that came after its request was decided without it.
    fn hear_late(&self, late: LateAnswer) {
        let withdrawal = match late {
            LateAnswer::Settled { bill, answer } => self.hear_late_bill(&bill, answer),
            LateAnswer::Executed { command, answer } => self.withdrawal(*command, *answer),
        };
        if let Some(withdrawal) = withdrawal {
            self.blind.add_withdrawal(withdrawal);
        }
    }

    /// Returns the command that gives back the charge of a request that was refused; `None` if nothing is to be given back.
    fn hear_late_bill(&self, bill: &OwnedBill, answer: Result<Box<Outcome>, StoreError>) -> Option<Command> {
        // A caller that left before the deadline was neither admitted nor refused. Its charge stays.
        let Awaited { is_admitted, charges, since } = self.blind.take_awaited(bill.as_bill().trace())?;
        let bill = bill.as_bill();
        match answer {
            Ok(outcome) => match Receipt::of_bill(&bill, &outcome) {
                Some(receipt) if !is_admitted => {
                    let credit = Some(receipt.id());
                    return Some(Command::GiveBack { receipt: Box::new(receipt), credit });
                }
                // It was denied, and so the store does not know a request that was admitted.
                None if is_admitted => self.blind.add(&bill, since),
                Some(_) | None => {}
            },
            // It was not executed.
            Err(StoreError::Unavailable | StoreError::Full) if is_admitted => self.blind.add(&bill, since),
            Err(StoreError::Timeout) => self.blind.unanswered(charges),
            Err(_) => {}
        }
        None
    }

    /// Returns the command that withdraws what a late one has charged or counted; `None` if nothing is to be withdrawn.
    fn withdrawal(&self, late: Command, answer: Answer) -> Option<Command> {
        match (late, answer) {
            // Also if it was allowed by `local` or `open`: that attempt ends elsewhere, and this one would become a failure that
            // nobody has made.
            (
                Command::BeginLogin { login, .. },
                Answer::Attempted { outcome: AttemptOutcome::Allowed(attempt), .. },
            ) => Some(Command::WithdrawLogin { login, attempt }),
            (Command::Limit { key, limit, id, .. }, Answer::Limited { checked, at }) => {
                let receipt = Receipt::of_charge(id, key, &limit, (checked.mark?, checked.history), at);
                Some(Command::GiveBack { receipt: Box::new(receipt), credit: Some(id) })
            }
            _ => None,
        }
    }
}

#[cfg(test)]
#[cfg(feature = "memory")]
mod recording;

#[cfg(test)]
mod tests {
    use threshold_core::{Facts, Policy};

    use super::*;

    const NOW: Timestamp = Timestamp::from_secs(1_767_225_600);

    fn policy(limit: &str) -> Policy {
        Policy::parse(&format!("[[rule]]\nname = 'user'\nper = ['user']\n{limit}"), &|_| None).unwrap()
    }

    fn used(limit: &str, later: Span) -> Option<u64> {
        let (policy, blind) = (policy(limit), BlindCharges::default());
        let plan = policy.plan(&Facts { user: Some("ada"), ..Facts::default() }).unwrap();
        (0..6).for_each(|_| blind.add(plan.bill(), NOW));
        let mut taken = blind.take(9, NOW.plus(later));
        assert!(blind.take(9, NOW.plus(later)).left.is_empty(), "taken once");
        taken.left.front_mut().map(|(_, charge)| charge.used(NOW.plus(later)))
    }

    #[test]
    fn only_what_still_counts_is_recorded() {
        let minute = Span::MINUTE;
        assert_eq!(used("limit = '60/min'", Span::from_secs(2)), Some(4), "a bucket has refilled by two");
        assert_eq!(used("limit = '60/min'", minute), None);
        assert_eq!(used("limit = '60/min'\nalgorithm = 'fixed-window'", Span::from_secs(59)), Some(6));
        assert_eq!(used("limit = '60/min'\nalgorithm = 'fixed-window'", minute), None, "the next window");
        assert_eq!(used("limit = '60'\nalgorithm = 'concurrency'", Span::ZERO), None);
        assert_eq!(used("limit = '60/min'\nmode = 'observe'", Span::ZERO), None);
    }

    #[test]
    fn charges_of_too_many_keys_are_counted_as_lost() {
        let (policy, blind) = (policy("limit = '60/min'"), BlindCharges::default());
        let facts = |user: &str, now: Timestamp| {
            let plan = policy.plan(&Facts { user: Some(user), ..Facts::default() }).unwrap();
            blind.add(plan.bill(), now);
        };
        (0..MAX_KEYS).for_each(|user| facts(&user.to_string(), NOW));
        facts("late", NOW);
        facts("0", NOW);
        let counts = || {
            let blind = blind.lock();
            (blind.lost, blind.charges.len())
        };
        assert_eq!(counts(), (1, MAX_KEYS));
        facts("late", NOW.plus(Span::MINUTE));
        assert_eq!(counts(), (1, 1));
    }

    /// The charges of requests whose answer did not come were neither recorded nor counted as lost.
    #[test]
    fn of_too_many_unanswered_requests_the_last_are_counted_as_unanswered() {
        let (policy, blind) = (policy("limit = '60/min'"), BlindCharges::default());
        let awaits = |number: usize, is_admitted, now| {
            let id = TraceId::from_u128(number as u128);
            let plan = policy.plan(&Facts { user: Some("ada"), trace: id, ..Facts::default() }).unwrap();
            blind.awaits(plan.bill(), is_admitted, now);
        };
        let taken = |number: usize| blind.take_awaited(TraceId::from_u128(number as u128));
        let unanswered = || blind.lock().unanswered;
        (0..=MAX_AWAITED).for_each(|number| awaits(number, true, NOW));
        let awaited = |is_admitted, since| Awaited { is_admitted, charges: u64::from(is_admitted), since };
        assert_eq!((taken(0), taken(MAX_AWAITED)), (Some(awaited(true, NOW)), None));
        assert_eq!(unanswered(), 1);
        awaits(0, true, NOW);
        let later = NOW.plus(AWAITED_FOR);
        awaits(MAX_AWAITED, false, later);
        assert_eq!(taken(MAX_AWAITED), Some(awaited(false, later)));
        assert_eq!(taken(1), None, "nobody answers it any more");
        assert_eq!(unanswered(), 1 + MAX_AWAITED as u64);
    }
}
