//! Rehearses a policy on the requests of the last hour: what it would have decided, rule by rule.

use threshold_core::plan::Verb;
use threshold_core::{Ledger, Policy};

use super::recent_requests::Recording;

/// A limit is nearly used up when less than a fifth of it is left.
const NEAR: u64 = 5;

/// The most balances and standings of a rehearsal, about 100 bytes each; a sliding log has some more for each request that it counts.
const MAX_RECORDS: usize = 250_000;

/// What a policy decides about recorded requests, on empty counters.
#[derive(Debug, Default)]
pub(crate) struct Rehearsed {
    pub(crate) allowed: u64,
    pub(crate) denied: u64,
    /// In the order of the policy's rules.
    pub(crate) rules: Vec<RehearsedRule>,
    /// Whether each request was allowed.
    pub(crate) verdicts: Vec<bool>,
}

/// What one rule does.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct RehearsedRule {
    pub(crate) name: String,
    /// The requests that it counted, or would have if they had been allowed.
    pub(crate) hits: u64,
    /// Those after which little of the limit was left, or nothing.
    pub(crate) near: u64,
    /// Those that it denied.
    pub(crate) blocked: u64,
    /// Those that it would have denied if it were not `observe`.
    pub(crate) observed: u64,
}

/// Rehearses policies on the recorded requests, as long as that is wanted. If that needs more memory than it may have, the oldest requests
/// are dropped from the recording.
pub(crate) fn rehearse<const N: usize>(
    policies: [&Policy; N],
    recording: &mut Recording,
    is_wanted: &dyn Fn() -> bool,
) -> [Rehearsed; N] {
    rehearse_within(MAX_RECORDS, policies, recording, is_wanted)
}

fn rehearse_within<const N: usize>(
    max: usize,
    policies: [&Policy; N],
    recording: &mut Recording,
    is_wanted: &dyn Fn() -> bool,
) -> [Rehearsed; N] {
    loop {
        let rehearsed = policies.map(|policy| rehearse_all(max, policy, recording, is_wanted));
        // Fewer requests in place of an error: what was not rehearsed cannot be saved on the page.
        if rehearsed.iter().any(Option::is_none) && !recording.requests.is_empty() {
            recording.drop_older_half();
            continue;
        }
        return rehearsed.map(Option::unwrap_or_default);
    }
}

/// Rehearses a policy on all requests; `None` if that needs more records than `max`.
fn rehearse_all(max: usize, policy: &Policy, recording: &Recording, is_wanted: &dyn Fn() -> bool) -> Option<Rehearsed> {
    let rules =
        policy.rules().iter().map(|rule| RehearsedRule { name: rule.name.to_string(), ..RehearsedRule::default() });
    let mut rehearsed = Rehearsed { rules: rules.collect(), ..Rehearsed::default() };
    let mut ledger = Ledger::default();
    for request in recording.requests.iter().take_while(|_| is_wanted()) {
        let decided = request.with_facts(|facts| ledger.decide(policy, Verb::Check, facts, request.at));
        // What cannot be planned, such as a cost above its limit, is no decision: a caller gets an error, and a client a denial.
        let allowed = decided.as_ref().is_ok_and(|checked| checked.decision.allowed());
        rehearsed.verdicts.push(allowed);
        if ledger.len() > max {
            ledger.sweep(request.at);
            // Where little can be dropped, it would be looked for at nearly every request.
            if ledger.len() > max.div_ceil(2) {
                return None;
            }
        }
        let sum = if allowed { &mut rehearsed.allowed } else { &mut rehearsed.denied };
        *sum = sum.saturating_add(1);
        let Ok(checked) = decided else { continue };
        let binding = checked.decision.bound_by().filter(|_| !allowed).map(threshold_core::Reading::rule);
        for reading in &checked.decision.readings {
            let Some(rule) = rehearsed.rules.get_mut(reading.rule()) else { continue };
            let count = |sum: &mut u64, counts: bool| *sum = sum.saturating_add(counts.into());
            count(&mut rule.hits, true);
            count(&mut rule.near, reading.remaining < reading.limit.div_ceil(NEAR));
            count(&mut rule.blocked, binding == Some(reading.rule()));
            count(&mut rule.observed, !reading.enforced && !reading.allowed);
        }
    }
    Some(rehearsed)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use threshold_core::{Span, Timestamp};
    use threshold_limiter::{Facts, Limiter, ManualClock};

    use super::super::recent_requests::RecentRequests;
    use super::*;

    const START: Timestamp = Timestamp::from_secs(1_767_225_600);
    const POLICY: &str = "
        [[rule]]
        name = 'posts'
        layer = 'user'
        per = ['user']
        limit = '5/h'
        algorithm = 'fixed-window'
        [[rule]]
        name = 'watched'
        layer = 'endpoint'
        per = ['user']
        limit = '2/h'
        algorithm = 'fixed-window'
        mode = 'observe'
    ";

    /// The limiter itself is the oracle: on the same requests from the start, a rehearsal decides as it has decided.
    ///
    /// Woken by counting `blocked` for every full rule, or `observed` for enforced ones.
    #[test]
    fn a_rehearsal_of_the_policy_in_force_decides_as_the_limiter_did() {
        let requests = Arc::<RecentRequests>::default();
        let policy = Policy::parse(POLICY, &|_| None).unwrap();
        let clock = ManualClock::new(START);
        let observer = Arc::<RecentRequests>::clone(&requests);
        let limiter = Limiter::builder(policy.clone()).clock(clock).observer(observer).build();
        let decide = |user: &str| limiter.check(&Facts { user: Some(user), ..Facts::default() }).unwrap().allowed();
        let decided: Vec<bool> = (0..8).flat_map(|_| ["a", "b"]).map(decide).collect();
        let [rehearsed] = rehearse([&policy], &mut requests.recording(START), &|| true);
        assert_eq!(rehearsed.verdicts, decided);
        assert_eq!((rehearsed.allowed, rehearsed.denied), (10, 6));
        let rule = |name: &str| rehearsed.rules.iter().find(|rule| rule.name == name).unwrap();
        let posts = rule("posts");
        assert_eq!((posts.hits, posts.near, posts.blocked, posts.observed), (16, 8, 6, 0));
        let watched = rule("watched");
        assert_eq!((watched.hits, watched.blocked, watched.observed), (16, 0, 12));
        let wider = POLICY.replace("5/h", "50/h");
        let wider = Policy::parse(&wider, &|_| None).unwrap();
        let [wider] = rehearse([&wider], &mut requests.recording(START), &|| true);
        assert_eq!((wider.allowed, wider.denied), (16, 0));
    }

    /// The balances of a rehearsal had no bound: a draft with sixteen rules made some gigabyte of the requests of an hour.
    ///
    /// Woken by leaving out the comparison with `max`, or `sweep`.
    #[test]
    fn a_rehearsal_without_memory_for_all_requests_is_one_of_the_newest() {
        let (draft, present) = (POLICY.replace("5/h", "50/h"), POLICY);
        let [draft, present] = [&*draft, present].map(|text| Policy::parse(text, &|_| None).unwrap());
        let recording = |span: Span| {
            let (requests, clock) = (Arc::<RecentRequests>::default(), Arc::new(ManualClock::new(START)));
            let observer = Arc::<RecentRequests>::clone(&requests);
            let limiter = Limiter::builder(present.clone()).clock(Arc::clone(&clock)).observer(observer).build();
            for number in 0..1_000 {
                let user = format!("u{number}");
                let _ = limiter.check(&Facts { user: Some(&user), ..Facts::default() }).unwrap();
                clock.advance(span);
            }
            requests.recording(limiter.now().into())
        };
        // Each user has a balance under both rules, for an hour.
        let mut all = recording(Span::ZERO);
        let [before, after] = rehearse_within(600, [&present, &draft], &mut all, &|| true);
        assert_eq!((all.requests.len(), before.allowed, after.allowed), (250, 250, 250));
        let last = all.requests.last().unwrap().with_facts(|facts| facts.user.unwrap().to_owned());
        assert_eq!(last, "u999", "the newest");
        let mut all = recording(Span::ZERO);
        let _: [Rehearsed; 1] = rehearse_within(2_000, [&present], &mut all, &|| true);
        assert_eq!(all.requests.len(), 1_000);
        // What has ended makes room.
        let brief = Policy::parse(&POLICY.replace("/h", "/min"), &|_| None).unwrap();
        let mut all = recording(Span::from_secs(3));
        let [brief] = rehearse_within(600, [&brief], &mut all, &|| true);
        assert_eq!((all.requests.len(), brief.allowed), (1_000, 1_000));
        let _: [Rehearsed; 1] = rehearse_within(0, [&present], &mut all, &|| true);
        assert_eq!(all.requests.len(), 0);
    }
}
