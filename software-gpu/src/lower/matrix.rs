//! Lowers products of small matrices, and the moves that feed them.

use super::function::Lowering;
use super::inst::Modifiers;
use crate::error::Result;
use crate::exec::float::flag;
use crate::exec::matrix::{self, Element, Shape, WMMA_COLUMNS, WMMA_PART};
use crate::exec::memory::ADDRESS_32;
use crate::machine::program::{Handler, NONE};
use crate::ptx::ast::{Inst, Operand, Space};

/// The dimensions in a name such as `m16n8k16`.
fn dimensions(name: &str) -> Option<(u8, u8, u16)> {
    let (m, rest) = name.strip_prefix('m')?.split_once('n')?;
    let (n, k) = rest.split_once('k')?;
    Some((m.parse().ok()?, n.parse().ok()?, k.parse().ok()?))
}

impl<'a> Lowering<'a, '_> {
    /// The registers of a vector operand, as rows.
    fn fragment(&mut self, op: &Operand<'a>, element: Element, output: bool) -> Result<Vec<u32>> {
        let bits = if element == Element::F64 { 64 } else { 32 };
        let list = op.elements();
        let ty = super::function::unsigned(bits);
        list.iter().map(|op| if output { self.destination(op, bits) } else { self.source(op, ty) }).collect()
    }

    fn aligned(&mut self, handler: Handler, mut r: [u32; 6], imm: i64, flags: u8) {
        r[5] = self.constant(32, u128::from(u32::MAX));
        self.converge_aligned(handler, r, imm, flags);
    }

    pub fn lower_mma(&mut self, inst: &Inst<'a>, wmma: bool) -> Result<()> {
        let mut mods = Modifiers::new(inst);
        let saturate = mods.has("satfinite");
        let xor = mods.has("xor");
        let popc = mods.has("popc");
        let and = mods.has("and");
        if !mods.has("sync") || !mods.has("aligned") || (popc != (xor || and)) {
            return self.unknown(inst);
        }
        if wmma && !mods.has("mma") {
            return self.unknown(inst);
        }
        let rounding = mods.float_flags();
        let layout: Vec<_> = (0..2).filter_map(|_| mods.one_of(&["row", "col"])).collect();
        // `wmma` allows any layout, because its loads put the fragments in order.
        if layout.len() != 2 || (!wmma && layout != ["row", "col"]) {
            return self.unknown(inst);
        }
        let mut types: Vec<Element> = Vec::new();
        let mut shape = None;
        while !mods.done() {
            let word = mods.last();
            match (Element::parse(word), dimensions(word)) {
                (Some(element), _) => types.insert(0, element),
                (_, Some(found)) if shape.is_none() => shape = Some(found),
                _ => return self.unknown(inst),
            }
        }
        let Some(dimensions @ (m, n, k)) = shape else { return self.unknown(inst) };
        let elements: [Element; 4] = match types.as_slice() {
            [d, a, b, c] => [*d, *a, *b, *c],
            // `wmma` on f16 names only the types of D and C.
            [d, c] if wmma => [*d, Element::F16, Element::F16, *c],
            _ => return self.unknown(inst),
        };
        let [d, a, b, c] = elements;
        // Only narrow elements of two types have products.
        let pair = a == b || a.bits() == b.bits() && a.bits() <= 8 && a.whole() == b.whole();
        let sums = a.sums().contains(&c) && a.sums().contains(&d);
        if !pair || !sums || !a.shapes(wmma).contains(&dimensions) || (a == Element::B1) != popc {
            return self.unknown(inst);
        }
        // Only `wmma` on f64 has a rounding mode; none has `.ftz` or `.sat`.
        if rounding & !flag::ROUND != 0 || rounding != 0 && !(wmma && d == Element::F64) {
            return self.unknown(inst);
        }
        let shape = Shape { m, n, k, elements, saturate, xor, wmma, rounding };
        let mut list = vec![0u32; 4];
        let mut rows = Vec::new();
        let [of_a, of_b, of_c] = shape.dimensions().map(|(height, width)| height * width);
        for (at, (element, size)) in elements.iter().zip([of_c, of_a, of_b, of_c]).enumerate() {
            let found = self.fragment(self.operand(inst, at)?, *element, at == 0)?;
            let held = found.len() * 32 * (32 / element.bits().min(32)) as usize;
            // A `wmma` fragment may hold an element several times.
            if held != size && !(wmma && held > size && held.is_multiple_of(size)) {
                return self.error(format!("{} registers for {size} elements", found.len()));
            }
            list[at] = found.len() as u32;
            rows.extend(found);
        }
        list.extend(rows);
        let at = self.ext.len() as u32;
        self.ext.extend(list);
        self.aligned(matrix::MMA, [at, 0, 0, 0, 0, 0], shape.encode(), 0);
        Ok(())
    }

    pub fn lower_wmma(&mut self, inst: &Inst<'a>) -> Result<()> {
        match inst.modifiers.first() {
            Some(&"mma") => return self.lower_mma(inst, true),
            Some(&("load" | "store")) => {}
            _ => return self.unknown(inst),
        }
        let mut mods = Modifiers::new(inst);
        let store = mods.has("store");
        mods.has("load");
        let part = mods.one_of(&["a", "b", "c", "d"]);
        if !mods.has("sync") || !mods.has("aligned") || (part == Some("d")) != store {
            return self.unknown(inst);
        }
        let columns = mods.one_of(&["row", "col"]) == Some("col");
        let space = match mods.one_of(&["global", "shared", "shared::cta"]) {
            Some("global") => Space::Global,
            Some(_) => Space::Shared,
            None => Space::Generic,
        };
        let Some(element) = Element::parse(mods.last()) else { return self.unknown(inst) };
        let Some(dimensions @ (m, n, k)) = dimensions(mods.last()) else { return self.unknown(inst) };
        let (part, exists) = match part {
            Some("a") => (0, element.shapes(true).contains(&dimensions)),
            Some("b") => (1, element.shapes(true).contains(&dimensions)),
            _ => (2, element.is_sum(dimensions)),
        };
        if !mods.done() || !exists {
            return self.unknown(inst);
        }
        let shape =
            Shape { m, n, k, elements: [element; 4], saturate: false, xor: false, wmma: true, rounding: 0 };
        let (height, width) = shape.dimensions()[part];
        // Elements smaller than a byte must lie along the dimension that is summed.
        if element.bits() < 8 && columns != (part == 1) {
            return self.unknown(inst);
        }
        let (fragment, address) = if store { (1, 0) } else { (0, 1) };
        let (row, narrow, offset, implied) = self.address_row(self.operand(inst, address)?)?;
        let row = if offset != 0 {
            if narrow {
                return self.unsupported("wmma with a 32-bit address and an offset");
            }
            let sum = self.allocate_row(64);
            self.emit(crate::exec::moves::OFFSET, [sum, row, 0, 0, 0, 0], offset);
            sum
        } else {
            row
        };
        let stride = match inst.operands.get(2) {
            Some(op) => self.source(op, "u32")?,
            None => self.constant(32, if columns { height } else { width } as u128),
        };
        let found = self.fragment(self.operand(inst, fragment)?, element, !store)?;
        let held = found.len() * 32 * (32 / element.bits().min(32)) as usize;
        let size = height * width;
        if held < size || !held.is_multiple_of(size) {
            return self.error(format!("{} registers for {size} elements", found.len()));
        }
        let at = self.ext.len() as u32;
        self.ext.push(found.len() as u32);
        self.ext.extend(found);
        let Some(handler) = matrix::wmma_access(implied.unwrap_or(space), store) else {
            return self.unknown(inst);
        };
        let imm = shape.encode() | (part as i64) << WMMA_PART | i64::from(columns) << WMMA_COLUMNS;
        let flags = if narrow { ADDRESS_32 } else { 0 };
        self.aligned(handler, [at, stride, NONE, NONE, row, 0], imm, flags);
        Ok(())
    }

    /// `ldmatrix` and `stmatrix`.
    pub fn lower_ldmatrix(&mut self, inst: &Inst<'a>) -> Result<()> {
        let mut mods = Modifiers::new(inst);
        let store = inst.name == "stmatrix";
        let ok = mods.has("sync") && mods.has("aligned") && mods.has("m8n8") && mods.has("b16");
        let count = match mods.one_of(&["x1", "x2", "x4"]) {
            Some("x1") => 1,
            Some("x2") => 2,
            Some(_) => 4,
            None => return self.unknown(inst),
        };
        let transposed = mods.has("trans");
        mods.one_of(&["shared", "shared::cta"]);
        if !ok || !mods.done() {
            return self.unknown(inst);
        }
        let (fragment, address) = if store { (1, 0) } else { (0, 1) };
        let (row, narrow, offset, _) = self.address_row(self.operand(inst, address)?)?;
        let found = self.fragment(self.operand(inst, fragment)?, Element::F16, !store)?;
        if found.len() != count {
            return self.error(format!("{} registers for {count} matrices", found.len()));
        }
        let at = self.ext.len() as u32;
        self.ext.push(count as u32);
        self.ext.extend(found);
        let handler = if store { matrix::STMATRIX } else { matrix::LDMATRIX };
        let flags = if narrow { ADDRESS_32 } else { 0 };
        self.aligned(handler, [at, u32::from(transposed), NONE, NONE, row, 0], offset, flags);
        Ok(())
    }

    pub fn lower_movmatrix(&mut self, inst: &Inst<'a>) -> Result<()> {
        if inst.modifiers != ["sync", "aligned", "m8n8", "trans", "b16"] {
            return self.unknown(inst);
        }
        let from = self.source(self.operand(inst, 1)?, "b32")?;
        let to = self.destination(self.operand(inst, 0)?, 32)?;
        self.aligned(matrix::TRANSPOSE, [to, from, 0, 0, 0, 0], 0, 0);
        Ok(())
    }
}
