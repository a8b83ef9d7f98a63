//! One attempt to replace the connections of a session over `verbs`: its control connection and its queue
//! pairs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use protocol::link::{MAX_QUEUES, Queues, RegionKey, Written, frame};
use zerocopy::{FromBytes, IntoBytes};

use crate::bridge::config::SessionConfig;
use crate::bridge::resume::{Attempt, Failure, Ticket};
use crate::framing::split_struct;
use crate::stream::Stream;
use crate::verbs::{Domain, Unconnected};

/// The session's new connections. The queue pairs are not connected yet: nothing may come through them, and
/// be lost, before the relay has decided to use them.
#[derive(Debug)]
pub(super) struct Resumed {
    pub(super) control: Stream,
    pub(super) queues: Unconnected,
    /// The server's queue pairs.
    pub(super) peer: Queues,
    /// What the server has acted on: bytes of frames, and of each queue of data, writes.
    pub(super) taken: Vec<u64>,
    /// The server's writes that are here, and that an earlier process had not acted on.
    pub(super) written: Vec<Written>,
}

/// See the module's text. The earlier queue pairs are gone.
pub(super) struct Redial {
    pub(super) ticket: Ticket,
    pub(super) config: SessionConfig,
    pub(super) domain: Arc<Domain>,
    /// What was acted on here, likewise.
    pub(super) taken: Vec<u64>,
    /// The keys that the client's memory has under this process, if the server knows those of an earlier one.
    pub(super) keys: Vec<RegionKey>,
}

/// The most writes of which a process may not know: all queues full of them.
const MOST_WRITTEN: usize = MAX_QUEUES << 15;

impl Attempt for Redial {
    type Resumed = Resumed;

    fn once(&self, attempt: u32, patience: Duration) -> Result<Resumed, Failure> {
        let here = |why: String| Failure::Later { why, answered_late: false };
        let queues = Unconnected::new(&self.domain, &self.config.verbs).map_err(|e| here(e.to_string()))?;
        let offer = queues.offer(None);
        let along = |control: &Stream| {
            for key in &self.keys {
                control.send_frame(frame::REGION_KEY, &[key.as_bytes()])?;
            }
            control.send_frame(frame::QUEUES, &[offer.as_bytes()])
        };
        let (control, taken) = self.ticket.greet(&self.config, attempt, &self.taken, along, patience)?;
        let (mut body, mut written, deadline) = (Vec::new(), Vec::new(), Instant::now() + patience);
        loop {
            let kind = control.recv_frame_until(&mut body, deadline).map_err(|e| Failure::later(&e))?;
            let whole = body.len().is_multiple_of(size_of::<Written>());
            if kind == Some(frame::WRITTEN) && whole && written.len() <= MOST_WRITTEN {
                let entries = body.chunks_exact(size_of::<Written>());
                written.extend(entries.filter_map(|entry| Written::read_from_bytes(entry).ok()));
                continue;
            }
            let peer = split_struct::<Queues>(&body).ok().filter(|_| kind == Some(frame::QUEUES));
            let Some((peer, _)) = peer else { return Err(Failure::unexpected(kind, &body)) };
            return Ok(Resumed { control, queues, peer, taken, written });
        }
    }
}
