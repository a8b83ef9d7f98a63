//! What has no chapter of its own: the profiler's switch, capture mode, flushes.

use crate::abi::arguments::{non_null, put};
use crate::process::driver::driver;
use crate::process::{capture, context};
use client::Status;

api! {
    fn cuProfilerStart() {
        context::current().map(|_| ())
    }

    fn cuProfilerStop() {
        context::current().map(|_| ())
    }

    fn cuThreadExchangeStreamCaptureMode(mode: *mut u32) {
        driver()?;
        non_null(mode)?;
        let wanted = *mode;
        if wanted > 2 {
            return Err(Status::INVALID_VALUE);
        }
        let before = capture::exchange_mode(wanted);
        put(mode, before)
    }
}
