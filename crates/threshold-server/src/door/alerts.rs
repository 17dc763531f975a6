//! `/v1/alerts`: what was told about alerts, and which are raised.

use std::sync::{Arc, PoisonError};

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::json;

use super::admin::{Reader, operator_call};
use super::openapi::{Operation, Schemas};
use super::query::Query;
use super::routes::{Route, get};
use super::{ApiError, App, json_bytes};

/// A change of an alert, as [`Notice::to_json`](crate::signals::alerts::Notice::to_json) writes it.
#[derive(JsonSchema)]
#[schemars(rename = "AlertNotice", rename_all = "camelCase")]
#[expect(dead_code, reason = "only its schema is used: core writes the JSON, for the log and webhooks too")]
struct NoticeBody {
    #[schemars(extend("const" = "alert"))]
    event: String,
    #[schemars(extend("enum" = ["edge_blocks", "tenant_blocks", "user_bans", "ip_blocks"]))]
    alert: String,
    #[schemars(extend("enum" = ["raised", "resolved"]))]
    state: String,
    /// The highest level of the episode so far.
    #[schemars(extend("enum" = ["warning", "critical"]))]
    level: String,
    /// The address, of `ip_blocks`.
    key: Option<String>,
    /// The count that was judged.
    count: u64,
    /// The threshold of its level.
    threshold: u64,
    /// The period, in seconds.
    period_sec: u64,
    /// When the episode began, in Unix milliseconds.
    since: u64,
    /// When this was noticed, in Unix milliseconds.
    at: u64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct AlertsQuery {
    state: Option<String>,
}

pub(super) fn routes() -> Vec<Route> {
    vec![get("/v1/alerts", list, describe)]
}

fn describe(schemas: &mut Schemas) -> Operation {
    let notices = json!({"type": "array", "items": schemas.of::<NoticeBody>(), "maxItems": 200});
    let state = json!({
        "name": "state",
        "in": "query",
        "description": "`raised`: the alerts that are raised now, in place of the last 100 notices",
        "schema": {"type": "string", "enum": ["raised"]},
    });
    operator_call("alerts", "List the last 100 notices of alerts, the newest first", &notices).parameter(state)
}

async fn list(
    _: Reader,
    State(app): State<Arc<App>>,
    Query(AlertsQuery { state }): Query<AlertsQuery>,
) -> Result<Response, ApiError> {
    app.collected().await;
    let book = app.signals.alerts.lock().unwrap_or_else(PoisonError::into_inner);
    let notices: Vec<String> = match state.as_deref() {
        None => book.recent().map(|notice| notice.to_json()).collect(),
        Some("raised") => book.raised().map(|notice| notice.to_json()).collect(),
        Some(_) => return Err(ApiError::bad("state", "state must be raised, or left out")),
    };
    drop(book);
    Ok(json_bytes(StatusCode::OK, format!("[{}]", notices.join(","))))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::Value;
    use threshold_core::{Event, Policy, Timestamp};

    use super::super::test_server::TestServer;
    use super::super::test_server::client::Answer;

    const POLICY: &str = "[[rule]]\nname = 'all'\nper = ['ip']\nlimit = '1/min'";

    fn policy() -> Policy {
        Policy::parse(POLICY, &|_| None).unwrap()
    }

    fn get(server: &mut TestServer, path: &str) -> Answer {
        server.client().send("GET", path, &[], "").unwrap()
    }

    #[test]
    fn notices_are_listed_newest_first_and_raised_ones_alone() {
        let mut server = TestServer::new();
        server.load(POLICY, &BTreeMap::new(), true).unwrap();
        assert_eq!(get(&mut server, "/v1/alerts").body, "[]");
        let app = server.app();
        let now = Timestamp::from_secs(1_767_225_600);
        let id = "00000000-0000-4000-8000-000000000001";
        let event = format!(
            r#"{{"id":"{id}","at":1767225600000,"blocked":true,"layer":"edge","ip":"203.0.113.7","count":150}}"#
        );
        let event = Event::from_json(&event).unwrap();
        {
            let mut book = app.signals.alerts.lock().unwrap();
            book.add(&event, now);
            book.judge(&policy(), now);
        }
        let listed = |server: &mut TestServer, path: &str| -> Vec<(String, String, Value)> {
            let answer = get(server, path).json();
            let text = |notice: &Value, name: &str| notice[name].as_str().unwrap().to_owned();
            let notices = answer.as_array().unwrap().iter();
            notices.map(|notice| (text(notice, "alert"), text(notice, "state"), notice["key"].clone())).collect()
        };
        let expect = |on: &str, state: &str, key: Value| (on.to_owned(), state.to_owned(), key);
        let raised =
            [expect("edge_blocks", "raised", Value::Null), expect("ip_blocks", "raised", "203.0.113.7".into())];
        assert_eq!(listed(&mut server, "/v1/alerts?state=raised"), raised);
        app.signals.alerts.lock().unwrap().judge(&policy(), Timestamp::from_secs(1_767_225_600 + 121));
        assert_eq!(listed(&mut server, "/v1/alerts?state=raised"), []);
        let all = listed(&mut server, "/v1/alerts");
        assert_eq!(all.len(), 4);
        assert_eq!(all[0], expect("ip_blocks", "resolved", "203.0.113.7".into()));
        assert_eq!(get(&mut server, "/v1/alerts?state=over").status, 400);
    }
}
