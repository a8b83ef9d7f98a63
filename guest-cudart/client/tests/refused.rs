//! A process whose session was refused stays refused. A test file of its own, since it is about the one session of a process.

use protocol::device::{Answer, Response};
use rgpu_client::Status;
use rgpu_client::session;
use test_kit::native_host::{NativeHost, Next};

#[test]
fn a_refusal_is_final_for_its_process() {
    let full = NativeHost::start(Response::new(Answer::NoResources, "no room"), |_, _, _| Next::GoOn);
    // SAFETY: no other thread of this process reads or writes the environment now: this is the only test, and the daemon's thread does neither.
    unsafe { std::env::set_var("RGPU_SOCKET", &full.socket) };
    assert_eq!(session::open().err(), Some(Status::DEVICE_UNAVAILABLE));
    // There is room now, and a program that was told otherwise does not know what to do with it.
    let good = NativeHost::start(Response::new(Answer::Ok, ""), |_, _, _| Next::GoOn);
    // SAFETY: as above.
    unsafe { std::env::set_var("RGPU_SOCKET", &good.socket) };
    assert_eq!(session::open().err(), Some(Status::DEVICE_UNAVAILABLE));
    assert!(session::current().is_none());
}
