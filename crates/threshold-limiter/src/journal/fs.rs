//! File system operations of the journal: locking, durable renames, and files that only their owner can read.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use super::JournalError;
use crate::files::{self, Trust};

/// The suffix of the lock file of a journal.
pub(super) const LOCK: &str = ".lock";
/// The suffix of SQLite's write-ahead log.
pub(super) const WAL: &str = "-wal";
/// The suffix of SQLite's shared memory file, an index of the log. SQLite rebuilds it from the log.
pub(super) const SHM: &str = "-shm";

/// As many symbolic links in a row as Linux follows (`MAXSYMLINKS`).
const MAX_LINKS: usize = 40;
const NO_FOLLOW: i32 = rustix::fs::OFlags::NOFOLLOW.bits().cast_signed();

/// Resolves the symbolic links of a path, whether or not the file exists.
///
/// Every name of a journal must lead to the same lock, log and secret, which are beside the file itself.
pub(super) fn resolve(path: &Path) -> PathBuf {
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        let Ok(target) = std::fs::read_link(&path) else { break };
        path = parent(&path).join(target);
    }
    // The file may not exist yet, but its folder does.
    match (std::fs::canonicalize(parent(&path)), path.file_name()) {
        (Ok(parent), Some(name)) => parent.join(name),
        _ => path,
    }
}

/// Returns the folder of a path.
pub(super) fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Appends a suffix to the file name of a path.
pub(super) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Returns the length of a file; zero if it is missing.
pub(super) fn length(path: &Path) -> u64 {
    std::fs::metadata(path).map_or(0, |metadata| metadata.len())
}

/// Returns whether a file is missing or has no content.
pub(super) fn is_empty(path: &Path) -> bool {
    length(path) == 0
}

/// Opens a file for writing. A missing file is created with mode 0600. Fails on a symbolic link.
pub(super) fn open_or_create(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(NO_FOLLOW).open(path)
}

/// Creates a file with mode 0600. Fails if the name exists, also as a symbolic link.
pub(super) fn create_new(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)
}

/// Creates a file with mode 0600 in place of a leftover of a process that was killed.
pub(super) fn create_replacing(path: &Path) -> io::Result<File> {
    remove(path)?;
    create_new(path)
}

/// Removes a file if it exists.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Copies a file to a new one with mode 0600, and syncs it. Returns `None` if there is no such file.
pub(super) fn copy_synced(from: &Path, to: &Path) -> io::Result<Option<File>> {
    let mut from = match files::open(from, Trust::Any) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    let mut to = create_new(to)?;
    io::copy(&mut from, &mut to)?;
    to.sync_all()?;
    Ok(Some(to))
}

/// Syncs the directory of a file. A new or renamed file survives a power loss only when its directory entry is on disk too.
pub(super) fn sync_parent(path: &Path) -> io::Result<()> {
    File::open(parent(path))?.sync_all()
}

/// Takes the lock of a journal, which is held for as long as the returned file is open.
///
/// It is a file of its own because POSIX locks on the database would be released whenever this process closes any other
/// descriptor of it.
pub(super) fn lock(path: &Path) -> Result<File, JournalError> {
    let lock = with_suffix(path, LOCK);
    let file = open_or_create(&lock).map_err(JournalError::io(&lock))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(JournalError::InUse(path.into())),
        Err(TryLockError::Error(error)) => Err(JournalError::io(&lock)(error)),
    }
}
