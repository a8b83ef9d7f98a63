//! Why clients are refused.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use host_bridge::log_limit::{LogLimit, NotShown};
use protocol::device::Answer;

/// The reason for a refusal. Metrics count refusals by this, so there are few values, and none contains a
/// client's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reason {
    /// The server does not know who the client is.
    UnknownClient,
    /// It uses TLS, and this server doesn't.
    NoTls,
    /// It uses another version.
    Version,
    /// It requests something that is not served there.
    Malformed,
    /// The rules for clients give it nothing, or its access was revoked.
    NotAllowed,
    /// It lacks the lease that it needs, or names one that doesn't exist.
    NoLease,
    /// There is no room for the lease that it requests.
    LeaseTaken,
    /// The server has its maximum of sessions.
    ServerFull,
    /// The client has its maximum of sessions.
    ClientFull,
    /// It has begun too many sessions within a minute.
    Pace,
    /// The session has all of its connections.
    Connections,
    /// No device that it may use exists or is healthy.
    NoDevice,
    /// Others had its devices exclusively for too long.
    DevicesTaken,
    /// No worker became ready in time.
    WaitedTooLong,
    /// Workers do not start.
    WorkersFail,
    /// The session that it wants to resume is over.
    SessionOver,
    /// The server is shutting down.
    Draining,
    /// Something on the server's machine failed.
    Failed,
}

impl Reason {
    /// All of them.
    pub(super) const ALL: [Reason; 18] = [
        Reason::UnknownClient,
        Reason::NoTls,
        Reason::Version,
        Reason::Malformed,
        Reason::NotAllowed,
        Reason::NoLease,
        Reason::LeaseTaken,
        Reason::ServerFull,
        Reason::ClientFull,
        Reason::Pace,
        Reason::Connections,
        Reason::NoDevice,
        Reason::DevicesTaken,
        Reason::WaitedTooLong,
        Reason::WorkersFail,
        Reason::SessionOver,
        Reason::Draining,
        Reason::Failed,
    ];

    /// The answer code for the client, by which `rgpuctl` tells what will never be granted (denied) from what
    /// may be granted later.
    pub(super) fn answer(self) -> Answer {
        match self {
            Reason::UnknownClient
            | Reason::NoTls
            | Reason::NotAllowed
            | Reason::NoLease
            | Reason::SessionOver => Answer::Denied,
            Reason::Version => Answer::Version,
            Reason::Malformed => Answer::Invalid,
            Reason::LeaseTaken
            | Reason::ServerFull
            | Reason::ClientFull
            | Reason::Pace
            | Reason::Connections
            | Reason::NoDevice
            | Reason::DevicesTaken
            | Reason::WaitedTooLong
            | Reason::WorkersFail
            | Reason::Draining
            | Reason::Failed => Answer::NoResources,
        }
    }

    /// Its name in the metrics.
    pub(super) fn name(self) -> &'static str {
        match self {
            Reason::UnknownClient => "unknown_client",
            Reason::NoTls => "no_tls",
            Reason::Version => "version",
            Reason::Malformed => "malformed",
            Reason::NotAllowed => "not_allowed",
            Reason::NoLease => "no_lease",
            Reason::LeaseTaken => "lease_taken",
            Reason::ServerFull => "server_full",
            Reason::ClientFull => "client_full",
            Reason::Pace => "pace",
            Reason::Connections => "connections",
            Reason::NoDevice => "no_device",
            Reason::DevicesTaken => "devices_taken",
            Reason::WaitedTooLong => "waited_too_long",
            Reason::WorkersFail => "workers_fail",
            Reason::SessionOver => "session_over",
            Reason::Draining => "draining",
            Reason::Failed => "failed",
        }
    }
}

/// Refusals so far, by reason.
#[derive(Debug, Default)]
pub(super) struct Refusals([AtomicU64; Reason::ALL.len()]);

impl Refusals {
    /// A client is refused.
    pub(super) fn count(&self, reason: Reason) {
        self.0[reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// All reasons with their numbers.
    pub(super) fn all(&self) -> impl Iterator<Item = (Reason, u64)> {
        Reason::ALL.into_iter().zip(&self.0).map(|(reason, count)| (reason, count.load(Ordering::Relaxed)))
    }
}

/// Maximum number of clients whose lines are limited apart from those of others.
const MOST_CLIENTS: usize = 1024;
/// A client that was refused nothing for this long may write as many lines as a new one.
const FORGOTTEN: Duration = Duration::from_secs(60);

/// Limits the lines about refusals, in the log and in the audit log, and about programs' errors: a client's
/// program can cause any number.
#[derive(Debug, Default)]
pub(super) struct LogLimits {
    /// Those about connections of which nobody knows whose they are.
    pub(super) strangers: LogLimit,
    /// Those about events of devices that change nothing.
    pub(super) notes: LogLimit,
    clients: Mutex<HashMap<String, (Instant, LogLimit)>>,
}

impl LogLimits {
    /// Whether a line about this client may be written, and what to write at its end. `None`: a stranger.
    pub(super) fn allow(&self, client: Option<&str>, now: Instant) -> Option<NotShown> {
        let Some(client) = client else { return self.strangers.allow() };
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if !clients.contains_key(client) && clients.len() >= MOST_CLIENTS {
            clients.retain(|_, (used, _)| now.saturating_duration_since(*used) < FORGOTTEN);
            if clients.len() >= MOST_CLIENTS {
                return self.strangers.allow();
            }
        }
        let (used, limit) = clients.entry(client.to_owned()).or_insert_with(|| (now, LogLimit::default()));
        *used = now;
        limit.allow()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_is_counted_under_its_own_name() {
        for (place, reason) in Reason::ALL.into_iter().enumerate() {
            let refusals = Refusals::default();
            refusals.count(reason);
            let counted: Vec<_> = refusals.all().filter(|(_, count)| *count > 0).collect();
            assert_eq!(counted, [(reason, 1)]);
            assert_eq!(reason as usize, place);
            assert!(Reason::ALL[..place].iter().all(|other| other.name() != reason.name()));
        }
    }

    #[test]
    fn the_page_about_metrics_explains_every_reason() {
        let page = include_str!("../../../docs/metrics.md");
        let (_, table) =
            page.split_once("\n| `reason` | the client was refused because |\n|---|---|\n").unwrap();
        let rows = table.lines().take_while(|line| line.starts_with('|'));
        let cells = rows.filter_map(|row| row.split('|').nth(1));
        let mut explained: Vec<_> = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect();
        let mut all: Vec<_> = Reason::ALL.into_iter().map(Reason::name).collect();
        explained.sort_unstable();
        all.sort_unstable();
        assert_eq!(explained, all, "the table of reasons in docs/metrics.md");
    }

    #[test]
    fn only_what_a_client_may_never_have_is_denied() {
        assert_eq!(Reason::NotAllowed.answer(), Answer::Denied);
        for reason in [Reason::LeaseTaken, Reason::ServerFull, Reason::ClientFull, Reason::Draining] {
            assert_eq!(reason.answer(), Answer::NoResources, "{}", reason.name());
        }
    }

    #[test]
    fn each_client_that_is_refused_again_and_again_writes_few_lines_and_others_write_theirs() {
        let (limits, start) = (LogLimits::default(), Instant::now());
        let shown = |client: &str, count: usize| {
            (0..count).filter(|_| limits.allow(Some(client), start).is_some()).count()
        };
        // One more for each second that the test takes.
        assert!((10..500).contains(&shown("a", 1000)));
        assert_eq!(shown("b", 10), 10);
        for number in 0..2 * MOST_CLIENTS {
            shown(&format!("address{number}"), 1);
        }
        assert!(limits.clients.lock().unwrap().len() <= MOST_CLIENTS);
        assert!(limits.allow(Some("late"), start + FORGOTTEN).is_some());
        assert_eq!(limits.clients.lock().unwrap().len(), 1);
    }
}
