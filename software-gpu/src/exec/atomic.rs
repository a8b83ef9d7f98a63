//! Atomic operations on global, shared and generic memory: `atom` and `red`.
//!
//! Each is a host atomic with acquire and release ordering, which is at least as strong as PTX requires.

use std::sync::Mutex;
use std::sync::atomic::{
    AtomicU16, AtomicU32, AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed,
    Ordering::SeqCst, fence,
};

use crate::exec::float::{flush, pass_nan};
use crate::exec::half::{Bf16, F16, Half};
use crate::exec::memory::{Element, Global, Place, Shared, Writable, addresses, locate, refresh};
use crate::exec::rows;
use crate::machine::program::{Handler, Inst, NONE};
use crate::machine::row::LANES;
use crate::machine::warp::{Flow, Warp};
use crate::ptx::ast::Space;

/// A width of atomic operations.
pub(crate) trait Cell: Copy + PartialEq {
    /// # Safety
    ///
    /// `p` is valid and aligned.
    unsafe fn update(p: *mut u8, f: impl Fn(Self) -> Self) -> Self;
}

macro_rules! cell {
    ($t:ty, $a:ty) => {
        impl Cell for $t {
            #[inline(always)]
            unsafe fn update(p: *mut u8, f: impl Fn($t) -> $t) -> $t {
                // SAFETY: the trait's contract makes `p` valid and aligned.
                let cell = unsafe { <$a>::from_ptr(p.cast()) };
                let mut old = cell.load(Relaxed);
                loop {
                    match cell.compare_exchange_weak(old, f(old), AcqRel, Acquire) {
                        Ok(old) => return old,
                        Err(now) => old = now,
                    }
                }
            }
        }
    };
}
cell!(u16, AtomicU16);
cell!(u32, AtomicU32);
cell!(u64, AtomicU64);

impl Cell for u128 {
    unsafe fn update(p: *mut u8, f: impl Fn(u128) -> u128) -> u128 {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("cmpxchg16b") {
            // SAFETY: the trait's contract makes `p` valid and aligned; the CPU has the instruction.
            unsafe {
                let mut old = u128::load(p);
                loop {
                    let now = exchange_wide(p, old, f(old));
                    if now == old {
                        return old;
                    }
                    old = now;
                }
            }
        }
        // SAFETY: the trait's contract makes `p` valid and aligned.
        unsafe { update_in_turn(p, f) }
    }
}

/// Replaces the value at `p` by `new` if it is `old`, and returns the previous value. The intrinsic cannot be
/// used: LLVM inlines it into functions where the feature is not enabled, and calls a library function there.
///
/// # Safety
///
/// `p` is valid for 16 bytes and a multiple of 16; the CPU has the instruction.
#[cfg(target_arch = "x86_64")]
unsafe fn exchange_wide(p: *mut u8, old: u128, new: u128) -> u128 {
    let (mut low, mut high) = (old as u64, (old >> 64) as u64);
    // SAFETY: the caller guarantees that `p` is valid and that the CPU has the instruction. LLVM reserves
    // `rbx`, so it is restored.
    unsafe {
        std::arch::asm!(
            "xchg {saved}, rbx",
            "lock cmpxchg16b [rdi]",
            "mov rbx, {saved}",
            saved = inout(reg) new as u64 => _,
            in("rcx") (new >> 64) as u64,
            in("rdi") p,
            inout("rax") low,
            inout("rdx") high,
            options(nostack)
        );
    }
    u128::from(low) | u128::from(high) << 64
}

/// For CPUs without the instruction: a process-wide lock makes 128-bit operations atomic with respect to each
/// other.
///
/// # Safety
///
/// As for [`Cell::update`].
unsafe fn update_in_turn(p: *mut u8, f: impl Fn(u128) -> u128) -> u128 {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
    fence(SeqCst);
    // SAFETY: the caller guarantees that `p` is valid and aligned.
    unsafe {
        let old = u128::load(p);
        u128::store(p, f(old));
        fence(SeqCst);
        old
    }
}

/// `r[0]` = old value; address `r[4]`; operands `r[1]` and `r[2]`.
///
/// # Safety
///
/// The rows contain `T`.
#[inline(always)]
unsafe fn atomic<P: Place, T: Cell>(w: &mut Warp, i: &Inst, mask: u32, f: impl Fn(T, T, T) -> T) -> Flow {
    // SAFETY: the caller guarantees rows of `T`.
    unsafe { atomic_at::<P, T>(w, i, mask, |x, b, c, _| f(x, b, c)) }
}

/// Like [`atomic`], but `f` is told whether the memory is shared, because different hardware units execute
/// those operations.
///
/// # Safety
///
/// As for [`atomic`].
#[inline(always)]
unsafe fn atomic_at<P: Place, T: Cell>(
    w: &mut Warp,
    i: &Inst,
    mask: u32,
    f: impl Fn(T, T, T, bool) -> T,
) -> Flow {
    // SAFETY: the caller guarantees rows of `T`; `locate` has checked an aligned `T`.
    unsafe {
        let addresses = addresses(w, i);
        refresh(w);
        w.spinning = true;
        let b: [T; LANES] = rows::get(w, i.r[1]);
        let c: [T; LANES] = rows::get(w, i.r[2]);
        let mut old = b;
        for l in 0..LANES {
            if mask >> l & 1 == 0 {
                continue;
            }
            let Some(p) = locate::<P>(w, l, addresses[l], size_of::<T>() as u32, "atomic operation") else {
                return Flow::Fault;
            };
            let shared = P::is_shared(addresses[l]);
            old[l] = T::update(p, |x| f(x, b[l], c[l], shared));
        }
        if i.r[0] != NONE {
            rows::put(w, i.r[0], mask, &old);
        }
        Flow::Next
    }
}

pub(crate) fn half_add<H: Half>(x: u16, b: u16) -> u16 {
    H::encode(crate::exec::float::add_odd(H::decode(x), H::decode(b)), 0)
}

/// Sums flush subnormals except in shared memory.
pub(crate) fn add_f32(x: u32, b: u32, shared: bool) -> u32 {
    let (x, b) = (f32::from_bits(x), f32::from_bits(b));
    let sum = if shared { x + b } else { flush(flush(x) + flush(b)) };
    if sum.is_nan() { 0x7fff_ffff } else { sum.to_bits() }
}

/// Of two NaNs, the one in memory wins in shared memory; elsewhere the operand wins, and neither is made
/// quiet.
pub(crate) fn add_f64(x: u64, b: u64, shared: bool) -> u64 {
    let (old, operand) = (f64::from_bits(x), f64::from_bits(b));
    if shared {
        return pass_nan(old + operand, &[old, operand]).to_bits();
    }
    if operand.is_nan() {
        b
    } else if old.is_nan() {
        x
    } else {
        pass_nan(old + operand, &[]).to_bits()
    }
}

macro_rules! operation {
    ($p:ty, $t:ty, $f:expr) => {
        handler!(|w, i, m| atomic::<$p, $t>(w, i, m, $f))
    };
}

macro_rules! integer {
    ($op:expr, $ty:expr, $p:ty, $u:ty, $s:ty, $ut:literal, $st:literal, $bt:literal) => {
        match ($op, $ty) {
            ("add", $ut | $st) => Some(operation!($p, $u, |x, b, _| x.wrapping_add(b))),
            ("min", $ut) => Some(operation!($p, $u, |x, b, _| x.min(b))),
            ("max", $ut) => Some(operation!($p, $u, |x, b, _| x.max(b))),
            ("min", $st) => Some(operation!($p, $u, |x, b, _| (x as $s).min(b as $s) as $u)),
            ("max", $st) => Some(operation!($p, $u, |x, b, _| (x as $s).max(b as $s) as $u)),
            ("and", $bt) => Some(operation!($p, $u, |x, b, _| x & b)),
            ("or", $bt) => Some(operation!($p, $u, |x, b, _| x | b)),
            ("xor", $bt) => Some(operation!($p, $u, |x, b, _| x ^ b)),
            ("exch", $bt) => Some(operation!($p, $u, |_, b, _| b)),
            ("cas", $bt | $ut | $st) => Some(operation!($p, $u, |x, b, c| if x == b { c } else { x })),
            ("inc", $ut) => Some(operation!($p, $u, |x, b, _| if x >= b { 0 } else { x + 1 })),
            ("dec", $ut) => Some(operation!($p, $u, |x, b, _| { if x == 0 || x > b { b } else { x - 1 } })),
            _ => None,
        }
    };
}

macro_rules! place {
    ($op:expr, $ty:expr, $p:ty) => {
        integer!($op, $ty, $p, u32, i32, "u32", "s32", "b32")
            .or_else(|| integer!($op, $ty, $p, u64, i64, "u64", "s64", "b64"))
            .or_else(|| {
                Some(match ($op, $ty) {
                    ("cas", "b16") => operation!($p, u16, |x, b, c| if x == b { c } else { x }),
                    ("cas", "b128") => operation!($p, u128, |x, b, c| if x == b { c } else { x }),
                    ("exch", "b128") => operation!($p, u128, |_, b, _| b),
                    ("add", "f32") => {
                        handler!(|w, i, m| atomic_at::<$p, u32>(w, i, m, |x, b, _, s| add_f32(x, b, s)))
                    }
                    ("add", "f64") => {
                        handler!(|w, i, m| atomic_at::<$p, u64>(w, i, m, |x, b, _, s| add_f64(x, b, s)))
                    }
                    ("add.noftz", "f16") => operation!($p, u16, |x, b, _| half_add::<F16>(x, b)),
                    ("add.noftz", "bf16") => operation!($p, u16, |x, b, _| half_add::<Bf16>(x, b)),
                    ("add.noftz", "f16x2") => operation!($p, u32, |x, b, _| {
                        u32::from(half_add::<F16>(x as u16, b as u16))
                            | u32::from(half_add::<F16>((x >> 16) as u16, (b >> 16) as u16)) << 16
                    }),
                    ("add.noftz", "bf16x2") => operation!($p, u32, |x, b, _| {
                        u32::from(half_add::<Bf16>(x as u16, b as u16))
                            | u32::from(half_add::<Bf16>((x >> 16) as u16, (b >> 16) as u16)) << 16
                    }),
                    _ => return None,
                })
            })
    };
}

/// The atomic operation on a space and type.
pub(crate) fn handler(op: &str, ty: &str, space: Space) -> Option<Handler> {
    match space {
        Space::Global => place!(op, ty, Global),
        Space::Shared => place!(op, ty, Shared),
        Space::Generic => place!(op, ty, Writable),
        _ => None,
    }
}
