//! Debian packages that a step needs. Missing ones are installed.

use std::process::Command;
use std::time::Duration;

use anyhow::{Result, bail};
use nix::unistd::geteuid;

use crate::process;
use crate::progress::Step;

/// How often refreshing the package lists is tried.
const UPDATES: u32 = 12;

/// Fails if packages in `names` are missing and this user may not install them, so that the error appears
/// before other steps run. `purpose` completes the sentence "… needs packages".
pub fn check(names: &[&str], purpose: &str) -> Result<()> {
    let missing = missing(names);
    if !missing.is_empty() && !geteuid().is_root() {
        bail!(
            "{purpose} needs Debian packages that are not installed, and only root may install them: sudo apt-get install {}",
            missing.join(" ")
        );
    }
    Ok(())
}

/// Makes sure that all packages in `names` are installed.
pub fn packages(names: &[&str], purpose: &str) -> Result<()> {
    check(names, purpose)?;
    let missing = missing(names);
    if missing.is_empty() {
        return Ok(());
    }
    let list = missing.join(" ");
    let step = Step::spinner(format!("installing Debian packages for {purpose}"));
    step.note(&list);
    let log = process::log("packages")?;
    let apt = |arguments: &[&str]| {
        let mut command = Command::new("apt-get");
        command.env("DEBIAN_FRONTEND", "noninteractive").env("LC_ALL", "C").arg("-y").args(arguments);
        // Another process may be installing packages.
        command.args(["-o", "DPkg::Lock::Timeout=600"]);
        command
    };
    let install = || {
        let mut command = apt(&["install", "--no-install-recommends"]);
        process::watch(command.args(&missing), &log, &step)
    };
    // Refreshing the package lists takes a while, so do that only if they are missing or out of date.
    if install().is_err() {
        // APT does not wait for another process that refreshes them.
        let mut tries = 0;
        while let Err(e) = process::watch(&mut apt(&["update"]), &log, &step) {
            tries += 1;
            if tries == UPDATES {
                return Err(e);
            }
            std::thread::sleep(Duration::from_secs(5));
        }
        install()?;
    }
    step.done(&list);
    Ok(())
}

fn missing<'a>(names: &[&'a str]) -> Vec<&'a str> {
    names.iter().copied().filter(|name| !installed(name)).collect()
}

fn installed(name: &str) -> bool {
    process::output(Command::new("dpkg-query").args(["-W", "-f", "${Status}", name]))
        .is_ok_and(|status| status.ends_with("ok installed"))
}
