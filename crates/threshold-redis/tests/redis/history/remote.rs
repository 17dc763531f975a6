//! A node in a process of its own, which can be killed and suspended: this test binary, started again.

use std::collections::HashMap;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::unix::OwnedReadHalf;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use super::node::{self, Ask, Opening, Told};
use crate::process::{PATIENCE, signal};
use crate::tcp::Folder;

/// The path of the socket on which a node takes what it is asked. Only a process that is a node has it.
const SOCKET: &str = "THRESHOLD_HISTORY_NODE";
/// No answer takes as long: a suspended node goes on after ten seconds at most.
const ANSWER: Duration = Duration::from_secs(40);

/// Answers that are waited for, by the number of the question; `None` after the end of the node.
type Waiting = Arc<Mutex<Option<HashMap<u64, oneshot::Sender<Told>>>>>;

/// A running node. It ends with this value.
pub(super) struct RemoteNode {
    process: Mutex<Child>,
    to: mpsc::UnboundedSender<String>,
    waiting: Waiting,
    number: AtomicU64,
    _folder: Folder,
}

impl RemoteNode {
    pub(super) async fn start(opening: &Opening) -> Self {
        let folder = Folder::new();
        let socket = folder.path().join("node");
        let listener = UnixListener::bind(&socket).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["history::remote::a_node_of_a_history", "--exact", "--nocapture"]).env(SOCKET, &socket);
        let process = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        let (stream, _) = timeout(PATIENCE, listener.accept()).await.expect("the node connects").unwrap();
        let (from, mut writer) = stream.into_split();
        let (to, mut lines) = mpsc::unbounded_channel::<String>();
        tokio::spawn(async move {
            while let Some(line) = lines.recv().await {
                if writer.write_all(line.as_bytes()).await.is_err() {
                    return;
                }
            }
        });
        to.send(format!("{}\n", serde_json::to_string(opening).unwrap())).unwrap();
        let waiting = Arc::new(Mutex::new(Some(HashMap::new())));
        tokio::spawn(answers(from, Arc::clone(&waiting)));
        let number = AtomicU64::new(0);
        let node = Self { process: Mutex::new(process), to, waiting, number, _folder: folder };
        // It answers when it has opened its store.
        node.ask(Ask::CatchUp).await;
        node
    }

    /// Asks the node. One that was killed answers nothing any more.
    pub(super) async fn ask(&self, ask: Ask) -> Told {
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        let (sender, answer) = oneshot::channel();
        let Some(()) = self.waiting.lock().unwrap().as_mut().map(|waiting| drop(waiting.insert(number, sender))) else {
            return Told::Lost;
        };
        let sent = self.to.send(format!("{}\n", serde_json::to_string(&(number, ask)).unwrap()));
        if sent.is_err() {
            return Told::Lost;
        }
        timeout(ANSWER, answer).await.ok().and_then(Result::ok).unwrap_or(Told::Lost)
    }

    /// Kills the node, as a power cut does.
    pub(super) fn kill(&self) {
        let mut process = self.process.lock().unwrap();
        let _ = process.kill();
        let _ = process.wait();
    }

    pub(super) fn suspend(&self) {
        signal(&self.process.lock().unwrap(), "STOP");
    }

    pub(super) fn go_on(&self) {
        signal(&self.process.lock().unwrap(), "CONT");
    }
}

impl Drop for RemoteNode {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Hands answers to those who wait for them. At the end of the node nobody gets any more.
async fn answers(from: OwnedReadHalf, waiting: Waiting) {
    let mut lines = BufReader::new(from).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let Ok((number, told)) = serde_json::from_str::<(u64, Told)>(&line) else { break };
        if let Some(sender) = waiting.lock().unwrap().as_mut().and_then(|waiting| waiting.remove(&number)) {
            let _ = sender.send(told);
        }
    }
    *waiting.lock().unwrap() = None;
}

/// No test: the process of a [`RemoteNode`]. It does nothing where the tests are run.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_of_a_history() {
    let Ok(socket) = std::env::var(SOCKET) else { return };
    let (from, mut to) = UnixStream::connect(socket).await.unwrap().into_split();
    let mut lines = BufReader::new(from).lines();
    let opening: Opening = serde_json::from_str(&lines.next_line().await.unwrap().unwrap()).unwrap();
    let node = node::open(&opening).await;
    let (sender, mut told) = mpsc::unbounded_channel::<(u64, Told)>();
    tokio::spawn(async move {
        while let Some(told) = told.recv().await {
            let line = format!("{}\n", serde_json::to_string(&told).unwrap());
            if to.write_all(line.as_bytes()).await.is_err() {
                return;
            }
        }
    });
    // The other end closes it, also by being killed.
    while let Ok(Some(line)) = lines.next_line().await {
        let (number, ask): (u64, Ask) = serde_json::from_str(&line).unwrap();
        let (node, sender) = (Arc::clone(&node), sender.clone());
        tokio::spawn(async move {
            let _ = sender.send((number, node::ask(&node, ask).await));
        });
    }
}
