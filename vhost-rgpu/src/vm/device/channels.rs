//! Executes requests: creates and destroys channels, and registers memory with their sessions.
//!
//! A request may wait here for a server's queue or for the release of memory; [`requests`](super::requests)
//! gives each a thread of its own.

use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Instant;

use host_bridge::bridge::{ChannelMemory, Closed, Prepared, RegionMemory, Session, SessionConfig, Turn};
use nix::poll::{PollFd, PollFlags};
use protocol::device::Extent;

use super::predecessor::bytes_of;
use super::requests::Job;
use super::{Channel, Device, GiveUp, Held, PATIENCE};
use crate::refusal::{Refusal, invalid, no_resources};
use crate::stage::Stage;
use crate::vm::budget::Charge;
use crate::vm::control::Order;
use crate::vm::gate::Inside;
use crate::vm::recovery::{Known, Leftover};

impl Device {
    pub(super) fn execute(&self, order: Order, job: &mut Job<'_>) -> Result<(), Refusal> {
        match order {
            Order::Create { channel, extents, size } => self.create(channel, extents, size, job),
            Order::Destroy { channel } => self.destroy(channel, job.epoch),
            Order::Register { channel, region, extents, size, read_only } => {
                if job.again {
                    self.undo_register(channel, region, job.epoch)?;
                }
                let session = self.session(channel, job.epoch)?;
                self.inherit(channel, &session);
                let memories = self.memories();
                // A transport may pass extents on unchecked, so they are checked here. What is charged is
                // what others keep of the region.
                let extents = memories.joined(&extents)?;
                let charge = self.budget.region(extents.len())?;
                let memory = RegionMemory { memories, extents, size, own_memory: false, read_only };
                session.register_region(region, memory)?;
                self.with_held(channel, &session, |held| drop(held.pieces.insert(region, charge)));
                Ok(())
            }
            Order::Unregister { channel, region } => {
                match self.left(channel, job.epoch)? {
                    Some(leftover) => {
                        self.wait_for_release(channel, &leftover, job.epoch);
                        Ok(())
                    }
                    None => {
                        let session = self.session(channel, job.epoch)?;
                        self.inherit(channel, &session);
                        if job.again && !session.has_region(region) {
                            // The predecessor had unregistered it, but not answered.
                            return Ok(());
                        }
                        self.unregister(channel, region, &session)
                    }
                }
            }
            Order::Undo { channel, region: Some(region), refusal } => {
                self.undo_register(channel, region, job.epoch)?;
                Err(refusal)
            }
            Order::Undo { channel, region: None, refusal } => {
                self.undo_create(channel, job.epoch);
                Err(refusal)
            }
        }
    }

    /// Undoes what a predecessor may have done of a request to register memory, which it has not answered:
    /// after a refusal, the memory is the guest's.
    fn undo_register(&self, channel: u32, region: u32, epoch: u64) -> Result<(), Refusal> {
        if let Some(leftover) = self.left(channel, epoch)? {
            self.wait_for_release(channel, &leftover, epoch);
        }
        let session = self.session(channel, epoch)?;
        self.inherit(channel, &session);
        if session.has_region(region) {
            self.unregister(channel, region, &session)?;
        }
        Ok(())
    }

    /// Undoes what a predecessor has done of a request to create a channel, which it has not answered. False:
    /// nothing.
    pub(super) fn undo_create(&self, channel: u32, epoch: u64) -> bool {
        let before = self.unanswered().get(&channel).cloned();
        let Some(leftover) = before else { return false };
        self.wait_for_release(channel, &leftover, epoch);
        if let Some(_inside) = self.gate.enter(epoch) {
            self.store.forget(channel);
        }
        self.unanswered().remove(&channel);
        true
    }

    fn create(
        &self,
        channel: u32,
        extents: Vec<Extent>,
        size: u64,
        job: &mut Job<'_>,
    ) -> Result<(), Refusal> {
        let epoch = job.epoch;
        // The predecessor has counted it.
        let counted = self.undo_create(channel, epoch);
        let give_up = GiveUp::new()?;
        {
            let inside = self.gate.enter(epoch);
            let mut channels = self.channels();
            if channels.contains_key(&channel) {
                return Err(invalid(format!("channel {channel} exists already")));
            }
            // Their number counts, not their ids: the driver gives those up to the limit that it has read,
            // which may have been another one.
            let most = self.config.limits.max_channels;
            let count = channels.len() + self.unanswered().len();
            if count >= most as usize && !counted {
                return Err(no_resources(format!(
                    "the guest has {count} channels, the limit is {most} (limits.max_channels)"
                )));
            }
            if inside.is_some() {
                channels.insert(channel, Channel::Opening(give_up.clone()));
            }
        }
        self.open_or_forget(channel, extents, size, give_up, job)
    }

    /// Asks a server for the session of a predecessor's channel, whose program was told to wait for it. The
    /// channel is [opening](Channel::Opening). Its place in the server's queue is a new one.
    pub(super) fn ask_again(&self, channel: u32, extents: Vec<Extent>, give_up: GiveUp, epoch: u64) {
        let Some(device) = self.me.upgrade() else { return };
        let ask = move || {
            let size = bytes_of(&extents);
            let mut job = Job::answered(&device, epoch);
            let result = device.open_or_forget(channel, extents.clone(), size, give_up, &mut job);
            if let (Err(Refusal(_, why)), Some(_inside)) = (&result, device.gate.enter(epoch)) {
                device.tell_lost(channel, &extents, why);
            }
            job.answer(result);
        };
        if let Err(e) = std::thread::Builder::new().name("request".to_owned()).spawn(ask) {
            tracing::error!("{}: channel {channel}: no thread to ask for its session: {e}", self.who);
            if let Some(_inside) = self.gate.try_enter(epoch) {
                self.channels().insert(channel, Channel::Over);
                self.store.forget(channel);
            }
        }
    }

    /// Opens a channel that is [opening](Channel::Opening). If that fails, it is gone, or over if the guest
    /// was told that it exists.
    fn open_or_forget(
        &self,
        channel: u32,
        extents: Vec<Extent>,
        size: u64,
        give_up: GiveUp,
        job: &mut Job<'_>,
    ) -> Result<(), Refusal> {
        let result = self.open_in(channel, extents, size, give_up, job);
        let inside = self.gate.enter(job.epoch);
        if let (Some(_), Err(Refusal(answer, _))) = (&inside, &result) {
            let mut channels = self.channels();
            if job.answered {
                channels.insert(channel, Channel::Over);
            } else {
                channels.remove(&channel);
            }
            self.store.forget(channel);
            self.registry.totals.refuse(*answer);
        }
        drop(inside);
        self.settled.notify_all();
        result
    }

    fn open_in(
        &self,
        channel: u32,
        extents: Vec<Extent>,
        size: u64,
        give_up: GiveUp,
        job: &mut Job<'_>,
    ) -> Result<(), Refusal> {
        let (memory, mappings, server) = {
            // The header is read and written.
            let _inside = self.inside(job.epoch)?;
            let memories = self.memories();
            let extents = memories.joined(&extents)?;
            let mappings = self.budget.channel(extents.len())?;
            let memory = ChannelMemory::new(memories, extents, size)?;
            if !memory.asked_server.is_empty() {
                return Err(invalid("a guest cannot name servers; its host chooses them"));
            }
            let server = self.config.servers.choose(&memory)?;
            (memory, mappings, server)
        };
        self.open(channel, memory, mappings, server, give_up, job)
    }

    fn open(
        &self,
        channel: u32,
        memory: ChannelMemory,
        mappings: Charge,
        (server, config): (usize, SessionConfig),
        give_up: GiveUp,
        job: &mut Job<'_>,
    ) -> Result<(), Refusal> {
        let (epoch, place) = (job.epoch, (server, &config));
        let unknown = |e: io::Error| no_resources(format!("this host cannot remember the channel: {e}"));
        self.remember(epoch, channel, Known::new(place, &memory.extents, Stage::Waits).map_err(unknown)?)?;
        let mut turn = Queued { device: self, channel, memory: &memory, give_up, job };
        let mut prepared = Prepared::connect(&config, &memory, &mut turn)
            .inspect_err(|e| turn.refused_after_waiting(&e.to_string()))?;
        let saved = prepared.save(&memory).map_err(unknown)?;
        let known = Known::new(place, &memory.extents, Stage::Began(saved.as_ref())).map_err(unknown)?;
        self.remember(epoch, channel, known)?;
        drop(saved);
        let opened = prepared.open().inspect_err(|e| turn.refused_after_waiting(&e.to_string()))?;
        let _inside = self.inside(epoch)?;
        let (wakeup, lost) = self.listeners(channel);
        let session = Arc::new(opened.start(memory, wakeup, lost)?);
        let listed = self.registry.list(&self.who, channel.into(), session.clone());
        let held = Held { _listed: listed, _mappings: mappings, pieces: HashMap::new() };
        self.channels().insert(channel, Channel::Open(session, held));
        Ok(())
    }

    /// Remembers a channel for a successor, unless the device was reset: what a reset has ended must not be
    /// found again.
    fn remember(&self, epoch: u64, channel: u32, known: Known) -> Result<(), Refusal> {
        let _inside = self.inside(epoch)?;
        self.store
            .remember(channel, known)
            .map_err(|e| no_resources(format!("this host cannot remember the channel: {e}")))
    }

    fn destroy(&self, channel: u32, epoch: u64) -> Result<(), Refusal> {
        let session = {
            let mut channels = self.channels();
            loop {
                self.not_reset_since(epoch)?;
                match channels.get(&channel) {
                    Some(Channel::Over) => {
                        channels.remove(&channel);
                        return Ok(());
                    }
                    Some(waits @ (Channel::Opening(_) | Channel::Waiting(_) | Channel::Closing(_))) => {
                        if let Channel::Waiting(give_up) = waits {
                            give_up.now();
                        }
                        channels = self.settled.wait(channels).unwrap_or_else(PoisonError::into_inner);
                    }
                    Some(Channel::Left(leftover)) => {
                        let leftover = leftover.clone();
                        drop(channels);
                        self.wait_for_release(channel, &leftover, epoch);
                        self.forget(channel, epoch);
                        return Ok(());
                    }
                    Some(Channel::Open(session, _)) => break session.clone(),
                    None => return Err(invalid(format!("channel {channel} does not exist"))),
                }
            }
        };
        // Two requests to destroy the channel may race: only the one that finds the same session open
        // continues.
        let held = {
            let mut channels = self.channels();
            match channels.get(&channel) {
                Some(Channel::Open(now, _)) if Arc::ptr_eq(now, &session) => {
                    channels.insert(channel, Channel::Closing(session.clone()))
                }
                _ => return Err(invalid(format!("channel {channel} is already being destroyed"))),
            }
        };
        self.count_end(&session);
        let since = Instant::now();
        while session.close("the program has ended its session", PATIENCE) == Closed::StillHeld {
            let seconds = since.elapsed().as_secs();
            tracing::error!(
                "{}: channel {channel}: after {seconds} s the server still holds its memory",
                self.who
            );
            if self.epoch_changed(epoch) {
                return Ok(());
            }
        }
        drop(held);
        self.forget(channel, epoch);
        self.settled.notify_all();
        Ok(())
    }

    /// Forgets a channel that is destroyed, unless the device was reset.
    fn forget(&self, channel: u32, epoch: u64) {
        if let Some(_inside) = self.gate.enter(epoch) {
            let mut channels = self.channels();
            channels.remove(&channel);
            // Before another channel can take its place: the keeper counts what is stored.
            self.store.forget(channel);
        }
    }

    fn unregister(&self, channel: u32, region: u32, session: &Arc<Session>) -> Result<(), Refusal> {
        session.unregister_region(region)?;
        self.with_held(channel, session, |held| drop(held.pieces.remove(&region)));
        Ok(())
    }

    /// Counts the regions that a session has inherited from a predecessor, before one is added or removed.
    fn inherit(&self, channel: u32, session: &Arc<Session>) {
        session.wait_for_regions();
        self.with_held(channel, session, |held| {
            for inherited in session.take_inherited() {
                let charge = self.budget.inherited_region(inherited.pieces as usize);
                held.pieces.insert(inherited.region, charge);
            }
        });
    }

    /// Changes what an open channel holds, if it is still this session's.
    fn with_held(&self, channel: u32, session: &Arc<Session>, change: impl FnOnce(&mut Held)) {
        if let Some(Channel::Open(now, held)) = self.channels().get_mut(&channel)
            && Arc::ptr_eq(now, session)
        {
            change(held);
        }
    }

    /// The channels, for a request that arrived at `epoch`: one from before a reset must not find those of
    /// after it. A reset changes the epoch before it takes the channels.
    fn channels_at(&self, epoch: u64) -> Result<MutexGuard<'_, HashMap<u32, Channel>>, Refusal> {
        let channels = self.channels();
        self.not_reset_since(epoch)?;
        Ok(channels)
    }

    /// What a predecessor has left of a channel, if its session is over.
    fn left(&self, channel: u32, epoch: u64) -> Result<Option<Arc<Leftover>>, Refusal> {
        Ok(match self.channels_at(epoch)?.get(&channel) {
            Some(Channel::Left(leftover)) => Some(leftover.clone()),
            _ => None,
        })
    }

    fn not_reset_since(&self, epoch: u64) -> Result<(), Refusal> {
        if self.epoch_changed(epoch) { Err(invalid("the device was reset")) } else { Ok(()) }
    }

    pub(super) fn session(&self, channel: u32, epoch: u64) -> Result<Arc<Session>, Refusal> {
        match self.channels_at(epoch)?.get(&channel) {
            Some(Channel::Open(session, _)) => Ok(session.clone()),
            Some(
                Channel::Opening(_)
                | Channel::Waiting(_)
                | Channel::Over
                | Channel::Closing(_)
                | Channel::Left(_),
            ) => Err(invalid(format!("channel {channel} is not open"))),
            None => Err(invalid(format!("channel {channel} does not exist"))),
        }
    }

    fn inside(&self, epoch: u64) -> Result<Inside<'_>, Refusal> {
        self.gate.enter(epoch).ok_or_else(|| invalid("the device was reset"))
    }
}

/// A channel whose session waits in a server's queue. The guest's request is answered immediately, so that
/// its driver can destroy the channel meanwhile. The channel's header shows the position in the queue.
struct Queued<'a, 'd> {
    device: &'a Device,
    channel: u32,
    memory: &'a ChannelMemory,
    give_up: GiveUp,
    job: &'a mut Job<'d>,
}

impl Queued<'_, '_> {
    /// Writes to the channel's memory once the guest runs, unless the device was reset.
    fn tell(&self, tell: impl FnOnce(&ChannelMemory)) {
        if let Some(_inside) = self.device.gate.enter(self.job.epoch) {
            tell(self.memory);
        }
    }

    fn refused_after_waiting(&self, why: &str) {
        if self.job.answered {
            self.tell(|memory| memory.tell_refused(why));
            self.device.events.wake(self.channel);
        }
    }
}

impl Turn for Queued<'_, '_> {
    fn wait(&mut self, server: &str, ahead: u32) {
        // A stopped guest is told when it continues.
        if !self.memory.may_wait() || self.device.gate.is_paused() {
            return;
        }
        self.tell(|memory| {
            memory.tell_waiting(server, ahead);
            // While it waits, the guest expects this counter to rise.
            memory.view.header().raise_alive();
            let mut channels = self.device.channels();
            if let Some(opening @ Channel::Opening(_)) = channels.get_mut(&self.channel) {
                *opening = Channel::Waiting(self.give_up.clone());
                // A successor's channel may be about to be destroyed already.
                self.device.settled.notify_all();
            }
        });
        self.job.answer(Ok(()));
    }

    fn has_waited(&self) -> bool {
        self.job.answered
    }

    fn given_up(&self) -> Option<PollFd<'_>> {
        Some(PollFd::new(self.give_up.0.as_fd(), PollFlags::POLLIN))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::fuzzing::with_channel_after_reset;

    #[test]
    fn a_request_from_before_a_reset_finds_no_channel_of_after_it() {
        with_channel_after_reset(|device, _| {
            let (before, now) = (0, 1);
            assert!(device.destroy(0, before).is_err(), "destroyed");
            assert!(device.session(0, before).is_err(), "found");
            device.session(0, now).expect("it is open");
            device.destroy(0, now).expect("its own request destroys it");
        });
    }

    #[test]
    fn a_request_from_before_a_reset_writes_no_channels_memory() {
        with_channel_after_reset(|device, extent| {
            let view = device.memories().view(&[extent], extent.len).expect("a channel");
            view.header().set_servers(0);
            let (mut job, give_up) = (Job::answered(device, 0), GiveUp::new().expect("a descriptor"));
            assert!(device.open_in(1, vec![extent], extent.len, give_up, &mut job).is_err(), "opened");
            assert_eq!(view.header().servers(), 0, "the guest was told of its servers");
        });
    }
}
