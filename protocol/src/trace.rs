//! Timelines: when each command reached each process, and what threads and streams were doing.
//!
//! ```text
//!  program       bridge (tcp)      worker                             bridge (tcp)    program
//!  appended ──▶  taken  ────────▶  received ─ begun ─ executed ─ answered ──▶ delivered ──▶ woken
//! ```
//!
//! If the environment variable [`VARIABLE`] names a folder, each process records its [`Stage`]s by the command's `seq` ([`Recorder::start`]) and writes them
//! there when its session ends, with the [`Span`]s that it recorded and the names of kernels. Otherwise each stage costs a command one check of a flag. The clock is the system's, so times of processes on one machine can
//! be compared.
//!
//! | line | |
//! |---|---|
//! | `7 begun 1700000000000000000 launch 2` | command 7 reached this stage, in the process's second thread |
//! | `call 2 BEGIN END cudaMalloc` | a function that the program called in that thread |
//! | `work 5 BEGIN END 7 NAME` | command 7 on the device, in stream 5; the kernel's name, if the device told it |
//! | `kernel 7 NAME` | the kernel that command 7 launches |
//! | `lost 12` | so many lines more than a process keeps |
//!
//! Times are nanoseconds since 1970.

use std::cell::Cell;
use std::fmt::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::SystemTime;

/// The environment variable with the folder for the timestamps.
pub const VARIABLE: &str = "RGPU_TRACE";

/// Most stages that a process records, and most spans and names together. Later ones are only counted.
const MOST: usize = 1 << 20;

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

/// What a thread or a stream was doing for some time, from the first number of nanoseconds to the second, or the name of a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Span {
    /// This thread was in a function that the program called.
    Call(&'static str, [u64; 2]),
    /// A device was busy with the command of this `seq`, in this stream: with the kernel of this name, if it is known.
    Work(u64, u32, [u64; 2], String),
    /// The command launches the kernel with this name.
    Kernel(u64, String),
}

/// A command, by its `seq`, reached a stage.
#[derive(Debug)]
struct Note {
    seq: u64,
    stage: Stage,
    opcode: u16,
    at: u64,
    thread: u32,
}

/// The timestamps of one process, or of one session in it.
#[derive(Debug)]
pub struct Recorder {
    on: AtomicBool,
    stages: Mutex<Vec<Note>>,
    spans: Mutex<Vec<(Span, u32)>>,
    lost: AtomicU32,
}

/// The recorder of this process.
pub static RECORDER: Recorder = Recorder::new();

/// This thread's number in the timeline, from 1 on.
fn thread() -> u32 {
    static COUNT: AtomicU32 = AtomicU32::new(1);
    thread_local! {
        static NUMBER: Cell<u32> = const { Cell::new(0) };
    }
    // It has no destructor, so it can be used as long as the thread runs.
    NUMBER.with(|number| {
        if number.get() == 0 {
            number.set(COUNT.fetch_add(1, Ordering::Relaxed));
        }
        number.get()
    })
}

impl Default for Recorder {
    fn default() -> Recorder {
        Recorder::new()
    }
}

impl Recorder {
    /// One that does not record yet.
    pub const fn new() -> Recorder {
        let (on, lost) = (AtomicBool::new(false), AtomicU32::new(0));
        Recorder { on, stages: Mutex::new(Vec::new()), spans: Mutex::new(Vec::new()), lost }
    }

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

    /// Records a span, or a name, if it records at all.
    #[inline]
    pub fn span(&self, span: impl FnOnce() -> Span) {
        if self.is_on() {
            self.keep_span(span());
        }
    }

    #[cold]
    fn keep_span(&self, span: Span) {
        let mut spans = self.spans.lock().unwrap_or_else(|e| e.into_inner());
        if spans.len() < MOST {
            spans.push((span, thread()));
        } else {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The time, for [`Recorder::note_at`] and for spans; 0 if nothing is recorded.
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
            stages.push(Note { seq, stage, opcode, at, thread: thread() });
        } else {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts entries that could not be recorded.
    pub fn lose(&self, entries: u64) {
        self.lost.fetch_add(u32::try_from(entries).unwrap_or(u32::MAX), Ordering::Relaxed);
    }

    /// Takes what was recorded since the last call, as the lines above. `None` if nothing is recorded.
    pub fn take(&self) -> Option<String> {
        if !self.is_on() {
            return None;
        }
        let stages = std::mem::take(&mut *self.stages.lock().unwrap_or_else(|e| e.into_inner()));
        let mut text = String::with_capacity(stages.len() * 48);
        // Writing to a string does not fail.
        for Note { seq, stage, opcode, at, thread } in stages {
            let name = crate::ops::info(opcode).map_or("-", |info| info.name);
            let _ = writeln!(text, "{seq} {} {at} {name} {thread}", stage.name());
        }
        let spans = std::mem::take(&mut *self.spans.lock().unwrap_or_else(|e| e.into_inner()));
        for (span, thread) in spans {
            let _ = match span {
                Span::Call(name, [begin, end]) => writeln!(text, "call {thread} {begin} {end} {name}"),
                Span::Work(seq, stream, [begin, end], name) => {
                    let name = name.replace(char::is_whitespace, " ");
                    writeln!(text, "work {stream} {begin} {end} {seq} {name}")
                }
                Span::Kernel(seq, name) => {
                    writeln!(text, "kernel {seq} {}", name.replace(char::is_whitespace, " "))
                }
            };
        }
        let lost = self.lost.swap(0, Ordering::Relaxed);
        if lost > 0 {
            let _ = writeln!(text, "lost {lost}");
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
        assert_eq!(lines[0][4], lines[1][4], "one thread");
        assert_eq!(recorder.take().unwrap(), "");
    }

    #[test]
    fn spans_and_names_have_lines_of_their_own() {
        let recorder = Recorder::new();
        recorder.span(|| unreachable!("nothing is recorded yet"));
        recorder.start();
        recorder.span(|| Span::Call("cudaMalloc", [5, 9]));
        recorder.span(|| Span::Work(7, 3, [6, 8], "add(int\n*)".into()));
        std::thread::scope(|scope| {
            scope.spawn(|| recorder.span(|| Span::Kernel(7, "add(int\n*)".into())));
        });
        let text = recorder.take().unwrap();
        let thread = thread();
        assert_eq!(
            text,
            format!("call {thread} 5 9 cudaMalloc\nwork 3 6 8 7 add(int *)\nkernel 7 add(int *)\n")
        );
    }
}
