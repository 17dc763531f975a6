//! Bill: what one request is to be charged and whom it may strike, without a policy.
//!
//! A plan is made by a policy and knows its rules; the bill is the part of it that a store settles. It borrows its limits
//! and ladders. An [`OwnedBill`] holds them by value, so that it can travel to another process.

use arrayvec::ArrayVec;

use crate::key::{Digest, TraceId};
use crate::ladder::{Ladder, RuleTag, StrikeMode, Violation};
use crate::limit::Limit;
use crate::plan::{MAX_CHARGES, MAX_SUBJECTS, Verb};
use crate::time::{Span, Timestamp};

/// What is to be settled for one request: distinct keys, inline, nothing on the heap.
#[derive(Debug, Clone)]
pub struct Bill<'l> {
    pub(crate) verb: Verb,
    pub(crate) trace: TraceId,
    /// When an operator's ban of this client ends; in the past where there is none.
    pub(crate) banned_until: Timestamp,
    pub(crate) charges: ArrayVec<Charge<'l>, MAX_CHARGES>,
    pub(crate) subjects: ArrayVec<Subject<'l>, MAX_SUBJECTS>,
    /// Whether the door sees responses: rules that count by outcome are then charged now and given back if the
    /// outcome is not theirs.
    pub(crate) outcomes_seen: bool,
    /// Whether going over a limit strikes, and blocks where the rule says so.
    pub(crate) punishes: bool,
}

/// One cost on one key under one limit.
#[derive(Debug, Clone, Copy)]
pub struct Charge<'l> {
    pub(crate) key: Digest,
    pub(crate) limit: &'l Limit,
    pub(crate) cost: u64,
    pub(crate) terms: Terms,
    /// The subject on the bill that a violation strikes.
    pub(crate) subject: Option<usize>,
}

/// What a rule says about going over its limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Terms {
    /// The rule, shortened.
    pub(crate) tag: RuleTag,
    pub(crate) strike: StrikeMode,
    /// How long the key is denied once it has gone over.
    pub(crate) block_for: Option<Span>,
    /// Whether the limit denies; one that is only observed does not.
    pub(crate) enforced: bool,
    /// Whether the outcome of the request decides if it counts.
    pub(crate) by_outcome: bool,
}

/// Who is punished for going over.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'l> {
    pub(crate) key: Digest,
    pub(crate) ladder: &'l Ladder,
}

impl<'l> Bill<'l> {
    pub(crate) fn new(verb: Verb) -> Self {
        Self {
            verb,
            trace: TraceId::default(),
            banned_until: Timestamp::EPOCH,
            charges: ArrayVec::new(),
            subjects: ArrayVec::new(),
            outcomes_seen: false,
            punishes: true,
        }
    }

    /// What is done with this bill.
    #[must_use]
    pub fn verb(&self) -> Verb {
        self.verb
    }

    /// The id of the decision.
    #[must_use]
    pub fn trace(&self) -> TraceId {
        self.trace
    }

    /// The charges, each key once.
    #[must_use]
    pub fn charges(&self) -> &[Charge<'l>] {
        &self.charges
    }

    /// The subjects whose standing counts.
    #[must_use]
    pub fn subjects(&self) -> &[Subject<'l>] {
        &self.subjects
    }

    /// The same bill with its limits and ladders by value.
    #[must_use]
    pub fn to_owned(&self) -> OwnedBill {
        let charges = self.charges.iter().map(|charge| OwnedCharge {
            key: charge.key,
            limit: *charge.limit,
            cost: charge.cost,
            terms: charge.terms,
            subject: charge.subject,
        });
        let subjects = self.subjects.iter().map(|subject| (subject.key, subject.ladder.clone()));
        OwnedBill {
            verb: self.verb,
            trace: self.trace,
            banned_until: self.banned_until,
            charges: charges.collect(),
            subjects: subjects.collect(),
            outcomes_seen: self.outcomes_seen,
            punishes: self.punishes,
        }
    }
}

impl Charge<'_> {
    /// Whose budget.
    #[must_use]
    pub fn key(&self) -> Digest {
        self.key
    }

    /// Under which limit.
    #[must_use]
    pub fn limit(&self) -> &Limit {
        self.limit
    }

    /// How much.
    #[must_use]
    pub fn cost(&self) -> u64 {
        self.cost
    }

    /// Whether going over this limit denies.
    #[must_use]
    pub fn enforced(&self) -> bool {
        self.terms.enforced
    }

    /// Going over this limit.
    pub(crate) fn violation(&self) -> Violation {
        Violation::new(&self.terms, self.key, self.limit)
    }
}

impl Subject<'_> {
    /// Whose standing.
    #[must_use]
    pub fn key(&self) -> Digest {
        self.key
    }
}

/// A bill that borrows nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnedBill {
    pub(crate) verb: Verb,
    pub(crate) trace: TraceId,
    pub(crate) banned_until: Timestamp,
    pub(crate) charges: ArrayVec<OwnedCharge, MAX_CHARGES>,
    pub(crate) subjects: ArrayVec<(Digest, Ladder), MAX_SUBJECTS>,
    pub(crate) outcomes_seen: bool,
    pub(crate) punishes: bool,
}

/// A charge that carries its limit by value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OwnedCharge {
    pub(crate) key: Digest,
    pub(crate) limit: Limit,
    pub(crate) cost: u64,
    pub(crate) terms: Terms,
    pub(crate) subject: Option<usize>,
}

impl OwnedBill {
    /// The bill that is settled.
    #[must_use]
    pub fn as_bill(&self) -> Bill<'_> {
        let charges = self.charges.iter().map(|charge| Charge {
            key: charge.key,
            limit: &charge.limit,
            cost: charge.cost,
            terms: charge.terms,
            subject: charge.subject,
        });
        let subjects = self.subjects.iter().map(|(key, ladder)| Subject { key: *key, ladder });
        Bill {
            verb: self.verb,
            trace: self.trace,
            banned_until: self.banned_until,
            charges: charges.collect(),
            subjects: subjects.collect(),
            outcomes_seen: self.outcomes_seen,
            punishes: self.punishes,
        }
    }
}
