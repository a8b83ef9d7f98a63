//! Kernels put together from the words of PTX, loaded and run: whatever is accepted ends, well or in a fault.
//!
//! Words come from what nvcc wrote for the crate's tests. There are no branches, so that each kernel ends.
#![cfg_attr(not(standalone), no_main)]

use std::fmt::Write;
use std::sync::LazyLock;

use software_gpu::{GRANULE, Gpu, GpuConfig, LaunchConfig};

const SOURCES: [&str; 2] = [
    include_str!("../../software-gpu/tests/ptx/features.ptx"),
    include_str!("../../software-gpu/tests/ptx/programs.ptx"),
];

/// What would not end, or only late.
const LEFT_OUT: [&str; 5] = ["bra", "brx", "call", "nanosleep", "mbarrier"];

/// Modifiers that the sources use little or not at all.
const RARE: &[&str] = &[
    "rn", "rz", "rm", "rp", "rna", "rni", "rzi", "rmi", "rpi", "ftz", "sat", "satfinite", "approx", "full", "hi", "lo", "wide",
    "cc", "f16", "f16x2", "bf16", "bf16x2", "tf32", "e4m3x2", "e5m2x2", "b8", "b16", "b32", "b64", "b128", "u8", "s8", "u16",
    "s16", "u32", "s32", "u64", "s64", "f32", "f64", "pred", "v2", "v4", "x2", "x4", "num", "nan", "eq", "neu", "ltu", "and",
    "xor", "popc", "sync", "warp", "up", "down", "bfly", "idx", "any", "all", "uni", "ballot", "clamp", "wrap", "mode", "l",
    "r", "shared", "global", "local", "const", "param", "volatile", "relaxed", "acquire", "release", "gpu", "sys", "cta", "add",
    "min", "max", "inc", "dec", "cas", "exch", "a1d", "2d", "3d", "1d", "trap", "zero", "p", "b", "level", "grad",
];

const OPERANDS: &[&str] = &[
    "%r0", "%r1", "%r2", "%r3", "%rd0", "%rd1", "%rd2", "%f0", "%f1", "%f2", "%d0", "%d1", "%d2", "%h0", "%h1", "%h2", "%p0",
    "%p1", "!%p0", "%q0", "[%rd0]", "[%rd1]", "[%rd0+8]", "[%rd0+-4]", "[%r0]", "[buffer]", "[buffer+16]", "[table]",
    "[argument]", "[stack]", "buffer", "table", "stack", "{%r0, %r1}", "{%r0, %r1, %r2, %r3}", "{%f0, %f1}",
    "{%f0, %f1, %f2, %f0}", "{%h0, %h1}", "{%rd0, %rd1}", "%r0|%p0", "%p0|%p1", "0", "1", "-1", "31", "32", "64", "255",
    "0xffffffff", "-2147483648", "0x7fffffffffffffff", "0f3F800000", "0f7FC00000", "0f7F800000", "0d3FF0000000000000",
    "%tid.x", "%ntid.x", "%laneid", "%lanemask_lt", "%clock64", "%smid", "_", "[picture, {%f0, %f1}]", "[picture, {%r0}]",
];

struct Words {
    opcodes: Vec<&'static str>,
    bases: Vec<&'static str>,
    modifiers: Vec<&'static str>,
}

static WORDS: LazyLock<Words> = LazyLock::new(|| {
    let mut opcodes: Vec<&str> = SOURCES
        .iter()
        .flat_map(|source| source.lines())
        .filter(|line| line.trim_end().ends_with(';'))
        .filter_map(|line| line.split_whitespace().find(|word| !word.starts_with(['@', '.', '{', '}', '%'])))
        .map(|word| word.trim_end_matches(';'))
        .filter(|word| word.starts_with(|c: char| c.is_ascii_lowercase()))
        .filter(|word| !LEFT_OUT.contains(&word.split('.').next().unwrap_or(word)))
        .collect();
    opcodes.sort_unstable();
    opcodes.dedup();
    let mut bases: Vec<&str> = opcodes.iter().filter_map(|word| word.split('.').next()).collect();
    bases.dedup();
    let mut modifiers: Vec<&str> = opcodes.iter().flat_map(|word| word.split('.').skip(1)).chain(RARE.iter().copied()).collect();
    modifiers.sort_unstable();
    modifiers.dedup();
    Words { opcodes, bases, modifiers }
});

const HEAD: &str = "
.version 8.6
.target sm_90
.address_size 64
.global .align 16 .b8 table[64];
.global .texref picture;
.visible .entry kernel(.param .u64 argument)
{
.reg .pred %p<2>; .reg .b16 %h<3>; .reg .b32 %r<4>; .reg .f32 %f<3>; .reg .b64 %rd<3>; .reg .f64 %d<3>; .reg .b128 %q<1>;
.shared .align 16 .b8 buffer[128];
.local .align 16 .b8 stack[32];
ld.param.u64 %rd0, [argument];
mov.u32 %r0, %tid.x;
";

/// The text that bytes stand for.
fn text(bytes: &[u8]) -> String {
    let mut bytes = bytes.iter().map(|byte| usize::from(*byte));
    let mut text = String::from(HEAD);
    let mut line = || {
        let form = bytes.next()?;
        let mut line = String::new();
        if form & 0xc0 == 0xc0 {
            line.push_str("@%p0 ");
        }
        if form & 1 == 0 {
            line.push_str(WORDS.opcodes[(bytes.next()? << 8 | bytes.next()?) % WORDS.opcodes.len()]);
        } else {
            line.push_str(WORDS.bases[bytes.next()? % WORDS.bases.len()]);
            for _ in 0..form >> 1 & 7 {
                write!(line, ".{}", WORDS.modifiers[(bytes.next()? << 8 | bytes.next()?) % WORDS.modifiers.len()]).ok()?;
            }
        }
        for n in 0..(form >> 4 & 3) + 1 {
            line.push_str(if n == 0 { " " } else { ", " });
            line.push_str(OPERANDS[bytes.next()? % OPERANDS.len()]);
        }
        line.push_str(";\n");
        Some(line)
    };
    for _ in 0..16 {
        match line() {
            Some(line) => text.push_str(&line),
            None => break,
        }
    }
    text.push_str("ret;\n}\n");
    text
}

const MEMORY: u64 = 0x2000_0000_0000;

fn gpu() -> Gpu {
    let gpu = Gpu::new(GpuConfig { memory_bytes: 64 << 20, workers: 1, ..GpuConfig::default() }).expect("a GPU");
    gpu.map(MEMORY, GRANULE).and_then(|()| gpu.place(MEMORY, 4096)).expect("its memory");
    gpu
}

thread_local! {
    static GPU: std::cell::RefCell<Gpu> = std::cell::RefCell::new(gpu());
}

rgpu_fuzz::target!(|bytes: &[u8]| {
    let text = text(bytes);
    GPU.with_borrow_mut(|device| {
        let Ok(module) = device.load_module(text.as_bytes()) else { return };
        let kernel = module.function("kernel").expect("the module was accepted");
        let stream = device.stream();
        let launched = stream.launch(&kernel, LaunchConfig::linear(2, 64), &MEMORY.to_le_bytes());
        if launched.and_then(|()| stream.synchronize()).is_err() {
            *device = gpu();
        }
    });
});
