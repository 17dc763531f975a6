//! Errors and warnings about a policy: where they are, and what to write instead.

use std::fmt;
use std::ops::Range;

use crate::text::{printable, printable_lines};

/// Whether a policy with this finding can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// It can, but it may not do what was intended.
    Warning,
    /// It cannot.
    Error,
}

/// An error or a warning about a policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Error or warning.
    pub severity: Severity,
    /// The short name of its kind, which is stable across versions; see [`Code`](super::Code).
    pub code: &'static str,
    /// The bytes of the file that it is about.
    pub span: Range<usize>,
    /// What is wrong.
    pub message: String,
    /// What to write instead, or why it matters.
    pub help: String,
}

impl Finding {
    /// Returns the line and the column where it begins; both start at 1, and the column counts characters.
    #[must_use]
    pub fn place(&self, source: &str) -> (usize, usize) {
        let before = source.get(..self.span.start.min(source.len())).unwrap_or(source);
        let line_start = before.rfind('\n').map_or(0, |at| at.saturating_add(1));
        let line = before.matches('\n').count().saturating_add(1);
        let column = before.get(line_start..).unwrap_or_default().chars().count().saturating_add(1);
        (line, column)
    }

    /// Renders the finding as `lint` prints it: position, message, the line with the text underlined, and help.
    #[must_use]
    pub fn render(&self, file: &str, source: &str) -> String {
        let (line, column) = self.place(source);
        let word = match self.severity {
            Severity::Warning => "warning",
            Severity::Error => "error",
        };
        let (file, message) = (printable(file), printable(&self.message));
        let mut out = format!("{file}:{line}:{column}: {word}[{}]: {message}\n", self.code);
        let number = line.to_string();
        let gutter = " ".repeat(number.len());
        // Findings reach logs and terminals. The line of a syntax error may be the one with the key.
        if is_secret(source, self.span.start) {
            out.push_str(&format!("{gutter} = lines of [identity.jwt] are not shown\n"));
        } else {
            out.push_str(&self.underlined(source, (line, column), &gutter));
        }
        if !self.help.is_empty() {
            out.push_str(&format!("{gutter} = {}\n", printable(&self.help)));
        }
        out
    }

    /// Renders the line of the source, with the text underlined.
    fn underlined(&self, source: &str, (line, column): (usize, usize), gutter: &str) -> String {
        let text = source.lines().nth(line.saturating_sub(1)).unwrap_or_default();
        let indent = column.saturating_sub(1);
        let under = source
            .get(self.span.start..self.span.end)
            .map_or(1, |span| span.lines().next().unwrap_or_default().chars().count())
            // At least one character, so that an empty span is seen, and none behind the end of its line.
            .clamp(1, text.chars().count().saturating_sub(indent).max(1));
        // Widths are those of the escaped text. Tabs stay tabs, so that the underline stands below its text at any tab width.
        let shown = |text: &mut dyn Iterator<Item = char>| printable_lines(&text.collect::<String>()).into_owned();
        let mut characters = text.chars();
        let before = shown(&mut characters.by_ref().take(indent));
        let under = "^".repeat(shown(&mut characters.take(under)).chars().count().max(1));
        let pad: String = before.chars().map(|c| if c == '\t' { '\t' } else { ' ' }).collect();
        format!("{gutter} |\n{line} | {}\n{gutter} | {pad}{under}\n", printable_lines(text))
    }
}

/// Whether the line at this byte may contain the key that tokens are verified with, which no message may show. The source may
/// be malformed anywhere, so this looks at single lines, and rather hides too many than too few.
pub(super) fn is_secret(source: &str, at: usize) -> bool {
    let before = source.get(..at.min(source.len())).unwrap_or(source);
    let line = before.matches('\n').count();
    let mut lines = SecretLines::default();
    source.split('\n').take(line.saturating_add(1)).map(|text| lines.next(text)).last().unwrap_or(false)
}

/// Tracks line by line whether `[identity.jwt]` is open.
#[derive(Default)]
struct SecretLines {
    /// Whether its table is open.
    in_table: bool,
    /// The number of open braces of its inline table.
    braces: usize,
    /// The delimiter that ends its open multi-line string.
    string: Option<&'static str>,
}

impl SecretLines {
    /// Whether the next line belongs to it.
    fn next(&mut self, line: &str) -> bool {
        // Within a multi-line string nothing is a header or a key, and a PEM key has many lines.
        if let Some(end) = self.string {
            self.string = Some(end).filter(|end| line.matches(end).count().is_multiple_of(2));
            return true;
        }
        // A header closes the table before it, also where an inline table was left open by a mistake.
        if line.trim_start().starts_with('[') {
            *self = Self { in_table: names_jwt(line), ..Self::default() };
        }
        // A line `key = …` is hidden in any table: a typing error in the header must not reveal the key below it.
        let names_key = line.trim_start().strip_prefix("key").is_some_and(|rest| rest.trim_start().starts_with('='));
        let is_own = self.in_table || self.braces > 0 || names_jwt(line) || names_key;
        if is_own {
            let count = |c: char| line.matches(c).count();
            self.braces = self.braces.saturating_add(count('{')).saturating_sub(count('}'));
            let opens = |quotes: &str| !line.matches(quotes).count().is_multiple_of(2);
            // An odd number of delimiters leaves the string open at the end of the line.
            self.string = ["\"\"\"", "'''"].into_iter().find(|quotes| opens(quotes));
        }
        is_own
    }
}

/// Whether a line names `jwt` as a key: in a header, before a dot, or before an equals sign.
fn names_jwt(line: &str) -> bool {
    let after = line.split("jwt").skip(1);
    let mut after = after.map(|rest| rest.trim_start_matches(['"', '\'', ' ', '\t']));
    // A malformed header may lack its closing bracket.
    let is_header = line.trim_start().starts_with('[');
    after.any(|rest| (rest.is_empty() && is_header) || rest.starts_with(['.', '=', ']']))
}

/// A policy that cannot be used, with every error that was found.
///
/// It prints as `threshold lint` does: for each error `FILE:LINE:COLUMN`, the message, and the line with the text underlined.
/// `Debug` prints the same, so that `unwrap` shows what to change. The error about a policy that was built in code names the
/// rule or the table instead.
#[derive(Clone, PartialEq, Eq)]
pub struct PolicyError {
    /// Never empty.
    findings: Vec<Finding>,
    location: Location,
    /// What is printed. The source is not kept: it may contain the key of `[identity.jwt]`.
    text: Box<str>,
}

/// What stands for the path of a policy that was read from text.
#[cfg(feature = "toml")]
pub(super) const UNNAMED: &str = "policy";
/// How many errors are printed: more of them are the same mistake, or another file than a policy.
#[cfg(feature = "toml")]
const MAX_PRINTED: usize = 10;

/// Where an error is.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Location {
    /// A position in a policy file; both numbers start at 1, and the column counts characters.
    #[non_exhaustive]
    Position {
        /// The line.
        line: usize,
        /// The column.
        column: usize,
    },
    /// The rule of this name, in a policy that was built in code.
    Rule(Box<str>),
    /// A table, as in `identity` or `ladders.strict`, in a policy that was built in code.
    Table(Box<str>),
    /// The policy as a whole, or a key above all tables, in a policy that was built in code.
    Policy,
}

impl Location {
    /// Finds the table of a printed policy that a finding is in.
    fn printed(finding: &Finding, source: &str, rules: &[(Box<str>, Range<usize>)]) -> Self {
        let (line, _) = finding.place(source);
        // A printed string has no line breaks, so only headers begin with a bracket.
        let headers = || source.lines().take(line).filter(|line| line.starts_with('['));
        let Some(header) = headers().last() else { return Self::Policy };
        if header != "[[rule]]" {
            return Self::Table(header.trim_matches(['[', ']']).into());
        }
        // By number and not by name: two rules may have the same name, which is an error to report.
        let index = headers().filter(|header| *header == "[[rule]]").count().saturating_sub(1);
        rules.get(index).map_or(Self::Policy, |(name, _)| Self::Rule(name.clone()))
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Position { line, column } => write!(f, "line {line}, column {column}"),
            Self::Rule(name) => write!(f, "rule \"{name}\""),
            Self::Table(name) => write!(f, "[{name}]"),
            Self::Policy => f.write_str("policy"),
        }
    }
}

impl PolicyError {
    /// The error about the policy file of this name. Warnings among the findings are dropped.
    #[cfg(feature = "toml")]
    pub(super) fn of_file(mut findings: Vec<Finding>, file: &str, source: &str) -> Self {
        findings.retain(|finding| finding.severity == Severity::Error);
        let (line, column) = findings.first().map_or((1, 1), |first| first.place(source));
        let mut text: String = findings.iter().take(MAX_PRINTED).map(|finding| finding.render(file, source)).collect();
        match findings.len().saturating_sub(MAX_PRINTED) {
            0 => {}
            1 => text.push_str("and 1 more error"),
            more => text.push_str(&format!("and {more} more errors")),
        }
        Self { findings, location: Location::Position { line, column }, text: text.trim_end().into() }
    }

    /// The error about a policy that was built in code and printed as `source`. Warnings among the findings are dropped.
    pub(super) fn of_builder(mut findings: Vec<Finding>, source: &str, rules: &[(Box<str>, Range<usize>)]) -> Self {
        findings.retain(|finding| finding.severity == Severity::Error);
        let location = findings.first().map_or(Location::Policy, |first| Location::printed(first, source, rules));
        let message = findings.first().map_or("invalid policy", |finding| finding.message.as_str());
        // The lines of a text that the caller never wrote would only mislead.
        let text = match findings.len() {
            0 | 1 => format!("{location}: {message}"),
            more => format!("{location}: {message} (and {} more)", more.saturating_sub(1)),
        };
        Self { findings, location, text: text.into() }
    }

    /// Returns the errors, in the order of the policy. There is at least one.
    #[must_use]
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// Returns where the first error is.
    #[must_use]
    pub fn location(&self) -> &Location {
        &self.location
    }
}

impl fmt::Display for PolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for PolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for PolicyError {}
