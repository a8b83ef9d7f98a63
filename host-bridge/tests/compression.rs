//! Data that is compressed on its way to the server, over connections that are cut.

#![allow(clippy::unwrap_used, reason = "a test may fail where it stands")]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use protocol::link::{Hello, purpose};
use protocol::version::{OURS, Speaks, VERSION};
use rgpu_host_bridge::bridge::{CompressUse, SessionConfig};
use rgpu_host_bridge::framing::Address;
use test_kit::server::{Behavior, FakeServer};
use test_kit::session::Client;
use test_kit::tcp_server::TcpServer;
use test_kit::*;
use zerocopy::FromBytes;

/// Carries the connections of a session, and cuts them all at a byte of the data to the server.
struct Cutter {
    server: Address,
    open: Mutex<Vec<TcpStream>>,
    /// Bytes of data to the server until the cut.
    left: AtomicI64,
    /// Bytes of data that went to the server.
    carried: AtomicU64,
}

impl Cutter {
    fn between(config: &mut SessionConfig) -> Arc<Cutter> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let here = Address::Tcp("127.0.0.1".into(), listener.local_addr().unwrap().port());
        let cutter = Arc::new(Cutter {
            server: std::mem::replace(&mut config.server, here),
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
                let _ = std::io::copy(&mut &server, &mut &*bridge);
                let _ = bridge.shutdown(Shutdown::Both);
            });
            let mut buffer = [0; 4096];
            while let Ok(n @ 1..) = (&mut &*bridge).read(&mut buffer) {
                let (now, cut) = if is_data { self.pass(n) } else { (n, false) };
                if (&server).write_all(&buffer[..now]).is_err() || cut {
                    break;
                }
            }
            let _ = server.shutdown(Shutdown::Write);
        });
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
    let mut bytes = vec![number as u8; CHUNK];
    bytes[..8].copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    bytes
}

#[test]
fn a_compressed_chunk_survives_a_cut_at_every_byte() {
    let server = TcpServer::start();
    let mut config = server.config.clone();
    config.compress = CompressUse::Always;
    let cutter = Cutter::between(&mut config);
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
        assert_eq!(counters.data_bytes_sent.get(), 3 * size as u64 - from + to);
    }
    assert_eq!(server.trouble(), [""; 0]);
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
    client.write_arena(0, &chunk(1));
    client.htod(1, arena(0, CHUNK as u64));
    client.dtoh(1, arena(1 << 20, CHUNK as u64));
    client.synchronize();
    assert!(client.read_arena(1 << 20, CHUNK as u64) == chunk(1));
    let counters = client.session.counters();
    assert_eq!((counters.data_bytes_compressed.get(), counters.data_bytes_sent.get()), (0, CHUNK as u64));
    assert_eq!(client.header().session_version().0, older.version());
}
