//! rgpu-server: shares the GPUs of this machine with rgpu clients.
//!
//! ```text
//!  parent ── accepts, handshake, admission ─┬─ connection + token ──▶ worker (one process for each session)
//!    │ pool and queue: workers, clients     └─ data connections  ──▶    dispatcher ─▶ driver: cuda | software
//!    └ status socket, admin socket
//! ```
//!
//! In reading order:
//! - [`config`]: the command line and the configuration file; [`policy`]: the rules for clients;
//! - [`parent`]: the daemon;
//! - [`limits`]: what sessions may use; [`worker_protocol`]: the messages between the daemon and its workers;
//! - [`confinement`]: what a worker may reach;
//! - [`pages`]: memory that the daemon shares with each worker; [`room`]: how a worker waits for memory of a
//!   device;
//! - [`cache`]: what clients need not send again;
//! - [`cuda_ipc`]: memory and events that sessions share with each other;
//! - [`worker`]: a process that serves one session;
//! - [`driver`]: what executes commands;
//! - [`check`]: `rgpu-server check`; [`log`]: lines on standard error.

mod cache;
mod check;
mod config;
pub mod confinement;
mod cuda_ipc;
mod direct;
#[cfg(any(test, fuzzing))]
mod doubles;
mod driver;
mod limits;
mod lock;
mod log;
mod pages;
mod parent;
mod policy;
mod room;
mod shared_event;
mod worker;
pub mod worker_protocol;

use std::process::ExitCode;

#[cfg(fuzzing)]
pub use direct::fuzzing::pieces_any;
#[cfg(fuzzing)]
pub use parent::handshake_any;
#[cfg(fuzzing)]
pub use policy::policy_any;
#[cfg(fuzzing)]
pub use worker::fuzzing::session_any;

/// Runs what the command line asks for.
pub fn main() -> ExitCode {
    options::printing::end_if_it_fails("rgpu-server", 1);
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
        Some(config::Command::Check(options)) => return Ok(check::main(options.clone())),
        None if arguments.print_clients => print!("{}", policy::example()),
        None if arguments.common.print_config => print!("{}", config::example()),
        None if let Some(folder) = &arguments.common.write_manual => config::write_manual(folder)?,
        None if arguments.common.check_config && arguments.common.takes_over.is_some() => {
            parent::check(&arguments.serve)?;
            arguments.common.takes_over.map_or(Ok(()), parent::takes_over)?;
        }
        None if arguments.common.check_config => match parent::check(&arguments.serve)?.counts() {
            (0, 0) => println!("the configuration is valid"),
            (groups, clients) => {
                println!("the configuration is valid, with rules for {groups} groups and {clients} clients");
            }
        },
        None => parent::main(arguments.serve)?,
    }
    Ok(ExitCode::SUCCESS)
}
