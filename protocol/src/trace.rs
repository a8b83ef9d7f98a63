//! Per-command timestamps, for latency analysis: when each command reached each process.
//!
//! ```text
//!  program       bridge (tcp)      worker                             bridge (tcp)    program
//!  appended ──▶  taken  ────────▶  received ─ begun ─ executed ─ answered ──▶ delivered ──▶ woken
//! ```
//!
//! If the environment variable [`VARIABLE`] names a folder, each process records its [`Stage`]s by the command's `seq` ([`Recorder::start`]) and writes them
//! there when its session ends. Otherwise each stage costs a command one check of a flag. The clock is the system's, so times of processes on one machine can
//! be compared.

use std::fmt::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

/// The environment variable with the folder for the timestamps.
pub const VARIABLE: &str = "RGPU_TRACE";

/// Most stages that a process records. Later ones are dropped.
const MOST: usize = 1 << 18;

/// A point on a command's way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Stage {
    /// Appended to the ring.
    Appended,
    /// The doorbell was rung for it.
    Rung,
    /// The bridge took it off the ring.
    Taken,
    /// The worker received it.
    Received,
    /// The worker began to execute it.
    Begun,
    /// It was executed: work on a stream is enqueued.
    Executed,
    /// The worker passed its reply to the transport.
    Answered,
    /// The bridge wrote its reply into the reply slot.
    Delivered,
    /// The program's thread has the reply.
    Woken,
}

impl Stage {
    /// Its name in a file.
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

/// The timestamps of one process, or of one session in it.
#[derive(Debug, Default)]
pub struct Recorder {
    on: AtomicBool,
    stages: Mutex<Vec<(Stage, u64, u16, u64)>>,
}

/// The recorder of this process.
pub static RECORDER: Recorder = Recorder { on: AtomicBool::new(false), stages: Mutex::new(Vec::new()) };

impl Recorder {
    /// Whether it records.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Starts recording.
    pub fn start(&self) {
        self.on.store(true, Ordering::Relaxed);
    }

    /// Records that command `seq` reached a stage now. `opcode` is 0 if it is not known.
    #[inline]
    pub fn note(&self, stage: Stage, seq: u64, opcode: u16) {
        if self.is_on() {
            self.keep(stage, seq, opcode, now());
        }
    }

    /// The time, for [`Recorder::note_at`]; 0 if nothing is recorded.
    #[inline]
    pub fn clock(&self) -> u64 {
        if self.is_on() { now() } else { 0 }
    }

    /// Records that command `seq` reached a stage at a time that was taken before its `seq` was known.
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

    /// Takes what was recorded since the last call, one line for each: `seq stage nanoseconds operation`. `None` if nothing is recorded.
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

/// The system's clock in nanoseconds.
#[cold]
fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recorder_writes_a_line_for_each_stage_once_it_is_started() {
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
