//! Tests `/v1/events`: what is recorded, paged, streamed, reported and erased, and what a broken file of events does not change.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::client::{Answer, Client};
use super::process::{PATIENCE, Scratch, Server, Start};

const POLICY: &str = r#"
[identity]
log_identifiers = true

[alerts]
edge_blocks = { warning = 5, critical = 1000, per = "min" }

[[rule]]
name = "posts"
layer = "user"
per = ["user"]
match = { method = "POST", path = "/api/posts/*" }
limit = "1/h"
algorithm = "fixed-window"
anchor = "first"

[[rule]]
name = "watched"
layer = "tenant"
mode = "observe"
per = ["tenant"]
limit = "1000/h"
on_missing = "skip"
"#;

fn start(folder: &Path, more: &[&str]) -> Server {
    start_with(folder, POLICY, more)
}

fn start_with(folder: &Path, policy: &str, more: &[&str]) -> Server {
    let file = folder.join("policy.toml");
    std::fs::write(&file, policy).unwrap();
    let db = folder.join("threshold.db");
    let args: Vec<&str> = ["--db", db.to_str().unwrap()].into_iter().chain(more.iter().copied()).collect();
    Start { policy: Some(&file), args: &args, ..Start::default() }.server()
}

fn post(client: &mut Client<TcpStream>, user: &str) -> Value {
    let body = json!({"user": user, "tenant": "acme", "ip": "203.0.113.7", "method": "POST", "path": "/api/posts/17"});
    client.post("/v1/check", &body.to_string()).unwrap().json()
}

/// Denies a user this many times, and returns the last answer.
fn deny(client: &mut Client<TcpStream>, user: &str, times: usize) -> Value {
    assert_eq!(post(client, user)["allowed"], true);
    let last = (0..times).map(|_| post(client, user)).last().unwrap();
    assert_eq!(last["allowed"], false);
    last
}

fn list(client: &mut Client<TcpStream>, query: &str) -> Value {
    let answer = client.send("GET", &format!("/v1/events{query}"), &[], "").unwrap();
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.json()
}

fn events(client: &mut Client<TcpStream>, query: &str) -> Vec<Value> {
    list(client, query)["events"].as_array().unwrap().clone()
}

fn files(folder: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn a_denial_is_recorded_with_the_figures_of_its_limits_and_outlives_a_kill() {
    let folder = Scratch::folder();
    let server = start(folder.path(), &[]);
    let client = &mut server.connect();
    let denied = deny(client, "u1", 1);
    let trace = denied["traceId"].as_str().unwrap();
    let found = events(client, &format!("?traceId={trace}"));
    let [event] = found.as_slice() else { panic!("{found:?}") };
    for (field, value) in [
        ("layer", json!("user")),
        ("blocked", json!(true)),
        ("tenant", json!("acme")),
        ("userId", json!("u1")),
        ("endpoint", json!("POST:/api/posts/*")),
        ("ip", json!("203.0.113.7")),
        ("rule", json!("posts")),
        ("verdict", json!("deny")),
        ("cause", json!("limit")),
        ("until", Value::Null),
        ("degraded", Value::Null),
        ("count", json!(1)),
        ("traceId", json!(trace)),
    ] {
        assert_eq!(event[field], value, "{field} of {event}");
    }
    let limits = event["limits"].as_array().unwrap();
    assert_eq!(limits.iter().map(|limit| &limit["rule"]).collect::<Vec<_>>(), ["watched", "posts"]);
    assert_eq!((&limits[1]["remaining"], &limits[1]["resetAt"]), (&json!(0), &denied["resetAt"]));
    assert_eq!((&limits[0]["mode"], &limits[0]["allowed"]), (&json!("observe"), &json!(true)));
    assert_eq!(events(client, "?traceId=00000000000000000000000000000000"), [] as [Value; 0]);
    server.signal("KILL");
    drop(server);
    let server = start(folder.path(), &[]);
    assert_eq!(events(&mut server.connect(), &format!("?traceId={trace}")), std::slice::from_ref(event));
}

#[test]
fn thousands_are_paged_in_order_of_arrival_and_filtered() {
    let folder = Scratch::folder();
    let server = start(folder.path(), &[]);
    let client = &mut server.connect();
    // As many as are recorded in a second, all of them different.
    for part in 0..2 {
        let batch: Vec<Value> = (0..1_000)
            .map(|number| {
                let id = format!("00000000-0000-4000-8000-{:012x}", part * 1_000 + number);
                json!({"id": id, "at": 1_767_225_600_000_u64 + number, "blocked": true, "layer": "edge",
                       "ip": format!("10.{part}.{}.{}", number / 250, number % 250), "userId": format!("u{}", number % 2)})
            })
            .collect();
        let answer = client.post("/v1/events", &json!(batch).to_string()).unwrap();
        assert_eq!(answer.json(), json!({"accepted": 1_000, "ignored": 0}), "{part}");
    }
    let mut seen = Vec::new();
    let mut after = 0;
    loop {
        let page = list(client, &format!("?limit=700&after={after}"));
        let events = page["events"].as_array().unwrap();
        seen.extend(events.iter().map(|event| event["id"].as_str().unwrap().to_owned()));
        after = page["next"].as_u64().unwrap();
        if events.len() < 700 {
            break;
        }
    }
    let expected: Vec<String> = (0..2_000).map(|number| format!("00000000-0000-4000-8000-{number:012x}")).collect();
    assert_eq!(seen, expected);
    assert_eq!(list(client, &format!("?after={after}")), json!({"events": [], "next": after, "previous": null}));
    assert_eq!(events(client, "?limit=1000&userId=u0").len(), 1_000);
    assert_eq!(events(client, "?limit=1000&ip=10.1.2.7").len(), 1);
    assert_eq!(events(client, "?limit=1000&ip=10.1.2.7&userId=u0").len(), 0);
    assert_eq!(events(client, "?limit=1000&layer=user").len(), 0);
    assert_eq!(events(client, "?limit=1000&since=1767225600995&verdict=deny").len(), 10);
    let newest: Vec<Value> = events(client, "?limit=2").iter().map(|event| event["id"].clone()).collect();
    assert_eq!(newest, expected[1_998..]);
}

#[test]
fn bad_queries_and_bodies_are_refused_by_name() {
    let server = Start::default().server();
    let client = &mut server.connect();
    let mut refused = |method: &str, query: &str, body: &str, field: Value| {
        let answer = client.send(method, &format!("/v1/events{query}"), &[], body).unwrap();
        assert_eq!((answer.status, &answer.json()["field"]), (400, &field), "{method} {query} {body}: {}", answer.body);
    };
    for (query, field) in [
        ("?limit=0", "limit"),
        ("?limit=1001", "limit"),
        ("?after=-1", "after"),
        ("?layer=sky", "layer"),
        ("?verdict=maybe", "verdict"),
        ("?cause=moon", "cause"),
        ("?blocked=1", "blocked"),
        ("?traceId=1", "traceId"),
        ("?ip=nowhere", "ip"),
        ("?userId=", "userId"),
        ("?other=1", "other"),
    ] {
        refused("GET", query, "", json!(field));
    }
    refused("DELETE", "", "", json!("userId"));
    refused("DELETE", "?ip=", "", json!("ip"));
    refused("POST", "", "[{}]", json!("id"));
    refused("POST", "", "", Value::Null);
    refused("POST", "", "{\"Action\":\"block\",\"Datetime\":\"soon\"}", json!("Datetime"));
    let far = r#"{"id":"00000000-0000-4000-8000-000000000000","at":1,"blocked":true,"count":10000000000}"#;
    refused("POST", "", far, json!("count"));
    refused("POST", "", &format!("[{far}]"), json!("count"));
    assert_eq!(events(client, ""), [] as [Value; 0]);
}

/// A stream of server-sent events.
struct Stream {
    reader: BufReader<TcpStream>,
    /// The number after which it begins.
    begins_after: String,
}

impl Stream {
    fn open(server: &Server, fields: &str) -> Self {
        let mut stream = server.stream();
        let head = format!("GET /v1/events HTTP/1.1\r\nhost: localhost\r\naccept: text/event-stream\r\n{fields}\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        let mut stream = Self { reader: BufReader::new(stream), begins_after: String::new() };
        assert_eq!(stream.line("HTTP/1.1 "), "200 OK");
        // The first part of the body.
        stream.line("retry: ");
        let mut position = String::new();
        for _ in 0..2 {
            stream.reader.read_line(&mut position).unwrap();
        }
        // An event without data, so that clients dispatch none.
        let id = position.strip_prefix("id: ").and_then(|rest| rest.strip_suffix("\n\n"));
        stream.begins_after = id.unwrap_or_else(|| panic!("{position:?}")).to_owned();
        stream
    }

    /// Returns the rest of the next line that begins so.
    fn line(&mut self, start: &str) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.reader.read_line(&mut line).unwrap(), 0, "the stream ended before \"{start}\"");
            if let Some(rest) = line.trim_end().strip_prefix(start) {
                return rest.to_owned();
            }
        }
    }

    fn next(&mut self) -> (String, Value) {
        (self.line("id: "), serde_json::from_str(&self.line("data: ")).unwrap())
    }
}

#[test]
fn a_stream_tells_of_denials_as_they_come_and_resumes() {
    let folder = Scratch::folder();
    let server = start(folder.path(), &["--drain", "30s"]);
    let client = &mut server.connect();
    deny(client, "early", 2);
    let mut stream = Stream::open(&server, "");
    deny(client, "u1", 1);
    let (id, event) = stream.next();
    assert_eq!((&event["userId"], &event["blocked"]), (&json!("u1"), &json!(true)));
    drop(stream);
    deny(client, "u2", 1);
    let mut stream = Stream::open(&server, &format!("last-event-id: {id}\r\n"));
    assert_eq!(stream.next().1["userId"], "u2");
    deny(client, "u3", 1);
    assert_eq!(stream.next().1["userId"], "u3");
    let mut all = Stream::open(&server, "last-event-id: 0\r\n");
    let users: Vec<Value> = (0..5).map(|_| all.next().1["userId"].clone()).collect();
    assert_eq!(users, ["early", "early", "u1", "u2", "u3"]);
    // A server that stops ends its streams.
    server.signal("TERM");
    let (status, log) = server.wait();
    assert!(status.success(), "{status}: {log}");
}

/// A client whose connection breaks before its first event resumes where its stream began, and misses nothing.
///
/// Woken by a stream that sends no number before its first event, and by one that sends the number of the newest event in place of
/// `Last-Event-ID`.
#[test]
fn a_stream_without_events_can_be_resumed() {
    let (server, _file) = Server::with(POLICY);
    let client = &mut server.connect();
    let empty = Stream::open(&server, "").begins_after;
    assert_eq!(empty, "0");
    deny(client, "early", 1);
    let Stream { begins_after, .. } = Stream::open(&server, "");
    assert_ne!(begins_after, empty);
    deny(client, "u1", 1);
    let mut stream = Stream::open(&server, &format!("last-event-id: {begins_after}\r\n"));
    assert_eq!(stream.begins_after, begins_after);
    assert_eq!(stream.next().1["userId"], "u1");
    let mut all = Stream::open(&server, &format!("last-event-id: {empty}\r\n"));
    assert_eq!([all.next(), all.next()].map(|(_, event)| event["userId"].clone()), ["early", "u1"]);
}

#[test]
fn the_number_of_streams_is_bounded() {
    let (server, _file) = Server::with(POLICY);
    let mut streams: Vec<Stream> = (0..16).map(|_| Stream::open(&server, "")).collect();
    let ask =
        |server: &Server| server.connect().send("GET", "/v1/events", &[("accept", "text/event-stream")], "").unwrap();
    let answer = ask(&server);
    assert_eq!((answer.status, &answer.json()["error"]), (503, &json!("busy")));
    streams.pop();
    // The server notices that the client has left, and there is room again.
    while server
        .connect()
        .ask_bytes("GET", "/v1/events", &[("accept".to_owned(), b"text/event-stream".to_vec())])
        .unwrap()
        .status
        != 200
    {
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

fn upload(client: &mut Client<TcpStream>, body: &[u8]) -> Answer {
    let head = format!(
        "POST /v1/events HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/x-ndjson\r\ncontent-encoding: gzip\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    client.write(&head).unwrap();
    client.write_bytes(body).unwrap();
    client.read().unwrap()
}

fn gzip(text: &str) -> Vec<u8> {
    let mut writer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    writer.write_all(text.as_bytes()).unwrap();
    writer.finish().unwrap()
}

/// A report of more addresses than the queue of decisions holds. Fails if reports go through that queue: the names of the last
/// events are lost, and with them the address that attacks.
#[test]
fn a_large_report_hides_no_busy_address() {
    let folder = Scratch::folder();
    let server = start(folder.path(), &[]);
    let client = &mut server.connect();
    let now = jiff::Timestamp::now();
    let line = |number: u32, ip: &str| {
        format!(r#"{{"Action":"block","ClientIP":"{ip}","Datetime":"{now}","RayID":"ray{number}","RuleID":"r"}}"#)
            + "\n"
    };
    let others = (0..12_000).map(|number| line(number, &format!("10.{}.{}.1", number / 256, number % 256)));
    let busy = (12_000..12_200).map(|number| line(number, "203.0.113.7"));
    let told = upload(client, &gzip(&others.chain(busy).collect::<String>())).json();
    assert_eq!(told, json!({"accepted": 12_200, "ignored": 0}));
    let alerts = client.send("GET", "/v1/alerts?state=raised", &[], "").unwrap().json();
    let raised = alerts.as_array().unwrap().iter().find(|notice| notice["key"] == "203.0.113.7");
    assert_eq!(raised.map(|notice| &notice["level"]), Some(&json!("critical")), "{alerts}");
}

/// Reads a size of a process in bytes.
fn memory(server: &Server, name: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim_start_matches(':').trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

/// A report of more than 65,536 events that was repeated counted twice.
///
/// Woken by a smaller bound of `ReportedIds`, and by collecting all events of a report before they are counted.
#[test]
fn the_largest_report_counts_once_and_takes_little_memory() {
    let folder = Scratch::folder();
    let server = start(folder.path(), &[]);
    let (now, filler) = (jiff::Timestamp::now(), "f".repeat(180));
    let report = |lines: u32| {
        let fields =
            format!(r#""Action":"block","ClientIP":"203.0.113.7","Datetime":"{now}","Description":"{filler}""#);
        gzip(&(0..lines).map(|number| format!("{{{fields},\"RayID\":\"{number}\"}}\n")).collect::<String>())
    };
    let upload = |body: &[u8]| {
        let stream = server.stream();
        // A busy machine takes a minute for it.
        stream.set_read_timeout(Some(PATIENCE * 10)).unwrap();
        upload(&mut Client::new(stream), body)
    };
    // Nothing is counted of a report with one line too many.
    assert_eq!(upload(&report(200_001)).status, 413);
    let (largest, at_rest) = (report(200_000), memory(&server, "VmRSS"));
    assert_eq!(upload(&largest).json(), json!({"accepted": 200_000, "ignored": 0}));
    assert_eq!(upload(&largest).json(), json!({"accepted": 0, "ignored": 200_000}));
    let grown = memory(&server, "VmHWM").saturating_sub(at_rest);
    assert!(grown < 100 << 20, "{} MiB", grown >> 20);
}

/// The sample has what Logpush sends for a zone: six blocks and challenges of one address, and what stopped nobody.
#[test]
fn a_logpush_upload_counts_as_blocks_of_the_edge_and_raises_their_alert() {
    let sample = include_str!("events/firewall_events.ndjson");
    let folder = Scratch::folder();
    let server = start(folder.path(), &[]);
    let client = &mut server.connect();
    // What Logpush sends first, to see whether somebody answers.
    assert_eq!(upload(client, &gzip("{\"content\":\"tests\"}\n")).json(), json!({"accepted": 0, "ignored": 1}));
    // As if it were now, or the alert would be over.
    let now = jiff::Timestamp::now().to_string();
    let sample = sample.replace("2026-01-01T00:00:00Z", &now);
    let told = upload(client, &gzip(&sample)).json();
    assert_eq!(told, json!({"accepted": 6, "ignored": 3}));
    // Logpush repeats an upload whose answer it did not hear.
    assert_eq!(upload(client, &gzip(&sample)).json(), json!({"accepted": 0, "ignored": 9}));
    let found = events(client, "?layer=edge&limit=1000");
    assert_eq!(events(client, "?layer=ip&limit=1000"), found, "another name of the same layer");
    assert_eq!(found.len(), 6);
    let first = &found[0];
    assert_eq!((&first["ip"], &first["blocked"]), (&json!("203.0.113.7"), &json!(true)));
    assert_eq!((&first["rule"], &first["endpoint"]), (&json!("Block known scanners"), &json!("POST:/api/posts/*")));
    assert!(!found.iter().any(|event| event.to_string().contains("canary")), "a path may hold secrets");
    let mut alerts = client.send("GET", "/v1/alerts?state=raised", &[], "").unwrap().json();
    while alerts == json!([]) {
        std::thread::sleep(std::time::Duration::from_millis(50));
        alerts = client.send("GET", "/v1/alerts?state=raised", &[], "").unwrap().json();
    }
    assert_eq!((&alerts[0]["alert"], &alerts[0]["level"]), (&json!("edge_blocks"), &json!("warning")), "{alerts}");
    // Small bodies that become large ones. As JSON values, each of these numbers would take 36 times its size.
    let many = format!("[{}1]", "1,".repeat(3 << 20));
    let refused = upload(&mut server.connect(), &gzip(&many));
    assert_eq!((refused.status, refused.body.contains("1000 events are the most")), (400, true), "{}", refused.body);
    assert_eq!(upload(&mut server.connect(), &gzip(&format!("[[{}1]]", "1,".repeat(3 << 20)))).status, 400);
    assert_eq!(upload(&mut server.connect(), &gzip(&format!("[{}1]", "1,".repeat(5 << 20)))).status, 413);
    let bomb = upload(&mut server.connect(), &gzip(&"x".repeat(200 << 20)));
    assert_eq!(bomb.status, 400, "{}", bomb.body);
}

/// Woken by a form that the server takes and `/openapi.json` does not have, and the other way round.
#[test]
fn every_form_of_a_report_is_described_and_accepted() {
    let (server, _file) = Server::with(POLICY);
    let client = &mut server.connect();
    let described = client.send("GET", "/openapi.json", &[], "").unwrap().json();
    let described = described["paths"]["/v1/events"]["post"]["requestBody"]["content"].as_object().unwrap();
    let event = |number: u8| format!(r#"{{"id":"00000000-0000-4000-8000-{number:012}","at":1,"blocked":true}}"#);
    let forms = [
        ("application/gzip", gzip(&event(1))),
        ("application/json", format!("[{}]", event(2)).into_bytes()),
        ("application/x-ndjson", format!("{}\n{}\n", event(3), event(4)).into_bytes()),
        ("text/plain", event(5).into_bytes()),
    ];
    let mut known: Vec<&str> = described.keys().map(String::as_str).collect();
    known.sort_unstable();
    assert_eq!(known, forms.each_ref().map(|(form, _)| *form));
    for (form, body) in forms {
        let head = format!(
            "POST /v1/events HTTP/1.1\r\nhost: localhost\r\ncontent-type: {form}\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        client.write(&head).unwrap();
        client.write_bytes(&body).unwrap();
        let answer = client.read().unwrap();
        assert!(answer.status == 200 && answer.json()["accepted"] != 0, "{form}: {}", answer.body);
    }
}

#[test]
fn reported_names_are_hidden_as_the_policy_says() {
    let folder = Scratch::folder();
    let server = start_with(folder.path(), &POLICY.replace("log_identifiers = true", ""), &[]);
    let client = &mut server.connect();
    deny(client, "canary-user", 1);
    let reported = json!([{
        "id": "00000000-0000-4000-8000-000000000001", "at": 1, "blocked": true, "layer": "user", "tenant": "acme",
        "userId": "canary-user", "ip": "203.0.113.7", "subject": "user=canary-user", "strikes": 1,
    }]);
    assert_eq!(client.post("/v1/events", &reported.to_string()).unwrap().json()["accepted"], 1);
    let found = events(client, "?userId=canary-user&ip=203.0.113.7");
    let [own, reported] = found.as_slice() else { panic!("{found:?}") };
    assert_eq!((&own["userId"], &own["ip"]), (&reported["userId"], &reported["ip"]));
    assert_eq!(reported["subject"], format!("user={}", own["userId"].as_str().unwrap()));
    let shown = own["userId"].as_str().unwrap().replace('#', "%23");
    assert_eq!(events(client, &format!("?userId={shown}")), found);
    for file in files(folder.path()) {
        let bytes = std::fs::read(&file).unwrap();
        assert!(!String::from_utf8_lossy(&bytes).contains("canary-user"), "{}", file.display());
    }
}

#[test]
fn an_erased_subject_is_nowhere_in_the_files_and_the_audit_says_who_did_it() {
    let folder = Scratch::folder();
    let server = start(folder.path(), &[]);
    let client = &mut server.connect();
    deny(client, "canary-user", 5);
    deny(client, "other-user", 5);
    let is_anywhere = |name: &str| {
        let read = |file: &PathBuf| String::from_utf8_lossy(&std::fs::read(file).unwrap()).into_owned();
        files(folder.path()).iter().any(|file| read(file).contains(name))
    };
    assert_eq!(events(client, "?userId=canary-user").len(), 5);
    assert!(is_anywhere("canary-user"));
    let stats = |client: &mut Client<TcpStream>| client.send("GET", "/v1/stats", &[], "").unwrap().body;
    assert!(stats(client).contains("canary-user"));
    let erased = client.send("DELETE", "/v1/events?userId=canary-user&reason=asked", &[], "").unwrap();
    assert_eq!(erased.json(), json!({"ok": true, "erased": 5}));
    assert!(!is_anywhere("canary-user") && is_anywhere("other-user"));
    let stats = stats(client);
    assert!(!stats.contains("canary-user") && stats.contains("other-user") && stats.contains("acme"), "{stats}");
    assert_eq!(events(client, "").len(), 5);
    let audit = client.send("GET", "/v1/audit?limit=1", &[], "").unwrap().json();
    assert_eq!((&audit[0]["action"], &audit[0]["why"]), (&json!("erase events: all"), &json!("asked")));
    assert!(audit[0]["about"].as_str().unwrap().starts_with("user #"), "{audit}");
}

/// An erasure that failed was in the audit as one that was made.
///
/// Woken by leaving out `audit_failed_erasure`.
#[test]
fn an_erasure_that_fails_is_audited_as_failed() {
    let folder = Scratch::folder();
    let server = start(folder.path(), &[]);
    let client = &mut server.connect();
    deny(client, "u1", 1);
    assert_eq!(events(client, "").len(), 1);
    let other = rusqlite::Connection::open(folder.path().join("threshold.events")).unwrap();
    other.execute_batch("BEGIN EXCLUSIVE").unwrap();
    let mut actions = |status: u16| {
        assert_eq!(client.send("DELETE", "/v1/events?userId=u1", &[], "").unwrap().status, status);
        let audit = client.send("GET", "/v1/audit", &[], "").unwrap().json();
        audit.as_array().unwrap().iter().map(|line| line["action"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(actions(503), ["erase events: failed, not all", "erase events: all"]);
    other.execute_batch("COMMIT").unwrap();
    assert_eq!(actions(200).first().unwrap(), "erase events: all");
}

#[test]
fn a_locked_or_damaged_file_of_events_changes_no_decision() {
    let folder = Scratch::folder();
    std::fs::write(folder.path().join("threshold.events"), "no database".repeat(1_000)).unwrap();
    let server = start(folder.path(), &[]);
    let client = &mut server.connect();
    deny(client, "u1", 1);
    assert_eq!(events(client, "").len(), 1, "a damaged file is set aside");
    let other = rusqlite::Connection::open(folder.path().join("threshold.events")).unwrap();
    other.execute_batch("BEGIN EXCLUSIVE").unwrap();
    for number in 0..20 {
        deny(client, &format!("u2-{number}"), 1);
    }
    // Readers go on, and what was not written is not there.
    assert_eq!(events(client, "").len(), 1);
    server.wait_for_log("events are not recorded");
    other.execute_batch("COMMIT").unwrap();
    deny(client, "u3", 1);
    let seen = events(client, "");
    assert_eq!(seen.last().unwrap()["userId"], "u3");
    server.wait_for_log("events are recorded again");
}

#[test]
fn the_file_of_events_stays_in_its_size() {
    let folder = Scratch::folder();
    let server = start(folder.path(), &["--events-size", "1"]);
    let client = &mut server.connect();
    let long = "x".repeat(200);
    for part in 0..6 {
        let batch: Vec<Value> = (0..900)
            .map(|number| {
                let id = format!("00000000-0000-4000-8000-{:012x}", part * 1_000 + number);
                json!({"id": id, "at": 1_767_225_600_000_u64, "blocked": true, "userId": format!("{number}"), "tenant": long, "rule": long})
            })
            .collect();
        assert_eq!(client.post("/v1/events", &json!(batch).to_string()).unwrap().json()["accepted"], 900);
        list(client, "?limit=1");
        let length = |name: &str| std::fs::metadata(folder.path().join(name)).map_or(0, |metadata| metadata.len());
        let all = length("threshold.events") + length("threshold.events-wal");
        assert!(all <= 1 << 20, "{part}: {all}");
    }
    let rows = events(client, "?after=0&limit=1000");
    assert_ne!(rows[0]["id"], "00000000-0000-4000-8000-000000000000", "the oldest is gone");
}
