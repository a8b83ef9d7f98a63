//! Virtual memory management: a piece of memory is a file in memory, mapped by each GPU that may access it, and by the client's other sessions that take part in it.

use std::os::fd::{AsFd, OwnedFd};

use nix::sys::memfd::{MFdFlags, memfd_create};
use protocol::Status;
use protocol::handle::ContextId;
use protocol::ops::memory::*;
use software_gpu::{GRANULE, Gpu};

use super::{Piece, Software, code};
use crate::driver::call::Call;
use crate::driver::quota::Charge;
use crate::driver::space::Memory;
use crate::share::{Shared, Token};

impl Software {
    pub(super) fn reserve_addresses(&mut self, op: &AddressReserve) -> Result<(), Status> {
        self.space.may_reserve(op.address, op.size, GRANULE)?;
        self.space.reserve(op.address, op.size);
        Ok(())
    }

    pub(super) fn free_addresses(&mut self, op: &AddressFree) -> Result<(), Status> {
        self.space.may_unreserve(op.address, op.size)?;
        self.space.unreserve(op.address);
        Ok(())
    }

    pub(super) fn create_memory(&mut self, cx: &mut Call, op: &MemoryCreate) -> Result<(), Status> {
        cx.context = ContextId(op.device);
        self.space.may_name(op.memory.0)?;
        if op.size == 0 || !op.size.is_multiple_of(GRANULE) {
            return Err(Status::INVALID_VALUE);
        }
        let charge = self.quota.charge(op.size)?;
        let gpu = &self.device(op.device)?.gpu;
        gpu.charge(op.size).map_err(|e| code(&e))?;
        match file(op.size) {
            Ok(fd) => {
                self.space.add(op.memory.0, Memory::new(op.device, op.size, op.exportable, fd, charge));
                Ok(())
            }
            Err(e) => {
                gpu.discharge(op.size);
                tracing::warn!(bytes = op.size, "no memory for a device's: {e}");
                Err(Status::OUT_OF_MEMORY)
            }
        }
    }

    pub(super) fn release_memory(&mut self, op: &MemoryRelease) -> Result<(), Status> {
        let memory = self.space.remove(op.memory.0)?;
        if let (Some(token), Some(broker)) = (memory.token, &self.broker) {
            broker.unshare(token);
        }
        if memory.imported.is_none() {
            self.device(memory.device)?.gpu.discharge(memory.size);
        }
        Ok(())
    }

    pub(super) fn map_memory(&mut self, op: &MemoryMap) -> Result<(), Status> {
        self.space.may_map(op.memory.0, op.offset, op.address, op.size, GRANULE)?;
        // A GPU maps it when it gets access.
        self.space.map(op.memory.0, op.offset, op.address, op.size);
        Ok(())
    }

    pub(super) fn unmap_memory(&mut self, op: &MemoryUnmap) -> Result<(), Status> {
        let access = self.space.mapping(op.address, op.size)?.access.clone();
        for device in access {
            self.take_away(op.address, op.size, device)?;
        }
        self.space.unmap(op.address);
        Ok(())
    }

    fn take_away(&mut self, address: u64, size: u64, device: u32) -> Result<(), Status> {
        let gpu = &self.device(device)?.gpu;
        gpu.hide(address, size).and_then(|()| gpu.unmap(address, size)).map_err(|e| code(&e))?;
        self.space.set_access(address, device, false);
        Ok(())
    }

    pub(super) fn set_memory_access(&mut self, cx: &mut Call, op: &MemoryAccess) -> Result<(), Status> {
        cx.context = ContextId(op.device);
        let gpu = &self.device(op.device)?.gpu;
        let mapping = self.space.mapping(op.address, op.size)?;
        let has = mapping.access.contains(&op.device);
        match (op.flags, has) {
            (0, true) => self.take_away(op.address, op.size, op.device),
            (0, false) | (3, true) => Ok(()),
            (3, false) => {
                let fd = self.space.memory(mapping.memory)?.handle.as_fd();
                gpu.map_file(op.address, op.size, fd, mapping.offset).map_err(|e| code(&e))?;
                if let Err(e) = gpu.show(op.address, op.size) {
                    // Mapped just now, and nothing is shown of it.
                    let _ = gpu.unmap(op.address, op.size);
                    return Err(code(&e));
                }
                self.space.set_access(op.address, op.device, true);
                Ok(())
            }
            // Reading without writing.
            (1, _) => Err(Status::NOT_SUPPORTED),
            _ => Err(Status::INVALID_VALUE),
        }
    }

    pub(super) fn export_memory(&mut self, op: &MemoryExport) -> Result<Token, Status> {
        let memory = self.space.memory(op.memory.0)?;
        if !memory.exportable {
            return Err(Status::INVALID_VALUE);
        }
        if let Some(token) = memory.token {
            return Ok(token);
        }
        let broker = self.broker.as_ref().ok_or(Status::NOT_SUPPORTED)?;
        let number = self.device(memory.device)?.number;
        let token =
            broker.share(Shared::Memory { device: number, size: memory.size }, Some(&memory.handle))?;
        self.space.export(op.memory.0, token);
        Ok(token)
    }

    pub(super) fn export_piece(&mut self, op: &PieceExport) -> Result<PieceExportReply, Status> {
        let broker = self.broker.clone().ok_or(Status::NOT_SUPPORTED)?;
        let ordinal = op.address.checked_sub(window(0)).ok_or(Status::INVALID_VALUE)? / WINDOW_SIZE;
        let device = usize::try_from(ordinal).ok().and_then(|n| self.devices.get_mut(n));
        let device = device.ok_or(Status::INVALID_VALUE)?;
        let (base, piece) = device
            .pieces
            .range_mut(..=op.address)
            .next_back()
            .filter(|(base, piece)| op.address - **base < piece.size)
            .ok_or(Status::INVALID_VALUE)?;
        let token = match piece.token {
            Some(token) => token,
            None => {
                let what = Shared::Memory { device: device.number, size: piece.size };
                *piece.token.insert(broker.share(what, Some(&piece.file))?)
            }
        };
        Ok(PieceExportReply { token, base: *base })
    }

    /// A piece of a window goes back: nobody finds it any more. Who has opened it keeps it.
    pub(super) fn unshare_piece(&mut self, ordinal: u32, base: u64) {
        let piece = self.devices.get_mut(ordinal as usize).and_then(|device| device.pieces.get_mut(&base));
        if let (Some(token), Some(broker)) = (piece.and_then(|piece| piece.token.take()), &self.broker) {
            broker.unshare(token);
        }
    }

    /// Puts on a device that takes the place of device `ordinal` what this had of the memory here: it outlives a reset.
    pub(super) fn map_again(&self, ordinal: u32, fresh: &Gpu) -> Result<(), Status> {
        fresh.charge(self.space.created_on(ordinal)).map_err(|e| code(&e))?;
        for (address, mapping) in self.space.mappings().filter(|(_, m)| m.access.contains(&ordinal)) {
            let fd = self.space.memory(mapping.memory)?.handle.as_fd();
            fresh.map_file(address, mapping.size, fd, mapping.offset).map_err(|e| code(&e))?;
            fresh.show(address, mapping.size).map_err(|e| code(&e))?;
        }
        Ok(())
    }

    pub(super) fn import_memory(
        &mut self,
        cx: &mut Call,
        op: &MemoryImport,
    ) -> Result<MemoryImportReply, Status> {
        self.space.may_name(op.memory.0)?;
        let broker = self.broker.as_ref().ok_or(Status::NOT_SUPPORTED)?;
        let (Shared::Memory { device, size }, Some(fd), own) = broker.open(op.token)? else {
            return Err(Status::INVALID_VALUE);
        };
        let ordinal = self.devices.iter().position(|d| d.number == device);
        let ordinal = ordinal.ok_or(Status::INVALID_DEVICE)? as u32;
        cx.context = ContextId(ordinal);
        let charge = self.space.charge_import(&self.quota, &op.token, size)?;
        self.space.add(op.memory.0, Memory::imported(ordinal, size, op.token, fd, charge));
        Ok(MemoryImportReply { device: ordinal, size, own })
    }
}

/// Backs a part of a device's window.
pub(super) fn back(gpu: &Gpu, address: u64, size: u64, charge: Charge) -> Result<Piece, Status> {
    gpu.charge(size).map_err(|e| code(&e))?;
    let made = file(size).map_err(|e| {
        tracing::warn!(bytes = size, "no memory for a device's: {e}");
        Status::OUT_OF_MEMORY
    });
    let mapped = made.and_then(|file| {
        gpu.map_file(address, size, file.as_fd(), 0).map_err(|e| code(&e))?;
        Ok(Piece { size, file, token: None, _charge: charge })
    });
    if mapped.is_err() {
        gpu.discharge(size);
    }
    mapped
}

/// Takes it away again, when nothing uses it.
pub(super) fn unback(gpu: &Gpu, address: u64, size: u64) -> Result<(), Status> {
    gpu.unmap(address, size).map_err(|e| code(&e))?;
    gpu.discharge(size);
    Ok(())
}

/// A file in memory that cannot shrink: whoever maps it may touch all of it for as long as it is mapped.
pub(super) fn file(size: u64) -> std::io::Result<OwnedFd> {
    use nix::fcntl::{FcntlArg, SealFlag, fcntl};
    let fd = memfd_create(c"rgpu device memory", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
    let file = std::fs::File::from(fd);
    file.set_len(size)?;
    let fd = OwnedFd::from(file);
    fcntl(
        &fd,
        FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL),
    )?;
    Ok(fd)
}
