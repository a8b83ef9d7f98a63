//! What the client has of the mirrors, and watches of it.
//!
//! A client that reads bytes of a mirror can have them remembered ([`HostFetch`]). The copy here is what the
//! client has, because its own changes are made in the copy too. Where copy and mirror differ, a device has
//! written. A [`HostWatch`] is answered when that happens.
//!
//! ```text
//!  client reads ──▶ copy            client writes ──▶ mirror, copy            device writes ──▶ mirror ≠ copy ──▶ answer
//! ```
//!
//! A session has one watch at a time, because a later one replaces it. A thread compares what is watched: at
//! first as often as it can, then less and less often until the watch is over or replaced. Without a watch it
//! sleeps. Everything else is compared every few milliseconds and before the client gets something new, so
//! that it then has nothing that is older than that.
//!
//! A client may ask for more ([`WATCH_TELLS`]). Then everything is also compared before the client learns
//! that work is done, and any changes are sent first. A word says whether the client has all of them
//! ([`Watches::before_news`]). So the client can keep what it has when work ends.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use host_bridge::endpoint::Client;
use protocol::Status;
use protocol::link::{ProgressUpdate, progress};
use protocol::ops::memory::{
    HostFetch, HostWatch, HostWatchReply, MOST_CHANGES, MOST_REMEMBERED, MOST_REMEMBERED_BYTES,
    MOST_WATCHED_BYTES, WATCH_TELLS, WordPatch,
};
use protocol::polling::MIRROR_WATCHER;
use protocol::wire::{Wire, Writer};

use super::beside::{Beside, bits_of};

/// The shortest and the longest pause between two comparisons.
const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_millis(1);
/// A pause is this fraction of the time that the watch has lasted.
const PART: u32 = 16;
/// How often bytes that a device keeps changing are read again.
const MOST_READINGS: usize = 8;
/// How often the words that it changes are read before each of these, divided by the number of rows in which
/// they are.
const MOST_STILL: usize = 512;
/// How often what is not watched is compared too. Without anything new, the client needs that only so that
/// it does not read old bytes for ever.
const SELDOM: Duration = Duration::from_millis(4);
/// The longest that a watch lasts. In tests it ends when they say so, however busy the machine is.
const MOST_TIME: Duration = Duration::from_secs(if cfg!(test) { 3600 } else { 1 });
/// Maximum bytes that are compared before the client learns that work is done. It takes some microseconds.
const MOST_BEFORE_NEWS: usize = 128 << 10;
/// Maximum bytes of one [`HostFetch`].
const MOST_FETCHED: u64 = 16 << 20;

/// What a session's client has, and its watch. The thread ends when this is dropped.
#[derive(Default)]
pub struct Watches(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Number of threads that need the lock. The thread that compares leaves it to them.
    wanted: AtomicUsize,
    /// Whether the client is told of [`progress::WATCHED`].
    tells: AtomicBool,
}

#[derive(Default)]
struct State {
    copies: Copies,
    watch: Option<Watch>,
    /// The number of the last watch that was answered with changes, and these, until the next one.
    told: Option<(u64, HostWatchReply)>,
    /// The client's [`progress::WATCHED`].
    word: u64,
    has_thread: bool,
    over: bool,
}

struct Watch {
    client: Arc<dyn Client>,
    beside: Weak<dyn Beside>,
    seq: u64,
    slot: u16,
    number: u64,
    watched: Vec<u64>,
    begun: Instant,
    most: Duration,
    /// When all was compared last.
    compared: Instant,
}

/// What the client has, by first address. No two overlap.
#[derive(Default)]
struct Copies(BTreeMap<u64, Vec<u8>>);

impl Copies {
    fn len(&self) -> usize {
        self.0.values().map(Vec::len).sum()
    }

    /// The length of those that are at these addresses.
    fn len_of(&self, addresses: &[u64]) -> usize {
        addresses.iter().filter_map(|address| self.0.get(address)).map(Vec::len).sum()
    }

    fn remember(&mut self, address: u64, bytes: Vec<u8>) {
        let end = address.saturating_add(bytes.len() as u64);
        self.0.retain(|from, copy| end <= *from || from + copy.len() as u64 <= address);
        self.0.insert(address, bytes);
    }

    fn patch(&mut self, patch: &WordPatch) {
        self.each(patch.address, 8, |copy, _| {
            if let Some(word) = copy.first_chunk_mut::<8>() {
                *word = patch.apply(u64::from_le_bytes(*word)).to_le_bytes();
            }
        });
    }

    /// Calls `f` with each part of a range that is copied, and the part's offset in the range.
    fn each(&mut self, address: u64, len: usize, mut f: impl FnMut(&mut [u8], usize)) {
        let end = address.saturating_add(len as u64);
        let before = self.0.range(..=address).next_back().map_or(address, |(from, _)| *from);
        for (from, copy) in self.0.range_mut(before..end) {
            let (first, last) = (address.max(*from), end.min(from + copy.len() as u64));
            if first < last {
                f(&mut copy[(first - from) as usize..(last - from) as usize], (first - address) as usize);
            }
        }
    }

    fn write(&mut self, address: u64, bytes: &[u8]) {
        self.each(address, bytes.len(), |copy, at| copy.copy_from_slice(&bytes[at..at + copy.len()]));
    }

    /// Changes words as [`Beside::change`] does. A word is in one copy or in none.
    fn change(&mut self, address: u64, masks: &[u8], bytes: &[u8]) {
        self.each(address, bytes.len(), |copy, at| {
            let words = copy.as_chunks_mut::<8>().0.iter_mut().zip(bytes[at..].as_chunks::<8>().0);
            for ((to, from), mask) in words.zip(&masks[at / 8..]) {
                match bits_of(*mask) {
                    u64::MAX => *to = *from,
                    bits => {
                        let (now, from) = (u64::from_le_bytes(*to), u64::from_le_bytes(*from));
                        *to = (now & !bits | from & bits).to_le_bytes();
                    }
                }
            }
        });
    }

    /// Whether a mirror differs from the copy at an address. True too if the mirror is gone.
    fn differs(&self, beside: &dyn Beside, address: u64) -> bool {
        const AT_ONCE: usize = 64 << 10;
        let Some(copy) = self.0.get(&address) else { return false };
        let mut now = vec![0; copy.len().min(AT_ONCE)];
        copy.chunks(AT_ONCE).enumerate().any(|(n, part)| {
            let now = &mut now[..part.len()];
            beside.read(address + (n * AT_ONCE) as u64, now).is_err() || now != part
        })
    }

    /// Addresses of those of which the mirror differs, except `but`. They stay until the client says that it
    /// no longer has them: it may not get this answer before it sends another command.
    fn changed(&self, beside: &dyn Beside, but: &[u64]) -> Vec<u64> {
        let others = self.0.keys().filter(|address| !but.contains(address));
        others.copied().filter(|address| self.differs(beside, *address)).collect()
    }

    /// Whether mirrors are like the copies once the client has taken over an answer.
    fn are_after(&self, beside: &dyn Beside, answer: &HostWatchReply) -> bool {
        let mut after = Copies(self.0.clone());
        after.0.retain(|address, _| !answer.changed.contains(address));
        answer.words.iter().for_each(|patch| after.patch(patch));
        !after.0.keys().any(|address| after.differs(beside, *address))
    }

    /// Those that are at these addresses, [`len_of`](Self::len_of) bytes.
    fn parts(&self, addresses: &[u64]) -> Vec<Part> {
        let copies = addresses.iter().filter_map(|address| self.0.get_key_value(address));
        parts(copies.map(|(address, copy)| (*address, copy.len())))
    }
}

impl State {
    /// Forgets what the client no longer has.
    fn keep(&mut self, has: &[u64]) {
        self.copies.0.retain(|address, _| has.contains(address));
    }

    /// The answer to a watch, once something has changed. A mirror that is gone has changed. `all`: what is
    /// not watched is compared, too, although that was done a moment ago.
    ///
    /// # Errors
    /// `INVALID_VALUE` if so; the session may be over.
    fn compare(&mut self, all: bool) -> Result<Option<HostWatchReply>, Status> {
        let Some(watch) = &mut self.watch else { return Ok(None) };
        let (copies, watched) = (&self.copies, &watch.watched);
        let beside = watch.beside.upgrade().ok_or(Status::INVALID_VALUE)?;
        if !watched.iter().any(|address| copies.differs(&*beside, *address)) {
            if !all && watch.compared.elapsed() < SELDOM {
                return Ok(None);
            }
            let changed = copies.changed(&*beside, watched);
            watch.compared = Instant::now();
            if changed.is_empty() {
                return Ok(None);
            }
        }
        // Bytes that were compared before the difference was found may have been written before it.
        let mut now = vec![0; copies.len_of(watched)];
        let settled = read_settled(&*beside, &copies.parts(watched), &mut now)?;
        let (mut words, mut many) = (Vec::new(), Vec::new());
        let mut rest = &now[..];
        for (address, copy) in watched.iter().filter_map(|address| copies.0.get_key_value(address)) {
            let (now, after) = rest.split_at(copy.len());
            rest = after;
            let differing = differences(*address, copy, now);
            if settled && words.len() + differing.len() <= MOST_CHANGES {
                words.extend(differing);
            } else if !settled || !differing.is_empty() {
                many.push(*address);
            }
        }
        // These are read after what the client gets.
        let mut changed = copies.changed(&*beside, watched);
        changed.extend(many);
        let reply = HostWatchReply { words, changed };
        self.told = Some((watch.number, reply.clone()));
        Ok(Some(reply))
    }

    /// The client's [`progress::WATCHED`], after everything was compared. Answers the watch if something has
    /// changed.
    fn compare_before_news(&mut self, beside: &dyn Beside) -> u64 {
        if self.copies.len() > MOST_BEFORE_NEWS {
            return 0;
        }
        let Some(number) = self.watch.as_ref().map(|watch| watch.number) else {
            let told = self.told.as_ref().filter(|(_, told)| self.copies.are_after(beside, told));
            return told.map_or(0, |(number, _)| 2 * number + 1);
        };
        match self.compare(true) {
            Ok(None) => 2 * number,
            Ok(Some(reply)) => {
                self.watch.take().inspect(|watch| watch.answer(Ok(reply)));
                2 * number + 1
            }
            Err(_) => 0,
        }
    }
}

/// The words of 8 bytes in which two copies differ.
fn differences(address: u64, copy: &[u8], now: &[u8]) -> Vec<WordPatch> {
    let (copy, now) = (copy.as_chunks::<8>().0, now.as_chunks::<8>().0);
    let words = copy.iter().zip(now).enumerate().filter(|(_, (copy, now))| copy != now);
    let patch = |(n, (copy, now)): (usize, (&[u8; 8], &[u8; 8]))| {
        let differs = |n: &usize| copy[*n] != now[*n];
        let mask = (0..8).filter(differs).fold(0, |mask, n| mask | 1u8 << n);
        WordPatch { address: address + 8 * n as u64, mask: bits_of(mask), value: u64::from_le_bytes(*now) }
    };
    words.map(patch).collect()
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lock, for all other threads than the one that compares.
    fn lock_first(&self) -> MutexGuard<'_, State> {
        self.wanted.fetch_add(1, Ordering::Relaxed);
        let state = self.lock();
        self.wanted.fetch_sub(1, Ordering::Relaxed);
        state
    }

    fn serve(&self) {
        let mut state = self.lock();
        while !state.over {
            let Some((lasted, most)) = state.watch.as_ref().map(|watch| (watch.begun.elapsed(), watch.most))
            else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let over = (lasted >= most).then(|| Ok(nothing()));
            if let Some(answer) = state.compare(false).transpose().or(over) {
                if let Some(watch) = state.watch.take() {
                    watch.answer(answer);
                }
            } else if lasted < MIRROR_WATCHER.here() {
                drop(state);
                std::thread::yield_now();
                while self.wanted.load(Ordering::Relaxed) > 0 {
                    std::thread::yield_now();
                }
                state = self.lock();
            } else {
                let pause = (lasted / PART).clamp(SHORTEST, LONGEST);
                let waited = self.changed.wait_timeout(state, pause);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }
}

impl Watches {
    /// Writes bytes of a mirror for the client. Errors as for [`Beside::write`].
    pub fn write(&self, beside: &dyn Beside, address: u64, bytes: &[u8]) -> Result<(), Status> {
        let mut state = self.0.lock_first();
        beside.write(address, bytes)?;
        state.copies.write(address, bytes);
        Ok(())
    }

    /// Writes words of mirrors for the client. Errors as for [`Beside::patch`].
    pub fn patch(&self, beside: &dyn Beside, words: &[WordPatch]) -> Result<(), Status> {
        let mut state = self.0.lock_first();
        beside.patch(words)?;
        words.iter().for_each(|patch| state.copies.patch(patch));
        Ok(())
    }

    /// Changes a row of words of a mirror for the client. Errors as for [`Beside::change`].
    pub fn change(
        &self,
        beside: &dyn Beside,
        address: u64,
        masks: &[u8],
        bytes: &[u8],
    ) -> Result<(), Status> {
        let mut state = self.0.lock_first();
        beside.change(address, masks, bytes)?;
        state.copies.change(address, masks, bytes);
        Ok(())
    }

    /// The bytes that a [`HostFetch`] requests, and which of those that the client has have changed.
    ///
    /// # Errors
    /// `INVALID_VALUE` if a range is not in one mirror, or if there is too much.
    pub fn fetch(&self, beside: &dyn Beside, op: &HostFetch) -> Result<(Vec<u8>, Vec<u64>), Status> {
        let len = op.ranges.iter().try_fold(0u64, |sum, range| sum.checked_add(range.len));
        let fits = |len: &u64| (1..=MOST_FETCHED).contains(len) && *len == op.dst.0.len;
        let len = len.filter(fits).ok_or(Status::INVALID_VALUE)?;
        let mut bytes = vec![0; len as usize];
        // The client's own changes come before or after.
        let mut state = self.0.lock_first();
        let parts = parts(op.ranges.iter().map(|range| (range.address, range.len as usize)));
        let (settled, others) = parts.split_at(usize::from(op.settled));
        let end = settled.last().map_or(0, |part| part.at.end);
        // What devices change too quickly is given as it was read last.
        read_settled(beside, settled, &mut bytes[..end])?;
        read(beside, others, &mut bytes)?;
        if !op.remember {
            return Ok((bytes, Vec::new()));
        }
        state.keep(&op.has);
        let (runs, held) = (state.copies.0.len() + op.ranges.len(), state.copies.len() + bytes.len());
        if runs > MOST_REMEMBERED || held > MOST_REMEMBERED_BYTES {
            return Err(Status::INVALID_VALUE);
        }
        let changed = state.copies.changed(beside, &[]);
        let mut rest = &bytes[..];
        for range in &op.ranges {
            let (copy, after) = rest.split_at(range.len as usize);
            rest = after;
            state.copies.remember(range.address, copy.to_vec());
        }
        Ok((bytes, changed))
    }

    /// Called before the client learns that work is done. Compares what the client has, tells it what devices
    /// have changed, and says whether it then has everything ([`progress::WATCHED`]).
    pub fn before_news(&self, client: &dyn Client, beside: &dyn Beside) {
        if !self.0.tells.load(Ordering::Acquire) {
            return;
        }
        let mut state = self.0.lock_first();
        // A client that has nothing gets what is there when it asks.
        if state.copies.0.is_empty() {
            return;
        }
        let value = state.compare_before_news(beside);
        // Published under the lock, so that the client has the words in their order.
        if std::mem::replace(&mut state.word, value) != value {
            client.publish(&[ProgressUpdate { kind: progress::WATCHED, index: 0, seq: 0, value }]);
        }
    }

    /// Begins a watch, which replaces the one before.
    ///
    /// # Errors
    /// `INVALID_VALUE` if too much is watched; `OUT_OF_MEMORY` if no thread can be started. It is not
    /// answered then.
    pub fn begin(
        &self,
        client: &Arc<dyn Client>,
        beside: &Arc<dyn Beside>,
        (seq, slot): (u64, u16),
        op: &HostWatch,
    ) -> Result<(), Status> {
        let mut state = self.0.lock_first();
        if let Some((number, told)) = state.told.take().filter(|(number, _)| *number == op.after) {
            tracing::trace!(number, "the client has taken over the words of a watch");
            told.words.iter().for_each(|patch| state.copies.patch(patch));
        }
        self.0.tells.store(op.number & WATCH_TELLS != 0, Ordering::Release);
        state.keep(&op.has);
        if op.watched.len() > MOST_REMEMBERED || state.copies.len_of(&op.watched) > MOST_WATCHED_BYTES {
            return Err(Status::INVALID_VALUE);
        }
        if !state.has_thread {
            let shared = Arc::clone(&self.0);
            let thread = std::thread::Builder::new().name("rgpu-watch".into());
            thread.spawn(move || shared.serve()).map_err(|e| {
                tracing::error!("cannot start the thread that watches mirrors: {e}");
                Status::OUT_OF_MEMORY
            })?;
            state.has_thread = true;
        }
        let watch = Watch {
            client: Arc::clone(client),
            beside: Arc::downgrade(beside),
            seq,
            slot,
            number: op.number & !WATCH_TELLS,
            watched: op.watched.clone(),
            begun: Instant::now(),
            most: Duration::from_micros(op.most_us.into()).min(MOST_TIME),
            compared: Instant::now(),
        };
        if let Some(before) = state.watch.replace(watch) {
            before.answer(Ok(nothing()));
        }
        drop(state);
        self.0.changed.notify_one();
        Ok(())
    }
}

/// Bytes of a mirror, and where they go in a buffer.
struct Part {
    address: u64,
    at: Range<usize>,
}

/// Ranges that go to a buffer one after the other.
fn parts(ranges: impl Iterator<Item = (u64, usize)>) -> Vec<Part> {
    let mut end = 0;
    let part = |(address, len)| {
        let at = end..end + len;
        end = at.end;
        Part { address, at }
    };
    ranges.map(part).collect()
}

fn read(beside: &dyn Beside, parts: &[Part], to: &mut [u8]) -> Result<(), Status> {
    parts.iter().try_for_each(|part| beside.read(part.address, &mut to[part.at.clone()]))
}

/// Reads bytes as they were at one time: until two readings differ at most in words that stood still in
/// between, long enough to be read twice. False if it was too often; then the last reading counts.
///
/// The other bytes were the same from the first of these readings to the second. So there was a time when all
/// of them had these values. (Unless one has changed, and back.)
fn read_settled(beside: &dyn Beside, parts: &[Part], to: &mut [u8]) -> Result<bool, Status> {
    read(beside, parts, to)?;
    let mut again = vec![0; to.len()];
    // Where words of 8 bytes begin that a device changes meanwhile.
    let mut moving = BTreeSet::new();
    for _ in 0..MOST_READINGS {
        let rows = rows(parts, &moving);
        let still = read_still(beside, &rows)?;
        read(beside, parts, &mut again)?;
        let differing: Vec<usize> = parts.iter().flat_map(|part| differing(part, to, &again)).collect();
        let others = differing.into_iter().filter(|start| moving.insert(*start)).count();
        if let Some(values) = still.filter(|_| others == 0) {
            let mut values = &values[..];
            for Part { at, .. } in rows {
                let (value, after) = values.split_at(at.len());
                to[at].copy_from_slice(value);
                values = after;
            }
            return Ok(true);
        }
        to.copy_from_slice(&again);
    }
    Ok(false)
}

/// Reads a few rows of words until two readings are the same. `None` if it was too often.
fn read_still(beside: &dyn Beside, rows: &[Part]) -> Result<Option<Vec<u8>>, Status> {
    let rows = parts(rows.iter().map(|row| (row.address, row.at.len())));
    let mut bytes = vec![0; rows.last().map_or(0, |row| row.at.end)];
    read(beside, &rows, &mut bytes)?;
    let mut again = bytes.clone();
    for _ in 0..(MOST_STILL / rows.len().max(1)).max(1) {
        read(beside, &rows, &mut again)?;
        if bytes == again {
            return Ok(Some(bytes));
        }
        std::mem::swap(&mut bytes, &mut again);
    }
    Ok(None)
}

/// Where the words of 8 bytes begin in which two readings of a part differ. The last one may be shorter.
fn differing(part: &Part, before: &[u8], now: &[u8]) -> Vec<usize> {
    let differs = |word: &Range<usize>| before[word.clone()] != now[word.clone()];
    if !differs(&part.at) {
        return Vec::new();
    }
    let words = part.at.clone().step_by(8).map(|start| start..(start + 8).min(part.at.end));
    words.filter(differs).map(|word| word.start).collect()
}

/// Words, given by where they begin, as rows of which each is in one part.
fn rows(parts: &[Part], words: &BTreeSet<usize>) -> Vec<Part> {
    let mut rows: Vec<Part> = Vec::new();
    for part in parts {
        for start in words.range(part.at.clone()) {
            let at = *start..(start + 8).min(part.at.end);
            match rows.last_mut() {
                Some(last) if last.at.end == at.start && at.start > part.at.start => last.at.end = at.end,
                _ => rows.push(Part { address: part.address + (at.start - part.at.start) as u64, at }),
            }
        }
    }
    rows
}

impl Drop for Watches {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.over = true;
        state.watch = None;
        drop(state);
        self.0.changed.notify_one();
    }
}

fn nothing() -> HostWatchReply {
    HostWatchReply { words: Vec::new(), changed: Vec::new() }
}

impl Watch {
    fn answer(&self, answer: Result<HostWatchReply, Status>) {
        let (status, mut payload) = (answer.as_ref().err().copied(), Vec::new());
        if let Ok(reply) = &answer {
            reply.put(&mut Writer(&mut payload));
        }
        self.client.reply(self.seq, self.slot, status.unwrap_or(Status::SUCCESS), &payload);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doubles::{Listener, Told};
    use protocol::data::{HostOut, HostRange, Place};
    use protocol::handle::ContextId;
    use protocol::ops::memory::{MIRROR_PAGE, MirrorRange};
    use protocol::wire::Reader;
    use std::sync::atomic::AtomicU64;
    use std::sync::mpsc::{Receiver, channel};

    const PAGE: usize = MIRROR_PAGE as usize;
    const LONG: Duration = Duration::from_secs(240);
    const HOUR_US: u32 = u32::MAX;

    /// A mirror of four pages, from address 0.
    struct Mirror(Mutex<Vec<u8>>, Watches);

    impl Mirror {
        fn new() -> Arc<Mirror> {
            Arc::new(Mirror(Mutex::new(vec![0; 4 * PAGE]), Watches::default()))
        }

        fn set(&self, at: usize, byte: u8) {
            self.set_all(&[(at, byte)]);
        }

        /// Sets bytes, all of which are compared before this or all after it.
        fn set_all(&self, bytes: &[(usize, u8)]) {
            let mut all = self.0.lock().expect("no panic");
            bytes.iter().for_each(|(at, byte)| all[*at] = *byte);
        }
    }

    impl Beside for Mirror {
        fn is_needed(&self) -> bool {
            true
        }
        fn holds(&self, address: u64, len: u64) -> bool {
            address.saturating_add(len) <= 4 * MIRROR_PAGE
        }
        fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Status> {
            let (all, from) = (self.0.lock().expect("no panic"), address as usize);
            bytes.copy_from_slice(all.get(from..from + bytes.len()).ok_or(Status::INVALID_VALUE)?);
            Ok(())
        }
        fn write(&self, _address: u64, _bytes: &[u8]) -> Result<(), Status> {
            Ok(())
        }
        fn patch(&self, words: &[WordPatch]) -> Result<(), Status> {
            let mut all = self.0.lock().expect("no panic");
            for patch in words {
                let word =
                    all[patch.address as usize..].first_chunk_mut::<8>().ok_or(Status::INVALID_VALUE)?;
                *word = patch.apply(u64::from_le_bytes(*word)).to_le_bytes();
            }
            Ok(())
        }
        fn watches(&self) -> &Watches {
            &self.1
        }
        fn fail_device(&self, _number: u32, _status: Status) {}
    }

    /// A page where a kernel counts in a word of data and then in its flag, once while somebody reads more
    /// than a word. With `always`, also whenever somebody reads one.
    struct Restless {
        count: AtomicU64,
        always: bool,
        watches: Watches,
    }

    impl Restless {
        const DATA: usize = 0;
        const FLAG: usize = PAGE - 8;

        fn new(always: bool) -> Arc<Restless> {
            Arc::new(Restless { count: AtomicU64::new(1), always, watches: Watches::default() })
        }
    }

    impl Beside for Restless {
        fn is_needed(&self) -> bool {
            true
        }
        fn holds(&self, address: u64, len: u64) -> bool {
            address.saturating_add(len) <= MIRROR_PAGE
        }
        fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Status> {
            let before = self.count.load(Ordering::Relaxed);
            let now = before + u64::from(self.always || bytes.len() > 8);
            self.count.store(now, Ordering::Relaxed);
            let mut page = vec![0; PAGE];
            page[Self::DATA..Self::DATA + 8].copy_from_slice(&before.to_le_bytes());
            page[Self::FLAG..Self::FLAG + 8].copy_from_slice(&now.to_le_bytes());
            let from = address as usize;
            bytes.copy_from_slice(page.get(from..from + bytes.len()).ok_or(Status::INVALID_VALUE)?);
            Ok(())
        }
        fn write(&self, _address: u64, _bytes: &[u8]) -> Result<(), Status> {
            Ok(())
        }
        fn patch(&self, _words: &[WordPatch]) -> Result<(), Status> {
            Ok(())
        }
        fn watches(&self) -> &Watches {
            &self.watches
        }
        fn fail_device(&self, _number: u32, _status: Status) {}
    }

    struct Test {
        mirror: Arc<Mirror>,
        client: Arc<dyn Client>,
        answers: Receiver<(u64, HostWatchReply)>,
    }

    fn fetch_of(address: u64, len: usize, has: &[u64]) -> HostFetch {
        let range = HostRange { place: Place::Arena, offset: 0, len: len as u64 };
        let (ranges, dst) = (vec![MirrorRange { address, len: len as u64 }], HostOut(range));
        HostFetch { context: ContextId(0), ranges, settled: true, remember: true, has: has.to_vec(), dst }
    }

    fn watch_of(number: u64, after: u64, watched: &[u64], has: &[u64], most_us: u32) -> HostWatch {
        let (watched, has) = (watched.to_vec(), has.to_vec());
        HostWatch { context: ContextId(0), number, after, most_us, watched, has }
    }

    impl Test {
        fn new() -> Test {
            let (sender, answers) = channel();
            let client = Listener::new(move |told: Told<'_>| {
                let Told::Reply { seq, status, payload, .. } = told else { return };
                assert!(status.is_success());
                let reply = HostWatchReply::get(&mut Reader::new(payload)).expect("a reply");
                sender.send((seq, reply)).expect("the test waits");
            });
            Test { mirror: Mirror::new(), client: Arc::new(client), answers }
        }

        fn fetch(&self, address: u64, len: usize, has: &[u64]) -> Result<(Vec<u8>, Vec<u64>), Status> {
            self.mirror.1.fetch(&*self.mirror, &fetch_of(address, len, has))
        }

        fn begin(&self, number: u64, after: u64, watched: &[u64], has: &[u64], most_us: u32) {
            let beside: Arc<dyn Beside> = self.mirror.clone();
            let op = watch_of(number, after, watched, has, most_us);
            self.mirror.1.begin(&self.client, &beside, (number, 0), &op).expect("a watch");
        }

        /// The word, if the client is told another one.
        fn news(&self) -> Option<u64> {
            let (sender, told) = channel();
            let client = Listener::new(move |told: Told<'_>| {
                let Told::Published(updates) = told else { return };
                let words = updates.iter().map(|update| (update.kind, update.value));
                words.for_each(|word| sender.send(word).expect("the test waits"));
            });
            self.mirror.1.before_news(&client, &*self.mirror);
            drop(client);
            let words: Vec<(u32, u64)> = told.iter().collect();
            assert!(words.len() < 2 && words.iter().all(|(kind, _)| *kind == progress::WATCHED), "{words:?}");
            words.first().map(|(_, value)| *value)
        }

        /// The number of the watch, the words and the other ranges.
        fn answer(&self) -> (u64, Vec<(u64, u64)>, Vec<u64>) {
            let (seq, reply) = self.answers.recv_timeout(LONG).expect("an answer");
            (seq, reply.words.iter().map(|word| (word.address, word.value)).collect(), reply.changed)
        }
    }

    #[test]
    fn a_watch_is_answered_with_what_a_device_has_changed() {
        let test = Test::new();
        let [first, second, third] = [0, PAGE as u64, 2 * PAGE as u64];
        for page in [first, second, third] {
            assert_eq!(test.fetch(page, PAGE, &[first, second, third]), Ok((vec![0; PAGE], vec![])));
        }
        let all = [first, second, third];
        test.begin(1, 0, &[first, second], &all, HOUR_US);
        // The client's own change, of which it is not told. Then one that is watched and one that is not.
        let own = [WordPatch { address: first, mask: 0xff, value: 5 }];
        test.mirror.1.patch(&*test.mirror, &own).expect("a mirror");
        test.mirror.set_all(&[(PAGE + 9, 1), (2 * PAGE + 100, 9)]);
        assert_eq!(test.answer(), (1, vec![(second + 8, 0x100)], vec![third]));
        // The client has not taken it over, and then it has.
        test.begin(2, 0, &[first, second], &all, HOUR_US);
        assert_eq!(test.answer(), (2, vec![(second + 8, 0x100)], vec![third]));
        test.begin(3, 2, &[first, second], &[first, second], 1000);
        assert_eq!(test.answer(), (3, vec![], vec![]));
    }

    #[test]
    fn before_the_client_learns_of_the_end_of_work_it_is_told_what_has_changed() {
        let test = Test::new();
        let has = [0, MIRROR_PAGE];
        has.iter().for_each(|page| _ = test.fetch(*page, PAGE, &has).expect("a mirror"));
        // An older client does not ask for the word.
        test.begin(1, 0, &[0], &has, HOUR_US);
        assert_eq!(test.news(), None);
        let watch = |number, after| test.begin(number | WATCH_TELLS, after, &[0], &has, HOUR_US);
        watch(2, 0);
        assert_eq!(test.answer().0, 1);
        assert_eq!(test.news(), Some(4));
        assert_eq!(test.news(), None, "as before");
        // Pages that are not watched count too, and the watch is answered at once.
        test.mirror.set(PAGE, 1);
        assert_eq!(test.news(), Some(5));
        assert_eq!(test.answer(), (2 | WATCH_TELLS, vec![], vec![MIRROR_PAGE]));
        // It has not been taken over, which the word presumes.
        assert_eq!(test.news(), None);
        test.mirror.set(0, 7);
        assert_eq!(test.news(), Some(0));
        watch(3, 2);
        // Whoever sees the change first.
        assert_eq!(test.news(), Some(7));
        assert_eq!(test.answer(), (3 | WATCH_TELLS, vec![(0, 7)], vec![MIRROR_PAGE]));
        test.begin(4 | WATCH_TELLS, 3, &[0], &[0], HOUR_US);
        assert_eq!(test.news(), Some(8));
        // Too much to compare each time.
        for page in 0..=MOST_BEFORE_NEWS as u64 / MIRROR_PAGE {
            test.mirror.1.0.lock().copies.remember((page + 9) * MIRROR_PAGE, vec![0; PAGE]);
        }
        assert_eq!(test.news(), Some(0));
    }

    #[test]
    fn a_watch_ends_with_the_next_one_and_with_its_time() {
        let test = Test::new();
        let has = [0, MIRROR_PAGE];
        has.iter().for_each(|page| _ = test.fetch(*page, PAGE, &has).expect("a mirror"));
        test.begin(1, 0, &[0], &has, HOUR_US);
        test.begin(2, 0, &[MIRROR_PAGE], &has, 1000);
        assert_eq!(test.answer(), (1, vec![], vec![]));
        assert_eq!(test.answer(), (2, vec![], vec![]));
        test.mirror.set(0, 1);
        test.begin(3, 0, &[MIRROR_PAGE], &has, 0);
        // What is not watched is compared as well if that was not done just before.
        let (number, words, changed) = test.answer();
        assert!(number == 3 && words.is_empty() && (changed.is_empty() || changed == [0]), "{changed:?}");
    }

    #[test]
    fn a_page_that_is_new_as_a_whole_is_not_listed_word_by_word() {
        let test = Test::new();
        test.fetch(0, PAGE, &[]).expect("a mirror");
        (0..PAGE).for_each(|at| test.mirror.set(at, 1));
        test.begin(1, 0, &[0], &[0], HOUR_US);
        let (seq, words, changed) = test.answer();
        // The watch may see the first bytes before the rest is written.
        assert!(seq == 1 && (changed == [0] || !words.is_empty()));
    }

    #[test]
    fn a_fetch_names_what_the_client_has_and_a_device_has_changed() {
        let test = Test::new();
        test.fetch(0, PAGE, &[]).expect("a mirror");
        test.fetch(MIRROR_PAGE, PAGE, &[0]).expect("a mirror");
        test.mirror.set(5, 1);
        test.mirror.set(PAGE + 5, 1);
        // The client no longer has the second.
        let (bytes, changed) = test.fetch(2 * MIRROR_PAGE, 2 * PAGE, &[0]).expect("a mirror");
        assert_eq!((bytes.len(), changed), (2 * PAGE, vec![0]));
        let (bytes, changed) = test.fetch(0, PAGE, &[2 * MIRROR_PAGE]).expect("a mirror");
        assert_eq!((bytes[5], changed), (1, vec![]));
    }

    #[test]
    fn a_page_is_as_it_was_at_one_time_although_a_kernel_counts_in_it() {
        let test = Test::new();
        let restless = Restless::new(false);
        let word = |bytes: &[u8], at: usize| {
            bytes[at..].first_chunk().map_or(0, |word: &[u8; 8]| u64::from_le_bytes(*word))
        };
        let (bytes, _) = restless.watches.fetch(&*restless, &fetch_of(0, PAGE, &[])).expect("a mirror");
        let [data, flag] = [Restless::DATA, Restless::FLAG].map(|at| word(&bytes, at));
        assert!(data == flag && data > 0, "data {data}, flag {flag}");
        // What a watch tells, too, although readings of the whole page are never the same.
        let beside: Arc<dyn Beside> = restless.clone();
        let op = watch_of(1, 0, &[0], &[0], HOUR_US);
        restless.watches.begin(&test.client, &beside, (1, 0), &op).expect("a watch");
        let (_, words, changed) = test.answer();
        assert!(changed.is_empty() && words.len() == 2, "{words:?}, {changed:?}");
        assert!(words[0].1 == words[1].1 && words[0].1 > data, "{words:?}");
    }

    #[test]
    fn a_word_that_never_stands_still_is_given_and_not_told() {
        let test = Test::new();
        let restless = Restless::new(true);
        restless.watches.fetch(&*restless, &fetch_of(0, PAGE, &[])).expect("a mirror");
        let beside: Arc<dyn Beside> = restless.clone();
        let op = watch_of(1, 0, &[0], &[0], HOUR_US);
        restless.watches.begin(&test.client, &beside, (1, 0), &op).expect("a watch");
        assert_eq!(test.answer(), (1, vec![], vec![0]));
    }

    #[test]
    fn what_is_in_no_mirror_or_too_much_is_refused() {
        let test = Test::new();
        assert_eq!(test.fetch(4 * MIRROR_PAGE, PAGE, &[]), Err(Status::INVALID_VALUE));
        assert_eq!(test.fetch(0, 0, &[]), Err(Status::INVALID_VALUE));
        let has: Vec<u64> = (0..=MOST_REMEMBERED as u64).collect();
        let fetched: Vec<_> = has.iter().map(|at| test.fetch(*at, 1, &has).is_ok()).collect();
        assert_eq!(fetched.iter().filter(|fetched| **fetched).count(), MOST_REMEMBERED);
    }
}
