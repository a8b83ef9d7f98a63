//! Launches from kernels (CUDA's dynamic parallelism).
//!
//! A kernel's launches wait until its own blocks are done, and then run one after the other, each with its own; last come its
//! tail launches. That is an order that CUDA allows whatever streams they are in: a kernel cannot wait for what it launched.
//! Copies and fills from kernels have their place in that order.

use std::collections::HashMap;
use std::sync::Arc;

use crate::device::gpu::Gpu;
use crate::device::launch::{KernelRun, LaunchConfig};
use crate::device::memory::Memory;
use crate::device::module::Function;
use crate::device::transfer::Plane;
use crate::error::Error;
use crate::lower::program::FUNCTION_WINDOW;

/// Launches of a kernel that wait, at most.
const MOST: usize = 1 << 14;
/// Of them, tail launches (what `cudaLimitDevRuntimePendingLaunchCount` is if nobody says otherwise). An H200 was seen to keep to it
/// for these alone, and to know no limit for how many kernels are one inside the other.
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

/// What a kernel has launched, and what it is about to.
#[derive(Default)]
pub(crate) struct Children {
    /// By the address of the memory for their parameters.
    drafts: HashMap<u64, (Function, LaunchConfig)>,
    begun: Vec<Child>,
    tails: Vec<Child>,
}

/// What a kernel has begun that runs after it.
pub(crate) enum Child {
    Kernel(Arc<KernelRun>),
    Transfer(Transfer),
}

/// A copy or a fill, of `height` rows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Transfer {
    pub to: Plane,
    pub from: Source,
    pub width: u64,
    pub height: u64,
}

/// Where the bytes of a [`Transfer`] come from.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Source {
    Memory(Plane),
    Value(u8),
}

impl Transfer {
    /// Whether all rows lie in memory that is there.
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

    /// Does it.
    pub fn run(&self, gpu: &Gpu) -> Result<(), Error> {
        match self.from {
            Source::Memory(from) => gpu.copy_2d(self.to, from, self.width, self.height),
            Source::Value(value) => gpu.fill_2d(self.to, value.into(), 1, self.width, self.height),
        }
    }
}

impl Children {
    /// Launches and transfers that have not run.
    fn waiting(&self) -> usize {
        self.drafts.len() + self.begun.len() + self.tails.len()
    }

    /// Those that run with a stream's.
    fn list(&mut self, stream: u64) -> &mut Vec<Child> {
        if stream == TAIL { &mut self.tails } else { &mut self.begun }
    }
}

/// The runtime's number for a launch that cannot be.
fn refusal(error: &Error) -> u32 {
    match error {
        Error::InvalidArgument(_) | Error::LaunchOutOfResources(_) => INVALID_CONFIGURATION,
        other => other.cuda_code(),
    }
}

impl KernelRun {
    /// Memory for the parameters of a launch; the error is the runtime's.
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
        let child = KernelRun::new(&gpu, &function, config, &bytes).map_err(|e| refusal(&e))?;
        if stream == TAIL && children.tails.len() >= MOST_TAILS {
            return Err(PENDING_COUNT_EXCEEDED);
        }
        children.list(stream).push(Child::Kernel(Arc::new(child)));
        Ok(())
    }

    /// Begins a copy or a fill; the error is the runtime's.
    pub fn transfer(&self, transfer: Transfer, stream: u64) -> Result<(), u32> {
        let mut children = self.children();
        if children.waiting() >= MOST {
            return Err(PENDING_COUNT_EXCEEDED);
        }
        children.list(stream).push(Child::Transfer(transfer));
        Ok(())
    }

    /// What it has launched, the last first.
    pub fn take_children(&self) -> Vec<Child> {
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
