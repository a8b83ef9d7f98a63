//! The direct connection of two servers' workers that belongs to a connection of the plugin.
//!
//! Nothing here waits: an end asks its server and looks for the answer when NCCL calls the plugin the next
//! time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::abi::result::Result as Cuda;
use crate::process::context::Context;
use crate::process::driver::{Server, driver};
use crate::work::direct_copy;
use crate::work::nccl_net::progress::Progress;
use client::ops::SyncOp;
use client::ops::direct::{
    DirectClose, DirectFailures, DirectFailuresReply, DirectKey, DirectKeyReply, DirectMemory, DirectOffer,
    DirectOfferReply, DirectOpen, DirectOpenReply, DirectPrepare, DirectPrepareReply, DirectReceive,
    DirectSendNow, DirectTicket,
};
use client::session::Ahead;
use client::{Status, lock};

/// A question to a server, asked as soon as a reply slot is free for it.
struct Question<Q, R> {
    server: &'static Server,
    question: Q,
    answer: Option<Ahead<'static, R>>,
}

impl<Q, R> Question<Q, R>
where
    Q: for<'a> SyncOp<'a, Reply = R>,
    R: for<'r> client::wire::Wire<'r>,
{
    fn new(server: &'static Server, question: Q) -> Self {
        Question { server, question, answer: None }
    }

    /// The answer, once it is here.
    fn answer(&mut self) -> Option<Result<R, Status>> {
        if self.answer.is_none() {
            match self.server.session.submit_ahead(&self.question) {
                Ok(asked) => self.answer = asked,
                Err(status) => return Some(Err(status)),
            }
        }
        self.answer.take_if(|answer| answer.is_done()).map(Ahead::take)
    }
}

fn says(status: Status) -> String {
    format!("the server answers {status}")
}

/// Whether messages of a context's device can take a direct connection, or why not.
pub(crate) fn is_useful(context: &Context) -> Result<(), String> {
    let driver = driver().map_err(|status| format!("CUDA answers {status}"))?;
    match driver.devices.get(context.device as usize) {
        Some(device) if device.shares_host_memory => {
            Err("the server is on this machine, and the messages are in memory that both share".into())
        }
        _ => Ok(()),
    }
}

/// A sender's part.
pub(crate) enum Sending {
    Key(Key),
    /// The receiver has the key.
    Known,
    Opening(Opening),
    Preparing(Preparing, Line),
    Open(Line),
    None,
}

/// Buffers that are being made ready, before there are kernels that wait for messages.
pub(crate) struct Preparing(Question<DirectPrepare, DirectPrepareReply>);

impl Preparing {
    pub fn new(line: &Line) -> Preparing {
        Preparing(Question::new(line.server(), line.prepare()))
    }

    /// Whether they are, or why not.
    pub fn answer(&mut self) -> Option<Result<(), String>> {
        self.0.answer().map(|answer| answer.map(drop).map_err(says))
    }
}

pub(crate) struct Key(Question<DirectKey, DirectKeyReply>);

impl Key {
    pub fn of(server: &'static Server) -> Key {
        Key(Question::new(server, DirectKey {}))
    }

    /// The key, or why there is none.
    pub fn answer(&mut self) -> Option<Result<[u8; 32], String>> {
        self.0.answer().map(|answer| answer.map(|reply| reply.key).map_err(says))
    }
}

pub(crate) struct Opening {
    question: Question<DirectOpen, DirectOpenReply>,
    line: Option<Line>,
    turn: Option<Turn>,
}

/// Stands for a connection that is being opened. A server refuses too many at a time.
struct Turn;

static OPENING: AtomicUsize = AtomicUsize::new(0);
/// How many connections this process opens at a time.
const MOST_OPENING: usize = 8;

impl Turn {
    fn take() -> Option<Turn> {
        let more = |count| (count < MOST_OPENING).then_some(count + 1);
        OPENING.fetch_update(Ordering::AcqRel, Ordering::Relaxed, more).ok().map(|_| Turn)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        OPENING.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Opening {
    /// Opens a connection for pieces in this context's memory.
    ///
    /// # Errors
    /// There is no stream for it.
    pub fn new(context: &'static Context, ticket: DirectTicket) -> Result<Opening, String> {
        let line = Line::new(context, true)?;
        let question = Question::new(line.server(), DirectOpen { direct: line.direct, ticket });
        Ok(Opening { question, line: Some(line), turn: None })
    }

    /// The connection, or why there is none.
    pub fn answer(&mut self) -> Option<Result<Line, String>> {
        if self.turn.is_none() {
            self.turn = Some(Turn::take()?);
        }
        Some(match self.question.answer()? {
            Ok(reply) if reply.refusal.is_empty() => self.line.take().ok_or_else(String::new),
            Ok(reply) => Err(reply.refusal),
            Err(status) => Err(says(status)),
        })
    }
}

/// A direct connection, of which this is one end.
pub(crate) struct Line {
    /// In whose memory its pieces are.
    pub context: &'static Context,
    direct: u32,
    outgoing: bool,
    pub progress: Progress,
}

impl Line {
    fn new(context: &'static Context, outgoing: bool) -> Result<Line, String> {
        let progress = Progress::new(context).map_err(|status| format!("CUDA answers {status}"))?;
        Ok(Line { context, direct: direct_copy::next_number(), outgoing, progress })
    }

    fn server(&self) -> &'static Server {
        self.context.server
    }

    fn prepare(&self) -> DirectPrepare {
        let Line { direct, outgoing, .. } = *self;
        DirectPrepare { direct, outgoing, stream: self.progress.stream() }
    }

    /// What names memory for its pieces.
    pub fn naming(&self, address: u64, len: u64) -> Naming {
        let Line { direct, outgoing, .. } = *self;
        Naming(self.server(), DirectMemory { direct, outgoing, address, len, allowed: true })
    }

    /// Begins to send the next piece.
    pub fn send(&mut self, src: u64, len: u64) -> Cuda {
        let (direct, number) = (self.direct, self.progress.begun() + 1);
        self.progress.begin(&DirectSendNow { direct, number, src, len })
    }

    /// Begins to receive the next piece.
    pub fn receive(&mut self, dst: u64, len: u64) -> Cuda {
        let (direct, number) = (self.direct, self.progress.begun() + 1);
        self.progress.begin(&DirectReceive { direct, number, dst, len })
    }

    /// Whether a piece that was to be received will not come.
    ///
    /// # Errors
    /// The session's.
    pub fn has_failed(&self) -> Result<bool, Status> {
        FAILURES.has(self.server(), self.direct)
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        let close = DirectClose { direct: self.direct, outgoing: self.outgoing };
        if self.progress.is_idle() {
            // An older server closes it when the session ends.
            tell(self.server(), &close);
        } else {
            // When this is answered, the memory is no longer used. A lost server doesn't use it.
            let _ = self.server().session.call(&close);
        }
        if !self.outgoing {
            FAILURES.forget(self.server(), self.direct);
        }
    }
}

/// Names mirrored memory that pieces of a connection may be in.
pub(crate) struct Naming(&'static Server, DirectMemory);

impl Naming {
    /// Waits for the server's answer. False: pieces may not be there.
    pub fn ask(&self) -> bool {
        self.0.session.call(&self.1).is_ok()
    }

    /// Says the contrary, without waiting.
    pub fn undo(self) {
        tell(self.0, &DirectMemory { allowed: false, ..self.1 });
    }
}

/// Tells a server something without waiting for what it says, if possible.
fn tell<'a>(server: &Server, what: &impl SyncOp<'a>) {
    if let Ok(None) = server.session.submit_ahead(what) {
        // Other threads have all reply slots.
        let _ = server.session.call(what);
    }
}

/// A receiver's part.
pub(crate) enum Receiving {
    /// The sender has said nothing.
    Unknown,
    Offering(Offering),
    Preparing(Preparing, Line, DirectTicket),
    /// The sender has the ticket.
    Offered(Line),
    Open(Line),
    None,
}

pub(crate) struct Offering {
    question: Question<DirectOffer, DirectOfferReply>,
    line: Option<Line>,
}

impl Offering {
    /// Asks for a ticket for the worker that has this key, for pieces in this context's memory.
    ///
    /// # Errors
    /// The server cannot receive pieces by itself, or there is no stream.
    pub fn new(context: &'static Context, key: [u8; 32]) -> Result<Offering, String> {
        if !context.server.session.knows::<DirectReceive>() {
            return Err("the receiving server is older than version 2.5 of the protocol".into());
        }
        let line = Line::new(context, false)?;
        let question = Question::new(line.server(), DirectOffer { direct: line.direct, key });
        Ok(Offering { question, line: Some(line) })
    }

    /// The connection and its ticket, or why there is none.
    pub fn answer(&mut self) -> Option<Result<(Line, DirectTicket), String>> {
        Some(match self.question.answer()? {
            Ok(reply) => self.line.take().map(|line| (line, reply.ticket)).ok_or_else(String::new),
            Err(status) => Err(says(status)),
        })
    }
}

/// What the servers have said about failed connections, by session.
struct Failures(Mutex<BTreeMap<usize, Failed>>);

static FAILURES: Failures = Failures(Mutex::new(BTreeMap::new()));

struct Failed {
    question: Question<DirectFailures, DirectFailuresReply>,
    directs: BTreeSet<u32>,
}

impl Failures {
    fn has(&self, server: &'static Server, direct: u32) -> Result<bool, Status> {
        let mut all = lock(&self.0);
        let failed = all.entry(server.session.index()).or_insert_with(|| Failed {
            question: Question::new(server, DirectFailures {}),
            directs: BTreeSet::new(),
        });
        while let Some(answer) = failed.question.answer() {
            failed.directs.extend(answer?.directs);
        }
        Ok(failed.directs.contains(&direct))
    }

    fn forget(&self, server: &Server, direct: u32) {
        if let Some(failed) = lock(&self.0).get_mut(&server.session.index()) {
            failed.directs.remove(&direct);
        }
    }
}
