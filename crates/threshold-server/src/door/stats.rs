//! `/v1/stats`: what was blocked in the last minute, hour or day, and the penalties in force.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use serde::Deserialize;
use serde_json::json;

use super::admin::{Reader, operator_call};
use super::openapi::{Operation, Schemas};
use super::query::Query;
use super::routes::{Route, get};
use super::{ApiError, App, json};
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
    _: Reader,
    State(app): State<Arc<App>>,
    Query(StatsQuery { period }): Query<StatsQuery>,
) -> Result<Response, ApiError> {
    let period = match period.as_deref() {
        None | Some("day") => Period::Day,
        Some("h") => Period::Hour,
        Some("min") => Period::Minute,
        Some(_) => return Err(ApiError::bad("period", "must be min, h or day")),
    };
    app.collected().await;
    let (penalties, now) = (app.desk.active_penalties(), app.desk.now());
    let stats = lock(&app.signals.tops).stats(period, penalties, now);
    Ok(json(StatusCode::OK, &stats))
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
}
