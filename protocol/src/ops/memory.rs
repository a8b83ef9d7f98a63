//! Device memory, at addresses that the client chooses.
//!
//! A session has one window of addresses for each device: [`window`]. The client asks the server to back a
//! range of it with memory ([`MemGrow`]), and then places allocations in that range itself ([`MemAlloc`], not
//! answered).

use crate::Status;
use crate::channel::MAX_DEVICES;
use crate::data::HostOut;
use crate::handle::{ContextId, EventId, MemoryId};
use crate::ops::ops;
use crate::wire::Bytes;

/// Bytes of one device's window.
pub const WINDOW_SIZE: u64 = 1 << 40;

/// First address of the window of device 0. Address sanitizers use lower addresses, and the mappings of a
/// worker's process begin higher on every machine.
pub const FIRST_WINDOW: u64 = 0x1100_0000_0000;

/// First address of the window of device `ordinal`.
pub const fn window(ordinal: u32) -> u64 {
    FIRST_WINDOW + ordinal as u64 * WINDOW_SIZE
}

/// Bytes at the start of a window for memory that only the device has. Memory at later addresses is managed
/// memory: the client uses the same addresses.
pub const DEVICE_PART: u64 = 768 << 30;

/// Whether an address is in the part of a window for managed memory.
pub const fn is_managed(address: u64) -> bool {
    window(0) <= address
        && address < window(MAX_DEVICES)
        && (address - window(0)) % WINDOW_SIZE >= DEVICE_PART
}

/// First of the addresses that a client may reserve ([`AddressReserve`]); they belong to no device.
pub const SPACE: u64 = 0x4000_0000_0000;
/// Size of this address range in bytes.
pub const SPACE_SIZE: u64 = 16 << 40;
/// Alignment of a reservation's first address. With a smaller alignment, NVIDIA's driver may return a part of
/// a range that it has reserved already, instead of the requested address.
pub const SPACE_ALIGN: u64 = 1 << 30;

/// Whether a session with these windows may reserve `size` bytes at an address ([`AddressReserve`]).
pub fn may_be_reserved(address: u64, size: u64, windows: impl IntoIterator<Item = u32>) -> bool {
    let Some(end) = address.checked_add(size) else { return false };
    let inside = |first, over| first <= address && end <= over;
    inside(SPACE, SPACE + SPACE_SIZE)
        || inside(window(0), window(MAX_DEVICES)) && is_apart(address, end, windows)
}

/// Whether nothing of a range is in these windows.
fn is_apart(address: u64, end: u64, windows: impl IntoIterator<Item = u32>) -> bool {
    windows.into_iter().all(|number| end <= window(number) || window(number) + WINDOW_SIZE <= address)
}

/// Maximum words of one [`HostPatch`].
pub const MOST_PATCHES: usize = 256;

crate::wire_struct! {
    /// A change of a word of 8 bytes.
    pub struct WordPatch {
        /// Address of the word, a multiple of 8.
        address: u64,
        /// Mask of the bits that change.
        mask: u64,
        /// Their new values.
        value: u64,
    }
}

/// Page size of mirrored memory, in bytes.
pub const MIRROR_PAGE: u64 = 4096;

/// Maximum runs of bytes of mirrors that a server remembers for a client ([`HostFetch`]), and their bytes.
pub const MOST_REMEMBERED: usize = 64;
/// See [`MOST_REMEMBERED`].
pub const MOST_REMEMBERED_BYTES: usize = 8 << 20;

/// Maximum bytes that a server watches for a client at a time ([`HostWatch`]).
pub const MOST_WATCHED_BYTES: usize = 256 << 10;

/// Maximum words of the answer to a [`HostWatch`].
pub const MOST_CHANGES: usize = 128;

/// Bit of the number of a [`HostWatch`], for servers of version 2.8 and later, which do not count it as a
/// part of the number: the client is told of [`progress::WATCHED`](crate::link::progress::WATCHED) from now
/// on.
pub const WATCH_TELLS: u64 = 1 << 63;

crate::wire_struct! {
    /// Bytes of a mirror.
    pub struct MirrorRange {
        /// First address.
        address: u64,
        /// Bytes.
        len: u64,
    }
}

impl HostMirror {
    /// Checks that the range consists of whole pages in the lower half of a process's addresses, outside
    /// these windows, which are the session's. It may be where the session has nothing reserved.
    ///
    /// # Errors
    /// `INVALID_VALUE` if not.
    pub fn check(&self, windows: impl IntoIterator<Item = u32>) -> Result<(), Status> {
        const LOWEST: u64 = 1 << 20;
        const HIGHEST: u64 = 1 << 47;
        let whole = self.address.is_multiple_of(MIRROR_PAGE) && self.size.is_multiple_of(MIRROR_PAGE);
        let end = self.address.checked_add(self.size).filter(|end| *end <= HIGHEST);
        let end = end.ok_or(Status::INVALID_VALUE)?;
        let good = self.size > 0 && whole && self.address >= LOWEST && is_apart(self.address, end, windows);
        if good { Ok(()) } else { Err(Status::INVALID_VALUE) }
    }
}

impl WordPatch {
    /// The word after the change.
    pub fn apply(&self, word: u64) -> u64 {
        word & !self.mask | self.value & self.mask
    }
}

ops! {
    /// Device memory.
    trait MemoryOps;

    /// Backs `size` bytes at `address` with memory: `cuMemCreate`, `cuMemMap`, and `cuMemSetAccess` for every
    /// device of the session that can reach this one's memory. Both are multiples of the device's granule and
    /// inside one part of its window ([`DEVICE_PART`]). The status is `CUDA_ERROR_OUT_OF_MEMORY` if the
    /// device, or this session's share of it, has no more memory.
    sync 0x0301 mem_grow: MemGrow
        [order None, may_block Never, lane Main]
    {
        /// Ordinal.
        device: u32,
        /// First address.
        address: u64,
        /// Bytes.
        size: u64,
    } -> MemGrowReply {}

    /// Releases exactly what one [`MemGrow`] backed: `cuMemUnmap`, `cuMemRelease`. Waits for work that may
    /// use it.
    sync 0x0302 mem_shrink: MemShrink
        [order Earlier, may_block Never, lane Main]
    {
        /// Ordinal.
        device: u32,
        /// First address, as in the [`MemGrow`].
        address: u64,
        /// Bytes.
        size: u64,
    } -> MemShrinkReply {}

    /// Tells the server of a `cuMemAlloc`: there is now an allocation at `address`. It is inside backed
    /// memory and overlaps no other allocation.
    async 0x0303 mem_alloc: MemAlloc
        [order None, may_block Never, lane Main]
    {
        /// Address; a multiple of 512.
        address: u64,
        /// Bytes, as the program requested.
        size: u64,
    }

    /// `cuMemFree`: the allocation at `address` is freed. The client has already waited for the device, as
    /// CUDA does.
    async 0x0304 mem_free: MemFree
        [order None, may_block Never, lane Main]
    {
        /// Address of an allocation.
        address: u64,
    }

    /// `cuMemGetInfo`.
    sync 0x0305 mem_get_info: MemGetInfo
        [order None, may_block Never, lane Main]
    {
        /// Ordinal.
        device: u32,
    } -> MemGetInfoReply {
        /// Bytes that the session can still back.
        free: u64,
        /// Bytes in all.
        total: u64,
    }

    /// Lets kernels read and write pinned program memory at the address that it has in the program:
    /// `cuMemHostGetDevicePointer`. The status is `CUDA_ERROR_NOT_SUPPORTED` if the server shares no memory
    /// with the client, or if its process has something else at the address.
    sync 0x0306 host_map: HostMap
        [order None, may_block Never, lane Main]
    {
        /// A context of the device; every device of the session reaches the memory afterwards.
        context: ContextId,
        /// Its address in the program.
        address: u64,
        /// The memory: a region, from its start.
        memory: HostOut,
    } -> HostMapReply {}

    /// Removes what [`HostMap`] or [`HostMirror`] created. The client has already waited for the work that
    /// may use it.
    async 0x0307 host_unmap: HostUnmap
        [order None, may_block Never, lane Main]
    {
        /// Context in which it was mapped.
        context: ContextId,
        /// The memory's address in the program.
        address: u64,
    }

    /// Lets kernels use pinned program memory that the server does not share: the server maps memory of its
    /// own, zeroed, at the address that the memory has in the program. From then on copies, fills and memory
    /// operations treat these addresses as a device's; the client keeps both sides equal. Address and size
    /// are whole pages, outside the windows of the session's devices, where the session has nothing reserved.
    /// The status is `CUDA_ERROR_NOT_SUPPORTED` if the server's process has something else there. Counts
    /// against the session's memory limit.
    sync 0x0308 host_mirror: HostMirror
        [order None, may_block Never, lane Main]
    {
        /// A context of the device; every device of the session reaches the memory afterwards.
        context: ContextId,
        /// Its address in the program.
        address: u64,
        /// Bytes.
        size: u64,
    } -> HostMirrorReply {}

    /// Changes words of a [`HostMirror`] at once, without waiting for any stream. A client sends what the
    /// program wrote while kernels that use the memory may be running.
    async 0x0309 host_patch: HostPatch
        [order None, may_block Never, lane Express]
    {
        /// Context in which it was created.
        context: ContextId,
        /// Words of one mirror, at most [`MOST_PATCHES`].
        words: Vec<WordPatch>,
    }

    /// Reads bytes of a [`HostMirror`] at once, without waiting for any stream. This uses no stream itself,
    /// because a stream's copy between two places in the server's memory may wait for host functions of other
    /// streams.
    sync 0x030a host_read: HostRead
        [order None, may_block Never, lane Express]
    {
        /// Context in which it was created.
        context: ContextId,
        /// First address.
        address: u64,
        /// Bytes, as many as fit into a reply.
        len: u32,
    } -> HostReadReply {
        /// The bytes.
        bytes: Bytes,
    }

    /// Changes bytes of a [`HostMirror`] at once, as [`HostPatch`] changes words.
    async 0x030b host_write: HostWrite<'a>
        [order None, may_block Never, lane Express]
    {
        /// Context in which it was created.
        context: ContextId,
        /// First address.
        address: u64,
        /// Their new values.
        bytes: &'a [u8],
    }

    /// Changes bytes in a row of words of a [`HostMirror`] at once, as [`HostPatch`] does, in the order of
    /// their addresses. A long row takes a third as many bytes.
    async 0x030c host_change: HostChange<'a>
        [order None, may_block Never, lane Express, since 4]
    {
        /// Context in which it was created.
        context: ContextId,
        /// Address of the first word, a multiple of 8.
        address: u64,
        /// For each word, which of its 8 bytes change: bit 0 is the first byte.
        masks: &'a [u8],
        /// The words; their other bytes mean nothing.
        bytes: &'a [u8],
    }

    /// Reads bytes of [`HostMirror`]s at once, as [`HostRead`] does, one range after the other.
    ///
    /// If they are to be remembered, the server keeps a copy of each range, in which it makes the client's
    /// own later changes too: the copy is what the client has. It then compares the copies from earlier
    /// commands with the mirrors, and the answer names those that a device has changed.
    sync 0x030d host_fetch: HostFetch
        [order None, may_block Never, lane Express, since 4]
    {
        /// Context in which they were created.
        context: ContextId,
        /// What to read, in this order.
        ranges: Vec<MirrorRange>,
        /// Whether the first range is to be as it was at one time. If a device changes it too quickly, the
        /// last reading counts.
        settled: bool,
        /// Whether to remember the ranges, at most [`MOST_REMEMBERED_BYTES`] with those from before.
        remember: bool,
        /// First addresses of what the client still has. The rest is forgotten first.
        has: Vec<u64>,
        /// Where the bytes go. Its size is that of all ranges.
        dst: HostOut,
    } -> HostFetchReply {
        /// First addresses of remembered ranges that have changed.
        changed: Vec<u64>,
    }

    /// Answers when remembered ranges ([`HostFetch`]) have changed, or after a time. The server compares
    /// those to watch as often as it can, the others from time to time. A later [`HostWatch`] of the session
    /// replaces this one, which is then answered without changes.
    sync 0x030e host_watch: HostWatch
        [order None, may_block Never, lane Express, since 4]
    {
        /// Context in which they were created.
        context: ContextId,
        /// A number that no other watch of the session has, not 0, and less than 2⁶²; with [`WATCH_TELLS`].
        number: u64,
        /// Number of the watch whose answer the client has taken over since the one before this; 0 if none.
        /// Its words count as what the client has.
        after: u64,
        /// Microseconds after which it is answered in any case.
        most_us: u32,
        /// First addresses of the ranges to watch. They are small.
        watched: Vec<u64>,
        /// First addresses of what the client still has, including those. The rest is forgotten first.
        has: Vec<u64>,
    } -> HostWatchReply {
        /// The bytes of watched ranges that differ, at most [`MOST_CHANGES`] words, as all these ranges had
        /// them at one time.
        words: Vec<WordPatch>,
        /// First addresses of other ranges that had changed by then, and of watched ones with more changes.
        changed: Vec<u64>,
    }

    /// Reserves addresses for later mappings: `cuMemAddressReserve`. The client chooses them inside
    /// [`SPACE`], or, for a program that asks for them, in windows that no device of the session has. The
    /// first is a multiple of [`SPACE_ALIGN`], the size a multiple of every device's granule.
    /// The status is `CUDA_ERROR_OUT_OF_MEMORY` if the server's process has something else there.
    sync 0x0340 address_reserve: AddressReserve
        [order None, may_block Never, lane Main]
    {
        /// First address.
        address: u64,
        /// Bytes.
        size: u64,
    } -> AddressReserveReply {}

    /// Frees a whole reservation with nothing mapped in it: `cuMemAddressFree`.
    sync 0x0341 address_free: AddressFree
        [order None, may_block Never, lane Main]
    {
        /// First address.
        address: u64,
        /// Bytes.
        size: u64,
    } -> AddressFreeReply {}

    /// `cuMemCreate`: allocates memory of a device without an address.
    sync 0x0342 memory_create: MemoryCreate
        [order None, may_block Never, lane Main]
    {
        /// Its id, not in use.
        memory: MemoryId,
        /// Ordinal.
        device: u32,
        /// Bytes, a multiple of the device's granule.
        size: u64,
        /// Whether [`MemoryExport`] may follow.
        exportable: bool,
    } -> MemoryCreateReply {}

    /// Releases memory that is no longer mapped: the last `cuMemRelease` or `cuMemUnmap`. Processes that
    /// imported it keep it.
    sync 0x0343 memory_release: MemoryRelease
        [order None, may_block Never, lane Main]
    {
        /// The memory.
        memory: MemoryId,
    } -> MemoryReleaseReply {}

    /// Maps memory, or a part of it, at reserved addresses: `cuMemMap`. No device may use it there before
    /// [`MemoryAccess`].
    sync 0x0344 memory_map: MemoryMap
        [order None, may_block Never, lane Main]
    {
        /// The memory.
        memory: MemoryId,
        /// Offset of its first byte to map.
        offset: u64,
        /// First address.
        address: u64,
        /// Bytes.
        size: u64,
    } -> MemoryMapReply {}

    /// `cuMemUnmap`: removes one whole mapping. No work may use it.
    sync 0x0345 memory_unmap: MemoryUnmap
        [order None, may_block Never, lane Main]
    {
        /// First address.
        address: u64,
        /// Bytes.
        size: u64,
    } -> MemoryUnmapReply {}

    /// `cuMemSetAccess`: sets what a device may do in one mapping.
    sync 0x0346 memory_access: MemoryAccess
        [order None, may_block Never, lane Main]
    {
        /// First address of the mapping.
        address: u64,
        /// Its bytes.
        size: u64,
        /// Ordinal of the device that accesses.
        device: u32,
        /// `CUmemAccess_flags`.
        flags: u32,
    } -> MemoryAccessReply {}

    /// Makes memory available to the other sessions of the same client under a token that cannot be guessed:
    /// `cuMemExportToShareableHandle`. The token ends with the memory and with the session.
    sync 0x0347 memory_export: MemoryExport
        [order None, may_block Never, lane Main]
    {
        /// The memory.
        memory: MemoryId,
    } -> MemoryExportReply {
        /// The token.
        token: [u8; 16],
    }

    /// Imports memory that a session of the same client has exported: `cuMemImportFromShareableHandle`. The
    /// status is `CUDA_ERROR_INVALID_VALUE` if the token is unknown or belongs to another client.
    sync 0x0348 memory_import: MemoryImport
        [order None, may_block Never, lane Main]
    {
        /// Its id in this session, not in use.
        memory: MemoryId,
        /// The token of the export.
        token: [u8; 16],
    } -> MemoryImportReply {
        /// Ordinal of its device, in this session. A device that the session had before
        /// [`SelectDevices`](super::device::SelectDevices) has one behind those that were selected; only they
        /// can be given access.
        device: u32,
        /// Bytes.
        size: u64,
        /// Whether this session exported it itself.
        own: bool,
    }

    /// `cuIpcGetMemHandle`: like [`MemoryExport`], for the memory of one [`MemGrow`].
    sync 0x0349 piece_export: PieceExport
        [order None, may_block Never, lane Main]
    {
        /// An address in it.
        address: u64,
    } -> PieceExportReply {
        /// The token.
        token: [u8; 16],
        /// First address of that [`MemGrow`]'s memory.
        base: u64,
    }

    /// `cuIpcGetEventHandle`: exports an interprocess event, as [`MemoryExport`] exports memory.
    sync 0x034a event_export: EventExport
        [order Streams, may_block Never, lane Main]
    {
        /// Event.
        event: EventId,
    } -> EventExportReply {
        /// The token.
        token: [u8; 16],
    }

    /// `cuIpcOpenEventHandle`: imports another session's event.
    sync 0x034b event_import: EventImport
        [order Streams, may_block Never, lane Main]
    {
        /// Context.
        context: ContextId,
        /// Its id in this session, not in use.
        event: EventId,
        /// The token of the export.
        token: [u8; 16],
    } -> EventImportReply {}

    /// `cuEventQuery` of an interprocess event: whether its last record, by any process, is done.
    sync 0x034c event_query: EventQuery
        [order Streams, may_block Never, lane Main]
    {
        /// Event.
        event: EventId,
    } -> EventQueryReply {
        /// Whether it is.
        done: bool,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mirrors_are_outside_the_windows_of_the_sessions_devices() {
        let check = |address, size| {
            HostMirror { context: ContextId(0), address, size }.check([0, 2]).map_err(|status| status.0)
        };
        let refused = Err(Status::INVALID_VALUE.0);
        // A process with the layout of old has its mappings in window 25 or 26.
        for address in
            [1 << 20, window(0) - MIRROR_PAGE, window(1), window(26), SPACE, (1 << 47) - MIRROR_PAGE]
        {
            assert_eq!(check(address, MIRROR_PAGE), Ok(()), "{address:#x}");
        }
        for (address, size) in [
            (window(0), MIRROR_PAGE),
            (window(0) - MIRROR_PAGE, 2 * MIRROR_PAGE),
            (window(1), WINDOW_SIZE + MIRROR_PAGE),
            (window(3) - MIRROR_PAGE, MIRROR_PAGE),
            (window(1), 4 * WINDOW_SIZE),
            (window(1) + 1, MIRROR_PAGE),
            (window(1), 0),
            (1 << 47, MIRROR_PAGE),
            (u64::MAX - MIRROR_PAGE + 1, MIRROR_PAGE),
        ] {
            assert_eq!(check(address, size), refused, "{address:#x} {size:#x}");
        }
    }
}
