//! The JSON of facts and decisions, as the HTTP API and the cases write it.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::address::{Headers as _, parse_address};
use crate::decision::Decision;
use crate::explain::Explained;
use crate::facts::Facts;
use crate::key::TraceId;
use crate::limit::{Algorithm, Limit};
use crate::path::{PathError, is_method};
use crate::plan::PlanError;
use crate::policy::{CostOf, IdentitySource, Layer, Policy, Seen};

/// The facts of a request as written. Every field is optional, and unknown ones are errors.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct FactsBody {
    ip: Option<String>,
    host: Option<String>,
    tenant: Option<String>,
    user: Option<String>,
    tier: Option<String>,
    method: Option<String>,
    path: Option<String>,
    cost: Option<u64>,
    bytes: Option<u64>,
    costs: BTreeMap<String, u64>,
    facts: BTreeMap<String, String>,
    headers: BTreeMap<String, String>,
    endpoint: Option<String>,
    category: Option<String>,
    lines: Option<Vec<(String, String)>>,
    /// Whether a client's door is asked.
    #[serde(skip)]
    from_client: bool,
}

/// Whose header lines those of a case are.
const PEER: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

impl FactsBody {
    /// The facts of a client's call, with what the policy finds in `lines`: header fields as a peer on loopback sends
    /// them. Each character of a value is one byte, so that lines need not be UTF-8.
    ///
    /// # Errors
    /// Where a value has a character that is no byte.
    pub fn of_a_client(mut self, policy: &Policy) -> Result<Self, Value> {
        self.from_client = true;
        let Some(lines) = self.lines.take() else { return Ok(self) };
        let lines: Option<Vec<(&str, Vec<u8>)>> =
            lines.iter().map(|(name, value)| Some((name.as_str(), latin_1(value)?))).collect();
        let Some(lines) = lines else {
            return Err(error_json("bad_request", "a character of a line is one byte, up to U+00FF", "lines"));
        };
        let lines: Vec<(&str, &[u8])> = lines.iter().map(|(name, value)| (*name, value.as_slice())).collect();
        let identity = policy.identity();
        let seen = Seen {
            trusted: identity.address.trusts(PEER),
            headers: Some(&lines[..]),
            host: self.host.as_deref(),
            path: self.path.as_deref(),
            // No case signs a token.
            claims: None,
        };
        let find = |source: Option<&IdentitySource>| source.and_then(|source| source.find(&seen));
        let (tenant, user, tier) =
            (find(identity.tenant.as_ref()), find(identity.user.as_ref()), find(identity.tier.as_ref()));
        self.ip = Some(identity.address.resolve(PEER, &lines[..]).to_string());
        // Names in the facts are replaced, not completed: at a door a client cannot name itself beside its headers.
        (self.tenant, self.user, self.tier) = (tenant, user, tier);
        for name in policy.header_names() {
            // As doors do: of two lines neither counts, because nothing tells which of them the application reads.
            let mut values = lines[..].lines(name).map(std::str::from_utf8);
            if let (Some(Ok(value)), None) = (values.next(), values.next()) {
                self.headers.insert(name.to_string(), value.to_owned());
            }
        }
        Ok(self)
    }

    /// Hands the facts to `then`.
    ///
    /// # Errors
    /// As for [`read`](Self::read).
    pub fn with<T>(&self, trace: TraceId, then: impl FnOnce(&Facts<'_>) -> T) -> Result<T, Value> {
        Ok(then(&self.read()?.facts(trace)))
    }

    /// Reads the address and the lists of the facts.
    ///
    /// # Errors
    /// Where the address or the method is none, and where there are [lines](Self::of_a_client) that nobody has read; with the
    /// field.
    pub fn read(&self) -> Result<FactsRead<'_>, Value> {
        if self.lines.is_some() {
            return Err(error_json("bad_request", "lines belong to a client's call", "lines"));
        }
        let ip = match self.ip.as_deref().map(|text| (text, parse_address(text))) {
            None => None,
            Some((_, Some(ip))) => Some(ip),
            Some((text, None)) => {
                return Err(error_json("bad_request", &format!("\"{text}\" is not an address"), "ip"));
            }
        };
        // For every fact an empty text counts as none.
        if let Some(method) = self.method.as_deref().filter(|text| !text.is_empty() && !is_method(text)) {
            return Err(error_json("bad_request", &format!("\"{method}\" is not a method"), "method"));
        }
        let costs = self.costs.iter().map(|(name, cost)| (name.as_str(), *cost)).collect();
        Ok(FactsRead { body: self, ip, facts: pairs(&self.facts), headers: pairs(&self.headers), costs })
    }
}

fn pairs(map: &BTreeMap<String, String>) -> Vec<(&str, &str)> {
    map.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect()
}

/// The facts of a [`FactsBody`], for callers that await what they do with them.
#[derive(Debug)]
pub struct FactsRead<'b> {
    body: &'b FactsBody,
    ip: Option<IpAddr>,
    facts: Vec<(&'b str, &'b str)>,
    headers: Vec<(&'b str, &'b str)>,
    costs: Vec<(&'b str, u64)>,
}

impl FactsRead<'_> {
    /// Returns the facts, with this trace id.
    #[must_use]
    pub fn facts(&self, trace: TraceId) -> Facts<'_> {
        Facts {
            ip: self.ip,
            host: self.body.host.as_deref(),
            method: self.body.method.as_deref(),
            path: self.body.path.as_deref(),
            route: None,
            from_client: self.body.from_client,
            tenant: self.body.tenant.as_deref(),
            user: self.body.user.as_deref(),
            tier: self.body.tier.as_deref(),
            category: self.body.category.as_deref(),
            endpoint: self.body.endpoint.as_deref(),
            facts: &self.facts,
            headers: &self.headers,
            cost: self.body.cost,
            bytes: self.body.bytes,
            costs: &self.costs,
            trace,
        }
    }
}

/// A text as bytes, one for each character; `None` if a character is none.
#[must_use]
pub fn latin_1(text: &str) -> Option<Vec<u8>> {
    text.chars().map(|character| u8::try_from(character).ok()).collect()
}

/// An error of the API.
#[must_use]
pub fn error_json(error: &str, message: &str, field: &str) -> Value {
    json!({"error": error, "message": message, "field": field})
}

/// The error of the API for a request that cannot be planned.
#[must_use]
pub fn plan_error_json(error: &PlanError) -> Value {
    let (name, field) = match error {
        PlanError::CostExceedsLimit { cost_of, .. } => (
            "cost_exceeds_limit",
            match cost_of {
                CostOf::Requests => "cost".to_owned(),
                CostOf::Bytes => "bytes".to_owned(),
                CostOf::Named(name) => format!("costs.{name}"),
            },
        ),
        PlanError::Missing { field, .. } => ("bad_request", field.clone()),
        PlanError::TooManyRules => ("too_many_rules", String::new()),
        PlanError::Path(_) => ("bad_request", "path".to_owned()),
    };
    error_json(name, &error.to_string(), &field)
}

/// What a client reads whose path is not matched.
#[must_use]
pub fn path_error_json(error: PathError) -> Value {
    let status = if error == PathError::TooLong { 414 } else { 400 };
    json!({"allowed": false, "status": status, "error": "bad_request", "field": "path", "message": error.to_string()})
}

/// A decision as the API writes it.
#[must_use]
pub fn decision_json(decision: &Decision, policy: &Policy, receipt: Option<&str>) -> Value {
    let rule = decision.rule(policy);
    let reading = decision.bound_by();
    let wait = decision.retry_span();
    let limits: Vec<Value> = decision
        .readings
        .iter()
        .map(|reading| {
            let rule = policy.rules().get(reading.rule());
            let wait = reading.ready_at().map(|ready| ready.since(decision.at));
            let mut limit = Map::new();
            limit.insert("rule".to_owned(), json!(rule.map(|rule| rule.name.as_ref())));
            limit.insert("layer".to_owned(), json!(rule.map(|rule| rule.layer.name())));
            limit.insert("mode".to_owned(), json!(if reading.enforced { "enforce" } else { "observe" }));
            limit.insert("allowed".to_owned(), json!(reading.allowed));
            limit.insert("limit".to_owned(), json!(reading.limit));
            limit.insert("remaining".to_owned(), json!(reading.remaining));
            limit.insert("resetAt".to_owned(), json!(reading.reset_at(decision.at)));
            limit.insert("retryAfter".to_owned(), json!(wait.map(crate::time::Span::secs_ceil)));
            Value::Object(limit)
        })
        .collect();
    json!({
        "allowed": decision.allowed(),
        "verdict": decision.verdict.name(),
        "rule": rule.map(|rule| rule.name.as_ref()),
        "layer": rule.map(|rule| rule.layer).or(decision.penalty_layer()).map(Layer::name),
        "limit": reading.map(|reading| reading.limit),
        "remaining": reading.map(|reading| reading.remaining),
        "resetAt": decision.reset_at(),
        "retryAfter": wait.map(crate::time::Span::secs_ceil),
        "retryAfterMs": wait.map(crate::time::Span::millis_ceil),
        "delayMs": decision.delay.millis_ceil(),
        "warning": decision.warning,
        "banned": decision.banned(),
        "degraded": decision.degraded.is_some(),
        "degradedReason": decision.degraded.map(crate::decision::Degraded::name),
        "receipt": receipt,
        "traceId": decision.trace.to_string(),
        "limits": limits,
    })
}

/// The rules a request meets or not, as the API writes them.
#[must_use]
pub fn explained_json(explained: &[Explained<'_>]) -> Value {
    let rule = |explained: &Explained<'_>| {
        json!({
            "rule": explained.rule.name.as_ref(),
            "layer": explained.rule.layer.name(),
            "matched": explained.limit.is_some(),
            "why": explained.why.to_string(),
            "key": explained.key,
            "limit": explained.limit.map(Limit::shown_quota),
            "algorithm": explained.limit.and_then(Limit::algorithm).map(Algorithm::name),
            "cost": explained.cost,
        })
    };
    json!({"rules": explained.iter().map(rule).collect::<Vec<_>>()})
}
