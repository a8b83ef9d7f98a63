//! Images that programs load: fat binaries, compressed or not, and files to be linked.

#![allow(clippy::unwrap_used)]

mod common;

use common::Bench;
use software_gpu::LaunchConfig;

const PTX: u16 = 1;
const MACHINE_CODE: u16 = 2;
const LZ4: u64 = 0x2000;

/// A fat binary's entry: kind, architecture, flags, size of the decompressed payload in bytes, payload.
fn entry(kind: u16, arch: u32, flags: u64, unpacked: u64, payload: &[u8]) -> Vec<u8> {
    let length = payload.len().next_multiple_of(8);
    let mut e = vec![0u8; 0x40];
    e[0..2].copy_from_slice(&kind.to_le_bytes());
    e[4..8].copy_from_slice(&0x40u32.to_le_bytes());
    e[8..16].copy_from_slice(&(length as u64).to_le_bytes());
    e[0x10..0x14].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    e[0x1c..0x20].copy_from_slice(&arch.to_le_bytes());
    e[0x28..0x30].copy_from_slice(&flags.to_le_bytes());
    e[0x38..0x40].copy_from_slice(&unpacked.to_le_bytes());
    e.extend_from_slice(payload);
    e.resize(0x40 + length, 0);
    e
}

fn container(entries: &[Vec<u8>]) -> Vec<u8> {
    let body = entries.concat();
    let mut c = Vec::new();
    c.extend(0xba55_ed50u32.to_le_bytes());
    c.extend(1u16.to_le_bytes());
    c.extend(16u16.to_le_bytes());
    c.extend((body.len() as u64).to_le_bytes());
    c.extend(body);
    c
}

const HEAD: &str = ".version 7.8\n.target sm_80\n.address_size 64\n";

/// A kernel that stores a number.
fn stores(n: u32) -> String {
    format!(
        "{HEAD}.visible .entry k(.param .u64 out) {{ .reg .b64 %o; ld.param.u64 %o, [out]; st.global.u32 [%o], {n}; ret; }}"
    )
}

fn answer(image: &[u8]) -> u32 {
    let bench = Bench::new();
    let module = bench.gpu.load_module(image).unwrap();
    let out = bench.upload(&[0u32]);
    bench.run(&module, "k", LaunchConfig::linear(1, 1), &out.to_le_bytes()).unwrap();
    bench.download::<u32>(out, 1)[0]
}

#[test]
fn ptx_compressed_with_lz4_is_unpacked() {
    let text = stores(7);
    let packed = lz4_flex::block::compress(text.as_bytes());
    assert_eq!(answer(&container(&[entry(PTX, 80, LZ4, text.len() as u64, &packed)])), 7);
}

#[test]
fn the_newest_usable_ptx_is_taken() {
    let entries: Vec<_> = [(75, 1), (90, 2), (80, 3), (100, 4)]
        .map(|(arch, n)| entry(PTX, arch, 0, 0, stores(n).as_bytes()))
        .into();
    assert_eq!(answer(&container(&entries)), 2);
}

#[test]
fn damaged_images_are_errors() {
    let bench = Bench::new();
    let text = stores(7);
    let packed = lz4_flex::block::compress(text.as_bytes());
    let good = container(&[entry(PTX, 80, LZ4, text.len() as u64, &packed)]);
    for n in 0..good.len() - 8 {
        assert!(bench.gpu.load_module(&good[..n]).is_err(), "cut at {n}");
    }
    assert!(bench.gpu.load_module(&container(&[entry(PTX, 80, LZ4, 5, &packed)])).is_err());
}

const FIRST: &str = "
.extern .func (.param .b32 r) twice(.param .b32 x);
.extern .global .u32 base;
.global .u32 own = 100;
.weak .func (.param .b32 r) same() { st.param.b32 [r], 1000; ret; }
.visible .entry k(.param .u64 out)
{
    .reg .b64 %o; .reg .b32 %a, %b;
    { .param .b32 p; .param .b32 q; mov.u32 %a, 21; st.param.b32 [p], %a; call.uni (q), twice, (p); ld.param.b32 %a, [q]; }
    { .param .b32 q; call.uni (q), same, (); ld.param.b32 %b, [q]; }
    add.u32 %a, %a, %b;
    ld.global.u32 %b, [base];
    add.u32 %a, %a, %b;
    ld.global.u32 %b, [own];
    add.u32 %a, %a, %b;
    ld.param.u64 %o, [out];
    st.global.u32 [%o], %a;
    ret;
}
";

const SECOND: &str = "
.visible .global .u32 base = 10000;
.global .u32 own = 5;
.weak .func (.param .b32 r) same() { st.param.b32 [r], 77777; ret; }
.visible .func (.param .b32 r) twice(.param .b32 x)
{
    .reg .b32 %x, %y;
    ld.param.b32 %x, [x];
    ld.global.u32 %y, [own];
    mad.lo.u32 %x, %x, 2, %y;
    st.param.b32 [r], %x;
    ret;
}
";

#[test]
fn containers_after_linked_machine_code_are_linked_by_name() {
    let piece = |text: &str| container(&[entry(PTX, 80, 0, 0, format!("{HEAD}{text}").as_bytes())]);
    let linked = container(&[entry(MACHINE_CODE, 90, 0, 0, &[0x7f; 40])]);
    // 21 * 2 + the second file's own 5, + the first `same`, + base, + the first file's own 100.
    assert_eq!(answer(&[linked, piece(FIRST), piece(SECOND)].concat()), 47 + 1000 + 10000 + 100);
}

#[test]
fn undefined_and_duplicate_symbols_are_named_in_the_error() {
    let bench = Bench::new();
    let piece = |text: &str| container(&[entry(PTX, 80, 0, 0, format!("{HEAD}{text}").as_bytes())]);
    let linked = container(&[entry(MACHINE_CODE, 90, 0, 0, &[0x7f; 40])]);
    let load = |pieces: &[Vec<u8>]| {
        let image = [std::slice::from_ref(&linked), pieces].concat().concat();
        bench.gpu.load_module(&image).err().map(|e| e.to_string()).unwrap_or_default()
    };
    assert!(load(&[piece(FIRST)]).contains("external variable base is not defined"));
    let without = FIRST.replace(".extern .global .u32 base;", ".global .u32 base;");
    assert!(load(&[piece(&without)]).contains("no symbol twice"));
    assert!(load(&[piece(FIRST), piece(SECOND), piece(SECOND)]).contains("base is defined twice"));
}

#[test]
fn images_are_linked_together_and_can_be_checked_alone() {
    let bench = Bench::new();
    let [first, second] = [FIRST, SECOND].map(|text| format!("{HEAD}{text}"));
    for good in [&first, &second] {
        bench.gpu.check_image(good.as_bytes()).unwrap();
    }
    let wrong = first.replace("add.u32 %a, %a, %b;", "add.u32 %a, %a;");
    assert!(bench.gpu.check_image(wrong.as_bytes()).is_err());
    assert!(bench.gpu.link_module(&[first.as_bytes()]).is_err());
    let module = bench.gpu.link_module(&[first.as_bytes(), second.as_bytes()]).unwrap();
    let out = bench.upload(&[0u32]);
    bench.run(&module, "k", LaunchConfig::linear(1, 1), &out.to_le_bytes()).unwrap();
    assert_eq!(bench.download::<u32>(out, 1), [47 + 1000 + 10000 + 100]);
}

#[test]
fn words_are_found_in_compressed_and_plain_images() {
    use software_gpu::mentions;
    let ptx = b".version 8.0\n.target sm_80\n.extern .func vprintf;\n".to_vec();
    assert_eq!(mentions(&ptx, 90, b"vprintf", 1 << 20), Some(true));
    assert_eq!(mentions(&ptx, 90, b"__assertfail", 1 << 20), Some(false));
    assert_eq!(mentions(&ptx, 90, b"vprintf", 10), None);
    assert_eq!(mentions(b"", 90, b"vprintf", 10), None);

    let packed = lz4_flex::block::compress(&ptx);
    let other = entry(MACHINE_CODE, 90, 0, 0, b"nothing of it");
    let image = container(&[other.clone(), entry(PTX, 80, LZ4, ptx.len() as u64, &packed)]);
    assert_eq!(mentions(&image, 90, b"vprintf", 1 << 20), Some(true));
    assert_eq!(mentions(&image, 75, b"vprintf", 1 << 20), Some(false), "newer than the GPU");
    assert_eq!(mentions(&image, 90, b"vprintf", 20), None, "too long");
    let older = container(&[other, entry(MACHINE_CODE, 75, 0, 0, b"vprintf")]);
    assert_eq!(mentions(&older, 90, b"vprintf", 1 << 20), Some(false), "machine code of another generation");
}
