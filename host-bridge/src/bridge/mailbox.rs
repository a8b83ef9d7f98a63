//! What other threads ask of a relay.

use std::collections::VecDeque;
use std::io;
use std::sync::mpsc::Sender;
use std::sync::{Mutex, PoisonError};

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::bridge::RegionError;
use crate::bridge::state::Raised;

/// Takes the outcome of a wish.
pub(in crate::bridge) type Done = Sender<Result<(), RegionError>>;

pub(in crate::bridge) enum Message<R> {
    Register { id: u32, region: R, done: Done },
    Unregister { id: u32, done: Done },
    Close(String),
}

/// Messages in order, with a doorbell of its own: the channel's is in the client's hands.
pub(in crate::bridge) struct Mailbox<R> {
    /// `None`: the relay has ended and takes no more.
    messages: Mutex<Option<VecDeque<Message<R>>>>,
    raised: Raised,
    /// Watched edge-triggered, never read.
    wake: EventFd,
}

impl<R> Mailbox<R> {
    pub(in crate::bridge) fn new() -> io::Result<Mailbox<R>> {
        let wake = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Mailbox { messages: Mutex::new(Some(VecDeque::new())), raised: Raised::default(), wake })
    }

    pub(in crate::bridge) fn wake(&self) -> &EventFd {
        &self.wake
    }

    /// Leaves a message. It comes back if the relay has ended.
    pub(in crate::bridge) fn post(&self, message: Message<R>) -> Result<(), Message<R>> {
        match self.messages.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            Some(messages) => messages.push_back(message),
            None => return Err(message),
        }
        self.raised.raise();
        let _ = self.wake.write(1);
        Ok(())
    }

    pub(in crate::bridge) fn has_messages(&self) -> bool {
        self.raised.is_raised()
    }

    /// The next message.
    pub(in crate::bridge) fn next(&self) -> Option<Message<R>> {
        if !self.raised.is_raised() {
            return None;
        }
        let mut messages = self.messages.lock().unwrap_or_else(PoisonError::into_inner);
        let next = messages.as_mut().and_then(VecDeque::pop_front);
        if next.is_none() {
            self.raised.take();
        }
        next
    }

    /// Takes no more messages; those left are dropped, and with them the senders that somebody waits for.
    pub(in crate::bridge) fn close(&self) {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}
