//! Builds decisions: from an outcome, and without one where the store could not answer.

use super::{Cause, Decision, Degraded, PenaltyInForce, PenaltyKind, Reading, Verdict, WarnedBy};
use crate::bill::Charge;
use crate::key::{DigestKey, Domain, Part, TraceId};
use crate::ladder::Penalty;
use crate::plan::{Plan, Verb};
use crate::policy::{Banned, Disclosure, Listed, OnStoreError};
use crate::settle::{Escalation, Exception, Outcome, Settled};
use crate::time::{Span, Timestamp};

/// A shadow ban delays a request by one to three seconds.
const SHADOW_DELAY_MS: (u64, u64) = (1_000, 3_000);

impl Plan<'_> {
    /// Returns the decision that follows from an outcome.
    pub fn decide(&self, outcome: &Outcome) -> Decision {
        let mut decision = Decision::default();
        self.prepare(&mut decision);
        self.conclude(outcome, &mut decision);
        decision
    }

    /// Does the first half of [`decide`](Self::decide), before the store settles: clears `decision` and fills in all
    /// figures that do not depend on stored state. This work overlaps with the memory latency of the store's prefetch.
    pub fn prepare(&self, decision: &mut Decision) {
        self.begin(decision);
        for met in &self.met {
            decision.readings.push(Reading {
                // A policy has at most `MAX_RULES` rules, so an index always fits.
                rule: u16::try_from(met.index).unwrap_or(u16::MAX),
                enforced: met.enforced(),
                allowed: false,
                limit: met.whole.shown_quota(),
                period: met.whole.shown_period(),
                remaining: 0,
                unit: met.counts.unit(),
                cost: met.cost,
                charged: false,
                resets: Timestamp::MAX,
                ready: Timestamp::MAX,
                bucket: if met.limit.refills_smoothly() { met.limit.capacity() } else { 0 },
                at_once: met.limit.is_concurrency(),
                estimate: met.limit.resets_with_clock(),
            });
        }
    }

    /// Does the second half of [`decide`](Self::decide) on a decision that this plan has [prepared](Self::prepare).
    pub fn conclude(&self, outcome: &Outcome, decision: &mut Decision) {
        self.conclude_whole(outcome, decision);
        if outcome.unread != 0 {
            self.remove_unread(outcome, decision);
        }
    }

    /// Removes the readings of limits that were not looked at. They allow, so one of them binds only if there is no other.
    #[cold]
    fn remove_unread(&self, outcome: &Outcome, decision: &mut Decision) {
        let is_unread = |index: usize| self.met.get(index).is_some_and(|met| !outcome.is_read(met.charge));
        decision.binding = decision.binding.filter(|binding| !is_unread(*binding));
        decision.remove_readings(is_unread);
    }

    fn conclude_whole(&self, outcome: &Outcome, decision: &mut Decision) {
        // The store's clock, not the host's: the times in the outcome are by it, and `Retry-After` is the difference of
        // two of them.
        let now = outcome.at;
        decision.at = now;
        if let Some(ban) = self.banned(now) {
            // Prepared before it was known whether the ban is in force. They hold no figures, since no limit was looked
            // at.
            decision.readings.clear();
            return self.apply_ban(ban, outcome.behind_ban, decision);
        }
        match self.listed {
            Some(Listed::Deny) => {
                decision.verdict = Verdict::Ban;
                return;
            }
            // Bans come before lists: an allow-list entry that is narrower than a ban has removed the ban from the plan
            // already.
            Some(Listed::Allow) => return,
            None => {}
        }
        decision.degraded = outcome.degraded;
        // Set first, so that denials are marked as well: the budget may have been used up by other callers.
        if outcome.has_stand_ins() {
            decision.degraded = Some(Degraded::SharedBudget);
        }
        let denied_by_limit = self.read(outcome, decision);
        decision.escalations.extend_from_slice(&outcome.escalations);
        if let Some((subject, penalty)) = outcome.penalty {
            // No limit binds under a penalty. A binding limit would tell the client a quota that does not help it.
            self.penalise(decision, subject, penalty, outcome.denied_until);
            return self.warn(outcome, decision);
        }
        if denied_by_limit || outcome.escalations.iter().any(|strike| !strike.rung.allows()) {
            self.refuse(outcome, now, decision);
            self.warn(outcome, decision);
        } else {
            decision.binding = tightest(decision);
            // An allowed request is warned only by its own strike. Only denials repeat the warning of earlier ones.
            let warning = outcome.escalations.iter().find(|strike| strike.rung.warn);
            decision.warned_by = warning.and_then(|strike| self.warned_by(strike.subject, outcome));
            decision.warning = warning.is_some();
            // A shadow ban takes precedence over a warning as the verdict. The warning itself is still sent, since the
            // client has to see what it would see without the shadow ban.
            decision.verdict = if outcome.shadowed {
                decision.delay = shadow_delay(self.policy.key(), self.trace());
                Verdict::Slow
            } else if decision.warning {
                Verdict::Warn
            } else {
                Verdict::Allow
            };
        }
        let bound = decision.binding.and_then(|binding| self.met.get(binding));
        decision.disclosure = bound.map_or(Disclosure::Full, |met| met.rule.disclosure);
    }

    /// Warns a client that is denied but not banned while its strikes count. Prefers a ladder with a warning cookie.
    fn warn(&self, outcome: &Outcome, decision: &mut Decision) {
        // A banned client gets `X-RateLimit-Banned` instead.
        if decision.verdict != Verdict::Deny {
            return;
        }
        let warned = (0..self.subjects.len()).filter_map(|subject| self.warned_by(subject, outcome));
        let has_no_cookie = |warned: &WarnedBy| {
            self.policy.ladders.get(warned.ladder).is_none_or(|ladder| ladder.warning_cookie.is_none())
        };
        // `false` sorts first, and of several ladders with a cookie the first one in the policy's order is taken.
        decision.warned_by = warned.min_by_key(has_no_cookie);
        decision.warning = decision.warned_by.is_some();
    }

    /// Returns the warning of a subject's ladder while its strikes count.
    fn warned_by(&self, subject: usize, outcome: &Outcome) -> Option<WarnedBy> {
        let until = outcome.warned_until.get(subject).copied().filter(|until| *until > Timestamp::EPOCH)?;
        Some(WarnedBy { ladder: self.subjects.get(subject)?.ladder_index, until })
    }

    /// Applies an operator's ban. A retry succeeds when the ban, the limits and the ladders' penalties are all over; never
    /// if a deny list names the caller too, or if the ban has no end.
    fn apply_ban(&self, ban: Banned, behind: Timestamp, decision: &mut Decision) {
        decision.verdict = Verdict::Ban;
        decision.penalty = Some(PenaltyInForce { layer: ban.layer, kind: PenaltyKind::OperatorBan, until: ban.until });
        let is_listed = self.listed == Some(Listed::Deny);
        decision.ready_at = ban.until.max(behind).unless_never().filter(|_| !is_listed);
    }

    /// Denies because of a limit, or because of the rung that this request has reached.
    fn refuse(&self, outcome: &Outcome, now: Timestamp, decision: &mut Decision) {
        let harsh = outcome.escalations.iter().filter(|strike| !strike.rung.allows());
        let penalty_ends = harsh.clone().filter_map(|strike| self.rung_ends(strike, now)).max();
        let banned = harsh.clone().any(|strike| strike.rung.ban.is_some());
        decision.verdict = if banned { Verdict::Ban } else { Verdict::Deny };
        let struck = harsh.filter_map(|strike| self.met.iter().position(|met| met.charge == strike.charge));
        decision.binding = longest_wait(decision, struck);
        decision.denied_for = decision.binding.map_or(Cause::Limit, |binding| self.cause_of(binding, outcome));
        let waits = decision.bound_by().map_or(Some(now), |reading| reading.ready_at().or(allowed_now(reading, now)));
        // Both must be over: the client would be denied again by the one that lasts longer.
        decision.ready_at = waits.map(|ready| ready.max(penalty_ends.unwrap_or(now)));
    }

    /// Returns why a limit denies. A pause and `block_for` are stored alike, so a pause of a rule with `block_for` cannot be told from a
    /// block of its own.
    fn cause_of(&self, reading: usize, outcome: &Outcome) -> Cause {
        let Some(met) = self.met.get(reading) else { return Cause::Limit };
        let is_blocked = || outcome.settled.get(met.charge).is_some_and(|own| own.exception == Exception::Blocked);
        match met {
            met if met.lacks => Cause::Missing,
            met if met.rule.block_for.is_none() && is_blocked() => Cause::Pause,
            _ => Cause::Limit,
        }
    }

    /// Returns what to do when the store fails: the strictest `on_store_error` of the enforced rules.
    #[must_use]
    pub fn on_store_error(&self) -> OnStoreError {
        // An observed rule never denies, so its `closed` must not deny while the store is away.
        let modes = self.met.iter().filter(|met| met.enforced()).map(|met| met.rule.on_store_error);
        modes.fold(OnStoreError::Open, |strictest, mode| match (strictest, mode) {
            (OnStoreError::Closed, _) | (_, OnStoreError::Closed) => OnStoreError::Closed,
            (OnStoreError::Local, _) | (_, OnStoreError::Local) => OnStoreError::Local,
            (OnStoreError::Open, OnStoreError::Open) => OnStoreError::Open,
        })
    }

    /// Returns the decision when the store failed and the policy is open or closed. Bans and lists still apply: they need
    /// no store.
    pub fn decide_blind(&self, open: bool, reason: Degraded, now: Timestamp) -> Decision {
        let mut decision = Decision::default();
        self.begin(&mut decision);
        decision.at = now;
        decision.degraded = Some(reason);
        if let Some(ban) = self.banned(now) {
            self.apply_ban(ban, now, &mut decision);
            return decision;
        }
        match self.listed {
            Some(Listed::Deny) => decision.verdict = Verdict::Ban,
            // `deny = true` needs no store, so it denies in every mode. Waiting does not help.
            None if self.never_fits() => decision.verdict = Verdict::Deny,
            None if !open => {
                decision.verdict = Verdict::Deny;
                // Nothing is known about the limits. A second is the shortest `Retry-After`, and a store is often back
                // by then.
                decision.ready_at = Some(now.plus(Span::SECOND));
            }
            Some(Listed::Allow) | None => {}
        }
        decision
    }

    /// Returns whether an enforced rule allows nothing at all. What has happened is recorded all the same.
    fn never_fits(&self) -> bool {
        let never = |charge: &Charge<'_>| charge.enforced() && charge.limit.is_never();
        self.bill.verb != Verb::Record && self.bill.charges.iter().any(never)
    }

    /// Delays an allowed request as a shadow ban does.
    pub fn slow_down(&self, decision: &mut Decision) {
        if decision.allowed() {
            decision.delay = shadow_delay(self.policy.key(), self.trace());
            decision.verdict = Verdict::Slow;
        }
    }

    /// Returns the answer to a request that should be slowed when no more requests can be delayed: a denial by its
    /// tightest limit, as if that had just been used up. Clients cannot tell it from a genuine denial. The caller refunds
    /// what the request was charged.
    pub fn decide_as_full(&self, outcome: &Outcome) -> Decision {
        let now = outcome.at;
        // The limit that the client would have expected to hit first, by the figures that it has been reading.
        let mut decision = Decision::default();
        self.prepare(&mut decision);
        self.conclude_whole(outcome, &mut decision);
        let tightest = decision.binding;
        let full = tightest.and_then(|binding| self.met.get(binding)).map(|met| met.charge);
        let mut uncharged = outcome.clone();
        for (index, (settled, charge)) in uncharged.settled.iter_mut().zip(&self.bill.charges).enumerate() {
            // The caller refunds the charges, so every reading must show what is left without them.
            settled.mark = None;
            if Some(index) == full {
                // A genuine denial would begin a block. Without its time in `Retry-After` the client could tell the two
                // apart.
                let blocked = charge.terms.block_for.map(|span| now.plus(span));
                settled.look.ready_at = charge
                    .limit
                    .ready_if_full(charge.cost, &settled.look, now, self.trace())
                    .max(blocked.unwrap_or(now));
                settled.look.allowed = false;
                settled.look.available = 0;
            }
        }
        self.prepare(&mut decision);
        decision.at = now;
        self.read(&uncharged, &mut decision);
        decision.verdict = Verdict::Deny;
        decision.binding = tightest;
        // Without any limit the only thing to wait for is a free place among the delayed requests.
        decision.ready_at = decision.bound_by().map_or(Some(now.plus(Span::SECOND)), Reading::ready_at);
        let bound = tightest.and_then(|binding| self.met.get(binding));
        decision.disclosure = bound.map_or(Disclosure::Full, |met| met.rule.disclosure);
        // First the warning of earlier strikes, then that of the strike which a genuine denial would have been.
        self.warn(outcome, &mut decision);
        if full.is_some_and(|charge| outcome.would_warn(charge)) {
            let subject = bound.and_then(|met| self.subjects.get(met.subject?));
            decision.warned_by =
                subject.map(|subject| WarnedBy { ladder: subject.ladder_index, until: now.plus(subject.ladder.decay) });
            decision.warning = decision.warned_by.is_some();
        }
        if outcome.unread != 0 {
            self.remove_unread(outcome, &mut decision);
        }
        decision
    }

    /// Resets `decision` to the state that every decision starts from.
    #[inline]
    fn begin(&self, decision: &mut Decision) {
        // Cleared and not replaced: a reused decision keeps the heap memory of its lists.
        let Decision { readings, escalations, .. } = decision;
        readings.clear();
        escalations.clear();
        decision.verdict = Verdict::Allow;
        decision.trace = self.trace();
        decision.generation = self.policy.generation;
        decision.binding = None;
        decision.ready_at = None;
        decision.delay = Span::ZERO;
        decision.warning = false;
        decision.warned_by = None;
        decision.penalty = None;
        decision.disclosure = Disclosure::Full;
        decision.listed = self.listed;
        decision.degraded = None;
    }

    /// Fills in the figures that depend on stored state. Returns whether an enforced limit denies.
    fn read(&self, outcome: &Outcome, decision: &mut Decision) -> bool {
        let mut denied = false;
        for (reading, met) in decision.readings.iter_mut().zip(&self.met) {
            // By `met.charge` and not by position: several requests of one plan can share a charge.
            let Some(Settled { look, mark, exception, .. }) = outcome.settled.get(met.charge) else { break };
            // A record charges enforced limits even when the cost does not fit.
            reading.allowed = look.allowed || (self.verb() == Verb::Record && reading.enforced);
            // A lifted limit still reads as not allowed: it has no room, and the request was not charged to it.
            denied |= reading.enforced && !reading.allowed && *exception != Exception::Lifted;
            (reading.remaining, reading.resets) = match mark {
                Some(mark) => (look.available.saturating_sub(mark.amount), look.reset_if_charged),
                None => (look.available, look.reset_if_not),
            };
            reading.charged = mark.is_some();
            reading.ready = if reading.allowed { Timestamp::MAX } else { look.ready_at };
        }
        denied
    }

    /// Applies a penalty. A retry succeeds when the last penalty is over and the limits have room.
    fn penalise(&self, decision: &mut Decision, subject: usize, penalty: Penalty, until: Timestamp) {
        let (verdict, kind, end) = match penalty {
            Penalty::CoolDown(end) => (Verdict::Deny, PenaltyKind::CoolDown, end),
            Penalty::Ban(end) => (Verdict::Ban, PenaltyKind::LadderBan, end),
        };
        decision.verdict = verdict;
        let layer = self.subjects.get(subject).map(|subject| subject.layer);
        decision.penalty = layer.map(|layer| PenaltyInForce { layer, kind, until: end });
        decision.disclosure = self.subjects.get(subject).map_or(Disclosure::Full, |subject| subject.disclosure);
        // A limit may still be full when the penalty ends.
        let denying = decision.readings.iter().filter(|reading| reading.enforced && !reading.allowed);
        let limits = denying.map(|reading| reading.ready).max();
        decision.ready_at = limits.map_or(until, |ready| ready.max(until)).unless_never();
    }

    /// Returns when the penalty of a strike ends.
    pub(crate) fn rung_ends(&self, strike: &Escalation, now: Timestamp) -> Option<Timestamp> {
        let cooldown = strike.rung.cooldown.map(|span| now.plus(span));
        cooldown.max(strike.banned_until)
    }
}

/// Returns `now` for a reading that allows.
fn allowed_now(reading: &Reading, now: Timestamp) -> Option<Timestamp> {
    reading.allowed.then_some(now)
}

/// Returns the denying limit with the longest wait, where "never" is the longest. Ties go to the first in rule order, which
/// is by layer and then by position in the file. If no limit denies, returns the one that struck.
fn longest_wait(decision: &Decision, mut struck: impl Iterator<Item = usize>) -> Option<usize> {
    let denying = decision.readings.iter().enumerate().filter(|(_, reading)| reading.enforced && !reading.allowed);
    let wait = |reading: &Reading| reading.ready;
    let mut longest: Option<(usize, Timestamp)> = None;
    for (index, reading) in denying {
        // Not `max_by_key`, which returns the last of equal ones.
        if longest.is_none_or(|(_, known)| wait(reading) > known) {
            longest = Some((index, wait(reading)));
        }
    }
    longest.map(|(index, _)| index).or_else(|| struck.next())
}

/// Returns the enforced limit with room for the fewest further requests of this cost.
pub(super) fn tightest(decision: &Decision) -> Option<usize> {
    let enforced = decision.readings.iter().enumerate().filter(|(_, reading)| reading.enforced);
    // Nearly all costs are 1, and a 64-bit division takes as long as a dozen other instructions.
    let further = |reading: &Reading| match reading.cost {
        0 | 1 => reading.remaining,
        cost => reading.remaining.checked_div(cost).unwrap_or(0),
    };
    enforced.min_by_key(|(_, reading)| further(reading)).map(|(index, _)| index)
}

/// Returns a delay between one and three seconds, derived from the decision's id under the policy's secret: clients can
/// read the id and must not be able to compute the delay from it.
pub(super) fn shadow_delay(key: DigestKey, trace: TraceId) -> Span {
    let (low, high) = SHADOW_DELAY_MS;
    let width = u128::from(high.saturating_sub(low).saturating_add(1));
    let mut drawn = key.begin(Domain::Delay);
    drawn.bytes(Part::Fact, &trace.to_u128().to_be_bytes());
    // The remainder of 128 bits by 2,001 is uniform for every practical purpose.
    let spread = u64::try_from(drawn.finish().to_u128().checked_rem(width).unwrap_or(0)).unwrap_or(0);
    Span::from_millis(low.saturating_add(spread))
}
