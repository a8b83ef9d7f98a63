//! The disk of `cargo xtask image`: it boots by itself and with its kernel's files, takes a user and commands
//! from a seed, and finds its GPU. Booting takes minutes in an emulated guest, so this part runs only on
//! request.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rgpu_tests::guest::{Host, Options};
use rgpu_tests::machine::Qemu;
use rgpu_tests::{programs, tree};

/// How long a guest may take to boot, emulated on a busy host, run its commands, and power off.
const LONG: Duration = Duration::from_secs(3600);
const PROGRAMS: [&str; 2] = ["nvidia_smi", "vectorAdd"];

/// The commands that the guest runs at its first boot. They print to the serial console and power the guest
/// off.
const USER_DATA: &str = "#cloud-config
hostname: gpu-guest
users:
  - name: ada
    shell: /bin/bash
    sudo: ALL=(ALL) NOPASSWD:ALL
    ssh_authorized_keys: [ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGJkZmZmZmZmZmZmZmZmZmZmZmZmZmZmZmZmZmZmZmZm ada@example.org]
runcmd:
  - [sh, -c, 'mkdir /run/seed; mount -o ro LABEL=cidata /run/seed; sh /run/seed/check > /dev/ttyS0 2>&1']
power_state: {mode: poweroff, condition: true}
";

/// Each line about the guest begins with GUEST, and is checked below.
const CHECK: &str = r#"
echo "GUEST host $(hostname)"
echo "GUEST keys $(cat /home/ada/.ssh/authorized_keys | wc -l)"
echo "GUEST sshd $(systemctl is-active ssh)"
echo "GUEST hostkeys $(ls /etc/ssh/ssh_host_*_key | wc -l)"
echo "GUEST driver $(modinfo -n virtio_rgpu)"
echo "GUEST dkms $(dkms status virtio-rgpu)"
echo "GUEST device $(stat -c %a /dev/rgpu0)"
echo "GUEST disk $(df --output=size -BM / | tail -n 1)"
echo "GUEST failed $(systemctl --failed --plain --no-legend | wc -l)"
mkdir -p /tmp/programs; cp /run/seed/programs/* /tmp/programs; chmod 755 /tmp/programs/*
for program in nvidia_smi vectorAdd; do
	su ada -c "/tmp/programs/$program" && echo "GUEST ran $program"
done
rgpuctl doctor
echo "GUEST doctor $?"
"#;

fn image(ending: &str) -> Result<PathBuf> {
    let file = tree::target().join("image/rgpu-guest").with_extension(ending);
    ensure!(file.exists(), "there is no {}: run `cargo xtask image`", file.display());
    Ok(file)
}

/// A disk with the seed and the programs.
fn seed(folder: &Path) -> Result<PathBuf> {
    let (content, seed) = (folder.join("seed"), folder.join("seed.iso"));
    fs::create_dir_all(content.join("programs"))?;
    fs::write(content.join("user-data"), USER_DATA)?;
    fs::write(content.join("meta-data"), "instance-id: test-1\n")?;
    fs::write(content.join("check"), CHECK)?;
    for program in PROGRAMS {
        programs::built(program)?;
        fs::copy(tree::programs_static().join(program), content.join("programs").join(program))?;
    }
    let mut make = Command::new("genisoimage");
    make.args(["-quiet", "-V", "cidata", "-J", "-r", "-o"]).arg(&seed).arg(&content);
    let output = make.output().context("cannot run genisoimage: Debian's package has it")?;
    ensure!(output.status.success(), "genisoimage: {}", String::from_utf8_lossy(&output.stderr));
    Ok(seed)
}

/// A QEMU that is killed when it is dropped.
struct Guest(Child);

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Boots the disk with a seed and these arguments of QEMU, waits until the guest powers off, and returns its
/// console output. The disk does not change.
fn boot(name: &str, arguments: &[String]) -> Result<String> {
    let folder = tempfile::tempdir()?;
    let host = Host::start(name, Options::software("local"))?;
    let console = host.logs().join("console");
    let qemu = Qemu::find()?;
    let accelerator = qemu.accelerator()?;
    let mut command = qemu.command();
    command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-snapshot"]);
    command.args(["-accel", accelerator.name(), "-cpu", accelerator.cpu(), "-smp", "2", "-m", "2G"]);
    command.args(["-machine", "q35,memory-backend=ram", "-nic", "user,model=virtio-net-pci"]);
    command.args(["-object", "memory-backend-memfd,id=ram,size=2G,share=on"]);
    for (file, format) in [(image("qcow2")?, "qcow2"), (seed(folder.path())?, "raw")] {
        command.arg("-drive").arg(format!("file={},format={format},if=virtio", file.display()));
    }
    command.arg("-chardev").arg(format!("socket,id=rgpu,path={}", host.socket().display()));
    command.args([
        "-device",
        "vhost-user-test-device-pci,chardev=rgpu,virtio-id=38,num_vqs=3,vq_size=256,config_size=64",
    ]);
    command.arg("-serial").arg(format!("file:{}", console.display())).args(arguments);
    let log = File::create(host.logs().join("qemu.log"))?;
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    let begin = Instant::now();
    let mut guest = Guest(command.spawn().with_context(|| format!("cannot start {command:?}"))?);
    let shown = || String::from_utf8_lossy(&fs::read(&console).unwrap_or_default()).into_owned();
    let status = loop {
        if let Some(status) = guest.0.try_wait()? {
            break status;
        }
        if begin.elapsed() > LONG {
            bail!("the guest has not powered off; its console is {}:\n{}", console.display(), shown());
        }
        std::thread::sleep(Duration::from_millis(200));
    };
    println!("{name}: booted, used and powered off after {:.0} s", begin.elapsed().as_secs_f64());
    ensure!(status.success(), "QEMU: {status}; see {}", host.logs().display());
    host.settled()?;
    Ok(shown())
}

/// Requires that the guest has printed everything that a working guest prints.
fn check(console: &str) -> Result<()> {
    let said = |what: &str| {
        let begin = format!("GUEST {what} ");
        let lines = console.lines().map(str::trim);
        lines.filter_map(|line| line.strip_prefix(&begin)).map(str::to_owned).collect::<Vec<_>>()
    };
    let one = |what: &str, right: &dyn Fn(&str) -> bool| -> Result<()> {
        let lines = said(what);
        ensure!(lines.len() == 1 && right(&lines[0]), "{what}: the guest says {lines:?}\n{console}");
        Ok(())
    };
    one("host", &|text| text == "gpu-guest")?;
    one("keys", &|text| text == "1")?;
    one("sshd", &|text| text == "active")?;
    one("hostkeys", &|text| text.parse::<u32>().is_ok_and(|count| count > 0))?;
    one("driver", &|text| text.contains("/updates/dkms/virtio_rgpu.ko"))?;
    one("dkms", &|text| text.ends_with(": installed"))?;
    one("device", &|text| text == "666")?;
    // The disk has 4 GiB.
    one("disk", &|text| text.trim_end_matches('M').trim().parse::<u32>().is_ok_and(|mib| mib > 3500))?;
    one("failed", &|text| text == "0")?;
    ensure!(said("ran") == PROGRAMS, "programs: {:?}\n{console}", said("ran"));
    one("doctor", &|text| text == "0")?;
    let warning = console.lines().find(|line| line.contains("cloud-init") && line.contains("[WARNING]"));
    ensure!(warning.is_none(), "cloud-init warns: {warning:?}");
    Ok(())
}

#[test]
fn the_disk_boots_by_itself_with_seabios() -> Result<()> {
    check(&boot("image-seabios", &[])?)
}

#[test]
fn the_disk_boots_with_the_kernel_next_to_it() -> Result<()> {
    let mut arguments = Vec::new();
    for (option, ending) in [("-kernel", "vmlinuz"), ("-initrd", "initrd")] {
        arguments.extend([option.to_owned(), image(ending)?.display().to_string()]);
    }
    let line = "root=LABEL=rgpu-guest ro console=ttyS0";
    arguments.extend(["-append".to_owned(), line.to_owned()]);
    check(&boot("image-kernel", &arguments)?)
}
