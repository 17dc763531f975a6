//! The servers of a store: one, or the primaries of a Cluster. Every call goes to the server of its key.

use std::collections::HashMap;
use std::sync::Arc;

use ::redis::{Cmd, Value};
use futures_util::future::join_all;
use threshold_core::Timestamp;

use super::clock::ServerClock;
use super::cluster::Cluster;
use super::errors::Errors;
use super::reply;
use super::server::{Call, CallError, Latest, ScriptCall, Server, ServerScript, classify};
use threshold_limiter::store::StoreError;

/// The largest number of primaries that are asked for a sign of life in one look. The calls of an idle node have a bound.
const MOST_ASKED: usize = 6;

/// Looks at the primaries of a Cluster that have answered nothing for a moment. Without them a node without requests would not notice
/// that a primary has gone which none of its own calls needs.
#[derive(Debug, Default)]
pub(super) struct Looks {
    /// The number of replies of each server at the last look.
    replies: HashMap<usize, u64>,
    is_second: bool,
    /// The place after the last server that was asked.
    next: usize,
}

impl Looks {
    /// Asks in the background, with every second call: a heartbeat must not wait for a server that hangs.
    pub(super) fn begin(&mut self, servers: &Servers) {
        let Servers::Cluster(cluster) = servers else { return };
        self.is_second = !self.is_second;
        if self.is_second {
            return;
        }
        let primaries = cluster.primaries();
        let turns = primaries.len().min(MOST_ASKED);
        let before = std::mem::take(&mut self.replies);
        for server in primaries.iter().cycle().skip(self.next).take(turns) {
            let (id, replies) = (Arc::as_ptr(server).addr(), server.replies());
            // One without a connection is known to be away.
            if server.is_connected() && before.get(&id).is_none_or(|before| *before == replies) {
                let (cluster, server) = (Arc::clone(cluster), Arc::clone(server));
                tokio::spawn(async move { cluster.ask_for_life(&server).await });
            }
        }
        self.next = self.next.wrapping_add(turns).checked_rem(primaries.len()).unwrap_or(0);
        self.replies = primaries.iter().map(|server| (Arc::as_ptr(server).addr(), server.replies())).collect();
    }
}

/// A reply, and the server that has sent it.
#[derive(Debug)]
pub(super) struct Replied {
    pub(super) value: Value,
    pub(super) server: Arc<Server>,
    /// The number of the connection over which it came.
    pub(super) connection: u64,
}

/// The servers of a store.
#[derive(Debug, Clone)]
pub(super) enum Servers {
    Single(Arc<Server>),
    Cluster(Arc<Cluster>),
}

impl Servers {
    /// Runs a script on the server of its keys, which are all in one slot. It is sent again only if a server has refused it, so it
    /// is executed at most once.
    pub(super) async fn run(
        &self,
        script: &ServerScript,
        keys: &[String],
        args: &[Vec<u8>],
    ) -> Result<Value, CallError> {
        Ok(self.run_until(script, keys, args, Latest::Untold).await?.value)
    }

    /// Runs a script that is told until when it may be executed.
    pub(super) async fn run_until(
        &self,
        script: &ServerScript,
        keys: &[String],
        args: &[Vec<u8>],
        latest: Latest,
    ) -> Result<Replied, CallError> {
        self.run_script(ScriptCall { script, keys, args, latest, over: None }).await
    }

    /// Runs a script.
    pub(super) async fn run_script(&self, call: ScriptCall<'_>) -> Result<Replied, CallError> {
        let key = call.keys.first().map_or("", String::as_str);
        self.call(key, Call::Script(call)).await
    }

    /// Sends a command to the server of a key.
    pub(super) async fn send(&self, key: &str, command: &Cmd) -> Result<Value, CallError> {
        Ok(self.call(key, Call::Command(command)).await?.value)
    }

    async fn call(&self, key: &str, call: Call<'_>) -> Result<Replied, CallError> {
        match self {
            Self::Single(server) => {
                let called = server.call(call, false).await;
                let (value, connection) = called.map_err(|error| {
                    server.count(&server.errors, &error);
                    classify(&error)
                })?;
                Ok(Replied { value, server: Arc::clone(server), connection })
            }
            Self::Cluster(cluster) => cluster.call(key, call).await,
        }
    }

    /// Reads the values of keys in any slots.
    pub(super) async fn read_all(&self, keys: &[String]) -> Result<Vec<Option<Vec<u8>>>, StoreError> {
        let reads = keys.iter().map(|key| async move {
            let mut read = Cmd::new();
            read.arg("GET").arg(key);
            match self.send(key, &read).await? {
                Value::BulkString(bytes) => Ok(Some(bytes)),
                _ => Ok(None),
            }
        });
        join_all(reads).await.into_iter().collect()
    }

    /// Asks a server for its time.
    pub(super) async fn time(&self) -> Result<(), StoreError> {
        let mut ask = Cmd::new();
        ask.arg("TIME");
        let server = self.all().into_iter().find(|server| server.is_connected()).ok_or(StoreError::Unavailable)?;
        let value = server.send(&ask).await.map_err(|error| classify(&error))?;
        let now = reply::time(&mut reply::array(value)?.into_iter())?;
        self.heard(&server, now);
        Ok(())
    }

    /// Takes over the time of a reply that a server has just sent.
    pub(super) fn heard(&self, server: &Server, now: Timestamp) {
        server.clock.heard(now);
        // The clock of the store, which the single server has itself.
        if let Self::Cluster(cluster) = self {
            cluster.clock.heard(now);
        }
    }

    /// Returns a number for the server of a key, which no other server has at the same time.
    pub(super) fn number_at(&self, key: &str) -> usize {
        match self {
            Self::Single(_) => 0,
            Self::Cluster(cluster) => cluster.owner_of(key).map_or(0, |server| Arc::as_ptr(&server).addr()),
        }
    }

    /// Returns the number of the connection to the server of a key, or of the last one to it.
    pub(super) fn connection_at(&self, key: &str) -> Option<u64> {
        match self {
            Self::Single(server) => Some(server.connection_number()),
            Self::Cluster(cluster) => Some(cluster.owner_of(key)?.connection_number()),
        }
    }

    /// Returns the present time of the server of a key; `None` before its first reply.
    pub(super) fn now_at(&self, key: &str) -> Option<Timestamp> {
        match self {
            Self::Single(server) => server.clock.now(),
            Self::Cluster(cluster) => cluster.owner_of(key)?.clock.now(),
        }
    }

    /// Returns the clock of the store. That of a Cluster follows the primary that has answered last.
    pub(super) fn clock(&self) -> &ServerClock {
        match self {
            Self::Single(server) => &server.clock,
            Self::Cluster(cluster) => &cluster.clock,
        }
    }

    /// Returns the errors that calls have ended with.
    pub(super) fn errors(&self) -> &Errors {
        match self {
            Self::Single(server) => &server.errors,
            Self::Cluster(cluster) => &cluster.errors,
        }
    }

    /// Returns every server that is known now: one, or the primaries of a Cluster.
    pub(super) fn all(&self) -> Vec<Arc<Server>> {
        match self {
            Self::Single(server) => vec![Arc::clone(server)],
            Self::Cluster(cluster) => cluster.primaries(),
        }
    }

    /// Returns whether a command can change records of several partitions in one step.
    pub(super) fn is_single(&self) -> bool {
        matches!(self, Self::Single(_))
    }

    /// Returns whether there is a connection to every server.
    pub(super) fn is_connected(&self) -> bool {
        self.all().iter().all(|server| server.is_connected())
    }

    /// Returns what is wrong at this moment, for operators: a server without a connection, or errors of the last moments.
    pub(super) fn present_problem(&self) -> Option<String> {
        self.all().iter().find_map(|server| server.absence()).or_else(|| self.errors().present())
    }

    /// Returns the last error of a server, for operators.
    pub(super) fn problem(&self) -> Option<String> {
        self.all().iter().find_map(|server| server.problem())
    }
}
