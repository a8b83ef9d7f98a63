//! Machines to test on: virtual machines that set themselves up and boot in seconds, with or without KVM.
//!
//! ```no_run
//! use rgpu_tests::machine::{Kernel, Machine};
//! use std::time::Duration;
//!
//! # fn main() -> anyhow::Result<()> {
//! let machine = Machine::builder().kernel(Kernel::V6_1).driver(true).rgpu_socket("/tmp/vhost.sock").boot()?;
//! let output = machine.run("ls -l /dev/rgpu0", Duration::from_secs(10))?;
//! assert_eq!(output.status, 0, "{output}");
//! machine.shutdown()?;
//! # Ok(())
//! # }
//! ```
//!
//! Everything a machine needs is fetched and built on first use, as root on Debian 12, and kept under
//! `build/machine` in the repository: see [`setup`] for the locations, [`qemu`] for the emulator, [`kernel`]
//! for the kernels and the driver built for each. A machine's root file system is an initramfs ([`image`]);
//! its first process is a small agent (`agent.c`), which runs commands for [`Machine::run`] and
//! [`Machine::spawn`] ([`agent`] is the host's side). A machine with a disk ([`systemd`]) is a whole Debian.

pub mod agent;
pub mod image;
pub mod kernel;
pub mod nested;
pub mod qemu;
pub mod rdma;
pub mod setup;
pub mod systemd;

mod builder;

pub use agent::{Output, Process};
pub use builder::{Builder, Machine};
pub use kernel::Kernel;
pub use qemu::{Accelerator, Qemu};

/// Debian packages of this host that a machine with [`Kernel::V6_1`] needs, so that they can be installed at
/// once. Anything missing is also installed on its own when it is needed.
pub const PACKAGES: [&str; 7] =
    ["busybox-static", "debootstrap", "gcc", "kmod", "libelf1", "make", "xz-utils"];
