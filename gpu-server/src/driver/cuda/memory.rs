//! Device memory: backed piece by piece inside each device's window.

use protocol::Status;
use protocol::handle::ContextId;
use protocol::ops::Answer;
use protocol::ops::memory::*;

use super::Cuda;
use crate::driver::beside::{self, Beside};
use crate::driver::call::Call;
use crate::driver::space::Space;

impl Cuda {
    /// The ordinal of the device whose window holds an address.
    pub(super) fn ordinal_of(&self, address: u64) -> Option<u32> {
        let ordinal = address.checked_sub(window(0))? / WINDOW_SIZE;
        (ordinal < self.devices.len() as u64).then_some(ordinal as u32)
    }

    /// Checks that `len` bytes from `address` are one allocation's, one variable's, or of one piece of pinned memory of this session.
    pub(super) fn check_range(&self, address: u64, len: u64) -> Result<(), Status> {
        let found = match self.ordinal_of(address) {
            Some(ordinal) => self.device(ordinal)?.allocations.holds(address, len),
            None if Space::<u64>::is_here(address) => self.space.reached_by(address, len, 0).is_some(),
            None => {
                self.modules.values().any(|m| m.globals.holds(address, len))
                    || self.is_host_view(address, len)
            }
        };
        if found || len == 0 { Ok(()) } else { Err(Status::INVALID_VALUE) }
    }

    fn back(&mut self, op: &MemGrow) -> Result<(), Status> {
        let size = op.size as usize;
        let prop = self.allocation(op.device)?;
        let access = self.access(op.device)?;
        let mut memory = 0;
        // SAFETY: a valid description; the range was checked to lie in the reserved window and to be free.
        unsafe {
            self.api.memory_create(&mut memory, size, &prop, 0)?;
            let mapped = self.api.memory_map(op.address, size, 0, memory, 0);
            // The mapping keeps the memory from now on; without one it goes at once.
            let released = self.api.memory_release(memory);
            mapped.and(released)?;
            if let Err(status) = self.api.memory_access(op.address, size, access.as_ptr(), access.len()) {
                let _ = self.api.memory_unmap(op.address, size);
                return Err(status);
            }
        }
        Ok(())
    }

    /// Gives back everything in a device's window.
    pub(super) fn unback_all(&mut self, ordinal: u32) {
        let Some(device) = self.devices.get_mut(ordinal as usize) else { return };
        let backed = std::mem::take(&mut device.backed);
        device.allocations = Default::default();
        for (address, size) in backed.iter() {
            self.unshare_piece(ordinal, address);
            // SAFETY: mapped by `back`, in one piece; nothing of the device runs any more. A refusal is logged.
            let _ = unsafe { self.api.memory_unmap(address, size as usize) };
        }
    }
}

impl MemoryOps<Call> for Cuda {
    fn mem_grow(&mut self, cx: &mut Call, op: MemGrow) -> Result<Answer<MemGrowReply>, Status> {
        cx.context = ContextId(op.device);
        let device = self.device(op.device)?;
        let first = window(op.device);
        let end = op.address.checked_add(op.size).ok_or(Status::INVALID_VALUE)?;
        let aligned = op.size > 0
            && op.size.is_multiple_of(device.granule)
            && op.address.is_multiple_of(device.granule);
        if op.address < first
            || end > first + WINDOW_SIZE
            || !aligned
            || is_managed(op.address) != is_managed(end - 1)
            || device.backed.touches(op.address, op.size)
        {
            return Err(Status::INVALID_VALUE);
        }
        let charge = self.quota.charge(op.size)?;
        self.enter_context(ContextId(op.device))?;
        self.back(&op)?;
        let device = self.devices.get_mut(op.device as usize).ok_or(Status::INVALID_DEVICE)?;
        device.backed.insert(op.address, op.size, charge);
        Ok(Answer::Now(MemGrowReply {}))
    }

    fn mem_shrink(&mut self, cx: &mut Call, op: MemShrink) -> Result<Answer<MemShrinkReply>, Status> {
        cx.context = ContextId(op.device);
        let device = self.devices.get_mut(op.device as usize).ok_or(Status::INVALID_DEVICE)?;
        if device.backed.at(op.address) != Some(op.size) || device.allocations.touches(op.address, op.size) {
            return Err(Status::INVALID_VALUE);
        }
        device.backed.remove(op.address);
        self.unshare_piece(op.device, op.address);
        let api = self.api;
        let pending = cx.later();
        self.after_device(op.device, cx.seq, move |_| {
            // SAFETY: mapped by `back`, in one piece, out of the table since; all work that may have used it is done.
            let unmapped = unsafe { api.memory_unmap(op.address, op.size as usize) };
            pending.answer(unmapped.map(|()| MemShrinkReply {}));
        });
        Ok(Answer::Later)
    }

    fn mem_alloc(&mut self, cx: &mut Call, op: MemAlloc) -> Result<(), Status> {
        let ordinal = self.ordinal_of(op.address).ok_or(Status::INVALID_VALUE)?;
        cx.context = ContextId(ordinal);
        let device = self.devices.get_mut(ordinal as usize).ok_or(Status::INVALID_VALUE)?;
        if !device.backed.cover(op.address, op.size) || !device.allocations.insert(op.address, op.size, ()) {
            return Err(Status::INVALID_VALUE);
        }
        Ok(())
    }

    fn mem_free(&mut self, cx: &mut Call, op: MemFree) -> Result<(), Status> {
        let ordinal = self.ordinal_of(op.address).ok_or(Status::INVALID_VALUE)?;
        cx.context = ContextId(ordinal);
        let device = self.devices.get_mut(ordinal as usize).ok_or(Status::INVALID_VALUE)?;
        device.allocations.remove(op.address).map(|_| ()).ok_or(Status::INVALID_VALUE)
    }

    fn mem_get_info(&mut self, cx: &mut Call, op: MemGetInfo) -> Result<Answer<MemGetInfoReply>, Status> {
        cx.context = ContextId(op.device);
        self.device(op.device)?;
        self.enter_context(ContextId(op.device))?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two integers.
        unsafe { self.api.memory_info(&mut free, &mut total) }?;
        let (free, total) = self.quota.visible(free as u64, total as u64);
        Ok(Answer::Now(MemGetInfoReply { free, total }))
    }

    fn host_map(&mut self, cx: &mut Call, op: HostMap) -> Result<Answer<HostMapReply>, Status> {
        self.map_host(cx, op)
    }

    fn host_mirror(&mut self, cx: &mut Call, op: HostMirror) -> Result<Answer<HostMirrorReply>, Status> {
        self.mirror_host(cx, &op)
    }

    fn host_patch(&mut self, cx: &mut Call, op: HostPatch) -> Result<(), Status> {
        cx.context = op.context;
        self.beside.patch(&op.words)
    }

    fn host_read(&mut self, cx: &mut Call, op: HostRead) -> Result<Answer<HostReadReply>, Status> {
        cx.context = op.context;
        beside::read(&*self.beside, &op).map(Answer::Now)
    }

    fn host_write(&mut self, cx: &mut Call, op: HostWrite<'_>) -> Result<(), Status> {
        cx.context = op.context;
        self.beside.write(op.address, op.bytes)
    }

    fn host_unmap(&mut self, cx: &mut Call, op: HostUnmap) -> Result<(), Status> {
        self.unmap_host(cx, op)
    }

    fn address_reserve(
        &mut self,
        _cx: &mut Call,
        op: AddressReserve,
    ) -> Result<Answer<AddressReserveReply>, Status> {
        self.reserve_addresses(&op).map(|()| Answer::Now(AddressReserveReply {}))
    }

    fn address_free(&mut self, _cx: &mut Call, op: AddressFree) -> Result<Answer<AddressFreeReply>, Status> {
        self.free_addresses(&op).map(|()| Answer::Now(AddressFreeReply {}))
    }

    fn memory_create(
        &mut self,
        cx: &mut Call,
        op: MemoryCreate,
    ) -> Result<Answer<MemoryCreateReply>, Status> {
        self.create_memory(cx, &op).map(|()| Answer::Now(MemoryCreateReply {}))
    }

    fn memory_release(
        &mut self,
        _cx: &mut Call,
        op: MemoryRelease,
    ) -> Result<Answer<MemoryReleaseReply>, Status> {
        self.release_memory(&op).map(|()| Answer::Now(MemoryReleaseReply {}))
    }

    fn memory_map(&mut self, _cx: &mut Call, op: MemoryMap) -> Result<Answer<MemoryMapReply>, Status> {
        self.map_memory(&op).map(|()| Answer::Now(MemoryMapReply {}))
    }

    fn memory_unmap(&mut self, _cx: &mut Call, op: MemoryUnmap) -> Result<Answer<MemoryUnmapReply>, Status> {
        self.unmap_memory(&op).map(|()| Answer::Now(MemoryUnmapReply {}))
    }

    fn memory_access(
        &mut self,
        cx: &mut Call,
        op: MemoryAccess,
    ) -> Result<Answer<MemoryAccessReply>, Status> {
        self.set_memory_access(cx, &op).map(|()| Answer::Now(MemoryAccessReply {}))
    }

    fn memory_export(
        &mut self,
        _cx: &mut Call,
        op: MemoryExport,
    ) -> Result<Answer<MemoryExportReply>, Status> {
        self.export_memory(&op).map(|token| Answer::Now(MemoryExportReply { token }))
    }

    fn memory_import(
        &mut self,
        cx: &mut Call,
        op: MemoryImport,
    ) -> Result<Answer<MemoryImportReply>, Status> {
        self.import_memory(cx, &op).map(Answer::Now)
    }

    fn piece_export(&mut self, _cx: &mut Call, op: PieceExport) -> Result<Answer<PieceExportReply>, Status> {
        self.export_piece(&op).map(Answer::Now)
    }

    fn event_export(&mut self, _cx: &mut Call, op: EventExport) -> Result<Answer<EventExportReply>, Status> {
        self.export_event(&op).map(Answer::Now)
    }

    fn event_import(&mut self, cx: &mut Call, op: EventImport) -> Result<Answer<EventImportReply>, Status> {
        self.import_event(cx, &op).map(|()| Answer::Now(EventImportReply {}))
    }

    fn event_query(&mut self, _cx: &mut Call, op: EventQuery) -> Result<Answer<EventQueryReply>, Status> {
        self.query_event(&op).map(|done| Answer::Now(EventQueryReply { done }))
    }
}
