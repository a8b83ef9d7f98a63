//! `rgpuctl top`: shows the current sessions, programs, GPUs and links.
//!
//! ```text
//!   thread: status sockets ──▶ Sample ──▶ App (rows, rates, order) ──▶ draw ──▶ terminal
//!                                          ▲ keys
//! ```
//!
//! - [`sample`]: the answers of the status sockets at one time;
//! - [`views`]: columns, rows and keys, without I/O;
//! - [`draw`]: draws the screen.

mod draw;
mod sample;
mod views;

use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use ratatui::crossterm::event::{self, Event, KeyEventKind};

use self::sample::Sample;
use self::views::{App, Order};
use crate::run::end_by;
use crate::status::Sockets;

/// Maximum delay between two updates of the screen in milliseconds.
const LOOK_EVERY: u8 = 50;

/// Show sessions, programs, GPUs and links of this machine live.
///
/// Reads the status sockets of rgpu-server and vhost-rgpu. Keys: 1 to 4 or Tab choose what is shown, ← and →
/// the column to sort by, r the direction, ↑ ↓ PgUp PgDn Home End scroll, p pauses, q quits.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    sockets: Sockets,
    /// Seconds between two readings of the daemons' status, 0.2 to 3600
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0, value_parser = parse_interval)]
    interval: f64,
}

fn parse_interval(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("{text:?} is not a number of seconds"))?;
    if (0.2..=3600.0).contains(&seconds) { Ok(seconds) } else { Err("must be from 0.2 to 3600".into()) }
}

/// Shows the daemons until the user quits.
pub fn top(arguments: &Arguments) -> Result<ExitCode> {
    ensure!(
        std::io::stdin().is_terminal() && std::io::stdout().is_terminal(),
        "top needs a terminal; a program can use rgpuctl status --json"
    );
    let sockets = arguments.sockets.paths();
    let (first, others) = (Sample::read(&sockets), channel());
    // Otherwise the error would be the only thing on an empty screen.
    ensure!(first.is_any(), "{}", first.failures().join("\n"));
    let interval = Duration::from_secs_f64(arguments.interval);
    // Before the thread starts, which inherits that: they are read where the terminal can be restored. On
    // SIGHUP there is none any more.
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT]);
    signals.thread_block().context("cannot block signals")?;
    let signals = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
        .context("cannot create a signal descriptor")?;
    let (samples, next) = look(sockets, interval, others)?;
    let mut app = App::new(first);
    let mut terminal = ratatui::try_init().context("cannot prepare the terminal")?;
    let result = run(&mut terminal, &mut app, &samples, &next, &signals);
    // Fails if the terminal is gone. Dropping it would then report that there, which fails, too.
    let _ = ratatui::try_restore();
    if terminal.show_cursor().is_err() {
        std::mem::forget(terminal);
    }
    if let Some(signal) = result? {
        end_by(signal);
    }
    Ok(ExitCode::SUCCESS)
}

/// Starts the thread that reads the status sockets, so that keys work even while a daemon does not answer.
fn look(
    sockets: Vec<PathBuf>,
    interval: Duration,
    (to_screen, samples): (Sender<Sample>, Receiver<Sample>),
) -> Result<(Receiver<Sample>, Sender<()>)> {
    let (next, asked) = channel::<()>();
    let read = move || {
        loop {
            // Returns at once if the user asks for new values.
            if asked.recv_timeout(interval) == Err(std::sync::mpsc::RecvTimeoutError::Disconnected) {
                return;
            }
            if to_screen.send(Sample::read(&sockets)).is_err() {
                return;
            }
        }
    };
    std::thread::Builder::new().name("status".into()).spawn(read).context("cannot start a thread")?;
    Ok((samples, next))
}

/// Shows the daemons until the user quits, or the terminal is gone. Returns the signal that ended it, if one
/// did.
fn run(
    terminal: &mut ratatui::DefaultTerminal,
    app: &mut App,
    samples: &Receiver<Sample>,
    next: &Sender<()>,
    signals: &SignalFd,
) -> Result<Option<Signal>> {
    let mut stale = true;
    loop {
        if let Some(signal) = signals.read_signal().context("cannot read signals")? {
            return Ok(Signal::try_from(signal.ssi_signo.cast_signed()).ok());
        }
        while let Ok(sample) = samples.try_recv() {
            app.take(sample);
            stale = true;
        }
        if stale {
            terminal.draw(|frame| draw::draw(frame, app)).context("cannot write to the terminal")?;
            stale = false;
        }
        // Whoever started this may ignore SIGHUP, and crossterm would look at a lost terminal for ever.
        let stdin = std::io::stdin();
        let mut ready =
            [PollFd::new(stdin.as_fd(), PollFlags::POLLIN), PollFd::new(signals.as_fd(), PollFlags::POLLIN)];
        match poll(&mut ready, LOOK_EVERY) {
            Ok(_) | Err(nix::Error::EINTR) => {}
            Err(e) => return Err(e).context("cannot wait for the terminal"),
        }
        let gone = PollFlags::POLLHUP | PollFlags::POLLERR;
        if ready[0].revents().is_some_and(|found| found.intersects(gone)) {
            return Ok(None);
        }
        if !event::poll(Duration::ZERO).context("cannot read from the terminal")? {
            continue;
        }
        match event::read().context("cannot read from the terminal")? {
            Event::Key(key) if key.kind != KeyEventKind::Release => match app.key(key) {
                Order::Quit => return Ok(None),
                // The thread may be reading already.
                Order::Look => drop(next.send(())),
                Order::Nothing => {}
            },
            Event::Resize(..) => {}
            _ => continue,
        }
        stale = true;
    }
}
