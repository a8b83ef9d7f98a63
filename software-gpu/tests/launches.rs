//! What a launch must satisfy: as an H200 with driver 580 was seen to answer.

#![allow(clippy::unwrap_used)]

#[allow(dead_code)]
mod common;

use common::{Bench, Params};
use software_gpu::{Error, LaunchConfig};

const STORES: &str = ".version 8.0\n.target sm_90\n.address_size 64
.visible .entry k(.param .u64 a, .param .u32 b)
{
    .reg .b64 %a; .reg .b32 %b;
    ld.param.u64 %a, [a];
    ld.param.u32 %b, [b];
    st.global.u32 [%a], %b;
    ret;
}
.visible .entry none() { ret; }
";

fn launch(bytes: usize) -> Result<u32, Error> {
    let bench = Bench::new();
    let module = bench.gpu.load_module(STORES.as_bytes()).unwrap();
    let out = bench.upload(&[7u32]);
    let block = Params::default().u64(out).i32(9).i32(10).0;
    bench.run(&module, "k", LaunchConfig::linear(1, 1), &block[..bytes])?;
    Ok(bench.download::<u32>(out, 1)[0])
}

#[test]
fn a_block_of_parameters_that_is_too_long_is_refused() {
    assert_eq!(launch(12).unwrap(), 9);
    assert_eq!(launch(13).unwrap_err().cuda_code(), 701);
    assert_eq!(launch(16).unwrap_err().cuda_code(), 701);
    let bench = Bench::new();
    let module = bench.gpu.load_module(STORES.as_bytes()).unwrap();
    let one = LaunchConfig::linear(1, 1);
    assert_eq!(bench.run(&module, "none", one, &[0; 8]).unwrap_err().cuda_code(), 701);
    bench.run(&module, "none", one, &[]).unwrap();
}

#[test]
fn what_a_block_of_parameters_lacks_is_zero_unless_it_lacks_all() {
    assert_eq!(launch(8).unwrap(), 0);
    assert_eq!(launch(11).unwrap(), 9);
    assert_eq!(launch(0).unwrap_err().cuda_code(), 1);
}
