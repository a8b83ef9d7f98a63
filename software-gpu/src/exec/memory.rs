//! Loads and stores in every state space.
//!
//! Addresses are in row `r[4]` (64 bits, or 32 if the instruction's flag says so) plus `imm`; the values are
//! in rows `r[0]` to `r[3]`. Global memory is accessed with relaxed atomics, because other threads may access
//! it at any time; a lane's elements use one access (see `vector_access`). Shared and local memory have only
//! one worker at a time.

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use crate::error::Fault;
use crate::exec::rows;
use crate::exec::vector_access::{self, Quad};
use crate::machine::address::{
    LOCAL_WINDOW, PARAM_WINDOW, RANK, RESERVED, RESERVED_BYTES, SHARED_WINDOW, WINDOW_SIZE,
};
use crate::machine::block::BlockContext;
use crate::machine::memory::MODULE_BASE;
use crate::machine::program::{Handler, Inst};
use crate::machine::row::LANES;
use crate::machine::warp::{Flow, Warp};
use crate::ptx::ast::Space;

/// Bit of [`Inst::flags`]: addresses are 32 bits wide.
pub(crate) const ADDRESS_32: u8 = 1;
/// Bit of [`Inst::flags`]: the access may be part of a wait for other threads.
pub(crate) const SPIN: u8 = 2;

/// A type of values in memory.
pub(crate) trait Element: Copy + Default {
    /// # Safety
    ///
    /// `p` is valid and aligned for the type's accesses.
    unsafe fn load(p: *const u8) -> Self;
    /// # Safety
    ///
    /// As for `load`.
    unsafe fn store(p: *mut u8, value: Self);
}

macro_rules! element {
    ($t:ty, $atomic:ty) => {
        impl Element for $t {
            #[inline(always)]
            unsafe fn load(p: *const u8) -> $t {
                // SAFETY: the trait's contract makes `p` valid and aligned.
                unsafe { <$atomic>::from_ptr(p.cast_mut().cast()).load(Ordering::Relaxed) }
            }
            #[inline(always)]
            unsafe fn store(p: *mut u8, value: $t) {
                // SAFETY: the trait's contract makes `p` valid and aligned.
                unsafe { <$atomic>::from_ptr(p.cast()).store(value, Ordering::Relaxed) }
            }
        }
    };
}
element!(u8, AtomicU8);
element!(u16, AtomicU16);
element!(u32, AtomicU32);
element!(u64, AtomicU64);

impl Element for u128 {
    #[inline(always)]
    unsafe fn load(p: *const u8) -> u128 {
        // SAFETY: the trait's contract makes `p` valid and aligned.
        unsafe { std::mem::transmute(Quad::load(p)) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut u8, value: u128) {
        // SAFETY: the trait's contract makes `p` valid and aligned.
        unsafe { Quad::store(p, std::mem::transmute::<u128, Quad>(value)) }
    }
}

/// Finds host addresses for a state space.
pub(crate) trait Place {
    const SPACE: Space;
    /// The host address of `size` bytes, or `None` if they are not all accessible. Does not check alignment.
    fn find(w: &mut Warp, lane: usize, address: u64, size: u32) -> Option<*mut u8>;
    /// Whether an address that `find` accepts is in shared memory.
    #[inline(always)]
    fn is_shared(_address: u64) -> bool {
        false
    }
    /// Like `find`, for an address that means the same to all lanes; `None` if it does not.
    #[inline(always)]
    fn find_for_all(w: &mut Warp, address: u64, size: u32) -> Option<*mut u8> {
        Self::find(w, 0, address, size)
    }
}

pub(crate) struct Global;
pub(crate) struct Shared;
pub(crate) struct Local;
pub(crate) struct Param;
pub(crate) struct Generic;
/// The generic addresses that kernels may write to: all but their parameters, which all threads of a launch
/// share.
pub(crate) struct Writable;

impl Place for Global {
    const SPACE: Space = Space::Global;
    #[inline(always)]
    fn find(w: &mut Warp, _lane: usize, address: u64, size: u32) -> Option<*mut u8> {
        let block = w.block();
        let hit = &block.hit;
        if address >= hit.start && address < hit.end && hit.end - address >= u64::from(size) {
            return Some(address.wrapping_add(hit.delta) as *mut u8);
        }
        find_global(w, address, size)
    }
}

#[cold]
#[inline(never)]
fn find_global(w: &mut Warp, address: u64, size: u32) -> Option<*mut u8> {
    let block = w.block();
    // SAFETY: the result is used only if `address` is inside this allocation.
    let hit = block.memory().find(address)?;
    if u64::from(size) > hit.end - address {
        return None;
    }
    block.hit = hit;
    Some(address.wrapping_add(hit.delta) as *mut u8)
}

/// Drops the cached allocation if something was released since.
#[inline(always)]
pub(crate) fn refresh(w: &mut Warp) {
    let block = w.block();
    let generation = block.memory().generation();
    if generation != block.generation {
        block.generation = generation;
        block.hit = crate::machine::memory::FoundAllocation { start: 1, end: 0, delta: 0 };
    }
}

impl Place for Shared {
    const SPACE: Space = Space::Shared;
    #[inline(always)]
    fn is_shared(_address: u64) -> bool {
        true
    }
    #[inline(always)]
    fn find(w: &mut Warp, _lane: usize, address: u64, size: u32) -> Option<*mut u8> {
        let block = w.block();
        // A generic address may be passed for a shared one.
        let offset = if address >= SHARED_WINDOW { address - SHARED_WINDOW } else { address };
        let bytes = u64::from(block.shared_bytes);
        if offset > bytes || offset + u64::from(size) > bytes {
            return find_elsewhere(w, offset, size);
        }
        // SAFETY: `shared` has at least `shared_bytes`.
        Some(unsafe { block.shared.as_mut_ptr().cast::<u8>().add(offset as usize) })
    }
}

/// Shared memory outside the kernel's own: the system's, and that of a block in the cluster (possibly this
/// one).
#[cold]
#[inline(never)]
fn find_elsewhere(w: &mut Warp, offset: u64, size: u32) -> Option<*mut u8> {
    let block: *mut BlockContext = match offset / RANK {
        0 => w.block,
        rank => w.block().cluster().block(u32::try_from(rank).ok()? - 1)?,
    };
    let offset = offset % RANK;
    // SAFETY: the cluster's blocks live as long as any of its warps runs, and only this worker accesses them.
    // Both memories are at least as large as their sizes say.
    unsafe {
        let (memory, offset, bytes) = match offset.checked_sub(RESERVED) {
            Some(offset) => ((*block).reserved.as_mut_ptr(), offset, RESERVED_BYTES),
            None => ((*block).shared.as_mut_ptr(), offset, u64::from((*block).shared_bytes)),
        };
        if offset + u64::from(size) > bytes { None } else { Some(memory.cast::<u8>().add(offset as usize)) }
    }
}

/// The rank of the block whose shared memory contains a shared or generic address.
pub(crate) fn rank_of(w: &mut Warp, address: u64) -> u32 {
    match address % WINDOW_SIZE / RANK {
        0 => w.block().rank,
        n => n as u32 - 1,
    }
}

impl Place for Local {
    const SPACE: Space = Space::Local;
    #[inline(always)]
    fn find_for_all(_w: &mut Warp, _address: u64, _size: u32) -> Option<*mut u8> {
        None
    }
    #[inline(always)]
    fn find(w: &mut Warp, lane: usize, address: u64, size: u32) -> Option<*mut u8> {
        w.local.at(lane, address, size)
    }
}

impl Place for Param {
    const SPACE: Space = Space::Param;
    #[inline(always)]
    fn find(w: &mut Warp, _lane: usize, address: u64, size: u32) -> Option<*mut u8> {
        let run = w.block().grid();
        let bytes = u64::from(run.param_bytes);
        if address > bytes || address + u64::from(size) > bytes {
            return None;
        }
        // SAFETY: the offset is inside the parameters. The lowering refuses stores there, and `Writable` does
        // not find them, so constant memory is only read.
        Some(unsafe { run.params.as_ptr().cast::<u8>().add(address as usize).cast_mut() })
    }
}

impl Place for Generic {
    const SPACE: Space = Space::Generic;
    #[inline(always)]
    fn is_shared(address: u64) -> bool {
        address.wrapping_sub(SHARED_WINDOW) < WINDOW_SIZE
    }
    #[inline(always)]
    fn find_for_all(w: &mut Warp, address: u64, size: u32) -> Option<*mut u8> {
        if address >= MODULE_BASE {
            return Global::find(w, 0, address, size);
        }
        let offset = address.wrapping_sub(SHARED_WINDOW);
        if offset < WINDOW_SIZE { Shared::find(w, 0, offset, size) } else { None }
    }
    #[inline(always)]
    fn find(w: &mut Warp, lane: usize, address: u64, size: u32) -> Option<*mut u8> {
        if address >= MODULE_BASE {
            return Global::find(w, lane, address, size);
        }
        window(w, lane, address, size)
    }
}

impl Place for Writable {
    const SPACE: Space = Space::Generic;
    #[inline(always)]
    fn is_shared(address: u64) -> bool {
        Generic::is_shared(address)
    }
    #[inline(always)]
    fn find_for_all(w: &mut Warp, address: u64, size: u32) -> Option<*mut u8> {
        // Does not find parameters.
        Generic::find_for_all(w, address, size)
    }
    #[inline(always)]
    fn find(w: &mut Warp, lane: usize, address: u64, size: u32) -> Option<*mut u8> {
        if address >= MODULE_BASE {
            return Global::find(w, lane, address, size);
        }
        if space_of(address) == Space::Param { None } else { window(w, lane, address, size) }
    }
}

#[inline(never)]
fn window(w: &mut Warp, lane: usize, address: u64, size: u32) -> Option<*mut u8> {
    let offset = address % WINDOW_SIZE;
    match address - offset {
        SHARED_WINDOW => Shared::find(w, lane, offset, size),
        LOCAL_WINDOW => Local::find(w, lane, offset, size),
        PARAM_WINDOW => Param::find(w, lane, offset, size),
        _ => None,
    }
}

/// The state space of a generic address.
pub(crate) fn space_of(address: u64) -> Space {
    match address - address % WINDOW_SIZE {
        SHARED_WINDOW => Space::Shared,
        LOCAL_WINDOW => Space::Local,
        PARAM_WINDOW => Space::Param,
        _ => Space::Global,
    }
}

/// The addresses of an instruction.
///
/// # Safety
///
/// `r[4]` is a row of the width that the flags say.
#[inline(always)]
pub(crate) unsafe fn addresses(w: &Warp, i: &Inst) -> [u64; LANES] {
    // SAFETY: the caller guarantees the row's width.
    unsafe {
        let mut out = [0u64; LANES];
        if i.flags & ADDRESS_32 != 0 {
            let a: [u32; LANES] = rows::get(w, i.r[4]);
            for l in 0..LANES {
                out[l] = u64::from(a[l].wrapping_add(i.imm as u32));
            }
        } else {
            let a: [u64; LANES] = rows::get(w, i.r[4]);
            for l in 0..LANES {
                out[l] = a[l].wrapping_add(i.imm as u64);
            }
        }
        out
    }
}

/// Checks the alignment and finds the host address, or sets the warp's fault.
#[inline(always)]
pub(crate) fn locate<P: Place>(
    w: &mut Warp,
    lane: usize,
    address: u64,
    size: u32,
    access: &'static str,
) -> Option<*mut u8> {
    if address & u64::from(size - 1) != 0 {
        w.set_fault(Fault::MisalignedAddress { space: P::SPACE.name(), address, size }, lane);
        return None;
    }
    let found = P::find(w, lane, address, size);
    if found.is_none() {
        w.set_fault(Fault::IllegalAddress { access, space: P::SPACE.name(), address, size }, lane);
    }
    found
}

/// Loads `N` elements for each lane.
///
/// # Safety
///
/// The operands are rows of `T` and of addresses.
#[inline(always)]
pub(crate) unsafe fn load<P: Place, T: Element, const N: usize>(w: &mut Warp, i: &Inst, mask: u32) -> Flow {
    // SAFETY: the caller guarantees the rows; `locate` has checked the bytes of all elements, aligned to
    // their total size.
    unsafe {
        let addresses = addresses(w, i);
        let size = (size_of::<T>() * N) as u32;
        refresh(w);
        w.spinning |= i.flags & SPIN != 0;
        if mask == u32::MAX && load_together::<P, T, N>(w, i, &addresses) {
            return Flow::Next;
        }
        let mut values = [[T::default(); LANES]; N];
        for l in 0..LANES {
            if mask >> l & 1 == 0 {
                continue;
            }
            let Some(p) = locate::<P>(w, l, addresses[l], size, "read") else {
                return Flow::Fault;
            };
            let lane: [T; N] = vector_access::load(p);
            for (row, value) in values.iter_mut().zip(lane) {
                row[l] = value;
            }
        }
        for (n, row) in values.iter().enumerate() {
            if i.r[n] != crate::machine::program::NONE {
                rows::put(w, i.r[n], mask, row);
            }
        }
        Flow::Next
    }
}

/// Whether the lanes' addresses are `step` bytes apart.
#[inline(always)]
fn apart(addresses: &[u64; LANES], step: u64) -> bool {
    let mut differs = 0;
    for l in 0..LANES {
        differs |= addresses[l] ^ addresses[0].wrapping_add(l as u64 * step);
    }
    differs == 0
}

/// Fast paths for a load by a whole warp: all lanes use one address, or adjacent ones. Returns false in any
/// other case, or if anything is wrong.
///
/// # Safety
///
/// As for [`load`].
#[inline(always)]
unsafe fn load_together<P: Place, T: Element, const N: usize>(
    w: &mut Warp,
    i: &Inst,
    addresses: &[u64; LANES],
) -> bool {
    let size = size_of::<T>() * N;
    if addresses[0] & (size as u64 - 1) != 0 {
        return false;
    }
    // SAFETY: `find_for_all` has checked the bytes; the caller guarantees the rows. Memory that other workers
    // may write is only read by atomic loads.
    unsafe {
        if addresses[1] == addresses[0] {
            if !apart(addresses, 0) {
                return false;
            }
            let Some(p) = P::find_for_all(w, addresses[0], size as u32) else { return false };
            let values: [T; N] = vector_access::load(p);
            for (n, value) in values.into_iter().enumerate() {
                if i.r[n] != crate::machine::program::NONE {
                    *rows::row::<T>(w, i.r[n]) = [value; LANES];
                }
            }
            return true;
        }
        if !apart(addresses, size as u64) {
            return false;
        }
        let Some(p) = P::find_for_all(w, addresses[0], (size * LANES) as u32) else { return false };
        let wanted = |n: usize| i.r[n] != crate::machine::program::NONE;
        vector_access::load_all(
            p,
            std::array::from_fn::<_, N, _>(|n| wanted(n).then(|| rows::row::<T>(w, i.r[n]))),
        );
    }
    true
}

/// Stores `N` elements for each lane.
///
/// # Safety
///
/// As for [`load`].
#[inline(always)]
pub(crate) unsafe fn store<P: Place, T: Element, const N: usize>(w: &mut Warp, i: &Inst, mask: u32) -> Flow {
    // SAFETY: the caller guarantees the rows; `locate` has checked the bytes of all elements, aligned to
    // their total size.
    unsafe {
        let addresses = addresses(w, i);
        let size = (size_of::<T>() * N) as u32;
        refresh(w);
        if mask == u32::MAX
            && apart(&addresses, u64::from(size))
            && addresses[0] & u64::from(size - 1) == 0
            && let Some(p) = P::find_for_all(w, addresses[0], size * LANES as u32)
        {
            vector_access::store_all(
                p,
                std::array::from_fn::<_, N, _>(|n| rows::row::<T>(w, i.r[n]).cast_const()),
            );
            return Flow::Next;
        }
        let mut values = [[T::default(); LANES]; N];
        for (n, row) in values.iter_mut().enumerate() {
            *row = rows::get(w, i.r[n]);
        }
        for l in 0..LANES {
            if mask >> l & 1 == 0 {
                continue;
            }
            let Some(p) = locate::<P>(w, l, addresses[l], size, "write") else {
                return Flow::Fault;
            };
            vector_access::store(p, std::array::from_fn::<T, N, _>(|n| values[n][l]));
        }
        Flow::Next
    }
}

/// Loads from the same offset of the kernel's parameters for all lanes.
///
/// # Safety
///
/// The operands are rows of `T`.
#[inline(always)]
unsafe fn load_param<T: Element, const N: usize>(w: &mut Warp, i: &Inst, mask: u32) -> Flow {
    // SAFETY: the caller guarantees the rows; the lowering keeps the offset inside the parameters.
    unsafe {
        for n in 0..N {
            let at = i.imm as u64 + (n * size_of::<T>()) as u64;
            let Some(p) = Param::find(w, 0, at, size_of::<T>() as u32) else {
                let fault = Fault::IllegalAddress {
                    access: "read",
                    space: "param",
                    address: at,
                    size: size_of::<T>() as u32,
                };
                return w.set_fault(fault, 0);
            };
            let value: T = p.cast::<T>().read_unaligned();
            if i.r[n] != crate::machine::program::NONE {
                rows::put(w, i.r[n], mask, &[value; LANES]);
            }
        }
        Flow::Next
    }
}

/// Loads or stores at `imm` in the current call's local memory.
///
/// # Safety
///
/// The operands are rows of `T`.
#[inline(always)]
unsafe fn frame_access<T: Element, const N: usize, const STORE: bool>(
    w: &mut Warp,
    i: &Inst,
    mask: u32,
) -> Flow {
    // SAFETY: the caller guarantees the rows; the lowering aligns frames to 16 bytes and variables to their
    // elements.
    unsafe {
        let at = u64::from(w.local_base) + i.imm as u64;
        let size = (size_of::<T>() * N) as u32;
        for l in 0..LANES {
            if mask >> l & 1 == 0 {
                continue;
            }
            let Some(p) = locate::<Local>(w, l, at, size, if STORE { "write" } else { "read" }) else {
                return Flow::Fault;
            };
            for n in 0..N {
                let q = p.add(n * size_of::<T>());
                if i.r[n] == crate::machine::program::NONE {
                    continue;
                }
                let row = rows::row::<T>(w, i.r[n]);
                if STORE {
                    T::store(q, (*row)[l]);
                } else {
                    (*row)[l] = T::load(q);
                }
            }
        }
        Flow::Next
    }
}

macro_rules! by_shape {
    ($bits:expr, $n:expr, $f:ident $(, $p:ty)? $(; $s:literal)?) => {
        Some(match ($bits, $n) {
            (8, 1) => handler!(|w, i, m| $f::<$($p,)? u8, 1 $(, $s)?>(w, i, m)),
            (8, 2) => handler!(|w, i, m| $f::<$($p,)? u8, 2 $(, $s)?>(w, i, m)),
            (8, 4) => handler!(|w, i, m| $f::<$($p,)? u8, 4 $(, $s)?>(w, i, m)),
            (16, 1) => handler!(|w, i, m| $f::<$($p,)? u16, 1 $(, $s)?>(w, i, m)),
            (16, 2) => handler!(|w, i, m| $f::<$($p,)? u16, 2 $(, $s)?>(w, i, m)),
            (16, 4) => handler!(|w, i, m| $f::<$($p,)? u16, 4 $(, $s)?>(w, i, m)),
            (32, 1) => handler!(|w, i, m| $f::<$($p,)? u32, 1 $(, $s)?>(w, i, m)),
            (32, 2) => handler!(|w, i, m| $f::<$($p,)? u32, 2 $(, $s)?>(w, i, m)),
            (32, 4) => handler!(|w, i, m| $f::<$($p,)? u32, 4 $(, $s)?>(w, i, m)),
            (64, 1) => handler!(|w, i, m| $f::<$($p,)? u64, 1 $(, $s)?>(w, i, m)),
            (64, 2) => handler!(|w, i, m| $f::<$($p,)? u64, 2 $(, $s)?>(w, i, m)),
            (128, 1) => handler!(|w, i, m| $f::<$($p,)? u128, 1 $(, $s)?>(w, i, m)),
            _ => return None,
        })
    };
}

/// The load of `n` elements of `bits` bits.
pub(crate) fn load_handler(space: Space, bits: u32, n: usize) -> Option<Handler> {
    match space {
        Space::Global | Space::Const => by_shape!(bits, n, load, Global),
        Space::Shared => by_shape!(bits, n, load, Shared),
        Space::Local => by_shape!(bits, n, load, Local),
        Space::Param => by_shape!(bits, n, load, Param),
        Space::Generic => by_shape!(bits, n, load, Generic),
        Space::Reg => None,
    }
}

/// The store of `n` elements of `bits` bits.
pub(crate) fn store_handler(space: Space, bits: u32, n: usize) -> Option<Handler> {
    match space {
        Space::Global => by_shape!(bits, n, store, Global),
        Space::Shared => by_shape!(bits, n, store, Shared),
        Space::Local => by_shape!(bits, n, store, Local),
        Space::Generic => by_shape!(bits, n, store, Writable),
        Space::Const | Space::Param | Space::Reg => None,
    }
}

/// The load from a fixed offset of a kernel's parameters.
pub(crate) fn param_handler(bits: u32, n: usize) -> Option<Handler> {
    by_shape!(bits, n, load_param)
}

/// The load from a fixed offset of the call's local memory.
pub(crate) fn frame_load_handler(bits: u32, n: usize) -> Option<Handler> {
    by_shape!(bits, n, frame_access; false)
}

/// The store to a fixed offset of the call's local memory.
pub(crate) fn frame_store_handler(bits: u32, n: usize) -> Option<Handler> {
    by_shape!(bits, n, frame_access; true)
}

/// `r[0]` = the address of offset `imm` in the call's local memory (64 bits, or 32 by the flag).
pub(crate) const LOCAL_ADDRESS: Handler = handler!(|w, i, m| {
    let at = u64::from(w.local_base).wrapping_add(i.imm as u64);
    if i.flags & ADDRESS_32 != 0 {
        rows::put(w, i.r[0], m, &[at as u32; LANES]);
    } else {
        rows::put(w, i.r[0], m, &[at; LANES]);
    }
    Flow::Next
});

/// `membar` and `fence`.
pub(crate) const FENCE: Handler = handler!(|w, i, m| {
    std::sync::atomic::fence(Ordering::SeqCst);
    Flow::Next
});
