//! Bulk data that goes out over data connections.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};

use protocol::link::{DataHeader, MAX_DATA};
use zerocopy::IntoBytes;

use super::tcp::TcpClient;
use super::verbs::VerbsClient;
use super::{Client, Lost};
use crate::stream::Stream;

/// The data connections' sending ends.
pub(super) struct Outbox {
    state: Mutex<OutboxState>,
    changed: Condvar,
    /// How many connections there will be. The first commands may come before them.
    expected: usize,
    pub(super) bytes: AtomicU64,
}

#[derive(Default)]
struct OutboxState {
    connections: Vec<Arc<Connection>>,
    over: bool,
}

struct Connection {
    stream: Arc<Stream>,
    /// Held while sending, so that chunks leave whole.
    turn: Mutex<()>,
}

impl Outbox {
    /// For a session that will have `expected` data connections.
    pub(super) fn new(expected: usize) -> Arc<Outbox> {
        Arc::new(Outbox {
            state: Mutex::default(),
            changed: Condvar::new(),
            expected: expected.max(1),
            bytes: AtomicU64::new(0),
        })
    }

    fn lock(&self) -> MutexGuard<'_, OutboxState> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    pub(super) fn add(&self, stream: Arc<Stream>) {
        let connection = Connection { stream, turn: Mutex::new(()) };
        let mut state = self.lock();
        if state.over {
            connection.stream.shut_down();
            return;
        }
        state.connections.push(Arc::new(connection));
        drop(state);
        self.changed.notify_all();
    }

    /// The connection that `lane` picks. Waits until the session has all its connections. `None`: the session is over.
    fn lane(&self, lane: usize) -> Option<Arc<Connection>> {
        let mut state = self.lock();
        while state.connections.len() < self.expected && !state.over {
            state = self.changed.wait(state).unwrap_or_else(|e| e.into_inner());
        }
        (!state.over).then(|| Arc::clone(&state.connections[lane % state.connections.len()]))
    }

    /// Closes the connections. Threads that send or receive on them, or wait for them, return.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.over = true;
        for connection in state.connections.drain(..) {
            connection.stream.shut_down();
        }
        drop(state);
        self.changed.notify_all();
    }
}

/// Data that a command writes, to be sent in chunks. When it is dropped the client is told that all has been sent, whatever that was.
pub struct Outgoing {
    way: Way,
    seq: u64,
    piece: u32,
    len: u64,
    sent: AtomicU64,
}

/// How the data goes.
enum Way {
    Tcp {
        client: Weak<TcpClient>,
        outbox: Arc<Outbox>,
    },
    /// By writes to this address of the client's memory.
    Verbs {
        client: Weak<VerbsClient>,
        address: u64,
        key: u32,
    },
}

impl std::fmt::Debug for Outgoing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Outgoing(command {}, piece {}, {} bytes)", self.seq, self.piece, self.len)
    }
}

impl Outgoing {
    pub(super) fn new(
        client: Weak<TcpClient>,
        outbox: Arc<Outbox>,
        seq: u64,
        piece: u32,
        len: u64,
    ) -> Outgoing {
        Outgoing { way: Way::Tcp { client, outbox }, seq, piece, len, sent: AtomicU64::new(0) }
    }

    pub(super) fn over_verbs(
        client: Weak<VerbsClient>,
        seq: u64,
        address: u64,
        key: u32,
        len: u64,
    ) -> Outgoing {
        Outgoing { way: Way::Verbs { client, address, key }, seq, piece: 0, len, sent: AtomicU64::new(0) }
    }

    /// Bytes in all.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A buffer of `len` bytes at most (fewer where the transport's are shorter) that goes out without being copied, for [`send_lent`](Self::send_lent). Waits until one is free. `None`:
    /// the transport has none; bytes from anywhere are as good.
    pub fn lend(&self, len: usize) -> Result<Option<Lent>, Lost> {
        match &self.way {
            Way::Tcp { .. } => Ok(None),
            Way::Verbs { client, .. } => match client.upgrade() {
                Some(client) => client.lend(len).map(Some),
                None => Err(Lost::new("the session is over")),
            },
        }
    }

    /// Sends a buffer's bytes, which belong at `offset`. Returns at once; the buffer is lent out again when they have left. Bytes beyond the data's end are not sent.
    pub fn send_lent(&self, offset: u64, lent: Lent) -> Result<(), Lost> {
        let room = self.len.saturating_sub(offset).min(lent.len as u64) as usize;
        match &self.way {
            Way::Verbs { address, key, .. } if room > 0 => {
                lent.send(self.seq, address + offset, *key, room)?;
                self.sent.fetch_add(room as u64, Ordering::Relaxed);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Sends all of the data, which a CPU has made: a table, say. As [`send`](Self::send), but nothing to be counted as copied.
    pub fn write(&self, bytes: &[u8]) -> Result<(), Lost> {
        let mut at = 0;
        while at < bytes.len() {
            let Some(mut lent) = self.lend(bytes.len() - at)? else {
                return self.send(0, at as u64, &bytes[at..]);
            };
            let room = lent.bytes();
            let end = at + room.len();
            room.copy_from_slice(&bytes[at..end]);
            self.send_lent(at as u64, lent)?;
            at = end;
        }
        Ok(())
    }

    /// Sends bytes that belong at `offset`, over the data connection that `lane` picks: chunks of several lanes travel side by side. Returns when the bytes
    /// have been handed to the network. Bytes beyond the data's end are not sent.
    pub fn send(&self, lane: usize, offset: u64, bytes: &[u8]) -> Result<(), Lost> {
        let room = self.len.saturating_sub(offset).min(bytes.len() as u64) as usize;
        let (client, outbox) = match &self.way {
            Way::Tcp { client, outbox } => (client, outbox),
            Way::Verbs { client, address, key } => {
                let Some(client) = client.upgrade() else { return Err(Lost::new("the session is over")) };
                client.send(self.seq, address + offset, *key, &bytes[..room])?;
                self.sent.fetch_add(room as u64, Ordering::Relaxed);
                return Ok(());
            }
        };
        let Some(connection) = outbox.lane(lane) else { return Err(Lost::new("the session is over")) };
        let _whole = connection.turn.lock().unwrap_or_else(|e| e.into_inner());
        let mut at = offset;
        for chunk in bytes[..room].chunks(MAX_DATA as usize) {
            let header = DataHeader { seq: self.seq, offset: at, piece: self.piece, len: chunk.len() as u32 };
            if let Err(e) = connection.stream.write_both(header.as_bytes(), chunk) {
                let lost = Lost::new(format!("sending data of command {}: {e}", self.seq));
                if let Some(client) = client.upgrade() {
                    client.lose(&lost.reason);
                }
                return Err(lost);
            }
            at += chunk.len() as u64;
            self.sent.fetch_add(chunk.len() as u64, Ordering::Relaxed);
            outbox.bytes.fetch_add(chunk.len() as u64, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// A buffer of the transport's, to be filled and sent. Dropped, it is free again.
pub struct Lent {
    client: Arc<VerbsClient>,
    number: usize,
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: the buffer is its owner's alone until it is sent or dropped.
unsafe impl Send for Lent {}

impl Lent {
    /// # Safety
    /// `len` bytes at `at` are initialized, belong to buffer `number` of `client`, and are nobody else's until that buffer is given back.
    pub(super) unsafe fn new(client: Arc<VerbsClient>, number: usize, at: NonNull<u8>, len: usize) -> Lent {
        Lent { client, number, at, len }
    }

    /// Its bytes.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: `new`'s promise.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.len) }
    }

    /// Writes the first `len` bytes to `address` of the client's memory.
    pub(super) fn send(self, seq: u64, address: u64, key: u32, len: usize) -> Result<(), Lost> {
        let lent = std::mem::ManuallyDrop::new(self);
        // SAFETY: taken out once, of a value that is not dropped.
        let client = unsafe { std::ptr::read(&lent.client) };
        client.send_buffer(seq, address, key, lent.number, len)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.client.give_back(self.number);
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        let sent = self.sent.load(Ordering::Acquire);
        match &self.way {
            Way::Tcp { client, .. } => {
                if let Some(client) = client.upgrade() {
                    client.data_sent(self.seq, sent);
                }
            }
            Way::Verbs { client, .. } => {
                if let Some(client) = client.upgrade() {
                    client.data_sent(self.seq, sent);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let a = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (a, listener.accept().unwrap().0)
    }

    #[test]
    fn data_waits_for_a_connection_that_comes_after_the_first_commands() {
        let outbox = Outbox::new(1);
        let outgoing = Outgoing::new(Weak::new(), Arc::clone(&outbox), 7, 0, 5);
        let sending = std::thread::spawn(move || outgoing.send(0, 0, b"hello"));
        let (mut ours, theirs) = pair();
        outbox.add(Arc::new(theirs.into()));
        sending.join().unwrap().unwrap();
        let mut received = [0; size_of::<DataHeader>() + 5];
        ours.read_exact(&mut received).unwrap();
        assert_eq!(&received[size_of::<DataHeader>()..], b"hello");
    }

    #[test]
    fn who_waits_for_a_connection_is_let_go_at_the_end() {
        let outbox = Outbox::new(2);
        outbox.add(Arc::new(pair().1.into()));
        let outgoing = Outgoing::new(Weak::new(), Arc::clone(&outbox), 7, 0, 5);
        let sending = std::thread::spawn(move || outgoing.send(1, 0, b"hello"));
        outbox.close();
        assert!(sending.join().unwrap().is_err());
    }
}
