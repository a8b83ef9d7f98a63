//! The requests of one queue, both ways, over all queue pairs that a session has had there. No I/O.
//!
//! A reliable connection delivers requests in order, or breaks. When it breaks, its sender does not know
//! which of the requests under way the peer has: the peer's answers were under way, too. So each side counts
//! the peer's requests that it has acted on ([`took`](Requests::took)), and when both have put an end to
//! their old queue pairs, they tell each other. Then [`settle`](Requests::settle) says of each request under
//! way whether it is done or has to be repeated.
//!
//! A peer's process may end when its device has carried a request out and the process has not acted on it.
//! The process that comes after it cannot know of that request. So those that are done are remembered until
//! the peer has shown that it has acted on them ([`trim`](Requests::trim)): it can be told.

use std::collections::VecDeque;

use super::error::VerbsError;

/// See the module's text. `R`: what is known of a request of ours.
#[derive(Debug)]
pub(super) struct Requests<R> {
    /// Ours that the device has reported as done, and that the peer may not have acted on. Those under way
    /// are behind them.
    done: VecDeque<R>,
    /// Ours that were posted and of which it is not known that they are done, oldest first.
    under_way: VecDeque<R>,
    /// Number of our next one. They are counted since the session began.
    next: u64,
    /// The peer's that were acted on since the session began.
    taken: u64,
}

/// What becomes of requests when queue pairs are replaced.
#[derive(Debug)]
pub(super) struct Settled<R> {
    /// The peer has acted on these, which were under way.
    pub(super) done: VecDeque<R>,
    /// The device has reported these as done, and the peer does not know of them.
    pub(super) unknown: Vec<R>,
    /// These are to be repeated.
    pub(super) again: VecDeque<R>,
}

impl<R: Copy> Requests<R> {
    pub(super) fn with_capacity(most: usize) -> Requests<R> {
        Requests { done: VecDeque::new(), under_way: VecDeque::with_capacity(most), next: 0, taken: 0 }
    }

    /// Those of another process, which had posted `under_way` behind its first `first` requests.
    pub(super) fn restored(first: u64, under_way: VecDeque<R>, taken: u64) -> Requests<R> {
        let next = first.saturating_add(under_way.len() as u64);
        Requests { done: VecDeque::new(), under_way, next, taken }
    }

    /// The number that the next request gets.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    pub(super) fn under_way(&self) -> usize {
        self.under_way.len()
    }

    pub(super) fn post(&mut self, request: R) {
        self.under_way.push_back(request);
        self.next += 1;
    }

    /// The device says that the request with this number is done, and so all before it: gives the first of
    /// them. To be called until there is none.
    pub(super) fn done(&mut self, number: u64) -> Option<R> {
        if self.first() > number {
            return None;
        }
        let done = self.under_way.pop_front()?;
        self.done.push_back(done);
        Some(done)
    }

    /// The number of the first one under way.
    fn first(&self) -> u64 {
        self.next - self.under_way.len() as u64
    }

    /// The peer has acted on all that were sent but the last `unknown`.
    pub(super) fn trim(&mut self, unknown: usize) {
        let keep = unknown.saturating_sub(self.under_way.len());
        self.done.drain(..self.done.len().saturating_sub(keep));
    }

    /// A request of the peer's was acted on.
    pub(super) fn took(&mut self) {
        self.taken += 1;
    }

    /// The peer's requests that were acted on.
    pub(super) fn taken(&self) -> u64 {
        self.taken
    }

    /// There are no queue pairs any more, and the peer has acted on the first `theirs` requests. Those to be
    /// repeated are not under way any more: the next one posted is the peer's next one, once it has been told
    /// of those that it does not know.
    ///
    /// # Errors
    /// The peer cannot have acted on so many, or has shown before that it has acted on more.
    pub(super) fn settle(&mut self, theirs: u64) -> Result<Settled<R>, VerbsError> {
        let (first, sent) = (self.first(), self.next);
        if theirs > sent {
            return Err(VerbsError::Peer(format!(
                "it has taken {theirs} requests of which {sent} were sent"
            )));
        }
        let remembered = first - self.done.len() as u64;
        let Some(known) = theirs.checked_sub(remembered) else {
            return Err(VerbsError::Peer(format!(
                "it has taken {theirs} requests, and had shown that it has taken {remembered}"
            )));
        };
        let unknown: Vec<R> = self.done.iter().skip(known as usize).copied().collect();
        let mut done = std::mem::take(&mut self.under_way);
        let again = done.split_off(theirs.saturating_sub(first) as usize);
        self.done.drain(..self.done.len() - unknown.len());
        self.next = theirs.max(first);
        Ok(Settled { done, unknown, again })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_completion_stands_for_all_requests_before_it() {
        let mut requests = Requests::with_capacity(4);
        (0..4).for_each(|i| requests.post(i));
        assert_eq!(std::iter::from_fn(|| requests.done(2)).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!((requests.done(2), requests.under_way(), requests.next()), (None, 1, 4));
    }

    #[test]
    fn only_a_count_that_can_be_true_is_believed() {
        // Two are done, and the peer has shown that it knows of the first.
        let with_four = || {
            let mut requests = Requests::with_capacity(4);
            (0..4).for_each(|i| requests.post(i));
            while requests.done(1).is_some() {}
            requests.trim(3);
            requests
        };
        let error = |theirs| with_four().settle(theirs).unwrap_err().to_string();
        assert!(error(5).contains("of which 4 were sent"), "{}", error(5));
        assert!(error(u64::MAX).contains("of which 4 were sent"));
        assert!(error(0).contains("had shown that it has taken 1"), "{}", error(0));
        for theirs in 1..=4 {
            let mut requests = with_four();
            let Settled { done, unknown, again } = requests.settle(theirs).unwrap();
            assert!(done.into_iter().eq(2..theirs) && again.into_iter().eq(theirs.max(2)..4));
            assert!(unknown.into_iter().eq(theirs..2));
            assert_eq!((requests.next(), requests.under_way()), (theirs.max(2), 0));
            // An attempt that came to nothing may be repeated.
            assert!(requests.settle(theirs).unwrap().unknown.into_iter().eq(theirs..2));
        }
    }

    /// One way of a simulated reliable connection.
    #[derive(Default)]
    struct Pair {
        /// Requests that were posted, and how many of them the receiver's device has, how many the receiver
        /// has acted on, and how many the sender's device has reported as done.
        posted: Vec<(u64, u32)>,
        delivered: usize,
        acted_on: usize,
        acknowledged: usize,
    }

    /// What a sender and a receiver know of one queue, one way.
    struct Way {
        sender: Requests<u32>,
        receiver: Requests<u32>,
        pair: Pair,
        again: VecDeque<u32>,
        wish: u32,
        taken: Vec<u32>,
        done: Vec<u32>,
    }

    impl Way {
        fn post(&mut self) {
            let request = self.again.pop_front().unwrap_or_else(|| {
                self.wish += 1;
                self.wish
            });
            self.pair.posted.push((self.sender.next(), request));
            self.sender.post(request);
        }

        fn deliver(&mut self) {
            self.pair.delivered = self.pair.posted.len().min(self.pair.delivered + 1);
        }

        fn act(&mut self) {
            if self.pair.acted_on < self.pair.delivered {
                self.receiver.took();
                self.taken.push(self.pair.posted[self.pair.acted_on].1);
                self.pair.acted_on += 1;
            }
        }

        fn acknowledge(&mut self) {
            if self.pair.acknowledged < self.pair.delivered {
                let (number, _) = self.pair.posted[self.pair.acknowledged];
                self.pair.acknowledged += 1;
                while let Some(request) = self.sender.done(number) {
                    self.done.push(request);
                }
            }
        }

        /// The receiver shows what it has acted on.
        fn show(&mut self) {
            self.sender.trim(self.pair.posted.len() - self.pair.acted_on);
        }

        /// The connection is replaced. `dies`: the receiver's process has ended, and did not act on all that
        /// its device had. `hears`: the attempt gets so far that the ends hear of each other.
        fn cut(&mut self, dies: bool, hears: bool) {
            if dies {
                self.receiver = Requests::restored(0, VecDeque::new(), self.receiver.taken());
            } else {
                (0..self.pair.delivered).for_each(|_| self.act());
            }
            self.pair = Pair::default();
            if hears {
                let Settled { done, unknown, again } = self.sender.settle(self.receiver.taken()).unwrap();
                self.done.extend(done);
                unknown.iter().for_each(|_| self.receiver.took());
                self.taken.extend(unknown);
                assert!(self.again.is_empty() || again.is_empty() || again.back() < self.again.front());
                self.again = again.into_iter().chain(self.again.drain(..)).collect();
            }
        }
    }

    proptest! {
        /// However often and wherever the connection breaks, or the receiver's process ends, also while the
        /// connection is being replaced, the receiver acts on each request once and in order.
        #[test]
        fn each_request_is_acted_on_once(steps in prop::collection::vec(0u8..24, 1..400)) {
            let requests = || Requests::with_capacity(8);
            let mut way = Way {
                sender: requests(), receiver: requests(), pair: Pair::default(), again: VecDeque::new(),
                wish: 0, taken: Vec::new(), done: Vec::new(),
            };
            let mut stands = true;
            for step in steps {
                match step {
                    0..=3 => {
                        stands = step >= 2;
                        way.cut(step % 2 == 0, stands);
                    }
                    4..=8 if stands => way.post(),
                    9..=13 if stands => way.deliver(),
                    14..=18 if stands => way.act(),
                    19..=21 if stands => way.acknowledge(),
                    22.. if stands => way.show(),
                    _ => {}
                }
            }
            way.cut(false, true);
            while !way.again.is_empty() {
                way.post();
            }
            while way.pair.acknowledged < way.pair.posted.len() {
                way.deliver();
                way.act();
                way.acknowledge();
            }
            let all: Vec<u32> = (1..=way.wish).collect();
            prop_assert_eq!(&way.taken, &all);
            prop_assert_eq!(&way.done, &all);
        }
    }
}
