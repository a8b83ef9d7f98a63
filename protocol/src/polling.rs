//! How long a thread polls before it sleeps.
//!
//! Every part of rgpu that waits for another polls for a bounded time first. Polling occupies a processor;
//! sleeping costs the other side a system call and this side a wake-up, 5 to 50 µs together. So how long to
//! poll depends on the number of processors: if a polling thread would take the processor of the thread that
//! it waits for, it polls briefly or not at all.
//!
//! The [`TABLE`] has every such time of every process, and `docs/polling.md` shows it. [`PollTime`] adapts a
//! time to how often polling has succeeded lately. `docs/decisions/0027-one-table-of-polling-times.md` says
//! why both are in this crate.

use std::time::Duration;

/// With at least this many processors, some are to spare: for threads that only move data, and for polling
/// without yielding to other threads.
pub const SPARE: usize = 4;

/// A row of the [`TABLE`]: the longest time that one kind of thread polls for one kind of event.
#[derive(Debug)]
pub struct Row {
    /// The thread.
    pub thread: &'static str,
    /// What it waits for.
    pub event: &'static str,
    /// Microseconds with 1, 2, 3, 4 to 7, and 8 or more processors.
    pub micros: [u64; 5],
}

impl Row {
    /// The time on a machine with this many processors.
    pub const fn on(&self, processors: usize) -> Duration {
        Duration::from_micros(match processors {
            0 | 1 => self.micros[0],
            2 => self.micros[1],
            3 => self.micros[2],
            4..8 => self.micros[3],
            _ => self.micros[4],
        })
    }

    /// The time on this machine.
    pub fn here(&self) -> Duration {
        self.on(processors())
    }
}

/// Processors that this process may use.
pub fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

macro_rules! table {
    ($($(#[$doc:meta])* $name:ident: $thread:literal, $event:literal, $micros:expr;)*) => {
        $($(#[$doc])* pub const $name: Row = Row { thread: $thread, event: $event, micros: $micros };)*

        /// All rows.
        pub const TABLE: &[Row] = &[$($name),*];
    };
}

table! {
    /// For as many threads at a time as [`long_polls`] returns. `RGPU_POLL_US` sets it.
    CLIENT_REPLY: "thread of a program", "a reply", [0, 20, 20, 50, 10_000];
    /// At most [`CLIENT_REPLY`]. Also for a reply while [`long_polls`] other threads poll for theirs.
    CLIENT_BRIEF: "thread of a program", "room in the ring, progress", [50, 50, 50, 50, 50];
    /// [`copy_threads`] returns the number of these threads.
    CLIENT_COPY_THREAD: "copy thread of a program", "the next long copy", [100, 100, 100, 100, 100];
    /// `poll_us` and `--poll-us` of `vhost-rgpu` set it.
    RELAY: "relay (`vhost-rgpu`)", "records, frames, data", [0, 20, 20, 50, 50];
    /// These threads exist only with [`SPARE`] or more processors.
    RELAY_IO_THREAD: "I/O thread of a data connection (`vhost-rgpu`, `tcp`)", "the next long chunk", [50, 50, 50, 50, 50];
    /// `rgpu-server --poll-us` sets it.
    DISPATCHER: "dispatcher (worker)", "records", [5, 5, 50, 50, 50];
    /// `rgpu-server --poll-us` sets it.
    DISPATCHER_REPLY_DUE: "dispatcher (worker)", "records, while a program waits for a reply", [5, 5, 50, 50, 10_000];
    /// The upper bound of [`DISPATCHER_REPLY_DUE`] over `tcp`, where the processors are needed to move data.
    DISPATCHER_REPLY_DUE_TCP: "the same over `tcp`, at most", "records, while a program waits for a reply", [300, 300, 300, 300, 2_000];
    /// A thread reads a connection's next chunk, or waits for the command that the chunk belongs to.
    DATA_CONNECTION: "data connection (worker, `tcp`)", "the next chunk, the chunk's command", [0, 0, 0, 0, 50];
    /// Also of pieces that are announced: then it is woken ahead of them.
    DIRECT_CONNECTION: "direct connection (worker, over sockets)", "the next piece", [0, 0, 0, 50, 300];
    /// While it waits for no stream.
    COMPLETER_IDLE: "completer (worker)", "something to wait for", [0, 0, 20, 20, 100];
    /// While it waits for a stream; afterwards it naps between polls. With many processors it polls for as
    /// long as a large copy takes, because each nap would lengthen the copy.
    COMPLETER_BUSY: "completer (worker)", "a stream", [50, 50, 300, 300, 10_000];
    /// The upper bound of [`COMPLETER_BUSY`] over a network, where the processors are needed to move data.
    COMPLETER_BUSY_NETWORK: "the same over a network, at most", "a stream", [300, 300, 300, 300, 2_000];
    /// Afterwards it naps between two looks.
    MIRROR_WATCHER: "watcher of mirrors (worker)", "a device's change", [0, 0, 20, 50, 2_000];
    /// The lower bound over `verbs` for a relay, dispatcher or pump that yields to other threads between two
    /// polls ([`PollTime::giving_way`]).
    GIVING_WAY: "relay, dispatcher and pump (`verbs`), if it gives way", "records, completions", [500, 500, 500, 0, 0];
}

/// How many threads of a program may poll for long at the same time, so that a program with many waiting
/// threads leaves the processors to the threads that work.
pub const fn long_polls(processors: usize) -> usize {
    match processors / 4 {
        0 => 1,
        n => n,
    }
}

/// How many threads besides the calling one share a long copy. The program, and the worker if it is on the
/// same machine, need processors too.
pub const fn copy_threads(processors: usize) -> usize {
    (processors / 2).saturating_sub(1)
}

/// While polling does not succeed, the time shrinks to this fraction of the bound.
const LEAST: u32 = 8;
/// The same for a thread that yields: each poll is a system call, and during bulk transfers, with
/// milliseconds between events, most polls find nothing.
const LEAST_GIVING_WAY: u32 = 64;

/// The adaptive polling time of one thread: at most a bound, and shorter while polling has not succeeded
/// lately.
#[derive(Debug, Clone, Copy)]
pub struct PollTime {
    bound: Duration,
    now: Duration,
    /// The bound of a thread that does not yield.
    plain: Duration,
    gives_way: bool,
}

impl PollTime {
    /// A time of at most `bound`, which it is at first.
    pub fn new(bound: Duration) -> PollTime {
        PollTime { bound, now: bound, plain: bound, gives_way: false }
    }

    /// Like [`new`](Self::new) if there are processors to [spare](SPARE). If not, the thread yields to others
    /// between two polls, and polls for at least [`GIVING_WAY`]: it takes the processor from no other thread,
    /// and sleeping and being woken costs more than yielding. With a bound of zero it never polls.
    pub fn giving_way(bound: Duration, processors: usize) -> PollTime {
        if processors >= SPARE || bound.is_zero() {
            return PollTime::new(bound);
        }
        let (plain, bound) = (bound, bound.max(GIVING_WAY.on(processors)));
        PollTime { bound, now: bound, plain, gives_way: true }
    }

    /// Whether [`pause`](Self::pause) lets other threads run.
    pub fn gives_way(&self) -> bool {
        self.gives_way
    }

    /// Call this between two polls.
    #[inline]
    pub fn pause(&self) {
        if self.gives_way { std::thread::yield_now() } else { std::hint::spin_loop() }
    }

    /// How long to poll now.
    #[inline]
    pub fn get(&self) -> Duration {
        self.now
    }

    /// How long to poll now during a bulk transfer. Its parts come in bursts with milliseconds between them,
    /// so half of all polling succeeds and half is wasted: poll no longer than a wake-up takes.
    pub fn during_bulk(&self) -> Duration {
        self.now.min(self.plain)
    }

    /// Call this when work came while polling: the time grows.
    #[inline]
    pub fn paid(&mut self) {
        self.now = (self.now * 2).min(self.bound);
    }

    /// Call this when no work came: the time shrinks, but not to zero, so that the thread still notices a
    /// burst.
    pub fn wasted(&mut self) {
        let least = if self.gives_way { LEAST_GIVING_WAY } else { LEAST };
        self.now = (self.now / 2).max(self.bound / least);
    }

    /// Call this when no work came and the thread then slept for this long. A sleep within the bound shows
    /// that longer polling would have succeeded; a longer sleep shows that polling was wasted.
    pub fn slept(&mut self, time: Duration) {
        if time <= self.bound { self.paid() } else { self.wasted() }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_docs_show_the_table() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/polling.md");
        let docs = std::fs::read_to_string(path).unwrap();
        for Row { thread, event, micros: [one, two, three, four, eight] } in TABLE {
            let line = format!("| {thread} | {event} | {one} | {two} | {three} | {four} | {eight} |");
            assert!(docs.contains(&line), "docs/polling.md lacks this line:\n{line}");
        }
    }

    #[test]
    fn more_processors_allow_no_shorter_polls() {
        for row in TABLE.iter().filter(|row| row.thread != GIVING_WAY.thread) {
            assert!(row.micros.is_sorted(), "{}", row.thread);
        }
        assert_eq!(
            [1, 2, 3, 4, 7, 8, 64].map(|n| CLIENT_REPLY.on(n).as_micros()),
            [0, 20, 20, 50, 50, 10_000, 10_000]
        );
        assert_eq!([1, 4, 16].map(long_polls), [1, 1, 4]);
        assert_eq!([1, 2, 4, 8, 16].map(copy_threads), [0, 0, 1, 3, 7]);
    }

    #[test]
    fn the_time_stays_between_an_eighth_of_the_bound_and_the_bound() {
        let bound = Duration::from_micros(80);
        let mut time = PollTime::new(bound);
        for _ in 0..10 {
            time.wasted();
        }
        assert_eq!(time.get(), bound / 8);
        for _ in 0..10 {
            time.paid();
        }
        assert_eq!(time.get(), bound);
    }

    #[test]
    fn only_on_few_processors_does_a_thread_give_way_and_poll_longer() {
        let bound = Duration::from_micros(20);
        let (few, many) = (PollTime::giving_way(bound, 2), PollTime::giving_way(bound, 4));
        assert!(few.gives_way() && few.get() > bound && few.during_bulk() == bound);
        assert!(!many.gives_way() && many.get() == bound);
    }

    #[test]
    fn a_thread_that_gives_way_hardly_polls_between_events_far_apart() {
        let mut time = PollTime::giving_way(Duration::from_micros(20), 2);
        let bound = time.get();
        (0..10).for_each(|_| time.slept(Duration::from_millis(5)));
        assert_eq!(time.get(), bound / 64);
        (0..7).for_each(|_| time.slept(bound / 2));
        assert_eq!(time.get(), bound);
    }

    #[test]
    fn short_sleeps_lengthen_the_time_and_long_ones_shorten_it() {
        let bound = Duration::from_micros(80);
        let mut time = PollTime::new(bound);
        (0..10).for_each(|_| time.slept(Duration::from_millis(5)));
        assert_eq!(time.get(), bound / 8);
        (0..10).for_each(|_| time.slept(Duration::from_micros(60)));
        assert_eq!(time.get(), bound);
    }

    #[test]
    fn a_bound_of_zero_never_polls() {
        let mut time = PollTime::giving_way(Duration::ZERO, 2);
        time.paid();
        time.wasted();
        assert_eq!(time.get(), Duration::ZERO);
    }
}
