//! The cache of what clients send: blocks of their uploads that they need not send again
//! (`docs/decisions/0077-what-the-server-has-is-not-sent.md`).
//!
//! ```text
//!   worker: endpoint ──▶ Remote ══ socket pair ══▶ serve ──▶ Client: its blocks   the daemon
//! ```
//!
//! The daemon owns the files ([`store`]). A worker has a socket for its session's client, through which it
//! can ask for a block by its hash and add one. It cannot reach other clients' blocks. The daemon computes
//! the hash of whatever it stores, and compares what it returns with its hash: a worker taken over by a
//! client can fill that client's folder up to its limit, and do nothing else.

pub mod store;

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use host_bridge::endpoint::cache::{BlockCache, Hash};
use protocol::link::MAX_DATA;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use self::store::{Client, Store};

/// A worker asks for a block. The answer is its length (32 bits) and its bytes; 0 means not here.
const FIND: u32 = 1;
/// A worker adds a block, whose bytes follow. There is no answer.
const KEEP: u32 = 2;

/// A cache that takes longer is no longer used by this session: its disk hangs, and the client waits for
/// answers. A disk that is only busy may take some seconds; in tests, a busy machine any time.
const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 240 } else { 10 });

/// A worker's request.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Request {
    kind: u32,
    /// Bytes that follow.
    len: u32,
    /// The requested block's hash.
    hash: Hash,
}

/// The worker's end: the blocks of its session's client.
#[derive(Debug)]
pub struct Remote {
    /// `None` if the daemon has closed it, as one does that is being replaced.
    socket: Mutex<Option<UnixStream>>,
}

impl Remote {
    /// Uses a socket that [`serve`] serves.
    pub fn new(socket: UnixStream) -> Remote {
        let remote = Remote { socket: Mutex::new(Some(socket)) };
        remote.with(|socket| {
            socket.set_read_timeout(Some(PATIENCE))?;
            socket.set_write_timeout(Some(PATIENCE))
        });
        remote
    }

    /// Uses the socket as long as it works.
    fn with<T>(&self, work: impl FnOnce(&mut UnixStream) -> io::Result<T>) -> Option<T> {
        let mut socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        match work(socket.as_mut()?) {
            Ok(done) => Some(done),
            Err(e) => {
                tracing::info!("the server's cache is not used any more: {e}");
                *socket = None;
                None
            }
        }
    }
}

impl BlockCache for Remote {
    fn find(&self, hash: &Hash) -> Option<Vec<u8>> {
        let found = self.with(|socket| {
            socket.write_all(Request { kind: FIND, len: 0, hash: *hash }.as_bytes())?;
            let mut len = 0u32;
            socket.read_exact(len.as_mut_bytes())?;
            if len > MAX_DATA {
                return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a block of {len} bytes")));
            }
            let mut bytes = vec![0; len as usize];
            socket.read_exact(&mut bytes)?;
            Ok(bytes)
        })?;
        (!found.is_empty()).then_some(found)
    }

    fn keep(&self, bytes: &[u8]) {
        let Ok(len) = u32::try_from(bytes.len()) else { return };
        self.with(|socket| {
            socket.write_all(Request { kind: KEEP, len, hash: [0; 32] }.as_bytes())?;
            socket.write_all(bytes)
        });
    }
}

/// Serves a worker whose session is this client's, until it closes its end.
///
/// # Errors
/// If `most` threads serve workers already, more than there are sessions: the disk hangs, and with it those
/// whose workers have given up.
pub fn serve(store: &Store, client: &str, socket: UnixStream, most: usize) -> io::Result<()> {
    let Some(connection) = store.connect(most) else {
        let why = "threads of earlier sessions wait for the cache's disk";
        return Err(io::Error::new(io::ErrorKind::ResourceBusy, format!("{most} {why}")));
    };
    let (store, client) = (store.clone(), client.to_owned());
    let work = move || {
        let _connection = connection;
        let served = store.client(&client).and_then(|blocks| answer(&blocks, &socket));
        if let Err(e) = served {
            tracing::info!(client, "a worker's connection to the cache ends: {e}");
        }
    };
    std::thread::Builder::new().name("rgpu-cache".into()).spawn(work).map(drop)
}

fn answer(blocks: &Client, mut socket: &UnixStream) -> io::Result<()> {
    // Logged once per session: the next blocks will not fit on the disk either.
    let mut complained = false;
    loop {
        let mut request = Request::new_zeroed();
        match socket.read(request.as_mut_bytes())? {
            0 => return Ok(()),
            n => socket.read_exact(&mut request.as_mut_bytes()[n..])?,
        }
        match request {
            Request { kind: FIND, len: 0, hash } => {
                let found = blocks.find(&hash).unwrap_or_default();
                socket.write_all(&(found.len() as u32).to_ne_bytes())?;
                socket.write_all(&found)?;
            }
            Request { kind: KEEP, len, .. } if len <= MAX_DATA => {
                let mut bytes = vec![0; len as usize];
                socket.read_exact(&mut bytes)?;
                if let Err(e) = blocks.keep(&bytes)
                    && !std::mem::replace(&mut complained, true)
                {
                    tracing::warn!("a block cannot be kept in the cache: {e}");
                }
            }
            Request { kind, len, .. } => {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("the worker sent a request of kind {kind} with {len} bytes"),
                ));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::store::Limits;
    use super::*;

    fn store() -> (tempfile::TempDir, Store) {
        let folder = tempfile::tempdir().unwrap();
        let store =
            Store::open(&folder.path().join("cache"), Limits { client: 64 << 20, all: 64 << 20 }).unwrap();
        (folder, store)
    }

    #[test]
    fn a_worker_finds_what_another_worker_of_the_client_gave() {
        let (_folder, store) = store();
        let worker = || {
            let (ours, theirs) = UnixStream::pair().unwrap();
            serve(&store, "alice", ours, 9).unwrap();
            Remote::new(theirs)
        };
        let blocks: Vec<Vec<u8>> = [1, 40_000, MAX_DATA as usize].map(|len| vec![7; len]).into();
        let hashes: Vec<Hash> = blocks.iter().map(|bytes| *blake3::hash(bytes).as_bytes()).collect();
        let first = worker();
        for (hash, bytes) in hashes.iter().zip(&blocks) {
            assert_eq!(first.find(hash), None);
            first.keep(bytes);
            // Requests are served in order.
            assert_eq!(first.find(hash).as_ref(), Some(bytes));
        }
        let second = worker();
        for (hash, bytes) in hashes.iter().zip(&blocks) {
            assert_eq!(second.find(hash).as_ref(), Some(bytes));
        }
    }

    #[test]
    fn a_worker_that_lies_ends_its_own_connection_only() {
        let (_folder, store) = store();
        for request in [
            Request { kind: KEEP, len: MAX_DATA + 1, hash: [0; 32] },
            Request { kind: FIND, len: 1, hash: [0; 32] },
            Request { kind: 9, len: 0, hash: [0; 32] },
        ] {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            serve(&store, "alice", ours, 9).unwrap();
            theirs.write_all(request.as_bytes()).unwrap();
            assert_eq!(theirs.read(&mut [0; 8]).unwrap(), 0);
        }
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(ours);
        let remote = Remote::new(theirs);
        remote.keep(&[1]);
        assert_eq!(remote.find(&[0; 32]), None);
    }
}
