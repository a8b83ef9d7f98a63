//! Green contexts. Their parts are only counted, and their streams are ordinary ones: a kernel may use more
//! multiprocessors than its part has, as CUDA allows (and does, with MPS and with dynamic parallelism), but
//! never fewer.

use crate::driver::call::Result;
use protocol::Status;
use protocol::handle::{ContextId, StreamId};
use protocol::ops::green::MAX_GROUPS;

use super::Software;
use super::streams::SoftwareStream;
use crate::driver::gpu::{GpuGreenContexts, Split};

/// `CU_DEV_RESOURCE_TYPE_SM`.
const SM: u32 = 1;
/// `CU_GREEN_CTX_DEFAULT_STREAM`.
const DEFAULT_STREAM: u32 = 1;
/// `CUDA_ERROR_INVALID_RESOURCE_TYPE`, `CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION`.
const INVALID_KIND: Status = Status(914);
const INVALID_CONFIGURATION: Status = Status(915);

/// Multiprocessors of a device.
#[derive(Clone, PartialEq)]
pub struct Sm {
    device: u32,
    first: u32,
    count: u32,
    /// Whether it came from a split; it cannot be split again.
    split: bool,
}

impl GpuGreenContexts for Software {
    type Part = Sm;
    type PartDescriptor = Sm;
    type Green = Sm;

    fn tell_part(part: &Sm) -> (u32, [u32; 3]) {
        if part.count == 0 { (0, [0; 3]) } else { (SM, [part.count, 1, 1]) }
    }

    fn device_part(&mut self, device: u32, kind: u32) -> Result<Sm> {
        if kind != SM {
            return Err(INVALID_KIND);
        }
        let count = self.device(device)?.gpu.properties().multiprocessors;
        Ok(Sm { device, first: 0, count, split: false })
    }

    fn green_part(&mut self, green: &Sm, kind: u32) -> Result<Sm> {
        if kind == SM { Ok(Sm { split: false, ..green.clone() }) } else { Err(INVALID_KIND) }
    }

    fn split_part(&mut self, sm: &Sm, groups: Option<u32>, flags: u32, least: u32) -> Result<Split<Sm>> {
        if sm.split || flags > 3 {
            return Err(INVALID_CONFIGURATION);
        }
        if least > sm.count {
            return Err(Status::INVALID_VALUE);
        }
        let each = least.max(1);
        let count = (sm.count / each).min(groups.unwrap_or(MAX_GROUPS));
        let part = |n: u32, count| Sm { first: sm.first + n * each, count, split: true, ..sm.clone() };
        let wanted = if groups.is_some() { count } else { 0 };
        let all = (0..wanted).map(|n| part(n, each)).collect();
        Ok(Split { count, groups: all, rest: part(count, sm.count - count * each) })
    }

    fn describe_parts(&mut self, parts: Vec<Sm>) -> Result<Sm> {
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
        Ok(all)
    }

    fn make_green(&mut self, device: u32, descriptor: &Sm, flags: u32) -> Result<Sm> {
        if descriptor.device != device || flags != DEFAULT_STREAM {
            return Err(Status::INVALID_VALUE);
        }
        Ok(descriptor.clone())
    }

    fn destroy_green(&mut self, _device: u32, _green: Sm) -> Result {
        Ok(())
    }

    fn forget_green(&mut self, _green: Sm) {}

    fn green_stream(
        &mut self,
        id: StreamId,
        device: u32,
        _green: &Sm,
        _priority: i32,
    ) -> Result<SoftwareStream> {
        self.new_stream(id, ContextId(device), device, false)
    }
}
