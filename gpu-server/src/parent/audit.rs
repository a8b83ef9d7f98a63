//! The audit log: a line of JSON for each session that began, was refused or ended, for each lease that was
//! granted or ended, and for each client that joined, got another key or was revoked.
//!
//! ```text
//!   {"time": "2026-11-22T21:55:00.123Z", "event": "started", "session": "6f…", "principal": "host1", "key": "a1…", "peer": "10.0.0.7:4711", "client": …, "program": …, "pid": …, "transport": "tcp", "devices": [0]}
//!   {"time": …, "event": "refused", "principal": null, "peer": …, "client": …, "program": …, "reason": "the server does not know this client's key …"}
//!   {"time": …, "event": "ended", "session": "6f…", "principal": "host1", …, "seconds": 12, "lost": false, "reason": …, "commands": …, "bytes_in": …, "bytes_out": …}
//! ```
//!
//! Only `principal` and `key` are verified; `client`, `program` and `pid` are the client's own claims. A
//! thread writes, so that no session waits for a slow disk. After SIGHUP it reopens the file, for logrotate.
//! Events that find the queue full are lost, and a line with the event `lost` says how many.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use anyhow::Context;
use handover::Places;
use identity::Fingerprint;
use serde_json::{Map, Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::leases::table::Lease;
use super::queue::parked::Parked;
use super::session::Session;
use super::trust::Principal;

/// Maximum number of lines waiting for a slow or stuck disk. Further lines are lost and counted.
const MOST_WAITING: usize = 4096;
/// How long a daemon that ends, or is replaced, waits for the disk, and how long while everybody waits for
/// it.
pub(super) const FLUSH_WITHIN: Duration = Duration::from_secs(5);
pub(super) const BRIEFLY: Duration = Duration::from_millis(100);

/// What the daemon and the writing thread share.
#[derive(Default)]
struct Shared {
    /// Lines that were passed to the thread and not written yet.
    waiting: AtomicU64,
    /// Lines lost because the queue was full, since the log last said so.
    lost: AtomicU64,
    /// All lines that are not in the log, also because they could not be written.
    missing: AtomicU64,
    /// Whether to reopen the file.
    reopen: AtomicBool,
}

/// Where events go. Does nothing if there is no audit log.
pub(super) struct Audit(Option<(SyncSender<Value>, Arc<Shared>)>);

impl Audit {
    /// Opens the log.
    pub(super) fn open(path: Option<&Path>) -> anyhow::Result<Audit> {
        let Some(path) = path else { return Ok(Audit(None)) };
        let file = open(path).with_context(|| format!("cannot write the audit log {}", path.display()))?;
        let (sender, lines) = sync_channel(MOST_WAITING);
        let shared = Arc::new(Shared::default());
        let writer =
            Writer { path: path.to_owned(), file: Some(file), failed: false, shared: Arc::clone(&shared) };
        std::thread::Builder::new().name("rgpu-audit".into()).spawn(move || writer.run(&lines))?;
        Ok(Audit(Some((sender, shared))))
    }

    fn event(&self, event: &str, about: Value) {
        let Some((sender, shared)) = &self.0 else { return };
        shared.waiting.fetch_add(1, Ordering::Relaxed);
        // Never waits: the daemon's state may be locked.
        if sender.try_send(line(event, about)).is_err() {
            shared.waiting.fetch_sub(1, Ordering::Relaxed);
            shared.lost.fetch_add(1, Ordering::Relaxed);
            shared.missing.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// How many events are not in the log, if there is one.
    pub(super) fn missing(&self) -> Option<u64> {
        self.0.as_ref().map(|(_, shared)| shared.missing.load(Ordering::Relaxed))
    }

    /// A session began.
    pub(super) fn started(&self, parked: &Parked, devices: &[u32]) {
        let Parked { peer, client, program, pid, principal, .. } = parked;
        self.event(
            "started",
            json!({
                "session": hex(&parked.token), "principal": principal.name, "key": key(principal), "peer": peer, "client": client,
                "program": program, "pid": pid, "transport": parked.transport_name(), "devices": devices, "lease": parked.lease.map(|lease| lease.to_string()),
            }),
        );
    }

    /// A client was refused. `principal`: who it was found to be, if anybody.
    pub(super) fn refused(
        &self,
        principal: Option<&Principal>,
        peer: &str,
        client: &str,
        program: &str,
        reason: &str,
    ) {
        self.event(
            "refused",
            json!({
                "principal": principal.map(|principal| &principal.name), "key": principal.and_then(key), "peer": peer, "client": client,
                "program": program, "reason": reason,
            }),
        );
    }

    /// A session ended. `lost`: not because its client closed it.
    pub(super) fn ended(&self, session: &Session, lost: bool, reason: &str) {
        let Session { principal, peer, client, program, counters, .. } = session;
        self.event(
            "ended",
            json!({
                "session": hex(&session.token), "principal": principal.name, "key": key(principal), "peer": peer, "client": client,
                "program": program, "pid": session.pid, "seconds": session.since.elapsed().as_secs(), "lost": lost, "reason": reason,
                "commands": counters.commands, "bytes_in": counters.bytes_in, "bytes_out": counters.bytes_out,
                "bytes_direct": counters.bytes_direct, "bytes_direct_verbs": counters.bytes_direct_verbs, "bytes_swapped": session.account.moved()[0],
            }),
        );
    }

    /// A lease was granted.
    pub(super) fn leased(&self, lease: &Lease) {
        let Lease { id, principal, devices, exclusive, .. } = lease;
        self.event(
            "leased",
            json!({ "lease": id.to_string(), "principal": principal, "devices": devices, "exclusive": exclusive }),
        );
    }

    /// A lease has ended.
    pub(super) fn lease_ended(&self, lease: &Lease, reason: &str) {
        let Lease { id, principal, .. } = lease;
        self.event(
            "lease_ended",
            json!({ "lease": id.to_string(), "principal": principal, "reason": reason }),
        );
    }

    /// A client's key is known from now on.
    pub(super) fn joined(&self, principal: &Principal, peer: &str) {
        self.event("joined", json!({ "principal": principal.name, "key": key(principal), "peer": peer }));
    }

    /// A client's earlier key is no longer known, because it joins with another one.
    pub(super) fn replaced(&self, principal: &Principal, earlier: &Fingerprint, peer: &str) {
        let about = json!({ "principal": principal.name, "key": earlier.to_string(), "peer": peer });
        self.event("replaced", about);
    }

    /// A client is no longer known.
    pub(super) fn revoked(&self, name: &str) {
        self.event("revoked", json!({ "principal": name }));
    }

    /// Reopens the file for the next line, because it may have been moved away.
    pub(super) fn reopen(&self) {
        if let Some((_, shared)) = &self.0 {
            shared.reopen.store(true, Ordering::Relaxed);
        }
    }

    /// Waits until everything is written, up to a limit.
    pub(super) fn flush(&self, within: Duration) {
        let Some((_, shared)) = &self.0 else { return };
        let deadline = Instant::now() + within;
        while shared.waiting.load(Ordering::Acquire) > 0 {
            if Instant::now() >= deadline {
                tracing::error!("the audit log's disk does not respond; events are lost");
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// An event with its time.
fn line(event: &str, about: Value) -> Value {
    let mut line = Map::new();
    let now = OffsetDateTime::now_utc();
    let now = now.replace_millisecond(now.millisecond()).unwrap_or(now);
    line.insert("time".into(), now.format(&Rfc3339).unwrap_or_default().into());
    line.insert("event".into(), event.into());
    if let Value::Object(about) = about {
        line.extend(about);
    }
    Value::Object(line)
}

fn key(principal: &Principal) -> Option<String> {
    principal.key.map(|key| key.to_string())
}

pub(super) fn hex(token: &[u8]) -> String {
    token.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o640).open(path)
}

/// Whether the log could be opened. Does not create it.
pub(super) fn check(path: &Path, places: &Places) -> anyhow::Result<()> {
    let folder = path.parent().filter(|folder| folder.is_dir());
    let checked = match (OpenOptions::new().append(true).open(path), folder) {
        (Err(e), Some(folder)) if e.kind() == io::ErrorKind::NotFound => {
            places.folder(folder).map_err(anyhow::Error::msg)
        }
        (opened, _) => opened.map(drop).map_err(anyhow::Error::from),
    };
    checked.with_context(|| format!("cannot write the audit log {}", path.display()))
}

struct Writer {
    path: PathBuf,
    file: Option<File>,
    /// Whether the last attempt failed. Only the first of several failures is logged.
    failed: bool,
    shared: Arc<Shared>,
}

impl Writer {
    fn run(mut self, lines: &Receiver<Value>) {
        while let Ok(next) = lines.recv() {
            let lost = self.shared.lost.swap(0, Ordering::Relaxed);
            if lost > 0 {
                tracing::error!(lost, "the audit log's disk is too slow; events are lost");
                self.write(&line("lost", json!({ "lines": lost })));
            }
            self.write(&next);
            if self.failed {
                self.shared.missing.fetch_add(1, Ordering::Relaxed);
            }
            self.shared.waiting.fetch_sub(1, Ordering::Release);
        }
    }

    fn write(&mut self, line: &Value) {
        let result = self.try_write(line);
        if let (Err(e), false) = (&result, self.failed) {
            tracing::error!("cannot write the audit log {}: {e}; events are lost", self.path.display());
        }
        self.failed = result.is_err();
    }

    fn try_write(&mut self, line: &Value) -> io::Result<()> {
        if self.shared.reopen.swap(false, Ordering::Relaxed) {
            self.file = None;
        }
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(open(&self.path)?),
        };
        let len = file.metadata()?.len();
        let written = file.write_all(format!("{line}\n").as_bytes());
        if written.is_err() {
            // A full disk may have stored part of the line.
            let _ = file.set_len(len);
        }
        written
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(path: &Path) -> Vec<Value> {
        let text = std::fs::read_to_string(path).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn each_event_is_a_line_and_a_moved_file_gets_no_more() {
        let folder = tempfile::tempdir().unwrap();
        let (path, moved) = (folder.path().join("audit"), folder.path().join("audit.1"));
        let audit = Audit::open(Some(&path)).unwrap();
        audit.refused(None, "10.0.0.1:1", "a\nliar", "p", "no");
        audit.started(&Parked::fake(), &[2]);
        audit.flush(FLUSH_WITHIN);
        let all = lines(&path);
        assert_eq!((all[0]["event"].as_str(), all[0]["client"].as_str()), (Some("refused"), Some("a\nliar")));
        assert!(all[0]["principal"].is_null() && all[0]["time"].as_str().unwrap().ends_with('Z'));
        assert_eq!((all[1]["devices"][0].as_u64(), all[1]["principal"].as_str()), (Some(2), Some("uid:0")));
        std::fs::rename(&path, &moved).unwrap();
        audit.reopen();
        audit.revoked("host1");
        audit.flush(FLUSH_WITHIN);
        assert_eq!((lines(&moved).len(), lines(&path).len()), (2, 1));
        Audit::open(None).unwrap().flush(FLUSH_WITHIN);
    }

    #[test]
    fn a_stuck_disk_loses_events_counts_them_and_bounds_memory() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit");
        // Like the writing thread while a disk is stuck: it takes nothing.
        let (sender, waiting) = sync_channel(2);
        let shared = Arc::new(Shared::default());
        let audit = Audit(Some((sender, Arc::clone(&shared))));
        for name in ["a", "b", "c", "d"] {
            audit.revoked(name);
        }
        let writer = Writer { path: path.clone(), file: None, failed: false, shared };
        std::thread::spawn(move || writer.run(&waiting));
        audit.flush(FLUSH_WITHIN);
        let events: Vec<_> = lines(&path).into_iter().map(|line| line["event"].clone()).collect();
        assert_eq!(events, ["lost", "revoked", "revoked"]);
        assert_eq!(lines(&path)[0]["lines"], 2);
        assert_eq!(audit.missing(), Some(2));
    }

    #[test]
    fn events_that_find_the_disk_full_are_counted() {
        let audit = Audit::open(Some(Path::new("/dev/full"))).unwrap();
        for name in ["one", "other"] {
            audit.revoked(name);
        }
        audit.flush(FLUSH_WITHIN);
        assert_eq!(audit.missing(), Some(2));
        assert_eq!(Audit::open(None).unwrap().missing(), None);
    }

    #[test]
    fn a_failed_write_loses_only_its_own_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit");
        let audit = Audit::open(Some(&path)).unwrap();
        audit.revoked("a");
        audit.flush(FLUSH_WITHIN);
        let mut writer =
            Writer { path: "/dev/full".into(), file: None, failed: false, shared: Arc::default() };
        writer.write(&line("revoked", json!({})));
        assert!(writer.failed);
        writer.path = path.clone();
        writer.shared.reopen.store(true, Ordering::Relaxed);
        writer.write(&line("revoked", json!({ "principal": "b" })));
        assert!(!writer.failed);
        assert_eq!(lines(&path).len(), 2);
    }

    #[test]
    fn a_log_that_cannot_be_written_is_an_error_at_the_start() {
        let folder = tempfile::tempdir().unwrap();
        let error = format!("{:#}", Audit::open(Some(folder.path())).err().unwrap());
        assert!(
            error.contains(&format!("cannot write the audit log {}", folder.path().display())),
            "{error}"
        );
    }
}
