//! A program and the bridge's session in one process: the program's memory is a guest's RAM, the channel is
//! scattered in it.

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use host_bridge::bridge::{
    ChannelMemory, ConnectError, RegionError, RegionMemory, Session, SessionConfig, Wakeup,
};
use host_bridge::memory::Memories;
use protocol::channel::{Geometry, State};
use protocol::device::Extent;
use protocol::link::Memory;
use protocol::version::Version;

use crate::channel::{Channel, write_header};
use crate::{eventually, memfd};

/// Bytes of the client's memory.
pub const RAM: u64 = 64 << 20;
/// Where the channel lies in it.
const CHANNEL_AT: u64 = 0x10_0000;

/// A client with its session. Its channel's methods are its own.
pub struct Client {
    /// The session under test.
    pub session: Session,
    /// The client's memory.
    pub memories: Memories,
    /// The reason that the session gave when it was lost.
    pub lost: Arc<Mutex<Option<String>>>,
    /// How often the session woke the client.
    pub wakes: Arc<AtomicUsize>,
    channel: Channel,
}

impl Deref for Client {
    type Target = Channel;

    fn deref(&self) -> &Channel {
        &self.channel
    }
}

impl DerefMut for Client {
    fn deref_mut(&mut self) -> &mut Channel {
        &mut self.channel
    }
}

/// A channel's memory that a client has prepared, its first page behind the rest as a guest's pages may be.
pub fn channel(arena: usize) -> (Memories, ChannelMemory) {
    let geometry = Geometry::with_arena(arena);
    let memory = Memory { addr: 0, size: RAM, file_offset: 0 };
    let memories = Memories::map(vec![(memory, memfd(RAM))]).unwrap();
    let size = geometry.size as u64;
    let extents = vec![
        Extent { addr: CHANNEL_AT + size, len: 0x1000 },
        Extent { addr: CHANNEL_AT, len: size - 0x1000 },
    ];
    write_header(&memories, extents[0].addr, &geometry.fields(42, "test-program"));
    let channel = ChannelMemory::new(memories.clone(), extents, size).unwrap();
    (memories, channel)
}

impl Client {
    /// Opens a session.
    pub fn try_connect(config: &SessionConfig) -> Result<Client, ConnectError> {
        let (memories, channel) = channel(4 << 20);
        Client::begin(config, memories, channel)
    }

    /// Opens a session as a program of this version does.
    pub fn of_version(config: &SessionConfig, version: Version) -> Client {
        let (memories, channel) = channel(4 << 20);
        Client::begin(config, memories, ChannelMemory { version, ..channel }).unwrap()
    }

    fn begin(
        config: &SessionConfig,
        memories: Memories,
        channel: ChannelMemory,
    ) -> Result<Client, ConnectError> {
        let view = memories.view(&channel.extents, channel.size).unwrap();
        let (lost, wakes) = (Arc::new(Mutex::new(None)), Arc::new(AtomicUsize::new(0)));
        let (for_loss, for_wakes) = (lost.clone(), wakes.clone());
        let wakeup = Wakeup::Call(Arc::new(move || {
            for_wakes.fetch_add(1, Ordering::SeqCst);
        }));
        let on_lost = Box::new(move |reason: &str| *for_loss.lock().unwrap() = Some(reason.to_owned()));
        let session = Session::connect(config, channel, wakeup, on_lost)?;
        let doorbell = session.doorbell_fd().clone();
        let channel = Channel::new(view, move || {
            doorbell.write(1).unwrap();
        });
        Ok(Client { session, memories, lost, wakes, channel })
    }

    /// Opens a session that must come about.
    pub fn connect(config: &SessionConfig) -> Client {
        Client::try_connect(config).unwrap()
    }

    /// Registers extents of the client's memory.
    pub fn register(&self, id: u32, extents: Vec<Extent>, read_only: bool) -> Result<(), RegionError> {
        let size = extents.iter().map(|e| e.len).sum();
        let memories = self.memories.clone();
        self.session
            .register_region(id, RegionMemory { memories, extents, size, own_memory: false, read_only })
    }

    /// Writes the client's memory.
    pub fn write(&self, extents: &[Extent], bytes: &[u8]) {
        write(&self.memories, extents, bytes);
    }

    /// Reads the client's memory.
    pub fn read(&self, extents: &[Extent]) -> Vec<u8> {
        read(&self.memories, extents)
    }

    /// Waits for the loss and returns its reason, which must be in the header too.
    pub fn wait_lost(&self) -> String {
        eventually(|| self.lost.lock().unwrap().is_some());
        let reason = self.lost.lock().unwrap().clone().unwrap();
        assert_eq!(self.header().state(), State::Lost);
        // The header holds as much as fits, or the words of a worker that ended the session by itself.
        assert!(reason.contains(self.header().reason().trim_end_matches('…')), "{reason}");
        reason
    }
}

/// Writes extents of a client's memory.
pub fn write(memories: &Memories, extents: &[Extent], bytes: &[u8]) {
    for piece in memories.resolve(extents, bytes.len() as u64).unwrap().all() {
        // SAFETY: `resolve` checked that the piece lies in mapped memory, and `piece.offset + piece.len` is
        // at most `bytes.len()`.
        unsafe { piece.at.copy_from(NonNull::from(&bytes[piece.offset]).cast(), piece.len) };
    }
}

/// Reads extents of a client's memory.
pub fn read(memories: &Memories, extents: &[Extent]) -> Vec<u8> {
    let size: u64 = extents.iter().map(|e| e.len).sum();
    let mut bytes = vec![0; size as usize];
    for piece in memories.resolve(extents, size).unwrap().all() {
        // SAFETY: `resolve` checked that the piece lies in mapped memory, and `piece.offset + piece.len` is
        // at most `bytes.len()`.
        unsafe { piece.at.copy_to(NonNull::from(&mut bytes[piece.offset]).cast(), piece.len) };
    }
    bytes
}
