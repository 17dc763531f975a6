//! `threshold backup` and `threshold restore`: copies of the journal, and the way back.

use crate::Report;
use crate::cli::{BackupArgs, RestoreArgs};
use threshold_limiter::journal::{Journal, secret_path};

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
    if let Some(before) = before {
        text.push_str(&format!("what was there before is {}\n", before.display()));
    }
    Ok(Report { text, code: 0 })
}
