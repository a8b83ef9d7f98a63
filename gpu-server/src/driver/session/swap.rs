//! Moves the session's memory off its devices, and back to the same addresses.
//!
//! The memory in the devices' windows moves: ordinary allocations and managed memory. What stays: pieces
//! shared with other sessions, memory made without an address ([`space`](crate::driver::space)), arrays, code
//! with its variables and heaps, and client memory that kernels access.

use std::os::fd::OwnedFd;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use protocol::Status;

use super::Session;
use super::memory::Place;
use crate::driver::call::{Call, Result};
use crate::driver::gpu::Gpu;
use crate::driver::store::{Lane, Store, Way};

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
        // What comes from other servers is written without the dispatcher.
        if self.directs.as_ref().is_some_and(|directs| directs.expects()) {
            return Err(Status::NOT_READY);
        }
        self.wait_for_devices(cx.seq, patience)?;
        let mut leaving: Vec<Moving> = Vec::new();
        let mut at = 0;
        for (device, window) in (0..).zip(&mut self.windows) {
            for (address, size, piece) in window.pieces.iter_mut() {
                if piece.token.is_none() && matches!(piece.place, Place::Device(_)) {
                    leaving.push(Moving { device, address, size, at });
                    at += size;
                }
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
            self.gpu.set_aside(piece.device, piece.address, piece.size)?;
            self.put(piece, Place::Store(piece.at), Way::Out);
        }
        Ok(())
    }

    /// Moves memory back: see [`Backend::come_back`](crate::driver::Backend::come_back).
    pub(super) fn come_back_to_devices(&mut self, store: &mut Store) -> Result<u64> {
        let mut coming: Vec<Moving> = Vec::new();
        for (device, window) in (0..).zip(&mut self.windows) {
            for (address, size, piece) in window.pieces.iter_mut() {
                if let Place::Store(at) = piece.place {
                    coming.push(Moving { device, address, size, at });
                }
            }
        }
        let until = Instant::now() + ROOM_WITHIN;
        let mut back = 0;
        let mut bring = |session: &mut Session<G>| {
            for batch in batches(&coming) {
                for piece in batch {
                    let native = session.bring_back(piece, until)?;
                    session.put(piece, Place::Device(native), Way::In);
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
                self.gpu.set_aside(piece.device, piece.address, piece.size)?;
                self.put(piece, Place::Store(piece.at), Way::Out);
            }
            return Err(status);
        }
        Ok(coming.iter().map(|piece| piece.size).sum())
    }

    /// Notes where a piece is now.
    fn put(&mut self, piece: &Moving, place: Place<G::Piece>, way: Way) {
        let window = self.windows.get_mut(piece.device as usize);
        if let Some((_, _, known)) = window.and_then(|window| window.pieces.find_mut(piece.address)) {
            known.place = place;
        }
        self.quota.moved(way, self.gpu.number(piece.device), piece.size);
    }

    /// Gives a piece memory again, as soon as a session that is leaving has released enough.
    fn bring_back(&mut self, piece: &Moving, until: Instant) -> Result<G::Piece> {
        loop {
            match self.gpu.bring_back(piece.device, piece.address, piece.size) {
                Err(Status::OUT_OF_MEMORY) if Instant::now() < until => std::thread::sleep(LOOK_EVERY),
                brought => return brought,
            }
        }
    }

    fn begin_copy(&mut self, way: Way, lane: Lane, batch: &[Moving], store: &mut Store) -> Result {
        for Moving { device, address, size, at } in batch.iter().copied() {
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
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_of_one_device_and_limited() {
        let piece = |device, size| Moving { device, address: 0, size, at: 0 };
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
