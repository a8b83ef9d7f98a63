//! Device memory: memory files, mapped by each GPU with access, and by the client's other sessions that open
//! them.

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

use crate::driver::call::Result;
use protocol::Status;
use protocol::ops::memory::{SPACE, SPACE_SIZE, WINDOW_SIZE};
use software_gpu::{GRANULE, Gpu};

use super::file::file;
use super::{Software, code};
use crate::driver::gpu::{Block, GpuMemory};
use crate::driver::space::{Mapping, Space};
use crate::driver::store::{Lane, Part, Way};

/// Where memory is mapped as a whole while it moves: beyond what clients reserve.
const WHOLE: u64 = SPACE + SPACE_SIZE;

impl Software {
    fn gpu(&self, device: u32) -> Result<&Gpu> {
        self.device(device).map(|device| &device.gpu)
    }

    /// Addresses for [`GpuMemory::map_whole`].
    fn unused(&self, device: u32, size: u64) -> Result<u64> {
        let used = &self.device(device)?.whole;
        // A mapping is inside one terabyte.
        let fits = |at: &u64| at % WINDOW_SIZE + size <= WINDOW_SIZE && !used.touches(*at, size);
        let ends = used.iter().map(|(address, size)| address + size);
        let mut places = ends.chain((0..4).map(|n| WHOLE + n * WINDOW_SIZE));
        places.find(fits).ok_or(Status::OUT_OF_MEMORY)
    }

    /// Maps on `fresh`, which replaces device `device`, what that device had mapped of memory without an
    /// address: such memory survives a reset.
    pub(super) fn map_again(device: u32, fresh: &Gpu, space: &Space<OwnedFd>) -> Result {
        fresh.charge(space.created_on(device)).map_err(|e| code(&e))?;
        for (address, mapping) in space.mappings().filter(|(_, mapping)| mapping.access.contains(&device)) {
            show(fresh, space.memory(mapping.memory)?.handle()?, mapping, address)?;
        }
        Ok(())
    }
}

/// Maps a part of memory on a GPU.
fn show(gpu: &Gpu, memory: &OwnedFd, mapping: &Mapping, address: u64) -> Result {
    gpu.map_file(address, mapping.size, memory.as_fd(), mapping.offset).map_err(|e| code(&e))?;
    gpu.show(address, mapping.size).map_err(|e| {
        // Just mapped, with no contents yet.
        let _ = gpu.unmap(address, mapping.size);
        code(&e)
    })
}

/// Removes a mapping from a GPU.
fn hide(gpu: &Gpu, address: u64, size: u64) -> Result {
    gpu.hide(address, size).and_then(|()| gpu.unmap(address, size)).map_err(|e| code(&e))
}

impl GpuMemory for Software {
    type Piece = OwnedFd;
    type Memory = OwnedFd;

    fn granule(&self, _device: u32) -> u64 {
        GRANULE
    }

    fn exports(&self, _device: u32) -> bool {
        true
    }

    fn in_place(&mut self, device: u32, address: u64, size: u64) -> Result<Block> {
        let at = self.device(device)?.gpu.mapped_range(address, size).map_err(|e| code(&e))?;
        NonNull::new(at).map(Block::Here).ok_or(Status::INVALID_VALUE)
    }

    fn number(&self, device: u32) -> u32 {
        self.device(device).map_or(u32::MAX, |device| device.number)
    }

    fn memory_info(&mut self, device: u32) -> Result<(u64, u64)> {
        Ok(self.gpu(device)?.memory_info())
    }

    fn back(&mut self, device: u32, address: u64, size: u64) -> Result<OwnedFd> {
        self.need_context(device)?;
        let file = self.create(device, size)?;
        let gpu = self.gpu(device)?;
        match gpu.map_file(address, size, file.as_fd(), 0) {
            Ok(()) => Ok(file),
            Err(e) => {
                gpu.discharge(size);
                Err(code(&e))
            }
        }
    }

    fn unback(&mut self, device: u32, address: u64, size: u64) -> impl FnOnce() -> Result + Send + 'static {
        let gpu = self.gpu(device).cloned();
        move || {
            let gpu = gpu?;
            gpu.unmap(address, size).map_err(|e| code(&e))?;
            gpu.discharge(size);
            Ok(())
        }
    }

    fn before_move(&mut self) -> Result {
        self.moves.step()
    }

    fn set_aside(&mut self, device: u32, address: u64, size: u64) -> Result {
        let gpu = self.gpu(device)?;
        gpu.set_aside(address, size).map_err(|e| code(&e))?;
        gpu.discharge(size);
        Ok(())
    }

    fn bring_back(&mut self, device: u32, address: u64, size: u64) -> Result<OwnedFd> {
        let file = self.create(device, size)?;
        let gpu = self.gpu(device)?;
        match gpu.bring_back(address, size, file.as_fd()) {
            Ok(()) => Ok(file),
            Err(e) => {
                gpu.discharge(size);
                Err(code(&e))
            }
        }
    }

    fn transfer(&mut self, device: u32, _lane: Lane, way: Way, part: Part) -> Result {
        let memory = self.gpu(device)?.mapped_range(part.address, part.len as u64).map_err(|e| code(&e))?;
        let (from, to) = match way {
            Way::Out => (memory.cast_const(), part.host.as_ptr()),
            Way::In => (part.host.as_ptr().cast_const(), memory),
        };
        // SAFETY: a mapped range of the GPU that no kernel uses now, and a part of the store that nobody else
        // uses; they are different mappings.
        unsafe { std::ptr::copy_nonoverlapping(from, to, part.len) };
        Ok(())
    }

    fn transferred(&mut self, _device: u32, _lane: Lane) -> Result {
        Ok(())
    }

    fn place(&mut self, device: u32, address: u64, size: u64) -> Result {
        self.gpu(device)?.place(address, size).map_err(|e| code(&e))
    }

    fn release(&mut self, device: u32, address: u64) -> Result {
        self.gpu(device)?.release(address).map(|_| ()).map_err(|e| code(&e))
    }

    fn module_memory(&self, address: u64, device: u32) -> Option<(u64, u64)> {
        self.gpu(device).ok()?.module_allocation(address)
    }

    fn reserve(&mut self, _address: u64, _size: u64) -> Result {
        Ok(())
    }

    fn unreserve(&mut self, _address: u64, _size: u64) -> Result {
        Ok(())
    }

    fn create(&mut self, device: u32, size: u64) -> Result<OwnedFd> {
        let gpu = self.gpu(device)?;
        gpu.charge(size).map_err(|e| code(&e))?;
        file(size).inspect_err(|_| gpu.discharge(size))
    }

    fn destroy(&mut self, device: u32, size: u64, _memory: OwnedFd, imported: bool) -> Result {
        if !imported {
            self.gpu(device)?.discharge(size);
        }
        Ok(())
    }

    fn map(&mut self, _memory: &OwnedFd, _device: u32, _offset: u64, _address: u64, _size: u64) -> Result {
        // A GPU maps it when it is given access.
        Ok(())
    }

    fn unmap(&mut self, address: u64, size: u64, access: &mut Vec<u32>) -> Result {
        while let Some(device) = access.last() {
            hide(self.gpu(*device)?, address, size)?;
            access.pop();
        }
        Ok(())
    }

    fn set_access(
        &mut self,
        memory: &OwnedFd,
        mapping: &Mapping,
        address: u64,
        device: u32,
        flags: u32,
    ) -> Result {
        let gpu = self.gpu(device)?;
        match (flags, mapping.access.contains(&device)) {
            (0, true) => hide(gpu, address, mapping.size),
            (3, false) => show(gpu, memory, mapping, address),
            (0, false) | (3, true) => Ok(()),
            // Read-only access is not supported.
            _ => Err(Status::NOT_SUPPORTED),
        }
    }

    fn map_whole(&mut self, memory: &OwnedFd, device: u32, size: u64) -> Result<u64> {
        let address = self.unused(device, size)?;
        let gpu = self.gpu(device)?;
        gpu.map_file(address, size, memory.as_fd(), 0).map_err(|e| code(&e))?;
        self.device_mut(device)?.whole.insert(address, size, ());
        Ok(address)
    }

    fn unmap_whole(&mut self, device: u32, address: u64, size: u64) -> Result {
        self.gpu(device)?.unmap(address, size).map_err(|e| code(&e))?;
        self.device_mut(device)?.whole.remove(address);
        Ok(())
    }

    fn export(&mut self, memory: &OwnedFd) -> Result<OwnedFd> {
        memory.try_clone().map_err(|_| Status::OUT_OF_MEMORY)
    }

    fn export_piece(&mut self, _device: u32, _address: u64, piece: &OwnedFd) -> Result<OwnedFd> {
        self.export(piece)
    }

    fn import(&mut self, _device: u32, fd: OwnedFd) -> Result<OwnedFd> {
        Ok(fd)
    }
}
