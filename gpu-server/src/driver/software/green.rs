//! Green contexts. Their parts are counted, and their streams are streams as others are: a kernel may use more multiprocessors than its part has, as CUDA allows (and does, with MPS and with
//! dynamic parallelism), never fewer.

use std::collections::HashMap;

use protocol::Status;
use protocol::handle::{ContextId, GreenId};
use protocol::ops::Answer;
use protocol::ops::green::*;

use super::Software;
use crate::driver::call::Call;
use crate::driver::parts::{Parts, may_have};
use crate::driver::session::Session;

/// `CU_DEV_RESOURCE_TYPE_SM`.
const SM: u32 = 1;
/// `CU_GREEN_CTX_DEFAULT_STREAM`.
const DEFAULT_STREAM: u32 = 1;
/// `CUDA_ERROR_INVALID_RESOURCE_TYPE`, `CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION`.
const INVALID_KIND: Status = Status(914);
const INVALID_CONFIGURATION: Status = Status(915);

/// What a session has of them.
#[derive(Default)]
pub(super) struct Greens {
    parts: Parts<Sm>,
    descriptors: HashMap<u32, Sm>,
    contexts: HashMap<u32, Sm>,
}

/// Multiprocessors of a device.
#[derive(Clone, PartialEq)]
struct Sm {
    device: u32,
    first: u32,
    count: u32,
    /// It came of a split, and is not split again.
    split: bool,
}

impl Greens {
    fn tell(&mut self, sm: Sm) -> Result<Part, Status> {
        let count = sm.count;
        Ok(match count {
            0 => Part { number: 0, kind: 0, sm: [0; 3] },
            _ => Part { number: self.parts.number(sm)?, kind: SM, sm: [count, 1, 1] },
        })
    }

    pub(super) fn forget(&mut self, device: u32) {
        self.contexts.retain(|_, sm| sm.device != device);
    }
}

impl Software {
    fn green(&self, id: GreenId) -> Result<&Sm, Status> {
        self.greens.contexts.get(&id.0).ok_or(Status::INVALID_CONTEXT)
    }
}

impl GreenOps<Call> for Session<Software> {
    fn part_get(&mut self, cx: &mut Call, op: PartGet) -> Result<Answer<PartGetReply>, Status> {
        cx.context = ContextId(op.device);
        let count = self.device(op.device)?.gpu.properties().multiprocessors;
        if op.kind != SM {
            return Err(INVALID_KIND);
        }
        let sm = match op.green {
            None => Sm { device: op.device, first: 0, count, split: false },
            Some(green) => Sm { split: false, ..self.green(green)?.clone() },
        };
        Ok(Answer::Now(PartGetReply { part: self.greens.tell(sm)? }))
    }

    fn part_split(&mut self, _cx: &mut Call, op: PartSplit) -> Result<Answer<PartSplitReply>, Status> {
        let sm = self.greens.parts.get(op.part)?.clone();
        let wanted = op.groups.unwrap_or(MAX_GROUPS);
        if sm.split || op.flags > 3 {
            return Err(INVALID_CONFIGURATION);
        }
        if op.least > sm.count || wanted > MAX_GROUPS {
            return Err(Status::INVALID_VALUE);
        }
        let each = op.least.max(1);
        let count = (sm.count / each).min(wanted);
        let part = |n: u32, count| Sm { first: sm.first + n * each, count, split: true, ..sm };
        let mut groups = Vec::new();
        if op.groups.is_some() {
            for n in 0..count {
                groups.push(self.greens.tell(part(n, each))?);
            }
        }
        let rest = self.greens.tell(part(count, sm.count - count * each))?;
        Ok(Answer::Now(PartSplitReply { count, groups, rest }))
    }

    fn part_describe(
        &mut self,
        _cx: &mut Call,
        op: PartDescribe,
    ) -> Result<Answer<PartDescribeReply>, Status> {
        let greens = &mut self.greens;
        may_have(&greens.descriptors, op.descriptor.0)?;
        let parts = greens.parts.all(&op.parts)?;
        let mut all = parts.first().cloned().ok_or(Status::INVALID_VALUE)?;
        for (n, part) in parts.iter().enumerate().skip(1) {
            let apart = |other: &Sm| {
                other.first + other.count <= part.first || part.first + part.count <= other.first
            };
            if part.device != all.device || !part.split || !parts[..n].iter().all(apart) {
                return Err(INVALID_CONFIGURATION);
            }
            all.count += part.count;
        }
        greens.descriptors.insert(op.descriptor.0, all);
        Ok(Answer::Now(PartDescribeReply {}))
    }

    fn green_create(&mut self, cx: &mut Call, op: GreenCreate) -> Result<Answer<GreenCreateReply>, Status> {
        cx.context = ContextId(op.device);
        self.device(op.device)?;
        may_have(&self.greens.contexts, op.green.0)?;
        let sm = self.greens.descriptors.get(&op.descriptor.0).ok_or(Status::INVALID_VALUE)?;
        if sm.device != op.device || op.flags != DEFAULT_STREAM {
            return Err(Status::INVALID_VALUE);
        }
        let sm = sm.clone();
        self.greens.contexts.insert(op.green.0, sm);
        Ok(Answer::Now(GreenCreateReply {}))
    }

    fn green_destroy(
        &mut self,
        cx: &mut Call,
        op: GreenDestroy,
    ) -> Result<Answer<GreenDestroyReply>, Status> {
        cx.context = ContextId(self.green(op.green)?.device);
        if self.has_stream_of(op.green) {
            return Err(Status::INVALID_VALUE);
        }
        self.greens.contexts.remove(&op.green.0);
        Ok(Answer::Now(GreenDestroyReply {}))
    }

    fn green_stream(&mut self, cx: &mut Call, op: GreenStream) -> Result<(), Status> {
        let device = self.green(op.green)?.device;
        cx.context = ContextId(device);
        self.may_have_green_stream(op.stream)?;
        let stream = self.new_stream(op.stream, ContextId(device), device, false)?;
        self.add_green_stream(op.stream, op.green, device, stream);
        Ok(())
    }
}
