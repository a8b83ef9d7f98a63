//! How a worker waits until a device has room for more memory. The daemon makes room by having other
//! sessions' memory moved away.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::pages::{Meter, Page};

/// How long to wait for room, or for any memory to move where it is visible that other sessions' memory
/// moves.
pub const WITHIN: Duration = Duration::from_secs(30);
/// How often to ask again meanwhile.
pub const AGAIN: Duration = Duration::from_millis(10);

/// See the module.
pub struct Room {
    /// Where the worker says that it waits.
    pub meter: Arc<Page<Meter>>,
    /// The daemon's bell.
    pub bell: Arc<OwnedFd>,
}

impl Room {
    /// Wakes the daemon's thread that looks at meters.
    pub fn ring(&self) {
        // Writing fails only when the pipe is full, and then the daemon is awake.
        let _ = nix::unistd::write(&*self.bell, &[1]);
    }

    /// Says that `bytes` more are needed on a device, by its number, until [`end`](Room::end).
    pub fn need(&self, number: u32, bytes: u64) {
        if let Some(needs) = self.meter.memory.needs.get(number as usize) {
            needs.store(bytes, Ordering::Release);
        }
        self.ring();
    }

    /// Nothing more is needed.
    pub fn end(&self) {
        self.meter.memory.needs.iter().for_each(|needs| needs.store(0, Ordering::Release));
    }
}
