//! What the program can be asked on the command line.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Decides, for every request, whether its caller may cross.
#[derive(Debug, Parser)]
#[command(name = "threshold", version, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Write a commented policy to standard output
    Init(InitArgs),
    /// Check a policy: exits with 0 if clean, 1 on warnings that are denied, 2 on errors
    Lint(LintArgs),
    /// Say which rules a request meets, by which keys and limits, and why
    Explain(Box<ExplainArgs>),
    /// Run a policy's own test cases
    Test(TestArgs),
}

#[derive(Debug, Args)]
pub(crate) struct InitArgs {
    /// Which policy to start from; `--list` shows them all
    #[arg(default_value = "starter")]
    pub(crate) preset: String,
    /// List the presets
    #[arg(long)]
    pub(crate) list: bool,
}

#[derive(Debug, Args)]
pub(crate) struct LintArgs {
    /// The policy file, or - for standard input
    pub(crate) policy: PathBuf,
    /// Exit with 1 if there are warnings
    #[arg(long, value_enum)]
    pub(crate) deny: Option<Denied>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Denied {
    Warnings,
}

#[derive(Debug, Args)]
pub(crate) struct ExplainArgs {
    /// The policy file, or - for standard input
    pub(crate) policy: PathBuf,
    /// The method of the request
    #[arg(long)]
    pub(crate) method: Option<String>,
    /// Its path, in any spelling
    #[arg(long)]
    pub(crate) path: Option<String>,
    /// The host it is for
    #[arg(long)]
    pub(crate) host: Option<String>,
    /// The client's address
    #[arg(long)]
    pub(crate) ip: Option<IpAddr>,
    /// Whose customer it is
    #[arg(long)]
    pub(crate) tenant: Option<String>,
    /// Who is calling
    #[arg(long)]
    pub(crate) user: Option<String>,
    /// The tenant's plan
    #[arg(long)]
    pub(crate) tier: Option<String>,
    /// What it costs, in requests
    #[arg(long)]
    pub(crate) cost: Option<u64>,
    /// What it costs, in bytes
    #[arg(long)]
    pub(crate) bytes: Option<u64>,
    /// A named cost, as in tokens=812; may be repeated
    #[arg(long = "costs", value_name = "NAME=N", value_parser = named_cost)]
    pub(crate) costs: Vec<(String, u64)>,
    /// One of your own facts, as in inbox=7; may be repeated
    #[arg(long = "fact", value_name = "NAME=VALUE", value_parser = pair)]
    pub(crate) facts: Vec<(String, String)>,
    /// A header that a rule counts by, as in x-api-key=abc; may be repeated
    #[arg(long = "header", value_name = "NAME=VALUE", value_parser = pair)]
    pub(crate) headers: Vec<(String, String)>,
    /// The endpoint, if your router knows it better than the policy
    #[arg(long)]
    pub(crate) endpoint: Option<String>,
    /// The category, if you know it better than the policy
    #[arg(long)]
    pub(crate) category: Option<String>,
    /// Answer in JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct TestArgs {
    /// The policy file, or - for standard input
    pub(crate) policy: PathBuf,
    /// Files of cases, in the format of docs/cases.md
    #[arg(required = true)]
    pub(crate) cases: Vec<PathBuf>,
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("write NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

fn named_cost(text: &str) -> Result<(String, u64), String> {
    let (name, value) = pair(text)?;
    let cost = value.parse().map_err(|_| format!("\"{value}\" is not a whole number"))?;
    Ok((name, cost))
}
