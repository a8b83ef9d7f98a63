//! A machine with RDMA but no card: Debian's full kernel, RoCE in software (`rdma_rxe`) on both ends of a
//! link, and the tools to look at it.
//!
//! ```text
//!   server's side: 10.0.1.1 on v0, RDMA device rxe0 ══ w0 ── bridge ── w1 ══ 10.0.1.2 on v1, RDMA device rxe1: clients' side
//! ```
//!
//! Both ends are in one network namespace, because `rdma_rxe` of Linux 6.1 only receives in the first one.
//! Traffic from rxe1 to rxe0 still crosses the link: rxe routes by its own interface, and `accept_local`
//! allows both addresses to be local. So [`CUT`] takes the carrier from both ports as a pulled cable does,
//! and `tc` on v0 or v1 disturbs RDMA; TCP between the two addresses bypasses the link, through `lo`.

use super::{Builder, Kernel, Machine, setup};
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The server's address and RDMA device.
pub const SERVER: (&str, &str) = ("10.0.1.1", "rxe0");
/// The clients' address and RDMA device.
pub const CLIENT: (&str, &str) = ("10.0.1.2", "rxe1");
/// The RDMA device on the virtual function of [`virtual_function`].
pub const FUNCTION: &str = "rxevf";

/// How long anything may take in this machine, emulated on a busy host.
const LONG: Duration = Duration::from_secs(600);

/// Command that cuts the link.
pub const CUT: &str = "/bin/ip link set w0 down; /bin/ip link set w1 down";
/// Command that restores it.
pub const MEND: &str = "/bin/ip link set w0 up; /bin/ip link set w1 up";

const PACKAGES: [&str; 20] = [
    "libibverbs1",
    "ibverbs-providers",
    "ibverbs-utils",
    "perftest",
    "librdmacm1",
    "libibumad3",
    "libnl-3-200",
    "libnl-route-3-200",
    "iproute2",
    "libmnl0",
    "libelf1",
    "libbpf1",
    "libbsd0",
    "libmd0",
    "libcap2",
    "libdb5.3",
    "libtirpc3",
    "libxtables12",
    "libpci3",
    "libudev1",
];

/// Tools by their paths: the machine's shell has smaller ones with the same names.
const NETWORK: &str = "
set -e
/bin/ip link set lo up
/bin/ip link add br0 mtu 4200 type bridge
/bin/ip link add v0 mtu 4200 type veth peer name w0 mtu 4200
/bin/ip link add v1 mtu 4200 type veth peer name w1 mtu 4200
/bin/ip link set w0 master br0
/bin/ip link set w1 master br0
/bin/ip link set br0 up
/bin/ip link set w0 up
/bin/ip link set w1 up
echo 0 > /proc/sys/net/ipv4/conf/all/rp_filter
for v in v0 v1; do
    cd /proc/sys/net/ipv4/conf/$v
    echo 1 > accept_local; echo 0 > rp_filter; echo 1 > arp_ignore; echo 2 > arp_announce
done
cd /
/bin/ip addr add 10.0.1.1/24 dev v0
/bin/ip addr add 10.0.1.2/24 dev v1
/bin/ip link set v0 up
/bin/ip link set v1 up
rdma link add rxe0 type rxe netdev v0
rdma link add rxe1 type rxe netdev v1
";

const UP: &str = "for i in $(seq 3000); do rdma link | grep -c 'state ACTIVE' | grep -qx 2 && exit 0; sleep 0.1; done; rdma link; exit 1";

/// RDMA's user space, unpacked; fetched if missing.
pub fn userland() -> Result<PathBuf> {
    let root = setup::build_dir().join("rdma");
    setup::once("rdma", "1", || {
        setup::announce("fetching RDMA's user space");
        let _ = std::fs::remove_dir_all(&root);
        std::fs::create_dir_all(&root)?;
        let packages: Vec<String> = PACKAGES.iter().map(|p| (*p).to_owned()).collect();
        setup::with_lists(None, || setup::unpack(&packages, &root, None))?;
        for folder in ["usr/share/doc", "usr/share/man", "usr/share/bash-completion"] {
            let _ = std::fs::remove_dir_all(root.join(folder));
        }
        Ok(())
    })?;
    Ok(root)
}

/// Such a machine's parts; [`boot`] boots it.
pub fn builder() -> Result<Builder> {
    let mut builder = Machine::builder().kernel(Kernel::V6_1Full).memory_mib(2048).cpus(2).host_libraries();
    // perftest reads the processors' own clock (TSC), so the kernel uses it here with KVM, too.
    builder = builder.kernel_arg("tsc=reliable").kernel_arg("clocksource=tsc");
    // rxe computes its checksums with a module that it does not ask the kernel to load.
    for module in ["crc32_generic", "rdma_rxe", "ib_uverbs", "veth", "bridge", "sch_netem"] {
        builder = builder.module(module);
    }
    let root = userland()?;
    for folder in ["bin", "sbin", "lib", "usr", "etc"] {
        let host = root.join(folder);
        if host.is_dir() {
            builder = builder.dir(host, Path::new("/").join(folder));
        }
    }
    Ok(builder)
}

/// Boots a machine and brings its link up.
pub fn boot(builder: Builder) -> Result<Machine> {
    let machine = builder.boot()?;
    machine.check(NETWORK, LONG).context("setting up the machine's network")?;
    wait_up(&machine)?;
    Ok(machine)
}

/// Waits until both RDMA devices have an active port.
pub fn wait_up(machine: &Machine) -> Result<()> {
    machine.check(UP, LONG).context("waiting for the RDMA devices")?;
    Ok(())
}

/// QEMU's arguments for a network card with virtual functions, for [`virtual_function`]. Its port leads to a
/// second card, which has the other end's RDMA device.
pub fn with_virtual_functions(builder: Builder) -> Builder {
    builder
        .module("igb")
        .module("igbvf")
        .module("e1000e")
        .qemu_arg("-netdev")
        .qemu_arg("hubport,hubid=0,id=pf")
        .qemu_arg("-device")
        .qemu_arg("pcie-root-port,id=slot1,chassis=1")
        .qemu_arg("-device")
        .qemu_arg("igb,bus=slot1,netdev=pf,mac=52:54:00:00:00:01")
        .qemu_arg("-netdev")
        .qemu_arg("hubport,hubid=0,id=peer")
        .qemu_arg("-device")
        .qemu_arg("e1000e,netdev=peer,mac=52:54:00:00:00:02")
}

const FUNCTIONS: &str = "
set -e
interface() { for n in /sys/class/net/*; do [ -e $n/device/driver ] && [ $(basename $(readlink -f $n/device/driver)) = $1 ] && basename $n && return; done; }
pf=$(interface igb); peer=$(interface e1000e)
/bin/ip link set $pf up
echo 1 > /sys/class/net/$pf/device/sriov_numvfs
for i in $(seq 3000); do vf=$(interface igbvf); [ -n \"$vf\" ] && break; sleep 0.1; done
/bin/ip link set $vf name vf0
/bin/ip link set $peer name peer0
echo 0 > /proc/sys/net/ipv4/conf/all/rp_filter
for v in vf0 peer0; do
    /bin/ip link set $v mtu 1500
    cd /proc/sys/net/ipv4/conf/$v
    echo 1 > accept_local; echo 0 > rp_filter; echo 1 > arp_ignore; echo 2 > arp_announce
done
cd /
/bin/ip addr add 10.0.2.2/24 dev vf0
/bin/ip addr add 10.0.2.1/24 dev peer0
/bin/ip link set vf0 up
/bin/ip link set peer0 up
rdma link add rxevf type rxe netdev vf0
rdma link add rxepeer type rxe netdev peer0
for i in $(seq 3000); do rdma link | grep -c 'state ACTIVE' | grep -qx 4 && exit 0; sleep 0.1; done
rdma link; /bin/ip link; exit 1
";

/// Makes a virtual function and puts an RDMA device on it: [`FUNCTION`], 10.0.2.2. The other end is
/// `rxepeer`, 10.0.2.1.
pub fn virtual_function(machine: &Machine) -> Result<()> {
    machine.check(FUNCTIONS, LONG).context("making a virtual function")?;
    let driver = machine.check("basename $(readlink /sys/class/net/vf0/device/driver)", LONG)?;
    ensure!(driver == "igbvf", "the interface is driven by {driver}, so it is no virtual function");
    let physical = machine.check("ls -d /sys/class/net/vf0/device/physfn", LONG)?;
    ensure!(!physical.is_empty(), "the interface has no physical function behind it");
    Ok(())
}
