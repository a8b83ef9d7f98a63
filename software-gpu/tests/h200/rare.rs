//! Cases that random inputs rarely hit: several NaNs at once, and results close to where `.ftz` flushes.

use super::{Check, Corpus, ROUND, Random, keep};

/// The kinds of inputs made for these cases.
pub const KINDS: [&str; 7] = ["nan64", "nan32", "tiny32", "tiny16", "tiny16x2", "tiny64", "big32"];

const NAN64: [u64; 10] = [
    0x7ff8_0000_0000_0000,
    0xfff8_0000_0000_0000,
    0x7ff0_0000_0000_0001,
    0xfff0_0000_0000_0002,
    0xfff8_1234_5678_9abc,
    0x7fff_ffff_ffff_ffff,
    0x7ff4_1111_2222_3333,
    0x7ff0_0000_0000_0000,
    0,
    0x3ff8_0000_0000_0000,
];
const NAN32: [u32; 9] = [
    0x7fc0_0000,
    0xffc0_0000,
    0x7f80_0001,
    0xff80_1fff,
    0xffc1_2345,
    0x7fff_ffff,
    0xffff_ffff,
    0x7fff_f000,
    0x7f80_0000,
];

/// The type of an input of this kind.
pub fn carrier(kind: &str) -> &str {
    match kind {
        "nan64" | "tiny64" => "f64",
        "nan32" | "tiny32" | "big32" => "f32",
        "tiny16" => "f16",
        "tiny16x2" => "f16x2",
        other => other,
    }
}

/// An input of this kind.
pub fn value(kind: &str, random: u64, r: &mut Random) -> u64 {
    // Significands close to a power of two, whose results round up to one.
    let near = |digits: u32, r: &mut Random| match r.below(4) {
        0 => random & ((1 << digits) - 1),
        1 => 0,
        2 => r.below(4) as u64,
        _ => (1 << digits) - 1 - r.below(4) as u64,
    };
    match kind {
        "nan64" => NAN64[r.below(NAN64.len())],
        "nan32" => u64::from(NAN32[r.below(NAN32.len())]),
        "tiny32" => {
            let exponent = [1, 2, 63, 64, 63, 64, 63, 64, 126, 127, 128, 252, 253, 254][r.below(14)];
            random >> 63 << 31 | exponent << 23 | near(23, r)
        }
        "tiny64" => {
            random >> 63 << 63 | (1023 - 128 + r.below(4) as u64) << 52 | near(23, r) << 29 | near(29, r)
        }
        "tiny16" => {
            let exponent = [0, 1, 2, 7, 8, 7, 8, 9, 14, 15][r.below(10)];
            random >> 63 << 15 | exponent << 10 | near(10, r)
        }
        "tiny16x2" => value("tiny16", random, r) | value("tiny16", random << 1, r) << 16,
        _ => random >> 63 << 31 | (250 + r.below(5) as u64) << 23 | near(23, r),
    }
}

/// NaNs in each operand, and results that are flushed.
pub fn rare(c: &mut Corpus) {
    let mut of = |work: &str, out: &'static str, ins: &[&str], check: Check| {
        let list: String = ["a", "b", "c"][..ins.len()].iter().map(|n| format!(", %{n}")).collect();
        c.work(&format!("{work} of {}", ins[0]), &format!("{work} %d{list};"), ins, out, false, check);
    };
    for op in ["add.rn", "sub.rn", "mul.rn", "div.rn", "div.rz", "add.rz", "mul.rp", "min", "max", "copysign"]
    {
        of(&format!("{op}.f64"), "f64", &["nan64", "nan64"], Check::Exact);
    }
    for op in ["fma.rn", "fma.rz"] {
        of(&format!("{op}.f64"), "f64", &["nan64", "nan64", "nan64"], Check::Exact);
    }
    for op in ["rcp.approx.ftz", "rsqrt.approx.ftz", "sqrt.rn", "rcp.rn", "abs", "neg", "cvt.rni.f64"] {
        of(&format!("{op}.f64"), "f64", &["nan64"], Check::Exact);
    }
    for op in ["cvt.rn.f32.f64", "cvt.rp.ftz.f32.f64"] {
        of(op, "f32", &["nan64"], Check::Exact);
        of(op, "f32", &["tiny64"], Check::Exact);
    }
    for m in ["rna", "rn", "rz", "rn.relu", "rz.relu"] {
        of(&format!("cvt.{m}.tf32.f32"), "b32", &["nan32"], Check::Exact);
    }
    of("cvt.f64.f32", "f64", &["nan32"], Check::Exact);
    of("cvt.ftz.f64.f32", "f64", &["nan32"], Check::Exact);
    of("copysign.f32", "f32", &["nan32", "nan32"], Check::Exact);
    for op in ["min", "max", "min.NaN.xorsign.abs", "max.xorsign.abs"] {
        of(&format!("{op}.f32"), "f32", &["nan32", "nan32"], Check::Exact);
    }
    for sat in ["", ".sat"] {
        for round in ROUND {
            of(&format!("mul.{round}.ftz{sat}.f32"), "f32", &["tiny32", "tiny32"], Check::Exact);
            of(&format!("add.{round}.ftz{sat}.f32"), "f32", &["tiny32", "tiny32"], Check::Exact);
            of(&format!("fma.{round}.ftz{sat}.f32"), "f32", &["tiny32", "tiny32", "tiny32"], Check::Exact);
        }
        for (ty, kind) in [("f16", "tiny16"), ("f16x2", "tiny16x2")] {
            of(&format!("mul.rn.ftz{sat}.{ty}"), keep(ty), &[kind, kind], Check::Exact);
            of(&format!("fma.rn.ftz{sat}.{ty}"), keep(ty), &[kind, kind, kind], Check::Exact);
        }
    }
    of("fma.rn.ftz.relu.f16", "f16", &["tiny16", "tiny16", "tiny16"], Check::Exact);
    for round in ROUND {
        of(&format!("div.{round}.ftz.f32"), "f32", &["tiny32", "tiny32"], Check::Exact);
        of(&format!("rcp.{round}.ftz.f32"), "f32", &["big32"], Check::Exact);
        of(&format!("div.{round}.ftz.f32"), "f32", &["big32", "big32"], Check::Exact);
    }
    for ftz in ["", ".ftz"] {
        of(&format!("rcp.approx{ftz}.f32"), "f32", &["big32"], Check::Near(-22.9, -149.0));
        for op in ["div.approx", "div.full"] {
            of(&format!("{op}{ftz}.f32"), "f32", &["tiny32", "big32"], Check::Near(-21.9, -148.0));
            of(&format!("{op}{ftz}.f32"), "f32", &["nan32", "big32"], Check::Near(-21.9, -148.0));
        }
    }
    for (ty, kind) in [("f64", "nan64"), ("f32", "tiny32"), ("f32", "nan32")] {
        let w = if ty == "f64" { 64 } else { 32 };
        for space in ["shared", "global", "generic to shared", "generic to global"] {
            let set = format!(
                ".shared .align 8 .b{w} mem[512]; mov.u32 %x7, mem; mad.lo.u32 %x7, %t, {}, %x7; st.shared.b{w} [%x7], %a; cvt.u64.u32 %y7, %x7; cvta.shared.u64 %y6, %y7; ",
                w / 8
            );
            let (place, address) = match space {
                "shared" => (".shared", "%x7"),
                "global" => (".global", "%pi"),
                "generic to shared" => ("", "%y6"),
                _ => ("", "%pi"),
            };
            c.work(
                &format!("atom.add.{ty} of {kind}, {space}"),
                &format!("{set}atom{place}.add.{ty} %d, [{address}], %b; ld{place}.b{w} %e, [{address}];"),
                &[kind, kind],
                keep(ty),
                true,
                Check::Exact,
            );
        }
    }
}
