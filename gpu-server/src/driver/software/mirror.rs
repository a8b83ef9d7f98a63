//! Mirrors of pinned program memory, for kernels: at the addresses that it has in the program, in the memory of every device, which is one and the same.
//!
//! A device's memory is mapped in granules, a mirror begins on any page: a granule goes with the last mirror that has bytes in it.

use std::collections::BTreeMap;
use std::os::fd::AsFd;

use protocol::Status;
use protocol::channel::MAX_PAYLOAD;
use protocol::ops::memory::{HostMirror, HostPatch, HostRead, HostWrite};
use software_gpu::{GRANULE, Gpu};

use super::{Software, code, vmm};
use crate::driver::call::Call;

/// All of a session's.
#[derive(Default)]
pub(super) struct Mirrors {
    /// By first address: bytes, and the context that each was made in.
    pieces: BTreeMap<u64, (u64, u32)>,
    /// How many mirrors have bytes in each granule that is mapped.
    granules: BTreeMap<u64, usize>,
}

impl Mirrors {
    /// Bytes that they take.
    pub fn bytes(&self) -> u64 {
        self.granules.len() as u64 * GRANULE
    }

    fn touches(&self, address: u64, size: u64) -> bool {
        let before = self.pieces.range(..address + size).next_back();
        before.is_some_and(|(start, (size, _))| start + size > address)
    }
}

fn granules(address: u64, size: u64) -> impl Iterator<Item = u64> {
    (address / GRANULE..(address + size).div_ceil(GRANULE)).map(|n| n * GRANULE)
}

impl Software {
    fn gpus(&self) -> Vec<Gpu> {
        self.devices.iter().map(|device| device.gpu.clone()).collect()
    }

    pub(super) fn mirror_host(&mut self, cx: &mut Call, op: &HostMirror) -> Result<(), Status> {
        cx.context = op.context;
        self.context(op.context)?;
        op.check()?;
        if self.mirrors.touches(op.address, op.size) {
            return Err(Status::INVALID_VALUE);
        }
        let fresh: Vec<u64> =
            granules(op.address, op.size).filter(|at| !self.mirrors.granules.contains_key(at)).collect();
        let bytes = fresh.len() as u64 * GRANULE;
        self.may_hold(bytes)?;
        let gpus = self.gpus();
        let file = vmm::file(bytes.max(GRANULE)).map_err(|e| {
            tracing::warn!(bytes, "no memory for a mirror: {e}");
            Status::OUT_OF_MEMORY
        })?;
        let map =
            |gpu: &Gpu, (n, at): (usize, &u64)| gpu.map_file(*at, GRANULE, file.as_fd(), n as u64 * GRANULE);
        let made = gpus.iter().try_for_each(|gpu| {
            fresh.iter().enumerate().try_for_each(|each| map(gpu, each))?;
            gpu.place(op.address, op.size)
        });
        if let Err(error) = made {
            tracing::warn!("pinned memory at {:#x} cannot be mirrored for kernels: {error}", op.address);
            for gpu in &gpus {
                // What was not made is not there to be taken away.
                let _ = gpu.release(op.address);
                fresh.iter().for_each(|at| drop(gpu.unmap(*at, GRANULE)));
            }
            return Err(Status::NOT_SUPPORTED);
        }
        for at in granules(op.address, op.size) {
            *self.mirrors.granules.entry(at).or_default() += 1;
        }
        self.mirrors.pieces.insert(op.address, (op.size, op.context.0));
        if fresh.len() < granules(op.address, op.size).count()
            && let Some(gpu) = gpus.first()
        {
            // Another mirror may have left something in a granule that it shared.
            gpu.write(op.address, &vec![0; op.size as usize]).map_err(|e| code(&e))?;
        }
        Ok(())
    }

    /// The device that has a mirror's bytes: all have the same.
    fn mirrored_at(&self, address: u64, len: u64) -> Result<&Gpu, Status> {
        let found = self.mirrors.pieces.range(..=address).next_back();
        let (start, (size, _)) = found.ok_or(Status::INVALID_VALUE)?;
        let inside = address - start < *size && len > 0 && len <= size - (address - start);
        if inside { self.device(0).map(|device| &device.gpu) } else { Err(Status::INVALID_VALUE) }
    }

    pub(super) fn read_host(&mut self, cx: &mut Call, op: &HostRead) -> Result<Vec<u8>, Status> {
        cx.context = op.context;
        if op.len as usize > MAX_PAYLOAD - 4 {
            return Err(Status::INVALID_VALUE);
        }
        let mut bytes = vec![0; op.len as usize];
        self.mirrored_at(op.address, op.len.into())?.read(op.address, &mut bytes).map_err(|e| code(&e))?;
        Ok(bytes)
    }

    pub(super) fn write_host(&mut self, cx: &mut Call, op: &HostWrite<'_>) -> Result<(), Status> {
        cx.context = op.context;
        self.mirrored_at(op.address, op.bytes.len() as u64)?.write(op.address, op.bytes).map_err(|e| code(&e))
    }

    pub(super) fn patch_host(&mut self, cx: &mut Call, op: &HostPatch) -> Result<(), Status> {
        cx.context = op.context;
        for patch in &op.words {
            let gpu = self.mirrored_at(patch.address, 8)?;
            let word = gpu.load(patch.address, true).map_err(|e| code(&e))?;
            gpu.store(patch.address, true, patch.apply(word)).map_err(|e| code(&e))?;
        }
        Ok(())
    }

    pub(super) fn unmirror_host(&mut self, address: u64) -> Result<(), Status> {
        let (size, _) = self.mirrors.pieces.remove(&address).ok_or(Status::INVALID_VALUE)?;
        let gpus = self.gpus();
        for gpu in &gpus {
            gpu.release(address).map_err(|e| code(&e))?;
        }
        for at in granules(address, size) {
            let Some(users) = self.mirrors.granules.get_mut(&at) else { continue };
            *users -= 1;
            if *users == 0 {
                self.mirrors.granules.remove(&at);
                for gpu in &gpus {
                    gpu.unmap(at, GRANULE).map_err(|e| code(&e))?;
                }
            }
        }
        Ok(())
    }

    pub(super) fn forget_mirrors(&mut self, context: u32) {
        let gone: Vec<u64> = self
            .mirrors
            .pieces
            .iter()
            .filter(|(_, (_, owner))| *owner == context)
            .map(|(at, _)| *at)
            .collect();
        for address in gone {
            if let Err(status) = self.unmirror_host(address) {
                tracing::error!("a mirror at {address:#x} stays: {status}");
            }
        }
    }
}
