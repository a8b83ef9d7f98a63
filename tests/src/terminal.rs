//! A terminal of 80 columns and 24 lines that runs a program, so that a test can read its screen and press
//! keys.

use std::fs::File;
use std::io::Read;
use std::num::NonZero;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use nix::pty::{Winsize, openpty};
use nix::sys::prctl;
use nix::sys::signal::Signal;

/// Columns of the terminal.
pub const COLUMNS: u16 = 80;
/// Lines of the terminal.
pub const LINES: u16 = 24;

/// A program in a terminal. Dropping it kills the program.
pub struct Terminal {
    child: Child,
    terminal: OwnedFd,
    screen: Arc<Mutex<vt100::Parser>>,
}

impl Terminal {
    /// Starts a program, which also ends when the thread that started it does.
    pub fn start(mut command: Command) -> Result<Terminal> {
        let (rows, columns) =
            (NonZero::new(LINES).context("lines")?, NonZero::new(COLUMNS).context("columns")?);
        let size = Winsize { ws_row: LINES, ws_col: COLUMNS, ws_xpixel: 0, ws_ypixel: 0 };
        let terminal = openpty(Some(&size), None)?;
        let program = terminal.slave;
        command.stdin(program.try_clone()?).stdout(program.try_clone()?).stderr(program.try_clone()?);
        command.env("TERM", "xterm-256color").env_remove("COLUMNS").env_remove("LINES");
        let own = || {
            nix::unistd::setsid()?;
            // SAFETY: descriptor 0 is the terminal by now; the call makes it this session's.
            nix::errno::Errno::result(unsafe { libc::ioctl(0, libc::TIOCSCTTY, 0) })?;
            Ok(prctl::set_pdeathsig(Signal::SIGKILL)?)
        };
        // SAFETY: the closure only makes the system calls setsid, ioctl and prctl, which are
        // async-signal-safe.
        unsafe { command.pre_exec(own) };
        let child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
        drop(program);
        // The command has kept its own copies.
        drop(command);
        let screen = Arc::new(Mutex::new(vt100::Parser::new(rows, columns, 0)));
        let (shown, mut output) = (Arc::clone(&screen), File::from(terminal.master.try_clone()?));
        std::thread::spawn(move || {
            let mut part = [0; 4096];
            // At the program's end, reading is an error.
            while let Ok(count @ 1..) = output.read(&mut part) {
                if let Ok(mut screen) = shown.lock() {
                    screen.process(&part[..count]);
                }
            }
        });
        Ok(Terminal { child, terminal: terminal.master, screen })
    }

    /// What the terminal shows now.
    pub fn screen(&self) -> vt100::Screen {
        self.screen.lock().unwrap_or_else(PoisonError::into_inner).screen().clone()
    }

    /// The text of its lines.
    pub fn lines(&self) -> Vec<String> {
        self.screen().rows(0, COLUMNS).map(|line| line.trim_end().to_owned()).collect()
    }

    /// Types keys.
    pub fn press(&self, keys: &str) -> Result<()> {
        ensure!(nix::unistd::write(&self.terminal, keys.as_bytes())? == keys.len(), "the terminal is full");
        Ok(())
    }

    /// How the program has ended, if it has.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().context("cannot wait for a program")
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
