//! Bytes that somebody outside this process may write at any time, and the only copies to and from them.
//!
//! A guest, a native client or a peer's RDMA device can change such memory during a copy. Rust forbids
//! references to it, and a plain `memcpy` from it is a data race. So this module copies through raw pointers,
//! with accesses that the compiler assumes nothing about: relaxed atomic words for short runs, and one `rep
//! movsb` for long ones on x86-64. A concurrent write then spoils the bytes that were copied and nothing
//! else; the code that uses them checks the copy.
//!
//! Measured on one core: from 64 KiB on, `rep movsb` is as fast as `memcpy`. Words alone would be 30 to 50 %
//! slower below 4 MiB.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// Runs shorter than this are copied in words.
const SHORT: usize = 512;

/// A run of mapped memory that others may write. Valid for `'m`.
#[derive(Debug, Clone, Copy)]
pub struct SharedBytes<'m> {
    at: NonNull<u8>,
    len: usize,
    _mapped: PhantomData<&'m ()>,
}

impl<'m> SharedBytes<'m> {
    /// The `len` bytes at `at`.
    ///
    /// # Safety
    /// They stay mapped and readable for `'m`. For [`write`](Self::write) they must be writable too. This
    /// process accesses them in the meantime through this module, through atomics, or through the kernel or a
    /// device only.
    pub unsafe fn new(at: NonNull<u8>, len: usize) -> SharedBytes<'m> {
        SharedBytes { at, len, _mapped: PhantomData }
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The `len` bytes from `offset` on.
    ///
    /// # Panics
    /// When they do not lie inside.
    pub fn part(self, offset: usize, len: usize) -> SharedBytes<'m> {
        assert!(offset <= self.len && len <= self.len - offset, "{len} bytes at {offset} of {}", self.len);
        // SAFETY: `offset` is at most `len`, so the pointer stays inside the run or just behind it.
        SharedBytes { at: unsafe { self.at.add(offset) }, len, _mapped: PhantomData }
    }

    /// Copies all the bytes into `to`.
    ///
    /// # Panics
    /// When `to` has another length.
    pub fn read(self, to: &mut [u8]) {
        assert_eq!(to.len(), self.len);
        // SAFETY: `new`'s caller vouches for the shared run; `to` is this thread's alone and as long.
        unsafe { self.copy_to(NonNull::from(to).cast()) }
    }

    /// Copies all the bytes to the memory at `to`.
    ///
    /// # Safety
    /// As many bytes are writable at `to`, do not overlap the run, and no other thread uses them.
    pub unsafe fn copy_to(self, to: NonNull<u8>) {
        // SAFETY: both runs have `len` bytes: see `new` and this function's contract.
        if unsafe { copy_long(self.at.as_ptr(), to.as_ptr(), self.len) } {
            return;
        }
        let (from, to) = (self.at.as_ptr(), to.as_ptr());
        // SAFETY: every access lies below `len` in both runs. `words` gives offsets at which the shared side
        // is 8-aligned. All accesses of this process to the shared side are atomic (see `new`), and the other
        // side is this thread's.
        words(
            from,
            self.len,
            |i| unsafe { to.add(i).write(AtomicU8::from_ptr(from.add(i)).load(Ordering::Relaxed)) },
            |i| unsafe {
                let word = AtomicU64::from_ptr(from.add(i).cast()).load(Ordering::Relaxed);
                to.add(i).cast::<u64>().write_unaligned(word);
            },
        );
    }

    /// Copies `from` over all the bytes.
    ///
    /// # Panics
    /// When `from` has another length.
    pub fn write(self, from: &[u8]) {
        assert_eq!(from.len(), self.len);
        let (from, to) = (from.as_ptr(), self.at.as_ptr());
        // SAFETY: both runs have `len` bytes; the shared one is writable: see `new`.
        if unsafe { copy_long(from, to, self.len) } {
            return;
        }
        // SAFETY: as in `copy_to`, with the shared side being the one that is written.
        words(
            to,
            self.len,
            |i| unsafe { AtomicU8::from_ptr(to.add(i)).store(from.add(i).read(), Ordering::Relaxed) },
            |i| unsafe {
                let word = from.add(i).cast::<u64>().read_unaligned();
                AtomicU64::from_ptr(to.add(i).cast()).store(word, Ordering::Relaxed);
            },
        );
    }
}

/// Calls `byte` or `word` for offsets that cover `len` bytes once each, `word` for 8 bytes at an offset at
/// which `shared` is 8-aligned.
fn words(shared: *const u8, len: usize, byte: impl Fn(usize), word: impl Fn(usize)) {
    let lead = shared.align_offset(8).min(len);
    let whole = lead + (len - lead) / 8 * 8;
    (0..lead).for_each(&byte);
    (lead..whole).step_by(8).for_each(word);
    (whole..len).for_each(byte);
}

/// Copies `len` bytes by the processor's own loop, which the compiler does not look into. False: the run is
/// short, or there is no such loop here, and nothing was copied. (Miri cannot run assembly; it checks the
/// words.)
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes, and they do not overlap.
#[inline]
unsafe fn copy_long(from: *const u8, to: *mut u8, len: usize) -> bool {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if len >= SHORT {
        // SAFETY: the caller's promise. The instruction touches these bytes and the three registers; the
        // direction flag is clear, as the ABI has it.
        unsafe {
            std::arch::asm!(
                "rep movsb",
                inout("rcx") len => _,
                inout("rdi") to => _,
                inout("rsi") from => _,
                options(nostack, preserves_flags)
            );
        }
        return true;
    }
    let _ = (from, to, len < SHORT);
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_survive_at_every_alignment_and_length() {
        let lengths = if cfg!(miri) { [0, 1, 7, 8, 9, 40, 70] } else { [0, 1, 9, 63, 511, 512, 5000] };
        for len in lengths {
            for offset in 0..9 {
                let source: Vec<u8> = (0..len).map(|i| (i * 7 + offset) as u8).collect();
                let mut memory = vec![0xee; offset + len + 9];
                let at = NonNull::new(memory.as_mut_ptr()).unwrap();
                // SAFETY: `memory` outlives the run and is not used otherwise meanwhile.
                let shared = unsafe { SharedBytes::new(at, memory.len()) };
                shared.part(offset, len).write(&source);
                let mut copy = vec![0; len];
                shared.part(offset, len).read(&mut copy);
                assert_eq!(copy, source, "{len} bytes at {offset}");
                let mut around = vec![0; memory.len()];
                shared.read(&mut around);
                assert!(around[..offset].iter().chain(&around[offset + len..]).all(|b| *b == 0xee));
            }
        }
    }

    /// Run by miri this shows that a copy during which somebody writes is not a data race.
    #[test]
    fn a_copy_during_a_write_is_only_spoiled() {
        struct Both(NonNull<u8>);
        // SAFETY: used through `SharedBytes` alone.
        unsafe impl Sync for Both {}
        let mut memory = vec![0u64; 8];
        let both = &Both(NonNull::new(memory.as_mut_ptr().cast()).unwrap());
        // SAFETY: `memory` outlives the scope below and is not used otherwise meanwhile.
        let run = || unsafe { SharedBytes::new(both.0, 64) };
        std::thread::scope(|scope| {
            scope.spawn(|| (0..20u8).for_each(|i| run().part(1, 62).write(&[i; 62])));
            for _ in 0..20 {
                let mut copy = [0; 62];
                run().part(1, 62).read(&mut copy);
                assert!(copy.iter().all(|b| *b < 20));
            }
        });
    }

    #[test]
    #[should_panic(expected = "9 bytes at 56 of 64")]
    fn a_part_outside_is_refused() {
        let mut memory = [0u8; 64];
        // SAFETY: `memory` outlives the run.
        unsafe { SharedBytes::new(NonNull::from(&mut memory).cast(), 64) }.part(56, 9);
    }
}
