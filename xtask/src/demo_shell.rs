//! A shell in the demonstration's guest, at this terminal.
//!
//! The guest has a console of its own for it (`hvc0`), whose other end QEMU keeps as a socket. The terminal is raw meanwhile: line
//! editing, Ctrl-C and job control are the guest's.

use std::io::{IsTerminal, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use rgpu_tests::guest;
use rgpu_tests::machine::{Builder, Machine};

/// Ends the input of a terminal in its usual mode, at the beginning of a line.
const CTRL_D: u8 = 4;
/// Nobody stays longer.
const LONGEST: Duration = Duration::from_secs(30 * 24 * 3600);

/// Gives the guest a console whose other end is a socket at `path`.
pub fn console(builder: Builder, path: &Path) -> Builder {
    builder
        .qemu_arg("-chardev")
        .qemu_arg(format!("socket,id=shell,server=on,wait=off,path={}", path.display()))
        .qemu_arg("-device")
        .qemu_arg("virtconsole,chardev=shell")
}

/// Joins this terminal with a shell on the console at `path`, until the shell ends.
pub fn run(machine: &Machine, path: &Path) -> Result<()> {
    let socket =
        UnixStream::connect(path).with_context(|| format!("cannot connect to {}", path.display()))?;
    println!(
        "You are root in the guest; the programs are in its path ({}). `exit` or Ctrl-D ends it.",
        guest::PROGRAMS
    );
    let _raw = RawTerminal::new();
    let mut output = socket.try_clone().context("cannot duplicate a socket")?;
    std::thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(n @ 1..) = output.read(&mut bytes) {
            let mut stdout = std::io::stdout().lock();
            if stdout.write_all(&bytes[..n]).and_then(|()| stdout.flush()).is_err() {
                return;
            }
        }
    });
    // The line's shell leads a process group and setsid's process does not, so that setsid need not fork, and its end is the shell's.
    // The window's size lasts as long as somebody has the console open.
    let size =
        window().map_or_else(String::new, |(rows, columns)| format!("stty rows {rows} cols {columns};"));
    let shell = machine.spawn(&format!(
        "export HOME=/root TERM={} PS1='guest:\\w# '; cd; setsid -c sh -c '{size} exec sh -i' </dev/hvc0 >/dev/hvc0 2>&1; true",
        word(&std::env::var("TERM").unwrap_or_default()),
    ))?;
    // It ends with this process: a read from the terminal cannot be called off.
    std::thread::spawn(move || copy_input(socket));
    let ended = shell.wait(LONGEST);
    // What the shell has written last is still on its way.
    std::thread::sleep(Duration::from_millis(200));
    ended.map(drop)
}

fn copy_input(mut socket: UnixStream) {
    let mut bytes = [0; 1024];
    // A shell that has just begun throws away what was typed before.
    std::thread::sleep(Duration::from_millis(500));
    loop {
        let n = std::io::stdin().read(&mut bytes).unwrap_or(0);
        let typed = if n == 0 { &[CTRL_D][..] } else { &bytes[..n] };
        if socket.write_all(typed).is_err() || n == 0 {
            return;
        }
    }
}

/// What is safe to put into a shell's command line.
fn word(text: &str) -> String {
    let word: String = text.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').collect();
    if word.is_empty() { "dumb".to_owned() } else { word }
}

/// Rows and columns of this terminal.
fn window() -> Option<(u32, u32)> {
    let text = stty(&["size"])?;
    let (rows, columns) = text.split_once(' ')?;
    Some((rows.parse().ok()?, columns.parse().ok()?))
}

/// The terminal in raw mode, until this is dropped; nothing where there is no terminal.
struct RawTerminal(Option<String>);

impl RawTerminal {
    fn new() -> RawTerminal {
        let before = stty(&["-g"]);
        if before.is_some() {
            stty(&["raw", "-echo"]);
        }
        RawTerminal(before)
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            stty(&[before]);
        }
        println!();
    }
}

fn stty(arguments: &[&str]) -> Option<String> {
    if !std::io::stdin().is_terminal() {
        return None;
    }
    let output = Command::new("stty").args(arguments).stdin(Stdio::inherit()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_of_the_environment_is_run_by_the_guests_shell() {
        assert_eq!(word("xterm-256color"), "xterm-256color");
        assert_eq!(word("$(reboot)"), "reboot");
        assert_eq!(word("';'"), "dumb");
    }
}
