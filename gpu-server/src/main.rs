//! rgpu-server: shares the GPUs of this machine with rgpu clients.
//!
//! ```text
//!  parent ── accepts, handshake, admission ─┬─ connection + token ──▶ worker (one process for each session)
//!    │ pool and queue: workers, clients     └─ data connections  ──▶    dispatcher ─▶ Driver: cuda | software
//!    └ status socket
//! ```
//!
//! In reading order: [`cli`] (what can be set), [`parent`] (the daemon), [`ipc`] (between the daemon and its workers), [`share`] (what sessions share), [`worker`] (a session),
//! [`driver`] (what executes the commands), [`check`] (`rgpu-server check`).

mod check;
mod cli;
mod driver;
mod ipc;
mod parent;
mod share;
mod worker;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let arguments = cli::Arguments::parse();
    let result = match &arguments.command {
        Some(cli::Command::Worker(worker)) => worker::main(worker),
        Some(cli::Command::Check(options)) => return check::main(options),
        None => parent::main(&arguments.serve),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("rgpu-server: {e:#}");
            ExitCode::FAILURE
        }
    }
}
