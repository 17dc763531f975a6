//! Who is measured: Threshold, the floor, and the peers that this machine has.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::rc::Rc;

use anyhow::{Context as _, Result, bail};
use findings::program;

use crate::KEYS;
use crate::process::Running;
use crate::requests::{self, FAR};

/// Pinned: a figure belongs to a version.
const THROTTLECRAB: &str = "0.4.40";

/// Somebody to ask, and how.
pub struct Entry {
    /// Who, and by which call.
    pub name: String,
    /// The process that answers.
    pub process: Rc<Running>,
    /// Writes the request for a key.
    pub request: fn(&mut Vec<u8>, u32),
    /// The name of the entry that does the same and decides nothing.
    pub floor: &'static str,
}

/// Everybody who could be started.
pub struct Started {
    /// To be asked, each.
    pub entries: Vec<Entry>,
    /// Who is not here, and why.
    pub absent: Vec<String>,
}

/// The floor of those who are sent JSON.
pub const POST: &str = "axum, POST";
/// The floor of those who read header fields.
pub const GET: &str = "axum, GET";

/// Starts everybody.
pub fn start() -> Result<Started> {
    let folder = std::env::temp_dir().join(format!("threshold-http-bench-{}", std::process::id()));
    fs::create_dir_all(&folder)?;
    let mut all = Started { entries: Vec::new(), absent: Vec::new() };
    let floor = Running::start("axum", floor)?;
    all.add(floor, &[(POST, requests::check, POST), (GET, requests::threshold_get, GET)]);
    let threshold = threshold(&folder)?;
    all.add(
        threshold,
        &[("threshold, POST /v1/check", requests::check, POST), ("threshold, GET /auth", requests::threshold_get, GET)],
    );
    all.try_add(throttlecrab(), &[("throttlecrab-server, POST", requests::throttlecrab, POST)]);
    all.try_add(nginx(&folder), &[("nginx, limit_req", requests::by_header, GET)]);
    all.try_add(haproxy(&folder), &[("HAProxy, stick table", requests::by_header, GET)]);
    all.try_add(limitador(&folder), &[("limitador-server, POST", requests::limitador, POST)]);
    // Everybody has read its files.
    fs::remove_dir_all(&folder)?;
    Ok(all)
}

type Call = (&'static str, fn(&mut Vec<u8>, u32), &'static str);

impl Started {
    fn add(&mut self, process: Running, calls: &[Call]) {
        let process = Rc::new(process);
        for (name, request, floor) in calls {
            let process = Rc::clone(&process);
            self.entries.push(Entry { name: (*name).to_owned(), process, request: *request, floor });
        }
    }

    fn try_add(&mut self, process: Result<Running>, calls: &[Call]) {
        match process {
            Ok(process) => self.add(process, calls),
            Err(error) => self.absent.extend(calls.iter().map(|(name, ..)| format!("{name}: {error:#}"))),
        }
    }
}

fn floor(address: SocketAddr) -> Command {
    let own = std::env::current_exe().unwrap_or_default();
    let mut command = Command::new(own);
    command.args(["floor", &address.to_string()]);
    command
}

/// Threshold with the starter policy, and nothing asked yet.
pub fn fresh() -> Result<Running> {
    let program = program()?;
    Running::start("threshold", |address| {
        let mut command = Command::new(program);
        command.arg("serve").args(["--no-db", "--http", &address.to_string()]);
        command
    })
}

fn threshold(folder: &Path) -> Result<Running> {
    let policy = folder.join("policy.toml");
    fs::write(&policy, requests::policy(KEYS))?;
    let program = program()?;
    Running::start("threshold", |address| {
        let mut command = Command::new(program);
        command.arg("serve").arg(policy).args(["--no-db", "--http", &address.to_string()]);
        command
    })
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
        command.args(["--http", "--http-host", &address.ip().to_string(), "--http-port", &address.port().to_string()]);
        command.args(["--store-capacity", &KEYS.to_string(), "--log-level", "error"]);
        command
    })
}

fn nginx(folder: &Path) -> Result<Running> {
    let places: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .iter()
        .map(|name| format!("{name}_temp_path {}/{name};\n", folder.display()))
        .collect();
    Running::start("nginx", |address| {
        // Not `return`: it answers before limit_req is asked.
        let text = format!(
            "daemon off; master_process off; pid {0}/nginx.pid; error_log /dev/null;\n\
             events {{ worker_connections 1024; }}\nhttp {{\naccess_log off; {places}\
             limit_req_zone $http_x_user zone=keys:256m rate=10000r/s;\nlimit_req_status 429;\n\
             server {{ listen {address}; keepalive_requests 1000000000;\n\
             location / {{ limit_req zone=keys burst=1000000 nodelay; empty_gif; }} }}\n}}\n",
            folder.display()
        );
        let file = folder.join("nginx.conf");
        let _ = fs::write(&file, text);
        let mut command = Command::new("nginx");
        command.arg("-p").arg(folder).arg("-c").arg(&file).args(["-e", "/dev/null"]);
        command
    })
}

fn haproxy(folder: &Path) -> Result<Running> {
    Running::start("haproxy", |address| {
        let text = format!(
            "global\n  maxconn 1000\ndefaults\n  mode http\n  timeout client 60s\n  timeout server 60s\n  \
             timeout connect 5s\nfrontend keys\n  bind {address}\n  \
             stick-table type string len 32 size {KEYS} expire 1h store http_req_rate(60s)\n  \
             http-request track-sc0 req.hdr(x-user)\n  \
             http-request return status 429 if {{ sc_http_req_rate(0) gt {FAR} }}\n  http-request return status 200\n"
        );
        let file = folder.join("haproxy.cfg");
        let _ = fs::write(&file, text);
        let mut command = Command::new("haproxy");
        command.arg("-db").arg("-f").arg(&file);
        command
    })
}

/// No registry holds it: it is taken from where `LIMITADOR_SERVER` says.
fn limitador(folder: &Path) -> Result<Running> {
    let program = std::env::var_os("LIMITADOR_SERVER").context("LIMITADOR_SERVER does not say where it is")?;
    let limits = folder.join("limits.yaml");
    fs::write(
        &limits,
        format!("- namespace: bench\n  max_value: {FAR}\n  seconds: 3600\n  conditions: []\n  variables: [user]\n"),
    )?;
    let other = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
    Running::start("limitador-server", |address| {
        let (host, port) = (address.ip().to_string(), address.port().to_string());
        let mut command = Command::new(program);
        command.args(["--http-ip", &host, "--http-port", &port, "--rls-ip", &host, "--rls-port", &other]);
        command.arg(limits).arg("memory");
        command
    })
}
