//! Decision, verdict, reading: the answer to one request.

mod cause;
mod decide;
mod escalations;
mod reading;

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use crate::key::TraceId;
use crate::policy::{Disclosure, Listed, Policy, Rule};
use crate::time::{Span, Timestamp};

pub use cause::{Cause, PenaltyInForce, PenaltyKind};
use decide::tightest;
pub use escalations::Escalations;
use reading::reset_of_denial;
pub use reading::{Reading, Readings};

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
    /// All reasons.
    pub const ALL: [Self; 6] =
        [Self::Timeout, Self::StoreError, Self::StoreFull, Self::TooManyRules, Self::Journal, Self::SharedBudget];

    /// Returns the reason with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| reason.name() == name)
    }

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
    /// The penalty that denied, if one did.
    pub penalty: Option<PenaltyInForce>,
    /// Why the binding limit denies. Meaningful only if a limit denied: nothing else sets it, so that an allowed request does not pay
    /// for it.
    pub(crate) denied_for: Cause,
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

/// A decision that allows and has no readings: the starting point for [`Plan::prepare`](crate::Plan::prepare).
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
            denied_for: Cause::Limit,
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

    /// Returns the decision as if it were made after its delay, for an answer whose request another program delays: the figures of its
    /// arrival would reveal the delay.
    #[must_use]
    pub fn after_delay(&self) -> Cow<'_, Self> {
        // Nearly every decision has none, and a copy is kilobytes.
        if self.delay.is_zero() {
            return Cow::Borrowed(self);
        }
        let mut later = self.clone();
        later.at = self.at.plus(self.delay);
        for reading in later.readings.iter_mut() {
            reading.resets = reading.resets_if_decided(self.at, later.at);
        }
        Cow::Owned(later)
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
        // Readings are matched by position, so with another number of them the figures of two different limits would be
        // mixed.
        if later.readings.len() != self.readings.len() {
            return;
        }
        for (own, later) in self.readings.iter_mut().zip(&later.readings) {
            *own = Reading { cost: own.cost, charged: own.charged, ..*later };
        }
        self.at = later.at;
        // A denial keeps its binding limit: the client was told to wait for that one.
        if self.allowed() {
            self.binding = tightest(self);
            self.disclosure = self.rule(policy).map_or(Disclosure::Full, |rule| rule.disclosure);
        }
    }

    /// Removes the readings at these indices, which must not contain the binding one.
    pub(crate) fn remove_readings(&mut self, is_removed: impl Fn(usize) -> bool) {
        self.binding = self.binding.map(|binding| (0..binding).filter(|index| !is_removed(*index)).count());
        self.readings.remove(is_removed);
    }

    /// Returns whether the client is banned.
    #[must_use]
    pub const fn banned(&self) -> bool {
        matches!(self.verdict, Verdict::Ban)
    }
}

#[cfg(test)]
mod tests {
    use super::decide::shadow_delay;
    use super::*;
    use crate::balance::Balance;
    use crate::facts::Facts;
    use crate::headers::{BodyForm, denial_body, header_fields};
    use crate::key::{Digest, DigestKey};
    use crate::policy::{BanSource, Banned, Layer, Rank, Who};
    use crate::settle::settle;

    /// Returns everything that a client can read of a denial.
    fn read(decision: &Decision, policy: &Policy, facts: &Facts<'_>) -> String {
        let bodies = [BodyForm::Json, BodyForm::Problem].map(|form| denial_body(decision, policy, facts, form));
        format!("{:?} {bodies:?}", header_fields(decision, policy))
    }

    /// Checks what a delayed answer says of its limit, with another charge as many seconds before it, if not 0.
    #[track_caller]
    fn check_delayed(algorithm: &str, limit: &str, earlier: u64) {
        let now = Timestamp::from_micros(1_767_225_630_400_000);
        let text = format!("[[rule]]\nname = 'r'\nper = ['user']\nlimit = '{limit}'\nalgorithm = '{algorithm}'\n");
        let policy = Policy::parse(&text, &|_| None).unwrap();
        let facts = Facts { user: Some("u1"), trace: TraceId::from_u128(7), ..Facts::default() };
        let plan = policy.plan(&facts).unwrap();
        let decide = |after: Span| {
            let mut balances = vec![Balance::default()];
            if earlier > 0 {
                drop(settle(plan.bill(), &mut balances, &mut [], now.minus(Span::from_secs(earlier))));
            }
            plan.decide(&settle(plan.bill(), &mut balances, &mut [], now.plus(after)))
        };
        let mut early = decide(Span::ZERO);
        assert_eq!(header_fields(&early.after_delay(), &policy), header_fields(&early, &policy));
        early.delay = Span::from_millis(2_700);
        let (told, expect) = (early.after_delay().reset_at(), decide(early.delay).reset_at());
        let most = if algorithm == "sliding-window" { 3 } else { 0 };
        assert!(told.unwrap().abs_diff(expect.unwrap()) <= most, "{algorithm} {limit} {earlier}: {told:?} {expect:?}");
    }

    /// Woken by: leaving out any of the cases in `resets_if_decided`.
    #[test]
    fn a_decision_after_its_delay_has_the_figures_of_one_made_then() {
        for algorithm in ["token-bucket", "fixed-window", "sliding-window", "sliding-log", "sliding-estimate"] {
            for limit in ["5/s", "5/min", "5/h"] {
                [0, 1, 40].into_iter().for_each(|earlier| check_delayed(algorithm, limit, earlier));
            }
        }
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
            Some(Banned { until: self.0, layer: Layer::User, id: Digest::from_u128(7) })
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
