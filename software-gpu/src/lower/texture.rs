//! Textures and surfaces, by handle.

use super::function::Lowering;
use super::inst::Modifiers;
use super::program::NONE;
use super::type_bits;
use crate::error::Result;
use crate::exec::texture::{QUERY, SAMPLE, SURFACE_LOAD, SURFACE_STORE, field};
use crate::ptx::ast::{Inst, Operand};

/// Directions of a geometry, and whether it is layered.
fn geometry(mods: &mut Modifiers<'_>) -> Option<(usize, bool)> {
    Some(match mods.one_of(&["1d", "2d", "3d", "a1d", "a2d"])? {
        "1d" => (1, false),
        "2d" => (2, false),
        "3d" => (3, false),
        "a1d" => (1, true),
        _ => (2, true),
    })
}

impl<'a> Lowering<'a, '_> {
    /// The handle and the coordinates in `[handle, {x, y}]`, of which there may be more than needed.
    fn point(
        &mut self,
        op: &Operand<'a>,
        count: usize,
        whole: bool,
        layered: bool,
    ) -> Result<(u32, Vec<u32>)> {
        let Operand::Bracket(parts) = op else { return self.error("a texture's operand has no coordinates") };
        let [handle, coordinates] = parts.as_slice() else {
            return self.unsupported("a texture with a sampler of its own");
        };
        let single;
        let list: &[Operand<'a>] = match coordinates {
            Operand::Vector(list) => list,
            one => {
                single = [one.clone()];
                &single
            }
        };
        if list.len() < count {
            return self.error(format!("{} coordinates, {count} are needed", list.len()));
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
        // There is one level only, which any level of detail comes to.
        let level = mods.has("level");
        mods.has("base");
        let Some((directions, layered)) = geometry(&mut mods) else { return self.unknown(inst) };
        if !mods.has("v4") || (gather && (channel.is_none() || directions != 2 || layered)) {
            return self.unknown(inst);
        }
        let coordinate = mods.last();
        let result = mods.last();
        let known = matches!(coordinate, "s32" | "f32") && matches!(result, "f32" | "s32" | "u32");
        if !known || !mods.done() || inst.operands.len() != 2 + usize::from(level) {
            return self.unknown(inst);
        }
        let Operand::Vector(list) = self.operand(inst, 0)? else { return self.unknown(inst) };
        let whole = coordinate == "s32";
        let count = directions + usize::from(layered);
        let (handle, rows) = self.point(self.operand(inst, 1)?, count, whole, layered)?;
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
        let imm = directions as i64
            | if layered { field::LAYERED } else { 0 }
            | if whole { field::WHOLE } else { 0 }
            | if gather { field::GATHER } else { 0 }
            | number << field::CHANNEL;
        self.emit(SAMPLE, [at, handle, 0, 0, 0, 0], imm);
        Ok(())
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
        let Some((directions, layered)) = geometry(&mut mods) else { return self.unknown(inst) };
        let count: usize = match mods.one_of(&["v2", "v4"]) {
            Some("v2") => 2,
            Some(_) => 4,
            None => 1,
        };
        Self::take_hints(&mut mods);
        let ty = mods.last();
        let Some(bits) = type_bits(ty).filter(|b| *b >= 8 && mods.done()) else { return self.unknown(inst) };
        let (values, place) = if store { (1, 0) } else { (0, 1) };
        let coordinates = directions + usize::from(layered);
        let (handle, rows) = self.point(self.operand(inst, place)?, coordinates, true, layered)?;
        let single;
        let list: &[Operand<'a>] = match self.operand(inst, values)? {
            Operand::Vector(list) => list,
            one => {
                single = [one.clone()];
                &single
            }
        };
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
        let imm = directions as i64
            | if layered { field::LAYERED } else { 0 }
            | i64::from(bits / 8) << field::BYTES
            | (count as i64) << field::COUNT
            | outside << field::OUTSIDE;
        let handler = if store { SURFACE_STORE } else { SURFACE_LOAD };
        self.emit(handler, [at, handle, 0, 0, 0, 0], imm);
        Ok(())
    }

    fn lower_query(&mut self, inst: &Inst<'a>, mut mods: Modifiers<'a>) -> Result<()> {
        let property = match mods.one_of(&["width", "height", "depth", "array_size", "normalized_coords"]) {
            Some("width") => 0,
            Some("height") => 1,
            Some("depth") => 2,
            Some("array_size") => 3,
            Some(_) => 4,
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
