//! `threshold serve`: loads the policy, starts the server, and runs until SIGTERM or SIGINT.

mod address;
mod banner;
mod bounds;
mod check;
mod connection;
mod connection_watch;
mod grpc;
mod http2;
mod linger;
mod maintenance;
mod peers;
mod places;
pub(crate) mod policy_notes;
mod preface;
mod resp;
mod running;
mod store;
mod tls;
mod tokens;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use threshold_core::policy::Policy;
use threshold_core::{Secret, Secrets, Span, Timestamp};
use threshold_limiter::SystemClock;
use threshold_limiter::files::unsafe_folder;
use threshold_limiter::journal::GivenSecrets;
use threshold_limiter::store::{AnyStore, StoreError};
use threshold_redis::RedisStore;
use tokio::signal::unix::{SignalKind, signal};
use tracing::Level;

use crate::cli::ServeArgs;
use crate::desk::{Desk, JournalLocation, OpenDesk};
use crate::door::{App, Audience, Bounds, Doors, Hosts};
use crate::init::PRESETS;
use crate::jwt::{self, TokenKeys};
use crate::log;
use crate::otlp::Telemetry;
use crate::policy_file::PolicyFile;
use crate::reload::{Reloader, TenantFolder};
use crate::signals::database::{EventDatabase, Retention};
use crate::signals::sinks::{Lines, Reach, SinkSettings, Sinks};
pub(crate) use address::{Address, Guard, Listener};
use banner::Banner;
use bounds::{OPERATOR_CONNECTIONS, ServerBounds};
pub(crate) use connection::{Protocols, Server};
pub(crate) use connection_watch::ConnectionWatch;
use running::RunningServers;
use store::StoreUrl;
use threshold_rehearsal::Report;
use threshold_rehearsal::source::Source;
pub(crate) use tls::Certificates;
pub(crate) use tokens::{OperatorAccess, Tokens};

/// How often, and after which pause, a node that starts tries to read the bans in a shared store: ten seconds in all.
const BANS_TRIES: usize = 20;
const BANS_PAUSE: Duration = Duration::from_millis(500);
/// How long a server that stops waits for a shared store to take back what was charged for denied requests. Far longer than a store
/// needs that answers, and short beside `--drain`.
const GIVE_BACK_WAIT: Duration = Duration::from_secs(2);
/// The pause between two looks at a store that does not answer meanwhile.
const GIVE_BACK_PAUSE: Duration = Duration::from_millis(50);
/// How long a server that stops waits for receivers of events and alerts. One that answers needs less.
const SINKS_WAIT: Duration = Duration::from_secs(5);
const JOURNAL_UNUSABLE: &str = "cannot use the journal (--db FILE names another, --no-db runs without one)";

pub(crate) fn run(args: &ServeArgs) -> anyhow::Result<Report> {
    if args.check {
        return check::run(args);
    }
    run_with(args, Level::INFO, || read_policy(args), |_| {})
}

/// Serves a policy. `level` is the lowest one that is logged, unless `THRESHOLD_LOG` says otherwise; `started` is called when requests are answered.
pub(crate) fn run_with(
    args: &ServeArgs,
    level: Level,
    source: impl FnOnce() -> anyhow::Result<Source>,
    started: impl FnOnce(Arc<App>),
) -> anyhow::Result<Report> {
    // First, and held until the end: whatever fails after this is logged, and the last lines are written.
    let _flush = log::start(args.log, level)?;
    let source = source()?;
    let policy = source.policy()?;
    if let Some(reason) = policy_notes::unusable(&policy, args.allow_empty) {
        anyhow::bail!("{}: {reason}", source.name);
    }
    policy_notes::warn_of_zero_limits(&source);
    warn_of_folders(args, &policy);
    let (mut policy, keys) = jwt::attach(policy).with_context(|| source.name.clone())?;
    let written = policy.clone();
    let mut tenants = args.tenants.as_deref().map(TenantFolder::open).transpose()?;
    let tenants_applied = tenants.as_mut().map(|tenants| tenants.apply(&mut policy));
    let tokens = Tokens::from_environment()?;
    let hosts = [caller_hosts(args, &tokens), operator_hosts(args, &tokens)];
    // Before anything is opened: a server that would be open to other machines must not even restore its journal.
    check_addresses(args, &tokens)?;
    let tls = certificates(args)?;
    let sinks = sink_settings(args)?;
    let bounds = ServerBounds::of(args)?;
    // Before the limiter is built, which then has an observer for spans.
    let telemetry = Telemetry::from_environment()?;
    let store = StoreUrl::chosen(args)?;
    if matches!(&store, StoreUrl::Redis(url) if url.is_cluster()) {
        policy_notes::warn_of_ladders_apart(&source);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let succeeded = runtime.block_on(async {
        // Before the journal is opened: a second server on the same address fails here, without waiting for a large
        // file. Clients wait in the backlog meanwhile.
        let listeners = Listeners::bind(args, &tokens).await?;
        // Installed before anything is printed: a script that waits for the output may send a signal at once.
        let signals = ProcessSignals::new()?;
        let sinks = sinks.of_server_on(&listeners.http.place());
        let (OpenDesk { desk, journal, damage }, shared) =
            desk(args, &store, sinks.node_name(), policy.clone()).await?;
        read_bans(&desk).await?;
        let (sinks, events) = (Sinks::start(sinks, |url| desk.redact(url))?, events(args, desk.now())?);
        let banner = Banner {
            args,
            source: &source,
            policy: &policy,
            tokens: &tokens,
            listeners: &listeners,
            store,
            tenants: tenants_applied,
            sinks: &sinks,
        };
        // After the listeners, the store and the journal: scripts take this output as the sign that the server is up.
        banner.announce()?;
        desk.events.sender.record_allowed(args.events_sample);
        let app = Arc::new(App::with_events(desk, tokens, bounds.http, (events, sinks)));
        app.know(shared.clone(), policy_file(args, &source));
        let exporter = {
            let app = Arc::clone(&app);
            telemetry.map(|telemetry| telemetry.start(move || app.metrics_text())).transpose()?
        };
        maintenance::start(&app, journal, args.save_counters, damage);
        let certificates = tls.as_ref().map(|(certificates, _)| certificates);
        let servers = servers(&app, listeners, hosts, certificates, bounds)?;
        let watched = Watched { text: source.text, tenants: tenants.map(|tenants| (tenants, written)), keys, tls };
        let reloader = reloader(args, &app, watched);
        started(Arc::clone(&app));
        let running = RunningServers::start(servers, duration(args.drain));
        let Stopped { at_once, failed } = serve(running, Arc::clone(&app), reloader, signals).await;
        if let Some(store) = shared {
            give_back(&app.desk, &store, at_once).await;
        }
        let closed = close(Arc::clone(&app), duration(args.drain)).await;
        close_sinks(app, at_once).await;
        if let Some(exporter) = exporter.filter(|_| !at_once) {
            let _ = tokio::task::spawn_blocking(move || exporter.stop()).await;
        }
        anyhow::Ok(closed && !failed)
    })?;
    // Requests that are still in progress after the drain are dropped.
    runtime.shutdown_background();
    Ok(Report { text: String::new(), code: u8::from(!succeeded) })
}

/// What is loaded again when its files change.
struct Watched {
    /// The text of the policy.
    text: String,
    /// The files of tenants, and the policy that they apply above.
    tenants: Option<(TenantFolder, Policy)>,
    keys: Option<TokenKeys>,
    tls: Option<CertificateFiles>,
}

/// The certificates, and the bytes of their files.
type CertificateFiles = (Arc<Certificates>, [Vec<u8>; 2]);

fn certificates(args: &ServeArgs) -> anyhow::Result<Option<CertificateFiles>> {
    let (Some(cert), Some(key)) = (&args.tls_cert, &args.tls_key) else { return Ok(None) };
    let (certificates, files) = Certificates::read(cert, key)?;
    Ok(Some((Arc::new(certificates), files)))
}

fn reloader(args: &ServeArgs, app: &Arc<App>, watched: Watched) -> Reloader {
    let Watched { text, tenants, keys, tls } = watched;
    let mut reloader = Reloader::new(Arc::clone(app), args.allow_empty);
    // The built-in starter policy and one from standard input have no file to watch.
    if let Some(path) = args.policy.clone().filter(|path| path.as_os_str() != "-") {
        reloader.watch_policy(path, text);
    }
    if let Some((tenants, policy)) = tenants {
        reloader.watch_tenants(tenants, policy);
    }
    reloader.watch_keys(keys);
    if let Some((certificates, files)) = tls {
        reloader.watch_certificate(certificates, files);
    }
    reloader
}

/// Reads the bans and settings of other nodes before the first request is served: a node that joins must not let banned callers
/// through.
async fn read_bans(desk: &Desk) -> anyhow::Result<()> {
    for _ in 0..BANS_TRIES {
        match desk.apply_remote_changes().await {
            Ok(()) => return Ok(()),
            // A Cluster may be moving their partition, or promoting a replica.
            Err(error) => tracing::warn!(%error, reason = desk.store_error(), "bans and settings not read yet"),
        }
        tokio::time::sleep(BANS_PAUSE).await;
    }
    let reason = desk.store_error().unwrap_or_default();
    anyhow::bail!("cannot read the bans and settings in the store, and does not start without them: {reason}")
}

/// Gives back what was charged in a shared store for requests that were denied or refused, and records what was admitted without
/// it. No other node would do it, and the charges would stay until their windows end.
async fn give_back(desk: &Desk, store: &RedisStore, at_once: bool) {
    let returned = async {
        loop {
            // A late answer is heard by the next look at the log. One that is slow may answer the second question.
            let applied = desk.apply_remote_changes().await;
            if applied != Err(StoreError::Timeout) && !desk.has_waiting_charges() {
                break;
            }
            tokio::time::sleep(GIVE_BACK_PAUSE).await;
        }
        store.returned().await;
    };
    let (lost, unanswered) = (desk.charges_lost(), desk.charges_unanswered());
    let at_most = if at_once { Duration::ZERO } else { GIVE_BACK_WAIT };
    let is_late = tokio::time::timeout(at_most, returned).await.is_err();
    desk.abandon_charges();
    let lost = desk.charges_lost().saturating_sub(lost);
    let unanswered = desk.charges_unanswered().saturating_sub(unanswered);
    if lost > 0 || unanswered > 0 {
        tracing::error!(lost, unanswered, "charges of requests that were admitted without the store not recorded");
    } else if is_late && !at_once {
        tracing::warn!("charges of denied requests not given back in time");
    }
}

/// Closes the journal, and returns whether that succeeded in time. A disk that does not answer gets as long as requests had to
/// drain, so that an operator need not kill the process.
async fn close(app: Arc<App>, at_most: Duration) -> bool {
    let closing = tokio::task::spawn_blocking(move || {
        app.collect_events();
        app.desk.close();
    });
    let closed = tokio::time::timeout(at_most, closing).await.is_ok();
    if !closed {
        tracing::error!("journal not closed in time: the counters since the start are lost");
    }
    closed
}

/// Waits a while for receivers to take the last events and alerts.
async fn close_sinks(app: Arc<App>, at_once: bool) {
    let at_most = if at_once { Duration::ZERO } else { SINKS_WAIT };
    // An error means that the thread has panicked, which is logged.
    let _ = tokio::task::spawn_blocking(move || app.signals.close(at_most, app.desk.now())).await;
}

/// How a server has stopped.
struct Stopped {
    /// Whether a second signal asked to stop at once.
    at_once: bool,
    /// Whether a listener has failed.
    failed: bool,
}

/// Serves until SIGTERM or SIGINT, or until a listener fails, then drains.
async fn serve(
    mut running: RunningServers,
    app: Arc<App>,
    mut reloader: Reloader,
    mut signals: ProcessSignals,
) -> Stopped {
    let failed = loop {
        tokio::select! {
            signal = signals.next() => match signal {
                Signal::Reload => reloader.reload_all().await,
                Signal::Stop => break false,
            },
            () = reloader.check() => {}
            // Without one of its listeners a server looks healthy at the others. A supervisor starts it again.
            (listener, reason) = running.failed() => {
                tracing::error!(listener, reason, "listener failed: the server stops");
                break true;
            }
        }
    };
    tracing::info!("draining: no new connections");
    // Before the listeners close, so that a load balancer with a connection of its own learns of it.
    app.health.set_draining();
    tokio::select! {
        all = running.drain() => {
            match all {
                true => tracing::info!("stopped"),
                false => tracing::warn!("stopped with requests in progress"),
            }
            Stopped { at_once: false, failed }
        }
        () = signals.stop_again() => {
            tracing::warn!("stopped at once by a second signal");
            Stopped { at_once: true, failed }
        }
    }
}

/// The signals that the process handles.
struct ProcessSignals {
    reload: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

enum Signal {
    Reload,
    Stop,
}

impl ProcessSignals {
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

/// Reads the policy, or takes the starter policy if none is given.
fn read_policy(args: &ServeArgs) -> anyhow::Result<Source> {
    args.policy.as_deref().map_or_else(|| Ok(starter()), Source::read_to_serve)
}

/// Returns the text of the policy, and its file if operators may change that.
fn policy_file(args: &ServeArgs, source: &Source) -> PolicyFile {
    let path = args.policy.clone().filter(|path| args.allow_edit && path.as_os_str() != "-");
    match path {
        Some(path) => PolicyFile::editable(source.text.clone(), path, args.allow_empty),
        None => PolicyFile::new(source.text.clone()),
    }
}

/// The bound listeners.
struct Listeners {
    http: Listener,
    admin: Option<Listener>,
    grpc: Option<Listener>,
    resp: Option<Listener>,
}

impl Listeners {
    async fn bind(args: &ServeArgs, tokens: &Tokens) -> anyhow::Result<Self> {
        let http = args.http.listen(caller_guard(tokens)).await?;
        let admin = match &args.admin {
            Some(admin) => Some(admin.listen(operator_guard(tokens)).await?),
            None => None,
        };
        let (grpc, resp) = (grpc::listener(args, tokens).await?, resp::listener(args, tokens).await?);
        Ok(Self { http, admin, grpc, resp })
    }
}

/// Returns one server for everything, or one for callers and one for operators, one for gRPC, and one for Redis clients.
fn servers(
    app: &Arc<App>,
    Listeners { http, admin, grpc, resp }: Listeners,
    hosts: [Hosts; 2],
    certificates: Option<&Arc<Certificates>>,
    callers: ServerBounds,
) -> anyhow::Result<Vec<Server>> {
    let acceptor = |protocols| certificates.map(|certificates| certificates.acceptor(protocols)).transpose();
    let tls = acceptor(Protocols::Http)?;
    let server = |listener: Listener, hosts, audience, bounds| {
        // A Unix socket does not leave the machine, and its clients have no name to verify.
        let tls = tls.clone().filter(|_| matches!(listener, Listener::Tcp(_)));
        let (protocols, doors) = (Protocols::Http, Doors::new(Arc::clone(app), hosts, audience));
        Server { listener, tls, protocols, doors, bounds }
    };
    let [caller_hosts, operator_hosts] = hosts;
    let connections = OPERATOR_CONNECTIONS;
    // Operators often share one address, such as that of a bastion host, so they are not limited by peer.
    let bounds = Bounds { connections, connections_per_peer: connections, ..app.bounds };
    let audience = if admin.is_some() { Audience::Callers } else { Audience::Everyone };
    let mut servers = vec![server(http, caller_hosts, audience, app.bounds)];
    servers.extend(admin.map(|admin| server(admin, operator_hosts, Audience::Operators, bounds)));
    if let Some(grpc) = grpc {
        servers.push(grpc::server(app, grpc, acceptor(Protocols::Grpc)?, callers.grpc));
    }
    servers.extend(resp.map(|resp| resp::server(app, resp, callers.resp)));
    Ok(servers)
}

/// Checks the addresses, and binds none of them.
fn check_addresses(args: &ServeArgs, tokens: &Tokens) -> anyhow::Result<()> {
    let is_socket = |address: &Address| matches!(address, Address::Unix(_));
    // An error only if no listener uses the certificate.
    if args.tls_cert.is_some() && is_socket(&args.http) && args.admin.as_ref().is_none_or(is_socket) {
        anyhow::bail!("TLS is not supported on a Unix socket: leave out --tls-cert and --tls-key");
    }
    args.http.check(caller_guard(tokens))?;
    args.grpc.as_ref().map_or(Ok(()), |grpc| grpc.check(caller_guard(tokens)))?;
    args.resp.as_ref().map_or(Ok(()), |resp| resp.check(caller_guard(tokens)))?;
    args.admin.as_ref().map_or(Ok(()), |admin| admin.check(operator_guard(tokens)))
}

/// Returns the token that callers need on an address that other machines can reach.
fn caller_guard(tokens: &Tokens) -> Guard {
    if tokens.require_from_callers() { Guard::Set } else { Guard::Missing("THRESHOLD_TOKEN") }
}

/// Returns the token that operators need on an address that other machines can reach.
fn operator_guard(tokens: &Tokens) -> Guard {
    if tokens.any_for_operators() { Guard::Set } else { Guard::Missing("THRESHOLD_ADMIN_TOKEN") }
}

/// Returns the names that requests may call `--http` by: without tokens only its own, against DNS rebinding.
fn caller_hosts(args: &ServeArgs, tokens: &Tokens) -> Hosts {
    if !tokens.require_from_callers() && matches!(args.http, Address::Tcp(_)) {
        return Hosts::Own(args.allow_host.as_slice().into());
    }
    if !args.allow_host.is_empty() {
        tracing::warn!("--allow-host ignored: with a token or on a Unix socket every Host is accepted");
    }
    Hosts::Any
}

/// Returns the names that requests may call `--admin` by.
fn operator_hosts(args: &ServeArgs, tokens: &Tokens) -> Hosts {
    if !tokens.any_configured() && matches!(args.admin, Some(Address::Tcp(_))) {
        return Hosts::Own(args.allow_host.as_slice().into());
    }
    Hosts::Any
}

/// Opens the desk on its store, with its journal or without one. Returns the store too if it is shared.
async fn desk(
    args: &ServeArgs,
    store: &StoreUrl,
    node: &str,
    policy: Policy,
) -> anyhow::Result<(OpenDesk, Option<Arc<RedisStore>>)> {
    check_journal_name(args)?;
    let clock = Arc::new(SystemClock::new());
    let (present, old) = (secret("THRESHOLD_SECRET")?, secret("THRESHOLD_SECRET_OLD")?);
    if let StoreUrl::Redis(url) = store {
        let secrets = store::secrets(present.as_deref(), old.as_deref())?;
        let store = store::open(args, url, &secrets, node).await?;
        let given = GivenSecrets { present: present.as_deref(), old: old.as_deref() };
        let location = JournalLocation { journal: &args.db, secrets: given, new_journal: args.new_journal };
        // The secrets are checked even without a journal, because the digests in the shared store are made with them.
        let location = Some(&location).filter(|_| !args.no_db);
        let any = AnyStore::other(Arc::clone(&store));
        let opened = Desk::on_shared_store(policy, clock, any, secrets, location).context(JOURNAL_UNUSABLE)?;
        return Ok((opened, Some(store)));
    }
    if args.no_db {
        check_secrets(present.as_deref(), old.as_deref())?;
        return Ok((OpenDesk { desk: Desk::new(policy, clock), journal: None, damage: None }, None));
    }
    let secrets = GivenSecrets { present: present.as_deref(), old: old.as_deref() };
    let location = JournalLocation { journal: &args.db, secrets, new_journal: args.new_journal };
    let opened = Desk::with_journal(policy, clock, &location);
    Ok((opened.context(JOURNAL_UNUSABLE)?, None))
}

/// Reads where events and alerts go.
fn sink_settings(args: &ServeArgs) -> anyhow::Result<SinkSettings> {
    let reach = if args.allow_private_webhooks { Reach::Private } else { Reach::Public };
    SinkSettings::from_environment(&args.events_to, reach, args.node.as_deref())
}

/// Checks that the journal and the files beside it are different ones.
fn check_journal_name(args: &ServeArgs) -> anyhow::Result<()> {
    let is_taken =
        |extension: &std::ffi::OsStr| extension == "events" || extension == "secret" || extension == "counters";
    match args.db.extension() {
        Some(extension) if !args.no_db && is_taken(extension) => anyhow::bail!(
            "--db {}: the file beside a journal with the extension .{} is another one; name the journal otherwise, as in threshold.db",
            args.db.display(),
            extension.display()
        ),
        _ => Ok(()),
    }
}

/// Opens the file of events beside the journal, or a database in memory without one.
fn events(args: &ServeArgs, now: Timestamp) -> anyhow::Result<EventDatabase> {
    let retention = Retention { age: args.events_keep, bytes: u64::from(args.events_size).saturating_mul(1 << 20) };
    let path = events_path(args);
    path.as_deref().map_or(Ok(()), EventDatabase::check)?;
    Ok(EventDatabase::open(path.as_deref(), retention, now))
}

/// Returns the path of the file of events, if there is one.
fn events_path(args: &ServeArgs) -> Option<PathBuf> {
    // The journal may be reached through a link: files beside it are beside the file that the link leads to.
    let journal = args.db.canonicalize().unwrap_or_else(|_| args.db.clone());
    (!args.no_db).then(|| journal.with_extension("events"))
}

/// Returns why others can replace files that the server depends on, with how to mend that.
fn unsafe_folders(args: &ServeArgs, policy: Option<&Policy>) -> BTreeSet<String> {
    let policy_file = args.policy.as_deref().filter(|path| path.as_os_str() != "-");
    let keys = policy.and_then(|policy| policy.identity().jwt.as_ref()?.key_file.as_deref()).map(Path::new);
    let events = events_path(args);
    let authorities = store::authorities(args).ok().flatten();
    let (certs, store) = ([&args.tls_cert, &args.tls_key], [&args.store_cert, &args.store_key, &authorities]);
    let given = certs.into_iter().chain(store).filter_map(|file| file.as_deref());
    let sinks = args.events_to.iter().filter_map(Lines::path);
    let files = [policy_file, keys, events.as_deref()].into_iter().flatten().chain(given).chain(sinks);
    // The parent of a bare name is "".
    let folder = |file: &Path| file.parent().map(|parent| Path::new(".").join(parent));
    let folders = files.filter_map(folder).chain(args.tenants.clone());
    folders.filter_map(|folder| unsafe_folder(&folder)).collect()
}

fn warn_of_folders(args: &ServeArgs, policy: &Policy) {
    for reason in unsafe_folders(args, Some(policy)) {
        tracing::warn!(reason, "others can replace files of this server");
    }
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

fn duration(span: Span) -> Duration {
    Duration::from_micros(span.micros())
}
