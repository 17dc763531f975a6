//! Policies from files that the program names, with variables from its environment.
//!
//! This is the one place in core that reads a file or the environment. No decision does, and without the feature `files`, as on
//! wasm, it does not exist.

use std::path::{Path, PathBuf};
use std::{env, fmt, fs, io};

use super::{Policy, PolicyError, Review};

/// A policy file that cannot be read or used.
///
/// `Debug` prints what `Display` does, and the cause, so that `unwrap` and `main` show the line to change.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum PolicyFileError {
    /// The environment variable that should name the file is unset or empty.
    #[error("{variable} is not set: it must be the path of a policy file")]
    #[non_exhaustive]
    NotSet {
        /// The name of the variable.
        variable: String,
    },
    /// The file cannot be read.
    #[error("cannot read the policy file {}", path.display())]
    #[non_exhaustive]
    Unreadable {
        /// The path of the file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file is not a policy that can be used.
    #[error(transparent)]
    Invalid(#[from] PolicyError),
}

impl fmt::Debug for PolicyFileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")?;
        match self {
            Self::Unreadable { source, .. } => write!(f, ": {source}"),
            Self::NotSet { .. } | Self::Invalid(_) => Ok(()),
        }
    }
}

impl Policy {
    /// Reads a policy file. Variables that it names as `${NAME}` come from the process's environment.
    ///
    /// ```no_run
    /// use threshold_core::Policy;
    ///
    /// let policy = Policy::from_file("policy.toml")?;
    /// # Ok::<(), threshold_core::policy::PolicyFileError>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, or is not a policy that can be used. It prints as `threshold lint` does:
    /// `FILE:LINE:COLUMN`, the message, and the text underlined.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, PolicyFileError> {
        let path = path.as_ref();
        #[expect(clippy::disallowed_methods, reason = "the feature `files` is for hosts that have files")]
        let source =
            fs::read_to_string(path).map_err(|source| PolicyFileError::Unreadable { path: path.to_owned(), source })?;
        let Review { policy, findings, .. } = Self::review(&source, &|name| variable(name));
        let invalid = || PolicyError::of_file(findings, &path.display().to_string(), &source);
        Ok(policy.ok_or_else(invalid)?)
    }

    /// Reads the policy file whose path is in an environment variable; see [`from_file`](Self::from_file).
    ///
    /// ```no_run
    /// use threshold_core::Policy;
    ///
    /// let policy = Policy::from_env("THRESHOLD_POLICY")?;
    /// # Ok::<(), threshold_core::policy::PolicyFileError>(())
    /// ```
    ///
    /// # Errors
    /// As for [`from_file`](Self::from_file), and if the variable is unset or empty.
    pub fn from_env(variable: &str) -> Result<Self, PolicyFileError> {
        // `var_os`, because a path need not be Unicode.
        #[expect(clippy::disallowed_methods, reason = "the feature `files` is for hosts that have an environment")]
        let path = env::var_os(variable).filter(|path| !path.is_empty());
        let path = path.ok_or_else(|| PolicyFileError::NotSet { variable: variable.to_owned() })?;
        Self::from_file(PathBuf::from(path))
    }
}

#[expect(clippy::disallowed_methods, reason = "the feature `files` is for hosts that have an environment")]
fn variable(name: &str) -> Option<String> {
    env::var(name).ok()
}
