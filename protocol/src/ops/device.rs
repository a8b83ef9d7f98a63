//! Devices and the server itself. A client asks once at the start of a session, and answers the program's
//! calls itself.

use crate::ops::ops;

crate::wire_struct! {
    /// A device attribute that the server could read: number in `CUdevice_attribute`, and its value.
    pub struct Attribute {
        /// Number in `CUdevice_attribute`.
        attribute: u32,
        /// Value, in the attribute's own unit.
        value: i32,
    }
}

/// How a server of this release on the machine `host` describes itself in a [`SessionInfoReply`].
pub fn describe_server(release: &str, host: &str) -> String {
    format!("rgpu-server {release} on {host}")
}

/// The machine of a server that describes itself so. Of any other description, all of it.
pub fn host_of(described: &str) -> &str {
    described.rsplit_once(" on ").map_or(described, |(_, host)| host)
}

/// `CUdevice_P2PAttribute`s of CUDA 13.
pub const PEER_ATTRIBUTES: usize = 5;
/// `CUatomicOperation`s of CUDA 13.
pub const ATOMIC_OPERATIONS: usize = 13;

ops! {
    /// The devices of a session.
    trait DeviceOps;

    /// What the session is connected to: `cuInit`, `cuDriverGetVersion`, `cuDeviceGetCount`.
    sync 0x0101 session_info: SessionInfo
        [order None, may_block Never, lane Main]
    {} -> SessionInfoReply {
        /// Number of devices of this session.
        device_count: u32,
        /// `cuDriverGetVersion`: 13000 for 13.0.
        driver_version: u32,
        /// `cuda` or `software`.
        backend: String,
        /// The server's release and host name: see [`describe_server`].
        server: String,
        /// Whether commands may name [`HostIn::Late`](crate::data::HostIn) data.
        reads_late: bool,
        /// Whether the devices run an image's machine code. If not, they run its PTX, and what the machine
        /// code says about a kernel may not hold.
        runs_machine_code: bool,
    }

    /// Everything about a device that does not change: `cuDeviceGetName`, `cuDeviceGetUuid`,
    /// `cuDeviceTotalMem`, `cuDeviceGetAttribute`, `cuDeviceGetPCIBusId`.
    sync 0x0102 device_info: DeviceInfo
        [order None, may_block Never, lane Main]
    {
        /// Ordinal.
        device: u32,
    } -> DeviceInfoReply {
        /// Name, as the server's driver gives it.
        name: String,
        /// UUID.
        uuid: [u8; 16],
        /// PCI domain, bus and device on the server. Reported to the program; means nothing in the guest.
        pci: [u32; 3],
        /// Memory in bytes.
        total_memory: u64,
        /// Granularity of [`crate::ops::memory::MemGrow`], in bytes.
        granule: u64,
        /// Lowest and highest stream priority.
        stream_priorities: [i32; 2],
        /// Every attribute that the server's driver knows.
        attributes: Vec<Attribute>,
    }

    /// Whether a device of the session can map another's memory, and what it can do there:
    /// `cuDeviceCanAccessPeer`, `cuDeviceGetP2PAttribute` and `cuDeviceGetP2PAtomicCapabilities`.
    sync 0x0103 peer_info: PeerInfo
        [order None, may_block Never, lane Main]
    {
        /// Device that would access the memory.
        device: u32,
        /// Device that has the memory.
        peer: u32,
    } -> PeerInfoReply {
        /// `cuDeviceCanAccessPeer`.
        can_access: bool,
        /// `cuDeviceGetP2PAttribute` by number, from 1 (`PERFORMANCE_RANK`).
        attributes: Vec<i32>,
        /// For each `CUatomicOperation` by number, its `CUatomicOperationCapability`s. Empty if the server's
        /// driver does not report them (before 13.0).
        atomics: Vec<u32>,
    }

    /// `CUDA_VISIBLE_DEVICES`, and the positions of the session's devices among all devices of the process.
    /// From now on the session has only these devices, and a device's ordinal is its position in this list.
    /// Memory of the others can still be [imported](super::memory::MemoryImport). Only allowed before
    /// anything was created on a device.
    sync 0x0104 select_devices: SelectDevices
        [order None, may_block Never, lane Main]
    {
        /// Ordinals, without repetition.
        devices: Vec<u32>,
        /// For each, the number of its [window](crate::ops::memory::window) of addresses: ascending, below
        /// [`MAX_DEVICES`](crate::channel::MAX_DEVICES). A process with several sessions gives their devices
        /// different windows. Empty: window *n* for ordinal *n*.
        windows: Vec<u32>,
    } -> SelectDevicesReply {}

    /// Whose processes know the program by its process id (`pid` in [`Hello`](crate::link::Hello)): only they
    /// find it in NVML's [lists](crate::ops::nvml::NvmlProcesses). A client that does not say is in none.
    async 0x0105 process_namespace: ProcessNamespace
        [order None, may_block Never, lane Main, since 8]
    {
        /// Inode number of the program's PID namespace.
        namespace: u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_of_a_description_is_the_one_that_it_was_made_of() {
        assert_eq!(host_of(&describe_server("1.0", "gpu1.example")), "gpu1.example");
        assert_eq!(host_of("something else"), "something else");
    }
}
