//! What a worker runs its session on, whatever GPUs are behind it.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use host_bridge::endpoint::Client;
use protocol::Status;
use protocol::handle::{EventId, StreamId};

use super::activity::Activity;
use super::beside::Beside;
use super::call::{self, Call, End};
use super::gpu::Unavailable;
use super::nvml;
use super::store::Store;
use super::watchdog::Watchdog;
use crate::cuda_ipc::Broker;
use crate::direct::Directs;

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
    /// finished, or never will be. Work means kernels, graphs, fills and copies on a device. A fence orders
    /// no work, also on a legacy default stream.
    fn fence_work(&mut self, call: &mut Call, end: &mut dyn FnMut(u64) -> End);

    /// Starts recording device activity for this process, like [`protocol::ops::activity::ActivityStart`] but
    /// without a client. `None`: not supported.
    fn record(&mut self, call: &mut Call) -> Option<Arc<Activity>>;

    /// What the dispatcher gives the devices from now on belongs to this command on this stream, or to no
    /// command. Called only while activity is recorded ([`Call::records_activity`]).
    fn mark_work(&mut self, command: Option<(u64, StreamId)>);

    /// Makes sure that everything the devices have done is recorded.
    fn flush_activity(&mut self);

    /// Calls `end` when everything on a stream so far is finished, or never will be.
    fn after_work(&mut self, call: &mut Call, stream: StreamId, end: End);

    /// Gives an event's ID to a new event of the same kind, and another ID, which is not in use, to the event
    /// that had it, with its last record. Returns false, and changes nothing, if that is not possible, as for
    /// an event that other processes know.
    fn renew_event(&mut self, event: EventId, old: EventId) -> bool;

    /// Destroys an event that was given another ID.
    fn end_event(&mut self, old: EventId);

    /// Moves the session's movable memory off its devices into `store`: to `file`, or to memory. Call this
    /// between two commands. Waits up to `patience` until no device works for the session. No command may be
    /// executed until [`come_back`](Backend::come_back) has succeeded. What has left before stays in the
    /// store.
    ///
    /// # Errors
    /// `NOT_READY` if a device is still working; otherwise what went wrong. What has not been moved stays in
    /// place, and what has been moved is in `store`. A later call moves the rest.
    fn leave(
        &mut self,
        call: &mut Call,
        store: &mut Store,
        file: Option<OwnedFd>,
        patience: Duration,
    ) -> call::Result;

    /// Moves everything that [`leave`](Backend::leave) moved back to the same addresses.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY` if a device has no room; otherwise what went wrong. Everything that had left is then
    /// in `store`.
    fn come_back(&mut self, store: &mut Store) -> call::Result;

    /// Whether any memory is in a store.
    fn is_away(&self) -> bool;

    /// Set after an error that could not be undone: memory is neither whole where it belongs nor whole in the
    /// store. No further command may be executed.
    fn torn(&self) -> Option<Status>;

    /// Releases a store's memory. The store is empty.
    fn clear(&mut self, store: &mut Store);

    /// The operations that may be executed next to the dispatcher.
    fn beside(&self) -> Arc<dyn Beside>;

    /// The client has left: releases every thread that waits for it. Called once, after the last command; the
    /// process ends soon after.
    fn end(&mut self);
}
