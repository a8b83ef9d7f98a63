//! Lowers texture and surface instructions, which name their object by handle.

use super::function::Lowering;
use super::inst::Modifiers;
use super::types::type_bits;
use crate::error::Result;
use crate::exec::texture::{QUERY, SAMPLE, SURFACE_LOAD, SURFACE_STORE, field};
use crate::machine::program::NONE;
use crate::ptx::ast::{Inst, Operand};

/// The shape of a texture or surface as an instruction names it.
#[derive(Clone, Copy)]
struct Geometry {
    /// The number of coordinates apart from the layer.
    directions: usize,
    layered: bool,
    cube: bool,
}

impl Geometry {
    fn take(mods: &mut Modifiers<'_>) -> Option<Geometry> {
        let (directions, layered, cube) =
            match mods.one_of(&["1d", "2d", "3d", "a1d", "a2d", "cube", "acube"])? {
                "1d" => (1, false, false),
                "2d" => (2, false, false),
                "3d" => (3, false, false),
                "a1d" => (1, true, false),
                "a2d" => (2, true, false),
                "cube" => (3, false, true),
                _ => (3, true, true),
            };
        Some(Geometry { directions, layered, cube })
    }

    /// The number of coordinates including the layer.
    fn count(self) -> usize {
        self.directions + usize::from(self.layered)
    }

    fn flags(self) -> i64 {
        self.directions as i64
            | if self.layered { field::LAYERED } else { 0 }
            | if self.cube { field::CUBE } else { 0 }
    }
}

impl<'a> Lowering<'a, '_> {
    /// The handle and the coordinates in `[handle, {x, y}]`. There may be more coordinates than needed.
    fn point(
        &mut self,
        op: &Operand<'a>,
        count: usize,
        whole: bool,
        layered: bool,
    ) -> Result<(u32, Vec<u32>)> {
        let Operand::Bracket(parts) = op else { return self.error("a texture's operand has no coordinates") };
        let [handle, coordinates] = parts.as_slice() else {
            return self.unsupported("a texture with a separate sampler");
        };
        let list = coordinates.elements();
        if list.len() < count {
            return self.error(format!("{} coordinates instead of {count}", list.len()));
        }
        let handle = self.source(handle, "u64")?;
        let mut rows = Vec::new();
        for (n, op) in list.iter().take(count).enumerate() {
            let ty = if whole || (layered && n == 0) { "b32" } else { "f32" };
            rows.push(self.source(op, ty)?);
        }
        Ok((handle, rows))
    }

    pub fn lower_texture(&mut self, inst: &Inst<'a>) -> Result<()> {
        let mut mods = Modifiers::new(inst);
        if matches!(inst.name, "txq" | "suq") {
            return self.lower_query(inst, mods);
        }
        let gather = inst.name == "tld4";
        let channel = if gather { mods.one_of(&["r", "g", "b", "a"]) } else { None };
        let detail = mods.one_of(&["level", "grad"]);
        mods.has("base");
        let Some(geometry) = Geometry::take(&mut mods) else { return self.unknown(inst) };
        let flat = geometry.directions == 2 && !geometry.layered;
        if !mods.has("v4") || (gather && (channel.is_none() || !flat || detail.is_some())) {
            return self.unknown(inst);
        }
        let coordinate = mods.last();
        let result = mods.last();
        let whole = coordinate == "s32";
        let known = matches!(coordinate, "s32" | "f32") && matches!(result, "f32" | "s32" | "u32");
        let more = match detail {
            Some("level") => 1,
            Some(_) => 2,
            None => 0,
        };
        let fits = !(whole && (geometry.cube || gather || more == 2));
        if !known || !fits || !mods.done() || inst.operands.len() != 2 + more {
            return self.unknown(inst);
        }
        // A predicate reports whether the texels are resident in a partly backed texture; here they always
        // are.
        let (vector, resident) = match self.operand(inst, 0)? {
            Operand::Pair(vector, resident) => (vector.as_ref(), Some(resident.as_ref())),
            vector => (vector, None),
        };
        let Operand::Vector(list) = vector else { return self.unknown(inst) };
        let (handle, mut rows) =
            self.point(self.operand(inst, 1)?, geometry.count(), whole, geometry.layered)?;
        if more == 1 {
            rows.push(self.source(self.operand(inst, 2)?, if whole { "b32" } else { "f32" })?);
        } else {
            for n in 0..more {
                rows.extend(self.gradient(self.operand(inst, 2 + n)?, geometry.directions)?);
            }
        }
        let mut ext = vec![NONE; 4];
        for (slot, op) in ext.iter_mut().zip(list) {
            *slot = if *op == Operand::Sink { NONE } else { self.destination(op, 32)? };
        }
        ext.extend(rows);
        let at = self.ext.len() as u32;
        self.ext.extend(ext);
        let number = match channel {
            Some("g") => 1,
            Some("b") => 2,
            Some("a") => 3,
            _ => 0,
        };
        let imm = geometry.flags()
            | if whole { field::WHOLE } else { 0 }
            | if gather { field::GATHER } else { 0 }
            | [0, field::LEVEL, field::GRADIENT][more]
            | number << field::CHANNEL;
        let resident = match resident {
            Some(Operand::Sink) | None => NONE,
            Some(p) => self.destination(p, 1)?,
        };
        self.emit(SAMPLE, [at, handle, resident, 0, 0, 0], imm);
        Ok(())
    }

    /// The rows of a gradient vector.
    fn gradient(&mut self, op: &Operand<'a>, directions: usize) -> Result<Vec<u32>> {
        let list = op.elements();
        if list.len() < directions {
            return self.error(format!("a gradient of {} parts instead of {directions}", list.len()));
        }
        list.iter().take(directions).map(|op| self.source(op, "f32")).collect()
    }

    pub fn lower_surface(&mut self, inst: &Inst<'a>) -> Result<()> {
        let mut mods = Modifiers::new(inst);
        let store = inst.name == "sust";
        if !mods.has("b") {
            return self.unknown(inst);
        }
        let outside = match mods.one_of(&["trap", "clamp", "zero"]) {
            Some("clamp") => 1,
            Some("zero") => 2,
            _ => 0,
        };
        let Some(geometry) = Geometry::take(&mut mods).filter(|g| !g.cube) else { return self.unknown(inst) };
        let count: usize = match mods.one_of(&["v2", "v4"]) {
            Some("v2") => 2,
            Some(_) => 4,
            None => 1,
        };
        Self::take_hints(&mut mods);
        let ty = mods.last();
        let Some(bits) = type_bits(ty).filter(|b| *b >= 8 && mods.done()) else { return self.unknown(inst) };
        let (values, place) = if store { (1, 0) } else { (0, 1) };
        let (handle, rows) =
            self.point(self.operand(inst, place)?, geometry.count(), true, geometry.layered)?;
        let list = self.operand(inst, values)?.elements();
        if list.len() != count {
            return self.unknown(inst);
        }
        let width = bits.max(16);
        let mut ext = vec![NONE; 4];
        for (slot, op) in ext.iter_mut().zip(list) {
            *slot = match op {
                Operand::Sink => NONE,
                op if store => self.source(op, super::function::unsigned(width))?,
                op => self.destination(op, width)?,
            };
        }
        ext.extend(rows);
        let at = self.ext.len() as u32;
        self.ext.extend(ext);
        let imm = geometry.flags()
            | i64::from(bits / 8) << field::BYTES
            | (count as i64) << field::COUNT
            | outside << field::OUTSIDE;
        let handler = if store { SURFACE_STORE } else { SURFACE_LOAD };
        self.emit(handler, [at, handle, 0, 0, 0, 0], imm);
        Ok(())
    }

    fn lower_query(&mut self, inst: &Inst<'a>, mut mods: Modifiers<'a>) -> Result<()> {
        let property = match mods.one_of(&[
            "width",
            "height",
            "depth",
            "array_size",
            "normalized_coords",
            "num_mipmap_levels",
        ]) {
            Some("width") => 0,
            Some("height") => 1,
            Some("depth") => 2,
            Some("array_size") => 3,
            Some("normalized_coords") => 4,
            Some(_) => 5,
            None => return self.unknown(inst),
        };
        if !mods.has("b32") || !mods.done() {
            return self.unknown(inst);
        }
        let Operand::Address(Some(name), 0) = self.operand(inst, 1)? else { return self.unknown(inst) };
        let handle = self.source(&Operand::Name(name, 0), "u64")?;
        let to = self.destination(self.operand(inst, 0)?, 32)?;
        self.emit(QUERY, [to, handle, 0, 0, 0, 0], property);
        Ok(())
    }
}
