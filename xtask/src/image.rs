//! `cargo xtask image`: makes a disk for guests: Debian 12 with rgpu's guest packages and cloud-init.
//!
//! debootstrap and apt install the system into a folder, where DKMS builds the driver at this machine's
//! speed. mke2fs makes the file system from the folder, and GRUB's two parts are written before it. So
//! nothing is mounted, and no loop device is needed. `packaging/image/` has the files that no package
//! contains.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use rgpu_tests::machine::setup;
use rgpu_tests::tree::{self, Build};

use crate::progress::Step;
use crate::{debian, package, process};

/// Build a disk for guests: Debian 12 with rgpu's driver and libraries, and cloud-init.
///
/// Run it as root on Debian 12 or newer. Next to the disk, it leaves the guest's kernel and initial file
/// system (.vmlinuz, .initrd), for VMMs that start these themselves. docs/first-guest.md boots it. rgpu's
/// packages for it are made in target/image/packages.
#[derive(Args)]
#[command(after_long_help = "Examples:
  cargo xtask image                                target/image/rgpu-guest.qcow2, 4 GiB
  cargo xtask image --output guest.raw --size 20   a plain file of 20 GiB, with holes
  cargo xtask image --package nvidia-smi           with more of Debian's packages, also from non-free

A guest takes users, ssh keys, its network and commands from a seed: a disk with the label cidata \
that has the files user-data and meta-data of cloud-init's NoCloud. Without one, nobody can log in. \
If the disk has been enlarged (qemu-img resize), the guest's file system grows when it boots.")]
pub struct Arguments {
    /// The disk. The file's extension is the format: .qcow2 or .raw. By default target/image/rgpu-guest.qcow2
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Size of the disk in GiB
    #[arg(long, value_name = "GIB", default_value_t = 4, value_parser = clap::value_parser!(u64).range(3..=2000))]
    size: u64,
    /// One more Debian package to install; may be repeated
    #[arg(long, value_name = "NAME")]
    package: Vec<String>,
    /// Use Debian's full kernel instead of the cloud kernel, which only has drivers for virtual hardware
    #[arg(long)]
    full_kernel: bool,
    /// Build rgpu without optimization, which is quicker, to try the disk
    #[arg(long)]
    debug: bool,
}

/// Debian's release in the guest.
const SUITE: &str = "bookworm";
/// The parts of Debian that packages may come from: `nvidia-smi` is not in `main`.
const COMPONENTS: &str = "main contrib non-free";
/// The file system's label. The files in `packaging/image/` use it, too.
const LABEL: &str = "rgpu-guest";
/// rgpu's packages in the guest.
const OURS: [&str; 4] = ["rgpu-guest", "rgpu-guest-dkms", "rgpu-libs", "rgpuctl"];
/// Debian's packages in the guest besides its essential ones, apt, and the kernel.
const DEBIAN: &[&str] = &[
    "ca-certificates",
    "cloud-guest-utils",
    "cloud-init",
    "dbus",
    "dkms",
    "e2fsprogs",
    "fdisk",
    "gcc",
    "initramfs-tools",
    "iproute2",
    "kmod",
    "less",
    "make",
    "openssh-server",
    "pciutils",
    "procps",
    "sudo",
    "systemd-resolved",
    "systemd-sysv",
    "systemd-timesyncd",
    "udev",
    "zstd",
];
/// The GRUB modules in its core, which find and start the kernel. The disk needs no others.
const GRUB_MODULES: &[&str] = &[
    "biosdisk",
    "part_msdos",
    "ext2",
    "normal",
    "configfile",
    "linux",
    "serial",
    "terminal",
    "echo",
    "test",
];
const GRUB: &str = "/usr/lib/grub/i386-pc";

const SECTOR: u64 = 512;
/// Where the partition begins, in bytes. GRUB's core is before it.
const PARTITION: u64 = 1 << 20;
/// Bytes of code in the first sector. The disk's number and the partition table follow.
const BOOT_CODE: usize = 440;

/// The disk to make.
pub struct Wanted {
    /// The disk's file, with the extension `.qcow2` or `.raw`.
    pub output: PathBuf,
    /// Its size in bytes.
    size: u64,
    more: Vec<String>,
    /// The kind of kernel: `cloud-amd64` or `amd64`.
    kernel: &'static str,
    build: Build,
}

impl Wanted {
    /// The disk that the default options make.
    pub fn usual() -> Wanted {
        Wanted {
            output: folder().join("rgpu-guest.qcow2"),
            size: 4 << 30,
            more: Vec::new(),
            kernel: "cloud-amd64",
            build: Build::Release,
        }
    }

    /// A file next to the disk, with another extension.
    fn beside(&self, ending: &str) -> PathBuf {
        self.output.with_extension(ending)
    }
}

fn folder() -> PathBuf {
    tree::target().join("image")
}

/// The folder of the packages that are installed in the guest. Those of `cargo xtask package`, which may have
/// another revision and are optimized, stay as they are.
fn packages() -> PathBuf {
    folder().join("packages")
}

/// Makes the disk that a command line describes.
pub fn image(arguments: &Arguments) -> Result<()> {
    let mut wanted =
        Wanted { size: arguments.size << 30, more: arguments.package.clone(), ..Wanted::usual() };
    if let Some(output) = &arguments.output {
        // Commands run in the root of the tree.
        wanted.output = std::path::absolute(output).context("the output has no absolute path")?;
    }
    if arguments.full_kernel {
        wanted.kernel = "amd64";
    }
    if arguments.debug {
        wanted.build = Build::Debug;
    }
    make(&wanted)?;
    println!("{} is ready; docs/first-guest.md boots it", wanted.output.display());
    Ok(())
}

/// Makes a disk, and puts its kernel and initial file system next to it.
pub fn make(wanted: &Wanted) -> Result<()> {
    let format = format(&wanted.output)?;
    ensure!(nix::unistd::geteuid().is_root(), "making a disk for guests takes root (debootstrap, chroot)");
    let tools = ["debootstrap", "e2fsprogs", "fdisk", "grub-common", "grub-pc-bin", "qemu-utils"];
    debian::packages(&tools, "making a disk for guests")?;
    package::make(&packages(), wanted.build, 1, package::QUICK)?;

    let (folder, log) = (folder(), process::log("image")?);
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let root = folder.join("root");
    remove(&root)?;
    let release = install(wanted, &root, &log)?;

    let step = Step::spinner("making the disk");
    let output = wanted.output.parent().filter(|folder| !folder.as_os_str().is_empty());
    if let Some(output) = output {
        fs::create_dir_all(output).with_context(|| format!("cannot create {}", output.display()))?;
    }
    for (file, ending) in [("vmlinuz", "vmlinuz"), ("initrd.img", "initrd")] {
        copy(&root.join(format!("boot/{file}-{release}")), &wanted.beside(ending))?;
    }
    let raw = if format == "raw" { wanted.output.clone() } else { folder.join("disk.raw") };
    step.note("file system");
    disk(&root, &raw, wanted.size, &log)?;
    remove(&root)?;
    if format != "raw" {
        step.note(format);
        let mut convert = Command::new("qemu-img");
        convert.args(["convert", "-O", format]).arg(&raw).arg(&wanted.output);
        process::run(&mut convert, &log)?;
        fs::remove_file(&raw).with_context(|| format!("cannot remove {}", raw.display()))?;
    }
    step.done(&format!("{}, Linux {release}", wanted.output.display()));
    Ok(())
}

/// qemu-img's name for the format that a file's extension names.
fn format(output: &Path) -> Result<&'static str> {
    match output.extension().and_then(|ending| ending.to_str()) {
        Some("qcow2") => Ok("qcow2"),
        Some("raw") => Ok("raw"),
        _ => bail!("{} must end in .qcow2 or .raw, which is its format", output.display()),
    }
}

/// Installs the system into `root`. Returns the kernel's release, as `uname -r` gives it.
fn install(wanted: &Wanted, root: &Path, log: &Path) -> Result<String> {
    let step = Step::spinner("installing Debian 12 for the guest");
    let mut debootstrap = quiet(Command::new("debootstrap"));
    debootstrap.arg("--variant=minbase").arg(SUITE).arg(root).args(setup::mirror());
    process::watch(&mut debootstrap, log, &step)?;
    // During the installation, apt uses this host's mirrors, and no package starts its daemon.
    let main = setup::mirror().unwrap_or_else(|| "http://deb.debian.org/debian".into());
    let security = setup::mirror_labelled("Debian-Security")
        .unwrap_or_else(|| "http://security.debian.org/debian-security".into());
    let sources = format!(
        "deb {main} {SUITE} {COMPONENTS}\ndeb {main} {SUITE}-updates {COMPONENTS}\ndeb {security} {SUITE}-security {COMPONENTS}\n"
    );
    write(&root.join("etc/apt/sources.list"), &sources)?;
    write(&root.join(setup::HOST_SETTINGS), &setup::host_settings()?)?;
    let policy = root.join("usr/sbin/policy-rc.d");
    write(&policy, "#!/bin/sh\nexit 101\n")?;
    fs::set_permissions(&policy, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    copy(Path::new("/etc/resolv.conf"), &root.join("etc/resolv.conf"))?;
    let apt = |words: &[&str], more: &[String]| {
        let mut command = inside(root, "apt-get");
        command.args(["-y", "--no-install-recommends"]).args(words).args(more);
        process::watch(&mut command, log, &step)
    };
    apt(&["update"], &[])?;
    apt(&["upgrade"], &[])?;
    let kernel = ["image", "headers"].map(|part| format!("linux-{part}-{}", wanted.kernel));
    let names = DEBIAN.iter().map(|name| (*name).to_owned());
    let names: Vec<String> = names.chain(kernel).chain(wanted.more.iter().cloned()).collect();
    apt(&["install"], &names)?;
    step.done("");

    let step = Step::spinner("installing rgpu in the guest, building its driver");
    let mut files = Vec::new();
    for name in OURS {
        let from = package::built(&packages(), name)?;
        let place = Path::new("/tmp").join(from.file_name().context("a package has a name")?);
        copy(&from, &root.join(place.strip_prefix("/")?))?;
        files.push(place.display().to_string());
    }
    let mut command = inside(root, "apt-get");
    command.args(["-y", "--no-install-recommends", "install"]).args(&files);
    process::watch(&mut command, log, &step)?;
    let release = kernel_release(root)?;
    let driver = root.join("lib/modules").join(&release).join("updates/dkms/virtio_rgpu.ko");
    ensure!(
        driver.exists() || driver.with_extension("ko.xz").exists(),
        "DKMS has not built the driver for Linux {release}; see {}",
        log.display()
    );
    finish(root, log)?;
    step.done(&format!("for Linux {release}"));
    Ok(release)
}

/// Prepares an installed system for its first boot.
fn finish(root: &Path, log: &Path) -> Result<()> {
    let units = ["systemd-networkd.service", "systemd-resolved.service", "ssh.service"];
    process::run(inside(root, "systemctl").arg("enable").args(units), log)?;
    process::run(inside(root, "apt-get").arg("clean"), log)?;
    package::copy_tree(&tree::root().join("packaging/image"), root)?;
    // Each guest makes its own machine ID, keys and random seed.
    write(&root.join("etc/machine-id"), "")?;
    let mut gone: Vec<PathBuf> = [
        setup::HOST_SETTINGS,
        "usr/sbin/policy-rc.d",
        "etc/resolv.conf",
        "var/lib/systemd/random-seed",
        "var/lib/dbus/machine-id",
    ]
    .map(|name| root.join(name))
    .into();
    for folder in ["etc/ssh", "tmp", "var/lib/apt/lists", "var/log/apt"] {
        let folder = root.join(folder);
        for entry in fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))? {
            let entry = entry?;
            let kept =
                folder.ends_with("ssh") && !entry.file_name().to_string_lossy().starts_with("ssh_host_");
            if !kept {
                gone.push(entry.path());
            }
        }
    }
    gone.iter().try_for_each(|path| remove(path))?;
    symlink("../run/systemd/resolve/stub-resolv.conf", root.join("etc/resolv.conf"))
        .context("cannot make the guest's resolv.conf")
}

/// The release of the only kernel in `root`.
fn kernel_release(root: &Path) -> Result<String> {
    let link = root.join("vmlinuz");
    let target = fs::read_link(&link).with_context(|| format!("cannot read {}", link.display()))?;
    let name = target.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let release = name.strip_prefix("vmlinuz-").map(str::to_owned);
    release.with_context(|| format!("{} names {}, which is not a kernel", link.display(), target.display()))
}

/// Makes a bootable disk from a system: the partition table and GRUB, followed by the file system.
fn disk(root: &Path, raw: &Path, size: u64, log: &Path) -> Result<()> {
    let context = || format!("cannot write {}", raw.display());
    remove(raw)?;
    File::create(raw).and_then(|file| file.set_len(size)).with_context(context)?;
    // GRUB 2.06 cannot read file systems with the default features of newer versions of mke2fs.
    let mut make = Command::new("/sbin/mke2fs");
    make.args(["-q", "-F", "-t", "ext4", "-O", "^metadata_csum_seed,^orphan_file", "-L", LABEL]);
    make.arg("-E").arg(format!("offset={PARTITION},root_owner=0:0")).arg("-d").arg(root).arg(raw);
    process::run(make.arg(format!("{}k", (size - PARTITION) >> 10)), log)?;
    let table = format!("label: dos\nstart={}, type=83, bootable\n", PARTITION / SECTOR);
    let script = raw.with_extension("sfdisk");
    write(&script, &table)?;
    let mut sfdisk = Command::new("sh");
    sfdisk.args(["-c", "exec /sbin/sfdisk --quiet \"$1\" < \"$0\""]).arg(&script).arg(raw);
    process::run(&mut sfdisk, log)?;
    remove(&script)?;

    // By default, GRUB's first part loads the second one from the sectors after it.
    let core = raw.with_extension("core");
    let mut grub = Command::new("grub-mkimage");
    grub.args(["-O", "i386-pc", "-d", GRUB, "-p", "(,msdos1)/boot/grub", "-o"]).arg(&core).args(GRUB_MODULES);
    process::run(&mut grub, log)?;
    let second = fs::read(&core).with_context(|| format!("cannot read {}", core.display()))?;
    remove(&core)?;
    let boot = Path::new(GRUB).join("boot.img");
    let first = fs::read(&boot).with_context(|| format!("cannot read {}", boot.display()))?;
    let code = first.get(..BOOT_CODE).with_context(|| format!("{} is too short", boot.display()))?;
    ensure!(second.len() as u64 <= PARTITION - SECTOR, "GRUB's core has {} bytes", second.len());
    let file = OpenOptions::new().write(true).open(raw).with_context(context)?;
    file.write_all_at(code, 0).with_context(context)?;
    file.write_all_at(&second, SECTOR).with_context(context)?;
    file.sync_all().with_context(context)
}

/// A non-interactive command that runs in the system in `root`, with its own /proc. The processes that it
/// starts end with it.
fn inside(root: &Path, program: &str) -> Command {
    let script = "mount -t proc proc \"$0/proc\" && exec chroot \"$0\" \"$@\"";
    let words: [OsString; 8] = [
        "--mount".into(),
        "--pid".into(),
        "--fork".into(),
        "--kill-child".into(),
        "sh".into(),
        "-c".into(),
        script.into(),
        root.into(),
    ];
    let mut command = quiet(Command::new("unshare"));
    command.args(words).arg(program).env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    command
}

fn quiet(mut command: Command) -> Command {
    command.env("DEBIAN_FRONTEND", "noninteractive").env("LC_ALL", "C").env_remove("TMPDIR");
    command
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to).with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Removes a file or a folder, if it is there.
fn remove(path: &Path) -> Result<()> {
    let context = || format!("cannot remove {}", path.display());
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => fs::remove_dir_all(path).with_context(context),
        Ok(_) => fs::remove_file(path).with_context(context),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error).with_context(context),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_extension_is_the_format() {
        assert_eq!(format(Path::new("a/guest.qcow2")).unwrap(), "qcow2");
        assert_eq!(format(Path::new("guest.raw")).unwrap(), "raw");
        let error = format(Path::new("guest.img")).unwrap_err().to_string();
        assert!(error.contains("guest.img"), "{error}");
    }

    #[test]
    fn a_guest_has_packages_from_where_its_first_ones_came() {
        let text = fs::read_to_string(tree::root().join("packaging/image/etc/apt/sources.list")).unwrap();
        assert!(text.lines().all(|line| line.ends_with(&format!(" {COMPONENTS}"))), "{text}");
    }

    #[test]
    fn a_disk_replaces_no_packages_of_others() {
        assert!(!packages().starts_with(package::folder()) && !package::folder().starts_with(packages()));
    }

    #[test]
    fn the_label_is_that_of_the_guests_files() {
        for file in ["etc/fstab", "boot/grub/grub.cfg"] {
            let text = fs::read_to_string(tree::root().join("packaging/image").join(file)).unwrap();
            assert!(text.contains(&format!("LABEL={LABEL}")), "{file}");
        }
    }
}
