//! Plays the conformance vectors that one token bucket can express, with core beside the door.

#![expect(clippy::arithmetic_side_effects, reason = "a test that overflows fails")]

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;

use serde_json::Value;
use threshold_core::case::{CaseFile, LedgerPlayer, Lines, Player, play};
use threshold_core::limit::Algorithm;
use threshold_core::policy::{CostOf, Mode, Per};
use threshold_core::{Limit, Policy, Timestamp};
use tokio::sync::watch;

use crate::door::test_server::TestServer;

/// Answers with the figures of the door, and with those of core where the five integers have none.
struct RespPlayer {
    server: TestServer,
    ledger: LedgerPlayer,
    limit: Option<Limit>,
    connection: Option<(TcpStream, watch::Sender<bool>)>,
}

/// Returns the limit of a policy that is one token bucket for each address, and nothing else.
fn only_bucket(policy: &str) -> Option<Limit> {
    let policy = Policy::parse(policy, &|_| None).ok()?;
    let [rule] = policy.rules() else { return None };
    let is_plain = rule.mode == Mode::Enforce && rule.block_for.is_none() && rule.counts() == Some(&CostOf::Requests);
    let limit = rule.fixed_limit().filter(|limit| limit.algorithm() == Some(Algorithm::TokenBucket))?;
    (is_plain && rule.per == [Per::Ip] && limit.period().micros() % 1_000_000 == 0).then_some(*limit)
}

impl Player for RespPlayer {
    fn load(&mut self, policy: &str, env: &BTreeMap<String, String>, fresh: bool) -> Result<(), String> {
        self.limit = only_bucket(policy);
        self.server.load(policy, env, fresh)?;
        if fresh || self.connection.is_none() {
            let (stop, address) = self.server.serve_resp();
            self.connection = Some((TcpStream::connect(address).map_err(|error| error.to_string())?, stop));
        }
        self.ledger.load(policy, env, fresh)
    }

    fn call(&mut self, verb: &str, args: &Value, now: Timestamp) -> Result<Value, String> {
        self.server.set_time(now);
        let mut answer = self.ledger.call(verb, args, now)?;
        let limit = self.limit.ok_or("not a bucket")?;
        let cost = if verb == "peek" { 0 } else { args["cost"].as_u64().unwrap_or(1) };
        let (key, count, period) = (args["ip"].as_str().ok_or("no address")?, limit.quota(), limit.period());
        let (stream, _) = self.connection.as_mut().ok_or("not connected")?;
        let call = format!(
            "CL.THROTTLE {key} {} {count} {} {cost}\r\n",
            limit.capacity().saturating_sub(1),
            period.secs_ceil()
        );
        stream.write_all(call.as_bytes()).map_err(|error| error.to_string())?;
        let mut numbers = Vec::new();
        let mut line = String::new();
        while numbers.len() < 5 {
            let mut byte = [0];
            stream.read_exact(&mut byte).map_err(|error| error.to_string())?;
            match byte {
                [b'\n'] if line == "*5\r" => line.clear(),
                [b'\n'] => numbers.push(
                    line.drain(..).as_str().trim().trim_start_matches(':').parse::<i64>().map_err(|_| "an error")?,
                ),
                [other] => line.push(char::from(other)),
            }
        }
        let [limited, _, remaining, retry_after, reset_after] = numbers[..] else { return Err("not five".to_owned()) };
        let fields = answer.as_object_mut().ok_or("core refuses it")?;
        // A peek looks with its own cost, and a quantity of 0 has none.
        if verb == "check" {
            fields.insert("allowed".to_owned(), (limited == 0).into());
            fields.insert("retryAfter".to_owned(), if limited == 0 { Value::Null } else { retry_after.into() });
        }
        fields.insert("remaining".to_owned(), remaining.into());
        // Seconds from now on and Unix seconds are rounded alike only at a whole second.
        if limited == 0 && verb == "check" && now == Timestamp::from_secs(now.secs_ceil()) {
            fields.insert("resetAt".to_owned(), (now.secs_ceil().cast_signed() + reset_after).into());
        }
        Ok(answer)
    }
}

/// Woken by: any wrong figure in `Throttle::answer`.
#[test]
fn the_door_plays_every_story_of_one_bucket() {
    play_all(TestServer::new());
}

#[test]
fn the_door_plays_every_story_of_one_bucket_on_redis() {
    play_all(TestServer::on_redis());
}

fn play_all(server: TestServer) {
    let mut player = RespPlayer { server, ledger: LedgerPlayer::default(), limit: None, connection: None };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../conformance");
    let mut played = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let file: CaseFile = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        let shared = file.policy.as_ref().map(Lines::text);
        for case in &file.cases {
            let policy = case.policy.as_ref().map(Lines::text).or(shared.clone()).unwrap_or_default();
            let is_plain = |step: &threshold_core::case::Step| {
                step.call.iter().all(|(verb, args)| {
                    let fields = args.as_object();
                    ["check", "peek"].contains(&verb.as_str())
                        && fields.is_some_and(|fields| fields.keys().all(|name| name == "ip" || name == "cost"))
                        && args["ip"].as_str().is_some_and(|ip| !ip.contains(':'))
                })
            };
            let is_refused =
                |step: &threshold_core::case::Step| format!("{:?}", step.expect).contains("cost_exceeds_limit");
            if case.env.is_empty()
                && only_bucket(&policy).is_some()
                && case.steps.iter().all(|step| is_plain(step) && !is_refused(step))
            {
                played += 1;
                let outcome = play(case, shared.as_deref(), &mut player);
                assert!(outcome.is_ok(), "{}: {}", path.display(), outcome.unwrap_err());
            }
        }
    }
    assert!(played >= 9, "only {played} were played");
}
