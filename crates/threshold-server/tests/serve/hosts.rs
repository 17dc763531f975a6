//! Tests the protection against DNS rebinding: a server without tokens accepts only its own names in Host and Origin.

use std::os::unix::net::UnixStream;

use super::client::Client;
use super::process::{POLICY, Scratch, Server, Start};

/// Returns every route of the OpenAPI document, and some paths that are not in it.
fn calls(server: &Server) -> Vec<(String, String)> {
    let document = server.connect().send("GET", "/openapi.json", &[], "").unwrap().json();
    let paths = document["paths"].as_object().unwrap();
    let described = paths.iter().flat_map(|(path, item)| {
        item.as_object().unwrap().keys().map(move |method| (method.to_uppercase(), path.replace(['{', '}'], "")))
    });
    let others =
        [("GET", "/auth"), ("POST", "/auth"), ("GET", "/openapi.json"), ("GET", "/"), ("OPTIONS", "/v1/check")];
    described.chain(others.map(|(method, path)| (method.to_owned(), path.to_owned()))).collect()
}

/// A foreign name that resolves to this machine, and a page with that origin.
///
/// Broken once by: leaving out the check in `Doors::call`.
#[test]
fn no_route_is_reachable_by_a_foreign_name() {
    let (server, _file) = Server::with(POLICY);
    let client = &mut server.connect();
    let calls = calls(&server);
    assert!(calls.len() > 20);
    for (method, path) in &calls {
        for (field, name) in
            [(("host", "evil.example:8080"), "Host"), (("origin", "http://evil.example:8080"), "Origin")]
        {
            let answer = client.send(method, path, &[field], "{}").unwrap();
            assert_eq!(answer.status, 403, "{method} {path} {field:?}: {}", answer.body);
            let message = answer.json()["message"].as_str().unwrap().to_owned();
            assert!(message.contains(name) && message.contains("--allow-host"), "{message}");
        }
        let own = client
            .send(method, path, &[("host", "127.0.0.1:8080"), ("origin", "http://127.0.0.1:8080")], "{}")
            .unwrap();
        assert_ne!(own.status, 403, "{method} {path}: {}", own.body);
    }
    let left = client.post("/v1/peek", r#"{"ip": "203.0.113.7"}"#).unwrap().json();
    assert_eq!(left["remaining"], 999, "nothing was charged");
    let line = server.wait_for_log("--allow-host");
    assert!(line.contains("evil.example"), "{line}");
}

#[test]
fn allow_host_adds_a_name() {
    let args = ["--allow-host", "threshold.internal", "--allow-host", "10.0.0.5"];
    let server = Start { args: &args, ..Start::default() }.server();
    let client = &mut server.connect();
    let mut status = |field| client.send("GET", "/healthz", &[field], "").unwrap().status;
    for host in ["threshold.internal", "Threshold.Internal:8080", "10.0.0.5:80", "localhost", "[::1]:8080"] {
        assert_eq!(status(("host", host)), 200, "{host}");
    }
    assert_eq!(status(("origin", "https://threshold.internal")), 200);
    for host in ["internal", "x.threshold.internal", "10.0.0.6"] {
        assert_eq!(status(("host", host)), 403, "{host}");
    }
    let wrong = Start { args: &["--allow-host", "*.internal"], ..Start::default() }.command().output().unwrap();
    assert_eq!(wrong.status.code(), Some(2));
}

/// A page knows no token, and cannot open a Unix socket.
#[test]
fn with_tokens_or_a_unix_socket_every_name_is_accepted() {
    let variables = [("THRESHOLD_TOKEN", "a-token-of-some-length")];
    let server = Start { variables: &variables, args: &["--allow-host", "x"], ..Start::default() }.server();
    let fields = [("host", "evil.example"), ("authorization", "Bearer a-token-of-some-length")];
    assert_eq!(server.connect().send("GET", "/openapi.json", &fields, "").unwrap().status, 200);
    assert_eq!(server.connect().send("GET", "/openapi.json", &fields[..1], "").unwrap().status, 401);
    server.wait_for_log("--allow-host ignored");
    // An operators' token does not protect the callers' routes.
    let variables = [("THRESHOLD_ADMIN_TOKEN", "a-token-of-some-length")];
    let server = Start { variables: &variables, ..Start::default() }.server();
    assert_eq!(server.connect().send("GET", "/openapi.json", &fields[..1], "").unwrap().status, 403);

    let folder = Scratch::folder();
    let path = folder.path().join("threshold.sock");
    let address = format!("unix:{}", path.display());
    let _server = Start { args: &["--http", &address], ..Start::default() }.server();
    let mut client = Client::new(UnixStream::connect(&path).unwrap());
    assert_eq!(client.send("GET", "/openapi.json", &fields[..1], "").unwrap().status, 200);
}

/// The Origin of a proxy's request is its client's.
#[test]
fn a_proxy_may_pass_on_its_clients_origin() {
    let (server, _file) = Server::with(POLICY);
    let client = &mut server.connect();
    let page = ("origin", "https://shop.example");
    for told in ["x-original-uri", "x-forwarded-uri"] {
        assert_eq!(client.send("GET", "/auth", &[page, (told, "/")], "").unwrap().status, 200);
        assert_eq!(client.send("GET", "/auth", &[("host", "shop.example"), (told, "/")], "").unwrap().status, 403);
    }
    assert_eq!(client.send("GET", "/auth", &[page], "").unwrap().status, 403);
}

/// RFC 9112, section 3.2.
///
/// Broken once by: leaving out the check for HTTP/1.1.
#[test]
fn http_1_1_has_one_host() {
    let variables = [("THRESHOLD_TOKEN", "a-token-of-some-length")];
    let guarded = Start { variables: &variables, ..Start::default() }.server();
    for server in [Server::with(POLICY).0, guarded] {
        for path in ["/healthz", "/auth", "/v1/check"] {
            for (head, refused) in [
                ("HTTP/1.1\r\n", true),
                ("HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n", true),
                ("HTTP/1.1\r\nhost: localhost\r\n", false),
                ("HTTP/1.0\r\n", false),
            ] {
                let mut client = server.connect();
                client.write(&format!("GET {path} {head}\r\n")).unwrap();
                let answer = client.read().unwrap();
                assert_eq!(answer.status == 400, refused, "{path} {head}: {answer:?}");
                if refused {
                    assert!(answer.json()["message"].as_str().unwrap().contains("Host"), "{answer:?}");
                }
            }
        }
    }
}
