//! How long an import of 100,000 bans takes, from the list in memory to the answer: one transaction, one sync of the disk.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use findings::Spread;
use threshold_core::control::ControlChange;
use threshold_core::policy::{Ban, Layer, ListEntry};
use threshold_core::{Digest, Timestamp};
use threshold_limiter::journal::{AuditLine, Journal};
use threshold_limiter::store::at_once;

use crate::{World, file};

const MANY: u32 = 100_000;
const POLICY: &str = "[[rule]]\nname = 'all'\nper = ['ip']\nlimit = '100/min'";

pub(super) fn report(folder: &Path) -> Result<()> {
    let rounds: usize = std::env::var("ROUNDS").map_or(Ok(7), |rounds| rounds.parse())?;
    let (mut first, mut second) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let path = file(folder, "import.db");
        let world = World::open(POLICY, &path)?;
        first.push(import(&world, 0, &[])?);
        let before: Vec<Digest> = world.limiter.bans().of_origin("list").into_iter().map(|(id, _)| id).collect();
        second.push(import(&world, MANY, &before)?);
        ensure!(world.journal.close(), "the disk does not take it");
        drop(world);
        let rows = Journal::read(&path)?.rows.len();
        ensure!(rows == usize::try_from(MANY)?, "{rows} rows are in the file");
        std::fs::remove_file(&path)?;
    }
    println!("An import of {MANY} bans on networks, until it is on disk, {rounds} rounds:\n");
    println!("| import | ms, in memory | ms, until it is on disk |\n|---|---|---|");
    for (name, times) in [("into an empty list", first), ("in place of as many others", second)] {
        let [memory, disk] = [0, 1].map(|at| Spread::of(times.iter().map(|own: &[f64; 2]| own[at])));
        println!(
            "| {name} | {:.0} ({:.0} to {:.0}) | {:.0} ({:.0} to {:.0}) |",
            memory.median, memory.min, memory.max, disk.median, disk.min, disk.max
        );
    }
    println!();
    Ok(())
}

/// Imports networks in place of the bans with these ids. Returns the milliseconds until they are in force, and until they are on
/// disk.
fn import(world: &World, start: u32, before: &[Digest]) -> Result<[f64; 2]> {
    let (now, key) = (Timestamp::from(world.limiter.now()), world.limiter.key());
    let begun = Instant::now();
    let mut changes = Vec::new();
    for number in start..start + MANY {
        let network = format!("{}/24", std::net::Ipv4Addr::from_bits(0x0b00_0000 + (number << 8)));
        let whom = ListEntry::named(Layer::Edge, &network).ok().context("a network can be banned")?;
        let (reason, by) = ("SBL256894".into(), Ban::by_origin("list"));
        let ban = Ban { whom, reason, by, from: now, until: Timestamp::MAX };
        changes.push(ControlChange::Ban { id: ban.id(key), ban: Some(Arc::new(ban)) });
    }
    changes.extend(before.iter().map(|id| ControlChange::Ban { id: *id, ban: None }));
    let change = world.journal.begin_change()?;
    at_once(world.limiter.change_control_all(|| changes.clone().into()))?;
    let (who, action) = ("operator #0123456789abcdef".to_owned(), format!("import: {MANY} bans"));
    change.confirm(AuditLine { at: now, who, action, about: "origin list".to_owned(), why: String::new() });
    let memory = begun.elapsed();
    while world.journal.write_lag().is_some() {
        std::thread::yield_now();
    }
    Ok([memory, begun.elapsed()].map(|time| time.as_secs_f64() * 1_000.0))
}
