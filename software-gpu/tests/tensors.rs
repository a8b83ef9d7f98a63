//! Copies of tiles by tensor maps passed by value.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Bench, Params};
use software_gpu::{Error, Fault, LaunchConfig, TensorMap};

/// A kernel with a map, an address and two coordinates. `%s` is the tile's shared address; `size` bytes of
/// the tile are copied to or from the address.
fn kernel(name: &str, work: &str) -> String {
    format!(
        ".version 8.6\n.target sm_90\n.address_size 64\n.visible .entry {name}(.param .align 64 .b8 map[128], .param .u64 p, .param .u32 x, .param .u32 y, .param .u32 s)\n{{\n \
         .reg .b64 %m, %p, %a, %b;\n .reg .b32 %x, %y, %s, %t, %v, %g;\n .reg .pred %q, %f;\n \
         .shared .align 1024 .b8 tile[2048];\n .shared .align 8 .b64 gate;\n \
         mov.b64 %m, map;\n cvta.param.u64 %m, %m;\n ld.param.u64 %p, [p];\n ld.param.u32 %x, [x];\n ld.param.u32 %y, [y];\n \
         ld.param.u32 %v, [s];\n mov.u32 %s, tile;\n add.u32 %s, %s, %v;\n mov.u32 %g, gate;\n mov.u32 %t, %tid.x;\n setp.eq.u32 %f, %t, 0;\n \
         mul.lo.u32 %v, %t, 4;\n cvt.u64.u32 %a, %v;\n add.u64 %p, %p, %a;\n add.u32 %v, %v, %s;\n {work}\n ret;\n}}\n"
    )
}

const LOAD: &str = "@%f mbarrier.init.shared.b64 [%g], 1;\n bar.sync 0;\n @%f mbarrier.arrive.expect_tx.shared.b64 _, [%g], 512;\n \
     @%f cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%s], [%m, {%x, %y}], [%g];\n \
     W:\n mbarrier.try_wait.parity.shared.b64 %q, [%g], 0;\n @!%q bra W;\n ld.shared.b32 %t, [%v];\n st.global.b32 [%p], %t;";

fn store(instruction: &str) -> String {
    format!(
        "ld.global.b32 %t, [%p];\n st.shared.b32 [%v], %t;\n fence.proxy.async.shared::cta;\n bar.sync 0;\n \
         @%f {instruction}.bulk_group [%m, {{%x, %y}}], [%s];\n cp.async.bulk.commit_group;\n cp.async.bulk.wait_group.read 0;"
    )
}

/// 20 rows of 40 words, in tiles of 8 rows by 16 words.
fn map(address: u64, swizzle: u32, data_type: u32) -> TensorMap {
    TensorMap {
        data_type,
        rank: 2,
        address,
        sizes: [40, 20, 0, 0, 0],
        strides: [160, 0, 0, 0],
        tile: [16, 8, 1, 1, 1],
        steps: [1; 5],
        swizzle,
    }
}

/// Runs the kernel for `work` at given coordinates with 128 threads.
fn run(b: &Bench, work: &str, map: &[u8; 128], p: u64, [x, y]: [i32; 2], shift: i32) -> Result<(), Error> {
    let module = b.gpu.load_module(kernel("k", work).as_bytes())?;
    let mut params = Params(map.to_vec()).u64(p).i32(x).i32(y);
    params = params.i32(shift);
    b.run(&module, "k", LaunchConfig::linear(1, 128), &params.0)
}

#[test]
fn elements_outside_the_tensor_load_as_zero() {
    let b = Bench::new();
    let tensor: Vec<u32> = (1..=800).collect();
    let (from, to) = (b.upload(&tensor), b.upload(&[0u32; 128]));
    for (x, y) in [(0, 0), (28, 15), (-4, -2), (40, 0), (0, 20)] {
        run(&b, LOAD, &map(from, 0, 2).encode().unwrap(), to, [x, y], 0).unwrap();
        let got: Vec<u32> = b.download(to, 128);
        for (n, got) in got.iter().enumerate() {
            let (u, v) = (x + n as i32 % 16, y + n as i32 / 16);
            let inside = (0..40).contains(&u) && (0..20).contains(&v);
            let want = if inside { tensor[(v * 40 + u) as usize] } else { 0 };
            assert_eq!(*got, want, "element {n} of the tile at {x},{y}");
        }
    }
}

#[test]
fn a_swizzled_tile_is_stored_as_loaded() {
    let b = Bench::new();
    let tensor: Vec<u32> = (1..=800).collect();
    let (from, tile, to) = (b.upload(&tensor), b.upload(&[0u32; 128]), b.upload(&[0u32; 800]));
    run(&b, LOAD, &map(from, 2, 2).encode().unwrap(), tile, [8, 4], 0).unwrap();
    let lies: Vec<u32> = b.download(tile, 128);
    // In the third row, the first sixteen bytes hold the second sixteen of its 64.
    assert_eq!((lies[0], lies[32 + 4]), (tensor[4 * 40 + 8], tensor[6 * 40 + 8]));
    let work = store("cp.async.bulk.tensor.2d.global.shared::cta.tile");
    run(&b, &work, &map(to, 2, 2).encode().unwrap(), tile, [8, 4], 0).unwrap();
    let got: Vec<u32> = b.download(to, 800);
    for (n, got) in got.iter().enumerate() {
        let inside = (8..24).contains(&(n % 40)) && (4..12).contains(&(n / 40));
        assert_eq!(*got, if inside { tensor[n] } else { 0 }, "element {n}");
    }
}

#[test]
fn a_reduction_uses_the_map_s_type() {
    let b = Bench::new();
    let tile: Vec<f32> = (0..128).map(|n| n as f32).collect();
    let (tile, to) = (b.upload(&tile), b.upload(&[0.5f32; 800]));
    let work = store("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile");
    for _ in 0..2 {
        run(&b, &work, &map(to, 0, 7).encode().unwrap(), tile, [36, 19], 0).unwrap();
    }
    let got: Vec<f32> = b.download(to, 800);
    assert_eq!(got[795..], [0.5, 0.5, 2.5, 4.5, 6.5]);
    let wrong = run(
        &b,
        &store("cp.reduce.async.bulk.tensor.2d.global.shared::cta.xor.tile"),
        &map(to, 0, 7).encode().unwrap(),
        tile,
        [0, 0],
        0,
    );
    assert!(matches!(wrong, Err(Error::Kernel { fault: Fault::IllegalInstruction(_), .. })), "{wrong:?}");
}

#[test]
fn an_invalid_map_and_an_unaligned_tile_are_faults() {
    let tensor = [0u32; 800];
    let b = Bench::new();
    let at = b.upload(&tensor);
    let wrong = run(&b, LOAD, &[7; 128], at, [0, 0], 0);
    assert!(matches!(wrong, Err(Error::Kernel { fault: Fault::IllegalInstruction(_), .. })), "{wrong:?}");
    let b = Bench::new();
    let at = b.upload(&tensor);
    let wrong = run(&b, LOAD, &map(at, 0, 2).encode().unwrap(), at, [0, 0], 64);
    assert!(matches!(wrong, Err(Error::Kernel { fault: Fault::IllegalInstruction(_), .. })), "{wrong:?}");
}

#[test]
fn a_tensor_that_is_not_allocated_is_an_illegal_address() {
    let b = Bench::new();
    let at = b.upload(&[0u32; 128]);
    let wrong = run(&b, LOAD, &map(0x7000_0000_0000, 0, 2).encode().unwrap(), at, [0, 0], 0);
    assert!(matches!(wrong, Err(Error::Kernel { fault: Fault::IllegalAddress { .. }, .. })), "{wrong:?}");
}

/// Outside its tensor, such a store would touch no memory, but take minutes.
#[test]
fn a_tile_larger_than_shared_memory_is_a_fault() {
    for work in [LOAD, &store("cp.async.bulk.tensor.2d.global.shared::cta.tile")] {
        let b = Bench::new();
        let at = b.upload(&[0u32; 800]);
        let large = TensorMap { tile: [256, 256, 1, 1, 1], ..map(at, 0, 2) };
        let wrong = run(&b, work, &large.encode().unwrap(), at, [1000, 1000], 0);
        assert!(matches!(wrong, Err(Error::Kernel { fault: Fault::IllegalInstruction(_), .. })), "{wrong:?}");
    }
}

#[test]
fn tiles_begin_at_multiples_of_sixteen_bytes_and_stores_inside_the_tensor() {
    let tensor = [0u32; 800];
    let store = store("cp.async.bulk.tensor.2d.global.shared::cta.tile");
    let refused = [
        (LOAD, [1, 0]),
        (LOAD, [-2, 0]),
        (LOAD, [50, 0]),
        (&store, [2, 0]),
        (&store, [-4, 0]),
        (&store, [0, -1]),
    ];
    for (work, place) in refused {
        let b = Bench::new();
        let at = b.upload(&tensor);
        let wrong = run(&b, work, &map(at, 0, 2).encode().unwrap(), at, place, 0);
        assert!(
            matches!(wrong, Err(Error::Kernel { fault: Fault::IllegalInstruction(_), .. })),
            "{place:?}: {wrong:?}"
        );
    }
    let b = Bench::new();
    let at = b.upload(&tensor);
    run(&b, &store, &map(at, 0, 2).encode().unwrap(), at, [44, 19], 0).unwrap();
}

#[test]
fn a_store_writes_all_of_the_last_sixteen_bytes_of_a_row() {
    let b = Bench::new();
    let (tile, to) = (b.upload(&[9u32; 128]), b.upload(&[1u32; 800]));
    let narrower = |size| TensorMap { sizes: [size, 20, 0, 0, 0], ..map(to, 0, 2) };
    run(
        &b,
        &store("cp.async.bulk.tensor.2d.global.shared::cta.tile"),
        &narrower(37).encode().unwrap(),
        tile,
        [32, 19],
        0,
    )
    .unwrap();
    let got: Vec<u32> = b.download(to, 800);
    assert_eq!(got[..792], [1; 792]);
    assert_eq!(got[792..], [9; 8]);
    run(
        &b,
        &store("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile"),
        &narrower(34).encode().unwrap(),
        tile,
        [32, 19],
        0,
    )
    .unwrap();
    let got: Vec<u32> = b.download(to, 800);
    assert_eq!(got[788..], [1, 1, 1, 1, 18, 18, 18, 18, 9, 9, 9, 9]);
    // A load stops at the end of the row.
    run(&b, LOAD, &narrower(37).encode().unwrap(), tile, [32, 19], 0).unwrap();
    let got: Vec<u32> = b.download(tile, 128);
    assert_eq!(got[..8], [18, 18, 18, 18, 9, 0, 0, 0]);
}
