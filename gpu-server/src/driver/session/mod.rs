//! A session: what a client has made, and the operations on it, implemented once for every [`Gpu`].
//!
//! The session keeps tables of what the client can name, checks each command against them, charges quotas,
//! calls the GPU, and answers.
//!
//! - [`context`]: devices and contexts; [`stream`]: streams and events;
//! - [`windows`] and [`memory`]: the windows of device memory, [`space`](super::space), and memory shared
//!   with other sessions; [`swap`]: moves a session's memory off its devices and back;
//! - [`copy`]: copies and fills; [`direct`]: copies from and to other servers;
//! - [`module`]: modules, their functions, launches, and the linker; [`graph`]: graphs;
//! - [`array`]: arrays, textures and surfaces; [`texture`]: tensor maps; [`green`]: green contexts;
//! - [`activity`]: device activity; [`nvml`]: NVML queries.

mod activity;
mod array;
mod context;
mod copy;
mod direct;
mod graph;
mod green;
mod memory;
mod module;
mod nvml;
mod stream;
mod swap;
mod texture;
mod windows;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use host_bridge::endpoint::Client;
use protocol::Status;
use protocol::handle::{EventId, StreamId};

use super::activity::Activity;
use super::backend::Backend;
use super::beside::Beside;
use super::call::{Call, End, Result};
use super::gpu::{Gpu, Unavailable};
use super::helper::Helper;
use super::ids::Ids;
use super::nvml::Management;
use super::quota::{Charge, Quota};
use super::space::Space;
use super::store::Store;
use super::streams::{Event, Streams};
use super::watchdog::Watchdog;
use crate::cuda_ipc::Broker;
use crate::direct::{Directs, Still};

use self::array::Arrays;
use self::graph::Graphs;
use self::green::Greens;
use self::module::Modules;
use self::windows::{HostView, Window};

/// See the module's documentation.
pub struct Session<G: Gpu> {
    gpu: G,
    /// The devices' windows, by ordinal.
    windows: Vec<Window<G::Piece>>,
    /// Numbers on this server of the devices that the client may use and has not selected. Nothing is made
    /// on them, but memory of theirs that other sessions share can be opened.
    hidden: Vec<u32>,
    /// Memory without an address, and where it is mapped.
    space: Space<G::Memory>,
    /// Client memory that devices access, by its address in the client.
    host_views: HashMap<u64, HostView<G::HostView>>,
    quota: Quota,
    /// Releases device memory; started with the first that is released.
    releases: Option<Helper>,
    /// The connection to the client's other sessions.
    broker: Option<Arc<Broker>>,
    /// The connection to other servers.
    directs: Option<Arc<Directs>>,
    /// While memory is off the devices, nothing but the dispatcher copies it.
    still: Option<Still>,
    /// Why memory is neither whole on its device nor whole in the store: moving it failed, and could not be
    /// undone. No command may use it.
    torn: Option<Status>,
    /// Where memory without an address is mapped as a whole while it moves, by its number.
    whole: HashMap<u32, u64>,
    /// Charges for limits of contexts, by context and limit.
    limits: HashMap<(u32, u32), Charge>,
    /// Devices of the contexts made by the program.
    made_contexts: HashMap<u32, u32>,
    streams: Streams<G::Stream>,
    /// Pieces of work given to each stream since its last fence.
    worked: Ids<u64>,
    /// Finds kernels that run too long.
    watchdog: Option<Arc<Watchdog>>,
    events: Ids<Event<G::Event>>,
    modules: Modules<G>,
    graphs: Graphs<G>,
    arrays: Arrays<G>,
    greens: Greens<G>,
    /// Device activity, since recording was last started.
    activity: Option<Arc<Activity>>,
    /// Answers NVML queries, independently of everything else.
    nvml: Management,
}

impl<G: Gpu> Session<G> {
    /// A session on these devices.
    pub fn new(gpu: G, quota: Quota, nvml: Management) -> Session<G> {
        Session {
            windows: (0..).zip(gpu.names()).map(|(number, _)| Window::new(number)).collect(),
            hidden: Vec::new(),
            gpu,
            space: Space::default(),
            host_views: HashMap::new(),
            quota,
            releases: None,
            broker: None,
            directs: None,
            still: None,
            torn: None,
            whole: HashMap::new(),
            limits: HashMap::new(),
            made_contexts: HashMap::new(),
            streams: Streams::default(),
            worked: Ids::default(),
            watchdog: None,
            events: Ids::default(),
            modules: Modules::default(),
            graphs: Graphs::default(),
            arrays: Arrays::default(),
            greens: Greens::default(),
            activity: None,
            nvml,
        }
    }
}

impl<G: Gpu> Backend for Session<G> {
    fn name(&self) -> &'static str {
        G::NAME
    }

    fn devices(&self) -> Vec<String> {
        self.gpu.names()
    }

    fn reaches_pageable_memory(&self) -> bool {
        self.gpu.reaches_pageable_memory()
    }

    fn warm(&mut self) -> Result<Option<u64>, Unavailable> {
        self.gpu.warm()
    }

    fn restrict(&mut self, numbers: &[u32], nvml: Management) -> Result {
        let all: Vec<u32> = (0..self.windows.len() as u32).map(|ordinal| self.gpu.number(ordinal)).collect();
        let ordinal_of = |number: &u32| all.iter().position(|other| other == number).map(|at| at as u32);
        let ordinals: Option<Vec<u32>> = numbers.iter().map(ordinal_of).collect();
        let ordinals = ordinals.filter(|some| !some.is_empty()).ok_or(Status::INVALID_DEVICE)?;
        self.nvml = nvml;
        if !ordinals.iter().copied().eq(0..all.len() as u32) {
            let windows: Vec<u32> = (0..ordinals.len() as u32).collect();
            self.clear_windows(&windows);
            self.gpu.select(&ordinals, &windows)?;
        }
        Ok(())
    }

    fn begin(&mut self, client: Arc<dyn Client>) {
        self.gpu.begin(&client);
    }

    fn watch(&mut self, watchdog: Arc<Watchdog>) {
        self.watchdog = Some(watchdog);
    }

    fn share(&mut self, broker: Arc<Broker>) {
        self.broker = Some(broker);
    }

    fn reach(&mut self, directs: Arc<Directs>) {
        if directs.sends_in_place() {
            self.gpu.prepare_in_place();
        }
        self.directs = Some(directs);
    }

    fn fence_work(&mut self, call: &mut Call, end: &mut dyn FnMut(u64) -> End) {
        let mut worked = std::mem::take(&mut self.worked);
        for (id, pieces) in worked.drain() {
            // If it fails, `end` is dropped: the stream no longer exists, or its context has failed.
            let _ = self.gpu.after_stream(call, &mut self.streams, StreamId(id), end(pieces));
        }
        self.worked = worked;
    }

    fn record(&mut self, call: &mut Call) -> Option<Arc<Activity>> {
        self.record_activity(call).ok()
    }

    fn mark_work(&mut self, command: Option<(u64, StreamId)>) {
        self.gpu.mark_work(command);
    }

    fn flush_activity(&mut self) {
        self.gpu.flush_activity();
    }

    fn after_work(&mut self, call: &mut Call, stream: StreamId, end: End) {
        // If it fails, `end` is dropped, as above.
        let _ = self.gpu.after_stream(call, &mut self.streams, stream, end);
    }

    fn renew_event(&mut self, event: EventId, old: EventId) -> bool {
        self.set_event_aside(event, old).is_ok()
    }

    fn end_event(&mut self, old: EventId) {
        if let Some(event) = self.events.remove(&old.0) {
            // If its context has failed, that is known.
            let _ = self.gpu.destroy_event(event.context, event.native);
        }
    }

    fn leave(
        &mut self,
        call: &mut Call,
        store: &mut Store,
        file: Option<OwnedFd>,
        patience: Duration,
    ) -> Result {
        self.leave_devices(call, store, file, patience)
    }

    fn come_back(&mut self, store: &mut Store) -> Result {
        self.come_back_to_devices(store)
    }

    fn is_away(&self) -> bool {
        self.has_left()
    }

    fn torn(&self) -> Option<Status> {
        self.torn
    }

    fn clear(&mut self, store: &mut Store) {
        store.clear(|chunk| self.gpu.unlock(chunk));
    }

    fn beside(&self) -> Arc<dyn Beside> {
        Arc::<G::Beside>::clone(self.gpu.beside())
    }

    fn end(&mut self) {
        self.gpu.end(&mut self.streams);
    }
}

/// An operation's immediate answer.
fn now<R>(reply: R) -> Result<protocol::ops::Answer<R>> {
    Ok(protocol::ops::Answer::Now(reply))
}
