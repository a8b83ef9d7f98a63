//! Timelines: when each command reached each process, and what threads and streams were doing.
//!
//! ```text
//!  program       bridge (tcp)      worker                             bridge (tcp)    program
//!  appended ──▶  taken  ────────▶  received ─ begun ─ executed ─ answered ──▶ delivered ──▶ woken
//! ```
//!
//! If the environment variable [`VARIABLE`] names a folder, each process records its [`Stage`]s by the
//! command's `seq` ([`Recorder::start`]) and writes them there when its session ends, with the [`Span`]s that
//! it recorded and the names of kernels. Otherwise a stage costs only the check of a flag. Times are those of
//! the system's clock, so they are comparable between processes of one machine.
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

use std::cell::RefCell;
use std::fmt::Write;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

/// The environment variable with the folder for the timestamps.
pub const VARIABLE: &str = "RGPU_TRACE";

/// If this environment variable is set for a server, its timelines include what devices did.
pub const DEVICES: &str = "RGPU_TRACE_DEVICES";

/// Maximum entries that a recorder keeps in its chunks, and maximum spans. Later ones are only counted.
const MOST: usize = 1 << 20;
/// Entries of a chunk.
const CHUNK: usize = 4096;

/// A point in a command's life.
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
    /// The program's thread received the reply.
    Woken,
}

const STAGES: [Stage; 9] = [
    Stage::Appended,
    Stage::Rung,
    Stage::Taken,
    Stage::Received,
    Stage::Begun,
    Stage::Executed,
    Stage::Answered,
    Stage::Delivered,
    Stage::Woken,
];

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

/// A name in a recorder's table, which gets it when it is first used.
#[derive(Debug, Default)]
pub struct Name(AtomicU32);

impl Name {
    /// A name that was not used yet.
    pub const fn new() -> Name {
        Name(AtomicU32::new(0))
    }
}

/// A device executed the command with this `seq`, in this stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Work {
    /// The command.
    pub seq: u64,
    /// The stream.
    pub stream: u32,
    /// When it began and ended, in nanoseconds.
    pub times: [u64; 2],
    /// The kernel's name; empty if it is not known, or there is none.
    pub name: String,
}

/// The first word of a chunk's entry, which says what the other words are.
mod entry {
    /// A stage in the next byte and an opcode above it. The other words: the command, and the time.
    pub const STAGE: u64 = 1;
    /// A function that the program called, by name. The other words: when it began and ended.
    pub const CALL: u64 = 2;
    /// The name of a kernel. The next word: the command.
    pub const KERNEL: u64 = 3;
}

/// Entries of one thread. Only that thread adds entries; all threads may read those that it has added.
#[derive(Debug)]
struct Chunk {
    /// The thread's number in the timeline.
    thread: u32,
    len: AtomicUsize,
    entries: Box<[[AtomicU64; 3]]>,
}

impl Chunk {
    fn new(thread: u32) -> Chunk {
        let empty = || [const { AtomicU64::new(0) }; 3];
        Chunk { thread, len: AtomicUsize::new(0), entries: (0..CHUNK).map(|_| empty()).collect() }
    }

    /// Adds an entry. Returns whether there was room.
    #[inline]
    fn push(&self, words: [u64; 3]) -> bool {
        let len = self.len.load(Ordering::Relaxed);
        let Some(place) = self.entries.get(len) else { return false };
        for (to, word) in place.iter().zip(words) {
            to.store(word, Ordering::Relaxed);
        }
        self.len.store(len + 1, Ordering::Release);
        true
    }

    fn all(&self) -> impl Iterator<Item = [u64; 3]> {
        let len = self.len.load(Ordering::Acquire);
        self.entries[..len.min(CHUNK)]
            .iter()
            .map(|words| words.each_ref().map(|word| word.load(Ordering::Relaxed)))
    }
}

thread_local! {
    /// The chunk that this thread is filling, and the number of that chunk's recorder.
    static OWN: RefCell<Option<(u64, Arc<Chunk>)>> = const { RefCell::new(None) };
}

/// The timestamps of one process, or of one session in it. Each thread has its own chunks, so recording takes
/// no lock and only occasionally allocates a chunk. The text is formatted at the end ([`Recorder::take`]).
#[derive(Debug)]
pub struct Recorder {
    on: AtomicBool,
    /// Its number, which differs from those of other recorders; 0 before it is used.
    number: AtomicU64,
    chunks: Mutex<Vec<Arc<Chunk>>>,
    names: Mutex<Vec<String>>,
    work: Mutex<Vec<Work>>,
    lost: AtomicU32,
}

/// The recorder of this process.
pub static RECORDER: Recorder = Recorder::new();

/// The calling thread's number in the timeline, counted from 1.
fn thread() -> u32 {
    static COUNT: AtomicU32 = AtomicU32::new(1);
    thread_local! {
        static NUMBER: u32 = COUNT.fetch_add(1, Ordering::Relaxed);
    }
    NUMBER.try_with(|number| *number).unwrap_or(0)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Default for Recorder {
    fn default() -> Recorder {
        Recorder::new()
    }
}

impl Recorder {
    /// A recorder that does not record yet.
    pub const fn new() -> Recorder {
        Recorder {
            on: AtomicBool::new(false),
            number: AtomicU64::new(0),
            chunks: Mutex::new(Vec::new()),
            names: Mutex::new(Vec::new()),
            work: Mutex::new(Vec::new()),
            lost: AtomicU32::new(0),
        }
    }

    /// Whether it records.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Starts recording.
    pub fn start(&self) {
        static NUMBERS: AtomicU64 = AtomicU64::new(1);
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        // Once it has a number, it keeps it.
        let _ = self.number.compare_exchange(0, number, Ordering::Relaxed, Ordering::Relaxed);
        self.on.store(true, Ordering::Relaxed);
    }

    /// Records that command `seq` reached a stage now. `opcode` is 0 if it is not known.
    #[inline]
    pub fn note(&self, stage: Stage, seq: u64, opcode: u16) {
        if self.is_on() {
            self.note_at(stage, seq, opcode, now());
        }
    }

    /// The time, for [`Recorder::note_at`] and for calls; 0 if nothing is recorded.
    #[inline]
    pub fn clock(&self) -> u64 {
        if self.is_on() { now() } else { 0 }
    }

    /// Records that command `seq` reached a stage at a time that was taken before its `seq` was known.
    #[inline]
    pub fn note_at(&self, stage: Stage, seq: u64, opcode: u16, at: u64) {
        if self.is_on() && at != 0 {
            self.push([entry::STAGE | (stage as u64) << 8 | u64::from(opcode) << 16, seq, at]);
        }
    }

    /// Records that this thread was in a function of the program's from `begin` to now.
    pub fn call(&self, name: &Name, text: &str, begin: u64) {
        if self.is_on() && begin != 0 {
            let number = self.number_of(name, text);
            self.push([entry::CALL | number << 8, begin, now()]);
        }
    }

    /// Records the name of the kernel that a command launches.
    pub fn kernel<'a>(&self, seq: u64, name: &Name, text: impl FnOnce() -> std::borrow::Cow<'a, str>) {
        if self.is_on() {
            let known = u64::from(name.0.load(Ordering::Relaxed));
            let number = if known == 0 { self.number_of(name, &text()) } else { known };
            self.push([entry::KERNEL | number << 8, seq, 0]);
        }
    }

    /// Records when a device worked.
    pub fn work(&self, work: Work) {
        let mut all = lock(&self.work);
        if all.len() < MOST {
            all.push(work);
        } else {
            self.lose(1);
        }
    }

    /// Counts entries that could not be recorded.
    pub fn lose(&self, entries: u64) {
        self.lost.fetch_add(u32::try_from(entries).unwrap_or(u32::MAX), Ordering::Relaxed);
    }

    /// A name's position in the table, counted from 1.
    #[inline]
    fn number_of(&self, name: &Name, text: &str) -> u64 {
        let known = name.0.load(Ordering::Relaxed);
        if known != 0 {
            return known.into();
        }
        let mut names = lock(&self.names);
        names.push(text.replace(char::is_whitespace, " "));
        let number = names.len() as u32;
        // If two threads get here at once, the name is in the table twice.
        name.0.store(number, Ordering::Relaxed);
        number.into()
    }

    #[inline]
    fn push(&self, words: [u64; 3]) {
        let number = self.number.load(Ordering::Relaxed);
        let pushed = OWN.try_with(|own| match own.try_borrow().as_deref() {
            Ok(Some((recorder, chunk))) if *recorder == number => chunk.push(words),
            _ => false,
        });
        if pushed != Ok(true) {
            self.push_to_another(number, words);
        }
    }

    /// Adds an entry to a new chunk.
    #[cold]
    fn push_to_another(&self, number: u64, words: [u64; 3]) {
        let chunk = {
            let mut chunks = lock(&self.chunks);
            if chunks.len() >= MOST / CHUNK {
                return self.lose(1);
            }
            let chunk = Arc::new(Chunk::new(thread()));
            chunks.push(Arc::clone(&chunk));
            chunk
        };
        chunk.push(words);
        // A thread that is being destroyed cannot store the chunk, and gets a new one for its next entry.
        let _ = OWN.try_with(|own| own.try_borrow_mut().map(|mut own| *own = Some((number, chunk))).ok());
    }

    /// What was recorded, as lines of the format above. `None` if nothing is recorded. Call this once, at the
    /// end: what a thread records afterwards may be missing.
    pub fn take(&self) -> Option<String> {
        if !self.is_on() {
            return None;
        }
        let chunks = std::mem::take(&mut *lock(&self.chunks));
        let names = lock(&self.names);
        let mut text = String::with_capacity(chunks.len() * CHUNK * 48);
        for chunk in &chunks {
            let thread = chunk.thread;
            for [what, first, second] in chunk.all() {
                let name = || names.get((what >> 8) as usize - 1).map_or("-", String::as_str);
                // Writing to a string cannot fail.
                let _ = match what & 0xff {
                    entry::STAGE => {
                        let stage = STAGES.get((what >> 8 & 0xff) as usize).map_or("-", |stage| stage.name());
                        let operation = crate::ops::info((what >> 16) as u16).map_or("-", |info| info.name);
                        writeln!(text, "{first} {stage} {second} {operation} {thread}")
                    }
                    entry::CALL => writeln!(text, "call {thread} {first} {second} {}", name()),
                    _ => writeln!(text, "kernel {first} {}", name()),
                };
            }
        }
        for Work { seq, stream, times: [begin, end], name } in std::mem::take(&mut *lock(&self.work)) {
            let _ = writeln!(
                text,
                "work {stream} {begin} {end} {seq} {}",
                name.replace(char::is_whitespace, " ")
            );
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
    fn calls_kernels_and_work_have_lines_of_their_own() {
        let recorder = Recorder::new();
        let (call, kernel) = (Name::new(), Name::new());
        recorder.call(&call, "cudaMalloc", 5);
        recorder.kernel(7, &kernel, || unreachable!("nothing is recorded yet"));
        recorder.start();
        recorder.call(&call, "cudaMalloc", 5);
        recorder.work(Work { seq: 7, stream: 3, times: [6, 8], name: "add(int\n*)".into() });
        std::thread::scope(|scope| {
            scope.spawn(|| {
                recorder.kernel(7, &kernel, || "add(int\n*)".into());
                recorder.kernel(8, &kernel, || unreachable!("the name is known"));
            });
        });
        recorder.lose(3);
        let text = recorder.take().unwrap();
        let (first, rest) = text.split_once('\n').unwrap();
        assert!(
            first.starts_with(&format!("call {} 5 ", thread())) && first.ends_with(" cudaMalloc"),
            "{first}"
        );
        assert_eq!(rest, "kernel 7 add(int *)\nkernel 8 add(int *)\nwork 3 6 8 7 add(int *)\nlost 3\n");
    }

    #[test]
    fn each_entry_is_there_once_whichever_threads_and_recorders_there_are() {
        let recorders = [Recorder::new(), Recorder::new()];
        recorders.iter().for_each(Recorder::start);
        let each = CHUNK as u64 + 100;
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let recorders = &recorders;
                scope.spawn(move || {
                    for seq in 0..each {
                        // A thread seldom changes its recorder, as it seldom changes from one session to
                        // another.
                        recorders[usize::from(seq > each / 2)].note_at(
                            Stage::Begun,
                            thread * each + seq,
                            0,
                            1,
                        );
                    }
                });
            }
        });
        let texts = recorders.each_ref().map(|recorder| recorder.take().unwrap());
        let mut seen: Vec<u64> = texts
            .iter()
            .flat_map(|text| text.lines().map(|line| line.split(' ').next().unwrap().parse().unwrap()))
            .collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..3 * each).collect::<Vec<_>>());
    }

    #[test]
    fn entries_without_room_are_counted() {
        let recorder = Recorder::new();
        recorder.start();
        for seq in 0..MOST as u64 + 5 {
            recorder.note_at(Stage::Begun, seq, 0, 1);
        }
        assert!(recorder.take().unwrap().ends_with("\nlost 5\n"));
    }
}
