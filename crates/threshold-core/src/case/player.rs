//! Plays cases on a host. On core's own ledger it is the oracle that every store and door is compared with.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::wire::{FactsBody, decision_json, error_json, plan_error_json};
use super::{Host, Player};
use crate::address::{AddressGroup, parse_address};
use crate::headers::{BodyForm, denial_body, header_fields};
use crate::key::{Digest, TraceId};
use crate::ledger::{Checked, Ledger};
use crate::lockout::{Account, Attempt, AttemptOutcome, Device, Factor, Login, Try, account_digest, address_digest};
use crate::plan::{PlanError, Verb};
use crate::policy::{Layer, Listed, Policy};
use crate::receipt::{ActualCost, OnExpire, Receipt};
use crate::secret::Secret;
use crate::time::{Span, Timestamp};

/// Plays cases on anything that can settle a plan.
pub struct CasePlayer<H> {
    policy: Option<Policy>,
    host: Option<H>,
    make: fn(&Policy) -> H,
    secret: Secret,
    /// Ids count up, so that every run of a case is the same.
    next: u128,
}

/// Plays cases on core and plain maps.
pub type LedgerPlayer = CasePlayer<Ledger>;

impl<H> std::fmt::Debug for CasePlayer<H> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CasePlayer").finish_non_exhaustive()
    }
}

impl<H: Host> CasePlayer<H> {
    /// A player whose cases begin with what `make` gives.
    #[must_use]
    pub fn new(make: fn(&Policy) -> H) -> Self {
        let secret = Secret::new(b"a secret for cases, known to all").expect("it is long enough");
        Self { policy: None, host: None, make, secret, next: 0 }
    }
}

impl Default for LedgerPlayer {
    fn default() -> Self {
        Self::new(|_| Ledger::default())
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
struct ReserveArgs {
    facts: FactsBody,
    ttl_sec: Option<u64>,
    on_expire: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct EndArgs {
    reservation: String,
    cost: Option<u64>,
    bytes: Option<u64>,
    #[serde(default)]
    costs: BTreeMap<String, u64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SubjectArgs {
    layer: String,
    #[serde(default)]
    key: String,
    seconds: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct AttemptArgs {
    account: Option<String>,
    ip: Option<String>,
    factor: Option<String>,
    device: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ResultArgs {
    attempt: String,
    success: bool,
}

impl<H: Host> Player for CasePlayer<H> {
    fn load(&mut self, policy: &str, env: &BTreeMap<String, String>, fresh: bool) -> Result<(), String> {
        let parsed = Policy::parse(policy, &|name| env.get(name).cloned()).map_err(|error| error.to_string())?;
        let generation = self.policy.as_ref().map_or(0, Policy::generation).saturating_add(1);
        let policy = parsed.with_key(self.secret.digest_key()).with_generation(generation);
        if fresh {
            self.host = Some((self.make)(&policy));
            self.next = 0;
        }
        self.policy = Some(policy);
        Ok(())
    }

    fn call(&mut self, verb: &str, args: &Value, now: Timestamp) -> Result<Value, String> {
        let (Some(policy), Some(mut host)) = (self.policy.take(), self.host.take()) else {
            return Err("no policy is loaded".to_owned());
        };
        let answer = self.answer(&mut host, &policy, verb, args, now);
        (self.policy, self.host) = (Some(policy), Some(host));
        answer
    }
}

fn read<'a, T: Deserialize<'a>>(args: &'a Value) -> Result<T, String> {
    T::deserialize(args).map_err(|error| error.to_string())
}

impl<H: Host> CasePlayer<H> {
    fn answer(
        &mut self,
        host: &mut H,
        policy: &Policy,
        verb: &str,
        args: &Value,
        now: Timestamp,
    ) -> Result<Value, String> {
        Ok(match verb {
            "check" => self.decide(host, policy, Verb::Check, &read(args)?, now),
            "peek" => self.decide(host, policy, Verb::Peek, &read(args)?, now),
            "record" => self.decide(host, policy, Verb::Record, &read(args)?, now),
            "client" => self.client(host, policy, args, now)?,
            "reserve" => self.reserve(host, policy, &read(args)?, now),
            "commit" => self.commit(host, policy, &read(args)?, now),
            "release" => self.release(host, &read(args)?, now),
            "refund" => self.refund(host, args, now)?,
            "pause" => self.pause(host, policy, &read(args)?, now)?,
            "forgive" => self.forgive(host, policy, &read(args)?)?,
            "attempt" => self.attempt(host, policy, login(policy)?, &read(args)?, now)?,
            "result" => self.result(host, login(policy)?, &read(args)?, now),
            "reset" | "lift" => self.reset(host, policy, verb, args)?,
            "explain" => explain(policy, &read(args)?),
            other => return Err(format!("no call is named \"{other}\"")),
        })
    }

    fn id(&mut self) -> TraceId {
        self.next = self.next.saturating_add(1);
        // Spread over all bits, as real ids are.
        TraceId::from_u128(self.next.wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835))
    }

    fn checked(
        &mut self,
        host: &mut H,
        policy: &Policy,
        verb: Verb,
        facts: &FactsBody,
        now: Timestamp,
    ) -> Result<Checked, Value> {
        let id = self.id();
        let checked = facts.with(id, |facts| {
            let plan = policy.plan_for(verb, facts)?;
            let outcome = host.settle(&plan, now);
            Ok(Checked::new(&plan, &outcome, now))
        });
        checked?.map_err(|error: PlanError| plan_error_json(&error))
    }

    fn decide(&mut self, host: &mut H, policy: &Policy, verb: Verb, facts: &FactsBody, now: Timestamp) -> Value {
        match self.checked(host, policy, verb, facts, now) {
            Err(error) => error,
            Ok(checked) => {
                let receipt = checked.receipt.map(|receipt| receipt.to_token(&self.secret));
                decision_json(&checked.decision, policy, receipt.as_deref())
            }
        }
    }

    /// What a client reads: status, header fields, body.
    fn client(&mut self, host: &mut H, policy: &Policy, args: &Value, now: Timestamp) -> Result<Value, String> {
        let mut facts = args.as_object().cloned().unwrap_or_default();
        let accept = facts.remove("accept");
        let form = BodyForm::accepted(accept.as_ref().and_then(Value::as_str).unwrap_or_default());
        let facts: FactsBody = serde_json::from_value(Value::Object(facts)).map_err(|error| error.to_string())?;
        let checked = match self.checked(host, policy, Verb::Check, &facts, now) {
            Err(error) => return Ok(error),
            Ok(checked) => checked,
        };
        let decision = &checked.decision;
        let mut headers = Map::new();
        for (name, value) in header_fields(decision, policy) {
            headers.insert(name.to_ascii_lowercase(), Value::String(value));
        }
        let body = facts.with(decision.trace, |facts| denial_body(decision, policy, facts, form));
        let body = body.map_err(|error| error.to_string())?;
        if let Some(body) = &body {
            headers.insert("content-type".to_owned(), json!(body.content_type));
        }
        let text = body.as_ref().map(|body| body.text.as_str());
        let parsed = text.map(|text| serde_json::from_str(text).unwrap_or_else(|_| json!(text)));
        Ok(json!({
            "allowed": decision.allowed(),
            "status": body.as_ref().map_or(200, |body| body.status),
            "headers": headers,
            "body": parsed,
        }))
    }

    fn reserve(&mut self, host: &mut H, policy: &Policy, args: &ReserveArgs, now: Timestamp) -> Value {
        let on_expire = match args.on_expire.as_deref() {
            None | Some("charge") => OnExpire::Charge,
            Some("release") => OnExpire::Release,
            Some(other) => return error_json("bad_request", &format!("unknown \"{other}\""), "onExpire"),
        };
        let ttl = args.ttl_sec.unwrap_or(60);
        if !(1..=3_600).contains(&ttl) {
            return error_json("bad_request", "ttlSec is between 1 and 3600", "ttlSec");
        }
        match self.checked(host, policy, Verb::Check, &args.facts, now) {
            Err(error) => error,
            Ok(checked) => {
                let mut answer = decision_json(&checked.decision, policy, None);
                if let Some(receipt) = checked.holding
                    && let Some(fields) = answer.as_object_mut()
                {
                    let id = host.reserve(receipt, Span::from_secs(ttl), on_expire, now);
                    fields.insert("reservation".to_owned(), json!(id.to_string()));
                }
                answer
            }
        }
    }

    fn commit(&mut self, host: &mut H, policy: &Policy, args: &EndArgs, now: Timestamp) -> Value {
        let costs: Vec<(&str, u64)> = args.costs.iter().map(|(name, cost)| (name.as_str(), *cost)).collect();
        let actual = ActualCost { cost: args.cost, bytes: args.bytes, costs: &costs };
        let ended = reservation_id(&args.reservation).map(|id| host.commit(id, &actual, policy.key(), now));
        ended_json(ended.is_some_and(|ended| ended.is_ok()))
    }

    fn release(&mut self, host: &mut H, args: &EndArgs, now: Timestamp) -> Value {
        let ended = reservation_id(&args.reservation).map(|id| host.release(id, now));
        ended_json(ended.is_some_and(|ended| ended.is_ok()))
    }

    fn refund(&mut self, host: &mut H, args: &Value, now: Timestamp) -> Result<Value, String> {
        let token = args.get("receipt").and_then(Value::as_str).ok_or("a refund takes a receipt")?;
        Ok(match Receipt::from_token(token, &self.secret) {
            Ok(receipt) => json!({"ok": true, "first": host.refund(&receipt, now)}),
            Err(_) => error_json("bad_request", "this is no receipt of ours", "receipt"),
        })
    }

    fn pause(&mut self, host: &mut H, policy: &Policy, args: &SubjectArgs, now: Timestamp) -> Result<Value, String> {
        let seconds = args.seconds.ok_or("a pause takes seconds")?;
        let keys = policy.keys_of(layer(&args.layer)?, &args.key);
        host.pause(&keys, now.plus(Span::from_secs(seconds)), now);
        Ok(json!({"ok": !keys.balances.is_empty()}))
    }

    fn forgive(&mut self, host: &mut H, policy: &Policy, args: &SubjectArgs) -> Result<Value, String> {
        host.forgive(&policy.keys_of(layer(&args.layer)?, &args.key));
        Ok(json!({"ok": true}))
    }

    fn attempt(
        &mut self,
        host: &mut H,
        policy: &Policy,
        login: &Login,
        args: &AttemptArgs,
        now: Timestamp,
    ) -> Result<Value, String> {
        let key = policy.key();
        let ip = match args.ip.as_deref() {
            None => None,
            Some(text) => Some(parse_address(text).ok_or_else(|| format!("\"{text}\" is not an address"))?),
        };
        let listed = policy.lists().find(ip, None, None);
        let group = ip.map(|ip| AddressGroup::of(ip, policy.identity().ipv6_prefix));
        let device = args.device.as_deref().and_then(|token| Device::from_token(token, &self.secret).ok());
        let tried = Try {
            account: args.account.as_deref().and_then(|name| account_digest(key, name)),
            address: group.filter(|_| listed != Some(Listed::Allow)).map(|group| address_digest(key, group)),
            factor: Factor::named(key, args.factor.as_deref()),
            device,
            id: self.id(),
        };
        let refused = |error: &str, until: Option<Timestamp>| {
            let wait = until.map(|until| until.since(now).secs_ceil());
            json!({"allowed": false, "error": error, "lockoutRemaining": wait})
        };
        Ok(match host.login_attempt(login, &tried, now) {
            AttemptOutcome::Allowed(attempt) => {
                json!({"allowed": true, "attempt": attempt.to_token(&self.secret)})
            }
            AttemptOutcome::TooMany { until } => refused("too_many_requests", Some(until)),
            AttemptOutcome::Locked { until } => refused("account_locked", until),
        })
    }

    fn result(&mut self, host: &mut H, login: &Login, args: &ResultArgs, now: Timestamp) -> Value {
        let nonce = self.id();
        let Ok(attempt) = Attempt::from_token(&args.attempt, &self.secret) else {
            return error_json("bad_request", "this is no attempt of ours", "attempt");
        };
        match host.login_result(login, &attempt, args.success, nonce, now) {
            Err(unknown) => error_json("unknown_attempt", &unknown.to_string(), "attempt"),
            Ok(outcome) => {
                let locked = outcome.locked_until.filter(|until| *until < Timestamp::MAX);
                json!({
                    "allowed": outcome.allowed,
                    "lockoutRemaining": locked.map(|until| until.since(now).secs_ceil()),
                    "device": outcome.device.map(|device| device.to_token(&self.secret)),
                })
            }
        }
    }

    fn reset(&mut self, host: &mut H, policy: &Policy, verb: &str, args: &Value) -> Result<Value, String> {
        let name = args.get("account").and_then(Value::as_str).ok_or("this takes an account")?;
        let digest: Digest = account_digest(policy.key(), name).ok_or("the account has no name")?;
        host.change_account(digest, if verb == "reset" { Account::reset } else { Account::lift });
        Ok(json!({"ok": true}))
    }
}

fn login(policy: &Policy) -> Result<&Login, String> {
    policy.login().ok_or_else(|| "the policy has no [login]".to_owned())
}

fn layer(name: &str) -> Result<Layer, String> {
    let layers = [Layer::Global, Layer::Edge, Layer::Tenant, Layer::User, Layer::Endpoint];
    layers.into_iter().find(|layer| layer.name() == name).ok_or_else(|| format!("no layer is called \"{name}\""))
}

fn reservation_id(text: &str) -> Option<TraceId> {
    u128::from_str_radix(text, 16).ok().map(TraceId::from_u128)
}

fn ended_json(ended: bool) -> Value {
    if ended {
        json!({"ok": true})
    } else {
        error_json("unknown_reservation", "there is no such reservation, or no longer", "reservation")
    }
}

fn explain(policy: &Policy, facts: &FactsBody) -> Value {
    let rules = facts.with(TraceId::default(), |facts| {
        let rules = policy.explain(facts);
        rules
            .iter()
            .map(|explained| {
                json!({
                    "rule": explained.rule.name.as_ref(),
                    "layer": explained.rule.layer.name(),
                    "matched": explained.limit.is_some(),
                    "why": explained.why.to_string(),
                    "key": explained.key,
                    "limit": explained.limit.map(crate::limit::Limit::quota),
                    "algorithm": explained.limit.and_then(crate::limit::Limit::algorithm).map(crate::limit::Algorithm::name),
                    "cost": explained.cost,
                })
            })
            .collect::<Vec<_>>()
    });
    match rules {
        Ok(rules) => json!({"rules": rules}),
        Err(error) => error,
    }
}
