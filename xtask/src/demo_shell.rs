//! A shell in the demonstration's guest, connected to this terminal.
//!
//! It uses a separate console of the guest (`hvc0`), which QEMU connects to a socket. The terminal is in raw
//! mode, so the guest handles line editing, Ctrl-C and job control.

use std::io::{IsTerminal, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use rgpu_tests::guest;
use rgpu_tests::machine::{Builder, Machine};

/// Ends the input of a terminal in its default mode, at the start of a line.
const CTRL_D: u8 = 4;
/// The longest time that the shell can stay open.
const LONGEST: Duration = Duration::from_secs(30 * 24 * 3600);

/// Adds a console to the guest that is connected to a socket at `path`.
pub fn console(builder: Builder, path: &Path) -> Builder {
    builder
        .qemu_arg("-chardev")
        .qemu_arg(format!("socket,id=shell,server=on,wait=off,path={}", path.display()))
        .qemu_arg("-device")
        .qemu_arg("virtconsole,chardev=shell")
}

/// Connects this terminal to a shell on the console at `path` until the shell exits.
pub fn run(machine: &Machine, path: &Path) -> Result<()> {
    let socket =
        UnixStream::connect(path).with_context(|| format!("cannot connect to {}", path.display()))?;
    println!(
        "You are root in the guest; the programs are on its PATH ({}). `exit` or Ctrl-D ends the demonstration.",
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
    // The shell leads its process group and setsid's process does not. Then setsid does not fork, and it
    // exits when the shell does. The window size lasts as long as the console is open.
    let size =
        window().map_or_else(String::new, |(rows, columns)| format!("stty rows {rows} cols {columns};"));
    let shell = machine.spawn(&format!(
        "export HOME=/root TERM={} PS1='guest:\\w# '; cd; setsid -c sh -c '{size} exec sh -i' </dev/hvc0 >/dev/hvc0 2>&1; true",
        word(&std::env::var("TERM").unwrap_or_default()),
    ))?;
    // This thread ends with the process, because a read from the terminal cannot be cancelled.
    std::thread::spawn(move || copy_input(socket));
    let ended = shell.wait(LONGEST);
    // Wait for the shell's last output.
    std::thread::sleep(Duration::from_millis(200));
    ended.map(drop)
}

fn copy_input(mut socket: UnixStream) {
    let mut bytes = [0; 1024];
    // A shell discards what was typed before it started.
    std::thread::sleep(Duration::from_millis(500));
    loop {
        let n = std::io::stdin().read(&mut bytes).unwrap_or(0);
        let typed = if n == 0 { &[CTRL_D][..] } else { &bytes[..n] };
        if socket.write_all(typed).is_err() || n == 0 {
            return;
        }
    }
}

/// The characters that are safe in a shell's command line.
fn word(text: &str) -> String {
    let word: String = text.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').collect();
    if word.is_empty() { "dumb".to_owned() } else { word }
}

/// This terminal's number of rows and columns.
fn window() -> Option<(u32, u32)> {
    let text = stty(&["size"])?;
    let (rows, columns) = text.split_once(' ')?;
    Some((rows.parse().ok()?, columns.parse().ok()?))
}

/// Puts the terminal into raw mode until dropped. Does nothing without a terminal.
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
    fn the_guests_shell_does_not_run_text_from_the_environment() {
        assert_eq!(word("xterm-256color"), "xterm-256color");
        assert_eq!(word("$(reboot)"), "reboot");
        assert_eq!(word("';'"), "dumb");
    }
}
