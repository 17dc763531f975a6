//! Tests the rotation of the secret: what was stored and signed under the old one stays valid.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use serde_json::{Value, json};

use super::process::{Scratch, Server, Start};
use super::redis::Redis;

const POLICY: &str = r#"
[login]
ip = "3/5min"
locks = { 3 = "1h" }

[ladders.l]
rungs = ["deny", "deny", "ban 24h"]

[[rule]]
name = "posts"
per = ["user"]
limit = "2/day"
ladder = "l"
strike = "request"
on_missing = "skip"
"#;
const OLD: &str = "the old secret of this installation";
const NEW: &str = "the new secret of this installation";

struct Installation {
    folder: Scratch,
    policy: Scratch,
}

impl Installation {
    fn new() -> Self {
        Self { folder: Scratch::folder(), policy: Scratch::file("policy.toml", POLICY) }
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.folder.path().join(name)
    }

    fn start(&self, variables: &[(&str, &str)]) -> Server {
        let db = self.path("threshold.db");
        let args = ["--db", db.to_str().unwrap()];
        Start { policy: Some(self.policy.path()), args: &args, variables, ..Start::default() }.server()
    }

    fn refusal(&self, args: &[&str], variables: &[(&str, &str)]) -> String {
        let start = Start { policy: Some(self.policy.path()), args, variables, ..Start::default() };
        let output = start.command().output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    }
}

fn post(server: &Server, path: &str, body: &Value) -> (u16, Value) {
    let answer = server.connect().post(path, &body.to_string()).unwrap();
    (answer.status, answer.json())
}

fn check(server: &Server, user: &str) -> Value {
    post(server, "/v1/check", &json!({"user": user})).1
}

/// Attempts a login from this address. Returns whether it is allowed, and its token.
fn attempt(server: &Server, account: &str, ip: &str, device: Option<&str>) -> Option<String> {
    let (status, told) = post(server, "/v1/login/attempt", &json!({"account": account, "ip": ip, "device": device}));
    (status == 200).then(|| told["attempt"].as_str().unwrap().to_owned())
}

fn result(server: &Server, attempt: &str, success: bool) -> (u16, Value) {
    post(server, "/v1/login/result", &json!({"attempt": attempt, "success": success}))
}

/// Stops a server, and returns its log.
fn stop(server: Server) -> String {
    server.signal("TERM");
    let (status, log) = server.wait();
    assert!(status.success(), "{log}");
    log
}

/// The tokens of clients from before the rotation.
struct Held {
    receipt: Value,
    device: String,
    attempt: String,
}

/// Bans, locks, devices, receipts and counters under the old secret.
fn before(server: &Server) -> Held {
    let ban = json!({"layer": "user", "key": "mallory", "reason": "test"});
    assert_eq!(post(server, "/v1/bans", &ban).0, 200);
    let banned = |user: &str, times: usize| (0..times).fold(false, |_, _| check(server, user)["banned"] == true);
    assert!(banned("eve", 5) && !banned("bob", 4));
    for _ in 0..3 {
        let guess = attempt(server, "victim", "192.0.2.1", None).unwrap();
        assert_eq!(result(server, &guess, false).0, 200);
    }
    assert!(attempt(server, "victim", "192.0.2.2", None).is_none());
    let login = attempt(server, "ada", "192.0.2.3", None).unwrap();
    let device = result(server, &login, true).1["device"].as_str().unwrap().to_owned();
    let receipt = check(server, "carol")["receipt"].clone();
    let reserved = post(server, "/v1/reserve", &json!({"user": "carol", "ttlSec": 3600})).1;
    assert_eq!(reserved["allowed"], true, "{reserved}");
    assert_eq!(check(server, "carol")["allowed"], false);
    Held { receipt, device, attempt: attempt(server, "dan", "192.0.2.4", None).unwrap() }
}

/// After a change of the secret, all bans and locks were once lost, and all devices unknown.
#[test]
fn state_and_tokens_of_the_old_secret_stay_valid() {
    let place = Installation::new();
    let server = place.start(&[("THRESHOLD_SECRET", OLD)]);
    let held = before(&server);
    stop(server);
    // With only the new secret the server does not start, and the file is unchanged.
    let db = place.path("threshold.db");
    let args = ["--db", db.to_str().unwrap()];
    let said = place.refusal(&args, &[("THRESHOLD_SECRET", NEW)]);
    assert!(said.contains("THRESHOLD_SECRET_OLD"), "{said}");

    let server = place.start(&[("THRESHOLD_SECRET", NEW), ("THRESHOLD_SECRET_OLD", OLD)]);
    for user in ["mallory", "eve"] {
        assert_eq!(check(&server, user)["banned"], true, "{user}");
    }
    assert_eq!(check(&server, "bob")["banned"], true, "the strike and the budget before the rotation count");
    assert!(attempt(&server, "victim", "192.0.2.5", None).is_none());
    // Carol's charges are kept, also that of her reservation, until her receipt is refunded.
    assert_eq!(check(&server, "carol")["allowed"], false);
    let refund = json!({"receipt": held.receipt});
    assert_eq!(post(&server, "/v1/refund", &refund).1, json!({"ok": true, "first": true}));
    assert_eq!(result(&server, &held.attempt, true).0, 200);
    // A known device is allowed at an address that has used up its attempts.
    for name in ["a", "b", "c"] {
        assert!(attempt(&server, name, "192.0.2.6", None).is_some());
    }
    assert!(attempt(&server, "ada", "192.0.2.6", None).is_none());
    let login = attempt(&server, "ada", "192.0.2.6", Some(&held.device)).unwrap();
    let device = result(&server, &login, true).1["device"].as_str().unwrap().to_owned();
    assert!(stop(server).contains("journal rows moved to the present secret"));

    let server = place.start(&[("THRESHOLD_SECRET", NEW)]);
    for user in ["mallory", "eve", "bob"] {
        assert_eq!(check(&server, user)["banned"], true, "{user}");
    }
    assert!(attempt(&server, "victim", "192.0.2.7", None).is_none());
    // Tokens that were signed under the old secret are refused.
    assert_eq!(post(&server, "/v1/refund", &refund).0, 400);
    assert_eq!(result(&server, &held.attempt, true).0, 400);
    for name in ["a", "b", "c"] {
        let _ = attempt(&server, name, "192.0.2.6", None);
    }
    assert!(attempt(&server, "ada", "192.0.2.6", Some(&held.device)).is_none());
    assert!(attempt(&server, "ada", "192.0.2.6", Some(&device)).is_some());
    // There was no attempt on dan's account since.
    let log = stop(server);
    assert!(log.contains("under an unknown secret deleted") && log.contains("forgotten=1"), "{log}");
}

#[test]
fn secrets_in_files_are_rotated_by_a_second_file() {
    let place = Installation::new();
    let server = place.start(&[]);
    let ban = json!({"layer": "user", "key": "mallory", "reason": "test"});
    assert_eq!(post(&server, "/v1/bans", &ban).0, 200);
    stop(server);
    let (secret, old) = (place.path("threshold.secret"), place.path("threshold.secret.old"));
    std::fs::rename(&secret, &old).unwrap();
    let db = place.path("threshold.db");
    let args = ["--db", db.to_str().unwrap()];
    let said = place.refusal(&args, &[]);
    assert!(said.contains(old.to_str().unwrap()) && said.contains("openssl rand -hex 32"), "{said}");
    write(&secret, &format!("{}\n", "5a".repeat(32)), 0o600);
    std::fs::set_permissions(&old, std::fs::Permissions::from_mode(0o640)).unwrap();
    let said = place.refusal(&args, &[]);
    assert!(said.contains(&format!("chmod 600 {}", old.display())), "{said}");
    std::fs::set_permissions(&old, std::fs::Permissions::from_mode(0o600)).unwrap();
    let server = place.start(&[]);
    assert_eq!(check(&server, "mallory")["banned"], true);
    stop(server);
    std::fs::remove_file(&old).unwrap();
    assert_eq!(check(&place.start(&[]), "mallory")["banned"], true);
}

/// During a rotation `subject` said that nothing stops a paused user, whose requests were denied, and `/v1/usage` showed used-up budgets as
/// unused, until a request had moved their records.
#[test]
fn what_has_not_moved_yet_is_shown() {
    let redis = Redis::start();
    let policy = Scratch::file("policy.toml", POLICY);
    let url = redis.url();
    let start = |variables: &[(&str, &str)]| {
        let args = ["--store", &*url];
        Start { policy: Some(policy.path()), args: &args, variables, ..Start::default() }.server()
    };
    let old = start(&[("THRESHOLD_SECRET", OLD)]);
    let pause = json!({"layer": "user", "key": "ada", "seconds": 600});
    assert_eq!(post(&old, "/v1/pause", &pause).0, 200);
    for _ in 0..2 {
        assert_eq!(check(&old, "bob")["allowed"], true);
    }
    let get = |server: &Server, path: &str| server.connect().send("GET", path, &[], "").unwrap().json();
    let guess = attempt(&old, "cem", "192.0.2.9", None).unwrap();
    assert_eq!(result(&old, &guess, false).0, 200);
    let looks = |server: &Server| {
        let (ada, bob, address) = (
            get(server, "/v1/subjects/user/ada"),
            get(server, "/v1/subjects/user/bob"),
            get(server, "/v1/subjects/edge/192.0.2.9"),
        );
        let left = get(server, "/v1/usage?user=bob")["limits"][0]["remaining"].clone();
        [ada["pausedUntil"].clone(), bob["budgets"][0]["used"].clone(), address["budgets"][0]["used"].clone(), left]
    };
    let before = looks(&old);
    assert!(before[0].is_u64(), "{before:?}");
    assert_eq!(before[1..], [json!(2), json!(1), json!(0)]);
    stop(old);
    let both = start(&[("THRESHOLD_SECRET", NEW), ("THRESHOLD_SECRET_OLD", OLD)]);
    assert_eq!(looks(&both), before);
    assert_eq!(
        (check(&both, "ada")["allowed"].clone(), check(&both, "bob")["allowed"].clone()),
        (json!(false), json!(false))
    );
    assert_eq!(looks(&both)[1..], before[1..], "and after they have moved");
}

#[test]
fn mistaken_secrets_are_refused() {
    let place = Installation::new();
    let db = place.path("threshold.db");
    let with_journal = ["--db", db.to_str().unwrap()];
    // Without a path the server is started with `--no-db`.
    for args in [&with_journal[..], &[]] {
        for (present, old, expect) in [
            (Some(NEW), Some(NEW), "the same key id"),
            (None, Some(OLD), "THRESHOLD_SECRET_OLD"),
            (Some(NEW), Some(""), "THRESHOLD_SECRET_OLD is set but empty"),
            (Some(""), None, "THRESHOLD_SECRET is set but empty"),
            (Some(NEW), Some("short"), "THRESHOLD_SECRET_OLD has fewer than 16 characters"),
        ] {
            let mut variables = Vec::new();
            variables.extend(present.map(|text| ("THRESHOLD_SECRET", text)));
            variables.extend(old.map(|text| ("THRESHOLD_SECRET_OLD", text)));
            let said = place.refusal(args, &variables);
            assert!(said.contains(expect) && !said.contains(NEW) && !said.contains(OLD), "{said}");
        }
    }
    assert!(!db.exists());
}

fn write(path: &Path, text: &str, mode: u32) {
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}
