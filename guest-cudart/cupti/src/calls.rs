//! Records of the program's CUDA calls, and of the external correlations on the thread's stacks.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::HashSet;
use std::ffi::CStr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use cupti_records::{Api, ExternalCorrelation, external, kind};

use crate::driver::{Called, Observer, table};
use crate::result::{INVALID_PARAMETER, QUEUE_EMPTY, Result};
use crate::{api, buffers, clock, lock, names, subscriber};

/// The devices' records are fetched after this many calls, so that the server does not run out of room if a
/// program flushes rarely.
const FETCH_AFTER: usize = 1 << 15;

const KINDS: usize = external::SIZE as usize;

thread_local! {
    /// External correlations, by kind.
    static STACKS: RefCell<[Vec<u64>; KINDS]> = const { RefCell::new([const { Vec::new() }; KINDS]) };
    /// When this thread's call of the driver began, and that of the runtime.
    static BEGIN: [Cell<u64>; 2] = const { [const { Cell::new(0) }; 2] };
}

/// Which calls are recorded, for one API.
pub struct Wanted {
    /// True: all calls except the exceptions. False: only the exceptions.
    all: AtomicBool,
    exceptions: Mutex<Option<HashSet<u32>>>,
}

impl Wanted {
    const fn new() -> Wanted {
        Wanted { all: AtomicBool::new(false), exceptions: Mutex::new(None) }
    }

    /// Sets whether all calls are recorded, or none.
    pub fn set(&self, all: bool) {
        *lock(&self.exceptions) = None;
        self.all.store(all, Ordering::Relaxed);
    }

    /// Sets whether one function's calls are recorded.
    pub fn set_one(&self, number: u32, wanted: bool) {
        let mut exceptions = lock(&self.exceptions);
        let exceptions = exceptions.get_or_insert_default();
        if wanted == self.all.load(Ordering::Relaxed) {
            exceptions.remove(&number);
        } else {
            exceptions.insert(number);
        }
    }

    fn has(&self, number: u32) -> bool {
        let is_exception = lock(&self.exceptions).as_ref().is_some_and(|them| them.contains(&number));
        self.all.load(Ordering::Relaxed) != is_exception
    }

    /// Whether any calls may be recorded.
    pub fn any(&self) -> bool {
        self.all.load(Ordering::Relaxed)
            || lock(&self.exceptions).as_ref().is_some_and(|them| !them.is_empty())
    }
}

/// Calls of the driver API and of the runtime API that are recorded.
pub static WANTED: [Wanted; 2] = [Wanted::new(), Wanted::new()];
/// Whether external correlations are recorded.
pub static EXTERNAL: AtomicBool = AtomicBool::new(false);
/// Whether threads are identified by the kernel's thread IDs instead of `pthread_self`.
pub static SYSTEM_THREADS: AtomicBool = AtomicBool::new(false);

static CORRELATION: AtomicU32 = AtomicU32::new(1);
static CALLS: AtomicUsize = AtomicUsize::new(0);

static OBSERVER: Observer = Observer { enters, leaves };

/// Makes libcuda report calls or stop reporting them, depending on what is enabled now.
pub fn observe() -> Result {
    let wanted = api::any_device_kind() || WANTED.iter().any(Wanted::any) || subscriber::wants_calls();
    table()?.observe(wanted.then_some(&OBSERVER));
    Ok(())
}

fn thread() -> u32 {
    if SYSTEM_THREADS.load(Ordering::Relaxed) {
        // SAFETY: a plain system call without arguments.
        return unsafe { libc::gettid() }.cast_unsigned();
    }
    // SAFETY: the function takes no arguments.
    unsafe { libc::pthread_self() as u32 }
}

/// A call that libcuda tells of.
pub struct Call<'a> {
    pub told: &'a Called,
    /// `CUpti_CallbackDomain`.
    pub domain: u32,
    /// See [`number`](Call::number).
    pub number: OnceCell<u32>,
    pub correlation: u32,
}

impl<'a> Call<'a> {
    /// # Safety
    /// The name is text that ends with NUL.
    unsafe fn of(told: &'a Called, correlation: u32) -> Call<'a> {
        let domain = if told.runtime == 0 { names::DRIVER } else { names::RUNTIME };
        let number = if told.number == 0 { OnceCell::new() } else { OnceCell::from(told.number) };
        Call { told, domain, number, correlation }
    }

    /// The function's number in its domain; 0 if it has none. Looked up only for whoever asks.
    pub fn number(&self) -> u32 {
        *self.number.get_or_init(|| {
            // SAFETY: as the caller of `of` has said.
            let name = unsafe { CStr::from_ptr(self.told.name) }.to_str().unwrap_or_default();
            names::of(self.domain).map_or(0, |names| names.number(name, self.told.runtime))
        })
    }

    /// A place for each of the two APIs: a call of the driver may be within one of the runtime.
    pub fn place(&self) -> usize {
        usize::from(self.domain == names::RUNTIME)
    }
}

unsafe extern "C" fn enters(told: *const Called) -> u32 {
    // SAFETY: libcuda passes a call, with the function's name.
    let mut call = unsafe { Call::of(&*told, (*told).within) };
    while call.correlation == 0 {
        call.correlation = CORRELATION.fetch_add(1, Ordering::Relaxed);
    }
    subscriber::call(&call, None);
    buffers::prepare();
    let _ = BEGIN.try_with(|begin| begin[call.place()].set(clock::now()));
    call.correlation
}

unsafe extern "C" fn leaves(told: *const Called, correlation: u32, status: u32) {
    let end = clock::now();
    // SAFETY: libcuda passes a call, with the function's name.
    let call = unsafe { Call::of(&*told, correlation) };
    // NVIDIA's library records no calls of the driver by which the runtime does its work. A subscriber hears
    // of them all the same.
    if call.told.within == 0 && WANTED[call.place()].has(call.number()) {
        note_external(correlation);
        buffers::write(&Api {
            kind: if call.domain == names::DRIVER { kind::DRIVER } else { kind::RUNTIME },
            cbid: call.number(),
            start: BEGIN.try_with(|begin| begin[call.place()].get()).unwrap_or(end),
            end,
            processId: std::process::id(),
            threadId: thread(),
            correlationId: correlation,
            returnValue: status,
        });
    }
    subscriber::call(&call, Some(status));
    if CALLS.fetch_add(1, Ordering::Relaxed) + 1 >= FETCH_AFTER && api::any_device_kind() {
        CALLS.store(0, Ordering::Relaxed);
        // Records that cannot be fetched now are fetched, or counted as dropped, later.
        let _ = api::fetch_some();
    }
}

/// Writes a record for each stack of this thread that is not empty.
fn note_external(correlation: u32) {
    if !EXTERNAL.load(Ordering::Relaxed) {
        return;
    }
    let tops = STACKS.try_with(|stacks| {
        stacks
            .try_borrow()
            .ok()
            .map(|stacks| std::array::from_fn::<_, KINDS, _>(|kind| stacks[kind].last().copied()))
    });
    for (kind, top) in (0..).zip(tops.ok().flatten().unwrap_or_default()) {
        if let Some(id) = top {
            buffers::write(&ExternalCorrelation {
                kind: kind::EXTERNAL_CORRELATION,
                externalKind: kind,
                externalId: id,
                correlationId: correlation,
                reserved: 0,
            });
        }
    }
}

fn with_stack<R>(kind: u32, f: impl FnOnce(&mut Vec<u64>) -> R) -> Result<R> {
    if !(external::UNKNOWN..external::SIZE).contains(&kind) {
        return Err(INVALID_PARAMETER);
    }
    let done = STACKS
        .try_with(|stacks| stacks.try_borrow_mut().ok().map(|mut stacks| f(&mut stacks[kind as usize])));
    done.ok().flatten().ok_or(INVALID_PARAMETER)
}

/// Pushes an external correlation: this thread's calls now belong to it.
pub fn push(kind: u32, id: u64) -> Result {
    with_stack(kind, |stack| stack.push(id))
}

/// Pops an external correlation and returns it.
pub fn pop(kind: u32) -> Result<u64> {
    with_stack(kind, Vec::pop)?.ok_or(QUEUE_EMPTY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stacks_are_by_kind_and_thread() {
        assert_eq!(pop(3), Err(QUEUE_EMPTY));
        push(3, 7).unwrap();
        push(4, 8).unwrap();
        push(3, 9).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| assert_eq!(pop(3), Err(QUEUE_EMPTY)));
        });
        assert_eq!((pop(3), pop(3), pop(4)), (Ok(9), Ok(7), Ok(8)));
        assert_eq!((push(0, 1), push(external::SIZE, 1)), (Err(INVALID_PARAMETER), Err(INVALID_PARAMETER)));
    }

    #[test]
    fn single_calls_can_be_left_out_or_asked_for() {
        let wanted = Wanted::new();
        assert!(!wanted.any() && !wanted.has(5));
        wanted.set_one(5, true);
        assert!(wanted.any() && wanted.has(5) && !wanted.has(6));
        wanted.set_one(5, false);
        assert!(!wanted.any());
        wanted.set(true);
        wanted.set_one(6, false);
        assert!(wanted.has(5) && !wanted.has(6));
    }
}
