//! The clients of a history: what they ask for at random, and what they write down of it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;

use super::ledger::{Change, Effect, Entry};
use super::node::{Ask, Request, Told};
use super::random::Random;
use super::scenario::Scenario;
use super::world::World;

/// The subjects of a history. Few, so that many clients meet at one.
pub(super) const USERS: u64 = 4;
pub(super) const TENANTS: u64 = 2;
pub(super) const ACCOUNTS: u64 = 6;
pub(super) const STRIKERS: u64 = 6;

/// How late an expired reservation may be given back.
const SWEEP: Duration = Duration::from_secs(3);

/// Returns the keys that a request is counted by, in the order of its readings.
pub(super) fn keys(request: &Request) -> Vec<String> {
    let Request { category, user, tenant, .. } = request;
    vec![format!("{category} {tenant}"), format!("{category} {user}")]
}

/// Returns the user and tenant that share no key with another pair, so that all pairs are all keys.
pub(super) fn pairs(scenario: &Scenario) -> Vec<Request> {
    let pairs = scenario.categories().into_iter().flat_map(|category| {
        (0..USERS).map(move |user| {
            let tenant = if category == "hot" { "hot".to_owned() } else { format!("t{}", user % TENANTS) };
            Request { user: format!("u{user}"), tenant, category: category.to_owned(), cost: 0 }
        })
    });
    pairs.collect()
}

/// A receipt or a reservation that has not ended.
struct Held {
    entry: Entry,
    token: String,
    cost: i64,
    /// For a reservation: the changes by its possible ends, and when it expires.
    reserved: Option<Reserved>,
    /// When its end was first sent, and the changes that these ends make.
    sent: Option<Instant>,
    attempted: Vec<i64>,
}

struct Reserved {
    commit: i64,
    expires: Instant,
    at_expiry: Change,
}

pub(super) struct Client {
    world: Arc<World>,
    random: Random,
    held: Vec<Held>,
}

impl Client {
    pub(super) fn new(world: Arc<World>, random: Random) -> Self {
        Self { world, random, held: Vec::new() }
    }

    /// Sends requests until the end, and writes everything down.
    pub(super) async fn run(mut self, stop: Arc<std::sync::atomic::AtomicBool>) {
        while !stop.load(std::sync::atomic::Ordering::Relaxed) {
            match self.random.below(100) {
                0..40 => self.check().await,
                40..48 => self.record().await,
                48..65 => self.reserve().await,
                65..90 => self.end_one().await,
                90..97 => self.guess().await,
                _ => self.strike().await,
            }
            tokio::time::sleep(Duration::from_millis(self.random.between(1, 12))).await;
        }
        for held in std::mem::take(&mut self.held) {
            self.expire(held);
        }
    }

    fn any_node(&mut self) -> usize {
        self.random.index(self.world.scenario.nodes)
    }

    fn any_request(&mut self) -> Request {
        let categories = self.world.scenario.categories();
        let category = (*self.random.of(&categories)).to_owned();
        let tenant = match &*category {
            "hot" => "hot".to_owned(),
            _ => format!("t{}", self.random.below(TENANTS)),
        };
        let cost = self.random.between(1, 4);
        Request { user: format!("u{}", self.random.below(USERS)), tenant, category, cost }
    }

    async fn ask(&self, verb: &'static str, node: usize, ask: Ask) -> Option<Told> {
        let told = self.world.ask(node, ask).await?;
        self.world.ledger.count(verb, !matches!(told, Told::Unsure { .. } | Told::Failed(_)));
        Some(told)
    }

    /// Returns what a charge has changed.
    fn charged(request: &Request, told: &Told, node: usize, from: Instant) -> Entry {
        let cost = i64::try_from(request.cost).unwrap();
        let (change, doubt) = match told {
            Told::Admitted { .. } | Told::Reserved { .. } => ((cost, cost), (0, cost)),
            Told::Denied { .. } | Told::Unsure { admitted: false } => ((0, 0), (0, cost)),
            _ => ((0, cost), (0, cost)),
        };
        let is_admitted = matches!(told, Told::Admitted { .. } | Told::Reserved { .. });
        let is_alone = *told == Told::Unsure { admitted: true };
        let is_unanswered = *told == Told::Unsure { admitted: false };
        let effects = vec![Effect { told: change, doubt, is_unanswered, node, from, to: Instant::now() }];
        let (admitted, alone) = (cost * i64::from(is_admitted), cost * i64::from(is_alone));
        Entry { keys: keys(request), effects, admitted, alone }
    }

    async fn check(&mut self) {
        let (request, node, from) = (self.any_request(), self.any_node(), Instant::now());
        let Some(told) = self.ask("check", node, Ask::Check(request.clone())).await else { return };
        let (entry, cost) = (Self::charged(&request, &told, node, from), i64::try_from(request.cost).unwrap());
        match told {
            Told::Admitted { receipt: Some(token) } if self.random.percent(45) => {
                self.held.push(Held { entry, token, cost, reserved: None, sent: None, attempted: Vec::new() });
            }
            _ => self.world.ledger.add(entry),
        }
    }

    async fn record(&mut self) {
        let (request, node, from) = (self.any_request(), self.any_node(), Instant::now());
        let Some(told) = self.ask("record", node, Ask::Record(request.clone())).await else { return };
        // It admits nothing, and is no part of what a limit bounds.
        let mut entry = Entry { admitted: 0, alone: 0, ..Self::charged(&request, &told, node, from) };
        if entry.effects[0].is_unanswered {
            // It is recorded when the store is back, if it was not before.
            entry.effects[0].told = entry.effects[0].doubt;
        }
        self.world.ledger.add(entry);
    }

    async fn reserve(&mut self) {
        let (request, node, from) = (self.any_request(), self.any_node(), Instant::now());
        let ttl = Duration::from_millis(self.random.between(300, 2_500));
        let releases = self.random.percent(50);
        let Some(told) = self.ask("reserve", node, Ask::Reserve { request: request.clone(), ttl, releases }).await
        else {
            return;
        };
        let mut entry = Self::charged(&request, &told, node, from);
        let cost = i64::try_from(request.cost).unwrap();
        match told {
            Told::Reserved { id } => {
                // A limit on what is in flight gets all of it back.
                let in_flight = request.category == "concurrency";
                let commit = if in_flight { -cost } else { -self.random.of(&[0, cost / 2, cost - 1]) };
                let at_expiry = if releases { (-cost, -cost) } else { (if in_flight { -cost } else { 0 }, 0) };
                let reserved = Some(Reserved { commit, expires: from + ttl, at_expiry });
                self.held.push(Held { entry, token: id, cost, reserved, sent: None, attempted: Vec::new() });
                return;
            }
            // Whatever was charged without an answer is given back when it expires.
            Told::Unsure { admitted: false } | Told::Lost if releases => {
                let effect = &mut entry.effects[0];
                (effect.told, effect.is_unanswered) = ((0, 0), false);
                effect.to = Instant::now() + ttl + SWEEP;
            }
            _ => {}
        }
        self.world.ledger.add(entry);
    }

    /// Ends one of the things that are held: a refund, a commit or a release, sent once or several times at once.
    async fn end_one(&mut self) {
        if self.held.is_empty() {
            return;
        }
        let index = self.random.index(self.held.len());
        let mut held = self.held.swap_remove(index);
        // Some are left to expire.
        if held.reserved.as_ref().is_some_and(|reserved| reserved.expires < Instant::now() - Duration::from_secs(2)) {
            return self.expire(held);
        }
        let token = held.token.clone();
        let (verb, ask, change) = match &held.reserved {
            None => ("refund", Ask::Refund { receipt: token }, -held.cost),
            Some(_) if self.random.percent(25) => ("release", Ask::Release { id: token }, -held.cost),
            Some(reserved) => {
                // What is not used of a limit on requests in flight does not depend on the cost.
                let cost = if keys_of_flight(&held) { 1 } else { held.cost + reserved.commit };
                let cost = u64::try_from(cost).unwrap();
                ("commit", Ask::Commit { id: token, cost }, reserved.commit)
            }
        };
        let nodes: Vec<usize> = (0..*self.random.of(&[1, 1, 1, 2, 4])).map(|_| self.any_node()).collect();
        let sent = Instant::now();
        let told = join_all(nodes.iter().map(|node| self.ask(verb, *node, ask.clone()))).await;
        let told: Vec<Told> = told.into_iter().flatten().collect();
        if told.is_empty() {
            return self.held.push(held);
        }
        let from = *held.sent.get_or_insert(sent);
        if !held.attempted.contains(&change) {
            held.attempted.push(change);
        }
        let certain = if told.contains(&Told::Done) {
            (change, change)
        } else if told.contains(&Told::Unknown) {
            // It has ended before, by one of these or by its expiry. A receipt may also be one of another secret.
            let at_expiry = held.reserved.as_ref().map_or((0, 0), |reserved| reserved.at_expiry);
            let was_sent_before = held.attempted.len() > 1 || sent > from || nodes.len() > 1;
            let attempted = held.attempted.iter().copied().filter(|_| was_sent_before);
            attempted.fold(at_expiry, |all, change| (all.0.min(change), all.1.max(change)))
        } else {
            return self.held.push(held);
        };
        let doubt = (certain.0.min(0), certain.1.max(0));
        held.entry.effects.push(Effect {
            told: certain,
            doubt,
            is_unanswered: false,
            node: nodes[0],
            from,
            to: Instant::now(),
        });
        self.world.ledger.add(held.entry);
    }

    /// Writes down what was not ended by its client, or not for certain.
    fn expire(&self, mut held: Held) {
        let at_expiry = held.reserved.as_ref().map_or((0, 0), |reserved| reserved.at_expiry);
        let change = held.attempted.iter().fold(at_expiry, |all, change| (all.0.min(*change), all.1.max(*change)));
        let from = held.sent.unwrap_or_else(Instant::now);
        let from = held.reserved.as_ref().map_or(from, |reserved| from.min(reserved.expires));
        let to = held.reserved.as_ref().map_or_else(Instant::now, |reserved| reserved.expires + SWEEP);
        let doubt = (change.0.min(0), change.1.max(0));
        let node = held.entry.effects[0].node;
        held.entry.effects.push(Effect {
            told: change,
            doubt,
            is_unanswered: false,
            node,
            from,
            to: to.max(Instant::now()),
        });
        self.world.ledger.add(held.entry);
    }

    /// Guesses a password.
    async fn guess(&mut self) {
        let account = format!("account{}", self.random.below(ACCOUNTS));
        let ip = format!("10.0.{}.{}", self.random.below(256), self.random.below(256));
        let node = self.any_node();
        let Some(Told::Attempt { token }) =
            self.ask("login", node, Ask::Attempt { account: account.clone(), ip }).await
        else {
            return;
        };
        self.world.ledger.guess(&account);
        let node = self.any_node();
        if self.ask("result", node, Ask::Fail { attempt: token }).await == Some(Told::Done) {
            self.world.ledger.keep(format!("lock {account}"));
        }
    }

    /// Exceeds a limit whose ladder bans.
    async fn strike(&mut self) {
        let user = format!("s{}", self.random.below(STRIKERS));
        let request = Request { user: user.clone(), tenant: "t0".into(), category: "striker".into(), cost: 1 };
        let node = self.any_node();
        if self.ask("strike", node, Ask::Check(request)).await == Some(Told::Denied { barred: true }) {
            self.world.ledger.keep(format!("ban {user}"));
        }
    }
}

fn keys_of_flight(held: &Held) -> bool {
    held.entry.keys.iter().any(|key| key.starts_with("concurrency "))
}
