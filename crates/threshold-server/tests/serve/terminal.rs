//! Tests the operators' commands of the program, with a running server and without.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use rcgen::{CertifiedKey, generate_simple_self_signed};
use serde_json::json;
use threshold_core::text::is_hidden;

use super::client::Client;
use super::process::{Scratch, Server, Start};

/// Runs a command. Returns its output, or its error.
fn threshold(server: &str, args: &[&str]) -> Result<String, String> {
    let output = Command::new(env!("CARGO_BIN_EXE_threshold"))
        .args(args)
        .env_clear()
        .env("THRESHOLD_SERVER", server)
        .env("THRESHOLD_ADMIN_TOKEN", "boss-token-012345")
        .output()
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
}

fn start(db: &Path) -> Server {
    let variables = &[("THRESHOLD_TOKEN", "caller-token-0123"), ("THRESHOLD_ADMIN_TOKEN", "boss-token-012345")];
    Start { args: &["--db", db.to_str().unwrap()], variables, ..Start::default() }.server()
}

#[test]
fn bans_are_set_listed_and_lifted_by_commands() {
    let folder = Scratch::folder();
    let db = folder.path().join("threshold.db");
    let server = start(&db);
    let place = server.place.clone();
    let run = |args: &[&str]| threshold(&place, args);
    let set = run(&["bans", "add", "edge", "198.51.100.0/24", "--reason", "scrapers & more", "--for", "24h"]).unwrap();
    assert!(set.contains("198.51.100.0/24") && set.contains("scrapers & more"), "{set}");
    run(&["bans", "add", "user", "a/b \u{1b}[2J", "--reason", "fraud"]).unwrap();
    let listed = run(&["bans", "list"]).unwrap();
    assert_eq!(listed.lines().count(), 3, "{listed}");
    assert!(listed.contains("for good") && !listed.contains('\u{1b}'), "{listed}");
    let refused = run(&["bans", "add", "edge", "127.0.0.1", "--reason", "oops"]).unwrap_err();
    assert!(refused.contains("own address") && refused.contains("400"), "{refused}");
    let subject = run(&["subject", "user", "a/b \u{1b}[2J", "--json"]).unwrap();
    let subject: serde_json::Value = serde_json::from_str(&subject).unwrap();
    assert_eq!(subject["ban"]["reason"], "fraud");
    let caller = [("authorization", "Bearer caller-token-0123"), ("content-type", "application/json")];
    let pause = json!({"layer": "edge", "key": "203.0.113.9", "seconds": 600}).to_string();
    assert_eq!(server.connect().send("POST", "/v1/pause", &caller, &pause).unwrap().json()["ok"], true);
    let line = server.wait_for_log("pause: 600 s, until 20");
    assert!(line.contains("caller #") && line.contains("edge #") && !line.contains("203.0.113.9"), "{line}");
    let subject = run(&["subject", "edge", "203.0.113.9"]).unwrap();
    assert!(subject.contains("a pause, or a rule's block_for (until 20"), "{subject}");
    // The pause is on disk before the copy is made: an operators' change waits for all earlier changes.
    run(&["subject", "user", "nobody", "--forgive"]).unwrap();
    let copy = folder.path().join("copy.db");
    let (copy, db_text) = (copy.to_str().unwrap(), db.to_str().unwrap());
    run(&["backup", copy, "--db", db_text]).unwrap();
    assert!(run(&["backup", copy, "--db", db_text]).is_err());
    assert!(run(&["restore", copy, "--db", db_text]).unwrap_err().contains("in use"));
    let id = listed.lines().find(|line| line.contains("198.51.100.0/24")).unwrap().split(' ').next().unwrap();
    run(&["bans", "lift", id, "--reason", "a mistake"]).unwrap();
    assert!(run(&["bans", "lift", id]).unwrap_err().contains("404"));
    run(&["subject", "user", "eve", "--forgive", "--reason", "a mistake"]).unwrap();
    server.signal("KILL");
    drop(server);
    // Without a server, the journal is read.
    let listed = run(&["bans", "list", "--db", db_text]).unwrap();
    assert_eq!(listed.lines().count(), 2, "{listed}");
    let restored = run(&["restore", copy, "--db", db_text]).unwrap();
    assert!(restored.contains("before"), "{restored}");
    assert_eq!(run(&["bans", "list", "--db", db_text]).unwrap().lines().count(), 3);
    let server = start(&db);
    let fields = [("authorization", "Bearer caller-token-0123"), ("content-type", "application/json")];
    let body = json!({"ip": "198.51.100.7"}).to_string();
    let told = server.connect().send("POST", "/v1/check", &fields, &body).unwrap().json();
    assert_eq!(told["banned"], true);
    // The audit.
    let audit = rusqlite::Connection::open(&db).unwrap();
    let mut select = audit.prepare("SELECT who, action, about, why FROM audit ORDER BY id").unwrap();
    let read = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?));
    let lines: Vec<(String, String, String, String)> =
        select.query_map([], read).unwrap().map(Result::unwrap).collect();
    assert_eq!(lines.len(), 5, "{lines:?}");
    assert!(lines[0].0.starts_with("operator #"), "{lines:?}");
    assert!(lines[0].1.starts_with("ban: until 20"), "{lines:?}");
    assert_eq!((&*lines[0].2, &*lines[0].3), ("edge 198.51.100.0/24", "scrapers & more"));
    // The records since the copy are in the renamed file, which this record names.
    let (who, action, about, _) = &lines[4];
    assert_eq!((&**who, &**about), ("local", "journal threshold.db"), "{lines:?}");
    assert!(action.starts_with("restore: copy.db, in place of threshold.db.before-"), "{lines:?}");
}

/// Control characters in a name are escaped in a list, in the API's JSON and in log lines.
#[test]
fn control_characters_in_names_are_escaped() {
    const NAME: &str = "eve\u{202e}\u{2028}\u{9b}2J\u{200b}";
    const SHOWN: &str = "eve\\u202e\\u2028\\u009b2J\\u200b";
    let hidden = |text: &str| text.chars().any(|c| is_hidden(c) && !matches!(c, '\n' | '\t'));
    let rule = "[[rule]]\nname = 'r'\nper = ['user']\nlimit = '1/h'\nlog = 'each'\n";
    let policy = Scratch::file("policy.toml", &format!("[identity]\nlog_identifiers = true\n{rule}"));
    for form in ["text", "json"] {
        let server = Start { policy: Some(policy.path()), args: &["--log", form], ..Start::default() }.server();
        let mut client = server.connect();
        for _ in 0..2 {
            client.post("/v1/check", &json!({"user": NAME, "tenant": NAME}).to_string()).unwrap();
        }
        let line = server.wait_for_log("denied");
        assert!(!hidden(&line) && line.contains("2J"), "{line}");
        if form == "json" {
            let line: serde_json::Value = serde_json::from_str(&line).unwrap();
            assert_eq!((&line["user"], &line["tenant"]), (&json!(NAME), &json!(NAME)));
        }
        let ban = json!({"layer": "user", "key": NAME, "reason": NAME}).to_string();
        let told = client.post("/v1/bans", &ban).unwrap();
        assert!(told.status == 200 && !hidden(&told.body) && told.json()["key"] == NAME, "{}", told.body);
        let wrong = client.post("/v1/check", &json!({"ip": NAME}).to_string()).unwrap();
        assert!(wrong.status == 400 && !hidden(&wrong.body), "{}", wrong.body);
        let listed = threshold(&server.place, &["bans", "list"]).unwrap();
        assert!(!hidden(&listed) && listed.contains(SHOWN), "{listed}");
        let listed = threshold(&server.place, &["bans", "list", "--json"]).unwrap();
        assert!(!hidden(&listed), "{listed}");
        let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
        assert_eq!(listed[0]["reason"], NAME);
    }
}

/// No bans, a wrong or missing token, and no server.
#[test]
fn errors_of_the_commands_say_what_to_do() {
    let folder = Scratch::folder();
    let db = folder.path().join("threshold.db");
    let server = start(&db);
    let place = server.place.clone();
    assert_eq!(threshold(&place, &["bans", "list"]).unwrap(), "there are no bans\n");
    assert_eq!(threshold(&place, &["bans", "list", "--json"]).unwrap(), "[]\n");
    let ban = threshold(&place, &["bans", "add", "user", "it's \"x\"", "--reason", "don't", "--json"]).unwrap();
    let ban: serde_json::Value = serde_json::from_str(&ban).unwrap();
    assert_eq!((&ban["key"], &ban["reason"]), (&json!("it's \"x\""), &json!("don't")));
    let listed = threshold(&place, &["bans", "list"]).unwrap();
    assert!(listed.contains("it's \"x\"") && listed.contains("don't"), "{listed}");
    let columns: Vec<Option<usize>> =
        listed.lines().zip(["REASON", "don't"]).map(|(line, word)| line.find(word)).collect();
    assert_eq!(columns[0], columns[1], "{listed}");
    let subject = threshold(&place, &["subject", "user", "it's \"x\""]).unwrap();
    assert!(subject.contains(": don't (by operator #") && subject.contains(", for good)"), "{subject}");
    for (token, said) in [(None, "requires a token"), (Some("wrong"), "does not accept this token")] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_threshold"));
        command
            .args(["bans", "list", "--server", &place])
            .env_clear()
            .envs(token.map(|token| ("THRESHOLD_ADMIN_TOKEN", token)));
        let output = command.output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), error.contains(said)), (Some(2), true), "{error}");
        assert!(error.contains("THRESHOLD_ADMIN_TOKEN") && !error.contains("wrong"), "{error}");
    }
    let refused = threshold(&place, &["bans", "add", "edge", "10.0.0.0/33", "--reason", "r"]).unwrap_err();
    assert!(refused.contains("\"10.0.0.0/33\" is not an address or a CIDR"), "{refused}");
    drop(server);
    let gone = threshold(&place, &["bans", "add", "user", "u", "--reason", "r"]).unwrap_err();
    assert!(gone.contains(&format!("no server answers at {place}")), "{gone}");
    let nowhere = folder.path().join("nothing.db");
    let gone = threshold(&place, &["bans", "list", "--db", nowhere.to_str().unwrap()]).unwrap_err();
    assert!(gone.contains("no server answers"), "{gone}");
}

/// A server with TLS once locked its operators out: the commands spoke plain HTTP, and a tunnel was the only way in.
#[test]
fn the_commands_call_a_server_over_tls() {
    let CertifiedKey { cert, signing_key } = generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let other = generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap().cert;
    let (ca, other) = (Scratch::file("cert.pem", &cert.pem()), Scratch::file("other.pem", &other.pem()));
    let key = Scratch::file("key.pem", &signing_key.serialize_pem());
    let [ca, other, key] = [&ca, &other, &key].map(|file| file.path().to_str().unwrap());
    let variables = &[("THRESHOLD_ADMIN_TOKEN", "boss-token-012345")];
    let server = Start { args: &["--tls-cert", ca, "--tls-key", key], variables, ..Start::default() }.server();
    let place = server.place.as_str();
    assert!(place.starts_with("https://"), "{place}");
    let added = threshold(place, &["bans", "add", "user", "mallory", "--reason", "fraud", "--ca", ca]).unwrap();
    assert!(added.contains("mallory"), "{added}");
    assert!(threshold(place, &["bans", "--ca", ca, "list"]).unwrap().contains("mallory"));
    // A journal is no substitute for a server that runs and is not trusted.
    let refused = threshold(place, &["bans", "list", "--ca", other]).unwrap_err();
    assert!(refused.contains(&format!("the certificate of {place} is not accepted (--ca FILE")), "{refused}");
    let refused = threshold(place, &["bans", "list"]).unwrap_err();
    assert!(refused.contains("--ca FILE"), "{refused}");
    let plain = place.replace("https://", "http://");
    assert!(threshold(&plain, &["bans", "list", "--ca", ca]).unwrap_err().contains("--ca is for https://"));
    assert!(threshold(&plain, &["bans", "list"]).is_err());
    for (file, said) in [(key, "has no certificate"), ("/no/such/ca.pem", "/no/such/ca.pem")] {
        let refused = threshold(place, &["bans", "list", "--ca", file]).unwrap_err();
        assert!(refused.contains(said), "{refused}");
    }
}

/// The token is not sent to another server, whatever the answer says.
#[test]
fn the_commands_follow_no_redirect() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let place = format!("http://{}", listener.local_addr().unwrap());
    let calls = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut head = BufReader::new(stream.try_clone().unwrap()).lines().map(Result::unwrap);
        let token = head.by_ref().take_while(|line| !line.is_empty()).any(|line| line.contains("boss-token"));
        let answer =
            "HTTP/1.1 307 Elsewhere\r\nlocation: /elsewhere\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}";
        stream.write_all(answer.as_bytes()).unwrap();
        drop(stream);
        listener.set_nonblocking(true).unwrap();
        (token, listener)
    });
    let refused = threshold(&place, &["bans", "list"]).unwrap_err();
    assert!(refused.contains("307"), "{refused}");
    let (token, listener) = calls.join().unwrap();
    assert!(token && listener.accept().is_err());
}

/// `--server unix:PATH` reaches a server that listens on a Unix socket alone.
#[test]
fn the_commands_call_a_server_on_a_unix_socket() {
    let folder = Scratch::folder();
    let place = format!("unix:{}", folder.path().join("threshold.sock").display());
    let server = Start { args: &["--http", &place], ..Start::default() }.server();
    for number in 0..3 {
        let user = format!("mallory{number}");
        let added =
            threshold("http://127.0.0.1:9", &["bans", "add", "user", &user, "--reason", "r", "--server", &place]);
        assert!(added.unwrap().contains(&user));
    }
    assert_eq!(threshold(&place, &["bans", "list"]).unwrap().lines().count(), 4);
    drop(server);
    let gone = threshold(&place, &["bans", "add", "user", "u", "--reason", "r"]).unwrap_err();
    assert!(gone.contains(&format!("no server answers at {place}")), "{gone}");
}

/// `tail` once ended, without a word, when the server was restarted.
///
/// Woken by ending with the stream, by a stream that begins after the newest event, and by going on after a token is refused.
#[test]
fn tail_goes_on_after_a_restart_and_misses_nothing() {
    let folder = Scratch::folder();
    let place = format!("unix:{}", folder.path().join("threshold.sock").display());
    let db = folder.path().join("threshold.db");
    let policy = folder.path().join("policy.toml");
    let rule =
        "[identity]\nlog_identifiers = true\n[[rule]]\nname = 'r'\nlayer = 'user'\nper = ['user']\nlimit = '1/h'\n";
    std::fs::write(&policy, rule).unwrap();
    let start = |token| {
        let args = ["--http", &place, "--db", db.to_str().unwrap()];
        Start { policy: Some(&policy), args: &args, variables: &[("THRESHOLD_ADMIN_TOKEN", token)], ..Start::default() }
            .server()
    };
    let deny = |user: &str| {
        let stream = std::os::unix::net::UnixStream::connect(place.trim_start_matches("unix:")).unwrap();
        let mut client = Client::new(stream);
        for _ in 0..2 {
            assert_eq!(client.post("/v1/check", &json!({ "user": user }).to_string()).unwrap().status, 200);
        }
    };
    let deny = &deny;
    let server = start("boss-token-012345");
    let mut tail = Command::new(env!("CARGO_BIN_EXE_threshold"))
        .args(["tail", "--server", &place])
        .env_clear()
        .env("THRESHOLD_ADMIN_TOKEN", "boss-token-012345")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(tail.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut errors = BufReader::new(tail.stderr.take().unwrap()).lines().map(Result::unwrap);
    let mut errors = |text: &str| assert!(errors.any(|line| line.contains(text)), "{text}");
    // Until the first line: the stream may begin after the first events.
    let mut printed = String::new();
    std::thread::scope(|scope| {
        let (sender, stopped) = std::sync::mpsc::channel::<()>();
        scope.spawn(move || {
            let mut number = 0;
            while stopped.recv_timeout(Duration::from_millis(50)) == Err(RecvTimeoutError::Timeout) {
                deny(&format!("early{number}"));
                number += 1;
            }
        });
        printed = lines.next().unwrap();
        drop(sender);
    });
    assert!(printed.contains("user early"), "{printed}");
    server.signal("KILL");
    drop(server);
    errors("has ended the stream; connecting again");
    errors("no server answers at");
    let server = start("boss-token-012345");
    deny("late");
    errors("streams again");
    assert!(lines.any(|line| line.contains("user late")));
    drop(server);
    errors("has ended the stream");
    let _other = start("another-token-0123");
    errors("does not accept this token");
    assert_eq!(tail.wait().unwrap().code(), Some(2));
}
