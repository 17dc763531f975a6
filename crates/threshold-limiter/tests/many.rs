//! A batch of requests is decided like the same requests one by one.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]

use proptest::prelude::*;
use threshold_limiter::{Decision, Facts, Limiter, ManualClock, PlanError, Policy, Timestamp};

const POLICY: &str = r#"
    [[rule]]
    name = "user"
    per = ["user"]
    limit = "5/h"

    [[rule]]
    name = "all"
    per = []
    limit = "40/h"
    algorithm = "fixed-window"

    [[rule]]
    name = "strikes"
    per = ["tenant"]
    limit = "3/h"
    ladder = "strict"
    strike = "request"
    on_missing = "skip"
    ban_shared = true
"#;

fn limiter() -> Limiter<threshold_limiter::store::memory::MemoryStore, ManualClock> {
    let policy = Policy::parse(POLICY, &|_| None).unwrap();
    Limiter::builder(policy).clock(ManualClock::new(Timestamp::from_secs(1_767_225_600))).build()
}

/// Returns the parts of an answer that a caller reads, without its id.
fn visible(answer: &Result<Decision, PlanError>) -> Result<String, String> {
    let decision = answer.as_ref().map_err(ToString::to_string)?;
    let Decision { verdict, readings, binding, ready_at, warning, .. } = decision;
    Ok(format!("{verdict} {readings:?} {binding:?} {ready_at:?} {warning}"))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(128) })]

    /// Batches of many lengths around the sixteen requests that are planned ahead, with some that cannot be planned. Seen to fail
    /// after deciding a batch from its end, and after keeping an error for the next batch.
    #[test]
    fn a_batch_is_decided_like_its_requests_one_by_one(
        batches in prop::collection::vec(
            prop::collection::vec((0usize..4, 0usize..4, prop_oneof![9 => 0u64..3, 1 => Just(6)]), 0..40),
            1..4,
        ),
    ) {
        let names = ["a", "b", "c", ""];
        let (one_by_one, together) = (limiter(), limiter());
        for batch in &batches {
            let facts: Vec<Facts<'_>> = batch
                .iter()
                .map(|(user, tenant, cost)| Facts {
                    user: names.get(*user).copied(),
                    tenant: names.get(*tenant).copied(),
                    cost: Some(*cost),
                    ip: Some("203.0.113.7".parse().unwrap()),
                    ..Facts::default()
                })
                .collect();
            let answers = together.check_many(&facts);
            let expected: Vec<_> = facts.iter().map(|facts| visible(&one_by_one.check(facts))).collect();
            prop_assert_eq!(answers.iter().map(visible).collect::<Vec<_>>(), expected);
        }
    }
}
