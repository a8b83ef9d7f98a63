//! The keeper is killed or replaced: VMMs and guests don't notice, and sessions continue.

#![allow(clippy::unwrap_used, reason = "a test may fail where it stands")]

mod daemon;
mod guest;

use std::io::{IoSlice, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use daemon::Daemon;
use guest::{Guest, create, message, plain};
use host_bridge::bridge::SessionConfig;
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{AddressFamily, Backlog, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr};
use nix::sys::socket::{bind, listen, sendmsg, socket};
use nix::unistd::Pid;
use protocol::channel::{NO_SLOT, State};
use protocol::data::{HostIn, HostOut};
use protocol::device::{Answer, CONTROL_QUEUE, EVENT_QUEUE, Extent, Request, request};
use protocol::handle::StreamId;
use protocol::link::wish;
use protocol::ops::copy::{MemcpyDtoH, MemcpyHtoD};
use serde_json::{Value, json};
use test_kit::daemon::stop;
use test_kit::local_server::{Behavior as Workers, LocalServer};
use test_kit::manager::Manager;
use test_kit::native_client::NativeClient;
use test_kit::server::{Behavior, FakeServer};
use test_kit::tcp_server::TcpServer;
use test_kit::turns::Turns;
use test_kit::*;
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::FrontendReq;

/// Maximum size of the keeper's record in bytes.
const RECORD: u64 = 16 << 20;

/// A daemon that a service manager starts repeatedly.
struct Service {
    manager: Manager,
    folder: Arc<tempfile::TempDir>,
    arguments: Vec<String>,
}

impl Service {
    fn new(arguments: &[&str]) -> Service {
        let arguments = arguments.iter().map(|&argument| argument.to_owned()).collect();
        Service { manager: Manager::new(), folder: Arc::new(tempfile::tempdir().unwrap()), arguments }
    }

    fn start(&self) -> Daemon {
        Daemon::kept(&self.manager, &self.folder, &borrowed(&self.arguments))
    }

    /// Whether a VMM's message was taken but not answered.
    fn is_busy(&self) -> bool {
        let record = self.manager.record("guest-vm-record", RECORD);
        record.is_some_and(|record| record["words"]["busy"] == true)
    }

    /// Kills the daemon when it has acted on all messages of a VMM, which has [settled](Guest::settle), and
    /// starts another one.
    fn crash(&self, mut daemon: Daemon) -> Daemon {
        eventually(|| !self.is_busy());
        daemon.end(Signal::SIGKILL);
        self.start()
    }
}

fn register(region: u32, extents: &[Extent]) -> Request {
    Request { kind: request::REGISTER_MEMORY, region, ..create(0, extents) }
}

fn local(server: &LocalServer) -> Vec<String> {
    let address = server.config.server.to_string();
    ["--server", &address, "--transport", "local", "--name", "vm"].map(str::to_owned).to_vec()
}

fn borrowed(arguments: &[String]) -> Vec<&str> {
    arguments.iter().map(String::as_str).collect()
}

/// Replaces the keeper three times under a guest with a session, memory that the session has registered, and
/// a request.
fn a_guest_does_not_notice(
    mut daemon: Daemon,
    replace: impl Fn(Daemon) -> Daemon,
    ended: impl Fn() -> usize,
) {
    let mut guest = Guest::connect(&daemon);
    let mut channel = guest.create(0);
    let bytes = pattern(100_000, 7);
    for round in 0..3u32 {
        let extents = scattered(100_000, round.into());
        assert_eq!(guest.ask(register(round, &extents), &extents), (Answer::Ok, String::new()));
        session::write(&guest.memories, &extents, &bytes);
        let src = HostIn::Range(region(round, 0, 100_000));
        channel.push(&MemcpyHtoD { stream: StreamId(0), dst: round.into(), src }, NO_SLOT);
        guest.post_event();
        daemon = replace(daemon);
        // Its threads look again.
        assert_eq!(guest.wait_used(EVENT_QUEUE).1, 8);
        channel.synchronize();
        assert_eq!(channel.view().header().state(), State::Ready);
        for round in 0..=round {
            let extents = scattered(100_000, round.into());
            session::write(&guest.memories, &extents, &vec![0; 100_000]);
            let dst = HostOut(region(round, 0, 100_000));
            channel.push(&MemcpyDtoH { stream: StreamId(0), src: round.into(), dst }, NO_SLOT);
            channel.synchronize();
            assert!(session::read(&guest.memories, &extents) == bytes, "region {round}");
        }
        let status = daemon.status();
        let [row] = &status["sessions"].as_array().unwrap()[..] else { panic!("{status}") };
        assert_eq!(row["program"], "guest-program");
        assert_eq!((&status["keepers_before"], &status["sessions_lost"]), (&json!(round + 1), &json!(0)));
    }
    // The VMM's messages are understood as before: what it has accepted still counts.
    let zeros = [0; 4];
    let flags = vhost::vhost_user::message::VhostUserConfigFlags::empty();
    let (_, config) = guest.frontend.get_config(0, 4, flags, &zeros).unwrap();
    assert_eq!(config.len(), 4);
    // A crash of only the device process is a crash under this keeper, too.
    let process = daemon.status()["device_processes"][0]["process"].as_u64().unwrap();
    let before = daemon.number("device_processes_restarted");
    kill(Pid::from_raw(process as i32), Signal::SIGKILL).unwrap();
    eventually(|| daemon.number("device_processes_restarted") == before + 1);
    channel.synchronize();
    // A reset ends the session even if another keeper had it, and the guest can start over.
    guest.reset();
    eventually(|| ended() == 1);
    (0..3).for_each(|queue| guest.start(queue));
    guest.settle();
    guest.create(0).synchronize();
    daemon = replace(daemon);
    guest.create(1).synchronize();
    drop(guest);
    eventually(|| ended() == 3 && daemon.sessions() == 0);
}

#[test]
fn a_guest_does_not_notice_upgrades() {
    let upgrade = |daemon: Daemon| {
        let pid = daemon.pid();
        daemon.upgrade();
        assert_eq!(daemon.status()["process"], pid, "it is the same process");
        daemon
    };
    let server = LocalServer::start(Workers::Good);
    let ended = || server.ended.load(Ordering::SeqCst);
    a_guest_does_not_notice(Daemon::start(&borrowed(&local(&server))), upgrade, ended);
    assert!(server.trouble.lock().unwrap().is_empty(), "{:?}", server.trouble);
    let server = TcpServer::start();
    let daemon = Daemon::start(&["--server", &server.config.server.to_string()]);
    a_guest_does_not_notice(daemon, upgrade, || server.ended());
    assert!(server.trouble().is_empty(), "{:?}", server.trouble());
}

#[test]
fn a_guest_does_not_notice_crashes_under_a_service_manager() {
    let server = LocalServer::start(Workers::Good);
    let service = Service::new(&borrowed(&local(&server)));
    let crash = |daemon| service.crash(daemon);
    let ended = || server.ended.load(Ordering::SeqCst);
    a_guest_does_not_notice(service.start(), crash, ended);
    assert!(server.trouble.lock().unwrap().is_empty(), "{:?}", server.trouble);
    let server = TcpServer::start();
    let service = Service::new(&["--server", &server.config.server.to_string(), "--name", "vm"]);
    let crash = |daemon| service.crash(daemon);
    a_guest_does_not_notice(service.start(), crash, || server.ended());
    assert!(server.trouble().is_empty(), "{:?}", server.trouble());
}

#[test]
fn a_daemon_that_is_told_to_end_while_another_program_replaces_it_ends_with_its_sessions() {
    let server = TcpServer::start();
    let folder = tempfile::tempdir().unwrap();
    let notify = folder.path().join("notify");
    // It reads nothing, so an upgrade waits for it when the device processes have ended.
    let _manager = UnixDatagram::bind(&notify).unwrap();
    let says = UnixDatagram::unbound().unwrap();
    says.set_nonblocking(true).unwrap();
    while says.send_to(b"BUSY=1", &notify).is_ok() {}
    let mut daemon = Daemon::notifying(&notify, &["--server", &server.config.server.to_string()]);
    let mut guest = Guest::connect(&daemon);
    guest.create(0).synchronize();
    daemon.signal(Signal::SIGUSR2);
    until("another program replaces it", || daemon.log().contains("takes over 1 sessions"));
    daemon.signal(Signal::SIGTERM);
    until("it has ended", || daemon.has_ended());
    eventually(|| server.ended() == 1);
    assert!(server.trouble().is_empty(), "{:?}", server.trouble());
}

#[test]
fn a_daemon_that_is_told_to_end_is_not_upgraded_any_more() {
    let server = TcpServer::start();
    let mut daemon = Daemon::start(&["--server", &server.config.server.to_string()]);
    let mut guest = Guest::connect(&daemon);
    guest.create(0).synchronize();
    let process = daemon.status()["device_processes"][0]["process"].as_u64().unwrap() as u32;
    // The upgrade waits for its report.
    stop(process);
    daemon.signal(Signal::SIGUSR2);
    daemon.signal(Signal::SIGTERM);
    eventually(|| daemon.log().contains("shutting down"));
    kill(Pid::from_raw(process as i32), Signal::SIGCONT).unwrap();
    until("it has ended", || daemon.has_ended());
    assert!(!daemon.log().contains("takes over"), "{}", daemon.log());
    eventually(|| server.ended() == 1);
}

#[test]
fn two_devices_of_one_guest_go_on_after_crashes_and_without_each_other() {
    let (server, manager) = (TcpServer::start(), Manager::new());
    let folder = Arc::new(tempfile::tempdir().unwrap());
    let sockets = ["a", "b"].map(|name| folder.path().join(name));
    let file = format!("{}{}", section("a", &sockets[0], &server), section("b", &sockets[1], &server));
    let start = || Daemon::kept_configured(&manager, &folder, &file);
    let crash = |mut daemon: Daemon| {
        let is_busy = |name| {
            let record = manager.record(&format!("guest-{name}-record"), RECORD);
            record.is_some_and(|record| record["words"]["busy"] == true)
        };
        eventually(|| !is_busy("a") && !is_busy("b"));
        daemon.end(Signal::SIGKILL);
        start()
    };
    let daemon = start();
    let [mut first, mut second] = sockets.each_ref().map(|socket| Guest::at_socket(socket));
    // QEMU sends the same open file for each device.
    let memory = first.memories.files().next().unwrap().1.try_clone().unwrap();
    second.add_memory(1 << 32, session::RAM, &memory);
    second.settle();
    let (mut one, mut other) = (first.create(0), second.create(0));
    let daemon = crash(daemon);
    one.synchronize();
    other.synchronize();
    // It is the first one's file, as far as the service manager knows.
    drop((one, first));
    eventually(|| !manager.names().iter().any(|name| name.starts_with("guest-a-")));
    let daemon = crash(daemon);
    other.synchronize();
    assert_eq!(daemon.number("sessions_lost"), 0);
}

#[test]
fn nothing_is_kept_of_a_vmm_that_has_left_or_of_a_daemon_that_has_ended() {
    let service = Service::new(&["--server", &FakeServer::good().address.to_string()]);
    let mut daemon = service.start();
    let guests = || service.manager.names().iter().filter(|name| name.starts_with("guest-")).count();
    assert_eq!(guests(), 0);
    let mut guest = Guest::connect(&daemon);
    guest.create(0).synchronize();
    // A record, the VMM's socket, requests, a process and its socket, memory, two for each of three rings,
    // and a channel.
    eventually(|| guests() == 13);
    drop(guest);
    eventually(|| guests() == 0);
    daemon.end(Signal::SIGTERM);
    assert_eq!(service.manager.names(), Vec::<String>::new());
}

#[test]
fn unread_messages_of_a_device_process_reach_the_next_keeper() {
    let server = LocalServer::start(Workers::Good);
    let service = Service::new(&borrowed(&local(&server)));
    let mut daemon = service.start();
    let mut guest = Guest::connect(&daemon);
    guest.create(0).synchronize();
    eventually(|| !service.is_busy());
    stop(daemon.pid());
    // The device process reports that the channel is destroyed, and the keeper never reads it.
    assert_eq!(guest.ask(plain(request::DESTROY_CHANNEL, 0), &[]), (Answer::Ok, String::new()));
    daemon.end(Signal::SIGKILL);
    let daemon = service.start();
    eventually(|| daemon.status()["device_processes"][0]["serves"].is_string());
    assert_eq!(daemon.sessions(), 0);
    assert_eq!(guest.ask(plain(request::DESTROY_CHANNEL, 0), &[]).0, Answer::Invalid);
    guest.create(0).synchronize();
    assert!(!daemon.log().contains("of the predecessor"), "{}", daemon.log());
}

#[test]
fn a_request_in_progress_is_answered_once_also_across_an_upgrade() {
    let server = LocalServer::start(Workers::Keeps);
    let daemon = Daemon::start(&borrowed(&local(&server)));
    let mut guest = Guest::connect(&daemon);
    let mut channel = guest.create(0);
    let extents = scattered(50_000, 3);
    assert_eq!(guest.ask(register(1, &extents), &extents).0, Answer::Ok);
    let src = HostIn::Range(region(1, 0, 50_000));
    channel.push(&MemcpyHtoD { stream: StreamId(0), dst: 1, src }, NO_SLOT);
    channel.synchronize();
    // The worker uses the region, so this waits.
    let unregister = Request { region: 1, ..plain(request::UNREGISTER_MEMORY, 0) };
    let (slow, slow_at) = guest.send(&message(unregister, &[]));
    daemon.upgrade();
    channel.synchronize();
    assert_eq!(guest.used(CONTROL_QUEUE), None, "the region is in use");
    server.let_go();
    assert_eq!(guest.wait_used(CONTROL_QUEUE).0, slow);
    assert_eq!(guest.answer_at(slow_at), (Answer::Ok, String::new()));
    assert_eq!(guest.used(CONTROL_QUEUE), None);
}

/// All lines that the daemon answers.
fn answers(daemon: &Daemon, request: &Value) -> Vec<Value> {
    let mut stream = UnixStream::connect(daemon.path("admin")).unwrap();
    stream.write_all(request.to_string().as_bytes()).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn ask(daemon: &Daemon, request: &Value) -> Value {
    answers(daemon, request).swap_remove(0)
}

/// A running copy of the program, which [`install`] replaces, with a socket for upgrades.
fn replaceable(folder: &Arc<tempfile::TempDir>, mut arguments: Vec<String>) -> Daemon {
    arguments.extend(["--admin-socket".to_owned(), folder.path().join("admin").display().to_string()]);
    Daemon::copied(folder, &borrowed(&arguments))
}

/// Installs a script in place of the program. Another process writes it: if this process did, a process that
/// another thread starts meanwhile could inherit the open descriptor, and the file could not be executed.
fn install(folder: &Arc<tempfile::TempDir>, script: &str) {
    let write = "printf %s \"$1\" >\"$0\" && chmod 755 \"$0\"";
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", write]).arg(folder.path().join("vhost-rgpu")).arg(script);
    assert!(shell.status().unwrap().success());
}

#[test]
fn a_vmm_that_sends_a_file_of_an_unknown_file_system_is_disconnected_and_delays_no_upgrade() {
    let daemon = Daemon::serving(&FakeServer::good());
    let file = std::fs::File::open("/proc/self/status").unwrap();
    let rights = [file.as_raw_fd()];
    let rights = [ControlMessage::ScmRights(&rights)];
    // In place of a ring's eventfd, and with a message that takes no descriptor.
    for code in [FrontendReq::SET_VRING_CALL, FrontendReq::GET_FEATURES] {
        let mut vmm = UnixStream::connect(daemon.vm()).unwrap();
        let header = [u32::from(code), 1, 8].map(u32::to_ne_bytes).concat();
        let text = [IoSlice::new(&header), IoSlice::new(&[0; 8])];
        sendmsg::<()>(vmm.as_raw_fd(), &text, &rights, MsgFlags::empty(), None).unwrap();
        assert_eq!(vmm.read(&mut [0; 99]).unwrap_or(0), 0);
    }
    assert_eq!(daemon.log().matches("it sent a file whose file system").count(), 2, "{}", daemon.log());
    daemon.upgrade();
    Guest::connect(&daemon).create(0).synchronize();
}

#[test]
fn a_program_that_cannot_take_over_is_not_executed() {
    let server = LocalServer::start(Workers::Good);
    let folder = Arc::new(tempfile::tempdir().unwrap());
    let path = |name: &str| folder.path().join(name);
    let daemon = replaceable(&folder, local(&server));
    let mut guest = Guest::connect(&daemon);
    let mut channel = guest.create(0);
    let process = daemon.status()["device_processes"][0]["process"].clone();
    std::fs::rename(path("vhost-rgpu"), path("good")).unwrap();
    let upgrade = || ask(&daemon, &json!({ "upgrade": {} }));
    assert!(upgrade()["error"].as_str().unwrap().contains("cannot run"));
    install(&folder, "#!/bin/sh\necho of another version >&2\nexit 1\n");
    let why = upgrade()["error"].as_str().unwrap().to_owned();
    assert!(why.contains("cannot take over: of another version"), "{why}");
    // Nothing was touched.
    assert_eq!(daemon.status()["device_processes"][0]["process"], process);
    channel.synchronize();
    // A program that answers the question but cannot be executed: everything is there again.
    install(&folder, "#!/nonexistent\n");
    assert!(upgrade()["error"].is_string());
    channel.synchronize();
    std::fs::rename(path("good"), path("vhost-rgpu")).unwrap();
    assert_eq!(upgrade()["upgrading"]["sessions"], 1);
    eventually(|| daemon.try_status().is_some_and(|status| status["keepers_before"] == 1));
    channel.synchronize();
    // The worker has not stopped meanwhile, but the new device process lists its session a moment later.
    eventually(|| ask(&daemon, &json!({ "version": {} }))["sessions"] == 1);
    assert!(ask(&daemon, &json!({ "nonsense": {} }))["error"].is_string());
}

/// The section of a virtual machine with this socket.
fn section(name: &str, socket: &std::path::Path, server: &TcpServer) -> String {
    let (socket, server) = (socket.display(), &server.config.server);
    format!("[[vm]]\nname = \"{name}\"\nsocket = \"{socket}\"\nserver = \"{server}\"\n")
}

#[test]
fn a_configuration_whose_sockets_cannot_be_made_is_not_taken_over() {
    let (server, folder) = (TcpServer::start(), Arc::new(tempfile::tempdir().unwrap()));
    let good = section("vm", &folder.path().join("vm.sock"), &server);
    let daemon = Daemon::configured(&folder, &good);
    let mut guest = Guest::connect(&daemon);
    let mut channel = guest.create(0);
    std::fs::write(daemon.path("data"), "data").unwrap();
    let _other = std::os::unix::net::UnixListener::bind(daemon.path("other")).unwrap();
    let long = "x".repeat(108);
    let bad = [
        ("data/vm2.sock", "is not a folder"),
        (&long, "107 bytes"),
        ("data", "is not a socket"),
        ("other", "another process does already"),
    ];
    for (refused, (socket, why)) in bad.into_iter().enumerate() {
        let more = section("vm2", &daemon.path(socket), &server);
        std::fs::write(daemon.path("vhost-rgpu.toml"), format!("{good}{more}")).unwrap();
        daemon.signal(Signal::SIGUSR2);
        eventually(|| daemon.log().matches("not upgraded: ").count() == refused + 1);
        assert!(daemon.log().contains(why), "{}", daemon.log());
        channel.synchronize();
    }
    // With one that can be made, both are served.
    let more = section("vm2", &daemon.path("vm2.sock"), &server);
    std::fs::write(daemon.path("vhost-rgpu.toml"), format!("{good}{more}")).unwrap();
    daemon.upgrade();
    channel.synchronize();
    Guest::at_socket(&daemon.path("vm2.sock")).create(0).synchronize();
}

#[test]
fn nothing_is_left_of_a_channel_that_the_next_configuration_refuses_while_it_is_created() {
    let server = FakeServer::start(Behavior { hold_queue: true, ..Behavior::default() });
    let folder = Arc::new(tempfile::tempdir().unwrap());
    let file =
        |most: u32| one_guest(&folder, &[&server.config()], &format!("[vm.limits]\nmax_extents = {most}\n"));
    let daemon = Daemon::configured(&folder, &file(2));
    let mut guest = Guest::connect(&daemon);
    let (extents, geometry) = guest.prepare(1);
    let view = guest.memories.view(&extents, geometry.size as u64).unwrap();
    view.header().set_wishes(wish::MAY_WAIT);
    let (head, at) = guest.send(&message(create(1, &extents), &extents));
    eventually(|| server.programs().len() == 1);
    daemon.reconfigure(&file(1));
    assert_eq!(guest.wait_used(CONTROL_QUEUE).0, head);
    let (answer, reason) = guest.answer_at(at);
    assert!(answer == Answer::NoResources && reason.contains("the limit is 1"), "{reason}");
    // The memory is the guest's again.
    assert_eq!(guest.ask(plain(request::DESTROY_CHANNEL, 1), &[]).0, Answer::Invalid);
    assert_eq!(server.programs().len(), 1, "another session was asked for");
}

#[test]
fn a_socket_that_cannot_be_made_ends_no_guest() {
    let (server, folder) = (TcpServer::start(), Arc::new(tempfile::tempdir().unwrap()));
    let manager = Manager::new();
    let start = |file: &str| Daemon::kept_configured(&manager, &folder, file);
    let path = |name: &str| folder.path().join(name);
    let good = section("vm", &path("vm.sock"), &server);
    let mut daemon = start(&good);
    let mut guest = Guest::connect(&daemon);
    let mut channel = guest.create(0);
    std::fs::write(path("data"), "data").unwrap();
    let bad = path("data/socket");
    let (bad, shown) = (bad.as_path(), bad.display());
    let files = [
        good.clone() + &section("other", bad, &server),
        section("vm", bad, &server),
        format!("{good}[admin]\nsocket = \"{shown}\"\n[metrics]\nlisten = \"unix:{shown}\"\n"),
    ];
    for (replaced, file) in files.iter().enumerate() {
        // What a guest's last message was is known when the daemon has answered it.
        guest.settle();
        eventually(|| manager.record("guest-vm-record", RECORD).is_some_and(|r| r["words"]["busy"] == false));
        daemon.end(Signal::SIGKILL);
        daemon = start(file);
        assert!(daemon.log().contains("serving without this socket"), "{}", daemon.log());
        channel.synchronize();
        assert_eq!(daemon.number("keepers_before"), replaced as u64 + 1);
    }
}

#[test]
fn an_upgrade_whose_program_is_gone_after_its_check_loses_nothing() {
    let server = TcpServer::start();
    let folder = Arc::new(tempfile::tempdir().unwrap());
    let daemon =
        replaceable(&folder, ["--server", &server.config.server.to_string()].map(str::to_owned).to_vec());
    let mut guest = Guest::connect(&daemon);
    let mut channel = guest.create(0);
    let (_native, mut program) = NativeClient::with_channel(&daemon.native(), "program");
    for channel in [&mut channel, &mut program] {
        channel.synchronize();
    }
    std::fs::remove_file(folder.path().join("vhost-rgpu")).unwrap();
    install(&folder, "#!/bin/sh\nrm -f \"$0\"\n");
    let said = answers(&daemon, &json!({ "upgrade": {} }));
    assert_eq!(said[0]["upgrading"]["sessions"], 2);
    assert!(said[1]["error"].as_str().unwrap().contains("cannot execute"), "{said:?}");
    for channel in [&mut channel, &mut program] {
        channel.synchronize();
        assert_eq!(channel.view().header().state(), State::Ready);
    }
    // A session is listed a moment after it continues.
    eventually(|| daemon.sessions() == 2);
    assert_eq!((daemon.number("keepers_before"), daemon.number("sessions_lost")), (0, 0));
}

#[test]
fn a_server_that_is_not_reached_for_long_is_told_that_qemu_has_ended() {
    let server = TcpServer::start();
    let turns = Turns::before(&server.config);
    let daemon = Daemon::start(&["--server", &turns.config.server.to_string()]);
    let mut guest = Guest::connect(&daemon);
    guest.create(0).synchronize();
    server.refuse_farewells(usize::MAX);
    turns.lose();
    drop(guest);
    // For longer than a process may take that is in its keeper's way.
    eventually(|| server.farewells() >= 10);
    turns.restore();
    // The next guest does not wait for that.
    let mut next = Guest::connect(&daemon);
    let mut channel = next.create(0);
    channel.synchronize();
    assert_eq!((server.ended(), daemon.sessions()), (0, 1));
    server.refuse_farewells(0);
    eventually(|| server.ended() == 1);
    // The process that told the server exits.
    eventually(|| daemon.status()["device_processes"].as_array().unwrap().len() == 1);
    daemon.upgrade();
    channel.synchronize();
}

#[test]
fn programs_at_systemds_socket_are_refused_while_no_section_serves_them() {
    let (server, folder) = (TcpServer::start(), Arc::new(tempfile::tempdir().unwrap()));
    let manager = Manager::new();
    let path = folder.path().join("native.sock");
    let listening = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
    bind(listening.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
    listen(&listening, Backlog::new(8).unwrap()).unwrap();
    manager.put("native", listening);
    let guests = section("vm", &folder.path().join("vm.sock"), &server);
    let daemon = Daemon::kept_configured(&manager, &folder, &guests);
    let refused = || {
        let (answer, reason, _) = NativeClient::connect(&path).unwrap().response().unwrap().unwrap();
        assert!(answer == Answer::Invalid && reason.contains("no section [native]"), "{reason}");
    };
    refused();
    let programs = format!("[native]\nserver = \"{}\"\n", server.config.server);
    daemon.reconfigure(&format!("{guests}{programs}"));
    let (_client, mut channel) = NativeClient::with_channel(&path, "program");
    channel.synchronize();
    daemon.reconfigure(&guests);
    refused();
}

/// The configuration of a virtual machine with these servers, whose socket is in this folder.
fn one_guest(folder: &tempfile::TempDir, servers: &[&SessionConfig], rest: &str) -> String {
    let socket = folder.path().join("vm.sock");
    let servers: Vec<String> = servers.iter().map(|config| config.server.to_string()).collect();
    format!("[[vm]]\nname = \"vm\"\nsocket = {socket:?}\nserver = {servers:?}\n{rest}")
}

#[test]
fn a_lower_limit_of_channels_counts_only_for_new_ones() {
    let server = TcpServer::start();
    let folder = Arc::new(tempfile::tempdir().unwrap());
    let file =
        |most: u32| one_guest(&folder, &[&server.config], &format!("[vm.limits]\nmax_channels = {most}\n"));
    let daemon = Daemon::configured(&folder, &file(5));
    let mut guest = Guest::connect(&daemon);
    let mut channels: Vec<_> = (0..5).map(|id| guest.create(id)).collect();
    daemon.reconfigure(&file(2));
    channels.iter_mut().for_each(|channel| channel.synchronize());
    // The last one is as usable as the first.
    let (extents, bytes) = (scattered(100_000, 7), pattern(100_000, 7));
    let pinned = Request { channel: 4, ..register(1, &extents) };
    assert_eq!(guest.ask(pinned, &extents), (Answer::Ok, String::new()));
    session::write(&guest.memories, &extents, &bytes);
    let src = HostIn::Range(region(1, 0, 100_000));
    channels[4].push(&MemcpyHtoD { stream: StreamId(0), dst: 1, src }, NO_SLOT);
    channels[4].synchronize();
    session::write(&guest.memories, &extents, &vec![0; 100_000]);
    let dst = HostOut(region(1, 0, 100_000));
    channels[4].push(&MemcpyDtoH { stream: StreamId(0), src: 1, dst }, NO_SLOT);
    channels[4].synchronize();
    assert!(session::read(&guest.memories, &extents) == bytes);
    let destroy = |guest: &mut Guest, id| {
        assert_eq!(guest.ask(plain(request::DESTROY_CHANNEL, id), &[]), (Answer::Ok, String::new()));
    };
    destroy(&mut guest, 4);
    eventually(|| server.ended() == 1);
    // Too many are there for another one.
    let (extents, _) = guest.prepare(4);
    let (answer, reason) = guest.ask(create(4, &extents), &extents);
    assert_eq!(answer, Answer::NoResources);
    assert!(reason.contains("4 channels") && reason.contains("the limit is 2"), "{reason}");
    (0..3).for_each(|id| destroy(&mut guest, id));
    eventually(|| server.ended() == 4);
    // The driver still gives the ids that it has learned.
    guest.create(4).synchronize();
    channels[3].synchronize();
    let (extents, _) = guest.prepare(0);
    assert_eq!(guest.ask(create(0, &extents), &extents).0, Answer::NoResources);
    assert_eq!(daemon.number("device_processes_restarted"), 0, "{}", daemon.log());
    assert!(server.trouble().is_empty(), "{:?}", server.trouble());
}

#[test]
fn sessions_stay_with_their_servers_when_the_list_of_servers_changes() {
    let (first, second, third) = (TcpServer::start(), TcpServer::start(), TcpServer::start());
    let nearby = LocalServer::start(Workers::Good);
    let folder = Arc::new(tempfile::tempdir().unwrap());
    let before = [&first.config, &second.config, &nearby.config];
    let daemon = Daemon::configured(&folder, &one_guest(&folder, &before, ""));
    let mut guest = Guest::connect(&daemon);
    let mut channels: Vec<_> = (0..3).map(|server| guest.create_for(server, server)).collect();
    // Another one comes first, and the places of the others change.
    let after = [&third.config, &nearby.config, &second.config, &first.config];
    daemon.reconfigure(&one_guest(&folder, &after, ""));
    for channel in &mut channels {
        channel.synchronize();
        assert_eq!(channel.view().header().state(), State::Ready);
    }
    let ended = || nearby.ended.load(Ordering::SeqCst);
    assert_eq!((first.ended(), second.ended(), ended()), (0, 0, 0));
    assert_eq!(daemon.number("sessions_lost"), 0);
    // Those whose servers are gone are over, and their programs learn why.
    daemon.reconfigure(&one_guest(&folder, &[&second.config], ""));
    channels[1].synchronize();
    eventually(|| [0, 2].map(|lost| channels[lost].view().header().state()) == [State::Lost; 2]);
    for (lost, config) in [(0, &first.config), (2, &nearby.config)] {
        let (server, reason) = (config.server.to_string(), channels[lost].view().header().reason());
        assert!(reason.contains(&server) && reason.contains("configuration"), "{reason}");
        let destroy = plain(request::DESTROY_CHANNEL, lost as u32);
        assert_eq!(guest.ask(destroy, &[]), (Answer::Ok, String::new()));
    }
    // The worker that shares the guest's memory has released it.
    assert_eq!((second.ended(), ended()), (0, 1));
    assert_eq!(daemon.number("sessions_lost"), 2);
    channels[1].synchronize();
    guest.create(0).synchronize();
}

#[test]
fn a_programs_session_stays_with_its_server_when_the_list_of_servers_changes() {
    let (first, second, third) = (TcpServer::start(), TcpServer::start(), TcpServer::start());
    let folder = Arc::new(tempfile::tempdir().unwrap());
    let file = |servers: &[&TcpServer]| {
        let servers: Vec<String> = servers.iter().map(|server| server.config.server.to_string()).collect();
        format!("[native]\nsocket = {:?}\nserver = {servers:?}\n", folder.path().join("native.sock"))
    };
    let daemon = Daemon::configured(&folder, &file(&[&first, &second]));
    let (_program, mut channel) = NativeClient::with_channel(&daemon.native(), "program");
    channel.synchronize();
    daemon.reconfigure(&file(&[&third, &first]));
    channel.synchronize();
    assert_eq!((first.ended(), daemon.number("sessions_lost")), (0, 0));
    daemon.reconfigure(&file(&[&second, &third]));
    eventually(|| channel.view().header().state() == State::Lost);
    let reason = channel.view().header().reason();
    assert!(reason.contains(&first.config.server.to_string()), "{reason}");
}

#[test]
fn a_keeper_that_ends_during_a_vmms_message_disconnects_only_that_vmm() {
    let server = FakeServer::good();
    let service = Service::new(&["--server", &server.address.to_string(), "--name", "vm"]);
    let mut daemon = service.start();
    let mut guest = Guest::connect(&daemon);
    guest.create(0).synchronize();
    // The device process does not answer, so the keeper is in the middle of the message.
    let process = daemon.status()["device_processes"][0]["process"].as_u64().unwrap();
    stop(process as u32);
    let asking = std::thread::spawn(move || guest.frontend.get_vring_base(0));
    eventually(|| service.is_busy());
    daemon.end(Signal::SIGKILL);
    let daemon = service.start();
    assert!(asking.join().unwrap().is_err());
    eventually(|| daemon.log().contains("it ended while it answered the VMM"));
    let mut next = Guest::connect(&daemon);
    next.create(0).synchronize();
}
