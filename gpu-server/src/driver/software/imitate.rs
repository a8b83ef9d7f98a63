//! How NVIDIA's driver keeps its caller waiting, imitated for tests (`--software-imitate`).
//!
//! Nothing of this backend waits for a device by itself: queues have no end, and loading code takes no longer while kernels run. NVIDIA's driver does
//! wait, and a session must come through that: while the dispatcher is inside such a call, it reads no further commands. These are test aids. A server that
//! is given none of them never comes here but for one look at an empty [`Imitate`].

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use software_gpu::{Event, Stream};

/// What to imitate. As text: items separated by commas, each at most once.
///
/// | item | meaning |
/// |---|---|
/// | `queue=N` | a stream's queue holds N operations; whoever puts one more into it waits until there is room |
/// | `hardware-queues=N` | streams share N queues; what is in one of them is done in its order, whatever stream it is of |
/// | `waiting-calls` | loading and unloading code, instantiating graphs, growing and shrinking device memory, and destroying or resetting a context wait for all work on the device |
/// | `context-ms=N` | making a context takes N milliseconds |
/// | `pageable-memory` | kernels can reach pageable memory, says the device; they cannot |
/// | `call-us=N` | commands are delayed by 0 to N microseconds, at random |
/// | `block-us=N` | a block of a kernel takes N microseconds of the device's time, which passes only for the shares of clients: kernels take no longer |
/// | `seed=N` | where the random numbers of `call-us` begin |
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Imitate {
    /// Operations that a stream's queue holds; 0: any number.
    pub queue: u32,
    /// Queues that streams share; 0: each has its own.
    pub hardware_queues: u32,
    /// Some calls wait for all work on the device.
    pub waiting_calls: bool,
    /// The device says that kernels can reach pageable memory.
    pub pageable_memory: bool,
    /// Milliseconds that making a context takes.
    pub context_ms: u32,
    /// Microseconds by which a command is delayed at most.
    pub call_us: u32,
    /// Microseconds of device time that a block of a kernel counts as.
    #[serde(default)]
    pub block_us: u32,
    /// Where the random numbers begin.
    pub seed: u32,
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
                "context-ms" => imitate.context_ms = number()?,
                "call-us" => imitate.call_us = number()?,
                "block-us" => imitate.block_us = number()?,
                "seed" => imitate.seed = number()?,
                _ => {
                    return Err(format!(
                        "{item:?} is none of queue=N, hardware-queues=N, waiting-calls, pageable-memory, context-ms=N, call-us=N, block-us=N, seed=N"
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
        ];
        let mut items: Vec<String> =
            numbers.iter().filter(|(_, n)| *n > 0).map(|(name, n)| format!("{name}={n}")).collect();
        if self.waiting_calls {
            items.push("waiting-calls".into());
        }
        if self.pageable_memory {
            items.push("pageable-memory".into());
        }
        f.write_str(&items.join(","))
    }
}

impl Imitate {
    /// Takes as long as making a context does.
    pub fn make_context(&self) {
        if self.context_ms > 0 {
            std::thread::sleep(Duration::from_millis(self.context_ms.into()));
        }
    }
}

/// Delays commands at random, the same way each time for the same seed.
#[derive(Debug)]
pub(super) struct Delays {
    most_us: u32,
    state: u64,
}

impl Delays {
    pub(super) fn new(imitate: &Imitate) -> Delays {
        Delays { most_us: imitate.call_us, state: u64::from(imitate.seed) }
    }

    /// The next delay in microseconds, by SplitMix64.
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % (u64::from(self.most_us) + 1)
    }

    /// Delays the caller.
    pub(super) fn delay(&mut self) {
        if self.most_us > 0 {
            std::thread::sleep(Duration::from_micros(self.next()));
        }
    }
}

/// For each queue that streams share, the stream that was last put into it.
#[derive(Default)]
pub(super) struct HardwareQueues(HashMap<u32, Stream>);

impl HardwareQueues {
    /// An operation of stream `id` is about to be put into one of `count` queues: it comes after everything that is in that queue.
    pub(super) fn enter(&mut self, count: u32, id: u32, stream: &Stream) -> Result<(), software_gpu::Error> {
        if let Some(last) = self.0.insert(id % count, stream.clone()) {
            let event = Event::new();
            last.record(&event)?;
            stream.wait(&event)?;
        }
        Ok(())
    }
}

/// A stream's queue with room for so many operations.
#[derive(Debug, Default)]
pub(super) struct Queue {
    waiting: Mutex<u32>,
    changed: Condvar,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, u32> {
        self.waiting.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Waits for room among `size` operations and takes it, until the [`Entry`] is dropped.
    pub(super) fn enter(self: &Arc<Queue>, size: u32) -> Entry {
        let mut waiting = self.lock();
        while *waiting >= size {
            waiting = self.changed.wait(waiting).unwrap_or_else(|e| e.into_inner());
        }
        *waiting += 1;
        Entry(Arc::clone(self))
    }
}

/// An operation's room in its queue. The stream drops it when it comes to the operation.
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
        let text = "queue=1024,hardware-queues=2,context-ms=250,call-us=30,block-us=5,seed=7,waiting-calls,pageable-memory";
        let imitate: Imitate = text.parse().unwrap();
        let all = Imitate {
            queue: 1024,
            hardware_queues: 2,
            waiting_calls: true,
            pageable_memory: true,
            context_ms: 250,
            call_us: 30,
            block_us: 5,
            seed: 7,
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
    fn delays_repeat_with_their_seed_and_stay_below_their_most() {
        let numbers = |seed| {
            let mut delays = Delays::new(&Imitate { call_us: 50, seed, ..Imitate::default() });
            (0..100).map(|_| delays.next()).collect::<Vec<_>>()
        };
        assert_eq!(numbers(3), numbers(3));
        assert_ne!(numbers(3), numbers(4));
        assert!(numbers(3).iter().all(|us| *us <= 50));
    }

    #[test]
    fn a_full_queue_keeps_the_caller_until_there_is_room() {
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
