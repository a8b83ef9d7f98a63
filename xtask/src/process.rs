//! Runs a command as part of a step. Its output goes to a log; if the command fails, the error names the log and quotes its end.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use rgpu_tests::tree;

use crate::progress::Step;

/// How many of a log's last lines a failure quotes.
const QUOTED: usize = 25;

/// A fresh log `target/logs/NAME.log`.
pub fn log(name: &str) -> Result<PathBuf> {
    let folder = tree::logs();
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let path = folder.join(format!("{name}.log"));
    File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

/// Runs a command from the root of the tree, its output appended to `log`.
pub fn run(command: &mut Command, log: &Path) -> Result<()> {
    run_with(command, log, |_| true)
}

/// The same for a command that takes a while: `step` shows what it says meanwhile.
pub fn watch(command: &mut Command, log: &Path, step: &Step) -> Result<()> {
    // Cargo draws its progress bar even into a pipe then: the step reads from it how much is done.
    command.env("CARGO_TERM_PROGRESS_WHEN", "always").env("CARGO_TERM_PROGRESS_WIDTH", "100");
    run_with(command, log, |line| step.line(line))
}

/// Gives every line to `keep`, which returns whether the line belongs into the log.
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
    // `command` owns the pipe's writing ends until it is told to use others, and the pipe ends only without them.
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

/// Gives every line to `line`, without the escape sequences of a terminal. A carriage return ends a line, too.
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

/// Text without the escape sequences that colour it or erase what was there.
fn plain(text: &str) -> String {
    let mut plain = String::new();
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        if character == '\x1b' {
            // ESC, `[`, parameters, and a letter at the end.
            let _ = characters.by_ref().find(char::is_ascii_alphabetic);
        } else {
            plain.push(character);
        }
    }
    plain
}

/// Runs a command from the root of the tree, its output both shown and appended to `log`.
///
/// Gives every line of standard output to `line`, and whether the command succeeded.
pub fn show(command: &mut Command, log: &Path, mut line: impl FnMut(&str)) -> Result<bool> {
    let mut output = append(command, log)?;
    let mut child = command
        .current_dir(tree::root())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .with_context(|| format!("cannot run {}", command.get_program().display()))?;
    if let Some(stdout) = child.stdout.take() {
        for text in BufReader::new(stdout).lines() {
            let text = text.context("cannot read a command's output")?;
            println!("{text}");
            writeln!(output, "{text}").with_context(|| format!("cannot write {}", log.display()))?;
            line(&text);
        }
    }
    Ok(child.wait().context("cannot wait for a command")?.success())
}

/// What a command prints, which must succeed.
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

/// Opens a log and writes the command down in it.
fn append(command: &Command, log: &Path) -> Result<File> {
    let mut file = OpenOptions::new()
        .append(true)
        .create(true)
        .open(log)
        .with_context(|| format!("cannot write {}", log.display()))?;
    writeln!(file, "$ {}", shown(command)).with_context(|| format!("cannot write {}", log.display()))?;
    Ok(file)
}

/// A command as a person would type it.
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

/// This cargo, to be called again.
pub fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_end_at_carriage_returns_too_and_lose_their_escapes() {
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
