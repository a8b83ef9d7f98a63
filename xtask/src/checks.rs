//! Checks that come before all tests: formatting, cycles of modules, lints, fuzz targets, licenses.

use anyhow::Result;
use rgpu_tests::tree;

use crate::progress::Step;
use crate::{licenses, process, structure};

/// Runs the checks in order and stops at the first that fails.
pub fn checks() -> Result<()> {
    let log = process::log("checks")?;
    let check = |name: &str, arguments: &[&str]| -> Result<()> {
        let step = Step::spinner(name);
        process::watch(process::cargo().args(arguments), &log, &step)?;
        step.done("");
        Ok(())
    };
    check("checking the format", &["fmt", "--all", "--check", "--", "--color", "never"])?;
    let step = Step::spinner("checking the cycles of modules");
    structure::check()?;
    step.done("");
    check(
        "checking the lints",
        &["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"],
    )?;

    // The fuzz targets are a separate workspace. Without this check, a change elsewhere would break them
    // unnoticed. Nothing is linked, so libFuzzer is not compiled: its build script believes that it exists.
    let step = Step::spinner("checking the fuzz targets");
    let mut fuzz = process::cargo();
    fuzz.args(["check", "--quiet", "--locked", "--manifest-path"]).arg(tree::root().join("fuzz/Cargo.toml"));
    fuzz.arg("--target-dir").arg(tree::target().join("fuzz")).env("RUSTFLAGS", "--cfg fuzzing -D warnings");
    fuzz.env("CUSTOM_LIBFUZZER_PATH", "/not-linked/libfuzzer.a");
    process::watch(&mut fuzz, &log, &step)?;
    step.done("");

    let step = Step::spinner("checking the dependencies' licenses, versions and sources");
    let count = licenses::check()?;
    step.done(&format!("{count} crates"));
    Ok(())
}
