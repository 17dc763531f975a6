//! The one atomic step: all limits charged or none, and the strike in the same breath.
//!
//! A store loads the balances of a plan's charges and the standings of its subjects, calls [`settle`] inside its own
//! lock, transaction or script, and saves what changed. It does not know what a rule is. One that has its balances at
//! hand lets them be changed where they lie: see [`Balances`].

use arrayvec::ArrayVec;

use crate::balance::Balance;
use crate::key::{Digest, TraceId};
use crate::ladder::{Penalty, Rung, Standing, Violation};
use crate::limit::{Look, Mark};
use crate::plan::{Charge, MAX_CHARGES, MAX_SUBJECTS, Plan, Verb};
use crate::time::Timestamp;

/// What settling found and did.
#[derive(Debug, Clone, Default)]
#[must_use = "an outcome is turned into a decision by `Plan::decide`"]
pub struct Outcome {
    /// One for each charge, in the plan's order.
    pub(crate) settled: ArrayVec<Settled, MAX_CHARGES>,
    /// The harshest penalty that was in force, with its subject.
    pub(crate) penalty: Option<(usize, Penalty)>,
    /// When the last penalty in force ends.
    pub(crate) denied_until: Timestamp,
    pub(crate) escalations: ArrayVec<Escalation, MAX_SUBJECTS>,
    /// Whether an allowed request is to be delayed.
    pub(crate) shadowed: bool,
    /// Keys in whose place others were charged, with those.
    stood_in: ArrayVec<(Digest, Digest), MAX_CHARGES>,
    changed_balances: u16,
    changed_standings: u8,
}

/// What happened to one charge.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settled {
    /// What was found, with a block that begins now counted in.
    pub(crate) look: Look,
    /// What was charged, if anything was.
    pub(crate) mark: Option<Mark>,
    /// Denied, but let through by a rung that only warns.
    pub(crate) lifted: bool,
}

/// One strike, for logs and events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Escalation {
    /// The subject's place in the plan.
    pub subject: usize,
    /// The charge in the plan that struck.
    pub charge: usize,
    /// How many strikes there are now.
    pub strikes: u32,
    /// What this one brought.
    pub rung: Rung,
    /// Whether the subject is shadow banned now.
    pub shadowed: bool,
    /// When its ban ends, if it has one.
    pub banned_until: Option<Timestamp>,
}

impl Outcome {
    /// Whether the balance of the `index`th charge must be saved.
    #[must_use]
    pub fn balance_changed(&self, index: usize) -> bool {
        u32::try_from(index)
            .ok()
            .and_then(|index| self.changed_balances.checked_shr(index))
            .is_some_and(|bits| bits & 1 == 1)
    }

    /// Whether the standing of the `index`th subject must be saved.
    #[must_use]
    pub fn standing_changed(&self, index: usize) -> bool {
        u32::try_from(index)
            .ok()
            .and_then(|index| self.changed_standings.checked_shr(index))
            .is_some_and(|bits| bits & 1 == 1)
    }

    /// Whether anything must be saved at all. A denial usually changes nothing.
    #[must_use]
    pub fn changed(&self) -> bool {
        self.changed_balances != 0 || self.changed_standings != 0
    }

    /// Says that another key was charged in place of `key`, because the store had no room for that one. What is given back
    /// later is then given back where it was taken.
    pub fn stands_in(&mut self, key: Digest, other: Digest) {
        let _ = self.stood_in.try_push((key, other));
    }

    /// The key that was charged where the plan says `key`.
    pub(crate) fn charged_key(&self, key: Digest) -> Digest {
        self.stood_in.iter().find(|(own, _)| *own == key).map_or(key, |(_, other)| *other)
    }

    /// The strikes this request added.
    #[must_use]
    pub fn escalations(&self) -> &[Escalation] {
        &self.escalations
    }

    fn clear(&mut self) {
        self.settled.clear();
        self.escalations.clear();
        self.stood_in.clear();
        self.penalty = None;
        self.denied_until = Timestamp::EPOCH;
        self.shadowed = false;
        self.changed_balances = 0;
        self.changed_standings = 0;
    }

    fn mark_balance(&mut self, index: usize) {
        self.changed_balances |= bit(index);
    }

    fn mark_standing(&mut self, index: usize) {
        let bit = u32::try_from(index).ok().and_then(|index| 1u8.checked_shl(index));
        self.changed_standings |= bit.unwrap_or(0);
    }
}

impl Plan<'_> {
    /// What denied a request, of [what it contests](Self::contested), and when it would no longer: the standing with a
    /// penalty in force, else the budgets without room.
    pub fn denied_by(&self, outcome: &Outcome) -> impl Iterator<Item = (Digest, Timestamp)> {
        let penalised = outcome.penalty.and_then(|(subject, _)| self.subjects.get(subject));
        let full = self.charges.iter().zip(&outcome.settled).filter(move |(charge, settled)| {
            let short = charge.enforced() && charge.cost > 0 && !settled.look.fits && !settled.lifted;
            penalised.is_none() && short
        });
        let standing = penalised.map(|subject| (subject.key, outcome.denied_until));
        standing.into_iter().chain(full.map(|(charge, settled)| (charge.key, settled.look.ready_at)))
    }
}

/// The balances of a plan's charges, by their place in it, wherever they lie while it is settled.
pub trait Balances {
    /// Looks at one, where that is quickly done and cannot change it.
    // Beside `look`, and not a part of it: where two ways to a look meet, all of it is copied.
    fn glance(&mut self, index: usize, charge: &Charge<'_>, now: Timestamp) -> Option<Look> {
        let _ = (index, charge, now);
        None
    }

    /// Puts one into its limit's terms at `now` and looks at it; says whether that changed it.
    fn look(&mut self, index: usize, charge: &Charge<'_>, now: Timestamp) -> (Look, bool);

    /// Charges one, after a look at the same moment.
    fn charge(&mut self, index: usize, charge: &Charge<'_>, now: Timestamp, id: TraceId) -> Mark;

    /// Whether one is denied at `now`, whatever fits.
    fn is_blocked(&self, index: usize, now: Timestamp) -> bool;

    /// Denies one until `until`.
    fn block(&mut self, index: usize, charge: &Charge<'_>, until: Timestamp);

    /// One by itself, to try things on.
    fn copied(&self, index: usize) -> Balance;
}

impl Balances for [Balance] {
    #[inline]
    fn look(&mut self, index: usize, charge: &Charge<'_>, now: Timestamp) -> (Look, bool) {
        match self.get_mut(index) {
            Some(balance) => balance.look(charge.limit, charge.cost, now),
            None => Balance::default().look(charge.limit, charge.cost, now),
        }
    }

    #[inline]
    fn charge(&mut self, index: usize, charge: &Charge<'_>, now: Timestamp, id: TraceId) -> Mark {
        match self.get_mut(index) {
            Some(balance) => balance.charge(charge.limit, charge.cost, now, id),
            None => Mark { part: now, amount: 0 },
        }
    }

    #[inline]
    fn is_blocked(&self, index: usize, now: Timestamp) -> bool {
        self.get(index).is_some_and(|balance| balance.is_blocked(now))
    }

    #[inline]
    fn block(&mut self, index: usize, _: &Charge<'_>, until: Timestamp) {
        if let Some(balance) = self.get_mut(index) {
            balance.block(until);
        }
    }

    fn copied(&self, index: usize) -> Balance {
        self.get(index).cloned().unwrap_or_default()
    }
}

/// Decides and charges: all limits or none. `balances` and `standings` are those of the plan's charges and subjects, in
/// its order; what must be saved afterwards the outcome says.
pub fn settle(plan: &Plan<'_>, balances: &mut [Balance], standings: &mut [Standing], now: Timestamp) -> Outcome {
    let mut outcome = Outcome::default();
    settle_into(plan, balances, standings, now, &mut outcome);
    outcome
}

/// As [`settle`], on balances that may lie anywhere, into an outcome that is already there: one is some kilobytes, and
/// moving it takes longer than deciding.
pub fn settle_into<B: Balances + ?Sized>(
    plan: &Plan<'_>,
    balances: &mut B,
    standings: &mut [Standing],
    now: Timestamp,
    outcome: &mut Outcome,
) {
    outcome.clear();
    if plan.banned(now).is_some() {
        return;
    }
    match plan.verb {
        Verb::Check => Step { plan, balances, standings, now, outcome }.check(),
        Verb::Record => Step { plan, balances, standings, now, outcome }.record(),
        Verb::Peek => {
            let places = 0..plan.charges.len();
            let mut balances: ArrayVec<Balance, MAX_CHARGES> = places.map(|index| balances.copied(index)).collect();
            let mut standings: ArrayVec<Standing, MAX_SUBJECTS> =
                standings.iter().take(MAX_SUBJECTS).cloned().collect();
            Step { plan, balances: &mut balances[..], standings: &mut standings, now, outcome }.check();
            outcome.changed_balances = 0;
            outcome.changed_standings = 0;
        }
    }
}

/// One settle step under way.
struct Step<'s, 'p, B: ?Sized> {
    plan: &'s Plan<'p>,
    balances: &'s mut B,
    standings: &'s mut [Standing],
    now: Timestamp,
    outcome: &'s mut Outcome,
}

impl<B: Balances + ?Sized> Step<'_, '_, B> {
    fn check(mut self) {
        let mut denied = self.look();
        self.find_penalty();
        if self.outcome.penalty.is_some() {
            return;
        }
        if denied && self.plan.punishes {
            self.strike();
            denied = self.denied() || self.outcome.escalations.iter().any(|strike| !strike.rung.allows());
        }
        if denied {
            self.deny();
        } else {
            self.charge();
            self.outcome.shadowed = self.standings.iter().any(|standing| standing.is_shadowed(self.now));
        }
    }

    fn record(mut self) {
        self.look();
        self.charge_where(|_| true);
    }

    /// Brings every balance to now and looks at it. Says whether an enforced limit denies.
    fn look(&mut self) -> bool {
        let mut denied = false;
        for (index, charge) in self.plan.charges.iter().enumerate() {
            if let Some(look) = self.balances.glance(index, charge, self.now) {
                denied |= charge.enforced() && !look.fits;
                let _ = self.outcome.settled.try_push(Settled { look, mark: None, lifted: false });
                continue;
            }
            let (look, brought) = self.balances.look(index, charge, self.now);
            denied |= charge.enforced() && !look.fits;
            let _ = self.outcome.settled.try_push(Settled { look, mark: None, lifted: false });
            if brought {
                self.outcome.mark_balance(index);
            }
        }
        denied
    }

    fn find_penalty(&mut self) {
        for (index, standing) in self.standings.iter().enumerate() {
            let Some(penalty) = standing.penalty(self.now) else { continue };
            self.outcome.denied_until = self.outcome.denied_until.max(standing.denied_until());
            let rank = |penalty: Penalty| match penalty {
                Penalty::CoolDown(until) => (0, until),
                Penalty::Ban(until) => (1, until),
            };
            if self.outcome.penalty.is_none_or(|(_, known)| rank(penalty) > rank(known)) {
                self.outcome.penalty = Some((index, penalty));
            }
        }
    }

    /// Whether an enforced limit denies and no rung has lifted that.
    fn denied(&self) -> bool {
        let charges = self.plan.charges.iter().zip(&self.outcome.settled);
        charges.into_iter().any(|(charge, settled)| charge.enforced() && !settled.look.fits && !settled.lifted)
    }

    /// Adds at most one strike to each subject whose limits this request is over.
    fn strike(&mut self) {
        for (subject, planned) in self.plan.subjects.iter().enumerate() {
            let Some(standing) = self.standings.get_mut(subject) else { break };
            let violations = self.plan.charges.iter().enumerate().filter_map(|(index, charge)| {
                let settled = self.outcome.settled.get(index)?;
                let blocked = self.balances.is_blocked(index, self.now);
                let over = charge.subject == Some(subject) && charge.enforced() && !settled.look.fits && !blocked;
                over.then_some((index, charge))
            });
            let now = self.now;
            let (mut struck, mut noticed) = (None, false);
            for (index, charge) in violations {
                let told = self.outcome.settled.get(index).map_or(now, |settled| settled.look.ready_at);
                let violation =
                    Violation { rule: charge.rule.tag, mode: charge.rule.strike, window: charge.limit.period(), told };
                if struck.is_none() && standing.counts(&violation, now) {
                    struck = Some((index, standing.strike(planned.ladder, &violation, now)));
                } else {
                    noticed |= standing.denied(&violation, now);
                }
            }
            if struck.is_some() || noticed {
                self.outcome.mark_standing(subject);
            }
            let Some((charge, rung)) = struck else { continue };
            let escalation = Escalation {
                subject,
                charge,
                strikes: standing.strikes(now),
                rung,
                shadowed: standing.is_shadowed(now),
                banned_until: rung.ban.and(standing.banned_until()),
            };
            if let Some(settled) = self.outcome.settled.get_mut(charge) {
                settled.lifted = rung.allows();
            }
            let _ = self.outcome.escalations.try_push(escalation);
        }
    }

    /// Denied: nothing is charged. A limit that was gone over now blocks its key, if its rule says so.
    fn deny(&mut self) {
        for (index, charge) in self.plan.charges.iter().enumerate() {
            let Some(settled) = self.outcome.settled.get_mut(index) else { break };
            let Some(span) = charge.rule.block_for.filter(|_| self.plan.punishes) else { continue };
            let over = charge.enforced() && !settled.look.fits && !settled.lifted;
            if over && !self.balances.is_blocked(index, self.now) {
                let until = self.now.plus(span);
                self.balances.block(index, charge, until);
                settled.look.ready_at = settled.look.ready_at.max(until);
                settled.look.remaining = 0;
                self.outcome.mark_balance(index);
            }
        }
    }

    /// Allowed: every limit with room is charged, watched ones too; a full one that was lifted stays as it is.
    fn charge(&mut self) {
        self.charge_where(|settled| settled.look.fits);
    }

    #[inline]
    fn charge_where(&mut self, is_charged: impl Fn(&Settled) -> bool) {
        let mut changed = 0;
        for (index, (charge, settled)) in self.plan.charges.iter().zip(&mut self.outcome.settled).enumerate() {
            let by_outcome = charge.rule.count.is_some() && !self.plan.outcomes_seen;
            if charge.cost > 0 && !by_outcome && is_charged(settled) {
                settled.mark = Some(self.balances.charge(index, charge, self.now, self.plan.trace));
                changed |= bit(index);
            }
        }
        self.outcome.changed_balances |= changed;
    }
}

/// The bit of a charge.
fn bit(index: usize) -> u16 {
    u32::try_from(index).ok().and_then(|index| 1u16.checked_shl(index)).unwrap_or(0)
}
