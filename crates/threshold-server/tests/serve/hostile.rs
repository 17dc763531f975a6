//! Runs every command of operators against a hostile server, whose texts end lines and control terminals.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Map, Value, json};
use threshold_core::text::is_hidden;

use super::process::{PATIENCE, Scratch};

/// Ends a line in each way that there is, begins one that looks like the program's, and clears a screen.
const HOSTILE: &str = "x\nFAKE: all is well\r\nFAKE\u{2028}FAKE\u{85}FAKE\u{1b}[2J\u{9b}31m\u{202e}\u{200b}\0\t";

/// Returns an object that has all of these fields, hostile ones.
fn hostile(names: &[&str]) -> Map<String, Value> {
    names.iter().map(|name| ((*name).to_owned(), HOSTILE.into())).collect()
}

/// Returns an object with these fields beside the hostile ones.
fn with(names: &[&str], fields: Value) -> Value {
    let mut object = hostile(names);
    let Value::Object(fields) = fields else { panic!("{fields}") };
    object.extend(fields);
    Value::Object(object)
}

/// Subjects of three kinds: denied by a list and a ladder, with full budgets, and an account.
fn subject(kind: usize) -> Value {
    let ban = with(&["id", "layer", "key", "reason", "by", "from", "until"], json!({}));
    let ladder = |penalty: Value| {
        with(&["ladder", "until", "reason", "id", "strikes", "forgottenAt", "next"], json!({"penalty": penalty}))
    };
    let budget = |used: Value, limit: Value| {
        with(&["rule", "category", "notation", "freeAt", "mode"], json!({"used": used, "limit": limit}))
    };
    let lists = json!({
        "listed": {"list": "deny", "key": HOSTILE}, "bans": [ban], "shadowBanned": true,
        "ladders": [ladder("ban".into()), ladder("cool-down".into()), ladder(HOSTILE.into())],
        "budgets": [budget(5.into(), 5.into()), budget(0.into(), 0.into()), budget(HOSTILE.into(), HOSTILE.into())],
        "atCeiling": kind == 1,
    });
    let names = ["layer", "key", "digest", "pausedUntil", "failures", "lockedUntil"];
    with(&names, lists)
}

fn event() -> Value {
    let limit = with(&["rule", "layer", "mode", "remaining", "cost", "resetAt", "limit", "retryAfter"], json!({}));
    let names = [
        "at",
        "traceId",
        "endpoint",
        "userId",
        "tenant",
        "ip",
        "rule",
        "layer",
        "verdict",
        "cause",
        "until",
        "degraded",
        "subject",
        "shadowUntil",
        "bannedUntil",
        "id",
    ];
    with(&names, json!({"blocked": true, "strikes": 3, "count": 7, "limits": [limit]}))
}

/// Returns what the server answers to a call of this path.
fn answer(path: &str, calls: usize) -> Value {
    match path.split('?').next().unwrap_or_default() {
        path if path.starts_with("/v1/subjects/") => subject(calls),
        "/v1/bans" | "/v1/audit" | "/v1/locks" => {
            let names = ["id", "layer", "key", "reason", "by", "until", "at", "who", "about", "action", "why"];
            json!([with(&names, json!({"digest": HOSTILE, "failures": HOSTILE, "lockedUntil": HOSTILE}))])
        }
        "/v1/events" => json!({"events": [event(), with(&[], json!({"verdict": "slow", "userId": HOSTILE}))]}),
        "/v1/alerts" => {
            let names =
                ["alert", "level", "key", "count", "peak", "since", "cause", "rule", "runbook", "addresses", "largest"];
            json!([with(&names, json!({})), with(&names, json!({"addresses": [HOSTILE]}))])
        }
        "/v1/alerts/test" => json!({"receivers": [hostile(&["name", "error"]), {"name": HOSTILE, "ok": true}]}),
        "/v1/doctor" => {
            let finding = with(&["level", "message", "advice"], json!({"check": "clock"}));
            let names = ["version", "secret", "policy"];
            with(&names, json!({"checks": ["clock", HOSTILE], "findings": [finding, hostile(&["check", "level"])]}))
        }
        _ => with(&["status", "reason", "bans", "added", "lifted", "leftOut", "id", "key", "layer"], json!({})),
    }
}

/// How a server answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Manner {
    Ok,
    /// With an error that has a message.
    Refuse,
    /// With text that is no JSON, in the reason of the status too.
    NoJson,
}

/// Answers one call, and closes the connection.
fn serve(mut stream: TcpStream, manner: Manner, calls: usize) -> std::io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut reader = BufReader::new(stream.try_clone()?);
    let (mut head, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 || line == "\r\n" {
            break;
        }
        let field = line.to_ascii_lowercase();
        length = field.strip_prefix("content-length: ").map_or(length, |length| length.trim().parse().unwrap());
        head.push_str(&line);
    }
    reader.take(length).read_to_end(&mut Vec::new())?;
    let path = head.split(' ').nth(1).unwrap_or_default();
    // A stream of events is followed by an error, which ends the command.
    let is_stream = head.contains("text/event-stream") && manner == Manner::Ok && calls == 0;
    let (status, kind, body) = match manner {
        _ if is_stream => {
            let lines = format!("id: 1\r\ndata: {}\n\ndata: {HOSTILE}\n\ndata: \u{1b}[2J {{\n\n", event());
            ("200 OK".to_owned(), "text/event-stream", lines)
        }
        Manner::Ok if !head.contains("text/event-stream") => {
            ("200 OK".to_owned(), "application/json", answer(path, calls).to_string())
        }
        Manner::NoJson => ("403 No\u{9b}31mFAKE".to_owned(), "text/plain", format!("{HOSTILE}{{")),
        _ => ("403 No".to_owned(), "application/json", with(&["message", "error", "status"], json!({})).to_string()),
    };
    write!(stream, "HTTP/1.1 {status}\r\ncontent-type: {kind}\r\nconnection: close\r\n")?;
    // The end of a stream is that of its connection.
    if !is_stream {
        write!(stream, "content-length: {}\r\n", body.len())?;
    }
    write!(stream, "\r\n{body}")
}

/// `subject` printed the reason of a ladder, the category of a budget and a digest as they came: a line feed in one of them began a
/// line that looked like the program's own, such as `Nothing stops it now.`; and so did `health` with the reason of a server.
///
/// Woken by each `as_str` in place of `shown` in `operate`, and by printing without `printable_lines`.
#[test]
fn no_text_of_a_hostile_server_ends_a_line_or_controls_the_terminal() {
    let list = Scratch::file("list.txt", "203.0.113.7\n");
    let list = list.path().to_str().unwrap();
    let trace = "00112233445566778899aabbccddeeff";
    let commands: [&[&str]; 22] = [
        &["subject", "user", "eve"],
        &["subject", "account", "eve", "--json"],
        &["subject", "user", "eve", "--forgive"],
        &["bans", "list"],
        &["bans", "list", "--json"],
        &["bans", "add", "user", "eve", "--reason", "r"],
        &["bans", "lift", "0123456789ab"],
        &["bans", "lift", "user", "eve"],
        &["bans", "import", list, "--origin", "list"],
        &["bans", "export", "--format", "plain"],
        &["bans", "export", "--format", "nftables"],
        &["locks", "list"],
        &["audit"],
        &["why", trace],
        &["why", trace, "--json"],
        &["tail"],
        &["tail", "--json"],
        &["alerts"],
        &["alerts", "test"],
        &["doctor"],
        &["health"],
        &["health", "--ready"],
    ];
    for manner in [Manner::Ok, Manner::Refuse, Manner::NoJson] {
        for args in commands {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let place = format!("http://{}", listener.local_addr().unwrap());
            // Ends with the test: it waits for calls that no longer come.
            std::thread::spawn(move || {
                let calls = AtomicUsize::new(0);
                for stream in listener.incoming().map_while(Result::ok) {
                    let _ = serve(stream, manner, calls.fetch_add(1, Ordering::Relaxed));
                }
            });
            let mut command = Command::new(env!("CARGO_BIN_EXE_threshold"));
            let output = command.args(args).env_clear().env("THRESHOLD_SERVER", &place).output().unwrap();
            for bytes in [output.stdout, output.stderr] {
                let text = String::from_utf8(bytes).expect("no command prints bytes that are no text");
                let is_bad = |c: char| is_hidden(c) && !matches!(c, '\n' | '\t');
                assert!(!text.contains(is_bad), "{manner:?} {args:?}: {text:?}");
                let begins = text.lines().any(|line| line.trim_start().starts_with("FAKE"));
                assert!(!begins, "{manner:?} {args:?}: {text}");
            }
        }
    }
}
