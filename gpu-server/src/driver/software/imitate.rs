//! Imitates for tests how NVIDIA's driver makes its caller wait, how it fails while memory moves, and GPUs
//! that lack something (`--software-imitate`).
//!
//! Nothing in this backend waits for a device by itself: queues are unlimited, and loading code takes no
//! longer while kernels run. NVIDIA's driver does wait, and a session must cope with that: while the
//! dispatcher is inside such a call, it reads no further commands. A server without this option only ever
//! checks an empty [`Imitate`].

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use protocol::Status;
use protocol::fuzzing::Random;
use serde::{Deserialize, Serialize};
use software_gpu::{Event, Stream};

/// What to imitate. The text form is a list of items separated by commas, each at most once.
///
/// | item | meaning |
/// |---|---|
/// | `queue=N` | a stream's queue holds N operations; adding another waits until there is room |
/// | `hardware-queues=N` | streams share N queues; operations in one queue run in order, whichever stream they belong to |
/// | `waiting-calls` | loading and unloading code, instantiating graphs, growing and shrinking device memory, and destroying or resetting a context wait for all work on the device; meanwhile no other thread copies pieces of direct connections from or to it |
/// | `no-peers` | devices cannot access each other's memory |
/// | `context-ms=N` | making a context takes N milliseconds |
/// | `pageable-memory` | the device claims that kernels can access pageable memory |
/// | `call-us=N` | commands are delayed by 0 to N microseconds, at random |
/// | `block-us=N` | a block of a kernel counts as N microseconds of device time in the clients' shares; kernels take no longer |
/// | `seed=N` | seed of the random numbers for `call-us` |
/// | `fail-move=N` | the N-th step of moving the session's memory off the devices or back fails |
/// | `fail-moves=N` | N such steps fail in a row, from that one on (default: 1) |
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Imitate {
    /// Capacity of a stream's queue in operations; 0: unlimited.
    pub queue: u32,
    /// Number of queues that streams share; 0: each has its own.
    pub hardware_queues: u32,
    /// Whether some calls wait for all work on the device.
    pub waiting_calls: bool,
    /// Whether the device claims that kernels can access pageable memory.
    pub pageable_memory: bool,
    /// Whether devices cannot access each other's memory.
    #[serde(default)]
    pub no_peers: bool,
    /// Milliseconds that making a context takes.
    pub context_ms: u32,
    /// Maximum delay of a command, in microseconds.
    pub call_us: u32,
    /// Device time that a block of a kernel counts as, in microseconds.
    #[serde(default)]
    pub block_us: u32,
    /// Seed of the random numbers.
    pub seed: u32,
    /// The first step of moving memory that fails, from 1 on; 0: none does.
    #[serde(default)]
    pub fail_move: u32,
    /// How many steps fail in a row; 0 counts as 1.
    #[serde(default)]
    pub fail_moves: u32,
}

impl FromStr for Imitate {
    type Err = String;

    fn from_str(text: &str) -> Result<Imitate, String> {
        let mut imitate = Imitate::default();
        let mut seen: Vec<&str> = Vec::new();
        for item in text.split(',').filter(|item| !item.is_empty()) {
            let (name, value) = item.split_once('=').unwrap_or((item, ""));
            if seen.contains(&name) {
                return Err(format!("{name} is given twice"));
            }
            seen.push(name);
            let number = || value.parse().map_err(|_| format!("{item:?}: {value:?} is not a number"));
            match name {
                "queue" => imitate.queue = number()?,
                "hardware-queues" => imitate.hardware_queues = number()?,
                "waiting-calls" if value.is_empty() => imitate.waiting_calls = true,
                "pageable-memory" if value.is_empty() => imitate.pageable_memory = true,
                "no-peers" if value.is_empty() => imitate.no_peers = true,
                "context-ms" => imitate.context_ms = number()?,
                "call-us" => imitate.call_us = number()?,
                "block-us" => imitate.block_us = number()?,
                "seed" => imitate.seed = number()?,
                "fail-move" => imitate.fail_move = number()?,
                "fail-moves" => imitate.fail_moves = number()?,
                _ => {
                    return Err(format!(
                        "{item:?} is none of queue=N, hardware-queues=N, waiting-calls, pageable-memory, no-peers, context-ms=N, call-us=N, block-us=N, seed=N, fail-move=N, fail-moves=N"
                    ));
                }
            }
        }
        Ok(imitate)
    }
}

impl fmt::Display for Imitate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers = [
            ("queue", self.queue),
            ("hardware-queues", self.hardware_queues),
            ("context-ms", self.context_ms),
            ("call-us", self.call_us),
            ("block-us", self.block_us),
            ("seed", self.seed),
            ("fail-move", self.fail_move),
            ("fail-moves", self.fail_moves),
        ];
        let mut items: Vec<String> =
            numbers.iter().filter(|(_, n)| *n > 0).map(|(name, n)| format!("{name}={n}")).collect();
        if self.waiting_calls {
            items.push("waiting-calls".into());
        }
        if self.pageable_memory {
            items.push("pageable-memory".into());
        }
        if self.no_peers {
            items.push("no-peers".into());
        }
        f.write_str(&items.join(","))
    }
}

impl Imitate {
    /// Takes as long as making a context should take.
    pub fn make_context(&self) {
        if self.context_ms > 0 {
            std::thread::sleep(Duration::from_millis(self.context_ms.into()));
        }
    }
}

/// Counts the steps of moving memory, and fails some of them.
#[derive(Debug)]
pub(super) struct Moves {
    begun: u32,
    failing: Range<u32>,
}

impl Moves {
    pub(super) fn new(imitate: &Imitate) -> Moves {
        let first = imitate.fail_move;
        let end = if first == 0 { 0 } else { first.saturating_add(imitate.fail_moves.max(1)) };
        Moves { begun: 0, failing: first..end }
    }

    /// A step begins.
    pub(super) fn step(&mut self) -> crate::driver::call::Result {
        self.begun = self.begun.saturating_add(1);
        if !self.failing.contains(&self.begun) {
            return Ok(());
        }
        tracing::info!("step {} of moving memory fails, as imitated", self.begun);
        Err(Status::UNKNOWN)
    }
}

/// Delays commands randomly; the same seed gives the same delays.
#[derive(Debug)]
pub(super) struct Delays {
    most_us: u32,
    random: Random,
}

impl Delays {
    pub(super) fn new(imitate: &Imitate) -> Delays {
        Delays { most_us: imitate.call_us, random: Random(imitate.seed.into()) }
    }

    /// The next delay in microseconds.
    fn next(&mut self) -> u64 {
        self.random.number() % (u64::from(self.most_us) + 1)
    }

    /// Delays the caller.
    pub(super) fn delay(&mut self) {
        if self.most_us > 0 {
            std::thread::sleep(Duration::from_micros(self.next()));
        }
    }
}

/// For each shared queue, the stream whose operation entered it last.
#[derive(Default)]
pub(super) struct HardwareQueues(HashMap<u32, Stream>);

impl HardwareQueues {
    /// Called before an operation of stream `id` enters one of `count` queues: orders it after everything in
    /// that queue.
    pub(super) fn enter(&mut self, count: u32, id: u32, stream: &Stream) -> Result<(), software_gpu::Error> {
        if let Some(last) = self.0.insert(id % count, stream.clone()) {
            let event = Event::new();
            last.record(&event)?;
            stream.wait(&event)?;
        }
        Ok(())
    }
}

/// A stream's queue of limited size.
#[derive(Debug, Default)]
pub(super) struct Queue {
    waiting: Mutex<u32>,
    changed: Condvar,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, u32> {
        self.waiting.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Waits for one of `size` places and takes it, until the [`Entry`] is dropped.
    pub(super) fn enter(self: &Arc<Queue>, size: u32) -> Entry {
        let mut waiting = self.lock();
        while *waiting >= size {
            waiting = self.changed.wait(waiting).unwrap_or_else(|e| e.into_inner());
        }
        *waiting += 1;
        Entry(Arc::clone(self))
    }
}

/// An operation's place in its queue. The stream drops it when it reaches the operation.
#[derive(Debug)]
pub(super) struct Entry(Arc<Queue>);

impl Drop for Entry {
    fn drop(&mut self) {
        *self.0.lock() -= 1;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_are_read_and_written() {
        let text = "queue=1024,hardware-queues=2,context-ms=250,call-us=30,block-us=5,seed=7,fail-move=12,fail-moves=3,waiting-calls,pageable-memory,no-peers";
        let imitate: Imitate = text.parse().unwrap();
        let all = Imitate {
            queue: 1024,
            hardware_queues: 2,
            waiting_calls: true,
            pageable_memory: true,
            no_peers: true,
            context_ms: 250,
            call_us: 30,
            block_us: 5,
            seed: 7,
            fail_move: 12,
            fail_moves: 3,
        };
        assert_eq!(imitate, all);
        assert_eq!(imitate.to_string(), text);
        assert_eq!("".parse(), Ok(Imitate::default()));
    }

    #[test]
    fn wrong_items_are_named() {
        for wrong in
            ["queue", "queue=x", "seed=-1", "waiting-calls=1", "pageable-memory=1", "slow", "queue=1,queue=2"]
        {
            let name = wrong.split(['=', ',']).next().unwrap();
            assert!(wrong.parse::<Imitate>().unwrap_err().contains(name), "{wrong}");
        }
    }

    #[test]
    fn delays_repeat_with_their_seed_and_stay_below_the_maximum() {
        let numbers = |seed| {
            let mut delays = Delays::new(&Imitate { call_us: 50, seed, ..Imitate::default() });
            (0..100).map(|_| delays.next()).collect::<Vec<_>>()
        };
        assert_eq!(numbers(3), numbers(3));
        assert_ne!(numbers(3), numbers(4));
        assert!(numbers(3).iter().all(|us| *us <= 50));
    }

    #[test]
    fn the_steps_of_moving_memory_that_are_named_fail() {
        let failed = |text: &str| -> Vec<u32> {
            let mut moves = Moves::new(&text.parse().unwrap());
            (1..=6).filter(|_| moves.step().is_err()).collect()
        };
        assert_eq!(failed("").len(), 0);
        assert_eq!(failed("fail-moves=3").len(), 0);
        assert_eq!(failed("fail-move=4"), [4]);
        assert_eq!(failed("fail-move=1,fail-moves=2"), [1, 2]);
        assert_eq!(failed("fail-move=5,fail-moves=4294967295"), [5, 6]);
    }

    #[test]
    fn a_full_queue_blocks_the_caller_until_there_is_room() {
        let queue = Arc::<Queue>::default();
        let (first, _second) = (queue.enter(2), queue.enter(2));
        let third = std::thread::spawn({
            let queue = Arc::clone(&queue);
            move || drop(queue.enter(2))
        });
        while Arc::strong_count(&queue) < 4 {
            std::thread::yield_now();
        }
        assert!(!third.is_finished());
        drop(first);
        third.join().unwrap();
    }
}
