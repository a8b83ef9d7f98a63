//! The licenses of the executables and libraries in the relocatable tree: the license files of each
//! dependency, which MIT, BSD and Apache-2.0 require with binaries.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::dependencies::Crate;

/// Prefixes of the names of files with licenses or required notices.
const NAMES: &[&str] = &["license", "licence", "copying", "copyright", "notice", "unlicense"];

/// Copies the license files of every crate from the registry to `folder`, one folder for each.
pub fn collect(crates: &[Crate], folder: &Path) -> Result<()> {
    for one in crates.iter().filter(|one| !one.own) {
        let name = format!("{}-{}", one.name, one.version);
        let target = folder.join(&name);
        std::fs::create_dir_all(&target).with_context(|| format!("cannot create {}", target.display()))?;
        let source = Path::new(&one.manifest).parent().context("a manifest without a folder")?;
        std::fs::write(target.join("SPDX"), format!("{}\n", one.license))
            .with_context(|| format!("cannot write in {}", target.display()))?;
        let context = || format!("cannot copy the licenses of {name}");
        for entry in std::fs::read_dir(source).with_context(context)? {
            let entry = entry.with_context(context)?;
            let file = entry.file_name().to_string_lossy().to_lowercase();
            if NAMES.iter().any(|word| file.starts_with(word)) && entry.path().is_file() {
                std::fs::copy(entry.path(), target.join(entry.file_name())).with_context(context)?;
            }
        }
    }
    ensure!(folder.is_dir(), "no dependency was found");
    Ok(())
}
