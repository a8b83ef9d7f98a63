//! A tree of files that contains only what the process may see.
//!
//! The new root is a small file system in memory. The visible files are mounted into it under their own
//! paths, then the old root is detached. Everything except [`Access::Write`] is read-only. Set-user-ID bits
//! have no effect in the tree, and neither do device nodes except [`Access::Device`].

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::unistd::{chdir, pivot_root};
use serde::{Deserialize, Serialize};

/// The folder with the nodes of RDMA devices.
pub const RDMA_DEVICES: &str = "/dev/infiniband";

/// What a process may do with files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Access {
    /// Read files and load libraries from them.
    Read,
    /// Also write, create and remove files.
    Write,
    /// Open device nodes for reading and writing.
    Device,
}

/// A visible file or folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Visible {
    /// Its path, which is the same inside.
    pub path: PathBuf,
    /// What the process may do with it.
    pub access: Access,
}

impl Visible {
    /// A file or folder. Ignored if it does not exist when the process confines itself.
    pub fn new(path: impl Into<PathBuf>, access: Access) -> Visible {
        Visible { path: path.into(), access }
    }

    /// The folders from which programs load libraries, and the loader's files.
    pub fn libraries() -> impl Iterator<Item = Visible> {
        let folders = [
            "/usr",
            "/lib",
            "/lib32",
            "/lib64",
            "/etc/ld.so.cache",
            "/etc/ld.so.conf",
            "/etc/ld.so.conf.d",
            "/etc/alternatives",
            "/etc/localtime",
            "/nix/store",
            "/run/opengl-driver",
        ];
        folders.into_iter().map(|path| Visible::new(path, Access::Read))
    }

    /// The files that libibverbs opens: the nodes of RDMA devices ([`RDMA_DEVICES`]), and the list of
    /// drivers.
    pub fn rdma() -> impl Iterator<Item = Visible> {
        [(RDMA_DEVICES, Access::Device), ("/etc/libibverbs.d", Access::Read)]
            .into_iter()
            .map(|(path, access)| Visible::new(path, access))
    }

    /// Device nodes without hardware that libraries expect.
    pub fn basic_devices() -> impl Iterator<Item = Visible> {
        ["null", "zero", "full", "random", "urandom"]
            .into_iter()
            .map(|name| Visible::new(format!("/dev/{name}"), Access::Device))
    }

    /// The groups that may open those of these files that not everyone may open.
    pub fn groups(all: &[Visible]) -> Vec<u32> {
        let mut groups: Vec<u32> = all
            .iter()
            .filter(|visible| visible.access == Access::Device)
            .filter_map(|visible| fs::metadata(&visible.path).ok())
            // Group 0 would grant access to more than this file.
            .filter(|file| {
                !file.is_dir()
                    && file.mode() & 0o006 != 0o006
                    && file.mode() & 0o060 == 0o060
                    && file.gid() != 0
            })
            .map(|file| file.gid())
            .collect();
        groups.sort_unstable();
        groups.dedup();
        groups
    }
}

/// The step that failed, in words, and the error.
pub(crate) type Failure = (String, io::Error);

fn failed(what: impl Into<String>) -> impl FnOnce(nix::Error) -> Failure {
    let what = what.into();
    move |e| (what, e.into())
}

fn failed_io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Failure {
    let what = what.into();
    move |e| (what, e)
}

/// Size of the file systems in memory, for their folders and what the process writes to `/tmp` and
/// `/dev/shm`.
const ROOT: &str = "mode=0755,size=1M,nr_inodes=4k";
const SCRATCH: &str = "mode=1777,size=64M,nr_inodes=4k";

/// Changes flags of an existing mount.
fn set_attributes(path: &Path, set: u64, recursive: bool) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let attributes = libc::mount_attr { attr_set: set, attr_clr: 0, propagation: 0, userns_fd: 0 };
    let flags = if recursive { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: a string that ends with NUL, and a structure with its size.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            libc::AT_FDCWD,
            path.as_ptr(),
            flags,
            &attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Creates the tree and enters it. The process must have its own mount namespace.
pub(crate) fn enter(visible: &[Visible], own_processes: bool) -> Result<(), Failure> {
    let none: Option<&str> = None;
    // Mounts must not propagate between this namespace and others.
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
        .map_err(failed("making mounts private"))?;
    // Any folder will do, because it is only covered until the next step.
    let base = ["/tmp", "/run", "/mnt", "/var"].into_iter().find(|path| Path::new(path).is_dir());
    let base = base.ok_or_else(|| ("a folder to mount on".to_owned(), io::ErrorKind::NotFound.into()))?;
    let hidden = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount(Some("tmpfs"), base, Some("tmpfs"), hidden, Some(ROOT))
        .map_err(failed(format!("mounting a tmpfs on {base}")))?;
    chdir(base).map_err(failed("chdir"))?;
    for name in ["new", "old"] {
        fs::create_dir(name).map_err(failed_io(format!("creating {name}")))?;
    }
    mount(Some("new"), "new", none, MsFlags::MS_BIND, none).map_err(failed("mounting the new root"))?;
    pivot_root(".", "old").map_err(failed("pivot_root"))?;
    chdir("/").map_err(failed("chdir"))?;

    let (old, new) = (Path::new("/old"), Path::new("/new"));
    // These come before the visible files, some of which may be below them.
    for path in ["dev/shm", "tmp"] {
        let path = new.join(path);
        fs::create_dir_all(&path).map_err(failed_io(format!("creating {}", path.display())))?;
        mount(Some("tmpfs"), &path, Some("tmpfs"), hidden | MsFlags::MS_NOEXEC, Some(SCRATCH))
            .map_err(failed(format!("mounting a tmpfs on {}", path.display())))?;
    }
    for entry in visible {
        show(entry, visible, old, new)?;
    }
    let proc = new.join("proc");
    fs::create_dir_all(&proc).map_err(failed_io("creating /proc"))?;
    let mounted = if own_processes {
        mount(Some("proc"), &proc, Some("proc"), hidden | MsFlags::MS_NOEXEC, none)
    } else {
        Err(nix::Error::EPERM)
    };
    if mounted.is_err() {
        // The process can list other processes, but they have other users.
        mount(Some(&old.join("proc")), &proc, none, MsFlags::MS_BIND | MsFlags::MS_REC, none)
            .map_err(failed("mounting /proc"))?;
    }

    // From here on, no path leads to the old tree.
    mount(none, "/old", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
        .map_err(failed("making mounts private"))?;
    umount2("/old", MntFlags::MNT_DETACH).map_err(failed("detaching the old root"))?;
    chdir(new).map_err(failed("chdir"))?;
    pivot_root(".", ".").map_err(failed("pivot_root"))?;
    umount2(".", MntFlags::MNT_DETACH).map_err(failed("detaching the outer root"))?;
    chdir("/").map_err(failed("chdir"))?;
    set_attributes(Path::new("/"), libc::MOUNT_ATTR_RDONLY, false)
        .map_err(failed_io("making / read-only"))?;
    if own_processes && mounted.is_err() {
        return Err(("mounting a /proc of its own".into(), io::ErrorKind::PermissionDenied.into()));
    }
    Ok(())
}

/// The same path below another root.
fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// Resolves symbolic links as if `root` were `/`.
fn resolve(root: &Path, path: &Path) -> Option<PathBuf> {
    let mut done = PathBuf::from("/");
    let mut todo: Vec<_> = path.components().rev().map(|part| part.as_os_str().to_owned()).collect();
    let mut links = 0;
    while let Some(part) = todo.pop() {
        match part.as_bytes() {
            b"/" => done = PathBuf::from("/"),
            b"." => {}
            b".." => drop(done.pop()),
            _ => {
                let next = done.join(&part);
                let kind = fs::symlink_metadata(below(root, &next)).ok()?.file_type();
                if !kind.is_symlink() {
                    done = next;
                    continue;
                }
                links += 1;
                if links > 40 {
                    return None;
                }
                let target = fs::read_link(below(root, &next)).ok()?;
                todo.extend(target.components().rev().map(|part| part.as_os_str().to_owned()));
            }
        }
    }
    Some(done)
}

/// Shows one file or folder of `old` in `new`, under its own path.
fn show(entry: &Visible, all: &[Visible], old: &Path, new: &Path) -> Result<(), Failure> {
    let shown = entry.path.display().to_string();
    let Some(source) = resolve(old, &entry.path) else { return Ok(()) };
    // Inside another visible folder the path is there already, with the links on its way, and none of it can
    // be made here. Links are resolved by what they lead to.
    let inside = |path: &Path| {
        let mut parents = all.iter().filter(|other| other.access == Access::Read && other.path != entry.path);
        parents.any(|other| path.starts_with(&other.path) && resolve(old, &other.path).is_some())
    };
    let is_there = entry.access == Access::Read && inside(&entry.path);
    if is_there && inside(&source) {
        return Ok(());
    }
    let at = below(new, if is_there { &source } else { &entry.path });
    if let Some(folder) = at.parent() {
        // A folder that another entry has mounted may be read-only; then it already contains this entry.
        if let Err(e) = fs::create_dir_all(folder) {
            return Err((format!("creating {}", folder.display()), e));
        }
    }
    // The path is a link to something that is visible anyway, such as /lib to /usr/lib.
    if source != entry.path && all.iter().any(|other| source.starts_with(&other.path)) {
        return match fs::read_link(below(old, &entry.path)).and_then(|target| symlink(target, &at)) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            // One of the path's parents is a link.
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => mount_at(entry, &below(old, &source), &at),
            result => result.map_err(failed_io(format!("linking {shown}"))),
        };
    }
    mount_at(entry, &below(old, &source), &at)
}

fn mount_at(entry: &Visible, source: &Path, at: &Path) -> Result<(), Failure> {
    let shown = entry.path.display();
    let kind = fs::metadata(source).map_err(failed_io(format!("looking at {shown}")))?.file_type();
    if entry.access == Access::Device && !kind.is_char_device() && !kind.is_dir() {
        return Ok(());
    }
    // The mount point. It exists already if a parent is visible.
    if !at.exists() {
        let made = if kind.is_dir() {
            fs::create_dir(at)
        } else {
            fs::File::create(at).and_then(|file| file.set_permissions(fs::Permissions::from_mode(0o600)))
        };
        made.map_err(failed_io(format!("creating {shown}")))?;
    }
    let none: Option<&str> = None;
    mount(Some(source), at, none, MsFlags::MS_BIND | MsFlags::MS_REC, none)
        .map_err(failed(format!("mounting {shown}")))?;
    let attributes = match entry.access {
        Access::Read => libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV,
        Access::Write => libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOEXEC,
        Access::Device => libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NOEXEC,
    };
    set_attributes(at, attributes, true).map_err(failed_io(format!("restricting {shown}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_followed_inside_the_root() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        fs::create_dir_all(root.join("usr/lib")).unwrap();
        symlink("usr/lib", root.join("lib")).unwrap();
        symlink("/lib/../../..", root.join("up")).unwrap();
        symlink("loop", root.join("loop")).unwrap();
        assert_eq!(resolve(root, Path::new("/lib")), Some("/usr/lib".into()));
        assert_eq!(resolve(root, Path::new("/up/usr/../lib")), Some("/usr/lib".into()));
        assert_eq!(resolve(root, Path::new("/loop")), None);
        assert_eq!(resolve(root, Path::new("/missing")), None);
    }
}
