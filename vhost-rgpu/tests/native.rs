//! The daemon from outside: native clients, status, signals, configuration.

#![allow(clippy::unwrap_used, reason = "a test may fail where it stands")]

mod daemon;

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use daemon::Daemon;
use host_bridge::framing::{recv_frame, recv_struct, send_frame, send_message};
use host_bridge::memory::{ChannelView, Memories};
use identity::{Identity, servers};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::signal::Signal;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, socket};
use protocol::channel::{NO_SLOT, SlotState, State};
use protocol::data::{HostIn, HostOut};
use protocol::device::{Answer, Extent, request};
use protocol::handle::StreamId;
use protocol::link::{Ack, Hello, Memory, frame, wish};
use protocol::native::Request;
use protocol::ops::copy::{MemcpyDtoH, MemcpyHtoD};
use protocol::ops::stream::StreamSynchronize;
use protocol::version::Version;
use test_kit::channel::{self, in_a_file};
use test_kit::daemon::memory_contains;
use test_kit::link::welcome;
use test_kit::manager::Manager;
use test_kit::native_client::{NativeClient, create_channel};
use test_kit::server::{Behavior, FakeServer};
use test_kit::*;
use zerocopy::IntoBytes;

const PROGRAM: &str = "native-test";

/// A request that has no size.
fn plain(kind: u32) -> Request {
    Request { kind, ..create_channel(0) }
}

/// A client with a channel.
struct Client {
    native: NativeClient,
    doorbell: OwnedFd,
    channel: channel::Channel,
}

/// Requests a channel with an arena of 1 MiB and leaves the response to the caller.
fn ask(path: &Path, wishes: u32) -> (NativeClient, ChannelView) {
    let native = NativeClient::connect(path).unwrap();
    let (file, view) = in_a_file(1 << 20, PROGRAM);
    view.header().set_wishes(wishes);
    native.send(create_channel(view.geometry().size as u64).as_bytes(), &[&file]).unwrap();
    (native, view)
}

/// A client that can be told to wait and has requested a channel; its answer has arrived.
fn ask_patiently(path: &Path) -> (NativeClient, ChannelView) {
    let (native, view) = ask(path, wish::MAY_WAIT);
    let (answer, reason, fds) = native.response().unwrap().unwrap();
    assert_eq!((answer, reason.as_str(), fds.len()), (Answer::Ok, "", 1));
    (native, view)
}

impl Client {
    fn open(path: &Path) -> Client {
        let (native, view) = ask(path, 0);
        let (answer, reason, mut fds) = native.response().unwrap().unwrap();
        assert_eq!((answer, reason.as_str()), (Answer::Ok, ""));
        let doorbell = fds.pop().unwrap();
        assert!(fds.is_empty());
        assert_eq!(view.header().state(), State::Ready);
        let for_channel = doorbell.try_clone().unwrap();
        let channel = channel::Channel::new(view, move || {
            nix::unistd::write(&for_channel, &1u64.to_ne_bytes()).unwrap();
        });
        Client { native, doorbell, channel }
    }

    /// Sleeps until the reply in a slot arrives, as the library does: by futex on the slot's word.
    fn sleep_for_answer(&self, slot: u16) -> protocol::Status {
        let view = self.channel.view();
        let word = view.slot(slot).unwrap();
        let mut payload = Vec::new();
        loop {
            if let Some(completion) = word.poll(&mut payload) {
                return completion.status;
            }
            if word.announce_sleep() {
                let timeout = libc::timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
                let sleeping = SlotState::Sleeping as u32;
                // SAFETY: the slot's first word is its state, and the channel stays mapped while
                // `self.channel` lives; the kernel only reads the word.
                let woken = unsafe {
                    let word = view.base().add(view.geometry().slot_offset(slot.into()));
                    libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, sleeping, &timeout)
                };
                assert!(woken == 0 || nix::Error::last() != nix::Error::ETIMEDOUT, "nobody woke the client");
            }
        }
    }

    fn synchronize(&mut self) -> protocol::Status {
        self.channel.push(&StreamSynchronize { stream: StreamId(0) }, 0);
        self.sleep_for_answer(0)
    }
}

#[test]
fn a_channel_is_for_the_server_that_its_header_names() {
    let servers = [FakeServer::good(), FakeServer::good(), FakeServer::good()];
    let addresses = servers.each_ref().map(|server| server.address.to_string());
    let named = format!("{}/1,2", addresses[2]);
    let arguments =
        ["--server", &addresses[0], "--server", &addresses[1], "--named-servers", &named, "--name", "testvm"];
    let daemon = Daemon::start(&arguments);
    let open = |number: u32, name: &str| {
        let native = NativeClient::connect(&daemon.native()).unwrap();
        let (file, view) = in_a_file(1 << 20, PROGRAM);
        view.header().ask_for_server(number, name);
        native.send(create_channel(view.geometry().size as u64).as_bytes(), &[&file]).unwrap();
        let (answer, reason, _) = native.response().unwrap().unwrap();
        (answer, reason, view.header().servers())
    };
    let served = || servers.each_ref().map(|server| server.programs().len());
    assert_eq!(open(0, ""), (Answer::Ok, String::new(), 2));
    assert_eq!(open(1, ""), (Answer::Ok, String::new(), 2));
    assert_eq!(served(), [1, 1, 0]);
    // By name, whatever the number is: one that every program has, and one that has to be named.
    assert_eq!(open(7, &addresses[1]).0, Answer::Ok);
    assert_eq!(open(0, &format!("{}/2", addresses[2])).0, Answer::Ok);
    assert_eq!(served(), [1, 2, 1]);
    for (number, name) in
        [(2, ""), (u32::MAX, ""), (0, "127.0.0.1:1"), (0, "nonsense/x"), (0, &format!("{}/0", addresses[2]))]
    {
        let (answer, reason, _) = open(number, name);
        assert_eq!(answer, Answer::Invalid, "{number} {name}: {reason}");
    }
    assert_eq!(served(), [1, 2, 1], "nobody else was connected to");
}

#[test]
fn a_program_sends_commands_and_data_and_sleeps_for_answers() {
    let server = FakeServer::good();
    let daemon = Daemon::serving(&server);
    let mut channel = Client::open(&daemon.native());
    // A region in a file of its own.
    let file = sealed_memfd(3 << 20);
    let memory = Memory { addr: 0, size: 3 << 20, file_offset: 0 };
    let own = Memories::map(vec![(memory, file.try_clone().unwrap())]).unwrap();
    let bytes = pattern(1_000_003, 1);
    let at = own.resolve(&[Extent { addr: 4096, len: 1_000_003 }], 1_000_003).unwrap().all()[0].at;
    // SAFETY: `resolve` checked that this range of mapped memory is as long as `bytes`.
    unsafe { at.copy_from(NonNull::from(&bytes[..]).cast(), bytes.len()) };
    let register = Request {
        kind: request::REGISTER_MEMORY,
        region: 5,
        offset: 4096,
        size: 1_000_003,
        ..create_channel(0)
    };
    assert_eq!(channel.native.ask(register, &[&file]).unwrap(), (Answer::Ok, String::new()));

    let src = HostIn::Range(region(5, 0, 1_000_003));
    channel.channel.push(&MemcpyHtoD { stream: StreamId(0), dst: 1, src }, NO_SLOT);
    let dst = HostOut(arena(3, 1_000_003));
    channel.channel.push(&MemcpyDtoH { stream: StreamId(0), src: 1, dst }, NO_SLOT);
    assert!(channel.synchronize().is_success());
    assert!(channel.channel.read_arena(3, 1_000_003) == bytes);

    let unregister = Request { region: 5, ..plain(request::UNREGISTER_MEMORY) };
    assert_eq!(channel.native.ask(unregister, &[]).unwrap().0, Answer::Ok);
    assert_eq!(channel.native.ask(unregister, &[]).unwrap().0, Answer::Invalid);
    assert_eq!(channel.native.ask(plain(request::DESTROY_CHANNEL), &[]).unwrap().0, Answer::Ok);
    assert!(channel.native.is_closed());
    assert_eq!(server.programs(), ["native-test"]);
}

#[test]
fn a_service_manager_hears_when_the_daemon_serves_and_when_it_ends() {
    let (server, manager) = (FakeServer::good(), Manager::new());
    let mut daemon = Daemon::managed(&manager, &server);
    until("it serves", || manager.said() == ["READY=1"]);
    // Every socket exists, without waiting for anything else.
    assert_eq!(daemon.sessions(), 0);
    let client = Client::open(&daemon.native());
    std::os::unix::net::UnixStream::connect(daemon.vm()).unwrap();
    drop(client);
    assert!(daemon.end(Signal::SIGTERM).success());
    assert_eq!(manager.said(), ["READY=1", "STOPPING=1"]);
}

#[test]
fn the_status_shows_sessions_and_counters() {
    let server = FakeServer::good();
    let daemon = Daemon::serving(&server);
    let mut channel = Client::open(&daemon.native());
    for _ in 0..3 {
        channel.synchronize();
    }
    // A reply is counted a moment after the program has it.
    eventually(|| daemon.status()["sessions"][0]["replies"].as_u64() == Some(3));
    let status = daemon.status();
    let session = &status["sessions"][0];
    assert_eq!(session["program"], "native-test");
    assert_eq!((session["pid"].as_u64(), session["commands"].as_u64()), (Some(7), Some(3)));
    assert!(session["owner"].as_str().unwrap().contains(&format!("pid {}", std::process::id())), "{session}");
    drop(channel);
    eventually(|| daemon.sessions() == 0);
    eventually(|| {
        let status = daemon.status();
        (status["sessions_closed"].as_u64(), status["totals"]["commands"].as_u64()) == (Some(1), Some(3))
    });
}

#[test]
fn malformed_requests_are_refused_and_affect_nothing_else() {
    let server = FakeServer::good();
    let daemon = Daemon::serving(&server);
    let mut bystander = Client::open(&daemon.native());
    let (file, view) = in_a_file(0, PROGRAM);
    let size = view.geometry().size as u64;
    let unsealed = memfd(size);
    let good = create_channel(size);
    let native = NativeClient::connect(&daemon.native()).unwrap();
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
        (plain(request::DESTROY_CHANNEL), &[], Answer::Invalid, "no channel"),
    ];
    for (request, fds, answer, word) in cases {
        let (got, reason) = native.ask(request, fds).unwrap();
        assert_eq!(got, answer, "{request:?}: {reason}");
        assert!(reason.contains(word), "{request:?}: {reason}");
    }
    for len in [1, size_of::<Request>() - 1, size_of::<Request>() + 1, 5000] {
        native.send(&vec![0xee; len], &[&file]).unwrap();
        assert_eq!(native.response().unwrap().unwrap().0, Answer::Invalid);
    }
    // After all that a good request still works, and a second one on the same connection does not.
    assert_eq!(native.ask(good, &[&file]).unwrap().0, Answer::Ok);
    assert_eq!(native.ask(good, &[&file]).unwrap().0, Answer::Invalid);
    assert!(bystander.synchronize().is_success());
}

#[test]
fn a_lost_session_closes_its_clients_connection_and_wakes_its_sleepers() {
    let server = FakeServer::start(Behavior { drop_at: Some(1), ..Behavior::default() });
    let daemon = Daemon::serving(&server);
    let mut channel = Client::open(&daemon.native());
    assert_eq!(channel.synchronize(), protocol::Status::DEVICE_UNAVAILABLE);
    assert!(channel.native.is_closed());
    assert!(
        channel.channel.view().header().reason().contains("127.0.0.1"),
        "{}",
        channel.channel.view().header().reason()
    );
    eventually(|| daemon.status()["sessions_lost"].as_u64() == Some(1));
}

#[test]
fn a_client_that_breaks_its_doorbell_affects_only_itself() {
    let server = FakeServer::good();
    let daemon = Daemon::serving(&server);
    let channel = Client::open(&daemon.native());
    // The descriptor's flags and counter are shared with the daemon.
    fcntl(&channel.doorbell, FcntlArg::F_SETFL(OFlag::empty())).unwrap();
    for _ in 0..3 {
        nix::unistd::write(&channel.doorbell, &1u64.to_ne_bytes()).unwrap();
        nix::unistd::read(&channel.doorbell, &mut [0; 8]).unwrap();
    }
    nix::unistd::write(&channel.doorbell, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    let mut bystander = Client::open(&daemon.native());
    assert!(bystander.synchronize().is_success());
    // And the daemon can still end that session.
    assert_eq!(channel.native.ask(plain(request::DESTROY_CHANNEL), &[]).unwrap().0, Answer::Ok);
}

#[test]
fn a_waiting_client_finds_its_position_in_its_channel_and_then_its_session() {
    let server = FakeServer::start(Behavior { queue: &[5, 4], ..Behavior::default() });
    let daemon = Daemon::serving(&server);
    let (_native, view) = ask_patiently(&daemon.native());
    eventually(|| view.header().state() == State::Ready);
    // The last position that was reported, and by whom.
    assert_eq!((view.header().ahead(), view.header().reason().as_str()), (4, "fake"));
    eventually(|| daemon.sessions() == 1);
}

#[test]
fn a_waiting_client_learns_why_it_is_refused_and_leaves_the_queue_when_it_disconnects() {
    let refusal = Some((Answer::NoResources, "nobody is served here"));
    let server = FakeServer::start(Behavior { queue: &[1], answer: refusal, ..Behavior::default() });
    // A refusal right away: the answer may be the queue's or the refusal's; the channel has the rest.
    let daemon = Daemon::serving(&server);
    let (native, view) = ask(&daemon.native(), wish::MAY_WAIT);
    assert_eq!(native.response().unwrap().unwrap().0, Answer::Ok);
    eventually(|| view.header().state() == State::Lost);
    assert!(view.header().reason().contains("nobody is served here"), "{}", view.header().reason());
    assert!(native.is_closed());

    let server = FakeServer::start(Behavior { queue: &[7], never_serves: true, ..Behavior::default() });
    let daemon = Daemon::serving(&server);
    let (native, view) = ask_patiently(&daemon.native());
    assert_eq!((view.header().state(), view.header().ahead()), (State::Waiting, 7));
    drop(native);
    eventually(|| server.left() == 1);
    eventually(|| daemon.sessions() == 0);
}

#[test]
fn without_a_server_the_client_is_told_its_address() {
    let daemon = Daemon::start(&["--server", "tcp:127.0.0.1:1"]);
    let (native, _view) = ask(&daemon.native(), 0);
    let (answer, reason, _) = native.response().unwrap().unwrap();
    assert_eq!(answer, Answer::NoServer);
    assert!(reason.contains("127.0.0.1:1"), "{reason}");
    assert_eq!(daemon.status()["sessions_refused"], 1);
}

#[test]
fn a_client_beyond_the_limit_is_told_the_limit() {
    let server = FakeServer::good();
    let daemon = Daemon::start(&["--server", &server.address.to_string(), "--max-channels", "1"]);
    let first = Client::open(&daemon.native());
    let second = NativeClient::connect(&daemon.native()).unwrap();
    let (answer, reason, _) = second.response().unwrap().unwrap();
    assert_eq!(answer, Answer::NoResources);
    assert!(reason.contains("max_channels"), "{reason}");
    drop(first);
    eventually(|| daemon.sessions() == 0 && daemon.resources().1 < 10);
    eventually(|| is_served(&daemon));
}

/// Whether a client gets a channel. A connection that is refused may be closed before it is used.
fn is_served(daemon: &Daemon) -> bool {
    let native = NativeClient::connect(&daemon.native()).unwrap();
    let (file, view) = in_a_file(1 << 20, PROGRAM);
    let request = create_channel(view.geometry().size as u64);
    native.send(request.as_bytes(), &[&file]).is_ok()
        && matches!(native.response(), Ok(Some((Answer::Ok, _, _))))
}

#[test]
fn device_processes_use_the_configuration_file_as_the_keeper_read_it() {
    let server = FakeServer::good();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("c.toml");
    let address = &server.address;
    let text = format!(
        "[[vm]]\nname = \"testvm\"\nsocket = \"/nowhere\"\nserver = \"{address}\"\n[native]\nserver = \"{address}\"\nname = \"from-the-file\"\n"
    );
    std::fs::write(&file, text).unwrap();
    let daemon = Daemon::start(&["--config", file.to_str().unwrap()]);
    std::fs::write(&file, "this is not TOML").unwrap();
    let mut client = Client::open(&daemon.native());
    assert!(client.synchronize().is_success());
    assert_eq!(daemon.status()["sessions"][0]["server"], address.to_string());
}

#[test]
fn a_user_at_its_share_of_the_limit_is_told_so() {
    let server = FakeServer::good();
    let arguments = ["--server", &server.address.to_string(), "--max-channels-per-user", "2"];
    let daemon = Daemon::start(&arguments);
    let first = [Client::open(&daemon.native()), Client::open(&daemon.native())];
    let third = NativeClient::connect(&daemon.native()).unwrap();
    let (answer, reason, _) = third.response().unwrap().unwrap();
    assert_eq!(answer, Answer::NoResources);
    assert!(reason.contains("native.max_channels_per_user"), "{reason}");
    assert_eq!(daemon.number("clients_refused"), 1);
    drop(first);
    eventually(|| is_served(&daemon));
}

#[test]
fn sigterm_ends_sessions_removes_sockets_and_exits_with_zero() {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let server = FakeServer::good();
        let mut daemon = Daemon::serving(&server);
        let channel = Client::open(&daemon.native());
        assert!(daemon.end(signal).success());
        assert_eq!(channel.channel.view().header().state(), State::Lost);
        assert!(channel.native.is_closed());
        assert!(!daemon.native().exists() && !daemon.path("status").exists() && !daemon.vm().exists());
    }
}

/// A server on this host that takes a session and its memory, and then ignores everything.
fn stuck_server(path: &Path) {
    let listener = std::os::unix::net::UnixListener::bind(path).unwrap();
    std::thread::spawn(move || {
        let (socket, _) = listener.accept().unwrap();
        recv_struct::<Hello>(socket.as_fd(), &mut Vec::new()).unwrap().unwrap();
        send_message(socket.as_fd(), &[welcome(Answer::Ok, "").as_bytes()], &[]).unwrap();
        let mut fds = Vec::new();
        recv_frame(socket.as_fd(), &mut Vec::new(), &mut fds).unwrap().unwrap();
        send_frame(socket.as_fd(), frame::ACK, &[Ack { status: 0, reserved: 0 }.as_bytes()], &[]).unwrap();
        std::thread::park();
        drop((socket, fds));
    });
}

#[test]
fn a_server_that_never_releases_memory_does_not_block_the_daemon() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("server.sock");
    stuck_server(&path);
    let mut daemon =
        Daemon::start(&["--server", &format!("unix:{}", path.display()), "--transport", "local"]);
    let channel = Client::open(&daemon.native());
    assert!(daemon.end(Signal::SIGTERM).success());
    assert!(
        daemon.log().contains("1 native clients' sessions have not ended within 8 s"),
        "{}",
        daemon.log()
    );
    assert!(channel.native.is_closed() && !daemon.native().exists());
}

#[test]
fn a_daemon_takes_over_sockets_of_a_killed_one_but_not_of_a_running_one() {
    let server = FakeServer::good();
    let mut daemon = Daemon::serving(&server);
    let mut other = daemon.again(&["--server", &server.address.to_string()]);
    let (status, log) = (other.wait(), other.log());
    assert!(!status.success() && log.contains("another process listens"), "{log}");
    daemon.end(Signal::SIGKILL);
    assert!(daemon.native().exists());
    let next = daemon.again(&["--server", &server.address.to_string()]).ready();
    Client::open(&next.native());
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
fn a_device_process_accesses_only_what_it_was_given() {
    let server = FakeServer::good();
    let daemon = Daemon::serving(&server);
    let _client = Client::open(&daemon.native());
    let process = daemon.status()["device_processes"][0].clone();
    let state = &process["sandbox"];
    assert_eq!(state["no_new_privileges"], true);
    assert_eq!((&state["capabilities"], &state["core_limit"]), (&0.into(), &0.into()));
    assert!(state["filters"].as_u64().unwrap() >= 2, "{state}");
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    assert_eq!(state["namespaces"], serde_json::json!(["mnt", "pid", "ipc", "net"]));
    assert!(state["user"].as_u64().unwrap() >= 0x7001_0000, "{state}");
    // Its server is on a network that it doesn't have: the keeper has connected.
    let folder = PathBuf::from(format!("/proc/{}", process["process"]));
    let interfaces = std::fs::read_to_string(folder.join("net/dev")).unwrap();
    assert_eq!(interfaces.lines().filter(|line| line.contains(':')).count(), 1, "{interfaces}");
    let seen = |path: &str| folder.join("root").join(path).exists();
    assert!(seen("dev/null"));
    for hidden in ["etc/passwd", "etc/rgpu", "root", "home", "run", "usr/bin"] {
        assert!(!seen(hidden), "{hidden}");
    }
}

#[test]
fn the_log_names_servers_whose_connections_are_not_protected() {
    let daemon = Daemon::start(&["--server", "tcp:127.0.0.1:1"]);
    let said = "insecure: connections to tcp:127.0.0.1:1 are neither encrypted nor authenticated";
    eventually(|| daemon.log().contains(said));
    let daemon = Daemon::start(&["--server", "unix:/nowhere"]);
    daemon.status();
    assert!(!daemon.log().contains("insecure"), "{}", daemon.log());
}

#[test]
fn the_daemon_does_not_start_without_a_required_sandbox() {
    let folder = tempfile::tempdir().unwrap();
    let run = |flags: &[&str]| {
        let socket = folder.path().join("native.sock");
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_vhost-rgpu"));
        command.arg("--native-socket").arg(socket).args(["--server", "unix:/nowhere"]).args(flags);
        let output = command.output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (served, text) = run(&["--require-sandbox", "--sandbox=off"]);
    assert!(!served && text.contains("--require-sandbox") && text.contains("--sandbox is off"), "{text}");
    // Without a sandbox the log says so.
    let daemon = Daemon::start(&["--server", "unix:/nowhere", "--sandbox=off"]);
    let said = |log: &str| log.contains("device processes run without") && log.contains("--sandbox is off");
    eventually(|| said(&daemon.log()));
}

#[test]
fn disconnected_clients_leave_nothing_behind() {
    let server = FakeServer::good();
    let daemon = Daemon::serving(&server);
    drop(Client::open(&daemon.native()));
    eventually(|| daemon.sessions() == 0);
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
        drop(Client::open(&daemon.native()));
    }
    settled(before);
}

#[test]
fn a_socket_from_systemd_is_served_and_left_in_place() {
    let server = FakeServer::good();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("activated.sock");
    let listening = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
    nix::sys::socket::bind(listening.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
    nix::sys::socket::listen(&listening, nix::sys::socket::Backlog::new(8).unwrap()).unwrap();
    // A client may connect before the daemon runs.
    let early = NativeClient::connect(&path).unwrap();
    let mut daemon = Daemon::activated(&["--server", &server.address.to_string()], &listening, "native");
    let (file, view) = in_a_file(0, PROGRAM);
    let request = create_channel(view.geometry().size as u64);
    assert_eq!(early.ask(request, &[&file]).unwrap().0, Answer::Ok);
    assert!(!daemon.native().exists(), "it made no socket of its own");
    assert!(daemon.end(Signal::SIGTERM).success());
    // It still listens: clients that connect while the daemon restarts wait for the next one.
    let early = NativeClient::connect(&path).unwrap();
    let _next = Daemon::activated(&["--server", &server.address.to_string()], &listening, "native");
    assert_eq!(early.ask(request, &[&in_a_file(0, PROGRAM).0]).unwrap().0, Answer::Ok);
}

#[test]
fn the_hosts_key_stays_with_the_keeper() {
    let folder = tempfile::tempdir().unwrap();
    let identity = Identity::load_or_create(folder.path()).unwrap();
    // Nobody listens there.
    let port = free_port();
    let server = format!("tcp:127.0.0.1:{port}");
    let path = folder.path().display().to_string();
    let daemon = Daemon::start(&["--server", &server, "--identity", &path]);
    let refused = || {
        let (native, _view) = ask(&daemon.native(), 0);
        let (answer, reason, _) = native.response().unwrap().unwrap();
        (native, answer, reason)
    };
    let (_native, answer, reason) = refused();
    assert_eq!(answer, Answer::Denied);
    assert!(reason.contains("no key is pinned for tcp:127.0.0.1"), "{reason}");
    // What rgpuctl join adds takes effect immediately.
    servers::add(folder.path(), std::slice::from_ref(&server), identity.fingerprint(), "me").unwrap();
    let (_native, answer, reason) = refused();
    assert_eq!(answer, Answer::NoServer);
    assert!(reason.contains("cannot be reached"), "{reason}");
    // The device process requested signatures with this key, and doesn't have it.
    let device = daemon.status()["device_processes"][0]["process"].as_u64().unwrap();
    let pem = std::fs::read_to_string(folder.path().join("key.pem")).unwrap();
    let line = pem.lines().nth(1).unwrap();
    let finds = |text: &str| memory_contains(device, text.as_bytes());
    match finds(&server) {
        // Only root looks into a device process.
        None => assert!(!nix::unistd::geteuid().is_root()),
        Some(found) => assert_eq!((found, finds(line)), (true, Some(false))),
    }
}
