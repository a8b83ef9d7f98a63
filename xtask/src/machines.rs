//! Prepares the virtual machines that the demonstration and the tests boot, with visible progress. Without
//! this the tests would prepare them silently.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;
use rgpu_tests::machine::systemd::Release;
use rgpu_tests::machine::{Accelerator, Kernel, Qemu, rdma, setup, systemd};
use rgpu_tests::tree;

use crate::progress::Step;
use crate::{process, toolchain};

/// Fetches everything that the tests need, so that downloads can run while something else uses the
/// processors.
pub fn fetch() -> Result<()> {
    toolchain::cuda()?;
    prepare_all_kernels()?;
    prepare_rdma()?;
    prepare_systemd()
}

/// Makes sure that there is a QEMU with the device, and says how a shell finds it.
pub fn qemu() -> Result<()> {
    let qemu = find_qemu()?;
    let folder = tree::target().join("qemu");
    let bin = qemu.in_path(&folder)?;
    if bin == folder {
        println!("This machine's own QEMU {} has the device.", qemu.version());
    } else {
        println!("QEMU {} has the device. So that a shell finds it:\n", qemu.version());
        println!("  export PATH={}:$PATH", bin.display());
    }
    Ok(())
}

fn find_qemu() -> Result<Qemu> {
    let step = Step::spinner("finding or fetching QEMU");
    let qemu = setup::listening(step.listener(), Qemu::find)?;
    step.done(qemu.version());
    Ok(qemu)
}

/// Prepares a normal guest. Returns how it will be accelerated.
pub fn prepare() -> Result<Accelerator> {
    driver(Kernel::default())?;
    let qemu = find_qemu()?;
    let step = Step::spinner("finding out whether KVM works");
    let accelerator = setup::listening(step.listener(), || qemu.accelerator())?;
    step.done(accelerator.name());
    Ok(accelerator)
}

/// Prepares guests with every kernel that the driver supports.
pub fn prepare_all_kernels() -> Result<()> {
    prepare()?;
    Kernel::ALL.into_iter().try_for_each(driver)
}

/// Prepares machines with RDMA.
pub fn prepare_rdma() -> Result<()> {
    prepare()?;
    let step = Step::spinner("fetching a kernel and tools with RDMA");
    let version = setup::listening(step.listener(), || -> Result<_> {
        rdma::userland()?;
        Ok(Kernel::V6_1Full.files()?.version)
    })?;
    step.done(&version);
    Ok(())
}

/// Prepares machines with a complete Debian.
pub fn prepare_systemd() -> Result<()> {
    for release in [Release::Debian12, Release::Debian13] {
        prepare_disk(release, || systemd::disk(release))?;
    }
    Ok(())
}

/// Prepares machines with a complete Debian that can build the driver.
pub fn prepare_dkms() -> Result<()> {
    prepare_disk(Release::Debian12, systemd::disk_with_dkms)
}

/// Prepares machines with a complete Debian that has Slurm.
pub fn prepare_slurm() -> Result<()> {
    prepare_disk(Release::Debian12, systemd::disk_with_slurm)
}

/// Builds the debug kernels in `build/machine/debug-kernels`, or in `RGPU_DEBUG_KERNELS`, which takes 20
/// minutes on two processors. Returns their folders, for `RGPU_TEST_KERNEL`.
pub fn debug_kernels() -> Result<Vec<PathBuf>> {
    let folder = std::env::var_os("RGPU_DEBUG_KERNELS");
    let folder = folder.map_or_else(|| setup::build_dir().join("debug-kernels"), PathBuf::from);
    let log = process::log("debug-kernels")?;
    let mut kernels = Vec::new();
    for kind in ["kasan", "kcsan"] {
        let step = Step::spinner(format!("building a kernel with {}", kind.to_uppercase()));
        let mut command = Command::new(tree::root().join("guest-driver/tests/debug-kernel.sh"));
        process::watch(command.arg(&folder).arg(kind), &log, &step)?;
        step.done("");
        kernels.push(folder.join(kind));
    }
    Ok(kernels)
}

fn prepare_disk(release: Release, make: impl FnOnce() -> Result<PathBuf>) -> Result<()> {
    prepare()?;
    let step = Step::spinner(format!("making a disk with {release:?}"));
    let disk = setup::listening(step.listener(), make)?;
    step.done(&disk.display().to_string());
    Ok(())
}

/// Fetches a kernel and builds the driver for it.
fn driver(kernel: Kernel) -> Result<()> {
    let step = Step::spinner("fetching a kernel for the guest, building the driver");
    let version = setup::listening(step.listener(), || -> Result<_> {
        kernel.driver()?;
        Ok(kernel.files()?.version)
    })?;
    step.done(&version);
    Ok(())
}
