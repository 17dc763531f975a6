//! One settle step: look at everything, find penalties, strike, then charge all or nothing.

use arrayvec::ArrayVec;

use super::balances::Balances;
use super::outcome::{Escalation, Exception, Outcome, Settled, bit};
use super::standings::Standings;
use crate::bill::{Bill, Charge};
use crate::ladder::{StrikeMode, Violation};
use crate::plan::MAX_CHARGES;
use crate::time::{Span, Timestamp};

/// A bill, the state it is settled on, and the outcome that is being filled.
pub(super) struct Step<'s, 'p, B: ?Sized, S: ?Sized> {
    pub(super) bill: &'s Bill<'p>,
    pub(super) balances: &'s mut B,
    pub(super) standings: &'s mut S,
    pub(super) now: Timestamp,
    pub(super) outcome: &'s mut Outcome,
}

impl<B: Balances + ?Sized, S: Standings + ?Sized> Step<'_, '_, B, S> {
    /// Decides and charges.
    ///
    /// The order is part of the contract. Every limit is looked at before anything is charged, so that nothing has to be
    /// undone. A penalty in force ends the step before a strike can be added: going on during a cool-down or a ban is no
    /// further offence. Strikes come before the verdict, because a rung that only warns lets the request through.
    pub(super) fn check(mut self) {
        // Before the penalties are read: a standing from a clock that has stepped back would deny for longer than its
        // ladder can.
        self.bring_standings();
        let mut denied = self.look();
        self.find_penalty();
        if self.outcome.penalty.is_some() {
            // Nothing is charged or blocked under a penalty. Otherwise a client that keeps trying would extend its own
            // denial, and every denied request would be a write.
            return self.note_warnings();
        }
        // `denied` counts only enforced limits: exceeding an observed one has no consequence, so it cannot strike
        // either.
        if denied && self.bill.punishes {
            self.strike();
            // The rung of one subject does not overrule another subject's: any of them can still deny.
            denied = self.denied() || self.outcome.escalations.iter().any(|strike| !strike.rung.allows());
        }
        // After the strike, so that the warning has the end of this strike's decay and not that of the one before it.
        self.note_warnings();
        if denied {
            self.note_blocks();
            // Before the denial is remembered: a block moves `ready_at`, and the time that the client was asked to wait
            // includes it.
            self.begin_blocks();
            if self.bill.punishes {
                self.remember_denial();
            }
        } else {
            // The shadow ban is read after the strike, so the request that earns it is the first one to be delayed.
            self.charge();
            self.outcome.shadowed = self.standings.all().iter().any(|standing| standing.is_shadowed(self.now));
            if self.outcome.shadowed && self.bill.punishes {
                self.find_visible_strikes();
            }
        }
    }

    /// Charges without deciding: what is recorded has already happened. An enforced limit is charged past its bound, and an
    /// observed one only where it has room, as a check does it.
    pub(super) fn record(mut self) {
        self.look();
        // No strike is added: the limits were not asked before the request was carried out, so exceeding one is no
        // offence of its client.
        self.charge_where(|charge, settled| charge.enforced() || settled.look.allowed);
        for (charge, settled) in self.bill.charges.iter().zip(&mut self.outcome.settled) {
            // The look assumed that the whole cost fits. Debt beyond a limit's bound saturates, and so does the time at which
            // it is paid off.
            if let Some(mark) = &settled.mark {
                let reset = &mut settled.look.reset_if_charged;
                *reset = charge.limit.latest_reset(mark, self.now).min(*reset);
            }
        }
    }

    /// Looks at every balance. Returns whether an enforced limit denies.
    fn look(&mut self) -> bool {
        let mut denied = false;
        for (index, charge) in self.bill.charges.iter().enumerate() {
            if let Some(look) = self.balances.glance(index, charge, self.now) {
                denied |= charge.enforced() && !look.allowed;
                // Cannot fail: a bill has at most `MAX_CHARGES` charges, and the outcome has been cleared.
                let _ = self.outcome.settled.try_push(Settled {
                    at: self.now,
                    look,
                    mark: None,
                    exception: Exception::None,
                });
                continue;
            }
            let (look, brought) = self.balances.look(index, charge, self.now);
            denied |= charge.enforced() && !look.allowed;
            let _ =
                self.outcome.settled.try_push(Settled { at: self.now, look, mark: None, exception: Exception::None });
            // Saved even if the request is denied: after the clock has stepped back, a state from the future would otherwise
            // deny until then.
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
            // Strictly harsher: of two equal penalties the first subject in the policy's order is named, on every node.
            if self.outcome.penalty.is_none_or(|(_, known)| penalty.rank() > known.rank()) {
                self.outcome.penalty = Some((index, penalty));
            }
        }
    }

    /// Returns whether an enforced limit denies and no rung has lifted that.
    fn denied(&self) -> bool {
        let charges = self.bill.charges.iter().zip(&self.outcome.settled);
        charges.into_iter().any(|(charge, settled)| {
            charge.enforced() && !settled.look.allowed && settled.exception != Exception::Lifted
        })
    }

    /// Adds at most one strike to each subject whose limits this request exceeds.
    ///
    /// A rung that allows lifts every full limit of its subject, not only the one that caused the strike: the subject is
    /// warned once for the whole request. Limits of other subjects, and those without a ladder, still deny.
    fn strike(&mut self) {
        for (subject, planned) in self.bill.subjects.iter().enumerate() {
            let violations = self.violations(subject);
            let now = self.now;
            let Some(standing) = self.standings.all().get(subject) else { break };
            // The first violation that counts is the strike. Under `StrikeMode::Window` one rule may have struck
            // recently while another one of the same request has not.
            let counts = violations.iter().find(|(_, violation)| standing.counts(violation, now));
            let struck = counts.map(|(charge, violation)| {
                // On a copy, because the store is asked for room with the standing as it would be saved.
                let mut standing = standing.clone();
                let rung = standing.strike(planned.ladder, violation, now);
                (*charge, rung, standing)
            });
            // A strike that cannot be saved does not count: it would be the first one, warn and let the request through
            // every time.
            let struck = struck.filter(|(_, _, standing)| self.standings.has_room(subject, standing));
            let lifts = struck.as_ref().is_some_and(|(_, rung, _)| rung.allows());
            // Borrowed again: asking for room needs the standings as a whole.
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
                    // The standing has the end of its latest ban, also of one that is over. The rung tells whether this
                    // strike bans.
                    banned_until: rung.ban.and(standing.banned_until()),
                };
                let _ = self.outcome.escalations.try_push(escalation);
            }
            for (charge, _) in &violations {
                // A rung forgives a full limit. It never ends a block or an operator's pause.
                let is_lifted = lifts && !self.balances.is_blocked(*charge, now);
                if let Some(settled) = self.outcome.settled.get_mut(*charge).filter(|_| is_lifted) {
                    settled.exception = Exception::Lifted;
                }
            }
            if changed {
                self.outcome.mark_standing(subject);
            }
        }
    }

    /// Returns the limits of a subject that this request exceeds, with the index of their charges.
    ///
    /// A blocked key was over its limit before this request, so it is a new violation only under
    /// [`StrikeMode::Ignored`], where coming back too early is what counts. A stand-in is nobody's violation.
    fn violations(&self, subject: usize) -> ArrayVec<(usize, Violation), MAX_CHARGES> {
        let charges = self.bill.charges.iter().zip(&self.outcome.settled).enumerate();
        let over = charges.filter(|(index, (charge, settled))| {
            let full = charge.subject == Some(subject) && charge.enforced() && !settled.look.allowed;
            // Without this check an attacker who fills the store could get other callers struck who share the stand-in.
            let own = full && !self.balances.stands_in(*index, charge);
            own && (charge.terms.strike == StrikeMode::Ignored || !self.balances.is_blocked(*index, self.now))
        });
        over.map(|(index, (charge, _))| (index, charge.violation())).collect()
    }

    /// Saves until when the denied client was asked to wait, for rules under which coming sooner is a strike.
    fn remember_denial(&mut self) {
        let retry_at = self.retry_at();
        for subject in 0..self.bill.subjects.len() {
            let violations = self.violations(subject);
            let strikes = &self.outcome.escalations;
            // The budget whose denial was ignored begins a new wait. For the others the first denial of their series
            // still counts.
            let struck = strikes.iter().find(|strike| strike.subject == subject).map(|strike| strike.charge);
            let Some(standing) = self.standings.all().get_mut(subject) else { break };
            let mut changed = false;
            for (charge, violation) in &violations {
                changed |= standing.remember_denial(violation, struck == Some(*charge), self.now, retry_at);
            }
            if changed {
                self.outcome.mark_standing(subject);
            }
        }
    }

    /// Returns the time that the denied client reads as `Retry-After`, in whole seconds as [`Plan::decide`] rounds it: when the
    /// last full limit has room. A strike's penalty may last longer, but no strike is added while it does.
    ///
    /// [`Plan::decide`]: crate::Plan::decide
    fn retry_at(&self) -> Timestamp {
        let settled = self.bill.charges.iter().zip(&self.outcome.settled);
        let full = settled.filter(|(charge, settled)| charge.enforced() && !settled.look.allowed);
        match full.map(|(_, settled)| settled.look.ready_at).max().unwrap_or(self.now) {
            // A limit that never has room has no `Retry-After`. Every later request on it comes too early.
            Timestamp::MAX => Timestamp::MAX,
            ready => self.now.plus(Span::from_secs(ready.since(self.now).secs_ceil().max(1))),
        }
    }

    /// Notes which subjects have strikes that count, for the warning on a denial.
    fn note_warnings(&mut self) {
        let subjects = self.bill.subjects.iter().zip(self.standings.all());
        for ((planned, standing), warned) in subjects.zip(&mut self.outcome.warned_until) {
            if let Some(until) = standing.warned_until(planned.ladder, self.now) {
                *warned = until;
            }
        }
    }

    /// Marks the charges whose denial would be a strike that the client can see, for the case that the host has no room to
    /// delay this request and denies it instead.
    #[cold]
    fn find_visible_strikes(&mut self) {
        for (index, charge) in self.bill.charges.iter().enumerate() {
            // Without a ladder a denial is no strike, so it warns nobody.
            let subject = charge.subject.and_then(|subject| self.bill.subjects.get(subject).zip(Some(subject)));
            let Some((planned, subject)) = subject else { continue };
            let visible = self
                .standings
                .all()
                .get(subject)
                .is_some_and(|standing| standing.would_notify(planned.ladder, &charge.violation(), self.now));
            if visible {
                self.outcome.would_warn |= bit(index);
            }
        }
    }

    /// Notes which limits of a denied request are blocked, by a pause or by an earlier `block_for`.
    fn note_blocks(&mut self) {
        for (index, settled) in self.outcome.settled.iter_mut().enumerate() {
            if !settled.look.allowed && self.balances.is_blocked(index, self.now) {
                settled.exception = Exception::Blocked;
            }
        }
    }

    /// Blocks the keys of a denied request whose limits it exceeds and whose rules have `block_for`. A key that is blocked
    /// already is left alone: trying again does not extend a block.
    fn begin_blocks(&mut self) {
        for (index, charge) in self.bill.charges.iter().enumerate() {
            let Some(settled) = self.outcome.settled.get_mut(index) else { break };
            // A request that may exceed limits unpunished must not block the key for its ordinary requests either.
            let Some(span) = charge.terms.block_for.filter(|_| self.bill.punishes) else { continue };
            let over = charge.enforced() && !settled.look.allowed && settled.exception == Exception::None;
            if over && !self.balances.stands_in(index, charge) {
                let until = self.now.plus(span);
                self.balances.block(index, charge, until);
                settled.look.ready_at = settled.look.ready_at.max(until);
                // What `Balance::peek` would return from here on: the client reads the same figures now and on its next
                // try.
                settled.look.available = 0;
                self.outcome.mark_balance(index);
            }
        }
    }

    /// Charges an allowed request to every limit with room, observed ones included. A full limit that a rung has lifted is
    /// left as it is, so that a warned request never takes a limit past its bound.
    fn charge(&mut self) {
        self.charge_where(|_, settled| settled.look.allowed);
    }

    #[inline]
    fn charge_where(&mut self, is_charged: impl Fn(&Charge<'_>, &Settled) -> bool) {
        let mut changed = 0;
        for (index, (charge, settled)) in self.bill.charges.iter().zip(&mut self.outcome.settled).enumerate() {
            // A door that does not see the response never learns whether the request counts, so such a rule charges
            // nothing there.
            let by_outcome = charge.terms.by_outcome && !self.bill.outcomes_seen;
            // A cost of 0 only looks. Charging it would write a balance that means nothing, for every such request.
            if charge.cost > 0 && !by_outcome && is_charged(charge, settled) {
                settled.mark = Some(self.balances.charge(index, charge, self.now, self.bill.trace));
                changed |= bit(index);
            }
        }
        self.outcome.changed_balances |= changed;
    }
}
