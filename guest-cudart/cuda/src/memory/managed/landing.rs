//! Bytes that a server puts into mirrored memory beside all streams: messages that come over direct
//! connections.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::abi::result::Result;
use crate::memory::managed::{Order, lend};

/// Number of messages that are being received.
static UNDER_WAY: AtomicUsize = AtomicUsize::new(0);

/// A message that a server is about to receive. While it exists, accesses are answered as while devices work:
/// the program gets pages that may change, and are watched.
pub(crate) struct Landing {
    at: u64,
    len: u64,
}

impl Landing {
    /// Takes the message's pages from the program. Call this before the server learns where the bytes go.
    pub fn begin(at: u64, len: u64) -> Result<Landing> {
        // No fault is being answered as if nothing worked.
        let _order = Order::take();
        UNDER_WAY.fetch_add(1, Ordering::SeqCst);
        let landing = Landing { at, len };
        lend(at, len)?;
        Ok(landing)
    }

    /// All bytes are in the mirror, and the program is about to learn of it. What it got of them meanwhile
    /// may be older.
    pub fn end(self) -> Result {
        lend(self.at, self.len)
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
