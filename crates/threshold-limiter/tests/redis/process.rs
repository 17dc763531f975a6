//! A `redis-server` process of a test, on a socket in a folder of its own. It ends with the test.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use threshold_core::{KeyId, Timestamp};
use threshold_limiter::store::redis::{RedisOptions, RedisStore};

/// Loads a memory allocator that does not ask for the time before libfaketime is ready, and libfaketime.
const PRELOAD: &str = "libfaketime.so.1:libtcmalloc_minimal.so.4";
/// Where Debian installs them.
const LIBRARIES: &str =
    "/usr/lib/x86_64-linux-gnu/faketime:/usr/lib/x86_64-linux-gnu:/usr/lib/aarch64-linux-gnu/faketime";

/// A running server.
pub(crate) struct RedisServer {
    process: Child,
    folder: PathBuf,
    command: Command,
}

impl RedisServer {
    /// Starts a server on the system's clock.
    pub(crate) fn start() -> Self {
        Self::start_with(|_| ())
    }

    /// Starts a server whose clock stands still and is set by [`set_time`](Self::set_time).
    pub(crate) fn start_with_clock() -> Self {
        Self::start_with(|command| {
            command
                .env("LD_PRELOAD", PRELOAD)
                .env("LD_LIBRARY_PATH", LIBRARIES)
                .env("FAKETIME_TIMESTAMP_FILE", "time")
                .env("FAKETIME_NO_CACHE", "1")
                .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
                .env("TZ", "UTC");
        })
    }

    fn start_with(prepare: impl FnOnce(&mut Command)) -> Self {
        let folder = std::env::temp_dir().join(format!("threshold-redis-{}-{:x}", std::process::id(), rand_u64()));
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("time"), "2026-01-01 00:00:00").unwrap();
        let mut command = Command::new("redis-server");
        command.args(["--port", "0", "--unixsocket", "socket", "--save", "", "--appendonly", "no"]);
        command.current_dir(&folder).stdout(Stdio::null()).stderr(Stdio::null());
        prepare(&mut command);
        let process = spawn(&mut command, &folder);
        Self { process, folder, command }
    }

    /// Kills the server, as a power cut does.
    pub(crate) fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Starts the server again, on the same socket and without data.
    pub(crate) fn restart(&mut self) {
        self.process = spawn(&mut self.command, &self.folder);
    }

    /// Returns the URL of a store on this server.
    pub(crate) fn url(&self) -> String {
        format!("redis+unix://{}", self.folder.join("socket").display())
    }

    /// Opens a store as a node does.
    pub(crate) async fn open(&self) -> RedisStore {
        // Long: these tests are about answers, and a busy machine must not turn them into failures of the store.
        let options =
            RedisOptions::new(self.url().parse().unwrap(), KeyId::from_u32(1)).deadline(Duration::from_secs(20));
        RedisStore::open(options).await.unwrap()
    }

    /// Sets the clock of a server that was started with one.
    pub(crate) fn set_time(&self, now: Timestamp) {
        let time = jiff::Timestamp::from_microsecond(i64::try_from(now.micros()).unwrap()).unwrap();
        // libfaketime reads the file at every call, so it must never see half of it.
        let (new, file) = (self.folder.join("time.new"), self.folder.join("time"));
        fs::write(&new, time.strftime("%Y-%m-%d %H:%M:%S%.6f").to_string()).unwrap();
        fs::rename(new, file).unwrap();
    }

    /// Runs `redis-cli` and returns what it prints.
    pub(crate) fn cli(&self, arguments: &[&str]) -> String {
        let output = Command::new("redis-cli")
            .arg("-s")
            .arg(self.folder.join("socket"))
            .args(arguments)
            .output()
            .expect("redis-cli is installed");
        String::from_utf8(output.stdout).unwrap()
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Starts a server and waits until it answers.
fn spawn(command: &mut Command, folder: &Path) -> Child {
    let _ = fs::remove_file(folder.join("socket"));
    let mut process = command.spawn().expect("redis-server is installed");
    let begun = Instant::now();
    while std::os::unix::net::UnixStream::connect(folder.join("socket")).is_err() {
        assert!(begun.elapsed() < Duration::from_secs(20), "redis-server does not answer");
        assert!(process.try_wait().unwrap().is_none(), "redis-server has ended");
        std::thread::sleep(Duration::from_millis(5));
    }
    process
}

fn rand_u64() -> u64 {
    use std::hash::{BuildHasher as _, RandomState};
    RandomState::new().hash_one(0)
}
