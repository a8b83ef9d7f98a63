//! Every CUDA test program as a native client on the software GPU, over both transports, and with NVIDIA's
//! own runtime inside the program, as nvcc builds it by default. Then again with device code that the process
//! reads itself ([decision 60](../../docs/decisions/0060-code-is-read-in-the-process.md)), so that no load
//! waits for an answer. Programs that need an NVIDIA GPU run only in `gpu.rs`.
//!
//! `cargo xtask test programs` builds what this needs and runs it. Each test starts its own server and
//! daemon.

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};
use rgpu_tests::calls;
use rgpu_tests::programs::{Way, passes_with, portable, told};

/// How each program runs, by the prefix of its tests' names.
const WAYS: [(&str, Way); 3] = [
    ("local", Way::Client("software", "local")),
    ("tcp", Way::Client("software", "tcp")),
    ("with_nvidias_runtime", Way::Inside("software", "local")),
];
/// Programs to run without userfaultfd, as in containers. Managed memory then uses page protection, and
/// everything except system calls on it works.
const BY_PAGE_PROTECTION: [&str; 6] = [
    "managed_memory",
    "managed_neighbors",
    "managed_variables",
    "managed_api",
    "managed_forks",
    "mapped_memory",
];
/// The program with kernels that the software GPU cannot run: when the process reads the images itself, that
/// is noticed too late for this program.
const CANNOT_RUN: &str = "unsupported_kernels";

/// Runs a program and checks that its calls were served where `tests/calls.txt` says.
fn run(name: &str, way: Way) -> anyhow::Result<()> {
    let outcome = passes_with(name, way, &[], &[("RGPU_STATS", "1")])?;
    calls::agree(&format!("{name}-{}", way.name()), &outcome.stderr)
}

fn main() -> anyhow::Result<ExitCode> {
    let mut trials = Vec::new();
    for program in portable()? {
        for (way, how) in WAYS {
            let name = program.name.clone();
            let test = move || Ok(told(run(&name, how))?);
            trials.push(Trial::test(format!("{way}::{}", program.name), test));
        }
    }
    for name in BY_PAGE_PROTECTION {
        trials.push(Trial::test(format!("by_page_protection::{name}"), move || {
            for transport in ["local", "tcp"] {
                let how = Way::Client("software", transport);
                told(passes_with(name, how, &[], &[("RGPU_PAGES", "signal")]))?;
            }
            Ok(())
        }));
    }
    for program in portable()?.into_iter().filter(|program| program.name != CANNOT_RUN) {
        trials.push(Trial::test(format!("images_read::{}", program.name), move || {
            let how = Way::Client("software", "tcp");
            told(passes_with(&program.name, how, &[], &[("RGPU_READ_IMAGES", "always")]))?;
            Ok(())
        }));
    }
    Ok(libtest_mimic::run(&Arguments::from_args(), trials).exit_code())
}
