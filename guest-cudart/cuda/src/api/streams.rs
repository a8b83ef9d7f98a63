//! Streams.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::abi::arguments::Out;
use crate::abi::result::{Result, code};
use crate::graph::node_work::Work;
use crate::graph::recording;
use crate::memory::managed::{self, shared_blocks};
use crate::process::driver::driver;
use crate::process::stream::Stream;
use crate::process::{capture, context, fences, green, host_calls};
use crate::streams::stream_table;
use crate::streams::{capture_rules, event};
use client::Status;

/// `CU_EVENT_WAIT_EXTERNAL`: in a capture, a node of its own. Without effect elsewhere.
pub(crate) const EXTERNAL: u32 = 1;

pub(crate) fn create(stream: Out<usize>, flags: u32, priority: i32) -> Result {
    let (_, context) = context::ready()?;
    let green = if green::any() { context::current_green() } else { None };
    stream.required()?;
    stream.put(stream_table::create_in(context, green, flags, priority)?)
}

/// The stream of a handle, for the questions that NVIDIA's driver does not answer while a stream is captured.
fn not_captured(handle: usize, per_thread: bool) -> Result<Arc<Stream>> {
    let (_, stream) = stream_table::ask(handle, per_thread)?;
    capture_rules::forbid(&stream)?;
    Ok(stream)
}

api! {
    fn cuStreamCreate(stream: Out<usize>, flags: u32) {
        create(stream, flags, 0)
    }

    fn cuStreamCreateWithPriority(stream: Out<usize>, flags: u32, priority: i32) {
        create(stream, flags, priority)
    }

    fn cuStreamDestroy_v2(stream: usize) {
        driver()?;
        // Between the two tables, nobody would know of its work.
        let _order = managed::Order::take();
        let (stream, _leaving) = stream_table::Leaving::begin(stream)?;
        if stream.green().is_some_and(|green| !green.is_alive()) {
            return Err(Status::CONTEXT_IS_DESTROYED);
        }
        stream.session().check()?;
        let deferred = stream.context.deferred();
        stream_table::end(stream);
        deferred
    }
    alias cuStreamDestroy = cuStreamDestroy_v2(stream: usize);

    fn cuStreamGetPriority / cuStreamGetPriority_ptsz(stream: usize, priority: Out<i32>) |pt| {
        priority.put(stream_table::ask(stream, pt)?.1.priority.load(Ordering::Acquire))
    }

    fn cuStreamGetFlags / cuStreamGetFlags_ptsz(stream: usize, flags: Out<u32>) |pt| {
        flags.put(not_captured(stream, pt)?.flags)
    }

    fn cuStreamGetDevice / cuStreamGetDevice_ptsz(stream: usize, device: Out<i32>) |pt| {
        device.put(not_captured(stream, pt)?.context.device as i32)
    }

    fn cuStreamGetId / cuStreamGetId_ptsz(stream: usize, id: Out<u64>) |pt| {
        id.put(not_captured(stream, pt)?.unique)
    }

    fn cuStreamGetCtx / cuStreamGetCtx_ptsz(stream: usize, ctx: Out<usize>) |pt| {
        ctx.put(stream_table::ask(stream, pt)?.1.context_handle())
    }

    fn cuStreamGetCtx_v2 / cuStreamGetCtx_v2_ptsz(stream: usize, ctx: Out<usize>, green: Out<usize>) |pt| {
        let (_, stream) = stream_table::ask(stream, pt)?;
        ctx.put(stream.context.handle)?;
        green.put_if_wanted(stream.green().map_or(0, |green| green.handle()));
        Ok(())
    }

    fn cuStreamWaitEvent / cuStreamWaitEvent_ptsz(stream: usize, handle: usize, flags: u32) |pt| {
        let event = event::of(handle)?;
        let (_, stream) = stream_table::ask(stream, pt)?;
        stream.session().check()?;
        stream.context.deferred()?;
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
            // A graph cannot depend on work outside it. An event that was never recorded adds no dependency.
            if event.last().is_none() && !event.is_shared() {
                return Ok(());
            }
            capture.spoil();
            // Of a shared one, another process's record is not known here, nor to NVIDIA's driver.
            let is_unknown = event.is_shared();
            return Err(if is_unknown { code::STREAM_CAPTURE_UNSUPPORTED } else { code::STREAM_CAPTURE_ISOLATION });
        }
        stream_table::before_work(&stream)?;
        fences::leave(&stream)?;
        event::wait(&stream, &event)
    }

    fn cuStreamQuery / cuStreamQuery_ptsz(stream: usize) |pt| {
        let (driver, stream) = stream_table::ask(stream, pt)?;
        stream.session().check()?;
        capture_rules::forbid(&stream)?;
        capture::unsafe_call()?;
        stream.context.deferred()?;
        if !stream_table::is_done(&stream)? {
            return Err(Status::NOT_READY);
        }
        shared_blocks::after_wait(driver);
        stream.context.deferred()
    }

    fn cuStreamSynchronize / cuStreamSynchronize_ptsz(stream: usize) |pt| {
        let (driver, stream) = stream_table::ask(stream, pt)?;
        host_calls::forbid()?;
        stream.session().check()?;
        capture_rules::forbid(&stream)?;
        capture::unsafe_call()?;
        stream.context.deferred()?;
        let is_settled = || stream_table::is_settled(&stream);
        let result = fences::synchronize(&stream, is_settled, || stream_table::is_watched(&stream));
        shared_blocks::after_wait(driver);
        result
    }
}
