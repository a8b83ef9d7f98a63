//! Waiting for a word of memory, and writing one, in stream order.

use std::sync::Arc;

use crate::abi::arguments::{Array, Count};
use crate::abi::result::Result;
use crate::abi::types::BatchMemOp;
use crate::graph::node_work::Work;
use crate::graph::recording;
use crate::streams::stream_table;
use crate::work::memory_operation::Operations;
use client::Status;
use client::ops::stream::memory_op;

pub(crate) fn enqueue(handle: usize, per_thread: bool, given: &[BatchMemOp], first: bool) -> Result {
    let (driver, context, _lent) = stream_table::ready_on(handle)?;
    let stream = stream_table::any(context, handle, per_thread)?;
    let device = driver.devices.get(stream.context.device as usize).ok_or(Status::INVALID_DEVICE)?;
    let operations = Operations::new(driver, device, given, first)?;
    match stream.capture() {
        Some(capture) => recording::add(&capture, &stream, Work::Words(Arc::new(operations))),
        None => operations.run(driver, &stream),
    }
}

pub(crate) fn one(
    operation: u32,
    handle: usize,
    per_thread: bool,
    address: u64,
    value: u64,
    flags: u32,
    first: bool,
) -> Result {
    let op = BatchMemOp { operation, short_flags: 0, address, value, flags, alias: 0, pad: 0 };
    enqueue(handle, per_thread, &[op], first)
}

/// A program's array of operations.
fn batch(
    stream: usize,
    per_thread: bool,
    count: Count<u32>,
    given: Array<'_, BatchMemOp>,
    flags: u32,
    first: bool,
) -> Result {
    if flags != 0 {
        return Err(Status::INVALID_VALUE);
    }
    given.required()?;
    if count.get() > memory_op::MOST {
        return Err(Status::INVALID_VALUE);
    }
    enqueue(stream, per_thread, given.entries(count)?, first)
}

api! {
    fn cuStreamWaitValue32_v2 / cuStreamWaitValue32_v2_ptsz(stream: usize, address: u64, value: u32, flags: u32) |pt| {
        one(memory_op::WAIT_32, stream, pt, address, value.into(), flags, false)
    }

    fn cuStreamWaitValue64_v2 / cuStreamWaitValue64_v2_ptsz(stream: usize, address: u64, value: u64, flags: u32) |pt| {
        one(memory_op::WAIT_64, stream, pt, address, value, flags, false)
    }

    fn cuStreamWriteValue32_v2 / cuStreamWriteValue32_v2_ptsz(stream: usize, address: u64, value: u32, flags: u32) |pt| {
        one(memory_op::WRITE_32, stream, pt, address, value.into(), flags, false)
    }

    fn cuStreamWriteValue64_v2 / cuStreamWriteValue64_v2_ptsz(stream: usize, address: u64, value: u64, flags: u32) |pt| {
        one(memory_op::WRITE_64, stream, pt, address, value, flags, false)
    }

    fn cuStreamBatchMemOp_v2 / cuStreamBatchMemOp_v2_ptsz(stream: usize, count: Count<u32>, operations: Array<BatchMemOp>, flags: u32) |pt| {
        batch(stream, pt, count, operations, flags, false)
    }

    fn cuStreamWaitValue32 / cuStreamWaitValue32_ptsz(stream: usize, address: u64, value: u32, flags: u32) |pt| {
        one(memory_op::WAIT_32, stream, pt, address, value.into(), flags, true)
    }

    fn cuStreamWaitValue64 / cuStreamWaitValue64_ptsz(stream: usize, address: u64, value: u64, flags: u32) |pt| {
        one(memory_op::WAIT_64, stream, pt, address, value, flags, true)
    }

    fn cuStreamWriteValue32 / cuStreamWriteValue32_ptsz(stream: usize, address: u64, value: u32, flags: u32) |pt| {
        one(memory_op::WRITE_32, stream, pt, address, value.into(), flags, true)
    }

    fn cuStreamWriteValue64 / cuStreamWriteValue64_ptsz(stream: usize, address: u64, value: u64, flags: u32) |pt| {
        one(memory_op::WRITE_64, stream, pt, address, value, flags, true)
    }

    fn cuStreamBatchMemOp / cuStreamBatchMemOp_ptsz(stream: usize, count: Count<u32>, operations: Array<BatchMemOp>, flags: u32) |pt| {
        batch(stream, pt, count, operations, flags, true)
    }
}
