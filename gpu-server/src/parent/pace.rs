//! Limits how many sessions each client begins within a minute.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);

/// When clients began sessions.
#[derive(Default)]
pub(super) struct Paces(HashMap<String, VecDeque<Instant>>);

impl Paces {
    /// Whether a client that may begin `most` sessions within a minute may begin one now. If so, it is
    /// counted.
    pub(super) fn take(&mut self, client: &str, most: u32, now: Instant) -> bool {
        self.0.retain(|_, begun| {
            while begun.front().is_some_and(|at| now.saturating_duration_since(*at) >= MINUTE) {
                begun.pop_front();
            }
            !begun.is_empty()
        });
        let begun = self.0.entry(client.to_owned()).or_default();
        let may = begun.len() < most as usize;
        if may {
            begun.push_back(now);
        }
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_client_is_limited_separately_in_every_minute() {
        let (mut paces, start) = (Paces::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(paces.take("a", 2, at(0)) && paces.take("a", 2, at(30)));
        assert!(!paces.take("a", 2, at(59)) && paces.take("b", 2, at(59)));
        // A refusal does not count.
        assert!(paces.take("a", 2, at(60)) && !paces.take("a", 2, at(61)));
        assert!(paces.take("a", 2, at(90)));
        assert!(paces.take("c", 1, at(1000)));
        assert_eq!(paces.0.len(), 1, "who has begun none for a minute is forgotten");
    }
}
