//! `threshold test`: runs a policy's test cases, in the format of the conformance vectors.

use std::path::PathBuf;

use anyhow::{Context as _, bail};
use clap::Args;
use threshold_core::case::{CaseFile, LedgerPlayer, Lines, play};

use crate::Report;
use crate::source::{Source, read_text};

/// The largest file of cases, in bytes.
const MAX_CASES: usize = 64 << 20;

/// What `threshold test` is given.
#[derive(Debug, Args)]
pub struct TestArgs {
    /// The policy file, or - for standard input
    pub(crate) policy: PathBuf,
    /// Files of cases, in the format of docs/cases.md
    #[arg(required = true)]
    pub(crate) cases: Vec<PathBuf>,
}

/// Plays the cases.
///
/// # Errors
/// Returns an error for a policy or a file that cannot be read.
pub fn run(args: &TestArgs) -> anyhow::Result<Report> {
    let source = Source::read(&args.policy)?;
    // An invalid policy fails here once, with line and column, rather than in every case.
    source.policy()?;
    let mut text = String::new();
    let (mut passed, mut failed) = (0usize, 0usize);
    for path in &args.cases {
        let cases = read_text(path, MAX_CASES)?;
        let file: CaseFile = serde_json::from_str(&cases).with_context(|| format!("{}", path.display()))?;
        if file.cases.is_empty() {
            bail!("{} has no cases, so it tests nothing", path.display());
        }
        let shared = file.policy.as_ref().map(Lines::text);
        for case in &file.cases {
            let policy = shared.as_deref().unwrap_or(&source.text);
            match play(case, Some(policy), &mut LedgerPlayer::default()) {
                Ok(()) => {
                    passed = passed.saturating_add(1);
                    text.push_str(&format!("ok     {}\n", case.name));
                }
                Err(failure) => {
                    failed = failed.saturating_add(1);
                    text.push_str(&format!("FAILED {}: {failure}\n", path.display()));
                }
            }
        }
    }
    text.push_str(&format!("{passed} passed, {failed} failed\n"));
    Ok(Report { text, code: u8::from(failed > 0) })
}
