//! Launches from kernels (CUDA's dynamic parallelism).
//!
//! A kernel's launches wait until its own blocks are done, and then run one after the other, each with its own; last come its
//! tail launches. That is an order that CUDA allows whatever streams they are in: a kernel cannot wait for what it launched.

use std::collections::HashMap;
use std::sync::Arc;

use crate::device::gpu::Gpu;
use crate::device::launch::{KernelRun, LaunchConfig};
use crate::device::module::Function;
use crate::error::Error;
use crate::lower::program::FUNCTION_WINDOW;

/// Launches of a kernel that wait, at most.
const MOST: usize = 1 << 14;
/// Kernels that may be one inside the other, the first not counted; a tail is not inside the one that launched it.
const DEPTH: u32 = 24;
/// `cudaStreamTailLaunch`.
const TAIL: u64 = 3;
/// `cudaErrorMemoryAllocation`, `cudaErrorInvalidConfiguration`, `cudaErrorLaunchMaxDepthExceeded`,
/// `cudaErrorLaunchPendingCountExceeded`, `cudaErrorInvalidDeviceFunction`.
const MEMORY_ALLOCATION: u32 = 2;
const INVALID_CONFIGURATION: u32 = 9;
const MAX_DEPTH_EXCEEDED: u32 = 65;
const PENDING_COUNT_EXCEEDED: u32 = 69;
const INVALID_FUNCTION: u32 = 98;
/// `cudaErrorInvalidValue`.
pub(crate) const INVALID_VALUE: u32 = 1;

/// What a kernel has launched, and what it is about to.
#[derive(Default)]
pub(crate) struct Children {
    /// By the address of the memory for their parameters.
    drafts: HashMap<u64, (Function, LaunchConfig)>,
    begun: Vec<Arc<KernelRun>>,
    tails: Vec<Arc<KernelRun>>,
}

/// The runtime's number for a launch that cannot be.
fn refusal(error: &Error) -> u32 {
    match error {
        Error::InvalidArgument(_) => INVALID_CONFIGURATION,
        other => other.cuda_code(),
    }
}

impl KernelRun {
    /// Memory for the parameters of a launch; the error is the runtime's.
    pub fn draft(&self, function: u64, config: LaunchConfig) -> Result<u64, u32> {
        let index = function.wrapping_sub(FUNCTION_WINDOW) / 16;
        let function = self.module.kernel_at(index as usize).ok_or(INVALID_FUNCTION)?;
        let mut children = self.children();
        if children.drafts.len() + children.begun.len() + children.tails.len() >= MOST {
            return Err(PENDING_COUNT_EXCEEDED);
        }
        let bytes = u64::from(function.info().param_bytes);
        let address = self.gpu.memory.allocate_module(bytes).map_err(|_| MEMORY_ALLOCATION)?;
        children.drafts.insert(address, (function, config));
        Ok(address)
    }

    /// Launches what [`KernelRun::draft`] began; the error is the runtime's.
    pub fn launch_child(&self, parameters: u64, stream: u64) -> Result<(), u32> {
        let mut children = self.children();
        let (function, config) = children.drafts.remove(&parameters).ok_or(INVALID_VALUE)?;
        let mut bytes = vec![0u8; function.info().param_bytes as usize];
        if let Ok(host) = self.gpu.memory.host_range(parameters, bytes.len() as u64) {
            // SAFETY: `host_range` answers for the bytes, which are this launch's until they are given back below.
            unsafe { std::ptr::copy_nonoverlapping(host, bytes.as_mut_ptr(), bytes.len()) };
        }
        // It came from the allocator and is given back once.
        let _ = self.gpu.memory.free_module(parameters);
        let gpu = Gpu { inner: Arc::clone(&self.gpu) };
        let mut child = KernelRun::new(&gpu, &function, config, &bytes).map_err(|e| refusal(&e))?;
        child.depth = self.depth + u32::from(stream != TAIL);
        if child.depth > DEPTH {
            return Err(MAX_DEPTH_EXCEEDED);
        }
        let list = if stream == TAIL { &mut children.tails } else { &mut children.begun };
        list.push(Arc::new(child));
        Ok(())
    }

    /// What it has launched, the last first.
    pub fn take_children(&self) -> Vec<Arc<KernelRun>> {
        let mut children = self.children();
        let mut all = std::mem::take(&mut children.begun);
        all.append(&mut children.tails);
        all.reverse();
        all
    }

    /// Gives back memory for parameters of launches that were never made.
    pub fn forget_drafts(&self) {
        for address in std::mem::take(&mut self.children().drafts).into_keys() {
            // It came from the allocator and is given back once.
            let _ = self.gpu.memory.free_module(address);
        }
    }
}
