//! One virtual machine, as served by its device process.
//!
//! In reading order: [`control`] parses requests, [`device`] executes them, [`gate`] controls when guest
//! memory may be touched, [`budget`] counts what requests cost, [`events`] wakes the guest, [`recovery`]
//! defines what outlives the process. `fuzzing` is a guest that may do anything.
//!
//! A device lives as long as its process: until the VMM disconnects. All sessions of its guest then end, and
//! the guest's memory is released.

mod budget;
mod control;
mod device;
mod events;
#[cfg(any(test, fuzzing))]
mod fuzzing;
mod gate;
mod queue;
mod recovery;

use std::collections::BTreeMap;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;

use anyhow::{Context, Result, bail};
use vhost::vhost_user::Listener;
use vhost_user_backend::{ShutdownHandle, VhostUserDaemon};
use vm_memory::GuestMemoryMmap;

use crate::config::Vm;
use crate::link::{Control, Stored};
use crate::registry::Registry;
use device::{Device, Predecessor};
use queue::GuestMemory;
use recovery::{Requests, Store};

#[cfg(fuzzing)]
pub use fuzzing::control_any;
pub use recovery::REQUESTS_SIZE;

/// The server of one virtual machine.
pub struct Server {
    config: Vm,
    registry: Arc<Registry>,
    control: Arc<Control>,
    stored: BTreeMap<u32, Stored>,
    running: Option<Running>,
}

/// A VMM's connection.
struct Running {
    device: Arc<Device>,
    shutdown: Option<ShutdownHandle>,
    thread: JoinHandle<()>,
}

impl Server {
    /// A server with this configuration.
    pub fn new(config: Vm, registry: Arc<Registry>, control: Arc<Control>) -> Server {
        Server { config, registry, control, stored: BTreeMap::new(), running: None }
    }

    /// Takes over what a predecessor has stored for a channel.
    pub fn restore(&mut self, channel: u64, stored: Stored) {
        // It was a guest's channel, whose number has 32 bits.
        self.stored.extend(u32::try_from(channel).ok().map(|channel| (channel, stored)));
    }

    /// Serves the VMM whose messages the keeper passes on, in its own threads. `resumed` says how the
    /// predecessor ended, if there was one.
    pub fn serve(&mut self, listening: OwnedFd, requests: OwnedFd, resumed: Option<String>) -> Result<()> {
        let name = self.config.name.clone();
        if self.running.is_some() {
            bail!("vm {name} has a VMM already");
        }
        // SAFETY: the descriptor is a listening Unix socket that the keeper has sent, and `into_raw_fd` gives
        // up its ownership.
        let mut listener = unsafe { Listener::from_raw_fd(listening.into_raw_fd()) };
        let memory = GuestMemory::new(GuestMemoryMmap::new());
        let requests = Requests::map(&requests).context("mapping the memory for requests")?;
        let stored = std::mem::take(&mut self.stored);
        let predecessor = resumed.map(|how| Predecessor { how, stored });
        let store = Store::new(self.control.clone());
        let device = Device::new(
            self.config.clone(),
            self.registry.clone(),
            memory.clone(),
            store,
            requests,
            predecessor,
        )?;
        // The library's errors implement no `std::error::Error`.
        let mut daemon = VhostUserDaemon::new(format!("vhost-{name}"), device.clone(), memory)
            .map_err(|e| anyhow::anyhow!("{e}"))?;
        let workers = daemon.get_epoll_handlers();
        daemon.start(&mut listener).map_err(|e| anyhow::anyhow!("{e}"))?;
        let shutdown = daemon.shutdown_handle();
        let serve = move || {
            if let Err(e) = daemon.wait() {
                tracing::debug!("vm {name}: the connection with the keeper ended: {e}");
            }
            workers.iter().for_each(|worker| worker.send_exit_event());
        };
        let thread =
            std::thread::Builder::new().name("vm".to_owned()).spawn(serve).context("starting a thread")?;
        self.running = Some(Running { device, shutdown, thread });
        Ok(())
    }

    /// The VMM is gone, or the daemon is shutting down: ends all sessions. Returns when they have released
    /// guest memory, or after a timeout.
    pub fn stop(&mut self) {
        let Some(running) = self.running.take() else { return };
        if let Some(shutdown) = running.shutdown {
            shutdown.shutdown();
        }
        if running.thread.join().is_err() {
            tracing::error!("vm {}: the thread of the VMM's connection panicked", self.config.name);
        }
        running.device.end_all("the virtual machine is gone");
    }
}
