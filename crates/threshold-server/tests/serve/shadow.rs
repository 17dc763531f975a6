//! Tests that a shadow ban cannot be recognised at a client door, except by its delay.

use super::client::Answer;
use super::process::{Scratch, Server, Start};

const POLICY: &str = r#"
[identity]
trusted_proxies = ["127.0.0.1/32"]
client_ip = "x-forwarded-for"
user = "header:x-user"

[ladders.quiet]
rungs = ["shadow"]

[[rule]]
name = "trap"
match = { path = "/trap" }
per = ["user"]
limit = "1/day"
ladder = "quiet"
strike = "request"

[[rule]]
name = "pages"
match = { path = "/page" }
per = ["user"]
limit = "2/day"
algorithm = "fixed-window"
"#;

fn ask(server: &Server, user: &str, path: &str) -> Answer {
    let fields =
        [("x-forwarded-for", "203.0.113.7"), ("x-original-method", "GET"), ("x-original-uri", path), ("x-user", user)];
    server.connect().send("GET", "/auth", &fields, "").unwrap()
}

/// Returns everything that a client sees, with all numbers replaced: dates and counters differ between any two clients.
fn seen(answer: &Answer) -> String {
    let fields: Vec<_> = answer.headers.iter().filter(|(name, _)| name != "date").collect();
    let text = format!("{} {fields:?} {}", answer.status, answer.body);
    // A trace id is sixteen random bytes, in a header and in the body.
    let trace = answer.header("x-trace-id").unwrap();
    text.replace(trace, "").chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect()
}

/// Of three pages, the third is denied, with the same answer to both clients, before and after a restart.
#[test]
fn a_shadow_ban_differs_from_good_standing_only_by_its_delay() {
    let folder = Scratch::folder();
    let (policy, db) = (folder.path().join("policy.toml"), folder.path().join("threshold.db"));
    std::fs::write(&policy, POLICY).unwrap();
    let start = || Start { policy: Some(&policy), args: &["--db", db.to_str().unwrap()], ..Start::default() }.server();
    let mut server = start();
    for _ in 0..2 {
        assert_eq!(ask(&server, "eve", "/trap").status, 200);
    }
    let subject = server.connect().send("GET", "/v1/subjects/user/eve", &[], "").unwrap().json();
    assert_eq!(subject["shadowBanned"], true);
    for page in 1..=3 {
        let answers = [ask(&server, "ann", "/page"), ask(&server, "eve", "/page")];
        assert_eq!(answers[0].status, if page < 3 { 200 } else { 429 });
        assert_eq!(seen(&answers[0]), seen(&answers[1]), "page {page}");
        if page == 1 {
            server.signal("TERM");
            assert!(server.wait().0.success());
            server = start();
            let subject = server.connect().send("GET", "/v1/subjects/user/eve", &[], "").unwrap().json();
            assert_eq!(subject["shadowBanned"], true);
        }
    }
}
