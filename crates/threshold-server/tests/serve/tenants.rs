//! Tests `--tenants`: the limits of tenants' own files apply above the policy, and change with the files.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::process::{Scratch, Server, Start};

const RELOADED: &str = "tenants' limits reloaded";

/// The preset, which has a rule for each of the two fields.
fn preset() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../policies/chat-tenants.toml")
}

fn config(per_minute: u64, burst: Option<u64>) -> String {
    json!({"name": "a tenant", "rateLimit": {"perMinute": per_minute, "burst": burst}}).to_string()
}

fn write(folder: &Scratch, name: &str, text: &str) {
    let path = folder.path().join(name);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
}

fn start(policy: &Path, tenants: &Scratch) -> Server {
    Start { policy: Some(policy), args: &["--tenants", tenants.path().to_str().unwrap()], ..Start::default() }.server()
}

/// Returns the limits of a tenant's user, a minute's and a second's.
fn limits(server: &Server, tenant: &str) -> (Option<u64>, Option<u64>) {
    let body = json!({"tenant": tenant, "user": "u1", "ip": "203.0.113.7"}).to_string();
    let answer = server.connect().post("/v1/peek", &body).unwrap();
    assert_eq!(answer.status, 200, "{}", answer.body);
    let answer = answer.json();
    let of = |rule: &str| {
        let mut limits = answer["limits"].as_array().unwrap().iter();
        limits.find(|limit| limit["rule"] == rule).map(|limit| limit["limit"].as_u64().unwrap())
    };
    (of("per-minute"), of("burst"))
}

fn ready(server: &Server) -> Value {
    server.connect().send("GET", "/readyz", &[], "").unwrap().json()
}

/// The chat service sets `rateLimit` in the file that it keeps for each tenant anyway. Its policy had to repeat every figure.
///
/// Woken by: leaving out `tenants.apply` in `serve`.
#[test]
fn the_limits_of_a_tenants_file_apply_without_a_change_of_policy() {
    let tenants = Scratch::folder();
    write(&tenants, "acme.json", &config(120, Some(5)));
    write(&tenants, "globex/tenant.config.json", &config(30, None));
    write(&tenants, "README.md", "no tenant");
    write(&tenants, ".draft.json", "{");
    let server = start(&preset(), &tenants);
    assert_eq!(limits(&server, "acme"), (Some(120), Some(5)));
    assert_eq!(limits(&server, "globex"), (Some(30), None));
    assert_eq!(limits(&server, "another"), (Some(60), None));
    assert_eq!(ready(&server), json!({"status": "ok"}));
    // A cost that no second has room for is refused at any moment, so that this does not depend on the clock.
    let six = |tenant: &str| {
        let body = json!({"tenant": tenant, "user": "u2", "cost": 6}).to_string();
        server.connect().post("/v1/check", &body).unwrap()
    };
    let refused = six("acme");
    assert_eq!((refused.status, &refused.json()["error"]), (400, &json!("cost_exceeds_limit")));
    assert_eq!(six("globex").json()["remaining"], 24);
}

/// A tenant whose owner mistyped a field must not fall back to its tier, nor hold up the files of others.
///
/// Woken by: returning `None` in place of the `applied` limits in `TenantFile::apply`.
#[test]
fn a_changed_file_is_loaded_a_bad_one_is_reported_and_a_removed_one_takes_its_limits_away() {
    let tenants = Scratch::folder();
    write(&tenants, "acme.json", &config(120, Some(5)));
    let server = start(&preset(), &tenants);
    write(&tenants, "acme.json", &config(90, Some(3)));
    server.wait_for_log(RELOADED);
    assert_eq!(limits(&server, "acme"), (Some(90), Some(3)));

    // A mistyped field, and beside it a new tenant, which is not kept waiting by the mistake of another.
    write(&tenants, "acme.json", "{\n  \"rateLimit\": {\"perMinutes\": 80}\n}");
    write(&tenants, "globex.json", &config(30, None));
    let line = server.wait_for_log("tenant's file not loaded");
    assert!(line.contains("acme.json:2:28: rateLimit.perMinutes: unknown field"), "{line}");
    server.wait_for_log(RELOADED);
    while limits(&server, "globex") != (Some(30), None) {
        server.wait_for_log(RELOADED);
    }
    assert_eq!(limits(&server, "acme"), (Some(90), Some(3)));
    let stands = json!({"status": "degraded", "reason": "1 of the tenants' files cannot be used"});
    assert_eq!(ready(&server), stands);

    // More than any limit.
    write(&tenants, "acme.json", &config(1_000_000_000_000_000, Some(3)));
    let line = server.wait_for_log("tenant's file does not fit the policy");
    assert!(line.contains("acme.json: rateLimit.perMinute: "), "{line}");
    server.wait_for_log(RELOADED);
    assert_eq!((limits(&server, "acme"), ready(&server)), ((Some(90), Some(3)), stands));

    // More than a log of the policy's rule holds is counted by a window, and its burst beside it.
    write(&tenants, "acme.json", &config(2_000, Some(50)));
    server.wait_for_log(RELOADED);
    assert_eq!((limits(&server, "acme"), ready(&server)), ((Some(2_000), Some(50)), json!({"status": "ok"})));

    write(&tenants, "acme.json", &config(70, None));
    server.signal("HUP");
    server.wait_for_log(RELOADED);
    assert_eq!((limits(&server, "acme"), ready(&server)), ((Some(70), None), json!({"status": "ok"})));
    std::fs::remove_file(tenants.path().join("acme.json")).unwrap();
    server.wait_for_log(RELOADED);
    assert_eq!(limits(&server, "acme"), (Some(60), None));
    assert_eq!(limits(&server, "globex"), (Some(30), None));
}

/// A reload of the policy, and an operator's setting, must not lose what the files say.
///
/// Woken by: leaving out `tenants.apply` in `load_policy`.
#[test]
fn a_new_policy_keeps_the_limits_of_files_and_a_setting_stands_above_them() {
    let tenants = Scratch::folder();
    write(&tenants, "acme.json", &config(120, Some(5)));
    let text = std::fs::read_to_string(preset()).unwrap();
    let policy = Scratch::file("policy.toml", &text);
    let server = start(policy.path(), &tenants);
    policy.replace(&text.replace("\"60/min\"", "\"50/min\""));
    server.wait_for_log("policy reloaded");
    assert_eq!((limits(&server, "acme"), limits(&server, "another")), ((Some(120), Some(5)), (Some(50), None)));
    let body = json!({"limits": {"burst": "9/s"}}).to_string();
    let put = server.connect().send("PUT", "/v1/tenants/acme", &[], &body).unwrap();
    assert_eq!(put.status, 200, "{}", put.body);
    assert_eq!(limits(&server, "acme"), (Some(120), Some(9)));
    write(&tenants, "acme.json", &config(110, Some(4)));
    server.wait_for_log(RELOADED);
    assert_eq!(limits(&server, "acme"), (Some(110), Some(9)));
}

/// One tenant's mistake must not keep the server from starting for all others. Only a folder that cannot be read does.
#[test]
fn a_server_starts_with_a_bad_file_and_a_check_finds_it() {
    let tenants = Scratch::folder();
    write(&tenants, "acme.json", "{\"rateLimit\": {\"perMinute\": 0}}");
    write(&tenants, "globex.json", &config(30, None));
    write(&tenants, "globex/tenant.config.json", &config(40, None));
    write(&tenants, "tenant.config.json", &config(50, None));
    let server = start(&preset(), &tenants);
    assert_eq!((limits(&server, "acme"), limits(&server, "globex")), ((Some(60), None), (Some(30), None)));
    assert_eq!(ready(&server)["reason"], "3 of the tenants' files cannot be used");

    let check = |folder: &Path| {
        let args = ["--check", "--tenants", folder.to_str().unwrap()];
        let checked = Start { policy: Some(&preset()), args: &args, ..Start::default() }.command().output().unwrap();
        (checked.status.code(), String::from_utf8(checked.stdout).unwrap())
    };
    let (code, out) = check(tenants.path());
    assert_eq!(code, Some(2), "{out}");
    for said in [
        "acme.json:1:29: rateLimit.perMinute: invalid value: integer `0`, expected a whole number of at least 1",
        "globex.json: ",
        "tenant.config.json: name the file after its tenant",
    ] {
        assert!(out.contains(said), "{said}: {out}");
    }
    let (code, out) = check(&tenants.path().join("nowhere"));
    assert_eq!(code, Some(2), "{out}");
    assert!(out.contains("cannot read the tenants' folder"), "{out}");
}
