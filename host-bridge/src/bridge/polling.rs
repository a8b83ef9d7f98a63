//! How long to look for work before sleeping: a time between nothing and a configured bound, that follows how well polling has paid lately.

use std::time::Duration;

/// Processors that this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The bound that suits a machine with `cores` processors: polling on one that the client needs costs more than it saves.
pub fn default_bound(cores: usize) -> Duration {
    Duration::from_micros(match cores {
        0 | 1 => 0,
        2 | 3 => 20,
        _ => 50,
    })
}

/// With fewer processors than this, those who poll stand in the way of those whom they wait for.
const MANY: usize = 4;
/// Who gives way between looks looks for at least this long: it takes a processor from nobody, and to fall asleep and be woken costs more than a call does.
const GIVING_WAY: Duration = Duration::from_micros(500);
/// The bound is divided by this at most while looking does not pay.
const LEAST: u32 = 8;
/// The same for who gives way: each look is a system call, and while bulk data is under way, with milliseconds between one event and the next, none finds anything.
const LEAST_GIVING_WAY: u32 = 64;

/// The adaptive polling time of one thread.
#[derive(Debug, Clone, Copy)]
pub struct PollTime {
    bound: Duration,
    now: Duration,
    /// The bound of who does not give way.
    plain: Duration,
    gives_way: bool,
}

impl PollTime {
    /// Polls for at most `bound`; begins there.
    pub fn new(bound: Duration) -> PollTime {
        PollTime { bound, now: bound, plain: bound, gives_way: false }
    }

    /// As [`new`](Self::new) where there are many processors. With `cores` fewer than four, a thread that [pauses](Self::pause) between looks gives way to any
    /// other, and for that looks for longer, unless the bound says never.
    pub fn giving_way(bound: Duration, cores: usize) -> PollTime {
        if cores >= MANY || bound.is_zero() {
            return PollTime::new(bound);
        }
        let (plain, bound) = (bound, bound.max(GIVING_WAY));
        PollTime { bound, now: bound, plain, gives_way: true }
    }

    /// Whether [`pause`](Self::pause) lets other threads run.
    pub fn gives_way(&self) -> bool {
        self.gives_way
    }

    /// Between two looks.
    #[inline]
    pub fn pause(&self) {
        if self.gives_way { std::thread::yield_now() } else { std::hint::spin_loop() }
    }

    /// How long to poll now.
    #[inline]
    pub fn get(&self) -> Duration {
        self.now
    }

    /// How long to poll now while bulk data is under way. Its pieces come in bursts with milliseconds between them, so that looking pays again and again and is in vain just as often:
    /// nobody looks for longer then than a wake-up takes.
    pub fn during_bulk(&self) -> Duration {
        self.now.min(self.plain)
    }

    /// Work came while polling: it pays, so poll for longer.
    #[inline]
    pub fn paid(&mut self) {
        self.now = (self.now * 2).min(self.bound);
    }

    /// No work came: poll for a shorter time, but not for none, so that a burst is still noticed.
    pub fn wasted(&mut self) {
        let least = if self.gives_way { LEAST_GIVING_WAY } else { LEAST };
        self.now = (self.now / 2).max(self.bound / least);
    }

    /// No work came, and then a sleep of this length: one within the bound shows that looking for longer would have paid, a longer one that looking was wasted.
    pub fn slept(&mut self, time: Duration) {
        if time <= self.bound { self.paid() } else { self.wasted() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_stays_between_an_eighth_of_the_bound_and_the_bound() {
        let bound = Duration::from_micros(80);
        let mut time = PollTime::new(bound);
        for _ in 0..10 {
            time.wasted();
        }
        assert_eq!(time.get(), bound / 8);
        for _ in 0..10 {
            time.paid();
        }
        assert_eq!(time.get(), bound);
    }

    #[test]
    fn only_on_few_processors_does_a_thread_give_way_and_look_longer() {
        let bound = Duration::from_micros(20);
        let (few, many) = (PollTime::giving_way(bound, 2), PollTime::giving_way(bound, 4));
        assert!(few.gives_way() && few.get() > bound && few.during_bulk() == bound);
        assert!(!many.gives_way() && many.get() == bound);
    }

    #[test]
    fn who_gives_way_hardly_looks_between_events_far_apart_and_looks_again_after_some_close_ones() {
        let mut time = PollTime::giving_way(Duration::from_micros(20), 2);
        let bound = time.get();
        (0..10).for_each(|_| time.slept(Duration::from_millis(5)));
        assert_eq!(time.get(), bound / 64);
        (0..7).for_each(|_| time.slept(bound / 2));
        assert_eq!(time.get(), bound);
    }

    #[test]
    fn short_sleeps_lengthen_the_time_and_long_ones_shorten_it() {
        let bound = Duration::from_micros(80);
        let mut time = PollTime::new(bound);
        (0..10).for_each(|_| time.slept(Duration::from_millis(5)));
        assert_eq!(time.get(), bound / 8);
        (0..10).for_each(|_| time.slept(Duration::from_micros(60)));
        assert_eq!(time.get(), bound);
    }

    #[test]
    fn a_bound_of_zero_never_polls() {
        let mut time = PollTime::giving_way(Duration::ZERO, 2);
        time.paid();
        time.wasted();
        assert_eq!(time.get(), Duration::ZERO);
    }
}
