//! Matrix products with inexact sums, which show the order and rounding of additions.

use super::together::product;
use super::{Case, Check, Corpus, Random};

/// The distribution of a case's inputs.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// Similar magnitudes.
    Even,
    /// Very different magnitudes.
    Wide,
    /// An addend much larger than the products.
    Base,
    /// Mostly zeros, so that few products are added.
    Few,
    /// Includes zeros, infinities, NaNs, subnormals and the largest numbers.
    Edges,
}

const KINDS: [(Kind, &str); 5] = [
    (Kind::Even, "even"),
    (Kind::Wide, "wide"),
    (Kind::Base, "base"),
    (Kind::Few, "few"),
    (Kind::Edges, "edges"),
];

/// Exponent bits and fraction bits of a format.
fn format(ty: &str) -> (u32, u32) {
    match ty {
        "f16" => (5, 10),
        "bf16" => (8, 7),
        "e4m3" => (4, 3),
        "e5m2" => (5, 2),
        "f64" => (11, 52),
        _ => (8, 23),
    }
}

fn number(ty: &str, kind: Kind, sum: bool, r: &mut Random) -> u64 {
    let (exponent, digits) = format(ty);
    let width = exponent + digits + 1;
    let random = r.next();
    let bias = (1i64 << (exponent - 1)) - 1;
    let most = (bias - 1).min(if ty == "f64" { 40 } else { 15 });
    let power = match kind {
        Kind::Even | Kind::Edges => r.below(4) as i64 - 2,
        Kind::Wide if sum => r.below(2 * most as usize) as i64 - most,
        Kind::Wide => r.below(most as usize) as i64 - most / 2,
        Kind::Base if sum => r.below(most as usize) as i64,
        Kind::Base => r.below(3) as i64 - 2,
        Kind::Few if !sum && r.below(4) != 0 => return 0,
        Kind::Few => r.below(most as usize) as i64 - most / 2,
    };
    if kind == Kind::Edges && r.below(6) == 0 {
        let top = ((1u64 << exponent) - 1) << digits;
        let sign = (random & 1) << (width - 1);
        return sign
            | match r.below(9) {
                0 => 0,
                1 => 1,
                2 => (1 << digits) - 1,
                3 => 1 << digits,
                4 | 5 => top - 1,
                6 if r.below(3) == 0 => top,
                7 if r.below(3) == 0 => top | 1 << (digits - 1),
                _ => (random >> 8) & ((1 << digits) - 1),
            };
    }
    let biased = (bias + power).clamp(1, 2 * bias) as u64;
    (random & ((1 << digits) - 1)) | biased << digits | (random >> 63) << (width - 1)
}

/// A random register of an operand, with as many numbers as it holds.
fn word(ty: &str, kind: Kind, sum: bool, r: &mut Random) -> u64 {
    let (exponent, digits) = format(ty);
    let width = exponent + digits + 1;
    (0..(32 / width).max(1)).fold(0, |v, n| v | number(ty, kind, sum, r) << (n * width))
}

/// `wmma` with all operands loaded from and stored to memory, because the fragment layout is unspecified.
fn fragments(
    c: &mut Corpus,
    shape: [usize; 3],
    types: [&str; 4],
    rounding: &str,
    kind: (Kind, &str),
    turn: u64,
) {
    let [m, n, k] = shape;
    let [d, a, b, acc] = types;
    let width = |ty: &str| {
        let (e, f) = format(ty);
        ((e + f + 1) / 8) as usize
    };
    let mut r = Random(
        0x1234_5678_9abc_def1
            ^ (turn << 40)
            ^ (m * 64 + k) as u64
            ^ (kind.1.len() as u64) << 20
            ^ (a.len() as u64) << 50,
    );
    let mut bytes = Vec::new();
    for (count, ty, sum) in [(m * k, a, false), (k * n, b, false), (m * n, acc, true)] {
        for _ in 0..count {
            bytes.extend(&number(ty, kind.0, sum, &mut r).to_le_bytes()[..width(ty)]);
        }
    }
    bytes.resize(bytes.len().next_multiple_of(32 * 32), 0);
    let words: Vec<u64> =
        bytes.chunks(8).map(|b| b.iter().rev().fold(0, |v, b| v << 8 | u64::from(*b))).collect();
    let registers = |ty: &str, count: usize, part: u8| match (ty, part) {
        ("f64", b'c') => 2,
        ("f64", _) => 1,
        ("f16", b'c') => 4,
        ("f16", _) => 8,
        _ => (count * width(ty) / 32 / 4).max(1),
    };
    let w = if d == "f64" { 64 } else { 32 };
    let list = |name: u8, count: usize| {
        (0..count).map(|n| format!("%{}{n}", name as char)).collect::<Vec<_>>().join(", ")
    };
    let dims = format!("m{m}n{n}k{k}");
    let mut text = format!("  .reg .b64 %pi, %po, %y0, %y1;\n  .reg .b{w} %d<8>, %a<8>, %b<8>, %c<8>;\n");
    text.push_str("  ld.param.u64 %pi, [pin];\n  ld.param.u64 %po, [pout];\n");
    text.push_str(&format!(
        "  add.u64 %y0, %pi, {};\n  add.u64 %y1, %pi, {};\n",
        m * k * width(a),
        m * k * width(a) + k * n * width(b)
    ));
    let (na, nb, nc, nd) = (
        registers(a, m * k, b'a'),
        registers(b, k * n, b'b'),
        registers(acc, m * n, b'c'),
        registers(d, m * n, b'c'),
    );
    text.push_str(&format!(
        "  wmma.load.a.sync.aligned.row.{dims}.global.{a} {{{}}}, [%pi], {k};\n",
        list(b'a', na)
    ));
    text.push_str(&format!(
        "  wmma.load.b.sync.aligned.col.{dims}.global.{b} {{{}}}, [%y0], {k};\n",
        list(b'b', nb)
    ));
    text.push_str(&format!(
        "  wmma.load.c.sync.aligned.row.{dims}.global.{acc} {{{}}}, [%y1], {n};\n",
        list(b'c', nc)
    ));
    let spelled = match a {
        "f16" => format!("{d}.{acc}"),
        _ => format!("{d}.{a}.{b}.{acc}"),
    };
    let name = format!("wmma.mma.sync.aligned.row.col.{dims}{rounding}.{spelled}");
    text.push_str(&format!(
        "  {name} {{{}}}, {{{}}}, {{{}}}, {{{}}};\n",
        list(b'd', nd),
        list(b'a', na),
        list(b'b', nb),
        list(b'c', nc)
    ));
    text.push_str(&format!(
        "  wmma.store.d.sync.aligned.row.{dims}.global.{d} [%po], {{{}}}, {n};\n  ret;\n",
        list(b'd', nd)
    ));
    c.cases.push(Case {
        name: format!("{name}, {} {turn}", kind.1),
        ty: "b32",
        out_bytes: m * n * width(d) / 32,
        check: Check::Exact,
        body: text,
        inputs: words.chunks(4).map(|w| [w[0], w[1], w[2], w[3]]).collect(),
        head: String::new(),
        grid: [1; 3],
    });
}

/// Every shape with every distribution.
pub fn sums(c: &mut Corpus) {
    let shapes: [(&str, [&str; 4], [usize; 4]); 19] = [
        ("m16n8k16", ["f32", "f16", "f16", "f32"], [4, 4, 2, 4]),
        ("m16n8k16", ["f16", "f16", "f16", "f16"], [2, 4, 2, 2]),
        ("m16n8k8", ["f32", "f16", "f16", "f32"], [4, 2, 1, 4]),
        ("m16n8k8", ["f16", "f16", "f16", "f16"], [2, 2, 1, 2]),
        ("m16n8k16", ["f32", "bf16", "bf16", "f32"], [4, 4, 2, 4]),
        ("m16n8k8", ["f32", "bf16", "bf16", "f32"], [4, 2, 1, 4]),
        ("m16n8k4", ["f32", "tf32", "tf32", "f32"], [4, 2, 1, 4]),
        ("m16n8k8", ["f32", "tf32", "tf32", "f32"], [4, 4, 2, 4]),
        ("m16n8k32", ["f32", "e4m3", "e4m3", "f32"], [4, 4, 2, 4]),
        ("m16n8k32", ["f32", "e5m2", "e5m2", "f32"], [4, 4, 2, 4]),
        ("m16n8k32", ["f32", "e4m3", "e5m2", "f32"], [4, 4, 2, 4]),
        ("m8n8k4", ["f64", "f64", "f64", "f64"], [4, 2, 2, 4]),
        ("m16n8k4", ["f64", "f64", "f64", "f64"], [8, 4, 2, 8]),
        ("m16n8k8", ["f64", "f64", "f64", "f64"], [8, 8, 4, 8]),
        ("m16n8k16", ["f64", "f64", "f64", "f64"], [8, 16, 8, 8]),
        ("m16n8k16", ["f32", "e4m3", "e4m3", "f32"], [4, 2, 1, 4]),
        ("m16n8k16", ["f16", "e4m3", "e5m2", "f16"], [2, 2, 1, 2]),
        ("m16n8k32", ["f16", "e4m3", "e4m3", "f16"], [2, 4, 2, 2]),
        ("m16n8k32", ["f16", "e5m2", "e5m2", "f16"], [2, 4, 2, 2]),
    ];
    for (shape, types, counts) in shapes {
        for (at, kind) in KINDS.iter().enumerate() {
            for turn in 0..3u64 {
                let seed =
                    (shape.len() as u64 + 31 * at as u64 + 1009 * turn).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                let mut r = Random(seed ^ u64::from(types[1].as_bytes()[types[1].len() - 1]) << 32 | 1);
                product(c, shape, types, counts, &format!(", {} {turn}", kind.1), |ty, sum| {
                    word(ty, kind.0, sum, &mut r)
                });
            }
        }
    }
    for kind in KINDS {
        for turn in 0..2 {
            fragments(c, [16, 16, 16], ["f32", "f16", "f16", "f32"], "", kind, turn);
            fragments(c, [16, 16, 16], ["f16", "f16", "f16", "f16"], "", kind, turn);
            fragments(c, [16, 16, 16], ["f32", "bf16", "bf16", "f32"], "", kind, turn);
            fragments(c, [16, 16, 8], ["f32", "tf32", "tf32", "f32"], "", kind, turn);
            for rounding in ["", ".rz", ".rm", ".rp"] {
                fragments(c, [8, 8, 4], ["f64", "f64", "f64", "f64"], rounding, kind, turn);
            }
        }
    }
}
