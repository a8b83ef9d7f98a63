//! A peer that sends anything: the end that is tested receives it.

use std::collections::VecDeque;

use host_bridge::endpoint::Mapped;

use super::*;
use crate::direct::verbs::{Receiving, Turn, answer};

/// A peer that offers verbs, and then sends anything.
pub(super) fn run(steps: &mut Steps<'_>) -> usize {
    let Some(verbs) = verbs(steps) else { return 0 };
    let (ours, stream) = pair();
    let offered = queue(steps);
    let says = steps.byte();
    let mut bytes = offered.as_bytes().to_vec();
    bytes.push(if says & 7 == 7 { says } else { 1 });
    if says & 0x78 == 0x78 {
        bytes.truncate(usize::from(steps.u16()));
        say(&ours, &bytes);
        ours.shutdown(Shutdown::Write).expect("a socket");
    } else {
        say(&ours, &bytes);
    }
    if says >= 0xe0 {
        software::fail(Some(steps.byte().into()));
    }
    let asker = Asker::new();
    let incoming = Incoming::new(Arc::default(), None);
    let answered = answer(Some(&verbs), &stream, &incoming.pool);
    assert_eq!(software::registered_for(REMOTE_WRITE), 0, "the peer has been given a key");
    let mut moved = 0;
    if let Ok(Some(queue)) = answered {
        let answer = DirectQueue::read_from_bytes(&heard(&ours)[..]).expect("an answer");
        let pair = software::every_pair()[0];
        assert_eq!((answer.queue_pair, answer.receives as usize), (pair, software::receives(pair)));
        assert_eq!(software::peer(pair), Some(offered.queue_pair));
        let posted = answer.receives as usize;
        let mut sender = HostileSender {
            steps,
            ours,
            stream: &stream,
            incoming: &incoming,
            asker: &asker,
            queue,
            pair,
            posted,
            came: 0,
            probed: false,
            waiting: VecDeque::new(),
            expected: Expected::default(),
            held: Vec::new(),
            excused: says >= 0xe0 || says & 0x78 == 0x78,
        };
        moved = sender.run();
    } else {
        // Declined by either end, or lost.
        assert!(
            answered.is_err() || bytes.get(size_of::<DirectQueue>()) != Some(&1) || {
                let answer = DirectQueue::read_from_bytes(&heard(&ours)[..]).expect("an answer");
                answer.queue_pair == 0 && !untext(&answer.reason).is_empty()
            }
        );
    }
    incoming.close();
    assert_eq!(asker.waits(), 0, "questions that nobody will answer");
    moved
}

/// A message that the device has taken for the receiving end.
struct Message {
    bytes: Vec<u8>,
    is_write: bool,
}

struct HostileSender<'p, 's> {
    steps: &'p mut Steps<'s>,
    ours: UnixStream,
    stream: &'p Stream,
    incoming: &'p Incoming,
    asker: &'p Asker,
    queue: Receiving,
    pair: u32,
    /// Receives that the other end has said it has posted.
    posted: usize,
    /// Messages that its device has taken.
    came: usize,
    probed: bool,
    /// Those of them that it has not seen.
    waiting: VecDeque<Message>,
    expected: Expected,
    /// Pieces that are being landed.
    held: Vec<(InUse, Mapped, Vec<u8>)>,
    /// Something was done that may end the connection.
    excused: bool,
}

impl HostileSender<'_, '_> {
    fn run(&mut self) -> usize {
        // Mostly it begins as it should.
        if self.steps.byte() < 0xf0 {
            self.message(DirectHeader::new_zeroed().as_bytes().to_vec());
        }
        let mut goes_on = true;
        for _ in 0..STEPS {
            if self.steps.is_over() || !goes_on {
                break;
            }
            goes_on = self.step();
        }
        if goes_on {
            self.turn();
        }
        self.expected.check(self.incoming, true);
        for (buffer, mapped, bytes) in self.held.drain(..) {
            land(buffer, &mapped, &bytes);
        }
        self.expected.last as usize
    }

    fn step(&mut self) -> bool {
        match self.steps.below(20) {
            0..=5 => {
                let number = self.sent_last() + 1 + self.steps.below(3) as u64;
                let len = self.steps.byte() as usize + 1;
                self.piece(DirectHeader { number, len: len as u32, reserved: 0 }, len);
            }
            6 => {
                let number = self.sent_last().wrapping_add(self.steps.number());
                let len = if self.steps.byte() & 1 == 0 { self.steps.number() as usize % 300 } else { 0 };
                self.piece(DirectHeader { number, len: len as u32, reserved: 0 }, len);
            }
            7 => {
                let header = DirectHeader {
                    number: self.steps.number(),
                    len: self.steps.number() as u32,
                    reserved: (self.steps.byte() & 3).into(),
                };
                let len = self.steps.byte().into();
                self.piece(header, len);
            }
            8 => {
                let number = self.sent_last() + 1;
                let len = MAX_PIECE as usize - 1 + self.steps.below(3);
                self.piece(DirectHeader { number, len: len as u32, reserved: 0 }, len);
            }
            9 => {
                let bytes = self.steps.bytes().to_vec();
                self.message(bytes);
            }
            10 => {
                let (to, bytes) = ((self.steps.number(), self.steps.number() as u32), self.steps.bytes());
                let written = software::write(self.pair, to, self.steps.number() as u32, bytes);
                if written.is_ok() {
                    assert!(bytes.is_empty(), "a write into memory of which the peer has no key");
                    self.came += 1;
                    self.waiting.push_back(Message { bytes: Vec::new(), is_write: true });
                } else {
                    // Bytes for which there is no key end the queue pair.
                    self.excused |= !bytes.is_empty();
                }
            }
            11 => self.asker.ask(self.incoming, self.expected.last.wrapping_add(self.steps.number())),
            12 => self.asker.ask(self.incoming, self.steps.byte().into()),
            13 | 14 => self.land(),
            15 => {
                if !self.held.is_empty() {
                    let (buffer, mapped, bytes) = self.held.swap_remove(self.steps.below(self.held.len()));
                    land(buffer, &mapped, &bytes);
                }
            }
            16 => match self.steps.byte() {
                0..32 => {
                    self.excused = true;
                    say(&self.ours, &[1]);
                }
                how @ 32..96 => {
                    self.excused = true;
                    break_off(how, &self.ours, self.pair, self.steps, 8);
                }
                _ => return self.turn(),
            },
            _ => return self.turn(),
        }
        true
    }

    /// The number of the last piece that was sent.
    fn sent_last(&self) -> u64 {
        let numbers =
            self.waiting.iter().filter_map(|message| DirectHeader::read_from_prefix(&message.bytes).ok());
        numbers
            .map(|(header, _)| header.number)
            .next_back()
            .unwrap_or_default()
            .max(self.expected.last)
            .min(1 << 63)
    }

    fn piece(&mut self, header: DirectHeader, len: usize) {
        self.message([header.as_bytes(), &filling(header.number, len)].concat());
    }

    fn message(&mut self, bytes: Vec<u8>) {
        let receives = software::receives(self.pair);
        match software::send(self.pair, &bytes) {
            Ok(()) => {
                assert!(receives > 0 && bytes.len() <= size_of::<DirectHeader>() + MAX_PIECE as usize);
                self.came += 1;
                self.waiting.push_back(Message { bytes, is_write: false });
            }
            // No receive, which ends only this side; or too long, or the pair has stopped.
            Err(_) => {
                if receives > 0 {
                    self.came += 1;
                    self.excused = true;
                }
            }
        }
    }

    /// The client lands a piece.
    fn land(&mut self) {
        let arrived: Vec<u64> = lock(&self.incoming.state).pieces.keys().copied().collect();
        if arrived.is_empty() {
            assert!(self.incoming.land(self.steps.number()).is_err());
            return;
        }
        let number = arrived[self.steps.below(arrived.len())];
        let (buffer, mapped) = self.incoming.land(number).expect("it has arrived");
        let bytes =
            self.expected.pieces.remove(&number).unwrap_or_else(|| panic!("piece {number} was not sent"));
        assert_eq!(mapped.len(), bytes.len());
        self.held.push((buffer, mapped, bytes));
    }

    /// The other end takes its turn. False: the connection is over.
    fn turn(&mut self) -> bool {
        let turned = self.queue.turn(self.incoming, self.stream);
        let mut good = true;
        for Message { bytes, is_write } in self.waiting.drain(..) {
            if !good {
                break;
            }
            let header = DirectHeader::read_from_prefix(&bytes).ok();
            good = !is_write
                && header.is_some_and(|(header, piece)| {
                    if std::mem::replace(&mut self.probed, true) {
                        self.expected.take(&header, piece)
                    } else {
                        header == DirectHeader::new_zeroed() && piece.is_empty()
                    }
                });
        }
        let goes_on = match &turned {
            Ok(Turn::Over) => {
                assert!(self.excused, "the connection is over, which nobody has closed");
                false
            }
            Ok(_) => {
                assert!(good, "what a correct peer does not send was taken");
                true
            }
            Err(why) => {
                assert!(!good || self.excused, "the peer has done nothing wrong: {why}");
                assert!(!why.to_string().is_empty());
                false
            }
        };
        // What has come before the end is kept, unless the device itself has failed.
        self.expected.check(self.incoming, turned.is_err() && self.excused);
        if goes_on {
            self.posted += heard(&self.ours).iter().map(|receives| usize::from(*receives)).sum::<usize>();
            let receives = software::receives(self.pair);
            // What the peer may use as far as it knows.
            let known = self.posted.checked_sub(self.came);
            assert!(
                self.excused || known.is_some_and(|known| known <= receives),
                "{known:?} of {receives} receives are granted"
            );
            let kept = lock(&self.incoming.state).pieces.len() + self.held.len();
            assert!(receives + kept <= PIECES, "{receives} receives are posted, and {kept} pieces kept");
            if !self.excused && kept < PIECES {
                assert!(known > Some(0), "the connection is stuck: {kept} pieces are kept");
            }
        }
        assert!(lock(&self.incoming.pool.state).made <= PIECES);
        assert_eq!(software::registered_for(REMOTE_WRITE), 0, "the peer has been given a key");
        goes_on
    }
}

/// A piece has been landed: its bytes are still those that came.
fn land(buffer: InUse, mapped: &Mapped, expected: &[u8]) {
    let mut bytes = vec![0; expected.len()];
    mapped.read(0, &mut bytes);
    assert!(bytes == expected, "a piece has changed while it was landed");
    buffer.release(Status::SUCCESS);
}
