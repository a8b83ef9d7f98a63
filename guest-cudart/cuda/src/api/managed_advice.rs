//! Advice on managed memory, and prefetching.

use std::ffi::c_void;

use crate::abi::arguments::{Array, Count, non_null, put};
use crate::abi::result::Result;
use crate::abi::types::MemLocation;
use crate::api::copy_batches::are_beginnings;
use crate::memory::managed::advice::{self, Advice, CPU, NO_PLACE, NOWHERE, Place, location};
use crate::memory::managed::lend;
use crate::memory::managed_advice;
use crate::process::context::Context;
use crate::process::driver::Driver;
use crate::streams::stream_table;
use client::Status;

/// The location for a device number of the older functions, which also have a number for the CPU.
pub(crate) fn by_number(device: i32) -> MemLocation {
    MemLocation { kind: if device == CPU { location::HOST } else { location::DEVICE }, id: device }
}

pub(crate) fn prefetch(
    address: u64,
    count: usize,
    to: MemLocation,
    flags: u32,
    handle: usize,
    per_thread: bool,
) -> Result {
    let (driver, context, _lent) = stream_table::ready_on(handle)?;
    stream_table::plain(context, handle, per_thread)?;
    let at = advice::place(to)?;
    if flags != 0 {
        return Err(Status::INVALID_VALUE);
    }
    let (base, range) = managed_advice::ranged(driver, address, count)?;
    if at.0 == location::DEVICE {
        lend(range.start, range.end - range.start)?;
    }
    managed_advice::change(base, &range, |a| a.prefetched = at);
    Ok(())
}

/// Writes one attribute of a range.
///
/// # Safety
/// `size` bytes at `data` are writable.
unsafe fn attribute(data: *mut c_void, size: usize, number: u32, found: &[Advice]) -> Result {
    non_null(data)?;
    // If not all bytes have the same value, there is none.
    let common = |of: &dyn Fn(&Advice) -> Place| {
        let first = found.first().map_or(NO_PLACE, of);
        if found.iter().all(|advice| of(advice) == first) { first } else { NO_PLACE }
    };
    let number_of = |(kind, id): Place| match kind {
        location::DEVICE => id,
        location::INVALID => NOWHERE,
        _ => CPU,
    };
    let preferred = || common(&|a| a.preferred);
    let prefetched = || common(&|a| a.prefetched);
    let value = match number {
        1 => found.iter().all(|a| a.read_mostly).into(),
        2 => number_of(preferred()),
        3 => {
            if size == 0 || !size.is_multiple_of(4) {
                return Err(Status::INVALID_VALUE);
            }
            let everywhere = |device: &&i32| found.iter().all(|a| a.accessed_by.contains(device));
            let mut devices = found.first().into_iter().flat_map(|a| &a.accessed_by).filter(everywhere);
            for i in 0..size / 4 {
                // SAFETY: inside the `size` bytes.
                unsafe { data.cast::<i32>().add(i).write(devices.next().copied().unwrap_or(NOWHERE)) };
            }
            return Ok(());
        }
        4 => number_of(prefetched()),
        5 => preferred().0 as i32,
        6 => preferred().1,
        7 => prefetched().0 as i32,
        8 => prefetched().1,
        _ => return Err(Status::INVALID_VALUE),
    };
    if size != 4 {
        return Err(Status::INVALID_VALUE);
    }
    // SAFETY: `size` is four bytes.
    unsafe { put(data.cast::<i32>(), value) }
}

/// The ranges of a batch.
fn ranges(dptrs: Array<u64>, sizes: Array<usize>, count: Count) -> Result<Vec<(u64, usize)>> {
    if count.get() == 0 {
        return Err(Status::INVALID_VALUE);
    }
    Ok(dptrs.entries(count)?.iter().copied().zip(sizes.entries(count)?.iter().copied()).collect())
}

/// Checks that each range is of managed memory.
fn checked(driver: &'static Driver, ranges: &[(u64, usize)]) -> Result {
    ranges.iter().try_for_each(|(address, size)| managed_advice::ranged(driver, *address, *size).map(drop))
}

/// Batches are not for the legacy default stream.
fn not_legacy(context: &'static Context, stream: usize, per_thread: bool) -> Result {
    if stream_table::plain(context, stream, per_thread)?.is_legacy() {
        return Err(Status::INVALID_VALUE);
    }
    Ok(())
}

/// Prefetches each range to its location. `from` says at which range each location's entries begin.
///
/// # Safety
/// `places` and `from` have `place_count` entries.
unsafe fn prefetch_batch(
    dptrs: Array<u64>,
    sizes: Array<usize>,
    count: Count,
    places: Array<MemLocation>,
    from: Array<usize>,
    place_count: usize,
    flags: u64,
    stream: usize,
    per_thread: bool,
) -> Result {
    let (driver, context, _lent) = stream_table::ready_on(stream)?;
    not_legacy(context, stream, per_thread)?;
    if place_count == 0 || place_count > count.get() || flags != 0 {
        return Err(Status::INVALID_VALUE);
    }
    // SAFETY: guaranteed by the caller.
    let (places, from) = unsafe { (places.first(place_count)?, from.first(place_count)?) };
    if !are_beginnings(from, count.get()) {
        return Err(Status::INVALID_VALUE);
    }
    // All are checked before the first is changed.
    places.iter().try_for_each(|place| advice::place(*place).map(drop))?;
    let ranges = ranges(dptrs, sizes, count)?;
    checked(driver, &ranges)?;
    let mut at = 0;
    for (i, (address, size)) in ranges.into_iter().enumerate() {
        while from.get(at + 1).is_some_and(|first| *first <= i) {
            at += 1;
        }
        prefetch(address, size, places[at], 0, stream, per_thread)?;
    }
    Ok(())
}

api! {
    fn cuMemAdvise(address: u64, count: usize, advice: u32, device: i32) {
        managed_advice::advise(address, count, advice, by_number(device))
    }

    fn cuMemAdvise_v2(address: u64, count: usize, advice: u32, to: MemLocation) {
        managed_advice::advise(address, count, advice, to)
    }

    fn cuMemPrefetchAsync / cuMemPrefetchAsync_ptsz(address: u64, count: usize, device: i32, stream: usize) |pt| {
        prefetch(address, count, by_number(device), 0, stream, pt)
    }

    fn cuMemPrefetchAsync_v2 / cuMemPrefetchAsync_v2_ptsz(address: u64, count: usize, to: MemLocation, flags: u32, stream: usize) |pt| {
        prefetch(address, count, to, flags, stream, pt)
    }

    unsafe fn cuMemPrefetchBatchAsync / cuMemPrefetchBatchAsync_ptsz(
        dptrs: Array<u64>, sizes: Array<usize>, count: Count, places: Array<MemLocation>, from: Array<usize>, place_count: usize, flags: u64, stream: usize
    ) |pt| {
        // SAFETY: the lists have the lengths passed, by CUDA's manual.
        unsafe { prefetch_batch(dptrs, sizes, count, places, from, place_count, flags, stream, pt) }
    }

    fn cuMemDiscardBatchAsync / cuMemDiscardBatchAsync_ptsz(dptrs: Array<u64>, sizes: Array<usize>, count: Count, flags: u64, stream: usize) |pt| {
        let (driver, context, _lent) = stream_table::ready_on(stream)?;
        not_legacy(context, stream, pt)?;
        if flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        // The contents are undefined afterwards, so they may stay.
        checked(driver, &ranges(dptrs, sizes, count)?)
    }

    unsafe fn cuMemDiscardAndPrefetchBatchAsync / cuMemDiscardAndPrefetchBatchAsync_ptsz(
        dptrs: Array<u64>, sizes: Array<usize>, count: Count, places: Array<MemLocation>, from: Array<usize>, place_count: usize, flags: u64, stream: usize
    ) |pt| {
        // SAFETY: the lists have the lengths passed, by CUDA's manual.
        unsafe { prefetch_batch(dptrs, sizes, count, places, from, place_count, flags, stream, pt) }
    }

    unsafe fn cuMemRangeGetAttribute(data: *mut c_void, size: usize, number: u32, address: u64, count: usize) {
        // SAFETY: `size` bytes are writable, by CUDA's manual.
        unsafe { attribute(data, size, number, &managed_advice::advice_on(address, count)?) }
    }

    unsafe fn cuMemRangeGetAttributes(data: Array<*mut c_void>, sizes: Array<usize>, numbers: Array<u32>, attributes: Count, address: u64, count: usize) {
        let found = managed_advice::advice_on(address, count)?;
        if attributes.get() == 0 {
            return Err(Status::INVALID_VALUE);
        }
        let (data, sizes, numbers) = (data.entries(attributes)?, sizes.entries(attributes)?, numbers.entries(attributes)?);
        for ((data, size), number) in data.iter().zip(sizes).zip(numbers) {
            // SAFETY: `size` bytes are writable, by CUDA's manual.
            unsafe { attribute(*data, *size, *number, &found) }?;
        }
        Ok(())
    }
}
