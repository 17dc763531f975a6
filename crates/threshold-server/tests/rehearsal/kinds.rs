//! A recount of the kinds of rules that `recount` does not have, also without any of the program's code: by outcome, in bytes,
//! observed, concurrency, and every kind of rung. It keeps all charges of a key in a list and adds them up for every request.

use std::collections::{BTreeMap, BTreeSet};

use crate::logs::Event;

/// The policy that the recount implements.
pub(crate) const POLICY: &str = r#"
[ladders.every]
decay = "20min"
rungs = ["warn", "warn", "cooldown 1min", "cooldown 2min + shadow", "ban 5min"]

[[rule]]
name = "watched"
layer = "edge"
per = ["ip"]
limit = "4/min"
algorithm = "fixed-window"
mode = "observe"

[[rule]]
name = "misses"
layer = "edge"
per = ["ip"]
limit = "5/10min"
algorithm = "sliding-log"
count = "status:404"

[[rule]]
name = "errors"
layer = "edge"
per = ["ip"]
limit = "2/min"
count = "status:401,404"

[[rule]]
name = "volume"
layer = "tenant"
per = ["tenant"]
limit = "50KB/5min"
algorithm = "sliding-window"
buckets = 5

[[rule]]
name = "pace"
layer = "user"
per = ["user"]
limit = "8/2min"
algorithm = "fixed-window"
on_missing = "skip"
ladder = "every"

[[rule]]
name = "open"
layer = "endpoint"
per = ["ip"]
limit = "2"
algorithm = "concurrency"
"#;

/// How long a charge counts, in seconds.
enum Counted {
    /// Until the end of its window of the clock.
    Clock(u64),
    /// This long after it was made.
    Log(u64),
    /// This long after the end of its part of the window.
    Parts { part: u64, window: u64 },
    /// Until it has leaked out of the bucket, at one unit in this many seconds.
    Bucket(u64),
    /// Not at all: the log does not say how long requests lasted.
    Never,
}

impl Counted {
    /// Adds up the charges that still count.
    fn used(&self, charges: &[(u64, u64)], now: u64) -> u64 {
        let sum = |counts: &dyn Fn(u64) -> bool| {
            charges.iter().filter(|(at, _)| counts(*at)).map(|(_, cost)| *cost).sum::<u64>()
        };
        match self {
            Self::Clock(window) => sum(&|at| at / window == now / window),
            Self::Log(window) => sum(&|at| at + window > now),
            Self::Parts { part, window } => sum(&|at| (at / part + 1) * part + window > now),
            Self::Bucket(step) => {
                let empty_at = charges.iter().fold(0, |empty_at: u64, (at, cost)| empty_at.max(*at) + cost * step);
                empty_at.saturating_sub(now).div_ceil(*step)
            }
            Self::Never => 0,
        }
    }
}

struct Rule {
    name: &'static str,
    limit: u64,
    counted: Counted,
    key: fn(&Event) -> Option<String>,
    cost: fn(&Event) -> u64,
    /// Whether the charge stays after the answer.
    stays: fn(&Event) -> bool,
    enforced: bool,
}

fn rules() -> Vec<Rule> {
    let by_ip: fn(&Event) -> Option<String> = |event| Some(event.ip.clone());
    let rule =
        |name, limit, counted| Rule { name, limit, counted, key: by_ip, cost: |_| 1, stays: |_| true, enforced: true };
    vec![
        Rule { enforced: false, ..rule("watched", 4, Counted::Clock(60)) },
        Rule { stays: |event| event.status == 404, ..rule("misses", 5, Counted::Log(600)) },
        Rule { stays: |event| matches!(event.status, 401 | 404), ..rule("errors", 2, Counted::Bucket(30)) },
        Rule {
            key: |event| Some(event.tenant.clone()),
            cost: |event| event.bytes.unwrap(),
            ..rule("volume", 50_000, Counted::Parts { part: 60, window: 300 })
        },
        Rule { key: |event| event.user.clone(), ..rule("pace", 8, Counted::Clock(120)) },
        rule("open", 2, Counted::Never),
    ]
}

/// The counts of one rule.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct RuleCounts {
    pub(crate) met: u64,
    pub(crate) full: u64,
    pub(crate) denied: u64,
    pub(crate) banned: u64,
    pub(crate) warned: u64,
    /// Keys; keys that were charged; and the median, 99th percentile and maximum of their highest use.
    pub(crate) peaks: Option<(u64, u64, [u64; 3])>,
}

/// All counts.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) verdicts: BTreeMap<&'static str, u64>,
    pub(crate) rules: BTreeMap<&'static str, RuleCounts>,
    /// Requests denied, banned and slowed by a penalty.
    pub(crate) penalties: [u64; 3],
    pub(crate) touched: u64,
}

/// A user's strikes.
#[derive(Default)]
struct Strikes {
    count: usize,
    last: u64,
    cooldown_until: u64,
    banned_until: u64,
    shadowed: bool,
}

#[derive(Default)]
struct State {
    charges: BTreeMap<(&'static str, String), Vec<(u64, u64)>>,
    peaks: BTreeMap<(&'static str, String), u64>,
    strikes: BTreeMap<String, Strikes>,
    counts: Counts,
}

pub(crate) fn recount(events: &[Event]) -> Counts {
    let mut ordered: Vec<Event> = events.to_vec();
    ordered.sort_by_key(|event| event.second);
    let rules = rules();
    let mut state = State::default();
    let mut touched = BTreeSet::new();
    for event in &ordered {
        let verdict = state.decide(&rules, event);
        *state.counts.verdicts.entry(verdict).or_default() += 1;
        if verdict != "allowed" {
            touched.insert(event.ip.clone());
        }
    }
    state.counts.touched = u64::try_from(touched.len()).unwrap();
    for rule in &rules {
        let mut peaks: Vec<u64> =
            state.peaks.iter().filter(|((name, _), _)| *name == rule.name).map(|(_, used)| *used).collect();
        peaks.sort_unstable();
        let at = |percent: usize| peaks[(peaks.len() - 1) * percent / 100];
        let charged = peaks.iter().filter(|used| **used > 0).count();
        let found = (!peaks.is_empty())
            .then(|| (u64::try_from(peaks.len()).unwrap(), u64::try_from(charged).unwrap(), [at(50), at(99), at(100)]));
        state.counts.rules.entry(rule.name).or_default().peaks = found;
    }
    state.counts
}

impl State {
    fn rule(&mut self, name: &'static str) -> &mut RuleCounts {
        self.counts.rules.entry(name).or_default()
    }

    /// Returns when a cost fits, searching second by second.
    fn ready(&self, rule: &Rule, key: &str, cost: u64, now: u64) -> u64 {
        let none = Vec::new();
        let charges = self.charges.get(&(rule.name, key.to_owned())).unwrap_or(&none);
        (now..).find(|at| rule.counted.used(charges, *at) + cost <= rule.limit).unwrap()
    }

    fn decide(&mut self, rules: &[Rule], event: &Event) -> &'static str {
        let now = event.second;
        // More than the limit can ever hold is refused, and charged to nothing.
        if let Some(rule) = rules.iter().find(|rule| (rule.cost)(event) > rule.limit) {
            let own = self.rule(rule.name);
            own.met += 1;
            own.denied += 1;
            return "denied";
        }
        let met: Vec<(&Rule, String, u64)> = rules
            .iter()
            .filter_map(|rule| {
                let key = (rule.key)(event)?;
                let ready = self.ready(rule, &key, (rule.cost)(event), now);
                Some((rule, key, ready))
            })
            .collect();
        for (rule, _, ready) in &met {
            let own = self.rule(rule.name);
            own.met += 1;
            own.full += u64::from(*ready > now);
        }
        let verdict = self.verdict(event, &met);
        if matches!(verdict, "allowed" | "warned" | "slowed") {
            for (rule, key, _) in met.iter().filter(|(rule, _, ready)| *ready <= now && (rule.stays)(event)) {
                let charges = self.charges.entry((rule.name, key.clone())).or_default();
                charges.push((now, (rule.cost)(event)));
            }
        }
        for (rule, key, _) in met.iter().filter(|(rule, ..)| !matches!(rule.counted, Counted::Never)) {
            let key = (rule.name, key.clone());
            let used = rule.counted.used(self.charges.entry(key.clone()).or_default(), now);
            let peak = self.peaks.entry(key).or_default();
            *peak = used.max(*peak);
        }
        verdict
    }

    fn verdict(&mut self, event: &Event, met: &[(&Rule, String, u64)]) -> &'static str {
        let now = event.second;
        let own = event.user.as_ref().map(|user| self.strikes.entry(user.clone()).or_default());
        let (mut banned, mut cooling, mut shadowed) = (false, false, false);
        if let Some(own) = own {
            if own.count > 0 && own.last + 1_200 <= now {
                *own = Strikes::default();
            }
            (banned, cooling, shadowed) = (own.banned_until > now, own.cooldown_until > now, own.shadowed);
        }
        if banned || cooling {
            self.counts.penalties[usize::from(banned)] += 1;
            return if banned { "banned" } else { "denied" };
        }
        let full = |(rule, _, ready): &&(&Rule, String, u64)| rule.enforced && *ready > now;
        let over = met.iter().filter(full).any(|(rule, ..)| rule.name == "pace");
        let rung = if over { self.strike(event.user.as_ref().unwrap(), now) } else { None };
        let lifted = matches!(rung, Some(0 | 1));
        let denying: Vec<_> = met.iter().filter(full).filter(|(rule, ..)| !(lifted && rule.name == "pace")).collect();
        if denying.is_empty() {
            if lifted {
                self.rule("pace").warned += 1;
                return "warned";
            }
            if shadowed {
                self.counts.penalties[2] += 1;
                return "slowed";
            }
            return "allowed";
        }
        let mut longest = ("", 0);
        for (rule, _, ready) in met.iter().filter(full) {
            if *ready > longest.1 {
                longest = (rule.name, *ready);
            }
        }
        if rung == Some(4) {
            self.rule(longest.0).banned += 1;
            return "banned";
        }
        self.rule(longest.0).denied += 1;
        "denied"
    }

    /// Returns the rung of a strike, from 0; `None` if it is too soon after the last.
    fn strike(&mut self, user: &str, now: u64) -> Option<usize> {
        let own = self.strikes.get_mut(user).unwrap();
        if own.count > 0 && now < own.last + 120 {
            return None;
        }
        let rung = own.count.min(4);
        own.count += 1;
        own.last = now;
        match rung {
            2 => own.cooldown_until = now + 60,
            3 => (own.cooldown_until, own.shadowed) = (now + 120, true),
            4 => own.banned_until = now + 300,
            _ => {}
        }
        Some(rung)
    }
}
