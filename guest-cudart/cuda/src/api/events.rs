//! Events.

use std::sync::Arc;

use crate::abi::arguments::Out;
use crate::abi::result::{Result, code};
use crate::graph::node_work::Work;
use crate::graph::recording;
use crate::memory::managed::shared_blocks;
use crate::process::device_attributes::attr;
use crate::process::driver::{self, driver};
use crate::process::{capture, context, host_calls, ids, stream};
use crate::streams::event::{self, DISABLE_TIMING, EVENTS, INTERPROCESS};
use crate::streams::stream_table;
use client::Status;
use client::ops::event::{EventDestroy, EventElapsed};

pub(crate) fn record(handle: usize, stream: usize, per_thread: bool, flags: u32) -> Result {
    let event = event::of(handle)?;
    // 1 is CU_EVENT_RECORD_EXTERNAL, which only applies to captures.
    if flags & !1 != 0 {
        return Err(Status::INVALID_VALUE);
    }
    driver()?;
    let stream = match stream {
        // A NULL stream is that of the event's context.
        0 | stream::LEGACY | stream::PER_THREAD => {
            stream_table::any(context::current()?, stream, per_thread)?
        }
        handle => stream_table::any(event.context, handle, per_thread)?,
    };
    stream.session().check()?;
    stream.context.deferred()?;
    if let Some(capture) = stream.capture() {
        // Like all work on the stream, until the program ends the capture.
        capture.check()?;
        if flags != 0 {
            return recording::add(&capture, &stream, Work::Record(handle));
        }
        event::record_in(&event, capture, &stream);
        return Ok(());
    }
    if flags != 0 {
        return Err(code::ILLEGAL_STATE);
    }
    event::record_on(&event, stream)?;
    event.ask_ahead();
    Ok(())
}

pub(crate) fn elapsed(milliseconds: Out<f32>, start: usize, end: usize) -> Result {
    milliseconds.required()?;
    let (start, end) = (event::of(start)?, event::of(end)?);
    let driver = driver()?;
    start.context.session().check()?;
    start.check()?;
    end.check()?;
    start.context.deferred()?;
    if (start.flags | end.flags) & DISABLE_TIMING != 0 {
        return Err(Status::INVALID_HANDLE);
    }
    let (Some((_, from)), Some((_, to))) = (start.last(), end.last()) else {
        return Err(Status::INVALID_HANDLE);
    };
    let records = (from, to);
    if start.context.device != end.context.device {
        return Err(Status::INVALID_HANDLE);
    }
    if !start.is_over()? || !end.is_over()? {
        return Err(Status::NOT_READY);
    }
    shared_blocks::after_wait(driver);
    let time = match end.time_since(&start, records) {
        Some(time) => time,
        None => {
            let reply = end.context.session().call(&EventElapsed { start: start.id, end: end.id })?;
            end.keep_time(&start, records, reply.milliseconds, false);
            reply.milliseconds
        }
    };
    milliseconds.put(time)
}

api! {
    fn cuEventCreate(event: Out<usize>, flags: u32) {
        event.required()?;
        if flags & !7 != 0 || flags & INTERPROCESS != 0 && flags & DISABLE_TIMING == 0 {
            return Err(Status::INVALID_VALUE);
        }
        let (_, context) = context::ready()?;
        let device = driver::device(context.device as i32)?;
        if flags & INTERPROCESS != 0 && device.attribute(attr::IPC_EVENT_SUPPORTED) == 0 {
            return Err(Status::NOT_SUPPORTED);
        }
        event.put(EVENTS.insert(Arc::new(event::make(context, flags)?)).ok_or(Status::OUT_OF_MEMORY)?)
    }

    fn cuEventDestroy_v2(event: usize) {
        driver()?;
        let event = EVENTS.remove(event).ok_or(Status::INVALID_HANDLE)?;
        event.context.session().append(&EventDestroy { event: event.id })?;
        ids::EVENTS.give_back(event.id.0);
        event.context.deferred()
    }
    alias cuEventDestroy = cuEventDestroy_v2(event: usize);

    fn cuEventRecord / cuEventRecord_ptsz(event: usize, stream: usize) |pt| {
        record(event, stream, pt, 0)
    }

    fn cuEventRecordWithFlags / cuEventRecordWithFlags_ptsz(event: usize, stream: usize, flags: u32) |pt| {
        record(event, stream, pt, flags)
    }

    fn cuEventQuery(event: usize) {
        let event = event::of(event)?;
        let driver = driver()?;
        event.context.session().check()?;
        event.check()?;
        capture::unsafe_call()?;
        event.context.deferred()?;
        let done = if event.is_shared() { event.ask()? } else { event.is_over()? };
        if !done {
            return Err(Status::NOT_READY);
        }
        shared_blocks::after_wait(driver);
        event.context.deferred()
    }

    fn cuEventSynchronize(event: usize) {
        let event = event::of(event)?;
        let driver = driver()?;
        host_calls::forbid()?;
        event.context.session().check()?;
        event.check()?;
        capture::unsafe_call()?;
        event.context.deferred()?;
        if event.is_shared() {
            let result = event.await_shared();
            shared_blocks::after_wait(driver);
            return event.context.settle(result);
        }
        if event.is_done() {
            event.context.session().show_output();
            shared_blocks::after_wait(driver);
            return event.context.deferred();
        }
        let result = event.synchronize();
        shared_blocks::after_wait(driver);
        result
    }

    fn cuEventElapsedTime(milliseconds: Out<f32>, start: usize, end: usize) {
        elapsed(milliseconds, start, end)
    }
    alias cuEventElapsedTime_v2 = cuEventElapsedTime(milliseconds: Out<f32>, start: usize, end: usize);
}
