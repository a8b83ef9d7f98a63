//! Every CUDA test program on this machine's GPU: natively, and as a native client over both transports and
//! in both builds, with the same output.
//!
//! `cargo xtask test gpu` builds what this needs and runs it. A program that passes natively but not through
//! rgpu shows a bug in rgpu; a program that fails natively has a bug itself.

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};
use rgpu_tests::programs::{Device, Program, Way, manifest, same_as_native, told};

/// All ways except the native one.
const WAYS: [Way; 3] =
    [Way::Client("cuda", "local"), Way::Client("cuda", "tcp"), Way::Inside("cuda", "local")];

fn main() -> anyhow::Result<ExitCode> {
    let trial = |name: String| Trial::test(name.clone(), move || Ok(told(same_as_native(&name, &WAYS))?));
    let one_server = |program: &Program| program.device != Device::Servers;
    let trials = manifest()?.into_iter().filter(one_server).map(|program| trial(program.name)).collect();
    Ok(libtest_mimic::run(&Arguments::from_args(), trials).exit_code())
}
