//! Threshold's store in Redis beside its peers, on servers that the benchmark starts, in one run: decisions a second, CPU time of
//! the node and of Redis, round trips and latency.

mod contenders;
mod load;
mod memory;
mod nodes;
mod report;
mod requests;
mod servers;

use std::io::IsTerminal as _;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};

use contenders::Contender;
use nodes::Layers;
use report::{Report, Series, Table};
use requests::Traffic;
use servers::Servers;

fn main() -> ExitCode {
    let runtime = tokio::runtime::Runtime::new().context("cannot start a runtime");
    match runtime.and_then(|runtime| runtime.block_on(run())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("redis: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// How much to measure.
struct Settings {
    rounds: usize,
    /// How long each contender decides in one round.
    time: Duration,
    /// The number of records of the measurement of memory.
    records: usize,
    /// Measures only scenarios whose title contains this.
    only: Option<String>,
}

impl Settings {
    fn from_env() -> Result<Self> {
        let quick = std::env::var_os("QUICK").is_some_and(|value| value != "0");
        let rounds = match std::env::var("ROUNDS") {
            Ok(text) => text.parse().ok().filter(|rounds| *rounds > 0).context("ROUNDS is a number above 0")?,
            Err(_) => {
                if quick {
                    1
                } else {
                    5
                }
            }
        };
        let time = Duration::from_millis(if quick { 100 } else { 600 });
        let records = if quick { 1_000 } else { 100_000 };
        Ok(Self { rounds, time, records, only: std::env::var("ONLY").ok() })
    }
}

/// What is decided, where, and how many decisions are in flight.
#[derive(Debug, Clone, Copy)]
pub struct Scenario {
    clustered: bool,
    traffic: Traffic,
    half_denied: bool,
    in_flight: usize,
}

impl Scenario {
    /// Returns a title for its table.
    pub fn title(&self) -> String {
        let servers = if self.clustered { "a Cluster of three" } else { "one server" };
        let traffic = if self.traffic == Traffic::Spread { "spread" } else { "one hot tenant" };
        let denied = if self.half_denied { "half denied" } else { "all allowed" };
        format!("{servers}, {traffic}, {denied}, {} in flight", self.in_flight)
    }
}

/// The scenarios, those with the figures that others are compared with first.
const SCENARIOS: [Scenario; 8] = {
    let spread = Scenario { clustered: false, traffic: Traffic::Spread, half_denied: true, in_flight: 16 };
    let cluster = Scenario { clustered: true, ..spread };
    [
        Scenario { half_denied: false, ..spread },
        spread,
        Scenario { in_flight: 1, ..spread },
        Scenario { in_flight: 64, ..spread },
        Scenario { traffic: Traffic::OneTenant, ..spread },
        cluster,
        Scenario { in_flight: 64, ..cluster },
        Scenario { traffic: Traffic::OneTenant, ..cluster },
    ]
};

async fn run() -> Result<()> {
    let settings = Settings::from_env()?;
    let mut report = Report::new(settings.rounds);
    for clustered in [false, true] {
        let here = |scenario: &&Scenario| {
            let wanted = settings.only.as_ref().is_none_or(|part| scenario.title().contains(part));
            scenario.clustered == clustered && wanted
        };
        let scenarios: Vec<&Scenario> = SCENARIOS.iter().filter(here).collect();
        if scenarios.is_empty() {
            continue;
        }
        let servers = if clustered { Servers::cluster().await? } else { Servers::single().await? };
        let contenders = open(&servers, clustered, &mut report).await;
        for scenario in scenarios {
            let table = measure(scenario, &servers, &contenders, &settings).await?;
            report.tables.push(table);
        }
    }
    progress("memory");
    report.memory = Some(memory::bytes_per_record(settings.records).await?);
    report.publish()
}

/// Opens every contender. Those that cannot be opened are reported as absent.
async fn open(servers: &Servers, clustered: bool, report: &mut Report) -> Vec<(&'static str, Arc<dyn Contender>)> {
    let mut opened =
        vec![("INCR", contenders::incr(servers).await), (report::SCRIPT, contenders::script(servers).await)];
    if !clustered {
        opened.push(("one-limit script, fred", contenders::fred(servers).await));
        // limitador has no support for Cluster.
        opened.push((report::LIMITADOR_ONE, contenders::limitador(servers, false).await));
    }
    opened.push((report::ONE, nodes::node(servers, Layers::One).await));
    if !clustered {
        opened.push((report::LIMITADOR_FOUR, contenders::limitador(servers, true).await));
    }
    opened.push((report::FOUR, nodes::node(servers, Layers::Four).await));
    opened.push(("threshold, grove", nodes::node(servers, Layers::Grove).await));
    opened.push(("threshold, grove, no user_scope", nodes::node(servers, Layers::GroveUsers).await));
    opened.push((report::STRIKES, nodes::node(servers, Layers::GroveStrikes).await));
    let place = if clustered { "in a Cluster" } else { "on one server" };
    let usable = opened.into_iter().filter_map(|(name, contender)| match contender {
        Ok(contender) => Some((name, contender)),
        Err(error) => {
            report.absent.push(format!("{name} {place}: {error:#}"));
            None
        }
    });
    usable.collect()
}

/// Measures every contender once in each round, in an order that rotates: a slow minute of the machine slows them all. One round
/// goes ahead to warm up.
async fn measure(
    scenario: &Scenario,
    servers: &Servers,
    contenders: &[(&'static str, Arc<dyn Contender>)],
    settings: &Settings,
) -> Result<Table> {
    let requests = Arc::new(requests::requests(scenario.traffic, scenario.half_denied));
    // Where nothing is denied, nobody has strikes.
    let taking_part =
        |(name, _): &&(&'static str, Arc<dyn Contender>)| scenario.half_denied || *name != report::STRIKES;
    let contenders: Vec<_> = contenders.iter().filter(taking_part).collect();
    let mut all: Vec<Series> = contenders.iter().map(|(name, _)| Series::new(name)).collect();
    for round in 0..=settings.rounds {
        progress(&format!("{}: round {round} of {}", scenario.title(), settings.rounds));
        for place in 0..contenders.len() {
            let at = (place + round) % contenders.len();
            let (name, contender) = contenders[at];
            let measured = load::run(contender, servers, &requests, scenario.in_flight, settings.time).await;
            let measured = measured.with_context(|| format!("{name}, {}", scenario.title()))?;
            if round > 0 {
                all[at].add(&measured);
            }
        }
    }
    Ok(Table { scenario: *scenario, series: all })
}

fn progress(what: &str) {
    if std::io::stderr().is_terminal() {
        eprintln!("· {what}");
    }
}
