//! Moves the session's memory off its devices, and back to the same addresses.
//!
//! What moves: the memory in the devices' windows (ordinary allocations and managed memory), and memory made without
//! an address that is mapped once, as a whole ([`space`](crate::driver::space)). What stays: what is shared with other
//! sessions, arrays, code with its variables and heaps, and client memory that kernels access.

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
const BATCH: u64 = 512 << 20;
/// How long returning memory waits for a session that is leaving.
const ROOM_WITHIN: Duration = Duration::from_secs(5);
/// How often it checks.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// A piece that moves.
#[derive(Debug, Clone, Copy)]
struct Moving {
    device: u32,
    address: u64,
    size: u64,
    /// Its offset in the store.
    at: u64,
    /// Its number, if it is memory made without an address.
    memory: Option<u32>,
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
    ) -> Result<u64> {
        // What goes to other servers and comes from them is copied without the dispatcher.
        if let (None, Some(directs)) = (&self.still, &self.directs) {
            self.still = Some(directs.hold_still().ok_or(Status::NOT_READY)?);
        }
        let left = self.leave_idle_devices(cx, store, file, patience);
        if !self.has_left() {
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
    ) -> Result<u64> {
        self.wait_for_devices(cx.seq, patience)?;
        let mut leaving: Vec<Moving> = Vec::new();
        let mut at = 0;
        for (device, window) in (0..).zip(&mut self.windows) {
            for (address, size, piece) in window.pieces.iter_mut() {
                if piece.token.is_none() && matches!(piece.place, Place::Device(_)) {
                    leaving.push(Moving { device, address, size, at, memory: None });
                    at += size;
                }
            }
        }
        for (id, Movable { device, address, size }, left) in self.space.all_movable() {
            if left.is_none() {
                leaving.push(Moving { device, address, size, at, memory: Some(id) });
                at += size;
            }
        }
        self.move_out(&leaving, store, file)?;
        Ok(at)
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
    fn move_out(&mut self, leaving: &[Moving], store: &mut Store, file: Option<OwnedFd>) -> Result {
        if let Some(file) = file {
            let bytes = leaving.iter().map(|piece| piece.size).sum();
            store.reserve(bytes, Some(file), |chunk| self.gpu.lock(chunk))?;
        }
        let (mut lane, mut before) = (Lane::Even, None);
        let moved = batches(leaving).try_for_each(|batch| {
            let end = batch.last().map_or(0, |piece| piece.at + piece.size);
            store.reserve(end, None, |chunk| self.gpu.lock(chunk))?;
            self.begin_copy(Way::Out, lane, batch, store)?;
            if let Some(before) = before.replace(batch) {
                self.set_aside(lane.other(), before)?;
            }
            lane = lane.other();
            Ok(())
        });
        // The last batch. After an error, this only waits until all copies have ended.
        match (moved, before) {
            (Ok(()), Some(last)) => self.set_aside(lane.other(), last),
            (Err(status), Some(last)) => {
                for lane in [Lane::Even, Lane::Odd] {
                    last.first().map_or(Ok(()), |piece| self.gpu.transferred(piece.device, lane))?;
                }
                Err(status)
            }
            (moved, None) => moved,
        }
    }

    /// Releases the memory of a batch once its copies in a lane are done.
    fn set_aside(&mut self, lane: Lane, batch: &[Moving]) -> Result {
        for piece in batch {
            self.gpu.transferred(piece.device, lane)?;
            self.take_off(piece)?;
        }
        Ok(())
    }

    /// Takes a piece's memory off its device. Its bytes are in the store.
    fn take_off(&mut self, piece: &Moving) -> Result {
        let Moving { device, address, size, at, memory } = *piece;
        match memory {
            None => {
                self.gpu.set_aside(device, address, size)?;
                self.put(piece, Place::Store(at));
            }
            Some(id) => {
                let mut access = self.space.mapping(address, size)?.access.clone();
                self.gpu.unmap(address, size, &mut access)?;
                if let Some(Place::Device(handle)) = self.space.put(id, Place::Store(at)) {
                    self.gpu.destroy(device, size, handle, false)?;
                }
            }
        }
        self.quota.moved(Way::Out, self.gpu.number(device), size);
        Ok(())
    }

    /// Moves memory back: see [`Backend::come_back`](crate::driver::Backend::come_back).
    pub(super) fn come_back_to_devices(&mut self, store: &mut Store) -> Result<u64> {
        let mut coming: Vec<Moving> = Vec::new();
        for (device, window) in (0..).zip(&mut self.windows) {
            for (address, size, piece) in window.pieces.iter_mut() {
                if let Place::Store(at) = piece.place {
                    coming.push(Moving { device, address, size, at, memory: None });
                }
            }
        }
        for (id, Movable { device, address, size }, at) in self.space.all_movable() {
            coming.extend(at.map(|at| Moving { device, address, size, at, memory: Some(id) }));
        }
        let until = Instant::now() + ROOM_WITHIN;
        let mut back = 0;
        let mut bring = |session: &mut Session<G>| {
            for batch in batches(&coming) {
                for piece in batch {
                    session.bring_back(piece, until)?;
                    back += 1;
                }
                session.begin_copy(Way::In, Lane::Even, batch, store)?;
            }
            let devices = session.windows.len() as u32;
            (0..devices).try_for_each(|device| {
                let any = coming.iter().any(|piece| piece.device == device);
                if any { session.gpu.transferred(device, Lane::Even) } else { Ok(()) }
            })
        };
        if let Err(status) = bring(self) {
            // The store has the bytes of all of them. Holding part of the devices' memory while waiting for
            // the rest would only block others.
            for piece in &coming[..back] {
                let _ = self.gpu.transferred(piece.device, Lane::Even);
                self.take_off(piece)?;
            }
            return Err(status);
        }
        self.still = None;
        Ok(coming.iter().map(|piece| piece.size).sum())
    }

    /// Notes where a piece of a window is now.
    fn put(&mut self, piece: &Moving, place: Place<G::Piece>) {
        let window = self.windows.get_mut(piece.device as usize);
        if let Some((_, _, known)) = window.and_then(|window| window.pieces.find_mut(piece.address)) {
            known.place = place;
        }
    }

    /// Gives a piece memory again, as soon as a session that is leaving has released enough.
    fn bring_back(&mut self, piece: &Moving, until: Instant) -> Result {
        loop {
            let brought = match piece.memory {
                None => self
                    .gpu
                    .bring_back(piece.device, piece.address, piece.size)
                    .map(|native| self.put(piece, Place::Device(native))),
                Some(id) => self.make_again(id, piece),
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

    /// Makes memory that had no address of its own again, where it was mapped.
    fn make_again(&mut self, id: u32, piece: &Moving) -> Result {
        let Moving { device, address, size, .. } = *piece;
        let before = self.space.mapping(address, size)?.clone();
        let handle = self.gpu.create(device, size)?;
        let mut is_mapped = false;
        let mut given = Mapping { access: Vec::new(), ..before.clone() };
        let made = self.gpu.map(&handle, device, 0, address, size).and_then(|()| {
            is_mapped = true;
            before.access.iter().try_for_each(|of| {
                let flags = if before.read_only.contains(of) { 1 } else { 3 };
                self.gpu.set_access(&handle, &given, address, *of, flags)?;
                given.access.push(*of);
                Ok(())
            })
        });
        if let Err(status) = made {
            if is_mapped {
                self.gpu.unmap(address, size, &mut given.access)?;
            }
            self.gpu.destroy(device, size, handle, false)?;
            return Err(status);
        }
        self.space.put(id, Place::Device(handle));
        Ok(())
    }

    fn begin_copy(&mut self, way: Way, lane: Lane, batch: &[Moving], store: &mut Store) -> Result {
        for Moving { device, address, size, at, .. } in batch.iter().copied() {
            let gpu = std::cell::RefCell::new(&mut self.gpu);
            let copy = |part| gpu.borrow_mut().transfer(device, lane, way, part);
            store.transfer(way, address, at, size, copy, || gpu.borrow_mut().transferred(device, lane))?;
        }
        Ok(())
    }

    /// Whether any piece is in the store.
    pub(super) fn has_left(&self) -> bool {
        let mut pieces = self.windows.iter().flat_map(|window| window.pieces.values());
        pieces.any(|piece| matches!(piece.place, Place::Store(_)))
            || self.space.all_movable().any(|(_, _, at)| at.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_of_one_device_and_limited() {
        let piece = |device, size| Moving { device, address: 0, size, at: 0, memory: None };
        let all = [
            piece(0, BATCH / 2),
            piece(0, BATCH / 2),
            piece(0, 1),
            piece(1, 1),
            piece(1, 2 * BATCH),
            piece(1, 1),
        ];
        let sizes: Vec<usize> = batches(&all).map(<[Moving]>::len).collect();
        assert_eq!(sizes, [2, 1, 2, 1]);
    }
}
