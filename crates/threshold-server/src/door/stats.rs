//! `/v1/stats`: what was blocked in the last minute, hour or day, and the penalties in force.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;
use serde_json::json;

use super::admin::{Reader, operator_call};
use super::openapi::{Operation, Schemas};
use super::query::Query;
use super::routes::{Route, get};
use super::{ApiError, App};
use crate::signals::lock;
use crate::signals::tops::{Period, Stats};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct StatsQuery {
    period: Option<String>,
}

pub(super) fn routes() -> Vec<Route> {
    vec![get("/v1/stats", show, describe)]
}

fn describe(schemas: &mut Schemas) -> Operation {
    let period = json!({
        "name": "period",
        "in": "query",
        "description": "The last minute, hour or day",
        "schema": {"type": "string", "enum": ["min", "h", "day"], "default": "day"},
    });
    let summary = "Count what was blocked, by layer and by name, and the penalties in force";
    operator_call("stats", summary, &schemas.of::<Stats>()).parameter(period)
}

async fn show(
    reader: Reader,
    State(app): State<Arc<App>>,
    Query(StatsQuery { period }): Query<StatsQuery>,
) -> Result<Response, ApiError> {
    let period = match period.as_deref() {
        None | Some("day") => Period::Day,
        Some("h") => Period::Hour,
        Some("min") => Period::Minute,
        Some(_) => return Err(ApiError::bad("period", "must be min, h or day")),
    };
    let memory = reader.memory(&app).await?;
    app.collected().await;
    let (penalties, now) = (app.desk.active_penalties(), app.desk.now());
    let mut stats = lock(&app.signals.tops).stats(period, penalties, now);
    app.desk.add_failed_logins(&mut stats, period, now);
    memory.json(&app, &stats)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::{Value, json};

    use super::super::test_server::TestServer;

    const POLICY: &str = "
        [identity]
        log_identifiers = true
        [ladders.l]
        rungs = ['warn', 'shadow + deny', 'ban 1h']
        [[rule]]
        name = 'tenant'
        layer = 'tenant'
        per = ['tenant']
        limit = '2/h'
        on_missing = 'skip'
        [[rule]]
        name = 'user'
        layer = 'user'
        per = ['user']
        limit = '1/h'
        ladder = 'l'
        strike = 'request'
        on_missing = 'skip'
    ";

    /// Woken by leaving out `collected`, or `tops.add` in `collect`.
    #[test]
    fn statistics_show_what_was_blocked_before_the_call() {
        let mut server = TestServer::new();
        server.load(POLICY, &BTreeMap::new(), true).unwrap();
        let check = |server: &mut TestServer, body: &Value| {
            server.client().send("POST", "/v1/check", &[], &body.to_string()).unwrap().json()
        };
        for _ in 0..5 {
            check(&mut server, &json!({"tenant": "acme", "ip": "203.0.113.7"}));
        }
        for _ in 0..4 {
            check(&mut server, &json!({"user": "u1", "ip": "203.0.113.8", "endpoint": "GET:/a"}));
        }
        // A peek stops nobody.
        server.client().send("POST", "/v1/peek", &[], r#"{"tenant": "acme"}"#).unwrap();
        let get = |server: &mut TestServer, path: &str| server.client().send("GET", path, &[], "").unwrap();
        let expected = json!({
            "edgeBlocks": 0, "tenantBlocks": 3, "userBlocks": 2, "endpointBlocks": 0, "otherBlocks": 0,
            "warningsIssued": 1, "shadowBansActive": 1, "bansActive": 1,
            "topBlockedTenants": [{"tenant": "acme", "blocks": 3, "error": 0}],
            "topBlockedEndpoints": [{"endpoint": "GET:/a", "blocks": 2, "error": 0}],
            "topBlockedIps": [{"ip": "203.0.113.7", "blocks": 3, "error": 0}, {"ip": "203.0.113.8", "blocks": 2, "error": 0}],
            "topBlockedUsers": [{"user": "u1", "blocks": 2, "error": 0}],
            "topFailedLoginIps": [], "topFailedLoginAccounts": [],
        });
        for query in ["", "?period=day", "?period=h", "?period=min"] {
            assert_eq!(get(&mut server, &format!("/v1/stats{query}")).json(), expected, "{query}");
        }
        for (query, field) in [("?period=week", "period"), ("?since=1", "since")] {
            let refused = get(&mut server, &format!("/v1/stats{query}"));
            assert_eq!((refused.status, &refused.json()["field"]), (400, &json!(field)), "{query}");
        }
        // The user is forgiven, and is no longer banned.
        server.client().send("DELETE", "/v1/subjects/user/u1", &[], "").unwrap();
        let after = get(&mut server, "/v1/stats").json();
        assert_eq!((&after["bansActive"], &after["shadowBansActive"]), (&json!(0), &json!(0)));
        // Its events are erased, and its name with them.
        assert_eq!(server.client().send("DELETE", "/v1/events?userId=u1", &[], "").unwrap().status, 200);
        let erased = get(&mut server, "/v1/stats").json();
        assert_eq!((&erased["topBlockedUsers"], &erased["userBlocks"]), (&json!([]), &json!(2)));
        // A user at an address is one subject, and others may have the address.
        let path = "/v1/events?userId=u9&ip=203.0.113.7";
        assert_eq!(server.client().send("DELETE", path, &[], "").unwrap().status, 200);
        assert_eq!(get(&mut server, "/v1/stats").json()["topBlockedIps"], expected["topBlockedIps"]);
        // Nor has a user anything to do with the address that it is named like.
        let path = "/v1/events?userId=203.0.113.7";
        assert_eq!(server.client().send("DELETE", path, &[], "").unwrap().status, 200);
        assert_eq!(get(&mut server, "/v1/stats").json()["topBlockedIps"], expected["topBlockedIps"]);
        let path = "/v1/events?ip=203.0.113.7&tenant=acme";
        assert_eq!(server.client().send("DELETE", path, &[], "").unwrap().status, 200);
        let erased = get(&mut server, "/v1/stats").json();
        assert_eq!(erased["topBlockedIps"], json!([{"ip": "203.0.113.8", "blocks": 2, "error": 0}]));
        assert_eq!(erased["topBlockedTenants"], expected["topBlockedTenants"]);
    }

    const LOGIN: &str = "
        identity = { log_identifiers = true }
        [login]
        account = '50/h'
        ip = '3/h'
        locks = { 40 = '1min' }
    ";

    /// 130 wrong passwords from 12 addresses left nothing for an operator to look at, and a refused login counted as one of the account's
    /// owner, whom an operator then banned.
    ///
    /// Woken by leaving out `count_failure` for results or for refusals, the filter by `is_login`, and each part of the erasure.
    #[test]
    fn failed_and_refused_logins_are_listed_by_address_and_account_and_not_as_blocks_of_the_user() {
        let mut server = TestServer::new();
        server.load(LOGIN, &BTreeMap::new(), true).unwrap();
        let call = |server: &mut TestServer, method: &str, path: &str, body: &Value| {
            let body = if body.is_null() { String::new() } else { body.to_string() };
            server.client().send(method, path, &[], &body).unwrap()
        };
        let attempt = |server: &mut TestServer, account: &str, ip: &str, success: bool| {
            let body = json!({"account": account, "ip": ip});
            let answer = call(server, "POST", "/v1/login/attempt", &body);
            if answer.status == 200 {
                let body = json!({"attempt": answer.json()["attempt"], "success": success});
                assert_eq!(call(server, "POST", "/v1/login/result", &body).status, 200);
            }
            answer.status
        };
        for account in ["Ada", "bob"] {
            assert_eq!(attempt(&mut server, account, "2001:db8::7", false), 200);
        }
        assert_eq!(attempt(&mut server, "bob", "2001:db8::8", true), 200, "a success is no failure");
        for status in [200, 200, 200, 429, 429] {
            assert_eq!(attempt(&mut server, "ada ", "203.0.113.7", false), status);
        }
        let stats = |server: &mut TestServer| call(server, "GET", "/v1/stats", &Value::Null).json();
        let shown = stats(&mut server);
        let ip = |ip: &str, failures: u32| json!({"ip": ip, "failures": failures, "error": 0});
        assert_eq!(shown["topFailedLoginIps"], json!([ip("203.0.113.7", 5), ip("2001:db8::/64", 2)]));
        let account = |name: &str, failures: u32| json!({"account": name, "failures": failures, "error": 0});
        assert_eq!(shown["topFailedLoginAccounts"], json!([account("ada", 6), account("bob", 1)]));
        assert_eq!(shown["topBlockedUsers"], json!([]), "anyone can type the name of a user");
        assert_eq!(shown["topBlockedIps"], json!([{"ip": "203.0.113.7", "blocks": 2, "error": 0}]));
        assert_eq!(shown["topBlockedEndpoints"], json!([{"endpoint": "login", "blocks": 2, "error": 0}]));
        // The subject says so too, and is forgiven.
        let path = "/v1/subjects/edge/203.0.113.7";
        let budget = |server: &mut TestServer| call(server, "GET", path, &Value::Null).json()["budgets"][0].clone();
        let full = budget(&mut server);
        assert_eq!(
            (&full["rule"], &full["used"], &full["limit"]),
            (&json!("[login] ip"), &json!(3), &json!(3)),
            "{full}"
        );
        assert_eq!(call(&mut server, "DELETE", path, &Value::Null).status, 200);
        assert_eq!(budget(&mut server)["used"], 0);
        assert_eq!(attempt(&mut server, "ada", "203.0.113.7", false), 200);
        let user = call(&mut server, "GET", "/v1/subjects/user/ada", &Value::Null).json();
        assert_eq!(user["failures"], 5, "{user}");
        // An erasure of another spelling erases the refused logins of the account, and its names in the lists.
        assert_eq!(call(&mut server, "DELETE", "/v1/events?userId=ADA", &Value::Null).json()["erased"], 2);
        assert_eq!(call(&mut server, "DELETE", "/v1/events?ip=203.0.113.7", &Value::Null).status, 200);
        let erased = stats(&mut server);
        assert_eq!(erased["topFailedLoginIps"], json!([ip("2001:db8::/64", 2)]));
        assert_eq!(erased["topFailedLoginAccounts"], json!([account("bob", 1)]));
    }

    /// An erasure of `E\u{200b}VE` erased the events of the user `eve`, because the login of that name is the same account.
    ///
    /// Woken by `accounts` among `values`.
    #[test]
    fn an_erasure_by_a_name_leaves_the_requests_of_a_user_whose_name_is_its_normal_form() {
        let mut server = TestServer::new();
        server.load(POLICY, &BTreeMap::new(), true).unwrap();
        for _ in 0..4 {
            server.client().send("POST", "/v1/check", &[], r#"{"user":"eve"}"#).unwrap();
        }
        let erase = |server: &mut TestServer, name: &str| {
            let path = format!("/v1/events?userId={name}");
            server.client().send("DELETE", &path, &[], "").unwrap().json()["erased"].as_u64().unwrap()
        };
        assert_eq!(erase(&mut server, "E%E2%80%8BVE"), 0);
        assert!(erase(&mut server, "eve") > 0);
    }
}
