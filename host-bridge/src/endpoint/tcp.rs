//! The worker's end of a `tcp` session: commands, answers and progress on the control connection, data on
//! others.
//!
//! The dispatcher reads the control connection itself, polling before it sleeps. While it executes a command
//! it reads nothing, and a command may take until its stream has its data: so nothing that a command needs
//! may come behind it on that connection. Every thread may send on it, whole frames under a lock. A bridge
//! that waits for something asks whether we are there ([`frame::ALIVE`]); the dispatcher answers, and while
//! it is busy with a long command a keep-alive thread does. In an idle session both sleep, and what notices a
//! bridge that is gone is the connection's keepalive.
//!
//! A lost connection does not end the session: it is parked until the bridge brings new connections
//! ([`TcpClient::resume`]), for a grace period ([`link`](super::link)). What was sent is kept until the
//! bridge has said that it has it, so each stream goes on behind the last byte that came.
//!
//! `client` is what all threads share of it, `commands` the dispatcher's side, `keep_alive` the thread that
//! answers for it.

pub(super) mod client;
mod commands;
mod keep_alive;

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use protocol::Status;
use protocol::data::HostRange;
use protocol::link::ProgressUpdate;
use protocol::trace::{RECORDER, Stage};

use self::client::prepared;
use super::contract::{Client, Sink, Source, Survivor};
use super::end::Lost;
use super::outgoing::Outgoing;
use super::stream::{check_slot, put_progress, put_reply};
use crate::stream::Stream;

pub use self::client::TcpClient;
pub use self::commands::{Allowance, TcpCommands};

/// Executed commands after which the client is told even while there is more to do.
const BATCH: u64 = 512;

impl Survivor for TcpClient {
    fn when_link_changes(&self, told: Box<dyn Fn(bool) + Send + Sync>) {
        // A second one would be the same.
        let _ = self.link_changes.set(told);
    }

    fn resume(&self, attempt: u32, control: Stream) -> io::Result<()> {
        let Some(client) = self.this.upgrade() else { return Ok(()) };
        self.link.introduce();
        let control = prepared(control)?;
        std::thread::Builder::new().name("rgpu-resume".into()).spawn(move || {
            let resumed = client.relink(attempt, &control);
            if !matches!(resumed, Ok(true)) {
                // The bridge must notice, and the daemon has the connection too.
                control.shut_down();
            }
            match resumed {
                Ok(true) => tracing::info!(attempt, "link restored; the session goes on"),
                Ok(false) => {}
                Err(why) => tracing::info!(attempt, "the session was not resumed: {why}"),
            }
        })?;
        Ok(())
    }
}

impl Client for TcpClient {
    fn reply(&self, seq: u64, slot: u16, status: Status, payload: &[u8]) {
        match check_slot(seq, slot, self.slot_count) {
            Ok(()) => {
                RECORDER.note(Stage::Answered, seq, 0);
                self.replies.given();
                self.send(|buffer| put_reply(buffer, seq, slot, status, payload));
            }
            Err(wrong) => self.lose(&wrong),
        }
    }

    fn publish(&self, updates: &[ProgressUpdate]) {
        self.send(|buffer| put_progress(buffer, updates));
    }

    fn before_news(&self) {
        self.before_news.get().inspect(|news| news());
    }

    fn set_before_news(&self, news: Box<dyn Fn() + Send + Sync>) {
        let _ = self.before_news.set(news);
    }

    fn executed(&self, seq: u64) {
        self.executed.store(seq, Ordering::Release);
        self.inbox.executed(seq);
        if seq.is_multiple_of(BATCH) {
            self.flush_executed();
        }
    }

    fn source(&self, seq: u64, piece: u32, range: HostRange) -> Result<Source, Status> {
        Ok(Source::Incoming(self.inbox.incoming(seq, piece, range.len)))
    }

    fn sink(&self, seq: u64, piece: u32, range: HostRange) -> Result<Sink, Status> {
        // No memory reaches so far.
        range.offset.checked_add(range.len).ok_or(Status::INVALID_VALUE)?;
        Ok(Sink::Outgoing(Outgoing::new(self.this.clone(), Arc::clone(&self.outbox), seq, piece, range)))
    }

    fn nothing_sent(&self, seq: u64) {
        self.data_sent(seq, 0);
    }

    fn nothing_read(&self, seq: u64, piece: u32) {
        self.inbox.unwanted((seq, piece));
    }

    fn reads_late(&self) -> bool {
        true
    }

    fn lose(&self, reason: &str) {
        self.fail(reason);
    }

    fn close(&self) {
        self.finish(None);
    }

    fn when_over(&self, then: Box<dyn FnOnce() + Send>) {
        self.farewell.set(then);
    }

    fn lost(&self) -> Option<Lost> {
        self.end.get().cloned().flatten()
    }

    fn rouse(&self) {
        // It fails only if it is raised already.
        let _ = self.changed.write(1);
    }

    fn streams_data(&self) -> bool {
        true
    }

    fn copied(&self) -> u64 {
        self.inbox.copied.load(Ordering::Relaxed) + self.outbox.copied.load(Ordering::Relaxed)
    }

    fn traffic(&self) -> (u64, u64) {
        (self.inbox.bytes.load(Ordering::Relaxed), self.outbox.bytes.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests;
