//! Settling one bill over two stores: one that charges in atomic steps, and one without atomic updates, which is charged last.
//!
//! The store without atomic updates is looked at first, so that what it denies asks nobody else. It is charged when the other one has
//! allowed: a charge that it has lost or counted twice could not be given back.

use arrayvec::ArrayVec;

use super::{Part, part_of};
use crate::bill::OwnedBill;
use crate::command::Command;
use crate::key::{Digest, Partition};
use crate::limit::Look;
use crate::plan::{MAX_CHARGES, Verb};
use crate::receipt::{HoldTerms, Receipt};
use crate::settle::{Exception, Outcome, Settled, bit};
use crate::time::Timestamp;

/// The result of a charge that was not looked at. It allows with all the room there can be, so that every other limit is tighter.
const UNREAD: Settled = Settled {
    at: Timestamp::EPOCH,
    look: Look {
        allowed: true,
        available: u64::MAX,
        ready_at: Timestamp::EPOCH,
        reset_if_charged: Timestamp::MAX,
        reset_if_not: Timestamp::MAX,
    },
    mark: None,
    exception: Exception::None,
};

/// The store that holds a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The one with atomic steps.
    Strong,
    /// The one without.
    Eventual,
    /// None: the record cannot be read, and its rule lets the request pass.
    Unread,
}

/// A bill that two stores settle.
#[derive(Debug, Clone)]
pub struct Mixed {
    bill: OwnedBill,
    strong: Part,
    eventual: Part,
}

impl Mixed {
    /// Divides a bill by the stores of its charges. Subjects are always in the strong one.
    #[must_use]
    pub fn new(bill: OwnedBill, side: impl Fn(Digest) -> Side) -> Self {
        let of = |wanted: Side| {
            let charges = bill.charges.iter().enumerate().filter(|(_, charge)| side(charge.key) == wanted);
            charges.map(|(index, _)| index).collect::<ArrayVec<usize, MAX_CHARGES>>()
        };
        let part = |charges| Part {
            number: 0,
            partition: Partition::from_u16(0),
            charges,
            subjects: ArrayVec::new(),
            outcome: None,
            settled: true,
        };
        let subjects = (0..bill.subjects.len()).collect();
        Self { strong: Part { subjects, ..part(of(Side::Strong)) }, eventual: part(of(Side::Eventual)), bill }
    }

    /// Returns the bill of the strong store; `None` if it holds no record of this bill.
    #[must_use]
    pub fn strong(&self) -> Option<OwnedBill> {
        let has_records = !self.strong.charges.is_empty() || !self.strong.subjects.is_empty();
        has_records.then(|| part_of(&self.bill, &self.strong, true, true))
    }

    /// Returns the part of a reservation that the strong store holds.
    #[must_use]
    pub fn strong_terms(&self, terms: &HoldTerms) -> HoldTerms {
        terms.of_charges(&self.strong.charges)
    }

    /// Returns the bill of the eventual store; a peek, unless it `charges`.
    #[must_use]
    pub fn eventual(&self, charges: bool) -> OwnedBill {
        part_of(&self.bill, &self.eventual, charges, true)
    }

    /// Returns whether the eventual store denies the request.
    #[must_use]
    pub fn eventual_denies(&self, outcome: &Outcome) -> bool {
        self.bill.verb != Verb::Record && self.eventual.denies(&self.bill, outcome)
    }

    /// Returns whether the strong store denies the request.
    #[must_use]
    pub fn strong_denies(&self, outcome: &Outcome) -> bool {
        let is_banned = self.bill.banned_until > outcome.at;
        let denies = outcome.penalty.is_some() || is_banned || self.strong.denies(&self.bill, outcome);
        self.bill.verb != Verb::Record && denies
    }

    /// Returns the command that gives back what the strong store has charged, after the eventual one has denied.
    #[must_use]
    pub fn give_back(&self, strong: &Outcome) -> Option<Command> {
        let receipt = Box::new(Receipt::of_bill(&self.strong()?.as_bill(), strong)?);
        let credit = Some(receipt.id());
        (self.bill.verb == Verb::Check).then_some(Command::GiveBack { receipt, credit })
    }

    /// Returns the outcome of the whole bill. A store without an outcome was not asked. Nothing is charged if one of them denies.
    pub fn join(&self, strong: Option<&Outcome>, eventual: &Outcome) -> Outcome {
        let denied = strong.is_some_and(|strong| self.strong_denies(strong)) || self.eventual_denies(eventual);
        // The bits of all charges, until one is read.
        let unread = self.bill.charges.iter().enumerate().fold(0, |bits, (index, _)| bits | bit(index));
        let mut whole = Outcome { unread, ..Outcome::default() };
        whole.settled.extend(self.bill.charges.iter().map(|_| UNREAD));
        let parts = [(&self.strong, strong), (&self.eventual, Some(eventual))];
        for (part, outcome) in parts.into_iter().filter_map(|(part, outcome)| Some((part, outcome?))) {
            part.join(outcome, denied, &mut whole);
            let read = part.charges.iter().take(outcome.settled.len());
            whole.unread = read.fold(whole.unread, |unread, index| unread & !bit(*index));
        }
        whole
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::balance::Balance;
    use crate::decision::Degraded;
    use crate::facts::Facts;
    use crate::policy::Policy;
    use crate::settle::settle;

    const NOW: Timestamp = Timestamp::from_secs(1_767_225_630);

    fn policy() -> Policy {
        let rule = |name: &str, limit: &str| {
            format!("[[rule]]\nname = '{name}'\nper = ['user']\nlimit = '{limit}/h'\nalgorithm = 'fixed-window'\n")
        };
        Policy::parse(&(rule("strong", "2") + &rule("eventual", "1")), &|_| None).unwrap()
    }

    #[test]
    fn a_denial_charges_neither_store_and_shows_only_what_was_read() {
        let policy = policy();
        let plan = policy.plan(&Facts { user: Some("ada"), ..Facts::default() }).unwrap();
        let eventual = plan.charges()[1].key();
        let side = |key: Digest| if key == eventual { Side::Eventual } else { Side::Strong };
        let mixed = Mixed::new(plan.bill().to_owned(), side);
        let (mut strong_balance, mut balance) = ([Balance::default()], [Balance::default()]);
        let strong = settle(&mixed.strong().unwrap().as_bill(), &mut strong_balance, &mut [], NOW);
        let charged = settle(&mixed.eventual(true).as_bill(), &mut balance, &mut [], NOW);
        let decision = plan.decide(&mixed.join(Some(&strong), &charged));
        assert!(decision.allowed());
        let figures = |decision: &crate::Decision| {
            let readings = decision.readings.iter();
            readings.map(|reading| (reading.rule(), reading.remaining, reading.charged)).collect::<Vec<_>>()
        };
        assert_eq!(figures(&decision), [(0, 1, true), (1, 0, true)]);
        // The eventual store is full. A look at it is enough to deny, and then nobody knows what the other one has left.
        let full = settle(&mixed.eventual(false).as_bill(), &mut balance, &mut [], NOW);
        assert!(mixed.eventual_denies(&full));
        let mut outcome = mixed.join(None, &full);
        let decision = plan.decide(&outcome);
        assert!(!decision.allowed());
        assert_eq!(decision.rule(&policy).unwrap().name.as_ref(), "eventual");
        assert_eq!(figures(&decision), [(1, 0, false)]);
        assert!(plan.repeatable(&outcome, true).all(|(key, _)| key == eventual), "nothing is known of the other");
        outcome.degrade(Degraded::Timeout);
        assert_eq!(plan.decide(&outcome).degraded, Some(Degraded::Timeout));
        // It was full only when it was charged: the strong one gives back what it was charged in between.
        let strong = settle(&mixed.strong().unwrap().as_bill(), &mut strong_balance, &mut [], NOW);
        let Some(Command::GiveBack { receipt, .. }) = mixed.give_back(&strong) else { panic!("it was charged") };
        assert_eq!(receipt.keys().collect::<Vec<_>>(), [plan.charges()[0].key()]);
        assert!(plan.receipt(&mixed.join(Some(&strong), &full)).is_none());
    }

    #[test]
    fn a_record_that_cannot_be_read_is_not_shown() {
        let policy = policy();
        let plan = policy.plan(&Facts { user: Some("ada"), ..Facts::default() }).unwrap();
        let mixed = Mixed::new(plan.bill().to_owned(), |_| Side::Unread);
        assert!(mixed.strong().is_none());
        let nothing = settle(&mixed.eventual(true).as_bill(), &mut [], &mut [], NOW);
        let decision = plan.decide(&mixed.join(None, &nothing));
        assert!(decision.allowed() && decision.readings.is_empty() && decision.binding.is_none());
    }
}
