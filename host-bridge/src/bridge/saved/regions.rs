//! The regions of a session in a file that outlives this process, so that another one can register them
//! again.
//!
//! The file begins with where its entries begin and end. Each is a header and the region's extents; those of
//! regions that have left are marked, and written over by and by. A single write of a few bytes is done or
//! not done when a process ends, so there is always a whole list.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::sys::memfd::{MFdFlags, memfd_create};
use protocol::device::Extent;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::bridge::error::RegionError;
use crate::bridge::transport::RegionMemory;

/// Bytes of entries that are read at most, those of regions that have left among them. Half of them hold four
/// times what a guest may register by default.
const MOST: u64 = if cfg!(test) { 4 << 20 } else { 512 << 20 };
/// Bytes of regions that have left, beyond those of regions that are there, for which the file is not written
/// anew.
const SLACK: u64 = 1 << 20;

/// Where the entries begin and end.
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Ends {
    begin: u64,
    end: u64,
}

const FIRST: u64 = size_of::<Ends>() as u64;

/// What stands before a region's extents.
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Entry {
    id: u32,
    extents: u32,
    read_only: u32,
    /// 1: the region has left.
    left: u32,
    size: u64,
}

const ENTRY: u64 = size_of::<Entry>() as u64;

/// A region that was registered before this process had the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InheritedRegion {
    /// Its id.
    pub region: u32,
    /// Its size in bytes.
    pub size: u64,
    /// Pieces of memory that it is made of.
    pub pieces: u32,
}

/// A region that another process had registered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::bridge) struct StoredRegion {
    pub(in crate::bridge) id: u32,
    pub(in crate::bridge) size: u64,
    pub(in crate::bridge) read_only: bool,
    pub(in crate::bridge) extents: Vec<Extent>,
}

/// See the module's text.
#[derive(Debug)]
pub(in crate::bridge) struct RegionsFile {
    file: File,
    list: Mutex<List>,
}

#[derive(Debug)]
struct List {
    ends: Ends,
    /// By region: where its entry begins, and its length.
    entries: BTreeMap<u32, (u64, u64)>,
    /// The length of all of them.
    live: u64,
}

fn malformed() -> io::Error {
    io::Error::new(ErrorKind::InvalidData, "the list of a session's regions is malformed")
}

impl RegionsFile {
    pub(super) fn new() -> io::Result<RegionsFile> {
        let file = File::from(memfd_create(c"regions", MFdFlags::MFD_CLOEXEC)?);
        let ends = Ends { begin: FIRST, end: FIRST };
        file.write_all_at(ends.as_bytes(), 0)?;
        Ok(RegionsFile { file, list: Mutex::new(List { ends, entries: BTreeMap::new(), live: 0 }) })
    }

    /// Takes over another process's file. Gives what is registered.
    pub(super) fn open(file: OwnedFd) -> io::Result<(RegionsFile, Vec<StoredRegion>)> {
        let file = File::from(file);
        let mut ends = Ends { begin: 0, end: 0 };
        file.read_exact_at(ends.as_mut_bytes(), 0)?;
        let Ends { begin, end } = ends;
        let length = end.checked_sub(begin).filter(|length| *length <= MOST).ok_or_else(malformed)?;
        if begin < FIRST || file.metadata()?.len() < end {
            return Err(malformed());
        }
        let mut bytes = vec![0; length as usize];
        file.read_exact_at(&mut bytes, begin)?;
        let (mut rest, mut regions, mut entries) = (&bytes[..], Vec::new(), BTreeMap::new());
        while !rest.is_empty() {
            let at = end - rest.len() as u64;
            let (entry, behind) = Entry::read_from_prefix(rest).map_err(|_| malformed())?;
            let count = entry.extents as usize;
            let (extents, behind) =
                <[Extent]>::ref_from_prefix_with_elems(behind, count).map_err(|_| malformed())?;
            if entry.left == 0 {
                let Entry { id, size, read_only, .. } = entry;
                let length = (rest.len() - behind.len()) as u64;
                if entries.insert(id, (at, length)).is_some() {
                    return Err(malformed());
                }
                regions.push(StoredRegion { id, size, read_only: read_only != 0, extents: extents.to_vec() });
            }
            rest = behind;
        }
        let live = entries.values().map(|(_, length)| length).sum();
        Ok((RegionsFile { file, list: Mutex::new(List { ends, entries, live }) }, regions))
    }

    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn list(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A region is about to be registered.
    pub(super) fn add(&self, id: u32, size: u64, read_only: bool, extents: &[Extent]) -> io::Result<()> {
        let mut list = self.list();
        let entry = Entry { id, extents: extents.len() as u32, read_only: read_only.into(), left: 0, size };
        let length = ENTRY + size_of_val(extents) as u64;
        if list.live + length > MOST / 2 {
            let text = format!("its regions have too many pieces of memory, {} in this one", extents.len());
            return Err(io::Error::new(ErrorKind::OutOfMemory, text));
        }
        if list.ends.end - list.ends.begin + length > MOST {
            self.write_anew(&mut list)?;
        }
        let bytes = [entry.as_bytes(), extents.as_bytes()].concat();
        let at = list.ends.end;
        self.file.write_all_at(&bytes, at)?;
        let ends = Ends { end: at + length, ..list.ends };
        self.set_ends(&mut list, ends)?;
        list.entries.insert(id, (at, length));
        list.live += length;
        Ok(())
    }

    /// The same, of a session that notes its regions or does not.
    pub(in crate::bridge) fn note(
        regions: Option<&RegionsFile>,
        id: u32,
        region: &RegionMemory,
    ) -> Result<(), RegionError> {
        let Some(regions) = regions else { return Ok(()) };
        let noted = regions.add(id, region.size, region.read_only, &region.extents);
        noted.map_err(|e| RegionError::Over(format!("this host cannot note the region: {e}")))
    }

    /// A region of such a session has left.
    pub(in crate::bridge) fn forget(regions: Option<&RegionsFile>, id: u32) {
        if let Some(Err(e)) = regions.map(|regions| regions.remove(id)) {
            tracing::warn!("region {id} is still noted for another process: {e}");
        }
    }

    /// A region has left.
    pub(super) fn remove(&self, id: u32) -> io::Result<()> {
        let mut list = self.list();
        let Some((at, length)) = list.entries.remove(&id) else { return Ok(()) };
        list.live -= length;
        self.file.write_all_at(&1u32.to_le_bytes(), at + ENTRY - 12)?;
        if list.ends.end - list.ends.begin <= 2 * list.live + SLACK {
            return Ok(());
        }
        self.write_anew(&mut list)
    }

    /// Writes all that is there before the old entries or behind them.
    fn write_anew(&self, list: &mut List) -> io::Result<()> {
        let begin = if FIRST + list.live <= list.ends.begin { FIRST } else { list.ends.end };
        let (mut entries, mut to) = (BTreeMap::new(), begin);
        for (id, (from, length)) in &list.entries {
            let mut bytes = vec![0; *length as usize];
            self.file.read_exact_at(&mut bytes, *from)?;
            self.file.write_all_at(&bytes, to)?;
            entries.insert(*id, (to, *length));
            to += length;
        }
        self.set_ends(list, Ends { begin, end: to })?;
        list.entries = entries;
        self.file.set_len(to)
    }

    fn set_ends(&self, list: &mut List, ends: Ends) -> io::Result<()> {
        self.file.write_all_at(ends.as_bytes(), 0)?;
        list.ends = ends;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn extents(count: u64, from: u64) -> Vec<Extent> {
        (0..count).map(|index| Extent { addr: from + index, len: index + 1 }).collect()
    }

    fn open(file: &RegionsFile) -> io::Result<(RegionsFile, Vec<StoredRegion>)> {
        RegionsFile::open(file.file().try_clone_to_owned().unwrap())
    }

    #[test]
    fn another_process_finds_what_is_registered() {
        let mut file = RegionsFile::new().unwrap();
        let mut expected = BTreeMap::new();
        for step in 0..2000u64 {
            let id = (step * 7 % 13) as u32;
            if expected.remove(&id).is_some() {
                file.remove(id).unwrap();
                file.remove(id).unwrap();
            } else {
                let (size, read_only) = (step + 1, step % 3 == 0);
                let extents = extents(step % 2500, step);
                file.add(id, size, read_only, &extents).unwrap();
                expected.insert(id, StoredRegion { id, size, read_only, extents });
            }
            if step % 50 == 0 {
                let (again, mut regions) = open(&file).unwrap();
                regions.sort_by_key(|region| region.id);
                assert!(regions == expected.values().cloned().collect::<Vec<_>>(), "step {step}");
                file = again;
            }
        }
        assert!(file.file.metadata().unwrap().len() < 8 << 20);
    }

    #[test]
    fn another_process_accepts_what_this_one_has_registered() {
        let file = RegionsFile::new().unwrap();
        let piece = extents(10_000, 5);
        let mut ids = 0..;
        let mut add = || ids.next().filter(|id| file.add(*id, 1, false, &piece).is_ok());
        let registered: Vec<u32> = std::iter::from_fn(&mut add).collect();
        assert_eq!(registered.len() as u64, MOST / 2 / (ENTRY + 160_000));
        assert_eq!(open(&file).unwrap().1.len(), registered.len());
        // A small one still fits, and others can take the place of those that leave.
        file.add(u32::MAX, 1, false, &[]).unwrap();
        for id in registered {
            file.remove(id).unwrap();
            assert!(add().is_some());
            assert_eq!(open(&file).unwrap().1.len() as u64, MOST / 2 / (ENTRY + 160_000) + 1);
        }
    }

    proptest! {
        #[test]
        fn anything_in_the_file_is_refused_or_understood(ends in (0u64..200, 0u64..300), bytes in prop::collection::vec(any::<u8>(), 0..300), small in any::<bool>()) {
            let file = RegionsFile::new().unwrap();
            let bytes: Vec<u8> = if small { bytes.iter().map(|byte| byte % 2).collect() } else { bytes };
            file.file.write_all_at(&bytes, 0).unwrap();
            file.file.write_all_at(Ends { begin: ends.0, end: ends.1 }.as_bytes(), 0).unwrap();
            if let Ok((again, regions)) = open(&file) {
                for region in &regions {
                    again.remove(region.id).unwrap();
                }
                prop_assert!(open(&again).unwrap().1.is_empty());
            }
        }
    }
}
