//! Events to the guest. Each channel has at most one `WAKE` pending, and none is lost.

use std::collections::{HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use host_bridge::log_limit::LogLimit;
use protocol::device::{EVENT_WAKE, Event};
use vhost_user_backend::VringT;
use virtio_queue::QueueT;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};
use zerocopy::IntoBytes;

use super::queue::{GuestMemory, Vring};

/// Where events are delivered: the guest's buffers.
trait Sink {
    /// Puts one event into a buffer of the guest. Returns false if there is no buffer.
    fn put(&mut self, event: Event) -> bool;
}

/// Channels with a pending wake, in order of arrival.
#[derive(Debug, Default)]
struct Pending {
    queue: VecDeque<u32>,
    queued: HashSet<u32>,
}

impl Pending {
    fn add(&mut self, channel: u32) {
        if self.queued.insert(channel) {
            self.queue.push_back(channel);
        }
    }

    /// Delivers as many events as there are buffers. Returns whether at least one was delivered.
    fn deliver(&mut self, sink: &mut impl Sink) -> bool {
        let mut delivered = false;
        while let Some(channel) = self.queue.front().copied() {
            if !sink.put(Event { kind: EVENT_WAKE, channel }) {
                break;
            }
            self.queue.pop_front();
            self.queued.remove(&channel);
            delivered = true;
        }
        delivered
    }
}

/// The device's event queue.
#[derive(Debug)]
pub struct Events {
    who: String,
    memory: GuestMemory,
    state: Mutex<State>,
    limit: LogLimit,
}

#[derive(Default)]
struct State {
    pending: Pending,
    /// The queue, while it runs.
    vring: Option<Vring>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State")
            .field("pending", &self.pending)
            .field("running", &self.vring.is_some())
            .finish()
    }
}

impl Events {
    /// An event queue that is not running yet.
    pub fn new(who: String, memory: GuestMemory) -> Events {
        Events { who, memory, state: Mutex::default(), limit: LogLimit::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes every waiter of a channel, now or as soon as the guest posts a buffer. Never waits for the
    /// guest.
    pub fn wake(&self, channel: u32) {
        let mut state = self.lock();
        state.pending.add(channel);
        self.deliver(&mut state);
    }

    /// The queue has started, or the guest has posted buffers.
    pub fn buffers(&self, vring: &Vring) {
        let mut state = self.lock();
        // Under the lock: whoever stops the queue makes it not ready first, and then takes the lock. This may
        // come after that.
        if !vring.get_ref().get_queue().ready() {
            return;
        }
        if state.vring.is_none() {
            state.vring = Some(vring.clone());
        }
        self.deliver(&mut state);
    }

    /// The queue has stopped: guest memory is not touched until [`buffers`](Self::buffers) is called again.
    /// Pending events are kept.
    pub fn stop(&self) {
        self.lock().vring = None;
    }

    /// The device was reset: drops pending events.
    pub fn reset(&self) {
        let mut state = self.lock();
        state.vring = None;
        state.pending = Pending::default();
    }

    fn deliver(&self, state: &mut State) {
        let State { pending, vring: Some(vring) } = state else { return };
        let mut sink = Buffers { events: self, vring };
        if pending.deliver(&mut sink)
            && vring.needs_notification().unwrap_or(true)
            && let Err(e) = vring.signal_used_queue()
        {
            self.limit.warn(&self.who, &format!("signalling the event queue: {e}"));
        }
    }
}

struct Buffers<'e> {
    events: &'e Events,
    vring: &'e Vring,
}

impl Sink for Buffers<'_> {
    fn put(&mut self, event: Event) -> bool {
        let memory = self.events.memory.memory();
        let mut looked_again = false;
        loop {
            let mut state = self.vring.get_mut();
            let Some(chain) = state.get_queue_mut().pop_descriptor_chain(memory.clone()) else {
                // A guest that has just posted a buffer may have seen that notifications were disabled.
                match state.enable_notification() {
                    // A queue that claims to have buffers but yields none is broken or has just been stopped.
                    Ok(true) if !looked_again => {
                        looked_again = true;
                        continue;
                    }
                    _ => return false,
                }
            };
            let head = chain.head_index();
            let target = chain.writable().next().filter(|d| d.len() as usize >= size_of::<Event>());
            let written = target
                .is_some_and(|d| memory.write_slice(event.as_bytes(), GuestAddress(d.addr().0)).is_ok());
            let len = if written { size_of::<Event>() as u32 } else { 0 };
            if let Err(e) = state.add_used(head, len) {
                self.events.limit.warn(&self.events.who, &format!("event queue: {e}"));
                return false;
            }
            if written {
                return true;
            }
            self.events.limit.warn(&self.events.who, "event queue: a buffer is too small for an event");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::GuestMemoryMmap;

    /// A guest with this many buffers, and the channels that it was told to wake.
    struct FakeGuest(usize, Vec<u32>);

    impl Sink for FakeGuest {
        fn put(&mut self, event: Event) -> bool {
            if self.0 == 0 {
                return false;
            }
            self.0 -= 1;
            assert_eq!(event.kind, EVENT_WAKE);
            self.1.push(event.channel);
            true
        }
    }

    #[test]
    fn an_event_that_is_handled_after_the_queue_has_stopped_changes_no_memory() {
        let ram = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x4000)]).unwrap();
        let memory = GuestMemory::new(ram);
        let vring = Vring::new(memory.clone(), 16).unwrap();
        vring.set_queue_size(16);
        vring.set_queue_info(0x1000, 0x2000, 0x3000).unwrap();
        vring.set_queue_event_idx(true);
        let events = Events::new("test".to_owned(), memory.clone());
        let other = [0xaa; 0x1000];
        memory.memory().write_slice(&other, GuestAddress(0x3000)).unwrap();
        // The queue is not ready any more, and something else is where it was.
        events.stop();
        events.buffers(&vring);
        events.wake(1);
        let mut there = [0; 0x1000];
        memory.memory().read_slice(&mut there, GuestAddress(0x3000)).unwrap();
        assert!(there == other);
    }

    #[test]
    fn wakes_wait_for_buffers_and_none_is_lost() {
        let mut pending = Pending::default();
        let mut sink = FakeGuest(0, Vec::new());
        for channel in [7, 3, 7, 9, 3, 7] {
            pending.add(channel);
            assert!(!pending.deliver(&mut sink));
        }
        sink.0 = 2;
        assert!(pending.deliver(&mut sink));
        assert_eq!(sink.1, [7, 3]);
        pending.add(7);
        sink.0 = 10;
        pending.deliver(&mut sink);
        assert_eq!(sink.1, [7, 3, 9, 7]);
        assert!(!pending.deliver(&mut sink), "each wake is delivered once");
    }
}
