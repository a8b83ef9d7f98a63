//! Running a command as part of a step: its output goes to a log, which is named, and quoted, when it fails.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use rgpu_tests::tree;

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
    let mut output = append(command, log)?;
    let stderr = output.try_clone().context("cannot duplicate a file descriptor")?;
    let status = command
        .current_dir(command.get_current_dir().map_or_else(tree::root, Path::to_owned))
        .env("CARGO_TERM_COLOR", "never")
        .stdin(Stdio::null())
        .stdout(output.try_clone().context("cannot duplicate a file descriptor")?)
        .stderr(stderr)
        .status()
        .with_context(|| format!("cannot run {}", command.get_program().display()))?;
    if status.success() {
        return Ok(());
    }
    output.flush().ok();
    bail!("`{}` failed ({status})\n{}\nthe whole log: {}", shown(command), tail(log), log.display())
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
