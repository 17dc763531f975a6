//! Partitions that fail. Each one is a store in memory, which refuses some calls.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use threshold_core::receipt::OnExpire;
use threshold_core::{Facts, Policy, Receipt, Span, Timestamp};

use super::*;
use crate::store::Store as _;
use crate::store::memory::MemoryStore;
use crate::sync::Mutex;

const NOW: Timestamp = Timestamp::from_secs(1_767_225_600);
const TIMEOUT: PartitionError = PartitionError::Store(StoreError::Timeout);
const REFUSED: PartitionError = PartitionError::Store(StoreError::Unavailable);

/// A store whose partitions fail as a test says.
struct Failing {
    policy: Policy,
    records: Mutex<HashMap<Partition, Arc<MemoryStore>>>,
    /// The errors of the next calls of a partition, in their order. `None` lets a call through.
    errors: Mutex<HashMap<Partition, VecDeque<Option<PartitionError>>>>,
    later: Mutex<Vec<(Partition, Command)>>,
}

impl Failing {
    fn new(policy: &Policy) -> Self {
        Self { policy: policy.clone(), records: Mutex::default(), errors: Mutex::default(), later: Mutex::default() }
    }

    fn of(&self, partition: Partition) -> Arc<MemoryStore> {
        let new = || Arc::new(MemoryStore::new(self.policy.memory()));
        Arc::clone(self.records.lock().unwrap().entry(partition).or_insert_with(new))
    }

    fn fail(&self, partition: Partition, errors: impl IntoIterator<Item = Option<PartitionError>>) {
        self.errors.lock().unwrap().entry(partition).or_default().extend(errors);
    }
}

impl Partitions for Failing {
    async fn execute(&self, partition: Partition, command: Command) -> Result<Answer, PartitionError> {
        let error = self.errors.lock().unwrap().get_mut(&partition).and_then(VecDeque::pop_front).flatten();
        match error {
            Some(error) => Err(error),
            None => Ok(self.of(partition).execute(command, NOW).await?),
        }
    }

    fn home(&self, id: TraceId) -> Partition {
        Digest::from_u128(id.to_u128()).partition()
    }

    fn execute_later(&self, commands: Vec<(Partition, Command)>) {
        self.later.lock().unwrap().extend(commands);
    }
}

fn facts() -> Facts<'static> {
    Facts { user: Some("ada"), tenant: Some("acme"), ..Facts::default() }
}

/// Returns the policy and the bill of a request that a tenant and a user pay for.
fn request(identity: &str) -> (Policy, OwnedBill) {
    let rule =
        |name| format!("[[rule]]\nname = '{name}'\nper = ['{name}']\nlimit = '9/day'\nalgorithm = 'fixed-window'\n");
    let policy = Policy::parse(&format!("{identity}{}{}", rule("tenant"), rule("user")), &|_| None).unwrap();
    let bill = policy.plan(&facts()).unwrap().bill().to_owned();
    (policy, bill)
}

/// A primary had charged and its answer was lost, another one was down. The request counted as certainly not charged, and was
/// recorded a second time when the store returned.
#[tokio::test]
async fn a_bill_that_a_partition_may_have_charged_fails_with_a_timeout() {
    let (policy, bill) = request("");
    let partitions = bill.as_bill().partitions();
    assert_eq!(partitions.len(), 2);
    for errors in [[TIMEOUT, REFUSED], [REFUSED, TIMEOUT]] {
        let store = Failing::new(&policy);
        partitions.iter().zip(errors).for_each(|(partition, error)| store.fail(*partition, [Some(error)]));
        assert_eq!(settle(&store, Box::new(bill.clone())).await.err(), Some(StoreError::Timeout));
    }
    let store = Failing::new(&policy);
    partitions.iter().for_each(|partition| store.fail(*partition, [Some(REFUSED)]));
    assert_eq!(settle(&store, Box::new(bill)).await.err(), Some(StoreError::Unavailable));
}

/// One partition was away while the others were credited, and each attempt to reach it credited the others again: a tenant was admitted
/// 1,719 times at a limit of 1,000.
///
/// Woken by: `execute_later` with all parts, and by a credit without an id.
#[tokio::test]
async fn what_is_given_back_counts_once_however_often_it_is_sent() {
    for error in [REFUSED, TIMEOUT] {
        let (policy, bill) = request("");
        let store = Failing::new(&policy);
        let settled = settle(&store, Box::new(bill.clone())).await.unwrap();
        let _ = settle(&store, Box::new(bill.clone())).await.unwrap();
        let receipt = Box::new(Receipt::of_bill(&bill.as_bill(), &settled).unwrap());
        let away = bill.as_bill().partitions()[0];
        store.fail(away, [Some(error), Some(error)]);
        let command = Command::GiveBack { credit: Some(receipt.id()), receipt };
        assert_eq!(execute(&store, command.clone()).await, Ok(Answer::Done));
        let mut later = std::mem::take(&mut *store.later.lock().unwrap());
        assert!(later.iter().all(|(partition, _)| *partition == away), "only what was not carried out: {later:?}");
        // Also if its answer is lost.
        let again = later.clone();
        while !later.is_empty() {
            later = complete(&store, later).await;
        }
        assert!(complete(&store, again).await.is_empty());
        assert_eq!(execute(&store, command).await, Ok(Answer::Done));
        // 9 less the second request, which is still charged, and less this one.
        let outcome = settle(&store, Box::new(bill)).await.unwrap();
        let decision = policy.plan(&facts()).unwrap().decide(&outcome);
        let left: Vec<u64> = decision.readings.iter().map(|reading| reading.remaining).collect();
        assert_eq!(left, [7, 7]);
    }
}

/// A partition with a ladder is looked at before it is charged. When its charge had failed, what the look had shown was given back, and the
/// caller's limit grew.
///
/// Woken by: an outcome of the look that stays when the charge is sent.
#[tokio::test]
async fn what_was_only_looked_at_is_not_given_back() {
    for error in [REFUSED, TIMEOUT] {
        let policy = "[[rule]]\nname = 'tenant'\nper = ['tenant']\nlimit = '9/day'\nalgorithm = 'fixed-window'\n\
                      [[rule]]\nname = 'user'\nper = ['user']\nlimit = '9/day'\nalgorithm = 'fixed-window'\nladder = 'strict'\n";
        let policy = Policy::parse(policy, &|_| None).unwrap();
        let plan = policy.plan(&facts()).unwrap();
        let user = plan.subjects()[0].key().partition();
        let store = Failing::new(&policy);
        store.fail(user, [None, Some(error)]);
        assert!(settle(&store, Box::new(plan.bill().to_owned())).await.is_err());
        let returned: Vec<Partition> = store.later.lock().unwrap().iter().map(|(partition, _)| *partition).collect();
        assert_eq!(returned.len(), 1);
        assert!(!returned.contains(&user), "nothing was charged there");
    }
}

/// Of a reservation whose parts are in two partitions, every part ends once, and an end that has failed is repeated.
#[tokio::test]
async fn a_reservation_ends_in_all_of_its_partitions() {
    for fails in [0, 1] {
        let (policy, _) = request("");
        let mut plan = policy.plan(&facts()).unwrap();
        plan.identify(|| TraceId::from_u128(7));
        let (bill, terms) = (plan.bill().to_owned(), plan.hold_terms(Span::MINUTE, OnExpire::Charge));
        let (store, id) = (Failing::new(&policy), plan.trace());
        let reserved = reserve(&store, Box::new(bill.clone()), &terms).await.unwrap();
        assert!(!bill.as_bill().is_denied(&reserved));
        store.fail(bill.as_bill().partitions()[fails], [Some(TIMEOUT)]);
        assert_eq!(execute(&store, Command::Release { id }).await, Err(StoreError::Timeout));
        for _ in 0..2 {
            assert!(matches!(execute(&store, Command::Release { id }).await, Ok(Answer::Ended(Ok(_)))));
        }
        let outcome = settle(&store, Box::new(bill)).await.unwrap();
        let left: Vec<u64> = plan.decide(&outcome).readings.iter().map(|reading| reading.remaining).collect();
        assert_eq!(left, [8, 8]);
    }
}
