//! The CUDA test programs: their list, and how to run one as a native client or on a GPU of this machine.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde::Deserialize;

use crate::tree;

/// One entry of `tests/programs/programs.toml`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Program {
    /// The binary's name, and the word after PASS in its last line.
    pub name: String,
    /// Its source files, in `tests/programs/`.
    pub sources: Vec<String>,
    /// Flags for nvcc besides those of every program.
    #[serde(default)]
    pub flags: Vec<String>,
    /// Arguments of a run at the default, small size.
    #[serde(default)]
    pub args: Vec<String>,
    /// Whether it calls the driver API, and so needs `libcuda.so.1` by name.
    #[serde(default)]
    pub driver: bool,
    /// What it can run on.
    #[serde(default)]
    pub device: Device,
}

/// What a program can run on.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// The software GPU, and any NVIDIA GPU.
    #[default]
    Any,
    /// Two devices of two servers, of any kind.
    Servers,
    /// Two devices of one server that can access each other's memory.
    Peers,
    /// An NVIDIA GPU of the generation that the project is measured on, or later.
    Cuda,
}

/// The test programs that run on any device, the software GPU included, in the order of [`manifest`].
pub fn portable() -> Result<Vec<Program>> {
    let mut programs = manifest()?;
    programs.retain(|program| program.device == Device::Any);
    Ok(programs)
}

/// Every test program, in the order in which they are run.
pub fn manifest() -> Result<Vec<Program>> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Manifest {
        program: Vec<Program>,
    }
    let path = tree::root().join("tests/programs/programs.toml");
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let manifest: Manifest = toml::from_str(&text).with_context(|| format!("{} is wrong", path.display()))?;
    Ok(manifest.program)
}

/// An error with all its causes, for a test's output.
pub fn told<T>(outcome: Result<T>) -> std::result::Result<(), String> {
    outcome.map(drop).map_err(|error| format!("{error:?}"))
}

/// How long a program may take. Even on a busy machine, only a program that hangs takes this long.
pub const LIMIT: Duration = Duration::from_secs(600);

/// How a program ended and what it printed.
#[derive(Debug)]
pub struct Outcome {
    /// The exit status; none if a signal ended it or it timed out.
    pub status: Option<i32>,
    /// Everything on standard output.
    pub stdout: String,
    /// Everything on standard error.
    pub stderr: String,
    /// How long it ran, start to end.
    pub time: Duration,
    /// Whether it was killed because it timed out.
    pub timed_out: bool,
}

impl Outcome {
    /// What the program printed after `PASS name`, or why it did not pass.
    pub fn verdict(&self, name: &str) -> Result<&str> {
        let last = self.stdout.lines().last().unwrap_or_default();
        ensure!(!self.timed_out, "{name} was not done after {:.0?}\n{}", self.time, self.transcript());
        match last.strip_prefix("PASS ").and_then(|rest| rest.strip_prefix(name)) {
            Some(detail) if self.status == Some(0) && (detail.is_empty() || detail.starts_with(' ')) => {
                Ok(detail.trim_start())
            }
            _ => bail!("{name} did not pass: exit status {:?}\n{}", self.status, self.transcript()),
        }
    }

    fn transcript(&self) -> String {
        format!("--- stdout\n{}--- stderr\n{}", self.stdout, self.stderr)
    }
}

/// Where and how a program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// On this machine's GPU with NVIDIA's libraries, without rgpu.
    Native,
    /// As a native client of a private server, with rgpuctl's names for its backend and transport.
    Client(&'static str, &'static str),
    /// As such a client, with NVIDIA's runtime inside the program.
    Inside(&'static str, &'static str),
}

impl Way {
    /// A name for logs and tables.
    pub fn name(self) -> String {
        match self {
            Self::Native => "native".to_owned(),
            Self::Client(backend, transport) => format!("{backend}-{transport}"),
            Self::Inside(backend, transport) => format!("{backend}-{transport}-static"),
        }
    }

    /// The build of a program that runs this way.
    fn build(self, name: &str) -> Result<PathBuf> {
        match self {
            Self::Inside(..) => found(tree::programs_static().join(name)),
            _ => built(name),
        }
    }

    /// The command that runs `program`, without its arguments; the daemons' logs go to `logs`.
    fn command(self, program: &Path, logs: &Path) -> Command {
        match self {
            Self::Native => {
                let mut command = Command::new(program);
                command.env("LD_LIBRARY_PATH", tree::cuda_runtime());
                command
            }
            Self::Client(backend, transport) | Self::Inside(backend, transport) => {
                let mut command = Command::new(tree::binaries().join("rgpuctl"));
                command
                    .args(["run", "--backend", backend, "--transport", transport, "--log-dir"])
                    .arg(logs)
                    .arg("--")
                    .arg(program)
                    .env("RGPU_LIB_DIR", tree::guest_libraries());
                command
            }
        }
    }
}

/// Runs one program of the manifest with its own arguments and `more`, and requires that it passes.
pub fn passes(name: &str, way: Way, more: &[&str]) -> Result<Outcome> {
    passes_with(name, way, more, &[])
}

/// Like [`passes`], with environment variables.
pub fn passes_with(name: &str, way: Way, more: &[&str], variables: &[(&str, &str)]) -> Result<Outcome> {
    let manifest = manifest()?;
    let program = manifest.iter().find(|program| program.name == name);
    let program = program.with_context(|| format!("{name} is not in the manifest"))?;
    // Each variant has a folder of its own: they may run at the same time.
    let variant: String = variables.iter().map(|(variable, value)| format!("-{variable}={value}")).collect();
    let logs = tree::logs().join("programs").join(format!("{name}-{}{variant}", way.name()));
    let mut command = way.command(&way.build(name)?, &logs);
    command.args(&program.args).args(more).envs(variables.iter().copied());
    let outcome = run(&mut command, LIMIT)?;
    outcome.verdict(name).with_context(|| format!("the daemons' logs are in {}", logs.display()))?;
    Ok(outcome)
}

/// The built program `name`, or an error that says how to build it.
pub fn built(name: &str) -> Result<PathBuf> {
    found(tree::programs().join(name))
}

fn found(path: PathBuf) -> Result<PathBuf> {
    ensure!(path.is_file(), "{} does not exist: run `{}`", path.display(), builder(&path));
    Ok(path)
}

/// The command that builds a program.
fn builder(program: &Path) -> &'static str {
    // Not one of the test programs: only the parts of the tests that need it have it built.
    if program.ends_with("bench") { "cargo xtask test round_trips" } else { "cargo xtask programs" }
}

/// Runs one program natively and in each of the given ways, and requires that all pass and print the same.
pub fn same_as_native(name: &str, ways: &[Way]) -> Result<()> {
    let native = passes(name, Way::Native, &[])?.stdout;
    for way in ways {
        let found = passes(name, *way, &[])?.stdout;
        ensure!(found == native, "{name} prints something else as {}: {found}natively: {native}", way.name());
    }
    Ok(())
}

/// Runs a command to its end. After `limit`, kills it and everything it started.
pub fn run(command: &mut Command, limit: Duration) -> Result<Outcome> {
    let start = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .with_context(|| format!("cannot run {}", command.get_program().display()))?;
    let group = Pid::from_raw(child.id().cast_signed());
    let readers = [
        child.stdout.take().map(|pipe| Box::new(pipe) as Box<dyn Read + Send>),
        child.stderr.take().map(|pipe| Box::new(pipe) as Box<dyn Read + Send>),
    ]
    .map(|pipe| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            // Keep what came before an error of the pipe.
            let _ = pipe.map(|mut pipe| pipe.read_to_end(&mut bytes));
            String::from_utf8_lossy(&bytes).into_owned()
        })
    });

    let mut timed_out = false;
    let status = loop {
        if let Some(status) = child.try_wait().context("cannot wait for a program")? {
            break status;
        }
        if !timed_out && start.elapsed() > limit {
            timed_out = true;
            // The leader has not been waited for, so the group's number is still its own.
            killpg(group, Signal::SIGKILL).context("cannot kill a program that timed out")?;
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let time = start.elapsed();
    let [stdout, stderr] = readers.map(|reader| reader.join().unwrap_or_default());
    Ok(Outcome { status: status.code(), stdout, stderr, time, timed_out })
}

/// A program's messages, without those about waiting for a worker or for its server, which a busy machine may
/// cause as well.
pub fn told_beside_waits(errors: &str) -> Vec<&str> {
    let waits = [
        "waiting for a GPU session on",
        "the GPU session on",
        "is interrupted: this program waits",
        "is back: this program continues",
    ];
    errors.lines().filter(|line| !waits.iter().any(|words| line.contains(words))).collect()
}

/// A counter of a whole process, from what the client library printed on standard error with `RGPU_STATS=1`.
pub fn counted(stderr: &str, name: &str) -> Result<u64> {
    let line = stderr.lines().find(|line| line.starts_with("rgpu: stats: pid="));
    counter(line.with_context(|| format!("no counters in {stderr:?}"))?, name)
}

/// A counter of one of those lines: the process's, or a function's.
pub fn counter(line: &str, name: &str) -> Result<u64> {
    let word = line.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    word.with_context(|| format!("no counter {name} in {line:?}"))?.parse().context("a counter is a number")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manifest_names_sources_that_exist() {
        let programs = manifest().unwrap();
        assert!(programs.len() > 10);
        for program in programs {
            for source in &program.sources {
                assert!(
                    tree::root().join("tests/programs").join(source).is_file(),
                    "{}: {source}",
                    program.name
                );
            }
        }
    }

    #[test]
    fn a_missing_program_is_told_with_the_command_that_builds_it() {
        let why = |name| found(Path::new("/nonexistent").join(name)).unwrap_err().to_string();
        assert!(why("vectorAdd").ends_with("run `cargo xtask programs`"));
        assert!(why("bench").ends_with("run `cargo xtask test round_trips`"));
    }

    #[test]
    fn a_program_passes_by_its_last_line_and_its_status() {
        let outcome =
            |script: &str| run(Command::new("sh").args(["-c", script]), Duration::from_secs(240)).unwrap();
        assert_eq!(outcome("echo noise; echo PASS it 3 things").verdict("it").unwrap(), "3 things");
        for wrong in
            ["echo PASS it; exit 1", "echo PASS it; echo more", "echo PASS italic", "echo FAIL it no", "true"]
        {
            assert!(outcome(wrong).verdict("it").is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_program_out_of_time_is_killed_with_its_children() {
        let outcome =
            run(Command::new("sh").args(["-c", "sleep 1000 & sleep 1000"]), Duration::from_millis(50))
                .unwrap();
        assert!(outcome.timed_out && outcome.verdict("sh").is_err());
    }
}
