//! Makes a program wait when too much of its work is queued, as the queues of NVIDIA's driver do.
//!
//! Those take about a thousand operations, and a call that finds its queue full waits. Here the server holds
//! back what is queued behind a host function ([`StreamHostWait`](client::ops::stream::StreamHostWait)), and
//! reads ahead while a call of the driver is stuck. So that it never has to hold too much, each session's
//! program asks for room ([`StreamRoom`]) once in [`STEP`] bytes of commands. The question travels in the
//! ring and is answered when all commands before it have been executed, or few enough of them are held back.
//! The program looks for the answer when it has sent another [`STEP`] bytes, and waits only if it has not
//! come by then.
//!
//! Only calls that put work on a stream wait, before they take any lock. Nothing that can end the hold waits:
//! neither the threads that call host functions, watch words of memory and answer page faults, nor calls that
//! only ask a question. Streams that are not held are not stopped either: the server answers their question
//! immediately, and they need not ask again for [`BESIDE`] bytes.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::abi::result::Result;
use crate::process::host_calls::CALLED;
use crate::process::stream::Stream;
use client::channel::MAX_SERVERS;
use client::counters::{COUNTERS, add};
use client::ops::stream::{StreamRoom, StreamRoomReply};
use client::session::{Ahead, Session};
use client::{Status, lock};

/// Bytes of commands between two questions. A distant server answers a question within a round trip, during
/// which no more than this is sent.
const STEP: u64 = 8 << 20;
/// Bytes of commands after which a stream that is not held asks again, while there is no room for others.
const BESIDE: u64 = 1 << 20;
/// Bytes that the server may hold back, counted by itself. The shortest commands take it seven times as many
/// bytes as in the ring, so with two more steps it stays below its own limit of 256 MiB.
const MOST_HELD: u64 = 64 << 20;
/// Pause before another attempt when reply slots are scarce.
const NAP: Duration = Duration::from_millis(1);

/// A session's questions.
struct Room {
    /// The number of bytes in the session's ring from which on a call has to look for an answer.
    next: AtomicU64,
    /// The question that was asked last.
    asked: Mutex<Option<Ahead<'static, StreamRoomReply>>>,
}

/// Indexed by session.
static ROOMS: [Room; MAX_SERVERS] =
    [const { Room { next: AtomicU64::new(STEP), asked: Mutex::new(None) } }; MAX_SERVERS];

/// Called before work is put on a stream that is not being captured, by a thread that holds no lock of this
/// library: waits until there is room for it.
///
/// # Errors
/// If the session is lost.
#[inline]
pub(crate) fn wait(stream: &Stream) -> Result {
    let session = stream.session();
    let appended = session.appended();
    if appended < ROOMS[session.index()].next.load(Ordering::Relaxed)
        || appended < stream.room_until.load(Ordering::Relaxed)
    {
        return Ok(());
    }
    ask(session, &ROOMS[session.index()], stream)
}

#[cold]
fn ask(session: &'static Session, room: &Room, stream: &Stream) -> Result {
    // The stream cannot continue until the host function that makes this call has returned.
    if CALLED.get() || room.ask_ahead(session)? {
        return Ok(());
    }
    add(&COUNTERS.queue_full, 1);
    let slot = loop {
        if let Some(slot) = session.slot_for_room()? {
            break slot;
        }
        std::thread::sleep(NAP);
    };
    slot.submit(&StreamRoom { stream: Some(stream.id), bytes: MOST_HELD })?.wait()?;
    if !room.is_answered() {
        stream.room_until.store(session.appended() + BESIDE, Ordering::Relaxed);
    }
    Ok(())
}

impl Room {
    /// Whether the last question was answered.
    fn is_answered(&self) -> bool {
        lock(&self.asked).as_ref().is_none_or(Ahead::is_done)
    }

    /// Asks the next question, if the last one was answered. Returns false if it was not.
    fn ask_ahead(&self, session: &'static Session) -> Result<bool> {
        let mut asked = lock(&self.asked);
        let appended = session.appended();
        // Another thread may have asked meanwhile.
        if appended < self.next.load(Ordering::Relaxed) {
            return Ok(true);
        }
        if asked.as_ref().is_some_and(|asked| !asked.is_done()) {
            return Ok(false);
        }
        *asked = None;
        let next = match session.submit_ahead(&StreamRoom { stream: None, bytes: MOST_HELD }) {
            Ok(None) => return Ok(false),
            Ok(some) => {
                *asked = some;
                appended + STEP
            }
            // An older server knows no such question.
            Err(Status::NOT_SUPPORTED) => u64::MAX,
            Err(status) => return Err(status),
        };
        self.next.store(next, Ordering::Relaxed);
        Ok(true)
    }
}
