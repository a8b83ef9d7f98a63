//! rgpuctl: runs programs on a remote GPU and inspects the daemons.
//!
//! In reading order:
//! - [`run`]: runs a program as a native client;
//! - [`trace`]: runs a program and shows where its calls spend their time, from its [`recording`]s: as
//!   tables, and as a [`timeline`];
//! - [`bench`]: measures the latency of calls and the bandwidth of copies, as a client sees them;
//! - [`session`]: the daemons that these commands start, with a private server if none is given;
//! - [`daemon`]: starting and ending daemons, and quoting their log when that fails;
//! - [`enrollment`]: which machines may use a server;
//! - [`lease`]: GPUs for a limited time; [`pool`]: queries servers, and chooses among them;
//! - [`status`]: shows the status of running daemons; [`top`] shows it live;
//! - [`drain`]: ends a server after its sessions; [`upgrade`]: replaces it while they go on;
//! - [`cdi`]: describes the GPUs to container engines;
//! - [`doctor`]: checks this machine's setup and suggests fixes.

/// Prints to standard error. Unlike `eprint!`, it does not panic if the terminal is gone or nobody reads
/// there: programs and leases go on without it.
macro_rules! tell {
    ($($text:tt)*) => {{
        let text = format!($($text)*);
        let _ = std::io::Write::write_all(&mut std::io::stderr(), text.as_bytes());
    }};
}

/// The same for a line, without its end.
macro_rules! say {
    ($($text:tt)*) => { tell!("{}\n", format_args!($($text)*)) };
}

mod bench;
mod cdi;
mod daemon;
mod doctor;
mod drain;
mod enrollment;
mod installation;
mod lease;
mod pool;
mod recording;
mod run;
mod session;
mod status;
mod timeline;
mod top;
mod trace;
mod upgrade;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{CommandFactory, Parser, Subcommand};
use host_bridge::framing::with_causes;
use nix::sys::signal::{SigHandler, Signal, signal};

/// Run programs on a remote GPU and inspect rgpu's daemons.
#[derive(Parser)]
#[command(
    name = "rgpuctl",
    version,
    max_term_width = 100,
    after_long_help = "Exit status:
  0    done
  1    status: no daemon answers
       doctor: something is missing that rgpu needs
       renew, release, leases, inventory: not with all servers
  2    the command line is wrong
  3    drain: the server had to end sessions, or sessions were lost
  4    lease: no wait would help; the last line on standard error says why
  125  rgpuctl itself failed; the last line on standard error says why
  run and trace: the program's own status, or 128 + N if signal N ended it

Files:
  /run/rgpu/native.sock      where programs of this machine reach vhost-rgpu
  /run/rgpu/*.status         where the daemons report their status
  /etc/rgpu/pool.toml        the servers among which --gpus chooses
  /run/rgpu/server.admin     where rgpu-server takes requests of root
  /var/lib/rgpu/client       root's key, and the servers that it trusts
  ~/.config/rgpu             the same of another user"
)]
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
    Top(top::Arguments),
    Drain(drain::Arguments),
    Upgrade(upgrade::Arguments),
    Enroll(enrollment::Enroll),
    Join(enrollment::Join),
    Clients(enrollment::Clients),
    Revoke(enrollment::Revoke),
    Lease(lease::Lease),
    Renew(lease::Renew),
    Release(lease::Release),
    Leases(lease::Leases),
    Inventory(lease::Inventory),
    Cdi(cdi::Arguments),
    Doctor(doctor::Arguments),
    /// Write the man pages and shell completions into a folder; for packages
    #[command(hide = true)]
    WriteManual {
        /// The folder that is installed as /usr/share
        folder: PathBuf,
    },
}

fn main() -> ExitCode {
    // Whoever starts rgpuctl may ignore it, and then nobody hears that a program has ended.
    // SAFETY: the default action runs no code of this process.
    let _ = unsafe { signal(Signal::SIGCHLD, SigHandler::SigDfl) };
    options::printing::end_if_it_fails("rgpuctl", FAILED);
    let result = match Cli::parse().command {
        Command::Run(arguments) => run::run(arguments),
        Command::Trace(arguments) => trace::trace(&arguments),
        Command::Bench(arguments) => bench::bench(&arguments),
        Command::Status(arguments) => status::status(&arguments),
        Command::Top(arguments) => top::top(&arguments),
        Command::Drain(arguments) => drain::drain(&arguments),
        Command::Upgrade(arguments) => upgrade::upgrade(&arguments),
        Command::Enroll(arguments) => enrollment::enroll(&arguments),
        Command::Join(arguments) => enrollment::join(&arguments),
        Command::Clients(arguments) => enrollment::clients(&arguments),
        Command::Revoke(arguments) => enrollment::revoke(&arguments),
        Command::Lease(arguments) => lease::lease(&arguments),
        Command::Renew(arguments) => lease::renew(&arguments),
        Command::Release(arguments) => lease::release(&arguments),
        Command::Leases(arguments) => lease::leases(&arguments),
        Command::Inventory(arguments) => lease::inventory(&arguments),
        Command::Cdi(arguments) => cdi::run(&arguments),
        Command::Doctor(arguments) => Ok(doctor::doctor(&arguments)),
        Command::WriteManual { folder } => options::manual::write(Cli::command(), &folder)
            .map(|()| ExitCode::SUCCESS)
            .with_context(|| format!("cannot write into {}", folder.display())),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            say!("rgpuctl: {}", with_causes(error.as_ref()));
            ExitCode::from(FAILED)
        }
    }
}

/// The exit status when rgpuctl itself fails, as with `env` and `timeout`.
const FAILED: u8 = 125;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent_and_documented() {
        Cli::command().debug_assert();
        assert_eq!(options::manual::gaps(&Cli::command()), Vec::<String>::new());
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/command-line.md");
        let text = options::reference::markdown(Cli::command(), &clap::Command::new(""));
        test_kit::check_generated(page, Some("rgpuctl"), &text);
    }
}
