//! Imports the configuration of envoyproxy/ratelimit, the reference service behind Envoy's rate limit filter.

mod file;
mod select;
#[cfg(test)]
mod tests;
mod write;

use threshold_core::policy::MAX_RULES;

use crate::source::Source;
use file::Domain;
use select::{Selection, Work};

/// Converts a configuration, a domain in each file, to a policy.
///
/// # Errors
/// If a file cannot be read, or says what a policy cannot: with the file's name and the line.
pub(super) fn import(sources: &[Source]) -> anyhow::Result<String> {
    let mut domains: Vec<Domain> = Vec::new();
    for Source { name, text } in sources {
        let domain = file::read(text).map_err(|error| error.of(name))?;
        if let Some((_, other)) = domains.iter().zip(sources).find(|(other, _)| other.name == domain.name) {
            let message =
                format!("the domain \"{}\" is that of {} too: write both into one file", domain.name, other.name);
            return Err(ImportError { line: None, message }.of(name));
        }
        domains.push(domain);
    }
    let (mut selections, mut work) = (Vec::new(), Work::default());
    for (domain, source) in domains.iter().zip(sources) {
        selections.push(Selection::of(&domain.nodes, &mut work).map_err(|error| error.of(&source.name))?);
    }
    if let Some((domain, source)) = domains.first().zip(sources.first())
        && selections.iter().all(|own| own.rules.is_empty())
    {
        let message = "no descriptor has a rate_limit that applies: the policy would be empty";
        return Err(ImportError::new(domain.line, message).of(&source.name));
    }
    check_number(&selections)
        .map_err(|(place, error)| error.of(sources.get(place).map_or("", |source| &source.name)))?;
    let imported = domains.iter().zip(sources).zip(&selections);
    let imported = imported.map(|((domain, source), selection)| Imported { file: &source.name, domain, selection });
    Ok(write::policy(&imported.collect::<Vec<_>>()))
}

/// Checks that one policy holds all rules. Else the error is of the first descriptor beyond it, in the file at this place.
fn check_number(selections: &[Selection<'_>]) -> Result<(), (usize, ImportError)> {
    let needed: usize = selections.iter().map(|own| own.rules.len().saturating_add(own.exceptions.len())).sum();
    let all = selections.iter().enumerate();
    let mut all = all.flat_map(|(place, own)| own.rules.iter().map(move |rule| (place, rule.node().line)));
    let first = all.clone().nth(MAX_RULES).or(all.next_back());
    match first.filter(|_| needed > MAX_RULES) {
        None => Ok(()),
        Some((place, line)) => {
            let message = format!("a policy holds at most {MAX_RULES} rules, and this configuration needs {needed}");
            Err((place, ImportError::new(line, message)))
        }
    }
}

/// A domain, the file that it is from, and its rules.
#[derive(Debug, Clone, Copy)]
struct Imported<'n> {
    file: &'n str,
    domain: &'n Domain,
    selection: &'n Selection<'n>,
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
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Values {
    /// Only this one.
    One(String),
    /// All that begin with this: a value with a star at its end.
    Pattern(String),
    /// Any: a node without a value.
    Any,
}

impl Values {
    fn contain(&self, value: &str) -> bool {
        match self {
            Self::One(own) => own == value,
            Self::Pattern(beginning) => value.starts_with(beginning.as_str()),
            Self::Any => true,
        }
    }
}
