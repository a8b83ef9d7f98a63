//! The client's memory, mapped into this process.
//!
//! ```text
//!  Memories      files (a guest's RAM, a memfd), each mapped once, at addresses that extents count in
//!    │ resolve(extents)                      │ view(extents)
//!  Runs        a region: host pointers      ChannelView   the channel: one contiguous mapping, its parts by a checked Geometry
//! ```
//!
//! Addresses come from a guest and are checked here, once. The memory behind [`Runs`] or a [`ChannelView`] is
//! valid and stays mapped until they are dropped. Its *content* can change at any time, so it is accessed
//! through atomics, through [`SharedBytes`](crate::shared::SharedBytes), and by the kernel or a device only.

use std::ffi::c_void;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use nix::sys::mman::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use nix::sys::stat::SFlag;
use protocol::channel::{
    Consumer, Geometry, GeometryError, HEADER_SIZE, Header, HeaderFields, Position, Progress, Record,
    RecordError, ReplySlot, RingMemory, SLOT_SIZE,
};
use protocol::device::Extent;
use protocol::link::Memory;
use thiserror::Error;

const PAGE: u64 = 4096;

/// Why memory cannot be used.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// The host is short of descriptors.
    #[error("this host cannot make a doorbell")]
    Doorbell {
        /// The system's answer.
        source: io::Error,
    },
    /// An extent lies outside the client's memory.
    #[error("extent {index}: {len:#x} bytes at {addr:#x} lie outside the client's memory")]
    Outside {
        /// Which extent.
        index: usize,
        /// Its address.
        addr: u64,
        /// Its length.
        len: u64,
    },
    /// The extents' lengths do not add up to what was announced.
    #[error("extents of {sum:#x} bytes in all where {size:#x} were announced")]
    Size {
        /// Sum of the lengths.
        sum: u64,
        /// What was announced.
        size: u64,
    },
    /// A channel's extent is not made of whole pages.
    #[error("extent {index} of the channel: {len:#x} bytes at {addr:#x} are not whole pages")]
    Unaligned {
        /// Which extent.
        index: usize,
        /// Its address.
        addr: u64,
        /// Its length.
        len: u64,
    },
    /// A channel's extent is smaller than the pages of the memory that it lies in.
    #[error(
        "extent {index} of the channel: {len:#x} bytes at {addr:#x} lie in huge pages of {page:#x} bytes each (hugetlbfs), which can only be mapped whole: \
         give the guest memory from memfd or shared memory without huge pages reserved for it (hugetlb=off); transparent huge pages do as well"
    )]
    HugePages {
        /// Which extent.
        index: usize,
        /// Its address.
        addr: u64,
        /// Its length.
        len: u64,
        /// Bytes of one page.
        page: u64,
    },
    /// The file is shorter than the memory that it should be.
    #[error("a client memory of {size:#x} bytes at offset {offset:#x} of a file of {file:#x} bytes")]
    ShortFile {
        /// The memory's size.
        size: u64,
        /// Its offset in the file.
        offset: u64,
        /// The file's size.
        file: u64,
    },
    /// Not the memory of a file, which can be mapped page by page.
    #[error(
        "a client memory of {size:#x} bytes in something that is no file, for example a device (/dev/dax), whose pages can only be mapped in large blocks: \
         give the guest memory from memfd or shared memory"
    )]
    NoFile {
        /// The memory's size.
        size: u64,
    },
    /// The channel's header is wrong.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// A channel that cannot hold its own header.
    #[error("a channel of {size} bytes has no room for its header of {HEADER_SIZE}")]
    Small {
        /// Bytes.
        size: u64,
    },
    /// `mmap` failed.
    #[error("mapping {size:#x} bytes of the client's memory")]
    Map {
        /// Bytes.
        size: u64,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
}

/// One mapped file range; unmapped with its last user.
#[derive(Debug)]
struct Mapping {
    memory: Memory,
    at: NonNull<u8>,
    file: OwnedFd,
    /// Device and inode of the file.
    id: (u64, u64),
    /// Bytes of a page of the file: what is mapped of it is a multiple of this.
    page: u64,
}

// SAFETY: the mapping belongs to no thread, and only `drop` unmaps it.
unsafe impl Send for Mapping {}
// SAFETY: the fields are never changed, and nothing here reads or writes through `at`.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `map` made exactly this mapping, and every pointer into it is held together with an `Arc`
        // of it.
        let _ = unsafe { munmap(self.at.cast(), self.memory.size as usize) };
    }
}

impl Mapping {
    /// Maps a file range, readable and writable, shared.
    fn new(memory: Memory, file: OwnedFd) -> Result<Mapping, MemoryError> {
        let stat = nix::sys::stat::fstat(&file)
            .map_err(|e| MemoryError::Map { size: memory.size, source: e.into() })?;
        if SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT != SFlag::S_IFREG {
            return Err(MemoryError::NoFile { size: memory.size });
        }
        let end = memory.file_offset.checked_add(memory.size);
        let length = usize::try_from(memory.size).ok().and_then(NonZeroUsize::new);
        let (Some(length), true) = (length, end.is_some_and(|end| end <= stat.st_size as u64)) else {
            return Err(MemoryError::ShortFile {
                size: memory.size,
                offset: memory.file_offset,
                file: stat.st_size as u64,
            });
        };
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let flags = MapFlags::MAP_SHARED | MapFlags::MAP_NORESERVE;
        // SAFETY: a fresh mapping at an address of the kernel's choice; it aliases nothing in this process.
        let at = unsafe { mmap(None, length, protection, flags, &file, memory.file_offset as i64) }
            .map_err(|e| MemoryError::Map { size: memory.size, source: e.into() })?;
        let page = page_size(&file);
        let id = (stat.st_dev, stat.st_ino);
        Ok(Mapping { memory, at: at.cast(), file, id, page })
    }
}

/// Bytes of a page of a file: more than [`PAGE`] on hugetlbfs alone.
fn page_size(file: &OwnedFd) -> u64 {
    match nix::sys::statfs::fstatfs(file) {
        Ok(stat) if stat.filesystem_type() == nix::sys::statfs::HUGETLBFS_MAGIC => stat.block_size() as u64,
        _ => PAGE,
    }
}

/// Reserves fresh address space, in which to map other things.
pub(crate) fn reserve(length: NonZeroUsize) -> nix::Result<NonNull<c_void>> {
    // SAFETY: the kernel chooses addresses that nothing uses.
    unsafe {
        mmap_anonymous(None, length, ProtFlags::PROT_NONE, MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE)
    }
}

/// A piece of a channel that is contiguous in a file.
struct Piece<'m> {
    /// The first extent in it.
    index: usize,
    mapping: &'m Mapping,
    file_offset: u64,
    len: u64,
}

/// All of a client's memories, mapped. Cheap to clone; what is resolved from it keeps it mapped.
#[derive(Debug, Clone, Default)]
pub struct Memories {
    mappings: Arc<Vec<Mapping>>,
}

impl Memories {
    /// Maps each file range, readable and writable, shared.
    pub fn map(memories: Vec<(Memory, OwnedFd)>) -> Result<Memories, MemoryError> {
        let mapped = memories.into_iter().map(|(memory, file)| Mapping::new(memory, file));
        Ok(Memories { mappings: Arc::new(mapped.collect::<Result<_, _>>()?) })
    }

    /// Like [`map`](Self::map), but leaves out what cannot be mapped and calls `left_out` for it. Extents
    /// there then lie outside the client's memory. A file that is too short is an error all the same:
    /// touching what it lacks would kill the process.
    pub fn map_possible(
        memories: Vec<(Memory, OwnedFd)>,
        mut left_out: impl FnMut(Memory, &MemoryError),
    ) -> Result<Memories, MemoryError> {
        let mut mappings = Vec::with_capacity(memories.len());
        for (memory, file) in memories {
            match Mapping::new(memory, file) {
                Ok(mapping) => mappings.push(mapping),
                Err(e @ MemoryError::ShortFile { .. }) => return Err(e),
                Err(e) => left_out(memory, &e),
            }
        }
        Ok(Memories { mappings: Arc::new(mappings) })
    }

    /// The memories with their files, in the order given to [`map`](Self::map): what `local` hands to a
    /// worker.
    pub fn files(&self) -> impl Iterator<Item = (Memory, &OwnedFd)> {
        self.mappings.iter().map(|m| (m.memory, &m.file))
    }

    fn find(&self, extent: &Extent) -> Option<(&Mapping, u64)> {
        self.mappings.iter().find_map(|m| {
            let offset = extent.addr.checked_sub(m.memory.addr)?;
            (offset.checked_add(extent.len)? <= m.memory.size).then_some((m, offset))
        })
    }

    /// Whether extents of `other` lie in memories that are also among these: the same parts of the same files
    /// at the same addresses.
    pub(crate) fn have(&self, other: &Memories, extents: &[Extent]) -> bool {
        let has = |theirs: &Mapping| {
            self.mappings.iter().any(|ours| (ours.memory, ours.id) == (theirs.memory, theirs.id))
        };
        Arc::ptr_eq(&self.mappings, &other.mappings)
            || extents.iter().all(|extent| other.find(extent).is_some_and(|(theirs, _)| has(theirs)))
    }

    /// Checks extents, and puts those together that adjoin in one memory. A client may cut its memory as
    /// small as it likes, and whatever keeps or passes on extents takes room for each.
    pub fn joined(&self, extents: &[Extent]) -> Result<Vec<Extent>, MemoryError> {
        let mut joined: Vec<Extent> = Vec::new();
        for (index, extent) in extents.iter().enumerate() {
            let Extent { addr, len } = *extent;
            let adjoins = |last: &Extent| {
                let both = Extent { addr: last.addr, len: last.len.checked_add(len)? };
                (last.addr.checked_add(last.len) == Some(addr)).then(|| self.find(&both))?
            };
            match joined.last_mut() {
                Some(last) if adjoins(last).is_some() => last.len += len,
                _ if self.find(extent).is_none() => return Err(MemoryError::Outside { index, addr, len }),
                _ => joined.push(*extent),
            }
        }
        joined.shrink_to_fit();
        Ok(joined)
    }

    /// Checks extents against the client's memory and takes them together as one range of `size` bytes.
    pub fn resolve(&self, extents: &[Extent], size: u64) -> Result<Runs, MemoryError> {
        let mut runs: Vec<Run> = Vec::with_capacity(extents.len());
        let mut sum = 0u64;
        for (index, extent) in extents.iter().enumerate() {
            let outside = MemoryError::Outside { index, addr: extent.addr, len: extent.len };
            let Some((mapping, offset)) = self.find(extent) else { return Err(outside) };
            // SAFETY: `find` checked that offset + len lies inside the mapping.
            let at = unsafe { mapping.at.add(offset as usize) };
            let len = extent.len as usize;
            let adjoins =
                runs.last().is_some_and(|last| last.at.as_ptr().wrapping_add(last.len) == at.as_ptr());
            match runs.last_mut() {
                Some(last) if adjoins => last.len += len,
                _ if len > 0 => runs.push(Run { at, len, offset: sum as usize }),
                _ => {}
            }
            sum = sum.checked_add(extent.len).ok_or(MemoryError::Size { sum: u64::MAX, size })?;
        }
        if sum != size {
            return Err(MemoryError::Size { sum, size });
        }
        Ok(Runs { runs, size: size as usize, _memories: self.clone() })
    }

    /// A channel's extents, checked. Those that adjoin in a file are one piece: each piece costs a system
    /// call and a mapping, of which a process has few.
    fn pieces(&self, extents: &[Extent]) -> Result<Vec<Piece<'_>>, MemoryError> {
        let mut pieces: Vec<Piece<'_>> = Vec::new();
        for (index, extent) in extents.iter().enumerate() {
            let (addr, len) = (extent.addr, extent.len);
            let Some((mapping, within)) = self.find(extent) else {
                return Err(MemoryError::Outside { index, addr, len });
            };
            let file_offset = mapping.memory.file_offset + within;
            if len == 0 || len % PAGE != 0 || file_offset % PAGE != 0 {
                return Err(MemoryError::Unaligned { index, addr, len });
            }
            match pieces.last_mut() {
                Some(last)
                    if std::ptr::eq(last.mapping, mapping) && last.file_offset + last.len == file_offset =>
                {
                    last.len += len;
                }
                _ => pieces.push(Piece { index, mapping, file_offset, len }),
            }
        }
        Ok(pieces)
    }

    /// Maps a channel's extents a second time, one behind the other, and checks the header that the client
    /// has written there.
    pub fn view(&self, extents: &[Extent], size: u64) -> Result<ChannelView, MemoryError> {
        if size < HEADER_SIZE as u64 {
            return Err(MemoryError::Small { size });
        }
        let sum = extents.iter().try_fold(0u64, |sum, e| sum.checked_add(e.len));
        let length = usize::try_from(size).ok().and_then(NonZeroUsize::new);
        let (Some(length), true) = (length, sum == Some(size)) else {
            return Err(MemoryError::Size { sum: sum.unwrap_or(u64::MAX), size });
        };
        let failed = |e: nix::Error| MemoryError::Map { size, source: e.into() };
        let base = reserve(length).map_err(failed)?;
        // SAFETY: the reservation just made, which nothing else unmaps.
        let reserved = unsafe { OwnPages::new(base.cast(), length.get()) };
        let mut offset = 0usize;
        for Piece { index, mapping, file_offset, len } in self.pieces(extents)? {
            let page = mapping.page;
            if !len.is_multiple_of(page) || !file_offset.is_multiple_of(page) {
                let addr = mapping.memory.addr + (file_offset - mapping.memory.file_offset);
                return Err(MemoryError::HugePages { index, addr, len, page });
            }
            let Some(length) = NonZeroUsize::new(len as usize) else { continue };
            let target = NonZeroUsize::new(reserved.at.as_ptr() as usize + offset);
            let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
            let flags = MapFlags::MAP_SHARED | MapFlags::MAP_FIXED;
            // SAFETY: the target lies inside the reservation made above (the lengths add up to its size),
            // which nothing else uses yet.
            unsafe { mmap(target, length, protection, flags, mapping.file.as_fd(), file_offset as i64) }
                .map_err(failed)?;
            offset += len as usize;
        }
        // SAFETY: the first page is mapped and page-aligned; `Header` is made of atomics alone and any bit
        // pattern is valid.
        let header = unsafe { reserved.at.cast::<Header>().as_ref() };
        let fields = header.read_fields();
        let geometry = Geometry::check(&fields, size)?;
        Ok(ChannelView { reserved, geometry, fields })
    }
}

/// A contiguous run of a region in this process.
#[derive(Debug, Clone, Copy)]
pub struct Run {
    /// First byte.
    pub at: NonNull<u8>,
    /// Bytes.
    pub len: usize,
    /// Offset in the region.
    pub offset: usize,
}

/// A region of the client's memory: checked pointers, in order. The memory stays mapped as long as this
/// lives.
#[derive(Debug, Clone)]
pub struct Runs {
    runs: Vec<Run>,
    size: usize,
    _memories: Memories,
}

// SAFETY: the pointers refer to shared mappings that `_memories` keeps, usable from any thread.
unsafe impl Send for Runs {}
// SAFETY: the structure is never changed after it was made.
unsafe impl Sync for Runs {}

impl Runs {
    /// Bytes in all.
    pub fn size(&self) -> usize {
        self.size
    }

    /// All runs, in order.
    pub fn all(&self) -> &[Run] {
        &self.runs
    }

    /// The runs that make up `len` bytes from `offset`, cut to it. `None` when the range is not inside the
    /// region.
    pub fn range(&self, offset: u64, len: u64) -> Option<impl Iterator<Item = (NonNull<u8>, usize)> + '_> {
        let end = offset.checked_add(len).filter(|end| *end <= self.size as u64)? as usize;
        let offset = offset as usize;
        let first = self.runs.partition_point(|p| p.offset + p.len <= offset);
        Some(self.runs[first..].iter().take_while(move |p| p.offset < end && len > 0).map(move |p| {
            let skip = offset.saturating_sub(p.offset);
            let until = p.len.min(end - p.offset);
            // SAFETY: skip < p.len, since the run ends behind `offset`.
            (unsafe { p.at.add(skip) }, until - skip)
        }))
    }
}

/// A mapping of this process, with everything in its range of addresses. Unmapped when dropped.
#[derive(Debug)]
pub(crate) struct OwnPages {
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping belongs to no thread, and only `drop` unmaps it.
unsafe impl Send for OwnPages {}
// SAFETY: the fields are never changed; who accesses the bytes at `at`, and how, is up to the owner.
unsafe impl Sync for OwnPages {}

impl OwnPages {
    /// Takes over `len` mapped bytes from `at` on.
    ///
    /// # Safety
    /// Nothing else unmaps them, and nothing uses them after this is dropped.
    pub(crate) unsafe fn new(at: NonNull<u8>, len: usize) -> OwnPages {
        OwnPages { at, len }
    }

    /// The first byte.
    pub(crate) fn at(&self) -> NonNull<u8> {
        self.at
    }

    /// Number of bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for OwnPages {
    fn drop(&mut self) {
        // SAFETY: the caller of `new` has given this the range, and nothing uses it any more.
        let _ = unsafe { munmap(self.at.cast(), self.len) };
    }
}

/// A channel, contiguous, with its parts. Unmapped when dropped.
#[derive(Debug)]
pub struct ChannelView {
    reserved: OwnPages,
    geometry: Geometry,
    fields: HeaderFields,
}

impl ChannelView {
    /// The header's fields as they were checked. The client may change the header at any time.
    pub fn fields(&self) -> &HeaderFields {
        &self.fields
    }

    /// Where the parts lie.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn part<T>(&self, offset: usize, size: usize) -> NonNull<T> {
        debug_assert!(offset + size <= self.reserved.len);
        // SAFETY: `Geometry::check` has put every part inside the channel, whose size is the reservation's.
        unsafe { self.reserved.at.add(offset).cast() }
    }

    /// First byte of the channel in this process: for futex calls on its words, and to register the memory
    /// with a device.
    pub fn base(&self) -> NonNull<u8> {
        self.reserved.at
    }

    /// The header.
    pub fn header(&self) -> &Header {
        // SAFETY: mapped, page-aligned, all atomics.
        unsafe { self.part::<Header>(0, HEADER_SIZE).as_ref() }
    }

    /// The consumer of the ring, from `position` on: `Position::default()` for a ring that nobody has read
    /// yet. There must be only one for a channel.
    pub fn consumer(&self, position: Position) -> Consumer<'_> {
        let g = &self.geometry;
        let words = self.part(g.ring_offset, g.ring_size);
        // SAFETY: mapped, page-aligned, `ring_size` bytes of atomics, a power of two.
        let words = unsafe { std::slice::from_raw_parts(words.as_ptr(), g.ring_size / 8) };
        Consumer::resume(self.header(), RingMemory::new(words), position)
    }

    /// A reply slot. `None`: there is no such slot.
    pub fn slot(&self, index: u16) -> Option<&ReplySlot> {
        let index = usize::from(index);
        // SAFETY: mapped, 64-byte-aligned (the slots' offset and stride are), all atomics.
        (index < self.geometry.slot_count)
            .then(|| unsafe { self.part::<ReplySlot>(self.geometry.slot_offset(index), SLOT_SIZE).as_ref() })
    }

    /// The progress area.
    pub fn progress(&self) -> &Progress {
        // SAFETY: mapped, page-aligned, all atomics.
        unsafe { self.part::<Progress>(self.geometry.progress_offset, size_of::<Progress>()).as_ref() }
    }

    /// `len` bytes of the arena from `offset`. `None` when they are not inside it.
    pub fn arena(&self, offset: u64, len: u64) -> Option<(NonNull<u8>, usize)> {
        let end = offset.checked_add(len)?;
        (end <= self.geometry.arena_size as u64)
            .then(|| (self.part(self.geometry.arena_offset + offset as usize, len as usize), len as usize))
    }
}

/// The consumer of a channel's ring that keeps the channel mapped.
#[derive(Debug)]
pub struct RingReader {
    view: Arc<ChannelView>,
    position: Position,
}

impl RingReader {
    /// The reader of a ring that nobody has read yet. There must be only one for a channel.
    pub fn new(view: Arc<ChannelView>) -> RingReader {
        RingReader { view, position: Position::default() }
    }

    /// As [`Consumer::has_work`].
    #[inline]
    pub fn has_work(&self) -> bool {
        self.view.consumer(self.position).has_work()
    }

    /// As [`Consumer::has_room`].
    #[inline]
    pub fn has_room(&self) -> bool {
        self.view.consumer(self.position).has_room()
    }

    /// As [`Consumer::pop`].
    #[inline]
    pub fn pop(&mut self, body: &mut Vec<u8>) -> Result<Option<Record>, RecordError> {
        let mut consumer = self.view.consumer(self.position);
        let record = consumer.pop(body);
        self.position = consumer.position();
        record
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::memfd::{MFdFlags, memfd_create};

    fn memories(sizes: &[(u64, u64)]) -> Memories {
        let files = sizes
            .iter()
            .map(|(addr, size)| {
                let file = memfd_create(c"test", MFdFlags::MFD_CLOEXEC).unwrap();
                nix::unistd::ftruncate(&file, *size as i64).unwrap();
                (Memory { addr: *addr, size: *size, file_offset: 0 }, file)
            })
            .collect();
        Memories::map(files).unwrap()
    }

    fn e(addr: u64, len: u64) -> Extent {
        Extent { addr, len }
    }

    #[test]
    fn a_channel_in_pieces_of_huge_pages_is_refused_with_what_to_do() {
        let mut memories = memories(&[(0, 0x20_0000)]);
        for mapping in Arc::get_mut(&mut memories.mappings).unwrap() {
            mapping.page = 0x20_0000;
        }
        let error = memories.view(&[e(0x1000, 0x1000), e(0x8000, 0x1000)], 0x2000).unwrap_err();
        assert!(matches!(error, MemoryError::HugePages { index: 0, page: 0x20_0000, .. }), "{error}");
        assert!(error.to_string().contains("hugetlb=off"), "{error}");
    }

    #[test]
    fn scattered_extents_read_as_one_region() {
        let memories = memories(&[(0, 0x10000), (0x100000, 0x10000)]);
        let region = memories
            .resolve(&[e(0x100ff0, 0x10), e(0x10, 3), e(0x13, 5), e(0x8000, 0x1000)], 0x1018)
            .unwrap();
        assert_eq!(region.all().len(), 3, "adjoining extents are one run");
        for (i, (at, len)) in region.range(0, 0x1018).unwrap().enumerate() {
            // SAFETY: runs are valid memory of this test.
            unsafe { at.write_bytes(i as u8 + 1, len) };
        }
        let cut: Vec<usize> = region.range(0x0f, 10).unwrap().map(|(_, len)| len).collect();
        assert_eq!(cut, [1, 8, 1]);
        assert_eq!(region.range(0x1018, 0).unwrap().count(), 0);
        assert!(region.range(0x1018, 1).is_none() && region.range(u64::MAX, 2).is_none());
    }

    #[test]
    fn wild_extents_are_refused() {
        let memories = memories(&[(0x1000, 0x1000)]);
        for extent in [e(0, 1), e(0x1fff, 2), e(0x2000, 1), e(u64::MAX, 1), e(0x1000, u64::MAX)] {
            assert!(
                matches!(memories.resolve(&[extent], extent.len), Err(MemoryError::Outside { index: 0, .. })),
                "{extent:?}"
            );
        }
        assert!(matches!(memories.resolve(&[e(0x1000, 4)], 5), Err(MemoryError::Size { sum: 4, size: 5 })));
    }

    #[test]
    fn a_scattered_channel_is_contiguous_here() {
        let geometry = Geometry::with_arena(0x4000);
        let size = geometry.size as u64;
        let memories = memories(&[(0, size + 0x10000)]);
        // The header's page last in memory, the rest before it.
        let extents = [e(size, 0x1000), e(0, size - 0x1000)];
        let at = memories.resolve(&[e(size, 0x1000)], 0x1000).unwrap().all()[0].at.cast::<Header>();
        // SAFETY: a mapped page, page-aligned.
        unsafe { at.as_ref() }.write_fields(&geometry.fields(1, "test"));
        let view = memories.view(&extents, size).unwrap();
        assert_eq!(*view.geometry(), geometry);
        assert!(view.slot(63).is_some() && view.slot(64).is_none());
        assert!(
            view.arena(0x3fff, 1).is_some()
                && view.arena(0x4000, 1).is_none()
                && view.arena(u64::MAX, 1).is_none()
        );
        assert!(matches!(memories.view(&[e(0x10, size)], size), Err(MemoryError::Unaligned { .. })));
        assert!(matches!(memories.view(&[e(0, size)], size), Err(MemoryError::Geometry(_))));
    }

    #[test]
    fn extents_that_adjoin_in_a_memory_are_joined() {
        let memories = memories(&[(0, 0x2000), (0x2000, 0x1000)]);
        let joined = |extents: &[Extent]| {
            memories.joined(extents).unwrap().iter().map(|e| (e.addr, e.len)).collect::<Vec<_>>()
        };
        let bytes: Vec<Extent> = (0x800..0x2800).map(|addr| e(addr, 1)).collect();
        // Two memories adjoin, and no extent lies in both.
        assert_eq!(joined(&bytes), [(0x800, 0x1800), (0x2000, 0x800)]);
        assert_eq!(joined(&[e(2, 1), e(1, 1), e(0, 1), e(1, 9)]), [(2, 1), (1, 1), (0, 10)]);
        for outside in [e(0x3000, 1), e(0x1fff, 2), e(u64::MAX, 2), e(1, u64::MAX)] {
            let refused = memories.joined(&[e(0, 1), outside]);
            assert!(matches!(refused, Err(MemoryError::Outside { index: 1, .. })), "{refused:?}");
        }
    }

    #[test]
    fn adjoining_extents_of_a_channel_cost_one_mapping() {
        let size = 64 * 0x1000;
        let memories = memories(&[(0, size), (size, size)]);
        let pages = |pages: &mut dyn Iterator<Item = u64>| -> Vec<Extent> {
            pages.map(|page| e(page * 0x1000, 0x1000)).collect()
        };
        // Two memories adjoin at page 64, and are two files.
        let lens = |extents: &[Extent]| -> Vec<u64> {
            memories.pieces(extents).unwrap().iter().map(|p| p.len / 0x1000).collect()
        };
        assert_eq!(lens(&pages(&mut (60..70))), [4, 6]);
        assert_eq!(lens(&pages(&mut (0..8).rev())), [1; 8]);
    }

    #[test]
    fn a_short_file_is_refused() {
        let file = memfd_create(c"test", MFdFlags::MFD_CLOEXEC).unwrap();
        nix::unistd::ftruncate(&file, 100).unwrap();
        let memory = Memory { addr: 0, size: 4096, file_offset: 0 };
        assert!(matches!(Memories::map(vec![(memory, file)]), Err(MemoryError::ShortFile { .. })));
        let device = std::fs::File::open("/dev/zero").unwrap().into();
        assert!(matches!(Memories::map(vec![(memory, device)]), Err(MemoryError::NoFile { size: 4096 })));
    }
}
