//! The program `threshold`: runs the subcommand of its command line, and prints its report.

mod backup;
mod cli;
mod demo;
mod desk;
mod door;
mod explain;
mod init;
mod jwt;
mod log;
mod manual;
mod metrics;
mod operate;
#[cfg_attr(not(feature = "otlp"), path = "otlp/absent.rs")]
mod otlp;
mod policy_file;
mod reload;
mod serve;
mod signals;

use std::io::Write as _;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser as _};

use cli::{Cli, Command};
use threshold_core::text::printable_lines;
use threshold_rehearsal::{Report, cases, export, import, lint, replay, suggest};

/// The version, and the commit where it is known.
const BUILD: &str = env!("THRESHOLD_BUILD");

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    let report = match cli.command {
        Command::Init(args) => init::run(&args),
        Command::Lint(args) => lint::run(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Test(args) => cases::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Bans(args) => operate::bans(&args),
        Command::Subject(args) => operate::subject(&args),
        Command::Health(args) => operate::health(&args),
        Command::Locks(args) => operate::locks(&args),
        Command::Alerts(args) => operate::alerts(&args),
        Command::Audit(args) => operate::audit(&args),
        Command::Why(args) => operate::why(&args),
        Command::Tail(args) => operate::tail::run(&args),
        Command::Doctor(args) => operate::doctor::run(&args),
        Command::Top(args) => operate::top::run(&args),
        Command::Backup(args) => backup::backup(&args),
        Command::Restore(args) => backup::restore(&args),
        Command::Schema => Ok(init::schema()),
        Command::Completions(args) => Ok(manual::completions(&args)),
        Command::Man(args) => manual::page(&args),
        Command::Export(args) => export::run(&args),
        Command::Import(args) => import::run(&args),
        Command::Replay(args) => replay::run(&args),
        Command::Suggest(args) => suggest::run(&args),
    };
    match report {
        Ok(Report { text, code }) => {
            print(&text);
            ExitCode::from(code)
        }
        Err(error) => {
            print_error(&format!("{error:#}"));
            ExitCode::from(2)
        }
    }
}

/// Prints an error of the command line, or the help or version that was asked for. An unknown command is followed by the known ones.
fn usage(error: &clap::Error) -> ExitCode {
    // A closed pipe is not an error.
    let _ = error.print();
    // clap suggests a similar command only, and names none if the word is far from all of them.
    if error.kind() == ErrorKind::InvalidSubcommand {
        let command = Cli::command();
        let known: Vec<&str> = command.get_subcommands().map(clap::Command::get_name).collect();
        print_error(&format!("the commands are {}", known.join(", ")));
    }
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}

/// Prints to standard output. Control characters are escaped, because the text may quote a log, a policy or a server's answer
/// that contain terminal escape sequences. JSON keeps its meaning.
fn print(text: &str) {
    // A closed pipe (`| head`) is not an error.
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(printable_lines(text).as_bytes()).and_then(|()| out.flush());
}

/// Prints to standard error, as [`print()`] does.
fn print_to_stderr(text: &str) {
    let _ = std::io::stderr().write_all(printable_lines(text).as_bytes());
}

/// Prints an error to standard error, with control characters escaped.
fn print_error(text: &str) {
    // Standard error may be closed as well (`2>&1 | head`), and `eprintln!` would panic.
    let _ = writeln!(std::io::stderr(), "threshold: {}", printable_lines(text));
}
