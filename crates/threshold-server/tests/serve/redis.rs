//! A Redis of a test's own, and servers on it.

use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use super::process::{PATIENCE, Scratch, Server, Start};

/// The secret of all servers on one Redis.
pub(crate) const SECRET: &str = "the secret of all of these nodes";

/// A Redis on a socket in a folder of its own.
pub(crate) struct Redis {
    pub(crate) child: Child,
    pub(crate) folder: Scratch,
}

impl Redis {
    pub(crate) fn start() -> Self {
        let folder = Scratch::folder();
        Self { child: spawn(&folder), folder }
    }

    /// Kills the server, which loses its data.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Starts it again after [`kill`](Self::kill).
    pub(crate) fn restart(&mut self) {
        self.child = spawn(&self.folder);
    }

    pub(crate) fn url(&self) -> String {
        format!("redis+unix://{}", self.folder.path().join("socket").display())
    }

    pub(crate) fn cli(&self, arguments: &[&str]) -> String {
        let socket = self.folder.path().join("socket");
        let output = Command::new("redis-cli").arg("-s").arg(socket).args(arguments).output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    }

    /// Starts a server on this Redis.
    pub(crate) fn node(&self, policy: &Scratch) -> Server {
        let (url, policy) = (self.url(), Some(policy.path()));
        let variables = [("THRESHOLD_SECRET", SECRET)];
        let args = ["--store", url.as_str()];
        Start { args: &args, variables: &variables, policy, ..Start::default() }.server()
    }
}

fn spawn(folder: &Scratch) -> Child {
    let child = Command::new("redis-server")
        .args(["--port", "0", "--unixsocket", "socket", "--save", "", "--appendonly", "no"])
        .current_dir(folder.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("redis-server is installed: ./test does that");
    let begun = Instant::now();
    while UnixStream::connect(folder.path().join("socket")).is_err() {
        assert!(begun.elapsed() < PATIENCE, "redis-server does not answer");
        std::thread::yield_now();
    }
    child
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
