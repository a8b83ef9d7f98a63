//! Checks what the transport `verbs` needs on a host: library, device, port, address, MTU, locked memory.
//!
//! Everything is read from sysfs and proc, so the checks need no RDMA tools and can be tested with fake file
//! trees.

use std::fs;
use std::net::Ipv6Addr;
use std::path::{Path, PathBuf};

use host_bridge::verbs::Settings;
use host_bridge::verbs::device::{GidEntry, choose_gid};

use super::Finding::{self, Good, Note, Wrong};

/// The MTUs of InfiniBand and RoCE, in bytes.
const MTUS: [u32; 5] = [256, 512, 1024, 2048, 4096];
/// Bytes of an interface's MTU that the kernel reserves for RoCE's headers.
const HEADERS: u32 = 96;
/// Bytes of locked memory that a daemon needs for one session.
const LOCKED: u64 = 1 << 30;

/// Runs the checks. `root` is `/`, `library` is the path of libibverbs. Returns nothing if there is no RDMA
/// device and none was asked for.
pub fn check(root: &Path, choice: &Settings, library: Option<PathBuf>) -> Vec<Finding> {
    let mut devices = names(&root.join("sys/class/infiniband"));
    devices.sort();
    if devices.is_empty() {
        return match &choice.device {
            None => Vec::new(),
            Some(name) => vec![Wrong(
                format!("there is no RDMA device {name}, and no other either: /sys/class/infiniband is empty"),
                "load the card's driver (mlx5_ib, irdma, bnxt_re …), or for RoCE in software: rdma link add rxe0 type rxe netdev INTERFACE; a virtual function bound to vfio-pci belongs to a guest"
                    .into(),
            )],
        };
    }
    let mut findings = vec![match library {
        Some(path) => Good(format!("libibverbs is {}", path.display())),
        None => Wrong(
            "libibverbs.so.1 is not installed; transport verbs needs it".into(),
            "apt install libibverbs1 ibverbs-providers".into(),
        ),
    }];
    let chosen = match &choice.device {
        Some(name) if devices.contains(name) => vec![name.clone()],
        Some(name) => {
            findings.push(Wrong(
                format!("there is no RDMA device {name}; this host has {}", devices.join(", ")),
                format!("choose an existing one: --rdma-device {}", devices[0]),
            ));
            Vec::new()
        }
        None => devices.clone(),
    };
    // With several devices it is unknown which one will be used, so a port that is down is only worth a note.
    let certain = chosen.len() == 1;
    for name in &chosen {
        let port = Port { root, device: name, number: choice.port };
        match port.check(choice) {
            Wrong(text, step) if !certain => findings.push(Note(text, Some(step))),
            finding => findings.push(finding),
        }
    }
    findings.extend(device_files(root));
    findings.extend(["rgpu-server", "vhost-rgpu"].iter().flat_map(|name| locked_memory(root, name)));
    findings
}

fn names(folder: &Path) -> Vec<String> {
    let entries =
        fs::read_dir(folder).map(|entries| entries.flatten().collect()).unwrap_or_else(|_| Vec::new());
    entries.iter().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

fn read(path: PathBuf) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

struct Port<'a> {
    root: &'a Path,
    device: &'a str,
    number: u8,
}

impl Port<'_> {
    fn file(&self, name: &str) -> Option<String> {
        let device = self.root.join("sys/class/infiniband").join(self.device);
        read(device.join("ports").join(self.number.to_string()).join(name))
    }

    /// Describes the port, or what is wrong with it.
    fn check(&self, choice: &Settings) -> Finding {
        let Port { root, device, number } = *self;
        let mut ports = names(&root.join("sys/class/infiniband").join(device).join("ports"));
        ports.sort();
        if !ports.contains(&number.to_string()) {
            return Wrong(
                format!("RDMA device {device} has no port {number}, only {}", ports.join(", ")),
                "set --rdma-port (`rdma.port`) to an existing port".into(),
            );
        }
        let ethernet = self.file("link_layer").as_deref() == Some("Ethernet");
        let state = self.file("state").unwrap_or_default();
        // For example `4: ACTIVE`. `ACTIVE_DEFER` passes packets, too.
        let (_, word) = state.split_once(": ").unwrap_or(("", "unknown"));
        if !word.starts_with("ACTIVE") {
            let step = if ethernet {
                "check the cable, and `ip link set INTERFACE up`"
            } else {
                "check the cable; INIT or ARMED means that no subnet manager is running (opensm, or in the switch)"
            };
            return Wrong(format!("port {number} of RDMA device {device} is {word}"), step.into());
        }
        let path = if ethernet || choice.gid_index.is_some() {
            match self.gid(choice.gid_index) {
                Ok(found) => found,
                Err(wrong) => return wrong,
            }
        } else {
            format!("LID {}", self.file("lid").unwrap_or_default())
        };
        let mtu = match self.mtu(ethernet, choice.mtu) {
            Ok(mtu) => mtu,
            Err(wrong) => return wrong,
        };
        let partition = match self.partition(ethernet, choice.partition) {
            Ok(partition) => partition,
            Err(wrong) => return wrong,
        };
        let folder = root.join("sys/class/infiniband").join(device).join("device/physfn");
        let function = if folder.exists() { ", a virtual function" } else { "" };
        let firewall = if ethernet { "; firewalls must allow UDP port 4791" } else { "" };
        Good(format!(
            "RDMA device {device} port {number}{function}: active, {path}{partition}{mtu}{firewall}"
        ))
    }

    fn gid(&self, index: Option<u8>) -> Result<String, Finding> {
        let (device, number) = (self.device, self.number);
        let entry = |index: u8| {
            let gid: Ipv6Addr = self.file(&format!("gids/{index}"))?.parse().ok()?;
            let kind = self.file(&format!("gid_attrs/types/{index}"))?;
            (!gid.is_unspecified()).then_some(GidEntry { index, gid: gid.octets(), kind })
        };
        let table: Vec<_> = (0..=u8::MAX).filter_map(entry).collect();
        let step = || {
            "give the port's network interface an IP address (ip addr add …); --rdma-gid-index (`rdma.gid_index`) is an index of `show_gids` or /sys/class/infiniband/*/ports/*/gids".to_owned()
        };
        let address = |entry: &GidEntry| Ipv6Addr::from(entry.gid);
        if let Some(index) = index {
            let Some(entry) = table.iter().find(|entry| entry.index == index) else {
                let have: Vec<_> = table.iter().map(|entry| entry.index.to_string()).collect();
                return Err(Wrong(
                    format!(
                        "entry {index} of the GID table of {device} port {number} is empty; entries in use: {}",
                        have.join(", ")
                    ),
                    step(),
                ));
            };
            if entry.kind == "IB/RoCE v1" && self.file("link_layer").as_deref() == Some("Ethernet") {
                return Err(Wrong(
                    format!(
                        "GID {index} of {device} port {number} is RoCE v1, which routers do not forward and many cards no longer support"
                    ),
                    "omit --rdma-gid-index (`rdma.gid_index`): a RoCE v2 entry is then chosen".into(),
                ));
            }
            return Ok(format!("GID {index} ({})", address(entry)));
        }
        match choose_gid(&table) {
            Some(entry) => Ok(format!("GID {} ({}), RoCE v2", entry.index, address(entry))),
            None => Err(Wrong(
                format!(
                    "port {number} of RDMA device {device} has no RoCE v2 GID among its {} entries",
                    table.len()
                ),
                step(),
            )),
        }
    }

    /// Describes the partition: the one that is wanted, or that of the port's first entry.
    fn partition(&self, ethernet: bool, wanted: Option<u16>) -> Result<String, Finding> {
        /// What a P_Key says beside its partition: its holder may talk to all members.
        const FULL: u16 = 1 << 15;
        let (device, number) = (self.device, self.number);
        let entry = |index: u8| {
            let key = self.file(&format!("pkeys/{index}"))?;
            u16::from_str_radix(key.trim_start_matches("0x"), 16).ok()
        };
        let table: Vec<u16> = (0..=u8::MAX).map_while(entry).collect();
        let of = |wanted: u16| table.iter().copied().filter(move |key| key & !FULL == wanted & !FULL).max();
        let key = match wanted {
            Some(wanted) => of(wanted).ok_or_else(|| {
                let have: Vec<_> = table.iter().filter(|key| *key & !FULL != 0).collect();
                let have: Vec<_> = have.into_iter().map(|key| format!("{key:#06x}")).collect();
                Wrong(
                    format!(
                        "port {number} of RDMA device {device} is not in partition {wanted:#06x}, only in {}",
                        have.join(", ")
                    ),
                    "add it in the subnet manager (partitions.conf of opensm); on Ethernet use a VLAN, and omit --rdma-partition (`rdma.partition`)"
                        .into(),
                )
            })?,
            None if ethernet => return Ok(String::new()),
            None => match table.first() {
                Some(key) => *key,
                None => return Ok(String::new()),
            },
        };
        if key & FULL == 0 {
            return Err(Note(
                format!(
                    "port {number} of RDMA device {device} is a limited member of partition {key:#06x}: it reaches no other limited member"
                ),
                Some(
                    "make hosts or servers full members in the subnet manager, or choose another partition with --rdma-partition (`rdma.partition`)"
                        .into(),
                ),
            ));
        }
        Ok(format!(", partition {key:#06x}"))
    }

    /// Describes the MTU. sysfs has it only for RoCE, where it follows from the interface's.
    fn mtu(&self, ethernet: bool, wanted: Option<u32>) -> Result<String, Finding> {
        let (device, number) = (self.device, self.number);
        if let Some(wanted) = wanted.filter(|wanted| !MTUS.contains(wanted)) {
            return Err(Wrong(
                format!("{wanted} is not an MTU of InfiniBand or RoCE"),
                "use 256, 512, 1024, 2048 or 4096".into(),
            ));
        }
        let interface = self.file("gid_attrs/ndevs/0").filter(|_| ethernet);
        let bytes = interface.as_ref().and_then(|name| {
            read(self.root.join("sys/class/net").join(name).join("mtu"))?.parse::<u32>().ok()
        });
        let (Some(interface), Some(bytes)) = (interface, bytes) else { return Ok(String::new()) };
        let most = MTUS.into_iter().rev().find(|mtu| mtu + HEADERS <= bytes).unwrap_or(0);
        match wanted {
            Some(wanted) if wanted > most => Err(Wrong(
                format!(
                    "MTU {wanted} is too large: port {number} of {device} supports {most}, because its interface {interface} has MTU {bytes}"
                ),
                format!("ip link set {interface} mtu {}, here and on every hop", wanted + 104),
            )),
            _ => Ok(format!(", MTU {} of {most} (interface {interface}: {bytes})", wanted.unwrap_or(most))),
        }
    }
}

/// Checks the device files.
fn device_files(root: &Path) -> Option<Finding> {
    let there = names(&root.join("dev/infiniband")).iter().any(|name| name.starts_with("uverbs"));
    (!there).then(|| {
        Wrong(
            "/dev/infiniband has no uverbs file, so processes cannot use the RDMA devices".into(),
            "modprobe ib_uverbs; in a container: pass /dev/infiniband in".into(),
        )
    })
}

/// Checks whether a running daemon with this name may register memory.
fn locked_memory(root: &Path, daemon: &str) -> Option<Finding> {
    const IPC_LOCK: u64 = 1 << 14;
    let proc = root.join("proc");
    let process =
        names(&proc).into_iter().find(|pid| read(proc.join(pid).join("comm")).as_deref() == Some(daemon))?;
    let status = read(proc.join(&process).join("status"))?;
    let capable = status
        .lines()
        .find_map(|line| u64::from_str_radix(line.strip_prefix("CapEff:")?.trim(), 16).ok())
        .is_some_and(|capabilities| capabilities & IPC_LOCK != 0);
    let limits = read(proc.join(&process).join("limits"))?;
    let soft =
        limits.lines().find_map(|line| line.strip_prefix("Max locked memory")?.split_whitespace().next())?;
    let bytes = soft.parse::<u64>().unwrap_or(u64::MAX);
    if capable || bytes >= LOCKED {
        return Some(Good(format!("{daemon} may register memory with RDMA devices")));
    }
    Some(Wrong(
        format!(
            "{daemon} (process {process}) may lock only {} KiB of memory, and RDMA locks all memory that it uses",
            bytes >> 10
        ),
        format!(
            "LimitMEMLOCK=infinity in the unit of {daemon} (systemctl edit {daemon}), or `ulimit -l unlimited` before starting it"
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The file tree of a fake host.
    struct Tree(PathBuf);

    impl Tree {
        /// A host with an active RoCE device.
        fn new(name: &str) -> Tree {
            let root = std::env::temp_dir().join(format!("rgpuctl-rdma-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&root);
            let tree = Tree(root);
            tree.device("mlx5_0", "4: ACTIVE");
            tree.put("sys/class/net/eth0/mtu", "4200");
            tree.put("dev/infiniband/uverbs0", "");
            tree
        }

        fn device(&self, name: &str, state: &str) {
            let port = format!("sys/class/infiniband/{name}/ports/1");
            for (file, text) in [
                ("state", state),
                ("link_layer", "Ethernet"),
                ("lid", "0x0"),
                ("gids/0", "fe80:0000:0000:0000:0000:0000:0000:0001"),
                ("gid_attrs/types/0", "IB/RoCE v1"),
                ("gid_attrs/ndevs/0", "eth0"),
                ("gids/1", "0000:0000:0000:0000:0000:ffff:0a00:0101"),
                ("gid_attrs/types/1", "RoCE v2"),
                ("gids/2", "0000:0000:0000:0000:0000:0000:0000:0000"),
                ("gid_attrs/types/2", "RoCE v2"),
            ] {
                self.put(&format!("{port}/{file}"), text);
            }
        }

        fn put(&self, path: &str, text: &str) {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        }

        fn check(&self, change: impl FnOnce(&mut Settings)) -> Vec<Finding> {
            let mut choice = Settings::default();
            change(&mut choice);
            check(&self.0, &choice, Some("/lib/libibverbs.so.1".into()))
        }

        /// The only finding that is wrong.
        fn wrong(&self, change: impl FnOnce(&mut Settings)) -> (String, String) {
            let findings = self.check(change);
            let wrong: Vec<_> = findings
                .iter()
                .filter_map(|finding| match finding {
                    Wrong(text, step) => Some((text.clone(), step.clone())),
                    _ => None,
                })
                .collect();
            assert_eq!(wrong.len(), 1, "{findings:?}");
            wrong[0].clone()
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_good_device_is_described() {
        let findings = Tree::new("good").check(|_| {});
        assert!(findings.iter().all(|finding| matches!(finding, Good(_))), "{findings:?}");
        let Some(Good(text)) = findings.get(1) else { panic!("{findings:?}") };
        assert!(text.contains("GID 1 (::ffff:10.0.1.1)") && text.contains("MTU 4096 of 4096"), "{text}");
    }

    #[test]
    fn a_host_without_rdma_is_fine_unless_a_device_is_given() {
        let tree = Tree(std::env::temp_dir().join("rgpuctl-rdma-none"));
        assert!(tree.check(|_| {}).is_empty());
        assert!(tree.wrong(|c| c.device = Some("mlx5_0".into())).0.contains("mlx5_0"));
    }

    #[test]
    fn an_unknown_device_is_answered_with_the_existing_ones() {
        let (text, _) = Tree::new("name").wrong(|c| c.device = Some("mlx4_0".into()));
        assert!(text.contains("mlx4_0") && text.contains("has mlx5_0"), "{text}");
    }

    #[test]
    fn an_unknown_port_is_named() {
        let (text, _) = Tree::new("port").wrong(|c| c.port = 2);
        assert!(text.contains("no port 2, only 1"), "{text}");
    }

    #[test]
    fn a_port_that_is_down_is_wrong_if_it_is_the_only_one() {
        let tree = Tree::new("down");
        tree.device("mlx5_0", "1: DOWN");
        assert!(tree.wrong(|_| {}).0.contains("is DOWN"));
        tree.put("sys/class/infiniband/mlx5_0/ports/1/link_layer", "InfiniBand");
        tree.put("sys/class/infiniband/mlx5_0/ports/1/state", "2: INIT");
        assert!(tree.wrong(|_| {}).1.contains("subnet manager"));
        // With another device that is up, it may be down on purpose.
        tree.device("mlx5_1", "4: ACTIVE");
        let findings = tree.check(|_| {});
        assert!(
            findings.iter().any(|f| matches!(f, Note(text, _) if text.contains("is INIT"))),
            "{findings:?}"
        );
    }

    #[test]
    fn each_kind_of_unusable_gid_has_its_own_message() {
        let tree = Tree::new("gid");
        assert!(tree.wrong(|c| c.gid_index = Some(7)).0.contains("in use: 0, 1"));
        assert!(tree.wrong(|c| c.gid_index = Some(2)).0.contains("is empty"));
        assert!(tree.wrong(|c| c.gid_index = Some(0)).0.contains("RoCE v1"));
        tree.put("sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/1", "IB/RoCE v1");
        assert!(tree.wrong(|_| {}).1.contains("IP address"));
    }

    #[test]
    fn a_partition_that_the_port_is_not_a_full_member_of_is_named() {
        let tree = Tree::new("partition");
        let port = "sys/class/infiniband/mlx5_0/ports/1";
        tree.put(&format!("{port}/link_layer"), "InfiniBand");
        for (index, key) in ["0xffff", "0x8001", "0x0002", "0x0000"].into_iter().enumerate() {
            tree.put(&format!("{port}/pkeys/{index}"), key);
        }
        let says = |findings: &[Finding], what: &str| {
            let has =
                |finding: &&Finding| matches!(finding, Good(text) | Note(text, _) if text.contains(what));
            assert!(findings.iter().any(|finding| has(&finding)), "{what}: {findings:?}");
        };
        says(&tree.check(|_| {}), "partition 0xffff");
        says(&tree.check(|c| c.partition = Some(0x8001)), "active, LID 0x0, partition 0x8001");
        says(&tree.check(|c| c.partition = Some(0x8002)), "limited member of partition 0x0002");
        let (text, step) = tree.wrong(|c| c.partition = Some(0x8003));
        assert!(
            text.contains("only in 0xffff, 0x8001, 0x0002") && step.contains("partitions.conf"),
            "{text}"
        );
    }

    #[test]
    fn an_mtu_beyond_the_interfaces_is_wrong() {
        let tree = Tree::new("mtu");
        assert!(tree.wrong(|c| c.mtu = Some(1500)).0.contains("not an MTU"));
        tree.put("sys/class/net/eth0/mtu", "1500");
        let (text, step) = tree.wrong(|c| c.mtu = Some(4096));
        assert!(text.contains("supports 1024") && step.contains("eth0 mtu 4200"), "{text} {step}");
        assert!(tree.check(|c| c.mtu = Some(1024)).iter().all(|f| matches!(f, Good(_))));
    }

    #[test]
    fn a_daemon_that_may_not_lock_memory_is_named() {
        let tree = Tree::new("memlock");
        tree.put("proc/77/comm", "vhost-rgpu");
        tree.put("proc/77/status", "Name:\tvhost-rgpu\nCapEff:\t0000000000000000");
        tree.put(
            "proc/77/limits",
            "Max locked memory         8388608              8388608              bytes",
        );
        let (text, step) = tree.wrong(|_| {});
        assert!(
            text.contains("process 77") && text.contains("8192 KiB") && step.contains("LimitMEMLOCK"),
            "{text}"
        );
        tree.put(
            "proc/77/limits",
            "Max locked memory         unlimited            unlimited            bytes",
        );
        assert!(tree.check(|_| {}).iter().all(|f| matches!(f, Good(_))));
        tree.put("proc/77/limits", "Max locked memory         65536            65536            bytes");
        tree.put("proc/77/status", "Name:\tvhost-rgpu\nCapEff:\t000001ffffffffff");
        assert!(tree.check(|_| {}).iter().all(|f| matches!(f, Good(_))));
    }

    #[test]
    fn missing_device_files_are_named() {
        let tree = Tree::new("uverbs");
        fs::remove_dir_all(tree.0.join("dev")).unwrap();
        assert!(tree.wrong(|_| {}).1.contains("ib_uverbs"));
    }
}
