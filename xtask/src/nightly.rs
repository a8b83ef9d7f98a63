//! The part of the tests that needs a nightly compiler: Miri.

use std::process::Command;

use anyhow::{Result, ensure};
use rgpu_tests::tree;

use crate::process;

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
