//! `threshold completions` and `threshold man`: generated from the definition of the command line.

use anyhow::Context as _;
use clap::CommandFactory as _;

use crate::cli::{Cli, CompletionsArgs, ManArgs};
use threshold_rehearsal::Report;

pub(crate) fn completions(args: &CompletionsArgs) -> Report {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "threshold", &mut text);
    Report { text: String::from_utf8_lossy(&text).into_owned(), code: 0 }
}

pub(crate) fn page(args: &ManArgs) -> anyhow::Result<Report> {
    let mut command = Cli::command();
    // Sets the display names of the subcommands, which become the names of their pages: threshold-serve.
    command.build();
    if let Some(name) = &args.command {
        let known: Vec<&str> = command.get_subcommands().map(clap::Command::get_name).collect();
        let unknown = || format!("unknown command \"{name}\"; the commands are {}", known.join(", "));
        let own = command.find_subcommand(name).with_context(unknown)?.clone();
        command = own.display_name(format!("threshold-{name}"));
    }
    let mut text = Vec::new();
    clap_mangen::Man::new(command).render(&mut text)?;
    Ok(Report { text: String::from_utf8_lossy(&text).into_owned(), code: 0 })
}
