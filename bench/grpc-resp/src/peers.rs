//! Who is measured: the floors, Threshold, and the peers that this machine has.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use findings::program;

use crate::floor::FIGURES;
use crate::messages::{DOMAIN, FAR, SHOULD_RATE_LIMIT, THROTTLE, four_descriptors, one_limit};
use crate::process::Running;
use crate::{KEYS, grpc, resp};

/// Pinned: a figure belongs to a version.
const THROTTLECRAB: &str = "0.4.40";
/// The four layers: a name, and what each counts by.
const LAYERS: [(&str, &str); 4] =
    [("address", "'ip'"), ("tenant", "'tenant'"), ("user", "'user'"), ("path", "'fact:caller', 'fact:path'")];

/// Somebody to ask, and how.
pub struct Entry {
    pub name: &'static str,
    /// The process that answers.
    pub process: Rc<Running>,
    pub call: Call,
}

/// How somebody is asked.
#[derive(Debug, Clone, Copy)]
pub enum Call {
    Resp(resp::Call),
    Grpc(grpc::Call),
}

impl Entry {
    /// Whether the others of its table are compared with it.
    pub fn is_floor(&self) -> bool {
        [REDIS, TONIC].contains(&self.name)
    }
}

/// Everybody who could be started.
pub struct Started {
    pub entries: Vec<Entry>,
    /// Who is not here, and why.
    pub absent: Vec<String>,
}

/// The floor of Redis clients.
pub const REDIS: &str = "Redis, INCR";
/// The floor of gRPC clients.
pub const TONIC: &str = "tonic, OK";

/// Starts everybody.
pub fn start() -> Result<Started> {
    let folder = std::env::temp_dir().join(format!("threshold-grpc-resp-bench-{}", std::process::id()));
    fs::create_dir_all(&folder)?;
    let mut all = Started { entries: Vec::new(), absent: Vec::new() };
    all.add_resp(REDIS, redis(&[]), resp::incr, 1);
    all.add_resp("threshold, CL.THROTTLE", threshold_resp(), resp::cl_throttle, 6);
    all.add_resp("redis-cell, CL.THROTTLE", redis_cell(), resp::cl_throttle, 6);
    all.add_resp("throttlecrab-server, THROTTLE", throttlecrab("redis"), resp::throttle, 6);
    all.add_grpc(TONIC, floor("ok"), SHOULD_RATE_LIMIT, four_descriptors);
    all.add_grpc("tonic, OK with figures", floor(FIGURES), SHOULD_RATE_LIMIT, four_descriptors);
    all.add_grpc("threshold, ShouldRateLimit", threshold_grpc(&folder), SHOULD_RATE_LIMIT, four_descriptors);
    all.add_grpc("limitador-server, ShouldRateLimit", limitador(&folder), SHOULD_RATE_LIMIT, four_descriptors);
    all.add_grpc("throttlecrab-server, Throttle", throttlecrab("grpc"), THROTTLE, one_limit);
    // Everybody has read its files.
    fs::remove_dir_all(&folder)?;
    Ok(all)
}

impl Started {
    fn add_resp(&mut self, name: &'static str, process: Result<Running>, request: fn(&mut Vec<u8>, u64), lines: usize) {
        let calls = resp::PIPELINES.map(|pipeline| Call::Resp(resp::Call { request, pipeline, lines }));
        self.try_add(name, process, &calls);
    }

    fn add_grpc(
        &mut self,
        name: &'static str,
        process: Result<Running>,
        path: &'static str,
        message: fn(u64) -> Bytes,
    ) {
        let call = |(connections, at_once)| Call::Grpc(grpc::Call { path, message, connections, at_once });
        self.try_add(name, process, &grpc::SHAPES.map(call));
    }

    fn try_add(&mut self, name: &'static str, process: Result<Running>, calls: &[Call]) {
        match process {
            Ok(process) => {
                let process = Rc::new(process);
                self.entries.extend(calls.iter().map(|call| Entry { name, process: Rc::clone(&process), call: *call }));
            }
            Err(error) => self.absent.push(format!("{name}: {error:#}")),
        }
    }
}

fn floor(answer: &str) -> Result<Running> {
    let own = std::env::current_exe()?;
    Running::start("tonic", |address| {
        let mut command = Command::new(own);
        command.args(["floor", &address.to_string(), answer]);
        command
    })
}

fn threshold_resp() -> Result<Running> {
    threshold(&[], |address| ["--no-grpc", "--resp", address].map(str::to_owned))
}

/// Threshold with a rule for each of the four descriptors.
fn threshold_grpc(folder: &Path) -> Result<Running> {
    let rules = LAYERS.map(|(name, per)| {
        format!(
            "[[rule]]\nname = '{name}'\nlayer = 'edge'\nper = [{per}]\nlimit = '{FAR}/s'\non_missing = 'skip'\n\
             match = {{ fact.domain = '{DOMAIN}' }}\n"
        )
    });
    let policy = folder.join("policy.toml");
    let keys = KEYS * LAYERS.len() as u64;
    let text = format!(
        "[envoy.descriptors]\ntenant = 'tenant'\nuser = 'user'\n{}[memory]\nmax_keys = {keys}\n",
        rules.concat()
    );
    fs::write(&policy, text)?;
    threshold(&[policy], |address| ["--no-resp", "--grpc", address].map(str::to_owned))
}

fn threshold(policy: &[PathBuf], door: impl FnOnce(&str) -> [String; 3]) -> Result<Running> {
    let program = program()?;
    Running::start("threshold", |address| {
        let mut command = Command::new(program);
        command.arg("serve").args(policy).args(["--no-db", "--http", "127.0.0.1:0"]).args(door(&address.to_string()));
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

/// Installed beside the benchmark's own build, from its registry. Without `protoc` it builds without gRPC.
fn throttlecrab(transport: &str) -> Result<Running> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/peers");
    let program = root.join("bin/throttlecrab-server");
    if !program.exists() {
        let mut install = Command::new("cargo");
        install.args(["install", "throttlecrab-server", "--locked", "--version", THROTTLECRAB, "--root"]).arg(&root);
        if !install.status()?.success() {
            bail!("cannot be installed");
        }
    }
    Running::start("throttlecrab-server", |address: SocketAddr| {
        let flag = |name: &str| format!("--{transport}{name}");
        let mut command = Command::new(program);
        command.arg(flag("")).args([
            flag("-host"),
            address.ip().to_string(),
            flag("-port"),
            address.port().to_string(),
        ]);
        command.args(["--store-capacity", &KEYS.to_string(), "--log-level", "error"]);
        command
    })
}

/// No registry has it: it is taken from where `LIMITADOR_SERVER` says.
fn limitador(folder: &Path) -> Result<Running> {
    let program = std::env::var_os("LIMITADOR_SERVER").context("LIMITADOR_SERVER does not say where it is")?;
    let limits = folder.join("limits.yaml");
    let counted = [
        "'descriptors[0].remote_address'",
        "'descriptors[1].tenant'",
        "'descriptors[2].user'",
        "'descriptors[3].caller', 'descriptors[3].path'",
    ];
    let limit = |variables| {
        format!(
            "- namespace: {DOMAIN}\n  max_value: {FAR}\n  seconds: 3600\n  conditions: []\n  variables: [{variables}]\n"
        )
    };
    fs::write(&limits, counted.map(limit).concat())?;
    let other = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
    Running::start("limitador-server", |address| {
        let (host, port) = (address.ip().to_string(), address.port().to_string());
        let mut command = Command::new(program);
        command.args(["--http-ip", &host, "--http-port", &other, "--rls-ip", &host, "--rls-port", &port]);
        command.arg(limits).arg("memory");
        command
    })
}
