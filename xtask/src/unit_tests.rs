//! Runs the programs that contain the unit tests, several at once: many tests wait most of the time.

use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::process;
use crate::progress::{self, Step};

/// A program with tests.
#[derive(Debug, PartialEq)]
pub struct Executable {
    path: PathBuf,
    /// The folder of its package, in which Cargo would run it.
    folder: PathBuf,
}

/// Compiles the tests of all packages, without those of the other parts.
pub fn build(log: &Path) -> Result<Vec<Executable>> {
    let selections: [&[&str]; 3] = [
        &["--workspace", "--exclude", "rgpu-tests"],
        // CUDA 12's runtime is built from the same source with different structures and names.
        &["-p", "rgpu-cudart", "--features", "v12"],
        // The tests' own package has unit tests, too; its integration tests are the other parts.
        &["-p", "rgpu-tests", "--lib", "--bins"],
    ];
    let step = Step::spinner("compiling the unit tests");
    let mut found = Vec::new();
    for selection in selections {
        let mut command = process::cargo();
        process::watch(command.args(["test", "--no-run"]).args(selection), log, &step)?;
        // Everything is compiled now; this reports where the programs are.
        let mut command = process::cargo();
        command.args(["test", "--no-run", "--message-format", "json"]).args(selection);
        found.extend(executables(&process::output(&mut command)?));
    }
    step.done(&format!("{} programs", found.len()));
    Ok(found)
}

/// The tests in Cargo's messages, one JSON object per line.
fn executables(messages: &str) -> Vec<Executable> {
    let path = |value: &Value| value.as_str().map(PathBuf::from);
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|message| message["profile"]["test"] == true)
        .filter_map(|message| {
            let folder = path(&message["manifest_path"])?.parent()?.to_owned();
            Some(Executable { path: path(&message["executable"])?, folder })
        })
        .collect()
}

/// Runs all programs, two at a time for each processor, and shows the output of each when it has ended.
/// Passes every line to `line`. Returns whether all succeeded.
pub fn run(executables: &[Executable], log: &Path, line: impl FnMut(&str) + Send) -> Result<bool> {
    let left = Mutex::new(executables.iter());
    let shown = Mutex::new((line, true));
    let lock = |error: PoisonError<_>| error.into_inner();
    let work = || -> Result<()> {
        loop {
            let Some(executable) = left.lock().unwrap_or_else(lock).next() else { return Ok(()) };
            let (text, succeeded) = executable.run()?;
            let mut shown = shown.lock().unwrap_or_else(PoisonError::into_inner);
            progress::print(text.trim_end());
            let mut file = std::fs::OpenOptions::new().append(true).open(log)?;
            file.write_all(text.as_bytes()).with_context(|| format!("cannot write {}", log.display()))?;
            text.lines().for_each(|text| shown.0(text));
            shown.1 &= succeeded;
        }
    };
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..2 * processors).map(|_| scope.spawn(work)).collect();
        workers
            .into_iter()
            .try_for_each(|worker| worker.join().unwrap_or_else(|e| std::panic::resume_unwind(e)))
    })?;
    Ok(shown.into_inner().unwrap_or_else(PoisonError::into_inner).1)
}

impl Executable {
    /// Runs it. Returns its output, and whether its tests pass.
    fn run(&self) -> Result<(String, bool)> {
        let context = || format!("cannot run {}", self.path.display());
        // The output goes to a file. A pipe would only end when all processes that the tests have started are
        // gone.
        let mut output = tempfile::tempfile().with_context(context)?;
        let mut command = Command::new(&self.path);
        command.current_dir(&self.folder).env("CARGO_MANIFEST_DIR", &self.folder).stdin(Stdio::null());
        command
            .stdout(output.try_clone().with_context(context)?)
            .stderr(output.try_clone().with_context(context)?);
        let status = command.status().with_context(context)?;
        let mut bytes = Vec::new();
        output.rewind().and_then(|()| output.read_to_end(&mut bytes)).with_context(context)?;
        let mut text = format!("     Running {}\n", self.path.display());
        text.push_str(&String::from_utf8_lossy(&bytes));
        if !status.success() {
            text.push_str(&format!("error: {} failed: {status}\n", self.path.display()));
        }
        Ok((text, status.success()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_programs_are_found_in_cargo_s_messages() {
        let messages = concat!(
            "{\"manifest_path\":\"/w/a/Cargo.toml\",\"profile\":{\"test\":true},\"executable\":\"/t/a-1\"}\n",
            "{\"manifest_path\":\"/w/a/Cargo.toml\",\"profile\":{\"test\":true},\"executable\":null}\n",
            "{\"manifest_path\":\"/w/b/Cargo.toml\",\"profile\":{\"test\":false},\"executable\":\"/t/b\"}\n",
            "{\"reason\":\"build-finished\"}\n"
        );
        assert_eq!(executables(messages), [Executable { path: "/t/a-1".into(), folder: "/w/a".into() }]);
    }

    #[test]
    fn all_programs_run_and_one_that_fails_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        std::fs::write(&log, "").unwrap();
        let program = |name: &str| Executable { path: name.into(), folder: folder.path().to_owned() };
        let mut lines = Vec::new();
        let all = [program("/bin/pwd"), program("/bin/pwd")];
        assert!(run(&all, &log, |line| lines.push(line.to_owned())).unwrap());
        let expected = folder.path().canonicalize().unwrap().display().to_string();
        assert_eq!(lines.iter().filter(|line| **line == expected).count(), 2);
        assert!(
            !run(&[program("/bin/true"), program("/bin/false"), program("/bin/true")], &log, |_| ()).unwrap()
        );
        assert!(std::fs::read_to_string(&log).unwrap().contains("/bin/false failed"));
    }
}
