//! What is counted of sessions beyond their end.

use std::time::Duration;

use metrics::Histogram;

use crate::parent::session::Session;
use crate::worker_protocol::{Counters, Kind};

/// Totals of the ended sessions under one name.
#[derive(Debug, Default, Clone, Copy)]
pub(in crate::parent) struct Settled {
    pub(super) sessions: u64,
    pub(super) lost: u64,
    pub(super) resumed: u64,
    pub(super) time: Duration,
    pub(super) counters: Counters,
}

impl Settled {
    /// Adds a session.
    pub(super) fn add(&mut self, session: &Session) {
        let mut counters = session.counters;
        let own = [
            (&mut self.sessions, 1),
            (&mut self.lost, session.lost.into()),
            (&mut self.resumed, session.resumed),
        ];
        let of_worker = self.counters.growing().into_iter().zip(counters.growing().map(|value| *value));
        for (sum, value) in own.into_iter().chain(of_worker) {
            *sum = sum.saturating_add(value);
        }
        self.time = self.time.saturating_add(session.since.elapsed());
    }
}

/// How long sessions waited for a worker, by kind.
#[derive(Debug)]
pub(in crate::parent) struct Waits(pub(super) [Histogram; Kind::ALL.len()]);

impl Default for Waits {
    fn default() -> Waits {
        Waits(Kind::ALL.map(|_| Histogram::new([0.01, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0])))
    }
}

impl Waits {
    /// Notes that a session begins after waiting this long.
    pub(in crate::parent) fn observe(&self, kind: Kind, waited: Duration) {
        let of_kind = Kind::ALL.into_iter().zip(&self.0).find(|(other, _)| *other == kind);
        of_kind.inspect(|(_, histogram)| histogram.observe(waited.as_secs_f64()));
    }
}
