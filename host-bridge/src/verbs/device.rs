//! Which device, port, GID and MTU: from what is configured and what the host has.

use std::ffi::CStr;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use nix::sys::eventfd::{EfdFlags, EventFd};

use super::error::VerbsError;
use super::settings::Settings;
use super::sys::{self, Gid, Library, check, number};

/// An open device, and which of its ports to use how. Closed with its last user.
#[derive(Debug)]
pub struct Device {
    context: NonNull<sys::Context>,
    name: String,
    settings: Settings,
    limits: Limits,
    /// The GID that was used last.
    gid: Mutex<Option<GidEntry>>,
    /// It works no more: why, and what is readable from then on.
    failure: OnceLock<String>,
    failed: EventFd,
}

// SAFETY: libibverbs allows every call on a context from any thread.
unsafe impl Send for Device {}
// SAFETY: its calls may be made at the same time, too.
unsafe impl Sync for Device {}

/// The port's address and path, as a peer must know them. They may change: a subnet manager gives it another
/// LID, its interface gets another IP address, or the same one again, which then has another index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Port {
    /// Number, from 1.
    pub number: u8,
    /// InfiniBand: the local identifier. RoCE: 0.
    pub lid: u16,
    /// Whether packets carry a global route: always with RoCE; with InfiniBand when a GID index was
    /// configured.
    pub global: bool,
    /// Index of the GID in the port's table.
    pub gid_index: u8,
    /// The GID.
    pub gid: [u8; 16],
    /// Index of the partition in the port's table.
    pub pkey_index: u16,
    /// MTU to use, in bytes.
    pub mtu: u32,
    /// Traffic class of the packets.
    pub traffic_class: u8,
}

impl Port {
    /// Checks that both sides are reached in the same way.
    pub(super) fn check_route(&self, peer_global: u16) -> Result<(), VerbsError> {
        if (peer_global != 0) == self.global {
            return Ok(());
        }
        let (one, other) = if self.global {
            ("RoCE or a GID", "an InfiniBand LID")
        } else {
            ("an InfiniBand LID", "RoCE or a GID")
        };
        Err(VerbsError::Peer(format!(
            "it is reached by {other}, this side by {one}: both must be of one kind (gid_index of rdma, on InfiniBand)"
        )))
    }
}

/// The device's limits.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Work requests in a queue.
    pub queue: u32,
    /// Entries in a completion queue.
    pub completions: u32,
    /// How often the device resends a packet before it gives up, if it counts.
    pub resends: Option<u8>,
    /// Whether it has [windows](super::Windows).
    pub windows: bool,
}

/// How often a device that counts resends a packet before the connection is broken.
pub(super) const RESENDS: u8 = 7;
/// The vendor of `rdma_rxe`, software RoCE (`RXE_VENDOR_ID`).
const RXE: u32 = 0xff_ffff;

/// Something happened to the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceEvent {
    /// A port went down. Queue pairs go on for as long as they retry.
    PortDown(u8),
    /// A port came up.
    PortUp(u8),
    /// A queue pair or a completion queue works no more. Others do.
    Broken(String),
    /// Nothing works any more.
    Fatal(String),
    /// Something that does not matter here.
    Other,
}

/// One entry of a port's GID table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GidEntry {
    /// Index.
    pub index: u8,
    /// The GID.
    pub gid: [u8; 16],
    /// As sysfs says: `IB/RoCE v1` or `RoCE v2`.
    pub kind: String,
}

impl GidEntry {
    fn is_v4(&self) -> bool {
        self.gid[..12] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]
    }

    fn is_link_local(&self) -> bool {
        self.gid[..2] == [0xfe, 0x80] || self.is_v4() && self.gid[12..14] == [169, 254]
    }
}

/// The GID to use on an Ethernet port: RoCE v2 only, since nothing routes v1; an IPv4 address before an IPv6
/// one, but link-local ones last.
pub fn choose_gid(table: &[GidEntry]) -> Option<&GidEntry> {
    let rank = |entry: &&GidEntry| (entry.is_link_local(), !entry.is_v4());
    table.iter().filter(|entry| entry.kind == "RoCE v2" && entry.gid != [0; 16]).min_by_key(rank)
}

/// The entry for new queue pairs: the one that earlier queue pairs had (`last`), even if it has another index
/// now, or else the configured one, or else [the one to use](choose_gid). Interfaces of one port may have the
/// same link-local address, so of equal entries the one at the former index is taken.
fn entry_now<'t>(
    table: &'t [GidEntry],
    configured: Option<u8>,
    last: Option<&GidEntry>,
) -> Option<&'t GidEntry> {
    let is_same = |entry: &&GidEntry, last: &GidEntry| (entry.gid, &entry.kind) == (last.gid, &last.kind);
    let same = last.and_then(|last| {
        table.iter().filter(|entry| is_same(entry, last)).min_by_key(|entry| entry.index != last.index)
    });
    same.or_else(|| match configured {
        Some(index) => table.iter().find(|entry| entry.index == index),
        None => choose_gid(table),
    })
}

/// The bits of a P_Key that say which partition it is. The other one says that its holder may talk to all
/// members, not just to those that have this bit.
const MEMBERS: u16 = 0x7fff;

/// The index of a partition in a table of indices and P_Keys, rather as the full member that it was asked
/// for.
fn partition_now(table: &[(u16, u16)], partition: u16) -> Option<u16> {
    let same = table.iter().filter(|(_, key)| key & MEMBERS == partition & MEMBERS);
    same.min_by_key(|(_, key)| *key != partition).map(|(index, _)| *index)
}

/// The devices of this host, by name.
pub fn names() -> Result<Vec<String>, VerbsError> {
    Ok(List::new()?.devices().map(|(_, name)| name).collect())
}

struct List {
    library: &'static Library,
    list: NonNull<*mut sys::Device>,
    count: usize,
}

impl List {
    fn new() -> Result<List, VerbsError> {
        let library = Library::get()?;
        let mut count = 0;
        // SAFETY: `count` is writable.
        let list = unsafe { (library.get_device_list)(&mut count) };
        match NonNull::new(list) {
            Some(list) => Ok(List { library, list, count: count.max(0) as usize }),
            // A kernel without RDMA answers ENOSYS.
            None => Err(VerbsError::NoDevices),
        }
    }

    fn devices(&self) -> impl Iterator<Item = (*mut sys::Device, String)> + '_ {
        // SAFETY: the list has `count` devices and lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.list.as_ptr(), self.count) }.iter().map(|device| {
            // SAFETY: a device of the list has a name.
            let name = unsafe { CStr::from_ptr((self.library.get_device_name)(*device)) };
            (*device, name.to_string_lossy().into_owned())
        })
    }
}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: made by `get_device_list`; open devices hold their own references.
        unsafe { (self.library.free_device_list)(self.list.as_ptr()) };
    }
}

impl Device {
    /// Opens the device that the settings name, or else the only one with an active port. Its port can be
    /// used now.
    pub fn open(settings: &Settings) -> Result<Arc<Device>, VerbsError> {
        Device::find(settings, true)
    }

    /// As [`open`](Self::open), for a session that has begun and whose link may be down: so may the port.
    pub fn open_again(settings: &Settings) -> Result<Arc<Device>, VerbsError> {
        Device::find(settings, false)
    }

    fn find(settings: &Settings, usable: bool) -> Result<Arc<Device>, VerbsError> {
        settings.check()?;
        let list = List::new()?;
        let have = || list.devices().map(|(_, name)| name).collect::<Vec<_>>().join(", ");
        if let Some(wanted) = &settings.device {
            let (device, name) = list.devices().find(|(_, name)| name == wanted).ok_or_else(|| {
                if list.count == 0 {
                    VerbsError::NoDevices
                } else {
                    VerbsError::NoDevice { name: wanted.clone(), have: have() }
                }
            })?;
            let device = Device::open_one(list.library, device, name, settings)?;
            if usable {
                device.check_usable()?;
            }
            return Ok(Arc::new(device));
        }
        let mut active = Vec::new();
        let mut failure = VerbsError::NoDevices;
        for (device, name) in list.devices() {
            let opened = Device::open_one(list.library, device, name, settings);
            let is_only = list.count == 1 && !usable;
            let opened = opened.and_then(|device| match device.check_usable() {
                Err(e) if !is_only => Err(e),
                _ => Ok(device),
            });
            match opened {
                Ok(device) => active.push(device),
                Err(e) => failure = e,
            }
        }
        match (active.len(), list.count) {
            (1, _) => Ok(Arc::new(active.remove(0))),
            (0, 0 | 1) => Err(failure),
            (0, _) => Err(VerbsError::Ambiguous { why: "no device has an active port", have: have() }),
            _ => Err(VerbsError::Ambiguous { why: "several devices have an active port", have: have() }),
        }
    }

    fn open_one(
        library: &'static Library,
        device: *mut sys::Device,
        name: String,
        settings: &Settings,
    ) -> Result<Device, VerbsError> {
        let failed = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
        let failed = failed.map_err(|e| VerbsError::call("making an eventfd", e.into()))?;
        // SAFETY: a device of a list that is still there.
        let context = unsafe { (library.open_device)(device) };
        let context = NonNull::new(context).ok_or_else(|| {
            VerbsError::call(
                &format!("opening RDMA device {name} (/dev/infiniband)"),
                io::Error::last_os_error(),
            )
        })?;
        let limits = Limits { queue: 0, completions: 0, resends: None, windows: false };
        // From here on dropping it closes it.
        let settings = settings.clone();
        let (gid, failure) = (Mutex::default(), OnceLock::new());
        let mut opened = Device { context, name, settings, limits, gid, failure, failed };
        nonblocking(opened.event_fd()).map_err(|e| VerbsError::call("preparing the device's events", e))?;
        let mut attr = sys::DeviceAttr::zeroed();
        // SAFETY: an open context; `attr` is writable and of the size that the library knows.
        check("ibv_query_device", unsafe { (library.query_device)(context.as_ptr(), &mut attr) })?;
        let (port, count) = (opened.settings.port, attr.phys_port_cnt);
        if port == 0 || port > count {
            return Err(VerbsError::NoPort { device: opened.name.clone(), port, count });
        }
        opened.limits = Limits {
            queue: attr.max_qp_wr.max(0) as u32,
            completions: attr.max_cqe.max(0) as u32,
            resends: (attr.vendor_id != RXE).then_some(RESENDS),
            windows: attr.device_cap_flags & number::DEVICE_MEM_WINDOW != 0,
        };
        Ok(opened)
    }

    fn query_port(&self) -> Result<sys::PortAttr, VerbsError> {
        let mut attr = sys::PortAttr::default();
        // SAFETY: an open context, a port that exists; `attr` is writable and of the size that the library
        // knows.
        check("ibv_query_port", unsafe {
            (Library::get()?.query_port)(self.context.as_ptr(), self.settings.port, &mut attr)
        })?;
        Ok(attr)
    }

    /// Checks that the port is active and has an address.
    pub(super) fn check_usable(&self) -> Result<(), VerbsError> {
        let attr = self.query_port()?;
        if !matches!(attr.state, number::PORT_ACTIVE | number::PORT_ACTIVE_DEFER) {
            let state = match attr.state {
                1 => "down",
                2 => "initialising: no subnet manager has configured it",
                3 => "armed, not active",
                _ => "in no usable state",
            };
            return Err(VerbsError::PortDown { device: self.name.clone(), port: self.settings.port, state });
        }
        self.port().map(drop)
    }

    /// The port's address and path as they are now: for new queue pairs, which are connected with them.
    pub fn port(&self) -> Result<Port, VerbsError> {
        let (attr, settings) = (self.query_port()?, &self.settings);
        let (device, number) = (|| self.name.clone(), settings.port);
        let active = mtu_bytes(attr.active_mtu);
        let mtu = match settings.mtu {
            None => active,
            Some(mtu) if mtu <= active && mtu_number(mtu).is_some() => mtu,
            Some(mtu) => return Err(VerbsError::Mtu { mtu, device: device(), port: number, active }),
        };
        let ethernet = attr.link_layer == number::LINK_LAYER_ETHERNET;
        let global = ethernet || settings.gid_index.is_some();
        let (gid_index, gid) = if global { self.choose_entry(attr.gid_tbl_len)? } else { (0, [0; 16]) };
        let (lid, traffic_class) = (attr.lid, settings.traffic_class);
        if lid == 0 && !global {
            return Err(VerbsError::NoLid { device: device(), port: number });
        }
        let pkey_index = match settings.partition {
            Some(partition) => self.choose_partition(partition, attr.pkey_tbl_len)?,
            None => 0,
        };
        Ok(Port { number, lid, global, gid_index, gid, pkey_index, mtu, traffic_class })
    }

    /// The index of a partition in a table with so many entries.
    fn choose_partition(&self, partition: u16, count: u16) -> Result<u16, VerbsError> {
        let library = Library::get()?;
        let key = |index: u16| {
            let mut key = 0;
            // SAFETY: an open context; `key` is writable.
            let result = unsafe {
                (library.query_pkey)(self.context.as_ptr(), self.settings.port, index.into(), &mut key)
            };
            (result == 0).then_some((index, u16::from_be(key))).filter(|(_, key)| key & MEMBERS != 0)
        };
        let table: Vec<(u16, u16)> = (0..count).filter_map(key).collect();
        partition_now(&table, partition).ok_or_else(|| VerbsError::NoPartition {
            device: self.name.clone(),
            port: self.settings.port,
            partition,
            have: table.iter().map(|(_, key)| format!("{key:#06x}")).collect::<Vec<_>>().join(", "),
        })
    }

    /// Index and GID of the entry to use, of a table with so many.
    fn choose_entry(&self, count: i32) -> Result<(u8, [u8; 16]), VerbsError> {
        let library = Library::get()?;
        let mut last = self.gid.lock().unwrap_or_else(PoisonError::into_inner);
        // Usually it is where it was, and the table need not be read.
        if let Some(last) = last.as_ref()
            && self.gid_entry(library, last.index).as_ref() == Some(last)
        {
            return Ok((last.index, last.gid));
        }
        let indices = 0..u8::try_from(count.max(0)).unwrap_or(u8::MAX);
        let table: Vec<_> = indices.filter_map(|index| self.gid_entry(library, index)).collect();
        let why = || match self.settings.gid_index {
            Some(index) => format!("entry {index} of its {count} is empty"),
            None => format!("none of {} entries is RoCE v2", table.len()),
        };
        let no_gid = || VerbsError::NoGid { device: self.name.clone(), port: self.settings.port, why: why() };
        let entry = entry_now(&table, self.settings.gid_index, last.as_ref()).ok_or_else(no_gid)?;
        *last = Some(entry.clone());
        Ok((entry.index, entry.gid))
    }

    fn gid(&self, library: &Library, index: u8) -> Option<[u8; 16]> {
        let mut gid = Gid::default();
        // SAFETY: an open context; `gid` is writable.
        let result =
            unsafe { (library.query_gid)(self.context.as_ptr(), self.settings.port, index.into(), &mut gid) };
        (result == 0).then_some(gid.0)
    }

    /// An entry of the port's table, if it is not empty. Its kind comes from sysfs, if that has it: the
    /// library's call for it is younger than many hosts.
    fn gid_entry(&self, library: &Library, index: u8) -> Option<GidEntry> {
        let (device, port) = (&self.name, self.settings.port);
        let gid = self.gid(library, index).filter(|gid| *gid != [0; 16])?;
        let kind = format!("/sys/class/infiniband/{device}/ports/{port}/gid_attrs/types/{index}");
        let kind = fs::read_to_string(kind).unwrap_or_default();
        Some(GidEntry { index, gid, kind: kind.trim().to_owned() })
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The number of its port that is used.
    pub fn port_number(&self) -> u8 {
        self.settings.port
    }

    /// The device's limits.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    pub(super) fn context(&self) -> NonNull<sys::Context> {
        self.context
    }

    /// Readable when [`next_event`](Self::next_event) has something.
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: an open context, whose descriptor lives as long as it.
        unsafe { BorrowedFd::borrow_raw(self.context.as_ref().async_fd) }
    }

    /// Readable once [`failure`](Self::failure) has something, whichever thread has taken the event.
    pub fn failure_fd(&self) -> BorrowedFd<'_> {
        self.failed.as_fd()
    }

    /// The next event of the device, if there is one. Never waits.
    pub fn next_event(&self) -> Option<DeviceEvent> {
        let library = Library::get().ok()?;
        let mut event = sys::AsyncEvent { element: 0, event_type: 0 };
        // SAFETY: an open context whose event descriptor does not block; `event` is writable.
        if unsafe { (library.get_async_event)(self.context.as_ptr(), &mut event) } != 0 {
            return None;
        }
        let port = event.element as u32 as u8;
        let seen = match event.event_type {
            number::EVENT_PORT_ERR => DeviceEvent::PortDown(port),
            number::EVENT_PORT_ACTIVE => DeviceEvent::PortUp(port),
            number::EVENT_DEVICE_FATAL => {
                let what = self.failure.get_or_init(|| format!("RDMA device {} has failed", self.name));
                // It is never read, so its counter has room.
                let _ = self.failed.write(1);
                DeviceEvent::Fatal(what.clone())
            }
            number::EVENT_CQ_ERR => self.broken("a completion queue has failed"),
            // Some devices say so of each connection that they give up, whatever the reason.
            number::EVENT_QP_FATAL => self.broken("a queue pair has failed"),
            number::EVENT_QP_REQ_ERR | number::EVENT_QP_ACCESS_ERR => {
                self.broken("a queue pair has failed: the peer asked for what it may not")
            }
            _ => DeviceEvent::Other,
        };
        // SAFETY: an event that was just taken. It must be acknowledged before its queue pair can be
        // destroyed.
        unsafe { (library.ack_async_event)(&mut event) };
        Some(seen)
    }
}

impl Device {
    /// Why it works no more. Takes its events: for devices that several threads use, each of which sees by
    /// other means what else they tell.
    pub fn failure(&self) -> Option<&str> {
        while self.failure.get().is_none() && self.next_event().is_some() {}
        self.failure.get().map(String::as_str)
    }

    fn broken(&self, what: &str) -> DeviceEvent {
        DeviceEvent::Broken(format!("{} port {}: {what}", self.name, self.settings.port))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if let Ok(library) = Library::get() {
            // SAFETY: everything made from the context holds an `Arc` of this, so nothing is left.
            unsafe { (library.close_device)(self.context.as_ptr()) };
        }
    }
}

pub(super) fn nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    let flags = OFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFL)?);
    fcntl(fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    Ok(())
}

/// `enum ibv_mtu` in bytes.
fn mtu_bytes(number: u32) -> u32 {
    128 << number.clamp(1, 5)
}

/// Bytes as `enum ibv_mtu`.
pub(super) fn mtu_number(bytes: u32) -> Option<u32> {
    (1..=5).find(|number| mtu_bytes(*number) == bytes)
}

#[cfg(test)]
mod tests {
    use std::slice::from_ref;

    use super::*;

    fn entry(index: u8, gid: &str, kind: &str) -> GidEntry {
        let address: std::net::Ipv6Addr = gid.parse().unwrap();
        GidEntry { index, gid: address.octets(), kind: kind.into() }
    }

    #[test]
    fn the_gid_is_roce_v2_and_ipv4_if_there_is_one() {
        let table = [
            entry(0, "fe80::1", "IB/RoCE v1"),
            entry(1, "fe80::1", "RoCE v2"),
            entry(2, "::ffff:10.0.0.1", "IB/RoCE v1"),
            entry(3, "2001:db8::1", "RoCE v2"),
            entry(4, "::ffff:10.0.0.1", "RoCE v2"),
        ];
        assert_eq!(choose_gid(&table).map(|e| e.index), Some(4));
        assert_eq!(choose_gid(&table[..4]).map(|e| e.index), Some(3));
        assert_eq!(choose_gid(&table[..3]).map(|e| e.index), Some(1));
        assert_eq!(choose_gid(&table[..1]), None);
        let link_local = [entry(5, "fe80::1", "RoCE v2"), entry(6, "::ffff:169.254.3.1", "RoCE v2")];
        assert_eq!(choose_gid(&[&table[..4], &link_local].concat()).map(|e| e.index), Some(3));
        assert_eq!(choose_gid(&link_local).map(|e| e.index), Some(6));
    }

    #[test]
    fn a_port_keeps_its_gid_wherever_that_is_in_the_table_now() {
        let last = entry(4, "::ffff:10.0.0.1", "RoCE v2");
        let other = entry(2, "::ffff:10.1.0.1", "RoCE v2");
        let index =
            |table: &[GidEntry], configured| entry_now(table, configured, Some(&last)).map(|e| e.index);
        let moved =
            [other.clone(), entry(6, "::ffff:10.0.0.1", "IB/RoCE v1"), GidEntry { index: 7, ..last.clone() }];
        for configured in [None, Some(2), Some(4)] {
            assert_eq!(index(&moved, configured), Some(7));
            // Of several, it is the one at its former place.
            assert_eq!(index(&[&moved[..], from_ref(&last)].concat(), configured), Some(4));
        }
        // It is gone.
        assert_eq!(
            [None, Some(2), Some(4)].map(|configured| index(from_ref(&other), configured)),
            [Some(2), Some(2), None]
        );
    }

    #[test]
    fn a_partition_is_found_however_the_port_is_a_member() {
        let table = [(0, 0xffff), (2, 0x0001), (3, 0x8001), (5, 0x0002)];
        let index = |partition| partition_now(&table, partition);
        assert_eq!([0x8001, 0x0001, 0x8002, 0x7fff].map(index), [Some(3), Some(2), Some(5), Some(0)]);
        assert_eq!(index(0x8003), None);
    }

    #[test]
    fn mtus_are_the_five_of_infiniband() {
        assert_eq!((1..=5).map(mtu_bytes).collect::<Vec<_>>(), [256, 512, 1024, 2048, 4096]);
        assert_eq!(mtu_number(1024), Some(3));
        assert_eq!(mtu_number(1500), None);
    }
}
