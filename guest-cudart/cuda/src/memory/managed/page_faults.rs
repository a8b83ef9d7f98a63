//! Handles the program's accesses to blocks that the host does not have.

use std::sync::{PoisonError, RwLockWriteGuard, TryLockError, mpsc};

use crate::abi::result::Result;
use crate::memory::managed::blocks::{Answer, Run};
use crate::memory::managed::shared_blocks::Fetched;
use crate::memory::managed::{ORDER, STATE, State, landing, mirror, shared_blocks};
use crate::memory::transfer::Transfer;
use crate::process::driver::Driver;
use crate::process::{context, host_calls};
use crate::streams::stream_table;
use client::counters::{self, COUNTERS};
use client::pages::{Fault, Pages};
use client::{Status, lock, log};

/// The thread that answers accesses immediately if possible. Accesses that must wait for the device go to
/// another thread: the device may be waiting for a host function that itself waits for an answer from here.
pub(crate) fn serve(driver: &'static Driver, pages: &'static Pages) {
    let (later, waiting) = mpsc::channel();
    let thread = std::thread::Builder::new().name("rgpu-pages-wait".into());
    if let Err(error) = thread.spawn(move || serve_later(pages, &waiting)) {
        log::error(format_args!(
            "cannot start a thread for managed memory: {error}; `ulimit -u` limits threads"
        ));
        return;
    }
    let mut buffer = Vec::new();
    loop {
        let faults = match pages.faults() {
            Ok(faults) => faults,
            Err(error) => {
                return log::error(format_args!("managed memory: page faults cannot be read: {error}"));
            }
        };
        for fault in faults {
            counters::add(&COUNTERS.page_faults, 1);
            if is_pinned(fault.address as u64) {
                let idle = idle_now();
                shared_blocks::answer(driver, pages, &fault, &mut buffer, idle.is_none());
            } else if let Some(_order) = idle_now() {
                answer(pages, &fault, &mut buffer);
            } else if is_waited_for() {
                answer_waiting(pages, &fault, &mut buffer);
            } else if later.send(fault).is_err() {
                return;
            }
        }
    }
}

fn is_pinned(address: u64) -> bool {
    let state = lock(&STATE);
    let piece = state.find(address).and_then(|(base, _)| state.pieces.get(&base));
    piece.is_some_and(|(_, piece)| piece.pinned)
}

/// Whether the device waits for this process: for a host function, or a word that the program writes. The
/// stopped thread may be the one that it waits for.
fn is_waited_for() -> bool {
    host_calls::is_calling() || host_calls::is_waiting()
}

/// Keeps work from being enqueued until the guard is dropped. `None` if some is being enqueued right now.
fn no_work_comes() -> Option<RwLockWriteGuard<'static, ()>> {
    match ORDER.try_write() {
        Ok(order) => Some(order),
        Err(TryLockError::Poisoned(order)) => Some(order.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// If no work is pending, and no message is being received, keeps it that way until the guard is dropped.
pub(super) fn idle_now() -> Option<RwLockWriteGuard<'static, ()>> {
    no_work_comes().filter(|_| stream_table::all_are_known_done() && !landing::is_under_way())
}

/// Answers an access immediately while the device waits for this process. Other work of the device may change
/// the block meanwhile.
fn answer_waiting(pages: &'static Pages, fault: &Fault, buffer: &mut Vec<u8>) {
    let order = no_work_comes();
    let mut state = lock(&STATE);
    // Under the lock: a stream that stops waiting takes it before it continues.
    let given = if order.is_some() && stream_table::all_stopped() {
        state.give_to_host(pages, fault, buffer)
    } else {
        state.announced(|state| state.give_beside_work(pages, fault, buffer))
    };
    drop(state);
    finish(pages, fault, given);
}

/// The thread that waits for the device.
fn serve_later(pages: &'static Pages, waiting: &mpsc::Receiver<Fault>) {
    let mut buffer = Vec::new();
    while let Ok(fault) = waiting.recv() {
        loop {
            let over = context::quiesce_all();
            let order = ORDER.write().unwrap_or_else(PoisonError::into_inner);
            // New work may have been enqueued meanwhile. Work of a failed context is never known to be done.
            if !over || !context::any_busy() {
                break answer(pages, &fault, &mut buffer);
            }
            if is_waited_for() {
                drop(order);
                break answer_waiting(pages, &fault, &mut buffer);
            }
        }
    }
}

pub(crate) fn answer(pages: &'static Pages, fault: &Fault, buffer: &mut Vec<u8>) {
    let given = lock(&STATE).give_to_host(pages, fault, buffer);
    finish(pages, fault, given);
}

/// Lets the stopped thread continue, or ends the program.
pub(crate) fn finish(pages: &Pages, fault: &Fault, given: Result<bool>) {
    match given {
        Ok(true) => pages.retry(fault),
        // Pages that are compared from now on are the program's.
        Ok(false) if lock(&STATE).mirrors.is_shared(fault.address as u64) => pages.retry(fault),
        Ok(false) => pages.refuse(fault),
        Err(status) => {
            log::error(format_args!(
                "managed memory at {:#x} cannot be fetched from the device ({status}): the access ends the program",
                fault.address
            ));
            let mut state = lock(&STATE);
            if let Some((base, size)) = state.find(fault.address as u64) {
                state.remove(base);
                pages.close_range(base as usize, size as usize);
            }
            drop(state);
            pages.refuse(fault);
        }
    }
}

impl State {
    /// The first address of the piece that was accessed, and what the access needs. `None` if there is
    /// nothing at the address.
    pub(crate) fn answer(&self, fault: &Fault) -> Option<(u64, Answer)> {
        let (base, _) = self.find(fault.address as u64)?;
        let (_, piece) = self.pieces.get(&base)?;
        Some((base, piece.blocks.fault(fault.address as u64, fault.write)))
    }

    /// Gives the host what an access needs while no work changes it. Returns false if nothing is at the
    /// address.
    fn give_to_host(&mut self, pages: &Pages, fault: &Fault, buffer: &mut Vec<u8>) -> Result<bool> {
        let Some((base, answer)) = self.answer(fault) else { return Ok(false) };
        match answer {
            Answer::Nothing => {}
            Answer::Allow(run) => self.allow_writes(pages, base, run)?,
            Answer::Zeroes(run) => {
                self.given(base, run, fault.write);
                fill(pages, run, zeroed(buffer, run), fault.write)?;
            }
            Answer::Fetch(run) => {
                let mut more = self.what_comes_with(base, run);
                self.fetch(base, run, buffer, &mut more)?;
                self.given(base, run, fault.write);
                more.iter().for_each(|fetched| self.came_along(fetched));
                for Fetched { run, bytes, .. } in more {
                    fill(pages, run, &bytes, false)?;
                }
                fill(pages, run, buffer, fault.write)?;
            }
        }
        Ok(true)
    }

    /// What the host gets with a run of pinned memory that an access needs: what the program used together
    /// with it before. It is in the same context, so that nobody else's failure matters.
    pub(super) fn what_comes_with(&mut self, base: u64, run: Run) -> Vec<Fetched> {
        let State { sets, pieces, .. } = self;
        let Some((_, accessed)) = pieces.get(&base).filter(|(_, piece)| piece.pinned) else {
            return Vec::new();
        };
        // A set has only runs of pieces that exist.
        let piece_of =
            |run: &Run| pieces.range(..=run.address).next_back().map(|(at, (_, piece))| (*at, piece));
        let has =
            |run: &Run| piece_of(run).is_some_and(|(_, piece)| !piece.blocks.held(&run.range()).is_empty());
        let may = |run: &Run| {
            piece_of(run).is_some_and(|(_, piece)| {
                std::ptr::eq(piece.context, accessed.context) && !piece.blocks.is_zero()
            })
        };
        let more = sets.with(run, has, may).into_iter();
        more.filter_map(|run| piece_of(&run).map(|(at, _)| Fetched::nothing_yet(at, run))).collect()
    }

    /// Records that the host is about to get a run. This must come first: the thread continues as soon as the
    /// pages are there, and may enqueue work that needs what it writes.
    pub(crate) fn given(&mut self, base: u64, run: Run, write: bool) {
        if let Some((_, piece)) = self.pieces.get_mut(&base) {
            piece.blocks.given(run, write);
            self.held.insert(base);
            self.counted();
        }
    }

    /// The same for a run that the host gets to read with another one, which an access needs.
    pub(super) fn came_along(&mut self, fetched: &Fetched) {
        if let Some((_, piece)) = self.pieces.get_mut(&fetched.base) {
            piece.blocks.came_along(fetched.run);
            self.held.insert(fetched.base);
            self.counted();
        }
    }

    /// Lets the host write to a run that it has.
    pub(crate) fn allow_writes(&mut self, pages: &Pages, base: u64, run: Run) -> Result {
        self.given(base, run, true);
        pages.allow_writes(run.address as usize, run.len as usize).map_err(failed)
    }

    /// Reads the device's bytes of a run, and in the same exchange those of `more`, which is pinned memory as
    /// well.
    pub(super) fn fetch(
        &mut self,
        base: u64,
        run: Run,
        buffer: &mut Vec<u8>,
        more: &mut [Fetched],
    ) -> Result {
        let bytes = zeroed(buffer, run);
        let Some((_, piece)) = self.pieces.get(&base) else { return Ok(()) };
        let context = piece.context;
        if piece.pinned {
            let more = more.iter_mut().map(|more| (context, more.run.address, &mut more.bytes[..]));
            return mirror::read_in_order(more.chain([(context, run.address, bytes)]).collect());
        }
        let stream = self.mover(context)?;
        let transfer = Transfer { stream: &stream };
        let Some((_, piece)) = self.pieces.get(&base) else { return Ok(()) };
        for part in piece.parts_in(&run) {
            let to = &mut bytes[(part.start - run.address) as usize..(part.end - run.address) as usize];
            // SAFETY: the buffer belongs to the caller.
            unsafe { transfer.receive(to.as_mut_ptr(), part.start, to.len()) }?;
        }
        Ok(())
    }
}

fn zeroed(buffer: &mut Vec<u8>, run: Run) -> &mut [u8] {
    buffer.clear();
    buffer.resize(run.len as usize, 0);
    buffer
}

fn fill(pages: &Pages, run: Run, bytes: &[u8], write: bool) -> Result {
    pages.fill(run.address as usize, bytes, write).map_err(failed)
}

pub(crate) fn failed(error: std::io::Error) -> Status {
    log::error(format_args!("managed memory: the state of pages cannot be changed: {error}"));
    Status::UNKNOWN
}
