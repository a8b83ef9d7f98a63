//! A guest is stopped, and then continues, is reset, or leaves. The VMM's first messages are the same in all
//! cases.

#![allow(clippy::unwrap_used, reason = "a test may fail where it stands")]

mod daemon;
mod guest;

use std::io::Write;
use std::net::TcpListener;
use std::sync::atomic::Ordering;

use daemon::Daemon;
use guest::{Guest, create, message, plain};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use protocol::channel::{NO_SLOT, State};
use protocol::data::{HostIn, HostOut};
use protocol::device::{Answer, CONTROL_QUEUE, Request, request};
use protocol::handle::StreamId;
use protocol::ops::copy::{MemcpyDtoH, MemcpyHtoD};
use protocol::ops::stream::StreamSynchronize;
use test_kit::channel::Channel;
use test_kit::link::welcome;
use test_kit::local_server::{Behavior as Workers, LocalServer};
use test_kit::server::FakeServer;
use test_kit::tcp_server::TcpServer;
use test_kit::*;
use vhost::vhost_user::VhostUserFrontend;
use zerocopy::IntoBytes;

fn serving_locally(server: &LocalServer) -> Daemon {
    Daemon::start(&["--server", &server.config.server.to_string(), "--transport", "local"])
}

fn serving_over_tcp(server: &TcpServer) -> Daemon {
    Daemon::start(&["--server", &server.config.server.to_string()])
}

/// The process that serves the guest.
fn device_process(daemon: &Daemon) -> Pid {
    let status = daemon.status();
    let rows = status["device_processes"].as_array().unwrap();
    let row = rows.iter().find(|row| row["serves"].as_str().unwrap().starts_with("vm")).unwrap();
    Pid::from_raw(i32::try_from(row["process"].as_u64().unwrap()).unwrap())
}

/// The states of the sessions in the daemon's status.
fn states(daemon: &Daemon) -> Vec<String> {
    let status = daemon.status();
    let rows = status["sessions"].as_array().unwrap();
    rows.iter().map(|row| row["state"].as_str().unwrap().to_owned()).collect()
}

/// All of the guest's memory.
fn memory(guest: &Guest) -> Vec<u8> {
    let mut bytes = vec![0; session::RAM as usize];
    // SAFETY: the memory belongs to this test, and is mapped as a whole.
    unsafe { guest.at(0, session::RAM).copy_to(std::ptr::NonNull::from(&mut bytes[..]).cast(), bytes.len()) };
    bytes
}

/// Copies bytes there and back, with the guest stopped in the middle.
struct Copies {
    number: u32,
}

impl Copies {
    fn begin(guest: &mut Guest, channel: &mut Channel, number: u32) -> Copies {
        let extents = scattered(100_000, number.into());
        let register = Request { kind: request::REGISTER_MEMORY, region: number, ..create(0, &extents) };
        assert_eq!(guest.ask(register, &extents), (Answer::Ok, String::new()));
        session::write(&guest.memories, &extents, &pattern(100_000, number.into()));
        let src = HostIn::Range(region(number, 0, 100_000));
        channel.push(&MemcpyHtoD { stream: StreamId(0), dst: number.into(), src }, NO_SLOT);
        Copies { number }
    }

    fn end(self, guest: &Guest, channel: &mut Channel) {
        let extents = scattered(100_000, self.number.into());
        channel.synchronize();
        session::write(&guest.memories, &extents, &vec![0; 100_000]);
        let dst = HostOut(region(self.number, 0, 100_000));
        channel.push(&MemcpyDtoH { stream: StreamId(0), src: self.number.into(), dst }, NO_SLOT);
        channel.synchronize();
        let back = session::read(&guest.memories, &extents);
        assert!(back == pattern(100_000, self.number.into()), "region {}", self.number);
    }
}

fn goes_on(daemon: &Daemon, ended: impl Fn() -> usize) {
    let mut guest = Guest::connect(daemon);
    let mut channel = guest.create(0);
    for round in 0..20 {
        let copies = Copies::begin(&mut guest, &mut channel, round);
        guest.stop();
        assert_eq!(states(daemon), ["paused"]);
        // Nobody touches the guest's memory, although the device has commands and the program has rung a
        // doorbell.
        let before = memory(&guest);
        if round % 5 == 3 {
            let before = daemon.number("device_processes_restarted");
            kill(device_process(daemon), Signal::SIGKILL).unwrap();
            eventually(|| daemon.number("device_processes_restarted") == before + 1);
        }
        assert!(memory(&guest) == before, "the memory of a stopped guest has changed");
        guest.go_on();
        copies.end(&guest, &mut channel);
        assert_eq!(channel.view().header().state(), State::Ready);
    }
    assert_eq!(daemon.number("sessions_lost"), 0);
    assert_eq!((daemon.number("sessions_opened"), ended()), (1, 0));
    // Stopped and reset: the session ends, and the memory stays unchanged.
    guest.stop();
    let before = memory(&guest);
    guest.read_config();
    eventually(|| ended() == 1);
    assert!(memory(&guest) == before);
    eventually(|| daemon.sessions() == 0);
    // The next driver starts.
    (0..3).for_each(|queue| guest.start(queue));
    let mut channel = guest.create(0);
    channel.synchronize();
    // A device process that is killed while the guest is stopped for a reset leaves nothing to the next one.
    guest.stop();
    let restarted = daemon.number("device_processes_restarted");
    kill(device_process(daemon), Signal::SIGKILL).unwrap();
    eventually(|| daemon.number("device_processes_restarted") == restarted + 1);
    guest.read_config();
    eventually(|| ended() == 2);
    (0..3).for_each(|queue| guest.start(queue));
    guest.create(0).synchronize();
    // A VMM that leaves ends the session of a stopped guest.
    guest.stop();
    drop(guest);
    eventually(|| ended() == 3);
}

#[test]
fn a_local_session_goes_on_when_the_guest_does() {
    let server = LocalServer::start(Workers::Good);
    goes_on(&serving_locally(&server), || server.ended.load(Ordering::SeqCst));
    assert!(server.trouble.lock().unwrap().is_empty(), "{:?}", server.trouble);
}

#[test]
fn a_session_over_tcp_goes_on_when_the_guest_does() {
    let server = TcpServer::start();
    goes_on(&serving_over_tcp(&server), || server.ended());
    assert!(server.trouble().is_empty(), "{:?}", server.trouble());
}

/// Each way in which a VMM shows that another driver starts on queues that had stopped.
#[test]
fn whatever_shows_a_reset_ends_the_sessions() {
    let server = TcpServer::start();
    let daemon = serving_over_tcp(&server);
    let ways: [fn(&mut Guest); 4] = [
        |guest| guest.read_config(),
        // The queue starts at its beginning.
        |guest| (0..3).for_each(|queue| guest.start(queue)),
        // It has other addresses.
        |guest| {
            guest.move_queues();
            guest.go_on();
        },
        |guest| guest.frontend.reset_device().unwrap(),
    ];
    for (way, show) in ways.iter().enumerate() {
        let mut guest = Guest::connect(&daemon);
        guest.create(0).synchronize();
        guest.stop();
        assert_eq!(states(&daemon), ["paused"], "way {way}");
        show(&mut guest);
        eventually(|| server.ended() == way + 1);
        // The server may see the end first.
        eventually(|| daemon.sessions() == 0);
    }
}

#[test]
fn a_request_in_progress_is_answered_once_and_after_the_stop() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let daemon = Daemon::start(&["--server", &format!("tcp:{}", listener.local_addr().unwrap())]);
    let mut guest = Guest::connect(&daemon);
    let (extents, _) = guest.prepare(2);
    let (head, at) = guest.send(&message(create(2, &extents), &extents));
    let (mut connection, _) = listener.accept().unwrap();
    for _ in 0..3 {
        guest.stop();
        let (quick, _) = guest.send(&message(plain(request::DESTROY_CHANNEL, 77), &[]));
        assert_eq!(guest.used(CONTROL_QUEUE), None, "a stopped queue is not served");
        guest.go_on();
        assert_eq!(guest.wait_used(CONTROL_QUEUE).0, quick);
    }
    // The server refuses while the guest is stopped.
    guest.stop();
    connection.write_all(welcome(Answer::Denied, "nobody is served here").as_bytes()).unwrap();
    assert_eq!(guest.used(CONTROL_QUEUE), None);
    guest.go_on();
    assert_eq!(guest.wait_used(CONTROL_QUEUE).0, head);
    assert_ne!(guest.answer_at(at).0, Answer::Ok);
    assert_eq!(guest.ask(plain(request::DESTROY_CHANNEL, 77), &[]).0, Answer::Invalid);
    assert_eq!(guest.used(CONTROL_QUEUE), None, "each request is answered once");
}

#[test]
fn work_from_just_before_the_stop_is_done_after_it() {
    let (local, tcp) = (LocalServer::start(Workers::Good), TcpServer::start());
    for daemon in [serving_locally(&local), serving_over_tcp(&tcp)] {
        let mut guest = Guest::connect(&daemon);
        let mut channel = guest.create(0);
        channel.synchronize();
        for _ in 0..5 {
            guest.stop();
            // A command, and a doorbell that the device has not seen.
            channel.push(&StreamSynchronize { stream: StreamId(0) }, 0);
            let before = memory(&guest);
            assert_eq!(states(&daemon), ["paused"]);
            assert!(memory(&guest) == before);
            guest.go_on();
            assert!(channel.answer(0).0.status.is_success());
        }
        assert_eq!(daemon.number("sessions_lost"), 0);
    }
}

#[test]
fn a_session_whose_work_keeps_using_the_memory_ends_with_a_reason() {
    let server = LocalServer::start(Workers::Keeps);
    let daemon = serving_locally(&server);
    let mut guest = Guest::connect(&daemon);
    let mut channel = guest.create(0);
    Copies::begin(&mut guest, &mut channel, 1);
    eventually(|| server.keeps() == 1);
    guest.stop();
    let reason = channel.lost().unwrap();
    assert!(reason.contains("the guest was stopped, but work on the GPU kept using its memory"), "{reason}");
    guest.go_on();
    assert_eq!(guest.ask(plain(request::DESTROY_CHANNEL, 0), &[]).0, Answer::Ok);
    guest.create(0);
}

#[test]
fn a_server_that_keeps_no_session_without_connections_ends_it_with_a_reason() {
    let daemon = Daemon::serving(&FakeServer::good());
    let mut guest = Guest::connect(&daemon);
    let mut channel = guest.create(0);
    channel.synchronize();
    guest.stop();
    let reason = channel.lost().unwrap();
    assert!(reason.contains("the guest was stopped") && reason.contains("--grace-seconds"), "{reason}");
    guest.go_on();
    assert_eq!(guest.ask(plain(request::DESTROY_CHANNEL, 0), &[]).0, Answer::Ok);
}
