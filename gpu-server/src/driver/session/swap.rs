//! The session's memory leaves its devices, and comes back to the same addresses.
//!
//! What leaves is what backs the devices' windows, where ordinary allocations are and managed memory. What stays: pieces that the session shares with others, memory that was made without an address
//! ([`space`](crate::driver::space)), arrays, code with its variables and heaps, and client memory that kernels reach.

use std::os::fd::OwnedFd;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use protocol::Status;

use super::Session;
use super::memory::Place;
use crate::driver::call::{Call, Result};
use crate::driver::gpu::Gpu;
use crate::driver::store::{Store, Way};

/// Bytes of pieces that are copied before their memory is given up.
const BATCH: u64 = 1 << 30;

/// A piece that moves.
#[derive(Debug, Clone, Copy)]
struct Moving {
    device: u32,
    address: u64,
    size: u64,
    /// Its offset in the store.
    at: u64,
}

/// Groups of neighbors in `all` of about a [`BATCH`] each, on one device.
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
        store.reserve(at, file, |chunk| self.gpu.lock(chunk))?;
        self.move_out(&leaving, store)?;
        Ok(at)
    }

    /// Waits until no device works for the session.
    fn wait_for_devices(&mut self, seq: u64, patience: Duration) -> Result {
        let until = Instant::now() + patience;
        let (idle, becomes_idle) = channel();
        let devices = self.windows.len() as u32;
        for device in 0..devices {
            let idle = idle.clone();
            // Nobody listens any more once the time is over.
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
                // A context that has failed has nothing that is worth to be moved.
                Ok(status) => return Err(status),
                Err(_) => return Err(Status::NOT_READY),
            }
        }
        Ok(())
    }

    /// Moves pieces to their places in the store.
    fn move_out(&mut self, leaving: &[Moving], store: &mut Store) -> Result {
        for batch in batches(leaving) {
            self.copy(Way::Out, batch, store)?;
            for piece in batch {
                self.gpu.set_aside(piece.device, piece.address, piece.size)?;
                self.put(piece, Place::Store(piece.at), Way::Out);
            }
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
        let mut back = 0;
        let mut bring = |session: &mut Session<G>| {
            for batch in batches(&coming) {
                for piece in batch {
                    let native = session.gpu.bring_back(piece.device, piece.address, piece.size)?;
                    session.put(piece, Place::Device(native), Way::In);
                    back += 1;
                }
                session.begin_copy(Way::In, batch, store)?;
            }
            let devices = session.windows.len() as u32;
            (0..devices).try_for_each(|device| {
                let any = coming.iter().any(|piece| piece.device == device);
                if any { session.gpu.transferred(device) } else { Ok(()) }
            })
        };
        if let Err(status) = bring(self) {
            // The store has the bytes of all of them. What holds a part of the devices' memory and waits for the rest would keep others from it.
            for piece in &coming[..back] {
                let _ = self.gpu.transferred(piece.device);
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

    fn copy(&mut self, way: Way, batch: &[Moving], store: &mut Store) -> Result {
        self.begin_copy(way, batch, store)?;
        batch.first().map_or(Ok(()), |piece| self.gpu.transferred(piece.device))
    }

    fn begin_copy(&mut self, way: Way, batch: &[Moving], store: &mut Store) -> Result {
        for Moving { device, address, size, at } in batch.iter().copied() {
            let gpu = std::cell::RefCell::new(&mut self.gpu);
            let copy = |part| gpu.borrow_mut().transfer(device, way, part);
            store.transfer(way, address, at, size, copy, || gpu.borrow_mut().transferred(device))?;
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
