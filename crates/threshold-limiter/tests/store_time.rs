//! A store with a clock of its own: nodes whose clocks are wrong answer as the others do.

#![expect(
    clippy::arithmetic_side_effects,
    clippy::unwrap_used,
    reason = "a test that cannot go on should say so loudly, on the line where it stops"
)]

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use threshold_core::control::ControlChange;
use threshold_core::policy::{Owner, Setting};
use threshold_core::{DigestKey, Span};
use threshold_limiter::store::memory::MemoryStore;
use threshold_limiter::store::{Answer, AnyStore, Command, Digest, Kind, Listed, Outcome, Plan, StoreError, Timestamp};
use threshold_limiter::{
    Attempted, Clock as _, Facts, Layer, Limit, Limiter, LoginRequest, ManualClock, Policy, Secret, Store,
};
use tokio::task::yield_now;

const START: Timestamp = Timestamp::from_secs(1_767_225_600);
const POLICY: &str = "[login]\n[[rule]]\nname = 'r'\nper = ['user']\nlimit = '1/min'\n[memory]\nmax_keys = 1000\n";

/// A store in memory that behaves like a shared one: it is never ready at the first poll, and only its own clock counts.
struct SharedStore {
    memory: MemoryStore,
    clock: ManualClock,
}

impl Store for SharedStore {
    fn now(&self) -> Option<Timestamp> {
        Some(self.clock.now())
    }

    async fn settle(&self, plan: &Plan<'_>, _: Timestamp, outcome: &mut Outcome) -> Result<(), StoreError> {
        yield_now().await;
        self.memory.settle(plan, self.clock.now(), outcome).await
    }

    async fn execute(&self, command: Command, _: Timestamp) -> Result<Answer, StoreError> {
        yield_now().await;
        self.memory.execute(command, self.clock.now()).await
    }

    async fn list(
        &self,
        kind: Kind,
        after: Option<Digest>,
        limit: usize,
        _: Timestamp,
    ) -> Result<Vec<Listed>, StoreError> {
        self.memory.list(kind, after, limit, self.clock.now()).await
    }
}

type Node = Limiter<AnyStore, ManualClock>;

/// Returns a store and three nodes on it: one with the store's time, one an hour behind and one an hour ahead.
fn world() -> (Arc<SharedStore>, [Node; 3]) {
    let policy = || Policy::parse(POLICY, &|_| None).unwrap();
    let store = SharedStore { memory: MemoryStore::new(policy().memory()), clock: ManualClock::new(START) };
    let store = Arc::new(store);
    let nodes = [START, Timestamp::from_secs(START.secs_ceil() - 3_600), START.plus(Span::HOUR)].map(|now| {
        Limiter::builder(policy())
            .store(AnyStore::other(Arc::clone(&store)))
            .clock(ManualClock::new(now))
            .digest_key(DigestKey::new([7; 16]))
            .secrets(Secret::new(&[7; 32]).unwrap())
            .build()
            .unwrap()
    });
    (store, nodes)
}

fn after(seconds: u64) -> SystemTime {
    START.plus(Span::from_secs(seconds)).into()
}

/// A node's clock was an hour ahead. Its pauses lasted an hour longer on all nodes, and its own answers told clients to retry at
/// once.
#[tokio::test]
async fn pauses_and_limits_are_the_same_on_nodes_with_wrong_clocks() {
    let (store, nodes) = world();
    let limit: Limit = "1/min".parse().unwrap();
    for (number, node) in nodes.iter().enumerate() {
        let name = format!("u{number}");
        node.pause_async(Layer::User, &name, Duration::from_secs(60)).await.unwrap();
        let facts = Facts { user: Some(&name), ..Facts::default() };
        let first = node.check_limit(&name, &limit, 1).await.unwrap();
        for other in &nodes {
            let until = other.blocked_until(other.policy().keys_of(Layer::User, &name)).await.unwrap();
            assert_eq!(until, Some(after(60)));
            assert_eq!(other.check_async(&facts).await.unwrap().retry_after_secs(), Some(60));
            let denied = other.check_limit(&name, &limit, 1).await.unwrap();
            assert_eq!((denied.reset_at, denied.retry_after), (Some(after(60)), Some(Duration::from_secs(60))));
            assert_eq!((first.allowed, first.reset_at), (true, denied.reset_at));
        }
    }
    store.clock.advance(Span::MINUTE);
    for node in &nodes {
        let keys = node.policy().keys_of(Layer::User, "u0");
        assert_eq!(node.blocked_until(keys).await.unwrap(), None);
    }
}

/// A locked account was shown as open on a node whose clock was ahead, and as locked for an hour on one that was behind.
#[tokio::test]
async fn a_lock_ends_at_the_same_time_on_nodes_with_wrong_clocks() {
    let (_, nodes) = world();
    let ada = LoginRequest { account: Some("ada"), ..LoginRequest::default() };
    for failure in 0..3 {
        let attempted = nodes[failure].login_attempt_async(&ada).await.unwrap();
        let result = nodes[(failure + 1) % 3].login_result_async(attempted.token().unwrap(), false).await.unwrap();
        assert_eq!(result.lockout_remaining, (failure == 2).then_some(Duration::from_secs(60)));
    }
    for node in &nodes {
        let Attempted::Refused(refusal) = node.login_attempt_async(&ada).await.unwrap() else { panic!("it is locked") };
        assert_eq!(refusal.retry_after, Some(Duration::from_secs(60)));
    }
}

/// An operator's setting for a minute ended at once on a node whose clock was ahead.
#[tokio::test]
async fn bans_and_settings_end_by_the_time_of_the_store() {
    let (store, nodes) = world();
    for node in &nodes {
        assert_eq!(node.now(), after(0));
    }
    let until = Timestamp::from(nodes[2].now()).plus(Span::MINUTE);
    let setting = Setting {
        tier: None,
        limits: Default::default(),
        times: 5,
        until,
        from: Timestamp::from(nodes[2].now()),
        by: "ops".into(),
        reason: "".into(),
    };
    let setting = Some(Arc::new(setting));
    let change = ControlChange::Setting { owner: Owner::User, name: "ada".into(), setting };
    nodes[2].change_control(change).await.unwrap();
    for node in &nodes {
        node.follow_control().await.unwrap();
    }
    for seconds in [59, 1] {
        for node in &nodes {
            node.end_settings(node.now());
            assert!(node.policy().setting(Owner::User, "ada").is_some(), "{seconds}");
        }
        store.clock.advance(Span::from_secs(seconds));
    }
    for node in &nodes {
        node.end_settings(node.now());
        assert!(node.policy().setting(Owner::User, "ada").is_none());
    }
}
