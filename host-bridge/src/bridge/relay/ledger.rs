//! What a relay has done, in memory that outlives its process: enough for another process to go on with the
//! same streams at the same bytes.
//!
//! ```text
//!   memfd:  head │ log │ awaited answers │ outline of the control stream │ uploads │ downloads │ lanes: chunks under way, by data connection
//! ```
//!
//! Over `verbs` a lane is a queue of writes: where a connection has bytes, it has writes, each of length 1.
//! The server's slots stand where a session over `tcp` has the last of its lanes.
//!
//! The commands themselves stay in the client's ring, and data in the client's memory, until the server has
//! them; here is what neither of them says: where frames and chunks begin and end in the streams, which data
//! and which answers are awaited, and how far the server's streams have been acted on.
//!
//! A process may end between any two of its instructions. So what belongs together changes together: a change
//! is *staged*, and [`commit`](Ledger::commit) first writes all that was staged to a log, then says how long
//! the log is, and only then carries it out. Whoever comes next [carries out](Ledger::open) what the log
//! says, if it says anything. The relay commits before others see what it has done: before bytes leave, and
//! before the client gets the place of its records or its data back. Answers and progress it commits after
//! the client sees them, frame by frame, so that at most one frame may be acted on twice.
//!
//! What was written is read again by a process that trusts it no more than it trusts the client: every number
//! is checked, and what makes no sense ends the session.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use nix::unistd::ftruncate;
use protocol::channel::Position;
use protocol::data::{HostRange, Place};
use protocol::link::{DataHeader, MAX_QUEUES};

/// What a ledger begins with. Another layout gets another number.
const MAGIC: u64 = u64::from_le_bytes(*b"rGPUled1");

/// Pairs of cell and value that one commit may change.
const LOG: u32 = 1 << 17;
/// Staged changes above which no further record is taken before a commit.
const MUCH_STAGED: usize = LOG as usize / 4;
/// Changes of uploads that may be noted at a time. Each stages up to four changes.
pub(super) const MOST_CHANGED: usize = MUCH_STAGED / 4;
/// Frames of the control stream that the server need not have acknowledged.
const FRAMES: u32 = 1 << 14;
/// Pieces of data under way, each way.
const PIECES: u32 = 1 << 17;
/// Data connections.
const LANES: u32 = 32;
/// Chunks that one connection has under way.
const CHUNKS: u32 = 1 << 12;
/// More than one record needs of anything.
const MARGIN: u32 = 1 << 12;
/// Chunks that only acknowledgements may take.
const LANE_MARGIN: u32 = 64;
/// No stream is so long, and no number of bytes so large.
const LONGEST: u64 = 1 << 60;

// Cells, by their number. A cell is a word of 8 bytes.
const LOGGED: u32 = 1;
const GENERATION: u32 = 2;
/// Where in the control stream the outline begins.
const OUT_BASE: u32 = 3;
/// Where in the ring, and behind which command.
const RING: u32 = 4;
const CONTROL_IN: u32 = 6;
const UNPLACED: u32 = 7;
const FRAMES_FRONT: u32 = 8;
const UPLOADS_TOP: u32 = 10;
const DOWNLOADS_TOP: u32 = 11;
/// Over `verbs`: the slot whose turn is next, what may hold the streams up, and bytes of records that the
/// server has not taken.
const NEXT_SLOT: u32 = 12;
const HOST_HOLDS: u32 = 13;
const WORD_HOLD: u32 = 14;
const UNTAKEN: u32 = 15;
/// For each lane: 1 if the chunk behind the last one has been given out and is not sent yet, because it is
/// being compressed.
const AWAITING: u32 = 16;
/// For each lane: bytes of whole chunks that came, where the first chunk under way begins, and which chunks
/// those are.
const LANE_HEADS: u32 = 64;
const LANE_HEAD: u32 = 4;
const LOG_AT: u32 = 256;
const AWAITED: u32 = LOG_AT + 2 * LOG;
const FRAMES_AT: u32 = AWAITED + (1 << 16);
const FRAME: u32 = 5;
const UPLOADS_AT: u32 = FRAMES_AT + FRAMES * FRAME;
const UPLOAD: u32 = 9;
const DOWNLOADS_AT: u32 = UPLOADS_AT + PIECES * UPLOAD;
const DOWNLOAD: u32 = 6;
const LANES_AT: u32 = DOWNLOADS_AT + PIECES * DOWNLOAD;
const CHUNK: u32 = 7;
/// For each slot of a server over `verbs`: 1 if it is in use.
const SLOTS_AT: u32 = LANES_AT + MAX_QUEUES as u32 * CHUNKS * CHUNK;
const SLOTS: u32 = 1 << 16;
const CELLS: u32 = LANES_AT + LANES * CHUNKS * CHUNK;
/// Bytes of a ledger. Only the pages that were written take memory.
const SIZE: usize = CELLS as usize * size_of::<u64>();

const _: () = assert!(SLOTS_AT + SLOTS <= CELLS && UNTAKEN < AWAITING);
const _: () = assert!(AWAITING + LANES <= LANE_HEADS && LANE_HEADS + LANES * LANE_HEAD <= LOG_AT);

/// A frame of the control stream that the server may not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Framed {
    /// All records before this position of the ring, from where the frame before it ended.
    Commands(Position),
    /// A frame of this kind with the first so many bytes.
    Short(u32, usize, [u8; 24]),
}

/// An upload that the server may not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Upload {
    pub(super) seq: u64,
    pub(super) piece: u32,
    pub(super) late: bool,
    pub(super) range: HostRange,
    pub(super) job: Job,
}

/// How far it has been given out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Job {
    pub(super) flow: u64,
    pub(super) at: u64,
    pub(super) eager: u64,
    pub(super) granted: u64,
}

/// A download that the client was not told of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Download {
    pub(super) seq: u64,
    pub(super) piece: u32,
    pub(super) range: HostRange,
    /// Bytes of the command that have come, all pieces together; in one of them.
    pub(super) received: u64,
}

/// One data connection's streams.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Lane {
    /// Bytes of whole chunks that have come.
    pub(super) received: u64,
    /// Where in the stream to the server the first of `chunks` begins.
    pub(super) base: u64,
    /// Headers of the chunks that the server may not have, each with the hash that stands behind it, or where
    /// its compressed bytes are, if its header says so. The last one may not have been sent yet.
    pub(super) chunks: Vec<(DataHeader, [u8; 32])>,
}

/// The flow of an upload over `verbs` that waits for grants.
pub(super) const ASKED: u64 = 1;

/// What becomes of an upload over `verbs`.
#[derive(Debug, Clone, Copy)]
pub(super) enum Progress {
    /// It waits for grants.
    Asked,
    /// It has been given out up to here.
    Given(u64),
    /// It has been granted up to here.
    Granted(u64),
}

/// What a schedule over `verbs` has besides its writes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Turns {
    pub(super) next_slot: u32,
    pub(super) host_holds: u64,
    pub(super) word_hold: bool,
}

/// All that a ledger says.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Content {
    /// How many processes have had the session before.
    pub(super) generation: u64,
    pub(super) out_base: u64,
    pub(super) ring: Position,
    pub(super) frames: Vec<(u64, Framed)>,
    pub(super) control_in: u64,
    pub(super) unplaced: u64,
    pub(super) untaken: u64,
    pub(super) turns: Turns,
    /// By slot: the command whose answer is awaited, or 0.
    pub(super) awaited: Vec<u64>,
    /// In the order of their commands.
    pub(super) uploads: Vec<Upload>,
    pub(super) downloads: Vec<Download>,
    pub(super) lanes: Vec<Lane>,
}

/// Mapped cells.
#[derive(Debug)]
struct Cells {
    at: NonNull<AtomicU64>,
    /// How many more words are written before the process ends.
    #[cfg(test)]
    fuse: std::cell::Cell<Option<u64>>,
}

// SAFETY: the mapping belongs to no thread, and its content is made of atomics.
unsafe impl Send for Cells {}

impl Cells {
    fn map(file: BorrowedFd<'_>) -> io::Result<Cells> {
        // One that somebody could make shorter would end whoever reads it.
        let seals = SealFlag::from_bits_retain(fcntl(file, FcntlArg::F_GET_SEALS)?);
        if !seals.contains(SealFlag::F_SEAL_SHRINK) {
            return Err(malformed("its file is not sealed"));
        }
        let stat = nix::sys::stat::fstat(file)?;
        if u64::try_from(stat.st_size).unwrap_or(0) < SIZE as u64 {
            return Err(malformed("its size"));
        }
        let size = const { NonZeroUsize::new(SIZE).unwrap() };
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let at = unsafe { mmap(None, size, protection, MapFlags::MAP_SHARED, file, 0) }?;
        Ok(Cells {
            at: at.cast(),
            #[cfg(test)]
            fuse: std::cell::Cell::new(None),
        })
    }

    fn cell(&self, index: u32) -> &AtomicU64 {
        assert!(index < CELLS);
        // SAFETY: inside the mapping, which is page-aligned and stays until `drop`; any bytes are a valid
        // word.
        unsafe { self.at.add(index as usize).as_ref() }
    }

    fn get(&self, index: u32) -> u64 {
        self.cell(index).load(Ordering::Acquire)
    }

    /// Words become visible in the order in which they are set.
    fn set(&self, index: u32, value: u64) {
        #[cfg(test)]
        if let Some(left) = self.fuse.get() {
            self.fuse.set(left.checked_sub(1));
            if left == 0 {
                std::panic::resume_unwind(Box::new(Ended));
            }
        }
        #[cfg(feature = "software-verbs")]
        crate::verbs::software::writes_word();
        self.cell(index).store(value, Ordering::Release);
    }
}

/// What a test's process ends with.
#[cfg(test)]
pub(super) struct Ended;

impl Drop for Cells {
    fn drop(&mut self) {
        // SAFETY: `map` made this mapping, and references to it live no longer than `self`.
        let _ = unsafe { munmap(self.at.cast(), SIZE) };
    }
}

fn malformed(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the ledger of a session is malformed: {what}"))
}

/// Entries that come and go in any order.
#[derive(Debug)]
struct Table {
    at: u32,
    width: u32,
    /// The cell that says how many entries there have been at a time.
    top_cell: u32,
    top: u32,
    free: Vec<u32>,
    /// By command and piece: the first cell of the entry.
    entries: BTreeMap<(u64, u32), u32>,
}

impl Table {
    fn new(at: u32, width: u32, top_cell: u32) -> Table {
        Table { at, width, top_cell, top: 0, free: Vec::new(), entries: BTreeMap::new() }
    }

    fn has_room(&self) -> bool {
        (self.entries.len() as u32) < PIECES - MARGIN
    }

    fn add(&mut self, staged: &mut Staged, key: (u64, u32)) -> u32 {
        let at = self.free.pop().unwrap_or_else(|| {
            let at = self.at + self.top * self.width;
            self.top += 1;
            staged.set(self.top_cell, self.top.into());
            at
        });
        self.entries.insert(key, at);
        at
    }

    /// Removes what there is of a command.
    fn remove(&mut self, staged: &mut Staged, seq: u64) {
        while let Some((key, at)) = self.entries.range((seq, 0)..=(seq, u32::MAX)).next() {
            let (key, at) = (*key, *at);
            self.entries.remove(&key);
            self.free.push(at);
            staged.set(at, 0);
        }
    }

    /// The cells of the entries that were in use, when another process had it.
    fn read(&mut self, cells: &Cells) -> io::Result<Vec<u32>> {
        let top = u32::try_from(cells.get(self.top_cell)).ok().filter(|top| *top <= PIECES);
        self.top = top.ok_or_else(|| malformed("a table's size"))?;
        let all = (0..self.top).rev().map(|index| self.at + index * self.width);
        let (free, used): (Vec<u32>, Vec<u32>) = all.partition(|at| cells.get(*at) == 0);
        self.free = free;
        for at in &used {
            let key = (cells.get(*at), cells.get(*at + 1) as u32);
            if self.entries.insert(key, *at).is_some() {
                return Err(malformed("a piece of data stands there twice"));
            }
        }
        Ok(self.entries.values().copied().collect())
    }
}

/// Changes that wait for their commit.
#[derive(Debug, Default)]
struct Staged(Vec<(u32, u64)>);

impl Staged {
    fn set(&mut self, cell: u32, value: u64) {
        self.0.push((cell, value));
    }

    fn set_all<const N: usize>(&mut self, at: u32, values: [u64; N]) {
        (at..).zip(values).for_each(|(cell, value)| self.set(cell, value));
    }
}

/// Entries of a ring of cells: the first, and how many.
#[derive(Debug, Clone, Copy, Default)]
struct Ring {
    front: u32,
    len: u32,
}

impl Ring {
    fn read(cells: &Cells, at: u32, size: u32) -> io::Result<Ring> {
        let number = |cell, most| u32::try_from(cells.get(cell)).ok().filter(|number| *number <= most);
        let (Some(front), Some(len)) = (number(at, size - 1), number(at + 1, size)) else {
            return Err(malformed("the ends of a list"));
        };
        Ok(Ring { front, len })
    }

    fn places(self, size: u32) -> impl Iterator<Item = u32> {
        (0..self.len).map(move |index| (self.front + index) % size)
    }
}

/// See the module's text.
#[derive(Debug)]
pub(in crate::bridge) struct Ledger {
    cells: Cells,
    staged: Staged,
    frames: Ring,
    /// Where each frame of the outline ends, and which records are before that.
    ends: VecDeque<(u64, Option<Position>)>,
    uploads: Table,
    downloads: Table,
    lanes: Vec<(Ring, u64)>,
    /// Lanes whose next chunk is noted and not sent.
    awaiting: u32,
    unplaced: u64,
}

fn place(place: Place) -> u64 {
    match place {
        Place::Arena => u64::MAX,
        Place::Region(id) => id.into(),
    }
}

/// A memory file for a new ledger.
pub(in crate::bridge) fn file() -> io::Result<OwnedFd> {
    let file = memfd_create(c"ledger", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
    ftruncate(&file, SIZE as i64)?;
    fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW))?;
    Ok(file)
}

impl Ledger {
    /// Begins a ledger in a [`file`] for a session with so many data connections.
    pub(in crate::bridge) fn begin(file: &impl AsFd, lanes: usize) -> io::Result<Ledger> {
        let mut ledger = Ledger::over(Cells::map(file.as_fd())?);
        ledger.lanes = vec![(Ring::default(), 0); lanes.min(LANES as usize)];
        ledger.cells.set(0, MAGIC);
        Ok(ledger)
    }

    fn over(cells: Cells) -> Ledger {
        Ledger {
            cells,
            staged: Staged::default(),
            frames: Ring::default(),
            ends: VecDeque::new(),
            uploads: Table::new(UPLOADS_AT, UPLOAD, UPLOADS_TOP),
            downloads: Table::new(DOWNLOADS_AT, DOWNLOAD, DOWNLOADS_TOP),
            lanes: Vec::new(),
            awaiting: 0,
            unplaced: 0,
        }
    }

    /// Takes over the ledger of another process's session, which has so many answer slots and data
    /// connections.
    pub(super) fn open(file: &impl AsFd, slots: usize, lanes: usize) -> io::Result<(Ledger, Content)> {
        let mut ledger = Ledger::over(Cells::map(file.as_fd())?);
        let cells = &ledger.cells;
        if cells.get(0) != MAGIC || slots > 1 << 16 || lanes == 0 || lanes > LANES as usize {
            return Err(malformed("another version of this program wrote it"));
        }
        redo(cells)?;
        let generation = cells.get(GENERATION).saturating_add(1);
        cells.set(GENERATION, generation);
        let length = |cell| match cells.get(cell) {
            bytes @ 0..LONGEST => Ok(bytes),
            _ => Err(malformed("a number of bytes")),
        };
        let mut content = Content {
            generation,
            out_base: length(OUT_BASE)?,
            ring: Position::from_parts(length(RING)?, length(RING + 1)?),
            control_in: length(CONTROL_IN)?,
            unplaced: length(UNPLACED)?,
            untaken: length(UNTAKEN)?,
            turns: Turns {
                next_slot: length(NEXT_SLOT)? as u32,
                host_holds: length(HOST_HOLDS)?,
                word_hold: cells.get(WORD_HOLD) != 0,
            },
            awaited: (0..slots as u32).map(|slot| cells.get(AWAITED + slot)).collect(),
            ..Content::default()
        };
        ledger.unplaced = content.unplaced;
        ledger.frames = Ring::read(cells, FRAMES_FRONT, FRAMES)?;
        for place in ledger.frames.places(FRAMES) {
            let at = FRAMES_AT + place * FRAME;
            let [end, kind, a, b, c] = std::array::from_fn(|index| cells.get(at + index as u32));
            let framed = match (kind as u32, kind >> 32) {
                (0, _) if a < LONGEST && b < LONGEST => Framed::Commands(Position::from_parts(a, b)),
                (kind @ 1.., len @ 0..=24) => {
                    let mut body = [0; 24];
                    for (to, word) in body.chunks_mut(8).zip([a, b, c]) {
                        to.copy_from_slice(&word.to_le_bytes());
                    }
                    Framed::Short(kind, len as usize, body)
                }
                _ => return Err(malformed("a frame")),
            };
            let position = if let Framed::Commands(position) = framed { Some(position) } else { None };
            ledger.ends.push_back((end, position));
            content.frames.push((end, framed));
        }
        let range = |at| -> io::Result<HostRange> {
            let place = match cells.get(at) {
                u64::MAX => Place::Arena,
                id => Place::Region(u32::try_from(id).map_err(|_| malformed("a region"))?),
            };
            Ok(HostRange { place, offset: cells.get(at + 1), len: cells.get(at + 2) })
        };
        for at in ledger.uploads.read(cells)? {
            let range = range(at + 2)?;
            let [flow, at_offset, eager, granted] =
                std::array::from_fn(|index| cells.get(at + 5 + index as u32));
            if range.len == 0 || [at_offset, eager, granted].iter().any(|offset| *offset > range.len) {
                return Err(malformed("an upload"));
            }
            content.uploads.push(Upload {
                seq: cells.get(at),
                piece: cells.get(at + 1) as u32,
                late: cells.get(at + 1) >> 32 != 0,
                range,
                job: Job { flow, at: at_offset, eager, granted },
            });
        }
        for at in ledger.downloads.read(cells)? {
            let (range, received) = (range(at + 2)?, cells.get(at + 5));
            content.downloads.push(Download {
                seq: cells.get(at),
                piece: cells.get(at + 1) as u32,
                range,
                received,
            });
        }
        for number in 0..lanes as u32 {
            let head = LANE_HEADS + number * LANE_HEAD;
            let mut ring = Ring::read(cells, head + 2, CHUNKS)?;
            match cells.get(AWAITING + number) {
                0 => {}
                // Whoever had it is gone. It is sent as it is, as the last one.
                1 if ring.len < CHUNKS => {
                    ring.len += 1;
                    ledger.staged.set(AWAITING + number, 0);
                    ledger.staged.set(head + 3, ring.len.into());
                }
                _ => return Err(malformed("a chunk that was being compressed")),
            }
            let chunks = ring.places(CHUNKS).map(|place| {
                let at = LANES_AT + (number * CHUNKS + place) * CHUNK;
                let word = |index| cells.get(at + index);
                let header = DataHeader {
                    seq: word(0),
                    offset: word(1),
                    piece: word(2) as u32,
                    len: (word(2) >> 32) as u32,
                };
                let mut hash = [0; 32];
                for (to, index) in hash.chunks_mut(8).zip(3..) {
                    to.copy_from_slice(&word(index).to_le_bytes());
                }
                (header, hash)
            });
            let lane = Lane { received: length(head)?, base: length(head + 1)?, chunks: chunks.collect() };
            ledger.lanes.push((ring, lane.base));
            content.lanes.push(lane);
        }
        ledger.commit();
        Ok((ledger, content))
    }

    /// Whether so much is staged that it must be committed before much more is.
    pub(super) fn must_commit(&self) -> bool {
        self.staged.0.len() >= MUCH_STAGED
    }

    /// Whether another record and all that it names may be noted.
    pub(super) fn has_room(&self) -> bool {
        !self.must_commit()
            && self.frames.len < FRAMES - MARGIN
            && self.uploads.has_room()
            && self.downloads.has_room()
    }

    /// Whether another short frame may be noted.
    pub(super) fn has_room_for_frame(&self) -> bool {
        self.frames.len < FRAMES
    }

    /// A frame was appended to the control stream, which ends at `end` now.
    pub(super) fn frame(&mut self, end: u64, framed: Framed) {
        let place = (self.frames.front + self.frames.len) % FRAMES;
        let (position, words) = match framed {
            Framed::Commands(position) => {
                let (head, seq) = position.parts();
                (Some(position), [end, 0, head, seq, 0])
            }
            Framed::Short(kind, len, body) => {
                let (words, _) = body.as_chunks::<8>();
                let [a, b, c] = [words[0], words[1], words[2]].map(u64::from_le_bytes);
                (None, [end, (len as u64) << 32 | u64::from(kind), a, b, c])
            }
        };
        self.staged.set_all(FRAMES_AT + place * FRAME, words);
        self.frames.len += 1;
        self.staged.set(FRAMES_FRONT + 1, self.frames.len.into());
        self.ends.push_back((end, position));
    }

    /// The server has the first `upto` bytes of the control stream.
    pub(super) fn frames_arrived(&mut self, upto: u64) {
        let mut base = None;
        while let Some((end, position)) = self.ends.front().copied()
            && end <= upto
        {
            self.ends.pop_front();
            self.frames = Ring { front: (self.frames.front + 1) % FRAMES, len: self.frames.len - 1 };
            base = Some(end);
            if let Some(position) = position {
                let (head, seq) = position.parts();
                self.staged.set_all(RING, [head, seq]);
            }
        }
        if let Some(base) = base {
            self.staged.set(OUT_BASE, base);
            self.staged.set_all(FRAMES_FRONT, [self.frames.front.into(), self.frames.len.into()]);
        }
    }

    /// The server's control stream has been acted on up to here.
    pub(super) fn control_in(&mut self, upto: u64) {
        self.staged.set(CONTROL_IN, upto);
    }

    /// The answer to command `seq` is awaited in this slot; 0: none is.
    pub(super) fn awaits(&mut self, slot: u16, seq: u64) {
        self.staged.set(AWAITED + u32::from(slot), seq);
    }

    pub(super) fn upload(&mut self, seq: u64, piece: u32, range: HostRange, late: bool) {
        let at = self.uploads.add(&mut self.staged, (seq, piece));
        let flags = u64::from(piece) | u64::from(late) << 32;
        let HostRange { place: memory, offset, len } = range;
        self.staged.set_all(at, [seq, flags, place(memory), offset, len, 0, 0, 0, 0]);
    }

    /// Over `verbs`: what has become of an upload.
    pub(super) fn progress(&mut self, seq: u64, piece: u32, progress: Progress) {
        let (word, value) = match progress {
            Progress::Asked => (5, ASKED),
            Progress::Given(at) => (6, at),
            Progress::Granted(upto) => (8, upto),
        };
        if let Some(at) = self.uploads.entries.get(&(seq, piece)) {
            self.staged.set(at + word, value);
        }
    }

    /// How far an upload has been given out.
    pub(super) fn job(&mut self, seq: u64, piece: u32, job: Job) {
        if let Some(at) = self.uploads.entries.get(&(seq, piece)) {
            self.staged.set_all(at + 5, [job.flow, job.at, job.eager, job.granted]);
        }
    }

    /// Bytes that go eagerly and that the server has not placed.
    pub(super) fn unplaced(&mut self, bytes: u64) {
        if bytes != self.unplaced {
            self.unplaced = bytes;
            self.staged.set(UNPLACED, bytes);
        }
    }

    /// Sets a word that nothing else is staged for.
    fn word(&mut self, cell: u32, value: u64) {
        if self.cells.get(cell) != value {
            self.staged.set(cell, value);
        }
    }

    /// What there is of a schedule besides its writes. To be called right before a commit.
    pub(super) fn turns(&mut self, Turns { next_slot, host_holds, word_hold }: Turns) {
        self.word(NEXT_SLOT, next_slot.into());
        self.word(HOST_HOLDS, host_holds);
        self.word(WORD_HOLD, word_hold.into());
    }

    /// Bytes of records that the server has not taken. To be called right before a commit.
    pub(super) fn untaken(&mut self, bytes: u64) {
        self.word(UNTAKEN, bytes);
    }

    /// A slot is in use, or free again.
    pub(super) fn slot(&mut self, slot: u32, used: bool) {
        if slot < SLOTS {
            self.staged.set(SLOTS_AT + slot, used.into());
        }
    }

    /// The first `count` slots, by whether they were in use under another process.
    pub(super) fn slots_in_use(&self, count: u32) -> Vec<bool> {
        (0..count.min(SLOTS)).map(|slot| self.cells.get(SLOTS_AT + slot) != 0).collect()
    }

    /// The server has all uploads of a command.
    pub(super) fn uploaded(&mut self, seq: u64) {
        self.uploads.remove(&mut self.staged, seq);
    }

    pub(super) fn download(&mut self, seq: u64, piece: u32, range: HostRange) {
        let at = self.downloads.add(&mut self.staged, (seq, piece));
        let HostRange { place: memory, offset, len } = range;
        self.staged.set_all(at, [seq, piece.into(), place(memory), offset, len, 0]);
    }

    /// A whole chunk has come on connection `lane`, of whose stream that is the end: `received` bytes of the
    /// command have come now in whole chunks.
    pub(super) fn chunk_came(&mut self, lane: usize, end: u64, seq: u64, len: u64) {
        self.staged.set(LANE_HEADS + lane as u32 * LANE_HEAD, end);
        if let Some((_, at)) = self.downloads.entries.range((seq, 0)..=(seq, u32::MAX)).next() {
            let received = self.cells.get(at + 5).saturating_add(len);
            self.staged.set(at + 5, received);
        }
    }

    /// All downloads of a command have come.
    pub(super) fn downloaded(&mut self, seq: u64) {
        self.downloads.remove(&mut self.staged, seq);
    }

    /// Whether connection `lane` may have another chunk under way; there is more room for acknowledgements.
    pub(super) fn lane_has_room(&self, lane: usize, data: bool) -> bool {
        let margin = if data { LANE_MARGIN } else { 0 };
        self.lanes.get(lane).is_some_and(|(ring, _)| ring.len < CHUNKS - margin)
    }

    /// A chunk has been given out to connection `lane`, and what is to be sent of it will be known soon: its
    /// compressed bytes, or its own. Nothing else is sent there before.
    pub(super) fn preparing(&mut self, lane: usize, header: &DataHeader) {
        if self.note_chunk(lane, header, None).is_some() {
            self.awaiting |= 1 << lane;
            self.staged.set(AWAITING + lane as u32, 1);
        }
    }

    /// A chunk is about to be sent on connection `lane`. `more` is what else must be known of it: a hash, or
    /// where compressed bytes are.
    pub(super) fn sending(&mut self, lane: usize, header: &DataHeader, more: Option<&[u8; 32]>) {
        let Some(len) = self.note_chunk(lane, header, more) else { return };
        if let Some((ring, _)) = self.lanes.get_mut(lane) {
            ring.len = len;
        }
        self.staged.set(LANE_HEADS + lane as u32 * LANE_HEAD + 3, len.into());
        if self.awaiting & 1 << lane != 0 {
            self.awaiting &= !(1 << lane);
            self.staged.set(AWAITING + lane as u32, 0);
        }
    }

    /// Notes a chunk behind the last one. Gives how many there are with it.
    fn note_chunk(&mut self, lane: usize, header: &DataHeader, more: Option<&[u8; 32]>) -> Option<u32> {
        let (ring, _) = self.lanes.get(lane)?;
        let place = (ring.front + ring.len) % CHUNKS;
        let at = LANES_AT + (lane as u32 * CHUNKS + place) * CHUNK;
        let piece = u64::from(header.piece) | u64::from(header.len) << 32;
        self.staged.set_all(at, [header.seq, header.offset, piece]);
        if let Some(more) = more {
            let (words, _) = more.as_chunks::<8>();
            (at + 3..).zip(words).for_each(|(cell, word)| self.staged.set(cell, u64::from_le_bytes(*word)));
        }
        Some(ring.len + 1)
    }

    /// The server has the first chunk under way on connection `lane`, which takes `len` bytes of the stream.
    pub(super) fn arrived(&mut self, lane: usize, len: u64) {
        let Some((ring, base)) = self.lanes.get_mut(lane) else { return };
        *ring = Ring { front: (ring.front + 1) % CHUNKS, len: ring.len.saturating_sub(1) };
        *base += len;
        let words = [*base, ring.front.into(), ring.len.into()];
        self.staged.set_all(LANE_HEADS + lane as u32 * LANE_HEAD + 1, words);
    }

    /// Carries out what was staged, all or nothing of it.
    pub(super) fn commit(&mut self) {
        let Ledger { cells, staged: Staged(staged), .. } = self;
        if staged.len() > 1 {
            assert!(staged.len() <= LOG as usize, "a commit of {} changes", staged.len());
            for (at, (cell, value)) in (LOG_AT..).step_by(2).zip(&*staged) {
                cells.set(at, (*cell).into());
                cells.set(at + 1, *value);
            }
            cells.set(LOGGED, staged.len() as u64);
        }
        let logged = staged.len() > 1;
        staged.drain(..).for_each(|(cell, value)| cells.set(cell, value));
        if logged {
            cells.set(LOGGED, 0);
        }
    }

    /// Another process has written anything to any place, `at` of `of`.
    #[cfg(test)]
    pub(super) fn spoil(file: &impl AsFd, at: u64, of: u64, value: u64) {
        // Where entries are that tests make, and not everywhere in so much memory.
        let places: Vec<u32> =
            [0, LANE_HEADS, LOG_AT, AWAITED, FRAMES_AT, UPLOADS_AT, DOWNLOADS_AT, LANES_AT, SLOTS_AT]
                .into_iter()
                .chain([LANES_AT + CHUNKS * CHUNK])
                .flat_map(|first| first..first + 60)
                .collect();
        let cells = Cells::map(file.as_fd()).unwrap();
        cells.set(places[(at * places.len() as u64 / of) as usize], value);
    }

    /// The process ends when it has written so many more words.
    #[cfg(test)]
    pub(super) fn end_after(&self, words: Option<u64>) {
        self.cells.fuse.set(words);
    }
}

/// For fuzzing: takes over a ledger that another process has filled with `words`, as pairs of cell and value,
/// and goes on with it. False: it was refused.
#[doc(hidden)]
pub fn take_over_any(words: &[(u32, u64)], slots: usize, lanes: usize) -> bool {
    let Ok(file) = file() else { return false };
    let Ok(cells) = Cells::map(file.as_fd()) else { return false };
    cells.set(0, MAGIC);
    words.iter().for_each(|(cell, value)| cells.set(cell % CELLS, *value));
    let Ok((mut ledger, content)) = Ledger::open(&file, slots, lanes) else { return false };
    // What a relay does with it, with the numbers that stand there and with others.
    let numbers = words.iter().map(|(_, value)| *value).chain([0, 1, LONGEST, u64::MAX]).take(64);
    for (index, number) in numbers.enumerate() {
        let lane = index % lanes;
        let header = DataHeader { seq: number, offset: number, piece: index as u32, len: number as u32 };
        ledger.frames_arrived(number);
        ledger.chunk_came(lane, number, number, number);
        ledger.uploaded(number);
        ledger.downloaded(number);
        ledger.job(number, 0, Job { flow: number, at: number, eager: number, granted: number });
        ledger.unplaced(number);
        ledger.progress(number, 0, Progress::Given(number));
        ledger.slot(number as u32, index % 2 == 0);
        if ledger.has_room() && ledger.has_room_for_frame() {
            let range = HostRange { place: Place::Arena, offset: number, len: number };
            ledger.frame(number, Framed::Short(1, 0, [0; 24]));
            ledger.upload(number, index as u32, range, index % 2 == 0);
            ledger.download(number, index as u32, range);
        }
        if ledger.lane_has_room(lane, true) {
            if index % 3 == 0 {
                ledger.preparing(lane, &header);
            }
            ledger.sending(lane, &header, Some(&[index as u8; 32]));
        }
        ledger.turns(Turns { next_slot: number as u32, host_holds: number, word_hold: index % 2 == 0 });
        ledger.untaken(number);
        ledger.commit();
    }
    for (index, lane) in content.lanes.iter().enumerate() {
        lane.chunks.iter().for_each(|(header, _)| ledger.arrived(index, header.len.into()));
    }
    ledger.commit();
    drop(ledger);
    // What a process has written itself is as long as a stream can be, or the next one refuses it.
    let _ = Ledger::open(&file, slots, lanes);
    true
}

/// Carries out what a process had committed and not carried out.
fn redo(cells: &Cells) -> io::Result<()> {
    let count = cells.get(LOGGED);
    if count > u64::from(LOG) {
        return Err(malformed("its log"));
    }
    for at in (LOG_AT..).step_by(2).take(count as usize) {
        match u32::try_from(cells.get(at)) {
            Ok(cell @ (GENERATION..LOG_AT | AWAITED..CELLS)) => cells.set(cell, cells.get(at + 1)),
            _ => return Err(malformed("its log")),
        }
    }
    cells.set(LOGGED, 0);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A cell near the beginning of one of the lists, or of an entry far behind it.
    fn cell() -> impl Strategy<Value = u32> {
        let lists = [0, LANE_HEADS, LOG_AT, AWAITED, FRAMES_AT, UPLOADS_AT, DOWNLOADS_AT, LANES_AT];
        (proptest::sample::select(lists.to_vec()), prop_oneof![0u32..200, 0u32..40_000])
            .prop_map(|(first, index)| first + index)
    }

    /// A number as one that stands there, or one at the edge of what may.
    fn number() -> impl Strategy<Value = u64> {
        let edges = [LONGEST - 1, LONGEST, u64::MAX, u64::from(u32::MAX), 1 << 32, PIECES.into(), LOG.into()];
        prop_oneof![0u64..64, proptest::sample::select(edges.to_vec()), any::<u64>()]
    }

    proptest! {
        #[test]
        fn any_ledger_is_refused_or_gone_on_with(words in proptest::collection::vec((cell(), number()), 0..60), slots in 0usize..300, lanes in 1usize..34) {
            take_over_any(&words, slots, lanes);
        }
    }

    #[test]
    fn a_ledger_that_somebody_could_cut_short_is_refused() {
        let open = memfd_create(c"ledger", MFdFlags::MFD_ALLOW_SEALING).unwrap();
        ftruncate(&open, SIZE as i64).unwrap();
        assert!(Ledger::begin(&open, 1).is_err());
        assert!(take_over_any(&[], 8, 1) && !take_over_any(&[(FRAMES_FRONT, FRAMES.into())], 8, 1));
    }
}
