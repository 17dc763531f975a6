//! Tests that a server raises alerts, and sends them and events to receivers and files.

use std::io::{BufRead as _, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::process::Output;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use rcgen::{CertifiedKey, generate_simple_self_signed};
use serde_json::{Value, json};
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;
use tokio_rustls::rustls::{ServerConfig, ServerConnection, StreamOwned};

use super::process::{PATIENCE, Scratch, Server, Start};

/// A policy that denies from the second request on, with one alert.
fn policy(layer: &str, alert: &str) -> String {
    format!(
        r#"
identity = {{ log_identifiers = true }}
[[rule]]
name = "one"
layer = "{layer}"
per = ["{}"]
limit = "1/h"
{}
[alerts]
{alert}
"#,
        match layer {
            "edge" => "ip",
            name => name,
        },
        match layer {
            "user" => "ladder = 'quick'\nstrike = 'request'\n[ladders.quick]\nrungs = ['ban 1h']\ndecay = '2h'",
            _ => "",
        }
    )
}

fn ask(server: &Server, caller: &Value) {
    assert_eq!(server.connect().post("/v1/check", &caller.to_string()).unwrap().status, 200);
}

fn alerts(server: &Server, path: &str) -> Vec<Value> {
    server.connect().send("GET", path, &[], "").unwrap().json().as_array().unwrap().clone()
}

/// Each key of `[alerts]` has its effect: the count, both thresholds and the period are those of the policy.
#[test]
fn alerts_are_raised_at_the_thresholds_of_the_policy() {
    for (name, layer) in
        [("edge_blocks", "edge"), ("tenant_blocks", "tenant"), ("user_bans", "user"), ("ip_blocks", "tenant")]
    {
        let alert = format!("{name} = {{ per = '2min', warning = 2, critical = 4 }}");
        let file = Scratch::file("policy.toml", &policy(layer, &alert));
        let server = Start { policy: Some(file.path()), ..Start::default() }.server();
        for number in 1..=4 {
            // The first request of a caller is allowed, and the second one is denied; a user is banned by it.
            let caller = json!({"ip": "203.0.113.7", "user": format!("u{number}"), "tenant": format!("t{number}")});
            let times = if layer == "edge" && number > 1 { 1 } else { 2 };
            (0..times).for_each(|_| ask(&server, &caller));
            let raised = alerts(&server, "/v1/alerts?state=raised");
            let own: Vec<_> = raised.iter().filter(|notice| notice["alert"] == name).collect();
            let figures: Vec<_> = own.iter().map(|it| json!([it["level"], it["threshold"], it["periodSec"]])).collect();
            let expect = match number {
                1 => vec![],
                2 | 3 => vec![json!(["warning", 2, 120])],
                _ => vec![json!(["critical", 4, 120])],
            };
            assert_eq!(figures, expect, "{name} after {number}");
        }
        let told: Vec<_> = alerts(&server, "/v1/alerts").iter().map(|notice| notice["count"].clone()).collect();
        assert_eq!(told, [4, 2], "{name}: the newest first");
        let raised = alerts(&server, "/v1/alerts?state=raised");
        let own = raised.iter().find(|notice| notice["alert"] == name).unwrap();
        let runbook = format!("docs/runbooks/{}.md", name.replace('_', "-"));
        assert_eq!((&own["count"], &own["peak"], &own["runbook"]), (&json!(4), &json!(4), &json!(runbook)));
        assert!(own["node"].as_str().is_some_and(|node| !node.is_empty()), "{own}");
        let (code, said) = run(&server, &["alerts"]);
        assert!(code == Some(0) && said.contains(name) && said.contains(&runbook), "{said}");
    }
}

#[test]
fn a_reload_changes_the_thresholds_of_what_is_already_counted() {
    let of = |warning| policy("edge", &format!("edge_blocks = {{ per = 'h', warning = {warning}, critical = 9 }}"));
    let file = Scratch::file("policy.toml", &of(4));
    let server = Start { policy: Some(file.path()), ..Start::default() }.server();
    (0..4).for_each(|_| ask(&server, &json!({"ip": "203.0.113.7"})));
    assert_eq!(alerts(&server, "/v1/alerts"), [Value::Null; 0]);
    file.replace(&of(3));
    server.signal("HUP");
    server.wait_for_log("policy reloaded");
    let raised = alerts(&server, "/v1/alerts?state=raised");
    assert_eq!((raised.len(), &raised[0]["count"], &raised[0]["threshold"]), (1, &json!(3), &json!(3)));
}

/// Fails if the thresholds stay in force, or if `off` is read as a table without any.
#[test]
fn an_alert_that_a_reload_switches_off_is_resolved() {
    let of =
        |ip| policy("edge", &format!("edge_blocks = {{ per = 'min', warning = 3, critical = 9 }}\nip_blocks = {ip}"));
    let file = Scratch::file("policy.toml", &of("{ per = 'min', warning = 3, critical = 9 }"));
    let server = Start { policy: Some(file.path()), ..Start::default() }.server();
    (0..4).for_each(|_| ask(&server, &json!({"ip": "203.0.113.7"})));
    assert_eq!(alerts(&server, "/v1/alerts?state=raised").len(), 2);
    file.replace(&of("'off'"));
    server.signal("HUP");
    server.wait_for_log("policy reloaded");
    let raised = alerts(&server, "/v1/alerts?state=raised");
    assert_eq!((raised.len(), &raised[0]["alert"]), (1, &json!("edge_blocks")), "{raised:?}");
    let told = alerts(&server, "/v1/alerts");
    assert_eq!((&told[0]["alert"], &told[0]["state"]), (&json!("ip_blocks"), &json!("resolved")), "{told:?}");
    (0..20).for_each(|_| ask(&server, &json!({"ip": "203.0.113.8"})));
    let metrics = server.connect().send("GET", "/metrics", &[], "").unwrap().body;
    for level in ["warning", "critical"] {
        let series = format!("threshold_alerts_active{{alert=\"ip_blocks\",level=\"{level}\"}} 0\n");
        assert!(metrics.contains(&series), "{metrics}");
    }
}

/// PagerDuty's incidents stayed open when a server was restarted during an attack, or opened twice.
///
/// Fails if the alerts are not saved, not restored, or restored without their counts.
#[test]
fn a_restart_ends_what_is_over_and_does_not_repeat_what_goes_on() {
    let (address, got) = receiver(None);
    let folder = Scratch::folder();
    let db = folder.path().join("threshold.db");
    let url = format!("pagerduty+http://{address}/pager");
    let variables = [("THRESHOLD_ALERT_URL", url.as_str()), ("THRESHOLD_PAGERDUTY_KEY", "routing-key")];
    let args = ["--db", db.to_str().unwrap(), "--allow-private-webhooks"];
    let of = |warning| policy("edge", &format!("edge_blocks = {{ per = 'h', warning = {warning}, critical = 99 }}"));
    let file = Scratch::file("policy.toml", &of(3));
    let start = Start { policy: Some(file.path()), args: &args, variables: &variables, ..Start::default() };
    let next = || -> (String, String) {
        let body: Value = serde_json::from_str(&got.recv_timeout(PATIENCE).unwrap().2).unwrap();
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        (text(&body["event_action"]), text(&body["dedup_key"]))
    };
    let server = start.server();
    (0..4).for_each(|_| ask(&server, &json!({"ip": "203.0.113.7"})));
    let (action, key) = next();
    assert_eq!(action, "trigger");
    let before = alerts(&server, "/v1/alerts?state=raised");
    server.signal("TERM");
    assert!(server.wait().0.success());
    // It goes on: the counts are restored, and nothing is told.
    let server = start.server();
    ask(&server, &json!({"ip": "203.0.113.7"}));
    let after = alerts(&server, "/v1/alerts?state=raised");
    assert_eq!((&after[0]["since"], &after[0]["count"]), (&before[0]["since"], &json!(4)), "{before:?} {after:?}");
    assert_eq!(alerts(&server, "/v1/alerts"), [Value::Null; 0]);
    server.signal("KILL");
    drop(server);
    // It is over, because the threshold is another one by now.
    file.replace(&of(50));
    let server = start.server();
    assert_eq!(next(), ("resolve".to_owned(), key));
    assert_eq!(alerts(&server, "/v1/alerts?state=raised"), [Value::Null; 0]);
    server.signal("TERM");
    assert!(server.wait().0.success());
    assert!(got.try_recv().is_err(), "each was told once");
}

/// An attack during which a receiver was away was told to nobody if the server was restarted before the receiver returned.
///
/// Fails if what a receiver has accepted is not saved, if all are told again, or if the key has the name of the present server.
#[test]
fn a_receiver_that_was_away_is_told_after_a_restart_under_any_name() {
    let (up, got) = receiver(None);
    let (address, pager, is_away) = receiver_that_may_be_away();
    let folder = Scratch::folder();
    let db = folder.path().join("threshold.db");
    let urls = format!("http://{up}/own pagerduty+http://{address}/pager");
    let variables = [("THRESHOLD_ALERT_URL", urls.as_str()), ("THRESHOLD_PAGERDUTY_KEY", "routing-key")];
    let of = |warning| policy("edge", &format!("edge_blocks = {{ per = 'h', warning = {warning}, critical = 99 }}"));
    let file = Scratch::file("policy.toml", &of(3));
    let start = |node| {
        let args = ["--db", db.to_str().unwrap(), "--allow-private-webhooks", "--node", node];
        Start { policy: Some(file.path()), args: &args, variables: &variables, ..Start::default() }.server()
    };
    is_away.store(true, Ordering::SeqCst);
    let server = start("blue");
    (0..4).for_each(|_| ask(&server, &json!({"ip": "203.0.113.7"})));
    assert!(got.recv_timeout(PATIENCE).unwrap().2.contains(r#""state":"raised""#));
    // Until it is saved that this receiver has accepted it.
    let begin = Instant::now();
    let is_saved =
        || std::fs::read(db.with_extension("events-wal")).is_ok_and(|log| log.windows(9).any(|it| it == b"webhook #"));
    while !is_saved() {
        assert!(begin.elapsed() < PATIENCE);
    }
    server.signal("KILL");
    drop(server);
    is_away.store(false, Ordering::SeqCst);
    let server = start("green");
    let incident = |action: &str| {
        let body: Value = serde_json::from_str(&pager.recv_timeout(PATIENCE).unwrap().2).unwrap();
        assert_eq!(
            (&body["event_action"], &body["dedup_key"]),
            (&json!(action), &json!("threshold/blue/edge_blocks/"))
        );
    };
    incident("trigger");
    file.replace(&of(50));
    server.signal("HUP");
    incident("resolve");
    assert!(got.recv_timeout(PATIENCE).unwrap().2.contains(r#""state":"resolved""#));
    drop(server);
    drop(start("green"));
    assert!(got.try_recv().is_err() && pager.try_recv().is_err(), "each was told once");
}

/// A receiver that answers 503 while it is away, and hands on what it accepts.
fn receiver_that_may_be_away() -> (SocketAddr, Receiver<(String, String, String)>, Arc<AtomicBool>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, got) = channel();
    let is_away = Arc::<AtomicBool>::default();
    let away = Arc::clone(&is_away);
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            if away.load(Ordering::SeqCst) {
                drop(answer_with("503 Service Unavailable", &mut stream));
            } else if answer(&mut stream).is_some_and(|answered| sender.send(answered).is_err()) {
                break;
            }
        }
    });
    (address, got, is_away)
}

fn run(server: &Server, args: &[&str]) -> (Option<i32>, String) {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_threshold"));
    let output = command.args(args).env_clear().env("THRESHOLD_SERVER", &server.place).output().unwrap();
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap()).concat();
    (output.status.code(), text)
}

/// Whether alerts arrive was known at the first attack.
#[test]
fn a_test_message_shows_whether_alerts_arrive() {
    let (address, got) = receiver(None);
    let folder = Scratch::folder();
    let db = folder.path().join("threshold.db");
    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let all = format!("http://{address}/own slack+http://{address}/slack pagerduty+http://{address}/pager");
    let start = |urls: &str| {
        let variables = [("THRESHOLD_ALERT_URL", urls), ("THRESHOLD_PAGERDUTY_KEY", "CANARY-key")];
        let args = ["--db", db.to_str().unwrap(), "--allow-private-webhooks"];
        Start { args: &args, variables: &variables, ..Start::default() }.server()
    };
    let server = start(&format!("{all} http://{gone}/CANARY"));
    let (code, said) = run(&server, &["alerts", "test"]);
    let lines: Vec<&str> = said.lines().collect();
    let kinds = ["webhook-1", "slack-1", "pagerduty-1"];
    let accepted = kinds.map(|kind| format!("{kind} http://{address}: accepted"));
    assert_eq!((code, &lines[..3]), (Some(1), &accepted.each_ref().map(String::as_str)[..]), "{said}");
    assert!(lines[3].starts_with(&format!("webhook-2 http://{gone}: failed: ")) && !said.contains("CANARY"), "{said}");
    let mut paths: Vec<String> = (0..4).map(|_| got.recv_timeout(PATIENCE).unwrap().0).collect();
    paths.sort_unstable();
    assert_eq!(paths, ["/own", "/pager", "/pager", "/slack"]);
    // It is no alert, and is in the audit.
    assert_eq!(run(&server, &["alerts"]), (Some(0), "no alert is raised\n".to_owned()));
    let (_, audit) = run(&server, &["audit"]);
    assert!(audit.contains("alerts test") && audit.contains("test: sent"), "{audit}");
    server.signal("TERM");
    assert!(server.wait().0.success());
    let server = start(&all);
    assert_eq!(run(&server, &["alerts", "test"]).0, Some(0));
    let answer = server.connect().post("/v1/alerts/test", "").unwrap();
    let tested = kinds.map(|kind| json!({"name": format!("{kind} http://{address}"), "ok": true}));
    let receivers = json!({"receivers": tested});
    assert_eq!((answer.status, answer.json()), (200, receivers));
    // A page of another origin cannot send it.
    let foreign = [("origin", "http://elsewhere.example"), ("content-type", "application/json")];
    assert_eq!(server.connect().send("POST", "/v1/alerts/test", &foreign, "").unwrap().status, 403);
    drop(server);
    let server = Start::default().server();
    let (code, said) = run(&server, &["alerts", "test"]);
    assert!(code == Some(1) && said.contains("log only"), "{said}");
}

/// Answers every request with 200, and hands on its path and body. `tls` has a certificate.
fn receiver(tls: Option<Arc<ServerConfig>>) -> (SocketAddr, Receiver<(String, String, String)>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, got) = channel();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let answered = match &tls {
                Some(tls) => {
                    let session = ServerConnection::new(Arc::clone(tls)).unwrap();
                    answer(&mut StreamOwned::new(session, stream))
                }
                None => answer(&mut { stream }),
            };
            // The test has ended, or the client did not trust the certificate.
            if answered.is_some_and(|answered| sender.send(answered).is_err()) {
                break;
            }
        }
    });
    (address, got)
}

fn answer(stream: &mut (impl Read + Write)) -> Option<(String, String, String)> {
    answer_with("200 OK", stream)
}

fn answer_with(status: &str, stream: &mut (impl Read + Write)) -> Option<(String, String, String)> {
    let mut reader = BufReader::new(stream);
    let (mut head, mut line) = (String::new(), String::new());
    while reader.read_line(&mut line).ok()? > 2 {
        head.push_str(&std::mem::take(&mut line));
    }
    let length = head.lines().find_map(|line| line.to_lowercase().strip_prefix("content-length: ")?.parse().ok());
    let mut body = vec![0; length?];
    reader.read_exact(&mut body).ok()?;
    let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
    reader.get_mut().write_all(answer.as_bytes()).ok()?;
    reader.get_mut().flush().ok()?;
    let path = head.split(' ').nth(1)?.to_owned();
    Some((path, head, String::from_utf8(body).ok()?))
}

/// Woken by the proxy of the environment, by the path of a URL in the log, and by a sink that is not closed at the end.
#[test]
fn receivers_and_files_get_alerts_and_events() {
    let (address, got) = receiver(None);
    let (file, folder) = (
        Scratch::file("policy.toml", &policy("edge", "edge_blocks = { per = 'min', warning = 3, critical = 9 }")),
        Scratch::folder(),
    );
    let lines = folder.path().join("events.jsonl");
    let sink = format!("jsonl:{}", lines.display());
    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let urls = format!(
        "http://{address}/own slack+http://{address}/slack pagerduty+http://{address}/pager http://{gone}/CANARY"
    );
    let variables = [
        ("THRESHOLD_ALERT_URL", urls.as_str()),
        ("THRESHOLD_PAGERDUTY_KEY", "CANARY-routing-key"),
        ("THRESHOLD_EVENTS_URL", &format!("http://{address}/events")),
        ("THRESHOLD_EVENTS_TOKEN", "CANARY-token"),
        ("THRESHOLD_WEBHOOK_SECRET", "CANARY-secret-of-webhooks"),
        ("HTTP_PROXY", "http://127.0.0.1:1"),
        ("ALL_PROXY", "http://127.0.0.1:1"),
    ];
    let args = ["--allow-private-webhooks", "--events-to", &sink, "--log", "json"];
    let server = Start { policy: Some(file.path()), args: &args, variables: &variables, ..Start::default() }.server();
    (0..4).for_each(|_| ask(&server, &json!({"ip": "203.0.113.7"})));
    let (mut bodies, mut events) = (Vec::new(), Vec::new());
    while bodies.len() < 3 || events.len() < 3 {
        let (path, head, body) = got.recv_timeout(PATIENCE).unwrap();
        assert!(head.to_lowercase().contains("webhook-signature: v1,"), "{head}");
        let body: Value = serde_json::from_str(&body).unwrap();
        if path == "/events" {
            assert!(head.contains("Bearer CANARY-token"), "{head}");
            events.extend(body.as_array().unwrap().clone());
        } else {
            bodies.push((path, body));
        }
    }
    bodies.sort_by(|(one, _), (other, _)| one.cmp(other));
    let [(_, own), (_, pager), (_, slack)] = &bodies[..] else { panic!("{bodies:?}") };
    assert_eq!((&own["alert"], &own["state"], &own["count"]), (&json!("edge_blocks"), &json!("raised"), &json!(3)));
    assert_eq!((&pager["event_action"], &pager["routing_key"]), (&json!("trigger"), &json!("CANARY-routing-key")));
    assert!(slack["text"].as_str().unwrap().contains("edge_blocks warning: 3 in 60 s"), "{slack}");
    assert!(events.iter().all(|event| event["ip"] == "203.0.113.7" && event["rule"] == "one"), "{events:?}");
    // One more, which is written before the process ends.
    ask(&server, &json!({"ip": "203.0.113.8"}));
    ask(&server, &json!({"ip": "203.0.113.8"}));
    server.signal("TERM");
    let (status, log) = server.wait();
    assert!(status.success(), "{log}");
    let written = std::fs::read_to_string(&lines).unwrap();
    assert_eq!(written.lines().filter(|line| line.contains("203.0.113.7")).count(), 3, "{written}");
    assert_eq!(written.lines().filter(|line| line.contains("203.0.113.8")).count(), 1, "{written}");
    let log: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let alert: Vec<_> = log.iter().filter(|line| line["message"] == "alert").collect();
    assert_eq!(alert.len(), 1, "{log:?}");
    let fields =
        json!([alert[0]["level"], alert[0]["severity"], alert[0]["alert"], alert[0]["count"], alert[0]["threshold"]]);
    assert_eq!(fields, json!(["WARN", "warning", "edge_blocks", 3, 3]));
    let failed: Vec<_> = log.iter().filter(|line| line["message"] == "events or alerts not delivered").collect();
    assert_eq!(failed.len(), 1, "{log:?}");
    let name = format!("webhook-2 http://{gone}");
    assert_eq!(failed[0]["sink"], name);
    // There is no file in which they could wait.
    let lost =
        log.iter().find(|line| line["message"] == "alerts lost: not delivered before the server stopped").unwrap();
    assert_eq!((&lost["sink"], &lost["notices"]), (&json!(name), &json!(1)), "{log:?}");
    assert!(log.iter().all(|line| !line.to_string().contains("CANARY")), "{log:?}");
}

/// A name that resolves to this machine is refused when it is resolved, and with the flag its certificate is verified.
#[test]
fn a_webhook_reaches_public_addresses_only_unless_it_is_allowed() {
    let CertifiedKey { cert, signing_key } = generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let trusted = Scratch::file("ca.pem", &cert.pem());
    let key = PrivateKeyDer::Pkcs8(signing_key.serialize_der().into());
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let config = config.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
    let config = config.with_single_cert(vec![cert.der().clone()], key).unwrap();
    let (address, got) = receiver(Some(Arc::new(config)));
    let file =
        Scratch::file("policy.toml", &policy("edge", "edge_blocks = { per = 'min', warning = 1, critical = 9 }"));
    let raise = |host: &str, args: &[&str]| {
        let url = format!("https://{host}:{}/CANARY", address.port());
        let variables = [("THRESHOLD_ALERT_URL", url.as_str()), ("SSL_CERT_FILE", trusted.path().to_str().unwrap())];
        let server = Start { policy: Some(file.path()), args, variables: &variables, ..Start::default() }.server();
        (0..2).for_each(|_| ask(&server, &json!({"ip": "203.0.113.7"})));
        server
    };
    let guarded = raise("localhost", &[]);
    let line = guarded.wait_for_log("not delivered");
    assert!(line.contains("no public address") && !line.contains("CANARY"), "{line}");
    // It is not tried again. The count follows the line.
    let begin = Instant::now();
    loop {
        let metrics = guarded.connect().send("GET", "/metrics", &[], "").unwrap().body;
        if metrics.contains("threshold_sink_lost_total{sink=\"webhook-1\"} 1\n") {
            break;
        }
        assert!(begin.elapsed() < PATIENCE, "{metrics}");
    }
    // The certificate is not for this name.
    let other = raise("127.0.0.1", &["--allow-private-webhooks"]).wait_for_log("not delivered");
    assert!(other.contains("certificate") && !other.contains("CANARY"), "{other}");
    assert!(got.try_recv().is_err());
    let server = raise("localhost", &["--allow-private-webhooks"]);
    assert_eq!(got.recv_timeout(PATIENCE).unwrap().0, "/CANARY");
    drop(server);
}

#[test]
fn a_mistake_in_a_sink_is_told_before_the_start() {
    let file = Scratch::file("policy.toml", &policy("edge", ""));
    for (variables, args, expect) in [
        (
            &[("THRESHOLD_ALERT_URL", "http://hooks.example.com/CANARY")][..],
            &[][..],
            "THRESHOLD_ALERT_URL, URL 1: http:// is not encrypted",
        ),
        (&[("THRESHOLD_ALERT_URL", " ")], &[], "THRESHOLD_ALERT_URL is set but empty"),
        (&[("THRESHOLD_EVENTS_TOKEN", "CANARY")], &[], "THRESHOLD_EVENTS_TOKEN is set without THRESHOLD_EVENTS_URL"),
        (&[], &["--events-to", "jsonl:/no/such/folder/events"], "--events-to: "),
    ] {
        for check in [&["--check"][..], &[]] {
            let args = [check, args].concat();
            let start = Start { policy: Some(file.path()), args: &args, variables, ..Start::default() };
            let Output { status, stdout, stderr } = start.command().output().unwrap();
            let said = format!("{}{}", String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap());
            assert!(status.code() == Some(2) && said.contains(expect) && !said.contains("CANARY"), "{said}");
        }
    }
    let start = Start { policy: Some(file.path()), args: &["--events-to", "syslog"], ..Start::default() };
    let said = String::from_utf8(start.command().output().unwrap().stderr).unwrap();
    assert!(said.contains("expected jsonl:FILE or stdout"), "{said}");
}
