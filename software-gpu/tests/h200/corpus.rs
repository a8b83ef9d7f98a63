//! The corpus: a small kernel for each instruction, type and modifier, with edge values and random values as
//! inputs.
//!
//! `examples/h200_corpus.rs` writes it for `runner.cu`, which records a real GPU's results; `tests/h200.rs`
//! runs the same kernels on the software GPU and compares. Everything is derived from a fixed seed, so both
//! sides see the same.

mod bulk;
mod clusters;
mod rare;
mod sums;
pub mod textures;
mod together;
mod video;

use rare::rare;
use together::{matrices, memory, moves, warps};

/// How close a result must be to the GPU's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Check {
    /// Bit-identical.
    Exact,
    /// An approximate instruction: relative error at most 2^`.0`, or absolute error at most 2^`.1`.
    Near(f64, f64),
    /// Like `Near` for inputs of a magnitude up to `.2`; beyond, the result only has to be in [-1, 1].
    Wave(f64, f64, f64),
}

/// A kernel with its inputs.
pub struct Case {
    /// The instruction as written in PTX, sometimes with a remark.
    pub name: String,
    /// The type of the result: `f32`, `u64`, ...
    pub ty: &'static str,
    /// Bytes per thread's result.
    pub out_bytes: usize,
    /// How results are compared.
    pub check: Check,
    /// The kernel's body.
    pub body: String,
    /// Four words per thread.
    pub inputs: Vec<[u64; 4]>,
    /// Text between the kernel's parameters and its body, such as its cluster size.
    pub head: String,
    /// The grid over which the threads are distributed.
    pub grid: [u32; 3],
}

impl Case {
    /// A hash of everything in the case.
    pub fn hash(&self) -> u64 {
        let mut h = 0xcbf2_9ce4_8422_2325u64;
        let mut eat = |b: &[u8]| b.iter().for_each(|b| h = (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3));
        eat(self.head.as_bytes());
        eat(self.body.as_bytes());
        self.inputs.iter().flatten().for_each(|v| eat(&v.to_le_bytes()));
        h
    }

    /// The inputs as the kernel reads them.
    pub fn input_bytes(&self) -> Vec<u8> {
        self.inputs.iter().flatten().flat_map(|v| v.to_le_bytes()).collect()
    }
}

/// Number of cases that are compiled together.
pub const MODULE: usize = 64;

/// The PTX of a module of cases; kernel `c0` is the first.
pub fn ptx(cases: &[Case]) -> String {
    let mut text = String::from(".version 8.8\n.target sm_90\n.address_size 64\n");
    for (n, case) in cases.iter().enumerate() {
        text.push_str(&format!(
            ".visible .entry c{n}(.param .u64 pin, .param .u64 pout){}\n{{\n{}}}\n",
            case.head, case.body
        ));
    }
    text
}

struct Random(u64);
impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
    fn below(&mut self, n: usize) -> usize {
        (self.next() >> 33) as usize % n
    }
}

fn bits(ty: &str) -> u32 {
    match ty {
        "u8" | "s8" => 8,
        "u16" | "s16" | "b16" | "f16" | "bf16" => 16,
        "u64" | "s64" | "b64" | "f64" => 64,
        _ => 32,
    }
}

/// The register size for a type; 8-bit types use 32 bits.
fn register(ty: &str) -> u32 {
    bits(ty).max(if bits(ty) == 8 { 32 } else { 16 })
}

const F32: [u32; 44] = [
    0,
    0x8000_0000,
    1,
    0x8000_0001,
    0x007f_ffff,
    0x807f_ffff,
    0x0080_0000,
    0x8080_0000,
    0x0080_0001,
    0x3f80_0000,
    0xbf80_0000,
    0x3f80_0001,
    0x3f7f_ffff,
    0x3fc0_0000,
    0xbfc0_0000,
    0x4000_0000,
    0x4020_0000,
    0x4060_0000,
    0x3f00_0000,
    0xbf00_0000,
    0x3dcc_cccd,
    0x4049_0fdb,
    0xc049_0fdb,
    0x7f7f_ffff,
    0xff7f_ffff,
    0x7f80_0000,
    0xff80_0000,
    0x7fc0_0000,
    0x7f80_0001,
    0xffc1_2345,
    0x1e3c_e508,
    0x60ad_78ec,
    0x4f00_0000,
    0xcf00_0000,
    0x4f80_0000,
    0x5f00_0000,
    0xdf00_0000,
    0x4b80_0000,
    0x4b7f_ffff,
    0x437f_0000,
    0xc300_0000,
    0x477f_e000,
    0x0000_0003,
    0x7effffff,
];
const F64: [u64; 34] = [
    0,
    1 << 63,
    1,
    0x8000_0000_0000_0001,
    0x000f_ffff_ffff_ffff,
    0x0010_0000_0000_0000,
    0x8010_0000_0000_0000,
    0x3ff0_0000_0000_0000,
    0xbff0_0000_0000_0000,
    0x3ff0_0000_0000_0001,
    0x3fef_ffff_ffff_ffff,
    0x3ff8_0000_0000_0000,
    0x4000_0000_0000_0000,
    0x4004_0000_0000_0000,
    0x3fe0_0000_0000_0000,
    0xbfe0_0000_0000_0000,
    0x3fb9_9999_9999_999a,
    0x7fef_ffff_ffff_ffff,
    0xffef_ffff_ffff_ffff,
    0x7ff0_0000_0000_0000,
    0xfff0_0000_0000_0000,
    0x7ff8_0000_0000_0000,
    0x7ff0_0000_0000_0001,
    0xfff8_1234_5678_9abc,
    0x41e0_0000_0000_0000,
    0x43e0_0000_0000_0000,
    0xc3e0_0000_0000_0000,
    0x43f0_0000_0000_0000,
    0x4340_0000_0000_0000,
    0x47ef_ffff_f000_0000,
    0x3690_0000_0000_0000,
    0x36a0_0000_0000_0000,
    0x380f_ffff_ffff_ffff,
    0x7fe0_0000_0000_0000,
];
const F16: [u16; 30] = [
    0, 0x8000, 1, 0x8001, 0x3ff, 0x83ff, 0x400, 0x8400, 0x401, 0x3c00, 0xbc00, 0x3c01, 0x3bff, 0x3e00,
    0x4000, 0x4100, 0x3800, 0xb800, 0x2e66, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7e00, 0x7c01, 0xfe12, 0x6400,
    0x6401, 0x57f8, 0xd800,
];
const BF16: [u16; 30] = [
    0, 0x8000, 1, 0x8001, 0x7f, 0x807f, 0x80, 0x8080, 0x81, 0x3f80, 0xbf80, 0x3f81, 0x3f7f, 0x3fc0, 0x4000,
    0x4020, 0x3f00, 0xbf00, 0x3dcc, 0x7f7f, 0xff7f, 0x7f80, 0xff80, 0x7fc0, 0x7f81, 0xffc1, 0x4f00, 0x4b80,
    0x437f, 0xc300,
];
const INT: [u64; 32] = [
    0,
    1,
    2,
    3,
    u64::MAX,
    u64::MAX - 1,
    1 << 63,
    i64::MAX as u64,
    i64::MAX as u64 - 1,
    0x5555_5555_5555_5555,
    0xaaaa_aaaa_aaaa_aaaa,
    (1 << 63) | 1,
    7,
    8,
    15,
    16,
    31,
    32,
    33,
    63,
    64,
    65,
    127,
    128,
    255,
    256,
    0x7fff,
    0x8000,
    0xffff,
    0x1_0000,
    0x7fff_ffff,
    0x8000_0000,
];

fn value(ty: &str, r: &mut Random) -> u64 {
    let edge = r.below(100) < 60;
    let random = r.next();
    match ty {
        "f32" if edge => u64::from(F32[r.below(F32.len())]),
        // Numbers of similar magnitude make sums and quotients interesting.
        "f32" if r.below(3) > 0 => {
            random & 0x807f_ffff | (0x3f80_0000 - (((random >> 40) % 24) << 23) + (12 << 23))
        }
        "f64" if edge => F64[r.below(F64.len())],
        "f64" if r.below(3) > 0 => random & 0x800f_ffff_ffff_ffff | (1023 - 26 + r.below(52) as u64) << 52,
        "f16" if edge => u64::from(F16[r.below(F16.len())]),
        "bf16" if edge => u64::from(BF16[r.below(BF16.len())]),
        "bf16" if r.below(3) > 0 => random & 0x807f | (127 - 6 + r.below(12) as u64) << 7,
        "f16x2" => value("f16", r) | value("f16", r) << 16,
        "bf16x2" => value("bf16", r) | value("bf16", r) << 16,
        "u16x2" | "s16x2" => value("u16", r) | value("u16", r) << 16,
        kind if rare::KINDS.contains(&kind) => rare::value(kind, random, r),
        // A shift amount.
        "amount" => {
            [0, 1, 5, 8, 16, 31, 32, 33, 63, 64, 65, 127, 255, 256, 0xffff_ffff, random & 63][r.below(16)]
        }
        "small" => random & 255,
        "lanes" => random & 31,
        "nonzero" => value("u64", r).max(1) & 0xffff | 1,
        "f32" | "f64" | "f16" | "bf16" => random,
        _ if edge => {
            // Extremes of the width itself and of wider words.
            let v = INT[r.below(INT.len())];
            if r.below(2) == 0 { v >> (64 - bits(ty)) | v << 1 } else { v }
        }
        _ => random >> r.below(64),
    }
}

/// Wraps input and output code around `work`, which leaves its result in `%d` (or in `%d` and `%e`).
pub fn body(work: &str, ins: &[&str], out: &str, pair: bool) -> String {
    let mut text = String::new();
    text.push_str("  .reg .b64 %pi, %po, %off;\n  .reg .b32 %t, %lane;\n  .reg .pred %p, %q, %s;\n");
    text.push_str("  .reg .b32 %x<8>;\n  .reg .b64 %y<8>;\n  .reg .b16 %h<8>;\n");
    for (n, ty) in ins.iter().enumerate() {
        text.push_str(&format!("  .reg .b{} %{};\n", register(ty), ["a", "b", "c", "g"][n]));
    }
    let width = register(out);
    text.push_str(&format!("  .reg .b{width} %d, %e;\n"));
    text.push_str("  ld.param.u64 %pi, [pin];\n  ld.param.u64 %po, [pout];\n  mov.u32 %t, %tid.x;\n");
    text.push_str("  mov.u32 %lane, %laneid;\n  mul.wide.u32 %off, %t, 32;\n  add.u64 %pi, %pi, %off;\n");
    let stride = width / 8 * if pair { 2 } else { 1 };
    text.push_str(&format!("  mul.wide.u32 %off, %t, {stride};\n  add.u64 %po, %po, %off;\n"));
    for (n, ty) in ins.iter().enumerate() {
        let name = ["a", "b", "c", "g"][n];
        text.push_str(&format!("  ld.global.b{} %{name}, [%pi+{}];\n", register(ty), n * 8));
    }
    for line in work.split(';').map(str::trim).filter(|l| !l.is_empty()) {
        text.push_str(&format!("  {line}{}\n", if line.ends_with(':') { "" } else { ";" }));
    }
    text.push_str(&format!("  st.global.b{width} [%po], %d;\n"));
    if pair {
        text.push_str(&format!("  st.global.b{width} [%po+{}], %e;\n", width / 8));
    }
    text.push_str("  ret;\n");
    text
}

/// The list under construction.
struct Corpus {
    cases: Vec<Case>,
    threads: usize,
}

impl Corpus {
    /// Adds a kernel that runs `work` on inputs `%a`, `%b`, `%c`, `%g` of the given types.
    fn work(&mut self, name: &str, work: &str, ins: &[&str], out: &'static str, pair: bool, check: Check) {
        let regs: Vec<&str> = ins
            .iter()
            .map(|t| match *t {
                "amount" | "small" | "lanes" | "nonzero" => "u32",
                t => rare::carrier(t),
            })
            .collect();
        let seed = name
            .bytes()
            .fold(88_172_645_463_325_252, |h: u64, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
        let mut r = Random(seed | 1);
        let inputs = (0..self.threads)
            .map(|_| {
                let mut v = [0; 4];
                for (slot, ty) in v.iter_mut().zip(ins) {
                    *slot = value(ty, &mut r);
                }
                v
            })
            .collect();
        let out_bytes = register(out) as usize / 8 * if pair { 2 } else { 1 };
        let body = body(work, &regs, out, pair);
        self.cases.push(Case {
            name: name.into(),
            ty: out,
            out_bytes,
            check,
            body,
            inputs,
            head: String::new(),
            grid: [1; 3],
        });
    }

    /// Adds an instruction: its destination, then its sources in order.
    fn op(&mut self, name: &str, out: &'static str, ins: &[&str]) {
        self.near(name, out, ins, Check::Exact);
    }

    fn near(&mut self, name: &str, out: &'static str, ins: &[&str], check: Check) {
        let list: String = ["a", "b", "c", "g"][..ins.len()].iter().map(|n| format!(", %{n}")).collect();
        self.work(name, &format!("{name} %d{list};"), ins, out, false, check);
    }

    fn compare(&mut self, name: &str, ty: &str) {
        if ty == "f16" || ty == "bf16" {
            self.work(
                name,
                &format!("{name} %p, %a, %b; selp.u32 %d, 1, 0, %p;"),
                &[ty, ty],
                "u32",
                false,
                Check::Exact,
            );
            return;
        }
        self.work(
            name,
            &format!(
                "{name} %p|%q, %a, %b; selp.u32 %d, 1, 0, %p; selp.u32 %x1, 2, 0, %q; or.b32 %d, %d, %x1;"
            ),
            &[ty, ty],
            "u32",
            false,
            Check::Exact,
        );
    }
}

const INTS: [&str; 6] = ["u16", "s16", "u32", "s32", "u64", "s64"];
const ROUND: [&str; 4] = ["rn", "rz", "rm", "rp"];

/// The type with a static lifetime, as cases store it.
fn keep(ty: &str) -> &'static str {
    const ALL: [&str; 24] = [
        "u8", "s8", "u16", "s16", "b16", "u32", "s32", "b32", "u64", "s64", "b64", "f16", "bf16", "f16x2",
        "bf16x2", "f32", "f64", "u16x2", "s16x2", "amount", "small", "lanes", "nonzero", "pred",
    ];
    ALL.iter().find(|t| **t == ty).copied().unwrap_or("u32")
}

fn wider(ty: &str) -> &'static str {
    match ty {
        "u16" => "u32",
        "s16" => "s32",
        "u32" => "u64",
        _ => "s64",
    }
}

fn integers(c: &mut Corpus) {
    for ty in INTS {
        let t = keep(ty);
        for op in ["add", "sub", "mul.lo", "mul.hi", "div", "rem", "min", "max"] {
            let ins = if op == "div" || op == "rem" { [ty, "nonzero"] } else { [ty, ty] };
            if ins[1] == "nonzero" {
                let w = bits(ty);
                let narrow = if w == 32 {
                    "mov.b32 %x0, %b".to_string()
                } else {
                    format!("cvt.u{w}.u32 %{}0, %b", if w == 16 { "h" } else { "y" })
                };
                let b = if w == 16 {
                    "%h0"
                } else if w == 32 {
                    "%x0"
                } else {
                    "%y0"
                };
                c.work(
                    &format!("{op}.{ty}"),
                    &format!("{narrow}; {op}.{ty} %d, %a, {b};"),
                    &ins,
                    t,
                    false,
                    Check::Exact,
                );
            } else {
                c.op(&format!("{op}.{ty}"), t, &ins);
            }
        }
        for op in ["mad.lo", "mad.hi", "sad"] {
            c.op(&format!("{op}.{ty}"), t, &[ty, ty, ty]);
        }
        if bits(ty) < 64 {
            c.op(&format!("mul.wide.{ty}"), wider(ty), &[ty, ty]);
            c.op(&format!("mad.wide.{ty}"), wider(ty), &[ty, ty, wider(ty)]);
        }
        if ty.starts_with('s') {
            c.op(&format!("abs.{ty}"), t, &[ty]);
            c.op(&format!("neg.{ty}"), t, &[ty]);
        }
        for cmp in ["eq", "ne", "lt", "le", "gt", "ge"] {
            c.compare(&format!("setp.{cmp}.{ty}"), ty);
        }
        if ty.starts_with('u') {
            for cmp in ["lo", "ls", "hi", "hs"] {
                c.compare(&format!("setp.{cmp}.{ty}"), ty);
            }
        }
        c.op(&format!("shr.{ty}"), t, &[ty, "amount"]);
        c.op(&format!("selp.{ty}"), t, &[ty, ty]);
        if let Some(case) = c.cases.last_mut() {
            case.body = case.body.replace(
                &format!("selp.{ty} %d, %a, %b"),
                &format!("setp.lt.u32 %p, %lane, 13;\n  selp.{ty} %d, %a, %b, %p"),
            );
        }
    }
    for op in ["mul24.lo", "mul24.hi", "mad24.lo", "mad24.hi"] {
        for ty in ["u32", "s32"] {
            let n = if op.starts_with("mad") { 3 } else { 2 };
            c.op(&format!("{op}.{ty}"), "u32", &[ty; 3][..n]);
        }
    }
    c.op("add.sat.s32", "s32", &["s32", "s32"]);
    c.op("sub.sat.s32", "s32", &["s32", "s32"]);
    c.op("mad.hi.sat.s32", "s32", &["s32", "s32", "s32"]);
    for (op, types) in
        [("add", &["u16x2", "s16x2"][..]), ("min", &["u16x2", "s16x2"]), ("max", &["u16x2", "s16x2"])]
    {
        for ty in types {
            c.op(&format!("{op}.{ty}"), keep(ty), &[ty, ty]);
        }
    }
    c.op("min.relu.s16x2", "s16x2", &["s16x2", "s16x2"]);
    c.op("max.relu.s16x2", "s16x2", &["s16x2", "s16x2"]);
    c.op("min.relu.s32", "s32", &["s32", "s32"]);
    c.op("max.relu.s32", "s32", &["s32", "s32"]);
    for ty in ["u32", "s32", "u64", "s64"] {
        let t = keep(ty);
        for op in ["add", "sub"] {
            c.work(
                &format!("{op}.cc+{op}c.{ty}"),
                &format!("{op}.cc.{ty} %d, %a, %b; {op}c.{ty} %e, %b, %c;"),
                &[ty, ty, ty],
                t,
                true,
                Check::Exact,
            );
            c.work(
                &format!("{op}c.cc.{ty}"),
                &format!("{op}.cc.{ty} %d, %a, %b; {op}c.cc.{ty} %d, %c, %a; {op}c.{ty} %e, %b, %c;"),
                &[ty, ty, ty],
                t,
                true,
                Check::Exact,
            );
        }
        for half in ["lo", "hi"] {
            c.work(
                &format!("mad.{half}.cc+madc.{ty}"),
                &format!("mad.{half}.cc.{ty} %d, %a, %b, %c; madc.hi.{ty} %e, %b, %c, %a;"),
                &[ty, ty, ty],
                t,
                true,
                Check::Exact,
            );
        }
    }
    for w in ["b16", "b32", "b64"] {
        let t = keep(w);
        for op in ["and", "or", "xor"] {
            c.op(&format!("{op}.{w}"), t, &[w, w]);
        }
        c.op(&format!("not.{w}"), t, &[w]);
        c.op(&format!("cnot.{w}"), t, &[w]);
        c.op(&format!("shl.{w}"), t, &[w, "amount"]);
        c.op(&format!("shr.{w}"), t, &[w, "amount"]);
        if w == "b16" {
            continue;
        }
        c.op(&format!("popc.{w}"), "u32", &[w]);
        c.op(&format!("clz.{w}"), "u32", &[w]);
        c.op(&format!("brev.{w}"), t, &[w]);
        c.op(&format!("bfi.{w}"), t, &[w, w, "amount", "amount"]);
    }
    for ty in ["u32", "s32", "u64", "s64"] {
        c.op(&format!("bfind.{ty}"), "u32", &[ty]);
        c.op(&format!("bfind.shiftamt.{ty}"), "u32", &[ty]);
        c.op(&format!("bfe.{ty}"), keep(ty), &[ty, "amount", "amount"]);
    }
    for d in ["l", "r"] {
        for m in ["wrap", "clamp"] {
            c.op(&format!("shf.{d}.{m}.b32"), "b32", &["b32", "b32", "amount"]);
        }
    }
    for lut in [0x00, 0x01, 0x80, 0x96, 0xe8, 0xca, 0x3c, 0xff, 0x6a] {
        c.work(
            &format!("lop3.b32 {lut:#x}"),
            &format!("lop3.b32 %d, %a, %b, %c, {lut};"),
            &["b32", "b32", "b32"],
            "b32",
            false,
            Check::Exact,
        );
    }
    c.op("prmt.b32", "b32", &["b32", "b32", "b32"]);
    for m in ["f4e", "b4e", "rc8", "ecl", "ecr", "rc16"] {
        c.op(&format!("prmt.b32.{m}"), "b32", &["b32", "b32", "b32"]);
    }
    for m in ["wrap", "clamp"] {
        c.op(&format!("bmsk.{m}.b32"), "b32", &["amount", "amount"]);
        c.op(&format!("szext.{m}.u32"), "u32", &["u32", "amount"]);
        c.op(&format!("szext.{m}.s32"), "s32", &["s32", "amount"]);
    }
    c.op("fns.b32", "b32", &["b32", "lanes", "s32"]);
    for a in ["u32", "s32"] {
        for b in ["u32", "s32"] {
            c.op(&format!("dp4a.{a}.{b}"), "u32", &["b32", "b32", "u32"]);
            c.op(&format!("dp2a.lo.{a}.{b}"), "u32", &["b32", "b32", "u32"]);
            c.op(&format!("dp2a.hi.{a}.{b}"), "u32", &["b32", "b32", "u32"]);
        }
    }
    for ty in ["u16", "b32", "u64", "s32", "f32", "f64"] {
        c.op(&format!("slct.{ty}.s32"), keep(ty), &[ty, ty, "s32"]);
        c.op(&format!("slct.{ty}.f32"), keep(ty), &[ty, ty, "f32"]);
    }
    c.op("slct.ftz.s32.f32", "s32", &["s32", "s32", "f32"]);
    for dst in ["u32", "s32", "f32"] {
        for src in ["u16", "s32", "u64", "f32", "f64"] {
            c.op(&format!("set.lt.{dst}.{src}"), keep(dst), &[src, src]);
        }
    }
    for join in ["and", "or", "xor"] {
        c.work(&format!("setp.lt.{join}.s32"), &format!("setp.gt.s32 %s, %c, 5; setp.lt.{join}.s32 %p|%q, %a, %b, !%s; selp.u32 %d, 1, 0, %p; selp.u32 %x1, 2, 0, %q; or.b32 %d, %d, %x1;"), &["s32", "s32", "s32"], "u32", false, Check::Exact);
    }
}

fn floats(c: &mut Corpus) {
    for ftz in ["", ".ftz"] {
        for sat in ["", ".sat"] {
            for round in ROUND {
                for op in ["add", "sub", "mul"] {
                    c.op(&format!("{op}.{round}{ftz}{sat}.f32"), "f32", &["f32", "f32"]);
                }
                c.op(&format!("fma.{round}{ftz}{sat}.f32"), "f32", &["f32", "f32", "f32"]);
            }
        }
        for round in ROUND {
            c.op(&format!("div.{round}{ftz}.f32"), "f32", &["f32", "f32"]);
            c.op(&format!("rcp.{round}{ftz}.f32"), "f32", &["f32"]);
            c.op(&format!("sqrt.{round}{ftz}.f32"), "f32", &["f32"]);
        }
        for op in ["min", "max"] {
            for m in ["", ".NaN", ".xorsign.abs", ".NaN.xorsign.abs"] {
                c.op(&format!("{op}{ftz}{m}.f32"), "f32", &["f32", "f32"]);
            }
        }
        for op in ["abs", "neg"] {
            c.op(&format!("{op}{ftz}.f32"), "f32", &["f32"]);
        }
        c.near(&format!("rcp.approx{ftz}.f32"), "f32", &["f32"], Check::Near(-22.9, -149.0));
        c.near(&format!("div.full{ftz}.f32"), "f32", &["f32", "f32"], Check::Near(-21.9, -148.0));
        c.near(&format!("div.approx{ftz}.f32"), "f32", &["f32", "f32"], Check::Near(-21.9, -150.0));
        c.near(&format!("sqrt.approx{ftz}.f32"), "f32", &["f32"], Check::Near(-22.4, -150.0));
        c.near(&format!("rsqrt.approx{ftz}.f32"), "f32", &["f32"], Check::Near(-22.4, -150.0));
        c.near(&format!("sin.approx{ftz}.f32"), "f32", &["f32"], Check::Wave(-60.0, -20.5, 6.2831855));
        c.near(&format!("cos.approx{ftz}.f32"), "f32", &["f32"], Check::Wave(-60.0, -20.5, 6.2831855));
        c.near(&format!("lg2.approx{ftz}.f32"), "f32", &["f32"], Check::Near(-22.0, -22.0));
        c.near(&format!("ex2.approx{ftz}.f32"), "f32", &["f32"], Check::Near(-21.9, -150.0));
        for cmp in
            ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]
        {
            c.compare(&format!("setp.{cmp}{ftz}.f32"), "f32");
        }
    }
    c.near("tanh.approx.f32", "f32", &["f32"], Check::Near(-10.9, -10.9));
    c.op("copysign.f32", "f32", &["f32", "f32"]);
    c.op("copysign.f64", "f64", &["f64", "f64"]);
    c.near("rcp.approx.ftz.f64", "f64", &["f64"], Check::Near(-19.0, -1075.0));
    c.near("rsqrt.approx.ftz.f64", "f64", &["f64"], Check::Near(-19.0, -1075.0));
    for round in ROUND {
        for op in ["add", "sub", "mul", "div"] {
            c.op(&format!("{op}.{round}.f64"), "f64", &["f64", "f64"]);
        }
        c.op(&format!("fma.{round}.f64"), "f64", &["f64", "f64", "f64"]);
        c.op(&format!("rcp.{round}.f64"), "f64", &["f64"]);
        c.op(&format!("sqrt.{round}.f64"), "f64", &["f64"]);
    }
    for op in ["min", "max"] {
        c.op(&format!("{op}.f64"), "f64", &["f64", "f64"]);
    }
    for op in ["abs", "neg"] {
        c.op(&format!("{op}.f64"), "f64", &["f64"]);
    }
    for cmp in ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"] {
        for ty in ["f64", "f16", "bf16"] {
            c.compare(&format!("setp.{cmp}.{ty}"), ty);
        }
        c.compare(&format!("setp.{cmp}.ftz.f16"), "f16");
        for ty in ["f16x2", "bf16x2"] {
            c.compare(&format!("setp.{cmp}.{ty}"), ty);
        }
    }
    for ty in ["f32", "f64"] {
        for test in ["finite", "infinite", "number", "notanumber", "normal", "subnormal"] {
            c.work(
                &format!("testp.{test}.{ty}"),
                &format!("testp.{test}.{ty} %p, %a; selp.u32 %d, 1, 0, %p;"),
                &[ty],
                "u32",
                false,
                Check::Exact,
            );
        }
    }
    for ty in ["f16", "f16x2", "bf16", "bf16x2"] {
        let t = keep(ty);
        let flush: &[&str] = if ty.starts_with('b') { &[""] } else { &["", ".ftz"] };
        for ftz in flush {
            let sats: &[&str] = if ty.starts_with('b') { &[""] } else { &["", ".sat"] };
            for sat in sats {
                for op in ["add", "sub", "mul"] {
                    c.op(&format!("{op}.rn{ftz}{sat}.{ty}"), t, &[ty, ty]);
                }
                c.op(&format!("fma.rn{ftz}{sat}.{ty}"), t, &[ty, ty, ty]);
            }
            c.op(&format!("fma.rn{ftz}.relu.{ty}"), t, &[ty, ty, ty]);
            for op in ["min", "max"] {
                for m in ["", ".NaN", ".xorsign.abs", ".NaN.xorsign.abs"] {
                    c.op(&format!("{op}{ftz}{m}.{ty}"), t, &[ty, ty]);
                }
            }
            for op in ["abs", "neg"] {
                c.op(&format!("{op}{ftz}.{ty}"), t, &[ty]);
            }
        }
        c.near(
            &format!("tanh.approx.{ty}"),
            t,
            &[ty],
            if ty.starts_with('b') { Check::Near(-7.9, -8.0) } else { Check::Near(-10.0, -10.9) },
        );
        let ex2 =
            if ty.starts_with('b') { format!("ex2.approx.ftz.{ty}") } else { format!("ex2.approx.{ty}") };
        c.near(
            &ex2,
            t,
            &[ty],
            if ty.starts_with('b') { Check::Near(-7.0, -134.0) } else { Check::Near(-9.9, -24.0) },
        );
    }
}

fn conversions(c: &mut Corpus) {
    let ints = ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"];
    for dst in ints {
        for src in ints {
            if dst == src {
                continue;
            }
            c.op(&format!("cvt.{dst}.{src}"), keep(dst), &[src]);
            let holds = dst.starts_with('s') && src.starts_with('s') && bits(dst) >= bits(src)
                || dst.starts_with('u') && src.starts_with('u') && bits(dst) >= bits(src)
                || dst.starts_with('s') && bits(dst) > bits(src);
            if !holds {
                c.op(&format!("cvt.sat.{dst}.{src}"), keep(dst), &[src]);
            }
        }
        for src in ["f32", "f64", "f16", "bf16"] {
            for round in ["rni", "rzi", "rmi", "rpi"] {
                if src == "bf16" && dst.ends_with('8') {
                    continue;
                }
                c.op(&format!("cvt.{round}.{dst}.{src}"), keep(dst), &[src]);
                if src == "f32" {
                    c.op(&format!("cvt.{round}.ftz.{dst}.{src}"), keep(dst), &[src]);
                }
            }
        }
        for to in ["f32", "f64", "f16", "bf16"] {
            if to == "bf16" && dst.ends_with('8') {
                continue;
            }
            for round in ROUND {
                c.op(&format!("cvt.{round}.{to}.{dst}"), keep(to), &[dst]);
            }
        }
        c.op(&format!("cvt.rn.sat.f32.{dst}"), "f32", &[dst]);
        c.op(&format!("cvt.rn.sat.f16.{dst}"), "f16", &[dst]);
    }
    for round in ROUND {
        c.op(&format!("cvt.{round}.f32.f64"), "f32", &["f64"]);
        c.op(&format!("cvt.{round}.ftz.f32.f64"), "f32", &["f64"]);
        c.op(&format!("cvt.{round}.sat.f32.f64"), "f32", &["f64"]);
        c.op(&format!("cvt.{round}.f16.f32"), "f16", &["f32"]);
        c.op(&format!("cvt.{round}.f16.f64"), "f16", &["f64"]);
        c.op(&format!("cvt.{round}.bf16.f64"), "bf16", &["f64"]);
    }
    for round in ["rni", "rzi", "rmi", "rpi"] {
        for ty in ["f32", "f64", "f16"] {
            c.op(&format!("cvt.{round}.{ty}.{ty}"), keep(ty), &[ty]);
        }
        c.op(&format!("cvt.{round}.ftz.f32.f32"), "f32", &["f32"]);
        c.op(&format!("cvt.{round}.sat.f32.f32"), "f32", &["f32"]);
    }
    for name in ["cvt.rn.ftz.f16.f32", "cvt.rn.sat.f16.f32", "cvt.rn.relu.f16.f32", "cvt.rz.relu.f16.f32"] {
        c.op(name, "f16", &["f32"]);
    }
    for name in ["cvt.rn.bf16.f32", "cvt.rz.bf16.f32", "cvt.rn.relu.bf16.f32", "cvt.rz.relu.bf16.f32"] {
        c.op(name, "bf16", &["f32"]);
    }
    for name in ["cvt.rna.tf32.f32", "cvt.rn.tf32.f32", "cvt.rz.tf32.f32", "cvt.rn.relu.tf32.f32"] {
        c.op(name, "b32", &["f32"]);
    }
    for m in ["rn", "rz", "rn.relu", "rz.relu"] {
        c.op(&format!("cvt.{m}.f16x2.f32"), "f16x2", &["f32", "f32"]);
        c.op(&format!("cvt.{m}.bf16x2.f32"), "bf16x2", &["f32", "f32"]);
    }
    for name in ["cvt.f32.f16", "cvt.ftz.f32.f16", "cvt.sat.f32.f16"] {
        c.op(name, "f32", &["f16"]);
    }
    c.op("cvt.f32.bf16", "f32", &["bf16"]);
    c.op("cvt.f64.f32", "f64", &["f32"]);
    c.op("cvt.ftz.f64.f32", "f64", &["f32"]);
    c.op("cvt.f64.f16", "f64", &["f16"]);
    c.op("cvt.f64.bf16", "f64", &["bf16"]);
    c.op("cvt.sat.f64.f32", "f64", &["f32"]);
    c.op("cvt.sat.f64.f64", "f64", &["f64"]);
    c.op("cvt.sat.f32.f32", "f32", &["f32"]);
    c.op("cvt.ftz.f32.f32", "f32", &["f32"]);
    c.op("cvt.rn.bf16.f16", "bf16", &["f16"]);
    for f in ["e4m3x2", "e5m2x2"] {
        for relu in ["", ".relu"] {
            c.op(&format!("cvt.rn.satfinite{relu}.{f}.f32"), "u16", &["f32", "f32"]);
            c.op(&format!("cvt.rn.satfinite{relu}.{f}.f16x2"), "u16", &["f16x2"]);
            c.op(&format!("cvt.rn{relu}.f16x2.{f}"), "f16x2", &["u16"]);
        }
    }
    c.op("cvt.pack.sat.u8.s32.b32", "b32", &["s32", "s32", "b32"]);
    c.op("cvt.pack.sat.s8.s32.b32", "b32", &["s32", "s32", "b32"]);
    c.op("cvt.pack.sat.u16.s32", "b32", &["s32", "s32"]);
    c.op("cvt.pack.sat.s16.s32", "b32", &["s32", "s32"]);
}

/// Every case, in a fixed order.
pub fn cases() -> Vec<Case> {
    let mut c = Corpus { cases: Vec::new(), threads: 256 };
    floats(&mut c);
    c.threads = 160;
    integers(&mut c);
    conversions(&mut c);
    c.threads = 96;
    warps(&mut c);
    memory(&mut c);
    c.threads = 32;
    moves(&mut c);
    matrices(&mut c);
    c.threads = 512;
    rare(&mut c);
    c.threads = 160;
    video::video(&mut c);
    bulk::bulk(&mut c);
    sums::sums(&mut c);
    clusters::clusters(&mut c);
    c.cases
}

/// The number of threads in a case. A matrix takes one warp.
pub fn threads(case: &Case) -> usize {
    if case.name.contains("mma.") { 32 } else { case.inputs.len() }
}
