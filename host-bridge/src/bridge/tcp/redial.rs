//! One attempt to open new connections for a session over `tcp`.

use std::time::Duration;

use protocol::link::purpose;

use crate::bridge::config::SessionConfig;
use crate::bridge::resume::{Attempt, Failure, Ticket};
use crate::bridge::state::thread_name;
use crate::bridge::welcome::welcome_at_once;
use crate::stream::Stream;

/// The session's new connections.
#[derive(Debug)]
pub(super) struct Resumed {
    pub(super) control: Stream,
    pub(super) data: Vec<Stream>,
    /// What the server has of each stream, the control stream first.
    pub(super) received: Vec<u64>,
}

/// Opens as many connections as the session has.
pub(super) struct Redial {
    pub(super) ticket: Ticket,
    pub(super) config: SessionConfig,
    /// What has come of each stream, the control stream first.
    pub(super) received: Vec<u64>,
}

impl Attempt for Redial {
    type Resumed = Resumed;

    /// All connections come about side by side, so it takes two round trips.
    fn once(&self, attempt: u32, patience: Duration) -> Result<Resumed, Failure> {
        let Redial { ticket, config, received } = self;
        let count = received.len() as u32 - 1;
        std::thread::scope(|scope| {
            let dial = |index| {
                let thread = std::thread::Builder::new().name(thread_name("redial"));
                let dialing = thread.spawn_scoped(scope, move || {
                    let hello = ticket.hello(purpose::DATA, attempt, index);
                    let (connection, deadline) = ticket.dial(config, &hello, patience)?;
                    welcome_at_once(config, &connection, deadline)?;
                    Ok(connection)
                });
                dialing.map_err(|e| Failure::Later { why: e.to_string(), answered_late: false })
            };
            let data = (0..count).map(dial).collect::<Result<Vec<_>, Failure>>()?;
            let (control, received) = ticket.greet(config, attempt, received, |_| Ok(()), patience)?;
            let data = data
                .into_iter()
                .map(|thread| {
                    let panicked =
                        |_| Failure::Later { why: "a thread panicked".into(), answered_late: false };
                    thread.join().map_err(panicked)?
                })
                .collect::<Result<Vec<_>, Failure>>()?;
            Ok(Resumed { control, data, received })
        })
    }
}
