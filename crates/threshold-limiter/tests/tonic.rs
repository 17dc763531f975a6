//! The layer in front of tonic, over real HTTP/2: what a gRPC client is told, and what its calls hold.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use threshold_core::Timestamp;
use threshold_limiter::tower::ThresholdLayer;
use threshold_limiter::{Limiter, ManualClock, Policy};
use tokio::sync::oneshot;
use tonic::transport::server::{TcpConnectInfo, TcpIncoming};
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Code, Request, Response, Status, Streaming};
use tonic_health::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};
use tonic_health::server::{HealthReporter, health_reporter};

const SERVICE: &str = "lamps";

/// A server on a socket of its own, until this is dropped.
struct World {
    address: SocketAddr,
    reporter: HealthReporter,
    _stop: oneshot::Sender<()>,
}

impl World {
    async fn new(rule: &str) -> Self {
        let identity = "[identity]\ntrusted_proxies = [\"127.0.0.1/32\"]\nuser = \"header:x-user\"\n";
        let policy = format!("{identity}[[rule]]\nname = \"calls\"\nper = [\"user\"]\n{rule}");
        let policy = Policy::parse(&policy, &|_| None).unwrap();
        let limiter = Limiter::builder(policy).clock(ManualClock::new(Timestamp::from_secs(1_767_225_600))).build();
        let layer = ThresholdLayer::new(Arc::new(limiter))
            .unwrap()
            .peer(|parts| parts.extensions.get::<TcpConnectInfo>().and_then(TcpConnectInfo::remote_addr));
        let (reporter, health) = health_reporter();
        reporter.set_service_status(SERVICE, ServingStatus::Serving).await;
        let incoming = TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = incoming.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel();
        let server = Server::builder().layer(layer).add_service(health);
        tokio::spawn(server.serve_with_incoming_shutdown(incoming, async { drop(stopped.await) }));
        Self { address, reporter, _stop: stop }
    }

    async fn client(&self) -> Client {
        let endpoint = Endpoint::from_shared(format!("http://{}", self.address)).unwrap();
        Client(HealthClient::new(endpoint.connect().await.unwrap()))
    }
}

/// One connection.
#[derive(Clone)]
struct Client(HealthClient<Channel>);

impl Client {
    async fn check(&mut self, user: &'static str) -> Result<Response<HealthCheckResponse>, Status> {
        self.0.check(asked_by(user)).await
    }

    async fn watch(&mut self, user: &'static str) -> Result<Streaming<HealthCheckResponse>, Status> {
        self.0.watch(asked_by(user)).await.map(Response::into_inner)
    }

    /// The code of a call.
    async fn code(&mut self, user: &'static str) -> Code {
        self.check(user).await.map_or_else(|status| status.code(), |_| Code::Ok)
    }
}

fn asked_by(user: &'static str) -> Request<HealthCheckRequest> {
    let mut request = Request::new(HealthCheckRequest { service: SERVICE.to_owned() });
    request.metadata_mut().insert("x-user", user.parse().unwrap());
    request
}

#[tokio::test]
async fn who_is_over_is_told_so_in_grpc() {
    let rule =
        "limit = \"2/h\"\nmatch = { path = \"/grpc.health.v1.Health/*\" }\nmessage = \"100 % used, après tout\"\n";
    let world = World::new(rule).await;
    let mut client = world.client().await;
    for left in ["1", "0"] {
        let answer = client.check("ada").await.unwrap();
        assert_eq!(answer.metadata().get("x-ratelimit-remaining").unwrap(), left);
        assert_eq!(answer.into_inner().status, ServingStatus::Serving as i32);
    }
    let status = client.check("ada").await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::ResourceExhausted, "100 % used, après tout"));
    let told = |name: &str| status.metadata().get(name).unwrap().to_str().unwrap().to_owned();
    assert_eq!((told("x-ratelimit-limit"), told("x-ratelimit-remaining")), ("2".to_owned(), "0".to_owned()));
    assert!(told("retry-after").parse::<u64>().unwrap() > 0);
    assert!(told("ratelimit-policy").contains("calls"), "{status:?}");
    // A call that would stream is refused in the same words, and another user has a limit of her own.
    assert_eq!(client.watch("ada").await.unwrap_err().code(), Code::ResourceExhausted);
    assert_eq!(client.code("bob").await, Code::Ok);
}

const ONE_AT_ONCE: &str = "limit = \"1\"\nalgorithm = \"concurrency\"\n";

#[tokio::test]
async fn a_stream_is_held_until_it_ends() {
    let mut world = World::new(ONE_AT_ONCE).await;
    let mut client = world.client().await;
    let mut stream = client.watch("ada").await.unwrap();
    assert_eq!(stream.message().await.unwrap().unwrap().status, ServingStatus::Serving as i32);
    assert_eq!(client.code("ada").await, Code::ResourceExhausted);
    assert_eq!(client.code("bob").await, Code::Ok);
    world.reporter.set_service_status(SERVICE, ServingStatus::NotServing).await;
    assert_eq!(stream.message().await.unwrap().unwrap().status, ServingStatus::NotServing as i32);
    assert_eq!(client.code("ada").await, Code::ResourceExhausted, "a message is not the end");
    world.reporter.clear_service_status(SERVICE).await;
    assert!(stream.message().await.unwrap().is_none());
    assert_eq!(client.code("ada").await, Code::NotFound, "the call is served: it is the service that is gone");
}

/// Calls until one is served. The server learns of an end a moment after the client has made it.
async fn served_at_last(client: &mut Client) {
    let asking = async { while client.code("ada").await == Code::ResourceExhausted {} };
    tokio::time::timeout(Duration::from_secs(60), asking).await.expect("the place is never given back");
}

#[tokio::test]
async fn a_call_that_is_dropped_holds_nothing() {
    let world = World::new(ONE_AT_ONCE).await;
    let mut client = world.client().await;
    let stream = client.watch("ada").await.unwrap();
    assert_eq!(client.code("ada").await, Code::ResourceExhausted);
    drop(stream);
    served_at_last(&mut client).await;
}

#[tokio::test]
async fn a_connection_that_is_dropped_holds_nothing() {
    let world = World::new(ONE_AT_ONCE).await;
    let (mut client, mut other) = (world.client().await, world.client().await);
    let stream = client.watch("ada").await.unwrap();
    assert_eq!(other.code("ada").await, Code::ResourceExhausted);
    drop((stream, client));
    served_at_last(&mut other).await;
}

/// An answer gives its place back when it ends, so that a client who calls one after the other never meets itself.
#[tokio::test]
async fn one_after_the_other_is_one_at_once() {
    let world = World::new(ONE_AT_ONCE).await;
    let mut client = world.client().await;
    for call in 0..200 {
        assert_eq!(client.code("ada").await, Code::Ok, "call {call}");
    }
}
