//! Peers of a direct connection that do whatever they like, as a fuzzer says: another server's worker that offers
//! verbs, or answers an offer, and then sends and grants anything, over the socket and over verbs.
//!
//! [`pieces_any`] drives one end as its thread does, but turn by turn, so that a program always runs in the same way. Verbs are those of
//! [`host_bridge::verbs::software`]: everything above the C library is the real code. It checks that what has
//! arrived is exactly what a correct peer would have sent; that a piece's bytes stay as they came until the client
//! has landed them, and as they were until the other end has taken them; that receives are granted as they are
//! posted, and messages sent as they are granted; that each question of the client is answered once; and that
//! nothing of the connection is left.

use std::collections::{BTreeMap, VecDeque};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use host_bridge::endpoint::{Client, Mapped, Sink, Source};
use host_bridge::verbs::software::{self, Outside};
use protocol::channel::MAX_PAYLOAD;
use protocol::data::HostRange;
use protocol::fuzzing::Steps;
use protocol::link::{DIRECT_VERBS_SINCE, DirectQueue, ProgressUpdate};
use zerocopy::FromBytes;

use super::verbs::{Receiving, Sender as VerbsSender, Turn};
use super::*;
use crate::driver::call::Call;

/// Steps of one program.
const STEPS: usize = 200;
/// Bytes that fit into a socket which nobody reads.
const SOCKET: usize = 64 << 10;
/// An offer on the socket.
const OFFER: usize = size_of::<DirectHeader>() + size_of::<DirectQueue>();
/// The right to write with a key (`IBV_ACCESS_REMOTE_WRITE`).
const REMOTE_WRITE: i32 = 2;

/// Programs share the software device, and so run one after the other.
pub(super) static ONE: Mutex<()> = Mutex::new(());

/// Runs a program, whatever it is. Gives how many pieces have come or been taken.
pub fn pieces_any(bytes: &[u8]) -> usize {
    let _one = lock(&ONE);
    software::install();
    let mut steps = Steps::new(bytes);
    let moved = match steps.below(8) {
        0 | 1 => socket(&mut steps),
        2..=4 => receiving(&mut steps),
        _ => sending(&mut steps),
    };
    software::fail(None);
    assert_eq!(software::objects(), 0, "objects of a connection that is over");
    moved
}

/// How the end that is tested uses verbs. `None`: its operator does not allow it.
fn verbs(steps: &mut Steps<'_>) -> Option<Verbs> {
    let how = steps.byte();
    let settings = Settings {
        gid_index: (how & 1 == 1).then_some(0),
        mtu: [None, Some(256), Some(4096), Some(1000)][usize::from(how >> 1 & 3)],
        ..Settings::default()
    };
    (how < 0xf0).then(|| Verbs::new(settings))
}

/// A queue that a peer says it has: mostly one that can be.
fn queue(steps: &mut Steps<'_>) -> DirectQueue {
    let how = steps.byte();
    let mut queue = DirectQueue {
        queue_pair: 0xff_fff0,
        psn: 1,
        mtu: 4096,
        receives: 2,
        lid: 9,
        // As `verbs` has it, if the program says the same.
        global: (how & 1).into(),
        gid: [9; 16],
        reason: [0; 220],
    };
    match how >> 1 & 15 {
        0 => queue.queue_pair = steps.number() as u32,
        1 => queue.mtu = steps.number() as u32,
        2 => queue.receives = steps.number() as u32,
        3 => queue.global = steps.u16(),
        4 => queue = DirectQueue { reason: queue.reason, ..DirectQueue::new_zeroed() },
        5 => {
            let (at, raw) = (steps.below(256), steps.bytes());
            let place = &mut queue.as_mut_bytes()[at..];
            let n = raw.len().min(place.len());
            place[..n].copy_from_slice(&raw[..n]);
        }
        6 => queue.receives = PIECES as u32,
        7 => queue.receives = 1,
        _ => {}
    }
    queue
}

fn pair() -> (UnixStream, Stream) {
    let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
    (ours, Stream::from(OwnedFd::from(theirs)))
}

/// Writes as a peer does. The other end may have closed the socket.
fn say(mut ours: &UnixStream, bytes: &[u8]) -> bool {
    ours.write_all(bytes).is_ok()
}

/// What the other end has written so far.
fn heard(mut ours: &UnixStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    ours.set_nonblocking(true).expect("a socket");
    // Ends because there is nothing more now, or ever.
    let _ = ours.read_to_end(&mut bytes);
    ours.set_nonblocking(false).expect("a socket");
    bytes
}

/// The bytes of a piece.
fn filling(number: u64, len: usize) -> Vec<u8> {
    vec![(number as u8).wrapping_mul(31) ^ 0x5a; len]
}

/// A client that asks for arrivals.
#[derive(Default)]
struct Asker {
    /// Questions so far, and those of them that are not answered: what piece they are about.
    questions: AtomicU64,
    asked: Mutex<BTreeMap<u64, u64>>,
}

impl Asker {
    /// Asks whether a piece has arrived.
    fn ask(self: &Arc<Asker>, incoming: &Incoming, number: u64) {
        let seq = self.questions.fetch_add(1, Ordering::Relaxed) + 1;
        lock(&self.asked).insert(seq, number);
        let later = || {
            let mut call = Call::new(Arc::<Asker>::clone(self));
            call.begin(seq, 0);
            call.later()
        };
        if incoming.arrival(number, later).is_err() {
            lock(&self.asked).remove(&seq);
        }
    }

    fn waits(&self) -> usize {
        lock(&self.asked).len()
    }
}

impl Client for Asker {
    fn reply(&self, seq: u64, _slot: u16, status: Status, payload: &[u8]) {
        let number = lock(&self.asked).remove(&seq);
        let number = number.unwrap_or_else(|| panic!("another answer to question {seq}"));
        if status.is_success() {
            let upto = u64::read_from_bytes(payload).expect("a number");
            assert!(
                upto >= number && payload.len() <= MAX_PAYLOAD,
                "piece {number} has arrived, and up to {upto}"
            );
        }
    }

    fn publish(&self, _updates: &[ProgressUpdate]) {}

    fn executed(&self, _seq: u64) {}

    fn source(&self, _seq: u64, _piece: u32, _range: HostRange) -> Result<Source, Status> {
        Err(Status::INVALID_VALUE)
    }

    fn sink(&self, _seq: u64, _piece: u32, _range: HostRange) -> Result<Sink, Status> {
        Err(Status::INVALID_VALUE)
    }

    fn nothing_sent(&self, _seq: u64) {}

    fn lose(&self, _reason: &str) {}

    fn close(&self) {}

    fn streams_data(&self) -> bool {
        false
    }

    fn traffic(&self) -> (u64, u64) {
        (0, 0)
    }
}

/// Pieces as a correct receiving end has them.
#[derive(Default)]
struct Expected {
    last: u64,
    pieces: BTreeMap<u64, Vec<u8>>,
}

impl Expected {
    /// Takes a header, and what came with it. False: a correct peer would not have sent that.
    fn take(&mut self, header: &DirectHeader, came: &[u8]) -> bool {
        let good = header.number > self.last
            && header.reserved == 0
            && u64::from(header.len) <= MAX_PIECE
            && header.len as usize == came.len();
        if good {
            self.last = header.number;
            if !came.is_empty() {
                self.pieces.insert(header.number, came.to_vec());
            }
        }
        good
    }

    /// What is on the socket, from the first header of a piece on. Returns where the piece begins that has no
    /// buffer, or the end.
    fn read(&mut self, bytes: &[u8]) -> usize {
        let mut rest = bytes;
        while let Ok((header, behind)) = DirectHeader::read_from_prefix(rest) {
            if self.pieces.len() == PIECES {
                return bytes.len() - rest.len();
            }
            let Some(piece) = behind.get(..header.len as usize) else { break };
            if !self.take(&header, piece) {
                break;
            }
            rest = &behind[piece.len()..];
        }
        bytes.len()
    }

    /// Whether the other end has all of these pieces and no others; `some`: or some of them.
    fn check(&self, incoming: &Incoming, some: bool) {
        let mut state = lock(&incoming.state);
        assert!(
            some || state.pieces.len() == self.pieces.len(),
            "{} pieces of {}",
            state.pieces.len(),
            self.pieces.len()
        );
        for (number, (buffer, len)) in &mut state.pieces {
            let expected = self.pieces.get(number).unwrap_or_else(|| panic!("piece {number} was not sent"));
            assert!(buffer.bytes(*len) == &expected[..], "piece {number} has other bytes");
        }
    }
}

/// A peer that says everything at once, over its socket: offers, pieces, and what is neither.
fn socket(steps: &mut Steps<'_>) -> usize {
    let verbs = verbs(steps);
    let mut bytes = Vec::new();
    let offers = steps.byte() & 1 == 1;
    if offers {
        bytes.extend_from_slice(DirectHeader::offer().as_bytes());
        bytes.extend_from_slice(queue(steps).as_bytes());
        bytes.push(steps.byte() & 3);
    }
    let mut number = 0;
    while !steps.is_over() && bytes.len() < SOCKET / 2 {
        match steps.below(8) {
            0 => bytes.extend_from_slice(steps.bytes()),
            1 => bytes.extend_from_slice(DirectHeader::offer().as_bytes()),
            2 => {
                let header = DirectHeader {
                    number: steps.number(),
                    len: steps.number() as u32,
                    reserved: steps.byte().into(),
                };
                bytes.extend_from_slice(header.as_bytes());
            }
            _ => {
                number += steps.below(4) as u64;
                let len = steps.number() as usize % 4096;
                bytes.extend_from_slice(DirectHeader { number, len: len as u32, reserved: 0 }.as_bytes());
                bytes.extend_from_slice(&filling(number, len));
            }
        }
    }
    // A receiving end without a free buffer waits for the client, which here lands nothing. Where the first piece begins depends on its answer.
    for begin in [0, OFFER, OFFER + 1] {
        let upto = bytes.get(begin..).map(|rest| begin + Expected::default().read(rest));
        bytes.truncate(upto.unwrap_or(bytes.len()));
    }

    let (ours, stream) = pair();
    let (asker, incoming) = (Arc::new(Asker::default()), Incoming::new(Arc::default()));
    (0..steps.below(4)).for_each(|n| asker.ask(&incoming, n as u64));
    assert!(say(&ours, &bytes));
    ours.shutdown(Shutdown::Write).expect("a socket");
    let why = incoming.read(&stream, verbs.as_ref(), PATIENCE);
    stream.shut_down();
    assert!(!why.is_empty());
    assert_eq!(asker.waits(), 0, "questions that nobody will answer");
    let mut expected = Expected::default();
    let first = match DirectQueue::read_from_bytes(&heard(&ours)[..]).ok() {
        // An offer with nothing behind its header.
        None if bytes.starts_with(DirectHeader::offer().as_bytes()) => bytes.len(),
        None => 0,
        Some(queue) if queue.queue_pair == 0 => OFFER,
        // Agreed: then nothing has come over verbs, and nothing more may come over the socket.
        Some(_) if bytes.get(OFFER) == Some(&1) => bytes.len(),
        Some(_) => OFFER + 1,
    };
    expected.read(bytes.get(first..).unwrap_or_default());
    expected.check(&incoming, false);
    asker.ask(&incoming, u64::MAX);
    assert_eq!(asker.waits(), 0, "a question that was asked too late");
    expected.pieces.len()
}

/// A peer that offers verbs, and then sends anything.
fn receiving(steps: &mut Steps<'_>) -> usize {
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
    let asker = Arc::new(Asker::default());
    let incoming = Incoming::new(Arc::default());
    let answered = super::verbs::answer(Some(&verbs), &stream, &incoming.pool);
    assert_eq!(software::registered_for(REMOTE_WRITE), 0, "the peer has been given a key");
    let mut moved = 0;
    if let Ok(Some(queue)) = answered {
        let answer = DirectQueue::read_from_bytes(&heard(&ours)[..]).expect("an answer");
        let pair = software::pairs()[0];
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
    asker: &'p Arc<Asker>,
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
                32..64 => {
                    self.excused = true;
                    let _ = self.ours.shutdown(Shutdown::Both);
                }
                64..80 => {
                    self.excused = true;
                    software::stop(self.pair);
                }
                80..96 => {
                    self.excused = true;
                    software::fail(Some(self.steps.below(8) as u32));
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
        // What had come in the same turn as the end may be lost.
        self.expected.check(self.incoming, turned.is_err());
        if goes_on {
            self.posted += heard(&self.ours).iter().map(|receives| usize::from(*receives)).sum::<usize>();
            let receives = software::receives(self.pair);
            if !self.excused {
                assert_eq!(self.posted, self.came + receives, "receives are not granted as they are posted");
            }
            let kept = lock(&self.incoming.state).pieces.len() + self.held.len();
            assert!(receives + kept <= PIECES, "{receives} receives are posted, and {kept} pieces kept");
            if !self.excused && kept < PIECES {
                assert!(receives > 0, "the connection is stuck: {kept} pieces are kept");
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

/// A peer that answers an offer of verbs, and then takes and grants anything.
fn sending(steps: &mut Steps<'_>) -> usize {
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
    let offered = super::verbs::offer(verbs.as_ref(), &stream, agreed);
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
    let pair = software::pairs()[0];
    assert_eq!(software::peer(pair), Some(answer.queue_pair));
    stream.set_nonblocking(true).expect("a socket");
    let (jobs, due) = channel();
    let outgoing = Outgoing { jobs: Mutex::new(Some(jobs)), pool: Pool::new(), bell: None };
    let mut receiver = HostileReceiver {
        steps,
        ours,
        stream: &stream,
        outgoing: Arc::new(outgoing),
        sender: VerbsSender::new(queue, Jobs { due, last: 0 }),
        pair,
        bytes: Bytes::default(),
        // One was for the probe.
        receives: answer.receives as usize - 1,
        granted: Vec::new(),
        filled: Vec::new(),
        due: VecDeque::new(),
        last: 0,
        under_way: VecDeque::new(),
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
    bytes: Bytes,
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
                32..64 => {
                    self.excused = true;
                    let _ = self.ours.shutdown(Shutdown::Both);
                }
                64..80 => {
                    self.excused = true;
                    software::stop(self.pair);
                }
                80..96 => {
                    self.excused = true;
                    software::fail(Some(self.steps.below(4) as u32));
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
        let queued = self.due.iter().chain(&self.under_way).chain(&self.taken);
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
            assert!(software::complete(self.pair, status) || self.excused);
            if status == 0 {
                self.taken.push((number, bytes));
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
        while self.receives > 0
            && self.under_way.len() < PIECES
            && let Some((number, bytes)) = self.due.pop_front()
        {
            if number > self.last {
                self.last = number;
                self.receives -= 1;
                self.check(self.under_way.len(), number, &bytes);
                self.under_way.push_back((number, bytes));
            }
        }
        // It looks for the next piece even if it may not send it yet, and lets go of those before it that come too late.
        while self.due.front().is_some_and(|(number, _)| *number <= self.last) {
            self.due.pop_front();
        }
        let owed = !self.due.is_empty() || !self.under_way.is_empty();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_peer_gets_pieces_through_or_loses_its_connection() {
        let programs = protocol::fuzzing::programs("pieces", 400, 500);
        let moved: usize = programs.iter().map(|program| pieces_any(program)).sum();
        assert!(moved > 1000, "{moved} pieces");
    }
}
