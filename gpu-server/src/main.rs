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

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(e) => {
            eprintln!("rgpu-server: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<ExitCode> {
    let arguments = cli::Arguments::read(std::env::args_os())?;
    match &arguments.command {
        Some(cli::Command::Worker(worker)) => worker::main(worker)?,
        Some(cli::Command::Check(options)) => return Ok(check::main(options)),
        None if arguments.print_config => print!("{}", cli::example()),
        None if arguments.check_config => println!("the configuration is valid"),
        None => parent::main(arguments.serve)?,
    }
    Ok(ExitCode::SUCCESS)
}
