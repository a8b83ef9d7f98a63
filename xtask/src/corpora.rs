//! The inputs that the repository keeps for each fuzz target: `fuzz/corpora/TARGET.tar.gz`.
//!
//! libFuzzer found them, and kept those that reach code which no smaller one does. An archive holds a folder
//! with the target's name and a file for each input, whose name is the hash of its contents. The same inputs
//! always make the same archive, so that one that changes has other inputs.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use rgpu_tests::tree;

use crate::process;

/// The folder of the archives.
pub fn folder() -> PathBuf {
    tree::root().join("fuzz/corpora")
}

/// Unpacks a target's archive in `archives` below `to`, and returns the folder of its inputs.
///
/// # Errors
/// The archive is missing, is none, or holds no inputs: whoever fuzzes with nothing is to know it.
pub fn unpack(archives: &Path, target: &str, to: &Path) -> Result<PathBuf> {
    let archive = archive(archives, target);
    let context = || {
        format!(
            "no inputs of the fuzz target {target} in {}; `cargo xtask fuzz-corpora` makes the archive",
            archive.display()
        )
    };
    let mut tar = Command::new("tar");
    tar.args(["--extract", "--gzip", "--no-same-owner", "--file"]).arg(&archive).arg("--directory").arg(to);
    process::output(&mut tar).with_context(context)?;
    let inputs = to.join(target);
    ensure!(inputs.is_dir() && !names(&inputs)?.is_empty(), context());
    Ok(inputs)
}

/// Makes a target's archive in `archives` from the folder `inputs`, which has the target's name.
pub fn pack(archives: &Path, inputs: &Path) -> Result<()> {
    let (Some(parent), Some(target)) = (inputs.parent(), inputs.file_name()) else {
        anyhow::bail!("{} is no folder of inputs", inputs.display());
    };
    let archive = archive(archives, &target.to_string_lossy());
    std::fs::create_dir_all(archives).with_context(|| format!("cannot create {}", archives.display()))?;
    // Nothing of the machine or the time, which would make other archives of the same inputs.
    let mut tar = Command::new("tar");
    tar.args(["--create", "--format=ustar", "--sort=name", "--mtime=@0", "--owner=0", "--group=0"]);
    tar.args(["--numeric-owner", "--mode=u=rwX,go=rX", "--use-compress-program=gzip -9n"]);
    tar.arg("--file").arg(archive).arg("--directory").arg(parent).arg(target);
    process::output(&mut tar)?;
    Ok(())
}

/// The names of the inputs in a folder.
pub fn names(folder: &Path) -> Result<BTreeSet<String>> {
    let context = || format!("cannot list {}", folder.display());
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(folder).with_context(context)? {
        names.insert(entry.with_context(context)?.file_name().to_string_lossy().into_owned());
    }
    Ok(names)
}

/// A target's archive in `archives`.
pub fn archive(archives: &Path, target: &str) -> PathBuf {
    archives.join(format!("{target}.tar.gz"))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn folder_with(parent: &Path, inputs: &[(&str, &str)]) -> PathBuf {
        let folder = parent.join("relay");
        fs::create_dir(&folder).unwrap();
        inputs.iter().for_each(|(name, input)| fs::write(folder.join(name), input).unwrap());
        folder
    }

    #[test]
    fn the_same_inputs_make_the_same_archive_and_come_out_of_it() {
        let [one, other, out] = [(); 3].map(|()| tempfile::tempdir().unwrap());
        pack(one.path(), &folder_with(one.path(), &[("b", "beta"), ("a", "alpha")])).unwrap();
        let inputs = folder_with(other.path(), &[("a", "alpha"), ("b", "beta")]);
        let old = fs::File::open(inputs.join("a")).unwrap();
        old.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
        pack(other.path(), &inputs).unwrap();
        let read = |folder: &Path| fs::read(folder.join("relay.tar.gz")).unwrap();
        assert_eq!(read(one.path()), read(other.path()));

        let inputs = unpack(one.path(), "relay", out.path()).unwrap();
        assert_eq!(names(&inputs).unwrap(), ["a", "b"].map(str::to_owned).into());
        assert_eq!(fs::read(inputs.join("b")).unwrap(), b"beta");
    }

    #[test]
    fn an_archive_that_is_missing_or_damaged_or_has_no_inputs_is_an_error() {
        let archives = tempfile::tempdir().unwrap();
        let file = archives.path().join("relay.tar.gz");
        let refused = || {
            let out = tempfile::tempdir().unwrap();
            let error = unpack(archives.path(), "relay", out.path()).unwrap_err();
            assert!(format!("{error:#}").contains(file.to_str().unwrap()), "{error:#}");
        };
        refused();
        fs::write(&file, "").unwrap();
        refused();

        let inputs = folder_with(archives.path(), &[]);
        pack(archives.path(), &inputs).unwrap();
        refused();

        fs::write(inputs.join("a"), "alpha").unwrap();
        pack(archives.path(), &inputs).unwrap();
        let mut bytes = fs::read(&file).unwrap();
        bytes.truncate(bytes.len() - 4);
        fs::write(&file, bytes).unwrap();
        refused();
    }
}
