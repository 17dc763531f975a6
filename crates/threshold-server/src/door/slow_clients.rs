//! Tests clients that disconnect while they wait, or request much and never read it, on real sockets.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rcgen::{CertifiedKey, generate_simple_self_signed};
use serde_json::json;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::{PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, StreamOwned};

use super::Bounds;
use super::test_server::{Client, TestServer};

/// One request at a time, which counts until it is refunded: the next one waits.
const ONE_AT_ONCE: &str = "
    [[rule]]
    name = 'at once'
    layer = 'global'
    per = []
    limit = '1'
    algorithm = 'concurrency'
    ttl = '1h'
";
const WAITS: &str = "POST /v1/check?waitMs=60000 HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}";
const HEALTH: &str = "GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n";

fn server(policy: &str, bounds: Bounds) -> TestServer {
    let mut server = TestServer::new();
    server.bounds = bounds;
    server.load(policy, &BTreeMap::new(), true).unwrap();
    server
}

/// Returns an unused path for a socket.
fn socket_path() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("threshold-clients-{}-{number}.sock", std::process::id()))
}

/// Waits until a condition holds, for at most 30 seconds: half of what a request waits.
#[track_caller]
fn until(what: &str, mut condition: impl FnMut() -> bool) {
    for _ in 0..6_000 {
        if condition() {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("timed out waiting until {what}");
}

/// Starts a server whose one concurrent request is in use. Returns its receipt.
fn server_in_use() -> (TestServer, String) {
    let mut server = server(ONE_AT_ONCE, Bounds::default());
    let first = server.client().post("/v1/check", "{}").unwrap().json();
    assert_eq!(first["allowed"], true);
    (server, first["receipt"].as_str().unwrap().to_owned())
}

/// Sends a request that waits, with `behind` after it, then disconnects by `leave`. The wait must end.
#[track_caller]
fn check_disconnect<S: Write>(server: &TestServer, mut client: S, behind: &str, leave: impl FnOnce(S)) {
    let waiting = || server.app().desk.waiting();
    assert_eq!(waiting(), 0);
    client.write_all(WAITS.as_bytes()).unwrap();
    client.write_all(behind.as_bytes()).unwrap();
    client.flush().unwrap();
    until("it waits", || waiting() == 1);
    leave(client);
    until("it no longer waits", || waiting() == 0);
}

/// A client that pipelined a second request and disconnected once kept waiting until its time was up: hyper does not read
/// from a connection while it holds an unserved request, and so does not see that it was closed.
///
/// Woken by: leaving out `self.check_connected()?` in `poll_flush` of `WatchedStream`, `watch.until_disconnect` in `check`, or
/// `timeout` in `until_disconnect`.
#[test]
fn a_wait_ends_when_its_client_disconnects_also_with_pipelined_requests() {
    let (server, _receipt) = server_in_use();
    // More than hyper reads ahead: the rest stays in the socket's buffer, before the end of the stream.
    let many = HEALTH.repeat(2_000);
    // Nothing, half a request, a whole one, and more than the buffer holds. hyper reads on in the first case only.
    for behind in ["", "G", HEALTH, &many] {
        check_disconnect(&server, server.connect(), behind, drop);
    }
    let mut half = server.connect();
    check_disconnect(&server, half.try_clone().unwrap(), HEALTH, |client| client.shutdown(Shutdown::Write).unwrap());
    // A half-closed connection is closed without an answer, as hyper does without a second request.
    assert_eq!(half.read(&mut [0; 64]).unwrap(), 0);
    // The same on a Unix socket.
    let path = socket_path();
    let _stop = server.serve_at(&format!("unix:{}", path.display()), None);
    check_disconnect(&server, UnixStream::connect(&path).unwrap(), HEALTH, drop);
    let _ = std::fs::remove_file(&path);
}

#[test]
fn a_wait_over_tls_ends_when_its_client_disconnects() {
    let (server, _receipt) = server_in_use();
    let CertifiedKey { cert, signing_key } = generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let key = PrivateKeyDer::try_from(signing_key.serialize_der()).unwrap();
    let provider = || Arc::new(ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions().unwrap();
    let config = builder.with_no_client_auth().with_single_cert(vec![cert.der().clone()], key).unwrap();
    let (_stop, address) = server.serve_at("127.0.0.1:0", Some(TlsAcceptor::from(Arc::new(config))));
    let mut roots = RootCertStore::empty();
    roots.add(cert.der().clone()).unwrap();
    let builder = ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions().unwrap();
    let config = Arc::new(builder.with_root_certificates(roots).with_no_client_auth());
    for behind in ["", HEALTH] {
        let session = ClientConnection::new(Arc::clone(&config), ServerName::try_from("localhost").unwrap()).unwrap();
        let stream = TcpStream::connect(address.unwrap()).unwrap();
        check_disconnect(&server, StreamOwned::new(session, stream), behind, drop);
    }
}

/// The waiting request and the pipelined one are both answered.
#[test]
fn a_client_that_stays_connected_is_answered() {
    let (mut server, receipt) = server_in_use();
    let mut client = Client::new(server.connect());
    client.write(&format!("{WAITS}{HEALTH}")).unwrap();
    let app = server.app();
    until("it waits", || app.desk.waiting() == 1);
    let refund = json!({ "receipt": receipt }).to_string();
    assert_eq!(server.client().post("/v1/refund", &refund).unwrap().status, 200);
    assert_eq!(client.read().unwrap().json()["allowed"], true);
    assert_eq!(client.read().unwrap().json()["status"], "ok");
}

/// A repeat waits for the first request with its id, until its own client disconnects.
///
/// Woken by: leaving out `watch.until_disconnect` in `once`.
#[test]
fn a_repeat_that_waits_for_the_first_ends_when_its_client_disconnects() {
    let (server, _receipt) = server_in_use();
    let body = r#"{"requestId": "r"}"#;
    let post = |path: &str| {
        let length = body.len();
        format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n{body}")
    };
    let mut first = server.connect();
    first.write_all(post("/v1/check?waitMs=60000").as_bytes()).unwrap();
    let app = server.app();
    until("the first waits", || app.desk.waiting() == 1);
    // Every connection holds a reference to the shared state.
    let before = Arc::strong_count(&app);
    let mut repeat = Client::new(server.connect());
    repeat.write(&format!("{HEALTH}{}{HEALTH}", post("/v1/check"))).unwrap();
    assert_eq!(repeat.read().unwrap().status, 200);
    assert!(Arc::strong_count(&app) > before);
    drop(repeat);
    until("its connection is gone", || Arc::strong_count(&app) == before);
    assert_eq!(app.desk.waiting(), 1, "the first still waits");
}

/// Fourteen rules that every request matches.
fn fourteen_rules() -> String {
    let rule = |number| format!("[[rule]]\nname = 'rule number {number}'\nper = ['user']\nlimit = '100000/h'\n");
    (0..14).map(rule).collect()
}

fn list(items: usize) -> String {
    let body = format!("[{}]", vec![r#"{"user": "u"}"#; items].join(","));
    let length = body.len();
    format!("POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n{body}")
}

/// 300 clients that requested a thousand decisions each and read nothing once took a gigabyte. Now as many are answered as fit
/// the bound, and the others get 503. A Unix socket buffers a fifth of a megabyte, so that unread answers stay in the server.
///
/// Woken by: `Bytes::from(answer)` in `AnswerPermit::body`, which releases the memory before the answer is read.
#[test]
fn answers_that_are_not_read_take_no_more_memory_than_their_bound() {
    const MOST: usize = 4 << 20;
    let mut server = server(&fourteen_rules(), Bounds { answers: MOST, ..Bounds::default() });
    let mut client = Client::new(server.connect());
    client.write(&list(200)).unwrap();
    // The size of one answer, to know how many fit the bound.
    let size = client.read().unwrap().body.len();
    let path = socket_path();
    let stop = server.serve_at(&format!("unix:{}", path.display()), None);
    let mut clients: Vec<UnixStream> = (0..12)
        .map(|_| {
            let mut client = UnixStream::connect(&path).unwrap();
            client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            client.write_all(list(200).as_bytes()).unwrap();
            client
        })
        .collect();
    // Other clients are served meanwhile.
    let client = server.client();
    assert_eq!(client.post("/v1/check", r#"{"user": "u"}"#).unwrap().json()["allowed"], true);
    assert_eq!(client.send("GET", "/readyz", &[], "").unwrap().status, 200);
    let mut status_line = |client: &mut UnixStream| {
        let mut status = [0; 12];
        client.read_exact(&mut status).unwrap();
        String::from_utf8(status.to_vec()).unwrap()
    };
    let statuses: Vec<String> = clients.iter_mut().map(&mut status_line).collect();
    let answered = statuses.iter().filter(|status| *status == "HTTP/1.1 200").count();
    assert!((1..=MOST / size).contains(&answered), "{answered} of {size} bytes wait to be read");
    assert_eq!(statuses.iter().filter(|status| *status == "HTTP/1.1 503").count(), 12 - answered);
    let app = server.app();
    assert!(app.answer_memory.free() <= MOST - answered * size);
    // The clients disconnect without reading. Their answers must not stay in memory.
    drop(clients);
    until("all memory is released", || app.answer_memory.free() == MOST);
    let mut client = Client::new(server.connect());
    client.write(&list(200)).unwrap();
    assert_eq!(client.read().unwrap().json().as_array().map(Vec::len), Some(200));
    drop(stop);
    let _ = std::fs::remove_file(&path);
}

/// Woken by leaving out `timeout` in `send_all` and `set_write_timeout` of the connection.
#[test]
fn a_stream_whose_client_does_not_read_is_cut_off() {
    let bounds = Bounds { client_timeout: Duration::from_millis(200), ..Bounds::default() };
    let server = server(ONE_AT_ONCE, bounds);
    let app = server.app();
    let long = "x".repeat(250);
    let event = |number: usize| {
        let names = json!({"tenant": long, "userId": number.to_string(), "endpoint": long, "ip": long, "rule": long});
        let mut event = json!({"id": format!("00000000-0000-4000-8000-{number:012x}"), "at": 1, "blocked": true});
        event.as_object_mut().unwrap().extend(names.as_object().unwrap().clone());
        threshold_core::Event::from_json(&event.to_string()).unwrap()
    };
    // More than the socket's buffers hold.
    let events: Vec<threshold_core::Event> = (0..2_000).map(event).collect();
    app.signals.database.insert(&events, app.desk.now());
    let path = socket_path();
    let _stop = server.serve_at(&format!("unix:{}", path.display()), None);
    let mut client = UnixStream::connect(&path).unwrap();
    let ask = "GET /v1/events HTTP/1.1\r\nhost: localhost\r\naccept: text/event-stream\r\nlast-event-id: 0\r\n\r\n";
    client.write_all(ask.as_bytes()).unwrap();
    let mut status = [0; 12];
    client.read_exact(&mut status).unwrap();
    assert_eq!(&status, b"HTTP/1.1 200");
    until("it is cut off", || app.event_streams.open() == 0);
    let _ = std::fs::remove_file(&path);
}
