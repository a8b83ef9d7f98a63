//! Green contexts, and the parts of devices that they have.

use std::collections::HashMap;

use protocol::Status;
use protocol::handle::{ContextId, GreenId};
use protocol::ops::Answer;
use protocol::ops::green::*;

use super::api::{CUcontext, CUgreenCtx, CUstream, Descriptor, DevResource};
use super::{Cuda, STREAM_NON_BLOCKING};
use crate::driver::call::Call;
use crate::driver::parts::{Parts, may_have};
use crate::driver::session::Session;

/// What a session has of them.
#[derive(Default)]
pub(super) struct Greens {
    parts: Parts<DevResource>,
    descriptors: HashMap<u32, Descriptor>,
    contexts: HashMap<u32, Green>,
}

/// A green context.
struct Green {
    device: u32,
    handle: CUgreenCtx,
    /// The same as a context that can be made current.
    context: CUcontext,
}

impl Greens {
    /// A part as the client sees it.
    fn tell(&mut self, part: DevResource) -> Result<Part, Status> {
        let (kind, sm) = (part.kind, [part.told[0], part.told[1], part.told[2]]);
        let number = if kind == 0 { 0 } else { self.parts.number(part)? };
        Ok(Part { number, kind, sm })
    }

    fn of(&self, id: GreenId) -> Result<&Green, Status> {
        self.contexts.get(&id.0).ok_or(Status::INVALID_CONTEXT)
    }
}

impl Cuda {
    /// Before a device's primary context is reset: its green contexts go first.
    pub(super) fn forget_greens(&mut self, device: u32) {
        for (_, green) in self.greens.contexts.extract_if(|_, green| green.device == device) {
            // SAFETY: out of the table; its streams are forgotten. What a failed context answers is nobody's concern.
            let _ = unsafe { self.api.green_destroy(green.handle) };
        }
        self.current = None;
    }
}

impl GreenOps<Call> for Session<Cuda> {
    fn part_get(&mut self, cx: &mut Call, op: PartGet) -> Result<Answer<PartGetReply>, Status> {
        cx.context = ContextId(op.device);
        let device = self.device(op.device)?.handle;
        let mut part = DevResource::empty();
        match op.green {
            // SAFETY: writes one structure, for a device that exists.
            None => unsafe { self.api.device_part(device, &mut part, op.kind) }?,
            // SAFETY: the same, of a live green context.
            Some(green) => unsafe { self.api.green_part(self.greens.of(green)?.handle, &mut part, op.kind) }?,
        }
        Ok(Answer::Now(PartGetReply { part: self.greens.tell(part)? }))
    }

    fn part_split(&mut self, _cx: &mut Call, op: PartSplit) -> Result<Answer<PartSplitReply>, Status> {
        let part = self.greens.parts.get(op.part)?.clone();
        let wanted = op.groups.unwrap_or(0);
        if wanted > MAX_GROUPS {
            return Err(Status::INVALID_VALUE);
        }
        let mut groups = vec![DevResource::empty(); wanted as usize];
        let mut rest = DevResource::empty();
        let mut count = wanted;
        let to = if op.groups.is_some() { groups.as_mut_ptr() } else { std::ptr::null_mut() };
        // SAFETY: a part that the driver made; there is room for as many groups as `count` says, or none are written.
        unsafe { self.api.part_split(to, &mut count, &part, &mut rest, op.flags, op.least) }?;
        groups.truncate(count as usize);
        let groups = groups.into_iter().map(|group| self.greens.tell(group)).collect::<Result<_, _>>()?;
        Ok(Answer::Now(PartSplitReply { count, groups, rest: self.greens.tell(rest)? }))
    }

    fn part_describe(
        &mut self,
        _cx: &mut Call,
        op: PartDescribe,
    ) -> Result<Answer<PartDescribeReply>, Status> {
        let greens = &mut self.gpu.greens;
        may_have(&greens.descriptors, op.descriptor.0)?;
        let mut parts = greens.parts.all(&op.parts)?;
        let mut descriptor: Descriptor = std::ptr::null_mut();
        // SAFETY: parts that the driver made, as many as it is told; writes a handle.
        unsafe { self.gpu.api.part_describe(&mut descriptor, parts.as_mut_ptr(), parts.len() as u32) }?;
        greens.descriptors.insert(op.descriptor.0, descriptor);
        Ok(Answer::Now(PartDescribeReply {}))
    }

    fn green_create(&mut self, cx: &mut Call, op: GreenCreate) -> Result<Answer<GreenCreateReply>, Status> {
        cx.context = ContextId(op.device);
        let device = self.device(op.device)?.handle;
        may_have(&self.greens.contexts, op.green.0)?;
        // A green context is a part of it.
        self.make_primary(op.device)?;
        let descriptor = *self.greens.descriptors.get(&op.descriptor.0).ok_or(Status::INVALID_VALUE)?;
        let mut handle: CUgreenCtx = std::ptr::null_mut();
        // SAFETY: a descriptor that the driver made, and a device; writes a handle.
        unsafe { self.api.green_create(&mut handle, descriptor, device, op.flags) }?;
        let mut context: CUcontext = std::ptr::null_mut();
        // SAFETY: the green context that was just made; writes a handle.
        if let Err(status) = unsafe { self.api.green_context(&mut context, handle) } {
            // SAFETY: nothing is in it.
            let _ = unsafe { self.api.green_destroy(handle) };
            return Err(status);
        }
        self.greens.contexts.insert(op.green.0, Green { device: op.device, handle, context });
        Ok(Answer::Now(GreenCreateReply {}))
    }

    fn green_destroy(
        &mut self,
        cx: &mut Call,
        op: GreenDestroy,
    ) -> Result<Answer<GreenDestroyReply>, Status> {
        cx.context = ContextId(self.greens.of(op.green)?.device);
        if self.has_stream_of(op.green) {
            return Err(Status::INVALID_VALUE);
        }
        let green = self.greens.contexts.remove(&op.green.0).ok_or(Status::INVALID_CONTEXT)?;
        // It may be current in this thread.
        self.current = None;
        self.enter_context(cx.context)?;
        // SAFETY: out of the table, and no stream of it is left.
        unsafe { self.api.green_destroy(green.handle) }?;
        Ok(Answer::Now(GreenDestroyReply {}))
    }

    fn green_stream(&mut self, cx: &mut Call, op: GreenStream) -> Result<(), Status> {
        let green = self.greens.of(op.green)?;
        let (primary, context) = (ContextId(green.device), green.context);
        cx.context = primary;
        self.may_have_green_stream(op.stream)?;
        self.context(primary)?.health.check()?;
        self.current = None;
        let mut handle: CUstream = std::ptr::null_mut();
        // SAFETY: a live context; writes a stream handle.
        let made = unsafe {
            self.api
                .context_set(context)
                .and_then(|()| self.api.stream_create(&mut handle, STREAM_NON_BLOCKING, op.priority))
        };
        self.note(primary, made)?;
        self.enter_context(primary)?;
        let stream = self.wrap_stream(op.stream, primary, handle)?;
        self.add_green_stream(op.stream, op.green, primary.0, stream);
        Ok(())
    }
}
