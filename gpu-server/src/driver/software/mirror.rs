//! Mirrors of pinned program memory, for kernels: at the addresses that it has in the program, in the memory of every device, which is one and the same.
//!
//! A device's memory is mapped in granules, a mirror begins on any page: a granule goes with the last mirror that has bytes in it.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

use protocol::Status;
use protocol::handle::{ContextId, TicketId};
use protocol::ops::Answer;
use protocol::ops::memory::{HostMirror, HostMirrorReply, WordPatch};
use software_gpu::{GRANULE, Gpu};

use super::streams::Tickets;
use super::{Software, code, memory};
use crate::driver::beside::Beside;
use crate::driver::call::{Call, Result};
use crate::driver::gpu::GpuHostMemory;
use crate::driver::quota::{MirrorCharge, Quota};

/// How many mirrors have bytes in each granule that is mapped, and the granule's charge.
pub(super) type Granules = BTreeMap<u64, (usize, MirrorCharge)>;

/// A mirror.
struct Mirror {
    size: u64,
    /// The device of the context that it was made in.
    gpu: Gpu,
}

/// Mirrors by their first addresses, and points at which streams wait for the client.
#[derive(Default)]
pub struct Reach {
    pub(super) tickets: Tickets,
    mirrors: Mutex<BTreeMap<u64, Mirror>>,
    count: AtomicUsize,
}

impl Reach {
    fn mirrors(&self) -> MutexGuard<'_, BTreeMap<u64, Mirror>> {
        self.mirrors.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn insert(&self, address: u64, mirror: Mirror) {
        let mut mirrors = self.mirrors();
        mirrors.insert(address, mirror);
        self.count.store(mirrors.len(), Ordering::Relaxed);
    }

    fn remove(&self, address: u64) -> Option<Mirror> {
        let mut mirrors = self.mirrors();
        let mirror = mirrors.remove(&address);
        self.count.store(mirrors.len(), Ordering::Relaxed);
        mirror
    }

    /// Uses the device of the mirror that has these bytes. The mirror stays meanwhile.
    fn at<R>(
        &self,
        address: u64,
        len: u64,
        f: impl FnOnce(&Gpu) -> Result<R, software_gpu::Error>,
    ) -> Result<R> {
        let mirrors = self.mirrors();
        let (start, mirror) = mirrors.range(..=address).next_back().ok_or(Status::INVALID_VALUE)?;
        let inside = address - start < mirror.size && len > 0 && len <= mirror.size - (address - start);
        if inside { f(&mirror.gpu).map_err(|e| code(&e)) } else { Err(Status::INVALID_VALUE) }
    }
}

impl Beside for Reach {
    fn is_needed(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 0 || self.tickets.any()
    }

    fn signal(&self, ticket: TicketId) -> bool {
        self.tickets.signal(ticket.0)
    }

    fn release(&self) {
        self.tickets.release_all();
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> Result {
        self.at(address, bytes.len() as u64, |gpu| gpu.read(address, bytes))
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result {
        self.at(address, bytes.len() as u64, |gpu| gpu.write(address, bytes))
    }

    fn patch(&self, words: &[WordPatch]) -> Result {
        words.iter().try_for_each(|patch| {
            self.at(patch.address, 8, |gpu| {
                let word = gpu.load(patch.address, true)?;
                gpu.store(patch.address, true, patch.apply(word))
            })
        })
    }
}

fn granules(address: u64, size: u64) -> impl Iterator<Item = u64> {
    (address / GRANULE..(address + size).div_ceil(GRANULE)).map(|n| n * GRANULE)
}

impl Software {
    fn gpus(&self) -> Vec<Gpu> {
        self.devices.iter().map(|device| device.gpu.clone()).collect()
    }

    fn unmirror(&mut self, address: u64) -> Result {
        let size = self.beside.remove(address).ok_or(Status::INVALID_VALUE)?.size;
        let gpus = self.gpus();
        for gpu in &gpus {
            gpu.release(address).map_err(|e| code(&e))?;
        }
        for at in granules(address, size) {
            let Some((users, _)) = self.granules.get_mut(&at) else { continue };
            *users -= 1;
            if *users == 0 {
                self.granules.remove(&at);
                for gpu in &gpus {
                    gpu.unmap(at, GRANULE).map_err(|e| code(&e))?;
                }
            }
        }
        Ok(())
    }
}

impl GpuHostMemory for Software {
    /// A mirror's first address.
    type HostView = u64;

    fn mirror_host(
        &mut self,
        _cx: &mut Call,
        op: &HostMirror,
        quota: &Quota,
    ) -> Result<(u64, Answer<HostMirrorReply>)> {
        let device = self.context(op.context)?.device;
        let home = self.device(device)?.gpu.clone();
        let fresh: Vec<u64> =
            granules(op.address, op.size).filter(|at| !self.granules.contains_key(at)).collect();
        let bytes = fresh.len() as u64 * GRANULE;
        let mut charge = quota.charge_mirror(self.device(device)?.number, bytes)?;
        let gpus = self.gpus();
        let file = memory::file(bytes.max(GRANULE))?;
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
            self.granules.entry(at).or_insert_with(|| (0, charge.split(GRANULE))).0 += 1;
        }
        let shares_granules = fresh.len() < granules(op.address, op.size).count();
        self.beside.insert(op.address, Mirror { size: op.size, gpu: home.clone() });
        if shares_granules && let Err(error) = home.write(op.address, &vec![0; op.size as usize]) {
            // Another mirror may have left something in a granule that both have.
            self.unmirror(op.address)?;
            return Err(code(&error));
        }
        Ok((op.address, Answer::Now(HostMirrorReply {})))
    }

    fn unmap_host(&mut self, _context: ContextId, _of: ContextId, view: u64) -> Result {
        self.unmirror(view)
    }

    fn forget_host(&mut self, view: u64) {
        if let Err(status) = self.unmirror(view) {
            tracing::error!("a mirror at {view:#x} stays: {status}");
        }
    }
}
