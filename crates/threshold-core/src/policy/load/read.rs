//! TOML text → the types of the policy file, with variables filled in.

use serde::Deserialize as _;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::Loader;
use crate::policy::expand::Expander;
use crate::policy::file::PolicyFile;
use crate::policy::finding::{self, UNNAMED};
use crate::policy::{MAX_FILE, PolicyError, Review, ReviewWork};

/// Reads, checks and compiles a policy file.
pub(in crate::policy) fn review(
    source: &str,
    variable: &dyn Fn(&str) -> Option<String>,
    work: ReviewWork<'_>,
) -> Review {
    let mut loader = Loader::new(source, work);
    let file = loader.read(variable);
    let policy = file.as_ref().map(|file| loader.policy(file));
    loader.finish(file.as_ref(), policy)
}

/// The most errors of syntax that are reported.
const MAX_SYNTAX_ERRORS: usize = 100;

/// Reads a policy file without checking what it means.
pub(in crate::policy) fn read_file(
    source: &str,
    variable: &dyn Fn(&str) -> Option<String>,
) -> Result<PolicyFile, PolicyError> {
    let mut loader = Loader::new(source, ReviewWork::default());
    let file = loader.read(variable);
    file.ok_or_else(|| PolicyError::of_file(loader.finish(None, None).findings, UNNAMED, source))
}

impl Loader<'_> {
    /// Reads the source; on failure the loader has the findings.
    fn read(&mut self, variable: &dyn Fn(&str) -> Option<String>) -> Option<PolicyFile> {
        if self.source.len() > MAX_FILE {
            self.error("too-large", 0..0, format!("a policy is at most {MAX_FILE} bytes"), "");
            return None;
        }
        let (mut table, errors) = DeTable::parse_recoverable(self.source);
        // The first ones suffice: a file that is no TOML at all has one for each line.
        for error in errors.into_iter().take(MAX_SYNTAX_ERRORS) {
            self.toml_error(&error);
        }
        // Broken TOML gives a table with parts missing, and errors about those would be misleading.
        if !self.findings.is_empty() {
            return None;
        }
        let mut expander = Expander::new(variable, MAX_FILE);
        self.expand_table(table.get_mut(), &mut expander, false, 0);
        self.values = expander.into_values();
        if !self.findings.is_empty() {
            return None;
        }
        match PolicyFile::deserialize(toml::de::Deserializer::from(table)) {
            Ok(file) => Some(file),
            Err(error) => {
                self.toml_error(&error);
                None
            }
        }
    }

    fn toml_error(&mut self, error: &toml::de::Error) {
        let span = error.span().unwrap_or(0..0);
        let message = error.message();
        let is_secret = finding::is_secret(self.source, span.start);
        let Some((name, known)) = unknown_name(message) else {
            // The message of the parser may quote the value, which is the key.
            if is_secret {
                return self.error(
                    "syntax",
                    span,
                    "a value of [identity.jwt] has the wrong type",
                    "its values are strings",
                );
            }
            return match bare_number(message) {
                Some(number) => {
                    let help = quoted_number(self.source, span.start, number);
                    self.error("syntax", span, format!("expected a string, found the number {number}"), &help);
                }
                None => self.error("syntax", span, message.to_owned(), ""),
            };
        };
        let close = known
            .iter()
            .map(|known| (strsim::damerau_levenshtein(name, known), *known))
            .min()
            // Beyond three edits, or half of a short name, the nearest key is rarely the one that was meant.
            .filter(|(distance, _)| *distance <= name.len().div_ceil(2).min(3));
        let help = match close {
            Some((_, known)) => format!("did you mean \"{known}\"?"),
            None => format!("known here: {}", known.join(", ")),
        };
        let what = if message.starts_with("unknown variant") { "value" } else { "key" };
        let code = if what == "key" { "unknown-key" } else { "bad-value" };
        // A key written in the wrong place can be a name to the parser.
        let message = if is_secret { format!("unknown {what}") } else { format!("unknown {what} \"{name}\"") };
        self.error(code, span, message, &help);
    }

    fn expand_table(&mut self, table: &mut DeTable<'_>, expander: &mut Expander<'_>, in_limits: bool, depth: usize) {
        for (key, value) in table.iter_mut() {
            let name = key.get_ref().as_ref();
            // All values of these tables are limits, under names that the policy chooses. `tier` is the exception.
            let limits = in_limits || matches!((depth, name), (0, "tiers" | "tenants" | "users"));
            let is_limit = limits && name != "tier" || matches!(name, "limit" | "account" | "ip");
            self.expand_value(value, expander, limits, is_limit, depth);
        }
    }

    fn expand_value(
        &mut self,
        value: &mut Spanned<DeValue<'_>>,
        expander: &mut Expander<'_>,
        in_limits: bool,
        is_limit: bool,
        depth: usize,
    ) {
        let span = value.span();
        match value.get_mut() {
            DeValue::String(text) => match expander.expand(text, span.clone(), is_limit) {
                Ok(Some(expanded)) => *text = expanded.into(),
                Ok(None) => {}
                Err(error) => self.error("bad-variable", span, error.message, &error.help),
            },
            DeValue::Array(items) => {
                for item in items.iter_mut() {
                    self.expand_value(item, expander, in_limits, is_limit, depth);
                }
            }
            DeValue::Table(table) => self.expand_table(table, expander, in_limits, depth.saturating_add(1)),
            _ => {}
        }
    }
}

/// Extracts the number from serde's error about a number in place of a string.
fn bare_number(message: &str) -> Option<&str> {
    let (number, rest) = message.strip_prefix("invalid type: integer `")?.split_once('`')?;
    rest.starts_with(", expected a string").then_some(number)
}

/// Returns what to write in place of a number without quotes: for a limit the unit that is missing.
fn quoted_number(source: &str, at: usize, number: &str) -> String {
    let before = source.get(..at).unwrap_or_default();
    let line = before.rsplit('\n').next().unwrap_or_default();
    let key =
        line.trim_end().trim_end_matches('=').trim_end().rsplit([' ', '{', ',', '.', '"']).next().unwrap_or_default();
    let header = before.lines().rev().map(str::trim_start).find(|line| line.starts_with('[')).unwrap_or_default();
    let table = header.trim_start_matches('[');
    let is_limit = matches!(key, "limit" | "account" | "ip")
        || ["tiers.", "tenants.", "users."].iter().any(|limits| table.starts_with(limits) || line.contains(limits));
    if is_limit {
        format!("write how many in which time: {key} = \"{number}/min\"")
    } else if matches!(key, "block_for" | "ttl" | "decay") {
        format!("write the unit: {key} = \"{number}s\"")
    } else {
        format!("write it in quotes: {key} = \"{number}\"")
    }
}

/// Extracts the unknown name and the known names from serde's error message.
fn unknown_name(message: &str) -> Option<(&str, Vec<&str>)> {
    if !message.starts_with("unknown field") && !message.starts_with("unknown variant") {
        return None;
    }
    let mut quoted = message.split('`').skip(1).step_by(2);
    let name = quoted.next()?;
    Some((name, quoted.collect()))
}
