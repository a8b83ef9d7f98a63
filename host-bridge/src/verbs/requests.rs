//! The requests of one queue, both ways, over all queue pairs that a session has had there. No I/O.
//!
//! A reliable connection delivers requests in order, or breaks. When it breaks, its sender does not know which of the requests under way the peer has: the peer's answers were under way, too. So each side
//! counts the peer's requests that it has acted on ([`took`](Requests::took)), and when both have put an end to their old queue pairs, they tell each other. Then
//! [`settle`](Requests::settle) says of each request under way whether it is done or has to be repeated.
//!
//! The count decides, never the device: one that had reported a request as done of which the peer knows nothing has lost it, and the session ends.

use std::collections::VecDeque;

use super::VerbsError;

/// See the module's text. `R`: what is known of a request of ours.
#[derive(Debug)]
pub(super) struct Requests<R> {
    /// Ours that were posted and of which it is not known that they are done, oldest first.
    under_way: VecDeque<R>,
    /// Number of our next one. They are counted since the session began.
    next: u64,
    /// The peer's that were acted on since the session began.
    taken: u64,
}

impl<R> Requests<R> {
    pub(super) fn with_capacity(most: usize) -> Requests<R> {
        Requests { under_way: VecDeque::with_capacity(most), next: 0, taken: 0 }
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

    /// The device says that the request with this number is done, and so all before it: gives the first of them. To be called until there is none.
    pub(super) fn done(&mut self, number: u64) -> Option<R> {
        let first = self.next - self.under_way.len() as u64;
        if first <= number { self.under_way.pop_front() } else { None }
    }

    /// Changes what is known of those under way.
    pub(super) fn each(&mut self, change: impl FnMut(&mut R)) {
        self.under_way.iter_mut().for_each(change);
    }

    /// A request of the peer's was acted on.
    pub(super) fn took(&mut self) {
        self.taken += 1;
    }

    /// The peer's requests that were acted on.
    pub(super) fn taken(&self) -> u64 {
        self.taken
    }

    /// There are no queue pairs any more, and the peer has acted on the first `theirs` requests. Gives those under way that are done, and those to be repeated, which are not under way any more: the
    /// next one posted is the peer's next one.
    ///
    /// # Errors
    /// The peer cannot have acted on so many, or the device has reported more as done.
    pub(super) fn settle(&mut self, theirs: u64) -> Result<(VecDeque<R>, VecDeque<R>), VerbsError> {
        let first = self.next - self.under_way.len() as u64;
        if theirs > self.next {
            let sent = self.next;
            return Err(VerbsError::Peer(format!(
                "it has taken {theirs} requests of which {sent} were sent"
            )));
        }
        let Some(done) = theirs.checked_sub(first) else {
            return Err(VerbsError::Peer(format!(
                "it has taken {theirs} requests, and its device has acknowledged {first}"
            )));
        };
        let mut done_requests = std::mem::take(&mut self.under_way);
        let again = done_requests.split_off(done as usize);
        self.next = theirs;
        Ok((done_requests, again))
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
        let with_four = || {
            let mut requests = Requests::with_capacity(4);
            (0..4).for_each(|i| requests.post(i));
            while requests.done(1).is_some() {}
            requests
        };
        let error = |theirs| with_four().settle(theirs).unwrap_err().to_string();
        assert!(error(5).contains("of which 4 were sent"), "{}", error(5));
        assert!(error(u64::MAX).contains("of which 4 were sent"));
        assert!(error(1).contains("its device has acknowledged 2"), "{}", error(1));
        for theirs in 2..=4 {
            let mut requests = with_four();
            let (done, again) = requests.settle(theirs).unwrap();
            assert!(done.into_iter().eq(2..theirs) && again.into_iter().eq(theirs..4));
            assert_eq!((requests.next(), requests.under_way()), (theirs, 0));
        }
    }

    /// One way of a simulated reliable connection.
    #[derive(Default)]
    struct Pair {
        /// Requests that were posted, and how many of them the receiver's device has, and how many it has said that it has.
        posted: Vec<(u64, u32)>,
        delivered: usize,
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
            if let Some((_, request)) = self.pair.posted.get(self.pair.delivered) {
                self.pair.delivered += 1;
                self.receiver.took();
                self.taken.push(*request);
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

        /// The connection is replaced. `hears`: the attempt gets so far that the sender hears of the count.
        fn cut(&mut self, hears: bool) {
            self.pair = Pair::default();
            if hears {
                let (done, again) = self.sender.settle(self.receiver.taken()).unwrap();
                self.done.extend(done);
                assert!(self.again.is_empty() || again.is_empty() || again.back() < self.again.front());
                self.again = again.into_iter().chain(self.again.drain(..)).collect();
            }
        }
    }

    proptest! {
        /// However often and wherever the connection breaks, also while it is being replaced, the receiver acts on each request once and in order, and the sender reuses none before.
        #[test]
        fn each_request_is_acted_on_once(steps in prop::collection::vec(0u8..16, 1..400)) {
            let requests = || Requests::with_capacity(8);
            let mut way = Way {
                sender: requests(), receiver: requests(), pair: Pair::default(), again: VecDeque::new(),
                wish: 0, taken: Vec::new(), done: Vec::new(),
            };
            let mut stands = true;
            for step in steps {
                match step {
                    0 => {
                        way.cut(false);
                        stands = false;
                    }
                    1 | 2 => {
                        way.cut(true);
                        stands = true;
                    }
                    3..=7 if stands => way.post(),
                    8..=12 if stands => way.deliver(),
                    13.. if stands => way.acknowledge(),
                    _ => {}
                }
                prop_assert!(way.done.len() <= way.taken.len());
            }
            way.cut(true);
            while !way.again.is_empty() {
                way.post();
            }
            while way.pair.acknowledged < way.pair.posted.len() {
                way.deliver();
                way.acknowledge();
            }
            let all: Vec<u32> = (1..=way.wish).collect();
            prop_assert_eq!(&way.taken, &all);
            prop_assert_eq!(&way.done, &all);
        }
    }
}
