//! How long a decision takes while strikes are written down, on a disk as it is and on one that takes a second for each
//! write, beside the same strikes without a journal.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use findings::Spread;
use threshold_core::{Facts, Policy};
use threshold_limiter::Limiter;

use crate::{World, file};

/// With room to strike for minutes, and a second rule that nobody goes over.
const POLICY: &str = r#"
[memory]
max_keys = 4000000

[[rule]]
name = "posts"
match = { path = "/posts" }
per = ["user"]
limit = "1/day"
ladder = "patient"
strike = "request"

[[rule]]
name = "reads"
match = { path = "/reads" }
per = ["user"]
limit = "1000000/min"

[ladders.patient]
rungs = ["deny"]
"#;
/// Without a journal; on the disk as it is; on one that takes a second for each write.
const DISKS: [&str; 3] = ["none", "ok", "slow"];
const ROUND: Duration = Duration::from_secs(2);
/// Between two strikes: a thousand a second keep the journal writing all the time.
const STRIKES: Duration = Duration::from_millis(1);
const KEYS: usize = 10_000;

pub(super) fn report(folder: &Path) -> Result<()> {
    let rounds: usize = std::env::var("ROUNDS").map_or(Ok(7), |rounds| rounds.parse())?;
    let library = file(folder, "fsync.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates/threshold-server/tests/serve/disk/fsync.c");
    let mut cc = Command::new("cc");
    ensure!(cc.args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(source).status()?.success(), "cc failed");
    let mut figures: BTreeMap<&str, Vec<[f64; 3]>> = BTreeMap::new();
    for round in 0..rounds {
        for turn in 0..DISKS.len() {
            let disk = DISKS[(turn + round) % DISKS.len()];
            let order = file(folder, "order");
            std::fs::write(&order, disk)?;
            let mut child = Command::new(std::env::current_exe()?);
            child.arg(disk).arg(folder).env("LD_PRELOAD", &library).env("THRESHOLD_FSYNC", &order);
            let out = child.output()?;
            ensure!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
            let text = String::from_utf8(out.stdout)?;
            let mut told = text.split_whitespace().map(str::parse);
            let mut next = || told.next().context("three figures are told")?.context("as numbers");
            figures.entry(disk).or_default().push([next()?, next()?, next()?]);
        }
    }
    println!(
        "Decisions of one thread while another strikes 1,000 times a second, {rounds} rounds of {ROUND:?} by turns:\n"
    );
    println!(
        "| journal | p50 ns | p99 ns | p99.9 ns | p99 to that without, in the same round |\n|---|---|---|---|---|"
    );
    for (disk, name) in DISKS.into_iter().zip(["none", "the disk as it is", "each write takes a second"]) {
        let (own, none) = (&figures[disk], &figures["none"]);
        let median = |at: usize| Spread::of(own.iter().map(|figures| figures[at])).median;
        let ratio = Spread::of(own.iter().zip(none).map(|(own, none)| own[1] / none[1]));
        println!(
            "| {name} | {:.0} | {:.0} | {:.0} | {:.2} ({:.2} to {:.2}) |",
            median(0),
            median(1),
            median(2),
            ratio.median,
            ratio.min,
            ratio.max
        );
    }
    Ok(())
}

/// One round on one disk, in a process of its own: prints the three figures.
pub(super) fn measure(disk: &str, folder: &Path) -> Result<()> {
    if disk == "none" {
        return round(&Limiter::new(Policy::parse(POLICY, &|_| None)?), || true);
    }
    let path = file(folder, &format!("{}.db", std::process::id()));
    // Made while the disk is well.
    let order = std::env::var("THRESHOLD_FSYNC")?;
    std::fs::write(&order, "ok")?;
    let world = World::open(POLICY, &path)?;
    std::fs::write(&order, disk)?;
    // A disk that is never behind would not have been put to the test.
    let was_busy = || disk == "ok" || world.journal.write_lag().is_some();
    round(&world.limiter, was_busy)?;
    std::fs::write(&order, "ok")?;
    Ok(())
}

fn round(limiter: &Limiter, was_busy: impl Fn() -> bool) -> Result<()> {
    let names: Vec<String> = (0..KEYS).map(|number| format!("user{number}")).collect();
    let over = AtomicBool::new(false);
    let mut times = std::thread::scope(|scope| -> Result<Vec<u32>> {
        scope.spawn(|| {
            for number in 0.. {
                let name = format!("striker{}", number % 100_000);
                let facts = Facts { user: Some(&name), path: Some("/posts"), ..Facts::default() };
                let _ = (limiter.check(&facts), limiter.check(&facts));
                if over.load(Ordering::Relaxed) {
                    break;
                }
                std::thread::sleep(STRIKES);
            }
        });
        let decided = decide(limiter, &names);
        over.store(true, Ordering::Relaxed);
        decided
    })?;
    ensure!(was_busy(), "the disk kept up: nothing was measured");
    times.sort_unstable();
    let at = |share: f64| times.get((times.len() as f64 * share) as usize).copied().unwrap_or(0);
    println!("{} {} {}", at(0.5), at(0.99), at(0.999));
    Ok(())
}

/// The time of each decision, in nanoseconds.
fn decide(limiter: &Limiter, names: &[String]) -> Result<Vec<u32>> {
    let mut times = Vec::with_capacity(8_000_000);
    let begun = Instant::now();
    while begun.elapsed() < ROUND && times.len() < times.capacity() {
        for name in names {
            let facts = Facts { user: Some(name), path: Some("/reads"), ..Facts::default() };
            let before = Instant::now();
            let decision = limiter.check(&facts)?;
            let took = before.elapsed();
            ensure!(decision.allowed(), "nobody reads too much");
            times.push(u32::try_from(took.as_nanos()).unwrap_or(u32::MAX));
        }
    }
    Ok(times)
}
