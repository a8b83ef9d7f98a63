//! A machine with a complete Debian and systemd, to install packages and run services in.
//!
//! The disk is made once; a machine's changes to it are lost when it ends. The kernel and its modules come
//! from outside, as in every machine here.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::{Builder, Kernel, Machine, setup};

/// Debian's release in such a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Release {
    /// 12, bookworm: systemd 252.
    Debian12,
    /// 13, trixie: systemd 257.
    Debian13,
}

impl Release {
    /// Debian's name for it.
    fn suite(self) -> &'static str {
        match self {
            Release::Debian12 => "bookworm",
            Release::Debian13 => "trixie",
        }
    }

    fn disk_name(self) -> &'static str {
        match self {
            Release::Debian12 => "debian12",
            Release::Debian13 => "debian13",
        }
    }

    /// The kernel of its cloud images.
    fn kernel(self) -> Kernel {
        match self {
            Release::Debian12 => Kernel::V6_1,
            Release::Debian13 => Kernel::V6_12,
        }
    }
}

/// The system's packages besides Debian's essential ones and apt.
const PACKAGES: &str = "systemd,systemd-sysv,dbus,udev,kmod,iproute2,procps";

/// Runs the agent, which `agent.c` describes.
const AGENT: &str = "[Unit]
Description=Agent of the test machine

[Service]
ExecStart=/mnt/agent

[Install]
WantedBy=multi-user.target
";

/// Useless in a machine without a network, a screen or its own clock.
const MASKED: [&str; 9] = [
    "getty@tty1.service",
    "serial-getty@ttyS0.service",
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "systemd-logind.service",
    "fstrim.timer",
];

/// How long the machine may take to start its services, emulated on a busy host.
const LONG: Duration = Duration::from_secs(600);

/// The disk, made if missing (about a minute).
pub fn disk(release: Release) -> Result<PathBuf> {
    make(release, release.disk_name(), PACKAGES, |_| Ok(()))
}

/// Debian 12's disk with DKMS, a compiler, and the headers of these machines' kernel: to build the guest's
/// driver.
pub fn disk_with_dkms() -> Result<PathBuf> {
    let kernel = Kernel::default().files()?;
    // libelf1 is for the kernel's objtool.
    let packages = format!("{PACKAGES},dkms,gcc,make,libelf1");
    let name = format!("debian12-dkms-{}", kernel.version);
    make(Release::Debian12, &name, &packages, |root| kernel.install(root))
}

/// Debian 12's disk with Slurm, which has no configuration yet.
pub fn disk_with_slurm() -> Result<PathBuf> {
    let packages = format!("{PACKAGES},slurmctld,slurmd,slurm-client");
    make(Release::Debian12, "debian12-slurm", &packages, |_| Ok(()))
}

fn make(
    release: Release,
    name: &str,
    packages: &str,
    finish: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let disk = setup::build_dir().join(format!("{name}.ext4"));
    setup::once(name, &format!("2 {packages} {AGENT} {MASKED:?}"), || {
        ensure!(nix::unistd::geteuid().is_root(), "making {} takes root (debootstrap)", disk.display());
        setup::need_program("debootstrap", "debootstrap")?;
        setup::need_program("mke2fs", "e2fsprogs")?;
        setup::announce(&format!("making a disk with {release:?} and systemd"));
        let root = setup::build_dir().join(name);
        if root.exists() {
            fs::remove_dir_all(&root).with_context(|| format!("cannot remove {}", root.display()))?;
        }
        let mut debootstrap = setup::apt("debootstrap");
        debootstrap.args(["--variant=minbase", "--include", packages, release.suite()]).arg(&root);
        setup::watch(debootstrap.args(setup::mirror()))?;

        let units = root.join("etc/systemd/system");
        fs::write(units.join("agent.service"), AGENT)?;
        fs::create_dir_all(units.join("multi-user.target.wants"))?;
        let link = |target: &str, name: &str| std::os::unix::fs::symlink(target, units.join(name));
        link("../agent.service", "multi-user.target.wants/agent.service")?;
        MASKED.iter().try_for_each(|unit| link("/dev/null", unit))?;
        fs::write(root.join("etc/hostname"), "host\n")?;
        fs::write(root.join("etc/hosts"), "127.0.0.1 localhost host\n")?;
        // Whatever is installed is lost when the machine ends.
        fs::write(root.join("etc/dpkg/dpkg.cfg.d/fast"), "force-unsafe-io\n")?;
        // Each boot makes its own.
        fs::write(root.join("etc/machine-id"), "")?;
        for unused in
            ["var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale"]
        {
            let folder = root.join(unused);
            fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
            fs::create_dir_all(&folder)?;
        }
        finish(&root)?;
        // The file system is written from scratch each time, so a journal would only cost time.
        let mut make = Command::new("/sbin/mke2fs");
        make.args(["-q", "-F", "-t", "ext4", "-O", "^has_journal", "-L", "debian", "-d"]).arg(&root);
        let _ = fs::remove_file(&disk);
        setup::run(make.arg(&disk).arg("1500M"))?;
        fs::remove_dir_all(&root).with_context(|| format!("cannot remove {}", root.display()))
    })?;
    Ok(disk)
}

/// What all such machines have. On a busy host, units may take longer to start than systemd's usual 90 s.
fn any() -> Builder {
    Machine::builder().kernel_arg("systemd.default_timeout_start_sec=900").memory_mib(2048).cpus(2)
}

/// A builder for such a machine; [`boot`] boots it.
pub fn builder(release: Release) -> Result<Builder> {
    Ok(any().kernel(release.kernel()).disk(disk(release)?))
}

/// The same with everything needed to build the guest's driver.
pub fn builder_with_dkms() -> Result<Builder> {
    Ok(any().disk(disk_with_dkms()?))
}

/// The same with Slurm. It can have an interface of the type `dummy`.
pub fn builder_with_slurm() -> Result<Builder> {
    Ok(any().kernel(Release::Debian12.kernel()).module("dummy").disk(disk_with_slurm()?))
}

/// Boots a machine, and returns when its services have started.
pub fn boot(builder: Builder) -> Result<Machine> {
    let machine = builder.boot()?;
    wait_up(&machine)?;
    Ok(machine)
}

/// Waits until the services have started, and requires that none has failed.
pub fn wait_up(machine: &Machine) -> Result<()> {
    let state = machine.run("systemctl is-system-running --wait", LONG)?.text();
    if state != "running" {
        let failed = machine
            .run("systemctl --failed --no-pager --plain; journalctl -b -p warning --no-pager", LONG)?;
        anyhow::bail!("the machine's system is {state}\n{failed}");
    }
    Ok(())
}
