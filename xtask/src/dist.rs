//! `cargo xtask dist`: builds `target/dist/`, a relocatable tree to install on other machines.
//!
//! Programs in `bin/` find `lib/rgpu/` relative to themselves. Everything is stripped, and nothing needs a
//! newer glibc than Debian 12's.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use rgpu_tests::tree::{self, Build};

use crate::progress::Step;
use crate::{artifacts, dependencies, licenses, process, sbom};

/// The newest glibc version that a file may require.
const GLIBC: (u32, u32) = (2, 36);
/// The maximum size of the tree in bytes, so that nothing large comes into it unseen.
const LARGEST: u64 = 44 << 20;
/// Files and folders that are copied unchanged: path in the source tree, and path below `share/rgpu/`.
const SHARED: &[(&str, &str)] = &[
    ("guest-driver", "guest-driver"),
    ("qemu-configs", "qemu-configs"),
    ("docs", "docs"),
    ("monitoring", "monitoring"),
    ("vhost-rgpu/systemd", "systemd"),
    ("gpu-server/systemd", "systemd"),
    ("gpu-server/rgpu-server.toml", "rgpu-server.toml"),
    ("gpu-server/clients.toml", "clients.toml"),
    ("vhost-rgpu/vhost-rgpu.toml", "vhost-rgpu.toml"),
    ("README.md", "README.md"),
    ("LICENSE", "LICENSE"),
];
/// Extensions of files that builds leave in these folders and that are not copied.
const LEFT_OUT: &[&str] = &["ko", "o", "cmd", "mod", "symvers", "order"];

/// The tree's folder.
pub fn folder() -> PathBuf {
    tree::target().join("dist")
}

/// Builds the tree and checks it.
pub fn dist() -> Result<()> {
    dist_of(Build::Release)
}

/// Builds the tree from a build and checks it.
pub fn dist_of(build: Build) -> Result<()> {
    artifacts::build_as(build)?;
    let step = Step::spinner("making the relocatable tree");
    let log = process::log("dist")?;
    let dist = folder();
    if dist.exists() {
        std::fs::remove_dir_all(&dist).with_context(|| format!("cannot remove {}", dist.display()))?;
    }
    let (bin, lib, share) = (dist.join("bin"), dist.join("lib/rgpu"), dist.join("share/rgpu"));
    for folder in [&bin, &lib, &share] {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    }

    let mut binaries = Vec::new();
    for name in artifacts::EXECUTABLES {
        binaries.push((build.binaries().join(name), bin.join(name)));
    }
    for library in artifacts::LIBRARIES {
        binaries.push((build.guest_libraries().join(library.name), lib.join(library.name)));
    }
    for (from, to) in &binaries {
        // Removes debug information and local symbols, but keeps the names that programs link to.
        let mut strip = Command::new("strip");
        process::run(strip.arg("--strip-unneeded").arg("-o").arg(to).arg(from), &log)?;
        check_glibc(to)?;
    }
    std::os::unix::fs::symlink("libcuda.so.1", lib.join(artifacts::NCCL_NETWORK))
        .context("cannot make the link for NCCL")?;
    for name in artifacts::EXECUTABLES {
        let write = if *name == "rgpuctl" { "write-manual" } else { "--write-manual" };
        process::run(Command::new(bin.join(name)).arg(write).arg(dist.join("share")), &log)?;
    }
    for (from, to) in SHARED {
        copy(&tree::root().join(from), &share.join(to))?;
    }

    let packages: Vec<&str> = artifacts::EXECUTABLES
        .iter()
        .copied()
        .chain(artifacts::LIBRARIES.iter().map(|l| l.package))
        .collect();
    let crates = dependencies::linked(&packages)?;
    licenses::collect(&crates, &share.join("licences"))?;
    sbom::write(&crates, &share.join("sbom.cdx.json"))?;

    let size = size(&dist)?;
    let limited = build == Build::Release;
    ensure!(
        !limited || size < LARGEST,
        "{} takes {} MiB, more than {}",
        dist.display(),
        size >> 20,
        LARGEST >> 20
    );
    step.done(&format!("{}, {:.1} MiB", dist.display(), size as f64 / (1 << 20) as f64));
    Ok(())
}

/// Fails for a file that requires a newer glibc than [`GLIBC`].
fn check_glibc(file: &Path) -> Result<()> {
    let symbols = process::output(Command::new("objdump").arg("-T").arg(file))?;
    match newest_glibc(&symbols) {
        Some(version) if version > GLIBC => bail!(
            "{} needs glibc {}.{}, but the tree must run with {}.{}: build it on an older distribution",
            file.display(),
            version.0,
            version.1,
            GLIBC.0,
            GLIBC.1
        ),
        Some(_) => Ok(()),
        None => bail!("objdump found no glibc version in {}", file.display()),
    }
}

/// The highest `GLIBC_x.y` among the symbols listed by `objdump -T`.
fn newest_glibc(symbols: &str) -> Option<(u32, u32)> {
    symbols
        .split("GLIBC_")
        .skip(1)
        .filter_map(|rest| {
            let mut numbers = rest.split(|c: char| !c.is_ascii_digit());
            Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
        })
        .max()
}

/// Copies a file, or a folder without build output.
fn copy(from: &Path, to: &Path) -> Result<()> {
    let context = || format!("cannot copy {} to {}", from.display(), to.display());
    if from.is_dir() {
        std::fs::create_dir_all(to).with_context(context)?;
        for entry in std::fs::read_dir(from).with_context(context)? {
            let entry = entry.with_context(context)?;
            let path: PathBuf = entry.path();
            let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
            if !LEFT_OUT.contains(&ending) {
                copy(&path, &to.join(entry.file_name()))?;
            }
        }
        Ok(())
    } else {
        std::fs::copy(from, to).map(drop).with_context(context)
    }
}

/// The total size of all files below `path` in bytes.
fn size(path: &Path) -> Result<u64> {
    let context = || format!("cannot read {}", path.display());
    let metadata = std::fs::symlink_metadata(path).with_context(context)?;
    if !metadata.is_dir() {
        return Ok(metadata.len());
    }
    std::fs::read_dir(path)
        .with_context(context)?
        .map(|entry| size(&entry.with_context(context)?.path()))
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn glibc_versions_compare_as_numbers() {
        let symbols = "(GLIBC_2.4) a\n(GLIBC_2.34) b\n(GLIBC_2.9) c\n(GLIBC_2.2.5) d\n(GLIBC_PRIVATE) e\n";
        assert_eq!(newest_glibc(symbols), Some((2, 34)));
        assert_eq!(newest_glibc("nothing"), None);
    }
}
