//! Texts that ask for too much, or for what does not exist: refused with an error, not followed.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Bench, Params};
use software_gpu::LaunchConfig;

const HEAD: &str = ".version 8.0\n.target sm_90\n.address_size 64\n";

/// The error of loading this text.
fn refused(text: &str) -> String {
    Bench::new().gpu.load_module(format!("{HEAD}{text}").as_bytes()).err().unwrap().to_string()
}

/// Why a kernel with this body does not load or cannot be launched.
fn refused_body(body: &str) -> String {
    let text = format!(
        "{HEAD}.visible .entry k() {{ .reg .b64 %rd<9>; .reg .b32 %r<99>; .reg .f64 %fd<99>; {body} ret; }}"
    );
    match Bench::new().gpu.load_module(text.as_bytes()) {
        Ok(module) => module.functions()[0].unsupported.as_ref().unwrap().to_string(),
        Err(error) => error.to_string(),
    }
}

fn registers(n: usize) -> String {
    format!("{{{}}}", (0..n).map(|i| format!("%r{i}")).collect::<Vec<_>>().join(", "))
}

#[test]
fn shapes_of_matrices_that_do_not_exist_are_refused() {
    for (m, n, k, ty, count) in [
        (16, 16, 262160, "f16", 4),
        (16, 16, 16, "tf32", 8),
        (16, 16, 8, "f16", 4),
        (256, 256, 16, "f32", 2048),
        (0, 16, 16, "f16", 1),
    ] {
        let load = format!(
            "wmma.load.c.sync.aligned.row.m{m}n{n}k{k}.global.{ty} {}, [%rd0], 16;",
            registers(count)
        );
        assert!(refused_body(&load).contains(&format!("m{m}n{n}k{k}")), "{load}");
    }
    let store =
        format!("wmma.store.d.sync.aligned.row.m16n16k262160.global.f16 [%rd0], {}, 16;", registers(4));
    assert!(refused_body(&store).contains("m16n16k262160"));
    for (shape, types, counts) in [
        ("m16n8k262160", "f16.f16.f16.f16", [2, 65540, 32770, 2]),
        ("m16n16k16", "f32.f16.f16.f32", [8, 4, 4, 8]),
        ("m16n8k32", "f32.f16.f16.f32", [4, 8, 4, 4]),
        ("m16n8k8", "s32.s8.s8.s32", [4, 1, 1, 4]),
        ("m16n8k16", "f32.f16.bf16.f32", [4, 4, 2, 4]),
    ] {
        let lists = counts.map(registers).join(", ");
        let what = format!("mma.sync.aligned.{shape}.row.col.{types}");
        assert!(refused_body(&format!("{what} {lists};")).contains(&what), "{what}");
    }
}

/// More registers than fit the frame that holds them.
#[test]
fn too_many_registers_are_refused() {
    let moves: String = (0..70_000).map(|i| format!("mov.b128 %a{}, %a{};\n", 2 * i, 2 * i + 1)).collect();
    let error = refused(&format!(".visible .entry k() {{ .reg .b128 %a<9000000>;\n{moves} ret; }}"));
    assert!(error.contains("registers of k take more than 67108864 bytes"), "{error}");
    let moves: String = (0..140_000).map(|i| format!("mov.b128 %a, {i};\n")).collect();
    let error = refused(&format!(".visible .entry k() {{ .reg .b128 %a;\n{moves} ret; }}"));
    assert!(error.contains("constants of k take more than 67108864 bytes"), "{error}");
}

#[test]
fn variables_that_are_too_large_are_refused() {
    for (what, error) in [
        (".visible .entry k() { .local .b8 x[1048576]; ret; }", "local memory of k"),
        (".visible .entry k() { .local .b8 x[4294967360]; ret; }", "local memory of k"),
        (".visible .entry k() { .local .align 2147483648 .b8 x[4]; ret; }", "alignment 2147483648 of x"),
        (".func f(.param .b8 x[4294967360]) { ret; } .visible .entry k() { ret; }", "local memory of f"),
        (".visible .entry k(.param .b8 x[4294967360]) { ret; }", "block of parameters of k"),
        (".visible .entry k(.param .b8 x[32765]) { ret; }", "block of parameters of k"),
        (
            ".extern .func (.param .b32 r) vprintf(.param .b8 f[4294967360]); .visible .entry k() { ret; }",
            "vprintf",
        ),
        (
            ".shared .b8 x[4294967360]; .visible .entry k() { .reg .b32 %r; mov.u32 %r, x; ret; }",
            "shared memory of the module",
        ),
        (".visible .entry k() { .shared .b8 x[4294967360]; ret; }", "shared memory of k"),
        (
            ".extern .shared .align 2147483648 .b8 x[]; .visible .entry k() { ret; }",
            "alignment 2147483648 of x",
        ),
        (".visible .entry k() { p: .callprototype _ (.param .b8 _[4294967360]); ret; }", "4294967360"),
    ] {
        let found = refused(what);
        assert!(found.contains(error), "{what}: {found}");
    }
    // The initial values are few, however large their variable is.
    let huge = format!("{HEAD}.global .b8 x[1099511627775] = {{1}};");
    Bench::new().gpu.check_image(huge.as_bytes()).unwrap();
}

/// Blocks use the same local memory, one after the other.
#[test]
fn local_memory_of_a_block_is_free_after_it() {
    let text = format!("{HEAD}.visible .entry k() {{ {} ret; }}", "{ .local .b8 x[65536]; }".repeat(100));
    let module = Bench::new().gpu.load_module(text.as_bytes()).unwrap();
    assert_eq!(module.functions()[0].local_bytes, 65536);
}

/// Each call of the recursion has a frame of five megabytes.
#[test]
fn a_recursion_is_limited_by_its_registers() {
    let moves: String = (0..10_000).map(|i| format!("mov.b128 %a{i}, %b;\n")).collect();
    let text = format!(
        "{HEAD}.func f() {{ .reg .b128 %a<10000>, %b;\n{moves} call f; ret; }}\n.visible .entry k() {{ call f; ret; }}"
    );
    let bench = Bench::new();
    let module = bench.gpu.load_module(text.as_bytes()).unwrap();
    let error = bench.run(&module, "k", LaunchConfig::linear(1, 1), &[]).unwrap_err().to_string();
    assert!(error.contains("stack overflow"), "{error}");
}

#[test]
fn a_directive_without_end_is_an_error() {
    for text in [
        ".func f .noreturn (",
        ".func f .noreturn (1",
        ".func .attribute(.unified(1",
        ".global .attribute(.managed",
    ] {
        assert!(refused(text).contains("PTX line 4"), "{text}");
    }
}

#[test]
fn printf_takes_any_precision_and_width() {
    let text = format!(
        "{HEAD}.extern .func (.param .b32 result) vprintf(.param .b64 format, .param .b64 values);
.global .align 1 .b8 text[14] = {{37, 46, 42, 102, 124, 37, 46, 42, 102, 124, 37, 42, 100, 0}};
.visible .entry k(.param .u64 values)
{{
    .reg .b64 %v; .param .b64 a, b; .param .b32 r;
    mov.u64 %v, text; st.param.b64 [a], %v;
    ld.param.u64 %v, [values]; st.param.b64 [b], %v;
    call (r), vprintf, (a, b);
    ret;
}}"
    );
    // "%.*f|%.*f|%*d": a negative precision counts as none.
    let bench = Bench::new();
    let module = bench.gpu.load_module(text.as_bytes()).unwrap();
    let value = 1.5f64.to_bits();
    let values = bench.upload(&[70_000, value, -3i32 as u32 as u64, value, i32::MIN as u32 as u64 | 7 << 32]);
    bench.run(&module, "k", LaunchConfig::linear(1, 1), &Params::default().u64(values).0).unwrap();
    let printed = String::from_utf8(bench.printed.lock().unwrap().clone()).unwrap();
    assert_eq!(printed, format!("1.5{}|1.500000|7{}", "0".repeat(4095), " ".repeat(4095)));
}

#[test]
fn what_is_not_known_of_constants_is_refused() {
    assert!(refused_body(".reg .pred %p; isspacep.const %p, %rd0;").contains("isspacep.const"));
    assert!(refused_body("cvt.rn.satfinite.tf32.f32 %r0, %r1;").contains("cvt.rn.satfinite.tf32.f32"));
}

/// All threads of a launch share the parameters.
#[test]
fn parameters_cannot_be_written() {
    for work in [
        "st.u32 [%rd], 5;",
        "atom.add.u32 %r, [%rd], 5;",
        "red.add.u32 [%rd], 5;",
        "st.v2.u32 [%rd], {%r, %r};",
    ] {
        let text = format!(
            "{HEAD}.visible .entry k(.param .align 8 .b8 p[8]) {{ .reg .b64 %rd; .reg .b32 %r; mov.u64 %rd, p; cvta.param.u64 %rd, %rd;\n\
             ld.u32 %r, [%rd]; {work} ret; }}"
        );
        let bench = Bench::new();
        let module = bench.gpu.load_module(text.as_bytes()).unwrap();
        let error = bench.run(&module, "k", LaunchConfig::linear(1, 1), &[1; 8]).unwrap_err();
        assert_eq!(error.cuda_code(), 700, "{work}: {error}");
    }
}

#[test]
fn a_result_without_size_is_refused() {
    let call = "p: .callprototype (.param .b8 _[]) _ (); call (_), %rd0, (), p;";
    assert!(refused_body(call).contains("this kind of result"));
}

/// Looking for the family of such a register must not look at each of its digits.
#[test]
fn a_register_with_a_very_long_number_does_not_exist() {
    let name = format!("%r{}", "1".repeat(1 << 20));
    assert!(refused_body(&format!("mov.u32 {name}, 1;")).contains("no register"));
}
