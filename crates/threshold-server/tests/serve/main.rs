//! Tests the server as a process, with real connections and signals.

#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::string_slice,
    clippy::unwrap_used,
    reason = "a test that cannot go on should say so loudly, on the line where it stops"
)]

mod admin_listener;
mod alerts;
mod api;
mod bad_input;
mod ban_lists;
mod canaries;
mod charges;
mod client;
mod clock;
mod crash;
mod dead_store;
mod deploy;
mod digests;
mod disk;
mod envoy;
mod envoy_import;
mod envoy_state;
mod events;
mod forward_auth;
mod grpc_client;
mod grpc_listener;
mod hostile;
mod hosts;
mod http2;
mod installation;
mod jwt;
mod limits;
mod logged;
mod login;
mod metrics;
mod operators;
mod origin;
#[cfg(feature = "otlp")]
mod otlp;
mod page;
mod planted;
mod policy_keys;
mod process;
#[path = "../../src/door/grpc/proto.rs"]
mod proto;
mod proxies;
mod proxy;
mod proxy_headers;
mod redis;
#[expect(dead_code, clippy::arithmetic_side_effects, reason = "the tests of the store use all of it")]
#[path = "../../../threshold-redis/tests/redis/process.rs"]
mod redis_process;
mod reload;
mod resp;
mod rotation;
mod shadow;
mod shared_store;
mod signals;
mod sockets;
mod stalled_log;
mod start;
mod stopped;
mod store_errors;
mod tenants;
mod terminal;
mod tokens;
mod unread;
mod why;
