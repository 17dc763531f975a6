//! Runs a history: clients and faults side by side, a quiet time, and then the comparison of the store with the ledger.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use tokio::task::JoinSet;

use super::clients::Client;
use super::judge;
use super::ledger::{Effect, Entry};
use super::node::{Ask, Request, Told};
use super::random::Random;
use super::scenario::{Fault, Form, Scenario};
use super::servers::Servers;
use super::world::World;

/// How often a hot tenant is charged in a second.
const HOT_RATE: u32 = 1_500;
/// After so many wrong histories no further ones are run.
const MOST_WRONG: usize = 5;
/// Longer than an expired reservation takes to be given back.
const QUIET: Duration = Duration::from_secs(4);

/// Runs the history of a seed. An error has its scenario, what has happened, and what is wrong.
async fn run(seed: u64, form: Form) -> Result<(), String> {
    let scenario = Scenario::draw(seed, form);
    let begun = Instant::now();
    let (sent, received) = tokio::sync::oneshot::channel();
    let told = AssertUnwindSafe(history(scenario.clone(), sent)).catch_unwind().await;
    let log = received.await.map_or_else(|_| Vec::new(), |world: Arc<World>| world.log());
    let wrong = match told {
        Ok(Ok(summary)) => {
            println!("seed {seed}: {summary} in {:.1} s", begun.elapsed().as_secs_f64());
            return Ok(());
        }
        Ok(Err(wrong)) => wrong,
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            vec![text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()]
        }
    };
    // With any number of seconds the history of a seed is a long one.
    let form = if form == Form::Long { " THRESHOLD_HISTORY_SECS=1" } else { "" };
    Err(format!("THRESHOLD_HISTORY_SEED={seed}{form}\n{scenario:?}\n{log:#?}\n{wrong:#?}"))
}

async fn history(scenario: Scenario, shown: tokio::sync::oneshot::Sender<Arc<World>>) -> Result<String, Vec<String>> {
    let kind = scenario.kind;
    let servers = tokio::task::spawn_blocking(move || Servers::start(kind)).await.unwrap();
    let mut random = Random::new(scenario.seed ^ 0xfa17);
    let world = World::start(scenario, servers.url()).await;
    let _ = shown.send(Arc::clone(&world));
    for ask in [Ask::Ban { user: "banned".into() }, Ask::Double { tenant: "double".into() }] {
        assert_eq!(world.ask_until_answered(0, ask).await, Told::Done);
    }
    let stop = Arc::new(AtomicBool::new(false));
    let clients: JoinSet<()> = (0..world.scenario.clients)
        .map(|number| {
            let random = Random::new(world.scenario.seed.wrapping_mul(1_000) + u64::try_from(number).unwrap());
            Client::new(Arc::clone(&world), random).run(Arc::clone(&stop))
        })
        .collect();
    let hot = world.scenario.hot.then(|| tokio::spawn(charge_hot(Arc::clone(&world), Arc::clone(&stop))));
    let mut servers = servers;
    let mut is_rotated = false;
    for (quiet, fault) in world.scenario.faults.clone() {
        tokio::time::sleep(quiet).await;
        is_rotated |= fault == Fault::Rotate;
        servers = suffer(&world, servers, fault, &mut random).await;
    }
    tokio::time::sleep(Duration::from_millis(700)).await;
    stop.store(true, Ordering::Relaxed);
    clients.join_all().await;
    if let Some(hot) = hot {
        hot.await.unwrap();
    }
    world.note("quiet");
    let end = Instant::now() + QUIET;
    while Instant::now() < end {
        for node in world.nodes() {
            let _ = world.ask(node, Ask::CatchUp).await;
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    judge::judge(&world, is_rotated).await?;
    let verbs = world.ledger.verbs().into_iter().map(|(verb, (sent, failed))| format!("{verb} {failed} of {sent}"));
    let verbs = verbs.collect::<Vec<_>>().join(", ");
    let (kind, mode, entries) = (world.scenario.kind, world.scenario.mode, world.ledger.len());
    let faults = world.scenario.faults.len();
    // The servers end after their last call.
    drop(servers);
    Ok(format!("{kind:?}, {mode}, {faults} faults, {entries} entries, without an answer: {verbs}"))
}

/// Carries out a fault, and waits until it is over.
async fn suffer(world: &Arc<World>, mut servers: Servers, fault: Fault, random: &mut Random) -> Servers {
    world.note(&format!("{fault:?}"));
    match fault {
        Fault::KillNode { down } => {
            let node = random.index(world.scenario.nodes);
            world.kill_node(node);
            tokio::time::sleep(down).await;
            world.start_node(node).await;
        }
        Fault::SuspendNode { time } => {
            if let Some(node) = world.node(random.index(world.scenario.nodes)) {
                node.suspend();
                tokio::time::sleep(time).await;
                node.go_on();
            }
        }
        Fault::Rotate => world.rotate(2, Some(1)).await,
        fault => {
            let mut own = random.clone();
            random.next();
            let suffered = tokio::task::spawn_blocking(move || {
                let loss = servers.suffer(fault, &mut own);
                (servers, loss)
            });
            let from = Instant::now();
            let (back, loss) = suffered.await.unwrap();
            // A late charge is withdrawn only from the server that told of it, so it stays where its keys have moved meanwhile.
            let moves = matches!(fault, Fault::HandOver | Fault::Reshard);
            if moves || matches!(fault, Fault::Restart { .. } | Fault::PauseAndKill { .. } | Fault::FailOver) {
                world.ledger.cut(from, Instant::now());
            }
            servers = back;
            loss.into_iter().for_each(|loss| world.ledger.lose(loss));
        }
    }
    world.note("over");
    servers
}

/// Charges one tenant again and again from one node, and writes down how much.
async fn charge_hot(world: Arc<World>, stop: Arc<AtomicBool>) {
    let node = world.scenario.nodes - 1;
    let request = Request { user: "u0".into(), tenant: "hot".into(), category: "hot".into(), cost: 1 };
    while !stop.load(Ordering::Relaxed) {
        let Some(remote) = world.node(node) else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let (from, time) = (Instant::now(), Duration::from_millis(500));
        let told = remote.ask(Ask::Hammer { request: request.clone(), rate: HOT_RATE, time }).await;
        let (admitted, unsure) = match told {
            Told::Hammered { admitted, unsure, .. } => (admitted, unsure),
            // As many as it can have sent.
            _ => (0, u64::from(HOT_RATE)),
        };
        let (admitted, unsure) = (i64::try_from(admitted).unwrap(), i64::try_from(unsure).unwrap());
        let (told, doubt) = ((admitted, admitted + unsure), (0, admitted + unsure));
        let effects = vec![Effect { told, doubt, is_unanswered: false, node, from, to: Instant::now() }];
        world.ledger.add(Entry { keys: super::clients::keys(&request), effects, admitted, alone: 0 });
    }
}

/// Returns a number of the environment.
fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

/// Runs the short histories of these seeds, all of them, and fails if one did.
pub(super) async fn run_seeds(seeds: &[u64]) {
    let mut wrong = Vec::new();
    for seed in seeds {
        wrong.extend(run(*seed, Form::Short).await.err());
    }
    assert!(wrong.is_empty(), "{} of {} histories:\n{}", wrong.len(), seeds.len(), wrong.join("\n"));
}

/// Runs the history of `THRESHOLD_HISTORY_SEED`, or histories of new seeds for `THRESHOLD_HISTORY_SECS`.
pub(super) async fn run_asked() {
    if let Some(seed) = number("THRESHOLD_HISTORY_SEED") {
        let form = if number("THRESHOLD_HISTORY_SECS").is_some() { Form::Long } else { Form::Short };
        return run(seed, form).await.unwrap_or_else(|wrong| panic!("{wrong}"));
    }
    let Some(seconds) = number("THRESHOLD_HISTORY_SECS") else { return };
    let (begun, mut kinds, mut wrong) = (Instant::now(), BTreeMap::<String, u32>::new(), Vec::new());
    let first = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs();
    for seed in first.. {
        if begun.elapsed() > Duration::from_secs(seconds) {
            break;
        }
        *kinds.entry(format!("{:?}", Scenario::draw(seed, Form::Long).kind)).or_default() += 1;
        wrong.extend(run(seed, Form::Long).await.err());
        // Enough to see whether they have one cause.
        if wrong.len() >= MOST_WRONG {
            break;
        }
    }
    let count: u32 = kinds.values().sum();
    println!("{count} histories in {:.0} s: {kinds:?}", begun.elapsed().as_secs_f64());
    assert!(wrong.is_empty(), "{} of {count} histories:\n{}", wrong.len(), wrong.join("\n"));
}
