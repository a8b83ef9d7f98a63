//! What names mean: labels, registers and variables of blocks in braces, and where variables lie.

#![allow(clippy::unwrap_used)]

#[allow(dead_code)]
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
