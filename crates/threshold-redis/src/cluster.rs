//! A Redis Cluster: which primary has which slot, and the redirects of one that no longer has it.
//!
//! The slot map is this store's own, because its retries must be: a command is sent again only if a server has said that it was not
//! executed.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ::redis::{Cmd, ErrorKind, RedisError, ServerErrorKind, Value};

use super::clock::ServerClock;
use super::connect::{ConnectError, Connector};
use super::errors::Errors;
use super::server::{Call, CallError, Server, classify, is_broken, jittered};
use super::servers::Replied;
use super::url::Address;
use threshold_limiter::store::StoreErrorKind;

/// The number of slots of every Redis Cluster.
const SLOTS: u16 = 16_384;
/// The number of servers that a call is sent to in turn. Each but the last one has refused it.
const MAX_REDIRECTS: usize = 8;
/// The pause before a call is repeated that a server has refused for now, for example during a failover.
const REFUSED: Duration = Duration::from_millis(5);
/// The pause between two looks at the slots while a primary is away. A failover takes a second or more.
const REFRESH: Duration = Duration::from_millis(100);

/// How long a server that only a redirect has named is kept. A slot takes seconds to move, and a move that is given up leaves no other
/// trace: without this the connection to such a server would stay open.
const ASKED_KEPT: Duration = Duration::from_secs(60);

/// Makes the connector of a server.
pub(super) type Connectors = Box<dyn Fn(&Address) -> Connector + Send + Sync>;

/// The primaries of a Cluster.
pub(super) struct Cluster {
    connectors: Connectors,
    /// The addresses of the URL, which are asked if no primary answers.
    seeds: Vec<Address>,
    slow: Duration,
    topology: Mutex<Topology>,
    is_refreshing: AtomicBool,
    /// The time of the last reply of any primary.
    pub(super) clock: ServerClock,
    pub(super) errors: Errors,
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster").field("seeds", &self.seeds).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct Topology {
    /// The primary of each slot.
    slots: Box<[Option<Arc<Server>>]>,
    servers: HashMap<Address, Arc<Server>>,
    /// The servers that only a redirect has named, and that are dropped in a while.
    asked: HashSet<Address>,
}

impl Topology {
    /// Drops the servers that are neither in the URL nor a primary: those that have left would be connected to for ever.
    fn retain(&mut self, seeds: &[Address]) {
        let Self { slots, servers, asked } = self;
        let owners: HashSet<*const Server> = slots.iter().flatten().map(Arc::as_ptr).collect();
        servers.retain(|address, server| {
            seeds.contains(address) || asked.contains(address) || owners.contains(&Arc::as_ptr(server))
        });
    }
}

impl Cluster {
    /// Asks the servers of a URL for the slots, in their order, until one answers.
    pub(super) async fn connect(
        connectors: Connectors,
        seeds: Vec<Address>,
        slow: Duration,
    ) -> Result<Arc<Self>, ConnectError> {
        let slots = vec![None; usize::from(SLOTS)].into_boxed_slice();
        let cluster = Arc::new(Self {
            connectors,
            seeds,
            slow,
            topology: Mutex::new(Topology { slots, servers: HashMap::new(), asked: HashSet::new() }),
            is_refreshing: AtomicBool::new(false),
            clock: ServerClock::default(),
            errors: Errors::default(),
        });
        let mut failed = None;
        for seed in &cluster.seeds {
            match cluster.learn_first(seed).await {
                Ok(()) => return Ok(cluster),
                Err(error) => failed = Some(error),
            }
        }
        Err(failed.expect("a URL names at least one server"))
    }

    /// Learns the slots from a server of the URL, and connects to all primaries.
    async fn learn_first(&self, seed: &Address) -> Result<(), ConnectError> {
        let server = Server::connect((self.connectors)(seed), self.slow).await?;
        self.topology().servers.insert(seed.clone(), server);
        self.learn(seed).await.map_err(|error| match error.detail() {
            Some(text) if text.contains("cluster support disabled") => ConnectError::NoCluster(seed.clone()),
            _ => ConnectError::at(seed, error),
        })?;
        for server in self.primaries() {
            // The first request should not find connections that are still being opened.
            server.connected().await;
            let Some(address) = server.address().filter(|_| !server.is_connected()) else { continue };
            // A primary that is away comes back or is replaced. One with another secret would be refused for ever.
            if let Err(error @ ConnectError::Secret { .. }) = (self.connectors)(address).open().await {
                return Err(error);
            }
        }
        Ok(())
    }

    /// Sends a call to the primary of a key's slot, and follows redirects.
    pub(super) async fn call(self: &Arc<Self>, key: &str, call: Call<'_>) -> Result<Replied, CallError> {
        let slot = slot_of(key);
        let (mut server, mut is_asking) = (self.owner(slot), false);
        let mut refused = None;
        for _ in 0..MAX_REDIRECTS {
            let Some(current) = server else {
                self.errors.count(StoreErrorKind::ClusterDown, format_args!("no server is known for slot {slot}"));
                self.refresh();
                return Err(CallError::NotExecuted);
            };
            let error = match current.call(call, is_asking).await {
                Ok((value, connection)) => return Ok(Replied { value, server: current, connection }),
                Err(error) => error,
            };
            let (current, error) = refused.insert((current, error));
            match error.kind() {
                ErrorKind::Server(ServerErrorKind::Moved) => {
                    server = self.redirect(error, current);
                    is_asking = false;
                    // Only this slot for now. More slots than this one have moved, if it was a failover.
                    if let Some(server) = &server {
                        self.set_owner(slot, server);
                    }
                    self.refresh();
                }
                // Valid for this call only: the slot is still being moved.
                ErrorKind::Server(ServerErrorKind::Ask) => {
                    server = self.redirect(error, current);
                    is_asking = true;
                    if let Some(server) = &server {
                        self.drop_later(server);
                    }
                }
                ErrorKind::Server(ServerErrorKind::TryAgain) => {
                    self.errors.refused_while_moving();
                    return Err(CallError::Moving);
                }
                ErrorKind::Server(
                    ServerErrorKind::ClusterDown
                    | ServerErrorKind::MasterDown
                    | ServerErrorKind::ReadOnly
                    | ServerErrorKind::BusyLoading,
                ) => {
                    self.refresh();
                    tokio::time::sleep(jittered(REFUSED)).await;
                    (server, is_asking) = (self.owner(slot), false);
                }
                _ => {
                    if is_broken(error) || !current.is_connected() {
                        self.refresh();
                    }
                    current.count(&self.errors, error);
                    return Err(classify(error));
                }
            }
        }
        // Only the last one: the call was sent again after the others.
        if let Some((server, error)) = refused {
            server.count(&self.errors, &error);
        }
        Err(CallError::NotExecuted)
    }

    /// Asks a primary for its time, to notice that it is away.
    pub(super) async fn ask_for_life(self: &Arc<Self>, server: &Arc<Server>) {
        let mut ask = Cmd::new();
        ask.arg("TIME");
        let Err(error) = server.send(&ask).await else { return };
        if is_broken(&error) || !server.is_connected() {
            self.refresh();
        }
        server.count(&self.errors, &error);
    }

    /// Returns the primaries.
    pub(super) fn primaries(&self) -> Vec<Arc<Server>> {
        let topology = self.topology();
        let mut primaries: Vec<Arc<Server>> = Vec::new();
        for server in topology.slots.iter().flatten() {
            // Slots come in long ranges, so the last one found is mostly the same.
            if !primaries.iter().rev().any(|known| Arc::ptr_eq(known, server)) {
                primaries.push(Arc::clone(server));
            }
        }
        primaries
    }

    /// Returns the primary of a key's slot.
    pub(super) fn owner_of(&self, key: &str) -> Option<Arc<Server>> {
        self.owner(slot_of(key))
    }

    fn owner(&self, slot: u16) -> Option<Arc<Server>> {
        self.topology().slots.get(usize::from(slot)).cloned().flatten()
    }

    fn set_owner(&self, slot: u16, server: &Arc<Server>) {
        if let Some(owner) = self.topology().slots.get_mut(usize::from(slot)) {
            *owner = Some(Arc::clone(server));
        }
    }

    /// Returns the server that a redirect names.
    fn redirect(&self, error: &RedisError, from: &Server) -> Option<Arc<Server>> {
        let (address, _) = error.redirect_node()?;
        let (host, port) = address.rsplit_once(':')?;
        // An empty host means the one that was asked.
        let host = if host.is_empty() { from.host()? } else { host.trim_matches(['[', ']']).to_owned() };
        Some(self.server(&Address::Tcp { host, port: port.parse().ok()? }))
    }

    /// Returns the server at an address. A new one is connected in the background, and calls wait for that.
    fn server(&self, address: &Address) -> Arc<Server> {
        let mut topology = self.topology();
        if let Some(known) = topology.servers.get(address) {
            return Arc::clone(known);
        }
        let server = Server::open((self.connectors)(address), self.slow);
        topology.servers.insert(address.clone(), Arc::clone(&server));
        server
    }

    /// Drops a server in a while, unless it is a primary by then. If it is still asked, the next redirect connects to it again.
    fn drop_later(self: &Arc<Self>, server: &Arc<Server>) {
        let Some(address) = server.address().cloned() else { return };
        // Most redirects name a primary of other slots.
        if self.topology().slots.iter().flatten().any(|owner| Arc::ptr_eq(owner, server)) {
            return;
        }
        if !self.topology().asked.insert(address.clone()) {
            return;
        }
        let cluster = Arc::downgrade(self);
        tokio::spawn(async move {
            tokio::time::sleep(ASKED_KEPT).await;
            let Some(cluster) = cluster.upgrade() else { return };
            let mut topology = cluster.topology();
            topology.asked.remove(&address);
            topology.retain(&cluster.seeds);
        });
    }

    /// Looks at the slots again in the background, until every slot has a primary with a connection.
    fn refresh(self: &Arc<Self>) {
        if self.is_refreshing.swap(true, Ordering::AcqRel) {
            return;
        }
        let cluster = Arc::downgrade(self);
        tokio::spawn(async move {
            // Ends when the store is dropped.
            while let Some(cluster) = cluster.upgrade() {
                cluster.learn_from_any().await;
                // A slot without a connection may have a new primary in a moment.
                let complete = {
                    let topology = cluster.topology();
                    topology.slots.iter().all(|owner| owner.as_ref().is_some_and(|owner| owner.is_connected()))
                };
                if complete {
                    cluster.is_refreshing.store(false, Ordering::Release);
                    return;
                }
                drop(cluster);
                tokio::time::sleep(jittered(REFRESH)).await;
            }
        });
    }

    /// Learns the slots from a primary with a connection, or else from a server of the URL.
    async fn learn_from_any(&self) {
        let connected = self.primaries().into_iter().filter(|server| server.is_connected());
        let known = connected.filter_map(|server| server.address().cloned());
        for address in known.chain(self.seeds.clone()).collect::<Vec<_>>() {
            if self.learn(&address).await.is_ok() {
                return;
            }
        }
    }

    /// Asks a server for the slots.
    async fn learn(&self, address: &Address) -> Result<(), RedisError> {
        let server = self.server(address);
        let mut ask = Cmd::new();
        ask.arg("CLUSTER").arg("SLOTS");
        // Awaited by `call` only for a server that was never connected.
        let (reply, _) = server.call(Call::Command(&ask), false).await?;
        let ranges = parse(reply, &server).ok_or((ErrorKind::Parse, "CLUSTER SLOTS was answered in an unknown way"))?;
        if ranges.is_empty() {
            return Err((ErrorKind::Client, "the server is a node of a Cluster without slots").into());
        }
        let owners: Vec<_> =
            ranges.into_iter().map(|(first, last, owner)| (first, last, self.server(&owner))).collect();
        let mut topology = self.topology();
        for (first, last, owner) in &owners {
            for slot in *first..=*last {
                if let Some(known) = topology.slots.get_mut(usize::from(slot)) {
                    *known = Some(Arc::clone(owner));
                }
            }
        }
        topology.retain(&self.seeds);
        Ok(())
    }

    fn topology(&self) -> MutexGuard<'_, Topology> {
        // A poisoned lock is safe to use: each slot and server is set in one step.
        self.topology.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Parses the answer to `CLUSTER SLOTS`: the first and the last slot of each range, and the address of its primary.
fn parse(reply: Value, asked: &Server) -> Option<Vec<(u16, u16, Address)>> {
    let Value::Array(ranges) = reply else { return None };
    let number = |value: Option<&Value>| match value {
        Some(Value::Int(number)) => u16::try_from(*number).ok(),
        _ => None,
    };
    let range = |range: Value| {
        let Value::Array(parts) = range else { return None };
        let Some(Value::Array(primary)) = parts.get(2) else { return None };
        let host = match primary.first() {
            Some(Value::BulkString(host)) if !host.is_empty() && host != b"?" => {
                String::from_utf8(host.clone()).ok()?
            }
            // The server does not know its own address: it is the one that was asked.
            _ => asked.host()?,
        };
        let last = number(parts.get(1)).filter(|last| *last < SLOTS)?;
        Some((number(parts.first())?, last, Address::Tcp { host, port: number(primary.get(1))? }))
    };
    ranges.into_iter().map(range).collect()
}

/// Returns the slot of a key: that of the text between its braces.
fn slot_of(key: &str) -> u16 {
    let tag = key.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map(|(tag, _)| tag);
    crc16(tag.filter(|tag| !tag.is_empty()).unwrap_or(key).as_bytes()).checked_rem(SLOTS).unwrap_or(0)
}

/// CRC-16/XMODEM, by which Redis assigns keys to slots.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| {
        (0..8).fold(
            crc ^ (u16::from(*byte) << 8),
            |crc, _| if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 },
        )
    })
}

#[cfg(test)]
mod tests {
    use threshold_core::KeyId;

    use super::*;
    use crate::connect::{Certificates, ConnectOptions};
    use crate::secret::SecretIds;
    use crate::url::RedisUrl;

    /// From the specification of Redis Cluster, and from `CLUSTER KEYSLOT`.
    #[test]
    fn slots_are_those_of_redis() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
        assert_eq!(slot_of("foo"), 12182);
        assert_eq!(slot_of("th:{foo}b:0123"), 12182);
        // Empty braces are a part of the key.
        assert_eq!(slot_of("{}foo"), crc16(b"{}foo") % SLOTS);
        assert_eq!(slot_of("{user1000}.following"), slot_of("{user1000}.followers"));
    }

    /// A slot began to move to a new server, and the move was given up. The connection to that server stayed open for ever.
    #[tokio::test(start_paused = true)]
    async fn a_server_that_only_a_redirect_names_is_dropped_after_a_while() {
        let url: RedisUrl = "redis+cluster://127.0.0.1:1".parse().unwrap();
        let options = ConnectOptions::new(&url, &Certificates::default()).unwrap();
        let secrets = SecretIds { present: KeyId::from_u32(1), old: None };
        let cluster = Arc::new(Cluster {
            connectors: Box::new(move |address| Connector::to(options.clone(), address.clone(), secrets)),
            seeds: url.seeds.clone(),
            slow: REFRESH,
            topology: Mutex::new(Topology {
                slots: vec![None; usize::from(SLOTS)].into_boxed_slice(),
                servers: HashMap::new(),
                asked: HashSet::new(),
            }),
            is_refreshing: AtomicBool::new(false),
            clock: ServerClock::default(),
            errors: Errors::default(),
        });
        // Ports on which nothing listens: a seed, the primary of a slot, and a server that is asked for another slot.
        let place = |port| Address::Tcp { host: "127.0.0.1".to_owned(), port };
        let [_, primary, asked] = [1, 2, 3].map(|port| cluster.server(&place(port)));
        cluster.set_owner(7, &primary);
        cluster.drop_later(&primary);
        cluster.drop_later(&asked);
        let known = || {
            let mut known: Vec<Address> = cluster.topology().servers.keys().cloned().collect();
            known.sort();
            known
        };
        // The slots are learned again meanwhile.
        cluster.topology().retain(&cluster.seeds);
        assert_eq!(known(), [place(1), place(2), place(3)]);
        tokio::time::sleep(ASKED_KEPT + REFRESH).await;
        assert_eq!(known(), [place(1), place(2)]);
    }
}
