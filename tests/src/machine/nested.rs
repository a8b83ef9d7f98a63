//! A virtual machine inside a machine: QEMU, and what it boots, put into the outer one's image.
//!
//! The inner guest has no agent. Its first process is a script that loads the image's modules, runs one
//! command and powers off. Its output is QEMU's, on the standard output of [`Nested::command`] in the outer
//! machine; what is written to [`CONSOLE`] there is its input. Nested emulation is slow: a boot takes a
//! minute or more.

use super::image::Image;
use super::{Accelerator, Builder, Kernel, Qemu};
use anyhow::Result;
use std::path::{Path, PathBuf};

/// What the inner guest prints before the status of its command.
pub const STATUS: &str = "nested status ";
/// A pipe of the outer machine: what the command reads.
pub const CONSOLE: &str = "/run/nested.console";
/// A pipe of the outer machine that takes commands for QEMU, such as `stop` and `cont`.
pub const MONITOR: &str = "/run/nested.monitor.in";

const INIT: &str = "#!/bin/sh
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev; mount -t tmpfs tmp /tmp
while read module; do insmod $module; done < /etc/modules
";

/// An inner machine, to be put into an outer one.
pub struct Nested {
    image: Image,
    kernel: PathBuf,
}

impl Nested {
    /// A machine with the rgpu driver that runs `command` in its shell.
    pub fn new(command: &str) -> Result<Nested> {
        let kernel = Kernel::V6_1.files()?;
        let mut image = Image::new();
        image.base(&kernel, &["virtio_pci".to_owned()], &[Kernel::V6_1.driver()?])?;
        image.host_libraries()?;
        let rest = format!("{command}\necho \"{STATUS}$?\"\npoweroff -f\n");
        image.contents("/init", 0o755, format!("{INIT}{rest}"));
        Ok(Nested { image, kernel: kernel.image() })
    }

    /// Puts a host's directory into the inner machine.
    pub fn dir(mut self, host: &Path, guest: &str) -> Result<Nested> {
        self.image.tree(host, guest)?;
        Ok(self)
    }

    /// Puts a host's file into the inner machine.
    pub fn file(mut self, host: &Path, guest: &str) -> Result<Nested> {
        self.image.file(host, guest)?;
        Ok(self)
    }

    /// Puts QEMU and all of this into an outer machine.
    pub fn put_into(self, mut builder: Builder) -> Result<Builder> {
        for (host, guest) in Qemu::find()?.parts()? {
            builder = builder.file(host, Path::new("/opt/qemu").join(guest));
        }
        Ok(builder.file(self.kernel, "/opt/nested/kernel").contents(
            "/opt/nested/initramfs",
            0o644,
            self.image.to_cpio(),
        ))
    }

    /// The command that boots it in the outer machine, its rgpu device served at `socket`.
    pub fn command(socket: &str) -> String {
        let (cpu, arguments) = (Accelerator::Tcg.cpu(), Accelerator::Tcg.kernel_arguments().join(" "));
        // QEMU opens its monitor's pipes for both directions, and so waits for nobody.
        format!(
            "mkfifo {CONSOLE} {MONITOR} /run/nested.monitor.out || exit 1; exec /opt/qemu/ld.so --library-path /opt/qemu/lib /opt/qemu/qemu -L /opt/qemu/share -accel tcg -cpu {cpu} \
             -machine q35,memory-backend=ram,vmport=off -object memory-backend-memfd,id=ram,size=384M,share=on -m 384M -nodefaults \
             -no-user-config -display none -chardev pipe,id=monitor,path=/run/nested.monitor -mon chardev=monitor -no-reboot -serial stdio -chardev socket,id=rgpu0,path={socket} \
             -device vhost-user-test-device-pci,chardev=rgpu0,virtio-id=38,num_vqs=3,vq_size=256,config_size=64 \
             -kernel /opt/nested/kernel -initrd /opt/nested/initramfs -append 'console=ttyS0 loglevel=4 panic=-1 no_timer_check {arguments}' <> {CONSOLE}"
        )
    }
}
