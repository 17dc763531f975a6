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
