//! Measures the software GPU against the same work in plain C on one core, and writes
//! `docs/benchmarks/software-gpu.md`: `cargo run --release -p software-gpu --example bench`. With `--quick`
//! it only prints, and omits the last column.

use std::process::Command;
use std::time::Instant;

use software_gpu::{Error, GRANULE, Gpu, GpuConfig, LaunchConfig};

const BASE: u64 = 0x2000_0000_0000;

struct Program {
    name: &'static str,
    what: &'static str,
    kernel: &'static str,
    launch: LaunchConfig,
    /// Number of floats in each array parameter.
    arrays: &'static [u64],
    n: u32,
    /// The array that is verified, and its expected value at an index after a number of launches.
    result: usize,
    expected: fn(u64, u32) -> f64,
}

/// The initial value of every array at an index.
fn start(i: u64) -> f32 {
    (i % 1000) as f32 * 0.001 + 0.5
}

fn product(i: u64, _launches: u32) -> f64 {
    let (row, column) = (i / 1024, i % 1024);
    (0..1024).map(|k| f64::from(start(row * 1024 + k)) * f64::from(start(k * 1024 + column))).sum()
}

fn sum(_i: u64, launches: u32) -> f64 {
    f64::from(start(0)) + f64::from(launches) * (0..64 << 20).map(|i| f64::from(start(i))).sum::<f64>()
}

fn acceleration(i: u64, _launches: u32) -> f64 {
    let part = |body: u64, k: u64| f64::from(start(body * 4 + k));
    let (me, axis) = (i / 4, i % 4);
    if axis == 3 {
        return 0.0;
    }
    let pull = |j: u64| {
        let d = [0, 1, 2].map(|k| part(j, k) - part(me, k));
        let square = d.iter().map(|x| x * x).sum::<f64>() + 0.01;
        part(j, 3) * d[axis as usize] / (square * square.sqrt())
    };
    (0..16384).map(pull).sum()
}

fn call(i: u64, _launches: u32) -> f64 {
    let normal = |d: f64| {
        let k = 1.0 / (1.0 + 0.2316419 * d.abs());
        let p = k * (-1.821255978 + k * 1.330274429);
        let p = k * (0.31938153 + k * (-0.356563782 + k * (1.781477937 + p)));
        let c = 0.398_942_280_401_432_7 * (-0.5 * d * d).exp() * p;
        if d > 0.0 { 1.0 - c } else { c }
    };
    let x = f64::from(start(i));
    let (s, t, r, v) = (x, x, 0.02, 0.30);
    let root = t.sqrt();
    let d1 = ((s / x).ln() + (r + 0.5 * v * v) * t) / (v * root);
    s * normal(d1) - x * (-r * t).exp() * normal(d1 - v * root)
}

fn programs() -> [Program; 4] {
    const MATRIX: u64 = 1024 * 1024;
    const REDUCED: u64 = 64 << 20;
    const BODIES: u64 = 16384;
    const OPTIONS: u64 = 4 << 20;
    let square = LaunchConfig {
        grid: [32, 32, 1],
        block: [32, 32, 1],
        dynamic_shared: 0,
        cooperative: false,
        cluster: None,
    };
    [
        Program {
            name: "matrixMul",
            what: "1024 × 1024 × 1024 floats, tiles of 32",
            kernel: "matrix_mul",
            launch: square,
            arrays: &[MATRIX; 3],
            n: 1024,
            result: 0,
            expected: product,
        },
        Program {
            name: "reduction",
            what: "64 Mi floats",
            kernel: "reduce",
            launch: LaunchConfig::linear(256, 256),
            arrays: &[REDUCED, 1],
            n: REDUCED as u32,
            result: 1,
            expected: sum,
        },
        Program {
            name: "nbody",
            what: "one step of 16 Ki bodies",
            kernel: "nbody",
            launch: LaunchConfig::linear(64, 256),
            arrays: &[BODIES * 4; 2],
            n: BODIES as u32,
            result: 0,
            expected: acceleration,
        },
        Program {
            name: "Black–Scholes",
            what: "4 Mi options",
            kernel: "black_scholes",
            launch: LaunchConfig::linear((OPTIONS / 256) as u32, 256),
            arrays: &[OPTIONS; 5],
            n: OPTIONS as u32,
            result: 0,
            expected: call,
        },
    ]
}

/// Seconds of CPU time used by all threads of this process, which excludes what other processes do meanwhile.
fn cpu_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a live local variable.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// The cost of a launch, the best of several.
struct Cost {
    /// Seconds.
    wall: f64,
    /// Seconds of CPU time.
    cpu: f64,
    instructions: u64,
}

/// The cost of a program with this many workers, the best of `repeats`.
fn measure(program: &Program, workers: usize, repeats: u32) -> Result<Cost, Error> {
    let gpu = Gpu::new(GpuConfig { memory_bytes: 1 << 30, workers, ..GpuConfig::default() })?;
    let module = gpu.load_module(include_bytes!("bench/kernels.ptx"))?;
    let kernel = module.function(program.kernel)?;
    let mut params = Vec::new();
    let mut at = BASE;
    let mut result = 0;
    for (n, &floats) in program.arrays.iter().enumerate() {
        if n == program.result {
            result = at;
        }
        let bytes = (floats * 4).next_multiple_of(GRANULE);
        gpu.map(at, bytes)?;
        gpu.place(at, floats * 4)?;
        let data: Vec<u8> = (0..floats).flat_map(|i| start(i).to_le_bytes()).collect();
        gpu.write(at, &data)?;
        params.extend(at.to_le_bytes());
        at += bytes;
    }
    params.extend(program.n.to_le_bytes());
    let stream = gpu.stream();
    let mut best = Cost { wall: f64::INFINITY, cpu: f64::INFINITY, instructions: 0 };
    for _ in 0..repeats {
        let before = gpu.warp_instructions();
        let (start, cpu) = (Instant::now(), cpu_seconds());
        stream.launch(&kernel, program.launch, &params)?;
        stream.synchronize()?;
        best.cpu = best.cpu.min(cpu_seconds() - cpu);
        best.wall = best.wall.min(start.elapsed().as_secs_f64());
        best.instructions = gpu.warp_instructions() - before;
    }
    verify(program, &gpu, result, repeats)?;
    Ok(best)
}

/// Compares some of a program's results with the same computed in f64.
fn verify(program: &Program, gpu: &Gpu, result: u64, launches: u32) -> Result<(), Error> {
    let floats = program.arrays[program.result];
    for i in (0..floats).step_by((floats / 61) as usize | 1) {
        let mut bytes = [0; 4];
        gpu.read(result + i * 4, &mut bytes)?;
        let (is, should) =
            (f64::from(f32::from_bits(u32::from_le_bytes(bytes))), (program.expected)(i, launches));
        // Written so that NaNs fail, too.
        let near = (is - should).abs() <= should.abs() * 1e-3 + 1e-3;
        assert!(near, "{}: result {i} is {is} and should be {should}", program.name);
    }
    Ok(())
}

fn reference(folder: &std::path::Path) -> std::io::Result<Vec<f64>> {
    let binary = std::env::temp_dir().join(format!("software-gpu-reference-{}", std::process::id()));
    let built = Command::new("cc")
        .args(["-O2", "-o"])
        .arg(&binary)
        .arg(folder.join("examples/bench/reference.c"))
        .arg("-lm")
        .status()?;
    if !built.success() {
        return Err(std::io::Error::other("cc failed"));
    }
    let mut best = vec![f64::INFINITY; 4];
    for _ in 0..5 {
        let output = Command::new(&binary).output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        for (slot, line) in best.iter_mut().zip(text.lines()) {
            *slot = slot.min(line.parse().unwrap_or(f64::INFINITY));
        }
    }
    std::fs::remove_file(binary)?;
    Ok(best)
}

fn cpu() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|l| l.strip_prefix("model name")?.split_once(':'));
    model.map_or("an unknown CPU".into(), |(_, name)| name.trim().to_string())
}

/// How busy the machine is with other work.
fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().unwrap_or("unknown").to_string()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let load = load();
    let quick = std::env::args().any(|a| a == "--quick");
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let c = reference(folder)?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut table = String::from(
        "| program | | warp instructions | one core, s | lane-instructions/s/core | C -O2, s | ratio | all cores, s |\n\
         |---|---|---|---|---|---|---|---|\n",
    );
    for (program, c) in programs().iter().zip(c) {
        let one = measure(program, 1, if quick { 3 } else { 5 })?;
        let all = if quick { f64::NAN } else { measure(program, cores, 5)?.wall };
        let row = format!(
            "| {} | {} | {} | {:.3} | {:.0} M | {c:.3} | {:.1} | {all:.3} |\n",
            program.name,
            program.what,
            one.instructions,
            one.cpu,
            one.instructions as f64 * 32.0 / one.cpu / 1e6,
            one.cpu / c
        );
        print!("{row}");
        table.push_str(&row);
    }
    if quick {
        return Ok(());
    }
    let text = format!(
        "# The software GPU's speed\n\n\
         Written by `cargo run --release -p software-gpu --example bench`. Each program runs on one worker and is compared with the same\n\
         work in C (`software-gpu/examples/bench/reference.c`, `cc -O2`, one core). Figures are the best of five. A warp instruction works on 32\n\
         lanes. Times are CPU time, which other work on the machine hardly affects, except in the last column: that is wall-clock time, and only\n\
         meaningful on an otherwise idle machine. About sixty results of each program are verified against f64; a wrong one stops the benchmark.\n\
         \n\
         {}, {cores} cores; load average at the start {load}.\n\n{table}\n\
         `ratio` is the time on one core divided by that of the C code. The goal is 500 M lane-instructions per second and core, and a ratio of at most 10.\n\
         \n\
         `software-gpu/tests/h200.rs` compares the results of instructions with an H200's: bit for bit, or within the documented error for\n\
         approximate instructions. `software-gpu/README.md` lists the number of cases and what is not modeled.\n",
        cpu()
    );
    std::fs::write(folder.join("../docs/benchmarks/software-gpu.md"), text)?;
    Ok(())
}
