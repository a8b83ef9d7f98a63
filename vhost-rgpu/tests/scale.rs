//! The resources that vhost-rgpu uses for many idle sessions: bounded, and no CPU time. `RGPU_SCALE=512`
//! measures the figures in docs/benchmarks/tenants.md.

#![allow(clippy::unwrap_used, reason = "a test may fail where it stands")]

mod daemon;

use daemon::Daemon;
use protocol::device::Answer;
use test_kit::channel::in_a_file;
use test_kit::native_client::{NativeClient, create_channel};
use test_kit::resources::{family, raise_descriptors, resources, scale, until_idle};
use test_kit::server::FakeServer;
use test_kit::*;
use zerocopy::IntoBytes;

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
    assert!(taken.threads <= 8 * count && taken.descriptors <= 24 * count, "{taken:?}");
    assert!(taken.memory_kib <= 4096 * count as u64, "{taken:?}");
    assert_eq!(taken.pinned_kib, 0);
    drop(sessions);
    until("all have ended", || daemon.sessions() == 1);
}
