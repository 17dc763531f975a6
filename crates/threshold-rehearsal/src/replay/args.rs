//! The arguments of `threshold replay`.

use std::path::PathBuf;

use clap::Args;
use threshold_core::Span;
use threshold_core::limit::parse_span;

use super::zone::Zone;
use crate::traffic::Fields;

/// What `threshold replay` is given.
#[derive(Debug, Args)]
pub struct ReplayArgs {
    /// The policy file, or - for standard input
    pub(crate) policy: PathBuf,
    #[command(flatten)]
    pub(crate) log: LogArgs,
    /// Another policy: show what POLICY stops and this one does not, and the reverse
    #[arg(long, value_name = "POLICY2")]
    pub(crate) against: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Also write one page with plots
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
    /// The logs hold logins: sshd's, or JSON events
    #[arg(long, conflicts_with = "against")]
    pub(crate) login: bool,
    /// The time zone of the report, as in Europe/Berlin or +02:00; without it, UTC
    #[arg(long, value_name = "ZONE", allow_hyphen_values = true, value_parser = Zone::parse)]
    pub(crate) tz: Option<Zone>,
    /// How many subjects to list
    #[arg(long, default_value_t = 10, value_name = "N")]
    pub(crate) top: usize,
}

/// The logs, and how they are read.
#[derive(Debug, Args)]
pub struct LogArgs {
    /// Access logs, plain, gzip or zstd, or - for standard input; several are merged by time
    #[arg(required = true, value_name = "LOG")]
    pub(crate) logs: Vec<PathBuf>,
    /// The log's field for one of ours, as in ip=client.address; may be repeated
    #[arg(long = "field", value_name = "NAME=FIELD", value_parser = crate::pair)]
    pub(crate) fields: Vec<(String, String)>,
    /// The log's field for the user; in text logs user, ident or host
    #[arg(long, value_name = "FIELD")]
    pub(crate) user_field: Option<String>,
    /// The log's field for the tenant; in text logs user, ident or host
    #[arg(long, value_name = "FIELD")]
    pub(crate) tenant_field: Option<String>,
    /// How late a line may be in the log and still be sorted by its time
    #[arg(long, value_name = "TIME", default_value = "1min", value_parser = span)]
    pub(crate) reorder: Span,
}

impl LogArgs {
    pub(crate) fn fields(&self) -> anyhow::Result<Fields> {
        Fields::from_args(&self.fields, self.user_field.as_deref(), self.tenant_field.as_deref())
    }
}

fn span(text: &str) -> Result<Span, String> {
    if text == "0" || text == "0s" {
        return Ok(Span::ZERO);
    }
    parse_span(text).map_err(|error| format!("{}; {}", error.message, error.help))
}
