//! Secrets that clients and operators hand to the server are found nowhere afterwards: not in its output, its files, its events, its
//! metrics, its answers to operators, nor in what it posts to others.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD};
use serde_json::{Value, json};

use super::client::{Answer, Client};
use super::jwt::sign::{SECRET, token};
use super::process::{PATIENCE, Scratch, Start};

/// A part of every secret that the test makes up. The secrets that the server issues are searched for as they are.
const MARK: &str = "cAnArYmArK";

/// Users and tenants are secret, and everything else is shown as it is: the least that is hidden.
const POLICY: &str = r#"
[identity]
trusted_proxies = ["127.0.0.1/32"]
client_ip = "x-forwarded-for"
tenant = "cookie:session"
user = "claim:sub"
secret = ["tenant", "user"]
log_identifiers = true

[identity.jwt]
alg = "HS256"
key = "${JWT_KEY}"

[login]
locks = { 2 = "1h" }

[alerts]
edge_blocks = { per = "min", warning = 1, critical = 5 }
tenant_blocks = { per = "min", warning = 1, critical = 5 }
user_bans = { per = "h", warning = 1, critical = 5 }
ip_blocks = { per = "min", warning = 1, critical = 5 }

[ladders.steep]
rungs = ["warn", "warn + shadow", "ban 24h"]

[[rule]]
name = "keys"
layer = "edge"
per = ["header:x-api-key"]
limit = "2/h"
log = "each"
on_missing = "skip"

[[rule]]
name = "resets"
layer = "edge"
match = { path = "/reset/**" }
per = ["ip", "endpoint"]
limit = "2/h"
log = "each"
on_missing = "skip"

[[rule]]
name = "sessions"
layer = "tenant"
per = ["tenant"]
limit = "9/h"
log = "each"
on_missing = "skip"

[[rule]]
name = "users"
layer = "user"
per = ["user"]
limit = "3/h"
ladder = "steep"
strike = "request"
log = "each"
on_missing = "skip"
"#;

/// A secret with the mark.
fn secret(of: &str) -> String {
    format!("{MARK}-{of}-0123456789abcdef")
}

/// A receiver of webhooks that refuses everything, so that each is tried again and the failure is logged.
fn receiver() -> (String, Receiver<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (send, received) = channel();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let mut reader = BufReader::new(&stream);
            let (mut line, mut length) = (String::new(), 0);
            while reader.read_line(&mut line).is_ok_and(|read| read > 2) {
                let field = line.to_ascii_lowercase();
                length = field.strip_prefix("content-length:").map_or(length, |value| value.trim().parse().unwrap());
                line.clear();
            }
            let mut body = vec![0; length];
            let read = reader.read_exact(&mut body);
            let _ = (&stream).write_all(b"HTTP/1.1 500 -\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            if read.is_err() || send.send(body).is_err() {
                return;
            }
        }
    });
    (address, received)
}

/// A server whose output is in files.
struct Process {
    child: Child,
    address: String,
}

impl Process {
    fn start(folder: &Path, variables: &[(&str, &str)]) -> Self {
        let policy = folder.join("policy.toml");
        std::fs::write(&policy, POLICY).unwrap();
        let (db, lines) = (folder.join("threshold.db"), format!("jsonl:{}", folder.join("events.jsonl").display()));
        let args = [
            "--db",
            db.to_str().unwrap(),
            "--events-to",
            &lines,
            "--events-to",
            "stdout",
            "--allow-private-webhooks",
            "--save-counters",
        ];
        let mut command = Start { args: &args, variables, policy: Some(&policy), ..Start::default() }.command();
        let file = |name: &str| File::create(folder.join(name)).unwrap();
        let mut child = command.stdout(file("stdout")).stderr(file("stderr")).spawn().unwrap();
        loop {
            // Standard output has the events.
            let printed = std::fs::read_to_string(folder.join("stderr")).unwrap();
            let place = printed.lines().find_map(|line| line.trim().strip_prefix("http ")?.split("//").nth(1));
            if let Some(address) = place {
                return Self { child, address: address.to_owned() };
            }
            let log = || std::fs::read_to_string(folder.join("stderr")).unwrap();
            assert!(child.try_wait().unwrap().is_none(), "the server did not start\n{}", log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn send(&self, method: &str, path: &str, fields: &[(&str, &str)], body: &str) -> Answer {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Client::new(stream).send(method, path, fields, body).unwrap()
    }

    /// Posts as a caller.
    fn post(&self, path: &str, body: &Value) -> Answer {
        self.send("POST", path, &[("authorization", &format!("Bearer {}", secret("caller")))], &body.to_string())
    }

    /// Calls as an operator.
    fn operate(&self, method: &str, path: &str) -> Answer {
        let bearer = format!("Bearer {}", secret("operator"));
        self.send(method, path, &[("authorization", &bearer), ("content-type", "application/json")], "")
    }

    /// Asks as a proxy, on behalf of a client with these header fields.
    fn ask(&self, uri: &str, fields: &[(&str, &str)]) -> Answer {
        let token = secret("caller");
        let mut all = vec![
            ("x-threshold-token", token.as_str()),
            ("x-original-method", "GET"),
            ("x-original-uri", uri),
            ("x-forwarded-for", "203.0.113.7"),
        ];
        all.extend_from_slice(fields);
        self.send("GET", "/auth", &all, "")
    }

    fn stop(mut self) {
        assert!(Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status().unwrap().success());
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Uses all verbs with secrets wherever a caller can put one. Returns the secrets that the server has issued.
fn call_all_verbs(server: &Process) -> Vec<(&'static str, String)> {
    let mut issued = Vec::new();
    let request = json!({
        "ip": "203.0.113.9", "user": secret("user"), "tenant": secret("tenant"), "method": "GET",
        "path": format!("/reset/{}?password={}", secret("path"), secret("query")),
        "headers": {"x-api-key": secret("api-key")},
    });
    let text = |answer: &Answer, name: &str| answer.json()[name].as_str().map(str::to_owned);
    for id in 0..12 {
        let mut request = request.clone();
        request["requestId"] = secret(&format!("request-{id}")).into();
        let answer = server.post("/v1/check", &request);
        issued.extend(text(&answer, "receipt").map(|receipt| ("receipt", receipt)));
    }
    assert!(!issued.is_empty());
    for path in ["/v1/peek", "/v1/explain", "/v1/record", "/v1/check?waitMs=1"] {
        assert_eq!(server.post(path, &request).status, 200, "{path}");
    }
    // Only the user's rule matches, so that each request is a strike until a ladder bans the user.
    for _ in 0..8 {
        server.post("/v1/check", &json!({"user": secret("banned-user"), "method": "GET", "path": "/"}));
    }
    server.post("/v1/refund", &json!({"receipt": issued[0].1}));
    server.post("/v1/refund", &json!({"receipt": secret("forged-receipt")}));
    let reserved = server.post("/v1/reserve", &json!({"user": secret("other-user"), "ttlSec": 60}));
    server.post("/v1/commit", &json!({"reservation": reserved.json()["reservation"]}));
    server.post("/v1/release", &json!({"reservation": secret("reservation")}));
    server.post("/v1/limit", &json!({"key": secret("limit-key"), "limit": 1, "windowSec": 60}));
    server.post("/v1/limit", &json!({"key": secret("limit-key"), "limit": 1, "windowSec": 60}));
    server.post("/v1/pause", &json!({"layer": "user", "key": secret("paused-user"), "seconds": 5}));
    // What cannot be read, and what names nothing.
    server.post("/v1/check", &json!({secret("field"): 1}));
    server.send("POST", "/v1/check", &[("authorization", &format!("Bearer {}", secret("caller")))], &secret("body"));
    server.send("GET", &format!("/{}?a={}", secret("unknown-path"), secret("unknown-query")), &[], "");
    issued.extend(log_in(server));
    issued
}

/// Logs in and fails to, until the account is locked.
fn log_in(server: &Process) -> Vec<(&'static str, String)> {
    let mut issued = Vec::new();
    for success in [true, false, false, false] {
        let device =
            issued.iter().rev().find(|(name, _)| *name == "device").map(|(_, device): &(_, String)| device.clone());
        let device = device.unwrap_or_else(|| secret("device"));
        let attempt =
            server.post("/v1/login/attempt", &json!({"account": "ada", "ip": "203.0.113.7", "device": device}));
        let Some(attempt) = attempt.json()["attempt"].as_str().map(str::to_owned) else { continue };
        let result = server.post("/v1/login/result", &json!({"attempt": attempt, "success": success})).json();
        issued.push(("attempt", attempt));
        issued.extend(result["device"].as_str().map(|device| ("device", device.to_owned())));
    }
    server.post("/v1/login/result", &json!({"attempt": secret("attempt"), "success": true}));
    assert!(issued.iter().any(|(name, _)| *name == "device"), "{issued:?}");
    issued
}

/// Asks as a proxy with secrets in every header and in the path. Returns the bearer tokens of the client.
fn ask_as_a_proxy(server: &Process) -> Vec<(&'static str, String)> {
    let claims = json!({"sub": secret("sub"), "exp": 4_000_000_000_u64});
    let good = token("HS256", &claims);
    let forged = good.replace('.', ".x");
    let cookie = format!("session={}; other={}", secret("session"), secret("cookie"));
    let uri = format!("/reset/{}?token={}", secret("auth-path"), secret("auth-query"));
    for jwt in [&good, &forged] {
        let bearer = format!("Bearer {jwt}");
        let key = secret("auth-api-key");
        let fields = [("authorization", bearer.as_str()), ("cookie", &cookie), ("x-api-key", &key)];
        for _ in 0..14 {
            assert!([200, 429, 403].contains(&server.ask(&uri, &fields).status));
        }
    }
    for _ in 0..8 {
        server.ask("/", &[("authorization", &format!("Bearer {good}"))]);
    }
    // Refused undecided, and asked with a wrong token.
    server.ask(&format!("/{}/../x%1b", secret("odd-path")), &[("x-threshold-request-id", &secret("proxy-id"))]);
    server.send("GET", "/auth", &[("x-threshold-token", &secret("wrong-proxy"))], "");
    vec![("jwt", good), ("forged jwt", forged)]
}

/// What operators ask, with their tokens and with wrong ones. Returns the answers that name nobody by request.
fn operate(server: &Process) -> Vec<(String, Vec<u8>)> {
    for path in ["/v1/bans", "/v1/events", "/v1/alerts", "/metrics"] {
        let wrong = format!("Bearer {}", secret("wrong"));
        assert!([401, 429].contains(&server.send("GET", path, &[("authorization", &wrong)], "").status), "{path}");
    }
    let logpush = include_str!("events/firewall_events.ndjson").replace("canary", &secret("edge"));
    let bearer = format!("Bearer {}", secret("caller"));
    assert_eq!(server.send("POST", "/v1/events", &[("authorization", &bearer)], &logpush).status, 200);
    let paths = ["/metrics", "/v1/events?limit=1000", "/v1/stats", "/v1/stats?period=min", "/v1/alerts", "/v1/audit"];
    let paths = paths.iter().chain(&["/v1/locks", "/v1/bans", "/readyz", "/openapi.json"]);
    let mut answers = Vec::new();
    for path in paths {
        let answer = server.operate("GET", path);
        assert_eq!(answer.status, 200, "{path}: {}", answer.body);
        answers.push(((*path).to_owned(), answer.body.into_bytes()));
    }
    let events = String::from_utf8_lossy(&answers[1].1).into_owned();
    assert!(events.matches("\"id\":").count() > 20, "there are too few events to look at: {events}");
    assert_ne!(answers[4].1, b"[]", "no alert was raised");
    assert_eq!(
        String::from_utf8_lossy(&answers[7].1).matches("\"ladder\"").count(),
        2,
        "a ladder has banned two users"
    );
    answers.push(("the stream of events".to_owned(), stream(server)));
    answers
}

/// Reads the live stream of events from the first one on, for a moment.
fn stream(server: &Process) -> Vec<u8> {
    let mut stream = TcpStream::connect(&server.address).unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    let head = format!(
        "GET /v1/events HTTP/1.1\r\nhost: localhost\r\naccept: text/event-stream\r\nlast-event-id: 0\r\n\
         authorization: Bearer {}\r\ncontent-type: application/json\r\n\r\n",
        secret("operator")
    );
    stream.write_all(head.as_bytes()).unwrap();
    let mut read = Vec::new();
    let _ = stream.read_to_end(&mut read);
    assert!(String::from_utf8_lossy(&read).contains("data:"), "{}", String::from_utf8_lossy(&read));
    read
}

/// Every spelling of the mark, and each issued secret.
fn needles(issued: &[(&'static str, String)]) -> Vec<(String, Vec<u8>)> {
    let mut needles = vec![("mark".to_owned(), MARK.as_bytes().to_vec())];
    let hex: String = MARK.bytes().map(|byte| format!("{byte:02x}")).collect();
    needles.push(("mark in hex".to_owned(), hex.into_bytes()));
    // A text may begin at any of three places within a group of four digits. The digits at its ends depend on its neighbours.
    for skip in 0..3 {
        let padded = [vec![b'-'; skip], MARK.as_bytes().to_vec()].concat();
        let encoded = STANDARD_NO_PAD.encode(&padded);
        let middle = encoded[4 * usize::from(skip > 0)..encoded.len() - 2].to_owned();
        needles.push((format!("mark in Base64, shifted by {skip}"), middle.into_bytes()));
    }
    needles.push(("JWT key".to_owned(), SECRET.as_bytes().to_vec()));
    for (name, text) in issued {
        // The part that makes it valid, in case only that is written down.
        let last: String = text.chars().rev().take(24).collect::<Vec<_>>().into_iter().rev().collect();
        needles.push(((*name).to_owned(), last.clone().into_bytes()));
        needles.extend(URL_SAFE_NO_PAD.decode(&last).map(|bytes| (format!("{name}, decoded"), bytes)));
    }
    needles
}

#[track_caller]
fn assert_clean(places: &[(String, Vec<u8>)], needles: &[(String, Vec<u8>)]) {
    let mut found = Vec::new();
    for (place, content) in places {
        for (name, needle) in needles {
            if let Some(at) = content.windows(needle.len()).position(|window| window == needle) {
                let around = &content[at.saturating_sub(80)..content.len().min(at + 80)];
                found.push(format!("{name} in {place}: …{}…", String::from_utf8_lossy(around)));
            }
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn canary_secrets_are_found_nowhere() {
    let folder = Scratch::folder();
    let (address, posted) = receiver();
    let url = |path: &str| format!("http://{address}/{path}/{}?token={}", secret("hook-path"), secret("hook-query"));
    let (alerts, events) = (format!("{} slack+{}", url("alerts"), url("slack")), url("events"));
    let tokens = ["caller", "operator", "reader", "installation", "events-token", "webhook"].map(secret);
    let [caller, operator, reader, installation, events_token, webhook] = tokens.each_ref().map(String::as_str);
    let variables = [
        ("THRESHOLD_TOKEN", caller),
        ("THRESHOLD_ADMIN_TOKEN", operator),
        ("THRESHOLD_READ_TOKEN", reader),
        ("THRESHOLD_SECRET", installation),
        ("THRESHOLD_ALERT_URL", &alerts),
        ("THRESHOLD_EVENTS_URL", &events),
        ("THRESHOLD_EVENTS_TOKEN", events_token),
        ("THRESHOLD_WEBHOOK_SECRET", webhook),
        ("THRESHOLD_LOG", "debug"),
        ("JWT_KEY", SECRET),
    ];
    let server = Process::start(folder.path(), &variables);
    let mut issued = call_all_verbs(&server);
    issued.extend(ask_as_a_proxy(&server));
    let mut places = operate(&server);
    // At least one of each is posted: events and alerts.
    for number in 0..2 {
        places.push((format!("webhook {number}"), posted.recv_timeout(PATIENCE).unwrap()));
    }
    server.stop();
    places.extend(posted.try_iter().map(|body| ("webhook".to_owned(), body)));
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder.path()).unwrap().map(Result::unwrap) {
        let name = entry.file_name().into_string().unwrap();
        places.push((name.clone(), std::fs::read(entry.path()).unwrap()));
        names.push(name);
    }
    for name in ["stdout", "stderr", "events.jsonl", "threshold.db", "threshold.events", "threshold.counters"] {
        let content = places.iter().find(|(place, _)| place == name).map(|(_, content)| content.len());
        assert!(content.is_some_and(|length| length > 10), "{name} is missing or empty: {names:?}");
    }
    let log = places.iter().find(|(place, _)| place == "stderr").map(|(_, log)| String::from_utf8_lossy(log)).unwrap();
    for line in
        ["denied", "counted", "abuse_escalation", "auth_user_lockout", "request refused undecided", "not delivered"]
    {
        assert!(log.contains(line), "nothing was logged about {line}:\n{log}");
    }
    assert_clean(&places, &needles(&issued));
}
