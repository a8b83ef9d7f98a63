//! Runs the relocatable tree of `cargo xtask dist` from another folder.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use rgpu_tests::{programs, tree};

/// A copy of the tree in a fresh folder.
fn elsewhere() -> Result<(tempfile::TempDir, PathBuf)> {
    let folder = tempfile::tempdir()?;
    let place = folder.path().join("some where").join("rgpu");
    std::fs::create_dir(folder.path().join("some where"))?;
    let copied = Command::new("cp").arg("-a").arg(tree::target().join("dist")).arg(&place).status()?;
    ensure!(
        copied.success(),
        "there is no copy of {}: run `cargo xtask dist`",
        tree::target().join("dist").display()
    );
    Ok((folder, place))
}

#[test]
fn programs_run_from_a_copy_with_a_clean_environment() -> Result<()> {
    let (_folder, place) = elsewhere()?;
    for transport in ["local", "tcp"] {
        for name in ["vectorAdd", "copies", "driver_ptx"] {
            let mut command = Command::new(place.join("bin/rgpuctl"));
            command.args(["run", "--backend", "software", "--transport", transport, "--"]);
            command.arg(programs::built(name)?).env_clear().env("PATH", "/usr/bin:/bin").current_dir("/");
            let outcome = programs::run(&mut command, programs::LIMIT)?;
            outcome.verdict(name)?;
        }
    }
    Ok(())
}

/// All files below a folder, by their paths in it.
fn files(folder: &Path, within: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            files(&path, within, found)?;
        } else {
            found.push(path.strip_prefix(within)?.to_owned());
        }
    }
    Ok(())
}

#[test]
fn an_installation_contains_every_file_it_needs() -> Result<()> {
    let dist = tree::target().join("dist");
    let mut found = Vec::new();
    files(&dist, &dist, &mut found)?;
    for file in [
        "bin/rgpuctl",
        "bin/rgpu-server",
        "bin/vhost-rgpu",
        "lib/rgpu/libcuda.so.1",
        "lib/rgpu/libcudart.so.12",
        "lib/rgpu/libcudart.so.13",
        "lib/rgpu/libnvidia-ml.so.1",
        "lib/rgpu/libcupti.so.13",
        "lib/rgpu/libnccl-net.so",
        "share/rgpu/LICENSE",
        "share/rgpu/README.md",
        "share/rgpu/docs/wire.md",
        "share/rgpu/guest-driver/dkms.conf",
        "share/rgpu/guest-driver/src/main.c",
        "share/rgpu/qemu-configs/README.md",
        "share/rgpu/systemd/rgpu-server.service",
        "share/rgpu/systemd/vhost-rgpu.service",
        "share/rgpu/systemd/vhost-rgpu.socket",
        "share/rgpu/systemd/rgpu.conf",
        "share/man/man1/rgpuctl-run.1",
        "share/man/man8/rgpu-server.8",
        "share/man/man8/vhost-rgpu.8",
        "share/bash-completion/completions/rgpuctl",
        "share/zsh/vendor-completions/_rgpuctl",
        "share/fish/vendor_completions.d/rgpuctl.fish",
        "share/rgpu/rgpu-server.toml",
        "share/rgpu/clients.toml",
        "share/rgpu/vhost-rgpu.toml",
        "share/rgpu/sbom.cdx.json",
    ] {
        ensure!(found.iter().any(|path| path == Path::new(file)), "{file} is missing");
    }
    // A second copy of the library would be a second library in a process.
    let link = std::fs::read_link(dist.join("lib/rgpu/libnccl-net.so")).context("no link for NCCL")?;
    ensure!(link == Path::new("libcuda.so.1"), "NCCL's network is {}", link.display());
    let licences = found.iter().filter(|path| path.starts_with("share/rgpu/licences")).count();
    ensure!(licences > 50, "{licences} files of licences");
    let bill: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(dist.join("share/rgpu/sbom.cdx.json"))?)?;
    let listed: Vec<_> = bill["components"].as_array().into_iter().flatten().collect();
    for path in found.iter().filter(|path| path.ends_with("SPDX")) {
        let folder = path.iter().rev().nth(1).unwrap_or_default().to_string_lossy().into_owned();
        let text = |c: &serde_json::Value, key: &str| c[key].as_str().unwrap_or_default().to_owned();
        let listed = listed.iter().any(|c| format!("{}-{}", text(c, "name"), text(c, "version")) == folder);
        ensure!(listed, "{folder} is not in the bill of materials");
    }
    let built = ["ko", "o", "cmd", "mod", "symvers"];
    let left = found.iter().find(|path| path.extension().is_some_and(|e| built.iter().any(|b| e == *b)));
    ensure!(left.is_none(), "{left:?} is left of a build");
    Ok(())
}
