//! Products of small matrices (`mma`, `wmma`) and the moves that feed them (`ldmatrix`, `stmatrix`,
//! `movmatrix`).
//!
//! The operands are lists of rows in the function's extension; `r[0]` is their start. `mma` uses the fragment
//! layout that PTX defines. PTX leaves `wmma`'s layout open: here a lane holds consecutive elements, repeated
//! until its registers are full.
//!
//! Sums of f64 are a chain of fused additions; `tensor_core` describes how others are added.

use crate::exec::float::{flag, pass_nan};
use crate::exec::half::{from_bf16, from_f16};
use crate::exec::memory::{Generic, Global, Place, Shared, Writable, addresses, locate};
use crate::exec::tensor_core::{self, Term};
use crate::exec::{exact_f64, rows};
use crate::machine::program::{Handler, Inst};
use crate::machine::row::LANES;
use crate::machine::warp::{Flow, Warp};
use crate::ptx::ast::Space;

/// The type of an element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Element {
    F16,
    Bf16,
    Tf32,
    F32,
    F64,
    E4m3,
    E5m2,
    S8,
    U8,
    S4,
    U4,
    B1,
    S32,
}

impl Element {
    pub fn parse(name: &str) -> Option<Element> {
        use Element::*;
        Some(match name {
            "f16" => F16,
            "bf16" => Bf16,
            "tf32" => Tf32,
            "f32" => F32,
            "f64" => F64,
            "e4m3" => E4m3,
            "e5m2" => E5m2,
            "s8" => S8,
            "u8" => U8,
            "s4" => S4,
            "u4" => U4,
            "b1" => B1,
            "s32" => S32,
            _ => return None,
        })
    }

    const ALL: [Element; 13] = {
        use Element::*;
        [F16, Bf16, Tf32, F32, F64, E4m3, E5m2, S8, U8, S4, U4, B1, S32]
    };

    fn from_code(code: u32) -> Element {
        Self::ALL[code as usize % Self::ALL.len()]
    }

    /// The shapes that exist of products of such elements: m, n and k.
    pub fn shapes(self, wmma: bool) -> &'static [(u8, u8, u16)] {
        use Element::*;
        match (self, wmma) {
            (F16 | Bf16, false) => &[(16, 8, 8), (16, 8, 16)],
            (Tf32, false) => &[(16, 8, 4), (16, 8, 8)],
            (F64, false) => &[(8, 8, 4), (16, 8, 4), (16, 8, 8), (16, 8, 16)],
            (E4m3 | E5m2, false) => &[(16, 8, 16), (16, 8, 32)],
            (S8 | U8, false) => &[(8, 8, 16), (16, 8, 16), (16, 8, 32)],
            (S4 | U4, false) => &[(8, 8, 32), (16, 8, 32), (16, 8, 64)],
            (B1, false) => &[(8, 8, 128), (16, 8, 128), (16, 8, 256)],
            (F16 | Bf16 | S8 | U8, true) => &[(16, 16, 16), (8, 32, 16), (32, 8, 16)],
            (Tf32, true) => &[(16, 16, 8)],
            (F64, true) => &[(8, 8, 4)],
            (S4 | U4, true) => &[(8, 8, 32)],
            (B1, true) => &[(8, 8, 128)],
            // Only sums have these types.
            (F32 | S32, _) | (E4m3 | E5m2, true) => &[],
        }
    }

    /// The types that sums of products of such elements have.
    pub fn sums(self) -> &'static [Element] {
        use Element::*;
        match self {
            F16 | E4m3 | E5m2 => &[F16, F32],
            Bf16 | Tf32 => &[F32],
            F64 => &[F64],
            S8 | U8 | S4 | U4 | B1 => &[S32],
            F32 | S32 => &[],
        }
    }

    /// Whether `wmma` has sums of this type and shape.
    pub fn is_sum(self, shape: (u8, u8, u16)) -> bool {
        Self::ALL.iter().any(|of| of.sums().contains(&self) && of.shapes(true).contains(&shape))
    }

    /// Bits per element.
    pub fn bits(self) -> u32 {
        use Element::*;
        match self {
            F64 => 64,
            Tf32 | F32 | S32 => 32,
            F16 | Bf16 => 16,
            E4m3 | E5m2 | S8 | U8 => 8,
            S4 | U4 => 4,
            B1 => 1,
        }
    }

    /// Whether products are summed as 32-bit integers.
    pub fn whole(self) -> bool {
        use Element::*;
        matches!(self, S8 | U8 | S4 | U4 | B1 | S32)
    }

    pub fn value(self, bits: u64) -> f64 {
        use Element::*;
        match self {
            F16 => from_f16(bits as u16),
            Bf16 => from_bf16(bits as u16),
            Tf32 => f64::from(f32::from_bits(bits as u32 & 0xffff_e000)),
            F32 => f64::from(f32::from_bits(bits as u32)),
            F64 => f64::from_bits(bits),
            E4m3 => from_f16(crate::exec::half::f8::decode_e4m3(bits as u8)),
            E5m2 => from_f16(crate::exec::half::f8::decode_e5m2(bits as u8)),
            _ => self.integer(bits) as f64,
        }
    }

    fn integer(self, bits: u64) -> i64 {
        use Element::*;
        match self {
            S8 => i64::from(bits as u8 as i8),
            U8 => i64::from(bits as u8),
            S4 => i64::from((bits as u8) << 4) << 56 >> 60,
            U4 => i64::from(bits as u8 & 15),
            S32 => i64::from(bits as u32 as i32),
            _ => (bits & 1) as i64,
        }
    }
}

/// An operand: the number of elements per register, and its rows.
#[derive(Clone, Copy)]
struct Operand {
    element: Element,
    /// Index of the first row in the extension.
    rows: usize,
    registers: usize,
}

impl Operand {
    fn per(self) -> usize {
        (32 / self.element.bits().min(32)) as usize
    }

    /// The bits of an element in a register.
    unsafe fn get(self, w: &Warp, lane: usize, register: usize, part: usize) -> u64 {
        // SAFETY: the lowering guarantees rows of 64 bits for f64 and of 32 bits otherwise.
        unsafe {
            let row = w.ext()[self.rows + register];
            if self.element == Element::F64 {
                return (*rows::row::<u64>(w, row))[lane];
            }
            let word = u64::from((*rows::row::<u32>(w, row))[lane]);
            let bits = self.element.bits();
            if bits >= 32 { word } else { word >> (part as u32 * bits) & ((1 << bits) - 1) }
        }
    }

    unsafe fn set(self, w: &Warp, lane: usize, register: usize, part: usize, value: u64) {
        // SAFETY: the lowering guarantees rows of 64 bits for f64 and of 32 bits otherwise.
        unsafe {
            let row = w.ext()[self.rows + register];
            if self.element == Element::F64 {
                (*rows::row::<u64>(w, row))[lane] = value;
                return;
            }
            let cell = &mut (*rows::row::<u32>(w, row))[lane];
            let bits = self.element.bits();
            if bits >= 32 {
                *cell = value as u32;
                return;
            }
            let field = ((1u32 << bits) - 1) << (part as u32 * bits);
            *cell = (*cell & !field) | ((value as u32) << (part as u32 * bits) & field);
        }
    }
}

/// The contents of `mma`'s `imm` from the lowest byte up: m, n, k (16 bits), the four elements (8 bits for
/// two), flags.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub m: u8,
    pub n: u8,
    pub k: u16,
    /// The element types of D, A, B and C.
    pub elements: [Element; 4],
    /// Whether sums that overflow saturate.
    pub saturate: bool,
    /// Whether single bits are combined by `xor` instead of `and`.
    pub xor: bool,
    /// Whether fragments have `wmma`'s layout.
    pub wmma: bool,
    /// The rounding of f64 sums; see [`flag`].
    pub rounding: i64,
}

impl Shape {
    pub fn encode(self) -> i64 {
        let e = self.elements.map(|e| i64::from(e as u8));
        i64::from(self.m)
            | i64::from(self.n) << 8
            | i64::from(self.k) << 16
            | e[0] << 32
            | e[1] << 36
            | e[2] << 40
            | e[3] << 44
            | i64::from(self.saturate) << 48
            | i64::from(self.xor) << 49
            | i64::from(self.wmma) << 50
            | self.rounding << ROUNDING
    }

    fn decode(v: i64) -> Shape {
        let element = |at: u32| Element::from_code((v >> at & 15) as u32);
        Shape {
            m: v as u8,
            n: (v >> 8) as u8,
            k: (v >> 16) as u16,
            elements: [element(32), element(36), element(40), element(44)],
            saturate: v >> 48 & 1 != 0,
            xor: v >> 49 & 1 != 0,
            wmma: v >> 50 & 1 != 0,
            rounding: v >> ROUNDING & flag::ROUND,
        }
    }

    /// The height and width of A, B, and C and D.
    pub fn dimensions(self) -> [(usize, usize); 3] {
        let (m, n, k) = (self.m.into(), self.n.into(), self.k.into());
        [(m, k), (k, n), (m, n)]
    }
}

/// Where the rounding begins in `imm`.
const ROUNDING: u32 = 56;

/// The operand that a layout belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    A,
    B,
    /// C and D.
    C,
}

/// The row and column of a fragment's element.
fn place(
    shape: Shape,
    part: Part,
    op: Operand,
    lane: usize,
    register: usize,
    piece: usize,
) -> (usize, usize) {
    let per = op.per();
    if shape.wmma {
        let (height, width) = shape.dimensions()[part as usize];
        let each = (height * width / LANES).max(1);
        let index = lane * each + (register * per + piece) % each;
        return if part == Part::B {
            (index % height, index / height)
        } else {
            (index / width, index % width)
        };
    }
    let (group, tid) = (lane / 4, lane % 4);
    match part {
        // With eight rows there is no second half.
        Part::A if shape.m == 8 => (group, tid * per + piece + 4 * per * register),
        Part::A => (group + 8 * (register & 1), tid * per + piece + 4 * per * (register / 2)),
        Part::B => (tid * per + piece + 4 * per * register, group),
        Part::C => {
            let index = register * per + piece;
            (group + 8 * (index / 2), tid * 2 + (index & 1))
        }
    }
}

/// `mma` and `wmma.mma`: the extension at `r[0]` has the numbers of registers of D, A, B and C, then their
/// rows.
pub(crate) const MMA: Handler = handler!(|w, i, m| multiply(w, i));

unsafe fn multiply(w: &mut Warp, i: &Inst) -> Flow {
    let shape = Shape::decode(i.imm);
    let [(m, k), (_, n), _] = shape.dimensions();
    let at = i.r[0] as usize;
    let counts: Vec<usize> = w.ext()[at..at + 4].iter().map(|&n| n as usize).collect();
    let mut next = at + 4;
    let ops: Vec<Operand> = (0..4)
        .map(|n| {
            let op = Operand { element: shape.elements[n], rows: next, registers: counts[n] };
            next += counts[n];
            op
        })
        .collect();
    let [d, a, b, c] = [ops[0], ops[1], ops[2], ops[3]];
    // SAFETY: the lowering checked the numbers of registers against the shape, so all elements are inside.
    unsafe {
        let collect = |part: Part, op: Operand, height: usize, width: usize| {
            let mut out = vec![0u64; height * width];
            for lane in 0..LANES {
                for register in 0..op.registers {
                    for piece in 0..op.per() {
                        let (row, col) = place(shape, part, op, lane, register, piece);
                        if row < height && col < width {
                            out[row * width + col] = op.get(w, lane, register, piece);
                        }
                    }
                }
            }
            out
        };
        let (ma, mb, mc) = (collect(Part::A, a, m, k), collect(Part::B, b, k, n), collect(Part::C, c, m, n));
        // The rows of A and columns of B, as terms of sums.
        let small = !a.element.whole() && a.element != Element::F64;
        let terms = |op: Operand, at: &dyn Fn(usize) -> u64, count: usize| match small {
            true => (0..count).map(|n| Term::new(op.element, at(n))).collect(),
            false => Vec::new(),
        };
        let (ta, tb) = (terms(a, &|i| ma[i], m * k), terms(b, &|i| mb[i % k * n + i / k], n * k));
        let mut out = vec![0u64; m * n];
        for row in 0..m {
            for col in 0..n {
                let pairs = (0..k).map(|x| (ma[row * k + x], mb[x * n + col]));
                let start = mc[row * n + col];
                out[row * n + col] = if a.element.whole() {
                    let sum = pairs.fold(c.element.integer(start), |sum, (x, y)| {
                        sum + match a.element {
                            Element::B1 if shape.xor => ((x ^ y) & 1) as i64,
                            _ => a.element.integer(x) * b.element.integer(y),
                        }
                    });
                    let sum = if shape.saturate { sum.clamp(i32::MIN.into(), i32::MAX.into()) } else { sum };
                    u64::from(sum as u32)
                } else if a.element == Element::F64 {
                    let sum = pairs.fold(f64::from_bits(start), |sum, (x, y)| {
                        let (x, y) = (f64::from_bits(x), f64::from_bits(y));
                        pass_nan(exact_f64::fma(x, y, sum, shape.rounding), &[y, sum, x])
                    });
                    sum.to_bits()
                } else {
                    let elements = (a.element, b.element);
                    let (line, column) = (&ta[row * k..][..k], &tb[col * k..][..k]);
                    // `wmma` of tf32 is two products of four.
                    let step = if shape.wmma && a.element == Element::Tf32 { 4 } else { k };
                    tensor_core::dot(line, column, elements, (c.element, start), d.element, step)
                };
            }
        }
        for lane in 0..LANES {
            for register in 0..d.registers {
                for piece in 0..d.per() {
                    let (row, col) = place(shape, Part::C, d, lane, register, piece);
                    d.set(w, lane, register, piece, out[row * n + col]);
                }
            }
        }
    }
    Flow::Next
}

/// Further contents of the `imm` of a `wmma` load or store: the operand, and whether columns are contiguous.
pub(crate) const WMMA_PART: u32 = 52;
pub(crate) const WMMA_COLUMNS: u32 = 54;

/// `wmma.load` and `wmma.store`: the extension at `r[0]` has the number of registers, then their rows; `r[1]`
/// is the row of the stride in elements. The address is that of a plain access.
pub(crate) fn wmma_access(space: Space, store: bool) -> Option<Handler> {
    Some(match (space, store) {
        (Space::Global, false) => handler!(|w, i, m| move_fragment::<Global, false>(w, i, m)),
        (Space::Global, true) => handler!(|w, i, m| move_fragment::<Global, true>(w, i, m)),
        (Space::Shared, false) => handler!(|w, i, m| move_fragment::<Shared, false>(w, i, m)),
        (Space::Shared, true) => handler!(|w, i, m| move_fragment::<Shared, true>(w, i, m)),
        (Space::Generic, false) => handler!(|w, i, m| move_fragment::<Generic, false>(w, i, m)),
        (Space::Generic, true) => handler!(|w, i, m| move_fragment::<Writable, true>(w, i, m)),
        _ => return None,
    })
}

unsafe fn move_fragment<P: Place, const STORE: bool>(w: &mut Warp, i: &Inst, mask: u32) -> Flow {
    let shape = Shape::decode(i.imm);
    let part = match i.imm >> WMMA_PART & 3 {
        0 => Part::A,
        1 => Part::B,
        _ => Part::C,
    };
    let columns = i.imm >> WMMA_COLUMNS & 1 != 0;
    let at = i.r[0] as usize;
    let op = Operand { element: shape.elements[0], rows: at + 1, registers: w.ext()[at] as usize };
    let bits = op.element.bits() as usize;
    // SAFETY: the lowering guarantees the rows' widths; `locate` has checked the bytes of an element, or of
    // the word that contains it.
    unsafe {
        let addresses = addresses(w, &Inst { imm: 0, ..i.clone() });
        let strides: [u32; LANES] = rows::get(w, i.r[1]);
        for lane in (0..LANES).filter(|l| mask >> l & 1 != 0) {
            for register in 0..op.registers {
                for piece in 0..op.per() {
                    let (row, col) = place(shape, part, op, lane, register, piece);
                    let (outer, inner) = if columns { (col, row) } else { (row, col) };
                    let index = outer * strides[lane] as usize + inner;
                    let (offset, size) =
                        if bits < 8 { (index * bits / 8, 1) } else { (index * bits / 8, bits / 8) };
                    let address = addresses[lane].wrapping_add(offset as u64);
                    let access = if STORE { "write" } else { "read" };
                    let Some(p) = locate::<P>(w, lane, address, size as u32, access) else {
                        return Flow::Fault;
                    };
                    if STORE {
                        let value = op.get(w, lane, register, piece);
                        std::ptr::copy_nonoverlapping(value.to_le_bytes().as_ptr(), p, size);
                    } else {
                        let mut value = [0u8; 8];
                        std::ptr::copy_nonoverlapping(p, value.as_mut_ptr(), size);
                        let value = u64::from_le_bytes(value) >> if bits < 8 { index * bits % 8 } else { 0 };
                        op.set(w, lane, register, piece, value);
                    }
                }
            }
        }
    }
    Flow::Next
}

/// `ldmatrix`: the extension at `r[0]` has the number of matrices, then the rows; `r[1]` is 1 if transposed.
pub(crate) const LDMATRIX: Handler = handler!(|w, i, m| move_matrices::<false>(w, i));
/// `stmatrix`, with the operands of [`LDMATRIX`].
pub(crate) const STMATRIX: Handler = handler!(|w, i, m| move_matrices::<true>(w, i));

unsafe fn move_matrices<const STORE: bool>(w: &mut Warp, i: &Inst) -> Flow {
    // SAFETY: the rows are 32 bits wide; `locate` has checked the 16 bytes of a matrix's row.
    unsafe {
        let addresses = addresses(w, i);
        let at = i.r[0] as usize;
        let count = w.ext()[at] as usize;
        for matrix in 0..count {
            let list = w.ext()[at + 1 + matrix];
            let mut places = [std::ptr::null_mut::<u16>(); 8];
            for (row, place) in places.iter_mut().enumerate() {
                let lane = matrix * 8 + row;
                let access = if STORE { "write" } else { "read" };
                let Some(p) = locate::<Shared>(w, lane, addresses[lane], 16, access) else {
                    return Flow::Fault;
                };
                *place = p.cast();
            }
            let values = rows::row::<u32>(w, list);
            for lane in 0..LANES {
                let mut word = if STORE { (*values)[lane] } else { 0 };
                for half in 0..2 {
                    let (mut row, mut col) = (lane / 4, lane % 4 * 2 + half);
                    if i.r[1] == 1 {
                        (row, col) = (col, row);
                    }
                    let p = places[row].add(col);
                    if STORE {
                        p.write((word >> (16 * half)) as u16);
                    } else {
                        word |= u32::from(p.read()) << (16 * half);
                    }
                }
                if !STORE {
                    (*values)[lane] = word;
                }
            }
        }
    }
    Flow::Next
}

/// `movmatrix`: `r[0]` = `r[1]` transposed.
pub(crate) const TRANSPOSE: Handler = handler!(|w, i, m| {
    let from: [u32; LANES] = rows::get(w, i.r[1]);
    let mut out = [0u32; LANES];
    for lane in 0..LANES {
        for half in 0..2 {
            let (row, col) = (lane % 4 * 2 + half, lane / 4);
            let bits = from[row * 4 + col / 2] >> (16 * (col % 2)) & 0xffff;
            out[lane] |= bits << (16 * half);
        }
    }
    rows::put(w, i.r[0], m, &out);
    Flow::Next
});
