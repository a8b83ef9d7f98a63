//! `rgpuctl run`: runs a program as a native client and returns its exit status.

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode, ExitStatus};

use anyhow::{Context, Result};
use clap::Args;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{SigHandler, SigSet, Signal, kill, raise};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::{Pid, getpgid, getpgrp, getsid};

use crate::FAILED;
use crate::daemon::{describe, end_with_parent};
use crate::session::{Session, Target};

/// Run a program on this machine as a client of rgpu.
///
/// The program needs no change: rgpuctl puts rgpu's CUDA libraries first in LD_LIBRARY_PATH and sets
/// RGPU_SOCKET to the socket to connect to. With --gpus, rgpuctl chooses among the servers of a pool and
/// leases the GPUs while the program runs. Without --gpus and --server, rgpuctl starts a private server for
/// the program, which uses this machine's GPU or, if there is none, a GPU in software.
///
/// The exit status is the program's own, for a shell 128 + N if signal N ended it, or 125 if rgpuctl could
/// not run it.
#[derive(Args)]
#[command(after_long_help = "Examples:
  rgpuctl run -- ./vectorAdd                               this machine's GPU, or a GPU in software
  rgpuctl run --backend software -- ./vectorAdd            a GPU in software
  rgpuctl run --server gpu7.example -- ./vectorAdd         a GPU server on the network
  rgpuctl run --server gpu1 --server gpu2/0,2 -- ./train   all devices of gpu1, then devices 0 and 2 of gpu2
  rgpuctl run --gpus 3 --exclusive --model H100 -- ./train the three least used H100 of a pool, for this program alone")]
pub struct Arguments {
    #[command(flatten)]
    target: Target,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// Runs the program and returns its exit status.
pub fn run(arguments: Arguments) -> Result<ExitCode> {
    run_program(&arguments.target, &arguments.program).map(exit)
}

/// Runs `program` (its path and its arguments) and returns how it ended. The daemons have ended when this
/// returns.
pub fn run_program(target: &Target, program: &[OsString]) -> Result<ExitStatus> {
    let (path, arguments) = program.split_first().context("no program was given")?;
    let mut session = Session::start(target)?;
    let mut command = Command::new(path);
    command.args(arguments);
    session.environment(&mut command)?;
    // Killing rgpuctl kills the program.
    end_with_parent(&mut command, Signal::SIGKILL);
    let name = path.to_string_lossy().into_owned();
    // Until here a signal ends rgpuctl, and the daemons with it. From here on signals are read from a
    // descriptor, so that none is lost between starting the program and waiting for it.
    let signals = Signals::block()?;
    let program = command.spawn().with_context(|| format!("cannot run {name}"))?;
    // Nobody hears of one that has ended before.
    session.report_ended(false);
    let status = wait(program, &signals, &mut session);
    drop(session);
    status
}

/// Waits for the program. Meanwhile forwards signals, and reports a daemon that ends by itself.
fn wait(mut program: Child, signals: &Signals, session: &mut Session) -> Result<ExitStatus> {
    let pid = Pid::from_raw(program.id().cast_signed());
    loop {
        match signals.next()? {
            Received::ChildChanged => {
                let status = program.try_wait().context("cannot wait for the program")?;
                session.report_ended(status.is_some_and(|status| !status.success()));
                if let Some(status) = status {
                    return Ok(status);
                }
            }
            // The program has not been waited for, so the process id is still its own.
            Received::Forward { signal, of_terminal } => {
                if !of_terminal || !has_it_from_terminal(pid, signal) {
                    kill(pid, signal).with_context(|| format!("cannot forward {signal}"))?;
                }
            }
        }
    }
}

/// Whether the terminal has sent the program a signal that it has sent this process. It sends signals to the
/// whole foreground group, which the program may have left. That the terminal is gone, it tells only the
/// process that leads the session: the others hear of it when that one ends.
fn has_it_from_terminal(program: Pid, signal: Signal) -> bool {
    let leads = getsid(None).is_ok_and(|session| session == Pid::this());
    getpgid(Some(program)) == Ok(getpgrp()) && !(signal == Signal::SIGHUP && leads)
}

/// Signals that come from a terminal or a supervisor, and not from a fault of the program.
const FROM_OUTSIDE: [Signal; 4] = [Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM, Signal::SIGHUP];

/// The exit status that tells how a program ended; nothing must be left to clean up. If a signal from outside
/// ended it, this process ends by the same one: a shell takes an ordinary end for that of a program that has
/// dealt with Ctrl-C, and its loop goes on.
pub fn exit(status: ExitStatus) -> ExitCode {
    match (status.code(), status.signal()) {
        (Some(code), _) => ExitCode::from(u8::try_from(code).unwrap_or(FAILED)),
        (None, Some(number)) => {
            say!("rgpuctl: the program was ended by {}", describe(status));
            if let Some(signal) = FROM_OUTSIDE.into_iter().find(|signal| *signal as i32 == number) {
                end_by(signal);
            }
            ExitCode::from(u8::try_from(128 + number).unwrap_or(FAILED))
        }
        (None, None) => ExitCode::from(FAILED),
    }
}

/// Ends this process by a signal.
pub fn end_by(signal: Signal) {
    // The program may have left a core file; this one would only confuse.
    let _ = setrlimit(Resource::RLIMIT_CORE, 0, 0);
    // SAFETY: the default action runs no code of this process.
    let _ = unsafe { nix::sys::signal::signal(signal, SigHandler::SigDfl) };
    let _ = raise(signal);
    // Delivered here if it was blocked.
    let _ = SigSet::from(signal).thread_unblock();
}

/// What a signal means for rgpuctl.
enum Received {
    /// A child ended, stopped or continued.
    ChildChanged,
    /// Forward this signal to the program, which may have it already if it is the terminal's.
    Forward { signal: Signal, of_terminal: bool },
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

    /// Waits for the next signal.
    fn next(&self) -> Result<Received> {
        loop {
            let Some(info) = self.descriptor.read_signal().context("cannot read signals")? else { continue };
            let Ok(signal) = Signal::try_from(info.ssi_signo.cast_signed()) else { continue };
            if signal == Signal::SIGCHLD {
                return Ok(Received::ChildChanged);
            }
            return Ok(Received::Forward { signal, of_terminal: info.ssi_code == libc::SI_KERNEL });
        }
    }
}
