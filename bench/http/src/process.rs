//! A server in a process of its own: started, waited for, measured, and ended with the benchmark.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// A process that serves.
#[derive(Debug)]
pub struct Running {
    child: Child,
    /// Where it listens.
    pub address: SocketAddr,
}

impl Running {
    /// Starts what `command` gives for a free port, and waits until it answers.
    pub fn start(name: &'static str, command: impl FnOnce(SocketAddr) -> Command) -> Result<Self> {
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?;
        let mut command = command(free);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().with_context(|| format!("cannot start {name}"))?;
        let mut running = Self { child, address: free };
        let patience = Instant::now() + Duration::from_secs(20);
        while TcpStream::connect(free).is_err() {
            if let Some(status) = running.child.try_wait()? {
                bail!("{name} ended with {status}");
            }
            if Instant::now() > patience {
                bail!("{name} does not answer");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(running)
    }

    /// The CPU time of all its threads so far. The scheduler counts nanoseconds where `stat` counts hundredths of a second.
    pub fn cpu(&self) -> Result<Duration> {
        let mut sum = 0;
        for task in fs::read_dir(format!("/proc/{}/task", self.child.id()))? {
            let text = fs::read_to_string(task?.path().join("schedstat"))?;
            let nanoseconds: u64 =
                text.split(' ').next().unwrap_or_default().parse().context("a figure in schedstat")?;
            sum += nanoseconds;
        }
        Ok(Duration::from_nanos(sum))
    }

    /// Its memory in bytes, as far as it is resident.
    pub fn memory(&self) -> Result<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
        let kilobytes: u64 = line.trim().trim_end_matches(" kB").parse().context("VmRSS in kB")?;
        Ok(kilobytes * 1_024)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Raises the number of files that this process and its children may open, as far as the system lets it.
pub fn allow_files(wanted: u64) {
    let limit = getrlimit(Resource::Nofile);
    let maximum = limit.maximum;
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum.map(|most| most.min(wanted.max(65_536))), maximum });
}
