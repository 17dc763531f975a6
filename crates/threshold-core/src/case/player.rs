//! Plays cases on a ledger. On core's own ledger it is the oracle that every store and door is compared with.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::Player;
use super::wire::{FactsBody, decision_json, error_json, explained_json, path_error_json, plan_error_json};
use crate::address::parse_address;
use crate::codec::Format;
use crate::command::{AccountChange, Answer, Command};
use crate::facts::Facts;
use crate::headers::{BodyForm, denial_body, header_fields};
use crate::key::{Digest, TraceId};
use crate::ledger::{Checked, Ledger};
use crate::lockout::{Attempt, Attempted, Login, LoginRequest};
use crate::plan::{PlanError, Verb};
use crate::policy::{Layer, Policy};
use crate::receipt::{ActualCost, CommitError, OnExpire, Receipt};
use crate::secret::{Secret, Secrets};
use crate::time::{Span, Timestamp};

/// Plays cases on core and plain maps.
pub struct LedgerPlayer {
    policy: Option<Policy>,
    ledger: Ledger,
    secrets: Secrets,
    /// Ids count up, so that every run of a case is the same.
    next: u128,
}

impl std::fmt::Debug for LedgerPlayer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LedgerPlayer").finish_non_exhaustive()
    }
}

impl Default for LedgerPlayer {
    fn default() -> Self {
        let secret = Secret::new(b"a secret for cases, known to all").expect("it is long enough");
        Self { policy: None, ledger: Ledger::default(), secrets: secret.into(), next: 0 }
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
}

/// A subject, or what a rule counts under the same key as this request.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PauseArgs {
    layer: Option<String>,
    #[serde(default)]
    key: String,
    rule: Option<String>,
    request: Option<FactsBody>,
    seconds: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct AttemptArgs {
    account: Option<String>,
    ip: Option<String>,
    factor: Option<String>,
    device: Option<String>,
    user: Option<String>,
    tenant: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ResultArgs {
    attempt: String,
    success: bool,
}

impl Player for LedgerPlayer {
    fn load(&mut self, policy: &str, env: &BTreeMap<String, String>, fresh: bool) -> Result<(), String> {
        let parsed = Policy::parse(policy, &|name| env.get(name).cloned()).map_err(|error| error.to_string())?;
        let generation = self.policy.as_ref().map_or(0, Policy::generation).saturating_add(1);
        let policy = parsed.with_key(self.secrets.present().digest_key()).with_generation(generation);
        // The ids begin again with an empty store, so that a case does not depend on those played before it.
        if fresh {
            self.ledger = Ledger::default();
            self.next = 0;
        }
        self.policy = Some(policy);
        Ok(())
    }

    fn call(&mut self, verb: &str, args: &Value, now: Timestamp) -> Result<Value, String> {
        // Taken out, because answering needs the policy and the rest of `self` at the same time.
        let policy = self.policy.take().ok_or("no policy is loaded")?;
        let answer = self.answer(&policy, verb, args, now);
        self.policy = Some(policy);
        answer
    }
}

fn read<'a, T: Deserialize<'a>>(args: &'a Value) -> Result<T, String> {
    T::deserialize(args).map_err(|error| error.to_string())
}

impl LedgerPlayer {
    fn answer(&mut self, policy: &Policy, verb: &str, args: &Value, now: Timestamp) -> Result<Value, String> {
        Ok(match verb {
            "check" => self.decide(policy, Verb::Check, &read(args)?, now),
            "peek" => self.decide(policy, Verb::Peek, &read(args)?, now),
            "record" => self.decide(policy, Verb::Record, &read(args)?, now),
            "client" => self.client(policy, args, now)?,
            "reserve" => self.reserve(policy, &read(args)?, now),
            "commit" => self.commit(&read(args)?, now),
            "release" => self.release(&read(args)?, now),
            "refund" => self.refund(args, now)?,
            "pause" => self.pause(policy, &read(args)?, now)?,
            "forgive" => self.forgive(policy, &read(args)?, now)?,
            "attempt" => self.attempt(policy, login(policy)?, &read(args)?, now)?,
            "result" => self.result(login(policy)?, &read(args)?, now)?,
            "reset" | "lift" => self.reset(policy, verb, args, now)?,
            "explain" => explain(policy, &read(args)?),
            other => return Err(format!("no call is named \"{other}\"")),
        })
    }

    fn id(&mut self) -> TraceId {
        self.next = self.next.saturating_add(1);
        // Spread over all bits, as real ids are.
        TraceId::from_u128(self.next.wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835))
    }

    fn checked(&mut self, policy: &Policy, verb: Verb, facts: &FactsBody, now: Timestamp) -> Result<Checked, Value> {
        let id = self.id();
        let checked = facts.with(id, |facts| self.settled(policy, verb, facts, now));
        checked?.map_err(|error| plan_error_json(&error))
    }

    fn decide(&mut self, policy: &Policy, verb: Verb, facts: &FactsBody, now: Timestamp) -> Value {
        match self.checked(policy, verb, facts, now) {
            Err(error) => error,
            Ok(checked) => {
                let receipt = checked.receipt.map(|receipt| receipt.to_token(self.secrets.present(), Format::PRESENT));
                decision_json(&checked.decision, policy, receipt.as_deref())
            }
        }
    }

    /// What a client reads: status, header fields, body.
    fn client(&mut self, policy: &Policy, args: &Value, now: Timestamp) -> Result<Value, String> {
        let mut facts = args.as_object().cloned().unwrap_or_default();
        let accept = facts.remove("accept");
        let form = BodyForm::accepted(accept.as_ref().and_then(Value::as_str).unwrap_or_default());
        let facts: FactsBody = serde_json::from_value(Value::Object(facts)).map_err(|error| error.to_string())?;
        let facts = match facts.of_a_client(policy) {
            Err(error) => return Ok(error),
            Ok(facts) => facts,
        };
        let id = self.id();
        let checked = facts.with(id, |facts| self.settled(policy, Verb::Check, facts, now));
        let checked = match checked {
            Err(error) => return Ok(error),
            Ok(Err(PlanError::Path(error))) => return Ok(path_error_json(error)),
            Ok(Err(error)) => return Ok(plan_error_json(&error)),
            Ok(Ok(checked)) => checked,
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

    fn reserve(&mut self, policy: &Policy, args: &ReserveArgs, now: Timestamp) -> Value {
        let on_expire = match args.on_expire.as_deref() {
            None | Some("charge") => OnExpire::Charge,
            Some("release") => OnExpire::Release,
            Some(other) => return error_json("bad_request", &format!("unknown \"{other}\""), "onExpire"),
        };
        let ttl = args.ttl_sec.unwrap_or(60);
        if !(1..=3_600).contains(&ttl) {
            return error_json("bad_request", "ttlSec is between 1 and 3600", "ttlSec");
        }
        match self.checked(policy, Verb::Check, &args.facts, now) {
            Err(error) => error,
            Ok(checked) => {
                let mut answer = decision_json(&checked.decision, policy, None);
                if let Some(receipt) = checked.holding
                    && let Some(fields) = answer.as_object_mut()
                {
                    let (id, ttl) = (receipt.id(), Span::from_secs(ttl));
                    self.execute(&Command::SaveReservation { receipt: Box::new(receipt), ttl, on_expire }, now);
                    fields.insert("reservation".to_owned(), json!(id.to_string()));
                }
                answer
            }
        }
    }

    fn commit(&mut self, args: &EndArgs, now: Timestamp) -> Value {
        let costs: Vec<(&str, u64)> = args.costs.iter().map(|(name, cost)| (name.as_str(), *cost)).collect();
        let actual = ActualCost { cost: args.cost, bytes: args.bytes, costs: &costs };
        self.end(&args.reservation, now, |id| Command::Commit { id, cost: actual.owned() })
    }

    fn release(&mut self, args: &EndArgs, now: Timestamp) -> Value {
        self.end(&args.reservation, now, |id| Command::Release { id })
    }

    fn end(&mut self, reservation: &str, now: Timestamp, command: impl FnOnce(TraceId) -> Command) -> Value {
        let ended = reservation_id(reservation).map(|id| self.execute(&command(id), now).ended());
        ended_json(ended.unwrap_or(Err(CommitError::Unknown)))
    }

    /// Plans, settles and decides one request, by a bill that has travelled.
    fn settled(
        &mut self,
        policy: &Policy,
        verb: Verb,
        facts: &Facts<'_>,
        now: Timestamp,
    ) -> Result<Checked, PlanError> {
        let plan = policy.plan_for(verb, facts)?;
        let outcome = self.execute(&plan.to_command(), now).settled().expect("a bill is answered by an outcome");
        Ok(Checked::new(&plan, &outcome))
    }

    /// Carries out a command that has travelled, and hears an answer that has travelled back.
    fn execute(&mut self, command: &Command, now: Timestamp) -> Answer {
        // Every case also tests that commands and answers survive their bytes, as between two nodes.
        let command = Command::from_bytes(&command.to_bytes(Format::PRESENT)).expect("a command survives its bytes");
        let answer = self.ledger.execute(&command, now);
        Answer::from_bytes(&answer.to_bytes(Format::PRESENT)).expect("an answer survives its bytes")
    }

    fn refund(&mut self, args: &Value, now: Timestamp) -> Result<Value, String> {
        let token = args.get("receipt").and_then(Value::as_str).ok_or("a refund takes a receipt")?;
        Ok(match Receipt::from_token(token, &self.secrets) {
            Ok(receipt) => {
                let first = self.execute(&Command::Refund(Box::new(receipt)), now) == Answer::Refunded { first: true };
                json!({"ok": true, "first": first})
            }
            Err(_) => error_json("bad_request", "this is no receipt of ours", "receipt"),
        })
    }

    fn pause(&mut self, policy: &Policy, args: &PauseArgs, now: Timestamp) -> Result<Value, String> {
        let seconds = args.seconds.ok_or("a pause takes seconds")?;
        let keys = match (&args.rule, &args.request, &args.layer) {
            (Some(rule), Some(request), None) if args.key.is_empty() => {
                match request.with(TraceId::default(), |facts| policy.keys_of_rule(rule, facts)) {
                    Ok(keys) => keys,
                    Err(error) => return Ok(error),
                }
            }
            (None, None, Some(name)) => {
                let layer = layer(name)?;
                if let Err(message) = policy.subject_key(layer, &args.key) {
                    return Ok(error_json("bad_request", &message.to_string(), "key"));
                }
                policy.keys_of(layer, &args.key)
            }
            _ => return Err("a pause takes a layer and a key, or a rule and a request".to_owned()),
        };
        let known = !keys.balances.is_empty();
        self.execute(&Command::Pause { keys, length: Span::from_secs(seconds) }, now);
        Ok(json!({"ok": known}))
    }

    fn forgive(&mut self, policy: &Policy, args: &SubjectArgs, now: Timestamp) -> Result<Value, String> {
        let layer = layer(&args.layer)?;
        if let Err(message) = policy.subject_key(layer, &args.key) {
            return Ok(error_json("bad_request", &message.to_string(), "key"));
        }
        self.execute(&Command::Forgive { keys: policy.forgiven_keys(layer, &args.key) }, now);
        Ok(json!({"ok": true}))
    }

    fn attempt(&mut self, policy: &Policy, login: &Login, args: &AttemptArgs, now: Timestamp) -> Result<Value, String> {
        let ip = match args.ip.as_deref() {
            None => None,
            Some(text) => Some(parse_address(text).ok_or_else(|| format!("\"{text}\" is not an address"))?),
        };
        let (account, factor) = (args.account.as_deref(), args.factor.as_deref());
        let (device, user, tenant) = (args.device.as_deref(), args.user.as_deref(), args.tenant.as_deref());
        let request = LoginRequest { account, ip, factor, device, user, tenant };
        let id = self.id();
        let told = match self.ledger.login_refusal(&request.penalty_checks(policy, id), now) {
            Some(refusal) => Attempted::Refused(refusal),
            None => {
                let keys = request.attempt_keys(policy, &self.secrets, id);
                let Answer::Attempted { outcome, .. } =
                    self.execute(&Command::BeginLogin { login: login.clone(), keys }, now)
                else {
                    return Err("an attempt was answered by something else".to_owned());
                };
                outcome.into_answer(self.secrets.present(), Format::PRESENT, now)
            }
        };
        Ok(match told {
            Attempted::Allowed(attempt) => json!({"allowed": true, "attempt": attempt}),
            Attempted::Refused(refusal) => {
                let wait = refusal.retry_after.map(|wait| Span::from(wait).secs_ceil());
                json!({"allowed": false, "error": refusal.code(), "lockoutRemaining": wait})
            }
        })
    }

    fn result(&mut self, login: &Login, args: &ResultArgs, now: Timestamp) -> Result<Value, String> {
        // Drawn before the token is read, so that the ids of later steps do not depend on whether it is valid.
        let nonce = self.id();
        let Ok(attempt) = Attempt::from_token(&args.attempt, &self.secrets) else {
            return Ok(error_json("bad_request", "the token is not a login attempt of this installation", "attempt"));
        };
        let command = Command::EndLogin { login: login.clone(), attempt, success: args.success, nonce };
        let Answer::LoginEnded { ended, .. } = self.execute(&command, now) else {
            return Err("a result was answered by something else".to_owned());
        };
        Ok(match ended {
            Err(unknown) => error_json("unknown_attempt", &unknown.to_string(), "attempt"),
            Ok(outcome) => {
                let told = outcome.into_answer(self.secrets.present(), Format::PRESENT, now);
                json!({
                    "success": told.success,
                    "mayRetry": told.may_retry,
                    "lockoutRemaining": told.lockout_remaining.map(|wait| Span::from(wait).secs_ceil()),
                    "device": told.device,
                })
            }
        })
    }

    fn reset(&mut self, policy: &Policy, verb: &str, args: &Value, now: Timestamp) -> Result<Value, String> {
        let name = args.get("account").and_then(Value::as_str).ok_or("this takes an account")?;
        let account: Digest = match policy.account_digest(name) {
            Ok(account) => account.ok_or("the account has no name")?,
            Err(message) => return Ok(error_json("bad_request", &message.to_string(), "account")),
        };
        let change = if verb == "reset" { AccountChange::Reset } else { AccountChange::Lift };
        self.execute(&Command::ChangeAccount { account, change }, now);
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

/// The answer of the API to a commit or a release.
fn ended_json(ended: Result<(), CommitError>) -> Value {
    let name = match ended {
        Ok(()) => return json!({"ok": true}),
        Err(CommitError::OtherCost) => "already_committed",
        Err(_) => "unknown_reservation",
    };
    error_json(name, &ended.err().map(|error| error.to_string()).unwrap_or_default(), "reservation")
}

fn explain(policy: &Policy, facts: &FactsBody) -> Value {
    facts.with(TraceId::default(), |facts| explained_json(&policy.explain(facts))).unwrap_or_else(|error| error)
}
