//! Bulk data that comes in over data connections, and where it lands.
//!
//! ```text
//!  connection ──reader──▶ header (seq, piece, offset, len) ──▶ the landing that the command's driver gave ──▶ bytes, in place
//! ```
//!
//! A reader thread for each connection reads a chunk's header, waits until the dispatcher has come to that command, asks the command's
//! [`Landing`] for room, and receives straight into it. So memory is bounded by what the driver gives, and back-pressure is TCP's own. It cannot deadlock:
//! a connection carries data in the commands' order, so what stands before a chunk belongs to earlier commands, and these never wait for later ones' data.

use std::collections::{HashMap, VecDeque};
use std::io::{self, Read};
use std::net::TcpStream;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use protocol::link::{DataHeader, MAX_DATA};
use zerocopy::{FromZeros, IntoBytes};

use super::Lost;

/// Where a command's incoming bytes go. Called from the connections' reader threads, from several at once.
pub trait Landing: Send + Sync {
    /// Room for bytes from `offset` of the data on, at least 1 and at most `len` of them. Waits until there is room. `None`: nobody wants them any more.
    ///
    /// The caller writes the whole room, once, then calls [`landed`](Self::landed); no other call is given overlapping room in between.
    fn room(&self, offset: u64, len: usize) -> Option<(NonNull<u8>, usize)>;

    /// The bytes of a room are there.
    fn landed(&self, offset: u64, len: usize);

    /// There will be no more bytes: the session has ended.
    fn lost(&self);
}

/// Data that a command reads, on its way. Dropped unused, its bytes are thrown away as they come.
pub struct Incoming {
    hub: Arc<Inbox>,
    key: (u64, u32),
    len: u64,
}

impl std::fmt::Debug for Incoming {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Incoming(command {}, piece {}, {} bytes)", self.key.0, self.key.1, self.len)
    }
}

impl Incoming {
    /// Bytes in all.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Lets the bytes land. They may come from now on.
    pub fn land(self, landing: Arc<dyn Landing>) {
        self.hub.expect(self.key, self.len, landing);
    }

    /// Lets the bytes come as a queue of chunks on the heap, at most about `bound` bytes at a time.
    pub fn into_queue(self, bound: usize) -> ChunkQueue {
        let len = self.len;
        let shared =
            Arc::new(Queue { state: Mutex::default(), changed: Condvar::new(), bound: bound.max(1) });
        self.land(Arc::<Queue>::clone(&shared));
        ChunkQueue { shared, left: len }
    }

    /// Waits for all the bytes. To be used for short data only: it takes its length in memory (which the caller has checked).
    pub fn collect(self) -> Result<Vec<u8>, Lost> {
        let mut all = vec![0; self.len as usize];
        let mut queue = self.into_queue(MAX_DATA as usize);
        while let Some(chunk) = queue.next_chunk()? {
            let at = chunk.offset as usize;
            all[at..at + chunk.bytes.len()].copy_from_slice(&chunk.bytes);
        }
        Ok(all)
    }
}

/// Some bytes of a command's data.
#[derive(Debug)]
pub struct Chunk {
    /// Where in the data they belong.
    pub offset: u64,
    /// The bytes.
    pub bytes: Box<[u8]>,
}

/// A command's data as chunks, in the order in which they come (not always that of their offsets).
#[derive(Debug)]
pub struct ChunkQueue {
    shared: Arc<Queue>,
    left: u64,
}

impl ChunkQueue {
    /// The next chunk; waits for it. `Ok(None)`: all bytes have come.
    pub fn next_chunk(&mut self) -> Result<Option<Chunk>, Lost> {
        if self.left == 0 {
            return Ok(None);
        }
        let mut state = self.shared.lock();
        loop {
            if let Some(chunk) = state.chunks.pop_front() {
                state.held -= chunk.bytes.len();
                drop(state);
                self.shared.changed.notify_all();
                self.left = self.left.saturating_sub(chunk.bytes.len() as u64);
                return Ok(Some(chunk));
            }
            if state.over {
                return Err(Lost::new("the session ended before the data came"));
            }
            state = self.shared.changed.wait(state).unwrap_or_else(|e| e.into_inner());
        }
    }
}

impl Drop for ChunkQueue {
    fn drop(&mut self) {
        self.shared.lock().over = true;
        self.shared.changed.notify_all();
    }
}

#[derive(Debug)]
struct Queue {
    state: Mutex<QueueState>,
    changed: Condvar,
    bound: usize,
}

#[derive(Debug, Default)]
struct QueueState {
    /// Room given out, by offset.
    filling: HashMap<u64, Box<[u8]>>,
    chunks: VecDeque<Chunk>,
    /// Bytes in both.
    held: usize,
    over: bool,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl Landing for Queue {
    fn room(&self, offset: u64, len: usize) -> Option<(NonNull<u8>, usize)> {
        let mut state = self.lock();
        while state.held >= self.bound && !state.over {
            state = self.changed.wait(state).unwrap_or_else(|e| e.into_inner());
        }
        if state.over || state.filling.contains_key(&offset) {
            return None;
        }
        let mut bytes = vec![0u8; len].into_boxed_slice();
        // The box stays where it is on the heap until `landed` takes it out.
        let at = NonNull::new(bytes.as_mut_ptr());
        state.filling.insert(offset, bytes);
        state.held += len;
        at.map(|at| (at, len))
    }

    fn landed(&self, offset: u64, _len: usize) {
        let mut state = self.lock();
        if let Some(bytes) = state.filling.remove(&offset) {
            state.chunks.push_back(Chunk { offset, bytes });
        }
        drop(state);
        self.changed.notify_all();
    }

    fn lost(&self) {
        self.lock().over = true;
        self.changed.notify_all();
    }
}

/// What all data connections of a session share: which command expects what.
pub(super) struct Inbox {
    state: Mutex<InboxState>,
    changed: Condvar,
    /// Commands up to this have been executed: what they did not ask for, nobody will.
    executed: AtomicU64,
    /// Threads that wait for a command to be executed. Each raises it before it looks, and the dispatcher looks after it has executed, so one sees the other.
    waiting: AtomicUsize,
    pub(super) bytes: AtomicU64,
}

#[derive(Default)]
struct InboxState {
    expected: HashMap<(u64, u32), Expected>,
    over: bool,
}

struct Expected {
    landing: Arc<dyn Landing>,
    len: u64,
    /// Bytes announced by chunk headers so far.
    announced: u64,
    /// Bytes landed so far.
    landed: u64,
}

impl Inbox {
    pub(super) fn new() -> Arc<Inbox> {
        Arc::new(Inbox {
            state: Mutex::default(),
            changed: Condvar::new(),
            executed: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            bytes: AtomicU64::new(0),
        })
    }

    fn lock(&self) -> MutexGuard<'_, InboxState> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    pub(super) fn incoming(self: &Arc<Inbox>, seq: u64, piece: u32, len: u64) -> Incoming {
        Incoming { hub: Arc::clone(self), key: (seq, piece), len }
    }

    fn expect(&self, key: (u64, u32), len: u64, landing: Arc<dyn Landing>) {
        let mut state = self.lock();
        if state.over {
            drop(state);
            landing.lost();
        } else if len > 0 {
            state.expected.insert(key, Expected { landing, len, announced: 0, landed: 0 });
            drop(state);
            self.changed.notify_all();
        }
    }

    pub(super) fn executed(&self, seq: u64) {
        self.executed.store(seq, Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            // Under the lock, so that nobody is between a look and a wait.
            drop(self.lock());
            self.changed.notify_all();
        }
    }

    /// The session is over: everybody who waits for data, or with data, goes.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.over = true;
        let expected = std::mem::take(&mut state.expected);
        drop(state);
        self.changed.notify_all();
        expected.into_values().for_each(|e| e.landing.lost());
    }

    /// The landing of a chunk whose header has come, once its command has been executed. `Ok(None)`: the bytes are to be thrown away.
    fn announce(&self, header: &DataHeader) -> io::Result<Option<Arc<dyn Landing>>> {
        let key = (header.seq, header.piece);
        let mut state = self.lock();
        loop {
            if state.over {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            if let Some(expected) = state.expected.get_mut(&key) {
                expected.announced += u64::from(header.len);
                let end = header.offset.checked_add(header.len.into());
                if end.is_none_or(|end| end > expected.len) || expected.announced > expected.len {
                    let text = format!(
                        "command {}, piece {}: {} bytes at {} where {} were due in all",
                        header.seq, header.piece, header.len, header.offset, expected.len
                    );
                    return Err(io::Error::new(io::ErrorKind::InvalidData, text));
                }
                return Ok(Some(Arc::clone(&expected.landing)));
            }
            self.waiting.fetch_add(1, Ordering::SeqCst);
            if header.seq <= self.executed.load(Ordering::SeqCst) {
                self.waiting.fetch_sub(1, Ordering::SeqCst);
                return Ok(None);
            }
            state = self.changed.wait(state).unwrap_or_else(|e| e.into_inner());
            self.waiting.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn landed(&self, header: &DataHeader) {
        let key = (header.seq, header.piece);
        let mut state = self.lock();
        if let Some(expected) = state.expected.get_mut(&key) {
            expected.landed += u64::from(header.len);
            if expected.landed >= expected.len {
                state.expected.remove(&key);
            }
        }
    }

    /// Serves one data connection until it or the session ends. `Ok`: the peer closed it between two chunks.
    pub(super) fn read_connection(&self, mut stream: &TcpStream) -> io::Result<()> {
        let mut waste = Vec::new();
        loop {
            let mut header = DataHeader::new_zeroed();
            if stream.read(&mut header.as_mut_bytes()[..1])? == 0 {
                return Ok(());
            }
            stream.read_exact(&mut header.as_mut_bytes()[1..])?;
            if header.len == 0 || header.len > MAX_DATA {
                let text = format!("a chunk of {} bytes for command {}", header.len, header.seq);
                return Err(io::Error::new(io::ErrorKind::InvalidData, text));
            }
            self.bytes.fetch_add(header.len.into(), Ordering::Relaxed);
            let landing = self.announce(&header)?;
            let (mut offset, mut left) = (header.offset, header.len as usize);
            while left > 0 {
                match landing.as_ref().and_then(|l| l.room(offset, left)) {
                    Some((at, room)) => {
                        let n = room.min(left);
                        // SAFETY: the landing gives `room` writable bytes to this thread alone until `landed`.
                        let target = unsafe { std::slice::from_raw_parts_mut(at.as_ptr(), n) };
                        stream.read_exact(target)?;
                        if let Some(landing) = &landing {
                            landing.landed(offset, n);
                        }
                        offset += n as u64;
                        left -= n;
                    }
                    None => {
                        waste.resize(left, 0);
                        stream.read_exact(&mut waste)?;
                        left = 0;
                    }
                }
            }
            self.landed(&header);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::net::TcpListener;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let a = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (a, listener.accept().unwrap().0)
    }

    fn send(stream: &mut TcpStream, seq: u64, offset: u64, bytes: &[u8]) {
        stream.write_all(DataHeader { seq, offset, piece: 0, len: bytes.len() as u32 }.as_bytes()).unwrap();
        stream.write_all(bytes).unwrap();
    }

    #[test]
    fn chunks_reach_their_command_and_unwanted_ones_are_thrown_away() {
        let inbox = Inbox::new();
        let (mut a, b) = pair();
        let reader = Arc::clone(&inbox);
        let thread = std::thread::spawn(move || reader.read_connection(&b));
        send(&mut a, 1, 0, b"nobody asked");
        send(&mut a, 2, 3, b"def");
        send(&mut a, 2, 0, b"abc");
        inbox.executed(1);
        let wanted = inbox.incoming(2, 0, 6);
        let reading = std::thread::spawn(move || wanted.collect());
        assert_eq!(reading.join().unwrap().unwrap(), b"abcdef");
        assert!(inbox.lock().expected.len() <= 1);
        drop(a);
        thread.join().unwrap().unwrap();
        assert!(inbox.lock().expected.is_empty());
    }

    #[test]
    fn more_data_than_announced_ends_the_connection() {
        for (offset, bytes) in [(0, &b"12345"[..]), (4, b"1"), (u64::MAX, b"1")] {
            let inbox = Inbox::new();
            let (mut a, b) = pair();
            let _queue = inbox.incoming(1, 0, 4).into_queue(64);
            send(&mut a, 1, offset, bytes);
            let error = inbox.read_connection(&b).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
        }
    }

    #[test]
    fn a_queue_that_nobody_empties_holds_back_its_connection_and_the_end_lets_it_go() {
        let inbox = Inbox::new();
        let (mut a, b) = pair();
        let queue = inbox.incoming(1, 0, 12).into_queue(4);
        let reader = Arc::clone(&inbox);
        let thread = std::thread::spawn(move || reader.read_connection(&b));
        for i in 0..3 {
            send(&mut a, 1, i * 4, b"1234");
        }
        while queue.shared.lock().chunks.is_empty() {
            std::thread::yield_now();
        }
        assert_eq!(queue.shared.lock().held, 4);
        inbox.close();
        drop(a);
        let mut queue = queue;
        assert!(queue.next_chunk().unwrap().is_some());
        thread.join().unwrap().ok();
        assert!(queue.next_chunk().is_err());
    }
}
