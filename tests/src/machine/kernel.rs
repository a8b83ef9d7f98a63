//! Kernels to boot, and `virtio_rgpu.ko` built for each of them.

use super::setup;
use crate::tree;
use anyhow::{Context, Result, bail, ensure};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// One of Debian's kernels: a cloud kernel unless said otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Kernel {
    /// 6.1, of Debian 12 (bookworm).
    #[default]
    V6_1,
    /// 6.1, of Debian 12 (bookworm), in full: with RDMA and with drivers of real network cards.
    V6_1Full,
    /// 6.12, of Debian 13 (trixie).
    V6_12,
    /// The newest 7.x of trixie's backports.
    V7,
}

impl Kernel {
    /// All cloud kernels: those that the driver is built for.
    pub const ALL: [Kernel; 3] = [Kernel::V6_1, Kernel::V6_12, Kernel::V7];

    /// The beginning of the Debian version of its packages.
    fn version_prefix(self) -> &'static str {
        match self {
            Kernel::V6_1 | Kernel::V6_1Full => "6.1.",
            Kernel::V6_12 => "6.12.",
            Kernel::V7 => "7.",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Kernel::V6_1 => "kernel-6.1",
            Kernel::V6_1Full => "kernel-6.1-full",
            Kernel::V6_12 => "kernel-6.12",
            Kernel::V7 => "kernel-7",
        }
    }

    /// The package that points to the newest headers of its kind.
    fn headers_package(self) -> &'static str {
        if self == Kernel::V6_1Full { "linux-headers-amd64" } else { "linux-headers-cloud-amd64" }
    }

    /// The kernel's files, fetched and unpacked if missing. `RGPU_TEST_KERNEL`, a folder made by
    /// `guest-driver/tests/debug-kernel.sh`, replaces the usual kernel.
    pub fn files(self) -> Result<KernelFiles> {
        if self == Kernel::V6_1
            && let Some(root) = std::env::var_os("RGPU_TEST_KERNEL")
        {
            let root = PathBuf::from(root);
            let version = read(&root.join("version"))?.trim().to_owned();
            return Ok(KernelFiles { version, root, chroot: false });
        }
        let chroot = match self {
            Kernel::V6_1 | Kernel::V6_1Full => None,
            Kernel::V6_12 | Kernel::V7 => Some(setup::trixie()?),
        };
        let root = chroot.clone().unwrap_or_else(|| setup::build_dir().join("bookworm"));
        let version_file = setup::build_dir().join(format!("{}.version", self.name()));
        setup::once(self.name(), "3", || {
            setup::announce(&format!("fetching {}", self.name()));
            setup::need_program("depmod", "kmod")?;
            let apt = Apt { chroot: chroot.as_deref() };
            let target = if chroot.is_some() { Path::new("/") } else { root.as_path() };
            fs::create_dir_all(&root)?;
            let version = setup::with_lists(chroot.as_deref(), || {
                let version = apt.kernel_version(self)?;
                let mut packages = BTreeSet::new();
                apt.closure(&format!("linux-headers-{version}"), &mut packages)?;
                apt.closure(&format!("linux-image-{version}"), &mut packages)?;
                let packages: Vec<String> = packages.into_iter().collect();
                setup::unpack(&packages, target, chroot.as_deref())?;
                Ok(version)
            })?;
            if chroot.is_none() {
                rehome_headers(&root, &version)?;
            }
            setup::run(Command::new("/sbin/depmod").arg("-b").arg(&root).arg(&version))?;
            fs::write(&version_file, &version)?;
            Ok(())
        })?;
        let version = fs::read_to_string(&version_file)
            .with_context(|| format!("cannot read {}", version_file.display()))?;
        Ok(KernelFiles { version, root, chroot: chroot.is_some() })
    }

    /// Builds `virtio_rgpu.ko` for this kernel, unless it exists already, and returns its path. A compiler
    /// warning is an error. The module has no BTF, which nothing here reads and which would need another
    /// package.
    pub fn driver(self) -> Result<PathBuf> {
        let files = self.files()?;
        let sources = tree::root().join("guest-driver");
        let key = source_key(&sources)?;
        let built = setup::build_dir().join("driver").join(&files.version);
        if files.chroot {
            setup::trixie_with_compiler()?;
        }
        setup::once(&format!("driver-{}", files.version), &key, || files.build_driver(&sources, &built))?;
        Ok(built.join("virtio_rgpu.ko"))
    }

    /// Builds `virtio_rgpu.ko` in the new folder `folder` from sources that a test has changed there.
    pub fn changed_driver(self, folder: &Path, change: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
        let files = self.files()?;
        ensure!(!files.chroot, "{self:?} has its headers in another Debian");
        let sources = folder.join("changed");
        setup::run(Command::new("cp").arg("-r").arg(tree::root().join("guest-driver")).arg(&sources))?;
        change(&sources)?;
        files.build_driver(&sources, folder)?;
        Ok(folder.join("virtio_rgpu.ko"))
    }
}

/// A kernel, unpacked.
#[derive(Clone, Debug)]
pub struct KernelFiles {
    /// Its release, as `uname -r` prints it.
    pub version: String,
    root: PathBuf,
    chroot: bool,
}

impl KernelFiles {
    /// The compressed kernel, for QEMU's `-kernel`.
    pub fn image(&self) -> PathBuf {
        let boot = self.root.join(format!("boot/vmlinuz-{}", self.version));
        // Newer packages keep it with the modules.
        if boot.exists() { boot } else { self.modules_dir().join("vmlinuz") }
    }

    /// What modules are built against.
    pub fn headers(&self) -> PathBuf {
        self.root.join(format!("usr/src/linux-headers-{}", self.version))
    }

    /// Builds the driver from `sources` into `built`, with its objects in a folder `source` there, or in the
    /// other Debian.
    fn build_driver(&self, sources: &Path, built: &Path) -> Result<()> {
        setup::announce(&format!("building the driver for Linux {}", self.version));
        setup::need_program("make", "make")?;
        setup::need_program("gcc", "gcc")?;
        // The kernel's objtool, which the build runs.
        setup::need_library("libelf.so.1", "libelf1")?;
        let inside = format!("/driver-{}", self.version);
        let place = if self.chroot { self.root.join(&inside[1..]) } else { built.join("source") };
        let _ = fs::remove_dir_all(&place);
        fs::create_dir_all(built)?;
        setup::run(Command::new("cp").arg("-r").arg(sources).arg(&place))?;
        let mut make = if self.chroot {
            // The kernel's tools look at /proc; its mount must not outlive the build.
            let mut command = Command::new("unshare");
            let script = "mount -t proc proc \"$0/proc\" && exec chroot \"$0\" make \"$@\"";
            command.args(["--mount", "sh", "-c", script]).arg(&self.root);
            command.arg(format!("KDIR=/usr/src/linux-headers-{}", self.version));
            command.arg("-C").arg(&inside);
            command
        } else {
            let mut command = Command::new("make");
            command.arg(format!("KDIR={}", self.headers().display())).arg("-C").arg(&place);
            command
        };
        let output =
            setup::watch(make.args(["KCFLAGS=-Werror", "CONFIG_DEBUG_INFO_BTF_MODULES=", "modules"]))
                .with_context(|| format!("the driver does not build for {}", self.version))?;
        ensure!(
            !output.contains("warning:"),
            "the driver builds with warnings for {}:\n{output}",
            self.version
        );
        fs::copy(place.join("virtio_rgpu.ko"), built.join("virtio_rgpu.ko"))?;
        Ok(())
    }

    /// Puts modules and headers into a Debian 12, where the kernel's packages would have them.
    pub(super) fn install(&self, debian: &Path) -> Result<()> {
        ensure!(!self.chroot, "Linux {} is not that of Debian 12", self.version);
        let (sources, tools) = (debian.join("usr/src"), debian.join("usr/lib"));
        fs::create_dir_all(tools.join("modules"))?;
        fs::create_dir_all(&sources)?;
        let copy =
            |from: &Path, to: &Path| setup::run(Command::new("cp").arg("-a").arg(from).arg(to)).map(drop);
        copy(&self.modules_dir(), &tools.join("modules"))?;
        copy(&self.headers(), &sources)?;
        // The parts that several kernels of a version share.
        let common = self.version.split('-').take(2).collect::<Vec<_>>().join("-");
        let common = format!("linux-headers-{common}-common");
        copy(&self.root.join("usr/src").join(&common), &sources)?;
        // Here it points to the folder that the headers were unpacked into.
        let makefile = sources.join(format!("linux-headers-{}/Makefile", self.version));
        fs::write(&makefile, format!("include /usr/src/{common}/Makefile\n"))
            .with_context(|| format!("cannot write {}", makefile.display()))?;
        let series = self.version.split('.').take(2).collect::<Vec<_>>().join(".");
        copy(&self.root.join(format!("usr/lib/linux-kbuild-{series}")), &tools)
    }

    fn modules_dir(&self) -> PathBuf {
        // In trixie /lib is a link to /usr/lib; the packages of bookworm unpack into /lib.
        self.root.join(format!("lib/modules/{}", self.version))
    }

    /// The files of a module and of those it needs, in loading order; none if it is built into the kernel.
    pub fn module(&self, name: &str) -> Result<Vec<PathBuf>> {
        let dir = self.modules_dir();
        let wanted = name.replace('-', "_");
        let dependencies = read(&dir.join("modules.dep"))?;
        let by_name: BTreeMap<String, &str> =
            dependencies.lines().filter_map(|l| Some((stem(l.split_once(':')?.0), l))).collect();
        if let Some((file, needs)) = by_name.get(&wanted).and_then(|line| line.split_once(':')) {
            // modules.dep lists the dependencies last first.
            return Ok(needs.split_whitespace().rev().chain([file]).map(|f| dir.join(f)).collect());
        }
        if read(&dir.join("modules.builtin"))?.lines().any(|line| stem(line) == wanted) {
            return Ok(Vec::new());
        }
        bail!("kernel {} has no module {name}", self.version)
    }
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// A module's name, from its path.
fn stem(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split('.').next().unwrap_or(file).replace('-', "_")
}

/// The headers' makefile names another package's directory by an absolute path.
fn rehome_headers(root: &Path, version: &str) -> Result<()> {
    let makefile = root.join(format!("usr/src/linux-headers-{version}/Makefile"));
    let text = read(&makefile)?.replace("include /usr/src", &format!("include {}/usr/src", root.display()));
    fs::write(&makefile, text)?;
    Ok(())
}

/// A text that changes whenever a source file does.
fn source_key(dir: &Path) -> Result<String> {
    let list = setup::run(
        Command::new("sh")
            .arg("-c")
            .arg("cd \"$0\" && find Kbuild Makefile src include -type f | LC_ALL=C sort | xargs sha256sum")
            .arg(dir),
    )?;
    ensure!(!list.is_empty(), "{} has no sources", dir.display());
    Ok(list)
}

/// What apt knows, on this host or in the private trixie.
struct Apt<'a> {
    chroot: Option<&'a Path>,
}

impl Apt<'_> {
    fn cache(&self, args: &[&str]) -> Result<String> {
        setup::run(setup::inside(self.chroot, "apt-cache").args(args))
    }

    /// The `uname -r` of the kernel that the metapackage of that series points to.
    fn kernel_version(&self, kernel: Kernel) -> Result<String> {
        let meta = kernel.headers_package();
        let shown = self.cache(&["show", meta])?;
        let prefix = format!("linux-headers-{}", kernel.version_prefix());
        shown
            .lines()
            .filter_map(|line| line.strip_prefix("Depends: "))
            .flat_map(|depends| depends.split([',', ' ']))
            .find_map(|name| {
                name.starts_with(&prefix).then(|| name.trim_start_matches("linux-headers-").to_owned())
            })
            .with_context(|| {
                format!("apt knows no {meta} {}* (Debian 12 is needed)", kernel.version_prefix())
            })
    }

    /// Adds `package` and the kernel's other packages that it needs.
    fn closure(&self, package: &str, found: &mut BTreeSet<String>) -> Result<()> {
        if !found.insert(package.to_owned()) {
            return Ok(());
        }
        let shown = self.cache(&["show", "--no-all-versions", package])?;
        let depends = shown.lines().find_map(|line| line.strip_prefix("Depends: ")).unwrap_or_default();
        for name in depends.split([',', '|']).filter_map(|d| d.split_whitespace().next()) {
            const PARTS: [&str; 6] = ["base", "headers", "kbuild", "image", "binary", "modules"];
            let part = PARTS
                .iter()
                .map(|part| format!("linux-{part}-"))
                .find_map(|prefix| name.strip_prefix(&prefix));
            if part.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit())) {
                self.closure(name, found)?;
            }
        }
        Ok(())
    }
}
