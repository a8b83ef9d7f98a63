//! Advice on managed memory, and prefetching.

use std::ffi::c_void;

use crate::abi::arguments::{non_null, put};
use crate::abi::result::Result;
use crate::abi::types::MemLocation;
use crate::memory::managed::advice::{Advice, CPU, NO_PLACE, NOWHERE, Place, location};
use crate::memory::managed::{advice, lend};
use crate::memory::managed_advice;
use crate::process::context;
use crate::streams::stream_table;
use client::Status;

/// A device's number in the older forms; the processor is one as well.
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
    let (driver, context) = context::ready()?;
    stream_table::plain(driver, context, handle, per_thread)?;
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

/// One attribute of a range.
pub(crate) unsafe fn attribute(data: *mut c_void, size: usize, number: u32, found: &[Advice]) -> Result {
    non_null(data)?;
    // An attribute that not all bytes share is none.
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
                // SAFETY: the program says that `size` bytes may be written.
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
    // SAFETY: four bytes, as the program says.
    unsafe { put(data.cast::<i32>(), value) }
}

/// The arrays of a batch: each range, and the place that goes with it. The places' indices say from which range on each is meant.
pub(crate) unsafe fn batch(
    dptrs: *const u64,
    sizes: *const usize,
    count: usize,
    places: *const MemLocation,
    from: *const usize,
    place_count: usize,
    mut each: impl FnMut(u64, usize, Option<MemLocation>) -> Result,
) -> Result {
    if count == 0 {
        return Err(Status::INVALID_VALUE);
    }
    non_null(dptrs)?;
    non_null(sizes)?;
    let mut at = 0;
    for i in 0..count {
        // SAFETY: the program gives arrays of these lengths.
        unsafe {
            while at + 1 < place_count && *from.add(at + 1) <= i {
                at += 1;
            }
            let place = (place_count > 0).then(|| *places.add(at));
            each(*dptrs.add(i), *sizes.add(i), place)?;
        }
    }
    Ok(())
}

/// # Safety
/// The arrays are as long as is said of them.
pub(crate) unsafe fn prefetch_batch(
    dptrs: *const u64,
    sizes: *const usize,
    count: usize,
    places: *const MemLocation,
    from: *const usize,
    place_count: usize,
    flags: u64,
    stream: usize,
    per_thread: bool,
) -> Result {
    if place_count == 0 || flags != 0 {
        return Err(Status::INVALID_VALUE);
    }
    non_null(places)?;
    non_null(from)?;
    // SAFETY: as the caller says; NULL was found above.
    unsafe {
        batch(dptrs, sizes, count, places, from, place_count, |address, size, place| {
            prefetch(address, size, place.ok_or(Status::INVALID_VALUE)?, 0, stream, per_thread)
        })
    }
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

    fn cuMemPrefetchBatchAsync / cuMemPrefetchBatchAsync_ptsz(
        dptrs: *const u64, sizes: *const usize, count: usize, places: *const MemLocation, from: *const usize, place_count: usize, flags: u64, stream: usize
    ) |pt| {
        prefetch_batch(dptrs, sizes, count, places, from, place_count, flags, stream, pt)
    }

    fn cuMemDiscardBatchAsync / cuMemDiscardBatchAsync_ptsz(dptrs: *const u64, sizes: *const usize, count: usize, flags: u64, stream: usize) |pt| {
        let (driver, context) = context::ready()?;
        stream_table::plain(driver, context, stream, pt)?;
        if flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        // What the bytes are afterwards is not defined: that they stay is allowed.
        batch(dptrs, sizes, count, std::ptr::null(), std::ptr::null(), 0, |address, size, _| {
            managed_advice::ranged(driver, address, size).map(|_| ())
        })
    }

    fn cuMemDiscardAndPrefetchBatchAsync / cuMemDiscardAndPrefetchBatchAsync_ptsz(
        dptrs: *const u64, sizes: *const usize, count: usize, places: *const MemLocation, from: *const usize, place_count: usize, flags: u64, stream: usize
    ) |pt| {
        prefetch_batch(dptrs, sizes, count, places, from, place_count, flags, stream, pt)
    }

    fn cuMemRangeGetAttribute(data: *mut c_void, size: usize, number: u32, address: u64, count: usize) {
        attribute(data, size, number, &managed_advice::advice_on(address, count)?)
    }

    fn cuMemRangeGetAttributes(data: *const *mut c_void, sizes: *const usize, numbers: *const u32, attributes: usize, address: u64, count: usize) {
        let found = managed_advice::advice_on(address, count)?;
        if attributes == 0 {
            return Err(Status::INVALID_VALUE);
        }
        non_null(data)?;
        non_null(sizes)?;
        non_null(numbers)?;
        for i in 0..attributes {
            attribute(*data.add(i), *sizes.add(i), *numbers.add(i), &found)?;
        }
        Ok(())
    }
}
