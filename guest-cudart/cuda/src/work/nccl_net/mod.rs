//! A network for NCCL: its messages between GPUs of different servers go from server to server.
//!
//! ```text
//!  sending process                                   receiving process
//!     isend ─ DirectSendNow ▶ server A ══ pieces ══▶ server B ◀── DirectReceive ── irecv
//!       │                                                                            │
//!       └───── lengths ────────────────── TCP connection ──────────────── credits ───┘
//! ```
//!
//! The two processes may be one. Each connection of NCCL's has a TCP connection ([`socket`]), on which the
//! receiver says how much it has room for and the sender which messages it sends ([`frames`]). The messages
//! are in page-locked memory of the processes, which NCCL's kernels write and read. For a device in another
//! machine, the server has such memory ([mirrors](crate::memory::managed::mirror)). So if the servers'
//! workers get a [direct connection](direct), messages go from mirror to mirror, and their bytes never come
//! to the processes. Otherwise they take the TCP connection.
//!
//! A kernel may be waiting for a message, and a call of the driver for that kernel. NVIDIA's driver lets no
//! other thread add work to a stream then. So no call of the driver is on a message's way: the servers'
//! processors copy it. Nor is another command: those of messages are in the express lane, and the servers
//! execute them beside others, with memory that was named when NCCL registered it.
//!
//! NCCL calls this from threads that must not wait, again and again until a request is done. So there are no
//! threads here: each call does what can be done now ([`sender`], [`receiver`]).

mod direct;
mod frames;
mod interfaces;
mod places;
mod progress;
mod receiver;
mod requests;
mod sender;
mod socket;

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

pub(crate) use places::Place;
pub(crate) use requests::Requests;
pub(crate) use socket::{Broken, HANDLE};

use direct::Naming;
use places::{give_to_server, is_mirrored};
use receiver::Receiver;
use sender::Sender;
use socket::{Connecting, Listener, Place as Address};

use crate::process::context;
use client::{lock, log};

/// A connection that NCCL does not have yet.
enum Coming {
    Connecting(Connecting),
    Settling(Box<Sender>),
}

/// A listener, and the connection that has come and is not ready for messages.
pub(crate) struct Accepting {
    listener: Listener,
    came: Option<Receiver>,
}

impl Accepting {
    pub fn new() -> Result<Accepting, Broken> {
        Ok(Accepting { listener: Listener::new()?, came: None })
    }

    /// What NCCL passes to the peer.
    pub fn handle(&self) -> [u8; HANDLE] {
        self.listener.place().to_handle()
    }

    /// The connection that it waits for, once it is there and ready. The device is that of the current
    /// context.
    pub fn accept(&mut self) -> Result<Option<End>, Broken> {
        if self.came.is_none() {
            let came = self.listener.accept()?;
            self.came = came.map(|connection| Receiver::new(connection, context::current().ok()));
        }
        let Some(receiver) = &mut self.came else { return Ok(None) };
        receiver.progress(&mut Requests::new())?;
        if !receiver.is_settled() {
            return Ok(None);
        }
        Ok(self.came.take().map(|receiver| End::new(Side::Receiver(receiver))))
    }
}

/// How long the end of a connection waits for the receiver.
const DELIVERED_WITHIN: Duration = Duration::from_secs(10);

/// One end of a connection.
pub(crate) struct End(Mutex<State>);

struct State {
    requests: Requests,
    side: Side,
    /// Why it is broken.
    broken: Option<Broken>,
}

enum Side {
    Sender(Sender),
    Receiver(Receiver),
}

impl State {
    /// Does what can be done now.
    fn progress(&mut self) -> Result<(), Broken> {
        self.usable()?;
        let progress = match &mut self.side {
            Side::Sender(sender) => sender.progress(&mut self.requests),
            Side::Receiver(receiver) => receiver.progress(&mut self.requests),
        };
        progress.or_else(|why| self.fail(why))
    }

    fn usable(&self) -> Result<(), Broken> {
        self.broken.clone().map_or(Ok(()), Err)
    }

    fn fail<T>(&mut self, why: Broken) -> Result<T, Broken> {
        let connection = match &mut self.side {
            Side::Sender(sender) => &mut sender.connection,
            Side::Receiver(receiver) => &mut receiver.connection,
        };
        connection.fail(&why);
        log::warn(format_args!("NCCL's connection with {} is broken: {why}", connection.peer()));
        self.broken = Some(why.clone());
        Err(why)
    }
}

impl End {
    fn new(side: Side) -> End {
        End(Mutex::new(State { requests: Requests::new(), side, broken: None }))
    }

    /// Connects to a listener. `caller` tells this call from others with the same address. `Ok(None)`: the
    /// connection is not there yet, or not ready for messages. The device is that of the current context.
    pub fn connect(caller: usize, handle: &[u8; HANDLE]) -> Result<Option<End>, Broken> {
        static CONNECTING: Mutex<Option<HashMap<(usize, Address), Coming>>> = Mutex::new(None);
        let wrong =
            || Broken::Peer("a handle of another network plugin: all processes must use the same".into());
        let address = Address::from_handle(handle).ok_or_else(wrong)?;
        let key = (caller, address);
        let mut all = lock(&CONNECTING);
        let all = all.get_or_insert_default();
        let mut coming = match all.remove(&key) {
            Some(coming) => coming,
            None => Coming::Connecting(Connecting::new(address)?),
        };
        if let Coming::Connecting(connecting) = coming {
            if !connecting.is_done()? {
                all.insert(key, Coming::Connecting(connecting));
                return Ok(None);
            }
            coming = Coming::Settling(Box::new(Sender::new(connecting.end()?, context::current().ok())));
        }
        if let Coming::Settling(sender) = &mut coming {
            sender.progress(&mut Requests::new())?;
            if !sender.is_settled() {
                all.insert(key, coming);
                return Ok(None);
            }
        }
        let Coming::Settling(sender) = coming else { return Ok(None) };
        Ok(Some(End::new(Side::Sender(*sender))))
    }

    /// Takes memory that messages will be in. Returns where it is.
    pub fn register(&self, at: u64, len: u64) -> Place {
        // The lock is not held meanwhile: the answer may come after a kernel that waits for messages.
        match self.naming(at, len) {
            Some(naming) if give_to_server(at, len).is_ok() && naming.ask() => Place::Named,
            _ => Place::Here,
        }
    }

    /// Messages are in this memory no more.
    pub fn deregister(&self, place: Place, at: u64, len: u64) {
        if place == Place::Named
            && let Some(naming) = self.naming(at, len)
        {
            naming.undo();
        }
    }

    /// What names memory for the direct connection, if there is one and its server mirrors the memory.
    fn naming(&self, at: u64, len: u64) -> Option<Naming> {
        let state = lock(&self.0);
        let line = match &state.side {
            Side::Sender(sender) => sender.line(),
            Side::Receiver(receiver) => receiver.line(),
        };
        line.filter(|line| is_mirrored(line.context, at)).map(|line| line.naming(at, len))
    }

    /// Begins to send. `Ok(None)`: not now.
    ///
    /// # Safety
    /// The memory stays valid, and unchanged, until the request is done or the end is dropped.
    pub unsafe fn send(&self, place: Place, at: u64, len: u64) -> Result<Option<usize>, Broken> {
        let mut state = lock(&self.0);
        state.progress()?;
        let State { requests, side: Side::Sender(sender), .. } = &mut *state else {
            return Err(Broken::Here("a receiving end cannot send".into()));
        };
        let Some(request) = requests.begin() else { return Ok(None) };
        match sender.send(request, place, at, len) {
            Ok(true) => {}
            Ok(false) => {
                requests.cancel(request);
                return Ok(None);
            }
            Err(why) => return state.fail(why),
        }
        state.progress()?;
        Ok(Some(request))
    }

    /// Begins to receive up to `most` bytes. `Ok(None)`: not now.
    ///
    /// # Safety
    /// The memory stays valid, and nobody else uses it, until the request is done or the end is dropped.
    pub unsafe fn receive(&self, place: Place, at: u64, most: u64) -> Result<Option<usize>, Broken> {
        let mut state = lock(&self.0);
        state.usable()?;
        let State { requests, side: Side::Receiver(receiver), .. } = &mut *state else {
            return Err(Broken::Here("a sending end cannot receive".into()));
        };
        let Some(request) = requests.begin() else { return Ok(None) };
        receiver.receive(request, place, at, most);
        state.progress()?;
        Ok(Some(request))
    }

    /// Ends it. A sender waits until the receiver has what was sent.
    pub fn close(self) {
        let mut state = self.0.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Side::Sender(sender) = &mut state.side
            && !sender.is_delivered()
        {
            sender.say_goodbye();
        }
        let begin = Instant::now();
        while state.progress().is_ok()
            && matches!(&state.side, Side::Sender(sender) if !sender.is_delivered())
            && begin.elapsed() < DELIVERED_WITHIN
        {
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Whether a request is done, and with how many bytes. A request that is done ends.
    pub fn test(&self, request: usize) -> Result<Option<u64>, Broken> {
        let mut state = lock(&self.0);
        if let Some(bytes) = state.requests.test(request) {
            return Ok(Some(bytes));
        }
        state.progress()?;
        Ok(state.requests.test(request))
    }
}
