//! Compares the corpus of `h200/corpus.rs` with the results of a real H200: bit for bit, or for approximate
//! instructions within the documented error. `h200/record.sh` describes how to record the results again.

#![allow(clippy::unwrap_used)]

// Only the recording needs the functions that group cases into modules.
#[allow(dead_code)]
#[path = "h200/corpus.rs"]
mod corpus;
#[path = "h200/recording.rs"]
mod recording;

use corpus::{Case, Check};
use recording::recording;
use software_gpu::{Error, GRANULE, Gpu, GpuConfig, LaunchConfig, Module};

const BASE: u64 = 0x2000_0000_0000;
const OUT: u64 = BASE + (1 << 20);

fn gpu() -> Gpu {
    let gpu = Gpu::new(GpuConfig { memory_bytes: 1 << 28, workers: 1, ..GpuConfig::default() }).unwrap();
    gpu.map(BASE, GRANULE).unwrap();
    gpu
}

fn run(gpu: &Gpu, module: &Module, kernel: &str, case: &Case) -> Result<Vec<u8>, Error> {
    let threads = corpus::threads(case);
    let input = case.input_bytes();
    let mut out = vec![0u8; threads * case.out_bytes];
    gpu.place(BASE, input.len() as u64)?;
    gpu.place(OUT, out.len() as u64)?;
    gpu.write(BASE, &input)?;
    gpu.write(OUT, &out)?;
    let params = [BASE.to_le_bytes(), OUT.to_le_bytes()].concat();
    let stream = gpu.stream();
    let blocks: u32 = case.grid.iter().product();
    let config = LaunchConfig { grid: case.grid, ..LaunchConfig::linear(1, threads as u32 / blocks) };
    stream.launch(&module.function(kernel)?, config, &params)?;
    stream.synchronize()?;
    gpu.read(OUT, &mut out)?;
    gpu.release(BASE)?;
    gpu.release(OUT)?;
    Ok(out)
}

/// The result of every case on the software GPU, and the names of cases that do not load or run.
fn answers(cases: &[Case]) -> (Vec<Option<Vec<u8>>>, Vec<String>) {
    let (mut out, mut refused) = (Vec::new(), Vec::new());
    let mut device = gpu();
    for case in cases {
        let text = corpus::ptx(std::slice::from_ref(case));
        let result = device.load_module(text.as_bytes()).and_then(|m| run(&device, &m, "c0", case));
        if let Err(error) = &result {
            refused.push(format!("{}: {error}", case.name));
            device = gpu();
        }
        out.push(result.ok());
    }
    (out, refused)
}

/// The numbers in a result, for types with several parts.
fn numbers(ty: &str, bytes: &[u8]) -> Vec<f64> {
    let word = |n: usize| bytes[..n].iter().rev().fold(0u64, |v, b| v << 8 | u64::from(*b));
    let half = |h: u64| {
        let (e, f) = (h >> 10 & 31, (h & 0x3ff) as f64);
        let m = match e {
            0 => f * 2f64.powi(-24),
            31 if f == 0.0 => f64::INFINITY,
            31 => f64::NAN,
            _ => (1.0 + f / 1024.0) * 2f64.powi(e as i32 - 15),
        };
        if h & 0x8000 != 0 { -m } else { m }
    };
    let brain = |h: u64| f64::from(f32::from_bits((h as u32 & 0xffff) << 16));
    match ty {
        "f64" => vec![f64::from_bits(word(8))],
        "f32" => vec![f64::from(f32::from_bits(word(4) as u32))],
        "f16" => vec![half(word(2))],
        "bf16" => vec![brain(word(2))],
        "f16x2" => vec![half(word(4) & 0xffff), half(word(4) >> 16)],
        _ => vec![brain(word(4) & 0xffff), brain(word(4) >> 16)],
    }
}

fn near(ours: f64, theirs: f64, relative: f64, absolute: f64) -> bool {
    if ours.is_nan() || theirs.is_nan() {
        return ours.is_nan() && theirs.is_nan();
    }
    ours == theirs || (ours - theirs).abs() <= (theirs.abs() * relative.exp2()).max(absolute.exp2())
}

fn agree(case: &Case, thread: usize, ours: &[u8], theirs: &[u8]) -> bool {
    let (relative, absolute, range) = match case.check {
        Check::Exact => return ours == theirs,
        Check::Near(relative, absolute) => (relative, absolute, f64::INFINITY),
        Check::Wave(relative, absolute, range) => (relative, absolute, range),
    };
    let input = f64::from(f32::from_bits(case.inputs[thread][0] as u32)).abs();
    let (ours, theirs) = (numbers(case.ty, ours), numbers(case.ty, theirs));
    if input.is_finite() && input > range {
        return ours.iter().chain(&theirs).all(|x| x.abs() <= 1.0);
    }
    ours.iter().zip(&theirs).all(|(a, b)| near(*a, *b, relative, absolute))
}

#[test]
fn every_case_of_the_corpus_loads_and_runs() {
    let (_, refused) = answers(&corpus::cases());
    assert!(refused.is_empty(), "{} refused:\n{}", refused.len(), refused.join("\n"));
}

#[test]
fn results_match_an_h200() {
    let recorded = recording("results.bin");
    let cases = corpus::cases();
    let (answers, refused) = answers(&cases);
    let mut wrong = refused;
    for (case, ours) in cases.iter().zip(answers) {
        let Some(theirs) = recorded.get(&case.hash()) else {
            wrong.push(format!("{}: not recorded; record again", case.name));
            continue;
        };
        let Some(ours) = ours else { continue };
        let n = case.out_bytes;
        let bad: Vec<usize> = (0..corpus::threads(case))
            .filter(|&t| !agree(case, t, &ours[t * n..][..n], &theirs[t * n..][..n]))
            .collect();
        if let Some(&t) = bad.first() {
            let hex = |b: &[u8]| b.iter().rev().map(|b| format!("{b:02x}")).collect::<String>();
            wrong.push(format!(
                "{}: {} of {} threads, first {t}: inputs {:x?} ours {} H200 {}",
                case.name,
                bad.len(),
                corpus::threads(case),
                case.inputs[t],
                hex(&ours[t * n..][..n]),
                hex(&theirs[t * n..][..n])
            ));
        }
    }
    assert!(wrong.is_empty(), "{} of {} cases differ:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}
