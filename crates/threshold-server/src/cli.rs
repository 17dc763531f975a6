//! The definition of the command line.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use threshold_core::Span;
use threshold_core::limit::parse_span;
use threshold_core::path::is_method;
use threshold_rehearsal::cases::TestArgs;
use threshold_rehearsal::lint::{Denied, LintArgs};
use threshold_rehearsal::pair;

use crate::door::HostName;
use crate::serve::Address;
use crate::signals::sinks::Lines;

/// Decides, for every request, whether its caller may cross.
#[derive(Debug, Parser)]
#[command(name = "threshold", version = crate::BUILD, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Answer over HTTP and RESP whether requests may cross
    Serve(Box<ServeArgs>),
    /// Serve a policy with made-up traffic, and a dashboard to watch it
    Demo(DemoArgs),
    /// Write a commented policy to standard output
    Init(InitArgs),
    /// Check a policy: exits with 0 if clean, 1 on warnings that are denied, 2 on errors
    Lint(LintArgs),
    /// Show which rules a request meets, with their keys and limits, and why
    Explain(Box<ExplainArgs>),
    /// Run a policy's own test cases
    Test(TestArgs),
    /// Show what a policy would have done to recorded traffic
    Replay(Box<threshold_rehearsal::replay::ReplayArgs>),
    /// Write the configuration of a proxy that asks Threshold, or a policy's edge rules for an edge that counts by itself
    Export(threshold_rehearsal::export::ExportArgs),
    /// Write another limiter's configuration as a policy to standard output
    Import(threshold_rehearsal::import::ImportArgs),
    /// Suggest limits from recorded traffic, as a policy
    Suggest(Box<threshold_rehearsal::suggest::SuggestArgs>),
    /// List, add, lift, import and export bans
    Bans(BansArgs),
    /// Say why an address, a tenant, a user or an account is stopped, or forgive it
    Subject(SubjectArgs),
    /// Ask a server whether it is alive: exits with 0 if it is, else with 1
    Health(HealthArgs),
    /// List the locked accounts of logins
    Locks(crate::operate::LocksArgs),
    /// List the alerts that are raised, or send a test message to their receivers
    Alerts(crate::operate::AlertsArgs),
    /// Show who changed bans, settings and subjects, and why
    Audit(crate::operate::AuditArgs),
    /// Explain a past decision, by its trace id
    Why(crate::operate::WhyArgs),
    /// Print events as they come
    Tail(crate::operate::TailArgs),
    /// Check a running set-up, and say what should be changed
    Doctor(crate::operate::DoctorArgs),
    /// Watch a server: what it decides, and whom it blocks
    Top(crate::operate::TopArgs),
    /// Copy the journal, also while a server runs
    Backup(BackupArgs),
    /// Replace the journal by a copy, while no server runs
    Restore(RestoreArgs),
    /// Write the JSON Schema of a policy, for editors, to standard output
    Schema,
    /// Write a shell's completions to standard output
    Completions(CompletionsArgs),
    /// Write a manual page to standard output
    Man(ManArgs),
}

#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Where to listen: HOST:PORT, or unix:PATH
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8080")]
    pub(crate) http: Address,
}

#[derive(Debug, Args)]
#[command(after_long_help = SERVE_HELP)]
pub(crate) struct ServeArgs {
    /// The policy file; without one, the starter policy
    pub(crate) policy: Option<PathBuf>,
    /// A folder with a file for each tenant, TENANT.json or TENANT/tenant.config.json, whose rateLimit.perMinute and
    /// rateLimit.burst apply above the policy; changes are loaded like those of the policy
    #[arg(long, value_name = "DIR")]
    pub(crate) tenants: Option<PathBuf>,
    /// Where to listen: HOST:PORT, or unix:PATH
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8080")]
    pub(crate) http: Address,
    /// Where Redis clients call CL.THROTTLE: HOST:PORT, or unix:PATH, without TLS; 127.0.0.1:6380 by default, unless it is in use
    #[arg(long, value_name = "ADDR")]
    pub(crate) resp: Option<Address>,
    /// Serve no Redis clients
    #[arg(long, conflicts_with = "resp")]
    pub(crate) no_resp: bool,
    /// Serve the operators' calls here, HOST:PORT or unix:PATH, and no longer on --http
    #[arg(long, value_name = "ADDR")]
    pub(crate) admin: Option<Address>,
    /// Answer Envoy here, HOST:PORT or unix:PATH: its rate limit service and its external authorization, over gRPC. 127.0.0.1:8081 by
    /// default, unless that is in use
    #[arg(long, value_name = "ADDR")]
    pub(crate) grpc: Option<Address>,
    /// Do not listen for gRPC
    #[arg(long, conflicts_with = "grpc")]
    pub(crate) no_grpc: bool,
    /// Check the policy, the tokens, the secrets, the addresses, the log level, OTEL_… and the store's URL and certificates, connect to no store, start nothing, and exit as lint does: 0 if the server
    /// would start, 1 on warnings that are denied, 2 on errors
    #[arg(long)]
    pub(crate) check: bool,
    /// With --check: exit with 1 if there are warnings
    #[arg(long, value_enum, requires = "check")]
    pub(crate) deny: Option<Denied>,
    /// Another name that requests may have in Host and Origin; may be repeated. Without tokens only loopback addresses and
    /// localhost are accepted, as a protection against DNS rebinding
    #[arg(long, value_name = "NAME")]
    pub(crate) allow_host: Vec<HostName>,
    /// Accept a policy without rules, which limits nothing, at the start and on a reload
    #[arg(long)]
    pub(crate) allow_empty: bool,
    /// Let operators save the policy file on the dashboard
    #[arg(long, requires = "policy")]
    pub(crate) allow_edit: bool,
    /// Where to count: memory, or a Redis that several servers share, as redis://HOST:PORT/DATABASE, redis+unix:///PATH,
    /// redis+sentinel://HOST:PORT,HOST:PORT/NAME or redis+cluster://HOST:PORT,HOST:PORT; rediss for redis is with TLS. A URL with a
    /// password belongs into THRESHOLD_STORE, because the list of processes shows the command line. Needs THRESHOLD_SECRET
    // Parsed later: an error of the command line would quote it, with its password.
    #[arg(long, value_name = "URL", conflicts_with = "save_counters")]
    pub(crate) store: Option<String>,
    /// Trust the authorities in this file, in PEM, and no others, for rediss://; or THRESHOLD_STORE_CA. The system's by default
    #[arg(long, value_name = "FILE")]
    pub(crate) store_ca: Option<PathBuf>,
    /// The certificate chain, in PEM, that this server shows to Redis over TLS
    #[arg(long, value_name = "FILE", requires = "store_key")]
    pub(crate) store_cert: Option<PathBuf>,
    /// Its private key, in PEM
    #[arg(long, value_name = "FILE", requires = "store_cert")]
    pub(crate) store_key: Option<PathBuf>,
    /// How long a decision waits for Redis, in milliseconds, before each rule's on_store_error decides; or THRESHOLD_STORE_DEADLINE.
    /// 20 by default. A login waits for a second if this is shorter
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub(crate) store_deadline: Option<u16>,
    /// The journal, where bans, strikes, locks and settings are saved; with --store redis://… only the audit
    #[arg(long, value_name = "FILE", default_value = "threshold.db")]
    pub(crate) db: PathBuf,
    /// Keep everything in memory only
    #[arg(long, conflicts_with_all = ["db", "save_counters", "new_journal"])]
    pub(crate) no_db: bool,
    /// Start with a new journal if the old one is missing or empty beside its secret; the bans in it are lost
    #[arg(long)]
    pub(crate) new_journal: bool,
    /// Save the counters every second, not only at the end
    #[arg(long)]
    pub(crate) save_counters: bool,
    /// How long events are kept, in a file beside the journal; with --no-db in memory
    #[arg(long, value_name = "TIME", default_value = "30day", value_parser = span)]
    pub(crate) events_keep: Span,
    /// The most room that events take, in MiB; the oldest are deleted first
    #[arg(long, value_name = "MIB", default_value = "256", value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    pub(crate) events_size: u32,
    /// Record one in N allowed requests too; none by default. Denials, warnings and strikes are always recorded
    #[arg(long, value_name = "N", default_value = "0")]
    pub(crate) events_sample: u32,
    /// Write events as lines of JSON too, to jsonl:FILE or stdout; may be repeated
    #[arg(long, value_name = "SINK")]
    pub(crate) events_to: Vec<Lines>,
    /// Let webhooks connect to addresses of this machine and of private networks, also over http://
    #[arg(long)]
    pub(crate) allow_private_webhooks: bool,
    /// The name of this server in alerts and among the nodes of a shared store; or THRESHOLD_NODE. The machine's name and the port by default
    #[arg(long, value_name = "NAME")]
    pub(crate) node: Option<String>,
    /// The certificate chain, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Its private key, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub(crate) tls_key: Option<PathBuf>,
    /// The format of log lines, on standard error
    #[arg(long, value_enum, value_name = "FORM", default_value = "text")]
    pub(crate) log: LogForm,
    /// The most connections at once, to --http and to --resp each; more wait to be accepted
    #[arg(long, value_name = "N", default_value = "16384", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) max_connections: u32,
    /// The most connections of one address, or of one IPv6 /64; more are closed. A quarter of --max-connections by default;
    /// the policy's trusted proxies and Unix sockets are exempt
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) max_connections_per_peer: Option<u32>,
    /// The largest body of a request, in bytes
    #[arg(long, value_name = "BYTES", default_value = "1048576", value_parser = clap::value_parser!(u32).range(1_024..=67_108_864))]
    pub(crate) max_body: u32,
    /// The most memory for answers that are remembered under request ids, in bytes. Beyond it, a request with a new requestId
    /// is answered with 503, and the oldest answers to proxies (X-Threshold-Request-Id) are forgotten
    #[arg(long, value_name = "BYTES", default_value = "134217728", value_parser = clap::value_parser!(u32).range(8_388_608..))]
    pub(crate) request_id_memory: u32,
    /// How long the server waits for a client: for a request's headers or body, for the next request, or for it to read
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = span)]
    pub(crate) client_timeout: Span,
    /// How long requests in progress may take after SIGTERM
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = span)]
    pub(crate) drain: Span,
}

/// Without the default address of other commands: a policy that was forgotten would look like a server that is down.
const EXPLAIN_SERVER_HELP: &str = "The server, if there is no policy file: http://HOST:PORT, https://HOST:PORT or unix:PATH; THRESHOLD_SERVER by default";

const SERVE_HELP: &str = "\
Tokens come from the environment, so that they do not appear in the list of processes: THRESHOLD_TOKEN for callers, \
THRESHOLD_ADMIN_TOKEN for operators, THRESHOLD_READ_TOKEN for operators with read-only access. Each may have several, \
separated by commas or spaces, of at least 16 characters each. Without THRESHOLD_TOKEN only loopback addresses are accepted \
for --http, --grpc and --resp; --admin needs THRESHOLD_ADMIN_TOKEN or THRESHOLD_READ_TOKEN for any other. THRESHOLD_LOG is the level of logging: error, warn, info (the default), debug.

THRESHOLD_SECRET is the installation's secret, in place of the file beside the journal; THRESHOLD_SECRET_OLD is the previous \
one, while the secret is rotated.

THRESHOLD_ALERT_URL has the URLs that alerts are posted to, separated by spaces: https://…, slack+https://… or pagerduty+https://… with \
THRESHOLD_PAGERDUTY_KEY. THRESHOLD_EVENTS_URL and THRESHOLD_EVENTS_TOKEN are for events. THRESHOLD_WEBHOOK_SECRET signs both. THRESHOLD_NODE names \
this server in alerts, and THRESHOLD_RUNBOOKS_URL is where they point to for runbooks.

SIGHUP, or a change of the file, reloads the policy and the files of --tenants; an invalid one is reported, and the old one stays in force. SIGTERM stops \
accepting connections, waits for requests in progress, and exits.";

/// The format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogForm {
    Text,
    Json,
}

#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub(crate) shell: Shell,
}

#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// The command; the whole program by default
    pub(crate) command: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct InitArgs {
    /// Which policy to start from; `--list` shows them all
    #[arg(default_value = "starter")]
    pub(crate) preset: String,
    /// List the presets
    #[arg(long)]
    pub(crate) list: bool,
}

#[derive(Debug, Args)]
#[command(mut_arg("server", |arg| arg.help(EXPLAIN_SERVER_HELP)))]
pub(crate) struct ExplainArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    /// The policy file, or - for standard input; without one, the server of --server or THRESHOLD_SERVER is asked
    #[arg(conflicts_with = "server")]
    pub(crate) policy: Option<PathBuf>,
    /// The method of the request
    #[arg(long, value_parser = method)]
    pub(crate) method: Option<String>,
    /// Its path, in any spelling
    #[arg(long)]
    pub(crate) path: Option<String>,
    /// The host it is for
    #[arg(long)]
    pub(crate) host: Option<String>,
    /// The client's address
    #[arg(long)]
    pub(crate) ip: Option<IpAddr>,
    /// Whose customer it is
    #[arg(long)]
    pub(crate) tenant: Option<String>,
    /// Who is calling
    #[arg(long)]
    pub(crate) user: Option<String>,
    /// The tenant's plan
    #[arg(long)]
    pub(crate) tier: Option<String>,
    /// The cost in requests
    #[arg(long)]
    pub(crate) cost: Option<u64>,
    /// The cost in bytes
    #[arg(long)]
    pub(crate) bytes: Option<u64>,
    /// A named cost, as in tokens=812; may be repeated
    #[arg(long = "costs", value_name = "NAME=N", value_parser = named_cost)]
    pub(crate) costs: Vec<(String, u64)>,
    /// One of your own facts, as in inbox=7; may be repeated
    #[arg(long = "fact", value_name = "NAME=VALUE", value_parser = pair)]
    pub(crate) facts: Vec<(String, String)>,
    /// A header that a rule counts by, as in x-api-key=abc; may be repeated
    #[arg(long = "header", value_name = "NAME=VALUE", value_parser = pair)]
    pub(crate) headers: Vec<(String, String)>,
    /// The endpoint, if your router knows it better than the policy
    #[arg(long)]
    pub(crate) endpoint: Option<String>,
    /// The category, if you know it better than the policy
    #[arg(long)]
    pub(crate) category: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// The server that a command calls.
#[derive(Debug, Args)]
pub(crate) struct ServerArgs {
    /// The server: http://HOST:PORT, https://HOST:PORT or unix:PATH; THRESHOLD_SERVER by default, else http://127.0.0.1:8080
    #[arg(long, value_name = "URL", global = true)]
    pub(crate) server: Option<String>,
    /// The certificates, in PEM, that sign the server's; THRESHOLD_CA by default, else those of the system
    #[arg(long, value_name = "FILE", global = true)]
    pub(crate) ca: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(after_help = "The token comes from THRESHOLD_ADMIN_TOKEN, or THRESHOLD_READ_TOKEN to read.")]
pub(crate) struct BansArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    #[command(subcommand)]
    pub(crate) command: BansCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BansCommand {
    /// List all bans
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// The journal to read if no server answers
        #[arg(long, value_name = "FILE", default_value = "threshold.db")]
        db: PathBuf,
    },
    /// Ban an address, a tenant or a user
    Add {
        /// edge (or ip) for an address or CIDR, tenant, or user
        layer: String,
        /// The address or CIDR, the tenant, or the user; or its digest, '#' and 16 digits, of the last hour
        key: String,
        /// The reason; it is not disclosed to the banned client
        #[arg(long)]
        reason: String,
        /// The length, such as 24h; for good by default
        #[arg(long = "for", value_name = "TIME", value_parser = span)]
        length: Option<Span>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// End a ban: lift ID, or lift LAYER KEY
    Lift {
        /// The id of the ban, as `list` shows it, or its first four digits or more; or the layer: edge (or ip), tenant, user
        #[arg(value_name = "ID|LAYER")]
        id: String,
        /// The address, CIDR, tenant or user, or its digest, after a layer: ends all bans on exactly that
        key: Option<String>,
        /// The reason, for the audit
        #[arg(long)]
        reason: Option<String>,
    },
    /// Replace the bans of an origin by those of a list
    Import(crate::operate::ImportArgs),
    /// Write the banned addresses for a firewall
    Export(crate::operate::ExportBansArgs),
}

#[derive(Debug, Args)]
#[command(after_help = "The token comes from THRESHOLD_ADMIN_TOKEN, or THRESHOLD_READ_TOKEN to read.")]
pub(crate) struct SubjectArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    /// edge (or ip), tenant, user, endpoint, or account for a login's
    pub(crate) layer: String,
    /// The address, the tenant, the user, the endpoint, or the account's name; or its digest, '#' and 16 digits
    pub(crate) key: String,
    /// Clear what it has used, its strikes and penalties, or an account's failures
    #[arg(long)]
    pub(crate) forgive: bool,
    /// The reason, for the audit
    #[arg(long, requires = "forgive")]
    pub(crate) reason: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "No token is needed. The health checks of containers use this.")]
pub(crate) struct HealthArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    /// Ask whether it takes requests, which it does not while it drains; prints degraded and why if its policy, keys, certificate
    /// or journal need attention
    #[arg(long)]
    pub(crate) ready: bool,
}

#[derive(Debug, Args)]
pub(crate) struct BackupArgs {
    /// The copy; it must not exist yet
    pub(crate) file: PathBuf,
    /// The journal
    #[arg(long, value_name = "FILE", default_value = "threshold.db")]
    pub(crate) db: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct RestoreArgs {
    /// The copy
    pub(crate) file: PathBuf,
    /// The journal to replace; the present one is renamed
    #[arg(long, value_name = "FILE", default_value = "threshold.db")]
    pub(crate) db: PathBuf,
}

pub(crate) fn span(text: &str) -> Result<Span, String> {
    match parse_span(text) {
        // A timeout of 0 would close every connection at once, and a ban of 0 would have no effect.
        Ok(Span::ZERO) => Err("expected a time above 0, such as 30s or 5min".to_owned()),
        Ok(span) => Ok(span),
        Err(error) => Err(format!("{}: {}", error.message, error.help)),
    }
}

fn method(text: &str) -> Result<String, String> {
    if is_method(text) { Ok(text.to_owned()) } else { Err("expected a method, such as GET or POST".to_owned()) }
}

fn named_cost(text: &str) -> Result<(String, u64), String> {
    let (name, value) = pair(text)?;
    let cost = value.parse().map_err(|_| format!("\"{value}\" is not a whole number"))?;
    Ok((name, cost))
}
