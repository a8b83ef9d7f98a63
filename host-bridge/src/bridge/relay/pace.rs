//! How much `In` data a session should have on its way: twice what the link carries in a round trip.
//!
//! One chunk at a time is watched, from when it is given out until the server has it. What the server has
//! received meanwhile is what was on its way in that time. If that is a full window, then the window may have
//! been what limited it, so twice as much is tried; once more gets through in no less time, the link is full,
//! and the window stays.
//!
//! ```text
//!   on the way in the shortest round trip ≈ received while watched × shortest ÷ time watched
//! ```
//!
//! The same chunks tell what the link carries in a second ([`LinkRate`]). What a session sends first tells
//! that roughly: what has arrived since its first chunk was given out, until nothing more is on its way.
//!
//! The clock is the caller's.

use std::cell::LazyCell;
use std::time::{Duration, Instant};

use crate::link_rate::LinkRate;

/// A chunk that takes so long came over a link whose distance matters.
const FAR: Duration = Duration::from_micros(500);

/// Bytes a second from which on computing hashes would be what limits the link.
const FAST: u64 = 1 << 30;
/// What takes less than this part of a round trip takes much less.
const PART: u128 = 4;
/// The rate is known from as many bytes as this, received one after the other.
const ENOUGH: u64 = 256 << 10;
/// As long as it is not known, it is found out with no more than this.
const PROBE: u64 = 1 << 20;
/// What arrived within less time arrived at once, as far as can be told.
const AT_ONCE: Duration = Duration::from_micros(50);

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
    link: LinkRate<(u64, u32, u64)>,
    /// `received` when the watched chunk was given out.
    before: u64,
    /// What the rate is first found out with.
    probe: Option<Probe>,
    /// What was sent before the link was another one is still on its way, or sent again. It stands in front
    /// of the watched chunk, whose time says nothing.
    settles: bool,
}

/// Bytes that were given out while the rate was not known, since nothing was on its way.
#[derive(Debug, Clone, Copy)]
struct Probe {
    begun: Instant,
    /// [`Pace::received`] then.
    before: u64,
    bytes: u64,
    /// When the first of them arrived, and [`Pace::received`] with those.
    first: Option<(Instant, u64)>,
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
            link: LinkRate::new(),
            before: 0,
            probe: None,
            settles: false,
        }
    }

    /// The link is another one: nothing is known of it.
    pub(super) fn forget(&mut self) {
        self.link.forget();
        self.begin_anew();
        self.settles = true;
    }

    fn begin_anew(&mut self) {
        (self.window, self.shortest, self.rate, self.probe) = (self.least, Duration::MAX, 0, None);
    }

    /// Bytes that the server has received.
    pub(super) fn received(&self) -> u64 {
        self.received
    }

    /// Bytes that should be on their way at most.
    pub(super) fn window(&self) -> u64 {
        self.window
    }

    /// Whether waiting for an answer of the server would leave the link empty for long.
    pub(super) fn is_far(&self) -> bool {
        (FAR..Duration::MAX).contains(&self.shortest)
    }

    /// The same, also as long as nothing is known.
    pub(super) fn may_be_far(&self) -> bool {
        self.most > self.least && self.shortest >= FAR
    }

    /// Whether the link is known to carry many bytes a second, or few. Neither, if too little has been sent.
    pub(super) fn is_fast(&self) -> bool {
        self.rate >= FAST
    }

    pub(super) fn is_slow(&self) -> bool {
        (1..FAST).contains(&self.rate)
    }

    /// Whether neither is known, but enough is on its way to tell.
    pub(super) fn is_being_told(&self) -> bool {
        self.probe.as_ref().is_some_and(|probe| probe.bytes >= PROBE)
    }

    /// Whether sending so many bytes takes much less time than an answer of the server.
    pub(super) fn outpaces_answers(&self, bytes: u64) -> bool {
        let sends = u128::from(bytes) * 1_000_000_000;
        self.is_far() && self.rate > 0 && sends * PART < u128::from(self.rate) * self.shortest.as_nanos()
    }

    /// Bytes a second that the link carries, on average of what was sent lately. `None`: too little has been
    /// sent.
    pub(super) fn link(&self) -> Option<u64> {
        self.link.get()
    }

    /// A chunk of `len` bytes is given out to be sent: its command, piece and offset.
    pub(super) fn leaves(&mut self, chunk: (u64, u32, u64), len: u64, now: impl FnOnce() -> Instant) {
        if self.most == self.least {
            return;
        }
        let now = LazyCell::new(now);
        if self.link.watched().is_none() {
            if self.link.leaves(chunk, *now) {
                self.begin_anew();
            }
            self.before = self.received;
        }
        if self.rate == 0 && !self.settles {
            let begin = || Probe { begun: *now, before: self.received, bytes: 0, first: None };
            self.probe.get_or_insert_with(begin).bytes += len;
        }
    }

    /// The server has a chunk of `len` bytes, of which `crossed` came over the link. True: the window has
    /// grown, or the link is found to be far.
    pub(super) fn arrives(
        &mut self,
        seq: u64,
        piece: u32,
        at: u64,
        (len, crossed): (u64, u64),
        now: impl FnOnce() -> Instant,
    ) -> bool {
        self.received += len;
        let now = LazyCell::new(now);
        if let Some(probe) = &mut self.probe {
            let (first, had) = *probe.first.get_or_insert_with(|| (*now, self.received));
            let Probe { begun, before, bytes, .. } = *probe;
            let (all, behind) = (self.received - before, self.received - had);
            if all >= bytes.min(PROBE) {
                self.probe = None;
                if all >= ENOUGH {
                    self.rate = rate(all, now.saturating_duration_since(begun));
                }
                // What came behind the first of it made no round trip meanwhile.
                let time = now.saturating_duration_since(first);
                if all >= ENOUGH && behind >= ENOUGH && time >= AT_ONCE {
                    self.rate = self.rate.max(rate(behind, time));
                }
            }
        }
        let Some(time) = self.link.arrives(&(seq, piece, at), crossed, || *now) else { return false };
        if std::mem::take(&mut self.settles) {
            return false;
        }
        let near = !self.is_far();
        self.shortest = self.shortest.min(time);
        let meanwhile = self.received - self.before;
        if self.rate > 0 && meanwhile >= ENOUGH {
            self.rate = self.rate.max(rate(meanwhile, time));
        }
        let on_the_way = u128::from(meanwhile) * self.shortest.as_nanos() / time.as_nanos();
        let before = self.window;
        let wanted = u64::try_from(2 * on_the_way).unwrap_or(u64::MAX);
        self.window = self.window.max(wanted).min(self.most);
        self.window > before || near && self.is_far()
    }
}

/// Bytes a second, at least 1.
fn rate(bytes: u64, time: Duration) -> u64 {
    let nanos = time.as_nanos().max(1);
    u64::try_from(u128::from(bytes) * 1_000_000_000 / nanos).unwrap_or(u64::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: u64 = 16 << 20;
    const MOST: u64 = 256 << 20;

    /// Sends a few bytes, and then at `rate` bytes a second with a full window under way, over a link of this
    /// round-trip time, until the window stays. Gives it.
    fn settled(pace: &mut Pace, rate: u64, round_trip: Duration, mut now: Instant) -> u64 {
        pace.leaves((u64::MAX, 0, 0), 1, || now);
        now += round_trip;
        pace.arrives(u64::MAX, 0, 0, (1, 1), || now);
        for seq in 0..20 {
            let before = pace.window();
            // A window is sent in the time that the link takes, or the round trip limits.
            let time = Duration::from_secs_f64(before as f64 / rate as f64).max(round_trip);
            pace.leaves((seq, 0, 0), before, || now);
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
        pace.leaves((1, 0, 0), 1, || unreachable!());
        assert!(!pace.arrives(1, 0, 0, (1 << 30, 1 << 30), || unreachable!()));
    }

    #[test]
    fn a_link_is_fast_or_slow_once_enough_has_arrived() {
        let begin = Instant::now();
        for (rate, fast) in [(125_000_000, false), (4 << 30, true)] {
            let mut pace = Pace::new(LEAST, MOST);
            pace.leaves((1, 0, 0), 1000, || begin);
            pace.arrives(1, 0, 0, (1000, 1000), || begin + Duration::from_millis(1));
            assert!(!pace.is_fast() && !pace.is_slow());
            settled(&mut pace, rate, Duration::from_micros(200), begin);
            assert_eq!((pace.is_fast(), pace.is_slow()), (fast, !fast));
        }
    }

    #[test]
    fn what_is_sent_first_tells_the_rate_once_all_of_it_has_arrived() {
        let begin = Instant::now();
        let mut pace = Pace::new(LEAST, MOST);
        let at = |chunk: u64| (1, 0, chunk * ENOUGH);
        (0..3).for_each(|chunk| pace.leaves(at(chunk), ENOUGH, || begin));
        assert!(!pace.is_being_told());
        pace.leaves(at(3), ENOUGH, || begin);
        assert!(pace.is_being_told());
        // Over four connections the first one says little of the link.
        for chunk in 0..4 {
            assert!(pace.is_being_told() && !pace.is_slow() && !pace.is_fast());
            pace.arrives(1, 0, chunk * ENOUGH, (ENOUGH, ENOUGH), || begin + Duration::from_micros(300));
        }
        assert!(pace.is_fast() && !pace.is_being_told(), "{pace:?}");
        // A fast link is one also if it is long.
        for (apart, fast) in [(100, true), (1000, false)] {
            let mut pace = Pace::new(LEAST, MOST);
            (0..4).for_each(|chunk| pace.leaves(at(chunk), ENOUGH, || begin));
            for chunk in 0..4 {
                let time = Duration::from_micros(10_000 + chunk * apart);
                pace.arrives(1, 0, chunk * ENOUGH, (ENOUGH, ENOUGH), || begin + time);
            }
            assert_eq!((pace.is_fast(), pace.is_slow()), (fast, !fast), "{pace:?}");
        }
        // One after the other, with pauses: little is known of what it takes alone.
        let mut pace = Pace::new(LEAST, MOST);
        for chunk in 0..20 {
            let now = begin + Duration::from_millis(chunk);
            pace.leaves(at(chunk), 1000, || now);
            pace.arrives(1, 0, chunk * ENOUGH, (1000, 1000), || now + Duration::from_micros(200));
        }
        assert_eq!((pace.rate, pace.probe.is_none()), (0, true));
    }

    #[test]
    fn compressed_chunks_count_for_the_link_as_they_cross_it_and_for_the_window_as_they_are() {
        let (mut pace, mut now) = (Pace::new(LEAST, MOST), Instant::now());
        for seq in 0..200 {
            pace.leaves((seq, 0, 0), 2_500_000, || now);
            now += Duration::from_millis(10);
            // 25 MB/s, and what they stand for.
            pace.arrives(seq, 0, 0, (2_500_000, 250_000), || now);
        }
        let link = pace.link().unwrap();
        assert!((24_900_000..25_100_000).contains(&link), "{link}");
        assert!(pace.rate > 249_000_000, "{}", pace.rate);
    }

    #[test]
    fn another_link_is_measured_anew() {
        let mut now = Instant::now();
        let mut pace = Pace::new(LEAST, MOST);
        assert_eq!(settled(&mut pace, 14 << 30, Duration::from_micros(100), now), LEAST);
        assert!(pace.is_fast() && !pace.is_far());
        // The link breaks while a chunk is watched, and the next one is long and slow.
        pace.leaves((7, 0, 0), LEAST, || now);
        pace.forget();
        assert!(!pace.is_fast() && pace.may_be_far() && pace.link().is_none());
        now += Duration::from_secs(20);
        pace.arrives(7, 0, 0, (LEAST, LEAST), || now);
        assert!(pace.link().is_none(), "nothing is known from the outage");
        // What is sent now comes behind what is sent again.
        pace.leaves((8, 0, 0), 1000, || now);
        now += Duration::from_millis(500);
        pace.arrives(8, 0, 0, (1000, 1000), || now);
        assert!(!pace.is_far() && pace.window() == LEAST);
        let window = settled(&mut pace, 1 << 30, Duration::from_millis(30), now);
        let carried = (1 << 30) * 30 / 1000;
        assert!((2 * carried - LEAST / 8..=2 * carried + LEAST / 8).contains(&window), "{window} {carried}");
        assert!(pace.is_far());
    }

    #[test]
    fn after_a_while_without_data_it_begins_anew() {
        let begin = Instant::now();
        let mut pace = Pace::new(LEAST, MOST);
        assert_eq!(settled(&mut pace, 100 << 30, Duration::from_millis(100), begin), MOST);
        pace.leaves((7, 0, 0), 1, || begin + Duration::from_secs(60));
        assert_eq!(pace.window(), LEAST);
    }
}
