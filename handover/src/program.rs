//! The program that is to be executed next.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use crate::VARIABLES;

/// Asks a program whether it accepts the configuration that these arguments name (the first is the program itself), and whether it goes on with what a daemon of this
/// format has written down: it is run with the same arguments, `--check-config` and `--takes-over=FORMAT`. One that cannot, or does not know the question, must not be executed.
///
/// # Errors
/// Why it cannot, in the program's own words.
pub fn can_take_over(program: &Path, arguments: &[OsString], format: u32) -> Result<(), String> {
    let mut command = Command::new(program);
    command.args(arguments.iter().skip(1)).arg("--check-config").arg(format!("--takes-over={format}"));
    for variable in VARIABLES {
        command.env_remove(variable);
    }
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
    fn a_program_says_itself_whether_it_can() {
        let ask = |program: &str| can_take_over(Path::new(program), &["x".into(), "--flag".into()], 7);
        assert_eq!(ask("/bin/true"), Ok(()));
        assert_eq!(ask("/bin/false"), Err("/bin/false cannot take over: ".into()));
        assert!(ask("/nonexistent/program").unwrap_err().starts_with("cannot run /nonexistent/program"));
    }
}
