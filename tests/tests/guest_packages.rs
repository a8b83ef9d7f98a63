//! Installs, uses, upgrades and purges a guest's packages in a machine with Debian 12, systemd and an rgpu
//! device: DKMS builds the driver there, udev loads it, and programs find the GPU. Compiling takes long in an
//! emulated guest, so this part runs only on request.

#[path = "support/packages.rs"]
mod support;

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use rgpu_tests::guest::{Host, Options};
use rgpu_tests::machine::{Machine, systemd};
use rgpu_tests::programs;
use support::*;

const INSTALLED: [&str; 4] = ["rgpu-guest", "rgpu-guest-dkms", "rgpu-libs", "rgpuctl"];

#[test]
fn a_guest_has_a_gpu_as_soon_as_its_packages_are_installed() -> Result<()> {
    programs::built("vectorAdd")?;
    let begin = Instant::now();
    let done = |what: &str| println!("{what}: done after {:.0} s", begin.elapsed().as_secs_f64());
    let folder = tempfile::tempdir()?;
    let newer = newer(&INSTALLED, folder.path())?;
    let host = Host::start("guest_packages", Options::software("local"))?;
    let builder = systemd::builder_with_dkms()?.rgpu_socket(host.socket());
    let machine =
        systemd::boot(contents(builder, &INSTALLED, &newer, &["vectorAdd", "idle", "nvidia_smi"])?)?;
    let before = inventory(&machine)?;
    done("boot");
    installation(&machine).context("installation")?;
    done("installation");
    upgrade(&machine).context("upgrade")?;
    done("upgrade");
    purge(&machine, &INSTALLED, &[], &before).context("purge")?;
    done("purge");
    machine.check_console()?;
    host.settled()
}

fn installation(machine: &Machine) -> Result<()> {
    machine.check("test ! -e /dev/rgpu0", LONG)?;
    install(machine, "packages")?;
    built(machine)?;
    // udev loads the driver.
    eventually(machine, "test -c /dev/rgpu0")?;
    machine.check("udevadm settle", LONG)?;
    let mode = machine.check("stat -c %a /dev/rgpu0", LONG)?;
    ensure!(mode == "666", "the device has the permissions {mode}");
    for user in ["root", "nobody"] {
        run(machine, user, "nvidia_smi")?;
        run(machine, user, "vectorAdd")?;
    }
    let doctor = machine.run("rgpuctl doctor", LONG)?;
    ensure!(doctor.success(), "rgpuctl doctor finds: {doctor}");
    Ok(())
}

/// Installs the packages of a folder. If the driver does not build, the error says why.
fn install(machine: &Machine, folder: &str) -> Result<()> {
    let install = format!("apt-get install -y --no-install-recommends /mnt/{folder}/*.deb");
    let why = "cat /var/lib/dkms/virtio-rgpu/*/build/make.log >&2; exit 1";
    machine.check(&format!("{install} || {{ {why}; }}"), LONG).map(drop)
}

/// Requires that DKMS has built the driver and put it where the machine's next start finds it.
fn built(machine: &Machine) -> Result<()> {
    let said = machine.check("dkms status virtio-rgpu", LONG)?;
    ensure!(said.ends_with(": installed"), "DKMS says {said:?}");
    machine.check("modinfo -n virtio_rgpu | grep -q /updates/dkms/", LONG).map(drop)
}

/// Runs a program without setting any variable.
fn run(machine: &Machine, user: &str, program: &str) -> Result<()> {
    let command = format!("setpriv --reuid={user} --clear-groups env -i {PROGRAMS}/{program}");
    let output = machine.run(&command, LONG)?;
    ensure!(output.success() && output.text().contains("PASS"), "{program} as {user}: {output}");
    Ok(())
}

/// A running program continues, with the driver that is loaded.
fn upgrade(machine: &Machine) -> Result<()> {
    let held = Held::start(machine, "guest")?;
    install(machine, "newer")?;
    built(machine)?;
    run(machine, "nobody", "vectorAdd")?;
    held.finish(machine, "guest")
}
