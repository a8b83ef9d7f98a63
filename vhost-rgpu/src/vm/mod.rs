//! One virtual machine: its vhost-user socket, and a fresh device for each VMM that connects there.
//!
//! In reading order: [`control`] judges requests, [`device`] acts on them, [`events`] tells the guest.
//!
//! A device lives as long as one vhost-user connection. When the VMM goes, however it goes, every session of its guest ends, the guest's memory is let go, and the
//! socket takes the next VMM.

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

/// Guest memory as it is now: replaced as a whole when the VMM says so.
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
    /// A server of this configuration.
    pub fn new(config: Vm, registry: Arc<Registry>) -> Arc<Server> {
        Arc::new(Server { config, registry, stopping: AtomicBool::new(false), connected: Mutex::default() })
    }

    /// Serves one VMM after the other until [`stop`](Self::stop) is called and the socket is stopped.
    pub fn serve(&self, listening: &Listening) {
        let name = &self.config.name;
        let mut listener = match listening.as_fd().try_clone_to_owned() {
            // SAFETY: the descriptor is a listening Unix socket that nobody else owns.
            Ok(fd) => unsafe { Listener::from_raw_fd(fd.into_raw_fd()) },
            Err(e) => {
                tracing::error!("vm {name}: the socket cannot be served: {e}");
                return;
            }
        };
        while self.wait_for_vmm(listening) {
            if let Err(e) = self.serve_vmm(&mut listener) {
                if self.stopping.load(Ordering::SeqCst) {
                    return;
                }
                tracing::error!("vm {name}: {e}");
                // Out of descriptors or threads, most likely: what is short now is given back as sessions end.
                std::thread::sleep(Duration::from_millis(200));
            }
        }
    }

    /// Ends the connection there is, and takes no other.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        if let Some(connected) = self.connected.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
            connected.shutdown();
        }
    }

    /// Waits until a VMM connects. False: the daemon ends.
    fn wait_for_vmm(&self, listening: &Listening) -> bool {
        loop {
            if self.stopping.load(Ordering::SeqCst) {
                return false;
            }
            match listening.wait() {
                Ok(somebody) => return somebody && !self.stopping.load(Ordering::SeqCst),
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
        // The library's errors say what they are only through Display.
        let mut daemon = VhostUserDaemon::new(format!("vhost-{name}"), device.clone(), memory)
            .map_err(|e| anyhow::anyhow!("{e}"))?;
        let workers = daemon.get_epoll_handlers();
        let result = daemon.start(listener).map_err(|e| anyhow::anyhow!("{e}"));
        if result.is_ok() {
            tracing::info!("vm {name}: a VMM has connected");
            *self.connected.lock().unwrap_or_else(PoisonError::into_inner) = daemon.shutdown_handle();
            // A stop that came before the line above found nothing to shut down.
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
