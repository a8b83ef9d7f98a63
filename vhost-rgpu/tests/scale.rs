//! The resources that vhost-rgpu uses for many idle sessions: bounded, and no CPU time. `RGPU_SCALE=512`
//! measures the figures in docs/benchmarks/tenants.md.

#![allow(clippy::unwrap_used, reason = "a test may fail where it stands")]

mod daemon;
mod guest;

use std::fmt::Write;
use std::path::PathBuf;
use std::sync::Arc;

use daemon::Daemon;
use guest::Guest;
use protocol::device::Answer;
use test_kit::channel::in_a_file;
use test_kit::native_client::{NativeClient, create_channel};
use test_kit::resources::{Resources, family, raise_descriptors, resources, scale, until_idle};
use test_kit::server::FakeServer;
use test_kit::*;
use zerocopy::IntoBytes;

/// Programs of each guest that use the GPU.
const PROGRAMS: usize = 8;

#[test]
fn an_idle_session_takes_bounded_resources_and_no_processor_time() {
    raise_descriptors();
    let count = scale(16);
    let server = FakeServer::good();
    let daemon = Daemon::start(&[
        "--server",
        &server.address.to_string(),
        "--name",
        "testvm",
        "--max-channels",
        &(count + 1).to_string(),
        "--max-channels-per-user",
        &(count + 1).to_string(),
    ]);
    let open = || {
        let native = NativeClient::connect(&daemon.native()).unwrap();
        let (file, view) = in_a_file(1 << 20, "scale-test");
        native.send(create_channel(view.geometry().size as u64).as_bytes(), &[&file]).unwrap();
        let (answer, reason, doorbell) = native.response().unwrap().unwrap();
        assert_eq!((answer, reason.as_str()), (Answer::Ok, ""));
        (native, view, doorbell)
    };
    let all = || family(daemon.pid());
    // The first one starts the process for this user's programs.
    let _first = open();
    until_idle(all);
    let before = resources(&all());
    let sessions: Vec<_> = (0..count).map(|_| open()).collect();
    assert_eq!(daemon.sessions(), count + 1);
    // No thread runs: an idle session uses no CPU time.
    until_idle(all);
    let taken = resources(&all()) - before;
    eprintln!("{count} idle sessions: {taken:?}");
    assert_eq!(taken.processes, 0, "{taken:?}");
    bounded(&taken, count);
    drop(sessions);
    until("all have ended", || daemon.sessions() == 1);
}

#[test]
fn idle_guests_take_bounded_resources_and_no_processor_time() {
    raise_descriptors();
    let guests = scale(16).div_ceil(PROGRAMS);
    let count = guests * PROGRAMS;
    let server = FakeServer::good();
    let folder = Arc::new(tempfile::tempdir().unwrap());
    let sockets: Vec<PathBuf> = (0..guests).map(|guest| folder.path().join(format!("vm{guest}"))).collect();
    let mut file = String::new();
    for (guest, socket) in sockets.iter().enumerate() {
        let (socket, server) = (socket.display(), &server.address);
        writeln!(file, "[[vm]]\nname = \"vm{guest}\"\nsocket = \"{socket}\"\nserver = \"{server}\"").unwrap();
    }
    let daemon = Daemon::configured(&folder, &file);
    let all = || family(daemon.pid());
    until_idle(all);
    let before = resources(&all());
    let mut guests: Vec<Guest> = sockets.iter().map(|socket| Guest::at_socket(socket)).collect();
    until_idle(all);
    let connected = resources(&all());
    let channels: Vec<_> = guests
        .iter_mut()
        .map(|guest| (0..PROGRAMS as u32).map(|at| guest.create(at)).collect::<Vec<_>>())
        .collect();
    assert_eq!(daemon.sessions(), count);
    until_idle(all);
    let open = resources(&all());
    eprintln!("{} guests: {:?}", guests.len(), connected - before);
    let taken = open - connected;
    eprintln!("{count} idle sessions of theirs: {taken:?}");
    // The keeper, and for each guest a device process and its guard, whether it has sessions or not.
    assert_eq!(connected.processes, 1 + 2 * guests.len());
    assert_eq!(taken.processes, 0, "{taken:?}");
    bounded(&taken, count);
    drop((channels, guests));
    until("all have ended", || daemon.sessions() == 0);
    until("only the keeper is left", || all().len() == 1);
}

/// Fails if so many idle sessions have taken more than documented.
fn bounded(taken: &Resources, count: usize) {
    assert!(taken.threads <= 8 * count && taken.descriptors <= 24 * count, "{taken:?}");
    assert!(taken.memory_kib <= 4096 * count as u64, "{taken:?}");
    assert_eq!(taken.pinned_kib, 0);
}
