//! `threshold backup` and `threshold restore`: copy the journal, and put a copy in its place.

use std::path::Path;

use threshold_core::Secrets;
use threshold_limiter::journal::{
    AuditLine, GivenSecrets, Journal, JournalError, KeyIds, installation_secrets, old_secret_path, secret_path,
};
use threshold_limiter::{Clock as _, SystemClock};

use crate::cli::{BackupArgs, RestoreArgs};
use crate::serve::secret;
use threshold_rehearsal::Report;

/// Copies the journal, also while a server writes to it.
pub(crate) fn backup(args: &BackupArgs) -> anyhow::Result<Report> {
    Journal::copy(&args.db, &args.file)?;
    // Read back from the copy, which verifies the checksum of every row.
    let rows = Journal::read(&args.file)?.rows.len();
    let text = format!(
        "{} has {rows} rows; keep {} with it, because it cannot be used without\n",
        args.file.display(),
        secret_names(&args.db),
    );
    Ok(Report { text, code: 0 })
}

/// Names the secrets that the rows of a journal are under. During a rotation some are still under the old one.
fn secret_names(db: &Path) -> String {
    const OLD: &str = "THRESHOLD_SECRET_OLD";
    let name = |path: &Path| path.exists().then(|| path.display().to_string());
    let present = name(&secret_path(db)).unwrap_or_else(|| "THRESHOLD_SECRET".to_owned());
    let old = std::env::var_os(OLD).map(|_| OLD.to_owned()).or_else(|| name(&old_secret_path(db)));
    old.map_or_else(|| present.clone(), |old| format!("{present} and {old}"))
}

/// Replaces the journal by a copy. No server may use it meanwhile.
pub(crate) fn restore(args: &RestoreArgs) -> anyhow::Result<Report> {
    // Before anything is written: a server cannot read the copy without its secret, and the journal of before would be gone.
    let secrets = secrets_of_copy(args)?;
    let before = Journal::replace(&args.file, &args.db)?;
    let rows = Journal::read(&args.db)?.rows.len();
    let mut text = format!("{} has {rows} rows\n", args.db.display());
    // Only reported: the journal is in its place, and to fail now would suggest that it is not.
    if let Err(error) = audit(args, &secrets, before.as_deref()) {
        crate::print_error(&format!("the restore is not recorded in the audit of {}: {error:#}", args.db.display()));
    }
    if let Some(before) = before {
        text.push_str(&format!("the journal before it is now {}\n", before.display()));
    }
    Ok(Report { text, code: 0 })
}

/// Returns the secrets that a server would use on the restored journal.
///
/// # Errors
/// Fails if there are none, or if the copy was written under another one.
fn secrets_of_copy(args: &RestoreArgs) -> anyhow::Result<Secrets> {
    let (given, old) = (secret("THRESHOLD_SECRET")?, secret("THRESHOLD_SECRET_OLD")?);
    let path = secret_path(&args.db);
    // Reading the secrets would create a new one, under which the copy's rows cannot be read.
    anyhow::ensure!(
        given.is_some() || path.exists(),
        "nothing was restored: neither the file {} nor THRESHOLD_SECRET exists; put the secret of {} there first",
        path.display(),
        args.file.display(),
    );
    let secrets = installation_secrets(&args.db, GivenSecrets { present: given.as_deref(), old: old.as_deref() })?;
    let known = KeyIds::from(&secrets);
    let written_under = Journal::read_key_id(&args.file)?;
    // During a rotation a copy from before it is under the old secret, which the server still knows.
    if written_under != known.present && Some(written_under) != known.old {
        return Err(anyhow::Error::new(JournalError::OtherSecret(args.file.clone())).context("nothing was restored"));
    }
    Ok(secrets)
}

/// Records the restore in the audit of the restored journal, which ends when the copy was made.
fn audit(args: &RestoreArgs, secrets: &Secrets, before: Option<&Path>) -> anyhow::Result<()> {
    let (journal, _) = Journal::open(&args.db, secrets)?;
    let name = |path: &Path| path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
    let before = before.map(|before| format!(", in place of {}", name(before))).unwrap_or_default();
    let action = format!("restore: {}{before}", name(&args.file));
    let about = format!("journal {}", name(&args.db));
    let (at, who) = (SystemClock::new().now(), "local".to_owned());
    journal.audit(AuditLine { at, who, action, about, why: String::new() })?;
    // Closed and checked here: the record is only queued before, and the process ends right after.
    anyhow::ensure!(journal.close(), "the journal could not be written");
    Ok(())
}
