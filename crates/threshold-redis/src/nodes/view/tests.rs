//! Simulates nodes that start, stop, sleep and share a name, and a server that is emptied or away. All nodes together never have
//! more than one limit.

#![expect(clippy::arithmetic_side_effects, reason = "a simulation of a few minutes overflows nothing")]

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// One step of the simulation, and the step's length in milliseconds.
const STEP: u64 = 50;
/// The limits whose shares are summed: one without a remainder, one with, and one below the number of nodes.
const LIMITS: [u64; 3] = [12, 1_003, 2];
/// The server's time at the beginning.
const EPOCH: u64 = 1_767_225_600_000;

#[derive(Debug, Clone)]
enum Event {
    /// A process with this name is started, beside another one or after it.
    Start(u8),
    /// The process with this name that was started last is killed.
    Stop(u8),
    /// It is stopped and started again at once.
    Restart(u8),
    /// All processes with this name are suspended for so many steps.
    Sleep(u8, u64),
    /// The server loses its data.
    Flush,
    /// No node reaches the server for so many steps; then it is back for some seconds at least.
    Outage(u64),
}

/// `nodes.lua` as a model.
#[derive(Default)]
struct Model {
    since: Option<u64>,
    members: BTreeMap<String, Member>,
}

impl Model {
    fn beat(&mut self, view: &View, now: u64) -> Beaten {
        let life = u64::try_from(LIFE.as_millis()).unwrap();
        self.members.retain(|_, member| member.beat + life >= now);
        let was_listed = self.members.contains_key(view.id());
        let last = self.members.values().map(|member| member.beat).max();
        let is_in_use = last.is_some_and(|last| now - last <= life / 2);
        let since = self.since.filter(|_| is_in_use).unwrap_or(now);
        self.since = Some(since);
        let joined = if view.joined() == 0 { now } else { view.joined() };
        let (id, name) = (view.id().to_owned(), view.name().to_owned());
        let member = Member { id: id.clone(), name, joined, beat: now, heard: view.heard(), secrets: None };
        self.members.insert(id, member);
        Beaten { now, since, was_listed, members: self.members.values().cloned().collect() }
    }
}

struct Process {
    view: View,
    sleeps_until: u64,
    next: u64,
    /// The answer that is on its way, and when it arrives.
    answer: Option<(u64, Option<Beaten>)>,
    /// When it reaches the server after an outage.
    reconnects: u64,
}

/// A world, driven by pseudo-random numbers.
struct World {
    now: u64,
    seed: u64,
    model: Model,
    away_until: u64,
    processes: Vec<Process>,
    started: u64,
}

impl World {
    fn new(seed: u64) -> Self {
        Self { now: 0, seed, model: Model::default(), away_until: 0, processes: Vec::new(), started: 0 }
    }

    /// Returns a number below `most`, by splitmix64.
    fn random(&mut self, most: u64) -> u64 {
        self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.seed;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % most
    }

    fn happen(&mut self, event: &Event) {
        let name_of = |name: u8| format!("node {name}");
        match *event {
            // A node does not start without the server.
            Event::Start(name) if self.now >= self.away_until => {
                self.started += 1;
                let id = format!("{:016x}", self.random(u64::MAX));
                let view = View::new(id, name_of(name));
                let process = Process { view, sleeps_until: 0, next: self.now, answer: None, reconnects: 0 };
                self.processes.push(process);
            }
            Event::Start(_) => {}
            Event::Stop(name) => {
                let last = self.processes.iter().rposition(|process| process.view.name() == name_of(name));
                if let Some(last) = last {
                    self.processes.remove(last);
                }
            }
            Event::Restart(name) => {
                self.happen(&Event::Stop(name));
                self.happen(&Event::Start(name));
            }
            Event::Sleep(name, steps) => {
                let until = self.now + steps * STEP;
                let named = self.processes.iter_mut().filter(|process| process.view.name() == name_of(name));
                named.for_each(|process| process.sleeps_until = process.sleeps_until.max(until));
            }
            Event::Flush => self.model = Model::default(),
            Event::Outage(steps) => {
                self.away_until = self.now + steps * STEP;
                for at in 0..self.processes.len() {
                    self.processes[at].reconnects = self.away_until + self.random(1_500);
                }
            }
        }
    }

    /// Lets some time pass, and checks the law at each step.
    fn pass(&mut self, steps: u64) {
        for _ in 0..steps {
            self.now += STEP;
            // Before the heartbeats: a process that was woken decides first.
            self.check();
            self.advance_all();
            self.check();
        }
    }

    fn advance_all(&mut self) {
        for at in 0..self.processes.len() {
            self.advance(at);
        }
    }

    fn advance(&mut self, at: usize) {
        let (now, pause, delay) = (self.now, 500 + self.random(501), self.random(300));
        let is_away = now < self.away_until.max(self.processes[at].reconnects);
        let clock = Duration::from_millis(now);
        let process = &mut self.processes[at];
        if now < process.sleeps_until {
            return;
        }
        match process.answer.take() {
            Some((arrives, answer)) if now >= arrives => {
                match answer {
                    Some(answer) => process.view.succeed(&answer, clock),
                    None => process.view.fail(),
                }
                process.next = now + pause;
            }
            Some(waiting) => process.answer = Some(waiting),
            None if now >= process.next => {
                process.view.attempt(clock);
                let answer = (!is_away).then(|| self.model.beat(&process.view, EPOCH + now));
                process.answer = Some((now + delay, answer));
            }
            None => {}
        }
    }

    /// Returns the shares of the processes that run now, by name.
    fn shares(&self) -> Vec<(&str, Share)> {
        let awake = self.processes.iter().filter(|process| self.now >= process.sleeps_until);
        let clock = Duration::from_millis(self.now);
        awake.filter_map(|process| Some((process.view.name(), process.view.share(clock)?))).collect()
    }

    /// What a name has taken over from a predecessor that was asleep counts once.
    fn check(&self) {
        for limit in LIMITS {
            let mut parts = BTreeMap::<&str, u64>::new();
            for (name, share) in self.shares() {
                let part = parts.entry(name).or_default();
                *part = (*part).max(part_of(share, limit));
            }
            let all: u64 = parts.values().sum();
            assert!(all <= limit, "{all} of {limit} at {} ms: {:?}", self.now, self.shares());
        }
    }
}

fn part_of(share: Share, limit: u64) -> u64 {
    limit / share.nodes + u64::from(share.place < limit % share.nodes)
}

fn events(sleeps: bool) -> impl Strategy<Value = Vec<(Event, u64)>> {
    let name = 0_u8..4;
    let event = prop_oneof![
        4 => name.clone().prop_map(Event::Start),
        2 => name.clone().prop_map(Event::Stop),
        2 => name.clone().prop_map(Event::Restart),
        u32::from(sleeps) * 3 => (name, 0_u64..500).prop_map(|(name, steps)| Event::Sleep(name, steps)),
        2 => Just(Event::Flush),
        2 => (0_u64..600).prop_map(Event::Outage),
    ];
    let pause = prop_oneof![0_u64..20, 0_u64..400];
    prop::collection::vec((event, pause), 1..25)
}

/// Lets all of this happen. The server is back for four seconds at least after each outage.
fn play(seed: u64, events: &[(Event, u64)], mut each: impl FnMut(&World)) -> World {
    let mut world = World::new(seed);
    for (event, pause) in events {
        if matches!(event, Event::Outage(_)) && world.now < world.away_until + 4_000 {
            continue;
        }
        world.happen(event);
        for _ in 0..*pause {
            world.pass(1);
            each(&world);
        }
    }
    world
}

proptest! {
    /// Three nodes on an emptied store had two limits, and a node that had slept had a share that the others had divided.
    ///
    /// Woken by, each alone: `is_counted` without `in_use`; without the comparison of `heard` and `joined`, and by one with `beat`;
    /// `seen` kept for a quarter of `LIFE`; `share` without `has_slept`; `attempt` without `leave`; no refresh of `seen` after an
    /// outage; a `since` of the model that an outage does not end.
    #[test]
    fn all_shares_together_are_at_most_one_limit(seed: u64, events in events(true)) {
        play(seed, &events, |_| {});
    }

    /// Two nodes that were started with one name had the same place, and both admitted its share.
    ///
    /// Woken by: `has_rival` that is never true; `TAKEOVER` of half a second; `listening` that is not set after an outage.
    #[test]
    fn of_two_living_nodes_of_one_name_one_has_a_share(seed: u64, events in events(false)) {
        play(seed, &events, |world| {
            let mut names: Vec<&str> = world.shares().into_iter().map(|(name, _)| name).collect();
            let count = names.len();
            names.dedup();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), count, "at {} ms: {:?}", world.now, world.shares());
        });
    }

    /// Whatever has happened, the whole limit is shared out some time later, once for each name.
    ///
    /// Woken by: a rival that is never forgotten, and by a `since` that each node's first heartbeat starts again.
    #[test]
    fn every_name_has_its_share_in_the_end(seed: u64, events in events(true)) {
        let mut world = play(seed, &events, |_| {});
        world.now = world.now.max(world.away_until);
        world.processes.iter_mut().for_each(|process| process.sleeps_until = 0);
        world.pass(40_000 / STEP);
        let mut names: Vec<&str> = world.processes.iter().map(|process| process.view.name()).collect();
        names.sort_unstable();
        names.dedup();
        prop_assert_eq!(world.shares().len(), names.len());
        for limit in LIMITS {
            let all: u64 = world.shares().into_iter().map(|(_, share)| part_of(share, limit)).sum();
            prop_assert_eq!(all, if names.is_empty() { 0 } else { limit });
        }
    }
}

/// Returns a world in which these names have had their shares for long.
fn settled(names: &[u8]) -> World {
    let mut world = World::new(7);
    names.iter().for_each(|name| world.happen(&Event::Start(*name)));
    world.pass(15_000 / STEP);
    assert_eq!(world.shares().len(), names.len());
    world
}

fn has_share(world: &World, name: &str) -> bool {
    world.shares().iter().any(|(own, _)| *own == name)
}

/// A node that was restarted had no share for ten seconds, where the documentation said one.
///
/// Woken by: `others` with the entries of the own name.
#[test]
fn a_restarted_node_has_the_place_of_its_predecessor_within_five_seconds() {
    let mut world = settled(&[0, 1, 2]);
    world.happen(&Event::Restart(1));
    world.pass(1_000 / STEP);
    assert!(!has_share(&world, "node 1"), "its predecessor may be alive");
    world.pass(4_000 / STEP);
    assert_eq!(world.shares().len(), 3);
    assert!(world.shares().iter().all(|(_, share)| share.nodes == 3));
    assert!(world.processes.iter().all(|process| !process.view.has_namesake()));
}

/// Woken by: `has_namesake` that looks at one side only.
#[test]
fn two_nodes_of_one_name_both_hear_of_it() {
    let mut world = settled(&[0, 1]);
    world.happen(&Event::Start(1));
    world.pass(5_000 / STEP);
    let told: Vec<bool> = world.processes.iter().map(|process| process.view.has_namesake()).collect();
    assert_eq!(told, [false, true, true]);
    assert_eq!(world.shares().len(), 2, "the first one goes on");
    world.happen(&Event::Stop(1));
    world.pass(5_000 / STEP);
    assert!(world.processes.iter().all(|process| !process.view.has_namesake()));
}

/// Redis was away for a minute, and every node kept its share: it was still trying.
///
/// Woken by: `share` that compares with `beaten` in place of `attempted`.
#[test]
fn an_outage_changes_no_share() {
    let mut world = settled(&[0, 1, 2]);
    world.happen(&Event::Outage(60_000 / STEP));
    for _ in 0..80_000 / STEP {
        world.pass(1);
        assert_eq!(world.shares().len(), 3, "at {} ms", world.now);
    }
}

/// A node that alone did not reach the store was dropped by the others, and had a share when it came back.
///
/// Woken by: `succeed` without `leave` after `silent`.
#[test]
fn a_node_that_alone_was_away_joins_again() {
    let mut world = settled(&[0, 1, 2]);
    world.processes[0].reconnects = world.now + 30_000;
    // The law does not hold meanwhile: the node cannot know that the others go on.
    let back = EPOCH + world.processes[0].reconnects;
    while world.processes[0].view.heard() < back {
        world.now += STEP;
        world.advance_all();
    }
    world.pass(5_000 / STEP);
    assert!(world.shares().iter().all(|(_, share)| share.nodes == 3) && world.shares().len() == 3);
}

/// Of two nodes of one name the first one was away for a moment, and both had its share.
///
/// Woken by: a `patience` that is `TAKEOVER` always.
#[test]
fn a_node_that_was_heard_keeps_its_place_for_longer_than_a_predecessor() {
    let mut world = settled(&[0, 1]);
    world.happen(&Event::Start(1));
    world.pass(5_000 / STEP);
    world.processes[1].reconnects = world.now + 4_500;
    for _ in 0..10_000 / STEP {
        world.pass(1);
        assert!(world.shares().len() <= 2, "at {} ms: {:?}", world.now, world.shares());
    }
    assert_eq!(world.shares().len(), 2);
}
