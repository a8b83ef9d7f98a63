//! Every session of the daemon in one list, and what those that have ended did: for status and metrics.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use host_bridge::bridge::Session;
use serde_json::{Map, Value, json};

/// A session and whom it belongs to.
#[derive(Debug, Clone)]
struct Entry {
    owner: String,
    channel: u32,
    session: Arc<Session>,
}

/// Counters of the daemon's whole life.
#[derive(Debug, Default)]
pub struct Totals {
    /// Sessions opened.
    pub opened: AtomicU64,
    /// Sessions that did not come about.
    pub refused: AtomicU64,
    /// Sessions lost.
    pub lost: AtomicU64,
    /// Sessions closed as asked.
    pub closed: AtomicU64,
    /// Requests answered `INVALID`.
    pub malformed: AtomicU64,
}

/// See the module's text.
#[derive(Debug)]
pub struct Registry {
    started: Instant,
    next: AtomicU64,
    sessions: Mutex<BTreeMap<u64, Entry>>,
    ended: Mutex<BTreeMap<&'static str, u64>>,
    /// The daemon's own counters.
    pub totals: Totals,
}

impl Registry {
    /// An empty one.
    pub fn new() -> Registry {
        Registry {
            started: Instant::now(),
            next: AtomicU64::new(1),
            sessions: Mutex::default(),
            ended: Mutex::default(),
            totals: Totals::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Entry>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lists a session until the guard is dropped.
    pub fn list(self: &Arc<Self>, owner: &str, channel: u32, session: Arc<Session>) -> Listed {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.totals.opened.fetch_add(1, Ordering::Relaxed);
        self.lock().insert(id, Entry { owner: owner.to_owned(), channel, session });
        Listed { registry: self.clone(), id }
    }

    /// Everything, as JSON: the daemon's counters, the sum over all sessions ever, and one object for each session now.
    pub fn status(&self) -> Value {
        // Copied, so that nobody who opens or ends a session waits while this is formatted.
        let entries: Vec<(u64, Entry)> = self.lock().iter().map(|(id, entry)| (*id, entry.clone())).collect();
        let mut sums = self.ended.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut sessions = Vec::with_capacity(entries.len());
        for (id, entry) in entries {
            let session = &entry.session;
            let (regions, registered) = session.registered();
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
                ("state", json!(if session.over().is_some() { "ended" } else { "ready" })),
                ("seconds", json!(session.age().as_secs())),
                ("regions", json!(regions)),
                ("registered_bytes", json!(registered)),
            ];
            row.extend(fields.map(|(name, value)| (name.to_owned(), value)));
            for (name, value) in session.counters().all() {
                row.insert(name.to_owned(), json!(value));
                *sums.entry(name).or_default() += value;
            }
            sessions.push(Value::Object(row));
        }
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        json!({
            "daemon": "vhost-rgpu",
            "version": env!("CARGO_PKG_VERSION"),
            "protocol": protocol::VERSION.to_string(),
            "process": std::process::id(),
            "seconds": self.started.elapsed().as_secs(),
            "sessions_opened": load(&self.totals.opened),
            "sessions_refused": load(&self.totals.refused),
            "sessions_lost": load(&self.totals.lost),
            "sessions_closed": load(&self.totals.closed),
            "malformed_requests": load(&self.totals.malformed),
            "totals": sums,
            "sessions": sessions,
        })
    }
}

/// Keeps a session listed.
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
