//! Clients that leave while they wait, on real sockets.

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
    let waiting = || serving.app().desk.limiter.waiting();
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
    until("it waits", || app.desk.limiter.waiting() == 1);
    let refund = json!({ "receipt": receipt }).to_string();
    assert_eq!(serving.client().post("/v1/refund", &refund).unwrap().status, 200);
    assert_eq!(client.read().unwrap().json()["allowed"], true);
    assert_eq!(client.read().unwrap().json()["status"], "ok");
}
