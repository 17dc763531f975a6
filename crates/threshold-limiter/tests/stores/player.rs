//! Plays the test vectors in `conformance/` with each of the limiter's verbs, on any store.

use std::collections::BTreeMap;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value, json};
use threshold_core::TraceId;
use threshold_core::address::parse_address;
use threshold_core::case::{
    CaseFile, FactsBody, Lines, Player, decision_json, error_json, explained_json, path_error_json, plan_error_json,
    play,
};
use threshold_core::headers::{BodyForm, denial_body, header_fields};
use threshold_core::policy::Layer;
use threshold_core::receipt::{ActualCost, OnExpire};
use threshold_core::{Decision, DigestKey, Receipt, Span, Timestamp};
use threshold_limiter::store::{EndError, Store, at_once};
use threshold_limiter::{
    Attempted, Facts, Limiter, LoginError, LoginRequest, ManualClock, PlanError, Policy, Reserved, Secret,
};
use tokio::runtime::{Builder, Runtime};

/// A limiter on one kind of store, and the runtime that drives its futures.
struct Played<'w, S> {
    world: &'w dyn World<S>,
    runtime: Runtime,
    clock: Arc<ManualClock>,
    limiter: Option<Limiter<S, Arc<ManualClock>>>,
    /// Whether the case has made a reservation, which may expire.
    reserves: bool,
}

/// How a kind of store is made for each case.
pub(crate) trait World<S> {
    /// Makes an empty store.
    fn store(&self, policy: &Policy, runtime: &Runtime) -> S;

    /// Sets the clock of a store that has one of its own.
    fn set_time(&self, now: Timestamp) {
        let _ = now;
    }

    /// Waits for what the store does after its answers. It ends reservations that have expired if the case `reserves`.
    fn settle_down(&self, store: &S, reserves: bool, runtime: &Runtime) {
        let _ = (store, reserves, runtime);
    }
}

impl<S: Store> Played<'_, S> {
    fn wait_for<T>(&self, future: impl Future<Output = T> + Send) -> T {
        if self.limiter().store().answers_at_once() { at_once(future) } else { self.runtime.block_on(future) }
    }
}

impl<S: Store> Player for Played<'_, S> {
    fn load(&mut self, policy: &str, env: &BTreeMap<String, String>, fresh: bool) -> Result<(), String> {
        let policy = Policy::parse(policy, &|name| env.get(name).cloned()).map_err(|error| error.to_string())?;
        match &self.limiter {
            Some(limiter) if !fresh => {
                limiter.swap(policy);
            }
            _ => {
                let (store, key) = (self.world.store(&policy, &self.runtime), DigestKey::new([7; 16]));
                let secret = Secret::new(&[9; 32]).unwrap();
                self.limiter = Some(
                    Limiter::builder(policy)
                        .store(store)
                        .clock(Arc::clone(&self.clock))
                        .digest_key(key)
                        .secrets(secret)
                        .build(),
                );
            }
        }
        Ok(())
    }

    fn call(&mut self, verb: &str, args: &Value, now: Timestamp) -> Result<Value, String> {
        self.clock.set(now);
        self.world.set_time(now);
        self.world.settle_down(self.limiter().store(), self.reserves, &self.runtime);
        self.reserves |= verb == "reserve";
        match verb {
            "check" | "peek" | "record" => Ok(self.decide(verb, args)),
            "client" => Ok(self.client(args)),
            "reserve" => Ok(self.reserve(args)),
            "commit" | "release" => Ok(self.end(verb, args)),
            "refund" => Ok(self.refund(args)),
            "pause" | "forgive" => Ok(self.subject(verb, args)),
            "attempt" => Ok(self.attempt(args)),
            "result" => Ok(self.result(args)),
            "reset" | "lift" => Ok(self.account(verb, args)),
            "explain" => Ok(self.explain(args)),
            other => Err(format!("no call is named \"{other}\"")),
        }
    }
}

fn facts_of(args: &Value) -> FactsBody {
    serde_json::from_value(args.clone()).unwrap()
}

fn text<'a>(args: &'a Value, name: &str) -> &'a str {
    args[name].as_str().unwrap()
}

impl<S: Store> Played<'_, S> {
    fn limiter(&self) -> &Limiter<S, Arc<ManualClock>> {
        self.limiter.as_ref().expect("a case begins with its policy")
    }

    fn asked(&self, verb: &str, facts: &Facts<'_>) -> Result<(Decision, Option<Receipt>), PlanError> {
        let limiter = self.limiter();
        match verb {
            "check" => self.wait_for(limiter.check_with_receipt_async(facts)),
            "peek" => self.wait_for(limiter.peek_async(facts)).map(|decision| (decision, None)),
            _ => self.wait_for(limiter.record_async(facts)),
        }
    }

    fn decide(&self, verb: &str, args: &Value) -> Value {
        let asked = facts_of(args).with(TraceId::default(), |facts| self.asked(verb, facts));
        match asked {
            Err(error) => error,
            Ok(Err(error)) => plan_error_json(&error),
            Ok(Ok((decision, receipt))) => {
                let receipt = receipt.map(|receipt| self.limiter().sign(&receipt));
                decision_json(&decision, &self.limiter().policy(), receipt.as_deref())
            }
        }
    }

    fn client(&self, args: &Value) -> Value {
        let mut args = args.as_object().unwrap().clone();
        let form = BodyForm::accepted(args.remove("accept").as_ref().and_then(Value::as_str).unwrap_or_default());
        let (policy, limiter) = (self.limiter().policy(), self.limiter());
        let facts = facts_of(&Value::Object(args)).of_a_client(&policy).unwrap();
        let asked = facts.with(TraceId::default(), |facts| {
            let decision = self.wait_for(limiter.check_async(facts));
            decision.map(|decision| (denial_body(&decision, &policy, facts, form), decision))
        });
        let (body, decision) = match asked {
            Err(error) => return error,
            Ok(Err(PlanError::Path(error))) => return path_error_json(error),
            Ok(Err(error)) => return plan_error_json(&error),
            Ok(Ok(answer)) => answer,
        };
        let fields = header_fields(&decision, &policy).into_iter();
        let mut headers: Map<_, _> = fields.map(|(name, value)| (name.to_ascii_lowercase(), json!(value))).collect();
        if let Some(body) = &body {
            headers.insert("content-type".to_owned(), json!(body.content_type));
        }
        let read = |text: &str| serde_json::from_str(text).unwrap_or_else(|_| json!(text));
        json!({
            "allowed": decision.allowed(),
            "status": body.as_ref().map_or(200, |body| body.status),
            "headers": headers,
            "body": body.as_ref().map(|body| read(&body.text)),
        })
    }

    fn reserve(&self, args: &Value) -> Value {
        let on_expire = if args["onExpire"] == "release" { OnExpire::Release } else { OnExpire::Charge };
        let seconds = args["ttlSec"].as_u64().unwrap_or(60);
        if !(1..=3_600).contains(&seconds) {
            return error_json("bad_request", "ttlSec is between 1 and 3600", "ttlSec");
        }
        let facts = facts_of(args.get("facts").unwrap_or(&json!({})));
        let reserved = facts.with(TraceId::default(), |facts| {
            self.wait_for(self.limiter().reserve_async(facts, Duration::from_secs(seconds), on_expire))
        });
        match reserved {
            Err(error) => error,
            Ok(Err(error)) => plan_error_json(&error),
            Ok(Ok(Reserved { decision, reservation })) => {
                let mut answer = decision_json(&decision, &self.limiter().policy(), None);
                if let (Some(id), Some(fields)) = (reservation, answer.as_object_mut()) {
                    fields.insert("reservation".to_owned(), json!(id.to_string()));
                }
                answer
            }
        }
    }

    fn end(&self, verb: &str, args: &Value) -> Value {
        let id = u128::from_str_radix(text(args, "reservation"), 16).map(TraceId::from_u128);
        let costs: BTreeMap<String, u64> =
            args.get("costs").map_or_else(BTreeMap::new, |costs| serde_json::from_value(costs.clone()).unwrap());
        let costs: Vec<(&str, u64)> = costs.iter().map(|(name, cost)| (name.as_str(), *cost)).collect();
        let actual = ActualCost { cost: args["cost"].as_u64(), bytes: args["bytes"].as_u64(), costs: &costs };
        let ended = id.map_err(|_| EndError::Unknown).and_then(|id| match verb {
            "commit" => self.wait_for(self.limiter().commit_async(id, &actual)),
            _ => self.wait_for(self.limiter().release_async(id)),
        });
        match ended {
            Ok(()) => json!({"ok": true}),
            Err(EndError::OtherCost) => error_json("already_committed", "another cost", "reservation"),
            Err(_) => error_json("unknown_reservation", "unknown", "reservation"),
        }
    }

    fn refund(&self, args: &Value) -> Value {
        let Ok(receipt) = self.limiter().read_receipt(text(args, "receipt")) else {
            return error_json("bad_request", "this is no receipt of ours", "receipt");
        };
        let first = self.wait_for(self.limiter().refund_async(&receipt)).unwrap();
        json!({"ok": true, "first": first})
    }

    fn subject(&self, verb: &str, args: &Value) -> Value {
        let layers = [Layer::Global, Layer::Edge, Layer::Tenant, Layer::User, Layer::Endpoint];
        let layer = layers.into_iter().find(|layer| layer.name() == text(args, "layer")).unwrap();
        let (key, limiter) = (args["key"].as_str().unwrap_or_default(), self.limiter());
        let length = Duration::from_secs(args["seconds"].as_u64().unwrap_or(0));
        let ok = match verb {
            "pause" => self.wait_for(limiter.pause_async(layer, key, length)).unwrap(),
            _ => self.wait_for(limiter.forgive_async(layer, key)).is_ok(),
        };
        json!({"ok": ok})
    }

    fn explain(&self, args: &Value) -> Value {
        let asked = |facts: &Facts<'_>| explained_json(&self.limiter().policy().explain(facts));
        facts_of(args).with(TraceId::default(), asked).unwrap_or_else(|error| error)
    }

    fn attempt(&self, args: &Value) -> Value {
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
        let attempted = self.wait_for(self.limiter().login_attempt_async(&request));
        match attempted.unwrap() {
            Attempted::Allowed(attempt) => json!({"allowed": true, "attempt": attempt}),
            Attempted::Refused(refusal) => {
                let wait = refusal.retry_after_secs();
                json!({"allowed": false, "error": refusal.code(), "lockoutRemaining": wait})
            }
        }
    }

    fn result(&self, args: &Value) -> Value {
        let (attempt, success) = (text(args, "attempt"), args["success"].as_bool().unwrap());
        let told = self.wait_for(self.limiter().login_result_async(attempt, success));
        match told {
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

    fn account(&self, verb: &str, args: &Value) -> Value {
        let (account, limiter) = (text(args, "account"), self.limiter());
        let changed = match verb {
            "reset" => self.wait_for(limiter.reset_account_async(account)),
            _ => self.wait_for(limiter.pardon_account_async(account)),
        };
        json!({"ok": changed.is_ok()})
    }
}

/// Returns the vectors, and the cases of the presets with the text of their presets.
fn files() -> Vec<(PathBuf, Option<String>)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let listed = |folder: PathBuf| std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let vectors = listed(root.join("conformance")).map(|path| (path, None));
    let presets = listed(root.join("policies/cases")).map(|path| {
        let preset = root.join("policies").join(path.file_name().unwrap()).with_extension("toml");
        (path, Some(std::fs::read_to_string(preset).unwrap()))
    });
    vectors.chain(presets).collect()
}

/// Plays every case on a store of its own. Those that `differ` must fail, so that the list stays short.
#[track_caller]
pub(crate) fn check<S: Store>(world: &dyn World<S>, differ: &[&str]) {
    let (mut failures, mut count) = (Vec::new(), 0);
    for (path, preset) in files() {
        let file: CaseFile = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        let shared = file.policy.as_ref().map(Lines::text).or(preset);
        for case in &file.cases {
            count += 1;
            let runtime = Builder::new_current_thread().enable_all().build().unwrap();
            let mut player = Played { world, runtime, clock: Arc::default(), limiter: None, reserves: false };
            let file = path.file_name().unwrap().display();
            match (play(case, shared.as_deref(), &mut player), differ.contains(&case.name.as_str())) {
                (Err(failure), false) => failures.push(format!("{file}: {failure}")),
                (Ok(()), true) => failures.push(format!("{file}: {} is played as on one server", case.name)),
                _ => {}
            }
        }
    }
    assert!(failures.is_empty(), "{} of {count} cases failed:\n{}", failures.len(), failures.join("\n"));
}
