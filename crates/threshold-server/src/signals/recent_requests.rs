//! The requests of the last hour, in memory, so that a draft of a policy can be rehearsed on them. They are never written or shown, and
//! what may be a secret in their paths is not kept: which requests a draft denies tells what is in them.
//!
//! All requests are recorded while there is room. When there is none, half of the callers are dropped, with all of their requests, and
//! only those that are left are recorded from then on: a policy counts by caller, so that every second request of everyone would
//! rehearse a different traffic than all requests of every second caller. If that would leave little, because one caller makes most of
//! the requests, the older half is dropped instead.

use std::collections::VecDeque;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::net::IpAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use threshold_core::policy::{Match, Policy, Rule};
use threshold_core::{Facts, Span, Timestamp};
use threshold_limiter::observer::{ObservedDecision, Observer, Operation};

use super::lock;

/// How long requests are kept.
const AGE: Span = Span::HOUR;
/// The most bytes of all requests.
const MAX_BYTES: usize = 32 << 20;
/// The most bytes of one request. A longer one is not recorded.
const MAX_REQUEST: usize = 4 << 10;
/// The steps of a rehearsal, which compares each request with each pattern. Ten rules rehearse all requests that there is memory for.
const MAX_STEPS: usize = 200_000_000;
/// The number of texts in [`Facts`].
const TEXTS: usize = 9;

/// The recorded requests. An observer of the limiter.
#[derive(Debug)]
pub(crate) struct RecentRequests {
    requests: Mutex<Requests>,
    /// Callers are recorded whose hash has as many zeros at its end.
    level: AtomicU32,
    /// The requests of recorded callers that had no room in the last hour.
    missed: AtomicU64,
    /// When the last one had no room, in microseconds.
    missed_at: AtomicU64,
    /// Whether there is no room until the next sweep.
    is_full: AtomicBool,
    hasher: RandomState,
    max_bytes: usize,
}

#[derive(Debug, Default)]
struct Requests {
    /// In the order in which they were decided.
    recorded: VecDeque<RecordedRequest>,
    bytes: usize,
}

/// A request that was decided.
#[derive(Debug, Clone)]
pub(crate) struct RecordedRequest {
    pub(crate) at: Timestamp,
    ip: Option<IpAddr>,
    from_client: bool,
    cost: Option<u64>,
    bytes: Option<u64>,
    caller: u64,
    /// All texts, one after the other.
    text: Box<str>,
    /// Where each text ends; `u16::MAX` if it is missing.
    ends: [u16; TEXTS],
    /// Custom facts, headers and named costs, which few requests have.
    more: Option<Box<More>>,
}

#[derive(Debug, Clone, Default)]
struct More {
    facts: Vec<(Box<str>, Box<str>)>,
    headers: Vec<(Box<str>, Box<str>)>,
    costs: Vec<(Box<str>, u64)>,
}

const MISSING: u16 = u16::MAX;

impl RecordedRequest {
    fn new(facts: &Facts<'_>, at: Timestamp, caller: u64) -> Option<Self> {
        let texts = [
            facts.host,
            facts.method,
            facts.path,
            facts.route,
            facts.tenant,
            facts.user,
            facts.tier,
            facts.category,
            facts.endpoint,
        ];
        let length: usize = texts.iter().flatten().map(|text| text.len()).sum();
        let pairs = facts.facts.iter().chain(facts.headers).map(|(name, value)| name.len().saturating_add(value.len()));
        let pairs: usize = pairs.sum();
        if length.saturating_add(pairs) > MAX_REQUEST {
            return None;
        }
        let (mut joined, mut ends) = (String::with_capacity(length), [MISSING; TEXTS]);
        for (text, end) in texts.into_iter().zip(&mut ends) {
            if let Some(text) = text {
                joined.push_str(text);
                *end = u16::try_from(joined.len()).unwrap_or(MISSING);
            }
        }
        let is_plain = facts.facts.is_empty() && facts.headers.is_empty() && facts.costs.is_empty();
        let more = (!is_plain).then(|| {
            let owned =
                |pairs: &[(&str, &str)]| pairs.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
            let costs = facts.costs.iter().map(|(name, cost)| ((*name).into(), *cost)).collect();
            Box::new(More { facts: owned(facts.facts), headers: owned(facts.headers), costs })
        });
        Some(Self {
            at,
            ip: facts.ip,
            from_client: facts.from_client,
            cost: facts.cost,
            bytes: facts.bytes,
            caller,
            text: joined.into(),
            ends,
            more,
        })
    }

    /// Calls a function with the facts of the request.
    pub(crate) fn with_facts<T>(&self, show: impl FnOnce(&Facts<'_>) -> T) -> T {
        let mut start = 0;
        let mut texts = self.ends.iter().map(|end| {
            let end = (*end != MISSING).then(|| usize::from(*end))?;
            self.text.get(std::mem::replace(&mut start, end)..end)
        });
        let mut next = || texts.next().flatten();
        let (host, method, path, route, tenant) = (next(), next(), next(), next(), next());
        let (user, tier, category, endpoint) = (next(), next(), next(), next());
        let none = More::default();
        let more = self.more.as_deref().unwrap_or(&none);
        let (facts, headers) = (borrowed(&more.facts), borrowed(&more.headers));
        let costs: Vec<(&str, u64)> = more.costs.iter().map(|(name, cost)| (&**name, *cost)).collect();
        show(&Facts {
            ip: self.ip,
            host,
            method,
            path,
            route,
            from_client: self.from_client,
            tenant,
            user,
            tier,
            category,
            endpoint,
            facts: &facts,
            headers: &headers,
            cost: self.cost,
            bytes: self.bytes,
            costs: &costs,
            ..Facts::default()
        })
    }

    /// The bytes that it takes.
    fn size(&self) -> usize {
        let more = self.more.as_deref().map_or(0, |more| {
            let pairs =
                more.facts.iter().chain(&more.headers).map(|(name, value)| name.len().saturating_add(value.len()));
            let costs = more.costs.iter().map(|(name, _)| name.len());
            let entries = more.facts.len().saturating_add(more.headers.len()).saturating_add(more.costs.len());
            pairs
                .chain(costs)
                .sum::<usize>()
                .saturating_add(entries.saturating_mul(32))
                .saturating_add(size_of::<More>())
        });
        size_of::<Self>().saturating_add(self.text.len()).saturating_add(more)
    }
}

fn borrowed(pairs: &[(Box<str>, Box<str>)]) -> Vec<(&str, &str)> {
    pairs.iter().map(|(name, value)| (&**name, &**value)).collect()
}

impl Default for RecentRequests {
    fn default() -> Self {
        Self::new(MAX_BYTES)
    }
}

/// The recorded requests of the last hour.
#[derive(Debug)]
pub(crate) struct Recording {
    /// In the order in which they were decided.
    pub(crate) requests: Vec<RecordedRequest>,
    /// The share of all callers whose requests these are.
    pub(crate) share: f64,
}

impl Recording {
    /// Drops the oldest requests if there are more than can be rehearsed by these policies.
    pub(crate) fn newest_for(mut self, policies: &[&Policy]) -> Self {
        let patterns = |rule: &Rule| {
            let Match { path, host, tenant, tier, .. } = &rule.matches;
            let lengths = [path, host, tenant, tier].into_iter().flatten().map(|pattern| pattern.as_str().len());
            lengths.fold(1usize, usize::saturating_add)
        };
        let rules = policies.iter().flat_map(|policy| policy.rules());
        let steps = rules.map(patterns).fold(1usize, usize::saturating_add);
        let most = MAX_STEPS.checked_div(steps).unwrap_or(0);
        self.requests.drain(..self.requests.len().saturating_sub(most));
        self
    }

    /// Drops the older half of the requests, and one of two.
    pub(crate) fn drop_older_half(&mut self) {
        self.requests.drain(..self.requests.len().div_ceil(2));
    }
}

impl RecentRequests {
    fn new(max_bytes: usize) -> Self {
        Self {
            requests: Mutex::default(),
            level: AtomicU32::new(0),
            missed: AtomicU64::new(0),
            missed_at: AtomicU64::new(0),
            is_full: AtomicBool::new(false),
            hasher: RandomState::new(),
            max_bytes,
        }
    }

    /// Returns a copy of the recorded requests.
    pub(crate) fn recording(&self, now: Timestamp) -> Recording {
        self.sweep(now);
        let requests: Vec<RecordedRequest> = lock(&self.requests).recorded.iter().cloned().collect();
        let level = self.level.load(Ordering::Relaxed);
        let callers = 1.0 / f64::from(1_u32.checked_shl(level).unwrap_or(u32::MAX));
        let missed = self.missed.load(Ordering::Relaxed);
        #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53, up to which a float is exact")]
        let taken = requests.len() as f64 / (requests.len() as f64 + missed as f64).max(1.0);
        Recording { requests, share: if missed == 0 { callers } else { callers * taken } }
    }

    /// Forgets what is older than an hour, and makes room if little is left. To be called each second.
    pub(crate) fn sweep(&self, now: Timestamp) {
        let mut requests = lock(&self.requests);
        let oldest = now.minus(AGE);
        while requests.recorded.front().is_some_and(|request| request.at < oldest) {
            requests.drop_oldest();
        }
        if requests.recorded.is_empty() {
            self.level.store(0, Ordering::Relaxed);
        }
        if Timestamp::from_micros(self.missed_at.load(Ordering::Relaxed)) < oldest {
            self.missed.store(0, Ordering::Relaxed);
        }
        // Before it is full, so that no request of a recorded caller is missing.
        while requests.bytes > self.max_bytes.saturating_mul(3).saturating_div(4) {
            let (level, all) = (self.level.load(Ordering::Relaxed).saturating_add(1), requests.recorded.len());
            let stays = |request: &RecordedRequest| request.caller.trailing_zeros() >= level;
            let left = requests.recorded.iter().filter(|request| stays(request)).count();
            // One caller has most of the requests if this drops nearly all or nearly none.
            let few = all.div_ceil(8);
            if (few..=all.saturating_sub(few)).contains(&left) {
                self.level.store(level, Ordering::Relaxed);
                requests.retain(stays);
            } else {
                (0..all.div_ceil(2)).for_each(|_| requests.drop_oldest());
            }
        }
        self.is_full.store(false, Ordering::Relaxed);
    }

    fn miss(&self, at: Timestamp) {
        self.missed.fetch_add(1, Ordering::Relaxed);
        self.missed_at.store(at.micros(), Ordering::Relaxed);
    }

    fn caller(&self, facts: &Facts<'_>) -> u64 {
        let mut hasher = self.hasher.build_hasher();
        // All requests of a tenant's users stay together only if the tenant chooses: its limits count them all.
        match (facts.tenant, facts.user, facts.ip) {
            (Some(tenant), ..) => hasher.write(tenant.as_bytes()),
            (None, Some(user), _) => hasher.write(user.as_bytes()),
            (None, None, Some(IpAddr::V4(ip))) => hasher.write(&ip.octets()),
            // A block of addresses shares a budget.
            (None, None, Some(IpAddr::V6(ip))) => hasher.write(ip.octets().get(..6).unwrap_or_default()),
            (None, None, None) => {}
        }
        hasher.finish()
    }
}

impl Requests {
    fn drop_oldest(&mut self) {
        let size = self.recorded.pop_front().map_or(0, |request| request.size());
        self.bytes = self.bytes.saturating_sub(size);
    }

    fn retain(&mut self, keeps: impl Fn(&RecordedRequest) -> bool) {
        self.recorded.retain(keeps);
        self.bytes = self.recorded.iter().map(RecordedRequest::size).sum();
    }
}

impl Observer for RecentRequests {
    fn decided(&self, observed: &ObservedDecision<'_>) {
        // A peek is no request, and what was recorded has happened whatever a policy says.
        if !matches!(observed.operation, Operation::Check | Operation::Reserve | Operation::Wait) {
            return;
        }
        let caller = self.caller(observed.facts);
        if caller.trailing_zeros() < self.level.load(Ordering::Relaxed) {
            return;
        }
        let at = observed.decision.at;
        // Before anything is allocated: a flood fills the memory within a second.
        if self.is_full.load(Ordering::Relaxed) {
            return self.miss(at);
        }
        let facts = observed.facts;
        // A longer one is not recorded, whatever is in it.
        let path = facts.path.filter(|path| path.len() <= MAX_REQUEST);
        let path = path.map(|path| observed.policy.recorded_path(path));
        let endpoint = facts.endpoint.map(|endpoint| observed.policy.recorded_endpoint(endpoint));
        let shown = Facts { path: path.as_deref().or(facts.path), endpoint: endpoint.as_deref(), ..*facts };
        let Some(request) = RecordedRequest::new(&shown, at, caller) else { return self.miss(at) };
        // A decision never waits. Another thread holds the lock for as long as it takes to push, except for a sweep.
        let Ok(mut requests) = self.requests.try_lock() else { return self.miss(at) };
        let bytes = requests.bytes.saturating_add(request.size());
        if bytes > self.max_bytes {
            self.is_full.store(true, Ordering::Relaxed);
            return self.miss(at);
        }
        requests.bytes = bytes;
        requests.recorded.push_back(request);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use threshold_core::Decision;

    use super::*;

    const NOW: Timestamp = Timestamp::from_secs(1_767_225_600);

    fn record(requests: &RecentRequests, facts: &Facts<'_>, at: Timestamp) {
        let mut decision = Decision::default();
        decision.at = at;
        requests.decided(&ObservedDecision::new(facts, &decision, &Policy::builder().build().unwrap()));
    }

    /// Woken by leaving any field out of `RecordedRequest`.
    #[test]
    fn the_facts_of_a_request_come_back_as_they_were() {
        let requests = RecentRequests::default();
        let whole = Facts {
            ip: "2001:db8::1".parse().ok(),
            host: Some("h"),
            method: Some("POST"),
            path: Some("/p"),
            route: Some("/p"),
            from_client: true,
            tenant: Some("acme"),
            user: Some("u1"),
            tier: Some("oak"),
            category: Some("ai"),
            endpoint: Some("e"),
            facts: &[("a", "b")],
            headers: &[("x-a", "1"), ("x-b", "2")],
            cost: Some(3),
            bytes: Some(4),
            costs: &[("tokens", 5)],
            ..Facts::default()
        };
        let some = Facts { path: Some(""), user: Some("u2"), ..Facts::default() };
        for facts in [&whole, &some, &Facts::default()] {
            record(&requests, facts, NOW);
        }
        let recording = requests.recording(NOW);
        assert_eq!((recording.requests.len(), recording.share), (3, 1.0));
        for (recorded, facts) in recording.requests.iter().zip([&whole, &some, &Facts::default()]) {
            assert_eq!(recorded.with_facts(|own| format!("{own:?}")), format!("{facts:?}"));
        }
        let long = "x".repeat(MAX_REQUEST + 1);
        record(&requests, &Facts { path: Some(&long), ..Facts::default() }, NOW);
        let recording = requests.recording(NOW);
        assert_eq!((recording.requests.len(), recording.share), (3, 0.75), "one of four is missing");
    }

    /// A rehearsal of drafts such as `match = { path = "/reset/9f**" }` read the token of a reset from a recorded path.
    ///
    /// Woken by recording the path, or the endpoint, as it came.
    #[test]
    fn what_may_be_a_secret_in_a_path_is_not_recorded() {
        let requests = RecentRequests::default();
        let policy = Policy::parse("[identity]\nprivate_paths = '/invite/*'", &|_| None).unwrap();
        let mut decision = Decision::default();
        decision.at = NOW;
        for path in ["/reset/9f86d081884c7d65?x=secret", "/invite/secret"] {
            let endpoint = format!("GET:{path}");
            let facts = Facts { path: Some(path), endpoint: Some(&endpoint), ..Facts::default() };
            requests.decided(&ObservedDecision::new(&facts, &decision, &policy));
        }
        let recording = requests.recording(NOW);
        let recorded = recording.requests.iter().map(|request| request.text.to_string());
        assert_eq!(
            recorded.collect::<Vec<_>>(),
            ["/reset/{hidden}GET:/reset/{hidden}", "/invite/{hidden}GET:/invite/{hidden}"]
        );
    }

    /// Woken by leaving out `newest_for`: a large policy on all requests of an hour took minutes.
    #[test]
    fn a_large_policy_is_rehearsed_on_the_newest_requests() {
        let requests = RecentRequests::new(2_000_000);
        for second in 0..3_000 {
            record(&requests, &Facts { user: Some("u"), ..Facts::default() }, NOW.plus(Span::from_secs(second)));
        }
        let rule = |n: usize| {
            format!("[[rule]]\nname = 'r{n}'\nper = ['ip']\nlimit = '9/h'\nmatch.path = '/{n}{}'\n", "x".repeat(200))
        };
        let large: String = (0..999).map(rule).collect();
        let [large, small] = [large, rule(0)].map(|text| Policy::parse(&text, &|_| None).unwrap());
        let now = NOW.plus(Span::from_secs(3_000));
        assert_eq!(requests.recording(now).newest_for(&[&small]).requests.len(), 3_000);
        let newest = requests.recording(now).newest_for(&[&small, &large]).requests;
        assert!((500..1_500).contains(&newest.len()), "{}", newest.len());
        assert_eq!(newest.last().map(|request| request.at), Some(NOW.plus(Span::from_secs(2_999))));
    }

    /// Woken by dropping single requests in place of callers, or by leaving out `sweep`.
    #[test]
    fn when_memory_is_full_some_callers_stay_with_all_of_their_requests() {
        let requests = RecentRequests::new(200_000);
        for round in 0..40 {
            for caller in 0..100 {
                let user = format!("user-{caller}");
                let facts = Facts { user: Some(&user), ..Facts::default() };
                record(&requests, &facts, NOW.plus(Span::from_secs(round)));
            }
            requests.sweep(NOW);
            assert!(lock(&requests.requests).bytes <= 200_000);
        }
        let recording = requests.recording(NOW);
        let mut by_user = BTreeMap::<String, usize>::new();
        for request in &recording.requests {
            *by_user.entry(request.with_facts(|facts| facts.user.unwrap_or_default().to_owned())).or_default() += 1;
        }
        assert!((0.01..0.9).contains(&recording.share), "{}", recording.share);
        assert!(!by_user.is_empty() && by_user.values().all(|count| *count == 40), "{by_user:?}");
        let later = NOW.plus(AGE).plus(Span::from_secs(60));
        assert_eq!(requests.recording(later).requests.len(), 0);
        assert_eq!(requests.level.load(Ordering::Relaxed), 0, "all callers are recorded again");
    }

    /// Woken by raising the level whatever is left: half of all single tenants would then see no request at all.
    #[test]
    fn when_one_caller_fills_the_memory_its_newest_requests_stay() {
        let requests = RecentRequests::new(200_000);
        for second in 0..2_000 {
            record(&requests, &Facts { tenant: Some("acme"), ..Facts::default() }, NOW.plus(Span::from_secs(second)));
            requests.sweep(NOW.plus(Span::from_secs(second)));
        }
        let recording = requests.recording(NOW.plus(Span::from_secs(2_000)));
        assert!(recording.requests.len() > 100, "{}", recording.requests.len());
        assert_eq!(recording.requests.last().map(|request| request.at), Some(NOW.plus(Span::from_secs(1_999))));
        assert_eq!(recording.share, 1.0, "none is missing since the first that is left");
    }

    /// Woken by never clearing `is_full` or `missed`.
    #[test]
    fn requests_without_room_are_counted_for_an_hour() {
        let requests = RecentRequests::new(1_000);
        for _ in 0..100 {
            record(&requests, &Facts::default(), NOW);
        }
        let recording = requests.recording(NOW);
        assert!(recording.share < 0.2 && !recording.requests.is_empty(), "{}", recording.share);
        let later = NOW.plus(AGE).plus(Span::from_secs(1));
        requests.sweep(later);
        record(&requests, &Facts::default(), later);
        let recording = requests.recording(later);
        assert_eq!((recording.requests.len(), recording.share), (1, 1.0));
    }

    #[test]
    fn a_peek_and_what_has_happened_already_are_not_recorded() {
        let requests = RecentRequests::default();
        let (facts, decision, policy) = (Facts::default(), Decision::default(), Policy::builder().build().unwrap());
        for operation in [Operation::Peek, Operation::Record] {
            let mut observed = ObservedDecision::new(&facts, &decision, &policy);
            observed.operation = operation;
            requests.decided(&observed);
        }
        assert_eq!(requests.recording(NOW).requests.len(), 0);
    }
}
