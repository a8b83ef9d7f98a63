//! The status socket. It sends one JSON object to each connection and closes it.
//!
//! Device processes report their sessions and counters. The keeper doesn't trust them: it accepts only names,
//! numbers and short texts, and limits how many.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use serde_json::{Map, Value, json};

use super::process::{Processes, reports};
use super::takeover::Succession;
use crate::sockets::Listening;

/// Maximum bytes of a device process's report.
const MAX_REPORT: u64 = 16 << 20;
/// Maximum sessions of a device process in the status.
const MAX_SESSIONS: usize = 65536;
/// Maximum fields of an object.
const MAX_FIELDS: usize = 64;
/// Maximum length of a text in characters.
const MAX_TEXT: usize = 256;
/// How long device processes have to report.
pub const PATIENCE: Duration = Duration::from_secs(2);

/// What a device process has done, and its sessions.
#[derive(Debug, Clone, Default)]
pub struct Counted {
    /// Counters of the process.
    numbers: BTreeMap<String, u64>,
    /// Sums over all its sessions, ended or not.
    totals: BTreeMap<String, u64>,
    /// Its current sessions.
    sessions: Vec<Map<String, Value>>,
}

fn invalid(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn is_name(name: &str) -> bool {
    name.len() <= MAX_FIELDS
        && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
}

/// The fields of an object that are plain numbers.
fn numbers(fields: &Map<String, Value>) -> BTreeMap<String, u64> {
    let numbers = fields.iter().filter(|(name, _)| is_name(name));
    numbers.filter_map(|(name, value)| Some((name.clone(), value.as_u64()?))).take(MAX_FIELDS).collect()
}

/// A number, or a text without control characters.
fn plain(value: Value) -> Option<Value> {
    match value {
        Value::String(text) => {
            let shown = text.chars().take(MAX_TEXT).map(|c| if c.is_control() { '?' } else { c });
            Some(Value::String(shown.collect()))
        }
        Value::Number(_) | Value::Bool(_) => Some(value),
        _ => None,
    }
}

impl Counted {
    /// Reads a report.
    pub fn read(file: &OwnedFd) -> io::Result<Counted> {
        // Reading a sealed memfd neither blocks nor ends early.
        let seals = SealFlag::from_bits_retain(fcntl(file, FcntlArg::F_GET_SEALS)?);
        if !seals.contains(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_WRITE) {
            return Err(invalid("its file is not sealed"));
        }
        let file = std::fs::File::from(file.try_clone()?);
        let size = file.metadata()?.len();
        if size > MAX_REPORT {
            return Err(invalid("it is too long"));
        }
        let mut text = vec![0; size as usize];
        file.read_exact_at(&mut text, 0)?;
        Counted::parse(&text)
    }

    fn parse(text: &[u8]) -> io::Result<Counted> {
        let Ok(Value::Object(mut fields)) = serde_json::from_slice(text) else {
            return Err(invalid("it is not a JSON object"));
        };
        let sessions = match fields.remove("sessions") {
            Some(Value::Array(rows)) => rows,
            _ => Vec::new(),
        };
        let sessions = sessions.into_iter().take(MAX_SESSIONS).filter_map(|row| {
            let Value::Object(row) = row else { return None };
            let row = row.into_iter().filter(|(name, _)| is_name(name)).take(MAX_FIELDS);
            Some(row.filter_map(|(name, value)| Some((name, plain(value)?))).collect())
        });
        Ok(Counted {
            sessions: sessions.collect(),
            totals: fields.get("totals").and_then(Value::as_object).map(numbers).unwrap_or_default(),
            numbers: numbers(&fields),
        })
    }

    /// One of its own counters; 0 if it has not reported it.
    pub fn number(&self, name: &str) -> u64 {
        self.numbers.get(name).copied().unwrap_or(0)
    }

    /// A sum over all its sessions; 0 if it has not reported it.
    pub fn total(&self, name: &str) -> u64 {
        self.totals.get(name).copied().unwrap_or(0)
    }

    /// Its current sessions.
    pub fn sessions(&self) -> &[Map<String, Value>] {
        &self.sessions
    }

    /// Adds the totals of another process, which has no sessions any more.
    pub fn add(&mut self, other: &Counted) {
        let sum = |to: &mut BTreeMap<String, u64>, from: &BTreeMap<String, u64>| {
            for (name, value) in from {
                if let Some(sum) = to.get_mut(name) {
                    *sum = sum.saturating_add(*value);
                } else if to.len() < MAX_FIELDS {
                    to.insert(name.clone(), *value);
                }
            }
        };
        sum(&mut self.numbers, &other.numbers);
        sum(&mut self.totals, &other.totals);
    }
}

/// The keeper's own part of the status.
#[derive(Debug)]
pub struct Own {
    /// When it started.
    pub started: Instant,
    /// Device processes that replaced one that had ended unexpectedly.
    pub restarts: AtomicU64,
    /// Native clients that were refused here, by [`Why`].
    refused: [AtomicU64; Why::ALL.len()],
}

/// Why the keeper refuses a native client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// The daemon is shutting down.
    Draining,
    /// The maximum number of clients is connected.
    HostFull,
    /// The same for the client's user.
    UserFull,
    /// There is no device process for the client.
    Failed,
}

impl Why {
    /// All of them.
    pub const ALL: [Why; 4] = [Why::Draining, Why::HostFull, Why::UserFull, Why::Failed];

    /// Its name in the metrics.
    pub fn name(self) -> &'static str {
        match self {
            Why::Draining => "draining",
            Why::HostFull => "host_full",
            Why::UserFull => "user_full",
            Why::Failed => "failed",
        }
    }
}

impl Own {
    /// Starts counting.
    pub fn new() -> Own {
        Own { started: Instant::now(), restarts: AtomicU64::new(0), refused: Default::default() }
    }

    /// Counts a refused native client.
    pub fn refuse(&self, why: Why) {
        self.refused[why as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Refused native clients, by reason.
    pub fn refused(&self) -> impl Iterator<Item = (Why, u64)> {
        Why::ALL.into_iter().zip(&self.refused).map(|(why, count)| (why, count.load(Ordering::Relaxed)))
    }
}

/// Counters that the status shows even if no device process has reported any.
const NUMBERS: [&str; 5] =
    ["sessions_opened", "sessions_refused", "sessions_lost", "sessions_closed", "malformed_requests"];

/// The status as JSON: sums of all counters since the keeper's start, and an object for each device process
/// and each session.
fn status(processes: &Processes, own: &Own, succession: &Succession) -> Value {
    let (running, ended) = processes.all();
    let mut sums = Counted::default();
    ended.iter().for_each(|(_, done)| sums.add(done));
    let deadline = Instant::now() + PATIENCE;
    let (mut rows, mut sessions) = (Vec::with_capacity(running.len()), Vec::new());
    for (process, (counted, reports)) in running.iter().zip(reports(&running, deadline)) {
        sums.add(&counted);
        rows.push(json!({
            "serves": process.name,
            "process": process.pid,
            "seconds": process.age().as_secs(),
            "reports": reports,
            "sessions": counted.sessions.len(),
            "sandbox": sandbox::inspect(process.pid),
        }));
        for mut row in counted.sessions {
            row.insert("process".to_owned(), json!(process.pid));
            sessions.push(Value::Object(row));
        }
    }
    let mut fields = Map::new();
    let own_fields = [
        ("daemon", json!("vhost-rgpu")),
        ("version", json!(env!("CARGO_PKG_VERSION"))),
        ("protocol", json!(protocol::VERSION.to_string())),
        ("process", json!(std::process::id())),
        ("seconds", json!(own.started.elapsed().as_secs())),
        ("keepers_before", json!(succession.keepers_before())),
    ];
    fields.extend(own_fields.map(|(name, value)| (name.to_owned(), value)));
    for name in NUMBERS {
        fields.insert(name.to_owned(), json!(sums.number(name)));
    }
    let refused: u64 = own.refused().map(|(_, count)| count).sum();
    fields.insert("clients_refused".to_owned(), json!(refused));
    fields.insert("device_processes_restarted".to_owned(), json!(own.restarts.load(Ordering::Relaxed)));
    fields.insert("totals".to_owned(), json!(sums.totals));
    fields.insert("device_processes".to_owned(), Value::Array(rows));
    fields.insert("sessions".to_owned(), Value::Array(sessions));
    Value::Object(fields)
}

/// Serves the status until the socket is stopped.
pub fn serve(listening: &Listening, processes: &Processes, own: &Own, succession: &Succession) {
    while let Some((connection, _stays)) = listening.accept_patiently("status", || succession.stays()) {
        let mut stream = UnixStream::from(connection);
        // A client that doesn't read delays other clients of this socket by at most this long.
        let _ = stream.set_write_timeout(Some(Duration::from_secs(1)));
        let mut text = status(processes, own, succession).to_string();
        text.push('\n');
        if let Err(e) = stream.write_all(text.as_bytes()) {
            tracing::debug!("status: a client disconnected: {e}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory_file::memory_file;
    use proptest::prelude::*;

    #[test]
    fn a_report_is_cut_to_names_numbers_and_short_texts() {
        let long = "x".repeat(10_000);
        let text = json!({
            "sessions_opened": 3, "sessions_lost": -1, "Odd Name": 4, "nested": {"a": 1},
            "totals": {"commands": 7, "replies": "many"},
            "sessions": [{"program": format!("a\u{1b}[2J{long}"), "channel": 1, "list": [1], "Odd Name": 4}, 5],
        });
        let counted = Counted::read(&memory_file(c"report", text.to_string().as_bytes()).unwrap()).unwrap();
        assert_eq!(counted.numbers, BTreeMap::from([("sessions_opened".to_owned(), 3)]));
        assert_eq!(counted.totals, BTreeMap::from([("commands".to_owned(), 7)]));
        let [session] = &counted.sessions[..] else { panic!("{:?}", counted.sessions) };
        assert_eq!(session.keys().collect::<Vec<_>>(), ["channel", "program"]);
        let program = session["program"].as_str().unwrap();
        assert!(program.starts_with("a?[2Jx") && program.len() == MAX_TEXT, "{program}");
    }

    #[test]
    fn a_report_that_could_change_or_block_is_not_read() {
        let open =
            nix::sys::memfd::memfd_create(c"report", nix::sys::memfd::MFdFlags::MFD_ALLOW_SEALING).unwrap();
        let (reader, _writer) = std::io::pipe().unwrap();
        for file in [open, reader.into()] {
            assert!(Counted::read(&file).is_err());
        }
    }

    proptest! {
        #[test]
        fn any_report_is_refused_or_bounded(text in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Counted::parse(&text);
        }
    }
}
