//! Vector accesses of up to 16 bytes that are atomic.
//!
//! PTX treats a vector access as separate accesses to its elements. Hardware performs it as one, and programs
//! rely on that: CUB's scans publish a value and its status word with one store, and read both with one load.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::__m128i;
#[cfg(target_arch = "x86_64")]
use std::mem::transmute;
use std::mem::{MaybeUninit, transmute_copy};

use super::memory::Element;
use crate::machine::row::LANES;

/// 16 bytes at a multiple of 16. AMD and Intel guarantee that CPUs with AVX access them atomically. On other
/// CPUs it takes two accesses.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
pub(crate) struct Quad([u64; 2]);

impl Quad {
    /// # Safety
    ///
    /// `p` is valid for 16 bytes, and a multiple of 16.
    #[inline(always)]
    pub unsafe fn load(p: *const u8) -> Quad {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller guarantees that `p` is valid and aligned. Volatile, so that the compiler makes
        // exactly one access; an access of this type is one instruction.
        return unsafe { transmute::<__m128i, Quad>(p.cast::<__m128i>().read_volatile()) };
        #[cfg(not(target_arch = "x86_64"))]
        // SAFETY: the caller guarantees that `p` is valid and aligned.
        return unsafe { Quad([u64::load(p), u64::load(p.add(8))]) };
    }

    /// # Safety
    ///
    /// As for [`Quad::load`].
    #[inline(always)]
    pub unsafe fn store(p: *mut u8, value: Quad) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller guarantees that `p` is valid and aligned; volatile as in `load`.
        unsafe {
            p.cast::<__m128i>().write_volatile(transmute::<Quad, __m128i>(value));
        }
        #[cfg(not(target_arch = "x86_64"))]
        // SAFETY: the caller guarantees that `p` is valid and aligned.
        unsafe {
            u64::store(p, value.0[0]);
            u64::store(p.add(8), value.0[1]);
        }
    }
}

/// Loads a lane's elements.
///
/// # Safety
///
/// `p` is valid for all elements and a multiple of their total size, which is at most 16.
#[inline(always)]
pub(crate) unsafe fn load<T: Element, const N: usize>(p: *const u8) -> [T; N] {
    // SAFETY: the caller guarantees that `p` is valid and aligned. Each arm reads the elements' total size,
    // and any bits are valid elements.
    unsafe {
        match size_of::<T>() * N {
            1 => transmute_copy(&u8::load(p)),
            2 => transmute_copy(&u16::load(p)),
            4 => transmute_copy(&u32::load(p)),
            8 => transmute_copy(&u64::load(p)),
            _ => transmute_copy(&Quad::load(p)),
        }
    }
}

/// Stores a lane's elements.
///
/// # Safety
///
/// As for [`load`].
#[inline(always)]
pub(crate) unsafe fn store<T: Element, const N: usize>(p: *mut u8, values: [T; N]) {
    // SAFETY: the caller guarantees that `p` is valid and aligned. Each arm writes the elements' total size.
    unsafe {
        match size_of::<T>() * N {
            1 => u8::store(p, transmute_copy(&values)),
            2 => u16::store(p, transmute_copy(&values)),
            4 => u32::store(p, transmute_copy(&values)),
            8 => u64::store(p, transmute_copy(&values)),
            _ => Quad::store(p, transmute_copy(&values)),
        }
    }
}

/// The most quads in a warp's access.
const QUADS: usize = LANES;

/// Loads the elements of all lanes, which are contiguous, into rows (`None`: not needed).
///
/// # Safety
///
/// `p` is valid for all elements and a multiple of one lane's size. The rows contain `T` and are 16-byte
/// aligned.
#[inline(always)]
pub(crate) unsafe fn load_all<T: Element, const N: usize>(p: *const u8, to: [Option<*mut [T; LANES]>; N]) {
    let count = size_of::<T>() * N * LANES / size_of::<Quad>();
    // SAFETY: the caller guarantees that `p` and the rows are valid. `count` quads are the total size, and
    // fill the part of the buffer that is read.
    unsafe {
        if !p.addr().is_multiple_of(16) {
            for l in 0..LANES {
                let values: [T; N] = load(p.add(l * size_of::<T>() * N));
                for (row, value) in to.iter().zip(values) {
                    if let Some(row) = row {
                        (**row)[l] = value;
                    }
                }
            }
            return;
        }
        if N == 1 {
            if let Some(row) = to[0] {
                let row = row.cast::<Quad>();
                for n in 0..count {
                    row.add(n).write(Quad::load(p.add(n * size_of::<Quad>())));
                }
            }
            return;
        }
        let mut buffer = [const { MaybeUninit::<Quad>::uninit() }; QUADS];
        for n in 0..count {
            buffer[n].write(Quad::load(p.add(n * size_of::<Quad>())));
        }
        let elements = buffer.as_ptr().cast::<T>();
        for (k, row) in to.iter().enumerate() {
            if let Some(row) = *row {
                for l in 0..LANES {
                    (*row)[l] = *elements.add(l * N + k);
                }
            }
        }
    }
}

/// Stores the elements of all lanes, which are contiguous, from rows.
///
/// # Safety
///
/// As for [`load_all`].
#[inline(always)]
pub(crate) unsafe fn store_all<T: Element, const N: usize>(p: *mut u8, from: [*const [T; LANES]; N]) {
    let count = size_of::<T>() * N * LANES / size_of::<Quad>();
    // SAFETY: the caller guarantees that `p` and the rows are valid. `count` quads are the total size.
    unsafe {
        if !p.addr().is_multiple_of(16) {
            for l in 0..LANES {
                let values: [T; N] = std::array::from_fn(|k| (*from[k])[l]);
                store(p.add(l * size_of::<T>() * N), values);
            }
            return;
        }
        if N == 1 {
            let row = from[0].cast::<Quad>();
            for n in 0..count {
                Quad::store(p.add(n * size_of::<Quad>()), row.add(n).read());
            }
            return;
        }
        let mut buffer = [const { MaybeUninit::<Quad>::uninit() }; QUADS];
        let elements = buffer.as_mut_ptr().cast::<T>();
        for (k, row) in from.iter().enumerate() {
            for l in 0..LANES {
                elements.add(l * N + k).write((**row)[l]);
            }
        }
        for n in 0..count {
            Quad::store(p.add(n * size_of::<Quad>()), buffer[n].assume_init());
        }
    }
}
