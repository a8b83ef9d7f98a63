//! What the transports with a relay have in common: its thread, how it is asked to end and why it did, and the regions, none of which it forgets too early.
//!
//! ```text
//!   register, unregister, close ──▶ Relayed ── mailbox ──▶ relay's thread: Regions
//! ```

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::state::{SessionState, thread_name};
use super::mailbox::{Done, Mailbox, Message};
use super::{Closed, ConnectError, RegionError};
use crate::framing::{Address, connect_tcp, connect_unix};

/// Why a relay ended.
#[derive(Debug)]
pub(super) enum EndReason {
    /// The client did what no correct client does.
    Client(String),
    /// The server did what no correct server does.
    Server(String),
    /// A connection to the server broke.
    Gone(String),
    /// The server said goodbye.
    Bye(String),
    /// Something on this host failed.
    Here(String),
    /// [`Transport::close`](super::Transport::close).
    Asked(String),
}

impl EndReason {
    pub(super) fn text(&self, server: &str) -> String {
        match self {
            EndReason::Client(what) => format!("malformed command in the channel: {what}"),
            EndReason::Server(what) => {
                format!("the server at {server} does not keep to the protocol: {what}")
            }
            EndReason::Gone(what) => format!("connection to the server at {server} lost: {what}"),
            EndReason::Bye(what) if what.is_empty() => format!("the server at {server} ended the session"),
            EndReason::Bye(what) => format!("the server at {server} ended the session: {what}"),
            EndReason::Here(what) => {
                format!("this host failed while talking to the server at {server}: {what}")
            }
            EndReason::Asked(what) => what.clone(),
        }
    }
}

/// Connects to a server.
pub(super) fn dial(address: &Address, timeout: Duration) -> io::Result<OwnedFd> {
    Ok(match address {
        Address::Tcp(host, port) => connect_tcp(host, *port, timeout)?.into(),
        Address::Unix(path) => connect_unix(path)?.into(),
    })
}

/// Whether the relay has ended.
#[derive(Debug, Default)]
struct Ended {
    over: Mutex<bool>,
    changed: Condvar,
}

/// A running relay, from outside. `R`: a region, as the relay wants it.
pub(super) struct Relayed<R> {
    session: Arc<SessionState>,
    mailbox: Arc<Mailbox<R>>,
    ended: Arc<Ended>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl<R> std::fmt::Debug for Relayed<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Relayed").field("session", &self.session).finish_non_exhaustive()
    }
}

impl<R: Send + 'static> Relayed<R> {
    /// Has a thread run `relay`, until it says why it ended. The channel is ready when this returns.
    pub(super) fn start(
        session: Arc<SessionState>,
        relay: impl FnOnce(&Arc<SessionState>, &Mailbox<R>) -> EndReason + Send + 'static,
    ) -> Result<Relayed<R>, ConnectError> {
        let here = |source| ConnectError::Here { source };
        let mailbox = Arc::new(Mailbox::new().map_err(here)?);
        let ended = Arc::new(Ended::default());
        session.header().set_ready();
        let (for_relay, for_mailbox, for_ended) = (session.clone(), mailbox.clone(), ended.clone());
        let thread = std::thread::Builder::new()
            .name(thread_name("relay"))
            .spawn(move || {
                // A defect here must end this session with a reason, and not leave its client waiting.
                let end =
                    catch_unwind(AssertUnwindSafe(|| relay(&for_relay, &for_mailbox))).unwrap_or_else(|_| {
                        EndReason::Here("the relay failed; its message stands on standard error".into())
                    });
                let reason = end.text(&for_relay.server);
                for_mailbox.close();
                match end {
                    EndReason::Asked(_) => for_relay.end(&reason),
                    _ => for_relay.lose(&reason),
                }
                *for_ended.over.lock().unwrap_or_else(PoisonError::into_inner) = true;
                for_ended.changed.notify_all();
            })
            .map_err(here)?;
        Ok(Relayed { session, mailbox, ended, thread: Mutex::new(Some(thread)) })
    }
}

impl<R> Relayed<R> {
    fn over(&self) -> RegionError {
        RegionError::Over(self.session.ended().unwrap_or("the session is over").to_owned())
    }

    fn wait_for_end(&self, patience: Duration) -> bool {
        let over = self.ended.over.lock().unwrap_or_else(PoisonError::into_inner);
        let (over, _) = self
            .ended
            .changed
            .wait_timeout_while(over, patience, |over| !*over)
            .unwrap_or_else(PoisonError::into_inner);
        *over
    }

    /// As [`Transport::register_region`](super::Transport::register_region), with the region made.
    pub(super) fn register(&self, id: u32, region: R) -> Result<(), RegionError> {
        let (done, answer) = channel();
        self.mailbox.post(Message::Register { id, region, done }).map_err(|_| self.over())?;
        answer.recv().unwrap_or_else(|_| Err(self.over()))
    }

    /// As [`Transport::unregister_region`](super::Transport::unregister_region).
    pub(super) fn unregister(&self, id: u32) -> Result<(), RegionError> {
        let (done, answer) = channel();
        if self.mailbox.post(Message::Unregister { id, done }).is_err() {
            return Ok(());
        }
        match answer.recv() {
            Ok(answer) => answer,
            // The relay has ended, and with it every access.
            Err(_) => Ok(()),
        }
    }

    /// As [`Transport::close`](super::Transport::close).
    pub(super) fn close(&self, reason: &str, patience: Duration) -> Closed {
        let _ = self.mailbox.post(Message::Close(reason.to_owned()));
        if !self.wait_for_end(patience) {
            return Closed::StillHeld;
        }
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // It has said that it is over; what is left of it is its own return.
            let _ = thread.join();
        }
        Closed::Released
    }
}

impl<R> Drop for Relayed<R> {
    fn drop(&mut self) {
        self.close("closed", Duration::from_secs(60));
    }
}

/// A region that is to be forgotten once the records before the wish are taken.
struct Leaving {
    id: u32,
    /// Bytes taken off the ring at the time of the wish.
    at: u64,
    done: Done,
}

/// The regions that a relay knows. How many hold one says whether anything is under way in it.
pub(super) struct Regions<R> {
    known: HashMap<u32, Arc<R>>,
    leaving: VecDeque<Leaving>,
    /// Forgotten, but with data still under way in them.
    draining: Vec<(Arc<R>, Done)>,
}

impl<R> Regions<R> {
    pub(super) fn new() -> Regions<R> {
        Regions { known: HashMap::new(), leaving: VecDeque::new(), draining: Vec::new() }
    }

    /// Those that records may name, by their ids.
    pub(super) fn known(&self) -> &HashMap<u32, Arc<R>> {
        &self.known
    }

    /// Takes what other threads ask for, when so many bytes have been taken off the ring. True: there was something. The error: the session is to end.
    pub(super) fn take_messages(&mut self, mailbox: &Mailbox<R>, taken: u64) -> Result<bool, EndReason> {
        let mut worked = false;
        while let Some(message) = mailbox.next() {
            worked = true;
            match message {
                Message::Register { id, region, done } => {
                    self.known.insert(id, Arc::new(region));
                    let _ = done.send(Ok(()));
                }
                Message::Unregister { id, done } => self.leaving.push_back(Leaving { id, at: taken, done }),
                Message::Close(reason) => return Err(EndReason::Asked(reason)),
            }
        }
        Ok(worked)
    }

    /// Forgets those that are to be forgotten and that nothing is under way in, and says so to who waits for it. `has_work`: the ring of `size` bytes is not empty; `taken`: as above.
    pub(super) fn let_go(&mut self, has_work: impl Fn() -> bool, taken: u64, size: u64) {
        // Records that stood in the ring when the wish came have been taken once the ring was empty, or once as many bytes went by as it holds.
        while let Some(front) = self.leaving.front() {
            if has_work() && taken - front.at < size {
                break;
            }
            let Some(Leaving { id, done, .. }) = self.leaving.pop_front() else { break };
            match self.known.remove(&id) {
                Some(region) => self.draining.push((region, done)),
                None => drop(done.send(Err(RegionError::Unknown(id)))),
            }
        }
        // The count is exact: only the relay clones these, and what a hand holds was moved to it.
        for (region, done) in self.draining.extract_if(.., |(region, _)| Arc::strong_count(region) == 1) {
            // The region goes before the answer does, and with it a registration: from then on the memory is the client's alone.
            drop(region);
            let _ = done.send(Ok(()));
        }
    }
}
