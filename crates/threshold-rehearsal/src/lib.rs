//! Tries a policy before it decides anything: on logs and cases, for mistakes, and in the languages of other rate limiters.
//!
//! [`replay`] and [`suggest`] read access logs, [`cases`] plays cases, [`lint`] finds mistakes, and [`export`] and [`import`] translate. It
//! touches no server, and has no runtime.

pub mod cases;
pub mod export;
pub mod import;
pub mod lint;
pub mod replay;
pub mod source;
pub mod suggest;
mod traffic;

/// The output of a command.
#[derive(Debug)]
pub struct Report {
    /// What is printed.
    pub text: String,
    /// The exit code.
    pub code: u8,
}

/// Reads `NAME=VALUE` from a command line.
///
/// # Errors
/// Returns what was expected.
pub fn pair(text: &str) -> Result<(String, String), String> {
    // At the first equals sign: a value may contain more of them, a name does not.
    let (name, value) = text.split_once('=').ok_or("expected NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}
