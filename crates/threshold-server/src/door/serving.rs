//! The doors for their tests: the real ones on a real socket, with the clock in the test's hands.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use threshold_core::Policy;
use threshold_limiter::store::AnyStore;
use threshold_limiter::store::memory::MemoryStore;
use threshold_limiter::{ManualClock, Observer};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

use super::{App, Bounds, Doors, Hosts};
use crate::desk::Desk;
use crate::serve::{Address, Front, Listener, Tokens};

#[expect(dead_code, reason = "the tests of the program use all of it")]
#[path = "../../tests/serve/client.rs"]
pub(super) mod client;
#[path = "../../../threshold-limiter/tests/stores/key_value.rs"]
mod key_value;
pub(super) use client::Client;
pub(crate) use key_value::KeyValueStore;

/// A server in this process for one case after another.
pub(super) struct Serving {
    runtime: Runtime,
    pub(super) clock: Arc<ManualClock>,
    observer: Option<Arc<dyn Observer>>,
    store: fn(&Policy) -> AnyStore,
    pub(super) bounds: Bounds,
    served: Option<Served>,
}

struct Served {
    app: Arc<App>,
    address: SocketAddr,
    client: Client<TcpStream>,
    /// Dropped, it ends the server.
    _stop: watch::Sender<bool>,
}

impl Serving {
    pub(super) fn new() -> Self {
        let (runtime, bounds) = (Runtime::new().unwrap(), Bounds::default());
        let store = |policy: &Policy| MemoryStore::new(policy.memory()).into();
        Self { runtime, clock: Arc::default(), observer: None, store, bounds, served: None }
    }

    /// One on a store that keeps bytes and is never ready at the first poll.
    pub(super) fn on_another_store() -> Self {
        Self { store: |_| AnyStore::other(KeyValueStore::default()), ..Self::new() }
    }

    /// One whose decisions somebody hears of.
    pub(super) fn observed_by(observer: Arc<dyn Observer>) -> Self {
        Self { observer: Some(observer), ..Self::new() }
    }

    /// As [`threshold_core::case::Player::load`].
    pub(super) fn load(&mut self, policy: &str, env: &BTreeMap<String, String>, fresh: bool) -> Result<(), String> {
        let policy = Policy::parse(policy, &|name| env.get(name).cloned()).map_err(|error| error.to_string())?;
        let (policy, _) = crate::jwt::attach(policy).map_err(crate::jwt::describe)?;
        match &self.served {
            Some(served) if !fresh => {
                served.app.desk.swap(policy);
            }
            _ => self.served = Some(self.serve(policy)),
        }
        Ok(())
    }

    /// The one connection to it, for as long as that lasts.
    pub(super) fn client(&mut self) -> &mut Client<TcpStream> {
        &mut self.served.as_mut().expect("a case begins with its policy").client
    }

    /// Another connection to it.
    pub(super) fn connect(&self) -> TcpStream {
        TcpStream::connect(self.served.as_ref().expect("it serves").address).unwrap()
    }

    /// What its doors share.
    pub(super) fn app(&self) -> Arc<App> {
        Arc::clone(&self.served.as_ref().expect("it serves").app)
    }

    /// Serves the same doors at another place, too, until what is returned is dropped.
    pub(super) fn serve_at(
        &self,
        address: &str,
        tls: Option<TlsAcceptor>,
    ) -> (watch::Sender<bool>, Option<SocketAddr>) {
        let address: Address = address.parse().unwrap();
        let listener = self.runtime.block_on(address.listen(false)).unwrap();
        let at = if let Listener::Tcp(tcp) = &listener { tcp.local_addr().ok() } else { None };
        let front = Front { listener, tls, doors: Doors::new(self.app(), Hosts::Any), bounds: self.bounds };
        let (stop, stopped) = watch::channel(false);
        self.runtime.spawn(front.serve(stopped, Duration::ZERO));
        (stop, at)
    }

    /// One that serves this desk.
    pub(super) fn at(desk: Desk) -> Self {
        let mut serving = Self::new();
        serving.served = Some(serving.serve_desk(desk));
        serving
    }

    fn serve(&self, policy: Policy) -> Served {
        let store = (self.store)(&policy);
        let clock = Arc::clone(&self.clock) as _;
        self.serve_desk(match &self.observer {
            Some(observer) => Desk::observed(policy, store, clock, Arc::clone(observer)),
            None => Desk::on(policy, store, clock),
        })
    }

    fn serve_desk(&self, desk: Desk) -> Served {
        let bounds = self.bounds;
        let app = Arc::new(App::new(desk, Tokens::default(), bounds));
        let address: Address = "127.0.0.1:0".parse().unwrap();
        let listener = self.runtime.block_on(address.listen(false)).unwrap();
        let Listener::Tcp(tcp) = &listener else { panic!("an address is no path") };
        let address = tcp.local_addr().unwrap();
        let hosts = Hosts::Own([].into());
        let front = Front { listener, tls: None, doors: Doors::new(Arc::clone(&app), hosts), bounds };
        let (stop, stopped) = watch::channel(false);
        self.runtime.spawn(front.serve(stopped, Duration::ZERO));
        Served { app, address, client: Client::new(TcpStream::connect(address).unwrap()), _stop: stop }
    }
}
