//! `/v1/usage`: what is left of the limits of one caller, so that a product can show its customers their own quota.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::HeaderMap;
use http::header::AUTHORIZATION;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use threshold_core::address::parse_address;
use threshold_core::explain::Why;
use threshold_core::policy::{CostOf, Mode};
use threshold_core::{Facts, Timestamp};

use super::admin::memory_of;
use super::json_body::CallerOrReader;
use super::openapi::{LONG_QUERY, Operation, Schemas};
use super::query::Query;
use super::routes::{Route, get};
use super::{ApiError, App};
use crate::desk::LimitUsage;

/// The parameters. They are facts of [`/v1/check`](super::http), and an empty one is absent as there.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct UsageQuery {
    tenant: Option<String>,
    user: Option<String>,
    ip: Option<String>,
    tier: Option<String>,
    endpoint: Option<String>,
    category: Option<String>,
    method: Option<String>,
    path: Option<String>,
    host: Option<String>,
}

/// What is left of the limits of one caller.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Usage")]
struct UsageBody {
    limits: Vec<LimitBody>,
}

/// What is left of one limit.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "LimitUsage")]
struct LimitBody {
    rule: String,
    layer: &'static str,
    /// `enforce`, or `observe` for a limit that denies nobody.
    #[schemars(extend("enum" = ["enforce", "observe"]))]
    mode: &'static str,
    /// The category of requests that it is for, where the rule has a limit for each.
    category: Option<String>,
    /// What it counts: `requests`, `bytes`, or the name of a cost.
    counts: String,
    limit: u64,
    remaining: u64,
    /// When there is more, or all, again, in Unix seconds; null if the algorithm has no such time.
    reset_at: Option<u64>,
    /// The limit in words: `10 per hour`.
    period: String,
    /// Why the rule denies all requests of a caller that has no tier of the policy; null if it counts them.
    why: Option<String>,
}

pub(super) fn routes() -> Vec<Route> {
    vec![get("/v1/usage", show, describe)]
}

fn describe(schemas: &mut Schemas) -> Operation {
    let summary = "Return what is left of each limit of one caller";
    let operation = Operation::call("usage", summary, &schemas.of::<UsageBody>())
        .errors(&[LONG_QUERY, (503, "The store cannot answer")]);
    ["tenant", "user", "ip", "tier", "endpoint", "category", "method", "path", "host"]
        .into_iter()
        .fold(operation, |operation, name| {
            operation.parameter(json!({"name": name, "in": "query", "schema": {"type": "string"}}))
        })
}

async fn show(
    _: CallerOrReader,
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    Query(query): Query<UsageQuery>,
) -> Result<Response, ApiError> {
    let memory = memory_of(headers.get(AUTHORIZATION), &app).await?;
    let policy = app.desk.policy();
    let usage = app.desk.usage(&policy, &query.facts()?).await?;
    let limits = usage.into_iter().map(LimitBody::from).collect();
    memory.json(&app, &UsageBody { limits })
}

impl UsageQuery {
    fn facts(&self) -> Result<Facts<'_>, ApiError> {
        let Self { tenant, user, ip, tier, endpoint, category, method, path, host } = self;
        let [tenant, user, ip, tier, endpoint, category, method, path, host] =
            [tenant, user, ip, tier, endpoint, category, method, path, host]
                .map(|text| text.as_deref().filter(|text| !text.is_empty()));
        if tenant.is_none() && user.is_none() && ip.is_none() {
            return Err(ApiError::bad("user", "name the caller: tenant, user or ip, or several of them"));
        }
        let address = |text: &str| {
            let invalid = || ApiError::bad("ip", format!("\"{}\" is not an address", text.escape_debug()));
            parse_address(text).ok_or_else(invalid)
        };
        let ip = ip.map(address).transpose()?;
        Ok(Facts { tenant, user, ip, tier, endpoint, category, method, path, host, ..Facts::default() })
    }
}

impl From<LimitUsage<'_>> for LimitBody {
    fn from(LimitUsage { limit, remaining, reset_at }: LimitUsage<'_>) -> Self {
        Self {
            rule: limit.rule.name.to_string(),
            layer: limit.rule.layer.name(),
            mode: match limit.rule.mode {
                Mode::Enforce => "enforce",
                Mode::Observe => "observe",
            },
            category: limit.category.clone(),
            counts: match limit.cost_of {
                CostOf::Requests => "requests".to_owned(),
                CostOf::Bytes => "bytes".to_owned(),
                CostOf::Named(name) => name.to_string(),
            },
            limit: limit.whole.shown_quota(),
            remaining,
            reset_at: reset_at.map(Timestamp::secs_ceil),
            period: limit.period(),
            why: (limit.why != Why::Met).then(|| limit.why.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::{Value, json};

    use super::super::test_server::TestServer;

    const POLICY: &str = "
        [identity]
        default_tier = 'seed'
        [tiers.seed]
        requests = '5/h'
        writes = '2/h'
        [tiers.oak]
        requests = '50/h'
        [[category]]
        name = 'writes'
        method = 'POST'
        [[rule]]
        name = 'all'
        layer = 'global'
        per = []
        limit = '1000/h'
        [[rule]]
        name = 'tier'
        layer = 'tenant'
        per = ['tenant']
        limit = 'tier'
        algorithm = 'fixed-window'
        [[rule]]
        name = 'posts'
        layer = 'user'
        match = { method = 'POST', path = '/posts/**' }
        per = ['user']
        limit = '10/h'
        mode = 'observe'
        on_missing = 'skip'
        [[rule]]
        name = 'tokens'
        layer = 'user'
        per = ['user']
        limit = '1000/day'
        cost = 'tokens'
        period = 'a thousand tokens a day'
        on_missing = 'skip'
    ";

    fn server() -> TestServer {
        let mut server = TestServer::new();
        server.load(POLICY, &BTreeMap::new(), true).unwrap();
        server
    }

    fn usage(server: &mut TestServer, query: &str) -> Vec<[Value; 4]> {
        let answer = server.client().send("GET", &format!("/v1/usage?{query}"), &[], "").unwrap();
        assert_eq!(answer.status, 200, "{}", answer.body);
        let limits = answer.json()["limits"].as_array().unwrap().clone();
        let fields = |limit: &Value| ["rule", "category", "limit", "remaining"].map(|name| limit[name].clone());
        limits.iter().map(fields).collect()
    }

    /// Woken by a cost of 1 in `Desk::usage`, and by keys that no request is charged on.
    #[test]
    fn usage_shows_what_requests_have_left_and_charges_nothing() {
        let mut server = server();
        let caller = "tenant=acme&user=u1";
        let full = [
            [json!("tier"), json!("requests"), json!(5), json!(5)],
            [json!("tier"), json!("writes"), json!(2), json!(2)],
            [json!("posts"), json!(null), json!(10), json!(10)],
            [json!("tokens"), json!(null), json!(1_000), json!(1_000)],
        ];
        for _ in 0..3 {
            assert_eq!(usage(&mut server, caller), full);
        }
        let post = json!({
            "tenant": "acme", "user": "u1", "method": "POST", "path": "/posts/1", "costs": {"tokens": 300},
        });
        let decision = server.client().send("POST", "/v1/check", &[], &post.to_string()).unwrap().json();
        assert_eq!(decision["allowed"], true, "{decision}");
        let spent = [
            [json!("tier"), json!("requests"), json!(5), json!(5)],
            [json!("tier"), json!("writes"), json!(2), json!(1)],
            [json!("posts"), json!(null), json!(10), json!(9)],
            [json!("tokens"), json!(null), json!(1_000), json!(700)],
        ];
        assert_eq!(usage(&mut server, caller), spent);
        assert_eq!(usage(&mut server, caller), spent);
        assert_eq!(usage(&mut server, "tenant=acme&user=u2")[2..], full[2..], "another user");
        assert_eq!(usage(&mut server, "tenant=other&user=u1")[..2], full[..2], "another tenant");
        // The figures are those of a check.
        let all = server.client().send("GET", &format!("/v1/usage?{caller}"), &[], "").unwrap().json();
        for reading in decision["limits"].as_array().unwrap() {
            let own = |limit: &&Value| limit["rule"] == reading["rule"] && limit["category"] != "requests";
            let Some(limit) = all["limits"].as_array().unwrap().iter().find(own) else {
                assert_eq!(reading["rule"], "all");
                continue;
            };
            for name in ["layer", "mode", "limit", "remaining", "resetAt"] {
                assert_eq!(limit[name], reading[name], "{name}: {limit} {reading}");
            }
        }
        let words = |place: usize| (all["limits"][place]["period"].clone(), all["limits"][place]["counts"].clone());
        assert_eq!(words(2), (json!("10 per hour"), json!("requests")));
        assert_eq!(words(3), (json!("a thousand tokens a day"), json!("tokens")));
    }

    #[test]
    fn usage_is_the_same_on_every_store() {
        for mut server in [TestServer::on_async_store(), TestServer::on_redis()] {
            server.load(POLICY, &BTreeMap::new(), true).unwrap();
            let left = |server: &mut TestServer| {
                usage(server, "tenant=acme&user=u1").into_iter().map(|[.., left]| left).collect::<Vec<_>>()
            };
            assert_eq!(left(&mut server), [5, 2, 10, 1_000]);
            let get = json!({"tenant": "acme", "user": "u1", "method": "GET", "costs": {"tokens": 1}}).to_string();
            server.client().send("POST", "/v1/check", &[], &get).unwrap();
            for _ in 0..2 {
                assert_eq!(left(&mut server), [4, 2, 10, 999]);
            }
        }
    }

    #[test]
    fn a_request_and_a_tier_choose_the_limits() {
        let mut server = server();
        let names = |limits: &[[Value; 4]]| {
            limits.iter().map(|[rule, _, limit, _]| format!("{} {limit}", rule.as_str().unwrap())).collect::<Vec<_>>()
        };
        assert_eq!(names(&usage(&mut server, "tenant=acme&tier=oak")), ["tier 50"]);
        let read = usage(&mut server, "tenant=acme&user=u1&method=GET&path=/posts/1");
        assert_eq!(names(&read), ["tier 5", "tokens 1000"]);
        assert_eq!(names(&usage(&mut server, "user=u1&tenant=")), ["posts 10", "tokens 1000"]);
    }

    #[test]
    fn a_question_about_nobody_is_refused() {
        let mut server = server();
        for (query, field) in
            [("", "user"), ("tier=oak", "user"), ("user=", "user"), ("ip=300.1.1.1", "ip"), ("name=u1", "name")]
        {
            let answer = server.client().send("GET", &format!("/v1/usage?{query}"), &[], "").unwrap();
            assert_eq!((answer.status, &answer.json()["field"]), (400, &json!(field)), "{query}");
        }
    }
}
