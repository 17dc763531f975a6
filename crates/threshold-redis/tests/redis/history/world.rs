//! The nodes of a history, and the ledger that its clients share.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::time::timeout;

use super::ledger::Ledger;
use super::node::{Ask, Opening, Request, Told};
use super::remote::RemoteNode;
use super::scenario::Scenario;

/// How long a client waits for a node.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long a node waits for the store: longer than on a quiet machine, because this one is busy with servers.
const DEADLINE: Duration = Duration::from_millis(100);

pub(super) struct World {
    pub(super) scenario: Scenario,
    pub(super) ledger: Ledger,
    pub(super) start: Instant,
    url: String,
    secrets: Mutex<(u8, Option<u8>)>,
    /// `None` while a node is not there.
    nodes: Vec<Mutex<Option<Arc<RemoteNode>>>>,
    log: Mutex<Vec<String>>,
}

impl World {
    pub(super) async fn start(scenario: Scenario, url: String) -> Arc<Self> {
        let nodes = (0..scenario.nodes).map(|_| Mutex::new(None)).collect();
        let (ledger, start, log) = (Ledger::default(), Instant::now(), Mutex::default());
        let world = Arc::new(Self { scenario, ledger, start, url, secrets: Mutex::new((1, None)), nodes, log });
        for node in 0..world.nodes.len() {
            world.start_node(node).await;
        }
        world
    }

    pub(super) async fn start_node(&self, node: usize) {
        let (secret, old) = *locked(&self.secrets);
        let (url, policy) = (self.url.clone(), self.scenario.policy());
        let started = RemoteNode::start(&Opening { url, policy, secret, old, deadline: DEADLINE }).await;
        *locked(&self.nodes[node]) = Some(Arc::new(started));
    }

    /// Kills a node.
    pub(super) fn kill_node(&self, node: usize) {
        let taken = locked(&self.nodes[node]).take();
        if let Some(taken) = taken {
            self.ledger.kill(node);
            taken.kill();
        }
    }

    pub(super) fn node(&self, node: usize) -> Option<Arc<RemoteNode>> {
        locked(&self.nodes[node]).clone()
    }

    pub(super) fn nodes(&self) -> impl Iterator<Item = usize> {
        0..self.nodes.len()
    }

    /// Ends all nodes and starts them with other secrets.
    pub(super) async fn rotate(&self, secret: u8, old: Option<u8>) {
        for node in self.nodes() {
            if let Some(node) = self.node(node) {
                let _ = timeout(PATIENCE, node.ask(Ask::CatchUp)).await;
            }
        }
        self.nodes().for_each(|node| self.kill_node(node));
        *locked(&self.secrets) = (secret, old);
        self.ledger.rotate();
        for node in self.nodes() {
            self.start_node(node).await;
        }
    }

    /// Asks a node; `None` if it is not there, so that nothing was sent.
    pub(super) async fn ask(&self, node: usize, ask: Ask) -> Option<Told> {
        let node = self.node(node)?;
        Some(timeout(PATIENCE, node.ask(ask)).await.unwrap_or(Told::Lost))
    }

    /// Asks a node until the store has answered.
    pub(super) async fn ask_until_answered(&self, node: usize, ask: Ask) -> Told {
        let begun = Instant::now();
        loop {
            match self.ask(node, ask.clone()).await {
                Some(Told::Unsure { .. } | Told::Failed(_) | Told::Lost) | None
                    if begun.elapsed() < crate::process::PATIENCE => {}
                told => return told.unwrap_or(Told::Lost),
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Returns what the tenant and the user of a request have used.
    pub(super) async fn used(&self, node: usize, request: Request) -> Result<Vec<i64>, Told> {
        match self.ask_until_answered(node, Ask::Peek(request)).await {
            Told::Left { remaining, limits } => {
                let used = limits.into_iter().zip(remaining).map(|(limit, left)| limit.saturating_sub(left));
                Ok(used.map(|used| i64::try_from(used).unwrap()).collect())
            }
            other => Err(other),
        }
    }

    pub(super) fn note(&self, what: &str) {
        locked(&self.log).push(format!("{:.3} s: {what}", self.start.elapsed().as_secs_f64()));
    }

    /// Returns what has happened, for people.
    pub(super) fn log(&self) -> Vec<String> {
        locked(&self.log).clone()
    }
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
