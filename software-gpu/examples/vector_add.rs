//! Adds two vectors: `cargo run -p software-gpu --example vector_add`.

use software_gpu::{GRANULE, Gpu, GpuConfig, LaunchConfig, Result};

const PTX: &str = r"
.version 7.8
.target sm_80
.address_size 64

.visible .entry vector_add(.param .u64 a, .param .u64 b, .param .u64 sum, .param .u32 n)
{
    .reg .pred %p;
    .reg .b32 %i, %n, %block, %size;
    .reg .b64 %a, %b, %s, %at;
    .reg .f32 %x, %y;

    ld.param.u64 %a, [a];
    ld.param.u64 %b, [b];
    ld.param.u64 %s, [sum];
    ld.param.u32 %n, [n];
    mov.u32 %block, %ctaid.x;
    mov.u32 %size, %ntid.x;
    mov.u32 %i, %tid.x;
    mad.lo.u32 %i, %block, %size, %i;
    setp.ge.u32 %p, %i, %n;
    @%p ret;
    mul.wide.u32 %at, %i, 4;
    add.u64 %a, %a, %at;
    add.u64 %b, %b, %at;
    add.u64 %s, %s, %at;
    ld.global.f32 %x, [%a];
    ld.global.f32 %y, [%b];
    add.rn.f32 %x, %x, %y;
    st.global.f32 [%s], %x;
    ret;
}
";

fn main() -> Result<()> {
    let n = 1000u32;
    let bytes = u64::from(n) * 4;
    let gpu = Gpu::new(GpuConfig { memory_bytes: 64 << 20, ..GpuConfig::default() })?;
    // The caller chooses addresses: three allocations, each in its own granule.
    let [a, b, sum] = [0, 1, 2].map(|i| 0x2000_0000_0000 + i * GRANULE);
    gpu.map(a, 3 * GRANULE)?;
    for at in [a, b, sum] {
        gpu.place(at, bytes)?;
    }
    let floats = |f: fn(u32) -> f32| (0..n).flat_map(|i| f(i).to_le_bytes()).collect::<Vec<u8>>();
    gpu.write(a, &floats(|i| i as f32))?;
    gpu.write(b, &floats(|i| 0.5 * i as f32))?;

    let module = gpu.load_module(PTX.as_bytes())?;
    let kernel = module.function("vector_add")?;
    let mut params: Vec<u8> = [a, b, sum].iter().flat_map(|at| at.to_le_bytes()).collect();
    params.extend(n.to_le_bytes());
    let stream = gpu.stream();
    stream.launch(&kernel, LaunchConfig::linear(n.div_ceil(128), 128), &params)?;
    stream.synchronize()?;

    let mut out = vec![0; bytes as usize];
    gpu.read(sum, &mut out)?;
    let last = &out[out.len() - 4..];
    println!(
        "{} + {} = {}",
        n - 1,
        0.5 * (n - 1) as f32,
        f32::from_le_bytes([last[0], last[1], last[2], last[3]])
    );
    Ok(())
}
