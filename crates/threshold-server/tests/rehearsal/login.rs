//! Tests `threshold replay --login`.

use crate::running::{Scratch, threshold, threshold_with};

const POLICY: &str =
    "[login]\naccount = \"50/15min\"\nip = \"20/5min\"\nlocks = { 3 = \"1min\", 5 = \"5min\", 10 = \"1h\" }\n";

fn sshd(second: u64, outcome: &str, account: &str, ip: &str) -> String {
    let (minute, second) = (second / 60, second % 60);
    format!(
        "2026-05-17T10:{minute:02}:{second:02}Z host sshd[7]: {outcome} password for {account} from {ip} port 22 ssh2\n"
    )
}

/// Computed by hand. Ten attempts, ten seconds apart, each from another address: the third failure locks for a minute, until
/// second 80, and the attempts at 30 to 70 are refused. The one at 80 fails and locks again, so the one at 90 is refused.
#[test]
fn locks_refuse_the_attempts_that_they_would_have() {
    let policy = Scratch::new("login.toml", POLICY);
    let mut log: String = (0..10).map(|n| sshd(n * 10, "Failed", "root", &format!("192.0.2.{n}"))).collect();
    log.push_str("2026-05-17T10:01:31Z host CRON[1]: session opened\n");
    log.push_str("what is this\n");
    let answer = threshold_with(&["replay", policy.path(), "-", "--login", "--json"], log.as_bytes()).json();
    let figure = |name: &str| answer[name].as_u64().unwrap();
    assert_eq!((figure("lines"), figure("others"), figure("unreadable")), (12, 1, 1));
    assert_eq!((figure("attempts"), figure("reachedSecret"), figure("heldByLock")), (10, 4, 6));
    assert_eq!((figure("accounts"), figure("accountsLocked"), figure("heldByAddress")), (1, 1, 0));
    assert_eq!(
        (&answer["worstAccounts"][0]["name"], &answer["worstAccounts"][0]["locks"]),
        (&"root".into(), &2.into())
    );
    assert_eq!(answer["worstAccounts"][0]["first"], "2026-05-17T10:00:20Z");
}

/// One address, another account each time: after the budget of twenty in five minutes, ten are refused. One of them knew the
/// secret.
#[test]
fn an_address_that_sprays_passwords_is_refused_with_all_that_share_it() {
    let policy = Scratch::new("spray.toml", POLICY);
    let mut log: String = (0..29).map(|n| sshd(n, "Failed", &format!("invalid user u{n}"), "192.0.2.1")).collect();
    log.push_str(&sshd(29, "Accepted", "ada", "192.0.2.1"));
    let answer = threshold_with(&["replay", policy.path(), "-", "--login", "--json"], log.as_bytes()).json();
    assert_eq!((&answer["heldByAddress"], &answer["heldSuccesses"]), (&10.into(), &1.into()));
    assert_eq!((&answer["addressesHeld"], &answer["accounts"]), (&1.into(), &30.into()));
    let text = threshold_with(&["replay", policy.path(), "-", "--login"], log.as_bytes()).out;
    assert!(text.contains("address 192.0.2.1: 10 tries held"), "{text}");
}

/// The report said that 17 logins were held and let in at the time. The operator asked whose they were, and it did not say.
#[test]
fn logins_that_were_held_and_let_in_are_named() {
    let policy = Scratch::new("let-in.toml", POLICY);
    let mut log: String = (0..22).map(|n| sshd(n, "Failed", &format!("u{n}"), "192.0.2.1")).collect();
    log.push_str(&sshd(30, "Accepted", "ada", "192.0.2.1"));
    log.push_str(&sshd(40, "Accepted", "ada", "192.0.2.1"));
    for n in 41..44 {
        log.push_str(&sshd(n, "Failed", "bob", "192.0.2.2"));
    }
    log.push_str(&sshd(50, "Accepted", "bob", "192.0.2.3"));
    let args = ["replay", policy.path(), "-", "--login", "--json"];
    let answer = threshold_with(&args, log.as_bytes()).json();
    assert_eq!(answer["heldSuccesses"], 3);
    let row = |account: &str, address: &str, by: &str, count: u64, (first, last): (&str, &str)| serde_json::json!({"account": account, "address": address, "by": by, "count": count, "first": first, "last": last});
    let ada = ("2026-05-17T10:00:30Z", "2026-05-17T10:00:40Z");
    let bob = ("2026-05-17T10:00:50Z", "2026-05-17T10:00:50Z");
    let expected =
        [row("ada", "192.0.2.1", "the address' budget", 2, ada), row("bob", "192.0.2.3", "the account's lock", 1, bob)];
    assert_eq!(answer["letIn"].as_array().unwrap(), &expected);
    let text = threshold_with(&["replay", policy.path(), "-", "--login"], log.as_bytes()).out;
    assert!(text.contains("account ada from 192.0.2.1: 2 times, first by the address' budget"), "{text}");
    // The page has the same, with digests unless the policy shows names.
    let open = Scratch::new("let-in-open.toml", format!("[identity]\nlog_identifiers = true\n{POLICY}"));
    let page = Scratch::new("login.html", "");
    let write = |policy: &Scratch| {
        let run = threshold_with(
            &["replay", policy.path(), "-", "--login", "--html", page.path(), "--tz", "Europe/Berlin"],
            log.as_bytes(),
        );
        assert_eq!(run.code, 0, "{}", run.err);
        std::fs::read_to_string(page.path()).unwrap()
    };
    let hidden = write(&policy);
    assert!(!hidden.contains(">ada<") && !hidden.contains("192.0.2.1") && hidden.contains("<td class=\"l wrap\">#"));
    let shown = write(&open);
    for part in
        [">ada<", ">192.0.2.1<", "2026-05-17T12:00:30+02:00", "attempts per", "attempts held per", "Europe/Berlin"]
    {
        assert!(shown.contains(part), "{part} is missing:\n{shown}");
    }
}

/// An auth log without `--login` was "none of the log's lines is a request: no [time]", or, as JSON, a rehearsal of requests
/// without a path.
#[test]
fn an_auth_log_without_the_option_is_recognised() {
    let policy = Scratch::new("forgot.toml", POLICY);
    let log: String = (0..3).map(|n| sshd(n, "Failed", "root", "192.0.2.1")).collect();
    let run = threshold_with(&["replay", policy.path(), "-"], log.as_bytes());
    assert_eq!(run.code, 2);
    assert!(run.err.contains("3 are logins: add --login"), "{}", run.err);
    let event = "{\"ts\":1431856800,\"ip\":\"192.0.2.1\",\"account\":\"ada\",\"success\":false}\n";
    let text = threshold_with(&["replay", policy.path(), "-"], event.repeat(2).as_bytes()).out;
    assert!(text.contains("2 lines look like logins") && text.contains("--login"), "{text}");
    // Neither a request by a user nor an ordinary broken line is one.
    let request = "{\"ts\":1431856800,\"ip\":\"192.0.2.1\",\"user\":\"ada\",\"status\":200,\"path\":\"/\"}\nsshd\n";
    let text = threshold_with(&["replay", policy.path(), "-"], request.as_bytes()).out;
    assert!(!text.contains("--login"), "{text}");
}

/// An attempt that the deny list refuses locks no account: of three attempts on root two count.
#[test]
fn a_deny_listed_address_locks_no_account() {
    let policy = Scratch::new("denied.toml", format!("{POLICY}\n[lists]\ndeny = [\"192.0.2.0/24\", \"user:eve\"]\n"));
    let tries = [("root", "192.0.2.1"), ("root", "198.51.100.1"), ("root", "198.51.100.1"), ("Eve", "198.51.100.1")];
    let log: String = (0..).zip(tries).map(|(n, (account, ip))| sshd(n, "Failed", account, ip)).collect();
    let answer = threshold_with(&["replay", policy.path(), "-", "--login", "--json"], log.as_bytes()).json();
    assert_eq!((&answer["heldByList"], &answer["reachedSecret"]), (&2.into(), &2.into()));
    assert_eq!((&answer["accountsLocked"], &answer["addressesHeld"]), (&0.into(), &0.into()));
    let text = threshold_with(&["replay", policy.path(), "-", "--login"], log.as_bytes()).out;
    assert!(text.contains("held by a deny list"), "{text}");
}

#[test]
fn json_events_give_the_same_counts_as_sshd_lines() {
    let policy = Scratch::new("events.toml", POLICY);
    let lines: String = (0..6)
        .map(|n| {
            format!(
                "{{\"ts\":{},\"ip\":\"192.0.2.1\",\"account\":\"Ada\",\"success\":{}}}\n",
                1_431_856_800 + n,
                n == 5
            )
        })
        .collect();
    let answer = threshold_with(&["replay", policy.path(), "-", "--login", "--json"], lines.as_bytes()).json();
    assert_eq!(
        (&answer["reachedSecret"], &answer["heldByLock"], &answer["heldSuccesses"]),
        (&3.into(), &3.into(), &1.into())
    );
}

#[test]
fn a_log_without_logins_is_an_error() {
    let none = Scratch::new("none.toml", "");
    let run = threshold(&["replay", none.path(), "-", "--login"]);
    assert!(run.code == 2 && run.err.contains("no [login]"), "{}", run.err);
    let policy = Scratch::new("some.toml", POLICY);
    let run = threshold_with(&["replay", policy.path(), "-", "--login"], b"2026-05-17T10:00:00Z host CRON[1]: x\n");
    assert!(run.code == 2 && run.err.contains("about a login"), "{}", run.err);
}
