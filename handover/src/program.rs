//! Checks the program that will be executed next.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::VARIABLES;
use crate::places::{LISTENS, listens};

/// How long a program may take to answer.
const ANSWERS_WITHIN: Duration = Duration::from_secs(60);
/// How often it is asked whether a process has ended.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// At most this much of what a program says is read.
const MOST_SAID: u64 = 64 << 10;

/// Checks whether a program accepts the configuration that these arguments name (the first is the program
/// itself), and whether it understands what a daemon of this format has kept. For that, the program is run
/// with the same arguments, `--check-config` and `--takes-over=FORMAT`. If it fails, also because it does not
/// know these options, it must not be executed. It [learns](crate::Places) where this process listens. One
/// that has not answered within a minute is ended.
///
/// # Errors
/// The program's own error message, or why there is none.
pub fn can_take_over(program: &Path, arguments: &[OsString], format: u32) -> Result<(), String> {
    ask(program, arguments, format, &listens(), ANSWERS_WITHIN)
}

fn ask(
    program: &Path,
    arguments: &[OsString],
    format: u32,
    listens: &str,
    within: Duration,
) -> Result<(), String> {
    let failed = |e: io::Error| format!("cannot run {}: {e}", program.display());
    let listens = in_memory(listens).map_err(failed)?;
    // Not a pipe: what it has started and left behind may keep one open.
    let mut said = in_memory("").map_err(failed)?;
    let mut command = Command::new(program);
    command.args(arguments.iter().skip(1)).arg("--check-config").arg(format!("--takes-over={format}"));
    for variable in VARIABLES {
        command.env_remove(variable);
    }
    command.env(LISTENS, "stdin").stdin(listens).stdout(Stdio::null());
    command.stderr(said.try_clone().map_err(failed)?);
    let mut child = command.spawn().map_err(failed)?;
    if wait_within(&mut child, within).map_err(failed)?.success() {
        return Ok(());
    }
    let mut text = Vec::new();
    said.rewind().and_then(|()| said.take(MOST_SAID).read_to_end(&mut text)).map_err(failed)?;
    Err(format!("{} cannot take over: {}", program.display(), String::from_utf8_lossy(&text).trim()))
}

/// Waits for a process, and kills it if it takes too long.
///
/// # Errors
/// If it was killed, or cannot be waited for.
pub fn wait_within(child: &mut Child, within: Duration) -> io::Result<ExitStatus> {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if begun.elapsed() > within {
            child.kill()?;
            child.wait()?;
            let why = format!("it has not ended within {} s", within.as_secs());
            return Err(io::Error::new(io::ErrorKind::TimedOut, why));
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// A file of this text, for a program to read or to write.
fn in_memory(text: &str) -> io::Result<File> {
    let mut file = File::from(memfd_create(c"text", MFdFlags::MFD_CLOEXEC)?);
    file.write_all(text.as_bytes())?;
    file.rewind()?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Longer than any machine takes.
    const PATIENCE: Duration = Duration::from_secs(240);

    #[test]
    fn a_program_decides_whether_it_can_take_over() {
        let ask = |program: &str| can_take_over(Path::new(program), &["x".into(), "--flag".into()], 7);
        assert_eq!(ask("/bin/true"), Ok(()));
        assert_eq!(ask("/bin/false"), Err("/bin/false cannot take over: ".into()));
        assert!(ask("/nonexistent/program").unwrap_err().starts_with("cannot run /nonexistent/program"));
    }

    /// The kernel takes no variable of more than 128 KiB.
    #[test]
    fn a_program_learns_of_any_number_of_sockets() {
        let listens = "unix:/run/rgpu/a-guest-with-a-long-name.sock\n".repeat(10_000);
        let arguments = ["x", "-c", "test -n \"$RGPU_LISTENS\" && wc -c >&2; exit 1"].map(OsString::from);
        let said = ask(Path::new("/bin/sh"), &arguments, 7, &listens, PATIENCE).unwrap_err();
        assert_eq!(said, format!("/bin/sh cannot take over: {}", listens.len()));
    }

    #[test]
    fn a_program_that_does_not_answer_is_ended() {
        let arguments = ["x", "-c", "exec sleep 1000000"].map(OsString::from);
        let said = ask(Path::new("/bin/sh"), &arguments, 7, "", Duration::from_millis(50)).unwrap_err();
        assert_eq!(said, "cannot run /bin/sh: it has not ended within 0 s");
    }
}
