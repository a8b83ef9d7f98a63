//! Copies of tiles by tensor map (`cp.async.bulk.tensor`, also with a reduction).
//!
//! An H200 works in units of 16 bytes where PTX's manual speaks of elements, and so does this: a tile that
//! does not begin at a multiple of 16 bytes in its row is an illegal instruction, and so is a store that
//! begins before the tensor. A store writes all of the unit in which the tensor's row ends; a load stops at
//! the end of the row. (Observed with driver 580 for elements of 1, 2 and 4 bytes; the test program
//! `tensor_tiles` compares it.)

use crate::error::Fault;
use crate::exec::asynchronous::{bytes_arrive, of_rank};
use crate::exec::memory::{Generic, Global, Place, Shared};
use crate::exec::reduction::{self, Reduction};
use crate::exec::rows;
use crate::machine::program::{Handler, Inst, NONE};
use crate::machine::properties::MAX_SHARED;
use crate::machine::row::LANES;
use crate::machine::tensor_map::{MAX_RANK, TensorMap};
use crate::machine::warp::{Flow, Warp};

/// Alignment of a tile in shared memory.
const ALIGNMENT: u64 = 128;

/// The reductions of a store to a tensor.
pub(crate) const OPERATIONS: [&str; 9] = ["", "add", "min", "max", "inc", "dec", "and", "or", "xor"];

/// Loads a tile to the shared address in row `r[4]`. The map is at the address in row `r[1]`; the extension
/// at `r[2]` lists the rows of the coordinates; the barrier is at the address in row `r[3]`. Row `r[0]` is as
/// in [`super::asynchronous::bulk`].
pub(crate) const LOAD: Handler = handler!(|w, i, m| each(w, i, m, load));

/// Stores a tile from the shared address in row `r[4]` to a tensor, otherwise like [`LOAD`]; `imm` is an
/// index into [`OPERATIONS`].
pub(crate) const STORE: Handler = handler!(|w, i, m| each(w, i, m, store));

/// The unit of copies in bytes.
const PIECE: u64 = 16;

/// Where bytes of a tile belong, with their offset in the tensor.
#[derive(Clone, Copy)]
enum Part {
    Inside(u64),
    /// After the end of a row, in its last unit.
    Padding(u64),
    Outside,
}

/// A tile of one lane.
struct Tile {
    map: TensorMap,
    at: [i64; MAX_RANK],
    /// Its address in shared memory.
    address: u64,
}

type Action = unsafe fn(&mut Warp, &Inst, usize, &Tile) -> Flow;

unsafe fn each(w: &mut Warp, i: &Inst, mask: u32, action: Action) -> Flow {
    // SAFETY: the lowering guarantees the rows; `find` has checked the bytes of a map.
    unsafe {
        crate::exec::memory::refresh(w);
        let maps: [u64; LANES] = rows::get(w, i.r[1]);
        let addresses: [u64; LANES] = rows::get(w, i.r[4]);
        for lane in (0..LANES).filter(|l| mask >> l & 1 != 0) {
            let Some(p) = Generic::find(w, lane, maps[lane], 128) else {
                return outside(w, lane, "read", "generic", maps[lane], 128);
            };
            let bytes = p.cast::<[u8; 128]>().read_unaligned();
            let rank = w.ext()[i.r[2] as usize] as usize;
            let Some(map) = TensorMap::decode(&bytes).filter(|map| map.rank as usize == rank) else {
                let what = format!("no valid tensor map of {rank} dimensions at {:#x}", maps[lane]);
                return w.set_fault(Fault::IllegalInstruction(what), lane);
            };
            if map.tile_bytes() > MAX_SHARED.into() {
                let what = format!("a tensor's tile of {} bytes, more than shared memory", map.tile_bytes());
                return w.set_fault(Fault::IllegalInstruction(what), lane);
            }
            if !addresses[lane].is_multiple_of(ALIGNMENT) {
                let what = format!("a tensor's tile at the unaligned shared address {:#x}", addresses[lane]);
                return w.set_fault(Fault::IllegalInstruction(what), lane);
            }
            let mut at = [0; MAX_RANK];
            for d in 0..rank {
                let row = w.ext()[i.r[2] as usize + 1 + d];
                at[d] = i64::from((*rows::row::<i32>(w, row))[lane]);
            }
            if !(at[0] as u64).wrapping_mul(map.width().into()).is_multiple_of(PIECE) {
                let what = format!(
                    "a tile that begins at element {} of a tensor's rows, of {} bytes each",
                    at[0],
                    map.width()
                );
                return w.set_fault(Fault::IllegalInstruction(what), lane);
            }
            let tile = Tile { map, at, address: addresses[lane] };
            if action(w, i, lane, &tile) == Flow::Fault {
                return Flow::Fault;
            }
        }
        Flow::Next
    }
}

fn outside(
    w: &mut Warp,
    lane: usize,
    access: &'static str,
    space: &'static str,
    address: u64,
    size: u64,
) -> Flow {
    let size = u32::try_from(size).unwrap_or(u32::MAX);
    w.set_fault(Fault::IllegalAddress { access, space, address, size }, lane)
}

impl Tile {
    /// For each row of the tile, where it begins in the tensor in bytes (`None` if it is outside).
    fn rows(&self) -> impl Iterator<Item = Option<u64>> + '_ {
        let rank = self.map.rank as usize;
        let count = (1..rank).fold(1u64, |n, d| n * u64::from(self.map.count(d)));
        (0..count).map(move |n| {
            let mut rest = n;
            let mut offset = 0u64;
            for d in 1..rank {
                let here = u64::from(self.map.count(d));
                let x = self.at[d] + (rest % here) as i64 * i64::from(self.map.steps[d]);
                rest /= here;
                let x = u64::try_from(x).ok().filter(|x| *x < self.map.sizes[d])?;
                offset = offset.wrapping_add(x.wrapping_mul(self.map.strides[d - 1]));
            }
            Some(offset)
        })
    }

    /// The range of a row's `count` elements that are in the tensor.
    fn inside(&self) -> (u64, u64) {
        let (count, size) = (i64::from(self.map.count(0)), self.map.sizes[0] as i64);
        let from = (-self.at[0]).clamp(0, count);
        (from as u64, (size - self.at[0]).clamp(from, count) as u64)
    }

    /// Calls `f` for runs of bytes that are contiguous in shared memory, with the shared address, where the
    /// bytes belong, and their number.
    fn runs(&self, mut f: impl FnMut(u64, Part, usize) -> Flow) -> Flow {
        let width = u64::from(self.map.width());
        let row_bytes = u64::from(self.map.count(0)) * width;
        let (from, to) = self.inside();
        let (from, to) = (from * width, to * width);
        let whole = if to > from { to.next_multiple_of(PIECE).min(row_bytes) } else { to };
        for (n, row) in self.rows().enumerate() {
            let start = self.address + n as u64 * row_bytes;
            let mut byte = 0;
            while byte < row_bytes {
                // No run crosses a unit or the tensor's edge.
                let edges = [from, to, row_bytes, (byte / PIECE + 1) * PIECE];
                let end = edges.into_iter().filter(|e| *e > byte).min().unwrap_or(row_bytes);
                let x = (self.at[0] * width as i64 + byte as i64) as u64;
                let part = match row.map(|row| row.wrapping_add(x)) {
                    Some(offset) if (from..to).contains(&byte) => Part::Inside(offset),
                    Some(offset) if (to..whole).contains(&byte) => Part::Padding(offset),
                    _ => Part::Outside,
                };
                let place = self.map.swizzled(start + byte / PIECE * PIECE) + byte % PIECE;
                if f(place, part, (end - byte) as usize) == Flow::Fault {
                    return Flow::Fault;
                }
                byte = end;
            }
        }
        Flow::Next
    }
}

unsafe fn load(w: &mut Warp, i: &Inst, lane: usize, tile: &Tile) -> Flow {
    let bytes = tile.map.tile_bytes();
    // SAFETY: `find` has checked each run at both ends.
    unsafe {
        let ranks = (i.r[0] != NONE).then(|| (*rows::row::<u16>(w, i.r[0]))[lane]);
        for rank in (0..16).filter(|n| ranks.unwrap_or(1) >> n & 1 != 0) {
            let of_block = |address: u64| if ranks.is_some() { of_rank(address, rank) } else { address };
            let flow = tile.runs(|place, part, count| {
                let place = of_block(place);
                let Some(to) = Shared::find(w, lane, place, count as u32) else {
                    return outside(w, lane, "write", "shared", place, bytes);
                };
                match part {
                    Part::Padding(_) | Part::Outside => std::ptr::write_bytes(to, 0, count),
                    Part::Inside(offset) => {
                        let address = tile.map.address.wrapping_add(offset);
                        let Some(from) = Global::find(w, lane, address, count as u32) else {
                            return outside(w, lane, "read", "global", address, count as u64);
                        };
                        std::ptr::copy_nonoverlapping(from, to, count);
                    }
                }
                Flow::Next
            });
            if flow == Flow::Fault {
                return flow;
            }
            let barrier = of_block((*rows::row::<u64>(w, i.r[3]))[lane]);
            if bytes_arrive(w, lane, barrier, bytes as i64) == Flow::Fault {
                return Flow::Fault;
            }
        }
    }
    Flow::Next
}

/// The reduction of a store for an element type; the error names both.
fn reduction_of(number: i64, element: &str) -> Result<Option<Reduction>, String> {
    let name = OPERATIONS[number as usize % OPERATIONS.len()];
    let bits = match (name, element) {
        ("", _) => return Ok(None),
        ("and" | "or" | "xor", "u32" | "s32") => Some((name.to_string(), "b32")),
        ("and" | "or" | "xor", "u64" | "s64") => Some((name.to_string(), "b64")),
        ("add", "f16" | "bf16") => Some(("add.noftz".to_string(), element)),
        _ => Some((name.to_string(), element)),
    };
    bits.and_then(|(name, ty)| reduction::numbered(reduction::find(&name, ty)?))
        .map(Some)
        .ok_or_else(|| format!("{name} of a tensor of {element}"))
}

unsafe fn store(w: &mut Warp, i: &Inst, lane: usize, tile: &Tile) -> Flow {
    let reduction = match reduction_of(i.imm, tile.map.element()) {
        Ok(found) => found,
        Err(what) => return w.set_fault(Fault::IllegalInstruction(what), lane),
    };
    if let Some(before) = tile.at.iter().find(|x| **x < 0) {
        let what = format!("a store of a tile that begins at {before}, outside the tensor");
        return w.set_fault(Fault::IllegalInstruction(what), lane);
    }
    // SAFETY: `find` has checked each run at both ends. A run consists of whole elements, which are aligned
    // in the tensor.
    unsafe {
        tile.runs(|place, part, count| {
            let (Part::Inside(offset) | Part::Padding(offset)) = part else { return Flow::Next };
            let Some(from) = Shared::find(w, lane, place, count as u32) else {
                return outside(w, lane, "read", "shared", place, count as u64);
            };
            let address = tile.map.address.wrapping_add(offset);
            let Some(to) = Global::find(w, lane, address, count as u32) else {
                if matches!(part, Part::Padding(_)) {
                    // Allocations do not end inside a unit.
                    return Flow::Next;
                }
                return outside(w, lane, "write", "global", address, count as u64);
            };
            match reduction {
                None => std::ptr::copy_nonoverlapping(from, to, count),
                Some(one) => {
                    for at in (0..count).step_by(one.bytes) {
                        (one.apply)(to.add(at), from.add(at));
                    }
                }
            }
            Flow::Next
        })
    }
}
