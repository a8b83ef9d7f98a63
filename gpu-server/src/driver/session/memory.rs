//! Device memory: windows that are backed piece by piece, memory without an address, client memory that
//! kernels use, and memory shared with the client's other sessions.

use std::sync::Arc;

use protocol::Status;
use protocol::handle::ContextId;
use protocol::ops::Answer;
use protocol::ops::memory::*;

use super::windows::{HostView, Piece, Window};
use super::{Session, now};
use crate::cuda_ipc::Broker;
use crate::driver::beside::{self, Beside};
use crate::driver::call::{Call, Reply, Result};
use crate::driver::gpu::Gpu;
use crate::driver::helper::Helper;
use crate::driver::quota::Charge;
use crate::driver::space::Memory;
use crate::driver::store::Place;
use crate::limits::Resource;
use crate::shared_event::SharedEvent;
use crate::worker_protocol::Shared;

impl<G: Gpu> Session<G> {
    /// The ordinal of the device whose window contains an address.
    pub(super) fn ordinal_of(&self, address: u64) -> Option<u32> {
        let number = address.checked_sub(window(0))? / WINDOW_SIZE;
        // Nearly every session has window n for ordinal n.
        let is_it = |window: &Window<_>| u64::from(window.number) == number;
        let ordinal = usize::try_from(number).ok().filter(|at| self.windows.get(*at).is_some_and(is_it));
        ordinal.or_else(|| self.windows.iter().position(is_it)).map(|ordinal| ordinal as u32)
    }

    fn window_numbers(&self) -> impl Iterator<Item = u32> {
        self.windows.iter().map(|window| window.number)
    }

    fn window_mut(&mut self, device: u32) -> Result<&mut Window<G::Piece>> {
        self.windows.get_mut(device as usize).ok_or(Status::INVALID_DEVICE)
    }

    /// Checks that a device exists.
    pub(super) fn check_device(&self, device: u32) -> Result {
        if (device as usize) < self.windows.len() { Ok(()) } else { Err(Status::INVALID_DEVICE) }
    }

    /// Checks that `len` bytes from `address` are inside one allocation, variable or piece of pinned memory,
    /// or are mapped. Returns the device through which they are accessed, or `home` if that makes no
    /// difference.
    pub(super) fn check_range(&self, address: u64, len: u64, home: u32) -> Result<u32> {
        let found = match self.ordinal_of(address) {
            Some(ordinal) => {
                self.windows[ordinal as usize].allocations.holds(address, len).then_some(ordinal)
            }
            None if self.space.has_reserved(address, 1) => self.space.reached_by(address, len, home),
            None => {
                let in_module = || self.in_module(address, home);
                let reached = self.modules.has_variable(address, len)
                    || self.is_host_view(address, len)
                    || in_module().is_some_and(|(base, size)| len <= size - (address - base));
                reached.then_some(home)
            }
        };
        found.or((len == 0).then_some(home)).ok_or(Status::INVALID_VALUE)
    }

    /// Whether a range is in one allocation of a device, or in memory that the client has mapped, and so can
    /// be used until it is freed or unmapped.
    pub(super) fn is_devices_own(&self, address: u64, len: u64) -> bool {
        match self.ordinal_of(address) {
            Some(ordinal) => self.windows[ordinal as usize].allocations.holds(address, len),
            None => self.space.reached_by(address, len, 0).is_some(),
        }
    }

    /// A range of device memory is about to be freed: other servers' pieces do not use it any more.
    fn disown(&self, address: u64, size: u64) {
        self.directs.iter().for_each(|directs| directs.forget(address, size));
    }

    /// What a module has at an address, whether or not the client has asked for it: first address and size.
    pub(super) fn in_module(&self, address: u64, device: u32) -> Option<(u64, u64)> {
        let is_other = self.ordinal_of(address).is_some()
            || self.space.has_reserved(address, 1)
            || self.is_host_view(address, 1);
        if is_other {
            return None;
        }
        let found = self.gpu.module_memory(address, device);
        found.filter(|(base, size)| address.checked_sub(*base).is_some_and(|at| at < *size))
    }

    fn is_host_view(&self, address: u64, len: u64) -> bool {
        let inside = |view: &HostView<_>| {
            address.checked_sub(view.first).is_some_and(|at| at < view.size && len <= view.size - at)
        };
        self.host_views.values().any(inside)
    }

    /// Whether any of `size` bytes from `address` are client memory that kernels access. The range does not
    /// wrap around.
    fn touches_host_view(&self, address: u64, size: u64) -> bool {
        self.host_views.values().any(|view| address < view.first + view.size && view.first < address + size)
    }

    /// Whether the session has no device memory, no reserved addresses and no client memory that kernels use.
    pub(super) fn has_no_memory(&self) -> bool {
        self.space.is_empty()
            && self.host_views.is_empty()
            && self.windows.iter().all(|window| window.pieces.is_empty())
    }

    /// Gives the session devices with these windows. It [has no memory](Self::has_no_memory).
    pub(super) fn clear_windows(&mut self, numbers: &[u32]) {
        self.windows = numbers.iter().map(|number| Window::new(*number)).collect();
    }

    /// Drops a piece of `size` bytes that was removed from its window. Other sessions can no longer open it,
    /// but those that already have keep it. It counts until the returned charge is dropped.
    fn forget_piece(&mut self, device: u32, size: u64, piece: Piece<G::Piece>) -> Charge {
        match (piece.token, &self.broker) {
            (None, _) => self.quota.less_movable(self.gpu.number(device), size),
            (Some(token), Some(broker)) => broker.unshare(token),
            (Some(_), None) => {}
        }
        piece.charge
    }

    /// Releases everything in a device's window. Nothing runs on the device any more.
    pub(super) fn unback_all(&mut self, device: u32) {
        let Some(window) = self.windows.get_mut(device as usize) else { return };
        let empty = Window::new(window.number);
        let mut window = std::mem::replace(window, empty);
        let all: Vec<_> = window.pieces.iter().collect();
        for (address, size) in all {
            self.disown(address, size);
            let piece = window.pieces.remove(address);
            let charge = piece.map(|(_, piece)| self.forget_piece(device, size, piece));
            // A failure is logged and otherwise harmless: the reset has already freed the addresses.
            let _ = self.gpu.unback(device, address, size)();
            drop(charge);
        }
    }

    /// Drops client memory that kernels access through a destroyed context.
    pub(super) fn forget_host_views(&mut self, context: u32) {
        for (_, view) in self.host_views.extract_if(|_, view| view.context == context) {
            self.gpu.forget_host(view.native);
        }
    }

    /// Takes memory of a device.
    ///
    /// # Errors
    /// `NOT_READY` while others make room: the dispatcher then waits and executes the command again.
    fn take_memory<T>(
        &mut self,
        device: u32,
        size: u64,
        take: impl FnOnce(&mut G) -> Result<T>,
    ) -> Result<(Charge, T)> {
        let (quota, resource) = (self.quota.clone(), self.memory_of(device));
        let charge = quota.charge_now(resource, size)?;
        let taken = quota.if_there_is_room(resource, size, || {
            take(&mut self.gpu).map_err(|status| match status {
                // The daemon's figures for other processes' memory may be a second old.
                Status::OUT_OF_MEMORY if quota.is_shared() => Status::NOT_READY,
                other => other,
            })
        })?;
        Ok((charge, taken))
    }

    fn broker(&self) -> Result<&Broker> {
        self.broker.as_deref().ok_or(Status::NOT_SUPPORTED)
    }

    /// The resource that a device's memory is charged to.
    pub(super) fn memory_of(&self, device: u32) -> Resource {
        Resource::Device(self.gpu.number(device))
    }

    /// The largest granule of all devices.
    fn granule(&self) -> u64 {
        (0..self.windows.len() as u32).map(|device| self.gpu.granule(device)).max().unwrap_or(1)
    }
}

impl<G: Gpu> MemoryOps<Call> for Session<G> {
    fn mem_grow(&mut self, cx: &mut Call, op: MemGrow) -> Reply<MemGrowReply> {
        cx.context = ContextId(op.device);
        self.check_device(op.device)?;
        let (granule, first) = (self.gpu.granule(op.device), window(self.window_mut(op.device)?.number));
        let end = op.address.checked_add(op.size).ok_or(Status::INVALID_VALUE)?;
        let aligned = op.size > 0 && op.size.is_multiple_of(granule) && op.address.is_multiple_of(granule);
        if op.address < first
            || end > first + WINDOW_SIZE
            || !aligned
            || is_managed(op.address) != is_managed(end - 1)
            || self.window_mut(op.device)?.pieces.touches(op.address, op.size)
        {
            return Err(Status::INVALID_VALUE);
        }
        self.gpu.before_waiting_call(&self.streams, op.device)?;
        let back = |gpu: &mut G| gpu.back(op.device, op.address, op.size);
        let (charge, native) = self.take_memory(op.device, op.size, back)?;
        let piece = Piece::new(Place::Device(native), charge);
        self.window_mut(op.device)?.pieces.insert(op.address, op.size, piece);
        self.quota.more_movable(self.gpu.number(op.device), op.size);
        now(MemGrowReply {})
    }

    fn mem_shrink(&mut self, cx: &mut Call, op: MemShrink) -> Reply<MemShrinkReply> {
        cx.context = ContextId(op.device);
        let window = self.window_mut(op.device)?;
        if window.pieces.at(op.address) != Some(op.size) || window.allocations.touches(op.address, op.size) {
            return Err(Status::INVALID_VALUE);
        }
        self.gpu.before_waiting_call(&self.streams, op.device)?;
        let helper = match &self.releases {
            Some(helper) => helper.clone(),
            None => self.releases.insert(Helper::start("rgpu-releases")?).clone(),
        };
        let (_, piece) =
            self.window_mut(op.device)?.pieces.remove(op.address).ok_or(Status::INVALID_VALUE)?;
        let charge = self.forget_piece(op.device, op.size, piece);
        let unback = self.gpu.unback(op.device, op.address, op.size);
        let pending = cx.later();
        // Its pages stay until the device's work is done, and count as long. Then releasing them takes the
        // driver milliseconds if they are GiBs, and this thread ends waits.
        let end = move |_| {
            helper.run(move || {
                let released = unback();
                drop(charge);
                pending.answer(released.map(|()| MemShrinkReply {}));
            });
        };
        self.gpu.after_device(&mut self.streams, op.device, cx.seq, end);
        Ok(Answer::Later)
    }

    fn mem_alloc(&mut self, cx: &mut Call, op: MemAlloc) -> Result {
        let device = self.ordinal_of(op.address).ok_or(Status::INVALID_VALUE)?;
        cx.context = ContextId(device);
        let window = self.window_mut(device)?;
        if !window.pieces.cover(op.address, op.size) || !window.allocations.insert(op.address, op.size, ()) {
            return Err(Status::INVALID_VALUE);
        }
        let placed = self.gpu.place(device, op.address, op.size);
        if placed.is_err() {
            self.window_mut(device)?.allocations.remove(op.address);
        }
        placed
    }

    fn mem_free(&mut self, cx: &mut Call, op: MemFree) -> Result {
        let device = self.ordinal_of(op.address).ok_or(Status::INVALID_VALUE)?;
        cx.context = ContextId(device);
        let removed = self.window_mut(device)?.allocations.remove(op.address);
        let (size, ()) = removed.ok_or(Status::INVALID_VALUE)?;
        self.disown(op.address, size);
        self.gpu.release(device, op.address)
    }

    fn mem_get_info(&mut self, cx: &mut Call, op: MemGetInfo) -> Reply<MemGetInfoReply> {
        cx.context = ContextId(op.device);
        self.check_device(op.device)?;
        let (free, total) = self.gpu.memory_info(op.device)?;
        let (free, total) = self.quota.visible(self.gpu.number(op.device), free, total);
        now(MemGetInfoReply { free, total })
    }

    fn host_map(&mut self, cx: &mut Call, op: HostMap) -> Reply<HostMapReply> {
        cx.context = op.context;
        self.gpu.enter(op.context)?;
        let (context, address, size) = (op.context, op.address, op.memory.0.len);
        let charge = self.quota.charge(Resource::Pinned, size)?;
        let native = self.gpu.map_host(cx, op)?;
        let view = HostView::new(context, address, size, native, Some(charge));
        self.host_views.insert(address, view);
        now(HostMapReply {})
    }

    fn host_mirror(&mut self, cx: &mut Call, op: HostMirror) -> Reply<HostMirrorReply> {
        cx.context = op.context;
        op.check(self.window_numbers())?;
        if self.touches_host_view(op.address, op.size) || self.space.has_reserved(op.address, op.size) {
            return Err(Status::INVALID_VALUE);
        }
        self.gpu.enter(op.context)?;
        let (native, answer) = self.gpu.mirror_host(cx, &op, &self.quota)?;
        let view = HostView::new(op.context, op.address, op.size, native, None);
        self.host_views.insert(op.address, view);
        Ok(answer)
    }

    fn host_patch(&mut self, cx: &mut Call, op: HostPatch) -> Result {
        cx.context = op.context;
        let beside = &**self.gpu.beside();
        beside.watches().patch(beside, &op.words)
    }

    fn host_read(&mut self, cx: &mut Call, op: HostRead) -> Reply<HostReadReply> {
        cx.context = op.context;
        beside::read(&**self.gpu.beside(), &op).map(Answer::Now)
    }

    fn host_write(&mut self, cx: &mut Call, op: HostWrite<'_>) -> Result {
        cx.context = op.context;
        let beside = &**self.gpu.beside();
        beside.watches().write(beside, op.address, op.bytes)
    }

    fn host_change(&mut self, cx: &mut Call, op: HostChange<'_>) -> Result {
        cx.context = op.context;
        beside::change(&**self.gpu.beside(), &op)
    }

    fn host_fetch(&mut self, cx: &mut Call, op: HostFetch) -> Reply<HostFetchReply> {
        cx.context = op.context;
        let beside = &**self.gpu.beside();
        let (bytes, changed) = beside.watches().fetch(beside, &op)?;
        cx.write_if_it_fits(op.dst, &bytes)?;
        now(HostFetchReply { changed })
    }

    fn host_watch(&mut self, cx: &mut Call, op: HostWatch) -> Reply<HostWatchReply> {
        cx.context = op.context;
        let beside: Arc<dyn Beside> = Arc::<G::Beside>::clone(self.gpu.beside());
        beside.watches().begin(&cx.client, &beside, (cx.seq, cx.slot), &op)?;
        Ok(Answer::Later)
    }

    fn host_unmap(&mut self, cx: &mut Call, op: HostUnmap) -> Result {
        cx.context = op.context;
        // An unknown view was refused, or was destroyed with its context.
        let Some(view) = self.host_views.remove(&op.address) else { return Ok(()) };
        self.gpu.unmap_host(op.context, ContextId(view.context), view.native)
    }

    fn address_reserve(&mut self, _cx: &mut Call, op: AddressReserve) -> Reply<AddressReserveReply> {
        self.space.may_reserve(op.address, op.size, self.granule(), self.window_numbers())?;
        if self.touches_host_view(op.address, op.size) {
            // The client then tries other addresses.
            return Err(Status::OUT_OF_MEMORY);
        }
        self.gpu.reserve(op.address, op.size)?;
        self.space.reserve(op.address, op.size);
        now(AddressReserveReply {})
    }

    fn address_free(&mut self, _cx: &mut Call, op: AddressFree) -> Reply<AddressFreeReply> {
        self.space.may_unreserve(op.address, op.size)?;
        self.gpu.unreserve(op.address, op.size)?;
        self.space.unreserve(op.address);
        now(AddressFreeReply {})
    }

    fn memory_create(&mut self, cx: &mut Call, op: MemoryCreate) -> Reply<MemoryCreateReply> {
        cx.context = ContextId(op.device);
        self.check_device(op.device)?;
        self.space.may_name(op.memory.0)?;
        if op.size == 0 || !op.size.is_multiple_of(self.gpu.granule(op.device)) {
            return Err(Status::INVALID_VALUE);
        }
        if op.exportable && !self.gpu.exports(op.device) {
            return Err(Status::NOT_SUPPORTED);
        }
        let (charge, handle) = self.take_memory(op.device, op.size, |gpu| gpu.create(op.device, op.size))?;
        self.space.add(op.memory.0, Memory::new(op.device, op.size, op.exportable, handle, charge));
        self.quota.more_movable(self.gpu.number(op.device), op.size);
        now(MemoryCreateReply {})
    }

    fn memory_release(&mut self, _cx: &mut Call, op: MemoryRelease) -> Reply<MemoryReleaseReply> {
        let movable = self.space.movable(op.memory.0);
        let memory = self.space.remove(op.memory.0)?;
        movable.inspect(|memory| self.quota.less_movable(self.gpu.number(memory.device), memory.size));
        if let (Some(token), Some(broker)) = (memory.token, &self.broker) {
            broker.unshare(token);
        }
        let (device, size, imported) = (memory.device, memory.size, memory.imported.is_some());
        self.gpu.destroy(device, size, memory.into_handle()?, imported)?;
        now(MemoryReleaseReply {})
    }

    fn memory_map(&mut self, _cx: &mut Call, op: MemoryMap) -> Reply<MemoryMapReply> {
        self.space.may_map(op.memory.0, op.offset, op.address, op.size, self.granule())?;
        let memory = self.space.memory(op.memory.0)?;
        self.gpu.map(memory.handle()?, memory.device, op.offset, op.address, op.size)?;
        self.space.map(op.memory.0, op.offset, op.address, op.size);
        now(MemoryMapReply {})
    }

    fn memory_unmap(&mut self, _cx: &mut Call, op: MemoryUnmap) -> Reply<MemoryUnmapReply> {
        self.space.mapping(op.address, op.size)?;
        self.disown(op.address, op.size);
        let mapping = self.space.mapping_mut(op.address, op.size)?;
        self.gpu.unmap(op.address, op.size, &mut mapping.access)?;
        self.space.unmap(op.address);
        now(MemoryUnmapReply {})
    }

    fn memory_access(&mut self, cx: &mut Call, op: MemoryAccess) -> Reply<MemoryAccessReply> {
        cx.context = ContextId(op.device);
        self.check_device(op.device)?;
        let mapping = self.space.mapping(op.address, op.size)?;
        if !matches!(op.flags, 0 | 1 | 3) {
            return Err(Status::INVALID_VALUE);
        }
        let memory = self.space.memory(mapping.memory)?.handle()?;
        if op.flags == 0 {
            self.disown(op.address, op.size);
        }
        self.gpu.set_access(memory, mapping, op.address, op.device, op.flags)?;
        self.space.set_access(op.address, op.device, op.flags);
        now(MemoryAccessReply {})
    }

    fn memory_export(&mut self, _cx: &mut Call, op: MemoryExport) -> Reply<MemoryExportReply> {
        let memory = self.space.memory(op.memory.0)?;
        if !memory.exportable {
            return Err(Status::INVALID_VALUE);
        }
        if let Some(token) = memory.token {
            return now(MemoryExportReply { token });
        }
        let broker = self.broker.as_deref().ok_or(Status::NOT_SUPPORTED)?;
        let what = Shared::Memory { device: self.gpu.number(memory.device), size: memory.size };
        let token = broker.share(what, Some(&self.gpu.export(memory.handle()?)?))?;
        let movable = self.space.movable(op.memory.0);
        self.space.export(op.memory.0, token);
        movable.inspect(|memory| self.quota.less_movable(self.gpu.number(memory.device), memory.size));
        now(MemoryExportReply { token })
    }

    fn memory_import(&mut self, cx: &mut Call, op: MemoryImport) -> Reply<MemoryImportReply> {
        self.space.may_name(op.memory.0)?;
        let (Shared::Memory { device: number, size }, Some(fd), own) = self.broker()?.open(op.token)? else {
            return Err(Status::INVALID_VALUE);
        };
        let seen = self.windows.len() as u32;
        let (home, device) = match (0..seen).find(|device| self.gpu.number(*device) == number) {
            Some(device) => (device, device),
            // Nothing is made on a hidden device. The first one can open its memory as well.
            None => {
                let hidden = self.hidden.iter().position(|hidden| *hidden == number);
                (seen + hidden.ok_or(Status::INVALID_DEVICE)? as u32, 0)
            }
        };
        cx.context = ContextId(device);
        let resource = Resource::Device(number);
        let charge = self.space.charge_import(&self.quota, resource, &op.token, size)?;
        let handle = self.gpu.import(device, fd)?;
        self.space.add(op.memory.0, Memory::imported(device, size, op.token, handle, charge));
        now(MemoryImportReply { device: home, size, own })
    }

    fn piece_export(&mut self, _cx: &mut Call, op: PieceExport) -> Reply<PieceExportReply> {
        let device = self.ordinal_of(op.address).ok_or(Status::INVALID_VALUE)?;
        let window = self.windows.get_mut(device as usize).ok_or(Status::INVALID_VALUE)?;
        let (base, size, piece) = window.pieces.find_mut(op.address).ok_or(Status::INVALID_VALUE)?;
        if !self.gpu.exports(device) {
            return Err(Status::NOT_SUPPORTED);
        }
        let token = match piece.token {
            Some(token) => token,
            None => {
                let broker = self.broker.as_deref().ok_or(Status::NOT_SUPPORTED)?;
                // No command is executed while a piece is in the store.
                let Place::Device(native) = &piece.place else { return Err(Status::UNKNOWN) };
                let fd = self.gpu.export_piece(device, base, native)?;
                let what = Shared::Memory { device: self.gpu.number(device), size };
                let token = *piece.token.insert(broker.share(what, Some(&fd))?);
                self.quota.less_movable(self.gpu.number(device), size);
                token
            }
        };
        now(PieceExportReply { token, base })
    }

    fn event_export(&mut self, _cx: &mut Call, op: EventExport) -> Reply<EventExportReply> {
        now(EventExportReply { token: self.share_event(op.event)? })
    }

    fn event_import(&mut self, cx: &mut Call, op: EventImport) -> Reply<EventImportReply> {
        cx.context = op.context;
        self.may_name_event(op.event)?;
        let (Shared::Event { slot }, Some(file), own) = self.broker()?.open(op.token)? else {
            return Err(Status::INVALID_VALUE);
        };
        if own {
            // As without rgpu: a process cannot open its own handles.
            return Err(Status::INVALID_CONTEXT);
        }
        let shared = SharedEvent::open(file, slot).map_err(|_| Status::OUT_OF_MEMORY)?;
        self.open_event(op.context, op.event, shared)?;
        now(EventImportReply {})
    }

    fn event_query(&mut self, _cx: &mut Call, op: EventQuery) -> Reply<EventQueryReply> {
        now(EventQueryReply { done: self.is_event_done(op.event)? })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;
    use crate::config::Backing;
    use crate::doubles::{Listener, Told};
    use crate::driver::cuda::Cuda;
    use crate::driver::cuda::api::{Api, UNMAPS};
    use crate::driver::nvml::Management;
    use crate::driver::quota::Quota;

    /// The driver takes milliseconds to release GiBs.
    #[test]
    fn nothing_else_waits_while_memory_is_released() {
        let quota = Quota::default();
        let nvml = Management::new(&Backing::software(64 << 20, 1), quota.clone());
        let mut session = Session::new(Cuda::fake_of(Api::slow_to_unmap(), 1), quota, nvml);
        let (answer, answers) = channel();
        let mut call = Call::new(Arc::new(Listener::new(move |told: Told<'_>| {
            if let Told::Reply { status, .. } = told {
                answer.send(status).unwrap();
            }
        })));
        call.begin(1, 0);
        let (device, address, size) = (0, window(0), 4096);
        session.mem_grow(&mut call, MemGrow { device, address, size }).unwrap();
        call.begin(2, 0);
        session.mem_shrink(&mut call, MemShrink { device, address, size }).unwrap();
        assert!(answers.try_recv().is_err(), "it is still being released");
        UNMAPS.store(true, Ordering::Release);
        assert_eq!(answers.recv_timeout(Duration::from_secs(60)), Ok(Status::SUCCESS));
    }
}
