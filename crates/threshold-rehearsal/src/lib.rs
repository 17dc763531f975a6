//! Tries a policy before it decides anything: on access logs ([`replay`], [`suggest`]), on cases ([`cases`]), for mistakes ([`lint`]), and in the languages of other
//! rate limiters ([`export`], [`import`]). It touches no server, and has no runtime.

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
