//! The release build: the daemons, rgpuctl, and the libraries that programs load instead of NVIDIA's.
//!
//! Each guest library is a Rust static library that the C compiler links into a shared one, because only then
//! can it have the names and symbol versions of NVIDIA's ([`link`]).

use std::fs::{File, TryLockError};
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, bail};
use rgpu_tests::tree::{self, Build};

use crate::progress::Step;
use crate::{debian, process};

/// Debian packages that the build needs besides Cargo.
pub const PACKAGES: &[&str] = &["gcc", "libc6-dev", "binutils"];

/// Arguments of `cargo build` with which dependencies have the features that they have in tests. Cargo
/// enables those of development dependencies only if it builds something that may use these, such as this
/// small example.
const WITH_TESTS_FEATURES: [&str; 3] = ["--workspace", "--example", "kernels"];

/// The packages with an executable of the same name.
pub const EXECUTABLES: &[&str] = &["vhost-rgpu", "rgpu-server", "rgpuctl"];

/// A library that programs load.
pub struct Library {
    /// Its package.
    pub package: &'static str,
    /// Features that it is built with, as `PACKAGE/FEATURE`.
    features: &'static [&'static str],
    /// The static library that Cargo builds from the package.
    archive: &'static str,
    /// The list of names that it exports, in `guest-cudart/`, and others.
    exports: &'static str,
    more_exports: &'static [&'static str],
    /// Whether all of them have the library's name as their version, as in NVIDIA's.
    versioned: bool,
    /// The file name, which is also the soname.
    pub name: &'static str,
    /// Other names of the file.
    pub links: &'static [&'static str],
}

/// All guest libraries.
pub const LIBRARIES: &[Library] = &[
    Library {
        package: "rgpu-cuda",
        features: &[],
        archive: "libcuda.a",
        exports: "cuda/exports/libcuda.txt",
        more_exports: &[],
        versioned: false,
        name: "libcuda.so.1",
        links: &["libcuda.so", NCCL_NETWORK],
    },
    Library {
        package: "rgpu-cudart",
        features: &[],
        archive: "libcudart.a",
        exports: "cudart/exports/13.txt",
        more_exports: &[],
        versioned: true,
        name: "libcudart.so.13",
        links: &[],
    },
    Library {
        package: "rgpu-cudart",
        features: &["rgpu-cudart/v12"],
        archive: "libcudart.a",
        exports: "cudart/exports/12.txt",
        more_exports: &[],
        versioned: true,
        name: "libcudart.so.12",
        links: &[],
    },
    Library {
        package: "rgpu-nvml",
        features: &[],
        archive: "libnvml.a",
        exports: "nvml/exports/libnvidia-ml.txt",
        more_exports: &[],
        versioned: false,
        name: "libnvidia-ml.so.1",
        links: &["libnvidia-ml.so"],
    },
    Library {
        package: "rgpu-cupti",
        features: &[],
        archive: "libcupti.a",
        exports: "cupti/exports/13.txt",
        // Distinguishes it from NVIDIA's library.
        more_exports: &["rgpu_libcupti"],
        versioned: true,
        name: "libcupti.so.13",
        links: &[],
    },
];

/// The name by which NCCL finds its network in `libcuda.so.1`: a link to that.
pub const NCCL_NETWORK: &str = "libnccl-net.so";

/// Builds everything with optimization.
pub fn build() -> Result<()> {
    build_as(Build::Release)
}

/// Builds everything, once in this process: many parts of the tests ask for it, and programs of one part may
/// run while another begins.
pub fn build_as(build: Build) -> Result<()> {
    static MADE: Mutex<Vec<Build>> = Mutex::new(Vec::new());
    let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
    if made.contains(&build) {
        return Ok(());
    }
    debian::packages(PACKAGES, "building")?;
    let _alone = alone()?;
    let log = process::log("build")?;
    let profile: &[&str] = if build == Build::Release { &["--release"] } else { &[] };
    let step = Step::spinner("building the daemons, rgpuctl and the libraries that programs load");
    // All packages at once: one by one, they would have other features of some dependencies, which Cargo
    // would compile once more. Libraries with features of their own have archives of the same names as
    // others.
    let mut features: Vec<&[&str]> = LIBRARIES.iter().map(|library| library.features).collect();
    features.sort_unstable();
    features.dedup();
    for features in features {
        let mut command = process::cargo();
        command.arg("build").args(profile).args(packages()).args(libraries());
        if !features.is_empty() {
            command.arg("--features").arg(features.join(","));
        }
        process::watch(&mut command, &log, &step)?;
        for library in LIBRARIES.iter().filter(|library| library.features == features) {
            link(library, build, &log)?;
        }
    }
    step.done(&format!("libraries in {}", build.guest_libraries().display()));
    made.push(build);
    Ok(())
}

/// Builds the executables, and of the libraries only `libcuda.so.1`, without optimization. Programs that
/// contain NVIDIA's runtime need nothing else.
///
/// `before_tests` says that the unit tests are compiled next. Everything is then built with the features that
/// these need of it, so that it is not compiled twice.
pub fn build_quickly(before_tests: bool) -> Result<()> {
    let _alone = alone()?;
    let log = process::log("build-debug")?;
    let step = Step::spinner("building the daemons, rgpuctl and libcuda");
    let library = LIBRARIES.iter().find(|library| library.name == "libcuda.so.1");
    let library = library.context("libcuda.so.1 is not in the list of libraries")?;
    let mut command = process::cargo();
    command.arg("build");
    if before_tests {
        command
            .args(WITH_TESTS_FEATURES)
            .arg("--lib")
            .args(EXECUTABLES.iter().flat_map(|name| ["--bin", name]));
    } else {
        command.args(packages()).args(["-p", library.package]);
    }
    process::watch(&mut command, &log, &step)?;
    link(library, Build::Debug, &log)?;
    step.done("without optimization");
    Ok(())
}

/// Builds the peers of the RDMA tests. They are selected together with everything else, because their
/// dependencies would have fewer features without the daemons, and would be compiled once more.
pub fn peers() -> Result<()> {
    let _alone = alone()?;
    let step = Step::spinner("building the peers of the RDMA tests");
    let mut command = process::cargo();
    command.args(["build", "--release", "-p", "rgpu-test-peers"]).args(packages()).args(libraries());
    process::watch(&mut command, &process::log("peers")?, &step)?;
    step.done("");
    Ok(())
}

/// Waits until no other `cargo xtask` builds in this tree, and keeps others waiting until the file is closed.
///
/// Cargo's own lock does not cover the links: both versions of libcudart are linked from an archive of the
/// same name.
fn alone() -> Result<File> {
    let path = tree::target().join("xtask-build.lock");
    std::fs::create_dir_all(tree::target())
        .and_then(|()| File::create(&path))
        .and_then(|file| {
            if let Err(TryLockError::WouldBlock) = file.try_lock() {
                println!("another `cargo xtask` is building in this tree: waiting for it");
                file.lock()?;
            }
            Ok(file)
        })
        .with_context(|| format!("cannot lock {}", path.display()))
}

/// Cargo's arguments that select all executables.
fn packages() -> impl Iterator<Item = &'static str> {
    EXECUTABLES.iter().flat_map(|package| ["-p", package])
}

/// Cargo's arguments that select all libraries.
fn libraries() -> impl Iterator<Item = &'static str> {
    LIBRARIES.iter().flat_map(|library| ["-p", library.package])
}

/// Links the static library that Cargo has built into a shared one.
fn link(library: &Library, build: Build, log: &Path) -> Result<()> {
    let folder = build.guest_libraries();
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let exports = tree::root().join("guest-cudart").join(library.exports);
    let exports = std::fs::read_to_string(&exports)
        .with_context(|| format!("cannot read the exports in {}", exports.display()))?;
    let names = library.more_exports.iter().copied().chain(exports.lines());
    let names: String = names.map(|name| format!("    {name};\n")).collect();
    let node = if library.versioned { library.name } else { "" };
    let [map, new] = ["map", "tmp"].map(|end| folder.join(format!("{}.{end}", library.name)));
    std::fs::write(&map, format!("{node} {{\n  global:\n{names}  local: *;\n}};\n"))?;
    let mut link = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
    link.args(["-shared", "-o"]).arg(&new);
    link.arg(format!("-Wl,--version-script={}", map.display()));
    link.arg(format!("-Wl,-soname,{}", library.name));
    link.arg("-Wl,--whole-archive").arg(build.binaries().join(library.archive));
    link.args(["-Wl,--no-whole-archive", "-Wl,--gc-sections", "-Wl,--strip-all"]);
    // nodelete: the driver, the C library and other libraries of these keep addresses in a library, so it
    // must stay loaded when its last user closes it.
    link.args(["-Wl,-z,defs", "-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,nodelete"]);
    // A listed name that the library lacks is an error where every name has a version.
    link.args(match library.versioned {
        true => ["-Wl,--no-undefined-version", "-static-libgcc"],
        false => ["-Wl,-Bsymbolic", "-lgcc_s"],
    });
    link.args(["-lpthread", "-ldl", "-lm", "-lc"]);
    process::run(&mut link, log)?;
    std::fs::remove_file(&map)?;
    // Replaced at once, because a program may be starting.
    let built = folder.join(library.name);
    std::fs::rename(&new, &built)?;
    for name in library.links {
        let link = folder.join(name);
        // There may be none yet.
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(library.name, &link)?;
    }

    let dynamic = process::output(Command::new("readelf").arg("-d").arg(&built))?;
    if !dynamic.contains(&format!("[{}]", library.name)) {
        bail!("{} has the wrong soname; it should be {}", built.display(), library.name);
    }
    Ok(())
}
