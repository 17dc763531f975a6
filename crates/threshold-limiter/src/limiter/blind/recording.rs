//! Tests of charges that are recorded while a part of the store is still away.

use std::collections::BTreeSet;
use std::sync::Arc;

use threshold_core::{Facts, Outcome, Plan, Policy};

use super::*;
use crate::clock::ManualClock;
use crate::store::memory::MemoryStore;
use crate::store::{Answer, Kind, Listed};

const NOW: Timestamp = Timestamp::from_secs(1_767_225_600);

/// A store in memory, some partitions of which cannot be reached.
struct PartlyAway {
    memory: MemoryStore,
    away: Arc<Mutex<BTreeSet<Partition>>>,
}

impl PartlyAway {
    fn reach(&self, bill: &Bill<'_>) -> Result<&MemoryStore, StoreError> {
        let away = self.away.lock().unwrap();
        let is_away = bill.partitions().iter().any(|partition| away.contains(partition));
        if is_away { Err(StoreError::Unavailable) } else { Ok(&self.memory) }
    }
}

impl Store for PartlyAway {
    async fn settle(&self, plan: &Plan<'_>, now: Timestamp, outcome: &mut Outcome) -> Result<(), StoreError> {
        self.reach(plan.bill())?.settle(plan, now, outcome).await
    }

    async fn execute(&self, command: Command, now: Timestamp) -> Result<Answer, StoreError> {
        match &command {
            Command::Settle(bill) => self.reach(&bill.as_bill()).map(drop)?,
            Command::GiveBack { receipt, .. } => {
                let away = self.away.lock().unwrap();
                if receipt.keys().any(|key| away.contains(&key.partition())) {
                    return Err(StoreError::Unavailable);
                }
            }
            _ => {}
        }
        self.memory.execute(command, now).await
    }

    async fn list(
        &self,
        kind: Kind,
        after: Option<Digest>,
        limit: usize,
        now: Timestamp,
    ) -> Result<Vec<Listed>, StoreError> {
        self.memory.list(kind, after, limit, now).await
    }
}

struct World {
    limiter: Limiter<PartlyAway, Arc<ManualClock>>,
    clock: Arc<ManualClock>,
    away: Arc<Mutex<BTreeSet<Partition>>>,
}

impl World {
    fn new(limit: &str) -> Self {
        let rule = "[[rule]]\nname = 'user'\nper = ['user']\non_store_error = 'open'\n";
        let policy = Policy::parse(&format!("{rule}{limit}\n"), &|_| None).unwrap();
        let (away, clock) = (Arc::default(), Arc::new(ManualClock::new(NOW)));
        let store = PartlyAway { memory: MemoryStore::new(policy.memory()), away: Arc::clone(&away) };
        let limiter = Limiter::builder(policy).store(store).clock(Arc::clone(&clock)).build().unwrap();
        Self { limiter, clock, away }
    }

    fn partition(&self, user: &str) -> Partition {
        let policy = self.limiter.policy();
        let plan = policy.plan(&Facts { user: Some(user), ..Facts::default() }).unwrap();
        plan.bill().partitions()[0]
    }

    /// Makes the partitions of these users unreachable, and no others.
    fn set_away(&self, users: &[&str]) {
        *self.away.lock().unwrap() = users.iter().map(|user| self.partition(user)).collect();
    }

    /// Sends a request, and returns what is left of its user's limit by the store; `None` if it was decided without the store.
    async fn check(&self, user: &str) -> Option<u64> {
        let decision = self.limiter.check_async(&Facts { user: Some(user), ..Facts::default() }).await.unwrap();
        assert!(decision.allowed());
        decision.degraded.is_none().then(|| decision.readings[0].remaining)
    }
}

/// A store was away for longer than a window. Each attempt to record what was admitted at its beginning began the window again, and
/// users were denied for requests that no longer counted.
#[tokio::test]
async fn a_charge_keeps_its_time_until_it_is_recorded() {
    let world = World::new("limit = '10/min'\nalgorithm = 'sliding-log'");
    world.set_away(&["ada"]);
    assert_eq!((world.check("ada").await, world.check("ada").await), (None, None));
    world.clock.advance(Span::from_secs(50));
    assert_eq!(world.check("ada").await, None);
    world.limiter.catch_up().await;
    world.clock.advance(Span::from_secs(11));
    world.set_away(&[]);
    world.limiter.catch_up().await;
    assert_eq!(world.check("ada").await, Some(8), "the third request counts, and this one");
}

/// A request was admitted while the earlier ones of its user were being recorded in vain. All of them are recorded in the end.
#[tokio::test]
async fn charges_of_a_key_are_put_together_again() {
    let blind = BlindCharges::default();
    let world = World::new("limit = '10/min'\nalgorithm = 'sliding-log'");
    let policy = world.limiter.policy();
    let plan = policy.plan(&Facts { user: Some("ada"), ..Facts::default() }).unwrap();
    blind.add(plan.bill(), NOW);
    let mut taken = blind.take(9, NOW);
    let later = NOW.plus(Span::from_secs(30));
    blind.add(plan.bill(), later);
    taken.now = later;
    drop(taken);
    let used = |now| blind.take(9, now).left.front_mut().map(|(_, charge)| charge.used(now));
    let (at, mut half) = (NOW.plus(Span::from_secs(59)), blind.take(9, later));
    assert_eq!(half.left.len(), 1);
    half.now = at;
    drop(half);
    assert_eq!(used(at), Some(2));
}

/// One primary of three was still away. What had been admitted on the others was recorded only after it had returned, and their
/// limits were exceeded until then.
#[tokio::test]
async fn a_partition_that_is_away_keeps_no_other_from_its_charges() {
    let world = World::new("limit = '10/day'\nalgorithm = 'fixed-window'");
    let mut users = ["ada", "bob", "cem"];
    users.sort_by_key(|user| world.partition(user));
    world.set_away(&users);
    for user in users {
        assert_eq!(world.check(user).await, None);
    }
    for away in users {
        world.set_away(&[away]);
        world.limiter.catch_up().await;
    }
    world.set_away(&[]);
    for user in users {
        assert_eq!(world.check(user).await, Some(8), "{user}: one request without the store, and this one");
    }
}

/// A thousand keys of a partition that stays away do not take the turns of the others.
#[tokio::test]
async fn every_key_has_its_turn() {
    let world = World::new("limit = '10/day'\nalgorithm = 'fixed-window'");
    let blind = BlindCharges::default();
    let policy = world.limiter.policy();
    for user in ["ada", "bob", "cem"] {
        let plan = policy.plan(&Facts { user: Some(user), ..Facts::default() }).unwrap();
        blind.add(plan.bill(), NOW);
    }
    let mut seen = BTreeSet::new();
    for _ in 0..3 {
        seen.extend(blind.take(1, NOW).left.iter().map(|(place, _)| *place));
    }
    assert_eq!(seen.len(), 3);
}

/// Redis was slow for a moment, and was left alone after that. What it had charged too late was given back in vain, and stayed.
#[tokio::test]
async fn a_late_charge_is_given_back_when_the_store_takes_it() {
    let world = World::new("limit = '10/min'\nalgorithm = 'sliding-log'");
    let policy = world.limiter.policy();
    let plan = policy.plan(&Facts { user: Some("ada"), ..Facts::default() }).unwrap();
    let mut outcome = Outcome::default();
    world.limiter.store().settle(&plan, NOW, &mut outcome).await.unwrap();
    world.limiter.blind.awaits(plan.bill(), false, NOW);
    let bill = Box::new(plan.bill().to_owned());
    world.limiter.hear_late(LateAnswer::Settled { bill, answer: Ok(Box::new(outcome)) });
    world.set_away(&["ada"]);
    world.limiter.catch_up().await;
    world.set_away(&[]);
    assert_eq!(world.check("ada").await, Some(8), "it is not given back yet");
    world.limiter.catch_up().await;
    assert_eq!(world.check("ada").await, Some(8), "only the two requests since then count");
    assert!(world.limiter.blind.take_withdrawals().is_empty());
}

/// A node that ended while Redis was away, and one whose connection broke, lost charges, and nothing counted them.
#[tokio::test]
async fn every_charge_that_is_not_recorded_is_counted() {
    let world = World::new("limit = '10/min'\nalgorithm = 'sliding-log'");
    let counts = || {
        let limiter = &world.limiter;
        (limiter.waiting_charges(), limiter.unanswered_charges(), limiter.lost_charges())
    };
    world.set_away(&["ada"]);
    for _ in 0..3 {
        assert_eq!(world.check("ada").await, None);
    }
    assert_eq!(counts(), (3, 0, 0));
    world.limiter.catch_up().await;
    assert_eq!(counts(), (3, 0, 0), "put back");
    let policy = world.limiter.policy();
    let plan = policy.plan(&Facts { user: Some("bob"), ..Facts::default() }).unwrap();
    let late = || LateAnswer::Settled { bill: Box::new(plan.bill().to_owned()), answer: Err(StoreError::Timeout) };
    world.limiter.blind.awaits(plan.bill(), true, NOW);
    assert_eq!(counts(), (4, 0, 0));
    world.limiter.hear_late(late());
    assert_eq!(counts(), (3, 1, 0), "the connection broke while the call was under way");
    world.limiter.blind.awaits(plan.bill(), false, NOW);
    world.limiter.hear_late(late());
    assert_eq!(counts(), (3, 1, 0), "a refused request has charged nothing that should count");
    let mut recording = world.limiter.blind.take(9, NOW);
    let (_, part) = recording.next().unwrap();
    recording.sends(total(&part));
    assert_eq!(counts(), (3, 1, 0), "being recorded");
    recording.ended(Err(StoreError::Timeout), part, NOW);
    drop(recording);
    assert_eq!(counts(), (0, 4, 0));
    for _ in 0..2 {
        assert_eq!(world.check("ada").await, None);
    }
    world.limiter.abandon_charges();
    assert_eq!(counts(), (0, 4, 2));
    // After the move of a rotation that was not answered in time.
    assert!(world.limiter.decide_unsent(&plan, StoreError::Timeout, NOW).allowed());
    assert_eq!(counts(), (0, 4, 3));
}
