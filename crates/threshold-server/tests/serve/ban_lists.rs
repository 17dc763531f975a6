//! Tests `bans import` and `bans export`: lists of thousands, as a set that is replaced, and for real firewalls.

use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::process::{Scratch, Server, Start};

const POLICY: &str = r#"
[identity]
trusted_proxies = ["192.0.2.0/24"]
client_ip = "x-forwarded-for"

[[rule]]
name = "all"
per = ["ip"]
limit = "100000/h"
"#;

fn start(folder: &Path) -> Server {
    let policy = folder.join("policy.toml");
    std::fs::write(&policy, POLICY).unwrap();
    let db = folder.join("threshold.db");
    Start { policy: Some(&policy), args: &["--db", db.to_str().unwrap()], ..Start::default() }.server()
}

fn threshold(server: &str, args: &[&str]) -> Result<String, String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_threshold"));
    let output = command.args(args).env_clear().env("THRESHOLD_SERVER", server).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
}

fn is_banned(server: &Server, ip: &str) -> bool {
    server.connect().post("/v1/check", &json!({ "ip": ip }).to_string()).unwrap().json()["banned"] == true
}

/// Networks of the form `11.x.y.0/24`, from the `first`th on.
fn networks(first: u32, count: u32) -> String {
    let net = |number: u32| std::net::Ipv4Addr::from_bits(0x0b00_0000 + (number << 8));
    (first..first + count).fold(String::new(), |mut text, number| {
        let _ = writeln!(text, "{}/24 ; SBL{number}", net(number));
        text
    })
}

fn audit_count(folder: &Path) -> u32 {
    let journal = rusqlite::Connection::open(folder.join("threshold.db")).unwrap();
    journal.query_row("SELECT count(*) FROM audit", [], |row| row.get(0)).unwrap()
}

/// An operator loaded a DROP list of a thousand networks with a loop around `bans add`: a thousand fsyncs, a thousand audit lines,
/// and networks that left the list stayed banned. A body of this size was refused as well.
#[test]
fn a_list_is_imported_as_a_set_and_replaced_by_the_next_one() {
    let folder = Scratch::folder();
    let server = start(folder.path());
    let list = folder.path().join("drop.txt");
    let run = |args: &[&str]| threshold(&server.place, args);
    let import = |text: &str| {
        std::fs::write(&list, text).unwrap();
        run(&["bans", "import", list.to_str().unwrap(), "--origin", "spamhaus-drop", "--for", "24h"])
    };
    // More than a megabyte of JSON, which is the largest body of other calls.
    let told = import(&format!("; Spamhaus DROP List\n{}", networks(0, 20_000))).unwrap();
    assert_eq!(told, "spamhaus-drop has 20000 bans: 20000 new, 0 lifted\n");
    assert!(is_banned(&server, "11.0.7.9") && is_banned(&server, "11.78.31.1") && !is_banned(&server, "11.78.32.1"));
    assert_eq!(audit_count(folder.path()), 1);
    let told = import(&networks(19_990, 20)).unwrap();
    assert_eq!(told, "spamhaus-drop has 20 bans: 10 new, 19990 lifted\n");
    assert!(!is_banned(&server, "11.0.7.9") && is_banned(&server, "11.78.31.1") && is_banned(&server, "11.78.32.1"));
    let listed = server.connect().send("GET", "/v1/bans", &[], "").unwrap().json();
    let listed = listed.as_array().unwrap();
    assert_eq!(listed.len(), 20);
    assert!(listed.iter().all(|ban| ban["by"] == "origin spamhaus-drop" && ban["until"].is_u64()), "{listed:?}");
    assert!(listed.iter().any(|ban| ban["reason"] == "SBL19990"));
    // One bad line, and nothing is changed: by the program itself, and by the server, which knows the proxies.
    let refused = import("203.0.113.0/24\nnonsense\n").unwrap_err();
    assert!(refused.contains("line 2: \"nonsense\" is not an address or CIDR"), "{refused}");
    let refused = import("203.0.113.0/24\n# ours\n192.0.2.7\n0.0.0.0/0\n127.0.0.0/8\n").unwrap_err();
    for part in ["nothing was imported: 3 of 4", "line 3: ", "trusted proxy", "line 4: ", "line 5: ", "400"] {
        assert!(refused.contains(part), "{part}: {refused}");
    }
    assert!(!is_banned(&server, "203.0.113.7") && is_banned(&server, "11.78.31.1"));
    assert_eq!(audit_count(folder.path()), 2);
    let audit = run(&["audit"]).unwrap();
    assert!(
        audit.contains("import: 20 bans, 10 new, 19990 lifted") && audit.contains("origin spamhaus-drop"),
        "{audit}"
    );
    // A single ban of the set is lifted by its network.
    run(&["bans", "lift", "ip", "11.78.31.0/24", "--reason", "a customer"]).unwrap();
    assert!(!is_banned(&server, "11.78.31.1"));
    let told = import("").unwrap();
    assert_eq!(told, "spamhaus-drop has 0 bans: 0 new, 19 lifted\n");
}

/// The process was killed while it imported: half a list on disk would ban some networks of the new list and none of the old.
///
/// Fails if the changes and the audit line of an import are not one transaction.
#[test]
fn an_import_that_is_killed_is_on_disk_as_a_whole_or_not_at_all() {
    const COUNT: u32 = 5_000;
    let folder = Scratch::folder();
    let list = folder.path().join("list.txt");
    let import = |place: &str, first: u32| {
        std::fs::write(&list, networks(first, COUNT)).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_threshold"));
        command.args(["bans", "import", list.to_str().unwrap(), "--origin", "x", "--server", place]).env_clear();
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    };
    let server = start(folder.path());
    assert!(import(&server.place, 0).wait().unwrap().success());
    drop(server);
    let mut present = 0;
    for round in 1..=8u32 {
        let server = start(folder.path());
        let next = round * COUNT;
        let mut client = import(&server.place, next);
        let wal = folder.path().join("threshold.db-wal");
        let size = || std::fs::metadata(&wal).map_or(0, |file| file.len());
        // Killed at different moments: before the write-ahead log grows, while it does, and after the answer.
        let before = size();
        let deadline = Instant::now() + Duration::from_secs(60);
        while match round % 3 {
            0 => client.try_wait().unwrap().is_none(),
            1 => size() == before,
            _ => false,
        } {
            assert!(Instant::now() < deadline, "round {round}: the import did not come to the moment of the kill");
            std::thread::yield_now();
        }
        server.signal("KILL");
        drop(server);
        let acknowledged = client.wait().unwrap().success();
        let server = start(folder.path());
        let listed: Value =
            serde_json::from_str(&threshold(&server.place, &["bans", "list", "--json"]).unwrap()).unwrap();
        let count = listed.as_array().unwrap().len();
        assert_eq!(count, usize::try_from(COUNT).unwrap(), "round {round}");
        let net = |number: u32| format!("{}/24", std::net::Ipv4Addr::from_bits(0x0b00_0000 + (number << 8)));
        let has = |first: u32| {
            let last = net(first + COUNT - 1);
            listed.as_array().unwrap().iter().filter(|ban| ban["key"] == net(first) || ban["key"] == last).count()
        };
        let is_new = has(next) == 2;
        assert!(is_new || has(present) == 2, "round {round}: a mixture of both lists");
        assert!(is_new || !acknowledged, "round {round}: an acknowledged import is lost");
        assert!(acknowledged || round % 3 != 0, "round {round}: an import that nothing disturbed has failed");
        if is_new {
            present = next;
        }
    }
}

/// Real `nft` and `ipset` load the export, in a network namespace of their own. Sets of intervals refuse blocks that overlap, which
/// a list of an operator and two providers always has.
#[test]
fn firewalls_load_the_exported_bans() {
    let folder = Scratch::folder();
    let server = start(folder.path());
    let run = |args: &[&str]| threshold(&server.place, args);
    let add = |layer: &str, key: &str, length: &[&str]| {
        let mut args = vec!["bans", "add", layer, key, "--reason", "r"];
        args.extend_from_slice(length);
        run(&args).unwrap();
    };
    add("edge", "203.0.113.0/24", &["--for", "1h"]);
    add("edge", "203.0.113.7", &[]);
    add("edge", "198.51.100.7", &["--for", "87600h"]);
    add("edge", "2001:db8:1:2::7", &[]);
    add("edge", "2001:db8:1::/48", &["--for", "1h"]);
    add("user", "mallory", &[]);
    let list = folder.path().join("list.txt");
    std::fs::write(&list, networks(0, 300)).unwrap();
    run(&["bans", "import", list.to_str().unwrap(), "--origin", "x"]).unwrap();
    let load = |format: &str, program: &[&str], check: &str| {
        let file = folder.path().join(format);
        std::fs::write(&file, run(&["bans", "export", "--format", format]).unwrap()).unwrap();
        // Twice: the second load replaces the first.
        let script = format!("set -e; {0} {1}; {0} {1}; {check}", program.join(" "), file.display());
        let mut unshare = Command::new("unshare");
        unshare.args(["--map-root-user", "--net", "sh", "-c", &script]).env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin");
        let output = unshare.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{format} needs nft, ipset and user namespaces: {said}");
        String::from_utf8(output.stdout).unwrap()
    };
    let loaded = load("nftables", &["nft", "-f"], "nft -j list table inet threshold");
    let loaded: Value = serde_json::from_str(&loaded).unwrap();
    let sets = loaded["nftables"].as_array().unwrap().iter().filter_map(|item| item.get("set"));
    let counts: Vec<(String, usize)> = sets
        .map(|set| (set["name"].as_str().unwrap().to_owned(), set["elem"].as_array().map_or(0, Vec::len)))
        .collect();
    // The /24 is cut into eight blocks around the one address that is banned for longer; the /64 is cut out of the /48 likewise.
    assert_eq!(counts, [("bans4".to_owned(), 300 + 9 + 1), ("bans6".to_owned(), 16 + 1)]);
    let listed = load("ipset", &["ipset", "restore", "-f"], "ipset list -o save");
    let entries = |set: &str| listed.lines().filter(|line| line.starts_with(&format!("add {set} "))).count();
    assert_eq!((entries("threshold4"), entries("threshold6")), (310, 17), "{listed}");
    assert!(
        listed.contains("add threshold4 203.0.113.7 timeout 0") || listed.contains("add threshold4 203.0.113.7\n"),
        "{listed}"
    );
    let plain = run(&["bans", "export", "--format", "plain"]).unwrap();
    assert!(plain.lines().count() == 327 && !plain.contains("mallory"), "{plain}");
}

/// CrowdSec's decisions end by themselves, and its captchas are no bans.
#[test]
fn crowdsec_decisions_are_imported_with_their_ends() {
    let folder = Scratch::folder();
    let server = start(folder.path());
    let list = folder.path().join("decisions.json");
    let decisions = json!([{"id": 3, "decisions": [
        {"duration": "3h59m55s", "origin": "crowdsec", "scenario": "crowdsecurity/ssh-bf", "scope": "Ip", "type": "ban",
         "value": "203.0.113.7"},
        {"duration": "1h", "scenario": "http-crawl", "scope": "Ip", "type": "captcha", "value": "203.0.113.8"},
    ]}]);
    std::fs::write(&list, decisions.to_string()).unwrap();
    let told = threshold(&server.place, &["bans", "import", list.to_str().unwrap(), "--origin", "crowdsec"]).unwrap();
    assert_eq!(told, "crowdsec has 1 bans: 1 new, 0 lifted\n");
    let again = ["bans", "import", list.to_str().unwrap(), "--origin", "crowdsec", "--json"];
    let told: Value = serde_json::from_str(&threshold(&server.place, &again).unwrap()).unwrap();
    assert_eq!((&told["bans"], &told["leftOut"]), (&json!(1), &json!(1)), "the captcha is left out");
    let listed = server.connect().send("GET", "/v1/bans", &[], "").unwrap().json();
    let [own] = listed.as_array().unwrap().as_slice() else { panic!("{listed}") };
    assert_eq!((&own["key"], &own["reason"]), (&json!("203.0.113.7"), &json!("crowdsecurity/ssh-bf")));
    let length = own["until"].as_u64().unwrap() - own["from"].as_u64().unwrap();
    assert!((14_394..=14_396).contains(&length), "{own}");
}
