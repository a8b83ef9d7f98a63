//! Moves the session's memory off its devices, and back to the same addresses.
//!
//! What moves: the memory in the devices' windows (ordinary allocations and managed memory), and memory made
//! without an address ([`space`](crate::driver::space)), however it is mapped: in parts, at several
//! addresses, for other devices, or not at all. What stays: what is shared with other sessions, arrays, code
//! with its variables and heaps, and client memory that kernels access.
//!
//! All bytes of memory without an address are copied, whatever part of it the client has mapped. If the
//! client has not mapped all of it at one address for its own device, the session does so meanwhile, at
//! addresses that the client does not know.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use protocol::Status;

use super::Session;
use crate::driver::call::{Call, Result};
use crate::driver::gpu::Gpu;
use crate::driver::space::{Mapping, Movable};
use crate::driver::store::{Lane, Place, Store, Way};

/// Bytes that are copied before the memory of these pieces is released.
const BATCH: u64 = if cfg!(test) { 4 << 20 } else { 512 << 20 };
/// How long returning memory waits for a session that is leaving.
const ROOM_WITHIN: Duration = if cfg!(test) { Duration::ZERO } else { Duration::from_secs(5) };
/// How often it checks.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// A piece that moves.
#[derive(Debug, Clone, Copy)]
struct Moving {
    what: What,
    device: u32,
    size: u64,
    /// Its offset in the store.
    at: u64,
}

#[derive(Debug, Clone, Copy)]
enum What {
    /// A piece of a window, at this address.
    Piece(u64),
    /// Memory made without an address, with this number.
    Memory(u32),
}

/// Groups of neighbors in `all`, each of about one [`BATCH`] and on one device.
fn batches(all: &[Moving]) -> impl Iterator<Item = &[Moving]> {
    let mut sum = 0;
    all.chunk_by(move |one, next| {
        sum += one.size;
        let together = sum < BATCH && one.device == next.device;
        sum = if together { sum } else { 0 };
        together
    })
}

impl<G: Gpu> Session<G> {
    /// Moves memory off the devices: see [`Backend::leave`](crate::driver::Backend::leave).
    pub(super) fn leave_devices(
        &mut self,
        cx: &mut Call,
        store: &mut Store,
        file: Option<OwnedFd>,
        patience: Duration,
    ) -> Result {
        // What goes to other servers and comes from them is copied without the dispatcher.
        if let (None, Some(directs)) = (&self.still, &self.directs) {
            self.still = Some(directs.hold_still().ok_or(Status::NOT_READY)?);
        }
        let left = self.leave_idle_devices(cx, store, file, patience);
        if !self.has_left() && self.torn.is_none() {
            self.still = None;
        }
        left
    }

    /// The same, once nothing but the dispatcher copies pieces of other servers.
    fn leave_idle_devices(
        &mut self,
        cx: &mut Call,
        store: &mut Store,
        file: Option<OwnedFd>,
        patience: Duration,
    ) -> Result {
        let gone = self.in_store();
        let first = gone.iter().map(|piece| piece.at + piece.size).max();
        let mut at = first.unwrap_or(0);
        let leaving = self.all_pieces(|place, size| match place {
            Place::Store(_) => None,
            Place::Device(()) => {
                at += size;
                Some(at - size)
            }
        });
        if leaving.is_empty() {
            return Ok(());
        }
        self.wait_for_devices(cx.seq, patience)?;
        if first.is_none() {
            self.gpu.before_move()?;
            store.begin(at, file)?;
        } else if file.is_some() && !store.has_file() {
            // The first ones went to memory, and there is none for the others.
            return Err(Status::OUT_OF_MEMORY);
        }
        self.move_out(&leaving, store)
    }

    /// The pieces that can leave their devices or have left, if `at`, given their place and size, says where
    /// in the store they go or are.
    fn all_pieces(&self, mut at: impl FnMut(Place<()>, u64) -> Option<u64>) -> Vec<Moving> {
        let mut found = Vec::new();
        for (device, window) in (0..).zip(&self.windows) {
            for (address, size, piece) in window.pieces.all() {
                let place = piece.place.kind();
                let stays = piece.token.is_some();
                if let Some(at) = (!stays).then(|| at(place, size)).flatten() {
                    found.push(Moving { what: What::Piece(address), device, size, at });
                }
            }
        }
        for (id, Movable { device, size }, place) in self.space.all_movable() {
            found.extend(at(place, size).map(|at| Moving { what: What::Memory(id), device, size, at }));
        }
        found
    }

    /// The pieces that are in the store.
    fn in_store(&self) -> Vec<Moving> {
        self.all_pieces(|place, _| if let Place::Store(at) = place { Some(at) } else { None })
    }

    /// Waits until no device works for the session.
    fn wait_for_devices(&mut self, seq: u64, patience: Duration) -> Result {
        let until = Instant::now() + patience;
        let (idle, becomes_idle) = channel();
        let devices = self.windows.len() as u32;
        for device in 0..devices {
            let idle = idle.clone();
            // After the timeout nobody listens any more.
            let end = move |status: Status| {
                let _ = idle.send(status);
            };
            self.gpu.after_device(&mut self.streams, device, seq, end);
        }
        drop(idle);
        for _ in 0..devices {
            let left = until.saturating_duration_since(Instant::now());
            match becomes_idle.recv_timeout(left) {
                Ok(Status::SUCCESS) => {}
                // A failed context has nothing worth moving.
                Ok(status) => return Err(status),
                Err(_) => return Err(Status::NOT_READY),
            }
        }
        Ok(())
    }

    /// Moves pieces to their places in the store. While one batch is copied, space is made for the next, and
    /// the memory of the previous one is released.
    ///
    /// # Errors
    /// What is not in the store then is on its device, as before.
    fn move_out(&mut self, leaving: &[Moving], store: &mut Store) -> Result {
        let (mut lane, mut before) = (Lane::Even, None);
        let moved = batches(leaving).try_for_each(|batch| {
            let end = batch.last().map_or(0, |piece| piece.at + piece.size);
            self.gpu.before_move()?;
            store.reserve(end, |chunk| self.gpu.lock(chunk))?;
            batch.iter().try_for_each(|piece| self.map_whole(piece))?;
            self.begin_copy(Way::Out, lane, batch, store)?;
            if let Some(before) = before.replace(batch) {
                self.set_aside(lane.other(), before)?;
            }
            lane = lane.other();
            Ok(())
        });
        let moved = moved.and_then(|()| before.map_or(Ok(()), |last| self.set_aside(lane.other(), last)));
        if moved.is_err() {
            self.end_copies(leaving);
            for piece in leaving {
                if let Err(status) = self.unmap_whole(piece) {
                    self.torn = Some(status);
                }
            }
        }
        moved
    }

    /// Makes sure that a piece has an address at which its device can copy all of it.
    fn map_whole(&mut self, piece: &Moving) -> Result {
        let What::Memory(id) = piece.what else { return Ok(()) };
        if self.space.whole(id).is_none() {
            let handle = self.space.memory(id)?.handle()?;
            self.gpu.before_move()?;
            let address = self.gpu.map_whole(handle, piece.device, piece.size)?;
            self.whole.insert(id, address);
        }
        Ok(())
    }

    /// Undoes [`map_whole`](Session::map_whole), if it did anything.
    fn unmap_whole(&mut self, piece: &Moving) -> Result {
        if let What::Memory(id) = piece.what
            && let Some(address) = self.whole.get(&id)
        {
            self.gpu.before_move()?;
            self.gpu.unmap_whole(piece.device, *address, piece.size)?;
            self.whole.remove(&id);
        }
        Ok(())
    }

    /// The address at which a piece is copied.
    fn address_of(&self, piece: &Moving) -> Result<u64> {
        match piece.what {
            What::Piece(address) => Ok(address),
            What::Memory(id) => {
                let own = self.whole.get(&id).copied();
                own.or_else(|| self.space.whole(id)).ok_or(Status::UNKNOWN)
            }
        }
    }

    /// Waits until nothing is copied from or to the store any more, after an error.
    fn end_copies(&mut self, moving: &[Moving]) {
        for device in 0..self.windows.len() as u32 {
            if moving.iter().any(|piece| piece.device == device) {
                for lane in [Lane::Even, Lane::Odd] {
                    // If this fails, the device has failed, and copies nothing.
                    let _ = self.gpu.transferred(device, lane);
                }
            }
        }
    }

    /// Releases the memory of a batch once its copies in a lane are done.
    fn set_aside(&mut self, lane: Lane, batch: &[Moving]) -> Result {
        for piece in batch {
            self.gpu.before_move()?;
            self.gpu.transferred(piece.device, lane)?;
            self.take_off(piece)?;
        }
        Ok(())
    }

    /// Takes a piece's memory off its device. Its bytes are in the store.
    ///
    /// # Errors
    /// The memory is on its device, as before.
    fn take_off(&mut self, piece: &Moving) -> Result {
        let Moving { what, device, size, at } = *piece;
        match what {
            What::Piece(address) => {
                self.gpu.before_move()?;
                self.gpu.set_aside(device, address, size)?;
                self.put(device, address, Place::Store(at));
            }
            What::Memory(id) => {
                self.unmap_whole(piece)?;
                let mappings = self.space.mappings_of(id);
                let handle = self.space.memory(id)?.handle()?;
                Mapper { gpu: &mut self.gpu, torn: &mut self.torn }.hide(handle, device, &mappings)?;
                if let Some(Place::Device(handle)) = self.space.put(id, Place::Store(at)) {
                    self.destroy(device, size, handle);
                }
            }
        }
        self.quota.moved(Way::Out, self.gpu.number(device), size);
        Ok(())
    }

    /// Releases memory that is mapped nowhere. If that fails, the device has less memory until the session
    /// ends; its contents are elsewhere, so nothing else is wrong.
    fn destroy(&mut self, device: u32, size: u64, handle: G::Memory) {
        if let Err(status) = self.gpu.destroy(device, size, handle, false) {
            tracing::warn!(device, size, "device memory could not be released: {status}");
        }
    }

    /// Moves memory back: see [`Backend::come_back`](crate::driver::Backend::come_back).
    pub(super) fn come_back_to_devices(&mut self, store: &mut Store) -> Result {
        let coming = self.in_store();
        let mut back = 0;
        if let Err(status) = self.bring(&coming, &mut back, store) {
            self.end_copies(&coming);
            // The store has the bytes of all of them. Holding part of the devices' memory while waiting for
            // the rest would only block others.
            for piece in &coming[..back] {
                if let Err(status) = self.take_off(piece) {
                    // It is where a command would use it, perhaps without its bytes.
                    self.torn = Some(status);
                }
            }
            return Err(status);
        }
        self.still = None;
        Ok(())
    }

    /// Gives pieces memory again, and copies their bytes to it. `back` counts those that have memory.
    fn bring(&mut self, coming: &[Moving], back: &mut usize, store: &mut Store) -> Result {
        let until = Instant::now() + ROOM_WITHIN;
        for batch in batches(coming) {
            for piece in batch {
                self.bring_back(piece, until)?;
                *back += 1;
                self.map_whole(piece)?;
            }
            self.begin_copy(Way::In, Lane::Even, batch, store)?;
        }
        for device in 0..self.windows.len() as u32 {
            if coming.iter().any(|piece| piece.device == device) {
                self.gpu.before_move()?;
                self.gpu.transferred(device, Lane::Even)?;
            }
        }
        coming.iter().try_for_each(|piece| self.unmap_whole(piece))
    }

    /// Notes where a piece of a window is now.
    fn put(&mut self, device: u32, address: u64, place: Place<G::Piece>) {
        let window = self.windows.get_mut(device as usize);
        if let Some((_, _, known)) = window.and_then(|window| window.pieces.find_mut(address)) {
            known.place = place;
        }
    }

    /// Gives a piece memory again, as soon as a session that is leaving has released enough.
    fn bring_back(&mut self, piece: &Moving, until: Instant) -> Result {
        loop {
            self.gpu.before_move()?;
            let brought = match piece.what {
                What::Piece(address) => self
                    .gpu
                    .bring_back(piece.device, address, piece.size)
                    .map(|native| self.put(piece.device, address, Place::Device(native))),
                What::Memory(id) => self.make_again(id, piece),
            };
            match brought {
                Err(Status::OUT_OF_MEMORY) if Instant::now() < until => std::thread::sleep(LOOK_EVERY),
                Ok(()) => {
                    self.quota.moved(Way::In, self.gpu.number(piece.device), piece.size);
                    return Ok(());
                }
                failed => return failed,
            }
        }
    }

    /// Makes memory that had no address of its own again, and maps it where and as it was.
    fn make_again(&mut self, id: u32, piece: &Moving) -> Result {
        let Moving { device, size, .. } = *piece;
        let mappings = self.space.mappings_of(id);
        let handle = self.gpu.create(device, size)?;
        let shown = Mapper { gpu: &mut self.gpu, torn: &mut self.torn }.show(&handle, device, &mappings);
        match shown {
            Ok(()) => drop(self.space.put(id, Place::Device(handle))),
            Err(_) => self.destroy(device, size, handle),
        }
        shown
    }

    fn begin_copy(&mut self, way: Way, lane: Lane, batch: &[Moving], store: &mut Store) -> Result {
        for piece in batch {
            let Moving { device, size, at, .. } = *piece;
            let address = self.address_of(piece)?;
            let gpu = RefCell::new(&mut self.gpu);
            let copy = |part| {
                let mut gpu = gpu.borrow_mut();
                gpu.before_move()?;
                gpu.transfer(device, lane, way, part)
            };
            let wait = || {
                let mut gpu = gpu.borrow_mut();
                gpu.before_move()?;
                gpu.transferred(device, lane)
            };
            store.transfer(way, address, at, size, copy, wait)?;
        }
        Ok(())
    }

    /// Whether any piece is in the store.
    pub(super) fn has_left(&self) -> bool {
        !self.in_store().is_empty()
    }
}

/// Maps memory that has no address of its own, and removes its mappings, all of them or none.
struct Mapper<'a, G: Gpu> {
    gpu: &'a mut G,
    /// Set if what was done in part cannot be undone.
    torn: &'a mut Option<Status>,
}

impl<G: Gpu> Mapper<'_, G> {
    /// Makes mappings as they are described.
    fn show(&mut self, handle: &G::Memory, device: u32, mappings: &[(u64, Mapping)]) -> Result {
        for (done, mapping) in mappings.iter().enumerate() {
            if let Err(status) = self.show_one(handle, device, mapping) {
                for (address, mapping) in &mappings[..done] {
                    self.undo(|gpu| gpu.unmap(*address, mapping.size, &mut mapping.access.clone()));
                }
                return Err(status);
            }
        }
        Ok(())
    }

    fn show_one(&mut self, handle: &G::Memory, device: u32, (address, mapping): &(u64, Mapping)) -> Result {
        self.gpu.before_move()?;
        self.gpu.map(handle, device, mapping.offset, *address, mapping.size)?;
        let mut given = Mapping { access: Vec::new(), ..mapping.clone() };
        let allowed = self.allow(handle, *address, mapping, &mut given);
        if allowed.is_err() {
            self.undo(|gpu| gpu.unmap(*address, mapping.size, &mut given.access));
        }
        allowed
    }

    /// Gives the devices that may access `mapping` that access. `given`: the same mapping, with those that
    /// have it already.
    fn allow(&mut self, handle: &G::Memory, address: u64, mapping: &Mapping, given: &mut Mapping) -> Result {
        for device in &mapping.access {
            if !given.access.contains(device) {
                let flags = if mapping.read_only.contains(device) { 1 } else { 3 };
                self.gpu.before_move()?;
                self.gpu.set_access(handle, given, address, *device, flags)?;
                given.access.push(*device);
            }
        }
        Ok(())
    }

    /// Removes mappings.
    fn hide(&mut self, handle: &G::Memory, device: u32, mappings: &[(u64, Mapping)]) -> Result {
        for (done, (address, mapping)) in mappings.iter().enumerate() {
            let mut left = mapping.clone();
            let hidden = self
                .gpu
                .before_move()
                .and_then(|()| self.gpu.unmap(*address, mapping.size, &mut left.access));
            if let Err(status) = hidden {
                // It is still mapped, perhaps for fewer devices.
                if let Err(status) = self.allow(handle, *address, mapping, &mut left) {
                    *self.torn = Some(status);
                }
                for one in &mappings[..done] {
                    if let Err(status) = self.show_one(handle, device, one) {
                        *self.torn = Some(status);
                    }
                }
                return Err(status);
            }
        }
        Ok(())
    }

    /// Undoes something.
    fn undo(&mut self, how: impl FnOnce(&mut G) -> Result) {
        if let Err(status) = self.gpu.before_move().and_then(|()| how(self.gpu)) {
            *self.torn = Some(status);
        }
    }
}

#[cfg(test)]
mod tests;
