//! The device process of this host's programs ends: another one continues their sessions.

#![allow(clippy::unwrap_used, reason = "a test may fail where it stands")]

mod daemon;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use daemon::Daemon;
use host_bridge::memory::Memories;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use protocol::channel::{NO_SLOT, State};
use protocol::data::{HostIn, HostOut};
use protocol::device::{Answer, Extent, request};
use protocol::handle::StreamId;
use protocol::link::{Memory, wish};
use protocol::native::Request;
use protocol::ops::copy::{MemcpyDtoH, MemcpyHtoD};
use test_kit::channel::{Channel, in_a_file};
use test_kit::local_server::{Behavior as Workers, LocalServer};
use test_kit::manager::Manager;
use test_kit::native_client::{NativeClient, create_channel};
use test_kit::server::{Behavior, FakeServer, mute_server};
use test_kit::tcp_server::TcpServer;
use test_kit::turns::Turns;
use test_kit::*;
use zerocopy::IntoBytes;

/// Bytes of each region.
const LEN: u64 = 100_000;

/// A program with a channel.
struct Program {
    native: NativeClient,
    channel: Channel,
}

impl Program {
    fn start(daemon: &Daemon) -> Program {
        let (native, channel) = NativeClient::with_channel(&daemon.native(), "program");
        Program { native, channel }
    }

    fn ask(&self, request: Request, fds: &[&OwnedFd]) -> (Answer, String) {
        self.native.ask(request, fds).unwrap()
    }
}

/// A program's own memory for a region.
fn own() -> (OwnedFd, Memories) {
    let file = memfd_create(c"own", MFdFlags::MFD_ALLOW_SEALING).unwrap();
    nix::unistd::ftruncate(&file, 1 << 20).unwrap();
    fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK)).unwrap();
    let memory = Memory { addr: 0, size: 1 << 20, file_offset: 0 };
    let memories = Memories::map(vec![(memory, file.try_clone().unwrap())]).unwrap();
    (file, memories)
}

const AT: [Extent; 1] = [Extent { addr: 4096, len: LEN }];

fn register(region: u32) -> Request {
    Request { kind: request::REGISTER_MEMORY, region, offset: 4096, size: LEN, ..create_channel(0) }
}

fn plain(kind: u32) -> Request {
    Request { kind, ..create_channel(0) }
}

fn process(daemon: &Daemon) -> i32 {
    let status = daemon.status();
    let rows = status["device_processes"].as_array().unwrap();
    let row = rows.iter().find(|row| row["serves"].as_str().unwrap().starts_with("user")).unwrap();
    row["process"].as_i64().unwrap() as i32
}

/// Kills the user's device process and waits until another one serves its programs.
fn crash(daemon: Daemon) -> Daemon {
    let before = daemon.number("device_processes_restarted");
    kill(Pid::from_raw(process(&daemon)), Signal::SIGKILL).unwrap();
    eventually(|| daemon.number("device_processes_restarted") == before + 1);
    daemon
}

/// Repeatedly replaces the process of some programs.
fn programs_do_not_notice(mut daemon: Daemon, replace: impl Fn(Daemon) -> Daemon, ended: impl Fn() -> usize) {
    let (mut program, mut neighbor) = (Program::start(&daemon), Program::start(&daemon));
    // A part of it compresses.
    let mut bytes = pattern(LEN as usize, 7);
    bytes[..LEN as usize / 2].fill(7);
    let mut regions = Vec::new();
    for round in 0..3u32 {
        let (file, memories) = own();
        session::write(&memories, &AT, &bytes);
        assert_eq!(program.ask(register(round), &[&file]), (Answer::Ok, String::new()));
        regions.push(memories);
        let src = HostIn::Range(region(round, 0, LEN));
        program.channel.push(&MemcpyHtoD { stream: StreamId(0), dst: round.into(), src }, NO_SLOT);
        daemon = replace(daemon);
        program.channel.synchronize();
        neighbor.channel.synchronize();
        assert_eq!(program.channel.view().header().state(), State::Ready);
        for (memories, round) in regions.iter().zip(0..) {
            session::write(memories, &AT, &vec![0; LEN as usize]);
            let dst = HostOut(region(round, 0, LEN));
            program.channel.push(&MemcpyDtoH { stream: StreamId(0), src: round.into(), dst }, NO_SLOT);
            program.channel.synchronize();
            assert!(session::read(memories, &AT) == bytes, "region {round}");
        }
        // Data that comes while the process is replaced.
        for (memories, round) in regions.iter().zip(0..) {
            session::write(memories, &AT, &vec![0; LEN as usize]);
            let dst = HostOut(region(round, 0, LEN));
            program.channel.push(&MemcpyDtoH { stream: StreamId(0), src: round.into(), dst }, NO_SLOT);
        }
        // What one process has registered can be unregistered with the next.
        let (file, _) = own();
        daemon = replace(daemon);
        program.channel.synchronize();
        for (memories, round) in regions.iter().zip(0..) {
            assert!(session::read(memories, &AT) == bytes, "region {round}, to both processes");
        }
        assert_eq!(program.ask(register(77), &[&file]).0, Answer::Ok);
        let unregister = Request { region: 77, ..plain(request::UNREGISTER_MEMORY) };
        assert_eq!(program.ask(unregister, &[]).0, Answer::Ok);
        assert_eq!(program.ask(unregister, &[]).0, Answer::Invalid);
        assert_eq!(program.ask(register(round), &[&file]).0, Answer::Invalid, "it is in use");
    }
    assert_eq!((daemon.number("sessions_lost"), daemon.sessions()), (0, 2));
    assert_eq!(program.ask(plain(request::DESTROY_CHANNEL), &[]), (Answer::Ok, String::new()));
    assert!(program.native.is_closed());
    eventually(|| ended() == 1);
    // A program that leaves under another process than it connected to.
    daemon = replace(daemon);
    drop(neighbor);
    eventually(|| ended() == 2 && daemon.sessions() == 0);
    Program::start(&daemon).channel.synchronize();
}

fn locally(server: &LocalServer) -> [String; 4] {
    ["--server", &server.config.server.to_string(), "--transport", "local"].map(str::to_owned)
}

#[test]
fn programs_with_local_sessions_do_not_notice_that_their_process_was_killed() {
    let server = LocalServer::start(Workers::Good);
    let daemon = Daemon::start(&locally(&server).each_ref().map(String::as_str));
    programs_do_not_notice(daemon, crash, || server.ended.load(Ordering::SeqCst));
    assert!(server.trouble.lock().unwrap().is_empty(), "{:?}", server.trouble);
}

#[test]
fn programs_with_sessions_over_tcp_do_not_notice_that_their_process_was_killed() {
    let server = TcpServer::start();
    let daemon = Daemon::start(&["--server", &server.config.server.to_string()]);
    programs_do_not_notice(daemon, crash, || server.ended());
    assert!(server.trouble().is_empty(), "{:?}", server.trouble());
}

#[test]
fn programs_whose_data_is_compressed_do_not_notice_that_their_process_was_killed() {
    let server = TcpServer::start();
    let address = server.config.server.to_string();
    let daemon = Daemon::start(&["--server", &address, "--compress", "always"]);
    // It is: what a killed process had counted is gone, so a program says so whose process lives on.
    let mut program = Program::start(&daemon);
    let (file, memories) = own();
    session::write(&memories, &AT, &vec![1; LEN as usize]);
    assert_eq!(program.ask(register(1), &[&file]), (Answer::Ok, String::new()));
    let src = HostIn::Range(region(1, 0, LEN));
    program.channel.push(&MemcpyHtoD { stream: StreamId(0), dst: 1, src }, NO_SLOT);
    program.channel.synchronize();
    let status = daemon.status();
    assert_eq!(status["totals"]["data_bytes_compressed"].as_u64(), Some(LEN), "{status}");
    program
        .channel
        .push(&MemcpyDtoH { stream: StreamId(0), src: 1, dst: HostOut(region(1, 0, LEN)) }, NO_SLOT);
    program.channel.synchronize();
    let status = daemon.status();
    assert_eq!(status["totals"]["data_bytes_decompressed"].as_u64(), Some(LEN), "{status}");
    drop(program);
    eventually(|| server.ended() == 1 && daemon.sessions() == 0);
    programs_do_not_notice(daemon, crash, || server.ended() - 1);
    assert!(server.trouble().is_empty(), "{:?}", server.trouble());
}

/// More than fits into a device process's socket before the process reads.
const MANY: u32 = 400;

#[test]
fn a_device_process_is_replaced_however_many_regions_and_programs_it_has() {
    let server = TcpServer::start();
    let limits = ["--max-channels", "1000", "--max-channels-per-user", "1000"];
    let daemon = Daemon::start(&[&["--server", &server.config.server.to_string()], &limits[..]].concat());
    let mut program = Program::start(&daemon);
    let (file, _) = own();
    for region in 0..MANY {
        assert_eq!(program.ask(register(region), &[&file]), (Answer::Ok, String::new()));
    }
    let others: Vec<_> = (0..MANY).map(|_| NativeClient::connect(&daemon.native()).unwrap()).collect();
    let answered = || {
        for other in &others {
            assert_eq!(other.ask(register(0), &[&file]).unwrap().0, Answer::Invalid, "it has no channel");
        }
    };
    answered();
    let mut daemon = daemon;
    for replace in [crash, upgrade] {
        daemon = replace(daemon);
        program.channel.synchronize();
        assert_eq!(program.ask(register(MANY - 1), &[&file]).0, Answer::Invalid, "it is in use");
        answered();
    }
    assert_eq!(daemon.number("sessions_lost"), 0);
}

#[test]
fn programs_that_come_faster_than_their_device_process_reads_are_all_served() {
    let server = TcpServer::start();
    let limits = ["--max-channels", "1000", "--max-channels-per-user", "1000"];
    let daemon = Daemon::start(&[&["--server", &server.config.server.to_string()], &limits[..]].concat());
    let first = Program::start(&daemon);
    let stopped = Pid::from_raw(process(&daemon));
    kill(stopped, Signal::SIGSTOP).unwrap();
    let others: Vec<_> = (0..MANY).map(|_| NativeClient::connect(&daemon.native()).unwrap()).collect();
    kill(stopped, Signal::SIGCONT).unwrap();
    let (file, _) = own();
    for other in &others {
        assert_eq!(other.ask(register(0), &[&file]).unwrap().0, Answer::Invalid, "it has no channel");
    }
    assert_eq!(first.ask(register(0), &[&file]), (Answer::Ok, String::new()));
    assert_eq!(daemon.number("device_processes_restarted"), 0);
}

fn upgrade(daemon: Daemon) -> Daemon {
    daemon.upgrade();
    daemon
}

#[test]
fn programs_do_not_notice_upgrades_of_the_keeper() {
    let server = LocalServer::start(Workers::Good);
    let daemon = Daemon::start(&locally(&server).each_ref().map(String::as_str));
    programs_do_not_notice(daemon, upgrade, || server.ended.load(Ordering::SeqCst));
    assert!(server.trouble.lock().unwrap().is_empty(), "{:?}", server.trouble);
    let server = TcpServer::start();
    let daemon = Daemon::start(&["--server", &server.config.server.to_string()]);
    programs_do_not_notice(daemon, upgrade, || server.ended());
    assert!(server.trouble().is_empty(), "{:?}", server.trouble());
}

#[test]
fn programs_do_not_notice_crashes_of_the_keeper_under_a_service_manager() {
    let (manager, folder) = (Manager::new(), Arc::new(tempfile::tempdir().unwrap()));
    let server = TcpServer::start();
    let address = server.config.server.to_string();
    let start = || Daemon::kept(&manager, &folder, &["--server", &address]);
    let crash = |mut daemon: Daemon| {
        // Answers pass through one thread of the keeper. So when this one has arrived, the keeper is not
        // killed in the middle of an earlier one, which would cost that session.
        let witness = NativeClient::connect(&daemon.native()).unwrap();
        assert_eq!(witness.ask(register(0), &[&own().0]).unwrap().0, Answer::Invalid, "it has no channel");
        daemon.end(Signal::SIGKILL);
        start()
    };
    programs_do_not_notice(start(), crash, || server.ended());
    assert!(server.trouble().is_empty(), "{:?}", server.trouble());
}

#[test]
fn a_program_that_is_just_starting_is_started_by_the_next_process() {
    let (address, greetings) = mute_server();
    let daemon = Daemon::start(&["--server", &address]);
    let native = NativeClient::connect(&daemon.native()).unwrap();
    let (file, view) = in_a_file(1 << 20, "program");
    native.send(create_channel(view.geometry().size as u64).as_bytes(), &[&file]).unwrap();
    eventually(|| greetings.load(Ordering::SeqCst) == 1);
    let daemon = crash(daemon);
    eventually(|| greetings.load(Ordering::SeqCst) == 2);
    assert_ne!(view.header().state(), State::Lost);
    // The server stays silent, and the program is told so once; it can try again.
    assert_eq!(native.response().unwrap().unwrap().0, Answer::NoServer);
    let _daemon = crash(daemon);
    assert_eq!(native.ask(register(1), &[&own().0]).unwrap().0, Answer::Invalid, "it has no channel");
}

#[test]
fn a_program_that_waits_in_a_servers_queue_waits_on_in_the_next_process() {
    let server = FakeServer::start(Behavior { queue: &[7], never_serves: true, ..Behavior::default() });
    let daemon = Daemon::serving(&server);
    let [(_native, view, doorbell), (leaves, ..)] = [(); 2].map(|()| {
        let native = NativeClient::connect(&daemon.native()).unwrap();
        let (file, view) = in_a_file(1 << 20, "program");
        view.header().set_wishes(wish::MAY_WAIT);
        native.send(create_channel(view.geometry().size as u64).as_bytes(), &[&file]).unwrap();
        let (answer, reason, mut fds) = native.response().unwrap().unwrap();
        assert_eq!((answer, reason.as_str()), (Answer::Ok, ""));
        (native, view, fds.pop().unwrap())
    });
    let daemon = crash(daemon);
    eventually(|| server.left() == 2 && server.programs().len() == 4);
    assert_eq!(view.header().state(), State::Waiting);
    // One of them has enough of it.
    drop(leaves);
    eventually(|| server.left() == 3);
    server.serve();
    let daemon = crash(daemon);
    eventually(|| view.header().state() == State::Ready);
    let mut channel = Channel::new(view, move || {
        nix::unistd::write(&doorbell, &1u64.to_ne_bytes()).unwrap();
    });
    channel.synchronize();
    // A session is ready a moment before it is listed.
    eventually(|| daemon.sessions() == 1);
    assert_eq!(daemon.number("sessions_lost"), 0);
    let _daemon = crash(daemon);
    // It has a session like any other now, which this server cannot continue.
    eventually(|| channel.view().header().state() == State::Lost);
}

#[test]
fn a_program_that_waited_and_is_refused_in_the_next_process_learns_why() {
    let refusal = Some((Answer::NoResources, "nobody is served here"));
    let behavior = Behavior { queue: &[1], never_serves: true, answer: refusal, ..Behavior::default() };
    let server = FakeServer::start(behavior);
    let daemon = Daemon::serving(&server);
    let native = NativeClient::connect(&daemon.native()).unwrap();
    let (file, view) = in_a_file(1 << 20, "program");
    view.header().set_wishes(wish::MAY_WAIT);
    native.send(create_channel(view.geometry().size as u64).as_bytes(), &[&file]).unwrap();
    assert_eq!(native.response().unwrap().unwrap().0, Answer::Ok);
    server.serve();
    let _daemon = crash(daemon);
    eventually(|| view.header().state() == State::Lost);
    assert!(view.header().reason().contains("nobody is served here"), "{}", view.header().reason());
    assert!(native.is_closed());
}

#[test]
fn what_is_kept_of_a_user_does_not_go_with_the_process_that_was_idle() {
    let (manager, folder) = (Manager::new(), Arc::new(tempfile::tempdir().unwrap()));
    let server = TcpServer::start();
    let daemon = Daemon::kept(&manager, &folder, &["--server", &server.config.server.to_string()]);
    drop(Program::start(&daemon));
    // Only the record, the process, and the socket to it are kept: nothing of the program.
    let user = format!("user-{}-", nix::unistd::getuid());
    eventually(|| manager.names().iter().filter(|name| name.starts_with(&user)).count() == 3);
    // The process takes its time to end.
    let idle = process(&daemon);
    kill(Pid::from_raw(idle), Signal::SIGSTOP).unwrap();
    eventually(|| daemon.log().contains("its device process is not needed any more"));
    let mut program = Program::start(&daemon);
    program.channel.synchronize();
    kill(Pid::from_raw(idle), Signal::SIGCONT).unwrap();
    eventually(|| {
        daemon.status()["device_processes"].as_array().unwrap().iter().all(|row| row["process"] != idle)
    });
    // It waits until the keeper has done everything about that process.
    daemon.upgrade();
    program.channel.synchronize();
    assert_eq!(daemon.number("sessions_lost"), 0);
}

#[test]
fn a_server_that_is_not_reached_for_long_is_told_by_any_later_process_that_a_program_has_ended() {
    let server = TcpServer::start();
    let turns = Turns::before(&server.config);
    let daemon = Daemon::start(&["--server", &turns.config.server.to_string()]);
    let mut program = Program::start(&daemon);
    assert_eq!(program.ask(register(1), &[&own().0]), (Answer::Ok, String::new()));
    program.channel.synchronize();
    server.refuse_farewells(usize::MAX);
    turns.lose();
    drop(program);
    // For longer than a process without programs waits for another one.
    eventually(|| server.farewells() >= 11);
    let daemon = upgrade(crash(daemon));
    let before = server.farewells();
    eventually(|| server.farewells() > before);
    server.refuse_farewells(0);
    eventually(|| server.ended() == 1);
    assert_eq!(daemon.number("sessions_lost"), 0);
    // Nobody needs the process any more.
    eventually(|| daemon.log().contains("its device process is not needed any more"));
}

/// Commands go to the server before the session's data connections stand.
#[test]
fn a_session_that_has_just_begun_goes_on_in_the_next_process() {
    let server = TcpServer::start();
    server.hold_data();
    let daemon = Daemon::start(&["--server", &server.config.server.to_string()]);
    let mut program = Program::start(&daemon);
    program.channel.synchronize();
    let (file, memories) = own();
    let bytes = pattern(LEN as usize, 7);
    session::write(&memories, &AT, &bytes);
    assert_eq!(program.ask(register(1), &[&file]), (Answer::Ok, String::new()));
    let src = HostIn::Range(region(1, 0, LEN));
    program.channel.push(&MemcpyHtoD { stream: StreamId(0), dst: 1, src }, NO_SLOT);
    eventually(|| server.held() > 0);
    server.drop_data();
    let daemon = crash(daemon);
    program.channel.synchronize();
    session::write(&memories, &AT, &vec![0; LEN as usize]);
    let dst = HostOut(region(1, 0, LEN));
    program.channel.push(&MemcpyDtoH { stream: StreamId(0), src: 1, dst }, NO_SLOT);
    program.channel.synchronize();
    assert!(session::read(&memories, &AT) == bytes);
    assert_eq!((daemon.number("sessions_lost"), server.farewells(), server.ended()), (0, 0, 0));
    assert!(server.trouble().is_empty(), "{:?}", server.trouble());
}
