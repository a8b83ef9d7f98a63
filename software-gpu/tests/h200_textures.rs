//! Compares the corpus of `h200/textures.rs` with the results of a real H200: bit for bit, or within the
//! error given in the README. `h200/record.sh` describes how to record the results again.

#![allow(clippy::unwrap_used)]

// Part of the module serves only the other corpus, which has its own test.
#[allow(dead_code)]
#[path = "h200/corpus.rs"]
mod corpus;
#[path = "h200/recording.rs"]
mod recording;

use corpus::textures::{self, Case, Kind, Near};
use recording::recording;
use software_gpu::{
    AddressMode, ChannelFormat, GRANULE, Gpu, GpuConfig, Image, LaunchConfig, Module, Result, Sampler,
};

const BASE: u64 = 0x2000_0000_0000;
const INPUT: u64 = BASE + (16 << 20);
const OUTPUT: u64 = BASE + (17 << 20);

fn images(case: &Case) -> Vec<Image> {
    let format = match case.format.kind {
        0 => ChannelFormat::Unsigned(case.format.bits),
        1 => ChannelFormat::Signed(case.format.bits),
        _ => ChannelFormat::Float(case.format.bits),
    };
    let mut address = BASE;
    (0..case.levels)
        .map(|level| {
            let size = case.size.map(|s| (s >> level).max(1));
            let row_pitch = u64::from(size[0] * case.format.bits / 8 * case.format.channels);
            let slice_pitch = row_pitch * u64::from(size[1]);
            let image = Image {
                address,
                size,
                layers: case.layers,
                row_pitch,
                slice_pitch,
                format,
                channels: case.format.channels,
            };
            address += slice_pitch * u64::from(size[2] * case.layers);
            image
        })
        .collect()
}

fn sampler(case: &Case) -> Sampler {
    let modes = [AddressMode::Wrap, AddressMode::Clamp, AddressMode::Mirror, AddressMode::Border];
    Sampler {
        address: case.address.map(|m| modes[m as usize]),
        linear: case.linear,
        normalized: case.normalized,
        normalized_read: case.normalized_read,
        srgb: case.srgb,
        border: case.border,
        mip_linear: case.mip_linear,
        level_bias: case.bias,
        level_range: case.range,
        seamless: case.seamless,
        ..Sampler::default()
    }
}

/// The threads' results, followed by the texels if the case stores some.
fn run(gpu: &Gpu, module: &Module, kernel: usize, case: &Case, sampler: Sampler) -> Result<Vec<u8>> {
    let input = case.input_bytes();
    let mut out = vec![0u8; case.inputs.len() * case.results() * 4];
    gpu.place(BASE, case.texels.len() as u64)?;
    gpu.place(INPUT, input.len() as u64)?;
    gpu.place(OUTPUT, out.len() as u64)?;
    gpu.write(BASE, &case.texels)?;
    gpu.write(INPUT, &input)?;
    let images = images(case);
    let handle = match case.surface() {
        true => gpu.create_surface(images[0])?,
        false => gpu.create_mipmapped_texture(&images, sampler)?,
    };
    let mut params: Vec<u8> = [INPUT, OUTPUT, handle].iter().flat_map(|v| v.to_le_bytes()).collect();
    params.extend((case.inputs.len() as u32).to_le_bytes());
    let stream = gpu.stream();
    let shape = LaunchConfig::linear((case.inputs.len() as u32).div_ceil(128), 128);
    stream.launch(&module.function(&format!("k{kernel}"))?, shape, &params)?;
    stream.synchronize()?;
    gpu.read(OUTPUT, &mut out)?;
    if case.stores() {
        let mut texels = vec![0u8; case.texels.len()];
        gpu.read(BASE, &mut texels)?;
        out.extend(texels);
    }
    gpu.destroy_texture(handle)?;
    [BASE, INPUT, OUTPUT].into_iter().try_for_each(|at| gpu.release(at).map(|_| ()))?;
    Ok(out)
}

fn agree(near: Near, ours: &[u8], theirs: &[u8]) -> bool {
    let Near::Within(most) = near else { return ours == theirs };
    let numbers =
        |b: &[u8]| -> Vec<f32> { b.as_chunks::<4>().0.iter().map(|w| f32::from_le_bytes(*w)).collect() };
    numbers(ours).iter().zip(numbers(theirs)).all(|(a, b)| (a - b).abs() <= most)
}

#[test]
fn texture_results_match_an_h200() {
    let recorded = recording("textures-results.bin");
    let cases = textures::cases();
    let kernels = textures::kernels(&cases);
    let gpu = Gpu::new(GpuConfig { memory_bytes: 1 << 28, workers: 1, ..GpuConfig::default() }).unwrap();
    gpu.map(BASE, 16 * GRANULE).unwrap();
    let module = gpu.load_module(textures::ptx(&kernels).as_bytes()).unwrap();
    let mut wrong = Vec::new();
    for case in &cases {
        let Some(theirs) = recorded.get(&case.hash()) else {
            wrong.push(format!("{}: not recorded; record again", case.name));
            continue;
        };
        let kernel = kernels.iter().position(|k| *k == case.body()).unwrap();
        let ours = run(&gpu, &module, kernel, case, sampler(case)).unwrap();
        assert_eq!(ours.len(), theirs.len(), "{}", case.name);
        let size = case.results() * 4;
        let threads = case.inputs.len();
        let bad: Vec<usize> = (0..threads)
            .filter(|&t| !agree(case.near, &ours[t * size..][..size], &theirs[t * size..][..size]))
            .collect();
        if let Some(&t) = bad.first() {
            let words = |b: &[u8]| -> Vec<(f32, u32)> {
                let words = b[t * size..][..size].as_chunks::<4>().0.iter();
                words.map(|w| (f32::from_le_bytes(*w), u32::from_le_bytes(*w))).collect()
            };
            let inputs: Vec<(f32, i32)> =
                case.inputs[t].iter().map(|w| (f32::from_bits(*w), *w as i32)).collect();
            wrong.push(format!(
                "{}: {} of {threads}, first {t}: {inputs:?} ours {:x?} H200 {:x?}",
                case.name,
                bad.len(),
                words(&ours),
                words(theirs)
            ));
        } else if ours[threads * size..] != theirs[threads * size..] {
            wrong.push(format!("{}: other texels are stored", case.name));
        }
    }
    assert!(wrong.is_empty(), "{} of {} cases differ:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

#[test]
fn the_corpus_has_every_kind_of_resource() {
    let cases = textures::cases();
    for kind in [Kind::Array, Kind::Levels, Kind::Linear, Kind::Rows] {
        assert!(cases.iter().any(|c| c.kind == kind), "{kind:?}");
    }
}

#[test]
fn an_anisotropic_texture_allows_levels_but_not_gradients() {
    let cases = textures::cases();
    let kernels = textures::kernels(&cases);
    for (start, refused) in [("tex.grad.2d", true), ("tex.level.2d", false)] {
        let gpu = Gpu::new(GpuConfig { memory_bytes: 1 << 28, workers: 1, ..GpuConfig::default() }).unwrap();
        gpu.map(BASE, 16 * GRANULE).unwrap();
        let module = gpu.load_module(textures::ptx(&kernels).as_bytes()).unwrap();
        let case = cases.iter().find(|c| c.instruction.starts_with(start)).unwrap();
        let kernel = kernels.iter().position(|k| *k == case.body()).unwrap();
        let ran = run(&gpu, &module, kernel, case, Sampler { anisotropic: true, ..sampler(case) });
        assert_eq!(ran.is_err(), refused, "{start}");
    }
}
