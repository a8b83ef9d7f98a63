//! cargo xtask: builds, demonstrates, tests, measures and packs what is in this tree.
//!
//! In reading order:
//! - [`progress`]: shows what each long step is doing;
//! - [`process`]: runs a command as part of a step and keeps its output in a log;
//! - [`debian`], [`toolchain`]: install what a step needs from outside;
//! - [`artifacts`], [`programs`], [`machines`]: make the daemons and libraries, the CUDA programs, and what guests consist of;
//! - [`test`], [`checks`], [`demo`] (and its [`demo_shell`]), [`dist`], [`stage`], [`bench`]: the commands made of these.

mod artifacts;
mod bench;
mod checks;
mod debian;
mod demo;
mod demo_shell;
mod dist;
mod licences;
mod machines;
mod nightly;
mod process;
mod programs;
mod progress;
mod stage;
mod test;
mod toolchain;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Builds, demonstrates, tests, measures and packs rgpu.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Boot a guest and run CUDA programs in it, on a GPU server of this machine
    Demo(demo::Arguments),
    /// Run the tests: all that need no GPU, or only some parts
    Test(test::Arguments),
    /// Build the daemons and the guest libraries (target/release, target/guest/lib)
    Build,
    /// Build the CUDA test programs with NVIDIA's compiler (target/programs)
    Programs,
    /// Install NVIDIA's CUDA compiler from PyPI (build/cuda13)
    Toolchain,
    /// Make the tree that can be installed on other machines (target/dist)
    Dist,
    /// Measure calls and copies, natively and through rgpu, and write the results into docs/benchmarks
    Bench(bench::Arguments),
    /// Put what `test gpu` needs into a folder, for a machine that has a GPU but no compiler
    StageGpu(stage::Arguments),
    /// Check the format, the lints and the dependencies' licences
    CiChecks,
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Demo(arguments) => demo::demo(&arguments),
        Command::Test(arguments) => test::test(&arguments),
        Command::Build => artifacts::build(),
        Command::Programs => programs::build().map(drop),
        Command::Toolchain => toolchain::cuda().map(drop),
        Command::Dist => dist::dist(),
        Command::Bench(arguments) => bench::bench(&arguments),
        Command::StageGpu(arguments) => stage::stage(&arguments),
        Command::CiChecks => checks::checks(),
    }
}
