//! State that threads other than the dispatcher's may use: the mirrors, and the health of contexts.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};

use crate::driver::call::Result;
use protocol::Status;
use protocol::ops::memory::WordPatch;

use super::fence::Health;
use crate::driver::beside::{Beside, bits_of};
use crate::driver::watches::Watches;
use crate::lock::lock;

/// See the module's documentation.
#[derive(Default)]
pub struct Reach {
    /// Sizes of mapped mirrors, by first address. They stay mapped while this is locked.
    mirrors: RwLock<BTreeMap<usize, usize>>,
    /// The number of mirrors, readable without a lock.
    count: AtomicUsize,
    /// The health of each context, with its device's number on the server.
    contexts: Mutex<Vec<(u32, Weak<Health>)>>,
    watches: Watches,
}

impl Reach {
    fn mirrors<R>(&self, change: impl FnOnce(&mut BTreeMap<usize, usize>) -> R) -> R {
        let mut mirrors = self.mirrors.write().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut mirrors);
        self.count.store(mirrors.len(), Ordering::Relaxed);
        result
    }

    /// Adds a mirror, which is mapped, readable and writable until it is removed.
    pub(super) fn add_mirror(&self, first: usize, len: usize) {
        self.mirrors(|mirrors| mirrors.insert(first, len));
    }

    /// A context was made on the device with this number.
    pub(super) fn add_context(&self, number: u32, health: &Arc<Health>) {
        let mut contexts = lock(&self.contexts);
        contexts.retain(|(_, known)| known.strong_count() > 0);
        contexts.push((number, Arc::downgrade(health)));
    }

    /// Removes a mirror. Returns false if there was none. Nobody uses it afterwards.
    pub(super) fn remove_mirror(&self, first: usize) -> bool {
        self.mirrors(|mirrors| mirrors.remove(&first)).is_some()
    }

    /// Passes the address of a mirror's bytes to `use_it`, which must not keep it.
    fn at(&self, address: u64, len: usize, use_it: impl FnOnce(*mut u8)) -> Result {
        let address = address as usize;
        let mirrors = self.mirrors.read().unwrap_or_else(PoisonError::into_inner);
        let (first, size) = mirrors.range(..=address).next_back().ok_or(Status::INVALID_VALUE)?;
        if address - first >= *size || len == 0 || len > size - (address - first) {
            return Err(Status::INVALID_VALUE);
        }
        use_it(address as *mut u8);
        Ok(())
    }
}

impl Beside for Reach {
    fn is_needed(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 0
    }

    fn holds(&self, address: u64, len: u64) -> bool {
        usize::try_from(len).is_ok_and(|len| self.at(address, len, |_| ()).is_ok())
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> Result {
        let (to, len) = (bytes.as_mut_ptr(), bytes.len());
        // SAFETY: `from` has this many readable bytes, mapped while this runs. A device may change them
        // meanwhile; the result is then a mix of old and new bytes.
        self.at(address, len, |from| unsafe { std::ptr::copy_nonoverlapping(from, to, len) })
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result {
        let (from, len) = (bytes.as_ptr(), bytes.len());
        // SAFETY: `to` has this many writable bytes, mapped while this runs. A device may read them meanwhile
        // and then sees a mix of old and new bytes.
        self.at(address, len, |to| unsafe { std::ptr::copy_nonoverlapping(from, to, len) })
    }

    fn fail_device(&self, number: u32, status: Status) {
        for (_, health) in lock(&self.contexts).iter().filter(|(device, _)| *device == number) {
            health.upgrade().inspect(|health| health.fail(status));
        }
    }

    fn watches(&self) -> &Watches {
        &self.watches
    }

    fn change(&self, address: u64, masks: &[u8], bytes: &[u8]) -> Result {
        self.at(address, bytes.len(), |to| {
            for (n, (mask, word)) in masks.iter().zip(bytes.as_chunks::<8>().0).enumerate() {
                // SAFETY: the caller has checked that the address is aligned and that there are 8 bytes for
                // each mask; they are mapped, readable and writable while this runs.
                let at = unsafe { AtomicU64::from_ptr(to.cast::<u64>().add(n)) };
                let (bits, word) = (bits_of(*mask), u64::from_le_bytes(*word));
                // Released, so that a device sees the words in the order of their addresses.
                if bits == u64::MAX {
                    at.store(word, Ordering::Release);
                } else if bits != 0 {
                    let patch = |now: u64| Some(now & !bits | word & bits);
                    let _ = at.fetch_update(Ordering::Release, Ordering::Relaxed, patch);
                }
            }
        })
    }

    fn patch(&self, words: &[WordPatch]) -> Result {
        words.iter().try_for_each(|patch| {
            if !patch.address.is_multiple_of(8) {
                return Err(Status::INVALID_VALUE);
            }
            self.at(patch.address, 8, |word| {
                // SAFETY: aligned, and 8 bytes that are mapped, readable and writable while this runs.
                let word = unsafe { AtomicU64::from_ptr(word.cast()) };
                // A device may write it, too; its changes to other bits are not lost.
                let _ = word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |now| Some(patch.apply(now)));
            })
        })
    }
}
