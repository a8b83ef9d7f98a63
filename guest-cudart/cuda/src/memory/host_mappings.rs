//! Where host memory of `cuMemCreate` is mapped.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock};

/// Host memory at an address.
struct Mapped {
    /// Its size in bytes.
    size: u64,
    /// First address of the reservation that it lies in.
    reservation: u64,
}

/// The mapped memory, by first address.
static MAPPED: RwLock<BTreeMap<u64, Mapped>> = RwLock::new(BTreeMap::new());
/// How many entries `MAPPED` has, for processes without such memory.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Adds memory at `address`, in the reservation that begins at `reservation`.
pub(super) fn insert(address: u64, size: u64, reservation: u64) {
    update(|mapped| _ = mapped.insert(address, Mapped { size, reservation }));
}

/// Removes the memory that begins at `address`.
pub(super) fn remove(address: u64) {
    update(|mapped| _ = mapped.remove(&address));
}

fn update(change: impl FnOnce(&mut BTreeMap<u64, Mapped>)) {
    let mut mapped = MAPPED.write().unwrap_or_else(PoisonError::into_inner);
    change(&mut mapped);
    COUNT.store(mapped.len(), Ordering::Release);
}

/// Whether host memory is mapped at an address.
#[inline]
pub(crate) fn is_here(address: u64) -> bool {
    COUNT.load(Ordering::Acquire) > 0 && {
        let mapped = MAPPED.read().unwrap_or_else(PoisonError::into_inner);
        mapped.range(..=address).next_back().is_some_and(|(start, it)| address - start < it.size)
    }
}

/// The first addresses of all host memory in the reservation that has a piece at `address`. A kernel that
/// gets the address of one piece may continue into the next.
pub(super) fn neighbors(address: u64) -> Vec<u64> {
    let mapped = MAPPED.read().unwrap_or_else(PoisonError::into_inner);
    let Some(Mapped { reservation, .. }) = mapped.get(&address) else { return Vec::new() };
    mapped
        .range(reservation..)
        .take_while(|(_, it)| it.reservation == *reservation)
        .map(|(at, _)| *at)
        .collect()
}
