//! What a session has done so far: counters that its transport raises and that anyone may read at any time.

use std::sync::atomic::{AtomicU64, Ordering};

/// One number that only rises.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Raises the number by `n`.
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// The number now.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The counters of one session.
        #[derive(Debug, Default)]
        pub struct Counters { $($(#[$doc])* pub $name: Counter,)* }

        impl Counters {
            /// Every counter by name, in a fixed order.
            pub fn all(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name.get()),)*].into_iter()
            }
        }
    };
}

counters! {
    /// Records taken from the ring and forwarded.
    commands,
    /// Frames of commands sent on the control connection.
    frames_sent,
    /// Frames received on the control connection.
    frames_received,
    /// Bytes sent on the control connection.
    control_bytes_sent,
    /// Bytes received on the control connection.
    control_bytes_received,
    /// Bytes of bulk data sent to the server. Where data was compressed, the compressed bytes count.
    data_bytes_sent,
    /// Bytes of bulk data that were compressed before they were sent.
    data_bytes_compressed,
    /// Bytes that were sent in place of those.
    data_bytes_compressed_to,
    /// Bytes of bulk data that were not sent because the server had them in its cache.
    data_bytes_known,
    /// Bytes of bulk data received from the server. Where data came compressed, the compressed bytes count.
    data_bytes_received,
    /// Bytes of bulk data that came compressed.
    data_bytes_decompressed,
    /// Bytes that came in place of those.
    data_bytes_decompressed_from,
    /// Replies written into the channel.
    replies,
    /// Times that the doorbell woke this side.
    doorbells,
    /// Wake-ups sent to the client's threads.
    wakes,
    /// Times that this side went to sleep.
    sleeps,
    /// Bytes that this side copied by CPU (records and replies; bulk data is not copied).
    copied_bytes,
    /// Regions registered now or earlier.
    regions_registered,
    /// Times that the session went on: over new connections, or in another process of this host.
    resumed,
}
