//! `ThresholdLayer::per_ip`: an axum server that is limited by address, over real connections from several addresses.

#![cfg(not(shuttle))]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::body::Body;
use axum::extract::Request;
use axum::extract::connect_info::MockConnectInfo;
use axum::http::StatusCode;
use axum::middleware::map_request;
use axum::{Router, routing::get};
use threshold_limiter::threshold_core::policy::Rule;
use threshold_limiter::tower::{PeerAddr, ThresholdLayer};
use threshold_limiter::{Layer, Limit, Limiter, Policy};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket};
use tower::ServiceExt as _;

fn app(layer: ThresholdLayer) -> Router {
    Router::new().route("/", get(|| async { "hello" })).layer(layer)
}

/// Serves an app on a free port until the test ends.
async fn serve(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await });
    address
}

/// Sends one request from an address of this machine. Returns the whole response.
async fn ask(server: SocketAddr, from: &str) -> String {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(format!("{from}:0").parse().unwrap()).unwrap();
    let mut stream = socket.connect(server).await.unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").await.unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).await.unwrap();
    response
}

async fn status(server: SocketAddr, from: &str) -> String {
    let response = ask(server, from).await;
    response.strip_prefix("HTTP/1.1 ").unwrap().chars().take(3).collect()
}

#[tokio::test]
async fn each_address_has_a_limit_of_its_own() {
    let server = serve(app(ThresholdLayer::per_ip("2/min").unwrap())).await;
    let first = ask(server, "127.0.0.1").await;
    assert!(first.starts_with("HTTP/1.1 200") && first.ends_with("hello"), "{first}");
    assert!(first.to_ascii_lowercase().contains("x-ratelimit-remaining: 1\r\n"), "{first}");
    assert_eq!(status(server, "127.0.0.1").await, "200");
    let denied = ask(server, "127.0.0.1").await;
    assert!(denied.starts_with("HTTP/1.1 429"), "{denied}");
    assert!(denied.to_ascii_lowercase().contains("retry-after: 30\r\n"), "{denied}");
    assert_eq!(status(server, "127.0.0.2").await, "200");
}

#[tokio::test]
async fn the_limit_may_be_a_value() {
    let server = serve(app(ThresholdLayer::per_ip(Limit::per_hour(1)).unwrap())).await;
    assert_eq!(status(server, "127.0.0.1").await, "200");
    assert_eq!(status(server, "127.0.0.1").await, "429");
}

/// A program behind another protocol knows the client's address better than axum.
#[tokio::test]
async fn an_inserted_peer_address_goes_before_axums() {
    async fn insert(mut request: Request) -> Request {
        request.extensions_mut().insert(PeerAddr("203.0.113.7:443".parse().unwrap()));
        request
    }
    let server = serve(app(ThresholdLayer::per_ip("1/min").unwrap()).layer(map_request(insert))).await;
    assert_eq!(status(server, "127.0.0.1").await, "200");
    assert_eq!(status(server, "127.0.0.2").await, "429");
}

/// A user tested an app with `oneshot` and axum's `MockConnectInfo`, which stands for a connection everywhere else in axum, and
/// every request was answered with 500.
#[tokio::test]
async fn a_test_without_a_connection_gives_its_address_as_axum_has_it() {
    let app = app(ThresholdLayer::per_ip("1/min").unwrap());
    let ask = async |from: [u8; 4]| {
        let app = app.clone().layer(MockConnectInfo(SocketAddr::from((from, 1234))));
        app.oneshot(Request::new(Body::empty())).await.unwrap().status()
    };
    assert_eq!(ask([203, 0, 113, 7]).await, StatusCode::OK);
    assert_eq!(ask([203, 0, 113, 7]).await, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(ask([203, 0, 113, 8]).await, StatusCode::OK);
}

/// Collects log lines.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Serves an app without `ConnectInfo`, as `axum::serve(listener, app)` does.
async fn serve_without_addresses(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, app).await });
    address
}

/// A developer wrote `axum::serve(listener, app)` and forgot `ConnectInfo`. Every request was a 429 from the first on, and
/// nothing in a log said why.
#[tokio::test]
async fn a_layer_without_any_source_of_addresses_says_what_to_add() {
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    let _logging = tracing::subscriber::set_default(subscriber);
    let server = serve_without_addresses(app(ThresholdLayer::per_ip("2/min").unwrap())).await;
    for _ in 0..3 {
        let response = ask(server, "127.0.0.1").await;
        assert!(response.starts_with("HTTP/1.1 500"), "{response}");
        assert!(response.contains("\"error\":\"no_client_address\""), "{response}");
        for add in ["into_make_service_with_connect_info::<SocketAddr>()", "PeerAddr", "ThresholdLayer::peer"] {
            assert!(response.contains(add), "{add}: {response}");
        }
    }
    let log = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
    assert_eq!(log.matches(" ERROR ").count(), 1, "{log}");
    assert!(log.contains("no client address") && log.contains("ThresholdLayer::peer"), "{log}");
}

/// A program that was asked for the address and has none, as behind a Unix socket, is not misconfigured: what cannot be
/// counted is denied.
#[tokio::test]
async fn a_request_whose_address_the_application_does_not_know_is_denied() {
    let layer = ThresholdLayer::per_ip("2/min").unwrap().peer(|_| None);
    assert_eq!(status(serve_without_addresses(app(layer)).await, "127.0.0.1").await, "429");
}

/// A rule that counts by something else needs no address.
#[tokio::test]
async fn a_policy_without_addresses_needs_no_source_of_them() {
    let policy = Policy::builder().rule(Rule::builder("all").layer(Layer::Global).per([]).limit("1/min"));
    let layer = ThresholdLayer::new(Arc::new(Limiter::new(policy.build().unwrap()))).unwrap();
    let server = serve_without_addresses(app(layer)).await;
    assert_eq!(status(server, "127.0.0.1").await, "200");
    assert_eq!(status(server, "127.0.0.1").await, "429");
}

/// The error names the rule and says what is wrong with the text.
#[test]
fn a_text_that_is_no_limit_is_an_error() {
    for (text, wrong) in [("100/fortnight", "fortnight"), ("fast", ""), ("", "")] {
        let error = ThresholdLayer::per_ip(text).unwrap_err().to_string();
        assert!(error.contains("per-ip") && error.contains(wrong), "{text}: {error}");
    }
}
