//! What happens to sessions, waiting clients and the status when a device fails or gets too hot.

#![allow(clippy::unwrap_used)]

mod support;

use std::io::Write;
use std::path::PathBuf;

use nix::sys::stat::Mode;
use protocol::Status;
use protocol::handle::StreamId;
use protocol::ops::context::PrimaryReset;
use protocol::ops::device::SessionInfo;
use protocol::ops::stream::StreamSynchronize;
use support::*;
use test_kit::link::{LocalBridge, Session, TcpSession, Waiting};
use test_kit::*;

/// A server whose software devices fail on the test's request.
struct Rig {
    server: Server,
    events: PathBuf,
    _folder: tempfile::TempDir,
}

impl Rig {
    fn start(more: &[&str]) -> Rig {
        let folder = tempfile::tempdir().unwrap();
        let events = folder.path().join("events");
        nix::unistd::mkfifo(&events, Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
        let option = format!("--software-events={}", events.display());
        let server = Server::start(&[&[option.as_str()], more].concat());
        Rig { server, events, _folder: folder }
    }

    fn happens(&self, event: &str) {
        let mut fifo = std::fs::File::options().write(true).open(&self.events).unwrap();
        writeln!(fifo, "{event}").unwrap();
    }

    /// Devices that the status calls unhealthy, with the reason.
    fn unhealthy(&self) -> Vec<(u64, String)> {
        let status = self.server.status();
        let rows = status["devices_unhealthy"].as_array().unwrap();
        rows.iter()
            .map(|row| (row["device"].as_u64().unwrap(), row["reason"].as_str().unwrap().into()))
            .collect()
    }

    /// The devices of each session, in any order.
    fn devices(&self) -> Vec<String> {
        let status = self.server.status();
        let rows = status["sessions"].as_array().unwrap();
        let mut devices: Vec<String> =
            rows.iter().map(|row| row["devices"].as_str().unwrap().into()).collect();
        devices.sort();
        devices
    }
}

const SYNCHRONIZE: StreamSynchronize = StreamSynchronize { stream: StreamId(0) };

#[test]
fn a_session_whose_device_fails_gets_cudas_error_and_no_other_session_does() {
    for (event, status) in [("xid 79", 999), ("lost", 999), ("ecc", 214), ("xid 95", 214), ("nvlink 3", 220)]
    {
        let rig = Rig::start(&["--software-devices=2", "--session-devices=1"]);
        let mut failing = LocalBridge::connect(&rig.server.socket());
        let mut other = TcpSession::connect(rig.server.port);
        assert_eq!(rig.devices(), ["0", "1"]);
        run_endlessly(&mut failing);
        let waits = failing.send(1, &SYNCHRONIZE);
        rig.happens(&format!("0 {event}"));
        assert_eq!(failing.wait(1, waits).0, Status(status), "{event}");
        assert_eq!(failing.call(&SYNCHRONIZE), Err(Status(status)), "{event}");
        assert_eq!(failing.call(&PrimaryReset { device: 0 }).err(), Some(Status(status)), "no reset helps");
        other.call(&SYNCHRONIZE).unwrap();
        // The same client's next session gets the remaining devices.
        let mut next = LocalBridge::connect(&rig.server.socket());
        next.call(&SYNCHRONIZE).unwrap();
        assert_eq!(rig.devices(), ["0", "1", "1"]);
        let unhealthy = rig.unhealthy();
        assert!(matches!(&unhealthy[..], [(0, _)]), "{unhealthy:?}");
        until("the log says so", || rig.server.log().contains("unhealthy: "));
        other.call(&SYNCHRONIZE).unwrap();
    }
}

#[test]
fn what_a_program_has_done_wrong_is_not_the_devices_fault() {
    let rig = Rig::start(&[]);
    let mut session = LocalBridge::connect(&rig.server.socket());
    for event in ["0 xid 13", "0 xid 31", "0 xid 137", "7 xid 79", "nonsense"] {
        rig.happens(event);
    }
    rig.happens("0 hot");
    until("all events have been read", || !rig.unhealthy().is_empty());
    rig.happens("0 cool");
    until("it is well again", || rig.unhealthy().is_empty());
    session.call(&SYNCHRONIZE).unwrap();
    LocalBridge::connect(&rig.server.socket()).call(&SYNCHRONIZE).unwrap();
}

#[test]
fn a_device_that_needs_a_reset_drains_and_newcomers_are_told_why() {
    let rig = Rig::start(&[]);
    let mut session = LocalBridge::connect(&rig.server.socket());
    rig.happens("0 recovery 1");
    until("it is noticed", || !rig.unhealthy().is_empty());
    let refusal = TcpSession::try_connect(rig.server.port).err().unwrap();
    assert!(refusal.contains("no healthy device") && refusal.contains("a reset of the GPU"), "{refusal}");
    until("no worker is kept ready for it, or started", || {
        rig.server.number("workers_ready") == 0 && rig.server.number("workers_starting") == 0
    });
    // Running sessions continue to their end, and NVML still reports the device.
    run_endlessly(&mut session);
    assert_eq!(session.call(&SessionInfo {}).unwrap().device_count, 1);
    let nvml = Waiting::ask(&rig.server.socket(), protocol::link::wish::NVML_ONLY).served().0;
    assert!(nvml.is_ok(), "{:?}", nvml.err());
    drop((session, nvml));
    until("it has drained", || rig.server.sessions() == 0);
    assert_eq!(rig.server.number("workers_crashed"), 0);
}

#[test]
fn a_client_waits_for_a_device_that_is_too_hot() {
    let rig = Rig::start(&["--wait-seconds=120"]);
    rig.happens("0 hot");
    until("it is noticed", || !rig.unhealthy().is_empty());
    let waiting = Waiting::ask(&rig.server.socket(), 0);
    until("it waits", || rig.server.number("sessions_waiting") == 1);
    rig.happens("0 cool");
    let (served, _) = waiting.served();
    served.unwrap().call(&SYNCHRONIZE).unwrap();
    assert_eq!(rig.unhealthy(), []);
    assert_eq!(rig.server.number("workers_crashed"), 0);
}
