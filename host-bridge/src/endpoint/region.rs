//! The client's memory that commands can name: the arena, registered regions, and the ranges that commands
//! use.

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::io;
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous};

use super::pause::InUse;
use crate::memory::{ChannelView, OwnPages, Runs};
use crate::shared::SharedBytes;

/// Memory that commands can name: the arena, or a registered region.
///
/// A driver may attach its own registration of the memory ([`Region::registration`]). When the region was
/// removed and no command uses it any more, the thread that removes it drops the registration, which may wait
/// for the device, and then unmaps the memory.
pub struct Region {
    /// Dropped before the mapping.
    registration: OnceLock<Box<dyn Any + Send + Sync>>,
    memory: Memory,
    read_only: bool,
}

enum Memory {
    Runs(Runs),
    Arena(Arc<ChannelView>),
    Own(OwnPages),
}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Region({} bytes{})", self.size(), if self.read_only { ", read-only" } else { "" })
    }
}

impl Region {
    fn new(memory: Memory, read_only: bool) -> Region {
        Region { registration: OnceLock::new(), memory, read_only }
    }

    /// Memory of this process, zeroed, that a driver can use like a client's: a buffer. Its size is a whole
    /// number of pages.
    ///
    /// # Errors
    /// What the system says if there is no memory.
    pub fn own(len: NonZeroUsize) -> io::Result<Arc<Region>> {
        let rights = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a fresh mapping.
        let at = unsafe { mmap_anonymous(None, len, rights, MapFlags::MAP_PRIVATE) }?;
        // SAFETY: just mapped, and whatever uses it holds the region.
        let own = unsafe { OwnPages::new(at.cast(), len.get()) };
        Ok(Arc::new(Region::new(Memory::Own(own), false)))
    }

    /// Its size in bytes.
    pub fn size(&self) -> usize {
        match &self.memory {
            Memory::Runs(runs) => runs.size(),
            Memory::Arena(view) => view.geometry().arena_size,
            Memory::Own(own) => own.len(),
        }
    }

    /// Whether it is the channel's arena, whose bytes stay as they are until a command has read them.
    pub fn is_arena(&self) -> bool {
        matches!(self.memory, Memory::Arena(_))
    }

    /// Whether the worker may only read it.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// The contiguous runs that make up `len` bytes from `offset`. `None` if they are not all inside the
    /// region.
    pub fn runs(&self, offset: u64, len: u64) -> Option<Vec<(NonNull<u8>, usize)>> {
        match &self.memory {
            Memory::Runs(runs) => runs.range(offset, len).map(Iterator::collect),
            Memory::Arena(view) => {
                view.arena(offset, len).map(|run| if run.1 > 0 { vec![run] } else { Vec::new() })
            }
            Memory::Own(own) => {
                let end = offset.checked_add(len).filter(|end| *end <= own.len() as u64);
                // SAFETY: the offset lies inside the mapping, or just behind it.
                let run = |_| (unsafe { own.at().add(offset as usize) }, len as usize);
                end.map(run).map(|run| if run.1 > 0 { vec![run] } else { Vec::new() })
            }
        }
    }

    /// The driver's registration of this memory. The first call makes it with `make`.
    pub fn registration(
        &self,
        make: impl FnOnce() -> Box<dyn Any + Send + Sync>,
    ) -> &(dyn Any + Send + Sync) {
        self.registration.get_or_init(make).as_ref()
    }
}

/// A range of a region in use by a command. The region stays mapped until this is dropped.
#[derive(Debug)]
pub struct Mapped {
    /// For a source. Dropped first; that counts the source as read.
    _read: Option<Reading>,
    /// Not for memory that is merely kept.
    in_use: Option<InUse>,
    region: Arc<Region>,
    runs: Vec<(NonNull<u8>, usize)>,
    len: usize,
    /// Dropped last. That tells the thread that removes the region that this command has finished with it.
    _use: Arc<Sender<Infallible>>,
}

// SAFETY: the pointers refer to shared mappings that `region` keeps, usable from any thread.
unsafe impl Send for Mapped {}
// SAFETY: the structure is never changed after it was made.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// The first `len` bytes of a region, for a command. `None` if it has fewer.
    pub fn of(region: &Arc<Region>, len: u64) -> Option<Mapped> {
        let runs = region.runs(0, len)?;
        // Nobody waits for the end of this use.
        let _use = Arc::new(channel().0);
        Some(Mapped { _read: None, in_use: None, region: Arc::clone(region), runs, len: len as usize, _use })
    }

    /// Counts another use of the memory, for as long as the result exists: a client that is stopped cannot
    /// wait for its end, so its session ends.
    pub fn in_use(&self) -> Option<InUse> {
        self.in_use.clone()
    }

    /// Its size in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the range is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The contiguous runs, in order. Their content may change at any time.
    pub fn runs(&self) -> &[(NonNull<u8>, usize)] {
        &self.runs
    }

    /// The region that the range lies in.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Copies bytes from offset `at` to `to`. Nothing beyond the end of the range is copied.
    pub fn read(&self, at: usize, to: &mut [u8]) {
        let mut to = to;
        self.walk(at, to.len(), |run| {
            let (now, rest) = std::mem::take(&mut to).split_at_mut(run.len());
            run.read(now);
            to = rest;
        });
    }

    /// Copies `from` to offset `at`. Nothing beyond the end of the range is written.
    pub fn write(&self, at: usize, from: &[u8]) {
        let mut from = from;
        self.walk(at, from.len(), |run| {
            let (now, rest) = from.split_at(run.len());
            run.write(now);
            from = rest;
        });
    }

    fn walk(&self, at: usize, len: usize, mut each: impl FnMut(SharedBytes<'_>)) {
        let (mut skip, mut left) = (at, len.min(self.len.saturating_sub(at)));
        for (run, size) in &self.runs {
            if skip >= *size {
                skip -= size;
                continue;
            }
            let n = (size - skip).min(left);
            if n == 0 {
                break;
            }
            // SAFETY: `region` keeps the run mapped, readable and writable (`Memories::map` maps all files
            // so), and this process touches it by copies, atomics and devices only.
            let whole = unsafe { SharedBytes::new(*run, *size) };
            each(whole.part(skip, n));
            (skip, left) = (0, left - n);
        }
    }
}

/// Regions by id.
#[derive(Default)]
struct Table {
    here: HashMap<u32, Shared>,
    /// Those that were removed. Commands that came before and are executed later find them here, as long as
    /// something [keeps](Regions::keep) them.
    leaving: HashMap<u32, (Weak<Region>, Weak<Sender<Infallible>>)>,
}

impl Table {
    fn find(&self, id: u32) -> Option<(Arc<Region>, Arc<Sender<Infallible>>)> {
        if let Some(shared) = self.here.get(&id) {
            return Some((Arc::clone(&shared.region), Arc::clone(&shared.uses)));
        }
        let (region, uses) = self.leaving.get(&id)?;
        region.upgrade().zip(uses.upgrade())
    }
}

/// A region, and the sender that shows whether a command uses it.
struct Shared {
    region: Arc<Region>,
    /// Each use has a clone.
    uses: Arc<Sender<Infallible>>,
    left: Receiver<Infallible>,
}

impl Shared {
    fn new(memory: Memory, read_only: bool) -> Shared {
        let (uses, left) = channel();
        Shared { region: Arc::new(Region::new(memory, read_only)), uses: Arc::new(uses), left }
    }
}

/// A removed region. Dropping it unmaps the memory. If commands still use it, the last of them does.
pub(super) struct Leaving {
    _region: Arc<Region>,
    /// Disconnected when no command uses the region.
    pub(super) left: Receiver<Infallible>,
}

/// The regions of a session, by id.
pub(super) struct Regions {
    arena: Arc<Region>,
    /// Uses of the arena, for which nobody waits.
    arena_uses: Arc<Sender<Infallible>>,
    regions: Mutex<Table>,
    released: Arc<Released>,
    in_use: Arc<AtomicUsize>,
}

impl Regions {
    pub(super) fn new(view: Arc<ChannelView>, released: Arc<Released>) -> Regions {
        let Shared { region, uses, .. } = Shared::new(Memory::Arena(view), false);
        let (regions, in_use) = Default::default();
        Regions { arena: region, arena_uses: uses, regions, released, in_use }
    }

    /// Whether commands use any of the memory now.
    pub(super) fn are_in_use(&self) -> bool {
        self.in_use.load(Ordering::Acquire) > 0
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.regions.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Adds a region. Returns false if the id is in use.
    pub(super) fn add(&self, id: u32, runs: Runs, read_only: bool) -> bool {
        let mut regions = self.lock();
        if regions.here.contains_key(&id) {
            return false;
        }
        regions.here.insert(id, Shared::new(Memory::Runs(runs), read_only));
        true
    }

    /// The registered regions, with their ids and the number of pieces of memory that each is made of.
    pub(super) fn list(&self) -> Vec<(u32, u32, Arc<Region>)> {
        let regions = self.lock();
        let pieces = |region: &Region| match &region.memory {
            Memory::Runs(runs) => u32::try_from(runs.all().len()).unwrap_or(u32::MAX),
            Memory::Arena(_) | Memory::Own(_) => 1,
        };
        regions
            .here
            .iter()
            .map(|(id, shared)| (*id, pieces(&shared.region), Arc::clone(&shared.region)))
            .collect()
    }

    /// Removes a region. Later commands cannot name it.
    pub(super) fn remove(&self, id: u32) -> Option<Leaving> {
        let mut regions = self.lock();
        let Shared { region, uses, left } = regions.here.remove(&id)?;
        regions.leaving.retain(|_, (_, uses)| uses.strong_count() > 0);
        regions.leaving.insert(id, (Arc::downgrade(&region), Arc::downgrade(&uses)));
        Some(Leaving { _region: region, left })
    }

    /// `len` bytes at `offset` of the arena or a region, for a command. `None` if they do not exist or must
    /// not be written.
    pub(super) fn take(&self, range: protocol::data::HostRange, reader: Option<u64>) -> Option<Mapped> {
        let mut mapped = self.keep(range)?;
        if reader.is_none() && mapped.region.read_only {
            return None;
        }
        mapped._read = reader.map(|seq| Released::begin(&self.released, seq));
        mapped.in_use = Some(InUse::new(&self.in_use));
        Some(mapped)
    }

    /// As [`take`](Self::take), for a command that does not use the bytes yet.
    pub(super) fn keep(&self, range: protocol::data::HostRange) -> Option<Mapped> {
        let (region, _use) = match range.place {
            protocol::data::Place::Arena => (Arc::clone(&self.arena), Arc::clone(&self.arena_uses)),
            protocol::data::Place::Region(id) => self.lock().find(id)?,
        };
        let runs = region.runs(range.offset, range.len)?;
        Some(Mapped { _read: None, in_use: None, region, runs, len: range.len as usize, _use })
    }
}

/// Called with each new value of the `released` watermark.
type Publish = Box<dyn Fn(u64) + Send + Sync>;

/// The `released` watermark. Every command up to it has been executed and has read its sources.
pub(super) struct Released {
    state: Mutex<ReleasedState>,
    executed: AtomicU64,
    publish: Publish,
}

#[derive(Default)]
struct ReleasedState {
    reading: BTreeMap<u64, u32>,
    published: u64,
}

impl Released {
    pub(super) fn new(publish: Publish) -> Arc<Released> {
        Arc::new(Released { state: Mutex::default(), executed: AtomicU64::new(0), publish })
    }

    fn begin(this: &Arc<Released>, seq: u64) -> Reading {
        *this.state.lock().unwrap_or_else(|e| e.into_inner()).reading.entry(seq).or_insert(0) += 1;
        Reading { released: Arc::clone(this), seq }
    }

    /// The dispatcher has executed command `seq`.
    pub(super) fn executed(&self, seq: u64) {
        self.executed.store(seq, Ordering::Release);
        let state = self.state.lock().unwrap_or_else(|e| e.into_inner());
        self.update(state);
    }

    fn update(&self, mut state: MutexGuard<'_, ReleasedState>) {
        let executed = self.executed.load(Ordering::Acquire);
        let now = state.reading.first_key_value().map_or(executed, |(first, _)| executed.min(first - 1));
        if now > state.published {
            state.published = now;
            (self.publish)(now);
        }
    }
}

/// A source of a command that was not completely read yet.
struct Reading {
    released: Arc<Released>,
    seq: u64,
}

impl std::fmt::Debug for Reading {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Reading({})", self.seq)
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        let mut state = self.released.state.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(count) = state.reading.get_mut(&self.seq) {
            *count -= 1;
            if *count == 0 {
                state.reading.remove(&self.seq);
            }
        }
        self.released.update(state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_follows_the_oldest_source_still_being_read() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&seen);
        let released = Released::new(Box::new(move |seq| log.lock().unwrap().push(seq)));
        released.executed(1);
        let two = Released::begin(&released, 2);
        released.executed(2);
        let three = Released::begin(&released, 3);
        let three_too = Released::begin(&released, 3);
        released.executed(3);
        released.executed(4);
        drop(three);
        assert_eq!(*seen.lock().unwrap(), [1]);
        drop(two);
        assert_eq!(*seen.lock().unwrap(), [1, 2]);
        drop(three_too);
        assert_eq!(*seen.lock().unwrap(), [1, 2, 4]);
    }
}
