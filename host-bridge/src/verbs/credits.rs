//! Credits: how much each side may send so that the receiver is always ready.
//!
//! Each side posts receives on every queue before the peer can send. The peer counts them as credits: one for
//! each message (queue 0) or write with immediate data (the other queues). A used receive is posted again and
//! then announced, in the header of the next message in the other direction. If half of a queue's receives
//! wait to be announced and there is no message to send, an empty one is sent.
//!
//! The last credit of queue 0 is reserved for such an empty message. So the two sides can never both be
//! unable to announce: the side that spends its last credit gives the peer at least half a queue's worth.

use protocol::link::MAX_QUEUES;

use super::error::VerbsError;

/// Minimum number of receives of queue 0, even if a smaller depth is configured. With fewer, announcements
/// would cause announcements.
pub(super) const LEAST_RECEIVES: u32 = 16;

/// The credits of one link, in both directions.
#[derive(Debug, Clone)]
pub(super) struct Credits {
    /// Number of receives that the peer has ready for us.
    have: [u32; MAX_QUEUES],
    /// Maximum number of receives that the peer posts.
    theirs: u32,
    /// Number of our receives that were posted again and not announced yet.
    owed: [u16; MAX_QUEUES],
    /// Number of our receives that the peer knows of and has not used. It must not use more, although more
    /// may be posted.
    lent: [u32; MAX_QUEUES],
    /// Number of receives that we post.
    ours: u32,
    /// If the peer's stream is held off: the number of its messages whose receives will be announced
    /// afterwards.
    hold: bool,
    withheld: u16,
}

impl Credits {
    pub(super) fn new(ours: u32, theirs: u32) -> Credits {
        let (have, lent) = ([theirs; MAX_QUEUES], [ours; MAX_QUEUES]);
        Credits { have, theirs, owed: [0; MAX_QUEUES], lent, ours, hold: false, withheld: 0 }
    }

    /// Whether something may be sent on that queue.
    pub(super) fn may_send(&self, queue: usize) -> bool {
        self.have[queue] > if queue == 0 { 1 } else { 0 }
    }

    /// How much was sent on that queue of which the peer has not shown that it has acted on it.
    pub(super) fn unknown(&self, queue: usize) -> usize {
        self.theirs.saturating_sub(self.have[queue]) as usize
    }

    /// Something was sent on that queue.
    pub(super) fn spend(&mut self, queue: usize) {
        self.have[queue] = self.have[queue].saturating_sub(1);
    }

    /// Something of the peer's has arrived on that queue.
    ///
    /// # Errors
    /// The peer had no receive left there.
    pub(super) fn arrived(&mut self, queue: usize) -> Result<(), VerbsError> {
        let beyond =
            || VerbsError::Peer(format!("it sent more on queue {queue} than it was told to have room for"));
        self.lent[queue] = self.lent[queue].checked_sub(1).ok_or_else(beyond)?;
        Ok(())
    }

    /// A receive of that queue has been used and posted again.
    pub(super) fn used(&mut self, queue: usize) {
        self.owed[queue] = self.owed[queue].saturating_add(1);
    }

    /// A receive of queue 0 has been used by a message that was not empty, and posted again. It is not
    /// announced while the peer is held off. Receives of empty messages are always announced, so that the
    /// peer can continue to announce.
    pub(super) fn used_by_stream(&mut self) {
        if self.hold { self.withheld += 1 } else { self.used(0) }
    }

    /// Starts or stops holding off the peer's stream.
    pub(super) fn hold(&mut self, hold: bool) {
        self.hold = hold;
        if !hold {
            self.owed[0] += std::mem::take(&mut self.withheld);
        }
    }

    /// Whether an empty message should be sent for an announcement, and can be.
    pub(super) fn must_announce(&self) -> bool {
        self.have[0] > 0 && self.owed.iter().any(|owed| u32::from(*owed) >= self.ours / 2)
    }

    /// Takes what is to be announced now.
    pub(super) fn announce(&mut self) -> [u16; MAX_QUEUES] {
        for (lent, owed) in self.lent.iter_mut().zip(self.owed) {
            *lent += u32::from(owed);
        }
        std::mem::take(&mut self.owed)
    }

    /// The peer has announced receives.
    pub(super) fn grant(&mut self, announced: &[u16; MAX_QUEUES]) -> Result<(), VerbsError> {
        for (queue, (have, more)) in self.have.iter_mut().zip(announced).enumerate() {
            let sum = *have + u32::from(*more);
            if sum > self.theirs {
                return Err(VerbsError::Peer(format!(
                    "it announces {more} receives on queue {queue}, which makes {sum} of {}",
                    self.theirs
                )));
            }
            *have = sum;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    #[test]
    fn more_credits_than_receives_are_refused() {
        let mut credits = Credits::new(16, 16);
        credits.spend(2);
        let mut announced = [0; MAX_QUEUES];
        announced[2] = 2;
        assert!(credits.grant(&announced).is_err());
        announced[2] = 1;
        assert!(Credits::new(16, 16).grant(&announced).is_err());
    }

    #[test]
    fn a_peer_that_sends_more_than_it_was_told_of_is_refused_also_while_it_is_held_off() {
        let mut credits = Credits::new(16, 16);
        credits.hold(true);
        for _ in 0..16 {
            credits.arrived(0).unwrap();
            credits.used_by_stream();
        }
        assert!(credits.announce() == [0; MAX_QUEUES] && credits.clone().arrived(0).is_err());
        credits.hold(false);
        assert!(credits.clone().arrived(0).is_err());
        assert_eq!(credits.announce()[0], 16);
        credits.arrived(0).unwrap();
        (0..16).for_each(|_| credits.arrived(1).unwrap());
        assert!(credits.arrived(1).is_err());
    }

    /// A side of a simulated link, with the messages under way to it: queue, and what a message on queue 0
    /// announces.
    struct Side {
        credits: Credits,
        inbox: VecDeque<(usize, [u16; MAX_QUEUES])>,
        wish: Vec<usize>,
    }

    impl Side {
        /// Sends the next thing that it wishes to send, or an announcement if one is due. False: it can do
        /// neither.
        fn send(&mut self) -> Option<(usize, [u16; MAX_QUEUES])> {
            if let Some(queue) = self.wish.last().copied().filter(|queue| self.credits.may_send(*queue)) {
                self.wish.pop();
                self.credits.spend(queue);
                return Some((queue, if queue == 0 { self.credits.announce() } else { [0; MAX_QUEUES] }));
            }
            self.credits.must_announce().then(|| {
                self.credits.spend(0);
                (0, self.credits.announce())
            })
        }

        fn receive(&mut self) -> bool {
            let Some((queue, announced)) = self.inbox.pop_front() else { return false };
            self.credits.arrived(queue).unwrap();
            self.credits.grant(&announced).unwrap();
            self.credits.used(queue);
            true
        }
    }

    proptest! {
        /// Whatever the order of sending and receiving, a peer never has more under way than there are
        /// receives, and everything gets through.
        #[test]
        fn credits_neither_overrun_nor_run_dry(
            receives in LEAST_RECEIVES..64,
            wishes in prop::array::uniform2(prop::collection::vec(0..4usize, 0..400)),
            order in prop::collection::vec(any::<u8>(), 0..2000),
        ) {
            let side = |wish: &Vec<usize>| Side { credits: Credits::new(receives, receives), inbox: VecDeque::new(), wish: wish.clone() };
            let mut sides = [side(&wishes[0]), side(&wishes[1])];
            let step = |sides: &mut [Side; 2], turn: usize, receive: bool| -> bool {
                if receive {
                    return sides[turn].receive();
                }
                let Some(sent) = sides[turn].send() else { return false };
                sides[1 - turn].inbox.push_back(sent);
                for queue in 0..MAX_QUEUES {
                    let under_way = sides[1 - turn].inbox.iter().filter(|(q, _)| *q == queue).count();
                    assert!(under_way <= receives as usize, "queue {queue} overruns");
                }
                true
            };
            for choice in order {
                step(&mut sides, usize::from(choice & 1), choice & 2 != 0);
            }
            let mut rounds = 0;
            while sides.iter().any(|s| !s.wish.is_empty() || !s.inbox.is_empty()) {
                let moved = (0..4).fold(false, |moved, i| step(&mut sides, i & 1, i & 2 != 0) | moved);
                prop_assert!(moved, "stuck");
                rounds += 1;
                prop_assert!(rounds < 100_000, "announcements answer announcements");
            }
        }
    }
}
