//! Functions of the program that are called in stream order.

use std::ffi::c_void;

use crate::abi::types::{HostFn, StreamCallback, UserData};
use crate::graph::node_work::Work;
use crate::graph::recording;
use crate::streams::{capture_rules, stream_table};
use crate::work::host_function::{self, Function};
use client::Status;

api! {
    fn cuLaunchHostFunc / cuLaunchHostFunc_ptsz(stream: usize, function: Option<HostFn>, data: *mut c_void) |pt| {
        let function = function.ok_or(Status::INVALID_VALUE)?;
        let (driver, context, _lent) = stream_table::ready_on(stream)?;
        let stream = stream_table::any(context, stream, pt)?;
        if let Some(capture) = stream.capture() {
            return recording::add(&capture, &stream, Work::Host(function, UserData(data)));
        }
        host_function::on(driver, stream, Function::Host(function), data)
    }

    fn cuStreamAddCallback / cuStreamAddCallback_ptsz(stream: usize, callback: Option<StreamCallback>, data: *mut c_void, flags: u32) |pt| {
        let callback = callback.ok_or(Status::INVALID_VALUE)?;
        if flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        let (driver, context, _lent) = stream_table::ready_on(stream)?;
        let on_stream = stream_table::any(context, stream, pt)?;
        capture_rules::forbid(&on_stream)?;
        host_function::on(driver, on_stream, Function::Callback(callback, stream), data)
    }
}
