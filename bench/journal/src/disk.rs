//! What each thing that is remembered takes on disk: ten thousand of them in a real file, less what an empty one takes.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use threshold_core::policy::{Ban, Layer, ListEntry};
use threshold_core::{Facts, Timestamp};
use threshold_limiter::journal::{AuditLine, Journal};
use threshold_limiter::{Attempted, LoginRequest};

use crate::{World, file};

const MANY: u32 = 10_000;
const POLICY: &str = r#"
[login]
account = "1000/day"
ip = "1000/day"

[[rule]]
name = "posts"
per = ["user"]
limit = "1/day"
ladder = "patient"
strike = "request"

[ladders.patient]
rungs = ["deny"]
"#;

type Fill = fn(&World, u32) -> Result<()>;

pub(super) fn report(folder: &Path) -> Result<()> {
    println!("What {MANY} of each take on disk, after a clean stop:\n\n| what | bytes each |\n|---|---|");
    let all: [(&str, Fill); 6] = [
        ("a subject with a strike", strike),
        ("an account with a failure", |world, number| login(world, number, false, 1)),
        ("an account with a known device", |world, number| login(world, number, true, 1)),
        ("an account with ten known devices", |world, number| login(world, number, true, 10)),
        ("a ban on an address, with a reason of 21 letters", ban),
        ("a line of the audit, likewise", line),
    ];
    let empty = size(folder, 0, |_, _| Ok(()))?;
    for (what, fill) in all {
        let full = size(folder, MANY, fill)?;
        println!("| {what} | {:.0} |", (full - empty) as f64 / f64::from(MANY));
    }
    println!();
    Ok(())
}

fn size(folder: &Path, many: u32, fill: Fill) -> Result<u64> {
    let path = file(folder, "threshold.db");
    let world = World::open(POLICY, &path)?;
    // In groups, as they come in life: a page is then filled by and by.
    for number in 0..many {
        fill(&world, number)?;
        if number % 100 == 99 {
            while world.journal.write_lag().is_some() {
                std::thread::yield_now();
            }
        }
    }
    ensure!(world.journal.close(), "the disk does not take it");
    drop(world);
    let kept = Journal::read(&path)?;
    ensure!(kept.damage.is_none(), "the file is damaged");
    let size = std::fs::metadata(&path)?.len();
    std::fs::remove_file(&path)?;
    Ok(size)
}

fn strike(world: &World, number: u32) -> Result<()> {
    let name = format!("user{number}");
    for _ in 0..2 {
        let _ = world.limiter.check(&Facts { user: Some(&name), ..Facts::default() })?;
    }
    Ok(())
}

fn login(world: &World, number: u32, success: bool, times: u32) -> Result<()> {
    let name = format!("account{number}");
    for _ in 0..times {
        let request = LoginRequest { account: Some(&name), ..LoginRequest::default() };
        let Attempted::Allowed(attempt) = world.limiter.login_attempt(&request)? else { anyhow::bail!("refused") };
        let _ = world.limiter.login_result(&attempt, success)?;
    }
    Ok(())
}

fn ban(world: &World, number: u32) -> Result<()> {
    let address = std::net::Ipv4Addr::from_bits(0x0b00_0000 + number).to_string();
    let whom = ListEntry::named(Layer::Edge, &address).ok().context("an address can be banned")?;
    let (id, now) = (whom.ban_id(world.limiter.key()), Timestamp::from(world.limiter.now()));
    let by = "operator #0123456789abcdef".into();
    let ban = Ban { whom, reason: "scrapes the catalogue".into(), by, from: now, until: Timestamp::MAX };
    Ok(world.limiter.bans().set(id, ban, now)?)
}

fn line(world: &World, number: u32) -> Result<()> {
    let line = AuditLine {
        at: world.limiter.now().into(),
        who: "operator #0123456789abcdef".to_owned(),
        action: "ban".to_owned(),
        about: std::net::Ipv4Addr::from_bits(0x0b00_0000 + number).to_string(),
        why: "scrapes the catalogue".to_owned(),
    };
    Ok(world.journal.audit(line)?)
}
