//! Where things lie, how they come there, and how concurrent tests share them.
//!
//! ```text
//! build/machine/
//!   trixie/            a private Debian trixie: QEMU from its backports, compilers and headers for its kernels
//!   bookworm/          Debian 12's cloud kernel and its headers, unpacked
//!   driver/VERSION/    virtio_rgpu.ko for that kernel, and a stamp of the sources it was built from
//!   agent              the guest's first process
//!   *.stamp            what has been done; without its stamp, a step is done again from the beginning
//! ```
//!
//! Packages come from the mirror that this host's own apt uses.

use anyhow::{Context, Result, bail, ensure};
use nix::fcntl::{Flock, FlockArg};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The repository's root.
pub fn repository() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().unwrap_or(tests).to_path_buf()
}

/// `build/machine` in the repository.
pub fn build_dir() -> PathBuf {
    repository().join("build/machine")
}

/// Holds off other processes that set up the same directory, until dropped. Not reentrant.
pub(crate) fn lock(name: &str) -> Result<Flock<File>> {
    fs::create_dir_all(build_dir())?;
    let path = build_dir().join(format!("{name}.lock"));
    let file = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
    Flock::lock(file, FlockArg::LockExclusive)
        .map_err(|(_, e)| e)
        .with_context(|| format!("cannot lock {}", path.display()))
}

/// Runs a command to its end; on failure the error carries the end of what it wrote.
pub(crate) fn run(command: &mut Command) -> Result<String> {
    let output =
        command.stdin(Stdio::null()).output().with_context(|| format!("cannot start {command:?}"))?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let all = format!("{stdout}{stderr}");
        let lines: Vec<&str> = all.lines().collect();
        bail!(
            "{command:?} failed ({}):\n{}",
            output.status,
            lines[lines.len().saturating_sub(25)..].join("\n")
        );
    }
    Ok(stdout)
}

/// Does a step once: `step` runs unless the stamp `name` says that it ran for the same `key`.
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

/// A `Command` for apt, dpkg and their kind, which asks no questions.
pub(crate) fn apt(program: &str) -> Command {
    let mut command = Command::new(program);
    command.env("DEBIAN_FRONTEND", "noninteractive").env("LC_ALL", "C");
    command
}

/// Sees to it that `program` is on this host, installing the Debian package `package` if it is not.
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

/// Installs a Debian package on this host.
fn install(package: &str) -> Result<()> {
    let _lock = lock("apt")?;
    let args = ["install", "-y", "--no-install-recommends", package];
    if run(apt("apt-get").args(args)).is_ok() {
        return Ok(());
    }
    run(apt("apt-get").arg("update"))?;
    run(apt("apt-get").args(args)).map(drop)
}

/// Downloads Debian packages into `dir` and unpacks them into `root`, without installing them. `chroot` runs apt in that
/// Debian instead of on this host; then `root` is seen from inside it.
pub(crate) fn unpack(packages: &[String], root: &Path, chroot: Option<&Path>) -> Result<()> {
    let inside = |program: &str| match chroot {
        Some(dir) => {
            let mut command = apt("chroot");
            command.arg(dir).arg(program);
            command
        }
        None => apt(program),
    };
    let on_host = |path: &Path| match chroot {
        Some(dir) => dir.join(path.strip_prefix("/").unwrap_or(path)),
        None => path.to_path_buf(),
    };
    let downloads = root.join("packages");
    let _ = fs::remove_dir_all(on_host(&downloads));
    fs::create_dir_all(on_host(&downloads))?;
    // apt-get downloads into its working directory, which a chroot takes from its caller only through a shell.
    let script = "cd \"$0\" && exec apt-get -o APT::Sandbox::User=root download \"$@\"";
    run(inside("sh").args(["-c", script]).arg(&downloads).args(packages))?;
    for package in fs::read_dir(on_host(&downloads))? {
        let name = package?.file_name();
        run(inside("dpkg-deb").arg("-x").arg(downloads.join(name)).arg(root))?;
    }
    fs::remove_dir_all(on_host(&downloads))?;
    Ok(())
}

/// The private Debian trixie, made if it is not there (about a minute and a half).
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
        eprintln!("machine: making a Debian trixie in {} ...", root.display());
        let mut command = apt("debootstrap");
        command.args(["--variant=minbase", "trixie"]).arg(&root);
        if let Some(mirror) = mirror() {
            command.arg(mirror);
        }
        run(&mut command)?;
        configure_apt(&root)?;
        // Nothing in there is a service to start.
        write_executable(&root.join("usr/sbin/policy-rc.d"), "#!/bin/sh\nexit 101\n")?;
        chroot_apt(&root, &["update"])?;
        chroot_apt(
            &root,
            &["install", "-y", "--no-install-recommends", "-t", "trixie-backports", "qemu-system-x86"],
        )?;
        chroot_apt(
            &root,
            &[
                "install",
                "-y",
                "--no-install-recommends",
                "-t",
                "trixie-backports",
                "libelf1t64",
                "libdw1t64",
            ],
        )?;
        chroot_apt(&root, &["install", "-y", "--no-install-recommends", "gcc", "make", "xz-utils"])?;
        chroot_apt(&root, &["clean"])
    })?;
    Ok(root)
}

/// Runs apt-get in a private Debian.
fn chroot_apt(root: &Path, args: &[&str]) -> Result<()> {
    run(apt("chroot").arg(root).arg("apt-get").args(args)).map(drop)
}

/// The mirror of Debian that this host uses, if apt knows one; otherwise debootstrap has a default.
fn mirror() -> Option<String> {
    let list = run(apt("apt-get").args([
        "indextargets",
        "--format",
        "$(REPO_URI) $(ORIGIN) $(LABEL)",
        "Created-By: Packages",
    ]))
    .ok()?;
    list.lines().find_map(|line| line.strip_suffix(" Debian Debian").map(str::to_owned))
}

/// Gives a fresh Debian this host's way to the mirror, and the backports.
fn configure_apt(root: &Path) -> Result<()> {
    let sources = root.join("etc/apt/sources.list");
    let main = fs::read_to_string(&sources).with_context(|| format!("cannot read {}", sources.display()))?;
    let backports = main.replace(" trixie ", " trixie-backports ");
    fs::write(root.join("etc/apt/sources.list.d/backports.list"), backports)?;
    let wanted = ["Acquire::Check-Date", "Acquire::Check-Valid-Until", "Acquire::Retries"];
    let settings: String = run(apt("apt-config").arg("dump"))?
        .lines()
        .filter(|line| wanted.iter().any(|w| line.starts_with(w)) || line.contains("::Proxy "))
        .map(|line| format!("{line}\n"))
        .collect();
    fs::write(root.join("etc/apt/apt.conf.d/90host"), settings)?;
    fs::copy("/etc/resolv.conf", root.join("etc/resolv.conf")).context("cannot copy /etc/resolv.conf")?;
    Ok(())
}

pub(super) fn write_executable(path: &Path, text: &str) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::write(path, text)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    Ok(())
}
