//! What this guest's previous device process has left: its sessions continue if possible, and its requests
//! are executed again.
//!
//! [`recovery`](crate::vm::recovery) defines what is stored and how a worker is told to stop.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use host_bridge::bridge::{ChannelMemory, Closed, Saved, Session, tell_lost};
use protocol::channel::State;
use protocol::device::{CONTROL_QUEUE, Extent};
use vhost_user_backend::VringT;
use virtio_queue::QueueT;
use vm_memory::GuestAddressSpace;

use super::requests::Fetched;
use super::{Channel, Device, GiveUp, Held, PATIENCE};
use crate::link::Stored;
use crate::refusal::{Refusal, no_resources};
use crate::vm::control::Order;
use crate::vm::queue::Vring;
use crate::vm::recovery::Leftover;

/// This guest's previous device process.
pub struct Predecessor {
    /// How it ended.
    pub how: String,
    /// Its channels.
    pub stored: BTreeMap<u32, Stored>,
}

impl Device {
    /// Makes workers pause whose bridge was a predecessor. Returns the number of its channels.
    pub(super) fn pause_leftovers(&self, left: impl Fn() -> Duration) -> usize {
        let predecessor = self.predecessor.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Predecessor { stored, .. }) = &*predecessor else { return 0 };
        let mut ending = Vec::new();
        for (channel, stored) in stored {
            let leftover =
                stored.try_clone().and_then(|stored| Leftover::new(stored, self.config.servers.all()));
            match leftover {
                Ok(leftover) if leftover.saved.as_ref().is_none_or(|saved| saved.pause(left())) => {}
                Ok(leftover) => {
                    leftover.end();
                    tracing::warn!(
                        "{}: channel {channel} of the predecessor does not pause: it ends",
                        self.who
                    );
                    ending.push(leftover);
                }
                Err(e) => tracing::error!("{}: channel {channel} of the predecessor: {e}", self.who),
            }
        }
        // All were told first, so that they end at the same time.
        let deadline = Instant::now() + PATIENCE;
        for leftover in ending {
            leftover.close(deadline.saturating_duration_since(Instant::now()));
        }
        stored.len()
    }

    /// Takes over channels of a predecessor that nobody has asked for yet, so that they end with all others.
    pub(super) fn take_leftovers(&self) {
        let predecessor = self.predecessor.lock().unwrap_or_else(PoisonError::into_inner).take();
        let stored = predecessor.map(|predecessor| predecessor.stored).unwrap_or_default();
        let left = stored.into_iter().filter_map(|(channel, stored)| {
            let leftover = Leftover::new(stored, self.config.servers.all()).inspect(Leftover::end);
            leftover
                .inspect_err(|e| tracing::error!("{}: channel {channel}: {e}", self.who))
                .ok()
                .map(|l| (channel, Arc::new(l)))
        });
        let unanswered = std::mem::take(&mut *self.unanswered());
        let mut channels = self.channels();
        for (channel, leftover) in left.chain(unanswered) {
            channels.entry(channel).or_insert(Channel::Left(leftover));
        }
    }

    /// Continues where a predecessor ended: with its sessions, if possible, and with its requests, which are
    /// executed again.
    pub(super) fn resume(&self, vring: &Vring, epoch: u64) {
        let Some(inside) = self.gate.try_enter(epoch) else {
            // When the guest runs again.
            self.resumes[usize::from(CONTROL_QUEUE)].store(true, Ordering::SeqCst);
            return;
        };
        let Some(Predecessor { how, stored }) =
            self.predecessor.lock().unwrap_or_else(PoisonError::into_inner).take()
        else {
            return;
        };
        // Before anything is done: another process may have what this one lacks, for example descriptors.
        let (mut leftovers, mut lost) = (Vec::new(), 0);
        for (channel, stored) in stored {
            match Leftover::new(stored, self.config.servers.all()) {
                Ok(leftover) => leftovers.push((channel, leftover)),
                Err(e) => {
                    tracing::error!("{}: channel {channel} of the predecessor: {e}", self.who);
                    if e.kind() != io::ErrorKind::InvalidData {
                        std::process::exit(1);
                    }
                    self.store.forget(channel);
                    lost += 1;
                }
            }
        }
        let (heads, table, size) = {
            let mut vring = vring.get_mut();
            let queue = vring.get_queue_mut();
            // Each buffer that was taken is either in the used ring or in progress.
            let heads = self.requests.recover(queue.next_used());
            queue.set_next_avail(queue.next_used().wrapping_add(heads.len() as u16));
            (heads, queue.desc_table(), queue.size())
        };
        let memory = self.guest.memory();
        let fetched: Vec<Fetched> =
            heads.into_iter().map(|head| self.fetch_again(&memory, table, size, head)).collect();
        let (mut created, mut destroyed) = (HashSet::new(), HashSet::new());
        for fetched in &fetched {
            match &fetched.order {
                Ok(Order::Create { channel, .. } | Order::Undo { channel, region: None, .. }) => {
                    created.insert(*channel);
                }
                Ok(Order::Destroy { channel }) => drop(destroyed.insert(*channel)),
                _ => {}
            }
        }
        let reason = format!(
            "the process of vhost-rgpu that served this guest {how}; another one serves the guest now: start the program again"
        );
        let (mut kept, mut waiting) = (0, Vec::new());
        for (channel, leftover) in leftovers {
            if created.contains(&channel) {
                leftover.end();
                self.unanswered().insert(channel, Arc::new(leftover));
                continue;
            }
            let ends = destroyed.contains(&channel);
            if let (Some(saved), false) = (&leftover.saved, ends) {
                match self.resume_session(channel, &leftover, saved) {
                    Ok(()) => {
                        kept += 1;
                        continue;
                    }
                    Err(Refusal(_, why)) => {
                        tracing::warn!("{}: channel {channel} of the predecessor: {why}", self.who);
                    }
                }
            }
            leftover.end();
            if !ends && self.still_waits(&leftover) {
                match GiveUp::new() {
                    Ok(give_up) => {
                        self.channels().insert(channel, Channel::Opening(give_up.clone()));
                        waiting.push((channel, leftover.extents, give_up));
                        continue;
                    }
                    Err(Refusal(_, why)) => {
                        tracing::warn!("{}: channel {channel} of the predecessor: {why}", self.who);
                    }
                }
            }
            let gone = leftover.server.config().err();
            self.tell_lost(channel, &leftover.extents, gone.as_ref().unwrap_or(&reason));
            self.channels().insert(channel, Channel::Left(Arc::new(leftover)));
            lost += u64::from(!ends);
        }
        drop(inside);
        self.registry.totals.lost.fetch_add(lost, Ordering::Relaxed);
        tracing::warn!(
            "{}: {kept} sessions continue, {} wait in a queue again, {lost} are lost, {} requests are executed again",
            self.who,
            waiting.len(),
            fetched.len()
        );
        for (channel, extents, give_up) in waiting {
            self.ask_again(channel, extents, give_up, epoch);
        }
        fetched.into_iter().for_each(|fetched| self.start_job(fetched, epoch));
    }

    /// Whether a channel's program waits for its session and nobody is left who could tell it of one. So no
    /// session has done anything for it, and it can be given another one.
    fn still_waits(&self, leftover: &Leftover) -> bool {
        let told_to_wait = || {
            let view = self.memories().view(&leftover.extents, bytes_of(&leftover.extents));
            view.is_ok_and(|view| view.header().state() == State::Waiting)
        };
        leftover.server.waits || leftover.close(Duration::ZERO) == Closed::Released && told_to_wait()
    }

    /// Continues the session of a predecessor's channel.
    fn resume_session(&self, channel: u32, leftover: &Leftover, saved: &Saved) -> Result<(), Refusal> {
        let server = leftover.server.config().map_err(no_resources)?;
        let memories = self.memories();
        let extents = memories.joined(&leftover.extents)?;
        let size = bytes_of(&extents);
        let mappings = self.budget.channel(extents.len())?;
        let memory = ChannelMemory::new(memories, extents, size)?;
        let (wakeup, lost) = self.listeners(channel);
        let session = Session::resume(server, saved, memory, None, wakeup, lost)
            .map_err(|e| no_resources(format!("its session cannot continue: {e}")))?;
        let session = Arc::new(session);
        let listed = self.registry.list_resumed(&self.who, channel.into(), session.clone());
        let held = Held { _listed: listed, _mappings: mappings, pieces: HashMap::new() };
        self.channels().insert(channel, Channel::Open(session.clone(), held));
        // The predecessor may have consumed a doorbell, or been about to wake the guest.
        session.doorbell();
        self.events.wake(channel);
        Ok(())
    }

    /// Tells this channel's program that its session is over.
    pub(super) fn tell_lost(&self, channel: u32, extents: &[Extent], reason: &str) {
        let size = bytes_of(extents);
        match self.memories().view(extents, size) {
            Ok(view) => {
                view.header().raise_alive();
                tell_lost(&view, reason, |_| {});
                self.events.wake(channel);
            }
            // The guest has changed what it had put there.
            Err(e) => self.limit.warn(&self.who, &format!("channel {channel} of the predecessor: {e}")),
        }
    }

    /// Waits until no worker has the memory of a predecessor's channel mapped, or until the device is reset.
    pub(super) fn wait_for_release(&self, channel: u32, leftover: &Leftover, epoch: u64) {
        let since = Instant::now();
        while leftover.close(PATIENCE) == Closed::StillHeld && !self.epoch_changed(epoch) {
            let seconds = since.elapsed().as_secs();
            tracing::error!(
                "{}: channel {channel}: after {seconds} s the server still holds its memory",
                self.who
            );
        }
    }
}

/// The bytes of a channel with these extents.
pub(super) fn bytes_of(extents: &[Extent]) -> u64 {
    extents.iter().fold(0, |sum, extent| sum.saturating_add(extent.len))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::{AsFd, OwnedFd};
    use std::os::unix::net::UnixStream;

    use host_bridge::bridge::saved::MAX_BYTES;
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use nix::sys::eventfd::EventFd;
    use test_kit::until;

    use super::*;
    use crate::stage::StoredServer;
    use crate::vm::fuzzing::{with_channel_after_reset, with_session_that_had_begun};

    #[test]
    fn a_program_that_waits_gets_another_session_in_place_of_one_that_had_begun() {
        let opened = with_session_that_had_begun(|device| {
            let waits =
                || matches!(device.channels().get(&0), Some(Channel::Opening(_) | Channel::Waiting(_)));
            until("it waits no more", || !waits());
            assert!(device.session(0, device.gate.epoch()).is_ok(), "it has none");
            assert_eq!(device.registry.totals.lost.load(Ordering::Relaxed), 0);
        });
        assert_eq!(opened, 1);
    }

    /// A worker, and what the predecessor that it served has left of its session.
    struct Worker {
        socket: UnixStream,
        /// The other end, which the leftover has as well.
        far: UnixStream,
        leftover: Arc<Leftover>,
    }

    impl Worker {
        fn new() -> Worker {
            let (socket, far) = UnixStream::pair().unwrap();
            let descriptors = || {
                let event = || OwnedFd::from(EventFd::new().unwrap());
                vec![far.try_clone().unwrap().into(), event(), event()]
            };
            // What is said about it, in bytes of which only the bridge knows how many they are.
            let saved = |about| {
                let bytes = [2u64.to_le_bytes().as_slice(), &vec![0; about]].concat();
                Saved::from_parts(&bytes, descriptors()).ok()
            };
            let saved = (0..MAX_BYTES).find_map(saved);
            assert!(saved.is_some());
            let server = StoredServer { config: Err("gone".to_owned()), waits: false };
            Worker { socket, far, leftover: Arc::new(Leftover { server, extents: Vec::new(), saved }) }
        }

        /// Whether somebody waits for it to let go: whoever does reads what it says.
        fn is_awaited(&mut self, is_over: impl Fn() -> bool) -> bool {
            self.socket.write_all(&[0]).unwrap();
            let unread = || {
                let mut watched = [PollFd::new(self.far.as_fd(), PollFlags::POLLIN)];
                poll(&mut watched, PollTimeout::ZERO) == Ok(1)
            };
            until("it is awaited, or nobody is left who could", || !unread() || is_over());
            !unread()
        }
    }

    #[test]
    fn a_guest_is_stopped_when_no_worker_has_the_memory_of_a_channel_that_is_created_again() {
        with_channel_after_reset(|device, _| {
            let mut worker = Worker::new();
            device.unanswered().insert(1, worker.leftover.clone());
            std::thread::scope(|scope| {
                let stopping = scope.spawn(|| device.pause());
                assert!(worker.is_awaited(|| stopping.is_finished()), "it has the memory");
                drop(worker);
                stopping.join().unwrap();
            });
        });
    }

    #[test]
    fn what_a_predecessor_has_left_of_a_channel_is_known_until_it_is_released() {
        with_channel_after_reset(|device, _| {
            let (mut worker, epoch) = (Worker::new(), device.gate.epoch());
            device.unanswered().insert(1, worker.leftover.clone());
            std::thread::scope(|scope| {
                let undoing = scope.spawn(|| device.undo_create(1, epoch));
                assert!(worker.is_awaited(|| undoing.is_finished()), "it has the memory");
                assert!(device.unanswered().contains_key(&1), "nobody else can wait for it");
                drop(worker);
                assert!(undoing.join().unwrap());
            });
            assert!(device.unanswered().is_empty());
        });
    }
}
