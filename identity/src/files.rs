//! Writes keys and lists: completely or not at all, and readable only by their owner.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Why a file cannot be used.
#[derive(Debug, Error)]
pub enum FileError {
    /// It cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It cannot be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Other users may read a private key.
    #[error("{} can be read by other users than its owner (mode {mode:o}): chmod 600 {}", path.display(), path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// Its content is invalid.
    #[error("{}: {text}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        text: String,
    },
}

impl FileError {
    /// An error about the content of a file.
    pub fn content(path: &Path, text: impl Into<String>) -> FileError {
        FileError::Content { path: path.to_owned(), text: text.into() }
    }
}

/// Creates a folder that only its owner can enter, unless it exists.
pub fn create_folder(folder: &Path) -> Result<(), FileError> {
    use std::os::unix::fs::DirBuilderExt;
    let failed = |source| FileError::Write { path: folder.to_owned(), source };
    if folder.is_dir() {
        return Ok(());
    }
    if let Some(parent) = folder.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        fs::create_dir_all(parent).map_err(failed)?;
    }
    match fs::DirBuilder::new().mode(0o700).create(folder) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        result => result.map_err(failed),
    }
}

/// Replaces a file's content atomically: a reader finds the old content or the new one. The mode is 0600.
/// After the return, the new content survives a power failure.
pub fn replace(path: &Path, content: &[u8]) -> Result<(), FileError> {
    write_new(path, content, |from, to| fs::rename(from, to))
}

/// Creates a file with its whole content. Returns false if another process has created it meanwhile.
pub fn create(path: &Path, content: &[u8]) -> Result<bool, FileError> {
    match write_new(path, content, |from, to| fs::hard_link(from, to).and_then(|()| fs::remove_file(from))) {
        Err(FileError::Write { source, .. }) if source.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        result => result.map(|()| true),
    }
}

fn write_new(
    path: &Path,
    content: &[u8],
    put: impl FnOnce(&Path, &Path) -> io::Result<()>,
) -> Result<(), FileError> {
    let failed = |source| FileError::Write { path: path.to_owned(), source };
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    let new = path.with_file_name(name);
    // An earlier process with the same ID may have left this file.
    let _ = fs::remove_file(&new);
    let write = || {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
        file.write_all(content)?;
        file.sync_all()?;
        put(&new, path)?;
        match path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            Some(folder) => File::open(folder)?.sync_all(),
            None => Ok(()),
        }
    };
    write().map_err(|e| {
        let _ = fs::remove_file(&new);
        failed(e)
    })
}

/// Reads a file. `None`: it does not exist.
pub fn read(path: &Path) -> Result<Option<Vec<u8>>, FileError> {
    match fs::read(path) {
        Ok(content) => Ok(Some(content)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(FileError::Read { path: path.to_owned(), source }),
    }
}

/// Reads a file with a secret. Refuses a file that other users than its owner may read. `None`: it does not
/// exist.
pub fn read_secret(path: &Path) -> Result<Option<Vec<u8>>, FileError> {
    let failed = |source| FileError::Read { path: path.to_owned(), source };
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(failed(e)),
    };
    let about = file.metadata().map_err(failed)?;
    let mode = about.permissions().mode() & 0o777;
    // root may own a key that a daemon of another user reads through a group, such as ssl-cert.
    let group_of_root = about.uid() == 0 && mode & 0o037 == 0;
    if mode & 0o077 != 0 && !group_of_root {
        return Err(FileError::Open { path: path.to_owned(), mode });
    }
    let mut content = Vec::new();
    io::Read::read_to_end(&mut file, &mut content).map_err(failed)?;
    Ok(Some(content))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_the_owners_alone_and_are_created_once() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("a/b");
        create_folder(&inner).unwrap();
        assert_eq!(fs::metadata(&inner).unwrap().permissions().mode() & 0o777, 0o700);
        let path = inner.join("key");
        assert!(create(&path, b"one").unwrap());
        assert!(!create(&path, b"two").unwrap());
        assert_eq!(read_secret(&path).unwrap().unwrap(), b"one");
        replace(&path, b"three").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(read(&path).unwrap().unwrap(), b"three");
        assert_eq!(fs::read_dir(&inner).unwrap().count(), 1, "nothing else is left there");
    }

    #[test]
    fn a_secret_that_others_can_read_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        fs::write(&path, b"secret").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(read_secret(&path).unwrap_err().to_string().contains("chmod 600"));
        assert!(read_secret(&folder.path().join("none")).unwrap().is_none());
    }
}
