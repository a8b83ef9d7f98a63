//! What outlives a device process, so that its successor can continue with the guest: the requests in
//! progress, and the channels.
//!
//! - [`Requests`] is memory that the keeper gives to each device process in turn. It shows which descriptor
//!   chains of the request queue were taken but not answered; the vhost-user specification describes the same
//!   under "Inflight I/O tracking". A successor executes them again.
//! - [`Store`] tells the keeper about each channel and its session. A successor uses this to find the
//!   programs and continue their sessions. If it can't, it tells them that they are over, and knows when the
//!   workers that had mapped their memory ([`Leftover`]) have released it.
//!
//! The contents come from a process that a guest may have taken over. They concern only that guest, and
//! everything is checked like the guest's own requests.

use std::io::{self, ErrorKind};
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, Ordering};
use std::time::Duration;

use host_bridge::bridge::saved::MAX_BYTES;
use host_bridge::bridge::{Closed, Saved, SessionConfig};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use protocol::device::{Extent, MAX_EXTENTS};
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use zerocopy::{FromBytes, IntoBytes};

use super::queue::QUEUE_SIZE;
use crate::link::{Control, Stored, ToKeeper};
use crate::memory_file::memory_file;
use crate::stage::{self, Stage, StoredServer};

/// Size of the memory for requests in progress, in bytes.
pub const REQUESTS_SIZE: u64 = 4096;

/// Its layout.
#[repr(C)]
struct Table {
    /// The used ring's index after the last answer that is complete here.
    used: AtomicU16,
    /// The chain that was answered last.
    last: AtomicU16,
    /// By head: whether the chain was taken but not answered.
    taken: [AtomicU8; QUEUE_SIZE],
}

const _: () = assert!(size_of::<Table>() <= REQUESTS_SIZE as usize);

/// The requests in progress.
#[derive(Debug)]
pub struct Requests(NonNull<Table>);

// SAFETY: the mapping is not tied to a thread, and its contents are atomics.
unsafe impl Send for Requests {}
// SAFETY: the contents are atomics, so threads may share them.
unsafe impl Sync for Requests {}

impl Requests {
    /// Maps the keeper's file.
    pub fn map(file: &OwnedFd) -> io::Result<Requests> {
        let size = const { NonZeroUsize::new(REQUESTS_SIZE as usize).unwrap() };
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a fresh mapping at an address chosen by the kernel. The keeper has sealed the file against
        // shrinking.
        let at = unsafe { mmap(None, size, protection, MapFlags::MAP_SHARED, file, 0) }?;
        Ok(Requests(at.cast()))
    }

    fn table(&self) -> &Table {
        // SAFETY: mapped, page-aligned and large enough until `drop`; the table consists of atomics, for
        // which any bytes are valid.
        unsafe { self.0.as_ref() }
    }

    /// A chain was taken from the queue. Nothing has been done for it yet.
    pub fn taken(&self, head: u16) {
        if let Some(taken) = self.table().taken.get(usize::from(head)) {
            taken.store(1, Ordering::SeqCst);
        }
    }

    /// The chain's answer is about to be published: the used ring's index rises after this.
    pub fn answering(&self, head: u16) {
        self.table().last.store(head, Ordering::SeqCst);
    }

    /// The chain's answer has been published, and the used ring's index is `used`.
    pub fn answered(&self, head: u16, used: u16) {
        if let Some(taken) = self.table().taken.get(usize::from(head)) {
            taken.store(0, Ordering::SeqCst);
        }
        self.table().used.store(used, Ordering::SeqCst);
    }

    /// The queue has stopped, and the driver expects no answers.
    pub fn reset(&self) {
        self.table().taken.iter().for_each(|taken| taken.store(0, Ordering::SeqCst));
        self.table().used.store(0, Ordering::SeqCst);
    }

    /// The chains in progress, given the used ring's index in guest memory.
    pub fn recover(&self, used: u16) -> Vec<u16> {
        let table = self.table();
        if table.used.load(Ordering::SeqCst) != used {
            // The process ended between the answer and `answered`.
            self.answered(table.last.load(Ordering::SeqCst), used);
        }
        let taken = table.taken.iter().enumerate().filter(|(_, taken)| taken.load(Ordering::SeqCst) != 0);
        taken.filter_map(|(head, _)| u16::try_from(head).ok()).collect()
    }
}

impl Drop for Requests {
    fn drop(&mut self) {
        // SAFETY: `map` made this mapping, and references to it live no longer than `self`.
        let _ = unsafe { munmap(self.0.cast(), REQUESTS_SIZE as usize) };
    }
}

/// The descriptors of a chain that was taken from a queue earlier. A loop ends after as many descriptors as
/// the queue is long.
pub fn chain(memory: &GuestMemoryMmap, table: u64, size: u16, head: u16) -> Vec<Descriptor> {
    let read = |table: u64, index: u16| -> Option<Descriptor> {
        let at = table.checked_add(u64::from(index) * size_of::<Descriptor>() as u64)?;
        memory.read_obj(GuestAddress(at)).ok()
    };
    let (mut table, mut count) = (table, size);
    let mut next = (head < size).then_some(head);
    let (mut found, mut indirect) = (Vec::new(), false);
    while let Some(descriptor) = next.and_then(|index| read(table, index))
        && found.len() < usize::from(u16::MAX)
    {
        if descriptor.refers_to_indirect_table() {
            let entries = descriptor.len() as usize / size_of::<Descriptor>();
            let entries = u16::try_from(entries).unwrap_or(0);
            if indirect || entries == 0 {
                break;
            }
            (table, count, next, indirect) = (descriptor.addr().0, entries, Some(0), true);
            continue;
        }
        found.push(descriptor);
        if found.len() >= usize::from(count) {
            break;
        }
        next = (descriptor.has_next() && descriptor.next() < count).then(|| descriptor.next());
    }
    found
}

/// Remembers channels for a successor.
#[derive(Debug)]
pub struct Store(Arc<Control>);

/// What must be known of a channel, ready to be stored.
#[derive(Debug)]
pub struct Known(Stored);

impl Known {
    /// Writes the server and the channel's extents into a file, and its session.
    pub fn new(server: (usize, &SessionConfig), extents: &[Extent], stage: Stage<'_>) -> io::Result<Known> {
        let (session, descriptors) = stage.saved().map(Saved::parts).unwrap_or_default();
        let (word, server) = stage.stored(server);
        let mut bytes = word.to_le_bytes().to_vec();
        bytes.extend_from_slice(&(extents.len() as u64).to_le_bytes());
        bytes.extend(server);
        bytes.extend_from_slice(extents.as_bytes());
        bytes.extend(session);
        let descriptors = descriptors.iter().map(|fd| fd.try_clone_to_owned()).collect::<io::Result<_>>()?;
        Ok(Known(Stored { known: memory_file(c"channel", &bytes)?, descriptors }))
    }

    /// What a successor gets.
    #[cfg(test)]
    pub fn into_stored(self) -> Stored {
        self.0
    }
}

impl Store {
    /// Stores with the keeper.
    pub fn new(control: Arc<Control>) -> Store {
        Store(control)
    }

    /// Remembers a channel.
    pub fn remember(&self, channel: u32, known: Known) -> io::Result<()> {
        self.0.tell_keeper(&ToKeeper::Store { channel: channel.into(), stored: known.0 })
    }

    /// Forgets a channel: nothing can touch its memory any more.
    pub fn forget(&self, channel: u32) {
        // Without a keeper there is no successor.
        let _ = self.0.tell_keeper(&ToKeeper::Forget { channel: channel.into() });
    }
}

/// A channel of a predecessor.
#[derive(Debug)]
pub struct Leftover {
    /// Its server.
    pub server: StoredServer,
    /// Its memory.
    pub extents: Vec<Extent>,
    /// Its session, if it had one that has outlived the predecessor.
    pub saved: Option<Saved>,
}

impl Leftover {
    /// Reads what was stored.
    pub fn new(stored: Stored, servers: &[SessionConfig]) -> io::Result<Leftover> {
        let malformed =
            || io::Error::new(ErrorKind::InvalidData, "what was stored of a channel is malformed");
        let file = std::fs::File::from(stored.known);
        let size = file.metadata()?.len();
        let most = MAX_EXTENTS as usize * size_of::<Extent>() + 16 + stage::MAX_STORED + MAX_BYTES;
        if size > most as u64 {
            return Err(malformed());
        }
        let mut bytes = vec![0; size as usize];
        file.read_exact_at(&mut bytes, 0)?;
        let (word, rest) = bytes.split_first_chunk().ok_or_else(malformed)?;
        let (count, rest) = rest.split_first_chunk().ok_or_else(malformed)?;
        let read = StoredServer::read(u64::from_le_bytes(*word), rest, servers);
        let (server, rest) = read.ok_or_else(malformed)?;
        let length = u64::from_le_bytes(*count).checked_mul(size_of::<Extent>() as u64);
        let length = length.and_then(|length| usize::try_from(length).ok());
        let (extents, session) =
            length.and_then(|length| rest.split_at_checked(length)).ok_or_else(malformed)?;
        let (extents, _) = extents.as_chunks::<{ size_of::<Extent>() }>();
        let extents = extents.iter().filter_map(|extent| Extent::read_from_bytes(extent).ok()).collect();
        let saved =
            (!session.is_empty()).then(|| Saved::from_parts(session, stored.descriptors)).transpose()?;
        Ok(Leftover { server, extents, saved })
    }

    /// Tells the worker or the server that the session is over.
    pub fn end(&self) {
        self.saved.iter().for_each(|saved| self.server.end(saved));
    }

    /// Waits up to `patience` until no worker has the channel's memory mapped. Call it after
    /// [`end`](Self::end).
    pub fn close(&self, patience: Duration) -> Closed {
        self.saved.as_ref().map_or(Closed::Released, |saved| saved.released(patience))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn requests() -> (OwnedFd, Requests) {
        let file = nix::sys::memfd::memfd_create(c"test", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap();
        nix::unistd::ftruncate(&file, REQUESTS_SIZE as i64).unwrap();
        let requests = Requests::map(&file).unwrap();
        (file, requests)
    }

    #[test]
    fn a_successor_finds_the_requests_without_an_answer() {
        let (file, requests) = requests();
        [5, 9, 1023, 7].into_iter().for_each(|head| requests.taken(head));
        requests.answering(9);
        requests.answered(9, 1);
        assert_eq!(Requests::map(&file).unwrap().recover(1), [5, 7, 1023]);
        requests.reset();
        assert!(requests.recover(0).is_empty());
    }

    #[test]
    fn an_answer_that_was_just_published_is_not_given_again() {
        let (file, requests) = requests();
        [5, 9].into_iter().for_each(|head| requests.taken(head));
        // The process ends here, after the used ring's index has risen.
        requests.answering(5);
        let successor = Requests::map(&file).unwrap();
        assert_eq!(successor.recover(1), [9]);
        assert_eq!(successor.recover(1), [9], "also to the next successor");
    }

    #[test]
    fn an_answer_that_was_not_published_is_given_again() {
        let (_file, requests) = requests();
        requests.taken(5);
        requests.answering(5);
        assert_eq!(requests.recover(0), [5]);
    }

    fn memory(descriptors: &[(u16, Descriptor)]) -> GuestMemoryMmap {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x10000)]).unwrap();
        for (index, descriptor) in descriptors {
            memory.write_obj(*descriptor, GuestAddress(u64::from(*index) * 16)).unwrap();
        }
        memory
    }

    #[test]
    fn a_chain_is_read_again_even_from_an_indirect_table() {
        let (next, write, indirect) = (1, 2, 4);
        let direct = [(3, Descriptor::new(0x100, 32, next, 1)), (1, Descriptor::new(0x200, 264, write, 0))];
        let found = chain(&memory(&direct), 0, 8, 3);
        assert_eq!(
            found.iter().map(|d| (d.addr().0, d.len())).collect::<Vec<_>>(),
            [(0x100, 32), (0x200, 264)]
        );
        // The table lies at 0x1000.
        let table = [
            (2, Descriptor::new(0x1000, 32, indirect, 0)),
            (0x100, Descriptor::new(0x300, 1, next, 1)),
            (0x101, Descriptor::new(0x400, 2, write, 0)),
        ];
        let found = chain(&memory(&table), 0, 8, 2);
        assert_eq!(found.iter().map(|d| (d.addr().0, d.len())).collect::<Vec<_>>(), [(0x300, 1), (0x400, 2)]);
    }

    proptest! {
        #[test]
        fn any_descriptors_give_a_bounded_chain(entries in proptest::collection::vec((0u64..0x20000, any::<u32>(), 0u16..8, any::<u16>()), 16), head in 0u16..32) {
            let descriptors: Vec<_> = entries.iter().zip(0u16..).map(|((addr, len, flags, next), index)| (index, Descriptor::new(*addr, *len, *flags, *next))).collect();
            prop_assert!(chain(&memory(&descriptors), 0, 16, head).len() <= usize::from(u16::MAX));
        }
    }
}
