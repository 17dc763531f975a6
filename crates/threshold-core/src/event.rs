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
//!         + r#""strikes":null,"shadowUntil":null,"bannedUntil":null,"traceId":null,"#
//!         + r#""limits":[{"rule":"posts","layer":"user","mode":"enforce","allowed":false,"limit":1,"periodMs":3600000,"remaining":0,"#
//!         + r#""cost":1,"resetAt":1767229260,"retryAfter":3660}]}"#
//! );
//! assert_eq!(Event::from_json(&event.to_json())?, event);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod json;
mod limit;
pub mod sql;

use std::fmt;

pub use json::EventError;
pub use limit::{EventLimit, MAX_LIMITS};

use crate::caller::Caller;
use crate::decision::{Decision, Verdict};
use crate::facts::Facts;
use crate::headers::iso_8601;
use crate::key::TraceId;
use crate::path::normalize_method;
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
    /// The layer of the rule or the penalty that decided; `None` if a list did.
    pub layer: Option<Layer>,
    /// Whether the request was denied.
    pub blocked: bool,
    /// The tenant.
    pub tenant: Option<Box<str>>,
    /// The user.
    pub user_id: Option<Box<str>>,
    /// The endpoint, `METHOD:/pattern`. It is never the path itself, which may hold secrets.
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
        let rule = decision.rule(policy);
        let layer = decision.penalty.or_else(|| rule.map(|rule| rule.layer));
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
            strike: harshest.and_then(|strike| names.strike(strike, decision)),
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
            trace: _,
            limits: _,
        } = other;
        // Strikes are told apart by their number, which is different each time.
        (self.layer, self.blocked, self.verdict) == (*layer, *blocked, *verdict)
            && (&self.ip, &self.user_id, &self.tenant) == (ip, user_id, tenant)
            && (&self.endpoint, &self.rule, &self.strike) == (endpoint, rule, strike)
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

    /// Removes everything that tells callers apart, so that the events of many callers can be counted together.
    #[must_use]
    pub fn without_names(self) -> Self {
        Self {
            tenant: None,
            user_id: None,
            endpoint: None,
            ip: None,
            rule: None,
            strike: None,
            limits: Box::default(),
            ..self
        }
    }
}

/// Rounds down to whole milliseconds.
pub(crate) const fn in_millis(at: Timestamp) -> Timestamp {
    Timestamp::from_micros(at.micros().saturating_sub(at.micros() % 1_000))
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
        if hides { self.policy.key().redact(text).into() } else { self.bounded(text) }
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
            return Some(self.bounded(given));
        }
        let pattern = self.policy.path_pattern(rule, facts)?;
        let method = facts.method.map_or("*".into(), normalize_method);
        Some(self.bounded(&format!("{method}:{pattern}")))
    }

    /// Returns a strike with its subject: the identity in the `per` of the rule that was exceeded.
    fn strike(&self, strike: &Escalation, decision: &Decision) -> Option<Strike> {
        let rules = decision.readings.iter().filter(|reading| reading.enforced).map(|reading| {
            let rule = self.policy.rules().get(reading.rule())?;
            let subject = self.policy.subjects.get(rule.subject?)?;
            Some((!reading.allowed, rule, subject))
        });
        // A warning lets a request pass a full limit, so that its reading may look as if it had room.
        let (_, rule, subject) = rules.flatten().max_by_key(|(is_full, ..)| *is_full)?;
        let decay = self.policy.ladders.get(subject.ladder).map(|ladder| ladder.decay)?;
        let parts: Vec<String> = subject.per.iter().map(|per| self.part(per, rule)).collect();
        Some(Strike {
            subject: self.bounded(&parts.join(",")),
            strikes: strike.strikes,
            shadow_until: strike.shadowed.then(|| in_millis(decision.at.plus(decay))),
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
mod tests {
    use super::*;
    use crate::ledger::Ledger;
    use crate::plan::Verb;
    use crate::time::Span;

    const POLICY: &str = r#"
        [identity]
        log_identifiers = true
        [[rule]]
        name = "address"
        layer = "edge"
        per = ["ip"]
        match = { path = "/pages/**" }
        limit = "1/h"
        [[rule]]
        name = "posts"
        layer = "user"
        per = ["user"]
        match = { method = "POST", path = "/api/posts/*" }
        limit = "1/h"
        ladder = "quick"
        strike = "request"
        [ladders.quick]
        rungs = ["warn", "cooldown 1s + shadow", "ban 24h"]
        decay = "2h"
    "#;

    /// Returns the events of the same request at these seconds.
    fn events(policy: &str, facts: &Facts<'_>, seconds: impl IntoIterator<Item = u64>) -> Vec<Option<Event>> {
        let policy = Policy::parse(policy, &|_| None).unwrap();
        let mut ledger = Ledger::default();
        let mut event = |second| {
            let now = Timestamp::from_micros(1_767_225_600_123_456).plus(Span::from_secs(second));
            let decision = ledger.decide(&policy, Verb::Check, facts, now).unwrap().decision;
            Event::from_decision(&decision, facts, &policy, || EventId::new([7; 16]))
        };
        seconds.into_iter().map(&mut event).collect()
    }

    fn poster<'a>() -> Facts<'a> {
        Facts {
            ip: "2001:db8:1:2:3::4".parse().ok(),
            user: Some("u1"),
            tenant: Some("acme"),
            method: Some("post"),
            path: Some("/api/posts/17?token=secret"),
            ..Facts::default()
        }
    }

    #[test]
    fn an_id_is_a_uuid_and_reads_back() {
        for random in [[0; 16], [0xff; 16], [0x5a; 16]] {
            let text = EventId::new(random).to_string();
            assert_eq!(text.len(), 36);
            assert_eq!((text.as_bytes()[14], text.as_bytes()[8]), (b'4', b'-'));
            assert!(matches!(text.as_bytes()[19], b'8' | b'9' | b'a' | b'b'), "{text}");
            assert_eq!(EventId::parse(&text), Some(EventId::new(random)));
            assert_eq!(EventId::parse(&text.to_uppercase()), Some(EventId::new(random)));
        }
        assert_eq!(
            EventId::parse("01020304-0506-0708-090a-0b0c0d0e0f10").unwrap().0,
            0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10
        );
        for wrong in ["", "0", "+1020304-0506-0708-090a-0b0c0d0e0f10", "01020304050607-08-090a-0b0c0d0e0f1011", "é"] {
            assert_eq!(EventId::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn denials_warnings_and_strikes_are_recorded_and_nothing_else() {
        let seen = events(POLICY, &poster(), [0, 1, 2, 4, 5, 3_700]);
        let verdicts: Vec<_> = seen.iter().map(|event| event.as_ref().map(|event| event.verdict)).collect();
        use Verdict::{Ban, Deny, Warn};
        assert_eq!(verdicts, [None, Some(Warn), Some(Deny), Some(Ban), Some(Ban), Some(Ban)]);
        let seen: Vec<Event> = seen.into_iter().flatten().collect();
        assert_eq!(seen.iter().map(|event| event.blocked).collect::<Vec<_>>(), [false, true, true, true, true]);
        assert!(seen.iter().all(|event| event.layer == Some(Layer::User)));
        let strikes: Vec<_> = seen.iter().map(|event| event.strike.as_ref()).collect();
        let [Some(first), Some(second), Some(third), None, None] = strikes[..] else { panic!("{strikes:?}") };
        assert_eq!([first.strikes, second.strikes, third.strikes], [1, 2, 3]);
        assert!([first, second, third].iter().all(|strike| &*strike.subject == "user=u1"));
        let at = |second: u64| Timestamp::from_micros(1_767_225_600_123_000).plus(Span::from_secs(second));
        assert_eq!((first.shadow_until, first.banned_until), (None, None));
        assert_eq!((second.shadow_until, second.banned_until), (Some(at(2 + 7_200)), None));
        assert_eq!((third.shadow_until, third.banned_until), (Some(at(4 + 7_200)), Some(at(4 + 86_400))));
        let ip = seen[0].ip.as_deref();
        assert_eq!(ip, Some("2001:db8:1:2::/64"), "addresses that share a budget are one");
        assert_eq!(seen[0].endpoint.as_deref(), Some("POST:/api/posts/*"), "the path may hold secrets");
        assert_eq!(seen[0].at, at(1), "whole milliseconds");
        let lines: Vec<String> = seen.iter().filter_map(Event::escalation_to_json).collect();
        assert_eq!(lines.len(), 3);
        assert_eq!(
            lines[2],
            r#"{"event":"abuse_escalation","userId":"u1","warnings":3,"shadowBanned":true,"bannedUntil":1767312004,"#
                .to_owned()
                + r#""timestamp":"2026-01-01T00:00:04Z"}"#
        );
    }

    #[test]
    fn names_are_hidden_as_the_policy_says() {
        let hidden = |text: &str| text.starts_with('#') && text.len() == 17;
        let one = |policy: &str, facts: &Facts<'_>| events(policy, facts, [0, 0]).pop().flatten().unwrap();
        let open = one(POLICY, &poster());
        assert_eq!((open.tenant.as_deref(), open.user_id.as_deref()), (Some("acme"), Some("u1")));
        let closed = one(&POLICY.replace("log_identifiers = true", ""), &poster());
        assert_eq!(closed.tenant.as_deref(), Some("acme"));
        assert!(closed.user_id.as_deref().is_some_and(hidden) && closed.ip.as_deref().is_some_and(hidden));
        let subject = &closed.strike.as_ref().unwrap().subject;
        assert!(subject.strip_prefix("user=").is_some_and(hidden), "{subject}");
        let secret = "log_identifiers = true\ntenant = 'cookie:t'\nuser = 'header:authorization'";
        let secret =
            one(&POLICY.replace("log_identifiers = true", secret).replace("ladder = \"quick\"", ""), &poster());
        assert!(secret.tenant.as_deref().is_some_and(hidden) && secret.user_id.as_deref().is_some_and(hidden));
        assert_eq!(secret.ip.as_deref(), Some("2001:db8:1:2::/64"));
        assert_eq!(secret.strike, None);
    }

    /// Anyone can send a long name, and an event is stored.
    #[test]
    fn a_text_is_bounded_in_length() {
        let long = "x".repeat(MAX_TEXT + 1);
        let fits = "é".repeat(MAX_TEXT / 2);
        let facts =
            Facts { user: Some(&long), tenant: Some(&fits), endpoint: Some(&long), method: Some(&long), ..poster() };
        let facts = Facts { method: Some("POST"), ..facts };
        let event = events(POLICY, &facts, [0, 0]).pop().flatten().unwrap();
        assert_eq!(event.tenant.as_deref(), Some(fits.as_str()));
        let texts = [event.user_id.as_deref(), event.endpoint.as_deref()];
        assert!(texts.iter().all(|text| text.is_some_and(|text| text.len() == 17)), "{texts:?}");
        assert!(event.to_json().len() < 7 * MAX_TEXT + 768);
    }

    /// Woken by leaving out observed limits.
    #[test]
    fn an_event_has_the_figures_of_every_limit() {
        let policy = format!(
            "{POLICY}\n[[rule]]\nname = 'flow'\nlayer = 'tenant'\nper = ['tenant']\nmatch = {{ path = '/pages/**' }}\n\
             limit = '3'\nalgorithm = 'concurrency'\nmode = 'observe'"
        );
        let facts = Facts { path: Some("/pages/a"), ..poster() };
        let event = events(&policy, &facts, [0, 600]).pop().flatten().unwrap();
        let figures = |limit: &EventLimit| (limit.limit, limit.period, limit.remaining, limit.cost);
        let [address, flow] = &*event.limits else { panic!("{event:?}") };
        assert_eq!(
            (&*address.rule, address.layer, address.enforced, address.allowed),
            ("address", Layer::Edge, true, false)
        );
        assert_eq!(figures(address), (1, Some(3_600_000), 0, 1));
        assert_eq!((address.reset_at, address.retry_after), (Some(1_767_225_600 + 3_661), Some(3_060)));
        assert_eq!((&*flow.rule, flow.layer, flow.enforced, flow.allowed), ("flow", Layer::Tenant, false, true));
        assert_eq!((flow.limit, flow.period, flow.retry_after), (3, None, None));
    }

    #[test]
    fn equal_denials_are_one_event() {
        let facts = Facts { path: Some("/pages/a"), ..poster() };
        let seen: Vec<Event> = events(POLICY, &facts, 0..4).into_iter().flatten().collect();
        let (mut first, second) = (seen[0].clone(), &seen[1]);
        assert!(first.is_alike(second) && first != *second);
        first.merge(second);
        assert_eq!((first.count, first.id, first.at), (2, seen[0].id, seen[0].at));
        let other = events(POLICY, &Facts { user: Some("u2"), ..facts }, 0..2).pop().flatten().unwrap();
        assert!(!first.is_alike(&other));
        assert_ne!(first.limits, second.limits, "a second later");
        assert_eq!(other.clone().without_names().limits, Box::default());
        assert!(first.clone().without_names().is_alike(&other.without_names()));
        // The second strike is not the first.
        let strikes: Vec<Event> = events(POLICY, &poster(), 0..3).into_iter().flatten().collect();
        let mut later = strikes[0].clone();
        if let Some(strike) = &mut later.strike {
            strike.strikes = 2;
        }
        assert!(strikes[0].is_alike(&strikes[0]) && !strikes[0].is_alike(&later));
    }
}
