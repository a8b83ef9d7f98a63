//! Defines, starts and stops a guest with a real libvirtd and the domain in `qemu-configs/libvirt.xml`. QEMU
//! runs as Debian's user `libvirt-qemu`. Runs only on request.
//!
//! The daemon has its own namespaces, so it finds none of this machine's domains, networks and cgroups and
//! leaves nothing behind; everything it starts ends with it.

mod support;

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rgpu_tests::guest::{self, Host, Options};
use rgpu_tests::machine::Machine;
use rgpu_tests::programs;
use rgpu_tests::tree;
use support::eventually;

/// Time limit of a command in an emulated guest on a busy machine.
const LONG: Duration = Duration::from_secs(600);

/// The ID that Debian's package gives to the user and group `libvirt-qemu`.
const QEMU_USER: u32 = 64055;

/// Runs libvirtd in a mount namespace. The argument is the folder for its socket. The shell is the first
/// process of a PID namespace and reaps what QEMU leaves behind.
const DAEMON: &str = r#"
set -eu
folder=$1
for place in /etc/libvirt /run/libvirt /var/lib/libvirt /var/cache/libvirt /var/log/libvirt; do
	mkdir -p "$place"
	mount -t tmpfs -o mode=755 tmpfs "$place"
done
umount -R -l /sys/fs/cgroup
for file in passwd group; do
	grep -v '^libvirt-qemu:' "/etc/$file" >"$folder/$file"
done
echo 'libvirt-qemu:x:64055:64055::/var/lib/libvirt:/usr/sbin/nologin' >>"$folder/passwd"
echo 'libvirt-qemu:x:64055:' >>"$folder/group"
for file in passwd group; do
	mount --bind "$folder/$file" "/etc/$file"
done
printf '%s\n' 'stdio_handler = "file"' 'namespaces = []' >/etc/libvirt/qemu.conf
printf '%s\n' "unix_sock_dir = \"$folder\"" 'auth_unix_ro = "none"' 'auth_unix_rw = "none"' >"$folder/libvirtd.conf"
libvirtd --config "$folder/libvirtd.conf" --pid-file "$folder/pid" &
wait
"#;

/// Replaces QEMU: defines the domain in the file $DOMAIN with its arguments appended, starts the domain, and
/// runs as long as the domain does.
const START: &str = r#"
set -eu
for word; do
	case $word in
	# libvirt's user reads and writes what the tests have put there for QEMU.
	*/initramfs) chmod -R a+rwX "${word%/*}" ;;
	esac
done
emulator=$(command -v qemu-system-x86_64)
while IFS= read -r line; do
	case $line in
	*"</qemu:commandline>"*)
		for word; do
			# Where libvirt puts none of its own devices.
			if [ "$word" = virtio-serial-pci ]; then word=$word,addr=0x11; fi
			printf "    <qemu:arg value='%s'/>\n" "$(printf %s "$word" | sed "s/&/\&amp;/g; s/</\&lt;/g; s/'/\&apos;/g")"
		done
		;;
	esac
	printf '%s\n' "$line" | sed "s|@EMULATOR@|$emulator|"
done <"$DOMAIN" >"$DOMAIN.whole"
virsh -c "$URI" undefine guest1 >/dev/null 2>&1 || :
virsh -c "$URI" define "$DOMAIN.whole"
virsh -c "$URI" start guest1
while [ "$(virsh -c "$URI" domstate guest1)" = running ]; do sleep 0.2; done
"#;

/// A running libvirtd. Dropping it ends it and everything it has started.
struct Libvirt {
    daemon: Child,
    folder: tempfile::TempDir,
}

impl Libvirt {
    fn start() -> Result<Libvirt> {
        let folder = tempfile::Builder::new().prefix("rgpu-libvirt-").tempdir()?;
        let log = fs::File::create(folder.path().join("log"))?;
        let mut command = Command::new("unshare");
        command.args(["--mount", "--pid", "--net", "--ipc", "--mount-proc", "--fork", "--kill-child"]);
        command.args(["sh", "-c", DAEMON, "libvirtd"]).arg(folder.path());
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let daemon = command.spawn().context("cannot run unshare")?;
        let libvirt = Libvirt { daemon, folder };
        eventually(|| libvirt.virsh(&["uri"]).map(drop)).with_context(|| libvirt.log())?;
        Ok(libvirt)
    }

    fn uri(&self) -> String {
        format!("qemu+unix:///system?socket={}/libvirt-sock", self.folder.path().display())
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    fn virsh(&self, words: &[&str]) -> Result<String> {
        let output = Command::new("virsh").arg("-c").arg(self.uri()).args(words).output()?;
        let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        ensure!(
            output.status.success(),
            "virsh {words:?}: {said} {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(said)
    }

    fn state(&self) -> Result<String> {
        self.virsh(&["domstate", "guest1"])
    }

    /// Boots the domain of `qemu-configs/libvirt.xml`, emulated, with this socket of `vhost-rgpu`.
    fn boot(&self, socket: &Path) -> Result<Machine> {
        let text = fs::read_to_string(tree::root().join("qemu-configs/libvirt.xml"))?;
        let socket = socket.display().to_string();
        let domain = [
            ("type='kvm'", "type='qemu'"),
            ("<memory unit='GiB'>4<", "<memory unit='GiB'>1<"),
            ("<vcpu>4<", "<vcpu>2<"),
            ("/usr/bin/qemu-system-x86_64", "@EMULATOR@"),
            ("<cpu mode='host-passthrough'/>", "<cpu mode='maximum'/>"),
            ("/run/rgpu/vm-guest1.sock", &socket),
        ];
        let domain = domain.iter().try_fold(text, |text, (from, to)| {
            ensure!(text.contains(from), "qemu-configs/libvirt.xml has no {from}");
            Ok(text.replacen(from, to, 1))
        })?;
        let path = |name: &str| self.folder.path().join(name);
        fs::write(path("domain.xml"), domain)?;
        fs::write(path("start.sh"), START)?;
        let mut some = programs::portable()?;
        some.retain(|program| ["vectorAdd", "reduction"].contains(&program.name.as_str()));
        let environment = [("DOMAIN", path("domain.xml").display().to_string()), ("URI", self.uri())];
        guest::builder(&some).hardware_from_script(path("start.sh"), environment).boot()
    }
}

impl Drop for Libvirt {
    fn drop(&mut self) {
        // unshare ends the PID namespace's first process, and the kernel ends all others.
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

fn passes(machine: &Machine, program: &str) -> Result<()> {
    let output = machine.run(program, LONG)?;
    ensure!(output.success() && output.text().contains("PASS"), "{program}: {output}");
    Ok(())
}

#[test]
fn a_domain_is_defined_started_and_stopped() -> Result<()> {
    let host = Host::start("libvirt", Options::software("local"))?;
    let libvirt = Libvirt::start()?;
    println!("{}", libvirt.virsh(&["version"]).unwrap_or_else(|error| error.to_string()));
    let socket = host.socket();
    let folder = socket.parent().context("a socket lies in a folder")?;
    fs::set_permissions(folder, fs::Permissions::from_mode(0o711))?;

    // The socket belongs to root, as vhost-rgpu creates it.
    let refused = libvirt.boot(&socket).err().context("QEMU reached a socket that is not its user's")?;
    let said = format!("{refused:#}");
    ensure!(said.contains("Permission denied"), "{said}");
    ensure!(libvirt.state()? == "shut off", "{}", libvirt.state()?);

    // As vhost-rgpu gives it away with group = "libvirt-qemu".
    chown(&socket, None, Some(QEMU_USER))?;
    let machine = libvirt.boot(&socket).with_context(|| libvirt.log())?;
    ensure!(libvirt.state()? == "running", "{}", libvirt.state()?);
    ensure!(libvirt.virsh(&["qemu-monitor-command", "--hmp", "guest1", "info pci"])?.contains("1af4:1066"));
    passes(&machine, "vectorAdd")?;
    machine.check("test -d /sys/module/virtio_rgpu && test -c /dev/rgpu0", LONG)?;
    machine.check_console()?;
    machine.shutdown()?;
    eventually(|| {
        let state = libvirt.state()?;
        ensure!(state == "shut off", "{state}");
        Ok(())
    })?;
    drop(machine);

    // The daemons serve the next domain, which is destroyed instead of shut down.
    let machine = libvirt.boot(&socket)?;
    passes(&machine, "reduction")?;
    libvirt.virsh(&["destroy", "guest1"])?;
    ensure!(libvirt.state()? == "shut off", "{}", libvirt.state()?);
    drop(machine);
    libvirt.virsh(&["undefine", "guest1"])?;
    host.settled()
}
