//! Green contexts, and the parts of devices that they use.

use crate::driver::call::Result;
use protocol::handle::{ContextId, StreamId};

use super::Cuda;
use super::api::{CUcontext, CUgreenCtx, CUstream, Descriptor, DevResource};
use super::streams::CudaStream;
use crate::driver::gpu::{GpuGreenContexts, STREAM_NON_BLOCKING, Split};

/// A descriptor's handle.
pub struct PartDescriptor(Descriptor);

// SAFETY: the driver API takes handles from any thread.
unsafe impl Send for PartDescriptor {}

/// A green context.
pub struct Green {
    handle: CUgreenCtx,
    /// The context that can be made current.
    context: CUcontext,
}

// SAFETY: the driver API takes handles from any thread.
unsafe impl Send for Green {}

impl GpuGreenContexts for Cuda {
    type Part = DevResource;
    type PartDescriptor = PartDescriptor;
    type Green = Green;

    fn tell_part(part: &DevResource) -> (u32, [u32; 3]) {
        (part.kind, [part.told[0], part.told[1], part.told[2]])
    }

    fn device_part(&mut self, device: u32, kind: u32) -> Result<DevResource> {
        let device = self.device(device)?.handle;
        let mut part = DevResource::empty();
        // SAFETY: writes one structure, for a device that exists.
        unsafe { self.api.device_part(device, &mut part, kind) }?;
        Ok(part)
    }

    fn green_part(&mut self, green: &Green, kind: u32) -> Result<DevResource> {
        let mut part = DevResource::empty();
        // SAFETY: writes one structure, for a live green context.
        unsafe { self.api.green_part(green.handle, &mut part, kind) }?;
        Ok(part)
    }

    fn split_part(
        &mut self,
        part: &DevResource,
        groups: Option<u32>,
        flags: u32,
        least: u32,
    ) -> Result<Split<DevResource>> {
        let mut count = groups.unwrap_or(0);
        let mut all = vec![DevResource::empty(); count as usize];
        let mut rest = DevResource::empty();
        let to = if groups.is_some() { all.as_mut_ptr() } else { std::ptr::null_mut() };
        // SAFETY: a part made by the driver; there is room for `count` groups, or none are written.
        unsafe { self.api.part_split(to, &mut count, part, &mut rest, flags, least) }?;
        all.truncate(count as usize);
        Ok(Split { count, groups: all, rest })
    }

    fn describe_parts(&mut self, mut parts: Vec<DevResource>) -> Result<PartDescriptor> {
        let mut descriptor: Descriptor = std::ptr::null_mut();
        // SAFETY: parts made by the driver, as many as it is told; writes a handle.
        unsafe { self.api.part_describe(&mut descriptor, parts.as_mut_ptr(), parts.len() as u32) }?;
        Ok(PartDescriptor(descriptor))
    }

    fn make_green(&mut self, device: u32, descriptor: &PartDescriptor, flags: u32) -> Result<Green> {
        let handle_of_device = self.device(device)?.handle;
        // Green contexts need the primary context.
        self.make_primary(device)?;
        let mut handle: CUgreenCtx = std::ptr::null_mut();
        // SAFETY: a descriptor made by the driver, and a device; writes a handle.
        unsafe { self.api.green_create(&mut handle, descriptor.0, handle_of_device, flags) }?;
        let mut context: CUcontext = std::ptr::null_mut();
        // SAFETY: the green context just made; writes a handle.
        if let Err(status) = unsafe { self.api.green_context(&mut context, handle) } {
            // SAFETY: it is empty.
            let _ = unsafe { self.api.green_destroy(handle) };
            return Err(status);
        }
        Ok(Green { handle, context })
    }

    fn destroy_green(&mut self, device: u32, green: Green) -> Result {
        // It may be current in this thread.
        self.current = None;
        self.enter_context(ContextId(device))?;
        // SAFETY: removed from the session's table, with no streams left.
        unsafe { self.api.green_destroy(green.handle) }
    }

    fn forget_green(&mut self, green: Green) {
        // SAFETY: removed from the session's table, with no streams left. A failed context's result does not
        // matter.
        let _ = unsafe { self.api.green_destroy(green.handle) };
        self.current = None;
    }

    fn green_stream(
        &mut self,
        id: StreamId,
        device: u32,
        green: &Green,
        priority: i32,
    ) -> Result<CudaStream> {
        let primary = ContextId(device);
        self.context(primary)?.health.check()?;
        self.current = None;
        let mut handle: CUstream = std::ptr::null_mut();
        // SAFETY: a live context; writes a stream handle.
        let made = unsafe {
            self.api
                .context_set(green.context)
                .and_then(|()| self.api.stream_create(&mut handle, STREAM_NON_BLOCKING, priority))
        };
        self.note(primary, made)?;
        self.enter_context(primary)?;
        self.wrap_stream(id, primary, handle)
    }
}
