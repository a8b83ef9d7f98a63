//! Fuzzing: every target in `fuzz/fuzz_targets/` for a while, with the workspace's own compiler; and without
//! libFuzzer on the inputs that are kept and a few others, which CI has the time for.
//!
//! Coverage and the address sanitizer are features of nightly compilers. `RUSTC_BOOTSTRAP` enables them in
//! any compiler, so only cargo-fuzz has to be installed.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, bail, ensure};
use rgpu_tests::tree;

use crate::progress::Step;
use crate::{corpora, debian, process, toolchain};

/// Default duration of each target in seconds; `RGPU_FUZZ_SECONDS` overrides it. For longer runs of one
/// target use `cargo fuzz run TARGET`.
const SECONDS: u32 = 30;
/// Targets whose inputs are programs that take milliseconds.
const SLOW: [&str; 6] = ["control", "handshake", "kernel", "module", "pieces", "session"];
/// Targets that start threads. The leak checker does not see a thread that is just starting or ending, and
/// takes its memory for lost.
const WITH_THREADS: [&str; 5] = ["control", "handshake", "kernel", "module", "session"];

/// Inputs of each target in [`briefly`], besides those that are kept.
const INPUTS: u32 = 10_000;
/// The same for the targets in [`SLOW`].
const PROGRAMS: u32 = 1000;

/// Most bytes of an input that is kept. A longer one is cut off there.
const LONGEST: usize = 64 << 10;

/// Runs every target on the inputs that the repository has for it, and on others made from them, the same
/// each time, without libFuzzer. The targets are a workspace of their own: without this, a change elsewhere
/// would break them unnoticed.
pub fn briefly(log: &Path) -> Result<()> {
    let step = Step::spinner("running the fuzz targets briefly");
    let (manifest, folder) = (tree::root().join("fuzz/Cargo.toml"), tree::target().join("fuzz"));
    let mut build = process::cargo();
    build.args(["build", "--quiet", "--locked", "--manifest-path"]).arg(manifest);
    build.arg("--target-dir").arg(&folder).env("RUSTFLAGS", "--cfg fuzzing --cfg standalone -D warnings");
    build.env("CARGO_PROFILE_DEV_DEBUG", "line-tables-only");
    process::watch(&mut build, log, &step)?;
    let unpacked = tempfile::tempdir().context("cannot create a folder")?;
    let left = Mutex::new(targets()?.into_iter());
    let work = || -> Result<()> {
        loop {
            let Some(target) = left.lock().unwrap_or_else(PoisonError::into_inner).next() else {
                return Ok(());
            };
            let few = SLOW.contains(&target.as_str());
            let mut command = Command::new(folder.join("debug").join(&target));
            command.arg(if few { PROGRAMS } else { INPUTS }.to_string());
            command.args(kept(&target, unpacked.path())?);
            process::watch(&mut command, log, &step).with_context(|| format!("fuzz target {target}"))?;
        }
    };
    // Each uses one processor.
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..processors).map(|_| scope.spawn(work)).collect();
        workers
            .into_iter()
            .try_for_each(|worker| worker.join().unwrap_or_else(|e| std::panic::resume_unwind(e)))
    })?;
    step.done("");
    Ok(())
}

/// The folders with a target's inputs in the repository: its corpus, which this unpacks below `to`, and its
/// seeds, which are written by hand; not all have some.
fn kept(target: &str, to: &Path) -> Result<Vec<PathBuf>> {
    let seeds = tree::root().join("fuzz/seeds").join(target);
    let corpus = corpora::unpack(&corpora::folder(), target, to)?;
    Ok([corpus].into_iter().chain(seeds.is_dir().then_some(seeds)).collect())
}

/// Runs every fuzz target for a while, starting from all inputs that there are. Returns how many targets
/// passed, and how many found an error.
pub fn fuzz(log: &Path) -> Result<(u64, u64)> {
    let seconds = match std::env::var("RGPU_FUZZ_SECONDS") {
        Ok(text) => text.parse().with_context(|| format!("RGPU_FUZZ_SECONDS={text}: not a number"))?,
        Err(_) => SECONDS,
    };
    let fuzzer = Fuzzer::build(log)?;
    let unpacked = tempfile::tempdir().context("cannot create a folder")?;
    let mut found = (0, 0);
    for target in targets()? {
        let corpus = found_inputs(&target);
        std::fs::create_dir_all(&corpus).with_context(|| format!("cannot create {}", corpus.display()))?;
        // libFuzzer adds what it finds to the first folder.
        let mut folders = vec![corpus];
        folders.extend(kept(&target, unpacked.path())?);
        let mut command = fuzzer.run(&target, &folders);
        command.arg(format!("-max_total_time={seconds}")).arg("-print_final_stats=1");
        match process::run(&mut command, log) {
            Ok(()) => {
                println!("fuzz {target} ... ok");
                found.0 += 1;
            }
            Err(error) => {
                println!("fuzz {target} ... FAILED: {error:#}");
                found.1 += 1;
            }
        }
    }
    Ok(found)
}

/// Merges what libFuzzer has found on this machine into the inputs that the repository keeps, and says what
/// that changed.
pub fn update() -> Result<()> {
    let log = process::log("fuzz-corpora")?;
    let fuzzer = Fuzzer::build(&log)?;
    for target in targets()? {
        let step = Step::spinner(format!("merging the inputs of {target}"));
        let change = merge(&fuzzer, &target, &step, &log)?;
        step.done(&change);
    }
    Ok(())
}

/// Makes a target's archive anew from its inputs and those in `fuzz/corpus`: each reaches what no smaller one
/// does. Says what changed.
fn merge(fuzzer: &Fuzzer, target: &str, step: &Step, log: &Path) -> Result<String> {
    let (archives, scratch) = (corpora::folder(), tempfile::tempdir().context("cannot create a folder")?);
    let [old, new, failed] = ["old", "new", "failed"].map(|name| scratch.path().join(name));
    let merged = new.join(target);
    for folder in [&old, &merged, &failed] {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    }
    // What is in the first folder is kept in any case, so that is empty.
    let (mut folders, mut before) = (vec![merged.clone()], BTreeSet::new());
    // Only a new target has no archive.
    if corpora::archive(&archives, target).exists() {
        let kept = corpora::unpack(&archives, target, &old)?;
        before = corpora::names(&kept)?;
        folders.push(kept);
    }
    folders.extend(Some(found_inputs(target)).filter(|folder| folder.is_dir()));
    ensure!(folders.len() > 1, "{target} has no inputs yet; run it first, as CONTRIBUTING.md says");
    let mut command = fuzzer.run(target, &folders);
    command.arg("-merge=1").arg(format!("-max_len={LONGEST}"));
    command.arg(format!("-artifact_prefix={}/", failed.display()));
    if SLOW.contains(&target) {
        // An input that runs the same code more often is none of its own, which leaves half of them.
        command.arg("-use_counters=0");
    }
    process::watch(&mut command, log, step)?;
    // libFuzzer leaves out what fails, and succeeds.
    if !corpora::names(&failed)?.is_empty() {
        let _ = scratch.keep();
        bail!("{target} fails with some of its inputs, which are in {}", failed.display());
    }
    let after = corpora::names(&merged)?;
    ensure!(!after.is_empty(), "{target} has no inputs left; the log is {}", log.display());
    if after != before {
        corpora::pack(&archives, &merged)?;
    }
    let (added, removed) = (after.difference(&before).count(), before.difference(&after).count());
    Ok(format!("{} inputs, {added} added, {removed} removed", after.len()))
}

/// Where libFuzzer leaves the inputs that it finds for a target. Git ignores them.
fn found_inputs(target: &str) -> PathBuf {
    tree::root().join("fuzz/corpus").join(target)
}

/// cargo-fuzz, which has built all targets with libFuzzer.
struct Fuzzer(PathBuf);

impl Fuzzer {
    fn build(log: &Path) -> Result<Fuzzer> {
        // libFuzzer is written in C++.
        debian::packages(&["g++"], "building the fuzz targets")?;
        let fuzzer = Fuzzer(toolchain::cargo_fuzz()?);
        // Building all targets at once uses all processors for their common dependencies.
        process::run(&mut fuzzer.command("build"), log)?;
        Ok(fuzzer)
    }

    fn command(&self, verb: &str) -> Command {
        let mut command = Command::new(&self.0);
        command.args([verb, "--fuzz-dir"]).arg(tree::root().join("fuzz")).env("RUSTC_BOOTSTRAP", "1");
        command
    }

    /// Runs a target with the inputs in some folders; libFuzzer's options may follow.
    fn run(&self, target: &str, folders: &[PathBuf]) -> Command {
        let mut command = self.command("run");
        command.arg(target).args(folders).args(["--", "-rss_limit_mb=2048", "-timeout=120"]);
        if WITH_THREADS.contains(&target) {
            // libFuzzer's own option leaves the check at the end of the process.
            command.env("ASAN_OPTIONS", "detect_leaks=0");
        }
        command
    }
}

/// The names of the targets in `fuzz/fuzz_targets/`.
fn targets() -> Result<Vec<String>> {
    let folder = tree::root().join("fuzz/fuzz_targets");
    let context = || format!("cannot list {}", folder.display());
    let mut names = Vec::new();
    for entry in std::fs::read_dir(&folder).with_context(context)? {
        let path = entry.with_context(context)?.path();
        names.extend(path.file_stem().map(|name| name.to_string_lossy().into_owned()));
    }
    names.sort();
    ensure!(!names.is_empty(), "there are no fuzz targets in {}", folder.display());
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_target_has_an_archive_of_inputs_and_each_archive_a_target() {
        let archives = targets().unwrap().iter().map(|target| format!("{target}.tar.gz")).collect();
        assert_eq!(corpora::names(&corpora::folder()).unwrap(), archives);
    }
}
