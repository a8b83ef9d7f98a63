//! Requirements on launches, as observed on an H200 with driver 580.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Bench, Params};
use software_gpu::{Error, LaunchConfig};

const STORES: &str = ".version 8.0\n.target sm_90\n.address_size 64
.visible .entry k(.param .u64 a, .param .u32 b)
{
    .reg .b64 %a; .reg .b32 %b;
    ld.param.u64 %a, [a];
    ld.param.u32 %b, [b];
    st.global.u32 [%a], %b;
    ret;
}
.visible .entry none() { ret; }
";

fn launch(bytes: usize) -> Result<u32, Error> {
    let bench = Bench::new();
    let module = bench.gpu.load_module(STORES.as_bytes()).unwrap();
    let out = bench.upload(&[7u32]);
    let block = Params::default().u64(out).i32(9).i32(10).0;
    bench.run(&module, "k", LaunchConfig::linear(1, 1), &block[..bytes])?;
    Ok(bench.download::<u32>(out, 1)[0])
}

#[test]
fn too_many_parameter_bytes_are_refused() {
    assert_eq!(launch(12).unwrap(), 9);
    assert_eq!(launch(13).unwrap_err().cuda_code(), 701);
    assert_eq!(launch(16).unwrap_err().cuda_code(), 701);
    let bench = Bench::new();
    let module = bench.gpu.load_module(STORES.as_bytes()).unwrap();
    let one = LaunchConfig::linear(1, 1);
    assert_eq!(bench.run(&module, "none", one, &[0; 8]).unwrap_err().cuda_code(), 701);
    bench.run(&module, "none", one, &[]).unwrap();
}

#[test]
fn missing_parameter_bytes_are_zero_unless_all_are_missing() {
    assert_eq!(launch(8).unwrap(), 0);
    assert_eq!(launch(11).unwrap(), 9);
    assert_eq!(launch(0).unwrap_err().cuda_code(), 1);
}

/// Blocks add to a sum, synchronize, and store the sum that they then read. `called` is the function by which
/// they synchronize; also returns its results.
fn meeting(called: &str, cooperative: bool) -> (Vec<u32>, Vec<u32>) {
    let text = format!(
        ".version 8.0\n.target sm_90\n.address_size 64
.extern .func (.param .b64 handle) cudaCGGetIntrinsicHandle(.param .b32 scope);
.extern .func (.param .b32 error) {called}(.param .b64 handle, .param .b32 flags);
.visible .entry k(.param .u64 sum, .param .u64 sums, .param .u64 errors)
{{
    .reg .b64 %p, %at, %handle; .reg .b32 %r, %error, %i;
    .param .b64 handle; .param .b32 scope, flags, error;
    st.param.b32 [scope], 1;
    call (handle), cudaCGGetIntrinsicHandle, (scope);
    ld.param.u64 %p, [sum];
    red.global.add.u32 [%p], 1;
    st.param.b32 [flags], 0;
    call (error), {called}, (handle, flags);
    ld.param.b32 %error, [error];
    ld.volatile.global.u32 %r, [%p];
    call (error), {called}, (handle, flags);
    mov.u32 %i, %tid.x;
    mul.wide.u32 %at, %i, 4;
    mov.u32 %i, %ctaid.x;
    mad.wide.u32 %at, %i, 256, %at;
    ld.param.u64 %p, [sums];
    add.u64 %p, %p, %at;
    st.global.u32 [%p], %r;
    ld.param.u64 %p, [errors];
    add.u64 %p, %p, %at;
    st.global.u32 [%p], %error;
    ret;
}}"
    );
    let bench = Bench::new();
    let module = bench.gpu.load_module(text.as_bytes()).unwrap();
    let (sum, sums, errors) =
        (bench.upload(&[0u32]), bench.upload(&[0u32; 7 * 64]), bench.upload(&[9u32; 7 * 64]));
    let config = LaunchConfig { cooperative, ..LaunchConfig::linear(7, 64) };
    bench.run(&module, "k", config, &Params::default().u64(sum).u64(sums).u64(errors).0).unwrap();
    (bench.download(sums, 7 * 64), bench.download(errors, 7 * 64))
}

#[test]
fn the_device_runtime_synchronizes_a_cooperative_grid() {
    for called in ["cudaCGSynchronize", "cudaCGSynchronizeGrid"] {
        let (sums, errors) = meeting(called, true);
        assert_eq!(errors, [0; 7 * 64]);
        assert_eq!(sums, [7 * 64; 7 * 64]);
    }
}

#[test]
fn grid_synchronization_fails_for_a_grid_that_is_not_cooperative() {
    assert_eq!(meeting("cudaCGSynchronize", false).1, [1; 7 * 64]);
}

#[test]
fn a_result_that_the_callee_does_not_have_is_ignored() {
    let caller = ".version 8.0\n.target sm_90\n.address_size 64
.extern .func (.param .b32 result) put(.param .b64 to);
.visible .entry k(.param .u64 to)
{
    .reg .b64 %to; .param .b64 to_put; .param .b32 result;
    ld.param.u64 %to, [to];
    st.param.b64 [to_put], %to;
    call (result), put, (to_put);
    st.global.u32 [%to + 4], 6;
    ret;
}";
    let callee = ".version 8.0\n.target sm_90\n.address_size 64
.visible .func put(.param .b64 to)
{
    .reg .b64 %to;
    ld.param.u64 %to, [to];
    st.global.u32 [%to], 5;
    ret;
}";
    let bench = Bench::new();
    let module = bench.gpu.link_module(&[caller.as_bytes(), callee.as_bytes()]).unwrap();
    let out = bench.upload(&[0u32; 2]);
    bench.run(&module, "k", LaunchConfig::linear(1, 1), &Params::default().u64(out).0).unwrap();
    assert_eq!(bench.download::<u32>(out, 2), [5, 6]);
}

#[test]
fn reported_shared_memory_and_registers_respect_the_limits() {
    let text = ".version 8.0\n.target sm_90\n.address_size 64
.extern .shared .align 16 .b8 rest[];
.visible .entry k(.param .u64 to) .maxntid 512 .maxnreg 40
{
    .shared .align 4 .b8 fixed[40];
    .reg .b64 %to, %at; .reg .b32 %r, %s<200>;
    mov.u32 %s199, fixed;
    st.shared.u32 [%s199 + 36], 5;
    mov.u32 %r, rest;
    st.shared.u32 [%r + 60], %r;
    ld.shared.u32 %s1, [%s199 + 36];
    ld.param.u64 %to, [to];
    st.global.u32 [%to], %r;
    st.global.u32 [%to + 4], %s1;
    ret;
}
.visible .entry bounded() .maxntid 1024 { .reg .b32 %s<400>; mov.u32 %s0, 1; ret; }
";
    let bench = Bench::new();
    let module = bench.gpu.load_module(text.as_bytes()).unwrap();
    let info = module.function("k").unwrap().info().clone();
    assert_eq!((info.shared_bytes, info.registers <= 40), (40, true));
    assert!(module.function("bounded").unwrap().info().registers <= 64);
    // Dynamic shared memory is still aligned and fully available.
    let out = bench.upload(&[0u32; 2]);
    let config = LaunchConfig { dynamic_shared: 64, ..LaunchConfig::linear(1, 1) };
    bench.run(&module, "k", config, &Params::default().u64(out).0).unwrap();
    let got: Vec<u32> = bench.download(out, 2);
    assert_eq!((got[0] % 16, got[1]), (0, 5));
}
