//! `threshold lint` with a log, an OpenAPI document, or an older policy beside it.

use crate::logs::{combined_lines, events};
use crate::running::{Scratch, threshold};

const LOGIN_ONLY: &str = "[[rule]]\nname = \"login\"\nmatch = { method = \"POST\", path = \"/login\" }\nper = [\"ip\"]\n\
                          limit = \"5/min\"\non_store_error = \"closed\"\n";

#[test]
fn what_no_rule_limits_is_found_in_a_log() {
    let policy = Scratch::new("some.toml", LOGIN_ONLY);
    let log = Scratch::new("some.log", combined_lines(&events(2, 500)));
    let run = threshold(&["lint", policy.path(), "--log", log.path(), "--deny", "warnings"]);
    assert_eq!(run.code, 1, "{}", run.err);
    assert!(run.out.contains("uncovered-path") && run.out.contains("GET /items/"), "{}", run.out);
    assert!(!run.out.contains("POST /login") && run.out.contains("further endpoints"), "{}", run.out);
    let all =
        Scratch::new("all.toml", format!("{LOGIN_ONLY}[[rule]]\nname = \"all\"\nper = [\"ip\"]\nlimit = \"9/s\"\n"));
    assert_eq!(threshold(&["lint", all.path(), "--log", log.path(), "--deny", "warnings"]).code, 0);
    let empty = Scratch::new("empty.log", "");
    let run = threshold(&["lint", policy.path(), "--log", empty.path()]);
    assert!(run.code == 2 && run.err.contains("no line of the log is a request"), "{}", run.err);
}

#[test]
fn what_no_rule_limits_is_found_in_an_openapi_document() {
    let policy = Scratch::new("api.toml", LOGIN_ONLY.replace("/login", "/v1/login"));
    let document = r#"{"openapi": "3.1.0", "servers": [{"url": "https://api.example.com/v1/"}], "paths": {
        "/login": {"post": {}, "parameters": []}, "/users/{id}": {"get": {}, "delete": {}}}}"#;
    let document = Scratch::new("api.json", document);
    let run = threshold(&["lint", policy.path(), "--openapi", document.path(), "--deny", "warnings"]);
    assert_eq!(run.code, 1, "{}", run.err);
    assert!(run.out.contains("GET /v1/users/{id}") && run.out.contains("DELETE /v1/users/{id}"), "{}", run.out);
    assert!(!run.out.contains("POST") && run.out.contains("2 warnings"), "{}", run.out);
    for (text, expect) in [("openapi: 3.1.0", "no JSON"), ("{}", "no \"paths\"")] {
        let broken = Scratch::new("broken.json", text);
        let run = threshold(&["lint", policy.path(), "--openapi", broken.path()]);
        assert!(run.code == 2 && run.err.contains(expect), "{}", run.err);
    }
}

#[test]
fn what_a_change_forgets_is_told_where_it_was_changed() {
    let old = Scratch::new("old.toml", LOGIN_ONLY);
    let new = Scratch::new("new.toml", LOGIN_ONLY.replace("5/min", "5/h"));
    let run = threshold(&["lint", new.path(), "--against", old.path(), "--deny", "warnings"]);
    assert_eq!(run.code, 1, "{}", run.err);
    assert!(run.out.contains(":2:8: warning[forgets]") && run.out.contains("everybody begins anew"), "{}", run.out);
    assert_eq!(threshold(&["lint", old.path(), "--against", old.path(), "--deny", "warnings"]).code, 0);
    let gone = Scratch::new("gone.toml", "");
    let run = threshold(&["lint", gone.path(), "--against", old.path()]);
    assert!(run.code == 0 && run.out.contains("\"login\" is gone"), "{}", run.out);
}
