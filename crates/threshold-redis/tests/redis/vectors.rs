//! The test vectors, on one server and on a Cluster whose clocks are set to the time of each step.

use threshold_core::Timestamp;
use threshold_limiter::Policy;
use threshold_redis::RedisStore;
use tokio::runtime::Runtime;

use crate::player::{World, check};
use crate::process::{Cluster, LADDERS_IN_SEVERAL_PARTITIONS, RedisServer};

impl World<RedisStore> for RedisServer {
    fn store(&self, _: &Policy, runtime: &Runtime) -> RedisStore {
        assert_eq!(self.cli(&["FLUSHALL"]), "OK\n");
        runtime.block_on(self.open())
    }

    fn set_time(&self, now: Timestamp) {
        Self::set_time(self, now);
    }

    fn settle_down(&self, store: &RedisStore, reserves: bool, runtime: &Runtime) {
        runtime.block_on(settle_down(store, reserves));
    }
}

impl World<RedisStore> for Cluster {
    fn store(&self, _: &Policy, runtime: &Runtime) -> RedisStore {
        self.flush();
        runtime.block_on(self.open())
    }

    fn set_time(&self, now: Timestamp) {
        Self::set_time(self, now);
    }

    fn settle_down(&self, store: &RedisStore, reserves: bool, runtime: &Runtime) {
        runtime.block_on(settle_down(store, reserves));
    }
}

async fn settle_down(store: &RedisStore, reserves: bool) {
    store.returned().await;
    if reserves {
        // Nodes do this twice a second. A case does not wait for it.
        store.release_expired().await.unwrap();
    }
}

#[test]
fn the_limiter_gives_the_answer_of_every_vector_on_redis() {
    check::<RedisStore>(&RedisServer::start_with_clock(), &[]);
}

#[test]
fn the_limiter_gives_the_answer_of_every_vector_on_a_cluster() {
    check::<RedisStore>(&Cluster::start_with_clock(), &LADDERS_IN_SEVERAL_PARTITIONS);
}
