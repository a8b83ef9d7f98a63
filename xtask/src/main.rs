//! cargo xtask: everything that is done with this tree beyond compiling it.
//!
//! In reading order:
//! - [`progress`]: one line, or one moving bar, for each long step;
//! - [`process`]: running a command as part of a step, its output in a log that is named when it fails;
//! - [`debian`], [`toolchain`]: what a step needs from outside, installed when it is missing;
//! - [`artifacts`], [`programs`]: the daemons, the guest libraries, and the CUDA test programs;
//! - [`test`], [`checks`], [`demo`] (and its [`demo_shell`]), [`dist`], [`stage`], [`bench`]: the commands made of these.

mod artifacts;
mod bench;
mod checks;
mod debian;
mod demo;
mod demo_shell;
mod dist;
mod licences;
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

/// Everything that is done with this tree beyond compiling it.
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
    /// Run the tests: all that need no GPU, or the named parts
    Test(test::Arguments),
    /// Build the daemons and the guest libraries (target/release, target/guest/lib)
    Build,
    /// Build the CUDA test programs with NVIDIA's compiler (target/programs)
    Programs,
    /// Install NVIDIA's CUDA compiler from PyPI (build/cuda13)
    Toolchain,
    /// Make the relocatable tree that is installed elsewhere (target/dist)
    Dist,
    /// Measure native and remote calls and copies, and write table and plots into docs/benchmarks
    Bench(bench::Arguments),
    /// Put all that `test gpu` needs into a folder, for a machine with a GPU but no compiler
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
