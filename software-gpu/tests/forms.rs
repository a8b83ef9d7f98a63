//! Forms of instructions that CUDA's headers use and that were once refused.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Bench, answer};
use software_gpu::LaunchConfig;

#[test]
fn byte_differences_are_computed_side_by_side() {
    assert_eq!(answer("vabsdiff4.u32.u32.u32 %d, %a, %b, %c;", [0x01ff_0080, 0x0300_017f, 9]), 0x02ff_0101);
    assert_eq!(answer("vabsdiff4.u32.u32.u32.add %d, %a, %b, %c;", [0x01ff_0080, 0x0300_017f, 9]), 9 + 259);
    assert_eq!(answer("vset2.s32.s32.gt %d, %a, %b, %c;", [0x0001_8000, 0xffff_7fff, 0]), 0x0001_0000);
}

#[test]
fn halves_are_compared_side_by_side() {
    // 1 and NaN against 1 and NaN.
    let values = [0x3c00_7e00, 0x3c00_7e00, 0];
    assert_eq!(answer("set.eq.f16x2.f16x2 %d, %a, %b;", values), 0x3c00_0000);
    assert_eq!(answer("set.neu.f16x2.f16x2 %d, %a, %b;", values), 0x0000_3c00);
    assert_eq!(answer("set.le.u32.f16x2 %d, %a, %b;", values), 0xffff_0000);
    assert_eq!(answer("set.gt.bf16x2.bf16x2 %d, %a, %b;", [0x4000_3f80, 0x3f80_4000, 0]), 0x3f80_0000);
}

#[test]
fn relu_may_follow_the_type() {
    for form in ["max.relu.s16x2", "max.s16x2.relu"] {
        assert_eq!(answer(&format!("{form} %d, %a, %b;"), [0xffff_0003, 0xfffe_0002, 0]), 0x0000_0003);
    }
}

#[test]
fn relu_may_be_between_the_types_of_a_conversion() {
    for form in ["cvt.rn.relu.bf16x2.f32", "cvt.rn.bf16x2.relu.f32"] {
        let values = [(-1f32).to_bits(), 2f32.to_bits(), 0];
        assert_eq!(answer(&format!("{form} %d, %a, %b;"), values), 0x0000_4000);
    }
}

#[test]
fn the_flag_of_a_subtraction_is_a_carry() {
    // The flag that 128-bit division uses: set when nothing was borrowed.
    let flag = "sub.cc.u32 %d, %a, %b; addc.u32 %d, 0, 0;";
    assert_eq!(answer(flag, [5, 5, 0]), 1);
    assert_eq!(answer(flag, [5, 6, 0]), 0);
    let borrow = "sub.cc.u32 %d, %a, %b; subc.u32 %d, %c, 0;";
    assert_eq!(answer(borrow, [5, 5, 7]), 7);
    assert_eq!(answer(borrow, [5, 6, 7]), 6);
    let both = "add.cc.u32 %d, %a, %b; subc.u32 %d, %c, 0;";
    assert_eq!(answer(both, [u32::MAX, 1, 7]), 7);
    assert_eq!(answer(both, [1, 1, 7]), 6);
}

#[test]
fn rsqrt_of_f64_has_full_precision() {
    for x in [2.0f64, 3.0, 1e-300, 5e-324, 1.7e308, 0.1, 18.9911537] {
        let bits = x.to_bits();
        let work = "{.reg .f64 %x; mov.b64 %x, {%a, %b}; rsqrt.approx.f64 %x, %x; .reg .b32 %h; mov.b64 {%d, %h}, %x; \
             @!%q mov.b32 %d, %h; }";
        let half = |high: bool| {
            let test = if high { "setp.ne.u32 %q, 0, 0;" } else { "setp.eq.u32 %q, 0, 0;" };
            answer(&format!(".reg .pred %q; {test} {work}"), [bits as u32, (bits >> 32) as u32, 0])
        };
        let got = f64::from_bits(u64::from(half(true)) << 32 | u64::from(half(false)));
        let want = 1.0 / x.sqrt();
        assert!((got - want).abs() <= want * 2.0 * f64::EPSILON, "{x}: {got:e}, not {want:e}");
    }
}

#[test]
fn ftz_may_follow_the_type() {
    // As in cuRAND's headers. With it, a subnormal counts as 0.
    let root = |form: &str| f32::from_bits(answer(&format!("{form} %d, %a;"), [1, 0, 0]));
    for op in ["rcp", "rsqrt"] {
        assert_eq!(root(&format!("{op}.approx.f32.ftz")), f32::INFINITY);
        assert_eq!(root(&format!("{op}.approx.ftz.f32")), f32::INFINITY);
    }
    assert_eq!(root("lg2.approx.f32.ftz"), f32::NEG_INFINITY);
    assert_eq!(root("lg2.approx.f32"), -149.0);
    assert_eq!(root("ex2.approx.f32.ftz"), 1.0);
}

#[test]
fn elements_of_arrays_are_counted_in_their_size() {
    let work = ".shared .align 8 .b8 before[8]; .shared .align 8 .b64 list[4]; .reg .b64 %s, %l;\n \
                mov.u64 %s, list[0]; st.shared.b64 [%s], 5; mov.u64 %s, list[2]; st.shared.b64 [%s], 6;\n \
                mov.u64 %s, list[%a]; st.shared.b64 [%s+0], 7; st.shared.b64 list[%a+2], 8; ";
    for (read, expected) in [("list", 5), ("list+16", 6), ("list+8", 7), ("list+24", 8)] {
        let work = format!("{work} ld.shared.b32 %d, [{read}];");
        assert_eq!(answer(&work, [1, 0, 0]), expected, "{read}");
    }
    // Another scope's variable of that name has elements of another size.
    let work = format!(
        "{work} {{ .local .b8 list[8]; mov.u64 %l, list[1]; }} cvt.u64.u32 %l, %b; ld.shared.b32 %d, list[%l];"
    );
    assert_eq!(answer(&work, [1, 2, 0]), 6);
}

/// NVRTC loads three numbers at the end of an array as four, and says which bytes it needs.
#[test]
fn bytes_that_a_load_does_not_need_may_be_beyond_the_memory() {
    let text = ".version 8.3\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 o)\n{\n .reg .b64 %o, %e;\n \
                .reg .f32 %f<4>;\n ld.param.u64 %o, [o];\n .pragma \"used_bytes_mask 3855\";\n \
                ld.global.v4.f32 {%f0, %f1, %f2, %f3}, [%o];\n add.f32 %f0, %f0, %f2;\n st.global.f32 [%o], %f0;\n \
                .pragma \"used_bytes_mask 255\";\n ld.global.v2.b64 {%o, %e}, [%o];\n ret;\n}\n";
    let bench = Bench::new();
    let module = bench.gpu.load_module(text.as_bytes()).unwrap();
    let out = bench.upload(&[1f32, 2.0, 3.0]);
    bench.run(&module, "k", LaunchConfig::linear(1, 1), &out.to_le_bytes()).unwrap();
    assert_eq!(bench.download::<f32>(out, 3), [4.0, 2.0, 3.0]);
}

#[test]
fn an_index_has_no_index() {
    let nested = format!("mov.u64 %o, {}0{};", "list[".repeat(1 << 20), "]".repeat(1 << 20));
    let text = format!(
        ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k()\n{{\n .reg .b64 %o;\n .shared .b8 list[8];\n {nested}\n ret;\n}}\n"
    );
    assert!(Bench::new().gpu.load_module(text.as_bytes()).is_err());
}

/// The memory after `work` on it, a kernel with `%o` as its address and `%f0` to `%f3` as 1 to 4.
fn changed<T: Copy + Default>(memory: &[T], work: &str) -> Vec<T> {
    let text = format!(
        ".version 8.3\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 o)\n{{\n .reg .b64 %o;\n .reg .f32 %f<8>;\n \
         .reg .b16 %h<8>;\n .reg .b32 %r<8>;\n ld.param.u64 %o, [o];\n mov.f32 %f0, 1.0;\n mov.f32 %f1, 2.0;\n mov.f32 %f2, 3.0;\n \
         mov.f32 %f3, 4.0;\n mov.b16 %h0, 0x3f80;\n mov.b16 %h1, 0x4000;\n {work}\n ret;\n}}\n"
    );
    let bench = Bench::new();
    let module = bench.gpu.load_module(text.as_bytes()).unwrap();
    let at = bench.upload(memory);
    bench.run(&module, "k", LaunchConfig::linear(1, 1), &at.to_le_bytes()).unwrap();
    bench.download(at, memory.len())
}

#[test]
fn the_operation_of_a_vector_follows_its_type() {
    let memory = [10f32, 20.0, 30.0, 40.0];
    for work in [
        "red.global.v4.f32.add [%o], {%f0, %f1, %f2, %f3};",
        "red.global.add.v4.f32 [%o], {%f0, %f1, %f2, %f3};",
    ] {
        assert_eq!(changed(&memory, work), [11.0, 22.0, 33.0, 44.0], "{work}");
    }
    let work = "atom.global.v2.f32.add {%f4, %f5}, [%o], {%f0, %f1}; st.global.v2.f32 [%o+8], {%f4, %f5};";
    assert_eq!(changed(&memory, work), [11.0, 22.0, 10.0, 20.0]);
    let work = "red.global.v2.bf16.add.noftz [%o], {%h0, %h1};";
    assert_eq!(changed(&[0x3f80u16, 0x3f80], work), [0x4000, 0x4040]);
    // 1 and 2 are added, whatever the registers become.
    let work = "atom.global.v2.f32.add {%f1, %f0}, [%o], {%f0, %f1}; st.global.v2.f32 [%o+8], {%f1, %f0};";
    assert_eq!(changed(&memory, work), [11.0, 22.0, 10.0, 20.0]);
}

#[test]
fn both_halves_of_a_comparison_read_the_same_predicate() {
    // The lower half is not less, the upper half is.
    let compare = |with: &str| {
        let work = format!(
            ".reg .pred %p, %q; setp.ne.u32 %p, %c, 0; setp.ne.u32 %q, %c, 0; setp.lt.and.f16x2 %p|%q, %a, %b, {with}; \
             selp.u32 %a, 1, 0, %p; selp.u32 %b, 2, 0, %q; add.u32 %d, %a, %b;"
        );
        answer(&work, [0x3c00_4000, 0x4000_3c00, 1])
    };
    assert_eq!([compare("%p"), compare("%q")], [2, 2]);
}

#[test]
fn conversions_that_saturate_stay_finite() {
    let tf32 = |x: f32| answer("cvt.rna.satfinite.tf32.f32 %d, %a;", [x.to_bits(), 0, 0]);
    assert_eq!([tf32(f32::INFINITY), tf32(f32::MIN), tf32(1.5)], [0x7f7f_e000, 0xff7f_e000, 0x3fc0_0000]);
    let narrow = |form: &str, x: f32, y: f32| {
        answer(&format!("cvt.{form} %d, %a, %b;"), [x.to_bits(), y.to_bits(), 0])
    };
    assert_eq!(narrow("rn.satfinite.f16x2.f32", 1e6, -1e6), 0x7bff_fbff);
    assert_eq!(narrow("rz.satfinite.f16x2.f32", f32::INFINITY, 1.0), 0x7bff_3c00);
    assert_eq!(narrow("rn.relu.satfinite.f16x2.f32", f32::NEG_INFINITY, f32::NAN), 0x0000_7fff);
    assert_eq!(narrow("rn.satfinite.bf16x2.f32", f32::MAX, f32::NEG_INFINITY), 0x7f7f_ff7f);
    let one = |form: &str, x: f32| {
        answer(&format!(".reg .b16 %h; cvt.{form} %h, %a; cvt.u32.u16 %d, %h;"), [x.to_bits(), 0, 0])
    };
    assert_eq!([one("rn.satfinite.f16.f32", 7e4), one("rn.satfinite.relu.f16.f32", -7e4)], [0x7bff, 0]);
    assert_eq!(
        [one("rz.satfinite.bf16.f32", -f32::INFINITY), one("rn.satfinite.bf16.f32", 1.0)],
        [0xff7f, 0x3f80]
    );
}

#[test]
fn hints_about_the_cache_have_no_effect() {
    let work = ".reg .b64 %p; createpolicy.cvt.L2.b64 %p, %o; cp.async.bulk.prefetch.L2.global [%o], 16; \
                cp.async.bulk.prefetch.L2.global.L2::cache_hint [%o], 32, %p; st.global.u32 [%o], 5;";
    assert_eq!(changed(&[0u32; 8], work)[0], 5);
}

#[test]
fn an_asynchronous_copy_may_ignore_its_source() {
    let copy = |ignore: &str| {
        let work = format!(
            ".shared .align 16 .b8 s[16]; .reg .pred %p; .reg .b32 %s; mov.u32 %s, s; setp.eq.u32 %p, 0, 0;
             cp.async.ca.shared.global [%s], [%o], 8, {ignore}; cp.async.wait_all; ld.shared.u32 %r0, [s+4]; st.global.u32 [%o], %r0;"
        );
        changed(&[5u32, 6], &work)[0]
    };
    assert_eq!([copy("%p"), copy("!%p")], [0, 6]);
}

#[test]
fn a_mask_of_needed_bytes_may_be_hexadecimal_and_of_a_single_number() {
    let work = ".pragma \"used_bytes_mask 0xfff\"; ld.global.v4.f32 {%f4, %f5, %f6, %f7}, [%o]; add.f32 %f4, %f4, %f6; st.global.f32 [%o], %f4;";
    assert_eq!(changed(&[1f32, 2.0, 3.0], work), [4.0, 2.0, 3.0]);
    let work = ".pragma \"used_bytes_mask 0x7\"; ld.global.u32 %r0, [%o]; st.global.u8 [%o], 9; shr.u32 %r0, %r0, 16; \
                st.global.u8 [%o+1], %r0;";
    assert_eq!(changed(&[1u8, 2, 3], work), [9, 3, 3]);
    let work = ".pragma \"used_bytes_mask 0x7f\"; ld.global.v2.u32 {%r0, %r1}, [%o]; shr.u32 %r1, %r1, 16; st.global.u8 [%o], %r1;";
    assert_eq!(changed(&[1u8, 2, 3, 4, 5, 6, 7], work), [7, 2, 3, 4, 5, 6, 7]);
    let work = ".pragma \"used_bytes_mask 0x1f\"; ld.global.u64 %o, [%o]; cvt.u32.u64 %r0, %o; st.shared.u32 [s], %r0;";
    assert_eq!(changed(&[1u8, 2, 3, 4, 5], &format!(".shared .b32 s; {work}")), [1, 2, 3, 4, 5]);
}

#[test]
fn constants_may_be_expressions() {
    for (text, value) in [
        ("1<<4", 16),
        ("(1 + 2) * 3", 9),
        ("1 + 2 * 3 - -4", 11),
        ("~0 & 0xf0 | 1 ^ 3", 0xf2),
        ("100/7", 14),
        ("WARP_SZ - 1", 31),
        ("-WARP_SZ + 33", 1),
        ("2 > 1 ? 5 : 6", 5),
        ("!0 + (.s64) 3", 4),
        ("1 == 2 || 3 != 4 && 1", 1),
        ("0x10 >> 2", 4),
    ] {
        assert_eq!(answer(&format!("mov.u32 %d, {text};"), [0; 3]), value, "{text}");
    }
    let work = ".shared .b8 b[4*4 + (1<<4)]; .reg .b32 %s; mov.u32 %s, b; st.shared.u32 [%s+16+8-4], 7; \
                ld.shared.u32 %d, [b+2*10];";
    assert_eq!(answer(work, [0; 3]), 7);
    let refused = |text: &str| {
        let text = format!(
            ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k() {{ .reg .b32 %d; mov.u32 %d, {text}; ret; }}"
        );
        Bench::new().gpu.load_module(text.as_bytes()).err().unwrap().to_string()
    };
    assert!(refused("1/0").contains("cannot evaluate"));
    assert!(refused("1 << 64").contains("cannot evaluate"));
    assert!(refused(&"-".repeat(1 << 20)).contains("nested too deeply"));
    assert!(refused(&"(".repeat(1 << 20)).contains("nested too deeply"));
    assert!(refused(&"1?1:".repeat(1 << 20)).contains("nested too deeply"));
}
