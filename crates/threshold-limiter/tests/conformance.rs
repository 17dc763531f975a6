//! The limiter plays the test vectors in `conformance/` with each of its verbs and must give core's answers, on the store in memory,
//! which is ready at the first poll, and on a key-value store, which is not.

#![expect(
    clippy::arithmetic_side_effects,
    clippy::unwrap_used,
    reason = "a test that cannot go on should say so loudly, on the line where it stops"
)]

use threshold_limiter::Policy;
use threshold_limiter::store::memory::MemoryStore;
use tokio::runtime::Runtime;

use key_value::KeyValueStore;
use player::{World, check};

#[path = "stores/key_value.rs"]
mod key_value;
#[path = "stores/player.rs"]
mod player;

struct InMemory;

impl World<MemoryStore> for InMemory {
    fn store(&self, policy: &Policy, _: &Runtime) -> MemoryStore {
        MemoryStore::new(policy.memory())
    }
}

struct KeyValue;

impl World<KeyValueStore> for KeyValue {
    fn store(&self, _: &Policy, _: &Runtime) -> KeyValueStore {
        KeyValueStore::default()
    }
}

#[test]
fn the_limiter_gives_the_answer_of_every_vector_in_memory() {
    check(&InMemory, &[]);
}

#[test]
fn the_limiter_gives_the_answer_of_every_vector_on_a_key_value_store() {
    check(&KeyValue, &[]);
}
