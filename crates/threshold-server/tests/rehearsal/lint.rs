//! Tests `threshold lint` with a log, an OpenAPI document, or an older policy.

use crate::logs::{combined_lines, events};
use crate::running::{Scratch, threshold};

const LOGIN_ONLY: &str = "[[rule]]\nname = \"login\"\nmatch = { method = \"POST\", path = \"/login\" }\nper = [\"ip\"]\n\
                          limit = \"5/min\"\non_store_error = \"closed\"\n";

#[test]
fn requests_of_a_log_that_no_rule_limits_are_found() {
    let policy = Scratch::new("some.toml", LOGIN_ONLY);
    let log = Scratch::new("some.log", combined_lines(&events(2, 500)));
    let run = threshold(&["lint", policy.path(), "--log", log.path(), "--deny", "warnings"]);
    assert_eq!(run.code, 1, "{}", run.err);
    assert!(run.out.contains("uncovered-path") && run.out.contains("GET /items/"), "{}", run.out);
    assert!(!run.out.contains("POST /login") && run.out.contains("further endpoints"), "{}", run.out);
    let all =
        Scratch::new("all.toml", format!("{LOGIN_ONLY}[[rule]]\nname = \"all\"\nper = [\"ip\"]\nlimit = \"9/s\"\n"));
    assert_eq!(threshold(&["lint", all.path(), "--log", log.path(), "--deny", "warnings"]).code, 0);
    let meant = Scratch::new("meant.toml", format!("allow = [\"uncovered-path: the cache's\"]\n{LOGIN_ONLY}"));
    assert_eq!(threshold(&["lint", meant.path(), "--log", log.path(), "--deny", "warnings"]).code, 0);
    let empty = Scratch::new("empty.log", "");
    let run = threshold(&["lint", policy.path(), "--log", empty.path()]);
    assert!(run.code == 2 && run.err.contains("lines is a request"), "{}", run.err);
}

#[test]
fn operations_of_an_openapi_document_that_no_rule_limits_are_found() {
    let policy = Scratch::new("api.toml", LOGIN_ONLY.replace("/login", "/v1/login"));
    let document = r#"{"openapi": "3.1.0", "servers": [{"url": "https://api.example.com/v1/"}], "paths": {
        "/login": {"post": {}, "parameters": []}, "/users/{id}": {"get": {}, "delete": {}}}}"#;
    let document = Scratch::new("api.json", document);
    let run = threshold(&["lint", policy.path(), "--openapi", document.path(), "--deny", "warnings"]);
    assert_eq!(run.code, 1, "{}", run.err);
    assert!(run.out.contains("GET /v1/users/{id}") && run.out.contains("DELETE /v1/users/{id}"), "{}", run.out);
    assert!(!run.out.contains("POST") && run.out.contains("2 warnings"), "{}", run.out);
    let broken = [
        ("{\"paths\": ", "not JSON"),
        ("openapi: 3.1.0", "no \"paths\""),
        ("a: [1", "neither JSON nor YAML"),
        ("", "paths"),
    ];
    for (text, expect) in broken {
        let broken = Scratch::new("broken.json", text);
        let run = threshold(&["lint", policy.path(), "--openapi", broken.path()]);
        assert!(run.code == 2 && run.err.contains(expect), "{text}: {}", run.err);
    }
}

/// A billion laughs attack: aliases that each expand to nine of the one before, 3 GB in all.
fn bomb() -> String {
    let mut text = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x]\n");
    for level in 1..10 {
        let before = format!("*a{}", level - 1);
        text.push_str(&format!("a{level}: &a{level} [{}]\n", [before.as_str(); 9].join(", ")));
    }
    text + "paths: {}\n"
}

#[test]
fn an_openapi_document_may_be_yaml() {
    let policy = Scratch::new("api.toml", LOGIN_ONLY.replace("/login", "/v1/login"));
    let document = "# ours\nopenapi: '3.0.3'\nservers:\n  - url: https://api.example.com/v1\npaths:\n  /login:\n    \
                    post: &op\n      responses:\n        200: {description: ok}\n        default: {description: no}\n  \
                    /users/{id}:\n    get: *op\n    delete:\n      responses: {}\n";
    let check = |document: &str, expect: &str| {
        let document = Scratch::new("api.yaml", document);
        let run = threshold(&["lint", policy.path(), "--openapi", document.path(), "--deny", "warnings"]);
        assert_eq!(run.code, 1, "{}", run.err);
        assert!(run.out.contains(expect) && run.out.contains("DELETE /v1/users/{id}"), "{}", run.out);
        assert!(!run.out.contains("POST") && run.out.contains("2 warnings"), "{}", run.out);
    };
    check(document, "GET /v1/users/{id}");
    let older =
        document.replace("servers:\n  - url: https://api.example.com/v1\n", "host: api.example.com\nbasePath: /v1\n");
    check(&older.replace("openapi: '3.0.3'", "swagger: '2.0'"), "GET /v1/users/{id}");
    let bomb = Scratch::new("bomb.yaml", bomb());
    let run = threshold(&["lint", policy.path(), "--openapi", bomb.path()]);
    assert!(run.code == 2 && run.err.contains("neither JSON nor YAML"), "{}", run.err);
}

#[test]
fn state_that_a_change_forgets_is_reported_at_the_changed_rule() {
    let old = Scratch::new("old.toml", LOGIN_ONLY);
    let new = Scratch::new("new.toml", LOGIN_ONLY.replace("5/min", "5/h"));
    let run = threshold(&["lint", new.path(), "--against", old.path(), "--deny", "warnings"]);
    assert_eq!(run.code, 1, "{}", run.err);
    assert!(
        run.out.contains(":2:8: warning[forgets]") && run.out.contains("its balances start from zero"),
        "{}",
        run.out
    );
    assert_eq!(threshold(&["lint", old.path(), "--against", old.path(), "--deny", "warnings"]).code, 0);
    let meant =
        Scratch::new("meant.toml", format!("{}allow = [\"forgets: at night\"]\n", LOGIN_ONLY.replace("5/min", "5/h")));
    assert_eq!(threshold(&["lint", meant.path(), "--against", old.path(), "--deny", "warnings"]).code, 0);
    let gone = Scratch::new("gone.toml", "");
    let run = threshold(&["lint", gone.path(), "--against", old.path()]);
    assert!(run.code == 0 && run.out.contains("\"login\" is removed"), "{}", run.out);
    let meant = Scratch::new(
        "meant.toml",
        "allow = [\"forgets: nobody logs in here any more\", \"no-rules: the edge limits\"]\n",
    );
    assert_eq!(threshold(&["lint", meant.path(), "--against", old.path(), "--deny", "warnings"]).code, 0);
}

/// A figure that is ten times too low is no error and forgets nothing: the change itself is shown.
#[test]
fn lint_lists_what_a_change_changes() {
    let old = Scratch::new("old.toml", LOGIN_ONLY);
    let new = Scratch::new("new.toml", LOGIN_ONLY.replace("5/min", "50/min"));
    let run = threshold(&["lint", new.path(), "--against", old.path(), "--deny", "warnings"]);
    let listed = format!("changes since {}:\n  rule login: limit 5/min -> 50/min\n\n", old.path());
    assert!(run.code == 0 && run.out.contains(&listed), "{}", run.out);
    let run = threshold(&["lint", old.path(), "--against", old.path()]);
    assert!(!run.out.contains("changes"), "{}", run.out);
}
