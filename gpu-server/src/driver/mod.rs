//! Executes a session's commands.
//!
//! ```text
//!  dispatcher ─▶ Backend (dyn) ─▶ Session<G>: tables, checks, quota, answers ─▶ G: Gpu ─┬▶ Cuda      NVIDIA's driver
//!                                     one file per chapter of operations            └▶ Software  the software GPU
//! ```
//!
//! In reading order:
//! - [`backend`]: what a worker runs its session on; [`call`]: one command that is being executed, and
//!   answers that are given later;
//! - [`session`]: each operation, implemented once: what the client has made, and what it may do with it;
//! - [`present`]: whether there is an NVIDIA GPU;
//! - [`gpu`]: what the session needs from a GPU, documented as a contract; [`cuda`] and [`software`]
//!   implement it and contain only what differs;
//! - [`quota`]: the owner of the session's memory limits;
//! - the session's tables: [`ids`], [`ranges`] (addresses), [`space`] (virtual memory management),
//!   [`streams`], [`parts`] (of devices), [`rows`] (boxes of rows in memory);
//! - [`helper`]: threads for calls that may take long;
//! - [`slots`]: which transfer uses which staging buffer; [`output`]: what kernels print;
//! - [`beside`]: mirrors of the client's memory, for every thread; [`express`]: the few operations that are
//!   also executed while the dispatcher is busy; [`nvml`]: NVML queries, which need no session;
//! - [`activity`]: device activity, for profilers;
//! - [`listed`]: what identifies a device; [`health`]: what can go wrong with one; [`watchdog`]: finds
//!   kernels that run too long.
//!
//! One thread, the dispatcher, calls a [`Backend`]. No call waits for the device: the GPU's threads report
//! what finishes later, through [`Pending`](call::Pending) answers and [`Errors`].

pub mod activity;
pub mod backend;
pub mod beside;
pub mod call;
pub mod cuda;
pub mod express;
pub mod gpu;
pub mod health;
pub mod helper;
pub mod ids;
pub mod listed;
pub mod nvml;
pub mod output;
pub mod parts;
pub mod present;
pub mod quota;
pub mod ranges;
pub mod rows;
pub mod session;
pub mod slots;
pub mod software;
pub mod space;
pub mod store;
pub mod streams;
pub mod watchdog;
pub mod watches;

pub use backend::Backend;
pub use beside::Beside;
pub use call::{Call, Errors};
pub use gpu::Unavailable;

use self::listed::Listed;
use self::quota::Quota;
use self::session::Session;
use crate::config::{Backend as Choice, Backing};

/// Restricts a backend from [`make`] to the devices with these numbers, before its session begins.
pub fn restrict(backend: &mut dyn Backend, backing: &Backing, quota: Quota, numbers: &[u32]) -> call::Result {
    let choice = if backend.name() == "cuda" { Choice::Cuda } else { Choice::Software };
    let backing = Backing { backend: choice, devices: numbers.to_vec(), ..backing.clone() };
    backend.restrict(numbers, nvml::Management::new(&backing, quota))
}

/// All devices behind a backend from [`make`], by number; none if each number is always the same device's.
pub fn listed(backend: &dyn Backend, backing: &Backing) -> Result<Vec<Listed>, String> {
    if backend.name() == "cuda" { cuda::listed(backing) } else { Ok(Vec::new()) }
}

/// Makes the backend that `backing` selects, for a session with this quota of device memory. It has no
/// context yet: see [`Backend::warm`].
pub fn make(backing: &Backing, quota: Quota) -> Result<Box<dyn Backend>, Unavailable> {
    let choice = match backing.backend {
        Choice::Auto => match cuda::probe() {
            Ok(count) if count > 0 => Choice::Cuda,
            Ok(_) => Choice::Software,
            Err(e) => {
                tracing::info!("no CUDA: {e}; serving software devices");
                Choice::Software
            }
        },
        chosen => chosen,
    };
    let session_backing = Backing { backend: choice, ..backing.clone() };
    let nvml = nvml::Management::new(&session_backing, quota.clone());
    match choice {
        Choice::Cuda => Ok(Box::new(Session::new(cuda::Cuda::new(backing)?, quota, nvml))),
        _ => Ok(Box::new(Session::new(software::Software::new(backing)?, quota, nvml))),
    }
}
