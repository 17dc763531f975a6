//! Tests descriptors under a policy that was imported from envoyproxy/ratelimit.

use std::process::Command;

use serde_json::json;

use super::envoy::{Envoy, descriptor, header};
use super::process::Scratch;
use super::proto::Code;

/// Each address has a limit of its own, and one of them is refused.
const CONFIG: &str = "\
domain: edge
descriptors:
- key: remote_address
  rate_limit: {unit: year, requests_per_unit: 2}
- key: remote_address
  value: 192.0.2.50
  rate_limit: {unit: second, requests_per_unit: 0}
";

fn threshold(args: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_threshold")).args(args).env_clear().output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A ban on an address did nothing: its descriptors have it as a fact. And each address was said to be stopped by the rule for another.
///
/// Woken by: a door that sets no `ip` for an address that is mapped to a fact, and by `Policy::budgets_of` with rules for other facts.
#[test]
fn bans_on_addresses_apply_to_imported_rules_for_addresses() {
    let file = Scratch::file("edge.yaml", CONFIG);
    let mut envoy = Envoy::start(&threshold(&["import", "envoy-ratelimit", file.path().to_str().unwrap()]));
    let ask = |envoy: &mut Envoy, address: &str| {
        let answer = envoy.ask(vec![descriptor(&[("remote_address", address)])]);
        (answer.overall_code(), header(&answer, "x-ratelimit-banned").is_some())
    };
    let (passed, denied) = ((Code::Ok, false), (Code::OverLimit, false));
    assert_eq!([(); 3].map(|()| ask(&mut envoy, "192.0.2.1")), [passed, passed, denied]);
    assert_eq!([ask(&mut envoy, "192.0.2.50"), ask(&mut envoy, "192.0.2.9")], [denied, passed]);
    let body = json!({"layer": "edge", "key": "192.0.2.9", "reason": "scraping"}).to_string();
    assert!(envoy.server.connect().post("/v1/bans", &body).unwrap().json()["id"].is_string());
    assert_eq!([ask(&mut envoy, "192.0.2.9"), ask(&mut envoy, "192.0.2.8")], [(Code::OverLimit, true), passed]);
    let said = threshold(&["subject", "ip", "192.0.2.8", "--server", &envoy.server.place]);
    assert!(said.contains("Nothing stops it now.") && !said.contains("192.0.2.50"), "{said}");
}
