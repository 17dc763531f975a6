//! The load: connections that are kept, each with one request under way at a time.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::KEYS;
use crate::peers::Entry;
use crate::requests::mix;

/// What one entry did in one round.
#[derive(Debug, Default)]
pub struct Load {
    /// How long each request took.
    pub latencies: Vec<Duration>,
    /// How many answers were not 2xx.
    pub refused: usize,
    /// How long it took altogether.
    pub elapsed: Duration,
}

/// Asks for so long on so many connections.
pub async fn run(entry: &Entry, connections: usize, time: Duration, seed: u32) -> Result<Load> {
    let start = Instant::now();
    let end = start + time;
    let (address, request) = (entry.process.address, entry.request);
    let tasks: Vec<_> = (0..connections)
        .map(|connection| {
            let stream = u64::from(seed) << 32 | connection as u64;
            tokio::spawn(ask(address, request, end, stream << 20))
        })
        .collect();
    let mut all = Load::default();
    for task in tasks {
        let one = task.await?.with_context(|| format!("asking {}", entry.name))?;
        all.latencies.extend(one.latencies);
        all.refused += one.refused;
    }
    all.elapsed = start.elapsed();
    Ok(all)
}

async fn ask(address: SocketAddr, request: fn(&mut Vec<u8>, u32), end: Instant, seed: u64) -> Result<Load> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let mut connection = Connection { stream, read: Vec::with_capacity(4_096) };
    let mut load = Load::default();
    let mut bytes = Vec::with_capacity(1_024);
    for number in 0u64.. {
        let key = mix(seed ^ number) % u64::from(KEYS);
        bytes.clear();
        request(&mut bytes, u32::try_from(key)?);
        let sent = Instant::now();
        if sent >= end {
            break;
        }
        let status = connection.send(&bytes).await?;
        load.latencies.push(sent.elapsed());
        load.refused += usize::from(!(200..300).contains(&status));
    }
    Ok(load)
}

/// One request on a connection of its own; anything but 2xx is an error.
pub async fn once(stream: TcpStream, request: &[u8]) -> Result<()> {
    let status = Connection { stream, read: Vec::new() }.send(request).await?;
    if (200..300).contains(&status) { Ok(()) } else { bail!("the answer was {status}") }
}

struct Connection {
    stream: TcpStream,
    read: Vec<u8>,
}

impl Connection {
    /// Sends a request and reads the answer to its end. Returns its status.
    async fn send(&mut self, request: &[u8]) -> Result<u16> {
        self.stream.write_all(request).await?;
        self.read.clear();
        loop {
            if self.stream.read_buf(&mut self.read).await? == 0 {
                bail!("the connection was closed");
            }
            if let Some((status, length)) = answer(&self.read)?
                && self.read.len() >= length
            {
                return Ok(status);
            }
        }
    }
}

/// The status of an answer and its length in bytes, once its head is there.
fn answer(bytes: &[u8]) -> Result<Option<(u16, usize)>> {
    let Some(head) = bytes.windows(4).position(|four| four == b"\r\n\r\n") else { return Ok(None) };
    let text = std::str::from_utf8(&bytes[..head])?;
    let status = text.get(9..12).and_then(|code| code.parse().ok()).context("an answer without a status")?;
    let field = |line: &str| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().ok())?
    };
    let body = text.lines().find_map(field).unwrap_or(0);
    Ok(Some((status, head + 4 + body)))
}
