//! Tests Envoy's rate limit service on a Redis Cluster, where the limits of one request are on several servers.

use std::collections::BTreeMap;
use std::time::Duration;

use threshold_core::Timestamp;

use super::conformance::GrpcDoor;
use super::conformance::grpc_client::RATE_LIMIT;
use super::proto::{Code, DescriptorStatus, Entry, RateLimitDescriptor, RateLimitRequest, RateLimitResponse};
use crate::door::test_server::TestServer;

const POLICY: &str = "[envoy.descriptors]\nx-user = 'user'\n\
    [[rule]]\nname = 'address'\nper = ['ip']\nlimit = '100/day'\nalgorithm = 'fixed-window'\n\
    [[rule]]\nname = 'user'\nper = ['user']\nlimit = '1/day'\nalgorithm = 'fixed-window'\non_missing = 'skip'\n";

fn descriptor(key: &str, value: &str, hits: u64) -> RateLimitDescriptor {
    let entries = vec![Entry { key: key.to_owned(), value: value.into() }];
    RateLimitDescriptor { entries, hits_addend: Some(hits), ..RateLimitDescriptor::default() }
}

/// The address is charged before or after each user, on the same server or on another one. If a user is over the limit, the address has
/// back what it was charged.
///
/// Woken by: charging each descriptor on its own, and leaving out what `Split` gives back.
#[test]
fn a_denied_descriptor_charges_no_limit_on_another_server() {
    let mut server = TestServer::on_cluster();
    // This is about counts, and not about how fast a busy machine answers.
    server.bounds.envoy_deadline = Duration::from_secs(60);
    let mut door = GrpcDoor::new(server);
    door.load(POLICY, &BTreeMap::new(), true).unwrap();
    let mut ask = |descriptors: Vec<RateLimitDescriptor>| {
        // It also waits until everything is given back.
        door.server.set_time(Timestamp::from_secs(1_767_225_600));
        let request = RateLimitRequest { domain: "edge".to_owned(), descriptors, hits_addend: 0 };
        let answer: RateLimitResponse = door.client().call(RATE_LIMIT, &request).unwrap();
        let codes: Vec<Code> = answer.statuses.iter().map(DescriptorStatus::code).collect();
        (codes, answer.statuses[0].limit_remaining)
    };
    for user in 0..20 {
        let both = || vec![descriptor("remote_address", "192.0.2.1", 1), descriptor("x-user", &format!("u{user}"), 1)];
        let left = 99 - user;
        assert_eq!(ask(both()), (vec![Code::Ok; 2], left));
        for _ in 0..2 {
            assert_eq!(ask(both()).0, [Code::Ok, Code::OverLimit], "u{user}");
            assert_eq!(ask(vec![descriptor("remote_address", "192.0.2.1", 0)]), (vec![Code::Ok], left), "u{user}");
        }
    }
}
