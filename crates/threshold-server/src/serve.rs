//! `threshold serve`: loads the policy, starts the server, and runs until SIGTERM or SIGINT.

mod address;
mod connection;
mod connection_watch;
mod linger;
mod maintenance;
mod peers;
pub(crate) mod policy_support;
mod tls;
mod tokens;

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use threshold_core::policy::Policy;
use threshold_core::{Secret, Secrets, Span};
use threshold_limiter::SystemClock;
use threshold_limiter::journal::GivenSecrets;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::Report;
use crate::cli::ServeArgs;
use crate::desk::{Desk, JournalLocation, OpenDesk};
use crate::door::{App, Bounds, Doors, Hosts};
use crate::init::PRESETS;
use crate::jwt;
use crate::log;
use crate::reload::Reloader;
use crate::source::Source;
pub(crate) use address::{Address, Listener};
pub(crate) use connection::Server;
pub(crate) use connection_watch::ConnectionWatch;
pub(crate) use tls::Certificates;
pub(crate) use tokens::{OperatorAccess, Tokens};

/// File descriptors besides those of connections: the journal, files that are reloaded, standard streams, the runtime's own.
const OTHER_FILES: u64 = 64;

pub(crate) fn run(args: &ServeArgs) -> anyhow::Result<Report> {
    let _flush = log::start(args.log)?;
    let source = match &args.policy {
        Some(path) => Source::read(path)?,
        None => starter(),
    };
    let policy = source.policy()?;
    if policy.is_empty() && !args.allow_empty {
        anyhow::bail!("{} has no rules and no [login], so it limits nothing; --allow-empty accepts that", source.name);
    }
    if let Some(refusal) = policy_support::refusal(&policy) {
        anyhow::bail!("{}: {refusal}", source.name);
    }
    let (policy, keys) = jwt::attach(policy).with_context(|| source.name.clone())?;
    policy_support::warn_of_unsupported(&policy);
    let tokens = Tokens::from_environment()?;
    let hosts = hosts(args, &tokens);
    if args.tls_cert.is_some() && matches!(args.http, Address::Unix(_)) {
        anyhow::bail!("TLS is not supported on a Unix socket: leave out --tls-cert and --tls-key");
    }
    let tls = match (&args.tls_cert, &args.tls_key) {
        (Some(cert), Some(key)) => Some(Certificates::read(cert, key).map(|(own, files)| (Arc::new(own), files))?),
        _ => None,
    };
    let bounds = bounds(args)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let closed = runtime.block_on(async {
        let listener = args.http.listen(tokens.require_from_callers()).await?;
        // Installed before anything is printed: a script that waits for the output may send a signal at once.
        let signals = Signals::new()?;
        let OpenDesk { desk, journal, damage } = desk(args, policy.clone())?;
        if let Err(error) = desk.apply_remote_changes().await {
            tracing::error!(%error, "bans and settings not read from the store yet");
        }
        announce(&listener, tls.is_some(), &source, &policy, &tokens, args)?;
        let app = Arc::new(App::new(desk, tokens, bounds));
        maintenance::start(&app, journal, args.save_counters, damage);
        let acceptor = tls.as_ref().map(|(certificates, _)| certificates.acceptor()).transpose()?;
        let server = Server { listener, tls: acceptor, doors: Doors::new(Arc::clone(&app), hosts), bounds };
        let mut reloader = Reloader::new(Arc::clone(&app), args.allow_empty);
        // The built-in starter policy and one from standard input have no file to watch.
        if let Some(path) = args.policy.clone().filter(|path| path.as_os_str() != "-") {
            reloader.watch_policy(path, source.text);
        }
        reloader.watch_keys(keys);
        if let Some((certificates, files)) = tls {
            reloader.watch_certificate(certificates, files);
        }
        serve(server, Arc::clone(&app), reloader, signals, duration(args.drain)).await;
        anyhow::Ok(close(app, duration(args.drain)).await)
    })?;
    // Requests that are still in progress after the drain are dropped.
    runtime.shutdown_background();
    Ok(Report { text: String::new(), code: u8::from(!closed) })
}

/// Closes the journal, and returns whether that succeeded in time. A disk that does not answer gets as long as requests had to
/// drain, so that an operator need not kill the process.
async fn close(app: Arc<App>, at_most: Duration) -> bool {
    let closing = tokio::task::spawn_blocking(move || app.desk.close());
    let closed = tokio::time::timeout(at_most, closing).await.is_ok();
    if !closed {
        tracing::error!("journal not closed in time: the counters since the start are lost");
    }
    closed
}

/// Serves until SIGTERM or SIGINT, then drains.
async fn serve(server: Server, app: Arc<App>, mut reloader: Reloader, mut signals: Signals, drain: Duration) {
    let (stop, stopped) = watch::channel(false);
    let mut server = tokio::spawn(server.serve(stopped, drain));
    loop {
        tokio::select! {
            signal = signals.next() => match signal {
                Signal::Reload => reloader.reload_all().await,
                Signal::Stop => break,
            },
            () = reloader.check() => {}
            _ = &mut server => return,
        }
    }
    tracing::info!("draining: no new connections");
    app.health.set_draining();
    // Sending cannot fail: the server holds the receiver until it has stopped.
    let _ = stop.send(true);
    tokio::select! {
        drained = &mut server => match drained {
            Ok(true) => tracing::info!("stopped"),
            _ => tracing::warn!("stopped with requests in progress"),
        },
        _ = signals.stop_again() => tracing::warn!("stopped at once by a second signal"),
    }
}

/// The signals that the process handles.
struct Signals {
    reload: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

enum Signal {
    Reload,
    Stop,
}

impl Signals {
    fn new() -> anyhow::Result<Self> {
        Ok(Self {
            reload: signal(SignalKind::hangup())?,
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    async fn next(&mut self) -> Signal {
        tokio::select! {
            _ = self.reload.recv() => Signal::Reload,
            () = Self::stop(&mut self.terminate, &mut self.interrupt) => Signal::Stop,
        }
    }

    async fn stop_again(&mut self) {
        Self::stop(&mut self.terminate, &mut self.interrupt).await;
    }

    async fn stop(terminate: &mut tokio::signal::unix::Signal, interrupt: &mut tokio::signal::unix::Signal) {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    }
}

/// Returns the names that requests may call the server by: without tokens only its own, against DNS rebinding.
fn hosts(args: &ServeArgs, tokens: &Tokens) -> Hosts {
    if !tokens.require_from_callers() && matches!(args.http, Address::Tcp(_)) {
        return Hosts::Own(args.allow_host.as_slice().into());
    }
    if !args.allow_host.is_empty() {
        tracing::warn!("--allow-host ignored: with a token or on a Unix socket every Host is accepted");
    }
    Hosts::Any
}

/// Opens the desk, with its journal or in memory only.
fn desk(args: &ServeArgs, policy: Policy) -> anyhow::Result<OpenDesk> {
    let clock = Arc::new(SystemClock::new());
    let (present, old) = (secret("THRESHOLD_SECRET")?, secret("THRESHOLD_SECRET_OLD")?);
    if args.no_db {
        check_secrets(present.as_deref(), old.as_deref())?;
        return Ok(OpenDesk { desk: Desk::new(policy, clock), journal: None, damage: None });
    }
    let secrets = GivenSecrets { present: present.as_deref(), old: old.as_deref() };
    let location = JournalLocation { journal: &args.db, secrets, new_journal: args.new_journal };
    let opened = Desk::with_journal(policy, clock, &location);
    opened.context("cannot use the journal (--db FILE names another, --no-db runs without one)")
}

/// Reads a secret of the installation from the environment, and checks its length.
pub(crate) fn secret(name: &str) -> anyhow::Result<Option<String>> {
    let secret = match std::env::var(name) {
        Ok(secret) if !secret.is_empty() => secret,
        Ok(_) => anyhow::bail!("{name} is set but empty: give a secret, or unset it"),
        Err(std::env::VarError::NotPresent) => return Ok(None),
        Err(std::env::VarError::NotUnicode(_)) => anyhow::bail!("{name} is not UTF-8"),
    };
    if Secret::new(secret.as_bytes()).is_none() {
        anyhow::bail!(
            "{name} has fewer than 16 characters and can be guessed: generate one with `openssl rand -hex 32`"
        );
    }
    Ok(Some(secret))
}

/// Checks the secrets of a server without a journal, which does not use them, so that a mistake in them is found all the same.
fn check_secrets(present: Option<&str>, old: Option<&str>) -> anyhow::Result<()> {
    let made = |text: &str| Secret::new(text.as_bytes());
    match (present.and_then(made), old.and_then(made)) {
        (Some(present), Some(old)) => Secrets::new(present).with_old(old).map(drop)?,
        (None, Some(_)) => anyhow::bail!("THRESHOLD_SECRET_OLD is set without THRESHOLD_SECRET"),
        (_, None) => {}
    }
    Ok(())
}

fn starter() -> Source {
    let text = PRESETS.iter().find(|(name, _)| *name == "starter").map_or("", |(_, text)| text);
    Source { name: "starter (built in)".to_owned(), text: text.to_owned() }
}

/// Prints the banner: what is served, and where.
fn announce(
    listener: &Listener,
    tls: bool,
    source: &Source,
    policy: &Policy,
    tokens: &Tokens,
    args: &ServeArgs,
) -> anyhow::Result<()> {
    let url = listener.url(if tls { "https" } else { "http" })?;
    let rules = policy.rules().len();
    let plural = if rules == 1 { "" } else { "s" };
    let (keys, exactness) = (policy.memory().max_keys, policy_support::exactness_note(policy));
    let asked = match (tokens.require_from_callers(), tokens.any_configured()) {
        (true, _) => "callers show one",
        (false, true) => "operators show one; callers need none: open to this machine alone",
        (false, false) => "none: open to this machine alone",
    };
    let journal = if args.no_db { "none".to_owned() } else { args.db.display().to_string() };
    let text = format!(
        "threshold {}\n  http    {url}\n  policy  {}, {rules} rule{plural}\n  store   memory, at most {keys} keys{exactness}\n  \
         journal {journal}\n  tokens  {asked}\n",
        env!("CARGO_PKG_VERSION"),
        source.name,
    );
    crate::print(&text);
    tracing::info!(http = %url, policy = %source.name, rules, "listening");
    Ok(())
}

impl Listener {
    /// Returns the URL of the listener.
    fn url(&self, scheme: &str) -> anyhow::Result<String> {
        Ok(match self {
            Self::Tcp(listener) => {
                format!("{scheme}://{}", listener.local_addr().context("cannot read the listener's address")?)
            }
            Self::Unix(_, file) => format!("unix:{}", file.path().display()),
        })
    }
}

fn bounds(args: &ServeArgs) -> anyhow::Result<Bounds> {
    let connections = connections(args.max_connections);
    let per_peer = args.max_connections_per_peer.map(usize::try_from).transpose()?;
    Ok(Bounds {
        connections,
        connections_per_peer: per_peer.unwrap_or_else(|| connections.div_ceil(4)),
        body: usize::try_from(args.max_body)?,
        client_timeout: duration(args.client_timeout),
        request_ids: usize::try_from(args.request_id_memory)?,
        ..Bounds::default()
    })
}

/// Returns the number of connections: as many as configured, if the limit on open files allows it. The soft limit (usually
/// 1,024) is raised to the hard limit first.
fn connections(wanted: u32) -> usize {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let files = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(_) => limit.current,
    };
    let room = files.map_or(u64::MAX, |files| files.saturating_sub(OTHER_FILES).max(1));
    if room < u64::from(wanted) {
        tracing::warn!(wanted, room, "connections limited by the number of open files (ulimit -n)");
    }
    usize::try_from(room.min(u64::from(wanted))).unwrap_or(usize::MAX)
}

fn duration(span: Span) -> Duration {
    Duration::from_micros(span.micros())
}
