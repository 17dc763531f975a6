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
pub use wire::{FactsBody, decision_json, error_json, explained_json, latin_1, path_error_json, plan_error_json};

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
    let fail = |step: usize, message: String| Failure { case: case.name.clone(), step, message };
    let policy = case.policy.as_ref().map(Lines::text).or_else(|| fallback.map(str::to_owned));
    let policy = policy.ok_or_else(|| fail(0, "the case has no policy".to_owned()))?;
    player.load(&policy, &case.env, true).map_err(|message| fail(0, message))?;
    let mut play = Play { player, names: BTreeMap::new(), now: Timestamp::from_secs(case.start) };
    for (index, step) in case.steps.iter().enumerate() {
        let number = index.saturating_add(1);
        if let Some(at) = step.at {
            play.now = moment(case.start, at).ok_or_else(|| fail(number, format!("{at} is no time")))?;
        }
        play.step(step, &case.env).map_err(|message| fail(number, message))?;
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

struct Play<'p> {
    player: &'p mut dyn Player,
    /// What earlier answers handed out, by the name their step gave it.
    names: BTreeMap<String, Value>,
    now: Timestamp,
}

impl Play<'_> {
    fn step(&mut self, step: &Step, env: &BTreeMap<String, String>) -> Result<(), String> {
        let mut calls = step.call.iter();
        let (Some((verb, args)), None) = (calls.next(), calls.next()) else {
            return Err(format!("a step makes one call, and this one makes {}", step.call.len()));
        };
        if verb == "policy" {
            let lines: Lines = serde_json::from_value(args.clone()).map_err(|error| error.to_string())?;
            return self.player.load(&lines.text(), env, false);
        }
        let args = self.resolve(args)?;
        let times = step.times.unwrap_or(1);
        let mut admitted: u64 = 0;
        for time in 1..=times {
            let answer = self.player.call(verb, &args, self.now)?;
            let allowed = answer.get("allowed").and_then(Value::as_bool) == Some(true);
            admitted = admitted.saturating_add(u64::from(allowed));
            if let Some(most) = step.admits
                // By place and not only by number: a limit that denies the first call and allows the second is wrong
                // too.
                && allowed != (time <= most)
            {
                return Err(format!("call {time} of {times} was {}", if allowed { "admitted" } else { "denied" }));
            }
            if let Some(expect) = &step.expect {
                compare("", expect, &answer).map_err(|message| format!("{message}\n  answer: {answer}"))?;
            }
            // Of several calls the last answer stays, which is the one that later steps continue from.
            if let Some(name) = &step.name {
                self.names.insert(name.clone(), answer);
            }
        }
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
