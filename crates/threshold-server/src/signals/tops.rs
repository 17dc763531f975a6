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

mod failed_logins;
mod ring;
mod space_saving;

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::Serialize;
use threshold_core::policy::{Layer, UserScope};
use threshold_core::{Event, Span, Timestamp, Verdict};
use threshold_limiter::PenaltyCounts;

pub(crate) use failed_logins::FailedLogins;
use ring::Ring;
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
    /// Users, as events show them, or `TENANT/USER` where users belong to tenants. Logins do not count here: anyone can try to log in
    /// with a user's name.
    top_blocked_users: Vec<TopUser>,
    /// The addresses whose logins failed or were refused, as events show them.
    pub(crate) top_failed_login_ips: Vec<TopFailedIp>,
    /// The accounts whose logins failed or were refused: their names with `log_identifiers = true`, else the digests of `/v1/locks`.
    pub(crate) top_failed_login_accounts: Vec<TopFailedAccount>,
}

/// Declares the entry of a list for each kind of name, which the SPEC calls by its kind.
macro_rules! entries {
    ($($entry:ident { $name:ident, $count:ident })+) => {$(
        #[doc = concat!("One of the most: `", stringify!($name), "`, with its `", stringify!($count), "`.")]
        #[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
        pub(crate) struct $entry {
            $name: Box<str>,
            /// How many there were, at least.
            $count: u64,
            /// How many more it may be, at most. It is 0 unless more than 128 names were counted in one step of the period.
            error: u64,
        }

        impl From<Top> for $entry {
            fn from(Top { name, count, error }: Top) -> Self {
                Self { $name: (&*name).into(), $count: count, error }
            }
        }
    )+};
}

entries! {
    TopTenant { tenant, blocks }
    TopEndpoint { endpoint, blocks }
    TopIp { ip, blocks }
    TopUser { user, blocks }
    TopFailedIp { ip, failures }
    TopFailedAccount { account, failures }
}

/// A name with the most occurrences.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Top {
    name: Arc<str>,
    count: u64,
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
    rings: [Ring<Blocks>; 3],
}

impl Default for Tops {
    fn default() -> Self {
        Self { rings: Period::ALL.map(Ring::new) }
    }
}

impl Tops {
    /// Counts an event. One of the future, by a clock that is ahead, counts as one of `now`; one before the period is left out.
    pub(crate) fn add(&mut self, event: &Event, scope: UserScope, now: Timestamp) {
        if !event.blocked && event.verdict != Verdict::Warn {
            return;
        }
        // A login is tried by its address. That of the user is no more than what it has typed.
        let user = event.user_id.as_deref().filter(|_| !event.is_login());
        let user = user.map(|user| scope.write(event.tenant.as_deref(), user));
        let [tenant, endpoint, ip] =
            [&event.tenant, &event.endpoint, &event.ip].map(|name| name.as_deref().map(Cow::from));
        let names = [tenant, endpoint, ip, user];
        let names = names.map(|name| name.filter(|_| event.blocked).map(Arc::<str>::from));
        for ring in &mut self.rings {
            if let Some(step) = ring.at(event.at.min(now), now) {
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
        let steps: Vec<&Blocks> = ring.map(|ring| ring.last(now).collect()).unwrap_or_default();
        let mut sums = Sums::default();
        steps.iter().for_each(|step| sums.merge(&step.sums));
        let [tenants, endpoints, ips, users] =
            std::array::from_fn(|kind| merged(steps.iter().filter_map(|step| step.tops.get(kind))));
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
            // Those are counted where results of logins arrive.
            top_failed_login_ips: Vec::new(),
            top_failed_login_accounts: Vec::new(),
        }
    }

    /// Removes the names for which `is_erased` holds, as events show them, from the lists of their kind. The sums stay.
    pub(crate) fn forget(&mut self, kind: Kind, is_erased: impl Fn(&str) -> bool) {
        let steps = self.rings.iter_mut().flat_map(Ring::all_mut);
        for top in steps.filter_map(|step| step.tops.get_mut(kind as usize)) {
            let erased: Vec<_> = top.counters().map(|(name, _)| name).filter(|name| is_erased(name)).cloned().collect();
            erased.iter().for_each(|name| top.forget(name));
        }
    }
}

/// Returns the names with the most occurrences in all of these steps.
fn merged<'s>(tops: impl Iterator<Item = &'s SpaceSaving>) -> Vec<Top> {
    let tops: Vec<&SpaceSaving> = tops.collect();
    // What a name can have had in steps in which it has no counter.
    let unseen = tops.iter().fold(0_u64, |sum, top| sum.saturating_add(top.floor()));
    let mut names: HashMap<&Arc<str>, (u64, u64)> = HashMap::new();
    for top in &tops {
        for (name, counter) in top.counters() {
            let (count, seen) = names.entry(name).or_default();
            *count = count.saturating_add(counter.at_least());
            *seen = seen.saturating_add(top.floor().saturating_sub(counter.error));
        }
    }
    let mut tops: Vec<Top> = names
        .into_iter()
        .map(|(name, (count, seen))| Top { name: Arc::clone(name), count, error: unseen.saturating_sub(seen) })
        .filter(|top| top.count > 0)
        .collect();
    tops.sort_unstable_by(|one, other| other.count.cmp(&one.count).then_with(|| one.name.cmp(&other.name)));
    tops.truncate(LISTED);
    tops
}

/// The counts of one step.
#[derive(Debug)]
struct Blocks {
    sums: Sums,
    /// Tenants, endpoints, addresses, users.
    tops: [SpaceSaving; 4],
}

impl Default for Blocks {
    fn default() -> Self {
        Self { sums: Sums::default(), tops: std::array::from_fn(|_| SpaceSaving::new(COUNTERS)) }
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
            // The account's owner has nothing to do with a login that was refused.
            (json!({"layer": "edge", "cause": "login", "userId": "victim", "count": 2}), 3),
            (json!({"endpoint": "login", "cause": "list", "userId": "victim"}), 3),
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
            tops.add(&event(&fields, at(second)), UserScope::Global, at(4));
        }
        let expected = json!({
            "edgeBlocks": 9, "tenantBlocks": 2, "userBlocks": 4, "endpointBlocks": 1, "otherBlocks": 7,
            "warningsIssued": 4, "shadowBansActive": 0, "bansActive": 0,
            "topBlockedTenants": [{"tenant": "acme", "blocks": 3, "error": 0}],
            "topBlockedEndpoints": [{"endpoint": "GET:/a", "blocks": 2, "error": 0}, {"endpoint": "login", "blocks": 1, "error": 0}],
            "topBlockedIps": [{"ip": "a", "blocks": 8, "error": 0}, {"ip": "b", "blocks": 2, "error": 0}],
            "topBlockedUsers": [{"user": "u1", "blocks": 1, "error": 0}, {"user": "u2", "blocks": 1, "error": 0},
                {"user": "u3", "blocks": 1, "error": 0}],
            "topFailedLoginIps": [], "topFailedLoginAccounts": [],
        });
        for period in Period::ALL {
            assert_eq!(stats(&tops, period, at(4)), expected, "{period:?}");
        }
        // A user may have the name of an address.
        tops.forget(Kind::User, |name| name == "b");
        tops.forget(Kind::Ip, |name| name == "a");
        tops.forget(Kind::User, |name| name == "u1");
        let after = stats(&tops, Period::Day, at(4));
        assert_eq!(after["topBlockedIps"], json!([{"ip": "b", "blocks": 2, "error": 0}]));
        assert_eq!((&after["edgeBlocks"], after["topBlockedUsers"].as_array().unwrap().len()), (&json!(9), 2));
    }

    /// Two users of one name were one line of the list, and an operator could not tell whom to ban.
    ///
    /// Woken by leaving out `scope.write`.
    #[test]
    fn users_of_two_tenants_are_two_users() {
        let mut tops = Tops::default();
        for (tenant, count) in [(Some("acme"), 3), (Some("be/ta"), 2), (None, 1)] {
            let fields = json!({"layer": "user", "tenant": tenant, "userId": "u1", "count": count});
            tops.add(&event(&fields, NOW), UserScope::Tenant, NOW);
        }
        let users = stats(&tops, Period::Day, NOW)["topBlockedUsers"].clone();
        let names: Vec<_> = users.as_array().unwrap().iter().map(|top| top["user"].as_str().unwrap()).collect();
        assert_eq!(names, ["acme/u1", "be%2Fta/u1", "/u1"]);
    }

    #[test]
    fn an_event_counts_for_its_period_and_no_longer_than_a_step_more() {
        let mut tops = Tops::default();
        tops.add(&event(&json!({"layer": "edge", "ip": "a"}), at(0)), UserScope::Global, at(0));
        let edge = |tops: &Tops, period, second| stats(tops, period, at(second))["edgeBlocks"].as_u64().unwrap();
        for (period, length, step) in
            [(Period::Minute, 60, 5), (Period::Hour, 3_600, 300), (Period::Day, 86_400, 3_600)]
        {
            assert_eq!((edge(&tops, period, 0), edge(&tops, period, length)), (1, 1), "{period:?}");
            assert_eq!(edge(&tops, period, length + step), 0, "{period:?}");
        }
        // A late event counts where it happened, one before the period is left out, and one of the future counts as of now.
        tops.add(&event(&json!({"layer": "edge"}), at(0)), UserScope::Global, at(30));
        assert_eq!((edge(&tops, Period::Minute, 30), edge(&tops, Period::Minute, 65)), (2, 0));
        // The step that begins has the place of the one that ended, which a late event must not take back.
        tops.add(&event(&json!({"layer": "edge"}), at(65)), UserScope::Global, at(65));
        tops.add(&event(&json!({"layer": "edge"}), at(0)), UserScope::Global, at(65));
        assert_eq!((edge(&tops, Period::Minute, 65), edge(&tops, Period::Hour, 65)), (1, 4));
        tops.add(&event(&json!({"layer": "edge"}), at(9_000_000)), UserScope::Global, at(70));
        assert_eq!((edge(&tops, Period::Minute, 70), edge(&tops, Period::Hour, 70)), (2, 5));
        // A clock that is set back neither shows the future nor silences the present.
        assert_eq!(edge(&tops, Period::Minute, 10), 0);
        tops.add(&event(&json!({"layer": "edge"}), at(5)), UserScope::Global, at(5));
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
            tops.add(&template, UserScope::Global, now);
        }
        let steps = || tops.rings.iter().flat_map(Ring::all);
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
                tops.add(&template, UserScope::Global, at(60));
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
