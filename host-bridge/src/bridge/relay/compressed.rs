//! Compressed bytes of chunks that the server may not have.
//!
//! They have to be sent again as they are when the session is resumed, by this process or by another one. To
//! compress the chunk again would not do: its client may have written it since, and another release of the
//! compressor makes something else of the same bytes. The stream would not go on at the byte where it was
//! cut. So they lie in memory that outlives the process, a file beside the [ledger](super::ledger), which
//! says where those of each chunk are. Each data connection has a room of its own there.

use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap};
use nix::unistd::ftruncate;

use crate::memory::OwnPages;
use crate::shared::SharedBytes;

/// Bytes of a room. Only pages that were written take memory, and the first ones are used again first.
const ROOM: usize = 8 << 20;
/// Most rooms of a file.
const MOST: usize = 32;

/// A file in memory with a room for each of `count` data connections.
pub(in crate::bridge) fn file(count: usize) -> io::Result<OwnedFd> {
    let file = memfd_create(c"compressed", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
    ftruncate(&file, (count * ROOM) as i64)?;
    fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW))?;
    Ok(file)
}

/// The rooms of a [`file`], which another process may have made.
pub(in crate::bridge) fn rooms(file: &impl AsFd, count: usize) -> io::Result<Vec<Arc<Room>>> {
    let wrong =
        || io::Error::new(io::ErrorKind::InvalidData, "the file of a session's compressed data is malformed");
    // One that somebody could make shorter would end whoever reads it.
    let seals = SealFlag::from_bits_retain(fcntl(file, FcntlArg::F_GET_SEALS)?);
    let size = NonZeroUsize::new(count.min(MOST) * ROOM).filter(|_| count <= MOST).ok_or_else(wrong)?;
    let length = usize::try_from(nix::sys::stat::fstat(file)?.st_size).unwrap_or(0);
    if !seals.contains(SealFlag::F_SEAL_SHRINK) || length < size.get() {
        return Err(wrong());
    }
    let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: a fresh mapping at an address of the kernel's choice.
    let at = unsafe { mmap(None, size, protection, MapFlags::MAP_SHARED, file, 0) }?.cast();
    // SAFETY: just mapped, and every room and its bytes hold it.
    let mapping = Arc::new(unsafe { OwnPages::new(at, size.get()) });
    let room = |index| Room { mapping: Arc::clone(&mapping), begin: index * ROOM, used: Mutex::default() };
    Ok((0..count).map(|index| Arc::new(room(index))).collect())
}

/// Where the compressed bytes of one data connection lie.
#[derive(Debug)]
pub(in crate::bridge) struct Room {
    mapping: Arc<OwnPages>,
    /// Where it begins in the file.
    begin: usize,
    /// Where bytes lie: begins and ends, in order. Those of another process may overlap, because it may have
    /// used a place again before it noted that it had become free.
    used: Mutex<Vec<(usize, usize)>>,
}

/// The compressed bytes of a chunk. Dropped, their place is free.
#[derive(Debug)]
pub(in crate::bridge) struct Compressed {
    room: Arc<Room>,
    at: usize,
    len: usize,
}

/// The first place that has `len` bytes.
fn place(used: &[(usize, usize)], len: usize) -> Option<usize> {
    let mut at = 0;
    for (begin, end) in used {
        if begin.checked_sub(at).is_some_and(|gap| gap >= len) {
            return Some(at);
        }
        at = at.max(*end);
    }
    (ROOM - at >= len).then_some(at)
}

impl Room {
    fn used(&self) -> MutexGuard<'_, Vec<(usize, usize)>> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there is a place for `len` bytes.
    pub(in crate::bridge) fn has_place(&self, len: u64) -> bool {
        usize::try_from(len).is_ok_and(|len| place(&self.used(), len).is_some())
    }

    /// Keeps `bytes`. `None`: there is no place.
    pub(in crate::bridge) fn keep(self: &Arc<Room>, bytes: &[u8]) -> Option<Arc<Compressed>> {
        let mut used = self.used();
        let at = place(&used, bytes.len())?;
        let compressed = self.occupy(&mut used, at, bytes.len());
        drop(used);
        compressed.bytes().write(bytes);
        Some(compressed)
    }

    /// `len` bytes from `at` on, which another process has kept. `None`: they do not lie here.
    pub(in crate::bridge) fn find(self: &Arc<Room>, at: u64, len: u64) -> Option<Arc<Compressed>> {
        let (at, len) = (usize::try_from(at).ok()?, usize::try_from(len).ok()?);
        let inside = len > 0 && at <= ROOM && len <= ROOM - at;
        inside.then(|| self.occupy(&mut self.used(), at, len))
    }

    fn occupy(self: &Arc<Room>, used: &mut Vec<(usize, usize)>, at: usize, len: usize) -> Arc<Compressed> {
        let place = (at, at + len);
        used.insert(used.partition_point(|other| *other <= place), place);
        Arc::new(Compressed { room: Arc::clone(self), at, len })
    }
}

impl Compressed {
    pub(in crate::bridge) fn len(&self) -> u64 {
        self.len as u64
    }

    /// Where in its room it lies, for the ledger.
    pub(super) fn at(&self) -> u64 {
        self.at as u64
    }

    /// The first byte. There are [`len`](Self::len) of them, and they stay mapped as long as this is held.
    pub(in crate::bridge) fn address(&self) -> NonNull<u8> {
        // SAFETY: the room lies in the mapping, and these bytes in the room.
        unsafe { self.room.mapping.at().add(self.room.begin + self.at) }
    }

    /// The bytes.
    pub(in crate::bridge) fn bytes(&self) -> SharedBytes<'_> {
        // SAFETY: they lie in the mapping, which `self` holds, and which this process accesses through
        // `SharedBytes` and the kernel only.
        unsafe { SharedBytes::new(self.address(), self.len) }
    }
}

impl Drop for Compressed {
    fn drop(&mut self) {
        let mut used = self.room.used();
        if let Some(index) = used.iter().position(|place| *place == (self.at, self.at + self.len)) {
            used.remove(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn room() -> Arc<Room> {
        rooms(&file(2).unwrap(), 2).unwrap().remove(1)
    }

    proptest! {
        /// Bytes that are kept stay as they are, whatever comes and goes beside them, and a room that is
        /// empty has all of its place.
        #[test]
        fn bytes_stay_until_they_are_dropped(steps in prop::collection::vec((1usize..ROOM / 3, any::<u8>(), any::<prop::sample::Index>()), 1..30)) {
            let room = room();
            let mut kept: Vec<(Arc<Compressed>, u8)> = Vec::new();
            for (len, byte, which) in steps {
                let had_place = room.has_place(len as u64);
                let bytes = room.keep(&vec![byte; len]);
                prop_assert_eq!(bytes.is_some(), had_place);
                match bytes {
                    Some(bytes) => kept.push((bytes, byte)),
                    None => drop(kept.swap_remove(which.index(kept.len()))),
                }
                for (bytes, byte) in &kept {
                    let (bytes, mut ends) = (bytes.bytes(), [0; 2]);
                    let (first, last) = ends.split_at_mut(1);
                    bytes.part(0, 1).read(first);
                    bytes.part(bytes.len() - 1, 1).read(last);
                    prop_assert_eq!(ends, [*byte; 2]);
                }
            }
            kept.clear();
            prop_assert!(room.has_place(ROOM as u64) && !room.has_place(ROOM as u64 + 1));
        }
    }

    #[test]
    fn another_process_finds_the_bytes_and_nothing_beside_the_room() {
        let file = file(1).unwrap();
        let before = rooms(&file, 1).unwrap().remove(0);
        let kept = before.keep(b"what was sent").unwrap();
        let room = rooms(&file, 1).unwrap().remove(0);
        let found = room.find(kept.at(), kept.len()).unwrap();
        let mut copy = [0; 13];
        found.bytes().read(&mut copy);
        assert_eq!(&copy, b"what was sent");
        // Its place is taken, also where something else that was noted overlaps it.
        let other = room.find(5, 20).unwrap();
        let new = room.keep(&[0; 100]).unwrap();
        assert!(new.at() >= 25, "{new:?}");
        drop((found, other));
        assert_eq!(room.keep(&[0; 25]).unwrap().at(), 0);
        let size = ROOM as u64;
        for (at, len) in [(0, 0), (size, 1), (0, size + 1), (1, size), (u64::MAX, 1), (1, u64::MAX)] {
            assert!(room.find(at, len).is_none(), "{len} bytes at {at}");
        }
    }

    #[test]
    fn a_file_that_somebody_could_cut_short_or_that_is_short_is_refused() {
        let open = memfd_create(c"compressed", MFdFlags::MFD_ALLOW_SEALING).unwrap();
        ftruncate(&open, ROOM as i64).unwrap();
        assert!(rooms(&open, 1).is_err());
        let sealed = file(1).unwrap();
        assert!(
            rooms(&sealed, 1).is_ok() && rooms(&sealed, 2).is_err() && rooms(&sealed, usize::MAX).is_err()
        );
        assert!(rooms(&sealed, 0).is_err());
    }
}
