//! The test vectors for doors that face clients. Tests of those doors include this file.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;

use serde_json::{Map, Value, json};
use threshold_core::case::{Case, CaseFile, ClientDoor, Lines, Played, latin_1, play_at_door};

/// How many cases are played in parallel. Some wait out the delay of a shadow ban.
const AT_ONCE: usize = 8;

/// A case, the name of its file, and the policy of that file.
struct Vector {
    file: String,
    policy: Option<String>,
    case: Case,
}

fn vectors() -> Vec<Vector> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../conformance");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut vectors = Vec::new();
    for path in files {
        let file: CaseFile = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        let policy = file.policy.as_ref().map(Lines::text);
        let name = path.file_name().unwrap().display().to_string();
        vectors.extend(file.cases.into_iter().map(|case| Vector { file: name.clone(), policy: policy.clone(), case }));
    }
    vectors
}

/// Returns the answer that a client got, in the form of the vectors.
pub(crate) fn answer(status: u16, headers: &[(String, String)], body: &str) -> Value {
    let headers: Map<_, _> = headers.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
    let text = Some(body).filter(|body| !body.is_empty());
    let body = text.map(|text| serde_json::from_str(text).unwrap_or_else(|_| json!(text)));
    json!({"status": status, "headers": headers, "body": body})
}

/// Returns the raw header lines of a call.
pub(crate) fn lines(facts: &Map<String, Value>) -> Vec<(String, Vec<u8>)> {
    let lines: Vec<(String, String)> =
        facts.get("lines").map(|lines| serde_json::from_value(lines.clone()).unwrap()).unwrap_or_default();
    lines.into_iter().map(|(name, value)| (name, latin_1(&value).unwrap())).collect()
}

/// Plays all cases at doors made by `make`. Every case must agree with core or be left out for one of `reasons`. At least
/// `at_least` must be played, so that none is left out unnoticed.
#[track_caller]
pub(crate) fn play_all<D: ClientDoor>(make: impl Fn() -> D + Sync, reasons: &[&'static str], at_least: usize) {
    let waiting = Mutex::new(vectors());
    let all = waiting.lock().unwrap().len();
    let results = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                let mut door = make();
                loop {
                    let Some(Vector { file, policy, case }) = waiting.lock().unwrap().pop() else { break };
                    let result = play_at_door(&case, policy.as_deref(), &mut door);
                    results.lock().unwrap().push(result.map_err(|failure| format!("{file}: {failure}")));
                }
            });
        }
    });
    let results = results.into_inner().unwrap();
    let failures: Vec<&str> = results.iter().filter_map(|result| result.as_ref().err().map(String::as_str)).collect();
    assert!(failures.is_empty(), "{} of {all} cases failed:\n{}", failures.len(), failures.join("\n"));
    let played = results.iter().filter(|result| **result == Ok(Played::Agrees)).count();
    let left_out =
        |reason: &'static str| results.iter().filter(|result| **result == Ok(Played::LeftOut(reason))).count();
    let left_out: BTreeMap<&str, usize> = reasons.iter().map(|reason| (*reason, left_out(reason))).collect();
    // Every case is either played or left out for one of these reasons.
    assert_eq!(all.checked_sub(played), Some(left_out.values().sum()), "{left_out:?}");
    assert!(played >= at_least, "only {played} of {all} were played; left out: {left_out:?}");
}
