//! Every CUDA test program on this machine's GPU: natively, and as a native client over both transports and
//! in both builds, with the same output.
//!
//! `cargo xtask test gpu` builds what this needs and runs it. A program that passes natively but not through
//! rgpu shows a bug in rgpu; a program that fails natively has a bug itself.

use std::path::Path;
use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};
use rgpu_tests::programs::{Device, Program, Way, manifest, same_as_native, told};

/// All ways except the native one.
const WAYS: [Way; 3] =
    [Way::Client("cuda", "local"), Way::Client("cuda", "tcp"), Way::Inside("cuda", "local")];

fn main() -> anyhow::Result<ExitCode> {
    let trial = |name: String| Trial::test(name.clone(), move || Ok(told(same_as_native(&name, &WAYS))?));
    let several = Path::new("/dev/nvidia1").exists();
    let can_run = |program: &Program| match program.device {
        Device::Any | Device::Cuda => true,
        Device::Peers => several,
        Device::Servers => false,
    };
    let trials = manifest()?.into_iter().filter(can_run).map(|program| trial(program.name)).collect();
    Ok(libtest_mimic::run(&Arguments::from_args(), trials).exit_code())
}
