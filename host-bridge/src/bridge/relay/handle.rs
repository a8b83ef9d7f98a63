//! A running relay as other threads see it: how they register memory, and how they end it.
//!
//! ```text
//!   register, unregister, close ──▶ RelayHandle ── mailbox ──▶ the relay's thread
//! ```

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::end::EndReason;
use super::mailbox::{Mailbox, Message};
use crate::bridge::error::{ConnectError, RegionError};
use crate::bridge::state::{SessionState, thread_name};
use crate::bridge::transport::Closed;
use crate::trace::Timeline;

/// Whether the relay has ended.
#[derive(Debug, Default)]
struct Ended {
    over: Mutex<bool>,
    changed: Condvar,
}

impl Ended {
    fn tell(&self) {
        *self.over.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }
}

/// A running relay. `M`: the client's memory, as its transport uses it.
pub(in crate::bridge) struct RelayHandle<M> {
    session: Arc<SessionState>,
    mailbox: Arc<Mailbox<M>>,
    ended: Arc<Ended>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl<M> std::fmt::Debug for RelayHandle<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RelayHandle").field("session", &self.session).finish_non_exhaustive()
    }
}

impl<M: Send + 'static> RelayHandle<M> {
    /// Starts a thread that runs `relay` until it says why it ended. The channel is ready when this returns.
    pub(in crate::bridge) fn start(
        session: Arc<SessionState>,
        relay: impl FnOnce(&Arc<SessionState>, &Mailbox<M>) -> EndReason + Send + 'static,
    ) -> Result<RelayHandle<M>, ConnectError> {
        let here = |source| ConnectError::Here { source };
        let mailbox = Arc::new(Mailbox::new().map_err(here)?);
        let ended = Arc::new(Ended::default());
        session.header().set_ready();
        let (for_relay, for_mailbox, for_ended) = (session.clone(), mailbox.clone(), ended.clone());
        let thread = std::thread::Builder::new()
            .name(thread_name("relay"))
            .spawn(move || {
                // A defect must end this session with a reason, and not leave its client waiting.
                let end = catch_unwind(AssertUnwindSafe(|| relay(&for_relay, &for_mailbox)));
                #[cfg(feature = "software-verbs")]
                if let Err(why) = &end
                    && crate::verbs::software::has_ended(&**why)
                {
                    for_mailbox.close();
                    return for_ended.tell();
                }
                let end = end.unwrap_or_else(|_| {
                    EndReason::Here("the relay panicked: its message is on standard error".into())
                });
                if let Some(timeline) = Timeline::create(&format!("bridge-{}", for_relay.channel.pid)) {
                    timeline.save(&for_relay.trace);
                }
                let reason = end.text(&for_relay.server);
                for_mailbox.close();
                match end {
                    EndReason::Asked(_) => for_relay.end(&reason),
                    _ => for_relay.lose(&reason),
                }
                for_mailbox.gone();
                for_ended.tell();
            })
            .map_err(here)?;
        Ok(RelayHandle { session, mailbox, ended, thread: Mutex::new(Some(thread)) })
    }
}

impl<M> RelayHandle<M> {
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

    /// As [`Transport::register_region`](crate::bridge::Transport::register_region), with the region made.
    pub(in crate::bridge) fn register(&self, id: u32, region: M) -> Result<(), RegionError> {
        let (done, answer) = channel();
        self.mailbox.post(Message::Register { id, region, done }).map_err(|_| self.over())?;
        answer.recv().unwrap_or_else(|_| Err(self.over()))
    }

    /// As [`Transport::unregister_region`](crate::bridge::Transport::unregister_region).
    pub(in crate::bridge) fn unregister(&self, id: u32) -> Result<(), RegionError> {
        let (done, answer) = channel();
        if self.mailbox.post(Message::Unregister { id, done }).is_err() {
            return Ok(());
        }
        match answer.recv() {
            Ok(answer) => answer,
            // The relay has ended, and so has every access.
            Err(_) => Ok(()),
        }
    }

    /// As [`Transport::pause`](crate::bridge::Transport::pause).
    pub(in crate::bridge) fn pause(&self) {
        self.mailbox.pause();
    }

    /// As [`Transport::is_paused`](crate::bridge::Transport::is_paused).
    pub(in crate::bridge) fn is_paused(&self, patience: Duration) -> bool {
        self.mailbox.wait_for_pause(patience)
    }

    /// As [`Transport::go_on`](crate::bridge::Transport::go_on).
    pub(in crate::bridge) fn go_on(&self) {
        self.mailbox.unpause();
    }

    /// As [`Transport::close`](crate::bridge::Transport::close).
    pub(in crate::bridge) fn close(&self, reason: &str, patience: Duration) -> Closed {
        let _ = self.mailbox.post(Message::Close(reason.to_owned()));
        if !self.wait_for_end(patience) {
            return Closed::StillHeld;
        }
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // It has ended the session; all that is left for it to do is to return.
            let _ = thread.join();
        }
        Closed::Released
    }
}

impl<M> Drop for RelayHandle<M> {
    fn drop(&mut self) {
        self.close("closed", Duration::from_secs(60));
    }
}
