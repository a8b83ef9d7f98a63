//! Takes the stream of a data connection apart into chunks, which go where the [`Inbox`] says.
//!
//! The bytes of a compressed chunk go there once all have come ([`Decompressor`]).

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use protocol::link::{
    COMPRESSED_FLAG, DATA_FLAGS, DataHeader, EAGER_FLAG, HASH_FLAG, KEEP_FLAG, KNOWN_FLAG, MAX_DATA,
};
use zerocopy::{FromZeros, IntoBytes};

use super::{Aside, Inbox, Landing, Place, linger};
use crate::compression::Decompressor;
use crate::endpoint::cache::Hash;
use crate::stream::Stream;

/// Where the bytes of a data connection's stream come from.
pub(in crate::endpoint) trait DataSource {
    /// Receives until `buffer` is full; fewer bytes where the connection broke, none when there will be no
    /// more. `starts`: the bytes begin a chunk, which may come much later than the one before.
    fn receive(&self, buffer: &mut [u8], starts: bool) -> io::Result<usize>;
}

impl Inbox {
    /// Serves the stream of a data connection until it or the session ends. `acknowledged` is called when the
    /// bridge says how much of the other stream it has.
    pub(in crate::endpoint) fn read_connection(
        &self,
        source: &impl DataSource,
        mut acknowledged: impl FnMut(u64) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut reader = ChunkReader::default();
        loop {
            let Some((at, len)) = reader.room(self, true)? else { continue };
            let starts = reader.is_between_chunks();
            // SAFETY: `room` gives `len` writable bytes to this thread alone until `filled`.
            let room = unsafe { std::slice::from_raw_parts_mut(at.as_ptr(), len) };
            match source.receive(room, starts)? {
                0 if starts => return Ok(()),
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                n => reader.filled(self, n)?.map_or(Ok(()), &mut acknowledged)?,
            }
        }
    }
}

/// Looks for the next bytes of a connection for a while. False: none have come.
pub(in crate::endpoint) fn look_for_some(stream: &Stream) -> bool {
    let begun = Instant::now();
    loop {
        if stream.is_readable() {
            return true;
        }
        if begun.elapsed() >= linger() {
            return false;
        }
        std::hint::spin_loop();
    }
}

/// For fuzzing: receives a chunk of `len` bytes in place of which `says` compressed ones are announced and
/// others come, `step` of them at a time. Gives the chunk, if all of it came.
#[doc(hidden)]
pub fn receive_compressed(len: u32, says: u32, bytes: &[u8], step: usize) -> Option<Vec<u8>> {
    let whole = u64::from(len & !DATA_FLAGS);
    let inbox = Inbox::new(0);
    let mut queue = inbox.incoming(1, 0, whole).into_queue(MAX_DATA as usize);
    let header = DataHeader { seq: 1, offset: 0, piece: 0, len: len & !KEEP_FLAG | COMPRESSED_FLAG };
    let stream = [header.as_bytes(), says.as_bytes(), bytes].concat();
    let (mut rest, mut reader) = (stream.as_slice(), ChunkReader::default());
    loop {
        let (at, room) = reader.room(&inbox, false).ok()??;
        if reader.is_between_chunks() && rest.len() < stream.len() {
            break;
        }
        let (now, behind) = rest.split_at_checked(room.min(step.max(1)).min(rest.len()))?;
        if now.is_empty() {
            return None;
        }
        // SAFETY: `room` gives so many writable bytes to this thread alone until `filled`, and `now` has no
        // more.
        unsafe { std::ptr::copy_nonoverlapping(now.as_ptr(), at.as_ptr(), now.len()) };
        reader.filled(&inbox, now.len()).ok()?;
        rest = behind;
    }
    let chunk = queue.next_chunk().ok()??;
    assert_eq!(chunk.bytes.len() as u64, whole, "a whole chunk has come");
    Some(chunk.bytes.into())
}

/// What a compressed chunk of a command has wrong.
fn refused(seq: u64, wrong: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("command {seq}: {wrong}"))
}

const HEADER: usize = size_of::<DataHeader>();
/// A header with the hash behind it.
const WITH_HASH: usize = HEADER + size_of::<Hash>();
/// A header with the number of compressed bytes behind it.
const WITH_LENGTH: usize = HEADER + size_of::<u32>();

/// The stream of a data connection, taken apart into chunks that go where they belong. Bytes may come in any
/// pieces.
pub(crate) struct ChunkReader {
    /// Room for a header, and for the hash or the length behind it if there is one.
    header: [u8; WITH_HASH],
    got: usize,
    /// Bytes of it that are to come.
    whole: usize,
    chunk: Option<Receiving>,
    /// For a chunk that comes compressed, and how many of its bytes are where they belong.
    compressed: Decompressor,
    placed: usize,
}

impl Default for ChunkReader {
    fn default() -> ChunkReader {
        ChunkReader {
            header: [0; WITH_HASH],
            got: 0,
            whole: HEADER,
            chunk: None,
            compressed: Decompressor::default(),
            placed: 0,
        }
    }
}

/// A chunk whose header has come.
struct Receiving {
    header: DataHeader,
    eager: bool,
    /// Its bytes are to be gathered.
    keep: bool,
    /// It was announced to its command.
    noted: bool,
    offset: u64,
    left: usize,
    /// Where its next bytes go, once that is known, and how many of them have come.
    target: Option<Target>,
    filled: usize,
}

enum Target {
    Room(Arc<dyn Landing>, NonNull<u8>, usize),
    Aside(Box<[u8]>),
    /// The command has taken note of them and has no room.
    Unwanted(Vec<u8>),
    /// There is no such command.
    Nowhere(Vec<u8>),
}

// SAFETY: a landing's room belongs to whoever asked for it, on any thread, until it is told that the bytes
// have landed.
unsafe impl Send for Target {}

impl Target {
    fn bytes(&mut self) -> (NonNull<u8>, usize) {
        match self {
            Target::Room(_, at, len) => (*at, *len),
            Target::Aside(bytes) => (NonNull::from(&mut **bytes).cast(), bytes.len()),
            Target::Unwanted(bytes) | Target::Nowhere(bytes) => {
                (NonNull::from(&mut **bytes).cast(), bytes.len())
            }
        }
    }
}

impl ChunkReader {
    /// Whether the next byte begins a chunk.
    pub(crate) fn is_between_chunks(&self) -> bool {
        self.chunk.is_none() && self.got == 0
    }

    /// Where the next bytes go: at least one. Waits until that is known, if `wait`; otherwise `None` says
    /// that it is not. The place is the caller's until it calls [`filled`](Self::filled).
    pub(crate) fn room(&mut self, inbox: &Inbox, wait: bool) -> io::Result<Option<(NonNull<u8>, usize)>> {
        if let rest @ [_, ..] = self.compressed.room() {
            return Ok(Some((NonNull::from(&mut *rest).cast(), rest.len())));
        }
        while self.placed < self.compressed.plain().len() {
            let Some((to, room)) = self.place(inbox, wait)? else { return Ok(None) };
            let bytes = &self.compressed.plain()[self.placed..];
            let n = room.min(bytes.len());
            // SAFETY: `place` gives `room` writable bytes to this thread alone until `placed`; the others are
            // the reader's own.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), n) };
            self.placed += n;
            self.placed(inbox, n)?;
        }
        self.place(inbox, wait)
    }

    /// Where the next bytes of a header or of a chunk go, as they are. See [`room`](Self::room).
    fn place(&mut self, inbox: &Inbox, wait: bool) -> io::Result<Option<(NonNull<u8>, usize)>> {
        let Some(chunk) = &mut self.chunk else {
            let rest = &mut self.header[self.got..self.whole];
            return Ok(Some((NonNull::from(&mut *rest).cast(), rest.len())));
        };
        if chunk.target.is_none() {
            let Some(place) =
                inbox.place(&chunk.header, chunk.eager, &mut chunk.noted, chunk.offset, chunk.left, wait)?
            else {
                return Ok(None);
            };
            chunk.target = Some(match place {
                Place::Room(landing, n) => match landing.room(chunk.offset, n) {
                    Some((at, room)) => Target::Room(landing, at, room.min(n)),
                    None => Target::Unwanted(vec![0; n]),
                },
                Place::Nowhere => Target::Nowhere(vec![0; chunk.left]),
                Place::Aside => Target::Aside(vec![0; chunk.left].into_boxed_slice()),
            });
        }
        Ok(chunk.target.as_mut().map(|target| {
            let (at, len) = target.bytes();
            // SAFETY: fewer bytes have come than the target has.
            (unsafe { at.add(chunk.filled) }, len - chunk.filled)
        }))
    }

    /// `n` bytes have come to where [`room`](Self::room) said. Gives what the bridge acknowledges, if these
    /// bytes say so.
    pub(crate) fn filled(&mut self, inbox: &Inbox, n: usize) -> io::Result<Option<u64>> {
        if !self.compressed.room().is_empty() {
            let seq = self.chunk.as_ref().map_or(0, |chunk| chunk.header.seq);
            return self.compressed.filled(n).map(|_| None).map_err(|wrong| refused(seq, &wrong));
        }
        if self.chunk.is_none() {
            self.got += n;
            return if self.got == self.whole { self.begin(inbox) } else { Ok(None) };
        }
        self.placed(inbox, n).map(|()| None)
    }

    /// `n` bytes of the chunk have come to where [`place`](Self::place) said.
    fn placed(&mut self, inbox: &Inbox, n: usize) -> io::Result<()> {
        let Some(chunk) = &mut self.chunk else { return Ok(()) };
        chunk.filled += n;
        let whole = chunk.target.as_mut().map_or(0, |target| target.bytes().1);
        if chunk.filled < whole {
            return Ok(());
        }
        let key = (chunk.header.seq, chunk.header.piece);
        match chunk.target.take() {
            Some(Target::Room(landing, at, _)) => {
                if chunk.keep {
                    // SAFETY: `whole` bytes of the room were filled, and it is this thread's until they have
                    // landed.
                    inbox
                        .gather(key, chunk.offset, unsafe { std::slice::from_raw_parts(at.as_ptr(), whole) });
                }
                landing.landed(chunk.offset, whole);
                inbox.landed(key, whole as u64);
            }
            Some(Target::Unwanted(_)) => inbox.landed(key, whole as u64),
            Some(Target::Aside(bytes)) => {
                let (noted, offset, keep) = (chunk.noted, chunk.offset, chunk.keep);
                self.chunk = None;
                return inbox.set_aside(key, noted, Aside { offset, bytes, keep });
            }
            Some(Target::Nowhere(_)) | None => {}
        }
        if chunk.eager {
            inbox.eager_placed(whole as u64);
        }
        chunk.offset += whole as u64;
        chunk.left -= whole;
        chunk.filled = 0;
        if chunk.left == 0 {
            self.chunk = None;
        }
        Ok(())
    }

    /// A whole header has come, or what is behind it.
    fn begin(&mut self, inbox: &Inbox) -> io::Result<Option<u64>> {
        let mut header = DataHeader::new_zeroed();
        header.as_mut_bytes().copy_from_slice(&self.header[..HEADER]);
        if header.len == 0 && header.seq == 0 {
            self.got = 0;
            return Ok(Some(header.offset));
        }
        let has = |flag| header.len & flag != 0;
        let (eager, hash, known, keep) = (has(EAGER_FLAG), has(HASH_FLAG), has(KNOWN_FLAG), has(KEEP_FLAG));
        let compressed = has(COMPRESSED_FLAG);
        header.len &= !DATA_FLAGS;
        let both = hash && (eager || known || keep) || known && keep || compressed && (hash || known);
        if header.len == 0 || header.len > MAX_DATA || both {
            let text = format!("a chunk of {} bytes for command {}", header.len, header.seq);
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        if hash && self.whole == HEADER {
            self.whole = WITH_HASH;
            return Ok(None);
        }
        if compressed && self.whole == HEADER {
            self.whole = WITH_LENGTH;
            return Ok(None);
        }
        (self.got, self.whole) = (0, HEADER);
        if hash {
            let mut hash = Hash::default();
            hash.copy_from_slice(&self.header[HEADER..]);
            return inbox.ask_known(&header, hash).map(|()| None);
        }
        if known {
            return inbox.bring_known(&header, eager).map(|()| None);
        }
        self.compressed.clear();
        self.placed = 0;
        if compressed {
            let mut length = 0u32;
            length.as_mut_bytes().copy_from_slice(&self.header[HEADER..WITH_LENGTH]);
            self.compressed.begin(header.len, length).map_err(|wrong| refused(header.seq, &wrong))?;
        }
        inbox.bytes.fetch_add(header.len.into(), Ordering::Relaxed);
        if let Some(blocks) = inbox.blocks.get() {
            blocks.passed(&header);
        }
        let noted = inbox.announce(&header, eager)?;
        let (offset, left) = (header.offset, header.len as usize);
        self.chunk = Some(Receiving { header, eager, keep, noted, offset, left, target: None, filled: 0 });
        Ok(None)
    }
}
