//! The command line of the operators' commands that read or write lists.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use threshold_core::Span;

use super::export::ExportForm;
use crate::cli::{ServerArgs, span};

/// The arguments of `threshold bans import`.
#[derive(Debug, Args)]
#[command(after_help = "\
FILE is a list of addresses and CIDRs, one on each line, with comments after # or ;; a CSV file whose header has a column \
value, ip, cidr, network, address or key; CrowdSec's decisions (cscli decisions list -o json or -o raw); or a DROP list of \
Spamhaus, as text or as JSON.

The bans take the place of those that were imported before under the same origin. If one entry is invalid, or covers a \
trusted proxy, this machine or a whole address space, nothing is changed.")]
pub(crate) struct ImportArgs {
    /// The list, or - for standard input
    pub(crate) file: PathBuf,
    /// The name of the set: letters, digits, dots, dashes and underscores
    #[arg(long, value_name = "NAME")]
    pub(crate) origin: String,
    /// The reason of bans without one of their own; the origin by default
    #[arg(long)]
    pub(crate) reason: Option<String>,
    /// The length of bans without an end of their own, such as 24h; for good by default
    #[arg(long = "for", value_name = "TIME", value_parser = span, conflicts_with = "until")]
    pub(crate) length: Option<Span>,
    /// The end of bans without one of their own, such as 2026-12-01T00:00:00Z
    #[arg(long, value_name = "MOMENT", value_parser = moment)]
    pub(crate) until: Option<jiff::Timestamp>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// The arguments of `threshold bans export`.
#[derive(Debug, Args)]
pub(crate) struct ExportBansArgs {
    /// The form of the list
    #[arg(long, value_enum)]
    pub(crate) format: ExportForm,
    /// The journal to read if no server answers
    #[arg(long, value_name = "FILE", default_value = "threshold.db")]
    pub(crate) db: PathBuf,
}

/// The arguments of `threshold locks`.
#[derive(Debug, Args)]
#[command(after_help = "The token comes from THRESHOLD_ADMIN_TOKEN, or THRESHOLD_READ_TOKEN to read.")]
pub(crate) struct LocksArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    #[command(subcommand)]
    pub(crate) command: LocksCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum LocksCommand {
    /// List the locked accounts of logins, by the digests that subject account NAME prints
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// The arguments of `threshold alerts`.
#[derive(Debug, Args)]
#[command(after_help = "The token comes from THRESHOLD_ADMIN_TOKEN, or THRESHOLD_READ_TOKEN to list.")]
pub(crate) struct AlertsArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    #[command(subcommand)]
    pub(crate) command: Option<AlertsCommand>,
    /// Print JSON
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum AlertsCommand {
    /// Send a test message to every receiver of alerts: exits with 1 if one does not accept it, or if there is none
    Test,
}

/// The arguments of `threshold audit`.
#[derive(Debug, Args)]
#[command(after_help = "The token comes from THRESHOLD_ADMIN_TOKEN, or THRESHOLD_READ_TOKEN to read.")]
pub(crate) struct AuditArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    /// The number of lines, the newest last
    #[arg(long, value_name = "N", default_value = "50", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) limit: u32,
    /// Only lines with lower numbers than this
    #[arg(long, value_name = "ID")]
    pub(crate) before: Option<u64>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// The journal to read if no server answers
    #[arg(long, value_name = "FILE", default_value = "threshold.db")]
    pub(crate) db: PathBuf,
}

fn moment(text: &str) -> Result<jiff::Timestamp, String> {
    text.parse().map_err(|_| "expected a time such as 2026-12-01T00:00:00Z".to_owned())
}

/// The arguments of `threshold tail`.
#[derive(Debug, Args)]
#[command(after_help = "\
Denials, warnings and strikes are events; allowed requests are if the server has --events-sample. A filter is the name of a field \
and its value, such as layer=edge, verdict=ban, tenant=acme; all must hold. The token comes from THRESHOLD_ADMIN_TOKEN or \
THRESHOLD_READ_TOKEN.")]
pub(crate) struct TailArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    /// Only events with this field: NAME=VALUE
    #[arg(value_name = "FILTER", value_parser = filter)]
    pub(crate) filters: Vec<(String, String)>,
    /// Print JSON, one event on each line
    #[arg(long)]
    pub(crate) json: bool,
}

/// The arguments of `threshold top`.
#[derive(Debug, Args)]
#[command(after_help = "\
Keys: 1, 2 and 3 choose the last minute, hour or day; q ends. The token comes from THRESHOLD_ADMIN_TOKEN or THRESHOLD_READ_TOKEN.")]
pub(crate) struct TopArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

/// The arguments of `threshold doctor`.
#[derive(Debug, Args)]
#[command(after_help = "\
Checks clocks, secrets and policies of the servers against each other, and of each server: what /readyz reports, proxies that are not \
trusted, Redis that evicts, is full or is unevenly filled, free disk space, full tables, lost events, and paths of the last hour that \
only limits by address cover. The token comes from THRESHOLD_ADMIN_TOKEN or THRESHOLD_READ_TOKEN.

Exits with 1 if something should be changed.")]
pub(crate) struct DoctorArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    /// Further servers, such as all nodes on one store
    #[arg(value_name = "URL")]
    pub(crate) others: Vec<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

fn filter(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("expected NAME=VALUE, such as layer=edge")?;
    Ok((name.to_owned(), value.to_owned()))
}

/// The arguments of `threshold why`.
#[derive(Debug, Args)]
#[command(after_help = "\
Answers and log lines have the trace id. The token comes from THRESHOLD_ADMIN_TOKEN or THRESHOLD_READ_TOKEN.

Exits with 1 if no event has the trace id.")]
pub(crate) struct WhyArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    /// The trace id of the decision: 32 hexadecimal digits
    pub(crate) trace: String,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}
