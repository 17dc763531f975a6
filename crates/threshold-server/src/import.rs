//! `threshold import`: writes another limiter's configuration as a policy.

mod envoy;

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::Report;
use crate::source::Source;

#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    /// Whose configuration it is
    #[arg(value_enum)]
    pub(crate) origin: Origin,
    /// The file, or - for standard input
    pub(crate) file: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Origin {
    /// A domain of envoyproxy/ratelimit, in YAML
    EnvoyRatelimit,
}

/// Prints the policy. What it cannot express is an error, and nothing is printed.
pub(crate) fn run(args: &ImportArgs) -> anyhow::Result<Report> {
    let source = Source::read(&args.file)?;
    let text = match args.origin {
        Origin::EnvoyRatelimit => envoy::import(&source.name, &source.text)?,
    };
    Ok(Report { text, code: 0 })
}
