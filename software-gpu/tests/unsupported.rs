//! An instruction that this GPU does not implement makes the functions that use it unusable, but not the rest
//! of the module.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Bench, Params};
use software_gpu::{Error, Fault, LaunchConfig, Module};

/// As in nvbandwidth's and NCCL's kernels compiled by nvcc: `multimem` in kernels and in functions that
/// kernels call.
const MULTICAST: &str = ".version 8.1\n.target sm_90\n.address_size 64
.func store_to_all(.param .b64 to, .param .b32 value)
{
    .reg .b64 %to; .reg .b32 %value;
    ld.param.b64 %to, [to];
    ld.param.b32 %value, [value];
    multimem.st.u32 [%to], %value;
    ret;
}
.func through(.param .b64 to, .param .b32 value)
{
    .reg .b64 %to; .reg .b32 %value;
    ld.param.b64 %to, [to];
    ld.param.b32 %value, [value];
    {
        .param .b64 a; .param .b32 b;
        st.param.b64 [a], %to;
        st.param.b32 [b], %value;
        call.uni store_to_all, (a, b);
    }
    ret;
}
.visible .entry works(.param .u64 out, .param .u32 value)
{
    .reg .b64 %out; .reg .b32 %value;
    ld.param.u64 %out, [out];
    ld.param.u32 %value, [value];
    st.global.u32 [%out], %value;
    ret;
}
.visible .entry reduces(.param .u64 out, .param .align 16 .b8 wide[16])
{
    .reg .b64 %out; .reg .f32 %f<4>; .reg .b32 %r<4>;
    ld.param.u64 %out, [out];
    multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%f0, %f1, %f2, %f3}, [%out];
    multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%r0, %r1, %r2, %r3}, [%out];
    multimem.st.relaxed.sys.global.v4.f32 [%out], {%f0, %f1, %f2, %f3};
    multimem.red.relaxed.sys.global.add.f32 [%out], %f0;
    ret;
}
.visible .entry calls(.param .u64 out)
{
    .reg .b64 %out; .param .b64 a; .param .b32 b;
    ld.param.u64 %out, [out];
    st.param.b64 [a], %out;
    st.param.b32 [b], 5;
    call.uni through, (a, b);
    ret;
}
.visible .entry calls_by_pointer(.param .u64 out, .param .u32 really)
{
    .reg .b64 %out, %to; .reg .b32 %really; .reg .pred %p; .param .b64 a; .param .b32 b;
    ld.param.u64 %out, [out];
    ld.param.u32 %really, [really];
    st.global.u32 [%out], 3;
    setp.eq.u32 %p, %really, 0;
    @%p ret;
    mov.u64 %to, store_to_all;
    st.param.b64 [a], %out;
    st.param.b32 [b], 5;
    prototype: .callprototype _ (.param .b64 _, .param .b32 _);
    call %to, (a, b), prototype;
    ret;
}
.visible .entry in_clusters() .blocksareclusters { ret; }
";

fn load(bench: &Bench) -> Module {
    bench.gpu.load_module(MULTICAST.as_bytes()).unwrap()
}

/// The instruction that prevents a kernel from running, and the function that contains it.
fn reason(module: &Module, kernel: &str) -> Option<(String, String)> {
    let function = module.function(kernel).unwrap();
    function.info().unsupported.as_ref().map(|u| (u.what.clone(), u.function.clone()))
}

#[test]
fn a_module_with_an_unsupported_instruction_loads_and_its_other_kernels_run() {
    let bench = Bench::new();
    let module = load(&bench);
    assert_eq!(reason(&module, "works"), None);
    let out = bench.upload(&[0u32]);
    let params = Params::default().u64(out).i32(42).0;
    bench.run(&module, "works", LaunchConfig::linear(1, 1), &params).unwrap();
    assert_eq!(bench.download::<u32>(out, 1), [42]);
}

#[test]
fn launching_an_unsupported_kernel_names_the_instruction_and_leaves_the_gpu_usable() {
    let bench = Bench::new();
    let module = load(&bench);
    let out = bench.upload(&[7u32]);
    let params = Params::default().u64(out).0;
    let refused = bench.run(&module, "reduces", LaunchConfig::linear(1, 1), &params).unwrap_err();
    assert_eq!(refused.cuda_code(), 209);
    assert_eq!(
        refused.to_string(),
        "kernel reduces cannot be launched: multimem.ld_reduce.relaxed.sys.global.add.v4.f32 in function reduces, \
         PTX line 37, is not supported by the software GPU"
    );
    assert_eq!(bench.gpu.status(), Ok(()));
    assert_eq!(bench.download::<u32>(out, 1), [7]);
}

#[test]
fn a_kernel_that_calls_an_unsupported_function_cannot_be_launched() {
    let bench = Bench::new();
    let module = load(&bench);
    let found = reason(&module, "calls").unwrap();
    assert_eq!(found, ("multimem.st.u32".to_owned(), "store_to_all".to_owned()));
    let out = bench.upload(&[7u32]);
    let refused = bench.run(&module, "calls", LaunchConfig::linear(1, 1), &out.to_le_bytes()).unwrap_err();
    assert!(matches!(refused, Error::UnsupportedFunction { .. }), "{refused}");
}

#[test]
fn an_indirect_call_of_an_unsupported_function_fails_when_made() {
    let bench = Bench::new();
    let module = load(&bench);
    let out = bench.upload(&[0u32]);
    let run = |really| {
        let params = Params::default().u64(out).i32(really).0;
        bench.run(&module, "calls_by_pointer", LaunchConfig::linear(1, 1), &params)
    };
    run(0).unwrap();
    assert_eq!(bench.download::<u32>(out, 1), [3]);
    let Err(Error::Kernel { fault: Fault::IllegalInstruction(text), .. }) = run(1) else {
        panic!("the call did not fail");
    };
    assert!(text.contains("multimem.st.u32 in function store_to_all"), "{text}");
}

#[test]
fn an_unsupported_directive_affects_only_its_kernel() {
    let bench = Bench::new();
    let (directive, function) = reason(&load(&bench), "in_clusters").unwrap();
    assert_eq!((directive.as_str(), function.as_str()), (".blocksareclusters", "in_clusters"));
}

#[test]
fn an_unsupported_kernel_still_reports_its_parameters() {
    let bench = Bench::new();
    let module = load(&bench);
    let function = module.function("reduces").unwrap();
    let places: Vec<_> = function.info().params.iter().map(|p| (p.offset, p.size)).collect();
    assert_eq!((places, function.info().param_bytes), (vec![(0, 8), (16, 16)], 32));
    assert!(function.max_active_blocks(256, 0) > 0);
}

#[test]
fn an_invalid_module_is_refused_as_a_whole() {
    let bench = Bench::new();
    let wrong = MULTICAST.replace("ld.param.u32 %really", "ld.param.u32 %nothing");
    let misspelled = MULTICAST.replace("multimem.st.u32", "multimen.st.u32");
    let no_modifier = MULTICAST.replace("multimem.st.u32", "multimem.an.u32");
    for text in [wrong, misspelled, no_modifier] {
        let refused = bench.gpu.load_module(text.as_bytes()).map(|_| ()).unwrap_err();
        assert!(matches!(refused, Error::InvalidPtx { .. }), "{refused}");
    }
}
