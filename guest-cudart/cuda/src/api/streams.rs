//! Streams.

use std::sync::atomic::Ordering;

use crate::abi::arguments::put;
use crate::abi::result::{Result, code};
use crate::graph::node_work::Work;
use crate::graph::recording;
use crate::memory::managed::shared_blocks;
use crate::process::driver::driver;
use crate::process::{context, green, host_calls};
use crate::streams::stream_table::STREAMS;
use crate::streams::{capture_rules, event, stream_table};
use client::Status;

/// `CU_EVENT_WAIT_EXTERNAL`: in a capture, a node of its own. It says nothing elsewhere.
pub(crate) const EXTERNAL: u32 = 1;

pub(crate) fn create(stream: *mut usize, flags: u32, priority: i32) -> Result {
    let (_, context) = context::ready()?;
    let green = if green::any() { context::current_green() } else { None };
    stream_table::create_in(context, green, stream, flags, priority)
}

api! {
    fn cuStreamCreate(stream: *mut usize, flags: u32) {
        create(stream, flags, 0)
    }

    fn cuStreamCreateWithPriority(stream: *mut usize, flags: u32, priority: i32) {
        create(stream, flags, priority)
    }

    fn cuStreamDestroy_v2(stream: usize) {
        let driver = driver()?;
        let stream = STREAMS.remove(stream).ok_or(Status::INVALID_HANDLE)?;
        if stream.green().is_some_and(|green| !green.is_alive()) {
            return Err(Status::CONTEXT_IS_DESTROYED);
        }
        driver.session.check()?;
        let deferred = stream.context.deferred(driver);
        stream_table::end(driver, stream);
        deferred
    }
    alias cuStreamDestroy = cuStreamDestroy_v2(stream: usize);

    fn cuStreamGetPriority / cuStreamGetPriority_ptsz(stream: usize, priority: *mut i32) |pt| {
        put(priority, stream_table::ask(stream, pt)?.1.priority.load(Ordering::Acquire))
    }

    fn cuStreamGetFlags / cuStreamGetFlags_ptsz(stream: usize, flags: *mut u32) |pt| {
        put(flags, stream_table::ask(stream, pt)?.1.flags)
    }

    fn cuStreamGetDevice / cuStreamGetDevice_ptsz(stream: usize, device: *mut i32) |pt| {
        put(device, stream_table::ask(stream, pt)?.1.context.device as i32)
    }

    fn cuStreamGetId / cuStreamGetId_ptsz(stream: usize, id: *mut u64) |pt| {
        put(id, stream_table::ask(stream, pt)?.1.unique)
    }

    fn cuStreamGetCtx / cuStreamGetCtx_ptsz(stream: usize, ctx: *mut usize) |pt| {
        put(ctx, stream_table::ask(stream, pt)?.1.context_handle())
    }

    fn cuStreamGetCtx_v2 / cuStreamGetCtx_v2_ptsz(stream: usize, ctx: *mut usize, green: *mut usize) |pt| {
        let (_, stream) = stream_table::ask(stream, pt)?;
        put(ctx, stream.context.handle)?;
        if green.is_null() { Ok(()) } else { put(green, stream.green().map_or(0, |green| green.handle())) }
    }

    fn cuStreamWaitEvent / cuStreamWaitEvent_ptsz(stream: usize, handle: usize, flags: u32) |pt| {
        let event = event::of(handle)?;
        let (driver, stream) = stream_table::ask(stream, pt)?;
        driver.session.check()?;
        stream.context.deferred(driver)?;
        if flags & !EXTERNAL != 0 {
            return Err(Status::INVALID_VALUE);
        }
        if flags & EXTERNAL != 0 {
            return recording::add(&*stream.capture().ok_or(code::ILLEGAL_STATE)?, &stream, Work::Wait(handle));
        }
        if let Some((capture, point)) = event.captured() {
            return if capture.is_ended() { Err(code::CAPTURED_EVENT) } else { capture_rules::join(&capture, &stream, &point) };
        }
        if let Some(capture) = stream.capture() {
            // Work from outside has no place in a graph; an event that was never recorded stands for none.
            return if event.last().is_none() {
                Ok(())
            } else {
                capture.spoil();
                Err(code::STREAM_CAPTURE_ISOLATION)
            };
        }
        event::wait(driver, &stream, &event)
    }

    fn cuStreamQuery / cuStreamQuery_ptsz(stream: usize) |pt| {
        let (driver, stream) = stream_table::ask(stream, pt)?;
        driver.session.check()?;
        capture_rules::forbid(&stream)?;
        stream.context.deferred(driver)?;
        if !stream.is_done(driver)? {
            return Err(Status::NOT_READY);
        }
        shared_blocks::after_wait(driver);
        stream.context.deferred(driver)
    }

    fn cuStreamSynchronize / cuStreamSynchronize_ptsz(stream: usize) |pt| {
        let (driver, stream) = stream_table::ask(stream, pt)?;
        host_calls::forbid()?;
        driver.session.check()?;
        capture_rules::forbid(&stream)?;
        stream.context.deferred(driver)?;
        let result = stream.synchronize(driver);
        shared_blocks::after_wait(driver);
        result
    }
}
