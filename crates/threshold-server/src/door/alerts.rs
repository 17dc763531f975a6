//! `/v1/alerts`: what was told about alerts, which are raised, and a test message.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::admin::{Operator, Reader, change, operator_call};
use super::openapi::{Operation, Schemas};
use super::query::Query;
use super::routes::{Route, get, post};
use super::{ApiError, App, json};
use crate::signals::alerts::Notice;
use crate::signals::lock;
use crate::signals::sinks::Tested;

/// A change of an alert, as [`Notice::to_json`] writes it.
#[derive(JsonSchema)]
#[schemars(rename = "AlertNotice", rename_all = "camelCase")]
#[expect(dead_code, reason = "only its schema is used: core writes the JSON, for the log and webhooks too")]
struct NoticeBody {
    #[schemars(extend("const" = "alert"))]
    event: String,
    /// `test` in the message of `POST /v1/alerts/test`, and in no other.
    #[schemars(extend("enum" = ["edge_blocks", "tenant_blocks", "user_bans", "ip_blocks", "test"]))]
    alert: String,
    #[schemars(extend("enum" = ["raised", "resolved"]))]
    state: String,
    /// The highest level of the episode so far.
    #[schemars(extend("enum" = ["warning", "critical"]))]
    level: String,
    /// The address, of `ip_blocks`; null if it is about several.
    key: Option<String>,
    /// The count that was judged; of an alert that is raised, that of the last period. Of several addresses, that of the largest.
    count: u64,
    /// The threshold of its level.
    threshold: u64,
    /// The period, in seconds.
    period_sec: u64,
    /// When the episode began, in Unix milliseconds.
    since: u64,
    /// When this was noticed, in Unix milliseconds.
    at: u64,
    /// The highest count of the episode so far.
    peak: u64,
    /// The name of the server on which the episode began.
    node: String,
    /// Where to read what to do.
    runbook: String,
    /// The cause of at least half of what was counted, as in events.
    cause: Option<String>,
    /// The rule of at least half of what was counted.
    rule: Option<String>,
    /// The most addresses at once, of an alert about several.
    addresses: Option<u64>,
    /// The one of these with the most blocks.
    largest: Option<String>,
}

/// What became of a test message.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "AlertTest")]
struct TestBody {
    /// Each receiver of alerts.
    receivers: Vec<TestedBody>,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "TestedReceiver")]
struct TestedBody {
    /// Its kind and its number of that kind, and the scheme and host of its URL: `slack-1 https://hooks.slack.com`.
    name: String,
    /// Whether it has accepted the message.
    ok: bool,
    /// Why not.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct AlertsQuery {
    state: Option<String>,
}

/// The query of a call that takes none.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct NoQuery {}

pub(super) fn routes() -> Vec<Route> {
    vec![get("/v1/alerts", list, describe), post("/v1/alerts/test", test, describe_test)]
}

fn describe(schemas: &mut Schemas) -> Operation {
    let notices = json!({"type": "array", "items": schemas.of::<NoticeBody>(), "maxItems": 200});
    let state = json!({
        "name": "state",
        "in": "query",
        "description": "`raised`: the alerts that are raised, with their present count, in place of the last 100 notices",
        "schema": {"type": "string", "enum": ["raised"]},
    });
    operator_call("alerts", "List the last 100 notices of alerts, the newest first", &notices).parameter(state)
}

fn describe_test(schemas: &mut Schemas) -> Operation {
    let summary = "Send a test message to every receiver of alerts, once";
    change("testAlerts", summary, &schemas.of::<TestBody>())
        .errors(&[(503, "Another test is being sent (`busy`), or the test cannot be recorded in the audit")])
}

/// Sends a test message. It takes as long as the slowest receiver, at most 20 seconds.
async fn test(
    operator: Operator,
    State(app): State<Arc<App>>,
    Query(NoQuery {}): Query<NoQuery>,
) -> Result<Response, ApiError> {
    let busy = || ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "busy", "another test is being sent; try again");
    app.desk.audit_alert_test(&operator.0).await?;
    let tested = tokio::task::spawn_blocking(move || app.signals.sinks.test(app.desk.now())).await;
    let tested = tested.ok().flatten().ok_or_else(busy)?;
    let receivers = tested.into_iter().map(|Tested { name, result }| TestedBody {
        name: name.to_string(),
        ok: result.is_ok(),
        error: result.err(),
    });
    Ok(json(StatusCode::OK, &TestBody { receivers: receivers.collect() }))
}

async fn list(
    reader: Reader,
    State(app): State<Arc<App>>,
    Query(AlertsQuery { state }): Query<AlertsQuery>,
) -> Result<Response, ApiError> {
    let memory = reader.memory(&app).await?;
    app.collected().await;
    let to_json = |notice: &Notice| notice.to_json(&app.signals.sinks.node);
    let book = lock(&app.signals.alerts);
    let notices: Vec<String> = match state.as_deref() {
        None => book.recent().map(to_json).collect(),
        Some("raised") => book.raised().map(to_json).collect(),
        Some(_) => return Err(ApiError::bad("state", "state must be raised, or left out")),
    };
    drop(book);
    memory.text(&app, format!("[{}]", notices.join(",")))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::Value;
    use threshold_core::Timestamp;

    use super::super::test_server::TestServer;
    use super::super::test_server::client::Answer;

    const POLICY: &str = r#"
        identity = { log_identifiers = true }
        [[rule]]
        name = "all"
        layer = "edge"
        per = ["ip"]
        limit = "1/min"
        [alerts]
        edge_blocks = { per = "min", warning = 20, critical = 30 }
    "#;

    fn get(server: &mut TestServer, path: &str) -> Answer {
        server.client().send("GET", path, &[], "").unwrap()
    }

    fn listed(server: &mut TestServer, path: &str) -> Vec<String> {
        let notices = get(server, path).json();
        let text = |notice: &Value, name: &str| notice[name].as_str().unwrap_or_default().to_owned();
        let words = |notice| ["alert", "state", "level", "key"].map(|name| text(notice, name)).join(" ");
        notices.as_array().unwrap().iter().map(words).collect()
    }

    #[test]
    fn notices_are_listed_newest_first_and_raised_ones_alone() {
        let mut server = TestServer::new();
        server.load(POLICY, &BTreeMap::new(), true).unwrap();
        server.set_time(Timestamp::from_secs(1_767_225_600));
        let ask = |server: &mut TestServer, times: usize| {
            (0..times).for_each(|_| drop(server.client().post("/v1/check", r#"{"ip":"203.0.113.7"}"#).unwrap()));
        };
        ask(&mut server, 20);
        assert_eq!(get(&mut server, "/v1/alerts").body, "[]");
        ask(&mut server, 1);
        let raised = ["edge_blocks raised warning ", "ip_blocks raised warning 203.0.113.7"];
        assert_eq!(listed(&mut server, "/v1/alerts?state=raised"), raised);
        ask(&mut server, 10);
        let risen = ["edge_blocks raised critical ", "ip_blocks raised warning 203.0.113.7"];
        assert_eq!(listed(&mut server, "/v1/alerts?state=raised"), risen);
        server.set_time(Timestamp::from_secs(1_767_225_600 + 121));
        assert_eq!(listed(&mut server, "/v1/alerts?state=raised"), [""; 0]);
        let all = [
            "ip_blocks resolved warning 203.0.113.7",
            "edge_blocks resolved critical ",
            "edge_blocks raised critical ",
            "ip_blocks raised warning 203.0.113.7",
            "edge_blocks raised warning ",
        ];
        assert_eq!(listed(&mut server, "/v1/alerts"), all);
        assert_eq!(get(&mut server, "/v1/alerts?state=over").status, 400);
    }

    /// The thresholds that a policy has without `[alerts]`: 100, 50 and 20 blocks a minute, 10 bans an hour.
    #[test]
    fn each_alert_is_raised_and_resolved_once() {
        let policy = r#"
            identity = { log_identifiers = true }
            [ladders.quick]
            rungs = ["ban 24h"]
            [[rule]]
            name = "edge"
            layer = "edge"
            per = ["ip"]
            match = { path = "/edge" }
            limit = "none"
            [[rule]]
            name = "tenant"
            layer = "tenant"
            per = ["tenant"]
            match = { path = "/tenant" }
            limit = "none"
            [[rule]]
            name = "user"
            layer = "user"
            per = ["user"]
            match = { path = "/user" }
            limit = "1/h"
            ladder = "quick"
        "#;
        let mut server = TestServer::new();
        server.load(policy, &BTreeMap::new(), true).unwrap();
        let start = Timestamp::from_secs(1_767_225_600);
        server.set_time(start);
        let mut ask = |path: &str, caller: &dyn Fn(u32) -> String, times: u32| {
            let items: Vec<_> = (0..times).map(|number| format!(r#"{{"path":"{path}",{}}}"#, caller(number))).collect();
            drop(server.client().post("/v1/check", &format!("[{}]", items.join(","))).unwrap());
            // Looked at in between, as a server does, so that nothing depends on how the events are grouped.
            listed(&mut server, "/v1/alerts?state=raised")
        };
        let of_ip = |number: u32| format!(r#""ip":"203.0.113.{number}""#);
        assert_eq!(ask("/edge", &of_ip, 99), [""; 0]);
        assert_eq!(ask("/edge", &of_ip, 1), ["edge_blocks raised warning "]);
        assert_eq!(ask("/edge", &of_ip, 50), ["edge_blocks raised warning "]);
        ask("/tenant", &|_| r#""tenant":"acme""#.to_owned(), 49);
        let both = ["edge_blocks raised warning ", "tenant_blocks raised warning "];
        assert_eq!(ask("/tenant", &|_| r#""tenant":"acme""#.to_owned(), 1), both);
        let one = |_| r#""ip":"198.51.100.7""#.to_owned();
        ask("/edge", &one, 20);
        let of_user = |number: u32| format!(r#""user":"u{}""#, number / 2);
        assert!(!ask("/user", &of_user, 18).contains(&"user_bans raised warning ".to_owned()));
        let all = ask("/user", &|number| format!(r#""user":"v{}""#, number / 2), 2);
        let (mut raised, mut expect) = (
            all.clone(),
            [
                "edge_blocks raised warning ",
                "tenant_blocks raised warning ",
                "user_bans raised warning ",
                "ip_blocks raised warning 198.51.100.7",
            ],
        );
        raised.sort_unstable();
        expect.sort_unstable();
        assert_eq!(raised, expect);
        server.set_time(start.plus(threshold_core::Span::from_secs(121)));
        assert_eq!(listed(&mut server, "/v1/alerts?state=raised"), ["user_bans raised warning "]);
        server.set_time(start.plus(threshold_core::Span::from_secs(3_661)));
        assert_eq!(listed(&mut server, "/v1/alerts?state=raised"), [""; 0]);
        let mut told = listed(&mut server, "/v1/alerts");
        told.sort_unstable();
        let mut once: Vec<String> = expect.iter().map(|raised| (*raised).to_owned()).collect();
        once.extend(expect.iter().map(|raised| raised.replace("raised", "resolved")));
        once.sort_unstable();
        assert_eq!(told, once);
    }
}
