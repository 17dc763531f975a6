//! The secret of an installation: given by the environment, or generated once and stored beside the journal.

use std::fmt;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use threshold_core::{KeyId, Secret, Secrets};

use super::file::{Missing, check_may_create};
use super::fs::{create_replacing, is_empty, lock, resolve, sync_parent, with_suffix};
use super::{JournalError, identify};
use crate::files::{self, Trust};

/// The suffix of a secret whose journal is not created yet: a secret without its journal means that the journal is missing.
const NEXT: &str = ".next";
/// The suffix of the old secret during a rotation.
const OLD: &str = ".old";
/// The most bytes of a file with a secret: far more than one has.
const MAX_FILE: usize = 4_096;

/// Returns the path of the secret of a journal.
#[must_use]
pub fn secret_path(journal: &Path) -> PathBuf {
    resolve(journal).with_extension("secret")
}

/// Returns the path of the old secret of a journal, which is there during a rotation.
#[must_use]
pub fn old_secret_path(journal: &Path) -> PathBuf {
    with_suffix(&secret_path(journal), OLD)
}

/// Secrets that take precedence over those in files.
#[derive(Clone, Copy, Default)]
pub struct GivenSecrets<'a> {
    /// The present secret: `THRESHOLD_SECRET`.
    pub present: Option<&'a str>,
    /// The old secret: `THRESHOLD_SECRET_OLD`.
    pub old: Option<&'a str>,
}

impl fmt::Debug for GivenSecrets<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GivenSecrets").finish_non_exhaustive()
    }
}

/// Returns the secrets that digests and tokens are made with: the given ones, else those beside the journal.
///
/// If there is neither a journal nor a secret, a secret is generated in a file of mode 0600. It gets its final name when the
/// journal is opened.
///
/// # Errors
/// Fails if a file cannot be used, holds no secret, can be read by others, or is missing beside its journal; if another user has put
/// a secret there whose journal is not created yet; if there is an old secret and no present one; and if both have the same key id.
pub fn installation_secrets(journal: &Path, given: GivenSecrets<'_>) -> Result<Secrets, JournalError> {
    let (path, old_path) = (secret_path(journal), old_secret_path(journal));
    // Also where another secret is used: somebody has put it there for the start that looks for it.
    read_next(&with_suffix(&path, NEXT))?;
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
    let next = with_suffix(&path, NEXT);
    if let Some(text) = read(&path)? {
        return parse(&text).ok_or(JournalError::BadSecret(path));
    }
    // An interrupted start has left a secret, and perhaps a journal that was written under it.
    if let Some(secret) = read_next(&next)?.and_then(|text| parse(&text)) {
        return Ok(secret);
    }
    identify::check_planted(&journal)?;
    identify::check(&journal)?;
    // Under a generated secret no record of this journal would be found.
    if !is_empty(&journal) {
        return Err(JournalError::SecretMissing(journal, path));
    }
    // Two processes that start at once must not generate two secrets.
    let _lock = lock(&journal)?;
    match read_next(&next)?.and_then(|text| parse(&text)) {
        Some(secret) => Ok(secret),
        None => generate(&next).map_err(JournalError::io(&next)),
    }
}

/// Returns whether the file of a secret is beside this journal, also one whose journal is not created yet. Another program may
/// have a file of that name, so it must hold a secret.
pub(super) fn is_beside(journal: &Path) -> bool {
    let path = secret_path(journal);
    let holds_secret = |path: &PathBuf| {
        let text = files::read(path, Trust::Any, MAX_FILE).ok().and_then(|bytes| String::from_utf8(bytes).ok());
        text.is_some_and(|text| parse(&text).is_some())
    };
    [with_suffix(&path, NEXT), path].iter().any(holds_secret)
}

/// Checks the files of an installation as a server does at its start, and creates nothing. A server may be running.
///
/// # Errors
/// Fails if the folder of the journal is missing, if a file was planted there, if another program's file is in its place, if the journal is missing beside
/// files that show that there was one, and as [`installation_secrets`] does. What is in the journal is not read.
pub fn check_installation(journal: &Path, given: GivenSecrets<'_>) -> Result<(), JournalError> {
    let journal = resolve(journal);
    identify::check_planted(&journal)?;
    read_next(&with_suffix(&secret_path(&journal), NEXT))?;
    identify::check(&journal)?;
    // `installation_secrets` would generate a secret for a new installation.
    let files = [secret_path(&journal), old_secret_path(&journal)];
    let has_files = !is_empty(&journal) || files.iter().any(|file| file.exists());
    if has_files || given.present.is_some() || given.old.is_some() {
        installation_secrets(&journal, given)?;
    }
    if is_empty(&journal) { check_may_create(&journal, Missing::Refuse) } else { Ok(()) }
}

/// Renames a generated secret to its final name, once its journal exists.
pub(super) fn publish(journal: &Path, key_id: KeyId) -> Result<(), JournalError> {
    let path = secret_path(journal);
    let next = with_suffix(&path, NEXT);
    // If that cannot be told, nothing is overwritten.
    if std::fs::exists(&path).unwrap_or(true) {
        return Ok(());
    }
    // A leftover of another start stays where it is, if the journal is not under its secret.
    let own = read_next(&next)?.and_then(|text| parse(&text)).filter(|secret| secret.key_id() == key_id);
    if own.is_some() {
        let renamed = std::fs::rename(&next, &path).and_then(|()| sync_parent(&path));
        renamed.map_err(JournalError::io(&path))?;
    }
    Ok(())
}

/// Reads the file of a secret, if it exists. Fails if another user has put it there, or can use it: they could forge tokens, and
/// find the names behind digests.
fn read(path: &Path) -> Result<Option<String>, JournalError> {
    match files::read(path, Trust::Secret, MAX_FILE) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        // Bytes that are no text are no secret.
        read => Ok(Some(String::from_utf8(read.map_err(JournalError::io(path))?).unwrap_or_default())),
    }
}

/// Reads a secret whose journal is not created yet. Only this program writes such a file, so that it is no link.
fn read_next(path: &Path) -> Result<Option<String>, JournalError> {
    files::check(path, Trust::Own).map_err(JournalError::io(path))?;
    read(path)
}

fn parse(text: &str) -> Option<Secret> {
    let text = text.trim();
    let is_whole = text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_whole.then(|| Secret::new(text.as_bytes())).flatten()
}

fn generate(path: &Path) -> std::io::Result<Secret> {
    let text: String = crate::random::<32>().iter().map(|byte| format!("{byte:02x}")).collect();
    let mut file = create_replacing(path)?;
    writeln!(file, "{text}")?;
    // Digests and tokens are made with it from now on, so it must survive a power loss.
    file.sync_all()?;
    sync_parent(path)?;
    Secret::new(text.as_bytes()).ok_or_else(|| std::io::Error::other("64 digits are enough"))
}
