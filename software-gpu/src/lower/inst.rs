//! An instruction's modifiers, the choice of the module that lowers it, and the lowering of moves, arithmetic
//! and logic.

use super::function::{Lowering, unsigned};
use super::types::type_bits;
use crate::error::Result;
use crate::exec::float::flag;
use crate::exec::int::combine;
use crate::exec::{convert, float, half, int, moves};
use crate::machine::program::{Handler, NONE};
use crate::ptx::ast::{Inst, Operand};

/// An instruction's modifiers. Lowering takes them one by one; whatever remains is unknown.
pub(crate) struct Modifiers<'a> {
    pub(super) left: Vec<&'a str>,
}

impl<'a> Modifiers<'a> {
    pub fn new(inst: &Inst<'a>) -> Self {
        Modifiers { left: inst.modifiers.clone() }
    }

    /// Takes a modifier if present.
    pub fn has(&mut self, name: &str) -> bool {
        match self.left.iter().position(|m| *m == name) {
            Some(i) => {
                self.left.remove(i);
                true
            }
            None => false,
        }
    }

    /// Takes the first modifier that is in the list.
    pub fn one_of(&mut self, names: &[&str]) -> Option<&'a str> {
        let i = self.left.iter().position(|m| names.contains(m))?;
        Some(self.left.remove(i))
    }

    /// Takes the last modifier, the type. `.ftz` may follow it: NVIDIA's assembler accepts that, and cuRAND's
    /// headers use it.
    pub fn last(&mut self) -> &'a str {
        match self.left.iter().rposition(|m| *m != "ftz") {
            Some(i) => self.left.remove(i),
            None => "",
        }
    }

    /// Takes the type, wherever it is.
    pub fn ty(&mut self) -> &'a str {
        match self.left.iter().rposition(|m| type_bits(m).is_some()) {
            Some(i) => self.left.remove(i),
            None => "",
        }
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

/// PTX instructions of which nothing is implemented.
const UNIMPLEMENTED: &[&str] =
    &["clusterlaunchcontrol", "istypep", "multimem", "setmaxnreg", "sured", "tcgen05", "tensormap", "wgmma"];

/// PTX modifiers that are plain words. Other modifiers are types, or names with digits, colons or
/// underscores.
const WORDS: &str = "a abs acquire add address alias aligned all alloc and any approx array arrive async b ballot base \
     bfly block bulk c ca cancel cas cg channel clamp cluster col collector commit complete const count \
     cp cs cta cube cv d dealloc dec dependents depth down drop eq equ exch expect explicit fence filter \
     finite first ftz full ge geom geu global gpu grad gt gtu height hi hs idx im inc infinite init inval \
     is kind l launch ld le leu level lo local ls lt ltu lu m max min mma mmio mode mul multicast nan nc \
     ne neu noftz noinc normal not notanumber num number oob op or override pack param pending popc \
     prefetch priority proxy query r ra rand rc red reduce relaxed release relinquish relu remap replace \
     rm rmi rn rna rni row rp rpi rs rz rzi samples sat satfinite sc scale shared shift size sp space \
     sparse st subnormal sum sync sys tensor tensormap test tile to trans trap try tx uni unified \
     unordered up v valid volatile vote w wait warp weak wide width wrap write ws x xor xorsign y z zero";

/// Whether the text looks like a PTX modifier.
fn is_modifier(text: &str) -> bool {
    text.contains(|c: char| c.is_ascii_digit() || c == ':' || c == '_')
        || WORDS.split(' ').any(|word| word == text)
}

impl<'a> Lowering<'a, '_> {
    /// The instruction as written in the PTX, for error messages.
    pub(super) fn spelled(inst: &Inst<'_>) -> String {
        let mut text = inst.name.to_string();
        for m in &inst.modifiers {
            text.push('.');
            text.push_str(m);
        }
        text
    }

    /// Refuses a form of an instruction: it is either not PTX or not implemented.
    pub fn unknown<T>(&self, inst: &Inst<'_>) -> Result<T> {
        if inst.modifiers.iter().all(|modifier| is_modifier(modifier)) {
            self.unsupported(Self::spelled(inst))
        } else {
            self.error(format!("{} is not a PTX instruction", Self::spelled(inst)))
        }
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
            None => self.error(format!("{} has no operand {}", Self::spelled(inst), n + 1)),
        }
    }

    /// Emits `handler` with a destination of type `dst` and sources of the given types.
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
            | "applypriority" | "discard" | "createpolicy" | "alloca" | "stacksave" | "stackrestore"
            | "mapa" | "getctarank" => self.lower_access(inst),
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
            "ldmatrix" | "stmatrix" => self.lower_ldmatrix(inst),
            "movmatrix" => self.lower_movmatrix(inst),
            "tex" | "tld4" | "txq" | "suq" => self.lower_texture(inst),
            "suld" | "sust" => self.lower_surface(inst),
            "vadd2" | "vadd4" | "vsub2" | "vsub4" | "vavrg2" | "vavrg4" | "vabsdiff2" | "vabsdiff4"
            | "vmin2" | "vmin4" | "vmax2" | "vmax4" | "vset2" | "vset4" => self.lower_video(inst),
            "vadd" | "vsub" | "vabsdiff" | "vmin" | "vmax" | "vshl" | "vshr" | "vmad" | "vset" => {
                self.lower_single_video(inst)
            }
            "cp" => self.lower_copy_async(inst),
            "mbarrier" => self.lower_mbarrier(inst),
            "shfl" | "vote" | "match" | "redux" | "activemask" | "elect" => self.lower_warp(inst),
            name if UNIMPLEMENTED.contains(&name) => self.unknown(inst),
            _ => self.error(format!("{} is not a PTX instruction", Self::spelled(inst))),
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
                // In a row of its own, because the destination may be one of the sources.
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
        // The CUDA headers write `max.s16x2.relu`; in all other cases the type comes last.
        if mods.left.last() == Some(&"relu") {
            mods.left.rotate_right(1);
        }
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
        // `mad` is `fma` on all architectures that this GPU supports.
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
        let Operand::Int(lut) = self.operand(inst, 4)? else {
            return self.error("lop3 without a lookup table");
        };
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

    /// Emits an operation that writes `bits` bits to the first operand. If that register is wider, the value
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

    /// Like [`Lowering::write_wider`], for any destination.
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modifiers_are_recognized() {
        assert!(["sync", "f32", "acc::f32", "seq_cst", "128x256b"].into_iter().all(is_modifier));
        assert!(!["an", "instruction", "", " "].into_iter().any(is_modifier));
    }
}
