//! Plays the conformance vectors through the API: the real router on a real socket, with a manual clock.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::Value;
use threshold_core::Timestamp;
use threshold_core::case::{CaseFile, Lines, Player, play};

use crate::door::test_server::{LADDERS_IN_SEVERAL_PARTITIONS, TestServer};

/// The calls of the vectors that this API does not have, each with the reason.
const SKIPPED: [(&str, &str); 3] = [
    ("client", "only doors that face clients write a client's answer"),
    ("forgive", "clearing a subject is an operators' call"),
    ("reset", "only an application resets a secret"),
];

impl Player for TestServer {
    fn load(&mut self, policy: &str, env: &BTreeMap<String, String>, fresh: bool) -> Result<(), String> {
        self.load(policy, env, fresh)
    }

    fn call(&mut self, verb: &str, args: &Value, now: Timestamp) -> Result<Value, String> {
        self.set_time(now);
        // A vector has the facts of a reservation in an object of their own; the API has them beside its other fields.
        let mut body = args.clone();
        if verb == "reserve"
            && let Some(fields) = body.as_object_mut()
            && let Some(Value::Object(facts)) = fields.remove("facts")
        {
            fields.extend(facts);
        }
        let mut path = format!("/v1/{verb}");
        let mut method = "POST";
        match verb {
            "attempt" => {
                path = "/v1/login/attempt".to_owned();
                // The API requires an address. A vector without one means an address that no other request has.
                static NOWHERE: AtomicU32 = AtomicU32::new(0x0a00_0000);
                let nowhere = Ipv4Addr::from_bits(NOWHERE.fetch_add(1, Ordering::Relaxed)).to_string();
                body.as_object_mut().unwrap().entry("ip").or_insert(nowhere.into());
            }
            "result" => path = "/v1/login/result".to_owned(),
            "lift" => {
                path = format!("/v1/subjects/account/{}", args["account"].as_str().unwrap());
                method = "DELETE";
                body = Value::Null;
            }
            _ => {}
        }
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let answer = self.client().send(method, &path, &[], &body).map_err(|error| error.to_string())?;
        let json = answer.json();
        let refused = json.get("error").is_some();
        if refused != (answer.status >= 400) {
            return Err(format!("{} with {json}", answer.status));
        }
        Ok(json)
    }
}

#[test]
fn the_api_plays_every_vector_whose_calls_it_has() {
    play_all(TestServer::new(), &[]);
}

#[test]
fn the_api_plays_every_vector_on_an_asynchronous_store() {
    play_all(TestServer::on_async_store(), &[]);
}

#[test]
fn the_api_plays_every_vector_on_redis() {
    play_all(TestServer::on_redis(), &[]);
}

#[test]
fn the_api_plays_every_vector_on_a_cluster() {
    play_all(TestServer::on_cluster(), &LADDERS_IN_SEVERAL_PARTITIONS);
}

#[expect(clippy::arithmetic_side_effects, reason = "it counts cases")]
fn play_all(mut player: TestServer, different: &[&str]) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../conformance");
    let (mut played, mut skipped) = (0, BTreeMap::new());
    let mut failures = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let file: CaseFile = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        let shared = file.policy.as_ref().map(Lines::text);
        for case in &file.cases {
            let calls: BTreeSet<&str> =
                case.steps.iter().flat_map(|step| step.call.keys().map(String::as_str)).collect();
            if let Some((_, reason)) = SKIPPED.iter().find(|(call, _)| calls.contains(call)) {
                *skipped.entry(*reason).or_insert(0) += 1;
                continue;
            }
            if different.contains(&case.name.as_str()) {
                *skipped.entry("decided differently on this store").or_insert(0) += 1;
                continue;
            }
            played += 1;
            if let Err(failure) = play(case, shared.as_deref(), &mut player) {
                failures.push(format!("{}: {failure}", path.file_name().unwrap().display()));
            }
        }
    }
    assert!(failures.is_empty(), "{} of {played} cases failed:\n{}", failures.len(), failures.join("\n"));
    // Every case is played or skipped for a reason. A new call of the vectors has no reason yet, and fails above.
    assert!(played >= 290, "only {played} were played; skipped: {skipped:?}");
}
