//! The secret of an installation: given, or made once and kept beside the journal.

use std::fmt;
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use threshold_core::{KeyId, Secret, Secrets};

use super::JournalError;
use super::file::{beside, create_exclusively, is_empty, lock, resolve, settle_in};

/// What a secret is called until its journal is there: a secret without its journal means that the journal is missing.
const NEXT: &str = ".next";
/// What the old secret is called while the secret is rotated.
const OLD: &str = ".old";
/// What nobody but its owner may do with a secret.
const OTHERS: u32 = 0o077;

/// Where the secret of a journal is kept.
#[must_use]
pub fn secret_path(journal: &Path) -> PathBuf {
    resolve(journal).with_extension("secret")
}

/// Where the old secret of a journal is kept while the secret is rotated.
#[must_use]
pub fn old_secret_path(journal: &Path) -> PathBuf {
    beside(&secret_path(journal), OLD)
}

/// Secrets that are given in place of those in files.
#[derive(Clone, Copy, Default)]
pub struct GivenSecrets<'a> {
    /// The present one: `THRESHOLD_SECRET`.
    pub present: Option<&'a str>,
    /// The old one: `THRESHOLD_SECRET_OLD`.
    pub old: Option<&'a str>,
}

impl fmt::Debug for GivenSecrets<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GivenSecrets").finish_non_exhaustive()
    }
}

/// The secrets that stored digests and tokens are made with: those that are given, else those beside the journal. Where
/// there is neither a journal nor a secret, one is made for its owner alone; it gets its name when the journal is opened.
///
/// # Errors
/// Where a file cannot be used, holds no secret, can be read by others, or is missing beside its journal; where there is an
/// old secret and no present one; and where both are the same.
pub fn installation_secrets(journal: &Path, given: GivenSecrets<'_>) -> Result<Secrets, JournalError> {
    let (path, old_path) = (secret_path(journal), old_secret_path(journal));
    let old = match given.old {
        Some(old) => {
            const NAME: &str = "THRESHOLD_SECRET_OLD";
            let secret = Secret::new(old.as_bytes()).ok_or(JournalError::BadSecret(NAME.into()))?;
            Some((secret, NAME.to_owned()))
        }
        None => match read(&old_path)? {
            Some(text) => {
                let secret = parse(&text).ok_or_else(|| JournalError::BadSecret(old_path.clone()))?;
                Some((secret, old_path.display().to_string()))
            }
            None => None,
        },
    };
    if let Some((_, name)) = old.as_ref().filter(|_| given.present.is_none())
        && read(&path)?.is_none()
    {
        return Err(JournalError::OldSecretAlone(name.clone(), path));
    }
    let present = Secrets::new(installation_secret(journal, given.present)?);
    match old {
        Some((old, _)) => present.with_old(old).map_err(JournalError::SameSecret),
        None => Ok(present),
    }
}

fn installation_secret(journal: &Path, given: Option<&str>) -> Result<Secret, JournalError> {
    if let Some(given) = given {
        return Secret::new(given.as_bytes()).ok_or(JournalError::BadSecret("THRESHOLD_SECRET".into()));
    }
    let journal = resolve(journal);
    let path = secret_path(&journal);
    let next = beside(&path, NEXT);
    if let Some(text) = read(&path)? {
        return parse(&text).ok_or(JournalError::BadSecret(path));
    }
    // A start that was interrupted has left one, and perhaps a journal under it.
    if let Some(secret) = read(&next)?.and_then(|text| parse(&text)) {
        return Ok(secret);
    }
    if !is_empty(&journal) {
        return Err(JournalError::SecretMissing(journal, path));
    }
    // Of two processes that start at once, one makes it.
    let _lock = lock(&journal)?;
    match read(&next)?.and_then(|text| parse(&text)) {
        Some(secret) => Ok(secret),
        None => make(&next).map_err(|error| JournalError::Io(next, error)),
    }
}

/// Gives a secret that was just made its name, now that its journal is there.
pub(super) fn settle_secret(journal: &Path, key_id: KeyId) -> Result<(), JournalError> {
    let path = secret_path(journal);
    let next = beside(&path, NEXT);
    if std::fs::exists(&path).unwrap_or(true) {
        return Ok(());
    }
    let own = read(&next)?.and_then(|text| parse(&text)).filter(|secret| secret.key_id() == key_id);
    if own.is_some() {
        let renamed = std::fs::rename(&next, &path).and_then(|()| settle_in(&path));
        renamed.map_err(|error| JournalError::Io(path, error))?;
    }
    Ok(())
}

/// The text of a secret's file, if there is one. Whoever can read it can forge tokens and guess whom digests stand for.
fn read(path: &Path) -> Result<Option<String>, JournalError> {
    let io = |error| JournalError::Io(path.into(), error);
    let file = match std::fs::File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(io)?,
    };
    let mode = file.metadata().map_err(io)?.mode();
    if mode & OTHERS != 0 {
        return Err(JournalError::OpenSecret(path.into(), mode & 0o777));
    }
    std::io::read_to_string(file).map(Some).map_err(io)
}

fn parse(text: &str) -> Option<Secret> {
    let text = text.trim();
    let is_whole = text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_whole.then(|| Secret::new(text.as_bytes())).flatten()
}

fn make(path: &Path) -> std::io::Result<Secret> {
    let text: String = crate::random::<32>().iter().map(|byte| format!("{byte:02x}")).collect();
    let mut file = create_exclusively(path)?;
    writeln!(file, "{text}")?;
    file.sync_all()?;
    settle_in(path)?;
    Secret::new(text.as_bytes()).ok_or_else(|| std::io::Error::other("64 digits are enough"))
}
