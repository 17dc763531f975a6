//! Policy files: reading them, and formatting their errors with file name, line and column.

mod changes;

use std::io::Read as _;
use std::path::Path;

use anyhow::{Context as _, bail};
use threshold_core::policy::{Finding, MAX_FILE, Policy, Review, Severity};
use threshold_limiter::files::{self, Trust};

pub use changes::{Tenants, changes, joined};

/// More findings than these are a flood: the file is probably no policy, or one mistake has many consequences.
const FLOOD: usize = 20;
/// The most lines of a flood's findings, so that with the summary they fit on a screen of 24 lines.
const FLOOD_LINES: usize = 17;

/// The text of a policy, and its file name for messages.
#[derive(Debug)]
pub struct Source {
    /// The name of the file, for messages.
    pub name: String,
    /// The text.
    pub text: String,
}

impl Source {
    /// Reads a policy file, or standard input for `-`.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        Self::from_bytes(path, read_bytes(path, MAX_FILE)?)
    }

    /// Reads a policy that a server is to decide by: a pipe must not keep it waiting, nor others change the file.
    pub fn read_to_serve(path: &Path) -> anyhow::Result<Self> {
        if path.as_os_str() == "-" {
            return Self::read(path);
        }
        Self::from_bytes(path, read_trusted(path, Trust::Settings, MAX_FILE)?)
    }

    /// Decodes the bytes of a policy file.
    pub fn from_bytes(path: &Path, bytes: Vec<u8>) -> anyhow::Result<Self> {
        let name = if path.as_os_str() == "-" { "<stdin>".to_owned() } else { path.display().to_string() };
        Ok(Self { text: text_of(path, bytes)?, name })
    }

    /// Reviews the policy: errors and warnings. Variables come from the environment.
    #[must_use]
    pub fn review(&self) -> Review {
        Policy::review(&self.text, &|name| std::env::var(name).ok())
    }

    /// Parses the policy. All of its errors become one.
    pub fn policy(&self) -> anyhow::Result<Policy> {
        let errors = |errors: Vec<Finding>| anyhow::anyhow!("the policy cannot be used\n{}", self.render(&errors));
        self.policy_or_errors().map_err(errors)
    }

    /// Parses the policy, or returns its errors, of which there is at least one.
    pub fn policy_or_errors(&self) -> Result<Policy, Vec<Finding>> {
        let Review { policy, mut findings, .. } = self.review();
        findings.retain(|finding| finding.severity == Severity::Error);
        policy.ok_or(findings)
    }

    /// Formats findings with file name, line and column. Of a flood, only the first ones.
    #[must_use]
    pub fn render(&self, findings: &[Finding]) -> String {
        let most_lines = if findings.len() > FLOOD { FLOOD_LINES } else { usize::MAX };
        let (mut text, mut lines, mut shown) = (String::new(), 0usize, 0usize);
        for finding in findings {
            let rendered = finding.render(&self.name, &self.text);
            // Counted in lines and not in findings: a finding with an excerpt of the file takes several.
            lines = lines.saturating_add(rendered.lines().count()).saturating_add(1);
            if lines > most_lines {
                break;
            }
            if shown > 0 {
                text.push('\n');
            }
            text.push_str(&rendered);
            shown = shown.saturating_add(1);
        }
        let more = findings.len().saturating_sub(shown);
        if more > 0 {
            let is_no_toml = findings.iter().all(|finding| finding.code == "syntax");
            let hint = if is_no_toml { "is this a policy file?" } else { "correct these first" };
            text.push_str(&format!("\nand {more} more; {hint}\n"));
        }
        text
    }
}

/// Reads a text file of a bounded size.
pub fn read_text(path: &Path, at_most: usize) -> anyhow::Result<String> {
    text_of(path, read_bytes(path, at_most)?)
}

/// Reads a file of a bounded size.
pub fn read_bytes(path: &Path, at_most: usize) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // One byte more than allowed tells a file that is too large from one that just fits.
    let limit = u64::try_from(at_most)?.saturating_add(1);
    let reading = if path.as_os_str() == "-" {
        std::io::stdin().lock().take(limit).read_to_end(&mut bytes)
    } else {
        std::fs::File::open(path).and_then(|file| file.take(limit).read_to_end(&mut bytes))
    };
    reading.with_context(|| format!("cannot read {}", path.display()))?;
    bounded(path, bytes, at_most)
}

/// Reads a file that a server depends on, which must be what [`Trust`] demands.
pub fn read_trusted(path: &Path, trust: Trust, at_most: usize) -> anyhow::Result<Vec<u8>> {
    let bytes = files::read(path, trust, at_most).with_context(|| format!("cannot read {}", path.display()))?;
    bounded(path, bytes, at_most)
}

fn bounded(path: &Path, bytes: Vec<u8>, at_most: usize) -> anyhow::Result<Vec<u8>> {
    if bytes.len() > at_most {
        bail!("{} is larger than {at_most} bytes", path.display());
    }
    Ok(bytes)
}

fn text_of(path: &Path, bytes: Vec<u8>) -> anyhow::Result<String> {
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        anyhow::anyhow!("{} is not UTF-8: the byte at offset {at} is invalid", path.display())
    })
}
