//! rgpuctl: runs programs on a remote GPU and inspects the daemons.
//!
//! In reading order:
//! - [`run`]: runs a program as a native client;
//! - [`trace`]: runs a program and shows where its calls spend their time;
//! - [`bench`]: measures the latency of calls and the bandwidth of copies, as a client sees them;
//! - [`session`]: the daemons that these start, with a private server if none is given;
//! - [`daemon`]: starting and ending daemons, and quoting their log when that fails;
//! - [`status`]: shows the status of running daemons;
//! - [`doctor`]: checks this machine's setup and suggests fixes.

mod bench;
mod daemon;
mod doctor;
mod installation;
mod run;
mod session;
mod status;
mod trace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Run programs on a remote GPU and inspect rgpu's daemons.
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

/// The exit status when rgpuctl itself fails, as with `env` and `timeout`.
const FAILED: u8 = 125;
