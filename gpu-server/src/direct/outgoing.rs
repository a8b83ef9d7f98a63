//! The sending end of a connection.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex};

use host_bridge::endpoint::Mapped;
use host_bridge::stream::Stream;
use host_bridge::verbs::Pieces;
use protocol::Status;
use protocol::link::DirectHeader;
use zerocopy::IntoBytes;

use super::buffers::{Buffer, InUse, Pool};
use super::near::{Copies, Named};
use super::verbs::Bell;
use super::{Common, lock, verbs};

/// The sending end of a connection.
pub struct Outgoing {
    pub(super) jobs: Mutex<Option<Sender<Job>>>,
    pub(super) pool: Arc<Pool>,
    /// Rung for each job, if pieces go over verbs.
    pub(super) bell: Option<Arc<Bell>>,
    pub(super) named: Named,
    pub(super) copies: Arc<Copies>,
}

pub(super) enum Job {
    Piece(u64, Buffer, usize),
    /// This piece will not come.
    Nothing(u64),
    /// Something to do that ends with a piece's job.
    Run(Box<dyn FnOnce() + Send>),
}

impl Outgoing {
    pub(super) fn new(jobs: Sender<Job>, bytes: &Arc<Common>, bell: Option<Arc<Bell>>) -> Outgoing {
        let (jobs, pool) = (Mutex::new(Some(jobs)), Pool::new(bytes));
        let (named, copies) = Default::default();
        Outgoing { jobs, pool, bell, named, copies }
    }

    /// `queue`: what pieces go over, instead of the socket.
    pub(super) fn start(
        stream: Stream,
        queue: Option<Pieces<Buffer>>,
        bytes: Arc<Common>,
    ) -> io::Result<Arc<Outgoing>> {
        let (jobs, due) = channel();
        let due = Jobs { due, last: 0, over: false };
        let bell = queue.is_some().then(Bell::new).transpose()?.map(Arc::new);
        let outgoing = Arc::new(Outgoing::new(jobs, &bytes, bell.clone()));
        let own = Arc::clone(&outgoing);
        std::thread::Builder::new().name("rgpu-direct".into()).spawn(move || {
            let why = match (queue, bell) {
                (Some(queue), Some(bell)) => verbs::send(&stream, queue, due, &bell, &bytes),
                _ => send(&stream, due, &bytes),
            };
            stream.shut_down();
            drop(lock(&own.jobs).take());
            own.pool.close();
            if let Err(e) = why {
                tracing::info!("a direct connection to another server is over: {e}");
            }
        })?;
        Ok(outgoing)
    }

    /// Closes it once everything before is sent.
    pub(super) fn end(&self) {
        // The thread sees the end of its queue after the last job.
        drop(lock(&self.jobs).take());
        self.bell.iter().for_each(|bell| bell.ring());
    }

    /// Begins to send a piece, which must be [filled](Sending::fill) and [finished](Sending::finish). If it
    /// is dropped before that, the other end learns that it will not come.
    pub fn piece(self: &Arc<Outgoing>, number: u64) -> Sending {
        Sending { outgoing: Arc::clone(self), number, len: 0, buffer: None }
    }

    /// Does something in the thread that sends.
    pub(super) fn run(&self, run: impl FnOnce() + Send + 'static) {
        self.push(Job::Run(Box::new(run)));
    }

    pub(super) fn push(&self, job: Job) {
        if let Some(jobs) = &*lock(&self.jobs) {
            // The connection may just have been lost.
            let _ = jobs.send(job);
        }
        self.bell.iter().for_each(|bell| bell.ring());
    }
}

/// What is to be sent. Numbers ascend on a connection. Streams may reach their pieces in another order; then
/// the other end learns of a gap, and the client repeats the copy.
pub(super) struct Jobs {
    pub(super) due: Receiver<Job>,
    pub(super) last: u64,
    /// There will be no more.
    pub(super) over: bool,
}

/// A piece's header, and its bytes if it has any.
pub(super) type Piece = (DirectHeader, Option<(Buffer, usize)>);

impl Jobs {
    /// The next piece, if there is one now.
    pub(super) fn now(&mut self) -> Option<Piece> {
        loop {
            match self.due.try_recv() {
                Ok(job) => {
                    if let Some(piece) = self.judge(job) {
                        return Some(piece);
                    }
                }
                Err(TryRecvError::Empty) => return None,
                Err(TryRecvError::Disconnected) => {
                    self.over = true;
                    return None;
                }
            }
        }
    }

    /// A job's piece. `None`: it comes too late, or this job ends with another one.
    pub(super) fn judge(&mut self, job: Job) -> Option<Piece> {
        let (number, piece) = match job {
            Job::Piece(number, buffer, len) => (number, Some((buffer, len))),
            Job::Nothing(number) => (number, None),
            Job::Run(run) => {
                run();
                return None;
            }
        };
        if number <= self.last {
            return None;
        }
        self.last = number;
        let len = piece.as_ref().map_or(0, |(_, len)| *len as u32);
        Some((DirectHeader { number, len, reserved: 0 }, piece))
    }
}

/// Sends what arrives in the queue. Returns when the connection is lost.
pub(super) fn send(stream: &Stream, mut jobs: Jobs, bytes: &Common) -> io::Result<()> {
    while let Ok(job) = jobs.due.recv() {
        let Some((header, piece)) = jobs.judge(job) else { continue };
        stream.write_all(header.as_bytes())?;
        if let Some((mut buffer, len)) = piece {
            stream.write_all(buffer.bytes(len))?;
            bytes.all.fetch_add(len as u64, Ordering::Relaxed);
        }
    }
    Ok(())
}

/// A piece on its way into a buffer of the sending end.
pub struct Sending {
    pub(super) outgoing: Arc<Outgoing>,
    pub(super) number: u64,
    pub(super) len: usize,
    pub(super) buffer: Option<InUse>,
}

impl Sending {
    /// Where a device should write its `len` bytes. `None`: the connection is lost, or the client has more in
    /// flight than there are buffers.
    pub fn fill(&mut self, len: u64) -> Option<Mapped> {
        let buffer = self.outgoing.pool.try_take()?;
        let mapped = Mapped::of(buffer.memory.region(), len)?;
        (self.len, self.buffer) = (len as usize, Some(InUse(Some(buffer))));
        Some(mapped)
    }

    /// Sends it, if the status says that its bytes are there.
    pub fn finish(mut self, status: Status) {
        if status.is_success()
            && let Some(buffer) = self.buffer.take().and_then(InUse::over)
        {
            self.outgoing.push(Job::Piece(self.number, buffer, self.len));
            self.len = 0;
            self.number = 0;
        }
    }
}

impl Sending {
    /// There is nothing to send, and no device writes into the buffer: the other end is told.
    pub fn give_up(mut self) {
        drop(self.buffer.take().and_then(InUse::over));
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        if self.number > 0 {
            self.outgoing.push(Job::Nothing(self.number));
        }
    }
}
