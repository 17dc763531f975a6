//! Several requests in one decision, on the store in memory and on a key-value store of bytes.

#![cfg(all(feature = "memory", feature = "toml"))]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]

use std::sync::{Arc, Mutex};

use threshold_core::plan::Verb;
use threshold_core::policy::Memory;
use threshold_limiter::limiter::{JointDecision, JointError, JointRequest};
use threshold_limiter::store::Store;
use threshold_limiter::store::memory::MemoryStore;
use threshold_limiter::{Facts, Limiter, ManualClock, ObservedDecision, Observer, Operation, Policy, Secret, Span};

#[path = "stores/key_value.rs"]
mod key_value;
use key_value::KeyValueStore;

const POLICY: &str = r#"
    [ladders.hard]
    rungs = ["ban 1h"]
    [[rule]]
    name = "tenant"
    per = ["tenant"]
    limit = "10/h"
    [[rule]]
    name = "user"
    per = ["user"]
    limit = "3/h"
    ladder = "hard"
"#;

/// Collects which user's request observers are told about.
#[derive(Default)]
struct Told(Mutex<Vec<(Operation, Option<String>)>>);

impl Observer for Told {
    fn decided(&self, observed: &ObservedDecision<'_>) {
        self.0.lock().unwrap().push((observed.operation, observed.facts.user.map(str::to_owned)));
    }
}

struct Node<S> {
    limiter: Limiter<S, Arc<ManualClock>>,
    told: Arc<Told>,
}

fn tenant(name: &str, cost: u64) -> JointRequest<'_> {
    let facts = Facts { tenant: Some(name), cost: Some(cost), ..Facts::default() };
    JointRequest { facts, skips_missing: true, rate: None }
}

fn user(name: &str, cost: u64) -> JointRequest<'_> {
    let facts = Facts { user: Some(name), cost: Some(cost), ..Facts::default() };
    JointRequest { facts, skips_missing: true, rate: None }
}

/// Returns whether it is allowed, and for each reading its request, whether it has room, and what is left.
fn read(joint: &JointDecision) -> (bool, Vec<(usize, bool, u64)>) {
    let readings = joint.requests.iter().zip(&joint.decision.readings);
    (joint.decision.allowed(), readings.map(|(own, reading)| (*own, reading.allowed, reading.remaining)).collect())
}

impl<S: Store> Node<S> {
    fn on(store: S) -> Self {
        let told = Arc::<Told>::default();
        let policy = Policy::parse(POLICY, &|_| None).unwrap();
        let builder = Limiter::builder(policy).store(store).clock(Arc::<ManualClock>::default());
        let limiter =
            builder.secrets(Secret::new(&[7; 32]).unwrap()).observer(Arc::<Told>::clone(&told)).build().unwrap();
        Self { limiter, told }
    }

    async fn decide(&self, verb: Verb, requests: &[JointRequest<'_>]) -> Result<Box<JointDecision>, JointError> {
        self.limiter.decide_jointly(&self.limiter.policy(), verb, requests).await
    }

    /// Woken by: deciding each request alone, positions of the plan in place of those of the requests, and `name_banned` for the first
    /// request only.
    async fn check_all(&self) {
        let check = async |requests: &[JointRequest<'_>]| self.decide(Verb::Check, requests).await.unwrap();
        // One budget is charged once, with the sum.
        let joint = check(&[tenant("t", 2), user("u", 1), tenant("t", 1)]).await;
        assert_eq!(read(&joint), (true, vec![(0, true, 7), (1, true, 2), (2, true, 7)]));
        // A cost that never fits: the others are looked at, and have what is left without their costs.
        let joint = check(&[user("u", 4), tenant("t", 1), user("u", 1)]).await;
        assert_eq!(read(&joint), (true, vec![(1, true, 7), (2, true, 2)]));
        assert_eq!(joint.unplanned.iter().map(|(index, _)| *index).collect::<Vec<_>>(), [0]);
        // All of them, or none.
        let joint = check(&[tenant("t", 1), user("u", 1), user("u", 2)]).await;
        assert_eq!(read(&joint), (false, vec![(0, true, 7), (1, false, 2), (2, false, 2)]));
        let joint = check(&[tenant("t", 0)]).await;
        assert_eq!(read(&joint), (true, vec![(0, true, 7)]));
        // Its own strike, by its own name.
        assert!(check(&[tenant("t", 1), user("u", 1)]).await.decision.banned());
        let mut named = Vec::new();
        self.limiter.bans().each_named(|_, ban| named.push(format!("{:?}", ban.whom)));
        assert!(named.len() == 1 && named.concat().contains("\"u\""), "{named:?}");
        // What is recorded is charged whatever it costs, beside what cannot be.
        let lacking = JointRequest { skips_missing: false, ..tenant("", 1) };
        let joint = self.decide(Verb::Record, &[lacking, tenant("t", 9)]).await.unwrap();
        assert_eq!((read(&joint), joint.unplanned.len()), ((true, vec![(1, true, 0)]), 1));
        let many: Vec<String> = (0..17).map(|n| n.to_string()).collect();
        let many: Vec<JointRequest<'_>> = many.iter().map(|name| tenant(name, 1)).collect();
        assert_eq!(self.decide(Verb::Check, &many).await.unwrap_err(), JointError::TooManyRules);
        let told = std::mem::take(&mut *self.told.0.lock().unwrap());
        let user = |operation, user: Option<&str>| (operation, user.map(str::to_owned));
        let (check, record) = (Operation::Check, Operation::Record);
        // Each once, about the request that binds; nothing was decided where one could not be planned.
        assert!(told.starts_with(&[user(check, Some("u")), user(check, Some("u"))]), "{told:?}");
        assert_eq!((told.len(), told.last()), (5, Some(&user(record, None))));
        // The one who is banned, whichever request comes first.
        assert!(self.decide(Verb::Check, &[tenant("other", 1), self::user("u", 0)]).await.unwrap().decision.banned());
        assert_eq!(std::mem::take(&mut *self.told.0.lock().unwrap()), [user(check, Some("u"))]);
    }

    /// Woken by: `Command::Credit` on the first limit alone.
    async fn check_credit(&self) {
        let policy = self.limiter.policy();
        let both = |cost| JointRequest {
            facts: Facts { tenant: Some("t"), user: Some("v"), cost: Some(cost), ..Facts::default() },
            ..JointRequest::default()
        };
        let left = async |cost| {
            let joint = self.decide(Verb::Check, &[both(cost)]).await.unwrap();
            joint.decision.readings.iter().map(|reading| reading.remaining).collect::<Vec<_>>()
        };
        assert_eq!(left(3).await, [7, 0]);
        self.limiter.credit(&policy, &both(2), &[]).await.unwrap();
        assert_eq!(left(0).await, [9, 2]);
        self.limiter.credit(&policy, &both(100), &[]).await.unwrap();
        assert_eq!(left(0).await, [10, 3]);
    }

    /// Woken by: a rate of its own that the policy's limit bounds.
    async fn check_rates(&self) {
        let with = |cost, rate| JointRequest { rate: Some((rate, Span::MINUTE)), ..user("w", cost) };
        let joint = self.decide(Verb::Check, &[with(5, 6)]).await.unwrap();
        assert_eq!(read(&joint), (true, vec![(0, true, 1)]));
        assert!(!self.decide(Verb::Peek, &[with(2, 6)]).await.unwrap().decision.allowed());
        assert_eq!(self.decide(Verb::Check, &[with(7, 6)]).await.unwrap().unplanned.len(), 1);
    }
}

#[tokio::test]
async fn several_requests_are_decided_in_one_step() {
    Node::on(MemoryStore::new(Memory::default())).check_all().await;
    Node::on(KeyValueStore::default()).check_all().await;
}

#[tokio::test]
async fn a_cost_is_given_back_without_a_receipt_at_most_as_far_as_it_counts() {
    Node::on(MemoryStore::new(Memory::default())).check_credit().await;
    Node::on(KeyValueStore::default()).check_credit().await;
}

#[tokio::test]
async fn a_request_may_bring_a_rate_of_its_own() {
    Node::on(MemoryStore::new(Memory::default())).check_rates().await;
    Node::on(KeyValueStore::default()).check_rates().await;
}
