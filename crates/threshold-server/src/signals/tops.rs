//! What was blocked in the last minute, hour and day: exact sums, and the names with the most blocks, in bounded memory.
//!
//! Each period is cut into steps. A step has exact sums and, for each kind of name, a [`SpaceSaving`] of [`COUNTERS`] counters; a period
//! is the sum of its steps. So, of N blocks in a period, a name is listed with at least its true blocks less N / `COUNTERS`, and never
//! with more than it has; as the list has [`LISTED`] places, each name with more than N / 11 + N / `COUNTERS` blocks is on it. While at
//! most `COUNTERS` names are blocked in each step, the figures are exact.
//!
//! A name has at most 256 bytes ([`MAX_TEXT`](threshold_core::event::MAX_TEXT)), and takes at most 450 bytes in one counter with
//! everything around it. There are 51 steps with 4 kinds of 128 counters: less than 12 MiB, whatever arrives. Names of 17 bytes, as
//! digests have, take half of that.

mod space_saving;

use std::collections::HashMap;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::Serialize;
use threshold_core::policy::Layer;
use threshold_core::{Event, Span, Timestamp, Verdict};
use threshold_limiter::PenaltyCounts;

use space_saving::SpaceSaving;

/// The counters for each kind of name in each step.
const COUNTERS: usize = 128;
/// The most names in a list.
const LISTED: usize = 10;

/// The period that statistics are about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Period {
    Minute,
    Hour,
    Day,
}

impl Period {
    const ALL: [Self; 3] = [Self::Minute, Self::Hour, Self::Day];

    /// Returns the length of a step, and how many steps a period has.
    const fn steps(self) -> (Span, usize) {
        match self {
            Self::Minute => (Span::from_secs(5), 12),
            Self::Hour => (Span::from_secs(300), 12),
            Self::Day => (Span::HOUR, 24),
        }
    }
}

/// What was blocked in a period, and the penalties in force.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Stats {
    /// Requests that rules of the layer `edge` denied, with those that an edge in front has reported.
    edge_blocks: u64,
    tenant_blocks: u64,
    user_blocks: u64,
    endpoint_blocks: u64,
    /// Requests that a list, an operator's ban, a pause, an outage of the store or a rule of the layer `global` denied.
    other_blocks: u64,
    /// Requests that were allowed with a warning.
    warnings_issued: u64,
    /// Subjects that are shadow banned now.
    shadow_bans_active: u64,
    /// Bans in force now, by operators and by ladders.
    bans_active: u64,
    top_blocked_tenants: Vec<TopTenant>,
    top_blocked_endpoints: Vec<TopEndpoint>,
    /// Addresses, as events show them.
    top_blocked_ips: Vec<TopIp>,
    /// Users, as events show them.
    top_blocked_users: Vec<TopUser>,
}

/// Declares the entry of a list for each kind of name, which the SPEC calls by its kind.
macro_rules! entries {
    ($($entry:ident { $name:ident })+) => {$(
        #[doc = concat!("A blocked ", stringify!($name), ".")]
        #[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
        pub(crate) struct $entry {
            $name: Box<str>,
            /// How many requests were blocked, at least.
            blocks: u64,
            /// How many more it may be, at most. It is 0 unless more than 128 were blocked in one step of the period.
            error: u64,
        }

        impl From<Top> for $entry {
            fn from(Top { name, blocks, error }: Top) -> Self {
                Self { $name: (&*name).into(), blocks, error }
            }
        }
    )+};
}

entries! { TopTenant { tenant } TopEndpoint { endpoint } TopIp { ip } TopUser { user } }

/// A name with the most blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Top {
    name: Arc<str>,
    blocks: u64,
    error: u64,
}

/// A kind of names that can be forgotten: the place of its counters in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Tenant = 0,
    Ip = 2,
    User = 3,
}

/// Counts blocked requests by layer and by name.
#[derive(Debug)]
pub(crate) struct Tops {
    /// In the order of [`Period::ALL`].
    rings: [Ring; 3],
}

impl Default for Tops {
    fn default() -> Self {
        Self { rings: Period::ALL.map(Ring::new) }
    }
}

impl Tops {
    /// Counts an event. One of the future, by a clock that is ahead, counts as one of `now`; one before the period is left out.
    pub(crate) fn add(&mut self, event: &Event, now: Timestamp) {
        if !event.blocked && event.verdict != Verdict::Warn {
            return;
        }
        let names = [&event.tenant, &event.endpoint, &event.ip, &event.user_id];
        let names = names.map(|name| name.as_deref().filter(|_| event.blocked).map(Arc::<str>::from));
        for ring in &mut self.rings {
            if let Some(step) = ring.step(event.at.min(now), now) {
                step.sums.add(event);
                for (top, name) in step.tops.iter_mut().zip(&names) {
                    if let Some(name) = name {
                        top.add(name, event.count);
                    }
                }
            }
        }
    }

    /// Returns the statistics of the last period, which is rounded up to whole steps.
    pub(crate) fn stats(&self, period: Period, penalties: PenaltyCounts, now: Timestamp) -> Stats {
        let ring = self.rings.iter().find(|ring| ring.period == period);
        let steps: Vec<&Step> = ring.map(|ring| ring.steps(now).collect()).unwrap_or_default();
        let mut sums = Sums::default();
        steps.iter().for_each(|step| sums.merge(&step.sums));
        let [tenants, endpoints, ips, users] = std::array::from_fn(|kind| merged(&steps, kind));
        let [edge_blocks, tenant_blocks, user_blocks, endpoint_blocks, other_blocks] = sums.blocks;
        Stats {
            edge_blocks,
            tenant_blocks,
            user_blocks,
            endpoint_blocks,
            other_blocks,
            warnings_issued: sums.warnings,
            shadow_bans_active: penalties.shadow_bans,
            bans_active: penalties.bans,
            top_blocked_tenants: tenants.into_iter().map(Into::into).collect(),
            top_blocked_endpoints: endpoints.into_iter().map(Into::into).collect(),
            top_blocked_ips: ips.into_iter().map(Into::into).collect(),
            top_blocked_users: users.into_iter().map(Into::into).collect(),
        }
    }

    /// Removes a name, as events show it, from the lists of its kind. The sums stay.
    pub(crate) fn forget(&mut self, kind: Kind, name: &str) {
        let steps = self.rings.iter_mut().flat_map(|ring| ring.steps.iter_mut());
        steps.filter_map(|step| step.tops.get_mut(kind as usize)).for_each(|top| top.forget(name));
    }
}

/// Returns the names of one kind with the most blocks.
fn merged(steps: &[&Step], kind: usize) -> Vec<Top> {
    let tops = || steps.iter().filter_map(|step| step.tops.get(kind));
    // What a name can have had in steps in which it has no counter.
    let unseen = tops().fold(0_u64, |sum, top| sum.saturating_add(top.floor()));
    let mut names: HashMap<&Arc<str>, (u64, u64)> = HashMap::new();
    for top in tops() {
        for (name, counter) in top.counters() {
            let (blocks, seen) = names.entry(name).or_default();
            *blocks = blocks.saturating_add(counter.at_least());
            *seen = seen.saturating_add(top.floor().saturating_sub(counter.error));
        }
    }
    let mut tops: Vec<Top> = names
        .into_iter()
        .map(|(name, (blocks, seen))| Top { name: Arc::clone(name), blocks, error: unseen.saturating_sub(seen) })
        .filter(|top| top.blocks > 0)
        .collect();
    tops.sort_unstable_by(|one, other| other.blocks.cmp(&one.blocks).then_with(|| one.name.cmp(&other.name)));
    tops.truncate(LISTED);
    tops
}

/// The steps of one period.
#[derive(Debug)]
struct Ring {
    period: Period,
    /// One more than the period has, because the present one has only begun. The step with the number N is at N modulo their number.
    steps: Box<[Step]>,
}

#[derive(Debug)]
struct Step {
    /// The time of its beginning, in lengths of a step.
    number: u64,
    sums: Sums,
    /// Tenants, endpoints, addresses, users.
    tops: [SpaceSaving; 4],
}

impl Step {
    fn new(number: u64) -> Self {
        Self { number, sums: Sums::default(), tops: std::array::from_fn(|_| SpaceSaving::new(COUNTERS)) }
    }
}

impl Ring {
    fn new(period: Period) -> Self {
        let (_, steps) = period.steps();
        Self { period, steps: (0..=steps).map(|_| Step::new(0)).collect() }
    }

    /// Returns the number of the step at a time.
    fn number(&self, at: Timestamp) -> u64 {
        let (length, _) = self.period.steps();
        at.micros().checked_div(length.micros()).unwrap_or(0)
    }

    /// Returns the step of an event; `None` if it is before the period.
    fn step(&mut self, at: Timestamp, now: Timestamp) -> Option<&mut Step> {
        let (number, newest, count) = (self.number(at), self.number(now), self.steps.len() as u64);
        if newest.saturating_sub(number) >= count {
            return None;
        }
        let place = usize::try_from(number.checked_rem(count)?).ok()?;
        let step = self.steps.get_mut(place)?;
        // An older one is over. A newer one was written before the clock was set back.
        if step.number != number {
            *step = Step::new(number);
        }
        Some(step)
    }

    /// Returns the steps of the last period.
    fn steps(&self, now: Timestamp) -> impl Iterator<Item = &Step> {
        let (newest, count) = (self.number(now), self.steps.len() as u64);
        self.steps.iter().filter(move |step| step.number <= newest && newest.saturating_sub(step.number) < count)
    }
}

/// Exact sums of one step.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    /// Of edge, tenant, user, endpoint, and others.
    blocks: [u64; 5],
    warnings: u64,
}

impl Sums {
    fn add(&mut self, event: &Event) {
        let [edge, tenant, user, endpoint, other] = &mut self.blocks;
        let sum = match event.layer.filter(|_| event.blames_caller()) {
            _ if !event.blocked => &mut self.warnings,
            Some(Layer::Edge) => edge,
            Some(Layer::Tenant) => tenant,
            Some(Layer::User) => user,
            Some(Layer::Endpoint) => endpoint,
            Some(Layer::Global) | None => other,
        };
        *sum = sum.saturating_add(event.count);
    }

    fn merge(&mut self, other: &Self) {
        for (own, other) in self.blocks.iter_mut().zip(other.blocks) {
            *own = own.saturating_add(other);
        }
        self.warnings = self.warnings.saturating_add(other.warnings);
    }
}

#[cfg(test)]
#[expect(clippy::arithmetic_side_effects, reason = "a sum of a test that overflows should panic")]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    const NOW: Timestamp = Timestamp::from_secs(1_767_225_600);

    fn at(second: u64) -> Timestamp {
        NOW.plus(Span::from_secs(second))
    }

    fn event(fields: &Value, at: Timestamp) -> Event {
        let mut json =
            json!({"id": "00000000-0000-4000-8000-000000000000", "at": at.micros() / 1_000, "blocked": true});
        json.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        Event::from_json(&json.to_string()).unwrap()
    }

    fn stats(tops: &Tops, period: Period, now: Timestamp) -> Value {
        serde_json::to_value(tops.stats(period, PenaltyCounts::default(), now)).unwrap()
    }

    #[test]
    fn statistics_have_the_sums_and_the_names_of_each_kind() {
        let mut tops = Tops::default();
        for (fields, second) in [
            (json!({"layer": "edge", "ip": "a", "count": 7}), 0),
            (json!({"layer": "tenant", "tenant": "acme", "ip": "b", "count": 2}), 1),
            (json!({"layer": "user", "tenant": "acme", "userId": "u1", "endpoint": "GET:/a", "ip": "a"}), 2),
            (json!({"layer": "endpoint", "endpoint": "GET:/a", "userId": "u2"}), 3),
            (json!({"layer": "global"}), 3),
            (json!({"userId": "u3"}), 3),
            (json!({"layer": "edge", "cause": "login", "count": 2}), 3),
            (json!({"layer": "user", "cause": "ladder", "count": 3}), 3),
            // What no caller has brought about.
            (json!({"layer": "user", "cause": "ban"}), 3),
            (json!({"layer": "edge", "cause": "pause"}), 3),
            (json!({"layer": "tenant", "cause": "outage"}), 3),
            (json!({"cause": "list"}), 3),
            // A warning stops nobody.
            (json!({"layer": "user", "blocked": false, "verdict": "warn", "userId": "u9", "count": 4}), 3),
            (json!({"layer": "user", "blocked": false, "verdict": "allow", "userId": "u9"}), 3),
        ] {
            tops.add(&event(&fields, at(second)), at(4));
        }
        let expected = json!({
            "edgeBlocks": 9, "tenantBlocks": 2, "userBlocks": 4, "endpointBlocks": 1, "otherBlocks": 6,
            "warningsIssued": 4, "shadowBansActive": 0, "bansActive": 0,
            "topBlockedTenants": [{"tenant": "acme", "blocks": 3, "error": 0}],
            "topBlockedEndpoints": [{"endpoint": "GET:/a", "blocks": 2, "error": 0}],
            "topBlockedIps": [{"ip": "a", "blocks": 8, "error": 0}, {"ip": "b", "blocks": 2, "error": 0}],
            "topBlockedUsers": [{"user": "u1", "blocks": 1, "error": 0}, {"user": "u2", "blocks": 1, "error": 0},
                {"user": "u3", "blocks": 1, "error": 0}],
        });
        for period in Period::ALL {
            assert_eq!(stats(&tops, period, at(4)), expected, "{period:?}");
        }
        // A user may have the name of an address.
        tops.forget(Kind::User, "b");
        tops.forget(Kind::Ip, "a");
        tops.forget(Kind::User, "u1");
        let after = stats(&tops, Period::Day, at(4));
        assert_eq!(after["topBlockedIps"], json!([{"ip": "b", "blocks": 2, "error": 0}]));
        assert_eq!((&after["edgeBlocks"], after["topBlockedUsers"].as_array().unwrap().len()), (&json!(9), 2));
    }

    #[test]
    fn an_event_counts_for_its_period_and_no_longer_than_a_step_more() {
        let mut tops = Tops::default();
        tops.add(&event(&json!({"layer": "edge", "ip": "a"}), at(0)), at(0));
        let edge = |tops: &Tops, period, second| stats(tops, period, at(second))["edgeBlocks"].as_u64().unwrap();
        for (period, length, step) in
            [(Period::Minute, 60, 5), (Period::Hour, 3_600, 300), (Period::Day, 86_400, 3_600)]
        {
            assert_eq!((edge(&tops, period, 0), edge(&tops, period, length)), (1, 1), "{period:?}");
            assert_eq!(edge(&tops, period, length + step), 0, "{period:?}");
        }
        // A late event counts where it happened, one before the period is left out, and one of the future counts as of now.
        tops.add(&event(&json!({"layer": "edge"}), at(0)), at(30));
        assert_eq!((edge(&tops, Period::Minute, 30), edge(&tops, Period::Minute, 65)), (2, 0));
        // The step that begins has the place of the one that ended, which a late event must not take back.
        tops.add(&event(&json!({"layer": "edge"}), at(65)), at(65));
        tops.add(&event(&json!({"layer": "edge"}), at(0)), at(65));
        assert_eq!((edge(&tops, Period::Minute, 65), edge(&tops, Period::Hour, 65)), (1, 4));
        tops.add(&event(&json!({"layer": "edge"}), at(9_000_000)), at(70));
        assert_eq!((edge(&tops, Period::Minute, 70), edge(&tops, Period::Hour, 70)), (2, 5));
        // A clock that is set back neither shows the future nor silences the present.
        assert_eq!(edge(&tops, Period::Minute, 10), 0);
        tops.add(&event(&json!({"layer": "edge"}), at(5)), at(5));
        assert_eq!(edge(&tops, Period::Minute, 10), 1);
    }

    /// Woken by a larger `COUNTERS`, and by a `SpaceSaving` that keeps each name.
    #[test]
    fn a_million_names_take_no_more_memory_than_the_documented_bound() {
        let mut tops = Tops::default();
        let (long, mut now) = ("x".repeat(240), NOW);
        let mut template = event(&json!({"layer": "edge"}), now);
        for number in 0..250_000_u32 {
            // More than a day at first, then a hundred events in each second, so that every step of the day and of the minute is full.
            now = now.plus(Span::from_millis(if number < 200_000 { 450 } else { 10 }));
            template.at = now;
            let name = |kind: char| Some(format!("{long}{kind}{number:015}").into());
            (template.tenant, template.ip) = (name('t'), name('i'));
            (template.user_id, template.endpoint) = (name('u'), name('e'));
            tops.add(&template, now);
        }
        let steps = || tops.rings.iter().flat_map(|ring| &ring.steps);
        assert_eq!(steps().count(), 51);
        let all: Vec<_> = steps().flat_map(|step| &step.tops).collect();
        assert!(all.iter().all(|top| top.counters().count() <= COUNTERS));
        let bytes: usize = all.iter().map(|top| top.bytes()).sum();
        assert!(bytes < 12 << 20, "{bytes} bytes");
        // Most steps are full, or this shows nothing.
        assert!(all.iter().filter(|top| top.counters().count() == COUNTERS).count() > 150);
        let shown = stats(&tops, Period::Day, now);
        assert!(shown["topBlockedIps"].as_array().unwrap().len() <= LISTED);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// The law of a whole period, over several steps: sums are exact, and each name whose share is large enough is listed with
        /// bounds around its true number.
        ///
        /// Woken by leaving out `unseen`, and by an `error` of 0.
        #[test]
        fn large_names_are_listed_with_their_bounds(
            heavy in proptest::collection::vec((0..4_u8, 0..60_u64, 1..200_u64), 0..40),
            light in proptest::collection::vec((0..5_000_u32, 0..15_u64), 0..2_000),
        ) {
            let (mut tops, mut exact) = (Tops::default(), BTreeMap::<String, u64>::new());
            let heavy = heavy.into_iter().map(|(name, second, count)| (format!("heavy {name}"), second, count));
            let light = light.into_iter().map(|(name, second)| (format!("light {name}"), second, 1));
            let mut template = event(&json!({"layer": "edge"}), NOW);
            for (name, second, count) in light.chain(heavy) {
                (template.at, template.ip, template.count) = (at(second), Some(name.as_str().into()), count);
                tops.add(&template, at(60));
                *exact.entry(name).or_default() += count;
            }
            let shown = stats(&tops, Period::Minute, at(60));
            let total: u64 = exact.values().sum();
            prop_assert_eq!(shown["edgeBlocks"].as_u64().unwrap(), total);
            let listed = shown["topBlockedIps"].as_array().unwrap();
            for top in listed {
                let truth = exact[top["ip"].as_str().unwrap()];
                let (blocks, error) = (top["blocks"].as_u64().unwrap(), top["error"].as_u64().unwrap());
                prop_assert!(blocks <= truth && truth <= blocks + error, "{top}, truly {truth}");
                prop_assert!(error <= total / COUNTERS as u64, "{top} of {total}");
            }
            for (name, truth) in exact {
                if truth > total / 11 + total / COUNTERS as u64 {
                    prop_assert!(listed.iter().any(|top| top["ip"] == *name), "{name} with {truth} of {total}");
                }
            }
        }
    }
}
