//! rgpu-server: shares the GPUs of this machine with rgpu clients.
//!
//! ```text
//!  parent ── accepts, handshake, admission ─┬─ connection + token ──▶ worker (one process for each session)
//!    │ pool and queue: workers, clients     └─ data connections  ──▶    dispatcher ─▶ driver: cuda | software
//!    └ status socket
//! ```
//!
//! In reading order:
//! - [`config`]: the command line and the configuration file;
//! - [`parent`]: the daemon;
//! - [`worker_protocol`]: the messages between the daemon and its workers;
//! - [`pages`]: memory that the daemon shares with each worker;
//! - [`cuda_ipc`]: memory and events that sessions share with each other;
//! - [`worker`]: a process that serves one session;
//! - [`driver`]: what executes commands;
//! - [`check`]: `rgpu-server check`.

mod check;
mod config;
mod cuda_ipc;
mod driver;
mod pages;
mod parent;
mod worker;
mod worker_protocol;

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
    let arguments = config::Arguments::read(std::env::args_os())?;
    match &arguments.command {
        Some(config::Command::Worker(worker)) => worker::main(worker)?,
        Some(config::Command::Check(options)) => return Ok(check::main(options)),
        None if arguments.print_config => print!("{}", config::example()),
        None if arguments.check_config => println!("the configuration is valid"),
        None => parent::main(arguments.serve)?,
    }
    Ok(ExitCode::SUCCESS)
}
