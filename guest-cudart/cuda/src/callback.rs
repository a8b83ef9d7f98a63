//! Functions of the program that are called in a stream's order: `cuLaunchHostFunc`, `cuStreamAddCallback`.
//!
//! Each is a mark, whose passing this process sees in the stream's progress word, followed by a wait of the stream for a ticket. One thread of the process looks for marks
//! that were passed, calls the function and signals the ticket.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, Once, PoisonError};

use crate::Result;
use crate::context;
use crate::state::{Driver, driver};
use crate::stream::{self, Stream};
use crate::types::{HostFn, StreamCallback};
use client::handle::TicketId;
use client::ops::stream::{StreamHostSignal, StreamHostWait, StreamMark};
use client::{Status, lock, log};

enum Function {
    Host(HostFn),
    Callback(StreamCallback, usize),
}

struct Call {
    stream: Arc<Stream>,
    mark: u64,
    ticket: TicketId,
    function: Function,
    data: *mut c_void,
}

// SAFETY: the pointer is the program's, handed back to its function and otherwise left alone.
unsafe impl Send for Call {}

static QUEUE: Mutex<VecDeque<Call>> = Mutex::new(VecDeque::new());
static CAME: Condvar = Condvar::new();

fn add(stream: usize, per_thread: bool, function: Function, data: *mut c_void) -> Result {
    static TICKETS: AtomicU64 = AtomicU64::new(1);
    static START: Once = Once::new();
    let (driver, context) = context::ready()?;
    let stream = stream::of(driver, context, stream, per_thread)?;
    let ticket = TicketId(TICKETS.fetch_add(1, Ordering::Relaxed));
    START.call_once(|| {
        let started = std::thread::Builder::new().name("rgpu-callbacks".into()).spawn(|| serve(driver));
        if let Err(error) = started {
            log::error(format_args!("no thread for stream callbacks: {error}"));
        }
    });
    // Under the queue's lock, so that calls stand in the queue in the order of their streams.
    let mut queue = lock(&QUEUE);
    let mark = driver.session.append(&StreamMark { stream: stream.id })?;
    stream.marked(mark);
    let seq = driver.session.append(&StreamHostWait { stream: stream.id, ticket })?;
    stream.worked(seq);
    queue.push_back(Call { stream, mark, ticket, function, data });
    CAME.notify_one();
    Ok(())
}

/// The first call in the queue whose stream has come to it. Calls of one stream stand in order, so none is overtaken by its own.
fn next(driver: &Driver) -> Option<Call> {
    let mut queue = lock(&QUEUE);
    let at = queue.iter().position(|call| call.stream.has_passed(driver, call.mark))?;
    queue.remove(at)
}

/// The callback thread.
fn serve(driver: &'static Driver) {
    loop {
        {
            let mut queue = lock(&QUEUE);
            while queue.is_empty() {
                queue = CAME.wait(queue).unwrap_or_else(PoisonError::into_inner);
            }
        }
        let mut call = None;
        let waited = driver.session.wait_progress(|| {
            call = next(driver);
            call.is_some()
        });
        let (call, status) = match (call, waited) {
            (Some(call), _) => {
                let failed =
                    driver.session.progress().error(call.stream.context.id).and_then(|word| word.get());
                (call, failed.filter(|(_, sticky, _)| *sticky).map_or(Status::SUCCESS, |(status, ..)| status))
            }
            // The session is lost: callbacks hear of it, in order.
            (None, Err(status)) => match lock(&QUEUE).pop_front() {
                Some(call) => (call, status),
                None => continue,
            },
            (None, Ok(())) => continue,
        };
        match call.function {
            // A host function is not called when its context has failed, as CUDA says.
            Function::Host(function) if status == Status::SUCCESS => {
                // SAFETY: the program gave the function for this call with this argument.
                unsafe { function(call.data) }
            }
            Function::Host(_) => {}
            // SAFETY: as above.
            Function::Callback(function, handle) => unsafe { function(handle, status.0, call.data) },
        }
        // The stream goes on. If the session is lost there is nothing that could.
        let _ = driver.session.append(&StreamHostSignal { ticket: call.ticket });
    }
}

api! {
    fn cuLaunchHostFunc / cuLaunchHostFunc_ptsz(stream: usize, function: Option<HostFn>, data: *mut c_void) |pt| {
        driver()?;
        add(stream, pt, Function::Host(function.ok_or(Status::INVALID_VALUE)?), data)
    }

    fn cuStreamAddCallback / cuStreamAddCallback_ptsz(stream: usize, callback: Option<StreamCallback>, data: *mut c_void, flags: u32) |pt| {
        driver()?;
        if flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        add(stream, pt, Function::Callback(callback.ok_or(Status::INVALID_VALUE)?, stream), data)
    }
}
