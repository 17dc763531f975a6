//! Decision, verdict, reading: what one request is told.

use std::fmt;

use arrayvec::ArrayVec;

use crate::key::{DigestKey, Domain, Part, TraceId};
use crate::ladder::Penalty;
use crate::limit::{Unit, clock_window_end};
use crate::plan::{MAX_CHARGES, MAX_SUBJECTS, Plan, Verb};
use crate::policy::{Banned, Disclosure, Layer, Listed, OnStoreError, Policy, Rule};
use crate::settle::{Escalation, Outcome, Settled};
use crate::time::{Span, Timestamp};

/// A shadow ban delays by between one and three seconds.
const SHADOW_DELAY_MS: (u64, u64) = (1_000, 3_000);

/// What becomes of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// It may cross.
    Allow,
    /// It may cross, with a warning.
    Warn,
    /// It may cross after a delay. Clients are never told why.
    Slow,
    /// It may not.
    Deny,
    /// It may not, until a time.
    Ban,
}

impl Verdict {
    /// The name on the wire.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Allow => "allow",
            Self::Warn => "warn",
            Self::Slow => "slow",
            Self::Deny => "deny",
            Self::Ban => "ban",
        }
    }

    /// Whether the request may cross.
    #[must_use]
    pub const fn allows(self) -> bool {
        matches!(self, Self::Allow | Self::Warn | Self::Slow)
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The figures of one limit that was met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reading {
    /// The rule's place in the policy of the decision's generation.
    pub rule: usize,
    /// Whether the limit binds.
    pub enforced: bool,
    /// Whether the cost fitted.
    pub allowed: bool,
    /// L as written, or the burst where that is larger.
    pub limit: u64,
    /// The time in which `limit` is available again: W as written, or what a larger burst takes to refill.
    pub period: Span,
    /// The whole cost that fits now, after this request's charge.
    pub remaining: u64,
    /// What the limit counts.
    pub unit: Unit,
    /// What this request costs.
    pub cost: u64,
    /// Whether it was charged, and so whether the figures are those after its charge. A peek says what a check would.
    pub charged: bool,
    /// When there is more, or all, again; `Timestamp::MAX` is never.
    pub(crate) resets: Timestamp,
    /// If not allowed: when this cost fits; likewise. If allowed, never.
    pub(crate) ready: Timestamp,
    /// The capacity of a token bucket; 0 for limits that do not refill smoothly.
    pub(crate) bucket: u64,
    /// Whether the limit is on what is under way at once.
    pub(crate) at_once: bool,
    /// Whether it is a sliding estimate, whose `resetAt` is the end of its window.
    pub(crate) estimate: bool,
}

impl Reading {
    /// When there is more, or all, again; `None` where there is no such moment.
    #[must_use]
    pub fn resets(&self) -> Option<Timestamp> {
        self.resets.unless_never()
    }

    /// If not allowed: when this cost fits; `None` if it never will.
    #[must_use]
    pub fn ready_at(&self) -> Option<Timestamp> {
        self.ready.unless_never()
    }

    /// When more than `remaining` is available if nobody else comes, for a decision made at `at`: the draft's effective
    /// window ends then. `None` where no time says it.
    ///
    /// A denial with nothing left says when its own cost fits.
    #[must_use]
    pub fn more_at(&self, at: Timestamp) -> Option<Timestamp> {
        let more = match (self.bucket.checked_sub(1), self.resets()?) {
            // A bucket is full again when all that is missing to it has refilled, unit by unit.
            (Some(last), full) if self.remaining <= last => {
                full.minus(self.refills(last.saturating_sub(self.remaining)))
            }
            (Some(_), _) => at.plus(self.refills(1)),
            (None, resets) if resets > at => resets,
            // Nothing is used: whatever is used now leaves a period later.
            (None, _) => at.plus(self.period),
        };
        match (self.allowed, self.remaining) {
            (true, _) => Some(more),
            // A block may hide how much there is.
            (false, 0) => self.ready_at(),
            (false, _) => Some(self.ready_at().map_or(more, |ready| more.min(ready))),
        }
    }

    /// How long `units` take to refill.
    fn refills(&self, units: u64) -> Span {
        let micros = u128::from(units).saturating_mul(u128::from(self.period.micros()));
        let micros = micros.checked_div(u128::from(self.limit)).unwrap_or(0);
        Span::from_micros(u64::try_from(micros).unwrap_or(u64::MAX))
    }

    /// `resetAt` in Unix seconds, for a decision made at `at`.
    #[must_use]
    pub fn reset_at(&self, at: Timestamp) -> Option<u64> {
        if self.allowed { self.reset_if_allowed(at) } else { self.ready_at().map(|ready| told_reset(ready, at)) }
    }

    /// `resetAt` of an answer that allows.
    fn reset_if_allowed(&self, at: Timestamp) -> Option<u64> {
        let reset = if self.estimate { Some(clock_window_end(self.period, at)) } else { self.resets() };
        reset.map(Timestamp::secs_ceil)
    }
}

/// The moment a client is told to come back: now and the whole seconds of its wait.
fn told_reset(ready: Timestamp, at: Timestamp) -> u64 {
    at.plus(Span::from_secs(ready.since(at).secs_ceil())).secs_ceil()
}

/// Why an answer was given without the store, or without all that it needs of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Degraded {
    /// The store did not answer in time.
    Timeout,
    /// The store answered with an error.
    StoreError,
    /// The store is full of keys it must not forget.
    StoreFull,
    /// More rules met one request than a plan holds.
    TooManyRules,
    /// The decision is as it should be, and what it did to somebody's standing is not on disk yet.
    Journal,
    /// The store had no room for a budget of its own, and the request was counted by one that stands in for many.
    SharedBudget,
}

impl Degraded {
    /// The reason on the wire.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Timeout => "store_timeout",
            Self::StoreError => "store_error",
            Self::StoreFull => "store_full",
            Self::TooManyRules => "too_many_rules",
            Self::Journal => "journal",
            Self::SharedBudget => "shared_budget",
        }
    }
}

/// What one request is told, and why.
#[derive(Debug, Clone)]
#[must_use = "a decision that nobody reads protects nothing"]
pub struct Decision {
    /// What becomes of the request.
    pub verdict: Verdict,
    /// When it was decided.
    pub at: Timestamp,
    /// The id of the decision.
    pub trace: TraceId,
    /// The policy it was decided under.
    pub generation: u64,
    /// Every limit that was met, in order.
    pub readings: ArrayVec<Reading, MAX_CHARGES>,
    /// Which of them the top-level figures are of.
    pub binding: Option<usize>,
    /// If denied: when it is worth coming back; `None` if never.
    pub ready_at: Option<Timestamp>,
    /// How long to wait before answering.
    pub delay: Span,
    /// Whether the client is warned: by this strike, or, on a denial, because earlier ones still count.
    pub warning: bool,
    /// If it is: by which ladder, and until when.
    pub warned_by: Option<WarnedBy>,
    /// The layer of the penalty that denied, if one did.
    pub penalty: Option<Layer>,
    /// How much the client is told: what the rule that binds says, or the rules that led to the penalty.
    pub disclosure: Disclosure,
    /// Whether a list decided.
    pub listed: Option<Listed>,
    /// Why the store had no part in this.
    pub degraded: Option<Degraded>,
    /// The strikes this request added.
    pub escalations: ArrayVec<Escalation, MAX_SUBJECTS>,
}

/// Whose warning a client gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WarnedBy {
    /// The ladder's place in the policy of the decision's generation.
    pub ladder: usize,
    /// When the strikes are forgotten.
    pub until: Timestamp,
}

/// One that allows and says nothing: a place for [`Plan::decide_into`].
impl Default for Decision {
    #[inline]
    fn default() -> Self {
        Self {
            verdict: Verdict::Allow,
            at: Timestamp::EPOCH,
            trace: TraceId::default(),
            generation: 0,
            readings: ArrayVec::new(),
            binding: None,
            ready_at: None,
            delay: Span::ZERO,
            warning: false,
            warned_by: None,
            penalty: None,
            disclosure: Disclosure::Full,
            listed: None,
            degraded: None,
            escalations: ArrayVec::new(),
        }
    }
}

impl Decision {
    /// Whether the request may cross.
    #[must_use]
    pub const fn allowed(&self) -> bool {
        self.verdict.allows()
    }

    /// The reading whose figures are shown.
    #[must_use]
    pub fn bound_by(&self) -> Option<&Reading> {
        self.readings.get(self.binding?)
    }

    /// The rule that binds, looked up in the policy this was decided under.
    #[must_use]
    pub fn rule<'p>(&self, policy: &'p Policy) -> Option<&'p Rule> {
        policy.rules().get(self.bound_by()?.rule)
    }

    /// If denied, how long until it is worth coming back.
    #[must_use]
    pub fn retry_after(&self) -> Option<Span> {
        if self.allowed() { None } else { self.ready_at.map(|ready| ready.since(self.at)) }
    }

    /// `resetAt` in Unix seconds: on a denial now and the whole seconds of `retryAfter`.
    #[must_use]
    pub fn reset_at(&self) -> Option<u64> {
        if self.allowed() {
            return self.bound_by()?.reset_if_allowed(self.at);
        }
        self.ready_at.map(|ready| told_reset(ready, self.at))
    }

    /// Takes over the figures of a later look at the same limits, and the limits that bind by them: what was decided, and
    /// what it cost, stays.
    pub fn refresh(&mut self, look: &Self, policy: &Policy) {
        if look.readings.len() != self.readings.len() {
            return;
        }
        for (own, later) in self.readings.iter_mut().zip(&look.readings) {
            *own = Reading { cost: own.cost, charged: own.charged, ..*later };
        }
        self.at = look.at;
        if self.allowed() {
            self.binding = tightest(self);
            self.disclosure = self.rule(policy).map_or(Disclosure::Full, |rule| rule.disclosure);
        }
    }

    /// Whether it was denied because the store could not answer. What is not on disk yet, or was counted by a shared budget,
    /// was decided all the same.
    #[must_use]
    pub fn unavailable(&self) -> bool {
        let decided = |reason| matches!(reason, Degraded::Journal | Degraded::SharedBudget);
        !self.allowed() && self.degraded.is_some_and(|reason| !decided(reason))
    }

    /// Whether the client is banned.
    #[must_use]
    pub const fn banned(&self) -> bool {
        matches!(self.verdict, Verdict::Ban)
    }
}

impl Plan<'_> {
    /// The decision that an outcome is.
    pub fn decide(&self, outcome: &Outcome) -> Decision {
        let mut decision = Decision::default();
        self.decide_into(outcome, &mut decision);
        decision
    }

    /// As [`decide`](Self::decide), into a decision that is already there: moving one takes as long as making it.
    pub fn decide_into(&self, outcome: &Outcome, decision: &mut Decision) {
        self.prepare(decision);
        self.conclude(outcome, decision);
    }

    /// The first half of [`decide_into`](Self::decide_into), before the store is asked: what is said of every limit whatever
    /// is left of it. While that is written, memory that was asked for arrives.
    pub fn prepare(&self, decision: &mut Decision) {
        self.begin(decision);
        for met in &self.met {
            let _ = decision.readings.try_push(Reading {
                rule: met.index,
                enforced: met.enforced(),
                allowed: false,
                limit: met.limit.shown_quota(),
                period: met.limit.shown_period(),
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

    /// The second half, of a decision that was [prepared](Self::prepare) by this plan.
    pub fn conclude(&self, outcome: &Outcome, decision: &mut Decision) {
        let now = outcome.at;
        decision.at = now;
        if let Some(ban) = self.banned(now) {
            decision.readings.clear();
            return self.tell_ban(ban, outcome.behind_ban, decision);
        }
        match self.listed {
            Some(Listed::Deny) => {
                decision.verdict = Verdict::Ban;
                return;
            }
            Some(Listed::Allow) => return,
            None => {}
        }
        if outcome.has_stand_ins() {
            decision.degraded = Some(Degraded::SharedBudget);
        }
        let denied_by_limit = self.read(outcome, decision);
        decision.escalations.extend(outcome.escalations.iter().copied());
        if let Some((subject, penalty)) = outcome.penalty {
            self.penalise(decision, subject, penalty, outcome.denied_until);
            return self.warn(outcome, decision);
        }
        if denied_by_limit || outcome.escalations.iter().any(|strike| !strike.rung.allows()) {
            self.refuse(outcome, now, decision);
            self.warn(outcome, decision);
        } else {
            decision.binding = tightest(decision);
            let warning = outcome.escalations.iter().find(|strike| strike.rung.warn);
            decision.warned_by = warning.and_then(|strike| self.warned_by(strike.subject, outcome));
            decision.warning = warning.is_some();
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

    /// Warns a client that is denied and not banned while strikes count. Of several ladders, one with a cookie.
    fn warn(&self, outcome: &Outcome, decision: &mut Decision) {
        if decision.verdict != Verdict::Deny {
            return;
        }
        let warned = (0..self.subjects.len()).filter_map(|subject| self.warned_by(subject, outcome));
        let has_no_cookie = |warned: &WarnedBy| {
            self.policy.ladders.get(warned.ladder).is_none_or(|ladder| ladder.warning_cookie.is_none())
        };
        decision.warned_by = warned.min_by_key(has_no_cookie);
        decision.warning = decision.warned_by.is_some();
    }

    /// The warning of a subject's ladder, while its strikes count.
    fn warned_by(&self, subject: usize, outcome: &Outcome) -> Option<WarnedBy> {
        let until = outcome.warned_until.get(subject).copied().filter(|until| *until > Timestamp::EPOCH)?;
        Some(WarnedBy { ladder: self.subjects.get(subject)?.ladder_index, until })
    }

    /// An operator's ban: it, the limits and the penalties behind it must all be over. Whoever is denied by a list as well
    /// has no moment to come back at, nor has whoever is banned for good.
    fn tell_ban(&self, ban: Banned, behind: Timestamp, decision: &mut Decision) {
        decision.verdict = Verdict::Ban;
        decision.penalty = Some(ban.layer);
        let is_listed = self.listed == Some(Listed::Deny);
        decision.ready_at = ban.until.max(behind).unless_never().filter(|_| !is_listed);
    }

    /// A limit denies, or a rung that this request has reached.
    fn refuse(&self, outcome: &Outcome, now: Timestamp, decision: &mut Decision) {
        let harsh = outcome.escalations.iter().filter(|strike| !strike.rung.allows());
        let penalty_ends = harsh.clone().filter_map(|strike| self.rung_ends(strike, now)).max();
        let banned = harsh.clone().any(|strike| strike.rung.ban.is_some());
        decision.verdict = if banned { Verdict::Ban } else { Verdict::Deny };
        let struck = harsh.filter_map(|strike| self.met.iter().position(|met| met.charge == strike.charge));
        decision.binding = longest_wait(decision, struck);
        let waits = decision.bound_by().map_or(Some(now), |reading| reading.ready_at().or(allowed_now(reading, now)));
        decision.ready_at = waits.map(|ready| ready.max(penalty_ends.unwrap_or(now)));
    }

    /// What the policy says to do when the store fails: the strictest of its enforced rules.
    #[must_use]
    pub fn on_store_error(&self) -> OnStoreError {
        let modes = self.met.iter().filter(|met| met.enforced()).map(|met| met.rule.on_store_error);
        modes.fold(OnStoreError::Open, |strictest, mode| match (strictest, mode) {
            (OnStoreError::Closed, _) | (_, OnStoreError::Closed) => OnStoreError::Closed,
            (OnStoreError::Local, _) | (_, OnStoreError::Local) => OnStoreError::Local,
            (OnStoreError::Open, OnStoreError::Open) => OnStoreError::Open,
        })
    }

    /// The decision when the store failed and the policy is open or closed. Lists need no store and still hold.
    pub fn decide_blind(&self, open: bool, reason: Degraded, now: Timestamp) -> Decision {
        let mut decision = Decision::default();
        self.begin(&mut decision);
        decision.at = now;
        decision.degraded = Some(reason);
        if let Some(ban) = self.banned(now) {
            self.tell_ban(ban, now, &mut decision);
            return decision;
        }
        match self.listed {
            Some(Listed::Deny) => decision.verdict = Verdict::Ban,
            None if !open => {
                decision.verdict = Verdict::Deny;
                decision.ready_at = Some(now.plus(Span::SECOND));
            }
            Some(Listed::Allow) | None => {}
        }
        decision
    }

    /// What a request that is to be slowed gets where no more can wait: the denial of its tightest limit, as if that had
    /// just been used up. Nobody can tell it from a real one. The caller gives back what the request was charged.
    pub fn decide_as_full(&self, outcome: &Outcome) -> Decision {
        let now = outcome.at;
        let tightest = self.decide(outcome).binding;
        let full = tightest.and_then(|binding| self.met.get(binding)).map(|met| met.charge);
        let mut uncharged = outcome.clone();
        for (index, (settled, charge)) in uncharged.settled.iter_mut().zip(&self.bill.charges).enumerate() {
            settled.mark = None;
            if Some(index) == full {
                let blocked = charge.terms.block_for.map(|span| now.plus(span));
                settled.look.ready_at = charge
                    .limit
                    .ready_if_full(charge.cost, &settled.look, now, self.trace())
                    .max(blocked.unwrap_or(now));
                settled.look.allowed = false;
                settled.look.remaining = 0;
            }
        }
        let mut decision = Decision::default();
        self.prepare(&mut decision);
        decision.at = now;
        self.read(&uncharged, &mut decision);
        decision.verdict = Verdict::Deny;
        decision.binding = tightest;
        // Where no limit is met at all, there is nothing to wait for but the others.
        decision.ready_at = decision.bound_by().map_or(Some(now.plus(Span::SECOND)), Reading::ready_at);
        let bound = tightest.and_then(|binding| self.met.get(binding));
        decision.disclosure = bound.map_or(Disclosure::Full, |met| met.rule.disclosure);
        self.warn(outcome, &mut decision);
        if full.is_some_and(|charge| outcome.would_warn(charge)) {
            let subject = bound.and_then(|met| self.subjects.get(met.subject?));
            decision.warned_by =
                subject.map(|subject| WarnedBy { ladder: subject.ladder_index, until: now.plus(subject.ladder.decay) });
            decision.warning = decision.warned_by.is_some();
        }
        decision
    }

    /// What every decision begins with, in place of whatever was decided here before.
    #[inline]
    fn begin(&self, decision: &mut Decision) {
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

    /// Adds to every reading what is left of its limit; says whether an enforced one denies.
    fn read(&self, outcome: &Outcome, decision: &mut Decision) -> bool {
        let mut denied = false;
        for (reading, met) in decision.readings.iter_mut().zip(&self.met) {
            let Some(Settled { look, mark, lifted, .. }) = outcome.settled.get(met.charge) else { break };
            // A record charges what is enforced, whether or not it fits.
            reading.allowed = look.allowed || (self.verb() == Verb::Record && reading.enforced);
            denied |= reading.enforced && !reading.allowed && !lifted;
            (reading.remaining, reading.resets) = match mark {
                Some(mark) => (look.remaining.saturating_sub(mark.amount), look.reset_if_charged),
                None => (look.remaining, look.reset_if_not),
            };
            reading.charged = mark.is_some();
            reading.ready = if reading.allowed { Timestamp::MAX } else { look.ready_at };
        }
        denied
    }

    /// Who waits for the last penalty and for the limits behind it gets in.
    fn penalise(&self, decision: &mut Decision, subject: usize, penalty: Penalty, until: Timestamp) {
        decision.penalty = self.subjects.get(subject).map(|subject| subject.layer);
        decision.disclosure = self.subjects.get(subject).map_or(Disclosure::Full, |subject| subject.disclosure);
        decision.verdict = match penalty {
            Penalty::CoolDown(_) => Verdict::Deny,
            Penalty::Ban(_) => Verdict::Ban,
        };
        let denying = decision.readings.iter().filter(|reading| reading.enforced && !reading.allowed);
        let limits = denying.map(|reading| reading.ready).max();
        decision.ready_at = limits.map_or(until, |ready| ready.max(until)).unless_never();
    }

    /// When the penalty of a strike ends.
    fn rung_ends(&self, strike: &Escalation, now: Timestamp) -> Option<Timestamp> {
        let cooldown = strike.rung.cooldown.map(|span| now.plus(span));
        cooldown.max(strike.banned_until)
    }
}

/// A reading that allows is ready now.
fn allowed_now(reading: &Reading, now: Timestamp) -> Option<Timestamp> {
    reading.allowed.then_some(now)
}

/// Of the limits that deny, the one with the longest wait; never is longest. The first of equals: layer, then file. With
/// none that denies, the limit that struck.
fn longest_wait(decision: &Decision, mut struck: impl Iterator<Item = usize>) -> Option<usize> {
    let denying = decision.readings.iter().enumerate().filter(|(_, reading)| reading.enforced && !reading.allowed);
    let wait = |reading: &Reading| reading.ready;
    let mut longest: Option<(usize, Timestamp)> = None;
    for (index, reading) in denying {
        if longest.is_none_or(|(_, known)| wait(reading) > known) {
            longest = Some((index, wait(reading)));
        }
    }
    longest.map(|(index, _)| index).or_else(|| struck.next())
}

/// Of the limits that allow, the one with room for the fewest further requests of this cost.
fn tightest(decision: &Decision) -> Option<usize> {
    let enforced = decision.readings.iter().enumerate().filter(|(_, reading)| reading.enforced);
    // Nearly all cost one, and a division takes as long as a dozen other steps.
    let further = |reading: &Reading| match reading.cost {
        0 | 1 => reading.remaining,
        cost => reading.remaining.checked_div(cost).unwrap_or(0),
    };
    enforced.min_by_key(|(_, reading)| further(reading)).map(|(index, _)| index)
}

/// Between one and three seconds. Drawn from the id of the decision under the policy's secret: a client may read the id,
/// and must not be able to tell the delay from it.
fn shadow_delay(key: DigestKey, trace: TraceId) -> Span {
    let (low, high) = SHADOW_DELAY_MS;
    let width = u128::from(high.saturating_sub(low).saturating_add(1));
    let mut drawn = key.begin(Domain::Delay);
    drawn.bytes(Part::Fact, &trace.to_u128().to_be_bytes());
    let spread = u64::try_from(drawn.finish().to_u128().checked_rem(width).unwrap_or(0)).unwrap_or(0);
    Span::from_millis(low.saturating_add(spread))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::balance::Balance;
    use crate::facts::Facts;
    use crate::headers::{BodyForm, denial_body, header_fields};
    use crate::policy::{BanSource, Banned, Rank, Who};
    use crate::settle::settle;

    /// Everything a client reads of a denial.
    fn read(decision: &Decision, policy: &Policy, facts: &Facts<'_>) -> String {
        let bodies = [BodyForm::Json, BodyForm::Problem].map(|form| denial_body(decision, policy, facts, form));
        format!("{:?} {bodies:?}", header_fields(decision, policy))
    }

    /// A shadow-banned request with nobody to wait for it reads as the denial after the limit's last unit does.
    #[track_caller]
    fn check(rule: &str, units: u64) {
        let more = "[[rule]]\nname = \"wide\"\nper = [\"user\"]\nlimit = \"1000/day\"\n";
        let text = format!("{more}[[rule]]\nname = \"r\"\nper = [\"user\"]\n{rule}");
        let policy = Policy::parse(&text, &|_| None).unwrap();
        let now = Timestamp::from_secs(1_767_225_630);
        let facts = Facts { user: Some("u1"), trace: TraceId::from_u128(7), ..Facts::default() };
        let plan = policy.plan(&facts).unwrap();
        let mut balances = vec![Balance::default(); 2];
        for _ in 1..units {
            assert!(plan.decide(&settle(plan.bill(), &mut balances, &mut [], now)).allowed());
        }
        let before = balances.clone();
        let outcome = settle(plan.bill(), &mut balances, &mut [], now);
        let refused = plan.decide_as_full(&outcome);
        assert_eq!((refused.verdict, refused.delay), (Verdict::Deny, Span::ZERO));
        assert!(refused.readings.iter().all(|reading| !reading.charged));
        // Somebody who has used up the narrow limit, and of the wide one as much as the refused request found.
        balances[0] = before[0].clone();
        let genuine = plan.decide(&settle(plan.bill(), &mut balances, &mut [], now));
        assert_eq!(genuine.verdict, Verdict::Deny);
        assert_eq!(read(&refused, &policy, &facts), read(&genuine, &policy, &facts), "{rule}");
    }

    /// Clients may read the id of a decision. Woken by drawing the delay from the id alone.
    #[test]
    fn the_id_of_a_decision_does_not_tell_its_delay() {
        let ids =
            || (0..64).map(|n: u128| TraceId::from_u128(n.wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835)));
        let delays = |key: [u8; 16]| ids().map(|id| shadow_delay(DigestKey::new(key), id)).collect::<Vec<_>>();
        let (one, other) = (delays([1; 16]), delays([2; 16]));
        let alike = one.iter().zip(&other).filter(|(one, other)| one == other).count();
        assert!(alike < 8, "{alike} of 64 delays are the same under another secret");
        let range = Span::SECOND..=Span::from_secs(3);
        assert!(one.iter().chain(&other).all(|delay| range.contains(delay)));
        // All of the range is used: no half of it is empty, which one delay in 2^64 pages would be.
        assert!(
            one.iter().any(|delay| *delay < Span::from_secs(2)) && one.iter().any(|delay| *delay > Span::from_secs(2))
        );
    }

    /// Everybody is banned, until a moment.
    #[derive(Debug)]
    struct Everybody(Timestamp);

    impl BanSource for Everybody {
        fn is_empty(&self) -> bool {
            false
        }

        fn find(&self, _: Who<'_>, _: Option<Rank>) -> Option<Banned> {
            Some(Banned { until: self.0, layer: Layer::User })
        }

        fn spellings(&self, _: &str) -> Vec<Box<str>> {
            Vec::new()
        }
    }

    /// Woken by leaving out `readings.clear()` in `conclude`, and `readings.clear()` in `begin`.
    #[test]
    fn a_ban_tells_of_no_limit_and_nothing_is_left_of_an_earlier_decision() {
        let policy = Policy::parse("[[rule]]\nname = 'r'\nper = ['user']\nlimit = '3/min'\n", &|_| None).unwrap();
        let (now, later) = (Timestamp::from_secs(1_767_225_630), Timestamp::from_secs(1_767_225_640));
        let policy = policy.with_bans(std::sync::Arc::new(Everybody(later)));
        let plan = policy.plan(&Facts { user: Some("u1"), ..Facts::default() }).unwrap();
        let mut balances = [Balance::default()];
        let mut decision = Decision::default();
        let (allow, ban) = ((later, Verdict::Allow, 1), (now, Verdict::Ban, 0));
        for (at, verdict, limits) in [allow, allow, ban, allow] {
            plan.decide_into(&settle(plan.bill(), &mut balances, &mut [], at), &mut decision);
            assert_eq!((decision.verdict, decision.readings.len(), decision.at), (verdict, limits, at));
        }
    }

    #[test]
    fn a_refusal_for_want_of_room_reads_as_any_other() {
        check("limit = \"3/min\"", 3);
        check("limit = \"7/min burst 2\"", 2);
        check("limit = \"3/h\"\nalgorithm = \"fixed-window\"", 3);
        check("limit = \"3/h\"\nalgorithm = \"fixed-window\"\nanchor = \"first\"", 3);
        check("limit = \"3/h\"\nalgorithm = \"sliding-window\"", 3);
        check("limit = \"3/h\"\nalgorithm = \"sliding-estimate\"", 3);
        check("limit = \"3/h\"\nalgorithm = \"sliding-log\"\nblock_for = \"2h\"", 3);
        check("limit = \"3\"\nalgorithm = \"concurrency\"", 3);
    }
}
