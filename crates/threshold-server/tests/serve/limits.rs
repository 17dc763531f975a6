//! Tests slow clients, large requests, many connections, and the shutdown of the server.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde_json::json;

use super::client::Client;
use super::process::{POLICY, Scratch, Server, Start};

const GOOD: &str = r#"{"ip": "203.0.113.7"}"#;

/// Reads until the server closes the connection, or the read times out.
fn read_to_close(mut stream: TcpStream) -> String {
    let mut text = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => text.extend_from_slice(&buffer[..read]),
            // The server closed with unread data.
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => break,
            Err(error) => panic!("the server keeps waiting: {error}"),
        }
    }
    String::from_utf8(text).unwrap()
}

fn server_with_short_timeout() -> Server {
    Start { args: &["--client-timeout", "300ms"], ..Start::default() }.server()
}

#[test]
fn a_connection_without_a_whole_head_is_closed() {
    let server = server_with_short_timeout();
    assert_eq!(read_to_close(server.stream()), "");
    let mut half = server.stream();
    half.write_all(b"POST /v1/check HTTP/1.1\r\nhost: localhost\r\n").unwrap();
    read_to_close(half);
    // Slowloris: bytes now and then do not extend the timeout, which is for the whole head.
    let mut slow = server.stream();
    slow.write_all(b"GET /healthz HTTP/1.1\r\n").unwrap();
    let mut dripping = slow.try_clone().unwrap();
    let drip = std::thread::spawn(move || {
        while dripping.write_all(b"x: y\r\n").is_ok() {
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    read_to_close(slow);
    drip.join().unwrap();
    // An idle connection is closed after its first request too.
    let mut idle = server.stream();
    idle.write_all(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
    assert!(read_to_close(idle).starts_with("HTTP/1.1 200"));
}

#[test]
fn a_client_that_sends_half_a_body_gets_408() {
    let server = server_with_short_timeout();
    let mut half = server.stream();
    let head =
        "POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{";
    half.write_all(head.as_bytes()).unwrap();
    let answer = read_to_close(half);
    assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("\"timeout\""), "{answer}");
}

/// A client that sends requests and never reads is closed after the timeout.
#[test]
fn a_client_that_does_not_read_is_closed() {
    let server = Start { args: &["--client-timeout", "300ms", "--max-connections", "1"], ..Start::default() }.server();
    let mut deaf = server.stream();
    let asked = "GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n".repeat(64);
    while deaf.write_all(asked.as_bytes()).is_ok() {}
    assert_eq!(server.connect().send("GET", "/healthz", &[], "").unwrap().status, 200);
}

#[test]
fn a_request_that_is_too_large_is_refused_before_it_is_read() {
    let server = Start { args: &["--max-body", "2048"], ..Start::default() }.server();
    let announced = server.stream();
    let mut writing = announced.try_clone().unwrap();
    let head = "POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
    write!(writing, "{head}content-length: 2049\r\n\r\n").unwrap();
    let answer = read_to_close(announced);
    assert!(answer.starts_with("HTTP/1.1 413") && answer.contains("\"too_large\""), "{answer}");
    // A chunked body has no declared length, and is read up to the limit.
    let mut chunked = server.stream();
    let chunk = format!("400\r\n{}\r\n", " ".repeat(0x400));
    let sent = write!(chunked, "{head}transfer-encoding: chunked\r\n\r\n{}0\r\n\r\n", chunk.repeat(3));
    drop(sent);
    let answer = read_to_close(chunked);
    assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
    // A chunked body within the limit is accepted.
    let mut pieces = server.connect();
    let chunks: String = GOOD.split_inclusive(':').map(|piece| format!("{:x}\r\n{piece}\r\n", piece.len())).collect();
    pieces.write(&format!("{head}transfer-encoding: chunked\r\n\r\n{chunks}0\r\n\r\n")).unwrap();
    assert_eq!(pieces.read().unwrap().status, 200);
    let padded = format!("{GOOD}{}", " ".repeat(2048 - GOOD.len()));
    assert_eq!(server.connect().post("/v1/check", &padded).unwrap().status, 200);
    for field in [format!("x: {}\r\n", "y".repeat(20_000)), "x: y\r\n".repeat(101)] {
        let mut large = server.stream();
        let _ = write!(large, "GET /healthz HTTP/1.1\r\nhost: localhost\r\n{field}\r\n");
        let answer = read_to_close(large);
        assert!(answer.starts_with("HTTP/1.1 431"), "{answer}");
    }
}

/// hyper's read buffer grows: after a head of 3,000 bytes, one of 20,000 once was accepted.
#[test]
fn the_limit_of_a_head_does_not_depend_on_earlier_requests() {
    let server = Start::default().server();
    for large in [16_400, 20_000, 24_000] {
        let mut stream = server.stream();
        for (bytes, status) in [(100, 200), (3_000, 200), (large, 431)] {
            let head = format!("GET /healthz HTTP/1.1\r\nhost: localhost\r\nx: {}\r\n\r\n", "y".repeat(bytes));
            let (first, rest) = head.split_at(60);
            stream.write_all(first.as_bytes()).unwrap();
            // In a TCP segment of its own, as a proxy sends it.
            std::thread::sleep(Duration::from_millis(20));
            stream.write_all(rest.as_bytes()).unwrap();
            let mut answer = [0; 12];
            stream.read_exact(&mut answer).unwrap();
            assert_eq!(String::from_utf8_lossy(&answer), format!("HTTP/1.1 {status}"), "after {bytes}");
            if status == 200 {
                let mut left = Vec::new();
                while !left.ends_with(b"\r\n\r\n{\"status\":\"ok\"}") {
                    let mut byte = [0];
                    stream.read_exact(&mut byte).unwrap();
                    left.push(byte[0]);
                }
            }
        }
    }
}

#[test]
fn connections_beyond_the_limit_wait_to_be_accepted() {
    let server = Start { args: &["--max-connections", "2"], ..Start::default() }.server();
    let mut held = [server.connect(), server.connect()];
    for client in &mut held {
        assert_eq!(client.post("/v1/check", GOOD).unwrap().status, 200);
    }
    let waiting = server.stream();
    waiting.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    let mut waiting = Client::new(waiting);
    assert!(waiting.post("/v1/check", GOOD).is_err(), "there was no room");
    drop(held);
    // The waiting connection is served once another has closed.
    let answer = (0..300).find_map(|_| waiting.read().ok()).expect("room was made");
    assert_eq!(answer.status, 200);
}

/// One peer could once use all connections. By default it may have a quarter of them, and further ones are closed. Trusted
/// proxies are exempt, because they bring many clients, and so are Unix sockets.
///
/// Woken by: `Exempt::Yes` for everyone in `admit`.
#[test]
fn a_peer_has_at_most_its_share_of_the_connections() {
    for args in [&["--max-connections", "8"][..], &["--max-connections", "8", "--max-connections-per-peer", "2"]] {
        let file = Scratch::file("policy.toml", POLICY);
        let server = Start { args, policy: Some(file.path()), ..Start::default() }.server();
        let mut held = [server.connect(), server.connect()];
        for client in &mut held {
            assert_eq!(client.post("/v1/check", GOOD).unwrap().status, 200);
        }
        for _ in 0..12 {
            assert_eq!(read_to_close(server.stream()), "");
        }
        let line = server.wait_for_log("connection closed");
        assert!(line.contains("max=2") && !line.contains("127.0.0.1"), "{line}");
        let [one, mut other] = held;
        drop(one);
        let again = (0..500).any(|_| {
            std::thread::sleep(Duration::from_millis(2));
            server.connect().post("/v1/check", GOOD).is_ok_and(|answer| answer.status == 200)
        });
        assert!(again, "its place is still taken");
        assert_eq!(other.post("/v1/check", GOOD).unwrap().status, 200);
    }
    let trusting = "[identity]\ntrusted_proxies = [\"127.0.0.0/8\"]\n".to_owned() + POLICY;
    let policy = Scratch::file("policy.toml", &trusting);
    let socket = policy.path().with_extension("sock");
    let address = format!("unix:{}", socket.display());
    let one = ["--max-connections-per-peer", "1"];
    let server = Start { args: &one, policy: Some(policy.path()), ..Start::default() }.server();
    let mut many: Vec<_> = (0..3).map(|_| server.connect()).collect();
    assert!(many.iter_mut().all(|client| client.post("/v1/check", GOOD).unwrap().status == 200));
    let args = ["--http", &address, "--max-connections-per-peer", "1"];
    let _server = Start { args: &args, ..Start::default() }.server();
    let mut many: Vec<_> = (0..3).map(|_| Client::new(UnixStream::connect(&socket).unwrap())).collect();
    assert!(many.iter_mut().all(|client| client.post("/v1/check", GOOD).unwrap().status == 200));
}

#[test]
fn five_hundred_idle_connections_block_no_request() {
    let server = Start::default().server();
    let idle: Vec<TcpStream> = (0..500).map(|_| server.stream()).collect();
    assert_eq!(server.connect().post("/v1/check", GOOD).unwrap().status, 200);
    drop(idle);
}

/// On SIGTERM a request in progress is answered, new connections are refused, and the process ends.
#[test]
fn sigterm_waits_for_requests_in_progress() {
    let (server, _file) = Server::with(POLICY);
    let mut under_way = being_read(&server);
    let mut idle = server.connect();
    assert_eq!(idle.send("GET", "/readyz", &[], "").unwrap().status, 200);
    server.signal("TERM");
    server.wait_for_log("draining");
    let address = server.place.trim_start_matches("http://").to_owned();
    let refused = (0..500).any(|_| {
        std::thread::sleep(Duration::from_millis(2));
        TcpStream::connect(&address).is_err()
    });
    assert!(refused, "it still accepts");
    under_way.write(GOOD).unwrap();
    let answer = under_way.read().unwrap();
    assert_eq!((answer.status, &answer.json()["allowed"]), (200, &json!(true)));
    let (status, log) = server.wait();
    assert!(status.success() && log.contains("stopped") && !log.contains("in progress"), "{log}");
}

/// A request whose body never arrives does not keep the server from ending.
#[test]
fn a_drain_is_bounded_in_time() {
    let server = Start { args: &["--drain", "200ms"], ..Start::default() }.server();
    let _stuck = being_read(&server);
    server.signal("TERM");
    let (status, log) = server.wait();
    assert!(status.success() && log.contains("stopped with requests in progress"), "{log}");
}

/// A request whose body the server waits for: it has answered 100 Continue.
fn being_read(server: &Server) -> Client<TcpStream> {
    let mut client = server.connect();
    let length = GOOD.len();
    let fields = format!("content-type: application/json\r\nexpect: 100-continue\r\ncontent-length: {length}\r\n");
    client.write(&format!("POST /v1/check HTTP/1.1\r\nhost: localhost\r\n{fields}\r\n")).unwrap();
    assert_eq!(client.read().unwrap().status, 100);
    client
}
