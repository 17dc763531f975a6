//! What is wrong, or doubtful, about a policy: where, why, and what to write instead.

use std::fmt;
use std::ops::Range;

use crate::text::{printable, printable_lines};

/// Whether a policy with this finding can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// It can, but probably does not do what was meant.
    Warning,
    /// It cannot.
    Error,
}

/// One thing found in a policy file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Error or warning.
    pub severity: Severity,
    /// A short name that does not change.
    pub code: &'static str,
    /// The bytes of the file it is about.
    pub span: Range<usize>,
    /// What is found.
    pub message: String,
    /// What to write instead, or why it matters.
    pub help: String,
}

impl Finding {
    /// Line and column of the first character, both from 1, the column in characters.
    #[must_use]
    pub fn place(&self, source: &str) -> (usize, usize) {
        let before = source.get(..self.span.start.min(source.len())).unwrap_or(source);
        let line_start = before.rfind('\n').map_or(0, |at| at.saturating_add(1));
        let line = before.matches('\n').count().saturating_add(1);
        let column = before.get(line_start..).unwrap_or_default().chars().count().saturating_add(1);
        (line, column)
    }

    /// The finding as `lint` prints it: place, message, the line with the text underlined, help.
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

    /// The line of the source, with the text underlined.
    fn underlined(&self, source: &str, (line, column): (usize, usize), gutter: &str) -> String {
        let text = source.lines().nth(line.saturating_sub(1)).unwrap_or_default();
        let indent = column.saturating_sub(1);
        let under = source
            .get(self.span.start..self.span.end)
            .map_or(1, |span| span.lines().next().unwrap_or_default().chars().count())
            .clamp(1, text.chars().count().saturating_sub(indent).max(1));
        // As they are shown, where a character may be an escape. Tabs stay tabs, so that the underline stands below its
        // text at any tab width.
        let shown = |text: &mut dyn Iterator<Item = char>| printable_lines(&text.collect::<String>()).into_owned();
        let mut characters = text.chars();
        let before = shown(&mut characters.by_ref().take(indent));
        let under = "^".repeat(shown(&mut characters.take(under)).chars().count().max(1));
        let pad: String = before.chars().map(|c| if c == '\t' { '\t' } else { ' ' }).collect();
        format!("{gutter} |\n{line} | {}\n{gutter} | {pad}{under}\n", printable_lines(text))
    }
}

/// Whether the line at this byte of the source may hold the key that tokens are verified with: no message shows it. The
/// source may be broken anywhere, so this looks at lines alone, and rather hides too many than too few.
pub(super) fn is_secret(source: &str, at: usize) -> bool {
    let before = source.get(..at.min(source.len())).unwrap_or(source);
    let line = before.matches('\n').count();
    let mut lines = SecretLines::default();
    source.split('\n').take(line.saturating_add(1)).map(|text| lines.next(text)).last().unwrap_or(false)
}

/// What is known of `[identity.jwt]` after each line.
#[derive(Default)]
struct SecretLines {
    /// Its table is open.
    in_table: bool,
    /// An inline table of its is open, and this many braces deep.
    braces: usize,
    /// A string of its over several lines is open, and ends with this.
    string: Option<&'static str>,
}

impl SecretLines {
    /// Whether the next line is one of its.
    fn next(&mut self, line: &str) -> bool {
        if let Some(end) = self.string {
            self.string = Some(end).filter(|end| line.matches(end).count().is_multiple_of(2));
            return true;
        }
        if line.trim_start().starts_with('[') {
            *self = Self { in_table: names_jwt(line), ..Self::default() };
        }
        let names_key = line.trim_start().strip_prefix("key").is_some_and(|rest| rest.trim_start().starts_with('='));
        let is_own = self.in_table || self.braces > 0 || names_jwt(line) || names_key;
        if is_own {
            let count = |c: char| line.matches(c).count();
            self.braces = self.braces.saturating_add(count('{')).saturating_sub(count('}'));
            let opens = |quotes: &str| !line.matches(quotes).count().is_multiple_of(2);
            self.string = ["\"\"\"", "'''"].into_iter().find(|quotes| opens(quotes));
        }
        is_own
    }
}

/// Whether a line names `jwt` as a key: in a header, before a dot, or before an equals sign.
fn names_jwt(line: &str) -> bool {
    let after = line.split("jwt").skip(1);
    let mut after = after.map(|rest| rest.trim_start_matches(['"', '\'', ' ', '\t']));
    // A header may lack its end.
    let is_header = line.trim_start().starts_with('[');
    after.any(|rest| (rest.is_empty() && is_header) || rest.starts_with(['.', '=', ']']))
}

/// A policy that cannot be used, with every reason found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyError {
    /// Errors, in the order of the file. Never empty.
    pub findings: Vec<Finding>,
    /// The first one's line and column.
    pub place: (usize, usize),
}

impl fmt::Display for PolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (line, column) = self.place;
        let message = self.findings.first().map_or("invalid policy", |finding| finding.message.as_str());
        write!(f, "line {line}, column {column}: {message}")?;
        match self.findings.len() {
            0 | 1 => Ok(()),
            more => write!(f, " (and {} more)", more.saturating_sub(1)),
        }
    }
}

impl std::error::Error for PolicyError {}
