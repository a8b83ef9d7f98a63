//! Blocks on this machine's disk. See [`super`].
//!
//! ```text
//!  FOLDER/lock                                                     held while a daemon uses the folder
//!        /hash of the client's name/hash of the block's bytes      the bytes
//!                                  /new-NUMBER                     being written
//! ```
//!
//! A client's blocks are in its own folder, where no other client finds them. A block that does not fit
//! replaces the same client's oldest ones. If all clients together have too much, it replaces blocks of the
//! largest client without a session, so what a client with a session finds depends on nobody else.
//!
//! Files are read and written without a lock. A client's index has a lock, which is held while one of its
//! files is removed. The figures for the status have none, so a hanging disk does not delay anyone who does
//! not use the cache. It holds the threads of those who do, of which there are [only so
//! many](Store::connect).

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use crate::lock::lock;
use host_bridge::endpoint::cache::Hash;
use protocol::link::MAX_DATA;

/// How a block's file begins while it is being written.
const NEW: &str = "new-";
/// The file that the folder's user has locked.
const LOCK: &str = "lock";
/// How long locking may take: the processes that a daemon starts hold the lock for a moment.
const LOCKED_WITHIN: Duration = Duration::from_secs(5);
/// Maximum number of a client's blocks, which bounds the memory of the index to about 30 MiB.
const MOST_BLOCKS: usize = 1 << 18;

/// How many bytes are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Of each client.
    pub client: u64,
    /// Of all clients.
    pub all: u64,
}

/// The blocks of all clients.
#[derive(Debug, Clone)]
pub struct Store(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    folder: PathBuf,
    limits: Limits,
    totals: Totals,
    /// By the hash of the client's name. Set once the folder has been read.
    shelves: OnceLock<Mutex<HashMap<Hash, Arc<Shelf>>>>,
    /// Workers' connections, each with a thread.
    connections: AtomicUsize,
    /// Held for as long as this exists.
    _lock: File,
}

/// A worker's connection, which counts until this is dropped.
#[derive(Debug)]
pub struct Connection(Arc<Inner>);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What the cache holds, and what has happened since the server started.
#[derive(Debug, Default)]
struct Totals {
    bytes: AtomicU64,
    hits: AtomicU64,
    misses: AtomicU64,
    saved: AtomicU64,
    damaged: AtomicU64,
    failed: AtomicU64,
}

/// The same, for display.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Figures {
    /// Where the blocks are.
    pub folder: PathBuf,
    /// Bytes of all blocks.
    pub bytes: u64,
    /// How many there may be.
    pub limits: Limits,
    /// Blocks that were asked for and found.
    pub hits: u64,
    /// Blocks that were asked for and not found.
    pub misses: u64,
    /// Bytes of the blocks that were found.
    pub saved: u64,
    /// Blocks that had changed on disk and were removed.
    pub damaged: u64,
    /// Blocks that could not be written.
    pub failed: u64,
}

/// A client's blocks, as one of its sessions uses them.
#[derive(Debug)]
pub struct Client {
    store: Arc<Inner>,
    shelf: Arc<Shelf>,
}

/// A client's blocks.
#[derive(Debug)]
struct Shelf {
    folder: PathBuf,
    contents: Mutex<Contents>,
    /// Numbers for files that are being written.
    next: AtomicU64,
}

#[derive(Debug, Default)]
struct Contents {
    blocks: HashMap<Hash, Block>,
    /// The blocks in the order in which they were last used.
    turns: BTreeMap<u64, Hash>,
    turn: u64,
    /// Bytes of all blocks, including those being written.
    bytes: u64,
    writing: HashSet<Hash>,
}

#[derive(Debug, Clone, Copy)]
struct Block {
    len: u64,
    turn: u64,
    /// The turn in which it was added. A block that is removed and added again gets another.
    added: u64,
}

fn hex(hash: &Hash) -> String {
    blake3::Hash::from_bytes(*hash).to_hex().to_string()
}

/// The inverse of [`hex`].
fn unhex(text: &str) -> Option<Hash> {
    let hash = *blake3::Hash::from_hex(text).ok()?.as_bytes();
    // Capital letters would name another file.
    (hex(&hash) == text).then_some(hash)
}

/// Creates a folder that only this user can look into, unless it exists.
fn make_folder(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)
}

/// Whether others have no access to this folder.
pub fn check_owner(folder: &Path) -> io::Result<()> {
    let about = fs::metadata(folder)?;
    if about.uid() != nix::unistd::geteuid().as_raw() || about.mode() & 0o077 != 0 {
        return Err(io::Error::other(format!(
            "{} must belong to the user of this daemon, and others may have no access to it (chmod 700)",
            folder.display()
        )));
    }
    Ok(())
}

/// Locks the folder for this process.
fn lock_folder(folder: &Path) -> io::Result<File> {
    check_owner(folder)?;
    let file =
        OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(folder.join(LOCK))?;
    let deadline = Instant::now() + LOCKED_WITHIN;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::Error(e)) => return Err(e),
            Err(TryLockError::WouldBlock) if Instant::now() > deadline => {
                let text =
                    format!("another rgpu-server uses {}; each needs a folder of its own", folder.display());
                return Err(io::Error::new(io::ErrorKind::ResourceBusy, text));
            }
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

impl Store {
    /// Opens the store in `folder`, which is created if missing. Its contents are read in the background.
    pub fn open(folder: &Path, limits: Limits) -> io::Result<Store> {
        make_folder(folder)?;
        let lock = lock_folder(folder)?;
        let store = Arc::new(Inner {
            folder: folder.to_owned(),
            limits,
            totals: Totals::default(),
            shelves: OnceLock::new(),
            connections: AtomicUsize::new(0),
            _lock: lock,
        });
        let reading = Arc::clone(&store);
        std::thread::Builder::new().name("rgpu-cache".into()).spawn(move || reading.read_folder())?;
        Ok(Store(store))
    }

    /// Counts another connection, unless there are as many as there may be.
    pub fn connect(&self, most: usize) -> Option<Connection> {
        let more = |count: usize| (count < most).then_some(count + 1);
        let counted = self.0.connections.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        counted.is_ok().then(|| Connection(Arc::clone(&self.0)))
    }

    /// A client's blocks. Waits until the folder has been read.
    pub fn client(&self, name: &str) -> io::Result<Client> {
        let store = Arc::clone(&self.0);
        let name = *blake3::hash(name.as_bytes()).as_bytes();
        let mut shelves = lock(store.shelves.wait());
        let shelf = match shelves.get(&name) {
            Some(shelf) => Arc::clone(shelf),
            None => {
                let shelf = Arc::new(Shelf::open(store.folder.join(hex(&name)), &store.totals)?);
                shelves.insert(name, Arc::clone(&shelf));
                shelf
            }
        };
        drop(shelves);
        Ok(Client { store, shelf })
    }

    /// What it holds, and what has happened.
    pub fn figures(&self) -> Figures {
        let Inner { folder, limits, totals, .. } = &*self.0;
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Figures {
            folder: folder.clone(),
            bytes: of(&totals.bytes),
            limits: *limits,
            hits: of(&totals.hits),
            misses: of(&totals.misses),
            saved: of(&totals.saved),
            damaged: of(&totals.damaged),
            failed: of(&totals.failed),
        }
    }
}

impl Inner {
    /// Finds what earlier daemons have left, including blocks of clients that never come back.
    fn read_folder(&self) {
        let mut shelves = HashMap::new();
        let entries =
            fs::read_dir(&self.folder).inspect_err(|e| tracing::warn!("cannot read the cache: {e}"));
        for entry in entries.into_iter().flatten().flatten() {
            let Some(name) = entry.file_name().to_str().and_then(unhex) else { continue };
            // Not a link to one.
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            match Shelf::open(entry.path(), &self.totals) {
                Ok(shelf) => drop(shelves.insert(name, Arc::new(shelf))),
                Err(e) => tracing::warn!(folder = ?entry.path(), "cannot read a folder of the cache: {e}"),
            }
        }
        // The limits may have become lower.
        for shelf in shelves.values() {
            let mut contents = lock(&shelf.contents);
            while contents.is_over(self.limits.client) && self.remove_oldest(shelf, &mut contents) {}
        }
        while self.totals.bytes.load(Ordering::Relaxed) > self.limits.all
            && self.take_from_most(shelves.values(), 0)
        {}
        // Nobody else sets it.
        let _ = self.shelves.set(Mutex::new(shelves));
    }

    /// Removes the oldest block of the largest of these shelves, if that has more than `least` bytes. Returns
    /// whether there was one.
    fn take_from_most<'s>(&self, shelves: impl Iterator<Item = &'s Arc<Shelf>>, least: u64) -> bool {
        let most = shelves.map(|shelf| (lock(&shelf.contents).bytes, shelf)).max_by_key(|(bytes, _)| *bytes);
        most.is_some_and(|(bytes, shelf)| {
            bytes > least && self.remove_oldest(shelf, &mut lock(&shelf.contents))
        })
    }

    /// Removes the oldest block. Returns whether there was one.
    fn remove_oldest(&self, shelf: &Shelf, contents: &mut Contents) -> bool {
        let oldest = contents.turns.first_key_value().map(|(_, oldest)| *oldest);
        oldest.is_some_and(|oldest| self.remove(shelf, contents, &oldest))
    }

    /// Removes a block. Returns whether it was there.
    fn remove(&self, shelf: &Shelf, contents: &mut Contents, hash: &Hash) -> bool {
        let Some(len) = contents.take(hash) else { return false };
        self.totals.bytes.fetch_sub(len, Ordering::Relaxed);
        if let Err(e) = fs::remove_file(shelf.path(hash))
            && e.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(file = ?shelf.path(hash), "cannot remove a block of the cache: {e}");
        }
        true
    }
}

impl Client {
    /// The block with this hash, if it is here and unchanged.
    pub fn find(&self, hash: &Hash) -> Option<Vec<u8>> {
        let known = lock(&self.shelf.contents).use_again(hash);
        let bytes = known.and_then(|block| self.read(hash, block));
        let totals = &self.store.totals;
        match &bytes {
            Some(bytes) => {
                totals.hits.fetch_add(1, Ordering::Relaxed);
                totals.saved.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            }
            None => drop(totals.misses.fetch_add(1, Ordering::Relaxed)),
        }
        bytes
    }

    fn read(&self, hash: &Hash, Block { len, added, .. }: Block) -> Option<Vec<u8>> {
        let path = self.shelf.path(hash);
        let read = || {
            let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(&path)?;
            // Keeps the order in which blocks were used across a restart of the server.
            let _ = file.set_modified(SystemTime::now());
            let mut bytes = Vec::with_capacity(len as usize);
            file.take(len + 1).read_to_end(&mut bytes)?;
            io::Result::Ok(bytes)
        };
        let why = match read() {
            Ok(bytes) if blake3::hash(&bytes).as_bytes() == hash => return Some(bytes),
            Ok(_) => "it is not what it was".to_owned(),
            Err(e) => e.to_string(),
        };
        // Otherwise it has just been replaced, and may have come back since.
        let mut contents = lock(&self.shelf.contents);
        let same = contents.blocks.get(hash).is_some_and(|block| block.added == added);
        if same && self.store.remove(&self.shelf, &mut contents, hash) {
            drop(contents);
            self.store.totals.damaged.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(file = ?path, "a block of the cache is removed: {why}");
        }
        None
    }

    /// Keeps a block. Its hash is computed here, so that it can only be found by its true hash.
    pub fn keep(&self, bytes: &[u8]) -> io::Result<()> {
        let (hash, len) = (*blake3::hash(bytes).as_bytes(), bytes.len() as u64);
        if bytes.is_empty() || len > MAX_DATA.into() {
            return Ok(());
        }
        let mut contents = lock(&self.shelf.contents);
        // Another session of the client may have sent the same.
        if contents.use_again(&hash).is_some() || !contents.writing.insert(hash) {
            return Ok(());
        }
        drop(contents);
        let written = if self.reserve(len) {
            let written = self.write(&hash, bytes);
            if written.is_err() {
                self.release(len);
            }
            written.map(|()| true)
        } else {
            Ok(false)
        };
        let mut contents = lock(&self.shelf.contents);
        contents.writing.remove(&hash);
        match written {
            Ok(true) => contents.add(hash, len),
            Ok(false) => {}
            Err(e) => {
                self.store.totals.failed.fetch_add(1, Ordering::Relaxed);
                return Err(e);
            }
        }
        Ok(())
    }

    fn write(&self, hash: &Hash, bytes: &[u8]) -> io::Result<()> {
        let new = self.shelf.folder.join(format!("{NEW}{}", self.shelf.next.fetch_add(1, Ordering::Relaxed)));
        let written = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&new)
            .and_then(|mut file| file.write_all(bytes))
            .and_then(|()| fs::rename(&new, self.shelf.path(hash)));
        if written.is_err() {
            let _ = fs::remove_file(&new);
        }
        written
    }

    /// Makes room for `len` bytes and reserves it, until it is [released](Self::release) or the block is
    /// removed. Returns whether there is room.
    fn reserve(&self, len: u64) -> bool {
        let Inner { limits, totals, .. } = &*self.store;
        let Some(room) = limits.client.min(limits.all).checked_sub(len) else { return false };
        let mut contents = lock(&self.shelf.contents);
        while contents.is_over(room) {
            // Blocks being written cannot be removed.
            if !self.store.remove_oldest(&self.shelf, &mut contents) {
                return false;
            }
        }
        contents.bytes += len;
        drop(contents);
        let take = |bytes: u64| bytes.checked_add(len).filter(|bytes| *bytes <= limits.all);
        while totals.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_err() {
            if !self.take_from_absent()
                && !self.store.remove_oldest(&self.shelf, &mut lock(&self.shelf.contents))
            {
                lock(&self.shelf.contents).bytes -= len;
                return false;
            }
        }
        true
    }

    /// Returns reserved bytes.
    fn release(&self, len: u64) {
        lock(&self.shelf.contents).bytes -= len;
        self.store.totals.bytes.fetch_sub(len, Ordering::Relaxed);
    }

    /// Removes a block of a client that has no session but more bytes than this one. Returns whether there
    /// was one.
    fn take_from_absent(&self) -> bool {
        let own = lock(&self.shelf.contents).bytes;
        let shelves = lock(self.store.shelves.wait());
        // Nobody gets another reference without the lock.
        let absent = shelves.values().filter(|shelf| Arc::strong_count(shelf) == 1);
        self.store.take_from_most(absent, own)
    }
}

impl Shelf {
    /// Opens a client's folder and adds its contents to `totals`.
    fn open(folder: PathBuf, totals: &Totals) -> io::Result<Shelf> {
        make_folder(&folder)?;
        let mut found: Vec<(SystemTime, Hash, u64)> = Vec::new();
        for file in fs::read_dir(&folder)? {
            let file = file?;
            let about = file.metadata()?;
            if !about.is_file() {
                continue;
            }
            let (name, len) = (file.file_name(), about.len());
            match name.to_str().and_then(unhex) {
                Some(hash) if (1..=MAX_DATA.into()).contains(&len) => {
                    found.push((about.modified().unwrap_or(SystemTime::UNIX_EPOCH), hash, len));
                }
                Some(_) => {
                    totals.damaged.fetch_add(1, Ordering::Relaxed);
                    fs::remove_file(file.path())?;
                }
                // A write that was interrupted.
                None if name.to_string_lossy().starts_with(NEW) => fs::remove_file(file.path())?,
                None => {}
            }
        }
        found.sort_unstable();
        let mut contents = Contents::default();
        for (_, hash, len) in found {
            contents.add(hash, len);
            contents.bytes += len;
        }
        totals.bytes.fetch_add(contents.bytes, Ordering::Relaxed);
        Ok(Shelf { folder, contents: Mutex::new(contents), next: AtomicU64::new(0) })
    }

    fn path(&self, hash: &Hash) -> PathBuf {
        self.folder.join(hex(hash))
    }
}

impl Contents {
    /// Whether there are more than `limit` bytes, or no place for one more block.
    fn is_over(&self, limit: u64) -> bool {
        self.bytes > limit || self.blocks.len() + self.writing.len() > MOST_BLOCKS
    }

    /// Adds a block whose bytes have already been added.
    fn add(&mut self, hash: Hash, len: u64) {
        self.turn += 1;
        self.blocks.insert(hash, Block { len, turn: self.turn, added: self.turn });
        self.turns.insert(self.turn, hash);
    }

    fn take(&mut self, hash: &Hash) -> Option<u64> {
        let Block { len, turn, .. } = self.blocks.remove(hash)?;
        self.turns.remove(&turn);
        self.bytes -= len;
        Some(len)
    }

    /// Marks a block as the last one used, if it is here.
    fn use_again(&mut self, hash: &Hash) -> Option<Block> {
        let block = self.blocks.get_mut(hash)?;
        self.turn += 1;
        self.turns.remove(&block.turn);
        block.turn = self.turn;
        self.turns.insert(self.turn, *hash);
        Some(*block)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream;

    use super::*;

    const LIMITS: Limits = Limits { client: 1000, all: 1500 };

    fn own_folder() -> tempfile::TempDir {
        tempfile::Builder::new().permissions(fs::Permissions::from_mode(0o700)).tempdir().unwrap()
    }

    fn block(number: u8, len: usize) -> (Hash, Vec<u8>) {
        let bytes = vec![number; len];
        (*blake3::hash(&bytes).as_bytes(), bytes)
    }

    /// Number of client files in a store's folder.
    fn files(folder: &Path) -> usize {
        let folders =
            fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_dir());
        folders.map(|shelf| fs::read_dir(shelf).unwrap().count()).sum()
    }

    fn bytes_of(store: &Store) -> u64 {
        store.figures().bytes
    }

    #[test]
    fn a_client_finds_what_it_kept_and_no_other_client_does() {
        let folder = own_folder();
        let store = Store::open(folder.path(), LIMITS).unwrap();
        let (hash, bytes) = block(1, 100);
        let alice = store.client("alice").unwrap();
        assert_eq!(alice.find(&hash), None);
        alice.keep(&bytes).unwrap();
        alice.keep(&bytes).unwrap();
        assert_eq!(alice.find(&hash), Some(bytes.clone()));
        assert_eq!(store.client("bob").unwrap().find(&hash), None);
        let Figures { bytes: size, hits, misses, saved, damaged, failed, .. } = store.figures();
        assert_eq!([size, hits, misses, saved, damaged, failed], [100, 1, 2, 100, 0, 0]);
        // It is there when the server starts again, without the block that was being written.
        fs::write(alice.shelf.folder.join("new-7"), b"part").unwrap();
        drop((alice, store));
        let store = Store::open(folder.path(), LIMITS).unwrap();
        assert_eq!(store.client("alice").unwrap().find(&hash), Some(bytes));
        assert_eq!((files(folder.path()), bytes_of(&store)), (1, 100));
    }

    #[test]
    fn while_the_disk_hangs_only_so_many_threads_wait_for_it() {
        let folder = own_folder();
        let store = Store::open(folder.path(), LIMITS).unwrap();
        let session = || {
            let (ours, theirs) = UnixStream::pair().unwrap();
            super::super::serve(&store, "alice", ours, 3).map(|()| theirs)
        };
        // A thread that waits for the disk has this.
        let shelves = lock(store.0.shelves.wait());
        // Their workers give up.
        (0..3).for_each(|_| drop(session().unwrap()));
        assert_eq!(session().unwrap_err().kind(), io::ErrorKind::ResourceBusy);
        drop(shelves);
        let limit = Instant::now() + Duration::from_secs(60);
        while session().is_err() {
            assert!(Instant::now() < limit, "the threads have not ended");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_damaged_block_is_not_found_and_is_removed() {
        let folder = own_folder();
        let store = Store::open(folder.path(), LIMITS).unwrap();
        let client = store.client("alice").unwrap();
        for damage in [&b"other bytes"[..], &[], &[1; 101]] {
            let (hash, bytes) = block(1, 100);
            client.keep(&bytes).unwrap();
            fs::write(client.shelf.path(&hash), damage).unwrap();
            assert_eq!(client.find(&hash), None);
            assert!(!client.shelf.path(&hash).exists());
        }
        let (hash, bytes) = block(1, 100);
        client.keep(&bytes).unwrap();
        fs::remove_file(client.shelf.path(&hash)).unwrap();
        assert_eq!(client.find(&hash), None);
        assert_eq!((bytes_of(&store), store.figures().damaged), (0, 4));
    }

    #[test]
    fn the_oldest_blocks_of_the_client_itself_give_way() {
        let folder = own_folder();
        let store = Store::open(folder.path(), LIMITS).unwrap();
        let (alice, bob) = (store.client("alice").unwrap(), store.client("bob").unwrap());
        let blocks: Vec<_> = (0..7).map(|number| block(number, 300)).collect();
        for (_, bytes) in &blocks[..3] {
            alice.keep(bytes).unwrap();
        }
        assert!(alice.find(&blocks[0].0).is_some());
        alice.keep(&blocks[3].1).unwrap();
        let there = |client: &Client| -> Vec<usize> {
            (0..7).filter(|i| lock(&client.shelf.contents).blocks.contains_key(&blocks[*i].0)).collect()
        };
        assert_eq!(there(&alice), [0, 2, 3]);
        // All clients together have room for two more. A third one replaces one of the same client, because
        // the other client has a session.
        for (_, bytes) in &blocks[4..7] {
            bob.keep(bytes).unwrap();
        }
        assert_eq!((there(&alice), there(&bob)), (vec![0, 2, 3], vec![5, 6]));
        assert_eq!((bytes_of(&store), files(folder.path())), (1500, 5));
        let huge = vec![0; 2000];
        bob.keep(&huge).unwrap();
        assert_eq!(bob.find(blake3::hash(&huge).as_bytes()), None);
        assert_eq!(there(&bob), [5, 6]);
        // Started with lower limits, it keeps less.
        drop((alice, bob, store));
        let store = Store::open(folder.path(), Limits { client: 700, all: 1000 }).unwrap();
        let left = ["alice", "bob"].map(|name| there(&store.client(name).unwrap()).len());
        assert!(left == [1, 2] || left == [2, 1], "{left:?}");
        assert_eq!((bytes_of(&store), files(folder.path())), (900, 3));
    }

    #[test]
    fn a_client_without_a_session_gives_way_as_long_as_it_has_more() {
        let folder = own_folder();
        let store = Store::open(folder.path(), Limits { client: 1500, all: 1500 }).unwrap();
        let blocks: Vec<_> = (0..8).map(|number| block(number, 300)).collect();
        let alice = store.client("alice").unwrap();
        blocks[..5].iter().for_each(|(_, bytes)| alice.keep(bytes).unwrap());
        let bob = store.client("bob").unwrap();
        bob.keep(&blocks[5].1).unwrap();
        assert_eq!(bob.find(&blocks[5].0), None, "there is no room, and alice has a session");
        drop(alice);
        blocks[5..].iter().for_each(|(_, bytes)| bob.keep(bytes).unwrap());
        let kept = |client: &Client, range: std::ops::Range<usize>| {
            blocks[range].iter().filter(|(hash, _)| client.find(hash).is_some()).count()
        };
        assert_eq!((kept(&bob, 5..8), kept(&store.client("alice").unwrap(), 0..5)), (2, 3));
        assert_eq!((bytes_of(&store), files(folder.path())), (1500, 5));
    }

    #[test]
    fn sessions_that_keep_at_once_stay_within_the_limits_and_lose_nothing() {
        let folder = own_folder();
        let store = Store::open(folder.path(), Limits { client: 2000, all: 3000 }).unwrap();
        std::thread::scope(|scope| {
            for name in ["alice", "alice", "bob", "bob"] {
                let store = &store;
                scope.spawn(move || {
                    let client = store.client(name).unwrap();
                    for turn in 0..200 {
                        let (hash, bytes) = block(turn % 8, 400);
                        client.keep(&bytes).unwrap();
                        assert!(client.find(&hash).is_none_or(|found| found == bytes));
                        assert!(bytes_of(store) <= 3000);
                    }
                });
            }
        });
        let kept: u64 =
            ["alice", "bob"].map(|name| lock(&store.client(name).unwrap().shelf.contents).bytes).iter().sum();
        assert_eq!((kept, files(folder.path()) as u64 * 400), (bytes_of(&store), bytes_of(&store)));
        assert_eq!((store.figures().damaged, store.figures().failed), (0, 0));
    }

    #[test]
    fn a_block_that_came_back_is_not_what_an_earlier_reader_missed() {
        let folder = own_folder();
        let store = Store::open(folder.path(), LIMITS).unwrap();
        let client = store.client("alice").unwrap();
        let (hash, bytes) = block(1, 100);
        client.keep(&bytes).unwrap();
        let known = lock(&client.shelf.contents).use_again(&hash).unwrap();
        assert!(store.0.remove(&client.shelf, &mut lock(&client.shelf.contents), &hash));
        client.keep(&bytes).unwrap();
        // The reader hits the moment in which there is no file.
        let file = fs::read(client.shelf.path(&hash)).unwrap();
        fs::remove_file(client.shelf.path(&hash)).unwrap();
        assert_eq!(client.read(&hash, known), None);
        fs::write(client.shelf.path(&hash), file).unwrap();
        assert_eq!((client.find(&hash), store.figures().damaged), (Some(bytes), 0));
    }

    #[test]
    fn what_does_not_belong_to_the_cache_is_left_alone_and_does_no_harm() {
        let folder = own_folder();
        let store = Store::open(folder.path(), LIMITS).unwrap();
        let client = store.client("alice").unwrap();
        let shelf = client.shelf.folder.clone();
        let names: Vec<String> = (0..4).map(|number| hex(&block(number, 100).0)).collect();
        drop((client, store));
        // In place of blocks: a folder, a link to a valid block, more than any block has, nothing.
        let elsewhere = folder.path().join("elsewhere");
        fs::write(&elsewhere, vec![1; 100]).unwrap();
        fs::create_dir(shelf.join(&names[0])).unwrap();
        std::os::unix::fs::symlink(&elsewhere, shelf.join(&names[1])).unwrap();
        File::create(shelf.join(&names[2])).unwrap().set_len(1 << 40).unwrap();
        File::create(shelf.join(&names[3])).unwrap();
        fs::write(shelf.join("README"), b"foreign").unwrap();
        // In place of clients: a file, and a link.
        fs::write(folder.path().join(&names[0]), b"foreign").unwrap();
        std::os::unix::fs::symlink("/", folder.path().join(&names[1])).unwrap();
        let store = Store::open(folder.path(), LIMITS).unwrap();
        let client = store.client("alice").unwrap();
        for number in 0..4 {
            assert_eq!(client.find(&block(number, 100).0), None);
        }
        assert_eq!((bytes_of(&store), store.figures().damaged), (0, 2));
        // A folder cannot be replaced; everything else can.
        assert!(client.keep(&block(0, 100).1).is_err());
        for number in 1..4 {
            let (hash, bytes) = block(number, 100);
            client.keep(&bytes).unwrap();
            assert_eq!(client.find(&hash), Some(bytes));
        }
        assert_eq!((bytes_of(&store), store.figures().failed), (300, 1));
        assert_eq!(fs::read(&elsewhere).unwrap(), [1; 100]);
        assert!(shelf.join("README").exists() && folder.path().join(&names[0]).is_file());
    }

    #[test]
    fn a_folder_is_used_by_one_daemon_and_closed_to_others() {
        let folder = own_folder();
        let path = folder.path().join("cache");
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o750)).unwrap();
        let refused = Store::open(&path, LIMITS).unwrap_err();
        assert!(refused.to_string().contains("chmod 700"), "{refused}");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
        let store = Store::open(&path, LIMITS).unwrap();
        let refused = Store::open(&path, LIMITS).unwrap_err();
        assert!(refused.to_string().contains("another rgpu-server uses"), "{refused}");
        drop(store);
        Store::open(&path, LIMITS).unwrap();
    }

    #[test]
    fn a_full_disk_costs_the_block_and_leaves_nothing_behind() {
        use nix::mount::{MsFlags, mount};
        use nix::sched::{CloneFlags, unshare};
        let folder = own_folder();
        let path = folder.path().to_owned();
        // In its own thread, which alone sees the small disk.
        let full = move || {
            if unshare(CloneFlags::CLONE_NEWNS).is_err() {
                println!("skipped: mounting needs root");
                return;
            }
            let none: Option<&str> = None;
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
            mount(Some("small"), &path, Some("tmpfs"), MsFlags::empty(), Some("size=64k,mode=700")).unwrap();
            let store = Store::open(&path, Limits { client: 1 << 20, all: 1 << 20 }).unwrap();
            let client = store.client("alice").unwrap();
            let (small, large) = (block(1, 4096), block(2, 100_000));
            client.keep(&small.1).unwrap();
            let refused = client.keep(&large.1).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::StorageFull);
            assert_eq!((client.find(&small.0), client.find(&large.0)), (Some(small.1), None));
            assert_eq!((files(&path), bytes_of(&store), store.figures().failed), (1, 4096, 1));
        };
        std::thread::spawn(full).join().unwrap();
    }
}
