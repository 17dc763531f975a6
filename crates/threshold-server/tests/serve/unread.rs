//! Attacks on the memory and the places of a server: answers that nobody reads, bodies that never end, connections that say nothing.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::pin::Pin;
use std::process::Command;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body::Frame;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::client::Client;
use super::envoy::grpc_address;
use super::grpc_client::RATE_LIMIT;
use super::http2::{END_HEADERS, END_STREAM, Frames, HEADERS, check_health, fields, narrow_stream_from, stream_from};
use super::process::{PATIENCE, POLICY, Scratch, Server, Start};

const OPERATOR: &str = "boss-token-012345";
const READER: &str = "read-token-012345";
const CALLER: &str = "caller-token-0123";
const TOKENS: [(&str, &str); 3] =
    [("THRESHOLD_ADMIN_TOKEN", OPERATOR), ("THRESHOLD_READ_TOKEN", READER), ("THRESHOLD_TOKEN", CALLER)];
/// How much more memory than at rest a server may take under an attack, in kB.
const MOST: u64 = 100_000;

/// The memory of a server before an attack.
struct AtRest<'s> {
    server: &'s Server,
    kilobytes: u64,
}

impl<'s> AtRest<'s> {
    /// Begins to measure.
    fn of(server: &'s Server) -> Self {
        // The peak counts from now on.
        std::fs::write(format!("/proc/{}/clear_refs", server.pid()), "5").unwrap();
        Self { server, kilobytes: status(server, "VmRSS:") }
    }

    /// Checks how much more memory the server has had since at any time.
    fn check(&self, attack: &str) {
        let more = status(self.server, "VmHWM:").saturating_sub(self.kilobytes);
        println!("{attack}: {more} kB above {} kB", self.kilobytes);
        assert!(more < MOST, "{attack}: {more} kB more than at rest");
    }
}

fn status(server: &Server, name: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

fn get(client: &mut Client<TcpStream>, token: &str, path: &str) -> u16 {
    client.send("GET", path, &[("authorization", &format!("Bearer {token}"))], "").unwrap().status
}

/// Reports so many thousand long events.
fn report_events(server: &Server, thousands: u32) {
    for part in 0..thousands {
        let batch: Vec<Value> = (0..1_000)
            .map(|n| {
                let id = format!("00000000-0000-4000-8000-{:012x}", part * 1_000 + n);
                json!({"id": id, "at": 1_767_225_600_000_u64, "blocked": true, "rule": "r".repeat(200),
                       "endpoint": "e".repeat(200), "userId": format!("{n}{}", "u".repeat(200))})
            })
            .collect();
        let fields = [("authorization", "Bearer caller-token-0123"), ("content-type", "application/json")];
        let answer = server.connect().send("POST", "/v1/events", &fields, &json!(batch).to_string()).unwrap();
        assert_eq!(answer.status, 200, "{}", answer.body);
    }
}

/// Starts a server with lists that are long: 2,000 bans and 4,000 lines of the audit with long reasons, 2,000 events.
fn server_with_long_lists(folder: &Path) -> Server {
    let db = folder.join("threshold.db");
    let args = ["--db", db.to_str().unwrap(), "--client-timeout", "5min"];
    let server = Start { args: &args, variables: &TOKENS, ..Start::default() }.server();
    let reason = "r".repeat(500);
    let bans: Vec<Value> = (0..2_000).map(|n| json!({"key": format!("11.{}.{}.0/24", n / 250, n % 250)})).collect();
    let set = json!({"reason": reason, "bans": bans}).to_string();
    let operator = [("authorization", "Bearer boss-token-012345"), ("content-type", "application/json")];
    let answer = server.connect().send("PUT", "/v1/bans/sets/long", &operator, &set).unwrap();
    assert_eq!(answer.status, 200, "{}", answer.body);
    report_events(&server, 2);
    server.signal("TERM");
    assert!(server.wait().0.success());
    let mut journal = rusqlite::Connection::open(&db).unwrap();
    let lines = journal.transaction().unwrap();
    for _ in 0..4_000 {
        let insert =
            "INSERT INTO audit (at, who, action, about, why) VALUES (1, 'operator', 'ban: permanent', 'user u', ?1)";
        lines.execute(insert, [&reason]).unwrap();
    }
    lines.commit().unwrap();
    drop(journal);
    Start { args: &args, variables: &TOKENS, ..Start::default() }.server()
}

/// Only as many bans and lines as fit are in one answer, which the commands took for the last page.
///
/// Woken by the end at a page that is not full.
fn check_commands(server: &Server) {
    for (args, expected) in [(&["bans", "list", "--json"][..], 2_000), (&["audit", "--json", "--limit", "4000"], 4_000)]
    {
        let mut command = Command::new(env!("CARGO_BIN_EXE_threshold"));
        command.args(args).env_clear().envs([("THRESHOLD_ADMIN_TOKEN", OPERATOR), ("THRESHOLD_SERVER", &server.place)]);
        let listed: Value = serde_json::from_slice(&command.output().unwrap().stdout).unwrap();
        let ids: BTreeSet<String> = listed.as_array().unwrap().iter().map(|item| item["id"].to_string()).collect();
        assert_eq!((listed.as_array().unwrap().len(), ids.len()), (expected, expected), "{args:?}");
    }
}

/// Opens 250 requests on one connection of HTTP/2 whose window is closed, and waits until each is answered, by its head at least.
/// Returns how many were answered with 200.
fn leave_unread(server: &Server, path: &str) -> (Frames, usize) {
    let mut frames = Frames::connect(server, &[(4, 0)]);
    let authorization = format!("Bearer {READER}");
    let head = fields(&[
        (":method", "GET"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "localhost"),
        ("authorization", &authorization),
    ]);
    for n in 0..250 {
        frames.send(HEADERS, END_HEADERS | END_STREAM, 2 * n + 1, &head).unwrap();
    }
    let heads = std::iter::from_fn(|| frames.read()).filter(|frame| frame.kind == HEADERS).take(250);
    // 200 is an entry of HPACK's table.
    let answered = heads.filter(|frame| frame.payload.first() == Some(&0x88)).count();
    (frames, answered)
}

/// 250 unread lists took 1.4 GB with a read-only token, and with long reasons 4.5 GB: each was written before it waited for memory. They
/// also kept operators from theirs.
///
/// Woken by `acquire` after a list is read, and by one memory for readers and operators.
#[test]
fn unread_lists_take_no_more_memory_than_their_bound_and_none_from_operators() {
    let folder = Scratch::folder();
    let server = server_with_long_lists(folder.path());
    check_commands(&server);
    for path in ["/v1/bans?limit=10000", "/v1/events?limit=1000", "/v1/audit?limit=10000", "/v1/stats", "/v1/policy"] {
        let at_rest = AtRest::of(&server);
        let (unread, answered) = leave_unread(&server, path);
        assert!(answered > 0, "{path}");
        at_rest.check(path);
        assert_eq!(get(&mut server.connect(), OPERATOR, path), 200, "{path}");
        drop(unread);
    }
}

/// 1,500 connections that read little of their events took 640 MB, and the server kept them after their end: in the heap, the room of an
/// answer that was gone was hardly used again.
///
/// Woken by a vector in `AnswerPage`.
#[test]
fn unread_connections_take_no_more_memory_than_their_bound() {
    let folder = Scratch::folder();
    let db = folder.path().join("threshold.db");
    let args = ["--db", db.to_str().unwrap(), "--client-timeout", "5min", "--max-connections", "4096"];
    let server = Start { args: &args, variables: &TOKENS, ..Start::default() }.server();
    report_events(&server, 4);
    let address: SocketAddr = server.place.strip_prefix("http://").unwrap().parse().unwrap();
    let at_rest = AtRest::of(&server);
    let mut unread: Vec<TcpStream> = (0..1_500)
        .map(|n| {
            let mut stream = narrow_stream_from(u8::try_from(1 + n % 40).unwrap(), address);
            let head = format!("authorization: Bearer {READER}\r\nhost: localhost");
            write!(stream, "GET /v1/events?limit=1000 HTTP/1.1\r\n{head}\r\n\r\n").unwrap();
            stream
        })
        .collect();
    for stream in &mut unread {
        let mut status = [0; 12];
        stream.read_exact(&mut status).unwrap();
        assert!([b"HTTP/1.1 200", b"HTTP/1.1 503"].contains(&&status));
    }
    at_rest.check("unread connections");
}

/// 80 connections without a token, which sent nothing, took all places of the listener for operators.
///
/// Woken by leaving out `close_one`, and by closing one that has shown its token.
#[test]
fn silent_connections_keep_no_operator_out() {
    let args = ["--admin", "127.0.0.1:0", "--log", "json", "--client-timeout", "10min"];
    let server = Start { args: &args, variables: &TOKENS, ..Start::default() }.server();
    let line: Value = serde_json::from_str(&server.wait_for_log("listening")).unwrap();
    let address: SocketAddr = line["admin"].as_str().unwrap().strip_prefix("http://").unwrap().parse().unwrap();
    let connect = || {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    };
    let mut before = Client::new(connect());
    assert_eq!(get(&mut before, OPERATOR, "/v1/bans"), 200);
    // A wrong token, and one for callers, are none.
    let mut others: Vec<_> = (0..2).map(|_| Client::new(connect())).collect();
    for (client, token) in others.iter_mut().zip(["a-wrong-token-0123", CALLER]) {
        assert_eq!(get(client, token, "/v1/bans"), 401);
    }
    let silent: Vec<TcpStream> = (0..80).map(|_| connect()).collect();
    let mut after = Client::new(connect());
    assert_eq!(get(&mut after, OPERATOR, "/v1/bans"), 200);
    assert_eq!(get(&mut before, OPERATOR, "/v1/bans"), 200, "a connection that has shown its token stays");
    for mut client in others {
        assert!(client.send("GET", "/healthz", &[], "").is_err(), "the first to go");
    }
    assert!(server.wait_for_log("connection closed").contains("no token"));
    drop(silent);
}

/// Ten addresses with 1,084 silent connections kept a trusted proxy from gRPC for 24 seconds, in which Envoy lets requests through.
///
/// Woken by leaving out `close_one`, and by counting a trusted proxy among those that have shown nothing.
#[test]
fn silent_connections_keep_no_trusted_proxy_from_grpc() {
    let policy = format!("[identity]\ntrusted_proxies = [\"127.0.0.99\"]\nclient_ip = \"x-forwarded-for\"\n{POLICY}");
    let file = Scratch::file("policy.toml", &policy);
    let args = ["--grpc", "127.0.0.1:0", "--client-timeout", "10min"];
    let server = Start { args: &args, variables: &TOKENS, policy: Some(file.path()), ..Start::default() }.server();
    let address = grpc_address(&server);
    // It is silent too, for now.
    let mut early = Frames::over(stream_from(99, address), &[]);
    let silent: Vec<TcpStream> = (0..1_084).map(|n| stream_from(u8::try_from(1 + n % 10).unwrap(), address)).collect();
    let mut proxy = Frames::over(stream_from(99, address), &[]);
    for connection in [&mut proxy, &mut early] {
        assert_eq!(check_health(connection, 1).unwrap().first(), Some(&0x88));
    }
    // Another address has its place: those with the most silent connections lose them.
    let mut other = Frames::over(stream_from(20, address), &[]);
    let more: Vec<TcpStream> = (0..300).map(|n| stream_from(u8::try_from(1 + n % 10).unwrap(), address)).collect();
    assert_eq!(check_health(&mut other, 1).unwrap().first(), Some(&0x88));
    drop((silent, more));
}

/// 545 bodies of a megabyte, each without its last byte, took 545 MB. Small ones are read meanwhile.
///
/// Woken by leaving out `room` in `read_any`.
#[test]
fn bodies_in_progress_take_no_more_memory_than_their_bound_and_small_ones_are_read() {
    let args = ["--client-timeout", "15s", "--max-connections", "4096"];
    let server = Start { args: &args, ..Start::default() }.server();
    let address: SocketAddr = server.place.strip_prefix("http://").unwrap().parse().unwrap();
    let at_rest = AtRest::of(&server);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let attack = move || async move {
        let (read, mut write) = tokio::net::TcpStream::connect(address).await.unwrap().into_split();
        let body = async move {
            let head = "POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1048576\r\n\r\n";
            // It is closed when it is refused.
            let _ = write.write_all(head.as_bytes()).await;
            let _ = write.write_all(&vec![b' '; 1_048_575]).await;
            write
        };
        let status = async move {
            let (mut read, mut status) = (read, [0; 12]);
            read.read_exact(&mut status).await.map(|_| status)
        };
        tokio::join!(body, status).1
    };
    let attacks: Vec<_> = (0..545).map(|_| runtime.spawn(attack())).collect();
    let mut refused = 0;
    for attack in attacks {
        // The first ones are refused by their time, while others wait for room.
        if refused < 10 {
            assert_eq!(server.connect().post("/v1/check", r#"{"ip": "203.0.113.7"}"#).unwrap().status, 200);
        }
        let status = runtime.block_on(attack).unwrap();
        let status = status.map(|status| String::from_utf8(status.to_vec()).unwrap());
        refused += usize::from(status.is_err() || status.is_ok_and(|status| status.ends_with("503")));
    }
    at_rest.check("bodies");
    assert!(refused > 0);
    runtime.shutdown_timeout(Duration::ZERO);
}

/// A body whose end never comes.
struct Endless(Option<Bytes>);

impl http_body::Body for Endless {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.0.take() {
            Some(data) => Poll::Ready(Some(Ok(Frame::data(data)))),
            None => Poll::Pending,
        }
    }
}

/// Sends requests over one connection, and returns the headers of all answers.
async fn half_sent(stream: TcpStream, count: usize, request: impl Fn() -> Request<Endless>) -> Vec<http::HeaderMap> {
    stream.set_nonblocking(true).unwrap();
    let stream = TokioIo::new(tokio::net::TcpStream::from_std(stream).unwrap());
    let (mut sender, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    drop(tokio::spawn(connection));
    let asked: Vec<_> = (0..count).map(|_| sender.send_request(request())).collect();
    let mut answers = Vec::new();
    for answer in asked {
        answers.extend(answer.await.map(|answer| answer.into_parts().0.headers));
    }
    answers
}

/// Small bodies were read without a bound on their sum: 12,288 of them, over 48 connections that show no token, took a quarter of a
/// gigabyte.
///
/// Woken by reading bodies of anyone without their memory.
#[test]
fn small_bodies_of_anyone_take_no_more_memory_than_their_bound() {
    let args = ["--client-timeout", "15s"];
    let server = Start { args: &args, variables: &TOKENS, ..Start::default() }.server();
    let address: SocketAddr = server.place.strip_prefix("http://").unwrap().parse().unwrap();
    let at_rest = AtRest::of(&server);
    let body = Bytes::from(vec![b' '; 15 << 10]);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let attacks: Vec<_> = (0..48)
        .map(|n| {
            let (stream, body) = (stream_from(1 + n % 4, address), body.clone());
            runtime.spawn(half_sent(stream, 256, move || {
                let request = Request::post("http://localhost/v1/session").header("content-type", "application/json");
                request.body(Endless(Some(body.clone()))).unwrap()
            }))
        })
        .collect();
    let answers: usize = attacks.into_iter().map(|attack| runtime.block_on(attack).unwrap().len()).sum();
    at_rest.check("small bodies");
    assert!(answers > 0);
    // Callers are served all the same.
    let token = format!("Bearer {CALLER}");
    let asked = server.connect().send("POST", "/v1/check", &[("authorization", &token)], r#"{"ip": "203.0.113.7"}"#);
    assert_eq!(asked.unwrap().status, 200);
    runtime.shutdown_timeout(Duration::ZERO);
}

/// 128 messages of 4 MiB, each without its last byte, took as much memory.
///
/// Woken by leaving out `try_acquire` in `read`.
#[test]
fn messages_in_progress_take_no_more_memory_than_their_bound() {
    const LENGTH: u32 = 4 << 20;
    let args = ["--grpc", "127.0.0.1:0", "--client-timeout", "15s"];
    let server = Start { args: &args, ..Start::default() }.server();
    let address = grpc_address(&server);
    let at_rest = AtRest::of(&server);
    let message = Bytes::from([&[0][..], &LENGTH.to_be_bytes(), &vec![b' '; LENGTH as usize - 1]].concat());
    let request = || {
        let request = Request::post(format!("http://localhost{RATE_LIMIT}")).header("content-type", "application/grpc");
        request.body(Endless(Some(message.clone()))).unwrap()
    };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let answers = runtime.block_on(half_sent(TcpStream::connect(address).unwrap(), 128, request));
    // A denial has its status behind its message. The other calls are ended by their time.
    let refused = answers.iter().filter(|answer| !answer.contains_key("grpc-status")).count();
    at_rest.check("messages");
    assert!(refused > 0);
}
