//! The bill of one request: its charges and the subjects that it can strike, without a policy.
//!
//! A plan knows the policy and its rules. The bill is the part of the plan that a store settles, so that a store does not
//! depend on policies. A [`Bill`] borrows its limits and ladders. An [`OwnedBill`] holds them by value and can be sent to
//! another process.

use arrayvec::ArrayVec;

use crate::balance::Balance;
use crate::key::{Digest, TraceId};
use crate::ladder::{Ladder, RuleTag, StrikeMode, Violation};
use crate::limit::{Limit, Look};
use crate::plan::{MAX_CHARGES, MAX_SUBJECTS, Verb};
use crate::settle::{Exception, Outcome, Settled};
use crate::time::{Span, Timestamp};

/// The charges and subjects of one request, with distinct keys.
///
/// Distinct keys are an invariant of settling: every balance is looked at once and charged once. Everything is inline, so that
/// making a bill allocates nothing.
#[derive(Debug, Clone)]
pub struct Bill<'l> {
    pub(crate) verb: Verb,
    pub(crate) trace: TraceId,
    /// When an operator's ban of this client ends; a time in the past where there is none.
    pub(crate) banned_until: Timestamp,
    pub(crate) charges: ArrayVec<Charge<'l>, MAX_CHARGES>,
    pub(crate) subjects: ArrayVec<Subject<'l>, MAX_SUBJECTS>,
    /// Whether the door sees responses. Rules that count by outcome are then charged now and refunded where the outcome
    /// does not count.
    pub(crate) outcomes_seen: bool,
    /// Whether exceeding a limit adds a strike, and blocks the key where the rule has `block_for`.
    pub(crate) punishes: bool,
}

/// One cost on one key under one limit.
#[derive(Debug, Clone, Copy)]
pub struct Charge<'l> {
    pub(crate) key: Digest,
    pub(crate) limit: &'l Limit,
    pub(crate) cost: u64,
    // Borrowed from the rule: a charge is copied for every request, and the terms are larger than a pointer.
    pub(crate) terms: &'l Terms,
    /// The index on the bill of the subject that a violation strikes.
    pub(crate) subject: Option<usize>,
}

/// The part of a rule that a charge carries: what happens when the limit is exceeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Terms {
    /// A shortened digest of the rule's identity.
    // A tag and not the rule's name or index: standings are stored, and must mean the same after a change of the
    // policy.
    pub(crate) tag: RuleTag,
    pub(crate) strike: StrikeMode,
    /// How long the key is denied after it has exceeded the limit.
    pub(crate) block_for: Option<Span>,
    /// Whether the limit denies. An observed one does not.
    pub(crate) enforced: bool,
    /// Whether the request's outcome decides if it is counted.
    pub(crate) by_outcome: bool,
    /// Whether requests of one key come with several figures, as under a limit by tier. Where they do not, a balance in other figures
    /// is from an earlier policy, and the new ones apply to it also if the request is denied.
    pub(crate) varies: bool,
}

impl Terms {
    /// The terms of a limit without a rule.
    pub(crate) const OF_ONE_LIMIT: Self =
        Self { tag: 0, strike: StrikeMode::Window, block_for: None, enforced: true, by_outcome: false, varies: true };
}

/// An identity that is punished for exceeding limits.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'l> {
    pub(crate) key: Digest,
    pub(crate) ladder: &'l Ladder,
}

impl<'l> Bill<'l> {
    #[inline]
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

    /// Returns what is done with this bill.
    #[must_use]
    pub fn verb(&self) -> Verb {
        self.verb
    }

    /// Returns the id of the decision.
    #[must_use]
    pub fn trace(&self) -> TraceId {
        self.trace
    }

    /// Returns the charges, each key once.
    #[must_use]
    pub fn charges(&self) -> &[Charge<'l>] {
        &self.charges
    }

    /// Returns the subjects that the request can be punished as.
    #[must_use]
    pub fn subjects(&self) -> &[Subject<'l>] {
        &self.subjects
    }

    /// Returns whether a settled bill is denied, so that nothing was charged.
    #[must_use]
    pub fn is_denied(&self, outcome: &Outcome) -> bool {
        let is_full = |(charge, settled): (&Charge<'_>, &Settled)| {
            charge.enforced() && !settled.look.allowed && settled.exception != Exception::Lifted
        };
        self.verb != Verb::Record
            && (self.banned_until > outcome.at
                || outcome.penalty.is_some()
                || self.charges.iter().zip(&outcome.settled).any(is_full)
                || outcome.escalations.iter().any(|strike| !strike.rung.allows()))
    }

    /// Returns the key, limit and cost of each charge that has to be recorded if this bill was carried out without the store: those
    /// that an enforced rule makes at once and that count for a time.
    pub fn recorded_charges(&self) -> impl Iterator<Item = (Digest, Limit, u64)> {
        // Nobody would release a concurrency slot that is recorded after its request.
        let counts = |charge: &&Charge<'_>| {
            charge.enforced() && charge.cost > 0 && charge.limit.is_over_time() && !charge.terms.by_outcome
        };
        self.charges.iter().filter(counts).map(|charge| (charge.key, *charge.limit, charge.cost))
    }

    /// Returns the same bill with its limits and ladders by value.
    #[must_use]
    pub fn to_owned(&self) -> OwnedBill {
        let charges = self.charges.iter().map(|charge| OwnedCharge {
            key: charge.key,
            limit: *charge.limit,
            cost: charge.cost,
            terms: *charge.terms,
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
    /// Returns the key of the budget.
    #[must_use]
    pub fn key(&self) -> Digest {
        self.key
    }

    /// Returns the limit.
    #[must_use]
    pub fn limit(&self) -> &Limit {
        self.limit
    }

    /// Returns the cost.
    #[must_use]
    pub fn cost(&self) -> u64 {
        self.cost
    }

    /// Returns whether exceeding the limit denies.
    #[must_use]
    pub fn enforced(&self) -> bool {
        self.terms.enforced
    }

    /// Looks at its balance, which keeps what it counts in the figures it has where requests come with several. Returns also whether
    /// that changed it.
    #[inline]
    pub fn look(&self, balance: &mut Balance, now: Timestamp) -> (Look, bool) {
        // A cost of 0 only looks.
        let brought = self.cost > 0 && !self.terms.varies && balance.bring(self.limit, now);
        let (look, changed) = balance.look(self.limit, self.cost, now);
        (look, brought || changed)
    }

    /// Returns the violation of a request that exceeds this limit.
    pub(crate) fn violation(&self) -> Violation {
        Violation::new(self.terms, self.key, self.limit)
    }
}

impl Subject<'_> {
    /// Returns the key of the standing.
    #[must_use]
    pub fn key(&self) -> Digest {
        self.key
    }
}

/// A bill that borrows nothing. Its charges are on the heap, because it is moved from task to task, and with room for the most that there
/// can be it would be kilobytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnedBill {
    pub(crate) verb: Verb,
    pub(crate) trace: TraceId,
    pub(crate) banned_until: Timestamp,
    /// At most [`MAX_CHARGES`].
    pub(crate) charges: Vec<OwnedCharge>,
    /// At most [`MAX_SUBJECTS`].
    pub(crate) subjects: Vec<(Digest, Ladder)>,
    pub(crate) outcomes_seen: bool,
    pub(crate) punishes: bool,
}

const _: () = assert!(size_of::<OwnedBill>() <= 128, "an owned bill is moved from task to task");

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
    /// Makes a bill that records costs after the fact. It never denies, and punishes nobody. Charges beyond [`MAX_CHARGES`] are left
    /// out; no two may have the same key.
    #[must_use]
    pub fn record(trace: TraceId, charges: impl IntoIterator<Item = (Digest, Limit, u64)>) -> Self {
        Self::alone(Verb::Record, trace, charges)
    }

    /// Makes a bill that checks one cost on one key, and punishes nobody.
    #[must_use]
    pub fn check(trace: TraceId, key: Digest, limit: Limit, cost: u64) -> Self {
        Self::alone(Verb::Check, trace, [(key, limit, cost)])
    }

    fn alone(verb: Verb, trace: TraceId, charges: impl IntoIterator<Item = (Digest, Limit, u64)>) -> Self {
        let terms = Terms::OF_ONE_LIMIT;
        let charges = charges.into_iter().take(MAX_CHARGES);
        Self {
            verb,
            trace,
            banned_until: Timestamp::EPOCH,
            charges: charges.map(|(key, limit, cost)| OwnedCharge { key, limit, cost, terms, subject: None }).collect(),
            subjects: Vec::new(),
            outcomes_seen: false,
            punishes: false,
        }
    }

    /// Returns the id of the decision.
    #[must_use]
    pub fn trace(&self) -> TraceId {
        self.trace
    }

    /// Returns whether no record is needed to settle it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.charges.is_empty() && self.subjects.is_empty()
    }

    /// Returns the borrowed form, which is settled.
    #[must_use]
    pub fn as_bill(&self) -> Bill<'_> {
        // Filled in place: a bill that is collected first is moved into its place afterwards.
        let mut bill = Bill::new(self.verb);
        (bill.trace, bill.banned_until) = (self.trace, self.banned_until);
        (bill.outcomes_seen, bill.punishes) = (self.outcomes_seen, self.punishes);
        bill.charges.extend(self.charges.iter().map(|charge| Charge {
            key: charge.key,
            limit: &charge.limit,
            cost: charge.cost,
            terms: &charge.terms,
            subject: charge.subject,
        }));
        bill.subjects.extend(self.subjects.iter().map(|(key, ladder)| Subject { key: *key, ladder }));
        bill
    }
}
