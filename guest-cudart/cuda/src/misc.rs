//! What has no chapter of its own: the profiler's switch, capture mode, flushes.

use std::cell::Cell;

use crate::state::driver;
use crate::{context, non_null, put};
use client::Status;

thread_local! {
    static CAPTURE_MODE: Cell<u32> = const { Cell::new(0) };
}

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
        let before = CAPTURE_MODE.try_with(|current| current.replace(wanted)).unwrap_or(0);
        put(mode, before)
    }
}
