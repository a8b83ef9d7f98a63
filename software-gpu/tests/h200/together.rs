//! Cases in which lanes cooperate or memory is used.

use super::{Case, Check, Corpus, Random, bits, keep};

/// Warp-wide operations and special registers.
pub fn warps(c: &mut Corpus) {
    for mode in ["up", "down", "bfly", "idx"] {
        for clamp in [0x00, 0x1f, 0x181f, 0x1807, 0x1c03, 0x0f1f] {
            c.work(
                &format!("shfl.sync.{mode}.b32 {clamp:#x}"),
                &format!("shfl.sync.{mode}.b32 %d|%p, %a, %b, {clamp}, -1; selp.b32 %e, 1, 0, %p;"),
                &["b32", "lanes"],
                "b32",
                true,
                Check::Exact,
            );
        }
    }
    // A source lane that differs between lanes, with missing lanes: the members are those that took the
    // branch.
    c.work("shfl.sync.idx.b32 in a branch", "setp.lt.u32 %p, %lane, 11; mov.b32 %d, %a; @%p shfl.sync.bfly.b32 %d, %a, 1, 0x1f, 0x7ff; mov.b32 %d, %d;", &["b32"], "b32", false, Check::Exact);
    for op in ["add", "min", "max"] {
        for ty in ["u32", "s32"] {
            c.work(
                &format!("redux.sync.{op}.{ty}"),
                &format!("redux.sync.{op}.{ty} %d, %a, -1;"),
                &[ty],
                keep(ty),
                false,
                Check::Exact,
            );
        }
    }
    for op in ["and", "or", "xor"] {
        c.work(
            &format!("redux.sync.{op}.b32"),
            &format!("redux.sync.{op}.b32 %d, %a, -1;"),
            &["b32"],
            "b32",
            false,
            Check::Exact,
        );
    }
    for mode in ["all", "any", "uni"] {
        c.work(&format!("vote.sync.{mode}.pred"), &format!("and.b32 %x0, %a, %t; setp.ne.u32 %p, %x0, 0; vote.sync.{mode}.pred %q, !%p, -1; selp.u32 %d, 1, 0, %q;"), &["u32"], "u32", false, Check::Exact);
    }
    c.work(
        "vote.sync.ballot.b32",
        "and.b32 %x0, %a, 1; setp.ne.u32 %p, %x0, 0; vote.sync.ballot.b32 %d, %p, -1;",
        &["u32"],
        "u32",
        false,
        Check::Exact,
    );
    c.work(
        "match.any.sync.b32",
        "and.b32 %x0, %a, 3; match.any.sync.b32 %d, %x0, -1;",
        &["u32"],
        "u32",
        false,
        Check::Exact,
    );
    c.work(
        "match.any.sync.b64",
        "and.b64 %y0, %a, 3; match.any.sync.b64 %d, %y0, -1;",
        &["u64"],
        "u32",
        false,
        Check::Exact,
    );
    c.work(
        "match.all.sync.b32",
        "and.b32 %x0, %t, 0x20; match.all.sync.b32 %d|%p, %x0, -1; selp.b32 %e, 1, 0, %p;",
        &["u32"],
        "u32",
        true,
        Check::Exact,
    );
    c.work(
        "match.all.sync.b32 differing",
        "match.all.sync.b32 %d|%p, %lane, -1; selp.b32 %e, 1, 0, %p;",
        &["u32"],
        "u32",
        true,
        Check::Exact,
    );
    c.work(
        "redux.sync by match.any",
        "and.b32 %x0, %a, 3; match.any.sync.b32 %x1, %x0, -1; redux.sync.add.u32 %d, %b, %x1;",
        &["u32", "u32"],
        "u32",
        false,
        Check::Exact,
    );
    c.work("vote.sync.ballot by match.any", "and.b32 %x0, %a, 3; match.any.sync.b32 %x1, %x0, -1; and.b32 %x2, %b, 1; setp.ne.u32 %p, %x2, 0; vote.sync.ballot.b32 %d, %p, %x1;", &["u32", "u32"], "u32", false, Check::Exact);
    c.work(
        "activemask",
        "mov.b32 %d, 0; setp.gt.u32 %p, %lane, 20; @%p activemask.b32 %d;",
        &["u32"],
        "u32",
        false,
        Check::Exact,
    );
    c.work("elect.sync", "elect.sync %d|%p, -1; selp.b32 %e, 1, 0, %p;", &["u32"], "u32", true, Check::Exact);
    c.work("elect.sync some", "setp.gt.u32 %q, %lane, 6; mov.b32 %d, 77; setp.eq.u32 %p, 1, 2; @%q elect.sync %d|%p, 0xffffff80; selp.b32 %e, 1, 0, %p;", &["u32"], "u32", true, Check::Exact);
    c.work("shfl.sync at two places", "setp.lt.u32 %p, %lane, 16; @%p bra L1; shfl.sync.bfly.b32 %d, %a, 16, 0x1f, -1; add.u32 %d, %d, 1; bra L2; L1:; shfl.sync.bfly.b32 %d, %a, 16, 0x1f, -1; L2:; ", &["u32"], "u32", false, Check::Exact);
    for r in [
        "laneid",
        "lanemask_eq",
        "lanemask_le",
        "lanemask_lt",
        "lanemask_ge",
        "lanemask_gt",
        "tid.x",
        "ntid.x",
        "ctaid.x",
        "nctaid.x",
    ] {
        c.work(&format!("%{r}"), &format!("mov.u32 %d, %{r};"), &["u32"], "u32", false, Check::Exact);
    }
}

/// Memory accesses and atomics.
pub fn memory(c: &mut Corpus) {
    // Each thread has its own word. The result is its previous and its new value.
    let shared = |w: u32| {
        format!(
            ".shared .align 8 .b{w} mem[512]; mov.u32 %x7, mem; mad.lo.u32 %x7, %t, {}, %x7; st.shared.b{w} [%x7], %a; ",
            w / 8
        )
    };
    for (op, types) in [
        ("add", &["u32", "s32", "u64", "f32", "f64"][..]),
        ("min", &["u32", "s32", "u64", "s64"]),
        ("max", &["u32", "s32", "u64", "s64"]),
        ("and", &["b32", "b64"]),
        ("or", &["b32", "b64"]),
        ("xor", &["b32", "b64"]),
        ("exch", &["b32", "b64"]),
        ("inc", &["u32"]),
        ("dec", &["u32"]),
        ("add.noftz", &["f16", "f16x2", "bf16", "bf16x2"]),
    ] {
        for ty in types {
            let w = bits(ty);
            c.work(
                &format!("atom.shared.{op}.{ty}"),
                &format!("{}atom.shared.{op}.{ty} %d, [%x7], %b; ld.shared.b{w} %e, [%x7];", shared(w)),
                &[ty, ty],
                keep(ty),
                true,
                Check::Exact,
            );
            c.work(
                &format!("atom.global.{op}.{ty}"),
                &format!("atom.global.{op}.{ty} %d, [%pi], %b; ld.global.b{w} %e, [%pi];"),
                &[ty, ty],
                keep(ty),
                true,
                Check::Exact,
            );
        }
    }
    for ty in ["b16", "b32", "b64"] {
        let w = bits(ty);
        c.work(&format!("atom.shared.cas.{ty}"), &format!("{}setp.lt.u32 %p, %lane, 16; selp.b{w} %b, %a, %b, %p; atom.shared.cas.{ty} %d, [%x7], %b, %c; ld.shared.b{w} %e, [%x7];", shared(w)), &[ty, ty, ty], keep(ty), true, Check::Exact);
    }
    for w in [8u32, 16, 32] {
        for s in ["u", "s"] {
            c.work(
                &format!("ld.global.{s}{w} into 32 bits"),
                &format!("ld.global.{s}{w} %d, [%pi];"),
                &["u32"],
                "u32",
                false,
                Check::Exact,
            );
            c.work(
                &format!("ld.global.{s}{w} into 64 bits"),
                &format!("ld.global.{s}{w} %d, [%pi];"),
                &["u32"],
                "u64",
                false,
                Check::Exact,
            );
        }
    }
    c.work(
        "mov.b64 apart and together",
        "mov.b64 {%x0, %x1}, %a; mov.b64 %d, {%x1, %x0};",
        &["u64"],
        "u64",
        false,
        Check::Exact,
    );
    c.work(
        "mov.b32 apart and together",
        "mov.b32 {%h0, %h1}, %a; mov.b32 %d, {%h1, %h0};",
        &["u32"],
        "u32",
        false,
        Check::Exact,
    );
    c.work("st.v4.u8", ".shared .align 4 .b8 bytes[4096]; mov.u32 %x7, bytes; mad.lo.u32 %x7, %t, 4, %x7; st.shared.v4.u8 [%x7], {%a, %b, %c, %a}; ld.shared.u32 %d, [%x7];", &["u8", "u8", "u8"], "u32", false, Check::Exact);
}

/// Matrices to and from shared memory. 1 KiB has room for eight 8 × 8 matrices of f16; a warp moves up to
/// four.
pub fn moves(c: &mut Corpus) {
    let fill = ".shared .align 16 .b8 tile[1024]; mov.u32 %x7, tile; mad.lo.u32 %x6, %lane, 32, %x7; st.shared.v4.b32 [%x6], {%a, %b, %c, %g}; xor.b32 %x0, %a, %c; st.shared.v4.b32 [%x6+16], {%b, %x0, %a, %g}; bar.warp.sync -1; xor.b32 %x1, %lane, 5; mad.lo.u32 %x5, %x1, 16, %x7; ";
    let ins = ["u32", "u32", "u32", "u32"];
    for trans in ["", ".trans"] {
        for (n, list) in [("x1", "{%d}"), ("x2", "{%d, %e}"), ("x4", "{%d, %x2, %x3, %e}")] {
            let more = if n == "x1" {
                "mov.b32 %e, 0;"
            } else if n == "x4" {
                "mad.lo.u32 %d, %d, 3, %x2; mad.lo.u32 %e, %e, 5, %x3;"
            } else {
                ""
            };
            c.work(
                &format!("ldmatrix.sync.aligned.m8n8.{n}{trans}.shared.b16"),
                &format!("{fill}ldmatrix.sync.aligned.m8n8.{n}{trans}.shared.b16 {list}, [%x5];{more}"),
                &ins,
                "u32",
                true,
                Check::Exact,
            );
            let list = match n {
                "x1" => "{%a}",
                "x2" => "{%a, %b}",
                _ => "{%a, %b, %c, %g}",
            };
            c.work(&format!("stmatrix.sync.aligned.m8n8.{n}{trans}.shared.b16"), &format!("{fill}stmatrix.sync.aligned.m8n8.{n}{trans}.shared.b16 [%x5], {list}; bar.warp.sync -1; ld.shared.u32 %x2, [%x6]; ld.shared.u32 %x3, [%x6+4]; ld.shared.u32 %x4, [%x6+8]; ld.shared.u32 %x0, [%x6+20]; mad.lo.u32 %d, %x2, 3, %x3; mad.lo.u32 %e, %x4, 5, %x0;"), &ins, "u32", true, Check::Exact);
        }
    }
    c.work(
        "movmatrix.sync.aligned.m8n8.trans.b16",
        "movmatrix.sync.aligned.m8n8.trans.b16 %d, %a;",
        &["u32"],
        "u32",
        false,
        Check::Exact,
    );
}

/// Products of small matrices. The inputs are small integers, so that every sum is exact in any order.
pub fn matrices(c: &mut Corpus) {
    let small = |ty: &str, r: &mut Random| -> u64 {
        let n = r.below(9) as i32 - 4;
        match ty {
            "f16" => (0..2).fold(0, |v, k| v | u64::from(half(n * (1 - 2 * k))) << (16 * k)),
            "bf16" => (0..2).fold(0, |v, k| v | u64::from(((n + k) as f32).to_bits() >> 16) << (16 * k)),
            "tf32" | "f32" => u64::from((n as f32).to_bits()),
            "f64" => (f64::from(n)).to_bits(),
            "s32" => n as u32 as u64,
            _ => r.next() & 0xffff_ffff,
        }
    };
    // Shape; types of D, A, B, C; 32-bit registers of each.
    let shapes: [(&str, [&str; 4], [usize; 4]); 22] = [
        ("m16n8k16", ["f32", "f16", "f16", "f32"], [4, 4, 2, 4]),
        ("m16n8k16", ["f16", "f16", "f16", "f16"], [2, 4, 2, 2]),
        ("m16n8k8", ["f32", "f16", "f16", "f32"], [4, 2, 1, 4]),
        ("m16n8k8", ["f16", "f16", "f16", "f16"], [2, 2, 1, 2]),
        ("m16n8k16", ["f32", "bf16", "bf16", "f32"], [4, 4, 2, 4]),
        ("m16n8k8", ["f32", "bf16", "bf16", "f32"], [4, 2, 1, 4]),
        ("m16n8k4", ["f32", "tf32", "tf32", "f32"], [4, 2, 1, 4]),
        ("m16n8k8", ["f32", "tf32", "tf32", "f32"], [4, 4, 2, 4]),
        ("m16n8k16", ["s32", "s8", "s8", "s32"], [4, 2, 1, 4]),
        ("m16n8k16", ["s32", "u8", "s8", "s32"], [4, 2, 1, 4]),
        ("m16n8k32", ["s32", "s8", "u8", "s32"], [4, 4, 2, 4]),
        ("m16n8k32", ["s32", "u8", "u8", "s32"], [4, 4, 2, 4]),
        ("m8n8k16", ["s32", "s8", "s8", "s32"], [2, 1, 1, 2]),
        ("m8n8k32", ["s32", "s4", "s4", "s32"], [2, 1, 1, 2]),
        ("m16n8k32", ["s32", "u4", "s4", "s32"], [4, 2, 1, 4]),
        ("m16n8k64", ["s32", "s4", "u4", "s32"], [4, 4, 2, 4]),
        ("m16n8k128", ["s32", "b1", "b1", "s32"], [4, 2, 1, 4]),
        ("m16n8k256", ["s32", "b1", "b1", "s32"], [4, 4, 2, 4]),
        ("m8n8k4", ["f64", "f64", "f64", "f64"], [4, 2, 2, 4]),
        ("m16n8k4", ["f64", "f64", "f64", "f64"], [8, 4, 2, 8]),
        ("m16n8k8", ["f64", "f64", "f64", "f64"], [8, 8, 4, 8]),
        ("m16n8k16", ["f64", "f64", "f64", "f64"], [8, 16, 8, 8]),
    ];
    for (shape, types, counts) in shapes {
        let mut r = Random(shape.len() as u64 * 7919 + counts[1] as u64 + types[1].len() as u64);
        product(c, shape, types, counts, "", |ty, _| small(ty, &mut r));
    }
}

/// One product of a shape, with the types and numbers of 32-bit registers of D, A, B and C. `value` returns
/// the contents of a register for an operand's type (of C if its second argument is true).
pub fn product(
    c: &mut Corpus,
    shape: &str,
    [d, a, b, acc]: [&str; 4],
    counts: [usize; 4],
    remark: &str,
    mut value: impl FnMut(&str, bool) -> u64,
) {
    let wide = d == "f64";
    let per = |n: usize| if wide { n / 2 } else { n };
    let mut inputs = Vec::new();
    // A thread's words one after the other, in blocks of four.
    let rows = (per(counts[1]) + per(counts[2]) + per(counts[3])).div_ceil(4);
    for _ in 0..32 * rows {
        inputs.push([0u64; 4]);
    }
    let mut text = String::from("  .reg .b64 %pi, %po, %off;\n  .reg .b32 %t;\n");
    let w = if wide { 64 } else { 32 };
    text.push_str(&format!("  .reg .b{w} %d<8>, %a<8>, %b<8>, %c<8>;\n"));
    text.push_str("  ld.param.u64 %pi, [pin];\n  ld.param.u64 %po, [pout];\n  mov.u32 %t, %tid.x;\n");
    text.push_str(&format!("  mul.wide.u32 %off, %t, {};\n  add.u64 %pi, %pi, %off;\n", rows * 32));
    text.push_str(&format!("  mul.wide.u32 %off, %t, {};\n  add.u64 %po, %po, %off;\n", counts[0] * 4));
    let mut at = 0;
    for (name, n, ty) in [("a", counts[1], a), ("b", counts[2], b), ("c", counts[3], acc)] {
        for k in 0..per(n) {
            text.push_str(&format!("  ld.global.b{w} %{name}{k}, [%pi+{}];\n", at * 8));
            for t in 0..32 {
                inputs[t * rows + at / 4][at % 4] = value(ty, name == "c");
            }
            at += 1;
        }
    }
    let list =
        |name: &str, n: usize| (0..per(n)).map(|k| format!("%{name}{k}")).collect::<Vec<_>>().join(", ");
    let kind = if a == "b1" { ".and.popc" } else { "" };
    let layout = format!("mma.sync.aligned.{shape}.row.col.{d}.{a}.{b}.{acc}{kind}");
    text.push_str(&format!(
        "  {layout} {{{}}}, {{{}}}, {{{}}}, {{{}}};\n",
        list("d", counts[0]),
        list("a", counts[1]),
        list("b", counts[2]),
        list("c", counts[3])
    ));
    for k in 0..per(counts[0]) {
        text.push_str(&format!("  st.global.b{w} [%po+{}], %d{k};\n", k * w / 8));
    }
    text.push_str("  ret;\n");
    // Threads read `rows` inputs each; the first 32 threads run.
    c.cases.push(Case {
        name: format!("{layout}{remark}"),
        ty: "b32",
        out_bytes: counts[0] * 4,
        check: Check::Exact,
        body: text,
        inputs,
        head: String::new(),
        grid: [1; 3],
    });
}

fn half(n: i32) -> u16 {
    const SMALL: [u16; 5] = [0, 0x3c00, 0x4000, 0x4200, 0x4400];
    SMALL[n.unsigned_abs() as usize & 7] | if n < 0 { 0x8000 } else { 0 }
}
