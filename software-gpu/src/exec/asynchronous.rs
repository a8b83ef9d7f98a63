//! Asynchronous copies and the barriers in shared memory that wait for them (`cp.async`, `mbarrier`).
//!
//! A copy runs immediately, which a program cannot distinguish from a fast one.
//!
//! A barrier is a word that is opaque to programs: pending arrivals (20 bits), arrivals per phase (20 bits),
//! bytes still to come (23 bits, signed), and in the highest bit the parity of its phase.

use crate::error::Fault;
use crate::exec::memory::{Generic, Global, Place, Shared, Writable, addresses, locate};
use crate::exec::{reduction, rows};
use crate::machine::address::{RANK, WINDOW_SIZE};
use crate::machine::program::{Handler, Inst, NONE};
use crate::machine::row::LANES;
use crate::machine::warp::{Flow, Warp};
use crate::ptx::ast::Space;

const COUNT: u64 = (1 << 20) - 1;
const PHASE: u64 = 1 << 63;

/// An operation on a barrier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i64)]
pub(crate) enum Action {
    Init,
    Invalidate,
    Arrive,
    ArriveDrop,
    /// Arrives and adds to the expected bytes.
    ArriveExpect,
    ArriveDropExpect,
    Expect,
    Complete,
}

impl Action {
    const ALL: [Action; 8] = [
        Action::Init,
        Action::Invalidate,
        Action::Arrive,
        Action::ArriveDrop,
        Action::ArriveExpect,
        Action::ArriveDropExpect,
        Action::Expect,
        Action::Complete,
    ];
}

#[derive(Clone, Copy)]
struct Barrier {
    pending: u64,
    expected: u64,
    bytes: i64,
    phase: u64,
}

impl Barrier {
    fn decode(v: u64) -> Barrier {
        Barrier {
            pending: v & COUNT,
            expected: v >> 20 & COUNT,
            bytes: ((v << 1) as i64) >> 41,
            phase: v & PHASE,
        }
    }

    fn encode(self) -> u64 {
        self.pending & COUNT
            | (self.expected & COUNT) << 20
            | ((self.bytes as u64) << 40 & !PHASE)
            | self.phase
    }

    fn settle(&mut self) {
        if self.pending == 0 && self.bytes == 0 {
            self.pending = self.expected;
            self.phase ^= PHASE;
        }
    }
}

/// Adds to the bytes still to come of the barrier at an address.
pub(crate) fn bytes_arrive(w: &mut Warp, lane: usize, address: u64, bytes: i64) -> Flow {
    let Some(p) = locate::<Writable>(w, lane, shared_address(address), 8, "write") else {
        return Flow::Fault;
    };
    // SAFETY: `locate` has checked eight aligned bytes.
    unsafe {
        let p = p.cast::<u64>();
        let mut barrier = Barrier::decode(p.read());
        barrier.bytes -= bytes;
        barrier.settle();
        p.write(barrier.encode());
    }
    Flow::Next
}

/// The generic address of a shared address, which may already be generic.
fn shared_address(address: u64) -> u64 {
    let window = crate::machine::address::SHARED_WINDOW;
    if address >= window { address } else { address + window }
}

/// Runs an operation on the barrier at the address in `r[4]`. `r[3]` is the operation, row `r[1]` the count,
/// row `r[2]` the bytes; row `r[0]` gets the previous state.
pub(crate) const ACT: Handler = handler!(|w, i, m| act(w, i, m));

unsafe fn act(w: &mut Warp, i: &Inst, mask: u32) -> Flow {
    // SAFETY: the lowering guarantees the rows' widths; `locate` has checked eight aligned bytes of this
    // block's own memory.
    unsafe {
        let action = Action::ALL[i.r[3] as usize % Action::ALL.len()];
        let addresses = addresses(w, i);
        let counts: [u32; LANES] = rows::get(w, i.r[1]);
        let bytes: [u32; LANES] = rows::get(w, i.r[2]);
        let mut states = [0u64; LANES];
        for lane in (0..LANES).filter(|l| mask >> l & 1 != 0) {
            let address = shared_address(addresses[lane]);
            let Some(p) = locate::<Writable>(w, lane, address, 8, "write") else { return Flow::Fault };
            let p = p.cast::<u64>();
            let count = u64::from(counts[lane]);
            let mut b = Barrier::decode(p.read());
            states[lane] = p.read();
            if matches!(action, Action::ArriveExpect | Action::ArriveDropExpect | Action::Expect) {
                b.bytes += i64::from(bytes[lane]);
            }
            match action {
                Action::Init if count == 0 || count > COUNT => {
                    return w.set_fault(
                        Fault::IllegalInstruction(format!("invalid count {count} of an mbarrier")),
                        lane,
                    );
                }
                Action::Init => b = Barrier { pending: count, expected: count, bytes: 0, phase: 0 },
                Action::Invalidate => b = Barrier { pending: 0, expected: 0, bytes: 0, phase: 0 },
                Action::Expect => {}
                Action::Complete => {
                    b.bytes -= i64::from(bytes[lane]);
                    b.settle();
                }
                _ => {
                    if count > b.pending {
                        let what = format!("mbarrier: {count} arrivals instead of {}", b.pending);
                        return w.set_fault(Fault::IllegalInstruction(what), lane);
                    }
                    b.pending -= count;
                    if matches!(action, Action::ArriveDrop | Action::ArriveDropExpect) {
                        b.expected -= count.min(b.expected);
                    }
                    b.settle();
                }
            }
            p.write(b.encode());
        }
        if i.r[0] != NONE {
            rows::put(w, i.r[0], mask, &states);
        }
        Flow::Next
    }
}

/// Predicate `r[0]`: whether a phase of the barrier at the address in `r[4]` has completed. The phase is that
/// of the state in row `r[1]` (64 bits), or that with the parity in row `r[2]` unless it is NONE.
pub(crate) const TEST: Handler = handler!(|w, i, m| {
    let addresses = addresses(w, i);
    w.spinning = true;
    let mut over = 0;
    for lane in (0..LANES).filter(|l| m >> l & 1 != 0) {
        let Some(p) = locate::<Generic>(w, lane, shared_address(addresses[lane]), 8, "read") else {
            return Flow::Fault;
        };
        let phase = p.cast::<u64>().read() >> 63;
        let asked = if i.r[2] == NONE {
            (*rows::row::<u64>(w, i.r[1]))[lane] >> 63
        } else {
            u64::from((*rows::row::<u32>(w, i.r[2]))[lane] & 1)
        };
        over |= u32::from(phase != asked) << lane;
    }
    rows::put_pred(w, i.r[0], m, over);
    Flow::Next
});

/// `r[0]` (32 bits) = the arrivals that the state in row `r[1]` still waits for.
pub(crate) const PENDING: Handler = lanewise!(|state: u64| (state & COUNT) as u32);

/// `cp.async`: copies `imm` bytes to the shared address in `r[4]` from the global one in row `r[1]` (both
/// with their offsets added). Row `r[2]`, unless NONE, limits the bytes that are read; the rest is filled
/// with zeros.
pub(crate) const COPY: Handler = handler!(|w, i, m| copy(w, i, m));

unsafe fn copy(w: &mut Warp, i: &Inst, mask: u32) -> Flow {
    // SAFETY: the lowering guarantees rows of addresses and counts; `locate` has checked both ends.
    unsafe {
        crate::exec::memory::refresh(w);
        let size = i.imm as u32;
        let to = addresses(w, &Inst { imm: 0, ..i.clone() });
        let from: [u64; LANES] = rows::get(w, i.r[1]);
        for lane in (0..LANES).filter(|l| mask >> l & 1 != 0) {
            let there = if i.r[2] == NONE { size } else { (*rows::row::<u32>(w, i.r[2]))[lane].min(size) };
            let Some(d) = locate::<Shared>(w, lane, to[lane], size, "write") else { return Flow::Fault };
            let mut data = [0u8; 16];
            if there > 0 {
                if from[lane] & u64::from(size - 1) != 0 {
                    let fault = Fault::MisalignedAddress { space: "global", address: from[lane], size };
                    return w.set_fault(fault, lane);
                }
                let Some(s) = Global::find(w, lane, from[lane], there) else {
                    let fault = Fault::IllegalAddress {
                        access: "read",
                        space: "global",
                        address: from[lane],
                        size: there,
                    };
                    return w.set_fault(fault, lane);
                };
                std::ptr::copy_nonoverlapping(s, data.as_mut_ptr(), there as usize);
            }
            std::ptr::copy_nonoverlapping(data.as_ptr(), d, size as usize);
        }
        Flow::Next
    }
}

/// The same address in the shared memory of the cluster's block with this rank.
pub(crate) fn of_rank(address: u64, rank: u64) -> u64 {
    address - address % WINDOW_SIZE + address % RANK + (rank + 1) * RANK
}

/// `cp.async.bulk`: copies the bytes in row `r[2]` to the address in `r[4]` from that in row `r[1]`, and
/// reports them to the barrier at the address in row `r[3]`, if any. Addresses have 64 bits. If there is a
/// row `r[0]` (16 bits), the copy is made for all blocks of the cluster whose ranks it selects, at the same
/// addresses in each. `imm` is the number of a [`reduction`], or 0.
pub(crate) fn bulk(to: Space) -> Option<Handler> {
    match to {
        Space::Shared => Some(handler!(|w, i, m| copy_bulk::<Shared, Generic>(w, i, m))),
        Space::Global => Some(handler!(|w, i, m| copy_bulk::<Global, Shared>(w, i, m))),
        _ => None,
    }
}

unsafe fn copy_bulk<D: Place, S: Place>(w: &mut Warp, i: &Inst, mask: u32) -> Flow {
    // SAFETY: the lowering guarantees rows of addresses and counts; `find` has checked all bytes of both
    // ends.
    unsafe {
        crate::exec::memory::refresh(w);
        let to: [u64; LANES] = rows::get(w, i.r[4]);
        let from: [u64; LANES] = rows::get(w, i.r[1]);
        let sizes: [u32; LANES] = rows::get(w, i.r[2]);
        for lane in (0..LANES).filter(|l| mask >> l & 1 != 0) {
            let size = sizes[lane];
            for (address, space) in [(to[lane], D::SPACE), (from[lane], S::SPACE)] {
                if !address.is_multiple_of(16) || !size.is_multiple_of(16) {
                    let fault = Fault::MisalignedAddress { space: space.name(), address, size };
                    return w.set_fault(fault, lane);
                }
            }
            let outside = |access, space: Space, address| Fault::IllegalAddress {
                access,
                space: space.name(),
                address,
                size,
            };
            let Some(s) = S::find(w, lane, from[lane], size) else {
                return w.set_fault(outside("read", S::SPACE, from[lane]), lane);
            };
            let (named, ranks) = match i.r[0] {
                NONE => (false, 1),
                row => (true, (*rows::row::<u16>(w, row))[lane]),
            };
            for rank in (0..16).filter(|n| ranks >> n & 1 != 0) {
                let of_block = |address: u64| if named { of_rank(address, rank) } else { address };
                let Some(d) = D::find(w, lane, of_block(to[lane]), size) else {
                    return w.set_fault(outside("write", D::SPACE, of_block(to[lane])), lane);
                };
                match reduction::numbered(i.imm) {
                    None => std::ptr::copy(s, d, size as usize),
                    Some(one) => {
                        for at in (0..size as usize).step_by(one.bytes) {
                            (one.apply)(d.add(at), s.add(at));
                        }
                    }
                }
                if i.r[3] != NONE {
                    let barrier = (*rows::row::<u64>(w, i.r[3]))[lane];
                    if bytes_arrive(w, lane, of_block(barrier), i64::from(size)) == Flow::Fault {
                        return Flow::Fault;
                    }
                }
            }
        }
        Flow::Next
    }
}
