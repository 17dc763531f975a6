//! Tests the metrics with Debian's Prometheus: it accepts the alerts, scrapes real servers, and an alert fires and resolves.
//!
//! `./test` installs `prometheus`, which has `promtool`, and `redis-server`.

#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that cannot go on should say so loudly, on the line where it stops"
)]

#[expect(dead_code, reason = "the server's tests use all of it")]
#[path = "../serve/client.rs"]
mod client;
mod monitor;
#[expect(dead_code, reason = "the server's tests use all of it")]
#[path = "../serve/process.rs"]
mod process;
#[expect(dead_code, reason = "the server's tests use all of it")]
#[path = "../serve/redis.rs"]
mod redis;

use std::collections::BTreeSet;
use std::io::Write as _;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rcgen::{CertifiedKey, generate_simple_self_signed};
use serde_json::{Value, json};

use client::Client;
use monitor::Prometheus;
use process::{Scratch, Server, Start};
use redis::Redis;

/// One address and one user may do three things an hour. The server's own alerts are out of reach: they end later than a test may take.
const POLICY: &str = r#"
[[rule]]
name = "address"
layer = "edge"
per = ["ip"]
limit = "3/h"
algorithm = "fixed-window"
on_missing = "skip"

[[rule]]
name = "posts"
layer = "user"
per = ["user"]
limit = "3/h"
algorithm = "fixed-window"
on_missing = "skip"

[[rule]]
name = "tried"
layer = "endpoint"
per = ["user"]
limit = "1/h"
mode = "observe"
on_missing = "skip"

[memory]
max_keys = 10000

[alerts]
edge_blocks = { per = "min", warning = 1000000000, critical = 1000000000 }
tenant_blocks = { per = "min", warning = 1000000000, critical = 1000000000 }
user_bans = { per = "h", warning = 1000000000, critical = 1000000000 }
ip_blocks = { per = "min", warning = 1000000000, critical = 1000000000 }
"#;

/// The series of SPEC 8, in the order of their names.
const SERIES: [&str; 10] = [
    "threshold_bans_active",
    "threshold_blocks_total",
    "threshold_decision_seconds_bucket",
    "threshold_decisions_total",
    "threshold_degraded_total",
    "threshold_keys",
    "threshold_shadow_bans_active",
    "threshold_store_errors_total",
    "threshold_store_seconds_bucket",
    "threshold_warnings_total",
];

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn text_of(name: &str) -> String {
    std::fs::read_to_string(repository().join(name)).unwrap()
}

fn metrics(server: &Server) -> String {
    server.connect().send("GET", "/metrics", &[], "").unwrap().body
}

/// Starts a server with a journal and a sink, whose metrics are part of the answer only then.
fn journaled() -> (Server, [Scratch; 2]) {
    let (policy, folder) = (Scratch::file("policy.toml", POLICY), Scratch::folder());
    let journal = folder.path().join("journal.db");
    let sink = format!("jsonl:{}", folder.path().join("events.jsonl").display());
    let args = ["--db", journal.to_str().unwrap(), "--events-to", &sink];
    let server = Start { args: &args, policy: Some(policy.path()), ..Start::default() }.server();
    (server, [policy, folder])
}

#[test]
fn promtool_accepts_the_alerts_their_tests_and_the_configuration() {
    for arguments in
        [["check", "rules", "alerts.yml"], ["test", "rules", "alerts.test.yml"], ["check", "config", "prometheus.yml"]]
    {
        let folder = repository().join("deploy/prometheus");
        let output =
            Command::new("promtool").args(arguments).current_dir(folder).output().expect("promtool is installed");
        assert!(output.status.success(), "{arguments:?}: {output:?}");
    }
}

/// `promtool check metrics` reads Prometheus' text format only, and complains of a name or a type that does not follow its rules. The
/// other tests show that Prometheus reads OpenMetrics, which it asks for.
///
/// Woken by `info` in the text format, and by a counter whose type is not under the name of its series.
#[test]
fn promtool_accepts_the_metrics_as_text() {
    let (server, _files) = journaled();
    assert_eq!(server.connect().post("/v1/check", r#"{"user":"u1"}"#).unwrap().status, 200);
    for text in [metrics(&server), metrics_with_certificate()] {
        let mut promtool = Command::new("promtool")
            .args(["check", "metrics"])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("promtool is installed");
        promtool.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
        let output = promtool.wait_with_output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

/// Returns the metrics of a server with a certificate, from its listener without TLS.
fn metrics_with_certificate() -> String {
    let CertifiedKey { cert, signing_key } = generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let files = [Scratch::file("cert.pem", &cert.pem()), Scratch::file("key.pem", &signing_key.serialize_pem())];
    let [cert, key] = files.each_ref().map(|file| file.path().to_str().unwrap());
    let folder = Scratch::folder();
    let socket = folder.path().join("admin");
    let admin = format!("unix:{}", socket.display());
    let _server =
        Start { args: &["--tls-cert", cert, "--tls-key", key, "--admin", &admin], ..Start::default() }.server();
    Client::new(UnixStream::connect(socket).unwrap()).send("GET", "/metrics", &[], "").unwrap().body
}

/// A renamed metric would leave an empty panel and an alert that never fires.
#[test]
fn every_metric_of_the_alerts_and_the_dashboard_exists_and_every_alert_has_a_runbook() {
    let (server, _files) = journaled();
    let text = metrics(&server) + &metrics_with_certificate();
    let known: BTreeSet<&str> = text.lines().filter_map(|line| line.split(['{', ' ']).next()).collect();
    let (alerts, tests) = (text_of("deploy/prometheus/alerts.yml"), text_of("deploy/prometheus/alerts.test.yml"));
    for (name, content) in
        [("alerts", &alerts), ("tests", &tests), ("dashboard", &text_of("deploy/grafana/threshold.json"))]
    {
        let words = content.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
        let used: BTreeSet<&str> = words.filter(|word| word.starts_with("threshold_")).collect();
        assert!(used.len() >= 10, "{name}: {used:?}");
        assert!(used.is_subset(&known), "{name}: {:?} do not exist", used.difference(&known));
    }
    let dashboard = text_of("deploy/grafana/threshold.json");
    serde_json::from_str::<Value>(&dashboard).unwrap();
    // It is shorter than a scrape interval on most screens, and `changes` and `rate` of one sample are nothing.
    assert!(!dashboard.contains("[$__interval]"), "use $__rate_interval");
    let runbooks: Vec<&str> = alerts.lines().filter_map(|line| line.trim().strip_prefix("runbook_url: ")).collect();
    assert_eq!(runbooks.len(), alerts.matches("- alert: ").count());
    for runbook in runbooks {
        assert!(repository().join(runbook).exists(), "{runbook} does not exist");
    }
}

/// The real rules with shorter times: five seconds for a minute.
fn shortened_alerts() -> String {
    let mut text = text_of("deploy/prometheus/alerts.yml");
    for (long, short) in [("[1m]", "[5s]"), ("[5m]", "[5s]"), ("[1h]", "[10s]"), ("offset 5m", "offset 5s")] {
        assert!(text.contains(long), "{long}");
        text = text.replace(long, short);
    }
    let lines = text.lines().map(|line| if line.trim().starts_with("for: ") { "        for: 1s" } else { line });
    lines.collect::<Vec<_>>().join("\n")
}

/// Woken by an alert on another layer, or by a label that keeps the sum from falling.
#[test]
fn an_alert_fires_and_resolves_and_every_series_arrives() {
    let (server, _files) = journaled();
    let prometheus = Prometheus::start(&[&server], &shortened_alerts());
    let client = &mut server.connect();
    let list = Value::from(vec![json!({"ip": "192.0.2.1"}); 200]).to_string();
    prometheus.wait("the alert fires", |prometheus| {
        assert_eq!(client.post("/v1/check", &list).unwrap().status, 200);
        prometheus.firing().iter().any(|(name, severity)| name == "ThresholdEdgeBlocks" && severity == "warning")
    });
    let firing = prometheus.firing();
    assert!(!firing.iter().any(|(name, _)| name == "ThresholdTenantBlocks"), "{firing:?}");
    prometheus.wait("the alert resolves", |prometheus| prometheus.firing().is_empty());
    let names = prometheus.names();
    let missing: Vec<_> = SERIES.iter().filter(|name| !names.contains(**name)).collect();
    assert!(missing.is_empty(), "{missing:?} of {names:?}");
}

/// A limit is set far too low while customers use the service, and the operator is told. The same traffic caused no alert before.
///
/// Woken by leaving out the denials of any one layer, and by comparing with an hour that a rule must have.
#[test]
fn a_limit_that_is_set_too_low_is_noticed() {
    let policy_of = |limit: &str| POLICY.replacen("\"3/h\"", limit, 2);
    let policy = Scratch::file("policy.toml", &policy_of("\"1000000/h\""));
    let server = Start { policy: Some(policy.path()), ..Start::default() }.server();
    let prometheus = Prometheus::start(&[&server], &shortened_alerts());
    let (client, mut user) = (&mut server.connect(), 0);
    let mut go_on = || {
        user += 1;
        let list = Value::from(vec![json!({"user": format!("u{}", user % 5)}); 20]).to_string();
        assert_eq!(client.post("/v1/check", &list).unwrap().status, 200);
    };
    // Until there is a time before, with which the share is compared.
    prometheus.wait("there is a time before", |prometheus| {
        go_on();
        prometheus.value("sum(rate(threshold_decisions_total{verdict=\"allow\"}[10s] offset 5s)) > 1").is_some()
    });
    let firing = prometheus.firing();
    assert!(firing.is_empty(), "{firing:?}");
    policy.replace(&policy_of("\"3/h\""));
    server.signal("HUP");
    let fired = "max_over_time(ALERTS{alertname=\"ThresholdRuleDenies\",alertstate=\"firing\",rule=\"posts\"}[1h])";
    prometheus.wait("the alert fires", |prometheus| {
        go_on();
        prometheus.value(fired).is_some()
    });
}

/// Returns the resident memory of a process in KiB.
fn resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// A list of requests, each with its own tenant, user, method, agent and path.
fn random_requests(first: u64, count: u64) -> String {
    let requests = (first..first + count).map(|number| {
        // A mix of the bits, so that names do not resemble each other.
        let name = format!("{:016x}", number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        json!({
            "tenant": format!("t{name}"), "user": format!("u{name}"), "method": format!("M{}", name.to_ascii_uppercase()),
            "path": format!("/{name}"), "ip": std::net::Ipv4Addr::from(u32::try_from(number).unwrap() | 0x0a00_0000),
            "headers": {"user-agent": format!("agent/{name}")},
        })
    });
    Value::from(requests.collect::<Vec<_>>()).to_string()
}

/// No caller can add a series, and what callers name is forgotten: the table of keys is full after the first tenth.
#[test]
fn a_million_random_names_leave_the_series_and_the_memory_as_they_were() {
    const LIST: u64 = 1_000;
    // One rule, because every request evicts a key of each, and a test build takes a while for it.
    let rule = "[[rule]]\nname = 'tenants'\nper = ['tenant']\nlimit = '3/h'\n[memory]\nmax_keys = 10000";
    let policy = Scratch::file("policy.toml", rule);
    let args = ["--events-size", "1", "--max-body", "8388608"];
    let server = Start { args: &args, policy: Some(policy.path()), ..Start::default() }.server();
    let send = |mut client: Client<TcpStream>, lists: std::ops::Range<u64>| {
        for list in lists {
            let answer = client.post("/v1/check", &random_requests(list * LIST, LIST)).unwrap();
            assert_eq!(answer.status, 200, "{}", answer.body);
        }
    };
    send(server.connect(), 0..100);
    let (before, memory) = (metrics(&server), resident(server.pid()));
    std::thread::scope(|scope| {
        for (client, lists) in [(server.connect(), 100..550), (server.connect(), 550..1_000)] {
            scope.spawn(move || send(client, lists));
        }
    });
    let (after, more) = (metrics(&server), resident(server.pid()));
    let decisions: u64 = sum(&after, "threshold_decisions_total");
    assert_eq!(decisions, 1_000_000);
    assert_eq!(names(&before), names(&after));
    // The allocator keeps some more of what answers have needed.
    assert!(more < memory + 32 * 1_024, "{memory} KiB, then {more} KiB");
}

/// Returns every series without its value.
fn names(text: &str) -> BTreeSet<&str> {
    text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| Some(line.rsplit_once(' ')?.0)).collect()
}

/// Returns the sum of a metric over all of its series.
fn sum(text: &str, metric: &str) -> u64 {
    let own = text.lines().filter(|line| line.split(['{', ' ']).next() == Some(metric));
    own.map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap()).sum()
}

/// Two nodes on one Redis, scraped by one Prometheus: the sums over both are what was sent and what was admitted.
#[test]
fn the_sums_of_two_nodes_on_redis_agree_with_what_was_sent() {
    let (redis, policy) = (Redis::start(), Scratch::file("policy.toml", POLICY));
    // On a slow machine no call may be late, or it is decided without the store.
    let nodes = [(); 2].map(|()| redis.node(&policy));
    let prometheus = Prometheus::start(&[&nodes[0], &nodes[1]], &shortened_alerts());
    let mut admitted = 0;
    // Each of 50 users sends five requests, in turn to one node and the other. Three of them fit.
    for turn in 0..5 {
        for user in 0..50 {
            let body = json!({"user": format!("u{user}")}).to_string();
            let node = if (turn + user) % 2 == 0 { &nodes[0] } else { &nodes[1] };
            let answer = node.connect().post("/v1/check", &body).unwrap().json();
            admitted += u64::from(answer["allowed"] == json!(true));
        }
    }
    assert_eq!(admitted, 150);
    for (query, expected) in [
        ("sum(threshold_decisions_total)", 250.0),
        ("sum(threshold_decisions_total{verdict=\"allow\"})", 150.0),
        ("sum(threshold_blocks_total{layer=\"user\"})", 100.0),
        ("sum(threshold_operations_total{operation=\"check\"})", 250.0),
        ("sum(threshold_decision_seconds_count)", 250.0),
        ("sum(threshold_store_errors_total)", 0.0),
        ("min(threshold_store_up)", 1.0),
    ] {
        prometheus.wait(query, |prometheus| prometheus.value(query) == Some(expected));
    }
}
