//! All sessions of a device process, and the summed counters of those that have ended. The keeper's status
//! combines the reports of all device processes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use host_bridge::bridge::{LinkState, Session};
use protocol::device::Answer;
use serde_json::{Map, Value, json};

/// A session and its owner.
#[derive(Debug, Clone)]
struct Entry {
    owner: String,
    channel: u64,
    session: Arc<Session>,
}

/// Counters since the process started.
#[derive(Debug, Default)]
pub struct Totals {
    /// Sessions opened.
    pub opened: AtomicU64,
    /// Sessions that were refused or failed to connect, by the answer that their client got.
    refused: [AtomicU64; REFUSALS.len()],
    /// Sessions lost.
    pub lost: AtomicU64,
    /// Sessions closed on request.
    pub closed: AtomicU64,
    /// Requests answered `INVALID`.
    pub malformed: AtomicU64,
}

/// The answers that refuse a session, and the names of their counters in the status.
pub const REFUSALS: [(Answer, &str); 6] = [
    (Answer::Invalid, "sessions_refused_invalid"),
    (Answer::NoResources, "sessions_refused_no_resources"),
    (Answer::NoServer, "sessions_refused_no_server"),
    (Answer::Version, "sessions_refused_version"),
    (Answer::Denied, "sessions_refused_denied"),
    (Answer::Unsupported, "sessions_refused_unsupported"),
];

impl Totals {
    /// A session was refused or failed to connect.
    pub fn refuse(&self, answer: Answer) {
        let place = REFUSALS.iter().position(|(other, _)| *other == answer).unwrap_or(0);
        self.refused[place].fetch_add(1, Ordering::Relaxed);
    }
}

/// The sessions of the process.
#[derive(Debug)]
pub struct Registry {
    next: AtomicU64,
    sessions: Mutex<BTreeMap<u64, Entry>>,
    ended: Mutex<BTreeMap<&'static str, u64>>,
    /// The process's own counters.
    pub totals: Totals,
}

impl Registry {
    /// An empty registry.
    pub fn new() -> Registry {
        Registry {
            next: AtomicU64::new(1),
            sessions: Mutex::default(),
            ended: Mutex::default(),
            totals: Totals::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Entry>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lists a session that was opened, until the guard is dropped.
    pub fn list(self: &Arc<Self>, owner: &str, channel: u64, session: Arc<Session>) -> Listed {
        self.totals.opened.fetch_add(1, Ordering::Relaxed);
        self.list_resumed(owner, channel, session)
    }

    /// Lists a session that another process opened, until the guard is dropped.
    pub fn list_resumed(self: &Arc<Self>, owner: &str, channel: u64, session: Arc<Session>) -> Listed {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.lock().insert(id, Entry { owner: owner.to_owned(), channel, session });
        Listed { registry: self.clone(), id }
    }

    /// The report as JSON: the process's counters, sums over all sessions since its start, and one object for
    /// each current session.
    pub fn status(&self) -> Value {
        // A copy, so that sessions can begin and end while it is formatted.
        let entries: Vec<(u64, Entry)> = self.lock().iter().map(|(id, entry)| (*id, entry.clone())).collect();
        let mut sums = self.ended.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut sessions = Vec::with_capacity(entries.len());
        for (id, entry) in entries {
            let session = &entry.session;
            let (regions, registered) = session.registered();
            let (state, round_trip) = match (session.over(), session.link()) {
                (Some(_), _) => ("ended", None),
                _ if session.rests() => ("paused", None),
                (None, LinkState::Lost) => ("resuming", None),
                (None, LinkState::Up(round_trip)) => ("ready", round_trip),
            };
            let mut row = Map::new();
            let fields = [
                ("id", json!(id)),
                ("owner", json!(entry.owner)),
                ("channel", json!(entry.channel)),
                ("program", json!(session.program())),
                ("pid", json!(session.pid())),
                ("server", json!(session.server())),
                ("server_name", json!(session.server_name())),
                ("transport", json!(session.transport().to_string())),
                ("state", json!(state)),
                ("seconds", json!(session.age().as_secs())),
                ("regions", json!(regions)),
                ("registered_bytes", json!(registered)),
            ];
            row.extend(fields.map(|(name, value)| (name.to_owned(), value)));
            if let Some(time) = round_trip {
                row.insert("round_trip_us".to_owned(), json!(time.as_micros() as u64));
            }
            for (name, value) in session.counters().all() {
                row.insert(name.to_owned(), json!(value));
                *sums.entry(name).or_default() += value;
            }
            sessions.push(Value::Object(row));
        }
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let mut report = json!({
            "sessions_opened": load(&self.totals.opened),
            "sessions_refused": self.totals.refused.iter().map(load).sum::<u64>(),
            "sessions_lost": load(&self.totals.lost),
            "sessions_closed": load(&self.totals.closed),
            "malformed_requests": load(&self.totals.malformed),
            "totals": sums,
            "sessions": sessions,
        });
        for ((_, name), count) in REFUSALS.iter().zip(&self.totals.refused) {
            report[name] = json!(load(count));
        }
        report
    }
}

/// Keeps a session listed until it is dropped.
#[derive(Debug)]
pub struct Listed {
    registry: Arc<Registry>,
    id: u64,
}

impl Drop for Listed {
    fn drop(&mut self) {
        let Some(entry) = self.registry.lock().remove(&self.id) else { return };
        let mut sums = self.registry.ended.lock().unwrap_or_else(PoisonError::into_inner);
        for (name, value) in entry.session.counters().all() {
            *sums.entry(name).or_default() += value;
        }
    }
}
