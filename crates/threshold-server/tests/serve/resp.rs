//! Tests the RESP listener: its address, its bounds, its tokens and its end, with Redis's own programs as clients.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

use serde_json::json;

use super::process::{PATIENCE, POLICY, Scratch, Server, Start};

const ANYWHERE: [&str; 2] = ["--resp", "127.0.0.1:0"];
const CALL: &[u8] = b"CL.THROTTLE k 1 1 3600\r\n";
const TOKEN: &str = "a-caller-token-1";

fn address(server: &Server) -> &str {
    server.resp.as_deref().unwrap().strip_prefix("redis://").unwrap()
}

fn connect(server: &Server) -> TcpStream {
    let stream = TcpStream::connect(address(server)).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Sends bytes, and returns as many bytes as are expected.
fn exchange(stream: &mut (impl std::io::Read + std::io::Write), sent: &[u8], expected: &str) {
    stream.write_all(sent).unwrap();
    let mut reply = vec![0; expected.len()];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(String::from_utf8_lossy(&reply), expected);
}

fn redis_cli(server: &Server, args: &[&str]) -> String {
    let (host, port) = address(server).rsplit_once(':').unwrap();
    let output = Command::new("redis-cli").args(["-h", host, "-p", port]).args(args).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn redis_clients_and_http_share_the_buckets_of_their_keys() {
    let server = Start { args: &ANYWHERE, ..Start::default() }.server();
    exchange(&mut connect(&server), CALL, "*5\r\n:0\r\n:2\r\n:1\r\n:-1\r\n:3600\r\n");
    let body = json!({"key": "k", "limit": 2, "windowSec": 3600, "algorithm": "token-bucket"}).to_string();
    let answer = server.connect().post("/v1/limit", &body).unwrap().json();
    assert_eq!((&answer["allowed"], &answer["remaining"]), (&json!(true), &json!(0)));
    let metrics = server.connect().send("GET", "/metrics", &[], "").unwrap();
    let metrics = metrics.body;
    assert!(metrics.contains("threshold_operations_total{operation=\"limit\",result=\"done\"} 2"), "{metrics}");
}

/// A default that nobody has asked for keeps no second server of a machine from starting; an address that was asked for does.
///
/// Woken by: `?` on the default listener in `listen_resp`, or a warning for any listener.
#[test]
fn only_an_address_that_was_asked_for_must_be_free() {
    // If it is in use by something else, so much the better.
    let _taken = TcpListener::bind("127.0.0.1:6380");
    let mut child = Command::new(env!("CARGO_BIN_EXE_threshold"))
        .args(["serve", "--no-db", "--no-grpc", "--http", "127.0.0.1:0"])
        .env_clear()
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut banner = String::new();
    let mut out = child.stdout.take().unwrap();
    while !banner.contains("tokens ") {
        let mut byte = [0];
        assert_eq!(out.read(&mut byte).unwrap(), 1, "{banner}");
        banner.push(char::from(byte[0]));
    }
    child.kill().unwrap();
    let mut log = String::new();
    child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    child.wait().unwrap();
    assert!(log.contains("no RESP listener (--resp ADDR") && log.contains("127.0.0.1:6380"), "{log}");
    assert!(!banner.contains("resp "), "{banner}");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let refused = Start { args: &["--resp", &address], ..Start::default() }.command().output().unwrap();
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(2) && error.contains(&address), "{error}");
}

#[test]
fn an_address_that_other_machines_reach_needs_a_token() {
    for args in [&["--resp", "0.0.0.0:0"][..], &["--resp", "0.0.0.0:0", "--check"]] {
        let refused = Start { args, ..Start::default() }.command().output().unwrap();
        let said = [refused.stdout, refused.stderr].concat();
        let said = String::from_utf8_lossy(&said).into_owned();
        assert!(refused.status.code() == Some(2) && said.contains("THRESHOLD_TOKEN"), "{said}");
    }
    let variables = [("THRESHOLD_TOKEN", TOKEN)];
    let server = Start { args: &["--resp", "0.0.0.0:0"], variables: &variables, ..Start::default() }.server();
    let port = address(&server).rsplit_once(':').unwrap().1.to_owned();
    let mut stream = TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
    exchange(&mut stream, b"PING\r\n", "-NOAUTH Authentication required.\r\n");
    exchange(&mut stream, format!("AUTH {TOKEN}\r\nPING\r\n").as_bytes(), "+OK\r\n+PONG\r\n");
}

#[test]
fn a_unix_socket_serves_redis_clients_too() {
    let folder = Scratch::folder();
    let path = folder.path().join("resp.sock");
    let address = format!("unix:{}", path.display());
    let server = Start { args: &["--resp", &address], ..Start::default() }.server();
    assert_eq!(server.resp.as_deref(), Some(&*address));
    let mut stream = UnixStream::connect(&path).unwrap();
    exchange(&mut stream, CALL, "*5\r\n:0\r\n:2\r\n:1\r\n:-1\r\n:3600\r\n");
    let said = Command::new("redis-cli").arg("-s").arg(&path).arg("PING").output().unwrap();
    assert_eq!(String::from_utf8_lossy(&said.stdout), "PONG\n");
}

/// Woken by: leaving out the peer's slot, or the permit, of RESP connections.
#[test]
fn connections_are_bounded_by_number_and_by_peer() {
    let args = [&ANYWHERE[..], &["--max-connections", "8", "--max-connections-per-peer", "2"]].concat();
    // One that trusts no proxy: the starter policy trusts this machine.
    let file = Scratch::file("policy.toml", POLICY);
    let server = Start { args: &args, policy: Some(file.path()), ..Start::default() }.server();
    let mut held = [connect(&server), connect(&server)];
    for stream in &mut held {
        exchange(stream, b"PING\r\n", "+PONG\r\n");
    }
    let mut third = connect(&server);
    // The server closes it, perhaps before the write.
    let _ = third.write_all(b"PING\r\n");
    assert!(matches!(third.read(&mut [0; 8]), Ok(0) | Err(_)));
    drop(held);
    let mut replies = (0..300).map(|_| {
        let mut stream = connect(&server);
        let _ = stream.write_all(b"PING\r\n");
        stream.read(&mut [0; 8]).unwrap_or(0)
    });
    assert!(replies.any(|read| read > 0), "the places of closed connections were not free again");
}

/// A protocol error is answered, although the client goes on sending.
///
/// Woken by: leaving out `refuse` after `Ended::Refused`.
#[test]
fn the_reason_reaches_a_client_that_is_still_sending() {
    let server = Start { args: &ANYWHERE, ..Start::default() }.server();
    let mut stream = connect(&server);
    // More than the buffers of both ends hold, and less than is discarded.
    stream.write_all(format!("*1\r\n:\r\n{}", "x".repeat(3 << 20)).as_bytes()).unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    assert_eq!(reply, "-ERR Protocol error: expected '$', got ':'\r\n");
}

#[test]
fn a_server_that_stops_closes_idle_clients_and_exits() {
    let server = Start { args: &ANYWHERE, ..Start::default() }.server();
    let mut idle = connect(&server);
    exchange(&mut idle, b"PING\r\n", "+PONG\r\n");
    server.signal("TERM");
    assert_eq!(idle.read(&mut [0; 8]).unwrap(), 0);
    let (status, log) = server.wait();
    assert!(status.success() && log.contains("stopped"), "{log}");
}

#[test]
fn redis_cli_calls_it() {
    let variables = [("THRESHOLD_TOKEN", TOKEN)];
    let server = Start { args: &ANYWHERE, variables: &variables, ..Start::default() }.server();
    assert!(redis_cli(&server, &["PING"]).starts_with("NOAUTH"));
    let call = ["CL.THROTTLE", "user123", "15", "30", "60"];
    for protocol in ["-2", "-3"] {
        let args = [&["--no-auth-warning", "-a", TOKEN, protocol][..], &call].concat();
        let said = redis_cli(&server, &args);
        assert!(said.starts_with("0\n16\n1"), "{said}");
    }
    let said = redis_cli(&server, &["--no-auth-warning", "-a", TOKEN, "COMMAND", "DOCS"]);
    assert!(said.contains("cl.throttle") && said.contains("module"), "{said}");
}

#[test]
fn redis_benchmark_calls_it_in_pipelines() {
    let server = Start { args: &ANYWHERE, ..Start::default() }.server();
    let (host, port) = address(&server).rsplit_once(':').unwrap();
    for pipeline in ["1", "16", "500"] {
        let args = ["-h", host, "-p", port, "-n", "5000", "-c", "8", "-r", "1000", "--csv", "-P", pipeline];
        let call = ["CL.THROTTLE", "key:__rand_int__", "99999", "99999", "3600"];
        let output = Command::new("redis-benchmark").args(args).args(call).output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && said.contains("CL.THROTTLE"), "{said}");
    }
    let metrics = server.connect().send("GET", "/metrics", &[], "").unwrap();
    let metrics = metrics.body;
    let counted = metrics.lines().find(|line| line.contains("operation=\"limit\",result=\"done\""));
    let calls: u64 = counted.unwrap().rsplit_once(' ').unwrap().1.parse().unwrap();
    // redis-benchmark sends whole pipelines, and so a few more than it is asked for.
    assert!((15_000..17_000).contains(&calls), "{calls}");
}
