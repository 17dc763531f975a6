//! Writes events as lines of JSON, to a file or to standard output.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use threshold_core::Event;

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

    /// Checks that lines can be written, and creates the file.
    pub(super) fn open(&self) -> io::Result<()> {
        match self {
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

fn open(path: &Path) -> io::Result<File> {
    // Events name callers, so that the file is for its owner alone.
    OpenOptions::new().append(true).create(true).mode(0o600).open(path)
}
