//! A process whose session was refused stays refused. This is a separate test file because it concerns the
//! process's global session.

use protocol::device::{Answer, Response};
use rgpu_client::Status;
use rgpu_client::session;
use test_kit::native_host::{NativeHost, Next};

#[test]
fn a_refusal_is_final_for_its_process() {
    let full = NativeHost::start(Response::new(Answer::NoResources, "no room"), |_, _, _| Next::GoOn);
    // SAFETY: no other thread of this process accesses the environment now: this is the only test, and the
    // daemon's thread does not.
    unsafe { std::env::set_var("RGPU_SOCKET", &full.socket) };
    assert_eq!(session::open().err(), Some(Status::DEVICE_UNAVAILABLE));
    // There is room now, but a program whose call failed before would not know what to do with a session.
    let good = NativeHost::start(Response::new(Answer::Ok, ""), |_, _, _| Next::GoOn);
    // SAFETY: no other thread of this process accesses the environment now.
    unsafe { std::env::set_var("RGPU_SOCKET", &good.socket) };
    assert_eq!(session::open().err(), Some(Status::DEVICE_UNAVAILABLE));
}
