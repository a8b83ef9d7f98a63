//! Executes a session's commands.
//!
//! ```text
//!  dispatcher ─▶ Backend (dyn) ─▶ Session<G>: tables, checks, quota, answers ─▶ G: Gpu ─┬▶ Cuda      NVIDIA's driver
//!                                     one file per chapter of operations            └▶ Software  the software GPU
//! ```
//!
//! In reading order:
//! - [`call`]: one command that is being executed, and answers that are given later;
//! - [`session`]: each operation, implemented once: what the client has made, and what it may do with it;
//! - [`gpu`]: what the session needs from a GPU, documented as a contract; [`cuda`] and [`software`]
//!   implement it and contain only what differs;
//! - [`quota`]: the owner of the session's memory limits;
//! - the session's tables: [`ids`], [`ranges`] (addresses), [`space`] (virtual memory management),
//!   [`streams`], [`parts`] (of devices), [`rows`] (boxes of rows in memory);
//! - [`slots`]: which transfer uses which staging buffer; [`output`]: what kernels print;
//! - [`beside`]: the few operations that are also executed while the dispatcher is busy; [`nvml`]: NVML
//!   queries, which need no session;
//! - [`activity`]: device activity, for profilers;
//! - [`health`]: what can go wrong with a device; [`watchdog`]: finds kernels that run too long.
//!
//! One thread, the dispatcher, calls a [`Backend`]. No call waits for the device: the GPU's threads report
//! what finishes later, through [`Pending`](call::Pending) answers and [`Errors`].

pub mod activity;
pub mod beside;
pub mod call;
pub mod cuda;
pub mod gpu;
pub mod health;
pub mod ids;
pub mod nvml;
pub mod output;
pub mod parts;
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

pub use beside::Beside;
pub use call::{Call, Errors};

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use host_bridge::endpoint::Client;
use protocol::Status;
use protocol::handle::StreamId;

use self::activity::Activity;
use self::quota::Quota;
use self::session::Session;
use self::store::Store;
use self::watchdog::Watchdog;
use crate::config::{Backend as Choice, Backing};
use crate::cuda_ipc::Broker;
use crate::direct::Directs;

/// Called with success when the awaited work is done, or else with the error.
pub type End = Box<dyn FnOnce(Status) + Send>;

/// What a worker runs its session on.
pub trait Backend: protocol::ops::Driver<Call> + Send {
    /// `cuda` or `software`.
    fn name(&self) -> &'static str;

    /// Names of the devices, by ordinal.
    fn devices(&self) -> Vec<String>;

    /// Whether kernels can access all memory of this process, not only what CUDA has allocated or registered,
    /// on any of the devices.
    fn reaches_pageable_memory(&self) -> bool;

    /// Prepares what nearly every session needs: the first device's context. Called at most once, before
    /// [`Backend::begin`]. Without this call, a context is made when a session needs it. Returns the free
    /// bytes left on that device, if known.
    fn warm(&mut self) -> Result<Option<u64>, Unavailable>;

    /// Restricts the session, and what NVML reports, to the devices with these numbers, in this order. Called
    /// at most once, before [`Backend::begin`].
    fn restrict(&mut self, numbers: &[u32], nvml: nvml::Management) -> call::Result;

    /// A client has connected. Called once, before the first command.
    fn begin(&mut self, client: Arc<dyn Client>);

    /// Enables the watchdog for kernels and for graphs launched as a whole. Called at most once, before
    /// [`Backend::begin`].
    fn watch(&mut self, watchdog: Arc<Watchdog>);

    /// Sets the connection to the client's other sessions. Called once, before [`Backend::begin`].
    fn share(&mut self, broker: Arc<Broker>);

    /// Sets the connection to workers on other servers. Called at most once, before [`Backend::begin`].
    fn reach(&mut self, directs: Arc<Directs>);

    /// Puts a fence on each stream that has been given work since its last fence from here: `end`, given the
    /// number of pieces of work, returns a function that is called when everything on that stream so far is
    /// finished, or never will be. Work means kernels, graphs, fills and copies on a device.
    ///
    /// A fence on a legacy default stream orders the work of other streams. With `gently`, such a stream is
    /// left for a later call if its context has streams that it is ordered with.
    fn fence_work(&mut self, call: &mut Call, gently: bool, end: &mut dyn FnMut(u64) -> End);

    /// Starts recording device activity for this process, like [`protocol::ops::activity::ActivityStart`] but
    /// without a client. `None`: not supported.
    fn record(&mut self, call: &mut Call) -> Option<Arc<Activity>>;

    /// What the dispatcher gives the devices from now on belongs to this command on this stream, or to no
    /// command. Called only while activity is recorded ([`Call::records_activity`]).
    fn mark_work(&mut self, command: Option<(u64, StreamId)>);

    /// Makes sure that everything the devices have done is recorded.
    fn flush_activity(&mut self);

    /// Calls `end` when everything on a stream so far is finished, or never will be. On a legacy default
    /// stream this orders the work of other streams, like any operation there.
    fn after_work(&mut self, call: &mut Call, stream: StreamId, end: End);

    /// Moves the session's movable memory off its devices into `store`: the memory in its windows that it
    /// shares with no other session. Call this between two commands. Waits up to `patience` until no device
    /// works for the session. No command may be executed until [`come_back`](Backend::come_back) has
    /// succeeded. Returns the number of bytes moved.
    ///
    /// # Errors
    /// `NOT_READY` if a device is still working; otherwise what went wrong. What has not been moved stays in
    /// place, and what has been moved is in `store`.
    fn leave(
        &mut self,
        call: &mut Call,
        store: &mut Store,
        file: Option<OwnedFd>,
        patience: Duration,
    ) -> call::Result<u64>;

    /// Moves everything that [`leave`](Backend::leave) moved back to the same addresses. Returns the number
    /// of bytes.
    ///
    /// # Errors
    /// An error if a device has no room. Everything is then in `store`.
    fn come_back(&mut self, store: &mut Store) -> call::Result<u64>;

    /// Whether any memory is in a store.
    fn is_away(&self) -> bool;

    /// Releases a store's memory. The store is empty.
    fn clear(&mut self, store: &mut Store);

    /// The operations that may be executed next to the dispatcher.
    fn beside(&self) -> Arc<dyn Beside>;

    /// The client has left: releases every thread that waits for it. Called once, after the last command; the
    /// process ends soon after.
    fn end(&mut self);
}

/// Why a worker cannot serve.
#[derive(Debug)]
pub struct Unavailable {
    /// In one line.
    pub reason: String,
    /// A device has too little memory for a context, until something else ends.
    pub full: bool,
}

impl From<String> for Unavailable {
    fn from(reason: String) -> Unavailable {
        Unavailable { reason, full: false }
    }
}

/// Restricts a backend from [`make`] to the devices with these numbers, before its session begins.
pub fn restrict(backend: &mut dyn Backend, backing: &Backing, quota: Quota, numbers: &[u32]) -> call::Result {
    let choice = if backend.name() == "cuda" { Choice::Cuda } else { Choice::Software };
    let backing = Backing { backend: choice, devices: numbers.to_vec(), ..backing.clone() };
    backend.restrict(numbers, nvml::Management::new(&backing, quota))
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
        Choice::Cuda => {
            Ok(Box::new(Session::new(cuda::Cuda::new(&backing.devices, backing.cupti.clone())?, quota, nvml)))
        }
        _ => Ok(Box::new(Session::new(software::Software::new(backing)?, quota, nvml))),
    }
}
