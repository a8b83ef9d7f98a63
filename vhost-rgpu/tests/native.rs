//! The daemon from outside: native clients, status, signals, configuration.

#![allow(clippy::unwrap_used, reason = "a test may fail where it stands")]

extern crate host_bridge as rgpu_host_bridge;

#[path = "../../host-bridge/tests/support/mod.rs"]
mod support;

mod daemon;

use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;

use daemon::Daemon;
use nix::fcntl::{FcntlArg, OFlag, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::Signal;
use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, connect, sendmsg, setsockopt,
    socket, sockopt,
};
use protocol::channel::{Geometry, Header, NO_SLOT, Producer, RingMemory, SlotState, State};
use protocol::data::{HostIn, HostOut};
use protocol::device::{Answer, Extent, Response, request};
use protocol::handle::StreamId;
use protocol::link::{Ack, Hello, Memory, Welcome, frame, wish};
use protocol::native::{MAGIC, Request};
use protocol::ops::copy::{MemcpyDtoH, MemcpyHtoD};
use protocol::ops::stream::StreamSynchronize;
use protocol::ops::{Op, encode};
use protocol::version::Version;
use rgpu_host_bridge::framing::{recv_frame, recv_some, recv_struct, send_frame, send_message};
use rgpu_host_bridge::memory::{ChannelView, Memories};
use support::{FakeServer, Manners, PATIENCE, arena, eventually, pattern, region};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// A memfd, sealed as the protocol asks.
fn sealed(size: u64) -> OwnedFd {
    let fd = memfd_create(c"client", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
    nix::unistd::ftruncate(&fd, size as i64).unwrap();
    fcntl(&fd, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK)).unwrap();
    fd
}

/// A native client's connection.
struct Native(OwnedFd);

const GOOD: Request = Request {
    magic: MAGIC,
    version: protocol::VERSION,
    kind: request::CREATE_CHANNEL,
    region: 0,
    flags: 0,
    offset: 0,
    size: 0,
};
const DESTROY: Request = Request { kind: request::DESTROY_CHANNEL, ..GOOD };

impl Native {
    fn connect(path: &Path) -> Native {
        let fd = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
        connect(fd.as_raw_fd(), &UnixAddr::new(path).unwrap()).unwrap();
        setsockopt(&fd, sockopt::ReceiveTimeout, &nix::sys::time::TimeVal::new(PATIENCE.as_secs() as i64, 0))
            .unwrap();
        Native(fd)
    }

    fn send(&self, packet: &[u8], fds: &[&OwnedFd]) {
        let raw: Vec<_> = fds.iter().map(|fd| fd.as_raw_fd()).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        let control = if raw.is_empty() { &[][..] } else { &rights };
        sendmsg::<()>(self.0.as_raw_fd(), &[IoSlice::new(packet)], control, MsgFlags::MSG_NOSIGNAL, None)
            .unwrap();
    }

    fn response(&self) -> (Answer, String, Vec<OwnedFd>) {
        let (mut packet, mut fds) = ([0; size_of::<Response>()], Vec::new());
        assert_eq!(recv_some(self.0.as_fd(), &mut packet, &mut fds).unwrap(), packet.len());
        let response = Response::read_from_bytes(&packet).unwrap();
        (Answer::from_number(response.status), response.reason(), fds)
    }

    fn ask(&self, request: Request, fds: &[&OwnedFd]) -> (Answer, String) {
        self.send(request.as_bytes(), fds);
        let (answer, reason, _) = self.response();
        (answer, reason)
    }

    /// Whether the daemon has closed the connection.
    fn closed(&self) -> bool {
        matches!(recv_some(self.0.as_fd(), &mut [0; 8], &mut Vec::new()), Ok(0))
    }
}

/// A client with a channel.
struct Channel {
    native: Native,
    doorbell: OwnedFd,
    view: ChannelView,
    geometry: Geometry,
}

/// A client that can be told to wait, and has asked for a channel; its answer has come.
fn ask_patiently(path: &Path) -> (Native, ChannelView) {
    let native = Native::connect(path);
    let (file, view, geometry) = channel_file(1 << 20);
    view.header().set_wishes(wish::MAY_WAIT);
    native.send(Request { size: geometry.size as u64, ..GOOD }.as_bytes(), &[&file]);
    let (answer, reason, fds) = native.response();
    assert_eq!((answer, reason.as_str(), fds.len()), (Answer::Ok, "", 1));
    (native, view)
}

fn channel_file(arena: usize) -> (OwnedFd, ChannelView, Geometry) {
    let geometry = Geometry::with_arena(arena);
    let size = geometry.size as u64;
    let file = sealed(size);
    let memories =
        Memories::map(vec![(Memory { addr: 0, size, file_offset: 0 }, file.try_clone().unwrap())]).unwrap();
    let header = memories.resolve(&[Extent { addr: 0, len: 4096 }], 4096).unwrap().all()[0].at;
    // SAFETY: the channel's first page, mapped by this test; the header is all atomics.
    unsafe { header.cast::<Header>().as_ref() }.write_fields(&geometry.fields(7, "native-test"));
    let view = memories.view(&[Extent { addr: 0, len: size }], size).unwrap();
    (file, view, geometry)
}

impl Channel {
    fn open(path: &Path) -> Channel {
        let native = Native::connect(path);
        let (file, view, geometry) = channel_file(3 << 20);
        native.send(Request { size: geometry.size as u64, ..GOOD }.as_bytes(), &[&file]);
        let (answer, reason, mut fds) = native.response();
        assert_eq!((answer, reason.as_str()), (Answer::Ok, ""));
        let doorbell = fds.pop().unwrap();
        assert!(fds.is_empty());
        assert_eq!(view.header().state(), State::Ready);
        Channel { native, doorbell, view, geometry }
    }

    fn producer(&self) -> Producer<'_> {
        // SAFETY: the ring's part of this test's channel.
        let words = unsafe {
            std::slice::from_raw_parts(
                self.view.base().add(self.geometry.ring_offset).cast().as_ptr(),
                self.geometry.ring_size / 8,
            )
        };
        Producer::new(self.view.header(), RingMemory::new(words))
    }

    fn push<'a, T: Op<'a>>(&self, producer: &mut Producer<'_>, op: &T, slot: u16) {
        let mut body = Vec::new();
        encode(op, &mut body);
        if slot != NO_SLOT {
            self.view.slot(slot).unwrap().prepare();
        }
        producer.push(T::INFO.opcode, slot, &body).unwrap();
        if self.view.header().host_sleep.take() {
            nix::unistd::write(&self.doorbell, &1u64.to_ne_bytes()).unwrap();
        }
    }

    /// Sleeps for the answer as the library does: by futex on the slot's word.
    fn answer(&self, slot: u16) -> protocol::Status {
        let place = self.view.slot(slot).unwrap();
        let mut payload = Vec::new();
        loop {
            if let Some(completion) = place.poll(&mut payload) {
                return completion.status;
            }
            if place.announce_sleep() {
                let timeout = libc::timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
                let sleeping = SlotState::Sleeping as u32;
                // SAFETY: the slot's first word is its state; the channel is mapped.
                let woken = unsafe {
                    let word = self.view.base().add(self.geometry.slot_offset(slot.into()));
                    libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, sleeping, &timeout)
                };
                assert!(woken == 0 || nix::Error::last() != nix::Error::ETIMEDOUT, "nobody woke the client");
            }
        }
    }

    fn synchronize(&self, producer: &mut Producer<'_>) -> protocol::Status {
        self.push(producer, &StreamSynchronize { stream: StreamId(0) }, 0);
        self.answer(0)
    }
}

fn serving(server: &FakeServer) -> Daemon {
    Daemon::start(&["--server", &server.address.to_string()])
}

fn sessions(daemon: &Daemon) -> usize {
    daemon.status()["sessions"].as_array().unwrap().len()
}

#[test]
fn a_program_sends_commands_and_data_and_sleeps_for_answers() {
    let server = FakeServer::good();
    let daemon = serving(&server);
    let channel = Channel::open(&daemon.native());
    let mut producer = channel.producer();
    // A region in a file of its own.
    let file = sealed(3 << 20);
    let memory = Memory { addr: 0, size: 3 << 20, file_offset: 0 };
    let own = Memories::map(vec![(memory, file.try_clone().unwrap())]).unwrap();
    let bytes = pattern(1_000_003, 1);
    let at = own.resolve(&[Extent { addr: 4096, len: 1_000_003 }], 1_000_003).unwrap().all()[0].at;
    // SAFETY: this test's own memory, as long as `bytes`.
    unsafe { at.copy_from(NonNull::from(&bytes[..]).cast(), bytes.len()) };
    let register =
        Request { kind: request::REGISTER_MEMORY, region: 5, offset: 4096, size: 1_000_003, ..GOOD };
    assert_eq!(channel.native.ask(register, &[&file]), (Answer::Ok, String::new()));

    let src = HostIn::Range(region(5, 0, 1_000_003));
    channel.push(&mut producer, &MemcpyHtoD { stream: StreamId(0), dst: 1, src }, NO_SLOT);
    let dst = HostOut(arena(3, 1_000_003));
    channel.push(&mut producer, &MemcpyDtoH { stream: StreamId(0), src: 1, dst }, NO_SLOT);
    assert!(channel.synchronize(&mut producer).is_success());
    let (back, len) = channel.view.arena(3, 1_000_003).unwrap();
    let mut got = vec![0u8; len];
    // SAFETY: the arena of this test's channel.
    unsafe { back.copy_to(NonNull::from(&mut got[..]).cast(), len) };
    assert!(got == bytes);

    let unregister = Request { kind: request::UNREGISTER_MEMORY, region: 5, ..GOOD };
    assert_eq!(channel.native.ask(unregister, &[]).0, Answer::Ok);
    assert_eq!(channel.native.ask(unregister, &[]).0, Answer::Invalid);
    assert_eq!(channel.native.ask(DESTROY, &[]).0, Answer::Ok);
    assert!(channel.native.closed());
    assert_eq!(server.programs(), ["native-test"]);
}

#[test]
fn status_tells_of_sessions_and_counters() {
    let server = FakeServer::good();
    let daemon = serving(&server);
    let channel = Channel::open(&daemon.native());
    let mut producer = channel.producer();
    for _ in 0..3 {
        channel.synchronize(&mut producer);
    }
    let status = daemon.status();
    let session = &status["sessions"][0];
    assert_eq!(session["program"], "native-test");
    assert_eq!(
        (session["pid"].as_u64(), session["commands"].as_u64(), session["replies"].as_u64()),
        (Some(7), Some(3), Some(3))
    );
    assert!(session["owner"].as_str().unwrap().contains(&format!("pid {}", std::process::id())), "{session}");
    drop(channel);
    eventually(|| sessions(&daemon) == 0);
    let status = daemon.status();
    assert_eq!(
        (status["sessions_closed"].as_u64(), status["totals"]["commands"].as_u64()),
        (Some(1), Some(3))
    );
}

#[test]
fn what_makes_no_sense_is_answered_and_nothing_else_happens() {
    let server = FakeServer::good();
    let daemon = serving(&server);
    let bystander = Channel::open(&daemon.native());
    let (file, _view, geometry) = channel_file(0);
    let size = geometry.size as u64;
    let unsealed = support::memfd(size);
    let good = Request { size, ..GOOD };
    let native = Native::connect(&daemon.native());
    let cases: [(Request, &[&OwnedFd], Answer, &str); 13] = [
        (Request { magic: 1, ..good }, &[&file], Answer::Invalid, "rGPUnatv"),
        (
            Request { version: Version { major: 9, minor: 1 }, ..good },
            &[&file],
            Answer::Version,
            "version 9.1",
        ),
        (Request { kind: 77, ..good }, &[&file], Answer::Unsupported, "77"),
        (good, &[], Answer::Invalid, "one file descriptor"),
        (good, &[&file, &file], Answer::Invalid, "one file descriptor"),
        (good, &[&unsealed], Answer::Invalid, "sealed"),
        (good, &[&native.0], Answer::Invalid, "memfd"),
        (Request { size: size + 4096, ..good }, &[&file], Answer::Invalid, "file of"),
        (Request { size: 1 << 40, ..good }, &[&file], Answer::NoResources, "limit"),
        (Request { offset: 7, ..good }, &[&file], Answer::Invalid, "begins at a page"),
        (Request { size: 0, ..good }, &[&file], Answer::Invalid, "0 bytes"),
        (Request { size: size - 4096, ..good }, &[&file], Answer::Invalid, "channel header"),
        (DESTROY, &[], Answer::Invalid, "no channel"),
    ];
    for (request, fds, answer, word) in cases {
        let (got, reason) = native.ask(request, fds);
        assert_eq!(got, answer, "{request:?}: {reason}");
        assert!(reason.contains(word), "{request:?}: {reason}");
    }
    for len in [1, size_of::<Request>() - 1, size_of::<Request>() + 1, 5000] {
        native.send(&vec![0xee; len], &[&file]);
        assert_eq!(native.response().0, Answer::Invalid);
    }
    // After all that a good request still works, and a second one on the same connection does not.
    native.send(good.as_bytes(), &[&file]);
    assert_eq!(native.response().0, Answer::Ok);
    assert_eq!(native.ask(good, &[&file]).0, Answer::Invalid);
    let mut producer = bystander.producer();
    assert!(bystander.synchronize(&mut producer).is_success());
}

#[test]
fn a_lost_session_closes_its_clients_connection_and_wakes_its_sleepers() {
    let server = FakeServer::start(Manners { drop_at: Some(1), ..Manners::default() });
    let daemon = serving(&server);
    let channel = Channel::open(&daemon.native());
    let mut producer = channel.producer();
    assert_eq!(channel.synchronize(&mut producer), protocol::Status::DEVICE_UNAVAILABLE);
    assert!(channel.native.closed());
    assert!(channel.view.header().reason().contains("127.0.0.1"), "{}", channel.view.header().reason());
    eventually(|| daemon.status()["sessions_lost"].as_u64() == Some(1));
}

#[test]
fn a_client_that_spoils_its_doorbell_spoils_only_its_own() {
    let server = FakeServer::good();
    let daemon = serving(&server);
    let channel = Channel::open(&daemon.native());
    // The descriptor's flags and counter are shared with the daemon.
    fcntl(&channel.doorbell, FcntlArg::F_SETFL(OFlag::empty())).unwrap();
    for _ in 0..3 {
        nix::unistd::write(&channel.doorbell, &1u64.to_ne_bytes()).unwrap();
        nix::unistd::read(&channel.doorbell, &mut [0; 8]).unwrap();
    }
    nix::unistd::write(&channel.doorbell, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    let bystander = Channel::open(&daemon.native());
    let mut producer = bystander.producer();
    assert!(bystander.synchronize(&mut producer).is_success());
    // And the daemon can still end that session.
    assert_eq!(channel.native.ask(DESTROY, &[]).0, Answer::Ok);
}

#[test]
fn a_client_in_a_servers_queue_finds_its_place_in_its_channel_and_then_its_session() {
    let server = FakeServer::start(Manners { queue: &[5, 4], ..Manners::default() });
    let daemon = serving(&server);
    let (_native, view) = ask_patiently(&daemon.native());
    eventually(|| view.header().state() == State::Ready);
    // The last place that was told of, and by whom.
    assert_eq!((view.header().ahead(), view.header().reason().as_str()), (4, "fake"));
    eventually(|| sessions(&daemon) == 1);
}

#[test]
fn a_client_that_waits_in_vain_is_told_why_and_one_that_leaves_is_taken_out_of_the_queue() {
    let refusal = Some((Answer::NoResources, "nobody is served here"));
    let server = FakeServer::start(Manners { queue: &[1], answer: refusal, ..Manners::default() });
    // A refusal that follows at once: the answer may be the queue's or the refusal's, and the channel says the rest.
    let daemon = serving(&server);
    let native = Native::connect(&daemon.native());
    let (file, view, geometry) = channel_file(1 << 20);
    view.header().set_wishes(wish::MAY_WAIT);
    native.send(Request { size: geometry.size as u64, ..GOOD }.as_bytes(), &[&file]);
    assert_eq!(native.response().0, Answer::Ok);
    eventually(|| view.header().state() == State::Lost);
    assert!(view.header().reason().contains("nobody is served here"), "{}", view.header().reason());
    assert!(native.closed());

    let server = FakeServer::start(Manners { queue: &[7], queue_stands: true, ..Manners::default() });
    let daemon = serving(&server);
    let (native, view) = ask_patiently(&daemon.native());
    assert_eq!((view.header().state(), view.header().ahead()), (State::Waiting, 7));
    drop(native);
    eventually(|| server.left() == 1);
    assert_eq!(sessions(&daemon), 0);
}

#[test]
fn without_a_server_the_client_is_told_which_one_is_missing() {
    let daemon = Daemon::start(&["--server", "tcp:127.0.0.1:1"]);
    let native = Native::connect(&daemon.native());
    let (file, _view, geometry) = channel_file(0);
    let (answer, reason) = native.ask(Request { size: geometry.size as u64, ..GOOD }, &[&file]);
    assert_eq!(answer, Answer::NoServer);
    assert!(reason.contains("127.0.0.1:1"), "{reason}");
    assert_eq!(daemon.status()["sessions_refused"], 1);
}

#[test]
fn the_limit_on_clients_is_said() {
    let server = FakeServer::good();
    let daemon = Daemon::start(&["--server", &server.address.to_string(), "--max-channels", "1"]);
    let first = Channel::open(&daemon.native());
    let second = Native::connect(&daemon.native());
    let (answer, reason, _) = second.response();
    assert_eq!(answer, Answer::NoResources);
    assert!(reason.contains("max_channels"), "{reason}");
    drop(first);
    eventually(|| sessions(&daemon) == 0 && daemon.resources().1 < 10);
    eventually(|| {
        let (file, _view, geometry) = channel_file(0);
        let native = Native::connect(&daemon.native());
        native.send(Request { size: geometry.size as u64, ..GOOD }.as_bytes(), &[&file]);
        native.response().0 == Answer::Ok
    });
}

#[test]
fn sigterm_ends_sessions_removes_sockets_and_exits_with_zero() {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let server = FakeServer::good();
        let mut daemon = serving(&server);
        let channel = Channel::open(&daemon.native());
        assert!(daemon.end(signal).success());
        assert_eq!(channel.view.header().state(), State::Lost);
        assert!(channel.native.closed());
        assert!(!daemon.native().exists() && !daemon.status_path().exists() && !daemon.vm().exists());
    }
}

/// A server on this host that takes a session and its memory, and then does nothing more, whatever it is told.
fn stuck_server(path: &Path) {
    let listener = std::os::unix::net::UnixListener::bind(path).unwrap();
    std::thread::spawn(move || {
        let (socket, _) = listener.accept().unwrap();
        recv_struct::<Hello>(socket.as_fd(), &mut Vec::new()).unwrap().unwrap();
        let mut welcome = Welcome::new_zeroed();
        (welcome.magic, welcome.version) = (protocol::link::MAGIC, protocol::VERSION);
        welcome.fingerprint = protocol::version::OURS.fingerprint();
        send_message(socket.as_fd(), &[welcome.as_bytes()], &[]).unwrap();
        let mut fds = Vec::new();
        recv_frame(socket.as_fd(), &mut Vec::new(), &mut fds).unwrap().unwrap();
        send_frame(socket.as_fd(), frame::ACK, &[Ack { status: 0, reserved: 0 }.as_bytes()], &[]).unwrap();
        std::thread::park();
        drop((socket, fds));
    });
}

#[test]
fn a_server_that_never_lets_go_does_not_keep_the_daemon() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("server.sock");
    stuck_server(&path);
    let mut daemon =
        Daemon::start(&["--server", &format!("unix:{}", path.display()), "--transport", "local"]);
    let channel = Channel::open(&daemon.native());
    assert!(daemon.end(Signal::SIGTERM).success());
    assert!(
        daemon.log().contains("1 native clients' sessions have not ended within 3 s"),
        "{}",
        daemon.log()
    );
    assert!(channel.native.closed() && !daemon.native().exists());
}

#[test]
fn after_kill_dash_nine_the_next_daemon_takes_the_sockets_over_but_not_from_a_living_one() {
    let server = FakeServer::good();
    let mut daemon = serving(&server);
    let mut other = daemon.again(&["--server", &server.address.to_string()]);
    let (status, log) = other.wait();
    assert!(!status.success() && log.contains("another process listens"), "{log}");
    daemon.end(Signal::SIGKILL);
    assert!(daemon.native().exists());
    let mut next = daemon.again(&["--server", &server.address.to_string()]);
    next.ready();
    Channel::open(&next.native());
}

#[test]
fn a_configuration_is_checked_without_serving() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("c.toml");
    std::fs::write(&file, "[native]\nserver = \"unix:/x\"\ncolour = 1\n").unwrap();
    let run = || {
        std::process::Command::new(env!("CARGO_BIN_EXE_vhost-rgpu"))
            .arg("--config")
            .arg(&file)
            .arg("--check-config")
            .output()
    };
    let output = run().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && text.contains("line 3") && text.contains("colour"), "{text}");
    std::fs::write(&file, "[native]\nserver = \"unix:/x\"\n").unwrap();
    assert!(run().unwrap().status.success());
}

#[test]
fn clients_that_come_and_go_leave_nothing_behind() {
    let server = FakeServer::good();
    let daemon = serving(&server);
    drop(Channel::open(&daemon.native()));
    eventually(|| sessions(&daemon) == 0);
    let settled = |(descriptors, threads): (usize, usize)| {
        eventually(|| {
            let now = daemon.resources();
            now.0 <= descriptors && now.1 <= threads
        });
    };
    // Main, and one for each of three sockets.
    eventually(|| daemon.resources().1 <= 4);
    let before = daemon.resources();
    for _ in 0..100 {
        drop(Channel::open(&daemon.native()));
    }
    settled(before);
}

#[test]
fn systemds_socket_is_served_and_left_in_place() {
    let server = FakeServer::good();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("activated.sock");
    let listening = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
    nix::sys::socket::bind(listening.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
    nix::sys::socket::listen(&listening, nix::sys::socket::Backlog::new(8).unwrap()).unwrap();
    // A client may come before the daemon runs.
    let early = Native::connect(&path);
    let mut daemon = Daemon::activated(&["--server", &server.address.to_string()], &listening, "native");
    let (file, _view, geometry) = channel_file(0);
    early.send(Request { size: geometry.size as u64, ..GOOD }.as_bytes(), &[&file]);
    assert_eq!(early.response().0, Answer::Ok);
    assert!(!daemon.native().exists(), "it made no socket of its own");
    assert!(daemon.end(Signal::SIGTERM).success());
    // It still listens: who connects while the daemon restarts waits for the next one.
    let early = Native::connect(&path);
    let _next = Daemon::activated(&["--server", &server.address.to_string()], &listening, "native");
    early.send(Request { size: geometry.size as u64, ..GOOD }.as_bytes(), &[&channel_file(0).0]);
    assert_eq!(early.response().0, Answer::Ok);
}
