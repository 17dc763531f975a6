//! Tests that an operator finds out why a subject is stopped, and what lifts it.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use super::process::{Scratch, Server, Start};

const POLICY: &str = r#"
[lists]
deny = ["233.252.0.0/24"]

[login]

[ladders.house]
rungs = ["warn", "cooldown 5min", "ban 24h"]

[[rule]]
name = "posts"
match = { method = "POST", path = "/posts/{id}" }
per = ["user"]
limit = "2/h"
algorithm = "fixed-window"
ladder = "house"
strike = "request"
on_missing = "skip"

[[rule]]
name = "address"
per = ["ip"]
limit = "3/h"
algorithm = "sliding-log"
on_missing = "skip"
"#;

fn start(folder: &Path, args: &[&str]) -> Server {
    let policy = folder.join("policy.toml");
    std::fs::write(&policy, POLICY).unwrap();
    let db = folder.join("threshold.db");
    let args: Vec<&str> = args.iter().copied().chain(["--db", db.to_str().unwrap()]).collect();
    Start { policy: Some(&policy), args: &args, ..Start::default() }.server()
}

fn threshold(server: &Server, args: &[&str]) -> Result<String, String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_threshold"));
    let output = command.args(args).env_clear().env("THRESHOLD_SERVER", &server.place).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
}

fn check(server: &Server, facts: &Value) -> Value {
    server.connect().post("/v1/check", &facts.to_string()).unwrap().json()
}

/// Runs the command that the output of `subject` suggests after "to lift:".
fn lift(server: &Server, said: &str) {
    let command = said.lines().find_map(|line| line.trim().strip_prefix("to lift: threshold ")).unwrap();
    let words: Vec<&str> = command.split(" (").next().unwrap().split(' ').collect();
    threshold(server, &words).unwrap();
}

/// A customer called: "we get 429". `subject` showed five fields, none of them the ban on the /16 around the address.
#[test]
fn a_subject_is_shown_with_the_bans_that_cover_it_and_what_lifts_them() {
    let folder = Scratch::folder();
    let server = start(folder.path(), &[]);
    let run = |args: &[&str]| threshold(&server, args).unwrap();
    run(&["bans", "add", "ip", "203.0.0.0/16", "--reason", "scrapers", "--for", "24h"]);
    let facts = json!({"ip": "203.0.113.7"});
    assert_eq!(check(&server, &facts)["banned"], true);
    let said = run(&["subject", "ip", "203.0.113.7"]);
    for part in ["Stopped by:", "on edge 203.0.0.0/16: scrapers (by local since 20", "until 20", "digest #"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    lift(&server, &said);
    assert_eq!(check(&server, &facts)["allowed"], true);
    let said = run(&["subject", "ip", "203.0.113.7"]);
    assert!(said.contains("Nothing stops it now.") && said.contains(" 1 / 3 (3/h), frees at 20"), "{said}");
    check(&server, &facts);
    check(&server, &facts);
    let said = run(&["subject", "edge", "203.0.113.7"]);
    assert!(said.contains("the budget of the rule address: 3 / 3 (3/h), frees at 20"), "{said}");
    lift(&server, &said);
    assert_eq!(check(&server, &facts)["remaining"], 2);
    let said = run(&["subject", "edge", "233.252.0.9"]);
    assert!(said.contains("the policy's deny list: 233.252.0.0/24"), "{said}");
}

/// An operator who looks for what stops a customer must not be sent to a rule that only observes.
///
/// Woken by leaving `mode` out of the budgets, and by ignoring it.
#[test]
fn a_rule_that_observes_stops_nobody() {
    let (server, _file) = Server::with("[[rule]]\nname = 'tried'\nper = ['user']\nlimit = '1/h'\nmode = 'observe'");
    for _ in 0..2 {
        assert_eq!(check(&server, &json!({"user": "eve"}))["allowed"], true);
    }
    let said = threshold(&server, &["subject", "user", "eve"]).unwrap();
    assert!(said.contains("Nothing stops it now.") && said.contains("; observes, and stops nobody\n"), "{said}");
}

/// An address was "stopped by" a rule that denies another one, and by 0 of 0 of a rule that denies.
///
/// Woken by: budgets of rules that match facts which the subject does not name, and the text of other budgets for a rule that denies.
#[test]
fn a_rule_that_denies_stops_those_that_it_matches() {
    let rule = |name: &str, more: &str| format!("[[rule]]\nname = '{name}'\nlayer = 'edge'\ndeny = true\n{more}\n");
    let of_fact = rule("of-fact", "match = { fact = { remote_address = '50.0.0.5' } }\nper = ['fact:domain']");
    let others = "[[rule]]\nname = 'address'\nper = ['ip']\nlimit = '9/h'\n";
    let (server, _file) = Server::with(&format!("{of_fact}{others}"));
    let said = threshold(&server, &["subject", "ip", "192.0.2.9"]).unwrap();
    assert!(said.contains("Nothing stops it now.") && !said.contains("of-fact"), "{said}");
    let usage = server.connect().send("GET", "/v1/usage?ip=192.0.2.9", &[], "").unwrap().json();
    assert_eq!(usage["limits"].as_array().unwrap().len(), 1, "{usage}");
    let (server, _file) = Server::with(&format!("{}{others}", rule("closed", "per = ['ip']")));
    let said = threshold(&server, &["subject", "ip", "192.0.2.9"]).unwrap();
    let reason = "Stopped by:\n  the rule closed: denies all (none)\n      to lift: change the policy";
    assert!(said.contains(reason) && !said.contains("0 / 0"), "{said}");
}

/// A rule denied every request of a tenant without a tier. `subject` showed 0 of 7, the limit of a tier that differs in case, and that
/// nothing stops it; `/v1/usage` had no limits, as if it were unlimited; `explain --server` said 0 of 0 and `why` pointed there.
#[test]
fn a_tenant_without_a_tier_is_shown_as_denied_everywhere() {
    let tiers = "[tiers.free]\nrequests = '3/min'\nwrites = '1/min'\n[tiers.pro]\nrequests = '5/min'\n[tiers.Pro]\nrequests = '7/min'\n";
    let rule = "[[rule]]\nname = 'plan'\nper = ['tenant']\nlimit = 'tier'\n";
    let (server, _file) = Server::with(&format!("{tiers}{rule}"));
    let denied = "no tier of the policy is given, and the rule denies such requests";
    let decision = check(&server, &json!({"tenant": "t9", "tier": "PRO"}));
    assert_eq!(decision["allowed"], false);
    let subject = || threshold(&server, &["subject", "tenant", "t9"]).unwrap();
    let said = subject();
    let reason = format!("Stopped by:\n  the rule plan: {denied}\n      to lift: give it a tier");
    assert!(said.contains(&reason) && !said.contains("7/min"), "{said}");
    let usage = server.connect().send("GET", "/v1/usage?tenant=t9", &[], "").unwrap().json();
    let limit = &usage["limits"][0];
    let fields = [&limit["rule"], &limit["limit"], &limit["remaining"], &limit["why"]];
    assert_eq!(fields, [json!("plan"), json!(0), json!(0), json!(denied)].each_ref(), "{usage}");
    let said = threshold(&server, &["explain", "--server", &server.place, "--tenant", "t9", "--tier", "PRO"]).unwrap();
    assert!(said.contains(&format!("0 of 0 left  tenant=t9,category=requests, binds: {denied}\n")), "{said}");
    let said = threshold(&server, &["why", decision["traceId"].as_str().unwrap()]).unwrap();
    assert!(said.contains("compared exactly") && said.contains("threshold explain --server"), "{said}");
    // A request that names a tier uses its budget. Then the tenant is not stopped, although other requests of it would be.
    assert_eq!(check(&server, &json!({"tenant": "t9", "tier": "free"}))["allowed"], true);
    let said = subject();
    let used = format!("plan  {denied}; 1 used by requests that named a tier");
    assert!(said.contains("Nothing stops it now.") && said.contains(&used), "{said}");
    let said = threshold(&server, &["explain", "--server", &server.place, "--tenant", "t9", "--tier", "free"]).unwrap();
    assert!(said.contains("2 of 3 left  tenant=t9,category=requests, binds\n"), "{said}");
}

#[test]
fn a_subjects_strikes_and_its_next_rung_are_shown() {
    let folder = Scratch::folder();
    let server = start(folder.path(), &[]);
    let run = |args: &[&str]| threshold(&server, args).unwrap();
    let eve = json!({"user": "eve", "method": "POST", "path": "/posts/7"});
    for _ in 0..3 {
        check(&server, &eve);
    }
    let said = run(&["subject", "user", "eve"]);
    assert!(
        said.contains("house: 1 strikes, forgotten at 20") && said.contains("the next one: cooldown 5 min"),
        "{said}"
    );
    check(&server, &eve);
    let said = run(&["subject", "user", "eve"]);
    assert!(said.contains("a cool-down of the ladder house (until 20"), "{said}");
    assert!(said.contains("the next one: ban 1 day") && said.contains("posts  2 / 2 (2/h)"), "{said}");
    lift(&server, &said);
    for _ in 0..4 {
        check(&server, &eve);
    }
    let json: Value = serde_json::from_str(&run(&["subject", "user", "eve", "--json"])).unwrap();
    assert_eq!((&json["ladders"][0]["strikes"], &json["ladders"][0]["penalty"]), (&json!(2), &json!("cooldown")));
    assert_eq!((&json["budgets"][0]["rule"], &json["budgets"][0]["used"]), (&json!("posts"), &json!(2)));
}

/// `explain` knew a policy file only, and `/v1/explain` said that something bans, and not which ban.
#[test]
fn a_running_server_explains_a_denial_with_the_bans_reason_and_id() {
    let folder = Scratch::folder();
    let server = start(folder.path(), &[]);
    let run = |args: &[&str]| threshold(&server, args).unwrap();
    let set = run(&["bans", "add", "edge", "203.0.113.0/24", "--reason", "scrapers", "--json"]);
    let set: Value = serde_json::from_str(&set).unwrap();
    let facts = json!({"ip": "203.0.113.7", "method": "POST", "path": "/posts/7", "user": "eve"}).to_string();
    let explained = server.connect().post("/v1/explain", &facts).unwrap().json();
    let [penalty] = explained["penalties"].as_array().unwrap().as_slice() else { panic!("{explained}") };
    let named =
        [&penalty["reason"], &penalty["id"], &penalty["by"], &penalty["key"], &penalty["layer"], &penalty["until"]];
    let expected =
        [&json!("scrapers"), &set["id"], &json!("local"), &json!("203.0.113.0/24"), &json!("edge"), &Value::Null];
    assert_eq!(named, expected);
    let args = ["explain", "--server", &server.place, "--ip", "203.0.113.7", "--method", "POST", "--path", "/posts/7"];
    let said = threshold(&server, &[&args[..], &["--user", "eve"]].concat()).unwrap();
    let id = set["id"].as_str().unwrap();
    assert!(said.contains(&format!("ban on edge 203.0.113.0/24: scrapers (for good, ban {id})")), "{said}");
    assert!(
        said.contains("posts") && said.contains("limit 2  user=eve") && said.contains("Such a request now: ban"),
        "{said}"
    );
    run(&["bans", "lift", &id[..8]]);
    for _ in 0..5 {
        check(&server, &json!({"user": "eve", "method": "POST", "path": "/posts/7"}));
    }
    let explained = server.connect().post("/v1/explain", &facts).unwrap().json();
    let [penalty] = explained["penalties"].as_array().unwrap().as_slice() else { panic!("{explained}") };
    assert_eq!((&penalty["layer"], &penalty["verdict"]), (&json!("user"), &json!("deny")));
    assert_eq!(penalty["reason"], "strike 2 on the ladder house");
    // Nothing was charged by either.
    let said = threshold(&server, &[&args[..], &["--user", "bob"]].concat()).unwrap();
    assert!(said.contains("3 of 3 left") && said.contains("2 of 2 left") && said.contains("now: allow"), "{said}");
    // A policy file and a server exclude each other.
    assert!(threshold(&server, &["explain", "x.toml", "--server", &server.place]).is_err());
}

/// A line of the log said that someone was denied: not where, and nothing led from the line to the subject.
#[test]
fn a_denial_in_the_log_leads_to_its_subject() {
    let folder = Scratch::folder();
    let server = start(folder.path(), &["--log", "json"]);
    let mallory = json!({"user": "mallory", "method": "post", "path": "/posts/secret-7"});
    for _ in 0..4 {
        check(&server, &mallory);
    }
    let said = threshold(&server, &["subject", "user", "mallory"]).unwrap();
    let digest =
        said.lines().find_map(|line| line.strip_prefix("digest ")).unwrap().split(' ').next().unwrap().to_owned();
    let line: Value = serde_json::from_str(&server.wait_for_log("\"denied\"")).unwrap();
    let fields = [&line["method"], &line["path"], &line["rule"], &line["layer"], &line["digest"], &line["user"]];
    let expected = ["POST", "/posts/{id}", "posts", "user", digest.as_str(), digest.as_str()];
    assert_eq!(fields, expected.map(|text| json!(text)).each_ref(), "{line}");
    assert!(!line.to_string().contains("secret-7") && !line.to_string().contains("mallory"), "{line}");
}

/// A burst of a few hundred denials had ten lines, and the rest was reported by the next denial, which came the day after.
#[test]
fn what_a_burst_left_out_of_the_log_is_reported_when_it_is_over() {
    let folder = Scratch::folder();
    let server = start(folder.path(), &["--log", "json"]);
    let mut client = server.connect();
    for _ in 0..203 {
        client.post("/v1/check", &json!({"ip": "203.0.113.7"}).to_string()).unwrap();
    }
    let mut reported = 0;
    let mut lines = 0;
    // Without another request. A burst that lasts longer than a second has a line for each second.
    while lines + reported < 200 {
        let line = server.wait_for_log("left_out");
        let line: Value = serde_json::from_str(&line).unwrap();
        reported += line["left_out"].as_u64().unwrap();
        lines += u64::from(line["message"] == "denied");
    }
    assert_eq!(lines + reported, 200);
    assert!(reported > 0, "every denial has a line");
}

/// An operator was asked who had lifted a ban. The answer was an SQL query, and an account that was locked could not be found at all.
#[test]
fn changes_and_locks_are_listed_and_bans_are_lifted_by_a_prefix_or_a_key() {
    let folder = Scratch::folder();
    let server = start(folder.path(), &[]);
    let run = |args: &[&str]| threshold(&server, args);
    let add = |key: &str| {
        let set = run(&["bans", "add", "ip", key, "--reason", "scrapers", "--json"]).unwrap();
        serde_json::from_str::<Value>(&set).unwrap()["id"].as_str().unwrap().to_owned()
    };
    let id = add("203.0.113.7");
    assert!(run(&["bans", "lift", &id[..3]]).unwrap_err().contains("32 hexadecimal digits"));
    run(&["bans", "lift", &id[..8], "--reason", "a mistake"]).unwrap();
    assert!(run(&["bans", "lift", &id[..8]]).unwrap_err().contains("404"));
    // Among 3,000 ids some begin with the same four digits: the chance that none do is 10^-29.
    let ids: Vec<String> = (0..3_000).map(|number| format!("11.0.{}.{}", number / 250, number % 250)).collect();
    let list = folder.path().join("list.txt");
    std::fs::write(&list, ids.join("\n")).unwrap();
    run(&["bans", "import", list.to_str().unwrap(), "--origin", "x"]).unwrap();
    let listed: Value = serde_json::from_str(&run(&["bans", "list", "--json"]).unwrap()).unwrap();
    let mut prefixes: Vec<String> =
        listed.as_array().unwrap().iter().map(|ban| ban["id"].as_str().unwrap()[..4].to_owned()).collect();
    prefixes.sort();
    let pair = prefixes.windows(2).find(|pair| pair[0] == pair[1]).unwrap();
    let refused = run(&["bans", "lift", &pair[0]]).unwrap_err();
    assert!(refused.contains("409") && refused.matches(&pair[0]).count() >= 2, "{refused}");
    assert!(refused.contains("edge 11.0."), "{refused}");
    run(&["bans", "import", list.to_str().unwrap(), "--origin", "y"]).unwrap();
    assert_eq!(run(&["bans", "lift", "edge", "11.0.0.7"]).unwrap(), "lifted 2 bans\n");
    assert!(run(&["bans", "lift", "edge", "11.0.0.7"]).unwrap_err().contains("404"));
    assert!(run(&["bans", "lift", "planet", "11.0.0.7"]).unwrap_err().contains("unknown layer"));
    for number in 0..3 {
        let body = json!({"account": "ada", "ip": format!("203.0.113.{number}")}).to_string();
        let attempt = server.connect().post("/v1/login/attempt", &body).unwrap().json();
        let body = json!({"attempt": attempt["attempt"], "success": false}).to_string();
        server.connect().post("/v1/login/result", &body).unwrap();
    }
    let subject: Value = serde_json::from_str(&run(&["subject", "account", "ada", "--json"]).unwrap()).unwrap();
    let locks = run(&["locks", "list"]).unwrap();
    assert_eq!(locks.lines().count(), 2, "{locks}");
    assert!(locks.contains(subject["digest"].as_str().unwrap()) && locks.contains("  3 "), "{locks}");
    lift(&server, &run(&["subject", "account", "ada"]).unwrap());
    assert_eq!(run(&["locks", "list"]).unwrap(), "no account is locked\n");
    let audit: Value = serde_json::from_str(&run(&["audit", "--json"]).unwrap()).unwrap();
    let actions: Vec<&str> = audit
        .as_array()
        .unwrap()
        .iter()
        .map(|line| line["action"].as_str().unwrap().split(':').next().unwrap())
        .collect();
    assert_eq!(actions, ["ban", "lift", "import", "import", "lift", "lift", "forgive"]);
    assert_eq!((&audit[1]["why"], &audit[1]["about"]), (&json!("a mistake"), &json!("edge 203.0.113.7")));
    let last = run(&["audit", "--limit", "1"]).unwrap();
    assert!(
        last.lines().count() == 2 && last.contains("account ada") && last.contains("forgive: 3 failures"),
        "{last}"
    );
    // Without a server, the journal is read.
    let place = server.place.clone();
    drop(server);
    let mut command = Command::new(env!("CARGO_BIN_EXE_threshold"));
    let db = folder.path().join("threshold.db");
    let output = command.args(["audit", "--server", &place, "--db"]).arg(db).env_clear().output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.lines().count() == 8, "{text}");
}
