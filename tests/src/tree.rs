//! Paths in the source tree, for tests and for xtask.

use std::path::{Path, PathBuf};

/// The root of the source tree: `RGPU_ROOT`, or the tree in which this was compiled.
///
/// With the variable, a test that was compiled on one machine can run on another, in a copy of the files that
/// it needs.
pub fn root() -> PathBuf {
    if let Some(root) = std::env::var_os("RGPU_ROOT") {
        return root.into();
    }
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().unwrap_or(tests).to_owned()
}

/// Cargo's target folder: `CARGO_TARGET_DIR`, otherwise `target/`.
pub fn target() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(folder) => root().join(folder),
        None => root().join("target"),
    }
}

/// A build of rgpu: its daemons, rgpuctl, and the libraries that a program loads instead of NVIDIA's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Build {
    /// Optimized, for installations and tests: `cargo xtask build` makes it.
    Release,
    /// Not optimized, for `cargo xtask demo`, with only the libraries that it needs.
    Debug,
}

impl Build {
    /// The folder of the daemons and rgpuctl.
    pub fn binaries(self) -> PathBuf {
        target().join(match self {
            Self::Release => "release",
            Self::Debug => "debug",
        })
    }

    /// The folder of the libraries.
    pub fn guest_libraries(self) -> PathBuf {
        target().join(match self {
            Self::Release => "guest/lib",
            Self::Debug => "guest-debug/lib",
        })
    }
}

/// Where `cargo xtask build` leaves the daemons and rgpuctl.
pub fn binaries() -> PathBuf {
    Build::Release.binaries()
}

/// Where `cargo xtask build` leaves the libraries that a program loads instead of NVIDIA's.
pub fn guest_libraries() -> PathBuf {
    Build::Release.guest_libraries()
}

/// Where `cargo xtask programs` leaves the test programs.
pub fn programs() -> PathBuf {
    target().join("programs")
}

/// Where `cargo xtask programs` leaves the programs that contain NVIDIA's runtime.
pub fn programs_static() -> PathBuf {
    target().join("programs-static")
}

/// NVIDIA's own CUDA runtime library, for running a program natively; `cargo xtask toolchain` puts it there.
pub fn cuda_runtime() -> PathBuf {
    root().join("build/cuda13/nvidia/cu13/lib")
}

/// Logs of builds, daemons and machines.
pub fn logs() -> PathBuf {
    target().join("logs")
}
