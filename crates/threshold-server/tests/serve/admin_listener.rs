//! Tests `--admin`, the listener for operators alone.

use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use super::client::{Answer, Client};
use super::process::{PATIENCE, Scratch, Server, Start};

const ADMIN: (&str, &str) = ("THRESHOLD_ADMIN_TOKEN", "boss-token-012345");
const CALLER: (&str, &str) = ("THRESHOLD_TOKEN", "caller-token-0123");
const JSON: (&str, &str) = ("content-type", "application/json");

/// Returns the address of the operators' listener, from the log.
fn admin_of(server: &Server) -> String {
    let line: Value = serde_json::from_str(&server.wait_for_log("listening")).unwrap();
    line["admin"].as_str().unwrap().to_owned()
}

fn connect(place: &str) -> Client<TcpStream> {
    let stream = TcpStream::connect(place.strip_prefix("http://").unwrap()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    Client::new(stream)
}

fn call(client: &mut Client<TcpStream>, method: &str, path: &str, body: &Value) -> Answer {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    client.send(method, path, &[JSON, ("authorization", "Bearer boss-token-012345")], &body).unwrap()
}

/// Operators' calls on the port that the whole cluster reaches were one leaked token away from everyone. With a listener of
/// their own they are not there at all.
#[test]
fn operators_have_a_listener_of_their_own_and_callers_theirs() {
    let args = ["--admin", "127.0.0.1:0", "--log", "json"];
    let server = Start { args: &args, variables: &[ADMIN, CALLER], ..Start::default() }.server();
    let admin = admin_of(&server);
    let (mut operators, mut callers) = (connect(&admin), server.connect());
    let ban = json!({"layer": "user", "key": "mallory", "reason": "fraud"});
    for (method, path, body) in [
        ("POST", "/v1/bans", &ban),
        ("GET", "/v1/bans", &Value::Null),
        ("GET", "/v1/subjects/user/mallory", &Value::Null),
        ("GET", "/v1/users/mallory", &Value::Null),
    ] {
        assert_eq!(call(&mut operators, method, path, body).status, 200, "{method} {path}");
        let refused = call(&mut callers, method, path, body);
        assert!(refused.status == 404 && refused.body.contains("own listener (--admin)"), "{method} {path}");
    }
    // Callers report events at the path at which operators read them.
    let refused = call(&mut callers, "GET", "/v1/events", &Value::Null);
    assert!(refused.status == 405 && refused.body.contains("own listener (--admin)"), "{}", refused.body);
    let facts = json!({"user": "mallory", "ip": "203.0.113.7"});
    for (method, path) in
        [("POST", "/v1/check"), ("POST", "/v1/limit"), ("POST", "/v1/login/attempt"), ("GET", "/auth")]
    {
        assert_eq!(call(&mut operators, method, path, &facts).status, 404, "{method} {path}");
    }
    assert_eq!(call(&mut callers, "POST", "/v1/check", &facts).json()["banned"], true);
    for path in ["/healthz", "/readyz", "/metrics", "/openapi.json"] {
        assert_eq!(call(&mut operators, "GET", path, &Value::Null).status, 200, "{path}");
        assert_eq!(call(&mut callers, "GET", path, &Value::Null).status, 200, "{path}");
    }
    assert_eq!(call(&mut operators, "POST", "/v1/explain", &facts).status, 200);
    // An operator's token is required here as it is elsewhere.
    let anonymous = operators.send("GET", "/v1/bans", &[], "").unwrap();
    assert_eq!(anonymous.status, 401);
    server.signal("TERM");
    assert!(server.wait().0.success());
}

/// The operators' commands reach a Unix socket that callers on the network cannot.
#[test]
fn operators_may_listen_on_a_unix_socket() {
    let folder = Scratch::folder();
    let path = folder.path().join("admin.sock");
    let address = format!("unix:{}", path.display());
    let server = Start { args: &["--admin", &address, "--log", "json"], ..Start::default() }.server();
    assert_eq!(admin_of(&server), address);
    let run = |place: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_threshold"));
        let args = ["bans", "add", "user", "mallory", "--reason", "fraud", "--server", place];
        let output = command.args(args).env_clear().output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    assert_eq!(run(&address).0, 0);
    let (code, error) = run(&server.place);
    assert!(code == 2 && error.contains("404"), "{error}");
    server.signal("TERM");
    assert!(server.wait().0.success());
    assert!(!path.exists());
}

/// The rule for `--http` holds here too: an address that other machines can reach needs the token of those who call it.
#[test]
fn an_open_address_for_operators_needs_an_operators_token() {
    let refused = |variables: &[(&str, &str)]| {
        let start = Start { args: &["--admin", "0.0.0.0:0"], variables, ..Start::default() };
        let output = start.command().output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    for variables in [&[][..], &[CALLER]] {
        let (code, error) = refused(variables);
        assert_eq!(code, Some(2), "{error}");
        assert!(error.contains("can be reached from other machines, but THRESHOLD_ADMIN_TOKEN is not set"), "{error}");
    }
    // A page in a browser cannot use a listener without tokens (DNS rebinding).
    let server = Start { args: &["--admin", "127.0.0.1:0", "--log", "json"], ..Start::default() }.server();
    let mut operators = connect(&admin_of(&server));
    assert_eq!(operators.send("GET", "/v1/bans", &[("host", "evil.example")], "").unwrap().status, 403);
    assert_eq!(operators.send("GET", "/v1/bans", &[], "").unwrap().status, 200);
}

/// 80 connections of one read-only token were served at once, one opened after the other: each was accepted while the one before it had
/// not shown its token yet, and so could still have been closed for it.
///
/// Woken by leaving out `has_place` in `try_take`, and by `Proof::Full` for readers.
#[test]
fn no_more_than_64_connections_to_the_listener_for_operators_are_served_and_readers_have_half() {
    const OPERATOR: &str = "Bearer boss-token-012345";
    const READER: &str = "Bearer eyes-token-012345";
    let variables = [ADMIN, ("THRESHOLD_READ_TOKEN", "eyes-token-012345")];
    let args = ["--admin", "127.0.0.1:0", "--log", "json", "--client-timeout", "10min"];
    let server = Start { args: &args, variables: &variables, ..Start::default() }.server();
    let place = admin_of(&server);
    let locks = |client: &mut Client<TcpStream>, token| {
        let answer = client.send("GET", "/v1/locks", &[("authorization", token)], "");
        answer.map(|answer| assert_eq!(answer.status, 200))
    };
    let ask = |token, waiting| {
        let stream = TcpStream::connect(place.strip_prefix("http://").unwrap()).unwrap();
        stream.set_read_timeout(Some(waiting)).unwrap();
        let mut client = Client::new(stream);
        locks(&mut client, token).map(|()| client)
    };
    let mut readers: Vec<Client<TcpStream>> = (0..80).map(|_| ask(READER, PATIENCE).unwrap()).collect();
    // Those above the half are among the 16 that are closed for others.
    readers.retain_mut(|client| locks(client, READER).is_ok());
    assert_eq!(readers.len(), 48);
    let mut operators: Vec<Client<TcpStream>> = (0..32).map(|_| ask(OPERATOR, PATIENCE).unwrap()).collect();
    readers.retain_mut(|client| locks(client, READER).is_ok());
    assert_eq!(readers.len(), 32);
    assert!(ask(OPERATOR, Duration::from_secs(1)).is_err(), "there was no place");
    // A waiting one is served once another has closed.
    drop(operators.pop());
    ask(OPERATOR, PATIENCE).unwrap();
}
