//! Clients that leave while they wait, or ask for much and never read, on real sockets.

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
use super::serving::{Client, Serving};

/// One request at once, which lasts until it is given back: whoever comes after waits.
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

fn serving(policy: &str, bounds: Bounds) -> Serving {
    let mut serving = Serving::new();
    serving.bounds = bounds;
    serving.load(policy, &BTreeMap::new(), true).unwrap();
    serving
}

/// A path for a socket that nobody else has.
fn socket_path() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("threshold-crowd-{}-{number}.sock", std::process::id()))
}

/// Waits until something is so; far longer than it takes, and shorter than a request waits.
#[track_caller]
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    for _ in 0..6_000 {
        if is_so() {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("it never came that {what}");
}

/// A server whose one place is taken.
fn taken() -> (Serving, String) {
    let mut serving = serving(ONE_AT_ONCE, Bounds::default());
    let first = serving.client().post("/v1/check", "{}").unwrap().json();
    assert_eq!(first["allowed"], true);
    (serving, first["receipt"].as_str().unwrap().to_owned())
}

/// Sends a request that waits, with `behind` after it, then leaves by `leave`: nobody waits any more.
#[track_caller]
fn leaves<S: Write>(serving: &Serving, mut client: S, behind: &str, leave: impl FnOnce(S)) {
    let waiting = || serving.app().desk.waiting();
    assert_eq!(waiting(), 0);
    client.write_all(WAITS.as_bytes()).unwrap();
    client.write_all(behind.as_bytes()).unwrap();
    client.flush().unwrap();
    until("it waits", || waiting() == 1);
    leave(client);
    until("it no longer waits", || waiting() == 0);
}

/// A client that pipelined a request behind one that waits, and left, kept its place until the end of its wait: hyper reads
/// no further while it has something to serve.
///
/// Woken by: leaving out `self.look()?` in `poll_flush` of `Watched`, `line.watch` in `check`, or `timeout` in `watch`.
#[test]
fn a_wait_ends_when_its_client_leaves_whatever_was_sent_behind_it() {
    let (serving, _receipt) = taken();
    // More than hyper reads ahead: the rest stays in the socket, before the end.
    let many = HEALTH.repeat(2_000);
    for behind in ["", "G", HEALTH, &many] {
        leaves(&serving, serving.connect(), behind, drop);
    }
    let mut half = serving.connect();
    leaves(&serving, half.try_clone().unwrap(), HEALTH, |client| client.shutdown(Shutdown::Write).unwrap());
    // As without a second request, there is no answer.
    assert_eq!(half.read(&mut [0; 64]).unwrap(), 0);
    // On a socket in the file system.
    let path = socket_path();
    let _stop = serving.serve_at(&format!("unix:{}", path.display()), None);
    leaves(&serving, UnixStream::connect(&path).unwrap(), HEALTH, drop);
    let _ = std::fs::remove_file(&path);
}

#[test]
fn a_wait_over_tls_ends_when_its_client_leaves() {
    let (serving, _receipt) = taken();
    let CertifiedKey { cert, signing_key } = generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let key = PrivateKeyDer::try_from(signing_key.serialize_der()).unwrap();
    let provider = || Arc::new(ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions().unwrap();
    let config = builder.with_no_client_auth().with_single_cert(vec![cert.der().clone()], key).unwrap();
    let (_stop, address) = serving.serve_at("127.0.0.1:0", Some(TlsAcceptor::from(Arc::new(config))));
    let mut roots = RootCertStore::empty();
    roots.add(cert.der().clone()).unwrap();
    let builder = ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions().unwrap();
    let config = Arc::new(builder.with_root_certificates(roots).with_no_client_auth());
    for behind in ["", HEALTH] {
        let session = ClientConnection::new(Arc::clone(&config), ServerName::try_from("localhost").unwrap()).unwrap();
        let stream = TcpStream::connect(address.unwrap()).unwrap();
        leaves(&serving, StreamOwned::new(session, stream), behind, drop);
    }
}

/// Who stays is answered, and so is what was sent behind.
#[test]
fn a_client_that_stays_is_answered() {
    let (mut serving, receipt) = taken();
    let mut client = Client::new(serving.connect());
    client.write(&format!("{WAITS}{HEALTH}")).unwrap();
    let app = serving.app();
    until("it waits", || app.desk.waiting() == 1);
    let refund = json!({ "receipt": receipt }).to_string();
    assert_eq!(serving.client().post("/v1/refund", &refund).unwrap().status, 200);
    assert_eq!(client.read().unwrap().json()["allowed"], true);
    assert_eq!(client.read().unwrap().json()["status"], "ok");
}

/// A repeat of a request waits for the first one as long as that waits, and leaves when its client does.
///
/// Woken by: leaving out `line.watch` in `once`.
#[test]
fn a_repeat_that_waits_for_the_first_ends_when_its_client_leaves() {
    let (serving, _receipt) = taken();
    let body = r#"{"requestId": "r"}"#;
    let post = |path: &str| {
        let length = body.len();
        format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n{body}")
    };
    let mut first = serving.connect();
    first.write_all(post("/v1/check?waitMs=60000").as_bytes()).unwrap();
    let app = serving.app();
    until("the first waits", || app.desk.waiting() == 1);
    // Every connection holds what the doors share.
    let before = Arc::strong_count(&app);
    let mut repeat = Client::new(serving.connect());
    repeat.write(&format!("{HEALTH}{}{HEALTH}", post("/v1/check"))).unwrap();
    assert_eq!(repeat.read().unwrap().status, 200);
    assert!(Arc::strong_count(&app) > before);
    drop(repeat);
    until("its connection is gone", || Arc::strong_count(&app) == before);
    assert_eq!(app.desk.waiting(), 1, "the first still waits");
}

/// Fourteen rules that every request meets.
fn fourteen_rules() -> String {
    let rule = |number| format!("[[rule]]\nname = 'rule number {number}'\nper = ['user']\nlimit = '100000/h'\n");
    (0..14).map(rule).collect()
}

fn list(items: usize) -> String {
    let body = format!("[{}]", vec![r#"{"user": "u"}"#; items].join(","));
    let length = body.len();
    format!("POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n{body}")
}

/// 300 clients that asked for a thousand decisions each and read nothing took a gigabyte. Now as many are answered as there
/// is room for, and the others are told so. A socket in the file system holds a fifth of a megabyte, so that what is not read
/// stays with the server.
///
/// Woken by: `Bytes::from(answer)` in `Room::body`, which gives the room back before the answer is read.
#[test]
fn answers_that_nobody_reads_take_no_more_than_their_bound() {
    const MOST: usize = 4 << 20;
    let mut serving = serving(&fourteen_rules(), Bounds { answers: MOST, ..Bounds::default() });
    let mut client = Client::new(serving.connect());
    client.write(&list(200)).unwrap();
    let size = client.read().unwrap().body.len();
    let path = socket_path();
    let stop = serving.serve_at(&format!("unix:{}", path.display()), None);
    let mut clients: Vec<UnixStream> = (0..12)
        .map(|_| {
            let mut client = UnixStream::connect(&path).unwrap();
            client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            client.write_all(list(200).as_bytes()).unwrap();
            client
        })
        .collect();
    // Others are served meanwhile.
    let client = serving.client();
    assert_eq!(client.post("/v1/check", r#"{"user": "u"}"#).unwrap().json()["allowed"], true);
    assert_eq!(client.send("GET", "/readyz", &[], "").unwrap().status, 200);
    let mut begun = |client: &mut UnixStream| {
        let mut status = [0; 12];
        client.read_exact(&mut status).unwrap();
        String::from_utf8(status.to_vec()).unwrap()
    };
    let begun: Vec<String> = clients.iter_mut().map(&mut begun).collect();
    let answered = begun.iter().filter(|status| *status == "HTTP/1.1 200").count();
    assert!((1..=MOST / size).contains(&answered), "{answered} of {size} bytes wait to be read");
    assert_eq!(begun.iter().filter(|status| *status == "HTTP/1.1 503").count(), 12 - answered);
    let app = serving.app();
    assert!(app.large.free() <= MOST - answered * size);
    drop(clients);
    until("all room is back", || app.large.free() == MOST);
    let mut client = Client::new(serving.connect());
    client.write(&list(200)).unwrap();
    assert_eq!(client.read().unwrap().json().as_array().map(Vec::len), Some(200));
    drop(stop);
    let _ = std::fs::remove_file(&path);
}
