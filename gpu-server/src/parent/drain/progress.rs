//! How far the shutdown is.

use std::time::Instant;

use serde::Serialize;

use crate::parent::session::Session;

/// The state of a shutdown.
pub(in crate::parent) struct Drain {
    /// When the time for sessions to end by themselves runs out.
    pub(super) until: Instant,
    /// The time has run out: the sessions are being ended.
    pub(super) over: bool,
    /// Sessions that have ended since the shutdown began.
    pub(super) ended: Vec<Ended>,
    /// Whether none is left.
    pub(super) done: bool,
    /// Number of operators who still get messages.
    pub(super) told: usize,
}

/// A session that is over.
#[derive(Clone, Serialize)]
pub(super) struct Ended {
    pub(super) program: String,
    pub(super) client: String,
    pub(super) pid: u32,
    pub(super) outcome: Outcome,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reason: Option<String>,
    /// Sessions that still run.
    pub(super) running: usize,
}

/// How a session has ended.
#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Outcome {
    /// Its program closed it.
    Finished,
    /// Something failed.
    Lost,
    /// Its time ran out.
    Ended,
}

impl Drain {
    pub(super) fn seconds_left(&self) -> u64 {
        let left = self.until.saturating_duration_since(Instant::now());
        if self.over { 0 } else { left.as_secs() + u64::from(left.subsec_nanos() > 0) }
    }

    pub(super) fn count(&self, outcome: Outcome) -> usize {
        self.ended.iter().filter(|ended| ended.outcome == outcome).count()
    }

    /// Notes that a session is over, leaving `running` others. `lost`: the reason, if its program did not
    /// close it.
    pub(in crate::parent) fn note(&mut self, session: &Session, lost: Option<&str>, running: usize) {
        let (outcome, reason) = match lost {
            None => (Outcome::Finished, None),
            Some(_) if self.over => (Outcome::Ended, None),
            Some(why) => (Outcome::Lost, Some(why.to_owned())),
        };
        let (program, client) = (session.program.clone(), session.client.clone());
        self.ended.push(Ended { program, client, pid: session.pid, outcome, reason, running });
    }
}
