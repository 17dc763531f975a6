//! The one atomic step: all limits charged or none, and the strike in the same breath.
//!
//! A store loads the balances of a bill's charges and the standings of its subjects, calls [`settle`] inside its own
//! lock, transaction or script, and saves what changed. It does not know what a rule is. One that has its balances at
//! hand lets them be changed where they lie: see [`Balances`].

use arrayvec::ArrayVec;

use crate::balance::Balance;
use crate::bill::{Bill, Charge};
use crate::key::{Digest, TraceId};
use crate::ladder::{Penalty, Rung, Standing, StrikeMode, Violation};
use crate::limit::{Look, Mark};
use crate::plan::{MAX_CHARGES, MAX_SUBJECTS, Plan, Verb};
use crate::time::{Span, Timestamp};

/// What settling found and did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[must_use = "an outcome is turned into a decision by `Plan::decide`"]
pub struct Outcome {
    /// The latest time at which a part of it was settled, by the store's clock.
    pub(crate) at: Timestamp,
    /// One for each charge, in the bill's order.
    pub(crate) settled: ArrayVec<Settled, MAX_CHARGES>,
    /// The harshest penalty that was in force, with its subject.
    pub(crate) penalty: Option<(usize, Penalty)>,
    /// When the last penalty in force ends.
    pub(crate) denied_until: Timestamp,
    pub(crate) escalations: ArrayVec<Escalation, MAX_SUBJECTS>,
    /// Whether an allowed request is to be delayed.
    pub(crate) shadowed: bool,
    /// By subject: until when a denied client is warned, because its strikes count; [`Timestamp::EPOCH`] where it is not.
    pub(crate) warned_until: [Timestamp; MAX_SUBJECTS],
    /// If the request is to be delayed, the charges whose denial would have been a strike that the client is told of.
    pub(crate) would_warn: u16,
    /// Behind an operator's ban: when the limits have room and the ladders' penalties are over.
    pub(crate) behind_ban: Timestamp,
    /// Keys in whose place others were charged, with those.
    pub(crate) stood_in: ArrayVec<(Digest, Digest), MAX_CHARGES>,
    pub(crate) changed_balances: u16,
    pub(crate) changed_standings: u8,
}

/// What happened to one charge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Settled {
    /// When, by the clock of where it was settled.
    pub(crate) at: Timestamp,
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
    /// The subject's place on the bill.
    pub subject: usize,
    /// The place on the bill of the charge that struck.
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

    /// Whether another key was charged in place of any of the bill's.
    pub(crate) fn has_stand_ins(&self) -> bool {
        !self.stood_in.is_empty()
    }

    /// The key that was charged where the bill says `key`.
    pub(crate) fn charged_key(&self, key: Digest) -> Digest {
        self.stood_in.iter().find(|(own, _)| *own == key).map_or(key, |(_, other)| *other)
    }

    /// The strikes this request added.
    #[must_use]
    pub fn escalations(&self) -> &[Escalation] {
        &self.escalations
    }

    /// Whether a denial by this charge would have been a strike that the client is told of.
    pub(crate) fn would_warn(&self, index: usize) -> bool {
        self.would_warn & bit(index) != 0
    }

    /// When it was settled, by the store's clock: the time of the answer.
    #[must_use]
    pub fn at(&self) -> Timestamp {
        self.at
    }

    fn clear(&mut self) {
        self.settled.clear();
        self.escalations.clear();
        self.stood_in.clear();
        self.penalty = None;
        self.denied_until = Timestamp::EPOCH;
        self.shadowed = false;
        self.warned_until = [Timestamp::EPOCH; MAX_SUBJECTS];
        self.would_warn = 0;
        self.behind_ban = Timestamp::EPOCH;
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
        let full = self.bill.charges.iter().zip(&outcome.settled).filter(move |(charge, settled)| {
            let short = charge.enforced() && charge.cost > 0 && !settled.look.allowed && !settled.lifted;
            penalised.is_none() && short
        });
        let standing = penalised.map(|subject| (subject.key, outcome.denied_until));
        standing.into_iter().chain(full.map(|(charge, settled)| (charge.key, settled.look.ready_at)))
    }
}

/// The balances of a bill's charges, by their place in it, wherever they lie while it is settled.
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

    /// Whether one stands in for many keys, because the store had no room for this charge's own. Going over it denies, but it
    /// is nobody's offence: others may have used it up.
    fn stands_in(&self, index: usize, charge: &Charge<'_>) -> bool {
        let _ = (index, charge);
        false
    }
}

/// Copies of balances, for a peek; which of them stand in for others, the originals say.
struct Tried {
    balances: ArrayVec<Balance, MAX_CHARGES>,
    stand_ins: u16,
}

impl Tried {
    fn of<B: Balances + ?Sized>(bill: &Bill<'_>, originals: &B) -> Self {
        let charges = bill.charges.iter().enumerate();
        let stand_ins = charges.filter(|(index, charge)| originals.stands_in(*index, charge));
        let stand_ins = stand_ins.fold(0, |bits, (index, _)| bits | bit(index));
        Self { balances: (0..bill.charges.len()).map(|index| originals.copied(index)).collect(), stand_ins }
    }
}

impl Balances for Tried {
    fn look(&mut self, index: usize, charge: &Charge<'_>, now: Timestamp) -> (Look, bool) {
        self.balances[..].look(index, charge, now)
    }

    fn charge(&mut self, index: usize, charge: &Charge<'_>, now: Timestamp, id: TraceId) -> Mark {
        self.balances[..].charge(index, charge, now, id)
    }

    fn is_blocked(&self, index: usize, now: Timestamp) -> bool {
        self.balances[..].is_blocked(index, now)
    }

    fn block(&mut self, index: usize, charge: &Charge<'_>, until: Timestamp) {
        self.balances[..].block(index, charge, until);
    }

    fn copied(&self, index: usize) -> Balance {
        self.balances[..].copied(index)
    }

    fn stands_in(&self, index: usize, _: &Charge<'_>) -> bool {
        self.stand_ins & bit(index) != 0
    }
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
            None => Mark::new(now, 0),
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

/// The standings of a bill's subjects, by their place in it, wherever they are kept.
pub trait Standings {
    /// All of them.
    fn all(&mut self) -> &mut [Standing];

    /// Whether the `index`th can be kept as `standing`. Asked before a strike takes effect, because a strike that would be
    /// forgotten must not let a request through; after a yes there is room for it when it is saved. A peek saves nothing,
    /// so for a peek nothing else may be dropped to make that room.
    fn has_room(&mut self, index: usize, standing: &Standing) -> bool;
}

/// There is always room in a slice.
impl Standings for [Standing] {
    fn all(&mut self) -> &mut [Standing] {
        self
    }

    fn has_room(&mut self, _: usize, _: &Standing) -> bool {
        true
    }
}

/// Copies of standings, for a peek; whether there would be room, the originals say.
struct Copies<'s, S: ?Sized> {
    standings: ArrayVec<Standing, MAX_SUBJECTS>,
    originals: &'s mut S,
}

impl<'s, S: Standings + ?Sized> Copies<'s, S> {
    fn of(originals: &'s mut S) -> Self {
        Self { standings: originals.all().iter().take(MAX_SUBJECTS).cloned().collect(), originals }
    }
}

impl<S: Standings + ?Sized> Standings for Copies<'_, S> {
    fn all(&mut self) -> &mut [Standing] {
        &mut self.standings
    }

    fn has_room(&mut self, index: usize, standing: &Standing) -> bool {
        self.originals.has_room(index, standing)
    }
}

/// Decides and charges: all limits or none. `balances` and `standings` are those of the bill's charges and subjects, in
/// its order; what must be saved afterwards the outcome says.
pub fn settle(bill: &Bill<'_>, balances: &mut [Balance], standings: &mut [Standing], now: Timestamp) -> Outcome {
    let mut outcome = Outcome::default();
    settle_into(bill, balances, standings, now, &mut outcome);
    outcome
}

/// As [`settle`], on balances and standings that may lie anywhere, into an outcome that is already there: one is some
/// kilobytes, and moving it takes longer than deciding.
pub fn settle_into<B: Balances + ?Sized, S: Standings + ?Sized>(
    bill: &Bill<'_>,
    balances: &mut B,
    standings: &mut S,
    now: Timestamp,
    outcome: &mut Outcome,
) {
    outcome.clear();
    outcome.at = now;
    if bill.banned_until > now {
        outcome.behind_ban = behind_ban(bill, balances, standings.all(), now);
        return;
    }
    match bill.verb {
        Verb::Check => Step { bill, balances, standings, now, outcome }.check(),
        Verb::Record => Step { bill, balances, standings, now, outcome }.record(),
        Verb::Peek => {
            let mut balances = Tried::of(bill, balances);
            let mut standings = Copies::of(standings);
            Step { bill, balances: &mut balances, standings: &mut standings, now, outcome }.check();
            outcome.changed_balances = 0;
            outcome.changed_standings = 0;
        }
    }
}

/// When a request would be let in if it were not for an operator's ban. Nothing is changed: a ban is no violation.
#[cold]
fn behind_ban<B: Balances + ?Sized>(
    bill: &Bill<'_>,
    balances: &mut B,
    standings: &[Standing],
    now: Timestamp,
) -> Timestamp {
    let enforced = bill.charges.iter().enumerate().filter(|(_, charge)| charge.enforced());
    let limits = enforced.map(|(index, charge)| balances.copied(index).look(charge.limit, charge.cost, now).0.ready_at);
    limits.chain(standings.iter().map(Standing::denied_until)).max().unwrap_or_default()
}

/// One settle step under way.
struct Step<'s, 'p, B: ?Sized, S: ?Sized> {
    bill: &'s Bill<'p>,
    balances: &'s mut B,
    standings: &'s mut S,
    now: Timestamp,
    outcome: &'s mut Outcome,
}

impl<B: Balances + ?Sized, S: Standings + ?Sized> Step<'_, '_, B, S> {
    fn check(mut self) {
        self.bring_standings();
        let mut denied = self.look();
        self.find_penalty();
        if self.outcome.penalty.is_some() {
            return self.warn();
        }
        if denied && self.bill.punishes {
            self.strike();
            denied = self.denied() || self.outcome.escalations.iter().any(|strike| !strike.rung.allows());
        }
        self.warn();
        if denied {
            self.deny();
            if self.bill.punishes {
                self.remember_denial();
            }
        } else {
            self.charge();
            self.outcome.shadowed = self.standings.all().iter().any(|standing| standing.is_shadowed(self.now));
            if self.outcome.shadowed && self.bill.punishes {
                self.foresee_warnings();
            }
        }
    }

    fn record(mut self) {
        self.look();
        // What is only watched is charged where it has room, as by a check.
        self.charge_where(|charge, settled| charge.enforced() || settled.look.allowed);
        for (charge, settled) in self.bill.charges.iter().zip(&mut self.outcome.settled) {
            if let Some(mark) = &settled.mark {
                let reset = &mut settled.look.reset_if_charged;
                *reset = charge.limit.latest_reset(mark, self.now).min(*reset);
            }
        }
    }

    /// Brings every balance to now and looks at it. Says whether an enforced limit denies.
    fn look(&mut self) -> bool {
        let mut denied = false;
        for (index, charge) in self.bill.charges.iter().enumerate() {
            if let Some(look) = self.balances.glance(index, charge, self.now) {
                denied |= charge.enforced() && !look.allowed;
                let _ = self.outcome.settled.try_push(Settled { at: self.now, look, mark: None, lifted: false });
                continue;
            }
            let (look, brought) = self.balances.look(index, charge, self.now);
            denied |= charge.enforced() && !look.allowed;
            let _ = self.outcome.settled.try_push(Settled { at: self.now, look, mark: None, lifted: false });
            if brought {
                self.outcome.mark_balance(index);
            }
        }
        denied
    }

    fn bring_standings(&mut self) {
        let subjects = self.bill.subjects.iter().zip(self.standings.all()).enumerate();
        for (index, (planned, standing)) in subjects {
            if standing.bring(planned.ladder, self.now) {
                self.outcome.mark_standing(index);
            }
        }
    }

    fn find_penalty(&mut self) {
        for (index, standing) in self.standings.all().iter().enumerate() {
            let Some(penalty) = standing.penalty(self.now) else { continue };
            self.outcome.denied_until = self.outcome.denied_until.max(standing.denied_until());
            if self.outcome.penalty.is_none_or(|(_, known)| penalty.rank() > known.rank()) {
                self.outcome.penalty = Some((index, penalty));
            }
        }
    }

    /// Whether an enforced limit denies and no rung has lifted that.
    fn denied(&self) -> bool {
        let charges = self.bill.charges.iter().zip(&self.outcome.settled);
        charges.into_iter().any(|(charge, settled)| charge.enforced() && !settled.look.allowed && !settled.lifted)
    }

    /// Adds at most one strike to each subject whose limits this request is over.
    fn strike(&mut self) {
        for (subject, planned) in self.bill.subjects.iter().enumerate() {
            let violations = self.violations(subject);
            let now = self.now;
            let Some(standing) = self.standings.all().get(subject) else { break };
            let counts = violations.iter().find(|(_, violation)| standing.counts(violation, now));
            let struck = counts.map(|(charge, violation)| {
                let mut standing = standing.clone();
                let rung = standing.strike(planned.ladder, violation, now);
                (*charge, rung, standing)
            });
            // A strike that cannot be kept is none: it would warn, and let the request through, every time.
            let struck = struck.filter(|(_, _, standing)| self.standings.has_room(subject, standing));
            let lifts = struck.as_ref().is_some_and(|(_, rung, _)| rung.allows());
            let Some(standing) = self.standings.all().get_mut(subject) else { break };
            let changed = struck.is_some();
            if let Some((charge, rung, struck)) = struck {
                *standing = struck;
                let escalation = Escalation {
                    subject,
                    charge,
                    strikes: standing.strikes(now),
                    rung,
                    shadowed: standing.is_shadowed(now),
                    banned_until: rung.ban.and(standing.banned_until()),
                };
                let _ = self.outcome.escalations.try_push(escalation);
            }
            for (charge, _) in &violations {
                // No rung lifts a block or a pause.
                let lifted = lifts && !self.balances.is_blocked(*charge, now);
                if let Some(settled) = self.outcome.settled.get_mut(*charge) {
                    settled.lifted = lifted;
                }
            }
            if changed {
                self.outcome.mark_standing(subject);
            }
        }
    }

    /// The limits of a subject that this request is over, by their charges. What is blocked was gone over before, and counts
    /// only where it counts that somebody did not wait.
    fn violations(&self, subject: usize) -> ArrayVec<(usize, Violation), MAX_CHARGES> {
        let charges = self.bill.charges.iter().zip(&self.outcome.settled).enumerate();
        let over = charges.filter(|(index, (charge, settled))| {
            let full = charge.subject == Some(subject) && charge.enforced() && !settled.look.allowed;
            let own = full && !self.balances.stands_in(*index, charge);
            own && (charge.terms.strike == StrikeMode::Ignored || !self.balances.is_blocked(*index, self.now))
        });
        over.map(|(index, (charge, _))| (index, charge.violation())).collect()
    }

    /// Remembers until when a denied client was told to wait, where coming sooner is a strike.
    fn remember_denial(&mut self) {
        let told = self.told();
        for subject in 0..self.bill.subjects.len() {
            let violations = self.violations(subject);
            let strikes = &self.outcome.escalations;
            let struck = strikes.iter().find(|strike| strike.subject == subject).map(|strike| strike.charge);
            let Some(standing) = self.standings.all().get_mut(subject) else { break };
            let mut changed = false;
            for (charge, violation) in &violations {
                changed |= standing.denied(violation, struck == Some(*charge), self.now, told);
            }
            if changed {
                self.outcome.mark_standing(subject);
            }
        }
    }

    /// When a denied client is told to come again, in whole seconds, as [`Plan::decide`] tells it: when the last full limit has
    /// room. The penalty of a strike may last longer, and while it does nothing strikes.
    fn told(&self) -> Timestamp {
        let settled = self.bill.charges.iter().zip(&self.outcome.settled);
        let full = settled.filter(|(charge, settled)| charge.enforced() && !settled.look.allowed);
        match full.map(|(_, settled)| settled.look.ready_at).max().unwrap_or(self.now) {
            Timestamp::MAX => Timestamp::MAX,
            ready => self.now.plus(Span::from_secs(ready.since(self.now).secs_ceil().max(1))),
        }
    }

    /// Says which subjects have strikes that count, should the request be denied.
    fn warn(&mut self) {
        let subjects = self.bill.subjects.iter().zip(self.standings.all());
        for ((planned, standing), warned) in subjects.zip(&mut self.outcome.warned_until) {
            if let Some(until) = standing.warned_until(planned.ladder, self.now) {
                *warned = until;
            }
        }
    }

    /// Says which limits would have warned by denying, should there be no room for this request to wait.
    #[cold]
    fn foresee_warnings(&mut self) {
        for (index, charge) in self.bill.charges.iter().enumerate() {
            let subject = charge.subject.and_then(|subject| self.bill.subjects.get(subject).zip(Some(subject)));
            let Some((planned, subject)) = subject else { continue };
            let told = self
                .standings
                .all()
                .get(subject)
                .is_some_and(|standing| standing.would_tell(planned.ladder, &charge.violation(), self.now));
            if told {
                self.outcome.would_warn |= bit(index);
            }
        }
    }

    /// Denied: nothing is charged. A limit that was gone over now blocks its key, if its rule says so.
    fn deny(&mut self) {
        for (index, charge) in self.bill.charges.iter().enumerate() {
            let Some(settled) = self.outcome.settled.get_mut(index) else { break };
            let Some(span) = charge.terms.block_for.filter(|_| self.bill.punishes) else { continue };
            let over = charge.enforced() && !settled.look.allowed && !settled.lifted;
            if over && !self.balances.is_blocked(index, self.now) && !self.balances.stands_in(index, charge) {
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
        self.charge_where(|_, settled| settled.look.allowed);
    }

    #[inline]
    fn charge_where(&mut self, is_charged: impl Fn(&Charge<'_>, &Settled) -> bool) {
        let mut changed = 0;
        for (index, (charge, settled)) in self.bill.charges.iter().zip(&mut self.outcome.settled).enumerate() {
            let by_outcome = charge.terms.by_outcome && !self.bill.outcomes_seen;
            if charge.cost > 0 && !by_outcome && is_charged(charge, settled) {
                settled.mark = Some(self.balances.charge(index, charge, self.now, self.bill.trace));
                changed |= bit(index);
            }
        }
        self.outcome.changed_balances |= changed;
    }
}

/// The bit of a charge, or of a subject.
pub(crate) fn bit(index: usize) -> u16 {
    u32::try_from(index).ok().and_then(|index| 1u16.checked_shl(index)).unwrap_or(0)
}
