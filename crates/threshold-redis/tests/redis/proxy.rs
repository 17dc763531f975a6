//! A TCP proxy between a node and a server, which delays, loses or refuses what passes through it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::{mpsc, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;

use crate::process::RedisServer;

/// What the proxy does with the traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Forward,
    /// The server gets the next request, and the connection is closed in place of its answer. Then everything passes again.
    CutOneReply,
    /// The server gets every request, and no answer ever arrives.
    SwallowReplies,
    /// Connections are closed, and new ones as soon as they are made.
    Refuse,
}

/// A running proxy. It ends with the test.
pub(crate) struct Proxy {
    address: SocketAddr,
    mode: Arc<watch::Sender<Mode>>,
    delay: Arc<AtomicU64>,
    calls: Arc<AtomicU64>,
    accepts: AbortHandle,
}

impl Proxy {
    /// Starts a proxy in front of a server.
    pub(crate) async fn start(server: &RedisServer) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, socket) = (listener.local_addr().unwrap(), server.socket());
        let (mode, delay) = (Arc::new(watch::Sender::new(Mode::Forward)), Arc::new(AtomicU64::new(0)));
        let calls = Arc::new(AtomicU64::new(0));
        let link = Link { mode: Arc::clone(&mode), delay: Arc::clone(&delay), calls: Arc::clone(&calls) };
        let accepts = tokio::spawn(accept(listener, socket, link)).abort_handle();
        Self { address, mode, delay, calls, accepts }
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://{}", self.address)
    }

    pub(crate) fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
    }

    /// Sets how much later everything arrives, in each direction.
    pub(crate) fn set_delay(&self, delay: Duration) {
        self.delay.store(u64::try_from(delay.as_millis()).unwrap(), Ordering::Relaxed);
    }

    /// Returns how many calls of scripts have passed.
    pub(crate) fn script_calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepts.abort();
    }
}

#[derive(Clone)]
struct Link {
    mode: Arc<watch::Sender<Mode>>,
    delay: Arc<AtomicU64>,
    calls: Arc<AtomicU64>,
}

async fn accept(listener: TcpListener, socket: PathBuf, link: Link) {
    // Dropped with this task, which ends all connections.
    let mut connections = JoinSet::new();
    loop {
        let Ok((client, _)) = listener.accept().await else { return };
        let (socket, link) = (socket.clone(), link.clone());
        connections.spawn(async move {
            let mut refused = link.mode.subscribe();
            tokio::select! {
                _ = refused.wait_for(|mode| *mode == Mode::Refuse) => {}
                () = serve(client, socket, link) => {}
            }
        });
        while connections.try_join_next().is_some() {}
    }
}

async fn serve(client: TcpStream, socket: PathBuf, link: Link) {
    let Ok(server) = UnixStream::connect(socket).await else { return };
    client.set_nodelay(true).unwrap();
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    // The first end of one direction ends the connection.
    tokio::select! {
        () = copy(from_client, to_server, &link, false) => {}
        () = copy(from_server, to_client, &link, true) => {}
    }
}

/// Copies one direction. Chunks that follow each other are delayed at the same time, as on a long way.
async fn copy(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    Link { mode, delay, calls }: &Link,
    replies: bool,
) {
    let (sender, mut receiver) = mpsc::channel::<(Instant, Vec<u8>)>(1_024);
    let read = async {
        let mut buffer = vec![0; 65_536];
        loop {
            let Ok(length @ 1..) = from.read(&mut buffer).await else { return };
            if !replies {
                // A name that two chunks share is not counted. That is rare.
                let count = buffer[..length].windows(7).filter(|name| name == b"EVALSHA").count();
                calls.fetch_add(u64::try_from(count).unwrap(), Ordering::Relaxed);
            }
            let delay = Duration::from_millis(delay.load(Ordering::Relaxed));
            if sender.send((Instant::now() + delay, buffer[..length].to_vec())).await.is_err() {
                return;
            }
        }
    };
    let write = async {
        while let Some((at, chunk)) = receiver.recv().await {
            tokio::time::sleep_until(at).await;
            let present = *mode.borrow();
            match present {
                Mode::CutOneReply if replies => {
                    mode.send_replace(Mode::Forward);
                    return;
                }
                Mode::SwallowReplies if replies => continue,
                _ => {}
            }
            if to.write_all(&chunk).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = read => {}
        () = write => {}
    }
}
