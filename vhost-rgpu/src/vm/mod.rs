//! One virtual machine: its vhost-user socket, and a new device for each VMM that connects.
//!
//! In reading order: [`control`] parses requests, [`device`] executes them, [`events`] wakes the guest.
//!
//! A device lives as long as one vhost-user connection. When the VMM disconnects for any reason, every session of its guest ends, the guest's memory is released, and the
//! socket accepts the next VMM.

mod control;
mod device;
mod events;

use std::os::fd::{AsFd, FromRawFd, IntoRawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use vhost::vhost_user::Listener;
use vhost_user_backend::{ShutdownHandle, VhostUserDaemon};
use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap};

use crate::config::Vm;
use crate::registry::Registry;
use crate::sockets::Listening;
use device::Device;

/// The guest's current memory, which the VMM can replace as a whole.
type GuestMemory = GuestMemoryAtomic<GuestMemoryMmap>;
/// A virtqueue of the device.
type Vring = vhost_user_backend::VringMutex<GuestMemory>;

/// The server of one virtual machine's socket.
pub struct Server {
    config: Vm,
    registry: Arc<Registry>,
    stopping: AtomicBool,
    connected: Mutex<Option<ShutdownHandle>>,
}

impl Server {
    /// A server with this configuration.
    pub fn new(config: Vm, registry: Arc<Registry>) -> Arc<Server> {
        Arc::new(Server { config, registry, stopping: AtomicBool::new(false), connected: Mutex::default() })
    }

    /// Serves one VMM after the other until [`stop`](Self::stop) is called and the socket is stopped.
    pub fn serve(&self, listening: &Listening) {
        let name = &self.config.name;
        let mut listener = match listening.as_fd().try_clone_to_owned() {
            // SAFETY: the descriptor is a fresh duplicate of a listening Unix socket, and `into_raw_fd` gives up its ownership.
            Ok(fd) => unsafe { Listener::from_raw_fd(fd.into_raw_fd()) },
            Err(e) => {
                tracing::error!("vm {name}: cannot serve the socket: {e}");
                return;
            }
        };
        while self.wait_for_vmm(listening) {
            if let Err(e) = self.serve_vmm(&mut listener) {
                if self.stopping.load(Ordering::SeqCst) {
                    return;
                }
                tracing::error!("vm {name}: {e}");
                // Most likely the process is out of descriptors or threads, which sessions return when they end.
                std::thread::sleep(Duration::from_millis(200));
            }
        }
    }

    /// Ends the current connection and accepts no other.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        if let Some(connected) = self.connected.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
            connected.shutdown();
        }
    }

    /// Waits until a VMM connects. False if the daemon ends first.
    fn wait_for_vmm(&self, listening: &Listening) -> bool {
        loop {
            if self.stopping.load(Ordering::SeqCst) {
                return false;
            }
            match listening.wait() {
                Ok(connected) => return connected && !self.stopping.load(Ordering::SeqCst),
                Err(e) => {
                    tracing::error!("vm {}: waiting for a VMM: {e}", self.config.name);
                    std::thread::sleep(Duration::from_millis(200));
                }
            }
        }
    }

    fn serve_vmm(&self, listener: &mut Listener) -> anyhow::Result<()> {
        let name = &self.config.name;
        let memory = GuestMemory::new(GuestMemoryMmap::new());
        let device = Device::new(self.config.clone(), self.registry.clone(), memory.clone())?;
        // The library's errors implement no `std::error::Error`.
        let mut daemon = VhostUserDaemon::new(format!("vhost-{name}"), device.clone(), memory)
            .map_err(|e| anyhow::anyhow!("{e}"))?;
        let workers = daemon.get_epoll_handlers();
        let result = daemon.start(listener).map_err(|e| anyhow::anyhow!("{e}"));
        if result.is_ok() {
            tracing::info!("vm {name}: a VMM has connected");
            *self.connected.lock().unwrap_or_else(PoisonError::into_inner) = daemon.shutdown_handle();
            // A `stop` before the line above found nothing to shut down.
            if self.stopping.load(Ordering::SeqCst) {
                daemon.request_shutdown();
            }
            match daemon.wait() {
                Ok(()) => tracing::info!("vm {name}: the VMM has disconnected"),
                Err(e) => tracing::warn!("vm {name}: the VMM's connection ended: {e}"),
            }
            *self.connected.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
        device.end_all("the virtual machine is gone");
        workers.iter().for_each(|worker| worker.send_exit_event());
        result
    }
}
