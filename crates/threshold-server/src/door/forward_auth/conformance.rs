//! Plays the conformance vectors as a proxy asks them: on a real socket, in `X-Forwarded-*` and other headers.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};
use threshold_core::Timestamp;
use threshold_core::address::parse_address;
use threshold_core::case::ClientDoor;

use crate::door::test_server::{TestServer, vectors};

/// The `[identity]` by which this door finds the facts of the vectors.
const IDENTITY: &str = "trusted_proxies = ['127.0.0.1/32']\nclient_ip = 'x-forwarded-for'\n\
    tenant = 'header:x-tenant'\nuser = 'header:x-user'\ntier = 'header:x-tier'\n";

/// Why vectors are skipped.
const SKIPPED: [&str; 5] = [
    "calls that are not a client's",
    "requests that lack what every request has",
    "costs, facts, categories and endpoints of a caller's own, which no proxy sends",
    "an invalid address",
    "a name that a header cannot carry unchanged",
];

impl ClientDoor for TestServer {
    fn policy(&self, text: &str) -> String {
        // A case with header lines has an `[identity]` of its own.
        if text.contains("trusted_proxies") {
            return text.to_owned();
        }
        match text.split_once("[identity]\n") {
            Some((before, after)) => format!("{before}[identity]\n{IDENTITY}{after}"),
            None => format!("{text}\n[identity]\n{IDENTITY}"),
        }
    }

    fn express(&self, facts: &Map<String, Value>) -> Result<Map<String, Value>, &'static str> {
        let own = ["cost", "costs", "facts", "category", "endpoint"];
        if own.iter().any(|name| facts.contains_key(*name)) {
            return Err(SKIPPED[2]);
        }
        let mut facts = facts.clone();
        facts.entry("method").or_insert(json!("GET"));
        facts.entry("path").or_insert(json!("/"));
        // Every request has an address, as a fact or in its header lines.
        let in_lines = facts.contains_key("lines");
        let ip = if in_lines { &mut json!("127.0.0.1") } else { facts.entry("ip").or_insert(json!("127.0.0.1")) };
        if ip.as_str().and_then(parse_address).is_none() {
            return Err(SKIPPED[3]);
        }
        let plain = |text: &str| text.trim() == text && !text.chars().any(char::is_control);
        if facts.values().filter_map(Value::as_str).all(plain) { Ok(facts) } else { Err(SKIPPED[4]) }
    }

    fn load(&mut self, policy: &str, env: &BTreeMap<String, String>, fresh: bool) -> Result<(), String> {
        self.load(policy, env, fresh)
    }

    fn ask(&mut self, facts: &Map<String, Value>, now: Timestamp) -> Result<Value, String> {
        self.set_time(now);
        let named = [
            ("ip", "x-forwarded-for"),
            ("method", "x-forwarded-method"),
            ("path", "x-forwarded-uri"),
            ("host", "x-forwarded-host"),
            ("tenant", "x-tenant"),
            ("user", "x-user"),
            ("tier", "x-tier"),
            ("accept", "accept"),
            ("bytes", "x-original-content-length"),
        ];
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let mut fields: Vec<(String, String)> = named
            .iter()
            .filter_map(|(name, field)| facts.get(*name).map(|value| ((*field).to_owned(), text(value))))
            .collect();
        for (name, value) in facts.get("headers").and_then(Value::as_object).into_iter().flatten() {
            fields.push((name.clone(), text(value)));
        }
        let fields = fields.into_iter().map(|(name, value)| (name, value.into_bytes()));
        let fields: Vec<_> = fields.chain(vectors::lines(facts)).collect();
        let answer = self.client().ask_bytes("GET", "/auth", &fields).map_err(|error| error.to_string())?;
        Ok(vectors::answer(answer.status, &answer.headers, &answer.body))
    }
}

#[test]
fn forward_auth_plays_every_vector_that_a_proxy_can_ask() {
    vectors::play_all(TestServer::new, &SKIPPED, 191);
}

#[test]
fn forward_auth_plays_every_vector_on_an_asynchronous_store() {
    vectors::play_all(TestServer::on_async_store, &SKIPPED, 191);
}

#[test]
fn forward_auth_plays_every_vector_on_redis() {
    vectors::play_all(TestServer::on_redis, &SKIPPED, 191);
}
