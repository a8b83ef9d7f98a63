//! Launches from kernels (CUDA dynamic parallelism).
//!
//! A kernel's child launches wait until its own blocks have finished. They then run one after the other, each
//! followed by its own children; tail launches come last. CUDA allows this order for any choice of streams,
//! because a kernel cannot wait for its children. Copies and fills from kernels are ordered with the
//! launches.

use std::collections::HashMap;
use std::sync::Arc;

use crate::device::copy::Plane;
use crate::device::gpu::Gpu;
use crate::device::launch::{KernelRun, LaunchConfig};
use crate::device::memory::Memory;
use crate::device::module::Function;
use crate::error::Error;
use crate::lower::program::FUNCTION_WINDOW;

/// The most child launches of a kernel that can be pending.
const MOST: usize = 1 << 14;
/// The most pending tail launches, which is the default of `cudaLimitDevRuntimePendingLaunchCount`. An H200
/// applies that limit to tail launches only, and does not limit the nesting depth.
const MOST_TAILS: usize = 2048;
/// `cudaStreamTailLaunch`.
const TAIL: u64 = 3;
/// `cudaErrorMemoryAllocation`, `cudaErrorInvalidConfiguration`,
/// `cudaErrorLaunchPendingCountExceeded`, `cudaErrorInvalidDeviceFunction`.
pub(crate) const MEMORY_ALLOCATION: u32 = 2;
const INVALID_CONFIGURATION: u32 = 9;
const PENDING_COUNT_EXCEEDED: u32 = 69;
const INVALID_FUNCTION: u32 = 98;
/// `cudaErrorInvalidValue`.
pub(crate) const INVALID_VALUE: u32 = 1;

/// The launches that a kernel has made, and those that it is preparing.
#[derive(Default)]
pub(crate) struct Children {
    /// Launches in preparation, by the address of their parameter buffer.
    drafts: HashMap<u64, (Function, LaunchConfig)>,
    begun: Vec<Child>,
    tails: Vec<Child>,
}

/// Work that a kernel has started and that runs after it.
pub(crate) enum Child {
    Kernel(Arc<KernelRun>),
    Transfer(Transfer),
}

/// A copy or fill of `height` rows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Transfer {
    pub to: Plane,
    pub from: Source,
    pub width: u64,
    pub height: u64,
}

/// The source of a [`Transfer`]'s bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Source {
    Memory(Plane),
    Value(u8),
}

impl Transfer {
    /// Whether all rows are in accessible memory.
    pub fn is_inside(&self, memory: &Memory) -> bool {
        let there = |plane: Plane| {
            let last = self.height.saturating_sub(1).checked_mul(plane.pitch);
            let end = last.and_then(|last| last.checked_add(self.width));
            let nothing = self.width == 0 || self.height == 0;
            nothing || end.is_some_and(|bytes| memory.host_range(plane.addr, bytes).is_ok())
        };
        there(self.to)
            && match self.from {
                Source::Memory(from) => there(from),
                Source::Value(_) => true,
            }
    }

    /// Runs the transfer.
    pub fn run(&self, gpu: &Gpu) -> Result<(), Error> {
        match self.from {
            Source::Memory(from) => gpu.copy_2d(self.to, from, self.width, self.height),
            Source::Value(value) => gpu.fill_2d(self.to, value.into(), 1, self.width, self.height),
        }
    }
}

impl Children {
    /// The number of launches and transfers that have not run.
    fn waiting(&self) -> usize {
        self.drafts.len() + self.begun.len() + self.tails.len()
    }

    /// The list for a stream.
    fn list(&mut self, stream: u64) -> &mut Vec<Child> {
        if stream == TAIL { &mut self.tails } else { &mut self.begun }
    }
}

/// The runtime's error code for an invalid launch.
fn refusal(error: &Error) -> u32 {
    match error {
        Error::InvalidArgument(_) | Error::LaunchOutOfResources(_) => INVALID_CONFIGURATION,
        other => other.cuda_code(),
    }
}

impl KernelRun {
    /// Allocates a parameter buffer for a launch. The error is one of the runtime's codes.
    pub fn draft(&self, function: u64, config: LaunchConfig) -> Result<u64, u32> {
        let index = function.wrapping_sub(FUNCTION_WINDOW) / 16;
        let function = self.module.kernel_at(index as usize).ok_or(INVALID_FUNCTION)?;
        let mut children = self.children();
        if children.waiting() >= MOST {
            return Err(PENDING_COUNT_EXCEEDED);
        }
        let bytes = u64::from(function.info().param_bytes);
        let address = self.gpu.memory.allocate_module(bytes).map_err(|_| MEMORY_ALLOCATION)?;
        children.drafts.insert(address, (function, config));
        Ok(address)
    }

    /// Makes the launch that [`KernelRun::draft`] prepared. The error is one of the runtime's codes.
    pub fn launch_child(&self, parameters: u64, stream: u64) -> Result<(), u32> {
        let mut children = self.children();
        let (function, config) = children.drafts.remove(&parameters).ok_or(INVALID_VALUE)?;
        let mut bytes = vec![0u8; function.info().param_bytes as usize];
        if let Ok(host) = self.gpu.memory.host_range(parameters, bytes.len() as u64) {
            // SAFETY: `host_range` has checked the bytes, which belong to this launch until freed below.
            unsafe { std::ptr::copy_nonoverlapping(host, bytes.as_mut_ptr(), bytes.len()) };
        }
        // Cannot fail: the allocator returned this address, and it is freed once.
        let _ = self.gpu.memory.free_module(parameters);
        let gpu = Gpu { inner: Arc::clone(&self.gpu) };
        let child = KernelRun::new(&gpu, &function, config, &bytes).map_err(|e| refusal(&e))?;
        if stream == TAIL && children.tails.len() >= MOST_TAILS {
            return Err(PENDING_COUNT_EXCEEDED);
        }
        children.list(stream).push(Child::Kernel(Arc::new(child)));
        Ok(())
    }

    /// Starts a copy or fill. The error is one of the runtime's codes.
    pub fn transfer(&self, transfer: Transfer, stream: u64) -> Result<(), u32> {
        let mut children = self.children();
        if children.waiting() >= MOST {
            return Err(PENDING_COUNT_EXCEEDED);
        }
        children.list(stream).push(Child::Transfer(transfer));
        Ok(())
    }

    /// The children that it has launched, the latest first.
    pub fn take_children(&self) -> Vec<Child> {
        let mut children = self.children();
        let mut all = std::mem::take(&mut children.begun);
        all.append(&mut children.tails);
        all.reverse();
        all
    }

    /// Frees the parameter buffers of launches that were prepared but never made.
    pub fn forget_drafts(&self) {
        for address in std::mem::take(&mut self.children().drafts).into_keys() {
            // Cannot fail: the allocator returned this address, and it is freed once.
            let _ = self.gpu.memory.free_module(address);
        }
    }
}
