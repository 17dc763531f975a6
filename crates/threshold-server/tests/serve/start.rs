//! Tests the start of a server: its banner, what `--check` finds, and what it warns of.

use std::io::Read as _;
use std::process::{Command, Output};

use serde_json::Value;

use super::process::{Scratch, Start};

const TOKENS: [&str; 3] = ["THRESHOLD_TOKEN", "THRESHOLD_ADMIN_TOKEN", "THRESHOLD_READ_TOKEN"];

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// Returns the banner of a server.
fn banner(start: &Start<'_>) -> String {
    let mut child = start.command().spawn().unwrap();
    let mut out = child.stdout.take().unwrap();
    let mut banner = String::new();
    while !banner.contains("tokens ") || !banner.ends_with('\n') {
        let mut byte = [0];
        assert_eq!(out.read(&mut byte).unwrap(), 1, "{banner}");
        banner.push(char::from(byte[0]));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    banner
}

/// The banner said "callers show one" and nothing about operators: whether the operators' token had reached the container was
/// known after the first 401.
#[test]
fn the_banner_names_the_build_and_the_tokens_that_are_set() {
    let told = |variables: &[(&str, &str)]| banner(&Start { variables, ..Start::default() });
    let version = env!("CARGO_PKG_VERSION");
    let none = told(&[]);
    assert!(none.starts_with(&format!("threshold {version} (")), "{none}");
    assert!(none.contains("\n  tokens  none: open to this machine alone\n"), "{none}");
    let secret = "a-secret-token-0123456789";
    let some = told(&[("THRESHOLD_ADMIN_TOKEN", secret), ("THRESHOLD_READ_TOKEN", &format!("{secret}1,{secret}2"))]);
    let expect = "  tokens  callers none, operators 1, read-only 2; callers need none: open to this machine alone\n";
    assert!(some.contains(expect) && !some.contains(secret), "{some}");
    let callers = told(&[("THRESHOLD_TOKEN", secret)]);
    assert!(callers.contains("  tokens  callers 1, operators none, read-only none\n"), "{callers}");
}

/// Fails if a URL is shown with its path, which is a secret at Slack.
#[test]
fn the_banner_says_where_events_and_alerts_go() {
    let told = banner(&Start::default());
    assert!(told.contains("\n  events  memory\n  alerts  log only\n"), "{told}");
    let folder = Scratch::folder();
    let (db, lines) = (folder.path().join("own.db"), folder.path().join("events.jsonl"));
    let policy = folder.path().join("policy.toml");
    let off =
        ["edge_blocks", "tenant_blocks", "user_bans", "ip_blocks"].map(|name| format!("{name} = 'off'\n")).concat();
    std::fs::write(&policy, format!("[[rule]]\nname = 'r'\nper = ['user']\nlimit = '1/h'\n[alerts]\n{off}")).unwrap();
    let sink = format!("jsonl:{}", lines.display());
    let args = ["--allow-private-webhooks", "--db", db.to_str().unwrap(), "--events-to", &sink];
    let variables = [
        ("THRESHOLD_ALERT_URL", "http://127.0.0.1:1/CANARY slack+http://127.0.0.1:2/CANARY"),
        ("THRESHOLD_EVENTS_URL", "http://127.0.0.1:3/CANARY?a=b"),
    ];
    let start = Start { args: &args, variables: &variables, ..Start::default() };
    let told = banner(&start);
    let events = folder.path().join("own.events");
    let expect = format!(
        "\n  events  {}, {sink}, http://127.0.0.1:3\n  alerts  log, webhook-1 http://127.0.0.1:1, slack-1 http://127.0.0.1:2\n",
        events.display()
    );
    assert!(told.contains(&expect) && !told.contains("CANARY"), "{told}");
    let told = banner(&Start { policy: Some(&policy), ..start });
    assert!(told.contains("\n  alerts  off\n"), "{told}");
}

/// `--log json` printed five lines of text first, which no collector of JSON could parse.
#[test]
fn a_json_log_is_the_only_output_and_has_the_facts_of_the_banner() {
    let folder = Scratch::folder();
    let db = folder.path().join("threshold.db");
    let args = ["--log", "json", "--db", db.to_str().unwrap(), "--admin", "127.0.0.1:0"];
    let variables = [("THRESHOLD_ADMIN_TOKEN", "boss-token-012345")];
    let start = Start { args: &args, variables: &variables, ..Start::default() };
    let server = start.server();
    let line: Value = serde_json::from_str(&server.wait_for_log("listening")).unwrap();
    assert_eq!(line["http"], server.place.as_str());
    assert!(line["admin"].as_str().unwrap().starts_with("http://127.0.0.1:"), "{line}");
    assert!(line["build"].as_str().unwrap().starts_with(env!("CARGO_PKG_VERSION")), "{line}");
    assert_eq!((&line["policy"], &line["journal"]), (&"starter (built in)".into(), &db.to_str().unwrap().into()));
    assert!(line["rules"].as_u64().unwrap() > 0 && line["max_keys"].as_u64().unwrap() > 0, "{line}");
    let tokens = ["caller_tokens", "operator_tokens", "read_tokens"].map(|name| line[name].as_u64());
    assert_eq!(tokens, [Some(0), Some(1), Some(0)]);
    drop(server);
    let mut child = start.command().spawn().unwrap();
    let mut out = child.stdout.take().unwrap();
    let mut log = child.stderr.take().unwrap();
    let mut byte = [0];
    // The line is written after the place of a banner.
    let mut logged = Vec::new();
    while !text(&logged).contains("listening") {
        log.read_exact(&mut byte).unwrap();
        logged.extend(byte);
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let mut printed = String::new();
    out.read_to_string(&mut printed).unwrap();
    assert_eq!(printed, "");
}

/// The lines of the banner were between the events, and whatever reads these as JSON stopped at the first one.
#[test]
fn events_on_standard_output_have_it_to_themselves() {
    let start = Start { args: &["--events-to", "stdout"], ..Start::default() };
    let mut child = start.command().spawn().unwrap();
    let (mut out, mut log) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let (mut byte, mut said) = ([0], Vec::new());
    // The banner comes before this line.
    while !text(&said).contains("listening") {
        log.read_exact(&mut byte).unwrap();
        said.extend(byte);
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let mut printed = String::new();
    out.read_to_string(&mut printed).unwrap();
    assert_eq!(printed, "");
    assert!(text(&said).contains("\n  http    http://127.0.0.1:"), "{}", text(&said));
}

/// A secret that an orchestrator could not fill in is a blank variable. The server must not take it for "no token".
#[test]
fn a_blank_token_is_an_error_that_names_the_variable() {
    for name in TOKENS {
        for blank in ["", " ", "\n", ",, "] {
            let output = Start { variables: &[(name, blank)], ..Start::default() }.command().output().unwrap();
            let error = text(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{error}");
            assert!(error.contains(&format!("{name} is set but has no token")), "{error}");
        }
    }
    for name in ["THRESHOLD_ADMIN_TOKEN", "THRESHOLD_READ_TOKEN"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_threshold"));
        let output = command.args(["bans", "list"]).env_clear().env(name, " ").output().unwrap();
        let error = text(&output.stderr);
        assert!(error.contains(&format!("{name} is set but has no token")), "{error}");
    }
}

fn check(policy: Option<&str>, args: &[&str], variables: &[(&str, &str)]) -> (Option<i32>, String) {
    let file = policy.map(|policy| Scratch::file("policy.toml", policy));
    let args = [&["--check"], args].concat();
    let start = Start { policy: file.as_ref().map(Scratch::path), args: &args, variables, before: &[] };
    let Output { status, stdout, stderr } = start.command().output().unwrap();
    (status.code(), format!("{}{}", text(&stdout), text(&stderr)))
}

const RULE: &str = "[[rule]]\nname = 'r'\nper = ['ip']\nlimit = '${MAX:-5}/min'\n";

/// A deployment had to start a server to find out whether its policy, its tokens and its addresses were good, and lint knew of
/// the policy only.
#[test]
fn a_check_starts_nothing_and_exits_as_lint_does() {
    assert_eq!(check(None, &[], &[]), (Some(0), "starter (built in): no errors, no warnings\n".to_owned()));
    let (code, said) = check(Some(RULE), &[], &[]);
    assert!(code == Some(0) && said.contains("no errors, no warnings"), "{said}");
    let zero = [("MAX", "0")];
    let (code, said) = check(Some(RULE), &[], &zero);
    assert!(code == Some(0) && said.contains("warning[zero-limit]"), "{said}");
    assert_eq!(check(Some(RULE), &["--deny", "warnings"], &zero).0, Some(1));
    let (code, said) = check(Some(&RULE.replace("/min", " per fortnight")), &["--deny", "warnings"], &[]);
    assert!(code == Some(2) && said.contains("error[bad-limit]"), "{said}");
    let (code, said) = check(Some(""), &[], &[]);
    assert!(code == Some(2) && said.contains("--allow-empty"), "{said}");
    assert_eq!(check(Some(""), &["--allow-empty"], &[]).0, Some(0));
    // Every problem is reported in one run.
    let variables = [("THRESHOLD_SECRET", "short"), ("THRESHOLD_ADMIN_TOKEN", "")];
    let args = ["--tls-cert", "/no/such/cert.pem", "--tls-key", "/no/such/key.pem"];
    let (code, said) = check(Some(RULE), &args, &variables);
    assert_eq!(code, Some(2), "{said}");
    for part in ["THRESHOLD_ADMIN_TOKEN is set but", "/no/such/cert.pem", "THRESHOLD_SECRET has fewer than 16"] {
        assert!(said.contains(part), "{part} is missing: {said}");
    }
    for args in [["--http", "0.0.0.0:0"], ["--http", "no-such-host.invalid:80"], ["--http", "unix:/no/such/folder/s"]] {
        let (code, said) = check(Some(RULE), &args, &[]);
        assert!(code == Some(2) && said.contains("error: "), "{args:?}: {said}");
    }
    for wrong in ["127.0.0.1:x", "127.0.0.1:+80", "127.0.0.1:65536", "127.0.0.1:", ":80"] {
        assert_eq!(check(Some(RULE), &["--http", wrong], &[]).0, Some(2), "{wrong}");
    }
    let (_, said) = check(Some(RULE), &["--http", "127.0.0.1:65536"], &[]);
    assert!(said.contains("the port must be from 1 to 65535"), "{said}");
    let (code, said) = check(Some(RULE), &[], &[("THRESHOLD_LOG", "loud")]);
    assert!(code == Some(2) && said.contains("error: THRESHOLD_LOG: \"loud\" is not a level"), "{said}");
}

/// A check beside a running server neither disturbs it nor is disturbed by it, and leaves a new folder empty.
#[test]
fn a_check_leaves_files_and_servers_alone() {
    let folder = Scratch::folder();
    let db = folder.path().join("threshold.db");
    let args = ["--db", db.to_str().unwrap()];
    let files = || std::fs::read_dir(folder.path()).unwrap().count();
    assert_eq!((check(None, &args, &[]).0, files()), (Some(0), 0));
    let server = Start { args: &args, ..Start::default() }.server();
    let before = files();
    let place = server.place.strip_prefix("http://").unwrap();
    let (code, said) = check(None, &["--db", db.to_str().unwrap(), "--http", place], &[]);
    assert_eq!((code, files()), (Some(0), before), "{said}");
    server.signal("TERM");
    assert!(server.wait().0.success());
    std::fs::remove_file(&db).unwrap();
    let (code, said) = check(None, &args, &[]);
    assert!(code == Some(2) && said.contains("is missing or empty"), "{said}");
    assert_eq!(check(None, &[args[0], args[1], "--new-journal"], &[]).0, Some(0));
    let missing = folder.path().join("no/such/threshold.db");
    // The file of events, or the secret, would be the journal itself.
    for name in ["threshold.events", "threshold.secret", "threshold.counters"] {
        let (code, said) = check(None, &["--db", name], &[]);
        assert!(code == Some(2) && said.contains("name the journal otherwise"), "{name}: {said}");
    }
    let (code, said) = check(None, &["--db", missing.to_str().unwrap()], &[]);
    assert!(code == Some(2) && said.contains("no/such of ") && said.contains("does not exist"), "{said}");
}

/// `lint` ran in CI, where MAX was unset; the server ran with `MAX=0`, and limited nothing without a word.
#[test]
fn a_limit_that_a_variable_sets_to_zero_is_logged() {
    let policy = Scratch::file("policy.toml", RULE);
    let start = |variables| Start { policy: Some(policy.path()), variables, ..Start::default() }.server();
    let server = start(&[("MAX", "0")]);
    let line = server.wait_for_log("limit of 0 means unlimited");
    assert!(line.contains("WARN") && line.contains("${MAX:-5}/min") && line.contains("line=4"), "{line}");
    policy.replace(&format!("{RULE}\n"));
    server.signal("HUP");
    server.wait_for_log("limit of 0 means unlimited");
    let quiet = start(&[("MAX", "7")]);
    quiet.signal("TERM");
    let (_, log) = quiet.wait();
    assert!(!log.contains("limit of 0"), "{log}");
}
