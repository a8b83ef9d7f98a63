//! Shared code of the tests of Debian packages: the packages, and their use in a machine with systemd.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rgpu_tests::machine::{Builder, Machine, systemd};
use rgpu_tests::tree;

/// How long a command in the emulated machine may take on a busy host; the longest compiles the driver.
pub const LONG: Duration = Duration::from_secs(900);

/// Where the machine sees the files put into it.
pub const PROGRAMS: &str = "/mnt/programs";

/// The packages, by their names.
pub fn package(name: &str) -> Result<PathBuf> {
    let folder = tree::target().join("packages");
    let all = std::fs::read_dir(&folder).with_context(|| {
        format!("there are no packages in {}: run `cargo xtask package`", folder.display())
    })?;
    let begin = format!("{name}_");
    for entry in all {
        let path = entry?.path();
        if path.file_name().is_some_and(|file| file.to_string_lossy().starts_with(&begin)) {
            return Ok(path);
        }
    }
    bail!("{name} is not in {}: run `cargo xtask package`", folder.display())
}

pub fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    ensure!(output.status.success(), "{command:?}: {}\n{}", output.status, text(&output.stderr));
    Ok(text(&output.stdout))
}

/// The packages with a higher revision, as a rebuild makes them.
pub fn newer(names: &[&str], folder: &Path) -> Result<Vec<PathBuf>> {
    let mut made = Vec::new();
    for name in names {
        let root = folder.join(name);
        output(Command::new("dpkg-deb").arg("-R").arg(package(name)?).arg(&root))?;
        let control = root.join("DEBIAN/control");
        let text = std::fs::read_to_string(&control)?;
        let line = text.lines().find(|line| line.starts_with("Version: ")).context("no version")?;
        let version = line.trim_start_matches("Version: ");
        // Packages that depend on others depend on this version of them.
        std::fs::write(&control, text.replace(version, &format!("{version}.1")))?;
        let file = folder.join(format!("{name}.deb"));
        output(
            Command::new("dpkg-deb")
                .args(["-Zgzip", "-z1", "--root-owner-group", "-b"])
                .arg(&root)
                .arg(&file),
        )?;
        std::fs::remove_dir_all(&root)?;
        made.push(file);
    }
    Ok(made)
}

/// Puts these packages, newer revisions of them, and programs with NVIDIA's runtime inside (as nvcc makes
/// them) into a machine.
pub fn contents(
    mut builder: Builder,
    names: &[&str],
    newer: &[PathBuf],
    programs: &[&str],
) -> Result<Builder> {
    for name in names {
        builder = builder.file(package(name)?, format!("/host/packages/{name}.deb"));
    }
    for file in newer {
        let name = file.file_name().context("a package has a name")?.to_string_lossy().into_owned();
        builder = builder.file(file, format!("/host/newer/{name}"));
    }
    for program in programs {
        builder = builder.file(tree::programs_static().join(program), format!("/host/programs/{program}"));
    }
    Ok(builder)
}

/// Everything on the disk that packages could leave behind, users and units included.
pub fn inventory(machine: &Machine) -> Result<BTreeSet<String>> {
    // apt, dpkg, the journal and caches keep these; so are the earlier versions of the lists of users.
    let list = r"find / -xdev \( -path /var/lib/dpkg -o -path /var/lib/apt -o -path /var/log/journal -o -path /var/cache -o -path /tmp \
        -o -path /mnt -o -path /root -o -path '/var/log/apt*' -o -path /var/log/dpkg.log -o -path /var/log/alternatives.log \
        -o -path '/etc/*-' -o -path /etc/.pwd.lock -o -path /etc/ld.so.cache \) -prune -o -print
        cat /etc/passwd /etc/group
        ls -d /run/rgpu* /run/*.installed 2>/dev/null; true";
    Ok(machine.check(list, LONG)?.lines().map(str::to_owned).collect())
}

/// Waits until a command succeeds.
pub fn eventually(machine: &Machine, command: &str) -> Result<String> {
    machine
        .check(&format!("for i in $(seq 3000); do {{ {command}; }} && exit 0; sleep 0.2; done; exit 1"), LONG)
}

/// A program that holds a session until it is told to continue.
pub struct Held {
    process: rgpu_tests::machine::Process,
}

impl Held {
    pub fn start(machine: &Machine, name: &str) -> Result<Held> {
        let command = format!(
            "mkfifo /tmp/{name}; (sleep 100000 > /tmp/{name} & echo $! > /tmp/{name}.pid) ; LD_LIBRARY_PATH=/usr/lib/rgpu exec {PROGRAMS}/idle wait < /tmp/{name}"
        );
        let process = machine.spawn(&command)?;
        process.wait_for("IDLE", LONG)?;
        Ok(Held { process })
    }

    pub fn finish(self, machine: &Machine, name: &str) -> Result<()> {
        machine.check(&format!("kill $(cat /tmp/{name}.pid); rm /tmp/{name} /tmp/{name}.pid"), LONG)?;
        let output = self.process.wait(LONG)?;
        ensure!(output.success() && output.text().contains("PASS idle"), "the program that waited: {output}");
        Ok(())
    }
}

/// Removes these packages, which keeps their settings (these files), and then purges them. Nothing may be
/// left of them.
pub fn purge(machine: &Machine, names: &[&str], settings: &[&str], before: &BTreeSet<String>) -> Result<()> {
    let names = names.join(" ");
    machine.check(&format!("apt-get remove -y {names}"), LONG)?;
    let left = machine.check("pgrep -l rgpu; lsmod | grep rgpu; ls /dev/rgpu* 2>/dev/null; true", LONG)?;
    ensure!(left.is_empty(), "these processes, modules and devices are left: {left}");
    for file in settings {
        machine.check(&format!("ls -d {file}"), LONG)?;
    }
    machine.check(&format!("apt-get purge -y {names}"), LONG)?;
    let after = inventory(machine)?;
    let left: Vec<_> = after.difference(before).collect();
    ensure!(left.is_empty(), "the purge leaves {left:#?}");
    let lost: Vec<_> = before.difference(&after).collect();
    ensure!(lost.is_empty(), "the packages have removed files that are not theirs: {lost:#?}");
    systemd::wait_up(machine)
}
