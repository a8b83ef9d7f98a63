//! Compiles the programs that contain tests, and runs those of the unit tests several at once: many tests
//! wait most of the time.
//!
//! Each command to Cargo selects the whole workspace. With fewer packages, Cargo would choose other features
//! for some dependencies, and compile these and everything that needs them once more.

use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use rgpu_tests::tree;
use serde_json::Value;

use crate::process::Ended;
use crate::progress::{self, Step};
use crate::{dependencies, process};

/// Programs that run longest. They begin first, so that no processor is idle at the end.
const LONGEST: &[&str] = &["swap", "rgpu_server", "verbs", "rgpu_host_bridge", "software_gpu"];

/// A program with tests.
#[derive(Clone, Debug, PartialEq)]
pub struct Executable {
    path: PathBuf,
    /// The folder of its package, in which Cargo would run it.
    folder: PathBuf,
    /// The name of the file in the package's folder `tests` from which it was made, if any.
    integration: Option<String>,
}

/// The programs of one run of the tests, which are compiled at once when the first is needed: one by one, the
/// processors would be idle half of the time, and Cargo would look at the whole workspace for each.
pub struct Executables {
    unit: bool,
    /// The files in `tests/tests/`, without `.rs`.
    parts: Vec<String>,
    compiled: Mutex<Option<Vec<Executable>>>,
}

impl Executables {
    /// Those of these parts, and of the unit tests if `unit`.
    pub fn of(unit: bool, parts: Vec<String>) -> Self {
        Self { unit, parts, compiled: Mutex::new(None) }
    }

    /// Whether the unit tests are among them.
    pub fn have_unit(&self) -> bool {
        self.unit
    }

    /// The tests of all packages, without those of the parts.
    pub fn unit(&self, log: &Path) -> Result<Vec<Executable>> {
        let mut all: Vec<_> = self.all(log)?.into_iter().filter(|one| !one.is_part()).collect();
        all.sort_by_key(|one| LONGEST.iter().position(|name| one.is_named(name)).unwrap_or(LONGEST.len()));
        Ok(all)
    }

    /// The command that runs the tests of a file in `tests/tests/`.
    pub fn part(&self, name: &str, log: &Path) -> Result<Command> {
        let all = self.all(log)?;
        // Other packages may have tests of the same name.
        let mut parts = all.iter().filter(|one| one.is_part());
        let one = parts.find(|one| one.integration.as_deref() == Some(name));
        Ok(one.with_context(|| format!("Cargo made no test {name}"))?.command())
    }

    fn all(&self, log: &Path) -> Result<Vec<Executable>> {
        let mut compiled = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(all) = &*compiled {
            return Ok(all.clone());
        }
        let step = Step::spinner("compiling the tests");
        let all = self.compile(log, &step)?;
        step.done(&format!("{} programs", all.len()));
        Ok(compiled.insert(all).clone())
    }

    fn compile(&self, log: &Path, step: &Step) -> Result<Vec<Executable>> {
        let named = |name: &String| ["--test".to_owned(), name.clone()];
        let mut tests: Vec<String> = self.parts.iter().flat_map(named).collect();
        if !self.unit {
            return compile(&[], &tests, log, step);
        }
        let all = integration_tests(&dependencies::metadata()?);
        let in_packages = |wanted: &dyn Fn(&Path) -> bool| -> Vec<String> {
            let names = all.iter().filter(|(folder, _)| wanted(folder));
            names.flat_map(|(_, name)| named(name)).collect()
        };
        let parts = tree::root().join("tests");
        tests.extend(in_packages(&|folder| folder != parts));
        let mut found = compile(&["--lib", "--bins"], &tests, log, step)?;
        // CUDA 12's runtime is built from the same source with different structures and names.
        let cudart = tree::root().join("guest-cudart/cudart");
        let mut v12 = compile(
            &["--features", "rgpu-cudart/v12", "--lib"],
            &in_packages(&|folder| folder == cudart),
            log,
            step,
        )?;
        v12.retain(|one| one.folder == cudart);
        found.extend(v12);
        Ok(found)
    }
}

/// Compiles tests of the workspace. Returns their programs.
fn compile(selection: &[&str], tests: &[String], log: &Path, step: &Step) -> Result<Vec<Executable>> {
    let command = || {
        let mut command = process::cargo();
        command.args(["test", "--no-run", "--workspace"]).args(selection).args(tests);
        command
    };
    process::watch(&mut command(), log, step)?;
    // Everything is compiled now; this reports where the programs are.
    Ok(executables(&process::output(command().args(["--message-format", "json"]))?))
}

/// The files with tests beside the packages' sources: the package's folder, and the test's name.
fn integration_tests(metadata: &Value) -> Vec<(PathBuf, String)> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let own = list(&metadata["packages"]).into_iter().filter(|package| package["source"].is_null());
    own.flat_map(|package| {
        let folder =
            Path::new(package["manifest_path"].as_str().unwrap_or_default()).parent().map(Path::to_owned);
        let targets = list(&package["targets"]).into_iter().filter(|target| target["kind"][0] == "test");
        targets
            .filter_map(|target| Some((folder.clone()?, target["name"].as_str()?.to_owned())))
            .collect::<Vec<_>>()
    })
    .collect()
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
            let target = &message["target"];
            let integration =
                (target["kind"][0] == "test").then(|| target["name"].as_str().map(str::to_owned));
            Some(Executable {
                path: path(&message["executable"])?,
                folder,
                integration: integration.flatten(),
            })
        })
        .collect()
}

/// Runs all programs, two at a time for each processor, and shows the output of each when it has ended.
/// Passes every line to `line`. Returns whether all succeeded, and their processor time.
pub fn run(
    executables: &[Executable],
    log: &Path,
    line: impl FnMut(&str) + Send,
) -> Result<(bool, Duration)> {
    let left = Mutex::new(executables.iter());
    let shown = Mutex::new((line, (true, Duration::ZERO)));
    let lock = |error: PoisonError<_>| error.into_inner();
    let work = || -> Result<()> {
        loop {
            let Some(executable) = left.lock().unwrap_or_else(lock).next() else { return Ok(()) };
            let (text, ended) = executable.run()?;
            let mut shown = shown.lock().unwrap_or_else(PoisonError::into_inner);
            progress::print(text.trim_end());
            let mut file = std::fs::OpenOptions::new().append(true).open(log)?;
            file.write_all(text.as_bytes()).with_context(|| format!("cannot write {}", log.display()))?;
            text.lines().for_each(|text| shown.0(text));
            let (succeeded, processors) = &mut shown.1;
            *succeeded &= ended.status.success();
            *processors += ended.processors;
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
    /// Whether it was made from a file in `tests/tests/`.
    fn is_part(&self) -> bool {
        self.integration.is_some() && self.folder == tree::root().join("tests")
    }

    /// Whether it was made from a crate or a file of this name. Cargo adds a dash and a hash.
    fn is_named(&self, name: &str) -> bool {
        let stem = self.path.file_stem().unwrap_or_default().to_string_lossy();
        stem.rsplit_once('-').is_some_and(|(own, _)| own == name)
    }

    /// Runs its tests as Cargo would.
    fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        command.current_dir(&self.folder).env("CARGO_MANIFEST_DIR", &self.folder);
        command
    }

    /// Runs it. Returns its output, and how it ended.
    fn run(&self) -> Result<(String, Ended)> {
        let context = || format!("cannot run {}", self.path.display());
        // The output goes to a file. A pipe would only end when all processes that the tests have started are
        // gone.
        let mut output = tempfile::tempfile().with_context(context)?;
        let mut command = self.command();
        command
            .stdin(Stdio::null())
            .stdout(output.try_clone().with_context(context)?)
            .stderr(output.try_clone().with_context(context)?);
        let ended = process::wait(command.spawn().with_context(context)?)?;
        let mut bytes = Vec::new();
        output.rewind().and_then(|()| output.read_to_end(&mut bytes)).with_context(context)?;
        let mut text = format!("     Running {}\n", self.path.display());
        text.push_str(&String::from_utf8_lossy(&bytes));
        if !ended.status.success() {
            text.push_str(&format!("error: {} failed: {}\n", self.path.display(), ended.status));
        }
        Ok((text, ended))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_programs_are_found_in_cargo_s_messages() {
        let messages = concat!(
            "{\"manifest_path\":\"/w/a/Cargo.toml\",\"profile\":{\"test\":true},\"executable\":\"/t/a-1\",\"target\":{\"kind\":[\"lib\"],\"name\":\"a\"}}\n",
            "{\"manifest_path\":\"/w/a/Cargo.toml\",\"profile\":{\"test\":true},\"executable\":\"/t/t-1\",\"target\":{\"kind\":[\"test\"],\"name\":\"t\"}}\n",
            "{\"manifest_path\":\"/w/a/Cargo.toml\",\"profile\":{\"test\":true},\"executable\":null}\n",
            "{\"manifest_path\":\"/w/b/Cargo.toml\",\"profile\":{\"test\":false},\"executable\":\"/t/b\"}\n",
            "{\"reason\":\"build-finished\"}\n"
        );
        let expected = [("/t/a-1", None), ("/t/t-1", Some("t".to_owned()))]
            .map(|(path, integration)| Executable { path: path.into(), folder: "/w/a".into(), integration });
        assert_eq!(executables(messages), expected);
    }

    #[test]
    fn integration_tests_are_those_of_own_packages() {
        let metadata = serde_json::json!({ "packages": [
            { "source": null, "manifest_path": "/w/a/Cargo.toml", "targets": [
                { "kind": ["lib"], "name": "a" }, { "kind": ["test"], "name": "t" }] },
            { "source": "registry", "manifest_path": "/r/b/Cargo.toml", "targets": [{ "kind": ["test"], "name": "u" }] },
        ] });
        assert_eq!(integration_tests(&metadata), [(PathBuf::from("/w/a"), "t".to_owned())]);
    }

    #[test]
    fn all_programs_run_and_one_that_fails_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        std::fs::write(&log, "").unwrap();
        let program = |name: &str| Executable {
            path: name.into(),
            folder: folder.path().to_owned(),
            integration: None,
        };
        let mut lines = Vec::new();
        let all = [program("/bin/pwd"), program("/bin/pwd")];
        assert!(run(&all, &log, |line| lines.push(line.to_owned())).unwrap().0);
        let expected = folder.path().canonicalize().unwrap().display().to_string();
        assert_eq!(lines.iter().filter(|line| **line == expected).count(), 2);
        let some_fail = [program("/bin/true"), program("/bin/false"), program("/bin/true")];
        assert!(!run(&some_fail, &log, |_| ()).unwrap().0);
        assert!(std::fs::read_to_string(&log).unwrap().contains("/bin/false failed"));
    }
}
