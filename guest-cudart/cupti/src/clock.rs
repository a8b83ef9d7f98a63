//! The times in records: nanoseconds since 1970, or times from a function of the program ([`use_callback`]).

use std::sync::Mutex;
use std::time::SystemTime;

use crate::lock;

pub type Callback = unsafe extern "C" fn() -> u64;

/// How often both clocks are read, one after the other. The pair with the shortest time between its readings
/// is used.
const PAIRS: usize = 16;

/// The system's time and the program's at one moment.
type Pair = (u64, u64);

struct Clock {
    callback: Option<Callback>,
    first: Pair,
    last: Pair,
}

static CLOCK: Mutex<Clock> = Mutex::new(Clock { callback: None, first: (0, 0), last: (0, 0) });

fn system() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos() as u64
}

fn pair(callback: Callback) -> Pair {
    let one = |_| {
        let begin = system();
        // SAFETY: the program's function, as it has registered it.
        let there = unsafe { callback() };
        let end = system();
        (end.saturating_sub(begin), (begin / 2 + end / 2, there))
    };
    (0..PAIRS).map(one).min_by_key(|(took, _)| *took).map_or((0, 0), |(_, pair)| pair)
}

/// From now on, times are those of `callback`.
pub fn use_callback(callback: Option<Callback>) {
    let now = callback.map_or((0, 0), pair);
    *lock(&CLOCK) = Clock { callback, first: now, last: now };
}

/// The current time.
pub fn now() -> u64 {
    let callback = lock(&CLOCK).callback;
    // SAFETY: the program's function, as it has registered it.
    callback.map_or_else(system, |callback| unsafe { callback() })
}

/// Compares the program's clock with the system's, so that [`Times`] can convert times.
pub fn compare() -> Times {
    let callback = lock(&CLOCK).callback;
    let Some(callback) = callback else { return Times(None) };
    let now = pair(callback);
    let mut clock = lock(&CLOCK);
    clock.last = now;
    Times(Some((clock.first, clock.last)))
}

/// Converts times of the system's clock to the program's.
pub struct Times(Option<(Pair, Pair)>);

impl Times {
    pub fn of(&self, system: u64) -> u64 {
        let Some((first, last)) = self.0 else { return system };
        let passed = i128::from(system) - i128::from(first.0);
        let (real, ticks) = (last.0.saturating_sub(first.0), last.1.saturating_sub(first.1));
        if real == 0 {
            return first.1;
        }
        (i128::from(first.1) + passed * i128::from(ticks) / i128::from(real)) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_converted_to_the_programs_clock() {
        // Three ticks per nanosecond.
        let times = Times(Some(((1000, 50), (3000, 6050))));
        assert_eq!((times.of(1000), times.of(2000), times.of(3000), times.of(3500)), (50, 3050, 6050, 7550));
        assert_eq!(Times(None).of(77), 77);
        assert_eq!(Times(Some(((5, 9), (5, 9)))).of(77), 9);
    }
}
