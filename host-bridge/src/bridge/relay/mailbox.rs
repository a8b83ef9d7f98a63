//! What other threads ask of a relay's thread.

use std::collections::VecDeque;
use std::io;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::bridge::error::RegionError;
use crate::bridge::state::Raised;

/// Takes the outcome of a request.
pub(super) type Done = Sender<Result<(), RegionError>>;

pub(super) enum Message<M> {
    Register { id: u32, region: M, done: Done },
    Unregister { id: u32, done: Done },
    Close(String),
}

/// Whether the relay is to leave the client's memory alone, and whether it does.
#[derive(Debug, Default)]
struct Pause {
    wanted: bool,
    /// The relay's thread waits, or has ended.
    reached: bool,
    /// The session ends: nobody waits any longer.
    over: bool,
}

/// Messages in order, with an eventfd of its own: the channel's doorbell belongs to the client as well.
pub(in crate::bridge) struct Mailbox<M> {
    /// `None`: the relay has ended and takes no more.
    messages: Mutex<Option<VecDeque<Message<M>>>>,
    raised: Raised,
    /// Watched edge-triggered, never read.
    wake: Arc<EventFd>,
    pause: Mutex<Pause>,
    changed: Condvar,
}

impl<M> Mailbox<M> {
    pub(super) fn new() -> io::Result<Mailbox<M>> {
        let wake =
            Arc::new(EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?);
        let messages = Mutex::new(Some(VecDeque::new()));
        let (raised, pause, changed) = Default::default();
        Ok(Mailbox { messages, raised, wake, pause, changed })
    }

    fn lock_pause(&self) -> MutexGuard<'_, Pause> {
        self.pause.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the relay pause. Does not wait for it.
    pub(super) fn pause(&self) {
        self.lock_pause().wanted = true;
        self.raised.raise();
        let _ = self.wake.write(1);
    }

    /// Waits up to `patience` until the relay has paused, or has ended. False: it has not.
    pub(super) fn wait_for_pause(&self, patience: Duration) -> bool {
        let waits = |pause: &mut Pause| !pause.reached;
        let waited = self.changed.wait_timeout_while(self.lock_pause(), patience, waits);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Has the relay go on.
    pub(super) fn unpause(&self) {
        self.lock_pause().wanted = false;
        self.changed.notify_all();
    }

    /// Whether the relay is to pause.
    pub(in crate::bridge) fn is_to_pause(&self) -> bool {
        let pause = self.lock_pause();
        pause.wanted && !pause.over
    }

    /// For the relay, which does not touch the client's memory now: waits as long as it is to pause. A
    /// session that ends is not paused any longer.
    pub(in crate::bridge) fn rest(&self) {
        let mut pause = self.lock_pause();
        while pause.wanted && !pause.over {
            pause.reached = true;
            self.changed.notify_all();
            pause = self.changed.wait(pause).unwrap_or_else(PoisonError::into_inner);
        }
        pause.reached = false;
    }

    /// The session ends, also while it is paused.
    fn end_pause(&self) {
        self.lock_pause().over = true;
        self.changed.notify_all();
    }

    /// Wakes the relay when it is written to.
    pub(in crate::bridge) fn wake(&self) -> &Arc<EventFd> {
        &self.wake
    }

    /// Posts a message. It comes back if the relay has ended. A relay that is paused acts on it when it goes
    /// on; [`Message::Close`] has it do so.
    pub(super) fn post(&self, message: Message<M>) -> Result<(), Message<M>> {
        let closes = matches!(message, Message::Close(_));
        match self.messages.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            Some(messages) => messages.push_back(message),
            None => return Err(message),
        }
        self.raised.raise();
        let _ = self.wake.write(1);
        if closes {
            self.end_pause();
        }
        Ok(())
    }

    /// Why the session is to be closed, if it is. For a relay that cannot act on messages yet.
    pub(in crate::bridge) fn closing(&self) -> Option<String> {
        let messages = self.messages.lock().unwrap_or_else(PoisonError::into_inner);
        messages.iter().flatten().find_map(|message| match message {
            Message::Close(reason) => Some(reason.clone()),
            Message::Register { .. } | Message::Unregister { .. } => None,
        })
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
            // It may have been raised for a pause.
            if self.is_to_pause() {
                self.raised.raise();
            }
        }
        next
    }

    /// Takes no more messages. Those left are dropped, and with them the senders whose answers somebody waits
    /// for.
    pub(super) fn close(&self) {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.end_pause();
    }

    /// The relay has ended, and touches the client's memory no more.
    pub(super) fn gone(&self) {
        self.lock_pause().reached = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_is_noticed_also_if_it_comes_while_messages_are_taken() {
        let mailbox = Mailbox::<()>::new().unwrap();
        let (done, _answer) = std::sync::mpsc::channel();
        assert!(mailbox.post(Message::Unregister { id: 1, done }).is_ok());
        assert!(!mailbox.is_to_pause() && mailbox.next().is_some());
        mailbox.pause();
        assert!(mailbox.next().is_none() && mailbox.has_messages(), "the relay looks again");
        mailbox.unpause();
        assert!(mailbox.next().is_none() && !mailbox.has_messages());
    }
}
