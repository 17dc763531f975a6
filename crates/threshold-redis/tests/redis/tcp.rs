//! `redis-server` processes on TCP ports, for TLS, Sentinel and ACL users.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::process::signal;

/// A folder that is deleted with its value.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        use std::hash::{BuildHasher as _, RandomState};
        let name = format!("threshold-redis-{}-{:x}", std::process::id(), RandomState::new().hash_one(0));
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Writes a file and returns its path.
    pub(crate) fn write(&self, name: &str, text: &str) -> String {
        let path = self.0.join(name);
        fs::write(&path, text).unwrap();
        path.display().to_string()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A running server on a port of the loopback interface.
pub(crate) struct TcpServer {
    process: Child,
    /// Deleted after the process has ended.
    _folder: Folder,
    pub(crate) port: u16,
}

impl TcpServer {
    /// Starts a server. The port is that of `--port` unless the arguments say otherwise.
    pub(crate) fn start(arguments: &[&str]) -> Self {
        Self::start_on("--port", arguments)
    }

    /// Starts a server that speaks only TLS.
    pub(crate) fn start_tls(arguments: &[&str]) -> Self {
        Self::start_on("--tls-port", &[&["--port", "0"], arguments].concat())
    }

    /// Starts a Sentinel for the primary `main` on a port, both with TLS alone.
    pub(crate) fn start_tls_sentinel(primary: u16, arguments: &[&str]) -> Self {
        let (folder, port) = (Folder::new(), free_port());
        let file =
            folder.write("sentinel.conf", &format!("bind 127.0.0.1\nsentinel monitor main 127.0.0.1 {primary} 1\n"));
        let (tls_port, options) = (port.to_string(), ["--sentinel", "--port", "0", "--tls-replication", "yes"]);
        let all = [&[file.as_str()], &options[..], &["--tls-port", &tls_port], arguments].concat();
        Self::spawn(folder, port, &all.into_iter().map(str::to_owned).collect::<Vec<_>>())
    }

    fn start_on(port_option: &str, arguments: &[&str]) -> Self {
        let port = free_port();
        let mut all = vec![port_option.to_owned(), port.to_string()];
        all.extend(["--bind", "127.0.0.1", "--save", "", "--appendonly", "no"].map(str::to_owned));
        all.extend(arguments.iter().map(|argument| (*argument).to_owned()));
        Self::spawn(Folder::new(), port, &all)
    }

    /// Starts a Sentinel for the primary `main` on a port.
    pub(crate) fn start_sentinel(primary: u16) -> Self {
        let (folder, port) = (Folder::new(), free_port());
        let config = format!(
            "port {port}\nbind 127.0.0.1\nsentinel monitor main 127.0.0.1 {primary} 2\n\
             sentinel down-after-milliseconds main 1000\nsentinel failover-timeout main 5000\n"
        );
        let file = folder.write("sentinel.conf", &config);
        Self::spawn(folder, port, &[file, "--sentinel".to_owned()])
    }

    fn spawn(folder: Folder, port: u16, arguments: &[String]) -> Self {
        let mut command = Command::new("redis-server");
        command.args(arguments).current_dir(folder.path()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut process = command.spawn().expect("redis-server is installed");
        let begun = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(begun.elapsed() < Duration::from_secs(20), "redis-server does not answer");
            assert!(process.try_wait().unwrap().is_none(), "redis-server has ended: {arguments:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
        Self { process, _folder: folder, port }
    }

    /// Kills the server, as a power cut does.
    pub(crate) fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Suspends the server until [`go_on`](Self::go_on).
    pub(crate) fn suspend(&self) {
        signal(&self.process, "STOP");
    }

    /// Lets a suspended server go on.
    pub(crate) fn go_on(&self) {
        signal(&self.process, "CONT");
    }

    /// Runs `redis-cli` and returns what it prints.
    pub(crate) fn cli(&self, arguments: &[&str]) -> String {
        let output = Command::new("redis-cli").args(["-p", &self.port.to_string()]).args(arguments).output();
        String::from_utf8(output.expect("redis-cli is installed").stdout).unwrap()
    }
}

impl Drop for TcpServer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns a free port. A node of a Cluster listens on the one 10,000 higher too.
pub(crate) fn free_port() -> u16 {
    let free = || TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
    std::iter::repeat_with(free).find(|port| *port < 55_000).unwrap()
}
