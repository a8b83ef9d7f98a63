//! What a link carries in a second, by what one end sends and the other acknowledges.
//!
//! One chunk at a time is watched, from when it is given out until the peer has it. The bytes that cross the
//! link meanwhile, and the time that this takes, say how fast the link is. Bytes count as they cross it,
//! which are fewer where data is compressed.
//!
//! The clock is the caller's.

use std::time::{Duration, Instant};

/// A connection without data for so long begins anew: it may have another path then.
const IDLE: Duration = Duration::from_secs(10);
/// What the link carries is measured over as many bytes as this. (Each data connection acknowledges a MiB at
/// a time.)
const MEASURED: u64 = 2 << 20;

/// See the module's text. `K` names a chunk.
#[derive(Debug)]
pub(crate) struct LinkRate<K> {
    /// Bytes that have crossed the link.
    crossed: u64,
    /// Bytes a second that the link carries, smoothed.
    known: Option<u64>,
    /// Bytes that crossed the link while a chunk was watched, and in what time, since `known` was last
    /// reckoned.
    measured: (u64, Duration),
    watched: Option<Watched<K>>,
    /// When a watched chunk last arrived.
    arrived: Option<Instant>,
}

/// A chunk on its way.
#[derive(Debug)]
struct Watched<K> {
    chunk: K,
    begun: Instant,
    /// [`LinkRate::crossed`] then.
    crossed: u64,
}

impl<K: PartialEq> LinkRate<K> {
    pub(crate) fn new() -> LinkRate<K> {
        LinkRate { crossed: 0, known: None, measured: (0, Duration::ZERO), watched: None, arrived: None }
    }

    /// One that is known already, or not.
    #[cfg(test)]
    pub(crate) fn that_carries(known: Option<u64>) -> LinkRate<K> {
        LinkRate { known, ..LinkRate::new() }
    }

    /// Bytes a second that the link carries, on average of what was sent lately. `None`: too little has been
    /// sent.
    pub(crate) fn get(&self) -> Option<u64> {
        self.known
    }

    /// The chunk that is watched.
    pub(crate) fn watched(&self) -> Option<&K> {
        self.watched.as_ref().map(|watched| &watched.chunk)
    }

    /// A chunk is given out to be sent. It is watched; none was. True: after so long without data, all begins
    /// anew.
    pub(crate) fn leaves(&mut self, chunk: K, now: Instant) -> bool {
        let anew = self.arrived.is_some_and(|arrived| now.saturating_duration_since(arrived) > IDLE);
        if anew {
            self.forget();
        }
        self.watched = Some(Watched { chunk, begun: now, crossed: self.crossed });
        anew
    }

    /// So many bytes have come over the link, of a chunk that is not watched.
    pub(crate) fn crosses(&mut self, bytes: u64) {
        self.crossed += bytes;
    }

    /// The peer has a chunk, of which `crossed` bytes came over the link. Gives how long it was on its way,
    /// if it was watched.
    pub(crate) fn arrives(
        &mut self,
        chunk: &K,
        crossed: u64,
        now: impl FnOnce() -> Instant,
    ) -> Option<Duration> {
        self.crosses(crossed);
        let watched = self.watched.take_if(|watched| watched.chunk == *chunk)?;
        let now = now();
        let time = now.saturating_duration_since(watched.begun).max(Duration::from_nanos(1));
        self.arrived = Some(now);
        self.measure(self.crossed - watched.crossed, time);
        Some(time)
    }

    /// When the watched chunk arrives will say nothing.
    pub(crate) fn look_away(&mut self) {
        self.watched = None;
    }

    /// The link may be another one.
    pub(crate) fn forget(&mut self) {
        *self = LinkRate { crossed: self.crossed, ..LinkRate::new() };
    }

    /// So many bytes crossed the link in this time.
    fn measure(&mut self, bytes: u64, time: Duration) {
        let (bytes, time) = (self.measured.0 + bytes, self.measured.1 + time);
        if bytes < MEASURED {
            self.measured = (bytes, time);
            return;
        }
        let rate = u128::from(bytes) * 1_000_000_000 / time.as_nanos().max(1);
        let rate = u64::try_from(rate).unwrap_or(u64::MAX);
        self.known = Some(self.known.map_or(rate, |before| before - before / 4 + rate / 4));
        self.measured = (0, Duration::ZERO);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_link_carries_is_reckoned_from_the_bytes_that_cross_it() {
        let (mut rate, mut now) = (LinkRate::new(), Instant::now());
        for chunk in 0..200 {
            assert!(!rate.leaves(chunk, now));
            now += Duration::from_millis(10);
            // 25 MB/s.
            assert_eq!(rate.arrives(&chunk, 250_000, || now), Some(Duration::from_millis(10)));
            assert_eq!(rate.get().is_some(), (chunk + 1) * 250_000 >= MEASURED, "{chunk}");
        }
        let link = rate.get().unwrap();
        assert!((24_900_000..25_100_000).contains(&link), "{link}");
        // It follows the link, whose bytes count whatever chunk they are of.
        for chunk in 200..400 {
            rate.leaves(chunk, now);
            now += Duration::from_millis(10);
            assert_eq!(rate.arrives(&0, 900_000, || unreachable!("it is not watched")), None);
            rate.arrives(&chunk, 100_000, || now);
        }
        let link = rate.get().unwrap();
        assert!((99_000_000..101_000_000).contains(&link), "{link}");
        assert!(rate.leaves(7, now + Duration::from_secs(60)));
        assert_eq!((rate.get(), rate.watched()), (None, Some(&7)));
    }

    #[test]
    fn a_chunk_that_is_looked_away_from_says_nothing() {
        let (mut rate, now) = (LinkRate::new(), Instant::now());
        rate.leaves(1, now);
        rate.look_away();
        assert_eq!(rate.arrives(&1, 100 << 20, || unreachable!()), None);
        rate.leaves(2, now);
        rate.arrives(&2, 100 << 20, || now + Duration::from_secs(1));
        assert_eq!(rate.get(), Some(100 << 20), "what crossed before does not count");
        rate.forget();
        assert_eq!(rate.get(), None);
    }
}
