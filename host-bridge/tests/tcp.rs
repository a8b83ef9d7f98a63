//! The transport `tcp`, against a server that speaks the link's protocol.

#![allow(clippy::unwrap_used, reason = "a test may fail where it stands")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags};
use nix::sys::eventfd::EventFd;
use protocol::Status;
use protocol::channel::{NO_SLOT, State};
use protocol::device::{Answer, Extent};
use protocol::handle::StreamId;
use protocol::link::{DataHeader, DataSent, FrameHeader, Hello, Received, Welcome, frame, purpose, wish};
use protocol::ops::Op;
use protocol::ops::copy::MemcpyDtoH;
use protocol::ops::stream::{StreamMark, StreamSynchronize};
use protocol::version::{OURS, Speaks};
use rgpu_host_bridge::bridge::{
    Closed, ConnectError, LinkState, Prepared, RegionError, Security, SessionConfig, Turn,
};
use rgpu_host_bridge::framing::Address;
use test_kit::link::welcome;
use test_kit::server::{Behavior, FakeServer};
use test_kit::session::{Client, RAM, channel};
use test_kit::tcp_server::TcpServer;
use test_kit::turns::{Exchange, Turns};
use test_kit::*;
use zerocopy::{FromZeros, IntoBytes};

#[test]
fn commands_arrive_in_order_and_many_in_a_frame() {
    let server = FakeServer::good();
    let mut client = Client::connect(&server.config());
    assert_eq!(client.header().state(), State::Ready);
    for _ in 0..50_000 {
        client.mark();
    }
    client.synchronize();
    let commands = server.commands();
    assert_eq!(commands.len(), 50_001);
    assert!(commands.iter().enumerate().all(|(i, (seq, _))| *seq == i as u64 + 1));
    assert_eq!(server.programs(), ["test-program"]);
    let counters = client.session.counters();
    assert_eq!((counters.commands.get(), counters.replies.get()), (50_001, 1));
    // How many go in one frame depends on who gets a processor when. So these are all in the ring when the
    // relay, which has nothing left to do, is woken.
    eventually(|| client.progress().executed() == 50_001 && client.header().host_sleep.is_asleep());
    assert!(client.header().host_sleep.take(), "nobody else rings");
    let before = server.frames();
    for _ in 0..1000 {
        client.mark();
    }
    client.ring_doorbell();
    client.synchronize();
    let frames = server.frames() - before;
    assert!(frames < 100, "{frames} frames");
}

#[test]
fn a_reply_carries_its_payload_to_its_own_slot() {
    let server = FakeServer::good();
    let mut client = Client::connect(&server.config());
    let seqs: Vec<u64> = (0..64)
        .map(|slot| {
            client.prepare(slot);
            client.push(&StreamSynchronize { stream: StreamId(0) }, slot)
        })
        .collect();
    for (slot, seq) in seqs.into_iter().enumerate() {
        let (completion, payload) = client.answer(slot as u16);
        assert_eq!((completion.status, payload), (Status::SUCCESS, seq.to_le_bytes().to_vec()));
    }
}

#[test]
fn data_survives_scattered_extents_and_odd_sizes_both_ways() {
    data_survives(true);
}

#[test]
fn data_survives_when_the_relay_moves_all_of_it() {
    data_survives(false);
}

fn data_survives(hands: bool) {
    let server = FakeServer::good();
    let mut config = server.config();
    config.io_threads = hands;
    let mut client = Client::connect(&config);
    for (id, size) in [1u64, 4095, 4097, 262_144, 262_145, 1_000_003, 9_876_543].into_iter().enumerate() {
        let extents = scattered(size, size);
        let bytes = pattern(size as usize, size);
        client.write(&extents, &bytes);
        client.register(id as u32, extents.clone(), false).unwrap();
        client.htod(id as u64, region(id as u32, 0, size));
        client.synchronize();
        client.write(&extents, &vec![0; size as usize]);
        client.dtoh(id as u64, region(id as u32, 0, size));
        client.synchronize();
        assert!(client.read(&extents) == bytes, "{size} bytes came back wrong");
        client.session.unregister_region(id as u32).unwrap();
    }
    let counters = client.session.counters();
    assert_eq!(counters.data_bytes_received.get(), 11_409_028);
    // A thread counts what it has sent a moment after the server has it.
    until("all is counted", || counters.data_bytes_sent.get() >= 11_409_028);
    assert_eq!(counters.data_bytes_sent.get(), 11_409_028);
}

#[test]
fn ranges_of_a_region_and_of_the_arena_are_exact() {
    let server = FakeServer::good();
    let mut client = Client::connect(&server.config());
    let bytes = pattern(3_000_000, 1);
    client.write_arena(123, &bytes[..1_000_000]);
    client.htod(1, arena(123 + 77, 900_001));
    client.dtoh(1, arena(2_000_001, 900_001));
    client.synchronize();
    assert!(client.read_arena(2_000_001, 900_001) == bytes[77..900_078]);
    let extents = scattered(3_000_000, 5);
    client.write(&extents, &bytes);
    client.register(9, extents.clone(), false).unwrap();
    client.htod(2, region(9, 1_234_567, 500_003));
    client.dtoh(2, region(9, 17, 500_003));
    client.synchronize();
    let mut expected = bytes.clone();
    expected.copy_within(1_234_567..1_734_570, 17);
    assert!(client.read(&extents) == expected);
}

/// The server reads one frame after the other, and none while it waits for a command's data.
#[test]
fn a_commands_data_request_is_sent_before_the_command() {
    let server = FakeServer::start(Behavior { hold_commands: true, ..Behavior::default() });
    let mut client = Client::connect(&server.config());
    let (all, lengths) = (4u64 << 20, [16 << 10, 300 << 10, 1 << 20, 16 << 10]);
    let extents = scattered(all, 7);
    let bytes = pattern(all as usize, 7);
    client.write(&extents, &bytes);
    client.register(1, extents, true).unwrap();
    // More short ones than may go eagerly, and some that may not because of those before them on their
    // stream.
    let copies: Vec<(u64, u64)> =
        (0..120u64).map(|n| (n * 37_777 % (3 << 20), lengths[n as usize % lengths.len()])).collect();
    for (number, (offset, len)) in copies.iter().enumerate() {
        client.htod(number as u64, region(1, *offset, *len));
    }
    eventually(|| server.frames() > 0);
    server.release();
    for (number, (offset, len)) in copies.into_iter().enumerate() {
        client.dtoh(number as u64, arena(0, len));
        client.synchronize();
        assert!(client.read_arena(0, len) == bytes[offset as usize..(offset + len) as usize], "{number}");
    }
}

#[test]
fn released_follows_the_data() {
    let server = FakeServer::good();
    let mut client = Client::connect(&server.config());
    client.write_arena(0, &pattern(2_000_000, 3));
    let seq = client.htod(1, arena(0, 2_000_000));
    eventually(|| client.progress().released() >= seq);
    // What was released may be overwritten at once.
    client.write_arena(0, &pattern(2_000_000, 4));
    client.dtoh(1, arena(2_000_000, 2_000_000));
    client.synchronize();
    assert!(client.read_arena(2_000_000, 2_000_000) == pattern(2_000_000, 3));
}

#[test]
fn nothing_that_depends_on_data_is_published_before_it() {
    let server = FakeServer::start(Behavior { data_after_sent: true, ..Behavior::default() });
    let mut client = Client::connect(&server.config());
    for round in 0..5 {
        let bytes = pattern(300_000, round);
        client.write_arena(0, &bytes);
        client.htod(1, arena(0, 300_000));
        client.write_arena(1_000_000, &vec![0; 300_000]);
        client.dtoh(1, arena(1_000_000, 300_000));
        let mark = client.mark();
        let word = client.progress().stream(StreamId(0)).unwrap();
        eventually(|| word.load(Ordering::Acquire) >= mark);
        assert!(client.read_arena(1_000_000, 300_000) == bytes, "the mark came before the data");
    }
}

#[test]
fn progress_is_read_at_any_alignment() {
    // Frames of odd length put the ones behind them at any address of the receiving buffer.
    for odd in [1, 3, 4, 7] {
        let server = FakeServer::start(Behavior {
            extra_frame: Some((frame::ALIVE, vec![0; odd])),
            ..Behavior::default()
        });
        let mut client = Client::connect(&server.config());
        for _ in 0..16 {
            let mark = client.mark();
            client.synchronize();
            let word = client.progress().stream(StreamId(0)).unwrap();
            eventually(|| word.load(Ordering::Acquire) >= mark);
        }
    }
}

#[test]
fn a_copy_that_fails_at_the_server_leaves_nothing_behind() {
    let server = FakeServer::good();
    let mut client = Client::connect(&server.config());
    client.register(1, scattered(10_000, 1), false).unwrap();
    client.dtoh(404, region(1, 0, 10_000));
    client.synchronize();
    // It would wait for ever for data that never comes.
    client.session.unregister_region(1).unwrap();
}

#[test]
fn both_sides_may_have_much_to_send_at_once() {
    let server =
        FakeServer::start(Behavior { slow_reads: Some(Duration::from_millis(1)), ..Behavior::default() });
    let mut client = Client::connect(&server.config());
    let bytes = pattern(4 << 20, 8);
    client.write_arena(0, &bytes);
    client.htod(0, arena(0, 4 << 20));
    let extents = scattered(4 << 20, 2);
    client.register(1, extents.clone(), false).unwrap();
    for i in 1..20 {
        client.htod(i, arena(0, 4 << 20));
        client.dtoh(i - 1, region(1, 0, 4 << 20));
    }
    client.synchronize();
    assert!(client.read(&extents) == bytes);
}

#[test]
fn another_version_is_refused_by_name() {
    let server = FakeServer::start(Behavior { speaks: Some(Speaks::new(7, &[0])), ..Behavior::default() });
    let error = Client::try_connect(&server.config()).err().unwrap();
    assert_eq!(error.answer(), Answer::Version);
    let (text, ours) = (error.to_string(), protocol::VERSION);
    assert!(
        text.contains("version 7.0")
            && text.contains(&format!("version {ours}"))
            && text.contains("127.0.0.1"),
        "{text}"
    );
}

#[test]
fn a_server_built_from_other_sources_is_refused() {
    static OTHER: [u64; protocol::VERSION.minor as usize + 1] = [1; protocol::VERSION.minor as usize + 1];
    let speaks = Some(Speaks::new(protocol::VERSION.major, &OTHER));
    let server = FakeServer::start(Behavior { speaks, ..Behavior::default() });
    let error = Client::try_connect(&server.config()).err().unwrap();
    assert_eq!(error.answer(), Answer::Version);
    assert!(error.to_string().contains("different sources"), "{error}");
}

#[test]
fn with_a_newer_server_the_session_speaks_our_version_and_the_client_is_told() {
    // The newer server knows our version, and has compared fingerprints itself.
    static NEWER: [u64; protocol::VERSION.minor as usize + 2] = [2; protocol::VERSION.minor as usize + 2];
    let speaks = Some(Speaks::new(protocol::VERSION.major, &NEWER));
    let server = FakeServer::start(Behavior { speaks, ..Behavior::default() });
    let client = Client::connect(&server.config());
    assert_eq!(client.header().session_version(), (protocol::VERSION, OURS.fingerprint()));
}

#[test]
fn a_refusal_comes_with_the_servers_words() {
    let server = FakeServer::start(Behavior {
        answer: Some((Answer::Denied, "no GPU for you today")),
        ..Behavior::default()
    });
    let error = Client::try_connect(&server.config()).err().unwrap();
    assert!(matches!(error, ConnectError::Refused { answer: Answer::Denied, .. }));
    assert!(error.to_string().contains("no GPU for you today"), "{error}");
}

#[test]
fn a_server_that_is_not_there_is_named() {
    let mut config = FakeServer::good().config();
    let port = free_port();
    config.server = format!("tcp:127.0.0.1:{port}").parse().unwrap();
    let error = Client::try_connect(&config).err().unwrap();
    assert_eq!(error.answer(), Answer::NoServer);
    assert!(error.to_string().contains(&format!("127.0.0.1:{port}")), "{error}");
}

/// Moves bytes there and back.
fn copies(client: &mut Client, len: u64) {
    let bytes = pattern(len as usize, len);
    client.write_arena(0, &bytes);
    client.htod(1, arena(0, len));
    client.dtoh(1, arena(len, len));
    client.synchronize();
    assert!(client.read_arena(len, len) == bytes);
}

/// Over a long way each answer that a program's start waits for counts.
#[test]
fn a_session_begins_before_its_data_connections_stand() {
    let server = TcpServer::start();
    server.hold_data();
    let mut client = Client::connect(&server.config);
    (0..3).for_each(|_| client.synchronize());
    eventually(|| server.held() == 3);
    // Data waits for them.
    client.write_arena(0, &pattern(100_000, 1));
    let seq = client.htod(1, arena(0, 100_000));
    client.prepare(5);
    client.push(&StreamSynchronize { stream: StreamId(0) }, 5);
    assert!(client.progress().released() < seq);
    server.release_data();
    assert_eq!(client.answer(5).0.status, Status::SUCCESS);
    copies(&mut client, 1_000_000);
    assert_eq!((client.session.counters().resumed.get(), server.resumed()), (0, 0));
    assert_eq!(client.session.close("done", PATIENCE), Closed::Released);
    eventually(|| server.ended() == 1);
    assert!(server.trouble().is_empty(), "{:?}", server.trouble());
}

/// Bytes of a frame that says how much has come of so many streams.
fn resumed(streams: usize) -> usize {
    size_of::<FrameHeader>() + streams * size_of::<Received>()
}

#[test]
fn a_session_is_resumed_in_two_round_trips() {
    const LEN: usize = 700_000;
    let server = TcpServer::start();
    let turns = Turns::before(&server.config);
    let mut client = Client::connect(&turns.config);
    client.write_arena(0, &pattern(LEN, 1));
    client.htod(1, arena(0, LEN as u64));
    client.synchronize();
    // Data is under way, and does not come.
    client.write_arena(0, &pattern(LEN, 2));
    turns.lose();
    client.htod(2, arena(0, LEN as u64));
    until("data is lost", || turns.lost() >= LEN);
    // The connections come about beside each other: each has said its hello before one has an answer. One
    // answer is all that comes.
    turns.hold(4, |purpose| match purpose {
        purpose::RESUME => {
            Exchange { says: size_of::<Hello>() + resumed(4), hears: size_of::<Welcome>() + resumed(4) }
        }
        _ => Exchange { says: size_of::<Hello>(), hears: size_of::<Welcome>() },
    });
    until("it is resumed", || client.session.counters().resumed.get() > 0);
    // What was lost comes without another answer.
    until("data is sent again", || turns.said(purpose::DATA).0 >= LEN);
    let seq = client.dtoh(2, arena(1 << 20, LEN as u64));
    until("data comes", || turns.said(purpose::DATA).1 >= LEN);
    assert!(client.progress().executed() < seq, "a second answer was passed on");
    turns.release();
    client.synchronize();
    assert!(client.read_arena(1 << 20, LEN as u64) == pattern(LEN, 2));
    assert_eq!(client.session.close("done", PATIENCE), Closed::Released);
    assert!(server.trouble().is_empty(), "{:?}", server.trouble());
}

#[test]
fn a_data_connection_that_does_not_come_about_is_a_lost_link() {
    let server = TcpServer::start();
    server.hold_data();
    let mut client = Client::connect(&server.config);
    client.write_arena(0, &pattern(100_000, 1));
    client.htod(1, arena(0, 100_000));
    eventually(|| server.held() == 3);
    server.drop_data();
    client.synchronize();
    copies(&mut client, 1_000_000);
    assert_eq!(client.session.counters().resumed.get(), 1);
    // Where the server keeps no session without connections, it is over.
    let why = "no more connections today";
    let server = FakeServer::start(Behavior { refuses_data: Some(why), ..Behavior::default() });
    let client = Client::connect(&server.config());
    let reason = client.wait_lost();
    assert!(reason.contains("data connections") && reason.contains(why), "{reason}");
}

#[test]
fn a_session_that_ends_before_its_data_connections_stand_ends_properly() {
    let server = TcpServer::start();
    server.hold_data();
    let mut client = Client::connect(&server.config);
    client.write_arena(0, &pattern(100_000, 1));
    client.htod(1, arena(0, 100_000));
    eventually(|| server.held() == 3);
    assert_eq!(client.session.close("done", PATIENCE), Closed::Released);
    eventually(|| server.ended() == 1);
    // They are of no use, and harm nobody.
    server.release_data();
    copies(&mut Client::connect(&server.config), 1000);
}

/// It would keep the session for its whole grace period.
#[test]
fn a_server_that_has_no_room_to_hear_of_a_sessions_end_is_told_again() {
    let server = TcpServer::start();
    let mut client = Client::connect(&server.config);
    client.synchronize();
    let sent = client.session.counters().commands.get();
    // Its worker does not read what is behind this command, so it does not answer the farewell.
    server.hold_commands(true);
    client.mark();
    client.ring_doorbell();
    eventually(|| client.session.counters().commands.get() > sent);
    server.refuse_farewells(2);
    assert_eq!(client.session.close("done", PATIENCE), Closed::Released);
    eventually(|| server.farewells() == 3);
    server.hold_commands(false);
    eventually(|| server.ended() == 1);
}

/// Waits its turn until the test has seen enough.
struct Queued {
    told: Arc<AtomicBool>,
    leave: Arc<EventFd>,
}

impl Turn for Queued {
    fn wait(&mut self, _server: &str, ahead: u32) {
        assert_eq!(ahead, 2);
        self.told.store(true, Ordering::SeqCst);
    }

    fn given_up(&self) -> Option<PollFd<'_>> {
        Some(PollFd::new(self.leave.as_fd(), PollFlags::POLLIN))
    }
}

#[test]
fn a_session_that_waits_its_turn_keeps_no_connections_ready() {
    let behavior = Behavior { queue: &[2], never_serves: true, ..Behavior::default() };
    let server = FakeServer::start(behavior);
    let (told, leave) = (Arc::new(AtomicBool::new(false)), Arc::new(EventFd::new().unwrap()));
    let mut queued = Queued { told: Arc::clone(&told), leave: Arc::clone(&leave) };
    let config = server.config();
    let waiting = std::thread::spawn(move || {
        let (_memories, mut channel) = channel(4 << 20);
        channel.wishes |= wish::MAY_WAIT;
        Prepared::connect(&config, &channel, &mut queued).map(drop)
    });
    eventually(|| told.load(Ordering::SeqCst));
    eventually(|| server.silent() == 0);
    leave.write(1).unwrap();
    assert!(matches!(waiting.join().unwrap(), Err(ConnectError::GivenUp { .. })));
    eventually(|| server.left() == 1);
}

#[test]
fn a_vanished_server_ends_the_session_and_every_wait() {
    let server = FakeServer::start(Behavior { drop_at: Some(3), ..Behavior::default() });
    let mut client = Client::connect(&server.config());
    client.mark();
    client.mark();
    client.prepare(5);
    client.push(&StreamSynchronize { stream: StreamId(0) }, 5);
    let (completion, _) = client.answer(5);
    assert_eq!(completion.status, Status::DEVICE_UNAVAILABLE);
    let reason = client.wait_lost();
    assert!(reason.contains("127.0.0.1") && reason.contains("lost"), "{reason}");
    assert!(client.wakes.load(Ordering::SeqCst) > 0);
    assert!(matches!(client.register(1, scattered(10, 1), false), Err(RegionError::Over(_))));
    assert_eq!(client.session.close("done", PATIENCE), Closed::Released);
}

#[test]
fn a_silent_server_counts_as_lost() {
    let server = FakeServer::start(Behavior { silent: true, ..Behavior::default() });
    let mut config = server.config();
    config.silence = Duration::from_millis(200);
    let mut client = Client::connect(&config);
    // Nobody waits for it yet.
    std::thread::sleep(Duration::from_millis(600));
    assert_eq!(client.session.over(), None);
    client.mark();
    client.session.doorbell();
    let reason = client.wait_lost();
    assert!(reason.contains("nothing was heard"), "{reason}");
}

#[test]
fn only_a_server_that_owes_an_answer_is_asked_for_a_sign_of_life() {
    let server = FakeServer::start(Behavior { swallow: true, ..Behavior::default() });
    let mut config = server.config();
    config.silence = Duration::from_millis(500);
    let client = Client::connect(&config);
    // Longer than the silence that would count, and longer than the pause between two questions. It comes to
    // sleep first.
    let counters = client.session.counters();
    eventually(|| {
        let before = (counters.sleeps.get(), counters.control_bytes_sent.get());
        std::thread::sleep(Duration::from_millis(1500));
        (counters.sleeps.get(), counters.control_bytes_sent.get()) == before
    });
    assert_eq!(server.asked(), 0);
    assert_eq!(client.session.over(), None);
    drop(client);

    // A busy machine may keep the server from its answers for a while.
    config.silence = PATIENCE;
    let mut client = Client::connect(&config);
    client.prepare(5);
    client.push(&StreamSynchronize { stream: StreamId(0) }, 5);
    eventually(|| server.asked() >= 3);
    assert_eq!(client.session.over(), None);
}

/// Pushes something hostile; the session must end with `word` in the reason while another goes on.
fn hostile<T>(word: &str, attack: impl FnOnce(&mut Client) -> T) {
    let server = FakeServer::good();
    let mut bystander = Client::connect(&server.config());
    let mut client = Client::connect(&server.config());
    client.register(1, scattered(10_000, 1), false).unwrap();
    client.register(2, scattered(10_000, 1), true).unwrap();
    client.synchronize();
    attack(&mut client);
    client.session.doorbell();
    let reason = client.wait_lost();
    assert!(reason.contains(word), "{reason}");
    assert!(reason.contains("malformed"), "{reason}");
    bystander.synchronize();
    assert_eq!(bystander.session.over(), None);
}

#[test]
fn an_unknown_opcode_ends_only_its_session() {
    hostile("unknown opcode 0x7777", |client| client.push_raw(0x7777, NO_SLOT, &[0; 16]));
}

#[test]
fn a_wild_slot_ends_only_its_session() {
    hostile("slot 64", |client| client.push_raw(StreamSynchronize::INFO.opcode, 64, &[0; 4]));
    hostile("slot 65535", |client| client.push_raw(StreamSynchronize::INFO.opcode, NO_SLOT, &[0; 4]));
    hostile("slot 3", |client| client.push_raw(StreamMark::INFO.opcode, 3, &[0; 4]));
}

#[test]
fn a_slot_that_awaits_an_answer_cannot_be_used_again() {
    // The server is held at the copy, so the first answer cannot come in between.
    let server = FakeServer::start(Behavior { hold_data: true, ..Behavior::default() });
    let mut client = Client::connect(&server.config());
    client.dtoh(1, arena(0, 100));
    client.push(&StreamSynchronize { stream: StreamId(0) }, 1);
    client.push(&StreamSynchronize { stream: StreamId(0) }, 1);
    let reason = client.wait_lost();
    assert!(reason.contains("slot 1, where command 2 awaits"), "{reason}");
}

#[test]
fn wild_data_references_end_only_their_session() {
    hostile("region that is not registered", |client| client.htod(1, region(99, 0, 1)));
    hostile("outside its region", |client| client.htod(1, region(1, 9_999, 2)));
    hostile("outside its region", |client| client.dtoh(1, region(1, 10_001, 0)));
    hostile("outside the arena", |client| client.dtoh(1, arena((4 << 20) - 1, 2)));
    hostile("outside the arena", |client| client.htod(1, arena(u64::MAX - 5, 2)));
    hostile("for reading only", |client| client.dtoh(1, region(2, 0, 1)));
    // Offset and length that overflow together do not even decode.
    hostile("does not decode", |client| client.htod(1, region(1, u64::MAX, 2)));
    hostile("does not decode", |client| client.push_raw(MemcpyDtoH::INFO.opcode, NO_SLOT, &[0xff; 64]));
}

#[test]
fn a_wild_size_ends_only_its_session() {
    for size in [0u64, 8, 17, 0xffff_fff0] {
        hostile("size", |client| {
            let at = (client.tail().load(Ordering::Relaxed) as usize / 8) % client.ring_words().len();
            client.ring_words()[at]
                .store(size | u64::from(StreamMark::INFO.opcode) << 32 | 0xffff << 48, Ordering::Relaxed);
            client.tail().fetch_add(32, Ordering::Release);
        });
    }
}

#[test]
fn a_wild_cursor_ends_only_its_session() {
    for cursor in [!15, 7, 1 << 40] {
        hostile("cursor", |client| client.tail().store(cursor, Ordering::Release));
    }
}

#[test]
fn a_wrong_seq_ends_only_its_session() {
    hostile("seq", |client| {
        let at = (client.tail().load(Ordering::Relaxed) as usize / 8) % client.ring_words().len();
        client.ring_words()[at]
            .store(32 | u64::from(StreamMark::INFO.opcode) << 32 | 0xffff << 48, Ordering::Relaxed);
        client.ring_words()[at + 1].store(77, Ordering::Relaxed);
        client.tail().fetch_add(32, Ordering::Release);
    });
}

/// A server that does this ends the session, and its name stands in the reason.
fn unruly(word: &str, behavior: Behavior) {
    let server = FakeServer::start(behavior);
    let mut client = Client::connect(&server.config());
    client.mark();
    client.prepare(0);
    client.push(&StreamSynchronize { stream: StreamId(0) }, 0);
    let reason = client.wait_lost();
    assert!(reason.contains(word) && reason.contains("127.0.0.1") && reason.contains("protocol"), "{reason}");
}

#[test]
fn a_server_that_breaks_the_protocol_loses_the_session() {
    let extra =
        |kind, body: &[u8]| Behavior { extra_frame: Some((kind, body.to_vec())), ..Behavior::default() };
    unruly("no such answer", extra(frame::REPLY, &[9; 16]));
    unruly("where at least", extra(frame::REPLY, &[9; 3]));
    unruly("progress", extra(frame::PROGRESS, &[0xff; 24]));
    unruly("progress", extra(frame::PROGRESS, &[1; 25]));
    unruly("unknown kind 77", extra(77, &[]));
    unruly("expects none", extra(frame::DATA_SENT, DataSent { seq: 1, bytes: 5 }.as_bytes()));
    let data = |seq, len| Behavior {
        extra_data: Some(DataHeader { seq, offset: 0, piece: 0, len }),
        ..Behavior::default()
    };
    unruly("expects none", data(1, 100));
    unruly("more than", data(1, u32::MAX >> 9));
    let received = |stream, bytes| extra(frame::RECEIVED, Received { stream, reserved: 0, bytes }.as_bytes());
    unruly("1099511627776 bytes of a stream are acknowledged", received(0, 1 << 40));
    unruly("1 bytes of a stream are acknowledged of which 0 were sent", received(1, 1));
    unruly("acknowledges stream 99, which the session does not have", received(99, 0));
    unruly("acknowledgements", extra(frame::RECEIVED, &[0; 7]));
}

#[test]
fn a_region_is_released_only_when_no_io_references_it() {
    let server = FakeServer::start(Behavior { hold_data: true, ..Behavior::default() });
    let mut client = Client::connect(&server.config());
    let extents = scattered(2_000_000, 11);
    let bytes = pattern(2_000_000, 11);
    client.write(&extents, &bytes);
    client.register(1, extents.clone(), false).unwrap();
    client.htod(1, region(1, 0, 2_000_000));
    client.dtoh(1, region(1, 0, 2_000_000));
    std::thread::scope(|scope| {
        let client = &client;
        let unregistering = scope.spawn(|| client.session.unregister_region(1));
        eventually(|| server.commands().len() == 2);
        client.write(&extents, &vec![0; 2_000_000]);
        assert!(!unregistering.is_finished(), "data is still to come into the region");
        server.release();
        unregistering.join().unwrap().unwrap();
    });
    assert!(client.read(&extents) == bytes);
    assert!(matches!(client.session.unregister_region(1), Err(RegionError::Unknown(1))));
    // The id is free for other memory.
    client.register(1, vec![Extent { addr: RAM - 4096, len: 4096 }], false).unwrap();
}

#[test]
fn limits_on_regions_are_enforced() {
    let server = FakeServer::good();
    let mut config = server.config();
    (config.max_registered, config.max_regions) = (10_000, 3);
    let client = Client::connect(&config);
    let page = |n: u64| vec![Extent { addr: RAM - n * 4096, len: 4000 }];
    client.register(1, page(1), false).unwrap();
    client.register(2, page(2), false).unwrap();
    assert!(matches!(client.register(3, page(3), false), Err(RegionError::Limit { .. })));
    assert!(matches!(client.register(2, page(3), false), Err(RegionError::InUse(2))));
    assert!(matches!(
        client.register(3, vec![Extent { addr: RAM - 1, len: 2 }], false),
        Err(RegionError::Memory(_))
    ));
    client.session.unregister_region(1).unwrap();
    client.register(3, page(3), false).unwrap();
    assert_eq!(client.session.registered(), (2, 8000));
}

#[test]
fn closing_ends_a_session_in_the_middle_of_everything() {
    let server = FakeServer::start(Behavior { hold_data: true, ..Behavior::default() });
    let mut client = Client::connect(&server.config());
    client.write_arena(0, &pattern(4 << 20, 1));
    client.htod(1, arena(0, 4 << 20));
    client.dtoh(1, arena(0, 4 << 20));
    client.prepare(2);
    client.push(&StreamSynchronize { stream: StreamId(0) }, 2);
    assert_eq!(client.session.close("the test is over", PATIENCE), Closed::Released);
    let (completion, _) = client.answer(2);
    assert_eq!(completion.status, Status::DEVICE_UNAVAILABLE);
    assert_eq!(client.lost.lock().unwrap().as_deref(), None, "a close that was asked for is no loss");
    server.release();
}

fn count(folder: &str) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

#[test]
fn a_hundred_sessions_leave_no_descriptor_and_no_thread() {
    // Other tests run in this process at the same time, so this one looks at a process of its own.
    if std::env::var_os("RGPU_TEST_ALONE").is_none() {
        let name = "a_hundred_sessions_leave_no_descriptor_and_no_thread";
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args([name, "--exact", "--test-threads=1"])
            .env("RGPU_TEST_ALONE", "1")
            .status();
        assert!(status.unwrap().success());
        return;
    }
    let server = FakeServer::good();
    let cycle = || {
        let mut client = Client::connect(&server.config());
        client.register(1, scattered(10_000, 1), false).unwrap();
        client.synchronize();
        assert_eq!(client.session.close("next", PATIENCE), Closed::Released);
    };
    cycle();
    // The server's threads end on their own, a little later.
    let settled = |descriptors, threads| {
        eventually(|| count("/proc/self/fd") <= descriptors && count("/proc/self/task") <= threads)
    };
    settled(16, 3);
    let (descriptors, threads) = (count("/proc/self/fd"), count("/proc/self/task"));
    for _ in 0..100 {
        cycle();
    }
    settled(descriptors, threads);
}

/// A session whose server is the test. What the bridge says on the control connection stays unread, as when a
/// command keeps a server's dispatcher busy.
struct Scripted {
    client: Client,
    listener: TcpListener,
    control: TcpStream,
    data: Vec<TcpStream>,
}

impl Scripted {
    fn begin(connections: u32) -> Scripted {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = Address::Tcp("127.0.0.1".into(), listener.local_addr().unwrap().port());
        let mut config = SessionConfig::new(address, "test-host");
        be_patient(&mut config);
        config.security = Security::Insecure;
        (config.data_connections, config.io_threads) = (connections, false);
        let greet = move || {
            let mut greeted: Vec<(Hello, TcpStream)> = Vec::new();
            while greeted.len() <= connections as usize {
                let mut stream = listener.accept().unwrap().0;
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                let mut hello = Hello::new_zeroed();
                // A connection that was opened early may be of no use.
                if stream.read_exact(hello.as_mut_bytes()).is_ok() {
                    let (grace, data_connections) = (PATIENCE.as_secs() as u32, connections);
                    let welcome = welcome(Answer::Ok, "");
                    let welcome = Welcome { token: [7; 16], data_connections, grace, ..welcome };
                    stream.write_all(welcome.as_bytes()).unwrap();
                    greeted.push((hello, stream));
                }
            }
            greeted.sort_by_key(|(hello, _)| (hello.purpose, hello.index));
            let streams: Vec<_> = greeted.into_iter().map(|(_, stream)| stream).collect();
            (listener, streams)
        };
        let server = std::thread::spawn(greet);
        let client = Client::connect(&config);
        let (listener, mut data) = server.join().unwrap();
        Scripted { client, listener, control: data.remove(0), data }
    }

    /// Says on a data connection that `len` bytes of a command's data come.
    fn announce(&mut self, connection: usize, seq: u64, offset: u64, len: u32) {
        let header = DataHeader { seq, offset, piece: 0, len };
        self.data[connection].write_all(header.as_bytes()).unwrap();
    }

    fn frame(&mut self, kind: u32, body: &[u8]) {
        let header = FrameHeader { kind, len: body.len() as u32 };
        self.control.write_all(&[header.as_bytes(), body].concat()).unwrap();
    }
}

/// Otherwise a server whose dispatcher waits for its downloads to leave would wait for ever: the command
/// behind which an acknowledgement stands is read by nobody else.
#[test]
fn data_is_acknowledged_on_its_own_connection_whatever_was_said_beside_commands() {
    const LEN: u32 = 600 << 10;
    let mut server = Scripted::begin(1);
    let seq = server.client.dtoh(1, arena(0, 2 << 20));
    until("it is taken", || server.client.session.counters().commands.get() == seq);
    for part in 0..2u32 {
        server.announce(0, seq, u64::from(part * LEN), LEN);
        server.data[0].write_all(&[1; LEN as usize]).unwrap();
        let come = u64::from((1 + part) * LEN);
        until("it has come", || server.client.session.counters().data_bytes_received.get() == come);
        // The bridge says so with its next commands. It does not tell when, so this is the last of several.
        for _ in 0..3 {
            let mark = server.client.mark();
            until("it is taken", || server.client.session.counters().commands.get() == mark);
        }
    }
    let mut header = DataHeader::new_zeroed();
    server.data[0].read_exact(header.as_mut_bytes()).unwrap();
    let told = header.offset;
    assert_eq!((header.seq, header.len), (0, 0), "an acknowledgement");
    assert!(told >= 1 << 20, "{told} bytes of the stream are acknowledged");
}

/// A command is settled once its data is here. What comes later for it would land in memory that the program
/// uses for something else.
#[test]
fn a_server_that_announces_more_data_than_a_command_awaits_writes_none_of_it() {
    const LEN: u32 = 100_000;
    let mut server = Scripted::begin(2);
    server.client.write_arena(0, &[5; LEN as usize]);
    let seq = server.client.dtoh(1, arena(0, LEN.into()));
    until("it is taken", || server.client.session.counters().commands.get() == seq);
    server.announce(0, seq, 0, LEN);
    server.announce(1, seq, 0, LEN);
    let sent = DataSent { seq, bytes: LEN.into() };
    server.frame(frame::DATA_SENT, sent.as_bytes());
    let reason = server.client.wait_lost();
    assert!(reason.contains("more than the command expects"), "{reason}");
    assert!(server.client.read_arena(0, LEN.into()) == [5; LEN as usize]);
}

#[test]
fn a_relay_whose_link_is_lost_sleeps_until_there_is_another() {
    let Scripted { client, listener, control, data } = Scripted::begin(2);
    drop((control, data));
    until("the link is lost", || client.session.link() == LinkState::Lost);
    let sleeps = client.session.counters().sleeps.get();
    // Several attempts to resume, between which time passes.
    for _ in 0..12 {
        drop(listener.accept().unwrap());
    }
    let sleeps = client.session.counters().sleeps.get() - sleeps;
    assert!(sleeps < 100, "it has woken up {sleeps} times for nothing");
    assert_eq!(client.session.over(), None);
}

/// A server that ends sends what it has to say, and then none of the data that it had announced before.
#[test]
fn a_farewell_behind_data_that_does_not_come_ends_the_session() {
    let mut server = Scripted::begin(1);
    let seq = server.client.dtoh(1, arena(0, 1000));
    until("it is taken", || server.client.session.counters().commands.get() == seq);
    // Otherwise the kernel would drop what it has not sent when the connection is closed.
    server.control.set_nodelay(true).unwrap();
    server.frame(frame::DATA_SENT, DataSent { seq, bytes: 1000 }.as_bytes());
    server.frame(frame::ALIVE, &[]);
    server.frame(frame::BYE, b"the server is being drained");
    let Scripted { client, listener: _listener, control, data } = server;
    drop((control, data));
    let reason = client.wait_lost();
    assert!(reason.contains("the server is being drained"), "{reason}");
}

/// Said with fewer bytes than were announced, the rest would come behind the command's end.
#[test]
fn a_server_that_settles_a_command_before_its_data_is_here_loses_the_session() {
    let mut server = Scripted::begin(1);
    let seq = server.client.dtoh(1, arena(0, 1000));
    until("it is taken", || server.client.session.counters().commands.get() == seq);
    server.announce(0, seq, 0, 1000);
    server.data[0].write_all(&[1; 500]).unwrap();
    until("it has come", || server.client.session.counters().data_bytes_received.get() == 500);
    server.frame(frame::DATA_SENT, DataSent { seq, bytes: 500 }.as_bytes());
    let reason = server.client.wait_lost();
    assert!(reason.contains("of which 1000 come or have come"), "{reason}");
}
