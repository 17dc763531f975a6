//! The program `threshold`.

mod backup;
mod cli;
mod desk;
mod door;
mod explain;
mod export;
mod init;
mod lint;
mod log;
mod manual;
mod operate;
mod reload;
mod replay;
mod serve;
mod source;
mod suggest;
mod test;
mod traffic;

use std::io::Write as _;
use std::process::ExitCode;

use clap::Parser as _;

use cli::{Cli, Command};

/// What a command prints, and how it ends.
struct Report {
    text: String,
    code: u8,
}

fn main() -> ExitCode {
    let report = match Cli::parse().command {
        Command::Init(args) => init::run(&args),
        Command::Lint(args) => lint::run(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Test(args) => test::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Bans(args) => operate::bans(&args),
        Command::Subject(args) => operate::subject(&args),
        Command::Backup(args) => backup::backup(&args),
        Command::Restore(args) => backup::restore(&args),
        Command::Completions(args) => Ok(manual::completions(&args)),
        Command::Man(args) => manual::page(&args),
        Command::Export(args) => export::run(&args),
        Command::Replay(args) => replay::run(&args),
        Command::Suggest(args) => suggest::run(&args),
    };
    match report {
        Ok(Report { text, code }) => {
            // A reader that has seen enough (`| head`) is no error.
            let _ = std::io::stdout().lock().write_all(text.as_bytes());
            ExitCode::from(code)
        }
        Err(error) => {
            eprintln!("threshold: {error:#}");
            ExitCode::from(2)
        }
    }
}
