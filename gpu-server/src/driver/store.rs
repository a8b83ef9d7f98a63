//! Stores device memory while it is not on the device: in this process's memory, or in a file.
//!
//! Memory is allocated in chunks, which a backend may page-lock, and kept for reuse: faulting in the pages
//! takes longer than the copies.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;

use protocol::Status;

use super::call::Result;

/// Size of a chunk, and of each copy to or from a file, in bytes.
const CHUNK: u64 = if cfg!(test) { 2 << 20 } else { 64 << 20 };
/// Bytes of a huge page.
const HUGE: usize = 2 << 20;
/// Threads that fault in the pages of a chunk.
const THREADS: usize = 8;

/// Bytes of memory that a store of this size takes.
pub fn memory_for(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(CHUNK).unwrap_or(u64::MAX)
}

/// Page-aligned memory of this process.
pub struct Chunk {
    at: NonNull<u8>,
    len: usize,
    /// Whether a backend has page-locked it.
    pub locked: bool,
}

// SAFETY: it owns a mapping and nothing thread-specific.
unsafe impl Send for Chunk {}
// SAFETY: a shared reference only gives out the address.
unsafe impl Sync for Chunk {}

impl Chunk {
    fn new() -> Result<Chunk> {
        let len = CHUNK as usize;
        let refused = |e: io::Error| {
            tracing::warn!("no memory of this machine for device memory: {e}");
            Status::OUT_OF_MEMORY
        };
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a fresh anonymous mapping, at an address that the kernel chooses.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags | libc::MAP_NORESERVE, -1, 0) };
        let at = if at == libc::MAP_FAILED { None } else { NonNull::new(at.cast::<u8>()) };
        let chunk = Chunk { at: at.ok_or_else(|| refused(io::Error::last_os_error()))?, len, locked: false };
        chunk.make_pages().map_err(refused)?;
        Ok(chunk)
    }

    /// Faults in all pages, huge ones if possible, so that a lack of memory is reported now.
    fn make_pages(&self) -> io::Result<()> {
        let advise = |offset: usize, len: usize, advice| {
            // SAFETY: inside this chunk's own mapping. Neither advice changes page contents.
            match unsafe { libc::madvise(self.at.as_ptr().add(offset).cast(), len, advice) } {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        };
        // Without huge pages it only takes longer.
        let _ = advise(0, self.len, libc::MADV_HUGEPAGE);
        let share = (self.len / THREADS).next_multiple_of(HUGE);
        std::thread::scope(|scope| {
            let make = |offset: usize| {
                let len = share.min(self.len - offset);
                scope.spawn(move || advise(offset, len, libc::MADV_POPULATE_WRITE))
            };
            let threads: Vec<_> = (0..self.len).step_by(share).map(make).collect();
            threads.into_iter().try_for_each(|thread| match thread.join() {
                // Kernels before 5.14 fault in each page when it is used.
                Ok(Err(e)) if e.raw_os_error() == Some(libc::EINVAL) => Ok(()),
                Ok(made) => made,
                Err(_) => Err(io::ErrorKind::Other.into()),
            })
        })
    }

    /// Its first byte.
    pub fn at(&self) -> NonNull<u8> {
        self.at
    }

    /// Its size in bytes.
    pub fn size(&self) -> usize {
        self.len
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: this chunk's own mapping. Whoever page-locked it has unlocked it.
        unsafe { libc::munmap(self.at.as_ptr().cast(), self.len) };
    }
}

/// A part of the store in memory: `len` bytes that a backend reads or writes.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// Its address on the device.
    pub address: u64,
    /// Its address here.
    pub host: NonNull<u8>,
    /// How many.
    pub len: usize,
}

/// See the module.
#[derive(Default)]
pub struct Store {
    /// In memory. With a file, one chunk that all bytes pass through.
    chunks: Vec<Chunk>,
    file: Option<File>,
}

/// Where bytes are that can leave their device. `T` belongs to the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place<T> {
    /// On their device.
    Device(T),
    /// In the store, from this offset on.
    Store(u64),
}

impl<T> Place<T> {
    /// The same without what belongs to the GPU.
    pub fn kind(&self) -> Place<()> {
        match self {
            Place::Device(_) => Place::Device(()),
            Place::Store(at) => Place::Store(*at),
        }
    }
}

/// The direction of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// From the device.
    Out,
    /// To the device.
    In,
}

/// One of two queues of copies, so that one can be waited for while the other goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Lane {
    /// The first.
    Even,
    /// The second.
    Odd,
}

impl Lane {
    /// The other one.
    pub fn other(self) -> Lane {
        match self {
            Lane::Even => Lane::Odd,
            Lane::Odd => Lane::Even,
        }
    }
}

impl Store {
    /// Decides where the next `bytes` go: to a file, or to memory. What is in the store now is given up.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY` if the file gets no room.
    pub fn begin(&mut self, bytes: u64, file: Option<OwnedFd>) -> Result {
        self.file = None;
        if let Some(file) = file.map(File::from) {
            let made = nix::fcntl::fallocate(&file, nix::fcntl::FallocateFlags::empty(), 0, bytes as i64);
            made.map_err(|e| {
                tracing::warn!(bytes, "no room in --swap-folder for device memory: {e}");
                Status::OUT_OF_MEMORY
            })?;
            self.file = Some(file);
        }
        Ok(())
    }

    /// Whether bytes go to a file.
    pub fn has_file(&self) -> bool {
        self.file.is_some()
    }

    /// Makes memory for the first `bytes`, or for what passes through on its way to the file. `lock`
    /// page-locks chunks.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY` if there is no room. Existing contents stay.
    pub fn reserve(&mut self, bytes: u64, mut lock: impl FnMut(&mut Chunk)) -> Result {
        let wanted = if self.file.is_some() { 1 } else { bytes.div_ceil(CHUNK) };
        while (self.chunks.len() as u64) < wanted {
            let mut chunk = Chunk::new()?;
            lock(&mut chunk);
            self.chunks.push(chunk);
        }
        Ok(())
    }

    /// Bytes of this machine's memory that it uses.
    pub fn memory(&self) -> u64 {
        self.chunks.iter().map(|chunk| chunk.len as u64).sum()
    }

    /// Releases everything. `unlock` undoes what `lock` did.
    pub fn clear(&mut self, mut unlock: impl FnMut(&mut Chunk)) {
        self.chunks.iter_mut().for_each(&mut unlock);
        self.chunks.clear();
        self.file = None;
    }

    /// Moves `size` bytes between a device's `address` and the store's offset `at`. `copy` moves parts,
    /// possibly later; `wait` waits until that is done. With a file, everything has been moved when this
    /// returns; otherwise when `wait` has been called.
    ///
    /// # Errors
    /// Those of `copy` and `wait`; `UNKNOWN` if a file cannot be read or written.
    pub fn transfer(
        &mut self,
        way: Way,
        address: u64,
        at: u64,
        size: u64,
        mut copy: impl FnMut(Part) -> Result,
        mut wait: impl FnMut() -> Result,
    ) -> Result {
        let mut done = 0;
        while done < size {
            let offset = at + done;
            let (index, inside, most) = match self.file {
                Some(_) => (0, 0, CHUNK),
                None => ((offset / CHUNK) as usize, offset % CHUNK, CHUNK - offset % CHUNK),
            };
            let len = most.min(size - done);
            let chunk = self.chunks.get(index).filter(|chunk| inside + len <= chunk.len as u64);
            let chunk = chunk.ok_or(Status::UNKNOWN)?;
            // SAFETY: inside the chunk, as was just checked.
            let host = unsafe { chunk.at.add(inside as usize) };
            let part = Part { address: address + done, host, len: len as usize };
            match &self.file {
                None => copy(part)?,
                Some(file) => {
                    // SAFETY: the part's bytes. No device uses them before `copy` and after `wait`, and there
                    // is no other reference to them.
                    let bytes = unsafe { std::slice::from_raw_parts_mut(host.as_ptr(), part.len) };
                    let failed = |e: io::Error| {
                        tracing::error!("device memory in --swap-folder: {e}");
                        Status::UNKNOWN
                    };
                    if way == Way::In {
                        file.read_exact_at(bytes, offset).map_err(failed)?;
                    }
                    copy(part).and_then(|()| wait())?;
                    if way == Way::Out {
                        file.write_all_at(bytes, offset).map_err(failed)?;
                    }
                }
            }
            done += len;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Moves bytes between a store and a vector that represents a device.
    fn transfer(store: &mut Store, way: Way, device: &mut [u8], address: u64, at: u64, size: u64) {
        let copy = |part: Part| {
            let range = part.address as usize..part.address as usize + part.len;
            // SAFETY: the part's bytes, which nobody else uses.
            let host = unsafe { std::slice::from_raw_parts_mut(part.host.as_ptr(), part.len) };
            match way {
                Way::Out => host.copy_from_slice(&device[range]),
                Way::In => device[range].copy_from_slice(host),
            }
            Ok(())
        };
        store.transfer(way, address, at, size, copy, || Ok(())).unwrap();
    }

    #[test]
    fn bytes_round_trip_through_memory_and_through_a_file() {
        let size = CHUNK + 12345;
        let mut device = test_kit::pattern(size as usize, 3);
        let expected = device.clone();
        for file in [None, Some(OwnedFd::from(tempfile::tempfile().unwrap()))] {
            let mut store = Store::default();
            let chunks = if file.is_some() { 1 } else { 2 };
            let mut locked = 0;
            store.begin(size, file).unwrap();
            assert_eq!(store.has_file(), chunks == 1);
            store.reserve(size, |_| locked += 1).unwrap();
            assert_eq!((locked, store.memory()), (chunks, chunks * CHUNK));
            transfer(&mut store, Way::Out, &mut device, 0, 0, size - 777);
            transfer(&mut store, Way::Out, &mut device, size - 777, size - 777, 777);
            device.fill(0);
            transfer(&mut store, Way::In, &mut device, 0, 0, size);
            assert!(device == expected, "{chunks} chunks");
            store.clear(|_| locked -= 1);
            assert_eq!((locked, store.memory()), (0, 0));
        }
    }

    #[test]
    fn a_store_grows_and_stays_in_bounds() {
        let mut store = Store::default();
        store.reserve(1, |_| ()).unwrap();
        let beyond = store.transfer(Way::Out, 0, CHUNK - 1, 2, |_| Ok(()), || Ok(()));
        assert_eq!(beyond, Err(Status::UNKNOWN));
        store.reserve(CHUNK + 1, |_| ()).unwrap();
        let mut device = [1, 2];
        transfer(&mut store, Way::Out, &mut device, 0, CHUNK - 1, 2);
        transfer(&mut store, Way::In, &mut [0, 0], 0, CHUNK - 1, 2);
    }
}
