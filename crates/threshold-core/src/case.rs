//! Conformance cases: a policy, a trace of calls with their times, and what each must answer.
//!
//! One format for the vectors that every store and door must pass, and for `threshold test`. docs/cases.md describes it.
//! A [`Player`] answers the calls: [`LedgerPlayer`] by core alone, and every store and door by a player of its own.

mod door;
mod player;
mod wire;

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde_json::Value;

use crate::time::{Span, Timestamp};

pub use door::{ClientDoor, Played, play_at_door};
pub use player::LedgerPlayer;
pub use wire::{
    FactsBody, FactsRead, decision_json, error_json, explained_json, latin_1, path_error_json, plan_error_json,
};

/// 2026-01-01T00:00:00Z: when a case begins, unless it says otherwise. A whole number of days and hours.
const START: u64 = 1_767_225_600;

/// A file of cases.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CaseFile {
    /// What they are about.
    #[serde(default)]
    pub about: String,
    /// A policy for all cases that have none of their own.
    #[serde(default)]
    pub policy: Option<Lines>,
    /// The cases.
    pub cases: Vec<Case>,
}

/// One story: steps in the order of their times, on a fresh store.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// What it shows.
    pub name: String,
    /// Its own policy.
    #[serde(default)]
    pub policy: Option<Lines>,
    /// Variables for the policy.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// When it begins, in Unix seconds.
    #[serde(default = "start")]
    pub start: u64,
    /// What happens.
    pub steps: Vec<Step>,
}

fn start() -> u64 {
    START
}

/// A text, whole or line by line.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub enum Lines {
    /// Whole.
    Text(String),
    /// Line by line, as JSON is easier to read.
    Lines(Vec<String>),
}

impl Lines {
    /// The whole text.
    #[must_use]
    pub fn text(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Lines(lines) => lines.join("\n"),
        }
    }
}

/// One call, perhaps repeated, and what it must answer.
#[derive(Debug, Deserialize)]
pub struct Step {
    /// Seconds since the case began; as the step before, unless said.
    #[serde(default)]
    pub at: Option<f64>,
    /// A name for what the answer hands out, for later steps.
    #[serde(default, rename = "as")]
    pub name: Option<String>,
    /// How often the call is made; each time the answer must be as expected.
    #[serde(default)]
    pub times: Option<u64>,
    /// Of so many times, how many are allowed: the first ones.
    #[serde(default)]
    pub admits: Option<u64>,
    /// What the answer must hold; fields that are not named may be anything.
    #[serde(default)]
    pub expect: Option<Value>,
    /// The call: its verb, and what it takes.
    #[serde(flatten)]
    pub call: BTreeMap<String, Value>,
}

/// What answers the calls of a case: a store, a door, or core itself.
pub trait Player {
    /// Starts with an empty store, or continues under another policy.
    ///
    /// # Errors
    /// Where the policy cannot be used, in words.
    fn load(&mut self, policy: &str, env: &BTreeMap<String, String>, fresh: bool) -> Result<(), String>;

    /// Answers one call as the HTTP API would, in JSON. Client doors answer `client` calls only.
    ///
    /// # Errors
    /// Where this player cannot make such a call, in words.
    fn call(&mut self, verb: &str, args: &Value, now: Timestamp) -> Result<Value, String>;
}

/// Where a case went another way than expected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The case.
    pub case: String,
    /// The step, from 1.
    pub step: usize,
    /// What was expected, and what came.
    pub message: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: step {}: {}", self.case, self.step, self.message)
    }
}

/// Plays one case. `fallback` is the policy if neither the case nor its file has one.
///
/// # Errors
/// At the first step that answers otherwise than expected.
pub fn play(case: &Case, fallback: Option<&str>, player: &mut dyn Player) -> Result<(), Failure> {
    let mut play = Play::new(case, fallback)?;
    while let Some(ask) = play.next_ask()? {
        let answered = match ask {
            Ask::Load { policy, fresh } => player.load(policy, &case.env, fresh).map(|()| Value::Null),
            Ask::Call { verb, args, now } => player.call(verb, args, now),
        };
        play.answer(answered)?;
    }
    Ok(())
}

/// A time in a case, exact to the microsecond.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the range is checked first")]
fn moment(start: u64, seconds: f64) -> Option<Timestamp> {
    let micros = (seconds * 1_000_000.0).round();
    // Below 2^53 a double holds every whole number, so no microsecond is lost.
    let fits = micros.is_finite() && micros.abs() < 9.0e15;
    let start = Timestamp::from_secs(start);
    fits.then(|| {
        let span = Span::from_micros(micros.abs() as u64);
        if micros < 0.0 { start.minus(span) } else { start.plus(span) }
    })
}

/// What a case asks of its player next.
#[derive(Debug, Clone, Copy)]
pub enum Ask<'p> {
    /// To load a policy, as [`Player::load`] does. Its answer is any value.
    Load {
        /// The text of the policy.
        policy: &'p str,
        /// Whether the store is to be empty.
        fresh: bool,
    },
    /// To make a call, as [`Player::call`] does.
    Call {
        /// The verb.
        verb: &'p str,
        /// The arguments.
        args: &'p Value,
        /// The time of the call.
        now: Timestamp,
    },
}

/// A case that is being played: asks for one call after the other, and compares the answers. [`play`] answers them with a
/// [`Player`]; a host that has to wait for its answers calls [`next_ask`](Self::next_ask) and [`answer`](Self::answer) itself.
#[derive(Debug)]
pub struct Play<'c> {
    case: &'c Case,
    /// What earlier answers handed out, by the name their step gave it.
    names: BTreeMap<String, Value>,
    now: Timestamp,
    /// The policy to load, until it is loaded.
    policy: Option<String>,
    /// Whether the next policy comes with an empty store.
    fresh: bool,
    /// The step, from 1; 0 before the first policy is loaded.
    step: usize,
    /// The call of the step.
    call: Option<OneCall<'c>>,
}

#[derive(Debug)]
struct OneCall<'c> {
    verb: &'c str,
    args: Value,
    made: u64,
    admitted: u64,
}

impl<'c> Play<'c> {
    /// Begins a case. `fallback` is the policy if the case has none.
    ///
    /// # Errors
    /// Where there is no policy.
    pub fn new(case: &'c Case, fallback: Option<&str>) -> Result<Self, Failure> {
        let policy = case.policy.as_ref().map(Lines::text).or_else(|| fallback.map(str::to_owned));
        let start = Timestamp::from_secs(case.start);
        let play = Self { case, names: BTreeMap::new(), now: start, policy, fresh: true, step: 0, call: None };
        if play.policy.is_none() {
            return Err(play.fail("the case has no policy".to_owned()));
        }
        Ok(play)
    }

    /// Returns what the case asks for next; `None` at its end.
    ///
    /// # Errors
    /// Where the case is written wrongly.
    pub fn next_ask(&mut self) -> Result<Option<Ask<'_>>, Failure> {
        while self.policy.is_none() && self.call.is_none() {
            let Some(step) = self.case.steps.get(self.step) else { return Ok(None) };
            self.step = self.step.saturating_add(1);
            self.begin(step).map_err(|message| self.fail(message))?;
        }
        let call = self.call.as_ref().map(|call| Ask::Call { verb: call.verb, args: &call.args, now: self.now });
        Ok(self.policy.as_deref().map(|policy| Ask::Load { policy, fresh: self.fresh }).or(call))
    }

    /// Compares the answer to what was asked last with what the case expects.
    ///
    /// # Errors
    /// Where they differ, and where the player could not answer.
    pub fn answer(&mut self, answer: Result<Value, String>) -> Result<(), Failure> {
        let compared = answer.and_then(|answer| {
            if self.policy.take().is_some() {
                self.fresh = false;
                return Ok(());
            }
            self.compare_call(answer)
        });
        compared.map_err(|message| self.fail(message))
    }

    fn fail(&self, message: String) -> Failure {
        Failure { case: self.case.name.clone(), step: self.step, message }
    }

    fn begin(&mut self, step: &'c Step) -> Result<(), String> {
        if let Some(at) = step.at {
            self.now = moment(self.case.start, at).ok_or_else(|| format!("{at} is no time"))?;
        }
        let mut calls = step.call.iter();
        let (Some((verb, args)), None) = (calls.next(), calls.next()) else {
            return Err(format!("a step makes one call, and this one makes {}", step.call.len()));
        };
        if verb == "policy" {
            let lines: Lines = serde_json::from_value(args.clone()).map_err(|error| error.to_string())?;
            self.policy = Some(lines.text());
        } else if step.times != Some(0) {
            self.call = Some(OneCall { verb, args: self.resolve(args)?, made: 0, admitted: 0 });
        }
        Ok(())
    }

    /// Compares an answer with what its step expects, and ends the step after the last of its calls.
    fn compare_call(&mut self, answer: Value) -> Result<(), String> {
        let step = self.step.checked_sub(1).and_then(|index| self.case.steps.get(index));
        let (Some(step), Some(call)) = (step, &mut self.call) else { return Err("nothing was asked".to_owned()) };
        let (times, allowed) = (step.times.unwrap_or(1), answer.get("allowed").and_then(Value::as_bool) == Some(true));
        call.made = call.made.saturating_add(1);
        call.admitted = call.admitted.saturating_add(u64::from(allowed));
        let (made, admitted) = (call.made, call.admitted);
        if let Some(most) = step.admits
            // By place and not only by number: a limit that denies the first call and allows the second is wrong too.
            && allowed != (made <= most)
        {
            return Err(format!("call {made} of {times} was {}", if allowed { "admitted" } else { "denied" }));
        }
        if let Some(expect) = &step.expect {
            compare("", expect, &answer).map_err(|message| format!("{message}\n  answer: {answer}"))?;
        }
        // Of several calls the last answer stays, which is the one that later steps continue from.
        if let Some(name) = &step.name {
            self.names.insert(name.clone(), answer);
        }
        if made < times {
            return Ok(());
        }
        self.call = None;
        match step.admits {
            Some(most) if admitted != most.min(times) => {
                Err(format!("{admitted} of {times} were admitted, not {most}"))
            }
            _ => Ok(()),
        }
    }

    /// Replaces `"$name.field"` by that field of an earlier answer.
    fn resolve(&self, args: &Value) -> Result<Value, String> {
        Ok(match args {
            Value::String(text) => match text.strip_prefix('$') {
                None => args.clone(),
                Some(reference) => {
                    let (name, field) =
                        reference.split_once('.').ok_or_else(|| format!("\"{text}\" names no field"))?;
                    let answer = self.names.get(name).ok_or_else(|| format!("no step is called \"{name}\""))?;
                    answer.get(field).cloned().ok_or_else(|| format!("the answer of \"{name}\" has no \"{field}\""))?
                }
            },
            Value::Object(fields) => {
                let resolved: Result<serde_json::Map<_, _>, String> =
                    fields.iter().map(|(name, value)| Ok((name.clone(), self.resolve(value)?))).collect();
                Value::Object(resolved?)
            }
            Value::Array(items) => Value::Array(items.iter().map(|item| self.resolve(item)).collect::<Result<_, _>>()?),
            other => other.clone(),
        })
    }
}

/// Whether an answer holds all that is expected: objects by the fields named, lists item by item. `"*"` is anything but
/// null, `"-"` is absent or null.
fn compare(path: &str, expect: &Value, answer: &Value) -> Result<(), String> {
    match (expect, answer) {
        (Value::String(any), answer) if any == "*" => {
            if answer.is_null() {
                Err(format!("{path} is null"))
            } else {
                Ok(())
            }
        }
        (Value::Object(wanted), Value::Object(found)) => {
            for (name, wanted) in wanted {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                let found = found.get(name).unwrap_or(&Value::Null);
                if wanted.as_str() == Some("-") {
                    if !found.is_null() {
                        return Err(format!("{path} is {found}, and nothing was expected"));
                    }
                    continue;
                }
                compare(&path, wanted, found)?;
            }
            Ok(())
        }
        (Value::Array(wanted), Value::Array(found)) => {
            if wanted.len() != found.len() {
                return Err(format!("{path} has {} items, not {}", found.len(), wanted.len()));
            }
            wanted
                .iter()
                .zip(found)
                .enumerate()
                .try_for_each(|(index, (wanted, found))| compare(&format!("{path}[{index}]"), wanted, found))
        }
        // Numbers are compared as JSON: 1 and 1.0 differ, as they would for a client that parses integers.
        _ if expect == answer => Ok(()),
        _ => Err(format!("{path} is {answer}, not {expect}")),
    }
}
