//! Imports the configuration of envoyproxy/ratelimit, the reference service behind Envoy's rate limit filter.

mod file;
mod select;
#[cfg(test)]
mod tests;
mod write;

use file::Node;
use select::Selection;

/// Converts a configuration to a policy.
///
/// # Errors
/// If the file cannot be read, or says what a policy cannot: with the file's name and the line.
pub(super) fn import(name: &str, text: &str) -> anyhow::Result<String> {
    let (domain, nodes) = file::read(text).map_err(|error| error.of(name))?;
    let selection = Selection::of(&nodes).map_err(|error| error.of(name))?;
    Ok(write::policy(name, &domain, &selection))
}

/// Why a configuration cannot be imported.
#[derive(Debug, PartialEq, Eq)]
struct ImportError {
    /// `None` if it concerns the whole file.
    line: Option<u64>,
    message: String,
}

impl ImportError {
    fn new(line: u64, message: impl Into<String>) -> Self {
        Self { line: Some(line), message: message.into() }
    }

    fn of(self, file: &str) -> anyhow::Error {
        match self.line {
            Some(line) => anyhow::anyhow!("{file}:{line}: {}", self.message),
            None => anyhow::anyhow!("{file}: {}", self.message),
        }
    }
}

/// The values of a descriptor's entry that a node matches.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Values {
    /// Only this one.
    One(String),
    /// All that begin so: a value with a star at its end.
    Prefix(String),
    /// Any: a node without a value.
    Any,
}

impl Values {
    fn contain(&self, value: &str) -> bool {
        match self {
            Self::One(own) => own == value,
            Self::Prefix(prefix) => value.starts_with(prefix),
            Self::Any => true,
        }
    }
}

/// An entry of a path: the fact of its key, and its values.
type Entry = (String, Values);

/// The node with a limit, and its path.
#[derive(Debug, Clone)]
struct Limited<'n> {
    path: Vec<Entry>,
    node: &'n Node,
}
