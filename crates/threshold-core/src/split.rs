//! Settling one bill over several partitions of a store, each of which settles its own part in one atomic step.
//!
//! No step spans two partitions, so charging all limits or none takes several rounds:
//!
//! 1. All partitions are asked in parallel. Those without a ladder charge. Those with a ladder only peek, which finds every
//!    penalty in force before anything can strike.
//! 2. The partitions with a ladder charge, one after another, until one denies.
//! 3. After a denial, what was charged before it is given back.
//!
//! Only the last partition may strike. No partition settles after it, so a request that it denies was denied by its limits and
//! not by another partition: nobody is struck for a request that would have been denied anyway. The price is that a limit of an
//! earlier partition with a ladder denies without a strike.
//!
//! Neither settling nor giving back is idempotent here. A store may send a command again only if the server has refused it
//! unexecuted. To retry a give-back whose answer was lost, a partition has to remember the receipt's id, which is the trace id
//! of the whole bill in every part.
//!
//! This module sends nothing. A store carries out each [round](Split::round), hands in the [outcomes](Split::answered), and
//! [joins](Split::join) them in the end.

mod mixed;

use arrayvec::ArrayVec;

use crate::bill::{Bill, OwnedBill};
use crate::command::Command;
use crate::key::{Digest, Partition};
use crate::limit::Look;
use crate::plan::{MAX_CHARGES, MAX_SUBJECTS, Verb};
use crate::receipt::{History, HoldTerms, Receipt};
use crate::settle::{Escalation, Exception, Outcome, Settled, bit};
use crate::time::Timestamp;

pub use mixed::{Mixed, Side};

/// The result of a charge whose partition was not asked, because another one had denied: it counts as full.
const UNANSWERED: Settled = Settled {
    at: Timestamp::EPOCH,
    look: Look {
        allowed: false,
        available: 0,
        ready_at: Timestamp::MAX,
        reset_if_charged: Timestamp::MAX,
        reset_if_not: Timestamp::MAX,
    },
    mark: None,
    exception: Exception::None,
};

/// A bill that is settled by several partitions.
#[derive(Debug, Clone)]
pub struct Split {
    bill: OwnedBill,
    /// What a reservation holds, if the bill is one.
    hold: Option<HoldTerms>,
    /// The parts, those without a ladder first: they are charged in the first round. Mostly there are few, and a split is kept while its
    /// partitions answer, so there is no room for the most that there can be.
    parts: Vec<Part>,
    begun: bool,
}

/// A command that one partition carries out for a bill.
#[derive(Debug, Clone)]
pub struct Step {
    /// The number of the part of the bill, for [`Split::answered`] and [`Split::divide`].
    pub part: usize,
    /// The partition.
    pub partition: Partition,
    /// The command.
    pub command: Command,
}

/// The part of a bill that lies in one partition.
#[derive(Debug, Clone)]
struct Part {
    number: usize,
    partition: Partition,
    /// The indices on the whole bill of its charges and subjects.
    charges: ArrayVec<usize, MAX_CHARGES>,
    subjects: ArrayVec<usize, MAX_SUBJECTS>,
    outcome: Option<Box<Outcome>>,
    /// Whether the outcome is final, and not only a peek.
    settled: bool,
}

impl Split {
    /// Splits a bill by the partitions of its keys. `partition_of` is [`Digest::partition`], or a number that the store gives to each
    /// place that it finds a key in.
    #[must_use]
    pub fn new(bill: OwnedBill, partition_of: impl Fn(Digest) -> Partition) -> Self {
        let mut split = Self { parts: Vec::new(), begun: false, bill, hold: None };
        // Collected first, because `part` borrows the whole split while it adds a part.
        let charges = split.bill.charges.iter().map(|charge| partition_of(charge.key)).enumerate();
        let charges: ArrayVec<_, MAX_CHARGES> = charges.collect();
        let subjects = split.bill.subjects.iter().map(|(key, _)| partition_of(*key)).enumerate();
        let subjects: ArrayVec<_, MAX_SUBJECTS> = subjects.collect();
        for (place, partition) in charges {
            split.part(partition).charges.push(place);
        }
        // Charges come first, so that a part is created in the order of the bill's charges. A subject mostly shares the
        // anchor of its charges and joins their part.
        for (place, partition) in subjects {
            split.part(partition).subjects.push(place);
        }
        split.sort();
        split
    }

    /// Reserves what it charges: every part is charged and held in one step.
    #[must_use]
    pub fn holding(mut self, terms: HoldTerms) -> Self {
        self.hold = Some(terms);
        self
    }

    /// Moves the parts with a ladder to the end. A stable sort: they are asked in the order of the bill, so that every node asks
    /// them in the same order.
    fn sort(&mut self) {
        self.parts.sort_by_key(|part| !part.subjects.is_empty());
    }

    fn part(&mut self, partition: Partition) -> &mut Part {
        let known = self.parts.iter().position(|part| part.partition == partition);
        let place = known.unwrap_or(self.parts.len());
        if known.is_none() {
            let (charges, subjects) = (ArrayVec::new(), ArrayVec::new());
            self.parts.push(Part { number: place, partition, charges, subjects, outcome: None, settled: false });
        }
        self.parts.get_mut(place).expect("the part was found or has just been pushed")
    }

    /// Returns the commands of the next round, to be sent in parallel. There are none when everything is settled or a partition
    /// has denied. Each is answered by [`Answer::Settled`](crate::command::Answer::Settled), whose outcome goes to
    /// [`answered`](Self::answered).
    pub fn round(&mut self) -> Vec<Step> {
        let first = !std::mem::replace(&mut self.begun, true);
        // The first round is always sent: before it no partition can have denied.
        if !first && self.denied() {
            return Vec::new();
        }
        let last = self.parts.len().saturating_sub(1);
        // One partition settles atomically by itself. A peek and a record cannot deny part of a bill.
        let all_at_once = last == 0 || self.bill.verb != Verb::Check;
        let mut round = Vec::new();
        for (place, part) in self.parts.iter_mut().enumerate() {
            if part.settled {
                continue;
            }
            let has_ladder = !part.subjects.is_empty();
            // One at a time, after those without a ladder. If two partitions with ladders charged in parallel, the last one
            // could strike although an earlier one has denied.
            if !first && has_ladder && !round.is_empty() {
                break;
            }
            // A partition with a ladder must not charge before every penalty is known. Its own penalty would stop it,
            // but not that of another partition, and it could strike for a request that is denied anyway.
            let charges = all_at_once || !has_ladder || !first;
            // Set when it is sent: if the answer never comes, nothing is known to give back.
            part.settled = charges;
            // What a look has shown was not charged.
            part.outcome = None;
            let bill = Box::new(part_of(&self.bill, part, charges, place == last));
            let command = match self.hold.as_ref().filter(|_| charges) {
                Some(terms) => Command::Reserve { bill, terms: Box::new(terms.of_charges(&part.charges)) },
                None => Command::Settle(bill),
            };
            round.push(Step { part: part.number, partition: part.partition, command });
        }
        round
    }

    /// Stores the outcome of a part.
    pub fn answered(&mut self, part: usize, outcome: Box<Outcome>) {
        // Replaces the outcome of the peek, if there was one.
        if let Some(part) = self.parts.iter_mut().find(|own| own.number == part) {
            part.outcome = Some(outcome);
        }
    }

    /// Divides a part into one for each of its keys, after its partition has refused it without executing it: while a partition
    /// moves to another server, only commands with one key are carried out. The next rounds settle the new parts.
    /// A limit and its ladder are then in different parts, so a denial is no strike.
    ///
    /// Returns false if the part has one key only, or holds what it charges.
    pub fn divide(&mut self, part: usize) -> bool {
        let Some(place) = self.parts.iter().position(|own| own.number == part) else { return false };
        let Some(whole) = self.parts.get(place) else { return false };
        // What is held has a record beside its charges, and waits until the partition has moved.
        if self.hold.is_some() || whole.charges.len().saturating_add(whole.subjects.len()) < 2 {
            return false;
        }
        let whole = self.parts.remove(place);
        let next = self.parts.iter().map(|part| part.number).max().unwrap_or(0).max(whole.number).saturating_add(1);
        let piece =
            Part { charges: ArrayVec::new(), subjects: ArrayVec::new(), outcome: None, settled: false, ..whole };
        let charges =
            whole.charges.iter().map(|charge| Part { charges: [*charge].into_iter().collect(), ..piece.clone() });
        let subjects =
            whole.subjects.iter().map(|subject| Part { subjects: [*subject].into_iter().collect(), ..piece.clone() });
        for (number, new) in charges.chain(subjects).enumerate() {
            self.parts.push(Part { number: next.saturating_add(number), ..new });
        }
        self.sort();
        true
    }

    /// Returns the outcome of the whole bill, and the commands that give back what was charged before a partition denied.
    #[must_use]
    pub fn join(self) -> (Box<Outcome>, Vec<(Partition, Command)>) {
        // A record is never denied. What it was charged stays charged.
        let denied = self.bill.verb != Verb::Record && self.denied();
        let returns = if denied { self.returns() } else { Vec::new() };
        let mut whole = Box::<Outcome>::default();
        // A part that was not asked counts as full. If it counted as empty, the answer would promise room that nobody
        // has looked for.
        whole.settled.extend(self.bill.charges.iter().map(|_| UNANSWERED));
        if self.parts.iter().filter_map(|part| part.outcome.as_deref()).any(|outcome| !outcome.histories.is_empty()) {
            whole.set_history(History::default());
        }
        for part in &self.parts {
            let Some(outcome) = &part.outcome else { continue };
            part.join(outcome, denied || !part.settled, &mut whole);
        }
        (whole, returns)
    }

    /// Returns the commands that give back what was charged so far, after a partition has failed.
    #[must_use]
    pub fn abandon(self) -> Vec<(Partition, Command)> {
        self.returns()
    }

    /// Returns whether a partition has denied so far. A peek at a partition with a ladder denies only by a penalty: when it is
    /// settled, a rung may lift its full limits, or its denial is a strike that must not be skipped.
    fn denied(&self) -> bool {
        self.parts.iter().any(|part| {
            let Some(outcome) = &part.outcome else { return false };
            // A penalty counts also in a peek: it denies whatever the limits say, and it is no strike.
            outcome.penalty.is_some() || (part.settled && self.denies(part, outcome))
        })
    }

    fn denies(&self, part: &Part, outcome: &Outcome) -> bool {
        part.denies(&self.bill, outcome)
    }

    /// Returns the commands that give back the charges of all settled parts.
    fn returns(&self) -> Vec<(Partition, Command)> {
        // A peek's outcome has marks, since it is a check on copies. Giving those back would create capacity.
        if self.bill.verb == Verb::Peek {
            return Vec::new();
        }
        // A part that only peeked has marks too, but was charged nothing.
        let settled = self.parts.iter().filter(|part| part.settled);
        let mut receipts: Vec<(Partition, Receipt)> = Vec::new();
        for part in settled {
            let Some(outcome) = &part.outcome else { continue };
            let bill = part_of(&self.bill, part, true, false);
            let Some(receipt) = Receipt::of_bill(&bill.as_bill(), outcome) else { continue };
            // A partition takes one credit of this id, so that a part which was divided gives back as a whole.
            match receipts.iter_mut().find(|(own, _)| *own == part.partition) {
                Some((_, known)) => known.append(&receipt),
                None => receipts.push((part.partition, receipt)),
            }
        }
        let give_back = |receipt: Receipt| {
            let credit = Some(receipt.id());
            Command::GiveBack { receipt: Box::new(receipt), credit }
        };
        receipts.into_iter().map(|(partition, receipt)| (partition, give_back(receipt))).collect()
    }
}

/// Returns the bill of one partition: a peek, unless it `charges`.
fn part_of(whole: &OwnedBill, part: &Part, charges: bool, is_last: bool) -> OwnedBill {
    // A charge keeps its subject only where both are in this partition. Elsewhere it denies without a strike.
    let place_of = |subject: usize| part.subjects.iter().position(|own| *own == subject);
    let own = part.charges.iter().filter_map(|place| whole.charges.get(*place).copied());
    let own = own.map(|mut charge| {
        charge.subject = charge.subject.and_then(place_of);
        charge
    });
    OwnedBill {
        verb: if charges { whole.verb } else { Verb::Peek },
        trace: whole.trace,
        banned_until: whole.banned_until,
        charges: own.collect(),
        subjects: part.subjects.iter().filter_map(|place| whole.subjects.get(*place).cloned()).collect(),
        outcomes_seen: whole.outcomes_seen,
        // A part without a subject cannot strike. `punishes` then only lets it begin the blocks of `block_for`.
        punishes: whole.punishes && (part.subjects.is_empty() || (charges && is_last)),
    }
}

impl Part {
    /// Returns whether a limit or a rung of this part denies the request.
    fn denies(&self, bill: &OwnedBill, outcome: &Outcome) -> bool {
        let charges = self.charges.iter().filter_map(|place| bill.charges.get(*place));
        let full = charges.zip(&outcome.settled).any(|(charge, settled)| {
            charge.terms.enforced && !settled.look.allowed && settled.exception != Exception::Lifted
        });
        full || outcome.escalations.iter().any(|strike| !strike.rung.allows())
    }

    /// Adds the outcome of this partition to that of the whole bill. Where it is `uncharged`, its charges were only looked at or
    /// are given back.
    fn join(&self, outcome: &Outcome, uncharged: bool, whole: &mut Outcome) {
        whole.at = whole.at.max(outcome.at);
        whole.denied_until = whole.denied_until.max(outcome.denied_until);
        whole.behind_ban = whole.behind_ban.max(outcome.behind_ban);
        // A denied request is not delayed.
        whole.shadowed |= outcome.shadowed && !uncharged;
        for (own, place) in self.charges.iter().enumerate() {
            if let (Some(settled), Some(joined)) = (outcome.settled.get(own), whole.settled.get_mut(*place)) {
                let mark = settled.mark.filter(|_| !uncharged);
                *joined = Settled { mark, ..*settled };
                if let Some(history) = whole.histories.get_mut(*place) {
                    *history = outcome.history(own);
                }
            }
            if outcome.would_warn(own) {
                whole.would_warn |= bit(*place);
            }
            if outcome.balance_changed(own) {
                whole.changed_balances |= bit(*place);
            }
        }
        for (own, place) in self.subjects.iter().enumerate() {
            if let (Some(until), Some(joined)) = (outcome.warned_until.get(own), whole.warned_until.get_mut(*place)) {
                *joined = *until;
            }
            if outcome.standing_changed(own) {
                whole.changed_standings |= u8::try_from(bit(*place)).unwrap_or(0);
            }
        }
        let _ = whole.stood_in.try_extend_from_slice(&outcome.stood_in);
        // A peek shows the strike that settling would make. Only the strike that was made counts.
        if self.settled {
            let strikes = outcome.escalations.iter().filter_map(|strike| self.placed(strike));
            whole.escalations.extend(strikes);
        }
        // As in one step: the harshest penalty, and of equal ones the first.
        if let Some((own, penalty)) = outcome.penalty
            && let Some(subject) = self.subjects.get(own)
            && whole.penalty.is_none_or(|(_, known)| penalty.rank() > known.rank())
        {
            whole.penalty = Some((*subject, penalty));
        }
    }

    /// Returns a strike with its indices on the whole bill.
    fn placed(&self, strike: &Escalation) -> Option<Escalation> {
        let (subject, charge) = (*self.subjects.get(strike.subject)?, *self.charges.get(strike.charge)?);
        Some(Escalation { subject, charge, ..*strike })
    }
}

impl Bill<'_> {
    /// Returns the partitions of its keys, each once.
    #[must_use]
    pub fn partitions(&self) -> Vec<Partition> {
        let charges = self.charges.iter().map(|charge| charge.key);
        let keys = charges.chain(self.subjects.iter().map(|subject| subject.key));
        let mut partitions: Vec<Partition> = keys.map(Digest::partition).collect();
        partitions.sort_unstable();
        partitions.dedup();
        partitions
    }
}
