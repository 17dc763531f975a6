//! The listeners that are served, each in a task of its own.

use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::{Id, JoinSet};

use super::connection::Server;

/// Listeners that serve until they are stopped.
pub(super) struct RunningServers {
    tasks: JoinSet<io::Result<bool>>,
    /// By its task, because one that has panicked cannot say which listener it served.
    names: HashMap<Id, String>,
    stop: watch::Sender<bool>,
}

impl RunningServers {
    /// Starts to serve. When they are stopped, requests in progress have this long to end.
    pub(super) fn start(servers: Vec<Server>, drain: Duration) -> Self {
        let (stop, stopped) = watch::channel(false);
        let mut running = Self { tasks: JoinSet::new(), names: HashMap::new(), stop };
        for server in servers {
            running.spawn(server.listener.to_string(), server.serve(stopped.clone(), drain));
        }
        running
    }

    fn spawn(&mut self, name: String, serving: impl Future<Output = io::Result<bool>> + Send + 'static) {
        let task = self.tasks.spawn(serving);
        self.names.insert(task.id(), name);
    }

    /// Waits for a listener that ends before it is told to. Returns its name and the reason.
    pub(super) async fn failed(&mut self) -> (String, String) {
        let (id, reason) = match self.tasks.join_next_with_id().await {
            // There is always one.
            None => std::future::pending().await,
            Some(Ok((id, Ok(_)))) => (id, "it has ended".to_owned()),
            Some(Ok((id, Err(error)))) => (id, error.to_string()),
            Some(Err(error)) => (error.id(), error.to_string()),
        };
        (self.names.remove(&id).unwrap_or_default(), reason)
    }

    /// Stops them, and returns whether all requests in progress ended in time.
    pub(super) async fn drain(&mut self) -> bool {
        // Sending cannot fail: the servers hold the receiver until they have stopped.
        let _ = self.stop.send(true);
        // All of them, so that one listener with a slow request does not hide that another was cut off.
        let mut all = true;
        while let Some(drained) = self.tasks.join_next().await {
            all &= matches!(drained, Ok(Ok(true)));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server whose listener had panicked once ended with 0, and without a word.
    ///
    /// Woken by taking the name of the first task, and by waiting for all tasks.
    #[tokio::test]
    async fn a_listener_that_ends_is_named_with_its_reason_and_the_others_drain() {
        type Fails = fn() -> io::Result<bool>;
        let fails: [(&str, Fails); 3] = [
            ("panicked", || panic!("a test of panics")),
            ("Invalid argument", || Err(io::Error::from_raw_os_error(22))),
            ("it has ended", || Ok(true)),
        ];
        for (expected, fail) in fails {
            let (stop, stopped) = watch::channel(false);
            let mut running = RunningServers { tasks: JoinSet::new(), names: HashMap::new(), stop };
            for name in ["first", "second"] {
                let mut stopped = stopped.clone();
                running.spawn(name.to_owned(), async move {
                    let _ = stopped.wait_for(|stop| *stop).await;
                    Ok(true)
                });
            }
            running.spawn("third".to_owned(), async move { fail() });
            let (name, reason) = running.failed().await;
            assert!(name == "third" && reason.contains(expected), "{name}: {reason}");
            assert!(running.drain().await);
        }
    }
}
