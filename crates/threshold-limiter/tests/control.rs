//! Bans and settings on nodes that share one store: a change on one node is in force on the others after they read it.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use threshold_core::control::{ControlChange, MAX_CHANGES_READ};
use threshold_core::policy::{Ban, ListEntry, Owner, Setting};
use threshold_core::{DigestKey, Span};
use threshold_limiter::store::{Answer, Command, Digest, Kind, Listed, Outcome, Plan, StoreError, Timestamp};
use threshold_limiter::{Facts, Limiter, ManualClock, Policy, Secret, Store};

#[path = "stores/key_value.rs"]
mod key_value;
use key_value::KeyValueStore;

const START: Timestamp = Timestamp::from_secs(1_767_225_600);
const KEY: DigestKey = DigestKey::new([7; 16]);
const POLICY: &str = "
    [tiers.pro]
    requests = '50/h'
    [[rule]]
    name = 'r'
    per = ['user']
    limit = '1/h'
    on_missing = 'skip'
";

/// The store that all nodes share. It can be replaced by an empty one, and can fail.
#[derive(Clone, Default)]
struct Shared {
    store: Arc<Mutex<Arc<KeyValueStore>>>,
    fails: Arc<Mutex<Option<StoreError>>>,
}

impl Shared {
    fn reach(&self) -> Result<Arc<KeyValueStore>, StoreError> {
        self.fails.lock().unwrap().map_or(Ok(Arc::clone(&self.store.lock().unwrap())), Err)
    }

    fn fail(&self, error: Option<StoreError>) {
        *self.fails.lock().unwrap() = error;
    }
}

impl Store for Shared {
    async fn settle(&self, plan: &Plan<'_>, now: Timestamp, outcome: &mut Outcome) -> Result<(), StoreError> {
        self.reach()?.settle(plan, now, outcome).await
    }

    async fn execute(&self, command: Command, now: Timestamp) -> Result<Answer, StoreError> {
        self.reach()?.execute(command, now).await
    }

    async fn list(
        &self,
        kind: Kind,
        after: Option<Digest>,
        limit: usize,
        now: Timestamp,
    ) -> Result<Vec<Listed>, StoreError> {
        self.reach()?.list(kind, after, limit, now).await
    }
}

type Node = Limiter<Shared, Arc<ManualClock>>;

fn node(store: &Shared, clock: &Arc<ManualClock>) -> Node {
    let policy = Policy::parse(POLICY, &|_| None).unwrap();
    Limiter::builder(policy)
        .store(store.clone())
        .clock(Arc::clone(clock))
        .digest_key(KEY)
        .secrets(Secret::new(&[7; 32]).unwrap())
        .build()
        .unwrap()
}

fn two_nodes() -> (Shared, Arc<ManualClock>, Node, Node) {
    let (store, clock) = (Shared::default(), Arc::new(ManualClock::new(START)));
    let (one, other) = (node(&store, &clock), node(&store, &clock));
    (store, clock, one, other)
}

fn ban(user: &str) -> ControlChange {
    let whom = ListEntry::User(user.into());
    let id = whom.ban_id(KEY);
    let ban = Ban { whom, reason: "r".into(), by: "ops".into(), from: START, until: Timestamp::MAX };
    ControlChange::Ban { id, ban: Some(Arc::new(ban)) }
}

fn lift(user: &str) -> ControlChange {
    ControlChange::Ban { id: ListEntry::User(user.into()).ban_id(KEY), ban: None }
}

fn times(user: &str, times: Option<u32>) -> ControlChange {
    let setting = times.map(|times| {
        let (limits, by, reason) = (BTreeMap::new(), "ops".into(), "".into());
        Arc::new(Setting { tier: None, limits, times, until: Timestamp::MAX, from: START, by, reason })
    });
    ControlChange::Setting { owner: Owner::User, name: user.into(), setting }
}

/// Returns whether a user is banned on this node, without asking the store.
fn is_banned(node: &Node, user: &str) -> bool {
    let id = ListEntry::User(user.into()).ban_id(KEY);
    node.bans().one(id, START).is_some()
}

async fn limit_of(node: &Node, user: &str) -> u64 {
    let facts = Facts { user: Some(user), ..Facts::default() };
    node.peek_async(&facts).await.unwrap().bound_by().unwrap().limit
}

#[tokio::test]
async fn a_change_on_one_node_is_in_force_on_the_other_and_can_be_removed_there() {
    let (_, _, one, other) = two_nodes();
    one.change_control(ban("eve")).await.unwrap();
    one.change_control(times("bob", Some(3))).await.unwrap();
    assert!(is_banned(&one, "eve") && !is_banned(&other, "eve"));
    assert_eq!((limit_of(&one, "bob").await, limit_of(&other, "bob").await), (3, 1));
    for _ in 0..2 {
        assert_eq!(other.follow_control().await, Ok(vec![]));
        assert!(is_banned(&other, "eve"));
        assert!(other.peek_async(&Facts { user: Some("eve"), ..Facts::default() }).await.unwrap().banned());
        assert_eq!(limit_of(&other, "bob").await, 3);
    }
    other.change_control(lift("eve")).await.unwrap();
    other.change_control(times("bob", None)).await.unwrap();
    assert!(is_banned(&one, "eve") && !is_banned(&other, "eve"));
    one.follow_control().await.unwrap();
    assert!(!is_banned(&one, "eve"));
    assert_eq!((limit_of(&one, "bob").await, limit_of(&other, "bob").await), (1, 1));
}

#[tokio::test]
async fn a_new_node_reads_all_pages_of_the_log() {
    let (store, clock, one, _) = two_nodes();
    // More than one page. The settings of one page are one change of the policy.
    for number in 0..=MAX_CHANGES_READ {
        let change = if number % 50 == 0 { times(&format!("u{number}"), Some(2)) } else { ban(&format!("u{number}")) };
        let command = Command::Control(Box::new(change));
        store.execute(command, START).await.unwrap();
    }
    let late = node(&store, &clock);
    late.follow_control().await.unwrap();
    assert_eq!((late.bans().all(START).len(), late.policy().settings_len()), (490, 11));
    assert_eq!(late.policy().generation(), 3);
    // A node that makes a change before it has read the log reads the rest at the same time.
    one.change_control(lift("u1")).await.unwrap();
    assert_eq!((one.bans().all(START).len(), one.policy().settings_len()), (489, 11));
}

/// Fails if a change is in force here before the store has it, or if a failed read changes anything.
#[tokio::test]
async fn while_the_store_fails_a_node_keeps_its_bans_and_settings() {
    let (store, _, one, other) = two_nodes();
    one.change_control(ban("eve")).await.unwrap();
    other.follow_control().await.unwrap();
    for error in [StoreError::Unavailable, StoreError::Timeout, StoreError::Full] {
        store.fail(Some(error));
        assert_eq!(other.follow_control().await, Err(error));
        assert_eq!(other.change_control(lift("eve")).await, Err(error));
        assert_eq!(other.change_control(ban("mallory")).await, Err(error));
        assert_eq!(other.change_control(times("bob", Some(2))).await, Err(error));
        assert!(is_banned(&other, "eve") && !is_banned(&other, "mallory"));
        assert_eq!(other.policy().settings_len(), 0);
        assert!(other.check_async(&Facts { user: Some("eve"), ..Facts::default() }).await.unwrap().banned());
    }
    store.fail(None);
    one.change_control(lift("eve")).await.unwrap();
    other.follow_control().await.unwrap();
    assert!(!is_banned(&other, "eve"));
}

/// A removal is kept for an hour. A node that has not read the log for longer reads the whole set and drops everything else.
///
/// Fails if `misses` is ignored, or if bans and settings that are gone are not dropped.
#[tokio::test]
async fn a_node_that_was_away_for_long_drops_bans_and_settings_removed_meanwhile() {
    let (_, clock, one, other) = two_nodes();
    for change in [ban("eve"), ban("stays"), times("bob", Some(3)), times("kept", Some(4))] {
        one.change_control(change).await.unwrap();
    }
    other.follow_control().await.unwrap();
    one.change_control(lift("eve")).await.unwrap();
    one.change_control(times("bob", None)).await.unwrap();
    clock.set(START.plus(Span::HOUR).plus(Span::SECOND));
    one.change_control(ban("new")).await.unwrap();
    other.follow_control().await.unwrap();
    assert_eq!(["eve", "stays", "new"].map(|user| is_banned(&other, user)), [false, true, true]);
    assert_eq!((limit_of(&other, "bob").await, limit_of(&other, "kept").await), (1, 4));
    one.change_control(lift("stays")).await.unwrap();
    other.follow_control().await.unwrap();
    assert!(!is_banned(&other, "stays"), "it continues from there");
}

/// Redis was restarted without persistence, and every operator's ban was lifted on all nodes by that. Nodes write back what they
/// know. A new log that has caught up with the old one is noticed too, and a ban that was lifted since stays lifted.
///
/// Fails if the beginning of the log is not compared, and if what is missing is dropped.
#[tokio::test]
async fn bans_and_settings_are_written_back_to_a_store_that_lost_its_log() {
    let (store, _, one, other) = two_nodes();
    for change in [ban("eve"), ban("mallory"), times("bob", Some(3))] {
        one.change_control(change).await.unwrap();
    }
    other.follow_control().await.unwrap();
    *store.store.lock().unwrap() = Arc::default();
    let third = node(&store, &Arc::new(ManualClock::new(START.plus(Span::SECOND))));
    third.change_control(ban("trudy")).await.unwrap();
    one.follow_control().await.unwrap();
    third.change_control(lift("eve")).await.unwrap();
    for node in [&one, &other, &third] {
        node.follow_control().await.unwrap();
        assert_eq!(["eve", "mallory", "trudy"].map(|user| is_banned(node, user)), [false, true, true]);
        assert_eq!(limit_of(node, "bob").await, 3);
    }
    other.change_control(lift("trudy")).await.unwrap();
    one.follow_control().await.unwrap();
    assert!(!is_banned(&one, "trudy"));
}

fn poll<F: Future>(future: std::pin::Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// An answer that was under way while this node changed the same ban is older than the change.
///
/// Fails without `ahead`.
#[tokio::test]
async fn an_older_read_does_not_undo_a_change_of_this_node() {
    let (_, _, one, other) = two_nodes();
    one.change_control(ban("eve")).await.unwrap();
    let mut reading = pin!(other.follow_control());
    // Sent, and executed by the store.
    assert!(poll(reading.as_mut()).is_pending() && poll(reading.as_mut()).is_pending());
    let mut lifting = pin!(other.change_control(lift("eve")));
    // Sent, executed and answered. Now the node reads the changes that it has not read yet.
    for _ in 0..3 {
        assert!(poll(lifting.as_mut()).is_pending());
    }
    assert_eq!(reading.await, Ok(vec![]));
    assert!(!is_banned(&other, "eve"));
    assert_eq!(lifting.await, Ok(vec![]));
    one.follow_control().await.unwrap();
    assert!(!is_banned(&one, "eve") && !is_banned(&other, "eve"));
}

/// Nodes may have different policies while a new one is rolled out.
#[tokio::test]
async fn a_setting_that_does_not_fit_the_policy_is_kept_for_the_next_reload() {
    let (_, _, one, other) = two_nodes();
    let policy = |text: &str| Policy::parse(text, &|_| None).unwrap();
    assert_eq!(other.reload(policy(&POLICY.replace("pro", "oak"))).1, vec![]);
    let setting = Setting {
        tier: Some("pro".into()),
        limits: BTreeMap::new(),
        times: 2,
        until: START.plus(Span::HOUR),
        from: START,
        by: "ops".into(),
        reason: "".into(),
    };
    let change = ControlChange::Setting { owner: Owner::User, name: "bob".into(), setting: Some(Arc::new(setting)) };
    assert_eq!(one.change_control(change).await, Ok(vec![]));
    let unfit = other.follow_control().await.unwrap();
    assert_eq!(
        unfit.iter().map(|(_, name, error)| (&**name, error.field())).collect::<Vec<_>>(),
        [("bob", "tier".to_owned())]
    );
    assert_eq!((limit_of(&one, "bob").await, limit_of(&other, "bob").await), (2, 1));
    assert_eq!(other.reload(policy(POLICY)).1, vec![]);
    assert_eq!(limit_of(&other, "bob").await, 2);
    // Each node ends it by its own clock.
    other.end_settings(START.into());
    assert_eq!(limit_of(&other, "bob").await, 2);
    other.end_settings(START.plus(Span::HOUR).into());
    assert_eq!(limit_of(&other, "bob").await, 1);
}
