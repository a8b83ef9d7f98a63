//! NVIDIA's headers for tests, from PyPI packages that are installed in `build/cupti/`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{self, Command};
use std::sync::OnceLock;

const PACKAGES: [&str; 3] =
    ["nvidia-cuda-cupti==13.0.85", "nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88"];

/// The folder with `cupti.h` and `cuda.h`, installed on first use.
pub fn folder() -> &'static Path {
    static FOUND: OnceLock<PathBuf> = OnceLock::new();
    FOUND.get_or_init(|| {
        let mut above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
        let root = above.find(|folder| folder.join("Cargo.lock").exists()).expect("the workspace");
        let installed = root.join("build/cupti");
        if !installed.exists() {
            // Install into a folder of this process's own and rename it, so that a concurrent test run never
            // sees half an installation.
            let fresh = root.join(format!("build/cupti.{}", process::id()));
            fs::create_dir_all(&fresh).expect("build/ can be written");
            let mut pip = Command::new("python3");
            pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--root-user-action", "ignore"])
                .args(PACKAGES)
                .arg("--target")
                .arg(&fresh);
            let output = pip.output().expect("python3");
            assert!(output.status.success(), "{pip:?}:\n{}", String::from_utf8_lossy(&output.stderr));
            // If another test run renamed its copy first, use that one.
            if fs::rename(&fresh, &installed).is_err() {
                let _ = fs::remove_dir_all(&fresh);
            }
        }
        installed.join("nvidia/cu13/include")
    })
}
