//! The store in Redis, on real `redis-server` processes. `./test` installs them.

#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that cannot go on should say so loudly, on the line where it stops"
)]

mod acl;
mod cluster;
mod control;
mod denials;
mod errors;
mod failure;
mod faults;
mod history;
mod imports;
mod late;
mod law;
mod lost;
mod members;
mod messages;
#[path = "../../../threshold-limiter/tests/stores/player.rs"]
mod player;
mod process;
mod proxy;
mod rotation;
mod sentinel;
mod shared;
mod strikes;
mod tcp;
mod times;
mod tls;
mod vectors;
