//! cargo xtask: builds, demonstrates, tests, measures and packages rgpu.
//!
//! In reading order:
//! - [`progress`]: shows the progress of each long step
//! - [`process`]: runs a command as part of a step and logs its output
//! - [`debian`], [`toolchain`]: install external tools
//! - [`artifacts`], [`programs`], [`machines`]: build the daemons and libraries, the CUDA programs, and the
//!   guests
//! - [`test`] (with [`unit_tests`]), [`checks`], [`demo`] (with [`demo_shell`]), [`dist`] (with
//!   [`dependencies`], [`licenses`], [`sbom`] and [`stage`]), [`package`], [`image`], [`bench`], [`book`],
//!   [`screenshots`]: the commands built from these; [`fuzz`] (with [`corpora`]); [`nightly`]: Miri;
//!   [`structure`]

mod artifacts;
mod bench;
mod book;
mod checks;
mod comments;
mod corpora;
mod debian;
mod demo;
mod demo_shell;
mod dependencies;
mod dist;
mod fuzz;
mod image;
mod licenses;
mod machines;
mod nightly;
mod package;
mod process;
mod programs;
mod progress;
mod sbom;
mod screenshots;
mod stage;
mod structure;
mod test;
mod toolchain;
mod unit_tests;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Builds, demonstrates, tests, measures and packages rgpu.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Boot a guest and run CUDA programs in it, on a GPU server on this machine
    Demo(demo::Arguments),
    /// Run the tests: all that need no GPU, or selected parts
    Test(test::Arguments),
    /// Build the daemons and the guest libraries (target/release, target/guest/lib)
    Build,
    /// Build CUDA test programs with NVIDIA's compiler (target/programs, target/programs-static)
    Programs(programs::Arguments),
    /// Install NVIDIA's CUDA compiler from PyPI (build/cuda13)
    Toolchain,
    /// Fetch all that the tests need from the network besides crates: compiler, QEMU, kernels, disks
    Fetch,
    /// Find or fetch a QEMU that has rgpu's device (target/qemu)
    Qemu,
    /// Build the tree to install on other machines (target/dist)
    Dist,
    /// Build Debian packages (target/packages)
    Package(package::Arguments),
    /// Build a disk for guests: Debian 12 with rgpu's packages and cloud-init (target/image)
    Image(image::Arguments),
    /// Measure calls and copies, natively and through rgpu, and write the results to docs/benchmarks
    Bench(bench::Arguments),
    /// Put everything that `test gpu` needs into a folder, for a machine with a GPU but no compiler
    StageGpu(stage::Arguments),
    /// Make a book from the pages in docs, with mdBook (target/book)
    Book,
    /// Remake the pictures of `rgpuctl top` and of a timeline (docs/pictures)
    Screenshots(screenshots::Arguments),
    /// Print how many lines the sources have, and which modules use each other in a cycle
    Structure(structure::Arguments),
    /// Add what fuzzing on this machine has found to the inputs that the repository keeps (fuzz/corpora)
    FuzzCorpora,
    /// Check formatting, lints, the fuzz targets and the dependencies' licenses
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
        Command::Programs(arguments) => programs::programs(&arguments),
        Command::Toolchain => toolchain::cuda().map(drop),
        Command::Fetch => test::fetch(),
        Command::Qemu => machines::qemu(),
        Command::Dist => dist::dist(),
        Command::Package(arguments) => package::package(&arguments),
        Command::Image(arguments) => image::image(&arguments),
        Command::Bench(arguments) => bench::bench(&arguments),
        Command::StageGpu(arguments) => stage::stage(&arguments),
        Command::Book => book::book(),
        Command::Screenshots(arguments) => screenshots::screenshots(&arguments),
        Command::Structure(arguments) => structure::structure(&arguments),
        Command::FuzzCorpora => fuzz::update(),
        Command::CiChecks => checks::checks(),
    }
}
