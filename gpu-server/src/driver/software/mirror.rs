//! Mirrors of pinned program memory for kernels, at the program's addresses, in memory that all devices
//! share.
//!
//! [`Reach`] is what threads other than the dispatcher's may use: the mirrors, and the devices when they
//! fail.
//!
//! Device memory is mapped in granules, but a mirror can begin on any page. So a granule is unmapped together
//! with the last mirror in it.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

use protocol::Status;
use protocol::handle::ContextId;
use protocol::ops::Answer;
use protocol::ops::memory::{HostMirror, HostMirrorReply, WordPatch};
use software_gpu::{GRANULE, Gpu};

use super::file::file;
use super::{Software, code};
use crate::driver::beside::Beside;
use crate::driver::call::{Call, Result};
use crate::driver::gpu::GpuHostMemory;
use crate::driver::quota::{MirrorCharge, Quota};
use crate::driver::watches::Watches;

/// The number of mirrors in each mapped granule, and the granule's charge.
pub(super) type Granules = BTreeMap<u64, (usize, MirrorCharge)>;

/// A mirror.
struct Mirror {
    size: u64,
    /// The device of the context that it was made in.
    gpu: Gpu,
}

/// Mirrors by their first addresses.
#[derive(Default)]
pub struct Reach {
    mirrors: Mutex<BTreeMap<u64, Mirror>>,
    count: AtomicUsize,
    /// The devices by their number on the server.
    devices: Mutex<BTreeMap<u32, Gpu>>,
    watches: Watches,
}

impl Reach {
    fn mirrors(&self) -> MutexGuard<'_, BTreeMap<u64, Mirror>> {
        self.mirrors.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn devices(&self) -> MutexGuard<'_, BTreeMap<u32, Gpu>> {
        self.devices.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Sets a device, replacing the one with this number.
    ///
    /// # Errors
    /// The old device's error, if it has failed: a reset doesn't help then.
    pub(super) fn set_device(&self, number: u32, gpu: &Gpu) -> Result {
        let mut devices = self.devices();
        if let Some(code) = devices.get(&number).and_then(Gpu::breakdown) {
            return Err(Status(code));
        }
        devices.insert(number, gpu.clone());
        Ok(())
    }

    /// Restricts the session to devices with these numbers.
    pub(super) fn keep_devices(&self, numbers: &[u32]) {
        self.devices().retain(|number, _| numbers.contains(number));
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

    /// Calls a function with the device of the mirror that contains these bytes. The mirror exists until the
    /// function returns.
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
        self.count.load(Ordering::Relaxed) > 0
    }

    fn holds(&self, address: u64, len: u64) -> bool {
        self.at(address, len, |_| Ok(())).is_ok()
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> Result {
        self.at(address, bytes.len() as u64, |gpu| gpu.host_read(address, bytes))
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result {
        self.at(address, bytes.len() as u64, |gpu| gpu.host_write(address, bytes))
    }

    fn watches(&self) -> &Watches {
        &self.watches
    }

    fn fail_device(&self, number: u32, status: Status) {
        self.devices().get(&number).inspect(|gpu| gpu.break_down(status.0));
    }

    fn patch(&self, words: &[WordPatch]) -> Result {
        words.iter().try_for_each(|patch| {
            self.at(patch.address, 8, |gpu| gpu.host_patch(patch.address, |word| patch.apply(word)))
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
        let file = file(bytes.max(GRANULE))?;
        let map =
            |gpu: &Gpu, (n, at): (usize, &u64)| gpu.map_file(*at, GRANULE, file.as_fd(), n as u64 * GRANULE);
        let made = gpus.iter().try_for_each(|gpu| {
            fresh.iter().enumerate().try_for_each(|each| map(gpu, each))?;
            gpu.place(op.address, op.size)
        });
        if let Err(error) = made {
            tracing::warn!("pinned memory at {:#x} cannot be mirrored for kernels: {error}", op.address);
            for gpu in &gpus {
                // Undo only what was done.
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
            // Another mirror may have left bytes in a granule that both share.
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
