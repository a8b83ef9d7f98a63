//! A peer that takes anything: the end that is tested sends to it.

use std::collections::VecDeque;
use std::time::Duration;

use host_bridge::verbs::software::Outside;
use protocol::link::DIRECT_VERBS_SINCE;

use super::*;
use crate::direct::verbs::{Sender as VerbsSender, offer};

/// A peer that answers an offer of verbs, and then takes and grants anything.
pub(super) fn run(steps: &mut Steps<'_>) -> usize {
    let verbs = verbs(steps);
    let (ours, stream) = pair();
    let answer = queue(steps);
    let says = steps.byte();
    let mut bytes = answer.as_bytes().to_vec();
    if says & 7 == 7 {
        bytes.truncate(usize::from(steps.u16()));
    }
    say(&ours, &bytes);
    if says & 0xf == 0xf || bytes.len() < size_of::<DirectQueue>() {
        ours.shutdown(Shutdown::Write).expect("a socket");
    }
    if says >= 0xe0 {
        software::fail(Some(steps.byte().into()));
    }
    // Whether the probe comes through.
    software::outside(Outside::Done(if says & 0x18 == 0x18 { steps.byte().into() } else { 0 }));
    let agreed = if says & 0x60 == 0x60 { Version { major: 2, minor: 1 } } else { DIRECT_VERBS_SINCE };
    let offered = offer(verbs.as_ref(), &stream, agreed);
    software::outside(Outside::Kept);
    let said = heard(&ours);
    let queue = match offered {
        Err(_) => {
            assert!(bytes.len() < size_of::<DirectQueue>(), "the answer was whole");
            return 0;
        }
        Ok(Err(why)) => {
            // Pieces take the socket, and the other end knows.
            assert!(!why.is_empty());
            assert!(
                said.is_empty()
                    || said.len() == OFFER && answer.queue_pair == 0
                    || said.get(OFFER..) == Some(&[0])
            );
            return 0;
        }
        Ok(Ok(queue)) => queue,
    };
    assert_eq!((said.len(), said[OFFER]), (OFFER + 1, 1));
    let pair = software::every_pair()[0];
    assert_eq!(software::peer(pair), Some(answer.queue_pair));
    stream.set_nonblocking(true).expect("a socket");
    let (jobs, due) = channel();
    let outgoing = Outgoing::new(jobs, &Arc::default(), None, None, false);
    let mut receiver = HostileReceiver {
        steps,
        ours,
        stream: &stream,
        outgoing: Arc::new(outgoing),
        sender: VerbsSender::new(queue, Jobs::new(due, Duration::ZERO)),
        pair,
        bytes: Common::default(),
        // One was for the probe.
        receives: answer.receives as usize - 1,
        granted: Vec::new(),
        filled: Vec::new(),
        due: VecDeque::new(),
        last: 0,
        under_way: VecDeque::new(),
        quiet: Vec::new(),
        taken: Vec::new(),
        all: 0,
        count: 0,
        now: Instant::now(),
        stalled: None,
        excused: says >= 0xe0 || says & 0xf == 0xf,
    };
    receiver.run()
}

/// A piece that is to be sent or was sent: its number, and its bytes. None: it will not come.
type Due = (u64, Vec<u8>);

struct HostileReceiver<'p, 's> {
    steps: &'p mut Steps<'s>,
    ours: UnixStream,
    stream: &'p Stream,
    outgoing: Arc<Outgoing>,
    sender: VerbsSender,
    pair: u32,
    bytes: Common,
    /// Receives that the other end may use, and those that it has not heard of.
    receives: usize,
    granted: Vec<u8>,
    /// Pieces that a device has filled, but that are not finished.
    filled: Vec<(Sending, Due)>,
    /// What is finished.
    due: VecDeque<Due>,
    /// The number of the last of these that has had its turn.
    last: u64,
    /// Messages that are sent and not taken.
    under_way: VecDeque<Due>,
    /// Messages that are taken, which only the completion of a later one tells.
    quiet: Vec<Due>,
    /// Messages that are taken, which the other end has not seen.
    taken: Vec<Due>,
    /// Bytes of pieces that it has seen taken, and their number.
    all: u64,
    count: usize,
    /// The time, and since when something waits for this end.
    now: Instant,
    stalled: Option<Instant>,
    /// Something was done that may end the connection.
    excused: bool,
}

impl HostileReceiver<'_, '_> {
    fn run(&mut self) -> usize {
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
        // A device is done with all of them.
        while !self.filled.is_empty() {
            self.finish();
        }
        self.outgoing.pool.close();
        self.count
    }

    fn step(&mut self) -> bool {
        match self.steps.below(20) {
            0..=4 => {
                let number = self.last_filled() + 1 + self.steps.below(3) as u64;
                let len = u64::from(self.steps.byte()) + 1;
                if self.fill(number, len) && self.steps.byte() & 3 > 0 {
                    self.finish();
                }
            }
            5 => {
                let (number, len) = (self.steps.number(), self.steps.number() % MAX_PIECE + 1);
                self.fill(number, len.min(4096));
            }
            6 => self.finish(),
            7 => {
                // It will not come.
                let number = self.last_filled() + self.steps.below(3) as u64;
                drop(self.outgoing.piece(number));
                if number > 0 && lock(&self.outgoing.jobs).is_some() {
                    self.due.push_back((number, Vec::new()));
                }
            }
            8 => {
                let (number, len) = (self.last_filled() + 1, MAX_PIECE - self.steps.below(2) as u64);
                if self.fill(number, len) {
                    self.finish();
                }
            }
            9 | 10 => {
                let receives = self.steps.below(4) as u8;
                self.grant(receives);
            }
            11 => {
                let receives = self.steps.byte();
                self.grant(receives);
            }
            12..=14 => self.take(0),
            15 => match self.steps.byte() {
                0..32 => {
                    let status = self.steps.below(24) as u32;
                    self.take(status);
                }
                how @ 32..96 => {
                    self.excused = true;
                    break_off(how, &self.ours, self.pair, self.steps, 4);
                }
                96..128 => {
                    // The session ends.
                    self.excused = true;
                    drop(lock(&self.outgoing.jobs).take());
                }
                128..160 => {
                    assert!(software::send(self.pair, self.steps.bytes()).is_err(), "it has a receive");
                }
                160..192 => {
                    let (to, bytes) = ((self.steps.number(), self.steps.number() as u32), self.steps.bytes());
                    let written = software::write(self.pair, to, 0, bytes);
                    assert!(written.is_err(), "a write into memory of which the peer has no key");
                    // That ends the queue pair.
                    self.excused |= !bytes.is_empty();
                }
                192..224 => self.now += Duration::from_secs(self.steps.byte().into()),
                _ => return self.turn(),
            },
            _ => return self.turn(),
        }
        true
    }

    /// The highest number that the client has named.
    fn last_filled(&self) -> u64 {
        let due = self.due.iter().map(|(number, _)| *number);
        let filled = self.filled.iter().map(|(_, (number, _))| *number);
        due.chain(filled).max().unwrap_or_default().max(self.last).min(1 << 63)
    }

    /// The client has a piece filled by a device. False: there is no buffer for it.
    fn fill(&mut self, number: u64, len: u64) -> bool {
        let mut sending = self.outgoing.piece(number);
        let queued = self.due.iter().chain(&self.under_way).chain(&self.quiet).chain(&self.taken);
        let used = self.filled.len() + queued.filter(|(_, bytes)| !bytes.is_empty()).count();
        let mapped = sending.fill(len);
        assert!(self.excused || mapped.is_some() == (used < PIECES), "{used} buffers are in use");
        if let Some(mapped) = mapped {
            let bytes = filling(number, len as usize);
            mapped.write(0, &bytes);
            self.filled.push((sending, (number, bytes)));
            return true;
        }
        drop(sending);
        if number > 0 && lock(&self.outgoing.jobs).is_some() {
            self.due.push_back((number, Vec::new()));
        }
        false
    }

    /// One of the devices is done.
    fn finish(&mut self) {
        if !self.filled.is_empty() {
            let (sending, due) = self.filled.swap_remove(self.steps.below(self.filled.len()));
            sending.finish(Status::SUCCESS);
            if lock(&self.outgoing.jobs).is_some() {
                self.due.push_back(due);
            }
        }
    }

    fn grant(&mut self, receives: u8) {
        // More would fill the socket.
        if self.granted.len() < 1000 && say(&self.ours, &[receives]) {
            self.granted.push(receives);
        }
    }

    /// This end takes the oldest message, or its device says why it does not.
    fn take(&mut self, status: u32) {
        if let Some((number, bytes)) = self.under_way.pop_front() {
            self.check(0, number, &bytes);
            let is_quiet = software::is_quiet(self.pair);
            assert!(software::complete(self.pair, status) || self.excused);
            if status == 0 {
                self.quiet.push((number, bytes));
                if !is_quiet {
                    self.taken.append(&mut self.quiet);
                }
            } else {
                // The others are flushed.
                self.excused = true;
                self.under_way.clear();
            }
        }
    }

    /// The `n`-th message under way is this piece.
    fn check(&self, n: usize, number: u64, bytes: &[u8]) {
        if self.excused {
            return;
        }
        let header = DirectHeader { number, len: bytes.len() as u32, reserved: 0 };
        let sent = software::sent(self.pair, n).expect("a message under way");
        assert!(sent.write.is_none() && sent.bytes.len() == size_of::<DirectHeader>() + bytes.len());
        assert!(sent.bytes.starts_with(header.as_bytes()), "another header than {header:?}");
        assert!(sent.bytes.ends_with(bytes), "piece {number} has changed");
    }

    /// The other end takes its turn. False: the connection is over.
    fn turn(&mut self) -> bool {
        let turned = self.sender.turn(self.stream, &self.bytes, self.now);
        let worked = !self.granted.is_empty() || !self.taken.is_empty();
        let mut good = true;
        for receives in self.granted.drain(..) {
            self.receives += usize::from(receives);
            good &= receives > 0 && self.receives <= PIECES;
        }
        let given_up = self.stalled.filter(|_| !worked).is_some_and(|since| self.now - since > PATIENCE);
        if let Err(why) = turned {
            assert!(!good || given_up || self.excused, "the peer has done nothing wrong: {why}");
            assert!(!why.to_string().is_empty());
            return false;
        }
        assert!(good, "receives were granted that there cannot be");
        assert!(self.excused || !given_up, "a peer that takes nothing is not given up");
        for (_, bytes) in self.taken.drain(..) {
            self.all += bytes.len() as u64;
            self.count += 1;
        }
        for counter in [&self.bytes.all, &self.bytes.over_verbs] {
            assert!(self.excused || counter.load(Ordering::Relaxed) == self.all);
        }
        // What it should have sent now.
        // Those whose completion only a later one tells count as under way there.
        while self.receives > 0
            && self.under_way.len() + self.quiet.len() < PIECES
            && let Some((number, bytes)) = self.due.pop_front()
        {
            if number > self.last {
                self.last = number;
                self.receives -= 1;
                self.check(self.under_way.len(), number, &bytes);
                self.under_way.push_back((number, bytes));
            }
        }
        // It looks for the next piece even if it may not send it yet, and lets go of those before it that
        // come too late.
        while self.due.front().is_some_and(|(number, _)| *number <= self.last) {
            self.due.pop_front();
        }
        let owed = !self.due.is_empty() || !self.under_way.is_empty() || !self.quiet.is_empty();
        self.stalled = owed.then(|| self.stalled.filter(|_| !worked).unwrap_or(self.now));
        let sends = software::sends(self.pair);
        assert!(
            self.excused || sends == self.under_way.len(),
            "{sends} messages of {}",
            self.under_way.len()
        );
        assert!(heard(&self.ours).is_empty());
        true
    }
}
