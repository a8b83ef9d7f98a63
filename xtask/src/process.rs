//! Runs commands as part of a step. Output goes to a log; if a command fails, the error names the log and
//! quotes its end.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::{Pid, SysconfVar, sysconf};
use rgpu_tests::tree;

use crate::progress::Step;

/// How many lines of the log a failure quotes.
const QUOTED: usize = 25;

/// Creates an empty log `target/logs/NAME.log`.
pub fn log(name: &str) -> Result<PathBuf> {
    let folder = tree::logs();
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let path = folder.join(format!("{name}.log"));
    File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

/// Runs a command from the root of the tree and appends its output to `log`.
pub fn run(command: &mut Command, log: &Path) -> Result<()> {
    run_with(command, log, |_| true)
}

/// Like [`run`], for a long command whose progress `step` shows.
pub fn watch(command: &mut Command, log: &Path, step: &Step) -> Result<()> {
    // Makes Cargo draw its progress bar even into a pipe, so that the step can read the progress from it.
    command.env("CARGO_TERM_PROGRESS_WHEN", "always").env("CARGO_TERM_PROGRESS_WIDTH", "100");
    run_with(command, log, |line| step.line(line))
}

/// Passes every line to `keep`, which returns whether to log it.
fn run_with(command: &mut Command, log: &Path, keep: impl Fn(&str) -> bool) -> Result<()> {
    let mut file = append(command, log)?;
    let (output, writer) = std::io::pipe().context("cannot create a pipe")?;
    let mut child = command
        .current_dir(command.get_current_dir().map_or_else(tree::root, Path::to_owned))
        .env("CARGO_TERM_COLOR", "never")
        .stdin(Stdio::null())
        .stdout(writer.try_clone().context("cannot duplicate a file descriptor")?)
        .stderr(writer)
        .spawn()
        .with_context(|| format!("cannot run {}", command.get_program().display()))?;
    // `command` keeps the pipe's write ends open until it is given others, and reading ends only when they
    // are closed.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    for_each_line(output, |line| {
        if keep(line) {
            writeln!(file, "{line}").with_context(|| format!("cannot write {}", log.display()))?;
        }
        Ok(())
    })?;
    let status = child.wait().context("cannot wait for a command")?;
    if status.success() {
        return Ok(());
    }
    bail!("`{}` failed ({status})\n{}\nthe whole log: {}", shown(command), tail(log), log.display())
}

/// Passes every line to `line`, without terminal escape sequences. A carriage return ends a line, too.
fn for_each_line(mut input: impl Read, mut line: impl FnMut(&str) -> Result<()>) -> Result<()> {
    let mut pending = Vec::new();
    let mut bytes = [0; 16 << 10];
    loop {
        let n = input.read(&mut bytes).context("cannot read a command's output")?;
        for byte in &bytes[..n] {
            if matches!(byte, b'\n' | b'\r') {
                let text = plain(&String::from_utf8_lossy(&pending));
                pending.clear();
                if !text.is_empty() {
                    line(&text)?;
                }
            } else {
                pending.push(*byte);
            }
        }
        if n == 0 {
            let text = plain(&String::from_utf8_lossy(&pending));
            return if text.is_empty() { Ok(()) } else { line(&text) };
        }
    }
}

/// Removes the escape sequences that color or erase text.
fn plain(text: &str) -> String {
    let mut plain = String::new();
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        if character == '\x1b' {
            // ESC, `[`, parameters, and a final letter.
            let _ = characters.by_ref().find(char::is_ascii_alphabetic);
        } else {
            plain.push(character);
        }
    }
    plain
}

/// A command that has ended.
pub struct Ended {
    pub status: ExitStatus,
    /// Processor time that it took with all its descendants for which somebody waited.
    pub processors: Duration,
}

/// Runs a command from the root of the tree, or from the folder that it has, and appends its output to `log`.
/// Passes every line of standard output to `line`.
pub fn lines(command: &mut Command, log: &Path, mut line: impl FnMut(&str)) -> Result<Ended> {
    let mut output = append(command, log)?;
    let mut child = command
        .current_dir(command.get_current_dir().map_or_else(tree::root, Path::to_owned))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .with_context(|| format!("cannot run {}", command.get_program().display()))?;
    if let Some(stdout) = child.stdout.take() {
        for text in BufReader::new(stdout).lines() {
            let text = text.context("cannot read a command's output")?;
            writeln!(output, "{text}").with_context(|| format!("cannot write {}", log.display()))?;
            line(&text);
        }
    }
    wait(child)
}

/// Waits until a process has ended.
pub fn wait(mut child: Child) -> Result<Ended> {
    let process = Pid::from_raw(child.id().cast_signed());
    // It stays until somebody has waited for it without this flag.
    waitid(Id::Pid(process), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT)
        .context("cannot wait for a command")?;
    let processors = processor_time(&format!("/proc/{process}/stat"));
    let status = child.wait().context("cannot wait for a command")?;
    Ok(Ended { status, processors })
}

/// The processor time in a file as `proc_pid_stat(5)` describes it, with that of the children that were
/// waited for; zero if it cannot be read.
fn processor_time(stat: &str) -> Duration {
    let text = std::fs::read_to_string(stat).unwrap_or_default();
    // The second field is a name in parentheses, which may contain anything. Times are fields 14 to 17.
    let fields = text.rsplit_once(") ").map_or("", |(_, rest)| rest).split(' ').skip(11).take(4);
    let ticks: u64 = fields.filter_map(|field| field.parse::<u64>().ok()).sum();
    let in_a_second = sysconf(SysconfVar::CLK_TCK).ok().flatten().unwrap_or(100);
    Duration::from_secs_f64(ticks as f64 / in_a_second as f64)
}

/// The output of a command, which must succeed.
pub fn output(command: &mut Command) -> Result<String> {
    let output =
        command.output().with_context(|| format!("cannot run {}", command.get_program().display()))?;
    if !output.status.success() {
        bail!(
            "`{}` failed ({}): {}",
            shown(command),
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Opens a log and writes the command line to it.
fn append(command: &Command, log: &Path) -> Result<File> {
    let mut file = OpenOptions::new()
        .append(true)
        .create(true)
        .open(log)
        .with_context(|| format!("cannot write {}", log.display()))?;
    writeln!(file, "$ {}", shown(command)).with_context(|| format!("cannot write {}", log.display()))?;
    Ok(file)
}

/// The command line as typed in a shell.
fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
}

fn tail(log: &Path) -> String {
    let text =
        std::fs::read(log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let quoted = &lines[lines.len().saturating_sub(QUOTED)..];
    quoted.iter().map(|line| format!("    {line}\n")).collect()
}

/// The cargo that runs xtask, with the environment in which xtask was started.
///
/// Cargo describes xtask's package in environment variables. Some build scripts, such as ring's, read
/// variables with these names. They would run again whenever cargo is started without xtask, and everything
/// that depends on them would be compiled again.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in std::env::vars_os() {
        let of_package = ["CARGO_PKG_", "CARGO_MANIFEST_"];
        if of_package.iter().any(|begin| name.to_string_lossy().starts_with(begin)) {
            command.env_remove(name);
        }
    }
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_time_of_a_command_has_that_of_its_children() {
        let log = tempfile::NamedTempFile::new().unwrap();
        let mut busy = Command::new("sh");
        busy.args(["-c", "sh -c 'i=0; while [ $i -lt 300000 ]; do i=$((i + 1)); done'; echo end"]);
        let mut lines = Vec::new();
        let ended = super::lines(&mut busy, log.path(), |line| lines.push(line.to_owned())).unwrap();
        assert!(ended.status.success() && ended.processors > Duration::ZERO, "{:?}", ended.processors);
        assert_eq!(lines, ["end"]);
        let ended = super::lines(&mut Command::new("false"), log.path(), |_| ()).unwrap();
        assert!(!ended.status.success());
    }

    #[test]
    fn carriage_returns_end_lines_and_escape_sequences_are_removed() {
        let mut lines = Vec::new();
        let input = b"one\r\x1b[Ktwo\n\n\x1b[1mthree\x1b[0m";
        for_each_line(&input[..], |line| {
            lines.push(line.to_owned());
            Ok(())
        })
        .unwrap();
        assert_eq!(lines, ["one", "two", "three"]);
    }
}
