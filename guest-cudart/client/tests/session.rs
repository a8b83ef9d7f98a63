//! Sessions against a host in a thread: order, replies, a full ring, staging, and every way of losing the
//! host.

use std::os::fd::RawFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use protocol::device::{Answer, Response};
use protocol::schema::Shape;
use protocol::version::{OURS, Speaks, VERSION};
use protocol::wire::{Reader, Wire, WireError, Writer};
use rgpu_client::Status;
use rgpu_client::channel::{Geometry, Header};
use rgpu_client::counters::COUNTERS;
use rgpu_client::handle::{ContextId, StreamId};
use rgpu_client::ops::memory::{MemFree, MemGetInfo};
use rgpu_client::ops::stream::{StreamMark, StreamSynchronize};
use rgpu_client::ops::{Op, OpInfo};
use rgpu_client::port::mapping::Mapping;
use rgpu_client::port::{self, Pinned, Port, PortError};
use rgpu_client::seq::Seq;
use rgpu_client::session::{Purpose, Session};
use test_kit::native_host::{NativeHost, Next};

fn ok() -> Response {
    Response::new(Answer::Ok, "")
}

/// A session with a host, with an arena of `arena` bytes.
fn session(host: &NativeHost, arena: usize) -> &'static Session {
    let geometry = Geometry::with_arena(arena);
    let port = port::at_socket(&host.socket, geometry.size).expect("a connection");
    Session::over(port, geometry, Purpose::Compute).expect("a session")
}

/// The eight bytes at `at` of a body.
fn word(body: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(body[at..at + 8].try_into().expect("eight bytes"))
}

/// Counts one more; the count before.
fn count(counter: &AtomicU64) -> u64 {
    counter.fetch_add(1, Ordering::SeqCst)
}

/// The reply to `MemGetInfo`.
fn info(free: u64, total: u64) -> Vec<u8> {
    [free.to_le_bytes(), total.to_le_bytes()].concat()
}

#[test]
fn records_of_a_thread_arrive_in_order() {
    let seen: Arc<[AtomicU64; 4]> = Arc::default();
    let host_seen = seen.clone();
    let daemon = NativeHost::start(ok(), move |host, record, body| {
        if record.opcode == MemFree::INFO.opcode {
            let address = word(body, 0);
            let next = &host_seen[(address >> 32) as usize];
            assert_eq!(address as u32 as u64, count(next), "a thread's records come in order");
        } else {
            host.reply(&record, Status::SUCCESS, &[]);
        }
        Next::GoOn
    });
    let session = session(&daemon, 1 << 20);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            scope.spawn(move || {
                for i in 0..20_000 {
                    session.append(&MemFree { address: thread << 32 | i }).unwrap();
                }
            });
        }
    });
    session.call(&StreamSynchronize { stream: StreamId(0) }).unwrap();
    assert!(seen.iter().all(|n| n.load(Ordering::SeqCst) == 20_000));
}

#[test]
fn more_threads_than_reply_slots_all_get_their_replies() {
    let daemon = NativeHost::start(ok(), |host, record, body| {
        let device = u64::from(u32::from_le_bytes(body[..4].try_into().unwrap()));
        host.reply(&record, Status::SUCCESS, &info(device, device * 2));
        Next::GoOn
    });
    let session = session(&daemon, 1 << 20);
    std::thread::scope(|scope| {
        for thread in 0..150u32 {
            scope.spawn(move || {
                for i in 0..20 {
                    let device = thread * 1000 + i;
                    let reply = session.call(&MemGetInfo { device }).unwrap();
                    assert_eq!((reply.free, reply.total), (device.into(), u64::from(device) * 2));
                }
            });
        }
    });
}

#[test]
fn a_slow_host_fills_the_ring_and_loses_nothing() {
    let seen = Arc::new(AtomicU64::new(0));
    let host_seen = seen.clone();
    let daemon = NativeHost::start(ok(), move |host, record, _| {
        if record.opcode == StreamMark::INFO.opcode {
            if count(&host_seen) == 0 {
                std::thread::sleep(Duration::from_millis(100));
            }
        } else {
            host.reply(&record, Status::SUCCESS, &[]);
        }
        Next::GoOn
    });
    let session = session(&daemon, 1 << 20);
    // Each record takes 32 bytes in a ring of 1 MiB.
    for _ in 0..100_000 {
        session.append(&StreamMark { stream: StreamId(1) }).unwrap();
    }
    session.call(&StreamSynchronize { stream: StreamId(1) }).unwrap();
    assert_eq!(seen.load(Ordering::SeqCst), 100_000);
}

#[test]
fn a_failed_request_fails_its_call_only() {
    let daemon = NativeHost::start(ok(), |host, record, body| {
        let status = if body[0] == 7 { Status::INVALID_DEVICE } else { Status::SUCCESS };
        let payload = if status == Status::SUCCESS { info(1, 2) } else { Vec::new() };
        host.reply(&record, status, &payload);
        Next::GoOn
    });
    let session = session(&daemon, 1 << 20);
    assert_eq!(session.call(&MemGetInfo { device: 7 }).unwrap_err(), Status::INVALID_DEVICE);
    assert_eq!(session.call(&MemGetInfo { device: 0 }).unwrap().total, 2);
}

#[test]
fn losing_a_session_wakes_waiting_threads_and_fails_later_calls() {
    let daemon = NativeHost::start(ok(), |host, record, _| {
        if record.seq == 3 {
            host.lose("the server at 10.0.0.1:9700 closed the connection");
        }
        Next::GoOn
    });
    let session = session(&daemon, 1 << 20);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                assert_eq!(
                    session.call(&StreamSynchronize { stream: StreamId(0) }).unwrap_err(),
                    Status::DEVICE_UNAVAILABLE
                );
            });
        }
    });
    assert_eq!(session.append(&StreamMark { stream: StreamId(0) }), Err(Status::DEVICE_UNAVAILABLE));
    assert_eq!(session.call(&MemGetInfo { device: 0 }).unwrap_err(), Status::DEVICE_UNAVAILABLE);
    assert_eq!(session.wait_progress(|| false), Err(Status::DEVICE_UNAVAILABLE));
}

#[test]
fn a_lost_session_keeps_an_error_that_only_the_end_of_a_context_clears() {
    let daemon = NativeHost::start(ok(), |host, _, _| {
        let error = |context| host.view().progress().error(ContextId(context)).unwrap();
        error(0).set(Status::INVALID_VALUE, false, 1);
        error(1).set(Status::LAUNCH_TIMEOUT, true, 0);
        host.lose("a kernel ran for more than 5 s");
        Next::GoOn
    });
    let session = session(&daemon, 1 << 20);
    let waits = session.call(&StreamSynchronize { stream: StreamId(0) });
    assert_eq!(waits.unwrap_err(), Status::LAUNCH_TIMEOUT);
    assert_eq!(session.append(&StreamMark { stream: StreamId(0) }), Err(Status::LAUNCH_TIMEOUT));
}

#[test]
fn a_killed_host_is_detected_by_sleeping_threads() {
    let daemon = NativeHost::start(ok(), |_, _, _| Next::Die);
    let session = session(&daemon, 1 << 20);
    assert_eq!(session.call(&MemGetInfo { device: 0 }).unwrap_err(), Status::DEVICE_UNAVAILABLE);
    assert_eq!(session.call(&MemGetInfo { device: 0 }).unwrap_err(), Status::DEVICE_UNAVAILABLE);
}

/// A host that takes what it gets and is gone. Signals interrupt every wait at once.
struct Interrupted {
    channel: Mapping,
    waits: AtomicU64,
}

impl Port for Interrupted {
    fn channel(&self) -> &Mapping {
        &self.channel
    }

    fn connect(&self) -> Result<(), PortError> {
        // SAFETY: the mapping begins with the header, which consists of atomics, and lives as long as `self`.
        let header = unsafe { &*self.channel.base().cast::<Header>() };
        header.set_session_version(OURS.version(), OURS.fingerprint());
        header.set_ready();
        Ok(())
    }

    fn kick(&self) {}

    fn wait(&self, _offset: u64, _expected: u32, _timeout: Duration) -> bool {
        assert!(count(&self.waits) < 10_000, "nobody has looked whether the host is there");
        std::thread::sleep(Duration::from_millis(1));
        false
    }

    fn alive(&self) -> bool {
        false
    }

    fn why_dead(&self) -> String {
        "it is gone".to_owned()
    }

    fn pin_new(&self, _size: usize, _at: Option<usize>) -> Result<Pinned, PortError> {
        unreachable!("nothing is pinned")
    }

    fn pin(&self, _addr: usize, _size: usize) -> Option<Result<u32, PortError>> {
        None
    }

    fn pin_shared(&self, _pinned: &Pinned) -> Result<u32, PortError> {
        unreachable!("nothing is pinned")
    }

    fn unpin(&self, _region: u32) {}

    fn descriptors(&self) -> Vec<RawFd> {
        Vec::new()
    }

    fn path(&self) -> &Path {
        Path::new("interrupted")
    }
}

#[test]
fn a_killed_host_is_detected_by_threads_whose_sleeps_signals_end_early() {
    let geometry = Geometry::with_arena(1 << 20);
    let channel = Mapping::pinned(None, geometry.size, None).expect("memory for a channel");
    let port = Box::new(Interrupted { channel, waits: AtomicU64::new(0) });
    let session = Session::over(port, geometry, Purpose::Compute).expect("a session");
    assert_eq!(session.call(&MemGetInfo { device: 0 }), Err(Status::DEVICE_UNAVAILABLE));
}

#[test]
fn a_full_arena_waits_until_the_host_releases_memory() {
    let daemon = NativeHost::start(ok(), |host, record, _| {
        if record.opcode == StreamMark::INFO.opcode {
            std::thread::sleep(Duration::from_millis(5));
            host.release(record.seq);
        }
        Next::GoOn
    });
    let session = session(&daemon, 1 << 20);
    let arena = session.arena();
    let size = arena.largest();
    for _ in 0..20 {
        let block = arena.alloc(session, size).unwrap();
        let seq = session.append(&StreamMark { stream: StreamId(0) }).unwrap();
        block.release_after(seq, 0);
    }
    assert_eq!(arena.alloc(session, size + 1).unwrap_err(), Status::OUT_OF_MEMORY);
}

#[test]
fn a_dropped_reply_keeps_its_slot_until_it_arrives() {
    let daemon = NativeHost::start(ok(), |host, record, _| {
        std::thread::sleep(Duration::from_millis(1));
        host.reply(&record, Status::SUCCESS, &[]);
        Next::GoOn
    });
    let session = session(&daemon, 1 << 20);
    for _ in 0..200 {
        drop(session.submit(&StreamSynchronize { stream: StreamId(0) }).unwrap());
    }
    session.call(&StreamSynchronize { stream: StreamId(0) }).unwrap();
}

/// A session whose host replies to `MemGetInfo` only when it receives a `StreamMark`.
fn with_late_answers() -> (NativeHost, &'static rgpu_client::session::Session) {
    let mut late = Vec::new();
    let daemon = NativeHost::start(ok(), move |host, record, _| {
        match record.opcode {
            opcode if opcode == MemGetInfo::INFO.opcode => late.push(record),
            opcode if opcode == StreamMark::INFO.opcode => {
                late.drain(..).for_each(|record| host.reply(&record, Status::SUCCESS, &info(record.seq, 1)));
            }
            _ => host.reply(&record, Status::SUCCESS, &[]),
        }
        Next::GoOn
    });
    let session = session(&daemon, 1 << 20);
    (daemon, session)
}

#[test]
fn an_early_reply_can_be_taken_before_or_after_it_arrives() {
    let (_daemon, session) = with_late_answers();
    for _ in 0..100 {
        let [there, to_come] =
            [0, 1].map(|device| session.submit_ahead(&MemGetInfo { device }).unwrap().unwrap());
        session.append(&StreamMark { stream: StreamId(0) }).unwrap();
        session.call(&StreamSynchronize { stream: StreamId(0) }).unwrap();
        let first = there.take().unwrap().free;
        assert_eq!(to_come.take().unwrap().free, first + 1);
        let waited_for = session.submit_ahead(&MemGetInfo { device: 0 }).unwrap().unwrap();
        let mark = session.append(&StreamMark { stream: StreamId(0) }).unwrap();
        assert_eq!(Seq::for_tests(0, waited_for.take().unwrap().free + 1), mark);
    }
}

#[test]
fn abandoned_early_replies_do_not_block_other_calls() {
    let (_daemon, session) = with_late_answers();
    for _ in 0..5 {
        let mut ahead: Vec<_> =
            (0..200).map(|device| session.submit_ahead(&MemGetInfo { device }).unwrap()).collect();
        let got = ahead.iter().filter(|asked| asked.is_some()).count();
        assert!((40..64).contains(&got), "{got} of 64 slots used for early replies");
        // Neither dropping them nor another call waits for them.
        ahead.truncate(30);
        session.call(&StreamSynchronize { stream: StreamId(0) }).unwrap();
        drop(ahead);
        session.call(&StreamSynchronize { stream: StreamId(0) }).unwrap();
        assert!(
            session.submit_ahead(&MemGetInfo { device: 0 }).unwrap().is_none(),
            "the host owns their slots"
        );
        session.append(&StreamMark { stream: StreamId(0) }).unwrap();
        session.call(&StreamSynchronize { stream: StreamId(0) }).unwrap();
    }
    std::thread::scope(|scope| {
        for _ in 0..100 {
            scope.spawn(|| session.call(&StreamSynchronize { stream: StreamId(0) }).unwrap());
        }
    });
}

#[test]
fn early_replies_of_a_lost_session_fail() {
    let daemon = NativeHost::start(ok(), |host, record, _| {
        if record.opcode == StreamMark::INFO.opcode {
            host.lose("the server was stopped");
        }
        Next::GoOn
    });
    let session = session(&daemon, 1 << 20);
    let [taken, dropped] =
        [0, 1].map(|device| session.submit_ahead(&MemGetInfo { device }).unwrap().unwrap());
    session.append(&StreamMark { stream: StreamId(0) }).unwrap();
    assert_eq!(taken.take().unwrap_err(), Status::DEVICE_UNAVAILABLE);
    drop(dropped);
    assert_eq!(session.submit_ahead(&MemGetInfo { device: 0 }).err(), Some(Status::DEVICE_UNAVAILABLE));
}

#[test]
fn a_refusal_gives_the_reason() {
    let daemon = NativeHost::start(
        Response::new(Answer::NoServer, "tcp:10.0.0.9:9700: connection refused"),
        |_, _, _| Next::GoOn,
    );
    let geometry = rgpu_client::channel::Geometry::with_arena(1 << 20);
    let port = rgpu_client::port::at_socket(&daemon.socket, geometry.size).unwrap();
    let error = rgpu_client::session::Session::over(port, geometry, rgpu_client::session::Purpose::Compute)
        .err()
        .unwrap();
    let line = error.line();
    assert!(
        line.contains("no GPU server could be reached")
            && line.contains("tcp:10.0.0.9:9700: connection refused"),
        "{line}"
    );
}

/// The session speaks the older version, and the client omits what that lacks.
#[test]
fn an_operation_newer_than_the_host_is_not_supported_and_never_sent() {
    #[derive(PartialEq, Debug)]
    struct Newer;
    impl<'a> Wire<'a> for Newer {
        const SHAPE: Shape = Shape::Struct { name: "Newer", fields: &[] };
        fn put(&self, _w: &mut Writer<'_>) {}
        fn get(_r: &mut Reader<'a>) -> Result<Self, WireError> {
            Ok(Newer)
        }
    }
    impl<'a> Op<'a> for Newer {
        const INFO: OpInfo = OpInfo { opcode: 0x7777, since: VERSION.minor + 1, ..StreamMark::INFO };
    }
    let (sent, seen) = std::sync::mpsc::channel();
    let host = NativeHost::start(ok(), move |_, record, _| {
        sent.send(record.opcode).unwrap();
        Next::GoOn
    });
    let session = session(&host, 1 << 20);
    assert_eq!(session.append(&Newer), Err(Status::NOT_SUPPORTED));
    session.append(&StreamMark { stream: StreamId(1) }).unwrap();
    assert_eq!(seen.recv_timeout(Duration::from_secs(60)), Ok(StreamMark::INFO.opcode));
}

#[test]
fn a_host_of_another_version_or_build_is_refused_by_name() {
    static FINGERPRINTS: [u64; 1] = [1];
    for (major, word) in [(VERSION.major + 1, "version 3.0"), (VERSION.major, "different sources")] {
        let speaks = Speaks::new(major, &FINGERPRINTS);
        let host = NativeHost::speaking(speaks, ok(), |_, _, _| Next::GoOn);
        let geometry = Geometry::with_arena(1 << 20);
        let port = port::at_socket(&host.socket, geometry.size).unwrap();
        let line = Session::over(port, geometry, Purpose::Compute).err().unwrap().line();
        assert!(line.contains(word) && line.contains(&format!("version {VERSION}")), "{line}");
    }
}

#[test]
fn pinned_memory_is_registered_found_and_removed() {
    let daemon = NativeHost::start(ok(), |_, _, _| Next::GoOn);
    let session = session(&daemon, 1 << 20);
    let regions = rgpu_client::regions::Regions::new();
    let address = regions.alloc(session, 10_000, None, "tag").unwrap();
    let range = regions.range(session, address + 100, 9_900).unwrap();
    assert_eq!((range.offset, range.len), (100, 9_900));
    assert!(regions.range(session, address + 100, 9_901).is_none(), "past the end of what was asked for");
    assert_eq!(regions.find(address + 9_999), Some((address, 10_000, "tag")));
    // The program's own memory is recorded here, but the host does not know it.
    let own = vec![0u8; 5000];
    regions.register(session, own.as_ptr() as usize, own.len(), "own").unwrap();
    assert!(regions.register(session, own.as_ptr() as usize + 10, 1, "again").is_err());
    assert!(regions.range(session, own.as_ptr() as usize, 10).is_none());
    assert!(regions.remove(own.as_ptr() as usize, true).is_none(), "it was not allocated here");
    assert_eq!(regions.remove(own.as_ptr() as usize, false), Some("own"));
    assert_eq!(regions.remove(address, true), Some("tag"));
    assert!(regions.find(address).is_none());
}

/// Replies only after the caller has gone to sleep.
#[test]
fn a_long_wait_sleeps() {
    let before = COUNTERS.sleeps.get();
    let daemon = NativeHost::start(ok(), move |host, record, _| {
        while COUNTERS.sleeps.get() == before {
            std::thread::sleep(Duration::from_millis(1));
        }
        host.reply(&record, Status::SUCCESS, &info(1, 1));
        Next::GoOn
    });
    let session = session(&daemon, 1 << 20);
    session.call(&MemGetInfo { device: 0 }).unwrap();
}
