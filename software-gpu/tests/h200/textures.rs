//! The corpus of textures and surfaces: resources with texels, samplers, and kernels that read them.
//!
//! `examples/h200_corpus.rs` writes it for `textures.cu`, which records a real GPU's results;
//! `tests/h200_textures.rs` runs the same kernels on the software GPU and compares.

use super::Random;

/// The kind of resource that contains the texels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Array,
    Levels,
    Linear,
    Rows,
}

/// The format of a channel, as in `cudaChannelFormatKind`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Format {
    /// 0: unsigned, 1: signed, 2: float.
    pub kind: u32,
    pub bits: u32,
    pub channels: u32,
}

/// How close a result must be to the GPU's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Near {
    /// Bit-identical.
    Exact,
    /// At most this far off in each channel.
    Within(f32),
}

/// `cudaTextureAddressMode`.
pub const WRAP: u32 = 0;
pub const CLAMP: u32 = 1;
pub const MIRROR: u32 = 2;
pub const BORDER: u32 = 3;

/// A resource and a kernel that reads it.
#[derive(Debug, Clone)]
pub struct Case {
    pub name: String,
    pub near: Near,
    /// The instruction without its operands.
    pub instruction: String,
    pub kind: Kind,
    /// Number of texels in each dimension; 1 for a dimension that does not exist.
    pub size: [u32; 3],
    pub layers: u32,
    pub levels: u32,
    pub format: Format,
    pub address: [u32; 3],
    pub linear: bool,
    pub normalized: bool,
    pub normalized_read: bool,
    pub srgb: bool,
    pub mip_linear: bool,
    pub seamless: bool,
    pub border: [f32; 4],
    pub bias: f32,
    pub range: [f32; 2],
    pub texels: Vec<u8>,
    /// Each thread's words.
    pub inputs: Vec<Vec<u32>>,
}

impl Case {
    fn geometry(&self) -> &str {
        let known = ["1d", "2d", "3d", "a1d", "a2d", "cube", "acube"];
        self.instruction.split('.').find(|part| known.contains(part)).unwrap_or("2d")
    }

    fn is(&self, name: &str) -> bool {
        self.instruction.starts_with(name)
    }

    pub fn stores(&self) -> bool {
        self.is("sust")
    }

    pub fn surface(&self) -> bool {
        self.is("sust") || self.is("suld")
    }

    /// Words per thread's result, including one channel that does not exist.
    pub fn results(&self) -> usize {
        if self.is("tld4") || self.surface() { 4 } else { (self.format.channels + 1).min(4) as usize }
    }

    /// The kernel's text after its name.
    pub fn body(&self) -> String {
        let words = self.inputs.first().map_or(0, Vec::len);
        let geometry = self.geometry();
        let layered = geometry.starts_with('a');
        let directions = match geometry.trim_start_matches('a') {
            "1d" => 1,
            "2d" => 2,
            _ => 3,
        };
        let count = directions + usize::from(layered);
        let list = |from: usize, n: usize| {
            let mut names: Vec<String> = (from..from + n).map(|n| format!("%c{n}")).collect();
            if n == 3 {
                names.push(names[2].clone());
            }
            format!("{{{}}}", names.join(", "))
        };
        let at = format!("[%x, {}]", list(0, count));
        let code = &self.instruction;
        let work = if self.surface() {
            let bits = code.split('.').find_map(|p| p.strip_prefix('b')?.parse().ok()).unwrap_or(32u32);
            let n: usize = if code.contains(".v4") {
                4
            } else if code.contains(".v2") {
                2
            } else {
                1
            };
            let register = if bits == 64 {
                "y"
            } else if bits == 32 {
                "r"
            } else {
                "h"
            };
            let values = (0..n).map(|k| format!("%{register}{k}")).collect::<Vec<_>>().join(", ");
            let mut text = String::new();
            for k in 0..n {
                text.push_str(&match bits {
                    64 if self.stores() => format!(" mov.b64 %y{k}, {{%c{}, %c{}}};\n", count, count + 1),
                    64 => format!(" mov.b64 %y{k}, 0;\n"),
                    32 if self.stores() => format!(" add.u32 %r{k}, %c{count}, {k};\n"),
                    32 => String::new(),
                    _ if self.stores() => {
                        format!(" cvt.u16.u32 %h{k}, %c{count};\n add.u16 %h{k}, %h{k}, {k};\n")
                    }
                    _ => String::new(),
                });
            }
            if self.stores() {
                text.push_str(&format!(" {code} {at}, {{{values}}};\n"));
            } else {
                text.push_str(&format!(" {code} {{{values}}}, {at};\n"));
                for k in 0..n {
                    text.push_str(&match bits {
                        64 if k < 2 => format!(" mov.b64 {{%r{}, %r{}}}, %y{k};\n", 2 * k, 2 * k + 1),
                        64 | 32 => String::new(),
                        _ => format!(" cvt.u32.u16 %r{k}, %h{k};\n"),
                    });
                }
            }
            text
        } else {
            let more = if code.contains(".level") {
                format!(", %c{count}")
            } else if code.contains(".grad") {
                format!(", {}, {}", list(count, directions), list(count + directions, directions))
            } else {
                String::new()
            };
            format!(" {code} {{%r0, %r1, %r2, %r3}}, {at}{more};\n")
        };
        let results = self.results();
        let mut text = String::from(
            "(.param .u64 pin, .param .u64 pout, .param .u64 px, .param .u32 pn)\n{\n .reg .b32 %c<16>, %r<4>, %t, %n, %b;\n \
             .reg .b64 %i, %o, %x, %w, %y<4>;\n .reg .b16 %h<4>;\n .reg .pred %p;\n mov.u32 %t, %tid.x;\n mov.u32 %b, %ctaid.x;\n \
             mad.lo.u32 %t, %b, 128, %t;\n ld.param.u32 %n, [pn];\n setp.ge.u32 %p, %t, %n;\n @%p ret;\n ld.param.u64 %i, [pin];\n \
             ld.param.u64 %o, [pout];\n ld.param.u64 %x, [px];\n",
        );
        text.push_str(&format!(" mul.wide.u32 %w, %t, {};\n add.u64 %i, %i, %w;\n", words * 4));
        text.push_str(&format!(" mul.wide.u32 %w, %t, {};\n add.u64 %o, %o, %w;\n", results * 4));
        for n in 0..words {
            text.push_str(&format!(" ld.global.b32 %c{n}, [%i+{}];\n", n * 4));
        }
        for n in 0..4 {
            text.push_str(&format!(" mov.b32 %r{n}, 0;\n mov.b16 %h{n}, 0;\n"));
        }
        text.push_str(&work);
        for n in 0..results {
            text.push_str(&format!(" st.global.b32 [%o+{}], %r{n};\n", n * 4));
        }
        text + " ret;\n}\n"
    }

    /// The encoding that `textures.cu` reads, with the number of its kernel.
    pub fn bytes(&self, kernel: u32) -> Vec<u8> {
        let geometry = self.geometry();
        let flags = u32::from(geometry.starts_with('a'))
            | u32::from(geometry.contains("cube")) << 1
            | u32::from(self.surface()) << 2
            | u32::from(self.stores()) << 3
            | u32::from(self.is("tld4")) << 4;
        let kind = [Kind::Array, Kind::Levels, Kind::Linear, Kind::Rows].iter().position(|k| *k == self.kind);
        let mut words = vec![kernel, kind.unwrap_or(0) as u32, flags];
        words.extend(self.size);
        words.extend([self.layers, self.levels, self.format.kind, self.format.bits, self.format.channels]);
        words.extend(self.address);
        let switches =
            [self.linear, self.normalized_read, self.normalized, self.srgb, self.mip_linear, self.seamless];
        words.extend(switches.map(u32::from));
        words.extend(self.border.map(f32::to_bits));
        words.extend([self.bias, self.range[0], self.range[1]].map(f32::to_bits));
        let mut out: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        out.extend((self.texels.len() as u32).to_le_bytes());
        out.extend(&self.texels);
        for n in [self.inputs.first().map_or(0, Vec::len), self.inputs.len(), self.results()] {
            out.extend((n as u32).to_le_bytes());
        }
        out.extend(self.input_bytes());
        out
    }

    pub fn input_bytes(&self) -> Vec<u8> {
        self.inputs.iter().flatten().flat_map(|w| w.to_le_bytes()).collect()
    }

    /// A hash of everything in the case.
    pub fn hash(&self) -> u64 {
        let mut h = 0xcbf2_9ce4_8422_2325u64;
        let mut eat = |b: &[u8]| b.iter().for_each(|b| h = (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3));
        eat(self.body().as_bytes());
        eat(&self.bytes(0));
        h
    }
}

/// The distinct kernels of the cases.
pub fn kernels(cases: &[Case]) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    for case in cases {
        let body = case.body();
        if !all.contains(&body) {
            all.push(body);
        }
    }
    all
}

/// The module with all of them; kernel `k0` is the first.
pub fn ptx(kernels: &[String]) -> String {
    let mut text = String::from(".version 8.6\n.target sm_90\n.address_size 64\n");
    for (n, body) in kernels.iter().enumerate() {
        text.push_str(&format!(".visible .entry k{n}{body}"));
    }
    text
}

/// A case with random texels; coordinates are added later, and the caller adjusts the rest. Its random
/// numbers derive from its name, so changing it leaves other cases as they are.
fn case(r: &mut Random, name: &str, instruction: &str, size: [u32; 3], format: Format) -> Case {
    let seed = name
        .bytes()
        .fold(88_172_645_463_325_252, |h: u64, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    *r = Random(seed | 1);
    let mut case = Case {
        name: name.into(),
        near: Near::Exact,
        instruction: instruction.into(),
        kind: Kind::Array,
        size,
        layers: 1,
        levels: 1,
        format,
        address: [CLAMP; 3],
        linear: false,
        normalized: false,
        normalized_read: false,
        srgb: false,
        mip_linear: false,
        seamless: false,
        border: [0.0; 4],
        bias: 0.0,
        range: [0.0, 100.0],
        texels: Vec::new(),
        inputs: Vec::new(),
    };
    case.layers = match case.geometry() {
        "a1d" | "a2d" => 3,
        "cube" => 6,
        "acube" => 12,
        _ => 1,
    };
    fill(r, &mut case);
    case
}

/// Random texels for all levels; floats are between -1 and 1.
fn fill(r: &mut Random, case: &mut Case) {
    case.texels.clear();
    for level in 0..case.levels {
        let count: u32 = case.size.iter().map(|s| (s >> level).max(1)).product::<u32>() * case.layers;
        for _ in 0..count * case.format.channels {
            let word = r.next();
            let unit = (word >> 40) as f32 / (1 << 23) as f32 - 1.0;
            match (case.format.kind, case.format.bits) {
                (2, 32) => case.texels.extend(unit.to_le_bytes()),
                (2, _) => {
                    // An f16 of either sign with an exponent from -14 to 0.
                    let half = (word >> 20) as u16 & 0x83ff | (1 + (word >> 45) as u16 % 15) << 10;
                    case.texels.extend(half.to_le_bytes());
                }
                (_, bits) => case.texels.extend(&word.to_le_bytes()[..bits as usize / 8]),
            }
        }
    }
}

const F32X1: Format = Format { kind: 2, bits: 32, channels: 1 };
const THREADS: usize = 192;

/// Interesting coordinates in texels: edges, centers, ties of weights, far outside, not a number.
const EDGES: [f32; 30] = [
    0.0,
    -0.0,
    1e-40,
    -1e-40,
    -1e-20,
    0.5,
    -0.5,
    0.501_953_1,
    0.498_046_88,
    1.0,
    7.5,
    8.0,
    10.5,
    11.0,
    15.5,
    16.0,
    16.5,
    -16.0,
    0.999_999_94,
    31.9,
    100.25,
    -1000.7,
    65536.7,
    8_388_607.5,
    1e10,
    -1e15,
    f32::MAX,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
];

fn coordinate(r: &mut Random, size: u32, normalized: bool) -> u32 {
    let edge = EDGES[r.below(EDGES.len())];
    let random = (r.next() >> 40) as f32 / (1 << 24) as f32;
    let v = match r.below(6) {
        0 => edge,
        1 | 2 => (random * (size * 256) as f32).floor() / 256.0,
        3 => (random * (size * 512) as f32).floor() / 512.0,
        4 => random * size as f32,
        _ => (random * 5.0 - 2.0) * size as f32,
    };
    (if normalized { v / size as f32 } else { v }).to_bits()
}

/// Coordinates for each dimension of the case, after a layer if it has them.
fn look(r: &mut Random, case: &mut Case, threads: usize) {
    let geometry = case.geometry().to_string();
    let layers = if geometry == "acube" { case.layers / 6 } else { case.layers };
    case.inputs = (0..threads)
        .map(|_| {
            let mut words = Vec::new();
            if geometry.starts_with('a') {
                words.push((r.below(layers as usize + 3) as u32).wrapping_sub(1));
            }
            if geometry.contains("cube") {
                words.extend((0..3).map(|_| ((r.next() >> 40) as f32 / (1 << 23) as f32 - 1.0).to_bits()));
            } else {
                let directions = match geometry.trim_start_matches('a') {
                    "1d" => 1,
                    "2d" => 2,
                    _ => 3,
                };
                words.extend((0..directions).map(|d| coordinate(r, case.size[d], case.normalized)));
            }
            words
        })
        .collect();
}

fn result_type(format: Format, normalized_read: bool) -> &'static str {
    match format.kind {
        _ if normalized_read => "f32",
        0 => "u32",
        1 => "s32",
        _ => "f32",
    }
}

/// The whole corpus.
pub fn cases() -> Vec<Case> {
    let mut r = Random(1);
    let mut all = Vec::new();
    filters(&mut r, &mut all);
    formats(&mut r, &mut all);
    fetches_and_gathers(&mut r, &mut all);
    levels(&mut r, &mut all);
    cubes(&mut r, &mut all);
    surfaces(&mut r, &mut all);
    all
}

/// Geometry, filter, address mode and kind of coordinates.
fn filters(r: &mut Random, all: &mut Vec<Case>) {
    for (geometry, size) in
        [("1d", [16, 1, 1]), ("2d", [16, 11, 1]), ("3d", [8, 5, 7]), ("a1d", [11, 1, 1]), ("a2d", [8, 9, 1])]
    {
        for linear in [false, true] {
            for normalized in [false, true] {
                for (mode, name) in [(WRAP, "wrap"), (CLAMP, "clamp"), (MIRROR, "mirror"), (BORDER, "border")]
                {
                    let title = format!("{geometry} {name} linear {linear} normalized {normalized}");
                    let mut c = case(r, &title, &format!("tex.{geometry}.v4.f32.f32"), size, F32X1);
                    (c.linear, c.normalized, c.address) = (linear, normalized, [mode; 3]);
                    c.border = [0.75, 0.5, 0.25, -1.0];
                    look(r, &mut c, THREADS);
                    all.push(c);
                }
            }
        }
    }
    for size in [1000, 4093, 8192, 8193, 12_000, 16_384, 16_385, 32_768, 65_536, 100_000, 131_072] {
        for linear in [false, true] {
            let title = format!("1d of {size}, linear {linear}");
            let mut c = case(r, &title, "tex.1d.v4.f32.f32", [size, 1, 1], Format { bits: 16, ..F32X1 });
            // Steps of 1/2048 reveal texels and weights; the sum has few digits.
            c.texels = (0..size).flat_map(|n| [(n % 7) as u8 * 16, 0x3c]).collect();
            (c.linear, c.normalized) = (linear, true);
            look(r, &mut c, THREADS);
            all.push(c);
        }
    }
    let mut c = case(r, "rows of memory", "tex.2d.v4.f32.f32", [16, 11, 1], F32X1);
    (c.kind, c.linear, c.normalized, c.address) = (Kind::Rows, true, true, [WRAP; 3]);
    look(r, &mut c, THREADS);
    all.push(c);
    for (channels, name) in [(1, "one channel"), (4, "four channels")] {
        let mut c = case(
            r,
            &format!("sRGB, {name}"),
            "tex.1d.v4.f32.f32",
            [256, 1, 1],
            Format { kind: 0, bits: 8, channels },
        );
        (c.normalized_read, c.srgb) = (true, true);
        look(r, &mut c, THREADS);
        all.push(c.clone());
        (c.linear, c.near) = (true, Near::Within(0.008));
        all.push(c);
    }
    for (special, bits) in [
        (
            &[
                0u32,
                0x8000_0000,
                0x3f80_0000,
                0xbf80_0000,
                0x7f80_0000,
                0xff80_0000,
                0x7fc0_0000,
                1,
                0x8000_0003,
            ][..],
            32,
        ),
        (&[0, 0x8000, 0x3c00, 0xbc00, 0x7c00, 0xfc00, 0x7e00, 1, 0x8003, 0x7c01][..], 16),
    ] {
        let mut c = case(
            r,
            &format!("special floats of {bits} bits"),
            "tex.2d.v4.f32.f32",
            [16, 16, 1],
            Format { bits, ..F32X1 },
        );
        c.texels = (0..256)
            .flat_map(|_| special[r.below(special.len())].to_le_bytes()[..bits as usize / 8].to_vec())
            .collect();
        look(r, &mut c, THREADS);
        all.push(c.clone());
        c.linear = true;
        all.push(c);
    }
}

/// Every format, read unchanged and as a fraction, with its border and missing channels.
fn formats(r: &mut Random, all: &mut Vec<Case>) {
    for kind in 0..3 {
        for bits in [8, 16, 32].into_iter().filter(|bits| kind < 2 || *bits > 8) {
            for channels in [1, 2, 4] {
                let format = Format { kind, bits, channels };
                for normalized_read in [false, true].into_iter().filter(|n| !n || (kind < 2 && bits < 32)) {
                    let ty = result_type(format, normalized_read);
                    let title = format!("{ty} of kind {kind}, {bits} bits, {channels} channels");
                    let mut c = case(r, &title, &format!("tex.2d.v4.{ty}.f32"), [16, 8, 1], format);
                    (c.normalized_read, c.address) = (normalized_read, [BORDER; 3]);
                    c.border = [1.5, -0.3, 0.25, -70_000.0];
                    look(r, &mut c, 64);
                    all.push(c.clone());
                    if normalized_read || kind == 2 {
                        c.linear = true;
                        if (kind, bits) == (1, 8) {
                            c.near = Near::Within(1.01 / 32767.0);
                        }
                        all.push(c);
                    }
                }
            }
        }
    }
}

fn fetches_and_gathers(r: &mut Random, all: &mut Vec<Case>) {
    for (kind, geometry, size) in [
        (Kind::Linear, "1d", [64, 1, 1]),
        (Kind::Array, "2d", [16, 8, 1]),
        (Kind::Rows, "2d", [16, 8, 1]),
        (Kind::Array, "3d", [8, 4, 4]),
        (Kind::Array, "a2d", [8, 8, 1]),
    ] {
        for format in
            [F32X1, Format { kind: 0, bits: 8, channels: 4 }, Format { kind: 1, bits: 16, channels: 2 }]
        {
            let ty = result_type(format, false);
            let title = format!("fetch {geometry} from {kind:?} {ty}");
            let mut c = case(r, &title, &format!("tex.{geometry}.v4.{ty}.s32"), size, format);
            c.kind = kind;
            let layered = usize::from(geometry.starts_with('a'));
            let count = layered
                + if geometry.ends_with("1d") {
                    1
                } else if geometry == "3d" {
                    3
                } else {
                    2
                };
            c.inputs = (0..96)
                .map(|_| {
                    (0..count)
                        .map(|n| {
                            let limit = if n < layered { 3 } else { c.size[n - layered] };
                            (r.below(limit as usize + 4) as u32).wrapping_sub(2)
                        })
                        .collect()
                })
                .collect();
            all.push(c);
        }
    }
    for (n, channel) in ["r", "g", "b", "a"].into_iter().enumerate() {
        for format in [Format { channels: 4, ..F32X1 }, Format { kind: 0, bits: 8, channels: 2 }] {
            let ty = result_type(format, false);
            let mode = [WRAP, CLAMP, MIRROR, BORDER][n];
            let mut c = case(
                r,
                &format!("gather {channel} {ty}"),
                &format!("tld4.{channel}.2d.v4.{ty}.f32"),
                [16, 11, 1],
                format,
            );
            (c.normalized, c.address) = (n % 2 == 0, [mode; 3]);
            look(r, &mut c, THREADS);
            all.push(c);
        }
    }
}

fn levels(r: &mut Random, all: &mut Vec<Case>) {
    for (geometry, size, levels) in
        [("1d", [64, 1, 1], 7), ("2d", [32, 24, 1], 6), ("3d", [16, 8, 12], 4), ("a2d", [16, 16, 1], 5)]
    {
        for (mip_linear, linear) in [(false, false), (true, false), (false, true), (true, true)] {
            for (bias, range) in [(0.0, [0.0, 100.0]), (0.7, [0.25, 2.6]), (-1.3, [1.0, 0.5])] {
                let title = format!("levels of {geometry}, {mip_linear} {linear} bias {bias} {range:?}");
                let mut c = case(r, &title, &format!("tex.level.{geometry}.v4.f32.f32"), size, F32X1);
                (c.kind, c.levels, c.normalized, c.address) = (Kind::Levels, levels, true, [MIRROR; 3]);
                (c.mip_linear, c.linear, c.bias, c.range) = (mip_linear, linear, bias, range);
                fill(r, &mut c);
                look(r, &mut c, THREADS);
                let specials = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.7, 1e10];
                for words in &mut c.inputs {
                    let v = (r.next() >> 40) as f32 / (1 << 24) as f32 * 9.0 - 1.5;
                    words.push((if r.below(12) == 0 { specials[r.below(5)] } else { v }).to_bits());
                }
                all.push(c);
            }
        }
        let mut c =
            case(r, &format!("no level, {geometry}"), &format!("tex.{geometry}.v4.f32.f32"), size, F32X1);
        (c.kind, c.levels, c.normalized, c.range) = (Kind::Levels, levels, true, [1.25, 9.0]);
        (c.mip_linear, c.linear, c.bias) = (true, true, 1.0);
        fill(r, &mut c);
        look(r, &mut c, THREADS);
        all.push(c);
    }
    // Each texel contains the number of its level, so a result shows which level the gradients select.
    for (geometry, size, levels, directions) in [("1d", 256, 9, 1), ("2d", 64, 7, 2), ("3d", 32, 6, 3)] {
        let mut c = case(
            r,
            &format!("gradients of {geometry}"),
            &format!("tex.grad.{geometry}.v4.f32.f32"),
            [size, if directions > 1 { size } else { 1 }, if directions > 2 { size } else { 1 }],
            F32X1,
        );
        (c.kind, c.levels, c.normalized, c.mip_linear) = (Kind::Levels, levels, true, true);
        c.near = Near::Within(0.2);
        c.texels = (0..levels)
            .flat_map(|level| {
                let count = (size >> level).max(1).pow(directions as u32) as usize;
                (level as f32).to_le_bytes().repeat(count)
            })
            .collect();
        c.inputs = (0..THREADS)
            .map(|_| {
                let mut words = vec![0.37f32.to_bits(); directions];
                words.extend((0..2 * directions).map(|_| {
                    let magnitude = ((r.next() >> 40) as f32 / (1 << 24) as f32 * -8.0).exp2();
                    (if r.below(2) == 0 { magnitude } else { -magnitude }).to_bits()
                }));
                words
            })
            .collect();
        all.push(c);
    }
}

fn cubes(r: &mut Random, all: &mut Vec<Case>) {
    for (geometry, size) in [("cube", 8), ("cube", 1), ("acube", 4)] {
        for linear in [false, true] {
            for (seamless, mode) in [(false, CLAMP), (false, WRAP), (true, WRAP)] {
                let title =
                    format!("{geometry} of {size}, linear {linear}, seamless {seamless}, mode {mode}");
                let mut c = case(r, &title, &format!("tex.{geometry}.v4.f32.f32"), [size, size, 1], F32X1);
                (c.linear, c.seamless, c.address, c.normalized) = (linear, seamless, [mode; 3], true);
                look(r, &mut c, THREADS);
                all.push(c);
            }
        }
    }
    let mut c = case(r, "cube, equal components", "tex.cube.v4.f32.f32", [8, 8, 1], F32X1);
    c.normalized = true;
    let parts = [-1.0f32, 1.0, 0.0, -0.0, 0.5, -0.5];
    c.inputs = (0..216).map(|n| [n % 6, n / 6 % 6, n / 36].map(|k| parts[k].to_bits()).to_vec()).collect();
    all.push(c);
    let mut c = case(r, "levels of a cube", "tex.level.cube.v4.f32.f32", [16, 16, 1], F32X1);
    (c.kind, c.levels, c.normalized, c.mip_linear, c.linear, c.seamless) =
        (Kind::Levels, 5, true, true, true, true);
    fill(r, &mut c);
    look(r, &mut c, THREADS);
    for words in &mut c.inputs {
        words.push(((r.next() >> 40) as f32 / (1 << 24) as f32 * 6.0 - 1.0).to_bits());
    }
    all.push(c);
}

fn surfaces(r: &mut Random, all: &mut Vec<Case>) {
    let elements = [
        ("b8", Format { kind: 0, bits: 8, channels: 1 }),
        ("b16", Format { kind: 0, bits: 16, channels: 1 }),
        ("b32", Format { kind: 0, bits: 32, channels: 1 }),
        ("v2.b16", Format { kind: 0, bits: 16, channels: 2 }),
        ("v4.b8", Format { kind: 0, bits: 8, channels: 4 }),
        ("b64", Format { kind: 0, bits: 32, channels: 2 }),
        ("v2.b32", Format { kind: 0, bits: 32, channels: 2 }),
        ("v4.b32", Format { kind: 0, bits: 32, channels: 4 }),
        ("v2.b64", Format { kind: 0, bits: 32, channels: 4 }),
    ];
    for (geometry, size) in
        [("1d", [32, 1, 1]), ("2d", [16, 9, 1]), ("3d", [8, 5, 4]), ("a1d", [16, 1, 1]), ("a2d", [8, 6, 1])]
    {
        for (n, (element, format)) in elements.into_iter().enumerate() {
            for outside in ["clamp", "zero"] {
                // All elements in 2D, some in other geometries.
                if geometry != "2d" && n % 4 != 0 {
                    continue;
                }
                for store in [false, true] {
                    let name = if store { "sust" } else { "suld" };
                    let code = format!("{name}.b.{geometry}.{element}.{outside}");
                    let mut c = case(r, &code, &code, size, format);
                    let bytes = format.bits / 8 * format.channels;
                    let layered = usize::from(geometry.starts_with('a'));
                    let directions = if geometry.ends_with("1d") {
                        1
                    } else if geometry == "3d" {
                        3
                    } else {
                        2
                    };
                    // Two threads that store to the same texel would race, so only one thread stores outside.
                    let places: Vec<u32> = (0..size.iter().product::<u32>() * c.layers).collect();
                    c.inputs = (0..if store { places.len() / 2 } else { 96 })
                        .map(|t| {
                            let mut words = Vec::new();
                            let outside = if store { t == 0 } else { r.below(4) == 0 };
                            let place = places[if store { 2 * t } else { r.below(places.len()) }];
                            let (x, y) = (place % size[0], place / size[0] % size[1]);
                            let z = place / size[0] / size[1];
                            let parts = [x, y, z];
                            if layered != 0 {
                                words.push(z);
                            }
                            for (d, part) in parts.into_iter().enumerate().take(directions) {
                                let part = if outside && d == 0 { size[0] + 3 } else { part };
                                words.push(if d == 0 { part * bytes } else { part });
                            }
                            if outside && !store && layered == 0 {
                                words[0] = words[0].wrapping_neg();
                            }
                            if store {
                                words.extend([r.next() as u32, r.next() as u32]);
                            }
                            words
                        })
                        .collect();
                    all.push(c);
                }
            }
        }
    }
}
