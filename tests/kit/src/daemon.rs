//! A real daemon as a child process, in a folder of its own.

use std::io::Read;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::until;

/// Whether the writable memory of a process contains these bytes. `None`: this user may not look into it.
pub fn memory_contains(pid: u64, bytes: &[u8]) -> Option<bool> {
    let memory = std::fs::File::open(format!("/proc/{pid}/mem")).ok()?;
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
    let found = maps.lines().any(|line| {
        let mut words = line.split_whitespace();
        let (Some(range), Some(rights)) = (words.next(), words.next()) else { return false };
        let (from, to) = range.split_once('-').unwrap();
        let at = |digits| u64::from_str_radix(digits, 16).unwrap();
        let (from, to) = (at(from), at(to));
        // Of a GPU in software, most of which was never written: too large to search, and no place for a key.
        if !rights.starts_with("rw") || to - from > 256 << 20 {
            return false;
        }
        // A range that has gone meanwhile contains nothing.
        let mut content = vec![0; (to - from) as usize];
        memory.read_exact_at(&mut content, from).is_ok()
            && content.windows(bytes.len()).any(|window| window == bytes)
    });
    Some(found)
}

/// Stops a process, and waits until none of its threads runs: the signal alone reaches one of them first.
pub fn stop(pid: u32) {
    kill(Pid::from_raw(pid.cast_signed()), Signal::SIGSTOP).unwrap();
    until("the process is stopped", || {
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        threads.flatten().all(|thread| {
            // A thread that has just ended has no state.
            let state = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
            state.rsplit_once(") ").is_none_or(|(_, state)| state.starts_with('T'))
        })
    });
}

/// Whether all of a status is of now. `vhost-rgpu` shows the last known figures of a device process that does
/// not report within two seconds.
fn is_whole(status: &serde_json::Value) -> bool {
    let processes = status["device_processes"].as_array();
    processes.into_iter().flatten().all(|process| process["reports"] == true)
}

/// A running daemon. Killed when dropped; a test that fails prints its log.
pub struct Daemon {
    child: Child,
    folder: Arc<tempfile::TempDir>,
}

impl Daemon {
    /// Starts `command`, with its log and its status socket in `folder`.
    pub fn spawn(command: &mut Command, folder: &Arc<tempfile::TempDir>) -> Daemon {
        let log = std::fs::File::create(folder.path().join("log")).unwrap();
        let child = command
            .arg("--status-socket")
            .arg(folder.path().join("status"))
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        Daemon { child, folder: folder.clone() }
    }

    /// Waits until its status socket answers, which every daemon makes after all its other sockets.
    pub fn ready(mut self) -> Daemon {
        until("the daemon answers", || {
            assert!(self.child.try_wait().unwrap().is_none(), "{}", self.log());
            self.try_status().is_some()
        });
        self
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The folder of its log and its sockets, for another daemon that takes its place.
    pub fn folder(&self) -> &Arc<tempfile::TempDir> {
        &self.folder
    }

    /// A file of its folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Its status, perhaps without what some device process has not reported yet. `None`: it does not answer.
    pub fn any_status(&self) -> Option<serde_json::Value> {
        let mut text = String::new();
        UnixStream::connect(self.path("status")).ok()?.read_to_string(&mut text).ok()?;
        serde_json::from_str(&text).ok()
    }

    /// Its [`status`](Self::status), if it answers. A daemon that another program replaces at this moment
    /// does not.
    pub fn try_status(&self) -> Option<serde_json::Value> {
        self.any_status().filter(is_whole)
    }

    /// Its status, as `rgpuctl status` gets it, when all of it is of now.
    pub fn status(&self) -> serde_json::Value {
        let mut status = serde_json::Value::Null;
        until("all device processes report", || {
            status = self.any_status().expect("the status socket answers");
            is_whole(&status)
        });
        status
    }

    /// A number of its status.
    pub fn number(&self, field: &str) -> u64 {
        self.status()[field].as_u64().unwrap()
    }

    /// Sessions now.
    pub fn sessions(&self) -> usize {
        self.status()["sessions"].as_array().unwrap().len()
    }

    /// Everything that it has logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap()
    }

    /// Descriptors that it has open, and threads.
    pub fn resources(&self) -> (usize, usize) {
        let count = |what: &str| std::fs::read_dir(format!("/proc/{}/{what}", self.pid())).unwrap().count();
        (count("fd"), count("task"))
    }

    /// Process ids of its children that run a program, without those that only hold a sandbox (`rgpu-guard`).
    pub fn children(&self) -> Vec<i32> {
        let parent = self.pid().to_string();
        // A process that is just being made is a copy of the daemon, whether it will be a guard or run a
        // program.
        let command = |process: &str| std::fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
        let copied = command(&parent);
        let running = |process: &str, stat: &str| -> Option<bool> {
            let mut fields = stat.rsplit(')').next()?.split_whitespace();
            let runs = fields.next()? != "Z" && fields.next()? == parent;
            Some(runs && !stat.contains("(rgpu-guard)") && command(process) != copied)
        };
        let children = std::fs::read_dir("/proc").unwrap().filter_map(|entry| {
            let entry = entry.ok()?;
            let (name, stat) = (entry.file_name(), std::fs::read_to_string(entry.path().join("stat")).ok()?);
            let process = name.to_str()?;
            running(process, &stat)?.then(|| process.parse().ok())?
        });
        children.collect()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid().cast_signed()), signal).unwrap();
    }

    /// Sends it a signal and waits for its end.
    pub fn end(&mut self, signal: Signal) -> ExitStatus {
        self.signal(signal);
        self.wait()
    }

    /// Whether it has ended.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("---- the daemon's log ----\n{}", self.log());
        }
    }
}
