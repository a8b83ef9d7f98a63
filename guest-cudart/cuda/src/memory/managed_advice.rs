//! Advice on ranges of managed memory.

use std::ops::Range;

use crate::abi::result::Result;
use crate::abi::types::MemLocation;
use crate::memory::address;
use crate::memory::managed::STATE;
use crate::memory::managed::advice::{self, Advice, NO_PLACE, Place, location};
use crate::process::driver::{Driver, driver};
use client::{Status, lock};

/// `CU_MEM_ADVISE_SET_PREFERRED_LOCATION`.
pub(crate) const SET_PREFERRED_LOCATION: u32 = 3;

/// The range of a call, which must be inside one piece.
pub(crate) fn ranged(driver: &Driver, address: u64, count: usize) -> Result<(u64, Range<u64>)> {
    let found = address::find(driver, address).filter(|found| found.managed && count > 0);
    let found = found.ok_or(Status::INVALID_VALUE)?;
    if count as u64 > found.size - (address - found.base) {
        return Err(Status::INVALID_VALUE);
    }
    let base = lock(&STATE).find(address).ok_or(Status::INVALID_VALUE)?.0;
    // Advice applies to whole pages.
    let page = client::pages::PAGE as u64;
    Ok((base, address & !(page - 1)..(address + count as u64).next_multiple_of(page)))
}

pub(crate) fn change(base: u64, range: &Range<u64>, with: impl Fn(&mut Advice)) {
    if let Some((_, piece)) = lock(&STATE).pieces.get_mut(&base) {
        piece.advised.change(range, with);
    }
}

/// The location of a pool's allocations, if it has one.
pub(crate) fn prefer(address: u64, size: u64, (kind, id): Place) -> Result {
    if kind == location::INVALID {
        return Ok(());
    }
    advise(address, size as usize, SET_PREFERRED_LOCATION, MemLocation { kind, id })
}

pub(crate) fn advise(address: u64, count: usize, advice: u32, to: MemLocation) -> Result {
    let driver = driver()?;
    driver.check()?;
    let (base, range) = ranged(driver, address, count)?;
    // CU_MEM_ADVISE_SET_READ_MOSTLY and its opposite have no location.
    let at = || advice::place(to);
    match advice {
        1 => change(base, &range, |a| a.read_mostly = true),
        2 => change(base, &range, |a| a.read_mostly = false),
        SET_PREFERRED_LOCATION => {
            let at = at()?;
            change(base, &range, |a| a.preferred = at);
        }
        4 => change(base, &range, |a| a.preferred = NO_PLACE),
        5 | 6 => {
            // "All other location types are invalid" (`cuMemAdvise`).
            if !matches!(to.kind, location::DEVICE | location::HOST) {
                return Err(Status::INVALID_VALUE);
            }
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

pub(crate) fn advice_on(address: u64, count: usize) -> Result<Vec<Advice>> {
    let (base, range) = ranged(driver()?, address, count)?;
    let state = lock(&STATE);
    let (_, piece) = state.pieces.get(&base).ok_or(Status::INVALID_VALUE)?;
    Ok(piece.advised.of(&range))
}
