//! `threshold serve`: reads the policy, opens the doors, and stays until it is told to stop.

mod address;
mod connection;
mod line;
mod linger;
mod maintenance;
pub(crate) mod offers;
mod peers;
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
use crate::desk::{Desk, Opened, Place};
use crate::door::{App, Bounds, Doors, Hosts};
use crate::init::PRESETS;
use crate::jwt;
use crate::log;
use crate::reload::Reloader;
use crate::source::Source;
pub(crate) use address::{Address, Listener};
pub(crate) use connection::Front;
pub(crate) use line::Line;
pub(crate) use tls::Certificates;
pub(crate) use tokens::{Shown, Tokens};

/// Files that are open beside connections: the policy, logs, the runtime's own.
const OTHER_FILES: u64 = 64;

pub(crate) fn run(args: &ServeArgs) -> anyhow::Result<Report> {
    let _flush = log::start(args.log)?;
    let source = match &args.policy {
        Some(path) => Source::read(path)?,
        None => starter(),
    };
    let policy = source.policy()?;
    if policy.is_empty() && !args.allow_empty {
        anyhow::bail!("{} has no rules and no [login], and limits nobody: --allow-empty accepts that", source.name);
    }
    if let Some(refusal) = offers::refuses(&policy) {
        anyhow::bail!("{}: {refusal}", source.name);
    }
    let (policy, keys) = jwt::attach(policy).with_context(|| source.name.clone())?;
    offers::warn(&policy);
    let tokens = Tokens::from_environment()?;
    let hosts = hosts(args, &tokens);
    if args.tls_cert.is_some() && matches!(args.http, Address::Unix(_)) {
        anyhow::bail!("a socket in the file system speaks no TLS: leave out --tls-cert and --tls-key");
    }
    let tls = match (&args.tls_cert, &args.tls_key) {
        (Some(cert), Some(key)) => Some(Certificates::read(cert, key).map(|(own, files)| (Arc::new(own), files))?),
        _ => None,
    };
    let bounds = bounds(args)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let closed = runtime.block_on(async {
        let listener = args.http.listen(tokens.ask_callers()).await?;
        // Before anything is printed: who reads the line may send a signal at once.
        let signals = Signals::new()?;
        let Opened { desk, journal, damage } = desk(args, policy.clone())?;
        if let Err(error) = desk.follow().await {
            tracing::error!(%error, "bans and settings cannot be read from the store yet");
        }
        announce(&listener, tls.is_some(), &source, &policy, &tokens, args)?;
        let app = Arc::new(App::new(desk, tokens, bounds));
        maintenance::start(&app, journal, args.save_counters, damage);
        let acceptor = tls.as_ref().map(|(certificates, _)| certificates.acceptor()).transpose()?;
        let front = Front { listener, tls: acceptor, doors: Doors::new(Arc::clone(&app), hosts), bounds };
        let mut reloader = Reloader::new(Arc::clone(&app), args.allow_empty);
        // The starter policy, and one that was piped in, have no file that could change.
        if let Some(path) = args.policy.clone().filter(|path| path.as_os_str() != "-") {
            reloader.watch_policy(path, source.text);
        }
        reloader.watch_keys(keys);
        if let Some((certificates, files)) = tls {
            reloader.watch_certificate(certificates, files);
        }
        serve(front, Arc::clone(&app), reloader, signals, duration(args.drain)).await;
        anyhow::Ok(close(app, duration(args.drain)).await)
    })?;
    // What is still under way after the drain has had its time.
    runtime.shutdown_background();
    Ok(Report { text: String::new(), code: u8::from(!closed) })
}

/// Ends the journal, and says whether it did. A disk that does not answer gets as long as requests did: who stops a server at
/// such an hour must not have to kill it.
async fn close(app: Arc<App>, at_most: Duration) -> bool {
    let closing = tokio::task::spawn_blocking(move || app.desk.close());
    let closed = tokio::time::timeout(at_most, closing).await.is_ok();
    if !closed {
        tracing::error!("the disk did not answer in time: what was used since the start is not written down");
    }
    closed
}

/// Serves until SIGTERM or SIGINT, then drains.
async fn serve(front: Front, app: Arc<App>, mut reloader: Reloader, mut signals: Signals, drain: Duration) {
    let (stop, stopped) = watch::channel(false);
    let mut server = tokio::spawn(front.serve(stopped, drain));
    loop {
        tokio::select! {
            signal = signals.next() => match signal {
                Signal::Reload => reloader.now().await,
                Signal::Stop => break,
            },
            () = reloader.look() => {}
            _ = &mut server => return,
        }
    }
    tracing::info!("stopping: no new connections; what is under way may end");
    app.health.drain();
    // The server is there: it ends only after this.
    let _ = stop.send(true);
    tokio::select! {
        drained = &mut server => match drained {
            Ok(true) => tracing::info!("stopped"),
            _ => tracing::warn!("stopped while requests were under way"),
        },
        _ = signals.stop_again() => tracing::warn!("stopped at once, as asked twice"),
    }
}

/// What the process may be told.
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

/// The names by which requests may call: where no token is asked for, those of this server alone.
fn hosts(args: &ServeArgs, tokens: &Tokens) -> Hosts {
    if !tokens.ask_callers() && matches!(args.http, Address::Tcp(_)) {
        return Hosts::Own(args.allow_host.as_slice().into());
    }
    if !args.allow_host.is_empty() {
        tracing::warn!("--allow-host changes nothing: with a token, or on a socket, every Host is accepted");
    }
    Hosts::Any
}

/// A desk with its journal, or in memory alone.
fn desk(args: &ServeArgs, policy: Policy) -> anyhow::Result<Opened> {
    let clock = Arc::new(SystemClock::new());
    let (present, old) = (secret("THRESHOLD_SECRET")?, secret("THRESHOLD_SECRET_OLD")?);
    if args.no_db {
        check_secrets(present.as_deref(), old.as_deref())?;
        return Ok(Opened { desk: Desk::new(policy, clock), journal: None, damage: None });
    }
    let secrets = GivenSecrets { present: present.as_deref(), old: old.as_deref() };
    let place = Place { journal: &args.db, secrets, new_journal: args.new_journal };
    let kept = Desk::kept(policy, clock, &place);
    kept.context("the journal cannot be used (--db names another file, --no-db does without)")
}

/// A secret of the installation from the environment, if it is given and long enough.
pub(crate) fn secret(name: &str) -> anyhow::Result<Option<String>> {
    let secret = match std::env::var(name) {
        Ok(secret) if !secret.is_empty() => secret,
        Ok(_) => anyhow::bail!("{name} is set and empty: give a secret, or unset it"),
        Err(std::env::VarError::NotPresent) => return Ok(None),
        Err(std::env::VarError::NotUnicode(_)) => anyhow::bail!("{name} is not text"),
    };
    if Secret::new(secret.as_bytes()).is_none() {
        anyhow::bail!(
            "{name} has fewer than 16 characters, which can be guessed: make one with `openssl rand -hex 32`"
        );
    }
    Ok(Some(secret))
}

/// Without a journal nothing is stored or signed under the secrets; what is wrong with them is said all the same.
fn check_secrets(present: Option<&str>, old: Option<&str>) -> anyhow::Result<()> {
    let made = |text: &str| Secret::new(text.as_bytes());
    match (present.and_then(made), old.and_then(made)) {
        (Some(present), Some(old)) => Secrets::new(present).with_old(old).map(drop)?,
        (None, Some(_)) => anyhow::bail!("THRESHOLD_SECRET_OLD is given without THRESHOLD_SECRET"),
        (_, None) => {}
    }
    Ok(())
}

fn starter() -> Source {
    let text = PRESETS.iter().find(|(name, _)| *name == "starter").map_or("", |(_, text)| text);
    Source { name: "starter (built in)".to_owned(), text: text.to_owned() }
}

/// Says on standard output what is served, and where.
fn announce(
    listener: &Listener,
    tls: bool,
    source: &Source,
    policy: &Policy,
    tokens: &Tokens,
    args: &ServeArgs,
) -> anyhow::Result<()> {
    let place = listener.place(if tls { "https" } else { "http" })?;
    let rules = policy.rules().len();
    let plural = if rules == 1 { "" } else { "s" };
    let (keys, exactness) = (policy.memory().max_keys, offers::exactness(policy));
    let asked = match (tokens.ask_callers(), tokens.are_some()) {
        (true, _) => "callers show one",
        (false, true) => "operators show one; callers need none: open to this machine alone",
        (false, false) => "none: open to this machine alone",
    };
    let journal = if args.no_db { "none".to_owned() } else { args.db.display().to_string() };
    let text = format!(
        "threshold {}\n  http    {place}\n  policy  {}, {rules} rule{plural}\n  store   memory, at most {keys} keys{exactness}\n  \
         journal {journal}\n  tokens  {asked}\n",
        env!("CARGO_PKG_VERSION"),
        source.name,
    );
    crate::print(&text);
    tracing::info!(http = %place, policy = %source.name, rules, "listening");
    Ok(())
}

impl Listener {
    /// Where it can be reached, as a person would write it.
    fn place(&self, scheme: &str) -> anyhow::Result<String> {
        Ok(match self {
            Self::Tcp(listener) => format!("{scheme}://{}", listener.local_addr().context("no address")?),
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
        patience: duration(args.client_timeout),
        request_ids: usize::try_from(args.request_id_memory)?,
        ..Bounds::default()
    })
}

/// As many connections as were asked for, as far as the system gives files for them. A shell's usual 1,024 is a default,
/// not a decision: it is raised as far as the system lets it.
fn connections(wanted: u32) -> usize {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let files = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(_) => limit.current,
    };
    let room = files.map_or(u64::MAX, |files| files.saturating_sub(OTHER_FILES).max(1));
    if room < u64::from(wanted) {
        tracing::warn!(wanted, room, "the system gives too few files for as many connections");
    }
    usize::try_from(room.min(u64::from(wanted))).unwrap_or(usize::MAX)
}

fn duration(span: Span) -> Duration {
    Duration::from_micros(span.micros())
}
