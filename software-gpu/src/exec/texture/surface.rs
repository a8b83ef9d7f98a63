//! Reads and writes surfaces. The first coordinate counts bytes.

use super::{field, texture};
use crate::error::Fault;
use crate::exec::memory::{Global, Place};
use crate::exec::rows;
use crate::machine::program::{Handler, Inst, NONE};
use crate::machine::row::LANES;
use crate::machine::warp::{Flow, Warp};

/// `suld.b`.
pub(crate) const SURFACE_LOAD: Handler = handler!(|w, i, m| surface::<false>(w, i, m));
/// `sust.b`.
pub(crate) const SURFACE_STORE: Handler = handler!(|w, i, m| surface::<true>(w, i, m));

unsafe fn surface<const STORE: bool>(w: &mut Warp, i: &Inst, mask: u32) -> Flow {
    crate::exec::memory::refresh(w);
    // SAFETY: the lowering guarantees rows of 64 bits for handles, of 32 for coordinates, and of the
    // elements' width for values.
    unsafe {
        let at = i.r[0] as usize;
        let directions = (i.imm & field::DIRECTIONS) as usize;
        let layered = i.imm & field::LAYERED != 0;
        let (bytes, count) = ((i.imm >> field::BYTES & 255) as usize, (i.imm >> field::COUNT & 255) as usize);
        let outside_is = i.imm >> field::OUTSIDE & 3;
        let handles: [u64; LANES] = rows::get(w, i.r[1]);
        for lane in (0..LANES).filter(|l| mask >> l & 1 != 0) {
            let Some(texture) = texture(w, handles[lane]) else {
                let what = format!("{:#x} is not a surface", handles[lane]);
                return w.set_fault(Fault::IllegalInstruction(what), lane);
            };
            // A surface has exactly one level.
            let image = texture.levels[0];
            let coordinate = |w: &Warp, n: usize| (*rows::row::<u32>(w, w.ext()[at + 4 + n]))[lane];
            let layer = if layered { coordinate(w, 0) } else { 0 };
            let mut x = [0i64; 3];
            for d in 0..directions {
                x[d] = i64::from(coordinate(w, d + usize::from(layered)) as i32);
            }
            let size = (bytes * count) as i64;
            let limit = [
                i64::from(image.size[0]) * image.texel_bytes() as i64 - (size - 1),
                i64::from(image.size[1]),
                i64::from(image.size[2]),
            ];
            let mut outside = layer >= image.layers || (0..directions).any(|d| x[d] < 0 || x[d] >= limit[d]);
            if outside && outside_is == 1 {
                for d in 0..directions {
                    x[d] = x[d].clamp(0, (limit[d] - 1).max(0));
                }
                x[0] -= x[0] % size;
                outside = layer >= image.layers;
            }
            let plane = (x[2] as u64).wrapping_add(u64::from(layer) * u64::from(image.size[2]));
            let address = image
                .address
                .wrapping_add(x[0] as u64)
                .wrapping_add((x[1] as u64).wrapping_mul(image.row_pitch))
                .wrapping_add(plane.wrapping_mul(image.slice_pitch));
            let fault = Fault::IllegalAddress {
                access: if STORE { "write" } else { "read" },
                space: "surface",
                address,
                size: size as u32,
            };
            if outside && outside_is == 0 {
                return w.set_fault(fault, lane);
            }
            if x[0] % size != 0 {
                let fault = Fault::MisalignedAddress { space: "surface", address, size: size as u32 };
                return w.set_fault(fault, lane);
            }
            let place = if outside { None } else { Global::find(w, lane, address, size as u32) };
            if place.is_none() && !outside {
                return w.set_fault(fault, lane);
            }
            for n in 0..count {
                let row = w.ext()[at + n];
                if row == NONE {
                    continue;
                }
                // Registers for 8-bit values are 16 bits wide.
                let width = bytes.max(2);
                let cell = rows::row::<u8>(w, row).cast::<u8>().add(lane * width);
                match place {
                    Some(p) if STORE => std::ptr::copy_nonoverlapping(cell, p.add(n * bytes), bytes),
                    Some(p) => {
                        std::ptr::write_bytes(cell, 0, width);
                        std::ptr::copy_nonoverlapping(p.add(n * bytes), cell, bytes);
                    }
                    None if !STORE => std::ptr::write_bytes(cell, 0, width),
                    None => {}
                }
            }
        }
    }
    Flow::Next
}
