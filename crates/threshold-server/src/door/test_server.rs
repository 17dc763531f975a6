//! A server for tests of the doors: the real ones on a real socket, with a manual clock.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use threshold_core::{Policy, Timestamp};
use threshold_limiter::store::AnyStore;
use threshold_limiter::store::memory::MemoryStore;
use threshold_limiter::{ManualClock, Observer};
use threshold_redis::RedisStore;
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

use super::{App, Audience, Bounds, Doors, Hosts};
use crate::desk::Desk;
use crate::serve::{Address, Guard, Listener, Protocols, Server, Tokens};

#[expect(dead_code, reason = "the tests of the program use all of it")]
#[path = "../../tests/serve/client.rs"]
pub(super) mod client;
#[path = "../../tests/serve/dead_store.rs"]
pub(super) mod dead_store;
#[path = "../../../threshold-limiter/tests/stores/key_value.rs"]
mod key_value;
#[expect(
    dead_code,
    clippy::arithmetic_side_effects,
    reason = "the tests of the store use all of it, and do not continue on an error"
)]
#[path = "../../../threshold-redis/tests/redis/process.rs"]
mod redis_process;
#[path = "../../../threshold-core/tests/support/vectors.rs"]
pub(super) mod vectors;
pub(super) use client::Client;
pub(crate) use key_value::KeyValueStore;
pub(super) use redis_process::LADDERS_IN_SEVERAL_PARTITIONS;
use redis_process::{Cluster, RedisServer};

/// A server in this process for one case after another.
pub(super) struct TestServer {
    runtime: Runtime,
    pub(super) clock: Arc<ManualClock>,
    observer: Option<Arc<dyn Observer>>,
    store: fn(&Policy) -> AnyStore,
    redis: Option<Redis>,
    pub(super) bounds: Bounds,
    running: Option<RunningServer>,
}

/// A Redis whose clock a test sets, and the store of the present case on it.
struct Redis {
    servers: RedisServers,
    store: Option<Arc<RedisStore>>,
}

enum RedisServers {
    Single(RedisServer),
    Cluster(Cluster),
}

impl Redis {
    fn new(servers: RedisServers) -> Self {
        Self { servers, store: None }
    }

    /// Opens a store without records.
    fn open(&mut self, runtime: &Runtime) {
        let store = match &self.servers {
            RedisServers::Single(server) => {
                assert_eq!(server.cli(&["FLUSHALL"]), "OK\n");
                runtime.block_on(server.open())
            }
            RedisServers::Cluster(cluster) => {
                cluster.flush();
                runtime.block_on(cluster.open())
            }
        };
        self.store = Some(Arc::new(store));
    }

    fn set_time(&self, now: Timestamp, runtime: &Runtime) {
        let store = self.store.as_ref().expect("a case begins with its policy");
        // What the last step gives back is given back at its own time.
        runtime.block_on(store.returned());
        match &self.servers {
            RedisServers::Single(server) => server.set_time(now),
            RedisServers::Cluster(cluster) => cluster.set_time(now),
        }
        // Nodes do this twice a second. A case does not wait for it.
        runtime.block_on(store.release_expired()).unwrap();
    }
}

struct RunningServer {
    app: Arc<App>,
    address: SocketAddr,
    client: Client<TcpStream>,
    /// Stops the server when it is dropped.
    _stop: watch::Sender<bool>,
}

impl TestServer {
    pub(super) fn new() -> Self {
        // A runtime of its own, so that blocking clients of a test never wait for the server on the same thread.
        let (runtime, bounds) = (Runtime::new().unwrap(), Bounds::default());
        let store = |policy: &Policy| MemoryStore::new(policy.memory()).into();
        Self { runtime, clock: Arc::default(), observer: None, store, redis: None, bounds, running: None }
    }

    /// A server on a store that keeps bytes and is never ready at the first poll.
    pub(super) fn on_async_store() -> Self {
        Self { store: |_| AnyStore::other(KeyValueStore::default()), ..Self::new() }
    }

    /// A server on a Redis of its own.
    pub(super) fn on_redis() -> Self {
        let server = RedisServers::Single(RedisServer::start_with_clock());
        Self { redis: Some(Redis::new(server)), ..Self::new() }
    }

    /// A server on a Redis Cluster of its own.
    pub(super) fn on_cluster() -> Self {
        let cluster = RedisServers::Cluster(Cluster::start_with_clock());
        Self { redis: Some(Redis::new(cluster)), ..Self::new() }
    }

    /// A server with an observer.
    pub(super) fn observed_by(observer: Arc<dyn Observer>) -> Self {
        Self { observer: Some(observer), ..Self::new() }
    }

    /// Loads a policy, as [`threshold_core::case::Player::load`] does.
    pub(super) fn load(&mut self, policy: &str, env: &BTreeMap<String, String>, fresh: bool) -> Result<(), String> {
        let policy = Policy::parse(policy, &|name| env.get(name).cloned()).map_err(|error| error.to_string())?;
        let (policy, _) = crate::jwt::attach(policy).map_err(crate::jwt::describe)?;
        match &self.running {
            // A case that loads a second policy tests a reload, with what was counted before.
            Some(running) if !fresh => {
                running.app.desk.reload_policy(policy);
            }
            _ => {
                if let Some(redis) = &mut self.redis {
                    redis.open(&self.runtime);
                }
                self.running = Some(self.serve(policy));
            }
        }
        Ok(())
    }

    /// Sets the clock of this server, and that of its Redis.
    pub(super) fn set_time(&self, now: Timestamp) {
        self.clock.set(now);
        if let Some(redis) = &self.redis {
            redis.set_time(now, &self.runtime);
        }
    }

    /// Returns the connection that is opened with the server.
    pub(super) fn client(&mut self) -> &mut Client<TcpStream> {
        &mut self.running.as_mut().expect("a case begins with its policy").client
    }

    /// Opens another connection.
    pub(super) fn connect(&self) -> TcpStream {
        TcpStream::connect(self.running.as_ref().expect("it serves").address).unwrap()
    }

    /// Returns the state that the doors share.
    pub(super) fn app(&self) -> Arc<App> {
        Arc::clone(&self.running.as_ref().expect("it serves").app)
    }

    /// Serves the same doors at another address too, until the returned sender is dropped.
    pub(super) fn serve_at(
        &self,
        address: &str,
        tls: Option<TlsAcceptor>,
    ) -> (watch::Sender<bool>, Option<SocketAddr>) {
        let address: Address = address.parse().unwrap();
        let listener = self.runtime.block_on(address.listen(Guard::Missing("THRESHOLD_TOKEN"))).unwrap();
        let at = if let Listener::Tcp(tcp) = &listener { tcp.local_addr().ok() } else { None };
        let server = Server {
            listener,
            tls,
            protocols: Protocols::Http,
            doors: Doors::new(self.app(), Hosts::Any, Audience::Everyone),
            bounds: self.bounds,
        };
        let (stop, stopped) = watch::channel(false);
        self.runtime.spawn(server.serve(stopped, Duration::ZERO));
        (stop, at)
    }

    /// Serves the gRPC door, until the returned sender is dropped.
    pub(super) fn serve_grpc(&self) -> (watch::Sender<bool>, SocketAddr) {
        let address: Address = "127.0.0.1:0".parse().unwrap();
        let listener = self.runtime.block_on(address.listen(Guard::Missing("THRESHOLD_TOKEN"))).unwrap();
        let Listener::Tcp(tcp) = &listener else { panic!("an address is no path") };
        let at = tcp.local_addr().unwrap();
        let doors = Doors::new(self.app(), Hosts::Any, Audience::Grpc);
        let server = Server { listener, tls: None, protocols: Protocols::Grpc, doors, bounds: self.bounds };
        let (stop, stopped) = watch::channel(false);
        self.runtime.spawn(server.serve(stopped, Duration::ZERO));
        (stop, at)
    }

    /// Serves Redis clients too, until the returned sender is dropped.
    pub(super) fn serve_resp(&self) -> (watch::Sender<bool>, SocketAddr) {
        let address: Address = "127.0.0.1:0".parse().unwrap();
        let listener = self.runtime.block_on(address.listen(Guard::Missing("THRESHOLD_TOKEN"))).unwrap();
        let Listener::Tcp(tcp) = &listener else { panic!("an address is no path") };
        let address = tcp.local_addr().unwrap();
        let doors = Doors::new(self.app(), Hosts::Any, Audience::Callers);
        let (stop, stopped) = watch::channel(false);
        let server = Server { listener, tls: None, protocols: Protocols::Resp, doors, bounds: self.bounds };
        self.runtime.spawn(server.serve(stopped, Duration::ZERO));
        (stop, address)
    }

    /// A server of this desk.
    pub(super) fn at(desk: Desk) -> Self {
        let mut server = Self::new();
        server.running = Some(server.serve_desk(desk));
        server
    }

    fn serve(&self, policy: Policy) -> RunningServer {
        let redis = self.redis.as_ref().and_then(|redis| redis.store.clone());
        let store = redis.map_or_else(|| (self.store)(&policy), AnyStore::other);
        let clock = Arc::clone(&self.clock) as _;
        self.serve_desk(match &self.observer {
            Some(observer) => Desk::observed(policy, store, clock, Arc::clone(observer)),
            None => Desk::with_store(policy, store, clock),
        })
    }

    fn serve_desk(&self, desk: Desk) -> RunningServer {
        let bounds = self.bounds;
        let app = Arc::new(App::new(desk, Tokens::default(), bounds));
        let address: Address = "127.0.0.1:0".parse().unwrap();
        let listener = self.runtime.block_on(address.listen(Guard::Missing("THRESHOLD_TOKEN"))).unwrap();
        let Listener::Tcp(tcp) = &listener else { panic!("an address is no path") };
        let address = tcp.local_addr().unwrap();
        // As a server without tokens, so that every test also passes the check of `Host`.
        let hosts = Hosts::Own([].into());
        let server = Server {
            listener,
            tls: None,
            protocols: Protocols::Http,
            doors: Doors::new(Arc::clone(&app), hosts, Audience::Everyone),
            bounds,
        };
        let (stop, stopped) = watch::channel(false);
        self.runtime.spawn(server.serve(stopped, Duration::ZERO));
        RunningServer { app, address, client: Client::new(TcpStream::connect(address).unwrap()), _stop: stop }
    }
}
