//! Advice on managed memory: kept, and told when it is asked for. Prefetching to a device gives it what the host has; to the host nothing is fetched before it is touched.

use std::ffi::c_void;
use std::ops::Range;

use crate::abi::arguments::{non_null, put};
use crate::abi::result::Result;
use crate::abi::types::MemLocation;
use crate::memory::address;
use crate::memory::managed::{STATE, lend};
use crate::process::driver::{Driver, driver};
use crate::process::{context, driver, stream};
use client::{Status, lock};

/// `CU_DEVICE_CPU`, `CU_DEVICE_INVALID`.
const CPU: i32 = -1;

const NOWHERE: i32 = -2;

/// `CUmemLocationType`.
mod location {
    pub const INVALID: u32 = 0;
    pub const DEVICE: u32 = 1;
    pub const HOST: u32 = 2;
    pub const HOST_NUMA: u32 = 3;
    pub const HOST_NUMA_CURRENT: u32 = 4;
}

/// A place: `CUmemLocation`'s type and number.
pub(crate) type Place = (u32, i32);

/// `CU_MEM_ADVISE_SET_PREFERRED_LOCATION`.
const SET_PREFERRED_LOCATION: u32 = 3;

const NO_PLACE: Place = (location::INVALID, NOWHERE);

/// What is advised of some bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Advice {
    read_mostly: bool,
    preferred: Place,
    accessed_by: Vec<i32>,
    prefetched: Place,
}

impl Default for Advice {
    fn default() -> Advice {
        Advice { read_mostly: false, preferred: NO_PLACE, accessed_by: Vec::new(), prefetched: NO_PLACE }
    }
}

/// Advice on the parts of a piece; the rest has none.
#[derive(Debug, Default)]
pub(crate) struct Advised(Vec<(Range<u64>, Advice)>);

impl Advised {
    /// Changes the advice on a range.
    fn change(&mut self, range: &Range<u64>, change: impl Fn(&mut Advice)) {
        let mut parts = Vec::new();
        let mut covered = range.start;
        for (part, advice) in std::mem::take(&mut self.0) {
            let inside = part.start.max(range.start)..part.end.min(range.end);
            if inside.is_empty() {
                parts.push((part, advice));
                continue;
            }
            if covered < inside.start {
                parts.push((covered..inside.start, Advice::default()));
            }
            covered = inside.end;
            for rest in [part.start..inside.start, inside.end..part.end] {
                if !rest.is_empty() {
                    parts.push((rest, advice.clone()));
                }
            }
            parts.push((inside, advice));
        }
        if covered < range.end {
            parts.push((covered..range.end, Advice::default()));
        }
        parts.sort_by_key(|(part, _)| part.start);
        for (part, advice) in &mut parts {
            if range.start <= part.start && part.end <= range.end {
                change(advice);
            }
        }
        parts.retain(|(_, advice)| *advice != Advice::default());
        parts.dedup_by(|next, before| {
            let joined = before.0.end == next.0.start && before.1 == next.1;
            if joined {
                before.0.end = next.0.end;
            }
            joined
        });
        self.0 = parts;
    }

    /// What is advised of every byte of a range.
    fn of(&self, range: &Range<u64>) -> Vec<Advice> {
        let mut found = Vec::new();
        let mut covered = range.start;
        for (part, advice) in
            self.0.iter().filter(|(part, _)| part.start < range.end && range.start < part.end)
        {
            if covered < part.start {
                found.push(Advice::default());
            }
            covered = part.end;
            found.push(advice.clone());
        }
        if covered < range.end {
            found.push(Advice::default());
        }
        found
    }
}

/// The range that a call names, all of it one piece's.
fn ranged(driver: &Driver, address: u64, count: usize) -> Result<(u64, Range<u64>)> {
    let found = address::find(driver, address).filter(|found| found.managed && count > 0);
    let found = found.ok_or(Status::INVALID_VALUE)?;
    if count as u64 > found.size - (address - found.base) {
        return Err(Status::INVALID_VALUE);
    }
    let base = lock(&STATE).find(address).ok_or(Status::INVALID_VALUE)?.0;
    // Advice is on pages.
    let page = client::pages::PAGE as u64;
    Ok((base, address & !(page - 1)..(address + count as u64).next_multiple_of(page)))
}

/// A place that a program names.
pub(crate) fn place(l: MemLocation) -> Result<Place> {
    match l.kind {
        location::DEVICE => driver::device(l.id).map(|_| (location::DEVICE, l.id)),
        location::HOST | location::HOST_NUMA_CURRENT => Ok((location::HOST, CPU)),
        location::HOST_NUMA if l.id >= 0 => Ok((location::HOST_NUMA, l.id)),
        _ => Err(Status::INVALID_VALUE),
    }
}

/// A device's number in the older forms; the processor is one as well.
fn by_number(device: i32) -> MemLocation {
    MemLocation { kind: if device == CPU { location::HOST } else { location::DEVICE }, id: device }
}

fn change(base: u64, range: &Range<u64>, with: impl Fn(&mut Advice)) {
    if let Some((_, piece)) = lock(&STATE).pieces.get_mut(&base) {
        piece.advised.change(range, with);
    }
}

/// The place that a pool's allocation is to be at, or none.
pub(crate) fn prefer(address: u64, size: u64, (kind, id): Place) -> Result {
    if kind == location::INVALID {
        return Ok(());
    }
    advise(address, size as usize, SET_PREFERRED_LOCATION, MemLocation { kind, id })
}

fn advise(address: u64, count: usize, advice: u32, to: MemLocation) -> Result {
    let driver = driver()?;
    driver.session.check()?;
    let (base, range) = ranged(driver, address, count)?;
    // CU_MEM_ADVISE_SET_READ_MOSTLY and its opposite say nothing of a place.
    let at = || place(to);
    match advice {
        1 => change(base, &range, |a| a.read_mostly = true),
        2 => change(base, &range, |a| a.read_mostly = false),
        SET_PREFERRED_LOCATION => {
            let at = at()?;
            change(base, &range, |a| a.preferred = at);
        }
        4 => change(base, &range, |a| a.preferred = NO_PLACE),
        5 | 6 => {
            let (_, device) = at()?;
            change(base, &range, |a| {
                a.accessed_by.retain(|other| *other != device);
                if advice == 5 {
                    a.accessed_by.push(device);
                }
            });
        }
        _ => return Err(Status::INVALID_VALUE),
    }
    Ok(())
}

fn prefetch(
    address: u64,
    count: usize,
    to: MemLocation,
    flags: u32,
    handle: usize,
    per_thread: bool,
) -> Result {
    let (driver, context) = context::ready()?;
    stream::plain(driver, context, handle, per_thread)?;
    let at = place(to)?;
    if flags != 0 {
        return Err(Status::INVALID_VALUE);
    }
    let (base, range) = ranged(driver, address, count)?;
    if at.0 == location::DEVICE {
        lend(range.start, range.end - range.start)?;
    }
    change(base, &range, |a| a.prefetched = at);
    Ok(())
}

/// One attribute of a range.
unsafe fn attribute(data: *mut c_void, size: usize, number: u32, found: &[Advice]) -> Result {
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

fn advice_on(address: u64, count: usize) -> Result<Vec<Advice>> {
    let (base, range) = ranged(driver()?, address, count)?;
    let state = lock(&STATE);
    let (_, piece) = state.pieces.get(&base).ok_or(Status::INVALID_VALUE)?;
    Ok(piece.advised.of(&range))
}

/// The arrays of a batch: each range, and the place that goes with it. The places' indices say from which range on each is meant.
unsafe fn batch(
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
unsafe fn prefetch_batch(
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
        advise(address, count, advice, by_number(device))
    }

    fn cuMemAdvise_v2(address: u64, count: usize, advice: u32, to: MemLocation) {
        advise(address, count, advice, to)
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
        stream::plain(driver, context, stream, pt)?;
        if flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        // What the bytes are afterwards is not defined: that they stay is allowed.
        batch(dptrs, sizes, count, std::ptr::null(), std::ptr::null(), 0, |address, size, _| {
            ranged(driver, address, size).map(|_| ())
        })
    }

    fn cuMemDiscardAndPrefetchBatchAsync / cuMemDiscardAndPrefetchBatchAsync_ptsz(
        dptrs: *const u64, sizes: *const usize, count: usize, places: *const MemLocation, from: *const usize, place_count: usize, flags: u64, stream: usize
    ) |pt| {
        prefetch_batch(dptrs, sizes, count, places, from, place_count, flags, stream, pt)
    }

    fn cuMemRangeGetAttribute(data: *mut c_void, size: usize, number: u32, address: u64, count: usize) {
        attribute(data, size, number, &advice_on(address, count)?)
    }

    fn cuMemRangeGetAttributes(data: *const *mut c_void, sizes: *const usize, numbers: *const u32, attributes: usize, address: u64, count: usize) {
        let found = advice_on(address, count)?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_byte_has_the_last_advice_that_was_given_on_it(steps in proptest::collection::vec((0u64..40, 1u64..20, 0i32..3), 0..60), start in 0u64..50, len in 1u64..20) {
            let mut advised = Advised::default();
            let mut model = vec![NO_PLACE; 80];
            for (start, len, device) in steps {
                let at = if device == 0 { NO_PLACE } else { (location::DEVICE, device) };
                advised.change(&(start..start + len), |a| a.preferred = at);
                model[start as usize..(start + len) as usize].fill(at);
            }
            let mut expected = model[start as usize..(start + len) as usize].to_vec();
            expected.dedup();
            let mut found: Vec<Place> = advised.of(&(start..start + len)).iter().map(|a| a.preferred).collect();
            found.dedup();
            prop_assert_eq!(found, expected);
        }
    }
}
