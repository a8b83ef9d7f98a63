//! `cargo xtask stage-gpu`: puts everything that the GPU tests need into one folder, for a machine with a GPU
//! but no compiler.
//!
//! The tests treat the folder as the source tree; `RGPU_ROOT` points to it.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use clap::Args;
use rgpu_tests::tree;

use crate::progress::Step;
use crate::{artifacts, process, programs};

/// Runs the tests and then makes the table, on the other machine.
const SCRIPT: &str = r#"#!/bin/sh
# Runs the GPU tests of this folder; with the argument "table", prints the table of native and remote times instead,
# with "nvidia-smi", compares what nvidia-smi says natively and through rgpu, and with "corpus" and names of programs
# (or none: all), compares those through one server, a line for each at once.
# Further arguments go to the tests.
cd "$(dirname "$0")" || exit 1
RGPU_ROOT=$PWD
CARGO_TARGET_DIR=$PWD/target
export RGPU_ROOT CARGO_TARGET_DIR
case ${1:-} in
table) exec ./gpu-table ;;
nvidia-smi) exec sh tests/gpu/nvidia-smi.sh ;;
corpus) shift; exec sh tests/gpu/corpus.sh target "$@" ;;
esac
exec ./gpu-tests --test-threads 1 "$@"
"#;

/// Put everything that `test gpu` needs into a folder, for a machine with a GPU but no compiler.
#[derive(Args)]
pub struct Arguments {
    /// The folder; existing contents are replaced
    #[arg(default_value = "carry/gpu")]
    folder: PathBuf,
}

/// Builds everything and fills the folder.
pub fn stage(arguments: &Arguments) -> Result<()> {
    artifacts::build()?;
    let programs = programs::build()?;
    let step = Step::spinner("building the GPU tests");
    let log = process::log("stage-gpu")?;
    let mut build = process::cargo();
    build.args(["build", "--release", "-p", "rgpu-tests", "--test", "gpu", "--bin", "gpu-table"]);
    // Only Cargo knows the path of the test's executable, because its name contains a hash.
    build.arg("--message-format=json");
    let messages = process::output(build.current_dir(tree::root()))?;
    let tests = executable(&messages, "gpu").context("cargo built no executable for the test gpu")?;

    let staging = Staging::begin(tree::root().join(&arguments.folder), log)?;
    staging.put(&tests, "gpu-tests", true)?;
    staging.put(&tree::binaries().join("gpu-table"), "gpu-table", true)?;
    for program in &programs {
        for folder in [tree::programs(), tree::programs_static()] {
            let to = format!("target/{}/{}", folder.file_name().unwrap_or_default().display(), program.name);
            staging.put(&folder.join(&program.name), &to, false)?;
        }
    }
    for file in ["tests/programs/programs.toml", "tests/gpu/nvidia-smi.sh", "tests/gpu/corpus.sh"] {
        staging.put(&tree::root().join(file), file, false)?;
    }
    staging.finish(SCRIPT)?;
    step.done(&format!("in {}; start run.sh there", staging.folder.display()));
    Ok(())
}

/// A folder for a machine with a GPU but no compiler, laid out like the source tree.
pub struct Staging {
    /// The folder.
    pub folder: PathBuf,
    log: PathBuf,
}

impl Staging {
    /// Empties the folder and adds what every run needs: daemons, guest libraries, and NVIDIA's runtime for
    /// native runs.
    pub fn begin(folder: PathBuf, log: PathBuf) -> Result<Staging> {
        if folder.exists() {
            std::fs::remove_dir_all(&folder)
                .with_context(|| format!("cannot remove {}", folder.display()))?;
        }
        let staging = Staging { folder, log };
        for name in artifacts::EXECUTABLES {
            staging.put(&tree::binaries().join(name), &format!("target/release/{name}"), true)?;
        }
        for library in artifacts::LIBRARIES {
            let file = tree::guest_libraries().join(library.name);
            if !file.is_file() {
                continue;
            }
            let to = format!("target/guest/lib/{}", library.name);
            staging.put(&file, &to, true)?;
            // NCCL, for one, looks for its network by a name of its own.
            for link in library.links {
                let link = staging.folder.join(&to).with_file_name(link);
                std::os::unix::fs::symlink(library.name, &link)
                    .with_context(|| format!("cannot create {}", link.display()))?;
            }
        }
        let runtime = "build/cuda13/nvidia/cu13/lib/libcudart.so.13";
        staging.put(&tree::cuda_runtime().join("libcudart.so.13"), runtime, false)?;
        Ok(staging)
    }

    /// Copies a file, optionally without its symbols.
    pub fn put(&self, from: &Path, to: &str, strip: bool) -> Result<()> {
        let to = self.folder.join(to);
        if let Some(parent) = to.parent() {
            std::fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
        }
        std::fs::copy(from, &to)
            .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
        if strip {
            process::run(Command::new("strip").arg("--strip-unneeded").arg(&to), &self.log)?;
        }
        Ok(())
    }

    /// Writes `run.sh`, which runs everything on the other machine.
    pub fn finish(&self, script: &str) -> Result<()> {
        let path = self.folder.join("run.sh");
        std::fs::write(&path, script)
            .and_then(|()| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)))
            .with_context(|| format!("cannot write {}", path.display()))
    }
}

/// The executable of the target `name` in Cargo's messages, one JSON object per line.
fn executable(messages: &str, name: &str) -> Option<PathBuf> {
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter(|message| message["target"]["name"] == name)
        .find_map(|message| Some(message["executable"].as_str()?.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_executable_is_found_in_cargo_s_messages() {
        let messages = concat!(
            "{\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"gpu\"},\"executable\":\"/t/gpu-1\"}\n",
            "{\"reason\":\"build-finished\"}\n"
        );
        assert_eq!(executable(messages, "gpu"), Some("/t/gpu-1".into()));
        assert_eq!(executable(messages, "programs"), None);
    }
}
