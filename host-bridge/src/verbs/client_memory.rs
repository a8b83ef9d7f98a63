//! A client's memory, scattered over its pages, as one registration.
//!
//! A region is a list of extents, and its key must cover the region and nothing else. So the extents are
//! mapped a second time, one after the other, and that mapping is registered. The device gets the same pages,
//! the region has one key and one range of addresses, and a transfer of any part of it is one segment.

use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use protocol::device::Extent;

use super::error::VerbsError;
use super::registration::{Access, Domain, Registration};
use crate::memory::{ChannelView, Memories, reserve};

const PAGE: u64 = 4096;
/// Maximum number of mappings of one region. By default a process can have 65530 mappings.
const MAX_MAPPINGS: usize = 16384;
/// Maximum number of mappings of all regions of this process. The rest is reserved for its threads and other
/// memory.
const MOST_MAPPINGS: usize = 3 * MAX_MAPPINGS;

/// Number of mappings of all regions of this process.
static MAPPINGS: AtomicUsize = AtomicUsize::new(0);

/// A share of the mappings. Returned when dropped.
#[derive(Debug)]
struct Share<'c> {
    count: usize,
    of: &'c AtomicUsize,
}

impl<'c> Share<'c> {
    /// Takes `count` mappings. `None` if not so many are left.
    fn take(of: &'c AtomicUsize, count: usize) -> Option<Share<'c>> {
        let more = |taken: usize| taken.checked_add(count).filter(|all| *all <= MOST_MAPPINGS);
        of.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        Some(Share { count, of })
    }
}

impl Drop for Share<'_> {
    fn drop(&mut self) {
        self.of.fetch_sub(self.count, Ordering::Relaxed);
    }
}

/// A registered region. Dropping it invalidates its keys and then removes its mapping.
#[derive(Debug)]
pub struct RegisteredRegion {
    registration: Registration,
    _memory: Memory,
}

#[derive(Debug)]
enum Memory {
    Mapped {
        _mapping: Mapping,
    },
    /// The channel's mapping, which belongs to the channel.
    Arena,
}

#[derive(Debug)]
struct Mapping {
    at: NonNull<u8>,
    len: usize,
    _share: Share<'static>,
}

// SAFETY: the mapping belongs to no thread, and only `drop` unmaps it.
unsafe impl Send for Mapping {}
// SAFETY: `at` is never changed, and nothing here reads or writes through it.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: made by `map`; the registration over it is gone (field order in `RegisteredRegion`).
        let _ = unsafe { munmap(self.at.cast(), self.len) };
    }
}

/// One page-aligned range of a file, and where it goes.
#[derive(Debug, PartialEq, Eq)]
struct FileRange {
    memory: usize,
    file_offset: u64,
    len: u64,
}

/// Converts extents to whole pages of files and merges neighbors. Returns them with the offset of the first
/// byte in the first page.
fn ranges(
    memories: &[protocol::link::Memory],
    extents: &[Extent],
    size: u64,
) -> Result<(Vec<FileRange>, u64), VerbsError> {
    let wrong = |why: String| VerbsError::Region { size, why };
    let mut ranges: Vec<FileRange> = Vec::new();
    let (mut lead, mut sum) = (0, 0u64);
    let used: Vec<&Extent> = extents.iter().filter(|e| e.len > 0).collect();
    for (index, extent) in used.iter().enumerate() {
        let found = memories.iter().enumerate().find_map(|(i, m)| {
            let offset = extent.addr.checked_sub(m.addr)?;
            (offset.checked_add(extent.len)? <= m.size).then_some((i, m.file_offset + offset))
        });
        let outside = || {
            wrong(format!(
                "extent {index} ({:#x} bytes at {:#x}) lies outside the client's memory",
                extent.len, extent.addr
            ))
        };
        let (memory, start) = found.ok_or_else(outside)?;
        let end = start + extent.len;
        let (first, last) = (index == 0, index + 1 == used.len());
        if !first && start % PAGE != 0 || !last && end % PAGE != 0 {
            return Err(wrong(format!(
                "extent {index} ({:#x} bytes at {:#x}) neither begins and ends at a page nor stands at an end",
                extent.len, extent.addr
            )));
        }
        if first {
            lead = start % PAGE;
        }
        let (from, to) = (start / PAGE * PAGE, end.next_multiple_of(PAGE));
        match ranges.last_mut() {
            Some(range) if range.memory == memory && range.file_offset + range.len == from => {
                range.len += to - from
            }
            _ => ranges.push(FileRange { memory, file_offset: from, len: to - from }),
        }
        sum += extent.len;
    }
    match (sum == size, ranges.len()) {
        (false, _) => Err(wrong(format!("its extents have {sum:#x} bytes"))),
        (_, 0) => Err(wrong("it is empty".into())),
        (_, n) if n > MAX_MAPPINGS => Err(wrong(format!(
            "it lies in {n} ranges, more than {MAX_MAPPINGS}; huge pages in the guest make fewer"
        ))),
        _ => Ok((ranges, lead)),
    }
}

/// How memory is registered that the peer writes.
fn written(domain: &Domain) -> Access {
    if domain.device().limits().windows { Access::Windows } else { Access::RemoteWrite }
}

impl RegisteredRegion {
    /// Registers exactly the bytes of the extents. With `read_only`, the peer gets no key that allows
    /// writing; otherwise [windows](super::Windows) give it keys, if the device has them.
    pub fn new(
        domain: &Arc<Domain>,
        memories: &Memories,
        extents: &[Extent],
        size: u64,
        read_only: bool,
    ) -> Result<RegisteredRegion, VerbsError> {
        let (described, files): (Vec<_>, Vec<_>) = memories.files().unzip();
        let (ranges, lead) = ranges(&described, extents, size)?;
        let share = Share::take(&MAPPINGS, ranges.len()).ok_or_else(|| VerbsError::Region {
            size,
            why: format!(
                "it lies in {} ranges, and with those of the other regions here that makes more than {MOST_MAPPINGS}",
                ranges.len()
            ),
        })?;
        let total: u64 = ranges.iter().map(|p| p.len).sum();
        let failed =
            |e: nix::Error| VerbsError::call(&format!("mapping {total:#x} bytes of a region"), e.into());
        let length = usize::try_from(total)
            .ok()
            .and_then(NonZeroUsize::new)
            .ok_or_else(|| failed(nix::Error::ENOMEM))?;
        let at = reserve(length).map_err(failed)?;
        let mapping = Mapping { at: at.cast(), len: length.get(), _share: share };
        let mut offset = 0;
        for range in &ranges {
            let target = NonZeroUsize::new(mapping.at.as_ptr() as usize + offset);
            let Some(length) = NonZeroUsize::new(range.len as usize) else { continue };
            let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
            // SAFETY: inside the reservation (the lengths add up to its size), which nothing else uses yet.
            unsafe {
                mmap(
                    target,
                    length,
                    protection,
                    MapFlags::MAP_SHARED | MapFlags::MAP_FIXED,
                    files[range.memory].as_fd(),
                    range.file_offset as i64,
                )
            }
            .map_err(failed)?;
            offset += length.get();
        }
        // SAFETY: `lead` is less than a page, and the mapping has at least that and `size`.
        let first = unsafe { mapping.at.add(lead as usize) };
        let access = if read_only { Access::Read } else { written(domain) };
        // SAFETY: mapped, writable, and unmapped only after the registration is dropped. It is the client's
        // memory: no Rust reference covers it.
        let registration = unsafe { domain.register(first, size as usize, access) }?;
        Ok(RegisteredRegion { registration, _memory: Memory::Mapped { _mapping: mapping } })
    }

    /// Registers a channel's arena.
    ///
    /// # Safety
    /// `view` outlives the registration.
    pub unsafe fn arena(
        domain: &Arc<Domain>,
        view: &ChannelView,
    ) -> Result<Option<RegisteredRegion>, VerbsError> {
        let size = view.geometry().arena_size;
        let Some((at, len)) = view.arena(0, size as u64).filter(|(_, len)| *len > 0) else { return Ok(None) };
        // SAFETY: the caller's promise; the arena is the client's memory, which no Rust reference covers.
        let registration = unsafe { domain.register(at, len, written(domain)) }?;
        Ok(Some(RegisteredRegion { registration, _memory: Memory::Arena }))
    }

    /// The registration: offsets in it are offsets in the region.
    pub fn registration(&self) -> &Registration {
        &self.registration
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMORIES: [protocol::link::Memory; 2] = [
        protocol::link::Memory { addr: 0, size: 0x10000, file_offset: 0x1000 },
        protocol::link::Memory { addr: 0x10_0000, size: 0x10000, file_offset: 0 },
    ];

    fn cut(extents: &[(u64, u64)]) -> Result<(Vec<FileRange>, u64), VerbsError> {
        let extents: Vec<Extent> =
            extents.iter().map(|(addr, len)| Extent { addr: *addr, len: *len }).collect();
        let size = extents.iter().map(|e| e.len).sum();
        ranges(&MEMORIES, &extents, size)
    }

    #[test]
    fn neighbouring_pages_become_one_mapping() {
        let (ranges, lead) =
            cut(&[(0x2010, 0xff0), (0x3000, 0x1000), (0x10_0000, 0x1000), (0x5000, 0x20)]).unwrap();
        let range = |memory, file_offset, len| FileRange { memory, file_offset, len };
        assert_eq!(ranges, [range(0, 0x3000, 0x2000), range(1, 0, 0x1000), range(0, 0x6000, 0x1000)]);
        assert_eq!(lead, 0x10);
    }

    #[test]
    fn all_regions_together_take_no_more_mappings_than_are_theirs() {
        let taken = AtomicUsize::new(0);
        let whole = Share::take(&taken, MOST_MAPPINGS).unwrap();
        assert!(Share::take(&taken, 1).is_none());
        drop(whole);
        let most: Vec<_> = (0..4).map(|_| Share::take(&taken, MAX_MAPPINGS)).collect();
        assert_eq!(most.iter().flatten().count(), 3);
        assert!(Share::take(&taken, usize::MAX).is_none());
    }

    #[test]
    fn what_cannot_be_one_piece_is_refused() {
        for (extents, word) in [
            (&[(0x2000, 0x10), (0x3000, 0x1000)][..], "page"),
            (&[(0x2000, 0x1000), (0x3010, 0x10)], "page"),
            (&[(0xf000, 0x1001)], "outside"),
            (&[(u64::MAX, 1)], "outside"),
            (&[(0, 0)], "empty"),
        ] {
            let error = cut(extents).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }
}
