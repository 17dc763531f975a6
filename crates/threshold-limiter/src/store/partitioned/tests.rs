//! Partitions that fail. Each one is a store in memory, which refuses some calls.

use std::collections::{HashMap, VecDeque};

use threshold_core::{Facts, Policy, Receipt, Timestamp};

use super::*;
use crate::store::Store as _;
use crate::store::memory::MemoryStore;
use crate::sync::Mutex;

const NOW: Timestamp = Timestamp::from_secs(1_767_225_600);
const TIMEOUT: PartitionError = PartitionError::Store(StoreError::Timeout);
const REFUSED: PartitionError = PartitionError::Store(StoreError::Unavailable);

/// A store whose partitions fail as a test says.
struct Failing {
    records: MemoryStore,
    /// The errors of the next calls of a partition, in their order. `None` lets a call through.
    errors: Mutex<HashMap<Partition, VecDeque<Option<PartitionError>>>>,
    later: Mutex<Vec<(Partition, Command)>>,
}

impl Failing {
    fn new(policy: &Policy) -> Self {
        Self { records: MemoryStore::new(policy.memory()), errors: Mutex::default(), later: Mutex::default() }
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
            None => Ok(self.records.execute(command, NOW).await?),
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

/// A slot was moved while a denied request was given back: one of its keys was given back and the other one refused, and both were
/// given back again.
#[tokio::test]
async fn only_the_part_that_was_refused_is_given_back_again() {
    let (policy, bill) = request("[identity]\nuser_scope = 'tenant'\n");
    let [partition] = bill.as_bill().partitions()[..] else { panic!("a tenant and its users are one partition") };
    let store = Failing::new(&policy);
    let settled = settle(&store, Box::new(bill.clone())).await.unwrap();
    let _ = settle(&store, Box::new(bill.clone())).await.unwrap();
    let receipt = Receipt::of_bill(&bill.as_bill(), &settled).unwrap();
    let mut commands = vec![(partition, Command::GiveBack(Box::new(receipt.clone())))];
    store.fail(partition, [Some(PartitionError::Moving), None, Some(REFUSED)]);
    while !commands.is_empty() {
        commands = give_back(&store, commands).await;
    }
    // 9 less the second request, which is still charged, and less this one.
    let outcome = settle(&store, Box::new(bill)).await.unwrap();
    let decision = policy.plan(&facts()).unwrap().decide(&outcome);
    let left: Vec<u64> = decision.readings.iter().map(|reading| reading.remaining).collect();
    assert_eq!(left, [7, 7]);
    // A part that may have been carried out is not sent again either.
    store.fail(partition, [Some(TIMEOUT)]);
    assert!(give_back(&store, vec![(partition, Command::GiveBack(Box::new(receipt)))]).await.is_empty());
}
