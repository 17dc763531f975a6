//! Who is measured: Redis as the floor, Threshold, and the peers that this machine has.

use std::path::Path;
use std::process::Command;
use std::rc::Rc;

use anyhow::{Context as _, Result, bail};
use findings::program;

use crate::KEYS;
use crate::process::Running;

/// Pinned: a figure belongs to a version.
const THROTTLECRAB: &str = "0.4.40";
/// So many requests at once, and so many a second: none is denied.
const FAR: &str = "1000000000";
/// How many requests a pipeline has.
const PIPELINES: [usize; 2] = [1, 16];

/// Somebody to ask, and how.
pub struct Entry {
    pub name: &'static str,
    pub pipeline: usize,
    /// The process that answers.
    pub process: Rc<Running>,
    /// Writes the request for a key.
    pub request: fn(&mut Vec<u8>, u64),
    /// How many lines a reply has.
    pub lines: usize,
}

/// Everybody who could be started.
pub struct Started {
    pub entries: Vec<Entry>,
    /// Who is not here, and why.
    pub absent: Vec<String>,
}

/// The name of the floor.
pub const FLOOR: &str = "Redis, INCR";

/// Starts everybody.
pub fn start() -> Result<Started> {
    let mut all = Started { entries: Vec::new(), absent: Vec::new() };
    all.try_add(FLOOR, redis(&[]), incr, 1);
    all.try_add("threshold, CL.THROTTLE", threshold(), cl_throttle, 6);
    all.try_add("redis-cell, CL.THROTTLE", redis_cell(), cl_throttle, 6);
    all.try_add("throttlecrab-server, THROTTLE", throttlecrab(), throttle, 6);
    Ok(all)
}

impl Started {
    fn try_add(&mut self, name: &'static str, process: Result<Running>, request: fn(&mut Vec<u8>, u64), lines: usize) {
        match process {
            Ok(process) => {
                let process = Rc::new(process);
                let entry = |pipeline| Entry { name, pipeline, process: Rc::clone(&process), request, lines };
                self.entries.extend(PIPELINES.map(entry));
            }
            Err(error) => self.absent.push(format!("{name}: {error:#}")),
        }
    }
}

fn threshold() -> Result<Running> {
    let program = program()?;
    Running::start("threshold", |address| {
        let mut command = Command::new(program);
        command.args(["serve", "--no-db", "--http", "127.0.0.1:0", "--resp", &address.to_string()]);
        command
    })
}

fn redis(more: &[&str]) -> Result<Running> {
    Running::start("redis-server", |address| {
        let mut command = Command::new("redis-server");
        command.args(["--bind", &address.ip().to_string(), "--port", &address.port().to_string()]);
        command.args(["--save", "", "--appendonly", "no"]).args(more);
        command
    })
}

/// No registry has it: it is taken from where `REDIS_CELL` says.
fn redis_cell() -> Result<Running> {
    let module = std::env::var("REDIS_CELL").context("REDIS_CELL does not say where libredis_cell.so is")?;
    redis(&["--loadmodule", &module])
}

/// Installed beside the benchmark's own build, from its registry.
fn throttlecrab() -> Result<Running> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/peers");
    let program = root.join("bin/throttlecrab-server");
    if !program.exists() {
        let mut install = Command::new("cargo");
        install.args(["install", "throttlecrab-server", "--locked", "--version", THROTTLECRAB, "--root"]).arg(&root);
        if !install.status()?.success() {
            bail!("cannot be installed");
        }
    }
    Running::start("throttlecrab-server", |address| {
        let mut command = Command::new(program);
        command.args(["--redis", "--redis-host", &address.ip().to_string(), "--redis-port", &address.port().to_string()]);
        command.args(["--store-capacity", &KEYS.to_string(), "--log-level", "error"]);
        command
    })
}

fn incr(bytes: &mut Vec<u8>, key: u64) {
    command(bytes, &["INCR", &format!("user{key}")]);
}

fn cl_throttle(bytes: &mut Vec<u8>, key: u64) {
    command(bytes, &["CL.THROTTLE", &format!("user{key}"), FAR, FAR, "1"]);
}

fn throttle(bytes: &mut Vec<u8>, key: u64) {
    command(bytes, &["THROTTLE", &format!("user{key}"), FAR, FAR, "1"]);
}

fn command(bytes: &mut Vec<u8>, words: &[&str]) {
    bytes.extend_from_slice(format!("*{}\r\n", words.len()).as_bytes());
    for word in words {
        bytes.extend_from_slice(format!("${}\r\n{word}\r\n", word.len()).as_bytes());
    }
}
