//! Device memory, made with the driver's virtual memory management so that it has the addresses that the
//! client chose and can be shared between processes.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::driver::call::Result;
use protocol::Status;
use protocol::handle::ContextId;
use protocol::ops::memory::SPACE_ALIGN;

use super::api::{AccessDesc, AllocationProp, CUstream};
use super::kernels::POINTER_IS_MANAGED;
use super::{Cuda, HAS_DMA_BUFS, READS_IN_PLACE, attribute};
use crate::driver::gpu::{Block, GpuMemory, STREAM_NON_BLOCKING};
use crate::driver::space::Mapping;
use crate::driver::store::{Chunk, Lane, Part, Way};

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const POSIX_FD: u32 = 1;
/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
const DMA_BUF: u32 = 1;
/// `CU_MEMHOSTREGISTER_PORTABLE`.
const PORTABLE: u32 = 1;

/// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`.
const POINTER_MEMORY_TYPE: u32 = 2;
/// `CU_MEMORYTYPE_DEVICE`.
const DEVICE_MEMORY: u32 = 2;

/// The size that the driver reserves for one of the client's reservations: see [`SPACE_ALIGN`]. No other
/// reservation can begin in the excess.
fn whole(size: u64) -> usize {
    size.next_multiple_of(SPACE_ALIGN) as usize
}

impl Cuda {
    /// The properties for memory of a device: shareable if the device's driver supports it.
    fn allocation(&self, device: u32) -> Result<AllocationProp> {
        let device = self.device(device)?;
        let properties = AllocationProp::shareable(device.handle, if device.exports { POSIX_FD } else { 0 });
        let in_place = self.in_place && attribute(self.api, device.handle, READS_IN_PLACE) == Some(1);
        Ok(if in_place { properties.for_devices() } else { properties })
    }

    /// The stream for moving memory from and to a device, in a lane. Its context, the primary one, is current
    /// afterwards.
    fn moving_stream(&mut self, device: u32, lane: Lane) -> Result<CUstream> {
        let context = self.enter_context(ContextId(device))?.handle;
        if let Some((_, stream)) = self.moving.get(&(device, lane)).filter(|(of, _)| *of == context) {
            return Ok(*stream);
        }
        let mut stream = std::ptr::null_mut();
        // SAFETY: the context is current; writes one handle.
        unsafe { self.api.stream_create(&mut stream, STREAM_NON_BLOCKING, 0) }?;
        // The stream of a destroyed context was destroyed with it.
        self.moving.insert((device, lane), (context, stream));
        Ok(stream)
    }
}

impl GpuMemory for Cuda {
    type Piece = ();
    type Memory = u64;

    fn granule(&self, device: u32) -> u64 {
        self.device(device).map_or(0, |device| device.granule)
    }

    fn exports(&self, device: u32) -> bool {
        self.device(device).is_ok_and(|device| device.exports)
    }

    fn prepare_in_place(&mut self) {
        self.in_place = true;
    }

    fn in_place(&mut self, device: u32, address: u64, size: u64) -> Result<Block> {
        let device = self.device(device)?;
        if attribute(self.api, device.handle, HAS_DMA_BUFS) != Some(1) {
            return Err(Status::NOT_SUPPORTED);
        }
        let mut file: c_int = -1;
        // SAFETY: writes a descriptor; the range is whole granules, which the kernel's pages divide.
        unsafe { self.api.memory_range_handle((&raw mut file).cast(), address, size as usize, DMA_BUF, 0) }?;
        // SAFETY: the driver has just made it for this process.
        Ok(Block::DmaBuf(unsafe { OwnedFd::from_raw_fd(file) }))
    }

    fn number(&self, device: u32) -> u32 {
        self.device(device).map_or(u32::MAX, |device| device.number)
    }

    fn memory_info(&mut self, device: u32) -> Result<(u64, u64)> {
        self.enter_context(ContextId(device))?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two integers.
        unsafe { self.api.memory_info(&mut free, &mut total) }?;
        Ok((free as u64, total as u64))
    }

    fn back(&mut self, device: u32, address: u64, bytes: u64) -> Result {
        self.enter_context(ContextId(device))?;
        let size = bytes as usize;
        let prop = self.allocation(device)?;
        let access = self.access(device)?;
        let mut memory = 0;
        // SAFETY: a valid description; the session has checked that the range lies in the reserved window and
        // is free.
        unsafe {
            self.api.memory_create(&mut memory, size, &prop, 0)?;
            let mapped = self.api.memory_map(address, size, 0, memory, 0);
            // The mapping now keeps the memory; if there is none, the memory is freed here.
            let released = self.api.memory_release(memory);
            mapped.and(released)?;
            if let Err(status) = self.api.memory_access(address, size, access.as_ptr(), access.len()) {
                let _ = self.api.memory_unmap(address, size);
                return Err(status);
            }
        }
        if let Some(device) = self.devices.get_mut(device as usize) {
            device.mapped.insert(address, bytes, ());
        }
        Ok(())
    }

    fn unback(&mut self, device: u32, address: u64, size: u64) -> impl FnOnce() -> Result + Send + 'static {
        if let Some(device) = self.devices.get_mut(device as usize) {
            device.mapped.remove(address);
        }
        let api = self.api;
        // SAFETY: mapped by `back`, in one piece; the session calls this once, when all work that may have
        // used it is done.
        move || unsafe { api.memory_unmap(address, size as usize) }
    }

    fn set_aside(&mut self, device: u32, address: u64, size: u64) -> Result {
        self.unback(device, address, size)().inspect_err(|_| {
            // It is still mapped, and devices that get a context later need access to it.
            if let Some(device) = self.devices.get_mut(device as usize) {
                device.mapped.insert(address, size, ());
            }
        })
    }

    fn transfer(&mut self, device: u32, lane: Lane, way: Way, part: Part) -> Result {
        let stream = self.moving_stream(device, lane)?;
        let host = part.host.as_ptr().cast();
        // SAFETY: memory of a piece, checked by the session; the store's bytes stay until `transferred` has
        // waited for this.
        let copied = unsafe {
            match way {
                Way::Out => self.api.copy_dtoh(host, part.address, part.len, stream),
                Way::In => self.api.copy_htod(part.address, host, part.len, stream),
            }
        };
        self.note(ContextId(device), copied)
    }

    fn transferred(&mut self, device: u32, lane: Lane) -> Result {
        let stream = self.moving_stream(device, lane)?;
        // SAFETY: a live stream of the current context.
        let done = unsafe { self.api.stream_synchronize(stream) };
        self.note(ContextId(device), done)
    }

    fn lock(&mut self, chunk: &mut Chunk) {
        let Some(home) = self.home else { return };
        if self.enter_context(ContextId(home)).is_err() {
            return;
        }
        // SAFETY: whole pages of the store, which stay until they are unlocked.
        match unsafe { self.api.host_register(chunk.at().as_ptr().cast(), chunk.size(), PORTABLE) } {
            Ok(()) => chunk.locked = true,
            Err(status) => {
                tracing::warn!("device memory moves through memory that is not page-locked: {status}");
            }
        }
    }

    fn unlock(&mut self, chunk: &mut Chunk) {
        if std::mem::take(&mut chunk.locked) {
            // An error means that the driver had already unlocked it, with its context.
            // SAFETY: locked by `lock`, and no copy is pending.
            let _ = unsafe { self.api.host_unregister(chunk.at().as_ptr().cast()) };
        }
    }

    fn module_memory(&self, address: u64, _device: u32) -> Option<(u64, u64)> {
        let asked = |attribute| {
            let mut value = 0u32;
            // SAFETY: both attributes are ints.
            let found = unsafe {
                self.api.pointer_attribute(std::ptr::from_mut(&mut value).cast(), attribute, address)
            };
            found.is_ok().then_some(value)
        };
        // Not pinned memory of this process, and not a managed variable, which the client has by its name.
        if asked(POINTER_MEMORY_TYPE)? != DEVICE_MEMORY || asked(POINTER_IS_MANAGED)? != 0 {
            return None;
        }
        let (mut base, mut size) = (0, 0);
        // SAFETY: writes two integers.
        unsafe { self.api.address_range(&mut base, &mut size, address) }.ok()?;
        Some((base, size as u64))
    }

    fn reserve(&mut self, address: u64, size: u64) -> Result {
        self.enter_context(ContextId(0))?;
        let mut at = 0;
        // SAFETY: reserves addresses; nothing is mapped yet.
        unsafe { self.api.address_reserve(&mut at, whole(size), 0, address, 0) }?;
        if at != address {
            tracing::warn!("{size:#x} bytes were reserved at {at:#x} instead of {address:#x}");
            // SAFETY: just reserved, and nothing is mapped there.
            unsafe { self.api.address_free(at, whole(size)) }?;
            return Err(Status::OUT_OF_MEMORY);
        }
        Ok(())
    }

    fn unreserve(&mut self, address: u64, size: u64) -> Result {
        self.enter_context(ContextId(0))?;
        // SAFETY: a reservation of this session, exactly as it was made, with nothing mapped in it.
        unsafe { self.api.address_free(address, whole(size)) }
    }

    fn create(&mut self, device: u32, size: u64) -> Result<u64> {
        self.enter_context(ContextId(device))?;
        let prop = self.allocation(device)?;
        let mut handle = 0;
        // SAFETY: a valid description; writes one handle.
        unsafe { self.api.memory_create(&mut handle, size as usize, &prop, 0) }?;
        Ok(handle)
    }

    fn destroy(&mut self, _device: u32, _size: u64, memory: u64, _imported: bool) -> Result {
        // SAFETY: removed from the session's table, and not mapped anywhere.
        unsafe { self.api.memory_release(memory) }
    }

    fn map(&mut self, memory: &u64, device: u32, offset: u64, address: u64, size: u64) -> Result {
        self.enter_context(ContextId(device))?;
        // SAFETY: reserved addresses with nothing mapped there, and a part of the memory.
        unsafe { self.api.memory_map(address, size as usize, offset as usize, *memory, 0) }
    }

    fn unmap(&mut self, address: u64, size: u64, _access: &mut Vec<u32>) -> Result {
        self.current = None;
        self.enter_context(ContextId(0))?;
        // SAFETY: a mapping of this session, exactly as it was made. Whether work still uses it is up to the
        // program, as without rgpu.
        unsafe { self.api.memory_unmap(address, size as usize) }
    }

    fn set_access(
        &mut self,
        _memory: &u64,
        mapping: &Mapping,
        address: u64,
        device: u32,
        flags: u32,
    ) -> Result {
        let handle = self.device(device)?.handle;
        self.enter_context(ContextId(device))?;
        let desc = AccessDesc::with_flags(handle, flags);
        // SAFETY: a mapping of this session, as a whole.
        unsafe { self.api.memory_access(address, mapping.size as usize, &desc, 1) }
    }

    fn map_whole(&mut self, memory: &u64, device: u32, size: u64) -> Result<u64> {
        let access = AccessDesc::device(self.device(device)?.handle, true);
        self.enter_context(ContextId(device))?;
        let (size, mut at) = (size as usize, 0);
        // SAFETY: fresh addresses, which nobody else knows, for a live handle of this size.
        unsafe {
            self.api.address_reserve(&mut at, size, 0, 0, 0)?;
            let mapped = self.api.memory_map(at, size, 0, *memory, 0);
            if let Err(status) = mapped.and_then(|()| self.api.memory_access(at, size, &access, 1)) {
                if mapped.is_ok() {
                    let _ = self.api.memory_unmap(at, size);
                }
                let _ = self.api.address_free(at, size);
                return Err(status);
            }
        }
        Ok(at)
    }

    fn unmap_whole(&mut self, device: u32, address: u64, size: u64) -> Result {
        self.enter_context(ContextId(device))?;
        // SAFETY: mapped by `map_whole`, with these addresses; no copy is pending.
        unsafe {
            self.api.memory_unmap(address, size as usize)?;
            // If only this fails, no memory is lost.
            if let Err(status) = self.api.address_free(address, size as usize) {
                tracing::warn!(size, "addresses could not be freed: {status}");
            }
        }
        Ok(())
    }

    fn export(&mut self, memory: &u64) -> Result<OwnedFd> {
        let mut fd: i32 = -1;
        // SAFETY: a live handle that was made for it; writes one descriptor.
        unsafe { self.api.memory_export((&raw mut fd).cast(), *memory, POSIX_FD, 0) }?;
        // SAFETY: the driver has just created this descriptor for us; nobody else knows it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    fn export_piece(&mut self, device: u32, address: u64, (): &()) -> Result<OwnedFd> {
        self.enter_context(ContextId(device))?;
        let mut handle = 0;
        // SAFETY: a mapped address; writes one handle, a reference of our own.
        unsafe { self.api.memory_retain(&mut handle, address as *mut _) }?;
        let exported = self.export(&handle);
        // SAFETY: the reference just taken.
        unsafe { self.api.memory_release(handle) }?;
        exported
    }

    fn import(&mut self, device: u32, fd: OwnedFd) -> Result<u64> {
        self.enter_context(ContextId(device))?;
        let mut handle = 0;
        // SAFETY: a descriptor that the driver created in another worker, passed by number; writes one
        // handle.
        unsafe { self.api.memory_import(&mut handle, fd.as_raw_fd() as usize as *mut _, POSIX_FD) }?;
        Ok(handle)
    }
}
