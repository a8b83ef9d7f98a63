//! The release build: the daemons and rgpuctl, and the libraries that a program loads instead of NVIDIA's.
//!
//! A guest library is a Rust static library that the C compiler links into a shared one, since only so it gets the
//! names and symbol versions of NVIDIA's own. Each library's folder says how, in a `link.sh`.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use rgpu_tests::tree;

use crate::progress::Step;
use crate::{debian, process};

/// The executables, by package; each has the package's name.
pub const EXECUTABLES: &[&str] = &["vhost-rgpu", "rgpu-server", "rgpuctl"];

/// A library that programs load.
pub struct Library {
    /// Its package.
    pub package: &'static str,
    /// Features of the package.
    features: &'static [&'static str],
    /// The static library that the package gives.
    archive: &'static str,
    /// The folder with its `link.sh`, in `guest-cudart/`.
    folder: &'static str,
    /// What `link.sh` gets after the static library and the folder to write to.
    arguments: &'static [&'static str],
    /// The file and its soname.
    pub name: &'static str,
}

/// All of them.
pub const LIBRARIES: &[Library] = &[
    Library {
        package: "rgpu-cuda",
        features: &[],
        archive: "libcuda.a",
        folder: "cuda",
        arguments: &[],
        name: "libcuda.so.1",
    },
    Library {
        package: "rgpu-cudart",
        features: &[],
        archive: "libcudart.a",
        folder: "cudart",
        arguments: &["13"],
        name: "libcudart.so.13",
    },
    Library {
        package: "rgpu-cudart",
        features: &["v12"],
        archive: "libcudart.a",
        folder: "cudart",
        arguments: &["12"],
        name: "libcudart.so.12",
    },
    Library {
        package: "rgpu-nvml",
        features: &[],
        archive: "libnvml.a",
        folder: "nvml",
        arguments: &[],
        name: "libnvidia-ml.so.1",
    },
];

/// Builds everything, and says loudly which library could not be.
pub fn build() -> Result<()> {
    let missing = build_what_exists()?;
    for name in &missing {
        eprintln!("! NOT BUILT: {name} (its package has no link.sh yet)");
    }
    Ok(())
}

/// Builds everything, all of it.
pub fn build_all() -> Result<()> {
    let missing = build_what_exists()?;
    ensure!(missing.is_empty(), "not built, since there is no link.sh for it: {}", missing.join(", "));
    Ok(())
}

fn build_what_exists() -> Result<Vec<&'static str>> {
    debian::packages(&["gcc", "libc6-dev", "binutils"], "linking the guest libraries")?;
    let log = process::log("build")?;
    let step = Step::spinner("building the daemons and rgpuctl");
    let mut command = process::cargo();
    command.args(["build", "--release"]);
    for package in EXECUTABLES {
        command.args(["-p", package]);
    }
    process::run(&mut command, &log)?;
    step.done("");

    let folder = tree::guest_libraries();
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let step = Step::bar("building the guest libraries", LIBRARIES.len());
    let mut missing = Vec::new();
    for library in LIBRARIES {
        step.note(library.name);
        if !build_library(library, &folder, &log)? {
            missing.push(library.name);
        }
        step.advance();
    }
    step.done(&format!("{} in {}", LIBRARIES.len() - missing.len(), folder.display()));
    Ok(missing)
}

/// Whether the library was built: it is not when its package has no `link.sh`.
fn build_library(library: &Library, folder: &Path, log: &Path) -> Result<bool> {
    let script = tree::root().join("guest-cudart").join(library.folder).join("link.sh");
    if !script.is_file() {
        return Ok(false);
    }
    let mut command = process::cargo();
    command.args(["rustc", "--release", "--lib", "--crate-type", "staticlib", "-p", library.package]);
    if !library.features.is_empty() {
        command.arg("--features").arg(library.features.join(","));
    }
    process::run(&mut command, log)?;
    let archive = tree::target().join("release").join(library.archive);
    let mut link = Command::new("sh");
    link.arg(&script).arg(&archive).arg(folder).args(library.arguments);
    process::run(&mut link, log)?;

    let built = folder.join(library.name);
    let dynamic = process::output(Command::new("readelf").arg("-d").arg(&built))?;
    if !dynamic.contains(&format!("[{}]", library.name)) {
        bail!("{} does not say that it is {}: its soname is wrong", built.display(), library.name);
    }
    Ok(true)
}
