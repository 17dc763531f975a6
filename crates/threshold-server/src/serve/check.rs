//! `threshold serve --check`: finds what would keep a server from starting, and starts nothing.

use std::path::Path;

use threshold_core::policy::{Policy, Review, Severity};
use threshold_limiter::journal::{GivenSecrets, JournalError, check_installation};
use threshold_wire::jwt::read_key_file;

use super::{
    Certificates, StoreUrl, Tokens, check_addresses, check_journal_name, check_secrets, events_path, policy_notes,
    read_policy, secret, sink_settings, store, unsafe_folders,
};
use crate::cli::ServeArgs;
use crate::log;
use crate::otlp::Telemetry;
use crate::reload::TenantFolder;
use crate::signals::database::EventDatabase;
use threshold_rehearsal::Report;
use threshold_rehearsal::lint::{self, Denied};

/// Prints what is wrong, and exits as `lint` does.
pub(super) fn run(args: &ServeArgs) -> anyhow::Result<Report> {
    let source = read_policy(args)?;
    let Review { policy, findings, .. } = lint::review(&source);
    let mut text = source.render(&findings);
    if !findings.is_empty() {
        text.push('\n');
    }
    let count = |severity| findings.iter().filter(|finding| finding.severity == severity).count();
    let (errors, warnings) = (count(Severity::Error), count(Severity::Warning));
    text.push_str(&lint::summary(&source.name, errors, warnings));
    let folders = unsafe_folders(args, policy.as_ref());
    for reason in &folders {
        text.push_str(&format!("warning: {reason}\n"));
    }
    let warnings = warnings.saturating_add(folders.len());
    let mut problems = problems(args, policy.as_ref());
    problems.extend(tenant_problems(args, policy));
    for problem in &problems {
        text.push_str(&format!("error: {problem:#}\n"));
    }
    let code = match (errors.saturating_add(problems.len()), warnings, args.deny) {
        (1.., _, _) => 2,
        (0, 1.., Some(Denied::Warnings)) => 1,
        _ => 0,
    };
    Ok(Report { text, code })
}

/// Returns every reason besides the policy's errors, so that one run shows them all.
fn problems(args: &ServeArgs, policy: Option<&Policy>) -> Vec<anyhow::Error> {
    let refused = policy.and_then(|policy| policy_notes::unusable(policy, args.allow_empty));
    let mut problems: Vec<anyhow::Error> = refused.map(anyhow::Error::msg).into_iter().collect();
    match Tokens::from_environment() {
        Ok(tokens) => problems.extend(check_addresses(args, &tokens).err()),
        Err(error) => problems.push(error),
    }
    if let (Some(cert), Some(key)) = (&args.tls_cert, &args.tls_key) {
        problems.extend(Certificates::read(cert, key).err());
    }
    let keys = policy.and_then(|policy| policy.identity().jwt.as_ref()?.key_file.as_deref());
    // A warning of lint, because the file may exist on the server, which this is.
    problems.extend(keys.and_then(|keys| read_key_file(Path::new(keys)).err()).map(anyhow::Error::new));
    problems.extend(log::check().err());
    problems.extend(Telemetry::check_environment().err());
    problems.extend(sink_settings(args).and_then(|settings| settings.check_files()).err());
    problems.extend(check_journal_name(args).and_then(|()| installation(args)).err());
    problems.extend(events_path(args).and_then(|events| EventDatabase::check(&events).err()));
    problems
}

/// Returns what is wrong with the files of tenants. The server would start without them.
fn tenant_problems(args: &ServeArgs, policy: Option<Policy>) -> Vec<anyhow::Error> {
    let Some(folder) = args.tenants.as_deref() else { return Vec::new() };
    let mut folder = match TenantFolder::open(folder) {
        Ok(folder) => folder,
        Err(error) => return vec![error],
    };
    if let Some(mut policy) = policy {
        folder.apply(&mut policy);
    }
    folder.problems().map(|problem| anyhow::anyhow!("{problem}")).collect()
}

/// Checks the secrets, and the files beside the journal.
fn installation(args: &ServeArgs) -> anyhow::Result<()> {
    let (present, old) = (secret("THRESHOLD_SECRET")?, secret("THRESHOLD_SECRET_OLD")?);
    if let StoreUrl::Redis(url) = StoreUrl::chosen(args)? {
        let secrets = store::secrets(present.as_deref(), old.as_deref())?;
        store::options(args, &url, &secrets)?;
    }
    if args.no_db {
        return check_secrets(present.as_deref(), old.as_deref());
    }
    match check_installation(&args.db, GivenSecrets { present: present.as_deref(), old: old.as_deref() }) {
        // `--new-journal` would create it, and a check creates nothing.
        Err(JournalError::Missing(..)) if args.new_journal => Ok(()),
        checked => Ok(checked?),
    }
}
