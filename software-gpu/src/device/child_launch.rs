//! Launches from kernels (CUDA dynamic parallelism).
//!
//! A kernel's child launches wait until its own blocks have finished. They then run one after the other, each
//! followed by its own children; tail launches come last. CUDA allows this order for any choice of streams,
//! because a kernel cannot wait for its children. Copies and fills from kernels are ordered with the
//! launches.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::device::launch::KernelRun;
use crate::device::module::{Function, Module};
use crate::error::Error;
use crate::machine::hardware::{Allocation, Hardware};
use crate::machine::launcher::{INVALID_VALUE, LaunchConfig, Launcher, MEMORY_ALLOCATION, Transfer};

/// The most child launches of a kernel that can be pending.
const MOST: usize = 1 << 14;
/// The most pending tail launches, which is the default of `cudaLimitDevRuntimePendingLaunchCount`. An H200
/// applies that limit to tail launches only, and does not limit the nesting depth.
const MOST_TAILS: usize = 2048;
/// `cudaStreamTailLaunch`.
const TAIL: u64 = 3;
/// `cudaErrorInvalidConfiguration`, `cudaErrorLaunchPendingCountExceeded`, `cudaErrorInvalidDeviceFunction`.
const INVALID_CONFIGURATION: u32 = 9;
const PENDING_COUNT_EXCEEDED: u32 = 69;
const INVALID_FUNCTION: u32 = 98;

/// Work that a kernel has started and that runs after it.
pub(crate) enum Child {
    Kernel(Arc<KernelRun>),
    Transfer(Transfer),
}

/// What a kernel has started, and what it is preparing.
pub(crate) struct Children {
    hardware: Arc<Hardware>,
    /// The module whose functions it may launch.
    module: Module,
    pending: Mutex<Pending>,
}

#[derive(Default)]
struct Pending {
    /// Launches in preparation, by the address of their parameter buffer.
    drafts: HashMap<u64, (Allocation, Function, LaunchConfig)>,
    begun: Vec<Child>,
    tails: Vec<Child>,
}

impl Pending {
    /// The number of launches and transfers that have not run.
    fn count(&self) -> usize {
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

impl Children {
    /// Nothing yet, for a kernel of this module.
    pub fn new(hardware: Arc<Hardware>, module: Module) -> Children {
        Children { hardware, module, pending: Mutex::default() }
    }

    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// What the kernel has started, the latest first.
    pub fn take(&self) -> Vec<Child> {
        let mut pending = self.pending();
        let mut all = std::mem::take(&mut pending.begun);
        all.append(&mut pending.tails);
        all.reverse();
        all
    }
}

impl Launcher for Children {
    fn draft(&self, function: u64, config: LaunchConfig) -> Result<u64, u32> {
        let function = self.module.kernel_at(function).ok_or(INVALID_FUNCTION)?;
        let mut pending = self.pending();
        if pending.count() >= MOST {
            return Err(PENDING_COUNT_EXCEEDED);
        }
        let bytes = u64::from(function.info().param_bytes);
        let buffer = self.hardware.allocate(bytes).map_err(|_| MEMORY_ALLOCATION)?;
        let address = buffer.address;
        pending.drafts.insert(address, (buffer, function, config));
        Ok(address)
    }

    fn launch(&self, parameters: u64, stream: u64) -> Result<(), u32> {
        let mut pending = self.pending();
        let (buffer, function, config) = pending.drafts.remove(&parameters).ok_or(INVALID_VALUE)?;
        let mut bytes = vec![0u8; function.info().param_bytes as usize];
        // Cannot fail: the buffer was allocated with this size.
        let _ = self.hardware.memory.read(parameters, &mut bytes);
        drop(buffer);
        let child = KernelRun::new(&self.hardware, &function, config, &bytes).map_err(|e| refusal(&e))?;
        if stream == TAIL && pending.tails.len() >= MOST_TAILS {
            return Err(PENDING_COUNT_EXCEEDED);
        }
        pending.list(stream).push(Child::Kernel(Arc::new(child)));
        Ok(())
    }

    fn transfer(&self, transfer: Transfer, stream: u64) -> Result<(), u32> {
        let mut pending = self.pending();
        if pending.count() >= MOST {
            return Err(PENDING_COUNT_EXCEEDED);
        }
        pending.list(stream).push(Child::Transfer(transfer));
        Ok(())
    }
}
