//! Managed memory: one address for host and device, which take turns using it.
//!
//! It is device memory in a part of the device's window, and this process reserves the same addresses. The
//! device's memory is the home of every byte. The host has copies of blocks that the program has touched
//! since the device last worked ([`blocks`]); a page fault fetches them ([`page_faults`]). Each launch first
//! takes all copies back ([`before_work`]), each copy or fill those of its range ([`lend`]): changed ones go
//! to the device, and all become absent.
//!
//! ```text
//!   program touches a page ──▶ fault ──▶ wait for the device ──▶ fetch a block ──▶ the program continues
//!   launch ──▶ changed blocks go to the device, all become absent ──▶ the kernel uses only the device's memory
//! ```
//!
//! So a kernel runs at the speed of device memory, and a program that alternates between the sides pays only
//! for what it touches. Host and device do not use the memory at the same time (`CONCURRENT_MANAGED_ACCESS`
//! is 0): an access of the host waits for the device. While the device waits for the host (for a host
//! function, or a word that the program writes), an access does not wait, and the device gets everything back
//! before it continues ([`before_going_on`]). If other streams may be working meanwhile, both sides have the
//! block at the same time ([`shared_blocks`]).
//!
//! Pinned memory that kernels use on a device that cannot share it is handled in the same way ([`mirror`]),
//! but both sides may have it at the same time whenever the device works. If kernels of several servers use
//! it, nobody owns its blocks, and its words are compared ([`compared_words`]).
//!
//! Variables (`__managed__`) are where the server's driver has put them. Their pages are handled in the same
//! way.

pub(crate) mod advice;
pub(crate) mod blocks;
mod changes;
pub(crate) mod compared_words;
pub(crate) mod forks;
pub(crate) mod landing;
pub(crate) mod mirror;
pub(crate) mod page_faults;
mod page_sets;
mod publishing;
mod read_ahead;
pub(crate) mod shared_blocks;
mod shared_reads;
mod watch;
mod watched_pages;
mod write_turns;

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard};

use crate::abi::result::Result;
use crate::memory::managed::advice::Advised;
use crate::memory::managed::blocks::{BLOCK, Blocks, Run};
use crate::memory::managed::compared_words::Compared;
use crate::memory::managed::mirror::Mirrors;
use crate::memory::managed::page_sets::PageSets;
use crate::memory::managed::shared_blocks::Together;
use crate::memory::managed::watch::Watch;
use crate::memory::managed::write_turns::Publishing;
use crate::memory::transfer::Transfer;
use crate::process::context::Context;
use crate::process::driver::{Device, Driver, Memory, Tag, driver};
use crate::process::fences;
use crate::process::host_calls;
use crate::process::ids::unique_id;
use crate::process::stream::Stream;
use crate::streams::stream_table;
use client::counters::{self, COUNTERS};
use client::memory::Backing;
use client::ops::copy::Memset;
use client::ops::memory::{MemAlloc, MemFree, is_managed};
use client::pages::{PAGE, Pages};
use client::{Status, lock, log};

/// Pages of managed memory, and their contents on the device.
pub(crate) struct Piece {
    context: &'static Context,
    blocks: Blocks,
    /// The parts that have bytes: all of an allocation, or the variables in some pages.
    parts: Vec<Range<u64>>,
    pub advised: Advised,
    /// Whether it is pinned memory, which host and device may use at the same time.
    pinned: bool,
}

/// All memory.
const ALL: Range<u64> = 0..u64::MAX;

pub(crate) struct State {
    /// By first address.
    pub pieces: BTreeMap<u64, (u64, Piece)>,
    /// Number of pieces outside of the windows' parts for managed memory.
    elsewhere: usize,
    /// The pieces that the next work of the device must check.
    held: BTreeSet<u64>,
    /// The stream of each context on which blocks travel. It is separate from all others, which may be
    /// waiting for these transfers.
    movers: Vec<(&'static Context, Arc<Stream>)>,
    /// Pinned memory that the host was given while the device worked.
    together: Vec<Together>,
    /// Whether another one is being given.
    gives: bool,
    /// Which pages of it the program uses together.
    sets: PageSets,
    /// When the program's changes there are sent.
    publishing: Publishing,
    /// What servers watch.
    watches: Vec<Watch>,
    /// Pinned memory whose words are compared.
    compared: Vec<Compared>,
    /// Counts the changes of what both sides have of it.
    version: u64,
    /// The server's mirrors of pinned memory.
    mirrors: Mirrors,
}

pub(crate) static STATE: Mutex<State> = Mutex::new(State::new());

/// Number of pieces, and of those the host has copies of. Every launch checks this without a lock.
static PIECES: AtomicUsize = AtomicUsize::new(0);

static HELD: AtomicUsize = AtomicUsize::new(0);

/// Number of pieces outside the windows' parts for managed memory: variables and pinned memory. The others
/// are recognized by their address.
static ELSEWHERE: AtomicUsize = AtomicUsize::new(0);

/// Held for reading while work is enqueued and for writing while a fault is answered, so that no work comes
/// in between.
pub(crate) static ORDER: RwLock<()> = RwLock::new(());

thread_local! {
    /// Whether the thread holds [`ORDER`] for reading.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// While a thread has this, no fault is answered as if the device were idle. The thread enqueues and records
/// its work before it drops this.
pub(crate) struct Order(Option<RwLockReadGuard<'static, ()>>);

impl Order {
    /// For whoever enqueues work, or takes a stream that may have work out of where faults look for it.
    pub(crate) fn take() -> Order {
        // A graph's launch already holds the lock when its copies request it. Locking again could deadlock
        // with a waiting writer.
        if INSIDE.get() {
            return Order(None);
        }
        let guard = ORDER.read().unwrap_or_else(PoisonError::into_inner);
        INSIDE.set(true);
        Order(Some(guard))
    }
}

impl Drop for Order {
    fn drop(&mut self) {
        if self.0.is_some() {
            INSIDE.set(false);
        }
    }
}

/// The process's watched pages, and the thread that answers their faults.
pub(crate) fn pages(driver: &'static Driver) -> Result<&'static Pages> {
    static PAGES: OnceLock<Option<Pages>> = OnceLock::new();
    static START: std::sync::Once = std::sync::Once::new();
    let opened = PAGES.get_or_init(|| {
        Pages::open()
            .inspect_err(|error| log::warn(format_args!("this process cannot use managed memory: {error}")))
            .ok()
    });
    let pages = opened.as_ref().ok_or(Status::NOT_SUPPORTED)?;
    START.call_once(|| {
        let thread = std::thread::Builder::new().name("rgpu-pages".into());
        if let Err(error) = thread.spawn(move || page_faults::serve(driver, pages)) {
            log::error(format_args!(
                "cannot start a thread for managed memory: {error}; `ulimit -u` limits threads"
            ));
        }
    });
    Ok(pages)
}

/// Memory for the part of a window that the host uses as well.
struct Both<'d>(&'static Driver, &'d Device);

impl Backing for Both<'_> {
    fn grow(&self, device: u32, address: u64, size: u64) -> Result {
        let pages = pages(self.0)?;
        pages.map(address as usize, size as usize).map_err(|error| {
            log::warn(format_args!("cannot map {size} bytes of managed memory at {address:#x}: {error}"));
            Status::OUT_OF_MEMORY
        })?;
        let grown = self.1.grow(device, address, size);
        // To the server a piece is one allocation.
        grown
            .and_then(|()| self.1.server.session.append(&MemAlloc { address, size }).map(|_| ()))
            .inspect_err(|_| {
                pages.unmap(address as usize, size as usize);
            })
    }

    fn shrink(&self, device: u32, address: u64, size: u64) -> Result {
        self.1.server.session.append(&MemFree { address })?;
        self.1.shrink(device, address, size)?;
        pages(self.0)?.unmap(address as usize, size as usize);
        Ok(())
    }
}

/// Whether a piece has other addresses than the windows' parts for managed memory. Pinned memory may also be
/// in windows that no device has.
fn is_elsewhere(base: u64, piece: &Piece) -> bool {
    piece.pinned || !is_managed(base)
}

impl State {
    const fn new() -> State {
        State {
            pieces: BTreeMap::new(),
            elsewhere: 0,
            held: BTreeSet::new(),
            movers: Vec::new(),
            together: Vec::new(),
            gives: false,
            sets: PageSets::new(),
            publishing: Publishing::new(),
            watches: Vec::new(),
            compared: Vec::new(),
            version: 0,
            mirrors: Mirrors::new(),
        }
    }

    pub fn find(&self, address: u64) -> Option<(u64, u64)> {
        let (base, (size, _)) = self.pieces.range(..=address).next_back()?;
        (address - base < *size).then_some((*base, *size))
    }

    fn counted(&self) {
        PIECES.store(self.pieces.len() + self.compared.len(), Ordering::Release);
        ELSEWHERE.store(self.elsewhere + self.compared.len(), Ordering::Release);
        // Memory that is not watched may have been changed at any time.
        HELD.store(self.held.len() + self.compared.len(), Ordering::Release);
    }

    fn insert(&mut self, base: u64, size: u64, piece: Piece) {
        fences::host_sees();
        if piece.blocks.is_held() {
            self.held.insert(base);
        }
        self.elsewhere += usize::from(is_elsewhere(base, &piece));
        self.pieces.insert(base, (size, piece));
        self.counted();
    }

    fn remove(&mut self, base: u64) -> Option<(u64, Piece)> {
        self.held.remove(&base);
        self.together.retain(|together| together.base != base);
        self.count_given();
        let piece = self.pieces.remove(&base);
        if let Some((size, _)) = &piece {
            self.sets.forget(&(base..base + size));
        }
        self.elsewhere -= usize::from(piece.as_ref().is_some_and(|(_, piece)| is_elsewhere(base, piece)));
        self.counted();
        piece
    }

    /// The stream on which bytes move between the sides.
    fn mover(&mut self, context: &'static Context) -> Result<Arc<Stream>> {
        let found = self.movers.iter().find(|(other, _)| std::ptr::eq(*other, context));
        if let Some((_, stream)) = found {
            return Ok(stream.clone());
        }
        let stream = stream_table::unnamed(context)?;
        self.movers.push((context, stream.clone()));
        Ok(stream)
    }

    /// First addresses of the pieces in a range that the next work of the device must check.
    fn held_in(&self, range: &Range<u64>) -> Vec<u64> {
        let touches = |base: &&u64| {
            self.pieces.get(base).is_some_and(|(size, _)| **base < range.end && range.start < *base + size)
        };
        self.held.iter().filter(touches).copied().collect()
    }

    /// Before new work: gives the device a piece, except for what the host can only read and the server
    /// watches. So the program still sees when the device changes that, for example a flag that it looks at
    /// after each launch.
    fn give_unwatched(&mut self, driver: &'static Driver, base: u64) -> Result {
        let Some((_, piece)) = self.pieces.get(&base) else { return Ok(()) };
        let stay = if piece.pinned && !piece.blocks.is_zero() { self.watched_in(base) } else { Vec::new() };
        let ends = stay.iter().map(|run| run.address).chain([ALL.end]);
        let starts = [ALL.start].into_iter().chain(stay.iter().map(|run| run.range().end));
        for gap in starts.zip(ends).map(|(start, end)| start..end) {
            let Some((_, piece)) = self.pieces.get(&base) else { return Ok(()) };
            if stay.is_empty() || piece.has_any(&gap) {
                self.count_taken(base, &gap);
                self.give(driver, base, &gap)?;
            }
        }
        Ok(())
    }

    /// Counts why new work takes pages of pinned memory in a range.
    fn count_taken(&self, base: u64, range: &Range<u64>) {
        let Some((_, piece)) = self.pieces.get(&base).filter(|(_, piece)| piece.pinned) else { return };
        let held: u64 = piece.blocks.held(range).iter().map(|run| run.len).sum();
        let here = self.together.iter().filter(|together| together.base == base && together.touches(range));
        let together: u64 = here.map(|together| together.run.len).sum();
        let reasons = [(&COUNTERS.pages_idle, held > together), (&COUNTERS.pages_unwatched, together > 0)];
        reasons.into_iter().filter(|(_, is)| *is).for_each(|(counter, _)| counters::add(counter, 1));
    }

    /// Gives the device a range of one piece: sends the bytes that the host has changed, and takes the blocks
    /// away from the host.
    fn give(&mut self, driver: &'static Driver, base: u64, range: &Range<u64>) -> Result {
        let Some((_, piece)) = self.pieces.get(&base) else { return Ok(()) };
        if piece.pinned && piece.has_any(range) {
            self.sets.taken();
        }
        self.part(driver, |together| together.base == base && together.touches(range))?;
        let Some((_, piece)) = self.pieces.get(&base) else { return Ok(()) };
        let (dirty, held) = (piece.blocks.dirty(range), piece.blocks.held(range));
        let pages = pages(driver)?;
        if piece.pinned {
            for run in &dirty {
                let (at, len) = (run.address as usize, run.len as usize);
                pages.forbid_writes(at, len).map_err(|_| Status::UNKNOWN)?;
                // SAFETY: blocks that the host has, and that nobody changes.
                let bytes = unsafe { std::slice::from_raw_parts(pages.bytes(at), len) };
                match piece.blocks.is_zero() {
                    true => drop(mirror::write_to_zeroes(piece.context, run.address, bytes)?),
                    false => mirror::write(piece.context, run.address, bytes)?,
                }
            }
        } else if !dirty.is_empty() {
            let stream = self.mover(piece.context)?;
            let transfer = Transfer { stream: &stream };
            let Some((_, piece)) = self.pieces.get(&base) else { return Ok(()) };
            for run in &dirty {
                pages.forbid_writes(run.address as usize, run.len as usize).map_err(|_| Status::UNKNOWN)?;
                for part in piece.parts_in(run) {
                    let len = (part.end - part.start) as usize;
                    // SAFETY: a block that the host has, and that nobody changes.
                    unsafe {
                        transfer.send(part.start, pages.bytes(part.start as usize), len, |_, _| Ok(()))
                    }?;
                }
            }
            stream.synchronize()?;
        }
        for run in &held {
            pages.clear(run.address as usize, run.len as usize).map_err(page_faults::failed)?;
            if let Some((_, piece)) = self.pieces.get_mut(&base) {
                piece.blocks.taken(&(run.address..run.address + run.len));
            }
        }
        if let Some((_, piece)) = self.pieces.get_mut(&base) {
            piece.blocks.taken(range);
            if !piece.blocks.is_held() {
                self.held.remove(&base);
                self.counted();
            }
        }
        Ok(())
    }
}

impl Piece {
    /// Whether the host has something in a range.
    fn has_any(&self, range: &Range<u64>) -> bool {
        !self.blocks.held(range).is_empty()
    }

    /// The parts of a run that have bytes.
    fn parts_in(&self, run: &Run) -> impl Iterator<Item = Range<u64>> {
        let run = run.address..run.address + run.len;
        let inside = move |part: &Range<u64>| part.start.max(run.start)..part.end.min(run.end);
        self.parts.iter().map(inside).filter(|part| !part.is_empty())
    }
}

/// Called before work is enqueued that may use any memory. Sends the host's changes to the device. Enqueue
/// the work before dropping the guard.
#[inline]
pub(crate) fn before_work(driver: &'static Driver) -> Result<Option<Order>> {
    if PIECES.load(Ordering::Acquire) == 0 {
        return Ok(None);
    }
    let order = Order::take();
    if HELD.load(Ordering::Acquire) != 0 {
        give_all(driver)?;
    }
    Ok(Some(order))
}

/// Gives the device all blocks that the host has, before a stream that was waiting for this process
/// continues.
pub(crate) fn before_going_on(driver: &'static Driver) {
    // `HELD` alone is not enough: a fault may be in the middle of being answered as if the stream were
    // stopped. Once the lock is free, the fault has been answered and counts as held.
    if PIECES.load(Ordering::Acquire) != 0
        && let Err(status) = give_all(driver)
    {
        log::error(format_args!(
            "the program's changes of managed memory cannot be sent to the device ({status}): kernels may read old values"
        ));
    }
}

#[cold]
fn give_all(driver: &'static Driver) -> Result {
    let mut state = lock(&STATE);
    if state.publishing.due().is_some() {
        counters::add(&COUNTERS.pages_sent, 1);
    }
    state.publish_due(driver)?;
    for base in state.held.clone() {
        let given_up = state.pieces.get(&base).is_some_and(|(_, piece)| piece.context.is_given_up());
        if !given_up {
            state.give_unwatched(driver, base)?;
        }
    }
    state.send_compared(&ALL).map(drop)
}

/// Called before work is enqueued that writes a range of memory. Gives the device the blocks of it that the
/// host has. Enqueue the work before dropping the guard: until then the host cannot fetch bytes that the work
/// will change, and later overwrite its result with them.
#[inline]
pub(crate) fn before_work_on(address: u64, len: u64) -> Result<Option<Order>> {
    let pieces = PIECES.load(Ordering::Acquire) != 0;
    if !pieces || !is_managed(address) && ELSEWHERE.load(Ordering::Acquire) == 0 {
        return Ok(None);
    }
    let order = Order::take();
    before_telling()?;
    lend(address, len)?;
    Ok(Some(order))
}

/// Called before work is enqueued by which a running kernel may learn that the program has changed something:
/// a copy or a fill may write a flag. Sends these changes to the device.
pub(crate) fn before_telling() -> Result {
    if HELD.load(Ordering::Acquire) == 0 {
        return Ok(());
    }
    let driver = driver()?;
    let mut state = lock(&STATE);
    state.publish_due(driver)?;
    if compared_words::is_due() { state.send_compared(&ALL).map(drop) } else { Ok(()) }
}

/// Gives the device the host's blocks in a range of managed memory.
pub(crate) fn lend(address: u64, len: u64) -> Result {
    if HELD.load(Ordering::Acquire) == 0 {
        return Ok(());
    }
    let driver = driver()?;
    let range = address..address + len;
    let mut state = lock(&STATE);
    for base in state.held_in(&range) {
        if state.pieces.get(&base).is_some_and(|(_, piece)| piece.pinned && piece.has_any(&range)) {
            counters::add(&COUNTERS.pages_lent, 1);
        }
        state.give(driver, base, &range)?;
    }
    state.send_compared(&range).map(drop)
}

/// Sends the host's changes in a range that a server is about to read. The host keeps what it has, as far as
/// its next changes there are noticed.
pub(crate) fn send_changes(address: u64, len: u64) -> Result {
    if HELD.load(Ordering::Acquire) == 0 {
        return Ok(());
    }
    let driver = driver()?;
    let range = address..address + len;
    let mut state = lock(&STATE);
    state.publish_due(driver)?;
    for base in state.held_in(&range) {
        if state.pieces.get(&base).is_some_and(|(_, piece)| !piece.blocks.dirty(&range).is_empty()) {
            state.give(driver, base, &range)?;
        }
    }
    state.send_compared(&range).map(drop)
}

/// Whether an address is in managed memory of any kind. Of [mirrored memory](mirror), that includes what
/// shares a page with other memory.
#[inline]
pub(crate) fn is_here(address: u64) -> bool {
    PIECES.load(Ordering::Acquire) != 0 && {
        let state = lock(&STATE);
        state.find(address).is_some() || state.mirrors.has(address)
    }
}

/// Whether the host accesses the memory at an address without waiting for devices, so that a synchronous copy
/// or fill must be done when the call returns. With managed memory, accesses do that only while a stream
/// waits for this process.
pub(crate) fn is_seen_at_once(address: u64) -> bool {
    mirror::is_here(address) || host_calls::any_has_waited() && is_here(address)
}

/// Whether an address only shares a page with managed memory, as a module's other variables may.
pub(crate) fn is_beside(address: u64) -> bool {
    let state = lock(&STATE);
    let piece = state.find(address).and_then(|(base, _)| state.pieces.get(&base));
    piece.is_some_and(|(_, piece)| !piece.parts.iter().any(|part| part.contains(&address)))
}

/// Allocates on a context's device, from a pool or none (0). The memory is zero when it is first touched.
pub(crate) fn alloc(
    driver: &'static Driver,
    context: &'static Context,
    size: u64,
    pool: usize,
) -> Result<u64> {
    pages(driver)?;
    let device = driver.devices.get(context.device as usize).ok_or(Status::INVALID_DEVICE)?;
    let tag = Tag { context, buffer: unique_id(), pool, sync_memops: false };
    let address = lock(&device.managed).alloc(size, tag, &Both(driver, device))?;
    let reserved = size.next_multiple_of(PAGE as u64);
    prepare(driver, context, address, reserved).inspect_err(|_| {
        lock(&device.managed).free(address, &Both(driver, device));
    })?;
    Ok(address)
}

fn prepare(driver: &'static Driver, context: &'static Context, address: u64, size: u64) -> Result {
    let pages = pages(driver)?;
    zero(context, address, size)?;
    let mut state = lock(&STATE);
    pages.open_range(address as usize, size as usize).map_err(|_| Status::OUT_OF_MEMORY)?;
    let all = address..address + size;
    let blocks = Blocks::new(address, size, BLOCK, true);
    state.insert(
        address,
        size,
        Piece { context, blocks, parts: vec![all], advised: Advised::default(), pinned: false },
    );
    Ok(())
}

/// Zeroes memory that the program does not have yet. So the state need not be locked while the server, which
/// may not answer, does that.
fn zero(context: &'static Context, address: u64, size: u64) -> Result {
    let stream = lock(&STATE).mover(context)?;
    let width = size / 4;
    let zero = Memset { stream: stream.id, dst: address, pitch: 0, value: 0, element: 4, width, height: 1 };
    stream.work(&zero)?;
    stream.synchronize()
}

/// Frees an allocation that nothing uses. Returns false if there is none at this address.
pub(crate) fn free(driver: &'static Driver, device: &Device, address: u64) -> Result<bool> {
    let mut memory = lock(&device.managed);
    if memory.find(address).is_none_or(|(base, _)| base != address) {
        return Ok(false);
    }
    close(driver, address)?;
    Ok(memory.free(address, &Both(driver, device)).is_some())
}

/// Gives back an allocation that was freed in the order of a stream, which has passed the free.
pub(crate) fn give_back(
    driver: &'static Driver,
    device: &Device,
    memory: &mut Memory,
    address: u64,
) -> Result {
    close(driver, address)?;
    memory.give_back(address, |_| 0, &Both(driver, device));
    Ok(())
}

fn close(driver: &'static Driver, address: u64) -> Result {
    let pages = pages(driver)?;
    if let Some((size, _)) = lock(&STATE).remove(address) {
        pages.close_range(address as usize, size as usize);
    }
    Ok(())
}

/// Notes that an allocation is used again, in another context maybe.
pub(crate) fn used_again(address: u64, context: &'static Context) {
    if let Some((_, piece)) = lock(&STATE).pieces.get_mut(&address) {
        piece.context = context;
    }
}

/// Drops the managed memory of a device that the server resets.
pub(crate) fn reset(driver: &'static Driver, device: &Device) {
    if PIECES.load(Ordering::Acquire) == 0 && lock(&STATE).movers.is_empty() {
        return;
    }
    let Ok(pages) = pages(driver) else { return };
    let mut state = lock(&STATE);
    let of_device =
        |(_, (_, piece)): &(&u64, &(u64, Piece))| piece.context.device == device.ordinal && !piece.pinned;
    let gone: Vec<u64> = state.pieces.iter().filter(of_device).map(|(base, _)| *base).collect();
    for base in gone {
        // Memory in the window goes with its backing, below.
        if let Some((size, _)) = state.remove(base)
            && !is_managed(base)
        {
            pages.unmap(base as usize, size as usize);
        }
    }
    state.movers.retain(|(context, _)| context.device != device.ordinal);
    drop(state);
    let mut memory = lock(&device.managed);
    for (address, size) in memory.chunks() {
        pages.unmap(address as usize, size as usize);
    }
    memory.reset();
}

/// Frees the managed memory of a context that is being destroyed, except what streams of other contexts are
/// to free. Calls `gone` with the pool and the size of
/// each allocation.
pub(crate) fn forget(driver: &'static Driver, context: &'static Context, gone: impl Fn(usize, u64)) {
    // A device of another server, which may not answer, has none of its memory.
    for device in driver.devices.iter().filter(|device| std::ptr::eq(device.server, context.server)) {
        let is_its = |tag: &Tag| std::ptr::eq(tag.context, context);
        let addresses = lock(&device.managed).addresses_where(is_its);
        for address in addresses {
            let found = lock(&device.managed).find(address).map(|(_, found)| (found.tag, found.size));
            if let Some((tag, size)) = found {
                gone(tag.pool, size);
            }
            // What cannot be freed now goes with the session.
            let _ = free(driver, device, address);
        }
    }
    lock(&STATE).movers.retain(|(other, _)| !std::ptr::eq(*other, context));
}

/// Makes a module's managed variable accessible to the host.
///
/// # Errors
/// `NOT_SUPPORTED` if this process has something else at its address.
pub(crate) fn variable(
    driver: &'static Driver,
    context: &'static Context,
    address: u64,
    size: u64,
) -> Result {
    let pages = pages(driver)?;
    let whole = address..address.checked_add(size).ok_or(Status::UNKNOWN)?;
    let page = PAGE as u64;
    let mut state = lock(&STATE);
    let mut at = whole.start & !(page - 1);
    while at < whole.end {
        let part = whole.start.max(at)..whole.end;
        let Some((base, len)) = state.find(at) else {
            // Except where something else of this library is.
            let end = state.pieces.range(at..).next().map_or(u64::MAX, |(base, _)| *base);
            let len = whole.end.next_multiple_of(page).min(end) - at;
            let taken = pages
                .map(at as usize, len as usize)
                .and_then(|()| pages.open_range(at as usize, len as usize));
            if let Err(error) = taken {
                log::warn(format_args!(
                    "the GPU has a __managed__ variable at {address:#x}, where this process has something else ({error}): \
                     the program cannot access the variable"
                ));
                return Err(Status::NOT_SUPPORTED);
            }
            let part = part.start..part.end.min(at + len);
            let blocks = Blocks::new(at, len, BLOCK, false);
            let piece =
                Piece { context, blocks, parts: vec![part], advised: Advised::default(), pinned: false };
            state.insert(at, len, piece);
            at += len;
            continue;
        };
        // The host's copies of these pages lack the new variable's bytes.
        state.give(driver, base, &ALL)?;
        if let Some((_, piece)) = state.pieces.get_mut(&base) {
            let part = part.start..part.end.min(base + len);
            if !piece.parts.contains(&part) {
                piece.parts.push(part);
            }
        }
        at = base + len;
    }
    Ok(())
}

/// Removes a module's managed variable.
pub(crate) fn forget_variable(address: u64, size: u64) {
    let Ok(driver) = driver() else { return };
    let Ok(pages) = pages(driver) else { return };
    let range = address..address + size;
    let mut state = lock(&STATE);
    let mut at = address;
    while at < range.end {
        let Some((base, len)) = state.find(at) else { return };
        at = base + len;
        let Some((_, piece)) = state.pieces.get_mut(&base) else { return };
        piece.parts.retain(|part| part.end <= range.start || range.end <= part.start);
        if piece.parts.is_empty() {
            state.remove(base);
            pages.unmap(base as usize, len as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::process::driver::Server;
    use client::handle::ContextId;

    #[test]
    fn a_server_that_does_not_answer_while_memory_is_allocated_stops_no_other() {
        let server = Server::unused();
        let context = Context::new(ContextId(0), server, 0, 0, false);
        lock(&STATE).mover(context).unwrap();
        let before = server.session.last_seq();
        let zeroes = std::thread::spawn(move || zero(context, 1 << 40, PAGE as u64));
        while server.session.last_seq() == before {
            std::thread::yield_now();
        }
        let (says, said) = mpsc::channel();
        std::thread::spawn(move || {
            drop(lock(&STATE));
            says.send(()).unwrap();
        });
        // If this waited for the answer, so would the test: it never comes.
        said.recv_timeout(Duration::from_secs(60)).expect("the state is locked");
        server.lose();
        assert!(zeroes.join().unwrap().is_err());
        lock(&STATE).movers.retain(|(other, _)| !std::ptr::eq(*other, context));
    }
}
