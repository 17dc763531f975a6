//! Cases at doors that face clients: every answer must be what core would have a client read.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::{Case, Failure, LedgerPlayer, Player, play};
use crate::time::Timestamp;

/// A door that faces clients, as cases ask it.
pub trait ClientDoor {
    /// A policy with what this door needs to find in it; as it is, unless said.
    fn policy(&self, text: &str) -> String {
        text.to_owned()
    }

    /// The facts of a call as this door sees them: a request always has a method, for instance.
    ///
    /// # Errors
    /// Why no request to this door says the same.
    fn express(&self, facts: &Map<String, Value>) -> Result<Map<String, Value>, &'static str>;

    /// Starts with an empty store, or continues under another policy.
    ///
    /// # Errors
    /// Where the policy cannot be used, in words.
    fn load(&mut self, policy: &str, env: &BTreeMap<String, String>, fresh: bool) -> Result<(), String>;

    /// Asks, and returns what a client reads: `status`, `headers` by lower-case name, and `body` as JSON, text or null.
    ///
    /// # Errors
    /// Where the door gave no answer, in words.
    fn ask(&mut self, facts: &Map<String, Value>, now: Timestamp) -> Result<Value, String>;
}

/// What became of a case at a door.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Played {
    /// Every answer was core's.
    Agrees,
    /// No client can make such calls here, and why.
    LeftOut(&'static str),
}

/// The fields of an answer that come from a decision.
const FIELDS: [&str; 9] = [
    "x-ratelimit-limit",
    "x-ratelimit-remaining",
    "x-ratelimit-reset",
    "x-ratelimit-warning",
    "x-ratelimit-banned",
    "ratelimit",
    "ratelimit-policy",
    "retry-after",
    "set-cookie",
];

/// Plays one case at a door, with core beside it. Whatever the case expects, core must answer first; then every answer of
/// the door must be core's, in status, fields and body.
///
/// # Errors
/// At the first answer that is not.
pub fn play_at_door(case: &Case, fallback: Option<&str>, door: &mut dyn ClientDoor) -> Result<Played, Failure> {
    let calls = || case.steps.iter().flat_map(|step| &step.call).filter(|(verb, _)| *verb != "policy");
    if calls().any(|(verb, _)| verb != "check" && verb != "client") {
        return Ok(Played::LeftOut("calls that are not a client's"));
    }
    for (_, args) in calls() {
        if let Err(reason) = args.as_object().map_or(Err("a call without facts"), |facts| door.express(facts)) {
            return Ok(Played::LeftOut(reason));
        }
    }
    // Vectors need not tell a method or a path, and requests always do: a case that goes another way for it is not one for
    // doors.
    if play(
        case,
        fallback,
        &mut Beside { door, asks: false, told: LedgerPlayer::default(), read: LedgerPlayer::default() },
    )
    .is_err()
    {
        return Ok(Played::LeftOut("requests that lack what every request has"));
    }
    let mut player = Beside { door, asks: true, told: LedgerPlayer::default(), read: LedgerPlayer::default() };
    play(case, fallback, &mut player).map(|()| Played::Agrees)
}

/// A door, and core beside it.
struct Beside<'d> {
    door: &'d mut dyn ClientDoor,
    /// Whether the door is asked, or core alone.
    asks: bool,
    /// Says what the case expects to be told.
    told: LedgerPlayer,
    /// Says what a client reads; it has seen the same calls.
    read: LedgerPlayer,
}

impl Player for Beside<'_> {
    fn load(&mut self, policy: &str, env: &BTreeMap<String, String>, fresh: bool) -> Result<(), String> {
        let policy = self.door.policy(policy);
        self.told.load(&policy, env, fresh)?;
        self.read.load(&policy, env, fresh)?;
        if self.asks { self.door.load(&policy, env, fresh) } else { Ok(()) }
    }

    fn call(&mut self, verb: &str, args: &Value, now: Timestamp) -> Result<Value, String> {
        let facts = args.as_object().ok_or("a call without facts")?;
        let facts = self.door.express(facts)?;
        let mut told = facts.clone();
        // Core's `check` takes facts only. What a client accepts belongs to the answer of the door.
        if verb == "check" {
            told.remove("accept");
        }
        let told = self.told.call(verb, &Value::Object(told), now)?;
        let expected = self.read.call("client", &Value::Object(facts.clone()), now)?;
        if self.asks {
            let answer = self.door.ask(&facts, now)?;
            agree(&expected, &answer).map_err(|message| format!("{message}\n  door: {answer}\n  core: {expected}"))?;
        }
        Ok(told)
    }
}

/// Whether a door answered as core does.
fn agree(expected: &Value, answer: &Value) -> Result<(), String> {
    let part = |value: &Value, path: &str| value.pointer(path).cloned().unwrap_or_default();
    let same = |name: &str, expected: Value, found: Value| {
        if expected == found { Ok(()) } else { Err(format!("{name} is {found}, and {expected} in core")) }
    };
    // Every answer has the id of its request, also where nothing was decided.
    let trace = part(answer, "/headers/x-trace-id");
    if trace.as_str().is_none_or(|trace| trace.len() != 32) {
        return Err(format!("the trace id is {trace}"));
    }
    // What cannot be decided is an error to callers of the API, and a status to clients.
    if let Some(error) = expected.get("error") {
        if let Some(status) = expected.get("status") {
            return same("status", status.clone(), part(answer, "/status"));
        }
        let status = match (error.as_str(), expected.get("field").and_then(Value::as_str)) {
            (Some("cost_exceeds_limit"), Some("bytes")) => 413,
            (Some("cost_exceeds_limit"), _) => 400,
            (Some("too_many_rules"), _) => 503,
            _ => 429,
        };
        return same("status", json!(status), part(answer, "/status"));
    }
    same("status", part(expected, "/status"), part(answer, "/status"))?;
    for name in FIELDS {
        let path = format!("/headers/{name}");
        same(name, part(expected, &path), part(answer, &path))?;
    }
    if expected.get("allowed") == Some(&Value::Bool(true)) {
        return Ok(());
    }
    for path in ["/headers/content-type", "/headers/cache-control"] {
        same(path, part(expected, path), part(answer, path))?;
    }
    // Each decision has an id of its own.
    let body = |value: &Value| {
        let mut body = part(value, "/body");
        let trace = body.as_object_mut().and_then(|fields| fields.remove("traceId"));
        (body, trace)
    };
    let ((expected, traced), (found, in_body)) = (body(expected), body(answer));
    same("body", expected, found)?;
    same("a trace id", json!(traced.is_some()), json!(in_body.is_some()))?;
    in_body.map_or(Ok(()), |in_body| same("the trace id of the body", trace, in_body))
}
