//! Tests every endpoint of the HTTP API as a caller uses it.

use serde_json::{Value, json};

use super::client::Client;
use super::process::{POLICY, Scratch, Server, Start};

type Connection = Client<std::net::TcpStream>;

fn ask(client: &mut Connection, path: &str, body: &Value) -> Value {
    let answer = client.post(path, &body.to_string()).unwrap();
    assert_eq!(answer.status, 200, "{path} {body}: {}", answer.body);
    assert_eq!(answer.header("content-type"), Some("application/json"));
    answer.json()
}

fn user(name: &str) -> Value {
    json!({"ip": "203.0.113.7", "user": name, "method": "POST", "path": "/api/posts"})
}

#[test]
fn check_decides_and_charges_and_answers_with_every_field() {
    let (server, _file) = Server::with(POLICY);
    let client = &mut server.connect();
    for remaining in [2, 1, 0] {
        let answer = ask(client, "/v1/check", &user("u1"));
        assert_eq!(answer["allowed"], true);
        assert_eq!((&answer["rule"], &answer["remaining"]), (&json!("posts"), &json!(remaining)));
    }
    let denied = ask(client, "/v1/check", &user("u1"));
    let fields: Vec<&str> = denied.as_object().unwrap().keys().map(String::as_str).collect();
    let written = "allowed verdict rule layer limit remaining resetAt retryAfter retryAfterMs delayMs warning banned \
                   degraded degradedReason receipt traceId limits";
    assert_eq!(fields, written.split_whitespace().collect::<Vec<_>>());
    assert_eq!(
        (&denied["allowed"], &denied["verdict"], &denied["layer"]),
        (&json!(false), &json!("deny"), &json!("user"))
    );
    assert_eq!((&denied["limit"], &denied["receipt"]), (&json!(3), &Value::Null));
    assert!((3598..=3600).contains(&denied["retryAfter"].as_u64().unwrap()), "{denied}");
    let limit: Vec<&str> = denied["limits"][0].as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(limit, ["rule", "layer", "mode", "allowed", "limit", "remaining", "resetAt", "retryAfter"]);
    // All or nothing: the denied request did not charge the address.
    let peeked = ask(client, "/v1/peek", &json!({"ip": "203.0.113.7"}));
    assert_eq!(peeked["remaining"], 996);
    let traces: Vec<String> = (0..2).map(|_| ask(client, "/v1/peek", &user("u1"))["traceId"].to_string()).collect();
    assert_ne!(traces[0], traces[1]);
}

#[test]
fn peek_charges_nothing_and_record_never_denies() {
    let (server, _file) = Server::with(POLICY);
    let client = &mut server.connect();
    for _ in 0..5 {
        let peeked = ask(client, "/v1/peek", &user("u1"));
        assert_eq!(
            (&peeked["allowed"], &peeked["remaining"], &peeked["receipt"]),
            (&json!(true), &json!(2), &Value::Null)
        );
    }
    for _ in 0..5 {
        assert_eq!(ask(client, "/v1/record", &user("u1"))["allowed"], true);
    }
    assert_eq!(ask(client, "/v1/check", &user("u1"))["allowed"], false);
}

#[test]
fn a_receipt_is_refunded_once() {
    let (server, _file) = Server::with(POLICY);
    let client = &mut server.connect();
    let receipt = json!({"receipt": ask(client, "/v1/check", &user("u1"))["receipt"]});
    assert_eq!(ask(client, "/v1/refund", &receipt), json!({"ok": true, "first": true}));
    assert_eq!(ask(client, "/v1/refund", &receipt), json!({"ok": true, "first": false}));
    assert_eq!(ask(client, "/v1/peek", &user("u1"))["remaining"], 2);
}

/// One caller's refunds once filled the table, and those of all others were answered `"first":false` and lost. One caller's
/// released reservations blocked those of all others for an hour.
#[test]
fn a_full_table_refuses_refunds_with_503_and_ended_reservations_use_no_space() {
    let rule =
        "[[rule]]\nname = \"r\"\nlayer = \"global\"\nper = []\nlimit = \"100000/h\"\nalgorithm = \"fixed-window\"\n";
    let (server, _file) = Server::with(&format!("[memory]\nmax_keys = 1000\n{rule}"));
    let client = &mut server.connect();
    let mut refunds = 0;
    let refused = loop {
        let receipt = json!({"receipt": ask(client, "/v1/check", &json!({}))["receipt"]}).to_string();
        let answer = client.post("/v1/refund", &receipt).unwrap();
        if answer.status != 200 {
            break answer;
        }
        assert_eq!(answer.json(), json!({"ok": true, "first": true}));
        refunds += 1;
        assert!(refunds <= 1_024);
    };
    assert_eq!((refunds, refused.status, &refused.json()["error"]), (1_024, 503, &json!("unavailable")));
    assert_eq!(ask(client, "/v1/peek", &json!({"cost": 0}))["remaining"], 99_999, "its charge stays");
    for _ in 0..1_100 {
        let reserved = ask(client, "/v1/reserve", &json!({"ttlSec": 3600}));
        assert_eq!(reserved["allowed"], true, "{reserved}");
        let ended = ask(client, "/v1/release", &json!({"reservation": reserved["reservation"]}));
        assert_eq!(ended, json!({"ok": true}));
    }
}

#[test]
fn a_reservation_is_committed_or_released_and_a_repeat_gets_the_same_answer() {
    let (server, _file) = Server::with(POLICY);
    let client = &mut server.connect();
    let tokens =
        |amount: u64| json!({"ip": "203.0.113.7", "user": "u1", "cost": 0, "costs": {"tokens": amount}, "ttlSec": 600});
    let left = |client: &mut Connection| {
        ask(client, "/v1/peek", &json!({"ip": "203.0.113.7", "user": "u1", "cost": 0}))["limits"][2]["remaining"]
            .clone()
    };
    let first = ask(client, "/v1/reserve", &tokens(400))["reservation"].clone();
    assert_eq!(left(client), 600);
    for _ in 0..2 {
        let commit = json!({"reservation": first, "costs": {"tokens": 150}});
        assert_eq!(ask(client, "/v1/commit", &commit), json!({"ok": true}));
        assert_eq!(left(client), 850);
    }
    // With another cost, or without one, which means the reserved cost.
    for commit in [json!({"reservation": first, "costs": {"tokens": 151}}), json!({"reservation": first})] {
        let answer = client.post("/v1/commit", &commit.to_string()).unwrap();
        let told = answer.json();
        assert_eq!((answer.status, &told["error"]), (409, &json!("already_committed")), "{told}");
        assert_eq!(told["field"], "reservation");
        assert_eq!(left(client), 850);
    }
    let second = ask(client, "/v1/reserve", &tokens(850))["reservation"].clone();
    assert_eq!(left(client), 0);
    for _ in 0..2 {
        assert_eq!(ask(client, "/v1/release", &json!({"reservation": second})), json!({"ok": true}));
        assert_eq!(left(client), 850);
    }
    for (path, body) in [
        ("/v1/release", json!({"reservation": first})),
        ("/v1/commit", json!({"reservation": second})),
        ("/v1/commit", json!({"reservation": "0".repeat(32)})),
        ("/v1/release", json!({"reservation": "nonsense"})),
    ] {
        let answer = client.post(path, &body.to_string()).unwrap();
        assert_eq!((answer.status, &answer.json()["error"]), (404, &json!("unknown_reservation")), "{path} {body}");
    }
    let refused = ask(client, "/v1/reserve", &tokens(900));
    assert_eq!((&refused["allowed"], &refused["reservation"]), (&json!(false), &Value::Null));
}

#[test]
fn a_pause_denies_until_it_ends() {
    let (server, _file) = Server::with(POLICY);
    let client = &mut server.connect();
    assert_eq!(ask(client, "/v1/pause", &json!({"layer": "user", "key": "u1", "seconds": 90})), json!({"ok": true}));
    let denied = ask(client, "/v1/check", &user("u1"));
    assert_eq!((&denied["allowed"], &denied["retryAfter"]), (&json!(false), &json!(90)));
    assert_eq!(ask(client, "/v1/check", &user("u2"))["allowed"], true);
    let pause = json!({"rule": "posts", "request": {"user": "u3"}, "seconds": 90});
    assert_eq!(ask(client, "/v1/pause", &pause), json!({"ok": true}));
    assert_eq!(ask(client, "/v1/check", &user("u3"))["retryAfter"], 90);
    let forgiven = json!({"rule": "posts", "request": {"user": "u3"}, "reason": "the provider is back"});
    assert_eq!(ask(client, "/v1/forgive", &forgiven), json!({"ok": true}));
    assert_eq!(ask(client, "/v1/check", &user("u3"))["allowed"], true);
    // No rule of this policy counts by tenant alone.
    assert_eq!(ask(client, "/v1/pause", &json!({"layer": "tenant", "key": "t1", "seconds": 90})), json!({"ok": false}));
}

#[test]
fn explain_lists_the_matched_rules_and_what_remains() {
    let (server, _file) = Server::with(POLICY);
    let client = &mut server.connect();
    ask(client, "/v1/check", &user("u1"));
    let explained = ask(client, "/v1/explain", &user("u1"));
    let rule = &explained["rules"][1];
    let fields: Vec<&str> = rule.as_object().unwrap().keys().map(String::as_str).collect();
    let written = "rule layer matched why key limit algorithm cost before after allowed binding passesAt";
    assert_eq!(fields, written.split_whitespace().collect::<Vec<_>>());
    assert_eq!((&rule["before"], &rule["after"], &rule["binding"]), (&json!(2), &json!(1), &json!(true)));
    assert_eq!((&rule["key"], &rule["limit"]), (&json!("user=u1"), &json!(3)));
    assert_eq!(explained["facts"]["path"], "/api/posts");
    assert_eq!(explained["decision"]["remaining"], 1);
    assert_eq!(explained["path"], json!({"readings": ["/api/posts"], "refusedAtClientDoors": null}));
    assert_eq!(ask(client, "/v1/peek", &user("u1"))["remaining"], 1, "explaining charges nothing");
    let odd = ask(client, "/v1/explain", &json!({"ip": "203.0.113.7", "user": "u1", "path": "/x/../api/posts"}));
    assert_eq!(odd["path"]["readings"][0], "/api/posts");
    let refused = json!({"status": 400, "message": "the path has a dot segment (. or ..)"});
    assert_eq!((&odd["path"]["refusedAtClientDoors"], &odd["decision"]["allowed"]), (&refused, &json!(true)));
}

/// With fourteen rules, the remembered answers of one minute once took 1.2 GB. Now they are bounded in bytes: a request whose
/// answer cannot be remembered is refused and charges nothing, and no answer is forgotten within its minute.
#[test]
fn request_ids_that_cannot_be_remembered_are_refused() {
    let file = Scratch::file("policy.toml", POLICY);
    let args = ["--request-id-memory", "8388608"];
    let server = Start { args: &args, policy: Some(file.path()), ..Start::default() }.server();
    let client = &mut server.connect();
    let list = |from: u32| {
        let one = |number| json!({"ip": format!("203.0.{}.{}", number / 200, number % 200), "requestId": format!("id-{number}")});
        Value::from((from..from + 500).map(one).collect::<Vec<_>>()).to_string()
    };
    let first = client.post("/v1/check", &list(0)).unwrap();
    assert_eq!(first.status, 200);
    let full =
        (1..100).map(|number| 500 * number).find(|from| client.post("/v1/check", &list(*from)).unwrap().status != 200);
    let full = full.expect("there is a bound");
    assert!(full > 2_000, "{full} small answers fit into 8 MiB");
    let refused = client.post("/v1/check", &list(full)).unwrap();
    let told = refused.json();
    assert_eq!(
        (refused.status, &told["error"], &told["field"]),
        (503, &json!("too_many_request_ids"), &json!("requestId"))
    );
    assert_eq!(refused.header("retry-after"), Some("1"));
    // The refused list charged nothing, and repeats of the others get the same answers.
    let of_refused = json!({"ip": format!("203.0.{}.{}", full / 200, full % 200)});
    assert_eq!(ask(client, "/v1/peek", &of_refused)["remaining"], 999);
    assert_eq!(client.post("/v1/check", &list(0)).unwrap().body, first.body);
    // Once the space is full, a single request with an id is refused too. Without an id it is decided.
    let single = |number: u32| {
        json!({"ip": format!("198.51.{}.1", number / 100), "requestId": format!("single-{number}")}).to_string()
    };
    let refused =
        (0..5_000).map(|number| client.post("/v1/check", &single(number)).unwrap()).find(|answer| answer.status != 200);
    let refused = refused.expect("there is a bound");
    assert_eq!((refused.status, &refused.json()["error"]), (503, &json!("too_many_request_ids")));
    assert_eq!(client.post("/v1/check", r#"{"ip": "192.0.2.1"}"#).unwrap().status, 200);
    assert_eq!(client.post("/v1/peek", &single(6_000)).unwrap().status, 200, "a peek is not remembered");
}

#[test]
fn a_list_is_decided_in_order_or_refused_as_a_whole() {
    let (server, _file) = Server::with(POLICY);
    let client = &mut server.connect();
    let answers = ask(client, "/v1/check", &Value::Array(vec![user("u1"); 5]));
    let allowed: Vec<bool> = answers.as_array().unwrap().iter().map(|one| one["allowed"] == true).collect();
    assert_eq!(allowed, [true, true, true, false, false]);
    assert_eq!(ask(client, "/v1/check", &json!([])), json!([]));
    // The last of a thousand items is invalid: the others charge nothing.
    let mut items = vec![json!({"ip": "203.0.113.9"}); 999];
    items.push(json!({"ip": "203.0.113.9", "cost": 1001}));
    let refused = client.post("/v1/check", &Value::Array(items).to_string()).unwrap();
    assert_eq!(refused.status, 400);
    let error = refused.json();
    assert_eq!(
        (&error["error"], &error["field"], &error["index"]),
        (&json!("cost_exceeds_limit"), &json!("cost"), &json!(999))
    );
    assert_eq!(ask(client, "/v1/peek", &json!({"ip": "203.0.113.9"}))["remaining"], 999);
    let many = ask(client, "/v1/record", &Value::Array(vec![json!({"ip": "203.0.113.9"}); 1000]));
    assert_eq!(many.as_array().unwrap().len(), 1000);
}

#[test]
fn a_request_id_is_charged_once_and_a_repeat_gets_the_same_answer() {
    let (server, _file) = Server::with(POLICY);
    let client = &mut server.connect();
    let mut request = user("u1");
    request["requestId"] = json!("r-1");
    let first = ask(client, "/v1/check", &request);
    assert_eq!(ask(client, "/v1/check", &request), first);
    assert_eq!(ask(client, "/v1/check", &json!([request, request])), json!([first, first]));
    assert_eq!(ask(client, "/v1/peek", &user("u1"))["remaining"], 1);
    // Two threads send the same ids at the same time: each is charged once.
    let totals = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let mut client = server.connect();
                scope.spawn(move || {
                    let one = |number: u32| json!({"ip": "203.0.113.8", "requestId": format!("race-{number}")});
                    (0..200)
                        .map(|number| ask(&mut client, "/v1/check", &one(number))["traceId"].clone())
                        .collect::<Vec<_>>()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    assert_eq!(totals[0], totals[1]);
    assert_eq!(ask(client, "/v1/peek", &json!({"ip": "203.0.113.8"}))["remaining"], 799);
    // A denied request is decided again.
    let full = json!({"ip": "203.0.113.7", "user": "u3", "requestId": "r-2"});
    ask(client, "/v1/pause", &json!({"layer": "user", "key": "u3", "seconds": 1}));
    let denied = ask(client, "/v1/check", &full);
    assert_eq!(denied["allowed"], false);
    assert_ne!(ask(client, "/v1/check", &full)["traceId"], denied["traceId"]);
}

/// If two callers chose the same id, the second once got the answer of the first, and was not charged.
#[test]
fn a_request_id_of_a_different_request_is_refused() {
    let (server, _file) = Server::with(POLICY);
    let client = &mut server.connect();
    let first = r#"{"ip":"203.0.113.7","user":"u1","path":"/a","facts":{"x":"1","y":"2"},"costs":{"tokens":5},"requestId":"r"}"#;
    let answer = client.post("/v1/check", first).unwrap();
    assert_eq!(answer.status, 200);
    // The same fields in another order are a repeat.
    let same = r#"{"requestId":"r","host":"","costs":{"tokens":5},"facts":{"y":"2","x":"1"},"path":"/a","user":"u1","ip":"203.0.113.7"}"#;
    assert_eq!(client.post("/v1/check", same).unwrap().body, answer.body);
    // So is a request with a default value written out.
    let defaults = first.replace("\"user\"", "\"cost\":1,\"bytes\":0,\"user\"");
    assert_eq!(client.post("/v1/check", &defaults).unwrap().body, answer.body);
    let refused = |client: &mut Client<_>, path: &str, body: &str, index: Value| {
        let answer = client.post(path, body).unwrap();
        let told = answer.json();
        assert_eq!(
            (answer.status, &told["error"], &told["field"]),
            (422, &json!("request_id_reused"), &json!("requestId"))
        );
        assert_eq!(told["index"], index, "{body}");
    };
    for other in [
        first.replace("u1", "u2"),
        first.replace("/a", "/b"),
        first.replace("\"2\"", "\"3\""),
        first.replace("\"y\"", "\"z\""),
        first.replace('5', "6"),
        first.replace("\"user\"", "\"cost\":2,\"user\""),
        first.replace("113.7", "113.8"),
        first.replace("\"user\"", "\"tenant\""),
        first.replace("facts", "headers"),
    ] {
        refused(client, "/v1/check", &other, Value::Null);
        // A list with such an id charges nothing.
        refused(client, "/v1/check", &format!(r#"[{{"ip":"203.0.113.7","user":"u3"}},{other}]"#), json!(1));
    }
    refused(
        client,
        "/v1/check",
        r#"[{"ip":"::1","user":"u3"},{"ip":"::1","user":"u3","requestId":"n"},{"ip":"::1","user":"u4","requestId":"n"}]"#,
        json!(2),
    );
    assert_eq!(ask(client, "/v1/peek", &user("u3"))["remaining"], 2);
    assert_eq!(ask(client, "/v1/peek", &user("u2"))["remaining"], 2);
    // Each path has ids of its own. The fields of a reservation are part of its content.
    let reserve = r#"{"ip":"::1","user":"u4","ttlSec":60,"requestId":"r"}"#;
    assert_eq!(client.post("/v1/reserve", reserve).unwrap().status, 200);
    refused(client, "/v1/reserve", &reserve.replace("60", "61"), Value::Null);
    refused(client, "/v1/reserve", &reserve.replace("\"ttlSec\"", "\"onExpire\":\"release\",\"ttlSec\""), Value::Null);
}

/// The limit is ten a second with a burst of one: a check that may wait is allowed, and repeats of one id wait for it.
#[test]
fn a_check_can_wait_until_it_fits() {
    let policy = "[[rule]]\nname = \"r\"\nper = [\"user\"]\nlimit = \"10/s burst 1\"\n";
    let (server, _file) = Server::with(policy);
    let client = &mut server.connect();
    let one = json!({"user": "u1"});
    for _ in 0..3 {
        assert_eq!(ask(client, "/v1/check?waitMs=60000", &one)["allowed"], true);
    }
    assert_eq!(ask(client, "/v1/check?waitMs=0", &json!({"user": "u2"}))["allowed"], true);
    ask(client, "/v1/pause", &json!({"layer": "user", "key": "u2", "seconds": 3600}));
    let denied = ask(client, "/v1/check?waitMs=60000", &json!({"user": "u2"}));
    assert_eq!((&denied["allowed"], &denied["rule"]), (&json!(false), &json!("r")), "an hour is too long");
    // Two requests with one id on two connections both wait, and are charged once.
    let twice = json!({"user": "u1", "requestId": "w-1"});
    let traces = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let (mut client, twice) = (server.connect(), &twice);
                scope.spawn(move || ask(&mut client, "/v1/check?waitMs=60000", twice)["traceId"].clone())
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    assert_eq!(traces[0], traces[1]);
    for (path, body, field) in [
        ("/v1/check?waitMs=", "{}", "waitMs"),
        ("/v1/check?waitMs=-1", "{}", "waitMs"),
        ("/v1/check?waitMs=60001", "{}", "waitMs"),
        ("/v1/check?waitMs=5&waitMs=5", "{}", "waitMs"),
        ("/v1/check?wait=5", "{}", "wait"),
        ("/v1/check?waitMs=5", "[]", "waitMs"),
        ("/v1/check?waitMs=5", "{}", "user"),
    ] {
        let answer = client.post(path, body).unwrap();
        assert_eq!((answer.status, &answer.json()["field"]), (400, &json!(field)), "{path}");
    }
}

#[test]
fn one_limit_needs_no_policy() {
    let server = Start::default().server();
    let client = &mut server.connect();
    for path in ["/v1/limit", "/check"] {
        let body = json!({"key": path, "limit": 2, "windowSec": 60});
        let first = ask(client, path, &body);
        assert_eq!((&first["allowed"], &first["remaining"], first.get("retryAfter")), (&json!(true), &json!(1), None));
        assert!(first["resetAt"].is_u64() && first.get("algorithm").is_none(), "{first}");
        assert_eq!(ask(client, path, &body)["remaining"], 0);
        let denied = ask(client, path, &body);
        assert_eq!((&denied["allowed"], &denied["remaining"]), (&json!(false), &json!(0)));
        assert!((59..=60).contains(&denied["retryAfter"].as_u64().unwrap()), "{denied}");
        // A changed limit applies to the next request, and keeps what was used.
        let raised = ask(client, path, &json!({"key": path, "limit": 5, "windowSec": 60, "cost": 0}));
        assert_eq!(raised["remaining"], 3);
        // The longer name of the field.
        let named = ask(client, path, &json!({"key": path, "limit": 5, "windowSeconds": 60, "cost": 0}));
        assert_eq!(named["remaining"], 3);
        // A null field means the same as an absent one.
        let null = json!({"key": path, "limit": 5, "windowSec": 60, "windowSeconds": null, "cost": 0});
        assert_eq!(ask(client, path, &null)["remaining"], 3);
    }
    for name in ["token-bucket", "fixed-window", "sliding-window", "sliding-estimate", "sliding-log", "concurrency"] {
        let body = json!({"key": "k", "limit": 10, "windowSec": 3600, "algorithm": name, "cost": 4});
        let admitted = (0..4).filter(|_| ask(client, "/v1/limit", &body)["allowed"] == true).count();
        assert_eq!(admitted, 2, "{name}");
    }
    let large = json!({"key": "large", "limit": 1025, "windowSec": 60});
    assert_eq!(ask(client, "/v1/limit", &large)["algorithm"], "sliding-window");
}

#[test]
fn health_and_the_openapi_document_are_served() {
    let server = Start::default().server();
    let client = &mut server.connect();
    for path in ["/healthz", "/readyz"] {
        let answer = client.send("GET", path, &[], "").unwrap();
        assert_eq!((answer.status, answer.json()), (200, json!({"status": "ok"})), "{path}");
    }
    let document = client.send("GET", "/openapi.json", &[], "").unwrap().json();
    assert_eq!(document["openapi"], "3.1.0");
    for path in ["check", "peek", "record", "explain", "reserve", "commit", "release", "refund", "pause", "limit"] {
        assert!(document["paths"][format!("/v1/{path}")]["post"].is_object(), "{path}");
    }
    let check = &document["components"]["schemas"]["Request"]["properties"];
    assert!(check["requestId"].is_object() && check["ttlSec"].is_null(), "{check}");
    assert!(document["components"]["schemas"]["Reserve"]["properties"]["ttlSec"].is_object());
}

/// The calls were in two tables and in running text, and a reader missed half of them: one table lists every call of the OpenAPI
/// document, and `/auth`.
#[test]
fn one_table_of_the_page_lists_every_call() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/api.md")).unwrap();
    let (_, table) = page.split_once("| call | token | does | answers |\n").unwrap();
    let rows: String = table.lines().take_while(|line| line.starts_with('|')).collect();
    let server = Start::default().server();
    let document = server.connect().send("GET", "/openapi.json", &[], "").unwrap().json();
    let mut calls = 0;
    for (path, item) in document["paths"].as_object().unwrap() {
        for method in item.as_object().unwrap().keys() {
            let call = format!("{} {path}", method.to_uppercase());
            let is_listed = rows.split('`').any(|listed| listed.split('?').next() == Some(call.as_str()));
            assert!(is_listed, "docs/api.md does not list {call}");
            calls += 1;
        }
    }
    assert!(calls > 15 && rows.contains("`GET /auth`"), "{calls} calls");
}
