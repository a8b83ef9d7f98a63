//! What many idle sessions cost a server: bounded resources, and no processor time. `RGPU_SCALE=512` measures
//! the figures in docs/benchmarks/tenants.md.

#![allow(clippy::unwrap_used)]

mod support;

use protocol::handle::StreamId;
use protocol::ops::memory::{MemGrow, window};
use protocol::ops::stream::StreamSynchronize;
use support::*;
use test_kit::link::{LocalBridge, Session, TcpSession};
use test_kit::resources::{family, raise_descriptors, resources, scale, until_idle};
use test_kit::*;

/// Does some work: allocates memory and uses a stream.
fn work<S: Session>(mut session: S) -> S {
    session.call(&MemGrow { device: 0, address: window(0), size: 2 << 20 }).unwrap();
    session.call(&StreamSynchronize { stream: StreamId(0) }).unwrap();
    session
}

/// Opens sessions, and returns what each costs the server: in the daemon itself, and in its other processes.
fn measure<S: Session>(name: &str, connect: impl Fn(&Server) -> S) -> [test_kit::resources::Resources; 2] {
    raise_descriptors();
    let count = scale(16);
    let most = format!("--max-sessions={count}");
    let server = Server::start(&["--log=warn", "--workers=1", &most, "--client-sessions=0"]);
    let daemon = || vec![server.pid()];
    let others = || family(server.pid()).split_off(1);
    let settled = || {
        until("one worker is ready", || {
            server.number("workers_ready") == 1 && server.number("workers_starting") == 0
        });
        until_idle(|| family(server.pid()));
    };
    settled();
    let before = [resources(&daemon()), resources(&others())];
    let sessions: Vec<S> = (0..count).map(|_| work(connect(&server))).collect();
    assert_eq!(server.sessions(), count);
    // No thread runs: an idle session takes no processor time.
    settled();
    let after = [resources(&daemon()), resources(&others())];
    let taken = [after[0] - before[0], after[1] - before[1]];
    eprintln!(
        "{count} idle sessions over {name}: the daemon {:?}, its other processes {:?}",
        taken[0], taken[1]
    );
    drop(sessions);
    until("all have ended", || server.sessions() == 0);
    taken
}

fn check([daemon, others]: [test_kit::resources::Resources; 2], threads: usize, descriptors: usize) {
    let count = scale(16);
    // A worker and its sandbox's guard.
    assert!(others.processes <= 2 * count, "{others:?}");
    // A thread of the daemon watches each worker. The rest: a worker's socket, connection, pages and cgroup,
    // and duplicates of four of these for the next daemon.
    assert!(daemon.threads <= count && daemon.descriptors <= 12 * count, "{daemon:?}");
    assert!(daemon.memory_kib <= 256 * count as u64 + 8192, "{daemon:?}");
    assert!(others.threads <= threads * count && others.descriptors <= descriptors * count, "{others:?}");
    // Unoptimized code is larger and is shared by fewer processes.
    assert!(others.memory_kib <= 24_576 * count as u64, "{others:?}");
    assert_eq!((daemon.pinned_kib, others.pinned_kib), (0, 0));
}

#[test]
fn an_idle_local_session_takes_bounded_resources_and_no_processor_time() {
    check(measure("a Unix socket", |server| LocalBridge::connect(&server.socket())), 24, 48);
}

#[test]
fn an_idle_session_over_tcp_takes_bounded_resources_and_no_processor_time() {
    check(measure("TCP", |server| TcpSession::connect(server.port)), 32, 48);
}
