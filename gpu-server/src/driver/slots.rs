//! Assigns staging buffers, called slots, to the streams whose data goes through them.
//!
//! A transfer learns at its beginning which slot each of its chunks will use, and which use of that slot it
//! is. It does not wait until the slot is free, because the stream's work runs in order anyway. All transfers
//! of a stream in one direction share a [`Flow`]. A flow takes slots while there are enough. When it has its
//! share, it reuses its own slots, the oldest first. So other flows get slots no matter how much a flow has
//! under way or how long its stream is held up, and no use of a slot waits for another stream.
//!
//! There are enough large slots to keep a fast link busy. The small ones serve the flows that come when all
//! large ones are taken. A flow has to wait only if other flows have every slot; then there are at least 24
//! of them.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};

/// The two kinds of slots: how many there are, their size, and how many one flow may have.
pub const KINDS: [Kind; 2] =
    [Kind { count: 48, size: 1 << 20, most: 16 }, Kind { count: 32, size: 256 << 10, most: 2 }];

/// See [`KINDS`].
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    /// Number of slots.
    pub count: usize,
    /// Size of each, in bytes.
    pub size: usize,
    /// Maximum number for one flow.
    most: usize,
}

/// Size of all slots together, in bytes.
pub const BYTES: usize = KINDS[0].count * KINDS[0].size + KINDS[1].count * KINDS[1].size;

/// Number of slots of both kinds.
pub const COUNT: usize = KINDS[0].count + KINDS[1].count;

/// Where a slot begins in the memory of all slots, in bytes.
pub fn offset(slot: usize) -> usize {
    let large = slot.min(KINDS[0].count);
    large * KINDS[0].size + (slot - large) * KINDS[1].size
}

/// One direction of a stream. Its transfers use slots in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Flow(u64);

impl Flow {
    /// A new flow, without slots.
    pub fn fresh() -> Flow {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Flow(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// One use of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Use {
    /// The slot.
    pub slot: usize,
    /// The number of this use among the slot's, from 1.
    pub number: u64,
}

/// The slots of a worker. See the module.
#[derive(Debug)]
pub struct Slots {
    state: Mutex<State>,
    freed: Condvar,
    /// How often a flow has waited for another one's slots.
    waits: AtomicUsize,
}

#[derive(Debug)]
struct State {
    free: [Vec<usize>; 2],
    uses: Vec<u64>,
    flows: HashMap<Flow, Held>,
    over: bool,
}

/// A flow's slots. The first is the one that was used longest ago.
#[derive(Debug)]
struct Held {
    kind: usize,
    slots: VecDeque<usize>,
    transfers: usize,
}

impl Default for Slots {
    fn default() -> Slots {
        let large = (0..KINDS[0].count).rev().collect();
        let small = (KINDS[0].count..COUNT).rev().collect();
        let (uses, flows) = (vec![0; COUNT], HashMap::new());
        Slots {
            state: Mutex::new(State { free: [large, small], uses, flows, over: false }),
            freed: Condvar::new(),
            waits: AtomicUsize::new(0),
        }
    }
}

impl Slots {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Assigns a use of a slot to each chunk of a transfer, in the order in which the stream reaches the
    /// chunks. `chunks` returns the number of chunks for slots of a given size. Waits while other flows have
    /// all slots. Returns `None` after [`stop`](Self::stop). Call [`give_back`](Self::give_back) at the end
    /// of the transfer.
    pub fn take(&self, flow: Flow, chunks: impl FnOnce(usize) -> u64) -> Option<Vec<Use>> {
        let mut state = self.lock();
        let kind = loop {
            if state.over {
                return None;
            }
            let held = state.flows.get(&flow).map(|held| held.kind);
            if let Some(kind) = held.or_else(|| state.free.iter().position(|free| !free.is_empty())) {
                break kind;
            }
            self.waits.fetch_add(1, Ordering::Relaxed);
            state = self.freed.wait(state).unwrap_or_else(|e| e.into_inner());
        };
        let State { free, uses, flows, .. } = &mut *state;
        let free = &mut free[kind];
        let held = flows.entry(flow).or_insert_with(|| Held { kind, slots: VecDeque::new(), transfers: 0 });
        held.transfers += 1;
        let share = ((free.len() + held.slots.len()) / 3).clamp(1, KINDS[kind].most);
        let mut more = share.saturating_sub(held.slots.len());
        let chunks = chunks(KINDS[kind].size);
        let mut all = Vec::with_capacity(chunks as usize);
        for _ in 0..chunks {
            let new = if more > 0 { free.pop() } else { None };
            more = more.saturating_sub(1);
            let Some(slot) = new.or_else(|| held.slots.pop_front()) else { break };
            held.slots.push_back(slot);
            uses[slot] += 1;
            all.push(Use { slot, number: uses[slot] });
        }
        Some(all)
    }

    /// Ends one of the flow's transfers. When its last one ends, its slots are free for other flows.
    pub fn give_back(&self, flow: Flow) {
        let mut state = self.lock();
        let Some(held) = state.flows.get_mut(&flow) else { return };
        held.transfers -= 1;
        if held.transfers == 0
            && let Some(held) = state.flows.remove(&flow)
        {
            state.free[held.kind].extend(held.slots);
            drop(state);
            self.freed.notify_all();
        }
    }

    /// Whether no transfer is under way.
    pub fn are_unused(&self) -> bool {
        self.lock().flows.is_empty()
    }

    /// Makes every waiting and later [`take`](Self::take) return `None`.
    pub fn stop(&self) {
        self.lock().over = true;
        self.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// This many flows have slots at a time, whatever each of them does.
    const LEAST_FLOWS: usize = 24;

    /// The number of chunks for `len` bytes.
    fn cut(len: u64) -> impl FnOnce(usize) -> u64 {
        move |size| len.div_ceil(size as u64)
    }

    #[test]
    fn a_stalled_stream_leaves_slots_for_others() {
        let slots = Slots::default();
        let held = Flow::fresh();
        for _ in 0..100 {
            assert_eq!(slots.take(held, cut(16 << 20)).unwrap().len(), 16);
        }
        for _ in 1..LEAST_FLOWS {
            assert!(!slots.take(Flow::fresh(), cut(64 << 20)).unwrap().is_empty());
        }
        assert_eq!(slots.waits.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_flow_alone_grows_to_sixteen_slots() {
        let (slots, flow) = (Slots::default(), Flow::fresh());
        slots.take(flow, cut(1)).unwrap();
        let uses = slots.take(flow, cut(256 << 20)).unwrap();
        let distinct: std::collections::HashSet<usize> = uses.iter().map(|u| u.slot).collect();
        assert_eq!((uses.len(), distinct.len()), (256, 16));
        slots.give_back(flow);
        slots.give_back(flow);
        assert_eq!(slots.lock().free[0].len(), KINDS[0].count);
    }

    #[test]
    fn a_waiting_flow_gets_the_first_free_slot_and_stop_ends_all_waits() {
        let slots = Slots::default();
        let mut flows = Vec::new();
        while slots.lock().free.iter().any(|free| !free.is_empty()) {
            flows.push(Flow::fresh());
            slots.take(flows[flows.len() - 1], cut(64 << 20)).unwrap();
        }
        assert!(flows.len() >= LEAST_FLOWS, "{}", flows.len());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| slots.take(Flow::fresh(), cut(100)));
            while slots.waits.load(Ordering::Relaxed) == 0 {
                std::thread::yield_now();
            }
            slots.give_back(flows[3]);
            assert_eq!(waiting.join().unwrap().unwrap().len(), 1);
        });
        slots.stop();
        assert_eq!(slots.take(Flow::fresh(), cut(100)), None);
    }

    #[test]
    fn slots_lie_side_by_side() {
        let size = |slot: usize| KINDS[usize::from(slot >= KINDS[0].count)].size;
        assert!((0..COUNT).all(|slot| offset(slot) + size(slot) == offset(slot + 1)));
        assert_eq!(offset(COUNT), BYTES);
    }

    proptest! {
        /// A slot belongs to one flow at a time, its uses are counted without gaps, and in the end all slots
        /// are free.
        #[test]
        fn a_slot_is_used_by_one_flow_at_a_time_and_its_uses_are_counted(
            steps in prop::collection::vec((0usize..LEAST_FLOWS, 0u64..20 << 20), 1..200),
        ) {
            let slots = Slots::default();
            let flows: Vec<Flow> = (0..LEAST_FLOWS).map(|_| Flow::fresh()).collect();
            let (mut under_way, mut owner) = (vec![0; LEAST_FLOWS], HashMap::new());
            let mut seen = vec![0; COUNT];
            for (i, len) in steps {
                if len % 3 == 0 && under_way[i] > 0 {
                    slots.give_back(flows[i]);
                    under_way[i] -= 1;
                    if under_way[i] == 0 { owner.retain(|_, of| *of != i); }
                    continue;
                }
                under_way[i] += 1;
                let uses = slots.take(flows[i], cut(len)).unwrap();
                prop_assert!(len == 0 || !uses.is_empty());
                for Use { slot, number } in uses {
                    prop_assert_eq!(*owner.entry(slot).or_insert(i), i);
                    seen[slot] += 1;
                    prop_assert_eq!(number, seen[slot]);
                }
            }
            for (i, n) in under_way.iter().enumerate() { (0..*n).for_each(|_| slots.give_back(flows[i])); }
            let state = slots.lock();
            prop_assert_eq!(state.free[0].len() + state.free[1].len(), COUNT);
            prop_assert!(state.flows.is_empty());
        }
    }
}
