//! `redis-server` processes of a test: a single server on a socket, or a Cluster. They end with the test.

use std::collections::BTreeSet;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use threshold_core::{Secret, Timestamp};
use threshold_redis::{RedisOptions, RedisStore};

/// Loads a memory allocator that does not ask for the time before libfaketime is ready, and libfaketime.
const PRELOAD: &str = "libfaketime.so.1:libtcmalloc_minimal.so.4";
/// Where Debian installs them.
const LIBRARIES: &str =
    "/usr/lib/x86_64-linux-gnu/faketime:/usr/lib/x86_64-linux-gnu:/usr/lib/aarch64-linux-gnu/faketime";
/// The end of every waiting loop. Far longer than any wait takes, so that a busy machine fails no test.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// The options of a server that keeps nothing when it is killed.
const FORGETTING: [&str; 4] = ["--save", "", "--appendonly", "no"];
/// The options of a server that keeps everything that it has answered. With another `appendfsync` Redis answers before it writes while an
/// earlier write is flushed to the disk.
const KEEPING: [&str; 6] = ["--save", "", "--appendonly", "yes", "--appendfsync", "always"];

/// A running server.
pub(crate) struct RedisServer {
    process: Child,
    folder: PathBuf,
    command: Command,
}

/// How a server is started.
#[derive(Default)]
struct Setup<'a> {
    arguments: &'a [&'a str],
    /// What libfaketime reads first: an offset such as `+3600`, or a time at which the clock stands still.
    clock: Option<&'a str>,
    /// The state of a node of a Cluster.
    nodes: Option<&'a str>,
}

impl RedisServer {
    /// Starts a server on the system's clock, without persistence.
    pub(crate) fn start() -> Self {
        Self::launch(&Setup { arguments: &FORGETTING, ..Setup::default() }).unwrap()
    }

    /// Starts a server that keeps its data when it is killed, and loads so many keys a second when it starts again.
    pub(crate) fn start_with_data(keys_per_second: u32) -> Self {
        let delay = (1_000_000 / keys_per_second).to_string();
        let loading = ["--key-load-delay", &delay, "--loading-process-events-interval-bytes", "1024"];
        let arguments = [&KEEPING[..], &loading].concat();
        Self::launch(&Setup { arguments: &arguments, ..Setup::default() }).unwrap()
    }

    /// Starts a server whose clock stands still and is set by [`set_time`](Self::set_time).
    pub(crate) fn start_with_clock() -> Self {
        let arguments = FORGETTING;
        let clock = Some("2026-01-01 00:00:00");
        Self::launch(&Setup { arguments: &arguments, clock, ..Setup::default() }).unwrap()
    }

    fn launch(setup: &Setup<'_>) -> Result<Self, String> {
        let folder = std::env::temp_dir().join(format!("threshold-redis-{}-{:x}", std::process::id(), rand_u64()));
        fs::create_dir(&folder).unwrap();
        let mut command = Command::new("redis-server");
        // A Cluster gives a TCP port of its own after this one.
        command.args(["--port", "0", "--unixsocket", "socket"]).args(setup.arguments);
        command.current_dir(&folder).stdout(Stdio::null()).stderr(Stdio::null());
        if let Some(clock) = setup.clock {
            fs::write(folder.join("time"), clock).unwrap();
            command
                .env("LD_PRELOAD", PRELOAD)
                .env("LD_LIBRARY_PATH", LIBRARIES)
                .env("FAKETIME_TIMESTAMP_FILE", "time")
                .env("FAKETIME_NO_CACHE", "1")
                .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
                .env("TZ", "UTC");
        }
        if let Some(nodes) = setup.nodes {
            fs::write(folder.join("nodes.conf"), nodes).unwrap();
        }
        match spawn(&mut command, &folder) {
            Ok(process) => Ok(Self { process, folder, command }),
            Err(error) => {
                let _ = fs::remove_dir_all(&folder);
                Err(error)
            }
        }
    }

    /// Kills the server, as a power cut does.
    pub(crate) fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Suspends the server, as a machine without processor time does. Calls wait in its sockets until [`go_on`](Self::go_on).
    pub(crate) fn suspend(&self) {
        signal(&self.process, "STOP");
    }

    /// Lets a suspended server go on.
    pub(crate) fn go_on(&self) {
        signal(&self.process, "CONT");
    }

    /// Starts the server again, on the same socket, with the data that it has persisted.
    pub(crate) fn restart(&mut self) {
        self.process = spawn(&mut self.command, &self.folder).unwrap();
    }

    /// Returns the URL of a store on this server.
    pub(crate) fn url(&self) -> String {
        format!("redis+unix://{}", self.socket().display())
    }

    /// Returns the path of its socket.
    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.join("socket")
    }

    /// Opens a store as a node does.
    pub(crate) async fn open(&self) -> RedisStore {
        open(self.url()).await
    }

    /// Sets the clock of a server that was started with one.
    pub(crate) fn set_time(&self, now: Timestamp) {
        let time = jiff::Timestamp::from_microsecond(i64::try_from(now.micros()).unwrap()).unwrap();
        // Half a microsecond more: libfaketime reads a fraction as a floating-point number, and the server cuts what it makes of it.
        self.set_clock(&time.strftime("%Y-%m-%d %H:%M:%S%.6f5").to_string());
    }

    /// Sets what libfaketime reads: a time, or an offset from the system's clock.
    fn set_clock(&self, text: &str) {
        // libfaketime reads the file at every call, so it must never see half of it.
        let (new, file) = (self.folder.join("time.new"), self.folder.join("time"));
        fs::write(&new, text).unwrap();
        fs::rename(new, file).unwrap();
    }

    /// Runs `redis-cli` and returns what it prints.
    pub(crate) fn cli(&self, arguments: &[&str]) -> String {
        let output = self.cli_command(arguments).output().expect("redis-cli is installed");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Returns a `redis-cli` with these arguments, for a test that runs it beside other things.
    pub(crate) fn cli_command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("redis-cli");
        command.arg("-s").arg(self.socket()).args(arguments);
        command
    }

    /// Returns a field of `INFO`.
    pub(crate) fn info(&self, field: &str) -> Option<String> {
        let text = self.cli(&["INFO", "everything"]);
        let mut fields = text.lines().filter_map(|line| line.trim().split_once(':'));
        fields.find(|(name, _)| *name == field).map(|(_, value)| value.to_owned())
    }

    /// Returns how often clients have called scripts.
    pub(crate) fn script_calls(&self) -> u64 {
        let calls = |command: &str| {
            let stats = self.info(&format!("cmdstat_{command}"))?;
            stats.split(',').find_map(|field| field.strip_prefix("calls="))?.parse::<u64>().ok()
        };
        calls("evalsha").unwrap_or(0) + calls("eval").unwrap_or(0)
    }

    /// Returns the keys without a time to live, except those that docs/formats.md names.
    pub(crate) fn endless_keys(&self) -> Vec<String> {
        let script = "local found = {} for _, key in ipairs(redis.call('KEYS', '*')) do \
                      if redis.call('PTTL', key) == -1 then found[#found + 1] = key end end return found";
        let named = ["th:{banned", "th:{locked", "th:{control}"];
        let keys = self.cli(&["EVAL", script, "0"]);
        let is_named = |key: &str| key.ends_with("}head") || named.iter().any(|name| key.starts_with(name));
        let keys = keys.lines().filter(|key| !key.is_empty() && !is_named(key));
        keys.map(str::to_owned).collect()
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Sends a signal to a process of this test.
pub(crate) fn signal(process: &Child, name: &str) {
    let sent = Command::new("kill").args(["-s", name, &process.id().to_string()]).status().unwrap();
    assert!(sent.success(), "{name}: {sent}");
}

pub(crate) fn secret(byte: u8) -> Secret {
    Secret::new(&[byte; 32]).unwrap()
}

/// Opens a store on these servers.
async fn open(url: String) -> RedisStore {
    // Long: these tests are about answers, and a busy machine must not turn them into failures of the store.
    let options = RedisOptions::new(url.parse().unwrap(), secret(9)).deadline(Duration::from_secs(20));
    // Every write is compared with core's.
    let options = options.compare_one_in(1);
    RedisStore::open(options).await.unwrap()
}

/// Starts a server and waits until it answers.
fn spawn(command: &mut Command, folder: &Path) -> Result<Child, String> {
    let _ = fs::remove_file(folder.join("socket"));
    let mut process = command.spawn().expect("redis-server is installed");
    let begun = Instant::now();
    while std::os::unix::net::UnixStream::connect(folder.join("socket")).is_err() {
        if begun.elapsed() > PATIENCE {
            let _ = process.kill();
            let _ = process.wait();
            return Err("redis-server does not answer".to_owned());
        }
        if let Some(status) = process.try_wait().unwrap() {
            return Err(format!("redis-server has ended with {status}"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(process)
}

/// The primaries of a Cluster, and the slots of each.
pub(crate) const PRIMARIES: [(u16, u16); 3] = [(0, 5_460), (5_461, 10_922), (10_923, 16_383)];

/// The vectors that are decided differently where limits with a ladder lie in several partitions: these are asked one after another,
/// the first denial ends the request, and only a denial in the last partition strikes or blocks.
pub(crate) const LADDERS_IN_SEVERAL_PARTITIONS: [&str; 4] = [
    "a warning lifts only limits of its own subject and ladder: the request is denied and charges nothing, and the strike counts",
    "of two subjects that one request strikes, the harshest rung wins",
    "of two penalties the ban is the verdict, and retryAfter the end of both",
    "strike = ignored: what counts is the Retry-After that was sent, also where another limit or a block made it longer",
];

/// A running Cluster. Nodes 0 to 2 begin as primaries, and nodes 3 to 5 as their replicas.
pub(crate) struct Cluster {
    nodes: Vec<RedisServer>,
    ports: Vec<u16>,
    killed: BTreeSet<usize>,
}

/// A slot that is moved from one primary to another.
#[derive(Clone, Copy)]
pub(crate) struct SlotMove {
    pub(crate) slot: u16,
    pub(crate) from: usize,
    pub(crate) to: usize,
}

impl Cluster {
    /// Starts three primaries and three replicas. No replica takes over on a machine that is only busy.
    pub(crate) fn start() -> Self {
        Self::start_nodes(6, "30000", &[None; 6], &FORGETTING)
    }

    /// Starts three primaries and three replicas. A replica takes over about two seconds after its primary was killed.
    pub(crate) fn start_with_failover() -> Self {
        Self::start_nodes(6, "500", &[None; 6], &FORGETTING)
    }

    /// Starts three primaries without replicas, which keep their data when they are killed. No failure is ever detected.
    pub(crate) fn start_with_data() -> Self {
        Self::start_nodes(3, "30000", &[None; 3], &KEEPING)
    }

    /// Starts them with failover, and with clocks that differ from the system's by so many seconds.
    pub(crate) fn start_with_offsets(offsets: [i32; 6]) -> Self {
        let clocks = offsets.map(|offset| Some(format!("{offset:+}")));
        Self::start_nodes(6, "500", &clocks.each_ref().map(Option::as_deref), &FORGETTING)
    }

    /// Starts three primaries whose clocks stand still and are set by [`set_time`](Self::set_time).
    ///
    /// There are no replicas, and no failure is ever detected, because both work with the time that the test sets.
    pub(crate) fn start_with_clock() -> Self {
        // A clock that stood still from the beginning would never reach the end of the pause after a node's start.
        Self::start_nodes(3, "1000000000000", &[Some("+0"); 3], &FORGETTING)
    }

    fn start_nodes(count: usize, timeout: &str, clocks: &[Option<&str>], persistence: &[&str]) -> Self {
        // Another program may take a port between its choice and its use.
        let started = (0..5).find_map(|_| Self::try_start(count, timeout, clocks, persistence).ok());
        let cluster = started.expect("five times some node of the Cluster did not start");
        cluster.wait_until_ready();
        cluster
    }

    fn try_start(count: usize, timeout: &str, clocks: &[Option<&str>], persistence: &[&str]) -> Result<Self, String> {
        let mut ports = free_ports(2 * count);
        let bus_ports = ports.split_off(count);
        let mut nodes = Vec::new();
        for (node, clock) in clocks.iter().enumerate() {
            let (port, bus) = (ports[node].to_string(), bus_ports[node].to_string());
            let mut arguments = vec!["--port", &port, "--cluster-port", &bus, "--bind", "127.0.0.1"];
            arguments.extend(["--cluster-enabled", "yes", "--cluster-node-timeout", timeout]);
            // A replica is up to date at once, and may always take over.
            arguments.extend(["--repl-diskless-sync-delay", "0", "--cluster-replica-validity-factor", "0"]);
            arguments.extend(persistence);
            let nodes_file = nodes_file(node, &ports, &bus_ports);
            nodes.push(RedisServer::launch(&Setup { arguments: &arguments, clock: *clock, nodes: Some(&nodes_file) })?);
        }
        Ok(Self { nodes, ports, killed: BTreeSet::new() })
    }

    /// Waits until every living node calls the Cluster complete and every replica follows its primary.
    pub(crate) fn wait_until_ready(&self) {
        let begun = Instant::now();
        while !self.living().all(|node| self.is_ready(node)) {
            assert!(begun.elapsed() < PATIENCE, "{}", self.nodes[0].cli(&["CLUSTER", "NODES"]));
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn is_ready(&self, node: usize) -> bool {
        let node = &self.nodes[node];
        let is_replica = node.info("role").as_deref() == Some("slave");
        let follows = !is_replica || node.info("master_link_status").as_deref() == Some("up");
        follows && node.cli(&["CLUSTER", "INFO"]).contains("cluster_state:ok")
    }

    /// Returns the nodes that were not killed.
    pub(crate) fn living(&self) -> impl Iterator<Item = usize> {
        (0..self.nodes.len()).filter(|node| !self.killed.contains(node))
    }

    /// Returns the living primaries.
    pub(crate) fn primaries(&self) -> Vec<usize> {
        self.living().filter(|node| self.nodes[*node].info("role").as_deref() == Some("master")).collect()
    }

    pub(crate) fn node(&self, node: usize) -> &RedisServer {
        &self.nodes[node]
    }

    /// Returns the URL of a store on this Cluster.
    pub(crate) fn url(&self) -> String {
        let places: Vec<String> = self.ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
        format!("redis+cluster://{}", places.join(","))
    }

    /// Opens a store as a node of Threshold does.
    pub(crate) async fn open(&self) -> RedisStore {
        open(self.url()).await
    }

    /// Sets the clock of every node.
    pub(crate) fn set_time(&self, now: Timestamp) {
        self.nodes.iter().for_each(|node| node.set_time(now));
    }

    /// Deletes every key.
    pub(crate) fn flush(&self) {
        for node in self.living() {
            let answer = self.nodes[node].cli(&["FLUSHALL"]);
            assert!(answer == "OK\n" || answer.starts_with("READONLY"), "{answer}");
        }
    }

    /// Returns the slot of a key.
    pub(crate) fn slot(&self, key: &str) -> u16 {
        self.nodes[0].cli(&["CLUSTER", "KEYSLOT", key]).trim().parse().unwrap()
    }

    /// Returns all keys that match a pattern.
    pub(crate) fn keys(&self, pattern: &str) -> Vec<String> {
        let keys = |node: usize| self.nodes[node].cli(&["KEYS", pattern]);
        let texts: Vec<String> = self.primaries().into_iter().map(keys).collect();
        texts.iter().flat_map(|text| text.lines()).filter(|key| !key.is_empty()).map(str::to_owned).collect()
    }

    /// Returns the primary that holds a key.
    pub(crate) fn holder(&self, key: &str) -> usize {
        let holds = |node: &usize| self.nodes[*node].cli(&["EXISTS", key]).trim() == "1";
        self.primaries().into_iter().find(holds).unwrap()
    }

    /// Kills a node.
    pub(crate) fn kill(&mut self, node: usize) {
        self.nodes[node].kill();
        self.killed.insert(node);
    }

    /// Lets a replica take over from its living primary, which loses nothing.
    pub(crate) fn hand_over(&self, primary: usize) {
        let replica = (primary + PRIMARIES.len()) % self.nodes.len();
        assert_eq!(self.nodes[replica].cli(&["CLUSTER", "FAILOVER"]), "OK\n");
        self.wait_for_failover(primary);
        self.wait_until_ready();
    }

    /// Waits until the replica of a killed primary has taken over.
    pub(crate) fn wait_for_failover(&self, killed: usize) {
        let (replica, begun) = ((killed + PRIMARIES.len()) % self.nodes.len(), Instant::now());
        while !self.primaries().contains(&replica) {
            assert!(begun.elapsed() < PATIENCE, "node {replica} has not taken over");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Starts a killed node again, which follows the new primary of its slots.
    pub(crate) fn restart(&mut self, node: usize) {
        self.nodes[node].restart();
        self.killed.remove(&node);
    }

    /// Begins to move a slot: requests for keys that are not there any more are sent on by `ASK`.
    pub(crate) fn begin_move(&self, SlotMove { slot, from, to }: SlotMove) {
        let slot = slot.to_string();
        let id = |node: usize| self.nodes[node].cli(&["CLUSTER", "MYID"]).trim().to_owned();
        let set = |node: usize, state: &str, other: usize| {
            assert_eq!(self.nodes[node].cli(&["CLUSTER", "SETSLOT", &slot, state, &id(other)]), "OK\n");
        };
        set(to, "IMPORTING", from);
        set(from, "MIGRATING", to);
    }

    /// Moves at most so many keys of a slot. Returns how many there were.
    pub(crate) fn move_keys(&self, SlotMove { slot, from, to }: SlotMove, most: usize) -> usize {
        let listed = self.nodes[from].cli(&["CLUSTER", "GETKEYSINSLOT", &slot.to_string(), &most.to_string()]);
        let keys: Vec<&str> = listed.lines().filter(|key| !key.is_empty()).collect();
        if !keys.is_empty() {
            let port = self.ports[to].to_string();
            let mut arguments = vec!["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "KEYS"];
            arguments.extend(&keys);
            let answer = self.nodes[from].cli(&arguments);
            // A key may expire in between.
            assert!(answer == "OK\n" || answer == "NOKEY\n", "{answer}");
        }
        keys.len()
    }

    /// Ends the move of a slot whose keys were all moved. The new primary learns it first, so that a slot always has one.
    pub(crate) fn end_move(&self, SlotMove { slot, from, to }: SlotMove) {
        let id = self.nodes[to].cli(&["CLUSTER", "MYID"]).trim().to_owned();
        let others = self.primaries().into_iter().filter(|node| *node != to && *node != from);
        for node in [to, from].into_iter().chain(others) {
            assert_eq!(self.nodes[node].cli(&["CLUSTER", "SETSLOT", &slot.to_string(), "NODE", &id]), "OK\n");
        }
    }
}

/// Writes what a node knows of the Cluster, as if it had met all others before. Then no node has to be introduced.
fn nodes_file(own: usize, ports: &[u16], bus_ports: &[u16]) -> String {
    let id = |node: usize| format!("{:040x}", 0xc1_0000 + node);
    let mut text = String::new();
    for (node, (port, bus)) in ports.iter().zip(bus_ports).enumerate() {
        let (myself, primary) = (if node == own { "myself," } else { "" }, node % PRIMARIES.len());
        let place = format!("{} 127.0.0.1:{port}@{bus} {myself}", id(node));
        text += &match PRIMARIES.get(node) {
            Some((first, last)) => format!("{place}master - 0 0 {} connected {first}-{last}\n", node + 1),
            None => format!("{place}slave {} 0 0 {} connected\n", id(primary), primary + 1),
        };
    }
    text + "vars currentEpoch 3 lastVoteEpoch 0\n"
}

/// Returns ports that are free at this moment, below those that the system gives to outgoing connections: one of these could
/// otherwise take the port of a node while it is down.
fn free_ports(count: usize) -> Vec<u16> {
    let mut held = Vec::new();
    while held.len() < count {
        let port = u16::try_from(10_000 + rand_u64() % 20_000).unwrap();
        held.extend(TcpListener::bind(("127.0.0.1", port)));
    }
    held.iter().map(|listener| listener.local_addr().unwrap().port()).collect()
}

fn rand_u64() -> u64 {
    use std::hash::{BuildHasher as _, RandomState};
    RandomState::new().hash_one(0)
}
