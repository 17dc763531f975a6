//! `threshold backup` and `threshold restore`: copies of the journal, and the way back.

use std::path::Path;

use threshold_limiter::journal::{AuditLine, GivenSecrets, Journal, installation_secrets, secret_path};
use threshold_limiter::{Clock as _, SystemClock};

use crate::Report;
use crate::cli::{BackupArgs, RestoreArgs};
use crate::serve::secret;

/// Copies the journal as it is on disk, also while a server writes to it.
pub(crate) fn backup(args: &BackupArgs) -> anyhow::Result<Report> {
    Journal::copy(&args.db, &args.file)?;
    let rows = Journal::read(&args.file)?.rows.len();
    let secret = secret_path(&args.db);
    let text = format!(
        "{} holds {rows} rows; keep {} with it, without which it is of no use\n",
        args.file.display(),
        if secret.exists() { secret.display().to_string() } else { "THRESHOLD_SECRET".to_owned() },
    );
    Ok(Report { text, code: 0 })
}

/// Puts a copy in the journal's place. No server may run on it.
pub(crate) fn restore(args: &RestoreArgs) -> anyhow::Result<Report> {
    let before = Journal::replace(&args.file, &args.db)?;
    let rows = Journal::read(&args.db)?.rows.len();
    let mut text = format!("{} holds {rows} rows\n", args.db.display());
    if let Err(error) = audit(args, before.as_deref()) {
        crate::complain(&format!("the audit of {} does not say that it was restored: {error:#}", args.db.display()));
    }
    if let Some(before) = before {
        text.push_str(&format!("what was there before is {}\n", before.display()));
    }
    Ok(Report { text, code: 0 })
}

/// Writes into a restored journal that it was restored: its own audit ends where the copy was made.
fn audit(args: &RestoreArgs, before: Option<&Path>) -> anyhow::Result<()> {
    let (given, old) = (secret("THRESHOLD_SECRET")?, secret("THRESHOLD_SECRET_OLD")?);
    // Without its secret nobody opens it, and to make another would not help.
    if given.is_none() && !secret_path(&args.db).exists() {
        anyhow::bail!("there is neither {} nor THRESHOLD_SECRET", secret_path(&args.db).display());
    }
    let secrets = installation_secrets(&args.db, GivenSecrets { present: given.as_deref(), old: old.as_deref() })?;
    let (journal, _) = Journal::open(&args.db, &secrets)?;
    let name = |path: &Path| path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
    let before = before.map(|before| format!(", in place of {}", name(before))).unwrap_or_default();
    let action = format!("restore: {}{before}", name(&args.file));
    let about = format!("journal {}", name(&args.db));
    let (at, who) = (SystemClock::new().now(), "local".to_owned());
    journal.audit(AuditLine { at, who, action, about, why: String::new() })?;
    anyhow::ensure!(journal.close(), "it could not be written");
    Ok(())
}
