//! Writes events as lines of JSON, to a file or to standard output.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::io::Errno;
use threshold_core::Event;
use threshold_limiter::files::{self, Trust};

/// Where lines are written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Lines {
    File(PathBuf),
    Stdout,
}

/// Formats the sink as `--events-to` has it.
impl fmt::Display for Lines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "jsonl:{}", path.display()),
            Self::Stdout => f.write_str("stdout"),
        }
    }
}

impl Lines {
    /// Returns the kind of sink, as metrics name it.
    pub(super) const fn kind(&self) -> &'static str {
        match self {
            Self::File(_) => "file",
            Self::Stdout => "stdout",
        }
    }

    /// Returns the file.
    pub(crate) fn path(&self) -> Option<&Path> {
        match self {
            Self::File(path) => Some(path),
            Self::Stdout => None,
        }
    }

    /// Writes a batch.
    pub(super) fn write(&self, events: &[Event]) -> io::Result<()> {
        let mut text = String::new();
        for event in events {
            text.push_str(&event.to_json());
            text.push('\n');
        }
        match self {
            Self::File(path) => append(path, text.as_bytes()),
            Self::Stdout => {
                let mut stdout = io::stdout().lock();
                stdout.write_all(text.as_bytes())?;
                stdout.flush()
            }
        }
    }

    /// Checks that lines can be written, and creates the file. A pipe is opened when there is something to write.
    pub(super) fn open(&self) -> io::Result<()> {
        match self {
            Self::File(path) if is_pipe(path) => Ok(()),
            Self::File(path) => open(path).map(drop),
            Self::Stdout => Ok(()),
        }
    }
}

/// Appends to a file. It is opened for each batch, so that a program that rotates logs can rename it at any time.
fn append(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = open(path)?;
    let before = file.metadata()?;
    let written = file.write_all(bytes);
    // A full disk may have taken half a line, to which the next batch would be appended.
    if written.is_err() && before.is_file() {
        file.set_len(before.len())?;
    }
    written
}

/// Fails if events would be written into the file of another user, or one that others can write to.
pub(super) fn check(path: &Path) -> io::Result<()> {
    let is_file = path.metadata().is_ok_and(|metadata| metadata.is_file());
    if is_file { files::check(path, Trust::Keys) } else { Ok(()) }
}

fn open(path: &Path) -> io::Result<File> {
    // Events name callers, so that the file is for its owner alone.
    let mut options = OpenOptions::new();
    options.append(true).create(true).mode(0o600);
    if !is_pipe(path) {
        check(path)?;
        return options.open(path);
    }
    // Without this, opening a pipe waits for a reader: at the end of the server too.
    let nonblocking = OFlags::NONBLOCK.bits().cast_signed();
    let pipe = options.custom_flags(nonblocking).open(path).map_err(|error| match error.raw_os_error() {
        Some(code) if code == Errno::NXIO.raw_os_error() => io::Error::other("nobody reads the pipe"),
        _ => error,
    })?;
    // A reader that is slow must not get half a line.
    rustix::fs::fcntl_setfl(&pipe, OFlags::APPEND)?;
    Ok(pipe)
}

fn is_pipe(path: &Path) -> bool {
    path.metadata().is_ok_and(|metadata| metadata.file_type().is_fifo())
}
