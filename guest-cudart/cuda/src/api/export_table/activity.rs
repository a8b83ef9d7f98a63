//! The private table for rgpu's own libcupti.

use std::ffi::{CStr, c_char, c_void};

use super::{Slot, Table, runtime_hooks, table};
use crate::abi::arguments::put;
use crate::abi::result::{Result, finish};
use crate::code::library;
use crate::graph::told;
use crate::process::{context, driver};
use crate::streams::stream_table;
use crate::work::activity::{self, DeviceRecord};
use client::Status;
use client::activity::{Observer, ResourceObserver};

/// Sets the observer that is called for each CUDA call. NULL removes it.
unsafe extern "C" fn observe(observer: *const Observer) -> u32 {
    // SAFETY: NULL, or a static of a library that is never closed.
    client::activity::observe(unsafe { observer.as_ref() }, kernel_of);
    runtime_hooks::want(!observer.is_null());
    0
}

/// Names the kernel that a function launches. NULL if it launches none; no name if there is no such kernel.
unsafe extern "C" fn kernel_of(function: *const c_char, arguments: *const c_void) -> *const c_char {
    // SAFETY: a function's name, and arguments of that function.
    let launched = unsafe {
        let words = arguments.cast::<usize>();
        match CStr::from_ptr(function).to_bytes() {
            b"cuLaunchKernel"
            | b"cuLaunchKernel_ptsz"
            | b"cuLaunchCooperativeKernel"
            | b"cuLaunchCooperativeKernel_ptsz" => *words,
            b"cuLaunchKernelEx" | b"cuLaunchKernelEx_ptsz" => *words.add(1),
            _ => return std::ptr::null(),
        }
    };
    library::name_of(launched).unwrap_or(c"".as_ptr())
}

/// The calling thread's current context and CUPTI's number for it. Both are 0 if there is none.
unsafe extern "C" fn current_context(context_id: *mut u32) -> usize {
    let number = context::current().map_or(0, |context| activity::context_number(context.device));
    // SAFETY: NULL, or the caller's place for a number.
    if let Some(place) = unsafe { context_id.as_mut() } {
        *place = number;
    }
    context::current_handle()
}

extern "C" fn start() -> u32 {
    finish("start of recording", activity::start())
}

extern "C" fn stop() -> u32 {
    finish("end of recording", activity::stop())
}

/// Calls `sink` with `user` and each record.
unsafe extern "C" fn read(
    flush: u32,
    sink: Option<unsafe extern "C" fn(*mut c_void, *const DeviceRecord)>,
    user: *mut c_void,
) -> u32 {
    let result: Result = (|| {
        let sink = sink.ok_or(Status::INVALID_VALUE)?;
        // SAFETY: the caller's function, called with the caller's own argument.
        activity::read(flush != 0, |record| unsafe { sink(user, record) })
    })();
    finish("reading of records", result)
}

extern "C" fn dropped() -> u64 {
    activity::dropped()
}

/// CUPTI's number for a context, and its device's ordinal. 0 is the current context.
unsafe extern "C" fn context_ids(handle: usize, context_id: *mut u32, device: *mut u32) -> u32 {
    let result: Result = (|| {
        driver::driver()?;
        let context = if handle == 0 { context::current()? } else { context::of(handle)? };
        // SAFETY: the caller passes two places for numbers.
        unsafe {
            put(context_id, activity::context_number(context.device))?;
            put(device, context.device)
        }
    })();
    finish("context id", result)
}

/// CUPTI's number for a stream.
unsafe extern "C" fn stream_id(stream: usize, per_thread: u32, id: *mut u32) -> u32 {
    let result: Result = (|| {
        // Whatever a profiler asks, captures go on.
        let stream = stream_table::asked(stream, per_thread != 0)?;
        // SAFETY: the caller passes a place for a number.
        unsafe { put(id, activity::stream_number(stream.id.0)) }
    })();
    finish("stream id", result)
}

/// Sets the observer that is called for each new context, graph, node and instance. NULL removes it.
extern "C" fn observe_resources(observer: Option<ResourceObserver>) -> u32 {
    client::activity::observe_resources(observer);
    0
}

/// The number of a graph or an instance.
unsafe extern "C" fn graph_id(handle: usize, id: *mut u32) -> u32 {
    // SAFETY: the caller passes a place for a number.
    finish("graph id", told::number(handle).and_then(|number| unsafe { put(id, number) }))
}

/// The number of a graph's node.
unsafe extern "C" fn graph_node_id(node: usize, id: *mut u64) -> u32 {
    // SAFETY: the caller passes a place for a number.
    finish("graph node id", told::node_number(node).and_then(|number| unsafe { put(id, number) }))
}

pub(super) static ACTIVITY: Table<12> = table(&[
    (1, observe as Slot),
    (2, start as Slot),
    (3, stop as Slot),
    (4, read as Slot),
    (5, dropped as Slot),
    (6, context_ids as Slot),
    (7, stream_id as Slot),
    (8, observe_resources as Slot),
    (9, current_context as Slot),
    (10, graph_id as Slot),
    (11, graph_node_id as Slot),
]);
