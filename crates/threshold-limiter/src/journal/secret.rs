//! The secret of an installation: given, or made once and kept beside the journal.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use threshold_core::Secret;

use super::JournalError;
use super::file::{beside, settle_in};

/// Where the secret of a journal is kept.
#[must_use]
pub fn secret_path(journal: &Path) -> PathBuf {
    journal.with_extension("secret")
}

/// The secret that stored digests and device tokens are made with: `given`, else the one beside the journal, which is made
/// for its owner alone if it is not there.
///
/// # Errors
/// Where the file cannot be used, or holds no secret.
pub fn installation_secret(journal: &Path, given: Option<&str>) -> Result<Secret, JournalError> {
    let path = secret_path(journal);
    if let Some(given) = given {
        return Secret::new(given.as_bytes()).ok_or(JournalError::BadSecret("THRESHOLD_SECRET".into()));
    }
    match std::fs::read_to_string(&path) {
        Ok(text) => read(&text).ok_or(JournalError::BadSecret(path)),
        Err(error) if error.kind() == ErrorKind::NotFound => make(&path).map_err(|error| JournalError::Io(path, error)),
        Err(error) => Err(JournalError::Io(path, error)),
    }
}

fn read(text: &str) -> Option<Secret> {
    let text = text.trim();
    let is_whole = text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_whole.then(|| Secret::new(text.as_bytes())).flatten()
}

/// It appears under its name when it is whole: one that was half written would be another secret.
fn make(path: &Path) -> std::io::Result<Secret> {
    let text: String = crate::random::<32>().iter().map(|byte| format!("{byte:02x}")).collect();
    let next = beside(path, ".next");
    let _ = std::fs::remove_file(&next);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&next)?;
    writeln!(file, "{text}")?;
    file.sync_all()?;
    std::fs::rename(&next, path)?;
    settle_in(path)?;
    Secret::new(text.as_bytes()).ok_or_else(|| std::io::Error::other("64 digits are enough"))
}
