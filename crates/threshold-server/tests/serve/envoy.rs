//! Tests the gRPC door: Envoy's rate limit service and external authorization.

use std::io::Write as _;
use std::net::SocketAddr;

use prost::Message as _;

use super::grpc_client::{AUTHORIZATION_CHECK, Failed, GrpcClient, HEALTH, RATE_LIMIT};
use super::process::{Scratch, Server, Start};
use super::proto::{
    Address, AttributeContext, AttributeRequest, CheckRequest, CheckResponse, Code, Entry, HealthCheckRequest,
    HealthCheckResponse, HttpRequest, HttpResponse, Peer, RateLimitDescriptor, RateLimitOverride, RateLimitRequest,
    RateLimitResponse, ServingStatus, SocketAddress, Unit,
};

const POLICY: &str = r#"
[identity]
trusted_proxies = ["10.0.0.0/8"]
client_ip = "x-forwarded-for"

[envoy.descriptors]
"x-user" = "user"
":path" = "path"

[envoy.domains.done]
verb = "record"

[envoy.domains.own]
override = true

[lists]
deny = ["203.0.113.0/24"]

[[rule]]
name = "address"
per = ["ip"]
limit = "5/min"
algorithm = "sliding-log"

[[rule]]
name = "user"
per = ["user"]
limit = "3/h"
algorithm = "sliding-log"
on_missing = "skip"

[[rule]]
name = "key"
match = { fact.generic_key = "*" }
per = ["fact:generic_key"]
limit = "7/90s"
algorithm = "sliding-log"
disclosure = "minimal"
"#;

/// A server with a gRPC listener, and a client of it.
pub(crate) struct Envoy {
    pub(crate) server: Server,
    client: GrpcClient,
    pub(crate) policy: Scratch,
}

impl Envoy {
    pub(crate) fn start(policy: &str) -> Self {
        Self::start_with(policy, &[], &[])
    }

    pub(crate) fn start_with(policy: &str, args: &[&str], variables: &[(&str, &str)]) -> Self {
        let policy = Scratch::file("policy.toml", policy);
        let args = [&["--grpc", "127.0.0.1:0"], args].concat();
        let server = Start { args: &args, policy: Some(policy.path()), variables, ..Start::default() }.server();
        let client = GrpcClient::connect(grpc_address(&server));
        Self { server, client, policy }
    }

    /// Asks with these descriptors, in the domain `edge`.
    pub(crate) fn ask(&mut self, descriptors: Vec<RateLimitDescriptor>) -> RateLimitResponse {
        self.ask_in("edge", descriptors).unwrap()
    }

    fn ask_in(&mut self, domain: &str, descriptors: Vec<RateLimitDescriptor>) -> Result<RateLimitResponse, Failed> {
        self.client.call(RATE_LIMIT, &RateLimitRequest { domain: domain.to_owned(), descriptors, hits_addend: 0 })
    }

    /// Asks for external authorization.
    pub(crate) fn check(&mut self, source: &str, http: HttpRequest) -> CheckResponse {
        let address = SocketAddress { address: source.to_owned(), port_value: 4711 };
        let source = Some(Peer { address: Some(Address { socket_address: Some(address) }) });
        let request = Some(AttributeRequest { http: Some(http) });
        let attributes = Some(AttributeContext { source, request });
        self.client.call(AUTHORIZATION_CHECK, &CheckRequest { attributes }).unwrap()
    }
}

/// Reads the address of the gRPC listener in the log.
pub(crate) fn grpc_address(server: &Server) -> SocketAddr {
    let line = server.wait_for_log("listening");
    let at = line.split_once("grpc=").and_then(|(_, rest)| rest.split_once("://")).unwrap().1;
    at.split(['"', ' ']).next().unwrap().parse().unwrap_or_else(|error| panic!("{error} in {line}"))
}

pub(crate) fn descriptor(entries: &[(&str, &str)]) -> RateLimitDescriptor {
    let entry = |(key, value): &(&str, &str)| Entry { key: (*key).to_owned(), value: (*value).into() };
    RateLimitDescriptor { entries: entries.iter().map(entry).collect(), ..RateLimitDescriptor::default() }
}

pub(crate) fn costing(hits: u64, entries: &[(&str, &str)]) -> RateLimitDescriptor {
    RateLimitDescriptor { hits_addend: Some(hits), ..descriptor(entries) }
}

/// Returns the overall code, and code and remainder of each status.
pub(crate) fn codes(response: &RateLimitResponse) -> (Code, Vec<(Code, u32)>) {
    let statuses = response.statuses.iter().map(|status| (status.code(), status.limit_remaining));
    (response.overall_code(), statuses.collect())
}

pub(crate) fn header<'r>(response: &'r RateLimitResponse, name: &str) -> Option<&'r str> {
    response.response_headers_to_add.iter().find(|header| header.key == name).map(|header| header.value.as_str())
}

/// Woken by: a charge for each descriptor on its own, statuses of another order, `Code::Unknown`, leaving out `response_headers_to_add` or
/// `raw_body`.
#[test]
fn all_descriptors_are_charged_or_none_and_each_has_its_status() {
    let mut envoy = Envoy::start(POLICY);
    let both = || vec![descriptor(&[("remote_address", "192.0.2.1")]), descriptor(&[("x-user", "u1")])];
    for left in (0..3).rev() {
        let answer = envoy.ask(both());
        assert_eq!(codes(&answer), (Code::Ok, vec![(Code::Ok, left + 2), (Code::Ok, left)]));
        assert_eq!(header(&answer, "x-ratelimit-remaining"), Some(left.to_string().as_str()));
        assert!(answer.raw_body.is_empty() && header(&answer, "retry-after").is_none());
    }
    for _ in 0..2 {
        let answer = envoy.ask(both());
        // The address was not charged.
        assert_eq!(codes(&answer), (Code::OverLimit, vec![(Code::Ok, 2), (Code::OverLimit, 0)]));
        assert!(header(&answer, "retry-after").is_some());
        assert_eq!(header(&answer, "content-type"), Some("application/json"));
        let body: serde_json::Value = serde_json::from_slice(&answer.raw_body).unwrap();
        assert_eq!((&body["rule"], &body["limit"]), (&"user".into(), &3.into()));
        let limit = answer.statuses[1].current_limit.as_ref().unwrap();
        assert_eq!((limit.requests_per_unit, limit.unit(), limit.name.as_str()), (3, Unit::Hour, "user"));
        let reset = answer.statuses[1].duration_until_reset.unwrap();
        assert!((3500..=3600).contains(&reset.seconds), "{reset:?}");
    }
}

/// Woken by: leaving out `merge_charges`, or the number of hits of a descriptor.
#[test]
fn a_key_met_twice_is_charged_once_with_the_sum_and_hits_of_zero_only_look() {
    let mut envoy = Envoy::start(POLICY);
    let address = [("remote_address", "192.0.2.1")];
    let answer = envoy.ask(vec![costing(2, &address), costing(1, &address)]);
    assert_eq!(codes(&answer), (Code::Ok, vec![(Code::Ok, 2), (Code::Ok, 2)]));
    for _ in 0..3 {
        assert_eq!(codes(&envoy.ask(vec![costing(0, &address)])), (Code::Ok, vec![(Code::Ok, 2)]));
    }
    // Each would fit alone.
    let answer = envoy.ask(vec![costing(2, &address), costing(1, &address)]);
    assert_eq!(codes(&answer).0, Code::OverLimit);
    assert_eq!(codes(&envoy.ask(vec![costing(2, &address)])), (Code::Ok, vec![(Code::Ok, 0)]));
    // Nothing is left to look at.
    assert_eq!(codes(&envoy.ask(vec![costing(0, &address)])), (Code::Ok, vec![(Code::Ok, 0)]));
}

/// The other descriptors had one less left than was left.
///
/// Woken by: an error in place of OVER_LIMIT, charging the other descriptors, and leaving out `forget_charges`.
#[test]
fn a_cost_that_never_fits_is_over_the_limit_of_its_descriptor() {
    let mut envoy = Envoy::start(POLICY);
    let (address, user) = ([("remote_address", "192.0.2.1")], [("x-user", "u1")]);
    for _ in 0..2 {
        let answer = envoy.ask(vec![descriptor(&address), costing(4, &user)]);
        assert_eq!(codes(&answer), (Code::OverLimit, vec![(Code::Ok, 5), (Code::OverLimit, 0)]));
        assert!(header(&answer, "retry-after").is_none(), "it never fits");
    }
    // Nothing was charged.
    assert_eq!(codes(&envoy.ask(vec![descriptor(&address)])), (Code::Ok, vec![(Code::Ok, 4)]));
    let answer = envoy.ask(vec![costing(u64::MAX, &address), costing(u64::MAX, &address)]);
    assert_eq!(codes(&answer).0, Code::OverLimit);
}

/// Woken by: `skips_missing: false`, leaving out `names_empty` or `NO_ADDRESS`.
#[test]
fn a_descriptor_is_limited_by_what_it_tells_and_not_by_what_it_does_not() {
    let mut envoy = Envoy::start(POLICY);
    // The rules by address and by user are not about it. What no rule is about is not limited.
    for _ in 0..9 {
        assert_eq!(codes(&envoy.ask(vec![descriptor(&[("other", "o")])])), (Code::Ok, vec![(Code::Ok, 0)]));
    }
    // An empty user is a client's doing. It denies where a rule needs it, and nothing else.
    assert_eq!(codes(&envoy.ask(vec![descriptor(&[("x-user", "")])])), (Code::OverLimit, vec![(Code::OverLimit, 0)]));
    // All that is no address is counted as one.
    let left = ["no address", "", "pipe"]
        .map(|value| codes(&envoy.ask(vec![descriptor(&[("remote_address", value)])])).1[0].1);
    assert_eq!(left, [4, 3, 2]);
    // Without entries it says nothing, and the others are counted.
    let answer = envoy.ask(vec![descriptor(&[]), descriptor(&[("remote_address", "192.0.2.1")])]);
    assert_eq!(codes(&answer), (Code::Ok, vec![(Code::Ok, 0), (Code::Ok, 4)]));
    assert!(envoy.server.wait_for_log("cannot be counted").contains("user"));
    assert_eq!(codes(&envoy.ask(vec![descriptor(&[(":path", "")])])).0, Code::Ok);
    // It discloses no figures, and its period has no name in Envoy's protocol.
    let answer = envoy.ask(vec![descriptor(&[("generic_key", "k")])]);
    assert_eq!((codes(&answer), answer.statuses[0].current_limit.is_none()), ((Code::Ok, vec![(Code::Ok, 0)]), true));
    assert!(header(&answer, "x-ratelimit-limit").is_none());
}

/// Envoy passes on any byte, and an error of ours would let the request through. Woken by: `string` in place of `bytes` in `Entry`,
/// leaving out `EMPTY`, and the address of a fact.
#[test]
fn no_bytes_of_a_client_avoid_a_limit() {
    let rule = |name: &str, rest: &str| {
        format!("[[rule]]\nname = '{name}'\nlayer = 'edge'\n{rest}\nalgorithm = 'sliding-log'\n")
    };
    let policy = "[envoy.descriptors]\nremote_address = 'fact:remote_address'\n\":path\" = 'path'\n[lists]\ndeny = ['203.0.113.9']\n".to_owned()
        + &rule("login", "match = { path = '/login' }\nper = ['method']\nlimit = '2/h'\non_missing = 'skip'")
        + &rule("key", "match = { fact.x-key = '**' }\nper = ['fact:x-key']\nlimit = '2/h'");
    let mut envoy = Envoy::start(&policy.replace("per = ['method']", "per = ['fact:domain']"));
    let entry = |key: &str, value: &[u8]| {
        let entries = vec![Entry { key: key.to_owned(), value: value.to_vec() }];
        vec![RateLimitDescriptor { entries, ..RateLimitDescriptor::default() }]
    };
    for (key, values) in [
        (":path", [&b"/login?\xff"[..], b"/login?a=\xf0\x80", b"/login"]),
        ("x-key", [b""; 3]),
        ("x-key", [b"\xff"; 3]),
    ] {
        let seen = values.map(|value| codes(&envoy.ask(entry(key, value))).0);
        assert_eq!(seen, [Code::Ok, Code::Ok, Code::OverLimit], "{key} {values:?}");
    }
    assert_eq!(codes(&envoy.ask(entry("remote_address", b"203.0.113.9"))).0, Code::OverLimit);
    // A repeated key has a bound.
    let many = RateLimitDescriptor {
        entries: vec![Entry { key: "a".to_owned(), value: vec![b'b'] }; 65],
        ..RateLimitDescriptor::default()
    };
    assert_eq!(codes(&envoy.ask(vec![many])), (Code::OverLimit, vec![(Code::OverLimit, 0)]));
    assert!(envoy.server.wait_for_log("refused undecided").contains("at most 64 entries, one of these has 65"));
}

/// Woken by: leaving out each of the checks.
#[test]
fn what_cannot_be_decided_is_an_error_that_says_what_and_where() {
    let mut envoy = Envoy::start(POLICY);
    let mut refused = |domain: &str, descriptors: Vec<RateLimitDescriptor>, expect: &str| {
        let (code, message) = envoy.ask_in(domain, descriptors).unwrap_err();
        assert_eq!(code, 3);
        assert!(message.contains(expect), "{message}");
    };
    let address = || descriptor(&[("remote_address", "192.0.2.1")]);
    refused("", vec![address()], "domain");
    refused("edge", vec![], "at least one");
    refused("edge", vec![descriptor(&[("a", "b"), ("", "c")])], "descriptors[0].entries[1]");
    let negative = RateLimitDescriptor { is_negative_hits: true, ..address() };
    refused("edge", vec![negative], "negative_hits = true");
    // Nothing of it was charged, and operators see it.
    assert_eq!(codes(&envoy.ask(vec![address()])), (Code::Ok, vec![(Code::Ok, 4)]));
    assert!(envoy.server.wait_for_log("gRPC call refused").contains("invalid_argument"));
    let metrics = envoy.server.connect().send("GET", "/metrics", &[], "").unwrap().body;
    assert!(metrics.contains("threshold_grpc_errors_total{code=\"invalid_argument\"} 4"), "{metrics}");
}

/// A client chooses how many of its optional headers Envoy asks about and how long they are, and Envoy lets through what is an error.
///
/// Woken by: an error in `excess` or `too_large` in place of a denial, and by charging such a request.
#[test]
fn more_descriptors_or_bytes_than_one_request_may_have_are_a_denial() {
    let mut envoy = Envoy::start(POLICY);
    let address = || descriptor(&[("remote_address", "192.0.2.1")]);
    let many = |count: usize| vec![address(); count];
    assert_eq!(codes(&envoy.ask(many(17))), (Code::OverLimit, vec![(Code::OverLimit, 0); 17]));
    let said = envoy.server.wait_for_log("refused undecided");
    assert!(said.contains("edge") && said.contains("at most 16 descriptors, this one has 17"), "{said}");
    let huge = descriptor(&[("other", &"v".repeat(4 << 20))]);
    let answer = envoy.ask(vec![address(), huge]);
    assert_eq!((codes(&answer), answer.raw_body.is_empty()), ((Code::OverLimit, vec![]), false));
    assert!(envoy.server.wait_for_log("refused undecided").contains("at most 4194304 bytes"));
    let metrics = envoy.server.connect().send("GET", "/metrics", &[], "").unwrap().body;
    assert!(metrics.contains("threshold_refused_total 2"), "{metrics}");
    // Nothing of it was charged. Sixteen are decided.
    assert_eq!(codes(&envoy.ask(vec![address()])), (Code::Ok, vec![(Code::Ok, 4)]));
    let answer = envoy.ask([many(1), vec![descriptor(&[("other", "o")]); 15]].concat());
    assert_eq!((answer.overall_code(), answer.statuses.len()), (Code::Ok, 16));
    // What has happened is recorded, one after the other.
    let answer = envoy.ask_in("done", [vec![descriptor(&[("other", "o")]); 16], many(1)].concat()).unwrap();
    assert_eq!((answer.overall_code(), answer.statuses.len()), (Code::Ok, 17));
    assert_eq!(codes(&envoy.ask(vec![address()])), (Code::Ok, vec![(Code::Ok, 1)]));
    assert_eq!(envoy.ask_in("done", many(257)).unwrap().overall_code(), Code::OverLimit);
    assert_eq!(codes(&envoy.ask(vec![address()])), (Code::Ok, vec![(Code::Ok, 0)]));
}

/// A compressed message was `UNIMPLEMENTED`, and Envoy lets through what is an error.
///
/// Woken by: leaving out `inflate`, or the length of what it makes.
#[test]
fn a_compressed_message_is_decided_and_a_large_one_is_a_denial() {
    let mut envoy = Envoy::start(POLICY);
    let request = |value: &str| {
        let descriptors = vec![descriptor(&[("remote_address", "192.0.2.1")]), descriptor(&[("other", value)])];
        RateLimitRequest { domain: "edge".to_owned(), descriptors, hits_addend: 0 }
    };
    let framed = |message: Vec<u8>| {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(&message).unwrap();
        let compressed = encoder.finish().unwrap();
        [&[1], &u32::try_from(compressed.len()).unwrap().to_be_bytes()[..], &compressed].concat()
    };
    let mut ask = |encoding: &'static str, value: &str| {
        envoy.client.metadata = vec![("grpc-encoding", encoding.to_owned())];
        let answer = envoy.client.call_bytes(RATE_LIMIT, framed(request(value).encode_to_vec()));
        answer.map(|answer| codes(&RateLimitResponse::decode(answer).unwrap()))
    };
    assert_eq!(ask("gzip", "o"), Ok((Code::Ok, vec![(Code::Ok, 4), (Code::Ok, 0)])));
    assert_eq!(ask("gzip", &"o".repeat(100_000)), Ok((Code::Ok, vec![(Code::Ok, 3), (Code::Ok, 0)])));
    assert_eq!(ask("gzip", &"o".repeat(64 << 20)), Ok((Code::OverLimit, vec![])));
    assert_eq!(ask("identity", "o").unwrap_err().0, 13);
    assert_eq!(ask("zstd", "o").unwrap_err().0, 12);
    let fields = [("content-type", "application/grpc"), ("te", "trailers")];
    let (head, ..) = envoy.client.send(RATE_LIMIT, &fields, framed(request("o").encode_to_vec()));
    assert_eq!(head.headers()["grpc-accept-encoding"], "identity,gzip");
}

/// 98 fields of metadata were 431, which is an error of the call to Envoy.
///
/// Woken by: `MAX_HEADERS` for proxies too.
#[test]
fn a_call_may_have_a_thousand_fields_of_metadata() {
    let mut envoy = Envoy::start(POLICY);
    let descriptors = vec![descriptor(&[("remote_address", "192.0.2.1")])];
    envoy.client.metadata = vec![("x-more", "m".to_owned()); 990];
    assert_eq!(envoy.ask(descriptors).overall_code(), Code::Ok);
    envoy.client.metadata = vec![("x-more", "m".to_owned()); 1_000];
    let fields = [("content-type", "application/grpc"), ("te", "trailers")];
    assert_eq!(envoy.client.send(RATE_LIMIT, &fields, Vec::new()).0.status(), 431);
}

/// Woken by: leaving out `verb`, or deciding what is recorded.
#[test]
fn a_domain_that_records_charges_and_never_denies() {
    let mut envoy = Envoy::start(POLICY);
    let address = [("remote_address", "192.0.2.1")];
    for _ in 0..2 {
        let answer = envoy.ask_in("done", vec![costing(4, &address)]).unwrap();
        assert_eq!((answer.overall_code(), answer.response_headers_to_add.len()), (Code::Ok, 0));
    }
    assert_eq!(codes(&envoy.ask(vec![descriptor(&address)])).0, Code::OverLimit);
}

/// Woken by: leaving out `filter(|_| domain.overrides)`, or `add_changed`.
#[test]
fn a_limit_of_a_descriptor_counts_only_where_the_policy_allows_it() {
    let mut envoy = Envoy::start(POLICY);
    let with = |hits: u64, requests_per_unit: u32, at: &str| RateLimitDescriptor {
        limit: Some(RateLimitOverride { requests_per_unit, unit: Unit::Day.into() }),
        ..costing(hits, &[("remote_address", at)])
    };
    let answer = envoy.ask_in("own", vec![with(9, 10, "192.0.2.1")]).unwrap();
    assert_eq!(codes(&answer), (Code::Ok, vec![(Code::Ok, 1)]));
    let limit = answer.statuses[0].current_limit.as_ref().unwrap();
    assert_eq!((limit.requests_per_unit, limit.unit()), (10, Unit::Day));
    assert_eq!(codes(&envoy.ask_in("own", vec![with(2, 10, "192.0.2.1")]).unwrap()).0, Code::OverLimit);
    // The same budget, by the limit of the policy.
    assert_eq!(codes(&envoy.ask(vec![descriptor(&[("remote_address", "192.0.2.1")])])).0, Code::OverLimit);
    // Another domain has no limits of its own.
    assert_eq!(codes(&envoy.ask(vec![with(1, 10, "192.0.2.2")])), (Code::Ok, vec![(Code::Ok, 4)]));
    // Nothing fits a limit of 0.
    assert_eq!(codes(&envoy.ask_in("own", vec![with(1, 0, "192.0.2.3")]).unwrap()).0, Code::OverLimit);
    // A limit that the rule cannot have leaves it with its own: Envoy may take it from what a client sends.
    let no_unit = RateLimitDescriptor {
        limit: Some(RateLimitOverride { requests_per_unit: 9, unit: 0 }),
        ..costing(1, &[("remote_address", "192.0.2.4")])
    };
    let answer = envoy.ask_in("own", vec![no_unit, with(1, u32::MAX, "192.0.2.5"), with(1, 8, "192.0.2.6")]).unwrap();
    assert_eq!(codes(&answer), (Code::Ok, vec![(Code::Ok, 4), (Code::Ok, 4), (Code::Ok, 7)]));
    assert!(envoy.server.wait_for_log("limit of a descriptor ignored").contains("its unit is unknown"));
    assert!(envoy.server.wait_for_log("limit of a descriptor ignored").contains("rule \\\"address\\\" cannot have it"));
}

/// Woken by: `check_negative` that always succeeds, `Command::Credit` that gives back nothing, or too much.
#[test]
fn negative_hits_give_back_at_most_what_was_charged_where_the_policy_allows_it() {
    for algorithm in ["token-bucket", "fixed-window", "sliding-window", "sliding-estimate", "sliding-log"] {
        let policy = format!(
            "[envoy.domains.edge]\nnegative_hits = true\n\
             [[rule]]\nname = 'r'\nper = ['ip']\nlimit = '10/year'\nalgorithm = '{algorithm}'\n"
        );
        let mut envoy = Envoy::start(&policy);
        let address = [("remote_address", "192.0.2.1")];
        let mut left = |hits: i64| {
            let descriptor =
                RateLimitDescriptor { is_negative_hits: hits < 0, ..costing(hits.unsigned_abs(), &address) };
            assert_eq!(codes(&envoy.ask(vec![descriptor])).0, Code::Ok, "{algorithm}");
            codes(&envoy.ask(vec![costing(0, &address)])).1[0].1
        };
        let seen = [4, 3, -2, -4, -100, 10].map(&mut left);
        assert_eq!(seen, [6, 3, 5, 9, 10, 0], "{algorithm}");
        drop(envoy);
    }
}

/// Woken by: leaving out `replaced_rules` in `decide_jointly`, or `replaced` in `credit`.
#[test]
fn a_rule_replaces_others_in_the_requests_that_it_applies_to() {
    let rule = |name: &str, key: &str, limit: &str| {
        format!(
            "[[rule]]\nname = '{name}'\nlayer = 'edge'\nmatch = {{ fact.{key} = '**' }}\nper = ['fact:{key}']\nlimit = '{limit}'\n"
        )
    };
    let policy = "[envoy.replaces]\nspecial = ['reads']\n[envoy.domains.edge]\nnegative_hits = true\n".to_owned()
        + &rule("reads", "kind", "3/year")
        + &rule("special", "path", "9/year");
    let mut envoy = Envoy::start(&policy);
    let (kind, path) = ([("kind", "read")], [("path", "/a")]);
    // More than `reads` ever holds; it is not charged either.
    let answer = envoy.ask(vec![costing(4, &kind), costing(4, &path)]);
    assert_eq!(codes(&answer), (Code::Ok, vec![(Code::Ok, 0), (Code::Ok, 5)]));
    assert_eq!(answer.statuses[0].current_limit, None);
    assert_eq!(codes(&envoy.ask(vec![costing(2, &kind)])), (Code::Ok, vec![(Code::Ok, 1)]));
    // Nor does it get anything back.
    let back = |entries| RateLimitDescriptor { is_negative_hits: true, ..costing(2, entries) };
    assert_eq!(codes(&envoy.ask(vec![back(&kind), back(&path)])).0, Code::Ok);
    assert_eq!(codes(&envoy.ask(vec![costing(0, &kind)])), (Code::Ok, vec![(Code::Ok, 1)]));
    assert_eq!(codes(&envoy.ask(vec![costing(0, &path)])), (Code::Ok, vec![(Code::Ok, 7)]));
}

#[test]
fn a_list_denies_every_descriptor() {
    let mut envoy = Envoy::start(POLICY);
    let listed = vec![descriptor(&[("other", "o")]), descriptor(&[("remote_address", "203.0.113.9")])];
    let answer = envoy.ask(listed);
    assert_eq!(codes(&answer), (Code::OverLimit, vec![(Code::OverLimit, 0), (Code::OverLimit, 0)]));
    assert_eq!(header(&answer, "x-ratelimit-banned"), Some("true"));
}

/// Woken by: leaving out `authorize` of either method, or requiring a token for health.
#[test]
fn callers_need_a_token_and_health_checks_do_not() {
    const TOKEN: &str = "0123456789abcdef0123";
    let mut envoy = Envoy::start_with(POLICY, &[], &[("THRESHOLD_TOKEN", TOKEN)]);
    let ask = |envoy: &mut Envoy| {
        let limited = envoy.ask_in("edge", vec![descriptor(&[("remote_address", "192.0.2.1")])]).map(drop);
        let attributes = Some(AttributeContext {
            request: Some(AttributeRequest {
                http: Some(HttpRequest { method: "GET".to_owned(), path: "/".to_owned(), ..HttpRequest::default() }),
            }),
            ..AttributeContext::default()
        });
        let checked = envoy.client.call::<CheckResponse>(AUTHORIZATION_CHECK, &CheckRequest { attributes }).map(drop);
        [limited, checked].map(|answered| answered.map_err(|(code, _)| code))
    };
    assert_eq!(ask(&mut envoy), [Err(16), Err(16)]);
    for (token, expect) in [("wrong", Err(16)), (TOKEN, Ok(()))] {
        envoy.client.metadata = vec![("authorization", format!("Bearer {token}"))];
        assert_eq!(ask(&mut envoy), [expect, expect]);
    }
    envoy.client.metadata.clear();
    let mut health = |service: &str| {
        let request = HealthCheckRequest { service: service.to_owned() };
        envoy.client.call::<HealthCheckResponse>(HEALTH, &request).map(|answer| answer.status())
    };
    assert_eq!(health("").unwrap(), ServingStatus::Serving);
    assert_eq!(health("envoy.service.ratelimit.v3.RateLimitService").unwrap(), ServingStatus::Serving);
    assert_eq!(health("ratelimit").unwrap(), ServingStatus::Serving);
    assert_eq!(health("other").unwrap_err().0, 5);
    assert_eq!(health(&"o".repeat(2_000)).unwrap_err().0, 8);
}

/// Woken by: leaving out the checks in `wire::unframe`, `wire::read` and `check_protocol`.
#[test]
fn what_is_no_grpc_is_refused_and_the_connection_goes_on() {
    let mut envoy = Envoy::start(POLICY);
    for (body, code) in [
        (vec![], 3),
        (vec![0, 0, 0, 0], 3),
        (vec![1, 0, 0, 0, 0], 13),
        (vec![0, 0, 0, 0, 9, 1], 3),
        (vec![0, 0, 0, 0, 1, 1, 1], 3),
        (vec![0, 0, 0, 0, 2, 0x0a, 0xff], 3),
    ] {
        assert_eq!(envoy.client.call_bytes(RATE_LIMIT, body).unwrap_err().0, code);
    }
    assert_eq!(envoy.client.call_bytes("/other.Service/Method", vec![0; 5]).unwrap_err().0, 12);
    for (kind, status) in [
        ("application/json", 415),
        ("application/grpc-web", 415),
        ("application/grpcfoo", 415),
        ("application/grpc+proto", 200),
        ("application/grpc;charset=utf-8", 200),
    ] {
        let (response, _, body) = envoy.client.send(RATE_LIMIT, &[("content-type", kind)], b"{}".to_vec());
        assert_eq!(response.status(), status, "{kind}: {body:?}");
    }
    // The other listener: the client shows the message of gRPC, and not the body of a 404.
    let mut http = GrpcClient::connect(envoy.server.place.trim_start_matches("http://").parse().unwrap());
    http.authority = "localhost";
    let (code, message) = http.call_bytes(RATE_LIMIT, vec![0; 5]).unwrap_err();
    assert!(code == 12 && message.contains("--grpc"), "{code} {message}");
    assert_eq!(codes(&envoy.ask(vec![descriptor(&[("x-user", "u1")])])).0, Code::Ok);
}

pub(crate) fn http(path: &str, headers: &[(&str, &str)]) -> HttpRequest {
    HttpRequest {
        method: "GET".to_owned(),
        path: path.to_owned(),
        host: "www.example.com".to_owned(),
        headers: headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
        ..HttpRequest::default()
    }
}

/// Woken by: `peer` in place of the source's address, believing X-Forwarded-For of any source, `HttpResponse::Error` for a denial.
#[test]
fn external_authorization_answers_a_real_429_by_the_address_of_the_client() {
    let mut envoy = Envoy::start(POLICY);
    for turn in 0..6 {
        // The client's own field is not believed.
        let forged = format!("198.51.100.{turn}");
        let answer = envoy.check("192.0.2.1", http("/a?b", &[("x-forwarded-for", &forged)]));
        let status = answer.status.as_ref().unwrap().code;
        match answer.http_response.unwrap() {
            HttpResponse::Ok(ok) if turn < 5 => {
                assert_eq!(status, 0);
                let remaining = ok.response_headers_to_add.iter().filter_map(|option| option.header.as_ref());
                let remaining = remaining.clone().find(|header| header.key == "x-ratelimit-remaining");
                assert_eq!(remaining.unwrap().value, (4 - turn).to_string());
            }
            HttpResponse::Denied(denied) if turn == 5 => {
                assert_ne!(status, 0);
                assert_eq!(denied.status.unwrap().code, 429);
                let has = |name: &str| denied.headers.iter().any(|option| option.header.as_ref().unwrap().key == name);
                assert!(has("retry-after") && has("content-type") && denied.body.contains("\"rule\":\"address\""));
            }
            other => panic!("{turn}: {other:?}"),
        }
    }
    // Another client of the same Envoy, and one behind a trusted proxy in front of it.
    for (source, forwarded) in [("192.0.2.2", ""), ("10.1.2.3", "192.0.2.77"), ("10.1.2.3", "192.0.2.78")] {
        let answer = envoy.check(source, http("/", &[("x-forwarded-for", forwarded)]));
        assert!(matches!(answer.http_response, Some(HttpResponse::Ok(_))), "{source}");
    }
    // A path that servers read differently is refused, as at every door that faces clients.
    let answer = envoy.check("192.0.2.3", http("/a/../b", &[]));
    let Some(HttpResponse::Denied(denied)) = answer.http_response else { panic!("{answer:?}") };
    assert_eq!(denied.status.unwrap().code, 400);
    // No error, which Envoy may let through: the client has caused it.
    for bad in [
        HttpRequest { method: "G T".to_owned(), ..http("/", &[]) },
        HttpRequest { host: "a\nb".to_owned(), ..http("/", &[]) },
    ] {
        let answer = envoy.check("192.0.2.4", bad);
        let Some(HttpResponse::Denied(denied)) = answer.http_response else { panic!("{answer:?}") };
        assert_eq!(denied.status.unwrap().code, 400);
    }
    let (code, message) =
        envoy.client.call::<CheckResponse>(AUTHORIZATION_CHECK, &CheckRequest::default()).unwrap_err();
    assert!(code == 3 && message.contains("attributes.request.http"), "{message}");
    drop(envoy.server);
}

/// Woken by: leaving out `announced` in `request`.
#[test]
fn the_announced_length_of_a_body_is_charged() {
    let mut envoy = Envoy::start("[[rule]]\nname = 'bytes'\nper = ['ip']\nlimit = '1000B/day'\n");
    let mut post = |size: i64, announced: &str| {
        let headers = [("content-length".to_owned(), announced.to_owned())].into();
        let http =
            HttpRequest { method: "POST".to_owned(), path: "/".to_owned(), headers, size, ..HttpRequest::default() };
        matches!(envoy.check("192.0.2.1", http).http_response, Some(HttpResponse::Ok(_)))
    };
    assert_eq!([post(0, "300"), post(-1, "300"), post(300, ""), post(0, "300")], [true, true, true, false]);
}

/// A client that sends every optional header must not get more than one that sends a few. Woken by: an error in place of `too_many`.
#[test]
fn more_limits_than_one_request_is_charged_are_a_denial() {
    let rule = |n: usize| {
        format!(
            "[[rule]]\nname = 'r{n}'\nlayer = 'edge'\nmatch = {{ fact.k{n} = '**' }}\nper = ['fact:k{n}']\nlimit = '5/h'\n"
        )
    };
    let twice = |n: usize| rule(n) + &rule(n).replace(&format!("name = 'r{n}'"), &format!("name = 's{n}'"));
    let mut envoy = Envoy::start(&(0..9).map(twice).collect::<String>());
    let mut ask = |count: usize| {
        let keys: Vec<String> = (0..count).map(|n| format!("k{n}")).collect();
        let answer = envoy.ask(keys.iter().map(|key| descriptor(&[(key, "v")])).collect());
        assert_eq!(answer.statuses.len(), count);
        (answer.overall_code(), answer.statuses.iter().all(|status| status.code() == answer.overall_code()))
    };
    assert_eq!((ask(8), ask(9)), ((Code::Ok, true), (Code::OverLimit, true)));
    assert!(envoy.server.wait_for_log("refused undecided").contains("meet more than 16 limits"));
}
