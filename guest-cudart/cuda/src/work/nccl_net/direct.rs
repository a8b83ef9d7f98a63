//! The direct connection of two servers' workers that belongs to a connection of the plugin.
//!
//! Nothing here waits: an end asks its server and looks for the answer when NCCL calls the plugin the next
//! time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::process::driver::Server;
use crate::work::direct_copy;
use client::handle::StreamId;
use client::ops::SyncOp;
use client::ops::direct::{
    DirectClose, DirectFailures, DirectFailuresReply, DirectKey, DirectKeyReply, DirectOffer,
    DirectOfferReply, DirectOpen, DirectOpenReply, DirectPrepare, DirectPrepareReply, DirectReceive,
    DirectTicket,
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

/// A sender's part.
pub(crate) enum Sending {
    Key(Key),
    /// The receiver has the key.
    Known(&'static Server),
    Opening(Opening),
    Preparing(Preparing, Outgoing),
    Open(Outgoing),
    None,
}

/// Buffers that are being made ready, before there are kernels that wait for messages.
pub(crate) struct Preparing(Question<DirectPrepare, DirectPrepareReply>);

impl Preparing {
    pub fn new(server: &'static Server, direct: u32, outgoing: bool, stream: StreamId) -> Preparing {
        Preparing(Question::new(server, DirectPrepare { direct, outgoing, stream }))
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

    pub fn server(&self) -> &'static Server {
        self.0.server
    }

    /// The key, or why there is none.
    pub fn answer(&mut self) -> Option<Result<[u8; 32], String>> {
        self.0.answer().map(|answer| answer.map(|reply| reply.key).map_err(says))
    }
}

pub(crate) struct Opening {
    question: Question<DirectOpen, DirectOpenReply>,
    outgoing: Option<Outgoing>,
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
    pub fn new(server: &'static Server, ticket: DirectTicket) -> Opening {
        let direct = direct_copy::next_number();
        let question = Question::new(server, DirectOpen { direct, ticket });
        Opening { question, outgoing: Some(Outgoing { server, direct }), turn: None }
    }

    /// The connection, or why there is none.
    pub fn answer(&mut self) -> Option<Result<Outgoing, String>> {
        if self.turn.is_none() {
            self.turn = Some(Turn::take()?);
        }
        Some(match self.question.answer()? {
            Ok(reply) if reply.refusal.is_empty() => self.outgoing.take().ok_or_else(String::new),
            Ok(reply) => Err(reply.refusal),
            Err(status) => Err(says(status)),
        })
    }
}

/// A connection from a server.
pub(crate) struct Outgoing {
    pub server: &'static Server,
    pub direct: u32,
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        close(self.server, self.direct, true);
    }
}

/// Closes a connection without waiting, if there is one. An older server closes it when the session ends.
fn close(server: &Server, direct: u32, outgoing: bool) {
    let question = DirectClose { direct, outgoing };
    if let Ok(None) = server.session.submit_ahead(&question) {
        // Other threads have all reply slots.
        let _ = server.session.call(&question);
    }
}

/// A receiver's part.
pub(crate) enum Receiving {
    /// The sender has said nothing.
    Unknown,
    Offering(Offering),
    Preparing(Preparing, Incoming, DirectTicket),
    /// The sender has the ticket.
    Offered(Incoming),
    Open(Incoming),
    None,
}

pub(crate) struct Offering {
    question: Question<DirectOffer, DirectOfferReply>,
    incoming: Option<Incoming>,
}

impl Offering {
    /// Asks for a ticket for the worker that has this key.
    ///
    /// # Errors
    /// The server cannot receive pieces by itself.
    pub fn new(server: &'static Server, key: [u8; 32]) -> Result<Offering, String> {
        if !server.session.knows::<DirectReceive>() {
            return Err("the receiving server is older than version 2.5 of the protocol".into());
        }
        let direct = direct_copy::next_number();
        let question = Question::new(server, DirectOffer { direct, key });
        Ok(Offering { question, incoming: Some(Incoming { server, direct, settled: true }) })
    }

    /// The connection and its ticket, or why there is none.
    pub fn answer(&mut self) -> Option<Result<(Incoming, DirectTicket), String>> {
        Some(match self.question.answer()? {
            Ok(reply) => {
                self.incoming.take().map(|incoming| (incoming, reply.ticket)).ok_or_else(String::new)
            }
            Err(status) => Err(says(status)),
        })
    }
}

/// A connection to a server.
pub(crate) struct Incoming {
    pub server: &'static Server,
    pub direct: u32,
    /// Whether every piece that was to be received is landed.
    pub settled: bool,
}

impl Incoming {
    /// Whether a piece that was to be received will not come.
    ///
    /// # Errors
    /// The session's.
    pub fn has_failed(&self) -> Result<bool, Status> {
        FAILURES.has(self.server, self.direct)
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        if self.settled {
            close(self.server, self.direct, false);
        } else {
            // When this is answered, the memory is no longer written. A lost server doesn't write.
            let _ = self.server.session.call(&DirectClose { direct: self.direct, outgoing: false });
        }
        FAILURES.forget(self.server, self.direct);
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
