//! The test vectors, on one server whose clock is set to the time of each step.

use threshold_core::Timestamp;
use threshold_limiter::Policy;
use threshold_limiter::store::redis::RedisStore;
use tokio::runtime::Runtime;

use crate::player::{World, check};
use crate::process::RedisServer;

impl World<RedisStore> for RedisServer {
    fn store(&self, _: &Policy, runtime: &Runtime) -> RedisStore {
        assert_eq!(self.cli(&["FLUSHALL"]), "OK\n");
        runtime.block_on(self.open())
    }

    fn set_time(&self, now: Timestamp, store: &RedisStore, runtime: &Runtime) {
        Self::set_time(self, now);
        // Nodes do this twice a second. A case does not wait for it.
        runtime.block_on(store.release_expired()).unwrap();
    }
}

#[test]
fn the_limiter_gives_the_answer_of_every_vector_on_redis() {
    let server = RedisServer::start_with_clock();
    check::<RedisStore>(&server);
}
