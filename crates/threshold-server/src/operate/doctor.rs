//! `threshold doctor`: asks servers what should be changed about them, and compares them with each other.

use std::borrow::Cow;
use std::fmt::Write as _;

use serde_json::{Value, json};
use threshold_core::text::printable;

use super::{Api, DoctorArgs};
use crate::cli::ServerArgs;
use threshold_rehearsal::Report;

/// Clocks that are further apart are reported, in milliseconds.
const MOST_APART: u64 = 2_000;

/// Examines servers. The exit code is 1 if anything should be changed.
pub(crate) fn run(args: &DoctorArgs) -> anyhow::Result<Report> {
    let mut servers = Vec::new();
    let first = std::iter::once(args.server.server.clone());
    for server in first.chain(args.others.iter().cloned().map(Some)) {
        let api = Api::new(&ServerArgs { server, ca: args.server.ca.clone() })?;
        let asked = now();
        let mut diagnosis = api.call("GET", "/v1/doctor", None)?;
        // Halfway between question and answer is the best guess of when the server read its clock.
        let (here, took) = (asked.midpoint(now()), now().saturating_sub(asked));
        let there = diagnosis.get("now").and_then(Value::as_u64).unwrap_or(0);
        add(&mut diagnosis, clock(here, there, took));
        servers.push((api.server().to_owned(), diagnosis));
    }
    compare(&mut servers);
    let is_healthy = servers.iter().all(|(_, diagnosis)| findings(diagnosis).iter().all(is_note));
    let text = if args.json { format!("{:#}\n", in_json(&servers)) } else { described(&servers) };
    Ok(Report { text, code: u8::from(!is_healthy) })
}

fn now() -> u64 {
    u64::try_from(jiff::Timestamp::now().as_millisecond()).unwrap_or(0)
}

/// Returns a text on one line. Another program may listen at the address of a server, and its text goes to a terminal.
fn text<'v>(value: &'v Value, name: &str) -> Cow<'v, str> {
    printable(value.get(name).and_then(Value::as_str).unwrap_or_default())
}

fn findings(diagnosis: &Value) -> &[Value] {
    diagnosis.get("findings").and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// Whether a finding is about something that is over, so that nothing has to be changed.
fn is_note(finding: &Value) -> bool {
    text(finding, "level") == "note"
}

fn add(diagnosis: &mut Value, finding: Option<Value>) {
    if let (Some(finding), Some(Value::Array(findings))) = (finding, diagnosis.get_mut("findings")) {
        findings.push(finding);
    }
}

fn finding(check: &str, level: &str, message: &str, advice: &str) -> Value {
    json!({"check": check, "level": level, "message": message, "advice": advice})
}

/// The answer may have taken longer than the question, so that a difference of up to half of both says nothing.
fn clock(here: u64, there: u64, took: u64) -> Option<Value> {
    let apart = here.abs_diff(there);
    (apart > MOST_APART.saturating_add(took.div_ceil(2))).then(|| {
        let side = if there > here { "ahead of" } else { "behind" };
        let message = format!("its clock is {} s {side} the clock of this machine", apart.div_ceil(1_000));
        finding(
            "clock",
            "warning",
            &message,
            "synchronise both by NTP: bans, windows and tokens end by the clock (docs/runbooks/clock.md)",
        )
    })
}

/// Compares every server with the first.
fn compare(servers: &mut [(String, Value)]) {
    let Some(((name, first), others)) = servers.split_first_mut() else { return };
    let is_shared = |diagnosis: &Value| diagnosis.get("isShared") == Some(&Value::Bool(true));
    for (_, other) in others {
        let differs = |what: &str| other.get(what) != first.get(what);
        let secret = (differs("secret") && is_shared(first) && is_shared(other)).then(|| {
            let message = format!("its secret is another one than that of {name}");
            finding("secret", "error", &message, "give all nodes the same THRESHOLD_SECRET (docs/rotate-secret.md)")
        });
        let policy = differs("policy").then(|| {
            let message = format!("its policy is another one than that of {name}");
            finding("versions", "warning", &message, "deploy the same policy file to all nodes")
        });
        let version = differs("version").then(|| {
            let message = format!("it runs {} and {name} runs {}", text(other, "version"), text(first, "version"));
            finding("versions", "warning", &message, "finish the rollout")
        });
        [secret, policy, version].into_iter().for_each(|found| add(other, found));
    }
}

fn in_json(servers: &[(String, Value)]) -> Value {
    servers.iter().map(|(server, diagnosis)| json!({"server": server, "diagnosis": diagnosis})).collect()
}

fn described(servers: &[(String, Value)]) -> String {
    let mut out = String::new();
    for (server, diagnosis) in servers {
        let _ = writeln!(out, "{server}, Threshold {}", text(diagnosis, "version"));
        let checks = diagnosis.get("checks").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        for check in checks.iter().filter_map(Value::as_str).map(printable) {
            let found: Vec<_> = findings(diagnosis).iter().filter(|finding| text(finding, "check") == check).collect();
            if found.is_empty() {
                let _ = writeln!(out, "  ok       {check}");
            }
            for finding in found {
                let _ = writeln!(out, "  {:<8} {check:<9} {}", text(finding, "level"), text(finding, "message"));
                let _ = writeln!(out, "  {:<18} → {}", "", text(finding, "advice"));
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn diagnosis(secret: &str, policy: &str, is_shared: bool) -> Value {
        let checks = ["clock", "secret", "versions"];
        json!({"secret": secret, "policy": policy, "isShared": is_shared, "version": "1.0.0", "checks": checks, "findings": []})
    }

    /// Woken by comparing the secrets of servers that share nothing, and by comparing a server with itself only.
    #[test]
    fn servers_are_compared_with_the_first() {
        let compared = |second: Value| {
            let mut servers = vec![("a".to_owned(), diagnosis("k1", "p1", true)), ("b".to_owned(), second)];
            compare(&mut servers);
            assert!(findings(&servers[0].1).is_empty());
            described(&servers)
        };
        let alike = compared(diagnosis("k1", "p1", true));
        assert!(!alike.contains("error") && !alike.contains("warning"), "{alike}");
        let other = compared(diagnosis("k2", "p1", true));
        assert!(other.contains("error    secret    its secret is another one than that of a"), "{other}");
        let alone = compared(diagnosis("k2", "p2", false));
        assert!(!alone.contains("error") && alone.contains("warning  versions  its policy"), "{alone}");
    }

    /// Woken by escaping the whole output, in which a line feed of a finding begins a line of its own.
    #[test]
    fn a_finding_stays_on_its_line() {
        let mut hostile = diagnosis("k1", "p1", false);
        let message = "a\n  ok       routes\u{1b}[2J".to_owned();
        add(&mut hostile, Some(finding("clock", "warning", &message, "b\nc")));
        let shown = described(&[("s".to_owned(), hostile)]);
        assert_eq!(shown.lines().count(), 5, "{shown}");
        assert!(!shown.contains('\u{1b}') && shown.contains("a\\n  ok"), "{shown}");
    }

    /// Woken by an exit code of 1 for an error of last week.
    #[test]
    fn a_note_is_shown_and_changes_nothing() {
        let mut noted = diagnosis("k1", "p1", true);
        add(&mut noted, Some(finding("clock", "note", "1 call failed with timeout", "look")));
        assert!(findings(&noted).iter().all(is_note));
        let shown = described(&[("s".to_owned(), noted)]);
        assert!(shown.contains("  note     clock     1 call failed"), "{shown}");
    }

    #[test]
    fn clocks_may_be_two_seconds_apart() {
        assert_eq!((clock(10_000, 12_000, 0), clock(10_000, 8_000, 0)), (None, None));
        assert!(text(&clock(10_000, 12_001, 0).unwrap(), "message").contains("3 s ahead of"));
        assert!(text(&clock(10_000, 0, 100).unwrap(), "message").contains("10 s behind"));
        assert_eq!(clock(10_000, 13_000, 2_000), None, "a slow answer");
    }
}
