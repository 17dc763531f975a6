//! Decisions under load: so many in flight, for so long.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use tokio::task::JoinSet;

use crate::contenders::{Contender, Verdict};
use crate::requests::Request;
use crate::servers::{Servers, Work, cpu_of};

/// What one contender did in one round.
#[derive(Debug)]
pub struct Round {
    /// The number of decisions.
    pub decisions: usize,
    /// How many of them allowed the request.
    pub allowed: usize,
    /// How many were made without the store.
    pub degraded: usize,
    /// How long all of them took.
    pub elapsed: Duration,
    /// The time that 99 of 100 took at most.
    pub p99: Duration,
    /// CPU time of this process, which asks and decides.
    pub node_cpu: Duration,
    /// CPU time of the Redis servers.
    pub redis_cpu: Duration,
    /// Reads of the Redis servers from their sockets.
    pub reads: u64,
    /// Calls of scripts on the Redis servers.
    pub scripts: u64,
}

/// Decides requests for a time, with a number of them in flight.
pub async fn run(
    contender: &Arc<dyn Contender>,
    servers: &Servers,
    requests: &Arc<Vec<Request>>,
    in_flight: usize,
    time: Duration,
) -> Result<Round> {
    let before = servers.work().await?;
    let node_before = cpu_of("self")?;
    let begun = Instant::now();
    let next = Arc::new(AtomicUsize::new(0));
    let mut tasks = JoinSet::new();
    for _ in 0..in_flight {
        let (contender, requests, next) = (Arc::clone(contender), Arc::clone(requests), Arc::clone(&next));
        tasks.spawn(async move {
            let (mut latencies, mut allowed, mut degraded) = (Vec::with_capacity(1 << 12), 0, 0);
            while begun.elapsed() < time {
                let request = &requests[next.fetch_add(1, Ordering::Relaxed) % requests.len()];
                let sent = Instant::now();
                match contender.decide(request).await? {
                    Verdict::Allowed => allowed += 1,
                    Verdict::Denied => {}
                    Verdict::Degraded => degraded += 1,
                }
                latencies.push(sent.elapsed());
            }
            anyhow::Ok((latencies, allowed, degraded))
        });
    }
    let (mut latencies, mut allowed, mut degraded) = (Vec::new(), 0, 0);
    while let Some(ended) = tasks.join_next().await {
        let (own, own_allowed, own_degraded): (Vec<Duration>, usize, usize) = ended??;
        latencies.extend(own);
        allowed += own_allowed;
        degraded += own_degraded;
    }
    let elapsed = begun.elapsed();
    let node_cpu = cpu_of("self")?.saturating_sub(node_before);
    let Work { cpu, reads, scripts, .. } = servers.work().await?;
    latencies.sort_unstable();
    let p99 = latencies.get(latencies.len() * 99 / 100).copied().unwrap_or_default();
    Ok(Round {
        decisions: latencies.len(),
        allowed,
        degraded,
        elapsed,
        p99,
        node_cpu,
        redis_cpu: cpu.saturating_sub(before.cpu),
        reads: reads.saturating_sub(before.reads),
        scripts: scripts.saturating_sub(before.scripts),
    })
}
