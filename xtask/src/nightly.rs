//! The parts of the tests that need a nightly compiler: fuzzing and Miri.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use rgpu_tests::tree;

use crate::{process, toolchain};

/// How long each fuzz target runs, in seconds. For longer runs use `cargo fuzz run TARGET`.
const FUZZ_SECONDS: u32 = 30;

/// Runs every fuzz target for a while, starting from its corpus. Returns how many targets found no error, and
/// how many did.
pub fn fuzz(log: &Path) -> Result<(u64, u64)> {
    ensure!(
        process::output(&mut nightly(&["rustc", "--version"])).is_ok(),
        "fuzzing needs a nightly compiler: rustup toolchain install nightly --profile minimal"
    );
    let binary = toolchain::cargo_fuzz()?;
    let mut found = (0, 0);
    for target in targets()? {
        let mut command = Command::new(&binary);
        let folder = tree::root().join("fuzz");
        let (corpus, seeds) = (folder.join("corpus").join(&target), folder.join("seeds").join(&target));
        std::fs::create_dir_all(&corpus).with_context(|| format!("cannot create {}", corpus.display()))?;
        command.args(["run", "--fuzz-dir"]).arg(&folder).arg(&target).arg(&corpus);
        if seeds.is_dir() {
            command.arg(&seeds);
        }
        command.arg("--");
        command
            .arg(format!("-max_total_time={FUZZ_SECONDS}"))
            .args(["-rss_limit_mb=2048", "-print_final_stats=1"]);
        on_nightly(&mut command);
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

/// The commands that run tests under Miri: the protocol's, and those of the copies to and from shared memory.
pub fn miri() -> Result<[Command; 2]> {
    ensure!(
        process::output(&mut nightly(&["cargo", "miri", "--version"])).is_ok(),
        "this part needs Miri: rustup toolchain install nightly --profile minimal --component miri,rust-src"
    );
    let tests = |package: &str, filter: &[&str]| {
        let mut command = nightly(&["cargo", "miri", "test", "-p", package, "--lib", "--target-dir"]);
        command.arg(tree::target().join("miri")).args(filter);
        // Property tests are slow under Miri and cannot write files.
        command.env("PROPTEST_CASES", "4").env("MIRIFLAGS", "-Zmiri-disable-isolation");
        command
    };
    Ok([tests("rgpu-protocol", &[]), tests("rgpu-host-bridge", &["shared::"])])
}

fn nightly(words: &[&str]) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly"]).args(words);
    on_nightly(&mut command);
    command
}

/// Removes the environment of `cargo xtask`, which belongs to another toolchain.
fn on_nightly(command: &mut Command) {
    command.env("RUSTUP_TOOLCHAIN", "nightly").env_remove("CARGO").env_remove("RUSTC").env_remove("RUSTDOC");
}
