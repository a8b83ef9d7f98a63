//! Bytes that a server puts into mirrored memory beside all streams: messages that come over direct
//! connections.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Number of messages that are being received.
static UNDER_WAY: AtomicUsize = AtomicUsize::new(0);

/// A message that a server is about to receive. While it exists, accesses are answered as while devices work:
/// the program gets pages that may change, and are watched.
pub(crate) struct Landing(());

impl Landing {
    /// Whoever calls this holds [`Order`](super::Order), so that no fault is being answered as if nothing
    /// worked, and then takes the message's pages from the program.
    pub fn begin() -> Landing {
        UNDER_WAY.fetch_add(1, Ordering::SeqCst);
        Landing(())
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        UNDER_WAY.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Whether there are such messages.
pub(super) fn is_under_way() -> bool {
    UNDER_WAY.load(Ordering::SeqCst) > 0
}
