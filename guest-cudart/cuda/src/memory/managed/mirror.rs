//! Mirrored pinned memory: pinned memory that kernels use on a device that is in another machine or shares no
//! memory.
//!
//! The server allocates memory in its own machine at the same addresses, the mirror. The whole pages of the
//! program's memory are watched like managed memory. Pages that other memory of the program shares are
//! compared instead ([`compared_words`]), and so is memory of which several servers have a mirror, and memory
//! that other processes may have mapped, too: taking its pages away would take them from those.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::abi::result::Result;
use crate::memory::managed::advice::Advised;
use crate::memory::managed::blocks::{Answer, BLOCK, Blocks, Run, SHORT, SMALL};
use crate::memory::managed::compared_words::{self, Compared};
use crate::memory::managed::{ALL, ORDER, Piece, STATE, State, page_faults, pages, shared_blocks};
use crate::memory::pinned_regions::REGIONS;
use crate::memory::transfer::move_bytes;
use crate::process::context::Context;
use crate::process::driver::{Driver, Server};
use client::arena::Block;
use client::counters::{self, COUNTERS};
use client::data::{HostOut, HostRange};
use client::handle::ContextId;
use client::ops::memory::{
    HostFetch, HostFetchReply, HostMirror, HostRead, HostUnmap, HostWrite, MirrorRange,
};
use client::pages::{PAGE, Pages};
use client::session::Pending;
use client::{Status, lock, log};

/// Pinned memory that kernels use, by first address, and the servers' mirrors that it lies in.
pub(crate) struct Mirrors {
    regions: BTreeMap<u64, Region>,
    /// By session and first address: their sizes, and how many regions lie in each.
    mirrors: BTreeMap<(usize, u64), (u64, usize)>,
}

struct Region {
    size: u64,
    /// For each server whose kernels use it, a context, and where the mirror begins.
    users: Vec<(&'static Context, u64)>,
    /// Whether all its words are compared: kernels of several servers have used it, or other processes may.
    shared: bool,
}

impl Region {
    fn context_on(&self, server: &Server) -> Option<&'static Context> {
        self.users.iter().map(|(context, _)| *context).find(|context| std::ptr::eq(context.server, server))
    }
}

impl Mirrors {
    pub(crate) const fn new() -> Mirrors {
        Mirrors { regions: BTreeMap::new(), mirrors: BTreeMap::new() }
    }

    fn find(&self, address: u64) -> Option<&Region> {
        let (base, region) = self.regions.range(..=address).next_back()?;
        (address - base < region.size).then_some(region)
    }

    /// Whether an address is in such memory.
    pub(crate) fn has(&self, address: u64) -> bool {
        self.find(address).is_some()
    }

    /// Whether the memory at an address is compared as a whole.
    pub(crate) fn is_shared(&self, address: u64) -> bool {
        self.find(address).is_some_and(|region| region.shared)
    }

    fn counted(&self) {
        PINNED.store(self.regions.len(), Ordering::Release);
        SHARED.store(self.regions.values().filter(|region| region.shared).count(), Ordering::Release);
    }

    /// Whether the region at `base` may be compared as a whole, besides those that already are.
    fn may_share(&self, base: u64, size: u64) -> bool {
        let others = self.regions.iter().filter(|(at, region)| **at != base && region.shared);
        others.map(|(_, region)| region.size).sum::<u64>() + size <= MOST_SHARED
    }
}

/// How many regions there are, and of these, how many are compared as a whole.
static PINNED: AtomicUsize = AtomicUsize::new(0);
static SHARED: AtomicUsize = AtomicUsize::new(0);

/// Whether there is such memory.
pub(crate) fn any() -> bool {
    PINNED.load(Ordering::Acquire) != 0
}

/// Whether there is such memory whose pages the program may have at other addresses, too (`MAP_SHARED`). They
/// get what kernels have written when it is compared.
pub(crate) fn any_shared() -> bool {
    SHARED.load(Ordering::Acquire) != 0
}

/// Whether an address is in such memory.
#[inline]
pub(crate) fn is_here(address: u64) -> bool {
    any() && lock(&STATE).mirrors.has(address)
}

/// Whether an address is in memory that a server has a mirror of.
pub(crate) fn is_on(server: &Server, address: u64) -> bool {
    any() && lock(&STATE).mirrors.find(address).is_some_and(|region| region.context_on(server).is_some())
}

/// A context whose device has the bytes of such memory, of the server `near` if that has them.
pub(crate) fn context_near(near: &Server, address: u64) -> Option<&'static Context> {
    let state = lock(&STATE);
    let region = state.mirrors.find(address)?;
    region.context_on(near).or_else(|| region.users.first().map(|(context, _)| *context))
}

/// The first addresses of those that were made in a context.
pub(crate) fn of_context(context: &'static Context) -> Vec<u64> {
    let state = lock(&STATE);
    let of_it = |region: &Region| region.users.iter().any(|(user, _)| std::ptr::eq(*user, context));
    state.mirrors.regions.iter().filter(|(_, region)| of_it(region)).map(|(base, _)| *base).collect()
}

/// Lets kernels use the `size` bytes at `base`. No copy uses them in place.
///
/// # Errors
/// The server's error; `NOT_SUPPORTED` if this process cannot watch the pages, or if other processes may have
/// them too and that would be more than [`MOST_SHARED`]. Nothing has changed in any case.
pub(crate) fn adopt(driver: &'static Driver, context: &'static Context, base: u64, size: u64) -> Result {
    let shared = !is_allocated(base) && client::pages::is_shared(base as usize, size as usize);
    if shared && !lock(&STATE).mirrors.may_share(base, size) {
        log::warn(format_args!(
            "kernels on another machine cannot use the {size} bytes of pinned memory at {base:#x}, because other processes may have them too (MAP_SHARED) and all such memory together would be more than {} MiB",
            MOST_SHARED >> 20
        ));
        return Err(Status::NOT_SUPPORTED);
    }
    let owned = owned(base, size);
    let (parts, whole) = if shared { (vec![owned], None) } else { compared_words::cut(owned) };
    let (mirror, new) = mirror(context, base, size)?;
    // Work that is already under way may be told of this memory.
    let idle = page_faults::idle_now();
    // A fault before the piece is registered waits for this lock.
    let state = &mut *lock(&STATE);
    let adopted = match &whole {
        Some(whole) => state.adopt(pages(driver)?, context, whole, new, idle.is_some()),
        None => Ok(()),
    };
    if let Err(status) = adopted {
        state.unmirror(context, mirror);
        return Err(status);
    }
    state.add_compared(parts.into_iter().map(|bytes| Compared::new(base, context, bytes)));
    state.counted();
    state.mirrors.regions.insert(base, Region { size, users: vec![(context, mirror)], shared });
    state.mirrors.counted();
    shared_blocks::start(driver);
    Ok(())
}

/// Lets kernels of another server use such memory, too. From then on its words are compared.
///
/// # Errors
/// The server's error; `NOT_SUPPORTED` if that would be more than [`MOST_SHARED`]. Kernels that can use the
/// memory already still can.
pub(crate) fn share(driver: &'static Driver, context: &'static Context, base: u64) -> Result {
    let size = {
        let mirrors = &lock(&STATE).mirrors;
        let region = mirrors.regions.get(&base).ok_or(Status::NOT_SUPPORTED)?;
        if region.context_on(context.server).is_some() {
            return Ok(());
        }
        if !mirrors.may_share(base, region.size) {
            return Err(Status::NOT_SUPPORTED);
        }
        region.size
    };
    let (mirror, _) = mirror(context, base, size)?;
    let state = &mut *lock(&STATE);
    // While the server was asked, the piece may have been freed, and another one shared.
    let may = state.mirrors.regions.contains_key(&base) && state.mirrors.may_share(base, size);
    let compared = if may { state.compare_instead(driver, base, size) } else { Err(Status::NOT_SUPPORTED) };
    if let Err(status) = compared {
        state.unmirror(context, mirror);
        return Err(status);
    }
    state.add_compared([Compared::new(base, context, owned(base, size))]);
    state.counted();
    if let Some(region) = state.mirrors.regions.get_mut(&base) {
        region.users.push((context, mirror));
        region.shared = true;
    }
    state.mirrors.counted();
    // Kernels that are launched from now on find everything.
    state.send_compared(&(base..base + size)).map(drop)
}

/// Whether a piece of pinned memory is an allocation of this library's.
fn is_allocated(base: u64) -> bool {
    REGIONS.begins_at(base as usize, true)
}

/// The bytes of a piece of pinned memory that are nobody else's.
fn owned(base: u64, size: u64) -> Range<u64> {
    // An allocation owns all bytes of its pages.
    let pages = base.is_multiple_of(PAGE as u64) && is_allocated(base);
    base..if pages { (base + size).next_multiple_of(PAGE as u64) } else { base + size }
}

/// Ends the mirroring of the piece at `base` on a context's server. The program gets the device's bytes.
/// Returns whether that was the last one.
pub(crate) fn leave(driver: &'static Driver, context: &'static Context, base: u64) -> bool {
    let order = ORDER.write().unwrap_or_else(PoisonError::into_inner);
    let mut state = lock(&STATE);
    if state.mirrors.regions.get(&base).is_none_or(|region| region.users.len() == 1) {
        drop((state, order));
        release(driver, base, true);
        return true;
    }
    if let Err(status) = state.compare() {
        lost(base, status);
    }
    let it = |user: &'static Context| std::ptr::eq(user, context);
    state.drop_compared(base, it);
    state.counted();
    if let Some(region) = state.mirrors.regions.get_mut(&base)
        && let Some(place) = region.users.iter().position(|(user, _)| it(user))
    {
        let (_, mirror) = region.users.swap_remove(place);
        state.unmirror(context, mirror);
    }
    false
}

fn lost(base: u64, status: Status) {
    log::error(format_args!(
        "pinned memory at {base:#x}: the last bytes that kernels wrote there are lost ({status})"
    ));
}

/// Ends the mirroring of the piece at `base`, if there is one. `keep`: whether the program gets the device's
/// bytes; otherwise the bytes are no longer needed.
pub(crate) fn release(driver: &'static Driver, base: u64, keep: bool) {
    if !any() {
        return;
    }
    let _order = ORDER.write().unwrap_or_else(PoisonError::into_inner);
    let state = &mut *lock(&STATE);
    let Some(Region { size, users, .. }) = state.mirrors.regions.remove(&base) else { return };
    if keep && let Err(status) = state.fetch_all(driver, base, size) {
        lost(base, status);
    }
    let pieces: Vec<u64> = state.pieces.range(base..base + size).map(|(at, _)| *at).collect();
    for at in pieces {
        if let (Some((size, _)), Ok(pages)) = (state.remove(at), pages(driver)) {
            pages.release(at as usize, size as usize);
        }
    }
    state.drop_compared(base, |_| true);
    state.counted();
    users.into_iter().for_each(|(context, mirror)| state.unmirror(context, mirror));
    // Until now, another thread that releases it waits for the lock: it frees the pages when this is over.
    state.mirrors.counted();
}

/// Makes a context's server mirror the pages of a piece, unless it already does. Returns where the mirror
/// begins, and whether it is new and so contains only zeroes. Callers take turns. Must not be called under
/// the lock, because the server may have to wait for work that waits for the answer to a fault.
fn mirror(context: &Context, base: u64, size: u64) -> Result<(u64, bool)> {
    let page = PAGE as u64;
    let (first, end) = (base & !(page - 1), (base + size).next_multiple_of(page));
    let (server, size) = (context.session().index(), end - first);
    {
        let mirrors = &mut lock(&STATE).mirrors.mirrors;
        let before = mirrors.range_mut((server, 0)..(server, end)).next_back();
        if let Some(((_, at), (has, users))) = before.filter(|((_, at), (has, _))| *at + *has > first) {
            if *at > first || at + *has < first + size {
                log::warn(format_args!(
                    "pinned memory at {first:#x} partly overlaps pages of other pinned memory that kernels use: kernels cannot use it"
                ));
                return Err(Status::NOT_SUPPORTED);
            }
            *users += 1;
            return Ok((*at, false));
        }
    }
    if let Err(status) = context.session().call(&HostMirror { context: context.id, address: first, size }) {
        // The server drops it, if it has it.
        let _ = context.session().append(&HostUnmap { context: context.id, address: first });
        return Err(status);
    }
    lock(&STATE).mirrors.mirrors.insert((server, first), (size, 1));
    Ok((first, true))
}

/// Maximum number of bytes that are compared as a whole. All of them are compared while a device works.
pub(crate) const MOST_SHARED: u64 = 1 << 20;

/// Maximum number of bytes of one command to a mirror, and of one answer.
const TO_MIRROR: usize = 8 << 10;
const FROM_MIRROR: usize = client::channel::MAX_PAYLOAD - 64;
/// Number of answers that are requested at a time. Many threads may be doing that.
const AT_ONCE: usize = 8;

/// A range of a mirror, and where its bytes go.
pub(crate) type Part<'a> = (&'a Context, u64, &'a mut [u8]);

/// Reads the current bytes of a mirror.
pub(crate) fn read(context: &Context, address: u64, to: &mut [u8]) -> Result {
    read_in_order(vec![(context, address, to)])
}

/// Reads the current bytes of several ranges, those of one server in this order.
pub(crate) fn read_in_order(ranges: Vec<Part<'_>>) -> Result {
    let mut by_server: Vec<Vec<Part<'_>>> = Vec::new();
    for part in ranges {
        let same = |parts: &&mut Vec<Part<'_>>| {
            parts.first().is_some_and(|(context, ..)| std::ptr::eq(context.session(), part.0.session()))
        };
        match by_server.iter_mut().find(same) {
            Some(parts) => parts.push(part),
            None => by_server.push(vec![part]),
        }
    }
    let begin = |parts: Vec<_>| Fetch::begin(&parts, None).map(|fetch| (fetch, parts));
    let begun: Vec<_> = by_server.into_iter().map(begin).collect::<Result<_>>()?;
    let (fetched, others): (Vec<_>, Vec<_>) = begun.into_iter().partition(|(fetch, _)| fetch.is_some());
    read_in_answers(others.into_iter().flat_map(|(_, parts)| parts).collect())?;
    for (fetch, mut parts) in fetched {
        fetch.map(|fetch| fetch.end(&mut parts)).transpose()?;
    }
    Ok(())
}

/// Reads ranges that their server remembers from then on: one after the other, but in one exchange. A block
/// is read until nothing has changed between two readings. `has`: what the program has already of what the
/// server remembers. Returns which of that, and of these ranges, has changed by the time when the last one
/// was read. `None` if the server, the arena or the reply slots do not allow that now.
pub(crate) fn read_remembered(mut ranges: Vec<Part<'_>>, has: Vec<u64>) -> Result<Option<Vec<u64>>> {
    let Some(fetch) = Fetch::begin(&ranges, Some(has))? else { return Ok(None) };
    fetch.end(&mut ranges).map(Some)
}

/// Bytes on their way through the arena.
struct Fetch<'s> {
    /// Dropped before the block, to which the host writes until it has replied.
    pending: Vec<Pending<'s, HostFetchReply>>,
    block: Block<'s>,
}

impl<'s> Fetch<'s> {
    /// `has`: if the ranges are to be remembered, what the program has already. Then each is a command of its
    /// own, for which the program has those before it.
    ///
    /// `None` if the bytes fit into one answer, or if there is no room for them in the arena: work that waits
    /// for the program may occupy it, and the program waits for this. Nor does this thread take several reply
    /// slots if others may need them.
    fn begin(ranges: &[Part<'s>], has: Option<Vec<u64>>) -> Result<Option<Fetch<'s>>> {
        let Some((context, ..)) = ranges.first() else { return Ok(None) };
        let session = context.session();
        let len: usize = ranges.iter().map(|(.., to)| to.len()).sum();
        let fits = ranges.len() == 1 && len <= FROM_MIRROR && has.is_none();
        if fits || !session.knows::<HostFetch>() || len > session.arena().largest() {
            return Ok(None);
        }
        let commands = if has.is_some() { ranges.len() } else { 1 };
        if commands > 1 && !session.has_free_slot() {
            return Ok(None);
        }
        let Some(block) = session.arena().try_alloc(len, session.progress().released()) else {
            return Ok(None);
        };
        let mut pending = Vec::with_capacity(commands);
        for op in requests(context.id, ranges, has, block.range(len)) {
            match session.submit(&op) {
                Ok(answer) => pending.push(answer),
                Err(status) => {
                    // The block is lost with the session.
                    std::mem::forget(block);
                    return Err(status);
                }
            }
        }
        Ok(Some(Fetch { pending, block }))
    }

    /// Returns what the answers name.
    fn end(self, ranges: &mut [Part<'_>]) -> Result<Vec<u64>> {
        let Fetch { pending, block } = self;
        let mut changed = Vec::new();
        for answer in pending {
            changed.extend(answer.wait()?.changed);
        }
        let mut at = 0;
        for (.., to) in ranges {
            // SAFETY: the block has the bytes of all ranges, one after the other.
            unsafe { move_bytes(block.ptr().add(at), to.as_mut_ptr(), to.len()) };
            at += to.len();
        }
        counters::add(&COUNTERS.mirror_bytes, at as u64);
        Ok(changed)
    }
}

/// The commands that read ranges of one server to `dst`, one after the other. `has`: as for [`Fetch::begin`].
///
/// A run in which the program may poll a word, or look for one, is read as it was at one time: of two pages
/// that are read once, the second could have a later write of the device than the first.
fn requests(
    context: ContextId,
    ranges: &[Part<'_>],
    has: Option<Vec<u64>>,
    mut dst: HostRange,
) -> Vec<HostFetch> {
    let remember = has.is_some();
    let mut has = has.unwrap_or_default();
    let request = |ranges: &[Part<'_>]| {
        let range = |(_, address, to): &Part<'_>| MirrorRange { address: *address, len: to.len() as u64 };
        let ranges: Vec<_> = ranges.iter().map(range).collect();
        dst.len = ranges.iter().map(|range| range.len).sum();
        let (settled, had) = (remember && dst.len <= SHORT, has.clone());
        has.extend(ranges.iter().map(|range| range.address));
        let op = HostFetch { context, ranges, settled, remember, has: had, dst: HostOut(dst) };
        dst.offset += dst.len;
        op
    };
    ranges.chunks(if remember { 1 } else { ranges.len().max(1) }).map(request).collect()
}

/// Reads ranges, those of one server in this order, in the answers' own memory.
fn read_in_answers(ranges: Vec<Part<'_>>) -> Result {
    let parts = ranges.into_iter().flat_map(|(context, address, to)| {
        let part = move |(i, part): (usize, _)| (context, address + (i * FROM_MIRROR) as u64, part);
        to.chunks_mut(FROM_MIRROR).enumerate().map(part)
    });
    let mut parts: Vec<Part<'_>> = parts.collect();
    for group in parts.chunks_mut(AT_ONCE) {
        let ask = |(context, address, part): &Part<'_>| {
            context.session().submit(&HostRead {
                context: context.id,
                address: *address,
                len: part.len() as u32,
            })
        };
        let asked: Vec<_> = group.iter().map(ask).collect::<Result<_>>()?;
        for (pending, (_, _, part)) in asked.into_iter().zip(group) {
            let answer = pending.wait()?.bytes.0;
            if answer.len() != part.len() {
                return Err(Status::UNKNOWN);
            }
            counters::add(&COUNTERS.mirror_bytes, answer.len() as u64);
            part.copy_from_slice(&answer);
        }
    }
    Ok(())
}

/// Changes the bytes of a mirror, before anything that is appended later.
pub(crate) fn write(context: &Context, address: u64, bytes: &[u8]) -> Result {
    for (i, bytes) in bytes.chunks(TO_MIRROR).enumerate() {
        let address = address + (i * TO_MIRROR) as u64;
        counters::add(&COUNTERS.mirror_bytes, bytes.len() as u64);
        context.session().append(&HostWrite { context: context.id, address, bytes })?;
    }
    Ok(())
}

/// The same for bytes of a mirror that is zero. Returns whether they are zero as well.
pub(crate) fn write_to_zeroes(context: &Context, address: u64, bytes: &[u8]) -> Result<bool> {
    let mut zero = true;
    for (i, bytes) in bytes.chunks(TO_MIRROR).enumerate() {
        if bytes.iter().any(|byte| *byte != 0) {
            zero = false;
            write(context, address + (i * TO_MIRROR) as u64, bytes)?;
        }
    }
    Ok(zero)
}

impl State {
    fn unmirror(&mut self, context: &Context, mirror: u64) {
        let key = (context.session().index(), mirror);
        let Some((_, users)) = self.mirrors.mirrors.get_mut(&key) else { return };
        *users -= 1;
        if *users == 0 {
            self.mirrors.mirrors.remove(&key);
            // After the session is lost there is no mirror.
            let _ = context.session().append(&HostUnmap { context: context.id, address: mirror });
        }
    }

    /// `new`: the mirror has nothing but zeroes. Otherwise it has what was there before: a neighbor in one of
    /// the pages has kept it. `idle`: no work is under way, and none comes before this returns.
    fn adopt(
        &mut self,
        pages: &Pages,
        context: &'static Context,
        all: &Range<u64>,
        new: bool,
        idle: bool,
    ) -> Result {
        let (base, size) = (all.start, all.end - all.start);
        // SAFETY: whole pages of pinned memory, which stays until `release`.
        unsafe { pages.adopt(base as usize, size as usize) }.map_err(|error| {
            log::warn(format_args!(
                "kernels on another machine cannot use the pinned memory at {base:#x}, because its pages cannot be watched: {error}"
            ));
            Status::NOT_SUPPORTED
        })?;
        let mut zero = new && idle;
        for at in (base..base + size).step_by(BLOCK as usize) {
            let len = BLOCK.min(base + size - at) as usize;
            // SAFETY: the pages are present, and nobody changes them.
            let bytes = unsafe { std::slice::from_raw_parts(pages.bytes(at as usize), len) };
            let written = if new {
                write_to_zeroes(context, at, bytes)
            } else {
                write(context, at, bytes).map(|()| false)
            };
            zero &= written.inspect_err(|_| pages.release(base as usize, size as usize))?;
        }
        pages
            .clear(base as usize, size as usize)
            .map_err(page_faults::failed)
            .inspect_err(|_| pages.release(base as usize, size as usize))?;
        let blocks = Blocks::new(base, size, SMALL, zero);
        let piece =
            Piece { context, blocks, parts: vec![all.clone()], advised: Advised::default(), pinned: true };
        self.insert(base, size, piece);
        Ok(())
    }

    /// The pages of a region are no longer watched, and their words are compared with those of the server
    /// that has them.
    fn compare_instead(&mut self, driver: &'static Driver, base: u64, size: u64) -> Result {
        let watched = self.pieces.range(base..base + size);
        let watched: Vec<_> = watched.map(|(at, (size, piece))| (*at, *size, piece.context)).collect();
        for (at, size, context) in watched {
            // From here on the program's accesses wait for the lock.
            self.give(driver, at, &ALL)?;
            let mut bytes = vec![0; size as usize];
            read(context, at, &mut bytes)?;
            let pages = pages(driver)?;
            pages.fill(at as usize, &bytes, true).map_err(page_faults::failed)?;
            self.remove(at);
            pages.release(at as usize, size as usize);
            self.add_compared([Compared::known(base, context, at, &bytes)]);
        }
        Ok(())
    }

    /// Gives the host all bytes of a region, writable.
    fn fetch_all(&mut self, driver: &'static Driver, region: u64, size: u64) -> Result {
        self.part(driver, |together| (region..region + size).contains(&together.base))?;
        self.compare()?;
        let mut buffer = Vec::new();
        let mut at = region.next_multiple_of(PAGE as u64);
        // Behind a region without a whole page there may be another region's.
        while at < region + size
            && let Some((base, _)) = self.find(at)
        {
            let Some((size, piece)) = self.pieces.get(&base) else { return Ok(()) };
            let end = base + size;
            let run = match piece.blocks.fault(at, true) {
                Answer::Zeroes(run) | Answer::Fetch(run) => {
                    self.fetch(base, run, &mut buffer, &mut [])?;
                    pages(driver)?.fill(run.address as usize, &buffer, true).map_err(page_faults::failed)?;
                    run
                }
                Answer::Allow(run) => run,
                Answer::Nothing => {
                    let block = piece.blocks.block(at);
                    Run { address: at, len: block.address + block.len - at }
                }
            };
            if let Some((_, piece)) = self.pieces.get_mut(&base) {
                piece.blocks.given(run, true);
            }
            at = run.address + run.len;
            if at >= end {
                break;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use client::data::Place;

    #[test]
    fn short_runs_that_are_remembered_are_read_as_they_were_at_one_time() {
        let context = Context::new(ContextId(7), Server::unused(), 0, 0, false);
        let lens = [SMALL, SHORT, SHORT + SMALL];
        let mut bytes = lens.map(|len| vec![0; len as usize]);
        let addresses = [1 << 20, 2 << 20, 3 << 20];
        let parts = addresses.into_iter().zip(&mut bytes).map(|(at, to)| (context, at, &mut to[..]));
        let parts: Vec<Part<'_>> = parts.collect();
        let dst = HostRange { place: Place::Arena, offset: 64, len: lens.iter().sum() };
        let ops = requests(context.id, &parts, Some(vec![5]), dst);
        assert_eq!(ops.iter().map(|op| op.settled).collect::<Vec<_>>(), [true, true, false]);
        assert_eq!(ops.iter().map(|op| op.dst.0.len).collect::<Vec<_>>(), lens);
        assert_eq!(ops[2].dst.0.offset, 64 + SMALL + SHORT);
        assert_eq!(ops[2].has, [5, 1 << 20, 2 << 20]);
        let op = &requests(context.id, &parts, None, dst)[..];
        assert!(op.len() == 1 && op[0].ranges.len() == 3 && !op[0].settled && !op[0].remember);
    }

    #[test]
    fn memory_whose_last_bytes_are_being_fetched_is_still_mirrored() {
        let server = Server::unused();
        let driver = Driver::for_tests(&[server]);
        let context = Context::new(ContextId(0), server, 0, 0, false);
        let bytes = Box::leak(vec![0_u64; PAGE / 8].into_boxed_slice());
        let (base, size) = (bytes.as_ptr() as u64, PAGE as u64);
        {
            let state = &mut *lock(&STATE);
            state.add_compared([Compared::known(base, context, base, &[0; PAGE])]);
            state.mirrors.regions.insert(base, Region { size, users: vec![(context, base)], shared: true });
            state.mirrors.counted();
        }
        let before = server.session.last_seq();
        let releases = std::thread::spawn(move || release(driver, base, true));
        while server.session.last_seq() == before {
            std::thread::yield_now();
        }
        // The server never answers. Whoever releases the memory now waits for the lock.
        assert!(any() && STATE.try_lock().is_err());
        server.lose();
        releases.join().unwrap();
        assert!(!is_here(base));
    }
}
