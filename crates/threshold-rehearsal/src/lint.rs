//! `threshold lint`: prints the errors and warnings of a policy, with file, line and column.

mod coverage;
mod openapi;

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};

use threshold_core::policy::{Finding, Policy, Review, Severity};
use threshold_wire::jwt::{KeyError, Verifier, read_key_file};

use crate::Report;
use crate::source::{Source, Tenants, changes, joined};

/// The most lines of changes.
const MAX_CHANGES: usize = 30;

/// What `threshold lint` is given.
#[derive(Debug, Args)]
pub struct LintArgs {
    /// The policy file, or - for standard input
    pub(crate) policy: PathBuf,
    /// Exit with 1 if there are warnings
    #[arg(long, value_enum)]
    pub(crate) deny: Option<Denied>,
    /// The policy before the change: list what has changed, and warn of state that a server forgets by it
    #[arg(long, value_name = "OLD")]
    pub(crate) against: Option<PathBuf>,
    /// An access log: warn of its requests that no rule limits; may be repeated
    #[arg(long, value_name = "LOG")]
    pub(crate) log: Vec<PathBuf>,
    /// An OpenAPI document, JSON or YAML: warn of its operations that no rule limits
    #[arg(long, value_name = "FILE")]
    pub(crate) openapi: Option<PathBuf>,
}

/// What makes `threshold lint` fail, besides errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Denied {
    #[expect(missing_docs, reason = "clap would print it as a help of its own")]
    Warnings,
}

/// Reviews a policy, and prints what was found.
///
/// # Errors
/// Returns an error for a file that cannot be read.
pub fn run(args: &LintArgs) -> anyhow::Result<Report> {
    let source = Source::read(&args.policy)?;
    let Review { policy, mut findings, rule_names, .. } = review(&source);
    let mut changed = String::new();
    // A policy with errors is not compared: what it forgets or covers cannot be known.
    if let Some(policy) = &policy {
        if let Some(old) = &args.against {
            let old = Source::read(old)?;
            let before = old.policy()?;
            findings.extend(forgotten(policy, &before, &rule_names));
            changed = change_list(&source, &old);
        }
        let mut open = coverage::by_log(policy, &args.log)?;
        if let Some(document) = &args.openapi {
            open.extend(coverage::by_openapi(policy, document)?);
        }
        // The policy itself may accept a warning, with a reason in the file beside it.
        open.retain(|finding| !policy.allows(finding.code, None));
        findings.extend(open);
    }
    let count = |severity| findings.iter().filter(|finding| finding.severity == severity).count();
    let (errors, warnings) = (count(Severity::Error), count(Severity::Warning));
    let mut text = source.render(&findings);
    if !findings.is_empty() {
        text.push('\n');
    }
    text.push_str(&changed);
    text.push_str(&summary(&source.name, errors, warnings));
    let code = match (errors, warnings, args.deny) {
        (1.., _, _) => 2,
        (0, 1.., Some(Denied::Warnings)) => 1,
        _ => 0,
    };
    Ok(Report { text, code })
}

/// Reviews a policy, with the keys of its `[identity.jwt]`.
#[must_use]
pub fn review(source: &Source) -> Review {
    let mut review = source.review();
    if let Some(policy) = &review.policy {
        let span = review.key_span.clone().unwrap_or(0..0);
        review.findings.extend(keys(policy, span).into_iter().filter(|finding| !policy.allows(finding.code, None)));
    }
    review
}

/// Checks the keys of `[identity.jwt]`. A missing key file is only a warning: it may exist on the server.
fn keys(policy: &Policy, span: std::ops::Range<usize>) -> Option<Finding> {
    let settings = policy.identity().jwt.as_ref()?;
    let file = settings.key_file.as_deref().map(Path::new);
    let (severity, code, message) = match file.map(read_key_file).transpose() {
        Err(error) => (Severity::Warning, "no-key-file", describe(error)),
        Ok(contents) => {
            let checked = match &contents {
                Some(contents) => Verifier::with_key(settings, contents),
                None => Verifier::new(settings),
            };
            // A key that exists and cannot be used keeps the server from starting, so it is an error.
            (Severity::Error, "bad-key", describe(checked.err()?))
        }
    };
    let help = "docs/policy.md says what each algorithm takes".to_owned();
    Some(Finding { severity, code, span, message, help })
}

/// Formats an error of a key with its cause.
fn describe(error: KeyError) -> String {
    format!("{:#}", anyhow::Error::from(error))
}

/// Lists what differs from the old policy. These are no findings: a change is meant.
fn change_list(source: &Source, old: &Source) -> String {
    let changes = changes(&old.text, &source.text, Tenants::Named);
    if changes.is_empty() {
        return String::new();
    }
    format!("changes since {}:\n  {}\n\n", old.name, joined(&changes, MAX_CHANGES, "\n  "))
}

/// Returns warnings about state that is forgotten when this policy replaces the old one.
fn forgotten<'f>(
    policy: &'f Policy,
    old: &'f Policy,
    names: &'f [(Box<str>, std::ops::Range<usize>)],
) -> impl Iterator<Item = Finding> + 'f {
    let unmeant = policy.forgets(old).into_iter();
    let unmeant = unmeant.filter(|forgotten| !policy.allows("forgets", forgotten.rule.as_deref()));
    unmeant.map(|forgotten| {
        let own = forgotten.rule.and_then(|rule| names.iter().find(|(name, _)| *name == rule));
        let span = own.map_or(0..0, |(_, span)| span.clone());
        let help = "a rule is known by name, per and algorithm; keep them, or change when little is lost";
        Finding { severity: Severity::Warning, code: "forgets", span, message: forgotten.what, help: help.to_owned() }
    })
}

/// Counts the findings, in words.
#[must_use]
pub fn summary(name: &str, errors: usize, warnings: usize) -> String {
    let plural = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    match (errors, warnings) {
        (0, 0) => format!("{name}: no errors, no warnings\n"),
        (0, _) => format!("{name}: {}\n", plural(warnings, "warning")),
        (_, 0) => format!("{name}: {}\n", plural(errors, "error")),
        _ => format!("{name}: {}, {}\n", plural(errors, "error"), plural(warnings, "warning")),
    }
}
