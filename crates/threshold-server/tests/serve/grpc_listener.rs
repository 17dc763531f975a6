//! Tests the gRPC listener on a Unix socket and with TLS.

use std::os::unix::fs::PermissionsExt as _;

use rcgen::{CertifiedKey, generate_simple_self_signed};

use super::envoy::{descriptor, grpc_address};
use super::grpc_client::{Failed, GrpcClient, HEALTH, RATE_LIMIT};
use super::process::{POLICY, Scratch, Start};
use super::proto::{Code, HealthCheckRequest, HealthCheckResponse, RateLimitRequest, RateLimitResponse, ServingStatus};

const TOKEN: &str = "a-caller-token-1";

fn ask(client: &mut GrpcClient) -> Result<Code, Failed> {
    let descriptors = vec![descriptor(&[("remote_address", "192.0.2.1")])];
    let request = RateLimitRequest { domain: "edge".to_owned(), descriptors, hits_addend: 0 };
    client.call::<RateLimitResponse>(RATE_LIMIT, &request).map(|answer| answer.overall_code())
}

/// Woken by: TLS on the socket too, and leaving the socket behind.
#[test]
fn a_unix_socket_serves_envoy_without_tls() {
    let (folder, policy) = (Scratch::folder(), Scratch::file("policy.toml", POLICY));
    let CertifiedKey { cert, signing_key } = generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let write = |name: &str, text: &str| {
        std::fs::write(folder.path().join(name), text).unwrap();
        folder.path().join(name).display().to_string()
    };
    let (cert, key) = (write("cert.pem", &cert.pem()), write("key.pem", &signing_key.serialize_pem()));
    let path = folder.path().join("grpc.sock");
    let address = format!("unix:{}", path.display());
    // The certificate is for --http.
    let args = ["--grpc", &address, "--tls-cert", &cert, "--tls-key", &key];
    let server = Start { args: &args, policy: Some(policy.path()), ..Start::default() }.server();
    assert!(server.wait_for_log("listening").contains(&address));
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o660);
    let mut client = GrpcClient::connect_unix(&path);
    for _ in 0..3 {
        assert_eq!(ask(&mut client), Ok(Code::Ok));
    }
    server.signal("TERM");
    assert!(server.wait().0.success() && !path.exists());
}

/// Woken by: no TLS on `--grpc`, `http/1.1` in its list of ALPN, leaving out `authorize`.
#[test]
fn over_tls_envoy_speaks_http2_and_sends_its_token() {
    let policy = Scratch::file("policy.toml", POLICY);
    let CertifiedKey { cert, signing_key } = generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let (cert_file, key_file) =
        (Scratch::file("cert.pem", &cert.pem()), Scratch::file("key.pem", &signing_key.serialize_pem()));
    let [cert_path, key_path] = [&cert_file, &key_file].map(|file| file.path().to_str().unwrap());
    let args = ["--grpc", "127.0.0.1:0", "--tls-cert", cert_path, "--tls-key", key_path];
    let variables = [("THRESHOLD_TOKEN", TOKEN)];
    let server = Start { args: &args, variables: &variables, policy: Some(policy.path()), ..Start::default() }.server();
    let address = grpc_address(&server);
    assert!(GrpcClient::connect_tls(address, cert.der(), "http/1.1").is_err());
    let mut client = GrpcClient::connect_tls(address, cert.der(), "h2").unwrap();
    let health = HealthCheckRequest::default();
    let healthy = client.call::<HealthCheckResponse>(HEALTH, &health).map(|answer| answer.status());
    assert_eq!(healthy, Ok(ServingStatus::Serving));
    assert_eq!(ask(&mut client).map_err(|(code, _)| code), Err(16));
    client.metadata = vec![("authorization", format!("Bearer {TOKEN}"))];
    assert_eq!(ask(&mut client), Ok(Code::Ok));
}
