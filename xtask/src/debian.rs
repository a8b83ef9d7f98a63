//! Debian packages that a step needs: the missing ones are installed.

use std::process::Command;

use anyhow::{Result, bail};
use nix::unistd::geteuid;

use crate::process;
use crate::progress::Step;

/// Makes sure that every package of `names` is installed; `purpose` says what for, after "for".
pub fn packages(names: &[&str], purpose: &str) -> Result<()> {
    let missing: Vec<&str> = names.iter().copied().filter(|name| !installed(name)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let list = missing.join(" ");
    if !geteuid().is_root() {
        bail!(
            "{purpose} needs Debian packages that are not installed, and only root may install them: sudo apt-get install {list}"
        );
    }
    let step = Step::spinner(format!("installing {list} for {purpose}"));
    let log = process::log("packages")?;
    let apt = |arguments: &[&str]| {
        let mut command = Command::new("apt-get");
        command.env("DEBIAN_FRONTEND", "noninteractive").arg("-qy").args(arguments);
        command
    };
    let install = |log| {
        let mut command = apt(&["install", "--no-install-recommends"]);
        process::run(command.args(&missing), log)
    };
    // The lists of packages may be absent or old: refreshed only then, since it takes a while.
    if install(&log).is_err() {
        process::run(&mut apt(&["update"]), &log)?;
        install(&log)?;
    }
    step.done("");
    Ok(())
}

fn installed(name: &str) -> bool {
    process::output(Command::new("dpkg-query").args(["-W", "-f", "${Status}", name]))
        .is_ok_and(|status| status.ends_with("ok installed"))
}
