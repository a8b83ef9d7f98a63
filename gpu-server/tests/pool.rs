//! The pool and its queue: who gets a worker, who waits, and what is created only on demand.
//!
//! The software GPU imitates contexts that take long to create. Where a test sets ten minutes, nothing in it
//! waits for one.

#![allow(clippy::unwrap_used)]

mod support;

use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};

use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::unistd::Pid;
use protocol::Status;
use protocol::device::Answer;
use protocol::link::{Hello, purpose, wish};
use protocol::ops::context::PrimaryReset;
use protocol::ops::device::*;
use protocol::ops::memory::*;
use protocol::ops::nvml::NvmlSystem;
use support::*;
use test_kit::link::{LocalBridge, Session, TcpSession, Waiting, hello, say_hello};
use test_kit::*;

/// Contexts that no test waits for.
const ENDLESS: &str = "--software-imitate=context-ms=600000";

/// Contexts that workers created, by device, according to the log.
fn contexts_made(server: &Server, device: u32) -> usize {
    let made = format!("making a context of device {device}");
    server.log().lines().filter(|line| line.ends_with(&made)).count()
}

#[test]
fn thirty_two_programs_that_start_together_are_all_served() {
    const PROGRAMS: usize = 32;
    let folder = tempfile::tempdir().unwrap();
    let events = folder.path().join("events");
    nix::unistd::mkfifo(&events, Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
    let option = format!("--software-events={}", events.display());
    let server = Server::start(&["--workers=2", "--software-imitate=context-ms=1000", &option]);
    // They come while the device is too hot, so that each has its place before the first is served.
    let happens = |event: &str| std::fs::write(&events, format!("0 {event}\n")).unwrap();
    happens("hot");
    until("it is noticed", || {
        server.status()["devices_unhealthy"].as_array().is_some_and(|all| all.len() == 1)
    });
    let wait = AtomicUsize::new(0);
    let (sessions, places): (Vec<_>, Vec<_>) = std::thread::scope(|scope| {
        let program = || {
            let waiting = Waiting::ask(&server.socket(), 0);
            let heard = waiting.heard();
            assert_eq!(heard.status, Answer::Waiting as u32);
            wait.fetch_add(1, Ordering::SeqCst);
            let (session, places) = waiting.served();
            (session, [vec![heard.ahead], places].concat())
        };
        let programs: Vec<_> = (0..PROGRAMS).map(|_| scope.spawn(program)).collect();
        until("all of them wait", || wait.load(Ordering::SeqCst) == PROGRAMS);
        happens("cool");
        programs.into_iter().map(|program| program.join().unwrap()).unzip()
    });
    for session in sessions {
        session.unwrap().call(&SessionInfo {}).unwrap();
    }
    for places in &places {
        assert!(places.is_sorted_by(|before, after| before >= after), "a place got worse: {places:?}");
    }
    let mut first: Vec<u32> = places.iter().map(|places| places[0]).collect();
    first.sort_unstable();
    assert!(first.into_iter().eq(0..PROGRAMS as u32), "{places:?}");
    assert_eq!(server.number("sessions_begun"), PROGRAMS as u64);
}

#[test]
fn a_client_without_queue_support_still_gets_its_session() {
    let server = Server::start(&["--workers=0", "--software-imitate=context-ms=300"]);
    LocalBridge::connect(&server.socket()).call(&SessionInfo {}).unwrap();
    TcpSession::connect(server.port).call(&SessionInfo {}).unwrap();
}

#[test]
fn a_client_that_gives_up_leaves_the_queue_and_the_others_move_up() {
    let server = Server::start(&["--workers=1", ENDLESS]);
    let mut waiting = Vec::new();
    for place in 0..3 {
        let client = Waiting::ask(&server.socket(), 0);
        let heard = client.heard();
        assert_eq!((Answer::from_number(heard.status), heard.ahead), (Answer::Waiting, place));
        waiting.push(client);
    }
    waiting.remove(0);
    until("it has left", || server.number("sessions_waiting") == 2);
    for (place, client) in (0..).zip(&waiting) {
        until("it has moved up", || client.heard().ahead == place);
    }
    let tcp = TcpStream::connect(("127.0.0.1", server.port)).unwrap();
    let hello = Hello { wishes: wish::MAY_WAIT, ..hello(purpose::CONTROL, [0; 16], 0) };
    say_hello(&tcp, &hello).unwrap();
    until("it waits", || server.number("sessions_waiting") == 3);
    drop(tcp);
    until("it has left", || server.number("sessions_waiting") == 2);
}

#[test]
fn waiting_costs_the_daemon_a_descriptor_and_no_thread() {
    let server = Server::start(&["--workers=0", "--max-sessions=200", ENDLESS]);
    let first = Waiting::ask(&server.socket(), 0);
    first.heard();
    until("workers start", || server.number("workers_starting") >= 1);
    let clients: Vec<Waiting> = (0..100).map(|_| Waiting::ask(&server.socket(), 0)).collect();
    clients.iter().for_each(|client| assert_eq!(client.heard().status, Answer::Waiting as u32));
    // One for each starting worker, and those that the daemon always has.
    until("handshakes have ended", || server.resources().1 <= server.children().len() + 14);
}

#[test]
fn clients_are_refused_with_the_reason_when_workers_keep_crashing() {
    let server = Server::start(&["--workers=0", ENDLESS]);
    let client = Waiting::ask(&server.socket(), 0);
    let asked = std::thread::spawn(|| client.served());
    until("the client is answered", || {
        for pid in server.children() {
            // It may already be gone.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        asked.is_finished()
    });
    let reason = asked.join().unwrap().0.err().unwrap();
    assert!(reason.contains("could not be started") && reason.contains("signal 9"), "{reason}");
}

#[test]
fn a_queue_without_progress_is_refused() {
    let server = Server::start(&["--workers=1", "--wait-seconds=1", ENDLESS]);
    let reason = Waiting::ask(&server.socket(), 0).served().0.err().unwrap();
    assert!(reason.contains("no worker became ready within 1 s (--wait-seconds)"), "{reason}");
}

#[test]
fn nvml_is_answered_while_others_wait_and_its_worker_refuses_everything_else() {
    let server = Server::start(&["--workers=1", "--log=debug", ENDLESS]);
    let waiting: Vec<Waiting> = (0..4).map(|_| Waiting::ask(&server.socket(), 0)).collect();
    waiting.iter().for_each(|client| assert_eq!(client.heard().status, Answer::Waiting as u32));
    let mut nvml = Waiting::ask(&server.socket(), wish::NVML_ONLY).served().0.unwrap();
    assert_eq!(nvml.call(&NvmlSystem {}).unwrap().device_count, 1);
    assert_eq!(nvml.call(&MemGetInfo { device: 0 }).err(), Some(Status::NOT_PERMITTED));
    let grow = MemGrow { device: 0, address: window(0), size: 2 << 20 };
    assert_eq!(nvml.call(&grow).err(), Some(Status::NOT_PERMITTED));
    assert_eq!(nvml.call(&NvmlSystem {}).unwrap().device_count, 1);
    let row = &server.status()["sessions"][0];
    assert_eq!(row["kind"], "nvml");
    assert_eq!((server.number("workers_ready"), server.number("sessions_waiting")), (0, 4));
}

#[test]
fn contexts_are_created_on_demand_and_only_on_that_device() {
    let server = Server::start(&["--workers=1", "--software-devices=4", "--log=debug"]);
    // The log comes a moment later.
    let made = |expected: [usize; 4]| {
        let made = || [0, 1, 2, 3].map(|device| contexts_made(&server, device));
        until("contexts are made", || made() >= expected);
        assert_eq!(made(), expected);
    };
    until("a worker is ready", || server.number("workers_ready") == 1);
    made([1, 0, 0, 0]);
    let mut session = LocalBridge::connect(&server.socket());
    until("a spare one is ready", || server.number("workers_ready") == 1);
    for device in 0..4 {
        session.call(&DeviceInfo { device }).unwrap();
    }
    session.call(&PeerInfo { device: 1, peer: 2 }).unwrap();
    made([2, 0, 0, 0]);
    session.call(&MemGrow { device: 2, address: window(2), size: 2 << 20 }).unwrap();
    made([2, 0, 1, 0]);
    // A reset creates no new one; the next use does.
    session.call(&PrimaryReset { device: 2 }).unwrap();
    made([2, 0, 1, 0]);
    session.call(&MemGrow { device: 2, address: window(2), size: 2 << 20 }).unwrap();
    made([2, 0, 2, 0]);
}

#[test]
fn a_server_without_spare_workers_starts_one_when_a_client_asks() {
    let server = Server::start(&["--workers=0", "--first-workers=1"]);
    until("the first is ready", || server.number("workers_ready") == 1);
    let mut first = LocalBridge::connect(&server.socket());
    first.call(&SessionInfo {}).unwrap();
    assert_eq!((server.number("workers_ready"), server.number("workers_starting")), (0, 0));
    assert_eq!(server.children().len(), 1);
    let mut second = LocalBridge::connect(&server.socket());
    second.call(&SessionInfo {}).unwrap();
    assert_eq!(server.children().len(), 2);
}

#[test]
fn a_server_that_ends_kills_workers_that_are_still_starting() {
    let mut server = Server::start(&["--workers=2", ENDLESS]);
    // A process exists a moment before the daemon has it in its table.
    let known = || server.status()["workers"].as_array().map_or(0, Vec::len);
    until("workers prepare", || server.children().len() == 2 && known() == 2);
    let preparing = server.children();
    let waits = Waiting::ask(&server.socket(), 0);
    waits.heard();
    server.signal(Signal::SIGTERM);
    let reason = waits.served().0.err().unwrap();
    assert!(reason.contains("shutting down"), "{reason}");
    assert!(server.wait().success());
    let log = server.log();
    assert!(log.contains("workers without a session"), "{log}");
    until("they are gone", || {
        preparing.iter().all(|pid| {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            status.is_empty() || status.contains("State:\tZ")
        })
    });
}

#[test]
fn silent_connections_do_not_block_others() {
    let server = Server::start(&[]);
    let _silent: Vec<TcpStream> =
        (0..600).map(|_| TcpStream::connect(("127.0.0.1", server.port)).unwrap()).collect();
    TcpSession::connect(server.port).call(&SessionInfo {}).unwrap();
    LocalBridge::connect(&server.socket()).call(&SessionInfo {}).unwrap();
}
