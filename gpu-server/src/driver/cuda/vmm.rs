//! Virtual memory management: memory without an address, mapped at addresses that the client has reserved, and shared with the client's other sessions.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use protocol::Status;
use protocol::handle::ContextId;
use protocol::ops::memory::*;

use super::Cuda;
use super::api::{AccessDesc, AllocationProp};
use crate::driver::call::Call;
use crate::driver::space::Memory;
use crate::share::{Shared, Token};

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const POSIX_FD: u32 = 1;

/// What is reserved with the driver for a reservation of the client's: see [`SPACE_ALIGN`]. No other reservation can begin in the rest.
fn whole(size: u64) -> usize {
    size.next_multiple_of(SPACE_ALIGN) as usize
}

impl Cuda {
    /// The greatest granule of all devices.
    fn granule(&self) -> u64 {
        self.devices.iter().map(|device| device.granule).max().unwrap_or(1)
    }

    /// What `size` bytes of a device are made with: so that they can be shared where the device's driver knows how.
    pub(super) fn allocation(&self, device: u32) -> Result<AllocationProp, Status> {
        let device = self.device(device)?;
        Ok(AllocationProp::shareable(device.handle, if device.exports { POSIX_FD } else { 0 }))
    }

    pub(super) fn reserve_addresses(&mut self, op: &AddressReserve) -> Result<(), Status> {
        self.space.may_reserve(op.address, op.size, self.granule())?;
        self.enter_context(ContextId(0))?;
        let mut at = 0;
        // SAFETY: reserves addresses; nothing is mapped yet.
        unsafe { self.api.address_reserve(&mut at, whole(op.size), 0, op.address, 0) }?;
        if at != op.address {
            tracing::warn!("{:#x} bytes were reserved at {at:#x} instead of {:#x}", op.size, op.address);
            // SAFETY: just reserved, and nothing mapped there.
            unsafe { self.api.address_free(at, whole(op.size)) }?;
            return Err(Status::OUT_OF_MEMORY);
        }
        self.space.reserve(op.address, op.size);
        Ok(())
    }

    pub(super) fn free_addresses(&mut self, op: &AddressFree) -> Result<(), Status> {
        self.space.may_unreserve(op.address, op.size)?;
        self.enter_context(ContextId(0))?;
        // SAFETY: a reservation of this session, as it was made, with nothing mapped in it.
        unsafe { self.api.address_free(op.address, whole(op.size)) }?;
        self.space.unreserve(op.address);
        Ok(())
    }

    pub(super) fn create_memory(&mut self, cx: &mut Call, op: &MemoryCreate) -> Result<(), Status> {
        cx.context = ContextId(op.device);
        let granule = self.device(op.device)?.granule;
        self.space.may_name(op.memory.0)?;
        if op.size == 0 || !op.size.is_multiple_of(granule) {
            return Err(Status::INVALID_VALUE);
        }
        let charge = self.quota.charge(op.size)?;
        if op.exportable && !self.device(op.device)?.exports {
            return Err(Status::NOT_SUPPORTED);
        }
        self.enter_context(ContextId(op.device))?;
        let prop = self.allocation(op.device)?;
        let mut handle = 0;
        // SAFETY: a valid description; writes one handle.
        unsafe { self.api.memory_create(&mut handle, op.size as usize, &prop, 0) }?;
        self.space.add(op.memory.0, Memory::new(op.device, op.size, op.exportable, handle, charge));
        Ok(())
    }

    pub(super) fn release_memory(&mut self, op: &MemoryRelease) -> Result<(), Status> {
        let memory = self.space.remove(op.memory.0)?;
        if let (Some(token), Some(broker)) = (memory.token, &self.broker) {
            broker.unshare(token);
        }
        // SAFETY: out of the table, and nothing is mapped to it.
        unsafe { self.api.memory_release(memory.handle) }
    }

    pub(super) fn map_memory(&mut self, op: &MemoryMap) -> Result<(), Status> {
        self.space.may_map(op.memory.0, op.offset, op.address, op.size, self.granule())?;
        let memory = self.space.memory(op.memory.0)?;
        let (handle, device) = (memory.handle, memory.device);
        self.enter_context(ContextId(device))?;
        // SAFETY: reserved addresses with nothing mapped there, and a part of the memory.
        unsafe { self.api.memory_map(op.address, op.size as usize, op.offset as usize, handle, 0) }?;
        self.space.map(op.memory.0, op.offset, op.address, op.size);
        Ok(())
    }

    pub(super) fn unmap_memory(&mut self, op: &MemoryUnmap) -> Result<(), Status> {
        self.space.mapping(op.address, op.size)?;
        self.current = None;
        self.enter_context(ContextId(0))?;
        // SAFETY: a mapping of this session, as it was made. That no work uses it is the program's affair, as without rgpu.
        unsafe { self.api.memory_unmap(op.address, op.size as usize) }?;
        self.space.unmap(op.address);
        Ok(())
    }

    pub(super) fn set_memory_access(&mut self, cx: &mut Call, op: &MemoryAccess) -> Result<(), Status> {
        cx.context = ContextId(op.device);
        let device = self.device(op.device)?.handle;
        self.space.mapping(op.address, op.size)?;
        if !matches!(op.flags, 0 | 1 | 3) {
            return Err(Status::INVALID_VALUE);
        }
        self.enter_context(ContextId(op.device))?;
        let desc = AccessDesc::with_flags(device, op.flags);
        // SAFETY: a mapping of this session, whole.
        unsafe { self.api.memory_access(op.address, op.size as usize, &desc, 1) }?;
        self.space.set_access(op.address, op.device, op.flags != 0);
        Ok(())
    }

    /// Hands memory to the daemon, under a token.
    fn publish(&self, handle: u64, ordinal: u32, size: u64) -> Result<Token, Status> {
        let broker = self.broker.as_ref().ok_or(Status::NOT_SUPPORTED)?;
        let device = self.device(ordinal)?.handle;
        let mut fd: i32 = -1;
        // SAFETY: a live handle that was made for it; writes one descriptor.
        unsafe { self.api.memory_export((&raw mut fd).cast(), handle, POSIX_FD, 0) }?;
        // SAFETY: the driver has just made this descriptor for us; nobody else knows it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        broker.share(Shared::Memory { device: device as u32, size }, Some(&fd))
    }

    pub(super) fn export_memory(&mut self, op: &MemoryExport) -> Result<Token, Status> {
        let memory = self.space.memory(op.memory.0)?;
        if !memory.exportable {
            return Err(Status::INVALID_VALUE);
        }
        if let Some(token) = memory.token {
            return Ok(token);
        }
        let token = self.publish(memory.handle, memory.device, memory.size)?;
        self.space.export(op.memory.0, token);
        Ok(token)
    }

    pub(super) fn export_piece(&mut self, op: &PieceExport) -> Result<PieceExportReply, Status> {
        let ordinal = self.ordinal_of(op.address).ok_or(Status::INVALID_VALUE)?;
        let device = self.device(ordinal)?;
        let (base, size, _) = device.backed.find(op.address).ok_or(Status::INVALID_VALUE)?;
        if !device.exports {
            return Err(Status::NOT_SUPPORTED);
        }
        if let Some(token) = device.tokens.get(&base) {
            return Ok(PieceExportReply { token: *token, base });
        }
        self.enter_context(ContextId(ordinal))?;
        let mut handle = 0;
        // SAFETY: an address that is mapped; writes one handle, a reference of our own.
        unsafe { self.api.memory_retain(&mut handle, base as *mut _) }?;
        let published = self.publish(handle, ordinal, size);
        // SAFETY: the reference that was just taken.
        unsafe { self.api.memory_release(handle) }?;
        let token = published?;
        let device = self.devices.get_mut(ordinal as usize).ok_or(Status::INVALID_DEVICE)?;
        device.tokens.insert(base, token);
        Ok(PieceExportReply { token, base })
    }

    /// A piece of a window goes back: nobody finds it any more. Who has opened it keeps it.
    pub(super) fn unshare_piece(&mut self, ordinal: u32, base: u64) {
        let token = self.devices.get_mut(ordinal as usize).and_then(|device| device.tokens.remove(&base));
        if let (Some(token), Some(broker)) = (token, &self.broker) {
            broker.unshare(token);
        }
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
        let ordinal = self.devices.iter().position(|d| d.handle as u32 == device);
        let ordinal = ordinal.ok_or(Status::INVALID_DEVICE)? as u32;
        cx.context = ContextId(ordinal);
        let charge = self.space.charge_import(&self.quota, &op.token, size)?;
        self.enter_context(ContextId(ordinal))?;
        let mut handle = 0;
        // SAFETY: a descriptor that this driver made in another worker, passed as the number that it is; writes one handle.
        unsafe { self.api.memory_import(&mut handle, fd.as_raw_fd() as usize as *mut _, POSIX_FD) }?;
        self.space.add(op.memory.0, Memory::imported(ordinal, size, op.token, handle, charge));
        Ok(MemoryImportReply { device: ordinal, size, own })
    }
}
