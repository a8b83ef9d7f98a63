//! The corpus's bulk copies, plain and reducing, and reductions without a result.

use super::{Check, Corpus, bits, keep};

/// Reducing bulk copies to global memory; `red` of numbers that are flushed or NaN.
pub fn bulk(c: &mut Corpus) {
    // Sixteen bytes for each thread: two words of its input are reduced into the first two.
    let fill = "mov.b32 %d, 0; mov.b32 %e, 0; .shared .align 16 .b8 buffer[8192]; mov.u32 %x7, buffer; mad.lo.u32 %x7, %t, 16, %x7; ld.global.b64 %y0, [%pi+16]; ld.global.b64 %y1, [%pi+24]; st.shared.v2.b64 [%x7], {%y0, %y1}; fence.proxy.async; ";
    let wait = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; fence.proxy.async; ";
    let mut of = |op: &str, ty: &str, kind: &str| {
        let w = bits(ty);
        c.work(
            &format!("cp.reduce.async.bulk.{op}.{ty} of {kind}"),
            &format!("{}cp.reduce.async.bulk.global.shared::cta.bulk_group.{op}.{ty} [%pi], [%x7], 16; {wait}ld.global.b{w} %d, [%pi]; ld.global.b{w} %e, [%pi+8];", fill.replace("b32 %d", &format!("b{w} %d")).replace("b32 %e", &format!("b{w} %e"))),
            &[kind; 4],
            keep(ty),
            true,
            Check::Exact,
        );
    };
    for (op, types) in [
        ("add", &["u32", "s32", "u64", "f32", "f64"][..]),
        ("min", &["u32", "s32", "u64", "s64"]),
        ("max", &["u32", "s32", "u64", "s64"]),
        ("inc", &["u32"]),
        ("dec", &["u32"]),
        ("and", &["b32", "b64"]),
        ("or", &["b32", "b64"]),
        ("xor", &["b32", "b64"]),
        ("add.noftz", &["f16", "bf16"]),
        ("min", &["f16", "bf16"]),
        ("max", &["f16", "bf16"]),
    ] {
        for ty in types {
            of(op, ty, ty);
        }
    }
    of("add", "f32", "tiny32");
    of("add", "f32", "nan32");
    of("add", "f64", "nan64");
    for (ty, kind) in [("f64", "nan64"), ("f32", "tiny32"), ("f32", "nan32")] {
        let w = bits(ty);
        c.work(
            &format!("red.global.add.{ty} of {kind}"),
            &format!("red.global.add.{ty} [%pi], %b; ld.global.b{w} %d, [%pi];"),
            &[kind, kind],
            keep(ty),
            false,
            Check::Exact,
        );
        c.work(
            &format!("red.shared.add.{ty} of {kind}"),
            &format!(".shared .align 8 .b{w} mem[512]; mov.u32 %x7, mem; mad.lo.u32 %x7, %t, {}, %x7; st.shared.b{w} [%x7], %a; red.shared.add.{ty} [%x7], %b; ld.shared.b{w} %d, [%x7];", w / 8),
            &[kind, kind],
            keep(ty),
            false,
            Check::Exact,
        );
    }
    // `subc` reads the flag of `sub.cc` as a borrow, `addc` as a carry.
    for ty in ["u32", "u64"] {
        for (first, second) in [("sub", "addc"), ("add", "subc")] {
            c.work(
                &format!("{first}.cc+{second}.{ty}"),
                &format!("{first}.cc.{ty} %d, %a, %b; {second}.{ty} %e, %b, %c;"),
                &[ty, ty, ty],
                keep(ty),
                true,
                Check::Exact,
            );
        }
    }
    c.work("rsqrt.approx.f64 of nan64", "rsqrt.approx.f64 %d, %a;", &["nan64"], "f64", false, Check::Exact);
    c.threads = 1024;
    for part in 0..4 {
        let name = format!("rsqrt.approx.f64 {part}");
        c.work(&name, "rsqrt.approx.f64 %d, %a;", &["f64"], "f64", false, Check::Near(-52.0, -1075.0));
    }
}
