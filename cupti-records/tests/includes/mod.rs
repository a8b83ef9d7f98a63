//! NVIDIA's headers, for tests.

use std::path::{Path, PathBuf};
use std::process::Command;

const PACKAGES: [&str; 3] =
    ["nvidia-cuda-cupti==13.0.85", "nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88"];

/// The folder with `cupti.h` and `cuda.h`, from PyPI if they are not there.
pub fn folder() -> PathBuf {
    let build = Path::new(env!("CARGO_MANIFEST_DIR")).join("../build/cupti");
    let include = build.join("nvidia/cu13/include");
    if !include.join("cupti.h").exists() || !include.join("cuda.h").exists() {
        let pip = Command::new("python3")
            .args(["-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target"])
            .arg(&build)
            .args(PACKAGES)
            .status();
        assert!(pip.is_ok_and(|status| status.success()), "{PACKAGES:?} cannot be installed");
    }
    include
}
