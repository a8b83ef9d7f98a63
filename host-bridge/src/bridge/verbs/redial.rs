//! One attempt to replace the connections of a session over `verbs`: its control connection and its queue pairs.

use std::sync::Arc;
use std::time::Duration;

use protocol::link::{Queues, frame};
use zerocopy::IntoBytes;

use crate::bridge::SessionConfig;
use crate::bridge::resume::{Attempt, Failure, Ticket};
use crate::framing::split_struct;
use crate::stream::Stream;
use crate::verbs::{Domain, Unconnected};

/// The session's new connections. The queue pairs are not connected yet: nothing may come through them, and be lost, before the relay has decided to use them.
#[derive(Debug)]
pub(super) struct Resumed {
    pub(super) control: Stream,
    pub(super) queues: Unconnected,
    /// The server's queue pairs.
    pub(super) peer: Queues,
    /// The requests that the server has acted on, for each queue.
    pub(super) taken: Vec<u64>,
    pub(super) attempt: u32,
}

/// See the module's text. The earlier queue pairs are gone.
pub(super) struct Redial {
    pub(super) ticket: Ticket,
    pub(super) config: SessionConfig,
    pub(super) domain: Arc<Domain>,
    /// The server's requests that were acted on here, for each queue.
    pub(super) taken: Vec<u64>,
}

impl Attempt for Redial {
    type Resumed = Resumed;

    fn once(&self, attempt: u32, patience: Duration) -> Result<Resumed, Failure> {
        let here = |why: String| Failure::Later { why, answered_late: false };
        let queues = Unconnected::new(&self.domain, &self.config.verbs).map_err(|e| here(e.to_string()))?;
        let offer = queues.offer(None);
        let along = |control: &Stream| control.send_frame(frame::QUEUES, &[offer.as_bytes()]);
        let (control, taken) = self.ticket.greet(&self.config, attempt, &self.taken, along, patience)?;
        let mut body = Vec::new();
        let kind = control.recv_frame(&mut body).map_err(|e| Failure::later(&e))?;
        let peer = split_struct::<Queues>(&body).ok().filter(|_| kind == Some(frame::QUEUES));
        let Some((peer, _)) = peer else { return Err(Failure::unexpected(kind, &body)) };
        Ok(Resumed { control, queues, peer, taken, attempt })
    }
}
