//! Tests what stays in force for Envoy: bans, penalties, what was charged before a reload or a rotation of the secret, and rules without
//! their store.

use serde_json::json;

use super::envoy::{Envoy, codes, costing, descriptor, header, http};
use super::process::Scratch;
use super::proto::{Code, HttpResponse, RateLimitResponse};
use super::redis::{Redis, SECRET};
use super::shared_store::signal;

const POLICY: &str = r#"
[envoy.descriptors]
"x-user" = "user"

[ladders.l]
rungs = ["ban 24h"]

[[rule]]
name = "address"
per = ["ip"]
limit = "5/day"

[[rule]]
name = "user"
per = ["user"]
limit = "2/day"
algorithm = "sliding-log"
on_missing = "skip"
ladder = "l"
strike = "request"
"#;

fn is_banned(answer: &RateLimitResponse) -> bool {
    let banned = header(answer, "x-ratelimit-banned") == Some("true");
    assert_eq!(answer.overall_code() == Code::OverLimit, banned, "{answer:?}");
    banned
}

/// Woken by: deciding descriptors without the bans of operators.
#[test]
fn a_ban_by_an_operator_denies_descriptors_and_authorization_until_it_is_lifted() {
    let mut envoy = Envoy::start(POLICY);
    let mut operator = envoy.server.connect();
    let mut ban = |layer: &str, key: &str| {
        let body = json!({"layer": layer, "key": key, "reason": "scraping"}).to_string();
        operator.post("/v1/bans", &body).unwrap().json()["id"].as_str().unwrap().to_owned()
    };
    let ids = [ban("edge", "192.0.2.1"), ban("user", "u1")];
    let (address, user) = ([("remote_address", "192.0.2.1")], [("x-user", "u1")]);
    let others = || [descriptor(&[("remote_address", "192.0.2.2")]), descriptor(&[("x-user", "u2")])];
    for banned in [descriptor(&address), descriptor(&user), costing(0, &address)] {
        assert!(is_banned(&envoy.ask(vec![banned.clone()])));
        let answer = envoy.ask(others().into_iter().chain([banned]).collect());
        assert!(is_banned(&answer) && answer.statuses.iter().all(|status| status.code() == Code::OverLimit));
    }
    let answer = envoy.check("192.0.2.1", http("/", &[]));
    let Some(HttpResponse::Denied(denied)) = answer.http_response else { panic!("{answer:?}") };
    assert!(denied.status.unwrap().code == 429 && denied.body.contains("\"error\":\"banned\""), "{}", denied.body);
    for id in ids {
        assert_eq!(operator.send("DELETE", &format!("/v1/bans/{id}"), &[], "").unwrap().status, 200);
    }
    // Nothing was charged meanwhile, and nothing was a strike.
    let all = [descriptor(&address), descriptor(&user)].into_iter().chain(others()).collect();
    let left = [(Code::Ok, 4), (Code::Ok, 1), (Code::Ok, 4), (Code::Ok, 1)];
    assert_eq!(codes(&envoy.ask(all)), (Code::Ok, left.to_vec()));
    assert!(matches!(envoy.check("192.0.2.1", http("/", &[])).http_response, Some(HttpResponse::Ok(_))));
}

/// Returns how many answers did not wait until their strikes were on disk.
fn unsaved(envoy: &Envoy) -> String {
    let text = envoy.server.connect().send("GET", "/metrics", &[], "").unwrap().body;
    let line = text.lines().find(|line| line.starts_with("threshold_degraded_total{reason=\"journal\"}"));
    line.unwrap_or_else(|| panic!("{text}")).to_owned()
}

/// Woken by: leaving the strikes of joint decisions out of the journal. Whether they are waited for is a matter of `disk.rs`.
#[test]
fn a_ban_by_a_ladder_survives_kill_9() {
    let folder = Scratch::folder();
    let db = folder.path().join("threshold.db");
    let args = ["--db", db.to_str().unwrap()];
    let mut envoy = Envoy::start_with(POLICY, &args, &[]);
    // A busy disk may take longer than an answer waits for it.
    let mut users = (0..100).map(|user| format!("u{user}"));
    let user = users.find(|user| {
        let before = unsaved(&envoy);
        let asked = [(); 3].map(|()| is_banned(&envoy.ask(vec![descriptor(&[("x-user", user)])])));
        assert_eq!(asked, [false, false, true]);
        unsaved(&envoy) == before
    });
    let user = user.unwrap();
    envoy.server.signal("KILL");
    drop(envoy);
    let mut envoy = Envoy::start_with(POLICY, &args, &[]);
    assert!(is_banned(&envoy.ask(vec![descriptor(&[("x-user", &user)])])));
    assert!(!is_banned(&envoy.ask(vec![descriptor(&[("x-user", "another")])])));
}

/// Woken by: `moves_of_joint` that returns `None`, or that leaves out a descriptor.
#[test]
fn what_was_charged_under_the_old_secret_counts_under_the_new_one() {
    const OLD: &str = "the old secret of this installation";
    const NEW: &str = "the new secret of this installation";
    let folder = Scratch::folder();
    let db = folder.path().join("threshold.db");
    let start = |variables: &[(&str, &str)]| Envoy::start_with(POLICY, &["--db", db.to_str().unwrap()], variables);
    let both = || vec![descriptor(&[("remote_address", "192.0.2.1")]), descriptor(&[("x-user", "u1")])];
    let stop = |envoy: Envoy| {
        let Envoy { server, .. } = envoy;
        server.signal("TERM");
        assert!(server.wait().0.success());
    };
    let mut envoy = start(&[("THRESHOLD_SECRET", OLD)]);
    assert_eq!(codes(&envoy.ask(both())).1, [(Code::Ok, 4), (Code::Ok, 1)]);
    stop(envoy);
    let mut envoy = start(&[("THRESHOLD_SECRET", NEW), ("THRESHOLD_SECRET_OLD", OLD)]);
    assert_eq!(codes(&envoy.ask(both())).1, [(Code::Ok, 3), (Code::Ok, 0)]);
    stop(envoy);
    let mut envoy = start(&[("THRESHOLD_SECRET", NEW)]);
    let answer = envoy.ask(both());
    assert!(is_banned(&answer), "{answer:?}");
}

/// Woken by: taking the policy's `[envoy]` when the server starts, or when a connection begins.
#[test]
fn a_reload_changes_what_descriptors_and_domains_mean() {
    let rule = "[[rule]]\nname = 'user'\nper = ['user']\nlimit = '1/day'\non_missing = 'skip'\n";
    let first = format!("[envoy.descriptors]\nx-user = 'user'\n{rule}");
    let mut envoy = Envoy::start(&first);
    let ask = |envoy: &mut Envoy| {
        let answer = envoy.ask(vec![descriptor(&[("x-user", "u1")])]);
        (answer.overall_code(), answer.statuses[0].current_limit.is_some())
    };
    assert_eq!([ask(&mut envoy), ask(&mut envoy)], [(Code::Ok, true), (Code::OverLimit, true)]);
    for (text, expected) in [
        // It records, and denies nothing.
        (format!("[envoy.domains.edge]\nverb = 'record'\n{first}"), (Code::Ok, true)),
        // No rule is about a descriptor whose only entry is ignored.
        (format!("[envoy.descriptors]\nx-user = 'ignore'\n{rule}"), (Code::Ok, false)),
        (first.clone(), (Code::OverLimit, true)),
    ] {
        envoy.policy.replace(&text);
        envoy.server.signal("HUP");
        envoy.server.wait_for_log("policy reloaded");
        assert_eq!(ask(&mut envoy), expected, "{text}");
    }
}

/// Woken by: an error in place of OVER_LIMIT where a rule is closed, a denial in place of an error of external authorization, and the same
/// answer for all rules.
#[test]
fn without_the_store_each_rule_decides() {
    let rule = |mode: &str| {
        format!(
            "[[rule]]\nname = '{mode}'\nmatch = {{ fact.mode = '{mode}' }}\nper = ['fact:mode']\nlimit = '2/day'\n\
             on_store_error = '{mode}'\n"
        )
    };
    let address = "[[rule]]\nname = 'address'\nper = ['ip']\nlimit = '9/day'\non_store_error = 'closed'\n";
    let policy = format!("{}{address}", ["closed", "open", "local"].map(rule).concat());
    let mut redis = Redis::start();
    let url = redis.url();
    let mut envoy = Envoy::start_with(&policy, &["--store", &url], &[("THRESHOLD_SECRET", SECRET)]);
    envoy.server.wait_for_share();
    redis.child.kill().unwrap();
    redis.child.wait().unwrap();
    envoy.server.wait_for_log("store unavailable");
    let mut ask = |modes: &[&str]| {
        let answer = envoy.ask(modes.iter().map(|mode| descriptor(&[("mode", mode)])).collect());
        assert_eq!(answer.statuses.len(), modes.len());
        assert!(answer.statuses.iter().all(|status| status.code() != Code::Unknown), "{answer:?}");
        (answer.overall_code(), header(&answer, "retry-after").is_some())
    };
    assert_eq!(ask(&["closed"]), (Code::OverLimit, true));
    let [opened, local] = ["open", "local"].map(|mode| [(); 4].map(|()| ask(&[mode]).0));
    assert_eq!(opened, [Code::Ok; 4]);
    // The server counts by itself.
    assert_eq!(local, [Code::Ok, Code::Ok, Code::OverLimit, Code::OverLimit]);
    // In one decision, closed wins.
    assert_eq!(ask(&["open", "closed"]).0, Code::OverLimit);
    let answer = envoy.check("192.0.2.1", http("/", &[]));
    let Some(HttpResponse::Error(error)) = answer.http_response else { panic!("{answer:?}") };
    assert_eq!(error.status.unwrap().code, 503);
}

/// A call over HTTP, which came first, still waits for the store when Envoy has its answer: Envoy gives up after 20 ms.
///
/// Woken by: leaving out `within` in `Desk::decide_jointly`.
#[test]
fn a_store_that_does_not_answer_keeps_no_envoy_waiting() {
    let policy = "[[rule]]\nname = 'address'\nper = ['ip']\nlimit = '9/day'\non_store_error = 'closed'\n";
    let redis = Redis::start();
    let (url, process) = (redis.url(), redis.child.id().to_string());
    let args = ["--store", &url];
    let mut envoy = Envoy::start_with(policy, &args, &[("THRESHOLD_SECRET", SECRET)]);
    let mut waiting = envoy.server.connect();
    let body = r#"{"ip": "192.0.2.1"}"#;
    signal("-STOP", &process);
    let head = "POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json";
    waiting.write(&format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len())).unwrap();
    let answer = envoy.ask(vec![descriptor(&[("remote_address", "192.0.2.1")])]);
    signal("-CONT", &process);
    assert_eq!(answer.overall_code(), Code::OverLimit, "{answer:?}");
    let answer = waiting.read().unwrap().json();
    assert_eq!((&answer["allowed"], &answer["degraded"]), (&json!(true), &json!(false)), "{answer}");
}
