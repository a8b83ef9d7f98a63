//! Tests of the inbox: what comes over real connections, and what a bridge is told.

use std::io::Write;
use std::net::{TcpListener, TcpStream};

use proptest::prelude::*;
use protocol::link::{COMPRESSED_FLAG, EAGER_FLAG, HASH_FLAG, KNOWN_FLAG, MAX_DATA};
use zerocopy::IntoBytes;

use super::*;
use crate::stream::Stream;

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let a = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (a, listener.accept().unwrap().0)
}

/// A connection that is not replaced when it breaks.
impl DataSource for Stream {
    fn receive(&self, buffer: &mut [u8], starts: bool) -> io::Result<usize> {
        if starts {
            look_for_some(self);
        }
        match crate::endpoint::link::receive_whole(self, buffer) {
            (0, e) if e.kind() != io::ErrorKind::UnexpectedEof => Err(e),
            (got, _) => Ok(got),
        }
    }
}

fn send(stream: &mut TcpStream, seq: u64, offset: u64, bytes: &[u8]) {
    stream.write_all(DataHeader { seq, offset, piece: 0, len: bytes.len() as u32 }.as_bytes()).unwrap();
    stream.write_all(bytes).unwrap();
}

std::thread_local! {
    /// System calls to receive, of this thread.
    pub(in crate::endpoint) static CALLS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
    /// Pieces that this thread has looked at because a command was executed.
    pub(super) static LOOKS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

#[test]
fn a_chunk_takes_two_system_calls_however_it_comes() {
    let inbox = Inbox::new(0);
    let (mut a, b) = pair();
    a.set_nodelay(true).unwrap();
    let (count, len) = (8, 256 << 10);
    let mut queue = inbox.incoming(1, 0, count * len).into_queue(1 << 30);
    let reader = Arc::clone(&inbox);
    let thread = std::thread::spawn(move || {
        reader.read_connection(&Stream::from(b), |_| Ok(())).unwrap();
        CALLS.get()
    });
    let piece = vec![7; 16 << 10];
    for chunk in 0..count {
        let header = DataHeader { seq: 1, offset: chunk * len, piece: 0, len: len as u32 };
        a.write_all(header.as_bytes()).unwrap();
        for _ in 0..len as usize / piece.len() {
            a.write_all(&piece).unwrap();
            std::thread::yield_now();
        }
    }
    drop(a);
    // Its end is one more.
    assert_eq!(thread.join().unwrap(), 2 * count + 1);
    assert_eq!(queue.next_chunk().unwrap().unwrap().bytes.len() as u64, len);
}

#[test]
fn chunks_reach_their_command_and_unwanted_ones_are_thrown_away() {
    let inbox = Inbox::new(0);
    let (mut a, b) = pair();
    let reader = Arc::clone(&inbox);
    let thread = std::thread::spawn(move || reader.read_connection(&Stream::from(b), |_| Ok(())));
    send(&mut a, 1, 0, b"nobody asked");
    send(&mut a, 2, 3, b"def");
    send(&mut a, 2, 0, b"abc");
    inbox.executed(1);
    let wanted = inbox.incoming(2, 0, 6);
    let reading = std::thread::spawn(move || wanted.collect());
    assert_eq!(reading.join().unwrap().unwrap(), b"abcdef");
    assert!(inbox.lock().expected.len() <= 1);
    drop(a);
    thread.join().unwrap().unwrap();
    assert!(inbox.lock().expected.is_empty());
}

#[test]
fn a_command_that_is_executed_does_not_look_at_the_data_of_all_later_ones() {
    let inbox = Inbox::new(0);
    let count = 1000;
    for seq in 1..=count {
        let aside = Aside { offset: 0, bytes: Box::from([1]), keep: false };
        inbox.set_aside((seq, 0), false, aside).unwrap();
    }
    (1..=count).for_each(|seq| inbox.executed(seq));
    assert!(LOOKS.get() <= 2 * count, "{}", LOOKS.get());
    let state = inbox.lock();
    assert!(state.early.is_empty() && state.aside == 0);
    assert_eq!(inbox.waiting.load(Ordering::SeqCst), 0);
}

#[test]
fn more_data_than_announced_ends_the_connection() {
    for (offset, bytes) in [(0, &b"12345"[..]), (4, b"1"), (u64::MAX, b"1")] {
        let inbox = Inbox::new(0);
        let (mut a, b) = pair();
        let _queue = inbox.incoming(1, 0, 4).into_queue(64);
        send(&mut a, 1, offset, bytes);
        let error = inbox.read_connection(&Stream::from(b), |_| Ok(())).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
    }
}

/// What a bridge was told.
#[derive(Default)]
struct Told {
    grants: Mutex<Vec<(u64, u64)>>,
    placed: AtomicU64,
    wrong: Mutex<Option<String>>,
}

impl Bridge for Told {
    fn grant(&self, grant: DataGrant) {
        self.grants.lock().unwrap().push((grant.seq, grant.upto));
    }
    fn placed(&self, bytes: u64) {
        self.placed.fetch_add(bytes, Ordering::SeqCst);
    }
    fn wrong(&self, what: &str) {
        *self.wrong.lock().unwrap() = Some(what.into());
    }
}

fn told(inbox: &Inbox) -> Arc<Told> {
    let told = Arc::new(Told::default());
    let bridge: Arc<dyn Bridge> = Arc::<Told>::clone(&told);
    inbox.tell(Arc::downgrade(&bridge));
    told
}

fn send_eagerly(stream: &mut TcpStream, seq: u64, offset: u64, bytes: &[u8]) {
    let len = bytes.len() as u32 | EAGER_FLAG;
    stream.write_all(DataHeader { seq, offset, piece: 0, len }.as_bytes()).unwrap();
    stream.write_all(bytes).unwrap();
}

#[test]
fn data_of_a_stream_that_does_not_go_on_lets_the_rest_of_its_connection_pass() {
    let inbox = Inbox::new(0);
    let told = told(&inbox);
    let (mut a, b) = pair();
    let reader = Arc::clone(&inbox);
    let thread = std::thread::spawn(move || reader.read_connection(&Stream::from(b), |_| Ok(())));
    // Room for four bytes; nobody takes them. And a command whose turn does not come.
    let held = inbox.incoming(1, 0, 12).into_queue(4);
    send_eagerly(&mut a, 1, 0, b"abcdefghijkl");
    send_eagerly(&mut a, 3, 0, b"set aside");
    send_eagerly(&mut a, 2, 0, b"other");
    assert_eq!(inbox.incoming(2, 0, 5).collect().unwrap(), b"other");
    // The stream goes on, and the other command's turn comes.
    let mut bytes = vec![0; 12];
    let mut held = held;
    while let Some(chunk) = held.next_chunk().unwrap() {
        bytes[chunk.offset as usize..][..chunk.bytes.len()].copy_from_slice(&chunk.bytes);
    }
    assert_eq!(bytes, b"abcdefghijkl");
    assert_eq!(inbox.incoming(3, 0, 9).collect().unwrap(), b"set aside");
    // Who takes the last bytes may be quicker than the reader's books.
    drop(a);
    thread.join().unwrap().unwrap();
    let state = inbox.lock();
    assert_eq!((state.eager, state.early.len(), state.expected.len()), (0, 0, 0));
    drop(state);
    assert_eq!(inbox.waiting.load(Ordering::SeqCst), 0);
    assert!(told.wrong.lock().unwrap().is_none());
}

#[test]
fn late_data_is_granted_when_it_is_asked_for_and_short_data_only_if_its_bridge_asks() {
    let inbox = Inbox::new(0);
    let told = told(&inbox);
    let mut late = inbox.incoming(1, 0, 5).late().into_queue(64);
    let _short = inbox.incoming(2, 0, 5).into_queue(64);
    inbox.ask((3, 0)).unwrap();
    let _asked = inbox.incoming(3, 0, 5).into_queue(64);
    let _long = inbox.incoming(4, 0, 2 * EAGER_PIECE).into_queue(64);
    assert_eq!(*told.grants.lock().unwrap(), [(3, 5), (4, 64)]);
    let (mut a, b) = pair();
    send(&mut a, 1, 0, b"bytes");
    drop(a);
    let reader = Arc::clone(&inbox);
    let thread = std::thread::spawn(move || reader.read_connection(&Stream::from(b), |_| Ok(())));
    assert_eq!(&*late.next_chunk().unwrap().unwrap().bytes, b"bytes");
    thread.join().unwrap().unwrap();
    assert_eq!(told.grants.lock().unwrap()[2], (1, 5));
    // What is dropped unused, or refused, is to come all the same.
    drop(inbox.incoming(5, 0, 5));
    inbox.unwanted((6, 0));
    assert_eq!(told.grants.lock().unwrap()[3..], [(5, u64::MAX), (6, u64::MAX)]);
    inbox.executed(6);
    assert_eq!(inbox.lock().unwanted.len(), 0);
}

#[test]
fn chunks_set_aside_are_bounded_as_well_as_their_bytes() {
    let inbox = Inbox::new(0);
    let told = told(&inbox);
    let set_aside = |seq: u64| {
        let header = DataHeader { seq, offset: 0, piece: 0, len: 1 };
        let noted = inbox.announce(&header, true)?;
        inbox.set_aside((seq, 0), noted, Aside { offset: 0, bytes: [7].into(), keep: false })
    };
    for seq in 1..=MAX_ASIDE as u64 {
        set_aside(seq).unwrap();
    }
    let last = MAX_ASIDE as u64 + 1;
    assert_eq!(set_aside(last).unwrap_err().kind(), io::ErrorKind::InvalidData);
    // However a chunk goes, there is room for others again: it is taken, or nobody wants it.
    assert_eq!(inbox.incoming(1, 0, 1).collect().unwrap(), [7]);
    inbox.unwanted((2, 0));
    assert_eq!(inbox.lock().aside, MAX_ASIDE - 1);
    inbox.executed(last);
    let state = inbox.lock();
    assert_eq!((state.aside, state.eager, state.early.len()), (0, 0, 0));
    assert_eq!(told.placed.load(Ordering::SeqCst) + state.placed, last);
}

#[test]
fn eager_bytes_are_bounded_and_given_back_whatever_becomes_of_them() {
    let inbox = Inbox::new(0);
    let told = told(&inbox);
    let (mut a, b) = pair();
    let reader = Arc::clone(&inbox);
    let thread = std::thread::spawn(move || reader.read_connection(&Stream::from(b), |_| Ok(())));
    let megabyte = vec![7; 1 << 20];
    for seq in 1..=EAGER >> 20 {
        send_eagerly(&mut a, seq, 0, &megabyte);
    }
    while inbox.lock().early.len() as u64 != EAGER >> 20 {
        std::thread::yield_now();
    }
    inbox.unwanted((1, 0));
    let queue = inbox.incoming(2, 0, 1 << 20).into_queue(1 << 30);
    drop(queue);
    inbox.executed(EAGER >> 20);
    assert_eq!(inbox.lock().eager, 0);
    assert_eq!(told.placed.load(Ordering::SeqCst) + inbox.lock().placed, EAGER);
    for seq in 0..EAGER >> 20 {
        send_eagerly(&mut a, 100 + seq, 0, &megabyte[..(1 << 20) - usize::from(seq > 0)]);
    }
    // The header of one more is too much. Whoever reads it closes the connection, and need not wait for the
    // bytes.
    let len = ((1 << 20) - 1) | EAGER_FLAG;
    a.write_all(DataHeader { seq: 100 + (EAGER >> 20), offset: 0, piece: 0, len }.as_bytes()).unwrap();
    assert_eq!(thread.join().unwrap().unwrap_err().kind(), io::ErrorKind::InvalidData);
}

#[test]
fn the_end_lets_everybody_go() {
    let inbox = Inbox::new(0);
    let (mut a, b) = pair();
    let mut queue = inbox.incoming(1, 0, 12).into_queue(4);
    let reader = Arc::clone(&inbox);
    let thread = std::thread::spawn(move || reader.read_connection(&Stream::from(b), |_| Ok(())));
    for i in 0..3 {
        send(&mut a, 1, i * 4, b"1234");
    }
    while queue.is_empty() {
        std::thread::yield_now();
    }
    inbox.close();
    drop(a);
    assert!(queue.next_chunk().unwrap().is_some());
    thread.join().unwrap().ok();
    assert!(queue.next_chunk().is_err());
}

#[test]
fn a_cpu_copies_only_what_came_before_there_was_room() {
    let inbox = Inbox::new(0);
    let (mut a, b) = pair();
    let reader = Arc::clone(&inbox);
    let thread = std::thread::spawn(move || reader.read_connection(&Stream::from(b), |_| Ok(())));
    let mut granted = inbox.incoming(1, 0, 2 << 20).into_queue(4 << 20);
    for offset in [0, 1 << 20] {
        send_eagerly(&mut a, 1, offset, &vec![7; 1 << 20]);
    }
    while granted.next_chunk().unwrap().is_some() {}
    assert_eq!(inbox.copied.load(Ordering::Relaxed), 0);
    send_eagerly(&mut a, 2, 0, &[7; 100]);
    // Behind what it passes on: once that is here, the first is set aside.
    let mut behind = inbox.incoming(3, 0, 1).into_queue(1);
    send(&mut a, 3, 0, b"x");
    behind.next_chunk().unwrap().unwrap();
    let mut early = inbox.incoming(2, 0, 100).into_queue(100);
    assert_eq!(early.next_chunk().unwrap().unwrap().bytes.len(), 100);
    assert_eq!(inbox.copied.load(Ordering::Relaxed), 100);
    drop(a);
    thread.join().unwrap().unwrap();
}

/// A compressed chunk that says that it is so long, and has so many compressed bytes.
fn compressed(seq: u64, offset: u64, len: u32, says: u32, bytes: &[u8]) -> Vec<u8> {
    let header = DataHeader { seq, offset, piece: 0, len: len | COMPRESSED_FLAG };
    [header.as_bytes(), says.as_bytes(), bytes].concat()
}

/// Has a reader take a stream in pieces of `step` bytes at most, one of which may be a part of its room.
fn read(inbox: &Inbox, mut stream: &[u8], step: usize) -> io::Result<()> {
    let mut reader = ChunkReader::default();
    loop {
        let Some((at, len)) = reader.room(inbox, true)? else { continue };
        let n = len.min(step).min(stream.len());
        if n == 0 {
            assert!(reader.is_between_chunks(), "the stream ends inside a chunk");
            return Ok(());
        }
        // SAFETY: `room` has just given `len` writable bytes to this thread alone.
        unsafe { std::ptr::copy_nonoverlapping(stream.as_ptr(), at.as_ptr(), n) };
        stream = &stream[n..];
        reader.filled(inbox, n)?;
    }
}

/// What has come of a command's data.
fn taken(mut queue: ChunkQueue, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    while let Some(chunk) = queue.next_chunk().unwrap() {
        bytes[chunk.offset as usize..][..chunk.bytes.len()].copy_from_slice(&chunk.bytes);
    }
    bytes
}

proptest! {
    /// Compressed chunks among others arrive as they were, cut anywhere, wherever there is room for them and
    /// whether their command is there yet.
    #[test]
    fn compressed_chunks_arrive_as_what_they_stand_for(
        chunks in prop::collection::vec((1usize..5000, any::<u8>(), any::<bool>(), any::<bool>()), 1..8), step in 1usize..3000, early: bool,
    ) {
        let inbox = Inbox::new(0);
        let told = told(&inbox);
        let (mut stream, mut all) = (Vec::new(), Vec::new());
        for (len, byte, is_compressed, eager) in chunks {
            let bytes: Vec<u8> = (0..len).map(|at| byte ^ (at / 50) as u8).collect();
            let eager = if eager || early { EAGER_FLAG } else { 0 };
            let fewer = lz4_flex::block::compress(&bytes);
            if is_compressed && fewer.len() < len {
                let len = len as u32 | eager;
                stream.extend(compressed(1, all.len() as u64, len, fewer.len() as u32, &fewer));
            } else {
                let header = DataHeader { seq: 1, offset: all.len() as u64, piece: 0, len: len as u32 | eager };
                stream.extend([header.as_bytes(), &bytes].concat());
            }
            all.extend(bytes);
        }
        let queue = |bound| inbox.incoming(1, 0, all.len() as u64).into_queue(bound);
        let arrived = if early {
            read(&inbox, &stream, step).unwrap();
            taken(queue(100), all.len())
        } else {
            let queue = queue(all.len());
            read(&inbox, &stream, step).unwrap();
            taken(queue, all.len())
        };
        prop_assert!(arrived == all);
        prop_assert!(told.wrong.lock().unwrap().is_none());
        let state = inbox.lock();
        prop_assert_eq!((state.eager, state.early.len(), state.expected.len()), (0, 0, 0));
    }

    /// Whatever stands in place of compressed bytes is an error of its session, or so many bytes.
    #[test]
    fn any_bytes_in_place_of_compressed_ones_are_survived(
        len in prop_oneof![1u32..300, 1..=MAX_DATA, any::<u32>()], says in prop_oneof![Just(None), any::<u32>().prop_map(Some)],
        bytes in prop::collection::vec(any::<u8>(), 0..400), step in 1usize..100,
    ) {
        super::receive_compressed(len, says.unwrap_or(bytes.len() as u32), &bytes, step);
    }
}

#[test]
fn a_lying_length_of_a_compressed_chunk_ends_the_connection() {
    let bytes = [7; 1000];
    let fewer = lz4_flex::block::compress(&bytes);
    let (len, fits) = (1000, fewer.len() as u32);
    let read = |stream: Vec<u8>| {
        let inbox = Inbox::new(0);
        let _queue = inbox.incoming(1, 0, 2000).into_queue(5000);
        read(&inbox, &stream, 100)
    };
    read(compressed(1, 0, len, fits, &fewer)).unwrap();
    for (words, stream) in [
        ("0 compressed bytes in place of 1000", compressed(1, 0, len, 0, &[])),
        ("1000 compressed bytes in place of 1000", compressed(1, 0, len, len, &bytes)),
        ("4294967295 compressed bytes", compressed(1, 0, len, u32::MAX, &bytes)),
        ("do not decompress to 999", compressed(1, 0, 999, fits, &fewer)),
        ("do not decompress to 1001", compressed(1, 0, 1001, fits, &fewer)),
        ("do not decompress to 1000", compressed(1, 0, len, fits - 1, &fewer[..fewer.len() - 1])),
        ("2001 bytes at 0 where 2000", compressed(1, 0, 2001, fits, &fewer)),
        ("1000 bytes at 1001 where 2000", compressed(1, 1001, len, fits, &fewer)),
        ("a chunk of", compressed(1, 0, MAX_DATA + 1, fits, &fewer)),
        ("a chunk of 1000", compressed(1, 0, len | HASH_FLAG, fits, &fewer)),
        ("a chunk of 1000", compressed(1, 0, len | KNOWN_FLAG, fits, &fewer)),
    ] {
        let error = read(stream).unwrap_err();
        assert!(
            error.kind() == io::ErrorKind::InvalidData && error.to_string().contains(words),
            "{words}: {error}"
        );
    }
}

#[test]
fn a_reference_to_a_known_block_ahead_of_its_grant_ends_the_connection() {
    use crate::endpoint::cache::{BlockCache, tests::Memory};
    let (bytes, len) = ([7; 64], 64u32);
    let cache = Memory::default();
    cache.keep(&bytes);
    let begin = || {
        let (inbox, blocks) = (Inbox::new(0), Blocks::new());
        inbox.knows(Arc::clone(&blocks));
        let asks = DataHeader { seq: 1, offset: 0, piece: 0, len: len | HASH_FLAG };
        read(&inbox, &[asks.as_bytes(), blake3::hash(&bytes).as_bytes()].concat(), 100).unwrap();
        assert!(blocks.work(&cache, |answer| assert_eq!(answer.known, 1)));
        inbox
    };
    let refers = DataHeader { seq: 1, offset: 0, piece: 0, len: len | KNOWN_FLAG };
    let refers_to_all = |inbox: &Inbox| read(inbox, refers.as_bytes(), 100);
    // Its command has not come.
    let error = refers_to_all(&begin()).unwrap_err();
    assert!(error.to_string().contains("beyond what was granted"), "{error}");
    // It has come.
    let inbox = begin();
    let queue = inbox.incoming(1, 0, len.into()).into_queue(64);
    refers_to_all(&inbox).unwrap();
    assert_eq!(taken(queue, bytes.len()), bytes);
    // It has come and does not want the data, or it has been executed.
    for executed in [false, true] {
        let inbox = begin();
        drop(inbox.incoming(1, 0, len.into()));
        if executed {
            inbox.executed(1);
        }
        refers_to_all(&inbox).unwrap();
    }
    // The session is over.
    let inbox = begin();
    inbox.close();
    refers_to_all(&inbox).unwrap();
}
