//! Checks the program that will be executed next.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

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
    let mut command = Command::new(program);
    command.args(arguments.iter().skip(1)).arg("--check-config").arg(format!("--takes-over={format}"));
    for variable in VARIABLES {
        command.env_remove(variable);
    }
    command.env(LISTENS, listens());
    let output = command.output().map_err(|e| format!("cannot run {}: {e}", program.display()))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("{} cannot take over: {}", program.display(), said.trim()))
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
}
