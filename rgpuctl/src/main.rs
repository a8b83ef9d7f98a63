//! rgpuctl: the command of an operator, or of anyone who tries rgpu on a laptop.
//!
//! In reading order:
//! - [`run`]: runs a program as a native client;
//! - [`trace`]: runs one and shows where its calls spent their time;
//! - [`bench`]: measures what calls cost and what copies carry, as such a client sees it;
//! - [`session`]: the daemons that both start, with a private server when none is named;
//! - [`daemon`]: starting and ending those, and what their last log lines say when that fails;
//! - [`status`]: asks running daemons how they are;
//! - [`doctor`]: finds what is missing on this machine, and the command that mends it.

mod bench;
mod daemon;
mod doctor;
mod run;
mod session;
mod status;
mod trace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Run programs on a remote GPU, and look after the daemons that make it possible.
#[derive(Parser)]
#[command(name = "rgpuctl", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(run::Arguments),
    Trace(trace::Arguments),
    Bench(bench::Arguments),
    Status(status::Arguments),
    Doctor(doctor::Arguments),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Run(arguments) => run::run(arguments),
        Command::Trace(arguments) => trace::trace(&arguments),
        Command::Bench(arguments) => bench::bench(&arguments),
        Command::Status(arguments) => status::status(&arguments),
        Command::Doctor(arguments) => Ok(doctor::doctor(&arguments)),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("rgpuctl: {error:#}");
            ExitCode::from(FAILED)
        }
    }
}

/// The exit status when rgpuctl itself failed, before or beside the program: the one that `env` and `timeout` use.
const FAILED: u8 = 125;
