//! A host that has no descriptor left for a session. The only test here, because it lowers the limit of its
//! process.

#![allow(clippy::unwrap_used, reason = "a test may fail where it stands")]

use std::fs::File;
use std::sync::mpsc;

use nix::poll::PollFd;
use nix::sched::{CloneFlags, unshare};
use nix::sys::resource::{Resource, setrlimit};
use protocol::device::Extent;
use rgpu_host_bridge::bridge::{Prepared, RegionMemory, SessionConfig, Turn, Wakeup};
use test_kit::session::channel;
use test_kit::tcp_server::TcpServer;
use test_kit::until;

/// Descriptors that a thread and those that it starts may have open.
const LIMIT: u64 = 256;
/// More than a session takes when it begins.
const ENOUGH: usize = 30;

/// Waits its turn.
struct Patient;

impl Turn for Patient {
    fn wait(&mut self, _server: &str, _ahead: u32) {}

    fn given_up(&self) -> Option<PollFd<'_>> {
        None
    }
}

/// Opens descriptors until only `spare` more can be opened.
fn take_all_but(spare: usize) -> Vec<File> {
    let mut taken: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    taken.truncate(taken.len() - spare);
    taken
}

/// Begins a session with only `spare` descriptors, once its data connections stand, and ends it. Runs in a
/// thread that gets descriptors of its own: those of the server, which is in this process, too, are not
/// affected. Returns whether it began.
fn begins(config: &SessionConfig, spare: usize, data_stands: &mpsc::Receiver<()>) -> bool {
    unshare(CloneFlags::CLONE_FILES).unwrap();
    let (memories, channel) = channel(1 << 20);
    let opened = Prepared::connect(config, &channel, &mut Patient).unwrap().open().unwrap();
    // After that no other thread of the session opens a descriptor.
    data_stands.recv().unwrap();
    let taken = take_all_but(spare);
    let session = opened.start(channel, Wakeup::Futex, Box::new(|_| {}));
    // Only a session that has begun registers it.
    let extents = vec![Extent { addr: 0, len: 4096 }];
    let region = RegionMemory { memories, extents, size: 4096, own_memory: false, read_only: false };
    let begun = session.as_ref().is_ok_and(|session| session.register_region(1, region).is_ok());
    drop(taken);
    begun
}

#[test]
fn a_server_learns_that_a_session_could_not_begin_whichever_descriptor_it_lacked() {
    setrlimit(Resource::RLIMIT_NOFILE, LIMIT, LIMIT).unwrap();
    let server = TcpServer::start();
    let mut failed = 0;
    for spare in 0..ENOUGH {
        server.hold_data();
        let (tell, data_stands) = mpsc::channel();
        let config = server.config.clone();
        let begins = std::thread::spawn(move || begins(&config, spare, &data_stands));
        until("its data connections have come", || server.held() == 3);
        server.release_data();
        tell.send(()).unwrap();
        failed += usize::from(!begins.join().unwrap());
        until("the server was told that it has ended", || {
            server.farewells() >= failed && server.ended() == spare + 1
        });
    }
    assert!((1..ENOUGH).contains(&failed), "{failed} have not begun");
}
