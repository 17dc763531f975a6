//! `threshold demo`: a server with the preset `grove` and made-up traffic, for those who want to see it work before they set it up.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use clap::Parser as _;
use rand::RngExt as _;
use threshold_core::Facts;
use threshold_core::plan::Verb;
use threshold_core::policy::Layer;
use threshold_limiter::{Attempted, LoginRequest};
use tokio::time::{MissedTickBehavior, interval};
use tracing::Level;

use crate::cli::{Cli, Command, DemoArgs};
use crate::desk::NewBan;
use crate::door::App;
use crate::init::PRESETS;
use crate::serve;
use threshold_rehearsal::Report;
use threshold_rehearsal::source::Source;

/// How often requests are made.
const TICK: Duration = Duration::from_millis(100);
/// The tenants, with their tiers, and how many requests each makes in ten ticks. The last one has more traffic than it pays for.
const TENANTS: [(&str, &str, u32); 4] =
    [("orchard", "oak", 4), ("harbor", "sapling", 3), ("lantern", "sapling", 3), ("meadow", "seedling", 10)];
const USERS: [&str; 12] = ["ada", "ben", "chloe", "dev", "elif", "finn", "grace", "hiro", "ines", "jon", "kira", "leo"];
const PATHS: [(&str, &str); 6] = [
    ("GET", "/"),
    ("GET", "/api/posts"),
    ("GET", "/api/posts/7"),
    ("GET", "/api/feed"),
    ("POST", "/api/comments"),
    ("POST", "/api/posts"),
];
const SCRAPER: IpAddr = IpAddr::V4(Ipv4Addr::new(198, 51, 100, 23));
const STUFFER: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 66));
const SCANNER: &str = "203.0.113.200";
/// The scraper works this many ticks, then rests as many: a minute.
const SCRAPER_TICKS: u64 = 600;

pub(crate) fn run(args: &DemoArgs) -> anyhow::Result<Report> {
    let text = PRESETS.iter().find(|(name, _)| *name == "grove").map_or("", |(_, text)| *text);
    // Names are made up, so they may be shown.
    let text = text.replacen("[identity]\n", "[identity]\nlog_identifiers = true\n", 1);
    let source = Source { name: "grove (demo)".to_owned(), text };
    // As on the command line, so that a demo has the same defaults as a server.
    let http = args.http.to_string();
    let cli = Cli::try_parse_from(["threshold", "serve", "--no-db", "--no-grpc", "--no-resp", "--http", &http])?;
    let Command::Serve(serve_args) = cli.command else { anyhow::bail!("the demo cannot be started") };
    crate::print("Open the address of http in a browser. Ctrl-C ends the demo; --http ADDR chooses another address.\n");
    serve::run_with(
        &serve_args,
        // Blocks are what the demo is about: they are on the page, and would fill the terminal.
        Level::ERROR,
        || Ok(source),
        |app| {
            app.is_demo.store(true, Ordering::Relaxed);
            tokio::spawn(traffic(app));
        },
    )
}

/// Makes requests until the server stops.
async fn traffic(app: Arc<App>) {
    let reason = "demo: looks for backups of databases";
    let ban = NewBan { layer: Layer::Edge, key: SCANNER, reason, seconds: Some(86_400) };
    if let Err(error) = app.desk.ban("demo", ban).await {
        tracing::warn!(?error, "the demo's ban was not set");
    }
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for tick in 0_u64.. {
        tokio::select! {
            _ = ticks.tick() => {}
            () = app.health.until_draining() => return,
        }
        visit(&app).await;
        if tick.checked_div(SCRAPER_TICKS).is_some_and(|minute| minute % 2 == 0) {
            scrape(&app).await;
        }
        if tick % 10 == 0 {
            spam(&app).await;
            guess(&app).await;
            request(
                &app,
                Facts { ip: SCANNER.parse().ok(), method: Some("GET"), path: Some("/backup.sql"), ..Facts::default() },
            )
            .await;
        }
    }
}

/// People who use the site, and a tenant with more of them than its tier allows.
async fn visit(app: &App) {
    for (host, (tenant, tier, share)) in (1..).zip(TENANTS) {
        if !rand::rng().random_ratio(share, 10) {
            continue;
        }
        let (Some(number), Some((method, path))) = (pick(&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]), pick(&PATHS)) else {
            return;
        };
        // Each user of each tenant has an address of its own.
        let ip = Some(Ipv4Addr::new(10, host, 0, number).into());
        let (tenant, tier, user) = (Some(tenant), Some(tier), USERS.get(usize::from(number)).copied());
        let (method, path) = (Some(method), Some(path));
        request(app, Facts { ip, tenant, tier, user, method, path, ..Facts::default() }).await;
    }
}

/// One address that reads all pages.
async fn scrape(app: &App) {
    for _ in 0..8 {
        let path = format!("/api/posts/{}", rand::rng().random_range(0..100_000));
        request(app, Facts { ip: Some(SCRAPER), method: Some("GET"), path: Some(&path), ..Facts::default() }).await;
    }
}

/// One user who does not stop when told to, and so climbs the ladder: warnings, cool-downs, a shadow ban.
async fn spam(app: &App) {
    let (tenant, tier, user) = (Some("orchard"), Some("oak"), Some("mallory"));
    let (ip, method, path) = (Some(Ipv4Addr::new(10, 1, 0, 99).into()), Some("POST"), Some("/api/posts"));
    request(app, Facts { ip, tenant, tier, user, method, path, ..Facts::default() }).await;
}

/// One address that tries stolen passwords.
async fn guess(app: &App) {
    let Some(name) = pick(&USERS) else { return };
    let account = format!("{name}@example.com");
    let attempt = LoginRequest { account: Some(&account), ip: Some(STUFFER), ..LoginRequest::default() };
    if let Ok(Attempted::Allowed(token)) = app.desk.login_attempt(&attempt, crate::desk::new_trace()).await {
        let _ = app.desk.login_result(&token, false).await;
    }
}

async fn request(app: &App, facts: Facts<'_>) {
    let policy = app.desk.policy();
    let facts = Facts { trace: crate::desk::new_trace(), ..facts };
    // A request that the policy cannot plan is none of the demo's.
    let _ = app.desk.decide(&policy, Verb::Check, &facts).await;
}

/// Returns one of the items, by chance.
fn pick<T: Copy>(items: &[T]) -> Option<T> {
    items.get(rand::rng().random_range(0..items.len())).copied()
}
