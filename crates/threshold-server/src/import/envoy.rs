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
    /// All with these parts in this order and anything between them: a value with stars, of which there is at least one.
    Pattern(Vec<String>),
    /// Any: a node without a value.
    Any,
}

impl Values {
    fn contain(&self, value: &str) -> bool {
        match self {
            Self::One(own) => own == value,
            Self::Pattern(parts) => contains_parts(parts, value),
            Self::Any => true,
        }
    }
}

/// Whether a value begins with the first part, ends with the last one, and has the others between them in their order.
fn contains_parts(parts: &[String], value: &str) -> bool {
    let [first, middle @ .., last] = parts else { return false };
    let between = value.strip_prefix(first.as_str()).and_then(|rest| rest.strip_suffix(last.as_str()));
    // The earliest place of each part leaves the most for those after it.
    let found = |rest: &'_ str, part: &String| rest.find(part.as_str()).map(|at| at.saturating_add(part.len()));
    let mut rest = between;
    for part in middle {
        rest = rest.and_then(|rest| rest.get(found(rest, part)?..));
    }
    rest.is_some()
}

/// An entry of a path: the fact of its key, and its values.
type Entry = (String, Values);

/// The node with a limit, and its path.
#[derive(Debug, Clone)]
struct Limited<'n> {
    path: Vec<Entry>,
    /// The facts of the path whose values share one counter.
    shared: Vec<&'n str>,
    node: &'n Node,
}
