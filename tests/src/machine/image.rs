//! A machine's root file system: an initramfs (a cpio archive in the `newc` format), written from memory.

use super::{kernel::KernelFiles, setup};
use crate::tree;
use anyhow::{Context, Result, ensure};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What a guest needs to run programs linked on this host: all parts of glibc, and the C++ runtime.
const HOST_LIBRARIES: [&str; 12] = [
    "ld-linux-x86-64.so.2",
    "libc.so.6",
    "libm.so.6",
    "libdl.so.2",
    "librt.so.1",
    "libpthread.so.0",
    "libutil.so.1",
    "libresolv.so.2",
    "libnss_files.so.2",
    "libgcc_s.so.1",
    "libstdc++.so.6",
    "libz.so.1",
];

/// Programs of at least so many bytes are stripped: the daemons and rgpuctl.
const LARGE: usize = 8 << 20;

enum Entry {
    Directory,
    File { mode: u32, data: Vec<u8> },
    Link(PathBuf),
}

/// Files for an initramfs. Paths are absolute paths in the guest; missing parent directories are created.
#[derive(Default)]
pub struct Image {
    entries: BTreeMap<PathBuf, Entry>,
}

impl Image {
    /// An empty image.
    pub fn new() -> Self {
        Self::default()
    }

    fn insert(&mut self, guest: &Path, entry: Entry) {
        for parent in guest.ancestors().skip(1).filter(|p| p.parent().is_some()) {
            self.entries.entry(parent.to_path_buf()).or_insert(Entry::Directory);
        }
        self.entries.insert(guest.to_path_buf(), entry);
    }

    /// Adds a directory.
    pub fn directory(&mut self, guest: impl AsRef<Path>) {
        self.insert(guest.as_ref(), Entry::Directory);
    }

    /// Adds a symbolic link to `target`.
    pub fn link(&mut self, guest: impl AsRef<Path>, target: impl AsRef<Path>) {
        self.insert(guest.as_ref(), Entry::Link(target.as_ref().to_path_buf()));
    }

    /// Adds a file with these contents; `mode` is the permissions.
    pub fn contents(&mut self, guest: impl AsRef<Path>, mode: u32, data: impl Into<Vec<u8>>) {
        self.insert(guest.as_ref(), Entry::File { mode, data: data.into() });
    }

    /// Adds a host's file, with its permissions; a symbolic link is followed. A large program loses its debug
    /// information, which no guest reads, and which would take a translated guest seconds to unpack.
    pub fn file(&mut self, host: &Path, guest: impl AsRef<Path>) -> Result<()> {
        let mut data =
            fs::read(host).with_context(|| format!("cannot read {} for the guest", host.display()))?;
        if data.len() >= LARGE && data.starts_with(b"\x7fELF") {
            data = without_debug_information(host)?;
        }
        let mode = fs::metadata(host)?.permissions().mode() & 0o7777;
        self.contents(guest, mode, data);
        Ok(())
    }

    /// Adds a host's directory with everything below it; symbolic links stay links.
    pub fn tree(&mut self, host: &Path, guest: impl AsRef<Path>) -> Result<()> {
        let guest = guest.as_ref();
        self.directory(guest);
        for entry in
            fs::read_dir(host).with_context(|| format!("cannot read {} for the guest", host.display()))?
        {
            let entry = entry?;
            let (from, to) = (entry.path(), guest.join(entry.file_name()));
            let kind = entry.file_type()?;
            if kind.is_symlink() {
                self.link(to, fs::read_link(from)?);
            } else if kind.is_dir() {
                self.tree(&from, to)?;
            } else if kind.is_file() {
                self.file(&from, to)?;
            }
        }
        Ok(())
    }

    /// Adds a host's program and the shared libraries it is linked to, where the program's loader looks for
    /// them.
    pub fn program(&mut self, host: &Path, guest: impl AsRef<Path>) -> Result<()> {
        self.file(host, guest)?;
        // ldd fails for a static program, and says so.
        let list = setup::run(Command::new("ldd").arg(host)).unwrap_or_default();
        let paths: BTreeSet<&str> = list.split_whitespace().filter(|word| word.starts_with('/')).collect();
        for path in paths {
            self.file(Path::new(path), path)?;
        }
        Ok(())
    }

    /// Adds this host's C and C++ run-time libraries.
    pub fn host_libraries(&mut self) -> Result<()> {
        let cache = setup::run(Command::new("/sbin/ldconfig").arg("-p"))?;
        for name in HOST_LIBRARIES {
            let found = cache.lines().find_map(|line| {
                let (entry, path) = line.split_once(" => ")?;
                (entry.trim().starts_with(&format!("{name} ")) && entry.contains("x86-64"))
                    .then_some(path.trim())
            });
            // Newer hosts lack the old names of what is now part of glibc, and do not need them.
            if let Some(path) = found {
                self.file(Path::new(path), path)?;
            }
        }
        self.file(Path::new("/lib64/ld-linux-x86-64.so.2"), "/lib64/ld-linux-x86-64.so.2")
    }

    /// Adds what every machine has: the agent as the first process, busybox as its shell, and the modules to
    /// load, in this order.
    pub(crate) fn base(&mut self, kernel: &KernelFiles, modules: &[String], extra: &[PathBuf]) -> Result<()> {
        setup::need_program("busybox", "busybox-static")?;
        let busybox = Path::new("/bin/busybox");
        self.file(&agent()?, "/init")?;
        self.file(busybox, "/bin/busybox")?;
        let applets = setup::run(Command::new(busybox).arg("--list"))?;
        ensure!(applets.lines().any(|a| a == "sh"), "{} has no shell", busybox.display());
        for applet in applets.lines().filter(|a| *a != "busybox") {
            self.link(Path::new("/bin").join(applet), "busybox");
        }
        for directory in ["/dev", "/proc", "/sys", "/tmp", "/run", "/root", "/lib64", "/usr/local/bin"] {
            self.directory(directory);
        }
        self.contents(
            "/etc/passwd",
            0o644,
            "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n",
        );
        self.contents("/etc/group", 0o644, "root:x:0:\nuser:x:1000:\n");
        self.contents("/etc/hosts", 0o644, "127.0.0.1 localhost\n");

        let mut order = Vec::new();
        let mut seen = BTreeSet::new();
        for module in modules {
            for file in kernel.module(module)? {
                if seen.insert(file.clone()) {
                    order.push(self.module(&file)?);
                }
            }
        }
        for file in extra {
            order.push(self.module(file)?);
        }
        self.contents("/etc/modules", 0o644, order.iter().map(|m| format!("{m}\n")).collect::<String>());
        Ok(())
    }

    /// Adds a module, uncompressed, and returns its path in the guest.
    fn module(&mut self, host: &Path) -> Result<String> {
        let name = host.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let guest = format!("/lib/modules/{}", name.trim_end_matches(".xz"));
        if name.ends_with(".xz") {
            setup::need_program("xz", "xz-utils")?;
            let output = Command::new("xz").arg("-dc").arg(host).output().context("cannot start xz")?;
            ensure!(output.status.success(), "xz cannot unpack {}", host.display());
            self.contents(&guest, 0o644, output.stdout);
        } else {
            self.file(host, &guest)?;
        }
        Ok(guest)
    }

    /// The archive.
    pub fn to_cpio(&self) -> Vec<u8> {
        let mut archive = Vec::new();
        for (inode, (path, entry)) in self.entries.iter().enumerate() {
            let name = path.strip_prefix("/").unwrap_or(path).to_string_lossy();
            match entry {
                Entry::Directory => member(&mut archive, inode, &name, 0o40755, &[]),
                Entry::File { mode, data } => member(&mut archive, inode, &name, 0o100000 | mode, data),
                Entry::Link(target) => {
                    member(&mut archive, inode, &name, 0o120777, target.to_string_lossy().as_bytes());
                }
            }
        }
        member(&mut archive, 0, "TRAILER!!!", 0, &[]);
        archive
    }
}

/// A program as it is after `strip`, with its symbols.
fn without_debug_information(program: &Path) -> Result<Vec<u8>> {
    setup::need_program("strip", "binutils")?;
    let stripped = tempfile::NamedTempFile::new().context("cannot create a file")?;
    setup::run(Command::new("strip").arg("--strip-debug").arg("-o").arg(stripped.path()).arg(program))?;
    fs::read(stripped.path()).context("cannot read what strip has written")
}

/// Appends one member: header, name and data, the latter two padded to four bytes.
fn member(archive: &mut Vec<u8>, inode: usize, name: &str, mode: u32, data: &[u8]) {
    let fields = [inode as u32, mode, 0, 0, 1, 0, data.len() as u32, 0, 0, 0, 0, name.len() as u32 + 1, 0];
    archive.extend_from_slice(b"070701");
    for field in fields {
        archive.extend_from_slice(format!("{field:08x}").as_bytes());
    }
    archive.extend_from_slice(name.as_bytes());
    archive.push(0);
    archive.resize(archive.len().next_multiple_of(4), 0);
    archive.extend_from_slice(data);
    archive.resize(archive.len().next_multiple_of(4), 0);
}

/// The guest's first process, compiled if necessary.
pub(super) fn agent() -> Result<PathBuf> {
    const SOURCE: &str = include_str!("agent.c");
    let program = setup::build_dir().join("agent");
    setup::once("agent", SOURCE, || {
        static_program(&[("agent.c".to_owned(), SOURCE.to_owned())].into(), &program)
    })?;
    Ok(program)
}

/// Compiles a C program of `guest-driver/tests` statically, with the driver's user API available, so that it
/// needs nothing in the guest: from `NAME.c`, `NAME_….c` and `NAME.h`. Returns the program's path. It is
/// compiled again when one of them changes.
pub fn guest_program(name: &str) -> Result<PathBuf> {
    let folder = tree::root().join("guest-driver/tests");
    let api = tree::root().join("guest-driver/include/uapi/linux/virtio_rgpu.h");
    let mut sources = BTreeMap::new();
    for entry in fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry?.path();
        let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let part = file.strip_prefix(name).and_then(|rest| rest.rsplit_once('.'));
        if part.is_some_and(|(part, kind)| {
            matches!(kind, "c" | "h") && (part.is_empty() || part.starts_with('_'))
        }) {
            sources.insert(file, text(&path)?);
        }
    }
    let key = sources.values().fold(text(&api)?, |key, source| key + source);
    let program = setup::build_dir().join("programs").join(name);
    setup::once(&format!("program-{name}"), &key, || {
        fs::create_dir_all(setup::build_dir().join("programs"))?;
        static_program(&sources, &program)
    })?;
    Ok(program)
}

fn text(file: &Path) -> Result<String> {
    fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))
}

/// Compiles a program from these files, by their names.
fn static_program(sources: &BTreeMap<String, String>, program: &Path) -> Result<()> {
    setup::need_program("gcc", "gcc")?;
    let dir = tempfile::tempdir()?;
    for (name, source) in sources {
        fs::write(dir.path().join(name), source)?;
    }
    let include = tree::root().join("guest-driver/include/uapi");
    setup::run(
        Command::new("gcc")
            .args(["-static", "-O2", "-Wall", "-Wextra", "-Wno-unused-result", "-Werror", "-pthread"])
            .arg("-I")
            .arg(include)
            .arg("-o")
            .arg(program)
            .args(sources.keys().filter(|name| name.ends_with(".c")).map(|name| dir.path().join(name))),
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_lists_parents_before_children_and_ends_with_a_trailer() {
        let mut image = Image::new();
        image.contents("/a/b/file", 0o644, "text");
        let archive = image.to_cpio();
        let text = String::from_utf8_lossy(&archive);
        let at = |name: &str| text.find(name).unwrap();
        assert!(at("a\0") < at("a/b\0"));
        assert!(at("a/b\0") < at("a/b/file\0"));
        assert!(at("a/b/file\0") < at("text"));
        assert!(at("text") < at("TRAILER!!!\0"));
        assert_eq!(archive.len() % 4, 0);
    }

    #[test]
    fn debug_information_is_left_out() {
        // Its own program, because this one has no debug information where Cargo was told to leave it out.
        let dir = tempfile::tempdir().unwrap();
        let [source, program] = ["main.c", "main"].map(|name| dir.path().join(name));
        fs::write(&source, "int main(void) { return 0; }\n").unwrap();
        setup::need_program("gcc", "gcc").unwrap();
        setup::run(Command::new("gcc").arg("-g").arg("-o").arg(&program).arg(&source)).unwrap();
        let (before, after) = (fs::read(&program).unwrap(), without_debug_information(&program).unwrap());
        let has = |data: &[u8], name: &[u8]| data.windows(name.len()).any(|bytes| bytes == name);
        let [lines, symbols] = [b".debug_line\0".as_slice(), b".symtab\0"];
        assert!(has(&before, lines) && !has(&after, lines));
        assert!(after.starts_with(b"\x7fELF") && has(&after, symbols));
    }

    #[test]
    fn a_member_header_is_110_bytes_of_ascii() {
        let mut archive = Vec::new();
        member(&mut archive, 7, "x", 0o100644, b"abc");
        assert_eq!(&archive[..14], b"07070100000007");
        assert_eq!(&archive[110..112], b"x\0");
        assert_eq!(&archive[112..116], b"abc\0");
    }
}
