//! What is kept, sent again, held and compressed, as [`Outgoing`] has it sent.

use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::sync::Weak;

use protocol::data::{HostRange, Place};
use zerocopy::FromBytes;

use super::*;
use crate::endpoint::outgoing::{HELD_FROM, Outgoing};

fn pair() -> (TcpStream, Connection) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let a = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (a, Connection { attempt: 0, stream: Arc::new(listener.accept().unwrap().0.into()) })
}

/// For a place of its own.
fn outgoing(outbox: &Arc<Outbox>, len: u64) -> Outgoing {
    static PLACES: AtomicU64 = AtomicU64::new(0);
    let place = Place::Region(PLACES.fetch_add(1, Ordering::Relaxed) as u32);
    Outgoing::new(Weak::new(), Arc::clone(outbox), 7, 0, HostRange { place, offset: 0, len })
}

#[test]
fn data_waits_for_a_connection_and_is_sent_again_from_any_byte() {
    let outbox = Outbox::new(1, 0, CompressUse::Never);
    outgoing(&outbox, 5).write(b"hello").unwrap();
    // Less than before, too: another process of the bridge knows of whole chunks only.
    for upto in [0, 3, HEADER + 2, HEADER] {
        let (mut ours, theirs) = pair();
        outbox.plug(0, theirs, upto as u64).unwrap();
        outbox.send(0).unwrap();
        let mut received = vec![0; HEADER + 5 - upto];
        ours.read_exact(&mut received).unwrap();
        assert_eq!(&received[received.len() - 3..], b"llo");
        outbox.unplug(0);
    }
    assert!(outbox.acknowledge(0, HEADER as u64 + 6).is_err(), "so much was not sent");
    outbox.acknowledge(0, HEADER as u64 + 5).unwrap();
    assert!(outbox.plug(0, pair().1, HEADER as u64).is_err(), "it had the whole chunk");
}

#[test]
fn over_a_long_way_all_connections_that_have_carried_little_have_a_part_of_short_data() {
    let outbox = Outbox::new(4, 0, CompressUse::Never);
    let bytes: Vec<u8> = (0..80_001u32).map(|n| (n / 7) as u8).collect();
    let sent = |bytes: &[u8]| {
        let before: Vec<u64> = outbox.streams.iter().map(|stream| lock(&stream.kept).journal.end()).collect();
        let outgoing = outgoing(&outbox, bytes.len() as u64);
        outgoing.write(bytes).unwrap();
        let after = outbox.streams.iter().map(|stream| lock(&stream.kept).journal.end());
        after.zip(before).map(|(after, before)| after - before).collect::<Vec<_>>()
    };
    let alone = |len: usize| [(len + HEADER) as u64, 0, 0, 0];
    assert_eq!(sent(&bytes), alone(bytes.len()), "over a short way");
    outbox.streams.iter().for_each(|stream| stream.far.store(true, Ordering::Relaxed));
    assert_eq!(sent(&bytes), [20_001, 20_001, 20_001, 19_998].map(|len| len + HEADER as u64));
    assert_eq!(sent(&bytes[..10_000]), alone(10_000), "what fits a round trip");
    // The parts come to their places.
    let (mut ours, theirs) = pair();
    outbox.plug(1, theirs, 0).unwrap();
    outbox.send(1).unwrap();
    let mut received = vec![0; HEADER + 20_001];
    ours.read_exact(&mut received).unwrap();
    let header = DataHeader { seq: 7, offset: 20_001, piece: 0, len: 20_001 };
    assert_eq!(received[..HEADER], *header.as_bytes());
    assert_eq!(received[HEADER..], bytes[20_001..40_002]);
    // Once a connection has carried much, it takes all.
    let long = vec![1; CARRIED as usize + 1];
    assert_eq!(sent(&long), alone(long.len()));
    assert_eq!(sent(&bytes), alone(bytes.len()));
}

#[test]
fn what_is_kept_is_bounded_and_room_comes_with_acknowledgements() {
    const LEN: usize = 256 << 10;
    let outbox = Outbox::new(1, 0, CompressUse::Never);
    let (mut ours, theirs) = pair();
    outbox.plug(0, theirs, 0).unwrap();
    let reading = std::thread::spawn(move || std::io::copy(&mut ours, &mut std::io::sink()));
    let bytes = vec![1; LEN];
    let mut sent = 0;
    while lock(&outbox.streams[0].kept).journal.kept() + (LEN as u64 + HEADER as u64) <= outbox.limit {
        outgoing(&outbox, LEN as u64).write(&bytes).unwrap();
        sent += LEN as u64 + HEADER as u64;
    }
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| outgoing(&outbox, LEN as u64).write(&bytes));
        assert!(!waiting.is_finished());
        outbox.acknowledge(0, sent).unwrap();
        waiting.join().unwrap().unwrap();
    });
    assert!(!lock(&outbox.streams[0].kept).free.is_empty());
    outbox.close();
    reading.join().unwrap().unwrap();
}

/// It would wait for ever otherwise.
#[test]
fn the_longest_chunk_has_room_beside_what_a_bridge_need_not_acknowledge() {
    let outbox = Outbox::new(1, 0, CompressUse::Never);
    let (least, longest) = (ACKNOWLEDGE_OUT as usize - 1 - HEADER, MAX_DATA as usize);
    outgoing(&outbox, least as u64).write(&vec![1; least]).unwrap();
    let kept = lock(&outbox.streams[0].kept).journal.kept();
    assert!(kept + (HEADER + longest) as u64 <= outbox.limit, "of {} bytes {kept} are kept", outbox.limit);
    outgoing(&outbox, longest as u64).write(&vec![1; longest]).unwrap();
}

#[test]
fn a_connection_whose_data_does_not_arrive_is_sent_nothing_more() {
    const LEN: usize = 1000;
    let outbox = Outbox::new(3, 0, CompressUse::Never);
    let connect = |lane| {
        let (ours, theirs) = pair();
        outbox.plug(lane, theirs, 0).unwrap();
        ours
    };
    let _ends: Vec<TcpStream> = (0..3).map(connect).collect();
    let outgoing = outgoing(&outbox, 1 << 40);
    let mut sent = [0; 3];
    for at in 0..30 {
        let lane = outgoing.idlest_lane();
        let lent = outgoing.lend(lane, LEN).unwrap();
        outgoing.send_lent(lane, at * LEN as u64, lent).unwrap();
        sent[lane] += 1;
        // Data arrives late at first, and of the last connection never.
        for lane in if at < 5 { 0..0 } else { 0..2 } {
            outbox.acknowledge(lane, sent[lane] * (HEADER + LEN) as u64).unwrap();
        }
    }
    assert_eq!(sent, [26, 2, 2]);
}

#[test]
fn who_waits_for_room_is_let_go_at_the_end() {
    let outbox = Outbox::new(1, 0, CompressUse::Never);
    let bytes = vec![1; 4 << 20];
    std::thread::scope(|scope| {
        let sending = scope.spawn(|| {
            let outgoing = outgoing(&outbox, 64 << 20);
            (0..16).try_for_each(|_| outgoing.write(&bytes))
        });
        while outbox.bytes.load(Ordering::Relaxed) == 0 {
            std::thread::yield_now();
        }
        outbox.close();
        assert!(sending.join().unwrap().is_err());
    });
}

/// The kernel knows its connection's way as short, however busy this machine was when it was made.
fn is_near(outbox: &Outbox) {
    outbox.streams.iter().for_each(|stream| stream.far.store(false, Ordering::Relaxed));
}

/// Memory that a test looks after.
struct Slot(&'static [u8], Arc<AtomicU64>);

impl Held for Slot {
    fn bytes(&self) -> &[u8] {
        self.0
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.1.fetch_add(1, Ordering::Relaxed);
    }
}

/// A stream over a way without length whose other end reads everything, chunks of 1 MiB that it is given, and
/// how many of those are free again.
struct Near {
    outbox: Arc<Outbox>,
    outgoing: Outgoing,
    free: Arc<AtomicU64>,
    reading: std::thread::JoinHandle<std::io::Result<u64>>,
}

impl Near {
    const LEN: usize = 1 << 20;
    /// A chunk with its header.
    const WHOLE: u64 = (HEADER + Near::LEN) as u64;

    /// For so many chunks.
    fn new(chunks: u64) -> Near {
        let outbox = Outbox::new(1, 64 << 20, CompressUse::Never);
        let (mut ours, theirs) = pair();
        outbox.plug(0, theirs, 0).unwrap();
        is_near(&outbox);
        let reading = std::thread::spawn(move || std::io::copy(&mut ours, &mut std::io::sink()));
        let outgoing = outgoing(&outbox, chunks * Near::LEN as u64);
        Near { outbox, outgoing, free: Arc::default(), reading }
    }

    fn hold(&self, number: u64) {
        static BYTES: [u8; Near::LEN] = [5; Near::LEN];
        let held = Box::new(Slot(&BYTES, Arc::clone(&self.free)));
        self.outgoing.send_held(0, number * Near::LEN as u64, held).unwrap();
    }

    fn end(self) {
        self.outbox.close();
        self.reading.join().unwrap().unwrap();
    }
}

#[test]
fn over_a_long_link_nothing_is_held_and_buffers_are_kept_for_as_long_as_data_flows() {
    const LEN: usize = Near::LEN;
    let near = Near::new(16);
    let (outbox, free, whole) = (&near.outbox, &near.free, Near::WHOLE);
    let hold = |number| near.hold(number);
    let kept = || lock(&outbox.streams[0].kept);
    hold(0);
    hold(1);
    assert_eq!(free.load(Ordering::Relaxed), 0, "it is not known yet how far the bridge is");
    // Only the clock tells the module how far it is.
    let long_ago = Instant::now().checked_sub(10 * FAR).unwrap();
    kept().distance.watched.as_mut().unwrap().since = long_ago;
    outbox.acknowledge(0, whole).unwrap();
    // However long this test takes, the second one has come right behind the first.
    kept().distance.watched.as_mut().unwrap().there = Some((whole, long_ago + 9 * FAR));
    kept().distance.arrives(2 * whole, true, long_ago + 9 * FAR + FAR / 2);
    assert!(kept().distance.is_far() && outbox.is_far(0));
    // Nor is the way another one.
    kept().distance.arrived = Some(Instant::now() + 1000 * FORGET);
    let before = outbox.copied.load(Ordering::Relaxed);
    (2..16).for_each(hold);
    assert_eq!(free.load(Ordering::Relaxed), 15, "all were copied, and the first one has arrived");
    assert_eq!(outbox.copied.load(Ordering::Relaxed) - before, 14 * LEN as u64);
    outbox.acknowledge(0, 15 * whole).unwrap();
    assert_eq!(kept().free_bytes, 13 * LEN, "the next chunks have their buffers");
    outbox.acknowledge(0, 16 * whole).unwrap();
    assert!(kept().free_bytes <= MOST_FREE);
    near.end();
}

/// The bytes that come behind the first `upto` of the stream, `count` of them.
fn sent_again(outbox: &Outbox, upto: u64, count: usize) -> Vec<u8> {
    outbox.unplug(0);
    let (mut ours, theirs) = pair();
    outbox.plug(0, theirs, upto).unwrap();
    outbox.send(0).unwrap();
    let mut received = vec![0; count];
    ours.read_exact(&mut received).unwrap();
    received
}

#[test]
fn what_was_compressed_is_kept_as_it_was_sent_and_memory_of_the_drivers_is_free_at_once() {
    const LEN: usize = 256 << 10;
    static BYTES: [u8; LEN] = [5; LEN];
    let outbox = Outbox::new(1, 0, CompressUse::Always);
    let free: Arc<AtomicU64> = Arc::default();
    let whole = outgoing(&outbox, 2 * LEN as u64 + 100);
    whole.send_held(0, 0, Box::new(Slot(&BYTES, Arc::clone(&free)))).unwrap();
    assert_eq!(free.load(Ordering::Relaxed), 1);
    let mut lent = whole.lend(0, LEN).unwrap();
    lent.bytes().fill(6);
    whole.send_lent(0, LEN as u64, lent).unwrap();
    // Its buffer is the next one.
    let mut lent = whole.lend(0, LEN).unwrap();
    assert!(lock(&outbox.streams[0].kept).free.is_empty() && lent.bytes() == [6; LEN]);
    drop(lent);
    // Short data is left as it is.
    whole.send_held(0, 2 * LEN as u64, Box::new(Slot(&BYTES[..100], Arc::clone(&free)))).unwrap();
    let kept = lock(&outbox.streams[0].kept).journal.kept();
    assert!(kept < 5000, "{kept} bytes for {LEN} twice");
    assert_eq!(outbox.bytes.load(Ordering::Relaxed), 2 * LEN as u64 + 100);
    let stream = sent_again(&outbox, 0, kept as usize);
    let mut rest = stream.as_slice();
    for (offset, byte) in [(0, 5), (LEN, 6)] {
        let header =
            DataHeader { seq: 7, offset: offset as u64, piece: 0, len: LEN as u32 | COMPRESSED_FLAG };
        let (head, behind) = rest.split_at(HEADER + 4);
        assert_eq!(head[..HEADER], *header.as_bytes());
        let len = u32::from_le_bytes(head[HEADER..].try_into().unwrap());
        let (compressed, behind) = behind.split_at(len as usize);
        assert!(lz4_flex::block::decompress(compressed, LEN).unwrap() == [byte; LEN]);
        rest = behind;
    }
    assert_eq!(rest.len(), HEADER + 100);
    // Cut anywhere, it goes on with the same bytes.
    for upto in 0..kept {
        let again = sent_again(&outbox, upto, (kept - upto) as usize);
        assert!(again == stream[upto as usize..], "cut behind {upto} bytes");
        if upto % 100 == 99 {
            // A bridge that has a chunk wholly need not get any of it again.
            outbox.acknowledge(0, upto + 1).unwrap();
        }
    }
}

#[test]
fn nothing_is_compressed_while_the_link_is_not_known_or_once_it_is_known_as_fast() {
    const LEN: usize = 1 << 20;
    let outbox = Outbox::new(1, 64 << 20, CompressUse::Auto);
    let (bytes, whole) = (vec![1; LEN], outgoing(&outbox, 1 << 40));
    let mut at = 0;
    let mut kept_of = |rate: Option<u64>| {
        *lock(outbox.downlink.as_ref().unwrap()) = Downlink::that_carries(rate);
        let before = lock(&outbox.streams[0].kept).journal.kept();
        whole.send_held(0, at, Box::new(Slot(Vec::leak(bytes.clone()), Arc::default()))).unwrap();
        at += LEN as u64;
        lock(&outbox.streams[0].kept).journal.kept() - before
    };
    let plain = (HEADER + LEN) as u64;
    assert_eq!([kept_of(None), kept_of(Some(1 << 30)), kept_of(Some(u64::MAX))], [plain; 3]);
    // So slow that compressing pays however busy this machine is.
    assert!(kept_of(Some(1000)) < plain / 100);
    assert_eq!([kept_of(None), kept_of(Some(1 << 30))], [plain; 2]);
    let never = Outbox::new(1, 64 << 20, CompressUse::Never);
    outgoing(&never, LEN as u64).write(&bytes).unwrap();
    assert_eq!(lock(&never.streams[0].kept).journal.kept(), plain);
}

/// Chunks whose bytes take longer than a way that counts as short may.
#[test]
fn a_chunk_whose_own_bytes_take_long_is_held_all_the_same() {
    let near = Near::new(64);
    let (outbox, free, whole) = (&near.outbox, &near.free, Near::WHOLE);
    let hold = |number| near.hold(number);
    let takes = FAR + FAR / 5;
    // One alone, and some in a row, which come one after the other.
    let mut chunk = 0;
    for row in [1, 4, 1, 3] {
        (chunk..chunk + row).for_each(hold);
        let mut now = Instant::now();
        lock(&outbox.streams[0].kept).distance.watched.as_mut().unwrap().since = now;
        for number in chunk..chunk + row {
            now += takes;
            lock(&outbox.streams[0].kept).distance.arrives(
                (number + 1) * whole,
                number + 1 < chunk + row,
                now,
            );
        }
        chunk += row;
        outbox.acknowledge(0, chunk * whole).unwrap();
        assert!(!outbox.is_far(0), "after {chunk} chunks");
    }
    hold(chunk);
    assert_eq!((free.load(Ordering::Relaxed), outbox.copied.load(Ordering::Relaxed)), (chunk, 0));
    near.end();
}

#[test]
fn the_shortest_time_says_how_far_the_bridge_is_until_the_path_may_be_another() {
    let begin = Instant::now();
    let mut distance = Distance::default();
    assert!(!distance.is_far());
    distance.leaves(0, 10, begin);
    distance.arrives(9, true, begin + FAR / 2);
    assert!(distance.shortest.is_none(), "the watched one has not arrived");
    distance.arrives(10, true, begin + FAR);
    assert!(distance.is_far());
    // A short time counts, a longer one later does not.
    distance.leaves(20, 30, begin + FAR);
    distance.arrives(40, true, begin + FAR + FAR / 2);
    assert!(!distance.is_far());
    distance.leaves(40, 50, begin + FAR * 2);
    distance.arrives(50, false, begin + FAR * 9);
    assert!(!distance.is_far());
    let later = begin + FAR * 9 + FORGET * 2;
    distance.leaves(50, 60, later);
    distance.arrives(60, false, later + FAR);
    assert!(distance.is_far());
    // What nothing follows says nothing if it is long: its own bytes may have taken the time.
    distance.forget();
    distance.leaves(60, 60 + 2 * SHORT, later);
    distance.arrives(60 + 2 * SHORT, false, later + FAR * 9);
    assert!(distance.shortest.is_none());
    // Nor do a few bytes behind it say how long many take.
    let (far, end) = (later + FAR * 9, 4 * SHORT);
    distance.leaves(0, end, later);
    distance.arrives(end, true, far);
    distance.arrives(end + 100, true, far + FAR);
    assert!(distance.shortest.is_none());
    distance.arrives(2 * end, true, far + FAR * 2);
    assert_eq!(distance.shortest, Some(FAR * 7));
    distance.leaves(0, end, later);
    distance.arrives(end, true, later + FAR * 3);
    distance.arrives(end + 100, false, later + FAR * 4);
    assert_eq!(distance.shortest, Some(FAR * 2), "the same as for the whole of it at most");
}

#[test]
fn memory_is_held_until_its_bytes_have_arrived_or_were_copied() {
    const LEN: usize = HELD_FROM;
    static BYTES: [[u8; LEN]; 3] = [[1; LEN], [2; LEN], [3; LEN]];
    let outbox = Outbox::new(1, 0, CompressUse::Never);
    let (mut ours, theirs) = pair();
    outbox.plug(0, theirs, 0).unwrap();
    is_near(&outbox);
    let free: Arc<AtomicU64> = Arc::default();
    let given_back = || free.load(Ordering::Relaxed);
    let outgoing = outgoing(&outbox, 3 * LEN as u64 + 2);
    let hold = |offset: usize, bytes| {
        outgoing.send_held(0, offset as u64, Box::new(Slot(bytes, Arc::clone(&free)))).unwrap();
    };
    let whole = HEADER + LEN;
    std::thread::scope(|scope| {
        let reading = scope.spawn(move || {
            let mut received = vec![0; 3 * whole];
            ours.read_exact(&mut received).unwrap();
            received
        });
        BYTES.iter().enumerate().for_each(|(number, bytes)| hold(number * LEN, bytes));
        let received = reading.join().unwrap();
        let arrived = || outgoing.unacknowledged().unwrap().arrived(0);
        assert_eq!((received[HEADER], received[whole - 1], given_back(), arrived()), (1, 1, 0, 0));
        outbox.acknowledge(0, whole as u64).unwrap();
        assert_eq!((given_back(), arrived()), (1, whole as u64));
        outgoing.unacknowledged().unwrap().copy(0);
        assert_eq!(given_back(), 3);
        // The copies are sent again.
        outbox.unplug(0);
        let (mut ours, theirs) = pair();
        outbox.plug(0, theirs, whole as u64 + 1).unwrap();
        is_near(&outbox);
        let reading = scope.spawn(move || {
            let mut again = vec![0; 2 * whole - 1];
            ours.read_exact(&mut again).unwrap();
            again
        });
        outbox.send(0).unwrap();
        assert!(reading.join().unwrap() == received[whole + 1..]);
    });
    // What is beyond the data's end is neither sent nor held, nor is short data held.
    hold(3 * LEN + 2, b"none");
    assert_eq!(given_back(), 4);
    hold(3 * LEN, b"xy");
    assert_eq!(given_back(), 5);
    assert_eq!(outbox.copied.load(Ordering::Relaxed), 2 * LEN as u64 + 2, "two held ones and a short one");
    hold(0, &BYTES[0]);
    assert_eq!(given_back(), 5);
    outbox.close();
    assert_eq!(given_back(), 6);
}

/// All that a stream keeps: of each chunk where its data begins and what it is.
fn kept_chunks(outbox: &Outbox, stream: usize) -> Vec<(u64, Vec<u8>)> {
    let len = lock(&outbox.streams[stream].kept).journal.kept();
    let (mut ours, theirs) = pair();
    outbox.plug(stream, theirs, 0).unwrap();
    let mut bytes = vec![0; len as usize];
    std::thread::scope(|scope| {
        scope.spawn(|| outbox.send(stream).unwrap());
        ours.read_exact(&mut bytes).unwrap();
    });
    let (mut rest, mut chunks) = (bytes.as_slice(), Vec::new());
    while !rest.is_empty() {
        let (header, behind) = DataHeader::read_from_prefix(rest).unwrap();
        let plain = (header.len & !COMPRESSED_FLAG) as usize;
        let (bytes, behind) = if header.len & COMPRESSED_FLAG == 0 {
            let (bytes, behind) = behind.split_at(plain);
            (bytes.to_vec(), behind)
        } else {
            let (len, behind) = behind.split_first_chunk().unwrap();
            let (bytes, behind) = behind.split_at(u32::from_le_bytes(*len) as usize);
            (lz4_flex::block::decompress(bytes, plain).unwrap(), behind)
        };
        // Its command has the number of the place.
        chunks.push((header.seq + header.offset, bytes));
        rest = behind;
    }
    chunks
}

#[test]
fn later_data_for_the_same_bytes_comes_last_whichever_connection_is_the_fastest() {
    const ALL: usize = 300_000;
    let held = |byte: u8, len: usize| Box::new(Slot(vec![byte; len].leak(), Arc::default()));
    for (compress, far) in
        [(CompressUse::Never, false), (CompressUse::Never, true), (CompressUse::Always, false)]
    {
        let outbox = Outbox::new(3, 64 << 20, compress);
        outbox.streams.iter().for_each(|stream| stream.far.store(far, Ordering::Relaxed));
        let mut truth = vec![0; ALL];
        let mut outgoing = |offset: usize, len: usize, byte: u8| {
            truth[offset..offset + len].fill(byte);
            let range = HostRange { place: Place::Arena, offset: offset as u64, len: len as u64 };
            Outgoing::new(Weak::new(), Arc::clone(&outbox), offset as u64, 0, range)
        };
        for lane in 0..3 {
            let (offset, byte) = (100_000 * lane, 1 + lane as u8);
            drop(outgoing(offset, 90_000, byte).send_held(lane, 0, held(byte, 90_000)).unwrap());
        }
        drop(outgoing(50_000, 250_000, 4).send_held(1, 0, held(4, 250_000)).unwrap());
        let lent = outgoing(80_000, 150_000, 5);
        let mut buffer = lent.lend(2, 150_000).unwrap();
        buffer.bytes().fill(5);
        lent.send_lent(2, 0, buffer).unwrap();
        drop(outgoing(299_000, 8, 6).send_held(0, 0, held(6, 8)).unwrap());
        let streams = [0, 1, 2].map(|stream| kept_chunks(&outbox, stream));
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let mut memory = vec![0; ALL];
            for (at, bytes) in order.into_iter().flat_map(|stream| &streams[stream]) {
                memory[*at as usize..][..bytes.len()].copy_from_slice(bytes);
            }
            assert!(memory == truth, "{compress:?}, far: {far}, {order:?}");
        }
    }
}

/// Its thread would copy it only out of its own stream when the memory is needed.
#[test]
fn memory_is_not_held_for_another_lanes_stream() {
    const LEN: usize = HELD_FROM;
    static BYTES: [u8; LEN] = [1; LEN];
    let (outbox, free) = (Outbox::new(2, 0, CompressUse::Never), Arc::<AtomicU64>::default());
    let outgoing = outgoing(&outbox, LEN as u64);
    let hold = |lane| drop(outgoing.send_held(lane, 0, Box::new(Slot(&BYTES, Arc::clone(&free)))).unwrap());
    hold(0);
    assert_eq!(free.load(Ordering::Relaxed), 0);
    hold(1);
    assert_eq!(free.load(Ordering::Relaxed), 1, "it follows the first, in a copy");
    hold(2);
    assert_eq!(free.load(Ordering::Relaxed), 1, "the first stream again");
}
