use super::super::tests::TestMemory;
use super::*;
use std::collections::BTreeMap;
use std::time::Duration;
use zerocopy::IntoBytes;

type TestFlows = Flows<TestMemory>;

fn upload(seq: u64, piece: u32, len: u64, late: bool) -> Upload<TestMemory> {
    Upload { seq, piece, span: TestMemory::span(len), late }
}

/// Queues a piece for which the server need not be asked.
fn push(flows: &mut TestFlows, flow: u64, seq: u64, piece: u32, len: u64) {
    flows.flow = flow;
    assert!(!flows.push(upload(seq, piece, len, false)), "command {seq}");
}

fn grant(flows: &mut TestFlows, seq: u64, piece: u32, upto: u64) {
    flows.grant(DataGrant { seq, piece, reserved: 0, upto }).unwrap();
}

/// Takes chunks as long as there are some; gives the seq, offset and length of each.
fn drain(flows: &mut TestFlows) -> Vec<(u64, u64, u64)> {
    std::iter::from_fn(|| flows.next_chunk()).map(|c| (c.seq, c.at, u64::from(c.len))).collect()
}

#[test]
fn chunks_cover_a_piece_once_and_in_order() {
    for len in [1, MIN_CHUNK, MIN_CHUNK + 1, 7 * MAX_CHUNK + 13, 100 * MAX_CHUNK] {
        let mut flows = TestFlows::new(4, 0, CacheUse::Never);
        push(&mut flows, 0, 1, 0, len);
        let mut at = 0;
        for step in 1..=4 {
            grant(&mut flows, 1, 0, len / 4 * step + len % 4);
            while let Some(chunk) = flows.next_chunk() {
                assert_eq!(chunk.at, at);
                assert!(u64::from(chunk.len) <= MAX_CHUNK + MAX_CHUNK / 4);
                at += u64::from(chunk.len);
                assert!(at <= EAGER_PIECE.max(len / 4 * step + len % 4));
            }
        }
        assert_eq!((at, flows.places.len()), (len, 0));
    }
}

/// Measures a link of 100 MB/s, and 10 ms there and back. Gives the time.
fn over_ten_milliseconds(flows: &mut TestFlows) -> Instant {
    let mut now = Instant::now();
    for seq in 1000..1005 {
        flows.pace.leaves((seq, 0, 0), 1_000_000, || now);
        now += Duration::from_millis(10);
        flows.pace.arrives(seq, 0, 0, (1_000_000, 1_000_000), || now);
    }
    now
}

#[test]
fn as_long_as_nothing_is_known_of_the_link_all_connections_have_a_part_of_short_data() {
    let lens = |flows: &mut TestFlows, seq, len| {
        push(flows, 0, seq, 0, len);
        drain(flows).iter().map(|(_, _, len)| *len).collect::<Vec<_>>()
    };
    let mut flows = TestFlows::new(4, 128 << 20, CacheUse::Never);
    assert!(flows.is_unknown());
    assert_eq!(lens(&mut flows, 1, 80_000), [20_000; 4]);
    assert_eq!(lens(&mut flows, 2, 15_000), [15_000]);
    assert_eq!(lens(&mut flows, 3, 1 << 20), [256 << 10; 4]);
    let mut flows = TestFlows::new(4, 128 << 20, CacheUse::Never);
    over_ten_milliseconds(&mut flows);
    assert!(!flows.is_unknown());
    assert_eq!(lens(&mut flows, 4, 80_000), [80_000]);
    // Of a server that takes no more than the least eagerly, it is of no interest how far it is.
    let mut flows = TestFlows::new(4, 0, CacheUse::Never);
    assert_eq!(lens(&mut flows, 1, 80_000), [80_000]);
}

/// What is sent next: `None` if nothing is.
fn next(flows: &mut TestFlows, now: Instant) -> Option<Chunk<TestMemory>> {
    flows.next_chunk_at(|| now)
}

#[test]
fn the_servers_answer_is_not_waited_for_where_sending_takes_much_less_time() {
    let mut flows = TestFlows::new(4, 128 << 20, CacheUse::Slow);
    let mut now = over_ten_milliseconds(&mut flows);
    assert!(flows.waits());
    // Of what takes less than a quarter of that, nothing waits.
    for seq in 1..=20 {
        push(&mut flows, 0, seq, 0, 200_000);
        assert_eq!(hash(&mut flows), 1);
        let ask = next(&mut flows, now).unwrap();
        assert!(matches!(ask.carries, Carries::Hash(_)));
        let chunk = next(&mut flows, now).unwrap();
        assert_eq!((chunk.seq, chunk.len, chunk.carries), (seq, 200_000, Carries::Bytes { keep: true }));
        if seq < 20 {
            now += Duration::from_millis(12);
            flows.arrived_at(&chunk, 200_000, || now);
            tell(&mut flows, seq, 0, 1);
        } else {
            // What comes behind it has to wait for the link in any case.
            push(&mut flows, 0, 21, 0, 200_000);
            assert_eq!(hash(&mut flows), 1);
            assert!(matches!(next(&mut flows, now).unwrap().carries, Carries::Hash(_)));
            assert!(next(&mut flows, now).is_none());
            flows.arrived_at(&chunk, 200_000, || now + Duration::from_millis(12));
            assert!(next(&mut flows, now).is_none());
            tell(&mut flows, 21, 0, 1);
            assert_eq!(next(&mut flows, now).unwrap().carries, Carries::Nothing);
        }
    }
    // Nothing is left of all this.
    push(&mut flows, 0, 22, 0, 200_000);
    assert!(matches!(next(&mut flows, now).unwrap().carries, Carries::Bytes { keep: true }));
    push(&mut flows, 1, 23, 0, 900_000);
    assert_eq!(hash(&mut flows), 1);
    assert!(matches!(next(&mut flows, now).unwrap().carries, Carries::Hash(_)));
    assert!(next(&mut flows, now).is_none());
    tell(&mut flows, 23, 0, 0);
    assert_eq!(next(&mut flows, now).unwrap().carries, Carries::Bytes { keep: true });
}

/// Asks about the next blocks; the hash of each is its command's number.
fn hash(flows: &mut TestFlows) -> usize {
    let mut count = 0;
    while let Some(mut task) = flows.next_to_hash() {
        task.hash = [task.seq as u8; 32];
        flows.hashed(task);
        count += 1;
    }
    count
}

fn tell(flows: &mut TestFlows, seq: u64, offset: u64, known: u32) {
    let known = DataKnown { seq, offset, piece: 0, known };
    assert!(flows.frame(frame::DATA_KNOWN, known.as_bytes()).unwrap());
}

/// Takes chunks as long as there are some; gives the seq, length and kind of each.
fn kinds(flows: &mut TestFlows) -> Vec<(u64, u64, Carries)> {
    std::iter::from_fn(|| flows.next_chunk()).map(|c| (c.seq, u64::from(c.len), c.carries)).collect()
}

const NEW: Carries = Carries::Bytes { keep: true };

#[test]
fn what_the_server_has_is_not_sent_and_what_is_new_is_not_delayed() {
    const LEN: u64 = 100_000;
    let mut flows = TestFlows::new(4, 0, CacheUse::Always);
    let ask = |seq: u64| (seq, LEN, Carries::Hash([seq as u8; 32]));
    let send = |flows: &mut TestFlows, seq: u64| {
        push(flows, 1, seq, 0, LEN);
        assert_eq!(hash(flows), 1);
        kinds(flows)
    };
    // The first answer is waited for, and those behind one that the server has a block.
    assert_eq!(send(&mut flows, 1), [ask(1)]);
    tell(&mut flows, 1, 0, 1);
    assert_eq!(kinds(&mut flows), [(1, LEN, Carries::Nothing)]);
    for seq in [2, 3] {
        assert_eq!(send(&mut flows, seq), [ask(seq)]);
        tell(&mut flows, seq, 0, 0);
        assert_eq!(kinds(&mut flows), [(seq, LEN, NEW)]);
    }
    // The server does not seem to have what comes.
    assert_eq!(send(&mut flows, 4), [ask(4), (4, LEN, NEW)]);
    // It has after all, also what was sent meanwhile. So the next answer is waited for again, but not for
    // ever.
    tell(&mut flows, 4, 0, 1);
    assert_eq!(send(&mut flows, 5), [ask(5)]);
    flows.flow = 2;
    assert!(!flows.push(upload(6, 0, LEN, false)));
    assert_eq!((hash(&mut flows), kinds(&mut flows)), (1, vec![ask(6)]));
    tell(&mut flows, 5, 0, 0);
    // An answer that it does not have one block lets those go on that wait for others.
    let sent = kinds(&mut flows);
    assert!(sent.contains(&(5, LEN, NEW)) && sent.contains(&(6, LEN, NEW)), "{sent:?}");
    // What the server was not asked about, what it makes up, short and late data.
    for (seq, offset) in [(6, 0), (99, 0), (6, 17), (u64::MAX, u64::MAX)] {
        tell(&mut flows, seq, offset, 0);
    }
    push(&mut flows, 1, 7, 0, 1000);
    assert_eq!((hash(&mut flows), kinds(&mut flows)), (0, vec![(7, 1000, Carries::Bytes { keep: false })]));
    assert!(!flows.push(upload(8, 0, LEN, true)));
    assert_eq!(hash(&mut flows), 0);
    assert!(flows.frame(frame::DATA_KNOWN, &[1, 2, 3]).is_err());
}

#[test]
fn what_is_left_of_a_block_waits_for_the_answer_too() {
    const LEN: u64 = 3 << 20;
    for known in [true, false] {
        let mut flows = TestFlows::new(4, 0, CacheUse::Always);
        push(&mut flows, 1, 1, 0, LEAST_TO_ASK);
        assert_eq!((hash(&mut flows), kinds(&mut flows).len()), (1, 1));
        tell(&mut flows, 1, 0, 0);
        assert_eq!(kinds(&mut flows), [(1, LEAST_TO_ASK, NEW)]);
        // Its hash is being computed, and the first part is sent meanwhile.
        push(&mut flows, 1, 2, 0, LEN);
        grant(&mut flows, 2, 0, LEN);
        let task = flows.next_to_hash().unwrap();
        let first = u64::from(flows.next_chunk().unwrap().len);
        assert!(first < LEN);
        // Now answers are waited for again.
        tell(&mut flows, 1, 0, 1);
        flows.hashed(task);
        assert!(matches!(kinds(&mut flows)[..], [(2, LEN, Carries::Hash(_))]));
        tell(&mut flows, 2, 0, u32::from(known));
        let rest = kinds(&mut flows);
        assert_eq!(rest.iter().map(|(_, len, _)| len).sum::<u64>(), LEN - first);
        assert!(rest.iter().all(|(.., carries)| (*carries == Carries::Nothing) == known), "{rest:?}");
        assert!(flows.flows.is_empty() && flows.places.is_empty());
        // Nobody asks about a block that was sent.
        push(&mut flows, 1, 3, 0, LEN);
        let task = flows.next_to_hash().unwrap();
        tell(&mut flows, 1, 0, 0);
        tell(&mut flows, 1, 0, 0);
        grant(&mut flows, 3, 0, LEN);
        tell(&mut flows, 1, 0, 0);
        assert_eq!(kinds(&mut flows).iter().map(|(_, len, _)| len).sum::<u64>(), LEN);
        flows.hashed(task);
        assert_eq!(kinds(&mut flows), []);
    }
}

#[test]
fn a_session_sends_a_megabyte_of_what_the_server_has_and_then_knows() {
    const LEN: u64 = 3 << 20;
    // What is sent first arrives fast, or not so fast, or has not yet when the server answers.
    for arrives in [Some(Duration::from_micros(300)), Some(Duration::from_millis(9)), None] {
        let (begin, mut flows) = (Instant::now(), TestFlows::new(4, 128 << 20, CacheUse::Slow));
        (1..5).for_each(|seq| {
            push(&mut flows, seq, seq, 0, LEN);
            grant(&mut flows, seq, 0, LEN);
        });
        assert_eq!(hash(&mut flows), 4);
        let all: Vec<_> = std::iter::from_fn(|| next(&mut flows, begin)).collect();
        let sent: Vec<_> = all.iter().filter(|chunk| chunk.sends() > 0).collect();
        let bytes =
            |chunks: &[&Chunk<TestMemory>]| chunks.iter().map(|chunk| u64::from(chunk.len)).sum::<u64>();
        assert_eq!(bytes(&sent), 1 << 20);
        if let Some(time) = arrives {
            sent.iter().for_each(|chunk| flows.arrived_at(chunk, chunk.len.into(), || begin + time));
        }
        let fast = arrives.is_some_and(|time| time < Duration::from_millis(1));
        if !fast {
            assert!(next(&mut flows, begin).is_none(), "{arrives:?}");
            (1..5).for_each(|seq| tell(&mut flows, seq, 0, 1));
        }
        let rest: Vec<_> = std::iter::from_fn(|| next(&mut flows, begin)).collect();
        let rest: Vec<_> = rest.iter().collect();
        assert_eq!(bytes(&rest), 4 * LEN - (1 << 20), "{arrives:?}");
        assert!(rest.iter().all(|chunk| (chunk.carries == Carries::Nothing) != fast), "{arrives:?}");
    }
}

#[test]
fn what_waits_for_a_server_that_does_not_answer_is_sent_after_a_while() {
    const LEN: u64 = 900_000;
    let mut flows = TestFlows::new(4, 128 << 20, CacheUse::Slow);
    let sent = |flows: &mut TestFlows, now: Instant| -> Vec<(u64, Carries)> {
        std::iter::from_fn(|| next(flows, now)).map(|c| (c.seq, c.carries)).collect()
    };
    let begin = over_ten_milliseconds(&mut flows);
    let after = |seconds| begin + Duration::from_secs(seconds);
    // In front of the question, on a slow link.
    push(&mut flows, 1, 1, 0, 1000);
    let before = next(&mut flows, begin).unwrap();
    push(&mut flows, 1, 2, 0, LEN);
    assert_eq!((hash(&mut flows), sent(&mut flows, begin).len()), (1, 1));
    assert!(!flows.look(begin) && !flows.look(after(2)));
    flows.arrived_at(&before, 1000, || after(2));
    assert!(!flows.look(after(4)) && !flows.look(after(6)) && !flows.has_chunks());
    assert!(flows.look(after(7)) && !flows.look(after(7)));
    assert!(sent(&mut flows, after(7)).iter().all(|sent| *sent == (2, NEW)) && !flows.has_chunks());
    // Nor does what comes then wait.
    push(&mut flows, 1, 3, 0, LEN);
    assert_eq!(hash(&mut flows), 1);
    assert!(sent(&mut flows, after(7)).contains(&(3, NEW)));
    // It does once the server has answered.
    tell(&mut flows, 2, 0, 1);
    push(&mut flows, 1, 4, 0, LEN);
    assert_eq!((hash(&mut flows), sent(&mut flows, after(7)).len()), (1, 1));
    assert!(!flows.look(after(8)) && !flows.look(after(10)));
    [3, 4].into_iter().for_each(|seq| tell(&mut flows, seq, 0, 1));
    assert_eq!(sent(&mut flows, after(10)), [(4, Carries::Nothing)]);
    // Without a question there is no answer to miss.
    assert!(!flows.look(after(200)) && !flows.look(after(300)) && flows.waits());
    // Tests wait however long it takes.
    let mut flows = TestFlows::new(4, 0, CacheUse::Always);
    push(&mut flows, 1, 1, 0, LEN);
    assert_eq!((hash(&mut flows), kinds(&mut flows).len()), (1, 1));
    assert!(!flows.look(begin) && !flows.look(after(100)) && flows.waits());
}

#[test]
fn over_other_connections_nothing_waits_until_the_link_is_known() {
    let mut flows = TestFlows::new(4, 128 << 20, CacheUse::Slow);
    let now = over_ten_milliseconds(&mut flows);
    push(&mut flows, 1, 1, 0, 900_000);
    assert_eq!(hash(&mut flows), 1);
    while next(&mut flows, now).is_some() {}
    assert!(flows.waits() && !flows.has_chunks());
    flows.relinked();
    assert!(!flows.waits() && flows.has_chunks() && flows.is_unknown());
}

#[test]
fn after_a_pause_without_data_nothing_waits_until_the_link_is_known() {
    let mut flows = TestFlows::new(4, 128 << 20, CacheUse::Slow);
    let now = over_ten_milliseconds(&mut flows);
    push(&mut flows, 1, 1, 0, 900_000);
    assert_eq!(hash(&mut flows), 1);
    assert!(matches!(next(&mut flows, now).unwrap().carries, Carries::Hash(_)));
    assert!(next(&mut flows, now).is_none());
    let later = now + Duration::from_secs(60);
    push(&mut flows, 2, 2, 0, 1000);
    assert_eq!(next(&mut flows, later).unwrap().seq, 2);
    assert_eq!(next(&mut flows, later).unwrap().seq, 1);
}

const LEAST_TO_ASK: u64 = 100_000;

#[test]
fn a_long_piece_is_named_block_by_block_as_far_as_it_is_granted() {
    let mut flows = TestFlows::new(4, 0, CacheUse::Always);
    let len = 20 * CACHE_BLOCK + 1000;
    push(&mut flows, 1, 1, 0, len);
    // Not more of it than the server keeps for the bridge.
    assert_eq!(hash(&mut flows), 8);
    let asks = kinds(&mut flows);
    assert!(asks.len() == 8 && asks.iter().all(|(.., carries)| matches!(carries, Carries::Hash(_))));
    let (mut named, mut bytes, mut at) = (0, 0, 0);
    for block in 0..=20 {
        let offset = block * CACHE_BLOCK;
        tell(&mut flows, 1, offset, u32::from(block % 3 != 0));
        for upto in [offset + 100_000, offset + CACHE_BLOCK] {
            grant(&mut flows, 1, 0, upto);
            while let Some(chunk) = flows.next_chunk() {
                let Carries::Hash(_) = chunk.carries else {
                    assert!(chunk.at == at && (at..at + u64::from(chunk.len)).end <= offset + CACHE_BLOCK);
                    at += u64::from(chunk.len);
                    let known = chunk.carries == Carries::Nothing;
                    assert_eq!(known, !(chunk.at / CACHE_BLOCK).is_multiple_of(3), "{chunk:?}");
                    *(if known { &mut named } else { &mut bytes }) += u64::from(chunk.len);
                    continue;
                };
            }
            hash(&mut flows);
        }
    }
    assert_eq!((at, named + bytes), (len, len));
    assert_eq!(bytes, 7 * CACHE_BLOCK);
    assert!(flows.flows.is_empty() && flows.places.is_empty() && flows.turns.is_empty());
}

#[test]
fn a_stream_without_room_keeps_back_no_other_and_eager_data_is_bounded() {
    let mut flows = TestFlows::new(4, 0, CacheUse::Never);
    push(&mut flows, 1, 1, 0, 64 << 20);
    push(&mut flows, 1, 2, 0, 100);
    push(&mut flows, 2, 3, 0, 100);
    flows.flow = 3;
    assert!(!flows.push(upload(4, 0, 100, true)));
    let sent = drain(&mut flows);
    assert!(
        sent.iter().all(|(seq, at, len)| *seq == 3 || (*seq == 1 && at + len <= EAGER_PIECE)),
        "{sent:?}"
    );
    assert!(sent.contains(&(3, 0, 100)) && !flows.has_chunks());
    grant(&mut flows, 4, 0, u64::MAX);
    assert_eq!(drain(&mut flows), [(4, 0, 100)]);
    // What the server has no place for is not sent without end.
    flows.flow = 9;
    let asks: Vec<u64> = (5..500).filter(|seq| flows.push(upload(*seq, 0, EAGER_PIECE, false))).collect();
    let bytes: u64 = drain(&mut flows).iter().map(|(_, _, len)| len).sum();
    assert!(bytes <= EAGER, "{bytes}");
    assert!(asks.len() as u64 >= 495 - EAGER / EAGER_PIECE);
    let placed = |flows: &mut TestFlows, bytes: u64| flows.frame(frame::DATA_PLACED, &bytes.to_le_bytes());
    assert!(placed(&mut flows, bytes + EAGER_PIECE + 100).unwrap());
    assert!(placed(&mut flows, EAGER).is_err() && flows.frame(frame::DATA_PLACED, &[0; 7]).is_err());
    grant(&mut flows, 1, 0, 64 << 20);
    asks.iter().for_each(|seq| grant(&mut flows, *seq, 0, EAGER_PIECE));
    drain(&mut flows);
    assert_eq!((flows.flows.len(), flows.places.len()), (0, 0));
}

#[test]
fn long_data_behind_other_data_of_its_stream_waits_for_its_grant_and_short_data_does_not() {
    let mut flows = TestFlows::new(4, 0, CacheUse::Never);
    push(&mut flows, 1, 1, 0, 4 << 20);
    assert!(flows.push(upload(2, 0, 512 << 10, false)));
    push(&mut flows, 1, 3, 0, SHORT);
    // Each of four connections has something of the first eager megabyte.
    let eager = drain(&mut flows);
    assert_eq!(eager.iter().map(|(seq, _, len)| (*seq, *len)).collect::<Vec<_>>(), [(1, 256 << 10); 4]);
    grant(&mut flows, 1, 0, 4 << 20);
    drain(&mut flows);
    grant(&mut flows, 2, 0, 512 << 10);
    assert_eq!(drain(&mut flows).iter().map(|(_, _, len)| len).sum::<u64>(), (512 << 10) + SHORT);
}

/// Otherwise a program's second copy of 80 kB comes a round trip after its first.
#[test]
fn over_a_link_that_may_be_far_data_of_a_megabyte_waits_for_no_grant_behind_other_data() {
    let begin = Instant::now();
    for (time, waits) in [(Duration::from_millis(10), false), (Duration::from_micros(100), true)] {
        let mut flows = TestFlows::new(4, 128 << 20, CacheUse::Never);
        push(&mut flows, 1, 1, 0, 100_000);
        push(&mut flows, 1, 2, 0, EAGER_PIECE);
        let first = flows.next_chunk_at(|| begin).unwrap();
        let rest = drain(&mut flows).iter().map(|(_, _, len)| len).sum::<u64>();
        assert_eq!(u64::from(first.len) + rest, 100_000 + EAGER_PIECE);
        flows.arrived_at(&first, first.len.into(), || begin + time);
        push(&mut flows, 1, 3, 0, 100_000);
        assert_eq!(flows.push(upload(4, 0, EAGER_PIECE, false)), waits);
        // As much as the window has room for.
        flows.flow = 2;
        let asked = (5..50).filter(|seq| flows.push(upload(*seq, 0, EAGER_PIECE, false))).count() as u64;
        let eager = 2 * 100_000 + (1 + u64::from(!waits) + 45 - asked) * EAGER_PIECE;
        assert_eq!(flows.unplaced, eager);
        assert!(if waits { asked == 44 } else { (EAGER - FOR_SHORT - EAGER_PIECE..EAGER).contains(&eager) });
    }
}

#[test]
fn streams_take_turns() {
    let mut flows = TestFlows::new(4, 0, CacheUse::Never);
    push(&mut flows, 1, 1, 0, 64 << 20);
    grant(&mut flows, 1, 0, 64 << 20);
    flows.next_chunk();
    push(&mut flows, 2, 2, 0, 100);
    push(&mut flows, 3, 3, 0, 4 << 20);
    let first: Vec<u64> = (0..4).filter_map(|_| flows.next_chunk()).map(|chunk| chunk.seq).collect();
    assert_eq!(first, [1, 2, 3, 1]);
}

/// What happens at the other end of a simulated link, or comes back from there.
enum Event {
    Arrives(Chunk<TestMemory>),
    Acknowledged(Chunk<TestMemory>),
    Placed(u64),
    Granted(u64, u64),
}

/// A link of `rate` bytes a second and a round-trip time, and a server that places what arrives and has
/// `room` for each piece. Sends `pieces` pieces of `len` bytes on one stream, 64 MiB of them at a time; gives
/// the share of the link that was used.
fn share_of_the_link(
    flows: &mut TestFlows,
    room: u64,
    rate: f64,
    round_trip: Duration,
    pieces: u64,
    len: u64,
) -> f64 {
    let begin = Instant::now();
    let (mut now, mut free) = (begin, begin);
    // By when, and in which order they were made.
    let mut events: BTreeMap<(Instant, usize), Event> = BTreeMap::new();
    let mut made = 0;
    let mut at = |events: &mut BTreeMap<_, _>, time, event| {
        made += 1;
        events.insert((time, made), event);
    };
    let (mut landed, mut placed) = (vec![0; pieces as usize + 1], 0);
    let (mut left, mut pushed, mut ahead) = (pieces * len, 0, 0);
    while left > 0 {
        while pushed < pieces && ahead < 64 << 20 {
            pushed += 1;
            ahead += len;
            push(flows, 1, pushed, 0, len);
            at(&mut events, now + round_trip, Event::Granted(pushed, room.min(len)));
        }
        if free <= now
            && let Some(chunk) = flows.next_chunk_at(|| now)
        {
            free = now + Duration::from_secs_f64(f64::from(chunk.len) / rate);
            at(&mut events, free + round_trip / 2, Event::Arrives(chunk));
        }
        let next = events.first_key_value().map(|((time, _), _)| *time);
        if free > now && next.is_none_or(|next| next > free) {
            now = free;
            continue;
        }
        let ((time, _), event) = events.pop_first().expect("the transfer stands still");
        now = time;
        let back = time + round_trip / 2;
        match event {
            Event::Arrives(chunk) => {
                let (seq, bytes) = (chunk.seq, u64::from(chunk.len));
                landed[seq as usize] += bytes;
                placed += if chunk.eager { bytes } else { 0 };
                if placed >= EAGER / 4 {
                    at(&mut events, back, Event::Placed(std::mem::take(&mut placed)));
                }
                at(&mut events, back, Event::Granted(seq, (landed[seq as usize] + room).min(len)));
                at(&mut events, back, Event::Acknowledged(chunk));
                left -= bytes;
            }
            Event::Acknowledged(chunk) => {
                ahead -= u64::from(chunk.len);
                flows.arrived_at(&chunk, chunk.sends(), || now);
            }
            Event::Placed(bytes) => {
                assert!(flows.frame(frame::DATA_PLACED, &bytes.to_le_bytes()).unwrap())
            }
            Event::Granted(seq, upto) => grant(flows, seq, 0, upto),
        }
    }
    (pieces * len) as f64 / rate / (now - begin).as_secs_f64()
}

#[test]
fn one_stream_of_copies_fills_a_long_link() {
    let far = Duration::from_millis(10);
    // One copy, and many; 3 GB/s × 10 ms are 30 MB.
    let fixed = share_of_the_link(&mut TestFlows::new(4, 0, CacheUse::Never), 16 << 20, 3e9, far, 1, 4 << 30);
    assert!(fixed < 0.6, "{fixed} of the link with the usual window");
    // However little room the server has at a time.
    for (room, pieces, len) in [(16 << 20, 1, 4 << 30), (1 << 20, 1, 4 << 30), (16 << 20, 1024, 4 << 20)] {
        let mut flows = TestFlows::new(4, 128 << 20, CacheUse::Never);
        let share = share_of_the_link(&mut flows, room, 3e9, far, pieces, len);
        assert!(share > 0.95, "{share} of the link");
        assert!(flows.pace.window() < 100 << 20, "{}", flows.pace.window());
        assert_eq!((flows.flows.len(), flows.places.len()), (0, 0));
        assert!(flows.held.len() <= 1, "{}", flows.held.len());
    }
}

#[test]
fn a_near_link_sends_long_data_by_grants() {
    let mut flows = TestFlows::new(4, 128 << 20, CacheUse::Never);
    let share = share_of_the_link(&mut flows, 16 << 20, 12e9, Duration::from_micros(100), 1, 1 << 30);
    assert!(share > 0.95 && flows.pace.window() == EAGER, "{share}, {}", flows.pace.window());
    assert!(flows.held.is_empty());
}

#[test]
fn a_stream_that_stands_still_gets_no_more_than_the_window_and_leaves_room_for_short_data() {
    const LIMIT: u64 = 64 << 20;
    let mut flows = TestFlows::new(4, LIMIT, CacheUse::Never);
    share_of_the_link(&mut flows, 16 << 20, 10e9, Duration::from_millis(30), 1, 2 << 30);
    assert_eq!(flows.pace.window(), LIMIT);
    let before = flows.unplaced;
    push(&mut flows, 1, 7, 0, 1 << 30);
    let sent: u64 = drain(&mut flows).iter().map(|(_, _, len)| len).sum();
    assert!(sent + before <= LIMIT - FOR_SHORT && sent + before + MAX_CHUNK > LIMIT - FOR_SHORT, "{sent}");
    push(&mut flows, 2, 8, 0, 100);
    assert_eq!(drain(&mut flows), [(8, 0, 100)]);
    // Late data goes by grants alone.
    flows.flow = 3;
    assert!(flows.frame(frame::DATA_PLACED, &sent.to_le_bytes()).unwrap());
    drain(&mut flows);
    assert!(!flows.push(upload(9, 0, 1 << 30, true)));
    assert!(flows.frame(frame::DATA_PLACED, &flows.unplaced.to_le_bytes()).unwrap());
    assert!(drain(&mut flows).iter().all(|(seq, ..)| *seq == 7));
}

#[test]
fn only_streams_that_room_in_the_window_would_help_wait_for_it() {
    let mut flows = TestFlows::new(4, 64 << 20, CacheUse::Never);
    share_of_the_link(&mut flows, 16 << 20, 10e9, Duration::from_millis(30), 1, 2 << 30);
    // Late data goes by grants alone, and shorter pieces as they were announced.
    for stream in 1..500 {
        flows.flow = stream;
        flows.push(upload(10_000 + stream, 0, 1 << 30, true));
    }
    assert!(drain(&mut flows).is_empty() && flows.held.is_empty(), "{}", flows.held.len());
    // Long pieces use it.
    for stream in 500..600 {
        push(&mut flows, stream, 20_000 + stream, 0, 64 << 20);
    }
    drain(&mut flows);
    assert!(flows.held.iter().all(|stream| *stream >= 500) && flows.held.len() == 100);
}
