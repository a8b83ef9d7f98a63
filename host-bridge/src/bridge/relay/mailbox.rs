//! What other threads ask of a relay's thread.

use std::collections::VecDeque;
use std::io;
use std::sync::mpsc::Sender;
use std::sync::{Mutex, PoisonError};

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::bridge::RegionError;
use crate::bridge::state::Raised;

/// Takes the outcome of a request.
pub(super) type Done = Sender<Result<(), RegionError>>;

pub(super) enum Message<M> {
    Register { id: u32, region: M, done: Done },
    Unregister { id: u32, done: Done },
    Close(String),
}

/// Messages in order, with an eventfd of its own: the channel's doorbell belongs to the client as well.
pub(in crate::bridge) struct Mailbox<M> {
    /// `None`: the relay has ended and takes no more.
    messages: Mutex<Option<VecDeque<Message<M>>>>,
    raised: Raised,
    /// Watched edge-triggered, never read.
    wake: EventFd,
}

impl<M> Mailbox<M> {
    pub(super) fn new() -> io::Result<Mailbox<M>> {
        let wake = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Mailbox { messages: Mutex::new(Some(VecDeque::new())), raised: Raised::default(), wake })
    }

    pub(in crate::bridge) fn wake(&self) -> &EventFd {
        &self.wake
    }

    /// Posts a message. It comes back if the relay has ended.
    pub(super) fn post(&self, message: Message<M>) -> Result<(), Message<M>> {
        match self.messages.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            Some(messages) => messages.push_back(message),
            None => return Err(message),
        }
        self.raised.raise();
        let _ = self.wake.write(1);
        Ok(())
    }

    pub(super) fn has_messages(&self) -> bool {
        self.raised.is_raised()
    }

    /// The next message.
    pub(super) fn next(&self) -> Option<Message<M>> {
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

    /// Takes no more messages. Those left are dropped, and with them the senders whose answers somebody waits for.
    pub(super) fn close(&self) {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}
