//! Green contexts, and the parts of devices that they use.

use std::collections::HashMap;

use protocol::Status;
use protocol::handle::{ContextId, GreenId};
use protocol::ops::green::*;

use super::{Session, now};
use crate::driver::call::{Call, Reply, Result};
use crate::driver::gpu::{Gpu, GpuGreenContexts, Split};
use crate::driver::parts::{Parts, may_have};
use crate::driver::streams::Stream;

/// The session's green contexts.
pub(super) struct Greens<G: GpuGreenContexts> {
    parts: Parts<G::Part>,
    descriptors: HashMap<u32, G::PartDescriptor>,
    contexts: HashMap<u32, Green<G::Green>>,
}

/// A green context. `N` belongs to the GPU.
struct Green<N> {
    device: u32,
    native: N,
}

impl<G: GpuGreenContexts> Default for Greens<G> {
    fn default() -> Self {
        Greens { parts: Parts::default(), descriptors: HashMap::new(), contexts: HashMap::new() }
    }
}

impl<G: GpuGreenContexts> Greens<G> {
    /// A part as the client sees it.
    fn tell(&mut self, part: G::Part) -> Result<Part> {
        let (kind, sm) = G::tell_part(&part);
        let number = if kind == 0 { 0 } else { self.parts.number(part)? };
        Ok(Part { number, kind, sm })
    }

    /// Whether there are no green contexts and the client has asked for no parts.
    pub(super) fn is_empty(&self) -> bool {
        self.contexts.is_empty() && self.descriptors.is_empty() && self.parts.is_empty()
    }

    fn get(&self, id: GreenId) -> Result<&Green<G::Green>> {
        self.contexts.get(&id.0).ok_or(Status::INVALID_CONTEXT)
    }
}

impl<G: Gpu> Session<G> {
    /// Destroys a device's green contexts before the device is reset.
    pub(super) fn forget_greens(&mut self, device: u32) {
        for (_, green) in self.greens.contexts.extract_if(|_, green| green.device == device) {
            self.gpu.forget_green(green.native);
        }
    }
}

impl<G: Gpu> GreenOps<Call> for Session<G> {
    fn part_get(&mut self, cx: &mut Call, op: PartGet) -> Reply<PartGetReply> {
        cx.context = ContextId(op.device);
        self.check_device(op.device)?;
        let part = match op.green {
            None => self.gpu.device_part(op.device, op.kind)?,
            Some(green) => self.gpu.green_part(&self.greens.get(green)?.native, op.kind)?,
        };
        now(PartGetReply { part: self.greens.tell(part)? })
    }

    fn part_split(&mut self, _cx: &mut Call, op: PartSplit) -> Reply<PartSplitReply> {
        let part = self.greens.parts.get(op.part)?;
        if op.groups.is_some_and(|wanted| wanted > MAX_GROUPS) {
            return Err(Status::INVALID_VALUE);
        }
        let Split { count, groups, rest } = self.gpu.split_part(part, op.groups, op.flags, op.least)?;
        let groups = groups.into_iter().map(|group| self.greens.tell(group)).collect::<Result<_, _>>()?;
        now(PartSplitReply { count, groups, rest: self.greens.tell(rest)? })
    }

    fn part_describe(&mut self, _cx: &mut Call, op: PartDescribe) -> Reply<PartDescribeReply> {
        may_have(&self.greens.descriptors, op.descriptor.0)?;
        let descriptor = self.gpu.describe_parts(self.greens.parts.all(&op.parts)?)?;
        self.greens.descriptors.insert(op.descriptor.0, descriptor);
        now(PartDescribeReply {})
    }

    fn green_create(&mut self, cx: &mut Call, op: GreenCreate) -> Reply<GreenCreateReply> {
        cx.context = ContextId(op.device);
        self.check_device(op.device)?;
        may_have(&self.greens.contexts, op.green.0)?;
        let descriptor = self.greens.descriptors.get(&op.descriptor.0).ok_or(Status::INVALID_VALUE)?;
        let native = self.gpu.make_green(op.device, descriptor, op.flags)?;
        self.greens.contexts.insert(op.green.0, Green { device: op.device, native });
        now(GreenCreateReply {})
    }

    fn green_destroy(&mut self, cx: &mut Call, op: GreenDestroy) -> Reply<GreenDestroyReply> {
        cx.context = ContextId(self.greens.get(op.green)?.device);
        if self.streams.values().any(|stream| stream.green == Some(op.green)) {
            return Err(Status::INVALID_VALUE);
        }
        let green = self.greens.contexts.remove(&op.green.0).ok_or(Status::INVALID_CONTEXT)?;
        self.gpu.destroy_green(green.device, green.native)?;
        now(GreenDestroyReply {})
    }

    fn green_stream(&mut self, cx: &mut Call, op: GreenStream) -> Result {
        let green = self.greens.get(op.green)?;
        let context = ContextId(green.device);
        cx.context = context;
        self.check_new_stream(op.stream)?;
        let native = self.gpu.green_stream(op.stream, green.device, &green.native, op.priority)?;
        self.streams
            .insert(op.stream.0, Stream { context, green: Some(op.green), is_blocking: false, native });
        Ok(())
    }
}
