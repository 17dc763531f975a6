//! `threshold import`: writes another limiter's configuration as a policy.

mod envoy;

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::Report;
use crate::source::Source;

/// What `threshold import` is given.
#[derive(Debug, Args)]
pub struct ImportArgs {
    /// Whose configuration it is
    #[arg(value_enum)]
    pub(crate) origin: Origin,
    /// Its files, or - for standard input; several become one policy
    #[arg(required = true, value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Origin {
    /// Domains of envoyproxy/ratelimit, in YAML
    EnvoyRatelimit,
}

/// Prints the policy. What it cannot express is an error, and nothing is printed.
pub fn run(args: &ImportArgs) -> anyhow::Result<Report> {
    let sources = args.files.iter().map(|file| Source::read(file)).collect::<anyhow::Result<Vec<_>>>()?;
    let text = match args.origin {
        Origin::EnvoyRatelimit => envoy::import(&sources)?,
    };
    Ok(Report { text, code: 0 })
}
