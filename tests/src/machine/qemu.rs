//! The emulator: this host's QEMU if it is new enough, otherwise one of a private Debian trixie; with KVM if
//! that really runs a guest here, otherwise with QEMU's translator (TCG).

use super::{Builder, kernel::Kernel, setup};
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// The first QEMU with a `vhost-user-test-device-pci` that a user may create.
const OLDEST: (u32, u32) = (10, 2);

/// How guest code is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accelerator {
    /// By the processor.
    Kvm,
    /// Translated; about ten times slower.
    Tcg,
}

impl Accelerator {
    /// QEMU's name for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }

    /// The processor of such a guest, for `-cpu`.
    ///
    /// A translated one does not claim that byte-wise string instructions are fast (ERMS, FSRM): the guest's
    /// kernel would copy with them, which takes eight times as long as copying words.
    pub fn cpu(self) -> &'static str {
        match self {
            Self::Kvm => "host",
            Self::Tcg => "max,-erms,-fsrm",
        }
    }

    /// Words for the kernel's command line that make such a guest faster, and more patient.
    ///
    /// A translated guest reads the processor's own clock (TSC); otherwise its kernel uses the HPET, and each
    /// reading of the clock is a system call and a device access. Detours around speculative execution have
    /// no use there. On a busy machine its processors may stand still for many seconds, which is no reason
    /// for its kernel to complain of a stall (after 21 s), a soft lockup (20 s) or a blocked task (120 s).
    pub(super) fn kernel_arguments(self) -> &'static [&'static str] {
        match self {
            Self::Kvm => &[],
            Self::Tcg => &[
                "tsc=reliable",
                "clocksource=tsc",
                "mitigations=off",
                "rcupdate.rcu_cpu_stall_timeout=300",
                "watchdog_thresh=60",
                "sysctl.kernel.hung_task_timeout_secs=600",
            ],
        }
    }
}

/// A QEMU to start.
#[derive(Clone, Debug)]
pub struct Qemu {
    /// The root of the private Debian that it is in; `None` if it is this host's.
    root: Option<PathBuf>,
    version: String,
}

impl Qemu {
    /// Finds QEMU, making a private Debian for it if necessary.
    pub fn find() -> Result<Self> {
        if let Ok(version) = version(&mut Command::new("qemu-system-x86_64"))
            && parse(&version).is_some_and(|v| v >= OLDEST)
        {
            return Ok(Self { root: None, version });
        }
        let mut qemu = Self { root: Some(setup::trixie()?), version: String::new() };
        qemu.version = version(&mut qemu.command())?;
        match parse(&qemu.version) {
            Some(v) if v >= OLDEST => Ok(qemu),
            _ => bail!("QEMU {} is older than {}.{}", qemu.version, OLDEST.0, OLDEST.1),
        }
    }

    /// A command that starts it; its paths are this host's.
    pub fn command(&self) -> Command {
        let Some(root) = &self.root else { return Command::new("qemu-system-x86_64") };
        // Run by its own loader, a program of another Debian needs no chroot.
        let mut command = Command::new(root.join("lib64/ld-linux-x86-64.so.2"));
        command.arg("--library-path").arg(root.join("usr/lib/x86_64-linux-gnu"));
        command.arg(root.join("usr/bin/qemu-system-x86_64"));
        for firmware in ["usr/share/qemu", "usr/share/seabios"] {
            command.arg("-L").arg(root.join(firmware));
        }
        command
    }

    /// The files needed to run it elsewhere, each with its place there: the program `qemu`, its loader
    /// `ld.so`, `lib/` and the firmware in `share/`.
    pub(super) fn parts(&self) -> Result<Vec<(PathBuf, PathBuf)>> {
        let root = self.root.clone().unwrap_or_else(|| PathBuf::from("/"));
        let (loader, program) =
            (root.join("lib64/ld-linux-x86-64.so.2"), root.join("usr/bin/qemu-system-x86_64"));
        let mut list = Command::new(&loader);
        list.arg("--library-path").arg(root.join("usr/lib/x86_64-linux-gnu")).arg("--list").arg(&program);
        let mut parts: Vec<(PathBuf, PathBuf)> = Vec::new();
        for path in
            setup::run(&mut list)?.lines().filter_map(|line| line.split_once(" => ")?.1.split(' ').next())
        {
            let path = PathBuf::from(path);
            let name = path.file_name().unwrap_or_default().to_owned();
            parts.push((path, Path::new("lib").join(name)));
        }
        for name in ["bios-256k.bin", "kvmvapic.bin", "linuxboot_dma.bin"] {
            let found = ["usr/share/qemu", "usr/share/seabios"].map(|folder| root.join(folder).join(name));
            let file = found
                .into_iter()
                .find(|file| file.exists())
                .with_context(|| format!("QEMU has no {name}"))?;
            parts.push((file, Path::new("share").join(name)));
        }
        parts.extend([(loader, "ld.so".into()), (program, "qemu".into())]);
        Ok(parts)
    }

    /// A folder with a `qemu-system-x86_64` that starts it, for whoever looks for one in their PATH. Made in
    /// `dir` if necessary; if this host's own is used, `dir`, which need not exist.
    pub fn in_path(&self, dir: &Path) -> Result<PathBuf> {
        let command = self.command();
        if self.root.is_none() {
            return Ok(dir.to_owned());
        }
        let quoted = |word: &std::ffi::OsStr| format!("'{}'", word.to_string_lossy().replace('\'', "'\\''"));
        let words: Vec<String> =
            std::iter::once(command.get_program()).chain(command.get_args()).map(quoted).collect();
        let bin = dir.join("bin");
        fs::create_dir_all(&bin).with_context(|| format!("cannot create {}", bin.display()))?;
        let text = format!("#!/bin/sh\nexec {} \"$@\"\n", words.join(" "));
        setup::write_executable(&bin.join("qemu-system-x86_64"), &text)?;
        Ok(bin)
    }

    /// The version, as QEMU gives it.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The best accelerator that works here. A trial's result is kept until the host boots again.
    pub fn accelerator(&self) -> Result<Accelerator> {
        if !Path::new("/dev/kvm").exists() {
            return Ok(Accelerator::Tcg);
        }
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let key = format!("{} {}", self.version, boot.trim());
        let verdict = setup::build_dir().join("kvm.verdict");
        setup::once("kvm", &key, || {
            let works = Builder::new()
                .kernel(Kernel::V6_1)
                .accelerator(Accelerator::Kvm)
                .boot_timeout(Duration::from_secs(60))
                .boot()
                .and_then(|machine| machine.run("true", Duration::from_secs(60)));
            let text = match works {
                Ok(_) => "kvm",
                Err(_) => "tcg",
            };
            fs::write(&verdict, text).with_context(|| format!("cannot write {}", verdict.display()))
        })?;
        match fs::read_to_string(&verdict).as_deref() {
            Ok("kvm") => Ok(Accelerator::Kvm),
            _ => Ok(Accelerator::Tcg),
        }
    }
}

/// The number in the output of `--version`.
fn version(command: &mut Command) -> Result<String> {
    let text = setup::run(command.arg("--version"))?;
    let word = text.split_whitespace().nth(3).with_context(|| format!("no version of QEMU: {text}"))?;
    Ok(word.to_owned())
}

fn parse(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_compare_by_number() {
        assert!(parse("10.2.0") >= Some(OLDEST));
        assert!(parse("11.1.3") >= Some(OLDEST));
        assert!(parse("10.0.13") < Some(OLDEST));
        assert!(parse("7.2.22") < Some(OLDEST));
    }
}
