//! gRPC clients: connections that are kept, each with some calls under way at a time.

use std::net::SocketAddr;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use h2::client::SendRequest;
use http::{HeaderMap, Request};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::KEYS;
use crate::load::{Load, mix, stream};
use crate::messages::is_ok;

/// How many threads have the connections, each as many. Envoy has a connection for each of its threads too.
pub const THREADS: u64 = 2;
/// How many connections there are, and how many calls are under way on each.
pub const SHAPES: [(u64, u64); 2] = [(16, 1), (2, 8)];

/// How a server is asked.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    pub path: &'static str,
    /// Makes the message for a key.
    pub message: fn(u64) -> Bytes,
    pub connections: u64,
    /// How many calls are under way on a connection.
    pub at_once: u64,
}

/// Starts the threads, which ask until `end`.
pub fn start(call: Call, address: SocketAddr, end: Instant, seed: u64) -> Vec<JoinHandle<Result<Load>>> {
    let one = |number| std::thread::spawn(move || run(call, address, end, stream(seed, number)));
    (0..THREADS).map(one).collect()
}

fn run(call: Call, address: SocketAddr, end: Instant, first: u64) -> Result<Load> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut calling = JoinSet::new();
        for connection in 0..call.connections / THREADS {
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            let (sender, connection_task) = h2::client::handshake(stream).await?;
            // It ends with the runtime.
            drop(tokio::spawn(connection_task));
            for caller in 0..call.at_once {
                let first = first | (connection * call.at_once + caller) << 18;
                calling.spawn(ask(call, sender.clone(), address, end, first));
            }
        }
        let mut all = Load::default();
        // A server that stops answering ends the run.
        let patience = end.saturating_duration_since(Instant::now()) + Duration::from_secs(10);
        let joined = async {
            while let Some(one) = calling.join_next().await {
                all.add(one??);
            }
            anyhow::Ok(())
        };
        tokio::time::timeout(patience, joined).await.context("no answer for 10 s")??;
        Ok(all)
    })
}

async fn ask(
    call: Call,
    mut sender: SendRequest<Bytes>,
    address: SocketAddr,
    end: Instant,
    mut number: u64,
) -> Result<Load> {
    let mut load = Load::default();
    loop {
        number += 1;
        let message = (call.message)(mix(number) % KEYS);
        // As Envoy sends it.
        let request = Request::post(format!("http://{address}{}", call.path))
            .header("te", "trailers")
            .header("content-type", "application/grpc")
            .header("grpc-timeout", "1000m")
            .body(())?;
        let sent = Instant::now();
        if sent >= end {
            return Ok(load);
        }
        sender = sender.ready().await?;
        let (response, mut body) = sender.send_request(request, false)?;
        body.send_data(message, true)?;
        let is_ok = answer(response.await?).await?;
        load.latencies.push(sent.elapsed());
        load.requests += 1;
        load.errors += usize::from(!is_ok);
    }
}

/// Reads an answer to its end, and returns whether it says OK.
async fn answer(response: http::Response<h2::RecvStream>) -> Result<bool> {
    let (head, mut body) = response.into_parts();
    let mut message = Vec::new();
    while let Some(data) = body.data().await {
        let data = data?;
        body.flow_control().release_capacity(data.len())?;
        message.extend_from_slice(&data);
    }
    let trailers = body.trailers().await?;
    let has_status = |headers: &HeaderMap| headers.get("grpc-status").is_some_and(|status| status == "0");
    Ok((has_status(&head.headers) || trailers.as_ref().is_some_and(has_status)) && is_ok(&message))
}
