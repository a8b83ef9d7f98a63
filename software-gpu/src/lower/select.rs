//! Lowers comparisons, selections and conversions.

use super::function::Lowering;
use super::inst::Modifiers;
use super::types::type_bits;
use crate::error::Result;
use crate::exec::float::flag;
use crate::exec::int::combine;
use crate::exec::{convert, float, half, int, moves};
use crate::machine::program::{Handler, NONE};
use crate::ptx::ast::{Inst, Operand};

impl<'a> Lowering<'a, '_> {
    pub(super) fn lower_select(&mut self, inst: &Inst<'a>) -> Result<()> {
        let mut mods = Modifiers::new(inst);
        let ty = mods.last();
        let Some(bits) = type_bits(ty) else { return self.unknown(inst) };
        match inst.name {
            "selp" => {
                let handler = self.found(inst, int::bits("selp", bits), &mods)?;
                let (p, negated) = self.predicate(self.operand(inst, 3)?)?;
                let a = self.source(self.operand(inst, 1)?, ty)?;
                let b = self.source(self.operand(inst, 2)?, ty)?;
                let to = self.destination(self.operand(inst, 0)?, bits)?;
                let (a, b) = if negated { (b, a) } else { (a, b) };
                self.emit(handler, [to, a, b, p, 0, 0], 0);
                Ok(())
            }
            "slct" => {
                // The last modifier is the selector's type, the one before it the values' type.
                let selector = ty;
                let value = mods.last();
                let ftz = if mods.has("ftz") { "ftz." } else { "" };
                let Some(bits) = type_bits(value) else { return self.unknown(inst) };
                let handler = self.found(inst, int::bits(&format!("slct.{ftz}{selector}"), bits), &mods)?;
                self.simple(inst, handler, bits, &[value, value, selector], 0)
            }
            "testp" => {
                let test = mods.last();
                let handler = self.found(inst, float::testp(test, ty), &mods)?;
                let a = self.source(self.operand(inst, 1)?, ty)?;
                let p = self.destination(self.operand(inst, 0)?, 1)?;
                self.emit(handler, [p, NONE, a, a, 0, 0], 0);
                Ok(())
            }
            "setp" => {
                let (p, q) = match self.operand(inst, 0)? {
                    Operand::Pair(p, q) => {
                        let p = if **p == Operand::Sink { NONE } else { self.destination(p, 1)? };
                        (p, if **q == Operand::Sink { NONE } else { self.destination(q, 1)? })
                    }
                    p => (self.destination(p, 1)?, NONE),
                };
                self.lower_compare(inst, mods, ty, p, q)
            }
            _ => self.lower_set(inst, mods, ty),
        }
    }

    /// `set.cmp.dst.src`: all ones or zero, or 1.0 or zero; for pairs in each half.
    pub(super) fn lower_set(&mut self, inst: &Inst<'a>, mut mods: Modifiers<'a>, ty: &'a str) -> Result<()> {
        let pair = matches!(ty, "f16x2" | "bf16x2");
        let to_type = mods.one_of(&["u32", "s32", "f32", "f16", "bf16", "u16", "s16", "f16x2", "bf16x2"]);
        let (handler, width, one) = match to_type {
            Some("u32" | "s32") if pair => (int::FROM_PRED_16, 16, 0xffff),
            Some("f16x2") if pair => (int::FROM_PRED_16, 16, 0x3c00),
            Some("bf16x2") if pair => (int::FROM_PRED_16, 16, 0x3f80),
            _ if pair => return self.unknown(inst),
            Some("u32" | "s32") => (int::FROM_PRED_32, 32, 0xffff_ffff),
            Some("f32") => (int::FROM_PRED_32, 32, 0x3f80_0000),
            Some("u16" | "s16") => (int::FROM_PRED_16, 16, 0xffff),
            Some("f16") => (int::FROM_PRED_16, 16, 0x3c00),
            Some("bf16") => (int::FROM_PRED_16, 16, 0x3f80),
            _ => return self.unknown(inst),
        };
        let p = self.allocate_row(1);
        let q = if pair { self.allocate_row(1) } else { NONE };
        self.lower_compare(inst, mods, ty, p, q)?;
        let dst = self.operand(inst, 0)?;
        if !pair {
            let to = self.destination(dst, width)?;
            self.emit(handler, [to, p, 0, 0, 0, 0], one);
            return Ok(());
        }
        let Some(insert) = moves::insert(16, 32) else { return self.unknown(inst) };
        let sum = self.allocate_row(32);
        for (n, of) in [p, q].into_iter().enumerate() {
            let part = self.allocate_row(16);
            self.emit(handler, [part, of, 0, 0, 0, 0], one);
            self.emit(insert, [sum, part, sum, 0, 0, 0], if n == 0 { -1 } else { 16 });
        }
        let to = self.destination(dst, 32)?;
        let handler = self.found(inst, int::bits("mov", 32), &Modifiers { left: Vec::new() })?;
        self.emit(handler, [to, sum, 0, 0, 0, 0], 0);
        Ok(())
    }

    pub(super) fn lower_compare(
        &mut self,
        inst: &Inst<'a>,
        mut mods: Modifiers<'a>,
        ty: &'a str,
        p: u32,
        q: u32,
    ) -> Result<()> {
        let ftz = mods.has("ftz");
        let join = mods.one_of(&["and", "or", "xor"]);
        let cmp = if mods.left.is_empty() { "" } else { mods.left.remove(0) };
        let (a, b) = (self.operand(inst, 1)?, self.operand(inst, 2)?);
        let handler = match ty {
            "f32" | "f64" => float::setp(cmp, ty, ftz),
            // The comparison is exact in f32, except that subnormals of f16 become normal there. So they are
            // flushed first if requested.
            "f16" | "bf16" | "f16x2" | "bf16x2" => float::setp(cmp, "f32", false),
            _ => int::setp(cmp, ty),
        };
        let handler = self.found(inst, handler, &mods)?;
        let (mut ra, mut rb) = (self.source(a, ty)?, self.source(b, ty)?);
        let mut upper = None;
        if ty.contains("16") && ty.contains('f') {
            let pair = ty.ends_with("x2");
            let bf16 = ty.starts_with('b');
            let flags = if ftz { flag::FTZ } else { 0 };
            let widen = |s: &mut Self, from: u32, high: bool| {
                let to = s.allocate_row(32);
                s.emit(half::widen(bf16, pair, high), [to, from, 0, 0, 0, 0], flags);
                to
            };
            let rows = (widen(self, ra, false), widen(self, rb, false));
            if pair {
                upper = Some((widen(self, ra, true), widen(self, rb, true)));
            }
            (ra, rb) = rows;
        }
        let (mut imm, mut other) = (combine::NONE, 0);
        if let Some(join) = join {
            let (row, negated) = self.predicate(self.operand(inst, 3)?)?;
            other = row;
            imm = match join {
                "and" => combine::AND,
                "or" => combine::OR,
                _ => combine::XOR,
            } | if negated { combine::NOT } else { 0 };
        }
        match upper {
            // Each half of a pair has its own predicate. The first must not change what the second reads.
            Some((ha, hb)) => {
                let mut halves = [(p, ra, rb), (q, ha, hb)];
                if join.is_some() && other == p {
                    halves.reverse();
                }
                for (to, a, b) in halves.into_iter().filter(|half| half.0 != NONE) {
                    self.emit(handler, [to, NONE, a, b, other, 0], imm);
                }
            }
            None => self.emit(handler, [p, q, ra, rb, other, 0], imm),
        }
        Ok(())
    }

    pub(super) fn lower_cvt(&mut self, inst: &Inst<'a>) -> Result<()> {
        let mut mods = Modifiers::new(inst);
        // ptxas also accepts it between the types.
        let relu = mods.has("relu");
        let src = mods.last();
        let dst = mods.last();
        let mut flags = mods.float_flags();
        flags |= match mods.one_of(&["rni", "rzi", "rmi", "rpi"]) {
            Some("rni") => convert::integer::RNI,
            Some("rzi") => convert::integer::RZI,
            Some("rmi") => convert::integer::RMI,
            Some("rpi") => convert::integer::RPI,
            _ => 0,
        };
        flags |= if relu { convert::integer::RELU } else { 0 };
        if let Some(finite) = convert::finite(dst).filter(|_| src == "f32" && mods.has("satfinite")) {
            return self.lower_finite_cvt(inst, dst, flags, finite);
        }
        if matches!(dst, "f16x2" | "bf16x2") && src == "f32" {
            if !mods.done() || flags & !(flag::RZ | convert::integer::RELU) != 0 {
                return self.unknown(inst);
            }
            let handler = moves::pack_halves(dst == "bf16x2");
            return self.simple(inst, handler, 32, &["f32", "f32"], flags);
        }
        if let Some(result) = self.lower_special_cvt(inst, dst, src, flags, &mut mods) {
            return result;
        }
        let handler = self.found(inst, convert::cvt(dst, src, flags != 0), &mods)?;
        let (Some(dst_bits), Some(src_bits)) = (type_bits(dst), type_bits(src)) else {
            return self.unknown(inst);
        };
        let op = self.operand(inst, 1)?;
        let from = if self.register_bits(op).is_some_and(|b| b < src_bits) {
            return self.error(format!("the source of {} is too narrow", Self::spelled(inst)));
        } else {
            self.source(op, src)?
        };
        self.write_wider(inst, dst_bits, dst.starts_with('s'), |s, to| {
            s.emit(handler, [to, from, 0, 0, 0, 0], flags);
        })
    }

    /// `cvt.satfinite` from f32 to a 16-bit format or a pair: the conversion without it, then `finite`.
    fn lower_finite_cvt(&mut self, inst: &Inst<'a>, dst: &'a str, flags: i64, finite: Handler) -> Result<()> {
        const KNOWN: [&str; 6] = ["rn", "rz", "relu", "satfinite", "f32", "ftz"];
        let known = inst.modifiers.iter().all(|m| KNOWN.contains(m) || *m == dst);
        let pair = dst.ends_with("x2");
        let handler = if pair {
            Some(moves::pack_halves(dst == "bf16x2"))
        } else {
            convert::cvt(dst, "f32", flags != 0)
        };
        let (Some(handler), true, Some(bits)) = (handler, known && flags & flag::FTZ == 0, type_bits(dst))
        else {
            return self.unknown(inst);
        };
        if inst.operands.len() != 2 + usize::from(pair) {
            return self.error(format!("{} has {} operands", Self::spelled(inst), inst.operands.len()));
        }
        let a = self.source(&inst.operands[1], "f32")?;
        let b = if pair { self.source(&inst.operands[2], "f32")? } else { a };
        let converted = self.allocate_row(bits);
        self.emit(handler, [converted, a, b, 0, 0, 0], flags);
        self.write_wider(inst, bits, false, |s, to| s.emit(finite, [to, converted, 0, 0, 0, 0], 0))
    }

    /// Conversions of formats without registers of their own: tf32, pairs of 8-bit floats, `cvt.pack`.
    pub(super) fn lower_special_cvt(
        &mut self,
        inst: &Inst<'a>,
        dst: &str,
        src: &'a str,
        flags: i64,
        mods: &mut Modifiers<'a>,
    ) -> Option<Result<()>> {
        let relu = flags & convert::integer::RELU;
        if mods.has("pack") {
            // With a third source, the two values are bytes and the last type is the third source's.
            let packed = inst.operands.len() == 4;
            let name = if packed { mods.last() } else { dst };
            if flags != flag::SAT || !mods.done() || (packed && (src != "b32" || dst != "s32")) {
                return Some(self.unknown(inst));
            }
            let Some(handler) = convert::pack(name, packed) else { return Some(self.unknown(inst)) };
            let sources = ["s32", "s32", "b32"];
            return Some(self.simple(inst, handler, 32, &sources[..if packed { 3 } else { 2 }], 0));
        }
        if dst == "tf32" && src == "f32" {
            let away = mods.has("rna");
            let mode = if away { flag::RP } else { flags & flag::ROUND };
            // Other roundings have it on newer GPUs only.
            let finite = if away && mods.has("satfinite") { convert::integer::FINITE } else { 0 };
            if !mods.done() {
                return Some(self.unknown(inst));
            }
            return Some(self.simple(inst, convert::TF32, 32, &["f32"], mode | relu | finite));
        }
        let eight = |name: &str| matches!(name, "e4m3x2" | "e5m2x2");
        if eight(dst) || eight(src) {
            let saturates = mods.has("satfinite");
            if flags & !convert::integer::RELU != 0 || !mods.done() || saturates != eight(dst) {
                return Some(self.unknown(inst));
            }
            let Some(handler) = convert::f8_pairs(dst, src) else { return Some(self.unknown(inst)) };
            let (bits, sources): (u32, &[&str]) = match src {
                "f32" => (16, &["f32", "f32"]),
                "f16x2" => (16, &["b32"]),
                _ => (32, &["b16"]),
            };
            return Some(self.simple(inst, handler, bits, sources, relu));
        }
        None
    }
}
