//! Managed memory.

use crate::abi::arguments::{Out, Text};
use crate::api::modules::put_variable;
use crate::code::library;
use crate::memory::{address, stream_ordered};
use crate::process::{capture, context};
use crate::streams::{capture_rules, stream_table};
use client::Status;

/// `CU_MEM_ATTACH_GLOBAL`, `_HOST`, `_SINGLE`.
pub(crate) const ATTACH: [u32; 3] = [1, 2, 4];

api! {
    fn cuMemAllocManaged(dptr: Out<u64>, size: usize, flags: u32) {
        dptr.required()?;
        let (driver, context) = context::ready()?;
        // Attached to all streams, or to none yet. SINGLE is only for cuStreamAttachMemAsync.
        if size == 0 || !matches!(flags, 1 | 2) {
            return Err(Status::INVALID_VALUE);
        }
        capture::unsafe_call()?;
        dptr.put(stream_ordered::alloc_managed(driver, context, size as u64, 0)?)
    }

    fn cuLibraryGetManaged(address: Out<u64>, size: Out<usize>, handle: usize, name: Text) {
        name.required()?;
        put_variable(library::managed_variable(handle, name.get()?)?, address, size)
    }

    fn cuStreamAttachMemAsync / cuStreamAttachMemAsync_ptsz(handle: usize, dptr: u64, length: usize, flags: u32) |pt| {
        let (driver, context, _lent) = stream_table::ready_on(handle)?;
        let stream = stream_table::plain(context, handle, pt)?;
        capture_rules::implicit(&stream)?;
        // "Not currently supported in graphs" (Programming Guide, "Prohibited and Unhandled Operations").
        capture_rules::forbid(&stream)?;
        capture::unsafe_call()?;
        // Host accesses wait for all streams, whichever the memory is attached to.
        let found = address::find(driver, dptr).filter(|found| found.managed && found.base == dptr);
        let found = found.ok_or(Status::INVALID_VALUE)?;
        let whole = length == 0 || length as u64 == found.size;
        if whole && ATTACH.contains(&flags) { Ok(()) } else { Err(Status::INVALID_VALUE) }
    }
}
