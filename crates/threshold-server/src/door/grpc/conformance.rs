//! Plays the conformance vectors as Envoy asks them: on a real socket, as descriptors and as attributes.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Map, Value, json};
use threshold_core::Timestamp;
use threshold_core::address::parse_address;
use threshold_core::case::ClientDoor;
use tokio::sync::watch;

use super::proto::{
    Address, AttributeContext, AttributeRequest, CheckRequest, CheckResponse, Code, Entry, HeaderMap, HeaderValue,
    HttpRequest, HttpResponse, Peer, RateLimitDescriptor, RateLimitRequest, RateLimitResponse, SocketAddress,
};
use crate::door::ext_authz::DELAY;
use crate::door::test_server::{TestServer, vectors};
use grpc_client::{AUTHORIZATION_CHECK, GrpcClient, RATE_LIMIT};

#[expect(dead_code, reason = "the tests of the program use all of it")]
#[path = "../../../tests/serve/grpc_client.rs"]
pub(super) mod grpc_client;

/// The facts that have a place of their own, and the keys of the entries that are them.
const NAMED: [(&str, &str); 8] = [
    ("tenant", "the-tenant"),
    ("user", "the-user"),
    ("tier", "the-tier"),
    ("path", "the-path"),
    ("method", "the-method"),
    ("host", "the-host"),
    ("category", "the-category"),
    ("endpoint", "the-endpoint"),
];

/// Why vectors are skipped.
const NOT_A_CLIENT: &str = "calls that are not a client's";
const LACKING: &str = "requests that lack what every request has";
const OTHER_COSTS: &str = "bytes and named costs, which a descriptor does not have";
const HEADERS: &str = "header lines, which a descriptor does not have";
const ADDRESS: &str = "an invalid address";
const PATHS: &str = "paths that are refused before they are limited, which an answer to Envoy cannot say";
const OWN: &str = "costs, facts, categories and endpoints of a caller's own, which no proxy sends";
const NAMES: &str = "a name that a header cannot carry unchanged";

/// The gRPC listener of a server, and a connection to it.
pub(super) struct GrpcDoor {
    pub(super) server: TestServer,
    connection: Option<(watch::Sender<bool>, GrpcClient)>,
}

impl GrpcDoor {
    pub(super) fn new(server: TestServer) -> Self {
        Self { server, connection: None }
    }

    pub(super) fn load(&mut self, policy: &str, env: &BTreeMap<String, String>, fresh: bool) -> Result<(), String> {
        self.server.load(policy, env, fresh)?;
        if fresh || self.connection.is_none() {
            let (stop, address) = self.server.serve_grpc();
            self.connection = Some((stop, GrpcClient::connect(address)));
        }
        Ok(())
    }

    pub(super) fn client(&mut self) -> &mut GrpcClient {
        &mut self.connection.as_mut().expect("a case begins with its policy").1
    }
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Returns the fields as they were without the delay, after which Envoy's client sees them: core does not know who waits. In the
/// vectors one limit is met, and it resets at a whole second.
fn before_delay(
    mut fields: Vec<(String, String)>,
    delay: Option<&HeaderValue>,
    now: Timestamp,
) -> Vec<(String, String)> {
    let Some(delay) = delay.map(|delay| delay.value.parse::<u64>().unwrap().div_ceil(1_000)) else { return fields };
    let value = |name: &str| fields.iter().find(|(own, _)| own == name).map(|(_, value)| value.clone());
    let number = |text: &str, key: &str| text.split(';').find_map(|part| part.strip_prefix(key)?.parse::<u64>().ok());
    let reset = value("x-ratelimit-reset").map(|reset| reset.parse::<u64>().unwrap());
    let period = value("ratelimit-policy").and_then(|policy| number(&policy, "w="));
    let (Some(reset), Some(period)) = (reset, period) else { return fields };
    // The end of a window of the clock is the same after the delay, and nearer. Other times move with the request.
    let is_clock = reset.is_multiple_of(period);
    for (name, value) in &mut fields {
        match name.as_str() {
            "x-ratelimit-reset" if !is_clock => *value = reset.saturating_sub(delay).to_string(),
            "ratelimit" if is_clock => {
                let told = format!("t={}", number(value, "t=").unwrap());
                *value = value.replace(&told, &format!("t={}", reset.saturating_sub(now.secs_ceil())));
            }
            _ => {}
        }
    }
    fields
}

/// Envoy's rate limit service.
struct RateLimitDoor(GrpcDoor);

impl ClientDoor for RateLimitDoor {
    fn policy(&self, policy: &str) -> String {
        let entries = NAMED.map(|(fact, key)| format!("{key} = '{fact}'\n")).concat();
        format!("{policy}\n[envoy.descriptors]\n{entries}")
    }

    fn express(&self, facts: &Map<String, Value>) -> Result<Map<String, Value>, &'static str> {
        let has = |names: &[&str]| names.iter().any(|name| facts.contains_key(*name));
        if has(&["bytes", "costs"]) {
            return Err(OTHER_COSTS);
        }
        if has(&["headers", "lines", "accept"]) {
            return Err(HEADERS);
        }
        let path = facts.get("path").and_then(Value::as_str).unwrap_or("/");
        if !path.starts_with('/')
            || path.len() > 1_000
            || path.contains(['%', '\\', '?', '#', ';'])
            || path.contains("/.")
        {
            return Err(PATHS);
        }
        let mut facts = facts.clone();
        let ip = facts.entry("ip").or_insert(json!("127.0.0.1"));
        if ip.as_str().and_then(parse_address).is_none() { Err(ADDRESS) } else { Ok(facts) }
    }

    fn load(&mut self, policy: &str, env: &BTreeMap<String, String>, fresh: bool) -> Result<(), String> {
        self.0.load(policy, env, fresh)
    }

    fn ask(&mut self, facts: &Map<String, Value>, now: Timestamp) -> Result<Value, String> {
        self.0.server.set_time(now);
        let entry = |key: &str, value: &Value| Entry { key: key.to_owned(), value: text(value).into_bytes() };
        let named = NAMED.iter().filter_map(|(fact, key)| Some(entry(key, facts.get(*fact)?)));
        let own = facts.get("facts").and_then(Value::as_object).into_iter().flatten();
        let own = own.map(|(name, value)| entry(name, value));
        let ip = facts.get("ip").map(|ip| entry("remote_address", ip));
        let hits_addend = facts.get("cost").map(|cost| cost.as_u64().unwrap());
        let entries = ip.into_iter().chain(named).chain(own).collect();
        let descriptors = vec![RateLimitDescriptor { entries, hits_addend, ..RateLimitDescriptor::default() }];
        let request = RateLimitRequest { domain: "vectors".to_owned(), descriptors, hits_addend: 0 };
        let answer: Result<RateLimitResponse, _> = self.0.client().call(RATE_LIMIT, &request);
        let answer = answer.map_err(|(code, message)| format!("{code}: {message}"))?;
        assert_eq!((answer.statuses.len(), answer.statuses[0].code), (1, answer.overall_code));
        let headers = answer.response_headers_to_add.iter().map(|header| (header.key.clone(), header.value.clone()));
        let delay = answer.request_headers_to_add.iter().find(|header| header.key == DELAY.as_str());
        let headers = before_delay(headers.collect(), delay, now);
        let body = String::from_utf8(answer.raw_body.clone()).unwrap();
        Ok(vectors::answer(self.status(&answer, &body), &headers, &body))
    }
}

impl RateLimitDoor {
    /// Returns the status that a door of HTTP would answer with: Envoy's filter has one status for all denials.
    fn status(&self, answer: &RateLimitResponse, body: &str) -> u16 {
        if answer.overall_code() == Code::Ok {
            return 200;
        }
        let body: Value = serde_json::from_str(body).unwrap_or_default();
        if body["error"] == "cost_exceeds_limit" {
            return 400;
        }
        let policy = self.0.server.app().desk.policy();
        let own: Vec<u16> =
            policy.rules().iter().filter(|rule| body["rule"] == *rule.name).map(|rule| rule.status).collect();
        match (own.as_slice(), policy.rules()) {
            ([status], _) => *status,
            // A body of the rule's own need not name it.
            (_, [only]) if body["error"] != "banned" => only.status,
            _ => 429,
        }
    }
}

#[test]
fn the_rate_limit_service_plays_every_vector_that_a_descriptor_can_ask() {
    let reasons = [NOT_A_CLIENT, LACKING, OTHER_COSTS, HEADERS, ADDRESS, PATHS];
    vectors::play_all(|| RateLimitDoor(GrpcDoor::new(TestServer::new())), &reasons, 100);
}

#[test]
fn the_rate_limit_service_plays_every_vector_on_redis() {
    let reasons = [NOT_A_CLIENT, LACKING, OTHER_COSTS, HEADERS, ADDRESS, PATHS];
    // The vectors are about counting, and not about how fast a busy machine answers.
    let patient = |mut server: TestServer| {
        server.bounds.envoy_deadline = Duration::from_secs(60);
        server
    };
    vectors::play_all(|| RateLimitDoor(GrpcDoor::new(patient(TestServer::on_redis()))), &reasons, 100);
}

/// The `[identity]` by which external authorization finds the facts of the vectors.
const IDENTITY: &str = "trusted_proxies = ['127.0.0.1/32']\nclient_ip = 'x-forwarded-for'\n\
    tenant = 'header:x-tenant'\nuser = 'header:x-user'\ntier = 'header:x-tier'\n";

/// Envoy's external authorization.
struct AuthorizationDoor(GrpcDoor);

impl ClientDoor for AuthorizationDoor {
    fn policy(&self, policy: &str) -> String {
        // A case with header lines has an `[identity]` of its own.
        if policy.contains("trusted_proxies") {
            return policy.to_owned();
        }
        match policy.split_once("[identity]\n") {
            Some((before, after)) => format!("{before}[identity]\n{IDENTITY}{after}"),
            None => format!("{policy}\n[identity]\n{IDENTITY}"),
        }
    }

    fn express(&self, facts: &Map<String, Value>) -> Result<Map<String, Value>, &'static str> {
        if ["cost", "costs", "facts", "category", "endpoint"].iter().any(|name| facts.contains_key(*name)) {
            return Err(OWN);
        }
        let mut facts = facts.clone();
        facts.entry("method").or_insert(json!("GET"));
        facts.entry("path").or_insert(json!("/"));
        let in_lines = facts.contains_key("lines");
        let ip = if in_lines { &mut json!("127.0.0.1") } else { facts.entry("ip").or_insert(json!("127.0.0.1")) };
        if ip.as_str().and_then(parse_address).is_none() {
            return Err(ADDRESS);
        }
        let plain = |text: &str| text.trim() == text && !text.chars().any(char::is_control);
        if facts.values().filter_map(Value::as_str).all(plain) { Ok(facts) } else { Err(NAMES) }
    }

    fn load(&mut self, policy: &str, env: &BTreeMap<String, String>, fresh: bool) -> Result<(), String> {
        self.0.load(policy, env, fresh)
    }

    fn ask(&mut self, facts: &Map<String, Value>, now: Timestamp) -> Result<Value, String> {
        self.0.server.set_time(now);
        let named = [("tenant", "x-tenant"), ("user", "x-user"), ("tier", "x-tier"), ("accept", "accept")];
        let named =
            named.iter().filter_map(|(fact, name)| Some(((*name).to_owned(), text(facts.get(*fact)?).into_bytes())));
        let own = facts.get("headers").and_then(Value::as_object).into_iter().flatten();
        let own = own.map(|(name, value)| (name.clone(), text(value).into_bytes()));
        let lines = named.chain(own).chain(vectors::lines(facts));
        let lines = lines.map(|(key, raw_value)| HeaderValue { key, raw_value, value: String::new() });
        let fact = |name: &str| facts.get(name).map(text).unwrap_or_default();
        let http = HttpRequest {
            method: fact("method"),
            path: fact("path"),
            host: fact("host"),
            size: facts.get("bytes").map_or(-1, |bytes| bytes.as_i64().unwrap()),
            header_map: Some(HeaderMap { headers: lines.collect() }),
            ..HttpRequest::default()
        };
        // With lines of its own, a request comes from the trusted proxy that has sent them.
        let address = if facts.contains_key("lines") { "127.0.0.1".to_owned() } else { fact("ip") };
        let socket_address = Some(SocketAddress { address, port_value: 4711 });
        let source = Some(Peer { address: Some(Address { socket_address }) });
        let request = Some(AttributeRequest { http: Some(http) });
        let request = CheckRequest { attributes: Some(AttributeContext { source, request }) };
        let answer: Result<CheckResponse, _> = self.0.client().call(AUTHORIZATION_CHECK, &request);
        let answer = answer.map_err(|(code, message)| format!("{code}: {message}"))?;
        let (status, options, body, told) = match answer.http_response.ok_or("no response")? {
            HttpResponse::Ok(ok) => (200, ok.response_headers_to_add, String::new(), ok.headers),
            HttpResponse::Denied(denied) | HttpResponse::Error(denied) => {
                let status = u16::try_from(denied.status.ok_or("no status")?.code).unwrap();
                (status, denied.headers, denied.body, Vec::new())
            }
        };
        let headers = options.into_iter().filter_map(|option| option.header).map(|header| (header.key, header.value));
        let delay = told.into_iter().filter_map(|option| option.header).find(|header| header.key == DELAY.as_str());
        Ok(vectors::answer(status, &before_delay(headers.collect(), delay.as_ref(), now), &body))
    }
}

#[test]
fn external_authorization_plays_every_vector_that_envoy_can_ask() {
    let reasons = [NOT_A_CLIENT, LACKING, OWN, ADDRESS, NAMES];
    vectors::play_all(|| AuthorizationDoor(GrpcDoor::new(TestServer::new())), &reasons, 180);
}
