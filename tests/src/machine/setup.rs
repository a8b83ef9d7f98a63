//! Installs and builds everything that the machines need, in folders that concurrent tests share.
//!
//! ```text
//! build/machine/
//!   trixie/            a private Debian trixie: QEMU from its backports; its kernels, a compiler and headers for them
//!   bookworm/          Debian 12's cloud kernel and its headers, unpacked
//!   driver/VERSION/    virtio_rgpu.ko for that kernel, and a stamp of the sources it was built from
//!   agent              the guest's first process
//!   debian12.ext4      a disk with Debian 12 and systemd; debian12-dkms-VERSION.ext4 has a compiler as well,
//!                      and debian12-slurm.ext4 has Slurm
//!   *.stamp            completed steps; a step without its stamp is repeated from the beginning
//! ```
//!
//! Packages come from the mirror that this host's own apt uses.

use crate::tree;
use anyhow::{Context, Result, bail, ensure};
use nix::fcntl::{Flock, FlockArg};
use std::cell::RefCell;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// `build/machine` in the repository.
pub fn build_dir() -> PathBuf {
    tree::root().join("build/machine")
}

/// Keeps other processes from setting up the same directory, until dropped. Not reentrant.
pub(crate) fn lock(name: &str) -> Result<Flock<File>> {
    fs::create_dir_all(build_dir())?;
    let path = build_dir().join(format!("{name}.lock"));
    let file = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
    Flock::lock(file, FlockArg::LockExclusive)
        .map_err(|(_, e)| e)
        .with_context(|| format!("cannot lock {}", path.display()))
}

type Listener = Box<dyn Fn(&str)>;

thread_local! {
    /// The listener for this thread's progress messages.
    static LISTENER: RefCell<Option<Listener>> = const { RefCell::new(None) };
}

/// Calls `work`. Meanwhile `listener` gets a line for everything that this thread sets up, and each line that
/// its long commands print.
pub fn listening<T>(listener: impl Fn(&str) + 'static, work: impl FnOnce() -> T) -> T {
    let before = LISTENER.replace(Some(Box::new(listener)));
    let value = work();
    LISTENER.set(before);
    value
}

/// Passes a line to the listener, if there is one.
fn tell(line: &str) {
    LISTENER.with_borrow(|listener| {
        if let Some(listener) = listener {
            listener(line);
        }
    });
}

/// Announces a step: to the listener, or on standard error if there is none.
pub(crate) fn announce(text: &str) {
    if LISTENER.with_borrow(Option::is_none) {
        eprintln!("machine: {text} …");
    }
    tell(text);
}

/// Runs a command to its end and returns its standard output. If it fails, the error quotes the end of its
/// output.
pub(crate) fn run(command: &mut Command) -> Result<String> {
    run_with(command, |_| ())
}

/// Like [`run`], for a long command: each line of its output goes to the listener, too.
pub(crate) fn watch(command: &mut Command) -> Result<String> {
    run_with(command, tell)
}

fn run_with(command: &mut Command, line: impl Fn(&str)) -> Result<String> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {command:?}"))?;
    let errors = child.stderr.take();
    // A separate thread reads the errors. Otherwise a command that blocks on writing errors would never close
    // its output.
    let errors = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // Keep what came before an error of the pipe.
        let _ = errors.map(|mut pipe| pipe.read_to_end(&mut bytes));
        bytes
    });
    let mut output = Vec::new();
    if let Some(pipe) = child.stdout.take() {
        let mut pipe = BufReader::new(pipe);
        let mut begin = 0;
        while pipe.read_until(b'\n', &mut output).context("cannot read a command's output")? > 0 {
            line(&String::from_utf8_lossy(&output[begin..]));
            begin = output.len();
        }
    }
    let status = child.wait().with_context(|| format!("cannot wait for {command:?}"))?;
    let stdout = String::from_utf8_lossy(&output).into_owned();
    if !status.success() {
        let stderr = errors.join().unwrap_or_default();
        let all = format!("{stdout}{}", String::from_utf8_lossy(&stderr));
        let lines: Vec<&str> = all.lines().collect();
        bail!("{command:?} failed ({status}):\n{}", lines[lines.len().saturating_sub(25)..].join("\n"));
    }
    Ok(stdout)
}

/// Runs `step`, unless the stamp `name` says that it has already run with the same `key`.
pub(crate) fn once(name: &str, key: &str, step: impl FnOnce() -> Result<()>) -> Result<()> {
    let stamp = build_dir().join(format!("{name}.stamp"));
    if fs::read_to_string(&stamp).is_ok_and(|have| have == key) {
        return Ok(());
    }
    let _lock = lock(name)?;
    if fs::read_to_string(&stamp).is_ok_and(|have| have == key) {
        return Ok(());
    }
    let _ = fs::remove_file(&stamp);
    step()?;
    fs::write(&stamp, key).with_context(|| format!("cannot write {}", stamp.display()))
}

/// A non-interactive `Command` for apt, dpkg and similar programs.
pub(crate) fn apt(program: &str) -> Command {
    let mut command = Command::new(program);
    command.env("DEBIAN_FRONTEND", "noninteractive").env("LC_ALL", "C");
    command
}

/// Makes sure that this host has `program`, by installing the Debian package `package` if necessary.
pub(crate) fn need_program(program: &str, package: &str) -> Result<()> {
    let found = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).is_file()))
        || ["/usr/sbin", "/sbin"].iter().any(|dir| Path::new(dir).join(program).is_file());
    if found {
        return Ok(());
    }
    install(package).with_context(|| {
        format!(
            "`{program}` is missing, and Debian's package {package} could not be installed (are you root?)"
        )
    })
}

/// Makes sure that this host has a shared library, by installing the Debian package `package` if necessary.
pub(crate) fn need_library(name: &str, package: &str) -> Result<()> {
    let folders = ["/usr/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu", "/usr/lib64"];
    if folders.iter().any(|folder| Path::new(folder).join(name).exists()) {
        return Ok(());
    }
    install(package).with_context(|| {
        format!("{name} is missing, and Debian's package {package} could not be installed (are you root?)")
    })
}

/// Installs a Debian package on this host.
fn install(package: &str) -> Result<()> {
    let _lock = lock("apt")?;
    announce(&format!("installing Debian's package {package}"));
    // A process that does not use this module's lock may be installing packages at the moment.
    let args = ["install", "-y", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=600", package];
    with_lists(None, || watch(apt("apt-get").args(args)).map(drop))
}

/// Does something that needs apt's package lists, on this host or in the Debian at `chroot`. If it fails,
/// updates the lists and tries again: the lists may be missing, or too old for the mirror, which only has the
/// newest versions.
pub(crate) fn with_lists<T>(chroot: Option<&Path>, attempt: impl Fn() -> Result<T>) -> Result<T> {
    attempt().or_else(|_| {
        announce("updating apt's package lists");
        watch(inside(chroot, "apt-get").arg("update"))?;
        attempt()
    })
}

/// A program of this host, or of the Debian at `chroot`, with settings for apt.
pub(crate) fn inside(chroot: Option<&Path>, program: &str) -> Command {
    match chroot {
        Some(dir) => {
            let mut command = apt("chroot");
            command.arg(dir).arg(program);
            command
        }
        None => apt(program),
    }
}

/// Downloads Debian packages into `dir` and unpacks them into `root`, without installing them. With `chroot`,
/// apt runs in that Debian, and `root` is a path inside it.
pub(crate) fn unpack(packages: &[String], root: &Path, chroot: Option<&Path>) -> Result<()> {
    let on_host = |path: &Path| match chroot {
        Some(dir) => dir.join(path.strip_prefix("/").unwrap_or(path)),
        None => path.to_path_buf(),
    };
    let downloads = root.join("packages");
    let _ = fs::remove_dir_all(on_host(&downloads));
    fs::create_dir_all(on_host(&downloads))?;
    // apt-get downloads into its working directory, which only a shell can set inside a chroot.
    let script = "cd \"$0\" && exec apt-get -o APT::Sandbox::User=root download \"$@\"";
    watch(inside(chroot, "sh").args(["-c", script]).arg(&downloads).args(packages))?;
    for package in fs::read_dir(on_host(&downloads))? {
        let name = package?.file_name();
        run(inside(chroot, "dpkg-deb").arg("-x").arg(downloads.join(name)).arg(root))?;
    }
    fs::remove_dir_all(on_host(&downloads))?;
    Ok(())
}

/// The private Debian trixie with QEMU. Makes it if it is missing, which takes about a minute.
pub fn trixie() -> Result<PathBuf> {
    let root = build_dir().join("trixie");
    once("trixie", "3", || {
        ensure!(
            nix::unistd::geteuid().is_root(),
            "making {} takes root (debootstrap, chroot)",
            root.display()
        );
        need_program("debootstrap", "debootstrap")?;
        if root.exists() {
            fs::remove_dir_all(&root).with_context(|| format!("cannot remove {}", root.display()))?;
        }
        announce(&format!("making a Debian trixie in {}", root.display()));
        let mut command = apt("debootstrap");
        command.args(["--variant=minbase", "trixie"]).arg(&root);
        if let Some(mirror) = mirror() {
            command.arg(mirror);
        }
        watch(&mut command)?;
        configure_apt(&root)?;
        // No service must start in it.
        write_executable(&root.join("usr/sbin/policy-rc.d"), "#!/bin/sh\nexit 101\n")?;
        // It can be made again at any time, so it need not survive a power failure. Its documentation is not
        // needed.
        fs::write(
            root.join("etc/dpkg/dpkg.cfg.d/fast"),
            "force-unsafe-io\npath-exclude=/usr/share/doc/*\npath-exclude=/usr/share/man/*\n",
        )?;
        chroot_apt(&root, &["update"])?;
        chroot_apt(&root, &["install", "-t", "trixie-backports", "qemu-system-x86"])?;
        chroot_apt(&root, &["clean"])
    })?;
    Ok(root)
}

/// The same Debian, with a compiler to build modules for its kernels.
pub(crate) fn trixie_with_compiler() -> Result<PathBuf> {
    let root = trixie()?;
    once("trixie-compiler", "1", || {
        announce("installing a compiler in the Debian trixie");
        chroot_apt(&root, &["install", "-t", "trixie-backports", "libelf1t64", "libdw1t64"])?;
        chroot_apt(&root, &["install", "gcc", "make", "xz-utils"])?;
        chroot_apt(&root, &["clean"])
    })?;
    Ok(root)
}

/// Runs apt-get in a private Debian.
fn chroot_apt(root: &Path, args: &[&str]) -> Result<()> {
    watch(apt("chroot").arg(root).args(["apt-get", "-y", "--no-install-recommends"]).args(args)).map(drop)
}

/// The Debian mirror of this host, if apt knows one; otherwise debootstrap has a default.
pub fn mirror() -> Option<String> {
    mirror_labelled("Debian")
}

/// This host's mirror of an archive of Debian (`Debian` or `Debian-Security`), if apt knows one.
pub fn mirror_labelled(label: &str) -> Option<String> {
    let list = run(apt("apt-get").args([
        "indextargets",
        "--format",
        "$(REPO_URI) $(ORIGIN) $(LABEL)",
        "Created-By: Packages",
    ]))
    .ok()?;
    let end = format!(" Debian {label}");
    list.lines().find_map(|line| line.strip_suffix(&end).map(str::to_owned))
}

/// Gives a new Debian this host's settings for the mirror, and the backports.
fn configure_apt(root: &Path) -> Result<()> {
    let sources = root.join("etc/apt/sources.list");
    let main = fs::read_to_string(&sources).with_context(|| format!("cannot read {}", sources.display()))?;
    let backports = main.replace(" trixie ", " trixie-backports ");
    fs::write(root.join("etc/apt/sources.list.d/backports.list"), backports)?;
    fs::write(root.join(HOST_SETTINGS), host_settings()?)?;
    fs::copy("/etc/resolv.conf", root.join("etc/resolv.conf")).context("cannot copy /etc/resolv.conf")?;
    Ok(())
}

/// Where a Debian that this host installs keeps [`host_settings`].
pub const HOST_SETTINGS: &str = "etc/apt/apt.conf.d/90host";

/// This host's apt settings for reaching the mirrors.
pub fn host_settings() -> Result<String> {
    let wanted = ["Acquire::Check-Date", "Acquire::Check-Valid-Until", "Acquire::Retries"];
    let all = run(apt("apt-config").arg("dump"))?;
    let ours =
        all.lines().filter(|line| wanted.iter().any(|w| line.starts_with(w)) || line.contains("::Proxy "));
    Ok(ours.map(|line| format!("{line}\n")).collect())
}

pub(super) fn write_executable(path: &Path, text: &str) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::write(path, text)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    Ok(())
}
