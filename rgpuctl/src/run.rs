//! `rgpuctl run`: runs a program as a native client, and answers with its exit status.

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode, ExitStatus};

use anyhow::{Context, Result};
use clap::Args;
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::Pid;

use crate::FAILED;
use crate::daemon::{describe, end_with_parent};
use crate::session::{Session, Target};

/// Run a program on this machine as a client of rgpu.
///
/// The program needs no change: rgpu's CUDA libraries come first in its LD_LIBRARY_PATH, and RGPU_SOCKET tells them
/// where to go. Without --server, a private server is started for it, and ends with it: on this machine's GPU, or on
/// a GPU in software where there is none.
///
/// The exit status is the program's own, 128 + N when signal N ended it, or 125 when rgpuctl could not run it.
#[derive(Args)]
#[command(after_long_help = "Examples:
  rgpuctl run -- ./vectorAdd                               whatever this machine has
  rgpuctl run --backend software -- ./vectorAdd            a GPU in software
  rgpuctl run --server gpu7.example -- ./vectorAdd         a GPU server on the network")]
pub struct Arguments {
    #[command(flatten)]
    target: Target,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// Runs the program and answers with its exit status.
pub fn run(arguments: Arguments) -> Result<ExitCode> {
    run_program(&arguments.target, &arguments.program)
}

/// Runs `program`, the first its path and the others its arguments, and answers with its exit status. The daemons have ended when this returns.
pub fn run_program(target: &Target, program: &[OsString]) -> Result<ExitCode> {
    let (path, arguments) = program.split_first().context("no program is named")?;
    let mut session = Session::start(target)?;
    let mut command = Command::new(path);
    command.args(arguments);
    session.environment(&mut command)?;
    // Killing rgpuctl is killing the program.
    end_with_parent(&mut command, Signal::SIGKILL);
    let name = path.to_string_lossy().into_owned();
    // Up to here a signal ends rgpuctl, and the daemons with it. From here on signals are read from a descriptor, so
    // that none is lost between starting the program and waiting for it.
    let signals = Signals::block()?;
    let program = command.spawn().with_context(|| format!("cannot run {name}"))?;
    let status = wait(program, &signals, &mut session);
    drop(session);
    Ok(exit_code(status?))
}

/// Waits for the program; meanwhile hands signals on, and says so when a daemon ends before it.
fn wait(mut program: Child, signals: &Signals, session: &mut Session) -> Result<ExitStatus> {
    let pid = Pid::from_raw(program.id().cast_signed());
    loop {
        match signals.next()? {
            Received::ChildChanged => {
                if let Some(status) = program.try_wait().context("cannot wait for the program")? {
                    return Ok(status);
                }
                session.report_ended();
            }
            // The program has not been waited for, so the process id is still its own.
            Received::Forward(signal) => {
                kill(pid, signal).with_context(|| format!("cannot hand on {signal}"))?;
            }
        }
    }
}

fn exit_code(status: ExitStatus) -> ExitCode {
    match (status.code(), status.signal()) {
        (Some(code), _) => ExitCode::from(u8::try_from(code).unwrap_or(FAILED)),
        (None, Some(signal)) => {
            eprintln!("rgpuctl: the program was ended by {}", describe(status));
            ExitCode::from(u8::try_from(128 + signal).unwrap_or(FAILED))
        }
        (None, None) => ExitCode::from(FAILED),
    }
}

/// What a signal means for the wait.
enum Received {
    /// A child ended, stopped or continued.
    ChildChanged,
    /// The program is to have this signal too.
    Forward(Signal),
}

/// The signals of this process, read from a descriptor.
struct Signals {
    descriptor: SignalFd,
}

impl Signals {
    fn block() -> Result<Self> {
        let mut set = SigSet::empty();
        for signal in [
            Signal::SIGCHLD,
            Signal::SIGINT,
            Signal::SIGTERM,
            Signal::SIGHUP,
            Signal::SIGQUIT,
            Signal::SIGUSR1,
            Signal::SIGUSR2,
            Signal::SIGWINCH,
        ] {
            set.add(signal);
        }
        set.thread_block().context("cannot block signals")?;
        let descriptor =
            SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC).context("cannot create a signal descriptor")?;
        Ok(Self { descriptor })
    }

    /// The next signal that matters, waiting for it.
    fn next(&self) -> Result<Received> {
        loop {
            let Some(info) = self.descriptor.read_signal().context("cannot read signals")? else { continue };
            let Ok(signal) = Signal::try_from(info.ssi_signo.cast_signed()) else { continue };
            if signal == Signal::SIGCHLD {
                return Ok(Received::ChildChanged);
            }
            // What the terminal sends, its whole foreground group has had already, the program included.
            if info.ssi_code != libc::SI_KERNEL {
                return Ok(Received::Forward(signal));
            }
        }
    }
}
