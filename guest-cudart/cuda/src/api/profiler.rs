//! The profiler's switches, and the capture mode of a thread.

use crate::abi::arguments::InOut;
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

    fn cuThreadExchangeStreamCaptureMode(mode: InOut<u32>) {
        driver()?;
        let wanted = mode.get()?;
        if wanted > 2 {
            return Err(Status::INVALID_VALUE);
        }
        let before = capture::exchange_mode(wanted);
        mode.put(before)
    }
}
