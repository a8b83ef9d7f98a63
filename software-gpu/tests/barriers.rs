//! Barriers that count threads: they count whole warps, whatever their threads do.

#![allow(clippy::unwrap_used)]

mod common;

use common::Bench;
use software_gpu::{Error, LaunchConfig};

/// Runs `work` in a block of so many threads; `%t` is the thread. Each thread of the last warp that gets to
/// the end adds to the result.
fn arrivals(threads: u32, work: &str) -> Result<u32, Error> {
    let text = format!(
        ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 o)\n{{\n .reg .b64 %o; .reg .b32 %t; .reg .pred %p, %q;\n \
         ld.param.u64 %o, [o]; mov.u32 %t, %tid.x;\n {work}\n red.global.add.u32 [%o], 1; ret;\n}}\n"
    );
    let bench = Bench::new();
    let module = bench.gpu.load_module(text.as_bytes()).unwrap();
    let out = bench.upload(&[0u32]);
    bench.run(&module, "k", LaunchConfig::linear(1, threads), &out.to_le_bytes())?;
    Ok(bench.download::<u32>(out, 1)[0])
}

#[test]
fn the_last_warp_may_have_fewer_threads() {
    assert_eq!(arrivals(48, "bar.sync 1, 64;").unwrap(), 48);
    assert_eq!(arrivals(33, "bar.sync 1, 64; bar.sync 1, 64; bar.sync 2, 64;").unwrap(), 33);
}

#[test]
fn threads_may_have_exited_or_exit_later() {
    let before = "setp.ge.u32 %p, %t, 100; @%p exit; bar.sync 0, 128;";
    assert_eq!(arrivals(128, before).unwrap(), 100);
    // The other threads of the warp exit while these wait.
    let after = "setp.lt.u32 %p, %t, 100; @%p bra A; bar.warp.sync 0xfffffff0; bar.warp.sync 0xfffffff0; exit; \
                 A: bar.sync 0, 128; bar.sync 0, 128;";
    assert_eq!(arrivals(128, after).unwrap(), 100);
}

#[test]
fn warps_may_arrive_in_parts_and_without_waiting() {
    let parts = "setp.lt.u32 %p, %t, 10; @%p bra A; bar.sync 0, 64; bra B; A: bar.sync 0, 64; B:";
    assert_eq!(arrivals(48, parts).unwrap(), 48);
    let producer = "setp.lt.u32 %p, %t, 32; @%p bra A; bar.arrive 1, 64; bar.arrive 2, 64; exit; A: bar.sync 1, 64; bar.sync 2, 64;";
    assert_eq!(arrivals(40, producer).unwrap(), 32);
}

#[test]
fn reductions_are_of_threads() {
    let all = "setp.lt.u32 %p, %t, 48; barrier.red.and.pred %q, 1, 64, %p; @!%q exit;";
    assert_eq!(arrivals(48, all).unwrap(), 48);
}

#[test]
fn a_warp_that_does_not_come_is_waited_for() {
    let missing = arrivals(64, "setp.lt.u32 %p, %t, 32; @!%p exit; bar.sync 1, 64;").unwrap_err();
    assert!(missing.to_string().contains("deadlock"), "{missing}");
}
