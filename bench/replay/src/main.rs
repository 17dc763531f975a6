//! How fast `threshold replay` goes through a combined log under four layers, beside a bare parse of the same file, and
//! how much memory that takes.
//!
//! `THRESHOLD_BIN` names the program, built from this repository unless said; `LINES` how many lines the log has.

mod bare;
mod log;

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

/// Runs of each; the fastest counts, since everything else a machine does only slows it down.
const ROUNDS: usize = 3;

/// Every request meets all four.
const POLICY: &str = r#"
[[rule]]
name = "address"
layer = "edge"
per = ["ip"]
limit = "600/min"

[[rule]]
name = "customer"
layer = "tenant"
per = ["tenant"]
limit = "100000/min"
algorithm = "fixed-window"

[[rule]]
name = "person"
layer = "user"
per = ["user"]
limit = "300/min"

[[rule]]
name = "operation"
layer = "endpoint"
match = { path = "/api/**" }
per = ["user", "endpoint"]
limit = "1000/h"
algorithm = "fixed-window"
"#;

fn main() -> anyhow::Result<()> {
    let lines: u64 = std::env::var("LINES").map_or(Ok(2_000_000), |lines| lines.parse())?;
    let program = findings::program()?;
    let folder = std::env::temp_dir().join(format!("threshold-bench-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let result = measure(&folder, &program, lines);
    std::fs::remove_dir_all(&folder)?;
    result
}

fn measure(folder: &Path, program: &Path, lines: u64) -> anyhow::Result<()> {
    let (log, policy) = (folder.join("access.log"), folder.join("policy.toml"));
    let mut out = BufWriter::new(File::create(&log)?);
    log::write(&mut out, lines)?;
    out.flush()?;
    std::fs::write(&policy, POLICY)?;
    let bytes = std::fs::metadata(&log)?.len();
    println!("{}", findings::machine());
    println!("{lines} lines of the combined format, {} MB, four layers", bytes / 1_000_000);
    let mut bare = Duration::MAX;
    let mut rehearsed = Duration::MAX;
    let mut memory = 0;
    for _ in 0..ROUNDS {
        let begin = Instant::now();
        let read = bare::parse(&log)?;
        bare = bare.min(begin.elapsed());
        ensure!(read.requests == lines, "the bare parse read {} requests", read.requests);
        let (took, peak) = replay(program, &policy, &log, lines)?;
        rehearsed = rehearsed.min(took);
        memory = memory.max(peak);
    }
    let rate = |took: Duration| lines as f64 / took.as_secs_f64();
    println!("bare parse        {:>12.0} lines/s", rate(bare));
    println!("threshold replay  {:>12.0} lines/s, at most {memory} MB", rate(rehearsed));
    println!("ratio             {:>12.2} times the bare parse", rehearsed.as_secs_f64() / bare.as_secs_f64());
    Ok(())
}

/// Runs the program once; how long it took, and the most memory it held, in MB.
fn replay(program: &Path, policy: &Path, log: &Path, lines: u64) -> anyhow::Result<(Duration, u64)> {
    // To a file: a pipe that nobody empties would stop it.
    let answer = log.with_extension("json");
    let out = File::create(&answer)?;
    let begin = Instant::now();
    let mut child = Command::new(program)
        .arg("replay")
        .args([policy, log])
        .args(["--json", "--tenant-field", "ident"])
        .stdout(Stdio::from(out))
        .spawn()
        .with_context(|| format!("cannot start {}", program.display()))?;
    let status = PathBuf::from(format!("/proc/{}/status", child.id()));
    let mut peak = 0;
    while child.try_wait()?.is_none() {
        // The high-water mark only grows, so the last look is good enough.
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        let mark = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        peak = mark.and_then(|mark| mark.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(peak);
        std::thread::sleep(Duration::from_millis(2));
    }
    let took = begin.elapsed();
    let text = std::fs::read_to_string(&answer)?;
    ensure!(child.wait()?.success() && text.contains(&format!("\"requests\": {lines},")), "the rehearsal failed");
    Ok((took, peak / 1_000))
}
