//! When a command came where: a timeline of single commands across the processes that carry them.
//!
//! ```text
//!  program       bridge (tcp)      worker                             bridge (tcp)    program
//!  appended ──▶  taken  ────────▶  received ─ begun ─ executed ─ answered ──▶ delivered ──▶ woken
//! ```
//!
//! Each process records its own [`Stage`]s, by the command's `seq`, while it is told to ([`Recorder::start`]: the environment variable [`VARIABLE`] names a folder), and writes them there when
//! its session ends. While it is not, a command costs one look at a flag at each of them. The clock is the system's: the processes of one machine can be compared.

use std::fmt::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

/// Names the folder that timelines are written to.
pub const VARIABLE: &str = "RGPU_TRACE";

/// Stages that a process keeps; what comes after that is left out.
const MOST: usize = 1 << 18;

/// Where a command has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Stage {
    /// It stands in the ring.
    Appended,
    /// The host side was woken for it.
    Rung,
    /// The bridge has taken it off the ring.
    Taken,
    /// The worker has it.
    Received,
    /// The worker begins to execute it.
    Begun,
    /// It was executed: its work on a stream is enqueued.
    Executed,
    /// The worker has its answer, and hands it to the transport.
    Answered,
    /// The bridge has written its answer into the reply slot.
    Delivered,
    /// The program's thread has the answer.
    Woken,
}

impl Stage {
    /// Its word in a file.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Appended => "appended",
            Stage::Rung => "rung",
            Stage::Taken => "taken",
            Stage::Received => "received",
            Stage::Begun => "begun",
            Stage::Executed => "executed",
            Stage::Answered => "answered",
            Stage::Delivered => "delivered",
            Stage::Woken => "woken",
        }
    }
}

/// What one process, or one session in it, has seen.
#[derive(Debug, Default)]
pub struct Recorder {
    on: AtomicBool,
    stages: Mutex<Vec<(Stage, u64, u16, u64)>>,
}

/// This process's.
pub static RECORDER: Recorder = Recorder { on: AtomicBool::new(false), stages: Mutex::new(Vec::new()) };

impl Recorder {
    /// Whether it records.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Records from now on.
    pub fn start(&self) {
        self.on.store(true, Ordering::Relaxed);
    }

    /// Notes that command `seq` has come to a stage now. `opcode`: 0 where it is not known.
    #[inline]
    pub fn note(&self, stage: Stage, seq: u64, opcode: u16) {
        if self.is_on() {
            self.keep(stage, seq, opcode, now());
        }
    }

    /// The time, for [`Recorder::note_at`]; nothing if nothing is recorded.
    #[inline]
    pub fn clock(&self) -> u64 {
        if self.is_on() { now() } else { 0 }
    }

    /// Notes that command `seq` came to a stage at a time that was taken before its `seq` was known.
    #[inline]
    pub fn note_at(&self, stage: Stage, seq: u64, opcode: u16, at: u64) {
        if self.is_on() && at != 0 {
            self.keep(stage, seq, opcode, at);
        }
    }

    #[cold]
    fn keep(&self, stage: Stage, seq: u64, opcode: u16, at: u64) {
        let mut stages = self.stages.lock().unwrap_or_else(|e| e.into_inner());
        if stages.len() < MOST {
            stages.push((stage, seq, opcode, at));
        }
    }

    /// What was recorded so far, and not taken yet: a line each, `seq stage nanoseconds operation`. `None`: nothing is recorded.
    pub fn take(&self) -> Option<String> {
        if !self.is_on() {
            return None;
        }
        let stages = std::mem::take(&mut *self.stages.lock().unwrap_or_else(|e| e.into_inner()));
        let mut text = String::with_capacity(stages.len() * 48);
        for (stage, seq, opcode, at) in stages {
            let name = crate::ops::info(opcode).map_or("-", |info| info.name);
            // Writing to a string does not fail.
            let _ = writeln!(text, "{seq} {} {at} {name}", stage.name());
        }
        Some(text)
    }
}

/// Nanoseconds of the system's clock.
#[cold]
fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_kept_until_it_is_told_to_and_then_a_line_for_each_stage() {
        let recorder = Recorder::default();
        recorder.note(Stage::Appended, 1, 0x0703);
        assert_eq!(recorder.take(), None);
        recorder.start();
        recorder.note(Stage::Appended, 2, 0x0703);
        recorder.note(Stage::Woken, 2, 0);
        let text = recorder.take().unwrap();
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split(' ').collect()).collect();
        assert_eq!((lines.len(), lines[0][0], lines[0][1]), (2, "2", "appended"));
        assert_eq!((lines[0][3], lines[1][1], lines[1][3]), ("stream_synchronize", "woken", "-"));
        assert!(lines[0][2].parse::<u64>().unwrap() <= lines[1][2].parse().unwrap());
        assert_eq!(recorder.take().unwrap(), "");
    }
}
