//! Instructions that compute: arithmetic, logic, comparisons, conversions, warp operations, control flow.

use super::function::{Lowering, Symbol, unsigned};
use super::program::{Handler, Kind, NONE, barrier, joint};
use super::type_bits;
use crate::error::Result;
use crate::exec::float::flag;
use crate::exec::int::combine;
use crate::exec::{convert, float, half, int, moves, special, warp_ops};
use crate::ptx::ast::{Inst, Operand};

/// An instruction's modifiers, taken one by one: what is left at the end is unknown.
pub(crate) struct Modifiers<'a> {
    left: Vec<&'a str>,
}

impl<'a> Modifiers<'a> {
    pub fn new(inst: &Inst<'a>) -> Self {
        Modifiers { left: inst.modifiers.clone() }
    }

    /// Takes a modifier, if it is there.
    pub fn has(&mut self, name: &str) -> bool {
        match self.left.iter().position(|m| *m == name) {
            Some(i) => {
                self.left.remove(i);
                true
            }
            None => false,
        }
    }

    /// Takes the first modifier that is one of these.
    pub fn one_of(&mut self, names: &[&str]) -> Option<&'a str> {
        let i = self.left.iter().position(|m| names.contains(m))?;
        Some(self.left.remove(i))
    }

    /// Takes the last modifier: the type.
    pub fn last(&mut self) -> &'a str {
        self.left.pop().unwrap_or("")
    }

    /// Takes the first modifier.
    pub fn take_first(&mut self) -> &'a str {
        self.left.remove(0)
    }

    pub fn done(&self) -> bool {
        self.left.is_empty()
    }

    /// Takes rounding, `.ftz` and `.sat` as flags.
    pub fn float_flags(&mut self) -> i64 {
        let mut flags = 0;
        flags |= if self.has("ftz") { flag::FTZ } else { 0 };
        flags |= if self.has("sat") { flag::SAT } else { 0 };
        flags
            | match self.one_of(&["rn", "rz", "rm", "rp"]) {
                Some("rz") => flag::RZ,
                Some("rm") => flag::RM,
                Some("rp") => flag::RP,
                _ => 0,
            }
    }
}

impl<'a> Lowering<'a, '_> {
    /// The instruction as the PTX has it, for error messages.
    fn spelled(inst: &Inst<'_>) -> String {
        let mut text = inst.name.to_string();
        for m in &inst.modifiers {
            text.push('.');
            text.push_str(m);
        }
        text
    }

    pub fn unknown<T>(&self, inst: &Inst<'_>) -> Result<T> {
        self.unsupported(Self::spelled(inst))
    }

    pub fn found(&self, inst: &Inst<'_>, handler: Option<Handler>, mods: &Modifiers<'_>) -> Result<Handler> {
        match handler {
            Some(handler) if mods.done() => Ok(handler),
            _ => self.unknown(inst),
        }
    }

    pub fn operand<'i>(&self, inst: &'i Inst<'a>, n: usize) -> Result<&'i Operand<'a>> {
        match inst.operands.get(n) {
            Some(op) => Ok(op),
            None => self.error(format!("{} lacks operand {}", Self::spelled(inst), n + 1)),
        }
    }

    /// Emits `handler` with destination type `dst` and sources of the types given.
    pub fn simple(
        &mut self,
        inst: &Inst<'a>,
        handler: Handler,
        dst: u32,
        sources: &[&str],
        imm: i64,
    ) -> Result<()> {
        if inst.operands.len() != sources.len() + 1 {
            return self.error(format!("{} has {} operands", Self::spelled(inst), inst.operands.len()));
        }
        let mut r = [0; 6];
        for (n, ty) in sources.iter().enumerate() {
            r[n + 1] = self.source(&inst.operands[n + 1], ty)?;
        }
        r[0] = self.destination(&inst.operands[0], dst)?;
        self.emit(handler, r, imm);
        Ok(())
    }

    pub fn lower(&mut self, inst: &Inst<'a>) -> Result<()> {
        match inst.name {
            "mov" => self.lower_mov(inst),
            "ld" | "ldu" | "st" | "atom" | "red" | "cvta" | "isspacep" | "prefetch" | "prefetchu"
            | "applypriority" | "discard" | "createpolicy" | "alloca" | "stacksave" | "stackrestore" => {
                self.lower_access(inst)
            }
            "add" | "sub" | "mul" | "mad" | "fma" | "div" | "rem" | "min" | "max" | "abs" | "neg" | "sad"
            | "addc" | "subc" | "madc" | "mul24" | "mad24" | "sqrt" | "rcp" | "rsqrt" | "sin" | "cos"
            | "lg2" | "ex2" | "tanh" | "copysign" => self.lower_arithmetic(inst),
            "and" | "or" | "xor" | "not" | "cnot" | "shl" | "shr" | "shf" | "lop3" | "prmt" | "popc"
            | "clz" | "bfind" | "brev" | "bfe" | "bfi" | "bmsk" | "szext" | "fns" | "dp4a" | "dp2a" => {
                self.lower_bits(inst)
            }
            "setp" | "set" | "selp" | "slct" | "testp" => self.lower_select(inst),
            "cvt" => self.lower_cvt(inst),
            "bra" | "brx" | "call" | "ret" | "exit" | "trap" | "brkpt" | "bar" | "barrier" | "membar"
            | "fence" | "nanosleep" | "pmevent" | "griddepcontrol" => self.lower_control(inst),
            "mma" => self.lower_mma(inst, false),
            "wmma" => self.lower_wmma(inst),
            "ldmatrix" | "stmatrix" => self.lower_eights(inst),
            "movmatrix" => self.lower_movmatrix(inst),
            "tex" | "tld4" | "txq" | "suq" => self.lower_texture(inst),
            "suld" | "sust" => self.lower_surface(inst),
            "vadd2" | "vadd4" | "vsub2" | "vsub4" | "vavrg2" | "vavrg4" | "vabsdiff2" | "vabsdiff4"
            | "vmin2" | "vmin4" | "vmax2" | "vmax4" | "vset2" | "vset4" => self.lower_video(inst),
            "cp" => self.lower_copy_async(inst),
            "mbarrier" => self.lower_mbarrier(inst),
            "shfl" | "vote" | "match" | "redux" | "activemask" | "elect" => self.lower_warp(inst),
            _ => self.unknown(inst),
        }
    }

    fn lower_mov(&mut self, inst: &Inst<'a>) -> Result<()> {
        let mut mods = Modifiers::new(inst);
        let ty = mods.last();
        let (dst, src) = (self.operand(inst, 0)?, self.operand(inst, 1)?);
        if ty == "pred" {
            let (row, negated) = self.predicate(src)?;
            let to = self.destination(dst, 1)?;
            let handler = self.found(inst, int::predicate("mov"), &mods)?;
            self.emit(handler, [to, row, row, 0, 0, 0], i64::from(negated));
            return Ok(());
        }
        let Some(bits) = type_bits(ty) else { return self.unknown(inst) };
        if !mods.done() {
            return self.unknown(inst);
        }
        match (dst, src) {
            (Operand::Vector(parts), src) => {
                let from = self.source(src, ty)?;
                let part = bits / parts.len().max(1) as u32;
                for (n, p) in parts.iter().enumerate() {
                    if *p == Operand::Sink {
                        continue;
                    }
                    let Some(handler) = moves::extract(part, bits) else { return self.unknown(inst) };
                    let to = self.destination(p, part)?;
                    self.emit(handler, [to, from, 0, 0, 0, 0], i64::from(part) * n as i64);
                }
                Ok(())
            }
            (dst, Operand::Vector(parts)) => {
                let part = bits / parts.len().max(1) as u32;
                // Built apart: the destination may be one of the parts.
                let sum = self.allocate_row(bits);
                for (n, p) in parts.iter().enumerate() {
                    let Some(handler) = moves::insert(part, bits) else { return self.unknown(inst) };
                    let from = self.source(p, unsigned(part))?;
                    let at = i64::from(part) * n as i64;
                    self.emit(handler, [sum, from, sum, 0, 0, 0], if n == 0 { -1 } else { at });
                }
                let to = self.destination(dst, bits)?;
                let handler = self.found(inst, int::bits("mov", bits), &mods)?;
                self.emit(handler, [to, sum, 0, 0, 0, 0], 0);
                Ok(())
            }
            _ => {
                let handler = self.found(inst, int::bits("mov", bits), &mods)?;
                self.simple(inst, handler, bits, &[ty], 0)
            }
        }
    }

    fn lower_arithmetic(&mut self, inst: &Inst<'a>) -> Result<()> {
        let mut mods = Modifiers::new(inst);
        let ty = mods.last();
        let float = matches!(ty, "f32" | "f64" | "f16" | "f16x2" | "bf16" | "bf16x2" | "f32x2");
        if float {
            return self.lower_float(inst, mods, ty);
        }
        let Some(bits) = type_bits(ty) else { return self.unknown(inst) };
        match inst.name {
            "mul24" | "mad24" => {
                let half = mods.one_of(&["lo", "hi"]).unwrap_or("lo");
                let handler = self.found(inst, int::mul24(&format!("{}.{half}.{ty}", inst.name)), &mods)?;
                let sources = [ty; 3];
                self.simple(inst, handler, 32, &sources[..if inst.name == "mul24" { 2 } else { 3 }], 0)
            }
            "addc" | "subc" | "madc" => self.lower_carry(inst, mods, ty, bits),
            "add" | "sub" | "mad" if mods.left.contains(&"cc") => self.lower_carry(inst, mods, ty, bits),
            "add" | "sub" if mods.has("sat") => {
                let handler = int::special32(&format!("{}.sat", inst.name)).filter(|_| ty == "s32");
                let handler = self.found(inst, handler, &mods)?;
                self.simple(inst, handler, 32, &[ty, ty], 0)
            }
            "add" | "min" | "max" if ty.ends_with("x2") => {
                let relu = mods.has("relu");
                let name =
                    if inst.name == "add" { "add.u16x2".into() } else { format!("{}.{ty}", inst.name) };
                let handler = self.found(inst, int::special32(&name), &mods)?;
                self.simple(inst, handler, 32, &[ty, ty], i64::from(relu))
            }
            "mul" | "mad" => {
                let count = if inst.name == "mul" { 2 } else { 3 };
                if mods.has("wide") {
                    let handler = self.found(inst, int::wide(inst.name == "mad", ty), &mods)?;
                    let wide = unsigned(bits * 2);
                    return self.simple(inst, handler, bits * 2, &[ty, ty, wide][..count], 0);
                }
                let half = mods.one_of(&["lo", "hi"]).unwrap_or("lo");
                let handler = if mods.has("sat") {
                    int::special32("mad.hi.sat").filter(|_| ty == "s32" && half == "hi")
                } else {
                    int::arithmetic(&format!("{}.{half}", inst.name), ty)
                };
                let handler = self.found(inst, handler, &mods)?;
                self.simple(inst, handler, bits, &[ty; 3][..count], 0)
            }
            "abs" | "neg" => {
                let handler = self.found(inst, int::signed(inst.name, ty), &mods)?;
                self.simple(inst, handler, bits, &[ty], 0)
            }
            _ => {
                let name =
                    if mods.has("relu") { format!("{}.relu", inst.name) } else { inst.name.to_string() };
                let handler = int::arithmetic(&name, ty).or_else(|| int::signed(&name, ty));
                let handler = self.found(inst, handler, &mods)?;
                let count = if inst.name == "sad" { 3 } else { 2 };
                self.simple(inst, handler, bits, &[ty; 3][..count], 0)
            }
        }
    }

    fn lower_carry(&mut self, inst: &Inst<'a>, mut mods: Modifiers<'a>, ty: &str, bits: u32) -> Result<()> {
        let takes = inst.name.ends_with('c');
        let gives = mods.has("cc");
        let base = inst.name.trim_end_matches('c');
        let name = match (base, mods.one_of(&["lo", "hi"])) {
            ("mad", half) => format!("mad.{}", half.unwrap_or("lo")),
            _ => base.to_string(),
        };
        let handler = self.found(inst, int::carry(&name, ty), &mods)?;
        let a = self.source(self.operand(inst, 1)?, ty)?;
        let b = self.source(self.operand(inst, 2)?, ty)?;
        let c = if base == "mad" { self.source(self.operand(inst, 3)?, ty)? } else { b };
        let to = self.destination(self.operand(inst, 0)?, bits)?;
        let carry = self.carry();
        self.emit(handler, [to, a, b, c, carry, 0], i64::from(takes) | i64::from(gives) << 1);
        Ok(())
    }

    fn lower_float(&mut self, inst: &Inst<'a>, mut mods: Modifiers<'a>, ty: &'a str) -> Result<()> {
        let mut flags = mods.float_flags();
        let mut name = inst.name.to_string();
        if mods.has("approx") {
            name.push_str(".approx");
        } else if mods.has("full") && name == "div" {
            name.push_str(".full");
        }
        if matches!(inst.name, "sin" | "cos" | "lg2" | "ex2" | "rsqrt" | "tanh") && !name.ends_with("approx")
        {
            return self.unknown(inst);
        }
        flags |= if mods.has("NaN") { flag::NAN } else { 0 };
        flags |= if mods.has("xorsign") && mods.has("abs") { flag::XORSIGN } else { 0 };
        flags |= if mods.has("relu") { convert::integer::RELU } else { 0 };
        if flags & convert::integer::RELU != 0 && !(inst.name == "fma" && ty.contains("16")) {
            return self.unknown(inst);
        }
        // `mad` is `fma` on every architecture that this GPU can be.
        if name == "mad" {
            name = "fma".into();
        }
        let count = match inst.name {
            "add" | "sub" | "mul" | "div" | "copysign" => 2,
            "fma" | "mad" => 3,
            "min" | "max" => inst.operands.len().saturating_sub(1),
            _ => 1,
        };
        if count == 3 && matches!(inst.name, "min" | "max") {
            name.push('3');
        }
        let handler = match ty {
            "f32" => float::f32_op(&name, flags),
            "f64" => float::f64_op(&name, flags),
            _ => half::op(&name, ty).or_else(|| half::op(inst.name, ty).filter(|_| false)),
        };
        let handler = self.found(inst, handler, &mods)?;
        let bits = type_bits(ty).unwrap_or(32);
        self.simple(inst, handler, bits, &[ty; 3][..count.min(3)], flags)
    }

    fn lower_bits(&mut self, inst: &Inst<'a>) -> Result<()> {
        let mut mods = Modifiers::new(inst);
        if inst.name == "lop3" {
            return self.lower_lop3(inst, mods);
        }
        if inst.name == "prmt" {
            let mode = mods.one_of(&["f4e", "b4e", "rc8", "ecl", "ecr", "rc16"]);
            mods.has("b32");
            let name = mode.map_or("prmt".to_string(), |m| format!("prmt.{m}"));
            let handler = self.found(inst, int::special32(&name), &mods)?;
            return self.simple(inst, handler, 32, &["b32"; 3], 0);
        }
        let ty = mods.last();
        if ty == "pred" {
            let (a, na) = self.predicate(self.operand(inst, 1)?)?;
            let (b, nb) =
                if inst.name == "not" { (a, false) } else { self.predicate(self.operand(inst, 2)?)? };
            let to = self.destination(self.operand(inst, 0)?, 1)?;
            let handler = self.found(inst, int::predicate(inst.name), &mods)?;
            self.emit(handler, [to, a, b, 0, 0, 0], i64::from(na) | i64::from(nb) << 1);
            return Ok(());
        }
        let Some(bits) = type_bits(ty) else { return self.unknown(inst) };
        let signed = ty.starts_with('s');
        match inst.name {
            "and" | "or" | "xor" => {
                let handler = self.found(inst, int::bits(inst.name, bits), &mods)?;
                self.simple(inst, handler, bits, &[ty, ty], 0)
            }
            "not" | "cnot" => {
                let handler = self.found(inst, int::bits(inst.name, bits), &mods)?;
                self.simple(inst, handler, bits, &[ty], 0)
            }
            "shl" | "shr" => {
                let handler = if inst.name == "shr" && signed {
                    int::arithmetic("shr", ty)
                } else {
                    int::bits(inst.name, bits)
                };
                let handler = self.found(inst, handler, &mods)?;
                self.simple(inst, handler, bits, &[ty, "u32"], 0)
            }
            "popc" | "clz" | "brev" => {
                let handler = self.found(inst, int::bits(inst.name, bits), &mods)?;
                let dst = if inst.name == "brev" { bits } else { 32 };
                self.simple(inst, handler, dst, &[ty], 0)
            }
            "bfind" => {
                let shift = if mods.has("shiftamt") { ".shiftamt" } else { "" };
                let name = format!("bfind.{}{shift}", if signed { 's' } else { 'u' });
                let handler = self.found(inst, int::bits(&name, bits), &mods)?;
                self.simple(inst, handler, 32, &[ty], 0)
            }
            "bfe" => {
                let name = if signed { "bfe.s" } else { "bfe.u" };
                let handler = self.found(inst, int::bits(name, bits), &mods)?;
                self.simple(inst, handler, bits, &[ty, "u32", "u32"], 0)
            }
            "bfi" => {
                let handler = self.found(inst, int::bits("bfi", bits), &mods)?;
                self.simple(inst, handler, bits, &[ty, ty, "u32", "u32"], 0)
            }
            "shf" => {
                let direction = mods.one_of(&["l", "r"]).unwrap_or("l");
                let mode = mods.one_of(&["wrap", "clamp"]).unwrap_or("clamp");
                let handler = self.found(inst, int::special32(&format!("shf.{direction}.{mode}")), &mods)?;
                self.simple(inst, handler, 32, &["b32", "b32", "u32"], 0)
            }
            "bmsk" | "szext" => {
                let mode = mods.one_of(&["wrap", "clamp"]).unwrap_or("clamp");
                let name = match inst.name {
                    "bmsk" => format!("bmsk.{mode}"),
                    _ => format!("szext.{mode}.{ty}"),
                };
                let handler = self.found(inst, int::special32(&name), &mods)?;
                self.simple(inst, handler, 32, &["u32", "u32"], 0)
            }
            "fns" => {
                let handler = self.found(inst, int::special32("fns"), &mods)?;
                self.simple(inst, handler, 32, &["b32", "b32", "s32"], 0)
            }
            "dp4a" => {
                let a = mods.last();
                let handler = self.found(inst, int::special32(&format!("dp4a.{a}.{ty}")), &mods)?;
                self.simple(inst, handler, 32, &["b32"; 3], 0)
            }
            _ => {
                let a = mods.last();
                let high = mods.one_of(&["lo", "hi"]) == Some("hi");
                let handler = self.found(inst, int::special32("dp2a"), &mods)?;
                let imm = i64::from(high) | i64::from(a == "s32") << 1 | i64::from(signed) << 2;
                self.simple(inst, handler, 32, &["b32"; 3], imm)
            }
        }
    }

    fn lower_lop3(&mut self, inst: &Inst<'a>, mut mods: Modifiers<'a>) -> Result<()> {
        let join = mods.one_of(&["and", "or"]);
        mods.has("b32");
        let handler = self.found(inst, int::special32("lop3"), &mods)?;
        let a = self.source(self.operand(inst, 1)?, "b32")?;
        let b = self.source(self.operand(inst, 2)?, "b32")?;
        let c = self.source(self.operand(inst, 3)?, "b32")?;
        let Operand::Int(lut) = self.operand(inst, 4)? else { return self.error("lop3 without a table") };
        let (dst, pred) = match self.operand(inst, 0)? {
            Operand::Pair(d, p) => (d.as_ref().clone(), Some(p.as_ref().clone())),
            other => (other.clone(), None),
        };
        let to = self.destination(&dst, 32)?;
        self.emit(handler, [to, a, b, c, 0, 0], *lut as i64);
        if let Some(pred) = pred {
            let zero = self.constant(32, 0);
            let (q, negated) = self.predicate(self.operand(inst, 5)?)?;
            let p = self.destination(&pred, 1)?;
            let imm = match join {
                Some("and") => combine::AND,
                _ => combine::OR,
            } | if negated { combine::NOT } else { 0 };
            let handler = self.found(inst, int::setp("ne", "b32"), &mods)?;
            self.emit(handler, [p, NONE, to, zero, q, 0], imm);
        }
        Ok(())
    }

    fn lower_select(&mut self, inst: &Inst<'a>) -> Result<()> {
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
                // The last modifier is the type of the selector, the one before that of the values.
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
            _ => {
                // `set.cmp.dst.src`: all ones or zero, or 1.0 or zero.
                let to_type = mods.one_of(&["u32", "s32", "f32", "f16", "bf16", "u16", "s16"]);
                let p = self.allocate_row(1);
                let (handler, width, one) = match to_type {
                    Some("u32" | "s32") => (int::FROM_PRED_32, 32, 0xffff_ffff),
                    Some("f32") => (int::FROM_PRED_32, 32, 0x3f80_0000),
                    Some("u16" | "s16") => (int::FROM_PRED_16, 16, 0xffff),
                    Some("f16") => (int::FROM_PRED_16, 16, 0x3c00),
                    Some("bf16") => (int::FROM_PRED_16, 16, 0x3f80),
                    _ => return self.unknown(inst),
                };
                self.lower_compare(inst, mods, ty, p, NONE)?;
                let to = self.destination(self.operand(inst, 0)?, width)?;
                self.emit(handler, [to, p, 0, 0, 0, 0], one);
                Ok(())
            }
        }
    }

    fn lower_compare(
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
            // Exact as f32, where the subnormals of f16 are normal: so they are flushed before, if they are to be.
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
            // The two halves of a pair have a predicate each.
            Some((ha, hb)) => {
                self.emit(handler, [p, NONE, ra, rb, other, 0], imm);
                self.emit(handler, [q, NONE, ha, hb, other, 0], imm);
            }
            None => self.emit(handler, [p, q, ra, rb, other, 0], imm),
        }
        Ok(())
    }

    fn lower_cvt(&mut self, inst: &Inst<'a>) -> Result<()> {
        let mut mods = Modifiers::new(inst);
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
        flags |= if mods.has("relu") { convert::integer::RELU } else { 0 };
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

    /// Conversions with formats that have no registers of their own: tf32, pairs of 8-bit floats, `cvt.pack`.
    fn lower_special_cvt(
        &mut self,
        inst: &Inst<'a>,
        dst: &str,
        src: &'a str,
        flags: i64,
        mods: &mut Modifiers<'a>,
    ) -> Option<Result<()>> {
        let relu = flags & convert::integer::RELU;
        if mods.has("pack") {
            // With a third source the two values are bytes, and the last type is that source's.
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
            let mode = if mods.has("rna") { flag::RP } else { flags & flag::ROUND };
            mods.has("satfinite");
            if !mods.done() {
                return Some(self.unknown(inst));
            }
            return Some(self.simple(inst, convert::TF32, 32, &["f32"], mode | relu));
        }
        let eight = |name: &str| matches!(name, "e4m3x2" | "e5m2x2");
        if eight(dst) || eight(src) {
            let saturates = mods.has("satfinite");
            if flags & !convert::integer::RELU != 0 || !mods.done() || saturates != eight(dst) {
                return Some(self.unknown(inst));
            }
            let Some(handler) = convert::eights(dst, src) else { return Some(self.unknown(inst)) };
            let (bits, sources): (u32, &[&str]) = match src {
                "f32" => (16, &["f32", "f32"]),
                "f16x2" => (16, &["b32"]),
                _ => (32, &["b16"]),
            };
            return Some(self.simple(inst, handler, bits, sources, relu));
        }
        None
    }

    /// Emits something that writes `bits` bits to the first operand, which may be a wider register: then the value
    /// is extended.
    pub fn write_wider(
        &mut self,
        inst: &Inst<'a>,
        bits: u32,
        signed: bool,
        emit: impl FnOnce(&mut Self, u32),
    ) -> Result<()> {
        let dst = self.operand(inst, 0)?;
        self.write_wider_operand(dst, bits, signed, emit)
    }

    /// As [`Lowering::write_wider`], for any destination.
    pub fn write_wider_operand(
        &mut self,
        dst: &Operand<'a>,
        bits: u32,
        signed: bool,
        emit: impl FnOnce(&mut Self, u32),
    ) -> Result<()> {
        match self.register_bits(dst) {
            Some(wide) if wide > bits => {
                let narrow = self.allocate_row(bits);
                emit(self, narrow);
                let from = if signed { format!("s{bits}") } else { format!("u{bits}") };
                let Some(extend) = convert::cvt(unsigned(wide), &from, false) else {
                    return self.unsupported(format!("{bits} bits into a register of {wide}"));
                };
                let to = self.destination(dst, wide)?;
                self.emit(extend, [to, narrow, 0, 0, 0, 0], 0);
            }
            _ => {
                let to = self.destination(dst, bits)?;
                emit(self, to);
            }
        }
        Ok(())
    }

    fn lower_warp(&mut self, inst: &Inst<'a>) -> Result<()> {
        let mut mods = Modifiers::new(inst);
        let last = inst.operands.len().saturating_sub(1);
        if inst.name == "activemask" {
            let to = self.destination(self.operand(inst, 0)?, 32)?;
            self.emit(warp_ops::ACTIVEMASK, [to, 0, 0, 0, 0, 0], 0);
            return Ok(());
        }
        if !mods.has("sync") {
            return self.unknown(inst);
        }
        match inst.name {
            "shfl" => {
                mods.has("b32");
                let mode = mods.last();
                let handler = self.found(inst, warp_ops::shuffle(mode), &mods)?;
                let members = self.source(self.operand(inst, 4)?, "b32")?;
                let a = self.source(self.operand(inst, 1)?, "b32")?;
                let b = self.source(self.operand(inst, 2)?, "b32")?;
                let c = self.source(self.operand(inst, 3)?, "b32")?;
                let (to, p) = match self.operand(inst, 0)? {
                    Operand::Pair(d, p) => (self.destination(d, 32)?, self.destination(p, 1)?),
                    d => (self.destination(d, 32)?, NONE),
                };
                self.converge(joint::SHUFFLE, handler, [to, a, b, c, p, members], 0);
            }
            "vote" => {
                mods.one_of(&["pred", "b32"]);
                let mode = mods.last();
                let handler = self.found(inst, warp_ops::vote(mode), &mods)?;
                let members = self.source(self.operand(inst, 2)?, "b32")?;
                let (p, negated) = self.predicate(self.operand(inst, 1)?)?;
                let to = self.destination(self.operand(inst, 0)?, if mode == "ballot" { 32 } else { 1 })?;
                let shape = if mode == "ballot" { joint::BALLOT } else { joint::VOTE };
                self.converge(shape, handler, [to, p, 0, 0, 0, members], i64::from(negated));
            }
            "match" => {
                let ty = mods.last();
                let mode = mods.last();
                let handler = self.found(inst, warp_ops::matching(mode, ty), &mods)?;
                let members = self.source(self.operand(inst, last)?, "b32")?;
                let a = self.source(self.operand(inst, 1)?, ty)?;
                let (to, p) = match self.operand(inst, 0)? {
                    Operand::Pair(d, p) => (self.destination(d, 32)?, self.destination(p, 1)?),
                    d => (self.destination(d, 32)?, NONE),
                };
                let shape = if ty == "b64" { joint::MATCH_64 } else { joint::MATCH_32 };
                self.converge(shape, handler, [to, a, p, 0, 0, members], 0);
            }
            "redux" => {
                let ty = mods.last();
                let op = mods.last();
                let handler = self.found(inst, warp_ops::redux(op, ty), &mods)?;
                let members = self.source(self.operand(inst, 2)?, "b32")?;
                let a = self.source(self.operand(inst, 1)?, ty)?;
                let to = self.destination(self.operand(inst, 0)?, 32)?;
                self.converge(joint::REDUX, handler, [to, a, 0, 0, 0, members], 0);
            }
            _ => {
                let members = self.source(self.operand(inst, 1)?, "b32")?;
                let Operand::Pair(d, p) = self.operand(inst, 0)? else { return self.unknown(inst) };
                let (to, p) = (self.destination(d, 32)?, self.destination(p, 1)?);
                self.converge(joint::ELECT, warp_ops::ELECT, [to, p, 0, 0, 0, members], 0);
            }
        }
        Ok(())
    }

    fn lower_control(&mut self, inst: &Inst<'a>) -> Result<()> {
        let mut mods = Modifiers::new(inst);
        match inst.name {
            "bra" => {
                mods.has("uni");
                let Operand::Name(label, 0) = self.operand(inst, 0)? else { return self.unknown(inst) };
                self.branch(label);
            }
            "brx" => {
                mods.has("uni");
                mods.has("idx");
                let Operand::Name(list, 0) = self.operand(inst, 1)? else { return self.unknown(inst) };
                let Some(Symbol::Targets(targets)) = self.lookup(list).cloned() else {
                    return self.error(format!("no targets {list}"));
                };
                let index = self.source(self.operand(inst, 0)?, "u32")?;
                let at = self.target_list(&targets);
                self.control(Kind::BranchIndexed, [at, index, 0, 0, 0, 0]);
            }
            "call" => return self.lower_call(inst),
            "ret" => {
                mods.has("uni");
                self.control(Kind::Return, [0; 6]);
            }
            "exit" => self.control(Kind::Exit, [0; 6]),
            "trap" => self.emit(special::TRAP, [0; 6], 0),
            "brkpt" | "pmevent" | "griddepcontrol" => {
                mods.one_of(&["wait", "launch_dependents", "mask"]);
                self.emit(special::NOTHING, [0; 6], 0);
            }
            "membar" => {
                if mods.one_of(&["cta", "gl", "sys"]).is_none() {
                    return self.unknown(inst);
                }
                self.emit(crate::exec::memory::FENCE, [0; 6], 0);
            }
            "fence" => {
                self.take_fence(&mut mods);
                self.emit(crate::exec::memory::FENCE, [0; 6], 0);
            }
            "nanosleep" => {
                mods.has("u32");
                let ns = self.source(self.operand(inst, 0)?, "u32")?;
                self.emit(special::NANOSLEEP, [0, ns, 0, 0, 0, 0], 0);
            }
            _ => return self.lower_barrier(inst, mods),
        }
        if mods.done() { Ok(()) } else { self.unknown(inst) }
    }

    /// Takes what a fence may say; all fences are the strongest here. Operations that other proxies name (asynchronous
    /// copies, constants, textures) are seen in program order anyway.
    fn take_fence(&self, mods: &mut Modifiers<'a>) {
        if mods.has("proxy") {
            if mods.one_of(&["alias", "async", "async::generic", "tensormap::generic"]).is_some() {
                mods.one_of(&["acquire", "release"]);
                mods.has("sync_restrict::shared::cta");
                mods.has("sync_restrict::shared::cluster");
                mods.one_of(&["global", "shared::cta", "shared::cluster"]);
            } else {
                // Nothing was named: what is left is the error.
                mods.left.push("proxy");
                return;
            }
        } else if mods.has("mbarrier_init") {
            mods.has("release");
        } else {
            mods.one_of(&["sc", "acq_rel", "acquire", "release"]);
            mods.one_of(&["sync_restrict::shared::cta", "sync_restrict::shared::cluster"]);
        }
        mods.one_of(&["cta", "cluster", "gpu", "sys"]);
    }

    fn lower_barrier(&mut self, inst: &Inst<'a>, mut mods: Modifiers<'a>) -> Result<()> {
        if mods.has("warp") {
            if !mods.has("sync") || !mods.done() {
                return self.unknown(inst);
            }
            let members = self.source(self.operand(inst, 0)?, "b32")?;
            self.control(Kind::WarpSync, [0, 0, 0, 0, 0, members]);
            return Ok(());
        }
        mods.has("cta");
        mods.has("aligned");
        if mods.has("cluster") {
            // A cluster is one block here: arriving is enough, and waiting is the block's own barrier.
            let arrive = mods.has("arrive");
            mods.has("wait");
            mods.one_of(&["acquire", "release", "relaxed"]);
            if !mods.done() {
                return self.unknown(inst);
            }
            self.emit(crate::exec::memory::FENCE, [0; 6], 0);
            if !arrive {
                let id = self.constant(32, 15);
                self.control(Kind::Barrier, [id, NONE, barrier::SYNC, 0, 0, 0]);
            }
            return Ok(());
        }
        if mods.has("red") {
            let ty = mods.last();
            let kind = match mods.last() {
                "popc" if ty == "u32" => barrier::RED_POPC,
                "and" if ty == "pred" => barrier::RED_AND,
                "or" if ty == "pred" => barrier::RED_OR,
                _ => return self.unknown(inst),
            };
            let id = self.source(self.operand(inst, 1)?, "u32")?;
            let count =
                if inst.operands.len() > 3 { self.source(self.operand(inst, 2)?, "u32")? } else { NONE };
            let last = self.operand(inst, inst.operands.len() - 1)?;
            let (p, negated) = self.predicate(last)?;
            let to =
                self.destination(self.operand(inst, 0)?, if kind == barrier::RED_POPC { 32 } else { 1 })?;
            self.emit_kind(Kind::Barrier, special::NOTHING, [id, count, kind, p, to, 0], i64::from(negated));
            return if mods.done() { Ok(()) } else { self.unknown(inst) };
        }
        let kind = match mods.one_of(&["sync", "arrive"]) {
            Some("sync") => barrier::SYNC,
            Some(_) => barrier::ARRIVE,
            None => return self.unknown(inst),
        };
        if !mods.done() {
            return self.unknown(inst);
        }
        let id = self.source(self.operand(inst, 0)?, "u32")?;
        let count = if inst.operands.len() > 1 { self.source(self.operand(inst, 1)?, "u32")? } else { NONE };
        self.control(Kind::Barrier, [id, count, kind, 0, 0, 0]);
        Ok(())
    }
}
