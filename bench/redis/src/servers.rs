//! Redis servers of the benchmark: one, or a Cluster of three primaries, started here and ended with it.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use redis::aio::MultiplexedConnection;

/// How long a server has to answer, and a Cluster to be formed.
const PATIENCE: Duration = Duration::from_secs(20);
/// The number of hash slots of a Cluster.
const SLOTS: usize = 16_384;
/// The number of primaries of a Cluster.
const PRIMARIES: usize = 3;

/// A redis-server process with a connection for measurements.
struct RedisProcess {
    child: Child,
    address: SocketAddr,
    folder: PathBuf,
}

impl RedisProcess {
    fn start(clustered: bool) -> Result<Self> {
        // Both are free at the same time, so that no other server takes the second while the first one starts.
        let (port, bus) = (TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?, TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?);
        let (address, bus_port) = (port.local_addr()?, bus.local_addr()?.port());
        drop((port, bus));
        let folder = std::env::temp_dir().join(format!("threshold-bench-{}-{}", std::process::id(), address.port()));
        fs::create_dir(&folder).context("cannot make a folder for redis-server")?;
        let mut command = Command::new("redis-server");
        command.args([
            "--bind",
            "127.0.0.1",
            "--port",
            &address.port().to_string(),
            "--save",
            "",
            "--appendonly",
            "no",
        ]);
        if clustered {
            command.args(["--cluster-enabled", "yes", "--cluster-port", &bus_port.to_string()]);
        }
        command.current_dir(&folder).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().context("cannot start redis-server; Debian's package redis-server has it")?;
        let mut process = Self { child, address, folder };
        let begun = Instant::now();
        while TcpStream::connect(address).is_err() {
            if let Some(status) = process.child.try_wait()? {
                bail!("redis-server ended with {status}");
            }
            ensure!(begun.elapsed() < PATIENCE, "redis-server does not answer");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(process)
    }
}

impl Drop for RedisProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// The servers that hold the records of one store.
pub struct Servers {
    processes: Vec<RedisProcess>,
    connections: Vec<MultiplexedConnection>,
    clustered: bool,
}

/// What servers have done since they started.
#[derive(Debug, Clone, Copy)]
pub struct Work {
    /// CPU time of all threads, user and system.
    pub cpu: Duration,
    /// Reads from sockets. With one decision in flight, one for each round trip to one server.
    pub reads: u64,
    /// Calls of scripts.
    pub scripts: u64,
    /// Memory that the allocator has handed out, in bytes.
    pub memory: u64,
}

impl Servers {
    /// Starts one server.
    pub async fn single() -> Result<Self> {
        Self::connect(vec![RedisProcess::start(false)?], false).await
    }

    /// Starts three primaries, each with a third of the slots.
    pub async fn cluster() -> Result<Self> {
        let processes = (0..PRIMARIES).map(|_| RedisProcess::start(true)).collect::<Result<Vec<_>>>()?;
        let mut servers = Self::connect(processes, true).await?;
        let first = servers.processes.first().context("there is a first primary")?.address;
        for (index, connection) in servers.connections.iter_mut().enumerate() {
            let (from, to) = (index * SLOTS / PRIMARIES, (index + 1) * SLOTS / PRIMARIES - 1);
            let () = redis::cmd("CLUSTER").arg("ADDSLOTSRANGE").arg(from).arg(to).query_async(connection).await?;
        }
        let bus = bus_port(servers.connections.first_mut().context("there is a first primary")?).await?;
        for connection in servers.connections.iter_mut().skip(1) {
            let mut meet = redis::cmd("CLUSTER");
            meet.arg("MEET").arg(first.ip().to_string()).arg(first.port()).arg(bus);
            let () = meet.query_async(connection).await?;
        }
        servers.wait_until_formed().await?;
        Ok(servers)
    }

    async fn connect(processes: Vec<RedisProcess>, clustered: bool) -> Result<Self> {
        let mut connections = Vec::with_capacity(processes.len());
        for process in &processes {
            let client = redis::Client::open(format!("redis://{}", process.address))?;
            connections.push(client.get_multiplexed_async_connection().await?);
        }
        Ok(Self { processes, connections, clustered })
    }

    async fn wait_until_formed(&mut self) -> Result<()> {
        let begun = Instant::now();
        for connection in &mut self.connections {
            loop {
                let info: String = redis::cmd("CLUSTER").arg("INFO").query_async(connection).await?;
                if info.contains("cluster_state:ok") && info.contains("cluster_known_nodes:3") {
                    break;
                }
                ensure!(begun.elapsed() < PATIENCE, "the Cluster is not formed: {info}");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        Ok(())
    }

    /// Returns the URL for Threshold.
    pub fn url(&self) -> String {
        let hosts: Vec<String> = self.processes.iter().map(|process| process.address.to_string()).collect();
        format!("{}://{}", if self.clustered { "redis+cluster" } else { "redis" }, hosts.join(","))
    }

    /// Returns a connection for each server, in the order of their slots.
    pub fn connections(&self) -> Vec<MultiplexedConnection> {
        self.connections.clone()
    }

    /// Returns a text for each server that is a hash tag of one of its slots.
    pub async fn hash_tags(&self) -> Result<Vec<String>> {
        let mut tags = vec![None; self.connections.len()];
        let mut connection = self.connections.first().context("there is a server")?.clone();
        for number in 0.. {
            if tags.iter().all(Option::is_some) {
                break;
            }
            let tag = format!("{number}");
            let slot: usize = match self.clustered {
                true => redis::cmd("CLUSTER").arg("KEYSLOT").arg(&tag).query_async(&mut connection).await?,
                false => 0,
            };
            let place = (0..PRIMARIES).find(|index| slot < (index + 1) * SLOTS / PRIMARIES).unwrap_or(0);
            if let Some(free) = tags.get_mut(place).filter(|free| free.is_none()) {
                *free = Some(tag);
            }
        }
        Ok(tags.into_iter().flatten().collect())
    }

    /// Loads a script on every server.
    pub async fn load(&self, script: &str) -> Result<()> {
        for mut connection in self.connections() {
            let () = redis::cmd("SCRIPT").arg("LOAD").arg(script).exec_async(&mut connection).await?;
        }
        Ok(())
    }

    /// Returns the sum of what the servers have done so far.
    pub async fn work(&self) -> Result<Work> {
        let mut sum = Work { cpu: Duration::ZERO, reads: 0, scripts: 0, memory: 0 };
        for (process, mut connection) in self.processes.iter().zip(self.connections()) {
            sum.cpu += cpu_of(&process.child.id().to_string())?;
            let mut info = redis::cmd("INFO");
            info.arg("stats").arg("commandstats").arg("memory");
            let info: String = info.query_async(&mut connection).await?;
            sum.reads += field(&info, "total_reads_processed:").unwrap_or(0);
            sum.scripts += field(&info, "cmdstat_evalsha:calls=").unwrap_or(0);
            sum.memory += field(&info, "used_memory:").unwrap_or(0);
        }
        Ok(sum)
    }
}

/// Returns the port that the other primaries talk to.
async fn bus_port(connection: &mut MultiplexedConnection) -> Result<u16> {
    let nodes: String = redis::cmd("CLUSTER").arg("NODES").query_async(connection).await?;
    let port = nodes.split_once('@').and_then(|(_, rest)| {
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        digits.parse().ok()
    });
    port.context("CLUSTER NODES has a port after @")
}

fn field(info: &str, name: &str) -> Option<u64> {
    let rest = info.lines().find_map(|line| line.strip_prefix(name))?;
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().ok()
}

/// Returns the CPU time of a process, user and system. The scheduler counts nanoseconds where `INFO cpu` depends on the tick.
pub fn cpu_of(process: &str) -> Result<Duration> {
    let mut sum = 0;
    for task in fs::read_dir(format!("/proc/{process}/task"))? {
        let text = fs::read_to_string(task?.path().join("schedstat"))?;
        let nanoseconds: u64 = text.split(' ').next().unwrap_or_default().parse().context("a figure in schedstat")?;
        sum += nanoseconds;
    }
    Ok(Duration::from_nanos(sum))
}
