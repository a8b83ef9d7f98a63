//! Finds the daemons and the guest libraries in the installed tree, which `cargo xtask dist` makes.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

/// Finds the daemon `name`: next to this executable, otherwise in `PATH`.
pub fn find(name: &str) -> Result<PathBuf> {
    let beside = own_folder().map(|folder| folder.join(name));
    if let Some(path) = beside.filter(|path| path.is_file()) {
        return Ok(path);
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    match std::env::split_paths(&path).map(|folder| folder.join(name)).find(|path| path.is_file()) {
        Some(path) => Ok(path),
        None => {
            bail!(
                "cannot find {name} next to rgpuctl or in PATH: install the package {name}, or run `cargo xtask build` in rgpu's source tree"
            )
        }
    }
}

/// The folder of the guest libraries: `RGPU_LIB_DIR`, otherwise `../lib/rgpu` as installed, otherwise the
/// source tree's.
pub fn libraries() -> Result<PathBuf> {
    if let Some(folder) = std::env::var_os("RGPU_LIB_DIR").filter(|folder| !folder.is_empty()) {
        let named = || format!("RGPU_LIB_DIR={}", folder.display());
        let path = std::path::absolute(&folder).with_context(named)?;
        ensure!(has_libraries(&path), "{}: there is no libcuda.so.1 of rgpu in this folder", named());
        return Ok(path);
    }
    let own = own_folder().context("cannot find rgpuctl's own folder")?;
    let candidates = [own.join("../lib/rgpu"), own.join("../guest/lib")];
    match candidates.iter().find(|folder| has_libraries(folder)) {
        Some(folder) => folder.canonicalize().with_context(|| format!("cannot open {}", folder.display())),
        None => bail!(
            "cannot find libcuda.so.1 in {} or {}: install the package rgpu-libs, or set RGPU_LIB_DIR to the folder of rgpu's libraries, which `cargo xtask build` makes in its source tree",
            candidates[0].display(),
            candidates[1].display()
        ),
    }
}

/// Whether a folder has the libraries. Without them, a program would use those of this machine's driver.
pub fn has_libraries(folder: &Path) -> bool {
    folder.join("libcuda.so.1").exists()
}

fn own_folder() -> Option<PathBuf> {
    std::env::current_exe().ok()?.parent().map(Path::to_owned)
}
