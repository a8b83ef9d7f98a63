//! A device process ends unexpectedly: its guest gets another one and notices at most lost sessions, and
//! nobody else notices anything.

#![allow(clippy::unwrap_used, reason = "a test may fail where it stands")]

mod daemon;
mod guest;

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::mpsc;

use daemon::Daemon;
use guest::{Guest, create, message, plain};
use host_bridge::framing::{recv_frame, recv_struct, send_frame, send_message};
use host_bridge::memory::Memories;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use protocol::channel::{NO_SLOT, State};
use protocol::data::{HostIn, HostOut, HostRange};
use protocol::device::{
    Answer, CONTROL_QUEUE, DOORBELL_QUEUE, EVENT_QUEUE, EVENT_WAKE, Event, Extent, Request, request,
};
use protocol::handle::StreamId;
use protocol::link::{Ack, Hello, Memory, frame, wish};
use protocol::ops::copy::{MemcpyDtoH, MemcpyHtoD};
use protocol::ops::stream::StreamMark;
use test_kit::link::welcome;
use test_kit::local_server::{Behavior as Workers, LocalServer};
use test_kit::native_client::NativeClient;
use test_kit::resources::{leave_no_descriptors, limit_descriptors};
use test_kit::server::{Behavior, FakeServer, mute_server};
use test_kit::tcp_server::TcpServer;
use test_kit::*;
use vhost::VhostBackend;
use zerocopy::{FromBytes, IntoBytes};

/// The process that serves the guest, or this user's programs.
fn device_process(daemon: &Daemon, serves: &str) -> i32 {
    let status = daemon.status();
    let rows = status["device_processes"].as_array().unwrap();
    let row = rows.iter().find(|row| row["serves"].as_str().unwrap().starts_with(serves)).unwrap();
    i32::try_from(row["process"].as_u64().unwrap()).unwrap()
}

/// Kills the guest's device process and waits until another one serves it.
fn crash(daemon: &Daemon) {
    let (process, before) = (device_process(daemon, "vm"), daemon.number("device_processes_restarted"));
    kill(Pid::from_raw(process), Signal::SIGKILL).unwrap();
    eventually(|| daemon.number("device_processes_restarted") == before + 1);
    assert_ne!(device_process(daemon, "vm"), process);
}

/// A native client with a channel.
fn native(daemon: &Daemon) -> (NativeClient, test_kit::channel::Channel) {
    NativeClient::with_channel(&daemon.native(), "neighbor")
}

#[test]
fn a_guest_goes_on_after_its_device_process_was_killed() {
    let daemon = Daemon::serving(&FakeServer::good());
    let mut guest = Guest::connect(&daemon);
    let (mut channel, other) = (guest.create(0), guest.create(1));
    channel.synchronize();
    for round in 1..=3 {
        let events = [guest.post_event(), guest.post_event()];
        crash(&daemon);
        // Both programs learn why their sessions are over, and their sleeping threads are woken.
        let mut woken = Vec::new();
        for at in events {
            assert_eq!(guest.wait_used(EVENT_QUEUE).1, 8);
            let event = Event::read_from_bytes(&guest.read::<8>(at)).unwrap();
            assert_eq!(event.kind, EVENT_WAKE);
            woken.push(event.channel);
        }
        woken.sort_unstable();
        assert_eq!(woken, [0, 1]);
        for channel in [&channel, &other] {
            assert_eq!(channel.view().header().state(), State::Lost);
            let reason = channel.view().header().reason();
            assert!(
                reason.contains("was killed by SIGKILL") && reason.contains("start the program again"),
                "{reason}"
            );
        }
        eventually(|| daemon.number("sessions_lost") == 2 * round);
        // The driver's remaining requests for these channels are answered, and the next programs are served.
        let unregister = Request { region: 3, ..plain(request::UNREGISTER_MEMORY, 0) };
        assert_eq!(guest.ask(unregister, &[]), (Answer::Ok, String::new()));
        let extents = scattered(5000, 1);
        let register = Request { kind: request::REGISTER_MEMORY, region: 4, ..create(0, &extents) };
        assert_eq!(guest.ask(register, &extents).0, Answer::Invalid);
        for id in [0, 1] {
            assert_eq!(guest.ask(plain(request::DESTROY_CHANNEL, id), &[]), (Answer::Ok, String::new()));
            assert_eq!(guest.ask(plain(request::DESTROY_CHANNEL, id), &[]).0, Answer::Invalid);
        }
        channel = guest.create(0);
        guest.create(1);
        channel.synchronize();
    }
    assert_eq!(daemon.sessions(), 2);
    guest.reset();
    assert_eq!(daemon.sessions(), 0);
}

#[test]
fn a_device_process_that_does_not_report_makes_no_other_one_late() {
    let daemon = Daemon::serving(&FakeServer::good());
    // It is asked first.
    let _guest = Guest::connect(&daemon);
    let _program = native(&daemon);
    let process = Pid::from_raw(device_process(&daemon, "vm"));
    let reports = || {
        let status = daemon.any_status().unwrap();
        let rows = status["device_processes"].as_array().unwrap();
        let of =
            |row: &serde_json::Value| (row["serves"].as_str() == Some("vm testvm"), row["reports"] == true);
        rows.iter().map(of).collect::<Vec<_>>()
    };
    kill(process, Signal::SIGSTOP).unwrap();
    eventually(|| reports() == [(true, false), (false, true)]);
    kill(process, Signal::SIGCONT).unwrap();
    eventually(|| reports() == [(true, true), (false, true)]);
}

#[test]
fn a_keeper_without_descriptors_ends_no_device_process() {
    let daemon = Daemon::serving(&FakeServer::good());
    let mut guest = Guest::connect(&daemon);
    let mut channel = guest.create(0);
    let (restarted, process) = (daemon.number("device_processes_restarted"), device_process(&daemon, "vm"));
    let most = leave_no_descriptors(daemon.pid());
    // The device process asks for a connection, with the socket for the answer.
    let (extents, _) = guest.prepare(1);
    let (head, at) = guest.send(&message(create(1, &extents), &extents));
    eventually(|| daemon.log().contains("is not heard: this process cannot open more descriptors"));
    channel.synchronize();
    assert_eq!(guest.used(CONTROL_QUEUE), None);
    limit_descriptors(daemon.pid(), most);
    assert_eq!(guest.wait_used(CONTROL_QUEUE).0, head);
    assert_eq!(guest.answer_at(at), (Answer::Ok, String::new()));
    assert_eq!((daemon.number("device_processes_restarted"), daemon.sessions()), (restarted, 2));
    assert_eq!(device_process(&daemon, "vm"), process);
}

#[test]
fn a_device_process_that_cannot_be_started_is_tried_again() {
    let daemon = Daemon::serving(&FakeServer::good());
    let mut guest = Guest::connect(&daemon);
    let channel = guest.create(0);
    let before = daemon.number("device_processes_restarted");
    let process = device_process(&daemon, "vm");
    let most = leave_no_descriptors(daemon.pid());
    kill(Pid::from_raw(process), Signal::SIGKILL).unwrap();
    eventually(|| daemon.log().contains("Too many open files"));
    limit_descriptors(daemon.pid(), most);
    eventually(|| daemon.try_status().is_some_and(|s| s["device_processes_restarted"] == before + 1));
    // The successor knows what its predecessor's predecessor had stored.
    eventually(|| channel.view().header().state() == State::Lost);
    assert_eq!(guest.ask(plain(request::DESTROY_CHANNEL, 0), &[]), (Answer::Ok, String::new()));
    guest.create(0).synchronize();
    assert!(!daemon.log().contains("the VMM's connection ended"), "{}", daemon.log());
}

#[test]
fn requests_in_progress_are_answered_by_the_successor() {
    let server = FakeServer::start(Behavior { hold_data: true, ..Behavior::default() });
    let daemon = Daemon::serving(&server);
    let mut guest = Guest::connect(&daemon);
    let mut channel = guest.create(0);
    let extents = scattered(100_000, 4);
    let register = Request { kind: request::REGISTER_MEMORY, region: 1, ..create(0, &extents) };
    assert_eq!(guest.ask(register, &extents).0, Answer::Ok);
    let dst = HostOut(HostRange { len: 5, ..region(1, 0, 0) });
    channel.push(&MemcpyDtoH { stream: StreamId(0), src: 1, dst }, NO_SLOT);
    eventually(|| server.commands().len() == 1);
    // The server is held in the copy, so the region cannot be released. A later request is answered earlier.
    let (slow, slow_at) =
        guest.send(&message(Request { region: 1, ..plain(request::UNREGISTER_MEMORY, 0) }, &[]));
    let (quick, _) = guest.send(&message(plain(request::DESTROY_CHANNEL, 77), &[]));
    assert_eq!(guest.wait_used(CONTROL_QUEUE).0, quick);
    crash(&daemon);
    assert_eq!(guest.wait_used(CONTROL_QUEUE).0, slow);
    assert_eq!(guest.answer_at(slow_at), (Answer::Ok, String::new()));
    assert_eq!(guest.used(CONTROL_QUEUE), None, "each request is answered once");
    assert_eq!(guest.ask(plain(request::DESTROY_CHANNEL, 0), &[]).0, Answer::Ok);
    guest.create(0);
}

#[test]
fn a_channel_that_was_being_created_is_created_by_the_successor() {
    let (address, greetings) = mute_server();
    let daemon = Daemon::start(&["--server", &address]);
    let mut guest = Guest::connect(&daemon);
    let (extents, geometry) = guest.prepare(1);
    let view = guest.memories.view(&extents, geometry.size as u64).unwrap();
    let (head, at) = guest.send(&message(create(1, &extents), &extents));
    eventually(|| greetings.load(Ordering::SeqCst) == 1);
    crash(&daemon);
    eventually(|| greetings.load(Ordering::SeqCst) == 2);
    assert_ne!(view.header().state(), State::Lost, "the program has no session yet that could be lost");
    // The server stays silent, and the guest is told so once.
    assert_eq!(guest.wait_used(CONTROL_QUEUE).0, head);
    assert_eq!(guest.answer_at(at).0, Answer::NoServer);
    assert_eq!(guest.used(CONTROL_QUEUE), None);
}

/// Commands go to the server before the session's data connections stand.
#[test]
fn a_session_that_has_just_begun_goes_on_in_the_next_device_process() {
    let server = TcpServer::start();
    server.hold_data();
    let daemon = serving_over_tcp(&server);
    let mut guest = Guest::connect(&daemon);
    let mut channel = guest.create(1);
    channel.synchronize();
    let extents = scattered(100_000, 1);
    let bytes = pattern(100_000, 7);
    session::write(&guest.memories, &extents, &bytes);
    let register = Request { kind: request::REGISTER_MEMORY, region: 4, ..create(1, &extents) };
    assert_eq!(guest.ask(register, &extents), (Answer::Ok, String::new()));
    let src = HostIn::Range(region(4, 0, 100_000));
    channel.push(&MemcpyHtoD { stream: StreamId(0), dst: 1, src }, NO_SLOT);
    eventually(|| server.held() > 0);
    server.drop_data();
    crash(&daemon);
    channel.synchronize();
    session::write(&guest.memories, &extents, &vec![0; 100_000]);
    let dst = HostOut(region(4, 0, 100_000));
    channel.push(&MemcpyDtoH { stream: StreamId(0), src: 1, dst }, NO_SLOT);
    channel.synchronize();
    assert!(session::read(&guest.memories, &extents) == bytes);
    assert_eq!((daemon.number("sessions_lost"), server.farewells(), server.ended()), (0, 0, 0));
    assert!(server.trouble().is_empty(), "{:?}", server.trouble());
}

#[test]
fn programs_that_wait_in_a_servers_queue_wait_on_in_the_next_process() {
    let server = FakeServer::start(Behavior { queue: &[7], never_serves: true, ..Behavior::default() });
    let daemon = Daemon::serving(&server);
    let mut guest = Guest::connect(&daemon);
    let [view, leaves] = [2, 3].map(|channel| {
        let (extents, geometry) = guest.prepare(channel);
        let view = guest.memories.view(&extents, geometry.size as u64).unwrap();
        view.header().set_wishes(wish::MAY_WAIT);
        assert_eq!(guest.ask(create(channel, &extents), &extents), (Answer::Ok, String::new()));
        assert_eq!(view.header().state(), State::Waiting);
        view
    });
    crash(&daemon);
    eventually(|| server.left() == 2 && server.programs().len() == 4);
    assert_eq!(leaves.header().state(), State::Waiting);
    // One of them has enough of it.
    assert_eq!(guest.ask(plain(request::DESTROY_CHANNEL, 3), &[]), (Answer::Ok, String::new()));
    eventually(|| server.left() == 3);
    let alive = view.header().alive();
    eventually(|| view.header().alive() != alive);
    server.serve();
    crash(&daemon);
    eventually(|| view.header().state() != State::Waiting);
    guest.channel(view).synchronize();
    // A session is ready a moment before it is listed.
    eventually(|| daemon.sessions() == 1);
    assert_eq!(daemon.number("sessions_lost"), 0);
    // It is a session like any other now.
    assert_eq!(guest.ask(plain(request::DESTROY_CHANNEL, 2), &[]), (Answer::Ok, String::new()));
    eventually(|| daemon.sessions() == 0);
}

#[test]
fn a_program_that_waited_and_is_refused_in_the_next_process_learns_why() {
    let refusal = Some((Answer::NoResources, "nobody is served here"));
    let behavior = Behavior { queue: &[1], never_serves: true, answer: refusal, ..Behavior::default() };
    let server = FakeServer::start(behavior);
    let daemon = Daemon::serving(&server);
    let mut guest = Guest::connect(&daemon);
    let (extents, geometry) = guest.prepare(2);
    let view = guest.memories.view(&extents, geometry.size as u64).unwrap();
    view.header().set_wishes(wish::MAY_WAIT);
    assert_eq!(guest.ask(create(2, &extents), &extents), (Answer::Ok, String::new()));
    server.serve();
    crash(&daemon);
    eventually(|| view.header().state() == State::Lost);
    assert!(view.header().reason().contains("nobody is served here"), "{}", view.header().reason());
    assert_eq!(guest.ask(plain(request::DESTROY_CHANNEL, 2), &[]), (Answer::Ok, String::new()));
    assert_eq!(guest.ask(plain(request::DESTROY_CHANNEL, 2), &[]).0, Answer::Invalid, "it is gone");
}

/// A server on this host that takes one session and its memory, and closes it on request. It never reads from
/// its client, which is gone when the receiver gets a message.
fn local_server(path: &Path) -> (mpsc::Receiver<()>, mpsc::Sender<()>) {
    let listener = std::os::unix::net::UnixListener::bind(path).unwrap();
    let ((gone, is_gone), (close, may_close)) = (mpsc::channel(), mpsc::channel());
    std::thread::spawn(move || {
        let (socket, _) = listener.accept().unwrap();
        recv_struct::<Hello>(socket.as_fd(), &mut Vec::new()).unwrap().unwrap();
        send_message(socket.as_fd(), &[welcome(Answer::Ok, "").as_bytes()], &[]).unwrap();
        let mut fds: Vec<OwnedFd> = Vec::new();
        recv_frame(socket.as_fd(), &mut Vec::new(), &mut fds).unwrap().unwrap();
        send_frame(socket.as_fd(), frame::ACK, &[Ack { status: 0, reserved: 0 }.as_bytes()], &[]).unwrap();
        assert_eq!(recv_frame(socket.as_fd(), &mut Vec::new(), &mut Vec::new()).unwrap(), None);
        gone.send(()).unwrap();
        may_close.recv().unwrap();
        drop((socket, fds));
    });
    (is_gone, close)
}

fn serving_locally(server: &LocalServer) -> Daemon {
    Daemon::start(&["--server", &server.config.server.to_string(), "--transport", "local"])
}

fn serving_over_tcp(server: &TcpServer) -> Daemon {
    Daemon::start(&["--server", &server.config.server.to_string()])
}

/// Registers extents as a region.
fn register(region: u32, extents: &[Extent]) -> Request {
    Request { kind: request::REGISTER_MEMORY, region, ..create(0, extents) }
}

fn unregister(region: u32) -> Request {
    Request { region, ..plain(request::UNREGISTER_MEMORY, 0) }
}

#[test]
fn a_local_session_goes_on_in_the_next_device_process() {
    let server = LocalServer::start(Workers::Good);
    let (daemon, ended) = (serving_locally(&server), || server.ended.load(Ordering::SeqCst));
    goes_on_in_the_next_device_process(&daemon, ended);
    // A VMM that leaves before the next process has found the session also ends it.
    let mut guest = Guest::connect(&daemon);
    guest.create(0).synchronize();
    kill(Pid::from_raw(device_process(&daemon, "vm")), Signal::SIGKILL).unwrap();
    drop(guest);
    eventually(|| ended() == 4);
    assert!(server.trouble.lock().unwrap().is_empty(), "{:?}", server.trouble);
}

#[test]
fn a_session_over_tcp_goes_on_in_the_next_device_process() {
    let server = TcpServer::start();
    goes_on_in_the_next_device_process(&serving_over_tcp(&server), || server.ended());
    assert!(server.trouble().is_empty(), "{:?}", server.trouble());
}

fn goes_on_in_the_next_device_process(daemon: &Daemon, ended: impl Fn() -> usize) {
    let mut guest = Guest::connect(daemon);
    let mut channel = guest.create(0);
    let bytes = pattern(100_000, 7);
    for round in 0..3 {
        let extents = scattered(100_000, round.into());
        assert_eq!(guest.ask(register(round, &extents), &extents), (Answer::Ok, String::new()));
        session::write(&guest.memories, &extents, &bytes);
        channel.push(
            &MemcpyHtoD {
                stream: StreamId(0),
                dst: round.into(),
                src: HostIn::Range(region(round, 0, 100_000)),
            },
            NO_SLOT,
        );
        let event = guest.post_event();
        crash(daemon);
        // Its threads look again, because the old process may have been about to wake them.
        assert_eq!(guest.wait_used(EVENT_QUEUE).1, 8);
        assert_eq!(Event::read_from_bytes(&guest.read::<8>(event)).unwrap().channel, 0);
        channel.synchronize();
        assert_eq!(channel.view().header().state(), State::Ready);
        // The regions are the same as before.
        for round in 0..=round {
            let extents = scattered(100_000, round.into());
            session::write(&guest.memories, &extents, &vec![0; 100_000]);
            let dst = HostOut(region(round, 0, 100_000));
            channel.push(&MemcpyDtoH { stream: StreamId(0), src: round.into(), dst }, NO_SLOT);
            channel.synchronize();
            assert!(session::read(&guest.memories, &extents) == bytes, "region {round}");
        }
        assert_eq!(guest.ask(register(round, &extents), &extents).0, Answer::Invalid, "it is in use");
        let status = daemon.status();
        let [row] = &status["sessions"].as_array().unwrap()[..] else { panic!("{status}") };
        assert_eq!(row["regions"].as_u64(), Some(u64::from(round) + 1));
        // At least once: a link over tcp that is silent for a while is replaced.
        assert!(row["resumed"].as_u64() >= Some(1), "{row}");
        assert_eq!(row["program"], "guest-program");
    }
    assert_eq!((daemon.number("sessions_lost"), daemon.number("sessions_opened")), (0, 1));
    assert_eq!(guest.ask(unregister(1), &[]), (Answer::Ok, String::new()));
    assert_eq!(guest.ask(unregister(1), &[]).0, Answer::Invalid);
    assert_eq!(guest.ask(plain(request::DESTROY_CHANNEL, 0), &[]), (Answer::Ok, String::new()));
    eventually(|| ended() == 1);
    // A reset ends a session even if another process had it before.
    guest.create(0).synchronize();
    crash(daemon);
    guest.reset();
    eventually(|| ended() == 2);
    eventually(|| daemon.sessions() == 0);
    // So does a VMM that leaves.
    (0..3).for_each(|queue| guest.start(queue));
    guest.create(0).synchronize();
    crash(daemon);
    drop(guest);
    eventually(|| ended() == 3);
}

#[test]
fn programs_that_were_there_before_can_register_memory_that_is_plugged_in() {
    let server = LocalServer::start(Workers::Good);
    let daemon = serving_locally(&server);
    let mut guest = Guest::connect(&daemon);
    let mut channel = guest.create(0);
    let (at, size) = (1 << 32, 1 << 20);
    let low = [Extent { addr: 0x30_0000, len: 3000 }];
    let extents = [low[0], Extent { addr: at + 4096, len: 5000 }];
    let back = scattered(8000, 3);
    assert_eq!(guest.ask(register(100, &back), &back).0, Answer::Ok);
    for round in 0..4 {
        // Another one each time, where the one before was.
        let file = memfd(size);
        let memory = Memory { addr: at, size, file_offset: 0 };
        let plugged = Memories::map(vec![(memory, file.try_clone().unwrap())]).unwrap();
        guest.add_memory(at, size, &file);
        guest.settle();
        let bytes = pattern(8000, round.into());
        session::write(&guest.memories, &low, &bytes[..3000]);
        session::write(&plugged, &extents[1..], &bytes[3000..]);
        if round == 2 {
            crash(&daemon);
        }
        assert_eq!(guest.ask(register(round, &extents), &extents), (Answer::Ok, String::new()));
        channel.htod(7, region(round, 0, 8000));
        channel.dtoh(7, region(100, 0, 8000));
        channel.synchronize();
        assert!(session::read(&guest.memories, &back) == bytes, "round {round}");
        if round == 1 {
            crash(&daemon);
        }
        assert_eq!(guest.ask(unregister(round), &[]), (Answer::Ok, String::new()));
        guest.remove_memory(at, size);
        guest.settle();
    }
    // What is not plugged in any more cannot be registered.
    assert_eq!(guest.ask(register(9, &extents), &extents).0, Answer::Invalid);
    assert_eq!(guest.ask(register(9, &low), &low), (Answer::Ok, String::new()));
    assert_eq!(daemon.number("malformed_requests"), 1);
    assert!(server.trouble.lock().unwrap().is_empty(), "{:?}", server.trouble);
}

#[test]
fn requests_for_memory_are_carried_out_once_also_across_a_crash() {
    let server = LocalServer::start(Workers::Keeps);
    let daemon = serving_locally(&server);
    let mut guest = Guest::connect(&daemon);
    let mut channel = guest.create(0);
    let extents = scattered(50_000, 3);
    assert_eq!(guest.ask(register(1, &extents), &extents).0, Answer::Ok);
    let copy = |region_id: u32| MemcpyHtoD {
        stream: StreamId(0),
        dst: 1,
        src: HostIn::Range(region(region_id, 0, 50_000)),
    };
    channel.push(&copy(1), NO_SLOT);
    channel.synchronize();
    assert_eq!(server.keeps(), 1);
    // The worker uses the region, so the first request waits, and so does the second if it arrives later:
    // each has a thread of its own.
    let (slow, slow_at) = guest.send(&message(unregister(1), &[]));
    let (next, next_at) = guest.send(&message(register(2, &extents), &extents));
    let (quick, _) = guest.send(&message(plain(request::DESTROY_CHANNEL, 77), &[]));
    let mut answered = Vec::new();
    while !answered.contains(&quick) {
        answered.push(guest.wait_used(CONTROL_QUEUE).0);
    }
    crash(&daemon);
    // The session continues meanwhile.
    channel.synchronize();
    crash(&daemon);
    channel.synchronize();
    answered.extend(std::iter::from_fn(|| guest.used(CONTROL_QUEUE)).map(|(head, _)| head));
    assert!(!answered.contains(&slow), "the region is in use");
    server.let_go();
    while answered.len() < 3 {
        answered.push(guest.wait_used(CONTROL_QUEUE).0);
    }
    answered.sort_unstable();
    let mut expected = [slow, next, quick];
    expected.sort_unstable();
    assert_eq!(answered, expected);
    assert_eq!(guest.answer_at(slow_at), (Answer::Ok, String::new()));
    assert_eq!(guest.answer_at(next_at), (Answer::Ok, String::new()));
    assert_eq!(guest.used(CONTROL_QUEUE), None, "each request is answered once");
    channel.push(&copy(2), NO_SLOT);
    channel.synchronize();
    // A program that is killed while the worker uses its memory doesn't wait for it.
    let (waits, _) = guest.send(&message(unregister(2), &[]));
    crash(&daemon);
    let (destroy, _) = guest.send(&message(plain(request::DESTROY_CHANNEL, 0), &[]));
    eventually(|| server.ended.load(Ordering::SeqCst) == 1);
    server.let_go();
    let answered = [guest.wait_used(CONTROL_QUEUE).0, guest.wait_used(CONTROL_QUEUE).0];
    assert!(answered.contains(&waits) && answered.contains(&destroy), "{answered:?}");
}

#[test]
fn crashes_at_any_moment_change_nothing_for_a_local_session() {
    let server = LocalServer::start(Workers::Good);
    crashes_at_any_moment(&serving_locally(&server), 30_000);
    eventually(|| server.ended.load(Ordering::SeqCst) == 1);
    assert!(server.trouble.lock().unwrap().is_empty(), "{:?}", server.trouble);
}

#[test]
fn crashes_at_any_moment_change_nothing_for_a_session_over_tcp() {
    let server = TcpServer::start();
    crashes_at_any_moment(&serving_over_tcp(&server), 3_000_000);
    eventually(|| server.ended() == 1);
    // A process that is killed before it has reached the server resumes nothing.
    assert!(server.resumed() >= 1 && server.trouble().is_empty(), "{:?}", server.trouble());
}

/// Copies `len` bytes back and forth while device processes end.
fn crashes_at_any_moment(daemon: &Daemon, len: u64) {
    let mut guest = Guest::connect(daemon);
    let mut channel = guest.create(0);
    let mut registered = [false; 5];
    std::thread::scope(|scope| {
        // As many as the keeper considers accidental.
        let crashes = scope.spawn(|| {
            for round in 1..=6u64 {
                std::thread::sleep(std::time::Duration::from_micros(round * 7919 % 40_000));
                crash(daemon);
            }
        });
        for step in 0u64.. {
            // This step is the last one: whatever the crashes have come between, it needs the session.
            let over = crashes.is_finished() && step > 50;
            guest.reuse_buffers();
            let id = (step * step % 5) as u32;
            let (extents, bytes) = (scattered(len, u64::from(id) + 1), pattern(len as usize, step));
            if registered[id as usize] && step % 3 == 0 {
                assert_eq!(guest.ask(unregister(id), &[]), (Answer::Ok, String::new()), "step {step}");
                registered[id as usize] = false;
            }
            if !registered[id as usize] {
                assert_eq!(
                    guest.ask(register(id, &extents), &extents),
                    (Answer::Ok, String::new()),
                    "step {step}"
                );
                registered[id as usize] = true;
            }
            session::write(&guest.memories, &extents, &bytes);
            let range = region(id, 0, len);
            channel
                .push(&MemcpyHtoD { stream: StreamId(0), dst: step % 7, src: HostIn::Range(range) }, NO_SLOT);
            channel.synchronize();
            session::write(&guest.memories, &extents, &vec![0; len as usize]);
            channel.push(&MemcpyDtoH { stream: StreamId(0), src: step % 7, dst: HostOut(range) }, NO_SLOT);
            channel.synchronize();
            assert!(session::read(&guest.memories, &extents) == bytes, "step {step}");
            if over {
                break;
            }
        }
        crashes.join().unwrap();
    });
    assert_eq!((daemon.number("sessions_lost"), daemon.number("sessions_opened")), (0, 1));
    assert_eq!(guest.ask(plain(request::DESTROY_CHANNEL, 0), &[]), (Answer::Ok, String::new()));
}

#[test]
fn a_worker_that_ends_with_the_device_process_is_told() {
    let server = LocalServer::start(Workers::Dies);
    let daemon = serving_locally(&server);
    let mut guest = Guest::connect(&daemon);
    let mut channel = guest.create(0);
    let event = guest.post_event();
    // The worker dies of the first command, whoever rings for it.
    channel.push(&StreamMark { stream: StreamId(0) }, NO_SLOT);
    crash(&daemon);
    assert_eq!(guest.wait_used(EVENT_QUEUE).1, 8);
    assert_eq!(Event::read_from_bytes(&guest.read::<8>(event)).unwrap().channel, 0);
    eventually(|| channel.view().header().state() == State::Lost);
    assert_eq!(guest.ask(plain(request::DESTROY_CHANNEL, 0), &[]), (Answer::Ok, String::new()));
}

#[test]
fn a_channels_memory_is_the_guests_only_when_its_worker_has_let_go() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("server.sock");
    let (gone, close) = local_server(&path);
    let daemon = Daemon::start(&["--server", &format!("unix:{}", path.display()), "--transport", "local"]);
    let mut guest = Guest::connect(&daemon);
    let channel = guest.create(0);
    crash(&daemon);
    gone.recv_timeout(PATIENCE).unwrap();
    let (destroy, at) = guest.send(&message(plain(request::DESTROY_CHANNEL, 0), &[]));
    let (quick, _) = guest.send(&message(plain(request::DESTROY_CHANNEL, 77), &[]));
    assert_eq!(guest.wait_used(CONTROL_QUEUE).0, quick);
    // Another process in between changes nothing.
    crash(&daemon);
    let (quick, _) = guest.send(&message(plain(request::DESTROY_CHANNEL, 78), &[]));
    assert_eq!(guest.wait_used(CONTROL_QUEUE).0, quick);
    close.send(()).unwrap();
    assert_eq!(guest.wait_used(CONTROL_QUEUE).0, destroy);
    assert_eq!(guest.answer_at(at), (Answer::Ok, String::new()));
    assert_eq!(daemon.number("sessions_lost"), 0, "the program has ended its session");
    drop(channel);
}

#[test]
fn a_crash_affects_no_neighbor() {
    let daemon = Daemon::serving(&FakeServer::good());
    let mut guest = Guest::connect(&daemon);
    let (client, mut neighbor) = native(&daemon);
    let _channel = guest.create(0);
    let copies = |channel: &mut test_kit::channel::Channel, seed: u64| {
        let bytes = pattern(100_000, seed);
        channel.write_arena(0, &bytes);
        let src = HostIn::Range(arena(0, 100_000));
        channel.push(&MemcpyHtoD { stream: StreamId(0), dst: 1, src }, NO_SLOT);
        channel.push(
            &MemcpyDtoH { stream: StreamId(0), src: 1, dst: HostOut(arena(200_000, 100_000)) },
            NO_SLOT,
        );
        channel.synchronize();
        assert!(channel.read_arena(200_000, 100_000) == bytes);
    };
    copies(&mut neighbor, 1);
    crash(&daemon);
    copies(&mut neighbor, 2);
    assert_eq!(guest.ask(plain(request::DESTROY_CHANNEL, 0), &[]).0, Answer::Ok);
    let mut channel = guest.create(0);
    // The other way round: this server keeps no session, so a user's programs end with their device process,
    // and the next ones are served.
    kill(Pid::from_raw(device_process(&daemon, "user")), Signal::SIGKILL).unwrap();
    assert!(client.is_closed());
    copies(&mut channel, 3);
    let (_client, mut next) = native(&daemon);
    copies(&mut next, 4);
    until("the log says why", || daemon.log().contains("the session of a process before this one"));
}

#[test]
fn a_vmm_that_takes_memory_away_harms_only_its_own_guest() {
    let daemon = Daemon::serving(&FakeServer::good());
    let mut guest = Guest::connect(&daemon);
    let (_client, mut neighbor) = native(&daemon);
    neighbor.synchronize();
    let channel = guest.create(5);
    let file = guest.memories.files().next().unwrap().1.try_clone().unwrap();
    let process = device_process(&daemon, "vm");
    // The queues stay, but the channel's pages are gone: touching them gives SIGBUS.
    std::mem::forget(channel);
    nix::unistd::ftruncate(&file, 4 << 20).unwrap();
    guest.kick(DOORBELL_QUEUE);
    eventually(|| daemon.log().contains(&format!("its device process {process} was killed by SIGBUS")));
    // Its memory no longer matches what was negotiated, so the VMM is disconnected. Nobody else notices.
    eventually(|| daemon.log().contains("does not accept what was negotiated"));
    eventually(|| daemon.log().contains("the VMM's connection ended"));
    neighbor.synchronize();
    drop(guest);
    let mut next = Guest::connect(&daemon);
    next.create(0).synchronize();
    neighbor.synchronize();
}

#[test]
fn a_killed_keeper_leaves_no_process_behind() {
    let mut daemon = Daemon::serving(&FakeServer::good());
    let mut guest = Guest::connect(&daemon);
    guest.create(0).synchronize();
    let (_client, _channel) = native(&daemon);
    let processes = daemon.children();
    assert_eq!(processes.len(), 2);
    daemon.end(Signal::SIGKILL);
    for process in processes {
        let gone = || kill(Pid::from_raw(process), None).is_err() || is_zombie(process);
        until("the device process has ended", gone);
    }
}

fn is_zombie(process: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('Z'))
}

#[test]
fn a_crash_in_the_middle_of_the_negotiation_is_repaired() {
    let daemon = Daemon::serving(&FakeServer::good());
    let mut guest = Guest::connect(&daemon);
    for _ in 0..4 {
        // The messages have no replies, so the crash comes somewhere in between.
        guest.reset();
        (0..3).for_each(|index| guest.start(index));
        crash(&daemon);
        guest.create(0).synchronize();
    }
}

#[test]
fn a_memory_table_in_pieces_is_negotiated_again() {
    let daemon = Daemon::serving(&FakeServer::good());
    let mut guest = Guest::connect(&daemon);
    let added: Vec<OwnedFd> = (0..40).map(|_| memfd(4096)).collect();
    for (index, file) in added.iter().enumerate() {
        guest.add_memory(1 << 32 | (index as u64) << 12, 4096, file);
    }
    guest.remove_memory(1 << 32, 4096);
    // The messages before have no replies, but this one does.
    guest.frontend.get_features().unwrap();
    crash(&daemon);
    guest.create(0).synchronize();
    let there = [Extent { addr: 1 << 32 | 39 << 12, len: 4096 }];
    let removed = [Extent { addr: 1 << 32, len: 4096 }];
    let register =
        |extents: &[Extent], region| Request { kind: request::REGISTER_MEMORY, region, ..create(0, extents) };
    assert_eq!(guest.ask(register(&there, 1), &there), (Answer::Ok, String::new()));
    assert_eq!(guest.ask(register(&removed, 2), &removed).0, Answer::Invalid);
}

#[test]
fn a_guest_goes_on_when_memory_is_plugged_in_that_cannot_be_mapped() {
    let server = TcpServer::start();
    let daemon = serving_over_tcp(&server);
    let mut guest = Guest::connect(&daemon);
    let mut channel = guest.create(0);
    let device = std::fs::File::options().read(true).write(true).open("/dev/zero").unwrap();
    guest.add_memory(1 << 32, 4096, &device.into());
    guest.settle();
    let warns = |line: &str| line.contains("WARN") && line.contains("something that is no file");
    eventually(|| daemon.log().lines().any(warns));
    let there = [Extent { addr: 1 << 32, len: 4096 }];
    for region in [1, 2] {
        channel.synchronize();
        assert_eq!(guest.ask(register(region, &there), &there).0, Answer::Invalid);
        guest.create(region).synchronize();
        crash(&daemon);
    }
    guest.remove_memory(1 << 32, 4096);
    guest.settle();
    channel.synchronize();
    guest.create(3).synchronize();
    assert_eq!(daemon.number("sessions_lost"), 0);
}

#[test]
fn memory_that_was_unplugged_and_plugged_in_again_is_negotiated_again() {
    let daemon = Daemon::serving(&FakeServer::good());
    let mut guest = Guest::connect(&daemon);
    let at = |index: u64| 1 << 32 | index << 12;
    let added: Vec<OwnedFd> = (0..3).map(|_| memfd(4096)).collect();
    added.iter().zip(0..).for_each(|(file, index)| guest.add_memory(at(index), 4096, file));
    // The VMM tells of the lowest one last.
    guest.remove_memory(at(0), 4096);
    guest.add_memory(at(0), 4096, &added[0]);
    guest.settle();
    crash(&daemon);
    guest.create(0).synchronize();
    let there: Vec<Extent> = (0..3).map(|index| Extent { addr: at(index), len: 4096 }).collect();
    let register = Request { kind: request::REGISTER_MEMORY, region: 1, ..create(0, &there) };
    assert_eq!(guest.ask(register, &there), (Answer::Ok, String::new()));
}
