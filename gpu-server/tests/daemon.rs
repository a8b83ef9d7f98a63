//! The daemon: admission, the pool, and what remains after a session's end.

#![allow(clippy::unwrap_used)]

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;

use host_bridge::framing::{recv_frame, send_frame};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use protocol::channel::NO_SLOT;
use protocol::data::{HostIn, HostRange, Place};
use protocol::device::untext;
use protocol::handle::*;
use protocol::link::*;
use protocol::ops::Op;
use protocol::ops::copy::*;
use protocol::ops::device::*;
use protocol::ops::event::EventCreate;
use protocol::ops::memory::*;
use protocol::ops::stream::*;
use protocol::version::Version;
use support::*;
use test_kit::link::{LocalBridge, Session, TcpSession, greet, hello};
use test_kit::resources::{family, leave_no_descriptors, limit_descriptors, until_idle};
use test_kit::*;
use zerocopy::IntoBytes;

fn worker_of(server: &Server, program_index: usize) -> i32 {
    server.status()["sessions"][program_index]["worker"].as_i64().unwrap() as i32
}

/// What the server holds: child processes, descriptors and threads.
fn holdings(server: &Server) -> (usize, (usize, usize)) {
    (server.children().len(), server.resources())
}

#[test]
fn another_version_is_refused_with_both_versions_on_both_kinds_of_socket() {
    let server = Server::start(&[]);
    let version = Version { major: 99, minor: 0 };
    let theirs = |purpose| Hello { version, ..hello(purpose, [0; 16], 0) };
    for welcome in [
        greet(UnixStream::connect(server.socket()).unwrap(), &theirs(purpose::LOCAL)).unwrap(),
        greet(TcpStream::connect(("127.0.0.1", server.port)).unwrap(), &theirs(purpose::CONTROL)).unwrap(),
    ] {
        assert_eq!(
            (welcome.status, welcome.version),
            (protocol::device::Answer::Version as u32, protocol::VERSION)
        );
        let reason = untext(&welcome.reason);
        assert!(
            reason.contains("version 99.0") && reason.contains(&format!("version {}", protocol::VERSION)),
            "{reason}"
        );
    }
}

#[test]
fn a_client_built_from_other_sources_is_refused_and_a_newer_one_is_served() {
    let server = Server::start(&[]);
    let connect = || TcpStream::connect(("127.0.0.1", server.port)).unwrap();
    let ours = hello(purpose::CONTROL, [0; 16], 1);
    let other = Hello { fingerprint: !ours.fingerprint, ..ours };
    let welcome = greet(connect(), &other).unwrap();
    assert_eq!(welcome.status, protocol::device::Answer::Version as u32);
    assert!(untext(&welcome.reason).contains("different sources"), "{}", untext(&welcome.reason));
    until("the log says so", || server.log().contains("different sources"));
    // A newer client compares fingerprints itself and then speaks the server's version.
    let version = Version { minor: protocol::VERSION.minor + 1, ..protocol::VERSION };
    let welcome = greet(connect(), &Hello { version, ..other }).unwrap();
    assert_eq!(welcome.status, protocol::device::Answer::Ok as u32);
    assert_eq!((welcome.version, welcome.fingerprint), (protocol::VERSION, ours.fingerprint));
}

#[test]
fn other_protocols_are_disconnected_and_silent_connections_block_nobody() {
    let server = Server::start(&[]);
    let _silent: Vec<TcpStream> =
        (0..20).map(|_| TcpStream::connect(("127.0.0.1", server.port)).unwrap()).collect();
    let mut other = TcpStream::connect(("127.0.0.1", server.port)).unwrap();
    other.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    // Reset or closed, but not answered.
    let _ = other.read_to_end(&mut answer);
    assert!(answer.is_empty());
    TcpSession::connect(server.port).call(&SessionInfo {}).unwrap();
}

#[test]
fn a_guessed_token_is_refused() {
    let server = Server::start(&[]);
    let session = TcpSession::connect(server.port);
    let mut guess = session.token;
    guess[15] ^= 1;
    for token in [guess, [0; 16]] {
        let welcome =
            greet(TcpStream::connect(("127.0.0.1", server.port)).unwrap(), &hello(purpose::DATA, token, 0))
                .unwrap();
        assert_eq!(welcome.status, protocol::device::Answer::Denied as u32);
    }
    let token = session.token;
    drop(session);
    until("the session has ended", || server.sessions() == 0);
    let welcome =
        greet(TcpStream::connect(("127.0.0.1", server.port)).unwrap(), &hello(purpose::DATA, token, 0))
            .unwrap();
    assert_eq!(welcome.status, protocol::device::Answer::Denied as u32);
}

#[test]
fn sessions_beyond_the_limit_are_refused_until_one_ends() {
    let server = Server::start(&["--max-sessions=2"]);
    let first = LocalBridge::connect(&server.socket());
    let _second = TcpSession::connect(server.port);
    let refusal = TcpSession::try_connect(server.port).err().unwrap();
    assert!(refusal.contains("2 sessions"), "{refusal}");
    drop(first);
    until("the first has ended", || server.sessions() == 1);
    TcpSession::connect(server.port).call(&SessionInfo {}).unwrap();
}

#[test]
fn a_killed_worker_ends_only_its_own_session_and_is_replaced() {
    let server = Server::start(&[]);
    let mut local = LocalBridge::connect(&server.socket());
    local.call(&SessionInfo {}).unwrap();
    kill(Pid::from_raw(worker_of(&server, 0)), Signal::SIGKILL).unwrap();
    let (kind, reason) = local.frame();
    assert_eq!(kind, frame::BYE);
    let reason = String::from_utf8(reason).unwrap();
    assert!(reason.contains("signal 9"), "{reason}");

    until("the session is gone", || server.sessions() == 0);
    let mut other = LocalBridge::connect(&server.socket());
    let worker = worker_of(&server, 0);
    let mut tcp = TcpSession::connect(server.port);
    until("both are there", || server.sessions() == 2);
    let rows = server.status();
    let rows = rows["sessions"].as_array().unwrap();
    let second =
        rows.iter().map(|row| row["worker"].as_i64().unwrap() as i32).find(|pid| *pid != worker).unwrap();
    kill(Pid::from_raw(second), Signal::SIGABRT).unwrap();
    until("the session is lost", || tcp.lost().is_some());
    assert!(tcp.lost().unwrap().contains("signal 6"), "{:?}", tcp.lost());
    other.call(&SessionInfo {}).unwrap();
    until("the pool is filled again", || server.number("workers_ready") == 2);
    assert_eq!(server.number("workers_crashed"), 2);
}

#[test]
fn a_hundred_sessions_leave_nothing_behind() {
    let server = Server::start(&["--log=warn"]);
    until("the pool is filled", || server.number("workers_ready") == 2);
    let session = |i: usize| {
        if i.is_multiple_of(2) {
            LocalBridge::connect(&server.socket()).call(&SessionInfo {}).unwrap();
        } else {
            TcpSession::connect(server.port).call(&SessionInfo {}).unwrap();
        }
    };
    session(0);
    session(1);
    let settled = || {
        server.sessions() == 0
            && server.number("workers_ready") == 2
            && server.number("workers_starting") == 0
    };
    until("all is quiet", settled);
    // Threads end a moment after their sessions.
    until_idle(|| family(server.pid()));
    let before = holdings(&server);
    (0..100).for_each(session);
    until("all is quiet", settled);
    until("nothing is left", || holdings(&server) == before);
    assert_eq!(server.number("sessions_begun"), 102);
    assert_eq!(server.number("sessions_lost"), 0);
}

#[test]
fn a_region_is_released_only_when_nothing_reads_it() {
    let server = Server::start(&[]);
    let mut s = LocalBridge::connect(&server.socket());
    s.call(&MemGrow { device: 0, address: window(0), size: 2 << 20 }).unwrap();
    s.push(&MemAlloc { address: window(0), size: 4096 });
    let file = memfd(8192);
    nix::sys::uio::pwrite(&file, &[9; 8192], 0).unwrap();
    assert_eq!(s.add_region(7, &file, 8192), (0, String::new()));
    assert_ne!(s.add_region(7, &file, 8192).0, 0, "the id is in use");
    assert_ne!(s.add_region(8, &file, 8193).0, 0, "the file is shorter");
    let before = s.push(&StreamHostWait { stream: StreamId(0), ticket: TicketId(1) });
    let range = HostRange { place: Place::Region(7), offset: 4096, len: 4096 };
    let copy = s.push(&MemcpyHtoD { stream: StreamId(0), dst: window(0), src: HostIn::Range(range) });
    s.push(&StreamMark { stream: StreamId(0) });
    // Commands after the wait are held, and so is the memory that they name, once the worker has read them.
    s.call(&SessionInfo {}).unwrap();
    until("all that is not held is executed", || s.channel().progress().released() == before);
    assert_eq!((s.channel().progress().executed(), before), (copy - 1, copy - 1));
    s.ask_to_remove_region(7);
    s.socket.set_read_timeout(Some(std::time::Duration::from_millis(300))).unwrap();
    assert!(s.socket.read(&mut [0; 1]).is_err(), "acknowledged while a copy still needs it");
    s.socket.set_read_timeout(None).unwrap();
    s.push(&StreamHostSignal { ticket: TicketId(1) });
    let (kind, body) = s.frame();
    assert_eq!((kind, body[0]), (frame::ACK, 0));
    until("the source is released", || s.channel().progress().released() > copy);
    let bytes = s.call(&MemcpyDtoHInline { stream: StreamId(0), src: window(0), len: 4 }).unwrap().bytes.0;
    assert_eq!(bytes, [9; 4]);
    assert_ne!(s.remove_region(7).0, 0, "it is gone");
    s.push(&MemcpyHtoD { stream: StreamId(0), dst: window(0), src: HostIn::Range(range) });
    until("the session is lost", || s.lost().is_some());
    assert!(s.lost().unwrap().contains("Region(7)"), "{:?}", s.lost());
}

#[test]
fn a_bridge_that_disconnects_while_it_waits_for_a_region_ends_its_session() {
    let server = Server::start(&[]);
    for says_goodbye in [false, true] {
        let mut s = LocalBridge::connect(&server.socket());
        s.call(&MemGrow { device: 0, address: window(0), size: 2 << 20 }).unwrap();
        s.push(&MemAlloc { address: window(0), size: 4096 });
        assert_eq!(s.add_region(7, &memfd(4096), 4096), (0, String::new()));
        // Only the client could let this stream continue, and the copy after the wait holds the region.
        s.push(&StreamHostWait { stream: StreamId(0), ticket: TicketId(1) });
        let range = HostRange { place: Place::Region(7), offset: 0, len: 4096 };
        let copy = s.push(&MemcpyHtoD { stream: StreamId(0), dst: window(0), src: HostIn::Range(range) });
        s.call(&SessionInfo {}).unwrap();
        until("the copy is held", || s.channel().progress().executed() == copy - 1);
        s.ask_to_remove_region(7);
        if says_goodbye {
            send_frame(s.socket.as_fd(), frame::BYE, &[b"enough"], &[]).unwrap();
            s.socket.shutdown(std::net::Shutdown::Write).unwrap();
            until("the worker is gone", || server.sessions() == 0);
        }
        drop(s);
        until("the worker is gone", || server.sessions() == 0);
    }
    assert_eq!(server.number("sessions_lost"), 0);
}

#[test]
fn a_malformed_attachment_is_refused_with_a_reason() {
    let server = Server::start(&[]);
    let socket = UnixStream::connect(server.socket()).unwrap();
    assert_eq!(greet(&socket, &hello(purpose::LOCAL, [0; 16], 0)).unwrap().status, 0);
    let attach = Attach { memory_count: 1000, extent_count: u32::MAX, flags: 0, reserved: 0, size: u64::MAX };
    send_frame(socket.as_fd(), frame::ATTACH, &[attach.as_bytes()], &[]).unwrap();
    let mut body = Vec::new();
    let kind = recv_frame(socket.as_fd(), &mut body, &mut Vec::new()).unwrap();
    assert_eq!((kind, body[0]), (Some(frame::ACK), protocol::device::Answer::Invalid as u8));
    assert!(String::from_utf8_lossy(&body).contains("1000 entries"));
}

#[test]
fn too_much_data_ends_only_that_session() {
    let server = Server::start(&[]);
    let mut s = TcpSession::connect(server.port);
    s.call(&MemGrow { device: 0, address: window(0), size: 2 << 20 }).unwrap();
    s.push(&MemAlloc { address: window(0), size: 4096 });
    // For a command that names none: the data is dropped, and the session continues.
    let mark = s.push(&StreamMark { stream: StreamId(0) });
    s.send_data(0, DataHeader { seq: mark, offset: 0, piece: 0, len: 3 }, b"abc").unwrap();
    s.call(&StreamSynchronize { stream: StreamId(0) }).unwrap();
    assert!(s.lost().is_none());
    // Beyond what the command names, while the command's data is expected.
    s.push(&StreamHostWait { stream: StreamId(0), ticket: TicketId(1) });
    let most = !DATA_FLAGS;
    s.send_data(1, DataHeader { seq: mark + 1, offset: 0, piece: 0, len: most }, b"").unwrap();
    until("the session is lost", || s.lost().is_some());
    assert!(s.lost().unwrap().contains(&format!("a chunk of {most} bytes")), "{:?}", s.lost());
}

#[test]
fn a_dead_client_frees_its_worker_whatever_its_streams_wait_for() {
    let server = Server::start(&[]);
    let mut local = LocalBridge::connect(&server.socket());
    let mut tcp = TcpSession::connect(server.port);
    local.push(&StreamHostWait { stream: StreamId(0), ticket: TicketId(1) });
    local.push(&StreamMark { stream: StreamId(0) });
    tcp.call(&MemGrow { device: 0, address: window(0), size: 2 << 20 }).unwrap();
    tcp.push(&MemAlloc { address: window(0), size: 1 << 20 });
    // Its data will never come.
    tcp.chunk = usize::MAX;
    let range = tcp.arena(0, &[0; 1 << 20]);
    tcp.data.clear();
    let op = MemcpyHtoD { stream: StreamId(0), dst: window(0), src: HostIn::Range(range) };
    let mut body = Vec::new();
    protocol::ops::encode(&op, &mut body);
    tcp.record(3, MemcpyHtoD::INFO.opcode, NO_SLOT, &body).unwrap();
    drop(local);
    drop(tcp);
    until("both workers are gone", || server.sessions() == 0);
    until("the pool is filled again", || server.number("workers_ready") == 2);
}

#[test]
fn sigterm_lets_sessions_end_then_ends_them_with_a_reason() {
    let mut server = Server::start(&["--drain-seconds=600"]);
    let mut local = LocalBridge::connect(&server.socket());
    server.signal(Signal::SIGTERM);
    until("it drains", || server.status()["draining"] == true);
    let refusal = LocalBridge::try_connect(&server.socket()).err().unwrap();
    assert!(refusal.contains("shutting down"), "{refusal}");
    local.call(&SessionInfo {}).unwrap();
    // Their time is over when all this is done, however long it has taken.
    let mut operator = UnixStream::connect(server.path("admin")).unwrap();
    operator.write_all(b"{\"drain\":{\"seconds\":0}}").unwrap();
    operator.shutdown(std::net::Shutdown::Write).unwrap();
    until("the session is told", || local.lost().is_some());
    assert!(local.lost().unwrap().contains("rgpu-server has ended"), "{:?}", local.lost());
    assert!(server.wait().success());
    assert!(!server.socket().exists());
}

#[test]
fn without_a_gpu_cuda_fails_in_one_line_and_auto_uses_software() {
    if std::path::Path::new("/dev/nvidia0").exists() {
        // This machine has a GPU, so the test's case cannot occur here; the check on the GPU machine covers
        // the rest.
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let listen = format!("--listen=unix:{}", folder.path().join("s").display());
    let run = |backend: &str| std::process::Command::new(binary()).args([&listen, backend]).output().unwrap();
    let output = run("--backend=cuda");
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success());
    assert!(text.lines().any(|l| l.starts_with("rgpu-server: ") && l.contains("libcuda")), "{text}");
    let output = std::process::Command::new(binary()).arg("check").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.contains("would serve with software"), "{text}");
}

#[test]
fn a_worker_that_stays_when_its_client_is_gone_is_killed() {
    let server = Server::start(&["--workers=1"]);
    let mut client = LocalBridge::connect(&server.socket());
    client.call(&SessionInfo {}).unwrap();
    let worker = Pid::from_raw(server.status()["sessions"][0]["worker"].as_i64().unwrap() as i32);
    // It does not notice that its session is over, and nobody else may decide that it is: the client lives.
    kill(worker, Signal::SIGSTOP).unwrap();
    let other = LocalBridge::connect(&server.socket());
    drop(client);
    until("its session is over", || server.sessions() == 1);
    assert_eq!(kill(worker, None), Err(nix::errno::Errno::ESRCH));
    assert!(server.log().contains("does not end; killed"), "{}", server.log());
    drop(other);
    until("the other's session is over", || server.sessions() == 0);
    assert_eq!(server.log().matches("does not end; killed").count(), 1);
}

#[test]
fn a_worker_stays_while_somebody_may_go_on_with_its_session() {
    let server = Server::start(&["--workers=1"]);
    // A client that may come back, one that is gone for good, and one that says that it is.
    let mut clients: Vec<(LocalBridge, OwnedFd, Pid)> = Vec::new();
    for _ in 0..3 {
        let (mut client, presence) = LocalBridge::with_presence(&server.socket());
        client.call(&SessionInfo {}).unwrap();
        let sessions = server.status()["sessions"].as_array().unwrap().clone();
        let mut workers = sessions.iter().map(|row| Pid::from_raw(row["worker"].as_i64().unwrap() as i32));
        let worker = workers.find(|worker| clients.iter().all(|(.., other)| other != worker)).unwrap();
        // It does not notice that its session is over.
        kill(worker, Signal::SIGSTOP).unwrap();
        clients.push((client, presence, worker));
    }
    let workers: Vec<Pid> = clients.iter().map(|(.., worker)| *worker).collect();
    let mut presences: Vec<OwnedFd> = clients.into_iter().map(|(_, presence, _)| presence).collect();
    nix::unistd::write(&presences[2], &[1]).unwrap();
    drop(presences.remove(1));
    // The connection of the first was closed before the others were gone.
    until("the others' sessions are over", || server.sessions() == 1);
    let gone = |worker: &Pid| kill(*worker, None) == Err(nix::errno::Errno::ESRCH);
    assert_eq!(workers.iter().map(gone).collect::<Vec<_>>(), [false, true, true]);
    drop(presences);
    until("its session is over", || server.sessions() == 0);
    assert!(gone(&workers[0]));
    assert_eq!(server.log().matches("does not end; killed").count(), 3);
}

/// Runs a server that should not start. Returns its output.
fn refused(flags: &[&str]) -> String {
    refused_by(std::process::Command::new(binary()), flags)
}

/// The same, with this command.
fn refused_by(mut command: std::process::Command, flags: &[&str]) -> String {
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let listen = format!("--listen=unix:{}", folder.path().join("s").display());
    let output = command.args([&listen, "--backend=software", "--workers=1"]).args(flags).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success(), "{text}");
    text
}

#[test]
fn a_gpu_that_reaches_pageable_memory_is_not_served_without_a_sandbox() {
    let text = refused(&["--software-imitate=pageable-memory", "--sandbox=off"]);
    assert!(text.contains("attribute 88") && text.contains("--sandbox is off"), "{text}");
    // Calls that are only reported protect nobody.
    let text = refused(&["--software-imitate=pageable-memory", "--sandbox=report"]);
    assert!(text.contains("attribute 88") && text.contains("only reported"), "{text}");
    let server = Server::start(&["--software-imitate=pageable-memory"]);
    LocalBridge::connect(&server.socket()).call(&SessionInfo {}).unwrap();
}

#[test]
fn a_required_sandbox_that_is_not_there_keeps_the_server_from_starting() {
    let text = refused(&["--require-sandbox", "--sandbox=off"]);
    assert!(text.contains("--require-sandbox") && text.contains("--sandbox is off"), "{text}");
    // Of an ordinary user: without the right to give workers users, and limits, of their own.
    let file = std::fs::File::open(binary()).unwrap();
    nix::fcntl::fcntl(&file, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty())).unwrap();
    let mut command = std::process::Command::new(format!("/proc/self/fd/{}", file.as_raw_fd()));
    command.current_dir("/");
    if nix::unistd::geteuid().is_root() {
        command.uid(65534).gid(65534);
    }
    let text = refused_by(command, &["--require-sandbox"]);
    assert!(text.contains("--require-sandbox") && text.contains("it would run without"), "{text}");
}

#[test]
fn the_status_shows_what_the_kernel_says_about_each_worker() {
    let server = Server::start(&["--workers=1"]);
    until("a worker is ready", || server.number("workers_ready") == 1);
    let worker = server.status()["workers"][0].clone();
    assert_eq!(worker["stage"], "ready");
    let state = &worker["sandbox"];
    assert_eq!(state["no_new_privileges"], true);
    assert_eq!(state["capabilities"], 0);
    assert_eq!(state["core_limit"], 0);
    assert!(state["filters"].as_u64().unwrap() >= 2, "{state}");
    if nix::unistd::geteuid().is_root() {
        assert_eq!(state["namespaces"], serde_json::json!(["mnt", "pid", "ipc", "net"]));
        assert!(state["user"].as_u64().unwrap() >= 0x7000_0000, "{state}");
    }
}

#[test]
fn a_daemon_without_descriptors_ends_no_worker_and_notices_those_that_end() {
    /// `CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS`.
    const FLAGS: u32 = 6;
    let server = Server::start(&[]);
    let first = LocalBridge::connect(&server.socket());
    let of_first = worker_of(&server, 0);
    let mut sessions = [first, LocalBridge::connect(&server.socket())];
    let of_second = [0, 1].map(|at| worker_of(&server, at)).into_iter().find(|worker| *worker != of_first);
    let workers = [of_first, of_second.unwrap()];
    for session in &mut sessions {
        session.push(&EventCreate { context: ContextId(0), event: EventId(1), flags: FLAGS });
        session.call(&StreamSynchronize { stream: StreamId(0) }).unwrap();
    }
    // Otherwise something that is closed makes room.
    until_idle(|| family(server.pid()));
    let most = leave_no_descriptors(server.pid());
    // Their workers give the daemon a descriptor.
    let asked = sessions.each_mut().map(|session| session.send(1, &EventExport { event: EventId(1) }));
    let log_has = |what: &str, worker: i32| {
        let log = server.log();
        log.lines().any(|line| line.contains(what) && line.contains(&format!("worker={worker}")))
    };
    until("neither is heard", || workers.iter().all(|worker| log_has("is not heard", *worker)));
    kill(Pid::from_raw(workers[0]), Signal::SIGKILL).unwrap();
    until("its end is noticed", || log_has("was killed by signal 9", workers[0]));
    limit_descriptors(server.pid(), most);
    until("the other one goes on", || server.sessions() == 1);
    assert_eq!(sessions[1].wait(1, asked[1]).0, protocol::Status::SUCCESS);
}
