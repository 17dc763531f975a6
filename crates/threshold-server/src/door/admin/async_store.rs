//! Tests the operators' API on a store that keeps bytes and is never ready at the first poll.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::door::test_server::TestServer;

const POLICY: &str = "
    [[rule]]
    name = 'r'
    per = ['user']
    limit = '1/h'
    on_missing = 'skip'
";

fn send(server: &mut TestServer, method: &str, path: &str, body: &Value) -> (u16, Value) {
    let fields = [("content-type", "application/json")];
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let answer = server.client().send(method, path, &fields, &body).unwrap();
    (answer.status, serde_json::from_str(&answer.body).unwrap_or(Value::Null))
}

fn limit_of(server: &mut TestServer, user: &str) -> (Value, Value) {
    let (_, checked) = send(server, "POST", "/v1/peek", &json!({ "user": user }));
    (checked["allowed"].clone(), checked["limit"].clone())
}

#[test]
fn bans_and_settings_are_set_listed_and_removed_on_an_asynchronous_store() {
    let mut server = TestServer::on_async_store();
    server.load(POLICY, &BTreeMap::new(), true).unwrap();
    let new = json!({ "layer": "user", "key": "mallory", "reason": "fraud", "durationSec": 60 });
    let (status, ban) = send(&mut server, "POST", "/v1/bans", &new);
    assert_eq!((status, &ban["key"]), (200, &json!("mallory")));
    assert_eq!(limit_of(&mut server, "mallory").0, json!(false));
    let (status, listed) = send(&mut server, "GET", "/v1/bans", &Value::Null);
    assert_eq!((status, &listed), (200, &json!([ban])));
    let path = format!("/v1/bans/{}", ban["id"].as_str().unwrap());
    assert_eq!(send(&mut server, "DELETE", &path, &Value::Null).0, 200);
    assert_eq!(send(&mut server, "DELETE", &path, &Value::Null).0, 404);
    assert_eq!(send(&mut server, "GET", "/v1/bans", &Value::Null), (200, json!([])));
    assert_eq!(limit_of(&mut server, "mallory").0, json!(true));

    assert_eq!(limit_of(&mut server, "bob"), (json!(true), json!(1)));
    assert_eq!(send(&mut server, "PUT", "/v1/users/bob", &json!({ "times": 5 })).0, 200);
    assert_eq!(limit_of(&mut server, "bob"), (json!(true), json!(5)));
    assert_eq!(send(&mut server, "GET", "/v1/users/bob", &Value::Null).1["times"], json!(5));
    assert_eq!(send(&mut server, "PUT", "/v1/users/bob", &json!({})).0, 200);
    assert_eq!(limit_of(&mut server, "bob"), (json!(true), json!(1)));
    assert_eq!(send(&mut server, "PUT", "/v1/users/bob", &json!({ "tier": "none" })).0, 400);
}
