//! What outlives a device process of native clients, so that its successor can continue their sessions: their
//! connections, which the keeper also holds; their channels and regions, which are stored with it; and
//! whether a request was being answered ([`Answering`]).
//!
//! A request stays in the client's socket until the keeper consumes and answers it, which a device process
//! requests in a single packet. So a successor finds a request that was not answered, and executes it again,
//! also if the keeper has ended with that packet.
//! Only if the keeper itself ends in the few instructions between consuming and answering is it unknown
//! whether the client has its answer; the session then ends.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use host_bridge::bridge::saved::{MAX_BYTES, event};
use host_bridge::bridge::{ChannelMemory, Closed, Saved, SessionConfig};
use host_bridge::memory::Memories;
use protocol::channel::State;
use protocol::link::Memory;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::own_memory;
use crate::link::Stored;
use crate::memory_file::memory_file;
use crate::refusal::Refusal;
use crate::stage::{self, Stage, StoredServer};

/// The key under which a client's channel, or one of its regions, is stored.
pub fn place(client: u64, region: Option<u32>) -> u64 {
    client << 33 | region.map_or(0, |region| u64::from(region) + 1)
}

/// The client of a [`place`].
pub fn client_of(place: u64) -> u64 {
    place >> 33
}

/// Whether a [`place`] is that of one of this client's regions.
pub fn is_region_of(place: u64, client: u64) -> bool {
    client_of(place) == client && region_of(place).is_some()
}

fn region_of(place: u64) -> Option<u32> {
    // 0 is the channel's.
    u32::try_from((place & ((1 << 33) - 1)).checked_sub(1)?).ok()
}

/// The fixed part of a channel's or region's file, before what else is stored of a channel's server, and its
/// saved session.
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Fixed {
    /// The number that is stored of the channel's stage and server ([`Stage::stored`]).
    server: u64,
    /// The memory's offset in its file, and its size in bytes.
    offset: u64,
    size: u64,
}

fn memory_of(memories: &Memories) -> io::Result<(Memory, OwnedFd)> {
    let (memory, file) = memories.files().next().ok_or(ErrorKind::NotFound)?;
    Ok((memory, file.try_clone()?))
}

/// What is stored for a channel.
pub fn channel(
    server: (usize, &SessionConfig),
    channel: &ChannelMemory,
    stage: Stage<'_>,
) -> io::Result<Stored> {
    let (memory, file) = memory_of(&channel.memories)?;
    let (word, server) = stage.stored(server);
    let fixed = Fixed { server: word, offset: memory.file_offset, size: channel.size };
    let (session, others) = stage.saved().map(Saved::parts).unwrap_or_default();
    let bytes = [fixed.as_bytes(), &server, &session].concat();
    let mut descriptors = vec![file, channel.doorbell.as_fd().try_clone_to_owned()?];
    for other in others {
        descriptors.push(other.try_clone_to_owned()?);
    }
    Ok(Stored { known: memory_file(c"channel", &bytes)?, descriptors })
}

/// What is stored for a region.
pub fn region(memories: &Memories, size: u64) -> io::Result<Stored> {
    let (memory, file) = memory_of(memories)?;
    let fixed = Fixed { server: 0, offset: memory.file_offset, size };
    Ok(Stored { known: memory_file(c"region", fixed.as_bytes())?, descriptors: vec![file] })
}

fn malformed() -> io::Error {
    io::Error::new(ErrorKind::InvalidData, "what was stored of a client is malformed")
}

fn refused(refusal: Refusal) -> io::Error {
    io::Error::other(refusal.1)
}

fn read(stored: &Stored) -> io::Result<(Fixed, Vec<u8>)> {
    let file = File::from(stored.known.try_clone()?);
    let size = file.metadata()?.len();
    if size > (size_of::<Fixed>() + stage::MAX_STORED + MAX_BYTES) as u64 {
        return Err(malformed());
    }
    let mut bytes = vec![0; size as usize];
    file.read_exact_at(&mut bytes, 0)?;
    let (fixed, rest) = Fixed::read_from_prefix(&bytes).map_err(|_| malformed())?;
    Ok((fixed, rest.to_vec()))
}

/// A client's session from another process. It is checked like the client's own requests, because the client
/// may have controlled that process.
#[derive(Debug)]
pub struct Leftover {
    /// Its server.
    pub server: StoredServer,
    /// Its channel.
    pub channel: ChannelMemory,
    /// Its session, if it has outlived the process.
    pub saved: Option<Saved>,
    /// The memory of its regions.
    pub regions: BTreeMap<u32, Memories>,
}

impl Leftover {
    /// Reads what was stored for a client, by [`place`]. `None`: it had no channel.
    pub fn new(stored: BTreeMap<u64, Stored>, servers: &[SessionConfig]) -> io::Result<Option<Leftover>> {
        let (mut found, mut regions) = (None, BTreeMap::new());
        for (place, stored) in stored {
            let (fixed, bytes) = read(&stored)?;
            let mut descriptors = stored.descriptors.into_iter();
            let file = descriptors.next().ok_or_else(malformed)?;
            let (memories, extents) = own_memory(vec![file], fixed.offset, fixed.size).map_err(refused)?;
            if let Some(region) = region_of(place) {
                regions.insert(region, memories);
                continue;
            }
            let (server, session) =
                StoredServer::read(fixed.server, &bytes, servers).ok_or_else(malformed)?;
            let mut channel = ChannelMemory::new(memories, extents, fixed.size)
                .map_err(|e| io::Error::other(e.to_string()))?;
            channel.doorbell = Arc::new(event(descriptors.next().ok_or_else(malformed)?)?);
            let saved = (!session.is_empty())
                .then(|| Saved::from_parts(session, descriptors.collect()))
                .transpose()?;
            found = Some((server, channel, saved));
        }
        Ok(found.map(|(server, channel, saved)| Leftover { server, channel, saved, regions }))
    }

    /// Whether the client waits for its session and nobody is left who could tell it of one. So no session
    /// has done anything for it, and it can be given another one.
    pub fn still_waits(&self) -> bool {
        let held = |saved: &Saved| saved.released(Duration::ZERO) == Closed::StillHeld;
        let told_to_wait = || self.channel.view.header().state() == State::Waiting;
        self.server.waits || !self.saved.as_ref().is_some_and(held) && told_to_wait()
    }

    /// Tells the worker or the server that the session is over.
    pub fn end(&self) {
        self.saved.iter().for_each(|saved| self.server.end(saved));
    }
}

/// Tells whether a client's request was being answered.
#[derive(Debug)]
pub struct Answering(File);

impl From<OwnedFd> for Answering {
    fn from(file: OwnedFd) -> Answering {
        Answering(file.into())
    }
}

impl Answering {
    /// Notes in a client's file that its request is being consumed and answered, or that this is finished.
    pub fn note(file: &OwnedFd, answering: bool) -> io::Result<()> {
        File::from(file.try_clone()?).write_all_at(&[answering.into()], 0)
    }

    /// Whether a keeper ended between the two.
    pub fn was_interrupted(&self) -> io::Result<bool> {
        let mut byte = [0];
        Ok(self.0.read_at(&mut byte, 0)? == 1 && byte[0] != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What a keeper passes on if descriptors of a client are missing.
    #[test]
    fn an_empty_file_is_no_client() {
        let stored = Stored { known: memory_file(c"empty", &[]).unwrap(), descriptors: Vec::new() };
        assert!(Leftover::new(BTreeMap::from([(place(1, Some(0)), stored)]), &[]).is_err());
    }

    proptest! {
        #[test]
        fn places_are_told_apart(client in 0u64..1 << 31, region in proptest::option::of(any::<u32>())) {
            let place = place(client, region);
            prop_assert_eq!((client_of(place), region_of(place)), (client, region));
        }

        #[test]
        fn anything_stored_is_refused_or_understood(place in any::<u64>(), bytes in proptest::collection::vec(any::<u8>(), 0..200), descriptors in 0usize..5) {
            let file = || memory_file(c"any", &[0; 4096]).unwrap();
            let stored = Stored { known: memory_file(c"known", &bytes).unwrap(), descriptors: (0..descriptors).map(|_| file()).collect() };
            let _ = Leftover::new(BTreeMap::from([(place, stored)]), &[]);
        }
    }
}
