//! `cargo xtask bench`: measures calls and copies, natively and through rgpu, and writes the results to
//! `docs/benchmarks/`.
//!
//! `rgpu-bench` (`tests/src/bin/rgpu-bench.rs`) and the CUDA program `tests/bench/bench.cu` do the work. This
//! builds both, and either runs them or stages them for a machine with a GPU but no compiler.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use clap::Args;
use rgpu_tests::tree;

use crate::progress::Step;
use crate::stage::Staging;
use crate::{artifacts, process, programs, toolchain};

const SCRIPT: &str = r#"#!/bin/sh
# Measures on this machine; arguments go to rgpu-bench. What it writes lies in ./results unless --out names another folder.
cd "$(dirname "$0")" || exit 1
RGPU_ROOT=$PWD
CARGO_TARGET_DIR=$PWD/target
export RGPU_ROOT CARGO_TARGET_DIR
exec ./rgpu-bench --out results "$@"
"#;

/// Measure calls and copies, natively and through rgpu, and write a table and plots to docs/benchmarks
#[derive(Args)]
pub struct Arguments {
    /// The device: this machine's GPU, or the software GPU to see the shape of the curves
    #[arg(long, default_value = "cuda", value_parser = ["cuda", "software"])]
    device: String,
    /// Number of repetitions of each measurement
    #[arg(long, default_value_t = 5)]
    repetitions: usize,
    /// Compare with the figures of an earlier run
    #[arg(long, value_name = "OLD.json")]
    compare: Option<PathBuf>,
    /// Compare the verbs transport with perftest instead, in a machine with software RoCE, and write
    /// docs/benchmarks/verbs.md
    #[arg(long, conflicts_with_all = ["device", "compare", "stage"])]
    verbs: bool,
    /// Measure nothing; put everything needed into this folder, for a machine without a compiler
    #[arg(long, value_name = "FOLDER")]
    stage: Option<PathBuf>,
}

/// Builds everything, then measures or stages.
pub fn bench(arguments: &Arguments) -> Result<()> {
    artifacts::build()?;
    compile()?;
    if arguments.verbs {
        return verbs(arguments.repetitions);
    }
    build_release("building rgpu-bench", &["-p", "rgpu-tests", "--bin", "rgpu-bench"])?;
    if let Some(folder) = &arguments.stage {
        return stage(&tree::root().join(folder));
    }
    let mut command = Command::new(tree::binaries().join("rgpu-bench"));
    command.args(["--device", &arguments.device, "--repetitions", &arguments.repetitions.to_string()]);
    if let Some(old) = &arguments.compare {
        command.arg("--compare").arg(old);
    }
    let status = command.status().context("cannot run rgpu-bench")?;
    ensure!(status.success(), "rgpu-bench: {status}");
    Ok(())
}

fn build_release(what: &str, which: &[&str]) -> Result<()> {
    let step = Step::spinner(what);
    let mut build = process::cargo();
    build.args(["build", "--release"]).args(which);
    process::watch(&mut build, &process::log("bench")?, &step)?;
    step.done("");
    Ok(())
}

/// Compares verbs with perftest. The rounds that are compared one by one run three times as often as the
/// other studies.
fn verbs(repetitions: usize) -> Result<()> {
    artifacts::peers()?;
    build_release("building rdma-bench", &["-p", "rgpu-tests", "--bin", "rdma-bench"])?;
    let mut command = Command::new(tree::binaries().join("rdma-bench"));
    command.args(["--repetitions", &repetitions.to_string(), "--rounds", &(3 * repetitions).to_string()]);
    let status = command.status().context("cannot run rdma-bench")?;
    ensure!(status.success(), "rdma-bench: {status}");
    Ok(())
}

/// Compiles the program if its source is newer.
pub fn compile() -> Result<()> {
    let source = tree::root().join("tests/bench/bench.cu");
    let program = tree::programs().join("bench");
    let modified = |path: &Path| std::fs::metadata(path).and_then(|data| data.modified());
    if modified(&program).is_ok_and(|built| modified(&source).is_ok_and(|written| written < built)) {
        return Ok(());
    }
    let toolkit = toolchain::cuda()?;
    let step = Step::spinner("compiling tests/bench/bench.cu");
    std::fs::create_dir_all(tree::programs())
        .with_context(|| format!("cannot create {}", tree::programs().display()))?;
    let mut nvcc = Command::new(toolkit.join("bin/nvcc"));
    nvcc.args(programs::FLAGS).args(["-cudart", "shared", "-L"]).arg(toolkit.join("lib"));
    process::run(nvcc.arg("-o").arg(&program).arg(&source), &process::log("nvcc-bench")?)?;
    step.done("");
    Ok(())
}

fn stage(folder: &Path) -> Result<()> {
    let staging = Staging::begin(folder.to_owned(), process::log("stage-bench")?)?;
    staging.put(&tree::binaries().join("rgpu-bench"), "rgpu-bench", true)?;
    staging.put(&tree::programs().join("bench"), "target/programs/bench", false)?;
    staging.finish(SCRIPT)?;
    println!("staged in {}; start run.sh there", folder.display());
    Ok(())
}
