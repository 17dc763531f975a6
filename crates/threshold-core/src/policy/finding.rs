//! What is wrong, or doubtful, about a policy: where, why, and what to write instead.

use std::fmt;
use std::ops::Range;

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
        let text = source.lines().nth(line.saturating_sub(1)).unwrap_or_default();
        let indent = column.saturating_sub(1);
        let under = source
            .get(self.span.start..self.span.end)
            .map_or(1, |span| span.lines().next().unwrap_or_default().chars().count())
            .clamp(1, text.chars().count().saturating_sub(indent).max(1));
        // Tabs stay tabs, so that the underline stands below its text at any tab width.
        let pad: String = text.chars().take(indent).map(|c| if c == '\t' { '\t' } else { ' ' }).collect();
        let number = line.to_string();
        let gutter = " ".repeat(number.len());
        let mut out = format!("{file}:{line}:{column}: {word}[{}]: {}\n", self.code, printable(&self.message));
        out.push_str(&format!("{gutter} |\n{number} | {}\n", printable(text)));
        out.push_str(&format!("{gutter} | {pad}{}\n", "^".repeat(under)));
        if !self.help.is_empty() {
            out.push_str(&format!("{gutter} = {}\n", printable(&self.help)));
        }
        out
    }
}

/// Control characters cannot reach a terminal: a policy may come from someone else.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\t' { '\u{fffd}' } else { c }).collect()
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
