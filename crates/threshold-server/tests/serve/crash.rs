//! Kills the server at random points while bans, strikes and locks are written. After each start, everything that was
//! acknowledged is there, and nothing that was not requested.

use std::collections::{BTreeMap, BTreeSet};
use std::net::TcpStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use super::client::Client;
use super::process::{Scratch, Server, Start};

/// How often the server is killed; `./test long` multiplies it by ten.
const POINTS: u64 = 200;
/// With room for all subjects that are struck in ten times as many rounds: in a full table the least would be evicted.
const POLICY: &str = r#"
[memory]
max_keys = 2000000

[login]
account = "1000/day"
locks = { 1000 = "1min" }

[[rule]]
name = "posts"
per = ["user"]
limit = "1/day"
strike = "request"
ladder = "patient"

[ladders.patient]
rungs = ["deny"]
"#;

/// The known state of one name: how much was acknowledged, and how much was requested.
#[derive(Debug, Default, Clone, Copy)]
struct Known {
    at_least: u64,
    at_most: u64,
}

/// Bans are 1 if set and 0 if lifted; strikes and failures are counts.
#[derive(Debug, Default)]
struct Model {
    bans: BTreeMap<String, Known>,
    strikes: BTreeMap<String, Known>,
    failures: BTreeMap<String, Known>,
    audit: Audit,
}

/// A random number generator. The seed is printed, so that a failure can be reproduced.
struct Random(u64);

impl Random {
    fn below(&mut self, most: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % most
    }
}

fn start(policy: &Path, db: &Path) -> Server {
    Start { policy: Some(policy), args: &["--db", db.to_str().unwrap()], ..Start::default() }.server()
}

/// Sets and lifts bans until the server is killed.
fn write_bans(client: &mut Client<TcpStream>, round: u64, bans: &mut BTreeMap<String, Known>) {
    for number in 0.. {
        let name = format!("banned-{round}-{number}");
        let known = bans.entry(name.clone()).or_default();
        known.at_most = 1;
        let body = json!({"layer": "user", "key": name, "reason": "test"}).to_string();
        let Ok(answer) = client.post("/v1/bans", &body) else { return };
        assert_eq!(answer.status, 200, "{}", answer.body);
        known.at_least = 1;
        if number % 3 == 0 {
            known.at_least = 0;
            let path = format!("/v1/bans/{}", answer.json()["id"].as_str().unwrap());
            let Ok(answer) = client.send("DELETE", &path, &[], "") else { return };
            assert_eq!(answer.status, 200, "{}", answer.body);
            known.at_most = 0;
        }
    }
}

/// Exceeds a limit until the server is killed. The answer to a strike that is not on disk in time is marked as degraded.
fn write_strikes(client: &mut Client<TcpStream>, round: u64, strikes: &mut BTreeMap<String, Known>) {
    for number in 0.. {
        let name = format!("striker-{round}-{}", number / 5);
        let known = strikes.entry(name.clone()).or_default();
        let first = number % 5 == 0;
        known.at_most += u64::from(!first);
        let Ok(answer) = client.post("/v1/check", &json!({"user": name}).to_string()) else { return };
        assert_eq!(answer.status, 200, "{}", answer.body);
        let answer = answer.json();
        assert_eq!(answer["allowed"], first, "{answer}");
        if answer["degraded"] == false {
            known.at_least = known.at_most;
        } else {
            assert_eq!(answer["degradedReason"], "journal");
        }
    }
}

/// Fails logins until the server is killed.
fn write_failures(client: &mut Client<TcpStream>, round: u64, failures: &mut BTreeMap<String, Known>) {
    for number in 0.. {
        let name = format!("victim-{round}-{}", number / 5);
        let body = json!({"account": name, "ip": format!("10.{}.{}.1", round % 256, number % 256)}).to_string();
        // Before it is asked: an attempt whose answer is lost counts as failed after a minute.
        let known = failures.entry(name).or_default();
        known.at_most += 1;
        let Ok(answer) = client.post("/v1/login/attempt", &body) else { return };
        assert_eq!(answer.status, 200, "{}", answer.body);
        let body = json!({"attempt": answer.json()["attempt"], "success": false}).to_string();
        let Ok(answer) = client.post("/v1/login/result", &body) else { return };
        assert_eq!(answer.status, 200, "{}", answer.body);
        known.at_least = known.at_most;
    }
}

/// Writes for a random time, then kills the server.
fn write_and_kill(server: &Server, round: u64, after: Duration, model: &mut Model) {
    let Model { bans, strikes, failures, .. } = model;
    let [mut first, mut second, mut third] = [server.connect(), server.connect(), server.connect()];
    std::thread::scope(|scope| {
        scope.spawn(|| write_bans(&mut first, round, bans));
        scope.spawn(|| write_strikes(&mut second, round, strikes));
        scope.spawn(|| write_failures(&mut third, round, failures));
        std::thread::sleep(after);
        server.signal("KILL");
    });
}

/// Checks that the audit and the bans agree: a subject is banned exactly if its last audit record says so.
///
/// Fails if a ban and its audit record are written in two transactions.
fn compare_audit(db: &Path, there: &BTreeMap<String, u64>, seen: &mut Audit, context: &str) {
    let file = rusqlite::Connection::open(db).unwrap();
    let mut select = file.prepare("SELECT id, about, action FROM audit WHERE id > ?1 ORDER BY id").unwrap();
    let read = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get::<_, String>(1)?, row.get::<_, String>(2)?));
    for line in select.query_map([seen.last], read).unwrap() {
        let (id, about, action) = line.unwrap();
        seen.last = id;
        let name = about.strip_prefix("user ").unwrap().to_owned();
        let is_new = if action.starts_with("ban: ") { seen.banned.insert(name) } else { seen.banned.remove(&name) };
        assert!(is_new, "{context}: {about}: {action}");
    }
    let banned: BTreeSet<String> = there.keys().cloned().collect();
    let differ: Vec<&String> = seen.banned.symmetric_difference(&banned).collect();
    assert!(differ.is_empty(), "{context}: the audit and the bans differ in {differ:?}");
}

/// The bans according to the audit so far.
#[derive(Debug, Default)]
struct Audit {
    last: i64,
    banned: BTreeSet<String>,
}

/// Compares the server with the known state, and takes over what was requested but not acknowledged.
fn compare(client: &mut Client<TcpStream>, db: &Path, round: Option<u64>, model: &mut Model, context: &str) {
    // A killed process does not damage the journal.
    assert_eq!(client.send("GET", "/readyz", &[], "").unwrap().json()["status"], "ok", "{context}");
    let mut there = BTreeMap::new();
    let mut after = String::new();
    loop {
        let page = client.send("GET", &format!("/v1/bans?limit=10000{after}"), &[], "").unwrap().json();
        let page = page.as_array().unwrap();
        let Some(last) = page.last() else { break };
        after = format!("&after={}", last["id"].as_str().unwrap());
        there.extend(page.iter().map(|ban| (ban["key"].as_str().unwrap().to_owned(), 1)));
    }
    compare_audit(db, &there, &mut model.audit, context);
    for (name, known) in &mut model.bans {
        learn(name, known, there.remove(name).unwrap_or(0), context);
    }
    assert!(there.is_empty(), "{context}: nobody has banned {there:?}");
    let of_round = |name: &str| round.is_none_or(|round| name.split('-').nth(1) == Some(&round.to_string()));
    for (known, layer, field) in [(&mut model.strikes, "user", "strikes"), (&mut model.failures, "account", "failures")]
    {
        for (name, known) in known.iter_mut().filter(|(name, _)| of_round(name)) {
            let subject: Value = client.send("GET", &format!("/v1/subjects/{layer}/{name}"), &[], "").unwrap().json();
            let attempts = known.at_most;
            learn(name, known, subject[field].as_u64().unwrap(), context);
            if layer == "account" {
                // An attempt whose result was lost counts as failed after a minute.
                known.at_most = attempts;
            }
        }
    }
}

fn learn(name: &str, known: &mut Known, found: u64, context: &str) {
    let Known { at_least, at_most } = *known;
    assert!((at_least..=at_most).contains(&found), "{context}: {name} has {found}, of {at_least} to {at_most}");
    *known = Known { at_least: found, at_most: found };
}

#[test]
fn what_was_acknowledged_survives_kill_9_and_nothing_else_does() {
    let factor: u64 = std::env::var("THRESHOLD_LAW_FACTOR").map_or(1, |factor| factor.parse().unwrap());
    let seed: u64 =
        std::env::var("THRESHOLD_CRASH_SEED").map_or(std::process::id().into(), |seed| seed.parse().unwrap());
    let mut random = Random(seed | 1 << 40);
    let folder = Scratch::folder();
    let (policy, db) = (folder.path().join("policy.toml"), folder.path().join("threshold.db"));
    std::fs::write(&policy, POLICY).unwrap();
    let mut model = Model::default();
    let points = POINTS * factor.min(10);
    for round in 0..points {
        let server = start(&policy, &db);
        let context = format!("seed {seed}, point {round}");
        compare(&mut server.connect(), &db, Some(round.saturating_sub(1)), &mut model, &context);
        // Most are killed while they write, some before.
        let after = Duration::from_micros(random.below(40_000));
        write_and_kill(&server, round, after, &mut model);
    }
    let server = start(&policy, &db);
    let client = &mut server.connect();
    compare(client, &db, None, &mut model, &format!("seed {seed}, at the end"));
    let written = model.bans.len() + model.strikes.len() + model.failures.len();
    assert!(written as u64 > points, "only {written} names in {points} rounds: nothing was put to the test");
}
