//! Checks that come before all tests: formatting, cycles of modules, lints, fuzz targets, licenses.

use anyhow::Result;

use crate::progress::Step;
use crate::{comments, fuzz, licenses, process, structure};

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
    let step = Step::spinner("checking the width of comments");
    comments::check()?;
    step.done("");
    let step = Step::spinner("checking the cycles of modules");
    structure::check()?;
    step.done("");
    check(
        "checking the lints",
        &["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"],
    )?;

    fuzz::briefly(&log)?;

    let step = Step::spinner("checking the dependencies' licenses, versions and sources");
    let count = licenses::check()?;
    step.done(&format!("{count} crates"));
    Ok(())
}
