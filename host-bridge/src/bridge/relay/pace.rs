//! How much `In` data a session should have on its way: twice what the link carries in a round trip.
//!
//! One chunk at a time is watched, from when it is given out until the server has it. What the server has received meanwhile is what was on its way in that time. If that is a
//! full window, then the window may have been what limited it, so twice as much is tried; once more gets through in no less time, the link is full, and the window stays.
//!
//! ```text
//!   on the way in the shortest round trip ≈ received while watched × shortest ÷ time watched
//! ```
//!
//! The same chunks tell what the link carries in a second. Bytes count as they cross the link there, which are fewer where data is compressed.
//!
//! The clock is the caller's.

use std::time::{Duration, Instant};

/// A session without data for so long begins anew: it may have another path then.
const IDLE: Duration = Duration::from_secs(10);

/// A chunk that takes so long came over a link whose distance matters.
const FAR: Duration = Duration::from_micros(500);

/// Bytes a second from which on computing hashes would be what limits the link.
const FAST: u64 = 1 << 30;
/// The rate is known from as many bytes as this, received one after the other.
const ENOUGH: u64 = 256 << 10;
/// What the link carries is measured over as many bytes as this. (Each connection acknowledges a MiB at a time.)
const MEASURED: u64 = 2 << 20;

/// See the module's text.
#[derive(Debug)]
pub(super) struct Pace {
    least: u64,
    most: u64,
    window: u64,
    /// Bytes that the server has received.
    received: u64,
    /// The shortest time that a chunk took.
    shortest: Duration,
    /// The most bytes a second that were received. 0: it is not known.
    rate: u64,
    /// Bytes that have crossed the link.
    crossed: u64,
    /// Bytes a second that the link carries, smoothed.
    link: Option<u64>,
    /// Bytes that crossed the link while a chunk was watched, and in what time, since `link` was last reckoned.
    measured: (u64, Duration),
    watched: Option<Watched>,
    /// When a watched chunk last arrived.
    arrived: Option<Instant>,
}

/// A chunk on its way.
#[derive(Debug)]
struct Watched {
    seq: u64,
    piece: u32,
    at: u64,
    begun: Instant,
    /// [`Pace::received`] then.
    received: u64,
    /// [`Pace::crossed`] then.
    crossed: u64,
}

impl Pace {
    /// The window is from `least` to `most` bytes.
    pub(super) fn new(least: u64, most: u64) -> Pace {
        Pace {
            least,
            most: most.max(least),
            window: least,
            received: 0,
            shortest: Duration::MAX,
            rate: 0,
            crossed: 0,
            link: None,
            measured: (0, Duration::ZERO),
            watched: None,
            arrived: None,
        }
    }

    /// Bytes that should be on their way at most.
    pub(super) fn window(&self) -> u64 {
        self.window
    }

    /// Whether waiting for an answer of the server would leave the link empty for long.
    pub(super) fn is_far(&self) -> bool {
        (FAR..Duration::MAX).contains(&self.shortest)
    }

    /// Whether the link is known to carry many bytes a second, or few. Neither, if too little has been sent.
    pub(super) fn is_fast(&self) -> bool {
        self.rate >= FAST
    }

    pub(super) fn is_slow(&self) -> bool {
        (1..FAST).contains(&self.rate)
    }

    /// Bytes a second that the link carries, on average of what was sent lately. `None`: too little has been sent.
    pub(super) fn link(&self) -> Option<u64> {
        self.link
    }

    /// A chunk is given out to be sent.
    pub(super) fn leaves(&mut self, seq: u64, piece: u32, at: u64, now: impl FnOnce() -> Instant) {
        if self.watched.is_some() || self.most == self.least {
            return;
        }
        let begun = now();
        if self.arrived.is_some_and(|arrived| begun.saturating_duration_since(arrived) > IDLE) {
            (self.window, self.shortest, self.rate, self.arrived) = (self.least, Duration::MAX, 0, None);
            (self.link, self.measured) = (None, (0, Duration::ZERO));
        }
        let Pace { received, crossed, .. } = *self;
        self.watched = Some(Watched { seq, piece, at, begun, received, crossed });
    }

    /// The server has a chunk of `len` bytes, of which `crossed` came over the link. True: the window has grown, or the link is found to be far.
    pub(super) fn arrives(
        &mut self,
        seq: u64,
        piece: u32,
        at: u64,
        (len, crossed): (u64, u64),
        now: impl FnOnce() -> Instant,
    ) -> bool {
        self.received += len;
        self.crossed += crossed;
        let Some(watched) = self.watched.take_if(|w| (w.seq, w.piece, w.at) == (seq, piece, at)) else {
            return false;
        };
        let now = now();
        let time = now.saturating_duration_since(watched.begun).max(Duration::from_nanos(1));
        let near = !self.is_far();
        self.shortest = self.shortest.min(time);
        self.arrived = Some(now);
        let meanwhile = u128::from(self.received - watched.received);
        if meanwhile >= ENOUGH.into() {
            let rate = u64::try_from(meanwhile * 1_000_000_000 / time.as_nanos()).unwrap_or(u64::MAX);
            self.rate = self.rate.max(rate);
        }
        self.measure(self.crossed - watched.crossed, time);
        let on_the_way = meanwhile * self.shortest.as_nanos() / time.as_nanos();
        let before = self.window;
        let wanted = u64::try_from(2 * on_the_way).unwrap_or(u64::MAX);
        self.window = self.window.max(wanted).min(self.most);
        self.window > before || near && self.is_far()
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
        self.link = Some(self.link.map_or(rate, |before| before - before / 4 + rate / 4));
        self.measured = (0, Duration::ZERO);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: u64 = 16 << 20;
    const MOST: u64 = 256 << 20;

    /// Sends a few bytes, and then at `rate` bytes a second with a full window under way, over a link of this round-trip time, until the window stays. Gives it.
    fn settled(pace: &mut Pace, rate: u64, round_trip: Duration, mut now: Instant) -> u64 {
        pace.leaves(u64::MAX, 0, 0, || now);
        now += round_trip;
        pace.arrives(u64::MAX, 0, 0, (1, 1), || now);
        for seq in 0..20 {
            let before = pace.window();
            // A window is sent in the time that the link takes, or the round trip limits.
            let time = Duration::from_secs_f64(before as f64 / rate as f64).max(round_trip);
            pace.leaves(seq, 0, 0, || now);
            now += time;
            pace.arrives(seq + 1000, 0, 0, (before - 1, before - 1), || now);
            pace.arrives(seq, 0, 0, (1, 1), || now);
        }
        pace.window()
    }

    #[test]
    fn the_window_is_twice_what_the_link_carries_in_a_round_trip() {
        let begin = Instant::now();
        for (rate, milliseconds) in [(3_u64 << 30, 10), (1 << 30, 30), (10 << 30, 1)] {
            let mut pace = Pace::new(LEAST, MOST);
            let carried = rate * milliseconds / 1000;
            let window = settled(&mut pace, rate, Duration::from_millis(milliseconds), begin);
            assert!(
                (2 * carried - LEAST / 8..=2 * carried + LEAST / 8).contains(&window),
                "{window} {carried}"
            );
        }
    }

    #[test]
    fn a_near_or_slow_link_keeps_the_least_and_a_far_one_stays_below_the_most() {
        let (begin, near) = (Instant::now(), Duration::from_micros(100));
        let mut pace = Pace::new(LEAST, MOST);
        assert_eq!(settled(&mut pace, 14 << 30, near, begin), LEAST, "14 GiB/s over 0.1 ms");
        let mut pace = Pace::new(LEAST, MOST);
        assert_eq!(settled(&mut pace, 100 << 30, Duration::from_millis(100), begin), MOST);
        // As large as the least: it never asks the clock.
        let mut pace = Pace::new(LEAST, 0);
        pace.leaves(1, 0, 0, || unreachable!());
        assert!(!pace.arrives(1, 0, 0, (1 << 30, 1 << 30), || unreachable!()));
    }

    #[test]
    fn a_link_is_fast_or_slow_once_enough_has_arrived() {
        let begin = Instant::now();
        for (rate, fast) in [(125_000_000, false), (4 << 30, true)] {
            let mut pace = Pace::new(LEAST, MOST);
            pace.leaves(1, 0, 0, || begin);
            pace.arrives(1, 0, 0, (1000, 1000), || begin + Duration::from_millis(1));
            assert!(!pace.is_fast() && !pace.is_slow());
            settled(&mut pace, rate, Duration::from_micros(200), begin);
            assert_eq!((pace.is_fast(), pace.is_slow()), (fast, !fast));
        }
    }

    #[test]
    fn what_the_link_carries_is_reckoned_from_the_bytes_that_cross_it() {
        let begin = Instant::now();
        for fraction in [1, 10] {
            let mut pace = Pace::new(LEAST, MOST);
            let mut now = begin;
            for seq in 0..200 {
                pace.leaves(seq, 0, 0, || now);
                now += Duration::from_millis(10);
                // 25 MB/s, and what they stand for.
                pace.arrives(seq, 0, 0, (250_000 * fraction, 250_000), || now);
                assert_eq!(pace.link().is_some(), (seq + 1) * 250_000 >= MEASURED, "{seq}");
            }
            let link = pace.link().unwrap();
            assert!((24_900_000..25_100_000).contains(&link), "{link}");
            // It follows the link.
            for seq in 200..400 {
                pace.leaves(seq, 0, 0, || now);
                now += Duration::from_millis(10);
                pace.arrives(seq, 0, 0, (1_000_000, 1_000_000), || now);
            }
            let link = pace.link().unwrap();
            assert!((99_000_000..101_000_000).contains(&link), "{link}");
            pace.leaves(7, 0, 0, || now + Duration::from_secs(60));
            assert_eq!(pace.link(), None);
        }
    }

    #[test]
    fn after_a_while_without_data_it_begins_anew() {
        let begin = Instant::now();
        let mut pace = Pace::new(LEAST, MOST);
        assert_eq!(settled(&mut pace, 100 << 30, Duration::from_millis(100), begin), MOST);
        pace.leaves(7, 0, 0, || begin + Duration::from_secs(60));
        assert_eq!(pace.window(), LEAST);
    }
}
