//! Host functions in streams: `cuLaunchHostFunc`, `cuStreamAddCallback`, and this library's own functions.
//!
//! Each is a mark followed by a wait of the stream for a ticket. A thread watches the streams' progress words
//! for passed marks, calls the function and signals the ticket.
//!
//! A copy to or from another server does not wait for the progress word if all that its mark waits for is
//! known to be done: after a wait of the program for the stream, and right behind another such copy. It may
//! be [begun](Across::begin) while such copies right before it are still under way. Its turn comes after
//! theirs all the same, and so does everything that the program can see of it.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, Once, PoisonError};

use crate::abi::result::Result;
use crate::abi::types::{HostFn, StreamCallback};
use crate::memory::managed::{self, shared_blocks};
use crate::process::driver::{Driver, Server, driver};
use crate::process::host_calls::{self, CALLED, CALLING, STOPPED};
use crate::process::stream::{Before, Stream};
use crate::process::{context, fences, holds};
use crate::streams::stream_table;
use client::channel::MAX_SERVERS;
use client::handle::TicketId;
use client::ops::stream::StreamHostSignal;
use client::seq::Seq;
use client::{Status, lock, log};

/// What to call.
pub(crate) enum Function {
    Host(HostFn),
    Callback(StreamCallback, usize),
    /// This library's own function, which never waits for the stream. It is dropped instead of called in the
    /// cases where a host function isn't called.
    Own(Box<dyn FnOnce() + Send>),
    /// A copy from or to other servers. If it fails, the stream's context gets the error.
    Copy(Others, Box<dyn Across>),
}

/// Work with other servers when a stream reaches it. A closure does it all at once.
pub(crate) trait Across: Send {
    /// Begins it, if its end can be waited for later. `ahead`: others that come before it may be under way,
    /// so it is begun only if it makes no difference which of them is done first. Returns whether it is under
    /// way. If it is dropped then, that waits until it is over.
    fn begin(&mut self, _ahead: bool) -> bool {
        false
    }

    /// Does the rest. All before it is over.
    fn finish(self: Box<Self>) -> Result;
}

impl<F: FnOnce() -> Result + Send> Across for F {
    fn finish(self: Box<F>) -> Result {
        self()
    }
}

/// Copies of a queue that are under way at most: one, and those that are begun ahead. With several, the link
/// between the servers is busy while one is answered and the next is asked for.
const UNDER_WAY: usize = 4;

/// The sessions that a copy needs besides its stream's: one, or two in ascending order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Others([usize; 2]);

impl Others {
    /// Those of a copy by a stream of `own` between memory of the sessions `ends`.
    pub fn of(own: usize, ends: impl Iterator<Item = usize> + Clone) -> Others {
        let others = ends.filter(|end| *end != own);
        let [least, most] = [others.clone().min(), others.max()].map(|other| other.unwrap_or(own));
        Others([least, most])
    }
}

struct Call {
    stream: Arc<Stream>,
    mark: Seq,
    /// All that the mark waits for. `None` if that is not known, and for functions that always wait for the
    /// mark.
    before: Option<Before>,
    /// The stream's wait for the ticket, and whether it directly follows the mark.
    wait: Seq,
    adjacent: bool,
    ticket: TicketId,
    function: Function,
    data: *mut c_void,
}

// SAFETY: the pointer is only handed back to the program's function, never dereferenced here.
unsafe impl Send for Call {}

/// Pending calls, and the thread that makes them. Each server's streams have their own queues, since a thread
/// can wait for the progress of only one session.
struct Queue {
    calls: Mutex<VecDeque<Call>>,
    came: Condvar,
    start: Once,
}

impl Queue {
    const fn new() -> Queue {
        Queue { calls: Mutex::new(VecDeque::new()), came: Condvar::new(), start: Once::new() }
    }
}

/// The queues of a server's streams.
struct Queues {
    /// The program's functions.
    programs: Queue,
    /// This library's own, which must continue while one of the program's waits for something.
    own: Queue,
    /// Copies from and to other servers, which take long. Each group of servers has its own queue, so that a
    /// server that does not answer only stops copies from and to itself.
    copies: Mutex<BTreeMap<Others, &'static Queue>>,
}

impl Queues {
    const fn new() -> Queues {
        Queues { programs: Queue::new(), own: Queue::new(), copies: Mutex::new(BTreeMap::new()) }
    }

    /// The queue of copies from and to these servers.
    fn copies(&self, others: Others) -> &'static Queue {
        lock(&self.copies).entry(others).or_insert_with(|| Box::leak(Box::new(Queue::new())))
    }
}

/// Indexed by session.
static QUEUES: [Queues; MAX_SERVERS] = [const { Queues::new() }; MAX_SERVERS];

/// Calls a function when a stream, which must not be in a capture, reaches it. The stream continues when the
/// function returns.
pub(crate) fn on(
    driver: &'static Driver,
    stream: Arc<Stream>,
    function: Function,
    data: *mut c_void,
) -> Result {
    let server = stream.context.server;
    let queues = &QUEUES[server.session.index()];
    let (queue, name): (&'static Queue, _) = match function {
        Function::Own(_) => (&queues.own, "rgpu-own-calls"),
        Function::Copy(others, _) => (queues.copies(others), "rgpu-copies"),
        Function::Host(_) | Function::Callback(..) => (&queues.programs, "rgpu-callbacks"),
    };
    fences::host_sees();
    if std::ptr::eq(queue, &queues.programs) {
        stream_table::before_program(&stream)?;
    }
    let ticket = host_calls::ticket();
    queue.start.call_once(|| {
        let started = if std::ptr::eq(queue, &queues.programs) {
            start_programs(server)
        } else {
            std::thread::Builder::new()
                .name(name.into())
                .spawn(move || serve(driver, server, queue))
                .map(drop)
        };
        if let Err(error) = started {
            log::error(format_args!("cannot start the thread for stream callbacks: {error}"));
        }
    });
    put(queue, stream, ticket, function, data)
}

/// Puts a call on its stream and into a queue.
fn put(
    queue: &Queue,
    stream: Arc<Stream>,
    ticket: TicketId,
    function: Function,
    data: *mut c_void,
) -> Result {
    // Under the queue's lock, so that calls are queued in their streams' order.
    let mut calls = lock(&queue.calls);
    let (mark, before) = stream.mark_behind_all()?;
    // The program's functions see mapped memory as it is when the server has told of the mark.
    let before = before.filter(|_| matches!(function, Function::Copy(..)));
    let wait = stream.wait_for_ticket(ticket)?;
    holds::calls(&stream, wait);
    // Otherwise another thread's work on the stream may be between them.
    let adjacent = wait.is_next_after(mark);
    if adjacent {
        stream.last_call.raise(wait);
    }
    calls.push_back(Call { stream, mark, before, wait, adjacent, ticket, function, data });
    queue.came.notify_one();
    Ok(())
}

/// The first call in the queue whose stream has reached it. Calls of one stream are queued in order, so none
/// overtakes another.
fn next(queue: &Queue) -> Option<Call> {
    take_first(queue, Call::is_reached)
}

/// The first call in the queue whose stream has reached it, or will when those that were taken return.
fn next_behind<'c>(queue: &Queue, taken: impl Iterator<Item = &'c Call> + Clone) -> Option<Call> {
    take_first(queue, |call| {
        let last = taken.clone().filter(|other| Arc::ptr_eq(&other.stream, &call.stream)).last();
        last.is_some_and(|last| call.is_right_behind(last)) || call.is_reached()
    })
}

fn take_first(queue: &Queue, is_next: impl Fn(&Call) -> bool) -> Option<Call> {
    let mut calls = lock(&queue.calls);
    let at = calls.iter().position(is_next)?;
    calls.remove(at)
}

impl Call {
    fn is_reached(&self) -> bool {
        self.before.as_ref().is_some_and(|before| self.stream.has_done(before))
            || self.stream.has_passed(self.mark)
    }

    /// Whether everything before it is done once another one, which was taken, has returned.
    fn is_right_behind(&self, other: &Call) -> bool {
        let behind = |before| self.stream.has_done_but(before, other.wait);
        other.adjacent && self.before.as_ref().is_some_and(behind)
    }

    fn begin(&mut self, ahead: bool) -> bool {
        if let Function::Copy(_, copy) = &mut self.function { copy.begin(ahead) } else { false }
    }
}

/// Begins what comes behind a call, if that is a copy that is under way. `ahead`: those that were taken
/// before. All but the last one are under way.
fn begin_behind(queue: &Queue, call: &mut Call, ahead: &mut VecDeque<Call>) {
    // The last one may be begun by now. Before that, nothing behind it is.
    let mut is_under_way = call.begin(false) && ahead.back_mut().is_none_or(|last| last.begin(true));
    while is_under_way && ahead.len() + 1 < UNDER_WAY {
        let Some(mut next) = next_behind(queue, std::iter::once(&*call).chain(&*ahead)) else { return };
        is_under_way = next.begin(true);
        ahead.push_back(next);
    }
}

/// Starts the thread that calls the program's functions.
///
/// Such a function may end the thread: an interpreter that shuts down makes every thread that returns to it
/// exit (CPython's `PyThread_exit_thread`, by `pthread_exit`), and its process then ends normally. Rust's own
/// threads catch the resulting unwinding, for which the C library aborts the process. Hence a plain pthread,
/// with nothing that catches and nothing to drop where functions are called.
fn start_programs(server: &'static Server) -> std::io::Result<()> {
    extern "C-unwind" fn programs(server: *mut c_void) -> *mut c_void {
        // SAFETY: a name with its NUL, of at most 16 bytes, for this thread.
        unsafe { libc::prctl(libc::PR_SET_NAME, c"rgpu-callbacks".as_ptr()) };
        // SAFETY: the server that the thread was started with, which is never freed.
        let server: &'static Server = unsafe { &*server.cast() };
        if let Ok(driver) = driver() {
            serve(driver, server, &QUEUES[server.session.index()].programs);
        }
        std::ptr::null_mut()
    }
    type Plain = extern "C" fn(*mut c_void) -> *mut c_void;
    type Unwinding = extern "C-unwind" fn(*mut c_void) -> *mut c_void;
    // SAFETY: the types differ only in whether the function may unwind, and the C library allows a thread's
    // function to unwind (`pthread_exit`).
    let routine = unsafe { std::mem::transmute::<Unwinding, Plain>(programs) };
    let argument = std::ptr::from_ref(server).cast_mut().cast();
    let mut thread = 0;
    // SAFETY: writes a handle; the routine's argument is a server, which lives as long as the process.
    let failed = unsafe { libc::pthread_create(&mut thread, std::ptr::null(), routine, argument) };
    if failed != 0 {
        return Err(std::io::Error::from_raw_os_error(failed));
    }
    // SAFETY: the thread just created, which nobody joins.
    unsafe { libc::pthread_detach(thread) };
    Ok(())
}

/// The thread of a queue.
fn serve(driver: &'static Driver, server: &'static Server, queue: &'static Queue) {
    let session = server.session;
    // A function may end the thread: nothing is to be dropped then.
    let mut ahead = ManuallyDrop::new(VecDeque::new());
    loop {
        let mut call = ahead.pop_front();
        if call.is_none() {
            let mut calls = lock(&queue.calls);
            while calls.is_empty() {
                calls = queue.came.wait(calls).unwrap_or_else(PoisonError::into_inner);
            }
        }
        let waited = session.wait_progress(|| {
            call = call.take().or_else(|| next(queue));
            call.is_some()
        });
        let (mut call, status) = match (call, waited) {
            (Some(call), _) => {
                let failed = session.progress().error(call.stream.context.id).and_then(|word| word.get());
                (call, failed.filter(|(_, sticky, _)| *sticky).map_or(Status::SUCCESS, |(status, ..)| status))
            }
            // The session is lost: report that to the callbacks, in order.
            (None, Err(status)) => match lock(&queue.calls).pop_front() {
                Some(call) => (call, status),
                None => continue,
            },
            (None, Ok(())) => continue,
        };
        // As with NVIDIA's driver, although calls are still refused there.
        context::enter(call.stream.context);
        let (context, stopped) = (call.stream.context, call.stream.unique());
        // The function must see what the stream has written before it.
        shared_blocks::after_wait(driver);
        lock(&STOPPED).push(stopped);
        CALLING.fetch_add(1, Ordering::AcqRel);
        if status == Status::SUCCESS {
            begin_behind(queue, &mut call, &mut ahead);
        }
        let Call { stream, wait, adjacent, ticket, function, data, .. } = call;
        // As above.
        let stream = ManuallyDrop::new(stream);
        match function {
            Function::Own(function) if status == Status::SUCCESS => function(),
            // CUDA doesn't call a host function if its context has failed.
            Function::Host(function) if status == Status::SUCCESS => {
                CALLED.set(true);
                // SAFETY: the program passed the function to be called here with this argument.
                unsafe { function(data) }
            }
            Function::Copy(_, copy) if status == Status::SUCCESS => {
                if let Err(status) = copy.finish() {
                    context.fail(status);
                }
            }
            Function::Host(_) | Function::Own(_) | Function::Copy(..) => {}
            Function::Callback(function, handle) => {
                CALLED.set(true);
                // SAFETY: the program passed the callback to be called here with this argument.
                unsafe { function(handle, status.0, data) }
            }
        }
        CALLED.set(false);
        CALLING.fetch_sub(1, Ordering::AcqRel);
        lock(&STOPPED).retain(|stream| *stream != stopped);
        managed::before_going_on(driver);
        // Let the stream continue. If the session is lost, nothing continues.
        let signaled = session.append(&StreamHostSignal { ticket });
        let stream = ManuallyDrop::into_inner(stream);
        if status == Status::SUCCESS && signaled.is_ok() && adjacent {
            stream.is_synced(wait);
        }
        stream.called.raise(wait);
        host_calls::returned();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::context::Context;
    use crate::process::stream::NON_BLOCKING;
    use client::channel::MAX_CONTEXTS;
    use client::handle::{ContextId, StreamId};
    use client::ops::stream::StreamMark;

    #[test]
    fn a_copy_between_servers_asks_for_no_progress_if_all_before_it_is_known_to_be_done() {
        // It never says that a stream has passed anything.
        let context = Context::new(ContextId(0), Server::unused(), 0, 0, false);
        let stream = Arc::new(Stream::new(StreamId(MAX_CONTEXTS), context, NON_BLOCKING, 0, false));
        let queue = Queue::new();
        let puts = |function| {
            let ticket = host_calls::ticket();
            put(&queue, stream.clone(), ticket, function, std::ptr::null_mut()).unwrap();
        };
        let copy = || Function::Copy(Others([0, 1]), Box::new(|| Ok(())));
        (0..2).for_each(|_| puts(copy()));
        let first = next(&queue).expect("nothing is before it");
        assert!(next(&queue).is_none(), "the first copy has not returned");
        stream.is_synced(first.wait);
        let second = next(&queue).expect("the first one has returned");
        let work = stream.work(&StreamMark { stream: stream.id }).unwrap();
        puts(copy());
        stream.is_synced(second.wait);
        assert!(next(&queue).is_none(), "there is work between");
        stream.is_synced(work);
        assert!(next(&queue).is_some());
        stream.is_synced(stream.last_work.get().unwrap());
        // Another one may have to see what the device has written.
        puts(Function::Own(Box::new(|| ())));
        assert!(next(&queue).is_none());
        context.server.lose();
    }

    /// A copy that notes when it is begun, and whether ahead, if that is possible.
    struct Counted {
        can: bool,
        is_begun: bool,
        begun: Arc<Mutex<Vec<bool>>>,
    }

    impl Across for Counted {
        fn begin(&mut self, ahead: bool) -> bool {
            if !self.is_begun && (!ahead || self.can) {
                self.is_begun = true;
                lock(&self.begun).push(ahead);
            }
            self.is_begun
        }

        fn finish(self: Box<Counted>) -> Result {
            Ok(())
        }
    }

    #[test]
    fn copies_right_behind_one_under_way_are_begun_ahead_until_one_cannot_be() {
        let context = Context::new(ContextId(0), Server::unused(), 0, 0, false);
        let stream = |n| Arc::new(Stream::new(StreamId(MAX_CONTEXTS + n), context, NON_BLOCKING, 0, false));
        let (one, other) = (stream(0), stream(1));
        let begun = Arc::<Mutex<Vec<bool>>>::default();
        let taken = |copies: &[(&Arc<Stream>, bool)], work_between: bool| {
            let queue = Queue::new();
            for (stream, can) in copies {
                let copy = Counted { can: *can, is_begun: false, begun: Arc::clone(&begun) };
                let copy = Function::Copy(Others([0, 1]), Box::new(copy));
                put(&queue, Arc::clone(stream), host_calls::ticket(), copy, std::ptr::null_mut()).unwrap();
                if work_between {
                    stream.work(&StreamMark { stream: stream.id }).unwrap();
                }
            }
            let (mut first, mut ahead) = (next(&queue).unwrap(), VecDeque::new());
            begin_behind(&queue, &mut first, &mut ahead);
            // The first is over.
            if let Some(mut second) = ahead.pop_front() {
                begin_behind(&queue, &mut second, &mut ahead);
                ahead.push_front(second);
            }
            for stream in [&one, &other] {
                stream.last_work.get().inspect(|last| stream.is_synced(*last));
            }
            (ahead.len(), std::mem::take(&mut *lock(&begun)))
        };
        let all = [(&one, true); UNDER_WAY + 2];
        assert_eq!(taken(&all, false), (UNDER_WAY, vec![false, true, true, true, true]));
        assert_eq!(taken(&all, true), (0, vec![false]), "what is between may be anything");
        // Those of another stream have their turn.
        let both = [(&one, true), (&other, true), (&one, true), (&other, false), (&one, true)];
        assert_eq!(taken(&both, false), (3, vec![false, true, true]));
        // It is the next one, but nothing behind it is begun.
        let not = [(&one, true), (&one, false), (&one, true)];
        assert_eq!(taken(&not, false), (2, vec![false, false, true]));
        let later = [(&one, true), (&one, true), (&one, false), (&one, true)];
        assert_eq!(taken(&later, false), (2, vec![false, true]));
        context.server.lose();
    }

    #[test]
    fn a_copy_waits_only_for_copies_that_need_the_same_servers() {
        let of = |own, ends: [usize; 2]| Others::of(own, ends.into_iter());
        // Both directions between two servers are one queue of the stream's server.
        assert_eq!(of(0, [0, 1]), of(0, [1, 0]));
        assert_eq!(of(0, [0, 1]), of(0, [1, 1]));
        assert_eq!(of(0, [2, 1]), of(0, [1, 2]));
        let all = [of(0, [0, 1]), of(0, [0, 2]), of(0, [1, 2])];
        let queues = Queues::new();
        for (at, others) in all.into_iter().enumerate() {
            assert!(std::ptr::eq(queues.copies(others), queues.copies(others)));
            for another in &all[at + 1..] {
                assert!(!std::ptr::eq(queues.copies(others), queues.copies(*another)));
            }
        }
    }
}
