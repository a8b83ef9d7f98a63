//! What names mean: labels, registers and variables of blocks in braces, and where variables lie.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Bench, Params, answer};
use software_gpu::{Error, LaunchConfig, Module};

fn load(text: &str) -> Result<Module, Error> {
    Bench::new().gpu.load_module(format!(".version 8.0\n.target sm_90\n.address_size 64\n{text}").as_bytes())
}

/// The error of a module with a kernel whose body is this.
fn refused(body: &str) -> String {
    load(&format!(".visible .entry k() {{ {body} ret; }}")).err().unwrap().to_string()
}

#[test]
fn a_label_belongs_to_its_block() {
    let twice = "{ bra X; X: } add.u32 %a, %a, 1; { bra X; X: } mov.u32 %d, %a;";
    assert_eq!(answer(twice, [5, 0, 0]), 6);
    // The innermost one that encloses the branch.
    let hidden = "mov.u32 %d, 1; { bra X; mov.u32 %d, 2; X: add.u32 %d, %d, 10; } bra X; mov.u32 %d, 3; X:";
    assert_eq!(answer(hidden, [0; 3]), 11);
    let outward = "mov.u32 %d, 1; { { bra Y; } mov.u32 %d, 2; Y: } { bra Z; } mov.u32 %d, 3; Z:";
    assert_eq!(answer(outward, [0; 3]), 1);
    let indexed = "mov.u32 %d, 0; { ts: .branchtargets A, B; brx.idx %a, ts; A: add.u32 %d, %d, 1; B: } \
                   { ts: .branchtargets B, A; brx.idx %a, ts; A: add.u32 %d, %d, 10; B: add.u32 %d, %d, 100; }";
    assert_eq!(answer(indexed, [0; 3]), 101);
    assert_eq!(answer(indexed, [1, 0, 0]), 110);
}

/// As CUTLASS, MLIR and Triton wait for a barrier: the same assembly several times in a function.
#[test]
fn repeated_waits_do_not_skip_what_is_between_them() {
    let wait = "{ .reg .pred P1; LAB_WAIT: mbarrier.try_wait.parity.shared::cta.b64 P1, [%m], 1; \
                @P1 bra DONE; bra LAB_WAIT; DONE: }";
    let work = format!(
        ".shared .b64 m; .reg .b32 %m; mov.u32 %m, m; mbarrier.init.shared.b64 [%m], 1; mov.u32 %d, %a; \
         {wait} add.u32 %d, %d, 1; {wait} add.u32 %d, %d, 1; {wait}"
    );
    assert_eq!(answer(&work, [5, 0, 0]), 7);
}

#[test]
fn labels_out_of_reach_and_doubled_labels_are_errors() {
    assert!(refused("bra X; { X: }").contains("no label X"));
    assert!(refused("{ X: } { bra X; }").contains("no label X"));
    assert!(refused("X: bra X;\nX:").contains("line 5: label X is defined twice"));
}

#[test]
fn dynamic_shared_memory_has_its_variables_alignment() {
    let text = ".version 8.0\n.target sm_90\n.address_size 64
.extern .shared .align 128 .b8 tile[];
.extern .shared .align 1024 .b8 swizzled[];
.func f(.param .b64 to)
{
    .reg .b64 %to; .reg .b32 %r;
    ld.param.u64 %to, [to]; mov.u32 %r, swizzled; st.global.u32 [%to], %r; ret;
}
.visible .entry direct(.param .u64 to)
{
    .shared .align 4 .b8 fixed[40];
    .reg .b64 %to; .reg .b32 %r;
    mov.u32 %r, fixed; ld.param.u64 %to, [to]; mov.u32 %r, tile; st.global.u32 [%to], %r;
    st.shared.u32 [%r + 60], %r; ret;
}
.visible .entry called(.param .u64 to)
{
    .shared .align 4 .b8 fixed[40];
    .reg .b64 %to; .reg .b32 %r; .param .b64 a;
    mov.u32 %r, fixed; ld.param.u64 %to, [to]; st.param.b64 [a], %to; call f, (a); ret;
}";
    let bench = Bench::new();
    let module = bench.gpu.load_module(text.as_bytes()).unwrap();
    let out = bench.upload(&[7u32]);
    let config = LaunchConfig { dynamic_shared: 64, ..LaunchConfig::linear(1, 1) };
    for (kernel, align) in [("direct", 128), ("called", 1024)] {
        bench.run(&module, kernel, config, &Params::default().u64(out).0).unwrap();
        assert_eq!(bench.download::<u32>(out, 1), [align], "{kernel}");
    }
}

#[test]
fn numbered_registers_of_a_block_hide_those_outside() {
    let work = ".reg .b32 %r<4>; mov.u32 %r1, 7; \
                { .reg .b32 %r<4>; mov.u32 %r1, 9; { mov.u32 %r1, 5; } } mov.u32 %d, %r1;";
    assert_eq!(answer(work, [0; 3]), 7);
    // Those that the inner block does not have are the outer block's.
    let fewer = ".reg .b32 %r<4>; mov.u32 %r3, 7; { .reg .b32 %r<2>; mov.u32 %r3, 8; } mov.u32 %d, %r3;";
    assert_eq!(answer(fewer, [0; 3]), 8);
    let wider = ".reg .b32 %r<4>; mov.u32 %r1, 7; { .reg .b64 %r<4>; mov.u64 %r1, 9; } mov.u32 %d, %r1;";
    assert_eq!(answer(wider, [0; 3]), 7);
    assert!(refused(".reg .b32 %r<4>; mov.u32 %r01, 1;").contains("%r01"));
}

#[test]
fn shared_variables_of_one_name_are_apart() {
    let work = ".reg .b32 %s; { .shared .b8 t[256]; mov.u32 %s, t; st.shared.u32 [%s+252], 5; \
                { .shared .b32 t; st.shared.u32 [t], 6; } ld.shared.u32 %d, [%s+252]; } \
                { .shared .b32 t; st.shared.u32 [t], 7; } ld.shared.u32 %s, [%s+252]; add.u32 %d, %d, %s;";
    assert_eq!(answer(work, [0; 3]), 10);
}

#[test]
fn dynamic_shared_memory_may_be_declared_in_a_body() {
    let work = ".extern .shared .align 64 .b8 tile[]; .shared .b32 fixed; .reg .b32 %s; \
                mov.u32 %s, fixed; mov.u32 %s, tile; mov.u32 %d, %s;";
    assert_eq!(answer(work, [0; 3]), 64);
    assert!(refused(".shared .b8 tile[];").contains("tile has no size"));
    assert!(refused(".extern .shared .b8 tile[4];").contains("tile is not defined"));
}

/// The words of a variable with this declaration.
fn words(declaration: &str) -> Vec<u32> {
    let bench = Bench::new();
    let text = format!(".version 8.0\n.target sm_90\n.address_size 64\n.visible .global {declaration};");
    let module = bench.gpu.load_module(text.as_bytes()).unwrap();
    let x = module.global("x").unwrap();
    bench.download(x.address, x.size as usize / 4)
}

#[test]
fn initial_values_that_inner_braces_leave_out_are_zero() {
    assert_eq!(words(".u32 x[2][2] = {{1}, {2, 3}}"), [1, 0, 2, 3]);
    assert_eq!(words(".u32 x[2][2] = {1, 2, 3}"), [1, 2, 3, 0]);
    assert_eq!(words(".v4 .u32 x[2] = {{1, 2}, {3}}"), [1, 2, 0, 0, 3, 0, 0, 0]);
    assert_eq!(words(".u32 x[2][2][2] = {{{1}, {2}}, {{3}}}"), [1, 0, 2, 0, 3, 0, 0, 0]);
    let far = words(".u32 x[3][500] = {{1}, {2}, {3, 4}}");
    assert_eq!((far[0], far[500], far[1000], far[1001], far.iter().sum::<u32>()), (1, 2, 3, 4, 10));
    for wrong in [".u32 x[2][2] = {{1, 2, 3}, {4}}", ".u32 x[2] = {1, 2, 3}", ".u32 x[2][2] = {1, {2, 3}}"] {
        assert!(load(&format!(".global {wrong};")).is_err(), "{wrong}");
    }
}

#[test]
fn initial_values_tell_the_first_dimension() {
    assert_eq!(words(".u32 x[] = {0, 1, 2}"), [0, 1, 2]);
    assert_eq!(words(".s32 x[][2] = {{-1, 0}, {0, -1}, {1}}"), [u32::MAX, 0, 0, u32::MAX, 1, 0]);
    assert_eq!(words(".f32 x[] = {-1.0, 0f3f800000, -0f3f800000}"), [0xbf80_0000, 0x3f80_0000, 0xbf80_0000]);
    assert_eq!(words(".attribute(.managed, .unified(19, 95)) .u32 x[2] = {1, 2}"), [1, 2]);
}

/// `addr` has an address that one module's kernel stores and another's calls.
#[test]
fn a_function_of_another_module_cannot_be_called() {
    let module = |value: u32| {
        format!(
            ".version 8.0\n.target sm_90\n.address_size 64
.func (.param .b32 r) f() {{ st.param.b32 [r], {value}; ret; }}
.visible .entry put(.param .u64 to)
{{
    .reg .b64 %to, %f; ld.param.u64 %to, [to]; mov.u64 %f, f; st.global.u64 [%to], %f; ret;
}}
.visible .entry use(.param .u64 from)
{{
    .reg .b64 %from, %f; .reg .b32 %r; .param .b32 r;
    ld.param.u64 %from, [from]; ld.global.u64 %f, [%from];
    p: .callprototype (.param .b32 _) _ ();
    call (r), %f, (), p;
    ld.param.b32 %r, [r]; st.global.u32 [%from], %r; ret;
}}"
        )
    };
    let bench = Bench::new();
    let (one, other) = (module(1), module(2));
    let [one, other] = [one, other].map(|text| bench.gpu.load_module(text.as_bytes()).unwrap());
    let at = bench.upload(&[0u64]);
    let (config, params) = (LaunchConfig::linear(1, 1), Params::default().u64(at).0);
    bench.run(&other, "put", config, &params).unwrap();
    bench.run(&other, "use", config, &params).unwrap();
    assert_eq!(bench.download::<u32>(at, 1), [2]);
    bench.run(&other, "put", config, &params).unwrap();
    let error = bench.run(&one, "use", config, &params).unwrap_err().to_string();
    assert!(error.contains("which is not a function"), "{error}");
}

/// The address of a callee's variable, after a caller with 16 bytes of its own.
#[test]
fn local_variables_of_called_functions_have_their_alignment() {
    let text = ".version 8.0\n.target sm_90\n.address_size 64
.func (.param .b32 r) f()
{
    .local .align 64 .b8 x[64]; .reg .b32 %r;
    mov.u32 %r, x; st.param.b32 [r], %r; ret;
}
.visible .entry k(.param .u64 to)
{
    .local .b8 own[16]; .reg .b64 %to; .reg .b32 %r; .param .b32 r;
    ld.param.u64 %to, [to];
    call (r), f, ();
    ld.param.b32 %r, [r]; st.global.u32 [%to], %r; ret;
}";
    let bench = Bench::new();
    let module = bench.gpu.load_module(text.as_bytes()).unwrap();
    let at = bench.upload(&[1u32]);
    bench.run(&module, "k", LaunchConfig::linear(1, 1), &Params::default().u64(at).0).unwrap();
    assert_eq!(bench.download::<u32>(at, 1)[0] % 64, 0);
}
