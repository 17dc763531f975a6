//! Events: what is recorded of decisions that stopped, warned or punished a caller.
//!
//! An event says who was stopped where, for statistics, alerts and later questions. Every host makes it from the decision in the same
//! way, and writes it as the same JSON:
//!
//! ```
//! use threshold_core::event::{Event, EventId};
//! use threshold_core::{Facts, Ledger, Policy, Timestamp, plan::Verb};
//!
//! let policy = Policy::parse(
//!     r#"
//!     [identity]
//!     log_identifiers = true
//!     [[rule]]
//!     name = "posts"
//!     layer = "user"
//!     per = ["user"]
//!     match = { method = "POST", path = "/api/posts" }
//!     limit = "1/h"
//!     "#,
//!     &|_| None,
//! )?;
//! let facts = Facts { user: Some("u1"), method: Some("POST"), path: Some("/api/posts"), ..Facts::default() };
//! let (mut ledger, now) = (Ledger::default(), Timestamp::from_secs(1_767_225_600));
//! let first = ledger.decide(&policy, Verb::Check, &facts, now)?.decision;
//! assert_eq!(Event::from_decision(&first, &facts, &policy, || EventId::new([1; 16])), None);
//! let denied = ledger.decide(&policy, Verb::Check, &facts, now)?.decision;
//! let event = Event::from_decision(&denied, &facts, &policy, || EventId::new([2; 16])).ok_or("a denial")?;
//! assert_eq!(
//!     event.to_json(),
//!     r#"{"id":"02020202-0202-4202-8202-020202020202","at":1767225600000,"layer":"user","blocked":true,"tenant":null,"#.to_owned()
//!         + r#""userId":"u1","endpoint":"POST:/api/posts","ip":null,"rule":"posts","verdict":"deny","count":1,"subject":null,"#
//!         + r#""strikes":null,"shadowUntil":null,"bannedUntil":null,"cause":"limit","until":null,"degraded":null,"traceId":null,"#
//!         + r#""limits":[{"rule":"posts","layer":"user","mode":"enforce","allowed":false,"limit":1,"periodMs":3600000,"remaining":0,"#
//!         + r#""cost":1,"resetAt":1767229260,"retryAfter":3660}]}"#
//! );
//! assert_eq!(Event::from_json(&event.to_json())?, event);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod json;
mod limit;
mod login;
pub mod sql;

use std::fmt;

pub use json::EventError;
pub use limit::{EventLimit, MAX_LIMITS};

use crate::caller::Caller;
use crate::decision::{Cause, Decision, Degraded, Verdict};
use crate::facts::Facts;
use crate::headers::iso_8601;
use crate::key::{TraceId, write_name};
use crate::path::normalize_method;
use crate::plan::Plan;
use crate::policy::{Layer, Per, Policy, Rule};
use crate::settle::Escalation;
use crate::text::printable;
use crate::time::Timestamp;

/// The longest text of an event, in bytes. A longer name appears as its digest.
pub const MAX_TEXT: usize = 256;

/// The most events in one batch, as `POST /v1/events` takes it.
pub const MAX_BATCH: usize = 1_000;

/// The id of an event: a random UUID. It tells whether an event that arrives twice is the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EventId(u128);

impl EventId {
    /// Creates an id from 16 random bytes, as a UUID of version 4.
    #[must_use]
    pub const fn new(random: [u8; 16]) -> Self {
        const VERSION: u128 = 0xf << 76;
        const VARIANT: u128 = 0b11 << 62;
        Self(u128::from_be_bytes(random) & !VERSION & !VARIANT | 4 << 76 | 0b10 << 62)
    }

    /// Parses a UUID of any version, in lower or upper case.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let is_hyphen = |at: usize| matches!(at, 8 | 13 | 18 | 23);
        let fits = text.len() == 36 && text.bytes().enumerate().all(|(at, byte)| is_hyphen(at) == (byte == b'-'));
        // `from_str_radix` takes a sign as well.
        if !fits || text.contains('+') {
            return None;
        }
        u128::from_str_radix(&text.replace('-', ""), 16).ok().map(Self)
    }
}

/// Formats the id as a UUID, in lower case.
impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = |shift: u32, digits: u32| {
            let mask = u128::MAX.checked_shr(128_u32.saturating_sub(digits.saturating_mul(4))).unwrap_or(0);
            self.0.checked_shr(shift).unwrap_or(0) & mask
        };
        write!(
            f,
            "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
            part(96, 8),
            part(80, 4),
            part(64, 4),
            part(48, 4),
            part(0, 12)
        )
    }
}

/// What is recorded of a decision, or of a block that an edge in front of Threshold reports.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Event {
    /// The id.
    pub id: EventId,
    /// When the decision was made, in whole milliseconds.
    pub at: Timestamp,
    /// The layer of the rule or the penalty that decided; `None` if a list did, or the store has no room.
    pub layer: Option<Layer>,
    /// Whether the request was denied.
    pub blocked: bool,
    /// The tenant.
    pub tenant: Option<Box<str>>,
    /// The user.
    pub user_id: Option<Box<str>>,
    /// The endpoint, `METHOD:/pattern`, or as the caller names it. What may be a secret in it is hidden:
    /// [`Policy::recorded_path`].
    pub endpoint: Option<Box<str>>,
    /// The address; of IPv6, the block that shares a budget.
    pub ip: Option<Box<str>>,
    /// The name of the rule that decided.
    pub rule: Option<Box<str>>,
    /// The verdict.
    pub verdict: Verdict,
    /// How many decisions this event stands for: at least 1. A host may record equal ones together.
    pub count: u64,
    /// The strike, if the request added one.
    pub strike: Option<Strike>,
    /// Why the request was denied; `None` if it was not, or if another system reports it without a cause.
    pub cause: Option<Cause>,
    /// When the ban, the penalty, the pause or the lock ends that denied; `None` if it has no end, or if something else denied.
    pub until: Option<Timestamp>,
    /// Why the decision is degraded, if it is.
    pub degraded: Option<Degraded>,
    /// The id of the decision.
    pub trace: TraceId,
    /// The limits that the request met, in the order of the policy's rules: at most [`MAX_LIMITS`].
    pub limits: Box<[EventLimit]>,
}

/// A strike, as events record it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Strike {
    /// The subject: `user=u1`.
    pub subject: Box<str>,
    /// Its strikes, this one included.
    pub strikes: u32,
    /// If the subject is shadow banned: until when, unless further strikes follow.
    pub shadow_until: Option<Timestamp>,
    /// If this strike bans the subject: until when.
    pub banned_until: Option<Timestamp>,
}

impl Event {
    /// Returns the event of a decision: of a denial, a warning or a strike. Other decisions are not recorded.
    ///
    /// Names appear as in log lines: secret ones as `#` and 16 hexadecimal digits, users and addresses too unless the policy has
    /// `log_identifiers = true`. `policy` must be the one that decided. `id` draws the id of an event that is recorded.
    #[must_use]
    pub fn from_decision(
        decision: &Decision,
        facts: &Facts<'_>,
        policy: &Policy,
        id: impl FnOnce() -> EventId,
    ) -> Option<Self> {
        Self::is_recorded(decision).then(|| Self::from_any_decision(decision, facts, policy, id()))
    }

    /// Returns whether a decision has an event: a denial, a warning, or a strike.
    #[must_use]
    #[inline]
    pub fn is_recorded(decision: &Decision) -> bool {
        !decision.allowed() || decision.verdict == Verdict::Warn || !decision.escalations.is_empty()
    }

    /// Returns the event of any decision, as [`from_decision`](Self::from_decision) does. A host may record some of the allowed
    /// requests, to explain them later.
    #[must_use]
    pub fn from_any_decision(decision: &Decision, facts: &Facts<'_>, policy: &Policy, id: EventId) -> Self {
        let harshest = decision.escalations.iter().max_by_key(|strike| (strike.banned_until, strike.strikes));
        let names = Names { caller: Caller::new(facts, policy), policy };
        let cause = decision.cause();
        // Few decisions need their plan once more: the same facts under the same policy have the same one.
        let plan = (harshest.is_some() || cause == Some(Cause::Outage)).then(|| policy.plan(facts).ok()).flatten();
        let closed =
            plan.as_ref().filter(|_| cause == Some(Cause::Outage)).and_then(|plan| closed_rule(plan, decision));
        // A strike has its own rule, which another one may be more used up than: an operator looks for what has brought the penalty.
        let struck = harshest.zip(plan.as_ref()).and_then(|(strike, plan)| plan.rule_of(strike.charge));
        let rule = struck.or_else(|| decision.rule(policy)).or(closed);
        let layer = decision.penalty_layer().filter(|_| struck.is_none()).or_else(|| rule.map(|rule| rule.layer));
        Self {
            id,
            at: in_millis(decision.at),
            layer,
            blocked: !decision.allowed(),
            tenant: names.tenant(),
            user_id: names.user(),
            endpoint: names.endpoint(rule),
            ip: names.address(),
            rule: rule.map(|rule| names.bounded(&rule.name)),
            verdict: decision.verdict,
            count: 1,
            strike: harshest.zip(plan.as_ref()).and_then(|(strike, plan)| names.strike(strike, plan, decision.at)),
            cause,
            until: decision.denied_until().map(in_millis).and_then(representable),
            degraded: decision.degraded,
            trace: decision.trace,
            limits: EventLimit::all(decision, &names),
        }
    }

    /// Returns whether another event differs only in its id, time, number, trace id and the figures of its limits, so that both can be recorded
    /// as one.
    #[must_use]
    pub fn is_alike(&self, other: &Self) -> bool {
        let Self {
            id: _,
            at: _,
            layer,
            blocked,
            tenant,
            user_id,
            endpoint,
            ip,
            rule,
            verdict,
            count: _,
            strike,
            cause,
            until,
            degraded,
            trace: _,
            limits: _,
        } = other;
        // Strikes are told apart by their number, which is different each time.
        (self.layer, self.blocked, self.verdict) == (*layer, *blocked, *verdict)
            && (&self.ip, &self.user_id, &self.tenant) == (ip, user_id, tenant)
            && (&self.endpoint, &self.rule, &self.strike) == (endpoint, rule, strike)
            && (self.cause, self.until, self.degraded) == (*cause, *until, *degraded)
    }

    /// Returns whether the caller has brought about the denial: such events count for their layer and in alerts. One without a cause,
    /// which another system reports, counts too.
    #[must_use]
    pub fn blames_caller(&self) -> bool {
        self.blocked && self.cause.is_none_or(Cause::blames_caller)
    }

    /// Counts the decisions of an event that is alike.
    pub fn merge(&mut self, other: &Self) {
        self.count = self.count.saturating_add(other.count);
    }

    /// Writes the log line of a strike as JSON, if the event has one: `abuse_escalation`.
    #[must_use]
    pub fn escalation_to_json(&self) -> Option<String> {
        let strike = self.strike.as_ref()?;
        let secs = |at: Timestamp| at.micros().checked_div(1_000_000);
        let value = serde_json::json!({
            "event": "abuse_escalation",
            "userId": self.user_id.as_ref().unwrap_or(&strike.subject),
            "warnings": strike.strikes,
            "shadowBanned": strike.shadow_until.is_some(),
            "bannedUntil": strike.banned_until.and_then(secs),
            "timestamp": secs(self.at).and_then(iso_8601),
        });
        Some(printable(&value.to_string()).into_owned())
    }

    /// Removes everything that tells callers apart but the layer, the verdict and the cause, so that the events of many callers can be counted together.
    #[must_use]
    pub fn without_names(self) -> Self {
        Self {
            tenant: None,
            user_id: None,
            endpoint: None,
            ip: None,
            rule: None,
            strike: None,
            until: None,
            degraded: None,
            limits: Box::default(),
            ..self
        }
    }
}

/// Rounds down to whole milliseconds.
pub(crate) const fn in_millis(at: Timestamp) -> Timestamp {
    Timestamp::from_micros(at.micros().saturating_sub(at.micros() % 1_000))
}

/// Returns a time if a reader of JSON takes it. One that is centuries away is as good as none.
fn representable(at: Timestamp) -> Option<Timestamp> {
    // More milliseconds do not fit into a number of JavaScript with their microseconds.
    (at.micros() < 1 << 53).then_some(at)
}

/// Returns the rule that denied because the store could not answer: the first one that decides so.
fn closed_rule<'p>(plan: &Plan<'p>, decision: &Decision) -> Option<&'p Rule> {
    // Without room, the store denies under every rule.
    if !matches!(decision.degraded, Some(Degraded::Timeout | Degraded::StoreError)) {
        return None;
    }
    let strictest = plan.on_store_error();
    plan.enforced_rules().find(|rule| rule.on_store_error == strictest)
}

/// The names of a request, as events show them.
struct Names<'a> {
    caller: Caller<'a>,
    policy: &'a Policy,
}

impl Names<'_> {
    /// Returns a text, or its digest if it is too long.
    fn bounded(&self, text: &str) -> Box<str> {
        if text.len() <= MAX_TEXT { text.into() } else { self.policy.key().redact(text).into() }
    }

    fn shown(&self, text: &str, hides: bool) -> Box<str> {
        let written = write_name(text);
        if hides || written.len() > MAX_TEXT { self.policy.key().redact(text).into() } else { written.into() }
    }

    fn hides_identifiers(&self) -> bool {
        !self.policy.identity().log_identifiers
    }

    fn tenant(&self) -> Option<Box<str>> {
        // A tenant is an organisation and not a person, so only a secret name is hidden.
        self.caller.tenant.map(|tenant| self.shown(tenant, self.policy.identity().secret_tenant))
    }

    fn user(&self) -> Option<Box<str>> {
        let hides = self.hides_identifiers() || self.policy.identity().secret_user;
        self.caller.user.map(|user| self.shown(user, hides))
    }

    fn address(&self) -> Option<Box<str>> {
        self.caller.group().map(|group| self.shown(&group.to_string(), self.hides_identifiers()))
    }

    fn endpoint(&self, rule: Option<&Rule>) -> Option<Box<str>> {
        let facts = self.caller.facts;
        if let Some(given) = facts.endpoint.filter(|given| !given.is_empty()) {
            return Some(self.bounded(&self.policy.recorded_endpoint(given)));
        }
        let pattern = self.policy.path_pattern(rule, facts)?;
        let method = facts.method.map_or("*".into(), normalize_method);
        Some(self.bounded(&format!("{method}:{pattern}")))
    }

    /// Returns a strike with its subject: the identity in the `per` of the rule that was struck.
    fn strike(&self, strike: &Escalation, plan: &Plan<'_>, at: Timestamp) -> Option<Strike> {
        let rule = plan.rule_of(strike.charge)?;
        let subject = self.policy.subjects.get(rule.subject?)?;
        let decay = self.policy.ladders.get(subject.ladder).map(|ladder| ladder.decay)?;
        let parts: Vec<String> = subject.per.iter().map(|per| self.part(per, rule)).collect();
        Some(Strike {
            subject: self.bounded(&parts.join(",")),
            strikes: strike.strikes,
            shadow_until: strike.shadowed.then(|| in_millis(at.plus(decay))),
            banned_until: strike.banned_until.map(in_millis),
        })
    }

    fn part(&self, per: &Per, rule: &Rule) -> String {
        let value = match per {
            Per::User => self.user(),
            Per::Ip => self.address(),
            Per::IpPrefix(_) => {
                self.caller.group_of(per).map(|group| self.shown(&group.to_string(), self.hides_identifiers()))
            }
            other => self.caller.part_text(other, rule, self.policy).map(Into::into),
        };
        match value {
            Some(value) => format!("{per}={value}"),
            // A missing name is replaced by the address.
            None => format!("ip={}", self.address().unwrap_or_default()),
        }
    }
}

#[cfg(test)]
mod tests;
