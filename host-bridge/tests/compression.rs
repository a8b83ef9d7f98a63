//! Data that is compressed on its way to the server and from it, over connections that are cut.

#![allow(clippy::unwrap_used, reason = "a test may fail where it stands")]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use protocol::Version;
use protocol::channel::State;
use protocol::link::{COMPRESSED_FLAG, DataHeader, Hello, Welcome, purpose, wish};
use protocol::version::{OURS, Speaks, VERSION};
use rgpu_host_bridge::bridge::{CompressUse, Session, SessionConfig, Wakeup};
use rgpu_host_bridge::framing::Address;
use test_kit::server::{Behavior, FakeServer};
use test_kit::session::Client;
use test_kit::tcp_server::TcpServer;
use test_kit::*;
use zerocopy::{FromBytes, IntoBytes};

/// Where data goes.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    Up,
    Down,
}

/// Carries the connections of a session, and cuts them all at a byte of the data that goes one way.
struct Cutter {
    server: Address,
    way: Way,
    open: Mutex<Vec<TcpStream>>,
    /// Bytes of data until the cut.
    left: AtomicI64,
    /// Bytes of data that were carried.
    carried: AtomicU64,
}

impl Cutter {
    fn between(config: &mut SessionConfig, way: Way) -> Arc<Cutter> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let here = Address::Tcp("127.0.0.1".into(), listener.local_addr().unwrap().port());
        let cutter = Arc::new(Cutter {
            server: std::mem::replace(&mut config.server, here),
            way,
            open: Mutex::default(),
            left: AtomicI64::new(i64::MAX),
            carried: AtomicU64::new(0),
        });
        let for_thread = Arc::clone(&cutter);
        std::thread::spawn(move || {
            for bridge in listener.incoming() {
                let (Ok(bridge), cutter) = (bridge, Arc::clone(&for_thread)) else { return };
                std::thread::spawn(move || cutter.carry(&bridge));
            }
        });
        cutter
    }

    /// Cuts behind so many more bytes of data.
    fn cut_behind(&self, bytes: i64) {
        self.left.store(bytes, Ordering::SeqCst);
    }

    fn carry(&self, bridge: &TcpStream) {
        let Address::Tcp(host, port) = &self.server else { panic!("{}", self.server) };
        let server = TcpStream::connect((host.as_str(), *port)).unwrap();
        [bridge, &server].iter().for_each(|end| end.set_nodelay(true).unwrap());
        let mut hello = [0; size_of::<Hello>()];
        if (&mut &*bridge).read_exact(&mut hello).is_err() || (&server).write_all(&hello).is_err() {
            return;
        }
        let is_data = Hello::read_from_bytes(&hello).unwrap().purpose == purpose::DATA;
        self.open.lock().unwrap().extend([bridge, &server].map(|end| end.try_clone().unwrap()));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut welcome = [0; size_of::<Welcome>()];
                if (&server).read_exact(&mut welcome).is_ok() && (&*bridge).write_all(&welcome).is_ok() {
                    self.copy(&server, bridge, is_data && self.way == Way::Down);
                }
                let _ = bridge.shutdown(Shutdown::Both);
            });
            self.copy(bridge, &server, is_data && self.way == Way::Up);
            let _ = server.shutdown(Shutdown::Write);
        });
    }

    fn copy(&self, mut from: &TcpStream, mut to: &TcpStream, counts: bool) {
        let mut buffer = [0; 4096];
        while let Ok(n @ 1..) = from.read(&mut buffer) {
            let (now, cut) = if counts { self.pass(n) } else { (n, false) };
            if to.write_all(&buffer[..now]).is_err() || cut {
                break;
            }
        }
    }

    /// How many of `n` bytes of data pass. Cuts all connections behind them, if it is time.
    fn pass(&self, n: usize) -> (usize, bool) {
        let before = self.left.fetch_sub(n as i64, Ordering::SeqCst);
        let cut = (0..=n as i64).contains(&before);
        let now = if cut { before as usize } else { n };
        self.carried.fetch_add(now as u64, Ordering::SeqCst);
        if cut {
            for end in self.open.lock().unwrap().drain(..) {
                // What was passed on arrives, unlike everything behind it.
                let _ = end.shutdown(Shutdown::Read);
            }
        }
        (now, cut)
    }
}

/// Bytes of one chunk, of which the compressed ones are few.
const CHUNK: usize = 64 << 10;

fn chunk(number: u64) -> Vec<u8> {
    chunk_of(CHUNK, number)
}

fn chunk_of(len: usize, number: u64) -> Vec<u8> {
    let mut bytes = vec![number as u8; len];
    bytes[..8].copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    bytes
}

#[test]
fn a_compressed_chunk_survives_a_cut_at_every_byte() {
    let server = TcpServer::start();
    let mut config = server.config.clone();
    config.compress = CompressUse::Always;
    let cutter = Cutter::between(&mut config, Way::Up);
    let mut client = Client::connect(&config);
    let counters = |client: &Client| {
        let counters = client.session.counters();
        (counters.data_bytes_compressed.get(), counters.data_bytes_compressed_to.get())
    };
    // What a chunk takes on the link: its header, a length and the compressed bytes.
    client.write_arena(0, &chunk(0));
    client.htod(0, arena(0, CHUNK as u64));
    client.synchronize();
    let of_one = cutter.carried.load(Ordering::SeqCst);
    assert_eq!(counters(&client), (CHUNK as u64, of_one - 28));
    assert!(of_one < 400, "{of_one} bytes");
    for cut in 0..of_one {
        let (number, before) = (cut + 1, client.session.counters().resumed.get());
        client.write_arena(0, &chunk(number));
        cutter.cut_behind(cut as i64);
        client.htod(number, arena(0, CHUNK as u64));
        client.synchronize();
        eventually(|| client.session.counters().resumed.get() > before);
        client.dtoh(number, arena(1 << 20, CHUNK as u64));
        client.synchronize();
        assert!(client.read_arena(1 << 20, CHUNK as u64) == chunk(number), "cut at byte {cut}");
    }
    assert_eq!(counters(&client).0, CHUNK as u64 * (of_one + 1));
    assert_eq!(server.trouble(), [""; 0]);
}

/// Cuts the connections behind every `step`-th byte of a chunk of `len` bytes to the client.
fn downloads_survive_cuts(len: usize, io_threads: bool, step: usize) {
    let server = TcpServer::start();
    let mut config = server.config.clone();
    (config.compress, config.io_threads) = (CompressUse::Auto, io_threads);
    let cutter = Cutter::between(&mut config, Way::Down);
    let mut client = Client::connect(&config);
    let counters = |client: &Client| {
        let counters = client.session.counters();
        (counters.data_bytes_decompressed.get(), counters.data_bytes_decompressed_from.get())
    };
    let upload = |client: &mut Client, number: u64| {
        client.write_arena(0, &chunk_of(len, number));
        client.htod(number, arena(0, len as u64));
    };
    let download = |client: &mut Client, number: u64| {
        client.dtoh(number, arena(1 << 20, len as u64));
        client.synchronize();
        assert!(client.read_arena(1 << 20, len as u64) == chunk_of(len, number), "chunk {number}");
    };
    upload(&mut client, 0);
    download(&mut client, 0);
    // What a chunk takes on the link: its header, a length and the compressed bytes.
    let of_one = cutter.carried.load(Ordering::SeqCst);
    assert_eq!(counters(&client), (len as u64, of_one - 28));
    assert!(of_one < 28 + len as u64 / 200, "{of_one} bytes");
    let cuts: Vec<u64> = (0..of_one).step_by(step).chain([of_one - 1]).collect();
    for (cut, number) in cuts.iter().zip(1..) {
        let before = client.session.counters().resumed.get();
        upload(&mut client, number);
        client.synchronize();
        cutter.cut_behind(*cut as i64);
        download(&mut client, number);
        eventually(|| client.session.counters().resumed.get() > before);
    }
    // The bytes that came in place of a chunk are received once, however often the connection is cut in it.
    let (plain, compressed) = counters(&client);
    assert_eq!(plain, (len * (1 + cuts.len())) as u64);
    assert_eq!(client.session.counters().data_bytes_received.get(), compressed);
    assert_eq!(server.trouble(), [""; 0]);
}

#[test]
fn a_compressed_chunk_to_the_client_survives_a_cut_at_every_byte() {
    downloads_survive_cuts(CHUNK, false, 1);
}

#[test]
fn a_long_compressed_chunk_that_a_thread_receives_survives_cuts() {
    downloads_survive_cuts(256 << 10, true, 5);
}

#[test]
fn data_of_all_kinds_survives_compression() {
    let server = TcpServer::start();
    let mut config = server.config.clone();
    config.compress = CompressUse::Always;
    for io_threads in [true, false] {
        config.io_threads = io_threads;
        let mut client = Client::connect(&config);
        let size = 10 << 20;
        // Parts that compress and parts that do not.
        let mut bytes = pattern(size, 3);
        for at in (0..size).step_by(700_000) {
            bytes[at..size.min(at + 400_000)].fill(at as u8);
        }
        let extents = scattered(size as u64, 5);
        client.write(&extents, &bytes);
        client.register(1, extents.clone(), false).unwrap();
        for number in 0..3 {
            client.htod(number, region(1, 0, size as u64));
        }
        client.synchronize();
        client.write(&extents, &vec![0; size]);
        client.dtoh(2, region(1, 0, size as u64));
        client.synchronize();
        assert!(client.read(&extents) == bytes);
        let counters = client.session.counters();
        let (from, to) = (counters.data_bytes_compressed.get(), counters.data_bytes_compressed_to.get());
        assert!(from > size as u64 && to < from, "{from} {to}");
        // A thread counts what it has sent a moment after the server has it.
        let sent = 3 * size as u64 - from + to;
        until("all is counted", || counters.data_bytes_sent.get() >= sent);
        assert_eq!(counters.data_bytes_sent.get(), sent);
        let (to, from) =
            (counters.data_bytes_decompressed.get(), counters.data_bytes_decompressed_from.get());
        assert!(to > size as u64 / 3 && from < to, "{from} {to}");
        assert_eq!(counters.data_bytes_received.get(), size as u64 - to + from);
    }
    assert_eq!(server.trouble(), [""; 0]);
}

fn a_chunk_goes_there_as_it_is_and_comes_back(client: &mut Client) {
    client.write_arena(0, &chunk(1));
    client.htod(1, arena(0, CHUNK as u64));
    client.dtoh(1, arena(1 << 20, CHUNK as u64));
    client.synchronize();
    assert!(client.read_arena(1 << 20, CHUNK as u64) == chunk(1));
    let counters = client.session.counters();
    assert_eq!((counters.data_bytes_compressed.get(), counters.data_bytes_sent.get()), (0, CHUNK as u64));
}

#[test]
fn a_server_of_version_2_0_is_sent_nothing_that_is_compressed() {
    // Its fingerprint is as this build knows it.
    static SPEAKS: std::sync::OnceLock<[u64; 1]> = std::sync::OnceLock::new();
    let older = OURS.at_most(protocol::Version { minor: 0, ..VERSION });
    let speaks = Some(Speaks::new(VERSION.major, SPEAKS.get_or_init(|| [older.fingerprint()])));
    let server = FakeServer::start(Behavior { speaks, ..Behavior::default() });
    let mut config = server.config();
    config.compress = CompressUse::Always;
    let mut client = Client::connect(&config);
    a_chunk_goes_there_as_it_is_and_comes_back(&mut client);
    assert_eq!(client.header().session_version().0, older.version());
}

#[test]
fn a_client_that_wants_nothing_compressed_gets_everything_as_it_is() {
    let server = TcpServer::start();
    let mut config = server.config.clone();
    config.compress = CompressUse::Never;
    let mut client = Client::connect(&config);
    a_chunk_goes_there_as_it_is_and_comes_back(&mut client);
    let counters = client.session.counters();
    assert_eq!(
        (counters.data_bytes_decompressed.get(), counters.data_bytes_received.get()),
        (0, CHUNK as u64)
    );
    assert_eq!(server.trouble(), [""; 0]);
}

/// The hello of a session of a client that speaks this version, and whether it takes compressed data.
fn takes_compressed(compress: CompressUse, version: Version) -> bool {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = Address::Tcp("127.0.0.1".into(), listener.local_addr().unwrap().port());
    let mut config = SessionConfig::new(server, "test-host");
    (config.security, config.compress) = (rgpu_host_bridge::bridge::Security::Insecure, compress);
    let greeted = std::thread::spawn(move || {
        let mut hello = [0; size_of::<Hello>()];
        listener.accept().unwrap().0.read_exact(&mut hello).unwrap();
        Hello::read_from_bytes(&hello).unwrap()
    });
    let (_memories, mut channel) = session::channel(1 << 20);
    // What a client asks for by itself is not passed on.
    (channel.version, channel.wishes) = (version, wish::COMPRESSED);
    let wakeup = Wakeup::Call(Arc::new(|| {}));
    assert!(Session::connect(&config, channel, wakeup, Box::new(|_| {})).is_err());
    let hello = greeted.join().unwrap();
    assert_eq!(hello.version, version);
    hello.wishes & wish::COMPRESSED != 0
}

#[test]
fn compressed_data_is_taken_unless_it_is_refused_or_the_client_is_older() {
    for compress in [CompressUse::Auto, CompressUse::EvenTls, CompressUse::Always] {
        assert!(takes_compressed(compress, VERSION));
        assert!(!takes_compressed(compress, Version { major: 2, minor: 1 }));
    }
    assert!(!takes_compressed(CompressUse::Never, VERSION));
}

/// A server sends `bytes` behind `header` in place of `len` bytes of a copy to the host: the session ends,
/// the reason has these words, and nothing of the client's memory is written.
fn refused(words: &str, len: u32, says: u32, bytes: &[u8], change: impl Fn(&mut SessionConfig)) {
    let header = DataHeader { seq: 2, offset: 0, piece: 0, len: len | COMPRESSED_FLAG };
    let stream = [header.as_bytes(), says.as_bytes(), bytes].concat();
    for io_threads in [false, true] {
        let behavior = Behavior { instead_of_data: Some(stream.clone()), ..Behavior::default() };
        let server = FakeServer::start(behavior);
        let mut config = server.config();
        config.io_threads = io_threads;
        change(&mut config);
        let mut client = Client::connect(&config);
        client.write_arena(0, &vec![7; 256 << 10]);
        client.htod(1, arena(0, 256 << 10));
        client.dtoh(1, arena(1 << 20, 256 << 10));
        client.prepare(0);
        client.push(&protocol::ops::stream::StreamSynchronize { stream: protocol::handle::StreamId(0) }, 0);
        let reason = client.wait_lost();
        assert!(reason.contains(words) && reason.contains("protocol"), "{reason}");
        assert_eq!(client.header().state(), State::Lost);
        assert!(client.read_arena(1 << 20, 256 << 10) == vec![0; 256 << 10]);
    }
}

#[test]
fn a_server_that_lies_about_compressed_data_loses_the_session_and_writes_nothing() {
    let any = |_: &mut SessionConfig| {};
    // Short chunks, and long ones that a thread receives.
    for len in [100, 256 << 10] {
        let plain = vec![3; len as usize];
        let good = lz4_flex::block::compress(&plain);
        let longer = lz4_flex::block::compress(&vec![3; len as usize + 1]);
        let shorter = lz4_flex::block::compress(&plain[1..]);
        refused("0 compressed bytes in place of", len, 0, &[], any);
        refused(&format!("{len} compressed bytes in place of {len}"), len, len, &[], any);
        refused("4294967295 compressed bytes in place of", len, u32::MAX, &[], any);
        refused("do not decompress to", len, 9, &[0xff; 9], any);
        refused("do not decompress to", len, longer.len() as u32, &longer, any);
        refused("do not decompress to", len, shorter.len() as u32, &shorter, any);
        // It was not asked for.
        let never = |config: &mut SessionConfig| config.compress = CompressUse::Never;
        refused("more than 4194304", len, good.len() as u32, &good, never);
    }
    refused("beyond its end", 256 << 10 | 1, 100, &[0; 100], any);
    refused("0 compressed bytes in place of 0", 0, 0, &[], any);
    refused("more than 4194304", (4 << 20) + 1, 1, &[0], any);
}
