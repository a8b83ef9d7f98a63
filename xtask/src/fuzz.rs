//! Fuzzing: every target in `fuzz/fuzz_targets/` for a while, with the workspace's own compiler; and without
//! libFuzzer on a few inputs, which CI has the time for.
//!
//! Coverage and the address sanitizer are features of nightly compilers. `RUSTC_BOOTSTRAP` enables them in
//! any compiler, so only cargo-fuzz has to be installed.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use rgpu_tests::tree;

use crate::progress::Step;
use crate::{debian, process, toolchain};

/// Default duration of each target in seconds; `RGPU_FUZZ_SECONDS` overrides it. For longer runs of one
/// target use `cargo fuzz run TARGET`.
const SECONDS: u32 = 30;
/// Targets that start threads. The leak checker does not see a thread that is just starting or ending, and
/// takes its memory for lost.
const WITH_THREADS: [&str; 5] = ["control", "handshake", "kernel", "module", "session"];

/// Inputs of each target in [`briefly`].
const INPUTS: u32 = 10_000;
/// The same for targets whose inputs are programs that take milliseconds.
const PROGRAMS: u32 = 1000;

/// Runs every target on its seeds and some other inputs, the same each time, without libFuzzer. The targets
/// are a workspace of their own: without this, a change elsewhere would break them unnoticed.
pub fn briefly(log: &Path) -> Result<()> {
    let step = Step::spinner("running the fuzz targets briefly");
    let (manifest, folder) = (tree::root().join("fuzz/Cargo.toml"), tree::target().join("fuzz"));
    let mut build = process::cargo();
    build.args(["build", "--quiet", "--locked", "--manifest-path"]).arg(manifest);
    build.arg("--target-dir").arg(&folder).env("RUSTFLAGS", "--cfg fuzzing --cfg standalone -D warnings");
    build.env("CARGO_PROFILE_DEV_DEBUG", "line-tables-only");
    process::watch(&mut build, log, &step)?;
    for target in targets()? {
        let few = WITH_THREADS.contains(&target.as_str()) || target == "pieces";
        let mut command = Command::new(folder.join("debug").join(&target));
        command.arg(if few { PROGRAMS } else { INPUTS }.to_string());
        let seeds = seeds(&target);
        if seeds.is_dir() {
            command.arg(seeds);
        }
        process::watch(&mut command, log, &step).with_context(|| format!("fuzz target {target}"))?;
    }
    step.done("");
    Ok(())
}

/// The folder of a target's seeds; not all have some.
fn seeds(target: &str) -> PathBuf {
    tree::root().join("fuzz/seeds").join(target)
}

/// Runs every fuzz target for a while, starting from its corpus and its seeds. Returns how many targets
/// passed, and how many found an error.
pub fn fuzz(log: &Path) -> Result<(u64, u64)> {
    let seconds = match std::env::var("RGPU_FUZZ_SECONDS") {
        Ok(text) => text.parse().with_context(|| format!("RGPU_FUZZ_SECONDS={text}: not a number"))?,
        Err(_) => SECONDS,
    };
    // libFuzzer is written in C++.
    debian::packages(&["g++"], "building the fuzz targets")?;
    let binary = toolchain::cargo_fuzz()?;
    let folder = tree::root().join("fuzz");
    let cargo_fuzz = |verb: &str| {
        let mut command = Command::new(&binary);
        command.args([verb, "--fuzz-dir"]).arg(&folder).env("RUSTC_BOOTSTRAP", "1");
        command
    };
    // Building all targets at once uses all processors for their common dependencies.
    process::run(&mut cargo_fuzz("build"), log)?;
    let mut found = (0, 0);
    for target in targets()? {
        let (corpus, seeds) = (folder.join("corpus").join(&target), seeds(&target));
        std::fs::create_dir_all(&corpus).with_context(|| format!("cannot create {}", corpus.display()))?;
        let mut command = cargo_fuzz("run");
        command.arg(&target).arg(&corpus);
        if seeds.is_dir() {
            command.arg(&seeds);
        }
        command.arg("--").arg(format!("-max_total_time={seconds}"));
        command.args(["-rss_limit_mb=2048", "-timeout=120", "-print_final_stats=1"]);
        if WITH_THREADS.contains(&target.as_str()) {
            // libFuzzer's own option leaves the check at the end of the process.
            command.env("ASAN_OPTIONS", "detect_leaks=0");
        }
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
