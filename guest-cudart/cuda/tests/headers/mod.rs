//! NVIDIA's headers, from PyPI packages that are installed in `build/`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The folder of `cuda.h`: the first of these `places` in `build/` that has it. If none has, the last one is
/// in `folder`, where the packages are installed now.
pub fn folder(places: &[&str], folder: &str, packages: &[&str]) -> PathBuf {
    let build = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../build");
    let found = places.iter().map(|place| build.join(place)).find(|include| include.join("cuda.h").exists());
    found.unwrap_or_else(|| {
        fs::create_dir_all(&build).expect("build/ can be written");
        // Install into a temporary folder and rename it, so that a test that runs at the same time never sees
        // half an installation.
        let fresh = tempfile::tempdir_in(&build).expect("build/ can be written");
        let target = fresh.path().join("packages");
        let installed = Command::new("python3")
            .args([
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--root-user-action",
                "ignore",
                "--target",
            ])
            .arg(&target)
            .args(packages)
            .status();
        assert!(installed.is_ok_and(|status| status.success()), "{packages:?} cannot be installed");
        // If another test renamed its copy first, use that one.
        let _ = fs::rename(&target, build.join(folder));
        build.join(places[places.len() - 1])
    })
}
