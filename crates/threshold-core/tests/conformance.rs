//! Core plays the test vectors in `conformance/` and must give the answers that they contain.

#![expect(clippy::disallowed_methods, reason = "the vectors are files, and a test may read them")]

use std::path::Path;

use threshold_core::case::{CaseFile, LedgerPlayer, Lines, play};

/// The smallest number of cases, so that none is lost unnoticed.
const AT_LEAST: usize = 300;

#[test]
fn core_gives_the_answer_of_every_vector() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../conformance");
    let mut files: Vec<_> = std::fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
        .collect();
    files.sort();
    let mut failures = Vec::new();
    let mut count = 0;
    for path in files {
        let text = std::fs::read_to_string(&path).expect("the file was just listed");
        let file: CaseFile = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let shared = file.policy.as_ref().map(Lines::text);
        for case in &file.cases {
            count += 1;
            if let Err(failure) = play(case, shared.as_deref(), &mut LedgerPlayer::default()) {
                failures.push(format!("{}: {failure}", path.file_name().unwrap_or_default().display()));
            }
        }
    }
    assert!(failures.is_empty(), "{} of {count} cases failed:\n{}", failures.len(), failures.join("\n"));
    assert!(count >= AT_LEAST, "{count} cases, and there must be {AT_LEAST}");
}

/// What a library pauses by `pause_rule`, a case could not: a step knew subjects alone.
#[test]
fn a_step_pauses_what_a_rule_counts_for_a_request() {
    let played = |pause: &str| {
        let text = format!(
            r#"{{
                "policy": ["[[rule]]", "name = 'provider'", "per = ['host']", "limit = '9/s'"],
                "cases": [{{
                    "name": "pauses",
                    "steps": [
                        {{"at": 0, "pause": {{{pause}, "seconds": 60}}, "expect": {{"ok": true}}}},
                        {{"at": 59, "check": {{"host": "a.example"}}, "expect": {{"allowed": false, "retryAfter": 1}}}},
                        {{"check": {{"host": "b.example"}}, "expect": {{"allowed": true}}}},
                        {{"at": 60, "check": {{"host": "a.example"}}, "expect": {{"allowed": true}}}}
                    ]
                }}]
            }}"#
        );
        let file: CaseFile = serde_json::from_str(&text).expect("it is a file of cases");
        let policy = file.policy.as_ref().map(Lines::text);
        play(&file.cases[0], policy.as_deref(), &mut LedgerPlayer::default()).map_err(|failure| failure.to_string())
    };
    assert_eq!(played(r#""rule": "provider", "request": {"host": "a.example"}"#), Ok(()));
    let failed = |pause| played(pause).expect_err("it pauses something else");
    assert!(failed(r#""rule": "other", "request": {"host": "a.example"}"#).contains("ok"));
    for mixed in [r#""rule": "provider""#, r#""layer": "user", "key": "u1", "request": {}"#] {
        assert!(failed(mixed).contains("a layer and a key, or a rule and a request"), "{}", failed(mixed));
    }
}
