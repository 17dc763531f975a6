//! Decision, verdict, reading: the answer to one request.

mod escalations;
mod reading;

use std::fmt;
use std::time::Duration;

use crate::key::{DigestKey, Domain, Part, TraceId};
use crate::ladder::Penalty;
use crate::plan::{Plan, Verb};
use crate::policy::{Banned, Disclosure, Layer, Listed, OnStoreError, Policy, Rule};
use crate::settle::{Escalation, Outcome, Settled};
use crate::time::{Span, Timestamp};

pub use escalations::Escalations;
use reading::reset_of_denial;
pub use reading::{Reading, Readings};

/// A shadow ban delays a request by one to three seconds.
const SHADOW_DELAY_MS: (u64, u64) = (1_000, 3_000);

/// Whether a request may proceed, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// The request may proceed.
    Allow,
    /// The request may proceed, and its client is warned.
    Warn,
    /// The request may proceed after a delay. Clients never learn the reason.
    Slow,
    /// The request is denied.
    Deny,
    /// The request is denied, and its subject is banned.
    Ban,
}

impl Verdict {
    /// Returns the name on the wire.
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

    /// Returns whether the request may proceed.
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

/// The reason why a decision was made without the store, or with less than it needs from the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Degraded {
    /// The store did not answer in time.
    Timeout,
    /// The store answered with an error.
    StoreError,
    /// The store is full of keys that it must not evict.
    StoreFull,
    /// The request matched more rules than a plan holds.
    TooManyRules,
    /// The decision is correct, but the strikes that it added are not on disk yet.
    Journal,
    /// The store had no room for a new key, so the request was counted by a key that is shared by many.
    SharedBudget,
}

impl Degraded {
    /// Returns the reason's name on the wire.
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

/// The answer to one request, with the reasons for it.
#[derive(Debug, Clone)]
#[must_use = "a decision that nobody reads protects nothing"]
pub struct Decision {
    /// Whether the request may proceed.
    pub verdict: Verdict,
    /// When the decision was made.
    pub at: Timestamp,
    /// The id of the decision.
    pub trace: TraceId,
    /// The generation of the policy that decided.
    pub generation: u64,
    /// The figures of every limit that the request met, in the order of the policy's rules.
    pub readings: Readings,
    /// The index of the reading that the top-level figures are taken from.
    pub binding: Option<usize>,
    /// If denied: when a retry may succeed; `None` if never.
    pub ready_at: Option<Timestamp>,
    /// How long to wait before answering.
    pub(crate) delay: Span,
    /// Whether the client is warned: by this strike or, on a denial, because earlier strikes still count.
    pub warning: bool,
    /// If the client is warned: by which ladder, and until when.
    pub warned_by: Option<WarnedBy>,
    /// The layer of the penalty that denied, if one did.
    pub penalty: Option<Layer>,
    /// How much the client may learn: as configured by the binding rule, or by the rules that led to the penalty.
    pub disclosure: Disclosure,
    /// The kind of list that decided, if one did.
    pub listed: Option<Listed>,
    /// Why the decision is degraded, if it is.
    pub degraded: Option<Degraded>,
    /// The strikes that this request added.
    pub escalations: Escalations,
}

/// The ladder that warns a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WarnedBy {
    /// The ladder's index in the policy of the decision's generation.
    pub ladder: usize,
    /// When the strikes expire.
    pub until: Timestamp,
}

/// A decision that allows and has no readings: the starting point for [`Plan::prepare`].
impl Default for Decision {
    #[inline]
    fn default() -> Self {
        Self {
            verdict: Verdict::Allow,
            at: Timestamp::EPOCH,
            trace: TraceId::default(),
            generation: 0,
            readings: Readings::default(),
            binding: None,
            ready_at: None,
            delay: Span::ZERO,
            warning: false,
            warned_by: None,
            penalty: None,
            disclosure: Disclosure::Full,
            listed: None,
            degraded: None,
            escalations: Escalations::default(),
        }
    }
}

impl Decision {
    /// Returns whether the request may proceed.
    #[must_use]
    pub const fn allowed(&self) -> bool {
        self.verdict.allows()
    }

    /// Returns the reading that the top-level figures are taken from.
    #[must_use]
    pub fn bound_by(&self) -> Option<&Reading> {
        self.readings.get(self.binding?)
    }

    /// Returns the rule that binds. `policy` must be the one that decided.
    #[must_use]
    pub fn rule<'p>(&self, policy: &'p Policy) -> Option<&'p Rule> {
        policy.rules().get(self.bound_by()?.rule())
    }

    /// Returns, for a denial, the time until a retry may succeed; `None` if the request is allowed or never will be.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry_span().map(Duration::from)
    }

    /// Returns, for a denial, the value of a `Retry-After` field: whole seconds, rounded up, at least 1.
    #[must_use]
    pub fn retry_after_secs(&self) -> Option<u64> {
        self.retry_span().map(|wait| wait.secs_ceil().max(1))
    }

    pub(crate) fn retry_span(&self) -> Option<Span> {
        if self.allowed() { None } else { self.ready_at.map(|ready| ready.since(self.at)) }
    }

    /// Returns how long to wait before answering; not zero for a request of a shadow-banned subject.
    #[must_use]
    pub fn delay(&self) -> Duration {
        self.delay.into()
    }

    /// Returns `resetAt` in Unix seconds; for a denial, now plus the whole seconds of `retryAfter`.
    #[must_use]
    pub fn reset_at(&self) -> Option<u64> {
        if self.allowed() {
            return self.bound_by()?.reset_if_allowed(self.at);
        }
        self.ready_at.map(|ready| reset_of_denial(ready, self.at))
    }

    /// Replaces the figures by those of a later decision on the same limits, and recomputes which limit binds. The
    /// verdict and the cost stay.
    pub fn refresh(&mut self, later: &Self, policy: &Policy) {
        if later.readings.len() != self.readings.len() {
            return;
        }
        for (own, later) in self.readings.iter_mut().zip(&later.readings) {
            *own = Reading { cost: own.cost, charged: own.charged, ..*later };
        }
        self.at = later.at;
        if self.allowed() {
            self.binding = tightest(self);
            self.disclosure = self.rule(policy).map_or(Disclosure::Full, |rule| rule.disclosure);
        }
    }

    /// Returns whether the request was denied because the store could not answer.
    #[must_use]
    pub fn unavailable(&self) -> bool {
        // With these two the store did answer.
        let decided = |reason| matches!(reason, Degraded::Journal | Degraded::SharedBudget);
        !self.allowed() && self.degraded.is_some_and(|reason| !decided(reason))
    }

    /// Returns whether the client is banned.
    #[must_use]
    pub const fn banned(&self) -> bool {
        matches!(self.verdict, Verdict::Ban)
    }
}

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

    /// Does the second half of [`decide`](Self::decide) on a decision that this plan has [prepared](Self::prepare).
    pub fn conclude(&self, outcome: &Outcome, decision: &mut Decision) {
        let now = outcome.at;
        decision.at = now;
        if let Some(ban) = self.banned(now) {
            decision.readings.clear();
            return self.apply_ban(ban, outcome.behind_ban, decision);
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
        decision.escalations.extend_from_slice(&outcome.escalations);
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

    /// Warns a client that is denied but not banned while its strikes count. Prefers a ladder with a warning cookie.
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

    /// Returns the warning of a subject's ladder while its strikes count.
    fn warned_by(&self, subject: usize, outcome: &Outcome) -> Option<WarnedBy> {
        let until = outcome.warned_until.get(subject).copied().filter(|until| *until > Timestamp::EPOCH)?;
        Some(WarnedBy { ladder: self.subjects.get(subject)?.ladder_index, until })
    }

    /// Applies an operator's ban. A retry succeeds when the ban, the limits and the ladders' penalties are all over; never
    /// if a deny list names the caller too, or if the ban has no end.
    fn apply_ban(&self, ban: Banned, behind: Timestamp, decision: &mut Decision) {
        decision.verdict = Verdict::Ban;
        decision.penalty = Some(ban.layer);
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
        let waits = decision.bound_by().map_or(Some(now), |reading| reading.ready_at().or(allowed_now(reading, now)));
        decision.ready_at = waits.map(|ready| ready.max(penalty_ends.unwrap_or(now)));
    }

    /// Returns what to do when the store fails: the strictest `on_store_error` of the enforced rules.
    #[must_use]
    pub fn on_store_error(&self) -> OnStoreError {
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
            None if !open => {
                decision.verdict = Verdict::Deny;
                decision.ready_at = Some(now.plus(Span::SECOND));
            }
            Some(Listed::Allow) | None => {}
        }
        decision
    }

    /// Returns the answer to a request that should be slowed when no more requests can be delayed: a denial by its
    /// tightest limit, as if that had just been used up. Clients cannot tell it from a genuine denial. The caller refunds
    /// what the request was charged.
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
                settled.look.available = 0;
            }
        }
        let mut decision = Decision::default();
        self.prepare(&mut decision);
        decision.at = now;
        self.read(&uncharged, &mut decision);
        decision.verdict = Verdict::Deny;
        decision.binding = tightest;
        // Without any limit the only thing to wait for is a free place among the delayed requests.
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

    /// Resets `decision` to the state that every decision starts from.
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

    /// Fills in the figures that depend on stored state. Returns whether an enforced limit denies.
    fn read(&self, outcome: &Outcome, decision: &mut Decision) -> bool {
        let mut denied = false;
        for (reading, met) in decision.readings.iter_mut().zip(&self.met) {
            let Some(Settled { look, mark, lifted, .. }) = outcome.settled.get(met.charge) else { break };
            // A record charges enforced limits even when the cost does not fit.
            reading.allowed = look.allowed || (self.verb() == Verb::Record && reading.enforced);
            denied |= reading.enforced && !reading.allowed && !lifted;
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

    /// Returns when the penalty of a strike ends.
    fn rung_ends(&self, strike: &Escalation, now: Timestamp) -> Option<Timestamp> {
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
        if longest.is_none_or(|(_, known)| wait(reading) > known) {
            longest = Some((index, wait(reading)));
        }
    }
    longest.map(|(index, _)| index).or_else(|| struck.next())
}

/// Returns the enforced limit with room for the fewest further requests of this cost.
fn tightest(decision: &Decision) -> Option<usize> {
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

    /// Returns everything that a client can read of a denial.
    fn read(decision: &Decision, policy: &Policy, facts: &Facts<'_>) -> String {
        let bodies = [BodyForm::Json, BodyForm::Problem].map(|form| denial_body(decision, policy, facts, form));
        format!("{:?} {bodies:?}", header_fields(decision, policy))
    }

    /// Checks that a shadow-banned request that cannot be delayed looks like a genuine denial after the limit's last unit.
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
        // A caller who has used up the narrow limit, and of the wide one as much as the refused request found.
        balances[0] = before[0].clone();
        let genuine = plan.decide(&settle(plan.bill(), &mut balances, &mut [], now));
        assert_eq!(genuine.verdict, Verdict::Deny);
        assert_eq!(read(&refused, &policy, &facts), read(&genuine, &policy, &facts), "{rule}");
    }

    /// Clients can read the id of a decision. Woken by drawing the delay from the id alone.
    #[test]
    fn the_delay_cannot_be_computed_from_the_id() {
        let ids =
            || (0..64).map(|n: u128| TraceId::from_u128(n.wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835)));
        let delays = |key: [u8; 16]| ids().map(|id| shadow_delay(DigestKey::new(key), id)).collect::<Vec<_>>();
        let (one, other) = (delays([1; 16]), delays([2; 16]));
        let alike = one.iter().zip(&other).filter(|(one, other)| one == other).count();
        assert!(alike < 8, "{alike} of 64 delays are the same under another secret");
        let range = Span::SECOND..=Span::from_secs(3);
        assert!(one.iter().chain(&other).all(|delay| range.contains(delay)));
        // Both halves of the range are used; by chance one would be empty once in 2^127 runs.
        assert!(
            one.iter().any(|delay| *delay < Span::from_secs(2)) && one.iter().any(|delay| *delay > Span::from_secs(2))
        );
    }

    /// A ban source that bans every caller until a moment.
    #[derive(Debug)]
    struct EveryoneBanned(Timestamp);

    impl BanSource for EveryoneBanned {
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
    fn a_ban_has_no_readings_and_a_reused_decision_keeps_nothing() {
        let policy = Policy::parse("[[rule]]\nname = 'r'\nper = ['user']\nlimit = '3/min'\n", &|_| None).unwrap();
        let (now, later) = (Timestamp::from_secs(1_767_225_630), Timestamp::from_secs(1_767_225_640));
        let policy = policy.with_bans(std::sync::Arc::new(EveryoneBanned(later)));
        let plan = policy.plan(&Facts { user: Some("u1"), ..Facts::default() }).unwrap();
        let mut balances = [Balance::default()];
        let mut decision = Decision::default();
        let (allow, ban) = ((later, Verdict::Allow, 1), (now, Verdict::Ban, 0));
        for (at, verdict, limits) in [allow, allow, ban, allow] {
            let outcome = settle(plan.bill(), &mut balances, &mut [], at);
            plan.prepare(&mut decision);
            plan.conclude(&outcome, &mut decision);
            assert_eq!((decision.verdict, decision.readings.len(), decision.at), (verdict, limits, at));
        }
    }

    #[test]
    fn a_refused_shadow_ban_looks_like_a_genuine_denial() {
        check("limit = \"3/min\"", 3);
        check("limit = \"7/min burst 2\"", 2);
        check("limit = \"3/h\"\nalgorithm = \"fixed-window\"", 3);
        check("limit = \"3/h\"\nalgorithm = \"fixed-window\"\nanchor = \"first\"", 3);
        check("limit = \"3/h\"\nalgorithm = \"sliding-window\"", 3);
        check("limit = \"3/h\"\nalgorithm = \"sliding-estimate\"", 3);
        check("limit = \"3/h\"\nalgorithm = \"sliding-log\"\nblock_for = \"2h\"", 3);
        check("limit = \"3\"\nalgorithm = \"concurrency\"", 3);
    }

    /// A decision is returned by value, so it must stay small.
    #[test]
    fn a_decision_takes_little_room() {
        assert!(size_of::<Decision>() <= 640, "{} bytes", size_of::<Decision>());
    }

    /// The seventh reading and those after it are on the heap.
    #[test]
    fn a_request_that_meets_sixteen_rules_has_sixteen_readings() {
        let rule = |n: u32| format!("[[rule]]\nname = 'r{n}'\nper = ['user']\nlimit = '{}/min'\n", n + 1);
        let policy = Policy::parse(&(0..16).map(rule).collect::<String>(), &|_| None).unwrap();
        let plan = policy.plan(&Facts { user: Some("u1"), ..Facts::default() }).unwrap();
        let mut balances = vec![Balance::default(); 16];
        let now = Timestamp::from_secs(1_767_225_630);
        let decision = plan.decide(&settle(plan.bill(), &mut balances, &mut [], now));
        let remaining: Vec<u64> = decision.readings.iter().map(|reading| reading.remaining).collect();
        assert_eq!(remaining, (0..16).collect::<Vec<u64>>());
        assert_eq!(decision.binding, Some(0));
    }
}
