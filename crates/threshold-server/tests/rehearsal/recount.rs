//! A recount of the policy below without any of the program's code. It keeps the time of every request in lists, and searches
//! all of them each time.

use std::collections::{BTreeMap, BTreeSet};

use crate::logs::Event;

/// The policy that the recount implements.
pub(crate) const POLICY: &str = r#"
[[category]]
name = "logins"
path = "/login"

[ladders.steep]
decay = "30min"
rungs = ["warn", "cooldown 2min", "ban 10min"]

[[rule]]
name = "address"
layer = "edge"
per = ["ip"]
limit = "12/min"

[[rule]]
name = "customer"
layer = "tenant"
per = ["tenant"]
limit = "600/h"
algorithm = "fixed-window"

[[rule]]
name = "person"
layer = "user"
per = ["user"]
limit = "25/5min"
algorithm = "sliding-log"
on_missing = "skip"
ladder = "steep"

[[rule]]
name = "guesses"
layer = "endpoint"
match = { method = "POST", path = "/login" }
per = ["ip"]
limit = "4/10min"
algorithm = "fixed-window"
count = "status:401"
"#;

/// The counts.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Recount {
    pub(crate) allowed: u64,
    pub(crate) warned: u64,
    pub(crate) denied: u64,
    pub(crate) banned: u64,
    pub(crate) subjects: u64,
    pub(crate) touched: u64,
    /// Denied requests by rule.
    pub(crate) by_rule: BTreeMap<&'static str, u64>,
    /// Requests that were denied and banned by a penalty.
    pub(crate) penalties: (u64, u64),
    /// Stopped requests by address and user.
    pub(crate) met: BTreeMap<&'static str, u64>,
}

/// A user's strikes.
#[derive(Default)]
struct Strikes {
    count: usize,
    last: u64,
    cooldown_until: u64,
    banned_until: u64,
}

#[derive(Default)]
struct State {
    /// When the bucket of each address is full again, in seconds.
    buckets: BTreeMap<String, u64>,
    windows: BTreeMap<(String, u64), u64>,
    logs: BTreeMap<String, Vec<u64>>,
    guesses: BTreeMap<(String, u64), u64>,
    strikes: BTreeMap<String, Strikes>,
}

/// 12 a minute: each request takes five seconds of the bucket, and twelve fit at once.
const STEP: u64 = 5;
const BURST: u64 = 60;
const RUNGS: usize = 3;

/// Returns when a request fits each of its limits.
struct Waits {
    address: u64,
    customer: u64,
    person: Option<u64>,
    guesses: Option<u64>,
}

impl State {
    fn waits(&self, event: &Event) -> Waits {
        let now = event.second;
        let full_at = self.buckets.get(&event.ip).copied().unwrap_or(0).max(now);
        let hour = now / 3_600;
        let used = self.windows.get(&(event.tenant.clone(), hour)).copied().unwrap_or(0);
        let person = event.user.as_ref().map(|user| {
            let times: Vec<u64> = self.logs.get(user).into_iter().flatten().copied().collect();
            let live: Vec<u64> = times.into_iter().filter(|time| time + 300 > now).collect();
            if live.len() < 25 { now } else { live[live.len() - 25] + 300 }
        });
        let ten = now / 600;
        let guesses = (event.method == "POST" && event.path == "/login").then(|| {
            let used = self.guesses.get(&(event.ip.clone(), ten)).copied().unwrap_or(0);
            if used < 4 { now } else { (ten + 1) * 600 }
        });
        Waits {
            address: (full_at + STEP).saturating_sub(BURST).max(now),
            customer: if used < 600 { now } else { (hour + 1) * 3_600 },
            person,
            guesses,
        }
    }

    fn charge(&mut self, event: &Event, person_too: bool) {
        let now = event.second;
        let bucket = self.buckets.entry(event.ip.clone()).or_default();
        *bucket = (*bucket).max(now) + STEP;
        *self.windows.entry((event.tenant.clone(), now / 3_600)).or_default() += 1;
        if let Some(user) = event.user.as_ref().filter(|_| person_too) {
            self.logs.entry(user.clone()).or_default().push(now);
        }
        if event.method == "POST" && event.path == "/login" && event.status == 401 {
            *self.guesses.entry((event.ip.clone(), now / 600)).or_default() += 1;
        }
    }

    /// Returns the rung of a strike, from 0; `None` if it is too soon after the last.
    fn strike(&mut self, user: &str, now: u64) -> Option<usize> {
        let own = self.strikes.entry(user.to_owned()).or_default();
        if own.count > 0 && own.last + 1_800 <= now {
            *own = Strikes::default();
        }
        if own.count > 0 && now < own.last + 300 {
            return None;
        }
        let rung = own.count.min(RUNGS - 1);
        own.count += 1;
        own.last = now;
        match rung {
            0 => {}
            1 => own.cooldown_until = now + 120,
            _ => own.banned_until = now + 600,
        }
        Some(rung)
    }
}

pub(crate) fn recount(events: &[Event]) -> Recount {
    let mut ordered: Vec<Event> = events.to_vec();
    ordered.sort_by_key(|event| event.second);
    let mut state = State::default();
    let mut found = Recount::default();
    let (mut seen, mut touched) = (BTreeSet::new(), BTreeSet::new());
    for event in &ordered {
        seen.insert(event.ip.clone());
        for (rule, meets) in [
            ("address", true),
            ("customer", true),
            ("person", event.user.is_some()),
            ("guesses", event.method == "POST" && event.path == "/login"),
        ] {
            *found.met.entry(rule).or_default() += u64::from(meets);
        }
        if !one(event, &mut state, &mut found) {
            touched.insert(event.ip.clone());
        }
    }
    found.subjects = u64::try_from(seen.len()).unwrap();
    found.touched = u64::try_from(touched.len()).unwrap();
    found
}

/// Decides one request. Returns whether it was allowed without a warning or a delay.
fn one(event: &Event, state: &mut State, found: &mut Recount) -> bool {
    let now = event.second;
    if let Some(own) = event.user.as_ref().and_then(|user| state.strikes.get(user)) {
        if own.banned_until > now {
            found.banned += 1;
            found.penalties.1 += 1;
            return false;
        }
        if own.cooldown_until > now {
            found.denied += 1;
            found.penalties.0 += 1;
            return false;
        }
    }
    let waits = state.waits(event);
    let over = waits.person.is_some_and(|ready| ready > now);
    let rung = if over { state.strike(event.user.as_ref().unwrap(), now) } else { None };
    let lifted = rung == Some(0);
    let others = waits.address > now || waits.customer > now || waits.guesses.is_some_and(|ready| ready > now);
    if !others && (!over || lifted) {
        state.charge(event, !over);
        if lifted {
            found.warned += 1;
        } else {
            found.allowed += 1;
        }
        return !lifted;
    }
    let mut longest = ("", now);
    let ready = [
        ("address", Some(waits.address)),
        ("customer", Some(waits.customer)),
        ("person", waits.person),
        ("guesses", waits.guesses),
    ];
    for (rule, ready) in ready {
        if ready.is_some_and(|ready| ready > longest.1) {
            longest = (rule, ready.unwrap());
        }
    }
    if rung == Some(2) {
        found.banned += 1;
    } else {
        found.denied += 1;
        *found.by_rule.entry(longest.0).or_default() += 1;
    }
    false
}
