//! Bulk data that goes out over data connections.

use std::io::{self, IoSlice, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use protocol::link::{DataHeader, MAX_DATA};
use zerocopy::IntoBytes;

use super::tcp::TcpClient;
use super::{Client, Lost};

/// The data connections' sending ends.
#[derive(Default)]
pub(super) struct Outbox {
    connections: Mutex<Vec<Arc<Connection>>>,
    pub(super) bytes: AtomicU64,
}

struct Connection {
    stream: TcpStream,
    /// Held by who sends: chunks leave whole.
    turn: Mutex<()>,
}

impl Outbox {
    pub(super) fn add(&self, stream: TcpStream) {
        let connection = Connection { stream, turn: Mutex::new(()) };
        self.connections.lock().unwrap_or_else(|e| e.into_inner()).push(Arc::new(connection));
    }

    fn lane(&self, lane: usize) -> Option<Arc<Connection>> {
        let connections = self.connections.lock().unwrap_or_else(|e| e.into_inner());
        (!connections.is_empty()).then(|| Arc::clone(&connections[lane % connections.len()]))
    }

    /// Closes the connections; whoever sends or receives on them is let go.
    pub(super) fn close(&self) {
        for connection in self.connections.lock().unwrap_or_else(|e| e.into_inner()).drain(..) {
            // Closed by the peer already: as good.
            let _ = connection.stream.shutdown(Shutdown::Both);
        }
    }
}

/// Data that a command writes, to be sent in chunks. When it is dropped the client is told that all has been sent, whatever that was.
pub struct Outgoing {
    client: Weak<TcpClient>,
    outbox: Arc<Outbox>,
    seq: u64,
    piece: u32,
    len: u64,
    sent: AtomicU64,
}

impl std::fmt::Debug for Outgoing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Outgoing(command {}, piece {}, {} bytes)", self.seq, self.piece, self.len)
    }
}

impl Outgoing {
    pub(super) fn new(client: Weak<TcpClient>, outbox: Arc<Outbox>, seq: u64, piece: u32, len: u64) -> Outgoing {
        Outgoing { client, outbox, seq, piece, len, sent: AtomicU64::new(0) }
    }

    /// Bytes in all.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Sends bytes that belong at `offset`, over the data connection that `lane` picks: chunks of several lanes travel side by side. Returns when the bytes
    /// have been handed to the network. Bytes beyond the data's end are not sent.
    pub fn send(&self, lane: usize, offset: u64, bytes: &[u8]) -> Result<(), Lost> {
        let room = self.len.saturating_sub(offset).min(bytes.len() as u64) as usize;
        let Some(connection) = self.outbox.lane(lane) else { return Err(Lost::new("no data connection")) };
        let _whole = connection.turn.lock().unwrap_or_else(|e| e.into_inner());
        let mut at = offset;
        for chunk in bytes[..room].chunks(MAX_DATA as usize) {
            let header = DataHeader { seq: self.seq, offset: at, piece: self.piece, len: chunk.len() as u32 };
            if let Err(e) = write_both(&connection.stream, header.as_bytes(), chunk) {
                let lost = Lost::new(format!("sending data of command {}: {e}", self.seq));
                if let Some(client) = self.client.upgrade() {
                    client.lose(&lost.reason);
                }
                return Err(lost);
            }
            at += chunk.len() as u64;
            self.sent.fetch_add(chunk.len() as u64, Ordering::Relaxed);
            self.outbox.bytes.fetch_add(chunk.len() as u64, Ordering::Relaxed);
        }
        Ok(())
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        if let Some(client) = self.client.upgrade() {
            client.data_sent(self.seq, self.sent.load(Ordering::Acquire));
        }
    }
}

fn write_both(mut stream: &TcpStream, head: &[u8], tail: &[u8]) -> io::Result<()> {
    let mut at = 0;
    while at < head.len() {
        match stream.write_vectored(&[IoSlice::new(&head[at..]), IoSlice::new(tail)]) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => at += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    stream.write_all(&tail[at - head.len()..])
}
