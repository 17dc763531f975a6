//! The commands of the runbooks print what the pages show, against a server in the state that each page is about.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::console::{self, Shown};
use crate::{ADDRESS, GRPC_ADDRESS, Server, read, root, run, scratch};

const POLICY: &str = include_str!("runbooks/policy.toml");

/// A runbook, and how to get a server into the state that it is about.
struct Runbook {
    name: &'static str,
    /// Runs before the server starts.
    before: &'static str,
    /// What the server is started with.
    serve: &'static str,
    /// Runs beside the server.
    prepare: &'static str,
    /// Runs before the commands of the last section: what only the reader's own machine can do, such as starting Redis again.
    repair: &'static str,
    has_redis: bool,
}

/// Most servers.
const SERVE: &str = "threshold serve policy.toml";

impl Runbook {
    const fn new(name: &'static str, prepare: &'static str) -> Self {
        Self { name, before: "", serve: SERVE, prepare, repair: "", has_redis: false }
    }
}

/// Functions for the scripts: `check N REQUEST` asks N times, where `@` is the number of the request; `until_ready STATUS` waits for what
/// `/readyz` says.
const FUNCTIONS: &str = r#"
check() {
  list=; i=1
  while [ $i -le $1 ]; do
    case $2 in *@*) one="${2%%@*}$i${2#*@}" ;; *) one=$2 ;; esac
    list="$list$one,"; i=$((i + 1))
  done
  curl -sS --fail -o answers.json -d "[${list%,}]" "http://127.0.0.1:8080/v1/check"
}
until_ready() { until curl -s http://127.0.0.1:8080/readyz | grep -q "\"$1\""; do sleep 0.1; done; }
"#;

const RUNBOOKS: &[Runbook] = &[
    Runbook::new(
        "edge-blocks",
        r#"for host in 7 8 9; do check 160 "{\"ip\":\"203.0.113.$host\",\"method\":\"GET\",\"path\":\"/\"}"; done"#,
    ),
    Runbook::new("ip-blocks", r#"check 130 '{"ip":"203.0.113.7","method":"GET","path":"/"}'"#),
    Runbook::new("tenant-blocks", r#"check 260 '{"tenant":"acme","ip":"2001:db8:@::7","method":"GET","path":"/"}'"#),
    Runbook::new(
        "user-bans",
        r#"for user in mallory trudy u01 u02 u03 u04 u05 u06 u07 u08 u09 u10; do check 8 "{\"user\":\"$user\",\"ip\":\"2001:db8:@::7\",\"method\":\"POST\",\"path\":\"/api/posts\"}"; done"#,
    ),
    Runbook::new(
        "shadow-banned-by-mistake",
        r#"check 7 '{"user":"ada","ip":"192.0.2.1","method":"POST","path":"/api/posts"}'"#,
    ),
    Runbook {
        before: r#"sed -i 's|"200/h"|"2000/h"|' policy.toml; cp policy.toml policy.before.toml"#,
        prepare: r#"sed -i 's|"2000/h"|"200/h"|' policy.toml; until grep -q 'policy reloaded' threshold.log; do sleep 0.1; done
           check 230 '{"tenant":"acme","ip":"2001:db8:@::7","method":"GET","path":"/"}'
           curl -sS -o denial.json -d '{"tenant":"acme","ip":"192.0.2.1","method":"GET","path":"/"}' http://127.0.0.1:8080/v1/check"#,
        ..Runbook::new("wrong-limit", "")
    },
    Runbook::new(
        "login-attack",
        r#"for try in 1 2 3; do
             attempt=$(curl -sS -d '{"account":"ada@example.com","ip":"203.0.113.7"}' http://127.0.0.1:8080/v1/login/attempt)
             attempt=$(echo "$attempt" | sed 's/.*"attempt":"\([^"]*\)".*/\1/')
             curl -sS -o answers.json -d "{\"attempt\":\"$attempt\",\"success\":false}" http://127.0.0.1:8080/v1/login/result
           done"#,
    ),
    Runbook {
        prepare: r#"cp policy.toml policy.before.toml; sed -i 's|"200/h"|"200/hour or so"|' policy.toml; until_ready degraded"#,
        ..Runbook::new("policy-not-loaded", "")
    },
    Runbook {
        before: r#"pair="openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=limits"
                   TZ=UTC faketime -f '2020-01-01 00:00:00' $pair -days 1 -keyout key.pem -out cert.pem 2>/dev/null
                   $pair -days 30 -keyout key.new.pem -out cert.new.pem 2>/dev/null"#,
        serve: "threshold serve policy.toml --tls-cert cert.pem --tls-key key.pem",
        ..Runbook::new("certificate", "")
    },
    Runbook {
        before: "mkdir journal",
        serve: "threshold serve policy.toml --db journal/threshold.db",
        prepare: "mv journal journal.away; until_ready degraded",
        repair: "mv journal.away journal",
        ..Runbook::new("journal-failing", "")
    },
    Runbook {
        prepare: "kill -9 $(cat threshold.pid); while threshold health >health.out 2>&1; do sleep 0.1; done",
        // It ends by itself, because the test knows only the first one.
        repair: "timeout 30 threshold serve policy.toml --http 127.0.0.1:8080 >serve.out 2>>threshold.log & until_ready ok",
        ..Runbook::new("server-down", "")
    },
    Runbook {
        has_redis: true,
        serve: "env THRESHOLD_SECRET=a-secret-for-this-test threshold serve policy.toml --no-db --store redis://127.0.0.1:6379",
        prepare: r#"threshold bans add tenant closed --reason 'they left us' >ban.out
           check 8 '{"user":"mallory","ip":"192.0.2.1","method":"POST","path":"/api/posts"}'
           until curl -s http://127.0.0.1:8080/metrics | grep -q '^threshold_store_share_nodes 1'; do sleep 0.2; done
           kill $(cat redis.pid); until_ready degraded; check 3 '{"tenant":"acme","ip":"192.0.2.1","method":"GET","path":"/"}'"#,
        repair: "redis-server --port 6379 --save '' --bind 127.0.0.1 >redis.log 2>&1 & echo $! >redis.pid; until redis-cli -p 6379 ping >ping.out 2>&1; do sleep 0.1; done",
        ..Runbook::new("store-down", "")
    },
    Runbook {
        has_redis: true,
        serve: "env THRESHOLD_SECRET=a-secret-for-this-test threshold serve policy.toml --no-db --store redis://127.0.0.1:6379",
        prepare:
            "until curl -s http://127.0.0.1:8080/metrics | grep -q '^threshold_store_share_nodes 1'; do sleep 0.2; done
                  redis-cli -p 6379 client pause 600000 write >redis.out
                  check 1 '{\"tenant\":\"acme\",\"ip\":\"192.0.2.1\",\"method\":\"GET\",\"path\":\"/\"}'",
        ..Runbook::new("store-slow", "")
    },
    Runbook::new("degraded", ""),
    Runbook {
        before: "printf '[memory]\\nmax_keys = 1000\\n' >>policy.toml",
        prepare: r#"for block in 1 2 3 4 5 6 7 8; do for host in 1 2 3 4 5 6 7 8; do
                      check 60 "{\"ip\":\"198.51.$block.$host\",\"method\":\"GET\",\"path\":\"/\"}"; done; done"#,
        ..Runbook::new("memory-full", "")
    },
    Runbook::new("clock", ""),
    Runbook {
        prepare: "for call in 1 2 3 4 5 6 7 8 9 10 11 12; do
                    curl -sS -o answer.out --http2-prior-knowledge -H 'content-type: application/grpc' -X POST \
                      http://127.0.0.1:8081/other.Service/Call; done",
        ..Runbook::new("envoy-errors", "")
    },
    Runbook { serve: "threshold serve policy.toml --events-to jsonl:events.jsonl", ..Runbook::new("events-lost", "") },
];

/// The name of a page, without its folder and its extension.
fn pages() -> BTreeSet<String> {
    let entries = std::fs::read_dir(root().join("docs/runbooks")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter_map(|name| name.strip_suffix(".md").map(str::to_owned)).filter(|name| name != "README").collect()
}

/// A Redis on a free port, until it is dropped. Its process id is in `redis.pid`.
struct Redis(Child, u16, PathBuf);

impl Redis {
    fn start(folder: &Path) -> Self {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut redis = Command::new("redis-server");
        redis.args(["--port", &port.to_string(), "--save", "", "--bind", "127.0.0.1"]);
        let child = redis.current_dir(folder).stdout(Stdio::null()).spawn().unwrap();
        std::fs::write(folder.join("redis.pid"), child.id().to_string()).unwrap();
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        Self(child, port, folder.to_owned())
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
        // A page may have started another one.
        let _ = Command::new("sh").args(["-c", "kill $(cat redis.pid) 2>/dev/null"]).current_dir(&self.2).status();
    }
}

impl Runbook {
    /// Runs all commands of the page. Returns those that printed something else.
    fn differences(&self) -> Vec<String> {
        let folder = scratch(&format!("runbook-{}", self.name));
        std::fs::write(folder.join("policy.toml"), POLICY).unwrap();
        let redis = self.has_redis.then(|| Redis::start(&folder));
        let redis_port = redis.as_ref().map_or(6379, |redis| redis.1).to_string();
        let local = |text: &str| text.replace("6379", &redis_port);
        let script = |text: &str, server: Option<&Server>| {
            let text = local(&format!("{FUNCTIONS}{text}"));
            let own = |server: &Server| text.replace(ADDRESS, &server.address).replace(GRPC_ADDRESS, &server.grpc);
            let text = server.map_or(text.clone(), own);
            let printed = run(&text, &folder, server);
            assert_eq!(printed, Vec::<String>::new(), "{}: {text}", self.name);
        };
        script(self.before, None);
        let (server, _) = Server::start(&local(&format!("{} 2> threshold.log", self.serve)), &folder);
        std::fs::write(folder.join("threshold.pid"), server.child.id().to_string()).unwrap();
        script(self.prepare, Some(&server));
        let (mut differences, mut commands) = (Vec::new(), Vec::new());
        for section in console::sections(&read(&format!("docs/runbooks/{}.md", self.name))) {
            if section.starts_with("How to undo it") {
                script(self.repair, Some(&server));
            }
            for Shown { command, output } in console::commands(section) {
                let printed = run(&local(&command.replace(ADDRESS, &server.address)), &folder, Some(&server));
                let shown_here = |line: &String| line.replace(&server.address, ADDRESS).replace(&redis_port, "6379");
                let printed: Vec<String> = printed.iter().map(shown_here).collect();
                commands.push(command.clone());
                if !console::agree(&output, &printed) {
                    let (shown, printed) = (output.join("\n"), printed.join("\n"));
                    differences.push(format!("$ {command}\nshown:\n{shown}\nprinted:\n{printed}\n"));
                }
            }
        }
        assert!(commands.len() >= 3, "{} shows {commands:?}", self.name);
        drop(server);
        // Before the folder, which has the process id of a Redis that the page has started.
        drop(redis);
        let _ = std::fs::remove_dir_all(&folder);
        differences
    }
}

#[test]
fn the_runbooks_do_what_they_say() {
    let known: BTreeSet<String> = RUNBOOKS.iter().map(|runbook| runbook.name.to_owned()).collect();
    assert_eq!(pages(), known, "every page has commands that are run, and nothing else does");
    // `RUNBOOK=clock` runs one page, while it is written.
    let only = std::env::var("RUNBOOK").ok();
    let mut wrong = Vec::new();
    for runbook in RUNBOOKS.iter().filter(|runbook| only.as_ref().is_none_or(|only| only == runbook.name)) {
        wrong
            .extend(runbook.differences().into_iter().map(|text| format!("docs/runbooks/{}.md\n{text}", runbook.name)));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A pager shows the name of an alert. The index leads from it to a page.
#[test]
fn the_index_names_every_alert() {
    let (index, alerts) = (read("docs/runbooks/README.md"), read("deploy/prometheus/alerts.yml"));
    let own = threshold_core::policy::AlertOn::ALL.map(|alert| alert.name().to_owned());
    let names = alerts.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).map(str::to_owned).chain(own);
    let missing: BTreeSet<String> = names.filter(|name| !index.contains(&format!("`{name}`"))).collect();
    assert!(missing.is_empty(), "docs/runbooks/README.md does not name {missing:?}");
}

/// Every page has the four parts, in this order, and the index names it.
#[test]
fn every_runbook_says_what_to_do_and_how_to_undo_it() {
    let index = read("docs/runbooks/README.md");
    for name in pages() {
        let page = read(&format!("docs/runbooks/{name}.md"));
        let headings: Vec<&str> = page.lines().filter(|line| line.starts_with("## ")).collect();
        let expected = ["## What it means", "## How to look", "## What to do", "## How to undo it"];
        assert_eq!(headings, expected, "{name}");
        assert!(index.contains(&format!("]({name}.md)")), "docs/runbooks/README.md does not list {name}.md");
    }
}
