//! Checks the program that will be executed next.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Seek, Write};
use std::path::Path;
use std::process::Command;

use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::VARIABLES;
use crate::places::{LISTENS, listens};

/// Checks whether a program accepts the configuration that these arguments name (the first is the program
/// itself), and whether it understands what a daemon of this format has kept. For that, the program is run
/// with the same arguments, `--check-config` and `--takes-over=FORMAT`. If it fails, also because it does not
/// know these options, it must not be executed. It [learns](crate::Places) where this process listens.
///
/// # Errors
/// The program's own error message.
pub fn can_take_over(program: &Path, arguments: &[OsString], format: u32) -> Result<(), String> {
    ask(program, arguments, format, &listens())
}

fn ask(program: &Path, arguments: &[OsString], format: u32, listens: &str) -> Result<(), String> {
    let listens =
        input(listens).map_err(|e| format!("cannot write what {} reads: {e}", program.display()))?;
    let mut command = Command::new(program);
    command.args(arguments.iter().skip(1)).arg("--check-config").arg(format!("--takes-over={format}"));
    for variable in VARIABLES {
        command.env_remove(variable);
    }
    command.env(LISTENS, "stdin").stdin(listens);
    let output = command.output().map_err(|e| format!("cannot run {}: {e}", program.display()))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("{} cannot take over: {}", program.display(), said.trim()))
}

/// A file of this text, for a program's standard input.
fn input(text: &str) -> io::Result<File> {
    let mut file = File::from(memfd_create(c"listens", MFdFlags::MFD_CLOEXEC)?);
    file.write_all(text.as_bytes())?;
    file.rewind()?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let said = ask(Path::new("/bin/sh"), &arguments, 7, &listens).unwrap_err();
        assert_eq!(said, format!("/bin/sh cannot take over: {}", listens.len()));
    }
}
