//! What wakes the threads of a connection over verbs, and that nothing they wait for is missed. The threads
//! are the test's, which takes their steps one by one.

use std::os::fd::BorrowedFd;

use host_bridge::verbs::Pieces;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::*;
use crate::direct::verbs::{Receiving, Rest, Turn};

/// The right of a device to write (`IBV_ACCESS_LOCAL_WRITE`).
const LOCAL_WRITE: i32 = 1;

/// Whether one of these is readable.
fn is_ready(fds: Vec<BorrowedFd<'_>>) -> bool {
    let mut polled: Vec<PollFd<'_>> = fds.into_iter().map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
    poll(&mut polled, PollTimeout::ZERO).unwrap() > 0
}

/// What can be read from a socket now.
fn heard(mut socket: &UnixStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    socket.set_nonblocking(true).unwrap();
    let end = socket.read_to_end(&mut bytes);
    assert_eq!(end.unwrap_err().kind(), io::ErrorKind::WouldBlock);
    bytes
}

/// How a thread sleeps.
#[derive(Default)]
struct Sleep {
    rest: Rest,
    /// Nothing has happened in its last turn.
    is_idle: bool,
    is_asleep: bool,
}

impl Sleep {
    /// Whether the thread is awake, or wakes now.
    fn wakes<B: PieceBuffer>(&mut self, pieces: &Pieces<B>, stream: &Stream, bell: &Bell) -> bool {
        if self.is_asleep && is_ready(self.rest.fds(pieces, stream, bell)) {
            self.rest.sleep(pieces, stream, bell, Some(Duration::ZERO)).unwrap();
            self.is_asleep = false;
        }
        !self.is_asleep
    }

    /// Whether this step of the thread is one towards sleep: the one behind a turn in which nothing has
    /// happened.
    fn begins<B: PieceBuffer>(&mut self, pieces: &Pieces<B>, bell: &Bell, listens: bool) -> bool {
        let begins = std::mem::take(&mut self.is_idle);
        if begins {
            self.is_asleep = self.rest.begins(pieces, bell, listens).unwrap();
        }
        begins
    }
}

/// A receiving end, and its peer.
struct Receiver {
    incoming: Incoming,
    queue: Receiving,
    bell: Arc<Bell>,
    stream: Stream,
    sleep: Sleep,
    peer: UnixStream,
    pair: u32,
    /// Receives that the peer knows of.
    told: usize,
    /// Messages in which it was told.
    messages: usize,
    number: u64,
}

impl Receiver {
    fn new(verbs: &Verbs) -> Receiver {
        let (mut peer, stream) = UnixStream::pair().unwrap();
        let stream = Stream::from(OwnedFd::from(stream));
        let offer = DirectQueue { queue_pair: 17, mtu: 4096, ..DirectQueue::new_zeroed() };
        peer.write_all(&[offer.as_bytes(), &[1]].concat()).unwrap();
        let incoming = Incoming::new(Arc::default(), None);
        let queue = verbs::answer(Some(verbs), &stream, &incoming.pool).unwrap().unwrap();
        let mut answer = DirectQueue::new_zeroed();
        peer.read_exact(answer.as_mut_bytes()).unwrap();
        let pair = software::every_pair()[0];
        software::send(pair, DirectHeader::new_zeroed().as_bytes()).unwrap();
        let (bell, told) = (Arc::clone(incoming.pool.bell.get().unwrap()), answer.receives as usize - 1);
        let (sleep, messages, number) = Default::default();
        let mut receiver =
            Receiver { incoming, queue, bell, stream, sleep, peer, pair, told, messages, number };
        receiver.works();
        receiver
    }

    /// A step of its thread. False: it sleeps.
    fn step(&mut self) -> bool {
        if !self.sleep.wakes(&self.queue.pieces, &self.stream, &self.bell) {
            return false;
        }
        if self.sleep.begins(&self.queue.pieces, &self.bell, self.queue.is_short()) {
            return true;
        }
        let turn = self.queue.turn(&self.incoming, &self.stream).unwrap();
        self.sleep.is_idle = matches!(turn, Turn::Idle(_));
        let told = heard(&self.peer);
        self.messages += told.len();
        self.told += told.iter().map(|receives| usize::from(*receives)).sum::<usize>();
        true
    }

    /// Its thread works until it sleeps. Then the peer can send, unless all buffers have pieces.
    fn works(&mut self) {
        while self.step() {}
        assert_eq!(self.told, self.queue.told());
        let kept = lock(&self.incoming.state).pieces.len();
        assert!(self.told > 0 || kept == PIECES, "the connection is stuck: {kept} pieces are kept");
    }

    /// The peer sends a piece, if it may.
    fn comes(&mut self) -> bool {
        let may = self.told > 0;
        if may {
            self.number += 1;
            self.told -= 1;
            software::send(self.pair, &[header(self.number, 1).as_bytes(), &[7]].concat()).unwrap();
        }
        may
    }

    /// A device lands one of the pieces that have come.
    fn lands(&mut self, which: usize) {
        let come: Vec<u64> = lock(&self.incoming.state).pieces.keys().copied().collect();
        if !come.is_empty() {
            self.incoming.land(come[which % come.len()]).unwrap().0.release(Status::SUCCESS);
        }
    }
}

#[test]
fn a_receiving_end_says_seldom_that_it_has_receives_and_is_not_woken_for_buffers_while_it_has_some() {
    const COUNT: usize = 64;
    let _one = lock(&fuzzing::ONE);
    software::install();
    let verbs = Verbs::new(Settings::default());
    let mut receiver = Receiver::new(&verbs);
    for _ in 0..COUNT {
        assert!(receiver.comes());
        receiver.works();
        receiver.lands(0);
        receiver.works();
    }
    assert!(receiver.messages <= COUNT / 4 + 2, "{} messages", receiver.messages);
    assert_eq!(receiver.bell.rung(), 0);
    // When all buffers have pieces, the first that is free wakes it.
    while receiver.comes() {
        receiver.works();
    }
    assert_eq!((software::receives(receiver.pair), receiver.bell.rung()), (0, 0));
    receiver.lands(0);
    assert_eq!(receiver.bell.rung(), 1);
    receiver.works();
    assert_eq!(receiver.told, 1);
}

#[test]
fn a_sending_end_does_not_wait_until_several_buffers_are_registered() {
    let _one = lock(&fuzzing::ONE);
    software::install();
    let verbs = Verbs::new(Settings::default());
    let mut receiver = Receiver::new(&verbs);
    let registered = || software::registered_for(LOCAL_WRITE);
    let first = registered();
    assert!(receiver.comes());
    let mut steps = 0;
    while receiver.step() {
        steps += 1;
        assert!(registered() <= first + steps, "several at once");
        assert!(receiver.told >= steps.min(2), "the sending end was not told");
    }
    assert!(registered() > first + 4);
}

/// A sending end, and its peer.
struct Sender {
    outgoing: Arc<Outgoing>,
    sender: verbs::Sender,
    bell: Arc<Bell>,
    stream: Stream,
    sleep: Sleep,
    bytes: Common,
    peer: UnixStream,
    pair: u32,
    /// Pieces that were finished, and messages that the peer has taken.
    finished: usize,
    taken: usize,
    /// Receives that the peer has granted.
    granted: usize,
    /// Completions that were reported.
    completions: usize,
}

impl Sender {
    fn new(verbs: &Verbs) -> Sender {
        let (peer, stream, outgoing, sender) = sending_over_verbs(verbs, PIECES as u32 - 1);
        let (bell, pair) = (Arc::clone(outgoing.bell.as_ref().unwrap()), software::pairs()[0]);
        let (sleep, bytes, finished, taken, completions) = Default::default();
        let granted = PIECES - 1;
        let mut sender = Sender {
            outgoing,
            sender,
            bell,
            stream,
            sleep,
            bytes,
            peer,
            pair,
            finished,
            taken,
            granted,
            completions,
        };
        sender.works();
        sender
    }

    /// A step of its thread. False: it sleeps.
    fn step(&mut self) -> bool {
        if !self.sleep.wakes(&self.sender.pieces, &self.stream, &self.bell) {
            return false;
        }
        if self.sleep.begins(&self.sender.pieces, &self.bell, true) {
            return true;
        }
        let turn = self.sender.turn(&self.stream, &self.bytes, Instant::now()).unwrap();
        self.sleep.is_idle = matches!(turn, Turn::Idle(_));
        true
    }

    /// Its thread works until it sleeps. Then all is sent that may be, and what is taken has free buffers.
    fn works(&mut self) {
        while self.step() {}
        let under_way = software::sends(self.pair);
        assert!(under_way == PIECES || self.taken + under_way == self.finished.min(self.granted));
        assert!(under_way > 0 || self.sender.pieces.under_way() == 0, "buffers of pieces that are taken");
    }

    /// A device has filled a buffer for the next piece, if there is one.
    fn finishes(&mut self) {
        let mut piece = self.outgoing.piece(self.finished as u64 + 1);
        match piece.fill(1) {
            Some(_) => {
                piece.finish(Status::SUCCESS);
                self.finished += 1;
            }
            None => piece.passed_on(),
        }
    }

    /// The peer takes a message.
    fn takes(&mut self) {
        let is_quiet = software::is_quiet(self.pair);
        if software::complete(self.pair, 0) {
            self.taken += 1;
            self.completions += usize::from(!is_quiet);
        }
    }

    /// The peer has posted so many more receives, or as many as there can be.
    fn grants(&mut self, receives: usize) {
        let receives = receives.min(self.taken + PIECES - self.granted);
        if receives > 0 {
            self.granted += receives;
            self.peer.write_all(&[receives as u8]).unwrap();
        }
    }
}

#[test]
fn pieces_that_are_queued_together_wake_the_sending_end_once_and_have_few_completions() {
    const ROUNDS: usize = 4;
    let _one = lock(&fuzzing::ONE);
    software::install();
    let verbs = Verbs::new(Settings::default());
    let mut sender = Sender::new(&verbs);
    for _ in 0..ROUNDS {
        sender.grants(PIECES);
        sender.works();
        (0..PIECES).for_each(|_| sender.finishes());
        sender.works();
        assert_eq!(software::sends(sender.pair), PIECES);
        (0..PIECES).for_each(|_| sender.takes());
        sender.works();
    }
    assert_eq!(sender.taken, ROUNDS * PIECES);
    assert!(sender.completions <= ROUNDS * PIECES / 4 + 1, "{} completions", sender.completions);
    assert_eq!(sender.bell.rung(), ROUNDS as u64);
    // The last one of several for which there are receives, and the last one at all, say that they are taken.
    sender.grants(3);
    (0..5).for_each(|_| sender.finishes());
    sender.works();
    (0..3).for_each(|_| sender.takes());
    sender.works();
    assert_eq!(sender.sender.pieces.under_way(), 0);
}

proptest! {
    /// Whatever happens while the thread works, is about to sleep, or sleeps: what it needs wakes it.
    #[test]
    fn a_receiving_end_never_sleeps_while_its_peer_waits(steps in prop::collection::vec(0usize..20, 0..200)) {
        let _one = lock(&fuzzing::ONE);
        software::install();
        let verbs = Verbs::new(Settings::default());
        let mut receiver = Receiver::new(&verbs);
        for step in steps {
            match step {
                0..6 => (0..1 << step).for_each(|_| _ = receiver.comes()),
                6..12 => (0..1 << (step - 6)).for_each(|which| receiver.lands(which)),
                12..19 => _ = receiver.step(),
                _ => receiver.works(),
            }
        }
        receiver.works();
    }

    /// The same for a sending end.
    #[test]
    fn a_sending_end_never_sleeps_over_what_it_can_send(steps in prop::collection::vec(0usize..24, 0..200)) {
        let _one = lock(&fuzzing::ONE);
        software::install();
        let verbs = Verbs::new(Settings::default());
        let mut sender = Sender::new(&verbs);
        for step in steps {
            match step {
                0..6 => (0..1 << step).for_each(|_| sender.finishes()),
                6..12 => (0..1 << (step - 6)).for_each(|_| sender.takes()),
                12..16 => sender.grants(1 << (step - 12)),
                16..23 => _ = sender.step(),
                _ => sender.works(),
            }
        }
        sender.works();
    }
}
