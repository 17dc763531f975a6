//! `threshold lint`: everything there is to say about a policy, with file, line and column.

use threshold_core::policy::Severity;

use crate::Report;
use crate::cli::{Denied, LintArgs};
use crate::source::Source;

pub(crate) fn run(args: &LintArgs) -> anyhow::Result<Report> {
    let source = Source::read(&args.policy)?;
    let findings = source.review().findings;
    let count = |severity| findings.iter().filter(|finding| finding.severity == severity).count();
    let (errors, warnings) = (count(Severity::Error), count(Severity::Warning));
    let mut text = source.render(&findings);
    if !findings.is_empty() {
        text.push('\n');
    }
    text.push_str(&summary(&source.name, errors, warnings));
    let code = match (errors, warnings, args.deny) {
        (1.., _, _) => 2,
        (0, 1.., Some(Denied::Warnings)) => 1,
        _ => 0,
    };
    Ok(Report { text, code })
}

fn summary(name: &str, errors: usize, warnings: usize) -> String {
    let plural = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    match (errors, warnings) {
        (0, 0) => format!("{name}: no errors, no warnings\n"),
        (0, _) => format!("{name}: {}\n", plural(warnings, "warning")),
        (_, 0) => format!("{name}: {}\n", plural(errors, "error")),
        _ => format!("{name}: {}, {}\n", plural(errors, "error"), plural(warnings, "warning")),
    }
}
