//! Kernels that launch kernels, compiled by nvcc.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Bench, Params};
use software_gpu::{LaunchConfig, Module};

fn both(test: impl Fn(&Bench, &Module)) {
    for text in [include_bytes!("ptx/nested.ptx").as_slice(), include_bytes!("ptx/nested.O0.ptx").as_slice()]
    {
        let bench = Bench::new();
        let module = bench.gpu.load_module(text).unwrap();
        test(&bench, &module);
    }
}

#[test]
fn a_kernel_finishes_after_all_its_child_kernels() {
    both(|b, m| {
        let n = 4096;
        let memory = b.upload(&vec![0i32; n]);
        for round in 1..=2 {
            let p = Params::default().u64(memory).i32(n as i32).i32(6);
            b.run(m, "tree", LaunchConfig::linear(1, 32), &p.0).unwrap();
            assert_eq!(b.download::<i32>(memory, n), vec![7 * round; n]);
        }
    });
}

#[test]
fn child_launches_run_in_order_and_tail_launches_last() {
    both(|b, m| {
        let list = b.upload(&[0i32; 8]);
        b.run(m, "order", LaunchConfig::linear(1, 1), &list.to_le_bytes()).unwrap();
        assert_eq!(b.download::<i32>(list, 8), [5, 1, 2, 3, 4, 5, 0, 0]);
    });
}

#[test]
fn an_invalid_child_launch_only_sets_the_threads_last_error() {
    both(|b, m| {
        let out = b.upload(&[0i32; 16]);
        b.run(m, "refused", LaunchConfig::linear(1, 1), &out.to_le_bytes()).unwrap();
        // cudaErrorInvalidConfiguration
        assert_eq!(b.download::<i32>(out, 10), [9, 9, 0, 9, 0, 9, 0, 0, 1, 77]);
    });
}

#[test]
fn a_kernel_can_relaunch_itself_repeatedly() {
    both(|b, m| {
        let count = b.upload(&[0i32]);
        let p = Params::default().u64(count).i32(1000);
        b.run(m, "again", LaunchConfig::linear(1, 1), &p.0).unwrap();
        assert_eq!(b.download::<i32>(count, 1), [1000]);
    });
}

#[test]
fn nesting_depth_is_not_limited() {
    both(|b, m| {
        let out = b.upload(&[0i32; 256]);
        let p = Params::default().u64(out).i32(0).i32(100);
        b.run(m, "deeper", LaunchConfig::linear(1, 1), &p.0).unwrap();
        let mut want = vec![0; 256];
        want[..=100].fill(1);
        assert_eq!(b.download::<i32>(out, 256), want);
    });
}

#[test]
fn pending_tail_launches_are_limited() {
    both(|b, m| {
        let out = b.upload(&[0i32; 4096]);
        b.run(m, "tails", LaunchConfig::linear(1, 1), &Params::default().u64(out).i32(3000).0).unwrap();
        let got: Vec<i32> = b.download(out, 4096);
        // cudaErrorLaunchPendingCountExceeded
        assert_eq!((&got[..2], got[8]), (&[2048, 69][..], 2048));
    });
}

#[test]
fn copies_and_fills_run_in_order_and_report_errors() {
    both(|b, m| {
        let (memory, codes) = (b.upload(&[0xffu8; 256]), b.upload(&[-1i32; 18]));
        let p = Params::default().u64(memory).u64(codes);
        b.run(m, "transfers", LaunchConfig::linear(1, 1), &p.0).unwrap();
        // cudaErrorInvalidMemcpyDirection, cudaErrorInvalidValue, cudaErrorMemoryAllocation
        assert_eq!(b.download::<i32>(codes, 18), [0, 0, 0, 0, 21, 21, 1, 1, 1, 1, 0, 1, 6000, 1, 0, 2, 1, 1]);
        assert_eq!(b.download::<i32>(memory, 8), [2, 7, 8, 0, 1, 7, 0, 0]);
        let bytes: Vec<u8> = b.download(memory, 256);
        let rows = [[3u8; 8], [0xff; 8]].concat();
        assert_eq!(bytes[64..128], rows.repeat(4));
        assert_eq!(bytes[128..160], [3; 32]);
    });
}
