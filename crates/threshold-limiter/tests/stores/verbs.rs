//! Answers the calls of a case with each of the limiter's verbs, as the HTTP API would.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Map, Value, json};
use threshold_core::address::parse_address;
use threshold_core::case::{FactsBody, decision_json, error_json, explained_json, path_error_json, plan_error_json};
use threshold_core::headers::{BodyForm, denial_body, header_fields};
use threshold_core::policy::Layer;
use threshold_core::receipt::{ActualCost, OnExpire};
use threshold_core::{Span, TraceId};
use threshold_limiter::store::{EndError, Store};
use threshold_limiter::{Attempted, Clock, Limiter, LoginError, LoginRequest, PlanError, Reserved};

/// Answers one call.
///
/// # Errors
/// Returns an error if no call has this name.
pub(crate) async fn answer<S: Store, C: Clock>(
    limiter: &Limiter<S, C>,
    verb: &str,
    args: &Value,
) -> Result<Value, String> {
    let verbs = Verbs(limiter);
    // A call that cannot be read is answered with its error, as by the API.
    let answered = match verb {
        "check" | "peek" | "record" => verbs.decide(verb, args).await,
        "client" => verbs.client(args).await,
        "reserve" => verbs.reserve(args).await,
        "commit" | "release" => Ok(verbs.end(verb, args).await),
        "refund" => Ok(verbs.refund(args).await),
        "pause" | "forgive" => Ok(verbs.subject(verb, args).await),
        "attempt" => Ok(verbs.attempt(args).await),
        "result" => Ok(verbs.result(args).await),
        "reset" | "lift" => Ok(verbs.account(verb, args).await),
        "explain" => verbs.explain(args),
        other => return Err(format!("no call is named \"{other}\"")),
    };
    Ok(answered.unwrap_or_else(|error| error))
}

fn facts_of(args: &Value) -> FactsBody {
    serde_json::from_value(args.clone()).unwrap()
}

fn text<'a>(args: &'a Value, name: &str) -> &'a str {
    args[name].as_str().unwrap()
}

/// The verbs of a limiter. An error is the answer to a call whose facts cannot be used.
struct Verbs<'l, S, C>(&'l Limiter<S, C>);

impl<S: Store, C: Clock> Verbs<'_, S, C> {
    async fn decide(&self, verb: &str, args: &Value) -> Result<Value, Value> {
        let body = facts_of(args);
        let read = body.read()?;
        let (limiter, facts) = (self.0, read.facts(TraceId::default()));
        let asked = match verb {
            "check" => limiter.check_with_receipt_async(&facts).await,
            "peek" => limiter.peek_async(&facts).await.map(|decision| (decision, None)),
            _ => limiter.record_async(&facts).await,
        };
        let (decision, receipt) = asked.map_err(|error| plan_error_json(&error))?;
        let receipt = receipt.map(|receipt| limiter.sign(&receipt));
        Ok(decision_json(&decision, &limiter.policy(), receipt.as_deref()))
    }

    async fn client(&self, args: &Value) -> Result<Value, Value> {
        let mut args = args.as_object().unwrap().clone();
        let form = BodyForm::accepted(args.remove("accept").as_ref().and_then(Value::as_str).unwrap_or_default());
        let policy = self.0.policy();
        let body = facts_of(&Value::Object(args)).of_a_client(&policy).unwrap();
        let read = body.read()?;
        let facts = read.facts(TraceId::default());
        let decision = self.0.check_async(&facts).await.map_err(|error| match error {
            PlanError::Path(error) => path_error_json(error),
            error => plan_error_json(&error),
        })?;
        let body = denial_body(&decision, &policy, &facts, form);
        let fields = header_fields(&decision, &policy).into_iter();
        let mut headers: Map<_, _> = fields.map(|(name, value)| (name.to_ascii_lowercase(), json!(value))).collect();
        if let Some(body) = &body {
            headers.insert("content-type".to_owned(), json!(body.content_type));
        }
        let read = |text: &str| serde_json::from_str(text).unwrap_or_else(|_| json!(text));
        Ok(json!({
            "allowed": decision.allowed(),
            "status": body.as_ref().map_or(200, |body| body.status),
            "headers": headers,
            "body": body.as_ref().map(|body| read(&body.text)),
        }))
    }

    async fn reserve(&self, args: &Value) -> Result<Value, Value> {
        let on_expire = if args["onExpire"] == "release" { OnExpire::Release } else { OnExpire::Charge };
        let seconds = args["ttlSec"].as_u64().unwrap_or(60);
        if !(1..=3_600).contains(&seconds) {
            return Err(error_json("bad_request", "ttlSec is between 1 and 3600", "ttlSec"));
        }
        let body = facts_of(args.get("facts").unwrap_or(&json!({})));
        let read = body.read()?;
        let (facts, ttl) = (read.facts(TraceId::default()), Duration::from_secs(seconds));
        let reserved = self.0.reserve_async(&facts, ttl, on_expire).await;
        let Reserved { decision, reservation } = reserved.map_err(|error| plan_error_json(&error))?;
        let mut answer = decision_json(&decision, &self.0.policy(), None);
        if let (Some(id), Some(fields)) = (reservation, answer.as_object_mut()) {
            fields.insert("reservation".to_owned(), json!(id.to_string()));
        }
        Ok(answer)
    }

    async fn end(&self, verb: &str, args: &Value) -> Value {
        let id = u128::from_str_radix(text(args, "reservation"), 16).map(TraceId::from_u128);
        let costs: BTreeMap<String, u64> =
            args.get("costs").map_or_else(BTreeMap::new, |costs| serde_json::from_value(costs.clone()).unwrap());
        let costs: Vec<(&str, u64)> = costs.iter().map(|(name, cost)| (name.as_str(), *cost)).collect();
        let actual = ActualCost { cost: args["cost"].as_u64(), bytes: args["bytes"].as_u64(), costs: &costs };
        let ended = match (id, verb) {
            (Err(_), _) => Err(EndError::Unknown),
            (Ok(id), "commit") => self.0.commit_async(id, &actual).await,
            (Ok(id), _) => self.0.release_async(id).await,
        };
        match ended {
            Ok(()) => json!({"ok": true}),
            Err(EndError::OtherCost) => error_json("already_committed", "another cost", "reservation"),
            Err(_) => error_json("unknown_reservation", "unknown", "reservation"),
        }
    }

    async fn refund(&self, args: &Value) -> Value {
        let Ok(receipt) = self.0.read_receipt(text(args, "receipt")) else {
            return error_json("bad_request", "this is no receipt of ours", "receipt");
        };
        let first = self.0.refund_async(&receipt).await.unwrap();
        json!({"ok": true, "first": first})
    }

    async fn subject(&self, verb: &str, args: &Value) -> Value {
        let layers = [Layer::Global, Layer::Edge, Layer::Tenant, Layer::User, Layer::Endpoint];
        let layer = layers.into_iter().find(|layer| layer.name() == text(args, "layer")).unwrap();
        let key = args["key"].as_str().unwrap_or_default();
        let length = Duration::from_secs(args["seconds"].as_u64().unwrap_or(0));
        let ok = match verb {
            "pause" => self.0.pause_async(layer, key, length).await.is_ok(),
            _ => self.0.forgive_async(layer, key).await.is_ok(),
        };
        json!({"ok": ok})
    }

    fn explain(&self, args: &Value) -> Result<Value, Value> {
        facts_of(args).with(TraceId::default(), |facts| explained_json(&self.0.policy().explain(facts)))
    }

    async fn attempt(&self, args: &Value) -> Value {
        let part = |name: &str| args[name].as_str();
        let (account, ip) = (part("account"), part("ip").map(|text| parse_address(text).unwrap()));
        let request = LoginRequest {
            account,
            ip,
            factor: part("factor"),
            device: part("device"),
            user: part("user"),
            tenant: part("tenant"),
        };
        match self.0.login_attempt_async(&request).await.unwrap() {
            Attempted::Allowed(attempt) => json!({"allowed": true, "attempt": attempt}),
            Attempted::Refused(refusal) => {
                let wait = refusal.retry_after_secs();
                json!({"allowed": false, "error": refusal.code(), "lockoutRemaining": wait})
            }
        }
    }

    async fn result(&self, args: &Value) -> Value {
        let (attempt, success) = (text(args, "attempt"), args["success"].as_bool().unwrap());
        match self.0.login_result_async(attempt, success).await {
            Ok(told) => {
                let locked = told.lockout_remaining.map(|wait| Span::from(wait).secs_ceil());
                json!({
                    "success": told.success,
                    "mayRetry": told.may_retry,
                    "lockoutRemaining": locked,
                    "device": told.device,
                })
            }
            Err(LoginError::UnknownAttempt) => error_json("unknown_attempt", "unknown", "attempt"),
            Err(error) => error_json("bad_request", &error.to_string(), "attempt"),
        }
    }

    async fn account(&self, verb: &str, args: &Value) -> Value {
        let account = text(args, "account");
        let changed = match verb {
            "reset" => self.0.reset_account_async(account).await,
            _ => self.0.pardon_account_async(account).await,
        };
        json!({"ok": changed.is_ok()})
    }
}
