//! Tests Unix sockets and TLS.

use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rcgen::{Certificate, CertificateParams, CertifiedKey, KeyPair, date_time_ymd, generate_simple_self_signed};
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::{
    ClientConfig, ClientConnection, DigitallySignedStruct, Error, RootCertStore, SignatureScheme, StreamOwned,
};

use super::client::Client;
use super::process::{Scratch, Start, compiled};

const GOOD: &str = r#"{"ip": "203.0.113.7"}"#;

#[test]
fn a_unix_socket_is_for_its_owner_and_removed_with_the_server() {
    let folder = Scratch::folder();
    let path = folder.path().join("threshold.sock");
    let address = format!("unix:{}", path.display());
    let start = Start { args: &["--http", &address], ..Start::default() };
    let server = start.server();
    assert_eq!(server.place, address);
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o660);
    let mut client = Client::new(UnixStream::connect(&path).unwrap());
    assert_eq!(client.post("/v1/check", GOOD).unwrap().status, 200);
    // A second server on the same socket does not start.
    let second = start.command().output().unwrap();
    assert_eq!(second.status.code(), Some(2));
    assert!(String::from_utf8(second.stderr).unwrap().contains("another server listens"));
    assert_eq!(client.post("/v1/check", GOOD).unwrap().status, 200);
    server.signal("TERM");
    assert!(server.wait().0.success());
    assert!(!path.exists());
}

#[test]
fn a_stale_socket_is_replaced_and_any_other_file_is_not() {
    let folder = Scratch::folder();
    let path = folder.path().join("threshold.sock");
    let address = format!("unix:{}", path.display());
    let start = Start { args: &["--http", &address], ..Start::default() };
    let dead = start.server();
    dead.signal("KILL");
    dead.wait();
    assert!(path.exists());
    let server = start.server();
    assert_eq!(Client::new(UnixStream::connect(&path).unwrap()).post("/v1/check", GOOD).unwrap().status, 200);
    drop(server);
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "precious").unwrap();
    let refused = start.command().output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8(refused.stderr).unwrap().contains("is not a socket"));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
}

/// Connects as a client that trusts only this certificate.
fn trusting(cert: &Certificate, address: &str) -> Client<StreamOwned<ClientConnection, TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots.add(cert.der().clone()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("localhost").unwrap();
    let session = ClientConnection::new(Arc::new(config), name).unwrap();
    Client::new(StreamOwned::new(session, TcpStream::connect(address).unwrap()))
}

/// Connects as a client that accepts every certificate.
fn believing(address: &str) -> Client<StreamOwned<ClientConnection, TcpStream>> {
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Believes))
        .with_no_client_auth();
    let name = ServerName::try_from("localhost").unwrap();
    let session = ClientConnection::new(Arc::new(config), name).unwrap();
    Client::new(StreamOwned::new(session, TcpStream::connect(address).unwrap()))
}

#[derive(Debug)]
struct Believes;

impl ServerCertVerifier for Believes {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        ring::default_provider().signature_verification_algorithms.supported_schemes()
    }
}

/// A renewed certificate is used for new connections, after a signal or by itself; open connections stay. A certificate with
/// another key is reported and not used.
///
/// Woken by: leaving out `in_force.store` in `Certificates::load`; and by leaving out `watch_certificate` in `serve::run`.
#[test]
fn a_renewed_certificate_needs_no_restart() {
    let [old, new, newest] = std::array::from_fn(|_| generate_simple_self_signed(["localhost".to_owned()]).unwrap());
    let cert_file = Scratch::file("cert.pem", &old.cert.pem());
    let key_file = Scratch::file("key.pem", &old.signing_key.serialize_pem());
    let (cert_path, key_path) = (cert_file.path().to_str().unwrap(), key_file.path().to_str().unwrap());
    let server = Start { args: &["--tls-cert", cert_path, "--tls-key", key_path], ..Start::default() }.server();
    let address = server.place.strip_prefix("https://").unwrap().to_owned();
    let checks =
        |cert: &Certificate| trusting(cert, &address).post("/v1/check", GOOD).is_ok_and(|got| got.status == 200);
    let stands = |cert: &Certificate| trusting(cert, &address).send("GET", "/readyz", &[], "").unwrap().json();
    let mut open = trusting(&old.cert, &address);
    assert_eq!(open.post("/v1/check", GOOD).unwrap().status, 200);

    cert_file.replace(&new.cert.pem());
    server.signal("HUP");
    server.wait_for_log("certificate not reloaded");
    assert!(checks(&old.cert) && !checks(&new.cert));
    let told = stands(&old.cert);
    assert_eq!(told["status"], "degraded");
    assert!(told["reason"].as_str().unwrap().contains("does not belong to the certificate"), "{told}");

    key_file.replace(&new.signing_key.serialize_pem());
    server.signal("HUP");
    server.wait_for_log("certificate reloaded");
    assert!(checks(&new.cert) && !checks(&old.cert));
    assert_eq!(stands(&new.cert)["status"], "ok");
    assert_eq!(open.post("/v1/check", GOOD).unwrap().status, 200);

    key_file.replace(&newest.signing_key.serialize_pem());
    cert_file.replace(&newest.cert.pem());
    server.wait_for_log("certificate reloaded");
    assert!(checks(&newest.cert) && !checks(&new.cert));
}

/// The server reports an expired certificate, which clients refuse.
#[test]
fn an_expired_certificate_causes_a_warning() {
    let key = KeyPair::generate().unwrap();
    let made = |from: i32, until: i32| {
        let mut params = CertificateParams::new(["localhost".to_owned()]).unwrap();
        (params.not_before, params.not_after) = (date_time_ymd(from, 1, 1), date_time_ymd(until, 1, 1));
        params.self_signed(&key).unwrap().pem()
    };
    let (good, expired, early) = (made(2020, 4000), made(2019, 2020), made(3000, 4000));
    let cert_file = Scratch::file("cert.pem", &expired);
    let key_file = Scratch::file("key.pem", &key.serialize_pem());
    let (cert_path, key_path) = (cert_file.path().to_str().unwrap(), key_file.path().to_str().unwrap());
    let server = Start { args: &["--tls-cert", cert_path, "--tls-key", key_path], ..Start::default() }.server();
    let line = server.wait_for_log("the certificate expired at 2020-01-01");
    assert!(line.contains("WARN"), "{line}");
    let address = server.place.strip_prefix("https://").unwrap().to_owned();
    let stands = || believing(&address).send("GET", "/readyz", &[], "").unwrap().json();
    assert_eq!(stands()["status"], "degraded");
    assert!(stands()["reason"].as_str().unwrap().contains("expired at 2020-01-01"));
    let expires = || {
        let text = believing(&address).send("GET", "/metrics", &[], "").unwrap().body;
        let value = text.lines().find_map(|line| line.strip_prefix("threshold_certificate_expires_timestamp_seconds "));
        value.map(str::to_owned)
    };
    assert_eq!(expires().as_deref(), Some("1577836800"));
    cert_file.replace(&good);
    server.signal("HUP");
    server.wait_for_log("certificate reloaded");
    assert_eq!(stands()["status"], "ok");
    assert_eq!(expires().as_deref(), Some("64060588800"));
    // A chain is invalid if one of its certificates is.
    cert_file.replace(&format!("{good}{early}"));
    server.signal("HUP");
    server.wait_for_log("the certificate is not valid before 3000-01-01");
}

#[test]
fn tls_needs_a_certificate_with_its_key() {
    let CertifiedKey { cert, signing_key } = generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let (cert_file, key_file) =
        (Scratch::file("cert.pem", &cert.pem()), Scratch::file("key.pem", &signing_key.serialize_pem()));
    let (cert_path, key_path) = (cert_file.path().to_str().unwrap(), key_file.path().to_str().unwrap());
    let args = ["--tls-cert", cert_path, "--tls-key", key_path];
    let server = Start { args: &args, ..Start::default() }.server();
    let address = server.place.strip_prefix("https://").expect("it says that it speaks TLS").to_owned();

    let mut client = trusting(&cert, &address);
    for _ in 0..3 {
        assert_eq!(client.post("/v1/check", GOOD).unwrap().status, 200);
    }
    // A request without TLS gets no answer.
    assert!(Client::new(TcpStream::connect(&address).unwrap()).post("/v1/check", GOOD).is_err());

    let other = generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let other = Scratch::file("other.pem", &other.signing_key.serialize_pem());
    for (cert, key, told) in [
        (cert_path, other.path().to_str().unwrap(), "does not belong to the certificate"),
        (key_path, key_path, "no certificate"),
        (cert_path, "/no/such/key.pem", "/no/such/key.pem"),
    ] {
        let args = ["--tls-cert", cert, "--tls-key", key];
        let output = Start { args: &args, ..Start::default() }.command().output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && error.contains(told), "{error}");
    }
    // TLS options are refused with a Unix socket, which is not encrypted.
    let socket = format!("unix:{}", cert_file.path().with_extension("sock").display());
    let args = ["--http", &socket, "--tls-cert", cert_path, "--tls-key", key_path];
    let output = Start { args: &args, ..Start::default() }.command().output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(2) && error.contains("TLS is not supported on a Unix socket"), "{error}");
    let half = Start { args: &["--tls-cert", cert_path], ..Start::default() }.command().output().unwrap();
    assert_eq!(half.status.code(), Some(2));
}

/// A server with a listener that has failed once looked like one that was asked to stop: it ended with 0, and a supervisor left it.
///
/// Woken by trying again after every error, by `failed: false`, and by leaving out the name of the listener.
#[test]
fn a_server_whose_listener_fails_ends_with_an_error_that_names_it() {
    let folder = Scratch::folder();
    let (library, order) = (compiled("sockets/accept.c", folder.path()), folder.path().join("accept"));
    let variables = [("LD_PRELOAD", library.as_str()), ("THRESHOLD_ACCEPT", order.to_str().unwrap())];
    let args = ["--admin", "127.0.0.1:0"];
    let server = Start { args: &args, variables: &variables, ..Start::default() }.server();
    // ECONNABORTED concerns one connection, and the next one is served.
    std::fs::write(&order, "103").unwrap();
    let mut waiting = server.connect();
    server.wait_for_log("accept failed");
    std::fs::remove_file(&order).unwrap();
    assert_eq!(waiting.post("/v1/check", GOOD).unwrap().status, 200);
    // EINVAL is about the socket itself.
    std::fs::write(&order, "22").unwrap();
    drop(server.stream());
    let place = server.place.trim_start_matches("http://").to_owned();
    let (status, log) = server.wait();
    assert_eq!(status.code(), Some(1), "{log}");
    let line = log.lines().find(|line| line.contains("listener failed: the server stops")).unwrap_or(&log);
    assert!(line.contains("ERROR") && line.contains(&place) && line.contains("Invalid argument"), "{log}");
    assert!(log.contains("stopped"), "{log}");
}
