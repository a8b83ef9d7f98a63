//! Peers of a direct connection that do whatever they like, as a fuzzer says: another server's worker that
//! offers verbs, or answers an offer, and then sends and grants anything, over the socket and over verbs.
//!
//! [`pieces_any`] drives one end as its thread does, but turn by turn, so that a program always runs in the
//! same way. Verbs are those of [`host_bridge::verbs::software`]: everything above the C library is the real
//! code. It checks that what has arrived is exactly what a correct peer would have sent; that a piece's bytes
//! stay as they came until the client has landed them, and as they were until the other end has taken them;
//! that receives are granted as they are posted, and messages sent as they are granted; that each question of
//! the client is answered once; and that nothing of the connection is left.
//!
//! - [`receiving`]: the end that is tested receives pieces; [`sending`]: it sends them.

mod receiving;
mod sending;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::channel;

use host_bridge::endpoint::Client;
use host_bridge::verbs::software;
use protocol::channel::MAX_PAYLOAD;
use protocol::fuzzing::Steps;
use protocol::link::{DirectHeader, DirectQueue};
use protocol::ops::direct::{MAX_PIECE, PIECES};
use zerocopy::FromBytes;

use super::buffers::*;
use super::incoming::*;
use super::outgoing::*;
use super::*;
use crate::doubles::{Listener, Told};
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
        2..=4 => receiving::run(&mut steps),
        _ => sending::run(&mut steps),
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

/// Breaks the connection off: the socket, the queue pair, or one of the next `calls` calls of the C library.
fn break_off(how: u8, ours: &UnixStream, pair: u32, steps: &mut Steps<'_>, calls: usize) {
    match how % 64 {
        32.. => drop(ours.shutdown(Shutdown::Both)),
        0..16 => software::stop(pair),
        16..32 => software::fail(Some(steps.below(calls) as u32)),
    }
}

/// The bytes of a piece.
fn filling(number: u64, len: usize) -> Vec<u8> {
    vec![(number as u8).wrapping_mul(31) ^ 0x5a; len]
}

/// A client that asks for arrivals.
struct Asker {
    client: Arc<dyn Client>,
    /// Questions so far, and those of them that are not answered: what piece they are about.
    questions: AtomicU64,
    asked: Arc<Mutex<BTreeMap<u64, u64>>>,
}

impl Asker {
    fn new() -> Asker {
        let asked = Arc::<Mutex<BTreeMap<u64, u64>>>::default();
        let open = asked.clone();
        let client = Listener::new(move |told: Told<'_>| {
            let Told::Reply { seq, status, payload, .. } = told else { return };
            let number = lock(&open).remove(&seq);
            let number = number.unwrap_or_else(|| panic!("another answer to question {seq}"));
            if status.is_success() {
                let upto = u64::read_from_bytes(payload).expect("a number");
                assert!(
                    upto >= number && payload.len() <= MAX_PAYLOAD,
                    "piece {number} has arrived, and up to {upto}"
                );
            }
        });
        Asker { client: Arc::new(client), questions: AtomicU64::new(0), asked }
    }

    /// Asks whether a piece has arrived.
    fn ask(&self, incoming: &Incoming, number: u64) {
        let seq = self.questions.fetch_add(1, Ordering::Relaxed) + 1;
        lock(&self.asked).insert(seq, number);
        let later = || {
            let mut call = Call::new(self.client.clone());
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
    // A receiving end without a free buffer waits for the client, which here lands nothing. Where the first
    // piece begins depends on its answer.
    for begin in [0, OFFER, OFFER + 1] {
        let upto = bytes.get(begin..).map(|rest| begin + Expected::default().read(rest));
        bytes.truncate(upto.unwrap_or(bytes.len()));
    }

    let (ours, stream) = pair();
    let (asker, incoming) = (Asker::new(), Incoming::new(Arc::default(), None));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_peer_gets_pieces_through_or_loses_its_connection() {
        let programs = protocol::fuzzing::programs("pieces", 400, 500);
        let moved: usize = programs.iter().map(|program| pieces_any(program)).sum();
        assert!(moved > 1000, "{moved} pieces");
    }

    #[test]
    fn a_peer_may_name_the_queue_pair_of_the_end_itself() {
        let found: [&[u8]; 2] =
            [&[0x53, 0, 0, 2], &[0xa2, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0x1b, 0, 0, 0, 0, 0, 0, 0, 0xb4]];
        found.iter().for_each(|program| _ = pieces_any(program));
    }
}
