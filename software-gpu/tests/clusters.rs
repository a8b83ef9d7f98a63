//! Clusters of blocks and the heap of kernels' `malloc`, in programs compiled by nvcc.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Bench, Params, shape};
use software_gpu::{Error, Fault, LaunchConfig, Module};

fn both(test: impl Fn(&Bench, &Module)) {
    for text in
        [include_bytes!("ptx/clusters.ptx").as_slice(), include_bytes!("ptx/clusters.O0.ptx").as_slice()]
    {
        let bench = Bench::new();
        let module = bench.gpu.load_module(text).unwrap();
        test(&bench, &module);
    }
}

fn of(cluster: [u32; 3], config: LaunchConfig) -> LaunchConfig {
    LaunchConfig { cluster: Some(cluster), ..config }
}

#[test]
fn cluster_registers_report_a_block_s_position() {
    both(|b, m| {
        let (grid, size) = ([4, 6, 2], [2, 3, 1]);
        let out = b.upload(&[0u32; 16 * 48]);
        b.run(m, "places", of(size, shape(grid, [2, 1, 1])), &out.to_le_bytes()).unwrap();
        let got: Vec<u32> = b.download(out, 16 * 48);
        for (n, got) in got.chunks(16).enumerate() {
            let n = n as u32;
            let at = [n % 4, n / 4 % 6, n / 24];
            let inside: [u32; 3] = std::array::from_fn(|i| at[i] % size[i]);
            let rank = inside[0] + 2 * inside[1];
            let mut want: Vec<u32> = (0..3).map(|i| at[i] / size[i]).collect();
            want.extend((0..3).map(|i| grid[i] / size[i]));
            want.extend(inside);
            want.extend(size);
            want.extend([rank, 6, 2 * rank + 1, 1]);
            assert_eq!(got, want, "block {at:?}");
        }
        b.run(m, "places", shape([3, 1, 1], [2, 1, 1]), &out.to_le_bytes()).unwrap();
        let alone: Vec<u32> = b.download(out, 16 * 3);
        assert_eq!(alone[32..48], [2, 0, 0, 3, 1, 1, 0, 0, 0, 1, 1, 1, 0, 1, 1, 0]);
    });
}

#[test]
fn a_histogram_spans_the_shared_memory_of_all_blocks() {
    both(|b, m| {
        let data: Vec<u32> = (0..20_000u32).map(|i| i.wrapping_mul(2_654_435_761) >> 20 & 1023).collect();
        for size in [1, 2, 4, 8, 16] {
            let (bins, input) = (b.upload(&[0u32; 1024]), b.upload(&data));
            let each = 1024 / size;
            let p = Params::default().u64(bins).u64(input).i32(data.len() as i32).i32(each as i32);
            let config = LaunchConfig { dynamic_shared: each * 4, ..LaunchConfig::linear(32, 96) };
            b.run(m, "histogram", of([size, 1, 1], config), &p.0).unwrap();
            let mut want = vec![0u32; 1024];
            data.iter().for_each(|&bin| want[bin as usize] += 1);
            assert_eq!(b.download::<u32>(bins, 1024), want, "clusters of {size}");
        }
    });
}

#[test]
fn the_barrier_keeps_working_after_threads_exit() {
    both(|b, m| {
        let rounds = 50;
        let out = b.upload(&[0u32; 16]);
        let p = Params::default().u64(out).i32(rounds as i32);
        b.run(m, "ring", of([8, 1, 1], LaunchConfig::linear(16, 70)), &p.0).unwrap();
        let want: Vec<u32> = (0..16).map(|block| (block + rounds) % 8 + rounds).collect();
        assert_eq!(b.download::<u32>(out, 16), want);
    });
}

#[test]
fn addresses_identify_their_block() {
    both(|b, m| {
        let out = b.upload(&[0u32; 32]);
        b.run(m, "addresses", of([4, 1, 1], LaunchConfig::linear(4, 32)), &out.to_le_bytes()).unwrap();
        let want: Vec<u32> = (0..4)
            .flat_map(|rank| {
                let next = (rank + 1) % 4;
                [10 + next, 10 + next, next, next, 0, 1, 1, rank]
            })
            .collect();
        assert_eq!(b.download::<u32>(out, 32), want);
    });
}

#[test]
fn stores_to_another_block_complete_on_its_barrier() {
    both(|b, m| {
        let out = b.upload(&[0u32; 16]);
        b.run(m, "sent", of([4, 1, 1], LaunchConfig::linear(4, 32)), &out.to_le_bytes()).unwrap();
        let want: Vec<u32> = (0..4).flat_map(|rank| [(rank + 3) % 4, 7, 5, 1011]).collect();
        assert_eq!(b.download::<u32>(out, 16), want);
    });
}

#[test]
fn a_multicast_copy_reaches_several_blocks() {
    both(|b, m| {
        let data: Vec<u32> = (0..64).map(|i| 3 * i).collect();
        let (out, input) = (b.upload(&[0u32; 4 * 64]), b.upload(&data));
        let p = Params::default().u64(out).u64(input);
        b.run(m, "multicast", of([4, 1, 1], LaunchConfig::linear(4, 64)), &p.0).unwrap();
        let got: Vec<u32> = b.download(out, 4 * 64);
        assert_eq!(got[..64], [1; 64]);
        for block in 1..4 {
            assert_eq!(got[64 * block..64 * (block + 1)], data, "block {block}");
        }
    });
}

#[test]
fn invalid_clusters_are_refused() {
    both(|b, m| {
        let out = b.upload(&[0u32; 16]);
        let refused = |name: &str, config: LaunchConfig| {
            let result = b.run(m, name, config, &out.to_le_bytes());
            assert!(matches!(result, Err(Error::InvalidClusterSize(_))), "{config:?}: {result:?}");
            assert_eq!(result.unwrap_err().cuda_code(), 912);
        };
        let six = LaunchConfig::linear(6, 32);
        refused("places", of([4, 1, 1], six));
        refused("places", of([0, 1, 1], six));
        refused("places", of([u32::MAX, 3, 1], six));
        refused("places", of([17, 1, 1], LaunchConfig::linear(17, 32)));
        refused("pairs_of_blocks", of([3, 1, 1], six));
        refused("pairs_of_blocks", LaunchConfig::linear(3, 32));
        b.run(m, "pairs_of_blocks", six, &out.to_le_bytes()).unwrap();
        assert_eq!(b.download::<u32>(out, 7), [2, 2, 2, 2, 2, 2, 0]);
    });
}

#[test]
fn a_cluster_barrier_that_cannot_complete_is_a_deadlock() {
    both(|b, m| {
        let error = b.run(m, "alone", of([2, 1, 1], LaunchConfig::linear(2, 32)), &[]).unwrap_err();
        assert!(matches!(error, Error::Kernel { fault: Fault::Deadlock, .. }), "{error}");
    });
}

#[test]
fn memory_of_a_missing_block_is_an_illegal_address() {
    both(|b, m| {
        let out = b.upload(&[0u32; 64]);
        let config = of([2, 1, 1], LaunchConfig::linear(2, 32));
        let error = b.run(m, "beyond", config, &out.to_le_bytes()).unwrap_err();
        let illegal = matches!(error, Error::Kernel { fault: Fault::IllegalAddress { .. }, .. });
        assert!(illegal, "{error}");
    });
}

/// A kernel that calls `malloc(bytes)` up to `most` times, counts the successes, and frees everything on
/// request.
const HEAP: &str = r"
.version 8.0
.target sm_80
.address_size 64
.extern .func (.param .b64 r) malloc(.param .b64 a);
.extern .func free(.param .b64 a);
.visible .entry take(.param .u64 out, .param .u64 bytes, .param .u32 most, .param .u32 again)
{
 .reg .b64 %o, %b, %p, %last; .reg .b32 %n, %m, %a; .reg .pred %q;
 .param .b64 in; .param .b64 got;
 ld.param.u64 %o, [out]; ld.param.u64 %b, [bytes]; ld.param.u32 %m, [most]; ld.param.u32 %a, [again];
 mov.b32 %n, 0; mov.b64 %last, 0;
LOOP:
 st.param.b64 [in], %b;
 call (got), malloc, (in);
 ld.param.b64 %p, [got];
 setp.eq.u64 %q, %p, 0;
 @%q bra DONE;
 st.u64 [%p], %last;
 mov.b64 %last, %p;
 add.u32 %n, %n, 1;
 setp.lt.u32 %q, %n, %m;
 @%q bra LOOP;
DONE:
 st.global.u32 [%o], %n;
 setp.eq.u32 %q, %a, 0;
 @%q bra END;
FREE:
 setp.eq.u64 %q, %last, 0;
 @%q bra END;
 ld.u64 %p, [%last];
 st.param.b64 [in], %last;
 call free, (in);
 mov.b64 %last, %p;
 bra FREE;
END:
 ret;
}
.visible .entry beyond(.param .u64 bytes)
{
 .reg .b64 %b, %p; .param .b64 in; .param .b64 got;
 ld.param.u64 %b, [bytes];
 st.param.b64 [in], %b;
 call (got), malloc, (in);
 ld.param.b64 %p, [got];
 add.u64 %p, %p, %b;
 st.u8 [%p], 1;
 ret;
}
";

fn take(b: &Bench, m: &Module, bytes: u64, most: i32, free: bool) -> u32 {
    let out = b.upload(&[0u32]);
    let p = Params::default().u64(out).u64(bytes).i32(most).i32(free.into());
    b.run(m, "take", LaunchConfig::linear(1, 1), &p.0).unwrap();
    b.download::<u32>(out, 1)[0]
}

#[test]
fn malloc_stops_at_the_heap_limit_and_reuses_freed_memory() {
    let b = Bench::new();
    let m = b.gpu.load_module(HEAP.as_bytes()).unwrap();
    assert_eq!(take(&b, &m, 1 << 20, 64, true), 7);
    b.gpu.set_heap_limit(16 << 20);
    assert_eq!(take(&b, &m, 1 << 20, 64, true), 15);
    assert_eq!(take(&b, &m, 1 << 20, 64, true), 15);
    assert_eq!(take(&b, &m, 16 << 20, 1, true), 0);
    assert_eq!(take(&b, &m, u64::MAX, 1, true), 0);
    // Small allocations have little overhead: these take 48 bytes each.
    assert_eq!(take(&b, &m, 16, 1 << 20, true), (16 << 20) / 48);
    assert_eq!(take(&b, &m, 8 << 20, 8, false), 1);
    assert_eq!(take(&b, &m, 7 << 20, 8, true), 1);
    assert_eq!(take(&b, &m, 8 << 20, 8, true), 0);
}

#[test]
fn a_byte_beyond_a_heap_allocation_is_an_illegal_address() {
    for bytes in [1u64, 16, 100, 4096] {
        let b = Bench::new();
        let m = b.gpu.load_module(HEAP.as_bytes()).unwrap();
        take(&b, &m, 64, 10, false);
        let error = b.run(&m, "beyond", LaunchConfig::linear(1, 1), &bytes.to_le_bytes()).unwrap_err();
        let illegal = matches!(error, Error::Kernel { fault: Fault::IllegalAddress { .. }, .. });
        assert!(illegal, "{bytes} bytes: {error}");
    }
}
