//! Blocks of a session's uploads that the server has already, and those that it gathers to have them the next
//! time.
//!
//! ```text
//!   bridge                                    reader threads                     the thread here ──▶ BlockCache
//!   hash of a block (HASH_FLAG)          ──▶  ask  ──────────────────────────▶   find ──▶ found
//!   ◀── DATA_KNOWN ───────────────────────────────────────────────────────────────┘
//!   part of a known block (KNOWN_FLAG)   ──▶  take ◀────────────────────────────  found
//!   bytes of others (KEEP_FLAG)          ──▶  gather ─── a whole block ──────▶   keep
//! ```
//!
//! Only a bridge knows when it is worth its while to ask, and it alone decides for each part of a block
//! whether it sends the bytes or says that they are known. What was found for it is kept until all of that
//! block has come one way or the other. Both are bounded: beyond that, blocks are not known, and are not
//! gathered. So are questions, because a disk may take seconds to answer one: beyond that, the answer is that
//! the block is not known, and nobody looks for it. Questions are answered before gathered blocks are written
//! to the disk, which takes longer; they find these blocks, too.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use protocol::link::{CACHE_BLOCK, DataHeader, DataKnown};

/// The BLAKE3 hash of a block's bytes.
pub type Hash = [u8; 32];

/// The blocks that a session's client has sent before, in this session or another.
pub trait BlockCache: Send + Sync {
    /// The block with this hash. Its bytes have been compared with that.
    fn find(&self, hash: &Hash) -> Option<Vec<u8>>;

    /// Keeps a block, if there is room for it.
    fn keep(&self, bytes: &[u8]);
}

/// Most bytes of blocks that were found and have not been used. A bridge asks for half as many at a time.
const MOST_FOUND: u64 = 64 << 20;
/// Most bytes of blocks that are gathered.
const MOST_GATHERED: u64 = 64 << 20;
/// What each of them takes besides its bytes, about.
const BESIDE: u64 = 256;
/// Most blocks that were asked for and have not come. Others are not known.
const MOST_ASKED: usize = 4096;
/// Most questions that have not been answered. A bridge has no more than 2048, or several times as many where
/// its process has been replaced while the disk hung.
const MOST_UNANSWERED: usize = 1 << 16;
/// From so many blocks on, those that nobody will use are forgotten.
const MANY: usize = 128;

/// A block: the command, its piece, and the block's offset in that.
type Key = (u64, u32, u64);

/// Whether data of a command's piece may still come.
pub(super) type MayCome<'a> = &'a dyn Fn((u64, u32)) -> bool;

/// See the module's text.
pub(crate) struct Blocks {
    state: Mutex<State>,
    came: Condvar,
}

#[derive(Default)]
struct State {
    questions: VecDeque<Question>,
    /// Blocks that are gathered and not kept yet.
    unkept: VecDeque<Unkept>,
    /// Blocks that were asked for, and what was found for those that were answered.
    asked: BTreeMap<Key, Asked>,
    unanswered: usize,
    found_bytes: u64,
    gathered: BTreeMap<Key, Gathered>,
    /// With those that are about to be kept.
    gathered_bytes: u64,
    /// Questions since blocks were last [cleaned](State::clean).
    asked_since: usize,
    over: bool,
    /// Everything that was gathered has been kept, and nothing more will be.
    done: bool,
}

enum Task {
    Answer(Question),
    Keep(Arc<Vec<u8>>),
}

struct Question {
    key: Key,
    /// `None`: there are too many questions, and nobody looks for this block.
    hash: Option<Hash>,
}

struct Unkept {
    bytes: Arc<Vec<u8>>,
    /// Known once a question was compared with it.
    hash: Option<Hash>,
}

struct Asked {
    len: u64,
    /// Bytes of it that have not come, one way or the other.
    left: u64,
    found: Option<Arc<[u8]>>,
}

struct Gathered {
    bytes: Vec<u8>,
    left: usize,
}

fn key_at(seq: u64, piece: u32, offset: u64) -> Key {
    (seq, piece, offset - offset % CACHE_BLOCK)
}

fn wrong(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

impl Blocks {
    pub(crate) fn new() -> Arc<Blocks> {
        Arc::new(Blocks { state: Mutex::default(), came: Condvar::new() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The bridge asks for a block of `header.len` bytes.
    pub(super) fn ask(&self, header: &DataHeader, hash: Hash, may_come: MayCome<'_>) -> io::Result<()> {
        let DataHeader { seq, offset, piece, len } = *header;
        let (key, len) = (key_at(seq, piece, offset), u64::from(len));
        if key.2 != offset || len > CACHE_BLOCK {
            return Err(wrong(format!("it asks for {len} bytes at {offset}, which are no block")));
        }
        let mut state = self.lock();
        state.asked_since += 1;
        if state.is_to_clean() {
            state.clean(may_come);
        }
        if state.unanswered >= MOST_UNANSWERED {
            return Err(wrong(format!("it asks {MOST_UNANSWERED} questions more than were answered")));
        }
        if state.asked.contains_key(&key) {
            return Err(wrong(format!("it asks twice for the block at {offset} of command {seq}")));
        }
        let looks = state.asked.len() < MOST_ASKED && state.unanswered < MOST_ASKED;
        // All of it may have come over another connection. Then the answer is of no use.
        if looks && may_come((seq, piece)) {
            // What was gathered of it has come, and what is behind it may be referred to.
            let came = state.gathered.get(&key).map_or(0, |gathered| gathered.bytes.len() - gathered.left);
            state.asked.insert(key, Asked { len, left: len.saturating_sub(came as u64), found: None });
        }
        state.unanswered += 1;
        state.questions.push_back(Question { key, hash: looks.then_some(hash) });
        drop(state);
        self.came.notify_one();
        Ok(())
    }

    /// Bytes of a block that the bridge was told is known. `None`: it was told so of no such block.
    pub(super) fn take(&self, header: &DataHeader) -> Option<Box<[u8]>> {
        let DataHeader { seq, offset, piece, len } = *header;
        let key = key_at(seq, piece, offset);
        let mut state = self.lock();
        let found = state.asked.get(&key)?.found.as_ref()?;
        let at = usize::try_from(offset - key.2).ok()?;
        let bytes = found.get(at..at.checked_add(len as usize)?).map(Box::from)?;
        // Not all bytes of the block will come.
        if let Some(gathered) = state.gathered.remove(&key) {
            state.gathered_bytes -= gathered.bytes.len() as u64 + BESIDE;
        }
        Some(bytes)
    }

    /// Bytes of a piece come now, one way or the other.
    pub(super) fn passed(&self, header: &DataHeader) {
        let DataHeader { seq, offset, piece, len } = *header;
        let Some(end) = offset.checked_add(len.into()) else { return };
        let mut state = self.lock();
        let mut at = offset;
        while at < end {
            let key = key_at(seq, piece, at);
            let n = (end - at).min(key.2.saturating_add(CACHE_BLOCK) - at);
            if let Some(asked) = state.asked.get_mut(&key) {
                asked.left = asked.left.saturating_sub(n);
                if asked.left == 0 {
                    state.forget(&key);
                }
            }
            at += n;
        }
    }

    /// Bytes from `offset` of a piece of `len` bytes, to be kept.
    pub(super) fn gather(&self, piece: (u64, u32), len: u64, mut offset: u64, mut bytes: &[u8]) {
        let mut state = self.lock();
        while !bytes.is_empty() {
            let key = key_at(piece.0, piece.1, offset);
            let whole = CACHE_BLOCK.min(len.saturating_sub(key.2)) as usize;
            let at = (offset - key.2) as usize;
            let n = bytes.len().min(whole.saturating_sub(at));
            if n == 0 {
                return;
            }
            let (now, rest) = bytes.split_at(n);
            state.add(key, whole, at, now);
            (bytes, offset) = (rest, offset + n as u64);
        }
        let keep = !state.unkept.is_empty();
        drop(state);
        if keep {
            self.came.notify_one();
        }
    }

    /// The session is over. Blocks that were gathered are still kept.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.over = true;
        state.questions.clear();
        drop(state);
        self.came.notify_all();
    }

    /// Waits until all blocks that were gathered before [`close`](Self::close) are kept, at most this long.
    pub(super) fn finish(&self, limit: Duration) {
        drop(self.came.wait_timeout_while(self.lock(), limit, |state| !state.done));
    }

    /// Asks `cache` and gives to it, and tells `answer` what is known, until the session is over and all is
    /// kept.
    pub(super) fn serve(&self, cache: &dyn BlockCache, answer: impl Fn(DataKnown)) {
        while let Some(task) = self.wait() {
            self.carry_out(task, cache, &answer);
        }
        self.lock().done = true;
        self.came.notify_all();
    }

    /// Does what there is to do, once. False: there was nothing.
    #[cfg(test)]
    pub(crate) fn work(&self, cache: &dyn BlockCache, answer: impl Fn(DataKnown)) -> bool {
        let task = self.lock().next();
        task.is_some_and(|task| {
            self.carry_out(task, cache, &answer);
            true
        })
    }

    fn carry_out(&self, task: Task, cache: &dyn BlockCache, answer: &impl Fn(DataKnown)) {
        match task {
            Task::Answer(Question { key, hash }) => {
                let find = |hash| cache.find(&hash).or_else(|| self.find_unkept(&hash));
                answer(self.found(key, hash.and_then(find)));
            }
            Task::Keep(bytes) => {
                cache.keep(&bytes);
                self.lock().gathered_bytes -= bytes.len() as u64 + BESIDE;
            }
        }
    }

    /// The block with this hash, if it waits to be kept. Only the caller's thread takes such blocks away.
    fn find_unkept(&self, hash: &Hash) -> Option<Vec<u8>> {
        for at in 0.. {
            let (bytes, known) = {
                let state = self.lock();
                let unkept = state.unkept.get(at)?;
                (Arc::clone(&unkept.bytes), unkept.hash)
            };
            let own = known.unwrap_or_else(|| {
                let own = *blake3::hash(&bytes).as_bytes();
                self.lock().unkept.get_mut(at).into_iter().for_each(|unkept| unkept.hash = Some(own));
                own
            });
            if own == *hash {
                return Some(bytes.to_vec());
            }
        }
        None
    }

    fn wait(&self) -> Option<Task> {
        let mut state = self.lock();
        loop {
            if let Some(task) = state.next() {
                return Some(task);
            }
            if state.over {
                return None;
            }
            state = self.came.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// What the bridge is told of a block that was looked for. One of which everything has come meanwhile is
    /// not kept; the answer only says what to expect of others.
    fn found(&self, key: Key, bytes: Option<Vec<u8>>) -> DataKnown {
        let mut state = self.lock();
        state.unanswered -= 1;
        let room = MOST_FOUND - state.found_bytes;
        let mut known = u32::from(bytes.is_some());
        if let Some(asked) = state.asked.get_mut(&key) {
            match bytes.filter(|bytes| bytes.len() as u64 == asked.len && asked.len <= room) {
                Some(bytes) => {
                    asked.found = Some(Arc::from(bytes));
                    state.found_bytes += state.asked.get(&key).map_or(0, |asked| asked.len);
                }
                None => {
                    known = 0;
                    state.asked.remove(&key);
                }
            }
        }
        DataKnown { seq: key.0, offset: key.2, piece: key.1, known }
    }
}

impl State {
    /// What is to be done next.
    fn next(&mut self) -> Option<Task> {
        let question = self.questions.pop_front().map(Task::Answer);
        question.or_else(|| Some(Task::Keep(self.unkept.pop_front()?.bytes)))
    }

    fn forget(&mut self, key: &Key) {
        if let Some(Asked { found: Some(found), .. }) = self.asked.remove(key) {
            self.found_bytes -= found.len() as u64;
        }
    }

    /// Whether blocks may be left over: those whose first bytes came over another connection before the
    /// question, and those of which the rest is not to be kept. No bridge needs more than half of the room.
    /// Each block is looked at about twice for each question, however many there are.
    fn is_to_clean(&self) -> bool {
        let blocks = self.asked.len() + self.gathered.len();
        let little_room = 2 * self.found_bytes > MOST_FOUND || 2 * self.gathered_bytes > MOST_GATHERED;
        (blocks >= MANY || little_room) && 2 * self.asked_since >= blocks
    }

    /// Forgets the blocks of pieces of which nothing more comes.
    fn clean(&mut self, may_come: MayCome<'_>) {
        let gone: Vec<Key> = self.asked.keys().filter(|key| !may_come((key.0, key.1))).copied().collect();
        gone.iter().for_each(|key| self.forget(key));
        let bytes = &mut self.gathered_bytes;
        self.gathered.retain(|key, gathered| {
            let keep = may_come((key.0, key.1));
            if !keep {
                *bytes -= gathered.bytes.len() as u64 + BESIDE;
            }
            keep
        });
        self.asked_since = 0;
    }

    fn add(&mut self, key: Key, whole: usize, at: usize, bytes: &[u8]) {
        if !self.gathered.contains_key(&key) {
            let takes = whole as u64 + BESIDE;
            if self.gathered_bytes + takes > MOST_GATHERED {
                return;
            }
            self.gathered_bytes += takes;
            self.gathered.insert(key, Gathered { bytes: vec![0; whole], left: whole });
        }
        let Some(gathered) = self.gathered.get_mut(&key) else { return };
        let Some(place) = gathered.bytes.get_mut(at..at + bytes.len()) else { return };
        place.copy_from_slice(bytes);
        gathered.left = gathered.left.saturating_sub(bytes.len());
        if gathered.left == 0
            && let Some(gathered) = self.gathered.remove(&key)
        {
            self.unkept.push_back(Unkept { bytes: Arc::new(gathered.bytes), hash: None });
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::collections::HashMap;

    /// A cache without a disk.
    #[derive(Default)]
    pub(crate) struct Memory(Mutex<HashMap<Hash, Vec<u8>>>);

    impl BlockCache for Memory {
        fn find(&self, hash: &Hash) -> Option<Vec<u8>> {
            self.0.lock().unwrap().get(hash).cloned()
        }
        fn keep(&self, bytes: &[u8]) {
            self.0.lock().unwrap().insert(*blake3::hash(bytes).as_bytes(), bytes.to_vec());
        }
    }

    /// Does the tasks that there are, and gives the answers.
    fn work(blocks: &Blocks, cache: &Memory) -> Vec<DataKnown> {
        let answers = Mutex::new(Vec::new());
        while blocks.work(cache, |answer| answers.lock().unwrap().push(answer)) {}
        answers.into_inner().unwrap()
    }

    fn header(seq: u64, offset: u64, len: usize) -> DataHeader {
        DataHeader { seq, offset, piece: 0, len: len as u32 }
    }

    fn ask(blocks: &Blocks, seq: u64, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let hash = *blake3::hash(bytes).as_bytes();
        blocks.ask(&header(seq, offset, bytes.len()), hash, &|_| true)
    }

    fn is_empty(blocks: &Blocks) -> bool {
        let state = blocks.lock();
        (state.asked.len(), state.found_bytes, state.gathered.len(), state.gathered_bytes) == (0, 0, 0, 0)
    }

    #[test]
    fn what_was_gathered_before_the_end_is_kept_behind_it() {
        let (blocks, cache) = (Blocks::new(), Memory::default());
        let bytes = [5; 1000];
        blocks.gather((1, 0), 1000, 0, &bytes);
        // A question that nobody waits for any more.
        ask(&blocks, 2, 0, &bytes).unwrap();
        blocks.close();
        blocks.finish(Duration::ZERO);
        assert_eq!(cache.0.lock().unwrap().len(), 0);
        std::thread::scope(|scope| {
            scope.spawn(|| blocks.serve(&cache, |_| panic!("an answer after the end")));
            blocks.finish(Duration::from_secs(240));
        });
        assert_eq!(cache.find(blake3::hash(&bytes).as_bytes()).as_deref(), Some(&bytes[..]));
    }

    #[test]
    fn questions_are_answered_before_gathered_blocks_are_kept_and_find_those_too() {
        let (blocks, cache) = (Blocks::new(), Memory::default());
        cache.keep(&[9; 1000]);
        (0..64).for_each(|seq| blocks.gather((seq, 0), 1000, 0, &[seq as u8; 1000]));
        for (seq, byte, known) in [(100, 9, 1), (101, 63, 1), (102, 200, 0), (103, 63, 1)] {
            ask(&blocks, seq, 0, &[byte; 1000]).unwrap();
            assert!(blocks.work(&cache, |answer| assert_eq!((answer.seq, answer.known), (seq, known))));
        }
        assert_eq!(blocks.take(&header(101, 0, 1000)).as_deref(), Some(&[63; 1000][..]));
        assert_eq!(cache.0.lock().unwrap().len(), 1, "nothing was kept meanwhile");
        assert_eq!(work(&blocks, &cache).len(), 0);
        assert_eq!(cache.0.lock().unwrap().len(), 64);
    }

    #[test]
    fn a_block_that_was_gathered_in_parts_is_known_the_next_time() {
        let (blocks, cache) = (Blocks::new(), Memory::default());
        let len = CACHE_BLOCK as usize + 100_000;
        let bytes: Vec<u8> = (0..len).map(|i| (i / 1000) as u8).collect();
        let offsets = [0, CACHE_BLOCK as usize];
        ask(&blocks, 1, 0, &bytes[..offsets[1]]).unwrap();
        assert_eq!(work(&blocks, &cache).iter().map(|a| a.known).collect::<Vec<_>>(), [0]);
        // In any order, and across the end of a block.
        for (from, to) in [(300_000, 400_000), (0, 300_000), (400_000, len)] {
            blocks.gather((1, 0), len as u64, from as u64, &bytes[from..to]);
            blocks.passed(&header(1, from as u64, to - from));
        }
        work(&blocks, &cache);
        assert!(is_empty(&blocks) && cache.0.lock().unwrap().len() == 2);
        ask(&blocks, 2, 0, &bytes[..offsets[1]]).unwrap();
        ask(&blocks, 2, CACHE_BLOCK, &bytes[offsets[1]..]).unwrap();
        assert_eq!(
            work(&blocks, &cache).iter().map(|a| (a.offset, a.known)).collect::<Vec<_>>(),
            [(0, 1), (CACHE_BLOCK, 1)]
        );
        for (from, to) in [(0, 1000), (1000, offsets[1]), (offsets[1], len)] {
            let part = header(2, from as u64, to - from);
            assert_eq!(blocks.take(&part).as_deref(), Some(&bytes[from..to]));
            blocks.passed(&part);
        }
        assert!(is_empty(&blocks) && blocks.take(&header(2, 0, 1000)).is_none());
    }

    #[test]
    fn what_a_bridge_may_not_do_is_refused() {
        let (blocks, cache) = (Blocks::new(), Memory::default());
        assert!(ask(&blocks, 1, 5, &[1; 100]).is_err(), "no block");
        ask(&blocks, 1, 0, &[1; 100]).unwrap();
        assert!(ask(&blocks, 1, 0, &[1; 100]).is_err(), "twice");
        for header in [header(1, 0, 100), header(9, 0, 1), header(1, u64::MAX, 9)] {
            assert!(blocks.take(&header).is_none(), "not known yet");
        }
        cache.keep(&[1; 100]);
        work(&blocks, &cache);
        assert!(blocks.take(&header(1, 50, 51)).is_none(), "beyond the block");
        assert!(blocks.take(&header(1, 50, 50)).is_some());
        for seq in 2..MOST_UNANSWERED as u64 + 2 {
            ask(&blocks, seq, 0, &[2; 10]).unwrap();
        }
        assert!(ask(&blocks, u64::MAX, 0, &[2; 10]).is_err(), "too many");
    }

    #[test]
    fn more_questions_than_a_busy_disk_answers_are_answered_in_their_turn_with_no() {
        let (blocks, cache) = (Blocks::new(), Memory::default());
        cache.keep(&[2; 10]);
        let most = MOST_ASKED as u64;
        for round in 0..2 {
            let seqs = round * 5000..(round + 1) * 5000;
            for seq in seqs.clone() {
                ask(&blocks, seq, 0, &[2; 10]).unwrap();
            }
            let answers: Vec<_> = work(&blocks, &cache).iter().map(|a| (a.seq, a.known)).collect();
            let expected = seqs.clone().map(|seq| (seq, u32::from(seq < seqs.start + most)));
            assert_eq!(answers, expected.collect::<Vec<_>>());
            for seq in seqs {
                blocks.passed(&header(seq, 0, 10));
            }
            assert!(is_empty(&blocks));
        }
    }

    #[test]
    fn what_is_kept_for_a_bridge_is_bounded_and_cleaned() {
        let (blocks, cache) = (Blocks::new(), Memory::default());
        let bytes = vec![3; CACHE_BLOCK as usize];
        cache.keep(&bytes);
        let most = MOST_FOUND / CACHE_BLOCK;
        for seq in 0..most + 2 {
            ask(&blocks, seq, 0, &bytes).unwrap();
        }
        let known: u32 = work(&blocks, &cache).iter().map(|answer| answer.known).sum();
        assert_eq!(u64::from(known), most);
        // What came before its question was answered is not kept.
        blocks.passed(&header(0, 0, bytes.len()));
        ask(&blocks, 100, 0, &bytes).unwrap();
        blocks.passed(&header(100, 0, bytes.len()));
        assert_eq!((work(&blocks, &cache)[0].known, blocks.take(&header(100, 0, 10))), (1, None));
        // A part of a block that never comes whole.
        for piece in 0..20 {
            blocks.gather((200, piece), CACHE_BLOCK, 0, &bytes[..10]);
        }
        let room = MOST_GATHERED - blocks.lock().gathered_bytes;
        assert!(room < CACHE_BLOCK + BESIDE, "{room}");
        blocks.lock().clean(&|_| false);
        assert!(is_empty(&blocks));
        let hash = *blake3::hash(&bytes).as_bytes();
        blocks.ask(&header(300, 0, bytes.len()), hash, &|_| false).unwrap();
        assert!(is_empty(&blocks), "all of it has come");
        assert_eq!((work(&blocks, &cache)[0].known, is_empty(&blocks)), (1, true));
    }

    #[test]
    fn blocks_whose_first_bytes_came_before_the_question_take_no_room_for_ever() {
        let (blocks, cache) = (Blocks::new(), Memory::default());
        let bytes = vec![3; CACHE_BLOCK as usize];
        let hash = *blake3::hash(&bytes).as_bytes();
        cache.keep(&bytes);
        for seq in 0..40 {
            blocks.passed(&header(seq, 0, 1000));
            blocks.ask(&header(seq, 0, bytes.len()), hash, &|key| key.0 == seq).unwrap();
            assert_eq!(work(&blocks, &cache)[0].known, 1, "block {seq}");
            blocks.passed(&header(seq, 1000, bytes.len() - 1000));
        }
    }

    #[test]
    fn nothing_is_left_of_a_block_of_which_the_first_bytes_came_and_the_rest_is_known() {
        let (blocks, cache) = (Blocks::new(), Memory::default());
        let bytes = vec![3; 10_000];
        cache.keep(&bytes);
        blocks.passed(&header(1, 0, 1000));
        blocks.gather((1, 0), 10_000, 0, &bytes[..1000]);
        ask(&blocks, 1, 0, &bytes).unwrap();
        assert_eq!(work(&blocks, &cache)[0].known, 1);
        let rest = header(1, 1000, 9000);
        assert_eq!(blocks.take(&rest).as_deref(), Some(&bytes[1000..]));
        blocks.passed(&rest);
        assert!(is_empty(&blocks));
    }

    #[test]
    fn blocks_that_are_gathered_in_part_take_no_room_for_ever() {
        let (blocks, cache) = (Blocks::new(), Memory::default());
        let bytes: Vec<Vec<u8>> = (0..40).map(|seq| vec![seq; CACHE_BLOCK as usize]).collect();
        for (seq, bytes) in (0..).zip(&bytes) {
            let hash = *blake3::hash(bytes).as_bytes();
            blocks.ask(&header(seq, 0, bytes.len()), hash, &|key| key.0 == seq).unwrap();
            blocks.gather((seq, 0), CACHE_BLOCK, 0, bytes);
            work(&blocks, &cache);
            assert!(cache.find(&hash).is_some(), "block {seq}");
            blocks.gather((seq, 1), CACHE_BLOCK, 0, &bytes[..1000]);
        }
    }

    #[test]
    fn small_blocks_take_no_more_memory_than_large_ones() {
        let blocks = Blocks::new();
        (0..300_000).for_each(|seq| blocks.gather((seq, 0), 2, 0, &[1]));
        let gathered = blocks.lock().gathered.len() as u64;
        assert!(gathered <= MOST_GATHERED / BESIDE, "{gathered}");
    }

    #[test]
    fn a_question_looks_at_few_blocks_however_many_there_are() {
        let (blocks, looks) = (Blocks::new(), std::cell::Cell::new(0));
        for seq in 0..4000 {
            let may_come = |_| {
                looks.set(looks.get() + 1);
                true
            };
            blocks.ask(&header(seq, 0, 10), [0; 32], &may_come).unwrap();
        }
        assert!(looks.get() < 20_000, "{}", looks.get());
        // Those that nobody will use go, and soon.
        for seq in 4000..6500 {
            blocks.ask(&header(seq, 0, 10), [0; 32], &|key| key.0 == seq).unwrap();
        }
        assert!(blocks.lock().asked.len() < MANY, "{}", blocks.lock().asked.len());
    }
}
