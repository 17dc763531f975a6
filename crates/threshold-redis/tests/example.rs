//! Runs the example twice on one `redis-server`.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A Redis server on a socket in a folder of its own, until this value is dropped.
struct Redis(Child, PathBuf);

impl Redis {
    fn start() -> Self {
        let folder = std::env::temp_dir().join(format!("threshold-example-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let mut server = Command::new("redis-server");
        server.args(["--port", "0", "--save", "", "--unixsocket"]).arg(folder.join("socket")).arg("--dir").arg(&folder);
        let started = Self(server.stdout(Stdio::null()).spawn().expect("redis-server is installed"), folder);
        let begun = Instant::now();
        while std::os::unix::net::UnixStream::connect(started.1.join("socket")).is_err() {
            assert!(begun.elapsed() < Duration::from_secs(60), "redis-server does not answer");
            std::thread::sleep(Duration::from_millis(5));
        }
        started
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
        let _ = std::fs::remove_dir_all(&self.1);
    }
}

/// The example, which cargo builds beside the tests.
fn example() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    tests.parent().and_then(Path::parent).unwrap().join("examples/redis")
}

#[test]
fn two_processes_on_one_redis_share_a_limit() {
    let redis = Redis::start();
    let url = format!("redis+unix://{}", redis.1.join("socket").display());
    let lines = || {
        let mut example = Command::new(example());
        example.env("REDIS", &url).env("THRESHOLD_SECRET", "the same secret in both processes");
        let output = example.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let lines = [lines(), lines()].concat();
    assert_eq!(lines.lines().collect::<Vec<_>>(), ["allowed", "allowed", "allowed", "allowed", "allowed", "denied"]);
}
