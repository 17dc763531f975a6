//! The JSON of an explanation: for a first request on an empty store, and for a request to a running server.

use serde_json::{Value, json};
use threshold_core::case::decision_json;
use threshold_core::explain::{Explained, PathReadings};
use threshold_core::ledger::Checked;
use threshold_core::limit::Algorithm;
use threshold_core::path::{normalize_method, normalize_path};
use threshold_core::policy::{Layer, Policy};
use threshold_core::{Decision, Facts, Limit, PlanError, Reading, Timestamp};

use crate::desk::PenaltyCause;

/// Explains a request on an empty store. Limits are as the policy writes them.
pub(super) fn offline_json(
    policy: &Policy,
    facts: &Facts<'_>,
    rules: &[Explained<'_>],
    decided: &Result<Checked, PlanError>,
) -> Value {
    let decision = decided.as_ref().ok().map(|checked| &checked.decision);
    let rules = rules.iter().map(|explained| {
        // A rule that does not match has no limit here, although the policy gives it one.
        let limit = json!(explained.limit.map(|_| explained.notation()));
        rule_json(explained, decision, &limit, explained.limit.map(Limit::capacity))
    });
    json!({
        "decision": decision.map(|decision| decision_json(decision, policy, None)),
        "error": decided.as_ref().err().map(ToString::to_string),
        "facts": facts_json(policy, facts),
        "path": path_json(&policy.path_readings(facts)),
        "rules": rules.collect::<Vec<_>>(),
        "penalties": [],
    })
}

/// Explains a request to a running server. `answer` is the decision as the door encodes it.
pub(crate) fn live_json(
    (policy, facts): (&Policy, &Facts<'_>),
    rules: &[Explained<'_>],
    causes: &[PenaltyCause],
    decision: &Decision,
    answer: &[u8],
) -> Value {
    let rules = rules.iter().map(|explained| {
        let own = reading(explained, Some(decision));
        // The reading is after the charge of this request.
        let before = own.map(|own| own.remaining.saturating_add(if own.charged { own.cost } else { 0 }));
        rule_json(explained, Some(decision), &json!(explained.limit.map(Limit::shown_quota)), before)
    });
    let rules: Vec<Value> = rules.collect();
    let answer: Value = serde_json::from_slice(answer).unwrap_or_default();
    json!({
        "decision": answer,
        "facts": facts_json(policy, facts),
        "path": path_json(&policy.path_readings(facts)),
        "rules": rules,
        "penalties": penalties_json(causes, decision),
    })
}

/// Encodes the penalties of a request. One whose cause is not known, such as that of a subject with several parts, has only its
/// layer and its end.
fn penalties_json(causes: &[PenaltyCause], decision: &Decision) -> Vec<Value> {
    // The penalty was found by the decision, but not by the lookup afterwards. It is shown rather than left out.
    if causes.is_empty() {
        let penalty = decision.penalty_layer().map(|layer: Layer| {
            let until = decision.ready_at.map(Timestamp::secs_ceil);
            json!({"layer": layer.name(), "verdict": decision.verdict.name(), "until": until, "reason": null, "id": null})
        });
        return penalty.into_iter().collect();
    }
    let seconds = |at: Option<Timestamp>| at.map(Timestamp::secs_ceil);
    let encode = |cause: &PenaltyCause| {
        json!({
            "layer": cause.layer.name(),
            "verdict": cause.verdict,
            "key": cause.key,
            "reason": cause.reason,
            "by": cause.by,
            "id": cause.id.map(|id| format!("{:032x}", id.to_u128())),
            "from": seconds(cause.from),
            "until": seconds(cause.until),
        })
    };
    causes.iter().map(encode).collect()
}

/// Encodes the readings of the path, and how client doors refuse it.
fn path_json(path: &PathReadings) -> Value {
    let refused = path.refused.zip(path.status());
    let refused = refused.map(|(error, status)| json!({"status": status, "message": error.to_string()}));
    json!({"readings": path.readings, "refusedAtClientDoors": refused})
}

/// Returns the reading of a rule, if the decision has one.
fn reading<'d>(explained: &Explained<'_>, decision: Option<&'d Decision>) -> Option<&'d Reading> {
    let mut own = decision?.readings.iter().filter(|own| own.rule() == explained.index);
    // A rule with several limits has a reading for each, in the same order.
    own.nth(explained.nth)
}

fn rule_json(explained: &Explained<'_>, decision: Option<&Decision>, limit: &Value, before: Option<u64>) -> Value {
    let own = reading(explained, decision);
    let bound = decision.and_then(Decision::bound_by);
    json!({
        "rule": explained.rule.name.as_ref(),
        "layer": explained.rule.layer.name(),
        "matched": explained.limit.is_some(),
        "why": explained.why.to_string(),
        "key": explained.key,
        "limit": limit,
        "algorithm": explained.limit.and_then(Limit::algorithm).map(Algorithm::name),
        "cost": explained.cost,
        "before": before,
        "after": own.map(|own| own.remaining),
        "allowed": own.map(|own| own.allowed),
        // By identity: two limits of one rule may have equal figures.
        "binding": own.zip(bound).is_some_and(|(own, bound)| std::ptr::eq(own, bound)),
        "passesAt": own.and_then(Reading::ready_at).map(Timestamp::secs_ceil),
    })
}

/// Encodes the facts as they are counted: normalised, and with secrets as digests.
fn facts_json(policy: &Policy, facts: &Facts<'_>) -> Value {
    let identity = policy.identity();
    let shown = |name: &str, secret: bool| if secret { policy.key().redact(name) } else { name.to_owned() };
    json!({
        "ip": facts.ip.map(|ip| ip.to_canonical().to_string()),
        "host": facts.host,
        "method": facts.method.map(normalize_method),
        "path": facts.path.map(normalize_path),
        "tenant": facts.tenant.map(|name| shown(name, identity.secret_tenant)),
        "user": facts.user.map(|name| shown(name, identity.secret_user)),
        "tier": facts.tier,
        "category": policy.category_of(facts),
    })
}
