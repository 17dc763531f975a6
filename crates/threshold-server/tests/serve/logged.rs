//! Tests the log lines of decisions: the exceeded limits of a denial, and the charges.

use std::path::Path;

use serde_json::{Value, json};

use super::process::{Scratch, Server, Start};

fn mail_sender(per_minute: &str, per_hour: &str) -> Server {
    let policy = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../policies/mail-sender.toml"));
    let variables = [
        ("GLOBAL_SEND_RATE_LIMIT_PER_MINUTE", per_minute),
        ("GLOBAL_SEND_RATE_LIMIT_PER_HOUR", per_hour),
        ("THRESHOLD_LOG", "threshold::log=debug,threshold::serve=info"),
    ];
    Start { policy: Some(policy), args: &["--log", "json"], variables: &variables, ..Start::default() }.server()
}

/// Stops the server, and returns its log lines with this message.
fn lines(server: Server, message: &str) -> Vec<Value> {
    server.signal("TERM");
    let (_, log) = server.wait();
    let read = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    read.filter(|line| line["message"] == message).collect()
}

/// The preset `mail-sender` requires a WARN line for each rejection, with count and limit. The line once had only the limit of
/// the binding rule, and another exceeded rule with `log = "each"` was ignored.
#[test]
fn a_denial_is_logged_with_count_and_limit_of_every_exceeded_limit() {
    let server = mail_sender("1", "1");
    let mut client = server.connect();
    let mail = json!({"method": "POST", "path": "/v1/messages", "user": "ada", "ip": "203.0.113.7"}).to_string();
    client.post("/v1/record", &mail).unwrap();
    for _ in 0..15 {
        assert_eq!(client.post("/v1/peek", &mail).unwrap().json()["allowed"], false);
    }
    let denied = lines(server, "denied");
    assert_eq!(denied.len(), 15);
    for line in &denied {
        assert_eq!(line["level"], "WARN");
        let figures = [&line["rule"], &line["count"], &line["limit"], &line["full"]];
        assert_eq!(figures, [&json!("per-hour"), &json!(1), &json!(1), &json!("per-minute 1/1, per-hour 1/1")]);
        let user = line["user"].as_str().unwrap();
        assert!(user.starts_with('#') && user.len() == 17, "{line}");
    }
}

/// Every charge is a line at DEBUG for each limit. A peek and a denial charge nothing.
#[test]
fn each_charge_is_logged_with_rule_count_and_limit() {
    let server = mail_sender("4", "9");
    let mut client = server.connect();
    let mail = |cost: u64| json!({"method": "POST", "path": "/v1/messages", "cost": cost}).to_string();
    for (path, cost) in [("/v1/record", 1), ("/v1/peek", 1), ("/v1/check", 1), ("/v1/reserve", 1), ("/v1/check", 3)] {
        client.post(path, &mail(cost)).unwrap();
    }
    client.post("/v1/record", &mail(3)).unwrap();
    let counted = lines(server, "counted").into_iter().map(|line| {
        assert_eq!(line["level"], "DEBUG");
        let [verb, rule] = ["verb", "rule"].map(|name| line[name].as_str().unwrap().to_owned());
        let [count, limit] = ["count", "limit"].map(|name| line[name].as_u64().unwrap());
        (verb, rule, count, limit)
    });
    let expected = [
        ("record", "per-minute", 1, 4),
        ("record", "per-hour", 1, 9),
        ("check", "per-minute", 2, 4),
        ("check", "per-hour", 2, 9),
        ("reserve", "per-minute", 3, 4),
        ("reserve", "per-hour", 3, 9),
        ("record", "per-minute", 4, 4),
        ("record", "per-hour", 6, 9),
    ];
    let expected = expected.map(|(verb, rule, count, limit)| (verb.to_owned(), rule.to_owned(), count, limit));
    assert_eq!(counted.collect::<Vec<_>>(), expected);
}

/// A rule with `log = "each"` is logged each time it is exceeded, also if a sampled rule has the longer wait.
#[test]
fn an_exceeded_rule_that_logs_each_is_logged_beside_a_sampled_one() {
    let rule = |name: &str, limit: &str, log: &str| {
        format!("[[rule]]\nname = '{name}'\nper = []\nlimit = '{limit}'\nalgorithm = 'fixed-window'\nlog = '{log}'\n")
    };
    let policy = Scratch::file("policy.toml", &(rule("short", "1/h", "each") + &rule("long", "1/day", "sampled")));
    let server = Start { policy: Some(policy.path()), args: &["--log", "json"], ..Start::default() }.server();
    let mut client = server.connect();
    for _ in 0..31 {
        client.post("/v1/check", "{}").unwrap();
    }
    let denied = lines(server, "denied");
    assert_eq!(denied.len(), 30);
    assert!(denied.iter().all(|line| line["full"] == "short 1/1, long 1/1"), "{denied:?}");
}

/// A client that was refused for its path once got no reason, and the log had no line about it.
#[test]
fn a_refused_path_is_answered_with_a_reason_and_logged_without_the_path() {
    let policy = "[identity]\ntrusted_proxies = ['127.0.0.1/32']\nclient_ip = 'x-forwarded-for'\n\
                  tenant = 'path:/t/{tenant}/**'\n[[rule]]\nname = 'a'\nper = ['ip']\nlimit = '100/h'\n";
    let policy = Scratch::file("policy.toml", policy);
    let server = Start { policy: Some(policy.path()), args: &["--log", "json"], ..Start::default() }.server();
    let mut client = server.connect();
    let mut ask = |path: &str| {
        let fields = [("x-original-method", "GET"), ("x-original-uri", path), ("x-forwarded-for", "203.0.113.7")];
        client.send("GET", "/auth", &fields, "").unwrap()
    };
    let long = format!("/{}", "a".repeat(9_000));
    let refused = [
        ("/secret/../x%1b", 400, "the path has a dot segment (. or ..)"),
        ("/secret%0d%0a", 400, "the path has a control character"),
        ("/secret\\x", 400, "the path has a backslash"),
        ("//a%2fsecret;c%5cd%23e", 400, "servers may read the path in more than 8 ways"),
        ("/t/secret%5cx/y", 400, "servers may read different callers from the path"),
        (&long, 414, "the path is longer than 8192 bytes"),
    ];
    for (path, status, message) in refused {
        let answer = ask(path);
        let body = answer.json();
        assert_eq!(
            (answer.status, &body["message"], &body["field"]),
            (status, &json!(message), &json!("path")),
            "{path}"
        );
    }
    assert_eq!(ask("/fine").status, 200);
    // Only a sample is logged.
    for _ in 0..100 {
        ask("/secret/../x");
    }
    let logged = lines(server, "request refused undecided");
    for ((_, status, message), line) in refused.iter().zip(&logged) {
        assert_eq!((&line["status"], &line["reason"]), (&json!(status), &json!(message)), "{line}");
        assert!(line["ip"].as_str().unwrap().starts_with('#') && !line.to_string().contains("secret"), "{line}");
    }
    assert!((6..60).contains(&logged.len()), "{} lines", logged.len());
}
